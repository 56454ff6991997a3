"""What the header of a DICOM file says: its slices, or what it is instead."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pydicom import dcmread
from pydicom.dataelem import RawDataElement
from pydicom.dataset import Dataset, FileDataset
from pydicom.uid import (
    HTJ2K,
    JPEG2000,
    UID,
    DeflatedExplicitVRLittleEndian,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    JPEGBaseline8Bit,
    JPEGExtended12Bit,
    JPEGLSNearLossless,
    MediaStorageDirectoryStorage,
)

from medseg.errors import UserError
from medseg.geometry.grid import DIRECTION_TOLERANCE
from medseg.io.checks import shown
from medseg.io.dicom.fields import items_of, numbers_of, pixel_value_of, plain, tag_of, text_of, value_of, whole_of

MAX_SLICE_PIXELS = 2**26
"""More (8192 × 8192) is a damaged header, for which no memory is asked."""

SECONDARY_CAPTURE = "1.2.840.10008.5.1.4.1.1.7"
NO_IMAGES = frozenset({"RTSTRUCT", "RTPLAN", "RTDOSE", "SEG", "SR", "PR", "KO", "REG", "DOC"})
"""Modalities whose objects are no images of a scanner."""

NO_GROUP = Dataset()

PIXEL_TAGS = (b"\xe0\x7f\x10\x00", b"\x7f\xe0\x00\x10")
"""Pixel Data, little and big endian."""

UNDEFINED = 2**32 - 1
"""Length of pixels that are compressed."""

NO_RESCALE = "slices without rescale slope and intercept: their values are taken for HU"

RESCALE_TYPES = frozenset({"", "HU", "HU_MOD", "US"})
"""What the rescaled values of a CT may be called; US is "unspecified"."""

LOSSY = frozenset({JPEGBaseline8Bit, JPEGExtended12Bit, JPEGLSNearLossless})
PERHAPS_LOSSY = frozenset({JPEG2000, HTJ2K})
"""Encodings that have lossless codes as well."""

PHASES = (
    ("acquisition", "AcquisitionNumber", "FrameContentSequence", "FrameAcquisitionNumber"),
    ("time point", "TemporalPositionIdentifier", "FrameContentSequence", "TemporalPositionIndex"),
    ("phase", "NominalPercentageOfCardiacPhase", "CardiacSynchronizationSequence", "NominalPercentageOfCardiacPhase"),
    ("stack", "StackID", "FrameContentSequence", "StackID"),
    ("kernel", "ConvolutionKernel", "CTReconstructionSequence", "ConvolutionKernel"),
    ("kVp", "KVP", "CTXRayDetailsSequence", "KVP"),
    ("image type", "ImageType", "CTImageFrameTypeSequence", "FrameType"),
    ("time", "AcquisitionTime", "FrameContentSequence", "FrameAcquisitionDateTime"),
)
"""What may tell volumes of one series apart: name, field of a file, sequence and field of a frame."""

FIELDS = (
    "SOPClassUID", "Modality", "ImageType", "SeriesInstanceUID", "SeriesNumber", "SeriesDescription",
    "Rows", "Columns", "NumberOfFrames", "SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence",
    "SamplesPerPixel", "PhotometricInterpretation", "BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation",
    "PixelPaddingValue", "PixelPaddingRangeLimit", "LossyImageCompression",
    "PixelSpacing", "ImagePositionPatient", "ImageOrientationPatient",
    "RescaleSlope", "RescaleIntercept", "RescaleType", "ModalityLUTSequence",
    *(keyword for _, keyword, _, _ in PHASES),
)  # fmt: skip
"""All that is read of a header."""


@dataclass(frozen=True)
class Series:
    """The series that an image belongs to.

    Attributes:
        uid: Series Instance UID.
        number: Series Number, or "".
        description: Series Description, or "".
    """

    uid: str
    number: str
    description: str

    def __str__(self) -> str:
        name = f"series {plain(self.number or self.uid)}" if self.number or self.uid else "unknown series"
        return name + (f" {shown(self.description)}" if self.description else "")


UNKNOWN_SERIES = Series("", "", "")


@dataclass(frozen=True)
class PixelFormat:
    """How a file stores its pixels.

    Attributes:
        transfer_syntax: UID of the encoding.
        offset: First byte of pixels that lie in the file as they are, little endian; None if they must be decoded.
        bits_allocated: 8, 16 or 32.
        bits_stored: At most that.
        is_signed: Whether they are two's complement.
        padding: Smallest and largest stored value that mean "no pixel", as the header says, or None.
    """

    transfer_syntax: str
    offset: int | None
    bits_allocated: int
    bits_stored: int
    is_signed: bool
    padding: tuple[int, int] | None


@dataclass(frozen=True)
class Frame:
    """One slice; its pixels are not read yet.

    Attributes:
        path: File.
        index: Number of the slice within its file, from 0.
        series: What it belongs to.
        shape: Rows and columns.
        spacing_mm: Distance of rows, then of columns.
        position_xyz_mm: Centre of the first pixel, LPS.
        axes: Direction of a row, then of a column: two LPS unit vectors.
        slope: Factor from stored value to HU.
        intercept: Added after it.
        pixels: How they are stored.
        phases: Value of each of `PHASES`, "" where there is none.
        remarks: What the user should know of it.
    """

    path: Path
    index: int
    series: Series
    shape: tuple[int, int]
    spacing_mm: tuple[float, float]
    position_xyz_mm: tuple[float, ...]
    axes: tuple[float, ...]
    slope: float
    intercept: float
    pixels: PixelFormat
    phases: tuple[str, ...]
    remarks: tuple[str, ...]

    def __str__(self) -> str:
        return f"'{self.path.name}'" + (f" frame {self.index + 1}" if self.index else "")


@dataclass(frozen=True)
class LeftOut:
    """An image that is no slice of a CT scan.

    Attributes:
        path: File.
        series: What it belongs to.
        reason: What it is instead.
    """

    path: Path
    series: Series
    reason: str


@dataclass(frozen=True)
class Unreadable:
    """A file that may hold slices of a CT scan and cannot be read; it is refused only with its series.

    Attributes:
        path: File.
        series: What it belongs to; `UNKNOWN_SERIES` where that cannot be read either.
        says: The sentence that refuses it, without the path.
    """

    path: Path
    series: Series
    says: str


Image = Frame | LeftOut | Unreadable


def _damage(error: Exception) -> str:
    """Say in one sentence, without the path, what a damaged file made pydicom raise."""
    reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
    return f"the DICOM file cannot be read ({plain(reason)}); it is damaged, copy or export it again."


def read_frames(path: Path) -> list[Image]:
    """Read the header of a file.

    Returns:
        Its slices, or what it is instead; nothing for a table of contents (DICOMDIR).
    """
    series = UNKNOWN_SERIES
    try:
        with path.open("rb") as file:
            # Forced: files without preamble are known by `is_dicom_file`.
            header = dcmread(file, stop_before_pixels=True, force=True, specific_tags=[tag_of(keyword) for keyword in FIELDS])
            if value_of(header.file_meta, "MediaStorageSOPClassUID") == MediaStorageDirectoryStorage:
                return []
            is_cut = _is_cut(header)
            # The description alone depends on the file's character set. A UID may be what the file was cut in, unless a number follows.
            description = "" if is_cut else " ".join(str(header.get("SeriesDescription") or "").split())
            if not is_cut or text_of(header, "SeriesNumber"):
                series = Series(text_of(header, "SeriesInstanceUID"), text_of(header, "SeriesNumber"), description)
            if is_cut:
                raise UserError("the DICOM file is truncated: it ends within its header; copy or export it again.")
            reason = _other_kind(header)
            if reason:
                return [LeftOut(path, series, reason)]
            pixels = _pixel_format(file, header)
        num_frames = whole_of(header, "NumberOfFrames", 1)
        shared, *_ = items_of(header, "SharedFunctionalGroupsSequence") or [NO_GROUP]
        groups = items_of(header, "PerFrameFunctionalGroupsSequence") or [NO_GROUP]
        if len(groups) != num_frames:
            return [LeftOut(path, series, "multi-frame image without a position for each frame")]
        return [_slice(path, index, (group, shared, header), series, pixels) for index, group in enumerate(groups)]
    except MemoryError:
        raise
    except Exception as error:
        return [Unreadable(path, series, str(error) if isinstance(error, UserError) else _damage(error))]


def _find(places: tuple[Dataset, ...], sequence: str, keyword: str) -> Dataset:
    """Find the dataset that holds a field: the frame's group, the group of all frames, else the file's header."""
    for place in places[:-1]:
        for item in items_of(place, sequence)[:1]:
            if tag_of(keyword) in item:
                return item
    return places[-1]


def _other_kind(header: FileDataset) -> str:
    """Say what an object is that holds no CT slice; "" for CT.

    Raises:
        UserError: If it is a CT image, or nothing says what it is, and no image is there; without the path.
    """
    modality, sop_class = text_of(header, "Modality"), text_of(header, "SOPClassUID")
    if modality in NO_IMAGES:
        return f"{modality} object"
    if sop_class.startswith(SECONDARY_CAPTURE):
        return "secondary capture"
    if not whole_of(header, "Rows", 0) or not whole_of(header, "Columns", 0):
        known_class = sop_class or text_of(header.file_meta, "MediaStorageSOPClassUID")
        words = UID(known_class).name.split()
        if not known_class or ("CT" in words and words[-2:] == ["Image", "Storage"]):
            raise UserError("the DICOM file is truncated or damaged: its header ends before an image; copy or export it again.")
        return "object without an image"
    if modality and modality != "CT":
        return f"{plain(modality)} image"
    if not modality and "CT" not in UID(sop_class).name.split():
        return "image of unknown modality"
    if whole_of(header, "SamplesPerPixel", 1) != 1 or text_of(header, "PhotometricInterpretation") == "PALETTE COLOR":
        return "colour image"
    return ""


def _is_cut(header: FileDataset) -> bool:
    """Whether a value is shorter than it should be, because the file ends there."""
    elements = [*header.file_meta.values(), *header.values()]
    return any(isinstance(one, RawDataElement) and len(one.value or b"") < one.length for one in elements)


def _slice(path: Path, index: int, places: tuple[Dataset, ...], series: Series, pixels: PixelFormat) -> Frame | LeftOut:
    """One slice from its own fields, those that it shares with other frames, and those of the file.

    Raises:
        UserError: If it has no place, or values that are not HU; without the path.
    """
    header = places[-1]
    image_types = [text_of(header, "ImageType"), text_of(_find(places, "CTImageFrameTypeSequence", "FrameType"), "FrameType")]
    if any("LOCALIZER" in image_type.upper().split("\\") for image_type in image_types):
        return LeftOut(path, series, "localiser")

    def numbers(sequence: str, keyword: str, count: int) -> tuple[float, ...] | None:
        return numbers_of(_find(places, sequence, keyword), keyword, count)

    position = numbers("PlanePositionSequence", "ImagePositionPatient", 3)
    axes = numbers("PlaneOrientationSequence", "ImageOrientationPatient", 6)
    if position is None or axes is None:
        return LeftOut(path, series, "image without a position and an orientation")
    spacing_mm = numbers("PixelMeasuresSequence", "PixelSpacing", 2)
    if spacing_mm is None or min(spacing_mm) <= 0:
        raise UserError(f"expected two positive numbers in PixelSpacing, got {spacing_mm}; export the series again.")
    lengths = math.hypot(*axes[:3]), math.hypot(*axes[3:])
    if min(lengths) == 0 or not math.isfinite(max(lengths)):
        raise UserError(f"expected two directions in ImageOrientationPatient, got {axes}; export the series again.")
    axes = tuple(value / lengths[place // 3] for place, value in enumerate(axes))
    if abs(sum(along * across for along, across in zip(axes[:3], axes[3:], strict=True))) > DIRECTION_TOLERANCE:
        raise UserError(
            "expected rows and columns at right angles, but ImageOrientationPatient is "
            f"{tuple(round(value, 6) for value in axes)}; export the DICOM series again."
        )

    remarks = []
    slope = numbers("PixelValueTransformationSequence", "RescaleSlope", 1)
    intercept = numbers("PixelValueTransformationSequence", "RescaleIntercept", 1)
    rescale_type = text_of(_find(places, "PixelValueTransformationSequence", "RescaleType"), "RescaleType")
    has_table = bool(items_of(header, "ModalityLUTSequence"))
    if has_table or rescale_type.upper() not in RESCALE_TYPES or (slope and slope[0] == 0):
        raise UserError(
            "expected a rescale slope and intercept to HU, but the slices have "
            f"{'a table of values' if 'ModalityLUTSequence' in header else 'a slope of 0' if slope == (0,) else plain(rescale_type)}; "
            "choose or export a series in HU."
        )
    if slope is None or intercept is None:
        remarks.append(NO_RESCALE)
    lossy = text_of(header, "LossyImageCompression")
    if lossy == "01" or pixels.transfer_syntax in LOSSY:
        remarks.append("the slices were compressed with loss")
    elif not lossy and pixels.transfer_syntax in PERHAPS_LOSSY:
        remarks.append("the slices may have been compressed with loss: their encoding permits it, and the header does not say")
    return Frame(
        path,
        index,
        series,
        (whole_of(header, "Rows", 0), whole_of(header, "Columns", 0)),
        (spacing_mm[0], spacing_mm[1]),
        position,
        axes,
        slope[0] if slope else 1.0,
        intercept[0] if intercept else 0.0,
        pixels,
        tuple(
            text_of(header, keyword) or text_of(_find(places, sequence, frame_keyword), frame_keyword)
            for _, keyword, sequence, frame_keyword in PHASES
        ),
        tuple(remarks),
    )


def _pixel_format(file: BinaryIO, header: FileDataset) -> PixelFormat:
    """Read how pixels are stored; the file stands at their element.

    Raises:
        UserError: If they are of a kind that we do not read, or fewer than the header says; without the path.
    """
    rows, columns, num_frames = (whole_of(header, keyword, 1) for keyword in ("Rows", "Columns", "NumberOfFrames"))
    bits = whole_of(header, "BitsAllocated", 16)
    stored = whole_of(header, "BitsStored", bits)
    high_bit = whole_of(header, "HighBit", stored - 1)
    if bits not in (8, 16, 32) or not 1 <= stored <= bits or high_bit != stored - 1 or rows * columns > MAX_SLICE_PIXELS:
        raise UserError(
            f"expected slices of 8, 16 or 32 bits a pixel, but the header says {rows} x {columns} pixels of {bits} "
            f"bits with {stored} used up to bit {high_bit}; export the DICOM series again."
        )
    is_signed = whole_of(header, "PixelRepresentation", 0) == 1
    syntax = value_of(header.file_meta, "TransferSyntaxUID") or (
        ImplicitVRLittleEndian if header.original_encoding[0] else ExplicitVRLittleEndian
    )
    offset = None
    element = file.read(8 if header.original_encoding[0] else 12)
    is_plain = syntax in (ImplicitVRLittleEndian, ExplicitVRLittleEndian)
    num_bytes = rows * columns * num_frames * bits // 8
    # A deflated file was read to its end, and is refused where it has none.
    is_missing = element[:4] not in PIXEL_TAGS and syntax != DeflatedExplicitVRLittleEndian
    length = int.from_bytes(element[-4:], "little")
    if is_plain and length == UNDEFINED:
        raise UserError("its pixels are compressed, but the header does not say how; export the series again.")
    if is_missing or (is_plain and length < num_bytes):
        raise UserError(
            f"the DICOM file is truncated or damaged: expected {num_frames} x {rows} x {columns} pixels of {bits} bits; copy or "
            "export it again."
        )
    if is_plain:
        offset = file.tell()
        if os.fstat(file.fileno()).st_size < offset + num_bytes:
            raise UserError("the DICOM file is truncated: it ends within its pixels; copy or export it again.")
    ends = [pixel_value_of(header, keyword, is_signed) for keyword in ("PixelPaddingValue", "PixelPaddingRangeLimit")]
    padding = [end for end in ends if end is not None]
    return PixelFormat(str(syntax), offset, bits, stored, is_signed, (min(padding), max(padding)) if padding else None)
