"""Recomputed blocks: peak and seconds of a step with them; the fastest set by integer programming.

The integer program proves that no other set of blocks within the budget is faster.
"""

import contextlib
import ctypes
import os
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from medseg.errors import UserError
from medseg.memory.accounting import FORWARD, UPDATE
from medseg.memory.kernels import KernelCosts
from medseg.memory.tracker import HeldStorage, Segment, Timeline

MIB = 2**20
# Bytes by which the budget is lowered where the solver's result exceeds it.
SOLVER_BYTES = 64


class Literal(NamedTuple):
    """Condition under which a block holds a storage.

    Attributes:
        block: Name of the block.
        is_recomputed: True: the block holds it if it is recomputed; False: if it is not recomputed.
    """

    block: str
    is_recomputed: bool

    def holds(self, recomputed: Collection[str]) -> bool:
        """Whether the condition holds where these blocks are recomputed."""
        return (self.block in recomputed) == self.is_recomputed


@dataclass(frozen=True)
class Moment:
    """Bytes during one segment of a step.

    Attributes:
        base: Bytes that do not depend on the choice of blocks.
        conditional: Bytes by a set of literals; they are live if at least one literal holds.
        block: Block that runs; empty for what is outside of all blocks.
        rise: Further bytes at the peak of the segment if the block is not recomputed.
        recomputed_rise: The same if it is.
    """

    base: int
    conditional: dict[frozenset[Literal], int]
    block: str
    rise: int
    recomputed_rise: int

    def peak(self, recomputed: Collection[str]) -> int:
        """Resident bytes at the peak of the segment where these blocks are recomputed."""
        start_bytes = self.base + _live_bytes(self.conditional, recomputed)
        if self.block in recomputed:
            return start_bytes + self.recomputed_rise
        return start_bytes + self.rise


def _live_bytes(conditional: Mapping[frozenset[Literal], int], recomputed: Collection[str]) -> int:
    """Sum the conditional bytes that are live where these blocks are recomputed."""
    num_live = 0
    for literals, num_bytes in conditional.items():
        if any(literal.holds(recomputed) for literal in literals):
            num_live += num_bytes
    return num_live


class StepModel:
    """Resident peak and seconds of a training step as functions of the recomputed blocks.

    The model is made from two timelines of the same step, without and with recomputation of all
    blocks. A segment of the step adds the same bytes whatever the other blocks do. The bytes that
    are live at its start depend on which blocks save or take each storage.

    Attributes:
        blocks: Blocks that can be recomputed.
        seconds: Duration of a step without recomputation.
        extra_seconds: Duration that the recomputation of each block adds.
    """

    def __init__(
        self,
        plain: Timeline,
        recomputed: Timeline,
        blocks: Sequence[str],
        costs: KernelCosts,
        accumulate: int,
    ) -> None:
        """Compare the timelines.

        Args:
            plain: Without recomputation.
            recomputed: With recomputation of all blocks.
            blocks: Blocks that can be recomputed.
            costs: Measured costs of all operations.
            accumulate: Micro-batches per optimiser step.

        Raises:
            UserError: If the two do not consist of the same segments.
        """
        owners = [segment.owner for segment in plain.segments]
        if owners != [segment.owner for segment in recomputed.segments]:
            raise UserError(
                "plan: with recomputed blocks the parts of this network run in another order, so "
                "their time and memory cannot be predicted block by block; leave out fit_gib and "
                "choose memory.checkpointing yourself"
            )
        self.blocks = list(blocks)
        order: dict[str, int] = {}
        for owner in owners:
            if owner.kind == FORWARD:
                order.setdefault(owner.part, len(order))
        self.moments: list[Moment] = []
        self.seconds = 0.0
        self.extra_seconds = dict.fromkeys(blocks, 0.0)
        pairs = zip(plain.segments, recomputed.segments, strict=True)
        for plain_segment, recomputed_segment in pairs:
            owner = plain_segment.owner
            # The optimiser steps once after all micro-batches.
            is_update = owner.kind == UPDATE
            repeats = 1 if is_update else accumulate
            plain_seconds = repeats * duration(plain_segment, costs)
            recomputed_seconds = repeats * duration(recomputed_segment, costs)
            self.seconds += plain_seconds
            block = ""
            if owner.part in self.extra_seconds:
                block = owner.part
                self.extra_seconds[block] += recomputed_seconds - plain_seconds
            conditional: dict[frozenset[Literal], int] = {}
            # The optimiser runs when the graph, and all that it held, is gone.
            if not is_update:
                conditional = self._conditional_bytes(plain.held_storages, order, plain_segment)
            moment = Moment(
                # Without recomputation these are live at the start of the segment.
                plain_segment.start_bytes - _live_bytes(conditional, ()),
                conditional,
                block,
                rise(plain_segment, costs, is_resident=True),
                rise(recomputed_segment, costs, is_resident=True),
            )
            self.moments.append(moment)

    def peak(self, recomputed: Collection[str] = ()) -> int:
        """Largest number of resident bytes in a step that recomputes some blocks."""
        return max(moment.peak(recomputed) for moment in self.moments)

    def duration(self, recomputed: Collection[str] = ()) -> float:
        """Seconds of a step that recomputes some blocks."""
        return self.seconds + sum(self.extra_seconds[block] for block in recomputed)

    def fastest(self, budget: int) -> list[str] | None:
        """Find the fastest set of recomputed blocks whose step fits into a budget.

        The problem is an integer program, whose solver proves the optimum.

        Args:
            budget: Bytes.

        Returns:
            The blocks to recompute; None if no set fits.
        """
        # Takes a second to load, which counting does without.
        from scipy.optimize import Bounds, LinearConstraint, milp

        sets = self._literal_sets()
        # Variables: one a block, then one a set of literals.
        rows, limits = self._constraints(sets, budget)
        # Where a recomputation costs nothing, fewer blocks are better.
        block_costs = [max(0.0, self.extra_seconds[block]) + 1e-9 for block in self.blocks]
        set_costs = [0.0] * len(sets)
        costs = np.array(block_costs + set_costs)
        with without_output():
            result = milp(
                costs / max(costs.max(), 1e-9),
                constraints=LinearConstraint(rows, ub=limits),
                # The variables of the sets follow from those of the blocks, also as real numbers.
                integrality=[1] * len(self.blocks) + [0] * len(sets),
                bounds=Bounds(0, 1),
                options={"mip_rel_gap": 0.0, "presolve": False},
            )
        if result.x is None:
            return None
        # The first variables are those of the blocks, 0 or 1 but for rounding.
        blocks = []
        for block, value in zip(self.blocks, result.x, strict=False):
            if value > 0.5:
                blocks.append(block)
        # The solver accepts a violation of a few bytes.
        if self.peak(blocks) > budget:
            return self.fastest(budget - SOLVER_BYTES)
        return blocks

    def _literal_sets(self) -> list[frozenset[Literal]]:
        """List the sets of literals under which any storage is held, in a fixed order."""
        sets: set[frozenset[Literal]] = set()
        for moment in self.moments:
            sets.update(moment.conditional)
        return sorted(sets, key=sorted)

    def _constraints(
        self, sets: Sequence[frozenset[Literal]], budget: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Write the conditions of the integer program as rows · x <= limits.

        Each block has a variable x (1 = recomputed), and each set of literals a variable z: whether
        at least one of them holds. Memory is in MiB, so that all coefficients are of like size.
        """
        block_column = {block: index for index, block in enumerate(self.blocks)}
        set_column = {literals: len(self.blocks) + index for index, literals in enumerate(sets)}
        rows: list[np.ndarray] = []
        limits: list[float] = []
        # A set holds if one of its literals does: x <= z, or 1 - x <= z.
        for literals in sets:
            for literal in literals:
                row = np.zeros(len(self.blocks) + len(sets))
                row[block_column[literal.block]] = 1 if literal.is_recomputed else -1
                row[set_column[literals]] = -1
                rows.append(row)
                limits.append(0.0 if literal.is_recomputed else -1.0)
        # The peak of each moment lies within the budget.
        for moment in self.moments:
            row = np.zeros(len(self.blocks) + len(sets))
            for literals, num_bytes in moment.conditional.items():
                row[set_column[literals]] += num_bytes / MIB
            if moment.block:
                row[block_column[moment.block]] += (moment.recomputed_rise - moment.rise) / MIB
            rows.append(row)
            limits.append((budget - moment.base - moment.rise) / MIB)
        return np.array(rows), np.array(limits)

    def _conditional_bytes(
        self, storages: Sequence[HeldStorage], order: dict[str, int], segment: Segment
    ) -> dict[frozenset[Literal], int]:
        """Sum the bytes that are live at the start of a segment only under conditions on blocks.

        Args:
            storages: What is live between the forward and the backward pass.
            order: Place of each part in the forward pass.
            segment: Part of the forward or the backward pass.

        Returns:
            Bytes by the literals of which at least one must hold.
        """
        now = order.get(segment.owner.part, len(order))
        conditional: Counter[frozenset[Literal]] = Counter()
        for storage in storages:
            if segment.owner.kind == FORWARD:
                if not _is_saved_only(storage, order, now):
                    continue
                savers = storage.savers
                takers = storage.takers
            else:
                # The parts after this one are done with their backward pass, and hold nothing more.
                savers = frozenset(part for part in storage.savers if order.get(part, -1) <= now)
                takers = frozenset(part for part in storage.takers if order.get(part, -1) <= now)
            # What is outside of all blocks saves in any case.
            if not savers.issubset(self.blocks):
                continue
            # A block keeps what it saves where it runs plainly, and its inputs where it is
            # recomputed.
            recomputable_takers = takers.intersection(self.blocks)
            literals = {Literal(part, is_recomputed=False) for part in savers}
            literals |= {Literal(part, is_recomputed=True) for part in recomputable_takers}
            # A block that saves and takes it holds it either way.
            if literals and not savers & takers:
                conditional[frozenset(literals)] += storage.num_bytes
        return dict(conditional)


def _is_saved_only(storage: HeldStorage, order: dict[str, int], now: int) -> bool:
    """Whether a storage lives for the backward pass alone when a part begins its forward pass.

    Args:
        storage: The storage.
        order: Place of each part in the forward pass.
        now: Place of the part.
    """
    if order.get(storage.maker, -1) >= now:
        return False  # it is not made yet
    # The caller of the parts holds what a later part takes.
    users = storage.takers | storage.savers
    return all(order.get(part, -1) < now for part in users)


@contextlib.contextmanager
def without_output() -> Iterator[None]:
    """Discard what a library writes to the standard output.

    HiGHS, the solver of scipy, prints some lines whatever its options say.
    """
    sys.stdout.flush()
    try:
        stdout = os.dup(1)
    except OSError:  # the process has no standard output
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    try:
        yield
    finally:
        # What C has not written yet would follow later. Another C library may have no fflush.
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).fflush(None)
        os.dup2(stdout, 1)
        os.close(stdout)


def rise(segment: Segment, costs: KernelCosts, *, is_resident: bool) -> int:
    """Bytes by which a segment's peak exceeds its start, with the workspaces of its operations.

    Args:
        segment: Part of a step.
        costs: Measured costs of its operations.
        is_resident: Whether only the part of a workspace counts that is written, and so resident.
    """
    peak = segment.start_bytes
    for live_bytes, workspace_bytes, key in segment.calls:
        measured = costs[key].written if is_resident else costs[key].workspace
        peak = max(peak, live_bytes + max(workspace_bytes, measured))
    return peak - segment.start_bytes


def duration(segment: Segment, costs: KernelCosts) -> float:
    """Seconds of the operations of a segment."""
    return sum(costs[key].seconds for _, _, key in segment.calls)
