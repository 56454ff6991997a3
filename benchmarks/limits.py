"""Limits benchmark: peak memory of predictions under a limit, and their labels compared with predictions without a limit.

    python -m benchmarks.limits output=<folder> [scans=100] [cases=<table.csv>,…]

Phantoms of 1 to 3,000 slices are predicted together without a limit, then each by a process of its
own under `inference.max_ram_gib=1`. The scans of the case tables are predicted with each of several
`inference.budget_gib`, all scans of a table in one process. Peaks are the largest resident memory
of the process by the system's own count. Labels are compared by the Dice of each region. Existing
scans and predictions are kept. Writes `limits.csv` and `budgets.csv`, and `limits.md` with both.
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
BUDGETS_GIB = (0.25, 0.5, 1.0, 4.0)  # labels are compared with those of the largest
EQUAL = 0.9995
# Pixels of the phantoms' model; a scan repeats each of them.
MODEL_SIZE, MODEL_MM = 128, 3.2
MATRICES = (512, 256, 128)
LENGTH_MM = {"whole": 320.0, "trunk": 900.0}
MAX_SLICE_MM = 5.0
COMMAND = [sys.executable, "-m", "medseg.commands.cli", "predict", "accelerator=cpu"]
SCANS = {
    "scan": "scan", "slices": "slices", "matrix": "matrix", "mib": "scan MiB", "code": "exit code", "peak_mib": "peak MiB", "dice": "least Dice",
}  # fmt: skip
BUDGETS = {
    "budget_gib": "`inference.budget_gib`", "scans": "scans", "refused": "refused", "peak_mib": "peak MiB", "dice": "least Dice", "worst": "of",
    "seconds": "s",
}  # fmt: skip


def main() -> None:
    """Measure both parts, and write the tables."""
    output, given = given_arguments(["scans", "cases"])
    texts = []
    if number := int(given.get("scans", 100)):
        rows = limited_scans(output / "phantoms", number)
        write_csv(output / "limits.csv", rows)
        summary = (
            f"{len(rows)} scans under `inference.max_ram_gib={LIMIT_GIB:g}`: {sum(row['code'] not in (0, EXIT_FAILED) for row in rows)} killed, "
            f"{sum(row['code'] == EXIT_FAILED for row in rows)} refused, largest peak {max(row['peak_mib'] for row in rows):.0f} MiB, least Dice to the "
            f"labels without the limit {min(row['dice'] for row in rows):.5f}; {sum(row['dice'] < EQUAL for row in rows)} below {EQUAL}."
        )
        texts.append(
            summary
            + "\n\n"
            + markdown_table(rows, SCANS, {"mib": ".1f", "peak_mib": ".0f", "dice": ".5f"})
        )
    if tables := given.get("cases"):
        rows = budgets(output / "budgets", [Path(one).absolute() for one in tables.split(",")])
        write_csv(output / "budgets.csv", rows)
        texts.append(
            markdown_table(rows, BUDGETS, {"peak_mib": ".0f", "dice": ".5f", "seconds": ".0f"})
        )
    replace_text(output / "limits.md", "\n".join(texts))
    print("\n".join(texts), end="")


def limited_scans(folder: Path, number: int) -> list[dict[str, Any]]:
    """Predict phantoms without and with the limit: one row per scan."""
    scans, free, limited = folder / "scans", folder / "free", folder / "limited"
    sizes = [round(float(size)) for size in np.geomspace(1, MAX_SLICES, number)]
    paths = [make_scan(scans, index, size) for index, size in enumerate(sizes)]
    code, peak = predict([f"input={scans}", f"output={free}"], folder / "free.log")
    print(f"without a limit: exit code {code}, {peak / 2**30:.2f} GiB", flush=True)
    rows = []
    for path in paths:
        name = path.name.removesuffix(".nii.gz")
        log = limited / f"{name}.log"
        if not (measured := log.with_suffix(".measured")).is_file():
            arguments = [
                f"input={path}",
                f"output={limited / path.name}",
                f"inference.max_ram_gib={LIMIT_GIB:g}",
                "overwrite=true",
            ]
            replace_text(measured, json.dumps(predict(arguments, log)))
        code, peak = json.loads(measured.read_text(encoding="utf-8"))
        shape = read_labels(free / path.name).array.shape
        rows.append(
            {
                "scan": name,
                "slices": shape[0],
                "matrix": shape[1],
                "mib": 2 * np.prod(shape) / 2**20,
                "code": code,
                "peak_mib": peak / 2**20,
                "dice": 1.0 if code else least_dice(free / path.name, limited / path.name),
            }
        )
        print(*rows[-1].values(), flush=True)
    return rows


def make_scan(folder: Path, index: int, num_slices: int) -> Path:
    """Make a phantom unless it exists; its small voxels repeat those of a coarser phantom."""
    matrix = MATRICES[-1 - index % len(MATRICES)] if num_slices < MAX_SLICES else max(MATRICES)
    view = "trunk" if num_slices > MAX_SLICES // 3 or index % 2 else "whole"
    slice_mm = min(MAX_SLICE_MM, LENGTH_MM[view] / num_slices)
    repeats, pixels = max(1, round(MODEL_MM / slice_mm)), matrix // MODEL_SIZE
    num_models = max(1, num_slices // repeats)
    path = folder / f"{index:03d}_{view}_{num_models * repeats}.nii.gz"
    if not path.is_file():
        spec = PhantomSpec(
            seed=17,
            index=index,
            view=view,
            spacing_mm=(slice_mm * repeats, MODEL_MM, MODEL_MM),
            matrix=(MODEL_SIZE, MODEL_SIZE),
            num_slices=num_models,
            model_spacing_mm=(4.0, 4.0, 4.0),
        )
        made = make_phantom(spec)
        image_hu = made.image_hu.repeat(repeats, 0).repeat(pixels, 1).repeat(pixels, 2)
        spacing_mm = (slice_mm, MODEL_MM / pixels, MODEL_MM / pixels)
        grid = VoxelGrid(
            image_hu.shape,
            spacing_mm,
            made.grid.origin_xyz_mm,
            np.asarray(made.grid.direction).tolist(),
        )
        write_image(path, image_hu, grid)
    return path


def budgets(folder: Path, tables: Sequence[Path]) -> list[dict[str, Any]]:
    """Predict the scans of case tables with each budget: one row per budget."""
    rows = []
    cases = [case.name for table in tables for case in read_cases(table)]
    for budget_gib in reversed(BUDGETS_GIB):
        output, peak, start_s = folder / f"{budget_gib:g}", 0, time.perf_counter()
        for table in tables:
            log = output / f"{table.parent.name}.log"
            arguments = [
                f"input={table}",
                f"output={output}",
                f"inference.budget_gib={budget_gib:g}",
            ]
            peak = max(peak, predict(arguments, log)[1])
        seconds, best = time.perf_counter() - start_s, folder / f"{max(BUDGETS_GIB):g}"
        pairs = {name: [one / f"{name}.nii.gz" for one in (best, output)] for name in cases}
        found = {
            name: least_dice(*pair)
            for name, pair in pairs.items()
            if all(path.is_file() for path in pair)
        }
        worst = min(found, key=found.__getitem__)
        row = {
            "budget_gib": budget_gib,
            "scans": len(cases),
            "refused": len(cases) - len(found),
            "peak_mib": peak / 2**20,
            "dice": found[worst],
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
        while process.poll() is None:
            peak = max(peak, largest_resident_bytes(process))
            time.sleep(0.02)
    return process.returncode, peak


def least_dice(one: Path, other: Path) -> float:
    """Lowest Dice of any region between two label maps; a region that is in neither counts as 1."""
    first, second = (read_labels(path).array for path in (one, other))
    scores = [1.0]
    for value in range(1, 1 + max(int(first.max()), int(second.max()))):
        inside, also = first == value, second == value
        if total := np.count_nonzero(inside) + np.count_nonzero(also):
            scores.append(2 * np.count_nonzero(inside & also) / total)
    return min(scores)


if __name__ == "__main__":
    main()
