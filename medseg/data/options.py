"""Keys of the groups `stage`, `data` and `augment`: cases, and how samples are drawn from them.

Each `Knob` holds the help text of a key, its allowed range and its unit; `neutral` keys do not
change the results of a run.
"""

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from medseg.geometry.sizes import Shape
from medseg.knob import Knob, Pair, Text, Triple

StageName = StrEnum("StageName", ["coarse", "fine", "single"])
RegionFrom = StrEnum("RegionFrom", ["reference", "coarse"])
Detail = StrEnum("Detail", ["small", "full"])
Scene = StrEnum("Scene", ["chest", "organs"])

BACKGROUND = "background"
"""Name in `data.label_values` of values without a label; it alone may have the value 0."""

# Keys that the fine stage needs and the other stages do not have.
FINE_KEYS = ("region_margin_mm", "region_from", "box_jitter_mm")
# Keys with which the fine stage uses the coarse stage; runs with stage=single do not record them.
CASCADE_KEYS = ("coarse", "coarse_channel", "coarse_folds")
# Keys that the fine stage does not have, and what to do there instead.
COARSE_KEYS = {
    "max_voxels": "bound crops with stage.patch_size",
    "slab_share": "the fine stage uses augment.truncate_probability",
    "side_share": "the fine stage uses augment.narrow_probability",
}


@dataclass(kw_only=True)
class StageOptions:
    """Input, region and validation of a stage."""

    name: Annotated[StageName, Knob("Stage of the cascade, or single for a task of one stage.")]
    patch_size: Annotated[
        Shape | None,
        Knob("Training patch; null: the whole volume or crop.", "[1, inf)", "voxels (D, H, W)"),
    ] = None
    batch_size: Annotated[
        int,
        Knob(
            "Samples per optimiser step, over all ranks and micro-batches.", "[1, inf)", "samples"
        ),
    ] = 1
    max_voxels: Annotated[
        int | None,
        Knob(
            "Coarse and single stage: larger volumes are cut to a random range of slices; null: "
            "never.",
            "[1, inf)",
            "voxels",
        ),
    ] = None
    slab_share: Annotated[
        float | None,
        Knob(
            "Coarse and single stage: share of samples cut to a random range of slices.", "[0, 1]"
        ),
    ] = None
    side_share: Annotated[
        float | None,
        Knob(
            "Coarse and single stage: share of samples cut to a random range of columns: half "
            "chests.",
            "[0, 1]",
        ),
    ] = None
    side_least: Annotated[
        float, Knob("With side_share: least share of the columns that is kept.", "(0, 1]")
    ] = 0.35
    boundary_share: Annotated[
        float | None,
        Knob("Share of patches that contain the region's boundary; with patch_size.", "[0, 1]"),
    ] = None
    elsewhere_share: Annotated[
        float | None, Knob("Fine stage: share of samples cut anywhere in the scan.", "[0, 1)")
    ] = None
    region_margin_mm: Annotated[
        float | None, Knob("Margin on every side of the coarse box.", "[0, inf)", "mm")
    ] = None
    region_from: Annotated[
        RegionFrom | None, Knob("Source of the training boxes; coarse needs stage.coarse.")
    ] = None
    box_jitter_mm: Annotated[
        float | None,
        Knob("Standard deviation of the shift of each box face in training.", "[0, inf)", "mm"),
    ] = None
    coarse: Annotated[
        Text, Knob("Checkpoint of the coarse stage, with region_from=coarse or coarse_channel.")
    ] = None
    coarse_channel: Annotated[
        bool, Knob("Fine stage: the network also sees the region's probability by stage.coarse.")
    ] = False
    coarse_folds: Annotated[
        list[str] | None,
        Knob(
            "With coarse_channel: checkpoints of the coarse stage, such as those of all folds; "
            "a case sees the first one that has not trained on its patient."
        ),
    ] = None
    validate_every: Annotated[
        int, Knob("Interval of validations.", "[1, inf)", "optimiser steps")
    ] = 250
    patience: Annotated[
        int | None,
        Knob(
            "Validations without improvement before the run ends; null: never.",
            "[1, inf)",
            "validations",
        ),
    ] = None

    @property
    def sees_whole_scans(self) -> bool:
        """Whether samples are cut from whole scans; else each is the crop of a region."""
        return self.name is not StageName.fine

    @property
    def for_validation(self) -> "StageOptions":
        """The options for validation: the same stage, with all other keys at their defaults.

        Its samples are whole volumes, or the crops that prediction would cut.
        """
        return StageOptions(name=self.name)

    def clashes(self, _: str) -> Iterator[str]:
        """Yield a sentence for each key that this stage does not use, and for each missing key.

        The argument, the key of the group in the configuration, is not needed here.
        """
        yield from missing_file("stage.coarse", self.coarse)
        for path in self.coarse_folds or ():
            yield from missing_file("stage.coarse_folds", path)
        if self.sees_whole_scans:
            yield from self._unused_keys()
            return
        for key, cure in COARSE_KEYS.items():
            if getattr(self, key) is not None:
                yield f"stage.{key}: only the coarse stage uses it; {cure}"
        for key in FINE_KEYS:
            if getattr(self, key) is None:
                yield f"stage.{key}: the fine stage needs a value"
        yield from self._coarse_clashes()

    def _unused_keys(self) -> Iterator[str]:
        """Yield a sentence for each key of the fine stage that another stage sets."""
        keys = [*FINE_KEYS, "elsewhere_share", *CASCADE_KEYS]
        for key in keys:
            value = getattr(self, key)
            # Not `not value`: a share or margin of 0 has been set.
            if value is None or value is False:
                continue
            yield f"stage.{key}: only the fine stage uses it; leave it out with stage={self.name}"

    def _coarse_clashes(self) -> Iterator[str]:
        """Yield a sentence where a coarse stage is missing, or is given and has no use."""
        has_folds = self.coarse_folds is not None
        # `coarse_folds` replaces `coarse`, and only the coarse channel can use it.
        allows_folds = self.coarse is None and self.coarse_channel
        if has_folds and not allows_folds:
            yield (
                "stage.coarse_folds: it stands in place of stage.coarse, with "
                "stage.coarse_channel=true; give one of the two"
            )
            return
        uses_coarse = self.region_from is RegionFrom.coarse or self.coarse_channel
        if uses_coarse and self.coarse is None and not has_folds:
            yield (
                "stage.region_from=coarse and stage.coarse_channel=true go together with a coarse "
                "stage; add stage.coarse=<checkpoint>"
            )
        if self.coarse is not None and not uses_coarse:
            yield (
                "stage.coarse: nothing uses it; "
                "add stage.region_from=coarse or stage.coarse_channel=true"
            )


@dataclass(kw_only=True)
class PhantomCountsOptions:
    """Kind and number of synthetic scans."""

    detail: Annotated[
        Detail,
        Knob(
            "Voxel size. small: 2 to 3 mm (organs: 5 mm); full: 0.6 to 1 mm in plane (organs: 1.6 "
            "mm)."
        ),
    ]
    seed: Annotated[int, Knob("Seed of the first scan.", "[0, inf)")]
    num_train: Annotated[
        int, Knob("Training scans; a run uses them only without a case table.", "[1, inf)", "scans")
    ]
    num_val: Annotated[int, Knob("Validation scans.", "[1, inf)", "scans")]
    num_test: Annotated[int, Knob("Test scans.", "[0, inf)", "scans")]
    scene: Annotated[
        Scene,
        Knob(
            "chest: CT of the chest; organs: one ellipsoid-like organ for each label of the task, "
            "in each of its channels."
        ),
    ] = Scene.chest
    own_grids: Annotated[
        bool, Knob("Scene organs: each channel after the first has a grid of its own.")
    ] = False


@dataclass(kw_only=True)
class PhantomOptions(PhantomCountsOptions):
    """Synthetic scans of a run."""

    folder: Annotated[str, Knob("Folder of the scans; they are made on first use.", neutral=True)]
    num_extra: Annotated[
        int, Knob("Scans added to the training cases of a case table.", "[0, inf)", "scans")
    ]


@dataclass(kw_only=True)
class LabelsOptions:
    """Reference labels."""

    labels_column: Annotated[str, Knob("Column of the case table with the reference.")] = "labels"
    label_values: Annotated[
        dict[str, Any],
        Knob(
            "Label name: its value or [values], or the names of its structures (masks), in the "
            "reference files; a name that "
            "is not in task.labels is background. Empty: the values of the task."
        ),
    ] = field(default_factory=dict)

    def clashes(self, _: str) -> Iterator[str]:
        """Yield a sentence for each value of `label_values` that no label can have."""
        yield from label_value_clashes(self.label_values)


@dataclass(kw_only=True)
class DataOptions(LabelsOptions):
    """Cases, their labels, the split and the cache."""

    cases: Annotated[
        Text,
        Knob(
            "Case table (CSV), or folder of a data set in a known layout (docs/import.md); null: "
            "synthetic scans."
        ),
    ]
    hu_slope: Annotated[
        float,
        Knob(
            "HU = hu_slope * value + hu_offset; columns of the case table override both.",
            "(0, inf)",
        ),
    ]
    hu_offset: Annotated[
        float,
        Knob(
            "See hu_slope; -1024 where the audit finds values stored 1024 too high.",
            "(-inf, inf)",
            "HU",
        ),
    ]
    train_trust: Annotated[
        Any,
        Knob(
            "Train only on regions with this trust, or one of a [list] (columns trust_<region>), "
            "e.g. reference; null: on all."
        ),
    ] = None
    ignore_findings: Annotated[
        list[str],
        Knob(
            "Codes of audit findings that are accepted; the column of the case table adds to them."
        ),
    ]
    cache: Annotated[str, Knob("Folder of the resampled cases.", neutral=True)]
    fold: Annotated[
        Any,
        Knob(
            "Validation fold, 0 … num_folds - 1; all: train on every case; null: the table's "
            "split, else 0."
        ),
    ]
    num_folds: Annotated[
        int, Knob("Folds, by patient; 1 only for a table that names its folds.", "[1, inf)")
    ]
    val_patients: Annotated[list[str], Knob("Patients for validation, whatever the split is.")]
    test_patients: Annotated[
        list[str], Knob("Test patients, excluded from training and validation.")
    ]
    phantoms: PhantomOptions
    phantom_share: Annotated[
        float, Knob("Share of samples drawn from the extra synthetic scans.", "(0, 1)")
    ]
    num_workers: Annotated[
        int | None,
        Knob(
            "Loader processes; samples do not depend on them. null: 1; with a GPU as many as the "
            "processors allow, at most 8.",
            "[0, inf)",
            "processes",
            neutral=True,
        ),
    ]
    prefetch: Annotated[
        int,
        Knob(
            "Batches that each loader process prepares ahead.", "[1, inf)", "batches", neutral=True
        ),
    ]
    pin_memory: Annotated[
        bool | None,
        Knob(
            "Page-locked batches, copied while the GPU computes; null: true with a GPU.",
            neutral=True,
        ),
    ]

    def clashes(self, key: str) -> Iterator[str]:
        """Yield a sentence for each contradiction between the keys of the cases."""
        yield from super().clashes(key)
        if self.cases == "":
            # An unset variable of the shell: an empty path would stand for the current folder.
            yield "data.cases: it is empty; give a case table or a folder, or null for phantoms"
        if self.cases is not None and not Path(self.cases).is_dir():
            yield from missing_file("data.cases", self.cases)
        # `isinstance` would accept True as a fold.
        is_fold = type(self.fold) is int and 0 <= self.fold < self.num_folds
        if self.fold not in (None, "all") and not is_fold:
            yield (
                f"data.fold: expected 0 … {self.num_folds - 1} (data.num_folds={self.num_folds}), "
                f"all or null, but got {self.fold}"
            )
        yield from on_both_sides(self.val_patients, self.test_patients)
        if self.train_trust is None:
            return
        trusts = self.train_trust if isinstance(self.train_trust, list) else [self.train_trust]
        are_words = bool(trusts) and all(isinstance(trust, str) for trust in trusts)
        if not are_words:
            yield (
                "data.train_trust: expected a word of the columns trust_<region>, a [list] of them "
                f"or null, but got {self.train_trust}"
            )


def label_value_clashes(label_values: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each value of `data.label_values` that is wrong or has two names.

    Args:
        label_values: Name to its value or structure, or to a list of them.
    """
    name_of_value: dict[Any, str] = {}
    for name, content in label_values.items():
        values = content if isinstance(content, list) else [content]
        for value in values:
            # `isinstance` would accept True and False. A label name of digits shows that name and
            # value were exchanged.
            if type(value) not in (int, str) or name.isdigit():
                yield (
                    f"data.label_values.{name}: a whole number or a list of them is needed "
                    "(name: value), or names of structures where labels are masks or DICOM "
                    f"objects, but got {content!r}"
                )
                continue
            if value == 0 and name.casefold() != BACKGROUND:
                yield (
                    f"data.label_values.{name}: expected values from 1, since 0 is the "
                    f"{BACKGROUND} of every label map"
                )
            other_name = name_of_value.setdefault(value, name)
            if other_name != name:
                yield (
                    f"data.label_values: {value} cannot be {other_name} and {name}; give one of "
                    f"them another value, or remove it with ~data.label_values.{other_name}"
                )


def on_both_sides(val_patients: Sequence[str], test_patients: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each patient who is both for validation and for testing."""
    # Some programs write ü as one character, others as two; both must name the same patient.
    val = {unicodedata.normalize("NFC", name) for name in val_patients}
    test = {unicodedata.normalize("NFC", name) for name in test_patients}
    for patient in sorted(val & test):
        yield (
            f"The patient {patient!r} is in data.val_patients and in data.test_patients; "
            "keep one of them"
        )


@dataclass
class AugmentOptions:
    """Random changes of a training sample, see `medseg.data.augment`."""

    enabled: Annotated[bool, Knob("Augment training samples.")]
    flip_axes: Annotated[
        list[int],
        Knob(
            "Axes of random flips: 0 = z, 1 = y, 2 = x; only with stage=fine if the task has sides."
        ),
    ]
    affine_probability: Annotated[
        float, Knob("Probability of rotation, scale, shear and shift, in one resampling.", "[0, 1]")
    ]
    rotation_deg: Annotated[
        Triple, Knob("Largest rotation.", "[0, 180]", "degrees about (z, y, x)")
    ]
    scale_range: Annotated[Pair, Knob("Smallest and largest scale factor.", "(0, inf)")]
    shear_max: Annotated[float, Knob("Largest shear.", "[0, 1)")]
    translation_mm: Annotated[Triple, Knob("Largest shift.", "[0, inf)", "mm (z, y, x)")]
    blur_probability: Annotated[float, Knob("Probability of a Gaussian blur.", "[0, 1]")]
    blur_sigma_mm: Annotated[
        Pair, Knob("Range of the standard deviation of the blur.", "(0, inf)", "mm")
    ]
    low_resolution_probability: Annotated[
        float, Knob("Probability of thick slices or coarse voxels.", "[0, 1]")
    ]
    low_resolution_mm: Annotated[
        Pair, Knob("Range of the spacing of thick slices or coarse voxels.", "(0, inf)", "mm")
    ]
    low_resolution_all_axes_probability: Annotated[
        float, Knob("Share of the low-resolution samples that are coarse along all axes.", "[0, 1]")
    ]
    noise_probability: Annotated[float, Knob("Probability of Gaussian noise.", "[0, 1]")]
    noise_sd: Annotated[
        Pair,
        Knob(
            "Range of the standard deviation of the noise; the window is mapped to [-1, 1].",
            "[0, inf)",
        ),
    ]
    contrast_probability: Annotated[float, Knob("Probability of a contrast change.", "[0, 1]")]
    contrast_range: Annotated[Pair, Knob("Range of the contrast factor.", "(0, inf)")]
    brightness_probability: Annotated[float, Knob("Probability of a brightness change.", "[0, 1]")]
    brightness_max: Annotated[
        float, Knob("Largest brightness change; the window is mapped to [-1, 1].", "[0, 2]")
    ]
    gamma_probability: Annotated[float, Knob("Probability of a gamma change.", "[0, 1]")]
    gamma_range: Annotated[Pair, Knob("Range of gamma.", "(0, inf)")]
    window_shift_hu: Annotated[float, Knob("Largest shift of each window bound.", "[0, inf)", "HU")]
    truncate_probability: Annotated[
        float,
        Knob(
            "Probability of a partial scan: slices at one end are replaced by the last remaining "
            "slice.",
            "[0, 1]",
        ),
    ]
    truncate_max_fraction: Annotated[
        float, Knob("Largest share of the slices that is replaced.", "[0, 1)")
    ]
    narrow_probability: Annotated[
        float, Knob("Probability of a field of view that cuts one side.", "[0, 1]")
    ]
    narrow_max_fraction: Annotated[
        float, Knob("Largest share of the width that is removed.", "[0, 1)")
    ]
    circle_probability: Annotated[float, Knob("Probability of a round field of view.", "[0, 1]")]
    circle_radius_range: Annotated[
        Pair,
        Knob(
            "Range of the radius of the round field of view, as a share of half the longer side.",
            "(0, inf)",
        ),
    ]
    missing_probability: Annotated[
        float,
        Knob(
            "Probability that one of the labelled organs full of air is replaced by fluid or fat "
            "(background); the only such organ of a sample is never replaced.",
            "[0, 1]",
        ),
    ] = 0.0
    disease_probability: Annotated[
        float,
        Knob(
            "Probability of disease painted into a labelled organ full of air, whose outline "
            "stays.",
            "[0, 1]",
        ),
    ] = 0.0
    disease_each_lung: Annotated[
        bool,
        Knob(
            "Draw disease for each labelled organ full of air, so that several may be painted; "
            "false: one of the sample is."
        ),
    ] = False
    disease_kinds: Annotated[
        list[str],
        Knob(
            "Up to three lesions are painted, each of one of these kinds: consolidation, "
            "ground_glass, mass, collapse."
        ),
    ] = field(default_factory=lambda: ["consolidation", "ground_glass", "mass", "collapse"])
    fluid_probability: Annotated[
        float,
        Knob(
            "Probability that pleural fluid (background) is painted beside a labelled organ full "
            "of air, drawn for each.",
            "[0, 1]",
        ),
    ] = 0.0
    transforms: Annotated[
        list[Any],
        Knob(
            "Transforms in their order: effects (those of the keys above), or {_target_: class, "
            "argument: value, …}."
        ),
    ] = field(default_factory=lambda: ["effects"])
    allow_mirroring: Annotated[
        bool, Knob("Accept transforms that mirror left and right although the task has sides.")
    ] = False

    def clashes(self, _: str) -> Iterator[str]:
        """Yield a sentence for each contradiction between the keys of the augmentation."""
        if not set(self.flip_axes) <= {0, 1, 2}:
            yield f"augment.flip_axes: axes are 0 (z), 1 (y), 2 (x), but got {self.flip_axes}"
        if len(set(self.flip_axes)) < len(self.flip_axes):
            yield f"augment.flip_axes: expected each axis once, but got {self.flip_axes}"


def missing_file(key: str, path: str | None) -> Iterator[str]:
    """Yield a sentence if the file that a key names does not exist."""
    if path is not None and not Path(path).is_file():
        yield f"{key}={path}: there is no such file (relative paths start at {Path.cwd()})"
