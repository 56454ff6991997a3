"""Memory of a run besides its tensors: libraries, loader workers, and the making of samples."""

import contextlib
import hashlib
import importlib.metadata
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from medseg import __version__
from medseg.config.schema import PlanConfig
from medseg.console import say
from medseg.errors import UserError
from medseg.geometry.sizes import Shape
from medseg.io.calibration import LoadMeter, measure_until, read_calibration, write_calibration
from medseg.memory.kernels import processor_name
from medseg.runs.signature import plain
from medseg.worker_process import Worker

# A training of the smallest size with two loader workers, two validations, their pictures and
# checkpoints.
REHEARSAL = [
    "train", "stage=coarse", "steps=12", "history_every=2", "stage.validate_every=6",
    "stage.patch_size=[16,16,16]", "inference.tile_size=[16,16,16]", "stage.slab_share=0",
    "data.phantoms.num_train=1", "data.phantoms.num_val=1", "data.phantoms.num_test=0",
    "data.num_workers=2", "trainer.accelerator=cpu", "trainer.threads=1", "spacing=isotropic_4mm",
    "trusted_targets=[medseg.planning.]",
    "callbacks.rehearsal._target_=medseg.planning.rehearsal.RehearsalWatch",
]  # fmt: skip
# The network of that training: ours, or one of MONAI, whose libraries take more memory.
SMALL_UNET = ["model.width=4", "model.depth=1", "model.blocks_per_level=[1,1]"]
SMALL_MONAI = [
    "model=segresnet",
    "model.init_filters=8",
    "model.blocks_down=[1,1,1]",
    "model.blocks_up=[1,1]",
]
# The tiny training is repeated until two in a row agree, that is, differ by no more than these
# shares of the larger value.
MEMORY_TOLERANCE, SECONDS_TOLERANCE = 0.02, 0.2
# After this number of trainings without agreement the last two count, until a plan on a quiet
# machine measures again.
MOST_TRAININGS = 5


class ProcessCost(NamedTuple):
    """Cost of a run without its tensors.

    Attributes:
        main: Resident bytes of the training process and its helpers: interpreter and libraries.
        pictures: Further resident bytes while that process draws a validation or saves. No network
            runs meanwhile.
        worker: Bytes of pages that a loader worker has written itself.
        copies: Bytes that all workers hold together: old contents of the pages that the training
            process has written since it forked them (copy on write).
        seconds: Processor time of a step beside its operations.
    """

    main: int
    pictures: int
    worker: int
    copies: int
    seconds: float


class SampleCost(NamedTuple):
    """Cost of making a training sample.

    Attributes:
        num_bytes: Peak of the memory while it is made, with what the process keeps afterwards.
        seconds: Processor time on one thread.
    """

    num_bytes: int
    seconds: float


def process_cost(folder: Path, *, has_logger: bool, has_monai: bool) -> ProcessCost:
    """Measure the memory and the seconds of a run beside its tensors by tiny trainings.

    The trainings are repeated until two of them agree. The result is kept for this machine and
    these versions, see `medseg.io.calibration`.

    Args:
        folder: Folder of the machine's measurements.
        has_logger: Whether a logger is loaded, which brings libraries of its own.
        has_monai: Whether the network is one of MONAI's, which brings libraries too.

    Raises:
        UserError: If a training fails.
    """
    name = f"process {processor_name()} {_versions()}"
    if not has_logger:
        name += " no logger"
    if has_monai:
        name += " MONAI network"
    file_name = f"{name}.json".replace("/", "_")
    path = folder / file_name
    numbers = read_calibration(path, len(ProcessCost._fields))
    if numbers is not None:
        # A calibration holds floats.
        *byte_counts, seconds = numbers
        main, pictures, worker, copies = map(int, byte_counts)
        return ProcessCost(main, pictures, worker, copies, seconds)
    say(
        "plan: measuring a run without its tensors by tiny trainings, about a minute; "
        "kept for later plans"
    )
    with tempfile.TemporaryDirectory(prefix="medseg-plan-") as scratch:
        network = SMALL_MONAI if has_monai else SMALL_UNET
        arguments = [*REHEARSAL, *network]
        if not has_logger:
            arguments.append("logger=none")
        arguments += [f"data.phantoms.folder={scratch}/phantoms", f"data.cache={scratch}/cache"]
        run_numbers = itertools.count()

        def train() -> ProcessCost:
            """Run the training in a folder of its own."""
            return _watched_training(arguments, Path(scratch) / str(next(run_numbers)))

        # The first training also makes scan and cache, which takes more memory: it does not count.
        train()
        previous, latest, circumstances = measure_until(train, agree, MOST_TRAININGS)
    cost = averaged(previous, latest)
    write_calibration(path, cost, circumstances)
    return cost


def agree(first: ProcessCost, second: ProcessCost) -> bool:
    """Whether two calibrations are equal within MEMORY_TOLERANCE and SECONDS_TOLERANCE.

    Memory is compared as the sum of all fields in bytes: the peak of a run with one worker.
    """
    # The last field is not memory, but seconds.
    memory = [sum(cost[:-1]) for cost in (first, second)]
    if max(memory) - min(memory) > MEMORY_TOLERANCE * max(memory):
        return False
    seconds = [first.seconds, second.seconds]
    return max(seconds) - min(seconds) <= SECONDS_TOLERANCE * max(seconds)


def averaged(first: ProcessCost, second: ProcessCost) -> ProcessCost:
    """Take the mean bytes of two calibrations, and the smaller duration.

    Other programs on the machine only lengthen a duration.
    """
    return ProcessCost(
        main=(first.main + second.main) // 2,
        pictures=(first.pictures + second.pictures) // 2,
        worker=(first.worker + second.worker) // 2,
        copies=(first.copies + second.copies) // 2,
        seconds=min(first.seconds, second.seconds),
    )


def _watched_training(arguments: list[str], run_dir: Path) -> ProcessCost:
    """Run a training in a separate process, in which `RehearsalWatch` measures the cost.

    Args:
        arguments: Those of the training.
        run_dir: Its run folder. Its output and the result are written beside it.

    Raises:
        UserError: If the training fails.
    """
    log_path = run_dir.with_suffix(".log")
    result_path = run_dir.with_suffix(".json")
    # `-P`: the process imports nothing from the working folder, such as a `json.py` of the user.
    command = [sys.executable, "-Pm", "medseg.commands.cli", *arguments]
    command += [f"callbacks.rehearsal.path={result_path}", f"hydra.run.dir={run_dir}"]
    with log_path.open("wb") as log:
        process = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False)
    if process.returncode:
        lines = log_path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last_line = lines[-1] if lines else "no message"
        raise UserError(
            f"plan: the training that measures the memory of a process failed ({last_line}); "
            "give measure=false"
        )
    numbers = json.loads(result_path.read_text(encoding="utf-8"))
    return ProcessCost(
        main=numbers["main"] + numbers["helpers"],
        pictures=numbers["pictures"],
        worker=numbers["worker"],
        copies=numbers["copies"],
        seconds=numbers["seconds"],
    )


def _versions() -> str:
    """List the versions of the libraries on which the memory of a run depends."""
    versions = [f"medseg {__version__}"]
    for name in ("torch", "lightning", "monai", "matplotlib", "numpy", "tensorboard"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    return " ".join(versions)


def sample_cost(
    config: PlanConfig, shape: Shape, folder: Path, *, is_training: bool = True
) -> SampleCost:
    """Measure the making of samples of a synthetic case, or read an earlier measurement.

    The samples are made in a separate process.

    Args:
        config: Checked configuration.
        shape: Voxels of a sample, (D, H, W).
        folder: Folder of the machine's measurements.
        is_training: Whether samples are cut and augmented as in training; else, as in validation.
    """
    # The name of the file is a hash of all that the cost depends on.
    values = plain(config)
    groups = [values[name] for name in ("augment", "spacing", "stage", "task", "inference")]
    versions = [__version__, torch.__version__, processor_name()]
    description = repr((shape, is_training, groups, versions))
    key = hashlib.sha256(description.encode()).hexdigest()[:16]
    path = folder / "samples" / f"{key}.json"
    numbers = read_calibration(path, len(SampleCost._fields))
    if numbers is not None:
        num_bytes, seconds = numbers
        return SampleCost(int(num_bytes), seconds)
    purpose = "training" if is_training else "validation"
    say(f"plan: measuring the samples of {purpose}; kept for later plans")
    # Imported here because it loads Lightning, which takes seconds: not needed for a known cost.
    from medseg.planning.synthetic_samples import make_samples

    # A new process and not a fork of this one, whose heap may have free memory that is resident
    # already: samples in it would not be counted.
    with LoadMeter() as meter, Worker() as worker:
        cost = SampleCost(*worker.call(make_samples, config, shape, is_training))
    write_calibration(path, cost, meter.circumstances())
    return cost
