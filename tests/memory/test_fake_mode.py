"""The quick mode of fake tensors gives the same results as torch's own mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from medseg.memory.fake_mode import QuickFakeMode

OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum in place": lambda first, second: first.add_(second),
    "factor in place": lambda first, _: first.mul_(0.5),
    "sum": lambda first, second: first + second,
    # The names of these operations end with an underscore, like those of operations in place.
    "shift": lambda first, second: first.int()[:, :1] << second.int(),
    "other shift": lambda first, second: first.int()[:, :1] >> second.int(),
    "exclusive or": lambda first, second: first.bool()[:, :1] ^ second.bool(),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_results_are_those_of_torch(name: str) -> None:
    results = []
    for mode in (QuickFakeMode(), FakeTensorMode()):
        with mode:
            first, second = torch.ones(4, 3), torch.ones(4, 3)
            result = OPERATIONS[name](first, second)
            results.append((result.shape, result.stride(), result.dtype, result is first))
    assert results[0] == results[1]
