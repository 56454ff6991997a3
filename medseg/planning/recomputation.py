"""Recomputed blocks: peak and seconds of a step with them; the fastest set by integer programming.

A recomputed block discards its activations after the forward pass and computes them again in the
backward pass (checkpointing). The integer program proves that no other set of blocks within the
budget is faster.
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
# The solver may violate the budget by a few bytes. It then runs again for a budget that is lower by
# this number.
SOLVER_TOLERANCE_BYTES = 64


class Literal(NamedTuple):
    """Condition under which a block holds a storage: that it is recomputed, or that it is not.

    A "literal" in the sense of logic: a variable or its negation.

    Attributes:
        block: Name of the block.
        is_recomputed: Whether the block must be recomputed, or must not be, to hold the storage.
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
        base: Bytes at the start of the segment that do not depend on the choice of blocks.
        conditional: Further bytes at the start, by a set of literals; they are live if at least one
            of these literals holds.
        block: Block that runs; empty for what is outside of all blocks.
        rise: Bytes by which the peak of the segment exceeds its start if the block is not
            recomputed.
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
    live_bytes = 0
    for literals, num_bytes in conditional.items():
        if any(literal.holds(recomputed) for literal in literals):
            live_bytes += num_bytes
    return live_bytes


class StepModel:
    """Resident peak and seconds of a training step as functions of the recomputed blocks.

    The model is made from two timelines of the same step, without and with recomputation of all
    blocks. The bytes that a segment of the step adds depend only on whether its own block is
    recomputed. The bytes that are live at its start depend on which blocks hold each storage: those
    that save it, if they are not recomputed, and those that take it as an input, if they are.

    Attributes:
        blocks: Blocks that can be recomputed.
        moments: Bytes during each segment of the step.
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
        # Place of each part in the forward pass.
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
            if owner.part in blocks:
                block = owner.part
                self.extra_seconds[block] += recomputed_seconds - plain_seconds
            conditional: dict[frozenset[Literal], int] = {}
            # The optimiser runs when the graph, and all that it held, is gone.
            if not is_update:
                conditional = self._conditional_bytes(plain.held_storages, order, plain_segment)
            moment = Moment(
                # The plain step was counted with no block recomputed: it contains the conditional
                # bytes that are live then.
                base=plain_segment.start_bytes - _live_bytes(conditional, recomputed=()),
                conditional=conditional,
                block=block,
                rise=rise(plain_segment, costs, is_resident=True),
                recomputed_rise=rise(recomputed_segment, costs, is_resident=True),
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
            budget: Resident bytes of the step.

        Returns:
            The blocks to recompute; None if no set fits.
        """
        # A network without blocks leaves nothing to choose: the solver refuses a program without
        # variables.
        if not self.blocks:
            return [] if self.peak() <= budget else None
        # Imported here because it takes a second, and a plan without a search does not need it.
        from scipy.optimize import Bounds, LinearConstraint, milp

        sets = self._literal_sets()
        # Variables: one per block, then one per set of literals.
        rows, limits = self._constraints(sets, budget)
        # A measured difference may be below zero by chance. The nanosecond lets the solver prefer
        # fewer blocks where recomputation costs nothing.
        block_costs = [max(0.0, self.extra_seconds[block]) + 1e-9 for block in self.blocks]
        set_costs = [0.0] * len(sets)
        costs = np.array(block_costs + set_costs)
        with without_output():
            result = milp(
                # Scaled to at most 1, to suit the absolute tolerances of the solver.
                costs / costs.max(),
                constraints=LinearConstraint(rows, ub=limits),
                # 1 = integer, 0 = real. For given blocks the smallest values that the rows allow
                # for the sets are 0 or 1, so these need not be declared as integers.
                integrality=[1] * len(self.blocks) + [0] * len(sets),
                bounds=Bounds(0, 1),
                # No gap: the solver stops only when the optimum is proved.
                options={"mip_rel_gap": 0.0, "presolve": False},
            )
        if result.x is None:
            return None
        # The variables of the blocks are 0 or 1 but for rounding; the variables of the sets follow
        # from them.
        block_values = result.x[: len(self.blocks)]
        blocks = []
        for block, value in zip(self.blocks, block_values, strict=True):
            if value > 0.5:
                blocks.append(block)
        # The peak counts whole bytes, without the solver's tolerance.
        if self.peak(blocks) > budget:
            return self.fastest(budget - SOLVER_TOLERANCE_BYTES)
        return blocks

    def _literal_sets(self) -> list[frozenset[Literal]]:
        """List the sets of literals under which any storage is held, in a fixed order."""
        sets: set[frozenset[Literal]] = set()
        for moment in self.moments:
            sets.update(moment.conditional)
        # Sets have no order of their own: each is compared as the sorted list of its literals.
        return sorted(sets, key=sorted)

    def _constraints(
        self, sets: Sequence[frozenset[Literal]], budget: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Write the conditions of the integer program as rows · (x, z) <= limits.

        Each block has a variable x (1 = recomputed), and each set of literals a variable z (1 = at
        least one of them holds). Memory is in MiB, so that all coefficients are of like size.

        Returns:
            Rows of coefficients, (conditions, blocks + sets), and the limit of each row.
        """
        block_column = {block: index for index, block in enumerate(self.blocks)}
        set_column = {literals: len(self.blocks) + index for index, literals in enumerate(sets)}
        rows: list[np.ndarray] = []
        limits: list[float] = []
        # If a literal holds, so does its set: x <= z for a recomputed block, else 1 - x <= z. As
        # rows these are x - z <= 0 and -x - z <= -1.
        for literals in sets:
            for literal in literals:
                row = np.zeros(len(self.blocks) + len(sets))
                row[block_column[literal.block]] = 1 if literal.is_recomputed else -1
                row[set_column[literals]] = -1
                rows.append(row)
                limits.append(0.0 if literal.is_recomputed else -1.0)
        # The peak of each moment lies within the budget: base + the conditional bytes whose z is 1
        # + rise + x · (recomputed_rise - rise) <= budget.
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
            storages: Storages that are live between the forward and the backward pass.
            order: Place of each part in the forward pass. A missing part that saves or takes counts
                as the first one, whose backward pass ends last.
            segment: Segment of the forward or the backward pass.

        Returns:
            Bytes by the literals of which at least one must hold.
        """
        # What has no place in the forward pass, such as the loss, runs when all parts have run.
        place = order.get(segment.owner.part, len(order))
        conditional: Counter[frozenset[Literal]] = Counter()
        for storage in storages:
            if segment.owner.kind == FORWARD:
                if not _is_saved_only(storage, order, place):
                    continue
                savers = storage.savers
                takers = storage.takers
            else:
                # The backward pass runs from the last part to the first: the parts after this one
                # are done, and hold nothing more.
                savers = frozenset(part for part in storage.savers if order.get(part, -1) <= place)
                takers = frozenset(part for part in storage.takers if order.get(part, -1) <= place)
            # A part outside of all blocks cannot be recomputed, so it always holds what it saves.
            if not savers.issubset(self.blocks):
                continue
            # A block holds what it saves if it is not recomputed, and its inputs if it is.
            recomputable_takers = takers.intersection(self.blocks)
            literals = {Literal(part, is_recomputed=False) for part in savers}
            literals |= {Literal(part, is_recomputed=True) for part in recomputable_takers}
            # A block that both saves and takes a storage holds it either way: no condition.
            if literals and not savers & takers:
                conditional[frozenset(literals)] += storage.num_bytes
        return dict(conditional)


def _is_saved_only(storage: HeldStorage, order: dict[str, int], place: int) -> bool:
    """Whether a storage lives for the backward pass alone when a part begins its forward pass.

    Args:
        storage: The storage.
        order: Place of each part in the forward pass.
        place: Place of the part.
    """
    is_made = order.get(storage.maker, -1) < place
    if not is_made:
        return False
    # What a later part uses is held in any case until that part runs.
    users = storage.takers | storage.savers
    return all(order.get(part, -1) < place for part in users)


@contextlib.contextmanager
def without_output() -> Iterator[None]:
    """Discard what a library writes to the standard output.

    HiGHS, the solver of scipy, prints some lines whatever its options say. It writes to the file
    descriptor itself, 1, which is replaced here: `contextlib.redirect_stdout` would not catch it.
    """
    sys.stdout.flush()  # text that Python has buffered must not be discarded
    try:
        saved_stdout = os.dup(1)
    except OSError:  # the process has no standard output
        yield
        return
    null_device = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null_device, 1)
    os.close(null_device)
    try:
        yield
    finally:
        # Write the buffer of the C library now: later it would go to the restored output. The C
        # library of another system may lack fflush.
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).fflush(None)
        os.dup2(saved_stdout, 1)
        os.close(saved_stdout)


def rise(segment: Segment, costs: KernelCosts, *, is_resident: bool) -> int:
    """Bytes by which a segment's peak exceeds its start, with the workspaces of its operations.

    Args:
        segment: Part of a step.
        costs: Measured costs of its operations.
        is_resident: Whether only the part of a workspace counts that is written, and so resident.
    """
    peak = segment.start_bytes
    for operation in segment.operations:
        cost = costs[operation.key]
        measured_workspace = cost.written if is_resident else cost.workspace
        workspace = max(operation.known_workspace, measured_workspace)
        peak = max(peak, operation.live_bytes + workspace)
    return peak - segment.start_bytes


def duration(segment: Segment, costs: KernelCosts) -> float:
    """Seconds of the operations of a segment."""
    return sum(costs[operation.key].seconds for operation in segment.operations)
