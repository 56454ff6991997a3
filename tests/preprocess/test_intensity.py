"""Intensity maps: the window ends become -1 and 1; statistics are of the foreground."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch

from medseg.preprocess.intensity import (
    Intensity,
    foreground,
    intensity_of,
    normalise,
    normalise_hu,
    percentile,
    window,
    zscore,
)


@pytest.mark.parametrize("dtype", [np.int16, np.float32, np.float64])
def test_window_is_linear_and_clipped(dtype: type) -> None:
    image_hu = np.array([-3000, -1000, -350, 300, 3000], dtype=dtype)
    before = image_hu.copy()
    image = normalise_hu(image_hu, (-1000.0, 300.0))
    assert image.dtype == np.float32
    np.testing.assert_allclose(image, [-1, -1, 0, 1, 1], atol=1e-6)
    np.testing.assert_array_equal(image_hu, before)


def test_tensors_and_arrays_agree_and_are_left_alone() -> None:
    image_hu = torch.linspace(-2000, 1000, 50).reshape(2, 5, 5)
    before = image_hu.clone()
    image = normalise_hu(image_hu, (-1000.0, 400.0))
    torch.testing.assert_close(
        image, torch.from_numpy(normalise_hu(image_hu.numpy(), (-1000.0, 400.0)))
    )
    torch.testing.assert_close(image_hu, before, rtol=0, atol=0)


def test_an_empty_window_is_refused() -> None:
    with pytest.raises(ValueError, match="window_hu"):
        normalise_hu(np.zeros(3), (100.0, 100.0))


def scan(modality: str, seed: int = 0) -> np.ndarray:
    """A ball of noise in a background of air (CT) or zeros (MR)."""
    z, y, x = np.ogrid[-6:6, -10:10, -12:12]
    body = z**2 + y**2 + x**2 < 64
    values = np.random.default_rng(seed).normal(300, 40, body.shape).astype(np.float32)
    return np.where(body, values, np.float32(-1000 if modality == "ct" else 0))


@pytest.mark.parametrize("modality", ["ct", "mr"])
def test_zscore_is_that_of_monai_over_the_foreground(modality: str) -> None:
    from monai.transforms import NormalizeIntensity

    image = scan(modality)
    body = image > 0
    found = normalise(image, zscore(image, modality))
    assert found[body].mean() == pytest.approx(0, abs=1e-5)
    assert found[body].std() == pytest.approx(1, abs=1e-5)
    expected = NormalizeIntensity(nonzero=True)(np.where(body, image, 0))
    np.testing.assert_allclose(found[body], np.asarray(expected)[body], atol=1e-4)


@pytest.mark.parametrize("modality", ["ct", "mr"])
def test_percentiles_are_those_of_the_foreground(modality: str) -> None:
    image = scan(modality)
    low, high = np.percentile(image[image > 0], (0.5, 99.5))
    found = normalise(image, percentile(image, modality))
    np.testing.assert_allclose(
        found[image > 0], np.clip(2 * (image[image > 0] - low) / (high - low) - 1, -1, 1), atol=1e-5
    )
    assert found.min() == -1
    assert found.max() == pytest.approx(1, abs=1e-6)


def test_many_voxels_are_thinned_out(monkeypatch: pytest.MonkeyPatch) -> None:
    image = scan("mr")
    exact = percentile(image, "mr")
    monkeypatch.setattr("medseg.preprocess.intensity.MAX_VALUES", 500)
    np.testing.assert_allclose(percentile(image, "mr"), exact, rtol=0.2)


@pytest.mark.parametrize("compute", [zscore, percentile])
@pytest.mark.parametrize("value", [0, 7, -1024])
@pytest.mark.parametrize("modality", ["ct", "mr"])
def test_an_image_of_one_value_stays_finite(compute, value: int, modality: str) -> None:
    image = np.full((2, 3, 4), value, np.int16)
    assert np.isfinite(normalise(image, compute(image, modality))).all()
    assert sum(values.size for values in foreground(image, modality)) == image.size


def test_maps_are_plain_numbers_and_the_window_is_one_of_them() -> None:
    image = scan("ct")
    assert window((-1000.0, 400.0)) == Intensity(-1000.0, 400.0, 2 / 1400, -1.0)
    assert np.array_equal(
        normalise(image, window((-1000.0, 400.0))), normalise_hu(image, (-1000.0, 400.0))
    )
    for intensity in (window((-1000.0, 400.0)), zscore(image, "ct"), percentile(image, "ct")):
        assert all(type(number) is float for number in intensity)
        torch.testing.assert_close(
            normalise(torch.from_numpy(image), intensity),
            torch.from_numpy(normalise(image, intensity)),
            rtol=0,
            atol=0,
        )


def test_the_foreground_of_a_ct_begins_half_way_between_air_and_soft_tissue() -> None:
    image = np.array([[-1024, -501, -500], [0, 40, 3000]], np.int16)
    assert [values.tolist() for values in foreground(image, "ct")] == [[-500], [0, 40, 3000]]
    image = np.array([[0.0, -3.0], [0.5, 7.0], [0.0, 0.0]])
    for modality in ("mr", "other"):
        assert [values.tolist() for values in foreground(image, modality)] == [[-3], [0.5, 7], []]


def test_zscore_clips_nothing_and_percentiles_clip_at_both_ends() -> None:
    image = np.concatenate([np.zeros(50), np.arange(1.0, 1002.0)])
    mean, deviation = image[50:].mean(), image[50:].std()
    assert zscore(image, "mr") == pytest.approx((0.0, 1001.0, 1 / deviation, -mean / deviation))
    assert percentile(image, "mr") == pytest.approx((6.0, 996.0, 2 / 990, -1.0))


def test_percentiles_use_every_second_value_where_twice_as_many_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    image = np.tile([1.0, 1000.0], 500) + np.arange(1000) / 1000
    monkeypatch.setattr("medseg.preprocess.intensity.MAX_VALUES", 1000)
    assert percentile(image, "mr").high > 1000
    monkeypatch.setattr("medseg.preprocess.intensity.MAX_VALUES", 999)
    assert percentile(image, "mr").high < 3


@pytest.mark.parametrize("compute", [zscore, percentile])
@pytest.mark.parametrize("dtype", [np.int16, np.float32])
def test_no_copy_of_the_image_is_made(
    compute, dtype: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medseg.preprocess.intensity.MAX_VALUES", 1000)
    image = np.arange(100 * 100 * 100).reshape(100, 100, 100).astype(dtype)
    tracemalloc.start()
    compute(image, "mr")
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < image.size


def test_planes_are_thinned_out_as_one_list_of_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medseg.preprocess.intensity.MAX_VALUES", 300)
    image = np.random.default_rng(0).integers(0, 3, (9, 10, 11)) * np.arange(990).reshape(9, 10, 11)
    values = image[image != 0]
    expected = np.percentile(values[:: -(-values.size // 300)], (0.5, 99.5))
    assert percentile(image, "mr")[:2] == tuple(expected)


def test_the_kind_of_a_channel_chooses_its_map() -> None:
    image = scan("mr")
    assert intensity_of(image, "mr", "zscore", None) == zscore(image, "mr")
    assert (
        intensity_of(image, "ct", "percentile", None)
        == percentile(image, "ct")
        != percentile(image, "mr")
    )
    assert intensity_of(image, "ct", "window", (-100.0, 300.0)) == window((-100.0, 300.0))
