"""Keys of the group `model`: the network and its arguments."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from medseg.config.knob import Knob, Shape

Block = StrEnum("Block", ["plain", "residual", "bottleneck"])  # see `medseg.models.blocks`
Stem = StrEnum("Stem", ["conv", "strided", "space_to_depth"])  # see `medseg.models.unet`
Norm = StrEnum("Norm", ["instance", "group", "batch", "channel", "affine"])  # see `medseg.models.blocks`
UNET = "medseg.models.unet.UNet"


@dataclass(kw_only=True)
class NetworkConfig:
    """Network: its class with the arguments of the class, and the keys below. Input and output channels follow the task."""

    _target_: Annotated[
        str, Knob("Class of the network, of medseg.models, monai.networks.nets, torch.nn or trusted_targets.")
    ] = UNET
    device_map: Annotated[
        Any, Knob("Device by block or level, {encoder: cuda:0, decoder: cuda:1}; auto: balance all GPUs by bytes.", neutral=True)
    ] = None
    divisor: Annotated[
        Shape | None,
        Knob("Required multiple of the input size; null: found by a traced forward pass.", "[1, inf)", "voxels (D, H, W)"),
    ] = None
    blocks: Annotated[
        list[str] | None,
        Knob(
            "Names or patterns (encoder.*) of the blocks that can be recomputed; null: found by the traced pass.",
            neutral=True,
        ),
    ] = None


@dataclass(kw_only=True)
class UNetConfig(NetworkConfig):
    """Network, see `medseg.models.unet.UNet`; another `_target_` replaces these keys by the arguments of its class."""

    width: Annotated[int, Knob("Channels of the first level; doubled per level.", "[1, inf)", "channels")]
    depth: Annotated[int, Knob("Downsamplings below the stem.", "[1, inf)")]
    block: Annotated[Block, Knob("Building block.")]
    blocks_per_level: Annotated[list[int], Knob("Encoder blocks of each level, finest first.", "[1, inf)")]
    stem: Annotated[Stem, Knob("First layer. conv: full resolution; strided, space_to_depth: half resolution.")]
    refine: Annotated[
        int, Knob("Channels at full resolution that refine a result of half resolution; 0: none.", "[0, inf)", "channels")
    ]
    norm: Annotated[
        Norm,
        Knob(
            "Normalisation. channel: over the channels of a voxel; affine: scale and shift alone; others: over the field of view."
        ),
    ]
