"""The spacing that a data set asks for, found in the headers of the scans that are trained on."""

from __future__ import annotations

from medseg.apps import entry
from medseg.config.schema import DataConfig, SpacingConfig, SpacingStrategy


def find_spacing(spacing: SpacingConfig, data: DataConfig) -> None:
    """Fill in the target of `dataset_median`, in place; nothing is done for other strategies, or where it stands already.

    Raises:
        UserError: If the cases cannot be found or a header cannot be read.
    """
    if spacing.strategy is not SpacingStrategy.dataset_median or spacing.target_spacing_mm is not None:
        return
    from medseg.apps.cases import find_sources
    from medseg.data.median_spacing import median_spacing_mm
    from medseg.io.read import read_grid
    from medseg.preprocess.orient import oriented_grid

    # The first source is the user's: phantoms that are mixed in say nothing about the scans to come.
    cases = find_sources(data)[0].split.train
    spacing.target_spacing_mm = median_spacing_mm(
        [oriented_grid(read_grid(case.image, case.series)).spacing_mm for case in cases]
    )
    numbers = ",".join(f"{mm:g}" for mm in spacing.target_spacing_mm)
    entry.say(f"spacing.target_spacing_mm=[{numbers}]: the median of {len(cases)} cases")
