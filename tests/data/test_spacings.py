"""Spacings: the typical one of a data set, those drawn in training, and samples at them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from composed import train_config

from medseg.data.case_table import Case, CaseSource, Split
from medseg.data.crops import AVERAGES, ScanSpacings, draw_spacing_mm, typical_spacing_mm
from medseg.data.options import StageName, StageOptions
from medseg.data.sampler import sample_rng
from medseg.data.source_case import read_source
from medseg.geometry.grid import VoxelBox
from medseg.geometry.grid_rule import clamp_spacing, region_crop
from medseg.preprocess.intensity import normalise_hu
from medseg.preprocess.options import SpacingDraw, SpacingOptions, SpacingStrategy
from medseg.preprocess.resample import resample_image, resample_labels
from medseg.task import Task
from medseg.training.data_module import CasesDataModule

from .conftest import LABEL_VALUES, as_stored, two_blocks

RANGE_MM = (1.0, 4.0)


def drawn(num: int, scans: ScanSpacings | None = None) -> np.ndarray:
    return np.array([draw_spacing_mm(sample_rng(7, n), RANGE_MM, scans) for n in range(num)])


def test_even_draws_are_uniform_in_the_logarithm_along_z_and_in_plane() -> None:
    spacings_mm = drawn(4000)
    assert (spacings_mm[:, 1] == spacings_mm[:, 2]).all(), "pixels are square"
    assert spacings_mm.min() >= 1.0
    assert spacings_mm.max() <= 4.0
    places = np.log(spacings_mm[:, :2]) / np.log(4.0)
    for axis in range(2):
        shares = np.histogram(places[:, axis], bins=8, range=(0, 1))[0] / len(places)
        np.testing.assert_allclose(shares, 1 / 8, atol=0.02)
    assert abs(np.corrcoef(places.T)[0, 1]) < 0.05


def test_draws_by_the_tail_meet_each_scan_as_often_as_training_does() -> None:
    own = [(0.8, 0.7, 0.7), (1.5, 1.2, 1.3), (8.0, 0.9, 0.9)]
    shares = [0.5, 0.45, 0.05]
    met = Counter(map(tuple, drawn(4000, ScanSpacings(own, shares))))
    expected = [(1.0, 1.0, 1.0), (1.5, 1.2, 1.3), (4.0, 1.0, 1.0)]
    assert set(met) == set(expected)
    np.testing.assert_allclose(
        [met[spacing_mm] / 4000 for spacing_mm in expected], shares, atol=0.02
    )


@pytest.fixture
def set_up(
    write_case: Callable[..., Case], tmp_path: Path, task: Task
) -> Callable[..., tuple[CasesDataModule, dict[str, Case]]]:
    """A data module over three scans of different sizes and spacings, and the scans by name."""
    cases = []
    for number, (shape, spacing_mm) in enumerate(
        [
            ((22, 30, 41), (4.0, 1.5, 2.0)),
            ((34, 26, 33), (1.25, 2.0, 1.75)),
            ((17, 41, 37), (6.0, 1.5, 1.5)),
        ]
    ):
        case = write_case(f"case_{number}", *two_blocks(shape, number), spacing_mm=spacing_mm)
        cases.append(
            replace(case, ignore_findings=frozenset({"hu_range", "side_density", "sides"}))
        )

    def make(
        name: str = "fine", draw: SpacingDraw = SpacingDraw.even, **changes: Any
    ) -> tuple[CasesDataModule, dict[str, Case]]:
        source = CaseSource(Split(tuple(cases), tuple(cases), ()), LABEL_VALUES, 1.0)
        base = train_config(f"stage={name}", "data.num_workers=0")
        keys = {"batch_size": 2, "boundary_share": 1.0, "region_margin_mm": 5.0} | changes
        stage = StageOptions(name=StageName(name), **keys)
        spacing = SpacingOptions(strategy=SpacingStrategy.multi_scale, range_mm=RANGE_MM, draw=draw)
        data_options = replace(base.data, cache=str(tmp_path / "cache"))
        config = replace(base, seed=5, steps=4, stage=stage, spacing=spacing, data=data_options)
        data = CasesDataModule(config, [source], task, divisor=(8, 8, 8))
        data.prepare_data()
        data.setup("fit")
        return data, {case.name: case for case in cases}

    return make


@pytest.mark.parametrize("is_coarse", [True, False])
def test_a_sample_is_its_scan_resampled_to_the_spacing_that_was_drawn(
    is_coarse: bool, set_up: Callable[..., Any], task: Task
) -> None:
    data, cases = set_up("coarse" if is_coarse else "fine")
    samples, again = data.train_samples(), data.train_samples()
    spacings_mm = set()
    for n in range(8):
        sample = samples[n]
        assert all(torch.equal(sample[key], again[n][key]) for key in ("image", "target", "inside"))
        source = read_source(cases[sample["case"]], task, LABEL_VALUES)
        spacing_mm = sample["spacing_mm"]
        assert all(RANGE_MM[0] <= mm <= RANGE_MM[1] for mm in spacing_mm)
        spacings_mm.add(spacing_mm)
        lattice = source.grid.resampled(spacing_mm)
        region = task.regions[sample["region"]]
        value = task.labels[region.name]
        if is_coarse:  # tissue from end to end: the body is the scan
            body = lattice.box_from(source.grid, VoxelBox.full(source.grid.shape))
            grid = lattice.crop(body)
        else:
            tight = VoxelBox.from_mask(source.labels == value)
            assert tight is not None
            grid = region_crop(tight, source.grid, lattice, 5.0, None, (8, 8, 8)).grid
        image = resample_image(source.image_hu, source.grid, grid, -1024.0, slices_go_on=True)
        labels = resample_labels(source.labels, source.grid, grid, 3, slices_go_on=True)
        expected = normalise_hu(image, task.window_hu)
        if is_coarse:
            assert torch.equal(sample["image"][0], expected)
            assert torch.equal(sample["target"], labels)
        else:
            assert torch.equal(as_stored(sample["image"][0], region), expected)
            assert torch.equal(
                as_stored(sample["target"], region), (labels == value).to(torch.uint8)
            )
    assert len(spacings_mm) == 8


def test_a_patch_is_cut_at_the_spacing_that_was_drawn(
    set_up: Callable[..., Any], task: Task
) -> None:
    whole, _ = set_up()
    patches, _ = set_up(patch_size=(6, 8, 7))
    for n in range(6):
        sample, crop = patches.train_samples()[n], whole.train_samples()[n]
        assert sample["spacing_mm"] == crop["spacing_mm"]
        assert sample["target"].shape == (6, 8, 7)
        assert sample["target"].any(), "the boundary is met on every grid"
        windows = np.lib.stride_tricks.sliding_window_view(crop["image"][0].numpy(), (6, 8, 7))
        # A place: the crop of whole samples grows to multiples of the divisor, which patches may
        # leave.
        matches = np.argwhere(
            np.isclose(windows, sample["image"][0].numpy(), rtol=0, atol=1e-4).all((3, 4, 5))
        )
        assert len(matches) == 1


def test_the_tail_is_that_of_the_training_scans_and_validation_sees_what_prediction_does(
    set_up: Callable[..., Any],
) -> None:
    data, _ = set_up(draw=SpacingDraw.tail)
    own = {case.name: case.audit.grid.spacing_mm for case in data.train_cases}
    possible = {clamp_spacing(RANGE_MM, spacing_mm) for spacing_mm in own.values()}
    samples = data.train_samples()
    assert {samples[n]["spacing_mm"] for n in range(16)} == possible
    validation = data.val_samples()
    for n in range(len(validation)):
        assert validation[n]["spacing_mm"] == clamp_spacing(RANGE_MM, own[validation[n]["case"]])


@pytest.mark.parametrize("slab_share", [0.0, 1.0])
def test_coarse_samples_at_drawn_spacings_obey_the_bound(
    slab_share: float, set_up: Callable[..., Any]
) -> None:
    data, _ = set_up("coarse", max_voxels=32 * 48 * 48, slab_share=slab_share)
    samples = data.train_samples()
    for n in range(12):
        filled = [-(-size // 8) * 8 for size in samples[n]["target"].shape]
        assert np.prod(filled) <= 32 * 48 * 48


def test_the_median_or_the_mean_of_each_axis() -> None:
    scans = [(1.0, 0.6, 0.9), (2.0, 0.8, 0.7), (1.2, 0.7, 0.8)]
    assert typical_spacing_mm(scans) == typical_spacing_mm(scans, "median") == (1.2, 0.7, 0.8)
    assert typical_spacing_mm(scans, "mean") == (1.4, 0.7, 0.8)
    assert typical_spacing_mm([(2.0004999, 1.0, 1.0)]) == (2.0, 1.0, 1.0)


def test_a_coarse_axis_gets_its_tenth_percentile_but_none_finer_than_the_others() -> None:
    spacings = [(z, 0.7, 0.8) for z in (1.0, 2.0, 5.0, 5.0, 5.0, 5.0, 8.0, 8.0, 8.0, 10.0, 10.0)]
    for average, of in AVERAGES.items():
        assert of([z for z, _, _ in spacings]) > 3 * 0.7
        assert typical_spacing_mm(spacings, average) == (2.0, 0.7, 0.8)
    assert typical_spacing_mm([(0.5, 1.0, 1.1), *[(5.0, 1.0, 1.1)] * 8])[0] == round(
        np.percentile([0.5, *[5.0] * 8], 10), 3
    )
    assert typical_spacing_mm([*[(0.5, 1.0, 1.1)] * 4, *[(5.0, 1.0, 1.1)] * 5]) == (1.1, 1.0, 1.1)


def test_three_times_is_not_above_three() -> None:
    assert typical_spacing_mm([(3.0, 1.0, 1.0), (2.75, 1.0, 1.0), (3.25, 1.0, 1.0)]) == (
        3.0,
        1.0,
        1.0,
    )
    one_differs = [(3.0, 1.0, 1.0), (2.75, 1.0, 1.0), (3.5, 0.7, 1.0)]
    assert typical_spacing_mm(one_differs) == (3.0, 1.0, 1.0)
    assert typical_spacing_mm(one_differs, "mean") == (2.8, 0.9, 1.0)
