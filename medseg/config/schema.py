"""Schema of the configuration: every key with its type, range, unit and description; the values are in `conf/`.

`check.py` merges the values that Hydra composed into the dataclass of the command, such as `TrainConfig`. It refuses unknown
keys, wrong types, missing values and numbers outside their range, whatever their source. A tuple's length is part of its type.
Extension points (`model`, `optimizer`, `loss`, `schedule`, `logger`, …) are mappings with a `_target_`, see
`medseg.config.targets`; classes of ours have a schema in `CLASS_SCHEMAS`. `--help` of a command prints all this.
The file is long because each key has its documentation beside it.
"""

from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import StrEnum
from typing import Annotated, Any, NamedTuple, cast, get_type_hints

from hydra.core.config_store import ConfigStore

from medseg.config.targets import EXTENSION_KEYS, EXTENSION_MAPS, ExtensionNode
from medseg.geometry.sizes import Shape


class Knob(NamedTuple):
    """Documentation of one key.

    Attributes:
        sentence: What the key does.
        within: Interval of its number, or of each number of a tuple or list, such as `[0, 1)`.
        unit: Unit or order of its numbers.
        neutral: Whether the key cannot change the result of a run (folders, saving intervals, devices), so that a
            run may resume with another value.
    """

    sentence: str
    within: str = ""
    unit: str = ""
    neutral: bool = False


StageName = StrEnum("StageName", ["coarse", "fine", "single"])
RegionFrom = StrEnum("RegionFrom", ["reference", "coarse"])
Side = StrEnum("Side", ["left", "right"])  # of the patient
Modality = StrEnum("Modality", ["ct", "mr", "other"])
Normalise = StrEnum("Normalise", ["window", "zscore", "percentile"])  # see `medseg.preprocess.intensity`
SpacingStrategy = StrEnum(  # see docs/spacing.md
    "SpacingStrategy",
    [
        "isotropic",
        "anisotropic",
        "dataset_median",
        "dataset_mean",
        "native",
        "fixed_size",
        "fixed_resolution",
        "multi_scale",
    ],
)
SpacingDraw = StrEnum("SpacingDraw", ["even", "tail"])  # see `medseg.data.crops`
Fill = StrEnum("Fill", ["widen", "pad"])
Resampling = StrEnum("Resampling", ["antialiased", "linear", "cubic"])  # see `medseg.preprocess.resample`
Block = StrEnum("Block", ["plain", "residual", "bottleneck"])  # see `medseg.models.blocks`
Stem = StrEnum("Stem", ["conv", "strided", "space_to_depth"])  # see `medseg.models.unet`
Backend = StrEnum("Backend", ["torch", "openvino"])  # see `medseg.inference.openvino`
Norm = StrEnum("Norm", ["instance", "group", "batch", "channel", "affine"])  # see `medseg.models.blocks`
CompileMode = StrEnum("CompileMode", ["default", "reduce_overhead", "max_autotune"])
Precision = StrEnum("Precision", ["fp32", "tf32", "bf16", "fp16"])
LrScaling = StrEnum("LrScaling", ["none", "linear", "sqrt"])
Accelerator = StrEnum("Accelerator", ["auto", "cpu", "gpu"])
Strategy = StrEnum("Strategy", ["auto", "ddp"])
Profiler = StrEnum("Profiler", ["none", "simple", "torch"])
ClipBy = StrEnum("ClipBy", ["norm", "value"])
Metric = StrEnum("Metric", ["val_dice", "val_dice_worst"])  # columns of history.csv
Allow = StrEnum("Allow", ["same_result", "same_expectation", "other_run"])  # see `medseg.planning.choose`
Detail = StrEnum("Detail", ["small", "full"])
Scene = StrEnum("Scene", ["chest", "organs"])
ImportFormat = StrEnum("ImportFormat", ["nnunet", "msd", "totalsegmentator", "luna16", "pairs", "dicom"])  # see docs/import.md
MissingStructure = StrEnum("MissingStructure", ["refuse", "absent"])
Engine = StrEnum("Engine", ["local", "ray"])  # see `medseg.prediction.ray_engine`
SegKind = StrEnum("SegKind", ["binary", "labelmap"])  # see `medseg.io.dicom.segmentation`
Save = StrEnum(  # see `medseg.prediction.results`
    "Save", ["labels", "preview", "viewer", "dicom_seg", "rtstruct", "masks", "probabilities"]
)

Text = str | None
Pair = tuple[float, float]
Triple = tuple[float, float, float]
# Our network and our loss, which have schemas of their own.
UNET = "medseg.models.unet.UNet"
DICE_CE = "medseg.losses.dice_ce.DiceCrossEntropyLoss"


@dataclass
class RegionConfig:
    """One region of interest of a task."""

    labels: Annotated[list[str], Knob("Labels of the region, in the order of the fine network's classes.")]
    side: Annotated[Side | None, Knob("Side of the patient; null: crops are never mirrored.")]


@dataclass
class ChannelConfig:
    """One channel of the input: the column `image` of a case table, then `image_1`, `image_2` and so on."""

    modality: Annotated[Modality, Knob("ct: values in HU, which the audit checks; mr, other: values of any scale.")] = Modality.ct
    window_hu: Annotated[Pair | None, Knob("Window that is mapped to [-1, 1]; with normalise=window.", unit="HU")] = None
    normalise: Annotated[
        Normalise, Knob("Intensity normalisation. window: by window_hu; zscore, percentile: by the values of the case itself.")
    ] = Normalise.window


@dataclass
class TaskConfig:
    """Task: labels, regions and channels."""

    name: Annotated[str, Knob("Name of the task.")]
    labels: Annotated[
        dict[str, int], Knob("Label names and their values in every label map that medseg writes: 1, 2, … without a gap.")
    ]
    regions: Annotated[
        dict[str, RegionConfig] | None,
        Knob("Regions of interest; the fine stage makes one crop of each. null: one stage segments all labels."),
    ] = None
    channels: Annotated[
        list[ChannelConfig] | None,
        Knob("Channels of the input, in the order image, image_1, …; null: one CT with task.window_hu."),
    ] = None
    window_hu: Annotated[Pair | None, Knob("Window that is mapped to [-1, 1], of a task with one CT channel.", unit="HU")] = None
    least_hu: Annotated[
        float | None, Knob("Connected components with a lower median are removed as gas; null: none.", unit="HU")
    ] = None
    ignore_label: Annotated[
        int | None,
        Knob("Value of voxels that the loss, the sampling and the scores ignore; null: none.", "[1, 255]"),
    ] = None
    volume_ml: Annotated[
        dict[str, Any] | None,
        Knob(
            "Region or label: its smallest and largest plausible volume, [low, high]; others are not checked.",
            unit="ml",
            neutral=True,
        ),
    ] = None
    codes: Annotated[
        dict[str, Any] | None,
        Knob("Label: its SNOMED CT code, [code, meaning] or [code, meaning, left | right], for DICOM results.", neutral=True),
    ] = None
    colours: Annotated[
        dict[str, str] | None, Knob("Label: its colour in results, '#rrggbb'; others get one of a palette.", neutral=True)
    ] = None


@dataclass
class SpacingConfig:
    """Grid that a stage works on."""

    target_spacing_mm: Annotated[
        Triple | None,
        Knob(
            "Voxel spacing; null: averaged over the training cases (dataset_median, dataset_mean), else that of each scan.",
            "(0, inf)",
            "mm (z, y, x)",
        ),
    ]
    strategy: Annotated[SpacingStrategy, Knob("Rule for the grid of each scan, see docs/spacing.md.")] = SpacingStrategy.isotropic
    size: Annotated[
        Shape | None, Knob("Shape that each crop is resized to; fixed_size only.", "[1, inf)", "voxels (D, H, W)")
    ] = None
    resampling: Annotated[
        Resampling, Knob("Filter. linear: faster, skips voxels where an axis gets coarser; cubic: sharper where it gets finer.")
    ] = Resampling.antialiased
    range_mm: Annotated[Pair | None, Knob("Smallest and largest spacing of an axis; multi_scale only.", "(0, inf)", "mm")] = None
    draw: Annotated[
        SpacingDraw | None, Knob("multi_scale only. even: log-uniform; tail: spacing of a training scan, clamped to range_mm.")
    ] = None
    fill: Annotated[Fill, Knob("fixed_resolution only: how a crop becomes a cube. widen: by more of the scan; pad: by air.")] = (
        Fill.widen
    )


@dataclass
class StageConfig:
    """Input, region and validation of a stage."""

    name: Annotated[StageName, Knob("Stage of the cascade, or single for a task of one stage.")]
    patch_size: Annotated[Shape | None, Knob("Training patch; null: the whole volume or crop.", "[1, inf)", "voxels (D, H, W)")]
    batch_size: Annotated[int, Knob("Samples per optimiser step, over all ranks and micro-batches.", "[1, inf)", "samples")]
    max_voxels: Annotated[
        int | None,
        Knob("Coarse and single stage: larger volumes are cut to a random range of slices; null: never.", "[1, inf)", "voxels"),
    ]
    slab_share: Annotated[
        float | None, Knob("Coarse and single stage: share of samples cut to a random range of slices.", "[0, 1]")
    ]
    boundary_share: Annotated[
        float | None, Knob("Share of patches that contain the region's boundary; with patch_size.", "[0, 1]")
    ]
    elsewhere_share: Annotated[float | None, Knob("Fine stage: share of samples cut anywhere in the scan.", "[0, 1)")]
    region_margin_mm: Annotated[float | None, Knob("Margin on every side of the coarse box.", "[0, inf)", "mm")]
    region_from: Annotated[RegionFrom | None, Knob("Source of the training boxes; coarse needs stage.coarse.")]
    box_jitter_mm: Annotated[
        float | None, Knob("Standard deviation of the shift of each box face in training.", "[0, inf)", "mm")
    ]
    coarse: Annotated[Text, Knob("Checkpoint of the coarse stage, with stage.region_from=coarse.")]
    validate_every: Annotated[int, Knob("Interval of validations.", "[1, inf)", "optimiser steps")]
    patience: Annotated[
        int | None, Knob("Validations without improvement before the run ends; null: never.", "[1, inf)", "validations")
    ]
    side_share: Annotated[
        float | None, Knob("Coarse and single stage: share of samples cut to a random range of columns: half chests.", "[0, 1]")
    ] = None
    add_parts_mm: Annotated[
        float | None,
        Knob(
            "Coarse stage: a part that it alone finds is added to the fine result if a ball of this diameter fits into it; null: never.",
            "(0, 50]",
            "mm",
        ),
    ] = None


@dataclass(kw_only=True)
class PhantomCountsConfig:
    """Kind and number of synthetic scans."""

    detail: Annotated[Detail, Knob("Voxel size. small: 2 to 3 mm (organs: 5 mm); full: 0.6 to 1 mm in plane (organs: 1.6 mm).")]
    seed: Annotated[int, Knob("Seed of the first scan.", "[0, inf)")]
    num_train: Annotated[int, Knob("Training scans; a run uses them only without a case table.", "[1, inf)", "scans")]
    num_val: Annotated[int, Knob("Validation scans.", "[1, inf)", "scans")]
    num_test: Annotated[int, Knob("Test scans.", "[0, inf)", "scans")]
    scene: Annotated[
        Scene,
        Knob("chest: CT of the chest; organs: one ellipsoid-like organ for each label of the task, in each of its channels."),
    ] = Scene.chest
    own_grids: Annotated[bool, Knob("Scene organs: each channel after the first has a grid of its own.")] = False


@dataclass(kw_only=True)
class PhantomConfig(PhantomCountsConfig):
    """Synthetic scans of a run."""

    folder: Annotated[str, Knob("Folder of the scans; they are made on first use.", neutral=True)]
    num_extra: Annotated[int, Knob("Scans added to the training cases of a case table.", "[0, inf)", "scans")]


@dataclass(kw_only=True)
class LabelsConfig:
    """Reference labels."""

    labels_column: Annotated[str, Knob("Column of the case table with the reference.")]
    label_values: Annotated[
        dict[str, Any],
        Knob(
            "Label name: its value or [values], or the names of its structures (masks), in the reference files; a name that "
            "is not in task.labels is background. Empty: the values of the task."
        ),
    ]


@dataclass(kw_only=True)
class DataConfig(LabelsConfig):
    """Cases, their labels, the split and the cache."""

    cases: Annotated[
        Text, Knob("Case table (CSV), or folder of a data set in a known layout (docs/import.md); null: synthetic scans.")
    ]
    hu_slope: Annotated[float, Knob("HU = hu_slope * value + hu_offset; columns of the case table override both.", "(0, inf)")]
    hu_offset: Annotated[
        float, Knob("See hu_slope; -1024 where the audit finds values stored 1024 too high.", "(-inf, inf)", "HU")
    ]
    train_trust: Annotated[
        Any,
        Knob("Train only on regions with this trust, or one of a [list] (columns trust_<region>), e.g. reference; null: on all."),
    ] = None
    ignore_findings: Annotated[
        list[str], Knob("Codes of audit findings that are accepted; the column of the case table adds to them.")
    ]
    cache: Annotated[str, Knob("Folder of the resampled cases.", neutral=True)]
    fold: Annotated[Any, Knob("Validation fold, 0 … num_folds - 1; all: train on every case; null: the table's split, else 0.")]
    num_folds: Annotated[int, Knob("Folds, by patient; 1 only for a table that names its folds.", "[1, inf)")]
    val_patients: Annotated[list[str], Knob("Patients for validation, whatever the split is.")]
    test_patients: Annotated[list[str], Knob("Test patients, excluded from training and validation.")]
    phantoms: PhantomConfig
    phantom_share: Annotated[float, Knob("Share of samples drawn from the extra synthetic scans.", "(0, 1)")]
    num_workers: Annotated[
        int | None,
        Knob(
            "Loader processes; samples do not depend on them. null: 1; with a GPU as many as the processors allow, at most 8.",
            "[0, inf)",
            "processes",
            neutral=True,
        ),
    ]
    prefetch: Annotated[int, Knob("Batches that each loader process prepares ahead.", "[1, inf)", "batches", neutral=True)]
    pin_memory: Annotated[
        bool | None, Knob("Page-locked batches, copied while the GPU computes; null: true with a GPU.", neutral=True)
    ]


@dataclass
class AugmentConfig:
    """Random changes of a training sample, see `medseg.data.augment`."""

    enabled: Annotated[bool, Knob("Augment training samples.")]
    flip_axes: Annotated[
        list[int], Knob("Axes of random flips: 0 = z, 1 = y, 2 = x; only with stage=fine if the task has sides.")
    ]
    affine_probability: Annotated[float, Knob("Probability of rotation, scale, shear and shift, in one resampling.", "[0, 1]")]
    rotation_deg: Annotated[Triple, Knob("Largest rotation.", "[0, 180]", "degrees about (z, y, x)")]
    scale_range: Annotated[Pair, Knob("Smallest and largest scale factor.", "(0, inf)")]
    shear_max: Annotated[float, Knob("Largest shear.", "[0, 1)")]
    translation_mm: Annotated[Triple, Knob("Largest shift.", "[0, inf)", "mm (z, y, x)")]
    blur_probability: Annotated[float, Knob("Probability of a Gaussian blur.", "[0, 1]")]
    blur_sigma_mm: Annotated[Pair, Knob("Range of the standard deviation of the blur.", "(0, inf)", "mm")]
    low_resolution_probability: Annotated[float, Knob("Probability of thick slices or coarse voxels.", "[0, 1]")]
    low_resolution_mm: Annotated[Pair, Knob("Range of the spacing of thick slices or coarse voxels.", "(0, inf)", "mm")]
    low_resolution_all_axes_probability: Annotated[
        float, Knob("Share of the low-resolution samples that are coarse along all axes.", "[0, 1]")
    ]
    noise_probability: Annotated[float, Knob("Probability of Gaussian noise.", "[0, 1]")]
    noise_sd: Annotated[Pair, Knob("Range of the standard deviation of the noise; the window is mapped to [-1, 1].", "[0, inf)")]
    contrast_probability: Annotated[float, Knob("Probability of a contrast change.", "[0, 1]")]
    contrast_range: Annotated[Pair, Knob("Range of the contrast factor.", "(0, inf)")]
    brightness_probability: Annotated[float, Knob("Probability of a brightness change.", "[0, 1]")]
    brightness_max: Annotated[float, Knob("Largest brightness change; the window is mapped to [-1, 1].", "[0, 2]")]
    gamma_probability: Annotated[float, Knob("Probability of a gamma change.", "[0, 1]")]
    gamma_range: Annotated[Pair, Knob("Range of gamma.", "(0, inf)")]
    window_shift_hu: Annotated[float, Knob("Largest shift of each window bound.", "[0, inf)", "HU")]
    truncate_probability: Annotated[
        float, Knob("Probability of a partial scan: slices at one end are replaced by the last remaining slice.", "[0, 1]")
    ]
    truncate_max_fraction: Annotated[float, Knob("Largest share of the slices that is replaced.", "[0, 1)")]
    narrow_probability: Annotated[float, Knob("Probability of a field of view that cuts one side.", "[0, 1]")]
    narrow_max_fraction: Annotated[float, Knob("Largest share of the width that is removed.", "[0, 1)")]
    circle_probability: Annotated[float, Knob("Probability of a round field of view.", "[0, 1]")]
    circle_radius_range: Annotated[
        Pair, Knob("Range of the radius of the round field of view, as a share of half the longer side.", "(0, inf)")
    ]
    disease_probability: Annotated[
        float, Knob("Probability of disease painted into a labelled lung, whose outline stays.", "[0, 1]")
    ] = 0.0
    disease_each_lung: Annotated[
        bool, Knob("Draw for each labelled lung, so that both may be painted; false: one lung of the sample is.")
    ] = False
    disease_kinds: Annotated[
        list[str],
        Knob("Up to three lesions are painted, each of one of these kinds: consolidation, ground_glass, mass, collapse."),
    ] = field(default_factory=lambda: ["consolidation", "ground_glass", "mass", "collapse"])
    transforms: Annotated[
        list[Any], Knob("Transforms in their order: effects (those of the keys above), or {_target_: class, argument: value, …}.")
    ] = field(default_factory=lambda: ["effects"])
    allow_mirroring: Annotated[bool, Knob("Accept transforms that mirror left and right although the task has sides.")] = False


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


@dataclass
class MemoryConfig:
    """Switches that are applied to the network from outside."""

    precision: Annotated[Precision, Knob("Number format of forward and backward pass; weights stay fp32. tf32, fp16: GPU only.")]
    checkpointing: Annotated[
        Any, Knob("Blocks recomputed in the backward pass: none, sqrt, all, or a [list] of block names.", neutral=True)
    ]
    accumulate: Annotated[int, Knob("Micro-batches per optimiser step and rank.", "[1, inf)", "micro-batches", neutral=True)]
    offload: Annotated[bool, Knob("Keep saved activations in host memory (GPU).", neutral=True)]
    channels_last: Annotated[bool, Knob("Channels-last memory layout.", neutral=True)]
    compile: Annotated[
        bool, Knob("Compile the network with torch.compile, for variable sizes where crops differ in size.", neutral=True)
    ]
    cudnn_benchmark: Annotated[bool, Knob("Search the fastest kernels at each new shape (GPU).", neutral=True)]
    budget_gib: Annotated[
        float | None,
        Knob(
            "Memory that a training step and a validation may use; `plan` checks it.",
            "(0, inf)",
            "GiB",
            neutral=True,
        ),
    ]
    compile_mode: Annotated[
        CompileMode, Knob("Mode of torch.compile: reduce_overhead uses CUDA graphs, max_autotune searches kernels.", neutral=True)
    ] = CompileMode.default


@dataclass
class TrainerConfig:
    """Devices and ranks."""

    accelerator: Annotated[Accelerator, Knob("Device; auto: a GPU where there is one.", neutral=True)]
    devices: Annotated[int, Knob("Ranks of each machine, one per device.", "[1, inf)", "ranks", neutral=True)]
    num_nodes: Annotated[int, Knob("Machines.", "[1, inf)", "machines", neutral=True)]
    strategy: Annotated[
        Strategy, Knob("ddp: ranks divide the samples of a step; auto: one rank, or ddp under torchrun.", neutral=True)
    ]
    threads: Annotated[int | None, Knob("Torch threads on a CPU; null: all cores.", "[1, inf)", "threads", neutral=True)]
    gradient_clip: Annotated[float | None, Knob("Bound on the gradient, see clip_by; null: no clipping.", "(0, inf)")]
    sync_batchnorm: Annotated[bool, Knob("With model.norm=batch: statistics over the samples of all ranks (GPU).")] = False
    clip_by: Annotated[ClipBy, Knob("What gradient_clip bounds: the norm of the whole gradient, or each of its values.")] = (
        ClipBy.norm
    )
    gpus: Annotated[
        list[int] | None,
        Knob("Indices of the GPUs to use; trainer.devices=[1] means devices=1 gpus=[1].", "[0, inf)", neutral=True),
    ] = None


@dataclass(kw_only=True)
class LossConfig:
    """Loss: its class with the arguments of the class, and the keys below."""

    _target_: Annotated[str, Knob("Class of the loss, of medseg.losses, monai.losses, torch.nn or trusted_targets.")] = DICE_CE
    output_weights: Annotated[
        list[float] | None,
        Knob(
            "Weights of the outputs of a network with deep supervision; null: 1, 1/2, 1/4, … from full resolution on.", "[0, inf)"
        ),
    ] = None


@dataclass(kw_only=True)
class DiceCeConfig(LossConfig):
    """Dice and cross-entropy, see `medseg.losses.dice_ce`; another `_target_` replaces these keys by the arguments of its class."""

    dice_weight: Annotated[float, Knob("Weight of the Dice term.", "[0, inf)")]
    ce_weight: Annotated[float, Knob("Weight of the cross-entropy.", "[0, inf)")]
    include_background: Annotated[bool, Knob("Count the background in the Dice term.")]
    batch_dice: Annotated[bool, Knob("One Dice over all samples of a micro-batch instead of one per sample.")]


@dataclass
class DebugConfig:
    """Tools to find faults; they cost time, and the run prints those that are on."""

    anomaly: Annotated[bool, Knob("Stop at the operation that produced a NaN; several times slower.", neutral=True)]
    overfit: Annotated[bool, Knob("Train on the first batch only.")]
    fast: Annotated[bool, Knob("Validate one case only.")]
    profiler: Annotated[
        Profiler,
        Knob(
            "simple: Lightning's table of times, fit-profile.txt; torch: trace of some steps, and a snapshot of a GPU's memory.",
            neutral=True,
        ),
    ]


@dataclass
class InferenceConfig:
    """Execution of a trained stage on a whole case."""

    tile_size: Annotated[
        Shape | None,
        Knob(
            "Sliding window; null: the whole crop at once. inference=tiles: stage.patch_size.",
            "[1, inf)",
            "voxels (D, H, W)",
        ),
    ]
    overlap: Annotated[float, Knob("Share of a tile that its neighbour covers too.", "[0, 1)")]


@dataclass
class PredictInferenceConfig(InferenceConfig):
    """Inference keys of `predict`."""

    budget_gib: Annotated[
        float,
        Knob(
            "Memory of one network pass, without input and result; a larger pass is computed in slabs, with the same labels.",
            "(0, inf)",
            "GiB",
        ),
    ]
    max_ram_gib: Annotated[
        float | None,
        Knob("Bound on the memory of the whole process, for any scan; may lower budget_gib. null: none.", "(0, inf)", "GiB"),
    ]
    add_parts: Annotated[
        bool, Knob("Add thick parts that only the coarse stage finds, where its training asks for it (stage.add_parts_mm).")
    ]
    tta: Annotated[
        bool, Knob("Average over flipped inputs, without left-right flips where the task has sides; four times the time.")
    ]
    half_weights: Annotated[bool, Knob("Store weights in half precision where the networks compute in it (bf16, fp16).")]
    backend: Annotated[
        Backend | None,
        Knob(
            "What runs the networks. null: torch, or OpenVINO where it is installed, faster and fits into the memory on a "
            "CPU without bf16."
        ),
    ]


@dataclass(kw_only=True)
class TrainConfig:
    """Keys of `train`, and of the configuration in a run folder."""

    name: Annotated[str, Knob("Name of the run; its folder is runs/<name>/<date_time>.", neutral=True)]
    seed: Annotated[int, Knob("Seed of initial weights and samples.", "[0, 9223372036854775807]")]
    steps: Annotated[
        int, Knob("Length of the run, whatever the number of ranks and micro-batches.", "[1, inf)", "optimiser steps")
    ]
    resume: Annotated[
        Text, Knob("Run folder to resume from its last.ckpt; auto: the unfinished run of the same signature.", neutral=True)
    ]
    checkpoint_every: Annotated[
        int | None, Knob("Interval of last.ckpt; null: at validations only.", "[1, inf)", "optimiser steps", neutral=True)
    ]
    retry_failed: Annotated[bool, Knob("A resumed multirun repeats the jobs that failed.", neutral=True)]
    init_from: Annotated[Text, Knob("Checkpoint or .safetensors file with the initial weights (fine-tuning).")]
    ema_decay: Annotated[
        float | None, Knob("Decay of the moving average of the weights, which is validated and saved.", "(0, 1)")
    ]
    history_every: Annotated[
        int | None,
        Knob(
            "Interval of the lines of history.csv; null: a twentieth of the run, at most 50.",
            "[1, inf)",
            "optimiser steps",
            neutral=True,
        ),
    ] = None
    run_dir: Annotated[str, Knob("Run folder; set by hydra.run.dir.", neutral=True)]
    trusted_targets: Annotated[
        list[str],
        Knob(
            "Prefixes of classes beyond the white list that a _target_ may name ([my_package.]); never read from a file of a run.",
            neutral=True,
        ),
    ] = field(default_factory=list)
    stage: StageConfig
    task: TaskConfig
    spacing: SpacingConfig
    data: DataConfig
    augment: AugmentConfig
    model: Annotated[dict[str, Any], Knob("Network (_target_) with its arguments.")]
    loss: Annotated[dict[str, Any], Knob("Loss (_target_) with its arguments, or terms: a list of losses, each with its factor.")]
    optimizer: Annotated[dict[str, Any], Knob("Class of torch.optim or pytorch_optimizer (_target_) with its arguments.")]
    schedule: Annotated[dict[str, Any], Knob("Class of torch.optim.lr_scheduler (_target_) with its arguments.")]
    warmup_steps: Annotated[
        int, Knob("Steps in which the learning rate rises to that of the schedule.", "[0, inf)", "optimiser steps")
    ]
    lr_scaling: Annotated[
        LrScaling, Knob("How learning rates grow with stage.batch_size; with linear and sqrt, give the rates for a batch of one.")
    ]
    memory: MemoryConfig
    trainer: TrainerConfig
    inference: InferenceConfig
    logger: Annotated[
        dict[str, Any], Knob("Lightning logger (_target_) beside history.csv, or several by name; empty: none.", neutral=True)
    ]
    metrics: Annotated[
        dict[str, Any],
        Knob("Name: metric of monai.metrics or torchmetrics (_target_) for validation, logged as val/<name>.", neutral=True),
    ] = field(default_factory=dict)
    callbacks: Annotated[dict[str, Any], Knob("Name: callback of Lightning (_target_).")] = field(default_factory=dict)
    tags: Annotated[list[str], Knob("Tags of the run, for loggers that support them.", neutral=True)] = field(
        default_factory=list
    )
    notes: Annotated[str, Knob("Remark on the run, for loggers that support it.", neutral=True)] = ""
    debug: DebugConfig


@dataclass
class FindLrConfig(TrainConfig):
    """Keys of `find_lr`."""

    lowest_lr: Annotated[float, Knob("First learning rate.", "(0, inf)")]
    highest_lr: Annotated[float, Knob("Last learning rate.", "(0, inf)")]
    output: Annotated[str, Knob("Folder of find_lr.csv and find_lr.png.")]


@dataclass
class TuneLoaderConfig(TrainConfig):
    """Keys of `tune_loader`."""

    num_batches: Annotated[int, Knob("Batches timed for each setting.", "[1, inf)", "batches")]
    workers: Annotated[
        list[int] | None, Knob("Numbers of loader processes; null: 0, 1, 2, 4, … up to the processors.", "[0, inf)")
    ]
    prefetches: Annotated[list[int], Knob("Prefetched batches per loader process.", "[1, inf)", "batches")]


@dataclass
class ExtentConfig:
    """Extent of the input of each stage without a patch size."""

    coarse: Annotated[Triple, Knob("Extent of a scan, of the coarse stage.", "(0, inf)", "mm (z, y, x)")]
    single: Annotated[Triple, Knob("Extent of a scan, of a single stage.", "(0, inf)", "mm (z, y, x)")]
    fine: Annotated[Triple, Knob("Extent of a crop.", "(0, inf)", "mm (z, y, x)")]


@dataclass
class PlanConfig(TrainConfig):
    """Keys of `plan`."""

    shape: Annotated[
        Shape | None, Knob("Sample; null: stage.patch_size, spacing.size or extent_mm.", "[1, inf)", "voxels (D, H, W)")
    ]
    extent_mm: ExtentConfig
    validation_shape: Annotated[
        Shape | None,
        Knob(
            "Largest validation case; null: spacing.size, `shape` if stage.patch_size is null, or extent_mm.",
            "[1, inf)",
            "voxels (D, H, W)",
        ),
    ]
    measure: Annotated[
        bool, Knob("Measure this machine, to predict peak memory and seconds of a run; false: only count tensors.")
    ]
    fit_gib: Annotated[
        float | None, Knob("Find the fastest switches whose peak fits into this memory; null: none.", "(0, inf)", "GiB")
    ]
    max_seconds: Annotated[float | None, Knob("With fit_gib: largest duration of a step; null: any.", "(0, inf)", "s")]
    allow: Annotated[Allow, Knob("With fit_gib: what the switches may change, see docs/memory.md.")]
    compute: Annotated[bool, Knob("Run the step on the CPU and count its tensors; slower, with the same numbers.")]
    largest_batch: Annotated[bool, Knob("Also find the largest stage.batch_size that fits into memory.budget_gib.")]
    output: Annotated[Text, Knob("JSON file for the printed numbers.")]


@dataclass
class LadderConfig(PlanConfig):
    """Keys of `ladder`."""

    timed_steps: Annotated[
        int, Knob("Timed steps after one warm-up step, of which the fastest counts; 0: count bytes only.", "[0, inf)", "steps")
    ]
    peers: Annotated[
        bool, Knob("Also measure the networks of nnU-Net and MONAI, in fp32 and as they train, in an environment of their own.")
    ]
    peers_env: Annotated[str, Knob("Folder of the environment of `peers`; made on first use.")]
    train: Annotated[bool, Knob("Also train each row for `steps` and print its Dice.")]
    networks: Annotated[
        dict[str, list[str]],
        Knob("Name of a network: its arguments. Each network is a row of its own, without the arguments of `rows`."),
    ]
    rows: Annotated[dict[str, list[str]], Knob("Name of a row: arguments that it adds to those of the rows above it.")]


@dataclass
class StageArgumentsConfig:
    """Arguments of `train`, by stage."""

    coarse: Annotated[list[str], Knob("Arguments of the coarse stage.")]
    fine: Annotated[list[str], Knob("Arguments of the fine stage.")]


@dataclass
class CompareSpacingConfig(TrainConfig):
    """Keys of `compare_spacing`."""

    output: Annotated[str, Knob("Folder of comparison.{csv,md,png} and of one folder per row; finished rows are kept.")]
    stages: StageArgumentsConfig
    rows: Annotated[dict[str, StageArgumentsConfig], Knob("Name of a row: arguments of each stage.")]


@dataclass
class TimeToDiceConfig(TrainConfig):
    """Keys of `time_to_dice`."""

    output: Annotated[
        str, Knob("Folder of time_to_dice.{csv,md} and of one folder per row; the same command with this folder resumes.")
    ]
    metric: Annotated[Metric, Knob("Column of history.csv that must reach the target.")]
    target_dice: Annotated[float, Knob("Dice that ends a row.", "(0, 1]")]
    max_minutes: Annotated[float, Knob("Time after which a row is stopped.", "(0, inf)", "CPU minutes")]
    max_ratio: Annotated[float, Knob("Multiple of the first row's time after which a row is stopped.", "(0, inf)")]
    rows: Annotated[dict[str, list[str]], Knob("Name of a row: its arguments of `train`.")]


@dataclass
class PrepareConfig:
    """Keys of `prepare`."""

    task: TaskConfig
    data: DataConfig
    spacings: Annotated[dict[str, SpacingConfig], Knob("Target grids of the cache.")]
    output: Annotated[str, Knob("Folder of audit.csv and audit.png.")]


@dataclass
class ImportConfig:
    """Keys of `import`."""

    input: Annotated[str, Knob("Folder of a data set, or a datalist (.json).")]
    output: Annotated[str, Knob("Folder of cases.csv and task.yaml.")]
    format: Annotated[ImportFormat | None, Knob("Layout of the data set; null: detected from the folder.")]
    labels: Annotated[
        Any, Knob("Labels to keep, [a,b], or new labels merged from them, {lungs: [left_lung,right_lung]}; null: all.")
    ]
    missing: Annotated[
        MissingStructure,
        Knob("A structure that some cases lack: refuse stops, absent states that these patients do not have it."),
    ]


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
    coarse: Annotated[
        Any,
        Knob(
            "Checkpoint or .safetensors of the coarse or single stage, or a [list] to average; null: the included lung weights."
        ),
    ]
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
    inference: PredictInferenceConfig


@dataclass
class ExportConfig:
    """Keys of `export`."""

    checkpoint: Annotated[str, Knob("Checkpoint or .safetensors of one stage.")]
    output: Annotated[str, Knob("model.onnx, or model.xml (OpenVINO).")]
    trusted_targets: Annotated[
        list[str], Knob("Prefixes of classes beyond the white list that the checkpoint may name ([my_package.]).")
    ]


@dataclass
class EvaluateConfig:
    """Keys of `evaluate`."""

    pred: Annotated[str, Knob("Folder of label maps named after the cases.")]
    ref: Annotated[str, Knob("Case table, or folder of label maps.")]
    output: Annotated[str, Knob("Folder of the scores.")]
    split: Annotated[Text, Knob("With a case table: this part only (train, val, test).")]
    pictures: Annotated[bool, Knob("Draw overlays and viewers.")]
    num_pictures: Annotated[
        int,
        Knob("Overlays in report.html, the worst cases first; it links to the others.", "[0, inf)", "pictures of about 0.1 MB"),
    ]
    num_viewers: Annotated[
        int,
        Knob(
            "Viewers with the reference (viewers/), the worst cases first; report.html links to them.",
            "[0, inf)",
            "files of up to 12 MB",
        ),
    ]
    baseline: Annotated[
        Text, Knob("Folder of scores of another evaluation: report.html has the differences on the same cases; null: none.")
    ]
    metrics: Annotated[
        dict[str, Any], Knob("Name: metric of monai.metrics or torchmetrics (_target_), scored for each region beside ours.")
    ]
    trusted_targets: Annotated[
        list[str], Knob("Prefixes of classes that metrics may name beyond the white list, such as my_package.")
    ]
    task: TaskConfig
    data: LabelsConfig


@dataclass(kw_only=True)
class PhantomsConfig(PhantomCountsConfig):
    """Keys of `phantom`."""

    output: Annotated[str, Knob("Folder of the scans and their case table.")]
    task: TaskConfig
    data: Annotated[dict[str, Any] | None, Knob("Accepted because files of tasks set it; the scans do not depend on it.")] = None


@dataclass
class ReportConfig:
    """Keys of `report`."""

    runs: Annotated[str, Knob("Folder with runs at or below it: a multirun, a search, or any other.")]
    output: Annotated[Text, Knob("Folder of report.html and report.csv; null: `runs`.")]
    num_pictures: Annotated[
        int, Knob("Overlays of validation cases, the best runs first.", "[0, inf)", "pictures of about 0.1 MB")
    ]
    baseline: Annotated[
        Text,
        Knob("Run whose Dice on the same validation cases the others are compared with: its name in report.csv; null: none."),
    ] = None


@dataclass
class WatchConfig:
    """Keys of `watch`."""

    run: Annotated[
        str, Knob("Run folder, or folder of runs (shows the newest); `medseg watch <folder>` is short for run=<folder>.")
    ]
    every_s: Annotated[float, Knob("Interval of the readings.", "(0, inf)", "s")]


@dataclass
class RecipeConfig:
    """Experiments that train a cascade."""

    cases: Annotated[str, Knob("Case table (CSV), or folder of a data set in a known layout.")]
    output: Annotated[str, Knob("Folder of the results; the same command with this folder resumes.")]
    coarse: Annotated[
        Any,
        Knob("Experiment of the coarse stage (conf/experiment), or a [list]: each starts from the weights of the one before."),
    ]
    fine: Annotated[Any, Knob("Like coarse, for the fine stage.")]
    pretrain_coarse: Annotated[Text, Knob("Experiment on synthetic scans for the initial weights; null: fresh weights.")]
    pretrain_fine: Annotated[Text, Knob("Like pretrain_coarse, for the fine stage.")]


@dataclass
class CrossValidateConfig(RecipeConfig):
    """Keys of `cross_validate`."""

    num_folds: Annotated[int, Knob("Folds, by patient.", "[2, inf)")]
    pieces: Annotated[
        bool,
        Knob(
            "Also score partial scans: apices, middle and bases of the organs, the slices above and below them, halves of the "
            "chest with one lung each."
        ),
    ]
    diseased: Annotated[bool, Knob("Also score a copy of each scan with disease painted into its lungs.")]
    task: TaskConfig
    data: LabelsConfig


@dataclass
class MakeWeightsConfig(RecipeConfig):
    """Keys of `make_weights`."""

    runs: Annotated[
        str,
        Knob("Run folders; finished runs are reused, so cross_validate and make_weights share pretraining on synthetic scans."),
    ]


@dataclass
class DemoConfig:
    """Keys of `demo`."""

    output: Annotated[str, Knob("Folder of all results.")]


# Schemas of classes: keys that every class of an extension point has, and all keys of a class of ours.
POINT_SCHEMAS: dict[str, type] = {"model": NetworkConfig, "loss": LossConfig}
CLASS_SCHEMAS: dict[str, type] = {UNET: UNetConfig, DICE_CE: DiceCeConfig}


def schema_defaults(schema: type) -> dict[str, Any]:
    """Collect the defaults of a schema by key, as Hydra composes them before the files of `conf/`; extension points are open nodes."""
    found: dict[str, Any] = {}
    hints = get_type_hints(schema)
    for one in fields(schema):
        if one.name in (*EXTENSION_KEYS, *EXTENSION_MAPS):
            found[one.name] = ExtensionNode()
        elif is_dataclass(hints[one.name]):
            found |= {one.name: inner} if (inner := schema_defaults(cast(type, hints[one.name]))) else {}
        elif one.default is not MISSING:
            found[one.name] = one.default
        elif one.default_factory is not MISSING:
            found[one.name] = one.default_factory()
    return found


# Named in the defaults list of the file of each root: a key that the files do not contain can be overridden like any other.
for root in (TrainConfig, PrepareConfig, EvaluateConfig, CrossValidateConfig):
    ConfigStore.instance().store(f"{root.__name__.removesuffix('Config').lower()}_schema", schema_defaults(root))
