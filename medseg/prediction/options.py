"""Keys of `predict`."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from medseg.data.options import LabelsConfig
from medseg.inference.options import InferenceOptions
from medseg.knob import Knob, Pair, Text
from medseg.memory.options import Accelerator, Precision

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


@dataclass
class PredictConfig:
    """Keys of `predict`."""

    input: Annotated[
        Any, Knob("NIfTI, NRRD, MetaImage, DICOM folder, folder of scans, or case table; [a,b]: channels of one case.")
    ]
    output: Annotated[str, Knob("File (its suffix is the format) or folder.")]
    save: Annotated[
        list[Save],
        Knob("Result files of each case, see docs/predict.md."),
    ]
    coarse: Annotated[Any, Knob("Checkpoint or .safetensors, or a [list] to average; null: the included lung weights.")]
    fine: Annotated[Any, Knob("Like coarse, for the fine stage; several checkpoints also write their disagreement.")]
    by_spacing: Annotated[
        dict[str, RangeConfig] | None, Knob("Name: other checkpoints for a range of the scan's coarsest spacing.")
    ]
    split: Annotated[Text, Knob("With a case table: this part only (train, val, test).")]
    series: Annotated[Text, Knob("DICOM series by UID or number where a folder holds several.")]
    hu_slope: Annotated[float, Knob("HU = hu_slope * value + hu_offset; columns of the case table override both.", "(0, inf)")]
    hu_offset: Annotated[float, Knob("See hu_slope.", "(-inf, inf)", "HU")]
    accelerator: Annotated[Accelerator, Knob("Device; auto: a GPU where there is one.")]
    engine: Annotated[
        Engine, Knob("Where the scans of a batch are segmented; ray: on a cluster, or in several processes of this machine.")
    ]
    ray: RayConfig
    threads: Annotated[
        int | None, Knob("Torch threads on a CPU; null: all cores, or 1 for each actor with engine=ray.", "[1, inf)", "threads")
    ]
    precision: Annotated[Precision | None, Knob("Number format; null: as the checkpoint was trained.")]
    overwrite: Annotated[bool, Knob("Repeat cases that are up to date (same scan, weights and settings).")]
    trusted_targets: Annotated[
        list[str], Knob("Prefixes of classes beyond the white list that a checkpoint may name ([my_package.]).")
    ]
    dicom_seg: DicomSegConfig
    viewer: ViewerConfig
    data: LabelsConfig
    inference: InferenceOptions

    def __post_init__(self) -> None:
        """Bring single checkpoints to lists of one, and give a range the checkpoints that it leaves out."""
        self.coarse, self.fine = as_texts(self.coarse), as_texts(self.fine)
        for limits in (self.by_spacing or {}).values():
            limits.coarse = as_texts(limits.coarse) or self.coarse
            limits.fine = as_texts(limits.fine) or self.fine

    def clashes(self, _: str) -> Iterator[str]:
        """Yield a sentence for each key whose value has no meaning, and for ranges that are empty or overlap."""
        inputs = self.input if isinstance(self.input, list) else [self.input]
        yield from text_clashes("input", inputs, "a path, or a list of the channels of one case", self.input)
        kinds = "a checkpoint, a list of checkpoints or null"
        for key, checkpoints in (("coarse", self.coarse), ("fine", self.fine)):
            if checkpoints:
                yield from text_clashes(key, checkpoints, kinds)
        previous_name, previous_high_mm = "", 0.0
        in_order = sorted((self.by_spacing or {}).items(), key=lambda item: item[1].range_mm)
        for name, limits in in_order:
            key = f"by_spacing.{name}"
            low_mm, high_mm = limits.range_mm
            if not 0 <= low_mm < high_mm:
                yield (f"{key}.range_mm: expected two increasing numbers, the first at least 0, but got {list(limits.range_mm)}")
            if low_mm < previous_high_mm:
                yield (
                    f"{key}.range_mm={list(limits.range_mm)} overlaps that of {previous_name}; end one range where the "
                    "other begins"
                )
            previous_name, previous_high_mm = name, high_mm
            for stage, checkpoints in (("coarse", limits.coarse), ("fine", limits.fine)):
                if checkpoints:
                    yield from text_clashes(f"{key}.{stage}", checkpoints, kinds)


def as_texts(value: Any) -> list[Any]:
    """Bring one text or a list of them to a list; null is the empty list."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def text_clashes(key: str, values: list[Any], expected: str, given: Any = None) -> Iterator[str]:
    """Yield a sentence if a list is empty or holds anything but texts.

    Args:
        key: Name of the key.
        values: Its value as a list.
        expected: What it must be.
        given: The value as it was given, for the sentence; null is the list.
    """
    if not values or not all(isinstance(value, str) for value in values):
        yield f"{key}: expected {expected}, but got {values if given is None else given!r}"
