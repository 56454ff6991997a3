"""Four small scans with their case table, for tests of whole trainings."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from medseg.geometry.grid import VoxelGrid
from medseg.io.write import write_image, write_labels


def make_tiny_table(folder: Path) -> Path:
    """Write scans: two blocks of air in a body, sizes and spacings all different; labels 1, 2."""
    rng = np.random.default_rng(0)
    lines = ["case,image,labels,patient,split"]
    for index, split in enumerate(("train", "train", "val", "test")):
        shape, spacing_mm = (14 + index, 24, 28 + index), (6.0, 4.0 + 0.1 * index, 4.5)
        labels = np.zeros(shape, dtype=np.uint8)
        labels[3:-3, 6:18, 16:24] = 1
        labels[4:-3, 6:17, 4:12] = 2
        # Denser to the left, so that the sides can be told apart.
        body_hu = np.broadcast_to(np.linspace(-100, 250, shape[2]), shape)
        image = np.where(labels > 0, -850, body_hu) + rng.normal(0, 20, shape)
        grid = VoxelGrid(shape, spacing_mm, (-50.0, -40.0, 10.0 * index))
        write_image(folder / f"c{index}.nii.gz", image.astype(np.int16), grid)
        write_labels(folder / f"l{index}.nii.gz", labels, grid)
        lines.append(f"case {index},c{index}.nii.gz,l{index}.nii.gz,p{index},{split}")
    (folder / "table.csv").write_text("\n".join(lines) + "\n")
    return folder / "table.csv"
