"""Devices of a run: CPU or GPU, and the device map of a network."""

import os

import torch

from medseg.build.extensions import make_loss
from medseg.build.network import make_network, make_network_on_meta
from medseg.build.task import make_task
from medseg.config.schema import Accelerator, TrainConfig
from medseg.config.targets import bind_target
from medseg.errors import UserError


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
    return torch.device("cuda" if accelerator is not Accelerator.cpu and torch.cuda.is_available() else "cpu")


def pick_device_type(accelerator: Accelerator) -> str:
    """Kind of device that a run is planned for: `cuda` where it asks for a GPU, even if this machine has none."""
    return "cuda" if accelerator is Accelerator.gpu else pick_device(accelerator).type


def propose_workers(config: TrainConfig) -> int:
    """Choose the default number of loader processes of a rank; `tune_loader` measures a better one.

    On a CPU it is one, so that the network gets the processors. On a GPU it is the share of a rank in the processors, less one for the
    rank itself, at most eight.
    """
    if pick_device(config.trainer.accelerator).type == "cpu":
        return 1
    num_processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(8, num_processors // config.trainer.devices - 1))


def make_device_map(config: TrainConfig) -> dict[str, str]:
    """Map each part of the network to a device, as `model.device_map` says; `auto` balances the bytes of a step over all GPUs.

    Raises:
        UserError: If a named device or part does not exist, or `auto` finds fewer than two GPUs.
    """
    from medseg.memory.accounting import count_step
    from medseg.memory.device_map import named_parts, plan_device_map, resolve_device_map

    given = config.model["device_map"]
    gpus = {f"cuda:{index}": torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())}
    parts = named_parts(make_network_on_meta(config))
    if given != "auto":
        missing = sorted({device for device in given.values() if device != "cpu" and device not in gpus})
        if missing:
            raise UserError(f"model.device_map: there is no {', '.join(missing)} here; there are {', '.join(('cpu', *gpus))}")
        try:
            return resolve_device_map(list(parts), given)
        except ValueError as error:
            raise UserError(f"model.{error}") from error
    if len(gpus) < 2:
        raise UserError(f"model.device_map=auto divides a network among GPUs, and torch sees {len(gpus)}; leave it out")
    memory = count_step(
        lambda: make_network(config),
        (1, len(make_task(config.task).channels), *(config.stage.patch_size or config.spacing.size or (128, 128, 128))),
        loss=make_loss(config),
        make_optimizer=bind_target("optimizer", "optimizer", config.optimizer, None, trusted=config.trusted_targets),
        precision=config.memory.precision.value,
    )
    # Bytes that a step holds per byte of weights: the weights, their gradients and the optimiser state.
    held = (memory.parameters + memory.gradients + memory.optimizer_state) / memory.parameters
    weights = {name: sum(p.nbytes for module in modules for p in module.parameters()) for name, modules in parts.items()}
    in_order = dict.fromkeys((*memory.order, *parts))  # parts that did not run in the counted step come last
    sizes = {name: memory.saved.get(name, 0) + round(held * weights[name]) for name in in_order}
    return plan_device_map(sizes, gpus)
