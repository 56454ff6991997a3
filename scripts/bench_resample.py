"""How long resampling takes beside SimpleITK's linear filter and scikit-image's order 3, in one run on the same volume.

    pip install "scikit-image>=0.22"        # for this script alone; SimpleITK comes with the dev extra
    python scripts/bench_resample.py

A scan of 512 x 512 x 300 voxels goes to 1 mm and to 2 mm, two threads each. What medseg does is anti-aliased wherever an axis
gets coarser; SimpleITK's filter is not, and scikit-image is called as nnU-Net calls it (order 3, edge, no anti-aliasing).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from medseg.geometry.grid import VoxelGrid
from medseg.preprocess.resample import resample_image

GRID = VoxelGrid((300, 512, 512), (1.25, 0.7, 0.7))
THREADS = 2
REPEATS = 3


def best_s(run: Callable[[], Any], repeats: int) -> float:
    """Seconds of the quickest of several calls."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    """Time every way that is installed and print a table."""
    torch.set_num_threads(THREADS)
    image = np.random.default_rng(0).integers(-1000, 1000, GRID.shape).astype(np.int16)
    print(f"{'to':>6}{'way':>28}{'seconds':>10}{'ours being 1':>14}")
    for spacing_mm in (1.0, 2.0):
        target = GRID.resampled((spacing_mm,) * 3)
        ways: dict[str, tuple[Callable[[], Any], int]] = {
            "medseg": (lambda target=target: resample_image(image, GRID, target, -1000.0), REPEATS)  # type: ignore[misc]
        }
        if find_spec("SimpleITK"):
            ways["SimpleITK linear"] = (simple_itk(image, target), REPEATS)
        if find_spec("skimage"):
            ways["scikit-image order 3"] = (scikit_image(image, target), 1)
        times = {name: best_s(*way) for name, way in ways.items()}
        for name, seconds in times.items():
            print(f"{spacing_mm:4g}mm{name:>28}{seconds:10.2f}{seconds / times['medseg']:14.2f}")


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
