"""Checks of a weight file before anything is built from it: its values and their ranges.

A file may be hostile: it must neither fill the memory nor keep the program busy, whatever it
claims.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from medseg.errors import UserError
from medseg.io.volume import MIN_SPACING_MM

# The metadata of a run hold some hundred values, nested four deep.
MAX_VALUES = 100_000
MAX_DEPTH = 20
MAX_TEXT = 1_000_000
MAX_INTEGER = 2**63
MAX_AXES = 8
DTYPES = frozenset({
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
})  # fmt: skip
# Number in the metadata to its least and largest value.
RANGES = {
    "spacing_mm": (MIN_SPACING_MM, 100.0),
    "region_margin_mm": (0.0, 1000.0),
    "min_ml": (0.0, 1e6),
    "tile_size": (1, 4096),
    "patch_size": (1, 4096),
    "size": (1, 4096),
    "range_mm": (MIN_SPACING_MM, 100.0),
    "window_hu": (-1e6, 1e6),
}
# Largest number among the arguments of a network, such as a count of channels.
MAX_ARGUMENT = 65536
# Names of one weight: MONAI's DynUNet lists its blocks a second time by their place in the network.
MAX_NAMES = 2
# Arguments of networks that count blocks: each block holds a tensor of weights at least.
COUNTS = ("block", "depth", "layer", "unit")
# Words in the name of such an argument where it gives the size of a block, as `block_channels`.
SIZES = ("channel", "dim", "feature", "filter", "kernel", "size", "width")


def check_plain(source: str, metadata: object) -> None:
    """Refuse metadata that hold more, or something else, than plain values.

    Lists that refer to each other may stand for more values than the file has bytes.

    Args:
        source: Key and value of the user, for messages.
        metadata: The value to check, with all that it holds.

    Raises:
        UserError: With `source`.
    """
    waiting: list[tuple[object, int]] = [(metadata, 0)]
    num_values = 0
    while waiting:
        value, depth = waiting.pop()
        num_values += 1
        is_number = isinstance(value, (int, float))
        is_large_integer = isinstance(value, int) and abs(value) > MAX_INTEGER
        is_long_text = isinstance(value, str) and len(value) > MAX_TEXT
        is_too_much = num_values > MAX_VALUES or depth > MAX_DEPTH
        if is_too_much or is_large_integer or is_long_text:
            raise UserError(
                f"{source}: its metadata are larger than those of any run; take another copy"
            )
        parts: Iterable[object] = ()
        if isinstance(value, dict):
            # Keys are values of the file too.
            parts = chain.from_iterable(value.items())
        elif isinstance(value, (list, tuple)):
            parts = value
        elif value is not None and not is_number and not isinstance(value, str):
            raise UserError(
                f"{source}: its metadata hold a {type(value).__name__}, which is no plain value; "
                "take another copy"
            )
        waiting += [(part, depth + 1) for part in parts]


def check_tensors(source: str, weights: Mapping[str, Any], num_bytes: int) -> None:
    """Refuse weights that are no dense tensors of finite numbers.

    Nor may they stand for more bytes than their file has.

    Args:
        source: Key and value of the user, for messages.
        weights: Tensors by name.
        num_bytes: Size of the file.

    Raises:
        UserError: If a tensor is sparse, expanded, shared, of another type, or holds NaN or
            infinity.
    """
    total_bytes = 0
    for name, value in weights.items():
        # The name comes from the file, and goes to a terminal.
        printed_name = name if name.isprintable() and len(name) <= 200 else ascii(name)[:200]
        if not isinstance(value, Tensor):
            kind = type(value).__name__
            raise UserError(
                f"{source}: its weights {printed_name} are no tensor, but a {kind}; take another "
                "copy"
            )
        is_dense = _is_dense(value)
        if is_dense:
            total_bytes += value.numel() * value.element_size()
        if not is_dense or total_bytes > MAX_NAMES * num_bytes:
            raise UserError(
                f"{source}: the tensor {printed_name} is not an ordinary dense tensor (it is "
                "sparse, expanded, shared or of another type); take another copy"
            )
        # Only now: an expanded tensor would be written out in full.
        if not torch.isfinite(value).all():
            raise UserError(
                f"{source}: its weights {printed_name} hold NaN or infinity, so its training went "
                "wrong; take an earlier checkpoint"
            )


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor is one that a network may have as its weights."""
    is_plain = tensor.layout is torch.strided and not tensor.is_nested
    is_here = is_plain and tensor.device.type == "cpu"
    return is_here and tensor.dtype in DTYPES and tensor.ndim <= MAX_AXES


def check_ranges(metadata: Mapping[str, Any], num_tensors: int) -> None:
    """Refuse metadata with numbers that no training has.

    They describe an input that would fill the memory, or a network of too many blocks.

    Args:
        metadata: From `read_weights`; `check_plain` has bounded its size.
        num_tensors: Number of tensors of weights in the file.

    Raises:
        ValueError: With the key and the value.
    """
    # The configuration of the run is not read again, and the network has limits of its own.
    numbers = {key: value for key, value in metadata.items() if key not in ("config", "model")}
    for key, value in _pairs(numbers):
        if value is not None:
            _check_range(key, value)
    rule = metadata.get("grid_rule", {})  # older checkpoints have no rule
    for key, length in (("size", 3), ("range_mm", 2)):
        value = rule.get(key)
        if value is not None and not (isinstance(value, (list, tuple)) and len(value) == length):
            raise ValueError(f"{key}={value}, expected {length} numbers")
    _check_labels(metadata["task"])
    check_arguments(metadata["model"])
    _check_counts(metadata["model"], num_tensors)


def _check_range(key: str, value: Any) -> None:
    """Refuse numbers outside the range of their key, and an interval that is empty."""
    if key in RANGES and not isinstance(value, str):
        low, high = RANGES[key]
        numbers = value if isinstance(value, (list, tuple)) else [value]
        for number in numbers:
            is_number = isinstance(number, (int, float)) and math.isfinite(number)
            if not is_number or not low <= number <= high:
                raise ValueError(f"{key}={value}, expected numbers from {low:g} to {high:g}")
    if key in ("window_hu", "range_mm") and not value[0] < value[1]:
        raise ValueError(f"{key}={value}, expected two increasing numbers")


def _check_labels(task: Mapping[str, Any]) -> None:
    """Refuse labels that are not numbered without gaps, and regions with labels of no name."""
    labels = task["labels"]
    names: set[str] = set()
    for region in task["regions"] or ():
        names.update(region["labels"])
    is_numbered = sorted(labels.values()) == list(range(1, len(labels) + 1))
    if not is_numbered or not labels or not names <= labels.keys():
        raise ValueError(
            "its labels are not numbered 1, 2, …, or its regions name labels that it does not have"
        )


def _check_counts(model: Mapping[str, Any], num_tensors: int) -> None:
    """Refuse a network with more blocks than the file has tensors of weights."""
    for key, value in _pairs({"model": model}):
        is_count = any(word in key for word in COUNTS) and not any(word in key for word in SIZES)
        if is_count and sum(map(abs, _numbers(value))) > num_tensors:
            raise ValueError(
                f"{key}={value}: a network of that many parts has more tensors than the "
                f"{num_tensors} in the file"
            )


def check_arguments(model: Mapping[str, Any]) -> None:
    """Refuse arguments of a network that are too large to build it from a file.

    A training asks this before it begins.

    Args:
        model: `_target_` and arguments.

    Raises:
        ValueError: With the key and the value.
    """
    for key, value in _pairs(dict(model)):
        for number in _numbers(value):
            # Negated, so that NaN is refused.
            if not abs(number) <= MAX_ARGUMENT:
                raise ValueError(
                    f"{key}={value} of the network, expected numbers up to {MAX_ARGUMENT}"
                )


def _numbers(value: object) -> list[float]:
    """List the numbers of a value, or of a flat list."""
    values = value if isinstance(value, (list, tuple)) else [value]
    return [number for number in values if isinstance(number, (int, float))]


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
