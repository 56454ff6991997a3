"""Planner of `configure`: the shapes for which it asks the model of `plan`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra
import pytest

from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.config.schema import PlanConfig
from medseg.data.options import StageName
from medseg.studies.configure import planner as module
from medseg.studies.configure.planner import MachinePlanner
from medseg.studies.configure.setting import Setting
from medseg.task_options import make_task

GIB = 2**30
# Lengths of the largest scan and of the largest crop, mm.
SCAN_MM = (400.0, 320.0, 320.0)
CROP_MM = (160.0, 160.0, 96.0)
LARGEST_MM = {StageName.single: SCAN_MM, StageName.coarse: SCAN_MM, StageName.fine: CROP_MM}


@pytest.mark.parametrize(
    ("stage", "spacing_mm", "peak_shape", "time_shape", "validated"),
    [
        # Patches of 64³ in both.
        (StageName.single, 2.0, (64, 64, 64), (64, 64, 64), (208, 160, 160)),
        (StageName.fine, 1.0, (64, 64, 64), (64, 64, 64), (160, 160, 96)),
        # Memory of the largest scan, time of the median one, whose shape is in the setting.
        (StageName.coarse, 4.0, (112, 80, 80), (64, 64, 64), (112, 80, 80)),
        # A scan of more than 8 million voxels is cut to a range of slices in training.
        (StageName.coarse, 1.0, (64, 320, 320), (64, 64, 64), (400, 320, 320)),
    ],
)
def test_memory_is_that_of_the_largest_input(
    stage: StageName,
    spacing_mm: float,
    peak_shape: tuple[int, int, int],
    time_shape: tuple[int, int, int],
    validated: tuple[int, int, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def estimate(_: PlanConfig, shape: Any, validation_shape: Any, __: object) -> SimpleNamespace:
        asked.append((shape, validation_shape))
        return SimpleNamespace(peak_resident=shape[0] * GIB, seconds_per_step=shape[1])

    monkeypatch.setattr(module, "estimate", estimate)
    monkeypatch.setattr(module, "Machine", lambda _: None)
    setting = Setting(stage, (spacing_mm,) * 3, (64, 64, 64), "unet", "plain")
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        composed = hydra.compose("plan", ["task=kidneys", "run_dir=none"])
        task = make_task(to_config(composed, PlanConfig).task)
        arguments = ["task=kidneys", "run_dir=none"]
        planner = MachinePlanner(task, LARGEST_MM, arguments, tmp_path / "planned.yaml")
        prediction = planner.predict(setting)
        assert planner.predict(setting) is prediction, "predicted once"
    assert asked[0] == (peak_shape, validated)
    assert prediction.peak_gib == peak_shape[0]
    assert prediction.seconds == time_shape[1]
