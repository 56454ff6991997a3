"""The window's ends become -1 and 1, whatever the input's type."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from medseg.preprocess.intensity import normalise_hu


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
    torch.testing.assert_close(image, torch.from_numpy(normalise_hu(image_hu.numpy(), (-1000.0, 400.0))))
    torch.testing.assert_close(image_hu, before, rtol=0, atol=0)


def test_an_empty_window_is_refused() -> None:
    with pytest.raises(ValueError, match="window_hu"):
        normalise_hu(np.zeros(3), (100.0, 100.0))
