"""Reference labels of a case: label map, masks, segments of 3D Slicer, DICOM SEG or RTSTRUCT."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from medseg.data.audit.labels import GRID_TOLERANCE_MM
from medseg.data.importers.dataset import plain_name
from medseg.data.options import label_value_clashes
from medseg.errors import UserError
from medseg.findings import Finding, warnings_of
from medseg.io.inputs import (
    SEGMENTATION_SUFFIX,
    case_name,
    dicom_files,
    input_format,
    is_dicom_file,
    volume_files,
    volume_suffix,
)
from medseg.io.read import read_labels, read_layer
from medseg.io.volume import Volume
from medseg.task import IGNORE, LabelValues
from medseg.wording import first_few

if TYPE_CHECKING:
    from medseg.io.simpleitk import Segment

# Most names that a message lists.
MAX_LISTED = 20


class _Mask(NamedTuple):
    """A structure that is merged into a label map.

    Attributes:
        name: Name of the structure in messages.
        volume: Mask of the structure (D, H, W), booleans.
        value: Value of the structure in the merged label map.
    """

    name: str
    volume: Volume
    value: int


class ChosenStructures(NamedTuple):
    """Structures of a file or folder that are merged into a label map.

    Attributes:
        values: Value in the merged label map to label name: 1, 2, … in the order of the labels.
        structures: Pairs of a structure's name and its value in the merged label map, in the order
            of the labels.
        findings: A warning if labels have no structure.
    """

    values: dict[int, str]
    structures: list[tuple[str, int]]
    findings: list[Finding]


def read_reference(
    path: Path,
    label_values: LabelValues,
    image: Path | None = None,
    series: str | None = None,
    modality: str = "ct",
    *,
    kept: Collection[str] | None = None,
) -> tuple[Volume, dict[int, str]]:
    """Read the labels of a case in the storage order of their files.

    Structures are found by the names that `label_values` maps to a label; a label to which only
    numbers are mapped is looked for under its own name. Names are compared by `plain_name`. A label
    whose structures are not in the files is absent. Where structures overlap, the later label of
    `label_values` counts. Structures of labels outside `kept` are not read, so that they take no
    voxels from other labels.

    Args:
        path: Label map; folder of binary masks, one file for each structure; segmentation of 3D
            Slicer; or a SEG or RTSTRUCT file.
        label_values: Value, or name of a structure, to label name.
        image: Image of the case, on whose slices a SEG or RTSTRUCT is read.
        series: DICOM series of the image.
        modality: Modality of the image, as for `read_image`.
        kept: Labels to read, such as those of the task; None reads all of `label_values`.

    Returns:
        Label values (D, H, W) with findings, and value to label name.

    Raises:
        UserError: If a file cannot be read, no label has a structure, two masks have one name, or a
            mask is not binary or on another grid than the first.
    """
    read_values = label_values
    if kept is not None:
        kept_values = {value: label for value, label in label_values.items() if label in kept}
        # If `label_values` has no label of `kept`, all its labels are read: the message about a
        # file without them names what is expected.
        read_values = kept_values or label_values
    if path.is_dir():
        masks = masks_in(path)
        # A folder without masks holds DICOM files, which are handled below.
        if masks:
            return _read_masks(path, masks, read_values)
    suffix = volume_suffix(path)
    if suffix == SEGMENTATION_SUFFIX:
        # With all labels, not only the kept ones: `kept` must not change how the file is read.
        segments = _segments_of(path, label_values)
        if segments:
            return _read_segments(path, segments, read_values)
    if suffix is None:
        label_file = _label_file_of(path)
        if label_file is not None:
            return _read_dicom_labels(path, label_file, image, series, modality, read_values)
    # An ordinary label map has values, but no names of structures. Labels outside `kept` stay in
    # the result, so that the audit does not report their values as unknown.
    names = {value: label for value, label in label_values.items() if isinstance(value, int)}
    return read_labels(path), names


def _label_file_of(path: Path) -> Path | None:
    """Find the only DICOM file at a path; it is taken to be a SEG or RTSTRUCT.

    None if there is no DICOM file, or several, which are taken to be the slices of a label map.
    """
    if is_dicom_file(path):
        return path
    files = list(dicom_files(path)) if path.is_dir() else []
    return files[0] if len(files) == 1 else None


def _read_dicom_labels(
    path: Path,
    label_file: Path,
    image: Path | None,
    series: str | None,
    modality: str,
    label_values: LabelValues,
) -> tuple[Volume, dict[int, str]]:
    """Read a SEG or RTSTRUCT on the slices of the image; results as of `read_reference`.

    Raises:
        UserError: If the image is not DICOM.
    """
    from medseg.io.dicom.labels import open_label_file, read_label_file  # pydicom takes 30 MiB
    from medseg.io.dicom.read import open_slices

    file = open_label_file(label_file)
    if image is None or input_format(image) != "dicom":
        raise UserError(
            f"{path}: a DICOM {file.kind} is read on the slices of its series, "
            "but the image of the case is not DICOM; give the series."
        )
    chosen = _choose(path, file.names.values(), label_values)
    # `file.names` maps the number of each structure in the file to its name. The order of the new
    # mapping is that of the labels, since later structures overwrite earlier ones.
    value_of_number: dict[int, int] = {}
    for name, value in chosen.structures:
        for number, structure_name in file.names.items():
            if structure_name == name:
                value_of_number[number] = value
    slices = open_slices(image, series, modality)
    volume = read_label_file(file, slices, value_of_number)
    findings = (*volume.findings, *chosen.findings)
    return Volume(volume.array, volume.grid, None, findings), chosen.values


def masks_in(folder: Path) -> dict[str, Path]:
    """Find the masks of a folder by the names of their structures.

    Raises:
        UserError: If two files have the same name, such as `liver.nii` and `liver.nii.gz`.
    """
    masks: dict[str, Path] = {}
    for file in volume_files(folder):
        first = masks.setdefault(case_name(file), file)
        if first != file:
            raise UserError(
                f"{folder}: {first.name} and {file.name} are masks of one structure; "
                "keep one of them."
            )
    return masks


def _segments_of(path: Path, label_values: LabelValues) -> list[Segment]:
    """Read the segments in the header of a 3D Slicer file if they must be chosen by name.

    This is the case if labels are given by name, or if the file has several layers, in which the
    same value may stand for different segments. Otherwise the list is empty, and the file is read
    as an ordinary label map.

    Raises:
        UserError: If a file to be read by its values names a segment like another label.
    """
    from medseg.io.simpleitk import read_segments  # SimpleITK takes 50 MiB

    segments = read_segments(path)
    has_layers = any(segment.num_layers > 1 for segment in segments)
    if has_layers or any(isinstance(value, str) for value in label_values):
        return segments
    _refuse_other_names(path, segments, label_values)
    return []


def _refuse_other_names(path: Path, segments: Sequence[Segment], label_values: LabelValues) -> None:
    """Refuse a segment whose value is that of one label and whose name is that of another.

    3D Slicer numbers segments as they are made, so that their values may differ between files.

    Raises:
        UserError: With the segment.
    """
    label_of_name = {plain_name(label): label for label in label_values.values()}
    for segment in segments:
        label = label_values.get(segment.value)
        named_label = label_of_name.get(plain_name(segment.name))
        if None not in (label, named_label) and named_label != label:
            raise UserError(
                f"{path}: the segment {segment.name!r} has the value {segment.value}, which is "
                f"{label} in data.label_values; name the segments of each label in "
                "+data.label_values={<label>: [<segment>, …]}."
            )


def holds_structures(path: Path) -> bool:
    """Whether labels are a folder of masks, a SEG or an RTSTRUCT: files that name their structures.

    A segmentation of 3D Slicer counts as a label map, as do the slices of a DICOM series.
    """
    if volume_suffix(path) is not None:
        return False
    has_masks = path.is_dir() and bool(volume_files(path))
    return has_masks or _label_file_of(path) is not None


def _choose(path: Path, names: Iterable[str], label_values: LabelValues) -> ChosenStructures:
    """Choose the structures of each label.

    Args:
        path: The file or folder of the labels, for messages.
        names: Names of the structures that are there.
        label_values: Value, or name of a structure, to label name; the values are not used.

    Raises:
        UserError: If no label has a structure.
    """
    # Name in the form of `plain_name`, to the names in the file.
    spellings: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):  # each name once, in their order
        spellings.setdefault(plain_name(name), []).append(name)
    names_of_label: dict[str, list[str]] = {label: [] for label in label_values.values()}
    for value_or_name, label in label_values.items():
        if isinstance(value_or_name, str):
            names_of_label[label].append(value_or_name)
    values: dict[int, str] = {}
    expected: list[str] = []
    absent: list[str] = []
    structures: list[tuple[str, int]] = []
    for value, (label, expected_names) in enumerate(names_of_label.items(), start=1):
        values[value] = label
        present: list[str] = []
        for expected_name in expected_names or [label]:
            expected.append(expected_name)
            present += spellings.get(plain_name(expected_name), [])
        # Several names of a label may be spellings of the same structure, which counts once.
        structures += [(name, value) for name in dict.fromkeys(present)]
        # Files need not have voxels that count nowhere.
        if not present and label != IGNORE:
            absent.append(label)
    if not structures:
        all_names = itertools.chain.from_iterable(spellings.values())
        listed = first_few(sorted(all_names), MAX_LISTED)
        raise UserError(
            f"{path}: expected a structure named {' or '.join(expected[:MAX_LISTED])}, "
            f"but it holds {listed or 'none'}; name the structures of each label in "
            "+data.label_values={<label>: [<structure>, …]}."
        )
    sentences = []
    if absent:
        sentences.append(f"{', '.join(absent)}: no such structure, taken as absent")
    return ChosenStructures(values, structures, warnings_of("reading", sentences))


def _read_masks(
    path: Path, masks: dict[str, Path], label_values: LabelValues
) -> tuple[Volume, dict[int, str]]:
    """Merge binary masks into a label map, one at a time; results as of `_merge`."""
    chosen = _choose(path, masks, label_values)

    def read_chosen_masks() -> Iterator[_Mask]:
        """Read each mask only when it is merged, so that only one mask is in memory."""
        for name, value in chosen.structures:
            yield _Mask(f"the mask of {name}", _read_mask(path, name, masks[name]), value)

    return _merge(path, read_chosen_masks(), chosen)


def _read_mask(path: Path, name: str, file: Path) -> Volume:
    """Read a binary mask, as booleans.

    Raises:
        UserError: If the mask holds several values other than 0.
    """
    mask = read_labels(file)
    is_inside = mask.array != 0
    # The value of the inside may be any number, such as 1, 255, or the number of the structure.
    has_several_values = (mask.array[is_inside] != mask.array.max()).any()
    if has_several_values:
        raise UserError(
            f"{path}: expected a mask of one value, but that of {name} holds several; "
            "give its file as a label map instead."
        )
    return Volume(is_inside, mask.grid, mask.header, mask.findings)


def _read_segments(
    path: Path, segments: Sequence[Segment], label_values: LabelValues
) -> tuple[Volume, dict[int, str]]:
    """Merge segments of 3D Slicer, which may lie in several layers; results as of `_merge`.

    Raises:
        UserError: If voxels belong to no segment.
    """
    chosen = _choose(path, [segment.name for segment in segments], label_values)
    # Every segment states the number of layers of its file.
    layers = [read_layer(path, number) for number in range(segments[0].num_layers)]
    for number, layer in enumerate(layers):
        _require_segments(path, number, layer, segments)

    def masks_of_segments() -> Iterator[_Mask]:
        """Yield the mask of each chosen segment; several segments may have one name."""
        for name, value in chosen.structures:
            for segment in segments:
                if segment.name != name:
                    continue
                layer = layers[segment.layer]
                is_inside = layer.array == segment.value
                mask = Volume(is_inside, layer.grid, layer.header, layer.findings)
                yield _Mask(name, mask, value)

    return _merge(path, masks_of_segments(), chosen)


def _require_segments(path: Path, number: int, layer: Volume, segments: Sequence[Segment]) -> None:
    """Refuse voxels of a layer that belong to no segment: they would be trained on as background.

    Raises:
        UserError: With the first of their values.
    """
    values_of_segments = {segment.value for segment in segments if segment.layer == number}
    for value in np.unique(layer.array).tolist():
        if value != 0 and value not in values_of_segments:
            raise UserError(
                f"{path}: layer {number} holds the value {value}, "
                "which no segment of the header has; save the segmentation again in 3D Slicer."
            )


def _merge(
    path: Path, masks: Iterable[_Mask], chosen: ChosenStructures
) -> tuple[Volume, dict[int, str]]:
    """Merge structures into a label map.

    Where labels overlap, the later label counts, and a finding warns of it.

    Args:
        path: The file or folder of the labels, for messages.
        masks: The mask of each structure, at least one; each is read when its turn comes.
        chosen: Names of their values, and findings, both for the result.

    Returns:
        Label map (D, H, W) with the findings of all masks, and value to label name.

    Raises:
        UserError: If a mask is on another grid than the first.
    """
    labels: np.ndarray | None = None
    findings: list[Finding] = []
    num_shared = 0
    for name, mask, value in masks:
        if labels is None:
            first = mask
            # The smallest unsigned type that holds all values.
            labels = np.zeros(mask.grid.shape, np.min_scalar_type(len(chosen.values)))
        if not mask.grid.is_close(first.grid, GRID_TOLERANCE_MM):
            raise UserError(f"{path}: {name} has another grid than the first; resample it.")
        # Masks of one program often have the same findings, which count once.
        for finding in mask.findings:
            if finding not in findings:
                findings.append(finding)
        earlier_values = labels[mask.array]
        is_shared = (earlier_values != 0) & (earlier_values != value)
        num_shared += int(np.count_nonzero(is_shared))
        labels[mask.array] = value
    assert labels is not None, "`_choose` refuses files without a structure"
    findings += chosen.findings
    if num_shared:
        sentence = (
            f"{num_shared} voxels belong to several labels and count for the last one of "
            "data.label_values"
        )
        findings += warnings_of("reading", [sentence])
    return Volume(labels, first.grid, first.header, tuple(findings)), chosen.values


def file_values(label_values: Mapping[str, Any]) -> LabelValues:
    """Invert `data.label_values`: value, or name of a structure, in the files to label name.

    Args:
        label_values: Name to its value or structure, or to a list of them.

    Raises:
        UserError: If a value is neither a whole number nor a name, or has two names.

    Example:
        >>> file_values({"left_kidney": 10, "right_kidney": [11, 12]})
        {10: 'left_kidney', 11: 'right_kidney', 12: 'right_kidney'}
    """
    for sentence in label_value_clashes(label_values):
        raise UserError(sentence)
    name_of_value: LabelValues = {}
    for name, content in label_values.items():
        values = content if isinstance(content, list) else [content]
        name_of_value |= dict.fromkeys(values, name)
    return name_of_value
