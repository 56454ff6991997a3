"""One contender of the bench, or a stated part of its work, in a process of its own: `python -m benchmarks.baseline <request> <answer>`."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from medseg.io.replacing import replace_text
from medseg.studies.baselines import make_peer

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from medseg.geometry.grid import VoxelGrid

Shape = tuple[int, int, int]

LUNGMASK_SLICES = 20  # its own batch size
LUNGMASK_SIZE = 256  # it resizes the body in each slice to so many pixels
NNUNET_PATCH: Shape = (128, 128, 128)
NNUNET_MIRRORS = 8


class Part(NamedTuple):
    """What is run of a contender's work.

    Attributes:
        run: Does it.
        share: Share of the whole work, in (0, 1].
        what: The same for a reader.
    """

    run: Callable[[], Any]
    share: float
    what: str


def main() -> None:
    """Measure the contender that the request names."""
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    import torch

    from medseg.io.read import read_image
    from medseg.preprocess.orient import orient

    torch.set_num_threads(request["threads"])
    volume = read_image(Path(request["input"]))
    image_hu, grid, _ = orient(volume.array, volume.grid)
    name = request["name"]
    part = monai(image_hu, grid) if name == "monai" else {"lungmask": lungmask, "nnunet": nnunet}[name](grid)
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    with torch.inference_mode():
        part.run()
    answer = {
        "part_s": time.perf_counter() - start_s,
        "part_cpu_s": time.process_time() - start_cpu_s,
        "share": part.share,
        "what": part.what,
    }
    replace_text(Path(sys.argv[2]), json.dumps(answer))


def lungmask(grid: VoxelGrid) -> Part:
    """The network of lungmask's R231, with random weights, on one of its batches of slices."""
    import torch

    # Its package imports readers and image libraries that the network does without.
    found = importlib.util.find_spec("lungmask")
    assert found is not None, "the environment of the peers has it"
    assert found.submodule_search_locations
    spec = importlib.util.spec_from_file_location("resunet", Path(found.submodule_search_locations[0]) / "resunet.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    network = module.UNet(n_classes=3, padding=True, depth=5, up_mode="upsample", batch_norm=True, residual=False).eval()
    num_slices = min(LUNGMASK_SLICES, grid.shape[0])
    slices = torch.zeros(num_slices, 1, LUNGMASK_SIZE, LUNGMASK_SIZE)
    return Part(lambda: network(slices), num_slices / grid.shape[0], f"{num_slices} of {grid.shape[0]} slices")


def nnunet(grid: VoxelGrid) -> Part:
    """nnU-Net's default network, with random weights, on one of the mirrored tiles of its predictor at 1 mm."""
    import torch

    network = make_peer("nnunet", 3).eval()
    num_passes = num_tiles(_at_1mm(grid).shape, NNUNET_PATCH) * NNUNET_MIRRORS
    return Part(lambda: network(torch.zeros(1, 1, *NNUNET_PATCH)), 1 / num_passes, f"1 of {num_passes} passes of 128×128×128")


def num_tiles(shape: Shape, patch: Shape) -> int:
    """Count the tiles of nnU-Net's predictor, which lie half a tile apart or nearer; a smaller volume is padded to one.

    Example:
        >>> num_tiles((300, 384, 128), (128, 128, 128))
        20
    """
    return math.prod(math.ceil(max(0, size - side) / (side / 2)) + 1 for size, side in zip(shape, patch, strict=True))


def monai(image_hu: np.ndarray, grid: VoxelGrid) -> Part:
    """MONAI's sliding window with our fine network, in our precision, over the whole volume at 1 mm."""
    import torch
    from monai.inferers import sliding_window_inference

    from medseg.build.stages import load_stage
    from medseg.memory.precision import autocast
    from medseg.preprocess.intensity import HU_LIMITS, normalise_hu
    from medseg.preprocess.resample import resample_image
    from medseg.weights.files import read_weights, shipped_weights

    path = shipped_weights("lungs", "fine")
    stage = load_stage(path, "fine", torch.device("cpu"))
    patch = read_weights(path, "fine", "fine")[0]["patch_size"]

    def network(tiles: Tensor) -> Tensor:
        with autocast(stage.precision, "cpu"):
            logits: Tensor = stage.network(tiles, torch.zeros(len(tiles), dtype=torch.int64))
        return logits

    def run() -> None:
        resampled = resample_image(image_hu, grid, _at_1mm(grid), stage.air_hu, limits=HU_LIMITS)
        image = normalise_hu(resampled, stage.task.window_hu)
        sliding_window_inference(image[None, None], patch, 1, network, mode="gaussian")

    return Part(run, 1.0, "all")


def _at_1mm(grid: VoxelGrid) -> VoxelGrid:
    return grid.resampled((1.0, 1.0, 1.0))


if __name__ == "__main__":
    main()
