"""Channels of a case lie on the grid of the first, whatever grids their files have."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from dicom_files import save_stack

from medseg.errors import UserError
from medseg.findings import warnings_of
from medseg.geometry.grid import VoxelGrid
from medseg.io.read import read_grid
from medseg.io.scratch import scratch_above
from medseg.io.volume import Volume
from medseg.io.write import write_image, write_labels
from medseg.preprocess.channels import (
    place_channel,
    read_channel_images,
    read_channels,
    resample_to,
)
from medseg.preprocess.orient import Orientation
from medseg.preprocess.scale import HuScale
from tests.io.io_volumes import finding_texts

GRID = VoxelGrid((14, 18, 22), (3.0, 1.5, 1.25), (-12.0, 4.0, 9.0))


def turned(degrees: float) -> tuple[tuple[float, float, float], ...]:
    """Direction turned about the z axis."""
    sine, cosine = float(np.sin(np.radians(degrees))), float(np.cos(np.radians(degrees)))
    return ((cosine, -sine, 0.0), (sine, cosine, 0.0), (0.0, 0.0, 1.0))


def ramp(grid: VoxelGrid) -> np.ndarray:
    """An image linear in the world: every correct interpolation gives its exact value."""
    indices = np.stack(np.meshgrid(*map(np.arange, grid.shape), indexing="ij"), axis=-1)
    return (grid.index_to_world_xyz_mm(indices) @ [1.0, -2.0, 3.0]).astype(np.float32)


OTHERS = {
    "finer": VoxelGrid((60, 40, 60), (1.0, 1.0, 0.7), (-20.0, -2.0, 0.0)),
    "coarser": VoxelGrid((20, 20, 20), (4.0, 3.0, 3.0), (-25.0, -15.0, -10.0)),
    "flipped and permuted": VoxelGrid((60, 40, 60), (1.0, 1.0, 0.7), (-20.0, -2.0, 0.0)).reoriented(
        (2, 0, 1), (True, False, True)
    ),
    "oblique": VoxelGrid((60, 70, 70), (1.0, 1.0, 1.0), (-25.0, -16.0, 0.0), turned(20)),
    "oblique and coarser": VoxelGrid(
        (20, 40, 40), (4.0, 2.0, 2.0), (-25.0, -16.0, -5.0), turned(-20)
    ),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize(
    "orientation",
    [Orientation((0, 1, 2), (False,) * 3), Orientation((2, 0, 1), (True, False, True))],
)
def test_every_voxel_keeps_its_place(name: str, orientation: Orientation) -> None:
    target = GRID.reoriented(orientation.order, orientation.flips)
    found = resample_to(ramp(OTHERS[name]), OTHERS[name], target, np.nan)
    covered = ~np.isnan(found)
    assert covered.mean() > 0.5
    # Only the outermost voxels of the source are clamped.
    error = np.abs(found - ramp(target))[covered]
    assert np.quantile(error, 0.8) < 1e-3
    assert error.max() < 8.0


def test_a_rotated_channel_covers_its_whole_field_of_view() -> None:
    # All centres of the target lie inside: in the first and the last slice of the source, half a
    # slice beyond its outermost centres, and between.
    source = VoxelGrid((4, 80, 80), (3.0, 1.0, 1.0), (-40.0, -40.0, 0.0), turned(20))
    for z_mm in (-1.0, 0.0, 1.0):
        target = VoxelGrid((4, 10, 10), (3.0, 1.0, 1.0), (-32.0, 0.0, z_mm))
        image = resample_to(np.full(source.shape, 7.0, np.float32), source, target, np.nan)
        assert (image == 7.0).all()
    # Beyond the field of view, `outside` is not mixed into its edge.
    target = VoxelGrid((8, 10, 10), (3.0, 1.0, 1.0), (-32.0, 0.0, -4.6))
    image = resample_to(np.full(source.shape, 7.0, np.float32), source, target, -1024.0)
    values = [set(plane.ravel().tolist()) for plane in image]
    assert values == [{-1024.0}] * 2 + [{7.0}] * 4 + [{-1024.0}] * 2


def test_a_channel_on_the_same_grid_is_not_touched(tmp_path: Path) -> None:
    image = np.arange(np.prod(GRID.shape), dtype=np.int16).reshape(GRID.shape)
    assert resample_to(image, GRID, GRID, 0.0) is image
    write_image(tmp_path / "a.nrrd", image, GRID)
    write_image(tmp_path / "b.nii.gz", ramp(GRID), GRID)
    alone, first = read_channels([tmp_path / "a.nrrd"], [-1024])
    assert alone.dtype == np.int16
    assert np.array_equal(alone[0], image)
    assert first.grid.is_close(GRID)
    both, _ = read_channels(
        [tmp_path / "a.nrrd", tmp_path / "b.nii.gz"], [-1024, 0], scales=[HuScale(2.0, -5.0)]
    )
    assert both.shape == (2, *GRID.shape)
    assert both.dtype == np.float32
    assert np.array_equal(both[0], 2.0 * image - 5.0)
    assert np.array_equal(both[1], ramp(GRID))


def test_no_channel_above_the_limit_stays_in_memory(tmp_path: Path) -> None:
    """Neither one that is scaled, nor one on the same grid, nor a resampled one."""
    grid = VoxelGrid((40, 60, 60), (3.0, 1.5, 1.25), (-12.0, 4.0, 9.0))
    paths = [tmp_path / f"{name}.nrrd" for name in ("scaled", "same", "finer", "oblique")]
    for path in paths:
        channel_grid = OTHERS.get(path.stem, grid)
        write_image(path, np.ones(channel_grid.shape, np.int16), channel_grid)
    options: dict[str, Any] = {"outside": [0.0] * 4, "scales": [HuScale(offset=-24.0)]}
    expected, _ = read_channel_images(paths, **options)
    assert [image.dtype for image in expected] == [np.int16] + [np.float32] * 3
    with scratch_above(0):
        tracemalloc.start()
        images, _ = read_channel_images(paths, **options)
        held_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert held_bytes < images[0].size
    assert all(map(np.array_equal, images, expected))


def test_what_a_channel_does_not_show(tmp_path: Path) -> None:
    write_image(tmp_path / "a.nrrd", np.zeros(GRID.shape, np.int16), GRID)
    half = VoxelGrid((7, 18, 22), GRID.spacing_mm, GRID.origin_xyz_mm)
    write_image(tmp_path / "half.nrrd", np.full(half.shape, 7, np.int16), half)
    channels, volume = read_channels([tmp_path / "a.nrrd", tmp_path / "half.nrrd"], [-1024, 3])
    assert np.array_equal(
        channels[1], np.where(np.arange(14) < 7, 7.0, 3.0)[:, None, None] + np.zeros(GRID.shape)
    )
    assert finding_texts(volume) == ("50% of the scan is outside image_1 and counts as 3 there",)
    away = VoxelGrid(GRID.shape, GRID.spacing_mm, (500.0, 0.0, 0.0))
    write_image(tmp_path / "away.nrrd", np.zeros(GRID.shape, np.int16), away)
    with pytest.raises(
        UserError,
        match=(
            r"away.nrrd: expected image_1 to show the same patient region as .*a.nrrd, but the "
            r"two do not overlap"
        ),
    ):
        read_channels([tmp_path / "a.nrrd", tmp_path / "away.nrrd"], [0, 0])


def test_a_missing_channel_is_one_sentence(tmp_path: Path) -> None:
    write_image(tmp_path / "a.nrrd", np.zeros(GRID.shape, np.int16), GRID)
    with pytest.raises(UserError) as caught:
        read_channels([tmp_path / "a.nrrd", None, tmp_path / "c.nrrd"], [0, 0, 0])
    assert str(caught.value) == (
        f"{tmp_path / 'a.nrrd'}: expected the channels image, image_1, image_2, but image_1 "
        "is missing; give a file for each."
    )
    with pytest.raises(
        UserError, match=r"c\.nrrd: this file or folder does not exist; check the path\."
    ):
        read_channels([tmp_path / "a.nrrd", tmp_path / "c.nrrd"], [0, 0])


def test_voxels_without_a_number_are_air_of_their_modality(tmp_path: Path) -> None:
    image = np.full(GRID.shape, 5.5, np.float32)
    image[0, 0, 0] = np.nan
    paths = [tmp_path / "a.nrrd", tmp_path / "b.nrrd"]
    for path in paths:
        write_image(path, image, GRID)
    channels, volume = read_channels(paths, [-1024, 0], modalities=["ct", "mr"])
    assert channels[:, 0, 0, 0].tolist() == [-1024, 0]
    assert [remark.rpartition(" and ")[2] for remark in finding_texts(volume)] == [
        "count as air, -1024 HU",
        "count as 0",
    ]


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
def test_a_4d_file_holds_the_channels_along_its_last_axis(tmp_path: Path, suffix: str) -> None:
    rng = np.random.default_rng(0)
    volumes = rng.integers(-900, 900, (3, 5, 6, 7)).astype(np.int16)
    path = tmp_path / f"all{suffix}"
    nib.Nifti1Image(volumes.T, np.diag([-2.0, -2.0, 3.0, 1.0])).to_filename(path)
    stacked, first = read_channels([path] * 3, [0.0] * 3, modalities=["mr"] * 3)
    assert np.array_equal(stacked, volumes.astype(np.float32))
    assert np.array_equal(first.array, volumes[0])
    assert read_grid(path, num_channels=3) == first.grid
    write_labels(tmp_path / "labels.nii.gz", volumes[0] > 0, first.grid, first.header)
    assert nib.load(tmp_path / "labels.nii.gz").shape == volumes[0].T.shape
    with pytest.raises(
        UserError,
        match=(
            "expected 2 channels, but the file holds 7 x 6 x 5 x 3 values; give a 4D file of 2 "
            "volumes"
        ),
    ):
        read_channels([path] * 2, [0.0] * 2)
    with pytest.raises(UserError, match="expected one 3D volume"):
        read_channels([path], [0.0])
    content = path.read_bytes()
    path.write_bytes(content[: len(content) - 150])  # the last volume is cut
    with pytest.raises(UserError, match=r"end too early|truncated or damaged"):
        read_channels([path] * 3, [0.0] * 3)


@pytest.mark.parametrize(("missing", "is_told"), [(3, False), (4, True)])
def test_a_channel_that_leaves_more_than_a_hundredth_uncovered_is_told(
    missing: int, is_told: bool
) -> None:
    """300 planes; the last ones have no voxel of the channel."""
    target = VoxelGrid((300, 3, 4), (1.0, 2.0, 3.0))
    source = VoxelGrid((300 - missing, 3, 4), target.spacing_mm)
    image, findings = place_channel(
        np.ones(source.shape, np.float32), source, target, 5.0, "image_2"
    )
    assert (
        list(map(str, findings))
        == ["1% of the scan is outside image_2 and counts as 5 there"] * is_told
    )
    assert (image[-missing:] == 5).all()
    assert (image[:-missing] == 1).all()


def test_series_and_files_belong_to_the_first_channel_and_each_has_its_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []

    def read(
        path: Path,
        series: str | None = None,
        modality: str = "ct",
        channel: int = 0,
        num_channels: int = 1,
        files: Sequence[Path] = (),
    ) -> Volume:
        calls.append((path, series, modality, channel, num_channels, files))
        return Volume(
            np.full(GRID.shape, 3, np.int16),
            GRID,
            findings=tuple(warnings_of("reading", [f"remark {len(calls)}"])),
        )

    monkeypatch.setattr("medseg.io.read.read_image", read)
    first, second = tmp_path / "a", tmp_path / "b.nii.gz"
    stacked, volume = read_channels(
        [first, second, second],
        [-1024, 0, 0],
        series="1.2",
        files=[tmp_path / "x"],
        scales=[HuScale(2.0, 1.0), HuScale(1.0, 4.0)],
        modalities=["ct", "mr"],
    )
    assert calls == [
        (first, "1.2", "ct", 0, 1, [tmp_path / "x"]),
        (second, None, "mr", 0, 2, ()),
        (second, None, "ct", 1, 2, ()),
    ]
    assert stacked[:, 0, 0, 0].tolist() == [7, 7, 3]
    assert finding_texts(volume) == ("image: remark 1", "image_1: remark 2", "image_2: remark 3")
    calls.clear()
    assert finding_texts(read_channels([first], [-1024])[1]) == ("remark 1",)


def test_several_series_of_a_further_channel_are_chosen_by_a_file(tmp_path: Path) -> None:
    images = np.arange(2 * 60).reshape(2, 3, 4, 5)
    heights_mm = [0.0, 2.5, 5.0]
    save_stack(tmp_path / "first", images[0], heights_mm)
    files = []
    for number, image in enumerate(images):
        files += save_stack(tmp_path / "two", image, heights_mm, uid=f"1.2.{number}")
    outside = [-1024, -1024]
    with pytest.raises(UserError, match="for image_1, give one file of its series as the path"):
        read_channels([tmp_path / "first", tmp_path / "two"], outside)
    channels, _ = read_channels([tmp_path / "first", files[-1]], outside)
    assert np.array_equal(channels, images)
