"""Cross-validation: share of a region in the crop, partial scans, and tables."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra
import numpy as np
import pytest

from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.config.schema import CrossValidateConfig
from medseg.data.case_table import Case, read_case_table, write_case_table
from medseg.data.options import StageName
from medseg.errors import UserError
from medseg.evaluation.scoring import METRICS
from medseg.geometry.grid import VoxelBox, VoxelGrid
from medseg.inference.segmentation import RegionBox
from medseg.io.atomic import replace_text
from medseg.io.tables import write_csv
from medseg.io.write import write_image, write_labels
from medseg.preprocess.scale import HuScale
from medseg.studies import command_steps, folds
from medseg.studies import cross_validate as study
from medseg.studies.fold_bound import BOUND, write_bound
from medseg.studies.fold_tables import fold_rows, share_in_crop, write_rows
from medseg.studies.folds import check_folds
from medseg.studies.held_out import reference_labels
from medseg.studies.make_weights import read_bound
from medseg.studies.train_arguments import spacing_argument
from medseg.task import Channel, Region, Task

# Stored from the patient's left to right and from back to front.
GRID = VoxelGrid(
    (8, 20, 30), (4.0, 2.0, 1.0), (10.0, -5.0, 30.0), ((-1, 0, 0), (0, -1, 0), (0, 0, 1))
)


def test_the_share_in_the_crop_counts_whole_voxels(tmp_path: Path) -> None:
    labels = np.zeros(GRID.shape, dtype=np.uint8)
    labels[2:6, 4:14, 10:20] = 2  # 400 voxels
    write_labels(tmp_path / "l.nii.gz", labels, GRID, None)
    case = Case("c", tmp_path / "i.nii.gz", tmp_path / "l.nii.gz", "p")
    reference, grid = reference_labels(case, heart(), {2: "heart"})
    oriented = GRID.reoriented((0, 1, 2), (False, True, True))
    fine = oriented.resampled((2.0, 2.0, 2.0))

    def share(low_z_mm: float, high_z_mm: float) -> float:
        """Share in a crop that covers the volume in y and x, and reaches from low to high along z.

        The heights are those of the outer faces of the first and the last slice.
        """
        bottom_mm = 30.0 - 2.0  # outer face of the lowest slice
        start, stop = round((low_z_mm - bottom_mm) / 2), round((high_z_mm - bottom_mm) / 2)
        box = VoxelBox((start, 0, 0), (stop, *fine.shape[1:]))
        crop = fine.crop(box)
        bent = crop.resized((7, 30, 24))  # a crop of fixed size: the same extent in other voxels
        shares = {
            share_in_crop(
                reference, grid, [1], json.loads(json.dumps(RegionBox(voxels, of).to_dict()))
            )
            for voxels, of in ((box, crop), (VoxelBox.full(bent.shape), bent))
        }
        assert len(shares) == 1
        return shares.pop()

    assert share(28.0, 60.0) == 1.0
    assert share(36.0, 52.0) == 1.0  # exactly the slices 2 to 5
    assert share(40.0, 52.0) == 0.75
    assert share(36.0, 44.0) == 0.5
    assert share_in_crop(reference, grid, [1], None) == 0.0
    assert share_in_crop(reference, grid, [2], None) == 1.0


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_crop_reaches_half_of_its_own_voxel_beyond_their_centres(
    size: int, tmp_path: Path
) -> None:
    """A crop of few large voxels covers the whole volume, and the region fills it."""
    labels = np.ones(GRID.shape, dtype=np.uint8)
    grid = GRID.reoriented((0, 1, 2), (False, True, True))
    crop = grid.resized((size, size, size))
    box = RegionBox(VoxelBox.full(crop.shape), crop)
    assert share_in_crop(labels, grid, [1], json.loads(json.dumps(box.to_dict()))) == 1.0


def heart() -> Task:
    """Make a task of one region."""
    return Task("heart", {"heart": 1}, (Region("heart", ("heart",)),), (Channel(),))


@pytest.mark.parametrize("label_values", [{1: "heart"}, {"Myocardium": "heart"}])
def test_the_share_in_the_crop_is_that_of_masks_too(tmp_path: Path, label_values: Any) -> None:
    """Masks have names, and their values say nothing."""
    labels = np.zeros(GRID.shape, dtype=np.uint8)
    labels[2:6, 4:14, 10:20] = 200
    name = "heart" if 1 in label_values else "myocardium"
    write_labels(tmp_path / "masks" / f"{name}.nii.gz", labels, GRID, None)
    write_labels(tmp_path / "masks" / "liver.nii.gz", np.full_like(labels, 1), GRID, None)
    output = tmp_path / "folds"
    case = Case("c", tmp_path / "i.nii.gz", tmp_path / "masks", "p")
    study_folds = folds.Folds([output / "fold_0"], [], {"c": 0}, {"c": case})
    grid = GRID.reoriented((0, 1, 2), (False, True, True))
    voxels = VoxelBox((2, 0, 0), (4, *GRID.shape[1:]))  # the lower half of the heart
    box = RegionBox(voxels, grid.crop(voxels))
    report = {
        "boxes": {"heart": box.to_dict()},
        "agreements": {"heart": 0.9},
        "durations_s": {"total": 1.0},
    }
    replace_text(output / "predictions" / "c.json", json.dumps(report))
    scores = dict.fromkeys(METRICS, 0.5)
    write_csv(output / "scores" / "metrics.csv", [{"case": "c", "region": "heart", "trust": "",
        **scores}])  # fmt: skip
    (row,) = fold_rows(study_folds, output, heart(), label_values, is_cascade=True)
    assert row["share_in_crop"] == 0.5


@pytest.mark.parametrize("key", ["pieces", "diseased"])
def test_harder_scans_are_made_of_label_maps(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks and DICOM structures are trained on and scored, but not cut or painted."""
    without_runs(monkeypatch, tmp_path, [], [])
    config = make_config(tmp_path, StageName.single)
    config.data.label_values = {"left_lung": "Lung_L"}
    assert study.cross_validate(config) == 0
    setattr(config, key, True)
    with pytest.raises(UserError, match="cut label maps, but Lung_L is no label map"):
        study.cross_validate(config)


def test_tables_are_written_to_be_read_again(tmp_path: Path) -> None:
    cases = [
        Case("Doe, John", Path("a b/ü.nii.gz"), Path("l.nrrd"), "p", trust={"left_lung": "absent"}),
        Case("b", Path("dicom"), None, "q", series="2", hu=HuScale(1.0, -1024.0)),
    ]
    first, second = read_case_table(write_case_table(tmp_path / "fold_0" / "held_out.csv", cases))
    assert first == replace(
        cases[0], image=Path("a b/ü.nii.gz").absolute(), labels=Path("l.nrrd").absolute()
    )
    assert second == replace(cases[1], image=Path("dicom").absolute())
    scores = {
        "dice": 0.5,
        "nsd_1mm": 0.25,
        "nsd_2mm": 0.3,
        "hd95_mm": np.inf,
        "volume_pred_ml": 1.0,
        "volume_ref_ml": 2.0,
    }
    rows = [{"case": c, "fold": 0, "region": "left_lung", "trust": t, **scores,
        "share_in_crop": 0.999, "total_s": 1.0}
            for c, t in (("a", "reference"), ("b", "reference"), ("c", "absent"))]  # fmt: skip
    rows[1]["dice"] = 0.9
    rows[2] |= {"volume_pred_ml": 7.0, "volume_ref_ml": 0.0}
    write_rows(
        rows,
        tmp_path,
        {"": {"a", "b"}, "Pieces cut out of these scans:": {"c"}, "Diseased:": set()},
    )
    with (tmp_path / "folds.csv").open() as file:
        assert [row["dice"] for row in csv.DictReader(file)] == ["0.5", "0.9", "0.5"]
    text = (tmp_path / "folds.md").read_text()
    assert (
        "Mean Dice, reference (2): 0.7000, worst 0.5000: a left_lung (scores/overlays/a.png)"
        in text
    )
    assert "Mean Dice, absent" not in text, "where nothing is, millilitres say more"
    assert (
        "Largest false-positive volume where the region is absent (1): 7.0 ml: c left_lung "
        "(scores/overlays/c.png)"
    ) in text
    assert "| a | 0 | left_lung | reference | 0.5000 | 0.250 | none | 1 | 2 | 99.90 % |" in text
    assert "Diseased" not in text, "no such scan"
    scans, pieces = text.split("Pieces cut out of these scans:")
    assert ("| b |" in scans, "| b |" in pieces, "| c |" in scans, "| c |" in pieces) == (
        True,
        False,
        False,
        True,
    )


def test_the_bound_rests_on_found_regions_with_a_trusted_reference(tmp_path: Path) -> None:
    config: Any = SimpleNamespace(
        output=str(tmp_path), coarse="a", fine="b", pretrain_coarse=None, pretrain_fine=None
    )
    (tmp_path / "folds.md").write_text("table\n")
    cases = {f"c{n}": Case(f"c{n}", Path("i"), Path("l"), f"p{n // 2}") for n in range(24)}
    rows = [{"case": name, "fold": n // 2 % 3, "agreement": 0.98, "dice": 0.98 - 0.001 * n,
        "trust": "reference"}
            for n, name in enumerate(cases)]  # fmt: skip
    rows += [{"case": "c0", "fold": 0, "agreement": agreement, "dice": 0.0, "trust": trust}
             for agreement,
             trust in ((None, "reference"), (0.98, "approximate"), (1.0, "absent"))]  # fmt: skip
    write_bound(rows, cases, config)
    # Twelve patients with two scans each, of which the worse counts. The level is
    # 0.9, so the bound is the error number ceil(13 · 0.9) = 12 in ascending order: the largest.
    assert read_bound(tmp_path / BOUND, config) == {
        "factor": pytest.approx((1 - 0.957) / 0.04),
        "level": 0.9,
        "num_patients": 12,
        "offset": 0.02,
    }
    text = (tmp_path / "folds.md").read_text()
    assert text.startswith("table\n")
    assert "from 12 patients" in text
    config.fine = "c"
    assert read_bound(tmp_path / BOUND, config) is None, "of other experiments"
    (tmp_path / BOUND).write_text('{"bound": ')
    with pytest.raises(UserError, match="start cross_validate again"):
        read_bound(tmp_path / BOUND, config)
    write_bound(rows[:6], cases, config)
    assert read_bound(tmp_path / BOUND, config) is None, (
        "too few patients, and the old file is gone"
    )


def make_config(folder: Path, stage: StageName, **values: Any) -> Any:
    """Make a configuration with the keys that `cross_validate` reads."""
    defaults = {
        "output": str(folder),
        "cases": "cases.csv",
        "num_folds": 3,
        "coarse": ["a"],
        "fine": ["b"],
        "pretrain_coarse": None,
        "pretrain_fine": None,
        "fine_cases": None,
        "task": None,
        "pieces": False,
        "diseased": False,
        "stage": SimpleNamespace(name=stage),
        "data": SimpleNamespace(
            labels_column="labels",
            label_values={"left_lung": 1},
            test_patients=[],
            hu_slope=1.0,
            hu_offset=0.0,
        ),
        "trusted_targets": [],
    }
    return SimpleNamespace(**{**defaults, **values})


def without_runs(
    monkeypatch: pytest.MonkeyPatch, folder: Path, arguments: list[str], rows: list[dict[str, Any]]
) -> list[command_steps.Step]:
    """Let a study make its commands without running them, and return the list of the commands."""
    cases = [Case(f"c{n}", Path("i"), Path("l"), f"p{n}") for n in range(4)]
    commands: list[command_steps.Step] = []
    (folder / "scores").mkdir(parents=True)
    (folder / "scores" / "metrics.csv").write_text("case,dice\n")
    (folder / "model").mkdir()
    (folder / "model" / "clean_up.md").write_text("none")
    replaced: dict[str, Any] = {
        "HydraConfig": SimpleNamespace(
            get=lambda: SimpleNamespace(overrides=SimpleNamespace(task=arguments))
        ),
        "check_experiments": lambda *_: None,
        "read_cases": lambda *_, hu: [replace(case, hu=hu) for case in cases],
        "make_task": lambda _: Task("t", {"left_lung": 1}, (), (Channel(),)),
        "plain": lambda _: {"name": "t"},
        "coarse_arguments": lambda *_: {},
        "spacing_argument": lambda *_: [],
        "run_steps": commands.extend,
        "fold_rows": lambda *_: rows,
        "write_rows": lambda *_: (folder / "folds.md").write_text("table"),
        "write_pooled": lambda *_: (folder / "pooled.md").write_text("table"),
        "write_model": lambda *_: folder / "model",
    }
    for name, value in replaced.items():
        monkeypatch.setattr(study, name, value)
    return commands


def test_one_stage_is_trained_by_the_arguments_of_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["experiment=mine", "steps=7", "num_folds=3", "data.test_patients=[p3]", "output=x"]
    commands = without_runs(monkeypatch, tmp_path, arguments, [])
    config = make_config(tmp_path, StageName.single)
    config.data.test_patients = ["p3"]
    assert study.cross_validate(config) == 0
    assert [command[0] for command in commands] == ["train"] * 3 + ["predict"] * 3 + ["evaluate"]
    for fold, (train, predict) in enumerate(zip(commands[:3], commands[3:6], strict=True)):
        run_dir = tmp_path / f"fold_{fold}" / "single"
        assert {"experiment=mine", "steps=7", f"data.fold={fold}", "data.num_folds=3"} < set(train)
        assert "data.test_patients=[p3]" in train, "they are held out of every fold"
        assert f"hydra.run.dir={run_dir}" in train
        assert not any(argument.startswith(("num_folds", "output")) for argument in train)
        assert f"single={run_dir / 'checkpoints' / 'last.ckpt'}" in predict
    assert f"task={tmp_path / 'task.yaml'}" in commands[-1], "an experiment may choose the task"
    # The tables that a study writes name their label files in the column `labels`.
    assert not any(argument.startswith("data.labels_column") for argument in commands[-1])
    tables = [tmp_path / f"fold_{fold}" / "held_out.csv" for fold in range(3)]
    held_out = [case.name for table in tables for case in read_case_table(table)]
    assert sorted(held_out) == ["c0", "c1", "c2"]
    assert "coarse" not in json.dumps([*map(list, commands)])
    # Finished runs with other arguments must not be taken for those of these arguments.
    checkpoint = command_steps.last_checkpoint(tmp_path / "fold_0" / "single")
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    arguments[1] = "steps=8"
    with pytest.raises(UserError, match=r"fold_0: its runs come from .*steps=7.*another folder"):
        study.cross_validate(config)


@pytest.mark.parametrize("argument", ["experiment=mine", "stage=fine"])
def test_a_cascade_takes_no_argument_that_chooses_one_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argument: str
) -> None:
    without_runs(monkeypatch, tmp_path, [argument], [])
    with pytest.raises(UserError, match=r"coarse= and fine=, or choose stage=single"):
        study.cross_validate(make_config(tmp_path, StageName.coarse))


def test_all_folds_have_the_spacing_of_all_cases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Networks of different spacings could not be averaged in the model folder."""
    cases = []
    for name, slice_mm in (("a", 2.0), ("b", 2.5), ("c", 3.0)):
        image = np.zeros((4, 5, 6), np.int16)
        path = tmp_path / f"{name}.nii.gz"
        write_image(path, image, VoxelGrid(image.shape, (slice_mm, 1.0, 1.0)))
        cases.append(Case(name, path, path, name))
    table = write_case_table(tmp_path / "my cases.csv", cases)
    arguments = ["logger=none", "data.test_patients=[]"]
    for stage, chosen in (
        (StageName.single, ["stage=single", "spacing=dataset_mean"]),
        (StageName.coarse, ["spacing=dataset_mean"]),
    ):
        folder = tmp_path / stage.value
        commands = without_runs(monkeypatch, folder, [*arguments, *chosen], [])
        monkeypatch.setattr(study, "spacing_argument", spacing_argument)
        config = make_config(
            folder, stage, cases=str(table), fine=["ct_fine"], coarse=["ct_coarse"]
        )
        with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
            assert study.cross_validate(config) == 0
        trainings = [command for command in commands if command[0] == "train"]
        assert all("spacing.target_spacing_mm=[2.5,1.0,1.0]" in step for step in trainings)
        assert len(trainings) >= 3


def test_the_number_of_folds_of_train_is_not_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["experiment=mine", "data.num_folds=4"]
    without_runs(monkeypatch, tmp_path, arguments, [])
    with pytest.raises(UserError, match=r"data\.num_folds=4: .* num_folds=3; give num_folds=4"):
        study.cross_validate(make_config(tmp_path, StageName.single))
    assert study.cross_validate(make_config(tmp_path, StageName.single, num_folds=4)) == 0


def test_a_prediction_gets_what_no_checkpoint_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = without_runs(monkeypatch, tmp_path, [], [])
    config = make_config(tmp_path, StageName.single, trusted_targets=["mine."])
    config.data.hu_offset = -1024.0
    assert study.cross_validate(config) == 0
    predictions = [command for command in commands if command[0] == "predict"]
    assert all("trusted_targets=[mine.]" in command for command in predictions)
    # Painted scans are in HU already, so the scale stands beside each case, not in the command.
    assert not any(argument.startswith("hu_") for command in predictions for argument in command)
    for fold in range(3):
        held_out = read_case_table(tmp_path / f"fold_{fold}" / "held_out.csv")
        assert {case.hu for case in held_out} == {HuScale(1.0, -1024.0)}


def test_scans_are_painted_in_hu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where values are stored 1024 too high, the painted copy is in HU and its table says so."""
    without_runs(monkeypatch, tmp_path, [], [])
    painted: list[Case] = []

    def paint_scan(case: Case, *_: object) -> list[Case]:
        painted.append(case)
        return [replace(case, name=f"{case.name}_diseased", hu=HuScale(1.0, 0.0))]

    monkeypatch.setattr(folds, "paint_scan", paint_scan)
    config = make_config(tmp_path, StageName.single, diseased=True)
    config.data.hu_offset = -1024.0
    assert study.cross_validate(config) == 0
    assert {case.hu for case in painted} == {HuScale(1.0, -1024.0)}
    held_out = read_case_table(tmp_path / "fold_0" / "held_out.csv")
    for case in held_out:
        offset = 0.0 if case.name.endswith("_diseased") else -1024.0
        assert case.hu == HuScale(1.0, offset)


def test_networks_are_not_scored_on_scans_that_they_were_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_runs(monkeypatch, tmp_path, [], [])
    monkeypatch.setattr(folds, "cut_partial_scans", lambda *_: [])
    config = make_config(tmp_path, StageName.single)
    assert study.cross_validate(config) == 0
    config.num_folds = 2
    assert study.cross_validate(config) == 0, "nothing is trained yet"
    checkpoint = command_steps.last_checkpoint(tmp_path / "fold_0" / "single")
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    config.pieces = True
    assert study.cross_validate(config) == 0, "further scans may be made of the held-out ones"
    config.num_folds = 4
    with pytest.raises(
        UserError,
        match=r"fold_0: its networks were trained with .* held out, .* restore .* num_folds",
    ):
        study.cross_validate(config)


def test_a_prediction_of_earlier_networks_is_not_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_runs(monkeypatch, tmp_path, [], [])
    predictions = tmp_path / "predictions"
    rows = [{"case": name, "status": status} for name, status in (("c0", "failed"), ("c1", "ok"))]
    write_csv(predictions / "summary.csv", [{**row, "warnings": ""} for row in rows])
    for name in ("c0", "c1"):
        (predictions / f"{name}.nii.gz").touch()
    assert study.cross_validate(make_config(tmp_path, StageName.single)) == 0
    assert [path.name for path in predictions.glob("*.nii.gz")] == ["c1.nii.gz"]


def test_a_case_table_of_a_cascade_may_have_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_runs(monkeypatch, tmp_path, [], [])
    checked: list[str] = []
    monkeypatch.setattr(study, "check_experiments", lambda _, arguments: checked.extend(arguments))
    config = make_config(tmp_path, StageName.coarse, cases="/data/Doe, John (1)/cases.csv")
    assert study.cross_validate(config) == 0
    assert checked == ["data.cases='/data/Doe, John (1)/cases.csv'"]


def test_a_prediction_gets_what_the_trained_network_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The study itself, the printed command and the model card state the same arguments.

    Only the tables of the study state the scale of the scans.
    """
    commands = without_runs(monkeypatch, tmp_path, [], [])
    model = tmp_path / "my model"
    calls: list[Any] = []
    written: list[Any] = []

    def budget_argument(files: list[Path], trusted: list[str]) -> list[str]:
        calls.append((files, trusted, [command[0] for command in commands]))
        return ["inference.budget_gib=2.1"]

    monkeypatch.setattr("medseg.runs.advice.budget_argument", budget_argument)
    monkeypatch.setattr(study, "write_model", lambda *args: written.append(args) or model)
    model.mkdir()
    (model / "clean_up.md").write_text("none")
    config = make_config(tmp_path, StageName.single, trusted_targets=["mine."])
    config.data.hu_offset = -1024.0
    assert study.cross_validate(config) == 0
    checkpoint = command_steps.last_checkpoint(tmp_path / "fold_0" / "single")
    assert calls == [([checkpoint], ["mine."], ["train"] * 3)], "when the networks are trained"
    predictions = [command for command in commands if command[0] == "predict"]
    needed = ["trusted_targets=[mine.]", "inference.budget_gib=2.1"]
    assert all(command[-2:] == needed for command in predictions)
    assert written[0][-1] == ["hu_offset=-1024.0", *needed]
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"next: medseg predict input=<scan> output=<folder> 'weights={model}' "
        "hu_offset=-1024.0 'trusted_targets=[mine.]' inference.budget_gib=2.1"
    )


def test_both_stages_of_a_cascade_get_the_arguments_of_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = without_runs(monkeypatch, tmp_path, ["trainer.threads=1"], [])
    assert study.cross_validate(make_config(tmp_path, StageName.coarse)) == 0
    trainings = [command for command in commands if command[0] == "train"]
    assert [command[1] for command in trainings] == ["experiment=a"] * 3 + ["experiment=b"] * 3
    assert all("trainer.threads=1" in command for command in trainings)


def test_the_fine_stage_may_have_a_table_of_its_own_with_the_same_folds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = without_runs(monkeypatch, tmp_path, [], [])
    cases = [Case(f"c{n}", Path("i"), Path("l"), f"p{n}") for n in range(4)]
    tables = {
        "cases.csv": cases,
        # Copies have the patients of their scans.
        "painted.csv": [*cases, *(replace(case, name=f"{case.name}_ill") for case in cases)],
        "others.csv": cases[1:],
    }
    monkeypatch.setattr(study, "read_cases", lambda path, *_, hu: tables[path.name])
    assert (
        study.cross_validate(make_config(tmp_path, StageName.fine, fine_cases="painted.csv")) == 0
    )
    trainings = [command for command in commands if command[0] == "train"]
    for training, table in zip(trainings, ["cases.csv"] * 3 + ["painted.csv"] * 3, strict=True):
        assert f"data.cases={Path(table).absolute()}" in training
    for fold in range(3):
        recipe = json.loads((tmp_path / f"fold_{fold}" / "experiments.json").read_text())
        assert recipe["cases"] != recipe["fine_cases"]
    config = make_config(tmp_path / "other", StageName.fine, fine_cases="others.csv")
    with pytest.raises(
        UserError, match=r"others\.csv: its fold 0 holds out other patients than .*p0"
    ):
        study.cross_validate(config)


def test_a_fine_stage_that_sees_coarse_output_knows_the_cases_of_the_coarse_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under another name, a coarse stage that has trained on the patient would not be noticed."""
    without_runs(monkeypatch, tmp_path, [], [])
    cases = [Case(f"c{n}", Path("i"), Path("l"), f"p{n}") for n in range(4)]
    tables = {"cases.csv": cases, "fine.csv": [replace(cases[0], name="c0_ill"), *cases[1:]]}
    monkeypatch.setattr(study, "read_cases", lambda path, *_, hu: tables[path.name])
    config = make_config(tmp_path, StageName.fine, fine_cases="fine.csv")
    assert study.cross_validate(config) == 0
    monkeypatch.setattr(study, "coarse_arguments", lambda *_: {"b": ["stage.coarse_folds=[x]"]})
    with pytest.raises(UserError, match=r"fine\.csv: it lacks c0 of .*cases\.csv"):
        study.cross_validate(config)
    tables["fine.csv"].append(cases[0])
    assert study.cross_validate(config) == 0


def test_a_single_stage_has_no_table_of_a_fine_stage(tmp_path: Path) -> None:
    table = write_case_table(tmp_path / "cases.csv", [])
    keys = [f"cases='{table}'", "stage=single", "fine_cases=b.csv", "output=x", "run_dir=x"]
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        composed = hydra.compose("cross_validate", keys)
        with pytest.raises(UserError, match="fine_cases is the table of a fine stage"):
            to_config(composed, CrossValidateConfig)


def test_the_experiment_of_a_cascade_is_none_of_its_trainings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text("coarse: a\nfine: b\n", encoding="utf-8")
    arguments = [f"experiment='{file}'", "trainer.threads=1"]
    commands = without_runs(monkeypatch, tmp_path, arguments, [])
    assert study.cross_validate(make_config(tmp_path, StageName.coarse)) == 0
    trainings = [command for command in commands if command[0] == "train"]
    assert [command[1] for command in trainings] == ["experiment=a"] * 3 + ["experiment=b"] * 3
    assert not any(str(file) in word for training in trainings for word in training)
    with pytest.raises(UserError, match="names the experiments of two stages, but stage=single"):
        study.cross_validate(make_config(tmp_path, StageName.single))


def test_folds_of_the_table_must_be_those_that_are_scored() -> None:
    file = Path("x")
    plain = [Case(f"c{n}", file, file, f"p{n}", fold=n) for n in range(3)]
    check_folds(plain, 3)
    with pytest.raises(
        UserError, match="num_folds=2: the case table has 3 folds; give num_folds=3"
    ):
        check_folds(plain, 2)
    twice = [
        Case("a", file, file, "a", fold_sides=("val", "val")),
        Case("b", file, file, "b", fold_sides=("train", "train")),
    ]
    with pytest.raises(UserError, match="the case table validates 'a' in several folds"):
        check_folds(twice, 2)
    with pytest.raises(UserError, match="has one fold, which is no cross-validation"):
        check_folds([replace(case, fold_sides=case.fold_sides[:1]) for case in twice], 2)
    check_folds([replace(case, fold=None) for case in plain], 5)
    gap = [replace(case, fold=2 * number) for number, case in enumerate(plain[:2])]
    with pytest.raises(
        UserError,
        match=(
            r"fold 1 of the case table validates no case.*"
            "number the folds in its column fold from 0"
        ),
    ):
        check_folds(gap, 3)
    check_folds([replace(case, fold=number) for number, case in enumerate(gap)], 2)
    no_val = [
        replace(case, fold=None, fold_sides=(side, "train"))
        for side, case in zip(("val", "train"), plain, strict=False)
    ]
    with pytest.raises(
        UserError, match=r"fold 1 of the case table validates no case.*column fold_1"
    ):
        check_folds(no_val, 2)
