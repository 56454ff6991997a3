"""Audit of a data set: comparison of its cases, and the table of all findings."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from medseg.data.audit.finding import CaseAudit, make_finding
from medseg.data.audit.image import THUMBNAIL_SIZE
from medseg.data.audit.tissue_profile import NEAR_PROFILE, Areas, areas_of, profile_distance
from medseg.data.case_table import Case
from medseg.findings import Finding, Severity
from medseg.io.tables import csv_text

DUPLICATE = "duplicate_image"
READY = "ready"
REFUSED = "refused"
FAILED = "failed"
# Column of the table that lists the codes of each severity. The column of information is called
# "notes", as in older tables.
SEVERITY_COLUMNS = {
    Severity.error: "errors",
    Severity.warning: "warnings",
    Severity.information: "notes",
}

# With fewer cases than MIN_CASES, no spacing counts as usual. Spacings of one hospital agree within
# OUTLIER_FACTOR.
MIN_CASES = 5
OUTLIER_FACTOR = 3.0
# Largest `copy_distance` of copies. Scans of different patients differ by more than 100 HU, a scan
# from its noisier or slightly cropped copy by less than 10.
NEAR_HU = 12.0
# Largest `contrast_distance` of copies. Measured on 39 scans: at most 0.093 between a scan and its
# copy (scaled by 0.8 or 1.2, shifted by 200 HU, or scaled by 0.9 and shifted), at least 0.28
# between scans of different patients.
NEAR_CONTRAST = 0.1
# Radius of the round field of view, in blocks of a thumbnail. The corners beyond it are left out:
# they hold padding, which the clipping of the thumbnail keeps from scaling with the rest.
FIELD_RADIUS = 3.6
Contrast = np.ndarray
"""Values of a thumbnail within the field of view, flat, with mean 0 and length 1."""


@dataclass(frozen=True)
class AuditedCase:
    """A case with the result of its audit.

    Attributes:
        case: Row of the case table.
        audit: Its audit; None if it could not be read.
        failure: Why the case could not be read or stored in the cache; else empty.
        comparison: Findings of the comparison with the other cases.
    """

    case: Case
    audit: CaseAudit | None
    failure: str = ""
    comparison: tuple[Finding, ...] = ()

    def findings(self) -> list[Finding]:
        """List all findings that the case does not ignore, errors first."""
        findings = list(self.comparison)
        if self.audit is not None:
            findings = [*self.audit.findings, *self.comparison]
        sorted_findings = []
        # `Severity` lists errors first.
        for severity in Severity:
            for finding in findings:
                is_ignored = finding.code in self.case.ignore_findings
                if finding.severity is severity and not is_ignored:
                    sorted_findings.append(finding)
        return sorted_findings

    @property
    def status(self) -> str:
        """`failed` to be read or stored, `refused` by the audit, or `ready`."""
        if self.failure:
            return FAILED
        if any(finding.severity is Severity.error for finding in self.findings()):
            return REFUSED
        return READY


def compare_cases(cases: Sequence[AuditedCase]) -> list[AuditedCase]:
    """Add the findings that need a comparison of the cases: unusual spacings and copies.

    Of two copies, the case that is later in the table gets the finding.

    Returns:
        The cases in their order.
    """
    spacings_mm = [audited.audit.grid.spacing_mm for audited in cases if audited.audit is not None]
    usual_mm: list[float] = []
    if len(spacings_mm) >= MIN_CASES:
        # One sequence per axis.
        spacings_by_axis = zip(*spacings_mm, strict=True)
        usual_mm = [median(spacings) for spacings in spacings_by_axis]
    # Without the column `patient`, each case counts as a patient of its own. Then the table makes
    # no claim about patients that a copy could contradict.
    names_patients = any(audited.case.patient != audited.case.name for audited in cases)
    earlier: list[AuditedCase] = []
    earlier_areas: list[tuple[Case, Areas]] = []
    earlier_contrasts: list[tuple[Case, Contrast]] = []
    compared_cases = []
    for audited in cases:
        case = audited.case
        findings: list[Finding] = []
        if audited.audit is not None:
            findings += _odd_spacing(audited.audit, usual_mm)
            findings += _repeated_image(case, audited.audit, earlier)
            # Three searches for a copy of another patient's scan, from the strictest to the
            # loosest. The first that finds one ends them, since the looser ones would find the
            # same copy again.
            copies = list(_near_images(case, audited.audit, earlier, names_patients))
            contrast = contrast_of(audited.audit.thumbnail)
            if contrast is not None:
                if not copies:
                    copies += _scaled_copies(case, contrast, earlier_contrasts, names_patients)
                earlier_contrasts.append((case, contrast))
            areas = areas_of(audited.audit.profile)
            if areas is not None:
                if not copies:
                    copies += _near_profiles(case, areas, earlier_areas, names_patients)
                earlier_areas.append((case, areas))
            findings += copies
        compared_cases.append(replace(audited, comparison=tuple(findings)))
        earlier.append(audited)
    return compared_cases


def _odd_spacing(audit: CaseAudit, usual_mm: Sequence[float]) -> Iterator[Finding]:
    """Find a spacing that is far from the usual one.

    Args:
        audit: Audit of the case.
        usual_mm: Median spacing of all cases, (z, y, x); empty where there are too few.
    """
    differences = []
    names = ("slices", "pixels")
    # The shortest sequence ends the loop: only z and y are compared, since the spacing along y
    # stands for the pixels. Without a usual spacing, nothing is compared.
    for name, step_mm, median_mm in zip(names, audit.grid.spacing_mm, usual_mm, strict=False):
        if max(step_mm / median_mm, median_mm / step_mm) > OUTLIER_FACTOR:
            differences.append(
                f"its {name} are {step_mm:.3g} mm apart where the median of all cases is "
                f"{median_mm:.3g} mm"
            )
    if differences:
        yield make_finding("spacing_outlier", differences=" and ".join(differences))


def _repeated_image(
    case: Case, audit: CaseAudit, earlier: Sequence[AuditedCase]
) -> Iterator[Finding]:
    """Find the first earlier case of the same patient that has the same voxels."""
    for audited in earlier:
        if audited.audit is None or audited.case.patient != case.patient:
            continue
        if audited.audit.voxels_sha256 == audit.voxels_sha256:
            yield make_finding(DUPLICATE, twin=audited.case.name)
            return


def _near_images(
    case: Case, audit: CaseAudit, earlier: Sequence[AuditedCase], names_patients: bool
) -> Iterator[Finding]:
    """Find the earlier case of another patient with the nearest image, if it is near or the same.

    Args:
        case: Row of the case table.
        audit: Its audit.
        earlier: The cases before it in the table.
        names_patients: Whether the table names patients.
    """
    distances = []
    for audited in earlier:
        if audited.audit is not None and audited.case.patient != case.patient:
            distances.append((copy_distance(audited.audit, audit), audited.case))
    distance, twin = _nearest(distances, case)
    if distance == 0:
        kind = f"{DUPLICATE}:patients"
        yield make_finding(kind, twin=twin.name, patient=case.patient, twin_patient=twin.patient)
    elif distance < NEAR_HU:
        claim = _claim(case, twin, names_patients)
        kind = "near_copy" if claim else "near_copy:unclaimed"
        yield make_finding(kind, twin=twin.name, difference=distance, claim=claim)


def _nearest(distances: Sequence[tuple[float, Case]], case: Case) -> tuple[float, Case]:
    """Choose the nearest of other cases, the first of equally near ones.

    Args:
        distances: Distance of each other case, and the case.
        case: The case itself.

    Returns:
        The smallest distance and its case; infinity and `case` where there are no others.
    """
    return min(distances, key=lambda pair: pair[0], default=(math.inf, case))


def _scaled_copies(
    case: Case, contrast: Contrast, earlier: Sequence[tuple[Case, Contrast]], names_patients: bool
) -> Iterator[Finding]:
    """Find the earlier case of another patient with the same image but for scale and shift."""
    distances = []
    for earlier_case, earlier_contrast in earlier:
        if earlier_case.patient != case.patient:
            distances.append((contrast_distance(earlier_contrast, contrast), earlier_case))
    distance, twin = _nearest(distances, case)
    if distance < NEAR_CONTRAST:
        claim = _claim(case, twin, names_patients)
        kind = "near_copy:scaled" if claim else "near_copy:scaled_unclaimed"
        yield make_finding(kind, twin=twin.name, difference=distance, claim=claim)


def _near_profiles(
    case: Case, areas: Areas, earlier: Sequence[tuple[Case, Areas]], names_patients: bool
) -> Iterator[Finding]:
    """Find the earlier case of another patient with the nearest profile, if it is near."""
    distances = []
    for earlier_case, earlier_areas in earlier:
        if earlier_case.patient != case.patient:
            distances.append((profile_distance(earlier_areas, areas), earlier_case))
    difference, twin = _nearest(distances, case)
    if difference < NEAR_PROFILE:
        claim = _claim(case, twin, names_patients)
        kind = "near_copy:profile" if claim else "near_copy:profile_unclaimed"
        yield make_finding(kind, twin=twin.name, difference=difference, claim=claim)


def _claim(case: Case, twin: Case, names_patients: bool) -> str:
    """Describe the claim of the case table that a copy contradicts.

    The table may claim that the two cases have different patients, or that they are on different
    sides of the split. Empty if it claims neither.
    """
    if names_patients:
        return f"the patient is {case.patient!r} here and {twin.patient!r} there"
    has_splits = bool(case.split and twin.split)
    if has_splits and case.split != twin.split:
        return f"the split is {case.split} here and {twin.split} there"
    has_folds = None not in (case.fold, twin.fold)
    if has_folds and case.fold != twin.fold:
        return f"the fold is {case.fold} here and {twin.fold} there"
    # Tables of several sources may have different numbers of folds.
    for number, (side, twin_side) in enumerate(zip(case.fold_sides, twin.fold_sides, strict=False)):
        has_sides = bool(side and twin_side)
        if has_sides and side != twin_side:
            return f"fold_{number} is {side} here and {twin_side} there"
    return ""


def copy_distance(audit: CaseAudit, twin: CaseAudit) -> float:
    """Measure how far two images are from being copies.

    Returns:
        0 for the same voxels; else the root mean square difference of their thumbnails in HU, above
        0; infinite where one has no thumbnail.
    """
    if audit.voxels_sha256 == twin.voxels_sha256:
        return 0.0
    if not audit.thumbnail or not twin.thumbnail:
        return math.inf
    difference_hu = np.array(audit.thumbnail) - np.array(twin.thumbnail)
    root_mean_square_hu = float(np.sqrt(np.mean(difference_hu**2)))
    # 0 means equal voxels, which equal thumbnails do not prove.
    return max(1e-9, root_mean_square_hu)


def contrast_of(thumbnail: Sequence[int]) -> Contrast | None:
    """Prepare a thumbnail for `contrast_distance`; None for an empty or a constant one."""
    if not thumbnail:
        return None
    blocks_hu = np.array(thumbnail, dtype=np.float64).reshape((THUMBNAIL_SIZE,) * 3)
    # Position of each block of a slice from its middle, in blocks.
    y, x = np.indices(blocks_hu.shape[1:]) - (THUMBNAIL_SIZE - 1) / 2
    is_in_field = np.hypot(y, x) <= FIELD_RADIUS
    values_hu = blocks_hu[:, is_in_field]  # (slices of blocks, blocks in the field)
    is_constant = np.ptp(values_hu) == 0
    if is_constant:
        return None
    deviations_hu = values_hu - values_hu.mean()
    return np.asarray(deviations_hu / np.linalg.norm(deviations_hu)).ravel()


def contrast_distance(first: Contrast, second: Contrast) -> float:
    """Measure how far two images are from being copies with another scale and shift.

    A line is fitted to the values of one image as a function of the values of the other. With the
    correlation r, the residuals have √(1 - r²) of the standard deviation of the values.

    Returns:
        √(1 - r²), 0 to 1; 1 for every negative r, as of an image and its negative.
    """
    # Mean 0 and length 1 make the dot product the correlation; rounding may bring it above 1.
    correlation = min(1.0, max(0.0, float(first @ second)))
    return math.sqrt(1.0 - correlation**2)


def audit_csv(cases: Sequence[AuditedCase]) -> str:
    """Format the table of all cases, one line each."""
    columns = ["case", "patient", "status"]
    columns += ["size_z", "size_y", "size_x", "spacing_z_mm", "spacing_y_mm", "spacing_x_mm"]
    columns += ["hu_min", "hu_p01", "hu_p50", "hu_p99", "hu_max"]
    # The labels of all cases, each once, in the order in which they first appear.
    volume_columns: dict[str, None] = {}
    for audited in cases:
        if audited.audit is not None:
            volume_columns |= {f"{name}_ml": None for name in audited.audit.volumes_ml}
    columns += [*volume_columns, *SEVERITY_COLUMNS.values(), "details"]
    return csv_text([_row(audited) for audited in cases], columns)


def _row(audited: AuditedCase) -> dict[str, object]:
    """Make the row of a case, column to cell; a case that could not be read has few cells."""
    row: dict[str, object] = {
        "case": audited.case.name,
        "patient": audited.case.patient,
        "status": audited.status,
    }
    audit = audited.audit
    if audit is not None:
        for axis, size, mm in zip("zyx", audit.grid.shape, audit.grid.spacing_mm, strict=True):
            row |= {f"size_{axis}": size, f"spacing_{axis}_mm": f"{mm:.6g}"}
        row |= {f"hu_{name}": f"{value:g}" for name, value in audit.hu.items()}
        row |= {f"{name}_ml": _ml_text(volume) for name, volume in audit.volumes_ml.items()}
    findings = audited.findings()
    for severity, column in SEVERITY_COLUMNS.items():
        codes = [finding.code for finding in findings if finding.severity is severity]
        row[column] = " ".join(codes)
    details = [audited.failure] if audited.failure else []
    details += map(str, findings)
    row["details"] = " | ".join(details)
    return row


def _ml_text(volume_ml: float) -> str:
    """Format a volume with one decimal; with two digits below 1 ml, so that only nothing is 0.0."""
    if 0 < volume_ml < 1:
        return f"{volume_ml:.2g}"
    return f"{volume_ml:.1f}"
