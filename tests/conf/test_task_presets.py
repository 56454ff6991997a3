"""Every task preset prepares, trains two steps and predicts on synthetic scenes of its own."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TypeVar

import hydra
import numpy as np
import pytest

from medseg.commands.phantom import phantom
from medseg.commands.predict import predict
from medseg.commands.prepare import prepare
from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.config.schema import PhantomsConfig, PrepareConfig
from medseg.io.read import read_image, read_labels
from medseg.prediction.options import PredictConfig
from medseg.runs.folder import open_run
from medseg.runs.train_run import train_run
from medseg.training.options import TrainConfig

T = TypeVar("T")
PRESETS = ("kidneys", "spine", "abdomen", "brain_tumour")
SPACING = "target_spacing_mm=[8.0,8.0,8.0]"


def compose(root: str, schema: type[T], *overrides: str) -> T:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return to_config(hydra.compose(root, [*overrides]), schema)


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_goes_from_synthetic_scans_to_labels(preset: str, tmp_path: Path) -> None:
    data = [
        f"task={preset}", "data.phantoms.scene=organs", f"data.phantoms.folder='{tmp_path}'",
        "data.phantoms.num_train=2",
        "data.phantoms.num_val=1", "data.phantoms.num_test=0", f"data.cache='{tmp_path / 'cache'}'",
    ]  # fmt: skip
    config = compose(
        "prepare", PrepareConfig, *data, f"spacings.coarse.{SPACING}", f"spacings.fine.{SPACING}"
    )
    assert prepare(config) == 0
    checkpoints = []
    for stage in ("coarse", "fine") if config.task.regions else ("single",):
        run_dir = tmp_path / stage
        trained = compose(
            "train", TrainConfig, *data, f"stage={stage}", "steps=2", "model.width=4",
            f"spacing.{SPACING}", "logger=none",
            *(
                ["stage.patch_size=[32,32,32]", "inference.tile_size=[32,32,32]"]
                if stage == "single"
                else []
            ),
            "data.num_workers=0", "trainer.accelerator=cpu", "trainer.threads=1",
            f"run_dir='{run_dir}'",
        )  # fmt: skip
        open_run(trained)
        assert train_run(trained)["steps"] == 2
        checkpoints.append(
            f"{stage.replace('single', 'coarse')}='{run_dir / 'checkpoints' / 'last.ckpt'}'"
        )
    table = tmp_path / preset / "table.csv"
    overrides = [
        f"input='{table}'",
        f"output='{tmp_path / 'out'}'",
        *checkpoints,
        "accelerator=cpu",
        "threads=1",
    ]
    predicted = compose("predict", PredictConfig, *overrides)
    assert predict(predicted) == 0
    with table.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert sum(column.startswith("image") for column in rows[0]) == len(
        config.task.channels or [None]
    )
    for row in rows:
        labels = read_labels(tmp_path / "out" / f"{row['case']}.nii.gz")
        assert labels.grid.is_close(read_image(table.parent / row["image"]).grid)
        assert set(np.unique(labels.array)) <= {0, *config.task.labels.values()}


@pytest.mark.parametrize(
    ("task", "columns", "parts"),
    [
        ("lungs", 1, ["left_lung", "right_lung"]),
        ("brain_tumour", 4, ["edema", "non_enhancing_tumour", "enhancing_tumour"]),
    ],
)
def test_the_command_writes_scenes_of_a_task(
    task: str, columns: int, parts: list[str], tmp_path: Path
) -> None:
    counts = ["num_train=1", "num_val=1", "num_test=0"]
    assert (
        phantom(
            compose(
                "phantom",
                PhantomsConfig,
                f"task={task}",
                "scene=organs",
                f"output='{tmp_path}'",
                *counts,
            )
        )
        == 0
    )
    with (tmp_path / "table.csv").open(encoding="utf-8") as file:
        (first, _) = csv.DictReader(file)
    assert sum(column.startswith("image") for column in first) == columns
    assert {column: cell for column, cell in first.items() if column.startswith("trust_")} == {
        f"trust_{part}": "reference" for part in parts
    }
