"""Source cases: the files of a case read once, oriented and audited."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from medseg.data.audit.finding import CaseAudit
from medseg.data.audit.image import (
    ImageFacts,
    are_hu,
    check_channels,
    hash_voxels,
    make_thumbnail,
)
from medseg.data.audit.labels import (
    ABSENT,
    audit_extent,
    audit_grids,
    audit_labels,
    map_values,
    measure_volumes,
)
from medseg.data.audit.placement import audit_placement, audit_shift
from medseg.data.audit.tissue_profile import Profile, make_profile
from medseg.data.case_table import Case
from medseg.data.source_files import files_in_role, fingerprint, is_here, sources_of
from medseg.errors import UserError
from medseg.findings import Finding, Severity
from medseg.geometry.grid import VoxelGrid
from medseg.preprocess.orient import Orientation, orient
from medseg.task import LabelValues, Task


@dataclass(frozen=True)
class SourceCase:
    """A case as it was read: oriented, and on the grid of its image.

    Attributes:
        sources: Role of each file to its fingerprint, taken before it was read.
        images: Oriented image of each channel, (D, H, W); a CT in HU, in which values far below air
            are padding.
        labels: Label map in the task's values on the same grid, uint8; None where the case has
            none, or its label map does not fit the image.
        grid: Grid of the images and the labels.
        audit: Measurements and findings.
    """

    sources: dict[str, dict[str, Any]]
    images: list[np.ndarray]
    labels: np.ndarray | None
    grid: VoxelGrid
    audit: CaseAudit

    @property
    def image_hu(self) -> np.ndarray:
        """Image of the first channel, (D, H, W); in HU only if that channel is a CT."""
        return self.images[0]


class CaseRefusedError(UserError):
    """Refusal of a case with an error that the case does not ignore.

    Attributes:
        audit: Measurements and findings.
        source: The case as it was read; None if its entry in the cache was opened instead.
    """

    def __init__(self, case: Case, audit: CaseAudit, source: SourceCase | None = None) -> None:
        errors = audit.not_ignored(case.ignore_findings, Severity.error)
        sentences = "; and ".join(map(str, errors))
        super().__init__(f"The case {case.name!r} is refused: {sentences}.")
        self.audit = audit
        self.source = source


def read_source(case: Case, task: Task, label_values: LabelValues) -> SourceCase:
    """Read and audit a case.

    Args:
        case: The case; its HU scale is applied to the first channel, and an error whose code it
            ignores does not refuse it.
        task: Labels, regions and channels.
        label_values: Value, or name of a structure, in the file to label name.

    Raises:
        CaseRefusedError: If the audit finds an error that the case does not ignore.
        UserError: If a file is missing or cannot be read.
    """
    # Imported here: a run that finds all cases in its cache needs no reader.
    from medseg.preprocess.channels import read_channels

    # Taken before reading: a file that changes while it is read then makes the cache entry stale.
    sources = {}
    for role, path in sources_of(case, task).items():
        if not is_here(path):
            raise UserError(
                f"{case.name}: its file {path} does not exist, or you may not enter its folder; "
                "correct the path."
            )
        sources[role] = fingerprint(path, files_in_role(role, path))
    modalities = [channel.modality for channel in task.channels]
    stored_images, volume = read_channels(
        case.images(len(task.channels)),
        [channel.outside for channel in task.channels],
        series=case.series,
        scales=[case.hu],
        modalities=modalities,
    )
    # `read_channels` returns all channels on the grid of the first: one orientation holds for all.
    first_image, grid, orientation = orient(stored_images[0], volume.grid)
    further_images = [orientation.to_lps(image) for image in stored_images[1:]]
    images, facts, findings = check_channels(
        [first_image, *further_images], modalities, scale=case.hu
    )
    first_image = images[0]
    # The checks of the labels look for air, tissue and bone by their HU, which an error in the
    # values puts in doubt.
    is_hu = task.is_ct and are_hu(facts, modalities)
    findings += volume.findings
    findings += audit_extent(grid)
    labels = None
    if case.labels is not None:
        labels, label_findings = _read_labels(
            case, task, label_values, grid, orientation, volume.array.shape
        )
        findings += label_findings
    # The checks of an empty label map would also report every region as missing.
    is_empty = any(finding.code == "empty_labels" for finding in findings)
    volumes_ml: dict[str, float] = {}
    if labels is not None:
        volumes_ml = measure_volumes(labels, grid, task)
    if labels is not None and not is_empty:
        image_hu = first_image if is_hu else None
        findings += audit_labels(image_hu, labels, grid, task, case.trust, volumes_ml)
        if image_hu is not None:
            placement_findings = audit_placement(image_hu, labels, grid)
            # Mirrored or turned labels also look shifted: one finding is enough.
            if not placement_findings:
                placement_findings = audit_shift(image_hu, labels, grid)
            findings += placement_findings
    audit = _summarise(first_image, grid, volumes_ml, facts[0], findings, is_hu=is_hu)
    source = SourceCase(sources, images, labels, grid, audit)
    if audit.not_ignored(case.ignore_findings, Severity.error):
        raise CaseRefusedError(case, audit, source)
    return source


def _summarise(
    image: np.ndarray,
    grid: VoxelGrid,
    volumes_ml: dict[str, float],
    facts: ImageFacts,
    findings: Sequence[Finding],
    *,
    is_hu: bool,
) -> CaseAudit:
    """Summarise a case for the comparison of the cases of a table.

    Args:
        image: Oriented first channel, (D, H, W).
        grid: Its grid.
        volumes_ml: Volume of each label; empty without a label map.
        facts: Histogram of the image.
        findings: All findings.
        is_hu: Whether the values are HU. If not, the audit has no thumbnail and no profile, and the
            case is not searched for near copies.
    """
    thumbnail: tuple[int, ...] = ()
    profile: Profile = ()
    if is_hu:
        thumbnail = make_thumbnail(image)
        profile = make_profile(image, grid.spacing_mm)
    return CaseAudit(
        grid=grid,
        hu=facts.summary(),
        voxels_sha256=hash_voxels(image),
        volumes_ml=volumes_ml,
        findings=tuple(findings),
        thumbnail=thumbnail,
        profile=profile,
    )


def _read_labels(
    case: Case,
    task: Task,
    label_values: LabelValues,
    grid: VoxelGrid,
    orientation: Orientation,
    stored_shape: Sequence[int],
) -> tuple[np.ndarray | None, list[Finding]]:
    """Read the labels of a case on the grid of its image.

    Args:
        case: The case, with labels.
        task: Labels and channels.
        label_values: Value, or name of a structure, in the file to label name.
        grid: Grid of the oriented image.
        orientation: Orientation of the stored image.
        stored_shape: Shape of the image in storage order.

    Returns:
        Label map in the task's values, None if it does not fit the image; and its findings.
    """
    from medseg.data.reference import holds_structures, read_reference

    assert case.labels is not None, "only called for cases with labels"
    volume, values = read_reference(
        case.labels,
        label_values,
        image=case.images(len(task.channels))[0],
        series=case.series,
        modality=task.channels[0].modality,
        kept=task.values,
    )
    findings = [finding.within("label map") for finding in volume.findings]
    oriented, label_grid, _ = orient(volume.array, volume.grid)
    misfits = audit_grids(grid, label_grid, stored_shapes=(stored_shape, volume.array.shape))
    findings += misfits
    if misfits:
        is_ignored = all(misfit.code in case.ignore_findings for misfit in misfits)
        if not is_ignored:
            return None, findings
        # By ignoring the misfit, the user states that only the header of the label map is wrong,
        # and that its voxels are stored in the order of the image.
        oriented = orientation.to_lps(volume.array)
    # An empty label map is probably a failed export, unless the columns of trust state that all
    # parts are absent. An empty structure is intended: its file says that it is absent.
    is_absent = all(case.trust.get(name) == ABSENT for name in task.parts)
    may_be_empty = is_absent or holds_structures(case.labels)
    labels, value_findings = map_values(oriented, task, values, may_be_empty=may_be_empty)
    return labels, findings + value_findings
