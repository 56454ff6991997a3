"""HU scales: types and values of rescaled images."""

from __future__ import annotations

import numpy as np
import pytest

from medseg.preprocess.scale import AS_STORED, HuScale


def test_values_that_are_hu_stay_untouched() -> None:
    image = np.array([[[-1024, 3071]]], np.int16)
    assert AS_STORED.apply(image) is image


@pytest.mark.parametrize(
    ("scale", "dtype", "values"),
    [
        (HuScale(offset=-1024.0), np.int16, [-33792, -1024, 0, 31743]),
        (HuScale(2.0, 1.0), np.int16, [-65535, 1, 2049, 65535]),
        (HuScale(offset=-0.5), np.float32, [-32768.5, -0.5, 1023.5, 32766.5]),
        (HuScale(0.5, 10.0), np.float32, [-16374.0, 10.0, 522.0, 16393.5]),
    ],
)
def test_the_scale_is_exact_and_whole_where_it_can_be(
    scale: HuScale, dtype: type, values: list[float]
) -> None:
    image = np.array([-32768, 0, 1024, 32767], np.int16).reshape(1, 2, 2)
    result = scale.apply(image)
    assert result.ravel().tolist() == values
    fits = min(values) >= -32768 and max(values) <= 32767
    assert result.dtype == (dtype if fits or dtype == np.float32 else np.float32)
    assert scale.apply(image[..., :1] // 64).dtype == dtype
    assert image.ravel().tolist() == [-32768, 0, 1024, 32767]
    assert scale.apply(image.astype(np.float32)).dtype == np.float32


def test_fractions_of_a_file_are_kept() -> None:
    image = np.array([[[0.25, -3.5]]], np.float32)
    assert HuScale(2.0, 1.0).apply(image).ravel().tolist() == [1.5, -6.0]
