"""Interface of what makes the labels of a scan: a cascade, or a model of nnU-Net."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

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
    def has_views(self) -> bool:
        """Whether averaged views give a map of their disagreement."""

    @property
    def keeps_values(self) -> bool:
        """Whether voxels must reach the networks as they are stored, also what scanners fill in."""

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
