"""Steps around the training of a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra
import pytest

from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.errors import UserError
from medseg.io.atomic import locked
from medseg.runs import train_run
from medseg.runs.folder import (
    LOCK_FILE,
    SUMMARY_FILE,
    open_run,
    read_summary,
    status_of_run,
    write_end,
)
from medseg.runs.status import Status
from medseg.runs.train_run import remove_parts, run_rank
from medseg.training.options import TrainConfig


def test_while_a_run_trains_nothing_says_how_its_last_attempt_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = to_config(
            hydra.compose("train", [f"run_dir='{tmp_path}'", "logger=none"]), TrainConfig
        )
    open_run(config)
    (tmp_path / SUMMARY_FILE).write_text(json.dumps({"status": "refused"}))
    seen: list[object] = []

    def train(_: TrainConfig) -> None:
        seen.extend([status_of_run(tmp_path), (tmp_path / SUMMARY_FILE).exists()])
        raise UserError("no room")

    monkeypatch.setattr(train_run, "train_run", train)
    assert run_rank(config) == 2
    assert seen == [Status.running, False], "a kill now would leave the old status"
    assert json.loads((tmp_path / SUMMARY_FILE).read_text()) == {
        "status": "refused",
        "message": "no room",
    }


def test_half_written_files_are_removed_and_files_of_the_user_stay(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    parts = [tmp_path / ".medseg-1.part", tmp_path / "checkpoints" / ".medseg-2.part.ckpt"]
    own = [tmp_path / "notes.tmp", tmp_path / "checkpoints" / "last.ckpt"]
    own.append(tmp_path / "cache" / "case" / ".medseg-3.part")  # another process writes it
    own[-1].parent.mkdir(parents=True)
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


OUT_OF_MEMORY = (Status.out_of_memory, "out of memory: no room")
LOST = (Status.failed, "the connection to another rank broke off (gloo/transport)")


@pytest.mark.parametrize("written", [OUT_OF_MEMORY, LOST, (Status.finished, ""), None])
@pytest.mark.parametrize("is_asked", [False, True])
def test_a_lost_connection_does_not_replace_the_cause_that_another_rank_wrote(
    written: tuple[Status, str] | None,
    is_asked: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def train(_: TrainConfig) -> None:
        if written is not None:
            write_end(tmp_path, *written)
        # torchrun asks all other ranks to stop when one has failed.
        monkeypatch.setattr(train_run.STOP, "is_asked", is_asked)
        raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")

    config = compose(tmp_path)
    monkeypatch.setattr(train_run, "train_run", train)
    run_rank(config)
    expected = Status.interrupted if is_asked else Status.failed
    if written is not None and written is not LOST:
        expected = written[0]
    assert status_of_run(tmp_path) is expected


def test_a_cause_replaces_the_lost_connection_that_another_rank_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(_: TrainConfig) -> None:
        write_end(tmp_path, *LOST)
        raise MemoryError("no room")

    config = compose(tmp_path)
    monkeypatch.setattr(train_run, "train_run", train)
    run_rank(config)
    assert read_summary(tmp_path)["status"] == "out_of_memory"


class Parts:
    """Replaces what a run is built of, and notes the arguments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, step: int = 0) -> None:
        self.made: dict[str, Any] = {}
        self.trainer = SimpleNamespace(is_global_zero=True, global_step=7, fit=self.note("fit"))
        self.data = SimpleNamespace(patients={"a": "p"})
        weights = [SimpleNamespace(numel=lambda count=count: count) for count in (3, 4)]
        self.network = SimpleNamespace(parameters=lambda: weights)
        replaced = {
            "medseg.training.network.make_network": self.note("network", self.network),
            "medseg.training.network.load_initial_weights": self.note("initial"),
            "medseg.training.assemble.make_trainer": self.note("trainer", self.trainer),
            "medseg.training.assemble.make_module": self.note("module", "module"),
            "medseg.training.assemble.make_metadata": self.note("metadata", "metadata"),
            "medseg.training.assemble.make_data_module": self.note("data", self.data),
            "medseg.training.extensions.make_callbacks": self.note("callbacks", ["own callback"]),
            "medseg.weights.files.load_checkpoint": self.note("checkpoint", {"global_step": step}),
        }
        for name, value in replaced.items():
            monkeypatch.setattr(name, value)
        for name in ("describe_run", "next_command", "join_ranks", "remove_parts", "_note_start"):
            monkeypatch.setattr(train_run, name, self.note(name, ""))

    def note(self, name: str, result: Any = None) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            self.made[name] = (arguments, options)
            return result

        return call


def compose(tmp_path: Path, *overrides: str) -> TrainConfig:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        composed = hydra.compose(
            "train", [f"run_dir='{tmp_path}'", "logger=none", "stage=fine", *overrides]
        )
    config = to_config(composed, TrainConfig)
    open_run(config)
    return config


def test_a_run_is_made_of_the_parts_of_its_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Parts(monkeypatch)
    settings = [
        "seed=11",
        "steps=400",
        "checkpoint_every=30",
        "stage.validate_every=50",
        "stage.patience=3",
    ]
    config = compose(tmp_path, *settings)
    seeds: list[int] = []
    monkeypatch.setattr("torch.manual_seed", seeds.append)
    summary = train_run.train_run(config)
    assert seeds == [11]
    (_, callbacks, start_step), _ = parts.made["trainer"]
    assert start_step == 0
    history, pictures, scores, checkpoints, own = callbacks
    assert own == "own callback"
    assert (history.path, history.history_every, history.steps) == (
        tmp_path / "history.csv",
        20,
        400,
    )
    assert pictures.folder == tmp_path / "pictures"
    assert [view.is_mirrored for view in pictures.views] == [False, True]
    assert (scores.path, scores.pictures, scores.patients) == (
        tmp_path / "validation.csv",
        pictures,
        {"a": "p"},
    )
    assert checkpoints.folder == tmp_path / "checkpoints"
    assert (checkpoints.validate_every, checkpoints.checkpoint_every, checkpoints.patience) == (
        50,
        30,
        3,
    )
    assert parts.made["fit"] == (
        ("module",),
        {"datamodule": parts.data, "ckpt_path": None, "weights_only": True},
    )
    assert parts.made["module"] == ((config, parts.network, "metadata"), {})
    assert "checkpoint" not in parts.made
    assert (summary["status"], summary["steps"], summary["num_parameters"]) == ("finished", 7, 7)
    assert summary["checkpoint"] == str(tmp_path / "checkpoints" / "last.ckpt")
    assert summary["seconds_per_step"] == 0.0
    written = json.loads((tmp_path / SUMMARY_FILE).read_text())
    assert written == json.loads(json.dumps(summary))


def test_a_run_goes_on_from_its_last_checkpoint_and_ends_with_its_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Parts(monkeypatch, step=120)
    settings = ["spacing=fixed_size", "spacing.size=[64,64,64]", "history_every=9"]
    config = compose(tmp_path, *settings)
    for name in ("last", "best"):
        (tmp_path / "checkpoints" / f"{name}.ckpt").touch()
    parts.trainer.is_global_zero = False
    summary = train_run.train_run(config)
    last = tmp_path / "checkpoints" / "last.ckpt"
    assert parts.made["checkpoint"] == ((last, f"resume={tmp_path}"), {})
    (_, callbacks, start_step), _ = parts.made["trainer"]
    assert start_step == 120
    assert callbacks[0].history_every == 9
    (distortions,) = [
        callback for callback in callbacks if type(callback).__name__ == "Distortions"
    ]
    assert distortions.names == ["left_lung", "right_lung"]
    assert parts.made["fit"][1]["ckpt_path"] == str(last)
    assert summary["checkpoint"] == str(tmp_path / "checkpoints" / "best.ckpt")
    assert summary["plan"] == {}, "rank 0 alone compares"
    assert not (tmp_path / SUMMARY_FILE).exists()
    assert "_note_start" not in parts.made


def test_an_interruption_is_not_taken_for_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Parts(monkeypatch)
    config = compose(tmp_path)

    def interrupted(*_: Any, **__: Any) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            sys.exit(1)

    parts.trainer.fit = interrupted
    with pytest.raises(KeyboardInterrupt):
        train_run.train_run(config)

    def ended(*_: Any, **__: Any) -> None:
        sys.exit(3)

    parts.trainer.fit = ended
    with pytest.raises(SystemExit) as end:
        train_run.train_run(config)
    assert end.value.code == 3


def test_a_run_that_another_process_trains_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = compose(tmp_path)
    (tmp_path / SUMMARY_FILE).write_text("{}")
    monkeypatch.setattr(train_run, "LOCK_WAIT_S", 0)
    monkeypatch.setattr(train_run, "train_run", lambda _: pytest.fail("trained"))
    with locked(tmp_path / LOCK_FILE):
        assert run_rank(config) == 2
    assert f"another process is running {tmp_path}" in capsys.readouterr().err
    assert (tmp_path / SUMMARY_FILE).read_text() == "{}"
    monkeypatch.setattr(train_run, "train_run", lambda _: {})
    assert run_rank(config) == 0
