"""Device of a run: CPU or GPU."""

import torch

from medseg.errors import UserError
from medseg.memory.options import Accelerator


def pick_device(accelerator: Accelerator, key: str = "trainer.accelerator") -> torch.device:
    """Choose between CPU and GPU; `auto` takes a GPU where there is one.

    Args:
        accelerator: Value of the key.
        key: Name of the key, for the message.

    Raises:
        UserError: If a GPU is asked for and torch finds none.
    """
    if accelerator is Accelerator.gpu and not torch.cuda.is_available():
        raise UserError(f"{key}=gpu: torch sees no GPU here; choose {key}=cpu")
    return torch.device(
        "cuda" if accelerator is not Accelerator.cpu and torch.cuda.is_available() else "cpu"
    )


def pick_device_type(accelerator: Accelerator) -> str:
    """Kind of device that a run is planned for: `cuda` where it asks for a GPU, even if this machine has none."""
    return "cuda" if accelerator is Accelerator.gpu else pick_device(accelerator).type
