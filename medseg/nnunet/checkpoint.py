"""Checkpoint of nnU-Net's trainer, read as inert data: tensors and plain values alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medseg.errors import UserError
from medseg.weights.checks import check_tensors
from medseg.weights.files import load_checkpoint

# Types that a checkpoint may hold beside tensors, because the logger of nnU-Net keeps NumPy
# numbers. None of them executes anything when it is read. A pickle names the module of the function
# `scalar`, which NumPy 2 renamed.
SCALAR = np._core.multiarray.scalar  # type: ignore[attr-defined]
NUMPY_TYPES = [
    (SCALAR, "numpy._core.multiarray.scalar"),
    (SCALAR, "numpy.core.multiarray.scalar"),
    np.dtype,
    np.dtypes.Float64DType,
    np.dtypes.Float32DType,
    np.dtypes.Int64DType,
]
WEIGHTS = "network_weights"  # key of the weights in a checkpoint


@dataclass(frozen=True)
class Checkpoint:
    """The part of a checkpoint that a prediction needs.

    Attributes:
        weights: Weights by name; their bytes stay in the file until they are used.
        mirror_axes: Spatial axes of the network's input along which nnU-Net mirrors; none if the
            trainer did not mirror.
        trainer: Class name of the trainer; any is accepted.
    """

    weights: Mapping[str, Tensor]
    mirror_axes: tuple[int, ...]
    trainer: str


def read_checkpoint(path: Path, source: str) -> Checkpoint:
    """Read a checkpoint; nothing in it is executed.

    Args:
        path: The file.
        source: Key and value of the user, for messages.

    Raises:
        UserError: If the file is missing, damaged, holds other Python objects, or is not of
            nnU-Net.
    """
    content = load_checkpoint(path, source, NUMPY_TYPES, "nnU-Net")
    weights = content.get(WEIGHTS)
    if not isinstance(weights, dict):
        first_keys = [str(key)[:40] for key in list(content)[:5]]
        keys = ", ".join(first_keys) or "nothing"
        raise UserError(
            f"{source}: expected a checkpoint of nnU-Net with {WEIGHTS}, but it holds {keys}; give "
            "the folder as nnU-Net wrote it"
        )
    check_tensors(source, _distinct(weights), path.stat().st_size)
    # Cut, because the name is foreign text of any length.
    trainer = str(content.get("trainer_name"))[:200]
    return Checkpoint(weights, _mirror_axes(content, source), trainer)


def _distinct(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Keep one name of each tensor, since `check_tensors` refuses tensors that share memory.

    nnU-Net lists the layers of its encoder under four names.
    """
    first_names: dict[Any, tuple[str, Any]] = {}
    for name, value in weights.items():
        key: Any = name
        if isinstance(value, Tensor) and value.layout is torch.strided:
            # Tensors with equal keys are the same view of the same memory.
            key = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
        first_names.setdefault(key, (str(name), value))
    return dict(first_names.values())


def _mirror_axes(content: Mapping[str, Any], source: str) -> tuple[int, ...]:
    """Read `inference_allowed_mirroring_axes`; empty where an older checkpoint lacks the key.

    Raises:
        UserError: If the value is no list of distinct spatial axes.
    """
    axes = content.get("inference_allowed_mirroring_axes")
    if axes is None:
        return ()
    are_axes = isinstance(axes, (list, tuple)) and all(map(_is_axis, axes))
    has_repeated = are_axes and len(set(axes)) != len(axes)
    if not are_axes or has_repeated:
        raise UserError(
            f"{source}: expected inference_allowed_mirroring_axes among 0, 1 and 2, got "
            f"{str(axes)[:60]}; take another copy"
        )
    return tuple(int(axis) for axis in axes)


def _is_axis(value: Any) -> bool:
    """Whether a value of a checkpoint is the number of a spatial axis."""
    # The type comes first: a tensor of several values cannot be compared with a number.
    return isinstance(value, (int, np.integer)) and value in (0, 1, 2)
