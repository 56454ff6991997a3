"""One row of the ladder, measured in a process of its own: `python -m medseg.studies.measurement <folder of the row>`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from medseg.config.schema import TrainConfig
from medseg.console import say
from medseg.errors import EXIT_USER_ERROR, UserError
from medseg.planning.plan import Shape, count, samples_per_rank
from medseg.runs.folder import load_config, replace_text
from medseg.studies.baselines import make_peer

REQUEST_FILE = "request.json"
MEASURED_FILE = "measured.json"


def main() -> None:
    """Measure the row whose folder is named on the command line."""
    folder = Path(sys.argv[1])
    request = json.loads((folder / REQUEST_FILE).read_text(encoding="utf-8"))
    try:
        measured = measure(load_config(folder), request["shape"], request["timed_steps"], request["peer"])
    except UserError as error:
        say(str(error))
        sys.exit(EXIT_USER_ERROR)
    replace_text(folder / MEASURED_FILE, json.dumps({"request": request, **measured}, indent=1))


def measure(config: TrainConfig, shape: Shape, timed_steps: int, peer: str | None) -> dict[str, Any]:
    """Count the bytes of a training step and time it.

    Args:
        config: Checked configuration.
        shape: Voxels of a sample, (D, H, W).
        timed_steps: Steps to time after one to warm up; 0 = none.
        peer: Network of others in the place of the configured one, see `peers.PEERS`.

    Returns:
        Saved bytes per voxel, bytes at the peak, number of weights and, where it was timed, seconds of the fastest step and
        the device; with a GPU also the bytes that torch's allocator held at the peak.
    """
    from medseg.build.device import pick_device
    from medseg.build.task import make_task
    from medseg.memory.precision import check_precision

    num_classes = make_task(config.task).num_region_classes
    try:
        check_precision(config.memory.precision.value, pick_device(config.trainer.accelerator).type)
    except ValueError as error:
        raise UserError(f"memory.{error}") from error
    memory = count(config, shape, (lambda: make_peer(peer, num_classes)) if peer else None)
    measured = {
        "saved_per_voxel": memory.saved_per_voxel,
        "peak_bytes": memory.peak,
        "parameter_bytes": memory.parameters,
    }
    return {**measured, **time_steps(config, shape, timed_steps, peer)} if timed_steps else measured


def time_steps(config: TrainConfig, shape: Shape, timed_steps: int, peer: str | None) -> dict[str, Any]:
    """Run training steps on noise, as `measure` describes them."""
    import torch

    from medseg.build.device import pick_device
    from medseg.build.loss import make_loss
    from medseg.build.network import make_network
    from medseg.build.optimisation import make_optimizer
    from medseg.build.switches import switch_on
    from medseg.build.task import make_task
    from medseg.memory.precision import autocast, set_tf32

    task, precision = make_task(config.task), config.memory.precision.value
    device = pick_device(config.trainer.accelerator)
    set_tf32(precision)
    if config.trainer.threads:
        torch.set_num_threads(config.trainer.threads)
    torch.manual_seed(config.seed)
    samples = samples_per_rank(config)
    arguments = [torch.rand(samples, 1, *shape, device=device) * 2 - 1]
    if peer:
        network = make_peer(peer, task.num_region_classes).to(device)
    else:
        ours = make_network(config).to(device)
        network = switch_on(ours, config, device.type)
        arguments.append(torch.zeros(samples, dtype=torch.int64, device=device))
    target = torch.randint(task.num_region_classes, (samples, *shape), dtype=torch.uint8, device=device)
    loss = make_loss(config)
    optimizer = make_optimizer(config)(network.parameters())
    on_gpu = device.type == "cuda"
    durations_s = []
    for _ in range(timed_steps + 1):
        start_s = time.perf_counter()
        for _ in range(config.memory.accumulate):
            with autocast(precision, device.type):
                value = loss(network(*arguments), target)
            value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if on_gpu:
            torch.cuda.synchronize()
        durations_s.append(time.perf_counter() - start_s)
    timed = {"seconds_per_step": min(durations_s[1:])}
    if on_gpu:
        return {**timed, "device": torch.cuda.get_device_name(), "peak_allocated_bytes": torch.cuda.max_memory_allocated()}
    return {**timed, "device": f"{torch.get_num_threads()} CPU thread{'s' * (torch.get_num_threads() > 1)}"}


if __name__ == "__main__":
    main()
