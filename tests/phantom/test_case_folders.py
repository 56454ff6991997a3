"""Data set of phantoms: table, files, and cases that a second run keeps."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Self

import numpy as np
import pytest

from medseg.errors import UserError
from medseg.io.read import read_image, read_labels
from medseg.phantom import case_folders as dataset
from medseg.phantom.case_folders import write_phantoms
from medseg.phantom.scan import make_phantom
from medseg.phantom.spec import PhantomSpec
from medseg.worker_process import WorkerDiedError


def _coarse(seed: int, index: int, detail: str) -> PhantomSpec:
    view = "neck" if index == 1 else "mid"
    return PhantomSpec(
        seed,
        index,
        view=view,
        spacing_mm=(6.0, 5.0, 4.0),
        matrix=(60, 90),
        num_slices=5 if detail == "small" else 6,
        model_spacing_mm=(6.0, 5.0, 5.0),
        flips=(True, False, False),
    )


@pytest.fixture
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the drawn cases tiny."""
    monkeypatch.setattr(dataset, "draw_spec", _coarse)


@pytest.mark.usefixtures("coarse")
def test_files_hold_what_was_made(tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    table = write_phantoms(
        tmp_path / "ü (1)", 2, 3, splits={"train": 1, "test": 1}, progress=lambda *a: seen.append(a)
    )
    rows = list(csv.DictReader(table.open(encoding="utf-8")))
    columns = [
        "case",
        "image",
        "labels",
        "organs",
        "patient",
        "split",
        "view",
        "trust_left_lung",
        "trust_right_lung",
    ]
    assert list(rows[0]) == columns
    assert [row["split"] for row in rows] == ["train", "test"]
    assert [row["trust_left_lung"] for row in rows] == ["reference", "absent"]
    assert seen == [(1, 2, "phantom_000"), (2, 2, "phantom_001")]
    phantom = make_phantom(_coarse(3, 0, "small"))
    image = read_image(table.parent / rows[0]["image"])
    assert np.array_equal(image.array, phantom.image_hu)
    assert image.grid.is_close(phantom.grid)
    assert np.array_equal(read_labels(table.parent / rows[0]["labels"]).array, phantom.labels)
    assert np.array_equal(read_labels(table.parent / rows[0]["organs"]).array, phantom.organs)


@pytest.mark.usefixtures("coarse")
def test_finished_cases_are_kept_and_others_made_anew(tmp_path: Path) -> None:
    table = write_phantoms(tmp_path, 2, 3)
    before = table.read_bytes()
    files = [tmp_path / f"phantom_00{i}" / "ct.nii.gz" for i in range(2)]
    for damaged in (b"{ half", b"\xff\xfe\0", b"[]"):
        times = [file.stat().st_mtime_ns for file in files]
        (tmp_path / "phantom_001" / "phantom.json").write_bytes(damaged)
        write_phantoms(tmp_path, 2, 3)
        assert files[0].stat().st_mtime_ns == times[0]
        assert files[1].stat().st_mtime_ns > times[1]
    assert table.read_bytes() == before
    write_phantoms(tmp_path, 2, 3, detail="full")
    assert files[0].stat().st_mtime_ns > times[0]
    assert (
        json.loads((tmp_path / "phantom_000" / "phantom.json").read_text())["spec"]["num_slices"]
        == 6
    )
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.usefixtures("coarse")
@pytest.mark.parametrize("name", ["ct", "lungs", "organs"])
def test_a_case_that_lost_a_file_is_made_anew(name: str, tmp_path: Path) -> None:
    write_phantoms(tmp_path, 1, 3)
    lost = tmp_path / "phantom_000" / f"{name}.nii.gz"
    content = lost.read_bytes()
    lost.unlink()
    write_phantoms(tmp_path, 1, 3)
    assert lost.read_bytes() == content


@pytest.mark.usefixtures("coarse")
def test_cases_of_another_version_are_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_phantoms(tmp_path, 1, 3)
    image = tmp_path / "phantom_000" / "ct.nii.gz"
    written_ns = image.stat().st_mtime_ns
    monkeypatch.setattr(dataset, "VERSION", dataset.VERSION + 1)
    write_phantoms(tmp_path, 1, 3)
    assert image.stat().st_mtime_ns > written_ns


@pytest.mark.usefixtures("coarse")
@pytest.mark.slow
def test_any_number_of_processes_writes_the_same(tmp_path: Path) -> None:
    tables = [write_phantoms(tmp_path / str(count), 3, 3, num_workers=count) for count in (1, 2)]
    files = [
        {path.relative_to(table.parent): path.read_bytes() for path in table.parent.rglob("*.*")}
        for table in tables
    ]
    assert len(files[0]) == 1 + 3 * 4
    assert files[0] == files[1]


def test_splits_must_add_up(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must add up"):
        write_phantoms(tmp_path, 3, 0, splits={"train": 1})


def test_workers_end_with_the_process_that_was_killed(tmp_path: Path) -> None:
    script = tmp_path / "make.py"
    script.write_text(
        "from pathlib import Path\n"
        "from medseg.phantom.case_folders import write_phantoms\n"
        "if __name__ == '__main__':\n"
        f"    write_phantoms(Path({str(tmp_path)!r}), 40, 3, num_workers=2)\n"
    )
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=root
    )
    deadline_s = time.monotonic() + 60
    while not list(tmp_path.glob("phantom_*")) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    process.kill()
    assert process.stdout is not None
    said = process.stdout.read()  # ends when the last process that holds it has ended
    assert b"leaked" not in said, "semaphores of a queue would be left to Python's resource tracker"
    assert len(list(tmp_path.glob("phantom_*"))) < 40


def test_a_process_that_dies_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class DyingWorker(nullcontext[None]):
        def __enter__(self) -> Self:
            return self

        def call(self, *_: object) -> None:
            raise WorkerDiedError(-signal.SIGKILL)

    monkeypatch.setattr(dataset, "Worker", DyingWorker)
    said = (
        r"phantom_00\d: the phantom could not be made: its process was killed, as the system "
        "does when memory is full; free "
        r"some memory and start the command again, which keeps the phantoms that are finished\.$"
    )
    with pytest.raises(UserError, match=said):
        write_phantoms(tmp_path, 4, 3, num_workers=2)
