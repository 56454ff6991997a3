"""The scripts of `examples/`, which are also notebooks of the site, run from beginning to end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Script to what shortens it, and the files that it leaves.
SCRIPTS = {
    "first_segmentation.py": ({}, ["lungs.png"]),
    "compare_switches.py": (
        {"STEPS = 200": "STEPS = 2", "num_train=8": "num_train=1", "num_val=2": "num_val=1"},
        ["sweep/report.html"],
    ),
    "own_organ.py": ({"STEPS = 200": "STEPS = 2", "num_train=5": "num_train=3"}, ["heart.png"]),
}


def test_every_script_is_tried() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(SCRIPTS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_text_is_lost_on_the_marker_of_a_cell(name: str) -> None:
    # jupytext takes what follows a marker for the title of the cell, which no page shows.
    lines = (ROOT / "examples" / name).read_text(encoding="utf-8").splitlines()
    markers = {line for line in lines if line.startswith("# %%")}
    assert markers == {"# %%", "# %% [markdown]"}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_script_runs(name: str, tmp_path: Path) -> None:
    shorter, results = SCRIPTS[name]
    text = (ROOT / "examples" / name).read_text(encoding="utf-8")
    for old, new in shorter.items():
        assert old in text
        text = text.replace(old, new)
    (tmp_path / name).write_text(text, encoding="utf-8")
    environment = {
        **os.environ,
        "MPLBACKEND": "Agg",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        [sys.executable, name], cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert all((tmp_path / result).is_file() for result in results)
