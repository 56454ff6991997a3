"""Ensemble of nnU-Net's configurations: the mean of their probabilities at the scan's resolution.

As `nnUNetv2_ensemble` of results with `--save_probabilities`, but plane by plane: the logits of
each model lie in a temporary file at the spacing of its network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from medseg.errors import UserError
from medseg.geometry.grid import VoxelBox, VoxelGrid
from medseg.inference.scan_model import CombinedModel
from medseg.inference.segmentation import Segmentation
from medseg.io.scratch import new_array
from medseg.io.volume import Volume
from medseg.memory.profile import timed_step
from medseg.nnunet.labels import MAX_FOLDS_BYTES, average_planes
from medseg.nnunet.model import (
    EXACT_TIME,
    PREPARE,
    PREVIOUS,
    SEGMENT,
    Expected,
    Held,
    NnunetModel,
)
from medseg.nnunet.plan import NnunetPlan
from medseg.nnunet.planes import Planes
from medseg.task import Task

AVERAGE = "average"
# Logits, probabilities and their sum, float32.
PROBABILITY_PLANES = 3


@dataclass(frozen=True)
class NnunetEnsemble(CombinedModel):
    """Models of nnU-Net for one task whose probabilities are averaged."""

    parts: tuple[NnunetModel, ...]

    def __post_init__(self) -> None:
        first = self.parts[0]
        for member in self.parts[1:]:
            for what, of_first, own in (
                ("labels", first.plan.labels, member.plan.labels),
                ("channels", len(first.plan.channels), len(member.plan.channels)),
                ("order of axes", first.plan.transpose, member.plan.transpose),
                ("orientation", first.orientation, member.orientation),
            ):
                if of_first != own:
                    raise UserError(
                        f"ensemble=true: {first.folder.path} and {member.folder.path} differ in "
                        f"their {what}; give configurations of one data set"
                    )

    @property
    def task(self) -> Task:
        """Labels and channels, which are the same for all."""
        return self.parts[0].task

    @property
    def steps(self) -> list[str]:
        """Steps of all members with their numbers, and the mean."""
        return [*super().steps, AVERAGE]

    @property
    def checkpoints(self) -> dict[str, dict[str, str]]:
        """Checksums of the configurations of all members with their numbers."""
        return {f"ensemble_{name}": files for name, files in super().checkpoints.items()}

    @property
    def plan(self) -> NnunetPlan:
        """Plan of the first member; labels and axes are the same for all."""
        return self.parts[0].plan

    @property
    def pass_steps(self) -> list[str]:
        """Steps in which a network runs."""
        steps: list[str] = []
        for number, member in enumerate(self.parts, start=1):
            steps += [self.step_name(number, step) for step in member.pass_steps]
        return steps

    @property
    def usual_pass_bytes(self) -> int:
        """Memory of a pass of the largest network."""
        return max(member.usual_pass_bytes for member in self.parts)

    def expected(self, grid: VoxelGrid) -> Expected:
        """Expect the cost of a case by the header of its scan; see `NnunetModel.expected`."""
        memory: dict[str, list[Held]] = {}
        stored: list[Held] = []
        cost = 0.0
        operations = 0.0
        for number, member in enumerate(self.parts, start=1):
            part = member.expected_logits(grid)
            if member.previous is not None:
                before = member.previous.expected(grid)
                memory[self.step_name(number, PREVIOUS)] = stored + before.memory[SEGMENT]
                cost += before.cost
                operations += before.operations
            logits = Held(member.logits_bytes(grid))
            if logits.num_bytes > MAX_FOLDS_BYTES:
                logits = Held(0)  # they are a file
            memory[self.step_name(number, PREPARE)] = stored + part.memory[PREPARE]
            memory[self.step_name(number, SEGMENT)] = [*stored, *part.memory[SEGMENT], logits]
            stored = [*stored, logits]
            num_logits = self.plan.labels.num_heads * math.prod(grid.shape)
            cost += part.cost + EXACT_TIME * num_logits
            operations += part.operations
        shape = self.parts[0].turned_grid(grid).shape
        _, y, x = self.plan.transpose
        plane = 4 * self.plan.labels.num_heads * shape[y] * shape[x]
        labels = Held(math.prod(shape), waits=grid.is_axial)
        memory[AVERAGE] = [*stored, labels, Held(PROBABILITY_PLANES * plane)]
        return Expected(memory, cost, operations)

    def segment(
        self,
        volume: Volume,
        more_channels: Sequence[np.ndarray] = (),
        *,
        on_step: Callable[[str], None] | None = None,
        keep_probabilities: bool = False,
    ) -> Segmentation:
        """Segment one scan: the logits of each member in turn, then the mean; see `NnunetModel`.

        Raises:
            UserError: If a plan does not fit the scan.
        """
        assert not keep_probabilities, "`save` refuses them"
        result = Segmentation(np.empty(0))
        stored: list[tuple[Tensor, Planes]] = []
        for number in range(1, len(self.parts) + 1):
            logits, planes, box = self._run(number, volume, more_channels, result, on_step)
            stored.append((logits, planes))
        with timed_step(result.durations_s, on_step, AVERAGE):
            result.labels = new_array(volume.array.shape, np.uint8, waits=volume.grid.is_axial)
            labels = self.parts[0].crop_of(result.labels, box, volume.grid)
            average_planes(stored, self.plan.labels.region_values, labels)
        result.measure(volume.grid, self.task)
        return result

    def _run(
        self,
        number: int,
        volume: Volume,
        more_channels: Sequence[np.ndarray],
        result: Segmentation,
        on_step: Callable[[str], None] | None,
    ) -> tuple[Tensor, Planes, VoxelBox]:
        """Run the networks of a member; nothing but its logits stays.

        Args:
            number: Its number, from 1 on.
            volume: See `segment`.
            more_channels: See `segment`.
            result: Receives durations, tiles and findings.
            on_step: See `segment`.

        Returns:
            Its logits, their resampling, and the crop of the scan, which is that of all members.
        """
        member = self.parts[number - 1]
        part = Segmentation(np.empty(0))
        announce = self.announced(number, on_step)
        prepared = member.prepare_scan(volume, more_channels, part, announce)
        planes = member.planes_of(prepared)
        seconds_before = member.watch.seconds
        with timed_step(part.durations_s, announce, SEGMENT):
            logits = member.store_logits(prepared)
        part.pass_s += member.watch.seconds - seconds_before
        part.tiling_plans[SEGMENT] = member.described_passes()
        self.note_part(number, part, result)
        name = member.folder.path.name
        found = member.findings_of(volume.grid)
        result.findings += [finding.within(name) for finding in found]
        return logits, planes, prepared.box
