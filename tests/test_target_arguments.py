"""Ranges of arguments are those of the class that is named; kinds follow its annotations."""

from __future__ import annotations

import inspect
from typing import Annotated, Any

import pytest

from medseg.target_arguments import convert, expected_kind, range_of


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


class Documented:
    def __init__(
        self,
        pair: tuple[int, float],
        many: tuple[int, ...],
        names: tuple[str, float],
        steps: Annotated[int, "number of steps"],
        fraction: int | float,
        rate: float,
        level: int | None,
        **others: Any,
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
    signature = inspect.signature(Documented, eval_str=True)
    assert expected_kind(signature, name, value) == kind


@pytest.mark.parametrize("value", [0.5, "a", True])
def test_an_annotation_with_metadata_is_described_by_its_type(value: Any) -> None:
    signature = inspect.signature(Documented, eval_str=True)
    assert expected_kind(signature, "steps", value) == "a whole number"


@pytest.mark.parametrize(
    ("name", "value", "converted"),
    [
        ("steps", 5e0, 5),
        ("level", 5e0, 5),
        ("level", None, None),
        ("many", [2e0, 3], [2, 3]),
        ("pair", [1e0, 0.5], [1, 0.5]),
        ("fraction", 1.0, 1.0),
        ("rate", 1.0, 1.0),
        ("other", 1.0, 1.0),
        ("names", ["a", 1.0], ["a", 1.0]),
    ],
)
def test_a_whole_float_becomes_int_where_no_float_is_taken(
    name: str, value: Any, converted: Any
) -> None:
    signature = inspect.signature(Documented, eval_str=True)
    assert expected_kind(signature, name, value) == ""
    # The text tells 1 from 1.0, which compare as equal.
    assert repr(convert(signature, name, value)) == repr(converted)


class Undocumented:
    def __init__(self, steps=5, rate=0.5, weights=1):  # type: ignore[no-untyped-def]
        pass


@pytest.mark.parametrize(
    ("name", "value", "converted"),
    [
        ("steps", 1e1, 10),
        ("steps", 0.5, 0.5),
        ("rate", 1.0, 1.0),
        ("weights", [2.0, 0.5], [2, 0.5]),
    ],
)
def test_a_whole_float_becomes_int_where_the_default_is_int(
    name: str, value: Any, converted: Any
) -> None:
    signature = inspect.signature(Undocumented)
    assert expected_kind(signature, name, value) == ""
    assert repr(convert(signature, name, value)) == repr(converted)
