"""Kinds of optimisers: whether steps grow with the gradient sets how a rate scales."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from medseg.training.optimisation import grows_with_gradient

GROWING = ["torch.optim.SGD", "torch.optim.ASGD"]
ADAPTIVE = [
    *(
        f"torch.optim.{name}"
        for name in ("Adam", "AdamW", "RAdam", "NAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop")
    ),
    *(f"pytorch_optimizer.{name}" for name in ("Lion", "AdaBelief", "AdamP", "Lamb")),
]


@pytest.mark.parametrize("target", [*GROWING, *ADAPTIVE])
def test_adaptive_optimisers_are_told_from_those_whose_steps_grow(target: str) -> None:
    """RAdam takes plain steps first, and adapts later."""
    package, _, name = target.rpartition(".")
    optimizer: Any = getattr(importlib.import_module(package), name)
    assert grows_with_gradient(lambda parameters: optimizer(parameters, lr=1e-3)) is (
        target in GROWING
    )
