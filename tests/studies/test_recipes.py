"""Recipes: commands of a study, the exit code of a failed one, and metadata without folders."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra
import pytest

from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.config.imported import SOURCE_VARIABLE, with_task
from medseg.config.overrides import quote_paths
from medseg.config.schema import EvaluateConfig, MakeWeightsConfig
from medseg.data.case_table import Case
from medseg.errors import UserError
from medseg.runs import folder as run_folder
from medseg.runs.folder import open_run
from medseg.studies import command_steps, recipes, train_arguments


def cascade_steps(config: MakeWeightsConfig, *place: Any) -> list[command_steps.Step]:
    """Make the commands of both stages."""
    coarse, fine = (recipes.stage_steps(config, stage, *place) for stage in ("coarse", "fine"))
    return [*coarse, *fine]


def test_a_stage_starts_from_phantoms_once_and_finished_runs_are_kept(tmp_path: Path) -> None:
    config = MakeWeightsConfig(
        cases="t.csv",
        output="out",
        runs="runs",
        coarse=["a"],
        fine=["b"],
        pretrain_coarse="p",
        pretrain_fine=None,
        fine_cases=None,
    )

    def steps(folder: str) -> list[command_steps.Step]:
        return cascade_steps(config, tmp_path / folder, ["data.cases=t.csv"], tmp_path)

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


@pytest.mark.parametrize("file", ["/plans/p.yaml", "../plans/p.yaml", "plans/p.yaml"])
def test_a_file_of_an_experiment_on_phantoms_has_a_run_of_its_own_in_the_folder(
    tmp_path: Path, file: str
) -> None:
    config = MakeWeightsConfig(
        cases="t.csv",
        output="out",
        runs="r",
        coarse=["a"],
        fine=["b"],
        pretrain_coarse=file,
        pretrain_fine="/other/p.yaml",
        fine_cases=None,
    )
    pretrain_coarse, coarse, pretrain_fine, _ = cascade_steps(config, tmp_path, [], tmp_path)
    run_dirs = [
        Path(argument.removeprefix("hydra.run.dir="))
        for step in (pretrain_coarse, pretrain_fine)
        for argument in step
        if argument.startswith("hydra.run.dir=")
    ]
    assert [run_dir.parent for run_dir in run_dirs] == [tmp_path, tmp_path]
    assert len(set(run_dirs)) == 2
    assert f"init_from={command_steps.last_checkpoint(run_dirs[0])}" in coarse


def test_of_several_experiments_each_starts_from_the_one_before(tmp_path: Path) -> None:
    config = MakeWeightsConfig(
        cases="t.csv",
        output="out",
        runs="r",
        coarse=["a", "b", "c"],
        fine=["d"],
        pretrain_coarse=None,
        pretrain_fine=None,
        fine_cases=None,
    )
    steps = cascade_steps(config, tmp_path, ["data.cases=t.csv"], tmp_path)
    folders = [tmp_path / name for name in ("coarse_1", "coarse_2", "coarse", "fine")]
    assert [step[1] for step in steps] == [f"experiment={name}" for name in "abcd"]
    assert all(
        f"hydra.run.dir={folder}" in step and "data.cases=t.csv" in step
        for folder, step in zip(folders, steps, strict=True)
    )
    begins = [[argument for argument in step if argument.startswith("init_from")] for step in steps]
    assert begins == [
        [],
        *([f"init_from={command_steps.last_checkpoint(folder)}"] for folder in folders[:2]),
        [],
    ]


def test_an_experiment_that_cannot_be_trained_is_refused_before_any_training() -> None:
    good = {"coarse": ["lungs_coarse_4mm", "lungs_coarse_4mm_both"], "fine": ["finetune_fine"]}
    common = {
        "cases": "t.csv",
        "output": "out",
        "runs": "r",
        "pretrain_coarse": None,
        "pretrain_fine": "phantom_fine",
        "fine_cases": None,
    }
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        recipes.check_experiments(MakeWeightsConfig(**{**common, **good}))
        for key, value in (
            ("coarse", ["lungs_coarse_4mm", "typo"]),
            ("pretrain_fine", "typo"),
            ("fine", ["3"]),
        ):
            with pytest.raises(UserError, match=f"^{key}: .*experiment/"):
                recipes.check_experiments(MakeWeightsConfig(**{**common, **good, key: value}))


def test_an_experiment_that_sees_the_coarse_stage_gets_those_of_all_folds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipes, "needs_coarse_stage", lambda experiment, _: experiment == "c")
    config = MakeWeightsConfig(
        cases="t.csv",
        output="out",
        runs="r",
        coarse=["a"],
        fine=["b", "c"],
        pretrain_coarse=None,
        pretrain_fine=None,
        fine_cases=None,
    )
    folds = [tmp_path / "fold_0", tmp_path / "fold_1"]
    more = recipes.coarse_arguments(config, folds)
    first, second = recipes.stage_steps(config, "fine", folds[0], [], tmp_path, more)
    (argument,) = [argument for argument in second if argument.startswith("stage.coarse_folds=")]
    assert all(str(command_steps.last_checkpoint(fold / "coarse")) in argument for fold in folds)
    assert not any(argument.startswith("stage.coarse") for argument in first)


def test_runs_of_another_recipe_are_not_reused(tmp_path: Path) -> None:
    def note(
        coarse: str, arguments: tuple[str, ...] = (), names: tuple[str, ...] = ("p", "q")
    ) -> None:
        config = MakeWeightsConfig(
            cases="t.csv",
            output="out",
            runs="r",
            coarse=[coarse],
            fine=["b"],
            pretrain_coarse=None,
            pretrain_fine=None,
            fine_cases=None,
        )
        cases = [Case(name, Path("i"), None, name) for name in names]
        recipe = recipes.recipe_of(recipes.experiments(config), cases, arguments)
        recipes.note_recipe(tmp_path / "fold_0", recipe)

    note("c")
    note("a")  # `c` was refused before its first checkpoint, so the recipe may change
    checkpoint = command_steps.last_checkpoint(tmp_path / "fold_0" / "coarse")
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    note("a", names=("q", "p"))
    with pytest.raises(UserError, match=r'its runs come from .*"cases": .*another folder'):
        note("a", names=("p", "r"))
    with pytest.raises(
        UserError,
        match=r'fold_0: its runs come from \{"coarse": \["a"\],.*not \{"coarse": \["c"\],',
    ):
        note("c")
    with pytest.raises(UserError, match=r'not .*"arguments": \["steps=5"\]'):
        note("a", ("steps=5",))


def test_a_study_is_resumed_from_another_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def note(working_folder: str, plan: str, coarse: str, *arguments: str) -> None:
        (tmp_path / working_folder).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / working_folder)
        recipe = {"coarse": [coarse], "arguments": [f"experiment={plan}", "seed=1", *arguments]}
        recipes.note_recipe(tmp_path / "study", recipe)

    note("a", "e.yaml", "c.yaml", "~debug", "data.cases='my cases'")
    checkpoint = command_steps.last_checkpoint(tmp_path / "study")
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    note("b", "'../a/e.yaml'", "../a/c.yaml", "~debug", "data.cases='../a/my cases'")
    with pytest.raises(UserError, match=r"its runs come from .*/a/e\.yaml.*, not .*/b/e\.yaml"):
        note("b", "e.yaml", "../a/c.yaml", "~debug", "data.cases='../a/my cases'")


def test_a_finished_run_of_an_experiment_that_was_edited_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = SimpleNamespace(initialized=lambda: True)
    monkeypatch.setattr(command_steps, "HydraConfig", fake)
    experiment = tmp_path / "mine (1).yaml"
    table = tmp_path / "a, b.csv"
    table.touch()
    arguments = [f"experiment={experiment}", f"data.cases={table}"]
    run_dir = tmp_path / "run"
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        experiment.write_text("# @package _global_\nsteps: 5\n", encoding="utf-8")
        composed = [*quote_paths(arguments), f"run_dir='{run_dir}'"]
        open_run(train_arguments.compose_train(composed, "train"))
        (run_dir / "summary.json").write_text('{"status": "finished"}', encoding="utf-8")
        assert command_steps.train_steps(run_dir, *arguments) == []
        assert capsys.readouterr().err == ""
        experiment.write_text("# @package _global_\nsteps: 6\n", encoding="utf-8")
        assert command_steps.train_steps(run_dir, *arguments) == []
    told = capsys.readouterr().err
    assert "has finished with other values (" in told
    assert "steps: 5 then, 6 now" in told


def test_nothing_is_told_nor_read_where_a_study_was_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = SimpleNamespace(initialized=lambda: True)
    monkeypatch.setattr(command_steps, "HydraConfig", fake)

    def find_spacing(spacing: Any, data: Any, task: Any) -> None:
        if spacing.target_spacing_mm is None:
            spacing.target_spacing_mm = [3.0, 1.0, 1.0]
            print("headers are read")

    monkeypatch.setattr(run_folder, "find_spacing", find_spacing)

    median = ["spacing.strategy=dataset_median", "spacing.target_spacing_mm=null"]

    def arguments_in(place: Path) -> list[str]:
        (place / "checkpoints").mkdir(parents=True)
        (place / "cases.csv").touch()
        (place / "checkpoints" / "last.ckpt").touch()
        weights = place / "checkpoints" / "last.ckpt"
        return [
            f"data.cases={place / 'cases.csv'}",
            f"init_from={weights}",
            *median,
        ]

    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        composed = [*quote_paths(arguments_in(tmp_path / "a")), f"run_dir='{tmp_path / 'run'}'"]
        open_run(train_arguments.compose_train(composed, "train"))
        assert capsys.readouterr().out == "headers are read\n"
        (tmp_path / "run" / "summary.json").write_text('{"status": "finished"}', encoding="utf-8")
        moved = arguments_in(tmp_path / "b")
        assert command_steps.train_steps(tmp_path / "run", *moved) == []
        assert capsys.readouterr() == ("", "")
        command_steps.train_steps(tmp_path / "run", *moved[:1], *median)
    assert "has finished with other values (init_from: " in capsys.readouterr().err


def test_folders_of_configuration_files_reach_the_commands_of_a_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command_steps.search_paths() == [], "outside of Hydra"
    sources = [
        SimpleNamespace(provider="main", path="conf"),
        SimpleNamespace(provider="command-line", path="/mine"),
    ]
    hydra_config = SimpleNamespace(
        runtime=SimpleNamespace(config_sources=sources),
        overrides=SimpleNamespace(hydra=["hydra.searchpath=[pkg://p.conf]", "hydra.job.x=1"]),
    )
    fake = SimpleNamespace(initialized=lambda: True, get=lambda: hydra_config)
    monkeypatch.setattr(command_steps, "HydraConfig", fake)
    monkeypatch.setattr(train_arguments, "HydraConfig", fake)
    ((command, *arguments),) = command_steps.train_steps(tmp_path / "run", "steps=5")
    assert command == "train"
    assert arguments[:4] == ["--config-dir", "/mine", "hydra.searchpath=[pkg://p.conf]", "steps=5"]


@pytest.mark.parametrize(
    ("codes", "expected", "num_run"),
    [((0, 0, 0), 0, 3), ((1, 0, 0), 1, 1), ((0, 1, 0), 0, 3), ((0, 2, 0), 2, 2)],
)
def test_a_step_that_fails_ends_the_study_and_failed_cases_do_not(
    codes: tuple[int, ...], expected: int, num_run: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run: list[str] = []

    def fake(command: list[str], check: bool) -> object:
        run.append(command[3])
        return type("Result", (), {"returncode": codes[len(run) - 1]})

    monkeypatch.setattr(command_steps.subprocess, "run", fake)
    with pytest.raises(SystemExit) if expected else nullcontext() as end:
        command_steps.run_steps([["train", "a"], ["predict", "b"], ["evaluate", "c"]])
    assert (end.value.code if end else 0) == expected
    assert run == ["train", "predict", "evaluate"][:num_run]


def test_a_command_of_a_study_imports_nothing_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit(9)\n")
    monkeypatch.chdir(tmp_path)
    assert command_steps.run_until_failure([["--version"]]) == 0


def test_published_metadata_names_no_folder() -> None:
    metadata = {
        "config": {
            "run_dir": "/home/x/run",
            "data": {"cases": "/data/table.csv", "cache": "c", "fold": "all"},
            "logger": {},
        }
    }
    cleaned = recipes.without_folders(metadata)
    assert cleaned["config"]["run_dir"] == "run"
    assert cleaned["config"]["data"] == {"cases": "table.csv", "cache": "c", "fold": "all"}
    assert metadata["config"]["data"]["cases"] == "/data/table.csv"


def test_a_study_hands_on_labels_of_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command line in Hydra's grammar could not name some of them."""
    monkeypatch.setenv(SOURCE_VARIABLE, "")
    labels = {"3_Ventrikel": 1, "Gefäße": 2, "left kidney": 3}
    label_values = {"3_Ventrikel": 7, "Gefäße": [8, 9], "left kidney": 1}
    folder = tmp_path / "Doe, John (1)"
    task = {"name": "head", "labels": labels, "window_hu": [-100, 200]}
    step = command_steps.evaluate_step(folder, Path("t.csv"), task, label_values)
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = to_config(
            hydra.compose("evaluate", quote_paths(with_task(step[1:], EvaluateConfig))),
            EvaluateConfig,
        )
    assert config.task.labels == labels
    assert config.data.label_values == label_values
