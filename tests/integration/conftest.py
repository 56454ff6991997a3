"""Both stages trained on the tiny cases, once per session, by the functions of the commands."""

from __future__ import annotations

from pathlib import Path

import hydra
import pytest

from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.runs.folder import open_run
from medseg.runs.train_run import train_run
from medseg.training.options import TrainConfig


def train(run_dir: Path, table: Path, *overrides: str) -> Path:
    """Train on the tiny cases in this process; returns the last checkpoint."""
    common = [
        f"data.cases='{table}'", f"data.cache='{table.parent / 'cache'}'", "data.num_workers=0",
        "logger=none",
        "trainer.accelerator=cpu", "trainer.threads=1", "model.width=8", "optimizer.lr=0.01",
        f"run_dir='{run_dir}'",
    ]  # fmt: skip
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = to_config(hydra.compose("train", [*common, *overrides]), TrainConfig)
    open_run(config)
    train_run(config)
    return run_dir / "checkpoints" / "last.ckpt"


# fp32 and wide enough to learn the tiny cases in seconds, whatever the seed.
LEARN = [
    "steps=110", "optimizer.lr=0.03", "augment=none", "model.width=16",
    "model.blocks_per_level=[1,1,1,1]",
]  # fmt: skip
COARSE = ["stage=coarse", "spacing=isotropic_4mm", *LEARN]
FINE = ["stage=fine", "spacing=isotropic_3mm", "stage.box_jitter_mm=2", *LEARN]


@pytest.fixture(scope="session")
def trained(tiny_table: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Coarse and fine checkpoint."""
    folder = tmp_path_factory.mktemp("trained")
    coarse = train(folder / "coarse", tiny_table, *COARSE)
    fine = train(folder / "fine", tiny_table, *FINE)
    return coarse, fine
