"""Loader tuning: batches per second by workers, prefetched batches and pinned memory."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from medseg.config.schema import TuneLoaderConfig
from medseg.data.spacing import find_spacing
from medseg.memory.device import pick_device
from medseg.processors import num_processors
from medseg.training.assemble import make_data_module
from medseg.training.data_module import CasesDataModule

# A setting that needs more of the machine must be faster by this factor.
GAIN = 1.05


class Setting(NamedTuple):
    """Arguments of the loader, see `DataOptions`.

    Attributes:
        num_workers: Loader processes; 0 = the training process makes the batches itself.
        prefetch: Batches that each worker makes ahead.
        pin_memory: Whether batches are in pinned memory, from which a GPU copies faster.
    """

    num_workers: int
    prefetch: int
    pin_memory: bool

    def arguments(self, *, has_gpu: bool) -> str:
        """Write the setting as arguments of `train`."""
        arguments = f"data.num_workers={self.num_workers}"
        if self.num_workers:
            arguments += f" data.prefetch={self.prefetch}"
        # Without the argument `train` pins memory if it has a GPU, and only then.
        if has_gpu:
            arguments += f" data.pin_memory={str(self.pin_memory).lower()}"
        return arguments


def tune_loader(config: TuneLoaderConfig) -> int:
    """Time the same batches under each setting; print the table and the best setting.

    Returns:
        0, the exit status.
    """
    find_spacing(config.spacing, config.data, config.task)
    device = pick_device(config.trainer.accelerator)
    workers = config.workers or default_workers(num_processors())
    has_gpu = device.type == "cuda"
    tried_settings = settings(workers, config.prefetches, has_gpu=has_gpu)
    # The data must last for the micro-batches that workers make ahead and for those that are timed.
    # A step has at least one micro-batch, so as many steps suffice.
    most_ahead = max(setting.num_workers * setting.prefetch for setting in tried_settings)
    data = make_data_module(replace(config, steps=most_ahead + config.num_batches))
    data.prepare_data()
    data.setup("fit")
    # The first pass reads the cache from the disk, and is not counted.
    time_batches(data, tried_settings[0], config.num_batches, device)
    rates: dict[Setting, float] = {}
    labels = {setting: setting.arguments(has_gpu=has_gpu) for setting in tried_settings}
    width = max(map(len, labels.values()))
    print(f"{'':{width}s}{'batches/s':>12s}")
    for setting, label in labels.items():
        seconds = time_batches(data, setting, config.num_batches, device)
        rates[setting] = config.num_batches / seconds
        print(f"{label:{width}s}{rates[setting]:12.2f}", flush=True)
    best = propose(rates)
    # The loader makes micro-batches, of which a step takes `memory.accumulate`.
    step_s = config.memory.accumulate / rates[best]
    print(f"take: {labels[best]}   (the loader keeps up with steps longer than {step_s:.3f} s)")
    return 0


def default_workers(num_processors: int) -> list[int]:
    """Numbers of workers to try: none, and the powers of two up to the number of processors.

    Example:
        >>> default_workers(6)
        [0, 1, 2, 4]
    """
    # A number of n bits is at least 2^(n - 1), and less than 2^n.
    powers = [2**exponent for exponent in range(num_processors.bit_length())]
    return [0, *powers]


def settings(workers: Sequence[int], prefetches: Sequence[int], *, has_gpu: bool) -> list[Setting]:
    """List the settings to try, the least demanding first.

    Prefetching needs workers, and pinned memory is for GPUs.
    """
    pinnings = (False, True) if has_gpu else (False,)
    all_settings = []
    for num_workers in sorted(workers):
        # Without workers the prefetch is not used, so one setting with any number is enough.
        numbers_ahead = sorted(prefetches) if num_workers else [2]
        for prefetch, pin_memory in itertools.product(numbers_ahead, pinnings):
            all_settings.append(Setting(num_workers, prefetch, pin_memory))
    return all_settings


def time_batches(
    data: CasesDataModule, setting: Setting, num_batches: int, device: torch.device
) -> float:
    """Measure the seconds until a number of micro-batches are on the device.

    Batches that the workers make ahead are taken first, and are not counted.
    """
    data.num_workers, data.prefetch, data.pin_memory = setting
    batches = iter(data.train_batches())
    for _ in range(setting.num_workers * setting.prefetch):
        next(batches)
    start_s = time.perf_counter()
    for _ in range(num_batches):
        # A micro-batch is a list of stacks; the samples of a stack have the same shape.
        for stack in next(batches):
            stack["image"].to(device, non_blocking=True)
    # The copies to a GPU may still be under way.
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start_s


def propose(rates: dict[Setting, float]) -> Setting:
    """Choose the least demanding setting that no other one beats by more than GAIN.

    Args:
        rates: Micro-batches per second by setting, the least demanding first.
    """
    highest_rate = max(rates.values())
    return next(setting for setting, rate in rates.items() if rate * GAIN >= highest_rate)
