"""Volumes of all formats: checks of grid and size, decoding of voxels, conversion to HU and labels.

The header of a file is read first (`LazyVolume`), the voxels later and chunk by chunk
(`load_image`, `load_labels`), so that memory never holds a second copy of the voxels.
"""

import bz2
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from isal import igzip
from isal.igzip_lib import DECOMP_ZLIB, IgzipDecompressor

from medseg.errors import UserError
from medseg.findings import Finding, warnings_of
from medseg.geometry.grid import VoxelGrid
from medseg.io.identity import UNKNOWN, Identity
from medseg.io.scratch import new_array
from medseg.task import AIR_HU

# Smallest spacing, a tenth of a micrometre, which no scanner resolves: a smaller one is damaged.
MIN_SPACING_MM = 1e-4

# Largest coordinate of an origin, 1 km: scanners measure positions from a point in their room. With
# much larger numbers, rounding would merge neighbouring voxels.
MAX_ORIGIN_MM = 1e6

# Longest axis of a scan, 4 m. No scanner's table is longer: beyond it the spacing is in another
# unit, or damaged.
MAX_EXTENT_MM = 4e3

# Largest volume of a scan, 8 m³, for the same reason.
MAX_FIELD_MM3 = 8e9

# Most bytes that one read of a raw, gzip or bzip2 stream returns: large enough for speed, small
# beside a volume.
SLAB_BYTES = 2**20

# Bytes of a compressed stream or a text that are taken from the file at once, and the most that one
# step of zlib decoding returns.
PACKED_BYTES = 2**18

# Most bytes of a voxel that is stored as text; a longer word is not a number.
MAX_WORD_BYTES = 100

# Largest factor by which decoding enlarges bytes; a header that promises more is damaged. A digit
# of a text gives at most the 8 bytes of a number. Deflate codes at most 258 bytes with 2 bits, a
# factor of 1032. The factor of bzip2 is a generous bound.
MAX_RATIOS = {"raw": 1, "text": 8, "deflate": 1032, "bzip2": 10**7}

# Where a header promises more voxel bytes than this, and more than `SURE_RATIO` times the bytes in
# the file, the file is decoded once before memory is allocated.
SURE_BYTES = 2**28

# Ratio of voxel bytes to compressed bytes that real scans hardly reach.
SURE_RATIO = 16

# Largest relative error of a scaled label that counts as rounding: two roundings to 32-bit floats,
# each of at most 2**-24. The first rounds the slope and the intercept, which most formats store in
# 32 bits; the second rounds the stored value or its product with the slope.
ROUNDING = 2.0**-23

# Largest distance from a whole number that counts as rounding, however large the label is.
MAX_ROUNDING = 0.25

# Types of arrays in memory; the first that holds all values exactly is taken. For an image, float32
# is exact enough.
IMAGE_DTYPES = (np.int16, np.float32)
LABEL_DTYPES = (np.uint8, np.int16, np.uint16, np.int32, np.int64)


@dataclass(frozen=True)
class Volume:
    """A whole scan or label map in the storage order of its file.

    Attributes:
        array: Voxels (D, H, W): int16 or float32 HU of an image, integers of a label map.
        grid: Position of the voxels, LPS.
        header: nibabel header of a NIfTI file, so that a result in NIfTI keeps its sform, qform and
            unit; None for other formats.
        findings: Messages of the reader on omissions, assumptions and repairs, which the caller
            shows to the user.
        identity: Patient, study and series of a DICOM scan.
    """

    array: np.ndarray
    grid: VoxelGrid
    header: Any = None
    findings: tuple[Finding, ...] = ()
    identity: Identity = UNKNOWN

    def __post_init__(self) -> None:
        if self.array.shape != self.grid.shape:
            raise ValueError(f"array {self.array.shape} and grid {self.grid.shape} differ in shape")


@dataclass(frozen=True)
class LazyVolume:
    """A volume in a file whose header has been read and whose voxels have not.

    Attributes:
        path: The file, for messages.
        grid: Shape and position.
        dtype: Type of the stored values, with byte order.
        read_chunks: Opens the file and yields all stored values (before slope and intercept) as
            flat arrays of any length, in the order of an array (D, H, W). Each call reads from the
            start.
        slope: Factor from stored value to HU or label.
        intercept: Added after the slope.
        findings: See `Volume.findings`.
        header: nibabel header of a NIfTI file; None for other formats.
        packed_bytes: Size of the encoded voxels in the file, compressed or as text; None where they
            are stored as they are, so that the size of the file shows that all are there.
        identity: See `Volume.identity`.
    """

    path: Path
    grid: VoxelGrid
    dtype: np.dtype[Any]
    read_chunks: Callable[[], Iterator[np.ndarray]]
    slope: float = 1.0
    intercept: float = 0.0
    findings: tuple[Finding, ...] = ()
    header: Any = None
    packed_bytes: int | None = None
    identity: Identity = UNKNOWN


def shown(text: str) -> str:
    """Quote a value for a message: short, without characters that a terminal would act on."""
    if len(text) > 60:
        text = text[:57] + "..."
    return repr(text)


def size_text(sizes: Sequence[int]) -> str:
    """Write sizes for a message, as in `512 x 512 x 300`."""
    return " x ".join(map(str, sizes))


def grid_from_columns(
    path: Path, shape: tuple[int, int, int], columns: np.ndarray, origin: Sequence[float]
) -> VoxelGrid:
    """Make the grid of a file from the steps between its voxels, and check it.

    Small deviations from right angles (rounded decimals) are kept, so that no corner moves.

    Args:
        path: The file, for messages.
        shape: Voxels (D, H, W).
        columns: 3×3; the columns are the LPS vectors in mm from a voxel to the next one along x, y
            and z.
        origin: LPS point of the first voxel's centre, in mm.

    Raises:
        UserError: If the axes are sheared, an axis has no length, or the scan is larger than any
            scanner.
    """
    spacing_xyz_mm = np.linalg.norm(columns, axis=0)
    # The lengths of finite steps may overflow.
    is_finite = bool(np.isfinite([*columns.flat, *spacing_xyz_mm, *origin]).all())
    if not is_finite or spacing_xyz_mm.min() <= 0:
        raise UserError(
            f"{path}: expected three axes of positive length and a finite origin, but the header "
            f"gives steps of {columns.T.tolist()} mm from {list(origin)}; "
            "repair the header or export the scan again."
        )
    if max(map(abs, origin)) > MAX_ORIGIN_MM:
        coordinates = ", ".join(f"{value:.4g}" for value in origin)
        raise UserError(
            f"{path}: expected a scan within {MAX_ORIGIN_MM / 1e6:g} km of its scanner, but the "
            f"header gives the origin {coordinates} mm; "
            "repair the header or export the scan again."
        )
    if spacing_xyz_mm.min() < MIN_SPACING_MM:
        spacing = " x ".join(f"{step:.4g}" for step in spacing_xyz_mm)
        raise UserError(
            f"{path}: expected voxels of at least {MIN_SPACING_MM:g} mm, but the header gives a "
            f"spacing of {spacing} mm; "
            "check whether its spacing is in mm."
        )
    extents_mm = (spacing_xyz_mm * shape[::-1]).tolist()
    if max(extents_mm) > MAX_EXTENT_MM or math.prod(extents_mm) > MAX_FIELD_MM3:
        extents = " x ".join(f"{extent_mm / 1e3:.4g}" for extent_mm in extents_mm)
        raise UserError(
            f"{path}: expected a scan of at most {MAX_EXTENT_MM / 1e3:g} m along each axis and "
            f"{MAX_FIELD_MM3 / 1e9:g} m³ in all, but the header makes it {extents} m; "
            "check its sizes, and whether its spacing is in mm."
        )
    x_mm, y_mm, z_mm = spacing_xyz_mm
    x0, y0, z0 = origin
    direction = (columns / spacing_xyz_mm).tolist()  # each column becomes a unit vector
    try:
        return VoxelGrid(shape, (z_mm, y_mm, x_mm), (x0, y0, z0), direction)
    except ValueError as error:
        raise UserError(
            f"{path}: expected axes at right angles, but {error}; "
            "resample the scan to a regular grid first."
        ) from None


def check_shape(path: Path, sizes: Sequence[int]) -> tuple[int, int, int]:
    """Turn stored sizes (x, y, z, then further axes such as time) into (D, H, W).

    Args:
        path: The file, for messages.
        sizes: Voxels along each axis; further axes may have one step.

    Raises:
        UserError: If the sizes are not those of one 3D volume.
    """
    has_further_steps = any(size != 1 for size in sizes[3:])
    if len(sizes) < 3 or has_further_steps or min(sizes) < 1:
        raise UserError(
            f"{path}: expected one 3D volume, but the file holds {size_text(sizes)} values; "
            "give one volume per file."
        )
    return int(sizes[2]), int(sizes[1]), int(sizes[0])


def is_gzip(file: BinaryIO) -> bool:
    """Whether gzip data begin at the current position of a file; the position is left unchanged.

    The bytes decide: suffixes and headers are often wrong about the compression.
    """
    magic = file.read(2)
    file.seek(-len(magic), os.SEEK_CUR)
    return magic == b"\x1f\x8b"


def decoded(path: Path, file: BinaryIO, encoding: str, dtype: np.dtype[Any]) -> Iterator[bytes]:
    """Decode a file from its current position on; checksums are compared at the end.

    Args:
        path: File, for messages.
        file: The open file.
        encoding: `raw`, `deflate` (gzip or zlib), `bzip2` or `text`.
        dtype: Type of the voxels, to which a text is converted.

    Returns:
        Chunks of bytes, of about `SLAB_BYTES` or less.
    """
    if encoding == "text":
        return _encode_text(path, file, dtype)
    if encoding == "deflate" and not is_gzip(file):
        return _inflate(path, file)
    stream: Any = file
    if encoding == "bzip2":
        stream = bz2.BZ2File(file)
    elif encoding == "deflate":
        stream = igzip.IGzipFile(fileobj=file, mode="rb")
    # Read until `read` returns no bytes, which is the end.
    return iter(partial(stream.read, SLAB_BYTES), b"")


def _inflate(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """Decode a zlib stream; ISA-L needs half of zlib's time and releases the GIL.

    Raises:
        EOFError: If the file ends before the stream.
        UserError: If other bytes follow the stream.
    """
    decoder = IgzipDecompressor(DECOMP_ZLIB)
    while not decoder.eof:
        # One part of the file may give several chunks: only the first takes new input.
        packed = b""
        if decoder.needs_input:
            packed = file.read(PACKED_BYTES)
            if not packed:
                raise EOFError
        yield decoder.decompress(packed, PACKED_BYTES)
    surplus = decoder.unused_data + file.read(PACKED_BYTES)
    # Some programs fill up the file with zeros.
    if surplus.strip(b"\0"):
        raise UserError(
            f"{path}: the file cannot be read: other bytes follow its compressed voxels; "
            "export it again."
        )


def _encode_text(path: Path, file: BinaryIO, dtype: np.dtype[Any]) -> Iterator[bytes]:
    """Convert numbers that are separated by white space to the bytes of a type.

    They are read part by part, not by lines: a line may be as long as the file.

    Raises:
        UserError: If a word is not a number of the type.
    """
    unfinished = b""  # the last word of a part, which the next part may continue
    part = file.read(PACKED_BYTES)
    while part or unfinished:
        words = (unfinished + part).split()
        unfinished = b""
        if part and not part[-1:].isspace():
            unfinished = words.pop()
        # NumPy reserves the length of the longest word for every word.
        is_too_long = max(map(len, [*words, unfinished])) > MAX_WORD_BYTES
        try:
            # NumPy would take 1_000 for a number, as Python does; other programs do not.
            if is_too_long or b"_" in part:
                raise ValueError
            yield np.array(words, "S").astype(dtype).tobytes()
        except (ValueError, OverflowError):
            raise UserError(
                f"{path}: the file cannot be read: a value of its voxels is no number of the type "
                f"{dtype.name}; export it again."
            ) from None
        part = file.read(PACKED_BYTES)


@dataclass(frozen=True)
class _Layout:
    """How each file of a volume stores its voxels; all hold equal shares of the slices.

    Attributes:
        path: File of the header, for messages.
        shape: Shape of one file's share (D, H, W).
        dtype: Type of the stored values, with byte order.
        encoding: As for `decoded`.
        num_skipped: As for `lazy_volume`.
        num_after: As for `lazy_volume`.
    """

    path: Path
    shape: tuple[int, int, int]
    dtype: np.dtype[Any]
    encoding: str
    num_skipped: int
    num_after: int

    @property
    def num_bytes(self) -> int:
        """Decoded bytes of one file's share."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_raw(self) -> bool:
        """Whether the voxels are neither compressed nor text."""
        return self.encoding == "raw"

    def locate(self, file: Path, offset: int, num_lines: int) -> tuple[int, int]:
        """Find where the voxels of a file are, and check that it can hold them.

        Args:
            file: The file.
            offset: As for `lazy_volume`.
            num_lines: As for `lazy_volume`.

        Returns:
            Position of the first byte of the voxels or of their encoded stream, and the number of
            these bytes.

        Raises:
            UserError: If the file is missing, too short or too long.
        """
        if not file.is_file():
            raise UserError(
                f"{self.path}: its voxels should be in {shown(file.name)}, which does not exist; "
                "copy both files."
            )
        with file.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(offset)
            # Skip the lines. The number in a damaged header may be huge, but the file ends.
            for _ in islice(stream, num_lines):
                pass
            start = stream.tell()
        stop = size
        # `num_skipped` and `num_after` count decoded bytes: they are positions of a raw file only.
        if self.is_raw:
            stop -= self.num_after
            if self.num_skipped >= 0:
                start += self.num_skipped
            else:
                # The voxels are the last bytes. In a file that is too short, they would begin
                # within the header: the check below then refuses the bytes after the header.
                start = max(start, size - self.num_bytes)
        num_stored = max(0, stop - start)
        ratio = MAX_RATIOS[self.encoding]
        if self.num_bytes > ratio * num_stored:
            holds = "holds" if ratio == 1 else "can hold at most"
            raise UserError(
                f"{self._expected()}, but the file {holds} {ratio * num_stored}; "
                "it is truncated or damaged: copy or export it again."
            )
        # The decoded size of an encoded file is known only once it is read.
        if self.is_raw and self.num_bytes < num_stored:
            raise self._surplus()
        return start, num_stored

    def read(self, file: Path, start: int) -> Iterator[np.ndarray]:
        """Yield the values of a file as flat arrays.

        Args:
            file: The file.
            start: Position of its voxels, see `locate`.

        Raises:
            UserError: If the file holds more or fewer values than the header says.
        """
        # `locate` has skipped the bytes of a raw file already.
        num_to_skip = 0 if self.is_raw else self.num_skipped
        num_read = 0
        split_voxel = b""  # the first bytes of a voxel that the next chunk completes
        with file.open("rb") as stream:
            stream.seek(start)
            for chunk in decoded(self.path, stream, self.encoding, self.dtype):
                data = split_voxel + chunk[num_to_skip:]
                num_to_skip = max(0, num_to_skip - len(chunk))
                # Voxels of other volumes may follow; anything else that follows is refused below.
                if self.num_after:
                    data = data[: self.num_bytes - num_read]
                num_values = len(data) // self.dtype.itemsize
                num_whole_bytes = num_values * self.dtype.itemsize
                split_voxel = data[num_whole_bytes:]
                num_read += num_whole_bytes
                if num_read + len(split_voxel) > self.num_bytes:
                    raise self._surplus()
                yield np.frombuffer(data, self.dtype, num_values)
        if num_read != self.num_bytes:
            num_slices = self.shape[0]
            slice_bytes = self.num_bytes // num_slices
            last_slice = num_read // slice_bytes + 1
            raise UserError(
                f"{self.path}: expected {num_slices} slices, but the file ends in slice "
                f"{last_slice}; it is truncated or damaged: copy or export it again."
            )

    def _expected(self) -> str:
        """Write the start of a message: how many bytes the header promises."""
        return (
            f"{self.path}: expected {self.num_bytes} bytes of voxels "
            f"({size_text(self.shape[::-1])} of {self.dtype.itemsize} bytes)"
        )

    def _surplus(self) -> UserError:
        """Refuse a file that holds more voxels than the header says."""
        return UserError(
            f"{self._expected()}, but the file holds more; "
            "its header belongs to other voxels: export it again."
        )


def lazy_volume(
    path: Path,
    grid: VoxelGrid,
    dtype: np.dtype[Any],
    files: Sequence[Path],
    encoding: str,
    *,
    offset: int = 0,
    num_lines: int = 0,
    num_skipped: int = 0,
    num_after: int = 0,
    **attributes: Any,
) -> LazyVolume:
    """Check that files can hold the voxels that a header describes, and make the lazy volume.

    The check comes before any allocation, since a damaged header may ask for any size.

    Args:
        path: File of the header, for messages.
        grid: Shape and position.
        dtype: Type of the stored values, with byte order.
        files: Files with equal shares of the slices, in their order.
        encoding: As for `decoded`.
        offset: First byte after the header.
        num_lines: Lines to skip after the header.
        num_skipped: Decoded bytes to skip after these lines; -1 says that the voxels, uncompressed,
            are the last bytes of their file.
        num_after: Decoded bytes of other volumes that follow the voxels.
        **attributes: Further attributes of the `LazyVolume`, such as `slope`.

    Raises:
        UserError: If a file is missing, too short or too long, or the header divides the slices
            unevenly or skips -1 bytes before compressed voxels.
    """
    depth, height, width = grid.shape
    if depth % len(files) or (num_skipped < 0 and encoding != "raw"):
        raise UserError(
            f"{path}: expected the slices divided evenly among the data files, and a byte skip of "
            f"-1 only for uncompressed voxels, but the header gives {len(files)} {encoding} "
            f"file(s) for {depth} slices and a byte skip of {num_skipped}; save it as one file."
        )
    share_shape = (depth // len(files), height, width)
    layout = _Layout(path, share_shape, dtype, encoding, num_skipped, num_after)
    starts: list[int] = []
    packed_bytes = 0
    for file in files:
        start, num_stored = layout.locate(file, offset, num_lines)
        starts.append(start)
        packed_bytes += num_stored

    def read_chunks() -> Iterator[np.ndarray]:
        for file, start in zip(files, starts, strict=True):
            yield from layout.read(file, start)

    return LazyVolume(
        path,
        grid,
        dtype,
        read_chunks,
        packed_bytes=None if layout.is_raw else packed_bytes,
        **attributes,
    )


def memory_bytes() -> int:
    """Return the size of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _is_exact(values: np.ndarray, dtype: type[Any]) -> bool:
    """Whether a type holds all values exactly; float32 counts as exact for all values."""
    if dtype is np.float32:
        return True
    if values.dtype.kind in "iu" and np.can_cast(values.dtype, dtype):
        return True
    limits = np.iinfo(dtype)
    # As numbers of Python, which are compared exactly: NumPy would round the limits to float32.
    lowest, highest = values.min().item(), values.max().item()
    if lowest < limits.min or highest > limits.max:
        return False
    return bool((values == np.rint(values)).all())


def _load(
    volume: LazyVolume, dtypes: Sequence[type[Any]], air: int = AIR_HU
) -> tuple[np.ndarray, int]:
    """Read all voxels into an array of the first of some types that holds them.

    Args:
        volume: Opened file, whose voxels are read here.
        dtypes: `IMAGE_DTYPES` or `LABEL_DTYPES`.
        air: Value for the voxels of an image that hold no number.

    Returns:
        Values (D, H, W), and the number of voxels of an image that became air: NaN, infinity and
        numbers beyond float32.

    Raises:
        UserError: If no type holds a value, the file is too short or too long, or the machine
            cannot hold the volume.
    """
    _check_memory(volume, dtypes[0])
    num_voxels = math.prod(volume.grid.shape)
    num_bytes = num_voxels * volume.dtype.itemsize
    packed_bytes = volume.packed_bytes
    if packed_bytes is not None and num_bytes > max(SURE_BYTES, SURE_RATIO * packed_bytes):
        # Decode all once and keep nothing: a damaged header is refused before its memory is taken.
        for _ in volume.read_chunks():
            pass
    # An array that waits, see `medseg.io.scratch`, is read plane by plane. Later steps go through
    # axial planes: in an array of sagittal or coronal slices, each axial plane has voxels in all
    # pages, so that a temporary file would be read once for each plane.
    waits = volume.grid.is_axial
    is_image = np.float32 in dtypes  # label maps are stored in integers only
    array = new_array((num_voxels,), dtypes[0], waits=waits)
    num_read = 0
    num_replaced = 0
    for values in volume.read_chunks():
        if len(values) == 0:
            continue
        if volume.slope != 1.0 or volume.intercept != 0.0:
            values = values.astype(np.float64) * volume.slope + volume.intercept
        if values.dtype.kind == "f":
            if is_image:
                values, num_in_chunk = _without_nan(values, air)
                num_replaced += num_in_chunk
            else:
                values = _whole_labels(values, volume)
        fitting_dtypes = [dtype for dtype in dtypes if _is_exact(values, dtype)]
        if not fitting_dtypes:
            # Only whole numbers beyond int64 get here, so the largest of them does not fit.
            raise _no_label_map(volume.path, values[np.argmax(np.abs(values))])
        if array.dtype not in fitting_dtypes:
            # This chunk needs a wider type, to which the values read so far are copied. The new
            # type must hold both: int16 so far and uint16 now need int32.
            wider_dtype = np.promote_types(array.dtype, fitting_dtypes[0])
            wider_array = new_array((num_voxels,), wider_dtype, waits=waits)
            wider_array[:num_read] = array[:num_read]
            array = wider_array
        array[num_read : num_read + len(values)] = values
        num_read += len(values)
    return array.reshape(volume.grid.shape), num_replaced


def _check_memory(volume: LazyVolume, dtype: type[Any]) -> None:
    """Check that this machine can hold a volume in a type.

    Raises:
        UserError: If it cannot; the message gives both sizes.
    """
    shape = volume.grid.shape
    needed_gib = math.prod(shape) * np.dtype(dtype).itemsize / 2**30
    memory_gib = memory_bytes() / 2**30
    if needed_gib > memory_gib:
        raise UserError(
            f"{volume.path}: its {size_text(shape[::-1])} voxels need {needed_gib:.1f} GiB, but "
            f"this machine has {memory_gib:.1f} GiB of memory; crop or resample the scan first."
        )


def _without_nan(values: np.ndarray, air: int) -> tuple[np.ndarray, int]:
    """Convert values of an image to float32, and replace NaN and infinity by air.

    Returns:
        The values, and the number of values that became air.
    """
    values = values.astype(np.float32, copy=False)
    is_replaced = ~np.isfinite(values)
    num_replaced = int(np.count_nonzero(is_replaced))
    if num_replaced:
        values = np.where(is_replaced, np.float32(air), values)
    return values, num_replaced


def _whole_labels(values: np.ndarray, volume: LazyVolume) -> np.ndarray:
    """Round the labels of a file to the whole numbers that they stand for.

    A label may differ from its whole number because the scale in the header is rounded: the stored
    value 255 with the slope 1/255 in 32 bits gives 1.00000006. The error grows with the product of
    stored value and slope, and with the intercept. It does not grow with the label: where product
    and intercept nearly cancel, the label is small and its error is not.

    A program that scales labels to the range of an integer type also rounds what it stores: labels
    up to 2 get the slope 2/255 in uint8, and 1 becomes 128 * 2/255 = 1.004. Such a label differs
    from its number by at most half a step, the slope.

    Args:
        values: Scaled labels, float.
        volume: Their file, for its scale and for the message.

    Raises:
        UserError: If a value differs from every whole number by more than rounding.
    """
    whole = np.rint(values)
    products = np.abs(values - volume.intercept)  # stored value times slope
    # At least 1, for a background of 0 too: a resampler may leave 1e-08 of a label 1 in it.
    magnitudes = np.maximum(products + abs(volume.intercept), 1.0)
    tolerance = ROUNDING * magnitudes
    step = abs(volume.slope)
    # With a step of 1 or more the stored numbers hold whole labels exactly, so no program rounds
    # them.
    if volume.dtype.kind in "iu" and step < 1.0:
        half_step = step / 2
        # The step itself is rounded: the difference may slightly exceed half a step.
        tolerance = np.maximum(tolerance, half_step * (1.0 + ROUNDING))
    is_whole = np.abs(values - whole) <= np.minimum(tolerance, MAX_ROUNDING)
    if not is_whole.all():
        raise _no_label_map(volume.path, values[~is_whole][0])
    return whole


def _no_label_map(path: Path, value: float) -> UserError:
    """Refuse a file for one of its values."""
    # 12 digits are more than a 32-bit float holds: errors of rounding become visible.
    return UserError(
        f"{path}: expected a label map of whole numbers, but the file holds values such as "
        f"{float(value):.12g}; is it an image or a probability map?"
    )


def load_image(volume: LazyVolume, air: int = AIR_HU) -> Volume:
    """Read an image (D, H, W): int16 where that is exact, else float32.

    NaN and infinity become air, with a warning in the findings.

    Args:
        volume: The image.
        air: Value outside the patient: `AIR_HU` of CT, 0 of other modalities.

    Raises:
        UserError: If the file is too short or too long, or none of its voxels holds a number.
    """
    image_hu, num_replaced = _load(volume, IMAGE_DTYPES, air)
    if num_replaced == image_hu.size:
        raise UserError(
            f"{volume.path}: expected a scan, but none of its voxels holds a number; "
            "export it again."
        )
    sentences = []
    if num_replaced:
        air_text = f"air, {air} HU" if air else "0"
        percentage = 100 * num_replaced / image_hu.size
        sentences.append(
            f"{num_replaced} of {image_hu.size} voxels ({percentage:.2g} %) "
            f"hold no number (NaN or infinity) and count as {air_text}"
        )
    if min(image_hu.shape) == 1:
        sentences.append(
            f"the scan of {size_text(image_hu.shape[::-1])} voxels is a single slice: "
            "expect a poor result"
        )
    findings = (*volume.findings, *warnings_of("reading", sentences))
    return Volume(image_hu, volume.grid, volume.header, findings, volume.identity)


def load_labels(volume: LazyVolume) -> Volume:
    """Read a label map (D, H, W) as the first of `LABEL_DTYPES` that holds all its values.

    Raises:
        UserError: If a value is not a whole number, or the file is too short or too long.
    """
    labels, _ = _load(volume, LABEL_DTYPES)
    return Volume(labels, volume.grid, volume.header, volume.findings)
