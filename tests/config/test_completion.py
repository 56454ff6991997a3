"""Completion of the command line: what is offered can be run."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from medseg.commands.entry import COMMANDS, compose
from medseg.config.check import to_typed
from medseg.config.completion import _key_values, complete, line_words
from medseg.config.help import Key, list_keys
from medseg.inference.options import Backend
from medseg.knob import Knob
from medseg.training.options import TrainConfig


def completions(command: str, *words: str) -> list[str]:
    return complete(COMMANDS[command][0], partial(compose, command), words)


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["save=[labels,p"], ["save=[labels,preview]", "save=[labels,probabilities]"]),
        (["save=[labels,l"], []),
        (["engine="], ["engine=local", "engine=ray"]),
        (["overwrite=t"], ["overwrite=true"]),
        (["precision=n"], ["precision=null"]),
        (["hu_slope="], ["hu_slope=1.0"]),
        (["viewer"], ["viewer."]),
        (["inference=whole", "inference.max"], ["inference.max_ram_gib="]),
        (["inference=w"], ["inference=whole"]),
        (["no_such_key="], []),
        (["no_such_key=3", "engine=r"], ["engine=ray"]),
        (["--he"], []),
        (["data=", ""][:1], []),
    ],
)
def test_predict_is_completed(words: list[str], offered: list[str]) -> None:
    assert completions("predict", *words) == offered


def test_every_kind_of_result_is_offered_as_a_list() -> None:
    kinds = ["dicom_seg", "labels", "masks", "preview", "probabilities", "rtstruct", "viewer"]
    assert completions("predict", "save=") == [f"save=[{kind}]" for kind in kinds]


def test_a_group_is_completed_where_it_may_be_chosen() -> None:
    assert "model=segresnet" in completions("train", "model=")
    assert completions("train", "model=segresnet", "model.init_f") == ["model.init_filters="]
    assert completions("search", "sweep=coarse") == ["sweep=coarse_basics"]
    assert completions("predict", "model=") == []


def test_paths_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scans" / "Doe, J").mkdir(parents=True)
    (tmp_path / "scan.nii").touch()
    assert completions("predict", "input=sc") == ["input=scan.nii", "input=scans/"]
    assert completions("predict", "input=scans/") == ["input=scans/Doe, J/"]
    assert completions("predict", f"output={tmp_path}/scan.") == [f"output={tmp_path}/scan.nii"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert completions("predict", "output=~/scan.") == ["output=~/scan.nii"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("medseg a=1 b", ["a=1", "b"]),
        ("medseg a=1 ", ["a=1", ""]),
        ("medseg input='Doe, J", ["input=Doe, J"]),
        (r"medseg input=Doe\,\ J", ["input=Doe, J"]),
    ],
)
def test_the_line_is_split_as_a_shell_does(
    line: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "COMP_LINE", line)
    assert line_words() == words


@pytest.mark.parametrize(
    "command",
    # Every other command has the keys of one of these.
    [
        "predict",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("train", "evaluate")),
        # Its keys are those of `train`.
        pytest.param("plan", marks=[pytest.mark.slow, pytest.mark.thorough]),
    ],
)
def test_every_value_that_is_offered_is_one(command: str) -> None:
    """Values by the check of a command; files of groups by composing them."""
    schema = COMMANDS[command][0]
    # Both defaults refer to the folder of a run, which only a run has.
    without_folder = ["run_dir=x", "logger=none"] if issubclass(schema, TrainConfig) else []
    composed, groups = compose(command, without_folder)
    parser = OverridesParser.create()
    entries = list(list_keys(schema, composed, groups))
    keys = [entry.name for entry in entries if isinstance(entry, Key) and "<" not in entry.name]
    # What must be given, so that the values can be checked alone.
    for name in OmegaConf.missing_keys(composed):
        OmegaConf.update(composed, name, "x")
    refused = []
    for name in keys:
        for argument in complete(schema, lambda _: (composed, groups), [f"{name}="]):
            if name in groups or argument.endswith("/"):
                continue
            changed = composed.copy()
            OmegaConf.update(changed, name, parser.parse_override(argument).value(), force_add=True)
            try:
                to_typed(changed, schema)
            except Exception as error:
                refused.append(f"{argument}: {error}")
    assert not refused, refused
    for group in groups:
        for argument in complete(schema, lambda _: (composed, groups), [f"{group}="]):
            compose(command, [argument])


def test_a_key_that_may_be_null_offers_its_choices_and_null() -> None:
    assert completions("train", "stage.region_from=") == [
        f"stage.region_from={value}" for value in ("coarse", "null", "reference")
    ]
    assert completions("train", "data.pin_memory=") == [
        f"data.pin_memory={value}" for value in ("false", "null", "true")
    ]
    assert completions("train", "stage.patience=") == ["stage.patience=null"]


@pytest.mark.parametrize(
    ("name", "value", "kind", "offered"),
    [
        ("steps", 100, int, ["100"]),
        ("lr", 0.5, float | None, ["0.5"]),
        ("lr", None, float | None, []),
        ("input", "???", str, []),
        ("name", "run-1", str, ["run-1"]),
        # What the shell or Hydra's grammar would read as something else.
        ("name", "my run", str, []),
        ("name", "a=b", str, []),
        ("name", "", str, []),
        ("overwrite", False, bool, ["true", "false"]),
        ("overwrite", None, bool | None, ["true", "false"]),
        ("backend", "torch", Backend | None, list(Backend)),
        ("tile_size", [8, 16, 16], tuple[int, int, int], ["[8,16,16]"]),
        ("model._target_", "medseg.models.unet.UNet", str, []),
        ("label_values", {"liver": 1}, dict, []),
    ],
)
def test_a_key_offers_its_choices_or_its_value_if_it_can_be_typed_plainly(
    name: str, value: object, kind: Any, offered: list[str]
) -> None:
    assert _key_values(Key(name, value, kind, Knob("")), "") == offered
