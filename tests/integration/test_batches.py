"""Batches and failures: whatever ends a prediction, only whole files stay, the next completes."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import forked
import numpy as np
import pytest

from medseg.geometry.grid import VoxelGrid
from medseg.io.nifti import new_header
from medseg.io.read import read_labels
from medseg.prediction.case_report import checksums

COMMAND = [
    sys.executable,
    "-m",
    "medseg.commands.cli",
    "predict",
    "input=scans",
    "output=out",
    "accelerator=cpu",
]


def start(folder: Path) -> forked.Popen:
    """Start a prediction with the included weights."""
    return forked.Popen(COMMAND, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"})


def ended(process: forked.Popen) -> tuple[int | None, str, str]:
    out, err = process.communicate(timeout=600)
    return process.returncode, out, err


def wait_for(condition: Callable[[], bool], process: forked.Popen, limit_s: float = 600) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert process.poll() is None, ended(process)
        assert time.monotonic() < deadline_s, "it takes too long"
        time.sleep(0.02)


def make_scans(folder: Path, table: Path, number: int) -> None:
    """Copies of one small scan, all of the same result."""
    (folder / "scans").mkdir()
    for index in range(number):
        shutil.copy(table.parent / "c0.nii.gz", folder / "scans" / f"{index:02d}.nii.gz")


def num_reports(folder: Path) -> int:
    return len(list((folder / "out").glob("[!.]*.json")))


def assert_whole(folder: Path) -> None:
    """Every label map can be read and has its report, and all are alike; drafts do not count."""
    maps = sorted((folder / "out").glob("[!.]*.nii.gz"))
    for path in maps:
        read_labels(path)
    for report in (folder / "out").glob("[!.]*.json"):
        label_map = report.with_suffix(".nii.gz")
        assert json.loads(report.read_text())["results"] == checksums([label_map])
    assert len({path.read_bytes() for path in maps}) == 1


@pytest.mark.slow
def test_an_interrupted_and_then_killed_batch_is_finished_by_the_next(
    tiny_table: Path, tmp_path: Path
) -> None:
    make_scans(tmp_path, tiny_table, 12)
    process = start(tmp_path)
    wait_for(lambda: num_reports(tmp_path) >= 2, process)
    process.send_signal(signal.SIGINT)
    code, _, said = ended(process)
    assert (code, said.splitlines()[-1]) == (130, "medseg: interrupted")
    assert not list((tmp_path / "out").glob(".*"))
    assert_whole(tmp_path)
    first = num_reports(tmp_path)

    process = start(tmp_path)
    wait_for(lambda: num_reports(tmp_path) >= first + 2, process)
    process.kill()
    process.communicate()
    assert_whole(tmp_path)
    second = num_reports(tmp_path)
    assert second < 12

    code, out, said = ended(start(tmp_path))
    assert code == 0, said
    assert out.count("finished before, skipped") == second
    assert f"{second} of 12 cases were finished before and skipped" in said
    assert num_reports(tmp_path) == len(list((tmp_path / "out").glob("[!.]*.nii.gz"))) == 12
    assert_whole(tmp_path)


@pytest.mark.slow
def test_two_predictions_may_write_into_one_folder(tiny_table: Path, tmp_path: Path) -> None:
    make_scans(tmp_path, tiny_table, 6)
    for code, _, said in map(ended, [start(tmp_path), start(tmp_path)]):
        assert code == 0, said
    suffixes = sorted(path.suffix for path in (tmp_path / "out").iterdir())
    assert suffixes == [".csv", *[".gz"] * 6, ".html", *[".json"] * 6, ".xlsx"]
    assert_whole(tmp_path)


@pytest.mark.slow
def test_a_disk_without_room_leaves_nothing_half_written(tiny_table: Path, tmp_path: Path) -> None:
    """No file may grow beyond 64 bytes: writes fail in the middle, as on a full disk."""
    make_scans(tmp_path, tiny_table, 2)
    # A new process: what a forked one prints goes to files.
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))  # noqa: E731
    done = subprocess.run(
        COMMAND, cwd=tmp_path, preexec_fn=limit, capture_output=True, encoding="utf-8"
    )
    said = done.stderr
    assert (done.returncode, done.stdout) == (1, ""), said
    for name in ("00", "01"):
        assert (
            f"medseg: {name}: out/{name}.nii.gz: cannot be written (File too large); check "
            "the folder"
        ) in said
    assert said.splitlines()[-1] == "medseg: 2 of 2 cases failed"
    assert not list((tmp_path / "out").iterdir())
    code, _, said = ended(start(tmp_path))
    assert code == 0, said
    assert_whole(tmp_path)


LIMITED = """
import resource, sys
from medseg.commands.entry import run_command
from medseg.prediction import batch as app

def vm_bytes():
    return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()

def limited(step, case, room):
    # Some room beside what the process has taken already, which differs from machine to machine.
    def run(scan, *arguments):
        if scan.name != case:
            return step(scan, *arguments)
        resource.setrlimit(resource.RLIMIT_AS, (vm_bytes() + room, resource.RLIM_INFINITY))
        try:
            return step(scan, *arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return run

# Less by far than they need: threads that end meanwhile give some room back.
app.read_case = limited(app.read_case, "b", 2**26)
app.segment_case = limited(app.segment_case, "c", 2**27)
run_command("predict")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps to such limits")
def test_a_case_beyond_the_memory_limit_costs_the_others_nothing(
    tiny_table: Path, tmp_path: Path
) -> None:
    """`b` cannot be read, `c` not resampled within the limit; neither is read ahead of its turn."""
    make_scans(tmp_path, tiny_table, 0)
    for name in ("a", "d"):
        shutil.copy(tiny_table.parent / "c0.nii.gz", tmp_path / "scans" / f"{name}.nii.gz")
    for name, num_slices in (("b", 1280), ("c", 640)):
        # Some air, the rest water; what was never written is a hole in the file.
        grid = VoxelGrid((num_slices, 512, 512), (2.0, 1.5, 1.5))
        path = tmp_path / "scans" / f"{name}.nii"
        header = new_header(np.dtype(np.int16), grid).binaryblock + bytes(4)
        with path.open("wb") as file:
            file.write(header)
            file.write(np.full((80, 512, 512), -1000, np.int16).tobytes())
            file.truncate(len(header) + 2 * num_slices * 512 * 512)
    command = [
        sys.executable,
        "-c",
        LIMITED,
        *COMMAND[4:],
        "inference.budget_gib=0.25",
        "precision=bf16",
    ]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 1, done.stderr
    for name in ("b", "c"):
        assert f"medseg: {name}: out of memory (" in done.stderr, done.stderr
    assert "medseg: 2 of 4 cases failed" in done.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "a.json",
        "a.nii.gz",
        "d.json",
        "d.nii.gz",
        "index.html",
        "summary.csv",
        "summary.xlsx",
    ]
    assert_whole(tmp_path)
