"""Weights of a cascade: the cases that each stage sees, the files, and the bound on Dice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from medseg.cascade.bound import OFFSET
from medseg.config.schema import MakeWeightsConfig
from medseg.errors import UserError
from medseg.studies import make_weights as study
from medseg.studies.command_steps import Step, last_checkpoint
from medseg.weights.files import METADATA_FORMAT, NETWORK_PREFIX, checksum, read_weights

PATIENTS = 9


def write_table(path: Path, *patients: str) -> str:
    rows = [f"{patient},{patient}.nii.gz,{patient}_labels.nii.gz\n" for patient in patients]
    path.write_text("case,image,labels\n" + "".join(rows), encoding="utf-8")
    return str(path)


def make_config(folder: Path, **changes: Any) -> MakeWeightsConfig:
    return MakeWeightsConfig(
        cases=write_table(folder / "t.csv", "a"),
        output=str(folder / "out"),
        runs=str(folder / "runs"),
        coarse=["a"],
        fine=["b", "c"],
        pretrain_coarse=None,
        pretrain_fine=None,
        **{"fine_cases": None, **changes},
    )


def write_checkpoints(folder: Path) -> dict[str, torch.Tensor]:
    """Write a trained checkpoint of both stages, with the same weights."""
    trained = {
        "head.weight": torch.randn(3, 8, 1, 1, 1),
        "large": torch.tensor([1e6]),
        "steps": torch.tensor(7),
    }
    for stage in ("coarse", "fine"):
        metadata = {
            "format": METADATA_FORMAT,
            "stage": stage,
            "task": {"name": "lungs"},
            "config": {
                "run_dir": "/home/x/run",
                "task": {"name": "spleens", "labels": {"spleen": 1}},
                "data": {"label_values": {"spleen": 7}},
            },
        }
        path = last_checkpoint(folder / "runs" / "all" / stage)
        path.parent.mkdir(parents=True)
        torch.save(
            {
                "medseg": metadata,
                "state_dict": {NETWORK_PREFIX + name: value for name, value in trained.items()},
            },
            path,
        )
    return trained


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """Collect the commands instead of running them; the experiment `c` takes the coarse stage."""
    collected: list[Step] = []
    monkeypatch.setattr(study, "run_steps", collected.extend)
    monkeypatch.setattr(study, "check_experiments", lambda config: None)
    for name in ("medseg.studies.recipes", "medseg.studies.make_weights"):
        monkeypatch.setattr(f"{name}.needs_coarse_stage", lambda experiment, _: experiment == "c")
    return collected


def test_weights_are_written_in_half_precision_with_their_checksums(
    tmp_path: Path, steps: list[Step]
) -> None:
    trained = write_checkpoints(tmp_path)
    assert study.make_weights(make_config(tmp_path)) == 0
    output = tmp_path / "out"
    lines = (output / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    sums = dict(line.split()[::-1] for line in lines)
    for stage in ("coarse", "fine"):
        path = output / f"lungs_{stage}.safetensors"
        assert sums[path.name] == checksum(path)
        assert path.name in (output / "README.md").read_text(encoding="utf-8")
        metadata, weights = read_weights(path, stage, stage)
        assert metadata["config"]["run_dir"] == "run"
        assert metadata["dice_bound"] is None
        assert weights["head.weight"].dtype == torch.float16
        torch.testing.assert_close(
            weights["head.weight"].float(), trained["head.weight"], rtol=2**-11, atol=1e-7
        )
        assert all(torch.equal(weights[name], trained[name]) for name in ("large", "steps"))


def test_the_printed_command_and_the_card_name_the_memory_that_the_networks_need(
    tmp_path: Path,
    steps: list[Step],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_checkpoints(tmp_path)
    calls: list[Any] = []

    def budget_argument(files: list[Path], trusted: list[str]) -> list[str]:
        calls.append((files, trusted))
        return ["inference.budget_gib=2.1"]

    monkeypatch.setattr(study, "budget_argument", budget_argument)
    config = make_config(tmp_path)
    output = tmp_path / "my weights"
    config.output = str(output)
    assert study.make_weights(config) == 0
    runs = tmp_path / "runs" / "all"
    assert calls == [([last_checkpoint(runs / stage) for stage in ("coarse", "fine")], [])]
    command = (
        f"medseg predict -i <scan> -o labels.nii.gz 'weights={output}' inference.budget_gib=2.1"
    )
    assert capsys.readouterr().out.splitlines()[-1] == command
    card = (output / "README.md").read_text(encoding="utf-8")
    assert "weights=<this folder> inference.budget_gib=2.1\n" in card


@pytest.mark.parametrize("num_folds", [0, 2])
def test_a_fine_stage_sees_the_coarse_stages_of_the_folds_or_that_of_all_cases(
    num_folds: int, tmp_path: Path, steps: list[Step]
) -> None:
    write_checkpoints(tmp_path)
    folds = [tmp_path / "runs" / f"fold_{fold}" for fold in range(num_folds)]
    for fold in folds:
        (fold / "coarse").mkdir(parents=True)
    study.make_weights(make_config(tmp_path, fine_cases=write_table(tmp_path / "f.csv", "a", "b")))
    # One coarse experiment, then two fine ones; only the last one takes a coarse stage.
    coarse, first, last = steps
    assert f"data.cases={tmp_path / 't.csv'}" in coarse
    assert f"data.cases={tmp_path / 'f.csv'}" in first
    assert f"data.cases={tmp_path / 'f.csv'}" in last
    assert not any(argument.startswith("stage.") for argument in (*coarse, *first))
    (coarse_argument,) = (argument for argument in last if argument.startswith("stage."))
    key, _, value = coarse_argument.partition("=")
    if num_folds:
        assert key == "stage.coarse_folds"
        assert all(str(last_checkpoint(fold / "coarse")) in value for fold in folds)
    else:
        assert key == "stage.coarse"
        assert value.strip("'") == str(last_checkpoint(tmp_path / "runs" / "all" / "coarse"))


def test_folds_of_different_recipes_are_not_joined(tmp_path: Path, steps: list[Step]) -> None:
    write_checkpoints(tmp_path)
    recipe = {"coarse": ["a"], "fine": ["b"], "cases": "0123"}
    for fold in range(3):
        (tmp_path / "runs" / f"fold_{fold}" / "coarse").mkdir(parents=True)

    def note(fold: int, **changes: Any) -> None:
        text = json.dumps({**recipe, **changes})
        path = tmp_path / "runs" / f"fold_{fold}" / "experiments.json"
        path.write_text(text, encoding="utf-8")

    # The recipe of fold 1 is not known.
    note(0)
    note(2)
    study.make_weights(make_config(tmp_path))
    assert steps
    for changes, difference in (
        ({"coarse": ["c"], "fine": ["d"]}, r'coarse is \["a"\] and \["c"\]'),
        ({"arguments": ["seed=1"]}, r'arguments is null and \["seed=1"\]'),
    ):
        note(2, **changes)
        with pytest.raises(
            UserError, match=f"fold_0 and .*fold_2 come from .*: {difference}; give"
        ):
            study.make_weights(make_config(tmp_path))


@pytest.mark.parametrize("num_patients", [PATIENTS, PATIENTS - 1])
def test_the_bound_is_that_of_the_worst_of_nine_held_out_patients(
    num_patients: int, tmp_path: Path, steps: list[Step]
) -> None:
    write_checkpoints(tmp_path)
    names = [f"held_{number}" for number in range(num_patients)]
    table = write_table(tmp_path / "held.csv", *names)
    folder = tmp_path / "runs" / "held_out"
    rows = ["case,region,trust,dice"]
    for number, name in enumerate(names):
        predictions = folder / "predictions"
        predictions.mkdir(parents=True, exist_ok=True)
        report = {"boxes": {"left": {}, "right": {}}, "agreements": {"left": 0.9, "right": 0.98}}
        (predictions / f"{name}.json").write_text(json.dumps(report), encoding="utf-8")
        rows.append(f"{name},left,reference,{0.99 - 0.01 * number}")
        # These two do not count: a reference with an unknown part missing, a region without a box.
        rows.append(f"{name},right,partial,0.1")
        rows.append(f"{name},none,reference,0.0")
    (folder / "scores").mkdir()
    (folder / "scores" / "metrics.csv").write_text("\n".join(rows), encoding="utf-8")
    study.make_weights(make_config(tmp_path, held_out=table))
    predict, evaluate = steps[-2:]
    assert (predict[0], evaluate[0]) == ("predict", "evaluate")
    # The task and the label values of the training, not those of the default task.
    assert f"task={folder / 'task.yaml'}" in evaluate
    groups = yaml.safe_load((folder / "task.yaml").read_text(encoding="utf-8"))
    assert groups["task"]["name"] == "spleens"
    assert groups["data"] == {"label_values": {"spleen": 7}}
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    checksums = (tmp_path / "out" / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    assert all(line.split()[0] in card for line in checksums), "of the files with the bound"
    for stage in ("coarse", "fine"):
        path = tmp_path / "out" / f"lungs_{stage}.safetensors"
        bound = read_weights(path, stage, stage)[0]["dice_bound"]
        if num_patients < PATIENTS:
            assert bound is None
            continue
        worst = 0.01 + 0.01 * (PATIENTS - 1)
        assert bound["factor"] == pytest.approx(worst / (0.1 + OFFSET))
        assert bound["num_patients"] == PATIENTS


@pytest.mark.parametrize("key", ["cases", "fine_cases"])
def test_a_held_out_patient_is_in_no_table_of_the_training(
    key: str, tmp_path: Path, steps: list[Step]
) -> None:
    held_out = write_table(tmp_path / "held.csv", "x", "y")
    config = make_config(tmp_path, held_out=held_out)
    setattr(config, key, write_table(tmp_path / "trained.csv", "y", "z"))
    with pytest.raises(UserError, match="the networks train on its patients y;"):
        study.make_weights(config)
    assert not steps


def test_runs_of_other_cases_of_the_fine_stage_are_not_reused(
    tmp_path: Path, steps: list[Step]
) -> None:
    write_checkpoints(tmp_path)
    study.make_weights(make_config(tmp_path, fine_cases=write_table(tmp_path / "f.csv", "a", "b")))
    others = make_config(tmp_path, fine_cases=write_table(tmp_path / "g.csv", "a", "c"))
    with pytest.raises(UserError, match="its runs come from"):
        study.make_weights(others)
    with pytest.raises(UserError, match="its runs come from"):
        study.make_weights(make_config(tmp_path))
