"""Comparison of cases, the table of all findings, and their page of documentation."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import ndimage

from medseg.data.audit.finding import CODES, KINDS, CaseAudit, check_ignored
from medseg.data.audit.image import make_thumbnail
from medseg.data.audit.table import AuditedCase, audit_csv, compare_cases
from medseg.data.case_table import Case
from medseg.errors import UserError
from medseg.findings import Finding, Severity
from medseg.geometry.grid import VoxelGrid

HU = {"min": -1024.0, "p01": -1000.0, "p50": -300.0, "p99": 800.0, "max": 1500.5}


def audited(
    name: str,
    spacing_mm: tuple[float, float, float] = (1.0, 0.7, 0.7),
    *findings: Finding,
    patient: str = "",
    voxels: str = "",
    image: np.ndarray | None = None,
    ignore_findings: frozenset[str] = frozenset(),
) -> AuditedCase:
    case = Case(name, Path(name), None, patient or name, ignore_findings=ignore_findings)
    thumbnail = () if image is None else make_thumbnail(image)
    return AuditedCase(
        case,
        CaseAudit(
            VoxelGrid((9, 8, 7), spacing_mm),
            HU,
            voxels or name,
            {"left_lung": 12.34},
            findings,
            thumbnail,
        ),
    )


@pytest.mark.parametrize(("num_cases", "spacing_mm", "said"), [
    (5, (3.1, 0.7, 0.7), "its slices are 3.1 mm apart where the median of all cases is 1 mm"),
    (5, (1.0, 0.2, 0.2), "its pixels are 0.2 mm apart where the median of all cases is 0.7 mm"),
    (5, (2.9, 0.3, 0.3), None),
    (4, (9.0, 0.7, 0.7), None),
])  # fmt: skip
def test_a_spacing_is_an_outlier_among_enough_others(
    num_cases: int, spacing_mm: tuple[float, float, float], said: str | None
) -> None:
    cases = [
        *(audited(f"c{number}") for number in range(num_cases - 1)),
        audited("odd", spacing_mm),
    ]
    compared = compare_cases(cases)
    assert all(audited_case.comparison == () for audited_case in compared[:-1])
    assert [finding.message for finding in compared[-1].comparison] == ([said] if said else [])


def test_copies_are_found_in_the_order_of_the_table() -> None:
    cases = [
        audited("a", voxels="x", patient="p"),
        audited("b", voxels="y", patient="p"),
        audited("c", voxels="x", patient="p"),
        audited("d", voxels="x", patient="q"),
        audited("e", voxels="x", patient="r", ignore_findings=frozenset({"duplicate_image"})),
        AuditedCase(Case("f", Path("f"), None, "f"), None, failure="no such file"),
    ]
    compared = compare_cases(cases)
    found = [
        [(finding.code, finding.severity.value) for finding in audited_case.findings()]
        for audited_case in compared
    ]
    assert found == [
        [],
        [],
        [("duplicate_image", "warning")],
        [("duplicate_image", "error")],
        [],
        [],
    ]
    assert [audited_case.status for audited_case in compared] == [
        "ready",
        "ready",
        "ready",
        "refused",
        "ready",
        "failed",
    ]


def test_a_copy_of_the_same_patient_hides_none_of_another_patient() -> None:
    scan = np.random.default_rng(0).normal(0, 300, (16, 16, 16)).clip(-1000, 400)
    cases = [
        audited("a", voxels="x", patient="p", image=scan),
        audited("b", voxels="x", patient="q", image=scan),
        audited("same as b", voxels="x", patient="q", image=scan),
        audited("near a", voxels="y", patient="r", image=scan + 2),
        audited("same as near a", voxels="y", patient="r", image=scan + 2),
        audited("scaled", voxels="z", patient="s", image=0.8 * scan),
        audited("same as scaled", voxels="z", patient="s", image=0.8 * scan),
    ]
    found = [
        [(finding.code, finding.severity.value) for finding in compared.findings()]
        for compared in compare_cases(cases)
    ]
    near, same = ("near_copy", "error"), ("duplicate_image", "warning")
    twin = ("duplicate_image", "error")
    assert found == [[], [twin], [twin, same], [near], [near, same], [near], [near, same]]


def test_near_copies_under_two_patients_are_found() -> None:
    rng = np.random.default_rng(0)
    scan = ndimage.gaussian_filter(rng.normal(0, 4000, (64, 40, 44)), 4).clip(-1000, 400)
    changed = {
        "other": ndimage.gaussian_filter(rng.normal(0, 4000, (64, 40, 44)), 4).clip(-1000, 400),
        "noisy": scan + rng.normal(0, 20, scan.shape), "brighter": scan + 3, "shorter": scan[1:],
        "scaled": 0.8 * scan, "shifted": 0.9 * scan + 100,
    }  # fmt: skip
    cases = [
        audited("scan", patient="p", image=scan),
        audited("again", patient="p", image=scan + 2),
    ]
    cases += [audited(name, image=image) for name, image in changed.items()]
    found = {
        compared.case.name: [finding.code for finding in compared.findings()]
        for compared in compare_cases(cases)
    }
    assert found == {
        "scan": [], "again": [], "other": [], "noisy": ["near_copy"], "brighter": ["near_copy"],
        "shorter": ["near_copy"], "scaled": ["near_copy"], "shifted": ["near_copy"],
    }  # fmt: skip


def near_copies(by_profile: bool, **cells: tuple[Any, Any]) -> Finding:
    """Finding of the second of two near copies whose rows have these cells."""
    rng = np.random.default_rng(0)
    scan = ndimage.gaussian_filter(rng.normal(0, 4000, (64, 40, 44)), 4).clip(-1000, 400)
    profile = tuple((1000 + 10 * step, 2000 - 10 * step, 300) for step in range(30))
    rows: list[dict[str, Any]] = [
        {name: values[row] for name, values in cells.items()} for row in range(2)
    ]
    pair = []
    for name, row in zip(("scan", "copy"), rows, strict=True):
        plain = audited(name, image=None if by_profile else scan + len(pair))
        assert plain.audit is not None
        audit = replace(plain.audit, profile=profile if by_profile else ())
        pair.append(replace(plain, case=replace(plain.case, **row), audit=audit))
    (finding,) = compare_cases(pair)[1].comparison
    return finding


@pytest.mark.parametrize("by_profile", [False, True])
@pytest.mark.parametrize(
    ("cells", "severity", "claim"),
    [
        ({}, "warning", ""),
        ({"split": ("train", "train")}, "warning", ""),
        ({"split": ("train", None)}, "warning", ""),
        ({"fold": (None, 0)}, "warning", ""),
        ({"fold_sides": ((None, "train"), ("val", "train"))}, "warning", ""),
        ({"patient": ("p", "q")}, "error", "the patient is 'q' here and 'p' there"),
        ({"split": ("train", "val")}, "error", "the split is val here and train there"),
        ({"fold": (1, 0)}, "error", "the fold is 0 here and 1 there"),
        ({"fold_sides": (("train",), ("val",))}, "error", "fold_0 is val here and train there"),
    ],
)
def test_a_near_copy_is_an_error_only_against_a_claim_of_the_table(
    by_profile: bool, cells: dict[str, tuple[Any, Any]], severity: str, claim: str
) -> None:
    finding = near_copies(by_profile, **cells)
    assert (finding.code, finding.severity.value) == ("near_copy", severity)
    assert claim in finding.message
    assert ("but" in finding.message) == bool(claim)


def test_the_table_can_be_read_by_a_machine() -> None:
    odd = [
        Finding("padding", Severity.information, "a", "b"),
        Finding("no_air", Severity.warning, 'say "x", y', "c"),
        Finding("label_grid", Severity.error, "d\u00fc", ""),
        Finding("cut_region", Severity.warning, "e", ""),
    ]
    cases = [
        audited("Doe, John", (1.0, 0.7, 0.7), *odd, ignore_findings=frozenset({"cut_region"})),
        AuditedCase(Case("z", Path("z"), None, "z"), None, failure="gone"),
    ]
    rows = list(csv.DictReader(io.StringIO(audit_csv(cases))))
    assert rows[0] == {
        "case": "Doe, John", "patient": "Doe, John", "status": "refused", "size_z": "9",
        "size_y": "8", "size_x": "7",
        "spacing_z_mm": "1", "spacing_y_mm": "0.7", "spacing_x_mm": "0.7",
        "hu_min": "-1024", "hu_p01": "-1000", "hu_p50": "-300", "hu_p99": "800", "hu_max": "1500.5",
        "left_lung_ml": "12.3",
        "errors": "label_grid", "warnings": "no_air", "notes": "padding",
        "details": 'd\u00fc | say "x", y; c | a; b',
    }  # fmt: skip
    assert (rows[1]["status"], rows[1]["details"], rows[1]["hu_min"]) == ("failed", "gone", "")
    # A small lesion is not nothing.
    assert cases[0].audit is not None
    for volume_ml, text in ((0.034, "0.034"), (0.0, "0.0")):
        small = replace(cases[0].audit, volumes_ml={"left_lung": volume_ml})
        (row,) = csv.DictReader(io.StringIO(audit_csv([replace(cases[0], audit=small)])))
        assert row["left_lung_ml"] == text


def test_an_audit_survives_its_file() -> None:
    audit = audited(
        "a",
        (1.0, 0.7, 0.7),
        *(Finding(code, severity, code, "x") for code in CODES for severity in Severity),
    ).audit
    assert audit is not None
    assert CaseAudit.from_dict(audit.to_dict()) == audit
    assert {finding.code for finding in audit.not_ignored({"no_air"}, Severity.error)} == set(
        CODES
    ) - {"no_air"}


def test_mistaken_codes_are_told() -> None:
    assert check_ignored(["no_air", "clipped"], "x") == {"no_air", "clipped"}
    with pytest.raises(
        UserError, match=r"^line 3: there is no finding 'cliped'; did you mean clipped\?$"
    ):
        check_ignored(["cliped"], "line 3")
    with pytest.raises(
        UserError, match="there is no finding 'zzz'; there are reading, left_out, hu_offset"
    ):
        check_ignored(["zzz"], "x")


def test_the_page_of_the_audit_has_a_line_for_every_finding() -> None:
    page = (Path(__file__).parents[3] / "docs" / "audit.md").read_text(encoding="utf-8")
    lines = dict(re.findall(r"^\* `(\w+)` \(([^)]+)\): ", page, re.MULTILINE))
    severities: dict[str, set[str]] = {}
    for kind, (severity, *_) in KINDS.items():
        severities.setdefault(kind.partition(":")[0], set()).add(severity.value)
    assert {
        code: set(levels.replace("*", "").replace(",", " ").split())
        for code, levels in lines.items()
    } == severities
