"""Experiment file of `configure`: `train` composes it, and each choice states a reason."""

from __future__ import annotations

from pathlib import Path

import hydra
import pytest
from omegaconf import OmegaConf

from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.config.experiment_file import register_experiments
from medseg.studies.configure.choose import Wishes
from medseg.studies.configure.fingerprint import CaseFacts, Fingerprint, LabelFacts
from medseg.studies.configure.reasons import reasons_of
from medseg.studies.configure.setting import (
    Setting,
    experiment_text,
    group_choices,
    key_values,
)
from medseg.studies.configure.times import Costs
from medseg.task_options import make_task
from medseg.training.check import check_objects
from medseg.training.options import TrainConfig

SETTING = Setting((2.5, 1.5, 1.5), (48, 64, 64), "unet_lean", "lean", 2, 350)
COSTS = Costs(0.3, 10.0, 8.0, 5.0, 2.0, 1.0, 1.25)


def task_config(task: str) -> TrainConfig:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        arguments = [f"task={task}", "run_dir=none"]
        return to_config(hydra.compose("train", arguments), TrainConfig)


@pytest.mark.parametrize(
    ("task_name", "augment", "flips"),
    [("lungs", "ct", []), ("abdomen", "ct", []), ("spine", "ct", [2]), ("brain_tumour", "mr", [2])],
)
def test_train_takes_the_experiment(
    task_name: str, augment: str, flips: list[int], tmp_path: Path
) -> None:
    task = make_task(task_config(task_name).task)
    text = experiment_text(SETTING, task, {})
    file = tmp_path / "experiment.yaml"
    file.write_text(text, encoding="utf-8")
    arguments = [f"experiment='{file}'", f"task={task_name}", "run_dir=none"]
    register_experiments(arguments)
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = to_config(hydra.compose("train", arguments), TrainConfig)
    check_objects(config)
    assert config.stage.name.value == "single"
    assert config.spacing.target_spacing_mm == (2.5, 1.5, 1.5)
    assert config.stage.patch_size == config.inference.tile_size == (48, 64, 64)
    assert (config.steps, config.stage.validate_every) == (350, 350)
    # The two patches of a step go through the network one after the other.
    assert (config.stage.batch_size, config.memory.accumulate) == (2, 2)
    assert (config.model["width"], config.model["refine"]) == (32, 8)
    assert (config.memory.precision.value, config.memory.checkpointing) == ("bf16", "all")
    assert config.task.labels == task.labels
    assert config.task.regions is None
    assert config.augment.flip_axes == flips
    assert f"  - override /augment: {augment}\n" in text


def test_every_choice_has_its_reason_in_one_line() -> None:
    task = make_task(task_config("abdomen").task)
    liver = LabelFacts(1500.0, (150.0, 150.0, 200.0))
    case = CaseFacts("a", (60, 256, 256), (5.0, 1.4, 1.4), -1000.0, 300.0, {"liver": liver})
    fingerprint = Fingerprint((case,))
    reasons = reasons_of(SETTING, fingerprint, task, Wishes(2.0, 0.1, 2, ("amp",)), COSTS)
    choices = {**group_choices(SETTING, task), **key_values(SETTING, task)}
    assert choices.keys() <= reasons.keys()
    text = experiment_text(SETTING, task, reasons, ["Written for a test."])
    assert max(map(len, text.splitlines())) <= 120
    lines = text.splitlines()
    assert lines[:3] == ["# @package _global_", "# Written for a test.", "defaults:"]
    for key in choices:
        assert f"# {reasons[key]}" in text
        leaf = key.rpartition(".")[2]
        place = next(
            number
            for number, line in enumerate(lines)
            if line.lstrip().startswith((f"{leaf}:", f"- override /{leaf}:"))
        )
        assert lines[place - 1].lstrip() == f"# {reasons[key]}"
    # YAML's own reader gets the same values as Hydra.
    content = OmegaConf.to_container(OmegaConf.create(text))
    assert isinstance(content, dict)
    assert content["stage"]["patch_size"] == [48, 64, 64]
