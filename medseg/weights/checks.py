"""Checks of a weight file before anything is built from it: size and kind of its values, and ranges of its metadata.

A file may be hostile: it must neither fill the memory nor keep the program busy, whatever it
claims.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from medseg.errors import require
from medseg.io.volume import MIN_SPACING_MM

# The metadata of a run hold some hundred values, nested four deep.
MAX_VALUES = 100_000
MAX_DEPTH = 20
MAX_TEXT = 1_000_000
MAX_INTEGER = 2**63
MAX_AXES = 8
DTYPES = frozenset({
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool
})  # fmt: skip
# Number in the metadata to its least and largest value.
RANGES = {
    "spacing_mm": (MIN_SPACING_MM, 100.0),
    "region_margin_mm": (0.0, 1000.0),
    "add_parts_mm": (0.0, 50.0),
    "tile_size": (1, 4096),
    "patch_size": (1, 4096),
    "size": (1, 4096),
    "range_mm": (MIN_SPACING_MM, 100.0),
    "window_hu": (-1e6, 1e6),
}
MAX_ARGUMENT = 65536
# Names of one weight: MONAI's DynUNet lists its blocks a second time by their place in the network.
MAX_NAMES = 2
# Arguments of networks that count blocks: each block holds a tensor of weights at least.
COUNTS = ("block", "depth", "layer", "unit")
# Words in the name of such an argument where it gives the size of a block, as `block_channels`.
SIZES = ("channel", "dim", "feature", "filter", "kernel", "size", "width")


def check_plain(given: str, metadata: object) -> None:
    """Refuse metadata that hold more, or something else, than plain values.

    Lists that refer to each other may stand for more values than the file has bytes.

    Raises:
        UserError: With the key and value of the user, `given`.
    """
    waiting, num_values = [(metadata, 0)], 0
    while waiting:
        value, depth = waiting.pop()
        num_values += 1
        is_large = (isinstance(value, int) and abs(value) > MAX_INTEGER) or (
            isinstance(value, str) and len(value) > MAX_TEXT
        )
        require(
            num_values <= MAX_VALUES and depth <= MAX_DEPTH and not is_large,
            f"{given}: its metadata are larger than those of any run; take another copy",
        )
        if isinstance(value, dict):
            waiting += [(one, depth + 1) for pair in value.items() for one in pair]
        elif isinstance(value, (list, tuple)):
            waiting += [(one, depth + 1) for one in value]
        else:
            is_plain = value is None or isinstance(value, (str, int, float))
            require(
                is_plain,
                f"{given}: its metadata hold a {type(value).__name__}, which is no plain value; take another copy",
            )


def check_tensors(given: str, weights: Mapping[str, Any], num_bytes: int) -> None:
    """Refuse weights that are no dense tensors of finite numbers, or that stand for more bytes than their file has.

    Args:
        given: Key and value of the user, for messages.
        weights: Tensors by name.
        num_bytes: Size of the file.

    Raises:
        UserError: If a tensor is sparse, expanded, shared, of another type, or holds NaN or
            infinity.
    """
    total = 0
    for name, value in weights.items():
        shown = name if name.isprintable() and len(name) <= 200 else ascii(name)[:200]
        kind = type(value).__name__
        require(
            isinstance(value, Tensor),
            f"{given}: its weights {shown} are no tensor, but a {kind}; take another copy",
        )
        is_dense = (
            value.layout is torch.strided
            and value.device.type == "cpu"
            and not value.is_nested
            and value.dtype in DTYPES
        )
        is_dense = is_dense and value.ndim <= MAX_AXES
        total += value.numel() * value.element_size() if is_dense else 0
        require(
            is_dense and total <= MAX_NAMES * num_bytes,
            f"{given}: the tensor {shown} is not an ordinary dense tensor (it is sparse, expanded, shared or of another type); take another copy",
        )
        is_finite = bool(torch.isfinite(value).all())
        require(
            is_finite,
            f"{given}: its weights {shown} hold NaN or infinity, so its training went wrong; take an earlier checkpoint",
        )


def check_ranges(metadata: Mapping[str, Any], num_tensors: int) -> None:
    """Refuse metadata with numbers that no training has: an input that would fill the memory, or a network of too many blocks.

    Args:
        metadata: From `read_weights`; `check_plain` has bounded its size.
        num_tensors: Number of tensors of weights in the file.

    Raises:
        ValueError: With the key and the value.
    """
    for key, value in _pairs(
        {name: part for name, part in metadata.items() if name not in ("config", "model")}
    ):
        if key in RANGES and value is not None and not isinstance(value, str):
            low, high = RANGES[key]
            numbers = value if isinstance(value, (list, tuple)) else [value]
            if not all(
                isinstance(one, (int, float)) and math.isfinite(one) and low <= one <= high
                for one in numbers
            ):
                raise ValueError(f"{key}={value}, expected numbers from {low:g} to {high:g}")
        if key in ("window_hu", "range_mm") and value is not None and not value[0] < value[1]:
            raise ValueError(f"{key}={value}, expected two increasing numbers")
    for key, length in (("size", 3), ("range_mm", 2)):
        value = metadata.get("grid_rule", {}).get(key)  # older checkpoints have no rule
        if value is not None and not (isinstance(value, (list, tuple)) and len(value) == length):
            raise ValueError(f"{key}={value}, expected {length} numbers")
    labels = metadata["task"]["labels"]
    names = {name for region in metadata["task"]["regions"] or () for name in region["labels"]}
    if (
        sorted(labels.values()) != list(range(1, len(labels) + 1))
        or not labels
        or not names <= labels.keys()
    ):
        raise ValueError(
            "its labels are not numbered 1, 2, …, or its regions name labels that it does not have"
        )
    check_arguments(metadata["model"])
    for key, value in _pairs({"model": metadata["model"]}):
        is_count = any(word in key for word in COUNTS) and not any(word in key for word in SIZES)
        if is_count and sum(map(abs, _numbers(value))) > num_tensors:
            raise ValueError(
                f"{key}={value}: a network of that many parts has more tensors than the {num_tensors} in the file"
            )


def check_arguments(model: Mapping[str, Any]) -> None:
    """Refuse arguments of a network that are too large to build it from a file; a training asks this before it begins.

    Args:
        model: `_target_` and arguments.

    Raises:
        ValueError: With the key and the value.
    """
    for key, value in _pairs(dict(model)):
        if any(not abs(one) <= MAX_ARGUMENT for one in _numbers(value)):
            raise ValueError(f"{key}={value} of the network, expected numbers up to {MAX_ARGUMENT}")


def _numbers(value: object) -> list[float]:
    """List the numbers of a value, or of a flat list."""
    return [
        one
        for one in (value if isinstance(value, (list, tuple)) else [value])
        if isinstance(one, (int, float))
    ]


def _pairs(value: object, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value inside nested dictionaries and lists with the key above it."""
    yield key, value
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _pairs(part, str(name))
    elif isinstance(value, (list, tuple)):
        for part in value:
            if isinstance(part, (dict, list, tuple)):
                yield from _pairs(part, key)
