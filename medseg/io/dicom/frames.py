"""Reader of DICOM headers: the slices of a file, or the reasons why it contains none.

Messages of errors here lack the path: a `NoSlice` holds path and reason in two fields.
"""

import math
import os
import warnings
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

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

# A text of a header with more characters is quoted and cut in messages (see `shown`). The names
# that the standard defines are shorter.
MAX_PLAIN_CHARACTERS = 100

# A header with more pixels per slice (8192 × 8192) is damaged.
MAX_SLICE_PIXELS = 2**26

# Largest size of a deflated file once it is inflated, which is held in memory as a whole: an
# enhanced CT of 1000 slices has 500 MiB.
MAX_INFLATED_BYTES = 2**29

# Largest accepted slope and intercept; CT, MR and PET have far smaller ones.
MAX_RESCALE = 1e6

# Modalities whose objects are not images of a scanner.
NO_IMAGES = frozenset({"RTSTRUCT", "RTPLAN", "RTDOSE", "SEG", "SR", "PR", "KO", "REG", "DOC"})

# `NoSlice.reason` of an object without pixels whose modality is not in `NO_IMAGES`.
NO_PIXELS = "object without an image"

# Fields of a frame in an enhanced (multi-frame) file, and the sequences of a functional group that
# may hold each (PS3.3, C.7.6.16).
MACROS = {
    "ImagePositionPatient": ("PlanePositionSequence",),
    "ImageOrientationPatient": ("PlaneOrientationSequence",),
    "PixelSpacing": ("PixelMeasuresSequence",),
    "SpacingBetweenSlices": ("PixelMeasuresSequence",),
    "SliceThickness": ("PixelMeasuresSequence",),
    "ReferencedSegmentNumber": ("SegmentIdentificationSequence",),
    "RescaleSlope": ("PixelValueTransformationSequence",),
    "RescaleIntercept": ("PixelValueTransformationSequence",),
    "RescaleType": ("PixelValueTransformationSequence",),
    # Each modality has a sequence of its own.
    "FrameType": ("CTImageFrameTypeSequence", "MRImageFrameTypeSequence", "PETFrameTypeSequence"),
    "FrameAcquisitionNumber": ("FrameContentSequence",),
    "TemporalPositionIndex": ("FrameContentSequence",),
    "NominalPercentageOfCardiacPhase": ("CardiacSynchronizationSequence",),
    "StackID": ("FrameContentSequence",),
    "ConvolutionKernel": ("CTReconstructionSequence",),
    "KVP": ("CTXRayDetailsSequence",),
    "EffectiveEchoTime": ("MREchoSequence",),
    "DiffusionBValue": ("MRDiffusionSequence",),
    "FrameAcquisitionDateTime": ("FrameContentSequence",),
}

# Rescale types of CT whose values are HU; US means unspecified.
HU_TYPES = ("", "HU", "HU_MOD", "US")

# Transfer syntaxes (encodings) whose pixels are read from the file as they are.
PLAIN_SYNTAXES = (uid.ImplicitVRLittleEndian, uid.ExplicitVRLittleEndian)

# Encodings that always lose detail.
LOSSY_SYNTAXES = (uid.JPEGBaseline8Bit, uid.JPEGExtended12Bit, uid.JPEGLSNearLossless)

# Encodings that may lose detail.
MAYBE_LOSSY_SYNTAXES = (uid.JPEG2000, uid.HTJ2K)

# Tag of the pixels (7FE0,0010), little endian and big endian.
PIXEL_TAGS = (b"\xe0\x7f\x10\x00", b"\x7f\xe0\x00\x10")

# Tag of floating-point pixels of 32 bits (7FE0,0008), as parametric maps have them.
FLOAT_PIXEL_TAGS = (b"\xe0\x7f\x08\x00", b"\x7f\xe0\x00\x08")

# Length in the header of compressed pixels. It means unknown: they end at a delimiter (PS3.5, A.4).
UNDEFINED_LENGTH = 2**32 - 1


class VolumeKey(NamedTuple):
    """A property that may distinguish the volumes of one series.

    Attributes:
        name: Name for messages.
        file_field: Field of a file that gives it.
        frame_field: Field of a frame in an enhanced file that gives it.
    """

    name: str
    file_field: str
    frame_field: str


# Properties that may distinguish the volumes of one series, in the order in which they are tried.
VOLUME_KEYS = (
    VolumeKey("acquisition", "AcquisitionNumber", "FrameAcquisitionNumber"),
    VolumeKey("time point", "TemporalPositionIdentifier", "TemporalPositionIndex"),
    VolumeKey("phase", "NominalPercentageOfCardiacPhase", "NominalPercentageOfCardiacPhase"),
    VolumeKey("stack", "StackID", "StackID"),
    VolumeKey("kernel", "ConvolutionKernel", "ConvolutionKernel"),
    VolumeKey("kVp", "KVP", "KVP"),
    VolumeKey("echo time", "EchoTime", "EffectiveEchoTime"),
    VolumeKey("b value", "DiffusionBValue", "DiffusionBValue"),
    VolumeKey("image type", "ImageType", "FrameType"),
    VolumeKey("time", "AcquisitionTime", "FrameAcquisitionDateTime"),
)

# The fields that pydicom reads of a header; it skips all others.
_KEYWORDS = [
    "SOPClassUID", "Modality", "PatientID", "StudyInstanceUID", "StudyDate",
    "SeriesInstanceUID", "SeriesNumber", "SeriesDescription", "Rows", "Columns", "NumberOfFrames",
    "SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence",
    "SamplesPerPixel", "PhotometricInterpretation", "BitsAllocated", "BitsStored", "HighBit",
    "PixelRepresentation", "PixelPaddingValue", "PixelPaddingRangeLimit", "LossyImageCompression",
    "ModalityLUTSequence", *MACROS,
]  # fmt: skip
_KEYWORDS += [key.file_field for key in VOLUME_KEYS]
FIELDS = [Tag(keyword) for keyword in _KEYWORDS]


# Where the fields of a frame may be, in the order of the search. In an enhanced file: the group of
# the frame, the group that all frames share, the header. In others: the header alone.
Places = tuple[Dataset, ...]


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
        """Its patient and study, as `series=<scope>:<number>` takes them.

        Anonymised series, without patient and study, have the scope ":".
        """
        return f"{self.patient}:{self.study}"

    @property
    def identity(self) -> Identity:
        """The identity that a result of the scan gives."""
        return Identity(self.patient, written_date(self.date), self.number, self.description)

    def is_in(self, scope: str) -> bool:
        """Whether a scope names its patient, its study, or both.

        Scopes are `<patient>`, `<study UID>`, `<patient>:<study UID>` and `<patient>:<date>`.
        """
        # Patient and study may be "", which is not the name of any series.
        if scope == "":
            return False
        names = {self.patient, self.study, self.scope}
        if self.date:
            names.add(f"{self.patient}:{self.date}")
        return scope in names

    def __str__(self) -> str:
        name = "unknown series"
        if self.number or self.uid:
            name = f"series {printable(self.number or self.uid)}"
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
        padding: Stored values that mean "no pixel": none, one value, or the smallest and the
            largest of a range.
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
        is_hu: Whether the values are HU, as in CT.
        slope: Factor from stored value to HU, or to the intensity of another modality.
        intercept: Added after the slope.
        missing_rescale: What the header lacks of `slope` and `intercept`.
        volume_keys: Value of each of `VOLUME_KEYS`, "" where there is none.
        warnings: Sentences for the user on rescale and compression.
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
    missing_rescale: tuple[str, ...]
    volume_keys: tuple[str, ...]
    warnings: tuple[str, ...]
    thickness_mm: float | None = None

    @property
    def air(self) -> int:
        """Value of voxels outside the patient."""
        return AIR_HU if self.is_hu else 0

    def __str__(self) -> str:
        name = f"'{self.path.name}'"
        # The first frame, which is the only one of most files, is named by the file alone.
        if self.index == 0:
            return name
        return f"{name} frame {self.index + 1}"


@dataclass(frozen=True)
class NoSlice:
    """A file, or a frame of it, that gives no slice.

    Attributes:
        path: File.
        series: Its series.
        reason: Kind of object, such as `localiser`; for an unreadable file the message that refuses
            it, without the path.
        is_unreadable: Whether it may hold slices that cannot be read. Such a file is refused where
            its series is chosen, and does not affect others.
        is_image: Whether it is an image in grey values of the requested modality and no localiser.
            It may then be a slice of the scan, which is missing without it.
    """

    path: Path
    series: Series
    reason: str
    is_unreadable: bool = False
    is_image: bool = False


def printable(text: str) -> str:
    """Prepare a text of a header for a message.

    It is quoted only where it is long or would act on a terminal.
    """
    is_plain = text.isprintable() and len(text) <= MAX_PLAIN_CHARACTERS
    return text if is_plain else shown(text)


def _values(value: Any) -> Sequence[Any]:
    """List the values of a field; pydicom gives a single one without a list."""
    return value if isinstance(value, MultiValue) else [value]


def _text(value: Any) -> str:
    r"""Write a field on one line: several values with `\` between them as in DICOM, "" for None."""
    return "\\".join(map(_value_text, _values(value)))


def _value_text(item: Any) -> str:
    """Write one of the values of a field on one line."""
    if item is None:
        return ""
    text = str(item)
    if isinstance(item, float):
        text = f"{item:g}"
    return " ".join(text.split())


def _whole_number(header: Dataset, keyword: str, default: int) -> int:
    """Read a field that is a whole number.

    Args:
        header: Header of a file.
        keyword: Name of the field, such as `Rows`.
        default: The number where the field is missing or empty.

    Raises:
        ValueError: If it has another value.
    """
    if header.get(keyword) in (None, ""):
        return default
    return int(header[keyword].value)


def field_of(places: Places, keyword: str) -> Any:
    """Read a field of a frame from the first place that has the field; None where none has."""
    *groups, header = places
    for group in groups:
        for macro in MACROS[keyword]:
            sequence = group.get(macro)
            if sequence and keyword in sequence[0]:
                return sequence[0].get(keyword)
    return header.get(keyword)


def read_numbers(places: Places, keyword: str, count: int) -> tuple[float, ...] | None:
    """Read a field of `count` numbers; None where it is missing or empty.

    Raises:
        ValueError: If there are more or fewer, or one is not finite.
    """
    value = field_of(places, keyword)
    if value in (None, ""):
        return None
    values = _values(value)
    numbers = tuple(map(float, values))
    # Python takes 1_000 and digits of other scripts for numbers; other programs do not. pydicom's
    # numbers keep the text of the file.
    texts = map(str, values)
    are_plain = all(text.isascii() and "_" not in text for text in texts)
    are_finite = all(map(math.isfinite, numbers))
    if len(numbers) != count or not are_plain or not are_finite:
        raise ValueError(f"{keyword} should hold {count} numbers and holds {value}")
    return numbers


def _read_number(places: Places, keyword: str) -> float | None:
    """Read a field of one number as `read_numbers` does."""
    numbers = read_numbers(places, keyword, 1)
    if numbers is None:
        return None
    return numbers[0]


def read_frames(path: Path, modality: str = "CT") -> list[Frame | NoSlice]:
    """Read the header of a file.

    Values that break the form of the standard are accepted: those that are used are checked here.

    Args:
        path: A DICOM file, which may be damaged.
        modality: Modality of the requested slices, as DICOM names it; "" takes any.

    Returns:
        Its slices, or the reasons why there are none; nothing for a table of contents (DICOMDIR).
        A file that cannot be read is one of these reasons and causes no exception.
    """
    series = Series()
    try:
        with (
            path.open("rb") as file,
            config.disable_value_validation(),
            warnings.catch_warnings(action="ignore"),
        ):
            _check_inflated(file)
            # Forced: pydicom would refuse a file without the DICOM preamble.
            header = dcmread(file, stop_before_pixels=True, force=True, specific_tags=FIELDS)
            # The check counts raw bytes, so it must precede the first access to a value, which
            # replaces them.
            is_cut = _ends_within(header)
            media_class = header.file_meta.get("MediaStorageSOPClassUID")
            if media_class == uid.MediaStorageDirectoryStorage:
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
    except Exception as error:  # pydicom raises any type for a damaged file
        return [NoSlice(path, series, _why_unreadable(error), is_unreadable=True)]


def _ends_within(header: FileDataset) -> bool:
    """Whether the file ends before an element of its header has all its bytes."""
    for element in (*header.file_meta.values(), *header.values()):
        if not isinstance(element, RawDataElement):
            continue
        num_bytes = len(element.value or b"")
        if num_bytes < element.length:
            return True
    return False


def _read_series(header: FileDataset, *, is_cut: bool) -> Series:
    """Read the series of a file, as far as its values are certain to be complete.

    Args:
        header: Header of the file, as far as pydicom could read it.
        is_cut: Whether the file ends within it.
    """
    uid_text = _text(header.get("SeriesInstanceUID"))
    number = _text(header.get("SeriesNumber"))
    if is_cut and not number:
        # The UID may be cut off: only the number, which follows it in the file, proves it complete.
        return Series()
    if is_cut:
        return Series(uid_text, number)
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
        header: Fields before that element.
        series: Series of the file.
        modality: As for `read_frames`.

    Raises:
        UserError: If the slices are damaged or not in HU; without the path.
    """
    kind = _other_kind(header, modality)
    if kind:
        return [NoSlice(path, series, kind)]
    pixels = _pixel_format(file, header)
    # The standard allows one item in this sequence: further items are not read.
    shared_groups = list(header.get("SharedFunctionalGroupsSequence") or [])[:1]
    frame_groups = list(header.get("PerFrameFunctionalGroupsSequence") or [])
    places_of_frames: list[Places] = [(group, *shared_groups, header) for group in frame_groups]
    if not places_of_frames:
        # A file of one slice has no groups of frames.
        places_of_frames = [(*shared_groups, header)]
    if len(places_of_frames) != _whole_number(header, "NumberOfFrames", 1):
        reason = "multi-frame image without a position for each frame"
        return [NoSlice(path, series, reason, is_image=True)]
    is_hu = modality == "CT"
    return [
        _make_slice(path, index, places, series, pixels, is_hu=is_hu)
        for index, places in enumerate(places_of_frames)
    ]


def _why_unreadable(error: Exception) -> str:
    """Say in a message without the path why a file cannot be read."""
    one_line = " ".join(str(error).split())
    if isinstance(error, UserError):
        return one_line
    # The text of an `OSError` has the path; its `strerror`, such as "Permission denied", has not.
    if isinstance(error, OSError) and error.strerror:
        return (
            f"the DICOM file cannot be read ({error.strerror}); check the file and its permissions."
        )
    # pydicom raises other exceptions for a damaged file.
    reason = one_line or type(error).__name__
    return (
        f"the DICOM file cannot be read ({printable(reason)}); "
        "it is damaged, copy or export it again."
    )


def _check_inflated(file: BinaryIO) -> None:
    """Check that a deflated file does not inflate to more than `MAX_INFLATED_BYTES`.

    pydicom inflates it as a whole. The file is open at its first byte, before and after.

    Raises:
        UserError: If it inflates to more; the message has no path.
    """
    read_preamble(file, force=True)
    syntax = _read_file_meta_info(file).get("TransferSyntaxUID")
    is_deflated = syntax == uid.DeflatedExplicitVRLittleEndian
    if is_deflated and _inflates_beyond(file, MAX_INFLATED_BYTES):
        raise UserError(
            f"expected a deflated DICOM file of at most {MAX_INFLATED_BYTES // 2**20} MiB, but it "
            "is larger; copy it again, or export it without compression."
        )
    file.seek(0)


def _inflates_beyond(file: BinaryIO, max_bytes: int) -> bool:
    """Whether the rest of a file, which is deflated, inflates to more than `max_bytes`.

    The inflated bytes are counted and not kept.
    """
    # Negative: the stream has no zlib header.
    decoder = zlib.decompressobj(-zlib.MAX_WBITS)
    num_bytes = 0
    while not decoder.eof:
        # `decompress` returns `PACKED_BYTES` at most, and keeps the input that it did not get to.
        packed = decoder.unconsumed_tail or file.read(PACKED_BYTES)
        if not packed:
            break
        num_bytes += len(decoder.decompress(packed, PACKED_BYTES))
        if num_bytes > max_bytes:
            return True
    return False


def _other_kind(header: FileDataset, wanted_modality: str) -> str:
    """Name the kind of an object that holds no slice of the wanted modality.

    Args:
        header: Header of the file.
        wanted_modality: As DICOM names it; "" takes any.

    Returns:
        The kind, for `NoSlice.reason`; "" for an object that may hold slices of the modality.

    Raises:
        UserError: If the object has no pixels, and its class is an image of the wanted modality or
            is unknown; the message has no path.
    """
    modality = _text(header.get("Modality"))
    sop_class = _text(header.get("SOPClassUID"))
    storage_class = _text(header.file_meta.get("MediaStorageSOPClassUID"))
    # Such as "CT Image Storage".
    class_words = uid.UID(sop_class or storage_class).name.split()
    has_rows = _whole_number(header, "Rows", 0) != 0
    has_pixels = has_rows and _whole_number(header, "Columns", 0) != 0
    # The order matters: each test presumes that the tests before it did not apply.
    if modality in NO_IMAGES:
        return f"{modality} object"
    # Variants of this class, such as for several frames, have its UID with a dot and a number.
    capture = uid.SecondaryCaptureImageStorage
    if sop_class == capture or sop_class.startswith(f"{capture}."):
        return "secondary capture"
    if not has_pixels:
        _refuse_lost_image(class_words, wanted_modality)
        return NO_PIXELS
    if wanted_modality and modality not in ("", wanted_modality):
        return f"{printable(modality)} image"
    if wanted_modality and not modality and wanted_modality not in class_words:
        return "image of unknown modality"
    if _is_colour(header):
        return "colour image"
    return ""


def _refuse_lost_image(class_words: list[str], wanted_modality: str) -> None:
    """Refuse an object without pixels if its class is an image of the wanted modality.

    Args:
        class_words: Words of the name of its class; empty where the header lacks the class.
        wanted_modality: As for `_other_kind`.

    Raises:
        UserError: If its class is such an image, or is unknown; the message has no path.
    """
    is_wanted_class = class_words[-2:] == ["Image", "Storage"]
    if wanted_modality and wanted_modality not in class_words:
        is_wanted_class = False
    if is_wanted_class or not class_words:
        raise UserError(
            "the DICOM file is truncated or damaged: its header ends before an image; "
            "copy or export it again."
        )


def _is_colour(header: FileDataset) -> bool:
    """Whether a pixel has several values, or a value that is an index into a palette."""
    if _whole_number(header, "SamplesPerPixel", 1) != 1:
        return True
    return _text(header.get("PhotometricInterpretation")) == "PALETTE COLOR"


def _make_slice(
    path: Path,
    index: int,
    places: Places,
    series: Series,
    pixels: PixelFormat,
    *,
    is_hu: bool,
) -> Frame | NoSlice:
    """Make one slice from the header.

    Args:
        path: File.
        index: Number of the slice within it, from 0.
        places: Where its fields may be.
        series: Its series.
        pixels: Storage of its pixels.
        is_hu: Whether its values must be HU.

    Raises:
        UserError: If the slice has no pixel spacing, axes that are not at right angles, or values
            that are not HU; without the path.
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
    missing_rescale: list[str] = []
    if slope is None:
        missing_rescale.append("slope")
    if intercept is None:
        missing_rescale.append("intercept")
    sentences = []
    if is_hu and missing_rescale:
        sentences.append(_rescale_warning(missing_rescale))
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
        missing_rescale=tuple(missing_rescale),
        volume_keys=_read_volume_keys(places),
        warnings=tuple(sentences),
        thickness_mm=_read_thickness(places),
    )


def _read_volume_keys(places: Places) -> tuple[str, ...]:
    """Read the value of each of `VOLUME_KEYS` for a slice."""
    header = places[-1]
    values = []
    for key in VOLUME_KEYS:
        # First the value of the frame: in an enhanced file, that of the file describes all frames.
        value_of_frame = _text(field_of(places, key.frame_field))
        values.append(value_of_frame or _text(header.get(key.file_field)))
    return tuple(values)


def _read_thickness(places: Places) -> float | None:
    """Read the slice thickness in mm; None where it is missing or no number.

    A scan can be read without it, so a file is not refused for it.
    """
    with suppress(ValueError, TypeError):
        return _read_number(places, "SliceThickness")
    return None


def _is_localiser(places: Places) -> bool:
    """Whether a slice is an overview for planning, by the image type of the file or the frame."""
    for image_type in (places[-1].get("ImageType"), field_of(places, "FrameType")):
        if "LOCALIZER" in _text(image_type).upper().split("\\"):
            return True
    return False


def _unit_axes(orientation: tuple[float, ...]) -> np.ndarray:
    """Turn ImageOrientationPatient into LPS unit vectors (2, 3) along a row and along a column.

    Raises:
        UserError: If a vector has no direction, or the two are not at right angles; without the
            path.
    """
    axes = np.reshape(orientation, (2, 3))
    # `hypot` and not a norm of numpy, whose squares overflow for numbers from 1e154.
    lengths = np.array([math.hypot(*axis) for axis in axes])
    # Numbers close to the largest float have an infinite length.
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


def _read_rescale(places: Places, *, is_hu: bool) -> tuple[float | None, float | None]:
    """Read slope and intercept, which turn stored values into HU or intensities.

    Returns:
        Slope and intercept, each None where the header lacks it.

    Raises:
        UserError: If they give neither HU nor, for other modalities, intensities; without the path.
    """
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
        fault = printable(rescale_type)
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


def _rescale_warning(missing: list[str]) -> str:
    """Say what is assumed for a slope, an intercept or both, which the header of a CT lacks."""
    assumed = "their values are assumed to be HU"
    if missing == ["slope"]:
        assumed = "1 is assumed"
    elif missing == ["intercept"]:
        assumed = "0 is assumed"
    return f"slices without rescale {' and '.join(missing)}: {assumed}"


def _loss_warnings(header: Dataset, transfer_syntax: uid.UID) -> list[str]:
    """Make warnings of a compression that has lost detail, or may have lost some."""
    lossy = _text(header.get("LossyImageCompression"))  # "01": lost, "00": not, "": unknown
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
        header: Fields before that element.

    Raises:
        UserError: If the pixels are of a kind that is not read, or fewer than the header says;
            without the path.
    """
    rows = _whole_number(header, "Rows", 1)
    columns = _whole_number(header, "Columns", 1)
    num_frames = _whole_number(header, "NumberOfFrames", 1)
    bits = _whole_number(header, "BitsAllocated", 16)
    bits_stored = _whole_number(header, "BitsStored", bits)
    high_bit = _whole_number(header, "HighBit", bits_stored - 1)
    if rows * columns > MAX_SLICE_PIXELS:
        raise UserError(
            f"expected slices of at most {MAX_SLICE_PIXELS} pixels, but the header says "
            f"{rows} x {columns}; it is damaged: copy or export the DICOM series again."
        )
    # Values must occupy the lowest bits. The bits above may hold overlays, as in old files.
    are_lowest_bits = 1 <= bits_stored <= bits and high_bit == bits_stored - 1
    if bits not in (8, 16, 32) or not are_lowest_bits:
        raise UserError(
            "expected slices of 8, 16 or 32 bits a pixel, but the header says "
            f"{rows} x {columns} pixels of {bits} bits with {bits_stored} used up to bit "
            f"{high_bit}; export the DICOM series again."
        )
    syntax = _transfer_syntax(header)
    is_plain = syntax in PLAIN_SYNTAXES
    num_bytes = rows * columns * num_frames * bits // 8
    expected = f"expected {num_frames} x {rows} x {columns} pixels of {bits} bits"
    tag, length = _read_element_start(file)
    if tag in FLOAT_PIXEL_TAGS:
        raise UserError(
            "its pixels are floating-point numbers, which medseg does not read; "
            "choose another series."
        )
    if is_plain and length == UNDEFINED_LENGTH:
        raise UserError(
            "its pixels are compressed, but the header does not say how; export the series again."
        )
    # Encoded pixels are not decoded here, so only their tag is checked. pydicom has read a deflated
    # file to its end, so no tag follows: the decoder finds out if its pixels are missing.
    has_pixels = tag in PIXEL_TAGS or syntax == uid.DeflatedExplicitVRLittleEndian
    if not has_pixels or (is_plain and length < num_bytes):
        raise UserError(
            f"the DICOM file is truncated or damaged: {expected}; copy or export it again."
        )
    if is_plain:
        # Writers may append a few bytes to the pixels. With the bytes of a whole row or column
        # more, the size in the header must be wrong.
        line_bytes = min(rows, columns) * bits // 8
        if length >= num_bytes + line_bytes:
            raise UserError(
                f"{expected}, but the DICOM file holds {length} bytes of them; it is damaged: "
                "copy or export it again."
            )
        _check_size(file, num_bytes)
    is_signed = _whole_number(header, "PixelRepresentation", 0) == 1
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
    """Check that a file holds all bytes of its pixels, which begin at its current position.

    Raises:
        UserError: If it ends before; the message has no path.
    """
    if os.fstat(file.fileno()).st_size < file.tell() + num_bytes:
        raise UserError(
            "the DICOM file is truncated: it ends within its pixels; copy or export it again."
        )


def _transfer_syntax(header: FileDataset) -> uid.UID:
    """Read the encoding of the pixels; where none is named, it is the encoding of the header."""
    named_syntax = header.file_meta.get("TransferSyntaxUID")
    if named_syntax:
        return uid.UID(named_syntax)
    is_implicit, _ = header.original_encoding
    return uid.ImplicitVRLittleEndian if is_implicit else uid.ExplicitVRLittleEndian


def _read_element_start(file: BinaryIO) -> tuple[bytes, int]:
    """Read the tag and the length of an element, up to the first byte of its value.

    The tag is returned as it is in the file. The length is read as little endian; that of a
    big-endian file is wrong, but only uncompressed little-endian pixels need it.

    Implicit VR: the element begins with tag and length, 4 bytes each. Explicit VR: between them are
    the type of the value, two letters, and two zeros. The letters cannot be taken for a length:
    lengths of DICOM are even, and "O" and "U" are odd as the lowest byte of a number.
    """
    start = file.read(8)
    tag = start[:4]
    length_bytes = start[4:]
    if start[4:6] in (b"OB", b"OW", b"UN"):
        length_bytes = file.read(4)
    return tag, int.from_bytes(length_bytes, "little")


def _read_padding(header: FileDataset, *, is_signed: bool) -> tuple[int, ...]:
    """Read the stored values that mean "no pixel", as `PixelFormat.padding`.

    Some headers declare these values as unsigned although the pixels are signed, or the reverse.
    The raw bytes are therefore read with the sign of the pixels, not as pydicom would convert them.
    """
    _, is_little_endian = header.original_encoding
    byte_order: Literal["little", "big"] = "little" if is_little_endian else "big"
    padding: list[int] = []
    for keyword in ("PixelPaddingValue", "PixelPaddingRangeLimit"):
        # Unlike `get`, `get_item` gives the raw bytes, as long as nothing has read the value.
        element = header.get_item(keyword)
        if isinstance(element, RawDataElement) and element.value:
            padding.append(int.from_bytes(element.value, byte_order, signed=is_signed))
    return tuple(sorted(padding))
