"""Tasks of two and four channels train, resume bit by bit, predict and are scored."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TypeVar

import hydra
import pytest
import torch

from medseg.commands.evaluate import evaluate
from medseg.commands.predict import predict
from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.config.schema import EvaluateConfig
from medseg.errors import UserError
from medseg.prediction.options import PredictConfig
from medseg.runs.folder import open_run
from medseg.runs.train_run import train_run
from medseg.training.options import TrainConfig

pytestmark = pytest.mark.usefixtures("without_pictures")

T = TypeVar("T")
TASKS = {
    "two": [
        "task=kidneys", "task.regions=null", "task.ignore_label=9", "task.volume_ml=null",
        ("task.channels=[{modality: ct, window_hu: [-160, 240]}, {modality: mr, normalise: "
         "percentile}]"),
    ],
    "four": ["task=brain_tumour"],
}  # fmt: skip


def compose(root: str, schema: type[T], *overrides: str) -> T:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return to_config(hydra.compose(root, [*overrides]), schema)


@pytest.mark.parametrize(
    "task", ["two", pytest.param("four", marks=[pytest.mark.slow, pytest.mark.thorough])]
)
def test_several_channels_from_training_to_scores(task: str, tmp_path: Path) -> None:
    settings = [
        *TASKS[task], "data.phantoms.scene=organs", f"data.phantoms.folder='{tmp_path}'",
        "data.phantoms.num_train=2",
        "data.phantoms.num_val=1", "data.phantoms.num_test=0", f"data.cache='{tmp_path / 'cache'}'",
        "stage=single", "model.width=4",
        "stage.patch_size=[32,32,32]", "inference.tile_size=[32,32,32]",
        "spacing.target_spacing_mm=[8.0,8.0,8.0]", "logger=none",
        "schedule=constant", "data.num_workers=0", "trainer.accelerator=cpu", "trainer.threads=1",
    ]  # fmt: skip

    def train(name: str, *overrides: str) -> Path:
        config = compose(
            "train", TrainConfig, *settings, f"run_dir='{tmp_path / name}'", *overrides
        )
        run_dir = open_run(config)
        train_run(config)
        return run_dir / "checkpoints" / "last.ckpt"

    whole, _ = train("whole", "steps=4"), train("halved", "steps=2")
    resumed = train("halved", "steps=4", f"resume='{tmp_path / 'halved'}'")
    states = [torch.load(path, weights_only=True)["state_dict"] for path in (whole, resumed)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])

    (table,) = tmp_path.glob("*/table.csv")
    out = tmp_path / "out"
    given = [f"coarse='{whole}'", "accelerator=cpu", "threads=1"]
    assert (
        predict(compose("predict", PredictConfig, f"input='{table}'", f"output='{out}'", *given))
        == 0
    )
    scored = compose(
        "evaluate",
        EvaluateConfig,
        *TASKS[task],
        f"pred='{out}'",
        f"ref='{table}'",
        f"output='{tmp_path / 'scores'}'",
    )
    assert evaluate(scored) == 0
    with (tmp_path / "scores" / "metrics.csv").open() as file:
        assert {row["case"] for row in csv.DictReader(file)} == {
            "phantom_000",
            "phantom_001",
            "phantom_002",
        }

    lines = table.read_text().splitlines()
    column = lines[0].split(",").index("image_1")
    cells = [line.split(",") for line in lines]
    cells[1][column] = ""
    table.write_text("\n".join(map(",".join, cells)) + "\n")
    with pytest.raises(
        UserError, match=r"The case 'phantom_000' has no image_1, but the task has [24] channels"
    ):
        train("lacking", "steps=1", f"data.cases='{table}'")
