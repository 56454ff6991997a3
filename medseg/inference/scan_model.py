"""Interface of models that segment scans, and the base class of models that combine others.

Cascades and models of nnU-Net implement it, and so do classes that join, average or wrap them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

import numpy as np
import torch

from medseg.geometry.grid import VoxelGrid
from medseg.inference.options import InferenceOptions
from medseg.inference.segmentation import Segmentation
from medseg.io.volume import Volume
from medseg.task import Task


class ScanModel(Protocol):
    """Model that makes the labels of a scan.

    Reading the scan, writing the results and the report are the same for all models.
    """

    @property
    def options(self) -> InferenceOptions:
        """Keys of the group `inference`."""

    @property
    def task(self) -> Task:
        """Labels that the model makes and channels that it takes."""

    @property
    def steps(self) -> list[str]:
        """Names of the steps of `segment` in their order, as in `Segmentation.durations_s`."""

    @property
    def checkpoints(self) -> dict[str, dict[str, str]]:
        """Name of each stage to its files: path to SHA-256."""

    @property
    def device(self) -> torch.device:
        """Device of the networks."""

    @property
    def precision(self) -> str:
        """Number format of the networks that make the final labels."""

    @property
    def backend_bytes(self) -> int:
        """Memory that the backends take with the first pass of a network and keep."""

    @property
    def waiting_bytes(self) -> float:
        """Size in bytes above which arrays that wait for their next use are temporary files.

        See `medseg.io.scratch.scratch_above`.
        """

    @property
    def has_views(self) -> bool:
        """Whether several checkpoints or flips are averaged, with a map of their disagreement."""

    @property
    def keeps_values(self) -> bool:
        """Whether the model takes voxels as stored.

        Otherwise the values with which scanners pad an image must be replaced by that of air.
        """

    def segment(
        self,
        volume: Volume,
        more_channels: Sequence[np.ndarray] = (),
        *,
        on_step: Callable[[str], None] | None = None,
        keep_probabilities: bool = False,
    ) -> Segmentation:
        """Segment one scan; see `Cascade.segment`."""

    def within(self, budget_gib: float) -> ScanModel:
        """Return the same model with a bound on the memory of a network pass."""

    def check_budget(self, grid: VoxelGrid) -> None:
        """Refuse a scan that cannot be segmented within the bound, by its header alone.

        Raises:
            UserError: If it cannot.
        """


@dataclass(frozen=True)
class CombinedModel:
    """Base of models that combine others; the name of a step ends with the number of its part.

    Attributes:
        parts: The models, in the order given.
    """

    parts: tuple[ScanModel, ...]

    # Only some parts may need air instead of padding: `segment` of the subclass replaces it for
    # these, so the voxels come as stored.
    keeps_values = True
    # No map of disagreement is made, not even from parts that have views.
    has_views = False

    @property
    def options(self) -> InferenceOptions:
        """Keys of `inference`, which are the same for all parts."""
        return self.parts[0].options

    @property
    def device(self) -> torch.device:
        """Device of all parts."""
        return self.parts[0].device

    @property
    def precision(self) -> str:
        """Number formats of the parts, each once."""
        precisions = dict.fromkeys(part.precision for part in self.parts)  # a set in their order
        return ", ".join(precisions)

    @property
    def backend_bytes(self) -> int:
        """Memory that the backends of all parts keep."""
        return sum(part.backend_bytes for part in self.parts)

    @property
    def waiting_bytes(self) -> float:
        """Largest `waiting_bytes` of the parts: a part may need arrays up to its own in memory."""
        return max(part.waiting_bytes for part in self.parts)

    @property
    def steps(self) -> list[str]:
        """Steps of all parts, each with the number of its part."""
        steps: list[str] = []
        for number, part in enumerate(self.parts, start=1):
            steps += [self.step_name(number, step) for step in part.steps]
        return steps

    @property
    def checkpoints(self) -> dict[str, dict[str, str]]:
        """Stages of all parts, each with the number of its part; see `ScanModel.checkpoints`."""
        checkpoints: dict[str, dict[str, str]] = {}
        for number, part in enumerate(self.parts, start=1):
            for stage, checksums in part.checkpoints.items():
                checkpoints[self.step_name(number, stage)] = checksums
        return checkpoints

    def step_name(self, number: int, step: str) -> str:
        """Name a step or stage of part `number`, from 1; a single part keeps its names."""
        if len(self.parts) == 1:
            return step
        return f"{step}_{number}"

    def within(self, budget_gib: float) -> Self:
        """Return the same models with a bound on the memory of a network pass."""
        bounded_parts = [part.within(budget_gib) for part in self.parts]
        return replace(self, parts=tuple(bounded_parts))

    def check_budget(self, grid: VoxelGrid) -> None:
        """Refuse a scan that a part cannot segment within the bound."""
        for part in self.parts:
            part.check_budget(grid)

    def announced(
        self, number: int, on_step: Callable[[str], None] | None
    ) -> Callable[[str], None] | None:
        """Make the `on_step` of a part, which adds the number of the part to its steps."""
        if on_step is None:
            return None
        return lambda step: on_step(self.step_name(number, step))

    def note_part(self, number: int, part_result: Segmentation, result: Segmentation) -> None:
        """Add to `result` how long the steps of a part took, and how they ran."""
        for step, duration_s in part_result.durations_s.items():
            result.durations_s[self.step_name(number, step)] = duration_s
        for step, tiling_plan in part_result.tiling_plans.items():
            result.tiling_plans[self.step_name(number, step)] = tiling_plan
        for step, distortion in part_result.distortions.items():
            result.distortions[self.step_name(number, step)] = distortion
        result.pass_s += part_result.pass_s
