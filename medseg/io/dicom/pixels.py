"""The pixels of one slice in HU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from pydicom import dcmread
from pydicom.dataset import FileDataset
from pydicom.uid import UID

from medseg.errors import UserError
from medseg.io.dicom.codecs import decode
from medseg.io.dicom.fields import plain
from medseg.io.dicom.frames import Frame
from medseg.io.volume import AIR_HU

DENSEST_HU = 3071
"""The largest value of a 12-bit CT. Padding between air and this is no padding: tissue has such values too."""

MAX_PADDING = 4096
"""Padding of unsigned pixels lies so near to the end of their range."""

MAX_INT16 = 2**15 - 1


class PixelReader:
    """Read slices; the file that was decoded last is kept, for its other frames."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._dataset = FileDataset("", {})

    def hu(self, frame: Frame) -> np.ndarray:
        """HU (H, W) of a slice: int32 where slope and intercept are whole numbers, else float32.

        Raises:
            UserError: If the pixels are damaged, too few, or compressed in a way that nothing here reads.
        """
        try:
            stored = self._stored(frame)
        except (UserError, MemoryError, OSError):
            raise
        except Exception as error:
            raise UserError(
                f"{frame.path}: its pixels, encoded as {plain(UID(frame.pixels.transfer_syntax).name)}, cannot be decoded; it is damaged, "
                "copy or export it again."
            ) from error
        return to_hu(stored, frame)

    def _stored(self, frame: Frame) -> np.ndarray:
        """Stored values (H, W) as they are."""
        pixels = frame.pixels
        if pixels.offset is None:
            return self._decoded(frame)
        dtype = np.dtype(f"<{'i' if pixels.is_signed else 'u'}{pixels.bits_allocated // 8}")
        count = frame.shape[0] * frame.shape[1]
        values = np.fromfile(frame.path, dtype, count, offset=pixels.offset + frame.index * count * dtype.itemsize)
        return values.reshape(frame.shape)

    def _decoded(self, frame: Frame) -> np.ndarray:
        if self._path != frame.path:
            self._dataset, self._path = dcmread(frame.path, force=True), frame.path
        return decode(self._dataset, frame)


def is_whole(frame: Frame) -> bool:
    """Whether the HU of a slice are whole numbers of 32 bits."""
    return frame.pixels.bits_allocated <= 16 and all(
        value == round(value) and abs(value) <= MAX_INT16 for value in (frame.slope, frame.intercept)
    )


def to_hu(stored: np.ndarray, frame: Frame) -> np.ndarray:
    """Turn the stored values of a slice into HU: int32 where slope and intercept are whole numbers, else float32."""
    values = _with_sign(stored, frame)
    if is_whole(frame):
        hu = values.astype(np.int32)
        if frame.slope != 1:
            hu *= int(frame.slope)
        hu += int(frame.intercept)
    else:
        hu = (values.astype(np.float64) * frame.slope + frame.intercept).astype(np.float32)
    if frame.pixels.padding is not None:
        low, high = (int(end) for end in _with_sign(np.array(frame.pixels.padding), frame))
        # Padding below air is left for the clipping that every image gets.
        if max(low * frame.slope, high * frame.slope) + frame.intercept > DENSEST_HU:
            hu[(values >= min(low, high)) & (values <= max(low, high))] = AIR_HU
    return hu


def _with_sign(stored: np.ndarray, frame: Frame) -> np.ndarray:
    """Give stored values the sign that they have in practice, and clear old overlays.

    * Unsigned values that can only be negative ones are: padding of -2000 comes as 63536. They reach into unused bits, or lie
      at the end of the range and beyond all HU. Other unused bits are overlays.
    * Signed values that lack their sign bits (none is negative, though the file stores HU as such) get them.
    """
    pixels = frame.pixels
    stop, limit = 1 << pixels.bits_allocated, 1 << pixels.bits_stored
    if pixels.is_signed:
        if limit < stop and frame.intercept > AIR_HU / 2 and stored.min() >= 0 and limit // 2 <= stored.max() < limit:
            return np.where(stored >= limit // 2, stored.astype(np.int64) - limit, stored)
        return stored
    first_negative = stop - limit if limit < stop else max(limit // 2, stop - MAX_PADDING)
    highest = int(stored.max())
    if highest < min(limit, first_negative) or (limit == stop and highest * frame.slope + frame.intercept <= MAX_INT16):
        return stored
    return np.where(stored >= first_negative, stored.astype(np.int64) - stop, stored & (limit - 1))
