"""A script: train a run whose worker is killed at random moments until it was often enough.

`python killed_runs.py <run folder> <kills> <seed>`; the folder holds a `config.yaml`. All workers
are forked from this process, which has imported everything and computed nothing, so that a start
takes a moment.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import torch

import medseg.training.callbacks
import medseg.training.data_module
import medseg.training.history
import medseg.training.loggers
from medseg.runs.folder import load_config
from medseg.runs.train_run import train_run
from medseg.training.module import SegmentationModule


def start(run_dir: Path) -> tuple[int, int]:
    """Fork a worker; returns its process and a pipe on which it tells each step that it begins."""
    reader, writer = os.pipe()
    process = os.fork()
    if process:
        os.close(writer)
        return process, reader
    os.close(reader)
    begin = SegmentationModule.on_train_batch_start

    def tell(module: SegmentationModule, batch: object, batch_idx: int) -> None:
        os.write(writer, b".")
        begin(module, batch, batch_idx)

    SegmentationModule.on_train_batch_start = tell
    # As the fixture `without_pictures` does for the undisturbed run.
    medseg.training.callbacks.overlay_montage = lambda *_, **__: []
    code = 1
    try:
        train_run(load_config(run_dir))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def main() -> None:
    run_dir, num_kills, rng = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    moments = []
    for _ in range(num_kills):
        process, reader = start(run_dir)
        for _ in range(rng.randrange(1, 6)):
            assert os.read(reader, 1), "the run ended before it was killed often enough"
        time.sleep(rng.uniform(0, 0.06))  # a step or two of the tiny run
        os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
        assert os.WIFSIGNALED(status), "the run ended before it was killed often enough"
        os.close(reader)
        last = run_dir / "checkpoints" / "last.ckpt"
        moments.append(
            torch.load(last, weights_only=True, mmap=True)["global_step"] if last.is_file() else 0
        )
    process, reader = start(run_dir)
    while os.read(reader, 4096):
        pass
    print("saved at the kills:", moments)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))


if __name__ == "__main__":
    main()
