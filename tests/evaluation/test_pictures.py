"""Pictures of scored cases: viewers of the worst cases, and scans named by a report."""

from __future__ import annotations

import base64
import gzip
import json
import re
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest

from medseg.errors import UserError
from medseg.evaluation import pictures
from medseg.evaluation.scoring import evaluate_folder
from medseg.geometry.grid import VoxelGrid
from medseg.io.tables import write_csv
from medseg.io.write import write_image, write_labels
from medseg.task import Channel, Task

TASK = Task("organ", {"organ": 1}, (), (Channel(window_hu=(-160.0, 240.0)),))
GRID = VoxelGrid((12, 20, 24), (2.0, 2.0, 2.0), (-20.0, 10.0, 5.0))
SHIFTS = {"good": 0, "bad": 3, "worse": 6}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write scans, references, predictions moved along y by some voxels, and a case table."""
    target = np.zeros(GRID.shape, np.uint8)
    target[3:9, 2:12, 6:18] = 1
    for name, shift in SHIFTS.items():
        write_image(
            tmp_path / "ct" / f"{name}.nii.gz",
            np.where(target > 0, 60, -100).astype(np.int16),
            GRID,
        )
        write_labels(tmp_path / "ref" / f"{name}.nii.gz", target, GRID)
        write_labels(tmp_path / "pred" / f"{name}.nii.gz", np.roll(target, shift, axis=1), GRID)
    write_csv(
        tmp_path / "cases.csv",
        [
            {"case": name, "image": f"ct/{name}.nii.gz", "labels": f"ref/{name}.nii.gz"}
            for name in SHIFTS
        ],
    )
    return tmp_path


def evaluated(folder: Path, ref: str, **options: Any) -> str:
    evaluate_folder(
        folder / "pred",
        folder / ref,
        folder / "out",
        TASK,
        {1: "organ"},
        progress=lambda line: None,
        **options,
    )
    return (folder / "out" / "report.html").read_text(encoding="utf-8")


def viewers(folder: Path) -> set[str]:
    return {path.name for path in (folder / "out" / "viewers").glob("*")}


def differences(page: Path) -> np.ndarray:
    """Read the map of differences (x, y, z) from a viewer."""
    (text,) = re.findall(r'id="volume-differences">([^<]+)<', page.read_text(encoding="utf-8"))
    image = nibabel.Nifti1Image.from_bytes(gzip.decompress(base64.b64decode(text)))
    return np.asarray(image.dataobj)


def test_the_worst_cases_get_viewers_with_their_reference(folder: Path) -> None:
    report = {
        "status": "warnings",
        "warnings": ["the bed was taken for a lung"],
        "agreements": {"organ": 0.71},
        "dice_at_least": {"organ": {"value": 0.648, "level": 0.95, "patients": 31}},
    }
    (folder / "pred" / "bad.json").write_text(
        json.dumps({**report, "most_disputed_xyz_mm": [0, 25, 9]})
    )
    (folder / "pred" / "worse.json").write_text('{"status": 1, "warnings": [], "agreements": []}')
    older = report | {"dice_at_least": {"organ": 0.91}, "most_disputed_xyz_mm": None}
    (folder / "pred" / "good.json").write_text(json.dumps(older))
    page = evaluated(folder, "cases.csv", num_viewers=2)
    assert viewers(folder) == {"bad.html", "worse.html"}
    assert page.index('href="viewers/worse.html"') < page.index('href="viewers/bad.html"')
    for name, shift in SHIFTS.items():
        if name != "good":
            kinds = differences(folder / "out" / "viewers" / f"{name}.html")
            assert [int((kinds == kind).sum()) for kind in (1, 2, 3)] == [
                6 * shift * 12,
                6 * shift * 12,
                0,
            ], "missed, extra"
    viewer = (folder / "out" / "viewers" / "bad.html").read_text(encoding="utf-8")
    assert "the bed was taken for a lung" in viewer
    assert "0.710" in viewer, "agreement of the stages"
    bound = "at least 0.64 in 19 of 20 patients (31 patients)"
    sentence = "Dice at least 0.64 (organ) in 19 of 20 patients (31 patients)"
    assert viewer.count(sentence) == 1, "and what it says of the Dice coefficient"
    assert page.count(f"(expected {bound})") == 1
    assert page.count("(expected") == 1, "the bare number of an older report is no bound"
    assert "0.700" in viewer, "Dice"
    assert 'class="status' not in (folder / "out" / "viewers" / "worse.html").read_text(
        encoding="utf-8"
    ), "report of another program"
    evaluated(folder, "cases.csv", num_viewers=1)
    assert viewers(folder) == {"worse.html"}, "no viewer of an earlier evaluation"
    evaluated(folder, "cases.csv", pictures=False)
    assert viewers(folder) == set()


def test_with_a_folder_of_references_the_report_of_the_prediction_names_the_scan(
    folder: Path,
) -> None:
    for name, image in (("good", "good"), ("bad", "not there")):
        reading = {"series": None, "hu": {"slope": 1.0, "offset": -40.0}}
        (folder / "pred" / f"{name}.json").write_text(
            json.dumps({"input": str(folder / "ct" / f"{image}.nii.gz"), **reading})
        )
    evaluated(folder, "ref")
    assert {path.name for path in (folder / "out" / "overlays").glob("*")} == {"good.png"}
    assert viewers(folder) == {"good.html"}
    assert '<td class="number">20</td>' in (folder / "out" / "viewers" / "good.html").read_text(
        encoding="utf-8"
    ), "mean HU"
    assert not (differences(folder / "out" / "viewers" / "good.html") > 0).any()


def test_the_first_of_several_channels_of_a_4d_file_is_drawn(folder: Path) -> None:
    task = Task("organ", {"organ": 1}, (), (Channel(modality="mr"), Channel(modality="mr")))
    for name in SHIFTS:
        path = folder / "ct" / f"{name}.nii.gz"
        image = nibabel.load(path)
        nibabel.save(
            nibabel.Nifti1Image(np.stack([np.asarray(image.dataobj)] * 2, axis=-1), image.affine),
            path,
        )
    summary = evaluate_folder(
        folder / "pred",
        folder / "cases.csv",
        folder / "out",
        task,
        {1: "organ"},
        progress=lambda line: None,
        num_viewers=1,
    )
    assert summary.warnings == []
    assert viewers(folder) == {"worse.html"}


def test_a_case_that_cannot_be_read_again_has_no_viewer_and_the_page_is_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_pair = pictures.read_pair

    def read_again(prediction: Any, reference: Any, *rest: Any) -> Any:
        if reference.name == "bad":
            raise UserError("bad.nii.gz: cannot be read")
        return read_pair(prediction, reference, *rest)

    monkeypatch.setattr(pictures, "read_pair", read_again)
    page = evaluated(folder, "cases.csv")
    assert 'href="viewers/worse.html"' in page
    assert 'href="viewers/bad.html"' not in page
