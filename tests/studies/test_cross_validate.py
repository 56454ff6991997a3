"""Cross-validation and weights recipe: share of a region in the crop, commands of a study, tables, and metadata without folders."""

from __future__ import annotations

import csv
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from medseg.cascade.cascade import RegionBox
from medseg.config.schema import MakeWeightsConfig
from medseg.data.case_table import Case, read_case_table, write_case_table
from medseg.geometry.grid import VoxelBox, VoxelGrid
from medseg.io.write import write_labels
from medseg.preprocess.scale import HuScale
from medseg.studies import steps as steps_module
from medseg.studies.cross_validate import share_in_crop, write_rows
from medseg.studies.make_weights import without_folders

# Stored from the patient's left to right and from back to front.
GRID = VoxelGrid((8, 20, 30), (4.0, 2.0, 1.0), (10.0, -5.0, 30.0), ((-1, 0, 0), (0, -1, 0), (0, 0, 1)))


def test_the_share_in_the_crop_counts_whole_voxels(tmp_path: Path) -> None:
    labels = np.zeros(GRID.shape, dtype=np.uint8)
    labels[2:6, 4:14, 10:20] = 2  # 400 voxels
    write_labels(tmp_path / "l.nii.gz", labels, GRID, None)
    case = Case("c", tmp_path / "i.nii.gz", tmp_path / "l.nii.gz", "p")
    oriented = GRID.reoriented((0, 1, 2), (False, True, True))
    fine = oriented.resampled((2.0, 2.0, 2.0))

    def share(low_z_mm: float, high_z_mm: float) -> float:
        """Share in a crop that covers the volume in plane and two heights (outer faces) along z."""
        bottom_mm = 30.0 - 2.0  # outer face of the lowest slice
        start, stop = round((low_z_mm - bottom_mm) / 2), round((high_z_mm - bottom_mm) / 2)
        box = VoxelBox((start, 0, 0), (stop, *fine.shape[1:]))
        crop = fine.crop(box)
        bent = crop.resized((7, 30, 24))  # a crop of fixed size: the same piece, other voxels
        shares = {
            share_in_crop(case, [2], json.loads(json.dumps(RegionBox(voxels, grid).to_dict())))
            for voxels, grid in ((box, crop), (VoxelBox.full(bent.shape), bent))
        }
        assert len(shares) == 1
        return shares.pop()

    assert share(28.0, 60.0) == 1.0
    assert share(36.0, 52.0) == 1.0  # exactly the slices 2 to 5
    assert share(40.0, 52.0) == 0.75
    assert share(36.0, 44.0) == 0.5
    assert share_in_crop(case, [2], None) == 0.0
    assert share_in_crop(case, [1], None) == 1.0


def test_a_stage_starts_from_phantoms_once_and_finished_runs_are_kept(tmp_path: Path) -> None:
    config = MakeWeightsConfig(
        cases="t.csv", output="out", runs="runs", coarse="a", fine="b", pretrain_coarse="p", pretrain_fine=None
    )

    def steps(folder: str) -> list[steps_module.Step]:
        return steps_module.cascade_steps(config, tmp_path / folder, ["data.cases=t.csv"], tmp_path)

    pretrain, coarse, fine = steps("fold_0")
    assert pretrain[:2] == ["train", "experiment=p"]
    assert not any(argument.startswith(("data.cases", "init_from")) for argument in pretrain)
    assert f"init_from={tmp_path / 'p' / 'checkpoints' / 'last.ckpt'}" in coarse
    assert not any(argument.startswith("init_from") for argument in fine)
    assert "data.cases=t.csv" in coarse
    assert "data.cases=t.csv" in fine
    assert steps("fold_1")[0] == pretrain
    for folder, status in (("p", "finished"), ("fold_0/coarse", "interrupted")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.yaml").touch()
        (tmp_path / folder / "summary.json").write_text(json.dumps({"status": status}))
    coarse, fine = steps("fold_0")
    assert coarse[-1] == f"resume={tmp_path / 'fold_0' / 'coarse'}"
    assert not fine[-1].startswith("resume")


@pytest.mark.parametrize(
    ("codes", "expected", "num_run"), [((0, 0, 0), 0, 3), ((1, 0, 0), 1, 1), ((0, 1, 0), 0, 3), ((0, 2, 0), 2, 2)]
)
def test_a_step_that_fails_ends_the_study_and_failed_cases_do_not(
    codes: tuple[int, ...], expected: int, num_run: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run: list[str] = []

    def fake(command: list[str], check: bool) -> object:
        run.append(command[3])
        return type("Result", (), {"returncode": codes[len(run) - 1]})

    monkeypatch.setattr(steps_module.subprocess, "run", fake)
    with pytest.raises(SystemExit) if expected else nullcontext() as end:
        steps_module.run_steps([["train", "a"], ["predict", "b"], ["evaluate", "c"]])
    assert (end.value.code if end else 0) == expected
    assert run == ["train", "predict", "evaluate"][:num_run]


def test_tables_are_written_to_be_read_again(tmp_path: Path) -> None:
    given = [
        Case("Doe, John", Path("a b/ü.nii.gz"), Path("l.nrrd"), "p", trust={"left_lung": "absent"}),
        Case("b", Path("dicom"), None, "q", series="2", hu=HuScale(1.0, -1024.0)),
    ]
    first, second = read_case_table(write_case_table(tmp_path / "fold_0" / "held_out.csv", given))
    assert first == replace(given[0], image=Path("a b/ü.nii.gz").absolute(), labels=Path("l.nrrd").absolute())
    assert second == replace(given[1], image=Path("dicom").absolute())
    scores = {"dice": 0.5, "nsd_1mm": 0.25, "nsd_2mm": 0.3, "hd95_mm": np.inf, "volume_pred_ml": 1.0, "volume_ref_ml": 2.0}
    rows = [{"case": c, "fold": 0, "region": "left_lung", "trust": t, **scores, "share_in_crop": 0.999, "total_s": 1.0}
            for c, t in (("a", "reference"), ("b", "reference"), ("c", "absent"))]  # fmt: skip
    rows[1]["dice"] = 0.9
    rows[2] |= {"volume_pred_ml": 7.0, "volume_ref_ml": 0.0}
    write_rows(rows, tmp_path, {"a", "b"})
    with (tmp_path / "folds.csv").open() as file:
        assert [row["dice"] for row in csv.DictReader(file)] == ["0.5", "0.9", "0.5"]
    text = (tmp_path / "folds.md").read_text()
    assert "Mean Dice, reference (2): 0.7000, worst 0.5000: a left_lung (scores/overlays/a.png)" in text
    assert "Mean Dice, absent" not in text, "where nothing is, millilitres say more"
    assert "Most found where nothing is (1): 7.0 ml: c left_lung (scores/overlays/c.png)" in text
    assert "| a | 0 | left_lung | reference | 0.5000 | 0.250 | none | 1 | 2 | 99.90 % |" in text
    scans, pieces = text.split("Pieces cut out of these scans:")
    assert ("| b |" in scans, "| b |" in pieces, "| c |" in scans, "| c |" in pieces) == (True, False, False, True)


def test_published_metadata_names_no_folder() -> None:
    metadata = {
        "config": {"run_dir": "/home/x/run", "data": {"cases": "/data/table.csv", "cache": "c", "fold": "all"}, "logger": {}}
    }
    cleaned = without_folders(metadata)
    assert cleaned["config"]["run_dir"] == "run"
    assert cleaned["config"]["data"] == {"cases": "table.csv", "cache": "c", "fold": "all"}
    assert metadata["config"]["data"]["cases"] == "/data/table.csv"
