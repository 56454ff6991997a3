"""Small volumes whose sizes, spacings and axes all differ, written by other libraries than ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from medseg.geometry.grid import VoxelGrid
from medseg.io.volume import Volume

SHAPE = (5, 7, 9)


def rotation(angle_z: float, angle_x: float) -> np.ndarray:
    """A rotation about z, then about x, in radians."""
    cz, sz, cx, sx = np.cos(angle_z), np.sin(angle_z), np.cos(angle_x), np.sin(angle_x)
    about_z = np.array([[cz, -sz, 0], [sz, cz, 0], [0, 0, 1]])
    about_x = np.array([[1, 0, 0], [0, cx, -sx], [0, sx, cx]])
    return np.asarray(about_x @ about_z)


DIRECTIONS = {
    "identity": np.eye(3),
    "ras_stored": np.diag([-1.0, -1.0, 1.0]),
    "left_handed": np.diag([-1.0, 1.0, 1.0]),
    "feet_first": np.diag([1.0, 1.0, -1.0]),
    "coronal": np.array([[1.0, 0, 0], [0, 0, 1.0], [0, -1.0, 0]]),
    "oblique": rotation(0.4, -0.25),
    "oblique_left_handed": rotation(-0.7, 0.3) @ np.diag([1.0, 1.0, -1.0]),
}


def make_grid(direction: np.ndarray, shape: tuple[int, int, int] = SHAPE) -> VoxelGrid:
    """A grid with anisotropic spacing and an origin off zero."""
    return VoxelGrid(shape, (2.5, 0.8, 0.6484375), (-120.25, 33.5, -1434.5), direction.tolist())


def make_hu(shape: tuple[int, int, int] = SHAPE, seed: int = 0) -> np.ndarray:
    """HU (D, H, W) int16 without any symmetry."""
    return np.random.default_rng(seed).integers(-1024, 3071, shape, dtype=np.int16)


def make_labels(shape: tuple[int, int, int] = SHAPE) -> np.ndarray:
    """Labels 0, 1, 2 (D, H, W) uint8."""
    return np.random.default_rng(1).integers(0, 3, shape, dtype=np.uint8)


def save_itk(path: Path, array: np.ndarray, grid: VoxelGrid, compress: bool = True) -> None:
    """Write with SimpleITK."""
    import SimpleITK as sitk  # noqa: N813

    image = sitk.GetImageFromArray(array)
    image.SetSpacing(grid.spacing_mm[::-1])
    image.SetOrigin(grid.origin_xyz_mm)
    image.SetDirection(np.array(grid.direction).ravel().tolist())
    sitk.WriteImage(image, str(path), compress)


def load_itk(path: Path) -> tuple[np.ndarray, VoxelGrid]:
    """Read with SimpleITK."""
    import SimpleITK as sitk  # noqa: N813

    image = sitk.ReadImage(str(path))
    array = sitk.GetArrayFromImage(image)
    direction = np.array(image.GetDirection()).reshape(3, 3)
    return array, VoxelGrid(
        array.shape, image.GetSpacing()[::-1], image.GetOrigin(), direction.tolist()
    )


def save_dicom(
    folder: Path, array: np.ndarray, grid: VoxelGrid, *, uid: str = "1.2.3.4", modality: str = "CT"
) -> list[Path]:
    """Write a series with SimpleITK, a file per slice, as HU + 1024; names in no spatial order."""
    import SimpleITK as sitk  # noqa: N813

    folder.mkdir(parents=True, exist_ok=True)
    writer = sitk.ImageFileWriter()
    writer.KeepOriginalImageUIDOn()
    direction = np.array(grid.direction)
    files = []
    for index, pixels in enumerate(array):
        image = sitk.GetImageFromArray(pixels)
        image.SetSpacing((grid.spacing_mm[2], grid.spacing_mm[1]))
        point = grid.index_to_world_xyz_mm((index, 0, 0))
        tags = {
            "0008|0060": modality,
            "0008|0018": f"{uid}.{index + 1}",
            "0008|103e": f"series {uid}",
            "0020|000d": "1.2.3",
            "0020|000e": uid,
            "0020|0032": "\\".join(f"{value:.6f}" for value in point),
            "0020|0037": "\\".join(
                f"{value:.9f}" for value in [*direction[:, 0], *direction[:, 1]]
            ),
            "0028|1052": "-1024",
            "0028|1053": "1",
        }
        for key, value in tags.items():
            image.SetMetaData(key, value)
        files.append(folder / f"{(index * 3) % len(array)}{index}_{uid}.dcm")
        writer.SetFileName(str(files[-1]))
        writer.Execute(image)
    return files


def told(path: Path, read: Callable[[Path], object] | None = None) -> str:
    """The sentence with which a file is refused, its folder left out."""
    import pytest

    from medseg.errors import UserError
    from medseg.io.read import read_image

    with pytest.raises(UserError) as caught:
        (read or read_image)(path)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(f"{path.parent}/", "")


def finding_texts(volume: Volume) -> tuple[str, ...]:
    """List the sentences of the findings of a reader."""
    return tuple(map(str, volume.findings))
