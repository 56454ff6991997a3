"""Tile workers of three processes: answers in order, errors raised in rank 0."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import medseg

SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
from medseg.inference.tile_workers import TileWorkers, process_group, serve_tiles

def run(job, images):
    if images.sum() < 0:
        raise torch.OutOfMemoryError("full")
    return images + int(job[2]) + 100 * dist.get_rank()

def use(workers):
    def ask(numbers):
        images = [torch.full((1,), number) for number in numbers]
        return workers.run(("fine", 0, 10), lambda parts: run(("fine", 0, 10), parts), images)

    for numbers in ([1.0, 2.0, 3.0], [4.0], [5.0, 6.0]):
        print([answer.item() for answer in ask(numbers)])
    for numbers in ([-1.0, 2.0], [1.0, -2.0]):
        try:
            ask(numbers)
        except torch.OutOfMemoryError as error:
            print(error)
    images = [torch.zeros(1), torch.zeros(1)]
    print(workers.run(("fine", 0, 0), lambda parts: parts, images)[1].item())
    workers.dismiss()

with process_group():
    if os.environ["TORCHELASTIC_RESTART_COUNT"] < sys.argv[1]:
        # All have joined; one that ends with a failure makes torchrun restart them.
        sys.exit(dist.get_rank())
    if dist.get_rank() > 0:
        serve_tiles(run)
    else:
        use(TileWorkers())
"""


@pytest.mark.slow
@pytest.mark.parametrize("num_restarts", [0, 1])
def test_tile_workers_answer_rank_0_in_order_and_errors_reach_it(
    tmp_path: Path, num_restarts: int
) -> None:
    (tmp_path / "workers.py").write_text(SCRIPT)
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=3",
        f"--max-restarts={num_restarts}",
    ]
    torchrun = [*launch, str(tmp_path / "workers.py"), str(num_restarts)]
    paths = [str(Path(medseg.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    result = subprocess.run(
        torchrun, env=environment, capture_output=True, encoding="utf-8", check=False, timeout=180
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines() == [
        "[11.0, 112.0, 213.0]",
        "[14.0]",
        "[15.0, 116.0]",
        "full",
        "full",
        "100.0",
    ]
