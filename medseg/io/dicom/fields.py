"""Fields of a DICOM header as text, whole numbers and lists of numbers."""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any

from pydicom.dataelem import RawDataElement, convert_raw_data_element
from pydicom.dataset import Dataset
from pydicom.tag import BaseTag, Tag

from medseg.io.checks import shown

MAX_PLAIN = 100
"""Longer texts are cut in sentences; those of the standard are shorter."""


@cache
def tag_of(keyword: str) -> BaseTag:
    """The tag of a field."""
    return Tag(keyword)


@lru_cache(maxsize=4096)
def _converted(raw: RawDataElement) -> Any:
    return convert_raw_data_element(raw).value


def value_of(header: Dataset, keyword: str) -> Any:
    """The value of a field; None where it is missing or empty.

    Slices of a series share most values, and pydicom takes longer to convert one than to read it: each is converted once.
    """
    element = header.get_item(tag_of(keyword))
    if element is None:
        return None
    value = _converted(element._replace(value_tell=0)) if isinstance(element, RawDataElement) else element.value
    return None if value is None or value == "" else value


def items_of(header: Dataset, keyword: str) -> list[Dataset]:
    """The items of a sequence; none where it is missing."""
    return list(header[tag_of(keyword)].value or []) if tag_of(keyword) in header else []


def text_of(header: Dataset, keyword: str) -> str:
    """A field as one line; "" where it is missing."""
    value = value_of(header, keyword)
    values = [value] if isinstance(value, str) or not hasattr(value, "__iter__") else value
    texts = ("" if one is None else f"{one:g}" if isinstance(one, float) else str(one) for one in values)
    return "\\".join(" ".join(text.split()) for text in texts)


def plain(text: str) -> str:
    """A text of the header for a sentence: quoted only where it is long, or holds what a terminal would act on."""
    return text if text.isprintable() and len(text) <= MAX_PLAIN else shown(text)


def whole_of(header: Dataset, keyword: str, default: int) -> int:
    """A field that is a whole number.

    Raises:
        ValueError: If it is none.
    """
    value = value_of(header, keyword)
    return default if value is None else int(value)


def numbers_of(header: Dataset, keyword: str, count: int) -> tuple[float, ...] | None:
    """A field of so many numbers; None where it is missing or empty.

    Raises:
        ValueError: If they are not as many, or not finite.
    """
    value = value_of(header, keyword)
    if value is None:
        return None
    numbers = tuple(float(one) for one in (value if hasattr(value, "__iter__") else [value]))
    if len(numbers) != count or not all(math.isfinite(one) for one in numbers):
        raise ValueError(f"{keyword} should hold {count} numbers and holds {value}")
    return numbers


def pixel_value_of(header: Dataset, keyword: str, is_signed: bool) -> int | None:
    """A field that holds a stored pixel value: its bytes are read with the sign of the pixels, whatever VR is noted."""
    element = header.get_item(tag_of(keyword))
    if not isinstance(element, RawDataElement) or not element.value:
        return None
    return int.from_bytes(element.value, "little" if element.is_little_endian else "big", signed=is_signed)
