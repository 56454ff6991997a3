"""Commands as functions: their arguments, what they return, and their failures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import medseg
from medseg.errors import UserError
from medseg.studies import command_functions


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Replace the commands by a function that writes their files; with `steps=0` it fails.

    Returns:
        The commands that were called so far.
    """
    called: list[list[str]] = []

    def run(step: Sequence[str]) -> str:
        called.append(list(step))
        values = dict(argument.split("=", 1) for argument in step[1:])
        if values.get("steps") == "0":
            return "train ended with exit code 2: steps: must be at least 1"
        output = values.get("output", values.get("hydra.run.dir", "")).strip("'")
        if step[0] == "plan":
            Path(output).write_text(json.dumps({"peak_resident_mib": 7.5}))
        elif step[0] == "train":
            summary = {"status": "finished", "checkpoint": f"{output}/checkpoints/best.ckpt"}
            (Path(output) / "summary.json").write_text(json.dumps(summary))
            (Path(output) / "checkpoints").mkdir(exist_ok=True)
            (Path(output) / "checkpoints" / "last.ckpt").touch()
        else:
            Path(output).mkdir()
            (Path(output) / "pooled.csv").write_text("region,dice\nheart,0.9\n")
        return ""

    monkeypatch.setattr(command_functions, "run_and_get_failure", run)
    return called


def test_keys_are_those_of_the_command_line(commands: list[list[str]], tmp_path: Path) -> None:
    keys = {
        "stage": "single",
        "data.cases": Path("my scans/cases.csv"),
        "stage.patch_size": (np.int64(64), 64, 64),
        "spacing.target_spacing_mm": np.array([2.0, 1.5, 1.5]),
        "data.phantoms.num_extra": 0,
        "memory.channels_last": True,
        "init_from": None,
    }
    run = medseg.train(tmp_path / "run", keys)
    assert run.checkpoint == tmp_path / "run" / "checkpoints" / "best.ckpt"
    ((command, *arguments),) = commands
    assert command == "train"
    assert arguments == [
        "stage=single",
        "data.cases='my scans/cases.csv'",
        "stage.patch_size=[64,64,64]",
        "spacing.target_spacing_mm=[2.0,1.5,1.5]",
        "data.phantoms.num_extra=0",
        "memory.channels_last=true",
        "init_from=null",
        f"hydra.run.dir={tmp_path / 'run'}",
    ]


def test_a_finished_training_is_returned_for_its_own_keys_alone(
    commands: list[list[str]], tmp_path: Path
) -> None:
    first = medseg.train(tmp_path / "run", {"steps": 5, "seed": 1})
    assert medseg.train(tmp_path / "run", {"seed": 1, "steps": 5}) == first
    assert len(commands) == 1
    with pytest.raises(UserError, match=r"steps=5.*not .*steps=6.*another folder"):
        medseg.train(tmp_path / "run", {"seed": 1, "steps": 6})


def test_the_checkpoint_of_a_training_that_was_moved_is_found(
    commands: list[list[str]], tmp_path: Path
) -> None:
    medseg.train(tmp_path / "run", {"steps": 5})
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    run = medseg.train(moved, {"steps": 5})
    assert run.checkpoint == moved / "checkpoints" / "best.ckpt"


def test_keys_are_compared_with_a_run_of_the_command_line(
    commands: list[list[str]], tmp_path: Path
) -> None:
    """The run has finished, and no earlier call has noted its keys."""
    (tmp_path / "config.yaml").touch()
    (tmp_path / "summary.json").write_text('{"status": "finished"}')
    with pytest.raises(UserError, match="steps: must be at least 1"):
        medseg.train(tmp_path, {"steps": 0})
    medseg.train(tmp_path, {"steps": 5})
    medseg.train(tmp_path, {"steps": 5})
    assert [command[1:] for command in commands] == [
        [f"steps={steps}", f"hydra.run.dir={tmp_path}", f"resume={tmp_path}"] for steps in (0, 5)
    ]


def test_what_a_command_wrote_is_returned(commands: list[list[str]], tmp_path: Path) -> None:
    assert medseg.plan({"stage": "single", "fit_gib": 2.5}) == {"peak_resident_mib": 7.5}
    assert "fit_gib=2.5" in commands[0]
    study = medseg.cross_validate(tmp_path / "folds", {"num_folds": 2})
    assert (study.model, study.pooled) == (
        tmp_path / "folds" / "model",
        [{"region": "heart", "dice": "0.9"}],
    )


def test_a_refused_command_raises_its_message(commands: list[list[str]], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="steps: must be at least 1"):
        medseg.train(tmp_path / "run", {"steps": 0})
    # The refused call has not claimed the folder.
    assert medseg.train(tmp_path / "run", {"steps": 5}).summary["status"] == "finished"


def test_names_of_the_package_are_found() -> None:
    assert all(getattr(medseg, name) for name in medseg.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        _ = medseg.trian
