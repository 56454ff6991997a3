"""Keys of `train`: those of its groups, and of a run as a whole."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

from medseg.data.options import AugmentOptions, DataOptions, StageOptions
from medseg.inference.options import TilingOptions
from medseg.knob import Knob, Text
from medseg.memory.options import Accelerator, MemoryOptions
from medseg.preprocess.options import SpacingOptions
from medseg.task_options import TaskOptions

LrScaling = StrEnum("LrScaling", ["none", "linear", "sqrt"])
Strategy = StrEnum("Strategy", ["auto", "ddp"])
Profiler = StrEnum("Profiler", ["none", "simple", "torch"])
ClipBy = StrEnum("ClipBy", ["norm", "value"])
Metric = StrEnum("Metric", ["val_dice", "val_dice_worst"])  # columns of history.csv


@dataclass
class TrainerOptions:
    """Devices and ranks."""

    accelerator: Annotated[
        Accelerator, Knob("Device; auto: a GPU where there is one.", neutral=True)
    ]
    devices: Annotated[
        int, Knob("Ranks of each machine, one per device.", "[1, inf)", "ranks", neutral=True)
    ]
    num_nodes: Annotated[int, Knob("Machines.", "[1, inf)", "machines", neutral=True)]
    strategy: Annotated[
        Strategy,
        Knob(
            "ddp: ranks divide the samples of a step; auto: one rank, or ddp under torchrun.",
            neutral=True,
        ),
    ]
    threads: Annotated[
        int | None,
        Knob("Torch threads on a CPU; null: all cores.", "[1, inf)", "threads", neutral=True),
    ]
    gradient_clip: Annotated[
        float | None, Knob("Bound on the gradient, see clip_by; null: no clipping.", "(0, inf)")
    ]
    sync_batchnorm: Annotated[
        bool, Knob("With model.norm=batch: statistics over the samples of all ranks (GPU).")
    ] = False
    clip_by: Annotated[
        ClipBy,
        Knob("What gradient_clip bounds: the norm of the whole gradient, or each of its values."),
    ] = ClipBy.norm
    gpus: Annotated[
        list[int] | None,
        Knob(
            "Indices of the GPUs to use; trainer.devices=[1] means devices=1 gpus=[1].",
            "[0, inf)",
            neutral=True,
        ),
    ] = None

    @property
    def num_ranks(self) -> int:
        """Ranks of all machines."""
        return self.devices * self.num_nodes

    def clashes(self, _: str) -> Iterator[str]:
        """Yield a sentence for each contradiction between devices, ranks and clipping.

        The argument, the key of the group, is not used: the sentences name `trainer` themselves.
        """
        if self.gpus is not None:
            names_one_per_rank = len(set(self.gpus)) == self.devices
            if not names_one_per_rank or self.accelerator is Accelerator.cpu:
                yield (
                    f"trainer.gpus={self.gpus}: expected {self.devices} different numbers "
                    "(trainer.devices), and trainer.accelerator other than cpu"
                )
        if self.num_ranks > 1 and self.strategy is Strategy.auto:
            yield (
                f"trainer.devices={self.devices} with trainer.strategy=auto: choose trainer=ddp "
                "for more than one rank"
            )
        if self.sync_batchnorm and self.accelerator is Accelerator.cpu:
            yield (
                "trainer.sync_batchnorm=true works on GPUs only, but trainer.accelerator=cpu; "
                "choose trainer.sync_batchnorm=false"
            )
        if self.clip_by is not ClipBy.norm and self.gradient_clip is None:
            yield (
                f"trainer.clip_by={self.clip_by.value}: there is no bound to clip by; give "
                "trainer.gradient_clip=<number>, or leave clip_by out"
            )


@dataclass
class DebugOptions:
    """Tools to find faults; they cost time, and the run prints those that are on."""

    anomaly: Annotated[
        bool, Knob("Stop at the operation that produced a NaN; several times slower.", neutral=True)
    ]
    overfit: Annotated[bool, Knob("Train on the first batch only.")]
    fast: Annotated[bool, Knob("Validate one case only.")]
    profiler: Annotated[
        Profiler,
        Knob(
            "simple: Lightning's table of times, fit-profile.txt; torch: trace of some steps, and "
            "a snapshot of a GPU's memory.",
            neutral=True,
        ),
    ]


@dataclass(kw_only=True)
class TrainConfig:
    """Keys of `train`, and of the configuration in a run folder."""

    name: Annotated[
        str, Knob("Name of the run; its folder is runs/<name>/<date_time>.", neutral=True)
    ]
    seed: Annotated[int, Knob("Seed of initial weights and samples.", "[0, 9223372036854775807]")]
    steps: Annotated[
        int,
        Knob(
            "Length of the run, whatever the number of ranks and micro-batches.",
            "[1, inf)",
            "optimiser steps",
        ),
    ]
    resume: Annotated[
        Text,
        Knob(
            "Run folder to resume from its last.ckpt; auto: the unfinished run of the same "
            "signature.",
            neutral=True,
        ),
    ]
    checkpoint_every: Annotated[
        int | None,
        Knob(
            "Interval of last.ckpt; null: at validations only.",
            "[1, inf)",
            "optimiser steps",
            neutral=True,
        ),
    ]
    retry_failed: Annotated[
        bool, Knob("A resumed multirun repeats the jobs that failed.", neutral=True)
    ]
    init_from: Annotated[
        Text,
        Knob(
            "Initial weights (fine-tuning): checkpoint, .safetensors, or model folder of nnU-Net "
            "(docs/finetune_nnunet.md)."
        ),
    ]
    ema_decay: Annotated[
        float | None,
        Knob("Decay of the moving average of the weights, which is validated and saved.", "(0, 1)"),
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
            "Prefixes of classes beyond the white list that a _target_ may name ([my_package.]); "
            "never read from a file of a run.",
            neutral=True,
        ),
    ] = field(default_factory=list)
    stage: StageOptions
    task: TaskOptions
    spacing: SpacingOptions
    data: DataOptions
    augment: AugmentOptions
    model: Annotated[dict[str, Any], Knob("Network (_target_) with its arguments.")]
    loss: Annotated[
        dict[str, Any],
        Knob(
            "Loss (_target_) with its arguments, or terms: a list of losses, each with its factor."
        ),
    ]
    optimizer: Annotated[
        dict[str, Any],
        Knob("Class of torch.optim or pytorch_optimizer (_target_) with its arguments."),
    ]
    schedule: Annotated[
        dict[str, Any], Knob("Class of torch.optim.lr_scheduler (_target_) with its arguments.")
    ]
    warmup_steps: Annotated[
        int,
        Knob(
            "Steps in which the learning rate rises to that of the schedule.",
            "[0, inf)",
            "optimiser steps",
        ),
    ]
    lr_scaling: Annotated[
        LrScaling,
        Knob(
            "How learning rates grow with stage.batch_size; with linear and sqrt, give the rates "
            "for a batch of one."
        ),
    ]
    memory: MemoryOptions
    trainer: TrainerOptions
    inference: TilingOptions
    logger: Annotated[
        dict[str, Any],
        Knob(
            "Lightning logger (_target_) beside history.csv, or several by name; empty: none.",
            neutral=True,
        ),
    ]
    metrics: Annotated[
        dict[str, Any],
        Knob(
            "Name: metric of monai.metrics or torchmetrics (_target_) for validation, logged as "
            "val/<name>.",
            neutral=True,
        ),
    ] = field(default_factory=dict)
    callbacks: Annotated[dict[str, Any], Knob("Name: callback of Lightning (_target_).")] = field(
        default_factory=dict
    )
    tags: Annotated[
        list[str], Knob("Tags of the run, for loggers that support them.", neutral=True)
    ] = field(default_factory=list)
    notes: Annotated[str, Knob("Remark on the run, for loggers that support it.", neutral=True)] = (
        ""
    )
    debug: DebugOptions


def samples_per_micro_batch(config: TrainConfig) -> int:
    """Number of samples in a micro-batch, the one that a rank computes at once."""
    return config.stage.batch_size // micro_batches_per_step(config)


def micro_batches_per_step(config: TrainConfig) -> int:
    """Number of micro-batches of an optimiser step, over all ranks."""
    return config.trainer.num_ranks * config.memory.accumulate
