from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import ndimage
from torch import Tensor

from medseg.anatomy import disease
from medseg.anatomy.disease import (
    DENSE_HU,
    FAT_HU,
    FLUID_HU,
    KINDS,
    MENISCUS_MM,
    RIM_MM,
    WALL_MM,
    Disease,
    Fluid,
    Lesion,
    Missing,
    Place,
    _depth_below_wall,
    _paint_lesion,
    _pool,
    paint_disease,
    paint_fluid,
)
from medseg.data.sampler import sample_rng

SPACING_MM = (2.5, 1.5, 2.0)
SHAPE = (40, 60, 50)
WINDOW_HU = (-1000.0, 400.0)
ORGANS = (1, 2)
PLACE = {"window_hu": WINDOW_HU, "organ_values": ORGANS}


@functools.cache
def drawn_chest() -> tuple[Tensor, Tensor]:
    """Two ellipsoids of lung (-850 HU) in soft tissue (40 HU); label 1 at larger x."""
    z, y, x = np.ogrid[: SHAPE[0], : SHAPE[1], : SHAPE[2]]
    labels = np.zeros(SHAPE, dtype=np.uint8)
    for value, middle_x in ((1, 37), (2, 12)):
        labels[((z - 20) / 17) ** 2 + ((y - 30) / 25) ** 2 + ((x - middle_x) / 10) ** 2 < 1] = value
    image = np.where(labels > 0, -850, 40) + np.random.default_rng(0).normal(0, 10, SHAPE)
    return torch.from_numpy(image.astype(np.float32)), torch.from_numpy(labels)


def chest() -> tuple[Tensor, Tensor]:
    """Copy the chest, so that a test can paint it."""
    hu, labels = drawn_chest()
    return hu.clone(), labels.clone()


def painted(kind: str, n: int) -> tuple[Tensor, Tensor]:
    image, labels = chest()
    paint_disease(image, labels, 1, [kind], sample_rng(3, n), SPACING_MM)
    return image, labels


@pytest.mark.parametrize("kind", KINDS)
def test_lung_becomes_denser_and_nothing_beyond_its_rim_changes(kind: str) -> None:
    image, labels = chest()
    away_mm = ndimage.distance_transform_edt(labels.numpy() != 1, sampling=SPACING_MM)
    shares = []
    for n in range(20):
        new, _ = painted(kind, n)
        assert bool((new >= image).all())
        changed = (new != image).numpy()
        # A rim of whole voxels, along each axis.
        assert away_mm[changed].max() < np.linalg.norm([RIM_MM + mm for mm in SPACING_MM])
        shares.append((new - image)[labels == 1].gt(100).float().mean().item())
    assert min(shares) > 0
    assert 0.02 < np.mean(shares) < 0.8


@pytest.mark.parametrize("kind", KINDS)
def test_the_outline_stays(kind: str) -> None:
    assert all(torch.equal(painted(kind, n)[1], chest()[1]) for n in range(10))


@pytest.mark.parametrize(
    ("kind", "low", "high"),
    [
        ("consolidation", 30, 110),
        ("mass", 30, 90),
        ("ground_glass", -650, -300),
    ],
)
def test_the_core_has_the_density_of_its_kind(kind: str, low: float, high: float) -> None:
    medians = []
    for n in range(20):
        new, labels = painted(kind, n)
        core = ndimage.binary_erosion(
            ((new - chest()[0]) > 100).numpy() & (labels == 1).numpy(), iterations=4
        )
        if core.any():
            medians.append(float(np.median(new.numpy()[core])))
    assert len(medians) > 3
    assert low - 20 < min(medians)
    assert max(medians) < high + 20


def test_a_sample_depends_on_its_generator_alone_and_without_disease_draws_nothing() -> None:
    def sample(**values: Any) -> tuple[Tensor, np.random.Generator]:
        image, labels = chest()
        rng = sample_rng(5, 1)
        arguments = {"probability": 1.0, "kinds": list(KINDS), **PLACE}
        unit = ((image + 300) / 700)[None]
        return Disease(**{**arguments, **values})(unit, labels, rng, SPACING_MM)[0], rng

    assert torch.equal(sample()[0], sample()[0])
    assert not torch.equal(sample()[0], sample(probability=0.0)[0])
    assert sample(probability=0.0)[1].random() == sample_rng(5, 1).random()
    image, _ = chest()
    assert torch.equal(sample(probability=0.0)[0][0], (image + 300) / 700)
    # In units of the window the same lesions.
    expected, labels = chest()
    rng = sample_rng(5, 1)
    rng.random()
    paint_disease(expected, labels, [1, 2][int(rng.integers(2))], list(KINDS), rng, SPACING_MM)
    assert torch.allclose(sample()[0][0] * 700 - 300, expected, atol=0.01)


def test_a_sample_that_cannot_be_painted_stays_in_the_range_of_the_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(disease, "paint_disease", fail)
    image, labels = chest()
    unit = ((image + 300) / 700)[None]
    effect = Disease(probability=1.0, kinds=list(KINDS), **PLACE)
    before = unit.clone()
    with pytest.raises(MemoryError):
        effect(unit, labels, sample_rng(5, 1), SPACING_MM)
    assert torch.allclose(unit, before, atol=1e-5)


@pytest.mark.parametrize(("each_lung", "one", "both"), [(False, 0.3, 0.0), (True, 0.6, 0.36)])
def test_one_lung_is_painted_or_each_with_the_probability(
    each_lung: bool, one: float, both: float
) -> None:
    hu, labels = (volume[::2, ::2, ::2].contiguous() for volume in chest())
    spacing_mm = tuple(2 * mm for mm in SPACING_MM)
    image = ((hu + 300) / 700)[None]
    disease = Disease(0.6, kinds=["collapse"], each_lung=each_lung, **PLACE)
    denser = [
        disease(image.clone(), labels, sample_rng(2, n), spacing_mm)[0][0] - image[0] > 0.1
        for n in range(200)
    ]
    left, right = (
        torch.tensor([bool(voxels[labels == value].any()) for voxels in denser]) for value in (1, 2)
    )
    # The standard error of a share is 0.035 at most.
    shares = [float(painted.float().mean()) for painted in (left, right, left & right)]
    assert shares == pytest.approx([one, one, both], abs=0.1)


@pytest.mark.parametrize("content", ["nothing", "liver", "ignored"])
def test_what_is_no_lung_stays(content: str) -> None:
    hu, labels = chest()
    image = ((hu + 300) / 700)[None]
    if content == "nothing":
        labels.zero_()
    elif content == "liver":
        image[:, labels > 0] = 0.5
    else:
        labels[labels > 0] = 3
    before = labels.clone()
    disease = Disease(1.0, kinds=list(KINDS), **PLACE)
    for n in range(10):
        new, target = disease(image.clone(), labels.clone(), sample_rng(0, n), SPACING_MM)
        assert torch.allclose(new, image, atol=1e-6)
        assert torch.equal(target, before)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"kinds": ["fibrosis"]}, "fibrosis"),
        ({"kinds": []}, "disease_kinds is empty"),
        ({"window_hu": None}, "window"),
    ],
)
def test_what_cannot_be_painted_is_refused(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Disease(**{"probability": 0.5, "kinds": ["mass"], **PLACE, **values})


def test_airways_and_vessels_go_on_inside_some_dense_lesions() -> None:
    num_open, num_vessels = 0, 0
    for n in range(20):
        new, labels = painted("collapse", n)
        dense = ((new - chest()[0]) > 100).numpy() & (labels == 1).numpy()
        filled = ndimage.binary_closing(dense, iterations=2) & (labels == 1).numpy()
        core = ndimage.binary_erosion(filled, iterations=2)
        median_hu = float(np.median(new.numpy()[dense]))
        num_open += bool((new.numpy()[core] < -400).sum() > 5)
        num_vessels += bool((new.numpy()[core] > median_hu + 80).sum() > 5)
    assert 3 < num_open < 20
    assert 0 < num_vessels < 20


def test_a_lesion_hides_the_lung_but_for_airways_and_vessels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = (4, 6, 8)
    vessel, airway = torch.zeros(shape), torch.zeros(shape)
    vessel[:, :2], airway[:, 4:] = 1.0, 1.0
    branches = [vessel, airway]
    monkeypatch.setattr(disease, "BRANCHED_SHARE", 1.0)
    monkeypatch.setattr(disease, "_branches", lambda *_: branches.pop(0))
    monkeypatch.setattr(disease, "_texture", lambda _: torch.zeros(shape))
    inside = torch.ones(shape)
    inside[..., :2] = 0.0
    nowhere: Any = (None, None, None)
    place = Place(nowhere, inside > 0, inside, torch.zeros(shape), sample_rng(1, 1))
    depth_mm = torch.full(shape, 9.0)
    depth_mm[..., 2:4] = -9.0
    image_hu = torch.full(shape, -850.0)
    image_hu[..., -1] = 500.0
    _paint_lesion(image_hu, Lesion(depth_mm, 50.0, 4.0, True), place, SPACING_MM)
    assert branches == []
    dense = image_hu[..., 4:-1]
    assert bool((dense[:, 2:4] == 50.0).all())
    assert bool((dense[:, 4:] == -850.0).all()), "air stays in an airway"
    assert 60.0 <= float(dense[:, :2].min()) <= float(dense[:, :2].max()) <= 200.0
    assert bool((image_hu[..., :4] == -850.0).all()), "beyond the reach, or outside the lesion"
    assert bool((image_hu[..., -1] == 500.0).all()), "denser than the lesion"


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_depth_below_a_flat_wall_is_the_distance_from_it(axis: int) -> None:
    organ = torch.zeros((60, 60, 60), dtype=torch.bool)
    organ.movedim(axis, 0)[30:] = True
    depth_mm = _depth_below_wall(organ, SPACING_MM).movedim(axis, 0)
    assert float((depth_mm - depth_mm[:, :1, :1]).abs().max()) < 1e-3, "the edge is no wall"
    away_mm = (torch.arange(60) - 29.5) * SPACING_MM[axis]
    expected_mm = away_mm.clamp(0.0, WALL_MM)
    assert float((depth_mm[:, 0, 0] - expected_mm).abs().max()) < SPACING_MM[axis]


def with_fluid(n: int) -> tuple[Tensor, Tensor]:
    image, labels = chest()
    paint_fluid(image, labels, 1, sample_rng(4, n), SPACING_MM)
    return image, labels


def test_fluid_becomes_background_and_no_other_label_changes() -> None:
    _, before = chest()
    shares = []
    for n in range(30):
        _, after = with_fluid(n)
        is_fluid = after != before
        assert bool((before[is_fluid] == 1).all())
        assert bool((after[is_fluid] == 0).all())
        shares.append(float(is_fluid.sum() / (before == 1).sum()))
    # Small and large ones.
    assert min(shares) < 0.1
    assert max(shares) > 0.3
    assert np.median(shares) < 0.5


def test_fluid_has_the_density_of_water_and_what_it_squeezes_that_of_dense_lung() -> None:
    medians, dense_hu = [], []
    for n in range(30):
        image, after = with_fluid(n)
        before_image, before = chest()
        is_fluid = ((before == 1) & (after == 0)).numpy()
        core = ndimage.binary_erosion(is_fluid, iterations=2)
        medians += [float(np.median(image.numpy()[core]))] if core.sum() > 20 else []
        dense = (after == 1).numpy() & (image - before_image > 850).numpy()
        dense = ndimage.binary_erosion(dense, iterations=2)
        dense_hu += [float(np.median(image.numpy()[dense]))] if dense.sum() > 20 else []
    assert len(medians) > 10
    assert FLUID_HU[0] - 15 < min(medians) < max(medians) < FLUID_HU[1] + 15
    assert len(dense_hu) > 3
    assert DENSE_HU[0] - 20 < min(dense_hu) < max(dense_hu) < DENSE_HU[1] + 20


def test_fluid_reaches_the_wall_lies_at_the_back_and_leaves_what_is_beyond_the_rim() -> None:
    before_image, before = chest()
    away_mm = ndimage.distance_transform_edt(before.numpy() != 1, sampling=SPACING_MM)
    wall_mm = ndimage.distance_transform_edt(before.numpy() == 1, sampling=SPACING_MM)
    height = np.broadcast_to(np.arange(SHAPE[1])[None, :, None], SHAPE)
    behind = []
    for n in range(30):
        image, after = with_fluid(n)
        is_fluid = ((before == 1) & (after == 0)).numpy()
        changed = (image != before_image).numpy()
        assert away_mm[changed].max() < np.linalg.norm([RIM_MM + mm for mm in SPACING_MM])
        if is_fluid.sum() > 50:
            assert wall_mm[is_fluid].min() < 3.0
            behind.append(height[is_fluid].mean() - height[(before == 1).numpy()].mean())
    assert np.mean(behind) > 4.0


def test_fluid_climbs_at_the_wall_and_less_with_the_square_of_the_distance() -> None:
    shape = (4, 20, 6)
    z, y, x = (2.0 * torch.arange(float(size)) for size in shape)
    climbs_mm = []
    for n in range(10):

        def pool(wall_mm: Tensor, number: int = n) -> Tensor:
            organ = torch.ones(shape, dtype=torch.bool)
            points_mm = (z[:, None, None], y[:, None], x)
            rng = sample_rng(9, number)
            return _pool(Place(points_mm, organ, organ.float(), torch.zeros(shape), rng), wall_mm)

        shares = torch.tensor([0.0, 0.5, 1.0]).repeat_interleave(2).expand(shape)
        # What is drawn is the same, and a level is one number: the climb alone is left.
        rise_mm = pool(WALL_MM * shares) - pool(torch.full(shape, WALL_MM))
        at_wall, half_way, deep = (float(rise_mm[..., place].mean()) for place in (0, 2, 4))
        assert float((rise_mm - rise_mm[:1, :1]).abs().max()) < 1e-3
        assert half_way - deep == pytest.approx(0.25 * (at_wall - deep), abs=1e-3)
        climbs_mm.append(at_wall - deep)
    assert 0 <= min(climbs_mm) < max(climbs_mm) <= MENISCUS_MM
    assert max(climbs_mm) > 0.5 * MENISCUS_MM


@pytest.mark.parametrize(("drawn", "share"), [(0.0, 0.02), (1.0, 0.5), (0.25, 0.08)])
def test_what_sinks_to_the_back_is_a_share_of_the_organ_up_to_the_largest(
    drawn: float, share: float
) -> None:
    shape = (10, 50, 10)
    z, y, x = (2.0 * torch.arange(float(size)) for size in shape)
    organ = torch.ones(shape, dtype=torch.bool)
    rng: Any = SimpleNamespace(random=lambda: drawn, uniform=lambda *_, size: np.zeros(size))
    points_mm = (z[:, None, None], y[:, None], x)
    place = Place(points_mm, organ, organ.float(), torch.zeros(shape), rng)
    is_below = place.lowest(0.5, 1.0, 4.0) >= 0
    assert float(is_below.float().mean()) == pytest.approx(share, abs=0.02)
    assert bool(is_below[:, -1].all()), "y runs to the back"


def test_without_fluid_nothing_is_drawn_and_with_it_each_lung_with_its_probability() -> None:
    hu, labels = chest()
    image = ((hu + 300) / 700)[None]
    rng = sample_rng(5, 1)
    new, after = Fluid(0.0, None, ORGANS)(image.clone(), labels.clone(), rng, SPACING_MM)
    assert torch.equal(new, image)
    assert torch.equal(after, labels)
    assert rng.random() == sample_rng(5, 1).random()

    is_wet = []
    for n in range(60):
        rng = sample_rng(6, n)
        _, after = Fluid(0.5, WINDOW_HU, ORGANS)(image.clone(), labels.clone(), rng, SPACING_MM)
        is_wet.append([bool((after[labels == value] == 0).any()) for value in (1, 2)])
    # The standard error of a share is 0.065.
    assert np.mean(is_wet, axis=0) == pytest.approx([0.5, 0.5], abs=0.2)
    assert np.all(is_wet, axis=1).mean() == pytest.approx(0.25, abs=0.17)


def test_fluid_leaves_what_is_no_lung() -> None:
    hu, labels = chest()
    image = ((hu + 300) / 700)[None]
    image[:, labels == 1] = 0.5
    labels[labels == 2] = 3
    fluid = Fluid(1.0, WINDOW_HU, ORGANS)
    new, after = fluid(image.clone(), labels.clone(), sample_rng(0, 0), SPACING_MM)
    assert torch.allclose(new, image, atol=1e-6)
    assert torch.equal(after, labels)


@pytest.mark.parametrize(
    ("effect", "key"),
    [
        (lambda share, window: Fluid(share, window, ORGANS), "fluid"),
        (lambda share, window: Missing(share, window, ORGANS), "missing"),
        (lambda share, window: Disease(share, window, ORGANS, kinds=list(KINDS)), "disease"),
    ],
)
def test_an_effect_in_hu_needs_them(effect: Any, key: str) -> None:
    with pytest.raises(ValueError, match=rf"^{key}_probability=0\.5 needs HU"):
        effect(0.5, None)
    assert effect(0.0, None).window_hu is None
    assert effect(0.5, WINDOW_HU).window_hu == WINDOW_HU


def test_a_missing_lung_is_background_of_one_density_and_the_other_stays() -> None:
    hu, labels = chest()
    image = ((hu + 300) / 700)[None]
    missing = Missing(1.0, WINDOW_HU, ORGANS)
    gone = []
    for n in range(30):
        new, after = missing(image.clone(), labels.clone(), sample_rng(7, n), SPACING_MM)
        (kept,) = (value for value in ORGANS if (after == value).any())
        is_gone = labels == 3 - kept
        assert torch.equal(after == kept, labels == kept)
        assert not after[is_gone].any()
        assert torch.allclose(new[0][labels == kept], image[0][labels == kept], atol=1e-6)
        filling_hu = (new[0] * 700 - 300)[is_gone]
        ranges_hu = (FLUID_HU, FAT_HU)
        # The mean over thousands of voxels has almost no noise, but the slow changes of density.
        assert any(low - 4 < filling_hu.mean() < high + 4 for low, high in ranges_hu)
        gone.append(3 - kept)
    assert set(gone) == set(ORGANS)


def test_what_is_denser_beside_a_missing_lung_stays() -> None:
    """Ribs in the rim of a lung are not replaced by what fills its place."""
    hu, labels = chest()
    hu[labels == 0] = 700.0
    missing = Missing(1.0, (-1000.0, 1000.0), ORGANS)
    new, _ = missing((hu / 1000)[None].clone(), labels.clone(), sample_rng(7, 0), SPACING_MM)
    assert torch.allclose(new[0][labels == 0] * 1000, hu[labels == 0], atol=0.01)


def test_the_rim_of_a_missing_lung_has_its_width_along_each_axis() -> None:
    """In voxels it is as many times wider as they are smaller."""
    spacing_mm = (4.0, 1.9, 0.5)
    labels = torch.zeros((20, 30, 60), dtype=torch.uint8)
    labels[6:14, 10:20, 20:40] = 1
    labels[0, 0, 0] = 2
    hu = torch.where(labels > 0, -850.0, -1000.0)
    image = (hu / 1000)[None]
    missing = Missing(1.0, (-1000.0, 1000.0), (1, 2))
    for n in range(20):
        new, after = missing(image.clone(), labels.clone(), sample_rng(1, n), spacing_mm)
        if (after == 1).any():
            continue  # the other one is gone
        changed = (new - image)[0].abs().gt(0.1).nonzero()
        changed = changed[changed.sum(1) > 10]
        assert changed.min(0).values.tolist() == [5, 8, 16]
        assert changed.max(0).values.tolist() == [14, 21, 43]
        return
    pytest.fail("the large lung was never chosen")


def test_a_lone_lung_is_never_missing_and_without_the_effect_nothing_is_drawn() -> None:
    hu, labels = chest()
    image = ((hu + 300) / 700)[None]
    rng = sample_rng(5, 1)
    new, after = Missing(0.0, None, ORGANS)(image.clone(), labels.clone(), rng, SPACING_MM)
    assert torch.equal(new, image)
    assert torch.equal(after, labels)
    assert rng.random() == sample_rng(5, 1).random()

    labels[labels == 2] = 3
    missing = Missing(1.0, WINDOW_HU, ORGANS)
    new, after = missing(image.clone(), labels.clone(), sample_rng(0, 0), SPACING_MM)
    assert torch.equal(new, image)
    assert torch.equal(after, labels)


def with_airway() -> tuple[Tensor, Tensor]:
    """A chest with a bronchus (3) of -980 HU that touches the left lung."""
    image, labels = chest()
    bronchus = np.s_[15:25, 28:32, 22:30]
    part = labels[bronchus]
    image[bronchus][part == 0] = -980.0
    part[part == 0] = 3
    return image, labels


@pytest.mark.parametrize("effect", [Disease(1.0, kinds=list(KINDS), **PLACE), Fluid(1.0, **PLACE)])
def test_the_airway_beside_a_lung_is_neither_painted_nor_drawn(effect: Disease | Fluid) -> None:
    hu, labels = with_airway()
    image = ((hu + 300) / 700)[None]
    is_airway = labels == 3
    num_changed = 0
    for n in range(40):
        new, after = effect(image.clone(), labels.clone(), sample_rng(1, n), SPACING_MM)
        assert torch.allclose(new[0][is_airway], image[0][is_airway], atol=1e-6)
        assert torch.equal(after == 3, is_airway)
        num_changed += bool((new - image > 0.1).any())
    assert num_changed == 40
