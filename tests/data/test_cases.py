"""Cases of a configuration, their split and their label values."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import hydra
import pytest

from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.data import cases
from medseg.data.audit.finding import make_finding
from medseg.errors import UserError
from medseg.phantom.spec import PHANTOM_LABELS
from medseg.training.options import TrainConfig


def compose(*overrides: str) -> TrainConfig:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return to_config(hydra.compose("train", [*overrides, "run_dir=x"]), TrainConfig)


@pytest.mark.parametrize(
    ("overrides", "values"),
    [
        ([], {1: "left_lung", 2: "right_lung"}),
        (
            ["data.label_values={left_lung: 10, right_lung: 11}"],
            {10: "left_lung", 11: "right_lung"},
        ),
        (
            ["data.label_values.left_lung=[10,11]", "+data.label_values.trachea=5"],
            {10: "left_lung", 11: "left_lung", 2: "right_lung", 5: "trachea"},
        ),
        (["~data.label_values", "+data.label_values={heart: 1}"], {1: "heart"}),
        (["data=phantom_organs"], PHANTOM_LABELS),
        (
            ["+data.label_values.background=[0,-1]"],
            {1: "left_lung", 2: "right_lung", 0: "background", -1: "background"},
        ),
    ],
)
def test_label_values_are_replaced_by_name(overrides: list[str], values: dict[int, str]) -> None:
    assert cases.file_values(compose(*overrides).data.label_values or {}) == values


@pytest.mark.parametrize(
    ("label_values", "said"),
    [
        ({"left_lung": 1, "right_lung": [3, 1]}, "1 cannot be left_lung and right_lung"),
        ({"1": "left_lung"}, "data.label_values.1: a whole number or a list of them is needed"),
        ({"left_lung": True}, "but got True"),
        ({"left_lung": None}, "but got None"),
        # The case would be trained on, or scored, with all background as its left lung.
        ({"left_lung": [0, 1]}, "data.label_values.left_lung: expected values from 1, since 0 is"),
    ],
)
def test_mistaken_label_values_are_told(label_values: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        cases.file_values(label_values)
    assert said in str(error.value)


def test_mistaken_label_values_are_told_with_the_configuration() -> None:
    """Not after the cases have been looked up."""
    for override in ("data.label_values.left_lung=null", "+data.label_values.other=[2]"):
        with pytest.raises(UserError, match=r"data\.label_values"):
            compose(override)


def test_an_empty_path_is_not_the_current_folder() -> None:
    with pytest.raises(UserError, match=r"data\.cases: it is empty"):
        compose("data.cases=")


def test_the_check_of_a_volume_is_turned_off_as_its_finding_advises() -> None:
    limits = {"volume_ml": 9000.0, "low": 500.0, "high": 5500.0}
    finding = make_finding("implausible_volume:far", name="left_lung", **limits)
    (override,) = re.findall(r"and (\S+) turns the check off", finding.cure)
    assert list(compose(override).task.volume_ml or {}) == ["right_lung"]


@pytest.fixture
def phantoms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table as the phantom writes it, without the scans."""
    splits = ["train", "train", "train", "val", "test"]
    rows = [
        f"phantom_{n},{n}/ct.nii.gz,{n}/lungs.nii.gz,phantom_{n},{split}\n"
        for n, split in enumerate(splits)
    ]
    table = tmp_path / "table.csv"
    table.write_text("case,image,labels,patient,split\n" + "".join(rows))
    monkeypatch.setattr(cases, "make_phantoms", lambda *_, **__: table)


@pytest.mark.usefixtures("phantoms")
def test_the_split_of_the_phantoms_obeys_the_configuration() -> None:
    chosen = compose("data.val_patients=[phantom_1]", "data.test_patients=[phantom_0]")
    split = cases.find_sources(chosen.data, chosen.task)[0].split
    assert [case.name for case in split.val] == ["phantom_1"]
    assert {case.name for case in split.test} == {"phantom_0", "phantom_4"}
    chosen = compose("data.fold=1", "data.num_folds=2")
    split = cases.find_sources(chosen.data, chosen.task)[0].split
    assert [len(side) for side in (split.train, split.val, split.test)] == [2, 2, 1]


def test_a_table_with_missing_files_gives_all_its_cases(tiny_table: Path, tmp_path: Path) -> None:
    table = tiny_table.parent / "with a gap.csv"
    table.write_text(tiny_table.read_text() + "gone,gone.nii.gz,gone_l.nii.gz,p9,train\n")
    chosen = compose(f"data.cases='{table}'")
    (source,) = cases.find_sources(chosen.data, chosen.task)
    assert [case.name for case in source.split.train] == ["case 0", "case 1", "gone"]


class MadePhantoms:
    """Notes how synthetic scans are asked for, and writes their table."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.table = folder / "made.csv"
        self.calls: list[Any] = []
        rows = "case,image,labels,organs\nphantom_0,ct.nii.gz,lungs.nii.gz,organs.nii.gz\n"
        self.table.write_text(rows)
        monkeypatch.setattr(cases, "make_phantoms", self.make)

    def make(
        self, config: Any, task: Any, folder: Path, num_train: int, *, with_held_out: bool
    ) -> Path:
        self.calls.append((task.name, folder, num_train, with_held_out))
        return self.table


@pytest.mark.parametrize(
    ("task", "column", "values"),
    [("lungs", "organs", cases.PHANTOM_LABELS), ("abdomen", "labels", None)],
)
def test_extra_phantoms_have_labels_and_a_share_of_their_own(
    task: str,
    column: str,
    values: dict[int, str] | None,
    tiny_table: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = MadePhantoms(tmp_path, monkeypatch)
    scene = "chest" if task == "lungs" else "organs"
    settings = [
        f"task={task}",
        f"data.phantoms.scene={scene}",
        "data.phantoms.num_extra=7",
        "data.phantom_share=0.25",
    ]
    chosen = compose(
        f"data.cases='{tiny_table}'",
        f"data.phantoms.folder='{tmp_path}'",
        "data.hu_slope=2",
        "data.hu_offset=-3",
        "data.ignore_findings=[spacing_outlier]",
        *settings,
    )
    own, extra = cases.find_sources(chosen.data, chosen.task)
    folder = tmp_path / "extra" if task == "lungs" else tmp_path / task / "extra"
    assert made.calls == [(task, folder, 7, False)]
    assert (own.share, extra.share) == (0.75, 0.25)
    (phantom,) = extra.split.train
    assert phantom.labels is not None
    assert phantom.labels.name == {"organs": "organs.nii.gz", "labels": "lungs.nii.gz"}[column]
    assert (extra.split.val, extra.split.test) == ((), ())
    assert extra.label_values == (
        values or {value: name for name, value in chosen.task.labels.items()}
    )
    assert {(case.hu.slope, case.hu.offset) for case in own.split.train} == {(2.0, -3.0)}
    assert (phantom.hu.slope, phantom.hu.offset) == (1.0, 0.0)
    for case in (*own.split.train, phantom):
        assert case.ignore_findings == {"spacing_outlier"}
    made.table.write_text("case,image,labels,organs\ncase 0,ct.nii.gz,lungs.nii.gz,organs.nii.gz\n")
    with pytest.raises(
        UserError, match=r"the case name case 0 is that of a phantom; rename the case"
    ):
        cases.find_sources(chosen.data, chosen.task)
    chosen.data.phantoms.num_extra = 0
    (alone,) = cases.find_sources(chosen.data, chosen.task)
    assert alone.share == 1.0


def test_without_a_table_the_scans_are_synthetic_with_held_out_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = MadePhantoms(tmp_path, monkeypatch)
    chosen = compose(
        f"data.phantoms.folder='{tmp_path}'",
        "data.phantoms.num_train=4",
        "data.ignore_findings=[near_copy]",
    )
    (found, values), extra = cases.find_cases(chosen.data, chosen.task)
    assert made.calls == [("lungs", tmp_path, 4, True)]
    assert [case.name for case in found] == ["phantom_0"]
    assert found[0].ignore_findings == {"near_copy"}
    assert values == {1: "left_lung", 2: "right_lung"}
    assert extra == ([], {})


@pytest.mark.parametrize(
    ("detail", "num_train", "with_held_out", "num_workers"),
    [
        ("small", 5, True, 3),
        ("small", 30, True, 4),
        ("full", 3, False, 3),
        ("full", 9, False, 4),
        ("small", 3, False, 1),
    ],
)
def test_phantoms_are_made_by_as_many_processes_as_pay(
    detail: str,
    num_train: int,
    with_held_out: bool,
    num_workers: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Held out are three scans for the validation and five for the test."""
    from medseg.phantom import case_folders as dataset

    calls: list[Any] = []
    monkeypatch.setattr(
        dataset, "write_phantoms", lambda *arguments, **options: calls.append((arguments, options))
    )
    monkeypatch.setattr(cases, "num_processors", lambda: 16)
    chosen = compose(f"data.phantoms.detail={detail}", "data.phantoms.seed=11")
    cases.make_phantoms(
        chosen.data.phantoms, chosen.task, tmp_path, num_train, with_held_out=with_held_out
    )
    ((arguments, options),) = calls
    given = [*arguments, *options.values()]
    splits = {"train": num_train} | ({"val": 3, "test": 5} if with_held_out else {})
    assert tmp_path in given
    assert splits in given
    assert options["num_workers"] == num_workers
    assert given[1:4] == [sum(splits.values()), 11, detail]


def test_organs_of_a_task_are_painted_with_its_sides_and_channels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from medseg.phantom import case_folders as dataset

    calls: list[Any] = []
    monkeypatch.setattr(
        dataset,
        "write_phantoms",
        lambda *arguments, **options: calls.append([*arguments, *options.values()]),
    )
    settings = [
        "data=phantom_organs",
        "data.phantoms.scene=organs",
        "data.phantoms.own_grids=true",
        "task.ignore_label=30",
    ]
    chosen = compose(*settings, "data.phantoms.seed=5")
    cases.make_phantoms(chosen.data.phantoms, chosen.task, tmp_path, 2, with_held_out=False)
    (scene,) = (value for value in calls[0] if type(value).__name__ == "SceneSpec")
    assert scene.labels == {"left_lung": 1, "right_lung": 2}
    assert scene.sides == {"left_lung": "left", "right_lung": "right"}
    assert (scene.seed, scene.modalities, scene.has_own_grids) == (5, ("ct",), True)
    assert scene.ignore_label == 30
    assert scene.parts == ("left_lung", "right_lung")
