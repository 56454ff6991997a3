"""Keys of the group `task`: labels, regions and channels."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from medseg.config.knob import Knob, Pair

Side = StrEnum("Side", ["left", "right"])  # of the patient
Modality = StrEnum("Modality", ["ct", "mr", "other"])
Normalise = StrEnum("Normalise", ["window", "zscore", "percentile"])  # see `medseg.preprocess.intensity`


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
