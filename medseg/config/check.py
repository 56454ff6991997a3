"""Check of a composed configuration: names, types, lengths, ranges and targets, then the rules between keys.

Nothing here imports torch: a mistake is reported before anything heavy starts.
"""

import dataclasses
import difflib
import re
import typing
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigKeyError,
    InterpolationKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from medseg.config.schema import CLASS_SCHEMAS, POINT_SCHEMAS
from medseg.errors import UserError, require
from medseg.knob import Knob
from medseg.target_arguments import range_of
from medseg.targets import EXTENSION_KEYS, TARGET, check_target, list_nodes
from medseg.training.clashes import train_clashes
from medseg.training.options import TrainConfig

T = TypeVar("T")

# A mapping that takes names which no schema has.
OPEN_KEY = "label_values"

# Our keys to the names of the same setting in nnU-Net, MONAI, Lightning and
# lightning-hydra-template.
HABITS = {
    name: keys.split()
    for keys, names in {
        "optimizer.lr": "lr learning_rate initial_lr base_lr",
        "steps": "max_epochs epochs num_epochs max_steps min_epochs iterations num_iterations",
        "stage.validate_every": "val_interval val_check_interval check_val_every_n_epoch eval_every",
        "stage.patience": "early_stopping",
        "stage.patch_size inference.tile_size": "roi_size crop_size spatial_size",
        "resume init_from coarse fine": "ckpt ckpt_path resume_from_checkpoint checkpoint pretrained pretrained_weights model_path weights",
        "trainer.devices": "num_gpus n_gpus ngpus world_size",
        "memory.precision precision": "amp use_amp mixed_precision fp16 bf16",
        "memory.accumulate": "accumulate_grad_batches gradient_accumulation accumulation_steps",
        "memory.checkpointing": "use_checkpoint gradient_checkpointing activation_checkpointing",
        "trainer.gradient_clip": "gradient_clip_val clip_grad max_norm",
        "task.labels": "num_classes out_channels classes",
        "task.channels": "in_channels num_channels modality",
        "spacing.target_spacing_mm": "pixdim spacing_mm overwrite_target_spacing",
        "data.cases cases input": "data_dir data_root data_path dataset datalist root_dir images",
        "data.num_workers": "workers n_workers loader_workers num_processes",
        "inference.tta": "mirror use_mirroring disable_tta flips",
        "name": "project exp_name run_name experiment_name task_name",
        "output": "output_dir out_dir save_dir",
    }.items()
    for name in names.split()
}


def to_config(composed: DictConfig, schema: type[T]) -> T:
    """Merge a composed configuration into its schema, convert it to dataclasses and check the rules between keys.

    Args:
        composed: What Hydra composed, or what a run folder holds.
        schema: One of the roots in `medseg.config.schema`.

    Returns:
        An instance of `schema`; every tuple is a tuple of the declared length.

    Raises:
        UserError: Naming the key, the value and the cure.
    """
    config = to_typed(composed, schema)
    check_clashes(config)
    return config


def check_clashes(options: Any, key: str = "") -> None:
    """Refuse contradictions between keys: of each group first, then those between groups.

    Args:
        options: A dataclass of options; its method `clashes` yields a sentence for each
            contradiction.
        key: Name of its group; empty for the root.

    Raises:
        UserError: With the first sentence.
    """
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        field_key = f"{key}.{field.name}".lstrip(".")
        groups = (
            {f"{field_key}.{name}": item for name, item in value.items()}
            if isinstance(value, dict)
            else {field_key: value}
        )
        for group_key, group in groups.items():
            if dataclasses.is_dataclass(group):
                check_clashes(group, group_key)
    sentences = options.clashes(key) if hasattr(options, "clashes") else ()
    for sentence in sentences:
        raise UserError(sentence)
    if isinstance(options, TrainConfig):
        for sentence in train_clashes(options):
            raise UserError(sentence)


def to_typed(composed: DictConfig, schema: type[T]) -> T:
    """Check one key at a time: names, types, ranges, targets; the keys may still contradict each other."""
    points = [field.name for field in dataclasses.fields(schema) if field.name in EXTENSION_KEYS]  # type: ignore[arg-type]
    if points:  # before references are resolved: the key that they refer to may be an argument of another class
        for point, key, node in list_nodes(
            typing.cast(dict[str, Any], OmegaConf.to_container(composed))
        ):
            check_target(point, key, node, composed.get("trusted_targets") or ())
    values = resolved(composed)
    _fill_label_values(values)
    _split_devices(values)
    try:
        config = OmegaConf.to_object(
            OmegaConf.merge(OmegaConf.structured(schema), OmegaConf.create(values))
        )
    except OmegaConfBaseException as error:
        raise UserError(explain(error, composed)) from error
    _check_numbers(config, "")
    if points:
        for point, key, node in list_nodes(values):
            _check_arguments(point, key, node)
    for point in points:
        node = (
            values["logger"] if point == "logger" else getattr(config, point)
        )  # with its references
        setattr(
            config, point, _checked_node(point, node, values.get("trusted_targets", ()), composed)
        )
    return typing.cast(T, config)


def _split_devices(values: dict[str, Any]) -> None:
    """Turn a list in `trainer.devices` into its length and `trainer.gpus`, in place."""
    trainer = values.get("trainer") or {}
    if isinstance(trainer.get("devices"), list):
        trainer["gpus"], trainer["devices"] = trainer["devices"], len(trainer["devices"])


def _fill_label_values(values: dict[str, Any]) -> None:
    """Fill in `data.label_values`, in place: the values of the task where none are given, and the ignore label of the task."""
    task, data = values.get("task") or {}, values.get("data") or {}
    if "labels_column" in data and isinstance(task.get("labels"), dict):
        if not data.get("label_values"):
            data["label_values"] = dict(task["labels"])
        if task.get("ignore_label") is not None and isinstance(data["label_values"], dict):
            data["label_values"].setdefault("ignore", task["ignore_label"])


def resolved(composed: DictConfig) -> dict[str, Any]:
    """Resolve a composed configuration to plain values, not yet checked.

    A value that `logger` reads from the environment, such as the key of an account, stays a
    reference, because run folders and checkpoints store the resolved values. The builder of the
    logger resolves it.

    Raises:
        UserError: If a value is missing, or refers to a key without a value.
    """
    try:
        values = typing.cast(dict[str, Any], OmegaConf.to_container(composed, resolve=True))
    except OmegaConfBaseException as error:
        raise UserError(explain(error, composed)) from error
    if "logger" in values:
        raw = typing.cast(dict[str, Any], OmegaConf.to_container(composed, resolve=False))
        values["logger"] = _with_references(raw["logger"], values["logger"])
    return values


def _with_references(raw: Any, value: Any) -> Any:
    """Put references to the environment back into resolved values."""
    if isinstance(raw, dict) and isinstance(value, dict):
        return {key: _with_references(raw.get(key), item) for key, item in value.items()}
    if isinstance(raw, list) and isinstance(value, list):
        return [_with_references(*pair) for pair in zip(raw, value, strict=True)]
    return raw if isinstance(raw, str) and "${oc.env:" in raw else value


def explain(error: Exception, composed: DictConfig | None = None) -> str:
    """Turn an error of Hydra or OmegaConf into one sentence with the key and a guess at what was meant."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [
        type(error).__name__
    ]
    first = lines[0]
    key = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("full_key:")), ""
    )
    overridden = re.match(r"Could not override '([^']+)'", first)
    if isinstance(error, MissingMandatoryValue):
        return f"{key or first}: a value is missing; give it as {key}=<value>"
    if overridden or isinstance(error, ConfigKeyError):
        key = overridden.group(1) if overridden else key
        known = (
            set(_keys(OmegaConf.to_container(composed, resolve=False)))
            if composed is not None
            else set[str]()
        )
        parent, _, last = key.rpartition(".")
        if last == OPEN_KEY and key in known:
            return f"{key}: it has no such name yet; +{key}={{…}} adds names"
        if parent.rpartition(".")[2] == OPEN_KEY and parent in known:
            siblings = sorted(name for name in known - {key} if name.startswith(f"{parent}."))
            meant = difflib.get_close_matches(key, siblings, n=1, cutoff=0.6)
            hint = f"; did you mean {meant[0]}?" if meant else ""
            return f"{key}: it has no such name yet; +{key}=… adds it{hint}"
        near = _near_keys(key, sorted(known - {key, ""}))
        return f"{key}: there is no such key; " + (
            f"did you mean {' or '.join(near)}?" if near else "`--help` prints all keys"
        )
    if isinstance(error, InterpolationKeyError) and (
        missing := re.search(r"'([^']+)' not found", first)
    ):
        return f"{key}: it refers to {missing[1]}, which has no value; give {missing[1]}=<value>, or another {key}"
    if isinstance(error, ValidationError) and "is not a ListConfig" in first:
        return f"{key}: expected a list; give it in brackets, {key}=[…]"
    if isinstance(error, ValidationError):
        return f"{key}: {first}"
    if first.startswith("Ambiguous value"):
        return f"{first}; add -m to sweep over several values, or write a list in [brackets]"
    if "Could not find" in first or first.startswith("You must specify"):
        skipped = (
            "Config search path",
            "provider=",
            "object_type",
            "full_key",
            "Available options",
        )
        listed = ", ".join(line for line in lines[1:] if not line.startswith(skipped))
        group = (re.search(r"'([^']+)/[^']+'", first) or [first, ""])[1]
        is_open = group in ("model", "loss", "optimizer", "schedule")
        classes = f"; or name a class: {group}._target_=package.Class" if is_open else ""
        return f"{first}; there are: {listed}{classes}" if listed else first
    return first


def _near_keys(key: str, known: Sequence[str]) -> list[str]:
    """Find the keys that were probably meant: a habit of another framework, the same name in another group, or a similar name."""
    last = key.rpartition(".")[2]
    habits = [name for name in HABITS.get(last, ()) if name in known]
    return (
        habits
        or [name for name in known if name.rpartition(".")[2] == last]
        or difflib.get_close_matches(key, known, n=2, cutoff=0.6)
    )


def _keys(node: Any, prefix: str = "") -> Iterator[str]:
    """List the dotted keys of nested mappings, groups included."""
    yield prefix
    for name, value in node.items() if isinstance(node, dict) else ():
        yield from _keys(value, f"{prefix}.{name}".lstrip("."))


def _check_numbers(node: Any, path: str) -> None:
    """Convert lists to the declared tuples, in place; refuse wrong lengths, numbers outside their range and swapped bounds."""
    for name, hint in typing.get_type_hints(type(node), include_extras=True).items():
        value, key = getattr(node, name), f"{path}.{name}".lstrip(".")
        items = (
            value.items()
            if isinstance(value, dict)
            else enumerate(value)
            if isinstance(value, list)
            else ()
        )
        kind, *knobs = (
            typing.get_args(hint) if typing.get_origin(hint) is typing.Annotated else [hint]
        )
        kinds = (kind, *typing.get_args(kind))
        # OmegaConf accepts a list or a dictionary where a single value is declared.
        containers = (
            [kind] if typing.get_origin(kind) in (dict, list) else kinds[1:]
        )  # the items of a mapping may be lists
        is_flat = any(
            typing.get_origin(one) in (dict, list) and typing.get_args(one)[-1] in (int, float, str)
            for one in containers
        )
        for child, child_key in [
            (value, key),
            *((item, f"{key}.{item_name}") for item_name, item in items),
        ]:
            if dataclasses.is_dataclass(child):
                _check_numbers(child, child_key)
            is_single = child is value or not is_flat or not isinstance(child, (dict, list))
            require(is_single, f"{child_key}: one value is needed, but got {child}")
        tuples = [one for one in kinds if typing.get_origin(one) is tuple]
        if isinstance(value, list) and tuples:
            length = len(typing.get_args(tuples[0]))
            require(
                len(value) == length,
                f"{key}: {length} numbers are needed, one per axis or bound, but got {value}",
            )
            value = tuple(value)
            setattr(node, name, value)
        _check_range(key, value, knobs[0] if knobs else Knob(""))


def _check_range(key: str, value: Any, knob: Knob) -> None:
    """Refuse a number, or one of several, outside the interval of its key, such as `[0, 1)`."""
    if not knob.within or value is None:
        return
    values = value if isinstance(value, (list, tuple)) else [value]
    numbers = [number for number in values if number is not None]
    low, high = (float(bound) for bound in knob.within[1:-1].split(","))
    # An open end excludes its bound.
    excluded = {
        bound for bound, mark in ((low, knob.within[0]), (high, knob.within[-1])) if mark in "()"
    }
    for number in numbers:
        is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
        if not is_number or not low <= number <= high or number in excluded:
            raise UserError(f"{key}: must lie in {knob.within}, but got {value}")
    is_swapped = key.endswith("_range") and numbers[0] > numbers[1]
    require(not is_swapped, f"{key}: the lower bound comes first, but got {list(numbers)}")


def _check_arguments(point: str, key: str, node: dict[str, Any]) -> None:
    """Refuse numbers that make no sense for a class, whether or not it checks them itself."""
    for name, value in node.items():
        _check_range(f"{key}.{name}", value, Knob("", range_of(point, str(node.get(TARGET)), name)))


def _checked_node(
    point: str, node: dict[str, Any], trusted: Sequence[str], composed: DictConfig
) -> dict[str, Any]:
    """Check the node of an extension point; no class is imported before all nodes have passed.

    Keys that a schema knows (`POINT_SCHEMAS`, `CLASS_SCHEMAS`) get its defaults and are converted
    to its types.
    """
    if TARGET not in node and (point == "logger" or "terms" in node):
        return node
    shared = POINT_SCHEMAS.get(point)
    target = node.get(TARGET, getattr(shared, TARGET, None))
    check_target(point, point, {**node, TARGET: target}, trusted)
    schema = CLASS_SCHEMAS.get(str(target), shared)
    if schema is None:
        return node
    known = {field.name for field in dataclasses.fields(schema)}
    # The other arguments of a foreign class are bound to its signature, see `bind_target`.
    own = {name: value for name, value in node.items() if name in known or target in CLASS_SCHEMAS}
    try:
        typed = OmegaConf.to_object(
            OmegaConf.merge({point: OmegaConf.structured(schema)}, {point: own})
        )
    except OmegaConfBaseException as error:
        raise UserError(explain(error, composed)) from error
    checked = typing.cast(dict[str, Any], typed)[point]
    _check_numbers(checked, point)
    values = {
        name: value.value if isinstance(value, Enum) else value
        for name, value in vars(checked).items()
    }
    return {**node, **values}
