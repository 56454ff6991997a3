"""Lazy volumes: the header is read first, and voxels are decoded chunk by chunk, so memory never holds a second copy."""

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

from medseg.errors import UserError, require
from medseg.findings import Finding, warnings_of
from medseg.geometry.grid import VoxelGrid
from medseg.io.scratch import new_array
from medseg.task import AIR_HU

MIN_SPACING_MM = 1e-4
"""No scanner resolves a tenth of a micrometre: below it the spacing is damaged."""

MAX_ORIGIN_MM = 1e6
"""Scanners measure positions from a point in their room; with much larger numbers, rounding would merge neighbouring voxels."""

MAX_EXTENT_MM, MAX_FIELD_MM3 = 4e3, 8e9
"""No scanner's table is longer: beyond it the spacing is in another unit, or damaged."""

SLAB_BYTES = 2**20
"""Bytes that are decoded at once: large enough for speed, small beside a volume."""

PACKED_BYTES = 2**18
"""Bytes of a compressed stream that are taken from the file at once."""

MAX_WORD_BYTES = 100
"""Longest text of one voxel; a longer word is not a number."""

MAX_RATIOS = {"raw": 1, "text": 8, "deflate": 1032, "bzip2": 10**7}
"""Largest factor by which bytes of an encoding grow when they are decoded; a header that promises more is damaged."""

SURE_BYTES, SURE_RATIO = 2**28, 16
"""Above this size and this ratio to the compressed bytes, decode once to verify the promised length."""

ROUNDING = 2.0**-23
"""Largest relative error of a scaled label that counts as rounding, the distance of neighbouring 32-bit numbers near 1: half of it
for the slope and the intercept of a header, which most formats store in 32 bits, and half for the value or its product."""

MAX_ROUNDING = 0.25
"""Largest distance from a whole number that counts as rounding, however large the label is."""

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
    """

    array: np.ndarray
    grid: VoxelGrid
    header: Any = None
    findings: tuple[Finding, ...] = ()

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


def shown(text: str) -> str:
    """Quote a value for a message: on one line, short, without characters that a terminal would act on."""
    return repr(text if len(text) <= 60 else text[:57] + "...")


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
    spacing = np.linalg.norm(columns, axis=0)
    require(
        bool(np.isfinite([*columns.flat, *spacing, *origin]).all()) and spacing.min() > 0,
        f"{path}: expected three axes of positive length and a finite origin, but the header gives steps of "
        f"{columns.T.tolist()} mm from {list(origin)}; repair the header or export the scan again.",
    )
    require(
        max(map(abs, origin)) <= MAX_ORIGIN_MM,
        f"{path}: expected a scan within {MAX_ORIGIN_MM / 1e6:g} km of its scanner, but the header gives the origin "
        f"{', '.join(f'{value:.4g}' for value in origin)} mm; repair the header or export the scan again.",
    )
    require(
        spacing.min() >= MIN_SPACING_MM,
        f"{path}: expected voxels of at least {MIN_SPACING_MM:g} mm, but the header gives a spacing of "
        f"{' x '.join(f'{step:.4g}' for step in spacing)} mm; check whether its spacing is in mm.",
    )
    extents = [float(step) * size for step, size in zip(spacing, shape[::-1], strict=True)]
    require(
        max(extents) <= MAX_EXTENT_MM and math.prod(extents) <= MAX_FIELD_MM3,
        f"{path}: expected a scan of at most {MAX_EXTENT_MM / 1e3:g} m along each axis and {MAX_FIELD_MM3 / 1e9:g} m³ in all, but the "
        f"header makes it {' x '.join(f'{extent / 1e3:.4g}' for extent in extents)} m; check its sizes, and whether its spacing is in "
        "mm.",
    )
    z_mm, y_mm, x_mm = spacing[::-1]
    x0, y0, z0 = origin
    try:
        return VoxelGrid(shape, (z_mm, y_mm, x_mm), (x0, y0, z0), (columns / spacing).tolist())
    except ValueError as error:
        raise UserError(
            f"{path}: expected axes at right angles, but {error}; resample the scan to a regular grid first."
        ) from None


def check_shape(path: Path, sizes: Sequence[int]) -> tuple[int, int, int]:
    """Turn stored sizes (x, y, z, then frames) into (D, H, W).

    Raises:
        UserError: If it is not one 3D volume.
    """
    require(
        len(sizes) >= 3 and set(sizes[3:]) <= {1} and min(sizes) >= 1,
        f"{path}: expected one 3D volume, but the file holds {size_text(sizes)} values; give one volume per file.",
    )
    return int(sizes[2]), int(sizes[1]), int(sizes[0])


def is_gzip(file: BinaryIO) -> bool:
    """Whether gzip data begin at the current position: names and headers are often wrong about it."""
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
    stream: Any = (
        file
        if encoding == "raw"
        else bz2.BZ2File(file)
        if encoding == "bzip2"
        else igzip.IGzipFile(fileobj=file, mode="rb")
    )
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
    require(
        not rest.strip(b"\0"),
        f"{path}: the file cannot be read: other bytes follow its compressed voxels; export it again.",
    )


def _encode_text(path: Path, file: BinaryIO, dtype: np.dtype[Any]) -> Iterator[bytes]:
    """Convert numbers that are separated by white space to bytes; a line may be as long as the file."""
    rest, part = b"", file.read(PACKED_BYTES)
    while part or rest:
        words = (rest + part).split()
        # The last word may continue in the next part.
        rest = words.pop() if part and not part[-1:].isspace() else b""
        try:
            # 1_000 is a number in Python only. NumPy reserves the length of the longest word for
            # every word.
            if b"_" in part or max(map(len, [*words, rest])) > MAX_WORD_BYTES:
                raise ValueError
            yield np.array(words, "S").astype(dtype).tobytes()
        except (ValueError, OverflowError):
            raise UserError(
                f"{path}: the file cannot be read: a value of its voxels is no number of the type {dtype.name}; export it again."
            ) from None
        part = file.read(PACKED_BYTES)


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
    **others: Any,
) -> LazyVolume:
    """Describe voxels in files, after a check that the files can hold them: a damaged header causes no allocation.

    The function is long because every layout of a file has its own refusal.

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
        **others: Further attributes of the lazy volume.

    Raises:
        UserError: If a file is missing, too short or too long, or the header asks for what no
            program writes.
    """
    depth, height, width = grid.shape
    require(
        depth % len(files) == 0 and (num_skipped >= 0 or encoding == "raw"),
        f"{path}: expected the slices divided evenly among the data files, and a byte skip of -1 only for uncompressed voxels, but the "
        f"header gives {len(files)} {encoding} file(s) for {depth} slices and a byte skip of {num_skipped}; save it as one file.",
    )
    share, slice_bytes = depth // len(files), height * width * dtype.itemsize
    share_bytes, ratio = share * slice_bytes, MAX_RATIOS[encoding]
    expected = f"{path}: expected {share_bytes} bytes of voxels ({size_text((width, height, share))} of {dtype.itemsize} bytes)"
    surplus = (
        f"{expected}, but the file holds more; its header belongs to other voxels: export it again."
    )
    # First byte of the voxels in each file, or of their encoded stream.
    starts: dict[Path, int] = {}
    packed_bytes = 0
    for name in files:
        require(
            name.is_file(),
            f"{path}: its voxels should be in {shown(name.name)}, which does not exist; copy both files.",
        )
        with name.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(offset)
            deque(islice(file, num_lines), maxlen=0)
            start = file.tell()
        if encoding == "raw":
            start += num_skipped if num_skipped >= 0 else max(0, size - start - share_bytes)
        held, starts[name] = max(0, size - start - num_after * (encoding == "raw")), start
        packed_bytes += held
        require(
            share_bytes <= ratio * held,
            f"{expected}, but the file {'holds' if ratio == 1 else 'can hold at most'} {ratio * held}; it is truncated or damaged: "
            "copy or export it again.",
        )
        require(ratio > 1 or share_bytes == held, surplus)

    def runs() -> Iterator[np.ndarray]:
        for name in files:
            # `rest` holds the first bytes of a voxel that the next chunk completes.
            skipped, rest, num_bytes = 0 if encoding == "raw" else num_skipped, b"", 0
            with name.open("rb") as file:
                file.seek(starts[name])
                for chunk in decoded(path, file, encoding, dtype):
                    data = rest + chunk[skipped:]
                    skipped = max(0, skipped - len(chunk))
                    if num_after:
                        data = data[: share_bytes - num_bytes]
                    num_values = len(data) // dtype.itemsize
                    rest = data[num_values * dtype.itemsize :]
                    num_bytes += len(data) - len(rest)
                    require(num_bytes + len(rest) <= share_bytes, surplus)
                    yield np.frombuffer(data, dtype, num_values)
            require(
                num_bytes == share_bytes,
                f"{path}: expected {share} slices, but the file ends in slice {num_bytes // slice_bytes + 1}; it is truncated or damaged: "
                "copy or export it again.",
            )

    return LazyVolume(
        path, grid, dtype, runs, packed_bytes=None if encoding == "raw" else packed_bytes, **others
    )


def memory_bytes() -> int:
    """Return the memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _is_exact(values: np.ndarray, dtype: type[Any]) -> bool:
    """Whether a type holds all values exactly; float32 is taken for every image."""
    if dtype is np.float32 or (values.dtype.kind in "iu" and np.can_cast(values.dtype, dtype)):
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
    shape = volume.grid.shape
    num_voxels = math.prod(shape)
    needed_gib, memory_gib = (
        num_voxels * np.dtype(dtypes[0]).itemsize / 2**30,
        memory_bytes() / 2**30,
    )
    require(
        needed_gib <= memory_gib,
        f"{volume.path}: its {size_text(shape[::-1])} voxels need {needed_gib:.1f} GiB, but this machine has {memory_gib:.1f} GiB of "
        "memory; crop or resample the scan first.",
    )
    if volume.packed_bytes is not None and num_voxels * volume.dtype.itemsize > max(
        SURE_BYTES, SURE_RATIO * volume.packed_bytes
    ):
        deque(volume.runs(), maxlen=0)
    array, first, num_gaps = new_array((num_voxels,), dtypes[0]), 0, 0
    for values in filter(len, volume.runs()):
        if (volume.slope, volume.intercept) != (1.0, 0.0):
            values = values.astype(np.float64) * volume.slope + volume.intercept
        is_float = values.dtype.kind == "f"
        if is_float and np.float32 not in dtypes:
            values = _whole(values, volume)
        elif is_float:
            values = values.astype(np.float32, copy=False)
            gaps = ~np.isfinite(values)
            if gaps.any():
                values, num_gaps = (
                    np.where(gaps, np.float32(air), values),
                    num_gaps + int(gaps.sum()),
                )
        fitting = [dtype for dtype in dtypes if _is_exact(values, dtype)]
        if not fitting:
            raise _no_label_map(volume.path, values.flat[int(np.argmax(np.abs(values)))])
        if array.dtype not in fitting:
            wider = new_array((num_voxels,), np.promote_types(array.dtype, fitting[0]))
            wider[:first] = array[:first]
            array = wider
        array[first : first + len(values)] = values
        first += len(values)
    return array.reshape(volume.grid.shape), num_gaps


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
    sizes = np.maximum(np.abs(values - volume.intercept) + abs(volume.intercept), 1.0)
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
        f"{path}: expected a label map of whole numbers, but the file holds values such as {float(value):.12g}; is it "
        "an image or a probability map?"
    )


def load_image(volume: LazyVolume, air: int = AIR_HU) -> Volume:
    """Read an image (D, H, W): int16 where that is exact, else float32. NaN and infinity become air, with a warning.

    Args:
        volume: The image.
        air: Value outside the patient: -1024 HU of CT, 0 of other modalities.

    Raises:
        UserError: If the file is too short or too long.
    """
    image_hu, num_gaps = _load(volume, IMAGE_DTYPES, air)
    require(
        num_gaps < image_hu.size,
        f"{volume.path}: expected a scan, but none of its voxels holds a number; export it again.",
    )
    warnings = {
        f"{num_gaps} of {image_hu.size} voxels ({100 * num_gaps / image_hu.size:.2g} %) hold no number (NaN or infinity) and count as "
        + (f"air, {air} HU" if air else "0"): num_gaps > 0,
        f"the scan of {size_text(image_hu.shape[::-1])} voxels is a single slice: expect a poor result": min(
            image_hu.shape
        )
        == 1,
    }
    found = warnings_of("reading", (sentence for sentence, applies in warnings.items() if applies))
    return Volume(image_hu, volume.grid, volume.header, (*volume.findings, *found))


def load_labels(volume: LazyVolume) -> Volume:
    """Read a label map (D, H, W) in the smallest of the usual integer types, uint8 first.

    Raises:
        UserError: If a value is not a whole number, or the file is too short or too long.
    """
    return Volume(_load(volume, LABEL_DTYPES)[0], volume.grid, volume.header, volume.findings)
