"""Device of a run, CPU or GPU, and the precision that it can compute in."""

import contextlib

import torch
from torch.nn import functional

from medseg.console import say
from medseg.errors import UserError
from medseg.memory.options import Accelerator, MemoryOptions, Precision
from medseg.memory.precision import inference_precision, supported_precision


def pick_device(accelerator: Accelerator, key: str = "trainer.accelerator") -> torch.device:
    """Choose between CPU and GPU; `auto` takes a GPU where there is one.

    Args:
        accelerator: Value of the key.
        key: Name of the key, for the message.

    Raises:
        UserError: If a GPU is asked for and torch finds none.
    """
    if accelerator is Accelerator.cpu:
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    if accelerator is Accelerator.gpu:
        raise UserError(f"{key}=gpu: torch sees no GPU here; choose {key}=cpu")
    return torch.device("cpu")


def pick_device_type(accelerator: Accelerator) -> str:
    """Kind of device that a run is planned for.

    It is `cuda` where the run asks for a GPU, even if this machine has none.
    """
    if accelerator is Accelerator.gpu:
        return "cuda"
    return pick_device(accelerator).type


def start_libraries(device: torch.device) -> None:
    """Run a convolution in each number format, so that a device's libraries load now.

    CUDA's libraries then occupy hundreds of MB of host memory and of GPU memory. Measurements of
    memory after this call contain these bytes from the start.
    """
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        image = torch.zeros(1, 8, 8, 8, 8, dtype=dtype, device=device, requires_grad=True)
        weight = torch.zeros(8, 8, 3, 3, 3, dtype=dtype, device=device, requires_grad=True)
        # A device may lack a format.
        with torch.enable_grad(), contextlib.suppress(RuntimeError):
            functional.conv3d(image, weight).sum().backward()


def use_supported_half(memory: MemoryOptions, accelerator: Accelerator) -> None:
    """Replace bf16 by fp16 where the GPU of a run has no arithmetic in bf16, and say so.

    Args:
        memory: Changed in place.
        accelerator: Value of `trainer.accelerator`.
    """
    precision = supported_precision(memory.precision.value, pick_device_type(accelerator))
    if precision == memory.precision.value:
        return
    say(
        f"memory.precision=bf16: {torch.cuda.get_device_name()} has no arithmetic in bf16 "
        "(compute capability below 8.0); this run computes in fp16, with loss scaling in training"
    )
    memory.precision = Precision(precision)


def stage_precision(name: str, asked: str | None, trained: str, device_type: str) -> str:
    """Choose the precision in which a trained stage runs; print it if fp16 replaces bf16.

    Args:
        name: Name of the stage, for the message.
        asked: Precision that the user asks for; None = that of the training, see
            `inference_precision`.
        trained: Precision of the training.
        device_type: `cpu` or `cuda`.

    Returns:
        A precision that the device has, such as `bf16`.
    """
    if asked is None:
        precision = inference_precision(trained, device_type)
    else:
        precision = supported_precision(asked, device_type)
    preferred = asked or trained
    if preferred == "bf16" and precision == "fp16":
        say(
            f"the {name} stage computes in fp16: {torch.cuda.get_device_name()} has no arithmetic "
            "in bf16 (compute capability below 8.0)"
        )
    return precision
