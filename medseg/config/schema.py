"""The typed configuration: one dataclass per group; types only, every value stands in `conf/`.

The composed configuration is merged into one of the roots at the end of this file (`check.py`), which refuses unknown keys, wrong types and
missing values, however they came in. A tuple's length is part of its type. Leaves that belong to other libraries (`optimizer`, `schedule`,
`logger`) are plain mappings with a `_target_`, checked against the white list.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


class StageName(Enum):
    """The two stages of the cascade."""

    coarse = "coarse"
    fine = "fine"


class RegionMode(Enum):
    """How one model serves several regions; see `medseg.models.regional`."""

    mirrored = "mirrored"
    separate = "separate"
    side_input = "side_input"


class RegionFrom(Enum):
    """Where the fine stage's training boxes come from."""

    reference = "reference"
    coarse = "coarse"


class Side(Enum):
    """The patient's side."""

    left = "left"
    right = "right"


class SpacingStrategy(Enum):
    """What grid a stage works on; see docs/SPACING.md."""

    isotropic = "isotropic"
    anisotropic = "anisotropic"
    dataset_median = "dataset_median"
    dataset_mean = "dataset_mean"
    native = "native"
    fixed_size = "fixed_size"
    fixed_resolution = "fixed_resolution"
    multi_scale = "multi_scale"


class SpacingDraw(Enum):
    """How `multi_scale` draws the spacing of a training sample; see `medseg.data.spacings`."""

    even = "even"
    tail = "tail"


class Resampling(Enum):
    """The filter that brings a scan to the grid of a stage; see `medseg.preprocess.resample`."""

    antialiased = "antialiased"
    linear = "linear"
    cubic = "cubic"


class Block(Enum):
    """The building block of the network; see `medseg.models.blocks`."""

    plain = "plain"
    residual = "residual"
    bottleneck = "bottleneck"


class Stem(Enum):
    """How the input enters the network; see `medseg.models.unet`."""

    conv = "conv"
    strided = "strided"
    space_to_depth = "space_to_depth"


class Norm(Enum):
    """Normalisation layer."""

    instance = "instance"
    group = "group"
    batch = "batch"


class Precision(Enum):
    """Number format of the forward and backward pass; weights stay fp32."""

    fp32 = "fp32"
    tf32 = "tf32"
    bf16 = "bf16"
    fp16 = "fp16"


class LrScaling(Enum):
    """How `optimizer.lr`, the rate for one sample per step, grows with `stage.batch_size`."""

    none = "none"
    linear = "linear"
    sqrt = "sqrt"


class Accelerator(Enum):
    """Device of a run; auto takes a GPU where there is one."""

    auto = "auto"
    cpu = "cpu"
    gpu = "gpu"


class Strategy(Enum):
    """How ranks work together."""

    auto = "auto"
    ddp = "ddp"
    fsdp = "fsdp"


class Profiler(Enum):
    """Lightning's profilers."""

    none = "none"
    simple = "simple"


class Detail(Enum):
    """Size of the phantom scans: small (2 to 3 mm voxels, seconds a case) or full (0.6 to 1 mm in plane)."""

    small = "small"
    full = "full"


@dataclass
class RegionConfig:
    """One region of interest of a task."""

    labels: list[str]
    side: Side | None


@dataclass
class TaskConfig:
    """What is segmented."""

    name: str
    labels: dict[str, int]
    regions: dict[str, RegionConfig]
    window_hu: tuple[float, float]
    least_hu: float | None = None


@dataclass
class SpacingConfig:
    """The grid that a stage works on."""

    target_spacing_mm: tuple[float, float, float] | None
    # Run folders from before there was a choice name none of these.
    strategy: SpacingStrategy = SpacingStrategy.isotropic
    size: tuple[int, int, int] | None = None
    resampling: Resampling = Resampling.antialiased
    range_mm: tuple[float, float] | None = None
    draw: SpacingDraw | None = None


@dataclass
class StageConfig:
    """Input, region and validation of a stage."""

    name: StageName
    patch_size: tuple[int, int, int] | None
    batch_size: int
    max_voxels: int | None
    slab_share: float | None
    boundary_share: float | None
    elsewhere_share: float | None
    region_mode: RegionMode | None
    region_margin_mm: float | None
    region_from: RegionFrom | None
    box_jitter_mm: float | None
    coarse: str | None
    validate_every: int
    patience: int | None


@dataclass
class PhantomConfig:
    """The embedded data set."""

    folder: str
    detail: Detail
    seed: int
    num_train: int
    num_val: int
    num_test: int
    num_extra: int


@dataclass
class DataConfig:
    """Cases, their labels, the split and the cache."""

    cases: str | None
    labels_column: str
    label_values: dict[str, Any]
    hu_slope: float
    hu_offset: float
    ignore_findings: list[str]
    cache: str
    fold: Any
    num_folds: int
    val_patients: list[str]
    test_patients: list[str]
    phantoms: PhantomConfig
    phantom_share: float
    num_workers: int
    prefetch: int
    pin_memory: bool | None


@dataclass
class LabelsConfig:
    """Where a reference lies and what its values mean."""

    labels_column: str
    label_values: dict[str, Any]


@dataclass
class AugmentConfig:
    """What may happen to a training sample; see `medseg.data.augment.Augmentation`."""

    enabled: bool
    flip_axes: list[int]
    affine_probability: float
    rotation_deg: tuple[float, float, float]
    scale_range: tuple[float, float]
    shear_max: float
    translation_mm: tuple[float, float, float]
    blur_probability: float
    blur_sigma_mm: tuple[float, float]
    low_resolution_probability: float
    low_resolution_mm: tuple[float, float]
    low_resolution_all_axes_probability: float
    noise_probability: float
    noise_sd: tuple[float, float]
    contrast_probability: float
    contrast_range: tuple[float, float]
    brightness_probability: float
    brightness_max: float
    gamma_probability: float
    gamma_range: tuple[float, float]
    window_shift_hu: float
    truncate_probability: float
    truncate_max_fraction: float
    narrow_probability: float
    narrow_max_fraction: float
    circle_probability: float
    circle_radius_range: tuple[float, float]


@dataclass
class ModelConfig:
    """The network."""

    width: int
    depth: int
    block: Block
    blocks_per_level: list[int]
    stem: Stem
    refine: int
    norm: Norm
    device_map: Any


@dataclass
class MemoryConfig:
    """Switches that are applied to the network from outside."""

    precision: Precision
    checkpointing: Any
    accumulate: int
    offload: bool
    channels_last: bool
    compile: bool
    cudnn_benchmark: bool
    budget_gib: float | None


@dataclass
class TrainerConfig:
    """Devices and ranks."""

    accelerator: Accelerator
    devices: int
    num_nodes: int
    strategy: Strategy
    threads: int | None
    gradient_clip: float | None
    # Run folders from before there was a choice do not name it.
    sync_batchnorm: bool = False


@dataclass
class LossConfig:
    """Dice and cross-entropy."""

    dice_weight: float
    ce_weight: float
    include_background: bool
    batch_dice: bool


@dataclass
class DebugConfig:
    """Helpers that cost time; said aloud when on."""

    anomaly: bool
    overfit: bool
    fast: bool
    profiler: Profiler


@dataclass
class InferenceConfig:
    """How a trained stage is run on a whole case."""

    tile_size: tuple[int, int, int] | None
    overlap: float


@dataclass
class PredictInferenceConfig(InferenceConfig):
    """What only prediction can choose."""

    budget_gib: float
    tta: bool


@dataclass
class TrainConfig:
    """Root of `train` and of the configuration in a run folder."""

    name: str
    seed: int
    steps: int
    resume: str | None
    start: bool
    checkpoint_every: int | None
    retry_failed: bool
    init_from: str | None
    ema_decay: float | None
    run_dir: str
    stage: StageConfig
    task: TaskConfig
    spacing: SpacingConfig
    data: DataConfig
    augment: AugmentConfig
    model: ModelConfig
    loss: LossConfig
    optimizer: dict[str, Any]
    schedule: dict[str, Any]
    warmup_steps: int
    lr_scaling: LrScaling
    memory: MemoryConfig
    trainer: TrainerConfig
    inference: InferenceConfig
    logger: dict[str, Any]
    debug: DebugConfig


@dataclass
class FindLrConfig(TrainConfig):
    """Root of `find_lr`."""

    lowest_lr: float
    highest_lr: float
    output: str


@dataclass
class TuneLoaderConfig(TrainConfig):
    """Root of `tune_loader`."""

    num_batches: int
    workers: list[int] | None
    prefetches: list[int]


@dataclass
class ExtentConfig:
    """Size of what each stage sees whole."""

    coarse: tuple[float, float, float]
    fine: tuple[float, float, float]


@dataclass
class PlanConfig(TrainConfig):
    """Root of `plan`."""

    shape: tuple[int, int, int] | None
    extent_mm: ExtentConfig
    compute: bool
    largest_batch: bool
    output: str | None


@dataclass
class LadderConfig(PlanConfig):
    """Root of `ladder`."""

    timed_steps: int
    peers: bool
    peers_env: str
    train: bool
    rows: dict[str, list[str]]


@dataclass
class StageArgumentsConfig:
    """Arguments of `train`, by stage."""

    coarse: list[str]
    fine: list[str]


@dataclass
class CompareSpacingConfig(TrainConfig):
    """Root of `compare_spacing`."""

    output: str
    stages: StageArgumentsConfig
    rows: dict[str, StageArgumentsConfig]


@dataclass
class PrepareConfig:
    """Root of `prepare`."""

    task: TaskConfig
    data: DataConfig
    spacings: dict[str, SpacingConfig]
    output: str


@dataclass
class RangeConfig:
    """The checkpoints for scans whose coarsest spacing lies in a range; null takes those of `predict`."""

    range_mm: tuple[float, float]
    coarse: Any = None
    fine: Any = None


@dataclass
class PredictConfig:
    """Root of `predict`."""

    input: str
    output: str
    coarse: Any
    fine: Any
    by_spacing: dict[str, RangeConfig] | None
    split: str | None
    series: str | None
    hu_slope: float
    hu_offset: float
    accelerator: Accelerator
    threads: int | None
    precision: Precision | None
    overwrite: bool
    inference: PredictInferenceConfig


@dataclass
class EvaluateConfig:
    """Root of `evaluate`."""

    pred: str
    ref: str
    output: str
    split: str | None
    pictures: bool
    task: TaskConfig
    data: LabelsConfig


@dataclass
class PhantomsConfig:
    """Root of `phantom`."""

    output: str
    detail: Detail
    seed: int
    num_train: int
    num_val: int
    num_test: int


@dataclass
class ReportConfig:
    """Root of `report`."""

    runs: str
    output: str | None
    num_pictures: int


@dataclass
class CrossValidateConfig:
    """Root of `cross_validate`."""

    cases: str
    output: str
    num_folds: int
    coarse: str
    fine: str
    pretrain_coarse: str | None
    pretrain_fine: str | None
    pieces: bool
    task: TaskConfig
    data: LabelsConfig


@dataclass
class MakeWeightsConfig:
    """Root of `make_weights`."""

    cases: str
    output: str
    runs: str
    coarse: str
    fine: str
    pretrain_coarse: str | None
    pretrain_fine: str | None


@dataclass
class DemoConfig:
    """Root of `demo`."""

    output: str
