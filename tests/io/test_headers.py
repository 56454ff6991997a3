"""Headers of all formats: results lie on their scan's grid; NIfTI keeps sform, qform, unit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from io_volumes import DIRECTIONS, load_itk, make_grid, make_hu, make_labels, save_itk

from medseg.errors import UserError
from medseg.io.read import read_image, read_labels
from medseg.io.write import write_labels

nib = pytest.importorskip("nibabel")

FLIPPED = np.array([[-0.7, 0, 0, 10], [0, 0.8, 0, 20], [0, 0, 2.5, 30], [0, 0, 0, 1.0]])
SHIFTED = FLIPPED + np.array([[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 3], [0, 0, 0, 0]])
TURNED = np.eye(4)
TURNED[:3, :3] = DIRECTIONS["oblique_left_handed"] * [0.7, 0.8, 2.5]
TURNED[:3, 3] = [-100.1, 50.3, -1434.5]
IN_METRES = np.diag([1e-3, 1e-3, 1e-3, 1]) @ FLIPPED
LIFTED = TURNED + np.array([[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 7.5], [0, 0, 0, 0]])
NIFTI_BYTES = [(40, 48), (76, 92), (123, 124), (252, 328)]
"""Bytes of dim[0..3], pixdim[0..3], xyzt_units, qform and sform in a NIfTI-1 header (nifti1.h)."""

NIFTI_CASES: dict[str, dict[str, Any]] = {
    "qform only": {"q": (FLIPPED, 1)},
    "sform only": {"s": (TURNED, 1)},
    "sform only, aligned": {"s": (TURNED, 2)},
    "agreeing": {"q": (TURNED, 1), "s": (TURNED, 1)},
    "disagreeing, sform of the scanner": {"q": (FLIPPED, 1), "s": (SHIFTED, 1)},
    "disagreeing, sform of a template": {"q": (FLIPPED, 1), "s": (SHIFTED, 4)},
    "neither": {},
    "metres": {"q": (IN_METRES, 1), "s": (IN_METRES, 1), "units": 1},
    "no unit": {"q": (FLIPPED, 1), "units": 0},
    "micrometres and milliseconds": {"s": (TURNED, 1), "units": 3 | 16},
}


def save_nifti(
    path: Path,
    array: np.ndarray,
    q: tuple[np.ndarray, int] | None = None,
    s: tuple[np.ndarray, int] | None = None,
    units: int = 2,
    kind: type = nib.Nifti1Image,
    endianness: str = "<",
) -> None:
    """Write with nibabel, qform and sform set apart."""
    header = kind.header_class(endianness=endianness)
    header.set_data_dtype(array.dtype)
    image = kind(array.T, None, header)
    image.header.set_zooms((0.7, 0.8, 2.5) + (1.0,) * (array.ndim - 3))
    image.header["xyzt_units"] = units
    if q is not None:
        image.header.set_qform(*q)
    if s is not None:
        image.header.set_sform(*s)
    image.to_filename(path)


@pytest.mark.parametrize("name", NIFTI_CASES)
def test_nifti_1(tmp_path: Path, name: str) -> None:
    path = tmp_path / "scan.nii"
    save_nifti(path, make_hu(), **NIFTI_CASES[name])
    scan = read_image(path)
    assert np.array_equal(scan.array, make_hu())
    assert scan.grid.is_close(load_itk(path)[1], 2e-3 if "micro" not in name else 2.0), (
        "ITK reads another place"
    )
    for suffix in (".nii", ".nii.gz"):
        write_labels(tmp_path / f"out{suffix}", make_labels(), scan.grid, scan.header)
    old, new = path.read_bytes(), (tmp_path / "out.nii").read_bytes()
    for first, last in NIFTI_BYTES:
        assert old[first:last] == new[first:last], (first, last)
    assert np.array_equal(nib.load(path).affine, nib.load(tmp_path / "out.nii.gz").affine)
    again = read_labels(tmp_path / "out.nii.gz")
    assert again.grid == scan.grid
    assert np.array_equal(again.array, make_labels())
    assert np.array_equal(load_itk(tmp_path / "out.nii")[0], make_labels())
    assert load_itk(tmp_path / "out.nii")[1] == load_itk(path)[1]


@pytest.mark.parametrize("endianness", ["<", ">"])
@pytest.mark.parametrize("kind", [nib.Nifti1Image, nib.Nifti2Image])
def test_nifti_of_either_version_and_byte_order(
    tmp_path: Path, kind: type, endianness: str
) -> None:
    path = tmp_path / "scan.nii.gz"
    save_nifti(path, make_hu(), q=(TURNED, 1), s=(LIFTED, 2), kind=kind, endianness=endianness)
    scan = read_image(path)
    assert np.array_equal(scan.array, make_hu())
    assert scan.array.dtype.isnative
    write_labels(tmp_path / "out.nii.gz", make_labels().astype(np.int16), scan.grid, scan.header)
    old, new = nib.load(path), nib.load(tmp_path / "out.nii.gz")
    assert type(new) is kind
    assert new.header.endianness == old.header.endianness == endianness
    for field in (
        "pixdim",
        "qform_code",
        "sform_code",
        "quatern_b",
        "qoffset_x",
        "srow_x",
        "srow_z",
        "xyzt_units",
    ):
        assert new.header[field].tobytes() == old.header[field].tobytes(), field
    assert np.array_equal(np.asarray(new.dataobj).T, make_labels())


def test_a_nifti_2_file_that_was_copied_as_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "scan.nii"
    save_nifti(path, make_hu(), q=(TURNED, 1), s=(LIFTED, 2), kind=nib.Nifti2Image)
    data = path.read_bytes()
    assert data[4:12] == b"n+2\0\r\n\x1a\n"
    path.write_bytes(data[:8] + b"\n\x1a\n\0" + data[12:])
    with pytest.raises(
        UserError,
        match="the line ends of the NIfTI-2 header were changed, as by a transfer in text mode",
    ):
        read_image(path)


def test_one_frame_is_squeezed(tmp_path: Path) -> None:
    path = tmp_path / "scan.nii"
    save_nifti(path, make_hu()[None], s=(TURNED, 1))
    scan = read_image(path)
    assert np.array_equal(scan.array, make_hu())
    write_labels(tmp_path / "out.nii", make_labels(), scan.grid, scan.header)
    assert nib.load(tmp_path / "out.nii").shape == (9, 7, 5)
    assert np.array_equal(nib.load(tmp_path / "out.nii").affine, nib.load(path).affine)


NRRD_LINES = {
    "ras with units": [
        "space: right-anterior-superior",
        "space directions: (-0.70,0,0) (0,0.8000,0) (0,1e-17,2.50)",
        "space origin: (11.00,  -22.5,33)",
        'space units: "mm" "mm" "mm"',
        "centerings: cell cell cell",
    ],
    "las": [
        "space: LAS",
        "space directions: (0.7,0,0) (0,0.8,0) (0,0,-2.5)",
        "space origin: (1,2,3)",
    ],
    "no space": ["spacings: 0.70 0.80 2.5"],
    "no space, with bounds": ["spacings: 0.70 0.80 2.5", "axis mins: 1 2 3"],
    "scanner": [
        "space dimension: 3",
        "space directions: (0.7,0,0) (0,0.8,0) (0,0,2.5)",
        "space origin: (1,2,3)",
    ],
}


def save_nrrd(
    path: Path, lines: list[str], data: bytes, type_name: str = "short", encoding: str = "raw"
) -> None:
    """Write a NRRD file by hand."""
    head = ["NRRD0004", "# a comment: no field", f"type: {type_name}", "dimension: 3"]
    if lines and lines[0].startswith("space"):
        head.append(lines[0])
    head += [
        "sizes: 9 7 5",
        *[line for line in lines if line not in head],
        "endian: little",
        f"encoding: {encoding}",
    ]
    path.write_bytes("\n".join([*head, "note:=space: nowhere"]).encode() + b"\n\n" + data)


@pytest.mark.parametrize("name", NRRD_LINES)
def test_nrrd(tmp_path: Path, name: str) -> None:
    path = tmp_path / "scan.nrrd"
    save_nrrd(path, NRRD_LINES[name], make_hu().tobytes())
    scan = read_image(path)
    itk_array, itk_grid = load_itk(path)
    assert np.array_equal(scan.array, make_hu())
    assert np.array_equal(itk_array, make_hu())
    assert scan.grid.is_close(itk_grid)
    write_labels(tmp_path / "out.nrrd", make_labels(), scan.grid, scan.header)
    itk_array, again = load_itk(tmp_path / "out.nrrd")
    assert np.array_equal(itk_array, make_labels())
    assert again.is_close(itk_grid)


def test_nrrd_text_voxels_are_left_to_simpleitk(tmp_path: Path) -> None:
    text = "\n".join(" ".join(map(str, row)) for row in make_hu().reshape(-1, 9)) + "\n"
    save_nrrd(tmp_path / "scan.nrrd", NRRD_LINES["las"], text.encode(), encoding="ascii")
    assert np.array_equal(read_image(tmp_path / "scan.nrrd").array, make_hu())


META_LINES = {
    "today": [
        "TransformMatrix = 1 0 0 0 0 1.000 0 -1 0",
        "Offset = -153.8270 -150.352 -1434.5",
        "CenterOfRotation = 1 2 3",
        "AnatomicalOrientation = RAI",
        "ElementSpacing = 1.3660 1.366 2.50",
    ],
    "old names": [
        "Position = -1 2 3.50",
        "Orientation = -1 0 0 0 1 0 0 0 1",
        "ElementSize = 0.7 0.8 2.5",
    ],
    "oldest names": [
        "Origin = -1 2 3.50",
        "Rotation = 0 1 0 1 0 0 0 0 1",
        "ElementSpacing = 0.7 0.8 2.5",
    ],
}


@pytest.mark.parametrize("name", META_LINES)
@pytest.mark.parametrize("suffix", [".mha", ".mhd"])
def test_metaimage(tmp_path: Path, name: str, suffix: str) -> None:
    path = tmp_path / f"scan{suffix}"
    head = [
        "ObjectType = Image",
        "NDims = 3",
        "BinaryData = True",
        "BinaryDataByteOrderMSB = True",
        *META_LINES[name],
    ]
    head += ["DimSize = 9 7 5", "ElementType = MET_SHORT"]
    data = make_hu().astype(">i2").tobytes()
    if suffix == ".mha":
        path.write_bytes("\n".join([*head, "ElementDataFile = LOCAL"]).encode() + b"\n" + data)
    else:
        path.write_text("\n".join([*head, "ElementDataFile = voxels of it.raw"]) + "\n")
        (tmp_path / "voxels of it.raw").write_bytes(data)
    scan = read_image(path)
    itk_array, itk_grid = load_itk(path)
    assert np.array_equal(scan.array, make_hu())
    assert np.array_equal(itk_array, make_hu())
    assert scan.grid.is_close(itk_grid)
    write_labels(tmp_path / f"out a{suffix}", make_labels(), scan.grid, scan.header)
    itk_array, again = load_itk(tmp_path / f"out a{suffix}")
    assert np.array_equal(itk_array, make_labels())
    assert again.is_close(itk_grid)


def test_a_header_of_another_grid_is_refused(tmp_path: Path) -> None:
    save_itk(tmp_path / "scan.nii.gz", make_hu(), make_grid(np.eye(3)))
    scan = read_image(tmp_path / "scan.nii.gz")
    other = scan.grid.reoriented((0, 1, 2), (True, False, False))
    with pytest.raises(ValueError, match="does not belong"):
        write_labels(tmp_path / "out.nii.gz", make_labels(), other, scan.header)
    assert not (tmp_path / "out.nii.gz").exists()


def test_rounded_decimals_in_a_header_move_no_corner(tmp_path: Path) -> None:
    affine = np.eye(4)
    affine[:3, :3] = np.round(DIRECTIONS["oblique"], 4) * [0.7, 0.8, 2.5]
    save_nifti(tmp_path / "scan.nii", make_hu(), s=(affine, 1))
    scan = read_image(tmp_path / "scan.nii")
    want = (nib.load(tmp_path / "scan.nii").affine @ [8, 6, 4, 1])[:3] * [-1, -1, 1]
    write_labels(tmp_path / "out.nrrd", make_labels(), scan.grid, scan.header)
    for grid in (scan.grid, read_labels(tmp_path / "out.nrrd").grid):
        assert np.allclose(grid.index_to_world_xyz_mm((4, 6, 8)), want, atol=1e-3)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.float64])
@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
def test_each_volume_of_a_4d_file_is_read_by_its_number(
    dtype: type, suffix: str, tmp_path: Path
) -> None:
    volumes = (
        np.random.default_rng(0).integers(0, 200, (3, 4, 5, 6)).astype(dtype)
    )  # channel, z, y, x
    nib.save(nib.Nifti1Image(volumes.transpose(3, 2, 1, 0), FLIPPED), tmp_path / f"scan{suffix}")
    for channel, expected in enumerate(volumes):
        volume = read_image(
            tmp_path / f"scan{suffix}", modality="mr", channel=channel, num_channels=3
        )
        np.testing.assert_array_equal(volume.array, expected)
