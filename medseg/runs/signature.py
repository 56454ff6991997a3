"""Signature of a run: a hash of all values that can change its result."""

import dataclasses
import functools
import hashlib
import json
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from medseg.config.schema import POINT_SCHEMAS, plain_value
from medseg.data.options import CASCADE_KEYS, StageName
from medseg.training.options import TrainConfig

MAX_CHANGES = 5  # changes that a message names


@functools.cache
def neutral_keys(schema: type, prefix: str = "") -> frozenset[str]:
    """Collect the dotted keys that cannot change the result of a run, as their fields declare.

    Args:
        schema: Dataclass of the configuration, or of a group in it.
        prefix: Dotted key of the group with a dot at its end.
    """
    keys: set[str] = set()
    for name, hint in typing.get_type_hints(schema, include_extras=True).items():
        key = f"{prefix}{name}"
        # A group is a dataclass, or an extension point whose keys have a schema.
        group = hint if dataclasses.is_dataclass(hint) else POINT_SCHEMAS.get(key)
        if group is not None:
            keys |= neutral_keys(typing.cast(type, group), f"{key}.")
            continue
        # Every other hint is `Annotated[<type>, Knob(…)]`.
        _, knob = typing.get_args(hint)
        if knob.neutral:
            keys.add(key)
    return frozenset(keys)


def plain(config: Any) -> dict[str, Any]:
    """Convert dataclasses to plain types for YAML and checkpoints."""
    converted: dict[str, Any] = plain_value(dataclasses.asdict(config))
    return converted


def flat(node: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings to one level with dotted keys.

    Example:
        >>> flat({"a": {"b": 1, "c": {}}})
        {'a.b': 1, 'a.c': {}}
    """
    if not isinstance(node, dict) or not node:
        return {prefix: node}
    values = {}
    for name, child in node.items():
        key = f"{prefix}.{name}" if prefix else str(name)
        values.update(flat(child, key))
    return values


def is_neutral(key: str) -> bool:
    """Whether a key cannot change the result of a run; a group is neutral with all its keys.

    The numbers of devices and of accumulated batches are neutral: only their product changes the
    result, and `decisive` has it in `micro_batch`.

    Example:
        >>> [is_neutral(key) for key in ("logger.save_dir", "data.num_workers", "optimizer.lr")]
        [True, True, False]
    """
    return any(f"{key}.".startswith(f"{neutral}.") for neutral in neutral_keys(TrainConfig))


def decisive(config: Mapping[str, Any]) -> dict[str, Any]:
    """Collect the values that can change a result, by dotted key.

    Besides keys of the configuration these are `micro_batch`, and `norm_batch` where batch
    normalisation is synchronised.

    Args:
        config: Plain configuration of `train`, from `plain`.
    """
    values = flat(dict(config))
    decisive_values = {key: value for key, value in values.items() if not is_neutral(key)}
    if values["stage.name"] == StageName.single:
        # These keys are unset in a run of one stage, and its `config.yaml` does not have them.
        for key in CASCADE_KEYS:
            decisive_values.pop(f"stage.{key}", None)
    # Samples of one pass on all ranks: synchronised batch normalisation takes its statistics there.
    if values.get("trainer.sync_batchnorm"):
        norm_batch = values["stage.batch_size"] / values["memory.accumulate"]
        decisive_values["norm_batch"] = norm_batch
    # A step divides its batch into `num_passes` passes through the network, on all ranks together.
    num_ranks = values["trainer.devices"] * values["trainer.num_nodes"]
    num_passes = num_ranks * values["memory.accumulate"]
    decisive_values["micro_batch"] = values["stage.batch_size"] / num_passes
    return decisive_values


def changed_keys(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """List the keys whose values differ, sorted; both arguments are from `decisive`."""
    keys = sorted(saved.keys() | current.keys())
    return [key for key in keys if saved.get(key) != current.get(key)]


def describe_changes(
    keys: Sequence[str], saved: Mapping[str, Any], current: Mapping[str, Any]
) -> str:
    """Describe the first changes for a message: `<key>: <value> then, <value> now; …`.

    Args:
        keys: From `changed_keys`.
        saved: Values of an earlier start.
        current: Values of this start.
    """
    changes = []
    for key in keys[:MAX_CHANGES]:
        changes.append(f"{key}: {saved.get(key)} then, {current.get(key)} now")
    return "; ".join(changes)


def signature(config: Mapping[str, Any]) -> str:
    """Hash the values that can change a result: equal for runs that must get the same result.

    Args:
        config: Plain configuration of `train`.

    Returns:
        16 hexadecimal digits.
    """
    text = json.dumps(decisive(config), sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
