"""Which of a NIfTI header's placements is used, what is refused, and what the user is told."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from io_volumes import finding_texts, load_itk, make_hu, make_labels, rotation, told

from medseg.io.read import read_image, read_labels
from medseg.io.write import write_labels

STEPS = (0.7, 0.8, 2.5)
PLAIN = np.diag([-0.7, -0.8, 2.5])
TURNED = rotation(0.3, -0.2) @ PLAIN
NAN = float("nan")


def quaternion(matrix: np.ndarray) -> tuple[float, float, float]:
    """b, c, d of a rotation about an axis by less than 180 degrees."""
    real = np.sqrt(1 + np.trace(matrix)) / 2
    lower = (matrix[2, 1] - matrix[1, 2], matrix[0, 2] - matrix[2, 0], matrix[1, 0] - matrix[0, 1])
    return tuple(value / (4 * real) for value in lower)


def save(
    path: Path,
    sform: np.ndarray | None = None,
    qform: tuple[float, float, float] | None = None,
    *,
    sform_code: int = 1,
    pixdim: tuple[float, ...] = (1.0, *STEPS),
    offset: tuple[float, float, float] = (10.0, 20.0, 30.0),
    qoffset: tuple[float, float, float] = (10.0, 20.0, 30.0),
) -> Path:
    """Write a NIfTI-1 file from the standard's byte offsets alone (nifti1.h)."""
    block = bytearray(352)
    struct.pack_into("<i", block, 0, 348)
    struct.pack_into("<8h", block, 40, 3, 9, 7, 5, 1, 1, 1, 1)
    struct.pack_into("<2h", block, 70, 4, 16)
    struct.pack_into(f"<{len(pixdim)}f", block, 76, *pixdim)
    struct.pack_into("<f", block, 108, 352.0)
    struct.pack_into("<B", block, 123, 2)
    if qform is not None:
        struct.pack_into("<h", block, 252, 1)
        struct.pack_into("<6f", block, 256, *qform, *qoffset)
    if sform is not None:
        struct.pack_into("<h", block, 254, sform_code)
        for row in range(3):
            struct.pack_into("<4f", block, 280 + 16 * row, *sform[row], offset[row])
    block[344:348] = b"n+1\0"
    path.write_bytes(bytes(block) + make_hu().tobytes())
    return path


def corners(affine: np.ndarray, offset: tuple[float, ...] = (10.0, 20.0, 30.0)) -> np.ndarray:
    """LPS points of the first and the last voxel."""
    return (np.array([[0, 0, 0], affine @ [8, 6, 4]]) + offset) * [-1, -1, 1]


def ends_of(path: Path) -> np.ndarray:
    """The same points as medseg reads them; the result of a prediction lies there too."""
    scan = read_image(path)
    assert np.array_equal(scan.array, make_hu())
    out = path.with_name("result.nii.gz")
    write_labels(out, make_labels(), scan.grid, scan.header)
    assert read_labels(out).grid == scan.grid
    return scan.grid.index_to_world_xyz_mm([(0, 0, 0), (4, 6, 8)])


def test_sform_and_qform_that_agree_are_not_spoken_of(tmp_path: Path) -> None:
    turn = rotation(0.3, -0.2) @ np.diag([-1.0, -1.0, 1.0])
    path = save(tmp_path / "a.nii", TURNED, quaternion(turn))
    assert finding_texts(read_image(path)) == ()
    assert np.allclose(ends_of(path), corners(TURNED), atol=1e-3)
    assert np.allclose(
        load_itk(path)[1].index_to_world_xyz_mm((4, 6, 8)), corners(TURNED)[1], atol=1e-3
    )


@pytest.mark.parametrize(("sform_code", "taken"), [(1, "sform"), (2, "qform"), (4, "qform")])
def test_of_two_places_the_one_that_itk_takes_wins_with_a_warning(
    tmp_path: Path, sform_code: int, taken: str
) -> None:
    path = save(
        tmp_path / "a.nii",
        np.diag(STEPS),
        (0.0, 0.0, 0.0),
        sform_code=sform_code,
        offset=(17.0, 20.0, 30.0),
    )
    assert finding_texts(read_image(path)) == (
        (
            f"the sform and the qform of the header disagree by up to 10 voxels: the {taken} is "
            "used, as ITK does"
        ),
    )
    place = (17.0 if taken == "sform" else 10.0, 20.0, 30.0)
    assert np.allclose(ends_of(path), corners(np.diag(STEPS), place), atol=1e-3)
    assert np.allclose(
        load_itk(path)[1].index_to_world_xyz_mm((4, 6, 8)),
        corners(np.diag(STEPS), place)[1],
        atol=1e-3,
    )


@pytest.mark.parametrize("sform_code", [1, 2])
@pytest.mark.parametrize("signs", [(-1, 1, 1), (-1, -1, 1), (1, 1, -1)])
def test_two_places_of_opposite_directions_are_refused(
    tmp_path: Path, signs: tuple[int, int, int], sform_code: int
) -> None:
    path = save(
        tmp_path / "a.nii",
        np.diag(np.multiply(STEPS, signs)),
        (0.0, 0.0, 0.0),
        sform_code=sform_code,
    )
    assert told(path) == (
        "a.nii: expected sform and qform of the NIfTI header to agree, but they turn the scan "
        "into opposite directions, so that "
        "its left and right are unknown; set the code of the wrong one (sform_code or "
        "qform_code) to 0."
    )


SHEARED = np.array([[0.7, 0.05, 0], [0, 0.8, 0], [0, 0, 2.5]])
SINGULAR = np.diag([0.7, 0.0, 2.5])
BROKEN = np.diag([0.7, NAN, 2.5])
FAULTS = {
    "is sheared": SHEARED,
    "is singular: an axis has no length": SINGULAR,
    "holds NaN or infinity": BROKEN,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_sform_that_places_nothing_is_refused(tmp_path: Path, fault: str) -> None:
    assert told(save(tmp_path / "a.nii", FAULTS[fault])) == (
        "a.nii: expected axes of positive length at right angles, but the sform of the NIfTI "
        f"header {fault}; repair the header "
        "or export the scan again."
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_an_sform_that_places_nothing_gives_way_to_a_qform(tmp_path: Path, fault: str) -> None:
    path = save(tmp_path / "a.nii", FAULTS[fault], (0.0, 0.0, 0.0))
    assert finding_texts(read_image(path)) == (
        f"the sform of the header {fault}: the qform is used",
    )
    assert np.allclose(ends_of(path), corners(np.diag(STEPS)), atol=1e-3)


QFORM_FAULTS = {
    "holds no rotation": ((0.9, 0.9, 0.0), STEPS),
    "has no positive spacing: pixdim is 0 x 0.8 x 2.5": ((0.0, 0.0, 0.0), (0.0, 0.8, 2.5)),
    "has no positive spacing: pixdim is 0.7 x -0.8 x 2.5": ((0.0, 0.0, 0.0), (0.7, -0.8, 2.5)),
    "holds NaN or infinity": ((0.0, 0.0, 0.0), (0.7, 0.8, NAN)),
}


@pytest.mark.parametrize("fault", QFORM_FAULTS)
def test_a_qform_that_places_nothing_is_refused_or_gives_way(tmp_path: Path, fault: str) -> None:
    turn, steps = QFORM_FAULTS[fault]
    assert told(save(tmp_path / "a.nii", None, turn, pixdim=(1.0, *steps))) == (
        "a.nii: expected axes of positive length at right angles, but the qform of the NIfTI "
        f"header {fault}; repair the header "
        "or export the scan again."
    )
    path = save(tmp_path / "b.nii", np.diag(STEPS), turn, pixdim=(1.0, *steps), sform_code=2)
    assert (
        finding_texts(read_image(path))[0] == f"the qform of the header {fault}: the sform is used"
    )
    assert np.allclose(ends_of(path), corners(np.diag(STEPS)), atol=1e-3)


@pytest.mark.parametrize("steps", [(0.0, 0.8, 2.5), (0.7, -0.8, 2.5), (0.7, 0.8, NAN)])
def test_without_both_places_the_spacing_must_be_right(
    tmp_path: Path, steps: tuple[float, ...]
) -> None:
    text = " x ".join(f"{step:g}" for step in steps)
    assert told(save(tmp_path / "a.nii", pixdim=(1.0, *steps))) == (
        "a.nii: expected a positive spacing on every axis, but the NIfTI header's pixdim is "
        f"{text}; repair the header or export "
        "the scan again."
    )


def test_without_both_places_the_axes_are_assumed_aloud(tmp_path: Path) -> None:
    path = save(tmp_path / "a.nii")
    assert finding_texts(read_image(path)) == (
        (
            "the header has neither sform nor qform: its axes are assumed to be left, posterior, "
            "superior; check the sides"
        ),
    )
    assert np.allclose(ends_of(path), [[0, 0, 0], [8 * 0.7, 6 * 0.8, 4 * 2.5]], atol=1e-3)


def test_a_spacing_that_the_sform_contradicts_is_told(tmp_path: Path) -> None:
    path = save(tmp_path / "a.nii", np.diag(STEPS), pixdim=(1.0, 1.0, 1.0, 1.0))
    assert finding_texts(read_image(path)) == (
        (
            "the header's pixdim is 1 x 1 x 1, but its sform gives a spacing of 0.7 x 0.8 x 2.5: "
            "the sform is used"
        ),
    )
    assert np.allclose(ends_of(path), corners(np.diag(STEPS)), atol=1e-3)


@pytest.mark.parametrize(("qfac", "sign"), [(-1.0, -1), (0.0, 1), (1.0, 1), (NAN, 1)])
def test_only_a_negative_qfac_flips(tmp_path: Path, qfac: float, sign: int) -> None:
    path = save(tmp_path / "a.nii", None, (0.0, 0.0, 0.0), pixdim=(qfac, *STEPS))
    assert finding_texts(read_image(path)) == ()
    assert np.allclose(ends_of(path), corners(np.diag([0.7, 0.8, sign * 2.5])), atol=1e-3)


@pytest.mark.parametrize(("axis", "size"), [(0, 9), (1, 7), (2, 5)])
def test_two_places_differ_by_the_distance_of_their_last_voxels(
    tmp_path: Path, axis: int, size: int
) -> None:
    """The steps of one axis differ by a tenth, which adds up along it."""
    steps = list(STEPS)
    steps[axis] *= 1.1
    path = save(tmp_path / "a.nii", PLAIN, (0.0, 0.0, 1.0), pixdim=(1.0, *steps))
    said = f"disagree by up to {0.1 * (size - 1):.3g} voxels: the sform is used"
    assert any(said in text for text in finding_texts(read_image(path)))


@pytest.mark.parametrize("qfac", [-1.0, 1.0])
def test_a_negative_qfac_flips_the_third_axis_of_a_turned_scan(tmp_path: Path, qfac: float) -> None:
    """The axis of the voxels, which is no axis of the world."""
    turn = rotation(0.3, -0.2) @ np.diag([-1.0, -1.0, 1.0])
    path = save(tmp_path / "a.nii", None, quaternion(turn), pixdim=(qfac, *STEPS))
    want = corners(turn * [0.7, 0.8, qfac * 2.5])
    assert np.allclose(ends_of(path), want, atol=1e-3)
    assert np.allclose(load_itk(path)[1].index_to_world_xyz_mm((4, 6, 8)), want[1], atol=1e-3)


@pytest.mark.parametrize("degrees", [179.9, 180.0])
def test_a_rotation_by_about_half_a_turn(tmp_path: Path, degrees: float) -> None:
    angle = np.deg2rad(degrees)
    path = save(tmp_path / "a.nii", None, (0.0, 0.0, float(np.sin(angle / 2))))
    want = corners(rotation(angle, 0.0) * STEPS)
    assert np.allclose(ends_of(path), want, atol=0.005), "half a mm over 500 mm at most"
    assert np.allclose(load_itk(path)[1].index_to_world_xyz_mm((4, 6, 8)), want[1], atol=0.005)


@pytest.mark.parametrize("scale", [1e-30, 1e-7])
def test_voxels_smaller_than_any_scanner_resolves(tmp_path: Path, scale: float) -> None:
    path = save(tmp_path / "a.nii", pixdim=(1.0, *(scale * step for step in STEPS)))
    assert told(path).startswith(
        "a.nii: expected voxels of at least 0.0001 mm, but the header gives a spacing of "
    )
