"""Case viewer: the data in the page, its size, and that nothing in it refers to another file."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path

import nibabel
import numpy as np
import pytest

from medseg.geometry.grid import VoxelGrid
from medseg.io.label_table import Structure
from medseg.report import viewer
from medseg.report.viewer import ViewerWords, pack_volumes, write_viewer

TABLE = [Structure("left_lung", 1, "#38bdf8"), Structure("</script>", 2, "#fb923c")]
OBLIQUE = ((0.96, -0.28, 0.0), (0.28, 0.96, 0.0), (0.0, 0.0, 1.0))
GRID = VoxelGrid((7, 21, 22), (2.5, 0.7, 0.7), (-11.0, 20.0, 300.0), OBLIQUE)
WORDS = ViewerWords(
    "Doe, <b>John",
    "warnings",
    ["look & see"],
    ["a topogram was <left> out"],
    ["ml"],
    {1: ["12"], 2: ["0"]},
    {"left_lung": 0.8},
    0.85,
    "Dice at least 0.61 (left lung) in 9 of 10 patients (26 patients)",
    {"worst": [1.0, 2.0, 3.0]},
)


def volumes_of(page: str) -> dict[str, nibabel.Nifti1Image]:
    """Volumes of a page, decoded with nibabel."""
    found = re.findall(
        r'<script type="application/octet-stream" id="volume-(\w+)">([^<]*)</script>', page
    )
    return {
        name: nibabel.Nifti1Image.from_bytes(gzip.decompress(base64.b64decode(text)))
        for name, text in found
    }


@pytest.mark.parametrize("identity", ["", "patient <i>P7, 2023-02-03"])
def test_patient_and_date_are_told_where_they_are_known(tmp_path: Path, identity: str) -> None:
    words = replace(WORDS, identity=identity)
    write_viewer(tmp_path / "a.html", pack_volumes(*arrays(), GRID), words, TABLE)
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert ('<p class="identity' in page) == bool(identity)
    assert identity.replace("<i>", "&lt;i&gt;") in page


def arrays() -> tuple[np.ndarray, np.ndarray]:
    noise = np.random.default_rng(0)
    return noise.integers(-1200, 1300, GRID.shape).astype(np.int16), noise.integers(
        0, 3, GRID.shape
    ).astype(np.uint8)


def test_the_page_decodes_to_the_case(tmp_path: Path) -> None:
    image, labels = arrays()
    reference = labels.copy()
    reference[0, :4] = [[0], [1], [2], [0]]
    write_viewer(
        tmp_path / "a.html",
        pack_volumes(image, labels, GRID, reference),
        WORDS,
        TABLE,
        (-1000.0, 400.0),
    )
    found = volumes_of((tmp_path / "a.html").read_text(encoding="utf-8"))
    assert set(found) == {"image", "labels", "differences"}
    # 1.5 mm: pairs of voxels in plane, the last column alone; slices of 2.5 mm as they are.
    assert found["image"].shape == (11, 11, 7)
    # The labels keep the resolution of the scan.
    assert (labels == np.asarray(found["labels"].dataobj).T).all()
    differences = np.asarray(found["differences"].dataobj).T
    kinds = np.where(labels == 0, 1, np.where(reference == 0, 2, 3))
    assert (differences == np.where(labels == reference, 0, kinds)).all()
    clipped = np.pad(image.astype(float), ((0, 0), (0, 1), (0, 0)), constant_values=np.nan).reshape(
        7, 11, 2, 11, 2
    )
    expected = np.clip(np.nanmean(clipped, axis=(2, 4)), -1024, 1024)
    assert np.abs(np.asarray(found["image"].dataobj).T - expected).max() <= 2048 / 255 / 2 + 1e-3, (
        "half a grey value"
    )
    # The centre of the first bin lies between the first two voxels of rows and columns.
    lps = GRID.index_to_world_xyz_mm([3.0, 2.5, 4.5])
    assert np.allclose((found["image"].affine @ [2, 1, 3, 1])[:3], lps * [-1, -1, 1], atol=1e-3)


def test_words_are_escaped_and_the_page_needs_nothing_else(tmp_path: Path) -> None:
    write_viewer(tmp_path / "a.html", pack_volumes(*arrays(), GRID), WORDS, TABLE)
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "Doe, &lt;b&gt;John" in page
    assert "look &amp; see" in page
    assert "a topogram was &lt;left&gt; out" in page
    data = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])
    assert data["labels"][1]["name"] == "</script>"
    assert data["places"] == [{"name": "worst", "mm": [-1.0, -2.0, 3.0]}]
    assert data["differences"] == []
    assert "default-src 'none'" in page
    assert not re.search(r'(src|href)="(?!data:)', page.split("<script", 1)[0])


@pytest.mark.parametrize("max_mb", [4.0, 5.0, 12.0])
def test_the_page_keeps_its_size(tmp_path: Path, max_mb: float) -> None:
    """Noise, which does not compress: the worst case."""
    shape = (120, 160, 160)
    grid = VoxelGrid(shape, (1.5, 1.5, 1.5))
    image = np.random.default_rng(0).integers(-1024, 1024, shape).astype(np.int16)
    volumes = pack_volumes(image, np.zeros(shape, np.uint8), grid, max_mb=max_mb)
    write_viewer(tmp_path / "a.html", volumes, WORDS, TABLE)
    size = (tmp_path / "a.html").stat().st_size
    assert size <= min(volumes.page_bytes, max_mb * 1e6)
    assert size > 0.35 * max_mb * 1e6, "no coarser than it must be"


def test_labels_lie_in_a_box_around_them_on_the_oriented_scan(tmp_path: Path) -> None:
    """Stored feet down and from left to right, as many NIfTI files are."""
    image, labels = np.full(GRID.shape, -1000, np.int16), np.zeros(GRID.shape, np.uint8)
    labels[1, 4:9, 3:6], labels[5, 6, 20] = 1, 2
    direction = tuple((-x, y, -z) for x, y, z in OBLIQUE)
    grid = VoxelGrid(GRID.shape, GRID.spacing_mm, GRID.origin_xyz_mm, direction)
    packed = pack_volumes(image, labels, grid)
    geometry = packed.geometry()
    assert geometry["shape"] == [7, 21, 22]
    # z and x are reversed: the last labelled voxel comes first.
    assert geometry["labels"] == {"start": (1, 4, 1), "step": 1, "shape": (5, 5, 18)}
    assert geometry["padded_shape"] == [7, 22, 22]
    stored = nibabel.Nifti1Image.from_bytes(gzip.decompress(packed.labels))
    values = np.asarray(stored.dataobj).T
    assert np.array_equal(values, labels[::-1, :, ::-1][1:6, 4:9, 1:19])
    world = grid.index_to_world_xyz_mm([5, 4, 20]) * [-1, -1, 1]
    assert np.allclose(stored.affine[:3, 3], world, atol=1e-3)


def test_a_scan_without_labels_has_an_empty_box() -> None:
    packed = pack_volumes(np.zeros(GRID.shape, np.int16), np.zeros(GRID.shape, np.uint8), GRID)
    assert packed.geometry()["labels"] == {"start": (0, 0, 0), "step": 1, "shape": (1, 1, 1)}


def test_labels_that_would_fill_the_page_are_thinned_out(tmp_path: Path) -> None:
    shape = (60, 160, 160)
    labels = np.random.default_rng(0).integers(0, 200, shape).astype(np.uint8)
    image = np.zeros(shape, np.int16)
    packed = pack_volumes(image, labels, VoxelGrid(shape, (1.0, 1.0, 1.0)), max_mb=3.0)
    assert packed.label_box.step > 1
    assert packed.page_bytes <= 3e6
    write_viewer(tmp_path / "a.html", packed, WORDS, TABLE)
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert f"one in {packed.label_box.step} voxels of the scan along each axis" in page


def test_values_that_are_not_hu_are_drawn_by_their_percentiles() -> None:
    image = np.random.default_rng(0).normal(5000, 10, GRID.shape).astype(np.float32)
    volumes = pack_volumes(image, np.zeros(GRID.shape, np.uint8), GRID, is_ct=False)
    stored = nibabel.Nifti1Image.from_bytes(gzip.decompress(volumes.image))
    assert np.ptp(np.asarray(stored.dataobj.get_unscaled()).astype(int)) > 100


def test_niivue_is_the_published_one_with_its_licence() -> None:
    folder = Path(viewer.__file__).parent / "viewer_page"
    expected, name = (folder / "SHA256SUMS").read_text(encoding="utf-8").split()
    assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == expected
    assert "</script" not in (folder / name).read_text(encoding="utf-8")
    licence = (folder / "niivue.LICENSE.txt").read_text(encoding="utf-8")
    assert "BSD 2-Clause License" in licence
    assert "\ngl-matrix\n" in licence
