"""The ladder: rows that add up to the lean experiment, measured, trained and drawn, and kept when it is started again."""

from __future__ import annotations

import csv
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import hydra
import pytest

from medseg.config.check import to_config
from medseg.config.folder import conf_dir
from medseg.config.schema import LadderConfig, TrainConfig
from medseg.config.signature import plain
from medseg.errors import UserError
from medseg.pictures.ladder import Rung, draw_ladder
from medseg.studies import ladder as ladder_app
from medseg.studies.measurement import measure


def ladder_config(*overrides: str) -> LadderConfig:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return to_config(hydra.compose("ladder", [*overrides, "run_dir=x"]), LadderConfig)


def test_rows_add_up_to_the_lean_experiment() -> None:
    rows = list(ladder_app.ladder_rows(ladder_config("peers=true"), ["seed=3", "data.num_workers=0"]))
    assert [row.peer for row in rows[:3]] == ["nnunet", "monai", None]
    assert rows[0].arguments == rows[2].arguments  # the networks of others run as the first of ours does
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        first, last = (plain(ladder_app.compose(row)) for row in (rows[2], rows[-1]))
        composed = hydra.compose("train", ["experiment=fine_lean", "seed=3", "data.num_workers=0", "run_dir=ladder"])
    lean = plain(to_config(composed, TrainConfig))
    differing = {key for key in lean if last[key] != lean[key]} - {"name", "data", "logger"}
    assert not differing
    assert first["memory"] != lean["memory"]
    assert all(config["seed"] == 3 and config["data"]["num_workers"] == 0 for config in (first, last))


def test_rows_that_train_would_refuse_are_named() -> None:
    rows = list(ladder_app.ladder_rows(ladder_config("+rows.wrong=['model.stem=conv']"), []))
    with (
        hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"),
        pytest.raises(UserError, match=r"rows\.wrong: model\.refine=8"),
    ):
        ladder_app.compose(rows[-1])
    with pytest.raises(UserError, match="differ in their letters"):
        list(ladder_app.ladder_rows(replace(ladder_config(), rows={"a b": [], "a/b": []}), []))


def test_a_row_is_counted_and_timed() -> None:
    rows = list(ladder_app.ladder_rows(ladder_config("trainer.accelerator=cpu"), ["trainer.accelerator=cpu"]))
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = ladder_app.compose(replace(rows[-1], arguments=(*rows[-1].arguments, "model.width=4")))
    measured = measure(config, (16, 32, 32), timed_steps=1, peer=None)
    assert measured["peak_bytes"] > 16 * 32 * 32 * (4 + 1 + measured["saved_per_voxel"])
    assert 0 < measured["seconds_per_step"] < 60


def test_picture_shows_only_what_is_known(tmp_path: Path) -> None:
    def width(*rungs: Rung) -> int:
        from PIL import Image

        draw_ladder(rungs, "noise", tmp_path / "ladder.png")
        with Image.open(tmp_path / "ladder.png") as picture:
            return picture.size[0]

    bytes_only = Rung("plain", True, 100.0, 10.0, None, None)
    assert width(bytes_only) < width(bytes_only, bytes_only._replace(seconds_per_step=1.0, dice=0.9))


@pytest.mark.slow
def test_climbs_trains_and_keeps_what_is_done(tiny_table: Path, tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "medseg.commands.cli", "ladder", f"output={tmp_path / 'l'}", "shape=[32,32,32]", "timed_steps=1",
        "train=true", "steps=2", f"data.cases={tiny_table}", f"data.cache={tiny_table.parent / 'cache'}", "logger=none",
        "data.num_workers=0", "spacing.target_spacing_mm=[4.0,4.0,4.0]", "trainer.accelerator=cpu", "~rows",
        "+rows={first row: ['model.width=4'], half: ['memory.precision=bf16']}",
    ]  # fmt: skip
    for attempt in range(2):
        result = subprocess.run(command, capture_output=True, encoding="utf-8", cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        assert ("measuring" in result.stdout) == (attempt == 0)
        assert ("medseg train" in result.stdout) == (attempt == 0)
    with (tmp_path / "l" / "ladder.csv").open(encoding="utf-8", newline="") as file:
        first, half = csv.DictReader(file)
    assert float(half["saved_bytes_per_voxel"]) < 0.7 * float(first["saved_bytes_per_voxel"])
    assert all(0 <= float(row["dice"]) <= 1 and float(row["seconds_per_step"]) > 0 for row in (first, half))
    assert (tmp_path / "l" / "ladder.png").is_file()
