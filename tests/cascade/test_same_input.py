"""Training and prediction feed the network the same numbers, also where a scan is padded with what is no HU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from oracle import GRID, TASK, CoarseOracle, FineOracle, scan, stage
from torch import Tensor, nn

from medseg.cascade.segment import segment
from medseg.data.cache import prepare_case
from medseg.data.case_table import Case
from medseg.data.samples import CoarseSamples, FineSamples
from medseg.io.read import read_image
from medseg.io.write import write_image, write_labels

LOW_HU, HIGH_HU = TASK.window_hu
ONE_HU = 2.0 / (HIGH_HU - LOW_HU)  # the cache holds whole HU


class Watching(nn.Module):
    """Keeps the images that an oracle is given."""

    def __init__(self, oracle: nn.Module) -> None:
        super().__init__()
        self.oracle = oracle
        self.divisor = oracle.divisor
        self.seen: list[Tensor] = []

    def forward(self, image: Tensor, region: Tensor) -> Tensor:
        self.seen.append(image.clone())
        return self.oracle(image, region)


def test_a_padded_scan_with_metal_looks_the_same_in_training_and_in_prediction(tmp_path: Path) -> None:
    volume, labels = scan()
    image_hu = volume.array.copy()
    image_hu[:, :20] = -3024  # through the boxes of both regions, beside their blocks
    image_hu[:, 20:26] = -400
    image_hu[12:14, 40:44, 90:94] = 30000
    write_image(tmp_path / "ct.nii.gz", image_hu, GRID)
    write_labels(tmp_path / "labels.nii.gz", labels, GRID)
    # An oracle's scan has the values of no tissue.
    case = Case("a", tmp_path / "ct.nii.gz", tmp_path / "labels.nii.gz", "a", ignored=frozenset({"hu_range"}))
    coarse, fine = Watching(CoarseOracle()), Watching(FineOracle())
    stages = stage(coarse, "coarse"), stage(fine, "fine", region_margin_mm=15.0)
    result = segment(read_image(case.image), *stages)

    entries = [prepare_case(case, tmp_path, one.spacing_mm, TASK, {1: "left_lung", 2: "right_lung"}) for one in stages]
    whole = CoarseSamples(entries[:1], TASK, seed=0, divisor=coarse.divisor)[0]["image"]
    torch.testing.assert_close(coarse.seen[0][0], whole, rtol=0, atol=ONE_HU)
    samples = FineSamples(
        entries[1:],
        TASK,
        seed=0,
        boxes=lambda _, region, __: result.boxes[region.name].voxels,
        patch_size=None,
        mirror=True,
    )
    crops = {sample["region"]: sample["image"] for sample in (samples[n] for n in range(2))}
    assert np.ptp(crops[0].numpy()) == 2.0
    for number, seen in enumerate(fine.seen):
        torch.testing.assert_close(seen[0], crops[number], rtol=0, atol=ONE_HU)
