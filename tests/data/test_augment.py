"""Augmentation effects: each effect alone, and the affine resampling against references."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from ct_effects import CT, effects
from scipy import ndimage
from torch import Tensor

from medseg.data import augment
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


# Nothing is missing: the tests follow both organs.
ALWAYS, NEVER = effects(flip_axes=[0, 1], **ALL | {"missing_probability": 0.0}), never()


def sample() -> tuple[Tensor, Tensor]:
    """Bright tissue with two dark blocks of different sizes, label 1 at larger x; new each call."""
    labels = torch.zeros(SHAPE, dtype=torch.uint8)
    labels[9:25, 8:17, 28:38] = 1
    labels[7:26, 8:26, 6:19] = 2
    image = (
        torch.where(labels > 0, -0.8, 0.3)
        + torch.rand(SHAPE, generator=torch.Generator().manual_seed(0)) * 0.1
    )
    return image[None], labels


def augmented(
    augmentation: Transforms,
    image: Tensor,
    labels: Tensor,
    rng: np.random.Generator,
    spacing_mm: tuple[float, float, float],
) -> tuple[Tensor, Tensor]:
    """Augment a whole volume as the coarse samples do: beyond its border there is air."""
    warp = augmentation.draw_warp(rng, spacing_mm)
    if warp is not None:
        image, labels = warp.apply(
            image, labels, (labels.shape[0], labels.shape[1], labels.shape[2])
        )
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


# Effects with tests of their own: fluid makes a small organ dense.
ELSEWHERE = ("low_resolution_all_axes_probability", "fluid_probability")


@pytest.mark.parametrize("name", [name for name in PROBABILITIES if name not in ELSEWHERE])
def test_each_effect_fires_alone_and_keeps_image_and_labels_together(name: str) -> None:
    num_changed = 0  # a thick slice may be thinner than the voxel, a cut may be of no slice
    for n in range(8):
        image, labels = augmented(
            never(**{name: ALL[name]}), *sample(), sample_rng(1, n), SPACING_MM
        )
        num_changed += not torch.equal(image, sample()[0])
        # What is a label is still dark beside tissue that is not (or cut to air by the field of
        # view).
        assert image[0][labels > 0].mean() < image[0][(labels == 0) & (image[0] > AIR)].mean() - 0.3
    assert num_changed >= 5


def test_flips_touch_the_named_axes_alone() -> None:
    seen = set()
    for n in range(30):
        image, labels = augmented(never(flip_axes=(0, 1)), *sample(), sample_rng(2, n), SPACING_MM)
        plain_image, plain_labels = sample()
        axes = next(
            axes
            for axes in ((), (0,), (1,), (0, 1))
            if torch.equal(labels, plain_labels.flip(axes) if axes else plain_labels)
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
    points = (
        np.einsum("ij,j...->i...", warp.matrix, offsets) + warp.shift_voxels[:, None, None, None]
    )
    points += (np.array(SHAPE)[:, None, None, None] - 1) / 2
    image, target = warp.apply(torch.from_numpy(source)[None], torch.from_numpy(labels), shape)
    expected = ndimage.map_coordinates(source, points, order=1)
    assert np.abs(image[0].numpy() - expected).max() < 0.02
    assert (target.numpy() != ndimage.map_coordinates(labels, points, order=0)).mean() < 0.03


def test_rotation_and_scale_hold_in_the_world() -> None:
    """A rotation in mm keeps lengths in mm although voxels are no cubes; a scale changes them."""
    only = never(
        affine_probability=1.0,
        shear_max=0.0,
        translation_mm=(0.0, 0.0, 0.0),
        scale_range=(1.25, 1.25),
    )
    for n in range(5):
        warp = only.draw_warp(sample_rng(0, n), SPACING_MM)
        assert warp is not None
        in_mm = warp.matrix * np.array(SPACING_MM)[:, None] / SPACING_MM
        assert np.allclose(in_mm @ in_mm.T, np.eye(3) / 1.25**2)


def test_the_margin_covers_what_the_patch_sees() -> None:
    """With the margin a patch of a constant image holds no air; one voxel less brings some."""
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
                is_tight.append(
                    float(warp.apply(ones[None].float(), ones, shape)[0].min()) < 1 - 1e-5
                )
    # In plane the last voxel is a bound that few warps spare: the corner may hit a slice just where
    # nothing is tilted.
    assert len(is_tight) > 100
    assert np.mean(is_tight) > 0.93


@pytest.mark.parametrize("angle_deg", [50, 75, 89, 90, 91, 135, 180])
@pytest.mark.parametrize("axes", [(1,), (2,), (1, 2)])
def test_a_patch_may_be_tilted_by_any_angle(axes: tuple[int, ...], angle_deg: int) -> None:
    """Against one pass of scipy, the source just as large as the margin says.

    The lines along z of a patch that is tilted by 90 degrees cross no slice of the source.
    """
    shape = (14, 12, 16)
    rotation = np.eye(3)
    for axis in axes:
        rotation = augment._rotation(axis, math.radians(angle_deg)) @ rotation
    spacing_mm = np.array([1.5, 1.0, 1.0])
    warp = Warp(rotation * spacing_mm / spacing_mm[:, None], np.array([0.5, -1.0, 0.25]))
    margin = warp.margin(shape)
    assert max(margin) < 2 * max(shape)
    source_shape = [size + 2 * more for size, more in zip(shape, margin, strict=True)]
    rng = np.random.default_rng(4)
    source = ndimage.gaussian_filter(rng.standard_normal(source_shape), 3).astype(np.float32)
    source *= 0.3 / source.std()
    labels = (source > 0.2).astype(np.uint8)
    offsets = np.stack(np.meshgrid(*[np.arange(n) - (n - 1) / 2 for n in shape], indexing="ij"))
    points = np.einsum("ij,j...->i...", warp.matrix, offsets)
    points += (warp.shift_voxels + (np.array(source_shape) - 1) / 2)[:, None, None, None]
    image, target = warp.apply(torch.from_numpy(source)[None], torch.from_numpy(labels), shape)
    expected = ndimage.map_coordinates(source, points, order=1, mode="nearest")
    expected_labels = ndimage.map_coordinates(labels, points, order=0, mode="nearest")
    assert image.is_contiguous()
    assert target.is_contiguous()
    assert np.abs(image[0].numpy() - expected).max() < 0.1
    assert (target.numpy() != expected_labels).mean() < 0.05


def test_the_identity_warp_changes_nothing() -> None:
    image, labels = sample()
    same_image, same_labels = Warp(np.eye(3), np.zeros(3)).apply(image, labels, SHAPE)
    assert torch.allclose(same_image, image, atol=1e-4)
    assert torch.equal(same_labels, labels)
    shifted, _ = Warp(np.eye(3), np.array([2.0, 0.0, -3.0])).apply(image, labels, SHAPE)
    assert torch.allclose(shifted[:, :-2, :, 3:], image[:, 2:, :, :-3], atol=1e-4)


def test_the_resolution_matrices_are_averages() -> None:
    ramp = np.arange(40.0)
    for matrix in (
        gaussian_matrix(40, 1.5),
        thick_slice_matrix(40, 3.7, 0.3),
        thick_slice_matrix(40, 55.0, 0.9),
    ):
        assert np.allclose(matrix.sum(axis=1), 1)
        assert matrix.min() >= -1e-12
    assert np.allclose((thick_slice_matrix(40, 4.0, 0.0) @ ramp)[4:-4], ramp[4:-4]), (
        "linear stays linear"
    )
    expected = ndimage.gaussian_filter1d(np.eye(40)[20], 1.5, truncate=8)
    assert np.allclose(gaussian_matrix(40, 1.5) @ np.eye(40)[20], expected, atol=1e-4)
    step = (ramp >= 20).astype(float)
    assert 2.5 < np.count_nonzero(((thick_slice_matrix(40, 4.0, 0.5) @ step) % 1) > 1e-9) < 9


def test_thick_slices_hold_every_voxel_also_at_the_end_of_the_axis() -> None:
    """Four voxels in slices of two, of which the first begins half a slice before the axis."""
    third = 1 / 3
    # The slices have the means of voxel 0, of 1 and 2, and of 3; their centres lie 1.5 apart.
    down = np.array([[1, 0, 0, 0], [0, 0.5, 0.5, 0], [0, 0, 0, 1]])
    up = np.array([[1, 0, 0], [third, 2 * third, 0], [0, 2 * third, third], [0, 0, 1]])
    assert np.allclose(thick_slice_matrix(4, 2.0, 0.5), up @ down)
    for size, slice_voxels, phase in (
        (7, 2.0, 0.0),
        (40, 3.7, 0.3),
        (40, 4.0, 0.9),
        (9, 30.0, 0.2),
    ):
        assert (thick_slice_matrix(size, slice_voxels, phase).sum(axis=0) > 0).all()


def test_thick_slices_blur_z_alone() -> None:
    effect = never(low_resolution_probability=1.0, low_resolution_mm=(8.0, 8.0))
    image = torch.full((1, *SHAPE), -0.5)
    image[:, :, 10:] = 0.5
    image[:, :, :, 30:] = 0.0
    same, _ = augmented(
        effect, image.clone(), torch.zeros(SHAPE, dtype=torch.uint8), sample_rng(0, 1), SPACING_MM
    )
    assert torch.allclose(same, image, atol=1e-5), "an image that is constant along z stays"
    image = torch.full((1, *SHAPE), -0.5)
    image[:, 14:] = 0.5
    blurred, _ = augmented(
        effect, image.clone(), torch.zeros(SHAPE, dtype=torch.uint8), sample_rng(0, 1), SPACING_MM
    )
    profile = blurred[0, :, 5, 5]
    assert ((profile > -0.49) & (profile < 0.49)).sum() >= 2
    assert bool((profile.diff() > -1e-5).all())


def test_the_window_is_shifted_within_its_bound() -> None:
    windows = np.array(
        [
            effects(window_shift_hu=30.0).draw_window(sample_rng(0, n), (-1000, 600))
            for n in range(50)
        ]
    )
    assert np.allclose(windows[:, 1] - windows[:, 0], 1600)
    assert np.abs(windows[:, 0] + 1000).max() <= 30
    assert windows[:, 0].std() > 10


def test_where_a_scan_is_cut_its_last_slice_goes_on_in_image_and_labels_alike() -> None:
    truncate = never(truncate_probability=1.0, truncate_max_fraction=0.9)
    whole = torch.linspace(-0.9, 0.9, 20)[:, None, None].expand(20, 4, 5)
    labels_of = torch.arange(20, dtype=torch.uint8)[:, None, None].expand(20, 4, 5)
    ends = set()
    for n in range(40):
        image, labels = augmented(
            truncate, whole[None].clone(), labels_of.clone(), sample_rng(0, n), SPACING_MM
        )
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
        assert (
            labels.sum()
            == math.prod(b - a for a, b in zip(low, high, strict=True))
            >= 4 * 20 * 30 / 2
        )
        faces |= {("z", "y", "x")[axis] + "low" for axis in range(3) if low[axis] > 0}
        faces |= {
            ("z", "y", "x")[axis] + "high" for axis in range(3) if high[axis] < (4, 20, 30)[axis]
        }
    assert faces == {"ylow", "yhigh", "xlow", "xhigh"}


class Scripted:
    """A generator with given draws: `random` in order, `uniform` as places between the bounds."""

    def __init__(self, randoms: list[float], places: list[Any]) -> None:
        self.randoms, self.places = list(randoms), list(places)

    def random(self) -> float:
        return self.randoms.pop(0)

    def uniform(self, low: float, high: float, size: int | None = None) -> Any:
        place = self.places.pop(0)
        assert size is None or len(place) == size
        return low + np.array(place) * (high - low) if size else low + place * (high - low)

    def standard_normal(self, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        return np.full(shape, 2.0, dtype)


def altered(
    effect: Any, randoms: list[float], places: list[Any], shape: tuple[int, int, int] = (4, 6, 8)
) -> tuple[Tensor, Tensor]:
    """Apply an effect to a ramp from -0.9 to 0.9 and labels of ones; all draws must be used."""
    image = torch.linspace(-0.9, 0.9, math.prod(shape)).reshape(1, *shape)
    rng = Scripted(randoms, places)
    result: tuple[Tensor, Tensor] = effect(
        image, torch.ones(shape, dtype=torch.uint8), rng, (2.0, 1.0, 1.5)
    )
    assert rng.randoms == rng.places == []
    return result


RISING = torch.linspace(-0.9, 0.9, 4 * 6 * 8).reshape(1, 4, 6, 8)


@pytest.mark.parametrize(
    ("effect", "randoms", "places", "expected"),
    [
        (augment.Noise(0.3, (0.1, 0.5)), [0.29], [0.25], RISING + 2 * 0.2),
        (augment.Contrast(0.3, (0.5, 1.5)), [0.29], [0.75], RISING * 1.25),
        (augment.Brightness(0.3, 0.2), [0.29], [0.75], RISING + 0.1),
        (augment.Gamma(0.3, (0.5, 2.5)), [0.29, 0.49], [0.25], 2 * (RISING / 2 + 0.5) - 1),
        (augment.Gamma(0.3, (1.0, 3.0)), [0.29, 0.49], [0.5], 2 * (RISING / 2 + 0.5) ** 2 - 1),
        (augment.Gamma(0.3, (1.0, 3.0)), [0.29, 0.5], [0.5], 1 - 2 * (0.5 - RISING / 2) ** 2),
        (augment.Gamma(0.3, (1.0, 3.0)), [0.3], [], RISING),
        (augment.Noise(0.3, (0.1, 0.5)), [0.3], [], RISING),
        (augment.Contrast(0.3, (0.5, 1.5)), [0.3], [], RISING),
        (augment.Brightness(0.3, 0.2), [0.3], [], RISING),
        (augment.Flip((0, 2)), [0.49, 0.5], [], RISING.flip(1)),
        (augment.Flip((0, 2)), [0.5, 0.49], [], RISING.flip(3)),
        (augment.Flip((0, 2)), [0.5, 0.5], [], RISING),
    ],
)
def test_an_effect_is_its_formula(
    effect: Any, randoms: list[float], places: list[float], expected: Tensor
) -> None:
    image, labels = altered(effect, randoms, places)
    torch.testing.assert_close(image, expected, atol=1e-6, rtol=0)
    assert bool(labels.all())


@pytest.mark.parametrize(
    ("randoms", "places", "power"),
    [
        ([0.3], [], lambda x: x),
        ([0.29, 0.49], [0.5], lambda x: x**2),
        ([0.29, 0.5], [0.5], lambda x: 1 - (1 - x) ** 2),
    ],
)
def test_gamma_does_not_clip_unbounded_channels(
    randoms: list[float], places: list[float], power: Any
) -> None:
    """A channel of z-scores keeps its range; the one beside it is clipped to [-1, 1]."""
    scores = torch.linspace(-2.0, 5.0, 4 * 6 * 8).reshape(4, 6, 8)
    gamma = augment.Gamma(0.3, (1.0, 3.0), unbounded_channels=(1,))
    labels = torch.ones(4, 6, 8, dtype=torch.uint8)
    rng: Any = Scripted(randoms, places)
    image, _ = gamma(torch.stack([scores, scores]), labels, rng, SPACING_MM)
    clipped = scores.clamp(-1.0, 1.0)
    torch.testing.assert_close(image[0], 2 * power(clipped / 2 + 0.5) - 1, atol=1e-5, rtol=0)
    torch.testing.assert_close(image[1], 7 * power((scores + 2) / 7) - 2, atol=1e-5, rtol=0)
    constant = torch.full((2, 4, 6, 8), 3.0)
    image, _ = gamma(constant, labels, Scripted(randoms, places), SPACING_MM)  # type: ignore[arg-type]
    assert bool((image[1] == 3.0).all())


@pytest.mark.parametrize(
    ("randoms", "place", "source"),
    [
        ([0.0, 0.49], 0.5, [2, 2, 2, 3]),
        ([0.0, 0.5], 0.5, [0, 1, 1, 1]),
        ([0.0, 0.5], 0.2, [0, 1, 2, 3]),
        ([0.4], None, [0, 1, 2, 3]),
    ],
)
def test_a_partial_scan_loses_a_share_of_its_slices(
    randoms: list[float], place: float | None, source: list[int]
) -> None:
    """At most all of four slices: a half of them is two."""
    image, _ = altered(augment.Truncate(0.4, 1.0), randoms, [] if place is None else [place])
    torch.testing.assert_close(image, RISING[:, source])


@pytest.mark.parametrize(
    ("randoms", "place", "cut"),
    [
        ([0.0, 0.49, 0.49], 0.75, np.s_[:, :2, :]),
        ([0.0, 0.49, 0.5], 0.75, np.s_[:, 4:, :]),
        ([0.0, 0.5, 0.49], 0.75, np.s_[:, :, :3]),
        ([0.0, 0.5, 0.5], 0.75, np.s_[:, :, 5:]),
    ],
)
def test_a_narrow_field_of_view_loses_a_share_of_its_rows_or_columns(
    randoms: list[float], place: float, cut: Any
) -> None:
    image, labels = altered(augment.Narrow(0.4, 0.5), randoms, [place])
    is_cut = torch.zeros(4, 6, 8, dtype=torch.bool)
    is_cut[cut] = True
    assert torch.equal(labels == 0, is_cut)
    torch.testing.assert_close(image[0], torch.where(is_cut, AIR, RISING[0]))


@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("middle", [(0.5, 0.5), (1.0, 0.0)])
def test_a_round_field_of_view_has_its_radius_and_middle(
    place: float, middle: tuple[float, float]
) -> None:
    """16 rows of 1 mm and 20 columns of 1.5 mm: half the longer side is 15 mm."""
    image, labels = altered(augment.Circle(0.4, (0.4, 0.8)), [0.39], [place, *middle], (2, 16, 20))
    radius_mm = (0.4 + 0.4 * place) * 15
    y_mm = np.arange(16) - 7.5 - 0.05 * 16 * (2 * middle[0] - 1)
    x_mm = 1.5 * (np.arange(20) - 9.5) - 0.05 * 30 * (2 * middle[1] - 1)
    inside = y_mm[:, None] ** 2 + x_mm**2 <= radius_mm**2
    assert np.array_equal(labels[1].numpy() == 1, inside)
    assert np.array_equal(image[0, 0].numpy() != AIR, inside)
    untouched, _ = altered(augment.Circle(0.4, (0.4, 0.8)), [0.4], [], (2, 16, 20))
    assert bool((untouched != AIR).all())


def test_the_resolution_of_an_axis_is_lowered_where_the_slice_is_thicker() -> None:
    """Spacing 2, 1 and 1.5 mm: slices of 1.75 mm leave z as it is, at 3 mm all axes are coarse."""
    rng = np.random.default_rng(0)
    image = torch.from_numpy(rng.normal(0, 0.3, (1, 4, 6, 8)).astype(np.float32))
    labels = torch.ones(4, 6, 8, dtype=torch.uint8)

    def lowered(randoms: list[float], places: list[float], effect: augment.Resolution) -> Tensor:
        script: Any = Scripted(randoms, places)
        found, _ = effect(image.clone(), labels, script, (2.0, 1.0, 1.5))
        assert script.randoms == script.places == []
        return found

    def along(given: Tensor, matrix: np.ndarray, axis: int) -> Tensor:
        moved = np.moveaxis(given.numpy(), axis + 1, -1) @ matrix.T
        return torch.from_numpy(np.moveaxis(moved, -1, axis + 1).astype(np.float32))

    thick = augment.Resolution(0.5, (1.0, 4.0), 0.3, 0.5, (1.0, 2.0))
    found = lowered([0.49, 0.25, 0.3, 0.5], [0.75], thick)
    torch.testing.assert_close(
        found, along(image, thick_slice_matrix(4, 3.25 / 2, 0.25), 0), atol=1e-5, rtol=0
    )
    assert torch.equal(lowered([0.49, 0.25, 0.3, 0.5], [0.25], thick), image), (
        "slices of 1.75 mm are thinner than these"
    )
    found = lowered([0.49, 0.25, 0.29, 0.5], [0.25], thick)
    expected = along(
        along(image, thick_slice_matrix(6, 1.75, 0.25), 1),
        thick_slice_matrix(8, 1.75 / 1.5, 0.25),
        2,
    )
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    found = lowered([0.5, 0.49], [0.5], thick)
    expected = image
    for axis, (size, mm) in enumerate(((4, 2.0), (6, 1.0), (8, 1.5))):
        expected = along(expected, gaussian_matrix(size, 1.5 / mm), axis)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    both = lowered([0.49, 0.25, 0.3, 0.49], [0.75, 0.5], thick)
    expected = along(image, thick_slice_matrix(4, 3.25 / 2, 0.25), 0)
    for axis, (size, mm) in enumerate(((4, 2.0), (6, 1.0), (8, 1.5))):
        expected = along(expected, gaussian_matrix(size, 1.5 / mm), axis)
    torch.testing.assert_close(both, expected, atol=1e-5, rtol=0)


def test_a_warp_is_the_product_of_its_parts_in_the_world() -> None:
    effect = augment.Affine(0.5, (40.0, 0.0, 20.0), (0.5, 1.5), 0.1, (4.0, 6.0, 8.0))
    rng: Any = Scripted([0.49], [0.75, [0.5, 1.0, 0.0], 0.75, 0.5, 0.0, [0.75, 0.5, 0.0]])
    warp = effect.draw(rng, (2.0, 1.0, 1.5))
    assert warp is not None
    assert rng.places == []
    shear = np.array([[1, 0.0, 0.1], [0, 1, -0.1], [0, 0, 1]])
    z, x = math.radians(20), math.radians(-20)
    about_z = np.array([[1, 0, 0], [0, math.cos(z), -math.sin(z)], [0, math.sin(z), math.cos(z)]])
    about_x = np.array([[math.cos(x), -math.sin(x), 0], [math.sin(x), math.cos(x), 0], [0, 0, 1]])
    in_world = about_x @ about_z @ shear / 1.25
    spacing_mm = np.array([2.0, 1.0, 1.5])
    np.testing.assert_allclose(warp.matrix, in_world * spacing_mm / spacing_mm[:, None], atol=1e-12)
    np.testing.assert_allclose(
        warp.shift_voxels, np.array([2.0, 0.0, -8.0]) / spacing_mm, atol=1e-12
    )
    assert effect.draw(Scripted([0.5], []), (2.0, 1.0, 1.5)) is None
