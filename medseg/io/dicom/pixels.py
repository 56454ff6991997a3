"""Reader of the pixels of one slice: decompression, and conversion of stored values to HU.

imagecodecs decodes the JPEG family; `README.md` of this folder compares it with other decoders. The
sizes that a codestream declares are compared with the header before memory is allocated. In this
module, HU also stands for the intensities of other modalities than CT.
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
from medseg.io.dicom.frames import Frame, PixelFormat, printable
from medseg.task import AIR_HU

# The largest value of a 12-bit CT, in HU. Padding between air and this value stays, since tissue
# has such values too; padding above it becomes air.
DENSEST_HU = 3071

# A negative padding that was written as an unsigned number is nearer than this to the end of the
# range: -2000 becomes 63536.
MAX_PADDING = 4096

# Largest signed number of 16 bits: bound of whole slopes and intercepts, and of possible HU.
MAX_INT16 = 2**15 - 1

# Decoders of imagecodecs by transfer syntax. `jpeg_decode` is not used: where libjpeg-turbo refuses
# a code, that function tries another decoder, which can end the process.
DECODERS = {
    **dict.fromkeys(uid.JPEGTransferSyntaxes, imagecodecs.jpeg8_decode),
    **dict.fromkeys(uid.JPEGLSTransferSyntaxes, imagecodecs.jpegls_decode),
    **dict.fromkeys(uid.JPEG2000TransferSyntaxes, imagecodecs.jpeg2k_decode),
}

# Most bytes by which a decoded RLE code may exceed a slice: some writers append zeros to a code,
# and each pair of zeros decodes to a byte.
MAX_SURPLUS_BYTES = 16

# How many of the last bytes of a JPEG code are searched for its end mark, once zeros at the end are
# removed: some writers append bytes behind the mark that are not zeros.
JPEG_TAIL_BYTES = 10

# Function that reads a file whose pixels are compressed. Callers may wrap it in a cache, since a
# file may hold several slices. Forced: pydicom would refuse a file without the DICOM preamble.
READ_FILE = partial(dcmread, force=True)


def read_hu(frame: Frame, read_file: Callable[[Path], FileDataset] = READ_FILE) -> np.ndarray:
    """Read the HU (H, W) of a slice: int32 or float32, as `to_hu` returns them.

    Args:
        frame: The slice.
        read_file: Reads a file whose pixels are compressed.

    Raises:
        UserError: If the pixels are damaged, too few, or compressed in an unknown way.
    """
    try:
        with config.disable_value_validation(), warnings.catch_warnings(action="ignore"):
            stored = _stored_values(frame, read_file)
            return to_hu(stored, frame)
    except (UserError, MemoryError, OSError):
        raise
    except Exception as error:  # decoders raise any type for damaged data
        raise UserError(
            f"{frame.path}: its pixels, encoded as {printable(frame.pixels.transfer_syntax.name)}, "
            "cannot be decoded; it is damaged, copy or export it again."
        ) from error


def _stored_values(frame: Frame, read_file: Callable[[Path], FileDataset]) -> np.ndarray:
    """Read the stored values (H, W) of a slice, and decode them where necessary.

    Raises:
        UserError: If no decoder reads the encoding of the slice.
        Exception: Any type that a decoder raises for damaged data.
    """
    pixels = frame.pixels
    if pixels.offset is not None:
        num_pixels = pixels.shape[0] * pixels.shape[1]
        slice_bytes = num_pixels * pixels.dtype.itemsize
        offset = pixels.offset + frame.index * slice_bytes
        values = np.fromfile(frame.path, pixels.dtype, num_pixels, offset=offset)
        return values.reshape(pixels.shape)
    try:
        get_decoder(pixels.transfer_syntax)  # only to learn whether there is one
    except NotImplementedError:
        raise UserError(
            f"{frame.path}: its pixels are encoded as {printable(pixels.transfer_syntax.name)}, "
            "which medseg does not read; export the series without compression."
        ) from None
    return decode(read_file(frame.path), pixels, frame.index)


def decode(dataset: Dataset, pixels: PixelFormat, index: int) -> np.ndarray:
    """Decode the stored values (H, W) of one frame of a file.

    Args:
        dataset: The file.
        pixels: Storage of its pixels.
        index: Number of the frame, from 0.

    Raises:
        Exception: Any type that a decoder raises for damaged data.
    """
    syntax = pixels.transfer_syntax
    if syntax not in DECODERS:
        return _decode_by_pydicom(dataset, syntax, index)
    offset_table = None
    offsets = dataset.get("ExtendedOffsetTable")
    lengths = dataset.get("ExtendedOffsetTableLengths")
    if offsets is not None and lengths is not None:
        offset_table = (offsets, lengths)
    code = get_frame(
        dataset.PixelData,
        index,
        extended_offsets=offset_table,
        number_of_frames=int(dataset.get("NumberOfFrames") or 1),
    )
    if syntax in uid.JPEG2000TransferSyntaxes:
        parameters = get_j2k_parameters(code)
    else:
        # A code that was cut off is refused here: the JPEG decoder would fill in missing pixels,
        # and the JPEG-LS decoder may never return. FFD8 marks the start, FFD9 the end.
        tail = code.rstrip(b"\0")[-JPEG_TAIL_BYTES:]
        if not code.startswith(b"\xff\xd8\xff") or b"\xff\xd9" not in tail:
            raise ValueError("the code does not start or end as it should")
        parameters = _get_jpg_parameters(code)
    bits = parameters["precision"]
    dtype = np.uint8 if bits <= 8 else np.uint16
    values = np.empty(pixels.shape, dtype)
    # The decoders raise, before they decode, for a code of another shape or of more than 16 bits.
    DECODERS[syntax](code, out=values)
    # The sign that a code declares may be wrong: its bits are kept, the header says if they have a
    # sign.
    stored = values.astype(np.int32) & (2**bits - 1)
    if pixels.dtype.kind != "i":
        return stored
    # Two's complement: the highest bit is the sign.
    return np.where(stored >= 2 ** (bits - 1), stored - 2**bits, stored)


def _decode_by_pydicom(dataset: Dataset, syntax: uid.UID, index: int) -> np.ndarray:
    """Decode one frame, such as of RLE, as `decode` does."""
    options: dict[str, Any] = {
        "raw": True,
        # Other plugins of RLE may be installed, with other results for damaged codes.
        "decoding_plugin": "pydicom",
        # Scanners keep padding in unused bits; `to_hu` clears them.
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


def has_whole_hu(frame: Frame) -> bool:
    """Whether the HU of a slice are whole numbers of 32 bits."""
    # Pixels of more than 16 bits may give HU beyond 32 bits. Others do not, with the largest slope
    # and intercept that are accepted below: 65535 * 32767 + 32767 < 2^31.
    if frame.pixels.dtype.itemsize > 2:
        return False
    scale = (frame.slope, frame.intercept)
    return all(value == round(value) and abs(value) <= MAX_INT16 for value in scale)


def to_hu(stored: np.ndarray, frame: Frame) -> np.ndarray:
    """Convert the stored values of a slice to HU.

    Padding above the range of tissue becomes air; padding of another modality than CT becomes 0.

    Args:
        stored: Stored values (H, W), without corrections.
        frame: The slice.

    Returns:
        HU (H, W): int32 if `has_whole_hu`, else float32.
    """
    values = _with_sign(stored, frame)
    if has_whole_hu(frame):
        # "unsafe" only permits the type: 32 bits hold the result, see `has_whole_hu`.
        hu = np.multiply(values, int(frame.slope), dtype=np.int32, casting="unsafe")
        hu += int(frame.intercept)
    else:
        hu = (values.astype(np.float64) * frame.slope + frame.intercept).astype(np.float32)
    if frame.pixels.padding:
        padding = _with_sign(np.array(frame.pixels.padding), frame)
        lowest, highest = int(padding.min()), int(padding.max())
        # The slope is positive, so the highest stored value gives the highest HU.
        highest_hu = highest * frame.slope + frame.intercept
        # Padding of a CT in the range of tissue stays, see `DENSEST_HU`. Padding below air stays
        # too: every image is clipped later.
        if not frame.is_hu or highest_hu > DENSEST_HU:
            hu[(values >= lowest) & (values <= highest)] = frame.air
    return hu


def _with_sign(stored: np.ndarray, frame: Frame) -> np.ndarray:
    """Correct the sign of stored values where writers break the standard, and clear old overlays.

    * Unsigned values that can only be meant as negative become signed, such as padding of -2000
      that was written as 63536. Such values extend into unused bits or, where all bits are used,
      lie at the end of the range and beyond all HU. Other contents of unused bits are overlays.
    * Signed values without sign bits (none is negative although the file stores HU) get them.

    In other modalities than CT only the overlays are cleared: no negative values are expected.

    Args:
        stored: Stored values of a slice, or its padding values; of any shape.
        frame: The slice.
    """
    pixels = frame.pixels
    # Number of values of the type (2^16 for 16 bits), and of the bits that are used of it.
    num_type_values = 2 ** (8 * pixels.dtype.itemsize)
    num_used_values = 2**pixels.bits_stored
    has_unused_bits = num_used_values < num_type_values
    used_bits = num_used_values - 1  # a mask
    if pixels.dtype.kind == "i":
        return _with_sign_bits(stored, frame) if has_unused_bits else stored
    if not frame.is_hu:
        return stored & used_bits
    # Stored values from this number on stand for negative numbers.
    if has_unused_bits:
        # A negative number of few bits has ones in all unused bits.
        first_negative = num_type_values - num_used_values
    else:
        # With all bits used, only padding is negative, and lies at the end of the range. 8 bits
        # have fewer values than `MAX_PADDING`: there the upper half of the range counts.
        first_negative = max(num_type_values // 2, num_type_values - MAX_PADDING)
    highest = int(stored.max())
    # Below both limits, the values hold neither overlays in unused bits nor negative numbers.
    if highest < min(num_used_values, first_negative):
        return stored
    # Large values that give possible HU are no negative padding.
    if not has_unused_bits and highest * frame.slope + frame.intercept <= MAX_INT16:
        return stored
    negative = stored.astype(np.int64) - num_type_values
    return np.where(stored >= first_negative, negative, stored & used_bits)


def _with_sign_bits(stored: np.ndarray, frame: Frame) -> np.ndarray:
    """Give signed values the sign bits that the writer has left out.

    The values use fewer bits than their type has: -1 in 12 bits was written as 4095.
    """
    # With an intercept of about -1024, the stored value of air is 0 and none is negative. Other
    # writers have an intercept of about 0; half of the HU of air separates the two.
    if not frame.is_hu or frame.intercept <= AIR_HU / 2:
        return stored
    num_used_values = 2**frame.pixels.bits_stored
    first_negative = num_used_values // 2
    lacks_sign = stored.min() >= 0 and first_negative <= int(stored.max()) < num_used_values
    if not lacks_sign:
        return stored
    negative = stored.astype(np.int64) - num_used_values
    return np.where(stored >= first_negative, negative, stored)
