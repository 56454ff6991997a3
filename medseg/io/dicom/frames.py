"""DICOM headers: the slices of a file, or the reason why it contains none."""

import math
import os
import warnings
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from pydicom import Dataset, FileDataset, config, dcmread, uid
from pydicom.dataelem import RawDataElement
from pydicom.filereader import _read_file_meta_info, read_preamble
from pydicom.multival import MultiValue
from pydicom.tag import Tag

from medseg.errors import UserError
from medseg.geometry.grid import DIRECTION_TOLERANCE
from medseg.io.identity import Identity, written_date
from medseg.io.volume import PACKED_BYTES, shown
from medseg.task import AIR_HU

# Longer texts are cut in messages; those of the standard are shorter.
MAX_PLAIN_LETTERS = 100

# A header with more pixels per slice (8192 × 8192) is damaged.
MAX_SLICE_PIXELS = 2**26

# A deflated file is held in memory as a whole; this is an enhanced CT of 1000 slices.
MAX_INFLATED_BYTES = 2**29

# Largest slope and intercept; those of CT, MR and PET are far below it.
MAX_RESCALE = 1e6

# Modalities whose objects are not images of a scanner.
NO_IMAGES = frozenset({"RTSTRUCT", "RTPLAN", "RTDOSE", "SEG", "SR", "PR", "KO", "REG", "DOC"})

# Reason of a `NoSlice`.
NO_PIXELS = "object without an image"

# Fields of a frame in an enhanced (multi-frame) file, and the sequence that holds each.
MACROS = {
    "ImagePositionPatient": "PlanePositionSequence",
    "ImageOrientationPatient": "PlaneOrientationSequence",
    "PixelSpacing": "PixelMeasuresSequence",
    "SpacingBetweenSlices": "PixelMeasuresSequence",
    "SliceThickness": "PixelMeasuresSequence",
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

# Rescale types of CT whose values are HU; US means unspecified.
HU_TYPES = ("", "HU", "HU_MOD", "US")

# Encodings whose pixels are read from the file as they are.
PLAIN_SYNTAXES = (uid.ImplicitVRLittleEndian, uid.ExplicitVRLittleEndian)

# Encodings that always lose detail.
LOSSY_SYNTAXES = (uid.JPEGBaseline8Bit, uid.JPEGExtended12Bit, uid.JPEGLSNearLossless)

# Encodings that may lose detail.
MAYBE_LOSSY_SYNTAXES = (uid.JPEG2000, uid.HTJ2K)

# Tag of the pixels (7FE0,0010), little or big endian.
PIXEL_TAGS = (b"\xe0\x7f\x10\x00", b"\x7f\xe0\x00\x10")

# Length of an element of compressed pixels, whose end is marked instead.
UNDEFINED_LENGTH = 2**32 - 1

# What distinguishes the volumes of one series: name, field of a file, field of a frame.
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

# All fields that are read of a header.
_KEYWORDS = [
    "SOPClassUID", "Modality", "PatientID", "StudyInstanceUID", "StudyDate",
    "SeriesInstanceUID", "SeriesNumber", "SeriesDescription", "Rows", "Columns", "NumberOfFrames",
    "SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence",
    "SamplesPerPixel", "PhotometricInterpretation", "BitsAllocated", "BitsStored", "HighBit",
    "PixelRepresentation", "PixelPaddingValue", "PixelPaddingRangeLimit", "LossyImageCompression",
    "ModalityLUTSequence", *MACROS,
]  # fmt: skip
_KEYWORDS += [keyword for _, keyword, _ in PHASES]
FIELDS = [Tag(keyword) for keyword in _KEYWORDS]


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
        modality: Modality as DICOM names it, such as `CT`, or "".
    """

    uid: str = ""
    number: str = ""
    description: str = ""
    patient: str = ""
    study: str = ""
    date: str = ""
    modality: str = ""

    @property
    def scope(self) -> str:
        """Patient and study, by which `series=<scope>:<number>` names them."""
        return f"{self.patient}:{self.study}"

    @property
    def identity(self) -> Identity:
        """What a result says of the scan."""
        return Identity(self.patient, written_date(self.date), self.number, self.description)

    def is_in(self, scope: str) -> bool:
        """Whether a scope names its patient, its study, or both; the study by UID or date.

        The scope ":" (no patient, no study) names anonymised series, which have no identity.
        """
        names = {self.patient, self.study, self.scope}
        if self.date:
            names.add(f"{self.patient}:{self.date}")
        return scope in names - {""}

    def __str__(self) -> str:
        name = "unknown series"
        if self.number or self.uid:
            name = f"series {plain(self.number or self.uid)}"
        if self.description:
            name += f" {shown(self.description)}"
        return name


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
        thickness_mm: Slice Thickness, or None.
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
    thickness_mm: float | None = None

    @property
    def air(self) -> int:
        """Value of voxels outside the patient."""
        return AIR_HU if self.is_hu else 0

    def __str__(self) -> str:
        name = f"'{self.path.name}'"
        return f"{name} frame {self.index + 1}" if self.index else name


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
    """Prepare a text of a header for a message.

    It is quoted only where it is long or would act on a terminal.
    """
    is_plain = text.isprintable() and len(text) <= MAX_PLAIN_LETTERS
    return text if is_plain else shown(text)


def _values(value: Any) -> Sequence[Any]:
    """List the values of a field, which may be one alone."""
    return value if isinstance(value, MultiValue) else [value]


def _text(value: Any) -> str:
    """Write the value of a field on one line; "" where it is missing."""
    return "\\".join(map(_word, _values(value)))


def _word(item: Any) -> str:
    """Write one of the values of a field on one line."""
    if item is None:
        return ""
    text = f"{item:g}" if isinstance(item, float) else str(item)
    return " ".join(text.split())


def _whole(header: Dataset, keyword: str, default: int) -> int:
    """Read a field that is a whole number; another value raises ValueError."""
    if header.get(keyword) in (None, ""):
        return default
    return int(header[keyword].value)


def field_of(places: tuple[Dataset, ...], keyword: str) -> Any:
    """Find the value of a field of a frame.

    Args:
        places: Where the field may be, in this order: of an enhanced file the group of the frame,
            then the group of all frames; of any file its header.
        keyword: The field.

    Returns:
        The value in the first place that has it; None where none has.
    """
    for group in places[:-1]:
        sequence = group.get(MACROS[keyword])
        if sequence and keyword in sequence[0]:
            return sequence[0].get(keyword)
    return places[-1].get(keyword)


def read_numbers(places: tuple[Dataset, ...], keyword: str, count: int) -> tuple[float, ...] | None:
    """Read a field of `count` numbers; None where it is missing or empty.

    Raises:
        ValueError: If there are not as many, or one is not finite.
    """
    value = field_of(places, keyword)
    if value in (None, ""):
        return None
    values = _values(value)
    numbers = tuple(map(float, values))
    # Python alone takes 1_000 and digits of other scripts for numbers.
    texts = map(str, values)
    is_plain = all(text.isascii() and "_" not in text for text in texts)
    if len(numbers) != count or not is_plain or not all(map(math.isfinite, numbers)):
        raise ValueError(f"{keyword} should hold {count} numbers and holds {value}")
    return numbers


def _read_number(places: tuple[Dataset, ...], keyword: str) -> float | None:
    """Read a field of one number as `read_numbers` does."""
    numbers = read_numbers(places, keyword, 1)
    return numbers[0] if numbers else None


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
            # Before any value is looked at, which replaces its raw bytes.
            is_cut = _ends_within(header)
            if header.file_meta.get("MediaStorageSOPClassUID") == uid.MediaStorageDirectoryStorage:
                return []
            series = _read_series(header, is_cut=is_cut)
            if is_cut:
                raise UserError(
                    "the DICOM file is truncated: it ends within its header; "
                    "copy or export it again."
                )
            return _read_slices(path, file, header, series, modality)
    except MemoryError:
        raise
    except Exception as error:
        return [NoSlice(path, series, _why_unreadable(error), is_unreadable=True)]


def _ends_within(header: FileDataset) -> bool:
    """Whether the file ends before an element of its header has all its bytes."""
    for element in (*header.file_meta.values(), *header.values()):
        if isinstance(element, RawDataElement) and len(element.value or b"") < element.length:
            return True
    return False


def _read_series(header: FileDataset, *, is_cut: bool) -> Series:
    """Read the series of a file, as far as its values are certain to be whole.

    Args:
        header: The header.
        is_cut: Whether the file ends within it.
    """
    uid_text = _text(header.get("SeriesInstanceUID"))
    number = _text(header.get("SeriesNumber"))
    if is_cut:
        # Only the number, which follows the UID, proves that the UID is whole.
        return Series(uid_text, number) if number else Series()
    return Series(
        uid_text,
        number,
        description=_text(header.get("SeriesDescription")),
        patient=_text(header.get("PatientID")),
        study=_text(header.get("StudyInstanceUID")),
        date=_text(header.get("StudyDate")),
        modality=_text(header.get("Modality")),
    )


def _read_slices(
    path: Path, file: BinaryIO, header: FileDataset, series: Series, modality: str
) -> list[Frame | NoSlice]:
    """Read the slices that a whole header describes, or why it describes none.

    Args:
        path: The file, as the slices name it.
        file: Open at the element of the pixels.
        header: What precedes it.
        series: Its series.
        modality: As for `read_frames`.

    Raises:
        UserError: If the slices are damaged or not in HU; without the path.
    """
    kind = _other_kind(header, modality)
    if kind:
        return [NoSlice(path, series, kind)]
    pixels = _pixel_format(file, header)
    shared = list(header.get("SharedFunctionalGroupsSequence") or [])[:1]
    groups = list(header.get("PerFrameFunctionalGroupsSequence") or [])
    places = [(group, *shared, header) for group in groups]
    if not places:
        # A file of one slice has no groups of frames.
        places = [(*shared, header)]
    if len(places) != _whole(header, "NumberOfFrames", 1):
        reason = "multi-frame image without a position for each frame"
        return [NoSlice(path, series, reason, is_image=True)]
    is_hu = modality == "CT"
    return [
        _make_slice(path, index, place, series, pixels, is_hu=is_hu)
        for index, place in enumerate(places)
    ]


def _why_unreadable(error: Exception) -> str:
    """Say in a message without the path why a file cannot be read."""
    reason = getattr(error, "strerror", None) or " ".join(str(error).split())
    reason = reason or type(error).__name__
    if isinstance(error, UserError):
        return reason
    # Anything else is what pydicom raises for a damaged file.
    return (
        f"the DICOM file cannot be read ({plain(reason)}); it is damaged, copy or export it again."
    )


def _check_inflated(file: BinaryIO) -> None:
    """Refuse a deflated file that would become larger than any image.

    pydicom inflates it as a whole.

    Raises:
        UserError: If it would; the message has no path.
    """
    read_preamble(file, force=True)
    syntax = _read_file_meta_info(file).get("TransferSyntaxUID")
    is_deflated = syntax == uid.DeflatedExplicitVRLittleEndian
    if is_deflated and _inflates_beyond(file, MAX_INFLATED_BYTES):
        raise UserError(
            f"expected a deflated DICOM file of at most {MAX_INFLATED_BYTES >> 20} MiB, but it is "
            "larger; copy it again, or export it without compression."
        )
    file.seek(0)


def _inflates_beyond(file: BinaryIO, max_bytes: int) -> bool:
    """Whether the deflated rest of a file becomes larger than so many bytes; none are kept."""
    decoder = zlib.decompressobj(-zlib.MAX_WBITS)
    num_bytes = 0
    while not decoder.eof:
        # A call returns a bounded part, and leaves what it did not get to.
        packed = decoder.unconsumed_tail or file.read(PACKED_BYTES)
        if not packed:
            break
        num_bytes += len(decoder.decompress(packed, PACKED_BYTES))
        if num_bytes > max_bytes:
            return True
    return False


def _other_kind(header: FileDataset, wanted_modality: str) -> str:
    """Say what an object is that holds no slice of the wanted modality.

    Args:
        header: Header of the file.
        wanted_modality: As DICOM names it; "" takes any.

    Returns:
        Its kind, for `NoSlice.reason`; "" for an object that holds such slices.

    Raises:
        UserError: If no image is there, and the object is an image of that modality or of unknown
            kind; the message has no path.
    """
    modality = _text(header.get("Modality"))
    sop_class = _text(header.get("SOPClassUID"))
    storage_class = _text(header.file_meta.get("MediaStorageSOPClassUID"))
    # Names of classes are such as "CT Image Storage".
    class_words = uid.UID(sop_class or storage_class).name.split()
    has_pixels = bool(_whole(header, "Rows", 0) and _whole(header, "Columns", 0))
    # The order matters: each test presumes that those before it did not apply.
    if modality in NO_IMAGES:
        return f"{modality} object"
    # The UID of a variant, such as one of several frames, is that UID, a dot and a number.
    capture = uid.SecondaryCaptureImageStorage
    if sop_class == capture or sop_class.startswith(f"{capture}."):
        return "secondary capture"
    if not has_pixels:
        _refuse_lost_image(class_words, wanted_modality)
        return NO_PIXELS
    if wanted_modality and modality not in ("", wanted_modality):
        return f"{plain(modality)} image"
    if wanted_modality and not modality and wanted_modality not in class_words:
        return "image of unknown modality"
    return "colour image" if _is_colour(header) else ""


def _refuse_lost_image(class_words: list[str], wanted_modality: str) -> None:
    """Refuse an object without an image that should be an image of the series.

    Args:
        class_words: Words of the name of its class; empty where the header lacks the class.
        wanted_modality: As for `_other_kind`.

    Raises:
        UserError: If it should; the message has no path.
    """
    is_wanted_class = class_words[-2:] == ["Image", "Storage"]
    if wanted_modality and wanted_modality not in class_words:
        is_wanted_class = False
    # An object of unknown class may have been one.
    if is_wanted_class or not class_words:
        raise UserError(
            "the DICOM file is truncated or damaged: its header ends before an image; "
            "copy or export it again."
        )


def _is_colour(header: FileDataset) -> bool:
    """Whether a pixel has several values, or is the number of a colour."""
    if _whole(header, "SamplesPerPixel", 1) != 1:
        return True
    return _text(header.get("PhotometricInterpretation")) == "PALETTE COLOR"


def _make_slice(
    path: Path,
    index: int,
    places: tuple[Dataset, ...],
    series: Series,
    pixels: PixelFormat,
    *,
    is_hu: bool,
) -> Frame | NoSlice:
    """Make one slice from the header.

    Args:
        path: File.
        index: Number of the slice within it, from 0.
        places: Where its fields are, see `field_of`.
        series: Its series.
        pixels: Storage of its pixels.
        is_hu: Whether its values must be HU.

    Raises:
        UserError: If it has no position, or values that are not HU; without the path.
    """
    header = places[-1]
    if _is_localiser(places):
        return NoSlice(path, series, "localiser")
    position_xyz_mm = read_numbers(places, "ImagePositionPatient", 3)
    orientation = read_numbers(places, "ImageOrientationPatient", 6)
    if position_xyz_mm is None or orientation is None:
        return NoSlice(path, series, "image without a position and an orientation", is_image=True)
    spacing_mm = read_numbers(places, "PixelSpacing", 2)
    if spacing_mm is None or min(spacing_mm) <= 0:
        raise UserError(
            f"expected two positive numbers in PixelSpacing, got {spacing_mm}; "
            "export the series again."
        )
    axes = _unit_axes(orientation)
    slope, intercept = _read_rescale(places, is_hu=is_hu)
    has_rescale = slope is not None and intercept is not None
    sentences = []
    if is_hu and not has_rescale:
        sentences.append(
            "slices without rescale slope and intercept: their values are assumed to be HU"
        )
    sentences += _loss_warnings(header, pixels.transfer_syntax)
    return Frame(
        path=path,
        index=index,
        series=series,
        pixels=pixels,
        spacing_mm=spacing_mm,
        position_xyz_mm=position_xyz_mm,
        axes=axes,
        is_hu=is_hu,
        slope=1.0 if slope is None else slope,
        intercept=0.0 if intercept is None else intercept,
        has_rescale=has_rescale,
        phases=_read_phases(places),
        warnings=tuple(sentences),
        thickness_mm=_read_thickness(places),
    )


def _read_phases(places: tuple[Dataset, ...]) -> tuple[str, ...]:
    """Read what distinguishes the volume of a slice from others: the value of each of `PHASES`."""
    header = places[-1]
    phases = []
    for _, keyword, frame_keyword in PHASES:
        value = _text(header.get(keyword)) or _text(field_of(places, frame_keyword))
        phases.append(value)
    return tuple(phases)


def _read_thickness(places: tuple[Dataset, ...]) -> float | None:
    """Read the slice thickness in mm; None where it is missing or no number.

    It is only reported, so a file is not refused for it.
    """
    with suppress(ValueError, TypeError):
        return _read_number(places, "SliceThickness")
    return None


def _is_localiser(places: tuple[Dataset, ...]) -> bool:
    """Whether a slice is an overview from the side, by the type of the file or of the frame."""
    for image_type in (places[-1].get("ImageType"), field_of(places, "FrameType")):
        if "LOCALIZER" in _text(image_type).upper().split("\\"):
            return True
    return False


def _unit_axes(orientation: tuple[float, ...]) -> np.ndarray:
    """Turn ImageOrientationPatient into LPS unit vectors (2, 3) along a row and along a column.

    Raises:
        UserError: If they have no direction, or are not at right angles; without the path.
    """
    axes = np.reshape(orientation, (2, 3))
    lengths = np.array([math.hypot(*axis) for axis in axes])
    # The length of finite numbers may overflow.
    if lengths.min() <= 0 or not math.isfinite(lengths.max()):
        raise UserError(
            f"expected two directions in ImageOrientationPatient, got {orientation}; "
            "export the series again."
        )
    axes = axes / lengths[:, None]
    if abs(axes[0] @ axes[1]) > DIRECTION_TOLERANCE:
        raise UserError(
            "expected rows and columns at right angles, but ImageOrientationPatient is "
            f"{tuple(axes.round(6).ravel().tolist())}; export the DICOM series again."
        )
    return axes


def _read_rescale(places: tuple[Dataset, ...], *, is_hu: bool) -> tuple[float | None, float | None]:
    """Read slope and intercept from stored values to HU or intensities; None where one is missing.

    Raises:
        UserError: If the stored values become something else; without the path.
    """
    # Enhanced files give the rescale per frame, others in the header.
    slope = _read_number(places, "RescaleSlope")
    intercept = _read_number(places, "RescaleIntercept")
    rescale_type = _text(field_of(places, "RescaleType"))
    fault = ""
    if places[-1].get("ModalityLUTSequence"):
        fault = "a table of values"
    # A negative slope would exchange dark and bright, such as air and bone.
    elif slope is not None and not 0 < slope <= MAX_RESCALE:
        fault = f"a slope of {slope:g}"
    elif intercept is not None and abs(intercept) > MAX_RESCALE:
        fault = f"an intercept of {intercept:g}"
    elif is_hu and rescale_type.upper() not in HU_TYPES:
        fault = plain(rescale_type)
    if fault and is_hu:
        raise UserError(
            f"expected a rescale slope and intercept to HU, but the slices have {fault}; "
            "choose or export a series in HU."
        )
    if fault:
        raise UserError(
            f"expected a positive rescale slope and an intercept, but the slices have {fault}; "
            "choose another series, or export it again."
        )
    return slope, intercept


def _loss_warnings(header: Dataset, transfer_syntax: uid.UID) -> list[str]:
    """Warn of compression that loses detail, or may; the header says "01" where it did."""
    lossy = _text(header.get("LossyImageCompression"))
    if lossy == "01" or transfer_syntax in LOSSY_SYNTAXES:
        return ["the slices were compressed with loss"]
    if not lossy and transfer_syntax in MAYBE_LOSSY_SYNTAXES:
        return [
            "the slices may have been compressed with loss: their encoding permits it, "
            "and the header does not say"
        ]
    return []


def _pixel_format(file: BinaryIO, header: FileDataset) -> PixelFormat:
    """Read the storage of the pixels.

    Args:
        file: Open at the element of the pixels.
        header: What precedes it.

    Raises:
        UserError: If the pixels are of an unknown kind, or fewer than the header says; without the
            path.
    """
    rows = _whole(header, "Rows", 1)
    columns = _whole(header, "Columns", 1)
    num_frames = _whole(header, "NumberOfFrames", 1)
    bits = _whole(header, "BitsAllocated", 16)
    bits_stored = _whole(header, "BitsStored", bits)
    high_bit = _whole(header, "HighBit", bits_stored - 1)
    if rows * columns > MAX_SLICE_PIXELS:
        raise UserError(
            f"expected slices of at most {MAX_SLICE_PIXELS} pixels, but the header says "
            f"{rows} x {columns}; it is damaged: copy or export the DICOM series again."
        )
    # The value must fill the lowest bits: those above it may hold overlays, which old files have.
    is_usual = bits in (8, 16, 32) and 1 <= bits_stored <= bits and high_bit == bits_stored - 1
    if not is_usual:
        raise UserError(
            "expected slices of 8, 16 or 32 bits a pixel, but the header says "
            f"{rows} x {columns} pixels of {bits} bits with {bits_stored} used up to bit "
            f"{high_bit}; export the DICOM series again."
        )
    syntax = _transfer_syntax(header)
    is_plain = syntax in PLAIN_SYNTAXES
    num_bytes = rows * columns * num_frames * bits // 8
    expected = f"expected {num_frames} x {rows} x {columns} pixels of {bits} bits"
    # Encoded pixels are decoded only when they are read; their tag shows that they are there.
    tag, length = _read_element_start(file)
    if is_plain and length == UNDEFINED_LENGTH:
        raise UserError(
            "its pixels are compressed, but the header does not say how; export the series again."
        )
    # pydicom reads a deflated file to its end, so no tag follows: whether it has pixels shows only
    # when they are decoded.
    has_pixels = tag in PIXEL_TAGS or syntax == uid.DeflatedExplicitVRLittleEndian
    if not has_pixels or (is_plain and length < num_bytes):
        raise UserError(
            f"the DICOM file is truncated or damaged: {expected}; copy or export it again."
        )
    if is_plain:
        # Writers may fill up the pixels, by less than a row or a column.
        max_surplus = min(rows, columns) * bits // 8
        if length >= num_bytes + max_surplus:
            raise UserError(
                f"{expected}, but the DICOM file holds {length} bytes of them; it is damaged: "
                "copy or export it again."
            )
        _check_size(file, num_bytes)
    is_signed = _whole(header, "PixelRepresentation", 0) == 1
    kind = "i" if is_signed else "u"
    return PixelFormat(
        (rows, columns),
        syntax,
        offset=file.tell() if is_plain else None,
        dtype=np.dtype(f"<{kind}{bits // 8}"),
        bits_stored=bits_stored,
        padding=_read_padding(header, is_signed=is_signed),
    )


def _check_size(file: BinaryIO, num_bytes: int) -> None:
    """Refuse a file that ends before all bytes of its pixels, which begin at its position.

    Raises:
        UserError: If it does; the message has no path.
    """
    if os.fstat(file.fileno()).st_size < file.tell() + num_bytes:
        raise UserError(
            "the DICOM file is truncated: it ends within its pixels; copy or export it again."
        )


def _transfer_syntax(header: FileDataset) -> uid.UID:
    """Read the encoding of a file; where the header does not name it, that of the header itself."""
    is_implicit, _ = header.original_encoding
    default = uid.ImplicitVRLittleEndian if is_implicit else uid.ExplicitVRLittleEndian
    return uid.UID(header.file_meta.get("TransferSyntaxUID") or default)


def _read_element_start(file: BinaryIO) -> tuple[bytes, int]:
    """Read the tag and the length of an element, little endian, up to its first byte.

    An implicit element begins with tag and length, 4 bytes each. An explicit one has a type of two
    letters and two zeros in between. No length looks like the letters: the first one would make it
    odd, and all lengths are even.
    """
    start = file.read(8)
    length = start[4:]
    if start[4:6] in (b"OB", b"OW", b"UN"):
        length = file.read(4)
    return start[:4], int.from_bytes(length, "little")


def _read_padding(header: FileDataset, *, is_signed: bool) -> tuple[int, ...]:
    """Read the stored values that mean "no pixel", as `PixelFormat.padding`.

    Writers do not agree on their type: their bytes are read as a pixel.
    """
    _, is_little_endian = header.original_encoding
    byte_order: Literal["little", "big"] = "little" if is_little_endian else "big"
    padding: list[int] = []
    for keyword in ("PixelPaddingValue", "PixelPaddingRangeLimit"):
        # Raw as long as nothing has asked for the value.
        element = header.get_item(keyword)
        if isinstance(element, RawDataElement) and element.value:
            padding.append(int.from_bytes(element.value, byte_order, signed=is_signed))
    return tuple(sorted(padding))
