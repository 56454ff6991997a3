"""Damaged DICOM files: whole slices stay right and in place, or one sentence tells the damage."""

from __future__ import annotations

import contextlib
import re
import resource
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import imagecodecs
import numpy as np
import pydicom
import pytest
from dicom_files import enhanced, header, pack_frames, place, save, save_packed, save_stack
from dicom_reference import Slice, on_plane, slices_of
from io_volumes import finding_texts, make_hu
from pydicom.uid import JPEGLosslessSV1

from medseg.errors import UserError
from medseg.io.dicom.frames import Frame, read_frames
from medseg.io.dicom.pixels import read_hu
from medseg.io.read import read_image
from medseg.io.volume import Volume

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:pydicom")  # of the second reading

SHAPE = (7, 12, 10)
HEIGHTS = [2.5 * index for index in range(SHAPE[0])]
RESCALE = [(1 + index % 3, -1024 - index) for index in range(SHAPE[0])]
MAX_GROWTH_BYTES = 2**28
MAX_SENTENCE = 400
JITTER_MM = 0.11


def damaged(data: bytes, rng: np.random.Generator) -> bytes:
    """Flip bits, overwrite, cut out, double or cut off a part, mostly of the (smaller) header."""
    end = len(data) if rng.random() < 0.2 else len(data) - 2 * SHAPE[1] * SHAPE[2]
    at = int(rng.integers(128, end))
    length = int(rng.integers(1, 9))
    kind = rng.integers(6)
    if kind == 0:
        return data[:at] + bytes([data[at] ^ (1 << int(rng.integers(8)))]) + data[at + 1 :]
    if kind == 1:
        return data[:at] + rng.bytes(length) + data[at + length :]
    if kind == 2:
        return (
            data[:at]
            + bytes([int(rng.choice([0, 255, ord("9"), ord("-"), ord("\\")]))]) * length
            + data[at + length :]
        )
    if kind == 3:
        return data[:at] + data[at + length :]
    if kind == 4:
        return data[:at] + data[at : at + length] + data[at:]
    return data[:at]


def write_slices(folder: Path) -> Path:
    fields = {"SeriesNumber": 3, "AcquisitionNumber": 1, "PixelPaddingValue": 0}
    slopes, intercepts = zip(*RESCALE, strict=True)
    return save_stack(
        folder,
        make_hu(SHAPE),
        HEIGHTS,
        RescaleSlope=list(slopes),
        RescaleIntercept=list(intercepts),
        **fields,
    )[3]


def write_packed_slices(folder: Path) -> Path:
    for index, values in enumerate((make_hu(SHAPE) + 1024).astype(np.uint16)):
        dataset = header(values, RescaleSlope=RESCALE[index][0], RescaleIntercept=RESCALE[index][1])
        place(dataset, (-120.25, 33.5, HEIGHTS[index]))
        code = imagecodecs.jpeg_encode(values, lossless=True, bitspersample=16)
        save_packed(dataset, folder / f"{index}", [code], JPEGLosslessSV1)
    return folder / "3"


def write_enhanced(folder: Path) -> Path:
    positions = [(-120.25, 33.5, height) for height in HEIGHTS]
    return save(enhanced(make_hu(SHAPE), positions, RESCALE), folder / "e")


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


def counted(pattern: str, remarks: str) -> int:
    """Sum of the numbers that a pattern finds."""
    return sum(int(count) for count in re.findall(pattern, remarks))


def is_there(slice_: Slice, volume: Volume, plane: int, is_resampled: bool) -> bool:
    """Whether a plane of the volume holds what a slice says."""
    rows_columns = np.moveaxis(np.indices(volume.grid.shape[1:]), 0, -1)
    index = np.concatenate([np.full((*rows_columns.shape[:2], 1), plane), rows_columns], axis=-1)
    readings = on_plane(slice_, volume.grid.index_to_world_xyz_mm(index), is_resampled)
    tolerance = (1.0 if is_resampled else 0.0) + 1e-6 * np.abs(readings)
    return bool((np.abs(readings - volume.array[plane]) <= tolerance).any(axis=0).all())


def judge(volume: Volume, slices: Sequence[Slice], num_strange: int) -> None:
    """Slices lie at their place with their values; a remark counts the planes that are none.

    Args:
        volume: What was read.
        slices: What the files say.
        num_strange: How many slices more the files hold, which pydicom cannot read either.
    """
    said = "; ".join(finding_texts(volume))
    is_resampled = "resampled" in said or "interpolated" in said
    filled = set(range(volume.grid.shape[0]))
    num_lost = num_strange
    for slice_ in slices:
        height = float(volume.grid.world_to_index_zyx(slice_.origin)[0])
        plane = round(height)
        is_near = (
            abs(height - plane) * volume.grid.spacing_mm[0] <= JITTER_MM
            and 0 <= plane < volume.grid.shape[0]
        )
        if is_near and is_there(slice_, volume, plane, is_resampled):
            filled.discard(plane)
        else:
            num_lost += is_near or "onto an even grid" not in said
    num_told = (
        counted(r"(\d+) x ", said)
        + said.count("kept, dropped: '")
        + said.count("since it cannot be read: '")
    )
    assert num_lost <= num_told, said
    assert len(filled) <= counted(r"(?:missing:|mm apart:) (\d+) of", said), said


def read(folder: Path) -> Volume | str:
    """The volume, or the sentence that refuses it."""
    try:
        return read_image(folder)
    except UserError as error:
        return str(error)


def run(kind: str, tmp_path: Path, num_mutations: int, seed: int) -> None:
    folder = tmp_path / "d"
    target = WRITERS[kind](folder)
    whole = target.read_bytes()
    others = [slice_ for file in folder.iterdir() if file != target for slice_ in slices_of(file)]
    volume = read_image(folder)
    assert finding_texts(volume) == ()
    judge(volume, [*others, *slices_of(target)], 0)
    num_slices = SHAPE[0] - len(others)
    rng = np.random.default_rng(seed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    num_read = 0
    for number in range(num_mutations):
        target.write_bytes(damaged(whole, rng))
        try:
            result = read(folder)
            if isinstance(result, str):
                assert str(folder) in result
                assert result.isprintable()
                assert len(result) < len(str(target)) + MAX_SENTENCE
            else:
                num_read += 1
                own = []
                with contextlib.suppress(Exception):
                    own += slices_of(target)
                judge(result, [*others, *own], max(0, num_slices - len(own)))
        except Exception as error:
            raise AssertionError(f"{kind}, seed {seed}, mutation {number}") from error
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * (
        1 if sys.platform == "darwin" else 1024
    )
    assert grown < MAX_GROWTH_BYTES
    assert 0 < num_read < num_mutations


@pytest.mark.parametrize("kind", WRITERS)
def test_some_mutations(kind: str, tmp_path: Path) -> None:
    run(kind, tmp_path, 50, 0)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("kind", WRITERS)
def test_many_mutations(kind: str, seed: int, tmp_path: Path) -> None:
    run(kind, tmp_path, 400, seed)


def test_the_odd_files_that_come_with_pydicom() -> None:
    """Each gives slices, or says what it is, or is refused in a sentence; ITK reads the same HU."""
    sitk = pytest.importorskip("SimpleITK")
    files = [
        file
        for file in (Path(pydicom.__file__).parent / "data" / "test_files").glob("*.dcm")
        if file.is_file()
    ]
    scans: dict[Path, Frame] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for file in files:
            with contextlib.suppress(UserError):
                frames = [frame for frame in read_frames(file) if isinstance(frame, Frame)]
                scans |= {frame.path: frame for frame in frames}
    assert {"CT_small.dcm", "693_J2KI.dcm", "J2K_pixelrep_mismatch.dcm"} <= {
        file.name for file in scans
    }
    for file, frame in scans.items():
        assert np.array_equal(
            read_hu(frame), sitk.GetArrayFromImage(sitk.ReadImage(str(file)))[0]
        ), file
