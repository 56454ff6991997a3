"""Audit of one case: measurements and findings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from medseg.data.audit.finding import Finding, Severity
from medseg.geometry.grid import VoxelGrid


@dataclass(frozen=True)
class CaseAudit:
    """Measurements and findings of one case.

    Attributes:
        grid: Grid of the scan as it was made, oriented.
        hu: `min`, `p01`, `p50`, `p99`, `max` of the image in HU.
        voxels_sha256: Hash of the voxels; equal for copies of one scan.
        volumes_ml: Label name to volume; empty if there are no labels.
        findings: All findings, those that the case ignores included.
    """

    grid: VoxelGrid
    hu: dict[str, float]
    voxels_sha256: str
    volumes_ml: dict[str, float]
    findings: tuple[Finding, ...]

    def heeded(self, ignore_findings: Iterable[str], *severities: Severity) -> list[Finding]:
        """List the findings of these severities that are not ignored."""
        return [one for one in self.findings if one.severity in severities and one.code not in ignore_findings]

    def to_dict(self) -> dict[str, Any]:
        """Plain types for a JSON file."""
        return {**vars(self), "grid": self.grid.to_dict(), "findings": [finding.to_dict() for finding in self.findings]}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> CaseAudit:
        """Read what `to_dict` wrote."""
        findings = tuple(Finding.from_dict(finding) for finding in data["findings"])
        return cls(**{**data, "grid": VoxelGrid.from_dict(data["grid"]), "findings": findings})
