"""What is read is what other libraries read; what is written is what they and we read again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from io_volumes import DIRECTIONS, load_itk, make_grid, make_hu, make_labels, save_dicom, save_itk

from medseg.io.read import read_image, read_labels
from medseg.io.write import write_image, write_labels

READ = (".nii", ".nii.gz", ".nrrd", ".nhdr", ".mha", ".mhd")
WRITTEN = (".nii", ".nii.gz", ".nrrd", ".mha", ".mhd")


@pytest.mark.parametrize("name", DIRECTIONS)
@pytest.mark.parametrize("suffix", READ)
@pytest.mark.parametrize("compress", [True, False])
def test_reads_what_simpleitk_writes(
    tmp_path: Path, suffix: str, name: str, compress: bool
) -> None:
    grid, image_hu = make_grid(DIRECTIONS[name]), make_hu()
    path = tmp_path / f"scan{suffix}"
    save_itk(path, image_hu, grid, compress)
    volume = read_image(path)
    assert volume.array.dtype == np.int16
    assert np.array_equal(volume.array, image_hu)
    assert volume.grid.is_close(grid, 2e-4)


@pytest.mark.parametrize("name", DIRECTIONS)
@pytest.mark.parametrize("source", READ)
@pytest.mark.parametrize("target", WRITTEN)
def test_labels_come_back_on_the_grid_of_the_scan(
    tmp_path: Path, source: str, target: str, name: str
) -> None:
    save_itk(tmp_path / f"scan{source}", make_hu(), make_grid(DIRECTIONS[name]))
    scan = read_image(tmp_path / f"scan{source}")
    path = tmp_path / f"labels{target}"
    write_labels(path, make_labels(), scan.grid, scan.header)
    again = read_labels(path)
    assert again.array.dtype == np.uint8
    assert np.array_equal(again.array, make_labels())
    assert again.grid.is_close(scan.grid)
    itk_array, itk_grid = load_itk(path)
    assert np.array_equal(itk_array, make_labels())
    assert itk_grid.is_close(load_itk(tmp_path / f"scan{source}")[1])
    assert not [entry.name for entry in tmp_path.iterdir() if "part" in entry.name]


@pytest.mark.parametrize("suffix", WRITTEN)
@pytest.mark.parametrize("dtype", [np.int16, np.float32])
def test_images_survive(tmp_path: Path, suffix: str, dtype: type) -> None:
    image_hu = make_hu().astype(dtype) + dtype(0.25 if dtype is np.float32 else 0)
    grid = make_grid(DIRECTIONS["oblique"])
    write_image(tmp_path / f"scan{suffix}", image_hu, grid)
    again = read_image(tmp_path / f"scan{suffix}")
    assert again.array.dtype == dtype
    assert np.array_equal(again.array, image_hu)
    assert np.array_equal(load_itk(tmp_path / f"scan{suffix}")[0], image_hu)
    assert again.grid.is_close(grid)


@pytest.mark.parametrize("suffix", WRITTEN)
def test_a_view_with_strides_is_written_in_its_own_order(tmp_path: Path, suffix: str) -> None:
    flipped = make_labels(SHAPE_SWAPPED).transpose(2, 0, 1)[:, ::-1]
    grid = make_grid(DIRECTIONS["identity"], flipped.shape)
    write_labels(tmp_path / f"l{suffix}", flipped, grid)
    assert np.array_equal(load_itk(tmp_path / f"l{suffix}")[0], flipped)


SHAPE_SWAPPED = (4, 6, 8)


@pytest.mark.parametrize("suffix", WRITTEN)
def test_volumes_of_several_slabs(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medseg.io.volume.SLAB_BYTES", 150)
    monkeypatch.setattr("medseg.io.volume.PACKED_BYTES", 64)
    image_hu = make_hu((40, 7, 9))
    write_image(tmp_path / f"s{suffix}", image_hu, make_grid(np.eye(3), image_hu.shape))
    assert np.array_equal(read_image(tmp_path / f"s{suffix}").array, image_hu)
    assert np.array_equal(load_itk(tmp_path / f"s{suffix}")[0], image_hu)


@pytest.mark.parametrize("suffix", WRITTEN)
@pytest.mark.parametrize(
    ("dtype", "stored"), [(bool, np.uint8), (np.int64, np.uint8), (np.int16, np.int16)]
)
def test_label_types(tmp_path: Path, suffix: str, dtype: type, stored: type) -> None:
    labels = (make_labels() > 1).astype(dtype)
    write_labels(tmp_path / f"l{suffix}", labels, make_grid(np.eye(3)))
    assert load_itk(tmp_path / f"l{suffix}")[0].dtype == stored
    assert np.array_equal(read_labels(tmp_path / f"l{suffix}").array, labels)


def test_equal_labels_give_equal_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_labels(tmp_path / f"{name}.nii.gz", make_labels(), make_grid(np.eye(3)))
    assert (tmp_path / "a.nii.gz").read_bytes() == (tmp_path / "b.nii.gz").read_bytes()


def test_nibabel_reads_the_same_world_points(tmp_path: Path) -> None:
    nib = pytest.importorskip("nibabel")
    for name, direction in DIRECTIONS.items():
        grid = make_grid(direction)
        path = tmp_path / f"{name}.nii.gz"
        write_labels(path, make_labels(), grid)
        image = nib.load(path)
        assert np.array_equal(np.asarray(image.dataobj).T, make_labels())
        for affine in (image.affine, image.get_qform(), image.get_sform()):
            last = affine @ [8, 6, 4, 1]
            assert np.allclose(
                last[:3] * [-1, -1, 1], grid.index_to_world_xyz_mm((4, 6, 8)), atol=1e-3
            )


@pytest.mark.parametrize("name", ["identity", "ras_stored", "coronal", "oblique"])
def test_dicom_series_in_and_every_format_out(tmp_path: Path, name: str) -> None:
    grid, image_hu = make_grid(DIRECTIONS[name]), make_hu()
    files = save_dicom(tmp_path / "series 1", image_hu, grid)
    for path in (tmp_path / "series 1", files[2]):
        volume = read_image(path)
        assert volume.array.dtype == np.int16
        assert np.array_equal(volume.array, image_hu)
        assert volume.grid.is_close(grid)
    for suffix in WRITTEN:
        write_labels(tmp_path / f"l{suffix}", make_labels(), volume.grid, volume.header)
        assert load_itk(tmp_path / f"l{suffix}")[1].is_close(grid)


def test_real_files_of_other_formats_equal_their_nifti(shared_ct: Path) -> None:
    for case, name in [
        ("elastix_right_lung", "ct.mha"),
        ("cip_ct64", "ct.nrrd"),
        ("lungdx_a0002_b40f", "dicom"),
    ]:
        nifti = read_image(shared_ct / case / "ct.nii.gz")
        other = read_image(shared_ct / case / name)
        assert np.array_equal(nifti.array, other.array), case
        assert nifti.grid.is_close(other.grid), case
        labels = read_labels(shared_ct / case / "lungs.nii.gz")
        assert labels.grid.is_close(other.grid), case


def test_equal_labels_give_equal_files_whenever_and_wherever_they_are_written(
    tmp_path: Path,
) -> None:
    """A gzip stream may hold a name and a time (RFC 1952): checksums would change with both."""
    labels = np.zeros((4, 5, 6), dtype=np.uint8)
    labels[1:3, 2, 3] = 1
    write_labels(tmp_path / "a.nii.gz", labels, make_grid(np.eye(3), labels.shape))
    header = (tmp_path / "a.nii.gz").read_bytes()[:10]
    assert header[:3] == b"\x1f\x8b\x08"
    assert header[3] == 0, "no name"
    assert header[4:8] == bytes(4), "no time"
