"""Ensemble of nnU-Net's configurations: the mean of their probabilities at the scan's resolution.

The labels are those of `nnUNetv2_ensemble` on results with `--save_probabilities`. The work is done
plane by plane: the logits of each model lie in a temporary file at the spacing of its network.
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
    ExpectedCost,
    NnunetModel,
    StepArray,
)
from medseg.nnunet.plan import NnunetPlan
from medseg.nnunet.planes import Planes
from medseg.task import Task

AVERAGE = "average"  # the last step
# Planes (K, H, W) of float32 in memory at a time: logits, probabilities and their sum.
PROBABILITY_PLANES = 3


@dataclass(frozen=True)
class NnunetEnsemble(CombinedModel):
    """Models of nnU-Net for one task whose probabilities are averaged.

    Attributes:
        parts: The members, at least one.
    """

    parts: tuple[NnunetModel, ...]

    def __post_init__(self) -> None:
        first = self.parts[0]
        for member in self.parts[1:]:
            for property_name, first_value, member_value in (
                ("labels", first.plan.labels, member.plan.labels),
                ("channels", len(first.plan.channels), len(member.plan.channels)),
                ("order of axes", first.plan.transpose, member.plan.transpose),
                ("orientation", first.orientation, member.orientation),
            ):
                if first_value != member_value:
                    raise UserError(
                        f"ensemble=true: {first.folder.path} and {member.folder.path} differ in "
                        f"their {property_name}; give configurations of one data set"
                    )

    @property
    def task(self) -> Task:
        """Labels and channels, which are the same for all members."""
        return self.parts[0].task

    @property
    def steps(self) -> list[str]:
        """Names of the steps of all members, with their numbers, and of the mean."""
        return [*super().steps, AVERAGE]

    @property
    def checkpoints(self) -> dict[str, dict[str, str]]:
        """Checksums of the checkpoints of all members; the number of the member is in each key."""
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

    def expected(self, grid: VoxelGrid) -> ExpectedCost:
        """Compute the cost of a case from the header of its scan; see `NnunetModel.expected`."""
        memory: dict[str, list[StepArray]] = {}
        # Logits of the earlier members, which are kept until the mean.
        stored: list[StepArray] = []
        other_time = 0.0
        operations = 0.0
        num_heads = self.plan.labels.num_heads
        for number, member in enumerate(self.parts, start=1):
            logits_cost = member.expected_logits(grid)
            if member.previous is not None:
                previous_cost = member.previous.expected(grid)
                memory[self.step_name(number, PREVIOUS)] = stored + previous_cost.memory[SEGMENT]
                other_time += previous_cost.other_time
                operations += previous_cost.operations
            logits = StepArray(member.logits_bytes(grid))
            # Larger logits are a file in any case, see `NnunetModel.store_logits`.
            if logits.num_bytes > MAX_FOLDS_BYTES:
                logits = StepArray(0)
            segment = logits_cost.memory[SEGMENT]
            memory[self.step_name(number, PREPARE)] = stored + logits_cost.memory[PREPARE]
            memory[self.step_name(number, SEGMENT)] = [*stored, *segment, logits]
            stored = [*stored, logits]
            # The mean interpolates the logits of each member at all voxels of the scan.
            num_scan_logits = num_heads * math.prod(grid.shape)
            other_time += logits_cost.other_time + EXACT_TIME * num_scan_logits
            operations += logits_cost.operations
        # The planes of the mean lie across the first axis of the network.
        shape = self.parts[0].reoriented_grid(grid).shape
        _, height_axis, width_axis = self.plan.transpose
        # 4 bytes for a float32.
        plane_bytes = 4 * num_heads * shape[height_axis] * shape[width_axis]
        # One byte a voxel.
        labels = StepArray(math.prod(shape), waits=grid.is_axial)
        memory[AVERAGE] = [*stored, labels, StepArray(PROBABILITY_PLANES * plane_bytes)]
        return ExpectedCost(memory, other_time, operations)

    def segment(
        self,
        volume: Volume,
        more_channels: Sequence[np.ndarray] = (),
        *,
        on_step: Callable[[str], None] | None = None,
        keep_probabilities: bool = False,
    ) -> Segmentation:
        """Segment one scan: compute the logits of each member in turn, then the labels by the mean.

        Args:
            volume: See `NnunetModel.segment`.
            more_channels: See `NnunetModel.segment`.
            on_step: See `NnunetModel.segment`.
            keep_probabilities: See `NnunetModel.segment`.

        Raises:
            UserError: If a plan does not fit the scan.
        """
        assert not keep_probabilities, "`save=probabilities` is refused before the first case"
        # The labels are set in the last step.
        result = Segmentation(np.empty(0))
        stored: list[tuple[Tensor, Planes]] = []
        for number in range(1, len(self.parts) + 1):
            logits, planes, box = self._run(number, volume, more_channels, result, on_step)
            stored.append((logits, planes))
        with timed_step(result.durations_s, on_step, AVERAGE):
            result.labels = new_array(volume.array.shape, np.uint8, waits=volume.grid.is_axial)
            # `box` is the same for all members, see `_run`. The crop is a view: labels that are
            # written to it are written to the result.
            crop = self.parts[0].crop_of(result.labels, box, volume.grid)
            average_planes(stored, self.plan.labels.region_values, labels=crop)
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
        """Run the networks of a member; only its logits are kept.

        Args:
            number: Number of the member, from 1 on.
            volume: See `segment`.
            more_channels: See `segment`.
            result: Receives durations, tiles and findings of the member.
            on_step: See `segment`.

        Returns:
            Logits (D, K, h, w) of the member, their resampling to the crop, and the box of the crop
            in the scan. The box depends on the scan alone, so all members have the same.
        """
        member = self.parts[number - 1]
        # This result never gets labels, only durations and tiling plans.
        member_result = Segmentation(np.empty(0))
        on_part_step = self.on_step_of_part(number, on_step)
        prepared = member.prepare_scan(volume, more_channels, member_result, on_part_step)
        planes = member.planes_of(prepared)
        seconds_before = member.watch.seconds
        with timed_step(member_result.durations_s, on_part_step, SEGMENT):
            logits = member.store_logits(prepared)
        member_result.pass_s += member.watch.seconds - seconds_before
        member_result.tiling_plans[SEGMENT] = member.described_passes()
        self.note_part(number, member_result, result)
        folder_name = member.folder.path.name
        # Findings that the member's result has already are those of the first stage of a cascade.
        findings = member_result.findings + member.findings_of(volume.grid)
        result.findings += [finding.within(folder_name) for finding in findings]
        return logits, planes, prepared.box
