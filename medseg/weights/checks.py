"""Checks of the values in a weight file and of their ranges, before anything is built from it.

A file may be hostile: whatever it holds, it must neither fill the memory nor keep the program busy
for long.
"""

import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from medseg.errors import UserError
from medseg.io.volume import MIN_SPACING_MM

# Bounds far above the metadata of any run, which hold a few hundred values, nested four deep.
MAX_VALUES = 100_000
MAX_DEPTH = 20
# Characters of a text.
MAX_TEXT = 1_000_000
# Integers beyond 64 bits have no use in metadata.
MAX_INTEGER = 2**63
# Axes of a tensor of weights; the tensor of a 3D convolution has five.
MAX_AXES = 8
# Number types that the tensors of weights may have.
DTYPES = frozenset({
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
})  # fmt: skip
# Key in the metadata, at any depth, to the smallest and the largest number that it may hold.
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
# `spacing_mm` of a stage that does not resample: a word, so that a missing value is an error.
NATIVE = "native"
# Keys whose value is an interval: a smaller and a larger number.
INTERVALS = ("range_mm", "window_hu")
# Largest number among the arguments of a network, such as a number of channels, and largest sum of
# the numbers of a list: some networks of MONAI make a number for each of their blocks before they
# make the blocks.
MAX_ARGUMENT = 65536
# Largest total size of the tensors, as a multiple of the size of the file. It exceeds 1 because a
# file holds a shared tensor once: MONAI's DynUNet lists each of its blocks under two names.
MAX_SIZE_RATIO = 2
# Largest number of modules and parameters while the network of a file is built, by the number of
# its tensors. Networks of MONAI have up to 12 for each tensor: they are built twice, and not all
# modules have tensors.
PARTS_PER_TENSOR = 50
# Beside those, for networks of few tensors.
MORE_PARTS = 1000


def check_plain(source: str, metadata: object) -> None:
    """Refuse metadata with too many or too large values, or with other than plain values.

    Plain values are None, numbers, texts, and dictionaries, lists and tuples of them.

    Args:
        source: Key and value that the user gave, such as `fine=a.ckpt`, for messages.
        metadata: The metadata, as they were read.

    Raises:
        UserError: If a value is refused.
    """
    # Values that are still to be checked, each with its depth. Every occurrence counts: lists that
    # refer to each other may stand for more values than the file has bytes.
    waiting: list[tuple[object, int]] = [(metadata, 0)]
    num_values = 0
    while waiting:
        value, depth = waiting.pop()
        num_values += 1
        is_too_much = num_values > MAX_VALUES or depth > MAX_DEPTH
        is_large_integer = isinstance(value, int) and abs(value) > MAX_INTEGER
        is_long_text = isinstance(value, str) and len(value) > MAX_TEXT
        if is_too_much or is_large_integer or is_long_text:
            raise UserError(
                f"{source}: its metadata are larger than those of any run; take another copy"
            )
        parts: Iterable[object] = ()
        if isinstance(value, dict):
            # Keys come from the file too, and are checked like values.
            parts = chain.from_iterable(value.items())
        elif isinstance(value, (list, tuple)):
            parts = value
        elif value is not None and not isinstance(value, (int, float, str)):
            raise UserError(
                f"{source}: its metadata hold a {type(value).__name__}, which is no plain value; "
                "take another copy"
            )
        waiting += [(part, depth + 1) for part in parts]


def check_tensors(source: str, weights: Mapping[str, Any], num_bytes: int) -> None:
    """Refuse weights that are no dense tensors of finite numbers, or far larger than their file.

    Args:
        source: Key and value that the user gave, such as `fine=a.ckpt`, for messages.
        weights: Tensors by name.
        num_bytes: Size of the file.

    Raises:
        UserError: If a tensor is not dense or holds NaN or infinity, or if all tensors together
            have more than `MAX_SIZE_RATIO` times the bytes of the file.
    """
    total_bytes = 0
    for name, value in weights.items():
        # The name comes from the file and is printed: it must not control the terminal.
        printed_name = name
        if not name.isprintable() or len(name) > 200:
            printed_name = ascii(name)[:200]
        if not isinstance(value, Tensor):
            kind = type(value).__name__
            raise UserError(
                f"{source}: its weights {printed_name} are no tensor, but a {kind}; take another "
                "copy"
            )
        is_dense = _is_dense(value)
        if is_dense:
            # A tensor that repeats its memory (`Tensor.expand`) counts as if it were written out.
            total_bytes += value.numel() * value.element_size()
        # Tensors have far more bytes than their file only if they are expanded, or share memory.
        if not is_dense or total_bytes > MAX_SIZE_RATIO * num_bytes:
            raise UserError(
                f"{source}: the tensor {printed_name} is not an ordinary dense tensor (it is "
                "sparse, expanded, shared or of another type); take another copy"
            )
        # Only after the check of the size: `isfinite` makes a result of the full shape, even for an
        # expanded tensor.
        if not torch.isfinite(value).all():
            raise UserError(
                f"{source}: its weights {printed_name} hold NaN or infinity, so its training went "
                "wrong; take an earlier checkpoint"
            )


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor is an ordinary dense one, as the weights of a network are."""
    # First, because some properties of tensors of other layouts raise errors.
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    return tensor.device.type == "cpu" and tensor.dtype in DTYPES and tensor.ndim <= MAX_AXES


def check_ranges(metadata: Mapping[str, Any]) -> None:
    """Refuse metadata with numbers that no training has, which may fill the memory.

    `bounded_parts` bounds the number of blocks of the network.

    Args:
        metadata: From `read_weights`; `check_plain` has bounded its size.

    Raises:
        ValueError: With the key and the value.
    """
    # Nothing is built from `config`, which is only a record. `check_arguments` checks `model`: its
    # keys, such as `size`, may have other meanings.
    checked = {key: value for key, value in metadata.items() if key not in ("config", "model")}
    for key, value in _pairs(checked):
        is_native = key == "spacing_mm" and value == NATIVE
        if value is not None and not is_native:
            _check_range(key, value)
    # `_check_range` doesn't check how many numbers there are. `tile_size`, `patch_size` and
    # `spacing_mm` are checked for three when `load_stage` unpacks them, so only `grid_rule.size` is
    # checked here. Older checkpoints have no `grid_rule` (see `GridRule`).
    rule = metadata.get("grid_rule", {})
    size = rule.get("size")
    has_three_numbers = isinstance(size, (list, tuple)) and len(size) == 3
    if size is not None and not has_three_numbers:
        raise ValueError(f"size={size}, expected 3 numbers")
    _check_labels(metadata["task"])
    check_arguments(metadata["model"])


def _check_range(key: str, value: Any) -> None:
    """Refuse a value outside the range of its key, and an empty interval; other keys pass.

    Args:
        key: Key in the metadata.
        value: A number, or a list of numbers.

    Raises:
        ValueError: With the key and the value.
    """
    if key not in RANGES:
        return
    low, high = RANGES[key]
    numbers = value if isinstance(value, (list, tuple)) else [value]
    for number in numbers:
        is_number = isinstance(number, (int, float)) and math.isfinite(number)
        if not is_number or not low <= number <= high:
            raise ValueError(f"{key}={value}, expected numbers from {low:g} to {high:g}")
    if key in INTERVALS and (len(numbers) != 2 or numbers[0] >= numbers[1]):
        raise ValueError(f"{key}={value}, expected two increasing numbers")


def _check_labels(task: Mapping[str, Any]) -> None:
    """Refuse labels that are not numbered 1, 2, …, and regions of labels that do not exist.

    Raises:
        ValueError: If the task is refused.
    """
    labels = task["labels"]
    labels_of_regions: set[str] = set()
    for region in task["regions"] or ():
        labels_of_regions.update(region["labels"])
    # In Python, True equals 1.
    are_numbers = all(type(value) is int for value in labels.values())
    is_numbered = are_numbers and sorted(labels.values()) == list(range(1, len(labels) + 1))
    if not labels or not is_numbered or not labels_of_regions <= labels.keys():
        raise ValueError(
            "its labels are not numbered 1, 2, …, or its regions name labels that it does not have"
        )


@contextmanager
def bounded_parts(num_tensors: int) -> Iterator[None]:
    """Stop the construction of a network in the block when it has far too many parts.

    Building the network could take for ever, before its weights are found missing.

    Args:
        num_tensors: Number of tensors of weights in the file.

    Raises:
        ValueError: In the constructor of the network.
    """
    max_parts = MORE_PARTS + PARTS_PER_TENSOR * num_tensors
    num_parts = 0
    thread = threading.get_ident()

    def count(*_: object) -> None:
        nonlocal num_parts
        # The hooks are global: other threads may build networks of their own meanwhile.
        if threading.get_ident() != thread:
            return
        num_parts += 1
        if num_parts > max_parts:
            raise ValueError(
                f"the network has more than {max_parts} parts, but the file {num_tensors} tensors"
            )

    hooks = [
        register_module_module_registration_hook(count),
        register_module_parameter_registration_hook(count),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def check_arguments(model: Mapping[str, Any]) -> None:
    """Refuse arguments of a network that are beyond `MAX_ARGUMENT`, alone or as the sum of a list.

    A training calls this before it begins: with such arguments its checkpoint could not be read.

    Args:
        model: `_target_` of the network, and its arguments.

    Raises:
        ValueError: With the key and the value.
    """
    for key, value in _pairs(dict(model)):
        # Absolute values, so that a negative number does not make up for a large one.
        total = sum(map(abs, _numbers(value)))
        # Not `>`, because NaN is to be refused and fails every comparison.
        if not total <= MAX_ARGUMENT:
            raise ValueError(
                f"{key}={value} of the network, expected numbers up to {MAX_ARGUMENT}, also in sum"
            )


def _numbers(value: object) -> list[float]:
    """List the numbers directly in a list, or the value itself if it is a number."""
    values = value if isinstance(value, (list, tuple)) else [value]
    return [number for number in values if isinstance(number, (int, float))]


def _pairs(value: object, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value of nested dictionaries and lists with its key, the outermost value first.

    A list is yielded whole; of its items only lists and dictionaries are yielded too, under the key
    of the list.
    """
    yield key, value
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _pairs(part, str(name))
    elif isinstance(value, (list, tuple)):
        for part in value:
            if isinstance(part, (dict, list, tuple)):
                yield from _pairs(part, key)
