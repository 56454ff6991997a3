"""Phantoms with three different sizes and spacings, as cache entries and as files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from medseg.data.audit.finding import CaseAudit
from medseg.data.cache import CachedCase
from medseg.data.case_table import Case
from medseg.data.crops import StageCrops
from medseg.data.options import StageName, StageOptions
from medseg.geometry.grid import VoxelBox, VoxelGrid
from medseg.geometry.grid_rule import Crop
from medseg.task import Channel, Region, Task


@dataclass(frozen=True)
class GivenCrops(StageCrops):
    """Crops that a test chooses.

    Attributes:
        of: Called as `of(case, region, rng)`.
    """

    of: Any = None

    def crop(self, case: CachedCase, region: Region, rng: np.random.Generator | None) -> Crop:
        return self.of(case, region, rng)


def as_stored(values: Tensor, region: Region) -> Tensor:
    """A sample of a region (D, H, W) as it lies in the scan: right regions are mirrored."""
    return values.flip(2) if region.side == "right" else values


LABEL_VALUES = {1: "left_lung", 2: "right_lung"}


@pytest.fixture(scope="session")
def task() -> Task:
    regions = (
        Region("left_lung", ("left_lung",), "left"),
        Region("right_lung", ("right_lung",), "right"),
    )
    return Task(
        "lungs", {"left_lung": 1, "right_lung": 2}, regions, (Channel(window_hu=(-1000.0, 600.0)),)
    )


def two_blocks(shape: tuple[int, int, int], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Tissue with a small left block (larger x) and a larger right one, asymmetric, off centre."""
    depth, height, width = shape
    labels = np.zeros(shape, dtype=np.uint8)
    labels[depth // 3 : depth - 3, height // 4 : height // 2, width * 3 // 5 : width * 4 // 5] = 1
    labels[depth // 4 : depth - 2, height // 4 : height * 3 // 4, width // 8 : width * 2 // 5] = 2
    noise = np.random.default_rng(seed).integers(-40, 40, size=shape)
    image = np.where(labels > 0, -850, 30) + noise
    return image.astype(np.int16), labels


@pytest.fixture
def cached_cases(tmp_path: Path, task: Task) -> list[CachedCase]:
    """Three entries of different shapes as `open_case` gives them; the last has no left lung."""
    cases = []
    for number, shape in enumerate([(22, 30, 41), (17, 26, 33), (25, 21, 37)]):
        image, labels = two_blocks(shape, seed=number)
        if number == 2:
            labels[labels == 1] = 0
        folder = tmp_path / f"case_{number}"
        folder.mkdir()
        np.save(folder / "image.npy", image)
        np.save(folder / "labels.npy", labels)
        grid = VoxelGrid(shape, (2.5, 1.5, 2.0), (-40.0, 13.0, 200.0))
        boxes = {
            "left_lung": VoxelBox.from_mask(labels == 1),
            "right_lung": VoxelBox.from_mask(labels == 2),
        }
        cases.append(
            CachedCase(
                name=f"case_{number}",
                folder=folder,
                grid=grid,
                region_boxes={name: box for name, box in boxes.items() if box is not None},
                audit=CaseAudit(grid, {}, f"{number}", {}, ()),
            )
        )
    return cases


@pytest.fixture
def write_case(tmp_path: Path) -> Callable[..., Case]:
    """Write arrays in LPS order as NIfTI files, not by the library that medseg reads them with."""

    def write(
        name: str,
        image: np.ndarray,
        labels: np.ndarray | None,
        *,
        spacing_mm: tuple[float, float, float] = (4.0, 1.5, 2.0),
        labels_offset_mm: float = 0.0,
    ) -> Case:
        import SimpleITK

        folder = tmp_path / "source" / name
        folder.mkdir(parents=True, exist_ok=True)
        for kind, array, offset in (("image", image, 0.0), ("labels", labels, labels_offset_mm)):
            if array is None:
                continue
            volume = SimpleITK.GetImageFromArray(array)
            volume.SetSpacing(spacing_mm[::-1])
            volume.SetOrigin((-31.0 + offset, 12.0, 200.0))
            SimpleITK.WriteImage(volume, str(folder / f"{kind}.nii.gz"))
        return Case(
            name,
            folder / "image.nii.gz",
            None if labels is None else folder / "labels.nii.gz",
            name,
        )

    return write


def stage_of(name: str, options: dict[str, Any]) -> StageOptions:
    """Take the keys of a stage out of the options of a test, in place."""
    keys = {field.name for field in fields(StageOptions)} & options.keys()
    return StageOptions(name=StageName(name), **{key: options.pop(key) for key in keys})
