"""Work of one baseline, measured in a process of its own: `python benchmarks/baseline.py <name> <scan> <threads>`.

A baseline that would take hours runs a stated part of its work. The last line that is printed is JSON: seconds and CPU seconds of that
part, its share of the whole work in (0, 1], and the same in words.
"""

import json
import math
import runpy
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from medseg.build.stages import load_stage
from medseg.geometry.grid import VoxelGrid
from medseg.io.read import read_image
from medseg.memory.precision import autocast
from medseg.preprocess.intensity import HU_LIMITS, normalise_hu
from medseg.preprocess.orient import orient
from medseg.preprocess.resample import resample_image
from medseg.studies.baselines import make_baseline
from medseg.weights.files import read_weights, shipped_weights

Shape = tuple[int, int, int]
Part = tuple[Callable[[], Any], float, str]
"""Function that does a part of the work, the share of that part in the whole work, and the part in words."""

LUNGMASK_SLICES = 20  # lungmask's own batch size
LUNGMASK_SIZE = 256  # pixels per side to which lungmask resizes the body in each slice
NNUNET_PATCH: Shape = (128, 128, 128)
NNUNET_MIRRORS = 8
ONE_MM = (1.0, 1.0, 1.0)


def main() -> None:
    """Measure the baseline that the command line names."""
    name, scan, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    volume = read_image(Path(scan))
    image_hu, grid, _ = orient(volume.array, volume.grid)
    run, share, measured = {"lungmask": lungmask, "nnunet": nnunet, "monai": monai}[name](image_hu, grid)
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    with torch.inference_mode():
        run()
    part_s, part_cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    print(json.dumps({"part_s": part_s, "part_cpu_s": part_cpu_s, "share": share, "measured": measured}))


def lungmask(_: np.ndarray, grid: VoxelGrid) -> Part:
    """The network of lungmask's R231, with random weights, on one of its batches of slices."""
    # Run as a file: importing the package would import image libraries that the network does not need.
    (folder,) = find_spec("lungmask").submodule_search_locations  # type: ignore[union-attr, misc]
    unet = runpy.run_path(f"{folder}/resunet.py")["UNet"]
    network = unet(n_classes=3, padding=True, depth=5, up_mode="upsample", batch_norm=True, residual=False).eval()
    num_slices = min(LUNGMASK_SLICES, grid.shape[0])
    slices = torch.zeros(num_slices, 1, LUNGMASK_SIZE, LUNGMASK_SIZE)
    return lambda: network(slices), num_slices / grid.shape[0], f"{num_slices} of {grid.shape[0]} slices"


def nnunet(_: np.ndarray, grid: VoxelGrid) -> Part:
    """nnU-Net's default network, with random weights, on one of the mirrored tiles of its predictor at 1 mm."""
    network = make_baseline("nnunet", 3).eval()
    num_passes = num_tiles(grid.resampled(ONE_MM).shape, NNUNET_PATCH) * NNUNET_MIRRORS
    return lambda: network(torch.zeros(1, 1, *NNUNET_PATCH)), 1 / num_passes, f"1 of {num_passes} passes of 128×128×128"


def num_tiles(shape: Shape, patch: Shape) -> int:
    """Count the tiles of nnU-Net's predictor, which lie half a tile apart or nearer; a smaller volume is padded to one.

    Example:
        >>> num_tiles((300, 384, 128), (128, 128, 128))
        20
    """
    return math.prod(math.ceil(max(0, size - side) / (side / 2)) + 1 for size, side in zip(shape, patch, strict=True))


def monai(image_hu: np.ndarray, grid: VoxelGrid) -> Part:
    """MONAI's sliding window with our fine network, in our precision, over the whole volume at 1 mm."""
    from monai.inferers import sliding_window_inference

    path = shipped_weights("lungs", "fine")
    stage = load_stage(path, "fine", torch.device("cpu"))
    patch = read_weights(path, "fine", "fine")[0]["patch_size"]

    def network(tiles: Tensor) -> Tensor:
        with autocast(stage.precision, "cpu"):
            return cast(Tensor, stage.network(tiles, torch.zeros(len(tiles), dtype=torch.int64)))

    def run() -> None:
        resampled = resample_image(image_hu, grid, grid.resampled(ONE_MM), stage.air_hu, limits=HU_LIMITS)
        image = normalise_hu(resampled, stage.task.window_hu)
        sliding_window_inference(image[None, None], patch, 1, network, mode="gaussian")

    return run, 1.0, "all"


if __name__ == "__main__":
    main()
