"""The trained cascades of a prediction: loading, choosing one for a scan, sharing one among processes."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from medseg.config.schema import PredictConfig
from medseg.errors import UserError
from medseg.prediction.scans import Scan


class Cascade(NamedTuple):
    """What all cases of a prediction share.

    Attributes:
        coarse: Trained coarse stage.
        fine: Trained fine stage.
        options: How the networks are run.
        settings: All that the result follows from beside the scan and how it is read, in plain types.
        name: Name of the range of `by_spacing`; empty where there is one cascade for all scans.
        range_mm: Coarsest spacing of the scans that it is for, from the first number to below the second.
    """

    coarse: Any
    fine: Any
    options: Any
    settings: dict[str, Any]
    name: str = ""
    range_mm: tuple[float, float] = (0.0, math.inf)


def load_cascades(config: PredictConfig) -> list[Cascade]:
    """Load both stages, those of each range where the scan's spacing decides.

    Raises:
        UserError: If the device, the precision or a checkpoint is not usable.
    """
    if not config.by_spacing:
        return [load_cascade(config)]
    return [
        load_cascade(replace(config, coarse=one.coarse, fine=one.fine))._replace(name=name, range_mm=one.range_mm)
        for name, one in config.by_spacing.items()
    ]


def pick_cascade(scan: Scan, cascades: list[Cascade]) -> tuple[Cascade, str | None]:
    """Choose the cascade of a scan.

    Returns:
        It, and where there is a choice the sentence that says which and why.

    Raises:
        UserError: If no range holds the scan, or its header cannot be read.
    """
    from medseg.io.read import read_grid

    if not cascades[0].name:
        return cascades[0], None
    # Headers store float32: 5 mm must not fall below a range that begins there.
    spacing_mm = round(max(read_grid(scan.path, scan.series).spacing_mm), 3)
    for cascade in cascades:
        low_mm, high_mm = cascade.range_mm
        if low_mm <= spacing_mm < high_mm:
            return cascade, f"{cascade.name}, since its coarsest spacing of {spacing_mm:g} mm lies in {_range_text(cascade)}"
    known = ", ".join(f"{cascade.name} {_range_text(cascade)}" for cascade in cascades)
    raise UserError(
        f"its coarsest spacing of {spacing_mm:g} mm lies in no range of by_spacing ({known}); give checkpoints for it, or widen a range"
    )


def _range_text(cascade: Cascade) -> str:
    low_mm, high_mm = cascade.range_mm
    return f"{low_mm:g} … {high_mm:g} mm"


def load_cascade(config: PredictConfig) -> Cascade:
    """Load both stages.

    Raises:
        UserError: If the device, the precision or a checkpoint is not usable.
    """
    import torch

    from medseg.cascade.stage import CascadeOptions
    from medseg.prediction import segmenter

    if config.threads:
        torch.set_num_threads(config.threads)
    if is_under_torchrun() and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    precision = config.precision.value if config.precision else None
    coarse, fine = segmenter.load_cascade(config.coarse, config.fine, config.accelerator, precision)
    inference = config.inference
    if inference.tile_size is not None:
        fine.patch_size = inference.tile_size
    options = CascadeOptions(tile_overlap=inference.overlap, budget_gib=inference.budget_gib, tta=inference.tta)
    settings = {
        **{stage.name: sorted(stage.checkpoints.values()) for stage in (coarse, fine)},
        "precision": precision,
        "inference": vars(inference),
    }
    return Cascade(coarse, fine, options, settings)


def is_under_torchrun() -> bool:
    """Whether torchrun started this process together with others."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ["WORLD_SIZE"]) > 1


def is_tile_worker() -> bool:
    """Whether this process only runs networks for rank 0 and neither reads scans nor writes results."""
    return is_under_torchrun() and int(os.environ["RANK"]) > 0


def serve_rank_0(cascade: Cascade) -> None:
    """Run networks for rank 0 until it has done all cases."""
    from medseg.inference.tile_workers import process_group, serve_tiles

    stages = {stage.name: stage for stage in (cascade.coarse, cascade.fine)}
    with process_group():
        serve_tiles(lambda job, images: stages[job[0]].answer(job[1], images, job[2]))


@contextmanager
def shared_tiles(cascade: Cascade) -> Iterator[None]:
    """Divide the tiles among the processes of torchrun; one process alone runs them all."""
    if not is_under_torchrun():
        yield
        return
    from medseg.inference.tile_workers import TileWorkers, process_group

    with process_group():
        workers = cascade.coarse.tile_workers = cascade.fine.tile_workers = TileWorkers()
        try:
            yield
        finally:
            workers.dismiss()
