"""Check of a composed configuration: each key by itself, then the rules between keys.

This module does not import torch, so that a mistake is reported before torch is loaded.
"""

import copy
import dataclasses
import difflib
import functools
import pickle
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, TypeVar

from hydra.errors import OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigKeyError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from medseg.config.schema import CLASS_SCHEMAS, POINT_SCHEMAS
from medseg.errors import UserError, first_line
from medseg.knob import key_below
from medseg.options_check import (
    check_interval,
    check_options,
    items_of,
    tuple_length,
    union_members,
)
from medseg.target_arguments import range_of
from medseg.targets import EXTENSION_KEYS, TARGET, check_target, list_nodes
from medseg.task import IGNORE
from medseg.training.clashes import train_clashes
from medseg.training.options import TrainConfig

T = TypeVar("T")

# Begin of a reference to the environment, such as `${oc.env:USER}`, or of a reference that encloses
# one, such as `${oc.decode:${oc.env:PORT}}`.
ENVIRONMENT = re.compile(r"\$\{(?=(?:[^{}$]*\$\{)*oc\.env:)")

# Last part of `data.label_values`, a mapping whose keys the user chooses.
OPEN_KEY = "label_values"

# Keys of a setting in medseg, to the names of this setting in nnU-Net, MONAI, Lightning and
# lightning-hydra-template; each text is a list divided by blanks. A command may lack some of our
# keys.
FOREIGN_NAMES = {
    "optimizer.lr": "lr learning_rate initial_lr base_lr",
    "steps": "max_epochs epochs num_epochs max_steps min_epochs iterations num_iterations",
    "stage.validate_every": "val_interval val_check_interval check_val_every_n_epoch eval_every",
    "stage.patience": "early_stopping",
    "stage.patch_size inference.tile_size": "roi_size crop_size spatial_size",
    "resume init_from coarse fine": (
        "ckpt ckpt_path resume_from_checkpoint checkpoint "
        "pretrained pretrained_weights model_path weights"
    ),
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
}


def to_config(composed: DictConfig, schema: type[T]) -> T:
    """Check a composed configuration, and convert it to the dataclasses of its schema.

    Args:
        composed: Configuration that Hydra composed, or that a run folder holds.
        schema: One of the roots in `medseg.config.schema`.

    Returns:
        An instance of `schema`. Lists have become tuples of the declared length, where the schema
        declares tuples.

    Raises:
        UserError: On the first mistake, with the key, the value and the cure.
    """
    config = to_typed(composed, schema)
    check_clashes(config)
    return config


def check_clashes(options: Any, key: str = "") -> None:
    """Refuse contradictions between keys: of each group first, then those between groups.

    Args:
        options: A dataclass of options; its method `clashes` yields a sentence for each
            contradiction.
        key: Dotted key of `options`; empty for the root.

    Raises:
        UserError: With the first sentence.
    """
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        field_key = key_below(key, field.name)
        groups = {field_key: value}
        # A mapping may hold groups, such as the rows of a study.
        if isinstance(value, dict):
            groups = {f"{field_key}.{name}": item for name, item in value.items()}
        for group_key, group in groups.items():
            if dataclasses.is_dataclass(group):
                check_clashes(group, group_key)
    if hasattr(options, "clashes"):
        for sentence in options.clashes(key):
            raise UserError(sentence)
    if isinstance(options, TrainConfig):
        for sentence in train_clashes(options):
            raise UserError(sentence)


def to_typed(composed: DictConfig, schema: type[T]) -> T:
    """Check and convert one key at a time: names, types, ranges, targets.

    Contradictions between keys are left to `check_clashes`. Arguments, result and errors as for
    `to_config`.
    """
    schema_fields = dataclasses.fields(schema)  # type: ignore[arg-type]
    points = [field.name for field in schema_fields if field.name in EXTENSION_KEYS]
    trusted: list[str] = []
    if points:
        # Classes are checked before references are resolved. A reference to an argument that the
        # class lacks cannot be resolved, and that error would hide that the class is not allowed.
        unresolved = typing.cast(dict[str, Any], OmegaConf.to_container(composed))
        trusted = _trusted_prefixes(composed)
        for point, key, node in list_nodes(unresolved):
            check_target(point, key, node, trusted)
    values = resolved(composed)
    _split_devices(values)
    _check_forms(values, schema)
    _fill_label_values(values)
    try:
        config = _to_dataclass(values, schema)
    except OmegaConfBaseException as error:
        raise UserError(explain(error, composed)) from error
    check_options(config)
    if points:
        for point, key, node in list_nodes(values):
            _check_arguments(point, key, node)
    for point in points:
        node = getattr(config, point)
        if point == "logger":
            # OmegaConf has replaced references to the environment by their values in `config`.
            # `values` still has the references, see `resolved`.
            node = values["logger"]
        checked = _checked_node(point, node, trusted, composed)
        setattr(config, point, checked)
    return typing.cast(T, config)


def _trusted_prefixes(composed: DictConfig) -> list[str]:
    """Resolve and check `trusted_targets` alone, before the references of other keys.

    Raises:
        UserError: If it is no list of single values, or refers to a key without a value.
    """
    try:
        given = composed.get("trusted_targets") or []
        if OmegaConf.is_config(given):
            given = OmegaConf.to_container(given, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(_explain_reference("trusted_targets", first_line(error))) from error
    _check_form("trusted_targets", list[str], given)
    return list(map(str, given))  # YAML reads a prefix such as `1` as a number


def _to_dataclass(values: dict[str, Any], schema: type) -> Any:
    """Convert plain values to a schema: each group and mapping by itself, then the other keys.

    The conversion of a group by OmegaConf is slow, so groups and mappings are converted by cached
    functions: most are equal in all runs of a search or study.

    Raises:
        OmegaConfBaseException: On an unknown key, a wrong type or a missing value.
    """
    hints = typing.get_type_hints(schema)
    converted = {}
    others = {}
    for name, value in values.items():
        hint = hints.get(name)
        if not isinstance(value, dict):
            others[name] = value
        elif dataclasses.is_dataclass(hint):
            converted[name] = _convert_group(typing.cast(type, hint), name, value)
        elif typing.get_origin(hint) is dict:
            cached = _convert_mapping(schema, name, pickle.dumps(value))
            converted[name] = copy.deepcopy(cached)
        else:
            others[name] = value
    declared = _without(schema, frozenset(converted))
    merged = typing.cast(DictConfig, OmegaConf.merge(declared, others))
    for name in hints:
        if name in converted:
            continue
        value = merged[name]
        if OmegaConf.is_config(value):
            value = OmegaConf.to_object(value)
        converted[name] = value
    return schema(**converted)


@functools.cache
def _structured(schema: type) -> DictConfig:
    """Convert a schema to a DictConfig, which is cached: callers copy it before a change."""
    return typing.cast(DictConfig, OmegaConf.structured(schema))


@functools.cache
def _without(schema: type, converted: frozenset[str]) -> DictConfig:
    """Convert a schema to a DictConfig, without the keys whose values are converted already."""
    declared = copy.deepcopy(_structured(schema))
    # Only an open configuration lets its keys be removed.
    OmegaConf.set_struct(declared, False)
    for name in converted:
        del declared[name]
    # Back to the default: a structured configuration refuses unknown keys.
    OmegaConf.set_struct(declared, None)
    return declared


def _convert_group(schema: type, key: str, values: dict[str, Any]) -> Any:
    """Convert plain values to the schema of a group; `key` is for messages.

    Raises:
        OmegaConfBaseException: On an unknown key, a wrong type or a missing value.
    """
    cached = _convert_pickled(schema, key, pickle.dumps(values))
    # A copy, because callers change the result, and the cached one is shared.
    return copy.deepcopy(cached)


# Without the cache, OmegaConf takes 50 ms for all groups of `train`. The values are pickled because
# a cache needs keys that can be hashed.
@functools.lru_cache(maxsize=1024)
def _convert_pickled(schema: type, key: str, pickled: bytes) -> Any:
    """Convert the values of a group; the result is shared by all callers."""
    values = pickle.loads(pickled)
    # Schema and values are put below the key of the group, so that an error names the whole key.
    # `unsafe_merge` may change its arguments, which are used nowhere else.
    merged = OmegaConf.unsafe_merge({key: OmegaConf.structured(schema)}, {key: values})
    return typing.cast(dict[str, Any], OmegaConf.to_object(merged))[key]


@functools.lru_cache(maxsize=1024)
def _convert_mapping(schema: type, key: str, pickled: bytes) -> Any:
    """Convert the values of a key that is a mapping, such as a node with a target.

    Cached and shared like the result of `_convert_pickled`.
    """
    declared = OmegaConf.masked_copy(_structured(schema), key)
    merged = OmegaConf.unsafe_merge(declared, {key: pickle.loads(pickled)})
    return typing.cast(dict[str, Any], OmegaConf.to_object(merged))[key]


def _check_forms(values: dict[str, Any], schema: type, path: str = "") -> None:
    """Refuse null where a schema does not allow it, and values of another form than declared.

    The forms are group, mapping, list and single value. OmegaConf checks the types of single
    values, and refuses unknown and missing keys.

    Args:
        values: Plain values of a group.
        schema: Dataclass of the group.
        path: Dotted key of the group; empty for the root.

    Raises:
        UserError: Naming the key and the expected form.
    """
    for name, hint in _hints_of(schema).items():
        if name in values:
            _check_form(key_below(path, name), hint, values[name])


def _check_form(key: str, hint: Any, value: Any) -> None:
    """Compare the form of a value, and of its items, with a type: see `_check_forms`."""
    kinds = union_members(hint)
    allows_null = Any in kinds or types.NoneType in kinds
    if value is None and allows_null:
        return
    kind = kinds[0]  # the schemas have no other unions than of a type and None
    container = _container_of(kind)
    has_wrong_form = container is not None and not isinstance(value, container)
    if value is None or has_wrong_form:
        raise UserError(_expected_form(key, kind, value))
    is_single = container is None and kind is not Any
    if is_single and isinstance(value, (dict, list)):
        raise UserError(f"{key}: one value is needed, but got {value}")
    if dataclasses.is_dataclass(kind):
        _check_forms(value, typing.cast(type, kind), key)
    elif container is not None:
        item_kind = typing.get_args(kind)[-1]  # in `dict[str, V]` the type of the values, V
        for item_key, item in items_of(value, key):
            _check_form(item_key, item_kind, item)


def _expected_form(key: str, kind: Any, value: Any) -> str:
    """Say which form the type of a key requires; `value` has another one."""
    but = ", but got null" if value is None else ""
    length = tuple_length(kind)
    if dataclasses.is_dataclass(kind):
        return f"{key}: expected a group of keys{but}; set them one by one, {key}.<name>=<value>"
    if length is not None:
        return f"{key}: expected a list of {length} numbers{but}; give it in brackets, {key}=[…]"
    if _container_of(kind) is list:
        return f"{key}: expected a list{but}; give it in brackets, {key}=[…]"
    if _container_of(kind) is dict:
        return f"{key}: expected a mapping{but}; give it in braces, {key}={{name: value}}"
    return f"{key}: expected a value{but}"


@functools.cache
def _hints_of(schema: type) -> dict[str, Any]:
    """Return the types of a schema's keys, without the `Knob` of each key."""
    return typing.get_type_hints(schema)


def _container_of(kind: Any) -> type | None:
    """Find the plain container, `dict` or `list`, of a type; None for single values."""
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind) or origin is dict:
        return dict
    if origin in (list, tuple):
        return list
    return None


def _split_devices(values: dict[str, Any]) -> None:
    """Turn a list in `trainer.devices` into its length and `trainer.gpus`, in place."""
    trainer = values.get("trainer")
    # Commands without a training lack this group; its form is checked later.
    if not isinstance(trainer, dict):
        return
    devices = trainer.get("devices")
    if isinstance(devices, list):
        trainer["gpus"] = devices
        trainer["devices"] = len(devices)


def _fill_label_values(values: dict[str, Any]) -> None:
    """Fill in `data.label_values` from the task, in place, see `label_values_of`."""
    task = values.get("task") or {}
    data = values.get("data") or {}
    # Only commands that read reference labels have the key `labels_column`.
    if "labels_column" not in data or not isinstance(task.get("labels"), dict):
        return
    data["label_values"] = label_values_of(task, data.get("label_values"))


def label_values_of(task: Mapping[str, Any], label_values: Any) -> Any:
    """Complete `data.label_values` with the values of a task.

    Args:
        task: Its group of keys, with a mapping `labels`.
        label_values: The value of `data.label_values`. An empty one becomes the labels of the task.

    Returns:
        The value, with that of the ignore label unless it has one.
    """
    completed = label_values or dict(task["labels"])
    ignore_value = task.get("ignore_label")
    # A value that is no mapping is refused later.
    if ignore_value is None or not isinstance(completed, dict) or IGNORE in completed:
        return completed
    return {**completed, IGNORE: ignore_value}


def resolved(composed: DictConfig) -> dict[str, Any]:
    """Resolve a composed configuration to plain values, not yet checked.

    A value that `logger` reads from the environment, such as the key of an account, stays a
    reference `${oc.env:…}`, because run folders and checkpoints store the resolved values. The
    builder of the logger resolves it. References to other keys are resolved in `logger` too.

    Raises:
        UserError: If a value is missing, or refers to a key without a value.
    """
    try:
        values = typing.cast(dict[str, Any], OmegaConf.to_container(composed, resolve=True))
    except OmegaConfBaseException as error:
        raise UserError(explain(error, composed)) from error
    if "logger" not in values:
        return values
    unresolved = typing.cast(dict[str, Any], OmegaConf.to_container(composed))
    escaped = _escape_environment(unresolved["logger"])
    if escaped != unresolved["logger"]:
        # Only `logger` is escaped: other keys are stored with the values of the environment, and
        # references of `logger` to them must resolve to the same values.
        unresolved["logger"] = escaped
        container = OmegaConf.to_container(OmegaConf.create(unresolved), resolve=True)
        values["logger"] = typing.cast(dict[str, Any], container)["logger"]
    return values


def _escape_environment(node: Any) -> Any:
    r"""Escape the references to the environment in a node, which OmegaConf then keeps as text.

    Example:
        >>> print(_escape_environment("${oc.env:USER}-${name}"))
        \${oc.env:USER}-${name}
    """
    if isinstance(node, dict):
        return {key: _escape_environment(value) for key, value in node.items()}
    if isinstance(node, list):
        return list(map(_escape_environment, node))
    if isinstance(node, str):
        return ENVIRONMENT.sub(r"\\\g<0>", node)
    return node


def explain(error: Exception, composed: DictConfig | None = None) -> str:
    """Turn an error of Hydra or OmegaConf into one sentence with the key and the likely cure."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first, *more_lines = lines or [type(error).__name__]
    key = _key_in(lines)
    overridden = re.match(r"Could not override '([^']+)'", first)
    if isinstance(error, MissingMandatoryValue):
        return f"{key or first}: a value is missing; give it as {key}=<value>"
    if overridden is not None:
        return _explain_unknown_key(overridden.group(1), composed)
    if isinstance(error, OverrideParseException):
        return _explain_syntax(error.override, more_lines)
    if isinstance(error, ConfigKeyError):
        return _explain_unknown_key(key, composed)
    if isinstance(error, InterpolationResolutionError):
        return _explain_reference(key, first)
    if isinstance(error, ValidationError):
        return f"{key}: {first}"
    if first.startswith("Ambiguous value"):
        return f"{first}; add -m to sweep over several values, or write a list in [brackets]"
    if "Could not find" in first or first.startswith("You must specify"):
        return _explain_choice(first, more_lines)
    return first


def _explain_syntax(override: str, lines: Sequence[str]) -> str:
    """Explain an argument that Hydra cannot read, such as one with an umlaut.

    Args:
        override: The argument.
        lines: Hydra's message without its first line.
    """
    # A function of Hydra's grammar, such as `interval(1)`, has a message of its own. A text with
    # brackets, such as `Leber (L)`, is taken for a function that does not exist.
    for line in lines:
        if " while evaluating " in line and "Unknown function" not in line:
            return f"{override}: {line}"
    # Without the single quotes the shell would remove the double ones.
    sentence = (
        f"{override}: cannot be read; close all brackets and quotes, and put a text with signs "
        "such as ä, ( or = in double quotes, the argument in single ones: "
        """'<key>={liver: ["Leber (groß)"]}'"""
    )
    if "{" in override:
        # Hydra's grammar has no quotes there.
        sentence += (
            "; before a colon no such sign can stand: write a task with such labels into a file, "
            "task=<file>.yaml"
        )
    return sentence


def _explain_reference(key: str, sentence: str) -> str:
    """Explain a reference `${…}` that leads to no value.

    Args:
        key: Key that holds the reference.
        sentence: First line of OmegaConf's message.
    """
    missing = re.search(r"'([^']+)' not found", sentence)
    if missing is not None:
        return (
            f"{key}: it refers to {missing[1]}, which has no value; "
            f"give {missing[1]}=<value>, or another {key}"
        )
    # The reference leads into a group that has been replaced by null or a single value.
    replaced = re.search(r"node `([^`]+)` is not a container", sentence)
    if replaced is not None:
        group = replaced[1]
        return f"{group}: expected a group of keys; set them one by one, {group}.<name>=<value>"
    return sentence


def _key_in(lines: Sequence[str]) -> str:
    """Find the key in the lines of an error's message; "" if they name none."""
    for line in lines:
        if line.startswith("full_key:"):
            return line.partition(":")[2].strip()
    return ""


def _explain_choice(sentence: str, lines: Sequence[str]) -> str:
    """Add the files of a group to Hydra's sentence on a missing or unknown choice.

    Args:
        sentence: First line of Hydra's message.
        lines: Its other lines: remarks, and the names of the files.
    """
    remarks = (
        "Config search path",
        "provider=",
        "object_type",
        "full_key",
        "Available options",
    )
    files = [line for line in lines if not line.startswith(remarks)]
    if not files:
        return sentence
    explanation = f"{sentence}; there are: {', '.join(files)}"
    group = re.search(r"'([^']+)/[^']+'", sentence)  # such as 'loss/unknown'
    if group is not None and group[1] in ("model", "loss", "optimizer", "schedule"):
        explanation += f"; or name a class: {group[1]}._target_=package.Class"
    return explanation


def _explain_unknown_key(key: str, composed: DictConfig | None) -> str:
    """Say that there is no such key, and which one was probably meant."""
    keys: set[str] = set()
    if composed is not None:
        keys.update(_keys(OmegaConf.to_container(composed, resolve=False)))
    parent, _, last = key.rpartition(".")
    # Such as data.label_values={liver: 7}: the key exists, so Hydra refused a name in its value.
    if last == OPEN_KEY and key in keys:
        return f"{key}: it has no such name yet; +{key}={{…}} adds names"
    # Neither the root nor `key` itself, which a file or `+` may have set, is a suggestion.
    keys -= {key, ""}
    # Such as data.label_values.liver=7.
    if parent.rpartition(".")[2] == OPEN_KEY and parent in keys:
        siblings = sorted(name for name in keys if name.startswith(f"{parent}."))
        sentence = f"{key}: it has no such name yet; +{key}=… adds it"
        for sibling in difflib.get_close_matches(key, siblings, n=1):
            sentence += f"; did you mean {sibling}?"
        return sentence
    near = _near_keys(key, sorted(keys))
    if not near:
        return f"{key}: there is no such key; `--help` prints all keys"
    return f"{key}: there is no such key; did you mean {' or '.join(near)}?"


def _near_keys(key: str, keys: Sequence[str]) -> list[str]:
    """Find the keys that were probably meant by a key that does not exist.

    These are the keys of a setting that another framework calls by this name. If there are none:
    keys of this name in other groups; and if there are none either, up to two keys of similar
    spelling.
    """
    last = key.rpartition(".")[2]
    near = []
    for our_keys, names in FOREIGN_NAMES.items():
        if last in names.split():
            near += [name for name in our_keys.split() if name in keys]
    if not near:
        near = [name for name in keys if name.rpartition(".")[2] == last]
    return near or difflib.get_close_matches(key, keys, n=2)


def _keys(node: Any, key: str = "") -> Iterator[str]:
    """Yield the dotted keys of a node and of everything nested in it; the root is ""."""
    yield key
    if not isinstance(node, dict):
        return
    for name, value in node.items():
        yield from _keys(value, key_below(key, name))


def _check_arguments(point: str, key: str, node: dict[str, Any]) -> None:
    """Refuse arguments of a class outside their known range, see `range_of`."""
    target = str(node.get(TARGET))
    for name, value in node.items():
        check_interval(f"{key}.{name}", value, range_of(point, target, name))


def _checked_node(
    point: str, node: dict[str, Any], trusted: Sequence[str], composed: DictConfig
) -> dict[str, Any]:
    """Check the node of an extension point, without importing its class.

    Keys of a schema (`POINT_SCHEMAS`, `CLASS_SCHEMAS`) get its defaults and are converted to its
    types.
    """
    # Several loggers by name, or a sum of losses: `to_typed` has checked their nodes one by one.
    if TARGET not in node and (point == "logger" or "terms" in node):
        return node
    shared = POINT_SCHEMAS.get(point)
    # A node without `_target_` has the class that is the default in the schema.
    target = node.get(TARGET, getattr(shared, TARGET, None))
    check_target(point, key=point, node={**node, TARGET: target}, trusted=trusted)
    schema = CLASS_SCHEMAS.get(str(target), shared)
    if schema is None:
        return node
    arguments = node
    if target not in CLASS_SCHEMAS:
        # The other arguments of a foreign class are bound to its signature, see `bind_target`.
        schema_names = {field.name for field in dataclasses.fields(schema)}
        arguments = {name: value for name, value in node.items() if name in schema_names}
    _check_forms(arguments, schema, point)
    try:
        typed = _convert_group(schema, point, arguments)
    except OmegaConfBaseException as error:
        raise UserError(explain(error, composed)) from error
    check_options(typed, point)
    checked = dict(node)
    for name, value in vars(typed).items():
        checked[name] = value.value if isinstance(value, Enum) else value
    return checked
