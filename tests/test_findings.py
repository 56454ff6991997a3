"""Findings: information is no warning; a report has code, severity and sentence of each."""

from __future__ import annotations

from medseg.findings import (
    Finding,
    Severity,
    information_in,
    information_of,
    sentences_of,
    warnings_of,
)


def test_information_is_no_warning() -> None:
    findings = [
        *information_of("padding", ["a constant"]),
        *warnings_of("cut_region", ["the scan cuts a"]),
    ]
    assert sentences_of(findings) == ["the scan cuts a"]
    assert information_in(findings) == ["a constant"]


def test_a_finding_names_the_part_of_the_case_that_it_is_about() -> None:
    finding = Finding("reading", Severity.warning, "3 voxels hold no number", "export it again")
    assert str(finding.within("image_1")) == "image_1: 3 voxels hold no number; export it again"
    assert finding.within("image_1").code == finding.code


def test_a_report_has_code_severity_and_the_sentence_with_its_advice() -> None:
    finding = Finding("no_air", Severity.warning, "no air", "check that the values are HU")
    assert finding.to_dict() == {
        "code": "no_air",
        "severity": "warning",
        "sentence": "no air; check that the values are HU",
    }
