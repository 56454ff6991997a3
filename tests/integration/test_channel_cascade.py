"""Tasks of two and four channels learn their labels, with and without regions."""

from __future__ import annotations

import json
from pathlib import Path

import hydra
import numpy as np
import pytest

from medseg.commands import predict as predict_command
from medseg.commands.evaluate import evaluate
from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.config.schema import EvaluateConfig
from medseg.geometry.grid import VoxelGrid
from medseg.io.read import read_grid, read_labels
from medseg.io.tables import read_csv
from medseg.io.write import write_image
from medseg.prediction.options import PredictConfig

from .conftest import COARSE, FINE, train

MR = "{modality: mr, normalise: zscore}"
TWO = ["task.window_hu=null", f"task.channels=[{{modality: ct, window_hu: [-1000, 400]}},{MR}]"]
FOUR = [
    "task.window_hu=null",
    "task.least_hu=null",
    f"task.channels=[{MR},{{modality: mr, normalise: percentile}},{MR},{MR}]",
]


@pytest.fixture(scope="module")
def table(tiny_table: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny cases with three MR images, each on a finer grid of its own."""
    folder, rng = tmp_path_factory.mktemp("channels"), np.random.default_rng(1)
    lines = ["case,image,image_1,image_2,image_3,labels,patient,split"]
    for index, split in enumerate(("train", "train", "val", "test")):
        image, labels = (tiny_table.parent / f"{kind}{index}.nii.gz" for kind in "cl")
        volume = read_labels(labels)
        grid: VoxelGrid = volume.grid.resampled((3.0, 4.0, 4.0))
        nearest = np.round(
            volume.grid.world_to_index_zyx(
                grid.index_to_world_xyz_mm(
                    np.moveaxis(np.indices(grid.shape), 0, -1).reshape(-1, 3)
                )
            )
        )
        places = tuple(np.clip(nearest.astype(int), 0, np.array(volume.grid.shape) - 1).T)
        inside = volume.array[places].reshape(grid.shape)
        names = []
        for number in range(3):
            values = np.where(inside > 0, 300.0 * (number + 1), 100.0) + rng.normal(
                0, 5, grid.shape
            )
            write_image(folder / f"m{index}_{number}.nii.gz", values.astype(np.float32), grid)
            names.append(f"m{index}_{number}.nii.gz")
        lines.append(f"case {index},{image},{','.join(names)},{labels},p{index},{split}")
    (folder / "table.csv").write_text("\n".join(lines) + "\n")
    return folder / "table.csv"


def command(name: str, *overrides: str) -> int:
    schema, run = {
        "predict": (PredictConfig, predict_command.predict),
        "evaluate": (EvaluateConfig, evaluate),
    }[name]
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return run(to_config(hydra.compose(name, list(overrides)), schema))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("channels", "stages"),
    [
        (TWO, "two stages"),
        pytest.param(FOUR, "two stages", marks=pytest.mark.thorough),
        pytest.param(TWO, "one stage", marks=pytest.mark.thorough),
        (FOUR, "one stage on patches"),
    ],
)
def test_channels_train_predict_and_evaluate(
    channels: list[str], stages: str, table: Path, tmp_path: Path
) -> None:
    common = [*channels, "steps=40"]
    if stages == "two stages":
        coarse = train(tmp_path / "coarse", table, *COARSE, *common)
        fine = train(tmp_path / "fine", table, *FINE, *common)
        checkpoints = [f"coarse='{coarse}'", f"fine='{fine}'"]
    else:
        patch = (
            ["stage.patch_size=[32,32,32]", "inference.tile_size=[32,32,32]"]
            if "patches" in stages
            else ["stage.patch_size=null"]
        )
        how = ["stage=single", "spacing=isotropic_4mm", "task.regions=null", *COARSE[2:], *patch]
        if "patches" not in stages:
            how.append("inference.tile_size=null")
        checkpoints = [f"coarse='{train(tmp_path / 'single', table, *how, *common)}'"]
    checkpoints.append("accelerator=cpu")

    assert command("predict", f"input='{table}'", f"output='{tmp_path / 'out'}'", *checkpoints) == 0
    scores = [f"pred='{tmp_path / 'out'}'", f"ref='{table}'", f"output='{tmp_path / 'scores'}'"]
    task = [*channels, *([] if stages == "two stages" else ["task.regions=null"])]
    assert command("evaluate", *scores, *task) == 0
    rows = read_csv(tmp_path / "scores" / "metrics.csv")
    assert [(row["case"], row["region"]) for row in rows] == [
        (f"case {index}", name) for index in range(4) for name in ("left_lung", "right_lung")
    ]
    assert np.mean([float(row["dice"]) for row in rows]) > 0.5
    assert {row["case"] for row in read_csv(tmp_path / "out" / "summary.csv")} == {
        f"case {index}" for index in range(4)
    }

    row = read_csv(table)[3]
    paths = [str(table.parent / row[name]) for name in ("image", "image_1", "image_2", "image_3")][
        : 2 if channels is TWO else 4
    ]
    alone = tmp_path / "alone.nii.gz"
    assert command("predict", f"input={json.dumps(paths)}", f"output='{alone}'", *checkpoints) == 0
    assert np.array_equal(
        read_labels(alone).array, read_labels(tmp_path / "out" / "case 3.nii.gz").array
    )
    assert read_grid(alone).is_close(read_grid(Path(paths[0])))
