"""Every task preset prepares, trains two steps and predicts on synthetic scenes of its own labels and channels."""

from __future__ import annotations

import csv
from pathlib import Path

import hydra
import numpy as np
import pytest

from medseg.commands.predict import predict
from medseg.commands.prepare import prepare
from medseg.config.check import to_config
from medseg.config.folder import conf_dir
from medseg.config.schema import PredictConfig, PrepareConfig, TrainConfig
from medseg.io.read import read_image, read_labels
from medseg.runs.folder import open_run
from medseg.runs.train_run import train_run

PRESETS = ("kidneys", "spine")
SPACING = "target_spacing_mm=[8.0,8.0,8.0]"


def compose(root: str, schema: type, *overrides: str) -> object:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return to_config(hydra.compose(root, [*overrides]), schema)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_goes_from_synthetic_scans_to_labels(preset: str, tmp_path: Path) -> None:
    data = [
        f"task={preset}", "data.phantoms.scene=organs", f"data.phantoms.folder='{tmp_path}'", "data.phantoms.num_train=2",
        "data.phantoms.num_val=1", "data.phantoms.num_test=0", f"data.cache='{tmp_path / 'cache'}'",
    ]  # fmt: skip
    config = compose("prepare", PrepareConfig, *data, f"spacings.coarse.{SPACING}", f"spacings.fine.{SPACING}")
    assert isinstance(config, PrepareConfig)
    assert prepare(config) == 0
    checkpoints = []
    for stage in ("coarse", "fine") if config.task.regions else ("coarse",):
        run_dir = tmp_path / stage
        trained = compose(
            "train", TrainConfig, *data, f"stage={stage}", "steps=2", "model.width=4", f"spacing.{SPACING}", "logger=none",
            "data.num_workers=0", "trainer.accelerator=cpu", "trainer.threads=1", f"run_dir='{run_dir}'",
        )  # fmt: skip
        assert isinstance(trained, TrainConfig)
        open_run(trained)
        assert train_run(trained)["steps"] == 2
        checkpoints.append(f"{stage}='{run_dir / 'checkpoints' / 'last.ckpt'}'")
    if len(checkpoints) == 1:
        checkpoints.append("fine=null")
    table = tmp_path / preset / "table.csv"
    given = [f"input='{table}'", f"output='{tmp_path / 'out'}'", *checkpoints, "accelerator=cpu", "threads=1"]
    predicted = compose("predict", PredictConfig, *given)
    assert isinstance(predicted, PredictConfig)
    assert predict(predicted) == 0
    with table.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert sum(column.startswith("image") for column in rows[0]) == len(config.task.channels or [None])
    for row in rows:
        labels = read_labels(tmp_path / "out" / f"{row['case']}.nii.gz")
        assert labels.grid.is_close(read_image(table.parent / row["image"]).grid)
        assert set(np.unique(labels.array)) <= {0, *config.task.labels.values()}
