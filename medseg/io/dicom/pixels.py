"""Pixels of one slice: stored values, decoded where they are compressed, and converted to HU.

imagecodecs decodes the JPEG family; `README.md` of this folder compares it with other decoders. The
sizes that a codestream declares are compared with the header before memory is allocated.
"""

import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
from pydicom import Dataset, FileDataset, config, dcmread, uid
from pydicom.encaps import get_frame
from pydicom.pixels import get_decoder
from pydicom.pixels.utils import _get_jpg_parameters, get_j2k_parameters

from medseg.errors import UserError
from medseg.io.dicom.frames import Frame, PixelFormat, plain
from medseg.task import AIR_HU

# The largest value of a 12-bit CT. Tissue has values between air and this, so that such padding
# counts as tissue.
DENSEST_HU = 3071

# Largest distance of the padding of unsigned pixels from the end of their range.
MAX_PADDING = 4096

MAX_INT16 = 2**15 - 1

# Not `jpeg_decode`: where libjpeg-turbo refuses a code it tries another decoder, which can end the
# process.
# Decoders of imagecodecs by transfer syntax.
DECODERS = {
    **dict.fromkeys(uid.JPEGTransferSyntaxes, imagecodecs.jpeg8_decode),
    **dict.fromkeys(uid.JPEGLSTransferSyntaxes, imagecodecs.jpegls_decode),
    **dict.fromkeys(uid.JPEG2000TransferSyntaxes, imagecodecs.jpeg2k_decode),
}

# Some writers fill up an RLE code with zeros, each pair of which becomes a byte.
MAX_SURPLUS_BYTES = 16

# Some writers append bytes to the end of a code, not always zeros.
JPEG_TAIL_BYTES = 10


# Reads a file whose pixels are compressed. Where it holds several slices, a cache of one file saves
# time.
READ_FILE = partial(dcmread, force=True)


def read_hu(frame: Frame, read_file: Callable[[Path], FileDataset] = READ_FILE) -> np.ndarray:
    """Read the HU (H, W) of a slice: int32 where its scale is of whole numbers, else float32.

    Raises:
        UserError: If the pixels are damaged, too few, or compressed in an unknown way.
    """
    try:
        with config.disable_value_validation(), warnings.catch_warnings(action="ignore"):
            return to_hu(_stored_values(frame, read_file), frame)
    except (UserError, MemoryError, OSError):
        raise
    except Exception as error:
        raise UserError(
            f"{frame.path}: its pixels, encoded as {plain(frame.pixels.transfer_syntax.name)}, "
            "cannot be decoded; it is damaged, copy or export it again."
        ) from error


def _stored_values(frame: Frame, read_file: Callable[[Path], FileDataset]) -> np.ndarray:
    """Read the stored values (H, W) of a slice, and decode them where necessary.

    Raises:
        UserError: If no decoder reads its encoding.
        Exception: Whatever a decoder raises on damaged data.
    """
    pixels = frame.pixels
    if pixels.offset is not None:
        count = pixels.shape[0] * pixels.shape[1]
        offset = pixels.offset + frame.index * count * pixels.dtype.itemsize
        return np.fromfile(frame.path, pixels.dtype, count, offset=offset).reshape(pixels.shape)
    try:
        get_decoder(pixels.transfer_syntax)
    except NotImplementedError:
        raise UserError(
            f"{frame.path}: its pixels are encoded as {plain(pixels.transfer_syntax.name)}, "
            "which medseg does not read; export the series without compression."
        ) from None
    return decode(read_file(frame.path), pixels, frame.index)


def decode(dataset: Dataset, pixels: PixelFormat, index: int) -> np.ndarray:
    """Decode the stored values (H, W) of one frame of a file.

    Raises:
        Exception: Whatever a decoder raises on damaged data.
    """
    syntax = pixels.transfer_syntax
    if syntax not in DECODERS:
        return _decode_by_pydicom(dataset, syntax, index)
    offsets = dataset.get("ExtendedOffsetTable")
    lengths = dataset.get("ExtendedOffsetTableLengths")
    has_table = offsets is not None and lengths is not None
    code = get_frame(
        dataset.PixelData,
        index,
        extended_offsets=(offsets, lengths) if has_table else None,
        number_of_frames=int(dataset.get("NumberOfFrames") or 1),
    )
    if syntax in uid.JPEG2000TransferSyntaxes:
        parameters = get_j2k_parameters(code)
    else:
        # The decoder of JPEG invents missing pixels; that of JPEG-LS may search for them without
        # end.
        tail = code.rstrip(b"\0")[-JPEG_TAIL_BYTES:]
        if not code.startswith(b"\xff\xd8\xff") or b"\xff\xd9" not in tail:
            raise ValueError("the code does not start or end as it should")
        parameters = _get_jpg_parameters(code)
    bits = parameters["precision"]
    dtype = np.uint8 if bits <= 8 else np.uint16
    values = np.empty(pixels.shape, dtype)
    # Raises before it decodes where the code has another shape or more than 16 bits.
    DECODERS[syntax](code, out=values)
    # The header decides on the sign: codes without one hold the lower bits, and some have a wrong
    # one.
    stored = values.astype(np.int32) & ((1 << bits) - 1)
    if pixels.dtype.kind != "i":
        return stored
    return np.where(stored >> (bits - 1), stored - (1 << bits), stored)


def _decode_by_pydicom(dataset: Dataset, syntax: uid.UID, index: int) -> np.ndarray:
    """Decode one frame, such as of RLE, as `decode` does."""
    # `to_hu` clears unused bits: scanners keep padding there. Other plugins of RLE may be
    # installed.
    options: dict[str, Any] = {
        "raw": True,
        "decoding_plugin": "pydicom",
        "correct_unused_bits": False,
    }
    with warnings.catch_warnings(record=True, action="always") as caught:
        values, _ = get_decoder(syntax).as_array(dataset, index=index, **options)
    # pydicom truncates a damaged code that is too long, with a warning: "387 vs. 384 bytes
    # expected".
    sentences = " ".join(str(warning.message) for warning in caught)
    for num_bytes, num_expected in re.findall(r"(\d+) vs\. (\d+) bytes", sentences):
        if int(num_bytes) - int(num_expected) > MAX_SURPLUS_BYTES:
            raise ValueError("the code becomes longer than the slice")
    return values


def is_whole(frame: Frame) -> bool:
    """Whether the HU of a slice are whole numbers of 32 bits."""
    # Pixels and scale of 16 bits each have products of 32.
    are_short = frame.pixels.dtype.itemsize <= 2
    return are_short and all(
        value == round(value) and abs(value) <= MAX_INT16
        for value in (frame.slope, frame.intercept)
    )


def to_hu(stored: np.ndarray, frame: Frame) -> np.ndarray:
    """Convert the stored values of a slice to HU.

    Padding of another modality becomes 0.

    Returns:
        HU (H, W): int32 where slope and intercept are whole numbers, else float32.
    """
    values = _with_sign(stored, frame)
    if is_whole(frame):
        hu = np.multiply(values, int(frame.slope), dtype=np.int32, casting="unsafe")
        hu += int(frame.intercept)
    else:
        hu = (values.astype(np.float64) * frame.slope + frame.intercept).astype(np.float32)
    if frame.pixels.padding:
        padding = _with_sign(np.array(frame.pixels.padding), frame).tolist()
        densest_hu = max(value * frame.slope for value in padding) + frame.intercept
        # Padding below air stays: every image is clipped later.
        if not frame.is_hu or densest_hu > DENSEST_HU:
            hu[(values >= min(padding)) & (values <= max(padding))] = frame.air
    return hu


def _with_sign(stored: np.ndarray, frame: Frame) -> np.ndarray:
    """Correct the sign of stored values where writers break the standard, and clear old overlays.

    * Unsigned values that can only be meant as negative become signed, such as padding of -2000
      that was written as 63536. Such values extend into unused bits, or lie at the end of the range
      and beyond all HU. Other unused bits are overlays.
    * Signed values without sign bits (none is negative although the file stores HU) get them.

    Of other modalities than CT only the overlays are cleared: their values are not expected to be
    negative.
    """
    pixels = frame.pixels
    # One beyond the largest unsigned value of the type, and of the bits that are used of it.
    stop = 1 << 8 * pixels.dtype.itemsize
    limit = 1 << pixels.bits_stored
    if pixels.dtype.kind == "i":
        return _with_sign_bits(stored, frame) if limit < stop else stored
    if not frame.is_hu:
        return stored & (limit - 1)
    first_negative = max(limit // 2, stop - MAX_PADDING)
    if limit < stop:
        # A negative number of few bits has ones in all unused bits.
        first_negative = stop - limit
    highest = int(stored.max())
    if highest < min(limit, first_negative):
        return stored
    # Large values that are possible HU are meant as they are.
    if limit == stop and highest * frame.slope + frame.intercept <= MAX_INT16:
        return stored
    return np.where(stored >= first_negative, stored.astype(np.int64) - stop, stored & (limit - 1))


def _with_sign_bits(stored: np.ndarray, frame: Frame) -> np.ndarray:
    """Give signed values of few bits their sign, where the writer has left it out."""
    # With an intercept near that of air, values of CT need no sign.
    if not frame.is_hu or frame.intercept <= AIR_HU / 2:
        return stored
    limit = 1 << frame.pixels.bits_stored
    lacks_sign = stored.min() >= 0 and limit // 2 <= int(stored.max()) < limit
    if not lacks_sign:
        return stored
    return np.where(stored >= limit // 2, stored.astype(np.int64) - limit, stored)
