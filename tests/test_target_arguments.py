"""Ranges of arguments are those of the class that is named; kinds follow its annotations."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from medseg.target_arguments import misfit, range_of


@pytest.mark.parametrize(
    ("point", "target", "name", "interval"),
    [
        ("loss", "monai.losses.TverskyLoss", "alpha", "[0, inf)"),
        ("loss", "monai.losses.FocalLoss", "alpha", "[0, 1]"),
        ("loss", "my_project.HuberDice", "delta", ""),
        ("loss", "torch.nn.CosineEmbeddingLoss", "margin", "[-1, 1]"),
        ("schedule", "torch.optim.lr_scheduler.ExponentialLR", "gamma", "(0, inf)"),
        ("schedule", "my_project.Warm", "gamma", ""),
        ("optimizer", "pytorch_optimizer.Lamb", "lr", "(0, inf)"),
    ],
)
def test_a_range_is_that_of_a_known_class(
    point: str, target: str, name: str, interval: str
) -> None:
    assert range_of(point, target, name) == interval


class Annotated:
    def __init__(
        self, pair: tuple[int, float], many: tuple[int, ...], names: tuple[str, float]
    ) -> None:
        pass


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("pair", [1, 0.5], ""),
        ("pair", [0.5, 1], "a list"),
        ("pair", [1, "a"], "a list"),
        ("many", [1, 2, 3], ""),
        ("many", [1, 2, 0.5], "a list"),
        ("many", [10**400, 1e3], ""),
        ("names", ["a", 0.5], ""),
        ("names", ["a", "b"], "a list"),
    ],
)
def test_each_item_of_a_tuple_has_its_own_kind(name: str, value: Any, kind: str) -> None:
    signature = inspect.signature(Annotated, eval_str=True)
    assert misfit(signature, name, value) == kind
