"""Training part of the GPU report: both demo stages in fp32, bf16 and fp16, and their histories."""

import math
import os
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from benchmarks.gpu.parts import Session
from benchmarks.gpu.report import Report
from benchmarks.instruments import train
from medseg.io.tables import read_csv
from medseg.memory.precision import check_precision

STAGES = ("coarse", "fine")
PRECISIONS = ("fp32", "bf16", "fp16")
# Steps of a training, and of the rehearsal.
NUM_STEPS, NUM_SMALL_STEPS = 40, 4
# Largest relative difference of the last loss in half precision from that in fp32. The samples and
# the initial weights are the same.
LOSS_BOUND = 0.1


def measure(session: Session) -> Report:
    """Train each stage in each precision by the command `train`."""
    report = Report()
    rows = []
    for stage in STAGES:
        losses: dict[str, float] = {}
        for precision in PRECISIONS:
            name = f"{stage}, {precision}"
            print(name, flush=True)
            try:
                check_precision(precision, session.device.type)
            except ValueError as error:
                report.not_run(name, str(error))
                continue
            history = train_stage(stage, precision, session)
            row = summary_row(name, history)
            rows.append(row)
            losses[precision] = float(row["last loss"])
            check_training(report, name, row, history, session)
        for precision in losses:
            if precision == "fp32":
                continue
            ratio = losses[precision] / losses["fp32"]
            report.near_one(f"{stage}, {precision}: loss by that of fp32", ratio, LOSS_BOUND)
    report.table(rows)
    return report


def train_stage(stage: str, precision: str, session: Session) -> list[dict[str, str]]:
    """Train a stage; returns the lines of its history."""
    folder = session.output / "training"
    folder.mkdir(parents=True, exist_ok=True)
    num_steps = NUM_SMALL_STEPS if session.is_rehearsal else NUM_STEPS
    num_cases = 2 if session.is_rehearsal else 8
    arguments = [
        f"experiment=demo_{stage}",
        f"memory.precision={precision}",
        f"trainer.accelerator={session.accelerator}",
        f"steps={num_steps}",
        f"stage.validate_every={num_steps}",
        f"history_every={num_steps // 4}",  # four lines
        f"data.phantoms.num_train={num_cases}",
        "data.phantoms.num_val=1",
        "data.phantoms.num_test=0",
        f"data.phantoms.folder={folder / 'phantoms'}",
        f"data.cache={folder / 'cache'}",
        "logger=none",
    ]
    run_dir = unused(folder / f"{stage}_{precision}")
    train(arguments, run_dir, os.environ)
    return read_csv(run_dir / "history.csv")


def unused(folder: Path) -> Path:
    """Find a folder of this name, with a number if need be, that does not exist yet."""
    number = 1
    candidate = folder
    while candidate.exists():
        number += 1
        candidate = folder.with_name(f"{folder.name}_{number}")
    return candidate


def summary_row(name: str, history: list[dict[str, str]]) -> dict[str, str]:
    """Summarise a training from its history, as a row of the table."""
    # Lines of a validation have no loss.
    lines = [line for line in history if line["loss"]]
    # The first line contains the start of the loader and of the libraries.
    seconds = median(float(line["seconds_per_step"]) for line in lines[1:])
    row = {
        "training": name,
        "first loss": lines[0]["loss"],
        "last loss": lines[-1]["loss"],
        "steps/s": f"{1 / seconds:.2f}",
    }
    for column in ("peak_gib", "host_gib", "gpu_gib", "gpu_percent"):
        row[column] = lines[-1].get(column, "")
    return row


def check_training(
    report: Report,
    name: str,
    row: dict[str, str],
    history: list[dict[str, str]],
    session: Session,
) -> None:
    """Check that the loss fell, and that the history contains memory and load of the GPU."""
    first, last = float(row["first loss"]), float(row["last loss"])
    fell = math.isfinite(last) and last < first
    report.holds(f"{name}: the loss falls", fell, f"{first:.3f} to {last:.3f}", "falls")
    if session.is_rehearsal:
        report.not_run(f"{name}: the history watches the GPU", "the run is on the CPU")
        return
    peak_gib = max(float(line["gpu_gib"] or 0) for line in history if line["loss"])
    value = f"{peak_gib:.2f} GiB"
    report.holds(f"{name}: the history has its memory", peak_gib > 0, value, "> 0")
    # The load comes from NVIDIA's library, an extra of the package.
    if find_spec("pynvml") is None:
        report.not_run(f"{name}: the history has its load", "medseg[gpu] is not installed")
        return
    has_load = bool(row["gpu_percent"])
    report.holds(f"{name}: the history has its load", has_load, row["gpu_percent"], "a number")
