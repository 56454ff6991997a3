"""Lazy volumes: the header is read first, the voxels later and chunk by chunk.

So memory never holds a second copy of the voxels.
"""

import bz2
import math
import os
from collections import deque
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

# No scanner resolves a tenth of a micrometre: below it the spacing is damaged.
MIN_SPACING_MM = 1e-4

# Scanners measure positions from a point in their room. With much larger numbers, rounding would
# merge neighbouring voxels.
MAX_ORIGIN_MM = 1e6

# No scanner's table is longer: beyond it the spacing is in another unit, or damaged.
MAX_EXTENT_MM = 4e3

# Largest volume of a scan, 8 m³, for the same reason.
MAX_FIELD_MM3 = 8e9

# Bytes that are decoded at once: large enough for speed, small beside a volume.
SLAB_BYTES = 2**20

# Bytes of a compressed stream that are taken from the file at once.
PACKED_BYTES = 2**18

# Longest text of one voxel; a longer word is not a number.
MAX_WORD_BYTES = 100

# Largest factor by which decoding enlarges bytes; a header that promises more is damaged.
MAX_RATIOS = {"raw": 1, "text": 8, "deflate": 1032, "bzip2": 10**7}

# Above this size and `SURE_RATIO`, decode once to verify the promised length.
SURE_BYTES = 2**28

# Ratio of voxel bytes to compressed bytes that real scans hardly reach.
SURE_RATIO = 16

# Largest relative error of a scaled label that counts as rounding. It is the distance of
# neighbouring 32-bit numbers near 1: half of it for the slope and the intercept of a header, which
# most formats store in 32 bits, and half for the value or its product.
ROUNDING = 2.0**-23

# Largest distance from a whole number that counts as rounding, however large the label is.
MAX_ROUNDING = 0.25

# Types in memory; the first that holds all values exactly is taken.
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
        findings: What the reader left out, assumed or repaired; the caller shows it to the user.
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
        runs: Opens the file and yields all stored values in their order (z, y, x): flat arrays of
            any length.
        slope: Factor from stored value to HU or label.
        intercept: Added after the slope.
        findings: See `Volume.findings`.
        header: nibabel header of a NIfTI file; None for other formats.
        packed_bytes: Bytes of the file that hold compressed voxels; None where the number of voxel
            bytes is known.
        identity: See `Volume.identity`.
    """

    path: Path
    grid: VoxelGrid
    dtype: np.dtype[Any]
    runs: Callable[[], Iterator[np.ndarray]]
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
    """Make the grid of a file from its world steps.

    Small deviations from right angles (rounded decimals) are kept, so that no corner moves.

    Args:
        path: The file, for messages.
        shape: Voxels (D, H, W).
        columns: 3×3; column j is the LPS step in mm along index axis (x, y, z)[j].
        origin: LPS point of the first voxel's centre, in mm.

    Raises:
        UserError: If the axes are sheared, an axis has no length, or the scan is larger than any
            scanner.
    """
    spacing_xyz_mm = np.linalg.norm(columns, axis=0)
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
    extents_mm = [
        float(step_mm) * size for step_mm, size in zip(spacing_xyz_mm, shape[::-1], strict=True)
    ]
    if max(extents_mm) > MAX_EXTENT_MM or math.prod(extents_mm) > MAX_FIELD_MM3:
        raise UserError(
            f"{path}: expected a scan of at most {MAX_EXTENT_MM / 1e3:g} m along each axis and "
            f"{MAX_FIELD_MM3 / 1e9:g} m³ in all, but the header makes it "
            f"{' x '.join(f'{extent / 1e3:.4g}' for extent in extents_mm)} m; "
            "check its sizes, and whether its spacing is in mm."
        )
    z_mm, y_mm, x_mm = spacing_xyz_mm[::-1]
    x0, y0, z0 = origin
    try:
        return VoxelGrid(
            shape, (z_mm, y_mm, x_mm), (x0, y0, z0), (columns / spacing_xyz_mm).tolist()
        )
    except ValueError as error:
        raise UserError(
            f"{path}: expected axes at right angles, but {error}; "
            "resample the scan to a regular grid first."
        ) from None


def check_shape(path: Path, sizes: Sequence[int]) -> tuple[int, int, int]:
    """Turn stored sizes (x, y, z, then frames) into (D, H, W).

    Raises:
        UserError: If it is not one 3D volume.
    """
    # Further axes, such as time, may have one step.
    if len(sizes) < 3 or set(sizes[3:]) - {1} or min(sizes) < 1:
        raise UserError(
            f"{path}: expected one 3D volume, but the file holds {size_text(sizes)} values; "
            "give one volume per file."
        )
    return int(sizes[2]), int(sizes[1]), int(sizes[0])


def is_gzip(file: BinaryIO) -> bool:
    """Whether gzip data begin at the current position.

    Names and headers are often wrong about it.
    """
    magic = file.read(2)
    file.seek(-len(magic), 1)
    return magic == b"\x1f\x8b"


def decoded(path: Path, file: BinaryIO, encoding: str, dtype: np.dtype[Any]) -> Iterator[bytes]:
    """Decode a file from its current position on; checksums are compared at the end.

    Args:
        path: File, for messages.
        file: The open file.
        encoding: `raw`, `deflate` (gzip or zlib), `bzip2` or `text`.
        dtype: Type of the voxels.

    Returns:
        Chunks of bytes; those of gzip and of plain files have `SLAB_BYTES`, the last one less.
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
    return iter(partial(stream.read, SLAB_BYTES), b"")


def _inflate(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """Decode a zlib stream; ISA-L needs half of zlib's time and releases the GIL."""
    decoder = IgzipDecompressor(DECOMP_ZLIB)
    while not decoder.eof:
        packed = file.read(PACKED_BYTES) if decoder.needs_input else b""
        if decoder.needs_input and not packed:
            raise EOFError
        yield decoder.decompress(packed, PACKED_BYTES)
    # Some programs fill up the file with zeros.
    rest = decoder.unused_data + file.read(PACKED_BYTES)
    if rest.strip(b"\0"):
        raise UserError(
            f"{path}: the file cannot be read: other bytes follow its compressed voxels; "
            "export it again."
        )


def _encode_text(path: Path, file: BinaryIO, dtype: np.dtype[Any]) -> Iterator[bytes]:
    """Convert numbers that are separated by white space to bytes.

    A line may be as long as the file.
    """
    rest = b""
    part = file.read(PACKED_BYTES)
    while part or rest:
        words = (rest + part).split()
        # The last word may continue in the next part.
        rest = words.pop() if part and not part[-1:].isspace() else b""
        # NumPy reserves the length of the longest word for every word.
        is_too_long = max(map(len, [*words, rest])) > MAX_WORD_BYTES
        try:
            # 1_000 is a number in Python only.
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
    """Storage of the voxels in the files of a volume, each of which holds an equal share.

    Attributes:
        path: File of the header, for messages.
        shape: Share of each file in voxels (D, H, W).
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
        """Bytes of the share of a file, decoded."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_raw(self) -> bool:
        """Whether the voxels lie in their file as they are."""
        return self.encoding == "raw"

    def find(self, file: Path, offset: int, num_lines: int) -> tuple[int, int]:
        """Find the voxels of a file, and check that it can hold them.

        Args:
            file: The file.
            offset: As for `lazy_volume`.
            num_lines: As for `lazy_volume`.

        Returns:
            First byte of the voxels or of their encoded stream, and the number of these bytes.

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
            deque(islice(stream, num_lines), maxlen=0)
            start = stream.tell()
        stop = size
        # What is to be skipped of an encoded stream can only be counted once it is decoded.
        if self.is_raw:
            stop -= self.num_after
            if self.num_skipped >= 0:
                start += self.num_skipped
            else:
                start = max(start, size - self.num_bytes)
        num_stored = max(0, stop - start)
        ratio = MAX_RATIOS[self.encoding]
        if self.num_bytes > ratio * num_stored:
            holds = "holds" if ratio == 1 else "can hold at most"
            raise UserError(
                f"{self._expected()}, but the file {holds} {ratio * num_stored}; "
                "it is truncated or damaged: copy or export it again."
            )
        # Only of voxels as they are the size is known before decoding.
        if self.is_raw and self.num_bytes < num_stored:
            raise self._surplus()
        return start, num_stored

    def read(self, file: Path, start: int) -> Iterator[np.ndarray]:
        """Yield the values of a file from its first byte of voxels on.

        Raises:
            UserError: If the file holds more or fewer.
        """
        num_to_skip = 0 if self.is_raw else self.num_skipped
        num_read = 0
        rest = b""  # the first bytes of a voxel that the next chunk completes
        with file.open("rb") as stream:
            stream.seek(start)
            for chunk in decoded(self.path, stream, self.encoding, self.dtype):
                data = rest + chunk[num_to_skip:]
                num_to_skip = max(0, num_to_skip - len(chunk))
                # The voxels of other volumes are not wanted; anything else behind is a surplus.
                if self.num_after:
                    data = data[: self.num_bytes - num_read]
                num_values = len(data) // self.dtype.itemsize
                rest = data[num_values * self.dtype.itemsize :]
                num_read += len(data) - len(rest)
                if num_read + len(rest) > self.num_bytes:
                    raise self._surplus()
                yield np.frombuffer(data, self.dtype, num_values)
        if num_read != self.num_bytes:
            num_slices = self.shape[0]
            last = num_read // (self.num_bytes // num_slices) + 1
            raise UserError(
                f"{self.path}: expected {num_slices} slices, but the file ends in slice {last}; "
                "it is truncated or damaged: copy or export it again."
            )

    def _expected(self) -> str:
        """Begin a message: how many bytes the header promises."""
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
    """Describe voxels in files, after a check that the files can hold them.

    So a damaged header causes no allocation.

    Args:
        path: File of the header, for messages.
        grid: Shape and position.
        dtype: Type of the stored values, with byte order.
        files: Files with equal shares of the slices, in their order.
        encoding: As for `decoded`.
        offset: First byte after the header.
        num_lines: Lines to skip after it.
        num_skipped: Decoded bytes to skip after these lines; -1: uncompressed voxels are the last
            bytes of their file.
        num_after: Decoded bytes of other volumes that follow the voxels.
        **attributes: Further attributes of the lazy volume.

    Raises:
        UserError: If a file is missing, too short or too long, or the header asks for what no
            program writes.
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
        start, num_stored = layout.find(file, offset, num_lines)
        starts.append(start)
        packed_bytes += num_stored

    def runs() -> Iterator[np.ndarray]:
        for file, start in zip(files, starts, strict=True):
            yield from layout.read(file, start)

    return LazyVolume(
        path,
        grid,
        dtype,
        runs,
        packed_bytes=None if layout.is_raw else packed_bytes,
        **attributes,
    )


def memory_bytes() -> int:
    """Return the memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _is_exact(values: np.ndarray, dtype: type[Any]) -> bool:
    """Whether a type holds all values exactly; float32 is taken for every image."""
    if dtype is np.float32:
        return True
    if values.dtype.kind in "iu" and np.can_cast(values.dtype, dtype):
        return True
    limits = np.iinfo(dtype)
    return bool(
        values.min() >= limits.min
        and values.max() <= limits.max
        and (values == np.rint(values)).all()
    )


def _load(
    volume: LazyVolume, dtypes: Sequence[type[Any]], air: int = AIR_HU
) -> tuple[np.ndarray, int]:
    """Read all voxels in the first of some types that holds them.

    Returns:
        Values (D, H, W), and how many voxels of an image held no number, or none that float32 can
        hold; these become air.

    Raises:
        UserError: If no type holds a value, the file is too short or too long, or the machine
            cannot hold the volume.
    """
    _check_memory(volume, dtypes[0])
    num_voxels = math.prod(volume.grid.shape)
    num_bytes = num_voxels * volume.dtype.itemsize
    packed_bytes = volume.packed_bytes
    if packed_bytes is not None and num_bytes > max(SURE_BYTES, SURE_RATIO * packed_bytes):
        # A damaged header is refused here, before the memory that it asks for is taken.
        deque(volume.runs(), maxlen=0)
    # Who reads it goes through axial planes: in another order each of them has voxels in all pages.
    waits = volume.grid.is_axial
    array = new_array((num_voxels,), dtypes[0], waits=waits)
    first, num_gaps = 0, 0
    for values in filter(len, volume.runs()):
        if (volume.slope, volume.intercept) != (1.0, 0.0):
            values = values.astype(np.float64) * volume.slope + volume.intercept
        if values.dtype.kind == "f":
            if np.float32 in dtypes:
                values, num_gaps_here = _without_gaps(values, air)
                num_gaps += num_gaps_here
            else:
                values = _whole(values, volume)
        fitting = [dtype for dtype in dtypes if _is_exact(values, dtype)]
        if not fitting:
            raise _no_label_map(volume.path, values.flat[int(np.argmax(np.abs(values)))])
        if array.dtype not in fitting:
            # The first value of a wider type: what has been read is copied.
            wider_dtype = np.promote_types(array.dtype, fitting[0])
            wider = new_array((num_voxels,), wider_dtype, waits=waits)
            wider[:first] = array[:first]
            array = wider
        array[first : first + len(values)] = values
        first += len(values)
    return array.reshape(volume.grid.shape), num_gaps


def _check_memory(volume: LazyVolume, dtype: type[Any]) -> None:
    """Refuse a volume that this machine cannot hold in a type.

    Raises:
        UserError: With both sizes.
    """
    shape = volume.grid.shape
    needed_gib = math.prod(shape) * np.dtype(dtype).itemsize / 2**30
    memory_gib = memory_bytes() / 2**30
    if needed_gib > memory_gib:
        raise UserError(
            f"{volume.path}: its {size_text(shape[::-1])} voxels need {needed_gib:.1f} GiB, but "
            f"this machine has {memory_gib:.1f} GiB of memory; crop or resample the scan first."
        )


def _without_gaps(values: np.ndarray, air: int) -> tuple[np.ndarray, int]:
    """Convert values of an image to float32, with air where that is not finite; count these."""
    values = values.astype(np.float32, copy=False)
    gaps = ~np.isfinite(values)
    num_gaps = int(np.count_nonzero(gaps))
    if num_gaps:
        values = np.where(gaps, np.float32(air), values)
    return values, num_gaps


def _whole(values: np.ndarray, volume: LazyVolume) -> np.ndarray:
    """Round the labels of a file to the whole numbers that they stand for.

    A label may miss its number by the rounding of the scale in the header: the value 255 with the
    slope 1/255 in 32 bits gives 1.00000006. The error is relative to the product and to the
    intercept, which may nearly cancel.

    A program that scales labels to the range of an integer type also rounds what it stores: labels
    up to 2 get the slope 2/255 in uint8, and 1 becomes 128 * 2/255 = 1.004. Such a label misses its
    number by at most half a step.

    Args:
        values: Scaled labels, float.
        volume: Their file, for its scale and for the message.

    Raises:
        UserError: If a value misses every whole number by more than rounding.
    """
    whole = np.rint(values)
    # Not below the rounding of a label 1: a resampler weighs labels against the background, and
    # leaves 1e-08 of one.
    products = np.abs(values - volume.intercept)
    sizes = np.maximum(products + abs(volume.intercept), 1.0)
    step = abs(volume.slope)
    # With a step of 1 or more the stored numbers hold whole labels exactly, so no program rounds
    # them.
    half_step = step / 2 if volume.dtype.kind in "iu" and step < 1.0 else 0.0
    tolerance = np.maximum(ROUNDING * sizes, half_step * (1.0 + ROUNDING))
    is_whole = np.abs(values - whole) <= np.minimum(tolerance, MAX_ROUNDING)
    if not is_whole.all():
        raise _no_label_map(volume.path, values[~is_whole][0])
    return whole


def _no_label_map(path: Path, value: float) -> UserError:
    """Refuse a file for one of its values, with more digits than its rounding error has."""
    return UserError(
        f"{path}: expected a label map of whole numbers, but the file holds values such as "
        f"{float(value):.12g}; is it an image or a probability map?"
    )


def load_image(volume: LazyVolume, air: int = AIR_HU) -> Volume:
    """Read an image (D, H, W): int16 where that is exact, else float32.

    NaN and infinity become air, with a warning.

    Args:
        volume: The image.
        air: Value outside the patient: -1024 HU of CT, 0 of other modalities.

    Raises:
        UserError: If the file is too short or too long.
    """
    image_hu, num_gaps = _load(volume, IMAGE_DTYPES, air)
    if num_gaps >= image_hu.size:
        raise UserError(
            f"{volume.path}: expected a scan, but none of its voxels holds a number; "
            "export it again."
        )
    sentences = []
    if num_gaps:
        air_text = f"air, {air} HU" if air else "0"
        sentences.append(
            f"{num_gaps} of {image_hu.size} voxels ({100 * num_gaps / image_hu.size:.2g} %) "
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
    """Read a label map (D, H, W) in the smallest of the usual integer types, uint8 first.

    Raises:
        UserError: If a value is not a whole number, or the file is too short or too long.
    """
    labels, _ = _load(volume, LABEL_DTYPES)
    return Volume(labels, volume.grid, volume.header, volume.findings)
