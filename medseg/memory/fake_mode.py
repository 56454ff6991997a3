"""Torch's mode for fake tensors, made faster: element-wise operations in place are skipped."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


class QuickFakeMode(FakeTensorMode):
    """`FakeTensorMode` that leaves out element-wise operations in place.

    These change the values of a tensor, but a fake tensor has no values, only a shape. An
    optimiser's step consists mostly of such operations. Fake tensors of one element are not
    skipped, because torch may know their value, such as an optimiser's count of steps.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if _is_in_place(func):
            changed = args[0]
            if isinstance(changed, FakeTensor) and changed.numel() > 1:
                return changed
        return super().__torch_dispatch__(func, types, args, kwargs)


@cache
def _is_in_place(func: Any) -> bool:
    """Whether an operation changes its first argument element by element, and returns it."""
    if torch.Tag.pointwise not in func.tags or not func._schema.arguments:
        return False
    # `alias_info` of an argument is None unless the result or a write shares its memory.
    alias = func._schema.arguments[0].alias_info
    changes_first = alias is not None and alias.is_write
    # By torch's naming, operations that return the changed argument end with an underscore.
    return changes_first and func._schema.name.endswith("_")
