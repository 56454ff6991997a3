"""From a composed configuration to checked objects: types, lengths, targets and switches that contradict each other.

Nothing here imports torch: a mistake is told before anything heavy starts.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException, ValidationError

from medseg.config.schema import (
    Accelerator,
    LrScaling,
    Norm,
    Precision,
    PredictConfig,
    PrepareConfig,
    RegionFrom,
    RegionMode,
    Resampling,
    SpacingConfig,
    SpacingStrategy,
    StageName,
    Stem,
    Strategy,
    TaskConfig,
    TrainConfig,
)
from medseg.config.search import SearchConfig, check_sweep
from medseg.errors import UserError
from medseg.errors import require as _require
from medseg.strides import level_strides, total_strides

T = TypeVar("T")

# The only foreign objects that a configuration may name. A prefix ends with a dot and admits public names below it.
TARGET_WHITELIST: dict[str, tuple[str, ...]] = {
    "optimizer": ("torch.optim.", "pytorch_optimizer."),
    "schedule": ("torch.optim.lr_scheduler.",),
    "logger": ("lightning.pytorch.loggers.",),
}

# Schedules that multiply a rate from step to step, so that a warm-up can be laid over them.
CHAINABLE_SCHEDULES = ("ConstantLR", "CosineAnnealingLR", "ExponentialLR", "LinearLR", "MultiStepLR", "PolynomialLR", "StepLR")
# Optimisers whose step does not grow with the gradient: the noise of a batch shrinks with its root (Malladi et al. 2022).
ADAPTIVE_OPTIMIZERS = ("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Lamb", "NAdam", "RAdam", "RMSprop")

# Strategies whose target is found in the cases that are trained on, by how those are averaged.
FOUND_IN_DATA = {SpacingStrategy.dataset_median: "median", SpacingStrategy.dataset_mean: "mean"}
# Keys of `spacing` that belong to one strategy.
OWN_SPACING_KEYS = {
    "size": SpacingStrategy.fixed_size,
    "range_mm": SpacingStrategy.multi_scale,
    "draw": SpacingStrategy.multi_scale,
}

# Where a number may lie, as an interval; each number of a tuple or list. Keys that a root does not have are skipped.
RANGES: dict[str, str] = {
    "seed": "[0, inf)",
    "steps": "[1, inf)",
    "warmup_steps": "[0, inf)",
    "shape": "[1, inf)",
    "extent_mm.coarse": "(0, inf)",
    "extent_mm.fine": "(0, inf)",
    "checkpoint_every": "[1, inf)",
    "ema_decay": "(0, 1)",
    "hu_slope": "(0, inf)",
    "hu_offset": "(-inf, inf)",
    "threads": "[1, inf)",
    "num_folds": "[2, inf)",
    "num_train": "[1, inf)",
    "num_val": "[1, inf)",
    "num_test": "[0, inf)",
    "num_pictures": "[0, inf)",
    "stage.patch_size": "[1, inf)",
    "stage.batch_size": "[1, inf)",
    "stage.max_voxels": "[1, inf)",
    "stage.boundary_share": "[0, 1]",
    "stage.elsewhere_share": "[0, 1)",
    "stage.slab_share": "[0, 1]",
    "stage.region_margin_mm": "[0, inf)",
    "stage.box_jitter_mm": "[0, inf)",
    "stage.validate_every": "[1, inf)",
    "stage.patience": "[1, inf)",
    "spacing.target_spacing_mm": "(0, inf)",
    "spacing.size": "[1, inf)",
    "spacing.range_mm": "(0, inf)",
    "data.hu_slope": "(0, inf)",
    "data.hu_offset": "(-inf, inf)",
    "data.num_folds": "[2, inf)",
    "data.num_workers": "[0, inf)",
    "data.prefetch": "[1, inf)",
    "data.phantom_share": "(0, 1)",
    "data.phantoms.seed": "[0, inf)",
    "data.phantoms.num_train": "[1, inf)",
    "data.phantoms.num_val": "[1, inf)",
    "data.phantoms.num_test": "[0, inf)",
    "data.phantoms.num_extra": "[0, inf)",
    "augment.affine_probability": "[0, 1]",
    "augment.rotation_deg": "[0, 180]",
    "augment.scale_range": "(0, inf)",
    "augment.shear_max": "[0, 1)",
    "augment.translation_mm": "[0, inf)",
    "augment.blur_probability": "[0, 1]",
    "augment.blur_sigma_mm": "(0, inf)",
    "augment.low_resolution_probability": "[0, 1]",
    "augment.low_resolution_mm": "(0, inf)",
    "augment.low_resolution_all_axes_probability": "[0, 1]",
    "augment.noise_probability": "[0, 1]",
    "augment.noise_sd": "[0, inf)",
    "augment.contrast_probability": "[0, 1]",
    "augment.contrast_range": "(0, inf)",
    "augment.brightness_probability": "[0, 1]",
    "augment.brightness_max": "[0, 2]",
    "augment.gamma_probability": "[0, 1]",
    "augment.gamma_range": "(0, inf)",
    "augment.window_shift_hu": "[0, inf)",
    "augment.truncate_probability": "[0, 1]",
    "augment.truncate_max_fraction": "[0, 1)",
    "augment.narrow_probability": "[0, 1]",
    "augment.narrow_max_fraction": "[0, 1)",
    "augment.circle_probability": "[0, 1]",
    "augment.circle_radius_range": "(0, inf)",
    "model.width": "[1, inf)",
    "model.depth": "[1, inf)",
    "model.blocks_per_level": "[1, inf)",
    "model.refine": "[0, inf)",
    "loss.dice_weight": "[0, inf)",
    "loss.ce_weight": "[0, inf)",
    "optimizer.lr": "(0, inf)",
    "num_batches": "[1, inf)",
    "workers": "[0, inf)",
    "prefetches": "[1, inf)",
    "lowest_lr": "(0, inf)",
    "highest_lr": "(0, inf)",
    "memory.accumulate": "[1, inf)",
    "memory.budget_gib": "(0, inf)",
    "trainer.devices": "[1, inf)",
    "trainer.num_nodes": "[1, inf)",
    "trainer.threads": "[1, inf)",
    "trainer.gradient_clip": "(0, inf)",
    "inference.tile_size": "[1, inf)",
    "inference.overlap": "[0, 1)",
    "inference.budget_gib": "(0, inf)",
    "sweep.num_trials": "[1, inf)",
    "sweep.num_random": "[1, inf)",
    "sweep.seed": "[0, inf)",
    "sweep.prune_after_trials": "[1, inf)",
    "sweep.prune_after_steps": "[0, inf)",
}


def to_config(composed: DictConfig, schema: type[T]) -> T:
    """Merge a composed configuration into its schema, convert it to dataclasses and run the cross-checks.

    Args:
        composed: What Hydra composed, or what a run folder holds.
        schema: One of the roots in `medseg.config.schema`.

    Returns:
        An instance of `schema`; every tuple is a tuple of the declared length.

    Raises:
        UserError: Naming the key, the value and the cure.
    """
    config = to_typed(composed, schema)
    if isinstance(config, TrainConfig):
        _check_train(config)
    if isinstance(config, PredictConfig):
        for key in ("coarse", "fine"):
            setattr(config, key, _path_list(key, getattr(config, key)))
        _check_by_spacing(config)
    if isinstance(config, PrepareConfig):
        for name, spacing in config.spacings.items():
            _check_spacing(f"spacings.{name}", spacing)
    if isinstance(config, SearchConfig):
        check_sweep(config.sweep)
    if isinstance(getattr(config, "task", None), TaskConfig):
        _check_task(typing.cast(Any, config).task)
    return config


def _check_by_spacing(config: PredictConfig) -> None:
    """Bring the checkpoints of each range to lists; refuse ranges that are empty or overlap."""
    earlier = ("", 0.0)
    for name, one in sorted((config.by_spacing or {}).items(), key=lambda item: item[1].range_mm):
        key, (low_mm, high_mm) = f"by_spacing.{name}", one.range_mm
        _require(0 <= low_mm < high_mm, f"{key}.range_mm: two rising numbers from 0 on are needed, but got {list(one.range_mm)}")
        _require(
            low_mm >= earlier[1],
            f"{key}.range_mm={list(one.range_mm)} overlaps that of {earlier[0]}; let one end where the other begins",
        )
        earlier = (name, high_mm)
        for stage in ("coarse", "fine"):
            paths = _path_list(f"{key}.{stage}", getattr(one, stage)) or getattr(config, stage)
            setattr(one, stage, paths)


def _path_list(key: str, value: Any) -> list[str]:
    """One path or a list of them as a list; none is the empty list."""
    paths = value if isinstance(value, list) else [] if value is None else [value]
    _require(
        value != [] and all(isinstance(path, str) for path in paths),
        f"{key}: a checkpoint, a list of checkpoints or null is needed, but got {value!r}",
    )
    return paths


def to_typed(composed: DictConfig, schema: type[T]) -> T:
    """The part of `to_config` that looks at one key at a time: names, types, ranges, targets; switches may contradict each other."""
    try:
        merged = OmegaConf.merge(OmegaConf.structured(schema), OmegaConf.create(resolved(composed)))
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise UserError(explain(error, composed)) from error
    _check_tuples(config, "")
    _check_ranges(config)
    for group in TARGET_WHITELIST:
        if hasattr(config, group):
            _check_target(group, getattr(config, group))
    return typing.cast(T, config)


def resolved(composed: DictConfig) -> dict[str, Any]:
    """The plain values of a composed configuration, not yet checked.

    Raises:
        UserError: If a value is missing or refers to none.
    """
    try:
        return typing.cast(dict[str, Any], OmegaConf.to_container(composed, resolve=True))
    except OmegaConfBaseException as error:
        raise UserError(explain(error, composed)) from error


def explain(error: Exception, composed: DictConfig | None = None) -> str:
    """Turn an error of Hydra or OmegaConf into one sentence with the key and a guess at what was meant."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else type(error).__name__
    key = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("full_key:")), "")
    if isinstance(error, MissingMandatoryValue):
        return f"{key or first}: a value is missing; give it as {key}=<value>"
    overridden = re.match(r"Could not override '([^']+)'", first)
    if overridden:
        key = overridden.group(1)
        return f"{key}: there is no such key{_suggestion(key, composed)}"
    if isinstance(error, ConfigKeyError):
        return f"{key}: there is no such key{_suggestion(key, composed)}"
    if isinstance(error, ValidationError):
        return f"{key}: {first}"
    if first.startswith("Ambiguous value"):
        return f"{first}; a sweep over several values needs -m, a list [brackets]"
    options = [line for line in lines[1:] if not line.startswith(("Config search path", "provider=", "object_type", "full_key"))]
    if "Could not find" in first or first.startswith("You must specify"):
        listed = ", ".join(option for option in options if option != "Available options in" and "Available options" not in option)
        return f"{first}; there are: {listed}" if listed else first
    return first


def _suggestion(key: str, composed: DictConfig | None) -> str:
    """Name the keys that the misspelled one resembles."""
    if composed is None:
        return "; `--cfg job` prints all keys"
    known = sorted(_keys(OmegaConf.to_container(composed, resolve=False)))
    near = difflib.get_close_matches(key, [k for k in known if k != key], n=2, cutoff=0.6)
    return f"; did you mean {' or '.join(near)}?" if near else "; `--cfg job` prints all keys"


def _keys(node: Any, prefix: str = "") -> set[str]:
    if not isinstance(node, dict):
        return {prefix}
    found = {prefix} if prefix else set()
    for name, value in node.items():
        found |= _keys(value, f"{prefix}.{name}" if prefix else str(name))
    return found


def _check_tuples(node: Any, path: str) -> None:
    """Convert lists to the tuples that the schema declares and check their lengths (OmegaConf does neither)."""
    hints = typing.get_type_hints(type(node))
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        key = f"{path}.{field.name}" if path else field.name
        if dataclasses.is_dataclass(value):
            _check_tuples(value, key)
        elif isinstance(value, dict):
            for name, item in value.items():
                if dataclasses.is_dataclass(item):
                    _check_tuples(item, f"{key}.{name}")
        elif isinstance(value, list):
            wanted = _tuple_type(hints[field.name])
            if wanted is None:
                continue
            length = len(typing.get_args(wanted))
            if len(value) != length:
                raise UserError(f"{key}: {length} numbers are needed, one per axis or bound, but got {value}")
            setattr(node, field.name, tuple(value))


def _tuple_type(hint: Any) -> Any:
    candidates = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return next((c for c in candidates if typing.get_origin(c) is tuple), None)


def _check_target(group: str, node: dict[str, Any]) -> None:
    """Allow only listed foreign classes; a configuration is data until it has passed here."""
    if not node:
        return
    for name, value in node.items():
        if isinstance(value, dict) and "_target_" in value:
            raise UserError(f"{group}.{name}._target_: nested targets are not allowed, give plain values")
    target = node.get("_target_")
    if not isinstance(target, str):
        raise UserError(f"{group}._target_: the name of a class is needed, but got {target!r}")
    allowed = TARGET_WHITELIST[group]
    if not any(target.startswith(prefix) and "_" not in target.removeprefix(prefix)[:1] for prefix in allowed):
        raise UserError(f"{group}._target_: {target} is not on the white list ({', '.join(p + '*' for p in allowed)})")


def _class_name(node: dict[str, Any]) -> str:
    return str(node.get("_target_")).rpartition(".")[2]


def _check_ranges(config: Any) -> None:
    """Refuse numbers outside their interval, and ranges whose ends are swapped."""
    for key, interval in RANGES.items():
        value = config
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else getattr(value, name, None)
        numbers = value if isinstance(value, (list, tuple)) else [value]
        if not all(_lies_in(number, interval) for number in numbers if number is not None):
            raise UserError(f"{key}: must lie in {interval}, but got {value}")
        if key.endswith("_range") and value and value[0] > value[1]:
            raise UserError(f"{key}: the lower bound comes first, but got {list(value)}")


def _lies_in(number: Any, interval: str) -> bool:
    """Whether a number lies in an interval such as `[0, 1)`.

    Example:
        >>> [_lies_in(number, "(0, 1]") for number in (0, 0.5, 1, "a")]
        [False, True, True, False]
    """
    if not isinstance(number, (int, float)):
        return False
    low, high = (float(bound) for bound in interval[1:-1].split(","))
    above = number >= low if interval[0] == "[" else number > low
    return above and (number <= high if interval[-1] == "]" else number < high)


def _check_task(task: TaskConfig) -> None:
    values = sorted(task.labels.values())
    _require(
        values == list(range(1, len(values) + 1)),
        f"task.labels: values must be 1, 2, … without a gap, but got {dict(task.labels)}",
    )
    for name, region in task.regions.items():
        unknown = [label for label in region.labels if label not in task.labels]
        _require(not unknown, f"task.regions.{name}.labels: {unknown} are not among task.labels {sorted(task.labels)}")
        _require(bool(region.labels), f"task.regions.{name}.labels: at least one label is needed")
    low_hu, high_hu = task.window_hu
    _require(low_hu < high_hu, f"task.window_hu: the lower bound must lie below the upper, but got {list(task.window_hu)}")


def notes(config: TrainConfig) -> list[str]:
    """What the switches of a right configuration mean together, where that may surprise; to be told when a run begins."""
    stage, memory = config.stage, config.memory
    found = []
    ranks = config.trainer.devices * config.trainer.num_nodes
    micro_batch = stage.batch_size // (ranks * memory.accumulate)
    seen = {}
    if config.model.norm is Norm.batch:
        seen["model.norm=batch"] = micro_batch * (ranks if config.trainer.sync_batchnorm else 1)
    if config.loss.batch_dice:
        seen["loss.batch_dice=true"] = micro_batch
    found += [
        f"{key} looks at {samples} sample{'s' * (samples > 1)} at a time instead of the batch of {stage.batch_size} "
        f"(memory.accumulate={memory.accumulate}, {ranks} rank{'s' * (ranks > 1)}): another result"
        for key, samples in seen.items()
        if samples < stage.batch_size
    ]
    if memory.cudnn_benchmark and stage.patch_size is None and config.spacing.size is None:
        found.append("memory.cudnn_benchmark=true searches anew at each new shape, and without stage.patch_size they vary")
    return found


def _check_spacing(key: str, spacing: SpacingConfig) -> None:
    """Refuse a target spacing or a filter that does not go with its strategy."""
    target_mm, strategy = spacing.target_spacing_mm, spacing.strategy
    if strategy is SpacingStrategy.native:
        _require(
            target_mm is None,
            f"{key}.target_spacing_mm={list(target_mm or ())}: {key}.strategy=native takes each scan as it is; leave it null",
        )
        _require(
            spacing.resampling is Resampling.antialiased,
            f"{key}.resampling={spacing.resampling.value}: {key}.strategy=native resamples nothing; leave it out",
        )
    elif strategy not in {
        *FOUND_IN_DATA,
        SpacingStrategy.fixed_size,
        SpacingStrategy.multi_scale,
    }:  # null: made from the scan's own grid
        _require(
            target_mm is not None,
            f"{key}.target_spacing_mm: {key}.strategy={strategy.value} needs three numbers in mm, (z, y, x)",
        )
    _require(
        strategy not in (SpacingStrategy.isotropic, SpacingStrategy.fixed_resolution) or len(set(target_mm or ())) == 1,
        f"{key}.target_spacing_mm={list(target_mm or ())}: {key}.strategy={strategy.value} has one spacing for all axes; choose "
        f"{key}.strategy=anisotropic",
    )
    for name, owner in OWN_SPACING_KEYS.items():
        value = getattr(spacing, name)
        _require(
            value is None or strategy is owner,
            f"{key}.{name}: only {key}.strategy={owner.value} has it, but {key}.strategy={strategy.value}; leave it out",
        )
        _require(value is not None or strategy is not owner, f"{key}.{name}: {key}.strategy={owner.value} needs a value")
    if spacing.range_mm is not None:
        low_mm, high_mm = spacing.range_mm
        _require(low_mm < high_mm, f"{key}.range_mm: two rising numbers are needed, but got {list(spacing.range_mm)}")
        _require(
            max(target_mm or (0.0,)) <= low_mm,
            f"{key}.target_spacing_mm={list(target_mm or ())}: samples are made from the cache, which must not be coarser than the least of "
            f"{key}.range_mm={list(spacing.range_mm)}; choose less, or null",
        )


def find_divisor(config: TrainConfig) -> tuple[int, int, int]:
    """Voxels per axis (z, y, x) of which the network's input must be a multiple.

    A spacing that is not known yet counts as the same for all axes, which asks for the most.
    """
    return total_strides(choose_strides(config))


def choose_strides(config: TrainConfig) -> tuple[tuple[int, int, int], ...]:
    """What each level of the network divides an axis by, finest first; follows the spacing where the strategy says so."""
    num_levels = config.model.depth + (config.model.stem is not Stem.conv)
    follows = config.spacing.strategy in (SpacingStrategy.anisotropic, *FOUND_IN_DATA)
    return level_strides(config.spacing.target_spacing_mm if follows else None, num_levels)


def _check_train(config: TrainConfig) -> None:
    """Refuse switches that contradict each other, with the cure in the sentence."""
    stage, memory, trainer = config.stage, config.memory, config.trainer
    for key, path in (("data.cases", config.data.cases), ("stage.coarse", stage.coarse), ("init_from", config.init_from)):
        _require(path is None or Path(path).is_file(), f"{key}={path}: there is no such file (paths start at {Path.cwd()})")
    fold = config.data.fold
    _require(
        fold in (None, "all") or (type(fold) is int and 0 <= fold < config.data.num_folds),
        f"data.fold: must lie in 0 … {config.data.num_folds - 1} (data.num_folds={config.data.num_folds}) or be all, but got {fold}",
    )
    policy = memory.checkpointing
    _require(
        policy in ("none", "sqrt", "all") or (isinstance(policy, list) and all(isinstance(name, str) for name in policy)),
        f"memory.checkpointing: none, sqrt, all or a [list] of block names is needed, but got {policy}",
    )
    _require(
        config.loss.dice_weight + config.loss.ce_weight > 0,
        "loss.dice_weight and loss.ce_weight: at least one must be positive",
    )
    _require(
        len(config.model.blocks_per_level) == config.model.depth + 1,
        f"model.blocks_per_level: model.depth={config.model.depth} has {config.model.depth + 1} levels, but got "
        f"{config.model.blocks_per_level}",
    )
    _require(
        config.model.refine == 0 or config.model.stem is not Stem.conv,
        f"model.refine={config.model.refine}: with model.stem=conv the whole network works at full resolution; choose model.refine=0",
    )
    _check_spacing("spacing", config.spacing)
    divisor = find_divisor(config)
    fixed_size = config.spacing.size
    sizes = {
        "spacing.size": fixed_size,
        "stage.patch_size": stage.patch_size,
        "inference.tile_size": config.inference.tile_size,
    }
    for key, size in sizes.items():
        _require(
            size is None or all(voxels % step == 0 for voxels, step in zip(size, divisor, strict=True)),
            f"{key}: must be multiples of {divisor[0] if len(set(divisor)) == 1 else list(divisor)} (model.depth={config.model.depth}, model.stem={config.model.stem.value}), "
            f"but got {list(size or ())}",
        )
        _require(
            size is None or tuple(size) != divisor or config.model.norm is not Norm.instance,
            f"{key}={list(size or ())}: the deepest level of the network would have a single voxel, and model.norm=instance takes no "
            "variance of one; choose more along an axis",
        )
        _require(
            fixed_size is None or size is None or all(part <= whole for part, whole in zip(size, fixed_size, strict=True)),
            f"{key}={list(size or ())} is larger than the whole crop, spacing.size={list(fixed_size or ())}; choose less, or null",
        )
    _require(
        fixed_size is None or stage.max_voxels is None or math.prod(fixed_size) <= stage.max_voxels,
        f"spacing.size={list(fixed_size or ())} has more voxels than stage.max_voxels={stage.max_voxels} lets through; choose less, or "
        "stage.max_voxels=null",
    )

    # After fewer steps the weights of the first one would be a third of the average, or more.
    _require(
        config.ema_decay is None or config.steps * (1 - config.ema_decay) >= 1,
        f"ema_decay={config.ema_decay} averages over {1 / (1 - (config.ema_decay or 0)):.0f} steps, but steps={config.steps}; choose "
        f"{1 - 1 / config.steps:.4g} or less, or more steps",
    )

    ranks = trainer.devices * trainer.num_nodes
    _require(
        ranks == 1 or trainer.strategy is not Strategy.auto,
        f"trainer.devices={trainer.devices} with trainer.strategy=auto: choose trainer=ddp for more than one rank",
    )
    device_map = config.model.device_map
    _require(
        device_map in (None, "auto")
        or (
            isinstance(device_map, dict)
            and all(re.fullmatch(r"cpu|cuda:\d+", str(device)) and isinstance(name, str) for name, device in device_map.items())
        ),
        f"model.device_map: null, auto or a mapping from blocks to cpu, cuda:0, cuda:1, … is needed, but got {device_map}",
    )
    if device_map is not None:
        kinds = {str(device).partition(":")[0] for device in device_map.values()} if isinstance(device_map, dict) else set()
        kinds |= {Accelerator.cpu: {"cpu"}, Accelerator.gpu: {"cuda"}, Accelerator.auto: set()}[trainer.accelerator]
        excluded = {
            f"trainer.devices={trainer.devices}": ranks > 1 and "one rank uses all devices of the map",
            "memory.offload=true": memory.offload and "the map already says where activations lie",
            "memory.compile=true": memory.compile and "compiled code stays on one device",
            f"memory.precision={memory.precision.value}": (
                memory.precision in (Precision.bf16, Precision.fp16)
                and len(kinds) > 1
                and "half precision is that of one kind of device"
            ),
        }
        for key, reason in excluded.items():
            _require(not reason, f"{key} does not go with model.device_map ({reason}); change one of them")
    if trainer.strategy is Strategy.fsdp:
        excluded = {
            "ema_decay": config.ema_decay is not None and "the average would need the whole weights after each step",
            "memory.precision=fp16": memory.precision is Precision.fp16 and "Lightning's FSDP2 has no loss scaling",
            "memory.offload=true": memory.offload and "what a block gathers must not be moved",
            "memory.compile=true": memory.compile and "compiled code does not see a block gather its weights",
            f"optimizer._target_={config.optimizer['_target_']}": (
                not str(config.optimizer["_target_"]).startswith("torch.optim.") and "its rule may need whole weights"
            ),
            "model.norm=batch": (
                config.model.norm is Norm.batch
                and not trainer.sync_batchnorm
                and "each rank would keep running statistics of its own without trainer.sync_batchnorm=true"
            ),
            "stage.region_mode=separate": stage.region_mode is RegionMode.separate
            and "ranks would wait for each other's networks",
        }
        for key, reason in excluded.items():
            _require(not reason, f"{key} does not go with trainer=fsdp ({reason}); choose trainer=ddp, or leave it out")
    _require(
        not trainer.sync_batchnorm or config.model.norm is Norm.batch,
        f"trainer.sync_batchnorm=true: with model.norm={config.model.norm.value} a sample's norms see nothing of other ranks; leave it out",
    )
    _require(
        not (trainer.sync_batchnorm and stage.region_mode is RegionMode.separate),
        "trainer.sync_batchnorm=true does not go with stage.region_mode=separate (ranks would wait for each other's networks); change one",
    )
    _require(
        not (trainer.sync_batchnorm and trainer.accelerator is Accelerator.cpu),
        "trainer.sync_batchnorm=true works on GPUs only, but trainer.accelerator=cpu; choose trainer.sync_batchnorm=false",
    )
    share = ranks * memory.accumulate
    _require(
        stage.batch_size % share == 0,
        f"stage.batch_size={stage.batch_size} cannot be divided among {ranks} rank(s) × memory.accumulate="
        f"{memory.accumulate}; choose a multiple of {share}",
    )
    _require(
        not (memory.precision in (Precision.fp16, Precision.tf32) and trainer.accelerator is Accelerator.cpu),
        f"memory.precision={memory.precision.value} needs a GPU, but trainer.accelerator=cpu; choose memory.precision=bf16",
    )
    _require(
        not (memory.offload and trainer.accelerator is Accelerator.cpu),
        "memory.offload=true moves activations from a GPU to the host, but trainer.accelerator=cpu; choose memory.offload=false",
    )
    _require(
        not (config.data.pin_memory and trainer.accelerator is Accelerator.cpu),
        "data.pin_memory=true speeds up copies to a GPU, but trainer.accelerator=cpu; choose data.pin_memory=null",
    )
    schedule = _class_name(config.schedule)
    _require(
        config.warmup_steps == 0 or schedule in CHAINABLE_SCHEDULES,
        f"warmup_steps={config.warmup_steps}: schedule {schedule} sets its rates itself; choose warmup_steps=0, or a schedule such as "
        "schedule=cosine",
    )
    _require(
        config.warmup_steps < config.steps,
        f"warmup_steps={config.warmup_steps}: the run has only steps={config.steps}; choose fewer",
    )
    optimizer = _class_name(config.optimizer)
    _require(
        config.lr_scaling is not LrScaling.linear or optimizer not in ADAPTIVE_OPTIMIZERS,
        f"lr_scaling=linear: the steps of {optimizer} do not grow with the gradient; choose lr_scaling=sqrt",
    )
    _require(
        not (memory.cudnn_benchmark and trainer.accelerator is Accelerator.cpu),
        "memory.cudnn_benchmark=true chooses kernels of a GPU, but trainer.accelerator=cpu; choose memory.cudnn_benchmark=false",
    )
    sides = {region.side for region in config.task.regions.values()} - {None}
    _require(
        not (sides and 2 in config.augment.flip_axes),
        f"augment.flip_axes={config.augment.flip_axes}: a flip along x (axis 2) swaps the sides that task={config.task.name} tells apart",
    )
    _require(
        set(config.augment.flip_axes) <= {0, 1, 2},
        f"augment.flip_axes: axes are 0 (z), 1 (y), 2 (x), but got {config.augment.flip_axes}",
    )
    if stage.name is StageName.coarse:
        _require(
            not (sides and config.augment.flip_axes),
            f"augment.flip_axes={config.augment.flip_axes}: flips make sides undecidable for the coarse stage; leave it empty",
        )
        _require(
            stage.patch_size is None, "stage.patch_size: the coarse stage sees whole volumes; bound them with stage.max_voxels"
        )
        for key in ("region_mode", "region_margin_mm", "region_from", "box_jitter_mm", "elsewhere_share", "coarse"):
            _require(getattr(stage, key) is None, f"stage.{key}: only the fine stage has it; leave it out with stage=coarse")
    else:
        _require(stage.max_voxels is None, "stage.max_voxels: only the coarse stage has it; bound crops with stage.patch_size")
        _require(
            stage.slab_share is None,
            "stage.slab_share: only the coarse stage has it; the fine one has augment.truncate_probability",
        )
        for key in ("region_mode", "region_margin_mm", "region_from", "box_jitter_mm"):
            _require(getattr(stage, key) is not None, f"stage.{key}: the fine stage needs a value")
        _require(
            (stage.region_from is RegionFrom.coarse) == (stage.coarse is not None),
            "stage.region_from=coarse and stage.coarse=<checkpoint> go together; give both or neither",
        )
        if stage.region_mode is not RegionMode.separate:
            counts = {name: len(region.labels) for name, region in config.task.regions.items()}
            _require(
                len(set(counts.values())) == 1,
                f"stage.region_mode={typing.cast(Enum, stage.region_mode).value} shares one network, but the regions have "
                f"{counts} labels; choose stage.region_mode=separate",
            )
