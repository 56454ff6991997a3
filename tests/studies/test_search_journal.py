"""Search journal: each trial runs once, interrupted or not; the sampler learns from failures."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from medseg.config.search import (
    Objective,
    ParameterConfig,
    ParameterType,
    Pruner,
    Sampler,
    SweepConfig,
)

pytest.importorskip("optuna", reason="the extra medseg[search] is not installed")
from optuna.trial import Trial

from medseg.studies.search import TRIAL_LOCK_FILE, SearchJournal, report_validations

SPACE = {
    "optimizer.lr": ParameterConfig(ParameterType.float, low=1e-3, high=1e-1, log=True),
    "model.width": ParameterConfig(ParameterType.int, low=8, high=32, step=8),
    "memory": ParameterConfig(ParameterType.choice, choices=["plain", "amp"]),
}


def sweep(
    num_trials: int, *objectives: Objective, pruner: Pruner = Pruner.none, **space: ParameterConfig
) -> SweepConfig:
    return SweepConfig(
        "test", num_trials, list(objectives) or [Objective.val_dice], Sampler.tpe, 4, 0, pruner,
        prune_after_trials=1, prune_after_steps=0, space=space or SPACE,
    )  # fmt: skip


def dice_of(overrides: dict[str, str]) -> float:
    return 0.9 - abs(float(overrides["optimizer.lr"]) - 0.01) + (overrides["memory"] == "amp") / 10


def go_on(
    folder: Path, config: SweepConfig, value: Callable[[dict[str, str]], float] = dice_of
) -> list[dict[str, str]]:
    study = SearchJournal(folder, config)
    tried = []
    for trial, overrides in study.trials():
        tried.append(overrides)
        study.close(trial.number, [value(overrides)])
    return tried


def test_an_interrupted_study_tries_what_an_uninterrupted_one_would(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "halved").mkdir()
    whole = go_on(tmp_path / "whole", sweep(8))
    assert len({str(values) for values in whole}) == 8, "no two trials alike"
    assert go_on(tmp_path / "halved", sweep(3)) == whole[:3]
    for _ in range(2):
        trials = SearchJournal(tmp_path / "halved", sweep(8)).trials()
        trial, overrides = next(trials)
        assert (trial.number, overrides) == (3, whole[3])
        # As after the death of the process: the lock is free, and the trial is marked as running.
        trials.close()
    assert go_on(tmp_path / "halved", sweep(8)) == whole[3:]
    assert go_on(tmp_path / "halved", sweep(8)) == []


def test_the_first_trials_are_random_and_the_later_ones_follow_the_results(tmp_path: Path) -> None:
    tried = []
    for number, sign in enumerate((1, -1)):
        (tmp_path / str(number)).mkdir()
        config = replace(sweep(9), num_random=5)
        tried.append(
            go_on(tmp_path / str(number), config, lambda values, sign=sign: sign * dice_of(values))
        )
    first, second = tried
    assert first[:5] == second[:5]
    assert first[5:] != second[5:]


def test_values_are_arguments_of_the_command_line(tmp_path: Path) -> None:
    for overrides in go_on(tmp_path, sweep(6)):
        assert 1e-3 <= float(overrides["optimizer.lr"]) <= 1e-1
        assert overrides["model.width"] in ("8", "16", "24", "32")
        assert overrides["memory"] in ("plain", "amp")
    stepped = sweep(6, x=ParameterConfig(ParameterType.float, low=0.0, high=1.0, step=0.2))
    (tmp_path / "stepped").mkdir()
    assert {values["x"] for values in go_on(tmp_path / "stepped", stepped, lambda _: 0.0)} <= {
        "0",
        "0.2",
        "0.4",
        "0.6",
        "0.8",
        "1",
    }


def test_the_first_trial_is_the_experiment_as_far_as_it_lies_in_the_space(tmp_path: Path) -> None:
    study = SearchJournal(tmp_path, sweep(2))
    study.begin_with({"optimizer.lr": 0.02, "model.width": 64, "memory": "amp", "steps": 5})
    study.begin_with({"optimizer.lr": 0.03})
    _, overrides = next(study.trials())
    assert (overrides["optimizer.lr"], overrides["memory"]) == ("0.02", "amp")
    assert overrides["model.width"] in ("8", "16", "24", "32")


def test_a_trial_that_another_process_runs_is_left_to_it(tmp_path: Path) -> None:
    study = SearchJournal(tmp_path, sweep(3))
    trials = study.trials()
    first, _ = next(trials)
    trials.close()
    holder = (
        "import sys\nfrom pathlib import Path\nfrom medseg.io.atomic import locked\nwith "
        "locked(Path(sys.argv[1])):\n    print('held', flush=True)\n    sys.stdin.read()"
    )
    command = [sys.executable, "-c", holder, str(tmp_path / str(first.number) / TRIAL_LOCK_FILE)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        numbers = []
        for other, _ in study.trials():
            numbers.append(other.number)
            study.close(other.number, [0.5])
        assert numbers == [1, 2]
        process.kill()
    assert [
        other.number
        for other, _ in SearchJournal(tmp_path, sweep(3)).trials()
        if study.close(other.number, [0.5]) is None
    ] == [0]


def report(trial: Trial, history: Path, *dices: float) -> str:
    """Report validations every ten steps."""
    history.write_text(
        "".join(
            [
                "step,val_dice\n",
                *(f"{10 * (number + 1)},{dice}\n" for number, dice in enumerate(dices)),
            ]
        )
    )
    return report_validations(trial, history)


def test_a_trial_behind_the_median_is_not_worth_going_on(tmp_path: Path) -> None:
    study = SearchJournal(tmp_path, sweep(4, pruner=Pruner.median))
    for dices, why in (
        ([0.5, 0.8], ""),
        ([0.6, 0.9], ""),
        ([0.7, 0.95], ""),
        ([0.1, 0.2], "0.1000, lies below the median"),
    ):
        trial, _ = next(study.trials())
        reason = report(trial, tmp_path / "history.csv", dices[0])
        assert (why in reason) if why else not reason
        if reason:
            study.close(trial.number, None)
            continue
        assert not report(trial, tmp_path / "history.csv", *dices)
        assert not report(trial, tmp_path / "history.csv", *dices), (
            "what was told once is not told again"
        )
        study.close(trial.number, [max(dices)])
    assert [trial.state.name for trial in study.study.trials] == ["COMPLETE"] * 3 + ["PRUNED"]


def test_the_sampler_keeps_away_from_what_does_not_fit_and_forgets_defects(tmp_path: Path) -> None:
    space = {"width": ParameterConfig(ParameterType.choice, choices=[1, 2, 3, 4])}
    study = SearchJournal(tmp_path, sweep(24, **space))
    for trial, overrides in study.trials():
        study.close(trial.number, [0.5] if overrides["width"] in ("1", "2") else None)
    widths = [trial.params["width"] for trial in study.study.trials]
    late = widths[8:]
    assert sum(width in ("1", "2") for width in late) > 0.7 * len(late)
    (tmp_path / "defects").mkdir()
    other = SearchJournal(tmp_path / "defects", sweep(3, **space))
    for trial, _ in other.trials():
        other.close(trial.number, None, is_defect=True)
    assert [trial.state.name for trial in other.study.trials] == ["FAIL"] * 3


def test_the_summary_names_the_best_and_what_mattered(tmp_path: Path) -> None:
    config = replace(sweep(40), sampler=Sampler.random)
    tried = go_on(tmp_path, config)
    summary = SearchJournal(tmp_path, config).summary()
    dices = [dice_of(values) for values in tried]
    assert summary["best"] == [dices.index(max(dices))]
    assert summary["objectives"] == {"val_dice": "maximize"}
    assert summary["space"]["optimizer.lr"] == "0.001 … 0.1, logarithmic"
    assert set(summary["importances"]) == set(SPACE)
    assert summary["importances"]["memory"] > 3 * summary["importances"]["model.width"]


def test_two_objectives_make_a_front(tmp_path: Path) -> None:
    config = sweep(9, Objective.val_dice, Objective.peak_gib)
    study = SearchJournal(tmp_path, config)
    points = {}
    for trial, overrides in study.trials():
        assert report(trial, tmp_path / "history.csv", 0.1) == ""
        if trial.number == 2:
            study.close(2, None)
            continue
        points[trial.number] = (dice_of(overrides), float(overrides["model.width"]))
        study.close(trial.number, points[trial.number])
    front = [
        number
        for number, (dice, peak) in points.items()
        if not any(d >= dice and p <= peak and (d, p) != (dice, peak) for d, p in points.values())
    ]
    assert study.summary()["best"] == front
    assert study.summary()["importances"] == {}
