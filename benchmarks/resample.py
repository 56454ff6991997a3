"""Resampling benchmark: our three filters against those of SimpleITK and scikit-image.

    pip install -e ".[dev,bench]"           # scikit-image; without it its row is left out
    python benchmarks/resample.py

A scan of 512×512×300 voxels is resampled to 1 mm and to 2 mm with two threads. Every filter runs in
turn; the fastest of three rounds counts. Where the grid gets coarser, SimpleITK's filter and
`linear` skip voxels, while `antialiased` and `cubic` use them all. scikit-image runs once, on one
thread and in fp64, with the arguments of nnU-Net (order 3, edge, no anti-aliasing); the others give
fp32. Targets: `linear` takes at most 1.2 times as long as SimpleITK, scikit-image at least 5 times
as long as `antialiased`.
"""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from timeit import timeit
from typing import Any

import numpy as np
import SimpleITK
import torch

from medseg.geometry.grid import VoxelGrid
from medseg.io.tables import print_table
from medseg.preprocess.resample import RESAMPLINGS, resample_image

# A chest CT: shape and spacing in mm, (z, y, x).
GRID = VoxelGrid((300, 512, 512), (1.25, 0.7, 0.7))
THREADS = 2
ROUNDS = 3
SIMPLE_ITK = "SimpleITK linear"
SCIKIT_IMAGE = "scikit-image order 3"
FORMATS = dict.fromkeys(("seconds", "of SimpleITK", "of antialiased"), ".2f")


def main() -> None:
    """Time every filter and print a table for each target spacing."""
    torch.set_num_threads(THREADS)
    SimpleITK.ProcessObject.SetGlobalDefaultNumberOfThreads(THREADS)
    image = np.random.default_rng(0).integers(-1000, 1000, GRID.shape).astype(np.int16)
    volume = SimpleITK.GetImageFromArray(image)
    # SimpleITK orders sizes and spacings (x, y, z).
    volume.SetSpacing(GRID.spacing_mm[::-1])
    for spacing_mm in (1.0, 2.0):
        target = GRID.resampled((spacing_mm,) * 3)
        filters: dict[str, Callable[[], Any]] = {}
        for name in RESAMPLINGS:
            filters[name] = partial(
                resample_image, image, GRID, target, outside=-1000.0, resampling=name
            )
        filters[SIMPLE_ITK] = partial(
            SimpleITK.Resample,
            volume,
            target.shape[::-1],
            outputOrigin=target.origin_xyz_mm,
            outputSpacing=target.spacing_mm[::-1],
            outputPixelType=SimpleITK.sitkFloat32,
        )
        fastest_s = dict.fromkeys(filters, float("inf"))
        for _ in range(ROUNDS):
            # In turn, so that other work on the machine affects all of them alike.
            for name, run in filters.items():
                fastest_s[name] = min(fastest_s[name], timeit(run, number=1))
        if find_spec("skimage"):
            fastest_s[SCIKIT_IMAGE] = time_scikit_image(image, target)
        rows = []
        for name, seconds in fastest_s.items():
            rows.append(
                {
                    f"to {spacing_mm:g} mm": name,
                    "seconds": seconds,
                    "of antialiased": seconds / fastest_s["antialiased"],
                    "of SimpleITK": seconds / fastest_s[SIMPLE_ITK],
                }
            )
        print_table(rows, formats=FORMATS)


def time_scikit_image(image: np.ndarray, target: VoxelGrid) -> float:
    """Time scikit-image once, with the arguments of nnU-Net; returns seconds."""
    from skimage.transform import resize

    options = {
        "order": 3,
        "mode": "edge",
        "anti_aliasing": False,
        "clip": True,
        "preserve_range": True,
    }
    # The conversion to fp64 is no part of the time.
    run = partial(resize, image.astype(np.float64), target.shape, **options)
    return timeit(run, number=1)


if __name__ == "__main__":
    main()
