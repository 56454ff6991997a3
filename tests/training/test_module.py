"""Laws of the training step, of the validation and of the history."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from medseg.training.history import History
from medseg.training.module import SegmentationModule


class Threshold(nn.Module):
    """Class 1 where the image is positive."""

    divisor = (1, 1, 1)

    def forward(self, image: Tensor) -> Tensor:
        return torch.cat([-image, image], dim=1)


def make_module(network: nn.Module, seed: int = 1, accumulate: int = 2) -> SegmentationModule:
    return SegmentationModule(
        network,
        nn.CrossEntropyLoss(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer),
        seed=seed,
        accumulate=accumulate,
        tile_size=None,
        overlap=0.5,
        ema_decay=None,
        metadata={"num_classes": 2},
    )


def score(module: SegmentationModule, batch: dict[str, Any]) -> float:
    module.val_scores = {}
    module.validation_step([batch], 0)
    return module.val_scores["a", 0, 1]


def test_validation_ignores_what_lies_beyond_the_scan() -> None:
    module = make_module(Threshold())
    image = -torch.ones(1, 1, 6, 7, 8)
    image[..., 1:3, 2:4, 1:5] = 1
    target = (image[:, 0] > 0).to(torch.uint8)
    batch = {"image": image, "target": target, "region": torch.tensor([0]), "case": ["a"]}
    batch["inside"] = torch.tensor([[[0, 4], [0, 7], [0, 8]]])
    assert score(module, batch) == 1
    image[..., 4:, :, :] = 1  # beyond: prediction drops it when it pastes the crop back
    assert score(module, batch) == 1
    # Where a crop repeats the last slice of a scan that ends in the lung, so does its reference.
    image[..., 4:, :, :] = -1
    target[:, 4:] = 1
    assert score(module, batch) == 1
    image[..., 3, :, :] = 1  # inside: it counts
    assert score(module, batch) < 1


def test_validation_ignores_voxels_with_the_ignored_label() -> None:
    module = make_module(Threshold())
    module.metadata["task"] = {"ignore_label": 7}
    image = -torch.ones(1, 1, 6, 7, 8)
    image[..., 1:3, 2:4, 1:5] = 1
    target = (image[:, 0] > 0).to(torch.uint8)
    batch = {"image": image, "target": target, "region": torch.tensor([0]), "case": ["a"]}
    batch["inside"] = torch.tensor([[[0, 6], [0, 7], [0, 8]]])
    target[:, 4:] = 7
    image[..., 5, :, :] = 1  # a prediction there is neither right nor wrong
    assert score(module, batch) == 1
    # Pictures of this validation draw the target: an ignored voxel would look missed.
    assert not batch["target"][:, 4:].any()
    del module.metadata["task"]
    assert score(module, batch) < 1


SMALL = ["model.width=4", "model.depth=1", "model.blocks_per_level=[1,1]"]


def test_a_step_neither_empties_the_cache_of_the_gpu_nor_waits_for_it(
    fit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both would cost a step its overlap with the GPU; freed memory is requested again at once."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: calls.append("synchronize"))
    batch = {
        "image": torch.zeros(1, 1, 8, 8, 12),
        "target": torch.zeros(1, 8, 8, 12, dtype=torch.int64),
        "region": torch.zeros(1, dtype=torch.int64),
        "number": [0],
    }
    during: list[str] = []

    class Steps(pl.Callback):
        """Looks at steps alone: Lightning empties the cache before the first and after a run."""

        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            calls.clear()

        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            during.extend(["the end was reached", *calls])

    fit([*SMALL, "steps=2"], [batch, batch], callbacks=[Steps()])
    assert during == ["the end was reached"]


def test_whole_cases_of_a_validation_are_not_compiled() -> None:
    torch.compiler.reset()
    module = make_module(Threshold())
    graphs: list[Any] = []
    module.network.compile(
        backend=lambda graph, _: graphs.append(graph) or graph.forward, dynamic=False
    )
    module.network(torch.zeros(1, 1, 6, 7, 8))
    assert len(graphs) == 1
    for depth in (5, 9):
        module.predict_labels(torch.zeros(1, 1, depth, 7, 8))
    module.network(torch.zeros(1, 1, 6, 7, 8))  # the next training step runs the code of the first
    assert len(graphs) == 1


class Always(nn.Module):
    """Class 1 everywhere."""

    divisor = (1, 1, 1)

    def forward(self, image: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(image[:, :1]), torch.ones_like(image[:, :1])], dim=1)


@pytest.mark.parametrize(("second_window", "num_foreground"), [([-100, 200], 64), (None, 256)])
def test_a_validation_skips_tiles_of_air_only_where_all_channels_have_a_window(
    second_window: list[int] | None, num_foreground: int
) -> None:
    """Of other channels the lowest value may lie in the body."""
    module = make_module(Always())
    module.tile_size = (4, 4, 4)
    module.overlap = 0.0
    module.metadata["task"] = {
        "channels": [{"window_hu": [-1000, 400]}, {"window_hu": second_window}]
    }
    image = torch.full((1, 2, 4, 4, 16), -1.0)
    image[..., :4] = 0.5
    assert int(module.predict_labels(image).sum()) == num_foreground


def test_a_case_that_is_scored_twice_counts_once() -> None:
    module = make_module(Threshold())
    image = torch.ones(1, 1, 2, 2, 2)
    batch = {"image": image, "region": torch.tensor([0]), "inside": torch.tensor([[[0, 2]] * 3])}
    empty = torch.zeros(1, 2, 2, 2, dtype=torch.uint8)
    full = torch.ones(1, 2, 2, 2, dtype=torch.uint8)
    for case, target in (("a", full), ("b", empty), ("a", full)):
        module.validation_step([{**batch, "case": [case], "target": target}], 0)
    module.validation_step(
        [{**batch, "case": ["b"], "target": full, "region": torch.tensor([1])}], 0
    )
    logged: dict[str, float] = {}
    module.log = lambda name, value, **_: logged.update({name: value})
    module.trainer = SimpleNamespace(world_size=1)
    module.on_validation_epoch_end()
    assert logged == {"val/dice": pytest.approx(2 / 3), "val/dice_worst": 0}
    assert not module.val_scores
    assert set(module.case_scores) == {("a", 0, 1), ("b", 0, 1), ("b", 1, 1)}


def test_the_scores_of_all_ranks_are_averaged_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank sees its share of the cases; one that two ranks score counts once."""
    module = make_module(Threshold())
    module.val_scores = {("a", 0, 1): 0.2, ("b", 0, 1): 0.6}
    others = {("b", 0, 1): 0.6, ("c", 0, 1): 1.0}

    def gather(scores_of_ranks: list[Any], scores: Any) -> None:
        scores_of_ranks[:] = [scores, others]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    logged: dict[str, float] = {}
    module.log = lambda name, value, **_: logged.update({name: value})
    module.trainer = SimpleNamespace(world_size=2)
    module.on_validation_epoch_end()
    assert logged == {"val/dice": pytest.approx(0.6), "val/dice_worst": 0.2}


def test_a_fused_optimizer_leaves_the_loss_scale_to_lightning() -> None:
    """It would divide the scale out of the gradients inside its step, after their clipping."""
    module = make_module(nn.Conv3d(1, 2, 1))
    module.make_optimizer = lambda parameters: torch.optim.AdamW(parameters, fused=True)
    optimizer = module.configure_optimizers()["optimizer"]
    assert optimizer._step_supports_amp_scaling is False


@pytest.mark.parametrize(
    ("scores", "mean"),
    [((2.0, 4.0, math.nan), 3.0), ((2.0, math.inf), math.nan), ((math.nan,), math.nan)],
)
def test_a_distance_to_a_label_that_was_not_found_leaves_no_mean(
    scores: tuple[float, ...], mean: float
) -> None:
    module = make_module(Threshold())
    module.metrics = {"hd95": lambda *_: 0.0}
    module.val_scores = {(str(case), 0, "hd95"): value for case, value in enumerate(scores)}
    logged: dict[str, float] = {}
    module.log = lambda name, value, **_: logged.update({name: value})
    module.trainer = SimpleNamespace(world_size=1)
    module.on_validation_epoch_end()
    assert logged == {"val/hd95": pytest.approx(mean, nan_ok=True)}


class Dropped(nn.Module):
    """Network that keeps what dropout left of each image."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[float, ...]] = []

    def forward(self, image: Tensor) -> Tensor:
        dropped = nn.functional.dropout(image)
        self.seen.append(tuple(dropped.flatten().tolist()))
        return dropped


class LogitsSum(nn.Module):
    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return logits.sum()


def test_dropout_is_a_function_of_seed_step_and_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    def dropped(seed: int, step: int, *numbers: int) -> list[tuple[float, ...]]:
        """What dropout leaves of the samples of a micro-batch."""
        network = Dropped()
        module = make_module(network, seed)
        module.loss = LogitsSum()
        module.log = lambda *_, **__: None
        monkeypatch.setattr(SegmentationModule, "global_step", step)
        torch.rand(step + len(numbers))  # whatever was drawn before
        image, target = torch.ones(1, 1, 4, 4, 4), torch.zeros(1, 4, 4, 4, dtype=torch.uint8)
        module.training_step(
            [
                {"image": image, "target": target, "region": torch.tensor([0]), "number": [number]}
                for number in numbers
            ],
            0,
        )
        return network.seen

    together = dropped(1, 3, 6, 7)
    assert dropped(1, 3, 7) + dropped(1, 3, 6) == together[::-1], (
        "whichever micro-batch or rank computes a sample"
    )
    assert len({*together, *dropped(1, 4, 6), *dropped(2, 3, 6)}) == 4


class Run:
    """What `History` sees of a trainer: one micro-batch a step; loss and rate name the step."""

    def __init__(
        self,
        path: Path,
        every: int,
        steps: int,
        start: int = 0,
        state: dict[str, Any] | None = None,
    ) -> None:
        self.history = History(path, every, steps)
        if state is not None:
            self.history.load_state_dict(state)
        self.group = {"lr": 0.0}
        trainer: Any = SimpleNamespace(
            global_step=start, is_global_zero=True, accumulate_grad_batches=1, loggers=[],
            optimizers=[SimpleNamespace(param_groups=[self.group])],
        )  # fmt: skip
        module: Any = SimpleNamespace(device=torch.device("cpu"), parameters=list)
        self.trainer, self.module = trainer, module
        self.history.on_train_start(trainer, module)

    def step_to(self, stop: int) -> None:
        for step in range(self.trainer.global_step + 1, stop + 1):
            self.group["lr"] = float(step)
            self.history.on_train_batch_start(self.trainer, self.module, None, step - 1)
            self.trainer.global_step = step
            self.group["lr"] = float(step + 1)  # the schedule has moved on
            self.module.train_loss = torch.tensor(1.0 / step)
            self.history.on_train_batch_end(self.trainer, self.module, None, None, step - 1)


def lines(path: Path) -> list[tuple[str, str, str]]:
    with path.open() as file:
        return [(row["step"], row["loss"], row["lr"]) for row in csv.DictReader(file)]


def test_the_history_of_a_resumed_run_is_that_of_a_whole_one(tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole.csv", tmp_path / "resumed.csv"
    Run(whole, every=3, steps=10).step_to(10)
    killed = Run(resumed, every=3, steps=10)
    killed.step_to(5)
    state = killed.history.state_dict()  # a checkpoint between two lines
    killed.step_to(8)
    Run(resumed, every=3, steps=10, start=5, state=state).step_to(10)
    assert lines(resumed) == lines(whole)
    assert [step for step, _, _ in lines(whole)] == ["3", "6", "9", "10"]


def test_the_history_names_the_learning_rate_that_made_the_step(tmp_path: Path) -> None:
    Run(tmp_path / "history.csv", every=1, steps=4).step_to(4)
    assert [(step, float(lr)) for step, _, lr in lines(tmp_path / "history.csv")] == [
        (str(n), n) for n in range(1, 5)
    ]


class Clock:
    """Time that passes only where a test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s


def test_the_seconds_of_a_step_are_without_those_of_validations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("medseg.training.history.time", clock)
    run = Run(tmp_path / "history.csv", every=4, steps=8)
    run.trainer.sanity_checking = False
    run.trainer.callback_metrics = {}
    begin = run.history.on_train_batch_start

    def begin_and_compute(*arguments: Any) -> None:
        begin(*arguments)
        clock.now_s += 2.0

    run.history.on_train_batch_start = begin_and_compute
    for step in range(1, 9):
        run.step_to(step)
        if step in (2, 4):
            run.history.on_validation_start(run.trainer, run.module)
            clock.now_s += 50.0
            run.history.on_validation_end(run.trainer, run.module)
    with (tmp_path / "history.csv").open() as file:
        assert [float(row["seconds_per_step"]) for row in csv.DictReader(file)] == [2.0, 2.0]
    assert run.history.train_s() == 116.0, "with validations"


def test_a_line_of_the_history_has_the_mean_loss_of_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add_the_other_rank(losses: Tensor) -> None:
        losses += 3.0

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", add_the_other_rank)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    Run(tmp_path / "history.csv", every=1, steps=1).step_to(1)  # its own loss is 1
    assert [loss for _, loss, _ in lines(tmp_path / "history.csv")] == ["2.0"]
