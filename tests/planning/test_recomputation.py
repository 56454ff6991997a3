"""Recomputed blocks: peaks of the model equal counted ones; its optimum is that of all sets."""

from __future__ import annotations

import ctypes
import itertools
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from medseg.losses.dice_ce import DiceCrossEntropyLoss
from medseg.memory.accounting import count_step
from medseg.memory.kernels import Cost, KernelCosts
from medseg.memory.switches import apply_switches
from medseg.memory.tracker import Owner, RecordedOperation, Segment, Timeline
from medseg.models.stage_network import StageNetwork
from medseg.models.traits import build_on_meta
from medseg.models.unet import UNet
from medseg.planning.recomputation import StepModel, without_output
from tests.memory import test_networks

SIZES = {**test_networks.SIZES, "unet": (16, 8, 12)}


def make(name: str) -> StageNetwork:
    if name != "unet":
        return test_networks.make(name)
    return StageNetwork(
        lambda channels: UNet(channels, 3, width=8, depth=1, blocks_per_level=(1, 2), refine=4)
    )


class AnyLoss(nn.Module):
    """The loss of the output at full resolution."""

    def forward(self, outputs: Tensor | list[Tensor], target: Tensor) -> Tensor:
        return DiceCrossEntropyLoss()(
            outputs if isinstance(outputs, Tensor) else outputs[0], target
        )


def count(name: str, checkpointing: Any, accumulate: int = 1) -> tuple[int, Timeline]:
    timeline = Timeline()
    memory = count_step(
        lambda: apply_switches(make(name), checkpointing=checkpointing),
        (1, 1, *SIZES[name]),
        loss=AnyLoss(),
        make_optimizer=lambda weights: torch.optim.AdamW(weights),
        accumulate=accumulate,
        timeline=timeline,
    )
    return memory.peak, timeline


def make_model(name: str, tmp_path: Path, accumulate: int = 1) -> StepModel:
    (_, plain), (_, recomputed) = count(name, "none", accumulate), count(name, "all", accumulate)
    costs = KernelCosts(tmp_path, torch.device("cpu"))
    # Made-up seconds that differ between operations: by the length of the key.
    costs.costs = {key: Cost(0, 0, 0, 1e-6 * len(key)) for key in (*plain.calls, *recomputed.calls)}
    return StepModel(
        plain, recomputed, list(build_on_meta(lambda: make(name)).blocks()), costs, accumulate
    )


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [
        ("unet", 0.005),
        pytest.param("segresnet", 0.005, marks=pytest.mark.slow),
        pytest.param("dynunet", 0.005, marks=[pytest.mark.slow, pytest.mark.thorough]),
        # An upper bound: storages that several of its blocks share count where one of them may hold
        # them.
        pytest.param("swin_unetr", 0.1, marks=[pytest.mark.slow, pytest.mark.thorough]),
    ],
)
def test_the_peak_of_any_set_of_blocks_is_the_counted_one(
    name: str, tolerance: float, tmp_path: Path
) -> None:
    model, rng = make_model(name, tmp_path), random.Random(0)
    sets = [[block for block in model.blocks if rng.random() < 0.5] for _ in range(2)]
    for blocks in ([], model.blocks, *sets):
        counted, _ = count(name, tuple(blocks) if blocks else "none")
        assert counted <= model.peak(blocks) <= (1 + tolerance) * counted, blocks


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_solver_finds_the_optimum_of_all_sets(accumulate: int, tmp_path: Path) -> None:
    model = make_model("unet", tmp_path, accumulate)
    sets = [
        blocks
        for size in range(len(model.blocks) + 1)
        for blocks in itertools.combinations(model.blocks, size)
    ]
    peaks = [model.peak(blocks) for blocks in sets]
    seconds = [model.duration(blocks) for blocks in sets]
    assert min(model.extra_seconds.values()) > 0
    least, most = min(peaks), model.peak()
    assert least < most
    for share in (number / 20 for number in range(21)):
        budget = round(least + share * (most - least))
        fastest = model.fastest(budget)
        assert fastest is not None
        assert model.peak(fastest) <= budget
        assert model.duration(fastest) == pytest.approx(
            min(s for p, s in zip(peaks, seconds, strict=True) if p <= budget)
        )
    assert model.fastest(least - 1) is None


def test_without_blocks_nothing_is_recomputed(tmp_path: Path) -> None:
    costs = KernelCosts(tmp_path, torch.device("cpu"))
    timeline = Timeline([Segment(Owner("forward", "stem"), start_bytes=5)])
    model = StepModel(timeline, timeline, [], costs, accumulate=1)
    assert model.fastest(5) == []
    assert model.fastest(4) is None


def test_what_the_solver_prints_is_discarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """HiGHS writes to the file descriptor, at once or when the C library flushes its buffer."""
    from scipy import optimize

    def loud(*arguments: Any, solve: Any = optimize.milp, **options: Any) -> Any:
        os.write(1, b"debug 1\n")
        ctypes.CDLL(None).printf(b"debug 2\n")
        return solve(*arguments, **options)

    monkeypatch.setattr(optimize, "milp", loud)
    model = make_model("unet", tmp_path)
    print("before")
    assert model.fastest(model.peak()) == []
    print("after", flush=True)
    ctypes.CDLL(None).fflush(None)
    assert capfd.readouterr().out == "before\nafter\n"


def test_an_error_gives_the_output_back(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="wrong"), without_output():
        raise ValueError("wrong")
    print("after", flush=True)
    assert capfd.readouterr().out == "after\n"


@pytest.mark.parametrize("accumulate", [1, 3])
def test_each_micro_batch_recomputes_its_blocks_and_the_optimiser_runs_once(
    accumulate: int, tmp_path: Path
) -> None:
    costs = KernelCosts(tmp_path, torch.device("cpu"))
    costs.costs = {"pass": Cost(0, 0, 0, 2.0), "step": Cost(0, 0, 0, 7.0)}

    def timeline(num_passes: int) -> Timeline:
        one_pass, update = RecordedOperation(0, 0, "pass"), RecordedOperation(0, 0, "step")
        return Timeline(
            [
                Segment(Owner("forward", "stem"), 0, [one_pass], [0]),
                Segment(Owner("backward", "stem"), 0, [one_pass] * num_passes, [0] * num_passes),
                Segment(Owner("update"), 0, [update], [0]),
            ]
        )

    model = StepModel(timeline(2), timeline(3), ["stem"], costs, accumulate)
    assert model.duration() == 6.0 * accumulate + 7.0
    assert model.duration(["stem"]) == 8.0 * accumulate + 7.0
