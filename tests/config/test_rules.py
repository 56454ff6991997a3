"""Rules between keys refuse a contradiction, and accept what lies beside it.

The neighbours of one rule are listed together: values are changed in a checked configuration, so a
rule is seen alone.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import hydra
import pytest

from medseg.conf_folder import conf_dir
from medseg.config.check import check_clashes, to_config
from medseg.config.schema import PrepareConfig
from medseg.data.options import RegionFrom
from medseg.errors import UserError
from medseg.memory.options import Accelerator, CompileMode, Precision
from medseg.prediction.options import PredictConfig
from medseg.preprocess.options import Fill, Resampling, SpacingDraw, SpacingOptions, SpacingStrategy
from medseg.task_options import ChannelOptions, Modality, Normalise, RegionOptions, Side
from medseg.training.notes import notes
from medseg.training.options import ClipBy, LrScaling, Strategy, TrainConfig

FILE = str(Path(__file__))
FOLDER = str(Path(__file__).parent)
COSINE = {"_target_": "torch.optim.lr_scheduler.CosineAnnealingLR", "T_max": 1000}
CYCLIC = {"_target_": "torch.optim.lr_scheduler.CyclicLR", "max_lr": 0.1}
PLAIN_SGD = {"_target_": "torch.optim.SGD", "momentum": 0.9}
MR = Modality.mr
CT_CHANNEL = {"modality": Modality.ct, "window_hu": (-1000.0, 400.0)}

Change = dict[str, Any]


@pytest.fixture(scope="module")
def checked() -> dict[str, TrainConfig]:
    """A checked configuration of each stage: the two of the lungs, and one stage of the abdomen."""
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        composed = {
            "coarse": hydra.compose("train", ["stage=coarse", "run_dir=runs/test"]),
            "fine": hydra.compose("train", ["stage=fine", "run_dir=runs/test"]),
            "single": hydra.compose("train", ["stage=single", "task=abdomen", "run_dir=runs/test"]),
        }
    return {name: to_config(config, TrainConfig) for name, config in composed.items()}


def changed(config: Any, changes: Change) -> Any:
    """Copy a configuration, with other values at dotted keys."""
    config = copy.deepcopy(config)
    for key, value in changes.items():
        group, _, name = key.rpartition(".")
        node = config
        for part in group.split(".") if group else ():
            node = node[part] if isinstance(node, dict) else getattr(node, part)
        if isinstance(node, dict):
            node[name] = value
        else:
            setattr(node, name, value)
    return config


def labels(count: int) -> dict[str, int]:
    return {f"label_{number}": number for number in range(1, count + 1)}


def regions(**labels_by_region: list[str]) -> dict[str, RegionOptions]:
    return {
        name: RegionOptions(labels=items, side=None) for name, items in labels_by_region.items()
    }


# Stage, changed values, and a part of the sentence.
REFUSED: list[tuple[str, Change, str]] = [
    # Task.
    ("single", {"task.name": ""}, "task.name=''"),
    ("single", {"task.name": "."}, "task.name='.'"),
    ("single", {"task.name": "a\\b"}, "task.name='a"),
    ("single", {"task.name": "a\0b"}, "task.name='a"),
    ("single", {"task.labels": {}}, "task.labels: expected the values 1, 2"),
    ("single", {"task.labels": {"a": 0, "b": 1}}, "task.labels: expected the values 1, 2"),
    ("single", {"task.labels": {"a": 2}}, "task.labels: expected the values 1, 2"),
    ("single", {"task.labels": {"a": 1, "b": 1}}, "task.labels: expected the values 1, 2"),
    (
        "single",
        {"task.labels": labels(255), "task.codes": None, "task.colours": None},
        "task.labels: at most 254",
    ),
    (
        "coarse",
        {"task.ignore_label": 1},
        "task.ignore_label=1 is the value of a label; choose a value from 3 to 255",
    ),
    ("coarse", {"task.ignore_label": 2}, "task.ignore_label=2 is the value of a label"),
    ("coarse", {"task.window_hu": (400.0, 400.0)}, "task.window_hu: expected a lower bound below"),
    (
        "coarse",
        {"task.window_hu": None, "task.channels": []},
        "task.channels and task.window_hu: expected one of the two",
    ),
    (
        "coarse",
        {"task.window_hu": None, "task.channels": [ChannelOptions(modality=MR)]},
        "task.channels.0: expected a window_hu",
    ),
    (
        "coarse",
        {
            "task.window_hu": None,
            "task.channels": [
                ChannelOptions(**CT_CHANNEL),
                ChannelOptions(MR, None, Normalise.window),
            ],
        },
        "task.channels.1: expected a window_hu",
    ),
    (
        "coarse",
        {
            "task.window_hu": None,
            "task.channels": [ChannelOptions(Modality.ct, (0.0, 1.0), Normalise.zscore)],
        },
        "task.channels.0: expected a window_hu",
    ),
    (
        "coarse",
        {"task.window_hu": None, "task.channels": [ChannelOptions(Modality.other, (0.0, 1.0))]},
        "task.channels.0.normalise=window: values of modality=other",
    ),
    (
        "coarse",
        {"task.window_hu": None, "task.channels": [ChannelOptions(Modality.ct, (1.0, 1.0))]},
        "task.channels.0.window_hu: expected a lower bound",
    ),
    (
        "coarse",
        {"task.volume_ml": {"left_lung": [5, 5]}},
        "task.volume_ml.left_lung: expected two increasing",
    ),
    (
        "coarse",
        {"task.volume_ml": {"left_lung": [-1, 5]}},
        "task.volume_ml.left_lung: expected two increasing",
    ),
    (
        "coarse",
        {"task.volume_ml": {"left_lung": [1, 2, 3]}},
        "task.volume_ml.left_lung: expected two increasing",
    ),
    (
        "coarse",
        {"task.volume_ml": {"left_lung": [1, "2"]}},
        "task.volume_ml.left_lung: expected two increasing",
    ),
    (
        "coarse",
        {"task.volume_ml": {"left_lung": 5}},
        "task.volume_ml.left_lung: expected two increasing",
    ),
    (
        "coarse",
        {"task.codes": {"left_lung": ["1" * 17, "Lung"]}},
        "task.codes.left_lung: expected [code",
    ),
    (
        "coarse",
        {"task.codes": {"left_lung": ["1", "x" * 65]}},
        "task.codes.left_lung: expected [code",
    ),
    ("coarse", {"task.codes": {"left_lung": ["1", ""]}}, "task.codes.left_lung: expected [code"),
    ("coarse", {"task.codes": {"left_lung": ["1", 2]}}, "task.codes.left_lung: expected [code"),
    (
        "coarse",
        {"task.codes": {"left_lung": ["1", "Lung", "left", "left"]}},
        "task.codes.left_lung: expected [code",
    ),
    ("coarse", {"task.codes": {"left_lung": "39607008"}}, "task.codes.left_lung: expected [code"),
    (
        "coarse",
        {"task.colours": {"left_lung": "#38bdf8a"}},
        "task.colours.left_lung: expected a colour",
    ),
    (
        "coarse",
        {"task.colours": {"left_lung": "38bdf8"}},
        "task.colours.left_lung: expected a colour",
    ),
    (
        "coarse",
        {"task.regions": regions(chest=["left_lung", "heart"])},
        "task.regions.chest.labels: ['heart'] are not",
    ),
    (
        "coarse",
        {"task.regions": regions(chest=[])},
        "task.regions.chest.labels: at least one label",
    ),
    # Paths, fold, words, blocks and devices.
    ("fine", {"stage.coarse": FOLDER, "stage.region_from": RegionFrom.coarse}, "stage.coarse="),
    ("fine", {"init_from": FOLDER}, "init_from="),
    ("fine", {"init_from": "nowhere.ckpt"}, "init_from=nowhere.ckpt: there is no such file"),
    ("fine", {"data.fold": -1}, "data.fold: expected 0 … 4"),
    ("fine", {"data.fold": 5}, "data.fold: expected 0 … 4"),
    ("fine", {"data.fold": True}, "data.fold: expected 0 … 4"),
    ("fine", {"data.fold": "none"}, "data.fold: expected 0 … 4"),
    (
        "fine",
        {"data.val_patients": ["p1", "p2"], "data.test_patients": ["p2", "p4"]},
        "The patient 'p2' is in data.val_patients and in data.test_patients; keep one of them",
    ),
    (
        "fine",
        {"data.val_patients": ["Mu\u0308ller"], "data.test_patients": ["M\u00fcller"]},
        "The patient 'M\u00fcller' is in data.val_patients and in data.test_patients",
    ),
    ("fine", {"data.train_trust": []}, "data.train_trust: expected a word"),
    ("fine", {"data.train_trust": ["reference", 1]}, "data.train_trust: expected a word"),
    ("fine", {"data.train_trust": 1}, "data.train_trust: expected a word"),
    ("fine", {"memory.checkpointing": "some"}, "memory.checkpointing: expected none, sqrt, all"),
    (
        "fine",
        {"memory.checkpointing": ["encoder", 1]},
        "memory.checkpointing: expected none, sqrt, all",
    ),
    ("fine", {"loss.dice_weight": 0.0, "loss.ce_weight": 0.0}, "at least one must be positive"),
    ("fine", {"model.device_map": "cpu"}, "model.device_map: expected null, auto"),
    ("fine", {"model.device_map": {"encoder": "cuda"}}, "model.device_map: expected null, auto"),
    ("fine", {"model.device_map": {1: "cpu"}}, "model.device_map: expected null, auto"),
    ("fine", {"model.blocks_per_level": [1, 1]}, "model.blocks_per_level: expected"),
    ("fine", {"model.stem": "conv", "model.refine": 1}, "model.refine=1: with model.stem=conv"),
    # Spacing.
    ("fine", {"spacing.strategy": SpacingStrategy.native}, "native keeps the spacing of each scan"),
    (
        "fine",
        {
            "spacing.strategy": SpacingStrategy.native,
            "spacing.target_spacing_mm": None,
            "spacing.resampling": Resampling.linear,
        },
        "spacing.resampling=linear: spacing.strategy=native resamples nothing",
    ),
    (
        "fine",
        {"spacing.strategy": SpacingStrategy.anisotropic, "spacing.target_spacing_mm": None},
        "spacing.strategy=anisotropic needs three numbers",
    ),
    (
        "fine",
        {"spacing.strategy": SpacingStrategy.fixed_resolution, "spacing.target_spacing_mm": None},
        "spacing.strategy=fixed_resolution needs three numbers",
    ),
    (
        "fine",
        {
            "spacing.strategy": SpacingStrategy.fixed_resolution,
            "spacing.target_spacing_mm": (1.0, 1.0, 2.0),
        },
        "spacing.strategy=fixed_resolution uses one spacing for all axes",
    ),
    (
        "fine",
        {"spacing.fill": Fill.pad},
        "spacing.fill=pad: only spacing.strategy=fixed_resolution",
    ),
    (
        "fine",
        {"spacing.size": (64, 64, 64)},
        "spacing.size: only spacing.strategy=fixed_size uses it",
    ),
    (
        "fine",
        {"spacing.range_mm": (1.0, 4.0)},
        "spacing.range_mm: only spacing.strategy=multi_scale uses it",
    ),
    (
        "fine",
        {"spacing.draw": SpacingDraw.even},
        "spacing.draw: only spacing.strategy=multi_scale uses it",
    ),
    (
        "fine",
        {
            "spacing.strategy": SpacingStrategy.multi_scale,
            "spacing.range_mm": (2.0, 1.0),
            "spacing.draw": SpacingDraw.even,
        },
        "spacing.range_mm: expected two increasing",
    ),
    (
        "fine",
        {
            "spacing.strategy": SpacingStrategy.multi_scale,
            "spacing.range_mm": (2.0, 2.0),
            "spacing.draw": SpacingDraw.even,
        },
        "spacing.range_mm: expected two increasing",
    ),
    *(
        (
            "fine",
            {
                "spacing.strategy": SpacingStrategy.fixed_size,
                "spacing.target_spacing_mm": None,
                "spacing.size": (64, 96, 128),
                key: size,
            },
            said,
        )
        for key, size, said in [
            (
                "stage.patch_size",
                (64, 96, 144),
                "stage.patch_size=[64, 96, 144] is larger than the whole crop",
            ),
            (
                "inference.tile_size",
                (80, 96, 128),
                "inference.tile_size=[80, 96, 128] is larger than the whole crop",
            ),
        ]
    ),
    (
        "coarse",
        {
            "spacing.strategy": SpacingStrategy.fixed_size,
            "spacing.target_spacing_mm": None,
            "spacing.size": (64, 96, 128),
            "stage.max_voxels": 64 * 96 * 128 - 1,
        },
        "spacing.size=[64, 96, 128] has more voxels than stage.max_voxels=786431 allows",
    ),
    # Sizes of network inputs: multiples of 16 for the network of this stage.
    ("fine", {"stage.patch_size": (96, 96, 104)}, "stage.patch_size: expected multiples of 16"),
    ("fine", {"stage.patch_size": (104, 96, 96)}, "stage.patch_size: expected multiples of 16"),
    ("fine", {"inference.tile_size": (96, 8, 96)}, "inference.tile_size: expected multiples of 16"),
    (
        "fine",
        {"inference.tile_size": (16, 16, 16)},
        "the deepest level of the network would have one voxel",
    ),
    # Ranks and device maps.
    (
        "fine",
        {"stage.batch_size": 2, "trainer.num_nodes": 2},
        "choose trainer=ddp for more than one rank",
    ),
    (
        "fine",
        {
            "stage.batch_size": 2,
            "trainer.devices": 2,
            "trainer.strategy": Strategy.ddp,
            "memory.accumulate": 2,
        },
        "choose a multiple of 4",
    ),
    (
        "fine",
        {
            "stage.batch_size": 2,
            "trainer.num_nodes": 2,
            "trainer.strategy": Strategy.ddp,
            "memory.accumulate": 2,
        },
        ("stage.batch_size=2 cannot be divided among 2 rank(s) × memory.accumulate=2; choose a "
         "multiple of 4"),
    ),
    (
        "fine",
        {
            "model.device_map": "auto",
            "trainer.num_nodes": 2,
            "trainer.strategy": Strategy.ddp,
            "stage.batch_size": 2,
        },
        "one rank uses all devices",
    ),
    (
        "fine",
        {"model.device_map": "auto", "memory.offload": True},
        "memory.offload=true cannot be combined",
    ),
    (
        "fine",
        {"model.device_map": {"encoder": "cpu"}, "memory.compile": True},
        "memory.compile=true cannot be combined",
    ),
    (
        "fine",
        {
            "model.device_map": {"encoder": "cuda:0"},
            "memory.precision": Precision.bf16,
            "trainer.accelerator": Accelerator.cpu,
        },
        "half precision needs devices of one kind",
    ),
    (
        "fine",
        {
            "model.device_map": {"encoder": "cpu"},
            "memory.precision": Precision.fp16,
            "trainer.accelerator": Accelerator.gpu,
        },
        "half precision needs devices of one kind",
    ),
    ("fine", {"trainer.gpus": [0, 1]}, "trainer.gpus=[0, 1]: expected 1 different numbers"),
    (
        "fine",
        {"trainer.gpus": [0], "trainer.accelerator": Accelerator.cpu},
        "trainer.accelerator other than cpu",
    ),
    (
        "fine",
        {
            "trainer.gpus": [1, 1],
            "trainer.devices": 2,
            "stage.batch_size": 2,
            "trainer.strategy": Strategy.ddp,
        },
        "trainer.gpus=[1, 1]: expected 2 different numbers",
    ),
    (
        "fine",
        {"stage.batch_size": 2, "trainer.devices": 2},
        "trainer.devices=2 with trainer.strategy=auto: choose trainer=ddp",
    ),
    # Switches that need a GPU.
    *(
        ("fine", {key: value, "trainer.accelerator": Accelerator.cpu}, said)
        for key, value, said in [
            ("memory.precision", Precision.fp16, "memory.precision=fp16 needs a GPU"),
            ("memory.precision", Precision.tf32, "memory.precision=tf32 needs a GPU"),
            ("memory.offload", True, "memory.offload=true moves activations"),
            ("data.pin_memory", True, "data.pin_memory=true speeds up"),
            ("memory.cudnn_benchmark", True, "memory.cudnn_benchmark=true chooses kernels"),
        ]
    ),
    (
        "fine",
        {
            "model.norm": "batch",
            "trainer.sync_batchnorm": True,
            "trainer.accelerator": Accelerator.cpu,
        },
        "trainer.sync_batchnorm=true works on GPUs only",
    ),
    # Optimisation.
    ("fine", {"ema_decay": 0.9981, "steps": 500}, "ema_decay=0.9981 averages over 526 steps"),
    ("fine", {"warmup_steps": 10}, "warmup_steps=10: schedule OneCycleLR sets the learning rates"),
    (
        "fine",
        {"warmup_steps": 1000, "schedule": COSINE},
        "warmup_steps=1000: the run has only steps=1000",
    ),
    (
        "fine",
        {"schedule.total_steps": 999},
        "schedule.total_steps=999: the schedule would end before the run",
    ),
    (
        "fine",
        {"schedule.total_steps": 999, "resume": "auto"},
        "schedule.total_steps=999: the schedule would end",
    ),
    ("fine", {"schedule.eta_min": 0.0051}, "schedule.eta_min=0.0051 is the lowest rate"),
    (
        "fine",
        {"schedule": {**COSINE, "eta_min": 0.006}},
        ("schedule.eta_min=0.006 is the lowest rate of the schedule, but optimizer.lr=0.005 is its "
         "highest"),
    ),
    (
        "fine",
        {"schedule": {**CYCLIC, "base_lr": 0.2}},
        "schedule.base_lr=0.2 is the lowest rate of the schedule, but schedule.max_lr=0.1",
    ),
    (
        "fine",
        {"trainer.clip_by": ClipBy.value, "trainer.gradient_clip": None},
        "there is no bound to clip by",
    ),
    (
        "fine",
        {"optimizer": PLAIN_SGD, "lr_scaling": LrScaling.linear},
        "lr_scaling=linear: optimizer.lr is missing",
    ),
    (
        "fine",
        {"optimizer": PLAIN_SGD, "lr_scaling": LrScaling.sqrt},
        "lr_scaling=sqrt: optimizer.lr is missing",
    ),
    # Flips, and keys of one stage.
    ("fine", {"augment.flip_axes": [0, 2]}, "swaps the sides that task=lungs distinguishes"),
    (
        "fine",
        {"augment.flip_axes": [0, 2], "resume": "auto"},
        "swaps the sides that task=lungs distinguishes",
    ),
    ("fine", {"augment.flip_axes": [3]}, "augment.flip_axes: axes are 0 (z), 1 (y), 2 (x)"),
    ("fine", {"augment.flip_axes": [-1]}, "augment.flip_axes: axes are 0 (z), 1 (y), 2 (x)"),
    ("fine", {"task.labels": {"lung-Left": 1, "rest": 2}, "task.regions": regions(a=["rest"]),
        "task.codes": None,
              "task.volume_ml": None, "augment.flip_axes": [2]}, "swaps the sides"),
    (
        "coarse",
        {"augment.flip_axes": [1]},
        "with flips the coarse stage cannot distinguish the sides",
    ),
    *(
        ("coarse", {f"stage.{key}": value}, f"stage.{key}: only the fine stage uses it")
        for key, value in [
            ("region_margin_mm", 0.0),
            ("region_from", RegionFrom.reference),
            ("box_jitter_mm", 0.0),
            ("elsewhere_share", 0.0),
            ("coarse", FILE),
        ]
    ),
    *(
        ("fine", {f"stage.{key}": None}, f"stage.{key}: the fine stage needs a value")
        for key in ("region_margin_mm", "region_from", "box_jitter_mm")
    ),
    ("fine", {"stage.max_voxels": 1}, "stage.max_voxels: only the coarse stage uses it"),
    ("fine", {"stage.slab_share": 0.0}, "stage.slab_share: only the coarse stage uses it"),
    ("fine", {"stage.side_share": 0.0}, "stage.side_share: only the coarse stage uses it"),
    ("fine", {"stage.coarse": FILE}, "stage.coarse: nothing uses it; add stage.region_from=coarse"),
    ("fine", {"stage.region_from": RegionFrom.coarse}, "add stage.coarse=<checkpoint>"),
    ("fine", {"stage.coarse_channel": True}, "add stage.coarse=<checkpoint>"),
    ("coarse", {"stage.coarse_channel": True}, "leave it out with stage=coarse"),
    ("coarse", {"stage.coarse_folds": [FILE]}, "stage.coarse_folds: only the fine stage uses it"),
    (
        "fine",
        {"stage.coarse_folds": [FILE] * 5},
        "stage.coarse_folds: it stands in place of stage.coarse",
    ),
    (
        "fine",
        {"stage.coarse_folds": [FILE] * 5, "stage.coarse": FILE, "stage.coarse_channel": True},
        "give one of the two",
    ),
    (
        "fine",
        {"stage.coarse_folds": ["no.ckpt"] * 5, "stage.coarse_channel": True},
        "stage.coarse_folds=no.ckpt: there is no such file",
    ),
    (
        "fine",
        {"task.regions": None, "augment.flip_axes": []},
        "stage=fine: the task lungs has no regions, and one stage segments all of its labels",
    ),
    (
        "fine",
        {"task.regions": regions(both=["left_lung", "right_lung"], left=["left_lung"])},
        "one network segments all regions, but they have {'both': 2, 'left': 1} labels",
    ),
]  # fmt: skip

# Stage and changed values: the nearest ones that contradict nothing.
ACCEPTED: list[tuple[str, Change]] = [
    ("single", {"task.name": "..my task"}),
    ("single", {"task.labels": labels(254), "task.codes": None, "task.volume_ml": None}),
    ("coarse", {"task.ignore_label": 3}),
    ("coarse", {"task.window_hu": None, "task.channels": [ChannelOptions(**CT_CHANNEL)]}),
    (
        "coarse",
        {"task.window_hu": None, "task.channels": [ChannelOptions(MR, None, Normalise.percentile)]},
    ),
    (
        "coarse",
        {
            "task.window_hu": None,
            "task.channels": [ChannelOptions(Modality.ct, None, Normalise.zscore)],
        },
    ),
    ("coarse", {"task.volume_ml": {"left_lung": [0, 0.5]}}),
    (
        "coarse",
        {
            "task.regions": regions(chest=["left_lung", "right_lung"]),
            "task.volume_ml": {"chest": [1, 2]},
        },
    ),
    (
        "coarse",
        {"task.codes": {"left_lung": ["1" * 16, "x" * 64], "right_lung": [7, "L", "right"]}},
    ),
    ("coarse", {"task.colours": {"left_lung": "#38BDf8"}}),
    ("fine", {"data.cases": FILE}),
    ("fine", {"data.cases": FOLDER}),
    ("fine", {"init_from": FILE}),
    ("fine", {"data.fold": 0}),
    ("fine", {"data.fold": 4}),
    ("fine", {"data.fold": "all"}),
    ("fine", {"data.train_trust": "reference"}),
    ("fine", {"data.train_trust": ["reference", "checked"]}),
    ("fine", {"memory.checkpointing": "sqrt"}),
    ("fine", {"memory.checkpointing": "all"}),
    ("fine", {"memory.checkpointing": ["encoder.0"]}),
    ("fine", {"loss.dice_weight": 0.0}),
    ("fine", {"loss.ce_weight": 0.0}),
    ("fine", {"model.device_map": "auto"}),
    ("fine", {"model.device_map": {"encoder": "cuda:12", "decoder": "cpu"}}),
    ("fine", {"model.stem": "strided", "model.refine": 1}),
    ("fine", {"model.stem": "conv", "model.refine": 0}),
    ("fine", {"spacing.strategy": SpacingStrategy.native, "spacing.target_spacing_mm": None}),
    ("fine", {"spacing.strategy": SpacingStrategy.dataset_mean, "spacing.target_spacing_mm": None}),
    ("fine", {"spacing.resampling": Resampling.cubic}),
    (
        "fine",
        {
            "spacing.strategy": SpacingStrategy.anisotropic,
            "spacing.target_spacing_mm": (3.0, 1.0, 1.0),
        },
    ),
    ("fine", {"spacing.strategy": SpacingStrategy.fixed_resolution, "spacing.fill": Fill.pad}),
    (
        "fine",
        {
            "spacing.strategy": SpacingStrategy.multi_scale,
            "spacing.range_mm": (1.0, 1.5),
            "spacing.draw": SpacingDraw.tail,
        },
    ),
    ("fine", {"stage.patch_size": (96, 32, 16)}),
    ("fine", {"stage.patch_size": (16, 16, 16), "model.norm": "group"}),
    (
        "fine",
        {
            "spacing.strategy": SpacingStrategy.fixed_size,
            "spacing.target_spacing_mm": None,
            "spacing.size": (64, 96, 128),
            "stage.patch_size": (64, 96, 128),
        },
    ),
    (
        "coarse",
        {
            "spacing.strategy": SpacingStrategy.fixed_size,
            "spacing.target_spacing_mm": None,
            "spacing.size": (64, 96, 128),
            "stage.max_voxels": 64 * 96 * 128,
        },
    ),
    (
        "fine",
        {
            "stage.batch_size": 8,
            "trainer.devices": 2,
            "trainer.strategy": Strategy.ddp,
            "memory.accumulate": 4,
        },
    ),
    (
        "fine",
        {"model.device_map": {"a": "cuda:0", "b": "cuda:1"}, "memory.precision": Precision.fp16},
    ),
    ("fine", {"model.device_map": {"a": "cuda:0", "b": "cpu"}, "memory.precision": Precision.tf32}),
    (
        "fine",
        {
            "model.device_map": {"a": "cpu"},
            "memory.precision": Precision.bf16,
            "trainer.accelerator": Accelerator.cpu,
        },
    ),
    ("fine", {"memory.offload": True, "memory.compile": True}),
    ("fine", {"trainer.gpus": [3]}),
    (
        "fine",
        {
            "trainer.gpus": [3, 1],
            "trainer.devices": 2,
            "stage.batch_size": 2,
            "trainer.strategy": Strategy.ddp,
        },
    ),
    ("fine", {"schedule": {**CYCLIC, "base_lr": 0.1}}),
    ("fine", {"schedule.total_steps": 1000, "steps": 1000}),
    ("fine", {"memory.precision": Precision.bf16, "trainer.accelerator": Accelerator.cpu}),
    (
        "fine",
        {
            "memory.precision": Precision.tf32,
            "memory.cudnn_benchmark": True,
            "data.pin_memory": True,
        },
    ),
    ("fine", {"data.pin_memory": False, "trainer.accelerator": Accelerator.cpu}),
    ("fine", {"model.norm": "batch", "trainer.sync_batchnorm": True}),
    ("fine", {"ema_decay": 0.998, "steps": 500}),
    ("fine", {"warmup_steps": 999, "schedule": COSINE}),
    ("fine", {"schedule.total_steps": 1001}),
    ("fine", {"schedule.total_steps": 999, "resume": "runs/earlier"}),
    ("fine", {"schedule": {**COSINE, "eta_min": 0.005}}),
    ("fine", {"trainer.clip_by": ClipBy.value}),
    ("fine", {"trainer.gradient_clip": None}),
    ("fine", {"lr_scaling": LrScaling.sqrt}),
    ("fine", {"optimizer": PLAIN_SGD}),
    ("fine", {"augment.flip_axes": [0, 1]}),
    ("fine", {"augment.flip_axes": [0, 2], "resume": "runs/earlier"}),
    ("coarse", {"augment.flip_axes": [1], "resume": "runs/earlier"}),
    (
        "single",
        {
            "task.labels": {"leftover": 1},
            "task.codes": None,
            "task.volume_ml": None,
            "augment.flip_axes": [0, 1, 2],
        },
    ),
    ("fine", {"stage.coarse": FILE, "stage.region_from": RegionFrom.coarse}),
    ("fine", {"stage.coarse": FILE, "stage.coarse_channel": True}),
    ("fine", {"stage.coarse_folds": [FILE] * 5, "stage.coarse_channel": True}),
]


@pytest.mark.parametrize(("stage", "changes", "message"), REFUSED)
def test_a_contradiction_is_refused(
    checked: dict[str, TrainConfig], stage: str, changes: Change, message: str
) -> None:
    with pytest.raises(UserError) as caught:
        check_clashes(changed(checked[stage], changes))
    assert message in str(caught.value)


@pytest.mark.parametrize(("stage", "changes"), ACCEPTED)
def test_what_lies_beside_a_contradiction_is_accepted(
    checked: dict[str, TrainConfig], stage: str, changes: Change
) -> None:
    check_clashes(changed(checked[stage], changes))


def test_a_side_of_a_region_forbids_a_flip_where_no_label_names_one(
    checked: dict[str, TrainConfig],
) -> None:
    sided = {"chest": RegionOptions(labels=["organ"], side=Side.left)}
    changes: Change = {
        "task.labels": {"organ": 1},
        "task.codes": None,
        "task.volume_ml": None,
        "task.regions": sided,
    }
    check_clashes(changed(checked["fine"], changes))
    with pytest.raises(UserError, match="swaps the sides"):
        check_clashes(changed(checked["fine"], {**changes, "augment.flip_axes": [2]}))


@pytest.mark.parametrize(
    ("stage", "changes", "message"),
    [
        (
            "fine",
            {"model.norm": "batch", "stage.batch_size": 2},
            "model.norm=batch computes over 1 sample, not over the batch of 2",
        ),
        ("fine", {"model.norm": "batch", "stage.batch_size": 1}, None),
        (
            "fine",
            {"model.norm": "batch", "stage.batch_size": 2, "stage.patch_size": (32, 32, 32)},
            None,
        ),
        (
            "fine",
            {
                "model.norm": "batch",
                "stage.batch_size": 4,
                "stage.patch_size": (32, 32, 32),
                "memory.accumulate": 2,
            },
            ("model.norm=batch computes over 2 samples, not over the batch of 4 "
             "(memory.accumulate=2, 1 rank)"),
        ),
        (
            "fine",
            {"model.norm": "batch", "stage.batch_size": 8, "stage.patch_size": (32, 32, 32),
                "memory.accumulate": 2,
             "trainer.devices": 2},
            "computes over 2 samples, not over the batch of 8 (memory.accumulate=2, 2 ranks)",
        ),
        (
            "fine",
            {"model.norm": "batch", "stage.batch_size": 8, "stage.patch_size": (32, 32, 32),
                "trainer.num_nodes": 2,
             "trainer.sync_batchnorm": True},
            None,
        ),
        (
            "fine",
            {"loss.batch_dice": True, "stage.batch_size": 2},
            "loss.batch_dice=true computes over 1 sample",
        ),
        ("fine", {"loss.batch_dice": True}, None),
        (
            "fine",
            {"loss": {"terms": [{"batch": True}]}, "stage.batch_size": 2},
            "loss.batch=true computes over 1 sample",
        ),
        ("fine", {"task.ignore_label": 3}, None),
        (
            "fine",
            {"task.ignore_label": 3, "loss": {"_target_": "monai.losses.DiceLoss"}},
            "task.ignore_label with DiceLoss: a GPU waits once a step",
        ),
        ("fine", {"loss": {"_target_": "monai.losses.DiceLoss"}}, None),
        (
            "fine",
            {"schedule.cycle_momentum": True, "optimizer.betas": [0.9, 0.99]},
            "the momentum of the optimizer ([0.9, 0.99]) is not used",
        ),
        ("fine", {"schedule.cycle_momentum": True}, None),
        ("fine", {"optimizer.betas": [0.9, 0.99]}, None),
        ("fine", {"augment.transforms": []}, "augment.transforms replaces the built-in effects"),
        ("fine", {"augment.transforms": [], "augment.enabled": False}, None),
        (
            "fine",
            {"augment.transforms": [{"_target_": "monai.transforms.RandBiasFieldd"}]},
            "augment.transforms replaces the built-in effects",
        ),
        # The preset `mr` has a list of its own.
        ("fine", {"augment.transforms": [{"_target_": "medseg.data.augment.Noise"}]}, None),
        ("coarse", {"task.regions": None}, "choose stage=single"),
        ("single", {"stage.patch_size": None}, None),
        ("coarse", {}, None),
        (
            "fine",
            {"memory.cudnn_benchmark": True},
            "repeats its kernel search at each new input shape",
        ),
        ("fine", {"memory.cudnn_benchmark": True, "spacing.size": (32, 32, 32)}, None),
        (
            "fine",
            {"memory.compile": True, "memory.compile_mode": CompileMode.reduce_overhead},
            "records CUDA graphs anew at each input shape",
        ),
        (
            "fine",
            {"memory.compile": True, "memory.compile_mode": CompileMode.reduce_overhead,
             "stage.patch_size": (32, 32, 32)},
            None,
        ),
        ("fine", {"memory.compile": True, "memory.compile_mode": CompileMode.max_autotune}, None),
        ("fine", {"memory.compile_mode": CompileMode.reduce_overhead}, None),
    ],
)  # fmt: skip
def test_notes_name_what_surprises_and_nothing_else(
    checked: dict[str, TrainConfig], stage: str, changes: Change, message: str | None
) -> None:
    printed_notes = notes(changed(checked[stage], changes))
    if message is None:
        assert printed_notes == []
    else:
        assert len(printed_notes) == 1
        assert message in printed_notes[0]


def test_batch_norm_inside_another_network_is_noted(checked: dict[str, TrainConfig]) -> None:
    config = changed(
        checked["fine"], {"stage.batch_size": 2, "model._target_": "monai.networks.nets.UNet"}
    )
    assert notes(config) == []
    assert (
        "batch norm of monai.networks.nets.UNet computes over 1 sample"
        in notes(config, has_batch_norm=True)[0]
    )


def predict_config(**ranges: tuple[float, float]) -> PredictConfig:
    """Configuration of `predict` whose checkpoints differ by the spacing of a scan."""
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        entries = [
            f"+by_spacing.{name}.range_mm=[{low},{high}]" for name, (low, high) in ranges.items()
        ]
        composed = hydra.compose(
            "predict", ["input=scan.nii.gz", "output=out", "fine=fine.ckpt", *entries]
        )
    return to_config(composed, PredictConfig)


def test_ranges_of_spacing_may_touch_and_take_the_general_checkpoints() -> None:
    config = predict_config(thin=(0, 1.5), thick=(1.5, 8))
    assert config.by_spacing is not None
    assert config.fine == ["fine.ckpt"]
    assert [entry.fine for entry in config.by_spacing.values()] == [["fine.ckpt"]] * 2


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        (
            {"thin": (0, 1.6), "thick": (1.5, 8)},
            "by_spacing.thick.range_mm=[1.5, 8.0] overlaps that of thin",
        ),
        (
            {"thick": (1.5, 8), "thin": (0, 1.6)},
            "by_spacing.thick.range_mm=[1.5, 8.0] overlaps that of thin",
        ),
        ({"thin": (2, 2)}, "by_spacing.thin.range_mm: expected two increasing numbers"),
        ({"thin": (-1, 2)}, "by_spacing.thin.range_mm"),
    ],
)
def test_ranges_of_spacing_that_overlap_are_refused(
    ranges: dict[str, tuple[float, float]], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        predict_config(**ranges)
    assert message in str(caught.value)


def test_each_spacing_of_a_preparation_is_checked_under_its_name() -> None:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = to_config(hydra.compose("prepare"), PrepareConfig)
    fine = SpacingOptions((1.0, 1.0, 1.0))
    config.spacings = {"fine": fine, "other": SpacingOptions((1.0, 1.0, 3.0))}
    with pytest.raises(UserError, match=r"spacings\.other\.target_spacing_mm"):
        check_clashes(config)
    config.spacings = {"fine": fine}
    check_clashes(config)
