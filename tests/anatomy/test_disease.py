from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import ndimage
from torch import Tensor

from medseg.anatomy.disease import KINDS, RIM_MM, Disease, paint_disease
from medseg.data.sampler import sample_rng

SPACING_MM = (2.5, 1.5, 2.0)
SHAPE = (40, 60, 50)
WINDOW_HU = (-1000.0, 400.0)


def chest() -> tuple[Tensor, Tensor]:
    """Two ellipsoids of lung (-850 HU) in soft tissue (40 HU); label 1 at larger x."""
    z, y, x = np.ogrid[: SHAPE[0], : SHAPE[1], : SHAPE[2]]
    labels = np.zeros(SHAPE, dtype=np.uint8)
    for value, middle_x in ((1, 37), (2, 12)):
        labels[((z - 20) / 17) ** 2 + ((y - 30) / 25) ** 2 + ((x - middle_x) / 10) ** 2 < 1] = value
    image = np.where(labels > 0, -850, 40) + np.random.default_rng(0).normal(0, 10, SHAPE)
    return torch.from_numpy(image.astype(np.float32)), torch.from_numpy(labels)


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
    [("consolidation", -10, 70), ("mass", 10, 90), ("ground_glass", -660, -290)],
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
        rng, arguments = (
            sample_rng(5, 1),
            {"probability": 1.0, "kinds": list(KINDS), "window_hu": WINDOW_HU},
        )
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


@pytest.mark.parametrize(("each_lung", "one", "both"), [(False, 0.3, 0.0), (True, 0.6, 0.36)])
def test_one_lung_is_painted_or_each_with_the_probability(
    each_lung: bool, one: float, both: float
) -> None:
    hu, labels = chest()
    image, disease = (
        ((hu + 300) / 700)[None],
        Disease(0.6, ["collapse"], WINDOW_HU, each_lung=each_lung),
    )
    denser = [
        disease(image.clone(), labels, sample_rng(2, n), SPACING_MM)[0][0] - image[0] > 0.1
        for n in range(200)
    ]
    left, right = (
        torch.tensor([bool(voxels[labels == value].any()) for voxels in denser]) for value in (1, 2)
    )
    # The standard error of a share is 0.035 at most.
    found = [float(painted.float().mean()) for painted in (left, right, left & right)]
    assert found == pytest.approx([one, one, both], abs=0.1)


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
    disease = Disease(1.0, list(KINDS), WINDOW_HU, ignore_label=3)
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
        Disease(**{"probability": 0.5, "kinds": ["mass"], "window_hu": WINDOW_HU, **values})
