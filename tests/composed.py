"""Configurations of `train`, composed from the files of conf/."""

from __future__ import annotations

import hydra

from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.training.options import TrainConfig


def train_config(*overrides: str) -> TrainConfig:
    """Compose and check a configuration."""
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return to_config(hydra.compose("train", ["run_dir=runs/test", *overrides]), TrainConfig)
