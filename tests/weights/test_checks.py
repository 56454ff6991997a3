"""Checks of the tensors of a weight file, and of the network that it describes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from medseg.errors import UserError
from medseg.models.described import make_described_network
from medseg.task import Channel, Task
from medseg.weights.checks import (
    MORE_PARTS,
    PARTS_PER_TENSOR,
    _check_labels,
    bounded_parts,
    check_tensors,
)

LAYER = {"n_features": 1, "kernel_size": 1, "kernels": [1]}


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


@pytest.mark.parametrize(
    "arguments",
    [
        {
            "_target_": "monai.networks.nets.HighResNet",
            "layer_params": [LAYER, *[{**LAYER, "repeat": 65536}] * 999, LAYER, LAYER],
        },
        {
            "_target_": "monai.networks.nets.DynUNet",
            "kernel_size": [1] * 20_000,
            "strides": [1] * 20_000,
            "upsample_kernel_size": [1] * 19_999,
            "filters": [1] * 20_000,
        },
    ],
    ids=["repeat", "list"],
)
def test_a_network_of_far_more_parts_than_its_file_has_tensors_is_not_built(
    arguments: dict[str, Any],
) -> None:
    task = Task("lesion", {"lesion": 1}, (), (Channel("ct", (-1000.0, 1000.0)),))
    with pytest.raises(UserError, match="more than 1500 parts, but the file 10"), bounded_parts(10):
        make_described_network(arguments, task, "single")


def test_the_bound_on_parts_ends_with_its_block() -> None:
    max_parts = MORE_PARTS + PARTS_PER_TENSOR
    with bounded_parts(1):
        nn.Sequential(*[nn.Identity()] * max_parts)
    nn.Sequential(*[nn.Identity()] * (max_parts + 1))
    with pytest.raises(ValueError, match=f"more than {max_parts} parts"), bounded_parts(1):
        nn.Sequential(*[nn.Identity()] * (max_parts + 1))


def test_the_bound_on_parts_leaves_other_threads_alone() -> None:
    max_parts = MORE_PARTS + PARTS_PER_TENSOR
    with bounded_parts(1), ThreadPoolExecutor(1) as pool:
        # `result` raises the error of the thread.
        pool.submit(nn.Sequential, *[nn.Identity()] * (max_parts + 1)).result()


@pytest.mark.parametrize("values", [(True, 2), (1, 3), (2, 3), (1.0, 2), ("1", 2)])
def test_labels_are_numbered_with_whole_numbers(values: tuple[Any, Any]) -> None:
    """In Python, True equals 1."""
    task = {"labels": {"left": 1, "right": 2}, "regions": [{"labels": ["left"]}]}
    _check_labels(task)
    with pytest.raises(ValueError, match="not numbered 1, 2"):
        _check_labels({**task, "labels": dict(zip(("left", "right"), values, strict=True))})
