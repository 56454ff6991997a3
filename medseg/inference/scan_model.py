"""Interface of models that make the labels of a scan, and the base of models made of others.

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
    """Makes the labels of a scan; all else, from reading to the report, is the same for all."""

    @property
    def options(self) -> InferenceOptions:
        """Keys of `inference`."""

    @property
    def task(self) -> Task:
        """Labels and channels."""

    @property
    def steps(self) -> list[str]:
        """Steps of `segment`, as in `Segmentation.durations_s`."""

    @property
    def checkpoints(self) -> dict[str, dict[str, str]]:
        """Name of each stage to the SHA-256 of its files by their paths."""

    @property
    def device(self) -> torch.device:
        """Device of the networks."""

    @property
    def precision(self) -> str:
        """Number format of the networks that make the final labels."""

    @property
    def backend_bytes(self) -> int:
        """Memory that backends take with their first pass and keep."""

    @property
    def waiting_bytes(self) -> float:
        """Size above which arrays that wait are files, see `medseg.io.scratch.scratch_above`."""

    @property
    def has_views(self) -> bool:
        """Whether averaged views give a map of their disagreement."""

    @property
    def keeps_values(self) -> bool:
        """Whether the model takes voxels as stored, with the padding of scanners; else with air."""

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
        """Refuse a scan that cannot keep the bound, by its header alone."""


@dataclass(frozen=True)
class CombinedModel:
    """Base of models that are made of others; a step has the number of the part that takes it.

    Attributes:
        parts: The models, in the order given.
    """

    parts: tuple[ScanModel, ...]

    # Parts may differ, so `segment` replaces padding for each part that needs it.
    keeps_values = True
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
        """Number formats of the parts."""
        precisions = [part.precision for part in self.parts]
        return ", ".join(dict.fromkeys(precisions))

    @property
    def backend_bytes(self) -> int:
        """Memory that the backends of all parts keep."""
        return sum(part.backend_bytes for part in self.parts)

    @property
    def waiting_bytes(self) -> float:
        """Size above which arrays that wait are files; one part may need them in memory."""
        return max(part.waiting_bytes for part in self.parts)

    @property
    def steps(self) -> list[str]:
        """Steps of all parts, with the number of the part."""
        steps: list[str] = []
        for number, part in enumerate(self.parts, start=1):
            steps += [self.step_name(number, step) for step in part.steps]
        return steps

    @property
    def checkpoints(self) -> dict[str, dict[str, str]]:
        """Checksums of the stages of all parts, with the number of the part."""
        files: dict[str, dict[str, str]] = {}
        for number, part in enumerate(self.parts, start=1):
            for stage, checksums in part.checkpoints.items():
                files[self.step_name(number, stage)] = checksums
        return files

    def step_name(self, number: int, step: str) -> str:
        """Name a step or stage of part `number`; a single part keeps its names."""
        return step if len(self.parts) == 1 else f"{step}_{number}"

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
        """Make the `on_step` of a part, which passes its steps on with the number of the part."""
        if on_step is None:
            return None
        return lambda step: on_step(self.step_name(number, step))

    def note_part(self, number: int, segmented: Segmentation, result: Segmentation) -> None:
        """Note in the result how long the steps of a part took, and how they ran."""
        for step, duration_s in segmented.durations_s.items():
            result.durations_s[self.step_name(number, step)] = duration_s
        for step, described in segmented.tiling_plans.items():
            result.tiling_plans[self.step_name(number, step)] = described
        for step, distortion in segmented.distortions.items():
            result.distortions[self.step_name(number, step)] = distortion
        result.pass_s += segmented.pass_s
