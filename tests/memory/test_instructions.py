"""Instruction set of oneDNN: a training must not write beyond its memory on processors with AMX."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from medseg.commands import entry
from medseg.memory.instructions import VARIABLES, WITHOUT_AMX, instruction_limit, train_without_amx

# Shapes whose gradient ended the process, or overwrote memory, with AMX.
GRADIENTS = """
from medseg.memory.instructions import train_without_amx
train_without_amx()
import torch
torch.set_num_threads(1)
for channels, kernel in ((24, 1), (32, 1), (16, 3)):
    convolution = torch.nn.Conv3d(16, channels, kernel, padding=kernel // 2).bfloat16()
    for depth in (1, 2, 8):
        for _ in range(3):
            convolution(torch.randn(1, 16, depth, 88, 96).bfloat16()).square().mean().backward()
print("done")
"""


@pytest.fixture
def no_limit(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No limit is set, and what the test sets goes away."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


def test_gradients_of_flat_images_stay_within_their_memory() -> None:
    clean = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", GRADIENTS], env=clean, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_a_limit_of_the_user_stays(no_limit: pytest.MonkeyPatch) -> None:
    assert instruction_limit() == ""
    train_without_amx()
    assert instruction_limit() == WITHOUT_AMX
    no_limit.delenv(VARIABLES[0])
    no_limit.setenv(VARIABLES[1], "AVX2")
    train_without_amx()
    assert instruction_limit() == "AVX2"
    assert VARIABLES[0] not in os.environ


@pytest.mark.parametrize(
    ("command", "is_limited"), [("train", True), ("plan", True), ("predict", False)]
)
def test_commands_that_compute_gradients_are_limited(
    command: str, is_limited: bool, no_limit: pytest.MonkeyPatch
) -> None:
    no_limit.setattr(sys, "argv", [command, "nonsense=1"])
    with pytest.raises(SystemExit):
        entry.run(command, lambda _: 0)
    assert (instruction_limit() == WITHOUT_AMX) == is_limited
