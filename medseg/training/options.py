"""Keys of the groups `trainer` and `debug`."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from medseg.config.knob import Knob
from medseg.memory.options import Accelerator

LrScaling = StrEnum("LrScaling", ["none", "linear", "sqrt"])
Strategy = StrEnum("Strategy", ["auto", "ddp"])
Profiler = StrEnum("Profiler", ["none", "simple", "torch"])
ClipBy = StrEnum("ClipBy", ["norm", "value"])
Metric = StrEnum("Metric", ["val_dice", "val_dice_worst"])  # columns of history.csv


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
    # Absent from older run folders.
    sync_batchnorm: Annotated[bool, Knob("With model.norm=batch: statistics over the samples of all ranks (GPU).")] = False
    clip_by: Annotated[ClipBy, Knob("What gradient_clip bounds: the norm of the whole gradient, or each of its values.")] = (
        ClipBy.norm
    )
    gpus: Annotated[
        list[int] | None,
        Knob("Indices of the GPUs to use; trainer.devices=[1] means devices=1 gpus=[1].", "[0, inf)", neutral=True),
    ] = None


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
