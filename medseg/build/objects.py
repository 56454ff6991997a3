"""The only place where configuration becomes objects.

Below this module everything takes plain arguments. Heavy libraries are imported inside the functions that need them: prediction must not
wait for Lightning.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from medseg import __version__
from medseg.cascade.stage import TrainedStage
from medseg.config.check import strides_of
from medseg.config.schema import (
    Accelerator,
    LrScaling,
    Precision,
    Profiler,
    RegionMode,
    Resampling,
    SpacingConfig,
    SpacingStrategy,
    StageName,
    Strategy,
    TaskConfig,
    TrainConfig,
)
from medseg.data.task import Region, Task
from medseg.errors import UserError
from medseg.geometry.grid_rule import PLAIN, GridRule
from medseg.geometry.levels import level_strides
from medseg.memory.precision import HALF, inference_precision, lightning_precision, set_tf32
from medseg.memory.switches import apply_switches, use_channels_last
from medseg.models.regional import RegionalNetwork
from medseg.models.unet import UNet
from medseg.preprocess.resample import ANTIALIASED
from medseg.weights.files import CARD_FORMAT, checksum, read_weights

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import Logger

    from medseg.data.augment import Augmentation
    from medseg.training.module import SegmentationModule


# Arguments of optimisers and schedules that are learning rates.
LR_KEYS = ("lr", "max_lr", "base_lr", "eta_min")
# What brings the classes that medseg itself does not depend on.
EXTRAS = {"pytorch_optimizer": "optimizers"}

# What a card says in the place of a spacing; a missing value must not mean it.
NATIVE = "native"


def make_task(config: TaskConfig) -> Task:
    """The organ of a configuration."""
    regions = tuple(
        Region(name, tuple(region.labels), region.side.value if region.side else None) for name, region in config.regions.items()
    )
    return Task(config.name, dict(config.labels), regions, config.window_hu, config.least_hu)


def make_grid_rule(spacing: SpacingConfig) -> GridRule:
    """What a strategy does about the size of crops."""
    return GridRule(spacing.size, is_cube=spacing.strategy is SpacingStrategy.fixed_resolution, range_mm=spacing.range_mm)


def make_network(model: dict[str, Any], task: Task, region_mode: str) -> RegionalNetwork:
    """The network of a stage.

    Args:
        model: Arguments of `UNet` beside the channels.
        task: Gives the number of classes and regions.
        region_mode: `whole` for the coarse stage, else a mode of `RegionalNetwork`.

    Raises:
        UserError: If the arguments do not go together.
    """
    is_whole = region_mode == "whole"
    num_classes = task.num_classes if is_whole else task.num_region_classes
    try:
        return RegionalNetwork(
            lambda in_channels: UNet(in_channels, num_classes, **model),
            num_regions=1 if is_whole else len(task.regions),
            mode=region_mode,
        )
    except ValueError as error:
        raise UserError(f"model: {error}") from error


def begin_with_weights(network: RegionalNetwork, config: TrainConfig) -> None:
    """Copy the weights of `init_from` into a network that has just been made.

    Raises:
        UserError: If the file is not usable, or holds another network than the one that is configured.
    """
    if config.init_from is None:
        return
    given = f"init_from={config.init_from}"
    card, weights = read_weights(Path(config.init_from), config.stage.name.value, "init_from")
    ours = {"model": _with_defaults(model_arguments(config)), "region_mode": region_mode_of(config)}
    theirs = {"model": _with_defaults(card["model"]), "region_mode": card["region_mode"]}
    if ours != theirs:
        raise UserError(
            f"{given}: its network is {theirs}, but the configured one is {ours}; give the same model and region_mode"
        )
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        raise UserError(f"{given}: its weights do not fit the task {config.task.name} ({_line(error)})") from error


def region_mode_of(config: TrainConfig) -> str:
    """How regions share the network; the coarse stage sees them all at once."""
    return config.stage.region_mode.value if config.stage.region_mode else "whole"


def model_arguments(config: TrainConfig) -> dict[str, Any]:
    """The `model` group as arguments of `UNet`."""
    model = config.model
    return {
        "width": model.width,
        "depth": model.depth,
        "block": model.block.value,
        "blocks_per_level": tuple(model.blocks_per_level),
        "stem": model.stem.value,
        "refine": model.refine,
        "norm": model.norm.value,
        "strides": strides_of(config),
    }


def switch_on(network: RegionalNetwork, config: TrainConfig, device_type: str) -> nn.Module:
    """Apply the `memory` group to a network that will run on a `cpu` or `cuda` device."""
    memory = config.memory
    policy = memory.checkpointing if isinstance(memory.checkpointing, str) else tuple(memory.checkpointing)
    try:
        return apply_switches(
            network,
            checkpointing=policy,
            offload=memory.offload,
            channels_last=memory.channels_last,
            compile=memory.compile,
            synchronise=config.trainer.sync_batchnorm,
            device_type=device_type,
        )
    except ValueError as error:
        raise UserError(f"memory: {error}") from error


def make_loss(config: TrainConfig) -> nn.Module:
    """Dice and cross-entropy."""
    from medseg.losses.dice_ce import DiceCrossEntropyLoss

    loss = config.loss
    return DiceCrossEntropyLoss(
        dice_weight=loss.dice_weight,
        ce_weight=loss.ce_weight,
        include_background=loss.include_background,
        batch_dice=loss.batch_dice,
    )


def make_target(group: str, node: dict[str, Any], *leading: Any) -> Callable[..., Any]:
    """A white-listed foreign class with its arguments, bound to its signature before any data is touched.

    Args:
        group: Name of the group, for messages.
        node: `_target_` and arguments.
        leading: Stand-ins for the positional arguments that come later (parameters, an optimiser).

    Returns:
        The class with its arguments; call it with what `leading` stood for.

    Raises:
        UserError: If the class does not exist or does not take the arguments.
    """
    arguments = {key: value for key, value in node.items() if key != "_target_"}
    module_name, _, name = str(node["_target_"]).rpartition(".")
    try:
        target = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        extra = EXTRAS.get(module_name.partition(".")[0])
        if extra and isinstance(error, ImportError):
            raise UserError(f"{group}._target_: {node['_target_']} needs pip install 'medseg[{extra}]' ({error})") from error
        raise UserError(f"{group}._target_: {node['_target_']} does not exist in the installed version ({error})") from error
    if not inspect.isclass(target):
        raise UserError(f"{group}._target_: {node['_target_']} is not a class")
    parameters = inspect.signature(target).parameters
    try:
        inspect.signature(target).bind(*leading, **arguments)
        unknown = arguments.keys() - parameters.keys()
        if unknown and group != "logger":  # `**kwargs` would swallow a misspelled name
            raise TypeError(f"got an unexpected keyword argument {min(unknown)!r}")
    except TypeError as error:
        known = ", ".join(list(parameters)[len(leading) :])
        raise UserError(f"{group}: {name} does not take these arguments ({error}); it knows {known}") from error
    return functools.partial(target, **arguments)


def make_optimizer(config: TrainConfig) -> Callable[[Any], torch.optim.Optimizer]:
    """The `optimizer` group as a function of the parameters; its rate is that for the whole batch."""
    return make_target("optimizer", with_scaled_rates(config.optimizer, config), None)


def make_schedule(config: TrainConfig) -> Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]:
    """The `schedule` group as a function of the optimiser, with the warm-up laid over it.

    In step n, counted from 0, of the warm-up the rate is (n + 1) / (`warmup_steps` + 1) of the schedule's.
    """
    make = make_target("schedule", with_scaled_rates(config.schedule, config), None)
    if not config.warmup_steps:
        return make
    from torch.optim.lr_scheduler import ChainedScheduler, LinearLR

    def make_both(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        ramp = LinearLR(optimizer, start_factor=1 / (config.warmup_steps + 1), total_iters=config.warmup_steps)
        return ChainedScheduler([ramp, make(optimizer)], optimizer)

    return make_both


def with_scaled_rates(node: dict[str, Any], config: TrainConfig) -> dict[str, Any]:
    """A group's arguments with its learning rates grown with the batch, as `lr_scaling` says."""
    exponent = {LrScaling.none: 0.0, LrScaling.sqrt: 0.5, LrScaling.linear: 1.0}[config.lr_scaling]
    factor = config.stage.batch_size**exponent
    return {key: value * factor if key in LR_KEYS else value for key, value in node.items()}


def make_module(config: TrainConfig, network: RegionalNetwork, card: dict[str, Any]) -> SegmentationModule:
    """A network with the switches, the loss and the optimisation of a configuration.

    Args:
        config: Checked configuration.
        network: Changed in place.
        card: What the checkpoints tell about themselves, see `make_card`.
    """
    from medseg.training.module import SegmentationModule

    return SegmentationModule(
        switch_on(network, config, pick_device(config.trainer.accelerator).type),
        make_loss(config),
        make_optimizer(config),
        make_schedule(config),
        seed=config.seed,
        accumulate=config.memory.accumulate,
        tile_size=config.inference.tile_size,
        overlap=config.inference.overlap,
        ema_decay=config.ema_decay,
        card=card,
    )


def make_logger(config: TrainConfig, start_step: int = 0) -> Logger | bool:
    """The logger beside `history.csv`, or False; that of a run that goes on forgets what is logged again."""
    if not config.logger:
        return False
    from medseg.training.loggers import go_on

    logger: Logger = make_target("logger", config.logger)()
    if start_step:
        go_on(logger, start_step)
    return logger


def make_augmentation(config: TrainConfig) -> Augmentation | None:
    """The `augment` group; None where nothing happens to a sample."""
    from medseg.data.augment import Augmentation

    arguments = {**vars(config.augment), "flip_axes": tuple(config.augment.flip_axes)}
    arguments.pop("enabled")
    return Augmentation(**arguments) if config.augment.enabled else None


def device_places(config: TrainConfig) -> dict[str, str]:
    """Where `model.device_map` puts each part of the network; `auto` divides what a step keeps among all GPUs.

    Raises:
        UserError: If a device or a part is named that does not exist, or there is nothing to divide among.
    """
    from medseg.memory.accounting.step import count_step
    from medseg.memory.device_map import forward_order, named_parts, plan_device_map, resolve_device_map

    given = config.model.device_map
    gpus = {f"cuda:{index}": torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())}

    def make() -> RegionalNetwork:
        return make_network(model_arguments(config), make_task(config.task), region_mode_of(config))

    if given != "auto":
        missing = sorted({device for device in given.values() if device != "cpu" and device not in gpus})
        if missing:
            raise UserError(f"model.device_map: there is no {', '.join(missing)} here; there are {', '.join(('cpu', *gpus))}")
        with torch.device("meta"):
            names = list(named_parts(make()))
        try:
            return resolve_device_map(names, given)
        except ValueError as error:
            raise UserError(f"model.{error}") from error
    if len(gpus) < 2:
        raise UserError(f"model.device_map=auto divides a network among GPUs, and torch sees {len(gpus)}; leave it out")
    size = config.stage.patch_size or (128, 128, 128)
    region = torch.zeros(1, dtype=torch.int64)
    memory = count_step(
        make,
        (1, 1, *size),
        loss=make_loss(config),
        make_optimizer=make_target("optimizer", config.optimizer, None),
        precision=config.memory.precision.value,
        call=lambda network, image: network(image, region),
    )
    with torch.device("meta"):
        parts = named_parts(make())
    held = (memory.parameters + memory.gradients + memory.optimizer_state) / memory.parameters
    weights = {name: sum(p.nbytes for module in modules for p in module.parameters()) for name, modules in parts.items()}
    sizes = {name: memory.saved.get(name, 0) + round(held * weights[name]) for name in forward_order(list(parts))}
    return plan_device_map(sizes, gpus)


def make_trainer(config: TrainConfig, callbacks: list[pl.Callback], start_step: int = 0) -> pl.Trainer:
    """Lightning's trainer; one epoch is the whole run, everything counts optimiser steps.

    Args:
        config: Checked configuration.
        callbacks: Lightning's callbacks.
        start_step: Step that the run goes on from.
    """
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment
    from lightning.pytorch.strategies import ModelParallelStrategy
    from lightning.pytorch.strategies import Strategy as LightningStrategy

    trainer, memory = config.trainer, config.memory
    on_gpu = trainer.accelerator is Accelerator.gpu or (trainer.accelerator is Accelerator.auto and torch.cuda.is_available())
    if trainer.accelerator is Accelerator.gpu and not torch.cuda.is_available():
        raise UserError("trainer.accelerator=gpu: torch sees no GPU here; choose trainer.accelerator=cpu")
    device_type = "cuda" if on_gpu else "cpu"
    if not on_gpu and trainer.threads:
        torch.set_num_threads(trainer.threads)
    try:
        precision = lightning_precision(memory.precision.value, device_type)
    except ValueError as error:
        raise UserError(f"memory.{error}") from error
    set_tf32(memory.precision.value)
    strategy: str | LightningStrategy = trainer.strategy.value
    if trainer.strategy is Strategy.ddp and config.stage.region_mode is RegionMode.separate:
        strategy = "ddp_find_unused_parameters_true"
    if trainer.strategy is Strategy.fsdp:
        # One file, as any other checkpoint; the network divides itself, see `SegmentationModule.configure_model`.
        strategy = ModelParallelStrategy(
            data_parallel_size=trainer.devices * trainer.num_nodes, tensor_parallel_size=1, save_distributed_checkpoint=False
        )
    if config.model.device_map is not None:
        from medseg.training.placed import PlacedStrategy

        strategy = PlacedStrategy(torch.device("cuda:0" if on_gpu else "cpu"), device_places(config))
    return pl.Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=trainer.devices,
        num_nodes=trainer.num_nodes,
        strategy=strategy,
        # Ranks come from torchrun or from `launch.py`, whatever a scheduler says about its own processes.
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
        profiler=_profiler(config),
    )


def _profiler(config: TrainConfig) -> Any:
    if config.debug.profiler is Profiler.none:
        return None
    from lightning.pytorch.profilers import SimpleProfiler

    return SimpleProfiler(config.run_dir, "profile")  # its own way out is a log message, which medseg silences


def make_card(config: TrainConfig, plain_config: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint says about itself: all that prediction needs, in plain types.

    Args:
        config: Checked configuration.
        plain_config: The same in plain types, kept as a record; never executed.
    """
    task, stage = make_task(config.task), config.stage
    is_coarse = stage.name is StageName.coarse
    return {
        "format": CARD_FORMAT,
        "stage": stage.name.value,
        "task": task.to_dict(),
        "num_classes": task.num_classes if is_coarse else task.num_region_classes,
        "spacing_mm": list(config.spacing.target_spacing_mm) if config.spacing.target_spacing_mm else NATIVE,
        "grid_rule": make_grid_rule(config.spacing).to_dict(),
        "resampling": config.spacing.resampling.value,
        "patch_size": list(stage.patch_size) if stage.patch_size else None,
        "tile_size": list(config.inference.tile_size) if config.inference.tile_size else None,
        "region_margin_mm": stage.region_margin_mm or 0.0,
        "region_mode": region_mode_of(config),
        "precision": config.memory.precision.value,
        "model": model_arguments(config),
        "config": plain_config,
        "versions": versions(),
    }


def load_stage(path: Path, stage: str, device: torch.device, precision: str | None = None) -> TrainedStage:
    """Load a stage from a checkpoint, as data: `weights_only`, nothing in it is executed.

    Args:
        path: Checkpoint, or safetensors file.
        stage: The stage it must be, `coarse` or `fine`.
        device: Where it will run.
        precision: Number format; None = as in training, fp32 where the device lacks it or only emulates it.

    Raises:
        UserError: If the file is missing, damaged, not of medseg, of another stage or of a newer format.
    """
    card, weights = read_weights(path, stage, stage)
    try:
        task = Task.from_dict(card["task"])
        network = make_network(_tuples(card["model"]), task, card["region_mode"])
        precision = precision or inference_precision(Precision(card["precision"]).value, device.type)
        trained = TrainedStage(
            network=network,
            name=stage,
            task=task,
            spacing_mm=None if card["spacing_mm"] == NATIVE else _triple(card["spacing_mm"]),
            # Cards from before there was a choice do not say it.
            resampling=Resampling(card.get("resampling", ANTIALIASED)).value,
            patch_size=_triple(card["tile_size"]) if card["tile_size"] else None,
            region_margin_mm=float(card["region_margin_mm"]),
            region_mode=card["region_mode"],
            precision=precision,
            device=device,
            # Cards from before there was a choice do not have it.
            rule=GridRule.from_dict(card["grid_rule"]) if "grid_rule" in card else PLAIN,
            checkpoints={str(path): checksum(path)},
        )
    except (KeyError, TypeError, ValueError, AttributeError, UserError) as error:
        raise UserError(
            f"{stage}={path}: its description is damaged or of another version ({type(error).__name__}: {_line(error)}); take another copy"
        ) from error
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        raise UserError(f"{stage}={path}: its weights do not fit the network that it describes ({_line(error)})") from error
    if precision in HALF:
        use_channels_last(network)  # the layout that kernels in half precision like; fp32 gains nothing
    network.to(device).eval()
    trained.count_memory()
    return trained


def load_stages(paths: Sequence[Path], stage: str, device: torch.device, precision: str | None = None) -> TrainedStage:
    """Load one or several checkpoints of a stage, whose results are averaged.

    Args:
        paths: Checkpoints, one at least.
        stage: See `load_stage`.
        device: See `load_stage`.
        precision: See `load_stage`.

    Raises:
        UserError: As `load_stage`, and if the checkpoints do not ask for the same input.
    """
    first, *others = (load_stage(path, stage, device, precision) for path in paths)
    for path, other in zip(paths[1:], others, strict=True):
        for name in ("task", "spacing_mm", "rule", "resampling", "patch_size", "region_margin_mm", "region_mode", "precision"):
            ours, theirs = getattr(first, name), getattr(other, name)
            if ours != theirs:
                raise UserError(
                    f"{stage}: {paths[0]} and {path} cannot be averaged: {name} is {ours} in the one and {theirs} in the other; "
                    "give checkpoints of one recipe"
                )
    # Networks may differ in size: the largest decides what fits.
    most = max(trained.bytes_per_voxel for trained in (first, *others))
    return replace(
        first,
        others=tuple(other.network for other in others),
        bytes_per_voxel=most,
        checkpoints={name: checksum for trained in (first, *others) for name, checksum in trained.checkpoints.items()},
    )


def pick_device(accelerator: Accelerator) -> torch.device:
    """The device of a prediction.

    Raises:
        UserError: If a GPU is asked for and none is there.
    """
    if accelerator is Accelerator.gpu and not torch.cuda.is_available():
        raise UserError("accelerator=gpu: torch sees no GPU here; choose accelerator=cpu")
    return torch.device("cuda" if accelerator is not Accelerator.cpu and torch.cuda.is_available() else "cpu")


def versions() -> dict[str, str]:
    """Versions that a result depends on, and the commit of a checkout."""
    found = {name: version(name) for name in ("torch", "lightning", "numpy")}
    root = Path(__file__).resolve().parents[1]
    commit = ""
    if (root / ".git").exists():
        try:
            commit = subprocess.run(
                ["git", "-C", str(root), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
            ).stdout.strip()
        except OSError:
            commit = ""  # no git on this machine: the version alone must do
    return {"medseg": __version__, "commit": commit, "python": platform.python_version(), **found}


def _triple(values: list[Any]) -> Any:
    z, y, x = values
    return (z, y, x)


def _with_defaults(model: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a network: a card that is older than an argument means its default."""
    parameters = inspect.signature(UNet).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items() if parameter.default is not parameter.empty}
    full = {**defaults, **_tuples(model)}
    full["strides"] = full["strides"] or level_strides(None, full["depth"] + (full["stem"] != "conv"))
    return full


def _tuples(model: dict[str, Any]) -> dict[str, Any]:
    def tupled(value: Any) -> Any:
        return tuple(map(tupled, value)) if isinstance(value, list) else value

    return {key: tupled(value) for key, value in model.items()}


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
