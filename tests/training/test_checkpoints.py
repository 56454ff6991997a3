"""Whatever interrupts a run, its files say at the end what those of an uninterrupted one say."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from medseg.data.sampler import StepBatchSampler
from medseg.training.checkpoints import Checkpoints
from medseg.training.preemption import SIGNALS, Preempted, StopRequest

# Falls and rises, so that the best is neither the first nor the last.
SCORES = {
    1: 0.2, 2: 0.1, 3: 0.3, 4: 0.9, 5: 0.4, 6: 0.5, 7: 0.8, 8: 0.8, 9: 0.7, 10: 0.6, 11: 0.5,
    12: 0.6, 13: 0.1, 14: 0.2, 15: 0.2, 16: 0.1,
}  # fmt: skip


class Killed(BaseException):
    """Ends a run as a kill does: nothing is saved on the way out."""


class Numbers(Dataset[Tensor]):
    def __getitem__(self, n: int) -> Tensor:
        return torch.tensor([float(n)])

    def __len__(self) -> int:
        return 1


class Line(pl.LightningModule):
    """One weight, which each sample moves differently; scores from a table."""

    def __init__(self, steps: int, accumulate: int, num_val: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.steps = steps
        self.accumulate = accumulate
        self.num_val = num_val
        self.seen: list[int] = []  # numbers of the training samples so far
        self.validated: list[int] = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam([self.weight], lr=0.1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen += [int(n) for n in batch]
        return ((self.weight - batch.cos()) ** 2).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val/dice", SCORES[self.global_step])

    def on_validation_end(self) -> None:
        self.validated.append(self.global_step)

    def train_dataloader(self) -> DataLoader[Any]:
        sampler = StepBatchSampler(
            self.steps, 2, self.accumulate, start_step=self.trainer.global_step
        )
        return DataLoader(Numbers(), batch_sampler=sampler)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Numbers(), sampler=range(self.num_val))


def fit(
    folder: Path,
    steps: int,
    every: int,
    accumulate: int = 1,
    num_val: int = 1,
    kill: tuple[str, int] | None = None,
    ask: tuple[str, int] | None = None,
    checkpoint_every: int | None = None,
    patience: int | None = None,
) -> Line:
    """Train, from `last.ckpt` if it exists; `kill` or `ask` (to stop) name a hook and a step."""

    def die(trainer: pl.Trainer, *_: Any) -> None:
        if kill is not None and trainer.global_step == kill[1]:
            raise Killed

    def stop(trainer: pl.Trainer, *_: Any) -> None:
        if ask is not None and trainer.global_step == ask[1]:
            signal.raise_signal(signal.SIGTERM)

    request = StopRequest()
    if ask is not None:
        request.install()  # as a rank does before anything else
        request.end_at_once()
    hooks: dict[str, Any] = {}
    if kill is not None:
        hooks[kill[0]] = die
    if ask is not None:
        hooks[ask[0]] = stop
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_steps=steps, max_epochs=-1,
        accumulate_grad_batches=accumulate,
        val_check_interval=every * accumulate, check_val_every_n_epoch=None, num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        callbacks=[LambdaCallback(**hooks),
            Checkpoints(folder, every, checkpoint_every, patience, request)],
            default_root_dir=folder,
    )  # fmt: skip
    module = Line(steps, accumulate, num_val)
    last = folder / "last.ckpt"
    try:
        trainer.fit(module, ckpt_path=last if last.is_file() else None, weights_only=True)
    except Killed:
        assert kill is not None
    except Preempted:
        assert ask is not None
    else:
        assert kill is None
    return module


def weight(checkpoint: Path) -> tuple[int, float]:
    """Step and weight of a checkpoint."""
    loaded = torch.load(checkpoint, weights_only=True)
    return loaded["global_step"], float(loaded["state_dict"]["weight"])


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("steps", "every", "kill"),
    [
        pytest.param(12, 5, ("on_train_batch_start", 5), id="5 of 12: just after the checkpoint"),
        pytest.param(16, 5, ("on_train_batch_start", 5), id="5 of 16"),
        pytest.param(16, 9, ("on_train_batch_start", 9), id="9 of 16: in the second half"),
        pytest.param(12, 4, ("on_train_batch_start", 7), id="between two checkpoints"),
        pytest.param(
            12, 4, ("on_validation_start", 4), id="in the first validation, which is the best"
        ),
        pytest.param(12, 4, ("on_validation_start", 8), id="in a later validation"),
        pytest.param(10, 4, ("on_validation_start", 10), id="in the last validation"),
    ],
)
def test_an_interruption_changes_no_file(
    steps: int, every: int, kill: tuple[str, int], accumulate: int, tmp_path: Path
) -> None:
    whole, killed, moved = (tmp_path / name for name in ("whole", "killed", "moved"))
    fit(whole, steps, every, accumulate)
    killed.mkdir()
    fit(killed, steps, every, accumulate, kill=kill)
    killed.rename(moved)
    fit(moved, steps, every, accumulate)
    for name in ("best.ckpt", "last.ckpt"):
        assert weight(whole / name) == weight(moved / name)
    assert sorted(path.name for path in moved.iterdir()) == ["best.ckpt", "last.ckpt"]


def test_a_run_goes_on_with_the_next_sample_and_the_next_validation(tmp_path: Path) -> None:
    first = fit(tmp_path, 12, 4, kill=("on_train_batch_start", 4))
    rest = fit(tmp_path, 12, 4)
    assert first.seen + rest.seen == list(range(24))
    assert first.validated + rest.validated == [4, 8, 12]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("hook", "step"),
    [
        *(("on_train_batch_start", step) for step in (3, 4, 5, 6, 8, 11)),
        *((hook, step) for hook in ("on_validation_start", "on_validation_end") for step in (4, 8)),
    ],
)
def test_a_run_that_saves_often_loses_little_and_nothing_else(
    hook: str, step: int, accumulate: int, tmp_path: Path
) -> None:
    whole = fit(tmp_path / "whole", 12, 4, accumulate, checkpoint_every=3)
    first = fit(tmp_path / "run", 12, 4, accumulate, checkpoint_every=3, kill=(hook, step))
    saved = weight(tmp_path / "run" / "last.ckpt")[0]
    assert saved == max(n for n in (3, 4, 6, 8, 9) if n <= step)
    rest = fit(tmp_path / "run", 12, 4, accumulate, checkpoint_every=3)
    assert first.seen[: saved * 2] + rest.seen == whole.seen == list(range(24))
    assert sorted({*first.validated, *rest.validated}) == [4, 8, 12]
    for name in ("best.ckpt", "last.ckpt"):
        assert weight(tmp_path / "run" / name) == weight(tmp_path / "whole" / name)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("hook", "step", "saved", "validated"),
    [
        pytest.param("on_before_zero_grad", 6, 7, [4], id="in a step: at its end"),
        pytest.param(
            "on_before_zero_grad", 3, 4, [], id="in a step before a validation: without it"
        ),
        pytest.param("on_validation_batch_end", 4, 4, [], id="in a validation: at once"),
        pytest.param(
            "on_before_zero_grad", 11, 12, [4, 8, 12], id="in the last step: the run ends"
        ),
        pytest.param("on_fit_start", 0, None, [], id="before the first step: at once"),
    ],
)
def test_a_run_that_is_asked_to_stop_saves_first(
    hook: str, step: int, saved: int | None, validated: list[int], accumulate: int, tmp_path: Path
) -> None:
    fit(tmp_path / "whole", 12, 4, accumulate)
    before = [signal.getsignal(number) for number in SIGNALS]
    try:
        first = fit(tmp_path / "run", 12, 4, accumulate, ask=(hook, step))
    finally:
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, handler)
    assert first.validated == validated
    assert (weight(tmp_path / "run" / "last.ckpt")[0] if saved else None) == saved
    rest = fit(tmp_path / "run", 12, 4, accumulate)
    assert first.validated + rest.validated == [4, 8, 12]
    assert weight(tmp_path / "run" / "last.ckpt") == weight(tmp_path / "whole" / "last.ckpt")
    assert weight(tmp_path / "run" / "best.ckpt") == weight(tmp_path / "whole" / "best.ckpt")


@pytest.mark.parametrize(("patience", "ends_at"), [(1, 2), (2, 6), (9, 13), (12, 16)])
def test_a_run_ends_when_nothing_gets_better(patience: int, ends_at: int, tmp_path: Path) -> None:
    fit(tmp_path, 16, 1, patience=patience)
    assert weight(tmp_path / "last.ckpt")[0] == ends_at
    again = fit(tmp_path, 16, 1, patience=patience)
    assert (again.seen, again.validated) == ([], []), "it stays ended"


def test_patience_counts_on_in_a_run_that_goes_on(tmp_path: Path) -> None:
    fit(tmp_path, 16, 1, patience=3, kill=("on_train_batch_start", 6))
    assert fit(tmp_path, 16, 1, patience=3).validated == [7]


def test_a_score_that_is_reached_again_is_no_better_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in SCORES:
        monkeypatch.setitem(SCORES, step, 0.5)
    assert fit(tmp_path, 16, 1, patience=3).validated == [1, 2, 3, 4]
    assert weight(tmp_path / "best.ckpt")[0] == 1


def test_only_the_last_checkpoint_holds_what_a_run_resumes_from(tmp_path: Path) -> None:
    fit(tmp_path, 4, 2)
    last, best = (
        torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("last", "best")
    )
    assert last["optimizer_states"]
    assert "optimizer_states" not in best, "the state of Adam is twice as large as the weights"


def test_a_finished_run_takes_more_steps(tmp_path: Path) -> None:
    fit(tmp_path / "whole", 16, 4)
    fit(tmp_path / "run", 8, 4)
    assert fit(tmp_path / "run", 16, 4).seen == list(range(16, 32))
    assert weight(tmp_path / "run" / "last.ckpt") == weight(tmp_path / "whole" / "last.ckpt")


@pytest.mark.parametrize(
    ("steps", "every", "validated"), [(10, 4, [4, 8, 10]), (8, 4, [4, 8]), (3, 5, [3]), (1, 1, [1])]
)
def test_the_last_step_is_validated_and_saved(
    steps: int, every: int, validated: list[int], tmp_path: Path
) -> None:
    assert fit(tmp_path, steps, every, accumulate=2).validated == validated
    assert weight(tmp_path / "last.ckpt")[0] == steps
    assert weight(tmp_path / "best.ckpt")[0] == max(validated, key=lambda step: SCORES[step])


def test_a_finished_run_stays_as_it_is(tmp_path: Path) -> None:
    fit(tmp_path, 10, 4)
    again = fit(tmp_path, 10, 4)
    assert (again.seen, again.validated) == ([], [])


def test_a_run_without_validation_cases_goes_on_too(tmp_path: Path) -> None:
    fit(tmp_path / "whole", 10, 4, accumulate=2, num_val=0)
    (tmp_path / "killed").mkdir()
    fit(tmp_path / "killed", 10, 4, accumulate=2, num_val=0, kill=("on_train_batch_start", 5))
    assert weight(tmp_path / "killed" / "last.ckpt")[0] == 4
    fit(tmp_path / "killed", 10, 4, accumulate=2, num_val=0)
    assert weight(tmp_path / "whole" / "last.ckpt") == weight(tmp_path / "killed" / "last.ckpt")


def test_a_kill_while_writing_leaves_the_file_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = pl.Trainer.save_checkpoint

    def half_written(trainer: pl.Trainer, filepath: Path, weights_only: bool) -> None:
        save(trainer, filepath, weights_only)
        if trainer.global_step == 8:
            filepath.write_bytes(filepath.read_bytes()[:100])
            raise Killed

    monkeypatch.setattr(pl.Trainer, "save_checkpoint", half_written)
    fit(tmp_path, 12, 4, kill=("on_fit_end", -1))
    assert weight(tmp_path / "last.ckpt")[0] == 4


@pytest.mark.parametrize(("is_asked", "other"), [(False, True), (True, False), (False, False)])
def test_all_ranks_leave_at_the_step_at_which_one_is_asked(
    is_asked: bool, other: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the other ranks would wait for ever for the one that left."""

    def join(asked: Tensor, operation: Any) -> None:
        assert operation == torch.distributed.ReduceOp.MAX
        asked.fill_(max(int(asked), int(other)))

    monkeypatch.setattr(torch.distributed, "all_reduce", join)
    stop = StopRequest()
    stop.is_asked = is_asked
    checkpoints = Checkpoints(
        tmp_path, validate_every=100, checkpoint_every=None, patience=None, stop=stop
    )
    saved: list[Path] = []
    trainer: Any = SimpleNamespace(
        global_step=3, max_steps=9, accumulate_grad_batches=1, world_size=2, num_val_batches=[1],
        should_stop=False,
        is_global_zero=False, loggers=[], save_checkpoint=lambda path,
        weights_only: saved.append(path),
    )  # fmt: skip
    checkpoints.on_train_batch_end(trainer, pl.LightningModule(), None, None, 2)
    assert len(saved) == (is_asked or other)
    if is_asked or other:
        with pytest.raises(Preempted):
            checkpoints.on_train_batch_start(trainer, pl.LightningModule(), None, 3)
    else:
        checkpoints.on_train_batch_start(trainer, pl.LightningModule(), None, 3)


def test_loggers_write_their_lines_with_each_checkpoint(tmp_path: Path) -> None:
    """A resumed run has all lines up to its checkpoint; the saved step's own line follows."""
    events: list[str] = []

    def save_checkpoint(path: Path, weights_only: bool) -> None:
        path.write_bytes(b"weights")
        events.append(f"checkpoint of step {trainer.global_step}")

    logger = SimpleNamespace(save=lambda: events.append("lines"))
    trainer: Any = SimpleNamespace(
        global_step=2, max_steps=9, accumulate_grad_batches=1, world_size=1, num_val_batches=[1],
        should_stop=False,
        is_global_zero=True, loggers=[logger], save_checkpoint=save_checkpoint,
    )  # fmt: skip
    checkpoints = Checkpoints(
        tmp_path, validate_every=100, checkpoint_every=2, patience=None, stop=StopRequest()
    )
    for step in (2, 3):
        trainer.global_step = step
        checkpoints.on_train_batch_end(trainer, pl.LightningModule(), None, None, step - 1)
        checkpoints.on_train_batch_start(trainer, pl.LightningModule(), None, step)
    assert events == ["checkpoint of step 2", "lines", "lines"]


@pytest.mark.parametrize(
    ("num_cases", "step", "owes"), [(2, 4, True), (0, 4, False), (2, 3, False)]
)
def test_a_checkpoint_owes_the_validation_that_follows_it_where_there_are_cases(
    num_cases: int, step: int, owes: bool, tmp_path: Path
) -> None:
    saved: list[bool] = []
    checkpoints = Checkpoints(tmp_path, 2, 1, None, StopRequest())
    trainer: Any = SimpleNamespace(
        global_step=step,
        max_steps=9,
        should_stop=False,
        accumulate_grad_batches=1,
        num_val_batches=[num_cases],
        world_size=1,
        is_global_zero=False,
        save_checkpoint=lambda *_, **__: saved.append(checkpoints.state_dict()["owes_validation"]),
    )
    checkpoints.on_train_batch_end(trainer, SimpleNamespace(), None, None, 0)
    assert saved == [owes]
