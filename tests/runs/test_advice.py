"""Commands that a run proposes: they are accepted as they are printed."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra
import pytest

from medseg.commands import train as command
from medseg.commands.entry import COMMANDS
from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.config.imported import SOURCE_VARIABLE, with_task
from medseg.config.overrides import check_arguments, expand_options, quote_paths
from medseg.errors import EXIT_OUT_OF_MEMORY, UserError
from medseg.memory.options import Accelerator
from medseg.prediction.load_models import load_cascade
from medseg.runs import advice
from medseg.runs.advice import next_command, plan_command
from medseg.targets import targets_first
from medseg.training.assemble import make_metadata
from medseg.training.network import make_network
from medseg.training.options import TrainConfig
from medseg.weights.files import write_weights


def compose(name: str, *arguments: str) -> Any:
    own = ["run_dir=x"] if name in ("train", "plan") else []
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return to_config(hydra.compose(name, [*arguments, *own]), COMMANDS[name][0])


def follow(line: str) -> tuple[str, Any]:
    """Compose a command line as a shell and medseg read it; placeholders become words."""
    program, name, *arguments = shlex.split(
        line.replace("<scan>", "ct.nii.gz").replace("<folder>", "out")
    )
    assert program == "medseg"
    arguments = expand_options(name, arguments)
    check_arguments(arguments)
    return name, compose(name, *targets_first(quote_paths(arguments)))


@pytest.mark.parametrize(
    "overrides",
    [
        ["stage=fine", "memory=lean", "memory.budget_gib=2", "debug=fast", "resume=auto"],
        ["experiment=ct_fine", "hydra.run.dir=runs/a", "stage.patch_size=[64,64,64]"],
        ["stage=single", "model._target_=monai.networks.nets.SegResNet", "model.init_filters=8"],
    ],
)
def test_the_plan_of_a_command_that_ran_out_of_memory_is_accepted(
    overrides: list[str], tmp_path: Path
) -> None:
    table = tmp_path / "Doe, John's cases.csv"
    table.write_text("case,image,labels\n", encoding="utf-8")
    seen_by_hydra = quote_paths([*overrides, f"data.cases={table}"])
    run = compose(
        "train", *(override for override in seen_by_hydra if not override.startswith("hydra."))
    )
    name, config = follow(plan_command(run, seen_by_hydra))
    assert name == "plan"
    assert config.fit_gib > 0.1
    assert config.memory.budget_gib is None
    assert (config.stage, config.model, config.data.cases) == (run.stage, run.model, str(table))


def test_each_rank_of_a_machine_has_its_share_of_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(advice, "free_memory_bytes", lambda: 7 * 2**30)
    monkeypatch.setattr(advice, "private_bytes", lambda _: 2**30)  # of the run that ends
    trainer = SimpleNamespace(accelerator=Accelerator.cpu, devices=4)
    config: Any = SimpleNamespace(trainer=trainer)
    assert plan_command(config, ["stage=fine"]) == "medseg plan stage=fine fit_gib=2.0"


@pytest.mark.parametrize(("free_gib", "expected"), [(1.97, "1.9"), (0.04, "0.1")])
def test_a_plan_is_not_promised_more_memory_than_is_free(
    free_gib: float, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advice, "free_memory_bytes", lambda: int(free_gib * 2**30))
    monkeypatch.setattr(advice, "private_bytes", lambda _: 0)
    config: Any = SimpleNamespace(trainer=SimpleNamespace(accelerator=Accelerator.cpu, devices=1))
    assert plan_command(config, []) == f"medseg plan fit_gib={expected}"


def test_a_plan_starts_no_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of a sweep are planned one by one, without the launcher that `plan` does not know."""
    overrides = [
        "hydra/launcher=joblib",
        "hydra.launcher.n_jobs=2",
        "+hydra/job_logging=none",
        "stage=fine",
    ]
    line = plan_command(compose("train"), overrides)
    assert line.startswith("medseg plan stage=fine fit_gib=")


def test_the_plan_of_a_task_file_names_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SOURCE_VARIABLE, "/data/spleen.yaml")
    line = plan_command(compose("train"), ["task=imported", "stage=coarse"])
    assert line.startswith("medseg plan task=/data/spleen.yaml stage=coarse fit_gib=")
    monkeypatch.setenv(SOURCE_VARIABLE, "/data/spleen")
    assert plan_command(
        compose("train"), ["task=imported", "data.cases='/data/spleen'"]
    ).startswith("medseg plan data.cases=/data/spleen fit_gib=")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["stage=coarse"], "train stage=fine stage.region_from=coarse stage.coarse="),
        (
            ["stage=coarse", "task=kidneys"],
            "train stage=fine task=kidneys stage.region_from=coarse stage.coarse=",
        ),
        (
            ["stage=fine"],
            "predict input=<scan> output=<folder> coarse=<checkpoint of the coarse stage> fine=",
        ),
        (["stage=single", "task=brain_tumour"], "predict input=<scan> output=<folder> single="),
    ],
)
def test_a_finished_run_names_the_command_that_follows(
    overrides: list[str], expected: str, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "best of all.ckpt"
    checkpoint.touch()
    line = next_command(compose("train", *overrides), checkpoint)
    assert line.replace("'", "").startswith(f"medseg {expected}")
    name, config = follow(line.replace("<checkpoint of the coarse stage>", "coarse.ckpt"))
    if name == "train":
        assert config.stage.coarse == str(checkpoint)
    else:
        assert [str(checkpoint)] in (config.fine, config.single)


def test_a_path_that_looks_like_a_placeholder_is_quoted(tmp_path: Path) -> None:
    checkpoint = tmp_path / "<run>" / "best.ckpt"
    line = next_command(compose("train", "stage=single"), checkpoint)
    assert shlex.split(line)[4] == f"single={checkpoint}"
    assert "'single=" in line


def test_the_next_stage_has_the_cases_and_the_split_of_the_first(tmp_path: Path) -> None:
    """Otherwise it would train on validated patients of the first stage, or refuse its cases."""
    (tmp_path / "cases.csv").touch()
    (tmp_path / "best.ckpt").touch()
    overrides = [
        f"data.cases={tmp_path / 'cases.csv'}",
        f"data.cache={tmp_path / 'the cache'}",
        "data.val_patients=['Doe, John',p2]",
        "data.test_patients=['7']",
        "data.num_folds=3",
        "data.hu_offset=-1024",
        "data.train_trust=[reference]",
        "data.ignore_findings=[near_copy]",
        "data.label_values={left_lung: [10, 11], right_lung: Lung_R}",
    ]
    run = compose("train", "stage=coarse", *quote_paths(overrides))
    _, config = follow(next_command(run, tmp_path / "best.ckpt"))
    assert config.data == run.data


@pytest.mark.parametrize("task", ["lungs", "kidneys"])
def test_the_next_stage_has_the_task_that_was_chosen_instead_of_the_imported_one(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cases have a task of their own, which the coarse stage was not trained on."""
    monkeypatch.setenv(SOURCE_VARIABLE, "")
    monkeypatch.delenv(SOURCE_VARIABLE)
    (tmp_path / "cases.csv").write_text("case,image,labels\n", encoding="utf-8")
    (tmp_path / "task.yaml").write_text("task: {labels: {liver: 1}}\n", encoding="utf-8")
    arguments = [f"data.cases={tmp_path / 'cases.csv'}", "stage=coarse", f"task={task}"]
    run = compose("train", *with_task(arguments, TrainConfig))
    line = next_command(run, tmp_path / "best.ckpt")
    assert line.startswith(f"medseg train stage=fine task={task} data.cases=")


SEGRESNET = ["model._target_=monai.networks.nets.SegResNet", "model.init_filters=8"]
WHOLE = ["inference.tile_size=null"]


def trained(path: Path, *overrides: str) -> tuple[Any, Path]:
    """A configuration and a checkpoint of its network, which nothing has trained."""
    config = compose("train", *overrides)
    write_weights(path, make_metadata(config, {}), make_network(config).state_dict())
    return config, path


@pytest.mark.parametrize(
    ("overrides", "needs_more"),
    [
        ([*SEGRESNET, "inference.tile_size=[192,192,192]"], True),
        ([*SEGRESNET, "inference.tile_size=[64,64,64]"], False),
        ([*SEGRESNET, *WHOLE, "spacing=fixed_size", "spacing.size=[192,192,192]"], True),
        # Whole scans of unknown size, and a network that can run in slabs.
        ([*SEGRESNET, *WHOLE], False),
        (["inference.tile_size=[192,192,192]"], False),
    ],
    ids=["large", "small", "fixed", "whole", "slabs"],
)
def test_the_prediction_gets_the_memory_that_a_pass_needs(
    overrides: list[str], needs_more: bool, tmp_path: Path
) -> None:
    run, file = trained(tmp_path / "best.safetensors", "stage=single", *overrides)
    line = next_command(run, file)
    assert ("inference.budget_gib=" in line) == needs_more
    _, config = follow(line)
    options = config.inference
    stage = load_cascade(None, None, config.single, accelerator="cpu", options=options).last
    if needs_more:
        size = (192, 192, 192)
        stage.plan(size, options)
        too_small = replace(options, budget_gib=options.budget_gib - 0.011)
        with pytest.raises(UserError, match=r"is too small for the single stage"):
            stage.plan(size, too_small)


def test_the_memory_of_a_prediction_is_that_of_its_largest_stage(tmp_path: Path) -> None:
    overrides = [*SEGRESNET, "inference.tile_size=[192,192,192]"]
    _, coarse = trained(tmp_path / "coarse.safetensors", "stage=coarse", *overrides)
    fine = ["stage=fine", "stage.region_from=coarse", f"stage.coarse={coarse}"]
    run, file = trained(tmp_path / "fine.safetensors", *fine)
    assert "inference.budget_gib=" in next_command(run, file)


def test_a_prediction_has_the_scale_of_the_trained_scans() -> None:
    """A checkpoint does not state it, and other scans of the scanner are stored likewise."""
    run = compose("train", "stage=single", "data.hu_slope=0.5", "data.hu_offset=-1024")
    _, config = follow(next_command(run, Path("best.ckpt")))
    assert (config.hu_slope, config.hu_offset) == (0.5, -1024.0)


def test_a_network_that_does_not_run_on_a_cpu_fails_no_finished_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(*_: object, **__: object) -> None:
        raise RuntimeError("Expected all tensors to be on the same device")

    monkeypatch.setattr("medseg.cascade.load.load_stage", load)
    run = compose("train", "stage=single")
    assert "inference.budget_gib" not in next_command(run, Path("best.ckpt"))


def test_a_run_out_of_memory_ends_with_its_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = SimpleNamespace(
        hydra=["hydra.run.dir=a"], task=["stage=fine", "memory.precision=bf16"]
    )
    monkeypatch.setattr(command.HydraConfig, "get", lambda: SimpleNamespace(overrides=overrides))
    monkeypatch.setattr(command, "_train", lambda _: EXIT_OUT_OF_MEMORY)
    assert command.train(compose("train", "stage=fine")) == EXIT_OUT_OF_MEMORY
    last = capsys.readouterr().err.splitlines()[-1]
    assert "medseg plan stage=fine memory.precision=bf16 fit_gib=" in last
