"""Keys of `predict` that choose checkpoints, result files and the cluster."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from medseg.config.knob import Knob, Pair, Text

Engine = StrEnum("Engine", ["local", "ray"])  # see `medseg.prediction.ray_engine`
SegKind = StrEnum("SegKind", ["binary", "labelmap"])  # see `medseg.io.dicom.segmentation`
Save = StrEnum(  # see `medseg.prediction.results`
    "Save", ["labels", "preview", "viewer", "dicom_seg", "rtstruct", "masks", "probabilities"]
)


@dataclass
class RangeConfig:
    """Checkpoints for scans whose coarsest spacing lies in a range."""

    range_mm: Annotated[Pair, Knob("Lower bound, and upper bound (excluded) of the spacing; 0 or more.", unit="mm")]
    coarse: Annotated[Any, Knob("Checkpoint, or list of them; null: the key coarse of `predict`.")] = None
    fine: Annotated[Any, Knob("Checkpoint, or list of them; null: the key fine of `predict`.")] = None


@dataclass
class DicomSegConfig:
    """DICOM SEG of save=[dicom_seg]."""

    kind: Annotated[SegKind, Knob("binary: one label per frame; labelmap: smaller, defined in 2024, unknown to older viewers.")]
    keep_empty_frames: Annotated[bool, Knob("Write frames of slices without the label too.")]


@dataclass
class ViewerConfig:
    """Case viewers, the HTML files of save=[viewer]."""

    max_mb: Annotated[float, Knob("Largest size of a viewer; a scan of many voxels is shown coarser.", "[4, inf)", "10^6 bytes")]


@dataclass
class RayConfig:
    """Cluster and actors of engine=ray."""

    address: Annotated[
        Text, Knob("Address of a running cluster (auto, host:port); null: RAY_ADDRESS, or a new cluster on this machine.")
    ]
    num_actors: Annotated[int | None, Knob("Processes that segment scans; null: as many as fit.", "[1, inf)", "actors")]
    gpus: Annotated[float | None, Knob("GPUs of an actor, such as 0.5; null: 1 where the cluster has GPUs.", "[0, inf)", "GPUs")]
    memory_gib: Annotated[
        float | None, Knob("Memory that an actor reserves; null: inference.max_ram_gib, or predicted.", "(0, inf)", "GiB")
    ]
    retries: Annotated[int, Knob("How often a scan is given to another actor after its actor has died.", "[0, inf)", "times")]
