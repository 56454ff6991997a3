"""Laws of resampling, on oblique grids of different sizes and spacings, origin off zero."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import SimpleITK
import torch
from PIL import Image
from scipy import ndimage

from medseg.geometry.grid import VoxelBox, VoxelGrid
from medseg.preprocess import resample
from medseg.preprocess.crop import crop_padded
from medseg.preprocess.resample import (
    ANTIALIASED,
    CUBIC,
    LINEAR,
    RESAMPLINGS,
    axis_taps,
    resample_image,
    resample_labels,
)

OBLIQUE = ((0.96, -0.28, 0.0), (0.28, 0.96, 0.0), (0.0, 0.0, 1.0))
SOURCE = VoxelGrid((33, 70, 61), (2.5, 0.7, 0.8), (-11.0, 20.0, 300.0), OBLIQUE)
SPACINGS = [(1.0, 1.0, 1.0), (2.0, 2.0, 2.0), (2.5, 0.7, 0.8), (5.0, 0.35, 1.9), (0.9, 3.1, 0.81)]
OUTSIDE_HU = -1000.0


def noise_hu(shape: tuple[int, int, int]) -> np.ndarray:
    return np.random.default_rng(0).integers(-1000, 1000, shape).astype(np.int16)


def random_box(rng: np.random.Generator, shape: tuple[int, int, int]) -> VoxelBox:
    """Boxes inside, across the border of, and beyond a volume."""
    start = rng.integers(-12, np.array(shape) + 4)
    return VoxelBox(tuple(start), tuple(start + rng.integers(1, 30, 3)))


@pytest.mark.parametrize("resampling", RESAMPLINGS)
@pytest.mark.parametrize("spacing_mm", SPACINGS)
def test_a_crop_gets_the_numbers_of_the_whole(
    spacing_mm: tuple[float, float, float], resampling: str
) -> None:
    image_hu = noise_hu(SOURCE.shape)
    target = SOURCE.resampled(spacing_mm)
    whole = resample_image(image_hu, SOURCE, target, OUTSIDE_HU, resampling=resampling).numpy()
    rng = np.random.default_rng(1)
    for _ in range(25):
        box = random_box(rng, target.shape)
        crop = resample_image(
            image_hu, SOURCE, target.crop(box), OUTSIDE_HU, resampling=resampling, slices_go_on=True
        ).numpy()
        np.testing.assert_allclose(crop, crop_padded(whole, box, OUTSIDE_HU), rtol=0, atol=1e-4)
        cut = resample_image(
            image_hu, SOURCE, target.crop(box), OUTSIDE_HU, resampling=resampling
        ).numpy()
        start, stop = (
            min(max(end, 0), whole.shape[0]) - box.start[0] for end in (box.start[0], box.stop[0])
        )
        np.testing.assert_array_equal(cut[start:stop], crop[start:stop])
        assert (cut[: max(start, 0)] == OUTSIDE_HU).all()
        assert (cut[max(stop, 0) :] == OUTSIDE_HU).all()


def test_the_slab_size_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    image_hu = noise_hu(SOURCE.shape)
    for spacing_mm in SPACINGS:
        target = SOURCE.resampled(spacing_mm)
        resampled = resample_image(image_hu, SOURCE, target, OUTSIDE_HU)
        with monkeypatch.context() as patch:
            patch.setattr(resample, "SLAB_VOXELS", 1)
            patch.setattr(resample, "PART_VOXELS", 1)
            other = resample_image(image_hu, SOURCE, target, OUTSIDE_HU)
        torch.testing.assert_close(resampled, other, rtol=0, atol=1e-4)


def test_the_number_of_threads_changes_no_bit_and_stays_what_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resample, "SLAB_VOXELS", 1)  # many slabs
    image_hu, labels = noise_hu(SOURCE.shape), noise_labels(SOURCE.shape)
    target, num_threads = SOURCE.resampled((1.0, 1.0, 1.0)), torch.get_num_threads()
    results, seen = [], []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            # The inference mode belongs to this thread, not to the threads that it starts.
            with torch.inference_mode(threads == 3):
                image = resample_image(image_hu, SOURCE, target, OUTSIDE_HU)
                results.append((image.numpy(), resample_labels(labels, SOURCE, target, 4).numpy()))
            later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
            later.start()
            later.join()
            seen.append(torch.get_num_threads())
    finally:
        torch.set_num_threads(num_threads)
    assert seen == [1, 1, 3, 3]
    for result, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(result, expected)


def test_the_same_grid_is_the_identity() -> None:
    image_hu = noise_hu(SOURCE.shape)
    for resampling in RESAMPLINGS:
        result = resample_image(image_hu, SOURCE, SOURCE, OUTSIDE_HU, resampling=resampling)
        np.testing.assert_array_equal(result.numpy(), image_hu)
    box = VoxelBox((-3, 5, 40), (20, 90, 61))
    result = resample_image(image_hu, SOURCE, SOURCE.crop(box), OUTSIDE_HU, slices_go_on=True)
    np.testing.assert_array_equal(result.numpy(), crop_padded(image_hu, box, int(OUTSIDE_HU)))


@pytest.mark.parametrize("resampling", RESAMPLINGS)
@pytest.mark.parametrize("spacing_mm", SPACINGS)
def test_a_linear_ramp_stays_a_ramp_of_the_world(
    spacing_mm: tuple[float, float, float], resampling: str
) -> None:
    gradient = np.array([0.3, -1.1, 0.7])

    def ramp(grid: VoxelGrid) -> np.ndarray:
        index = np.stack(np.meshgrid(*(np.arange(size) for size in grid.shape), indexing="ij"), -1)
        return grid.index_to_world_xyz_mm(index) @ gradient

    target = SOURCE.resampled(spacing_mm)
    image, expected = ramp(SOURCE), ramp(target)
    result = resample_image(image, SOURCE, target, OUTSIDE_HU, resampling=resampling).numpy()
    # Length of a source voxel in target voxels, at least 1.
    scale = np.maximum(1.0, np.array(SOURCE.spacing_mm) / spacing_mm)
    border = tuple(slice(int(np.ceil(2 * factor)), -int(np.ceil(2 * factor))) for factor in scale)
    np.testing.assert_allclose(result[border], expected[border], rtol=0, atol=1e-4 * np.ptp(image))


@pytest.mark.parametrize("resampling", RESAMPLINGS)
@pytest.mark.parametrize("spacing_mm", SPACINGS)
def test_a_constant_stays_constant_up_to_the_edge_of_the_field_of_view(
    spacing_mm: tuple[float, float, float], resampling: str
) -> None:
    image = np.full(SOURCE.shape, 417, dtype=np.int16)
    target = SOURCE.resampled(spacing_mm)
    centres = np.stack(np.meshgrid(*(np.arange(size) for size in target.shape), indexing="ij"), -1)
    where = SOURCE.world_to_index_zyx(target.index_to_world_xyz_mm(centres))
    is_inside = ((where >= -0.5 - 1e-6) & (where <= np.array(SOURCE.shape) - 0.5 + 1e-6)).all(-1)
    result = resample_image(image, SOURCE, target, OUTSIDE_HU, resampling=resampling).numpy()
    np.testing.assert_allclose(result, np.where(is_inside, 417.0, OUTSIDE_HU), rtol=0, atol=1e-3)


@pytest.mark.parametrize("resampling", RESAMPLINGS)
@pytest.mark.parametrize("scale", [0.3, 1.0, 1.01, 4 / 3, 1.9, 2.0, 2.857, 5.3])
def test_weights_keep_sum_and_position_and_only_those_of_the_cubic_are_negative(
    scale: float, resampling: str
) -> None:
    offset = 20.123
    taps = axis_taps(40, 300, scale, offset, resampling=resampling)
    assert (taps.weight < 0).any() == (resampling == CUBIC and scale <= 1.0)
    np.testing.assert_allclose(taps.weight.sum(1), 1.0, atol=1e-6)
    position = (taps.weight * taps.index).sum(1)
    np.testing.assert_allclose(position, scale * np.arange(40) + offset, atol=2e-5)


def test_a_coarser_grid_averages_instead_of_skipping() -> None:
    """A pattern finer than the target vanishes; plain linear sampling would keep or alias it."""
    checker = np.indices(SOURCE.shape).sum(0) % 2 * 2.0 - 1.0
    grid = VoxelGrid(SOURCE.shape, (1.0, 1.0, 1.0))
    result = resample_image(checker, grid, grid.resampled((2.0, 2.0, 2.0)), 0.0).numpy()
    assert np.abs(result[2:-2, 2:-2, 2:-2]).max() < 0.02


def simple_itk_linear(image: np.ndarray, source: VoxelGrid, target: VoxelGrid) -> np.ndarray:
    """The same by SimpleITK, which knows no field of view beyond the outermost centres."""
    volume = SimpleITK.GetImageFromArray(image.astype(np.float32))
    volume.SetSpacing(source.spacing_mm[::-1])
    volume.SetOrigin(source.origin_xyz_mm)
    volume.SetDirection(np.ravel(source.direction).tolist())
    moved = (
        target.shape[::-1],
        SimpleITK.Transform(),
        SimpleITK.sitkLinear,
        target.origin_xyz_mm,
        target.spacing_mm[::-1],
    )
    return SimpleITK.GetArrayFromImage(
        SimpleITK.Resample(volume, *moved, np.ravel(target.direction).tolist(), OUTSIDE_HU)
    )


@pytest.mark.parametrize("spacing_mm", SPACINGS)
def test_linear_is_that_of_simple_itk(spacing_mm: tuple[float, float, float]) -> None:
    image_hu, target = noise_hu(SOURCE.shape), SOURCE.resampled(spacing_mm)
    result = resample_image(image_hu, SOURCE, target, OUTSIDE_HU, resampling=LINEAR).numpy()
    inner = tuple(
        slice(n, -n)
        for n in np.ceil(1.0 / np.minimum(1.0, np.array(spacing_mm) / SOURCE.spacing_mm)).astype(
            int
        )
    )
    np.testing.assert_allclose(
        result[inner], simple_itk_linear(image_hu, SOURCE, target)[inner], rtol=0, atol=1e-3
    )


@pytest.mark.parametrize(
    ("resampling", "is_same"), [(ANTIALIASED, False), (LINEAR, True), (CUBIC, False)]
)
def test_a_target_coarser_than_the_source_is_skipped_through_only_by_linear(
    resampling: str, is_same: bool
) -> None:
    """At three times the spacing the centre of each target voxel is one of the source's."""
    grid = VoxelGrid((27, 30, 33), (1.0, 1.0, 1.0))
    image_hu = noise_hu(grid.shape)
    result = resample_image(
        image_hu, grid, grid.resampled((3.0, 3.0, 3.0)), OUTSIDE_HU, resampling=resampling
    ).numpy()
    assert (result == image_hu[1::3, 1::3, 1::3]).all() == is_same


@pytest.mark.parametrize("spacing_mm", [0.3, 0.71, 0.99])
def test_cubic_is_that_of_pillow(spacing_mm: float) -> None:
    """Pillow's bicubic is Keys' with a = -1/2; it omits the taps at the border that ours clamps."""
    grid = VoxelGrid((1, 40, 51), (1.0, 1.0, 1.0))
    image_hu = noise_hu(grid.shape)
    target = grid.resampled((1.0, spacing_mm, spacing_mm))
    # Part of the source that the target covers, around the same centre, in source voxels of 1 mm.
    extent = [size * spacing_mm for size in target.shape]
    low = [(inner - outer) / 2 for inner, outer in zip(grid.shape, extent, strict=True)]
    picture = Image.fromarray(np.pad(image_hu[0].astype(np.float32), 1, "edge"))
    box = (low[2] + 1, low[1] + 1, low[2] + extent[2] + 1, low[1] + extent[1] + 1)
    expected = np.asarray(picture.resize(target.shape[:0:-1], Image.Resampling.BICUBIC, box))
    result = resample_image(image_hu, grid, target, OUTSIDE_HU, resampling=CUBIC).numpy()[0]
    border = int(np.ceil(3 / spacing_mm))
    inner = (slice(border, -border), slice(border, -border))
    np.testing.assert_allclose(result[inner], expected[inner], rtol=0, atol=1e-2)


def centroid_shift(
    image: np.ndarray, spacing_mm: tuple[float, float, float], resampling: str
) -> np.ndarray:
    """How far the centroid lies, in voxels, from where it was, there and back."""
    target = SOURCE.resampled(spacing_mm)
    there = resample_image(image, SOURCE, target, 0.0, resampling=resampling)
    back = resample_image(there, target, SOURCE, 0.0, resampling=resampling).numpy()
    before, after = (
        np.array([np.average(i, weights=a) for i in np.indices(a.shape)]) for a in (image, back)
    )
    return after - before


@pytest.mark.parametrize("spacing_mm", [(1.0, 1.0, 1.0), (2.0, 2.0, 2.0), (3.0, 1.5, 1.1)])
def test_there_and_back_keeps_the_centroid_of_a_small_object(
    spacing_mm: tuple[float, float, float],
) -> None:
    block = np.zeros(SOURCE.shape, dtype=np.float32)
    block[12:16, 30:37, 22:30] = 100.0
    # Linear skips voxels, so the object must not have edges that are sharper than the target.
    width = np.maximum(1.0, np.array(spacing_mm) / SOURCE.spacing_mm)[:, None, None, None]
    away = (np.indices(SOURCE.shape) - np.array([13.7, 33.2, 25.4])[:, None, None, None]) / width
    soft = 100.0 * np.exp(-(away**2).sum(0) / 2)
    for resampling in RESAMPLINGS:
        assert np.abs(centroid_shift(soft, spacing_mm, resampling)).max() < 0.1
        assert (
            resampling == LINEAR
            or np.abs(centroid_shift(block, spacing_mm, resampling)).max() < 0.1
        )


def test_linear_moves_a_sharp_object_by_chance_and_in_no_direction() -> None:
    shifts = []
    for z, y, x in np.ndindex(3, 3, 3):
        image = np.zeros(SOURCE.shape, dtype=np.float32)
        image[10 + z : 14 + z, 29 + y : 36 + y, 21 + x : 29 + x] = 100.0
        shifts.append(centroid_shift(image, (2.0, 2.0, 2.0), LINEAR))
    assert np.abs(np.mean(shifts, axis=0)).max() < 0.1


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_reversing_an_axis_commutes(axis: int) -> None:
    image_hu = noise_hu(SOURCE.shape)
    labels = noise_labels(SOURCE.shape)
    flips = tuple(flipped_axis == axis for flipped_axis in range(3))
    for spacing_mm in SPACINGS:
        target = SOURCE.resampled(spacing_mm)
        reverse = (SOURCE.reoriented((0, 1, 2), flips), target.reoriented((0, 1, 2), flips))
        result = resample_image(image_hu, SOURCE, target, OUTSIDE_HU).flip(axis)
        torch.testing.assert_close(
            resample_image(np.flip(image_hu, axis), *reverse, OUTSIDE_HU), result, rtol=0, atol=1e-3
        )
        torch.testing.assert_close(
            resample_labels(np.flip(labels, axis), *reverse, 4),
            resample_labels(labels, SOURCE, target, 4).flip(axis),
        )


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_voxel_that_is_half_label_and_half_background_is_background(
    axis: int, is_first: bool
) -> None:
    """On either side, or a label would grow to one side at each resampling."""
    source = VoxelGrid((2, 2, 2), (1.0, 1.0, 1.0))
    labels = np.zeros(source.shape, dtype=np.uint8)
    np.moveaxis(labels, axis, 0)[0 if is_first else 1] = 1
    assert resample_labels(labels, source, source.resampled((2.0, 2.0, 2.0)), 2).item() == 0


def noise_labels(shape: tuple[int, int, int]) -> np.ndarray:
    """Blobs of four classes."""
    blocks = np.random.default_rng(5).integers(0, 4, [-(-size // 6) for size in shape])
    for axis in range(3):
        blocks = blocks.repeat(6, axis)
    return blocks[tuple(slice(size) for size in shape)].astype(np.uint8)


def test_the_type_of_labels_changes_nothing_and_unknown_values_are_background() -> None:
    labels = noise_labels(SOURCE.shape)
    target = SOURCE.resampled((2.0, 1.0, 1.5))
    expected = resample_labels(np.where(labels < 3, labels, 0).astype(np.uint8), SOURCE, target, 3)
    for dtype in (np.uint8, np.int16, np.int64):
        wide = labels.astype(dtype)
        wide[labels == 3] = 250 if dtype == np.uint8 else 257  # 257 would be 1 as a byte
        for labels_of_type in (wide, torch.from_numpy(wide)):
            assert torch.equal(resample_labels(labels_of_type, SOURCE, target, 3), expected)


def test_labels_agree_with_the_argmax_of_one_hot_probabilities() -> None:
    labels = noise_labels(SOURCE.shape)
    one_hot = torch.from_numpy(np.stack([labels == value for value in range(4)])).float()
    for spacing_mm in SPACINGS:
        target = SOURCE.resampled(spacing_mm).crop(VoxelBox((-2, 3, 1), (10, 25, 18)))
        probs = torch.stack(
            [
                resample_image(mask, SOURCE, target, float(value == 0))
                for value, mask in enumerate(one_hot)
            ]
        )
        torch.testing.assert_close(probs.sum(0), torch.ones(target.shape))
        top = probs.topk(2, dim=0).values
        is_clear = (top[0] - top[1]) > 1e-3
        result = resample_labels(labels, SOURCE, target, 4)
        assert result.dtype == torch.uint8
        torch.testing.assert_close(result[is_clear], probs.argmax(0).to(torch.uint8)[is_clear])


def test_values_beyond_the_classes_are_background() -> None:
    labels = np.full(SOURCE.shape, 7, dtype=np.int16)
    assert not resample_labels(labels, SOURCE, SOURCE.resampled((1, 1, 1)), 3).any()


def lung_like(grid: VoxelGrid) -> np.ndarray:
    """An ellipsoid with a notch for the heart and a thin tongue (the lingula)."""
    z, y, x = (
        (np.arange(size) - (size - 1) / 2) * mm
        for size, mm in zip(grid.shape, grid.spacing_mm, strict=True)
    )
    z, y, x = z[:, None, None], y[:, None], x
    body = (z / 95) ** 2 + (y / 70) ** 2 + (x / 45) ** 2 < 1
    heart = ((z + 30) / 50) ** 2 + ((y + 35) / 40) ** 2 + ((x + 40) / 40) ** 2 < 1
    tongue = (np.abs(z + 40) < 15) & (np.abs(y + 50) < 15) & (np.abs(x) < 4)
    return ((body & ~heart) | tongue).astype(np.uint8)


@pytest.mark.parametrize("spacing_mm", [(1.0, 0.7, 0.7), (5.0, 0.8, 0.8), (3.0, 0.6, 0.9)])
def test_a_lung_there_and_back_at_2_mm_keeps_its_shape(
    spacing_mm: tuple[float, float, float],
) -> None:
    shape = tuple(round(size / mm) for size, mm in zip((210, 160, 110), spacing_mm, strict=True))
    grid = VoxelGrid(shape, spacing_mm)
    labels = lung_like(grid)
    coarse = grid.resampled((2.0, 2.0, 2.0))
    back = resample_labels(resample_labels(labels, grid, coarse, 2), coarse, grid, 2).numpy()
    dice = 2 * np.logical_and(back, labels).sum() / (back.sum() + labels.sum(dtype=int))
    assert dice >= 0.97


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_single_slice_keeps_its_values(axis: int) -> None:
    shape, spacing_mm = [9, 8, 7], [1.0, 1.2, 0.9]
    shape[axis], spacing_mm[axis] = 1, 5.0
    grid = VoxelGrid(tuple(shape), tuple(spacing_mm))
    image = noise_hu(grid.shape)
    finer = list(spacing_mm)
    finer[axis] = 1.0
    result = resample_image(image, grid, grid.resampled(tuple(finer)), OUTSIDE_HU)
    assert result.shape[axis] == 5
    np.testing.assert_allclose(result.numpy(), np.repeat(image, 5, axis), rtol=0, atol=1e-3)


def test_a_memory_map_is_read_only_where_the_crop_needs_it(tmp_path: Path) -> None:
    read: list[tuple[slice, ...]] = []

    class Watched(np.memmap):
        def __getitem__(self, key: tuple[slice, ...]) -> np.ndarray:
            read.append(key)
            return np.asarray(super().__getitem__(key))

    path = tmp_path / "image.npy"
    np.save(path, noise_hu(SOURCE.shape))
    image = np.load(path, mmap_mode="r").view(Watched)
    target = SOURCE.resampled((2.0, 2.0, 2.0))
    resample_image(image, SOURCE, target.crop(VoxelBox((10, 5, 5), (14, 12, 9))), OUTSIDE_HU)
    axis_maps = target.axis_map_to(SOURCE)
    for axis, (start, stop) in enumerate(((10, 14), (5, 12), (5, 9))):
        low = min(box[axis].start for box in read)
        high = max(box[axis].stop for box in read)
        scale, offset = axis_maps[axis]
        # The filter reaches `scale` source voxels to each side of the outermost target voxels.
        reach = max(1, scale)
        assert low >= scale * start + offset - reach - 1
        assert high <= scale * (stop - 1) + offset + reach + 2


def test_no_precision_setting_shortens_hounsfield_units() -> None:
    image_hu = noise_hu(SOURCE.shape)
    target = SOURCE.resampled((1.0, 1.0, 1.0))
    expected = resample_image(image_hu, SOURCE, target, OUTSIDE_HU)
    with torch.autocast("cpu", torch.bfloat16):
        result = resample_image(image_hu, SOURCE, target, OUTSIDE_HU)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, expected, rtol=0, atol=0)


def test_the_result_may_be_trained_on() -> None:
    """No inference tensor: a network must be able to save it for its backward pass."""
    image = resample_image(noise_hu(SOURCE.shape), SOURCE, SOURCE.resampled((3, 3, 3)), OUTSIDE_HU)
    weight = torch.ones(1, requires_grad=True)
    (image * weight).sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("kind", ["array", "float32", "tensor"])
def test_limits_clip_what_is_read_and_leave_the_scan_alone(kind: str) -> None:
    """The same as a clipped copy, also at the border of what is clipped."""
    image_hu = noise_hu(SOURCE.shape) * 4
    image: np.ndarray | torch.Tensor = image_hu if kind == "array" else image_hu.astype(np.float32)
    image = torch.from_numpy(image) if kind == "tensor" else image
    target = SOURCE.resampled((2.0, 1.0, 1.0))
    expected = resample_image(np.clip(image_hu, -1024, 3071), SOURCE, target, OUTSIDE_HU)
    assert torch.equal(
        resample_image(image, SOURCE, target, OUTSIDE_HU, limits=(-1024, 3071)), expected
    )
    np.testing.assert_array_equal(np.asarray(image), image_hu)


def test_wrong_shape_and_other_axes_are_refused() -> None:
    with pytest.raises(ValueError, match="shape"):
        resample_image(np.zeros((3, 3, 3)), SOURCE, SOURCE, 0.0)
    with pytest.raises(ValueError, match="axes"):
        resample_image(np.zeros(SOURCE.shape), SOURCE, VoxelGrid((3, 3, 3), (1, 1, 1)), 0.0)


def test_slabs_are_small_and_write_each_voxel_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded: the first filter leaves little of a slab; together they are the field."""
    monkeypatch.setattr(resample, "SLAB_VOXELS", 40_000)
    for spacing_mm in SPACINGS:
        target = SOURCE.resampled(spacing_mm)
        written = np.zeros(target.shape, dtype=int)
        for slab in resample.plan_slabs(SOURCE, target):
            written[slab.target] += 1
            depth, height, width = (along.stop - along.start for along in slab.source)
            num_planes, num_rows, _ = (along.stop - along.start for along in slab.target)
            z_scale, y_scale, _ = np.divide(spacing_mm, SOURCE.spacing_mm)
            if z_scale > y_scale:
                num_left, plane = num_planes * height * width, height * width
            else:
                num_left, plane = depth * num_rows * width, num_rows * width
            # The filter's reach at both ends comes on top.
            reach = 2 * max(1.0, z_scale) + 1
            assert num_left <= 40_000 + reach * plane
        assert written.max() == 1
        assert np.array_equal(
            written == 1, resample_image(np.ones(SOURCE.shape), SOURCE, target, 0.0).numpy() > 0.5
        )


# Thin and thick slices, planes coarser than the slices are apart, and what no scanner should make.
EXTREME_SPACINGS = [
    (0.8, 0.7, 0.7),
    (2.5, 0.7, 0.8),
    (4.25, 0.9, 0.9),
    (8.0, 0.6, 0.6),
    (10.0, 0.5, 0.5),
    (0.6, 5.0, 5.0),
]


@pytest.mark.parametrize("spacing_mm", EXTREME_SPACINGS)
def test_no_part_of_6_mm_is_lost_on_the_way_to_2_mm_and_back(
    spacing_mm: tuple[float, float, float],
) -> None:
    shape = tuple(round(72 / mm) for mm in spacing_mm)
    grid = VoxelGrid(shape, spacing_mm, (-11.0, 20.0, 300.0), OBLIQUE)
    # The least whole number of voxels that is 6 mm, one part in each cell of 24 mm, anywhere in it.
    size = np.ceil(6.0 / np.array(spacing_mm) - 1e-9).astype(int)
    cell = np.floor(24.0 / np.array(spacing_mm)).astype(int)
    rng = np.random.default_rng(3)
    labels, parts = np.zeros(shape, dtype=np.uint8), []
    for number in np.ndindex(3, 3, 3):
        low = np.array(number) * cell + rng.integers(0, np.maximum(1, cell - size - 1))
        parts.append(
            tuple(slice(start, start + length) for start, length in zip(low, size, strict=True))
        )
        labels[parts[-1]] = 1 + len(parts) % 3
    coarse = grid.resampled((2.0, 2.0, 2.0))
    there = resample_labels(labels, grid, coarse, 4)
    back = resample_labels(there, coarse, grid, 4).numpy()
    for part in parts:
        assert (back[part] == labels[part]).any()
    assert ndimage.label(there.numpy())[1] >= len(parts)
    for value in (1, 2, 3):
        assert set(np.unique(back[labels == value])) <= {0, value}


@pytest.mark.parametrize("spacing_mm", EXTREME_SPACINGS)
def test_extreme_spacings_keep_ramp_and_place(spacing_mm: tuple[float, float, float]) -> None:
    shape = tuple(max(6, round(60 / mm)) for mm in spacing_mm)
    grid = VoxelGrid(shape, spacing_mm, (-11.0, 20.0, 300.0), OBLIQUE)
    target = grid.resampled((2.0, 2.0, 2.0))
    index = [
        np.stack(np.meshgrid(*map(np.arange, grid_of_side.shape), indexing="ij"), -1)
        for grid_of_side in (grid, target)
    ]
    ramp, expected = (
        grid_of_side.index_to_world_xyz_mm(at) @ np.array([0.3, -1.1, 0.7])
        for grid_of_side, at in zip((grid, target), index, strict=True)
    )
    result = resample_image(ramp, grid, target, 0.0).numpy()
    inner = tuple(
        slice(n, -n) for n in np.ceil(2 * np.maximum(1.0, np.array(spacing_mm) / 2.0)).astype(int)
    )
    assert result[inner].size
    np.testing.assert_allclose(result[inner], expected[inner], rtol=0, atol=1e-4 * np.ptp(ramp))
