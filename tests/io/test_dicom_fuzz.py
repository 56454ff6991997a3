"""Damaged DICOM files: the slices that are whole stay right and in their place, or one sentence says what is wrong."""

from __future__ import annotations

import contextlib
import resource
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pydicom
import pytest
from dicom_files import enhanced, header, pack_frames, place, save, save_by_gdcm, save_stack
from io_volumes import make_hu

from medseg.errors import UserError
from medseg.geometry.grid import VoxelGrid
from medseg.io.dicom.frames import Frame, read_frames
from medseg.io.dicom.pixels import PixelReader
from medseg.io.read import read_image

SHAPE = (7, 12, 10)
HEIGHTS = [2.5 * index for index in range(SHAPE[0])]
GRID = VoxelGrid(SHAPE, (2.5, 0.8, 0.6484375), (-120.25, 33.5, 0.0))
MAX_GROWTH_BYTES = 2**28


def damaged(data: bytes, rng: np.random.Generator) -> bytes:
    """Flip bits, write over, cut out, double or cut off a part; most of it in the header, which is the smaller part."""
    end = len(data) if rng.random() < 0.2 else len(data) - 2 * SHAPE[1] * SHAPE[2]
    at = int(rng.integers(128, end))
    length = int(rng.integers(1, 9))
    kind = rng.integers(6)
    if kind == 0:
        return data[:at] + bytes([data[at] ^ (1 << int(rng.integers(8)))]) + data[at + 1 :]
    if kind == 1:
        return data[:at] + rng.bytes(length) + data[at + length :]
    if kind == 2:
        return data[:at] + bytes([int(rng.choice([0, 255, ord("9"), ord("-"), ord("\\")]))]) * length + data[at + length :]
    if kind == 3:
        return data[:at] + data[at + length :]
    if kind == 4:
        return data[:at] + data[at : at + length] + data[at:]
    return data[:at]


def write_slices(folder: Path) -> Path:
    return save_stack(folder, make_hu(SHAPE), HEIGHTS, SeriesNumber=3, AcquisitionNumber=1, PixelPaddingValue=0)[3]


def write_packed_slices(folder: Path) -> Path:
    for index, pixels in enumerate(make_hu(SHAPE)):
        dataset = header((pixels + 1024).astype(np.uint16))
        place(dataset, (-120.25, 33.5, HEIGHTS[index]))
        plain = save(dataset, folder.parent / f"{folder.name}.plain")
        folder.mkdir(exist_ok=True)
        last = save_by_gdcm(plain, folder / f"{index}", "JPEGLosslessProcess14_1")
    return last.with_name("3")


def write_enhanced(folder: Path) -> Path:
    stored = (make_hu(SHAPE) + 1024).astype(np.uint16)
    positions = [(-120.25, 33.5, height) for height in HEIGHTS]
    return save(enhanced(stored, positions, [(1, -1024)] * SHAPE[0]), folder / "e")


def write_packed_enhanced(folder: Path) -> Path:
    plain = write_enhanced(folder.parent / f"{folder.name} plain")
    folder.mkdir()
    return pack_frames(plain, folder / "e", "JPEGLSLossless")


WRITERS: dict[str, Callable[[Path], Path]] = {
    "slices": write_slices,
    "packed slices": write_packed_slices,
    "enhanced": write_enhanced,
    "packed enhanced": write_packed_enhanced,
}


def check_whole_slices(folder: Path, one_in_many: bool) -> bool:
    """Read; what was read of the slices that are whole must be right. Gives whether it was read."""
    said = ""
    try:
        volume = read_image(folder)
    except UserError as error:
        said = str(error)
    if said:
        assert "\n" not in said
        assert str(folder) in said
        return False
    if any("resampled" in remark or "interpolated linearly onto" in remark for remark in volume.remarks):
        return True
    if not one_in_many:
        return True
    for index, pixels in enumerate(make_hu(SHAPE)):
        found = volume.grid.world_to_index_zyx(GRID.index_to_world_xyz_mm((index, 0, 0)))
        if index != 3:
            z, y, x = np.rint(found).astype(int)
            assert np.abs(found - (z, y, x)).max() < 0.05, volume.grid
            assert np.array_equal(volume.array[z, y : y + SHAPE[1], x : x + SHAPE[2]], pixels)
    return True


def run(kind: str, tmp_path: Path, num_mutations: int, seed: int) -> None:
    target = WRITERS[kind](tmp_path / "d")
    whole = target.read_bytes()
    assert check_whole_slices(tmp_path / "d", True)
    rng = np.random.default_rng(seed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    num_read = 0
    for number in range(num_mutations):
        target.write_bytes(damaged(whole, rng))
        try:
            num_read += check_whole_slices(tmp_path / "d", kind.endswith("slices"))
        except Exception as error:
            raise AssertionError(f"{kind}, seed {seed}, mutation {number}") from error
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * (1 if sys.platform == "darwin" else 1024)
    assert grown < MAX_GROWTH_BYTES
    assert 0 < num_read < num_mutations


@pytest.mark.parametrize("kind", WRITERS)
def test_some_mutations(kind: str, tmp_path: Path) -> None:
    run(kind, tmp_path, 50, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("kind", WRITERS)
def test_many_mutations(kind: str, seed: int, tmp_path: Path) -> None:
    run(kind, tmp_path, 400, seed)


def test_the_odd_files_that_come_with_pydicom() -> None:
    """Each gives slices, or says what it is, or is refused in a sentence; ITK reads the same HU."""
    sitk = pytest.importorskip("SimpleITK")
    files = [file for file in (Path(pydicom.__file__).parent / "data" / "test_files").glob("*.dcm") if file.is_file()]
    scans: dict[Path, Frame] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for file in files:
            with contextlib.suppress(UserError):
                scans |= {one.path: one for one in read_frames(file) if isinstance(one, Frame)}
    assert {"CT_small.dcm", "693_J2KI.dcm", "J2K_pixelrep_mismatch.dcm"} <= {file.name for file in scans}
    for file, frame in scans.items():
        assert np.array_equal(PixelReader().hu(frame), sitk.GetArrayFromImage(sitk.ReadImage(str(file)))[0]), file
