"""DICOM headers: the slices of a file, or the reason why it contains none."""

import math
import os
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from pydicom import Dataset, FileDataset, config, dcmread, uid
from pydicom.dataelem import RawDataElement
from pydicom.filereader import _read_file_meta_info, read_preamble
from pydicom.multival import MultiValue
from pydicom.tag import Tag

from medseg.errors import UserError, require
from medseg.geometry.grid import DIRECTION_TOLERANCE
from medseg.io.volume import PACKED_BYTES, shown
from medseg.task import AIR_HU

MAX_PLAIN = 100
"""Longer texts are cut in messages; those of the standard are shorter."""

MAX_SLICE_PIXELS = 2**26
"""A header with more pixels per slice (8192 × 8192) is damaged."""

MAX_INFLATED_BYTES = 2**29
"""A deflated file is held in memory as a whole; this is an enhanced CT of 1000 slices."""

MAX_RESCALE = 1e6
"""Slopes and intercepts of CT, MR and PET are far below it."""

NO_IMAGES = frozenset({"RTSTRUCT", "RTPLAN", "RTDOSE", "SEG", "SR", "PR", "KO", "REG", "DOC"})
"""Modalities whose objects are not images of a scanner."""

NO_PIXELS = "object without an image"

MACROS = {
    "ImagePositionPatient": "PlanePositionSequence",
    "ImageOrientationPatient": "PlaneOrientationSequence",
    "PixelSpacing": "PixelMeasuresSequence",
    "SpacingBetweenSlices": "PixelMeasuresSequence",
    "ReferencedSegmentNumber": "SegmentIdentificationSequence",
    "RescaleSlope": "PixelValueTransformationSequence",
    "RescaleIntercept": "PixelValueTransformationSequence",
    "RescaleType": "PixelValueTransformationSequence",
    "FrameType": "CTImageFrameTypeSequence",
    "FrameAcquisitionNumber": "FrameContentSequence",
    "TemporalPositionIndex": "FrameContentSequence",
    "NominalPercentageOfCardiacPhase": "CardiacSynchronizationSequence",
    "StackID": "FrameContentSequence",
    "ConvolutionKernel": "CTReconstructionSequence",
    "KVP": "CTXRayDetailsSequence",
    "EffectiveEchoTime": "MREchoSequence",
    "DiffusionBValue": "MRDiffusionSequence",
    "FrameAcquisitionDateTime": "FrameContentSequence",
}
"""Fields of a frame in an enhanced (multi-frame) file, and the sequence that holds each."""

PHASES = (
    ("acquisition", "AcquisitionNumber", "FrameAcquisitionNumber"),
    ("time point", "TemporalPositionIdentifier", "TemporalPositionIndex"),
    ("phase", "NominalPercentageOfCardiacPhase", "NominalPercentageOfCardiacPhase"),
    ("stack", "StackID", "StackID"),
    ("kernel", "ConvolutionKernel", "ConvolutionKernel"),
    ("kVp", "KVP", "KVP"),
    ("echo time", "EchoTime", "EffectiveEchoTime"),
    ("b value", "DiffusionBValue", "DiffusionBValue"),
    ("image type", "ImageType", "FrameType"),
    ("time", "AcquisitionTime", "FrameAcquisitionDateTime"),
)
"""Properties that distinguish the volumes of one series: name, field of a file, field of a frame."""

FIELDS = [
    Tag(keyword)
    for keyword in (
    "SOPClassUID", "Modality", "PatientID", "StudyInstanceUID", "StudyDate", "SeriesInstanceUID", "SeriesNumber", "SeriesDescription",
    "Rows", "Columns", "NumberOfFrames", "SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence",
    "SamplesPerPixel", "PhotometricInterpretation", "BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation",
    "PixelPaddingValue", "PixelPaddingRangeLimit", "LossyImageCompression", "ModalityLUTSequence",
    *MACROS, *(keyword for _, keyword, _ in PHASES),
    )
]  # fmt: skip
"""Tags of all fields that are read of a header."""


@dataclass(frozen=True)
class Series:
    """The series of an image.

    Attributes:
        uid: Series Instance UID; "" where it cannot be read.
        number: Series Number, or "".
        description: Series Description, or "".
        patient: Patient ID, or "".
        study: Study Instance UID, or "".
        date: Study Date as DICOM writes it, `20240131`, or "".
    """

    uid: str = ""
    number: str = ""
    description: str = ""
    patient: str = ""
    study: str = ""
    date: str = ""

    @property
    def scope(self) -> str:
        """Patient and study, by which `series=<scope>:<number>` names them."""
        return f"{self.patient}:{self.study}"

    def is_in(self, scope: str) -> bool:
        """Whether a scope names its patient, its study, or both; the study by UID or date.

        The scope ":" names series without identities, as those that were anonymised.
        """
        names = {self.patient, self.study, self.scope}
        if self.date:
            names.add(f"{self.patient}:{self.date}")
        return scope in names - {""}

    def __str__(self) -> str:
        name = (
            f"series {plain(self.number or self.uid)}"
            if self.number or self.uid
            else "unknown series"
        )
        return name + (f" {shown(self.description)}" if self.description else "")


@dataclass(frozen=True)
class PixelFormat:
    """Storage of the pixels of a file.

    Attributes:
        shape: Rows and columns of a slice.
        transfer_syntax: UID of the encoding.
        offset: First byte of uncompressed little-endian pixels; None if they must be decoded.
        dtype: Type of the stored values, little endian.
        bits_stored: Bits that are used of each value.
        padding: The stored value that means "no pixel" by the header, or the smallest and the
            largest such value, or none.
    """

    shape: tuple[int, int]
    transfer_syntax: uid.UID
    offset: int | None
    dtype: np.dtype[Any]
    bits_stored: int
    padding: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Frame:
    """One slice whose pixels have not been read.

    Attributes:
        path: File.
        index: Number of the slice within its file, from 0.
        series: Its series.
        pixels: Storage of its pixels.
        spacing_mm: Distance of rows, then of columns.
        position_xyz_mm: Centre of the first pixel, LPS.
        axes: LPS unit vectors (2, 3) along a row and along a column.
        is_hu: Whether the values are HU, as those of CT.
        slope: Factor from stored value to HU, or to the intensity of another modality.
        intercept: Added after the slope.
        has_rescale: Whether the header gives slope and intercept.
        phases: Value of each of `PHASES`, "" where there is none.
        warnings: Sentences for the user.
    """

    path: Path
    index: int
    series: Series
    pixels: PixelFormat
    spacing_mm: tuple[float, ...]
    position_xyz_mm: tuple[float, ...]
    axes: np.ndarray
    is_hu: bool
    slope: float
    intercept: float
    has_rescale: bool
    phases: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def air(self) -> int:
        """Value of voxels outside the patient."""
        return AIR_HU if self.is_hu else 0

    def __str__(self) -> str:
        return f"'{self.path.name}'" + (f" frame {self.index + 1}" if self.index else "")


@dataclass(frozen=True)
class NoSlice:
    """A file, or a frame of it, that gives no slice.

    Attributes:
        path: File.
        series: Its series.
        reason: What it is instead; for an unreadable file the message that refuses it, without the
            path.
        is_unreadable: Whether it may hold slices that cannot be read. Such a file is refused only
            with its series.
        is_image: Whether it is an image of the patient other than a localiser.
    """

    path: Path
    series: Series
    reason: str
    is_unreadable: bool = False
    is_image: bool = False


def plain(text: str) -> str:
    """Prepare a text of a header for a message: quoted only where it is long or would act on a terminal."""
    return text if text.isprintable() and len(text) <= MAX_PLAIN else shown(text)


def _text(value: Any) -> str:
    """Write the value of a field on one line; "" where it is missing."""
    values = value if isinstance(value, MultiValue) else [value]
    texts = (
        "" if one is None else f"{one:g}" if isinstance(one, float) else str(one) for one in values
    )
    return "\\".join(" ".join(text.split()) for text in texts)


def _whole(header: Dataset, keyword: str, default: int) -> int:
    """Read a field that is a whole number; another value raises ValueError."""
    return default if header.get(keyword) in (None, "") else int(header[keyword].value)


def field_of(places: tuple[Dataset, ...], keyword: str) -> Any:
    """Find the value of a field in the group of a frame, in the group of all frames, else in the header of the file."""
    items = [
        item
        for group in places[:-1]
        for item in (group.get(MACROS[keyword]) or [])[:1]
        if keyword in item
    ]
    return (items or places[-1:])[0].get(keyword)


def read_numbers(places: tuple[Dataset, ...], keyword: str, count: int) -> tuple[float, ...] | None:
    """Read a field of `count` numbers; None where it is missing or empty.

    Raises:
        ValueError: If there are not as many, or one is not finite.
    """
    value = field_of(places, keyword)
    if value in (None, ""):
        return None
    values = value if isinstance(value, MultiValue) else [value]
    numbers = tuple(map(float, values))
    # Python alone takes 1_000 and digits of other scripts for numbers.
    is_plain = all(str(one).isascii() and "_" not in str(one) for one in values)
    if len(numbers) != count or not is_plain or not all(map(math.isfinite, numbers)):
        raise ValueError(f"{keyword} should hold {count} numbers and holds {value}")
    return numbers


def read_frames(path: Path, modality: str = "CT") -> list[Frame | NoSlice]:
    """Read the header of a file.

    Values that break the form of the standard are accepted: those that are used are checked here.

    Args:
        path: The file.
        modality: Modality of the slices that are wanted, as DICOM names it; "" takes any.

    Returns:
        Its slices, or the reasons why there are none; nothing for a table of contents (DICOMDIR).
    """
    series = Series()
    try:
        with (
            path.open("rb") as file,
            config.disable_value_validation(),
            warnings.catch_warnings(action="ignore"),
        ):
            _check_inflated(file)
            # Forced, because `is_dicom_file` also finds files without preamble.
            header = dcmread(file, stop_before_pixels=True, force=True, specific_tags=FIELDS)
            # First of all: access to a value replaces its raw bytes.
            elements = [*header.file_meta.values(), *header.values()]
            is_cut = any(
                isinstance(one, RawDataElement) and len(one.value or b"") < one.length
                for one in elements
            )
            if header.file_meta.get("MediaStorageSOPClassUID") == uid.MediaStorageDirectoryStorage:
                return []
            number = _text(header.get("SeriesNumber"))
            # Where the file ends within its series, only a number after the UID proves that the UID
            # is whole.
            if number or not is_cut:
                keywords = ("SeriesDescription", "PatientID", "StudyInstanceUID", "StudyDate")
                about = [] if is_cut else [_text(header.get(keyword)) for keyword in keywords]
                series = Series(_text(header.get("SeriesInstanceUID")), number, *about)
            require(
                not is_cut,
                "the DICOM file is truncated: it ends within its header; copy or export it again.",
            )
            if reason := _other_kind(header, modality):
                return [NoSlice(path, series, reason)]
            pixels = _pixel_format(file, header)
            shared = list(header.get("SharedFunctionalGroupsSequence") or [])[:1]
            groups = list(header.get("PerFrameFunctionalGroupsSequence") or [])
            places = [(group, *shared, header) for group in groups] or [(*shared, header)]
            if len(places) != _whole(header, "NumberOfFrames", 1):
                return [
                    NoSlice(
                        path,
                        series,
                        "multi-frame image without a position for each frame",
                        is_image=True,
                    )
                ]
            return [
                _slice(path, index, one, series, pixels, is_hu=modality == "CT")
                for index, one in enumerate(places)
            ]
    except MemoryError:
        raise
    except Exception as error:
        why = (
            getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        )
        # All but refusals of this module is what a damaged file makes pydicom raise.
        if not isinstance(error, UserError):
            why = f"the DICOM file cannot be read ({plain(why)}); it is damaged, copy or export it again."
        return [NoSlice(path, series, why, is_unreadable=True)]


def _check_inflated(file: BinaryIO) -> None:
    """Refuse a deflated file that would become larger than any image: pydicom inflates it as a whole.

    Raises:
        UserError: If it would; the message has no path.
    """
    read_preamble(file, force=True)
    if _read_file_meta_info(file).get("TransferSyntaxUID") == uid.DeflatedExplicitVRLittleEndian:
        decoder, num_bytes = zlib.decompressobj(-zlib.MAX_WBITS), 0
        while not decoder.eof and (packed := decoder.unconsumed_tail or file.read(PACKED_BYTES)):
            num_bytes += len(decoder.decompress(packed, PACKED_BYTES))
            require(
                num_bytes <= MAX_INFLATED_BYTES,
                f"expected a deflated DICOM file of at most {MAX_INFLATED_BYTES >> 20} MiB, but it is larger; copy it again, or export "
                "it without compression.",
            )
    file.seek(0)


def _other_kind(header: FileDataset, wanted: str) -> str:
    """Name an object that holds no slice of the wanted modality; "" for one that does.

    Raises:
        UserError: If no image is there, and the object is an image of that modality or of unknown
            kind; the message has no path.
    """
    modality, sop_class = _text(header.get("Modality")), _text(header.get("SOPClassUID"))
    words = uid.UID(
        sop_class or _text(header.file_meta.get("MediaStorageSOPClassUID"))
    ).name.split()
    kinds = {
        f"{modality} object": modality in NO_IMAGES,
        "secondary capture": sop_class.startswith(uid.SecondaryCaptureImageStorage),
        NO_PIXELS: not _whole(header, "Rows", 0) or not _whole(header, "Columns", 0),
        f"{plain(modality)} image": bool(wanted) and modality not in ("", wanted),
        "image of unknown modality": bool(wanted) and not modality and wanted not in words,
        "colour image": _whole(header, "SamplesPerPixel", 1) != 1
        or _text(header.get("PhotometricInterpretation")) == "PALETTE COLOR",
    }
    kind = next((kind for kind, applies in kinds.items() if applies), "")
    may_be_wanted = not words or (
        (not wanted or wanted in words) and words[-2:] == ["Image", "Storage"]
    )
    require(
        kind != NO_PIXELS or not may_be_wanted,
        "the DICOM file is truncated or damaged: its header ends before an image; copy or export it again.",
    )
    return kind


def _slice(
    path: Path,
    index: int,
    places: tuple[Dataset, ...],
    series: Series,
    pixels: PixelFormat,
    *,
    is_hu: bool,
) -> Frame | NoSlice:
    """Make one slice from the fields of its own group, of the group of all frames and of the file.

    Raises:
        UserError: If it has no position, or values that are not HU; without the path.
    """
    header = places[-1]
    if any(
        "LOCALIZER" in _text(value).upper().split("\\")
        for value in (header.get("ImageType"), field_of(places, "FrameType"))
    ):
        return NoSlice(path, series, "localiser")
    position = read_numbers(places, "ImagePositionPatient", 3)
    orientation = read_numbers(places, "ImageOrientationPatient", 6)
    if position is None or orientation is None:
        return NoSlice(path, series, "image without a position and an orientation", is_image=True)
    spacing_mm = read_numbers(places, "PixelSpacing", 2) or ()
    require(
        bool(spacing_mm) and min(spacing_mm) > 0,
        f"expected two positive numbers in PixelSpacing, got {spacing_mm or None}; export the series again.",
    )
    axes = np.reshape(orientation, (2, 3))
    lengths = np.array([math.hypot(*axis) for axis in axes])
    require(
        lengths.min() > 0 and math.isfinite(lengths.max()),
        f"expected two directions in ImageOrientationPatient, got {orientation}; export the series again.",
    )
    axes = axes / lengths[:, None]
    require(
        abs(axes[0] @ axes[1]) <= DIRECTION_TOLERANCE,
        f"expected rows and columns at right angles, but ImageOrientationPatient is {tuple(axes.round(6).ravel().tolist())}; "
        "export the DICOM series again.",
    )
    slope, intercept = (
        read_numbers(places, keyword, 1) for keyword in ("RescaleSlope", "RescaleIntercept")
    )
    rescale_type = _text(field_of(places, "RescaleType"))
    # A negative slope would exchange air and bone. US means unspecified.
    wrong = [f"a slope of {one:g}" for one in slope or () if not 0 < one <= MAX_RESCALE]
    wrong += [f"an intercept of {one:g}" for one in intercept or () if abs(one) > MAX_RESCALE]
    what = (
        ""
        if not is_hu or rescale_type.upper() in ("", "HU", "HU_MOD", "US")
        else plain(rescale_type)
    )
    what = "a table of values" if header.get("ModalityLUTSequence") else wrong[0] if wrong else what
    require(
        not what,
        f"expected a rescale slope and intercept to HU, but the slices have {what}; choose or export a series in HU.",
    )
    lossy = _text(header.get("LossyImageCompression"))
    sentences = {
        "slices without rescale slope and intercept: their values are assumed to be HU": is_hu
        and None in (slope, intercept),
        "the slices were compressed with loss": lossy == "01"
        or pixels.transfer_syntax
        in (uid.JPEGBaseline8Bit, uid.JPEGExtended12Bit, uid.JPEGLSNearLossless),
        "the slices may have been compressed with loss: their encoding permits it, and the header does not say": (
            not lossy and pixels.transfer_syntax in (uid.JPEG2000, uid.HTJ2K)
        ),
    }
    return Frame(
        path,
        index,
        series,
        pixels,
        spacing_mm,
        position,
        axes,
        is_hu,
        slope[0] if slope else 1.0,
        intercept[0] if intercept else 0.0,
        slope is not None and intercept is not None,
        tuple(
            _text(header.get(keyword)) or _text(field_of(places, frame_keyword))
            for _, keyword, frame_keyword in PHASES
        ),
        tuple(sentence for sentence, applies in sentences.items() if applies),
    )


def _pixel_format(file: BinaryIO, header: FileDataset) -> PixelFormat:
    """Read the storage of the pixels.

    Args:
        file: Open at the element of the pixels.
        header: What precedes it.

    Raises:
        UserError: If the pixels are of an unknown kind, or fewer than the header says; without the
            path.
    """
    rows, columns, num_frames = (
        _whole(header, keyword, 1) for keyword in ("Rows", "Columns", "NumberOfFrames")
    )
    bits = _whole(header, "BitsAllocated", 16)
    stored = _whole(header, "BitsStored", bits)
    high_bit = _whole(header, "HighBit", stored - 1)
    require(
        bits in (8, 16, 32)
        and 1 <= stored <= bits
        and high_bit == stored - 1
        and rows * columns <= MAX_SLICE_PIXELS,
        f"expected slices of 8, 16 or 32 bits a pixel, but the header says {rows} x {columns} pixels of {bits} bits with {stored} "
        f"used up to bit {high_bit}; export the DICOM series again.",
    )
    # The transfer syntax in the header; the actual encoding may differ.
    is_implicit, is_little_endian = header.original_encoding
    syntax = uid.UID(
        header.file_meta.get("TransferSyntaxUID")
        or (uid.ImplicitVRLittleEndian if is_implicit else uid.ExplicitVRLittleEndian)
    )
    is_plain = syntax in (uid.ImplicitVRLittleEndian, uid.ExplicitVRLittleEndian)
    num_bytes = rows * columns * num_frames * bits // 8
    element = file.read(8)  # tag, length; explicit: tag, type, length
    # These letters would be an odd length, which no element has.
    length = int.from_bytes(
        file.read(4) if element[4:6] in (b"OB", b"OW", b"UN") else element[4:], "little"
    )
    require(
        not is_plain or length != 2**32 - 1,  # the undefined length of compressed pixels
        "its pixels are compressed, but the header does not say how; export the series again.",
    )
    # The tag of the pixels, little or big endian. A deflated file has been read to its end, and is
    # refused where it has none.
    is_there = (
        element[:4] in (b"\xe0\x7f\x10\x00", b"\x7f\xe0\x00\x10")
        or syntax == uid.DeflatedExplicitVRLittleEndian
    )
    require(
        is_there and (not is_plain or length >= num_bytes),
        f"the DICOM file is truncated or damaged: expected {num_frames} x {rows} x {columns} pixels of {bits} bits; copy or export it "
        "again.",
    )
    require(
        not is_plain
        or length
        < num_bytes + min(rows, columns) * bits // 8,  # less than a row or a column: padding
        f"expected {num_frames} x {rows} x {columns} pixels of {bits} bits, but the DICOM file holds {length} bytes of them; it is damaged: "
        "copy or export it again.",
    )
    require(
        not is_plain or os.fstat(file.fileno()).st_size >= file.tell() + num_bytes,
        "the DICOM file is truncated: it ends within its pixels; copy or export it again.",
    )
    dtype = np.dtype(f"<{'i' if _whole(header, 'PixelRepresentation', 0) == 1 else 'u'}{bits // 8}")
    # Writers do not agree on the type of padding values: their bytes are read as a pixel.
    padding = [
        int.from_bytes(end.value, "little" if is_little_endian else "big", signed=dtype.kind == "i")
        for end in (
            header.get_item(keyword) for keyword in ("PixelPaddingValue", "PixelPaddingRangeLimit")
        )
        if isinstance(end, RawDataElement) and end.value
    ]
    return PixelFormat(
        (rows, columns),
        syntax,
        file.tell() if is_plain else None,
        dtype,
        stored,
        tuple(sorted(padding)),
    )
