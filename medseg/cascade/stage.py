"""A trained stage and the choices of the cascade that are no part of it."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from medseg.data.task import Task
from medseg.errors import UserError
from medseg.geometry.grid_rule import PLAIN, GridRule
from medseg.inference.passes import Pass, plan_pass
from medseg.inference.tile_workers import TileWorkers
from medseg.inference.tiles import KEPT, predict_probs
from medseg.memory.accounting.forward import forward_bytes_per_voxel
from medseg.memory.precision import autocast, inference_precision, set_tf32
from medseg.preprocess.resample import ANTIALIASED

X_AXIS = 2
MAX_BATCH = 8
# One pass at a time: its memory is what the budget allows, and the switches of TF32 belong to the process.
_PASS = threading.Lock()


@dataclass(frozen=True)
class CascadeOptions:
    """Thresholds of the clean-up and of the plausibility checks, and how networks are run.

    Attributes:
        min_part_fraction: A label keeps its largest part and every part of at least this share of it, in (0, 1].
        min_region_ml: A region below this volume on the coarse grid counts as absent.
        min_region_share: So does a region of a pair below this share of the other side's volume.
        min_agreement: A region on which the Dice coefficient of the two stages is below this counts as absent; 0 believes the fine one.
        usual_agreement: Below this it is said aloud.
        max_volume_ratio: Left and right of a pair may differ by this factor before it is said aloud.
        tile_overlap: Share of a tile that its neighbour covers too, where a stage predicts in tiles.
        budget_gib: What a network may need at a time beside its weights, its crop and its result.
        tta: Average over flipped inputs; left and right are not exchanged where a region has a side.
    """

    min_part_fraction: float = 0.1
    min_region_ml: float = 5.0
    min_region_share: float = 0.01
    min_agreement: float = 0.1
    usual_agreement: float = 0.85
    max_volume_ratio: float = 8.0
    tile_overlap: float = 0.5
    budget_gib: float = 1.0
    tta: bool = False


class Prediction(NamedTuple):
    """What the networks of a stage say about one crop.

    Attributes:
        probs: Probabilities (K, D, H, W), float16, on the CPU: the mean over checkpoints and flips.
        spread: Their standard deviation (D, H, W), float32, in [0, 0.71]; None with one of each.
        how: How the crop went through the network.
        remarks: Sentences for a person on what did not go as planned.
    """

    probs: Tensor
    spread: Tensor | None
    how: Pass
    remarks: list[str]


@dataclass
class TrainedStage:
    """What a checkpoint holds: the network and everything that its input must obey.

    Attributes:
        network: Called as `network(image, region)`; image (N, 1, D, H, W), region (N,) long; has a `divisor`.
        name: `coarse` or `fine`.
        task: Labels, regions and window that it was trained for.
        spacing_mm: Spacing of its lattice in mm, (z, y, x); None takes each scan as it is.
        patch_size: Tile size in voxels (z, y, x); None runs the whole volume or crop.
        region_margin_mm: Margin around the coarse region, in mm on every side.
        region_mode: `mirrored`, `separate` or `side_input`: how several regions share the network.
        precision: `fp32`, `tf32`, `bf16` or `fp16`.
        device: Where the network lies and runs.
        rule: How its input is laid on the lattice.
        others: Networks of further checkpoints of the same kind; the result is the mean of all.
        bytes_per_voxel: What a network needs per voxel of its input, see `count_memory`; 0 where nobody has counted.
        checkpoints: SHA-256 of each file that the networks come from, by its path.
        tile_workers: Processes that share the tiles; None = this process alone.
        resampling: Filter that brings a scan to its spacing, see `medseg.preprocess.resample`.
    """

    network: nn.Module
    name: str
    task: Task
    spacing_mm: tuple[float, float, float] | None
    patch_size: tuple[int, int, int] | None
    region_margin_mm: float
    region_mode: str
    precision: str
    device: torch.device
    rule: GridRule = PLAIN
    others: tuple[nn.Module, ...] = ()
    bytes_per_voxel: float = 0.0
    checkpoints: dict[str, str] = field(default_factory=dict)
    tile_workers: TileWorkers | None = None
    resampling: str = ANTIALIASED

    @property
    def divisor(self) -> tuple[int, int, int]:
        """Numbers per axis that the network's input must be a multiple of."""
        return self.network.divisor  # type: ignore[return-value]

    @property
    def air_hu(self) -> float:
        """What lies beside a volume: the lower end of the window."""
        return self.task.window_hu[0]

    def count_memory(self) -> None:
        """Count what a network needs per voxel, so that a crop that is too large for the budget is cut into tiles."""
        call = lambda image: self._call(self.network, image, 0)  # noqa: E731
        self.bytes_per_voxel = forward_bytes_per_voxel(self.network, call, self.divisor, self.device)

    def predict_probs(self, image: Tensor, region_index: int, options: CascadeOptions) -> Prediction:
        """Run the networks on one normalised image, in their mode and their precision.

        Where a GPU's memory runs out the image is tried in smaller tiles, at last on the CPU, and the result says so.

        Args:
            image: Normalised image (D, H, W).
            region_index: Position of the region in the task; 0 for a stage that sees the whole volume.
            options: Overlap of tiles, memory, flips.

        Raises:
            UserError: If the budget does not even hold the smallest tile.
            torch.OutOfMemoryError: If the memory does not even hold the smallest tile, on a CPU.
        """
        with _PASS:
            return self._until_it_fits(image, region_index, options)

    def _until_it_fits(self, image: Tensor, region_index: int, options: CascadeOptions) -> Prediction:
        remarks: list[str] = []
        stage: TrainedStage = self
        try:
            how = stage._plan(image, options.budget_gib * 2**30)
        except ValueError as error:
            raise UserError(
                f"inference.budget_gib={options.budget_gib:g} is too small for the {self.name} stage: {error}; raise it"
            ) from error
        while True:
            try:
                probs, spread = stage._run(image, region_index, how, options)
            except torch.OutOfMemoryError:
                if stage.device.type == "cpu":
                    raise
            else:
                return Prediction(probs, spread, how, remarks)
            # Not within `except`: there the error still holds the tensors of the failed pass.
            torch.cuda.empty_cache()
            try:
                how = stage._plan(image, how.num_bytes / 2)
                remarks.append(f"the {self.name} stage ran out of memory on the GPU and went on in {how}")
            except ValueError:
                stage = stage._on_cpu()
                how = stage._plan(image, max(how.num_bytes, options.budget_gib * 2**30))
                remarks.append(f"the {self.name} stage ran out of memory on the GPU and went on with the CPU")

    def _plan(self, image: Tensor, budget_bytes: float) -> Pass:
        depth, height, width = image.shape
        max_batch = 1 if self.device.type == "cpu" else MAX_BATCH
        return plan_pass((depth, height, width), self.divisor, self.bytes_per_voxel, budget_bytes, self.patch_size, max_batch)

    def has_views(self, options: CascadeOptions) -> bool:
        """Whether several networks or flips are averaged."""
        return len(self._views(options)) > 1

    def _views(self, options: CascadeOptions) -> list[tuple[nn.Module, tuple[int, ...]]]:
        return [(network, axes) for network in (self.network, *self.others) for axes in flips(self.task, options.tta)]

    def answer(self, number: int, images: Tensor, region_index: int) -> Tensor:
        """Run one of the networks, by its number, on images (N, 1, d, h, w) for another process; gives logits."""
        return self._call((self.network, *self.others)[number], images.to(self.device), region_index)

    def _shared(self, network: nn.Module, region_index: int) -> dict[str, Any]:
        """How `predict_probs` is to divide its tiles."""
        if self.tile_workers is None:
            return {}
        alone = functools.partial(self._call, network, region_index=region_index)
        job = (self.name, (self.network, *self.others).index(network), region_index)
        return {"together": functools.partial(self.tile_workers.run, job, alone), "num_together": self.tile_workers.size}

    def _call(self, network: nn.Module, images: Tensor, region_index: int) -> Tensor:
        region = torch.full((len(images),), region_index, device=self.device)
        with _tf32_as(self.precision), autocast(self.precision, self.device.type):
            return network.eval()(images, region)

    @torch.inference_mode()
    def _run(self, image: Tensor, region_index: int, how: Pass, options: CascadeOptions) -> tuple[Tensor, Tensor | None]:
        """Mean and spread over all networks and flips."""
        views = self._views(options)
        image = image.to(self.device)
        total = squares = None
        for network, axes in views:
            probs = predict_probs(
                lambda tiles, network=network: self._call(network, tiles, region_index),  # type: ignore[misc]
                image.flip(axes)[None, None] if axes else image[None, None],
                tile_shape=how.tile_shape,
                overlap=options.tile_overlap,
                divisor=self.divisor,
                batch_size=how.batch_size,
                **self._shared(network, region_index),
            )
            probs = probs.flip([axis + 1 for axis in axes]) if axes else probs
            if len(views) == 1:
                return probs.cpu(), None
            probs = probs.to(torch.float32)
            total = probs.clone() if total is None else total.add_(probs)
            squares = probs.square_().sum(0) if squares is None else squares.add_(probs.square_().sum(0))
        assert total is not None, "there is one view at least"
        assert squares is not None, "as many squares as probabilities"
        mean = total.div_(len(views))
        # Half of the classes' variances: with two classes the variance of either.
        variance = squares.div_(len(views)).sub_(mean.square().sum(0)).clamp_(min=0).div_(2)
        return mean.to(KEPT).cpu(), variance.sqrt_().cpu()

    def _on_cpu(self) -> TrainedStage:
        """The same stage on the CPU; a copy, since another case may find the GPU free."""
        cpu = torch.device("cpu")
        networks = [copy.deepcopy(network).to(cpu) for network in (self.network, *self.others)]
        precision = inference_precision(self.precision, "cpu")
        stage = replace(self, network=networks[0], others=tuple(networks[1:]), precision=precision, device=cpu, tile_workers=None)
        stage.count_memory()
        return stage


def flips(task: Task, tta: bool) -> Sequence[tuple[int, ...]]:
    """List the axes (z, y, x) that are flipped together, one tuple for each pass of a network; the first is empty."""
    if not tta:
        return [()]
    axes = [axis for axis in range(3) if axis != X_AXIS or all(region.side is None for region in task.regions)]
    return list(chain.from_iterable(combinations(axes, number) for number in range(len(axes) + 1)))


@contextmanager
def _tf32_as(precision: str) -> Iterator[None]:
    """Set TF32 for a precision; what is set here belongs to the process and may serve a training that runs around it."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    set_tf32(precision)
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before
