"""Keys of the group `inference`: how a trained stage runs on a whole case."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from medseg.geometry.sizes import Shape
from medseg.knob import Knob

# Library that runs the networks, see `medseg.inference.openvino`.
Backend = StrEnum("Backend", ["torch", "openvino"])
# Precision in which the logits of tiles and folds are added, see `medseg.nnunet.tiles`.
Sums = StrEnum("Sums", ["half", "float"])
# Program whose steps around the networks are repeated, see `medseg.prediction.totalsegmentator`.
Around = StrEnum("Around", ["totalsegmentator"])


class Seen(StrEnum):
    """Orientation in which a network of nnU-Net sees a scan, see `medseg.nnunet.model`."""

    stored = "stored"
    RAS = "RAS"
    LPS = "LPS"


@dataclass(kw_only=True)
class TilingOptions:
    """Keys of the sliding window, with which a network runs on a whole case."""

    tile_size: Annotated[
        Shape | None,
        Knob(
            "Sliding window; null: the whole crop at once. inference=tiles: stage.patch_size.",
            "[1, inf)",
            "voxels (D, H, W)",
        ),
    ] = None
    overlap: Annotated[float, Knob("Share of a tile that its neighbour covers too.", "[0, 1)")] = (
        0.5
    )


@dataclass(kw_only=True)
class InferenceOptions(TilingOptions):
    """All keys of `inference` that `predict` takes."""

    budget_gib: Annotated[
        float,
        Knob(
            "Memory of one network pass, without input and result; a larger pass is computed in "
            "slabs, with the same labels.",
            "(0, inf)",
            "GiB",
        ),
    ] = 1.0
    max_ram_gib: Annotated[
        float | None,
        Knob(
            "Bound on the memory of the whole process, for any scan; may lower budget_gib. null: "
            "none.",
            "(0, inf)",
            "GiB",
        ),
    ] = None
    tta: Annotated[
        bool | None,
        Knob(
            "Average over flipped inputs: eight passes, or four where the task has sides, without "
            "left-right flips. null: as the model folder of nnU-Net allows, none for other "
            "networks."
        ),
    ] = None
    sums: Annotated[
        Sums | None,
        Knob(
            "Of weights=<nnU-Net folder>: precision in which tiles and folds are added; null: "
            "half, as nnU-Net does."
        ),
    ] = None
    orientation: Annotated[
        Seen | None,
        Knob(
            "Of weights=<nnU-Net folder>: how the networks see a scan; stored: as its file holds "
            "it. null: as its plans say."
        ),
    ] = None
    around: Annotated[
        Around | None,
        Knob(
            "Of weights=<nnU-Net folder>: totalsegmentator turns scans to RAS and resamples them, "
            "and the labels back, as that program does; null: neither."
        ),
    ] = None
    half_weights: Annotated[
        bool, Knob("Store weights in half precision where the networks compute in it (bf16, fp16).")
    ] = False
    backend: Annotated[
        Backend | None,
        Knob(
            "What runs the networks. null: on a CPU without bf16, the faster of those that are "
            "installed and fit into the memory; else torch."
        ),
    ] = None
