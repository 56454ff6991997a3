"""The import command writes a case table and a task that the other commands read."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import hydra
import pytest
import yaml
from layouts import make_msd, make_nnunet, make_totalsegmentator

from medseg.commands.entry import run_command
from medseg.commands.import_data import import_data
from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.config.schema import ImportConfig
from medseg.data.case_table import read_case_table
from medseg.data.importers.formats import import_dataset
from medseg.errors import UserError
from medseg.io.tables import read_csv


def run(*overrides: str) -> int:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return import_data(to_config(hydra.compose("import", list(overrides)), ImportConfig))


def test_the_table_and_the_task_say_what_the_data_set_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_nnunet(tmp_path / "Dataset001_Chest")
    assert run(f"input='{folder}'", f"output='{tmp_path / 'out'}'") == 0
    assert read_case_table(tmp_path / "out") == list(import_dataset(folder).cases)
    content = yaml.safe_load((tmp_path / "out" / "task.yaml").read_text(encoding="utf-8"))
    assert content == import_dataset(folder).task()
    printed = capsys.readouterr()
    use = "nnunet: 3 cases to train and validate, 1 case test"
    assert f"{use}; channels: ct (-1000.0, 1000.0)\n" in printed.out
    assert "labels: left_lung, right_lung\n" in printed.out
    assert f"next: medseg train stage=coarse data.cases={tmp_path / 'out'}" in printed.out
    lines = [line.split() for line in printed.out.splitlines()]
    assert ["what", "number", "became", "why", "names"] in lines
    assert ["case", "1", "used", "test,", "without", "labels", "chest_003"] in lines
    assert ["file", "8", "used", "read", "for", "the", "cases"] in lines
    account = read_csv(tmp_path / "out" / "account.csv")
    assert {row["name"] for row in account if row["kind"] == "case"} == {
        f"chest_{number:03d}" for number in range(4)
    }


def test_labels_are_chosen_and_the_format_is_stated(tmp_path: Path) -> None:
    folder = make_totalsegmentator(tmp_path / "data")
    given = f"input='{folder}'", f"output='{tmp_path / 'out'}'", "format=totalsegmentator"
    run(*given, "labels=[left_lung,right_lung]")
    content = yaml.safe_load((tmp_path / "out" / "task.yaml").read_text(encoding="utf-8"))
    assert content["task"]["labels"] == {"left_lung": 1, "right_lung": 2}
    assert set(content["task"]["regions"]) == {"left_lung", "right_lung"}
    assert content["data"]["label_values"]["liver"] == "liver"
    run(*given[::2], f"output='{tmp_path / 'lungs'}'", "labels={lungs: [left_lung, right_lung]}")
    content = yaml.safe_load((tmp_path / "lungs" / "task.yaml").read_text(encoding="utf-8"))
    assert (content["task"]["labels"], content["task"]["regions"]) == ({"lungs": 1}, None)


def test_the_summary_says_the_use_of_each_case_the_normalisation_and_many_labels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["background", *(f"part_{number:02d}" for number in range(1, 32))]
    labels = {name: value for value, name in enumerate(names)}
    folder = make_nnunet(tmp_path / "data", channels=("CT", "PET"), labels=labels)
    folds = [{"train": ["chest_001"], "val": ["chest_000"]}]
    (folder / "splits_final.json").write_text(json.dumps(folds), encoding="utf-8")
    given = f"input='{folder}'", f"output='{tmp_path / 'out'}'"
    run(*given)
    said = capsys.readouterr()
    uses = "2 cases to train and validate, 1 case in no fold, 1 case test"
    assert f"nnunet: {uses}; channels: ct (-1000.0, 1000.0), other zscore\n" in said.out
    advice = "the task has 31 labels; labels=[a,b,…] keeps some of them"
    assert advice in said.err
    run(given[0], f"output='{tmp_path / 'fewer'}'", f"labels=[{','.join(names[1:-1])}]")
    assert "labels=[a,b,…]" not in capsys.readouterr().err, "thirty are not many"


def test_a_structure_that_a_case_lacks_is_refused_or_stated_absent(tmp_path: Path) -> None:
    folder, output = make_totalsegmentator(tmp_path / "data"), tmp_path / "out"
    (folder / "s0001" / "segmentations" / "liver.nii.gz").unlink()
    given = f"input='{folder}'", f"output='{output}'", "labels=[liver]"
    with pytest.raises(UserError, match="liver"):
        run(*given)
    assert not output.exists(), "nothing is written"
    assert run(*given, "missing=absent") == 0
    absent = {case.name for case in read_case_table(output) if case.trust}
    assert absent == {"s0001"}


def test_the_same_import_may_be_repeated_from_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_nnunet(tmp_path / "data", channels=("CT", "PET"))
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert run("input=data", "output=out") == 0
    table = (tmp_path / "out" / "cases.csv").read_text(encoding="utf-8")
    (tmp_path / "out" / "cases.csv").write_text(
        table.replace("chest_000", "edited"), encoding="utf-8"
    )
    with pytest.raises(UserError, match="holds other cases; remove it, or give another output"):
        run("input=data", "output=out")


def test_a_case_without_labels_is_not_said_to_be_trained_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_msd(tmp_path / "data")
    about = json.loads((folder / "dataset.json").read_text(encoding="utf-8"))
    del about["training"][2]["label"]
    (folder / "dataset.json").write_text(json.dumps(about), encoding="utf-8")
    assert run(f"input='{folder}'", f"output='{tmp_path / 'out'}'") == 0
    printed = capsys.readouterr().out
    assert "msd: 2 cases to train and validate, 1 case test" in printed
    assert "no label: neither trained on nor validated" in (
        tmp_path / "out" / "account.csv"
    ).read_text(encoding="utf-8")


def test_a_table_of_something_else_is_kept(tmp_path: Path) -> None:
    folder = make_nnunet(tmp_path / "data")
    account = tmp_path / "out" / "account.csv"
    account.parent.mkdir()
    account.write_text("date,amount\n", encoding="utf-8")
    with pytest.raises(
        UserError, match=r"account\.csv exists and is no account of an import; remove"
    ):
        run(f"input='{folder}'", f"output='{tmp_path / 'out'}'")
    assert [path.name for path in account.parent.iterdir()] == ["account.csv"]
    assert account.read_text(encoding="utf-8") == "date,amount\n"


@pytest.mark.parametrize("name", ["Doe, John (1)", "a=b"])
def test_odd_names_of_folders_and_files(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_nnunet(tmp_path / name)
    for path in [*folder.glob("imagesTr/*"), *folder.glob("labelsTr/*")]:
        path.rename(path.with_name(path.name.replace("chest_000", "Thorax, ü [1]")))
    output = tmp_path / f"{name} out"
    monkeypatch.setattr(sys, "argv", ["medseg import", f"input={folder}", f"output={output}"])
    monkeypatch.setenv("OMP_WAIT_POLICY", os.environ.get("OMP_WAIT_POLICY", "PASSIVE"))
    with pytest.raises(SystemExit) as ended:
        run_command("import")
    assert ended.value.code == 0
    assert "Thorax, ü [1]" in {case.name for case in read_case_table(output)}


def test_a_folder_of_no_known_layout_is_the_users_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["medseg import", f"input={tmp_path}", f"output={tmp_path / 'out'}"]
    )
    with pytest.raises(SystemExit) as ended:
        run_command("import")
    assert ended.value.code == 2
    assert (
        f"medseg: {tmp_path}: expected a data set in one of these layouts, but found none"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()


def test_files_that_a_person_has_edited_are_kept(tmp_path: Path) -> None:
    given = f"input='{make_nnunet(tmp_path / 'data')}'", f"output='{tmp_path / 'out'}'"
    assert run(*given) == run(*given) == 0  # the same files again
    for name in ("task.yaml", "cases.csv"):
        path = tmp_path / "out" / name
        edited = (
            path.read_text(encoding="utf-8")
            .replace("left_lung: 1", "left: 1")
            .replace("chest_001,", "mine,", 1)
        )
        path.write_text(edited, encoding="utf-8")
        with pytest.raises(
            UserError,
            match=(
                f"{name} exists and (differs|holds other cases).*; remove it, or give another "
                "output"
            ),
        ):
            run(*given)
        assert path.read_text(encoding="utf-8") == edited
