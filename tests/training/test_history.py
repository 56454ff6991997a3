"""History: its lines, what it makes of a damaged file, and that no step waits for a value."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra
import lightning.pytorch as pl
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.errors import NotFiniteError
from medseg.io.tables import read_csv
from medseg.runs.folder import open_run
from medseg.runs.train_run import train_run
from medseg.training import history as history_module
from medseg.training.history import HISTORY_COLUMNS, History, HistoryBar
from medseg.training.options import TrainConfig

from .test_machine_load import SMALL, make_batch


@pytest.mark.usefixtures("without_pictures")
def test_lines_of_the_history_are_as_far_apart_as_asked_for(
    tiny_table: Path, tmp_path: Path
) -> None:
    overrides = [
        f"data.cases='{tiny_table}'", f"data.cache='{tiny_table.parent / 'cache'}'",
        "data.num_workers=0", "spacing=isotropic_4mm",
        "trainer.accelerator=cpu", "trainer.threads=1", "logger=none", "model.width=4", "steps=6",
        "history_every=3",
        f"run_dir='{tmp_path / 'run'}'",
    ]  # fmt: skip
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = to_config(hydra.compose("train", overrides), TrainConfig)
    open_run(config)
    train_run(config)
    rows = read_csv(tmp_path / "run" / "history.csv")
    assert [row["step"] for row in rows if row["loss"]] == ["3", "6"]


# Operations and methods that read a value from the device, for which the host would wait. The
# methods call no operation that a dispatch mode sees.
WAITING = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.equal.default,
}
WAITING_METHODS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu}


class Operations(TorchDispatchMode):
    """Collects the steps of operations that wait."""

    def __init__(self, trainer: pl.Trainer, steps: list[int]) -> None:
        super().__init__()
        self.trainer = trainer
        self.steps = steps

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WAITING:
            self.steps.append(self.trainer.global_step)
        return func(*args, **(kwargs or {}))


class Methods(TorchFunctionMode):
    """Collects the steps of methods that wait."""

    def __init__(self, trainer: pl.Trainer, steps: list[int]) -> None:
        self.trainer = trainer
        self.steps = steps

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WAITING_METHODS:
            self.steps.append(self.trainer.global_step)
        return func(*args, **(kwargs or {}))


class Watch(pl.Callback):
    """Watches the whole training, whatever the order of the callbacks."""

    def __init__(self, *modes: Any) -> None:
        self.modes = modes or (Operations, Methods)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.steps: list[int] = []
        self.watching = ExitStack()
        for mode in self.modes:
            self.watching.enter_context(mode(trainer, self.steps))

    def on_train_end(self, *_: Any) -> None:
        self.watching.close()


class Waits(pl.Callback):
    """Reads the values of the progress bar after each batch."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        assert trainer.callback_metrics["train/loss"] >= 0


@pytest.mark.parametrize("is_last", [True, False])
def test_no_step_waits_for_a_value(
    is_last: bool, fit: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No part of a step reads from the device but where a line is written."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    watch, history = Watch(), History(tmp_path / "history.csv", history_every=3, steps=6)
    settings = [*SMALL, "steps=6", "memory.checkpointing=all", "trainer.gradient_clip=1"]
    callbacks = [watch, history, HistoryBar(history)]
    fit(settings, [make_batch(n) for n in range(6)], callbacks if is_last else callbacks[::-1])
    assert set(watch.steps) == {3, 6}
    assert (tmp_path / "history.csv").read_text().count("\n") == 3


@pytest.mark.parametrize(("loss", "waits"), [("dice_ce", 0), ("tversky", 1), ("dice_focal", 1)])
def test_ignored_voxels_cost_a_wait_with_losses_of_others_alone(
    loss: str, waits: int, fit: Callable[..., Any]
) -> None:
    """One wait per sample and step. MONAI makes lists on the host, so methods are not watched."""
    watch, batches = Watch(Operations), [make_batch(n) for n in range(2)]
    for batch in batches:
        batch["target"][:, :2] = 9
    fit([*SMALL, "steps=2", f"loss={loss}", "task.ignore_label=9"], batches, [watch])
    assert watch.steps == [0, 1] * waits


@pytest.mark.parametrize("is_last", [True, False])
def test_a_callback_that_waits_is_seen_in_any_order(is_last: bool, fit: Callable[..., Any]) -> None:
    watch = Watch()
    fit(
        [*SMALL, "steps=2"],
        [make_batch(n) for n in range(2)],
        [watch, Waits()] if is_last else [Waits(), watch],
    )
    assert set(watch.steps) == {1, 2}


def test_the_progress_bar_shows_the_last_figures(tmp_path: Path) -> None:
    history = History(tmp_path / "history.csv", history_every=3, steps=6)
    history.rows = [
        {"step": "3", "loss": "0.5", "val_dice": ""},
        {"step": 4, "val_dice": 0.8},
        {"step": 6, "loss": 0.25},
    ]
    assert HistoryBar(history).get_metrics(None, None) == {"loss": 0.25, "val_dice": 0.8}
    history.rows += [{"step": 6, "val_dice": 0.0}, {"step": 9, "loss": 0.0}]
    assert HistoryBar(history).get_metrics(None, None) == {"loss": 0.0, "val_dice": 0.0}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        bytes(50),
        b"a,b\n1,2\n",
        b"step\n1\n",
        b"x" * 200_000,
        b'"' + b"x" * 200_000,
    ],
)
def test_a_damaged_history_begins_anew(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "history.csv"
    path.write_bytes(content)
    history = History(path, 1, 9)
    history.load_state_dict({"losses": [], "num_rows": 2, "train_s": 0.0})
    history.on_train_start(
        SimpleNamespace(global_step=2, is_global_zero=True),
        SimpleNamespace(device="cpu", parameters=list),
    )
    assert path.read_text(encoding="utf-8") == ",".join(HISTORY_COLUMNS) + "\n"


class Steps:
    """A trainer of two micro-batches, losses of a module, and a clock that is set by hand."""

    def __init__(self, history: History, monkeypatch: pytest.MonkeyPatch) -> None:
        self.history = history
        self.now_s = 100.0
        self.logged: list[Any] = []
        logger = SimpleNamespace(
            log_metrics=lambda values, step: self.logged.append((values, step))
        )
        self.trainer: Any = SimpleNamespace(
            global_step=0,
            accumulate_grad_batches=2,
            loggers=[logger],
            is_global_zero=True,
            sanity_checking=False,
            callback_metrics={},
        )
        self.module: Any = SimpleNamespace(train_loss=torch.tensor(0.0))
        monkeypatch.setattr(history_module.time, "perf_counter", lambda: self.now_s)
        monkeypatch.setattr(history_module, "peak_bytes", lambda _: 3 * 2**29)
        history.load = SimpleNamespace(read=dict, uses_gpu=False)
        history.last_time_s = 100.0
        history.last_step = 0
        history.lr = 0.25

    def step(self, *losses: float) -> None:
        for index, loss in enumerate(losses):
            self.now_s += 1.5
            self.module.train_loss = torch.tensor(loss)
            if index == len(losses) - 1:
                self.trainer.global_step += 1
            self.history.on_train_batch_end(self.trainer, self.module, None, None, index)


def test_a_line_has_the_mean_of_the_micro_batches_since_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = History(tmp_path / "history.csv", 2, 5)
    steps = Steps(history, monkeypatch)
    for first, second in ((1.0, 3.0), (5.0, 7.0), (0.0, 2.0), (4.0, 6.0), (8.0, 10.0)):
        steps.step(first, second)
    rows = [
        (row["step"], row["loss"], row["lr"], row["seconds_per_step"], row["peak_gib"])
        for row in history.rows
    ]
    assert rows == [(2, 4.0, 0.25, 3.0, 1.5), (4, 3.0, 0.25, 3.0, 1.5), (5, 9.0, 0.25, 3.0, 1.5)], (
        "and the last step has a line"
    )
    assert [step for _, step in steps.logged] == [1, 3, 4]
    history.steps = 6
    with pytest.raises(NotFiniteError, match="the loss is not finite by step 6"):
        steps.step(1.0, float("nan"))


@pytest.mark.parametrize("uses_gpu", [False, True])
def test_the_peak_of_a_line_is_that_of_the_device(
    uses_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = History(tmp_path / "history.csv", 1, 1)
    steps = Steps(history, monkeypatch)
    history.load = SimpleNamespace(read=dict, uses_gpu=uses_gpu)
    sizes = {False: 2**30, True: 5 * 2**30}
    monkeypatch.setattr(history_module, "peak_bytes", lambda is_gpu: sizes[is_gpu])
    steps.step(1.0, 3.0)
    assert [row["peak_gib"] for row in history.rows] == [5.0 if uses_gpu else 1.0]


def test_a_validation_is_no_part_of_the_seconds_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = History(tmp_path / "history.csv", 2, 4)
    steps = Steps(history, monkeypatch)
    steps.trainer.optimizers = [SimpleNamespace(param_groups=[{"lr": 0.5}])]
    for index in range(4):
        history.on_train_batch_start(steps.trainer, steps.module, None, 0)
        steps.step(1.0, 3.0)
        if index in (0, 2):
            history.on_validation_start(steps.trainer, steps.module)
            steps.now_s += 1000.0
    assert [(row["step"], row["seconds_per_step"]) for row in history.rows] == [(2, 3.0), (4, 3.0)]
    assert [row["lr"] for row in history.rows] == [0.5, 0.5]


def test_a_resumed_history_counts_the_time_of_all_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, resumed = (History(tmp_path / "history.csv", 2, 5) for _ in range(2))
    steps = Steps(first, monkeypatch)
    first.start_s = 90.0
    saved = first.state_dict()
    steps.now_s = 1000.0  # the machine was off in between
    resumed.load_state_dict(saved)
    steps.now_s += 5.0
    assert resumed.train_s() == 15.0


def test_lines_of_other_ranks_are_counted_and_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = History(tmp_path / "history.csv", 1, 5)
    steps = Steps(history, monkeypatch)
    steps.trainer.is_global_zero = False
    steps.step(1.0, 3.0)
    assert history.rows == []
    assert history.state_dict()["num_rows"] == 1
    assert not (tmp_path / "history.csv").exists()


def test_a_validation_has_a_line_unless_it_is_a_trial_or_has_no_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = History(tmp_path / "history.csv", 1, 5, ["hd95"])
    steps = Steps(history, monkeypatch)
    steps.trainer.global_step = 7
    history.on_validation_end(steps.trainer, steps.module)
    scores = {
        "val/dice": torch.tensor(0.123456789),
        "val/dice_worst": 0.1,
        "val/hd95": 2.0,
        "other": 9.0,
    }
    steps.trainer.callback_metrics = scores
    steps.trainer.sanity_checking = True
    history.on_validation_end(steps.trainer, steps.module)
    assert history.rows == []
    steps.trainer.sanity_checking = False
    history.on_validation_end(steps.trainer, steps.module)
    assert history.rows == [
        {"step": 7, "val_dice": 0.12346, "val_dice_worst": 0.1, "val_hd95": 2.0}
    ]
