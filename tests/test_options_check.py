"""Options from Python are checked like those of the command line."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from medseg.config.check import to_typed
from medseg.errors import UserError
from medseg.inference.options import Backend, InferenceOptions
from medseg.options_check import check_options


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("budget_gib", 0.0),
        ("budget_gib", float("inf")),
        ("max_ram_gib", -1.0),
        ("overlap", 1.0),
        ("tile_size", [64, 64]),
        ("tile_size", [64, 0, 64]),
    ],
)
def test_python_and_the_command_line_get_the_same_sentence(key: str, value: Any) -> None:
    composed: Any = OmegaConf.merge(OmegaConf.structured(InferenceOptions), {key: value})
    with pytest.raises(UserError, match=f"^{key}: ") as from_command:
        to_typed(composed, InferenceOptions)
    with pytest.raises(UserError) as from_python:
        check_options(InferenceOptions(**{key: value}), "options")
    assert str(from_python.value) == f"options.{from_command.value}"


def test_lists_become_tuples_and_names_choices() -> None:
    options = InferenceOptions(tile_size=[64, 32, 64], backend="torch")  # type: ignore[arg-type]
    check_options(options)
    assert options.tile_size == (64, 32, 64)
    assert options.backend is Backend.torch
