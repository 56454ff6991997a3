"""The task of imported data joins the arguments of a command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from layouts import make_luna16, make_nnunet

from medseg.conf_folder import conf_dir
from medseg.config.check import explain, to_config
from medseg.config.imported import IMPORTED, SOURCE_VARIABLE, with_task
from medseg.config.schema import CrossValidateConfig, EvaluateConfig
from medseg.errors import UserError
from medseg.prediction.options import PredictConfig
from medseg.training.options import TrainConfig


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that other tests have started leave no task."""
    monkeypatch.setenv(SOURCE_VARIABLE, "")
    monkeypatch.delenv(SOURCE_VARIABLE)


def compose(arguments: list[str], command: str = "train", schema: type = TrainConfig) -> Any:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = to_config(
            hydra.compose(
                command, [*with_task(arguments, schema), *["run_dir=x"] * (command == "train")]
            ),
            schema,
        )
    assert isinstance(config, schema)
    return config


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("labels: {1: liver}", "expected labels as name: value, but the name 1 is no text"),
        ("task: {labels: {liver: 1}}\ndata: 3", "expected the keys of the group data, got 3"),
        ("task: {labels: {liver: 1}}\ndata: []", r"expected the keys of the group data, got \[\]"),
    ],
)
def test_a_task_with_other_types_is_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "cases.csv").write_text("case,image,labels\n", encoding="utf-8")
    (tmp_path / "task.yaml").write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        with_task([f"data.cases={tmp_path / 'cases.csv'}"], TrainConfig)


def test_labels_that_no_argument_can_name_are_read_from_the_file_of_a_task(tmp_path: Path) -> None:
    labels = "{Größe (L): 1}"
    with pytest.raises(HydraException) as caught:
        compose([f"task={{name: t, labels: {labels}}}"])
    assert explain(caught.value).endswith(
        "write a task with such labels into a file, task=<file>.yaml"
    )
    path = tmp_path / "t.yaml"
    path.write_text(
        f"name: t\nregions: null\nwindow_hu: [-200, 300]\nlabels: {labels}\n", encoding="utf-8"
    )
    assert compose(["stage=single", f"task={path}"]).task.labels == {"Größe (L)": 1}


def test_the_task_of_a_data_set_replaces_that_of_the_lungs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = {"background": 0, "liver": 1, "spleen": 2, "ignore": 3}
    folder = make_nnunet(tmp_path / "Dataset001", labels=labels)
    config = compose([f"data.cases={folder}", "stage=single"])
    assert (config.task.name, config.task.labels, config.task.regions) == (
        "Dataset001",
        {"liver": 1, "spleen": 2},
        None,
    )
    assert config.data.label_values == {"liver": 1, "spleen": 2, "ignore": 3}
    assert config.task.ignore_label == 3
    assert (
        f"task of {folder}: liver, spleen; task=<name> chooses another one"
        in capsys.readouterr().err
    )
    changed = compose([f"data.cases={folder}", "stage=single", "task.name=abdomen"])
    assert changed.task.name == "abdomen"


def test_a_cross_validation_has_the_task_of_its_cases(tmp_path: Path) -> None:
    folder = make_nnunet(tmp_path / "D", labels={"background": 0, "liver": 1})
    arguments = [f"cases={folder}", "output=x", "run_dir=x"]
    config = compose(arguments, "cross_validate", CrossValidateConfig)
    assert config.data.cases == config.cases == str(folder)
    assert (config.task.labels, config.data.label_values) == ({"liver": 1}, {"liver": 1})


def test_a_chosen_task_gets_the_values_of_the_files(tmp_path: Path) -> None:
    folder = make_luna16(tmp_path)
    config = compose([f"data.cases={folder}", "task=lungs"])
    assert config.task.name == "lungs"
    assert config.data.label_values == {"left_lung": 3, "right_lung": 4, "trachea": 5}
    config = compose([f"data.cases={folder}", "task=lungs", "data.label_values.trachea=6"])
    assert config.data.label_values["trachea"] == 6


def test_names_of_labels_in_any_script(tmp_path: Path) -> None:
    folder = make_nnunet(tmp_path / "D", labels={"background": 0, "3. Ventrikel": 1, "Gefäße": 2})
    config = compose([f"data.cases={folder}", "stage=single"])
    assert config.task.labels == {"3_Ventrikel": 1, "Gefäße": 2}
    config = compose([f"data.cases={folder}", "task=heart", "stage=coarse"])
    assert config.data.label_values == {"3_Ventrikel": 1, "Gefäße": 2}


def test_a_study_gives_the_name_to_the_commands_that_it_starts(tmp_path: Path) -> None:
    arguments = [
        f"data.cases={make_nnunet(tmp_path / 'D', labels={'background': 0, 'liver': 1})}",
        "seed=1",
    ]
    assert with_task(with_task(arguments, TrainConfig), TrainConfig) == [
        f"task={IMPORTED}",
        *arguments,
    ]
    # A table of the study has no task beside it.
    (tmp_path / "held_out.csv").touch()
    scored = compose(
        [f"ref={tmp_path}/held_out.csv", "pred=x", "output=y", f"task={IMPORTED}"],
        "evaluate",
        EvaluateConfig,
    )
    assert scored.task.labels == {"liver": 1}
    chosen = with_task([*arguments, "task=lungs"], TrainConfig)
    assert with_task(chosen, TrainConfig) == chosen


def test_a_command_of_a_study_finds_the_task_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_nnunet(tmp_path / "D", labels={"background": 0, "liver": 1})
    monkeypatch.chdir(tmp_path)
    with_task(["data.cases=D"], TrainConfig)
    # A command has a process and, perhaps, a folder of its own.
    monkeypatch.delitem(ConfigStore.instance().repo["task"], f"{IMPORTED}.yaml")
    (tmp_path / "study").mkdir()
    monkeypatch.chdir(tmp_path / "study")
    arguments = ["ref=held_out.csv", "pred=x", "output=y", f"task={IMPORTED}"]
    assert compose(arguments, "evaluate", EvaluateConfig).task.labels == {"liver": 1}


def test_a_file_of_a_task_is_chosen_by_its_path(tmp_path: Path) -> None:
    file = tmp_path / "my task.yaml"
    file.write_text(
        (
            "name: heart\nlabels: {heart: 1}\nregions: null\nchannels: [{modality: mr, normalise: "
            "zscore}]\n"
        ),
        encoding="utf-8",
    )
    config = compose([f"task={file}", "stage=single"])
    assert (config.task.name, config.data.label_values) == ("heart", {"heart": 1})


def test_the_task_beside_a_case_table_is_taken(tmp_path: Path) -> None:
    (tmp_path / "cases.csv").write_text(
        "case,image,labels\na,a.nii.gz,b.nii.gz\n", encoding="utf-8"
    )
    (tmp_path / "task.yaml").write_text(
        "task:\n  name: heart\n  labels: {heart: 1}\n  channels: [{modality: mr, normalise: "
        "zscore}]\n"
        "data:\n  label_values: {heart: [7, 8]}\n",
        encoding="utf-8",
    )
    for argument in (f"data.cases={tmp_path}", f"data.cases='{tmp_path}/cases.csv'"):
        config = compose([argument])
        assert (config.task.labels, config.task.regions) == ({"heart": 1}, None)
        assert config.data.label_values == {"heart": [7, 8]}
    scored = compose(
        [f"ref={tmp_path}/cases.csv", "pred=x", "output=y"], "evaluate", EvaluateConfig
    )
    assert scored.task.labels == {"heart": 1}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "task: {labels: {heart: 1, gap: 2}, ignore_label: 9}\ndata: {label_values: {heart: 7}}",
            {"heart": 7, "ignore": 9},
        ),
        ("task:\n  labels: {heart: 1}\ndata: {hu_slope: 2}", {"heart": 1}),
        ("labels: {heart: 3}", {"heart": 3}),
    ],
)
def test_predict_takes_the_label_values_of_its_references(
    text: str, expected: dict[str, int], tmp_path: Path
) -> None:
    """The task itself is in the checkpoints; only the viewer shows references."""
    (tmp_path / "task.yaml").write_text(text, encoding="utf-8")
    arguments = [f"input='{tmp_path}/cases.csv'", "output=x", "save=[labels,viewer]"]

    def label_values(*more: str) -> dict[str, int]:
        config = compose([*arguments, *more], "predict", PredictConfig)
        return config.data.label_values

    assert label_values() == expected
    assert label_values("data.label_values.heart=5") == {**expected, "heart": 5}
    assert label_values("+data.label_values={liver: 4}") == {**expected, "liver": 4}
    assert label_values("save=[labels]") == {}
    (tmp_path / "task.yaml").write_text("{", encoding="utf-8")
    assert label_values("save=[labels]") == {}
    with pytest.raises(UserError, match=r"task\.yaml: expected YAML, but the file is damaged"):
        label_values()
    (tmp_path / "task.yaml").unlink()
    assert label_values() == {}


def test_arguments_without_imported_data_stay(tmp_path: Path) -> None:
    (tmp_path / "table.csv").touch()
    (tmp_path / "labels").mkdir()
    for arguments in (
        ["seed=1"],
        ["data.cases=null"],
        [f"data.cases={tmp_path}/table.csv"],
        [f"ref={tmp_path}/labels"],
    ):
        assert with_task(arguments, TrainConfig) == arguments
    assert with_task(["data.cases=x"], PredictConfig) == ["data.cases=x"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "the file is damaged"),
        ("labels: 1", "expected the labels of a task"),
        ("[]", "expected the labels"),
    ],
)
def test_a_damaged_task_is_told(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "cases.csv").touch()
    (tmp_path / "task.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        with_task([f"data.cases={tmp_path}"], TrainConfig)


def test_the_file_of_a_task_replaces_the_argument_of_the_task_alone(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "name: mine\nlabels: {a: 1}\nregions: null\nwindow_hu: [-100, 300]\n", encoding="utf-8"
    )
    arguments = with_task([f"task={path}", "seed=3", "stage=single"], TrainConfig)
    assert arguments.count("seed=3") == 1
    assert arguments.count("stage=single") == 1
    assert sum(argument.startswith("task=") for argument in arguments) == 1
    assert not any(str(path) in argument for argument in arguments)


def test_a_task_whose_group_data_is_left_empty_keeps_the_keys_of_the_data(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "task: {name: mine, labels: {a: 1}, regions: null, window_hu: [0, 9]}\ndata:\n",
        encoding="utf-8",
    )
    assert compose([f"task={path}", "stage=single"]).data.label_values == {"a": 1}
    scored = compose(["ref=x", "pred=x", "output=y", f"task={path}"], "evaluate", EvaluateConfig)
    assert scored.data.label_values == {"a": 1}


def test_a_plus_before_the_file_of_a_task_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "name: mine\nlabels: {a: 1}\nregions: null\nwindow_hu: [0, 9]\n", encoding="utf-8"
    )
    assert with_task([f"+task={path}", "seed=3"], TrainConfig) == [f"task={IMPORTED}", "seed=3"]
    assert compose([f"+task={path}", "stage=single"]).task.name == "mine"
