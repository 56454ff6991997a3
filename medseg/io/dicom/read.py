"""Read one CT series of DICOM files, slice by slice: no second copy of the volume is ever made."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from pydicom import config

from medseg.io.dicom.frames import UNKNOWN_SERIES, Frame, Image, Unreadable, read_frames
from medseg.io.dicom.pixels import PixelReader, is_whole
from medseg.io.dicom.series import choose_stack
from medseg.io.dicom.stack import Plan, make_plan
from medseg.io.inputs import DICOM_SUFFIXES, dicom_files, is_dicomdir
from medseg.io.lazy import LazyVolume
from medseg.io.volume import AIR_HU


@contextmanager
def _lenient() -> Iterator[None]:
    """Let pydicom read values that break the standard's form: what we need of them we check ourselves."""
    with config.disable_value_validation(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _looks(path: Path) -> str:
    """What names of slices share: a suffix of DICOM, else all but their numbers, which may have letters for digits.

    Example:
        >>> _looks(Path("IM.0012")), _looks(Path("IM.00001Z")), _looks(Path("1.dcm"))
        ('im.#', 'im.#', '.dcm')
    """
    name = path.name.lower()
    return next(filter(name.endswith, DICOM_SUFFIXES), "") or re.sub(r"[0-9a-f]*[0-9][0-9a-z]*", "#", name)


def _broken_copies(files: list[Path], images: list[Image]) -> Iterator[Unreadable]:
    """Find files that are named like the slices beside them and are no DICOM, such as copies that never got a byte."""
    names: dict[Path, set[str]] = {}
    for image in images:
        if isinstance(image, Frame):
            names.setdefault(image.path.parent, set()).add(_looks(image.path))
    known = set(files)
    for folder in names:
        for entry in sorted(folder.iterdir()):
            is_hidden = entry.name.startswith(".")
            if _looks(entry) in names[folder] and entry not in known and not is_hidden and not entry.is_dir():
                num_bytes = entry.stat().st_size if entry.is_file() else 0
                says = (
                    f"expected a slice, as its name is like those of the slices beside it, but its {num_bytes} bytes are no DICOM; "
                    "copy it again or remove it."
                )
                yield Unreadable(entry, UNKNOWN_SERIES, says)


def open_dicom(path: Path, series: str | None = None) -> LazyVolume:
    """Read the headers of a CT series.

    Args:
        path: Folder, searched to its bottom; a DICOMDIR, which stands for its folder; or a file of a series, which stands for
            the series' files beside it.
        series: Series Instance UID or Series Number, with `/<part>` for a part of a series; None for the only one.

    Raises:
        UserError: If it is not exactly one regular stack of CT slices.
    """
    is_folder = path.is_dir() or is_dicomdir(path)
    folder = path.parent if path.is_file() else path
    with _lenient():
        images: list[Image] = []
        files = list(dicom_files(folder, is_deep=is_folder))
        for file in files:
            images += read_frames(file)
        images += _broken_copies(files, images)
        stack, remarks = choose_stack(path, images, series, None if is_folder else path)
        plan = make_plan(path, stack, PixelReader().hu)
    remarks += dict.fromkeys(remark for frame in plan.frames for remark in frame.remarks)
    dtype = np.dtype(np.int32 if all(is_whole(frame) for frame in plan.frames) else np.float32)
    return LazyVolume(path, plan.grid, dtype, SliceReader(plan, dtype).slabs, remarks=(*remarks, *plan.remarks))


class SliceReader:
    """The voxels of a planned volume, made when they are asked for."""

    def __init__(self, plan: Plan, dtype: np.dtype) -> None:
        self._plan = plan
        self._dtype = dtype
        self._reader = PixelReader()
        self._cached: dict[int, np.ndarray] = {}

    def slabs(self) -> Iterator[np.ndarray]:
        """Yield one slice (1, H, W) after the other."""
        for below, weight in self._plan.sources:
            with _lenient():
                values = self._slice(below, weight)
            yield values.astype(self._dtype)[None]

    def _slice(self, below: int, weight: float) -> np.ndarray:
        if not self._plan.is_interpolated:
            return self._reader.hu(self._plan.frames[below])
        values = self._placed(below)
        if weight:
            values = values + np.float32(weight) * (self._placed(below + 1) - values)
        # HU stay whole numbers where the slices have them.
        return np.rint(values) if self._dtype.kind == "i" else values

    def _placed(self, index: int) -> np.ndarray:
        """One slice of the stack on the grid's pixels; the last two are kept, for the slices between them."""
        if index not in self._cached:
            self._cached = {known: values for known, values in self._cached.items() if known == index - 1}
            # Padding far below air would bleed into its neighbours.
            values = np.maximum(self._reader.hu(self._plan.frames[index]), AIR_HU).astype(np.float32)
            if self._plan.shifts_px is not None:
                values = shifted(values, self._plan.shifts_px[index], self._plan.grid.shape[1:])
            self._cached[index] = values
        return self._cached[index]


def shifted(image: np.ndarray, shift_px: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Move a slice on a larger canvas of air by linear interpolation.

    Args:
        image: Values (H, W) float32.
        shift_px: Place of its first pixel on the canvas (y, x), each >= 0.
        shape: Size of the canvas.

    Example:
        >>> shifted(np.array([[0.0, 100.0]], np.float32), np.array([0.0, 0.25]), (1, 3)).tolist()
        [[-256.0, 75.0, -743.0]]
    """
    for axis in range(2):
        first = int(shift_px[axis])
        part = np.float32(shift_px[axis] - first)
        length = image.shape[axis]
        sizes = list(image.shape)
        sizes[axis] = shape[axis] + 1
        canvas = np.full(sizes, AIR_HU, np.float32)
        end = min(first + length, shape[axis])
        taken = np.take(image, range(end - first), axis)
        # One row of air before the first makes every pixel a mean of two.
        np.moveaxis(canvas, axis, 0)[first + 1 : end + 1] = np.moveaxis(taken, axis, 0)
        upper, lower = np.moveaxis(canvas, axis, 0)[1:], np.moveaxis(canvas, axis, 0)[:-1]
        image = np.moveaxis(upper + part * (lower - upper), 0, axis)
    return image
