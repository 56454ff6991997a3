"""The shares of `inference.max_ram_gib`: at most what is left, refused if too little."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from medseg.errors import UserError
from medseg.inference.options import InferenceOptions
from medseg.prediction import cascades, contract
from medseg.prediction.cascades import load_cascade
from medseg.prediction.contract import NUM_ARRAYS, OVERHEAD_BYTES, backend_room_bytes, share_memory

BACKEND_BYTES = 100 * 2**20


def test_without_a_bound_everything_may_be_in_memory() -> None:
    assert share_memory(None) == (math.inf, math.inf)


@pytest.mark.parametrize("max_ram_gib", [1.0, 4.0])
def test_networks_and_arrays_share_what_the_process_does_not_hold(
    max_ram_gib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contract, "resident_bytes", lambda: 400 * 2**20)
    shares = share_memory(max_ram_gib)
    total = (
        shares.network_gib * 2**30 + NUM_ARRAYS * shares.array_bytes + OVERHEAD_BYTES + 400 * 2**20
    )
    assert math.isclose(total, max_ram_gib * 2**30)
    assert min(shares) > 0


def test_a_bound_below_the_libraries_is_refused_with_one_that_is_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(contract, "resident_bytes", lambda: 400 * 2**20)
    with pytest.raises(
        UserError, match=r"inference\.max_ram_gib=0\.5: expected at least (0\.\d+), because"
    ) as refused:
        share_memory(0.5)
    named = float(str(refused.value).split("at least ")[1].split(",")[0])
    assert share_memory(named).network_gib > 0


def test_what_a_backend_takes_later_is_kept_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "resident_bytes", lambda: 400 * 2**20)
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
    monkeypatch.setattr(contract, "resident_bytes", lambda: 300 * 2**20)
    monkeypatch.setattr(contract, "memory_limit_bytes", lambda: machine_gib * 2**30)
    assert backend_room_bytes(max_ram_gib, budget_gib) / 2**20 == pytest.approx(room_mib)


def test_the_stages_share_the_room_of_their_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = SimpleNamespace(
        name="coarse", backend_bytes=70, tile_size=None, task=SimpleNamespace(regions=True)
    )
    rooms: list[float] = []

    def load_stages(*arguments: Any) -> SimpleNamespace:
        rooms.append(arguments[-1])
        return stage

    monkeypatch.setattr(cascades, "backend_room_bytes", lambda *_: 100.0)
    monkeypatch.setattr(cascades, "load_stages", load_stages)
    monkeypatch.setattr(cascades, "Cascade", lambda *stages: stages)
    load_cascade([], [], options=InferenceOptions())
    assert rooms == [100.0, 30.0]
