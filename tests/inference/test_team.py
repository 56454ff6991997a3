"""Batches go to the other processes, answers come back in order, and errors reach the first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import medseg

SCRIPT = """
import os
import torch
from medseg.runs.ranks import meet, rank
from medseg.inference.team import Team, serve

def run(job, images):
    if images.sum() < 0:
        raise torch.OutOfMemoryError("full")
    return images + int(job[2]) + 100 * rank()

meet("gloo")
if rank() > 0:
    serve(run)
else:
    team = Team()
    for numbers in ([1.0, 2.0, 3.0], [4.0], [5.0, 6.0]):
        answers = team.run(("fine", 0, 10), lambda images: run(("fine", 0, 10), images), [torch.full((1,), n) for n in numbers])
        print([answer.item() for answer in answers])
    for numbers in ([-1.0, 2.0], [1.0, -2.0]):
        try:
            team.run(("fine", 0, 10), lambda images: run(("fine", 0, 10), images), [torch.full((1,), n) for n in numbers])
        except torch.OutOfMemoryError as error:
            print(error)
    print(team.run(("fine", 0, 0), lambda images: images, [torch.zeros(1), torch.zeros(1)])[1].item())
    team.dismiss()
"""


@pytest.mark.slow
def test_the_first_asks_and_the_others_answer(tmp_path: Path) -> None:
    (tmp_path / "team.py").write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", str(tmp_path / "team.py")]
    paths = [str(Path(medseg.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    result = subprocess.run(torchrun, env=environment, capture_output=True, encoding="utf-8", check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines() == ["[11.0, 112.0, 213.0]", "[14.0]", "[15.0, 116.0]", "full", "full", "100.0"]
