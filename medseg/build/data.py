"""Data module of a run, and the class names of its validation pictures."""

from pathlib import Path

from medseg.build.augmentation import make_augmentation
from medseg.build.cases import find_sources
from medseg.build.device import pick_device
from medseg.build.spacing import make_grid_rule
from medseg.build.stages import load_stage
from medseg.build.task import make_task
from medseg.config.rules import find_divisor
from medseg.config.schema import RegionMode, SpacingDraw, StageName, TrainConfig
from medseg.training.callbacks import View
from medseg.training.data_module import CasesDataModule, StageInput


def make_data_module(config: TrainConfig) -> CasesDataModule:
    """Make the data module of a configuration; makes missing phantoms and loads the coarse checkpoint where one is given."""
    stage, data = config.stage, config.data
    stage_input = StageInput(
        is_coarse=stage.name is StageName.coarse,
        spacing_mm=config.spacing.target_spacing_mm,
        rule=make_grid_rule(config.spacing),
        resampling=config.spacing.resampling.value,
        follows_scans=config.spacing.draw is SpacingDraw.tail,
        divisor=find_divisor(config),
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
    return CasesDataModule(
        find_sources(data),
        make_task(config.task),
        stage_input,
        cache_dir=Path(data.cache),
        augmentation=make_augmentation(config),
        seed=config.seed,
        steps=config.steps,
        batch_size=stage.batch_size,
        accumulate=config.memory.accumulate,
        num_workers=data.num_workers,
        prefetch=data.prefetch,
        pin_memory=data.pin_memory,
        overfit=config.debug.overfit,
        coarse=load_stage(Path(stage.coarse), "coarse", pick_device(config.trainer.accelerator)) if stage.coarse else None,
    )


def make_views(config: TrainConfig) -> list[View]:
    """Name the classes of each region for validation pictures, and say whether the network sees the region mirrored."""
    task = make_task(config.task)
    if config.stage.name is StageName.coarse:
        return [View({value: name for name, value in task.labels.items()}, False)]
    is_mirrored = config.stage.region_mode is RegionMode.mirrored
    return [View(dict(enumerate(region.labels, start=1)), is_mirrored and region.side == "right") for region in task.regions]
