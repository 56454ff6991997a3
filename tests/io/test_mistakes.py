"""Bad files and users' mistakes give one sentence with the file; failed writes lose nothing."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from io_volumes import load_itk, make_grid, make_hu, make_labels, save_itk, told

from medseg.errors import UserError
from medseg.geometry.grid import VoxelGrid
from medseg.io.read import read_image
from medseg.io.write import write_image, write_labels

sitk = pytest.importorskip("SimpleITK")
nib = pytest.importorskip("nibabel")
SUFFIXES = (".nii", ".nii.gz", ".nrrd", ".mha")


FORMATS = "expected .nii.gz, .nii, .nrrd, .nhdr, .mha, .mhd or a DICOM series, got a"


def test_missing_and_unknown_files(tmp_path: Path) -> None:
    assert (
        told(tmp_path / "none.nii.gz")
        == "none.nii.gz: this file or folder does not exist; check the path."
    )
    (tmp_path / "scan.img").write_bytes(b"nothing")
    assert told(tmp_path / "scan.img") == f"scan.img: {FORMATS} file of another kind."
    (tmp_path / "scan.nii").mkdir()
    assert told(tmp_path / "scan.nii") == f"scan.nii: {FORMATS} folder without DICOM files."
    save_itk(tmp_path / "scan.mhd", make_hu(), make_grid(np.eye(3)), compress=False)
    (tmp_path / "scan.raw").unlink()
    assert told(tmp_path / "scan.mhd") == (
        "scan.mhd: its voxels should be in 'scan.raw', which does not exist; copy both files."
    )
    (tmp_path / "scan.nrrd").symlink_to(tmp_path / "nowhere.nrrd")
    assert (
        told(tmp_path / "scan.nrrd")
        == "scan.nrrd: this file or folder does not exist; check the path."
    )


SHAPE = (20, 21, 22)
CUT = "the file cannot be read: its compressed voxels end too early; copy or export it again."
SHORT = "it is truncated or damaged: copy or export it again."


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("part", [0.0, 0.001, 0.3, 0.9, 0.999, "all but one byte"])
def test_truncated_files(tmp_path: Path, suffix: str, part: float | str, compress: bool) -> None:
    path = tmp_path / f"scan{suffix}"
    save_itk(path, make_hu(SHAPE), make_grid(np.eye(3), SHAPE), compress)
    whole = path.read_bytes()
    path.write_bytes(
        whole[: len(whole) - 1 if isinstance(part, str) else int(part * (len(whole) - 16))]
    )
    sentence = told(path)
    if isinstance(part, float) and part < 0.01:
        starts = (
            "expected a",
            "the file cannot be read: its compressed voxels end too early",
            "expected the field",
        )
        assert sentence.removeprefix(f"scan{suffix}: ").startswith(starts)
    elif (compress and suffix != ".nii") or suffix == ".nii.gz":
        assert sentence == f"scan{suffix}: {CUT}"
    else:
        held = len(path.read_bytes()) - (len(whole) - 18480)
        assert sentence == (
            f"scan{suffix}: expected 18480 bytes of voxels (22 x 21 x 20 of 2 bytes), but the "
            f"file holds {held}; {SHORT}"
        )


@pytest.mark.parametrize("suffix", [".nii.gz", ".mha", ".nrrd"])
def test_a_flipped_byte_is_found_by_the_checksum(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"scan{suffix}"
    save_itk(path, make_hu(SHAPE), make_grid(np.eye(3), SHAPE))
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) * 2 // 3] ^= 0x40
    path.write_bytes(damaged)
    sentence = told(path)
    assert sentence.startswith(
        f"scan{suffix}: the file cannot be read: its compressed voxels are damaged: "
    )
    assert sentence.endswith("; copy or export it again.")


def with_size(path: Path, size: tuple[int, int, int]) -> None:
    """Write a file whose header promises another size than it holds; its steps are 0.1 mm."""
    suffix = "".join(path.suffixes)
    save_itk(path, make_hu(), VoxelGrid((5, 7, 9), (0.1, 0.1, 0.1)), compress=suffix != ".nii")
    data = path.read_bytes()
    if "nii" in suffix:
        raw = bytearray(gzip.decompress(data) if suffix == ".nii.gz" else data)
        raw[42:48] = np.array(size, "<i2").tobytes()
        path.write_bytes(gzip.compress(raw) if suffix == ".nii.gz" else raw)
    else:
        path.write_bytes(data.replace(b"9 7 5", " ".join(map(str, size)).encode()))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_header_of_gigabytes_asks_for_no_memory(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"scan{suffix}"
    with_size(path, (1400, 1500, 1200))
    sentence = told(path)
    assert sentence.startswith(
        f"scan{suffix}: expected 5040000000 bytes of voxels (1400 x 1500 x 1200 of 2 bytes), "
        "but the file "
    )
    assert sentence.endswith(f"; {SHORT}")


@pytest.mark.parametrize("suffix", [".nii.gz", ".nrrd", ".mha"])
def test_what_a_packed_file_could_hold_is_counted_before_memory_is_asked_for(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"scan{suffix}"
    # The 1 MB of zeros are packed to a thousandth: the file might hold the 400 MB that its header
    # promises.
    with_size(path, (600, 600, 600))
    raw = gzip.decompress(path.read_bytes()) if suffix == ".nii.gz" else path.read_bytes()
    zeros = bytes(10**6)
    if suffix == ".nii.gz":
        path.write_bytes(gzip.compress(raw[:352] + zeros))
    else:
        head = (
            raw[: raw.index(b"LOCAL\n") + 6] if suffix == ".mha" else raw[: raw.index(b"\n\n") + 2]
        )
        path.write_bytes(head + (zlib.compress if suffix == ".mha" else gzip.compress)(zeros))
    with path.open("ab") as file:
        file.truncate(path.stat().st_size + 420_000)  # zeros after the end of the stream
    monkeypatch.setattr("medseg.io.volume.SURE_BYTES", 2**20)
    tracemalloc.start()
    sentence = told(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sentence == f"scan{suffix}: expected 600 slices, but the file ends in slice 2; {SHORT}"
    assert peak < 2**22
    # Where it is true, the promise is kept.
    save_itk(path, np.zeros((100, 200, 300), np.int16), make_grid(np.eye(3), (100, 200, 300)))
    assert read_image(path).array.shape == (100, 200, 300)


@pytest.mark.parametrize("suffix", [".nii.gz", ".nrrd", ".mha"])
def test_a_packed_stream_that_never_ends_is_left_early(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"scan{suffix}"
    save_itk(path, np.zeros((50, 400, 400), np.int16), make_grid(np.eye(3), (50, 400, 400)))
    data = path.read_bytes()
    if suffix == ".nii.gz":
        raw = bytearray(gzip.decompress(data))
        raw[42:48] = np.array((9, 7, 5), "<i2").tobytes()
        path.write_bytes(gzip.compress(raw))
    else:
        path.write_bytes(data.replace(b"400 400 50", b"9 7 5"))
    tracemalloc.start()
    sentence = told(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sentence == (
        f"scan{suffix}: expected 630 bytes of voxels (9 x 7 x 5 of 2 bytes), but the file "
        "holds more; its header belongs to other "
        "voxels: export it again."
    )
    assert peak < 2**22


def test_a_scan_larger_than_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_itk(tmp_path / "scan.nii.gz", make_hu(), make_grid(np.eye(3)))
    monkeypatch.setattr("medseg.io.volume.memory_bytes", lambda: 600)
    assert told(tmp_path / "scan.nii.gz") == (
        "scan.nii.gz: its 9 x 7 x 5 voxels need 0.0 GiB, but this machine has 0.0 GiB of "
        "memory; crop or resample the scan first."
    )


HTML = b"<html>404 not found</html>\n" * 50
OTHER_CONTENT = {
    ".nii": "expected a NIfTI file, but it does not start with a NIfTI header; check the file.",
    ".nii.gz": "expected a NIfTI file, but it does not start with a NIfTI header; check the file.",
    ".nrrd": (
        "expected a NRRD file, but it does not start with 'NRRD' and a version up to 5; check the "
        "file."
    ),
    ".mha": (
        "expected a MetaImage file, but its header does not say where the voxels are "
        "(ElementDataFile); check the file."
    ),
}


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("content", [HTML, b"", b"\n", bytes(1000)])
def test_content_of_another_format(tmp_path: Path, suffix: str, content: bytes) -> None:
    (tmp_path / f"scan{suffix}").write_bytes(content)
    line = "expected a MetaImage file with a name, '=' and a value on each line of its header, got "
    sentence = told(tmp_path / f"scan{suffix}")
    is_line = suffix == ".mha" and content.strip()
    assert (
        sentence.startswith(f"scan{suffix}: {line}")
        if is_line
        else sentence == f"scan{suffix}: {OTHER_CONTENT[suffix]}"
    )


def test_a_nifti_header_of_an_old_pair(tmp_path: Path) -> None:
    save_itk(tmp_path / "a.nii", make_hu(), make_grid(np.eye(3)))
    data = bytearray((tmp_path / "a.nii").read_bytes())
    data[344:348] = b"ni1\0"
    (tmp_path / "a.nii").write_bytes(data)
    assert told(tmp_path / "a.nii") == (
        "a.nii: expected a NIfTI file that holds its voxels (n+1 or n+2), but its magic is "
        "b'ni1'; convert an ANALYZE or .hdr/.img "
        "pair first."
    )


def test_gzip_is_recognised_by_content(tmp_path: Path) -> None:
    save_itk(tmp_path / "scan.nii", make_hu(), make_grid(np.eye(3)), compress=False)
    data = (tmp_path / "scan.nii").read_bytes()
    (tmp_path / "plain.nii.gz").write_bytes(data)
    (tmp_path / "packed.nii").write_bytes(gzip.compress(data[:1000]) + gzip.compress(data[1000:]))
    for name in ("plain.nii.gz", "packed.nii"):
        assert np.array_equal(read_image(tmp_path / name).array, make_hu())


ONE_VOLUME = "expected one 3D volume, but the file holds {} values; give one volume per file."
AXES = "expected {} in the header field '{}', got '{}'; repair the header or export the scan again."
NOT_ONE_GREY_VOLUME = {
    "2d, .nii": ONE_VOLUME.format("9 x 7"),
    "2d, .nrrd": AXES.format("3 to 5 axes", "dimension", 2),
    "2d, .mha": AXES.format("3 or 4 axes", "NDims", 2),
    "4d": ONE_VOLUME.format("9 x 7 x 5 x 2"),
    "colour, .nii": (
        "expected one number per voxel, but the file holds 3 (vectors); export grey values."
    ),
    "colour, .nrrd": "expected one number per voxel, got 3; export grey values.",
    "colour, .mha": AXES.format("one number per voxel", "ElementNumberOfChannels", 3),
    "vector, .nii": (
        "expected one number per voxel, but the file holds 2 (vectors); export grey values."
    ),
    "vector, .nrrd": "expected one number per voxel, got 2; export grey values.",
    "vector, .mha": AXES.format("one number per voxel", "ElementNumberOfChannels", 2),
}


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("kind", ["2d", "4d", "colour", "vector"])
def test_not_one_grey_volume(tmp_path: Path, suffix: str, kind: str) -> None:
    path = tmp_path / f"scan{suffix}"
    shape = {"2d": (7, 9), "4d": (2, 5, 7, 9), "colour": (5, 7, 9, 3), "vector": (5, 7, 9, 2)}[kind]
    is_vector = kind in ("colour", "vector")
    image = sitk.GetImageFromArray(
        np.zeros(shape, np.uint8 if kind == "colour" else np.int16), isVector=is_vector
    )
    sitk.WriteImage(image, str(path))
    key = kind if kind == "4d" else f"{kind}, {suffix.removesuffix('.gz')}"
    assert told(path) == f"scan{suffix}: {NOT_ONE_GREY_VOLUME[key]}"


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("RGB", [("R", "u1"), ("G", "u1"), ("B", "u1")]), ("complex64", np.complex64)],
)
def test_nifti_colours_and_complex_numbers(tmp_path: Path, name: str, dtype: Any) -> None:
    nib.Nifti1Image(np.zeros((9, 7, 5), dtype), np.eye(4)).to_filename(tmp_path / "a.nii")
    assert told(tmp_path / "a.nii") == (
        f"a.nii: expected one number per voxel, but the NIfTI header says {name} (colours, "
        "complex or very long numbers); export the "
        "scan as grey values."
    )


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_one_frame_of_four_axes_is_a_volume(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"scan{suffix}"
    image = sitk.GetImageFromArray(make_hu()[None], isVector=False)
    image.SetSpacing((0.7, 0.8, 2.5, 1.0))
    image.SetOrigin((1.0, 2.0, 3.0, 0.0))
    sitk.WriteImage(image, str(path))
    scan = read_image(path)
    assert np.array_equal(scan.array, make_hu())
    ends = scan.grid.index_to_world_xyz_mm([(0, 0, 0), (4, 6, 8)])
    assert np.allclose(ends, [[1, 2, 3], [6.6, 6.8, 13]], atol=1e-5)
    write_labels(tmp_path / f"result{suffix}", make_labels(), scan.grid, scan.header)
    assert load_itk(tmp_path / f"result{suffix}")[1].is_close(scan.grid)


def test_wrong_arguments_of_a_write(tmp_path: Path) -> None:
    grid = make_grid(np.eye(3))
    for name in ("labels.png", "labels.nhdr", "labels", ".nii.gz"):
        with pytest.raises(UserError, match="output name"):
            write_labels(tmp_path / name, make_labels(), grid)
    with pytest.raises(ValueError, match="differ in shape"):
        write_labels(tmp_path / "l.nii", make_labels()[1:], grid)
    with pytest.raises(ValueError, match="whole numbers"):
        write_labels(tmp_path / "l.nii", make_labels().astype(float), grid)
    with pytest.raises(ValueError, match="int16 or float32"):
        write_image(tmp_path / "l.nii", make_hu().astype(float), grid)
    assert not list(tmp_path.iterdir())
