"""The data module of a run, and how its pictures name labels."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from medseg.config.schema import RegionMode, SpacingDraw, StageName, TrainConfig
from medseg.data.task import Task

if TYPE_CHECKING:
    from medseg.training.callbacks import View
    from medseg.training.data_module import CasesDataModule


def make_data_module(config: TrainConfig, task: Task, divisor: tuple[int, int, int]) -> CasesDataModule:
    """The cases of a configuration as a data module; makes phantoms and opens the coarse checkpoint where asked for."""
    from medseg.build import objects as build
    from medseg.build.cases import find_sources
    from medseg.training.data_module import CasesDataModule, StageInput

    stage = config.stage
    stage_input = StageInput(
        is_coarse=stage.name is StageName.coarse,
        spacing_mm=config.spacing.target_spacing_mm,
        rule=build.make_grid_rule(config.spacing),
        resampling=config.spacing.resampling.value,
        follows_scans=config.spacing.draw is SpacingDraw.tail,
        divisor=divisor,
        max_voxels=stage.max_voxels,
        slab_share=stage.slab_share or 0.0,
        patch_size=stage.patch_size,
        boundary_share=stage.boundary_share or 0.0,
        elsewhere_share=stage.elsewhere_share or 0.0,
        region_margin_mm=stage.region_margin_mm or 0.0,
        box_jitter_mm=stage.box_jitter_mm or 0.0,
        is_mirrored=stage.region_mode is RegionMode.mirrored,
        tile_size=config.inference.tile_size,
    )
    device = build.pick_device(config.trainer.accelerator)
    return CasesDataModule(
        find_sources(config.data),
        task,
        stage_input,
        cache_dir=Path(config.data.cache),
        augmentation=build.make_augmentation(config),
        seed=config.seed,
        steps=config.steps,
        batch_size=stage.batch_size,
        accumulate=config.memory.accumulate,
        num_workers=config.data.num_workers,
        prefetch=config.data.prefetch,
        pin_memory=config.data.pin_memory,
        overfit=config.debug.overfit,
        coarse=build.load_stage(Path(stage.coarse), "coarse", device) if stage.coarse else None,
    )


def views(config: TrainConfig, task: Task) -> list[View]:
    """How validation pictures name and turn what the network sees."""
    from medseg.training.callbacks import View

    if config.stage.name is StageName.coarse:
        return [View({value: name for name, value in task.labels.items()}, False)]
    mode = config.stage.region_mode
    return [
        View(dict(enumerate(region.labels, start=1)), mode is RegionMode.mirrored and region.side == "right")
        for region in task.regions
    ]
