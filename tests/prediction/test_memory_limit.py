"""Memory limit: shares of `inference.max_ram_gib`, and the refusal of a limit that is too low."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from medseg.errors import UserError
from medseg.inference.options import InferenceOptions
from medseg.io.scratch import new_array
from medseg.memory.options import Accelerator
from medseg.prediction import batch, load_models, memory_limit
from medseg.prediction.case import CaseData
from medseg.prediction.load_models import RangeModel, load_cascade
from medseg.prediction.memory_limit import (
    NUM_ARRAYS,
    OVERHEAD_BYTES,
    MemoryShares,
    backend_room_bytes,
    share_memory,
)

BACKEND_BYTES = 100 * 2**20


def test_without_a_bound_everything_may_be_in_memory() -> None:
    assert share_memory(None) == (math.inf, math.inf)


@pytest.mark.parametrize("max_ram_gib", [1.0, 4.0])
def test_networks_and_arrays_share_what_the_process_does_not_hold(
    max_ram_gib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_limit, "resident_bytes", lambda: 400 * 2**20)
    shares = share_memory(max_ram_gib)
    total = (
        shares.network_gib * 2**30 + NUM_ARRAYS * shares.array_bytes + OVERHEAD_BYTES + 400 * 2**20
    )
    assert math.isclose(total, max_ram_gib * 2**30)
    assert min(shares) > 0


def test_a_bound_below_the_libraries_is_refused_with_one_that_is_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_limit, "resident_bytes", lambda: 400 * 2**20)
    with pytest.raises(
        UserError, match=r"inference\.max_ram_gib=0\.5: expected at least (0\.\d+), because"
    ) as refused:
        share_memory(0.5)
    named = float(str(refused.value).split("at least ")[1].split(",")[0])
    assert share_memory(named).network_gib > 0


def test_what_a_backend_takes_later_is_kept_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limit, "resident_bytes", lambda: 400 * 2**20)
    torch_shares, openvino_shares = share_memory(2.0), share_memory(2.0, BACKEND_BYTES)
    for shares, backend_bytes in ((torch_shares, 0), (openvino_shares, BACKEND_BYTES)):
        total = shares.network_gib * 2**30 + NUM_ARRAYS * shares.array_bytes + OVERHEAD_BYTES
        assert math.isclose(total, 1648 * 2**20 - backend_bytes)


@pytest.mark.parametrize(
    ("max_ram_gib", "machine_gib", "budget_gib", "room_mib"),
    [
        (None, 16.0, 1.0, 15 * 1024 - 600),
        (None, 1.5, 1.0, 512 - 600),
        (1.0, 16.0, 1.0, -600),
        (4.0, 1.5, 1.0, 3 * 1024 - 600),
    ],
)
def test_another_backend_has_the_room_beside_the_largest_pass(
    max_ram_gib: float | None,
    machine_gib: float,
    budget_gib: float,
    room_mib: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_limit, "resident_bytes", lambda: 300 * 2**20)
    monkeypatch.setattr(memory_limit, "memory_limit_bytes", lambda: machine_gib * 2**30)
    assert backend_room_bytes(max_ram_gib, budget_gib) / 2**20 == pytest.approx(room_mib)


def test_the_stages_share_the_room_of_their_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = SimpleNamespace(
        name="coarse", backend_bytes=70, tile_size=None, task=SimpleNamespace(regions=True)
    )
    rooms: list[float] = []

    def load_stages(*arguments: Any) -> SimpleNamespace:
        rooms.append(arguments[-1])
        return stage

    monkeypatch.setattr(load_models, "backend_room_bytes", lambda *_: 100.0)
    monkeypatch.setattr(load_models, "load_stages", load_stages)
    monkeypatch.setattr(load_models, "Cascade", lambda *stages: stages)
    load_cascade([], [], options=InferenceOptions())
    assert rooms == [100.0, 30.0]


def test_each_model_of_a_batch_keeps_its_share_beside_all_backends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[float | None, int]] = []

    def share_memory(max_ram_gib: float | None, backend_bytes: int) -> MemoryShares:
        calls.append((max_ram_gib, backend_bytes))
        return MemoryShares(0.75, 12.0)

    monkeypatch.setattr(batch, "share_memory", share_memory)
    models: list[Any] = []
    for number in (3, 4):
        models.append(SimpleNamespace(backend_bytes=number, within=lambda gib, n=number: (n, gib)))
    config: Any = SimpleNamespace(
        inference=InferenceOptions(max_ram_gib=2.5), accelerator=Accelerator.cpu
    )
    range_models = [RangeModel(model, {}) for model in models]
    made_batch = batch.make_batch(range_models, config, 7, batch.Observer())
    assert calls == [(2.5, 7)]
    assert [chosen.model for chosen in made_batch.range_models] == [(3, 0.75), (4, 0.75)]
    assert (made_batch.array_bytes, made_batch.num_cases) == (12.0, 7)


@pytest.mark.parametrize(("budget_gib", "is_checked"), [(0.5, True), (2.0, False)])
def test_headers_are_checked_where_the_budget_may_be_too_small_for_a_scan(
    budget_gib: float, is_checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[Any] = []
    model: Any = SimpleNamespace(
        options=InferenceOptions(budget_gib=budget_gib),
        task="task",
        check_budget=checked.append,
        waiting_bytes=math.inf,
    )
    scan: Any = SimpleNamespace(refusal="", name="a")
    monkeypatch.setattr(batch, "pick_model", lambda *_: (RangeModel(model, {}), []))
    monkeypatch.setattr(batch, "read_report", lambda _: {})
    monkeypatch.setattr(batch, "check_kinds", lambda *_: None)
    monkeypatch.setattr(batch, "scan_grid", lambda scan, task: (scan.name, task))
    monkeypatch.setattr(batch, "read_case", lambda scan, task: "read")
    monkeypatch.setattr(batch.Batch, "_is_up_to_date", lambda *_: False)
    monkeypatch.setattr(batch.Batch, "_begin", lambda *_: None)
    config: Any = SimpleNamespace(save=[])
    running = batch.Batch([], 0, 1e9, config, 1, batch.Observer())
    assert running.read(batch.BatchCase(scan, Path("a.nii.gz")), is_ahead=False) == "read"
    assert checked == ([("a", "task")] if is_checked else [])


def test_a_scan_waits_in_a_file_where_the_model_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def held_by(*_: Any) -> tuple[bool, bool]:
        """Whether an array is in memory, and whether one that waits is."""
        array = new_array((100,), np.uint8)
        waiting = new_array((100,), np.uint8, waits=True)
        return array.base is None, waiting.base is None

    arrays: list[Any] = []
    monkeypatch.setattr(batch, "pick_model", lambda *_: (chosen, []))
    monkeypatch.setattr(batch, "read_report", lambda _: {})
    monkeypatch.setattr(batch, "check_kinds", lambda *_: None)
    monkeypatch.setattr(batch, "read_case", held_by)
    monkeypatch.setattr(batch, "segment_case", lambda *_: arrays.append(held_by()))
    monkeypatch.setattr(batch.Batch, "_is_up_to_date", lambda *_: False)
    monkeypatch.setattr(batch.Batch, "_begin", lambda *_: None)
    config: Any = SimpleNamespace(save=[])
    for waiting_bytes, is_in_memory in ((99.0, False), (100.0, True)):
        model: Any = SimpleNamespace(
            options=InferenceOptions(budget_gib=2.0), task="task", waiting_bytes=waiting_bytes
        )
        chosen = RangeModel(model, {})
        running = batch.Batch([], 0, 1e9, config, 1, batch.Observer())
        scan: Any = SimpleNamespace(refusal="", name="a")
        case = batch.BatchCase(scan, Path("a.nii.gz"))
        assert running.read(case, is_ahead=False) == (True, is_in_memory)
        data = CaseData()
        assert running.compute(case, data) is data
        assert arrays.pop() == (True, is_in_memory)
