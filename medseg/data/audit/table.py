"""The cases of a table beside each other: what only a comparison shows, and the table of all that was found."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from medseg.data.audit.case import CaseAudit
from medseg.data.audit.finding import Finding, Severity, error, warning
from medseg.data.case_table import Case

DUPLICATE = "duplicate_image"
READY, REFUSED, FAILED = "ready", "refused", "failed"

# Fewer cases have no usual spacing; scanners of one hospital lie within a factor of three.
MIN_CASES = 5
OUTLIER_FACTOR = 3.0


@dataclass(frozen=True)
class AuditedCase:
    """What became of one case.

    Attributes:
        case: The case.
        audit: What was found; None where it could not be read.
        failure: Why it could not be read or stored; empty where it could.
        compared: What the comparison with the other cases found.
    """

    case: Case
    audit: CaseAudit | None
    failure: str = ""
    compared: tuple[Finding, ...] = ()

    def findings(self) -> list[Finding]:
        """All findings that the case does not ignore, errors first."""
        found = [*(self.audit.findings if self.audit else ()), *self.compared]
        order = list(Severity)
        return sorted(
            (one for one in found if one.code not in self.case.ignore_findings), key=lambda one: order.index(one.severity)
        )

    @property
    def status(self) -> str:
        """`ready`, `refused` by the audit, or `failed` to be read."""
        if self.failure:
            return FAILED
        return REFUSED if any(finding.severity is Severity.error for finding in self.findings()) else READY


def compare_cases(cases: Sequence[AuditedCase]) -> list[AuditedCase]:
    """Add what only the comparison of the cases shows; they stay in their order."""
    audits = [one.audit for one in cases if one.audit is not None]
    usual_mm = {}
    if len(audits) >= MIN_CASES:
        usual_mm = {axis: median(audit.grid.spacing_mm[axis] for audit in audits) for axis in (0, 1)}
    first: dict[str, Case] = {}
    compared = []
    for one in cases:
        found: list[Finding] = []
        if one.audit is not None:
            found += _audit_spacing(one.audit, usual_mm)
            twin = first.setdefault(one.audit.voxels_sha256, one.case)
            if twin is not one.case:
                found.append(_duplicate(one.case, twin))
        compared.append(replace(one, compared=tuple(found)))
    return compared


def _audit_spacing(audit: CaseAudit, usual_mm: Mapping[int, float]) -> list[Finding]:
    odd = []
    for axis, what in ((0, "slices"), (1, "pixels")):
        spacing_mm = audit.grid.spacing_mm[axis]
        usual = usual_mm.get(axis, spacing_mm)
        if max(spacing_mm / usual, usual / spacing_mm) > OUTLIER_FACTOR:
            odd.append(f"its {what} are {spacing_mm:.3g} mm apart where the median of all cases is {usual:.3g} mm")
    if not odd:
        return []
    cure = "right where the scanner was set so; a header in another unit looks like this, too"
    return [warning("spacing_outlier", " and ".join(odd), cure)]


def _duplicate(case: Case, twin: Case) -> Finding:
    if case.patient == twin.patient:
        message = f"its image is voxel by voxel that of the case {twin.name!r} of the same patient"
        return warning(DUPLICATE, message, "take one of them out, else it counts twice")
    return error(
        DUPLICATE,
        f"its image is voxel by voxel that of the case {twin.name!r}, but the patient is {case.patient!r} here and "
        f"{twin.patient!r} there: one could be trained on and the other validated",
        "take one of them out, or give both the same patient in the case table",
    )


def audit_csv(cases: Sequence[AuditedCase]) -> str:
    """Make the table of all cases, one line each."""
    labels = list(dict.fromkeys(name for one in cases if one.audit for name in one.audit.volumes_ml))
    rows = []
    for one in cases:
        row: dict[str, object] = {"case": one.case.name, "patient": one.case.patient, "status": one.status}
        if one.audit is not None:
            for axis, name in enumerate("zyx"):
                row[f"size_{name}"] = one.audit.grid.shape[axis]
                row[f"spacing_{name}_mm"] = f"{one.audit.grid.spacing_mm[axis]:.6g}"
            row |= {f"hu_{name}": f"{value:g}" for name, value in one.audit.hu.items()}
            row |= {f"{name}_ml": f"{volume:.1f}" for name, volume in one.audit.volumes_ml.items()}
        for severity in Severity:
            row[f"{severity.value}s"] = " ".join(finding.code for finding in one.findings() if finding.severity is severity)
        row["details"] = " | ".join([one.failure] * bool(one.failure) + [str(finding) for finding in one.findings()])
        rows.append(row)
    columns = [
        *("case", "patient", "status"),
        *(f"size_{axis}" for axis in "zyx"),
        *(f"spacing_{axis}_mm" for axis in "zyx"),
        *(f"hu_{name}" for name in ("min", "p01", "p50", "p99", "max")),
        *(f"{name}_ml" for name in labels),
        *(f"{severity.value}s" for severity in Severity),
        "details",
    ]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
