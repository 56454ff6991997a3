"""Row measurement of the ladder: bytes and seconds of a training step, for the configured network or a baseline."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

from medseg.build.device import pick_device
from medseg.build.loss import make_loss
from medseg.build.network import make_network
from medseg.build.optimisation import find_lr_factor, make_optimizer
from medseg.build.switches import switch_on
from medseg.build.task import make_task
from medseg.config.schema import TrainConfig
from medseg.errors import UserError
from medseg.memory.precision import autocast, check_precision, set_tf32
from medseg.planning.plan import Shape, count_memory, samples_per_rank
from medseg.studies.baselines import make_baseline


def measure_row(
    config: TrainConfig, shape: Shape, timed_steps: int, baseline: str | None = None, packages: Path | None = None
) -> dict[str, Any]:
    """Count the bytes of a training step and time it.

    Args:
        config: Checked configuration.
        shape: Voxels of a sample, (D, H, W).
        timed_steps: Steps to time after a first one to warm up; 0 = none.
        baseline: Key of `BASELINES`, to replace the configured network; None = the configured network.
        packages: Folder of the baselines' packages, which must come before those of this environment.

    Returns:
        Saved bytes per voxel, bytes at the peak and bytes of the parameters. If timed: seconds of the fastest step and the device; on a
        GPU also the largest number of bytes that torch's allocator held.

    Raises:
        UserError: If the device does not support the precision, or the step cannot be counted.
    """
    if packages is not None:
        sys.path.insert(0, str(packages))
    num_classes = make_task(config.task).num_region_classes
    try:
        check_precision(config.memory.precision.value, pick_device(config.trainer.accelerator).type)
    except ValueError as error:
        raise UserError(f"memory.{error}") from error
    memory = count_memory(config, shape, (lambda: make_baseline(baseline, num_classes)) if baseline else None)
    measured = {"saved_per_voxel": memory.saved_per_voxel, "peak_bytes": memory.peak, "parameter_bytes": memory.parameters}
    return measured | (time_steps(config, shape, timed_steps, baseline) if timed_steps else {})


def time_steps(config: TrainConfig, shape: Shape, timed_steps: int, baseline: str | None) -> dict[str, Any]:
    """Run training steps on noise; arguments and result as in `measure_row`."""
    task, precision = make_task(config.task), config.memory.precision.value
    device = pick_device(config.trainer.accelerator)
    set_tf32(precision)
    if config.trainer.threads:
        torch.set_num_threads(config.trainer.threads)
    torch.manual_seed(config.seed)
    samples = samples_per_rank(config)
    inputs = [torch.rand(samples, 1, *shape, device=device) * 2 - 1]
    if baseline:
        network = make_baseline(baseline, task.num_region_classes).to(device)
    else:
        ours = make_network(config).to(device)
        network = switch_on(ours, config.memory, device.type, sync_batchnorm=config.trainer.sync_batchnorm)
        inputs.append(torch.zeros(samples, dtype=torch.int64, device=device))  # number of the region of each sample
    target = torch.randint(task.num_region_classes, (samples, *shape), dtype=torch.uint8, device=device)
    lr_factor = find_lr_factor(config.lr_scaling, config.stage.batch_size)
    loss, optimizer = make_loss(config.loss), make_optimizer(config.optimizer, lr_factor)(network.parameters())
    durations_s = []
    for _ in range(timed_steps + 1):
        start_s = time.perf_counter()
        for _ in range(config.memory.accumulate):
            with autocast(precision, device.type):
                value = loss(network(*inputs), target)
            value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize()  # kernels run asynchronously
        durations_s.append(time.perf_counter() - start_s)
    timed = {"seconds_per_step": min(durations_s[1:])}
    if device.type == "cuda":
        return {**timed, "device": torch.cuda.get_device_name(), "peak_allocated_bytes": torch.cuda.max_memory_allocated()}
    return {**timed, "device": f"{torch.get_num_threads()} CPU thread{'s' * (torch.get_num_threads() > 1)}"}
