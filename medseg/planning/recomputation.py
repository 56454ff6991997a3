"""Recomputed blocks: peak and seconds of a step for any set of them, and the fastest set within a budget by integer programming."""

import contextlib
import ctypes
import os
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from medseg.errors import UserError
from medseg.memory.accounting import FORWARD, UPDATE
from medseg.memory.kernels import KernelCosts
from medseg.memory.tracker import Held, Segment, Timeline

MIB = 2**20
SOLVER_BYTES = 64


class Literal(NamedTuple):
    """Condition under which a block holds a storage.

    Attributes:
        block: Name of the block.
        is_recomputed: True: the block holds it if it is recomputed; False: if it is not recomputed.
    """

    block: str
    is_recomputed: bool


@dataclass(frozen=True)
class Moment:
    """Bytes during one segment of a step.

    Attributes:
        base: Bytes that do not depend on the choice of blocks.
        held: Bytes by a set of literals; they are live if at least one of the literals holds.
        block: Block that runs; empty for what is outside of all blocks.
        rise: Further bytes at the peak of the segment if the block is not recomputed.
        recomputed_rise: The same if it is.
    """

    base: int
    held: dict[frozenset[Literal], int]
    block: str
    rise: int
    recomputed_rise: int


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
        if [one.owner for one in plain.segments] != [one.owner for one in recomputed.segments]:
            raise UserError(
                "plan: with recomputed blocks the parts of this network run in another order, so their time and memory cannot be "
                "predicted block by block; leave out fit_gib and choose memory.checkpointing yourself"
            )
        self.blocks = list(blocks)
        order: dict[str, int] = {}
        for segment in plain.segments:
            if segment.owner.kind == FORWARD:
                order.setdefault(segment.owner.part, len(order))
        self.moments: list[Moment] = []
        self.seconds, self.extra_seconds = 0.0, dict.fromkeys(("", *blocks), 0.0)
        for one, other in zip(plain.segments, recomputed.segments, strict=True):
            block = one.owner.part if one.owner.part in blocks else ""
            repeats = 1 if one.owner.kind == UPDATE else accumulate
            seconds, other_seconds = (
                repeats * duration(segment, costs) for segment in (one, other)
            )
            self.seconds += seconds
            self.extra_seconds[block] += other_seconds - seconds
            held = {} if one.owner.kind == UPDATE else self._held(plain.held, order, one)
            freed = sum(
                size
                for literals, size in held.items()
                if any(not literal.is_recomputed for literal in literals)
            )
            rises = (rise(segment, costs, is_resident=True) for segment in (one, other))
            self.moments.append(Moment(one.start_bytes - freed, held, block, *rises))
        del self.extra_seconds[""]

    def peak(self, recomputed: Collection[str] = ()) -> int:
        """Largest number of resident bytes in a step that recomputes some blocks."""
        return max(
            moment.base
            + sum(
                size
                for literals, size in moment.held.items()
                if any((one.block in recomputed) == one.is_recomputed for one in literals)
            )
            + (moment.recomputed_rise if moment.block in recomputed else moment.rise)
            for moment in self.moments
        )

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
        from scipy.optimize import (
            Bounds,
            LinearConstraint,
            milp,
        )  # takes a second to load, which counting does without

        # One variable for each block (1 = recomputed), and one for each set of literals: whether
        # one of them holds.
        sets = sorted({literals for moment in self.moments for literals in moment.held}, key=sorted)
        column = {literals: len(self.blocks) + index for index, literals in enumerate(sets)}
        place = {block: index for index, block in enumerate(self.blocks)}
        num_columns, rows, limits = len(self.blocks) + len(sets), [], []
        for literals in sets:
            for block, is_recomputed in literals:  # x <= z, or 1 - x <= z
                row = np.zeros(num_columns)
                row[place[block]], row[column[literals]] = (1, -1) if is_recomputed else (-1, -1)
                rows.append(row)
                limits.append(0.0 if is_recomputed else -1.0)
        for moment in self.moments:
            row = np.zeros(num_columns)
            for literals, size in moment.held.items():
                row[column[literals]] += size / MIB
            if moment.block:
                row[place[moment.block]] += (moment.recomputed_rise - moment.rise) / MIB
            rows.append(row)
            limits.append((budget - moment.base - moment.rise) / MIB)
        costs = np.zeros(num_columns)
        # Where a recomputation costs nothing, fewer blocks are better.
        costs[: len(self.blocks)] = [
            max(0.0, self.extra_seconds[block]) + 1e-9 for block in self.blocks
        ]
        with without_output():
            found = milp(
                costs / max(costs.max(), 1e-9),
                constraints=LinearConstraint(np.array(rows), ub=np.array(limits)),
                integrality=[1] * len(self.blocks) + [0] * len(sets),
                bounds=Bounds(0, 1),
                options={"mip_rel_gap": 0.0, "presolve": False},
            )
        if found.x is None:
            return None
        blocks = [block for block, value in zip(self.blocks, found.x, strict=False) if value > 0.5]
        # The solver accepts a violation of a few bytes.
        return blocks if self.peak(blocks) <= budget else self.fastest(budget - SOLVER_BYTES)

    def _held(
        self, storages: Sequence[Held], order: dict[str, int], segment: Segment
    ) -> dict[frozenset[Literal], int]:
        """Sum the bytes that are live at the start of a segment under conditions on blocks, by these conditions."""
        now, is_forward = order.get(segment.owner.part, len(order)), segment.owner.kind == FORWARD
        found: Counter[frozenset[Literal]] = Counter()
        for storage in storages:
            if is_forward:
                if order.get(storage.maker, -1) >= now:
                    continue
                # The caller of the parts holds what a later part takes.
                if any(order.get(part, -1) >= now for part in storage.takers | storage.savers):
                    continue
                savers, takers = storage.savers, storage.takers
            else:
                savers, takers = (
                    frozenset(part for part in parts if order.get(part, -1) <= now)
                    for parts in (storage.savers, storage.takers)
                )
            literals = {Literal(part, False) for part in savers if part in self.blocks}
            literals |= {Literal(part, True) for part in takers if part in self.blocks}
            is_always = any(part not in self.blocks for part in savers) or any(
                Literal(one.block, not one.is_recomputed) in literals for one in literals
            )
            if literals and not is_always:
                found[frozenset(literals)] += storage.num_bytes
        return dict(found)


@contextlib.contextmanager
def without_output() -> Iterator[None]:
    """Discard what a library writes to the standard output: HiGHS prints some lines whatever its options say."""
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
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).fflush(None)  # what it has not written yet would follow later
        os.dup2(stdout, 1)
        os.close(stdout)


def rise(segment: Segment, costs: KernelCosts, *, is_resident: bool) -> int:
    """Bytes by which the peak of a segment exceeds its start, with the workspaces of its operations.

    Args:
        segment: Part of a step.
        costs: Measured costs of its operations.
        is_resident: Whether only the part of a workspace counts that is written, and so resident.
    """
    workspaces = [
        costs[key].written if is_resident else costs[key].workspace for *_, key in segment.calls
    ]
    tops = [
        after + max(known, num_bytes)
        for (after, known, _), num_bytes in zip(segment.calls, workspaces, strict=True)
    ]
    return max(0, max(tops, default=0) - segment.start_bytes)


def duration(segment: Segment, costs: KernelCosts) -> float:
    """Seconds of the operations of a segment."""
    return sum(costs[key].seconds for _, _, key in segment.calls)
