"""Search space: its values as command-line arguments, and the check that `train` accepts them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from medseg.config.check import explain, to_typed
from medseg.config.overrides import quote
from medseg.config.schema import TrainConfig
from medseg.config.search import ParameterConfig, SweepConfig
from medseg.errors import UserError

Compose = Callable[[Mapping[str, str]], DictConfig]
"""Composes `train` with the values of a trial."""


def composer(given: Sequence[str], sweep: SweepConfig) -> Compose:
    """Make a function that composes `train` from the arguments of a search and the values of a trial.

    Args:
        given: Arguments of the search; those of `sweep` and of searched keys are left out.
        sweep: The search.
    """
    parsed = OverridesParser.create().parse_overrides(list(given))
    keys = [override.key_or_group for override in parsed]
    own = [argument for argument, key in zip(given, keys, strict=True) if key.split(".")[0] != "sweep" and key not in sweep.space]

    def compose(values: Mapping[str, str]) -> DictConfig:
        return hydra.compose("train", [*own, *(f"{key}={value}" for key, value in values.items())])

    return compose


def check_space(sweep: SweepConfig, compose: Compose) -> None:
    """Refuse a space with a key or a value that `train` does not accept. Combinations of values are checked trial by trial.

    Raises:
        UserError: Naming the key, the value and the cure.
    """
    ends = {
        key: [text_of(value) for value in parameter.choices or (_whole(parameter.low), _whole(parameter.high))]
        for key, parameter in sweep.space.items()
    }
    for number in range(max(map(len, ends.values()))):
        values = {key: texts[number % len(texts)] for key, texts in ends.items()}
        try:
            to_typed(compose({**values, "run_dir": "none"}), TrainConfig)
        except (HydraException, OmegaConfBaseException) as error:
            raise UserError(f"sweep.space: {explain(error, compose({}))}") from error
        except UserError as error:
            raise UserError(f"sweep.space: {error}") from error


def _whole(number: float | None) -> float | int | None:
    """Write a whole number without a decimal point, which integer keys do not accept."""
    return int(number) if number is not None and number.is_integer() else number


def describe(parameter: ParameterConfig) -> str:
    """Describe the values of a searched key for people.

    Example:
        >>> from medseg.config.search import ParameterType
        >>> describe(ParameterConfig(ParameterType.float, low=1e-4, high=0.01, log=True))
        '0.0001 … 0.01, logarithmic'
        >>> describe(ParameterConfig(ParameterType.choice, choices=["plain", "amp"]))
        'plain, amp'
    """
    if parameter.choices is not None:
        return ", ".join(text_of(choice) for choice in parameter.choices)
    more = ", logarithmic" if parameter.log else f", in steps of {parameter.step:g}" if parameter.step else ""
    return f"{parameter.low:g} … {parameter.high:g}{more}"


def text_of(value: Any) -> str:
    """Write a value as a command-line argument in Hydra's grammar.

    Example:
        >>> [text_of(value) for value in (0.5, True, None, "amp", "Doe, John", [1, 2])]
        ['0.5', 'true', 'null', 'amp', "'Doe, John'", '[1,2]']
    """
    if isinstance(value, str):
        return value if re.fullmatch(r"[A-Za-z_][\w./-]*", value) else quote(value)
    if isinstance(value, list):
        return "[" + ",".join(text_of(one) for one in value) + "]"
    return json.dumps(value)
