"""`history_every` sets how often a run writes a line of `history.csv`."""

from __future__ import annotations

from pathlib import Path

import hydra

from medseg.config.check import to_config
from medseg.config.folder import conf_dir
from medseg.config.schema import TrainConfig
from medseg.report.tables import read_csv
from medseg.runs.folder import open_run
from medseg.runs.train_run import train_run


def test_lines_of_the_history_are_as_far_apart_as_asked_for(tiny_table: Path, tmp_path: Path) -> None:
    overrides = [
        f"data.cases='{tiny_table}'", f"data.cache='{tiny_table.parent / 'cache'}'", "data.num_workers=0", "spacing=isotropic_4mm",
        "trainer.accelerator=cpu", "trainer.threads=1", "logger=none", "model.width=4", "steps=6", "history_every=3",
        f"run_dir='{tmp_path / 'run'}'",
    ]  # fmt: skip
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = to_config(hydra.compose("train", overrides), TrainConfig)
    open_run(config)
    train_run(config)
    assert [row["step"] for row in read_csv(tmp_path / "run" / "history.csv") if row["loss"]] == ["3", "6"]
