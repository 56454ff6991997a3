"""Resampling as TotalSegmentator does it: bit-equal to scipy's `zoom`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.ndimage import zoom

from medseg.errors import UserError
from medseg.geometry.grid import VoxelGrid
from medseg.inference.options import Around, InferenceOptions, Seen
from medseg.inference.segmentation import Segmentation
from medseg.io.volume import Volume
from medseg.prediction.forecast import forecast
from medseg.prediction.load_models import load_model_folders
from medseg.prediction.totalsegmentator import TotalsegmentatorModel, resampled, restore
from medseg.task import Channel, Task
from medseg.weights.files import SHIPPED_FOLDER

RECORDED = Path(__file__).parent.parent / "nnunet" / "recorded"
FOLDERS = [RECORDED / "torch.zip", RECORDED / "folds.zip"]


@pytest.mark.parametrize("target", [(9, 24, 1), (16, 5, 13), (7, 11, 12)])
def test_images_and_labels_have_the_bits_of_scipy(target: tuple[int, int, int]) -> None:
    source = (7, 11, 12)
    numbers = np.random.default_rng(0)
    image = numbers.integers(-1000, 1000, source).astype(np.int16)
    factors = [new / old for new, old in zip(target, source, strict=True)]
    # In the order (x, y, z) of a NIfTI file, since the order of the sums decides the last bit.
    values = image.T.astype(np.float64)
    expected = zoom(values, factors[::-1], order=1, mode="nearest").astype(np.int32).T
    assert np.array_equal(resampled(image, target), expected)
    labels = numbers.integers(0, 9, source).astype(np.uint8)
    output = np.empty(target, np.uint8)
    restore(labels, output)
    assert np.array_equal(output, zoom(labels, factors, order=0, mode="nearest"))


@pytest.fixture
def model() -> TotalsegmentatorModel:
    pytest.importorskip("dynamic_network_architectures")
    joined = load_model_folders(FOLDERS, accelerator="cpu")
    return TotalsegmentatorModel((joined,), 1.5)


def test_any_storage_of_a_scan_is_seen_in_ras(model: TotalsegmentatorModel) -> None:
    array = np.random.default_rng(1).normal(-300, 300, (9, 20, 17)).astype(np.int16)
    volume = Volume(array, VoxelGrid(array.shape, (3.0, 1.0, 1.2)), None)
    result = model.segment(volume)
    # RAS: x and y run opposite to those of the usual storage of a CT.
    ras = array[:, ::-1, ::-1]
    small = zoom(ras.T.astype(np.float64), [14 / 17, 13 / 20, 2], order=1, mode="nearest").T
    grid = model.resampled_grid(volume.grid)
    assert grid.shape == small.shape == (18, 13, 14)
    inner = model.parts[0].segment(Volume(small.astype(np.int32), grid, None)).labels
    back = np.divide(array.shape, small.shape)
    expected = zoom(inner, back, order=0, mode="nearest")[:, ::-1, ::-1]
    assert len(np.unique(expected)) > 1
    assert np.array_equal(result.labels, expected)
    order, flips = (2, 0, 1), (True, False, False)
    turned = np.ascontiguousarray(array.transpose(order)[::-1])
    stored = model.segment(Volume(turned, volume.grid.reoriented(order, flips), None))
    assert np.array_equal(stored.labels, expected.transpose(order)[::-1])
    steps = ["resample", "prepare_1", "segment_1", "prepare_2", "segment_2", "restore"]
    assert list(result.durations_s) == model.steps == steps


@dataclass(frozen=True)
class OneSlice:
    """Model that gives one slice of a resampled scan a label, and measures its result."""

    number: int
    task: Task

    def segment(self, volume: Volume, *_: Any, **__: Any) -> Segmentation:
        result = Segmentation(np.zeros(volume.array.shape, dtype=np.uint8))
        result.labels[self.number] = 1
        result.measure(volume.grid, self.task)
        return result


@pytest.mark.parametrize(("number", "volume_ml", "is_empty"), [(4, 0.36, False), (1, 0.0, True)])
def test_a_result_is_empty_if_it_is_on_the_grid_of_the_scan(
    number: int, volume_ml: float, is_empty: bool
) -> None:
    """The ten slices of the scan get slices 0, 4, … of the 33 segmented ones."""
    grid = VoxelGrid((10, 4, 8), (5.0, 1.5, 1.5))
    task = Task("liver", {"liver": 1}, (), (Channel("ct", (0, 1)),))
    model = TotalsegmentatorModel((OneSlice(number, task),), 1.5)  # type: ignore[arg-type]
    result = model.segment(Volume(np.zeros(grid.shape, dtype=np.int16), grid, None))
    assert result.volumes_ml == {"liver": pytest.approx(volume_ml)}
    codes = [finding.code for finding in result.findings]
    assert codes == ["empty_result"] * is_empty


def test_the_forecast_counts_the_scan_and_the_resampled_one(model: TotalsegmentatorModel) -> None:
    grid = VoxelGrid((100, 256, 256), (3.0, 1.0, 1.0))
    expected = forecast(model, grid, 0)
    inner = forecast(model.parts[0], model.resampled_grid(grid), 0)
    num_voxels, num_resampled = 100 * 256 * 256, 200 * 171 * 171
    assert expected.memory["segment_2"] == (
        inner.memory["segment_2"] + 2 * num_voxels + 2 * num_resampled
    )
    assert list(expected.memory) == ["read", *model.steps]


def test_models_of_other_spacings_are_refused() -> None:
    options = InferenceOptions(around=Around.totalsegmentator)
    with pytest.raises(UserError, match=r"one spacing along all axes, .* got 1.1, 1.4, 1.5, 2 mm"):
        load_model_folders(FOLDERS, accelerator="cpu", options=options)
    with pytest.raises(UserError, match=r"inference\.around belongs to a model folder of nnU-Net"):
        load_model_folders([SHIPPED_FOLDER], accelerator="cpu", options=options)
    options = InferenceOptions(around=Around.totalsegmentator, orientation=Seen.LPS)
    with pytest.raises(UserError, match="turns scans to RAS; leave one of them out"):
        load_model_folders(FOLDERS, accelerator="cpu", options=options)
