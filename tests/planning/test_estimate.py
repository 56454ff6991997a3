"""Estimate of a run: free memory of the heap, memory of a card and of workers, seconds."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from medseg.memory.kernels import Cost, KernelCosts
from medseg.memory.tracker import MemoryTracker, Owner, RecordedOperation, Segment, Timeline
from medseg.planning import estimate
from medseg.planning.estimate import (
    FRAGMENTS,
    LOADING,
    SEGMENT_BYTES,
    STEP,
    Machine,
    card_bytes,
    estimate_beside,
    kept_by_heap_in_step,
    kept_bytes,
    loader_bytes,
    step_seconds,
)
from medseg.planning.process import ProcessCost, SampleCost

from .test_choose import compose

MIB = 2**20


def test_the_heap_is_at_the_peak_as_large_as_it_was_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three blocks of 3 MiB, freed before one of 40 MiB; a workspace of 2 MiB is heap as well."""
    monkeypatch.setattr(estimate, "maps_large_blocks", lambda: True)
    costs = KernelCosts(tmp_path, torch.device("cpu"))
    costs.costs = {"small": Cost(2 * MIB, 2 * MIB, 0, 0.0), "large": Cost(0, 0, 0, 0.0)}
    operations = [
        RecordedOperation(9 * MIB, 0, "small"),
        RecordedOperation(41 * MIB, 0, "large"),
    ]
    segment = Segment(Owner("forward"), 0, operations, [9 * MIB, MIB])
    timeline = Timeline([segment])
    assert kept_bytes(timeline, costs) == (9 + 2 - 1) * MIB
    monkeypatch.setattr(estimate, "KEPT_BYTES", 4 * MIB)
    assert kept_bytes(timeline, costs) == 4 * MIB, "the heap gives back what is above its bound"
    monkeypatch.setattr(estimate, "maps_large_blocks", lambda: False)
    assert kept_bytes(timeline, costs) == 0


def test_small_storages_are_counted_apart() -> None:
    timeline = Timeline()
    with MemoryTracker(timeline=timeline):
        small = torch.zeros(2**18)  # 1 MiB
        large = torch.zeros(2**21)  # 8 MiB, mapped
        del small
        both = torch.zeros(2**19), large
    (segment,) = timeline.segments
    live_bytes = [operation.live_bytes for operation in segment.operations]
    heap_bytes = dict(zip(live_bytes, segment.heap_bytes, strict=True))
    assert heap_bytes[9 * MIB] == MIB
    assert heap_bytes[10 * MIB] == 2 * MIB
    assert len(both) == 2


@pytest.mark.parametrize(
    ("peak_mib", "sample_mib", "expected_mib"),
    [(40, None, 20), (400, None, 48), (40, 0, 20), (40, 30, 30), (40, 100, 64), (80, 30, 40)],
)
def test_samples_that_the_training_process_makes_leave_free_memory_in_its_heap(
    peak_mib: int, sample_mib: int | None, expected_mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample_bytes = None if sample_mib is None else sample_mib * MIB
    monkeypatch.setattr(estimate, "maps_large_blocks", lambda: True)
    assert kept_by_heap_in_step(peak_mib * MIB, sample_bytes) == expected_mib * MIB
    monkeypatch.setattr(estimate, "maps_large_blocks", lambda: False)
    assert kept_by_heap_in_step(peak_mib * MIB, sample_bytes) == 0


@pytest.mark.parametrize(("batch_size", "unstacked_mib"), [(2, 0), (4, 6), (8, 9)])
def test_a_worker_holds_the_samples_of_the_batch_that_it_makes(
    batch_size: int, unstacked_mib: int
) -> None:
    """Batches of 12 MiB in two micro-batches: earlier samples wait beside the one in the making."""
    config: Any = SimpleNamespace(
        data=SimpleNamespace(prefetch=2),
        ema_decay=None,
        stage=SimpleNamespace(batch_size=batch_size),
        memory=SimpleNamespace(accumulate=2),
        trainer=SimpleNamespace(num_ranks=1),
    )
    memory: Any = SimpleNamespace(input=8 * MIB, target=4 * MIB, parameters=100 * MIB)
    process = ProcessCost(main=400 * MIB, pictures=0, worker=10 * MIB, copies=20 * MIB, seconds=0.0)
    sample = SampleCost(5 * MIB, 0.0)
    own = 10 + 5 + unstacked_mib + 2 * 12
    assert loader_bytes(config, 3, process, sample, memory) == (100 + 20 + 3 * own) * MIB
    assert loader_bytes(config, 0, process, sample, memory) == 0


def test_a_card_loses_the_same_part_of_each_phase_to_fragments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The training step, which is added last, as well as the validation."""
    monkeypatch.setattr(estimate, "pick_device_type", lambda _: "cuda")
    monkeypatch.setattr(estimate, "_context_bytes", lambda: 300 * MIB)
    evaluation = estimate.Evaluation(200 * MIB, 200 * MIB, frozenset())
    machine: Any = SimpleNamespace(
        process=ProcessCost(0, 0, 0, 0, 0.0),
        sample=lambda *_, **__: SampleCost(0, 0.0),
        evaluation=lambda *_: evaluation,
    )
    memory: Any = SimpleNamespace(optimizer_state=10 * MIB)
    config = compose("data.num_workers=2")
    without_step = estimate_beside(config, (16, 16, 16), (16, 16, 16), machine, memory, Timeline())
    planned = without_step.with_step(1000 * MIB, 1000 * MIB, 1.0)
    assert planned.allocator[STEP] == 1000 * MIB
    assert planned.resident == card_bytes(planned.allocator)
    assert planned.resident[STEP] == round(1000 * MIB * (1 + FRAGMENTS)) + SEGMENT_BYTES + 300 * MIB
    budget = planned.resident[STEP]
    room = without_step.room_for_step(budget)
    assert without_step.with_step(room, room, 1.0).resident[STEP] <= budget
    assert without_step.with_step(room + 2, room + 2, 1.0).resident[STEP] > budget


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_sample_is_made_beside_the_gradients_of_the_micro_batches_before(
    accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate, "kept_by_heap_in_step", lambda peak, sample_bytes: 0)
    config: Any = SimpleNamespace(memory=SimpleNamespace(accumulate=accumulate))
    memory: Any = SimpleNamespace(
        peak=0, parameters=1, gradients=20, optimizer_state=300, input=4000, target=50_000
    )
    resident = estimate._host_bytes(
        config,
        memory,
        SimpleNamespace(resident=0),
        in_all_phases=10**6,
        shared_batch_bytes=0,
        sample_bytes=10**7,
        validation_bytes=0,
    )
    gradients = 20 if accumulate > 1 else 0
    assert resident[LOADING] == 10**6 + 301 + gradients + 10**7 + 2 * 54_000


@pytest.mark.parametrize(("ema_decay", "num_copies"), [(None, 1), (0.9, 2)])
def test_workers_keep_the_weights_and_the_average_that_they_were_forked_with(
    ema_decay: float | None, num_copies: int
) -> None:
    config: Any = SimpleNamespace(
        data=SimpleNamespace(prefetch=1),
        ema_decay=ema_decay,
        stage=SimpleNamespace(batch_size=1),
        memory=SimpleNamespace(accumulate=1),
        trainer=SimpleNamespace(num_ranks=1),
    )
    memory: Any = SimpleNamespace(input=8, target=4, parameters=1000)
    process = ProcessCost(main=0, pictures=0, worker=10, copies=20, seconds=0.0)
    own = 10 + 5 + 12  # of each worker, with the batch that waits
    assert (
        loader_bytes(config, 3, process, SampleCost(5, 0.0), memory)
        == 20 + num_copies * 1000 + 3 * own
    )


@pytest.mark.parametrize("accumulate", [1, 3])
def test_all_but_the_optimiser_runs_once_for_each_micro_batch(
    accumulate: int, tmp_path: Path
) -> None:
    costs = KernelCosts(tmp_path, torch.device("cpu"))
    costs.costs = {"pass": Cost(0, 0, 0, 2.0), "loss": Cost(0, 0, 0, 0.5), "step": Cost(0, 0, 0, 7)}
    forward, loss, step = (RecordedOperation(0, 0, key) for key in ("pass", "loss", "step"))
    timeline = Timeline(
        [
            Segment(Owner("forward", "block"), 0, [forward, forward], [0, 0]),
            Segment(Owner("backward", "loss"), 0, [loss], [0]),
            Segment(Owner("update"), 0, [step], [0]),
        ]
    )
    config: Any = SimpleNamespace(memory=SimpleNamespace(accumulate=accumulate))
    assert step_seconds(timeline, costs, config) == 4.5 * accumulate + 7


@pytest.mark.parametrize(
    "changed",
    [
        "model.width=8",
        "inference.tile_size=[32,32,32]",
        "memory.precision=bf16",
        "memory.channels_last=true",
    ],
)
def test_an_evaluation_is_counted_once_and_anew_for_all_that_changes_it(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    counted: list[Any] = []

    def count_evaluation(config: Any, shape: Any) -> tuple[int, Timeline]:
        counted.append((config, shape))
        return len(counted) * MIB, Timeline()

    monkeypatch.setattr(estimate, "count_evaluation", count_evaluation)
    config, other = compose(), compose(changed)
    machine = Machine(config)
    shape = (64, 64, 64)
    assert [machine.evaluation(config, shape).allocated for _ in range(2)] == [MIB, MIB]
    assert machine.evaluation(other, shape).allocated == 2 * MIB
    assert machine.evaluation(config, (64, 64, 32)).allocated == 3 * MIB
    assert counted == [(config, shape), (other, shape), (config, (64, 64, 32))]
