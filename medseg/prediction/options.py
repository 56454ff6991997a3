"""Keys of `predict`."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

from medseg.data.options import LabelsOptions
from medseg.inference.options import InferenceOptions
from medseg.knob import Knob, Pair, Text
from medseg.memory.options import Accelerator, Precision
from medseg.preprocess.scale import HuScale

Engine = StrEnum("Engine", ["local", "ray"])  # see `medseg.prediction.ray_engine`
SegKind = StrEnum("SegKind", ["binary", "labelmap"])  # see `medseg.io.dicom.segmentation`
Save = StrEnum(  # see `medseg.prediction.result_files`
    "Save", ["labels", "preview", "viewer", "dicom_seg", "rtstruct", "masks", "probabilities"]
)


EVERY_SPACING_MM = (0.0, math.inf)


@dataclass(kw_only=True)
class RangeOptions:
    """Checkpoints for scans whose coarsest spacing lies in a range."""

    range_mm: Annotated[
        Pair, Knob("Lower bound, and upper bound (excluded) of the spacing; 0 or more.", unit="mm")
    ]
    coarse: Annotated[
        Any, Knob("Checkpoint, or list of them; null: the key coarse of `predict`.")
    ] = None
    fine: Annotated[Any, Knob("Checkpoint, or list of them; null: the key fine of `predict`.")] = (
        None
    )


@dataclass(kw_only=True)
class DicomSegOptions:
    """DICOM SEG of save=[dicom_seg]."""

    kind: Annotated[
        SegKind,
        Knob(
            "binary: one label per frame; labelmap: smaller, defined in 2024, unknown to older viewers."
        ),
    ] = SegKind.binary
    keep_empty_frames: Annotated[bool, Knob("Write frames of slices without the label too.")] = (
        False
    )


@dataclass(kw_only=True)
class ViewerOptions:
    """Case viewers, the HTML files of save=[viewer]."""

    max_mb: Annotated[
        float,
        Knob(
            "Largest size of a viewer; a scan of many voxels is shown coarser.",
            "[4, inf)",
            "10^6 bytes",
        ),
    ] = 12.0


@dataclass(kw_only=True)
class RayOptions:
    """Cluster and actors of engine=ray."""

    address: Annotated[
        Text,
        Knob(
            "Address of a running cluster (auto, host:port); null: RAY_ADDRESS, or a new cluster on this machine."
        ),
    ] = None
    num_actors: Annotated[
        int | None,
        Knob("Processes that segment scans; null: as many as fit.", "[1, inf)", "actors"),
    ] = None
    gpus: Annotated[
        float | None,
        Knob(
            "GPUs of an actor, such as 0.5; null: 1 where the cluster has GPUs.", "[0, inf)", "GPUs"
        ),
    ] = None
    memory_gib: Annotated[
        float | None,
        Knob(
            "Memory that an actor reserves; null: inference.max_ram_gib, or predicted.",
            "(0, inf)",
            "GiB",
        ),
    ] = None
    retries: Annotated[
        int,
        Knob(
            "How often a scan is given to another actor after its actor has died.",
            "[0, inf)",
            "times",
        ),
    ] = 2


@dataclass(kw_only=True)
class PredictConfig:
    """Keys of `predict`; spacing, task and network come from the checkpoints."""

    input: Annotated[
        Any,
        Knob(
            "NIfTI, NRRD, MetaImage, DICOM folder, folder of scans, or case table; [a,b]: channels of one case."
        ),
    ]
    output: Annotated[str, Knob("File (its suffix is the format) or folder.")]
    save: Annotated[list[Save], Knob("Result files of each case, see docs/result_files.md.")] = (
        field(default_factory=lambda: [Save.labels])
    )
    coarse: Annotated[
        Any,
        Knob(
            "Checkpoint or .safetensors of the coarse or single stage, or a [list] to average; null: the included weights."
        ),
    ] = None
    fine: Annotated[
        Any,
        Knob("Like coarse, for the fine stage; several checkpoints also write their disagreement."),
    ] = None
    weights: Annotated[
        Text,
        Knob(
            "Model folder of nnU-Net, a folder above it, or the zip file of its export; in place of coarse and fine."
        ),
    ] = None
    folds: Annotated[
        Any, Knob("With weights: folds whose outputs are averaged, such as [0,1]; null: all.")
    ] = None
    by_spacing: Annotated[
        dict[str, RangeOptions] | None,
        Knob("Name: other checkpoints for a range of the scan's coarsest spacing."),
    ] = None
    split: Annotated[Text, Knob("With a case table: this part only (train, val, test).")] = None
    series: Annotated[Text, Knob("DICOM series by UID or number where a folder holds several.")] = (
        None
    )
    series_pick: Annotated[
        Text,
        Knob(
            "One DICOM series of each study: thinnest, largest, or a text or pattern in its "
            "description or kernel."
        ),
    ] = None
    hu_slope: Annotated[
        float,
        Knob(
            "HU = hu_slope * value + hu_offset; columns of the case table override both.",
            "(0, inf)",
        ),
    ] = 1.0
    hu_offset: Annotated[float, Knob("See hu_slope.", "(-inf, inf)", "HU")] = 0.0
    accelerator: Annotated[Accelerator, Knob("Device; auto: a GPU where there is one.")] = (
        Accelerator.auto
    )
    engine: Annotated[
        Engine,
        Knob(
            "Where the scans of a batch are segmented; ray: on a cluster, or in several processes of this machine."
        ),
    ] = Engine.local
    ray: RayOptions = field(default_factory=RayOptions)
    threads: Annotated[
        int | None,
        Knob(
            "Torch threads on a CPU; null: all cores, or 1 for each actor with engine=ray.",
            "[1, inf)",
            "threads",
        ),
    ] = None
    precision: Annotated[
        Precision | None, Knob("Number format; null: as the checkpoint was trained.")
    ] = None
    overwrite: Annotated[
        bool, Knob("Repeat cases that are up to date (same scan, weights and settings).")
    ] = False
    trusted_targets: Annotated[
        list[str],
        Knob(
            "Prefixes of classes beyond the white list that a checkpoint may name ([my_package.])."
        ),
    ] = field(default_factory=list)
    dicom_seg: DicomSegOptions = field(default_factory=DicomSegOptions)
    viewer: ViewerOptions = field(default_factory=ViewerOptions)
    data: LabelsOptions = field(default_factory=LabelsOptions)
    inference: InferenceOptions = field(default_factory=InferenceOptions)

    def __post_init__(self) -> None:
        """Bring single checkpoints to lists of one, and give a range the checkpoints that it leaves out."""
        self.save = list(dict.fromkeys(self.save))
        self.coarse, self.fine = as_texts(self.coarse), as_texts(self.fine)
        if self.folds is not None:
            folds = self.folds if isinstance(self.folds, list) else [self.folds]
            self.folds = [str(fold) for fold in folds]
        for limits in (self.by_spacing or {}).values():
            limits.coarse = self.coarse if limits.coarse is None else as_texts(limits.coarse)
            limits.fine = self.fine if limits.fine is None else as_texts(limits.fine)

    @property
    def ranges(self) -> dict[str, RangeOptions]:
        """Checkpoints of each range of spacings by its name; one without a name is for all scans."""
        return self.by_spacing or {
            "": RangeOptions(range_mm=EVERY_SPACING_MM, coarse=self.coarse, fine=self.fine)
        }

    @property
    def hu(self) -> HuScale:
        """HU scale of the cases that have none of their own."""
        return HuScale(self.hu_slope, self.hu_offset)

    def clashes(self, _: str) -> Iterator[str]:
        """Yield a sentence for each key whose value has no meaning, and for ranges that are empty or overlap."""
        yield from text_clashes(
            "input", as_texts(self.input), "a path, or a list of the channels of one case"
        )
        kinds = "a checkpoint, a list of checkpoints or null"
        for key, checkpoints in (("coarse", self.coarse), ("fine", self.fine)):
            if checkpoints is not None:
                yield from text_clashes(key, checkpoints, kinds)
        yield from self._weights_clashes()
        if self.series is not None and self.series_pick is not None:
            yield "series and series_pick exclude each other; leave one of them out"
        previous_name, previous_high_mm = "", 0.0
        in_order = sorted((self.by_spacing or {}).items(), key=lambda item: item[1].range_mm)
        for name, limits in in_order:
            key = f"by_spacing.{name}"
            low_mm, high_mm = limits.range_mm
            if not 0 <= low_mm < high_mm:
                yield (
                    f"{key}.range_mm: expected two increasing numbers, the first at least 0, but got {list(limits.range_mm)}"
                )
            if low_mm < previous_high_mm:
                yield (
                    f"{key}.range_mm={list(limits.range_mm)} overlaps that of {previous_name}; end one range where the "
                    "other begins"
                )
            previous_name, previous_high_mm = name, high_mm
            for stage, checkpoints in (("coarse", limits.coarse), ("fine", limits.fine)):
                if checkpoints is not None:
                    yield from text_clashes(f"{key}.{stage}", checkpoints, kinds)

    def _weights_clashes(self) -> Iterator[str]:
        """Yield a sentence for each key that contradicts `weights`, or needs it."""
        if self.weights is None:
            if self.folds is not None:
                yield "folds belongs to a model folder of nnU-Net; give weights=<folder> too, or leave it out"
            return
        others = {"coarse": self.coarse, "fine": self.fine, "by_spacing": self.by_spacing}
        for key, value in others.items():
            if value is not None:
                yield f"weights and {key} exclude each other; leave one of them out"
        if self.folds == []:
            yield "folds: expected numbers of folds, such as [0,1], but got none; leave it out for all"
        if Save.probabilities in self.save:
            yield (
                "save=probabilities: a model folder of nnU-Net keeps no probabilities, which would fill the memory; leave "
                "it out"
            )


def as_texts(value: Any) -> Any:
    """Bring one text to a list of one; a list and null stay."""
    return value if value is None or isinstance(value, list) else [value]


def text_clashes(key: str, value: Any, expected: str) -> Iterator[str]:
    """Yield a sentence unless a value is a list of texts.

    Args:
        key: Name of the key.
        value: Its value.
        expected: What it must be.
    """
    are_texts = isinstance(value, list) and all(isinstance(text, str) for text in value)
    if not value or not are_texts:
        yield f"{key}: expected {expected}, but got {value!r}"
