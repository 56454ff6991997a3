"""Schema of each command: options of the packages, and keys that only the command has.

The values are in `conf/`; a few keys at the end of a class also have a default here, for code that
builds the class without Hydra. `check.py` merges the values that Hydra composed into the dataclass
of the command, such as `TrainConfig`. It refuses unknown keys, wrong types, missing values and
numbers outside their range, whatever their source. A tuple's length is part of its type. Extension
points (`model`, `optimizer`, `loss`, `schedule`, `logger`, …) are mappings with a `_target_`, see
`medseg.targets`; some classes of ours have a schema in `CLASS_SCHEMAS`. `--help` of a command
prints its keys with the documentation that stands beside them here.
"""

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum, StrEnum
from typing import Annotated, Any, cast, get_type_hints

from hydra.core.config_store import ConfigStore

from medseg.data.options import DataOptions, LabelsOptions, PhantomCountsOptions, StageName
from medseg.geometry.sizes import Shape
from medseg.knob import Knob, Text, Triple
from medseg.losses.options import DICE_CE, DiceCeOptions, LossOptions
from medseg.models.options import UNET, NetworkOptions, UNetOptions
from medseg.prediction.options import PredictConfig, as_texts, text_clashes
from medseg.preprocess.options import SpacingOptions
from medseg.targets import EXTENSION_KEYS, EXTENSION_MAPS, ExtensionNode
from medseg.task_options import Modality, TaskOptions
from medseg.training.options import Metric, TrainConfig, TrainerOptions

# What the switches that `plan` chooses may change, see `medseg.planning.choose`.
Allow = StrEnum("Allow", ["same_result", "same_expectation", "other_run"])
# Layouts of data sets, see docs/import.md.
ImportFormat = StrEnum(
    "ImportFormat", ["nnunet", "msd", "totalsegmentator", "luna16", "pairs", "dicom"]
)
MissingStructure = StrEnum("MissingStructure", ["refuse", "absent"])


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
        list[int] | None,
        Knob("Numbers of loader processes; null: 0, 1, 2, 4, … up to the processors.", "[0, inf)"),
    ]
    prefetches: Annotated[
        list[int], Knob("Prefetched batches per loader process.", "[1, inf)", "batches")
    ]


@dataclass
class ExtentConfig:
    """Extent of the input of each stage without a patch size."""

    coarse: Annotated[
        Triple, Knob("Extent of a scan, of the coarse stage.", "(0, inf)", "mm (z, y, x)")
    ]
    single: Annotated[
        Triple, Knob("Extent of a scan, of a single stage.", "(0, inf)", "mm (z, y, x)")
    ]
    fine: Annotated[Triple, Knob("Extent of a crop.", "(0, inf)", "mm (z, y, x)")]


@dataclass
class PlanConfig(TrainConfig):
    """Keys of `plan`."""

    shape: Annotated[
        Shape | None,
        Knob(
            "Sample; null: the first that is set of stage.patch_size, spacing.size and extent_mm.",
            "[1, inf)",
            "voxels (D, H, W)",
        ),
    ]
    extent_mm: ExtentConfig
    validation_shape: Annotated[
        Shape | None,
        Knob(
            "Largest validation case; null: the first that is set of spacing.size, `shape` (if "
            "stage.patch_size is null) and extent_mm.",
            "[1, inf)",
            "voxels (D, H, W)",
        ),
    ]
    measure: Annotated[
        bool,
        Knob(
            "Measure this machine, to predict peak memory and seconds of a run; false: only count "
            "tensors."
        ),
    ]
    fit_gib: Annotated[
        float | None,
        Knob(
            "Find the fastest switches whose peak fits into this memory; null: none.",
            "(0, inf)",
            "GiB",
        ),
    ]
    max_seconds: Annotated[
        float | None, Knob("With fit_gib: largest duration of a step; null: any.", "(0, inf)", "s")
    ]
    allow: Annotated[Allow, Knob("With fit_gib: what the switches may change, see docs/memory.md.")]
    compute: Annotated[
        bool,
        Knob(
            "Compute the step on the CPU, to check the count: slow, with the same numbers; false: "
            "count without computing."
        ),
    ]
    largest_batch: Annotated[
        bool, Knob("Also find the largest stage.batch_size that fits into memory.budget_gib.")
    ]
    output: Annotated[Text, Knob("JSON file for the printed numbers.")]


@dataclass
class LadderConfig(PlanConfig):
    """Keys of `ladder`."""

    timed_steps: Annotated[
        int,
        Knob(
            "Timed steps after one warm-up step, of which the fastest counts; 0: count bytes only.",
            "[0, inf)",
            "steps",
        ),
    ]
    peers: Annotated[
        bool,
        Knob(
            "Also measure the networks of nnU-Net and MONAI, in fp32 and as they train, in an "
            "environment of their own."
        ),
    ]
    peers_env: Annotated[str, Knob("Folder of the environment of `peers`; made on first use.")]
    train: Annotated[bool, Knob("Also train each row for `steps` and print its Dice.")]
    networks: Annotated[
        dict[str, list[str]],
        Knob(
            "Name of a network: its arguments. Each network is a row of its own, without the "
            "arguments of `rows`."
        ),
    ]
    rows: Annotated[
        dict[str, list[str]],
        Knob("Name of a row: arguments that it adds to those of the rows above it."),
    ]


@dataclass
class StageArgumentsConfig:
    """Arguments of `train`, by stage."""

    coarse: Annotated[list[str], Knob("Arguments of the coarse stage.")]
    fine: Annotated[list[str], Knob("Arguments of the fine stage.")]


@dataclass
class CompareSpacingConfig(TrainConfig):
    """Keys of `compare_spacing`."""

    output: Annotated[
        str,
        Knob(
            "Folder of comparison.{csv,md,png} and of one folder per row; finished rows are kept."
        ),
    ]
    stages: StageArgumentsConfig
    rows: Annotated[
        dict[str, StageArgumentsConfig], Knob("Name of a row: arguments of each stage.")
    ]


@dataclass
class TimeToDiceConfig(TrainConfig):
    """Keys of `time_to_dice`."""

    output: Annotated[
        str,
        Knob(
            "Folder of time_to_dice.{csv,md} and of one folder per row; the same command with this "
            "folder resumes."
        ),
    ]
    metric: Annotated[Metric, Knob("Column of history.csv that must reach the target.")]
    target_dice: Annotated[float, Knob("Dice that ends a row.", "(0, 1]")]
    max_minutes: Annotated[
        float, Knob("Time after which a row is stopped.", "(0, inf)", "CPU minutes")
    ]
    max_ratio: Annotated[
        float, Knob("Multiple of the first row's time after which a row is stopped.", "(0, inf)")
    ]
    rows: Annotated[dict[str, list[str]], Knob("Name of a row: its arguments of `train`.")]


@dataclass
class PrepareConfig:
    """Keys of `prepare`."""

    task: TaskOptions
    data: DataOptions
    spacings: Annotated[dict[str, SpacingOptions], Knob("Target grids of the cache.")]
    output: Annotated[str, Knob("Folder of audit.csv and audit.png.")]


@dataclass
class ImportConfig:
    """Keys of `import`."""

    input: Annotated[str, Knob("Folder of a data set, or a datalist (.json).")]
    output: Annotated[str, Knob("Folder of cases.csv and task.yaml.")]
    format: Annotated[
        ImportFormat | None, Knob("Layout of the data set; null: detected from the folder.")
    ]
    labels: Annotated[
        Any,
        Knob(
            "Labels to keep, [a,b], or new labels merged from them, {kidneys: "
            "[left_kidney,right_kidney]}; null: all."
        ),
    ]
    missing: Annotated[
        MissingStructure,
        Knob(
            "A structure that some cases lack: refuse stops, absent states that these patients do "
            "not have it."
        ),
    ]


@dataclass
class ListConfig:
    """Keys of `list`."""

    input: Annotated[str, Knob("Folder, searched to its bottom, or DICOMDIR.")]
    output: Annotated[Text, Knob("Case table of the scans (.csv), for `predict`; null: none.")]
    modality: Annotated[Modality, Knob("What counts as a scan; other: any modality.")]
    series_pick: Annotated[
        Text,
        Knob(
            "With output: one scan of each study: thinnest, largest, or a text or pattern in its "
            "description or kernel; null: all scans."
        ),
    ]


@dataclass
class ExportConfig:
    """Keys of `export`."""

    checkpoint: Annotated[str, Knob("Checkpoint or .safetensors of one stage, or a model folder.")]
    output: Annotated[
        str,
        Knob(
            "model.onnx, or model.xml (OpenVINO); of a model folder each network gets a file, "
            "model_<name>.onnx."
        ),
    ]
    trusted_targets: Annotated[
        list[str],
        Knob(
            "Prefixes of classes beyond the white list that the checkpoint may name "
            "([my_package.])."
        ),
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
        Knob(
            "Overlays in report.html, the worst cases first; it links to the others.",
            "[0, inf)",
            "pictures of about 0.1 MB",
        ),
    ]
    num_viewers: Annotated[
        int,
        Knob(
            "Viewers with the reference (viewers/), the worst cases first; report.html links to "
            "them.",
            "[0, inf)",
            "files of up to 12 MB",
        ),
    ]
    baseline: Annotated[
        Text,
        Knob(
            "Folder of scores of another evaluation: report.html has the differences on the same "
            "cases; null: none."
        ),
    ]
    metrics: Annotated[
        dict[str, Any],
        Knob(
            "Name: metric of monai.metrics or torchmetrics (_target_), scored for each region "
            "beside ours."
        ),
    ]
    trusted_targets: Annotated[
        list[str],
        Knob(
            "Prefixes of classes that metrics may name beyond the white list, such as my_package."
        ),
    ]
    task: TaskOptions
    data: LabelsOptions


@dataclass(kw_only=True)
class PhantomsConfig(PhantomCountsOptions):
    """Keys of `phantom`."""

    output: Annotated[str, Knob("Folder of the scans and their case table.")]
    task: TaskOptions
    data: Annotated[
        dict[str, Any] | None,
        Knob("Accepted because files of tasks set it; the scans do not depend on it."),
    ] = None


@dataclass
class ReportConfig:
    """Keys of `report`."""

    runs: Annotated[
        str, Knob("Folder with runs at or below it: a multirun, a search, or any other.")
    ]
    output: Annotated[Text, Knob("Folder of report.html and report.csv; null: `runs`.")]
    num_pictures: Annotated[
        int,
        Knob(
            "Overlays of validation cases, the best runs first.",
            "[0, inf)",
            "pictures of about 0.1 MB",
        ),
    ]
    baseline: Annotated[
        Text,
        Knob(
            "Run whose Dice on the same validation cases the others are compared with: its name in "
            "report.csv; null: none."
        ),
    ] = None


@dataclass
class WatchConfig:
    """Keys of `watch`."""

    run: Annotated[
        str,
        Knob(
            "Run folder, or folder of runs (shows the newest); `medseg watch <folder>` is short "
            "for run=<folder>."
        ),
    ]
    every_s: Annotated[float, Knob("Interval of the readings.", "(0, inf)", "s")]


@dataclass
class RecipeConfig:
    """Experiments that train a cascade."""

    output: Annotated[
        str, Knob("Folder of the results; the same command with this folder resumes.")
    ]
    coarse: Annotated[
        Any,
        Knob(
            "Experiment of the coarse stage (conf/experiment), or a [list]: each starts from the "
            "weights of the one before."
        ),
    ]
    fine: Annotated[Any, Knob("Like coarse, for the fine stage.")]
    pretrain_coarse: Annotated[
        Text, Knob("Experiment on synthetic scans for the initial weights; null: fresh weights.")
    ]
    pretrain_fine: Annotated[Text, Knob("Like pretrain_coarse, for the fine stage.")]
    fine_cases: Annotated[
        Text,
        Knob("Case table of the fine stage, such as one with painted copies; null: that of cases."),
    ]

    def __post_init__(self) -> None:
        """Bring a single experiment to a list of one."""
        self.coarse = as_texts(self.coarse)
        self.fine = as_texts(self.fine)

    def clashes(self, _: str) -> Iterator[str]:
        """Yield a sentence for each stage without experiments.

        Args:
            _: Key of the group, see `medseg.config.check.check_clashes`; not needed at the root.
        """
        for key, experiments in (("coarse", self.coarse), ("fine", self.fine)):
            yield from text_clashes(key, experiments, "an experiment or a list of experiments")


@dataclass
class CrossValidateConfig(TrainConfig, RecipeConfig):
    """Keys of `cross_validate`."""

    cases: Annotated[
        Text,
        Knob(
            "Case table (CSV), or folder of a data set in a known layout; the same as data.cases."
        ),
    ]
    num_folds: Annotated[int, Knob("Folds, by patient.", "[2, inf)")]
    pieces: Annotated[
        bool,
        Knob(
            "Also score partial scans: apices, middle and bases of the organs, the slices above "
            "and below them, halves of the chest with one side each."
        ),
    ]
    diseased: Annotated[
        bool, Knob("Also score a copy of each scan with disease painted into its regions.")
    ]

    def __post_init__(self) -> None:
        """Let `cases` and `data.cases` name one table, and bring single experiments to lists."""
        # `super()` is `RecipeConfig`: `TrainConfig` has neither this method nor `clashes`.
        super().__post_init__()
        # `cases` wins where both are given.
        self.cases = self.cases or self.data.cases
        self.data.cases = self.cases

    def clashes(self, key: str) -> Iterator[str]:
        """Yield a sentence where there is nothing to divide, or where a fold is chosen already."""
        yield from super().clashes(key)
        if self.cases is None:
            yield "data.cases: cross_validate divides the cases of a table into folds; give one"
        if self.data.val_patients or self.data.fold is not None:
            yield (
                "cross_validate validates each fold in turn, but data.val_patients or data.fold "
                "chooses one part; give data.val_patients=[] data.fold=null"
            )
        if self.fine_cases is not None and self.stage.name is StageName.single:
            yield "fine_cases is the table of a fine stage, but stage=single has none; leave it out"


@dataclass
class ConfigureConfig:
    """Keys of `configure`."""

    task: TaskOptions
    data: DataOptions
    trainer: TrainerOptions
    fit_gib: Annotated[
        float,
        Knob(
            "Memory that training and prediction may take, all processes together; on a GPU: GPU "
            "memory.",
            "(0, inf)",
            "GiB",
        ),
    ]
    hours: Annotated[
        float,
        Knob("Time of the whole cross-validation, from start to end.", "(0, inf)", "hours"),
    ]
    num_folds: Annotated[int, Knob("Folds that the hours are for, by patient.", "[2, inf)")]
    num_stages: Annotated[
        int | None,
        Knob(
            "Stages: 1, or 2 for a cascade of whole scans and crops; null: 2 for a task with "
            "regions whose crops allow voxels of half the volume.",
            "[1, 2]",
        ),
    ]
    timed_steps: Annotated[
        int, Knob("Real steps that are timed before `steps` is written.", "[8, inf)", "steps")
    ]
    output: Annotated[
        str,
        Knob(
            "Folder of experiment.yaml (with coarse.yaml and fine.yaml for two stages), "
            "configure.md, configure.json and fingerprint.csv."
        ),
    ]

    def clashes(self, _: str) -> Iterator[str]:
        """Yield a sentence where there is nothing to configure for."""
        if self.data.cases is None:
            yield "data.cases: configure decides by your scans; give their case table or folder"
        if self.trainer.num_ranks > 1:
            yield "trainer: configure times one rank; choose trainer=single"


@dataclass
class MakeWeightsConfig(RecipeConfig):
    """Keys of `make_weights`."""

    cases: Annotated[str, Knob("Case table (CSV), or folder of a data set in a known layout.")]
    runs: Annotated[
        str,
        Knob(
            "Run folders; finished runs are reused, so cross_validate and make_weights share "
            "pretraining on synthetic scans."
        ),
    ]
    held_out: Annotated[
        Text,
        Knob(
            "Case table of other patients, at least 9: the bound on Dice is calibrated on them; "
            "null: it is that of cross_validate."
        ),
    ] = None


@dataclass
class DemoConfig:
    """Keys of `demo`."""

    output: Annotated[str, Knob("Folder of all results.")]


# Extension point to the schema of the keys that medseg adds to the arguments of every class there.
POINT_SCHEMAS: dict[str, type] = {"model": NetworkOptions, "loss": LossOptions}
# Class of ours to the schema of all its keys.
CLASS_SCHEMAS: dict[str, type] = {UNET: UNetOptions, DICE_CE: DiceCeOptions}


def schema_defaults(schema: type) -> dict[str, Any]:
    """Collect the defaults of a schema by key, as Hydra composes them before the files of `conf/`.

    Extension points take the keys of any class, see `ExtensionNode`. Members of enumerations become
    their names, as in YAML.
    """
    defaults: dict[str, Any] = {}
    hints = get_type_hints(schema)
    for field in fields(schema):
        if field.name in (*EXTENSION_KEYS, *EXTENSION_MAPS):
            defaults[field.name] = ExtensionNode()
        elif is_dataclass(hints[field.name]):
            group = schema_defaults(cast(type, hints[field.name]))
            if group:
                defaults[field.name] = group
        elif field.default is not MISSING:
            defaults[field.name] = plain_value(field.default)
        elif field.default_factory is not MISSING:
            defaults[field.name] = plain_value(field.default_factory())
        # Keys without a default have their value in the files of `conf/`.
    return defaults


def plain_value(value: Any) -> Any:
    """Convert a value to plain types for YAML and checkpoints: choices become their names."""
    if isinstance(value, dict):
        return {key: plain_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_value(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return value


# Hydra gets the defaults of these schemas as configurations of their own, such as `train_schema`,
# which a root file names in its defaults list (`conf/train.yaml`). A key that no file contains can
# then be overridden like any other. The root files of the other commands build on these, or contain
# all keys themselves.
for root in (TrainConfig, PrepareConfig, EvaluateConfig, PredictConfig, ConfigureConfig):
    ConfigStore.instance().store(
        f"{root.__name__.removesuffix('Config').lower()}_schema", schema_defaults(root)
    )
