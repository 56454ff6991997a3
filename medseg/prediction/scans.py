"""Scans of an input, and the paths of their results."""

import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from medseg.data.case_table import list_channels, named_files, read_case_table
from medseg.errors import UserError, require
from medseg.io.inputs import WRITTEN_SUFFIXES, case_name, input_format, list_inputs, volume_suffix
from medseg.preprocess.scale import AS_STORED, HuScale


class Scan(NamedTuple):
    """A scan to predict.

    Attributes:
        name: Name of the case.
        path: Path of the file or folder.
        series: Which DICOM series, where the path holds several.
        hu: Scale that turns its values into HU.
        more_paths: Files of the channels after the first; None where a case table leaves one empty.
        labels: Reference of a case table; None where there is none.
    """

    name: str
    path: Path
    series: str | None = None
    hu: HuScale = AS_STORED
    more_paths: tuple[Path | None, ...] = ()
    labels: Path | None = None

    def reading(self) -> dict[str, Any]:
        """Settings of the reader for this scan, in plain types."""
        return {"series": self.series, "hu": {"slope": self.hu.slope, "offset": self.hu.offset}}

    def paths(self, num_channels: int) -> list[Path | None]:
        """List the file of each channel; None where there is none."""
        return list_channels(self.path, self.more_paths, num_channels)


def find_scans(
    source: Path | Sequence[Path],
    split: str | None,
    series: str | None = None,
    hu: HuScale = AS_STORED,
    labels_column: str | None = None,
) -> tuple[list[Scan], dict[Path, str]]:
    """Find every scan of an input.

    Args:
        source: Scan, DICOM folder, folder of scans, or case table; or the channels of one case, a scan each.
        split: Only this split of a case table.
        series: Which DICOM series the input is: a folder is then searched with all its subfolders and is one scan.
        hu: HU scale of the cases that have none of their own in the table.
        labels_column: Column of the case table with references; it may be absent.

    Returns:
        The scans to predict; and a description of each file and folder of the input, none of which may be overwritten.

    Raises:
        UserError: If there is nothing to predict.
    """
    if not isinstance(source, Path):
        require(split is None, f"split={split}: input={list(map(str, source))} is not a case table; leave split out")
        for path in source:
            input_format(path)
        scan = Scan(case_name(source[0]), source[0], series, hu, tuple(source[1:]))
        return [scan], dict.fromkeys(source, f"a channel of the case {scan.name}")
    if source.suffix.lower() != ".csv":
        require(split is None, f"split={split}: input={source} is not a case table; leave split out")
        paths = list_inputs(source) if series is None else [(case_name(source), source)]
        scans = [Scan(name, path, series, hu) for name, path in paths]
        return scans, {scan.path: f"the scan of the case {scan.name}" for scan in scans}
    require(series is None, f"series={series}: a case table has a column series for that; fill in that column of input={source}")
    table = read_case_table(source, labels_column, hu=hu, needs_labels=False)
    chosen = [
        Scan(case.name, case.image, case.series, case.hu, case.more_images, case.labels)
        for case in table
        if split is None or case.split == split
    ]
    require(bool(chosen), f"input={source}: no case of the table is marked split={split}; give a split of the table")
    protected = {path: f"a file of the case {name}" for name, path in named_files(source)}
    return chosen, protected | {case.image: f"the scan of the case {case.name}" for case in table}


def join_channels(scans: Sequence[Scan], num_channels: int) -> list[Scan]:
    """Name scans without the number of a channel, as nnU-Net gives it: `<case>_0000`, `<case>_0001`, … are one case.

    Files are joined to a case only if there is one for each channel of the task: such numbers may also count scans.

    Args:
        scans: Scans of a folder, or one scan, by name.
        num_channels: Channels of the task.
    """
    by_name = {scan.name: scan for scan in scans}
    joined: dict[str, Scan] = {}
    for scan in scans:
        case, _, number = scan.name.rpartition("_")
        files = [by_name.get(f"{case}_{index:04d}") for index in range(num_channels + 1)]
        is_whole = None not in files[:-1] and files[-1] is None and bool(case) and case not in by_name
        if is_whole and number in {f"{index:04d}" for index in range(num_channels)}:
            paths = tuple(one.path for one in files[:-1] if one is not None)
            joined[case] = scan._replace(name=case, path=paths[0], more_paths=paths[1:])
        else:
            joined[scan.name] = scan
    return list(joined.values())


def output_paths(output: Path, names: list[str], *, is_one_scan: bool) -> list[Path]:
    """Choose the paths of the label maps: the given file, or `<case>.nii.gz` in a folder.

    Args:
        output: File, or a folder that may not exist yet.
        names: Names of the cases.
        is_one_scan: Whether the input is one scan; a new name with a suffix then means a file.

    Raises:
        UserError: If several cases would go into one file, the suffix is no format to write, or a file exists where a
            folder is needed.
    """
    suffix = volume_suffix(output)
    if not output.is_dir():
        if suffix in WRITTEN_SUFFIXES:
            require(len(names) == 1, f"output={output}: the input has {len(names)} cases, so give a folder")
            return [output]
        is_new_folder = suffix is None and not output.exists() and not (is_one_scan and output.suffix)
        require(is_new_folder, f"output={output}: give a name that ends in {', '.join(WRITTEN_SUFFIXES)}, or a folder")
    return [output / f"{name}.nii.gz" for name in names]


def check_outputs(outputs: list[Path], protected: Mapping[Path, str]) -> None:
    """Refuse outputs that would overwrite a file of the input, or each other, also through links.

    Args:
        outputs: Paths of the label maps.
        protected: Description of each file of the input, from `find_scans`.

    Raises:
        UserError: If a path would be written twice or overwrite an input.
    """
    kept = {path.resolve(): description for path, description in protected.items()}
    taken: dict[str, Path] = {}
    for output in outputs:
        target = output.resolve()
        if target in kept:
            raise UserError(f"{output} is {kept[target]} and would be overwritten; give another output")
        # Some file systems treat two encodings of ü as one name.
        other = taken.setdefault(unicodedata.normalize("NFC", str(target)), output)
        require(other is output, f"{other} and {output} would be one file; rename one of the cases")
