"""Cache of oriented, resampled cases: memory-mappable arrays with a JSON sidecar.

Layout: `<cache>/<spacing>-<configuration hash>/<case>-<source hash>/{image.npy, image_1.npy, …,
labels.npy, case.json}`. The source hash covers the absolute paths of the case's files and how they
are read, so cases with the same name from two data sets have two entries. If none of the files
exists on this machine (only the cache was copied), an entry with the name of the case from another
machine is used, provided that there is exactly one.

An entry is written to a temporary folder and renamed, so it is complete or absent; a lock lets one
process at a time build it. A process that uses an entry notices when another process rebuilds it.
Folders `coarse-<hash>` inside an entry hold the probabilities of coarse stages.

When a process first opens an entry, it compares the files of the entry with their stored checksums;
the sidecar holds a digest of its own content. Only a process that builds an entry imports the
readers of `medseg.io`.
"""

import functools
import glob
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from medseg.data.audit.finding import CaseAudit
from medseg.data.audit.labels import ABSENT, audit_vanished
from medseg.data.audit.table import AuditedCase
from medseg.data.case_table import Case
from medseg.data.source_case import CaseRefusedError, SourceCase, read_source
from medseg.data.source_files import (
    crc32_of,
    files_in_role,
    is_here,
    is_intact,
    is_same_source,
    sources_of,
)
from medseg.errors import UserError
from medseg.findings import Finding, Severity
from medseg.geometry.grid import VoxelBox, VoxelGrid
from medseg.io.atomic import locked
from medseg.io.text import read_json
from medseg.preprocess.intensity import HU_LIMITS, Intensity, percentile, zscore
from medseg.preprocess.resample import ANTIALIASED, resample_image, resample_labels
from medseg.task import LabelValues, Task

# Raise this number with every change by which the same sources give other arrays, another sidecar
# or another folder name.
FORMAT_VERSION = 12
DIGEST_LENGTH = 8  # hexadecimal digits, in names of folders
SIDECAR = "case.json"
LABELS_FILE = "labels.npy"
PROBS_FILE = "probs.npy"
PROBS_GRID_FILE = "grid.json"

INTENSITIES = {"zscore": zscore, "percentile": percentile}
"""Normalisations whose intensity map is computed from the values of each case."""

Targets = Sequence[tuple[tuple[float, float, float] | None, str]]
"""Spacing (z, y, x) of each cache entry, None for the spacing of the scan; and its image filter."""


class _Entry(NamedTuple):
    """Folder of an entry of the cache, and the content of its sidecar."""

    folder: Path
    record: dict[str, Any]


@dataclass(frozen=True)
class CachedCase:
    """One entry of the cache. Cheap to pickle: the arrays are mapped on each access.

    Attributes:
        name: Name of the case.
        folder: Folder of the entry.
        grid: The oriented, resampled grid of the arrays.
        region_boxes: Region name to the tight box of its labels on `grid`; absent regions are left
            out.
        label_boxes: Label name to the tight box of its voxels on `grid`; absent labels are left
            out.
        intensities: Map of each channel to the range of the network, computed from the values of
            this case; None where the channel has a window, which is the same for all cases.
        trust: Region name to the trust in its reference.
        content: Digest of the content of the source files, of how they are read, and of the
            configuration of the entry; the paths do not count.
        stamp: Modification time of the sidecar in ns, by which a rebuilt entry in the same folder
            is noticed; None turns the check off.
        audit: Measurements and findings of the case as it was read.
        ignore_findings: Codes of the findings that the case ignores.
        resampling: Filter of the image; crops on another grid are cut with it.
    """

    name: str
    folder: Path
    grid: VoxelGrid
    region_boxes: dict[str, VoxelBox]
    audit: CaseAudit
    ignore_findings: frozenset[str] = frozenset()
    resampling: str = ANTIALIASED
    label_boxes: dict[str, VoxelBox] = field(default_factory=dict)
    intensities: tuple[Intensity | None, ...] = (None,)
    trust: dict[str, str] = field(default_factory=dict)
    content: str = ""
    stamp: int | None = None

    @property
    def images(self) -> list[np.ndarray]:
        """The channels as read-only memory maps, (D, H, W): a CT in int16 HU, others in float32."""
        return [self._map(_image_file(number)) for number in range(len(self.intensities))]

    @property
    def image_hu(self) -> np.ndarray:
        """The first channel, as in `images`; in HU only if it is a CT."""
        return self.images[0]

    @property
    def labels(self) -> np.ndarray:
        """The label map in the task's values as a read-only memory map, (D, H, W) uint8."""
        return self._map(LABELS_FILE)

    def _map(self, name: str) -> np.ndarray:
        """Map a file of the entry into memory.

        Raises:
            UserError: If the entry has been built anew since it was opened, so that its grid and
                boxes may not fit, or has been removed.
        """
        try:
            array: np.ndarray = np.load(self.folder / name, mmap_mode="r")
            is_same = self.stamp is None or self.stamp == _stamp(self.folder)
        except FileNotFoundError:  # also for a moment between the two renamings of `_write_entry`
            is_same = False
        if not is_same:
            raise UserError(
                f"The cache entry of the case {self.name!r} was built anew by another process, or "
                "removed, while this one used it; start again."
            )
        return array


@dataclass(frozen=True)
class CoarseProbs:
    """Probabilities that a coarse stage gives to the labels of a case.

    Cheap to pickle: the probabilities are mapped on each access.

    Attributes:
        file: File with the probabilities of the background and all labels, (K, d, h, w) float16, on
            the grid of the coarse stage.
        grid: Grid of the probabilities.
    """

    file: Path
    grid: VoxelGrid

    @property
    def probs(self) -> np.ndarray:
        """The probabilities as a read-only memory map."""
        array: np.ndarray = np.load(self.file, mmap_mode="r")
        return array


def coarse_probs(
    case: CachedCase,
    key: str,
    predict: Callable[[], tuple[np.ndarray, VoxelGrid]],
) -> CoarseProbs:
    """Open the probabilities of a coarse stage for a case.

    They are predicted once and kept inside the entry of the case.

    Args:
        case: The case. When its entry is built anew, its probabilities are removed with the old
            one.
        key: Identifies the coarse stage, such as the checksum of its checkpoint; each key has
            probabilities of its own.
        predict: Returns the probabilities, (K, d, h, w) float16, and their grid.

    Raises:
        UserError: If the probabilities cannot be written.
    """
    folder = case.folder / f"coarse-{_digest({'key': key})}"
    # Without the lock, which a cache that may only be read does not allow.
    record = _intact_probs(folder)
    if record is None:
        # One process predicts a case, the others wait for it: the ranks of a run share the cases.
        with locked(case.folder / f".{folder.name}.lock"):
            record = _intact_probs(folder) or _predict_probs(case, folder, predict)
    return CoarseProbs(folder / PROBS_FILE, VoxelGrid(**record["grid"]))


def _predict_probs(
    case: CachedCase, folder: Path, predict: Callable[[], tuple[np.ndarray, VoxelGrid]]
) -> dict[str, Any]:
    """Predict the probabilities of a case and write them to a folder; the caller holds their lock.

    Returns:
        Their record.

    Raises:
        UserError: If they cannot be written.
    """
    probs, grid = predict()
    try:
        _write_probs(folder, probs, grid)
    except OSError as error:
        raise UserError(
            f"The probabilities of the coarse stage for the case {case.name!r} could not "
            f"be put into the cache {case.folder} ({error}); make sure that the folder "
            "can be written and has room (data.cache)."
        ) from error
    record: dict[str, Any] = read_json(folder / PROBS_GRID_FILE)
    return record


def _intact_probs(folder: Path) -> dict[str, Any] | None:
    """Read the record of probabilities; None where they are absent or damaged."""
    try:
        record: dict[str, Any] = read_json(folder / PROBS_GRID_FILE)
        stat = (folder / PROBS_FILE).stat()
        crc32 = int(record["crc32"])
    except (UserError, OSError, ValueError, KeyError, TypeError):
        return None
    if not is_intact(folder / PROBS_FILE, crc32, stat.st_size, stat.st_mtime_ns):
        return None
    return record


def _write_probs(folder: Path, probs: np.ndarray, grid: VoxelGrid) -> None:
    """Write probabilities to a temporary folder and rename it; the caller holds their lock."""
    temporary = folder.with_name(f".building-{folder.name}")
    _remove(temporary)
    try:
        temporary.mkdir()
        np.save(temporary / PROBS_FILE, np.ascontiguousarray(probs))
        record = {"grid": asdict(grid), "crc32": crc32_of(temporary / PROBS_FILE)}
        (temporary / PROBS_GRID_FILE).write_text(json.dumps(record), encoding="utf-8")
        _flush(temporary)
        _remove(folder)
        temporary.rename(folder)
    finally:
        _remove(temporary)


def _flush(folder: Path) -> None:
    """Write the files of a folder from the system's buffers to the disk.

    Otherwise a power cut after the renaming may leave a folder with empty files.
    """
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def prepare_case(
    case: Case,
    cache_dir: Path,
    spacing_mm: tuple[float, float, float] | None,
    task: Task,
    label_values: LabelValues,
    *,
    resampling: str = ANTIALIASED,
    read: Callable[[], SourceCase] | None = None,
) -> CachedCase:
    """Make sure that the cache holds a current entry of the case, and open it.

    A current entry is left as it is. Any number of processes may prepare the same case at once: one
    builds it, the others wait.

    Args:
        case: The case.
        cache_dir: Root of the cache; made if needed.
        spacing_mm: Voxel spacing of the entry, (z, y, x); None keeps that of the scan.
        task: Labels, regions and channels; HU windows have no effect here.
        label_values: Value, or name of a structure, in the file to label name. Several may share a
            label; a label that the task does not know becomes background.
        resampling: Filter of the image, see `medseg.preprocess.resample`.
        read: Reads the case if its entry must be built; pass a cached function to read the files
            only once for several spacings. None: `read_source`.

    Raises:
        CaseRefusedError: If the audit found an error that the case does not ignore.
        UserError: If the sources are missing or cannot be read, `label_values` lacks a label of the
            task, or the cache cannot be written.
    """
    if case.labels is None:
        raise UserError(
            f"The case {case.name!r} has no label map, which training and scoring need; "
            "fill in its cell of the table, or write 'test' into its column split."
        )
    unmapped = [name for name in task.labels if name not in label_values.values()]
    if unmapped:
        raise UserError(
            f"data.label_values has no value for {', '.join(unmapped)}; expected a value in the "
            f"label maps for each of {', '.join(task.labels)}, but it names "
            f"{', '.join(label_values.values()) or 'nothing'}."
        )
    folder = _entry_folder(case, cache_dir, spacing_mm, task, label_values, resampling)
    entry = _find_entry(case, folder, task)
    if entry is not None:
        return _cached_case(case, entry, resampling)
    for path in sources_of(case, task).values():
        if not is_here(path):
            raise UserError(
                f"The case {case.name!r} has no current entry in the cache and its file {path} "
                "does not exist, or you may not enter its folder; correct the path, or copy the "
                "prepared cache."
            )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(cache_dir / f".{folder.parent.name}-{folder.name}.lock"):
            # Another process may have built it while this one waited.
            entry = _find_entry(case, folder, task)
            if entry is None:
                source = read_source(case, task, label_values) if read is None else read()
                record = _build(folder, source, case, spacing_mm, task, resampling)
                entry = _Entry(folder, record)
    except OSError as error:
        raise UserError(
            f"The case {case.name!r} could not be put into the cache {cache_dir} ({error}); make "
            "sure that the folder can be written and has room (data.cache), and that the scan can "
            "be read."
        ) from error
    return _cached_case(case, entry, resampling)


def open_case(
    case: Case,
    cache_dir: Path,
    spacing_mm: tuple[float, float, float] | None,
    task: Task,
    label_values: LabelValues,
    *,
    resampling: str = ANTIALIASED,
) -> CachedCase:
    """Open the entry of a case; arguments as in `prepare_case`.

    Where the source files exist, the entry must agree with them; where they do not (a machine that
    holds only the cache), a complete entry of the same configuration is trusted.

    Raises:
        UserError: If there is no current entry.
    """
    folder = _entry_folder(case, cache_dir, spacing_mm, task, label_values, resampling)
    entry = _find_entry(case, folder, task)
    if entry is None:
        raise UserError(
            f"The cache {cache_dir} has no current entry of the case {case.name!r} at "
            f"{spacing_text(spacing_mm)}; run medseg prepare with the same data and task."
        )
    return _cached_case(case, entry, resampling)


def is_current(
    case: Case,
    cache_dir: Path,
    spacing_mm: tuple[float, float, float] | None,
    task: Task,
    label_values: LabelValues,
    *,
    resampling: str = ANTIALIASED,
) -> bool:
    """Whether `open_case` would find a complete entry that agrees with the sources."""
    folder = _entry_folder(case, cache_dir, spacing_mm, task, label_values, resampling)
    return _find_entry(case, folder, task) is not None


def prepare_cases(
    cases: Iterable[tuple[Case, LabelValues]], cache_dir: Path, task: Task, targets: Targets
) -> Iterator[tuple[AuditedCase, CachedCase | SourceCase | None]]:
    """Audit each case and fill the cache; a failing case does not affect the others.

    Args:
        cases: Cases with their label values, as in `prepare_case`.
        cache_dir: Root of the cache.
        task: Labels and regions.
        targets: Spacings and filters of the cache entries.

    Yields:
        Each case with its audit; and its entry for the first target, the case as it was read if it
        was refused, or None if there is neither.
    """
    for case, label_values in cases:
        yield _prepare(case, label_values, cache_dir, task, targets)


def _prepare(
    case: Case, label_values: LabelValues, cache_dir: Path, task: Task, targets: Targets
) -> tuple[AuditedCase, CachedCase | SourceCase | None]:
    """Audit one case and fill its cache entries; results as in `prepare_cases`.

    Its files are read once for all targets, and not at all if the entries are current.
    """
    read = functools.cache(lambda: read_source(case, task, label_values))
    findings: list[Finding] = []
    audit: CaseAudit | None = None
    first: CachedCase | None = None
    failure = ""
    try:
        for spacing_mm, resampling in targets:
            entry = prepare_case(
                case, cache_dir, spacing_mm, task, label_values, resampling=resampling, read=read
            )
            # The entries may have different findings: which regions vanish depends on the spacing.
            # Equal findings count once.
            findings += entry.audit.findings
            audit = replace(entry.audit, findings=tuple(dict.fromkeys(findings)))
            if first is None:
                first = entry
    except CaseRefusedError as error:
        return AuditedCase(case, error.audit), error.source
    except Exception as error:  # a defect or a lack of memory stops this case only
        logging.getLogger(__name__).debug("%s", case.name, exc_info=True)
        failure = str(error) if isinstance(error, UserError) else repr(error)
    return AuditedCase(case, audit, failure), first


# Folders and validity of entries.


def spacing_text(spacing_mm: tuple[float, float, float] | None) -> str:
    """Format a spacing for messages, e.g. `2x2x2 mm`."""
    return "native spacing" if spacing_mm is None else f"{_folder_text(spacing_mm)} mm"


def _folder_text(spacing_mm: tuple[float, float, float] | None) -> str:
    """Format a spacing for the name of a folder, e.g. `2x2x2`."""
    if spacing_mm is None:
        return "native"
    return "x".join(f"{value:g}" for value in spacing_mm)


def _entry_folder(
    case: Case,
    cache_dir: Path,
    spacing_mm: tuple[float, float, float] | None,
    task: Task,
    label_values: LabelValues,
    resampling: str,
) -> Path:
    """Make the path of an entry's folder; its hashes cover all choices that change the arrays.

    They do not cover the content of the files: the sidecar has their fingerprints.
    """
    # Structures are named by text, values of a label map by whole numbers, which cannot be sorted
    # together.
    by_value = [pair for pair in label_values.items() if not isinstance(pair[0], str)]
    by_structure = [pair for pair in label_values.items() if isinstance(pair[0], str)]
    # Structures may overlap: the arrays depend on which labels are read from structures, and in
    # which order. The dictionary is an ordered set, whose values are not used.
    ordered_labels = dict.fromkeys(label for _, label in by_structure if label in task.values)
    # Text in place of None, which could not be sorted with the sides.
    regions = [[region.name, list(region.labels), region.side or ""] for region in task.regions]
    configuration: dict[str, Any] = {
        "format": FORMAT_VERSION,
        "spacing_mm": None if spacing_mm is None else list(map(float, spacing_mm)),
        "labels": dict(sorted(task.labels.items())),
        "regions": sorted(regions),
        "label_values": [*sorted(by_value), *sorted(by_structure)],
        "range_hu": list(HU_LIMITS),
        "channels": [[channel.modality, channel.normalise] for channel in task.channels],
        "ignore_label": task.ignore_label,
        "resampling": resampling,
        "structures": list(ordered_labels),
    }
    # The files, and how they are read: runs that read a scan in two ways have two entries. If they
    # shared one entry, each run would rebuild the entry of the other.
    reading = _read_as(case)
    for role, path in sources_of(case, task).items():
        reading[role] = os.path.realpath(path)
    configuration_folder = f"{_folder_text(spacing_mm)}-{_digest(configuration)}"
    return cache_dir / configuration_folder / f"{case.name}-{_digest(reading)}"


def _digest(content: dict[str, Any]) -> str:
    """Hash plain values; the order of keys does not matter."""
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]


def _image_file(number: int) -> str:
    """Name the file of a channel."""
    return f"image_{number}.npy" if number else "image.npy"


def _find_entry(case: Case, folder: Path, task: Task) -> _Entry | None:
    """Find the current entry of a case; None if there is none.

    It is the entry in `folder`, else the only matching entry that was copied from another machine.
    """
    sources = sources_of(case, task)
    record = _current_record(case, folder, sources)
    if record is not None:
        return _Entry(folder, record)
    # If no source exists here, the cache may have been copied from another machine. The paths there
    # were different, and so is the digest in the name of the folder.
    if any(map(is_here, sources.values())):
        return None
    copied_entries = []
    pattern = glob.escape(case.name) + "-" + "[0-9a-f]" * DIGEST_LENGTH
    for other_folder in folder.parent.glob(pattern):
        record = _current_record(case, other_folder, sources)
        if record is None:
            continue
        # An entry whose own files exist here belongs to another case of this machine.
        is_of_this_machine = any(is_here(source["path"]) for source in record["sources"].values())
        if not is_of_this_machine:
            copied_entries.append(_Entry(other_folder, record))
    # Several entries belong to different cases with the same name: the right one is unknown.
    if len(copied_entries) != 1:
        return None
    return copied_entries[0]


def _current_record(case: Case, folder: Path, sources: Mapping[str, Path]) -> dict[str, Any] | None:
    """Read the sidecar of a complete entry that agrees with the sources; None if there is none."""
    record = _intact_record(folder)
    if record is None:
        return None
    if set(record["sources"]) != set(sources) or record["read_as"] != _read_as(case):
        return None
    for role, path in sources.items():
        # A source that does not exist here cannot be compared: the entry is trusted.
        if not is_here(path):
            continue
        try:
            is_same = is_same_source(path, record["sources"][role], files_in_role(role, path))
        except OSError as error:
            raise UserError(
                f"{path}: cannot be read, so that its entry in the cache cannot be compared with "
                f"it ({error.strerror}); check its permissions."
            ) from error
        if not is_same:
            return None
    return record


def _intact_record(folder: Path) -> dict[str, Any] | None:
    """Read the sidecar of an entry; None if there is no entry, or a half-written or damaged one."""
    try:
        record: dict[str, Any] = read_json(folder / SIDECAR)
        # The digest is that of all other keys.
        digest = record.pop("digest")
        if digest != _digest(record) or record["format"] != FORMAT_VERSION:
            return None
        for name, crc32 in record["crc32"].items():
            stat = (folder / name).stat()
            if not is_intact(folder / name, crc32, stat.st_size, stat.st_mtime_ns):
                return None
    # Damaged JSON can raise any of these errors; the entry is then built again.
    except (UserError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return record


def _stamp(folder: Path) -> int:
    """Read the modification time of the sidecar of an entry, in ns."""
    return (folder / SIDECAR).stat().st_mtime_ns


def _read_as(case: Case) -> dict[str, Any]:
    """Collect the values of the case table that change the arrays or the findings of a case."""
    values: dict[str, Any] = {
        "hu": asdict(case.hu),
        "absent": sorted(name for name, trust in case.trust.items() if trust == ABSENT),
    }
    # Several series in a folder have the same fingerprint, which covers all files of the folder.
    if case.series is not None:
        values["series"] = case.series
    return values


def _cached_case(case: Case, entry: _Entry, resampling: str) -> CachedCase:
    """Describe an entry that has been found or built.

    Raises:
        CaseRefusedError: If the audit has an error that the case does not ignore. The case may have
            ignored it when the entry was built.
    """
    folder, record = entry
    stamp = _stamp(folder)
    audit = CaseAudit.from_dict(record["audit"])
    if audit.not_ignored(case.ignore_findings, Severity.error):
        raise CaseRefusedError(case, audit)
    content = {
        "files": {role: source["sha256"] for role, source in record["sources"].items()},
        "read_as": record["read_as"],
        "configuration": record["configuration"],
    }
    # The fingerprint has `names` only for a folder of masks, whose files are named after their
    # structures.
    names = {
        role: source["names"] for role, source in record["sources"].items() if "names" in source
    }
    if names:
        content["names"] = names
    # Ignored findings come from the current table: they do not change the arrays.
    return CachedCase(
        name=case.name,
        folder=folder,
        grid=VoxelGrid(**record["grid"]),
        region_boxes={name: VoxelBox(**box) for name, box in record["region_boxes"].items()},
        label_boxes={name: VoxelBox(**box) for name, box in record["label_boxes"].items()},
        intensities=tuple(map(_intensity_of, record["intensities"])),
        trust=case.trust,
        content=_digest(content),
        audit=audit,
        ignore_findings=case.ignore_findings,
        resampling=resampling,
        stamp=stamp,
    )


def _intensity_of(values: Sequence[float] | None) -> Intensity | None:
    """Read the map of a channel; None for a channel with a window."""
    if values is None:
        return None
    return Intensity(*values)


# Building of an entry.


def _build(
    folder: Path,
    source: SourceCase,
    case: Case,
    spacing_mm: tuple[float, float, float] | None,
    task: Task,
    resampling: str,
) -> dict[str, Any]:
    """Build an entry; the caller holds its lock.

    Returns:
        Sidecar of the entry.
    """
    grid = source.grid.resampled(spacing_mm)
    # `read_source` refuses a case whose labels do not fit the image, or, if the case ignores that
    # finding, reads the labels as if they fitted.
    assert source.labels is not None, "a case without labels that fit is refused"
    arrays: dict[str, np.ndarray] = {}
    intensities: list[Intensity | None] = []
    for number, (channel, image) in enumerate(zip(task.channels, source.images, strict=True)):
        is_ct = channel.modality == "ct"
        limits = HU_LIMITS if is_ct else None
        resampled = resample_image(
            image, source.grid, grid, channel.outside, resampling=resampling, limits=limits
        ).numpy()
        if is_ct:
            # Whole HU are exact enough, and half as large as float32.
            resampled = np.rint(resampled).astype(np.int16)
        arrays[_image_file(number)] = resampled
        # Computed from the scan as it was read, so that the map does not depend on the spacing of
        # the cache.
        intensity = None
        if channel.window_hu is None:
            intensity = INTENSITIES[channel.normalise](image, channel.modality)
        intensities.append(intensity)
    labels = resample_labels(source.labels, source.grid, grid, task.num_values).numpy()
    arrays[LABELS_FILE] = labels
    region_values = {region.name: task.region_values(region) for region in task.regions}
    region_boxes = _boxes(labels, region_values)
    label_boxes = _boxes(labels, {name: (value,) for name, value in task.labels.items()})
    part_boxes = region_boxes if task.regions else label_boxes
    # Not part of the audit of the source: which regions vanish depends on the spacing of the entry.
    vanished = audit_vanished(source.audit.volumes_ml, part_boxes, task, _folder_text(spacing_mm))
    audit = replace(source.audit, findings=(*source.audit.findings, *vanished))
    label_counts = {}
    for name, value in task.labels.items():
        label_counts[name] = int(np.count_nonzero(labels == value))
    record = {
        "format": FORMAT_VERSION,
        "case": case.name,
        "patient": case.patient,
        "trust": case.trust,
        "sources": source.sources,
        "read_as": _read_as(case),
        "configuration": folder.parent.name,
        "grid": asdict(grid),
        "label_counts": label_counts,
        "region_boxes": {name: asdict(box) for name, box in region_boxes.items()},
        "label_boxes": {name: asdict(box) for name, box in label_boxes.items()},
        "intensities": intensities,
        "audit": audit.to_dict(),
    }
    _write_entry(folder, arrays, record)
    return record


def _write_entry(folder: Path, arrays: Mapping[str, np.ndarray], record: dict[str, Any]) -> None:
    """Write an entry to a temporary folder, and rename it to its own, replacing a stale entry.

    Args:
        folder: Folder of the entry.
        arrays: Name of each file to its content.
        record: The sidecar; gets the checksums of the files.
    """
    # `check_case_name` refuses names with a leading dot, so no entry can have such a name.
    temporary = folder.with_name(f".building-{folder.name}")
    stale = folder.with_name(f".stale-{folder.name}")
    # A process that was killed may have left them.
    _remove(temporary, stale)
    try:
        temporary.mkdir()
        for name, array in arrays.items():
            np.save(temporary / name, np.ascontiguousarray(array))
        record["crc32"] = {name: crc32_of(temporary / name) for name in arrays}
        text = json.dumps(record | {"digest": _digest(record)}, indent=1)
        (temporary / SIDECAR).write_text(text, encoding="utf-8")
        _flush(temporary)
        # A folder cannot be renamed to an existing folder with files, so an older entry is first
        # moved away.
        with suppress(FileNotFoundError):
            folder.rename(stale)
        temporary.rename(folder)
    finally:
        _remove(temporary, stale)


def _boxes(
    labels: np.ndarray, values_of_name: Mapping[str, tuple[int, ...]]
) -> dict[str, VoxelBox]:
    """Find the tight box of the voxels of each name; names without voxels are left out."""
    boxes = {}
    for name, values in values_of_name.items():
        box = VoxelBox.from_mask(np.isin(labels, values))
        if box is not None:
            boxes[name] = box
    return boxes


def _remove(*paths: Path) -> None:
    """Remove folders or files where there are any."""
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
        with suppress(OSError):  # the path was a folder, or does not exist
            path.unlink()
