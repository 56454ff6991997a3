"""Keys of `predict`."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
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
# Keys whose values are checkpoints of a stage.
STAGES = ("coarse", "fine", "single")
# Refusal of `single` together with `coarse` or `fine`.
SINGLE_EXCLUDES = "single is a model of one stage, coarse and fine are two; leave one of them out"


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
    single: Annotated[
        Any, Knob("Checkpoint, or list of them; null: the key single of `predict`.")
    ] = None


@dataclass(kw_only=True)
class DicomSegOptions:
    """DICOM SEG of save=[dicom_seg]."""

    kind: Annotated[
        SegKind,
        Knob(
            "binary: one label per frame; labelmap: smaller, defined in 2024, unknown to older "
            "viewers."
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
            "Address of a running cluster (auto, host:port); null: RAY_ADDRESS, or a new cluster "
            "on this machine."
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
            "NIfTI, NRRD, MetaImage, DICOM folder, folder of scans, or case table; [a,b]: channels "
            "of one case."
        ),
    ]
    output: Annotated[str, Knob("File (its suffix is the format) or folder.")]
    save: Annotated[list[Save], Knob("Result files of each case, see docs/result_files.md.")] = (
        field(default_factory=lambda: [Save.labels])
    )
    coarse: Annotated[
        Any,
        Knob(
            "Checkpoint or .safetensors of the coarse stage, or a [list] to average; null: the "
            "included weights."
        ),
    ] = None
    fine: Annotated[
        Any,
        Knob("Like coarse, for the fine stage; several checkpoints also write their disagreement."),
    ] = None
    single: Annotated[
        Any,
        Knob(
            "Checkpoint or .safetensors of a task of one stage, or a [list] to average; in place "
            "of coarse and fine."
        ),
    ] = None
    weights: Annotated[
        Any,
        Knob(
            "Model folder of medseg or nnU-Net, or the zip file of nnU-Net's export; [a,b]: a "
            "later label wins."
        ),
    ] = None
    folds: Annotated[
        Any, Knob("With weights: folds whose outputs are averaged, such as [0,1]; null: all.")
    ] = None
    label_values: Annotated[
        dict[str, int] | None,
        Knob("With weights: {name: value}, 1 to 255; null: 1, 2, … in the order of the folders."),
    ] = None
    ensemble: Annotated[
        bool,
        Knob("With several weights of nnU-Net: average their probabilities, as nnUNetv2_ensemble."),
    ] = False
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
            "Where the scans of a batch are segmented; ray: on a cluster, or in several processes "
            "of this machine."
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
        """Bring values to one form, and give a range the checkpoints that it leaves out.

        Where a list of texts may be given, a single text becomes a list of one.
        """
        self.save = list(dict.fromkeys(self.save))  # each kind once, in the order given
        for stage in STAGES:
            checkpoints = as_texts(getattr(self, stage))
            setattr(self, stage, checkpoints)
        self.weights = as_texts(self.weights)
        if self.folds is not None:
            folds = as_texts(self.folds)
            # The command line reads 0 as a number, but folds are named in file names.
            self.folds = [str(fold) for fold in folds]
        if self.by_spacing is None:
            return
        for range_options in self.by_spacing.values():
            for stage in STAGES:
                checkpoints = getattr(range_options, stage)
                if checkpoints is None:
                    checkpoints = getattr(self, stage)
                setattr(range_options, stage, as_texts(checkpoints))

    @property
    def ranges(self) -> dict[str, RangeOptions]:
        """Name of each range of spacings to its checkpoints.

        Without `by_spacing` it is one range for all scans, whose name is empty.
        """
        if self.by_spacing:
            return self.by_spacing
        checkpoints = {stage: getattr(self, stage) for stage in STAGES}
        return {"": RangeOptions(range_mm=EVERY_SPACING_MM, **checkpoints)}

    @property
    def has_scan_path(self) -> bool:
        """Whether the input is a folder, a DICOM medium, an archive or a single file.

        The other inputs are case tables and lists of the channels of one case.
        """
        return isinstance(self.input, str) and Path(self.input).suffix.lower() != ".csv"

    @property
    def hu(self) -> HuScale:
        """HU scale of the cases that have none of their own."""
        return HuScale(self.hu_slope, self.hu_offset)

    def clashes(self, _: str) -> Iterator[str]:
        """Yield a sentence for each value that is not valid, or contradicts another.

        The check of a configuration calls this method of each group with the key of the group; this
        group is the whole configuration and needs no key.
        """
        yield from text_clashes(
            "input", as_texts(self.input), "a path, or a list of the channels of one case"
        )
        # Such as `output=$OUT` in a shell where OUT is not set: it would be the present folder.
        for key in ("output", "split", "series", "series_pick"):
            if getattr(self, key) == "":
                yield f"{key}: expected a text, but got an empty one"
        expected = "a checkpoint, a list of checkpoints or null"
        for stage in STAGES:
            checkpoints = getattr(self, stage)
            if checkpoints is not None:
                yield from text_clashes(stage, checkpoints, expected)
        has_two_stages = bool(self.coarse or self.fine)
        if self.single and has_two_stages:
            yield SINGLE_EXCLUDES
        yield from self._weights_clashes()
        if self.series is not None and self.series_pick is not None:
            yield "series and series_pick exclude each other; leave one of them out"
        yield from self._range_clashes(expected)

    def _range_clashes(self, expected: str) -> Iterator[str]:
        """Yield a sentence for each fault of a range of spacings.

        A fault is a lower bound that is not below the upper one, an overlap with another range, or
        checkpoints that are not valid or exclude each other.

        Args:
            expected: What checkpoints must be, for the sentences.
        """
        if self.by_spacing is None:
            return
        ranges = self.by_spacing
        sorted_names = sorted(ranges, key=lambda name: ranges[name].range_mm)
        previous_name = ""
        previous_high_mm = 0.0
        for name in sorted_names:
            range_options = ranges[name]
            key = f"by_spacing.{name}"
            range_mm = list(range_options.range_mm)
            low_mm, high_mm = range_mm
            if not 0 <= low_mm < high_mm:
                yield (
                    f"{key}.range_mm: expected two increasing numbers, the first at least 0, "
                    f"but got {range_mm}"
                )
            if low_mm < previous_high_mm:
                yield (
                    f"{key}.range_mm={range_mm} overlaps that of {previous_name}; "
                    "end one range where the other begins"
                )
            previous_name = name
            previous_high_mm = high_mm
            for stage in STAGES:
                checkpoints = getattr(range_options, stage)
                if checkpoints is not None:
                    yield from text_clashes(f"{key}.{stage}", checkpoints, expected)
            has_two_stages = bool(range_options.coarse or range_options.fine)
            if range_options.single and has_two_stages:
                yield f"{key}: {SINGLE_EXCLUDES}"

    def _weights_clashes(self) -> Iterator[str]:
        """Yield a sentence for each key that contradicts `weights`, or needs it and lacks it."""
        if self.weights is None:
            for key in ("folds", "label_values"):
                if getattr(self, key) is not None:
                    yield (
                        f"{key} belongs to a model folder; give weights=<folder> too, "
                        "or leave it out"
                    )
            if self.ensemble:
                yield (
                    "ensemble belongs to model folders; give weights=[<folder>,<folder>] too, or "
                    "leave it out"
                )
            return
        yield from text_clashes("weights", self.weights, "a model folder, a list of them or null")
        for key in (*STAGES, "by_spacing"):
            if getattr(self, key) is not None:
                yield f"weights and {key} exclude each other; leave one of them out"
        has_few_folders = isinstance(self.weights, list) and len(self.weights) < 2
        if self.ensemble and has_few_folders:
            yield "ensemble averages several model folders, got one; leave it out"
        if self.folds == []:
            yield (
                "folds: expected numbers of folds, such as [0,1], but got none; "
                "leave it out for all"
            )


def as_texts(value: Any) -> Any:
    """Put a single value into a list; a list and None stay as they are."""
    if value is None or isinstance(value, list):
        return value
    return [value]


def text_clashes(key: str, value: Any, expected: str) -> Iterator[str]:
    """Yield a sentence unless a value is a list of at least one text, none of them empty.

    Args:
        key: Name of the key.
        value: Its value.
        expected: What it must be, for the sentence.
    """
    if isinstance(value, list) and value:
        are_texts = all(isinstance(text, str) and text for text in value)
        if are_texts:
            return
    yield f"{key}: expected {expected}, but got {value!r}"
