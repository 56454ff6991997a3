"""Memory of a run besides its tensors: libraries and loader workers, and the memory and seconds of making a sample."""

import hashlib
import importlib.metadata
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from medseg.config.schema import PlanConfig
from medseg.errors import UserError
from medseg.io.atomic import replace_text
from medseg.memory.profile import private_bytes
from medseg.planning.step import Shape
from medseg.runs.folder import read_summary
from medseg.runs.signature import plain

INTERVAL_S = 0.02
# A training of the smallest size with one loader worker, two validations, their pictures and checkpoints.
REHEARSAL = [
    "train", "stage=coarse", "steps=8", "history_every=2", "stage.validate_every=4", "stage.patch_size=[16,16,16]",
    "inference.tile_size=[16,16,16]", "stage.slab_share=0", "data.phantoms.num_train=1", "data.phantoms.num_val=1", "data.phantoms.num_test=0",
    "data.num_workers=1", "trainer.accelerator=cpu", "trainer.threads=1", "spacing=isotropic_4mm",
]  # fmt: skip
# A small network of ours or of MONAI, whose libraries take more memory.
SMALL_UNET = ["model.width=4", "model.depth=1", "model.blocks_per_level=[1,1]"]
SMALL_MONAI = ["model=segresnet", "model.init_filters=8", "model.blocks_down=[1,1,1]", "model.blocks_up=[1,1]"]


class ProcessCost(NamedTuple):
    """Cost of a run without its tensors.

    Attributes:
        main: Resident bytes of the training process: interpreter, libraries, a picture.
        worker: Resident bytes of a loader worker, beyond what it shares with the training process.
        seconds: Duration of a step whose operations take nearly no time.
    """

    main: int
    worker: int
    seconds: float


class SampleCost(NamedTuple):
    """Cost of making a training sample.

    Attributes:
        num_bytes: Memory while it is made.
        seconds: Duration on one thread.
    """

    num_bytes: int
    seconds: float


def process_cost(folder: Path, *, has_logger: bool, has_monai: bool) -> ProcessCost:
    """Measure the resident memory and the seconds of a run beside its tensors by a tiny training; read them where they were measured before.

    Args:
        folder: Folder of the machine's measurements.
        has_logger: Whether a logger is loaded, which brings libraries of its own.
        has_monai: Whether the network is one of MONAI's, likewise.

    Raises:
        UserError: If the training fails.
    """
    names = ("medseg", "torch", "lightning", "monai", "matplotlib", "numpy", "tensorboard")
    versions = " ".join(f"{name} {importlib.metadata.version(name)}" for name in names if _is_installed(name))
    path = folder / f"process {versions}{'' if has_logger else ' no logger'}{' MONAI network' if has_monai else ''}.json"
    known = _read(path, 3)
    if known is not None:
        return ProcessCost(int(known[0]), int(known[1]), known[2])
    with tempfile.TemporaryDirectory(prefix="medseg-plan-") as name:
        parts = [*(SMALL_MONAI if has_monai else SMALL_UNET), *([] if has_logger else ["logger=none"])]
        parts += [f"data.phantoms.folder={name}/phantoms", f"data.cache={name}/cache"]
        # The first training also makes scan and cache, which takes more memory.
        first, second = (
            _watched_training([*REHEARSAL, *parts, f"hydra.run.dir={run_dir}"], run_dir)
            for run_dir in (Path(name) / "first", Path(name) / "second")
        )
        found = second._replace(seconds=min(first.seconds, second.seconds))
    with suppress(UserError):  # a folder that cannot be written: measured again the next time
        replace_text(path, json.dumps(found))
    return found


def _watched_training(arguments: list[str], run_dir: Path) -> ProcessCost:
    """Run a training in a process of its own and watch its memory and that of its worker."""
    log = run_dir.with_suffix(".log")
    command = [sys.executable, "-m", "medseg.commands.cli", *arguments]
    main = worker = 0
    with log.open("wb") as output, psutil.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process:
        while process.poll() is None:
            with suppress(psutil.Error):  # it has just ended
                workers = [private_bytes(one.pid) for one in process.children(recursive=True)]
                resident = process.memory_info().rss
                main = max(main, resident)
                # Once the training process gives up its memory, pages that it shared count for the worker alone.
                worker = max([worker, *workers]) if resident > main / 2 else worker
            time.sleep(INTERVAL_S)
    if process.returncode:
        last = (log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no message"])[-1]
        raise UserError(f"plan: the training that measures the memory of a process failed ({last}); give measure=false")
    return ProcessCost(main, worker, read_summary(run_dir)["seconds_per_step"])


def _is_installed(name: str) -> bool:
    try:
        return bool(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False


def sample_cost(config: PlanConfig, shape: Shape, folder: Path, *, is_training: bool = True) -> SampleCost:
    """Make samples of a synthetic case in a process of its own, and measure them; read the measurement where there is one.

    Args:
        config: Checked configuration.
        shape: Voxels of a sample, (D, H, W).
        folder: Folder of the machine's measurements.
        is_training: Whether samples are patched and augmented as in training; else, as in validation.
    """
    values = plain(config)
    key = repr(
        (shape, is_training, [values[group] for group in ("augment", "spacing", "stage", "task", "inference")], torch.__version__)
    )
    path = folder / "samples" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    known = _read(path, 2)
    if known is not None:
        return SampleCost(int(known[0]), known[1])
    # Loads Lightning, which takes seconds; a known cost does without it.
    from medseg.planning import samples

    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        found = SampleCost(*pool.submit(samples.make_samples, config, shape, is_training).result())
    with suppress(UserError):  # a folder that cannot be written: measured again the next time
        replace_text(path, json.dumps(found))
    return found


def _read(path: Path, count: int) -> list[float] | None:
    """Read numbers that were measured before; None if there are none, or damaged ones."""
    try:
        numbers = [float(number) for number in json.loads(path.read_text(encoding="utf-8"))]
        return numbers if len(numbers) == count else None
    except (OSError, ValueError, TypeError):
        return None
