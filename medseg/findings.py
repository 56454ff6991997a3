"""Findings: sentences to the user about a scan, each with a code and a severity."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum


class Severity(StrEnum):
    """Consequence of a finding.

    An error stops a case or makes its result doubtful, a warning needs a look at the result,
    information needs no action.
    """

    error = "error"
    warning = "warning"
    information = "information"


@dataclass(frozen=True)
class Finding:
    """A sentence about a scan, with its kind and severity.

    Attributes:
        code: Kind of the finding, in lower case, by which programs can select findings.
        severity: Its consequence.
        message: What was found, with its numbers; no full stop, since the cure may follow.
        cure: The advice; empty if there is none.
    """

    code: str
    severity: Severity
    message: str
    cure: str = ""

    def __str__(self) -> str:
        if not self.cure:
            return self.message
        return f"{self.message}; {self.cure}"

    def to_dict(self) -> dict[str, str]:
        """Convert to plain types for a JSON file: code, severity and sentence with its cure."""
        return {"code": self.code, "severity": self.severity.value, "sentence": str(self)}

    def within(self, part: str) -> "Finding":
        """Return the finding with a prefix that names a part of the case, such as a channel."""
        return replace(self, message=f"{part}: {self.message}")


def warnings_of(code: str, sentences: Iterable[str]) -> list[Finding]:
    """Make a warning of each sentence."""
    return [Finding(code, Severity.warning, sentence) for sentence in sentences]


def information_of(code: str, sentences: Iterable[str]) -> list[Finding]:
    """Make a finding of the severity `information` of each sentence."""
    return [Finding(code, Severity.information, sentence) for sentence in sentences]


def sentences_of(findings: Iterable[Finding]) -> list[str]:
    """List the sentences of findings that are errors or warnings."""
    return [str(finding) for finding in findings if finding.severity is not Severity.information]


def information_in(findings: Iterable[Finding]) -> list[str]:
    """List the sentences of findings that are information."""
    return [str(finding) for finding in findings if finding.severity is Severity.information]
