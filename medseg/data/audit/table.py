"""Audit of a data set: comparison of its cases, and the table of all findings."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from medseg.data.audit.finding import CaseAudit, find
from medseg.data.audit.tissue_profile import NEAR_PROFILE, Areas, areas_of, profile_distance
from medseg.data.case_table import Case
from medseg.findings import Finding, Severity
from medseg.io.tables import csv_text

DUPLICATE = "duplicate_image"
READY, REFUSED, FAILED = "ready", "refused", "failed"
# Columns of codes; that of information keeps its first name.
SEVERITY_COLUMNS = {
    Severity.error: "errors",
    Severity.warning: "warnings",
    Severity.information: "notes",
}

# Fewer cases have no usual spacing; spacings of one hospital agree within a factor of three.
MIN_CASES = 5
OUTLIER_FACTOR = 3.0
# Scans of different patients differ by more than 100 HU, a scan from its noisier or slightly
# cropped copy by less than 10.
NEAR_HU = 12.0


@dataclass(frozen=True)
class AuditedCase:
    """Result of one case.

    Attributes:
        case: The case.
        audit: Its audit; None if it could not be read.
        failure: Why it could not be read or stored; else empty.
        compared: Findings of the comparison with the other cases.
    """

    case: Case
    audit: CaseAudit | None
    failure: str = ""
    compared: tuple[Finding, ...] = ()

    def findings(self) -> list[Finding]:
        """List all findings that the case does not ignore, errors first."""
        found = [*(self.audit.findings if self.audit else ()), *self.compared]
        heeded = (one for one in found if one.code not in self.case.ignore_findings)
        return sorted(heeded, key=lambda one: list(Severity).index(one.severity))

    @property
    def status(self) -> str:
        """`ready`, `refused` by the audit, or `failed` to be read."""
        if self.failure:
            return FAILED
        return (
            REFUSED
            if any(finding.severity is Severity.error for finding in self.findings())
            else READY
        )


def compare_cases(cases: Sequence[AuditedCase]) -> list[AuditedCase]:
    """Add the findings that need a comparison of the cases: outliers of the spacing and duplicates; the order stays."""
    audits = [one.audit for one in cases if one.audit is not None]
    usual_mm = {}
    if len(audits) >= MIN_CASES:
        usual_mm = {
            axis: median(audit.grid.spacing_mm[axis] for audit in audits) for axis in (0, 1)
        }
    # A table without the column `patient` takes each case for another patient, which nobody has
    # claimed.
    names_patients = any(audited.case.patient != audited.case.name for audited in cases)
    earlier: list[AuditedCase] = []
    earlier_areas: list[tuple[Case, Areas]] = []
    compared_cases = []
    for audited in cases:
        findings: list[Finding] = []
        if audited.audit is not None:
            areas = areas_of(audited.audit.profile)
            copies = list(_compare(audited.case, audited.audit, usual_mm, earlier, names_patients))
            findings += copies
            is_copy = any(finding.code in (DUPLICATE, "near_copy") for finding in copies)
            if areas is not None and not is_copy:
                findings += _near_profiles(audited.case, areas, earlier_areas, names_patients)
            if areas is not None:
                earlier_areas.append((audited.case, areas))
        compared_cases.append(replace(audited, compared=tuple(findings)))
        earlier.append(audited)
    return compared_cases


def _compare(
    case: Case,
    audit: CaseAudit,
    usual_mm: Mapping[int, float],
    earlier: Sequence[AuditedCase],
    names_patients: bool,
) -> Iterator[Finding]:
    """Compare a case with the usual spacing, and with the cases before it in the table."""
    odd = [
        f"its {what} are {spacing_mm:.3g} mm apart where the median of all cases is {usual_mm[axis]:.3g} mm"
        for axis, what, spacing_mm in zip(
            (0, 1), ("slices", "pixels"), audit.grid.spacing_mm, strict=False
        )
        if axis in usual_mm
        and max(spacing_mm / usual_mm[axis], usual_mm[axis] / spacing_mm) > OUTLIER_FACTOR
    ]
    if odd:
        yield find("spacing_outlier", differences=" and ".join(odd))
    distances = [(copy_distance(one.audit, audit), one.case) for one in earlier if one.audit]
    distance, twin = min(distances, key=lambda pair: pair[0], default=(math.inf, case))
    names = {"twin": twin.name, "patient": case.patient, "twin_patient": twin.patient}
    if distance == 0:
        yield find(DUPLICATE if case.patient == twin.patient else f"{DUPLICATE}:patients", **names)
    elif distance < NEAR_HU and case.patient != twin.patient:
        claim = _claim(case, twin, names_patients)
        kind = "near_copy" if claim else "near_copy:unclaimed"
        yield find(kind, twin=twin.name, difference=distance, claim=claim)


def _near_profiles(
    case: Case, areas: Areas, earlier: Sequence[tuple[Case, Areas]], names_patients: bool
) -> Iterator[Finding]:
    """Find the case of another patient whose profile is nearest, if it is near."""
    distances = [
        (profile_distance(other_areas, areas), other)
        for other, other_areas in earlier
        if other.patient != case.patient
    ]
    difference, twin = min(distances, key=lambda pair: pair[0], default=(math.inf, case))
    if difference < NEAR_PROFILE:
        claim = _claim(case, twin, names_patients)
        kind = "near_copy:profile" if claim else "near_copy:profile_unclaimed"
        yield find(kind, twin=twin.name, difference=difference, claim=claim)


def _claim(case: Case, twin: Case, names_patients: bool) -> str:
    """Say what the case table claims that two copies contradict: two patients, or two sides; empty if it claims neither."""
    if names_patients:
        return f"the patient is {case.patient!r} here and {twin.patient!r} there"
    if case.split != twin.split and case.split and twin.split:
        return f"the split is {case.split} here and {twin.split} there"
    if case.fold != twin.fold and None not in (case.fold, twin.fold):
        return f"the fold is {case.fold} here and {twin.fold} there"
    # Tables of several sources may have different numbers of folds.
    for number, (side, twin_side) in enumerate(zip(case.fold_sides, twin.fold_sides, strict=False)):
        if side != twin_side and side and twin_side:
            return f"fold_{number} is {side} here and {twin_side} there"
    return ""


def copy_distance(one: CaseAudit, other: CaseAudit) -> float:
    """Measure how far two images are from being copies.

    Returns:
        0 for the same voxels; else the root mean square difference of their thumbnails in HU, above
        0; infinite where one has none.
    """
    if one.voxels_sha256 == other.voxels_sha256:
        return 0.0
    if not one.thumbnail or not other.thumbnail:
        return math.inf
    return max(
        1e-9, float(np.sqrt(np.mean((np.array(one.thumbnail) - np.array(other.thumbnail)) ** 2)))
    )


def audit_csv(cases: Sequence[AuditedCase]) -> str:
    """Format the table of all cases, one line each."""
    grid = ["size_z", "size_y", "size_x", "spacing_z_mm", "spacing_y_mm", "spacing_x_mm"]
    hu = ["hu_min", "hu_p01", "hu_p50", "hu_p99", "hu_max"]
    volumes = dict.fromkeys(
        f"{name}_ml" for one in cases if one.audit for name in one.audit.volumes_ml
    )
    columns = [
        "case",
        "patient",
        "status",
        *grid,
        *hu,
        *volumes,
        *SEVERITY_COLUMNS.values(),
        "details",
    ]
    return csv_text([_row(one) for one in cases], columns)


def _row(one: AuditedCase) -> dict[str, object]:
    """Make the line of a case."""
    row: dict[str, object] = {
        "case": one.case.name,
        "patient": one.case.patient,
        "status": one.status,
    }
    if one.audit is not None:
        for axis, size, mm in zip(
            "zyx", one.audit.grid.shape, one.audit.grid.spacing_mm, strict=True
        ):
            row |= {f"size_{axis}": size, f"spacing_{axis}_mm": f"{mm:.6g}"}
        row |= {f"hu_{name}": f"{value:g}" for name, value in one.audit.hu.items()}
        row |= {f"{name}_ml": f"{volume:.1f}" for name, volume in one.audit.volumes_ml.items()}
    found = one.findings()
    for level, column in SEVERITY_COLUMNS.items():
        row[column] = " ".join(finding.code for finding in found if finding.severity is level)
    return row | {
        "details": " | ".join(
            [one.failure] * bool(one.failure) + [str(finding) for finding in found]
        )
    }
