"""Findings: what is told about a scan, with a code and a severity, whoever found it."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum


class Severity(StrEnum):
    """Consequence of a finding.

    An error stops a case or makes it doubtful, a warning asks to look, information asks for
    nothing.
    """

    error = "error"
    warning = "warning"
    information = "information"


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    Attributes:
        code: Its kind, in small letters.
        severity: Its consequence.
        message: The sentence, with its numbers.
        cure: The advice; empty if there is none.
    """

    code: str
    severity: Severity
    message: str
    cure: str = ""

    def __str__(self) -> str:
        return f"{self.message}; {self.cure}" if self.cure else self.message

    def to_dict(self) -> dict[str, str]:
        """Plain types for a JSON file: code, severity and the whole sentence."""
        return {"code": self.code, "severity": self.severity.value, "sentence": str(self)}

    def within(self, part: str) -> "Finding":
        """Name the part of the case that the sentence is about, such as a channel."""
        return replace(self, message=f"{part}: {self.message}")


def warnings_of(code: str, sentences: Iterable[str]) -> list[Finding]:
    """Make a warning of each sentence."""
    return [Finding(code, Severity.warning, sentence) for sentence in sentences]


def information_of(code: str, sentences: Iterable[str]) -> list[Finding]:
    """Make an information of each sentence."""
    return [Finding(code, Severity.information, sentence) for sentence in sentences]


def sentences_of(findings: Iterable[Finding]) -> list[str]:
    """List the sentences of all findings but information."""
    return [str(finding) for finding in findings if finding.severity is not Severity.information]


def information_in(findings: Iterable[Finding]) -> list[str]:
    """List the sentences of the findings that ask for nothing."""
    return [str(finding) for finding in findings if finding.severity is Severity.information]
