"""Lists that are cut short, and commands that a shell takes as they are printed."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from medseg.wording import first_few, quote_for_shell, shell_line


@pytest.mark.parametrize(
    ("number", "most", "separator", "text"),
    [
        (0, 2, ", ", ""),
        (2, 2, ", ", "0, 1"),
        (3, 2, ", ", "0, 1 and 1 more"),
        (7, 1, ", ", "0 and 6 more"),
        (4, 2, "; ", "0; 1; and 2 more"),
    ],
)
def test_a_list_is_cut_and_its_rest_counted(
    number: int, most: int, separator: str, text: str
) -> None:
    assert first_few(range(number), most, separator) == text


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
@pytest.mark.parametrize(
    "argument",
    [
        "a b",
        "Größe",
        "M\udcf6ller/a",
        "M\udcf6ller's \\x41 $HOME",
        "two\nlines\x1b",
        "data.cases='x y'",
        "",
        "…\udcf6ab",
    ],
)
def test_a_shell_takes_a_printed_command_as_it_is(
    encoding: str, argument: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of the terminal are those that the shell gets."""
    terminal = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="backslashreplace")
    monkeypatch.setattr(sys, "stdout", terminal)
    printed = shell_line(["printf", "%s", argument])
    assert printed.isprintable()
    # A letter that this terminal shows comes back in its encoding.
    command = printed.encode(encoding).decode(encoding)
    done = subprocess.run(["bash", "-c", command], capture_output=True, check=True)
    assert done.stdout == os.fsencode(argument)


def test_no_module_cuts_lists_on_its_own() -> None:
    root = Path(__file__).parents[1] / "medseg"
    cutting = [
        path.name for path in root.rglob("*.py") if "} more" in path.read_text(encoding="utf-8")
    ]
    # A picture has one line for each warning.
    assert sorted(cutting) == ["preview.py", "wording.py"]


def test_plain_arguments_are_not_quoted() -> None:
    assert quote_for_shell("data.cases=runs/a_1.csv") == "data.cases=runs/a_1.csv"
