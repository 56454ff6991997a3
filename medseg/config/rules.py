"""Rules between keys: combinations that contradict each other are refused, surprising ones are noted.

A rule is a pair: the condition that must hold, and the sentence for the user if it does not.
The file is long because most of it is those sentences.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from medseg.config.schema import (
    DICE_CE,
    UNET,
    Accelerator,
    ClipBy,
    Fill,
    LrScaling,
    Modality,
    Normalise,
    Precision,
    PredictConfig,
    PrepareConfig,
    RecipeConfig,
    RegionFrom,
    Resampling,
    SpacingConfig,
    SpacingStrategy,
    StageName,
    Strategy,
    TaskConfig,
    TrainConfig,
)
from medseg.config.search import SearchConfig, check_sweep
from medseg.config.targets import TARGET
from medseg.errors import require
from medseg.geometry.strides import level_strides, total_strides

Rules = list[tuple[bool, str]]

# Schedules that multiply a rate from step to step, so that a warm-up can be multiplied on top.
CHAINABLE_SCHEDULES = ("ConstantLR", "CosineAnnealingLR", "ExponentialLR", "LinearLR", "MultiStepLR", "PolynomialLR", "StepLR")
# Strategies whose target spacing is averaged over the training cases.
FOUND_IN_DATA = {SpacingStrategy.dataset_median: "median", SpacingStrategy.dataset_mean: "mean"}
# Keys of `spacing` that belong to one strategy.
OWN_SPACING_KEYS = {
    "size": SpacingStrategy.fixed_size,
    "range_mm": SpacingStrategy.multi_scale,
    "draw": SpacingStrategy.multi_scale,
}
FINE_KEYS = ("region_margin_mm", "region_from", "box_jitter_mm")


def check_rules(config: Any) -> None:
    """Check the rules of a typed configuration; a single checkpoint or experiment is replaced by a list of one, in place.

    Raises:
        UserError: With the sentence of the first rule that does not hold.
    """
    rules: Rules = []
    if isinstance(config, TrainConfig):
        rules += _value_rules(config) + _spacing_rules("spacing", config.spacing)
        _require_all(rules)  # the sizes below need a network that is possible
        rules = (
            _size_rules(config) + _rank_rules(config) + _device_rules(config) + _optimisation_rules(config) + _stage_rules(config)
        )
    if isinstance(config, PredictConfig):
        _text_list("input", config.input, "a path, or a list of the channels of one case")
        for key in ("coarse", "fine"):
            setattr(config, key, _checkpoints(key, getattr(config, key)))
        _check_by_spacing(config)
    if isinstance(config, RecipeConfig):
        for key in ("coarse", "fine"):
            setattr(config, key, _text_list(key, getattr(config, key), "an experiment or a list of experiments"))
    if isinstance(config, PrepareConfig):
        for name, spacing in config.spacings.items():
            rules += _spacing_rules(f"spacings.{name}", spacing)
    if isinstance(config, SearchConfig):
        check_sweep(config.sweep)
    if hasattr(config, "task"):
        rules += _task_rules(config.task)
    _require_all(rules)


def notes(config: TrainConfig, has_batch_norm: bool = False) -> list[str]:
    """Name allowed combinations that may surprise; a run prints them when it begins.

    Args:
        config: Checked configuration.
        has_batch_norm: Whether the network has batch norm whatever its arguments say, as some of MONAI's have by default.
    """
    stage, memory = config.stage, config.memory
    ranks = config.trainer.devices * config.trainer.num_nodes
    # Samples of different shapes go through the network one by one.
    has_one_shape = stage.patch_size is not None or config.spacing.size is not None
    micro_batch = stage.batch_size // (ranks * memory.accumulate) if has_one_shape else 1
    seen = {}
    if has_batch_norm or is_batch_norm(config.model):
        key = "model.norm=batch" if is_batch_norm(config.model) else f"batch norm of {config.model[TARGET]}"
        seen[key] = micro_batch * (ranks if config.trainer.sync_batchnorm else 1)
    for key in ("batch_dice", "batch"):  # of ours and of MONAI's losses
        if any(one.get(key) for one in (config.loss, *config.loss.get("terms", []))):
            seen[f"loss.{key}=true"] = micro_batch
    found = [
        f"{key} computes over {samples} sample{'s' * (samples > 1)}, not over the batch of {stage.batch_size} "
        f"(memory.accumulate={memory.accumulate}, {ranks} rank{'s' * (ranks > 1)}"
        f"{'' if has_one_shape else ', samples of different shapes'}), so the result differs from that of the whole batch"
        for key, samples in seen.items()
        if samples < stage.batch_size
    ]
    terms = config.loss.get("terms", [config.loss])
    others = [_class_name(term) for term in terms if term.get(TARGET) != DICE_CE]
    if config.task.ignore_label is not None and others:
        found.append(
            f"task.ignore_label with {others[0]}: a GPU waits once a step for each sample, to count the "
            "voxels that remain; loss=dice_ce does without"
        )
    momentum = next((config.optimizer[key] for key in ("momentum", "betas") if key in config.optimizer), None)
    if config.schedule.get("cycle_momentum") and momentum is not None:
        found.append(
            f"schedule.cycle_momentum=true sets the momentum of each step; the momentum of the optimizer ({momentum}) is not used"
        )
    if config.augment.enabled and "effects" not in config.augment.transforms:
        found.append(
            "augment.transforms replaces the built-in effects that the other keys of augment set; to keep them, add the entry `effects` to the list"
        )
    if stage.name is StageName.coarse and not config.task.regions and stage.patch_size is None:
        found.append(
            f"the task {config.task.name} has no regions, and stage=coarse segments whole scans at a coarse spacing; choose stage=single for "
            "patches at a fine spacing"
        )
    if memory.cudnn_benchmark and stage.patch_size is None and config.spacing.size is None:
        found.append(
            "memory.cudnn_benchmark=true repeats its kernel search at each new input shape, and without stage.patch_size the shapes vary"
        )
    return found


def is_batch_norm(model: Mapping[str, Any]) -> bool:
    """Whether the arguments of a network ask for batch norm: `norm=batch`, of ours and of MONAI's networks."""
    return str(model.get("norm")).lower() in ("batch", "batch_norm", "batchnorm")


def stated_divisor(model: Mapping[str, Any], spacing: SpacingConfig) -> tuple[int, int, int] | None:
    """Required multiple of the network's input size, in voxels (z, y, x), where the configuration alone decides it.

    A spacing that is not known yet counts as the same for all axes, which requires the largest multiple.

    Returns:
        `model.divisor`, or that of our UNet; None for a network that must be traced, see `medseg.build.network.find_divisor`.
    """
    if model["divisor"] is not None or model[TARGET] != UNET:
        divisor: tuple[int, int, int] | None = model["divisor"]
        return divisor
    return total_strides(choose_strides(model, spacing))


def choose_strides(model: Mapping[str, Any], spacing: SpacingConfig) -> tuple[tuple[int, int, int], ...]:
    """Choose the strides of each level of our UNet, finest first; they follow the spacing where the strategy says so."""
    num_levels = model["depth"] + (model["stem"] != "conv")
    follows = spacing.strategy in (SpacingStrategy.anisotropic, *FOUND_IN_DATA)
    return level_strides(spacing.target_spacing_mm if follows else None, num_levels)


def _require_all(rules: Rules) -> None:
    for holds, sentence in rules:
        require(holds, sentence)


def _class_name(node: Mapping[str, Any]) -> str:
    return str(node.get("_target_")).rpartition(".")[2]


def _check_by_spacing(config: PredictConfig) -> None:
    """Bring the checkpoints of each range to lists; refuse ranges that are empty or overlap."""
    earlier = ("", 0.0)
    for name, one in sorted((config.by_spacing or {}).items(), key=lambda item: item[1].range_mm):
        key, (low_mm, high_mm) = f"by_spacing.{name}", one.range_mm
        require(
            0 <= low_mm < high_mm,
            f"{key}.range_mm: expected two increasing numbers, the first at least 0, but got {list(one.range_mm)}",
        )
        require(
            low_mm >= earlier[1],
            f"{key}.range_mm={list(one.range_mm)} overlaps that of {earlier[0]}; end one range where the other begins",
        )
        earlier = (name, high_mm)
        for stage in ("coarse", "fine"):
            setattr(one, stage, _checkpoints(f"{key}.{stage}", getattr(one, stage)) or getattr(config, stage))


def _checkpoints(key: str, value: Any) -> list[str]:
    """Bring one checkpoint or a list of them to a list; null is the empty list."""
    return [] if value is None else _text_list(key, value, "a checkpoint, a list of checkpoints or null")


def _text_list(key: str, value: Any, expected: str) -> list[str]:
    """Bring one text or a list of them to a list."""
    texts = value if isinstance(value, list) else [value]
    are_texts = bool(texts) and all(isinstance(text, str) for text in texts)
    require(are_texts, f"{key}: expected {expected}, but got {value!r}")
    return texts


def _task_rules(task: TaskConfig) -> Rules:
    values, regions = sorted(task.labels.values()), task.regions or {}
    rules = [
        (
            task.name not in ("", ".", "..") and not set(task.name) & set("/\\\0"),
            f"task.name={task.name!r}: expected a valid folder name without / and \\, since the folder of synthetic scans is "
            "named after the task; choose another one",
        ),
        (
            values == list(range(1, len(values) + 1)) and values != [],
            f"task.labels: expected the values 1, 2, … without a gap, but got {dict(task.labels)}",
        ),
        (len(values) <= 254, f"task.labels: at most 254 labels are possible, but got {len(values)}"),
        (
            task.ignore_label is None or len(values) < task.ignore_label,
            f"task.ignore_label={task.ignore_label} is the value of a label; choose a value from {len(values) + 1} to 255",
        ),
        (
            (task.window_hu is None) != (not task.channels),
            "task.channels and task.window_hu: expected one of the two; window_hu is short for channels=[{modality: ct, window_hu: […]}]",
        ),
    ]
    windows = {"task.window_hu": task.window_hu}
    for number, channel in enumerate(task.channels or ()):
        key, is_window = f"task.channels.{number}", channel.normalise is Normalise.window
        windows[f"{key}.window_hu"] = channel.window_hu
        rules += [
            (
                is_window == (channel.window_hu is not None),
                f"{key}: expected a window_hu (normalise=window), or normalise=zscore or percentile without one, but got "
                f"normalise={channel.normalise.value} and window_hu={channel.window_hu}",
            ),
            (
                not is_window or channel.modality is Modality.ct,
                f"{key}.normalise=window: values of modality={channel.modality.value} have no common scale; choose zscore or percentile",
            ),
        ]
    rules += [
        (
            window_hu is None or window_hu[0] < window_hu[1],
            f"{key}: expected a lower bound below the upper one, but got {window_hu}",
        )
        for key, window_hu in windows.items()
    ]
    for name, range_ml in (task.volume_ml or {}).items():
        rules += [
            (
                name in {*task.labels, *regions},
                f"task.volume_ml.{name}: there is no such label or region; there are {', '.join({**task.labels, **regions})}",
            ),
            (
                _is_range(range_ml),
                f"task.volume_ml.{name}: expected two increasing numbers in ml, but got {range_ml}",
            ),
        ]
    for key, given in (("codes", task.codes), ("colours", task.colours)):
        rules += [
            (name in task.labels, f"task.{key}.{name}: there is no such label; there are {', '.join(task.labels)}")
            for name in given or {}
        ]
    rules += [
        (
            _is_code(code),
            f"task.codes.{name}: expected [code, meaning] or [code, meaning, left | right], such as [39607008, Lung, left], but got {code}",
        )
        for name, code in (task.codes or {}).items()
    ]
    rules += [
        (
            bool(re.fullmatch("#[0-9a-fA-F]{6}", colour)),
            f"task.colours.{name}: expected a colour such as '#38bdf8', but got {colour!r}",
        )
        for name, colour in (task.colours or {}).items()
    ]
    for name, region in regions.items():
        key, unknown = f"task.regions.{name}.labels", [label for label in region.labels if label not in task.labels]
        rules += [
            (not unknown, f"{key}: {unknown} are not among task.labels {sorted(task.labels)}"),
            (bool(region.labels), f"{key}: at least one label is needed"),
        ]
    return rules


def _is_code(code: Any) -> bool:
    """Whether this is a SNOMED CT code: up to 16 digits, a meaning of up to 64 characters (limits of DICOM) and perhaps a side."""
    if not isinstance(code, list) or len(code) not in (2, 3):
        return False
    number, meaning = str(code[0]), code[1]
    is_named = isinstance(meaning, str) and 0 < len(meaning) <= 64
    return number.isdecimal() and len(number) <= 16 and is_named and code[2:] in ([], ["left"], ["right"])


def _is_range(values: Any) -> bool:
    """Whether a value is two increasing numbers, the first at least 0."""
    is_pair = isinstance(values, list) and len(values) == 2 and all(isinstance(one, (int, float)) for one in values)
    return is_pair and 0 <= values[0] < values[1]


def _value_rules(config: TrainConfig) -> Rules:
    """Values whose type or range the schema cannot express, and the shape of the network."""
    model, loss, fold, policy = config.model, config.loss, config.data.fold, config.memory.checkpointing
    trust = config.data.train_trust
    paths = {"data.cases": config.data.cases, "stage.coarse": config.stage.coarse, "init_from": config.init_from}
    device_map = model["device_map"]
    is_map = isinstance(device_map, dict) and all(
        re.fullmatch(r"cpu|cuda:\d+", str(device)) and isinstance(name, str) for name, device in device_map.items()
    )
    return [
        *(
            (
                path is None or Path(path).is_file() or (key == "data.cases" and Path(path).is_dir()),
                f"{key}={path}: there is no such file (relative paths start at {Path.cwd()})",
            )
            for key, path in paths.items()
        ),
        (
            fold in (None, "all") or (type(fold) is int and 0 <= fold < config.data.num_folds),
            f"data.fold: expected 0 … {config.data.num_folds - 1} (data.num_folds={config.data.num_folds}), all or null, but got {fold}",
        ),
        (
            trust is None
            or isinstance(trust, str)
            or (isinstance(trust, list) and bool(trust) and all(isinstance(word, str) for word in trust)),
            f"data.train_trust: expected a word of the columns trust_<region>, a [list] of them or null, but got {trust}",
        ),
        (
            policy in ("none", "sqrt", "all") or (isinstance(policy, list) and all(isinstance(name, str) for name in policy)),
            f"memory.checkpointing: expected none, sqrt, all or a [list] of block names, but got {policy}",
        ),
        (
            loss.get("dice_weight", 1) + loss.get("ce_weight", 1) > 0,
            "loss.dice_weight and loss.ce_weight: at least one must be positive",
        ),
        (
            device_map in (None, "auto") or is_map,
            f"model.device_map: expected null, auto or a mapping from blocks to cpu, cuda:0, cuda:1, …, but got {device_map}",
        ),
        *(_unet_rules(model) if model[TARGET] == UNET else []),
    ]


def _unet_rules(model: Mapping[str, Any]) -> Rules:
    """Shape of our UNet. Other networks are built on the meta device before data is read, which checks theirs."""
    depth, counts = model["depth"], model["blocks_per_level"]
    return [
        (
            len(counts) == depth + 1,
            f"model.blocks_per_level: expected {depth + 1} numbers, one per level (model.depth={depth}), but got {counts}",
        ),
        (
            model["refine"] == 0 or model["stem"] != "conv",
            f"model.refine={model['refine']}: with model.stem=conv the whole network works at full resolution; choose model.refine=0",
        ),
    ]


def _spacing_rules(key: str, spacing: SpacingConfig) -> Rules:
    """Target spacing, filter and own keys of a spacing strategy."""
    target_mm, strategy = list(spacing.target_spacing_mm or ()), spacing.strategy
    low_mm, high_mm = spacing.range_mm or (0.0, math.inf)
    is_native = strategy is SpacingStrategy.native
    needs_target = strategy not in (
        *FOUND_IN_DATA,
        SpacingStrategy.fixed_size,
        SpacingStrategy.multi_scale,
        SpacingStrategy.native,
    )
    rules = [
        (
            not (is_native and target_mm),
            f"{key}.target_spacing_mm={target_mm}: {key}.strategy=native keeps the spacing of each scan; leave it null",
        ),
        (
            not is_native or spacing.resampling is Resampling.antialiased,
            f"{key}.resampling={spacing.resampling.value}: {key}.strategy=native resamples nothing; leave it out",
        ),
        (
            bool(target_mm) or not needs_target,
            f"{key}.target_spacing_mm: {key}.strategy={strategy.value} needs three numbers in mm, (z, y, x)",
        ),
        (
            strategy not in (SpacingStrategy.isotropic, SpacingStrategy.fixed_resolution) or len(set(target_mm)) == 1,
            f"{key}.target_spacing_mm={target_mm}: {key}.strategy={strategy.value} uses one spacing for all axes; choose "
            f"{key}.strategy=anisotropic",
        ),
    ]
    rules.append(
        (
            spacing.fill is Fill.widen or strategy is SpacingStrategy.fixed_resolution,
            f"{key}.fill={spacing.fill.value}: only {key}.strategy=fixed_resolution makes cubes, but {key}.strategy={strategy.value}; "
            "leave it out",
        )
    )
    for name, owner in OWN_SPACING_KEYS.items():
        is_given = getattr(spacing, name) is not None
        rules += [
            (
                not is_given or strategy is owner,
                f"{key}.{name}: only {key}.strategy={owner.value} uses it, but {key}.strategy={strategy.value}; leave it out",
            ),
            (is_given or strategy is not owner, f"{key}.{name}: {key}.strategy={owner.value} needs a value"),
        ]
    return [
        *rules,
        (low_mm < high_mm, f"{key}.range_mm: expected two increasing numbers, but got {[low_mm, high_mm]}"),
        (
            spacing.range_mm is None or max(target_mm, default=0.0) <= low_mm,
            f"{key}.target_spacing_mm={target_mm}: samples are resampled from the cache, so it must not be coarser than the lower bound of "
            f"{key}.range_mm={[low_mm, high_mm]}; choose a finer spacing, or null",
        ),
    ]


def _size_rules(config: TrainConfig) -> Rules:
    """Rules of the sizes of network inputs: within the crop and, if the divisor is known without building the network, multiples of it."""
    model, stage, whole = config.model, config.stage, config.spacing.size
    divisor = stated_divisor(model, config.spacing)
    rules = divisor_rules(config, divisor, model.get("norm") == "instance") if divisor is not None else []
    rules += [
        (
            size is None or whole is None or all(part <= most for part, most in zip(size, whole, strict=True)),
            f"{key}={list(size or ())} is larger than the whole crop, spacing.size={list(whole or ())}; choose a smaller size, or null",
        )
        for key, size in input_sizes(config).items()
    ]
    return [
        *rules,
        (
            whole is None or stage.max_voxels is None or math.prod(whole) <= stage.max_voxels,
            f"spacing.size={list(whole or ())} has more voxels than stage.max_voxels={stage.max_voxels} allows; choose a smaller size, or "
            "stage.max_voxels=null",
        ),
    ]


def input_sizes(config: TrainConfig) -> dict[str, tuple[int, int, int] | None]:
    """Sizes of network inputs by key; None where the data decide."""
    return {
        "spacing.size": config.spacing.size,
        "stage.patch_size": config.stage.patch_size,
        "inference.tile_size": config.inference.tile_size,
    }


def divisor_rules(config: TrainConfig, divisor: tuple[int, int, int], needs_two_voxels: bool) -> Rules:
    """Rules of the sizes of network inputs: multiples of the divisor, and more than one voxel at the deepest level.

    Args:
        config: The configuration.
        divisor: Required multiple of the input size, (z, y, x).
        needs_two_voxels: Whether the network normalises each channel over the voxels of one sample.
    """
    model = config.model
    why = f"model.depth={model['depth']}, model.stem={model['stem']}" if model[TARGET] == UNET else f"model={model[TARGET]}"
    return [
        rule
        for key, size in input_sizes(config).items()
        if size is not None
        for rule in (
            (
                all(voxels % step == 0 for voxels, step in zip(size, divisor, strict=True)),
                f"{key}: expected multiples of {divisor[0] if len(set(divisor)) == 1 else list(divisor)} ({why}), but got {list(size)}",
            ),
            (
                size != divisor or not needs_two_voxels,
                f"{key}={list(size)}: the deepest level of the network would have one voxel, but instance norm (model.norm=instance) "
                "needs at least two for a variance; choose a larger size along an axis",
            ),
        )
    ]


def _rank_rules(config: TrainConfig) -> Rules:
    """Rules of several ranks and a device map: the keys that they exclude."""
    stage, memory, trainer, device_map = config.stage, config.memory, config.trainer, config.model["device_map"]
    ranks = trainer.devices * trainer.num_nodes
    share = ranks * memory.accumulate
    kinds = {str(device).partition(":")[0] for device in device_map.values()} if isinstance(device_map, dict) else set()
    kinds |= {Accelerator.cpu: {"cpu"}, Accelerator.gpu: {"cuda"}, Accelerator.auto: set()}[trainer.accelerator]
    is_half = memory.precision in (Precision.bf16, Precision.fp16)
    is_batch = is_batch_norm(config.model)
    excluded_by_map = [
        (f"trainer.devices={trainer.devices}", ranks > 1, "one rank uses all devices of the map"),
        ("memory.offload=true", memory.offload, "the device map already places the activations"),
        ("memory.compile=true", memory.compile, "compiled code stays on one device"),
        (
            f"memory.precision={memory.precision.value}",
            is_half and len(kinds) > 1,
            "half precision needs devices of one kind, all CPU or all GPU",
        ),
    ]
    return [
        (
            trainer.gpus is None or (len(set(trainer.gpus)) == trainer.devices and trainer.accelerator is not Accelerator.cpu),
            f"trainer.gpus={trainer.gpus}: expected {trainer.devices} different numbers (trainer.devices), and trainer.accelerator other than cpu",
        ),
        (
            ranks == 1 or trainer.strategy is not Strategy.auto,
            f"trainer.devices={trainer.devices} with trainer.strategy=auto: choose trainer=ddp for more than one rank",
        ),
        *(
            (device_map is None or not clashes, f"{key} cannot be combined with model.device_map ({reason}); change one of them")
            for key, clashes, reason in excluded_by_map
        ),
        (
            not trainer.sync_batchnorm or is_batch or config.model[TARGET] != UNET,
            f"trainer.sync_batchnorm=true works with model.norm=batch only, but model.norm={config.model.get('norm')}; choose "
            "trainer.sync_batchnorm=false",
        ),
        (
            stage.batch_size % share == 0,
            f"stage.batch_size={stage.batch_size} cannot be divided among {ranks} rank(s) × memory.accumulate={memory.accumulate}; "
            f"choose a multiple of {share}",
        ),
    ]


def _device_rules(config: TrainConfig) -> Rules:
    """Switches that need a GPU."""
    memory, trainer = config.memory, config.trainer
    precision = memory.precision
    need_gpu = [
        (
            precision in (Precision.fp16, Precision.tf32),
            f"memory.precision={precision.value} needs a GPU, but trainer.accelerator=cpu; choose memory.precision=bf16",
        ),
        (
            memory.offload,
            "memory.offload=true moves activations from a GPU to the host, but trainer.accelerator=cpu; choose memory.offload=false",
        ),
        (
            config.data.pin_memory,
            "data.pin_memory=true speeds up copies to a GPU, but trainer.accelerator=cpu; choose data.pin_memory=null",
        ),
        (
            memory.cudnn_benchmark,
            "memory.cudnn_benchmark=true chooses kernels of a GPU, but trainer.accelerator=cpu; choose memory.cudnn_benchmark=false",
        ),
        (
            trainer.sync_batchnorm,
            "trainer.sync_batchnorm=true works on GPUs only, but trainer.accelerator=cpu; choose trainer.sync_batchnorm=false",
        ),
    ]
    return [(trainer.accelerator is not Accelerator.cpu or not is_on, sentence) for is_on, sentence in need_gpu]


def _optimisation_rules(config: TrainConfig) -> Rules:
    steps, warmup_steps, decay = config.steps, config.warmup_steps, config.ema_decay
    schedule, trainer = _class_name(config.schedule), config.trainer
    total_steps = config.schedule.get("total_steps")
    lowest_lr, highest_lr = _lr_bounds(config)
    return [
        (
            # After fewer steps the weights of the first one would be a third of the average, or more.
            decay is None or steps * (1 - decay) >= 1,
            f"ema_decay={decay} averages over {1 / (1 - (decay or 0)):.0f} steps, but steps={steps}; choose {1 - 1 / steps:.4g} or less, "
            "or more steps",
        ),
        (
            warmup_steps == 0 or schedule in CHAINABLE_SCHEDULES,
            f"warmup_steps={warmup_steps}: schedule {schedule} sets the learning rates of all steps itself; choose warmup_steps=0, or a schedule such as "
            "schedule=cosine",
        ),
        (warmup_steps < steps, f"warmup_steps={warmup_steps}: the run has only steps={steps}; choose fewer"),
        (
            # A run that is resumed with more steps is refused by name, see `medseg.runs.folder`.
            total_steps is None or total_steps >= steps or config.resume not in (None, "auto"),
            f"schedule.total_steps={total_steps}: the schedule would end before the run, steps={steps}; "
            f"leave schedule.total_steps out, or give {steps} or more",
        ),
        (
            lowest_lr[1] <= highest_lr[1],
            f"{lowest_lr[0]}={lowest_lr[1]:g} is the lowest rate of the schedule, but "
            f"{highest_lr[0]}={highest_lr[1]:g} is its highest; choose a smaller one",
        ),
        (
            trainer.clip_by is ClipBy.norm or trainer.gradient_clip is not None,
            f"trainer.clip_by={trainer.clip_by.value}: there is no bound to clip by; give "
            "trainer.gradient_clip=<number>, or leave clip_by out",
        ),
        (
            config.lr_scaling is LrScaling.none or "lr" in config.optimizer,
            f"lr_scaling={config.lr_scaling.value}: optimizer.lr is missing, so no rate would be scaled; give optimizer.lr=<number>",
        ),
    ]


def _lr_bounds(config: TrainConfig) -> tuple[tuple[str, float], tuple[str, float]]:
    """Key and value of the lowest and of the highest learning rate, as far as they are stated."""
    schedule, lowest, highest = config.schedule, ("", 0.0), ("", math.inf)
    for key in ("base_lr", "eta_min"):
        if isinstance(schedule.get(key), (int, float)):
            lowest = f"schedule.{key}", schedule[key]
    if isinstance(schedule.get("max_lr"), (int, float)):
        highest = "schedule.max_lr", schedule["max_lr"]
    elif isinstance(config.optimizer.get("lr"), (int, float)):
        highest = "optimizer.lr", config.optimizer["lr"]
    return lowest, highest


def _stage_rules(config: TrainConfig) -> Rules:
    """Flips, and the keys that only one of the stages has."""
    stage, flip_axes = config.stage, config.augment.flip_axes
    regions = config.task.regions or {}
    words = {word for label in config.task.labels for word in label.lower().replace("-", "_").split("_")}
    sides = {region.side.value for region in regions.values() if region.side} | (words & {"left", "right"})
    rules = [
        (
            not (sides and 2 in flip_axes),
            f"augment.flip_axes={flip_axes}: a flip along x (axis 2) swaps the sides that task={config.task.name} distinguishes; leave axis 2 out",
        ),
        (set(flip_axes) <= {0, 1, 2}, f"augment.flip_axes: axes are 0 (z), 1 (y), 2 (x), but got {flip_axes}"),
    ]
    if stage.name is not StageName.fine:
        return [
            *rules,
            (
                not (sides and flip_axes),
                f"augment.flip_axes={flip_axes}: with flips the {stage.name} stage cannot distinguish the sides; leave it empty",
            ),
            (
                stage.add_parts_mm is None or bool(regions),
                f"stage.add_parts_mm: the task {config.task.name} has no regions, so no fine result to add to; leave it out",
            ),
            *(
                (getattr(stage, key) is None, f"stage.{key}: only the fine stage uses it; leave it out with stage={stage.name}")
                for key in (*FINE_KEYS, "elsewhere_share", "coarse")
            ),
        ]
    counts = {name: len(region.labels) for name, region in regions.items()}
    return [
        *rules,
        (
            bool(regions),
            f"stage=fine: the task {config.task.name} has no regions, and one stage segments all of its labels; choose stage=single",
        ),
        (stage.max_voxels is None, "stage.max_voxels: only the coarse stage uses it; bound crops with stage.patch_size"),
        (
            stage.slab_share is None,
            "stage.slab_share: only the coarse stage uses it; the fine stage uses augment.truncate_probability",
        ),
        (
            stage.side_share is None,
            "stage.side_share: only the coarse stage uses it; the fine stage uses augment.narrow_probability",
        ),
        (stage.add_parts_mm is None, "stage.add_parts_mm: only the coarse stage uses it; train that stage with it"),
        *((getattr(stage, key) is not None, f"stage.{key}: the fine stage needs a value") for key in FINE_KEYS),
        (
            (stage.region_from is RegionFrom.coarse) == (stage.coarse is not None),
            "stage.region_from=coarse and stage.coarse=<checkpoint> go together; give both or neither",
        ),
        (
            len(set(counts.values())) == 1,
            f"stage=fine: one network segments all regions, but they have {counts} labels; give each the same number of "
            "labels, or choose stage=single task.regions=null",
        ),
    ]
