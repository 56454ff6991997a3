#!/usr/bin/env python3
"""Find the scans of `cases.csv` among downloaded files, and write them as `scans/<case>.nii.gz`.

    python data/lungs/restore.py FOLDER [FOLDER …]

Below the folders it reads every DICOM series and every NIfTI, NRRD and MetaImage file. A scan is
written if the SHA-256 of its voxels (int16, little-endian, in the order z, y, x), cut to the slices
of the table, is that of the table: then the masks fit, and the training sees the same numbers.
The exit code is 1 as long as a scan is missing.
"""

import csv
import hashlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from medseg.errors import UserError
from medseg.geometry.grid import VoxelBox
from medseg.io.dicom.catalogue import read_catalogue
from medseg.io.inputs import volume_suffix
from medseg.io.read import read_image
from medseg.io.volume import Volume
from medseg.io.write import write_image

HERE = Path(__file__).resolve().parent
Row = dict[str, str]


def main(folders: Sequence[Path], home: Path = HERE) -> int:
    """Restore what the folders hold; return the exit code.

    Args:
        folders: Folders with downloads, searched to their bottom.
        home: Folder of `cases.csv`.
    """
    with (home / "cases.csv").open(newline="", encoding="utf-8") as file:
        missing = [row for row in csv.DictReader(file) if not (home / row["image"]).exists()]
    for name, volume in read_scans(folders):
        for row in [row for row in missing if is_scan_of(volume, row)]:
            cut = cut_to(volume, row)
            write_image(home / row["image"], cut.array, cut.grid)
            missing.remove(row)
            print(f"{row['case']}: from {name}", flush=True)
    for row in missing:
        place = f"{row['source']}, {row['path']}"
        series = row["dicom_series"]
        print(f"{row['case']}: missing ({row['collection']}, {series or place})")
    return 1 if missing else 0


def read_scans(folders: Sequence[Path]) -> Iterator[tuple[str, Volume]]:
    """Read every scan below the folders, with the name of its file or series.

    What cannot be read is told, and left out.
    """
    for folder in folders:
        for series in read_catalogue(folder).series.values():
            if series.modality == "CT":
                yield from _read(series.folder, series.uid, series.files)
        for path in sorted(folder.rglob("*")):
            if volume_suffix(path) is not None and path.is_file():
                yield from _read(path)


def _read(
    path: Path, series: str | None = None, files: Sequence[Path] = ()
) -> Iterator[tuple[str, Volume]]:
    """Read one scan; nothing where it cannot be read."""
    try:
        volume = read_image(path, series, files=files)
    except UserError as error:
        print(f"left out: {error}", file=sys.stderr)
        return
    yield series or str(path), volume


def is_scan_of(volume: Volume, row: Row) -> bool:
    """Whether the slices of a row have the voxels that the table asks for."""
    if int(row["last_slice"]) >= len(volume.array):
        return False
    voxels = np.ascontiguousarray(cut_to(volume, row).array, dtype="<i2")
    return hashlib.sha256(voxels.tobytes()).hexdigest() == row["voxels_sha256"]


def cut_to(volume: Volume, row: Row) -> Volume:
    """Keep the slices of a row: a face could be rendered from some of the others."""
    first, stop = int(row["first_slice"]), int(row["last_slice"]) + 1
    box = VoxelBox((first, 0, 0), (stop, *volume.array.shape[1:]))
    return Volume(volume.array[first:stop], volume.grid.crop(box))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    downloads = [Path(argument) for argument in sys.argv[1:]]
    for folder in downloads:
        if not folder.is_dir():
            raise SystemExit(f"{folder}: there is no such folder")
    raise SystemExit(main(downloads))
