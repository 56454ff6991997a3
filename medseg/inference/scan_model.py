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
        """Values of the configuration group `inference`."""

    @property
    def task(self) -> Task:
        """Labels that the model makes and channels that it takes."""

    @property
    def steps(self) -> list[str]:
        """Names of the steps of `segment` in their order, as in `Segmentation.durations_s`."""

    @property
    def checkpoints(self) -> dict[str, dict[str, str]]:
        """Name of each stage to its checkpoint files, a mapping of path to SHA-256."""

    @property
    def device(self) -> torch.device:
        """Device of the networks."""

    @property
    def precision(self) -> str:
        """Number format of the networks that make the final labels."""

    @property
    def backend_bytes(self) -> int:
        """Memory that the backends allocate in the first pass of each network and then keep."""

    @property
    def waiting_bytes(self) -> float:
        """Size in bytes above which an array is kept in a temporary file until its next use.

        See `medseg.io.scratch.scratch_above`.
        """

    @property
    def has_views(self) -> bool:
        """Whether results of several checkpoints or flips are averaged.

        `segment` then also maps their disagreement.
        """

    @property
    def keeps_values(self) -> bool:
        """Whether the model takes voxel values as stored.

        Otherwise the caller replaces a scanner's padding values by the value of air.
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
        """Return the same model with this bound on the memory of a network pass."""

    def check_budget(self, grid: VoxelGrid) -> None:
        """Refuse a scan that cannot be segmented within the bound, known from its grid alone.

        Raises:
            UserError: If the bound is too small.
        """


@dataclass(frozen=True)
class CombinedModel:
    """Base of models that combine others; the name of a step ends with the number of its part.

    Subclasses add `task` and `segment`.

    Attributes:
        parts: The models, in the order given.
    """

    parts: tuple[ScanModel, ...]

    # The combined model takes values as stored, because some parts may need the padding. For the
    # others `segment` of the subclass replaces the padding by air.
    keeps_values = True
    # No map of disagreement is made, not even if a part makes one.
    has_views = False

    @property
    def options(self) -> InferenceOptions:
        """Values of `inference`, which are the same for all parts."""
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
        """Largest threshold of the parts: each part gets the arrays in memory that it asks for."""
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
        """Return the same models with this bound on the memory of a network pass."""
        bounded_parts = [part.within(budget_gib) for part in self.parts]
        return replace(self, parts=tuple(bounded_parts))

    def check_budget(self, grid: VoxelGrid) -> None:
        """Refuse a scan that any part cannot segment within the bound."""
        for part in self.parts:
            part.check_budget(grid)

    def on_step_of_part(
        self, number: int, on_step: Callable[[str], None] | None
    ) -> Callable[[str], None] | None:
        """Make the `on_step` of a part: it calls `on_step` with the numbered name of the step."""
        if on_step is None:
            return None
        return lambda step: on_step(self.step_name(number, step))

    def note_part(self, number: int, part_result: Segmentation, result: Segmentation) -> None:
        """Add the durations, tiling plans and distortions of a part's steps to `result`."""
        for step, duration_s in part_result.durations_s.items():
            result.durations_s[self.step_name(number, step)] = duration_s
        for step, tiling_plan in part_result.tiling_plans.items():
            result.tiling_plans[self.step_name(number, step)] = tiling_plan
        for step, distortion in part_result.distortions.items():
            result.distortions[self.step_name(number, step)] = distortion
        result.pass_s += part_result.pass_s
