"""Contradictions of keys: the named cure is accepted."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from medseg.training.clashes import _optimiser_clashes
from medseg.training.options import LrScaling


def clashes(steps: int, ema_decay: float) -> list[str]:
    """Sentences on the average of the weights."""
    config = SimpleNamespace(steps=steps, ema_decay=ema_decay, lr_scaling=LrScaling.none)
    return list(_optimiser_clashes(config))


@pytest.mark.parametrize("steps", [2, 3, 7, 10, 60, 500, 777, 60_000, 1_000_000])
def test_the_named_decay_is_accepted(steps: int) -> None:
    (sentence,) = clashes(steps, 1 - 0.5 / steps)
    (named,) = re.findall(r"choose ([\d.]+) or less", sentence)
    assert clashes(steps, float(named)) == []
    assert float(named) > 1 - 1.1 / steps
