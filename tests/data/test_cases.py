"""Cases of a configuration, their split and their label values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydra
import pytest

from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.data import cases
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
        (["data.label_values={left_lung: 10, right_lung: 11}"], {10: "left_lung", 11: "right_lung"}),
        (
            ["data.label_values.left_lung=[10,11]", "+data.label_values.trachea=5"],
            {10: "left_lung", 11: "left_lung", 2: "right_lung", 5: "trachea"},
        ),
        (["~data.label_values", "+data.label_values={heart: 1}"], {1: "heart"}),
        (["data=phantom_organs"], PHANTOM_LABELS),
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
    ],
)
def test_mistaken_label_values_are_told(label_values: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        cases.file_values(label_values)
    assert said in str(error.value)


@pytest.fixture
def phantoms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table as the phantom writes it, without the scans."""
    splits = ["train", "train", "train", "val", "test"]
    rows = [f"phantom_{n},{n}/ct.nii.gz,{n}/lungs.nii.gz,phantom_{n},{split}\n" for n, split in enumerate(splits)]
    table = tmp_path / "table.csv"
    table.write_text("case,image,labels,patient,split\n" + "".join(rows))
    monkeypatch.setattr(cases, "make_phantoms", lambda *_, **__: table)


@pytest.mark.usefixtures("phantoms")
def test_the_split_of_the_phantoms_obeys_the_configuration() -> None:
    chosen = compose("data.val_patients=[phantom_1]", "data.test_patients=[phantom_0]")
    split = cases.find_sources(chosen.data, chosen.task)[0].split
    assert [case.name for case in split.val] == ["phantom_1"]
    assert {case.name for case in split.test} == {"phantom_0", "phantom_4"}
    with pytest.raises(UserError, match=r"data\.fold=1 has no effect"):
        cases.find_sources(compose("data.fold=1").data, chosen.task)


def test_a_table_with_missing_files_gives_all_its_cases(tiny_table: Path, tmp_path: Path) -> None:
    table = tiny_table.parent / "with a gap.csv"
    table.write_text(tiny_table.read_text() + "gone,gone.nii.gz,gone_l.nii.gz,p9,train\n")
    chosen = compose(f"data.cases='{table}'")
    (source,) = cases.find_sources(chosen.data, chosen.task)
    assert [case.name for case in source.split.train] == ["case 0", "case 1", "gone"]
