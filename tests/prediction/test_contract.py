"""The shares of `inference.max_ram_gib`: never more than what is left, refused where too little is."""

from __future__ import annotations

import math

import pytest

from medseg.errors import UserError
from medseg.prediction import contract
from medseg.prediction.contract import NUM_ARRAYS, OVERHEAD_BYTES, share_memory


def test_without_a_bound_everything_may_be_in_memory() -> None:
    assert share_memory(None) == (math.inf, math.inf)


@pytest.mark.parametrize("max_ram_gib", [1.0, 4.0])
def test_networks_and_arrays_share_what_the_process_does_not_hold(max_ram_gib: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "resident_bytes", lambda: 400 * 2**20)
    shares = share_memory(max_ram_gib)
    total = shares.network_gib * 2**30 + NUM_ARRAYS * shares.array_bytes + OVERHEAD_BYTES + 400 * 2**20
    assert math.isclose(total, max_ram_gib * 2**30)
    assert min(shares) > 0


def test_a_bound_below_the_libraries_is_refused_with_one_that_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "resident_bytes", lambda: 400 * 2**20)
    with pytest.raises(UserError, match=r"inference\.max_ram_gib=0\.5: expected at least (0\.\d+), because") as refused:
        share_memory(0.5)
    named = float(str(refused.value).split("at least ")[1].split(",")[0])
    assert share_memory(named).network_gib > 0
