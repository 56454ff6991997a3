"""Lightning's trainer and module of a run."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from medseg.build.device import make_device_map, pick_device
from medseg.build.logger import make_logger
from medseg.build.loss import make_loss
from medseg.build.optimisation import make_optimizer, make_schedule
from medseg.build.switches import switch_on
from medseg.config.schema import Profiler, RegionMode, Strategy, TrainConfig
from medseg.errors import UserError
from medseg.memory.precision import lightning_precision, set_tf32
from medseg.models.regional import RegionalNetwork

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from medseg.training.module import SegmentationModule


def make_module(config: TrainConfig, network: RegionalNetwork, metadata: dict[str, Any]) -> SegmentationModule:
    """Join a network with the switches, the loss and the optimisation of a configuration.

    Args:
        config: Checked configuration.
        network: Changed in place.
        metadata: Saved in the checkpoints, see `make_metadata`.

    Raises:
        UserError: If a switch does not work on the device.
    """
    from medseg.training.module import SegmentationModule

    device_type = pick_device(config.trainer.accelerator).type
    if config.trainer.sync_batchnorm and device_type == "cpu":
        raise UserError(
            "trainer.sync_batchnorm=true works on GPUs only, but torch sees none here; choose trainer.sync_batchnorm=false"
        )
    return SegmentationModule(
        switch_on(network, config, device_type),
        make_loss(config),
        make_optimizer(config),
        make_schedule(config),
        seed=config.seed,
        accumulate=config.memory.accumulate,
        tile_size=config.inference.tile_size,
        overlap=config.inference.overlap,
        ema_decay=config.ema_decay,
        metadata=metadata,
    )


def make_trainer(config: TrainConfig, callbacks: list[pl.Callback], start_step: int = 0) -> pl.Trainer:
    """Make Lightning's trainer; one epoch is the whole run, everything counts optimiser steps.

    Args:
        config: Checked configuration.
        callbacks: Lightning's callbacks.
        start_step: Step that the run resumes from.
    """
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment
    from lightning.pytorch.profilers import SimpleProfiler

    trainer, memory = config.trainer, config.memory
    device_type = pick_device(trainer.accelerator).type
    if device_type == "cpu" and trainer.threads:
        torch.set_num_threads(trainer.threads)
    try:
        precision = lightning_precision(memory.precision.value, device_type)
    except ValueError as error:
        raise UserError(f"memory.{error}") from error
    set_tf32(memory.precision.value)
    return pl.Trainer(
        accelerator="gpu" if device_type == "cuda" else "cpu",
        devices=trainer.devices,
        num_nodes=trainer.num_nodes,
        strategy=_make_strategy(config, device_type),
        # Ranks come from torchrun or from `start_ranks`, whatever a scheduler says about its own processes.
        plugins=[TorchElasticEnvironment() if TorchElasticEnvironment.detect() else LightningEnvironment()],
        precision=precision,  # type: ignore[arg-type]
        max_steps=config.steps,
        max_epochs=-1,
        accumulate_grad_batches=memory.accumulate,
        benchmark=memory.cudnn_benchmark,
        gradient_clip_val=trainer.gradient_clip,
        val_check_interval=min(config.stage.validate_every, config.steps) * memory.accumulate,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        limit_val_batches=1 if config.debug.fast else 1.0,
        use_distributed_sampler=False,  # samples are a function of (seed, n)
        log_every_n_steps=10,
        logger=make_logger(config, start_step),
        callbacks=callbacks,
        default_root_dir=config.run_dir,
        enable_model_summary=False,
        enable_progress_bar=sys.stderr.isatty(),  # in a log the history prints lines instead
        detect_anomaly=config.debug.anomaly,
        # With a file: by default the table is a log message, which medseg silences.
        profiler=None if config.debug.profiler is Profiler.none else SimpleProfiler(config.run_dir, "profile"),
    )


def _make_strategy(config: TrainConfig, device_type: str) -> Any:
    """Name or make the Lightning strategy of a configuration."""
    trainer = config.trainer
    if config.model.device_map is not None:
        from medseg.training.device_map import DeviceMapStrategy

        return DeviceMapStrategy(torch.device("cuda:0" if device_type == "cuda" else "cpu"), make_device_map(config))
    if trainer.strategy is Strategy.fsdp:
        from lightning.pytorch.strategies import ModelParallelStrategy

        # One file, as any other checkpoint; the network divides itself, see `SegmentationModule.configure_model`.
        return ModelParallelStrategy(
            data_parallel_size=trainer.devices * trainer.num_nodes, tensor_parallel_size=1, save_distributed_checkpoint=False
        )
    if trainer.strategy is Strategy.ddp and config.stage.region_mode is RegionMode.separate:
        return "ddp_find_unused_parameters_true"
    return trainer.strategy.value
