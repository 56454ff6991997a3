"""The pages on switches name existing keys."""

from __future__ import annotations

import re
from pathlib import Path

from medseg.commands.entry import COMMANDS, compose
from medseg.config.help import list_keys

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ("switches.md", "optimisation.md")
# Arguments of the class that a preset names.
ARGUMENTS = {"optimizer.fused", "optimizer.foreach", "schedule.cycle_momentum"}


def test_every_key_is_one_of_a_command() -> None:
    keys = {"experiment"}
    for command in ("plan", "predict"):
        schema = COMMANDS[command][0]
        keys |= {entry.name for entry in list_keys(schema, *compose(command))}
    text = "\n".join((DOCS / page).read_text(encoding="utf-8") for page in PAGES)
    codes = " ".join(re.findall(r"`([^`]+)`", text))
    named = set(re.findall(r"(?:^| )\+?([a-z_.]+)=", codes))
    assert len(named) > 20
    assert named <= keys | ARGUMENTS
