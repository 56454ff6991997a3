"""Plans of a machine: found for the same run, compared with it, and warned of when off."""

from __future__ import annotations

import json
from pathlib import Path

import hydra
import pytest

from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.config.schema import PlanConfig
from medseg.io.machine_cache import machine_folder
from medseg.runs import plans
from medseg.runs.plans import compare_with_plan, past_errors, write_plan
from medseg.training.options import TrainConfig


@pytest.fixture(autouse=True)
def measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def compose(command: str, schema: type, *overrides: str) -> TrainConfig:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config: TrainConfig = to_config(
            hydra.compose(command, [*overrides, f"run_dir={command}"]), schema
        )
    return config


def test_a_run_finds_the_plan_of_the_same_memory_and_seconds() -> None:
    write_plan(
        compose("plan", PlanConfig, "stage=fine", "memory=lean"),
        {"peak_resident_mib": 900.0, "seconds_per_step": 2.0},
    )
    run = compose(
        "train", TrainConfig, "stage=fine", "memory=lean", "seed=5", "memory.budget_gib=3"
    )
    measured = {"peak_resident_mib": 1000.0, "seconds_per_step": 0.0}
    assert compare_with_plan(run, measured) == {
        "peak_resident_mib": {"predicted": 900.0, "measured": 1000.0, "ratio": 0.9}
    }
    assert (
        compare_with_plan(
            compose("train", TrainConfig, "stage=fine", "memory=lean", "data.num_workers=3"),
            measured,
        )
        == {}
    )


def test_only_a_history_that_is_off_is_told() -> None:
    config = compose("plan", PlanConfig)
    write_plan(config, {"peak_resident_mib": 1040.0, "seconds_per_step": 1.5})
    for number in range(3):
        assert past_errors() == [], number
        compare_with_plan(config, {"peak_resident_mib": 1000.0, "seconds_per_step": 1.0})
    (sentence,) = past_errors()
    assert sentence.startswith("seconds per step: in the last 3 planned runs")
    assert "1.50 times" in sentence


def test_the_history_holds_the_last_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "MAX_RUNS", 3)
    config = compose("plan", PlanConfig)
    write_plan(config, {"seconds_per_step": 1.0})
    for seconds in (0.5, 0.5, 0.5, 1.0, 1.0, 1.0):
        compare_with_plan(config, {"seconds_per_step": seconds})
    assert past_errors() == [], "the last three were as planned"
    for _ in range(3):
        compare_with_plan(config, {"seconds_per_step": 0.5})
    (sentence,) = past_errors()
    assert "in the last 3 planned runs" in sentence


def test_a_damaged_file_is_no_plan() -> None:
    config = compose("train", TrainConfig)
    write_plan(config, {"peak_resident_mib": 1.0})
    for path in machine_folder().rglob("*.json"):
        path.write_text("[", encoding="utf-8")
    assert compare_with_plan(config, {"peak_resident_mib": 1.0}) == {}
    assert past_errors() == []


def test_damaged_entries_of_the_history_are_left_out() -> None:
    damaged = ["text", {"seconds_per_step": "fast"}, {"seconds_per_step": None}]
    path = machine_folder() / plans.RUNS_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([{"seconds_per_step": 1.5}] * 3 + damaged), encoding="utf-8")
    (sentence,) = past_errors()
    assert "in the last 3 planned runs" in sentence
