from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from ct_effects import CT, effects
from scipy import ndimage
from torch import Tensor

from medseg.data.augment import AIR, Warp, gaussian_matrix, thick_slice_matrix
from medseg.data.sampler import sample_rng
from medseg.data.transforms import Transforms

SHAPE = (28, 34, 47)
SPACING_MM = (2.5, 1.5, 2.0)
PROBABILITIES = [name for name in CT if name.endswith("_probability")]
ALL: dict[str, Any] = dict.fromkeys(PROBABILITIES, 1.0)
NONE: dict[str, Any] = dict.fromkeys(PROBABILITIES, 0.0)


def never(**values: Any) -> Transforms:
    """Effects of which none fires but those whose values are given."""
    return effects(**{**NONE, "window_shift_hu": 0.0, **values})


ALWAYS, NEVER = effects(flip_axes=[0, 1], **ALL), never()


def sample() -> tuple[Tensor, Tensor]:
    """Bright tissue with two dark blocks of different sizes, label 1 at larger x; new at every call."""
    labels = torch.zeros(SHAPE, dtype=torch.uint8)
    labels[9:25, 8:17, 28:38] = 1
    labels[7:26, 8:26, 6:19] = 2
    image = torch.where(labels > 0, -0.8, 0.3) + torch.rand(SHAPE, generator=torch.Generator().manual_seed(0)) * 0.1
    return image[None], labels


def augmented(
    augmentation: Transforms, image: Tensor, labels: Tensor, rng: np.random.Generator, spacing_mm: tuple[float, float, float]
) -> tuple[Tensor, Tensor]:
    """Augment a whole volume as the coarse samples do: beyond its border there is air."""
    warp = augmentation.draw_warp(rng, spacing_mm)
    if warp is not None:
        image, labels = warp.apply(image, labels, (labels.shape[0], labels.shape[1], labels.shape[2]))
    return augmentation.alter(image, labels, rng, spacing_mm)


def centroids(labels: Tensor) -> dict[int, np.ndarray]:
    return {v: np.argwhere(labels.numpy() == v).mean(axis=0) for v in (1, 2) if (labels == v).any()}


@pytest.mark.parametrize("augmentation", [ALWAYS, effects(flip_axes=[1])])
def test_same_generator_same_sample_and_valid_ranges(augmentation: Transforms) -> None:
    kept_both = 0
    for n in range(25):
        image, labels = augmented(augmentation, *sample(), sample_rng(5, n), SPACING_MM)
        again = augmented(augmentation, *sample(), sample_rng(5, n), SPACING_MM)
        assert torch.equal(image, again[0])
        assert torch.equal(labels, again[1])
        assert image.shape == (1, *SHAPE)
        assert labels.shape == SHAPE
        assert image.dtype == torch.float32
        assert labels.dtype == torch.uint8
        assert float(image.min()) >= -1
        assert float(image.max()) <= 1
        assert set(labels.unique().tolist()) <= {0, 1, 2}
        place = centroids(labels)
        if len(place) == 2:
            kept_both += 1
            assert place[1][2] > place[2][2], "the left block must stay at larger x"
    assert kept_both > 20


def test_what_never_fires_changes_nothing() -> None:
    image, labels = augmented(NEVER, *sample(), sample_rng(0, 0), SPACING_MM)
    assert torch.equal(image, sample()[0])
    assert torch.equal(labels, sample()[1])
    assert NEVER.draw_window(sample_rng(0, 0), (-1000.0, 600.0)) == (-1000.0, 600.0)


@pytest.mark.parametrize("name", [name for name in PROBABILITIES if "all_axes" not in name])
def test_each_effect_fires_alone_and_keeps_image_and_labels_together(name: str) -> None:
    num_changed = 0  # a thick slice may be thinner than the voxel, a cut may be of no slice
    for n in range(8):
        image, labels = augmented(never(**{name: ALL[name]}), *sample(), sample_rng(1, n), SPACING_MM)
        num_changed += not torch.equal(image, sample()[0])
        # What is a label is still dark beside tissue that is not (or cut to air by the field of view).
        assert image[0][labels > 0].mean() < image[0][(labels == 0) & (image[0] > AIR)].mean() - 0.3
    assert num_changed >= 5


def test_flips_touch_the_named_axes_alone() -> None:
    seen = set()
    for n in range(30):
        image, labels = augmented(never(flip_axes=(0, 1)), *sample(), sample_rng(2, n), SPACING_MM)
        plain_image, plain_labels = sample()
        axes = next(
            axes for axes in ((), (0,), (1,), (0, 1)) if torch.equal(labels, plain_labels.flip(axes) if axes else plain_labels)
        )
        assert torch.equal(image[0], plain_image[0].flip(axes) if axes else plain_image[0])
        seen.add(axes)
    assert seen == {(), (0,), (1,), (0, 1)}


def test_a_warp_samples_where_it_says() -> None:
    """Against scipy's single-pass interpolation of a smooth image, away from the border."""
    rng = np.random.default_rng(4)
    source = ndimage.gaussian_filter(rng.standard_normal(SHAPE), 3).astype(np.float32)
    source *= 0.3 / source.std()
    labels = (source > 0.2).astype(np.uint8)
    warp = never(affine_probability=1.0).draw_warp(rng, SPACING_MM)
    assert warp is not None
    shape = (11, 14, 17)
    offsets = np.stack(np.meshgrid(*[np.arange(n) - (n - 1) / 2 for n in shape], indexing="ij"))
    points = np.einsum("ij,j...->i...", warp.matrix, offsets) + warp.shift_voxels[:, None, None, None]
    points += (np.array(SHAPE)[:, None, None, None] - 1) / 2
    image, target = warp.apply(torch.from_numpy(source)[None], torch.from_numpy(labels), shape)
    expected = ndimage.map_coordinates(source, points, order=1)
    assert np.abs(image[0].numpy() - expected).max() < 0.02
    assert (target.numpy() != ndimage.map_coordinates(labels, points, order=0)).mean() < 0.03


def test_rotation_and_scale_hold_in_the_world() -> None:
    """A rotation in mm keeps lengths in mm although the voxels are not cubes; a scale multiplies them."""
    only = never(affine_probability=1.0, shear_max=0.0, translation_mm=(0.0, 0.0, 0.0), scale_range=(1.25, 1.25))
    for n in range(5):
        warp = only.draw_warp(sample_rng(0, n), SPACING_MM)
        assert warp is not None
        in_mm = warp.matrix * np.array(SPACING_MM)[:, None] / SPACING_MM
        assert np.allclose(in_mm @ in_mm.T, np.eye(3) / 1.25**2)


def test_the_margin_covers_what_the_patch_sees() -> None:
    """With the margin read, a patch in the middle of a constant image holds no air; a voxel less is nearly always too few."""
    shape = (12, 15, 10)
    is_tight: list[bool] = []
    for n in range(40):
        warp = never(affine_probability=1.0).draw_warp(sample_rng(0, n), SPACING_MM)
        assert warp is not None
        margin = warp.margin(shape)
        source_shape = [size + 2 * more for size, more in zip(shape, margin, strict=True)]
        ones = torch.ones(source_shape, dtype=torch.uint8)
        image, labels = warp.apply(ones[None].float(), ones, shape)
        assert torch.allclose(image, torch.ones(1, *shape), atol=1e-5)
        assert bool((labels == 1).all())
        for axis in range(3):
            if margin[axis] > 0:
                less = [size - 2 * (other == axis) for other, size in enumerate(source_shape)]
                ones = torch.ones(less, dtype=torch.uint8)
                is_tight.append(float(warp.apply(ones[None].float(), ones, shape)[0].min()) < 1 - 1e-5)
    # In plane the last voxel is a bound that few warps spare: the corner may hit a slice just where nothing is tilted.
    assert len(is_tight) > 100
    assert np.mean(is_tight) > 0.93


def test_the_identity_warp_changes_nothing() -> None:
    image, labels = sample()
    same_image, same_labels = Warp(np.eye(3), np.zeros(3)).apply(image, labels, SHAPE)
    assert torch.allclose(same_image, image, atol=1e-4)
    assert torch.equal(same_labels, labels)
    shifted, _ = Warp(np.eye(3), np.array([2.0, 0.0, -3.0])).apply(image, labels, SHAPE)
    assert torch.allclose(shifted[:, :-2, :, 3:], image[:, 2:, :, :-3], atol=1e-4)


def test_the_resolution_matrices_are_averages() -> None:
    ramp = np.arange(40.0)
    for matrix in (gaussian_matrix(40, 1.5), thick_slice_matrix(40, 3.7, 0.3), thick_slice_matrix(40, 55.0, 0.9)):
        assert np.allclose(matrix.sum(axis=1), 1)
        assert matrix.min() >= -1e-12
    assert np.allclose((thick_slice_matrix(40, 4.0, 0.0) @ ramp)[4:-4], ramp[4:-4]), "linear stays linear"
    expected = ndimage.gaussian_filter1d(np.eye(40)[20], 1.5, truncate=8)
    assert np.allclose(gaussian_matrix(40, 1.5) @ np.eye(40)[20], expected, atol=1e-4)
    step = (ramp >= 20).astype(float)
    assert 2.5 < np.count_nonzero(((thick_slice_matrix(40, 4.0, 0.5) @ step) % 1) > 1e-9) < 9


def test_thick_slices_blur_z_alone() -> None:
    effect = never(low_resolution_probability=1.0, low_resolution_mm=(8.0, 8.0))
    image = torch.full((1, *SHAPE), -0.5)
    image[:, :, 10:] = 0.5
    image[:, :, :, 30:] = 0.0
    same, _ = augmented(effect, image.clone(), torch.zeros(SHAPE, dtype=torch.uint8), sample_rng(0, 1), SPACING_MM)
    assert torch.allclose(same, image, atol=1e-5), "an image that is constant along z stays"
    image = torch.full((1, *SHAPE), -0.5)
    image[:, 14:] = 0.5
    blurred, _ = augmented(effect, image.clone(), torch.zeros(SHAPE, dtype=torch.uint8), sample_rng(0, 1), SPACING_MM)
    profile = blurred[0, :, 5, 5]
    assert ((profile > -0.49) & (profile < 0.49)).sum() >= 2
    assert bool((profile.diff() > -1e-5).all())


def test_the_window_is_shifted_within_its_bound() -> None:
    windows = np.array([effects(window_shift_hu=30.0).draw_window(sample_rng(0, n), (-1000, 600)) for n in range(50)])
    assert np.allclose(windows[:, 1] - windows[:, 0], 1600)
    assert np.abs(windows[:, 0] + 1000).max() <= 30
    assert windows[:, 0].std() > 10


def test_where_a_scan_is_cut_its_last_slice_goes_on_in_image_and_labels_alike() -> None:
    truncate = never(truncate_probability=1.0, truncate_max_fraction=0.9)
    whole = torch.linspace(-0.9, 0.9, 20)[:, None, None].expand(20, 4, 5)
    labels_of = torch.arange(20, dtype=torch.uint8)[:, None, None].expand(20, 4, 5)
    ends = set()
    for n in range(40):
        image, labels = augmented(truncate, whole[None].clone(), labels_of.clone(), sample_rng(0, n), SPACING_MM)
        kept = labels[:, 0, 0].long()
        low, high = int(kept.min()), int(kept.max())
        assert torch.equal(kept, torch.arange(20).clamp(low, high))
        assert torch.equal(image[0], whole[kept])
        ends |= {"low"} if low > 0 else {"high"} if high < 19 else {"none"}
    assert {"low", "high"} <= ends


def test_a_narrow_field_of_view_is_cut_in_image_and_labels_alike() -> None:
    narrow = never(narrow_probability=1.0, narrow_max_fraction=0.5)
    faces = set()
    for n in range(40):
        whole = torch.zeros(1, 4, 20, 30), torch.ones(4, 20, 30, dtype=torch.uint8)
        image, labels = augmented(narrow, *whole, sample_rng(0, n), SPACING_MM)
        assert torch.equal(image[0] == AIR, labels == 0)
        kept = torch.nonzero(labels)
        low, high = kept.min(0).values.tolist(), (kept.max(0).values + 1).tolist()
        assert labels.sum() == math.prod(b - a for a, b in zip(low, high, strict=True)) >= 4 * 20 * 30 / 2
        faces |= {("z", "y", "x")[axis] + "low" for axis in range(3) if low[axis] > 0}
        faces |= {("z", "y", "x")[axis] + "high" for axis in range(3) if high[axis] < (4, 20, 30)[axis]}
    assert faces == {"ylow", "yhigh", "xlow", "xhigh"}
