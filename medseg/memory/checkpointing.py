"""Gradient checkpointing: blocks drop their activations and compute them again in the backward pass."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

POLICIES = ("none", "sqrt", "all")


def select_blocks(blocks: Mapping[str, nn.Module], policy: str | Sequence[str]) -> list[str]:
    """Choose the blocks to recompute.

    Args:
        blocks: Named blocks, those that save the most bytes first.
        policy: `none`; `all`; `sqrt`, the first ceil(sqrt(n)) of the n blocks; or names, where the beginning of a
            name up to a dot stands for all blocks below it (`encoder.0`). In a UNet a level saves four times the
            bytes of the next one and costs twice its operations, so the finest blocks give the most memory per second.

    Returns:
        Names of the blocks, in the order of `blocks`.

    Raises:
        ValueError: If the policy is unknown or a name matches no block.
    """
    names = list(blocks)
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise ValueError(f"checkpointing must be one of {POLICIES} or a tuple of block names, got {policy!r}")
        count = {"none": 0, "sqrt": math.ceil(math.sqrt(len(names))), "all": len(names)}[policy]
        return names[:count]
    chosen: set[str] = set()
    for wanted in policy:
        found = names_below(names, wanted)
        if not found:
            raise ValueError(f"checkpointing names {wanted!r}, which is no block; the blocks are {', '.join(names)}")
        chosen.update(found)
    return [name for name in names if name in chosen]


def names_below(names: Sequence[str], wanted: str) -> list[str]:
    """List the names that equal a wanted one or continue it after a dot."""
    return [name for name in names if name == wanted or name.startswith(f"{wanted}.")]


def checkpoint_blocks(blocks: Mapping[str, nn.Module], policy: str | Sequence[str]) -> list[str]:
    """Recompute the chosen blocks in the backward pass, each on its own; parameters and their names stay.

    Without a gradient (evaluation, inference mode) a block runs once, as before. The recomputation draws the same random numbers, and
    a batch norm updates its statistics once per batch although it runs twice.

    Args:
        blocks: Named blocks, those that save the most bytes first.
        policy: See `select_blocks`.

    Returns:
        Names of the recomputed blocks.
    """
    names = select_blocks(blocks, policy)
    for name in names:
        block = blocks[name]
        block.forward = _recomputed(block.forward, [module for module in block.modules() if isinstance(module, _BatchNorm)])
    return names


def _recomputed(forward: Callable[..., Any], norms: list[_BatchNorm]) -> Callable[..., Any]:
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": True}
    if norms:
        options["context_fn"] = functools.partial(_contexts, norms)

    @functools.wraps(forward)
    def run(*args: Any) -> Any:
        return checkpoint(forward, *args, **options)

    return run


def _contexts(norms: list[_BatchNorm]) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Context of the first run and context of the recomputation."""
    return contextlib.nullcontext(), _paused_statistics(norms)


@contextlib.contextmanager
def _paused_statistics(norms: list[_BatchNorm]) -> Iterator[None]:
    """Let the batch norms update copies of their statistics, which are then dropped.

    Buffers must be present: the kernel saves them for the backward pass, and both runs must save the same number of tensors.
    """
    kept = [dict(norm._buffers) for norm in norms]
    for norm, buffers in zip(norms, kept, strict=True):
        norm._buffers.update({name: None if buffer is None else buffer.clone() for name, buffer in buffers.items()})
    try:
        yield
    finally:
        for norm, buffers in zip(norms, kept, strict=True):
            norm._buffers.update(buffers)
