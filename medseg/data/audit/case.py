"""All that the audit says about one case."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from medseg.data.audit.finding import Finding, Severity
from medseg.geometry.grid import VoxelGrid


@dataclass(frozen=True)
class CaseAudit:
    """What the audit measured and found.

    Attributes:
        grid: Grid of the scan as it was made, oriented.
        hu: `min`, `p01`, `p50`, `p99`, `max` of the image in HU.
        voxels_sha256: Hash of the voxels; equal for copies of one scan.
        volumes_ml: Label name to volume; empty where there are no labels.
        findings: All findings, also those that the case ignores.
    """

    grid: VoxelGrid
    hu: dict[str, float]
    voxels_sha256: str
    volumes_ml: dict[str, float]
    findings: tuple[Finding, ...]

    def heeded(self, ignored: Iterable[str], *severities: Severity) -> list[Finding]:
        """Findings of these severities without those that are ignored."""
        return [finding for finding in self.findings if finding.severity in severities and finding.code not in ignored]

    def to_dict(self) -> dict[str, Any]:
        """Plain types for a JSON file."""
        return {
            "grid": self.grid.to_dict(),
            "hu": self.hu,
            "voxels_sha256": self.voxels_sha256,
            "volumes_ml": self.volumes_ml,
            "findings": [finding.to_dict() for finding in self.findings],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> CaseAudit:
        """Read what `to_dict` wrote."""
        return cls(
            VoxelGrid.from_dict(data["grid"]),
            dict(data["hu"]),
            data["voxels_sha256"],
            dict(data["volumes_ml"]),
            tuple(Finding.from_dict(finding) for finding in data["findings"]),
        )
