"""Segmenting from Python: load once, then any number of scans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from medseg.cascade.segment import Segmentation, segment
from medseg.cascade.stage import CascadeOptions, TrainedStage
from medseg.errors import UserError
from medseg.io.volume import Volume
from medseg.preprocess.scale import HuScale


def segment_scan(
    volume: Volume, name: str | Path, hu: HuScale, coarse: TrainedStage, fine: TrainedStage, options: CascadeOptions
) -> Segmentation:
    """Segment a scan that has just been read, after a look at its values.

    Args:
        volume: Scan in the values of its file.
        name: What to call it in a message.
        hu: What makes HU of the values.
        coarse: Trained coarse stage.
        fine: Trained fine stage.
        options: How the networks are run.

    Returns:
        Labels in the scan's storage order; among the warnings also what its reader and the audit of its values say.

    Raises:
        UserError: If it shows nothing.
    """
    from medseg.data.audit.finding import Severity
    from medseg.data.audit.image import audit_image, measure_image

    if volume.array.min() == volume.array.max():
        raise UserError(f"{name}: expected a scan, but every voxel holds {volume.array.flat[0]:g}; export it again.")
    volume = replace(volume, array=hu.apply(volume.array))
    odd = [finding for finding in audit_image(measure_image(volume.array)) if finding.severity is not Severity.note]
    result = segment(volume, coarse, fine, options)
    return replace(result, warnings=[*volume.remarks, *map(str, odd), *result.warnings])
