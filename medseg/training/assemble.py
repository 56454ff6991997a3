"""Objects of a run from its whole configuration: trainer, module, data module, metadata."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from medseg.cascade.load import load_stage
from medseg.cascade.stage import TrainedStage
from medseg.data.case_table import CaseSource
from medseg.data.cases import find_cases, find_sources
from medseg.data.options import StageName
from medseg.data.spacing import make_grid_rule
from medseg.errors import UserError
from medseg.memory.accounting import count_step
from medseg.memory.device import pick_device
from medseg.memory.device_map import named_parts, plan_device_map, resolve_device_map
from medseg.memory.precision import lightning_precision, set_tf32
from medseg.memory.switches import switch_on
from medseg.models.stage_network import StageNetwork
from medseg.task_options import make_task
from medseg.training.callbacks import View
from medseg.training.data_module import CasesDataModule
from medseg.training.extensions import make_loggers, make_loss, make_metrics, make_transforms
from medseg.training.mapped_blocks import map_blocks
from medseg.training.module import SegmentationModule
from medseg.training.network import (
    count_channels,
    count_classes,
    find_divisor,
    make_network,
    make_network_on_meta,
    network_node,
)
from medseg.training.optimisation import find_lr_factor, make_optimizer, make_schedule
from medseg.training.options import Profiler, Strategy, TrainConfig
from medseg.training.versions import collect_versions
from medseg.weights.checks import NATIVE
from medseg.weights.files import METADATA_FORMAT, trained_cases

if TYPE_CHECKING:
    import lightning.pytorch as pl

Number = TypeVar("Number", int, float)


def make_module(
    config: TrainConfig, network: StageNetwork, metadata: dict[str, Any]
) -> SegmentationModule:
    """Join a network with the switches, the loss and the optimisation of a configuration.

    Args:
        config: Checked configuration.
        network: Changed in place.
        metadata: Saved in the checkpoints, see `make_metadata`.

    Raises:
        UserError: If a switch does not work on the device.
    """
    device_type = pick_device(config.trainer.accelerator).type
    if config.trainer.sync_batchnorm and device_type == "cpu":
        raise UserError(
            "trainer.sync_batchnorm=true works on GPUs only, but torch sees none here; "
            "choose trainer.sync_batchnorm=false"
        )
    if device_type == "cpu":
        # Mapped blocks return large tensors to the system when they are freed.
        map_blocks(config)
    lr_factor = find_lr_factor(config.lr_scaling, config.stage.batch_size)
    switched = switch_on(
        network,
        config.memory,
        device_type,
        sync_batchnorm=config.trainer.sync_batchnorm,
        # Without a patch size or a fixed size of the crop, the crops differ in shape.
        has_many_shapes=config.stage.patch_size is None and config.spacing.size is None,
    )
    return SegmentationModule(
        switched,
        make_loss(config),
        make_optimizer(config.optimizer, lr_factor, config.trusted_targets),
        make_schedule(config.schedule, lr_factor, config.warmup_steps, config.trusted_targets),
        seed=config.seed,
        accumulate=config.memory.accumulate,
        tile_size=config.inference.tile_size,
        overlap=config.inference.overlap,
        ema_decay=config.ema_decay,
        metadata=metadata,
        metrics=make_metrics(config.metrics, count_classes(config), config.trusted_targets),
    )


def make_trainer(
    config: TrainConfig, callbacks: list[pl.Callback], start_step: int = 0
) -> pl.Trainer:
    """Make Lightning's trainer, for which the whole run is one epoch.

    Also sets torch's threads and TF32 in this process, and silences Lightning's remarks.

    Args:
        config: Checked configuration.
        callbacks: Lightning's callbacks.
        start_step: Step that the run resumes from.

    Raises:
        UserError: If the device lacks the precision.
    """
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.environments import (
        ClusterEnvironment,
        LightningEnvironment,
        TorchElasticEnvironment,
    )

    trainer = config.trainer
    memory = config.memory
    device_type = pick_device(trainer.accelerator).type
    if device_type == "cpu" and trainer.threads:
        torch.set_num_threads(trainer.threads)
    try:
        precision = lightning_precision(memory.precision.value, device_type)
    except ValueError as error:
        raise UserError(f"memory.{error}") from error
    set_tf32(memory.precision.value)
    _silence_lightning()
    # Ranks come from torchrun or from `start_ranks`. Without this choice Lightning would detect a
    # scheduler, such as SLURM, and take its processes for the ranks.
    environment: ClusterEnvironment = LightningEnvironment()
    if TorchElasticEnvironment.detect():
        environment = TorchElasticEnvironment()
    return pl.Trainer(
        accelerator="gpu" if device_type == "cuda" else "cpu",
        devices=trainer.devices,
        num_nodes=trainer.num_nodes,
        strategy=_make_strategy(config, device_type),
        plugins=[environment],
        precision=precision,  # type: ignore[arg-type]
        max_steps=config.steps,
        max_epochs=-1,  # no limit
        accumulate_grad_batches=memory.accumulate,
        benchmark=memory.cudnn_benchmark,
        gradient_clip_val=trainer.gradient_clip,
        gradient_clip_algorithm=trainer.clip_by.value,
        # Counted in micro-batches, unlike `max_steps`. With `check_val_every_n_epoch=None` the
        # count goes on beyond the end of an epoch.
        val_check_interval=min(config.stage.validate_every, config.steps) * memory.accumulate,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        limit_val_batches=1 if config.debug.fast else 1.0,  # 1 case, or the share 1.0
        use_distributed_sampler=False,  # samples are a function of (seed, n)
        log_every_n_steps=10,
        logger=make_loggers(config, start_step),
        callbacks=callbacks,
        default_root_dir=config.run_dir,
        enable_model_summary=False,
        enable_progress_bar=sys.stderr.isatty(),  # in a log the history prints lines instead
        detect_anomaly=config.debug.anomaly,
        profiler=_make_profiler(config),
    )


def _silence_lightning() -> None:
    """Silence Lightning's greetings and tips, and warnings that do not concern the user."""
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
    messages = (
        # The loader needs no state: samples are a function of (seed, n).
        "You're resuming from a checkpoint that ended before the epoch",
        ".*LeafSpec.*is deprecated",
        "The number of training batches .* is smaller than the logging interval",
        # Each rank logs the mean over the cases of all ranks.
        ".*sync_dist=True",
    )
    for message in messages:
        warnings.filterwarnings("ignore", message)


def _make_profiler(config: TrainConfig) -> Any:
    """Make Lightning's profiler, whose files go to the run folder; None if none is configured."""
    from lightning.pytorch.profilers import PyTorchProfiler, SimpleProfiler

    if config.debug.profiler is Profiler.torch:
        return PyTorchProfiler(
            dirpath=config.run_dir,
            filename="profile",
            export_to_chrome=True,
            profile_memory=True,
            record_shapes=True,
        )
    if config.debug.profiler is Profiler.simple:
        # With a file: by default the table is a log message, which medseg silences.
        return SimpleProfiler(dirpath=config.run_dir, filename="profile")
    return None


def _make_strategy(config: TrainConfig, device_type: str) -> Any:
    """Name or make the Lightning strategy of a configuration."""
    trainer = config.trainer
    if config.model["device_map"] is not None:
        from medseg.training.device_map_strategy import DeviceMapStrategy

        home = torch.device("cuda:0" if device_type == "cuda" else "cpu")
        return DeviceMapStrategy(home, make_device_map(config))
    if trainer.strategy is Strategy.ddp and _has_unused_parameters(config):
        return "ddp_find_unused_parameters_true"
    return trainer.strategy.value


def _has_unused_parameters(config: TrainConfig) -> bool:
    """Whether some weights of the network get no gradient, for which DDP would wait."""
    output_weights = config.loss.get("output_weights") or ()
    # The loss does not compute an output of weight 0, so its layers get no gradient.
    if 0 in output_weights:
        return True
    return make_network_on_meta(config).traits.has_unused


def make_data_module(
    config: TrainConfig, sources: Sequence[CaseSource] | None = None
) -> CasesDataModule:
    """Make the data module of a configuration.

    Missing phantoms are made, and the coarse checkpoint is loaded where one is given.

    Args:
        config: Checked configuration.
        sources: Cases; None = those of the configuration.
    """
    coarse = None
    coarse_by_case: dict[str, TrainedStage] = {}
    if config.stage.coarse:
        coarse = _load_coarse("stage.coarse", config.stage.coarse, config)
    elif config.stage.coarse_folds:
        paths = config.stage.coarse_folds
        stages = [_load_coarse("stage.coarse_folds", path, config) for path in paths]
        coarse_by_case = _coarse_stage_by_case(config, stages)
        # Cases that are not in `coarse_by_case` are phantoms, for which any of the stages will do.
        coarse = stages[0]
    if sources is None:
        sources = find_sources(config.data, config.task)
    return CasesDataModule(
        config,
        sources,
        make_task(config.task),
        divisor=find_divisor(config),
        augmentation=make_transforms(config),
        coarse=coarse,
        coarse_by_case=coarse_by_case,
    )


def _load_coarse(key: str, path: str, config: TrainConfig) -> TrainedStage:
    """Load a coarse stage whose result the fine stage sees.

    Raises:
        UserError: If it cannot be used, or is of another task.
    """
    task = make_task(config.task)
    device = pick_device(config.trainer.accelerator)
    coarse = load_stage(Path(path), "coarse", device, trusted=config.trusted_targets)
    if not coarse.task.finds_regions_of(task):
        our_modalities = [channel.modality for channel in task.channels]
        their_modalities = [channel.modality for channel in coarse.task.channels]
        raise UserError(
            f"{key}={path}: it was trained for the task {coarse.task.name} with the labels "
            f"{coarse.task.labels} and the channels {their_modalities}, but the task {task.name} "
            f"has {task.labels} and {our_modalities}; give a checkpoint of the same task"
        )
    return coarse


def _coarse_stage_by_case(
    config: TrainConfig, stages: Sequence[TrainedStage]
) -> dict[str, TrainedStage]:
    """Assign each case the first coarse stage that has not trained on its patient.

    With one stage of each fold, this is the rule of nnU-Net's cascade.

    Args:
        config: Checked configuration.
        stages: Coarse stages of `stage.coarse_folds`, in the same order.

    Raises:
        UserError: If a checkpoint does not say what it has trained on, or all have trained on the
            patient of a case.
    """
    paths = config.stage.coarse_folds or []
    # All cases of the table, also those that are held out now: a checkpoint may have trained on
    # them.
    table_group, _phantom_group = find_cases(config.data, config.task)
    all_cases, _label_values = table_group
    patient_by_case = {case.name: case.patient for case in all_cases}
    # Patients that each stage has trained on, by the cases that its checkpoint lists. The number of
    # its fold would not do: since then the table may have grown, or other patients may be held out.
    seen_patients: list[set[str]] = []
    for path in paths:
        names = trained_cases(Path(path), "stage.coarse_folds")
        seen = {patient_by_case[name] for name in names if name in patient_by_case}
        if not seen:
            raise UserError(
                f"stage.coarse_folds: {path} has trained on none of these cases, so it may know "
                "them by other names; give checkpoints of the same case table, or stage.coarse"
            )
        seen_patients.append(seen)
    stage_by_case: dict[str, TrainedStage] = {}
    # The first source has the cases of the table; a second one has phantoms.
    split = find_sources(config.data, config.task)[0].split
    for case in (*split.train, *split.val):
        unbiased_stages = []
        for stage, patients in zip(stages, seen_patients, strict=True):
            if case.patient not in patients:
                unbiased_stages.append(stage)
        if not unbiased_stages:
            raise UserError(
                "stage.coarse_folds: all of these checkpoints have trained on the patient "
                f"{case.patient} of the case {case.name}; add one that has not, or give "
                "stage.coarse"
            )
        stage_by_case[case.name] = unbiased_stages[0]
    return stage_by_case


def make_views(config: TrainConfig) -> list[View]:
    """Make a view of each region for validation pictures: class names, and whether it is mirrored.

    A coarse or single stage has one view, of the whole scan.
    """
    task = make_task(config.task)
    if config.stage.name is not StageName.fine:
        label_names = {value: name for name, value in task.labels.items()}
        return [View(label_names, is_mirrored=False)]
    views = []
    for region in task.regions:
        # The first classes of the fine network are the labels of the region, in their order. The
        # helper labels after them have no name: each region would give them a row of its own, with
        # equal case and label.
        label_names = dict(enumerate(region.labels, start=1))
        # The fine network sees each region as if it were on the left.
        views.append(View(label_names, is_mirrored=region.side == "right"))
    return views


def make_metadata(config: TrainConfig, plain_config: dict[str, Any]) -> dict[str, Any]:
    """Describe a run for its checkpoints.

    Args:
        config: Checked configuration.
        plain_config: Content of `config.yaml` of the run folder, kept as a record; never executed.
    """
    task = make_task(config.task)
    stage = config.stage
    metadata = {
        "format": METADATA_FORMAT,
        "stage": stage.name.value,
        "task": task.to_dict(),
        "num_classes": count_classes(config),
        "spacing_mm": _as_list(config.spacing.target_spacing_mm) or NATIVE,
        "grid_rule": asdict(make_grid_rule(config.spacing)),
        "resampling": config.spacing.resampling.value,
        "patch_size": _as_list(stage.patch_size),
        "tile_size": _as_list(config.inference.tile_size),
        "region_margin_mm": stage.region_margin_mm or 0.0,
        "precision": config.memory.precision.value,
        "model": network_node(config.model, config.spacing),
        "config": plain_config,
        "versions": collect_versions(),
    }
    if stage.name is not StageName.single:
        metadata["coarse_channel"] = stage.coarse_channel
    return metadata


def _as_list(sizes: Sequence[Number] | None) -> list[Number] | None:
    """Convert a size or spacing to a list, since metadata keep plain types only; None stays."""
    return list(sizes) if sizes else None


def make_device_map(config: TrainConfig) -> dict[str, str]:
    """Map each part of the network to a device, as `model.device_map` says.

    `auto` balances the bytes of a step over all GPUs.

    Returns:
        Device by the name of the part.

    Raises:
        UserError: If a named device or part does not exist, or `auto` finds fewer than two GPUs.
    """
    device_map = config.model["device_map"]
    gpu_bytes = {}
    for index in range(torch.cuda.device_count()):
        gpu_bytes[f"cuda:{index}"] = torch.cuda.get_device_properties(index).total_memory
    parts = named_parts(make_network_on_meta(config))
    if device_map == "auto":
        return _balance_parts(config, parts, gpu_bytes)
    devices = ("cpu", *gpu_bytes)
    missing_devices = sorted(set(device_map.values()) - set(devices))
    if missing_devices:
        raise UserError(
            f"model.device_map: there is no {', '.join(missing_devices)} here; "
            f"there are {', '.join(devices)}"
        )
    try:
        return resolve_device_map(list(parts), device_map)
    except ValueError as error:
        raise UserError(f"model.{error}") from error


def _balance_parts(
    config: TrainConfig, parts: Mapping[str, Sequence[nn.Module]], gpu_bytes: dict[str, int]
) -> dict[str, str]:
    """Divide the parts of the network among all GPUs by the bytes of a training step.

    Args:
        config: Checked configuration.
        parts: From `named_parts`.
        gpu_bytes: Memory of each GPU by its name.

    Returns:
        GPU by the name of the part.

    Raises:
        UserError: If there are fewer than two GPUs.
    """
    if len(gpu_bytes) < 2:
        raise UserError(
            "model.device_map=auto divides a network among GPUs, "
            f"and torch sees {len(gpu_bytes)}; leave it out"
        )
    # Whole crops differ in size. A typical size, in voxels, is enough, because only the ratio of
    # the parts matters.
    shape = config.stage.patch_size or config.spacing.size or (128, 128, 128)
    # The learning rate does not matter for the bytes, so it is not scaled.
    optimizer_factory = make_optimizer(
        config.optimizer, lr_factor=1.0, trusted=config.trusted_targets
    )
    memory = count_step(
        lambda: make_network(config),
        (1, count_channels(config), *shape),
        loss=make_loss(config),
        make_optimizer=optimizer_factory,
        precision=config.memory.precision.value,
    )
    # Bytes that a step holds per byte of weights: the weights, their gradients and the optimiser
    # state.
    lasting_bytes = memory.parameters + memory.gradients + memory.optimizer_state
    bytes_per_weight_byte = lasting_bytes / memory.parameters
    part_bytes = {}
    # In the order of the forward pass; parts that did not run in the counted step come last.
    for name in dict.fromkeys((*memory.order, *parts)):
        weight_bytes = 0
        for module in parts[name]:
            weight_bytes += sum(parameter.nbytes for parameter in module.parameters())
        activation_bytes = memory.saved.get(name, 0)
        part_bytes[name] = activation_bytes + round(bytes_per_weight_byte * weight_bytes)
    return plan_device_map(part_bytes, gpu_bytes)
