"""Bytes of a forward pass without gradients, counted on a small input: they grow with the voxels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from medseg.memory.accounting.ledger import Ledger

# Kernels copy what they read into layouts of their own, which no count of tensors sees. Measured: 1.1 to 2.1 times the live
# tensors over stems, norms, `refine`, precisions and processors (each has kernels, and so layouts, of its own).
WORKSPACE = 2.5
# Cells of the network's divisor along an axis: with three, no axis is so short that a convolution changes its precision.
NUM_CELLS = 3


def forward_bytes_per_voxel(
    network: nn.Module, call: Callable[[Tensor], Tensor], divisor: tuple[int, int, int], device: torch.device
) -> float:
    """Count what a forward pass keeps at its worst moment, per voxel of its input.

    Args:
        network: Its weights are not counted.
        call: Runs the network on an image (1, 1, D, H, W), in its precision.
        divisor: Numbers per axis of which the image must be a multiple.
        device: Where the network lies.

    Returns:
        Peak bytes of activations and logits per voxel, the kernels' workspace included, weights and image not.
    """
    depth, height, width = (NUM_CELLS * step for step in divisor)
    image = torch.zeros((1, 1, depth, height, width), device=device)
    ledger = Ledger()
    with torch.inference_mode(), ledger:
        for tensor in (image, *network.parameters(), *network.buffers()):
            ledger.assign(tensor, "given")
        call(image)
    return WORKSPACE * (ledger.peak_bytes - ledger.live_bytes("given")) / image.numel()
