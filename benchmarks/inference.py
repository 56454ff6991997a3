"""The `bench_inference` command: medseg beside the networks of others on one CT, in one run, with the same threads."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from medseg.commands import entry
from medseg.config.overrides import quote
from medseg.config.schema import BenchInferenceConfig
from medseg.errors import UserError
from medseg.io.replacing import replace_text
from medseg.studies.baselines import make_environment

CONTENDERS = {
    "lungmask": "lungmask, network of R231",
    "nnunet": "nnU-Net, default network at 1 mm",
    "monai": "MONAI, sliding window with our fine network at 1 mm",
}
OURS = "medseg, from file to file"


class Row(NamedTuple):
    """A contender's cost.

    Attributes:
        name: Who.
        wall_s: Seconds from the start of the process to its end, a part scaled to the whole.
        cpu_s: Seconds of all its threads, likewise.
        peak_gb: Most resident memory, as measured.
        measured: What was run.
    """

    name: str
    wall_s: float
    cpu_s: float
    peak_gb: float
    measured: str


def main() -> None:
    """Compose, check, measure."""
    entry.run("bench_inference", BenchInferenceConfig, bench_inference)


def bench_inference(config: BenchInferenceConfig) -> int:
    """Measure medseg and, where asked to, its peers one after the other; write `bench.csv` and `bench.md`.

    Raises:
        UserError: If the input is missing, the peers cannot be installed, or a process fails.
    """
    output = Path(config.output).absolute()
    image = Path(config.input).absolute() if config.input else make_scan(output)
    if not image.exists():
        raise UserError(f"input={config.input}: this file or folder does not exist; check the path")
    # Before anything is measured: what cannot be installed must not cost the rest.
    python = make_environment(Path(config.peers_env).absolute()) if config.peers else None
    command = [
        sys.executable, "-m", "medseg.commands.cli", "predict", f"input={quote(str(image))}", f"output={quote(str(output / 'lungs.nii.gz'))}",
        "accelerator=cpu", f"threads={config.threads}", "overwrite=true",
    ]  # fmt: skip
    rows = [measure(OURS, command, config.threads)]
    for name, title in CONTENDERS.items() if python else ():
        request, answer = output / f"{name}_request.json", output / f"{name}.json"
        replace_text(request, json.dumps({"name": name, "input": str(image), "threads": config.threads}))
        row = measure(title, [str(python), "-m", "benchmarks.baseline", str(request), str(answer)], config.threads)
        rows.append(scaled(row, **json.loads(answer.read_text(encoding="utf-8"))))
    replace_text(output / "bench.csv", csv_text(rows))
    replace_text(output / "bench.md", markdown(rows))
    print(markdown(rows), end="")
    return 0


def make_scan(folder: Path) -> Path:
    """Make the phantom of the bench, 512×512×300 voxels of 0.75×0.75×1 mm, unless it is there."""
    path = folder / "ct.nii.gz"
    if not path.is_file():
        from medseg.io.write import write_image
        from medseg.phantom.scan import make_phantom
        from medseg.phantom.spec import PhantomSpec

        print(f"making {path}", flush=True)
        spec = PhantomSpec(
            seed=7, index=0, spacing_mm=(1.0, 0.75, 0.75), matrix=(512, 512), num_slices=300, model_spacing_mm=(1.5, 1.5, 1.5)
        )
        phantom = make_phantom(spec)
        write_image(path, phantom.image_hu, phantom.grid)
    return path


def measure(name: str, command: Sequence[str], threads: int) -> Row:
    """Run a process to its end and read from the system what it took.

    Raises:
        UserError: If it fails.
    """
    print(f"measuring {name}", flush=True)
    start_s = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": str(threads)})
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise UserError(f"{name} could not be measured (exit code {process.returncode}); what went wrong stands above")
    wall_s = time.perf_counter() - start_s
    peak_bytes = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return Row(name, wall_s, usage.ru_utime + usage.ru_stime, peak_bytes / 1e9, "all")


def scaled(row: Row, part_s: float, part_cpu_s: float, share: float, what: str) -> Row:
    """Scale the part of the work that a process did to the whole; start-up and reading are counted once."""
    more = 1 / share - 1
    return row._replace(wall_s=row.wall_s + more * part_s, cpu_s=row.cpu_s + more * part_cpu_s, measured=what)


def _cells(rows: Sequence[Row]) -> list[list[str]]:
    return [
        [
            row.name, f"{row.wall_s:.1f}", f"{row.cpu_s:.1f}", f"{row.peak_gb:.2f}", f"{row.wall_s / rows[0].wall_s:.1f}",
            f"{row.cpu_s / rows[0].cpu_s:.1f}", row.measured,
        ]
        for row in rows
    ]  # fmt: skip


def csv_text(rows: Sequence[Row]) -> str:
    """The table for programs; ratios are those to the first row."""
    text = io.StringIO()
    header = ["contender", "wall_s", "cpu_s", "peak_gb", "wall_ratio", "cpu_ratio", "measured"]
    csv.writer(text, lineterminator="\n").writerows([header, *_cells(rows)])
    return text.getvalue()


def markdown(rows: Sequence[Row]) -> str:
    """The table for readers; ratios are those to the first row."""
    header = ["", "wall s", "CPU s", "peak GB", "wall ratio", "CPU ratio", "measured, rest scaled"]
    table = [header, ["---"] * len(header), *_cells(rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in table)
