"""Limits benchmark: predictions under a limit of memory, their peaks and their labels.

    python -m benchmarks.limits output=<folder> [scans=100] [cases=<table.csv>,…]

Phantoms of 1 to 3,000 slices are predicted together without a limit, then each by a process of its
own under `inference.max_ram_gib=1`; the labels with and without the limit are compared. The scans
of the case tables are predicted with each of several `inference.budget_gib`, all scans of a table
in one process; their labels are compared with those of the largest budget.

Peaks are the largest resident memory of the process by the system's own count. Labels are compared
by the Dice of each region. Existing scans and predictions are kept. Writes `limits.csv` and
`budgets.csv`, and `limits.md` with both.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.instruments import ROOT, given_arguments, largest_resident_bytes
from medseg.data.importers.formats import read_cases
from medseg.errors import EXIT_FAILED
from medseg.geometry.grid import VoxelGrid
from medseg.io.atomic import replace_text
from medseg.io.read import read_labels
from medseg.io.tables import markdown_table, write_csv
from medseg.io.write import write_image
from medseg.phantom.scan import make_phantom
from medseg.phantom.spec import PhantomSpec

MAX_SLICES = 3000
LIMIT_GIB = 1.0
BUDGETS_GIB = (0.25, 0.5, 1.0, 4.0)  # the largest gives the reference labels
# Labels with a lower Dice in a region count as different.
EQUAL_DICE = 0.9995
# Pixels per side of the coarse phantom, and their size. A scan repeats each of these pixels:
# drawing 3,000 slices of 512² pixels would take too long.
MODEL_SIZE = 128
MODEL_MM = 3.2
# Pixels per side of the scans: multiples of `MODEL_SIZE`.
MATRICES = (512, 256, 128)
# Field of view along the body: a chest, or the trunk with the chest.
LENGTH_MM = {"whole": 320.0, "trunk": 900.0}
MAX_SLICE_MM = 5.0
COMMAND = [sys.executable, "-m", "medseg.commands.cli", "predict", "accelerator=cpu"]
# Headings of the two tables; the column "of" names the scan with the least Dice.
SCAN_COLUMNS = {
    "scan": "scan",
    "slices": "slices",
    "matrix": "matrix",
    "mib": "scan MiB",
    "code": "exit code",
    "peak_mib": "peak MiB",
    "dice": "least Dice",
}
BUDGET_COLUMNS = {
    "budget_gib": "`inference.budget_gib`",
    "scans": "scans",
    "refused": "refused",
    "peak_mib": "peak MiB",
    "dice": "least Dice",
    "worst": "of",
    "seconds": "s",
}


def main() -> None:
    """Measure both parts, and write the tables."""
    output, arguments = given_arguments(["scans", "cases"])
    texts = []
    num_scans = int(arguments.get("scans", 100))
    if num_scans:  # `scans=0` measures the budgets alone
        rows = limited_scans(output / "phantoms", num_scans)
        write_csv(output / "limits.csv", rows)
        formats = {"mib": ".1f", "peak_mib": ".0f", "dice": ".5f"}
        texts.append(f"{summarise(rows)}\n\n{markdown_table(rows, SCAN_COLUMNS, formats)}")
    if arguments.get("cases"):
        tables = [Path(path).absolute() for path in arguments["cases"].split(",")]
        rows = budgets(output / "budgets", tables)
        write_csv(output / "budgets.csv", rows)
        formats = {"peak_mib": ".0f", "dice": ".5f", "seconds": ".0f"}
        texts.append(markdown_table(rows, BUDGET_COLUMNS, formats))
    replace_text(output / "limits.md", "\n".join(texts))
    print("\n".join(texts), end="")


def summarise(rows: Sequence[dict[str, Any]]) -> str:
    """Count the limited predictions that were killed, were refused or gave other labels."""
    # A refused scan gives EXIT_FAILED; any other exit code but 0 is a crash.
    num_killed = sum(row["code"] not in (0, EXIT_FAILED) for row in rows)
    num_refused = sum(row["code"] == EXIT_FAILED for row in rows)
    largest_mib = max(row["peak_mib"] for row in rows)
    lowest_dice = min(row["dice"] for row in rows)
    num_different = sum(row["dice"] < EQUAL_DICE for row in rows)
    return (
        f"{len(rows)} scans under `inference.max_ram_gib={LIMIT_GIB:g}`: {num_killed} killed, "
        f"{num_refused} refused, largest peak {largest_mib:.0f} MiB, least Dice to the labels "
        f"without the limit {lowest_dice:.5f}; {num_different} below {EQUAL_DICE}."
    )


def limited_scans(folder: Path, number: int) -> list[dict[str, Any]]:
    """Predict phantoms without and with the limit: one row per scan.

    Args:
        folder: Receives the scans, and their label maps without and with the limit.
        number: Number of scans.
    """
    scans = folder / "scans"
    unlimited = folder / "free"
    limited = folder / "limited"
    # Numbers of slices in a geometric series, so that short and long scans are equally frequent.
    sizes = [round(float(size)) for size in np.geomspace(1, MAX_SLICES, number)]
    paths = [make_scan(scans, index, size) for index, size in enumerate(sizes)]
    code, peak = predict([f"input={scans}", f"output={unlimited}"], folder / "free.log")
    print(f"without a limit: exit code {code}, {peak / 2**30:.2f} GiB", flush=True)
    rows = []
    for path in paths:
        name = path.name.removesuffix(".nii.gz")
        # Exit code and peak bytes; written last, so that a stopped prediction is made again.
        measured_file = limited / f"{name}.measured"
        if not measured_file.is_file():
            arguments = [
                f"input={path}",
                f"output={limited / path.name}",
                f"inference.max_ram_gib={LIMIT_GIB:g}",
                "overwrite=true",
            ]
            code_and_peak = predict(arguments, measured_file.with_suffix(".log"))
            replace_text(measured_file, json.dumps(code_and_peak))
        code, peak = json.loads(measured_file.read_text(encoding="utf-8"))
        # A scan without labels under the limit counts as refused or killed, not as different.
        dice = 1.0
        if code == 0:
            dice = least_dice(unlimited / path.name, limited / path.name)
        # The label map has the shape of the scan, and is quicker to read.
        shape = read_labels(unlimited / path.name).array.shape
        rows.append(
            {
                "scan": name,
                "slices": shape[0],
                "matrix": shape[1],
                "mib": 2 * np.prod(shape) / 2**20,  # the scan is int16
                "code": code,
                "peak_mib": peak / 2**20,
                "dice": dice,
            }
        )
        print(*rows[-1].values(), flush=True)
    return rows


def make_scan(folder: Path, index: int, num_slices: int) -> Path:
    """Make a phantom unless it exists: a coarser phantom with each voxel repeated.

    Args:
        folder: Folder of the scans.
        index: Number of the scan; matrix and field of view change with it.
        num_slices: About the number of slices; it is rounded so that each slice of the coarser
            phantom is repeated equally often.

    Returns:
        The file.
    """
    # The matrices in turn, the smallest first.
    matrix = MATRICES[-1 - index % len(MATRICES)]
    # The scan with the most slices also has the largest matrix.
    if num_slices >= MAX_SLICES:
        matrix = max(MATRICES)
    # Every second scan shows the trunk, and so do all scans with many slices.
    is_long = num_slices > MAX_SLICES // 3 or index % 2 == 1
    view = "trunk" if is_long else "whole"
    slice_mm = min(MAX_SLICE_MM, LENGTH_MM[view] / num_slices)
    # Slices of the scan per slice of the coarse phantom, and pixels per pixel along an axis.
    slice_repeats = max(1, round(MODEL_MM / slice_mm))
    pixel_repeats = matrix // MODEL_SIZE
    num_model_slices = max(1, num_slices // slice_repeats)
    path = folder / f"{index:03d}_{view}_{num_model_slices * slice_repeats}.nii.gz"
    if path.is_file():
        return path
    spec = PhantomSpec(
        seed=17,
        index=index,
        view=view,
        spacing_mm=(slice_mm * slice_repeats, MODEL_MM, MODEL_MM),
        matrix=(MODEL_SIZE, MODEL_SIZE),
        num_slices=num_model_slices,
        model_spacing_mm=(4.0, 4.0, 4.0),
    )
    phantom = make_phantom(spec)
    image_hu = phantom.image_hu.repeat(slice_repeats, axis=0)
    image_hu = image_hu.repeat(pixel_repeats, axis=1).repeat(pixel_repeats, axis=2)
    pixel_mm = MODEL_MM / pixel_repeats
    spacing_mm = (slice_mm, pixel_mm, pixel_mm)
    direction = np.asarray(phantom.grid.direction).tolist()
    grid = VoxelGrid(image_hu.shape, spacing_mm, phantom.grid.origin_xyz_mm, direction)
    write_image(path, image_hu, grid)
    return path


def budgets(folder: Path, tables: Sequence[Path]) -> list[dict[str, Any]]:
    """Predict the scans of case tables with each budget: one row per budget.

    Args:
        folder: Receives the label maps, in a folder for each budget.
        tables: Case tables.
    """
    rows = []
    names: list[str] = []
    for table in tables:
        names += [case.name for case in read_cases(table)]
    # The largest budget first: the labels of the others are compared with its labels.
    for budget_gib in reversed(BUDGETS_GIB):
        output = folder / f"{budget_gib:g}"
        peak = 0
        start = time.perf_counter()
        for table in tables:
            log = output / f"{table.parent.name}.log"
            arguments = [
                f"input={table}",
                f"output={output}",
                f"inference.budget_gib={budget_gib:g}",
            ]
            _, peak_of_table = predict(arguments, log)
            peak = max(peak, peak_of_table)
        seconds = time.perf_counter() - start
        dices: dict[str, float] = {}  # of the scans that were not refused
        for name in names:
            reference_file = folder / f"{max(BUDGETS_GIB):g}" / f"{name}.nii.gz"
            file = output / f"{name}.nii.gz"
            if reference_file.is_file() and file.is_file():
                dices[name] = least_dice(reference_file, file)
        # None where the budget is too small for all scans.
        worst = min(dices, key=lambda name: dices[name], default=None)
        row = {
            "budget_gib": budget_gib,
            "scans": len(names),
            "refused": len(names) - len(dices),
            "peak_mib": peak / 2**20,
            "dice": None if worst is None else dices[worst],
            "worst": worst,
            "seconds": seconds,
        }
        print(*row.values(), flush=True)
        rows.append(row)
    return rows


def predict(arguments: Iterable[str], log: Path) -> tuple[int, int]:
    """Run `predict` to its end; return its exit code and its largest resident memory in bytes."""
    log.parent.mkdir(parents=True, exist_ok=True)
    peak = 0
    with log.open("wb") as stream:
        process = psutil.Popen(
            [*COMMAND, *arguments], stdout=stream, stderr=subprocess.STDOUT, cwd=ROOT
        )
        # The system keeps the largest value, so only the last 20 ms may be missed.
        while process.poll() is None:
            peak = max(peak, largest_resident_bytes(process))
            time.sleep(0.02)
    return process.returncode, peak


def least_dice(first_path: Path, second_path: Path) -> float:
    """Lowest Dice of any region between two label maps; a region that is in neither counts as 1."""
    first = read_labels(first_path).array
    second = read_labels(second_path).array
    scores = [1.0]
    for value in range(1, 1 + max(int(first.max()), int(second.max()))):
        in_first = first == value
        in_second = second == value
        total = np.count_nonzero(in_first) + np.count_nonzero(in_second)
        if total:
            scores.append(2 * np.count_nonzero(in_first & in_second) / total)
    return min(scores)


if __name__ == "__main__":
    main()
