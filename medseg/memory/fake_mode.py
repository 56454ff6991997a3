"""Torch's fake tensors, without the work that an operation in place needs on real ones alone."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


class QuickFakeMode(FakeTensorMode):
    """`FakeTensorMode` that leaves out element-wise operations in place.

    They change no shape, and a fake tensor has no values: most of what an optimiser's step does.
    Fake numbers are the exception, whose values torch may know, such as an optimiser's count of
    steps.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if _is_in_place(func) and isinstance(args[0], FakeTensor) and args[0].numel() > 1:
            return args[0]
        return super().__torch_dispatch__(func, types, args, kwargs)


@cache
def _is_in_place(func: Any) -> bool:
    """Whether an operation changes the elements of its first argument, and returns it."""
    first, *_ = func._schema.arguments or [None]
    changes_first = first is not None and first.alias_info is not None and first.alias_info.is_write
    return changes_first and torch.Tag.pointwise in func.tags and func._schema.name.endswith("_")
