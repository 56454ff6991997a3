"""The `ladder` command: memory, time and Dice of a training as switches are added one at a time.

Baseline networks (nnU-Net, MONAI) have a row in fp32, to compare all networks in one precision. A
baseline that nnU-Net or MONAI trains in another precision has a second row in that precision. Both
rows are without checkpointing. Bytes are counted on fake tensors, which hold no values, so the
bytes of fp16 are known on a CPU too, which cannot compute in fp16.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hydra.core.hydra_config import HydraConfig
from torch import nn

from medseg.config.overrides import quote
from medseg.config.schema import LadderConfig
from medseg.errors import UserError
from medseg.geometry.sizes import Shape
from medseg.io.atomic import check_writable, replace_text
from medseg.io.tables import print_table, write_csv
from medseg.memory.device import pick_device, use_supported_half
from medseg.memory.options import MemoryOptions, Precision
from medseg.memory.precision import autocast, check_precision, set_tf32
from medseg.memory.switches import switch_on
from medseg.planning.step import count_memory, input_shape
from medseg.report.plots import Panel, draw_panels
from medseg.runs.folder import read_summary
from medseg.runs.signature import plain
from medseg.runs.status import Status
from medseg.studies.baselines import BASELINES, install_baselines, make_baseline
from medseg.studies.command_steps import run_steps, train_steps
from medseg.studies.train_arguments import (
    arguments_for_train,
    check_names,
    check_same_training,
    compose_train,
    folder_name,
    merge_arguments,
)
from medseg.training.extensions import make_loss
from medseg.training.network import count_channels, count_classes, make_network
from medseg.training.optimisation import find_lr_factor, make_optimizer
from medseg.training.options import TrainConfig, samples_per_micro_batch
from medseg.worker_process import Worker, WorkerDiedError

# Column of the printed table to its heading; and column to its number format.
HEADINGS = {
    "row": "",
    "precision": "precision",
    "checkpointing": "checkpointing",
    "saved_bytes_per_voxel": "saved B/voxel",
    "peak_mib": "peak MiB",
    "seconds_per_step": "s/step",
    "dice": "Dice",
}
FORMATS = {
    "saved_bytes_per_voxel": ".1f",
    "peak_mib": ".1f",
    "seconds_per_step": ".3f",
    "dice": ".4f",
}
# Panels of `ladder.png`: column of the table, title, format, and whether its values are bars from
# zero; else they are dots.
PANELS = (
    ("saved_bytes_per_voxel", "saved bytes per voxel", "{:.0f}", True),
    ("peak_mib", "peak of a step, MiB", "{:.0f}", True),
    ("seconds_per_step", "seconds per step", "{:.2f}", True),
    ("dice", "Dice, best validation", "{:.4f}", False),
)


class Row(NamedTuple):
    """Row of the ladder.

    Attributes:
        key: Key of `ladder` that states the arguments of the row, for messages.
        name: Switch that the row adds, or name of its network or baseline.
        arguments: All arguments of `train`.
        added: Arguments that only this row states, part of `arguments`.
        baseline: Key of `BASELINES`; None = the network of the configuration. The configuration
            calls baselines `peers`.
        precision: Precision of a baseline; empty = the precision of the configuration.
        is_switch: Whether the row adds its arguments to those of the row above.
    """

    key: str
    name: str
    arguments: tuple[str, ...]
    added: tuple[str, ...] = ()
    baseline: str | None = None
    precision: str = ""
    is_switch: bool = False

    @property
    def folder(self) -> str:
        """Name of the folder of the row."""
        if self.baseline:
            return baseline_folder(self.baseline, self.precision)
        return folder_name(self.name)


def baseline_folder(baseline: str, precision: str) -> str:
    """Name of the folder of a baseline, which no other row may take."""
    return f"{baseline}_{precision}"


def baseline_precisions(baseline: str) -> list[str]:
    """List the precisions of a baseline's rows: fp32, and that in which its authors train it."""
    # A dictionary drops the second precision if it is fp32 too.
    return list(dict.fromkeys(["fp32", BASELINES[baseline].trained_in]))


def ladder(config: LadderConfig) -> int:
    """Measure every row, train it on request, and write `ladder.csv` and `ladder.png` after each.

    Earlier measurements and trainings with the same configuration are reused.

    Raises:
        UserError: If a row is refused or cannot be measured, or an earlier training of a row had
            another configuration.
        SystemExit: With the exit code of a training that failed.
    """
    if config.output is None:
        raise UserError("output: a folder is needed")
    output = Path(config.output)
    shape = input_shape(config)
    arguments = arguments_for_train(HydraConfig.get().overrides.task, LadderConfig)
    rows = list(ladder_rows(config, arguments))
    # Compose all rows first, so that a mistake in any row is found before a measurement.
    configs = [compose(row) for row in rows]
    if config.train:
        for row, row_config in zip(rows, configs, strict=True):
            check_earlier_training(output / row.folder / "run", row_config)
    for row_config in configs:
        # The configuration is changed in place: bf16 becomes fp16 on a GPU that lacks bf16.
        use_supported_half(row_config.memory, row_config.trainer.accelerator)
    check_writable(output)
    packages = None
    if config.peers:
        packages = install_baselines(Path(config.peers_env).absolute())
    table: list[dict[str, Any]] = []
    for row, row_config in zip(rows, configs, strict=True):
        folder = output / row.folder
        row_config = with_precision(row_config, row.precision)
        measured = measure(
            folder,
            row_config,
            shape,
            timed_steps=config.timed_steps,
            baseline=row.baseline,
            packages=packages,
        )
        # Baselines are measured, never trained.
        if config.train and row.baseline is None:
            run_steps(train_steps(folder / "run", *row.arguments))
        # The summary is empty for a row that was not trained.
        summary = read_summary(folder / "run") if config.train else {}
        table.append(table_row(row, row_config.memory, measured, summary))
        # List each device once, in the order of the rows.
        devices = dict.fromkeys(line["device"] for line in table if line["device"])
        voxels = "×".join(map(str, shape))
        title = ", ".join([f"A training step on {voxels} voxels", *devices])
        write(table, rows, output, title)
    print_table(table, HEADINGS, FORMATS)
    print(f"{output / 'ladder.csv'}, {output / 'ladder.png'}")
    return 0


def ladder_rows(config: LadderConfig, common: Sequence[str]) -> Iterator[Row]:
    """Yield the rows from top to bottom: `networks`, baselines, and the switches of `rows`.

    Each entry of `rows` adds its arguments to those of the entry above. Baselines have the
    arguments of the first entry of `rows`.

    Args:
        config: Has the arguments that each row adds.
        common: Arguments that all rows share.

    Raises:
        UserError: If there is no row, or two rows would share a folder.
    """
    baselines: list[tuple[str, str]] = []
    for baseline in BASELINES:
        baselines += [(baseline, precision) for precision in baseline_precisions(baseline)]
    baseline_folders = [baseline_folder(*baseline) for baseline in baselines]
    check_names([*config.networks, *config.rows], *baseline_folders)
    # `train` has another default stage than `ladder`.
    arguments = merge_arguments([f"stage={config.stage.name.value}"], common)
    for name, added in config.networks.items():
        yield Row(f"networks.{name}", name, merge_arguments(arguments, added), tuple(added))
    if config.peers:
        added_by_first_row = next(iter(config.rows.values()), [])
        baseline_arguments = merge_arguments(arguments, added_by_first_row)
        for baseline, precision in baselines:
            yield baseline_row(baseline, precision, baseline_arguments)
    for number, (name, added) in enumerate(config.rows.items()):
        # Overwritten, because the next row adds to the arguments of this row.
        arguments = merge_arguments(arguments, added)
        yield Row(f"rows.{name}", name, arguments, added=tuple(added), is_switch=number > 0)


def baseline_row(baseline: str, precision: str, arguments: tuple[str, ...]) -> Row:
    """Make the row of a baseline."""
    title, trained_in = BASELINES[baseline]
    # Marks the precision in which nnU-Net or MONAI trains its network.
    mark = " as it trains" if precision == trained_in else ""
    name = f"{title}, {precision}{mark}"
    return Row("peers", name, arguments, baseline=baseline, precision=precision)


def with_precision(config: TrainConfig, precision: str) -> TrainConfig:
    """Replace the precision of a configuration; an empty precision changes nothing."""
    if not precision:
        return config
    return replace(config, memory=replace(config.memory, precision=Precision(precision)))


def compose(row: Row) -> TrainConfig:
    """Compose the configuration of a row.

    Raises:
        UserError: If `train` would refuse the arguments.
    """
    # `run_dir` must have some value; nothing is written there.
    return compose_train([*row.arguments, f"name={quote(row.folder)}", "run_dir=ladder"], row.key)


def check_earlier_training(run_dir: Path, config: TrainConfig) -> None:
    """Refuse to reuse a finished training whose configuration would give another result.

    An unfinished training is not checked here: `train` checks it when it resumes it.

    Args:
        run_dir: Run folder of a row, which may not exist.
        config: Configuration of the row.

    Raises:
        UserError: Names the keys that differ.
    """
    if read_summary(run_dir).get("status") == Status.finished.value:
        check_same_training(run_dir, config)


def measure(
    folder: Path,
    config: TrainConfig,
    shape: Shape,
    timed_steps: int,
    baseline: str | None,
    packages: Path | None,
) -> dict[str, Any]:
    """Measure a row, or read an earlier measurement of the same row from its folder.

    The measurement runs in a new process, so that rows do not share memory and caches.

    Args:
        folder: Folder of the row.
        config: Checked configuration.
        shape: Voxels of a sample, (D, H, W).
        timed_steps: Number of timed steps.
        baseline: Key of `BASELINES`, or None.
        packages: Folder of the baselines' packages, or None.

    Returns:
        See `measure_row`.

    Raises:
        UserError: If the row cannot be measured.
    """
    path = folder / "measured.json"
    # The whole configuration, not its signature: a signature leaves out memory switches, which do
    # not change the result of a run, but change memory and time.
    request = {
        "shape": list(shape),
        "timed_steps": timed_steps,
        "baseline": baseline,
        "config": plain(config),
    }
    if path.is_file():
        earlier: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if earlier.get("request") == request:
            return earlier
    print(f"measuring {folder.name}", flush=True)
    try:
        with Worker() as worker:
            measured = worker.call(measure_row, config, shape, timed_steps, baseline, packages)
    except WorkerDiedError as error:
        if error.is_killed:
            cure = "choose a smaller shape"
        else:
            cure = "start it again, and report it if it ends so again"
        raise UserError(f"{folder.name} could not be measured: {error}; {cure}") from error
    except UserError as error:
        raise UserError(f"{folder.name} could not be measured: {error}") from error
    replace_text(path, json.dumps({"request": request, **measured}, indent=1))
    return measured


def measure_row(
    config: TrainConfig,
    shape: Shape,
    timed_steps: int,
    baseline: str | None = None,
    packages: Path | None = None,
) -> dict[str, Any]:
    """Count the bytes of a training step, and time it on noise.

    Args:
        config: Checked configuration.
        shape: Voxels of a sample, (D, H, W).
        timed_steps: Number of steps to time, after a warm-up step; 0 = no timing.
        baseline: Key of `BASELINES`; None = the configured network.
        packages: Folder of the baselines' packages, which take precedence over the packages of this
            environment; None without baselines.

    Returns:
        `saved_per_voxel` (bytes), `peak_bytes` and `parameter_bytes`. If timed, also
        `seconds_per_step` of the fastest step and `device`; on a GPU also `peak_allocated_bytes` of
        torch's allocator. A baseline in a precision that the device lacks is not timed.

    Raises:
        UserError: If the device does not support the precision, or the step cannot be counted.
    """
    if packages is not None:
        sys.path.insert(0, str(packages))
    precision = config.memory.precision.value
    device = pick_device(config.trainer.accelerator)
    is_timed = timed_steps > 0
    try:
        check_precision(precision, device.type)
    except ValueError as error:
        if baseline is None:
            # The text of the error begins with the key `precision`.
            raise UserError(f"memory.{error}") from error
        # The bytes of a baseline are still counted, on fake tensors.
        is_timed = False
    make_baseline_network: Callable[[], nn.Module] | None = None
    if baseline:
        make_baseline_network = partial(
            make_baseline, baseline, count_classes(config), count_channels(config)
        )
    memory = count_memory(config, shape, make_baseline_network)
    measured: dict[str, Any] = {
        "saved_per_voxel": memory.saved_per_voxel,
        "peak_bytes": memory.peak,
        "parameter_bytes": memory.parameters,
    }
    if not is_timed:
        return measured
    measured["seconds_per_step"] = _time_step(config, shape, timed_steps, make_baseline_network)
    if device.type == "cuda":
        measured["device"] = torch.cuda.get_device_name()
        measured["peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
    else:
        num_threads = torch.get_num_threads()
        threads = "thread" if num_threads == 1 else "threads"
        measured["device"] = f"{num_threads} CPU {threads}"
    return measured


def _time_step(
    config: TrainConfig,
    shape: Shape,
    timed_steps: int,
    make_baseline_network: Callable[[], nn.Module] | None,
) -> float:
    """Time training steps on noise, after a warm-up step.

    Args:
        config: Checked configuration.
        shape: Voxels of a sample, (D, H, W).
        timed_steps: Number of timed steps, at least 1.
        make_baseline_network: Builds the network of a baseline; None = the configured network.

    Returns:
        Duration of the fastest step in s.
    """
    precision = config.memory.precision.value
    device = pick_device(config.trainer.accelerator)
    num_classes = count_classes(config)
    set_tf32(precision)
    if config.trainer.threads:
        torch.set_num_threads(config.trainer.threads)
    torch.manual_seed(config.seed)
    num_samples = samples_per_micro_batch(config)
    # Noise in [-1, 1), the range of normalised images.
    image = torch.rand(num_samples, count_channels(config), *shape, device=device) * 2 - 1
    if make_baseline_network is not None:
        network = make_baseline_network().to(device)
    else:
        network = switch_on(
            make_network(config).to(device),
            config.memory,
            device.type,
            sync_batchnorm=config.trainer.sync_batchnorm,
        )
    target = torch.randint(num_classes, (num_samples, *shape), dtype=torch.uint8, device=device)
    loss = make_loss(config)
    lr_factor = find_lr_factor(config.lr_scaling, config.stage.batch_size)
    optimizer_factory = make_optimizer(config.optimizer, lr_factor, config.trusted_targets)
    optimizer = optimizer_factory(network.parameters())
    durations_s = []
    for _ in range(timed_steps + 1):
        start_s = time.perf_counter()
        for _ in range(config.memory.accumulate):
            with autocast(precision, device.type):
                value = loss(network(image), target)
            value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        # Kernels run asynchronously: without synchronising, only their launch would be timed.
        if device.type == "cuda":
            torch.cuda.synchronize()
        durations_s.append(time.perf_counter() - start_s)
    # Leave out the warm-up step, which allocates and compiles.
    return min(durations_s[1:])


def table_row(
    row: Row, memory: MemoryOptions, measured: dict[str, Any], summary: dict[str, Any]
) -> dict[str, Any]:
    """Make a row of `ladder.csv`; an unknown value is None.

    Args:
        row: Has the name, and the arguments that the row adds.
        memory: Memory switches of the row.
        measured: From `measure_row`.
        summary: Summary of the row's training; empty if it was not trained.
    """
    # Baselines run without checkpointing.
    checkpointing = "none" if row.baseline else memory.checkpointing
    # `memory.checkpointing` is a word such as `none`, or a list of names of blocks.
    if not isinstance(checkpointing, str):
        checkpointing = " ".join(checkpointing)

    def rounded(key: str, digits: int, unit: int = 1) -> float | None:
        """Convert a measurement to a unit and round it; None if it was not measured."""
        if key not in measured:
            return None
        return round(measured[key] / unit, digits)

    return {
        "row": row.name,
        "arguments": " ".join(row.added),
        "precision": memory.precision.value,
        "checkpointing": checkpointing,
        "saved_bytes_per_voxel": rounded("saved_per_voxel", digits=2),
        "peak_mib": rounded("peak_bytes", digits=1, unit=2**20),
        "parameters_mib": rounded("parameter_bytes", digits=2, unit=2**20),
        "seconds_per_step": rounded("seconds_per_step", digits=4),
        "device": measured.get("device"),
        "peak_allocated_mib": rounded("peak_allocated_bytes", digits=1, unit=2**20),
        "dice": summary.get("val_dice_best"),
        "train_s": summary.get("train_s"),
    }


def write(table: Sequence[dict[str, Any]], rows: Sequence[Row], output: Path, title: str) -> None:
    """Write `ladder.csv` and `ladder.png` with the rows measured so far.

    Args:
        table: From `table_row`, of the rows measured so far.
        rows: All rows, also those that are not measured yet.
        output: Folder to write to.
        title: Title of the picture.
    """
    write_csv(output / "ladder.csv", table)
    measured_rows = rows[: len(table)]
    names = [picture_name(row, line) for row, line in zip(measured_rows, table, strict=True)]
    panels = []
    for column, heading, value_format, has_bars in PANELS:
        values = [line[column] for line in table]
        panels.append(Panel(heading, value_format, values, has_bars))
    is_baseline = [row.baseline is not None for row in measured_rows]
    draw_panels(names, panels, title, output / "ladder.png", is_baseline)


def picture_name(row: Row, line: dict[str, Any]) -> str:
    """Name a row in `ladder.png`.

    A row that adds a switch is called `+ <switch>`. The name of any other row states precision and
    checkpointing.
    """
    if row.is_switch:
        return f"+ {row.name}"
    # The name of a baseline already states its precision, and it has no checkpointing.
    if row.baseline:
        return row.name
    name = f"{row.name}, {line['precision']}"
    if line["checkpointing"] != "none":
        name += f", checkpointing {line['checkpointing']}"
    return name
