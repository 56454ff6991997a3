"""Source cases: the files of a case read once, oriented and audited."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from medseg.data.audit.finding import CaseAudit
from medseg.data.audit.image import check_channels, hash_voxels, make_thumbnail
from medseg.data.audit.labels import (
    ABSENT,
    audit_extent,
    audit_grids,
    audit_labels,
    map_values,
    measure_volumes,
)
from medseg.data.audit.placement import audit_placement, audit_shift
from medseg.data.audit.tissue_profile import make_profile
from medseg.data.case_table import Case
from medseg.data.source_files import fingerprint, sources_of
from medseg.errors import UserError
from medseg.findings import Severity
from medseg.geometry.grid import VoxelGrid
from medseg.task import LabelValues, Task


@dataclass(frozen=True)
class SourceCase:
    """A case as it was read.

    Attributes:
        sources: Role of each file to its fingerprint, taken before it was read.
        images: Oriented image of each channel, (D, H, W); a CT in HU, with its padding below air.
        labels: Label map in the task's values on the same grid, uint8; None where the case has
            none, or none that fits.
        grid: Grid of all.
        audit: Measurements and findings.
    """

    sources: dict[str, dict[str, Any]]
    images: list[np.ndarray]
    labels: np.ndarray | None
    grid: VoxelGrid
    audit: CaseAudit

    @property
    def image_hu(self) -> np.ndarray:
        """Image of the first channel."""
        return self.images[0]


class CaseRefusedError(UserError):
    """Refusal of a case with an error that the case does not ignore.

    Attributes:
        audit: Measurements and findings.
        source: The case as it was read; None where only its entry in the cache was opened.
    """

    def __init__(self, case: Case, audit: CaseAudit, source: SourceCase | None = None) -> None:
        errors = audit.heeded(case.ignore_findings, Severity.error)
        super().__init__(f"The case {case.name!r} is refused: {'; and '.join(map(str, errors))}.")
        self.audit, self.source = audit, source


def read_source(case: Case, task: Task, label_values: LabelValues) -> SourceCase:
    """Read and audit a case.

    Args:
        case: The case; its HU scale is applied to the first channel, the findings that it ignores
            stop nothing.
        task: Labels, regions and channels.
        label_values: Value, or name of a structure, in the file to label name.

    Raises:
        CaseRefusedError: If the audit finds an error.
        UserError: If a file cannot be read.
    """
    from medseg.data.reference import (
        is_named,
        read_reference,
    )  # here, so that opening the cache needs no reader
    from medseg.preprocess.channels import read_channels
    from medseg.preprocess.orient import orient

    # Before reading: a file that changes while it is read then makes the entry stale.
    sources = {role: fingerprint(path) for role, path in sources_of(case, task).items()}
    paths = case.images(len(task.channels))
    outside, modalities = (
        [one.outside for one in task.channels],
        [one.modality for one in task.channels],
    )
    stacked, volume = read_channels(
        paths, outside, series=case.series, scales=[case.hu], modalities=modalities
    )
    image_hu, grid, orientation = orient(stacked[0], volume.grid)
    images, facts, findings = check_channels(
        [image_hu, *map(orientation.to_lps, stacked[1:])], modalities
    )
    image_hu = images[0]
    is_hu = task.is_ct and not any(finding.severity is Severity.error for finding in findings)
    findings += volume.findings
    findings += audit_extent(grid)
    labels = None
    if case.labels is not None:
        label_volume, values = read_reference(
            case.labels,
            label_values,
            paths[0],
            case.series,
            modalities[0],
            kept=task.values,
        )
        findings += [finding.within("label map") for finding in label_volume.findings]
        stored, label_grid, _ = orient(label_volume.array, label_volume.grid)
        misfits = audit_grids(grid, label_grid, (volume.array.shape, label_volume.array.shape))
        findings += misfits
        if misfits and all(misfit.code in case.ignore_findings for misfit in misfits):
            # The header of the label map is wrong: its voxels lie on those of the image.
            stored, misfits = orientation.to_lps(label_volume.array), []
        if not misfits:
            # A structure that is there and empty states its absence.
            may_be_empty = is_named(case.labels) or all(
                case.trust.get(name) == ABSENT for name in task.parts
            )
            labels, odd = map_values(stored, task, values, may_be_empty=may_be_empty)
            findings += odd
            if not any(finding.code == "empty_labels" for finding in odd):
                findings += audit_labels(
                    image_hu if is_hu else None, labels, grid, task, case.trust
                )
                if is_hu:
                    findings += audit_placement(image_hu, labels, grid) or audit_shift(
                        image_hu, labels, grid
                    )
    volumes_ml = {} if labels is None else measure_volumes(labels, grid, task)
    audit = CaseAudit(
        grid,
        facts[0].summary(),
        hash_voxels(image_hu),
        volumes_ml,
        tuple(findings),
        make_thumbnail(image_hu) if is_hu else (),
        make_profile(image_hu, grid.spacing_mm) if is_hu else (),
    )
    source = SourceCase(sources, images, labels, grid, audit)
    if audit.heeded(case.ignore_findings, Severity.error):
        raise CaseRefusedError(case, audit, source)
    return source
