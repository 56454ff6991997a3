"""Keys of the group `model`: the network and its arguments."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from medseg.geometry.sizes import Shape
from medseg.knob import Knob
from medseg.targets import TARGET

Stem = StrEnum("Stem", ["conv", "strided", "space_to_depth"])  # see `medseg.models.unet`
Block = StrEnum("Block", ["plain", "residual", "bottleneck"])  # see `medseg.models.blocks`
Norm = StrEnum(  # see `medseg.models.blocks`
    "Norm", ["instance", "group", "batch", "channel", "affine"]
)
UNET = "medseg.models.unet.UNet"


@dataclass(kw_only=True)
class NetworkOptions:
    """Network: its class with the arguments of the class, and the keys below.

    Input and output channels follow the task.
    """

    _target_: Annotated[
        str,
        Knob(
            "Class of the network, of medseg.models, monai.networks.nets, torch.nn or "
            "trusted_targets."
        ),
    ] = UNET
    device_map: Annotated[
        Any,
        Knob(
            "Device by block or level, {encoder: cuda:0, decoder: cuda:1}; "
            "auto: balance all GPUs by bytes.",
            neutral=True,  # does not change the result of a run, so a resumed one may change it
        ),
    ] = None
    divisor: Annotated[
        Shape | None,
        Knob(
            "Required multiple of the input size; null: found by a traced forward pass.",
            "[1, inf)",
            "voxels (D, H, W)",
        ),
    ] = None
    blocks: Annotated[
        list[str] | None,
        Knob(
            "Names or patterns (encoder.*) of the blocks that can be recomputed; "
            "null: found by the traced pass.",
            neutral=True,  # recomputing a block does not change the result of a run
        ),
    ] = None


@dataclass(kw_only=True)
class UNetOptions(NetworkOptions):
    """Network, see `medseg.models.unet.UNet`.

    Another `_target_` replaces these keys by the arguments of its class.
    """

    width: Annotated[
        int, Knob("Channels of the first level; doubled per level.", "[1, inf)", "channels")
    ]
    depth: Annotated[int, Knob("Downsamplings below the stem.", "[1, inf)")]
    block: Annotated[Block, Knob("Building block.")]
    blocks_per_level: Annotated[
        list[int], Knob("Encoder blocks of each level, finest first.", "[1, inf)")
    ]
    stem: Annotated[
        Stem, Knob("First layer. conv: full resolution; strided, space_to_depth: half resolution.")
    ]
    refine: Annotated[
        int,
        Knob(
            "Channels at full resolution that refine a result of half resolution; 0: none.",
            "[0, inf)",
            "channels",
        ),
    ]
    norm: Annotated[
        Norm,
        Knob(
            "Normalisation. channel: over the channels of a voxel; "
            "affine: scale and shift alone; others: over the field of view."
        ),
    ]


def count_strides(model: Mapping[str, Any]) -> int:
    """Count the strides of our UNet: one per downsampling, and one of a stem that halves."""
    num_stem_strides = 0 if model["stem"] == Stem.conv else 1
    return num_stem_strides + int(model["depth"])


def model_clashes(model: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each contradiction between the keys of a network.

    Of networks other than our UNet only `device_map` is checked here. They are built on the meta
    device before data is read, which checks their arguments.
    """
    device_map = model["device_map"]
    if device_map not in (None, "auto") and not _is_device_map(device_map):
        yield (
            "model.device_map: expected null, auto or a mapping from blocks to "
            f"cpu, cuda:0, cuda:1, …, but got {device_map}"
        )
    if model[TARGET] != UNET:
        return
    num_levels = model["depth"] + 1
    blocks_per_level = model["blocks_per_level"]
    if len(blocks_per_level) != num_levels:
        yield (
            f"model.blocks_per_level: expected {num_levels} numbers, one per level "
            f"(model.depth={model['depth']}), but got {blocks_per_level}"
        )
    if model["refine"] and model["stem"] == Stem.conv:
        yield (
            f"model.refine={model['refine']}: with model.stem=conv the whole network works at "
            "full resolution; choose model.refine=0"
        )


def _is_device_map(value: Any) -> bool:
    """Whether a value maps names of blocks or levels to devices."""
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        return False
    return all(re.fullmatch(r"cpu|cuda:\d+", str(device)) for device in value.values())


def is_batch_norm(model: Mapping[str, Any]) -> bool:
    """Whether a network's argument `norm` names batch norm.

    Other networks than our UNet may have batch norm by default, or by another argument.
    """
    return str(model.get("norm")).lower() in ("batch", "batch_norm", "batchnorm")
