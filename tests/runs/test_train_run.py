"""Steps around the training of a run."""

from __future__ import annotations

import json
from pathlib import Path

import hydra
import pytest

from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.errors import UserError
from medseg.runs import train_run
from medseg.runs.folder import SUMMARY_FILE, open_run, status_of_run
from medseg.runs.status import Status
from medseg.runs.train_run import remove_parts, run_rank
from medseg.training.options import TrainConfig


def test_while_a_run_trains_nothing_says_how_its_last_attempt_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = to_config(hydra.compose("train", [f"run_dir='{tmp_path}'", "logger=none"]), TrainConfig)
    open_run(config)
    (tmp_path / SUMMARY_FILE).write_text(json.dumps({"status": "refused"}))
    seen: list[object] = []

    def train(_: TrainConfig) -> None:
        seen.extend([status_of_run(tmp_path), (tmp_path / SUMMARY_FILE).exists()])
        raise UserError("no room")

    monkeypatch.setattr(train_run, "train_run", train)
    assert run_rank(config) == 2
    assert seen == [Status.running, False], "a kill now would leave the old status"
    assert json.loads((tmp_path / SUMMARY_FILE).read_text()) == {"status": "refused", "message": "no room"}


def test_half_written_files_are_removed_and_files_of_the_user_stay(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    parts = [tmp_path / ".medseg-1.part", tmp_path / "checkpoints" / ".medseg-2.part.ckpt"]
    own = [tmp_path / "notes.tmp", tmp_path / "checkpoints" / "last.ckpt"]
    for path in (*parts, *own):
        path.write_text("x")
    remove_parts(tmp_path)
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(own)


@pytest.mark.parametrize("content", ["", "{", "{}", "null", "7", "\x00", "[" * 9999])
def test_a_damaged_record_of_starts_begins_anew(content: str, tmp_path: Path) -> None:
    path = tmp_path / "versions.json"
    path.write_text(content)
    for seed in (1, 2):
        train_run._note_start(tmp_path, {"seed": seed})
    assert json.loads(path.read_text()) == [{"seed": 1}, {"seed": 2}]
