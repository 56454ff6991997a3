"""Room that the chosen switches leave: the largest batch and patch by two counted steps."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest

from medseg.planning import fit
from medseg.planning.estimate import STEP

from .test_choose import compose

SHAPE = (32, 32, 48)
BYTES_PER_VOXEL, FIXED, WORKSPACE, PREFETCH = 500, 10**6, 1.2, 4


def memory(samples: int, shape: tuple[int, ...]) -> Any:
    voxels = samples * math.prod(shape)
    return SimpleNamespace(peak=FIXED + BYTES_PER_VOXEL * voxels, input=4 * voxels, target=voxels)


def resident(samples: int, shape: tuple[int, ...]) -> float:
    """Peak with workspaces, and the batches that a loader process holds."""
    counted = memory(samples, shape)
    return WORKSPACE * counted.peak + PREFETCH * (counted.input + counted.target)


@pytest.mark.parametrize("budget", [10**8, 3 * 10**8, 10**9])
def test_the_largest_batch_and_patch_fit_and_larger_ones_do_not(
    budget: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = compose(f"data.prefetch={PREFETCH}")
    monkeypatch.setattr(fit, "count_memory", lambda _, shape, samples: memory(samples, shape))
    own = memory(1, SHAPE)
    checked: Any = SimpleNamespace(
        allocator={STEP: WORKSPACE * own.peak}, memory=own, num_workers=1, resident={STEP: resident(1, SHAPE)}
    )
    chosen: Any = SimpleNamespace(config=config)
    option: Any = SimpleNamespace(switches={"memory.checkpointing": "none"})
    fit.print_room(chosen, option, checked, SHAPE, budget)
    said = capsys.readouterr().out
    (batch,) = map(int, re.findall(r"stage\.batch_size=(\d+)", said))
    (patch,) = ([int(length) for length in found.split(",")] for found in re.findall(r"stage\.patch_size=\[([\d,]+)\]", said))
    assert resident(batch, SHAPE) <= budget < resident(batch + 1, SHAPE)
    assert resident(1, tuple(patch)) <= budget
    grown = [fit.grown(SHAPE, 1 + eighths / 8, (16, 16, 16)) for eighths in range(65)]
    assert budget < min(resident(1, shape) for shape in grown if math.prod(shape) > math.prod(patch))
