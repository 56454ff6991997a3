"""Processes of a run: cost of samples of a synthetic case, kept in a file."""

from __future__ import annotations

from pathlib import Path

import hydra
import pytest

from medseg.config.check import to_config
from medseg.config.folder import conf_dir
from medseg.config.schema import PlanConfig
from medseg.planning import samples
from medseg.planning.process import sample_cost


def compose(*overrides: str) -> PlanConfig:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return to_config(hydra.compose("plan", [*overrides, "trainer.accelerator=cpu", "run_dir=x"]), PlanConfig)


@pytest.mark.parametrize(
    "overrides",
    [
        ["stage=fine"],
        ["stage=fine", "stage.patch_size=[48,48,32]"],
        ["stage=coarse", "augment=none"],
        ["stage=coarse", "task=brain_tumour", "augment=mr"],
    ],
    ids=lambda overrides: "-".join(overrides),
)
def test_samples_of_a_stage_are_made_and_measured_once(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, shape = compose(*overrides), (48, 48, 32)
    training, validation = (sample_cost(config, shape, tmp_path, is_training=one) for one in (True, False))
    assert 0 < training.seconds < 60
    assert 0 < validation.seconds < 60
    monkeypatch.setattr(samples, "make_samples", lambda *_: pytest.fail("made again"))
    assert sample_cost(config, shape, tmp_path, is_training=True) == training
    assert sample_cost(config, shape, tmp_path, is_training=False) == validation
