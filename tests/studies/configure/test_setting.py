"""Experiment file of `configure`: `train` composes it, and each choice states a reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import hydra
import pytest
from omegaconf import OmegaConf

from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.config.experiment_file import names_stages, register_experiments
from medseg.config.schema import CrossValidateConfig
from medseg.data.options import StageName
from medseg.studies.configure.choose import Wishes
from medseg.studies.configure.fingerprint import CaseFacts, Fingerprint, LabelFacts
from medseg.studies.configure.reasons import reasons_of
from medseg.studies.configure.setting import (
    Setting,
    cascade_text,
    experiment_text,
    group_choices,
    key_values,
)
from medseg.studies.configure.stage_views import (
    COARSE_MAX_VOXELS,
    CROP_MARGIN_MM,
    stage_views,
)
from medseg.studies.configure.times import StageCosts
from medseg.task_options import make_task
from medseg.training.check import check_objects
from medseg.training.options import TrainConfig

SETTING = Setting(
    StageName.single, (2.5, 1.5, 1.5), (48, 64, 64), "unet_lean", "lean", batch_size=2, steps=350
)
COSTS = StageCosts(step_s=0.3, start_s=8.0, peak_gib=1.25)


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


@pytest.mark.parametrize("task_name", ["lungs", "kidneys", "heart"])
def test_train_takes_the_experiments_of_a_cascade(task_name: str, tmp_path: Path) -> None:
    task = make_task(task_config(task_name).task)
    coarse = replace(SETTING, stage=StageName.coarse, spacing_mm=(4.0, 4.0, 4.0))
    fine = replace(SETTING, stage=StageName.fine)
    files = {}
    for setting in (coarse, fine):
        files[setting.stage] = f"{setting.stage}.yaml"
        text = experiment_text(setting, task, {})
        (tmp_path / files[setting.stage]).write_text(text, encoding="utf-8")
    file = tmp_path / "experiment.yaml"
    file.write_text(cascade_text(files, ["Of a test."]), encoding="utf-8")
    argument = f"experiment='{file}'"
    assert names_stages(argument)
    register_experiments([argument])
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        arguments = [argument, f"task={task_name}", f"data.cases='{file}'", "run_dir=none"]
        study = to_config(hydra.compose("cross_validate", arguments), CrossValidateConfig)
        # The files of the stages lie beside the file that names them, wherever that is.
        assert study.coarse == [str(tmp_path / "coarse.yaml")]
        assert study.fine == [str(tmp_path / "fine.yaml")]
        assert (study.pretrain_coarse, study.pretrain_fine) == (None, None)
        for setting in (coarse, fine):
            stage_argument = f"experiment='{tmp_path / files[setting.stage]}'"
            assert not names_stages(stage_argument)
            register_experiments([stage_argument])
            arguments = [stage_argument, f"task={task_name}", "run_dir=none"]
            config = to_config(hydra.compose("train", arguments), TrainConfig)
            check_objects(config)
            assert config.stage.name is setting.stage
            assert make_task(config.task).regions == task.regions
            assert config.spacing.target_spacing_mm == setting.spacing_mm
            is_fine = setting.stage is StageName.fine
            assert config.stage.patch_size == ((48, 64, 64) if is_fine else None)
            assert config.inference.tile_size == config.stage.patch_size


def test_the_stages_have_the_values_that_configure_counts_with() -> None:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        fine = hydra.compose("train", ["stage=fine"])
        coarse = hydra.compose("train", ["stage=coarse"])
    assert fine.stage.region_margin_mm == CROP_MARGIN_MM
    assert coarse.stage.max_voxels == COARSE_MAX_VOXELS


@pytest.mark.parametrize("stage", StageName)
def test_every_choice_has_its_reason_in_one_line(stage: StageName) -> None:
    task = make_task(task_config("abdomen").task)
    liver = LabelFacts(1500.0, (150.0, 150.0, 200.0))
    sizes = {"liver": liver}
    case = CaseFacts("a", (60, 256, 256), (5.0, 1.4, 1.4), -1000.0, 300.0, sizes, sizes)
    fingerprint = Fingerprint((case,))
    views = stage_views(fingerprint)
    setting = replace(SETTING, stage=stage)
    reasons = reasons_of(setting, views[stage], task, Wishes(2.0, 0.1, 2, ("amp",)), COSTS)
    choices = {**group_choices(setting, task), **key_values(setting, task)}
    assert choices.keys() <= reasons.keys()
    text = experiment_text(setting, task, reasons, ["Written for a test."])
    comments = [line for line in text.splitlines() if line.lstrip().startswith("#")]
    assert max(map(len, comments)) <= 120
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
    assert content["stage"]["batch_size"] == 2
