"""The `ladder` command: what each switch buys, added one at a time, in one run."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from medseg.config.check import to_config
from medseg.config.schema import LadderConfig, TrainConfig
from medseg.config.signature import plain, signature
from medseg.errors import UserError
from medseg.io.replacing import check_writable
from medseg.pictures.ladder import Rung, draw_ladder
from medseg.planning.plan import input_shape
from medseg.runs.folder import CONFIG_FILE, SUMMARY_FILE, replace_text, settle
from medseg.studies.baselines import PEERS, make_environment
from medseg.studies.measurement import MEASURED_FILE, REQUEST_FILE
from medseg.studies.steps import merge_arguments, run_step, run_steps, without_keys

# Keys of the ladder that its rows, which are configurations of `train`, do not have.
OWN_KEYS = ("compute", "extent_mm", "largest_batch", "output", "peers", "peers_env", "rows", "shape", "timed_steps", "train")
COLUMNS = (
    "row", "arguments", "saved_bytes_per_voxel", "peak_mib", "parameters_mib", "seconds_per_step", "device",
    "peak_allocated_mib", "dice", "train_s",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A row of the ladder.

    Attributes:
        name: What it adds, or whose network it is.
        added: The arguments that it adds.
        arguments: All its arguments of `train`.
        peer: Key of `PEERS` where it is a network of others.
    """

    name: str
    added: tuple[str, ...]
    arguments: tuple[str, ...]
    peer: str | None = None

    @property
    def folder(self) -> str:
        """Name of its folder."""
        return re.sub(r"\W+", "_", self.peer or self.name)


def ladder(config: LadderConfig) -> int:
    """Measure every row, train it where asked to, and write `ladder.csv` and `ladder.png` after each.

    Returns:
        0; or the exit code of the training that failed, after which nothing is run.
    """
    if config.output is None:
        raise UserError("output: a folder is needed")
    shape, output = input_shape(config), Path(config.output)
    rows = list(ladder_rows(config, without_keys(HydraConfig.get().overrides.task, OWN_KEYS)))
    configs = [compose(row) for row in rows]  # all of them are checked before the first is measured
    check_writable(output)
    python = make_environment(Path(config.peers_env).absolute()) if config.peers else Path(sys.executable)
    table: list[dict[str, Any]] = []
    for row, row_config in zip(rows, configs, strict=True):
        folder = output / row.folder
        request = {
            "shape": list(shape),
            "timed_steps": config.timed_steps,
            "peer": row.peer,
            "signature": signature(plain(row_config)),
            "threads": row_config.trainer.threads,
        }
        measured = measure(folder, row_config, request, python if row.peer else Path(sys.executable))
        summary: dict[str, Any] = {}
        if config.train and row.peer is None:
            code = run_steps(run_step(folder / "run", *row.arguments))
            if code:
                return code
            summary = json.loads((folder / "run" / SUMMARY_FILE).read_text(encoding="utf-8"))
        table.append(table_row(row, measured, summary))
        write(table, rows, output, title(shape, measured))
    print("\n".join(lines(table)))
    print(f"{output / 'ladder.csv'}, {output / 'ladder.png'}")
    return 0


def ladder_rows(config: LadderConfig, given: Sequence[str]) -> Iterator[Row]:
    """The rows from top to bottom.

    Args:
        config: Names what each row adds.
        given: Arguments that all rows share.

    Raises:
        UserError: If there is no row, or two rows would share a folder.
    """
    if not config.rows:
        raise UserError("rows: at least one row is needed")
    folders = [Row(name, (), ()).folder for name in config.rows]
    if len({*folders, *PEERS}) < len(folders) + len(PEERS):
        raise UserError(f"rows: names must differ in their letters, and from {', '.join(PEERS)}, but got {list(config.rows)}")
    # The ladder is of the stage that it composes; whatever else it has by itself, `train` has too.
    arguments = merge_arguments([f"stage={config.stage.name.value}"], given)
    peers = [(PEERS[peer], peer) for peer in PEERS] if config.peers else []
    for name, added in config.rows.items():
        arguments = merge_arguments(arguments, added)
        for title_, peer in peers:
            yield Row(title_, (), arguments, peer)
        peers = []
        yield Row(name, tuple(added), arguments)


def compose(row: Row) -> TrainConfig:
    """The configuration of a row.

    Raises:
        UserError: If `train` would refuse it.
    """
    try:
        composed = hydra.compose("train", [*row.arguments, f"name={row.folder}", "run_dir=ladder"])
        config = to_config(composed, TrainConfig)
    except UserError as error:
        raise UserError(f"rows.{row.name}: {error}") from error
    settle(config)
    return config


def measure(folder: Path, config: TrainConfig, request: dict[str, Any], python: Path) -> dict[str, Any]:
    """Count and time a row in a process of its own; what was measured before for the same request is kept.

    Raises:
        UserError: If the process failed.
    """
    path = folder / MEASURED_FILE
    measured: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if measured.get("request") == request:
        return measured
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / CONFIG_FILE, OmegaConf.to_yaml(OmegaConf.create(plain(config))))
    replace_text(folder / REQUEST_FILE, json.dumps(request))
    print(f"measuring {folder.name}", flush=True)
    if subprocess.run([str(python), "-m", "medseg.studies.measurement", str(folder)], check=False).returncode:
        raise UserError(f"{folder.name} could not be measured; what went wrong stands above")
    return dict(json.loads(path.read_text(encoding="utf-8")))


def table_row(row: Row, measured: dict[str, Any], summary: dict[str, Any]) -> dict[str, Any]:
    """A row of `ladder.csv`; what is not known is empty."""
    allocated = measured.get("peak_allocated_bytes")
    return {
        "row": row.name,
        "arguments": " ".join(row.added),
        "saved_bytes_per_voxel": round(measured["saved_per_voxel"], 2),
        "peak_mib": round(measured["peak_bytes"] / 2**20, 1),
        "parameters_mib": round(measured["parameter_bytes"] / 2**20, 2),
        "seconds_per_step": round(measured["seconds_per_step"], 4) if "seconds_per_step" in measured else None,
        "device": measured.get("device"),
        "peak_allocated_mib": round(allocated / 2**20, 1) if allocated else None,
        "dice": summary.get("val_dice_best"),
        "train_s": summary.get("train_s"),
    }


def write(table: Sequence[dict[str, Any]], rows: Sequence[Row], output: Path, picture_title: str) -> None:
    """Write `ladder.csv` and `ladder.png` of the rows that are known so far."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    replace_text(output / "ladder.csv", text.getvalue())
    first = sum(row.peer is not None for row in rows)
    rungs = [
        Rung(
            known["row"] if number <= first else f"+ {known['row']}",
            row.peer is None,
            known["saved_bytes_per_voxel"],
            known["peak_mib"],
            known["seconds_per_step"],
            known["dice"],
        )
        for number, (row, known) in enumerate(zip(rows, table, strict=False))
    ]
    draw_ladder(rungs, picture_title, output / "ladder.png")


def title(shape: tuple[int, int, int], measured: dict[str, Any]) -> str:
    """What was measured, and on what."""
    return f"A training step on {'×'.join(map(str, shape))} voxels" + (f", {measured['device']}" if "device" in measured else "")


def lines(table: Sequence[dict[str, Any]]) -> list[str]:
    """The table to be read on a terminal."""

    def cell(value: float | None, digits: int) -> str:
        return f"{value:14.{digits}f}" if value is not None else f"{'':14s}"

    header = f"{'':32s}{'saved B/voxel':>14s}{'peak MiB':>14s}{'s/step':>14s}{'Dice':>14s}"
    return [header] + [
        f"{row['row']:32s}{cell(row['saved_bytes_per_voxel'], 1)}{cell(row['peak_mib'], 1)}"
        f"{cell(row['seconds_per_step'], 3)}{cell(row['dice'], 4)}".rstrip()
        for row in table
    ]
