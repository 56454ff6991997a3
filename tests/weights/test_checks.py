"""Checks of the tensors of a weight file."""

from __future__ import annotations

import pytest
import torch

from medseg.errors import UserError
from medseg.weights.checks import check_tensors


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.float64, 8), (torch.float32, 4), (torch.float16, 2), (torch.int8, 1)]
)
def test_weights_stand_for_twice_the_bytes_of_their_file_at_most(
    dtype: torch.dtype, size: int
) -> None:
    weights = {"a": torch.zeros(100, dtype=dtype), "b": torch.zeros(100, dtype=dtype)}
    check_tensors("coarse=a.ckpt", weights, 100 * size)
    with pytest.raises(UserError, match="the tensor b is not an ordinary dense tensor"):
        check_tensors("coarse=a.ckpt", weights, 100 * size - 1)
