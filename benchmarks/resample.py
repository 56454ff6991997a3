"""How long resampling takes beside SimpleITK's linear filter and scikit-image's order 3, in one run on the same volume.

    pip install -e ".[dev,bench]"           # SimpleITK and scikit-image; what is not installed is left out
    python scripts/bench_resample.py

A scan of 512 x 512 x 300 voxels goes to 1 mm and to 2 mm, two threads each, every way in turn and the quickest of three rounds. SimpleITK's
filter and `linear` skip voxels where the grid gets coarser, `antialiased` and `cubic` count them all, and scikit-image is called once, as nnU-Net
calls it (order 3, edge, no anti-aliasing). Targets: `linear` at most 1.2 times as long as SimpleITK, scikit-image at least 5 times as long as
`antialiased`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from medseg.geometry.grid import VoxelGrid
from medseg.preprocess.resample import RESAMPLINGS, resample_image

GRID = VoxelGrid((300, 512, 512), (1.25, 0.7, 0.7))
THREADS = 2
ROUNDS = 3
SIMPLE_ITK, SCIKIT_IMAGE = "SimpleITK linear", "scikit-image order 3"


def main() -> None:
    """Time every way that is installed and print a table."""
    torch.set_num_threads(THREADS)
    image = np.random.default_rng(0).integers(-1000, 1000, GRID.shape).astype(np.int16)
    print(f"{'to':>5}  {'way':<22}{'seconds':>9}{'of SimpleITK':>14}{'of antialiased':>16}")
    for spacing_mm in (1.0, 2.0):
        target = GRID.resampled((spacing_mm,) * 3)
        ways: dict[str, Callable[[], Any]] = {
            resampling: functools.partial(resample_image, image, GRID, target, -1000.0, resampling=resampling)
            for resampling in RESAMPLINGS
        }
        if find_spec("SimpleITK"):
            ways[SIMPLE_ITK] = simple_itk(image, target)
        times = dict.fromkeys(ways, float("inf"))
        for _ in range(ROUNDS):  # in turn, so that what else the machine does meets all of them
            times = {name: min(times[name], seconds(way)) for name, way in ways.items()}
        if find_spec("skimage"):
            times[SCIKIT_IMAGE] = seconds(scikit_image(image, target))
        for name, taken in times.items():
            of_itk = f"{taken / times[SIMPLE_ITK]:.2f}" if SIMPLE_ITK in times else ""
            print(f"{spacing_mm:3g}mm  {name:<22}{taken:9.2f}{of_itk:>14}{taken / times['antialiased']:16.2f}", flush=True)


def seconds(run: Callable[[], Any]) -> float:
    """Time one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def simple_itk(image: np.ndarray, target: VoxelGrid) -> Callable[[], Any]:
    """SimpleITK's linear resampling of the same volume to the same grid, as float32."""
    import SimpleITK

    SimpleITK.ProcessObject.SetGlobalDefaultNumberOfThreads(THREADS)
    volume = SimpleITK.GetImageFromArray(image)
    volume.SetSpacing(GRID.spacing_mm[::-1])
    resample = SimpleITK.ResampleImageFilter()
    resample.SetSize(target.shape[::-1])
    resample.SetOutputSpacing(target.spacing_mm[::-1])
    resample.SetOutputOrigin(target.origin_xyz_mm)
    resample.SetInterpolator(SimpleITK.sitkLinear)
    resample.SetOutputPixelType(SimpleITK.sitkFloat32)
    return lambda: resample.Execute(volume)


def scikit_image(image: np.ndarray, target: VoxelGrid) -> Callable[[], Any]:
    """scikit-image's cubic resize of the same volume to the same number of voxels."""
    from skimage.transform import resize

    values = image.astype(np.float64)
    return lambda: resize(values, target.shape, order=3, mode="edge", anti_aliasing=False, clip=True, preserve_range=True)


if __name__ == "__main__":
    main()
