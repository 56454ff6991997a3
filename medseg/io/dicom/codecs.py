"""Pixels that are compressed: one frame of a data set, decoded.

The JPEG family goes to imagecodecs, which raises on damaged data; GDCM ends the process on some. What the codestream's own header
says is compared with the file's before memory is asked for.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from pydicom import uid
from pydicom.dataset import FileDataset
from pydicom.encaps import get_frame
from pydicom.pixels import get_decoder

from medseg.errors import UserError
from medseg.io.dicom.fields import plain
from medseg.io.dicom.frames import Frame

JPEG = frozenset({uid.JPEGBaseline8Bit, uid.JPEGExtended12Bit, uid.JPEGLossless, uid.JPEGLosslessSV1})
JPEG_LS = frozenset({uid.JPEGLSLossless, uid.JPEGLSNearLossless})
JPEG_2000 = frozenset({uid.JPEG2000Lossless, uid.JPEG2000, uid.HTJ2KLossless, uid.HTJ2KLosslessRPCL, uid.HTJ2K})
BY_PYDICOM = frozenset({uid.ExplicitVRBigEndian, uid.DeflatedExplicitVRLittleEndian, uid.RLELossless})

JPEG_END = b"\xff\xd9"
JPEG_TAIL_BYTES = 10
"""Some writers fill a code up behind its end, not always with zeros."""

J2K_START = b"\xff\x4f\xff\x51"


def decode(dataset: FileDataset, frame: Frame) -> np.ndarray:
    """Decode the stored values (H, W) of a frame.

    Raises:
        UserError: If nothing here reads its encoding.
        Exception: Whatever a decoder raises on damaged data.
    """
    syntax = uid.UID(frame.pixels.transfer_syntax)
    if syntax in BY_PYDICOM:
        # Unused bits are judged elsewhere: scanners keep padding there.
        options: dict[str, bool] = {"correct_unused_bits": False}
        values, _ = get_decoder(syntax).as_array(dataset, index=frame.index, raw=True, **options)  # type: ignore[arg-type]
        return values
    if syntax not in JPEG | JPEG_LS | JPEG_2000:
        raise UserError(
            f"{frame.path}: its pixels are encoded as {plain(syntax.name)}, which is not read here; export the series without compression."
        )
    code = _code_of(dataset, frame.index)
    # The decoder of JPEG makes up what is missing, that of JPEG-LS may look for it for seconds.
    if syntax not in JPEG_2000 and JPEG_END not in code.rstrip(b"\0")[-JPEG_TAIL_BYTES:]:
        raise ValueError("the code ends early")
    bits, *shape = _j2k_format(code) if syntax in JPEG_2000 else _jpeg_format(code)
    if tuple(shape) != frame.shape or bits > 16:
        raise ValueError(f"the code holds {shape} pixels of {bits} bits")
    values = _decoder(syntax)(code)
    if values.shape != frame.shape:
        raise ValueError(f"the code holds {values.shape} values")
    # The sign is the header's: codes without one hold the lower bits, some have another one.
    stored = values.astype(np.int32) & ((1 << bits) - 1)
    return np.where(stored >> (bits - 1), stored - (1 << bits), stored) if frame.pixels.is_signed else stored


def _decoder(syntax: uid.UID) -> Callable[[bytes], np.ndarray]:
    import imagecodecs

    if syntax in JPEG_2000:
        return imagecodecs.jpeg2k_decode
    return imagecodecs.jpegls_decode if syntax in JPEG_LS else imagecodecs.jpeg_decode


def _code_of(dataset: FileDataset, index: int) -> bytes:
    """The code of one frame, which may lie in several fragments."""
    offsets = dataset.get("ExtendedOffsetTable"), dataset.get("ExtendedOffsetTableLengths")
    return get_frame(
        dataset.PixelData,
        index,
        extended_offsets=None if None in offsets else offsets,
        number_of_frames=int(dataset.get("NumberOfFrames") or 1),
    )


def _jpeg_format(code: bytes) -> tuple[int, int, int]:
    """Bits, rows and columns that the frame header (SOF) of JPEG or JPEG-LS names."""
    at = code.index(b"\xff\xd8") + 2
    while len(code) >= at + 9 and code[at] == 0xFF:
        marker = code[at + 1]
        # DHT, JPG and DAC lie among the frame headers; JPEG-LS has its own.
        if (0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC)) or marker == 0xF7:
            return code[at + 4], int.from_bytes(code[at + 5 : at + 7], "big"), int.from_bytes(code[at + 7 : at + 9], "big")
        at += 2 + int.from_bytes(code[at + 2 : at + 4], "big")
    raise ValueError("the code has no frame header")


def _j2k_format(code: bytes) -> tuple[int, int, int]:
    """Bits, rows and columns that the size segment (SIZ) of JPEG 2000 names."""
    at = code.index(J2K_START)
    right, bottom, left, top = (int.from_bytes(code[at + start : at + start + 4], "big") for start in (8, 12, 16, 20))
    return (code[at + 42] & 0x7F) + 1, bottom - top, right - left
