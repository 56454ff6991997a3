"""Findings: information is no warning, and a report has the code, the severity and the whole sentence of each."""

from __future__ import annotations

from medseg.findings import Finding, Severity, sentences_of, warnings_of


def test_information_is_no_warning() -> None:
    findings = [Finding("padding", Severity.information, "a constant"), *warnings_of("cut_region", ["the scan cuts a"])]
    assert sentences_of(findings) == ["the scan cuts a"]


def test_a_report_has_code_severity_and_the_sentence_with_its_advice() -> None:
    finding = Finding("no_air", Severity.warning, "no air", "check that the values are HU")
    assert finding.to_dict() == {
        "code": "no_air",
        "severity": "warning",
        "sentence": "no air; check that the values are HU",
    }
