"""Memory of a forward pass without gradients: bytes per voxel, counted on a small input."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from medseg.memory.accounting.tracker import MemoryTracker

# Kernels copy their inputs into layouts of their own, which a count of tensors does not see. Measured: 1.1 to 2.1 times the live
# tensors over stems, norms, `refine`, precisions and processors.
WORKSPACE = 2.5
# Size of the counted input in multiples of the divisor: below three, convolutions on a short axis may use another precision.
NUM_CELLS = 3


def forward_bytes_per_voxel(
    network: nn.Module, call: Callable[[Tensor], Tensor], divisor: tuple[int, int, int], device: torch.device
) -> float:
    """Count the peak bytes of a forward pass per voxel of its input.

    Args:
        network: Its weights are not counted.
        call: Runs the network on an image (1, 1, D, H, W), in its precision.
        divisor: Required multiple of the input size, (z, y, x).
        device: Device of the network.

    Returns:
        Peak bytes of activations and logits per voxel, with the kernels' workspaces, without weights and image.
    """
    depth, height, width = (NUM_CELLS * step for step in divisor)
    image = torch.zeros((1, 1, depth, height, width), device=device)
    with torch.inference_mode(), MemoryTracker() as tracker:
        for tensor in (image, *network.parameters(), *network.buffers()):
            tracker.assign(tensor, "given")
        call(image)
    return WORKSPACE * (tracker.peak_bytes - tracker.live_bytes("given")) / image.numel()
