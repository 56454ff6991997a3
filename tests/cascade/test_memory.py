"""How much memory one scan takes, measured in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import resource
import numpy as np, torch
from oracle import TASK, CoarseOracle, stage
from medseg.cascade.cascade import Cascade
from medseg.geometry.grid import VoxelGrid
from medseg.io.volume import Volume
from medseg.models.stage_network import StageNetwork
from medseg.models.unet import UNet

class Real(CoarseOracle):
    "The network's work and the oracle's answer."
    def __init__(self, num_classes):
        super().__init__()
        self.num_classes = num_classes
        self.network = StageNetwork(lambda channels: UNet(channels, num_classes))
        self.divisor = self.network.divisor
    def forward(self, image):
        logits = self.network(image)
        assert self.num_classes == 3 or image.numel() > 8e6
        del logits
        answer = super().forward(image)
        if self.num_classes == 3:
            return answer
        return torch.cat([torch.zeros_like(image), 10 * image], 1)

torch.set_num_threads(2)
grid = VoxelGrid((133, 512, 512), (2.5, 0.75, 0.75))
z, y, x = np.ogrid[:133, :512, :512]
image_hu = np.full(grid.shape, -1000, dtype=np.int16)
for centre in (130, 382):
    for plane in range(133):
        z_part, y_part, x_part = (plane - 66) / 55, (y[0] - 256) / 140, (x[0] - centre) / 85
        is_in = z_part**2 + y_part**2 + x_part**2 < 1
        image_hu[plane][is_in] = 0
result = Cascade(stage(Real(3), "coarse"), stage(Real(2), "fine")).segment(Volume(image_hu, grid))
assert set(result.boxes) == {"left_lung", "right_lung"} and result.warnings == [], result.warnings
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""
LIMIT_BYTES = 3_000_000_000


@pytest.mark.slow
def test_a_thorax_stays_below_three_gigabytes() -> None:
    """512 x 512 x 133 voxels, fine crops above 8 M voxels, the default network in fp32."""
    here = Path(__file__).resolve()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={"PYTHONPATH": f"{here.parent}:{here.parents[2]}"},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < LIMIT_BYTES
