"""The check of the loggers makes them in a temporary folder in place of that of the run."""

from __future__ import annotations

from pathlib import Path

import hydra
import pytest

from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.training.check import _redirected, check_objects
from medseg.training.options import TrainConfig


@pytest.mark.parametrize("run_dir", ["log", "a", ".", "lightning"])
def test_a_short_relative_run_folder_is_no_part_of_other_values(
    run_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["stage=fine", "trainer.accelerator=cpu", "logger=csv", f"run_dir={run_dir}"]
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        composed = hydra.compose("train", arguments)
    check_objects(to_config(composed, TrainConfig))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("/runs/a", "/tmp/b"),
        ("/runs/a/logs", "/tmp/b/logs"),
        ("sqlite:////runs/a/mlflow.db", "sqlite:////tmp/b/mlflow.db"),
        ("/runs/a-2", "/runs/a-2"),
    ],
)
def test_a_logger_moves_to_another_folder_by_whole_paths(value: str, expected: str) -> None:
    assert _redirected({"save_dir": value}, "/runs/a", "/tmp/b") == {"save_dir": expected}
