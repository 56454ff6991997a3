"""Callback of the tiny training by which `plan` calibrates itself: memory and processor time.

Both are read at events of the training. A program that watches from outside would read at moments
that depend on the load of the machine. It might see a process that has been forked to start another
program and still shares all of its parent's memory, or workers that inherit the pages of a training
that ends.
"""

import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
from torch import nn

from medseg.memory.profile import bytes_beside, peak_resident_bytes, private_bytes, resident_bytes


class RehearsalWatch(pl.Callback):
    """Write the memory and time of a training beside its tensors and operations, as JSON.

    The keys of the file:

    * `main`: bytes of the training process when it evaluates a case.
    * `helpers`: bytes of its child processes other than loader workers.
    * `pictures`: further bytes of the training process when it draws a validation or saves.
    * `worker`: bytes that a loader worker does not share, mean over the workers.
    * `copies`: bytes that the workers hold together, see `bytes_beside`.
    * `seconds`: processor time of a step without network, loss and optimiser, median of the steps.

    Args:
        path: File, written when the training ends.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.main = self.helpers = self.worker = self.copies = 0  # largest bytes so far
        self.steps_s: list[float] = []  # processor time of each step without computation
        # The present step, by the clock of the processor time.
        self.step_start_s: float | None = None  # None where it is not known
        self.computed_s = 0.0  # duration of its computation so far
        self.counted_until_s: float | None = None  # None before its first forward pass

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Register hooks that time the computation of each step: network, loss and optimiser.

        Lightning runs the forward and the backward pass inside the step of the optimiser. The clock
        runs from the first forward pass to the end of that step, so that they count once.
        """
        pl_module.network.register_forward_pre_hook(self._start_network)  # type: ignore[union-attr]
        for optimizer in trainer.optimizers:
            optimizer.register_step_post_hook(self._count_computing)

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Count the forward and the backward pass.

        After the last micro-batch the optimiser's hook adds the time up to the end of its step.
        """
        self._count_computing()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Note the time of the step, and read the memory of the other processes."""
        # Processor time, which other programs on the machine do not lengthen.
        now_s = time.process_time()
        if self.step_start_s is not None:
            self.steps_s.append(now_s - self.step_start_s - self.computed_s)
        self._read_memory(trainer)
        self.computed_s = 0.0
        self.counted_until_s = None
        # The next step begins only here, so that reading the memory is not a part of it.
        self.step_start_s = time.process_time()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Read the memory; the next step, whose time contains this validation, is not timed."""
        self._read_memory(trainer)
        self.step_start_s = None

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the file."""
        numbers = {
            "main": self.main,
            "helpers": self.helpers,
            "pictures": max(0, peak_resident_bytes() - self.main),
            "worker": self.worker,
            "copies": self.copies,
            "seconds": statistics.median(self.steps_s),
        }
        self.path.write_text(json.dumps(numbers), encoding="utf-8")

    def _start_network(self, network: nn.Module, *_: Any) -> None:
        # Before an evaluation there are neither gradients nor activations, so the resident memory
        # is that of the process itself.
        if not network.training:
            self.main = max(self.main, resident_bytes())
            return
        # The network runs once for each stack of a micro-batch; the first run starts the clock.
        if self.counted_until_s is None:
            self.counted_until_s = time.process_time()

    def _count_computing(self, *_: Any) -> None:
        """Count the time since the last count as computation."""
        assert self.counted_until_s is not None, "a forward pass comes first"
        now_s = time.process_time()
        self.computed_s += now_s - self.counted_until_s
        self.counted_until_s = now_s

    def _read_memory(self, trainer: pl.Trainer) -> None:
        """Keep the largest memory of workers and helpers so far."""
        # Torch's loader with persistent workers keeps its iterator, which keeps the processes.
        iterator = getattr(trainer.train_dataloader, "_iterator", None)
        worker_pids = [process.pid for process in getattr(iterator, "_workers", ())]
        child_pids = [process.pid for process in psutil.Process().children(recursive=True)]
        helpers = sum(private_bytes(pid) for pid in child_pids if pid not in worker_pids)
        self.helpers = max(self.helpers, helpers)
        if not worker_pids:
            return
        private = sum(private_bytes(pid) for pid in worker_pids)
        private_and_copies = bytes_beside(os.getpid(), worker_pids)
        self.worker = max(self.worker, private // len(worker_pids))
        self.copies = max(self.copies, private_and_copies - private)
