"""What a user gets wrong is told with the key, the value and the cure."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import re
import typing

import hydra
import pytest
import torch
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf, open_dict

from medseg.conf_folder import conf_dir
from medseg.config import schema
from medseg.config.check import explain, to_config, to_typed
from medseg.config.search import SearchConfig, SweepConfig
from medseg.errors import UserError
from medseg.knob import Knob
from medseg.runs.ranks import choose_gpus
from medseg.target_arguments import range_of
from medseg.training.notes import notes
from medseg.training.options import TrainConfig


def compose(*overrides: str) -> DictConfig:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return hydra.compose("train", [*overrides, "run_dir=runs/test"])


def test_tuples_keep_their_length_and_type() -> None:
    config = to_config(compose("stage=fine", "stage.patch_size=[64,96,128]"), TrainConfig)
    assert config.stage.patch_size == (64, 96, 128)
    assert config.spacing.target_spacing_mm == (1.0, 1.0, 1.0)


def test_a_number_whose_name_ends_like_that_of_bounds_is_taken() -> None:
    loss = ["loss._target_=monai.losses.SSIMLoss", "loss.spatial_dims=3", "loss.data_range=1.0"]
    assert to_config(compose(*loss), TrainConfig).loss["data_range"] == 1.0


def test_equal_groups_are_checked_once_and_not_shared() -> None:
    first = to_config(compose("stage=fine"), TrainConfig)
    second = to_config(compose("stage=fine"), TrainConfig)
    assert first == second
    first.task.labels["added"] = 9
    first.model["added"] = 9
    first.stage.name = "changed"
    assert to_config(compose("stage=fine"), TrainConfig) == second
    # Values that are equal for Python, but not for the check.
    assert to_config(compose("data.num_workers=1"), TrainConfig).data.num_workers == 1
    for value in ("true", "1.0"):
        with pytest.raises(UserError, match=r"data\.num_workers"):
            to_config(compose(f"data.num_workers={value}"), TrainConfig)


def numeric_arguments(point: str, prefix: str) -> list[tuple[str, str]]:
    """Pairs of class and numeric argument, of a module's classes that fit an extension point."""
    module = importlib.import_module(prefix)
    base = {
        "optimizer": torch.optim.Optimizer,
        "schedule": torch.optim.lr_scheduler.LRScheduler,
        "loss": torch.nn.Module,
    }[point]
    arguments = []
    for name, cls in vars(module).items():
        if not inspect.isclass(cls) or not issubclass(cls, base) or name.startswith("_"):
            continue
        for argument, parameter in inspect.signature(cls).parameters.items():
            default = parameter.default
            if isinstance(default, (int, float)) and not isinstance(default, bool):
                arguments.append((f"{prefix}.{name}", argument))
    return sorted(arguments)


# A seed of a class, and numbers of classes or steps that any whole number may be.
ANY_NUMBER = {"last_epoch", "ignore_index", "tolerance_grad", "tolerance_change", "num_classes"}


@pytest.mark.parametrize(
    ("point", "prefix"),
    [
        ("optimizer", "torch.optim"),
        ("schedule", "torch.optim.lr_scheduler"),
        ("loss", "monai.losses"),
    ],
)
def test_every_number_of_an_optimiser_a_schedule_and_a_loss_has_a_range(
    point: str, prefix: str
) -> None:
    without = [
        pair
        for pair in numeric_arguments(point, prefix)
        if not range_of(point, *pair) and pair[1] not in ANY_NUMBER
    ]
    assert without == []


@pytest.mark.parametrize(
    ("command", "root"),
    [("ladder", schema.LadderConfig), ("time_to_dice", schema.TimeToDiceConfig)],
)
def test_items_of_a_mapping_may_be_lists(command: str, root: type) -> None:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        composed = hydra.compose(command, ["run_dir=runs/test"])
    assert all(isinstance(arguments, list) for arguments in to_config(composed, root).rows.values())


def test_a_stage_brings_its_spacing_and_the_command_line_wins() -> None:
    assert to_config(compose("stage=coarse"), TrainConfig).spacing.target_spacing_mm == (
        2.0,
        2.0,
        2.0,
    )
    chosen = to_config(compose("stage=fine", "spacing=isotropic_4mm"), TrainConfig)
    assert chosen.spacing.target_spacing_mm == (4.0, 4.0, 4.0)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["stage=fine", "++stage.nmae=x"],
            "stage.nmae: there is no such key; did you mean stage.name",
        ),
        (["+sede=1"], "sede: there is no such key; did you mean seed"),
        (["+lr=1"], "lr: there is no such key; did you mean optimizer.lr?"),
        (
            ["+trainer.max_epochs=1"],
            "trainer.max_epochs: there is no such key; did you mean steps?",
        ),
        (["+ckpt_path=x"], "ckpt_path: there is no such key; did you mean resume or init_from?"),
        (
            ["+data.batch_size=1"],
            "data.batch_size: there is no such key; did you mean stage.batch_size?",
        ),
        (
            ["++data.phantoms.sed=1"],
            "data.phantoms.sed: there is no such key; did you mean data.phantoms.seed",
        ),
        (["seed=abc"], "seed: Value 'abc' of type 'str' could not be converted to Integer"),
        (
            ["model.block=dense"],
            "model.block: Invalid value 'dense', expected one of [plain, residual, bottleneck]",
        ),
        (["stage=fine", "stage.patch_size=[64,64]"], "stage.patch_size: 3 numbers are needed"),
        (["stage=fine", "stage.patch_size=64"], "stage.patch_size"),
        (
            ["task.window_hu=[400,-1000]"],
            "task.window_hu: expected a lower bound below the upper one",
        ),
        (
            ["task.name=../mine"],
            "task.name='../mine': expected a valid folder name without / and \\, since the folder",
        ),
        (["task.name='..'"], "task.name='..': expected a valid folder name"),
        (["task.labels={left_lung: 1, right_lung: 3}"], "task.labels: expected the values 1, 2"),
        (
            ["task.labels.left_lung=[1, 2]"],
            "task.labels.left_lung: one value is needed, but got [1, 2]",
        ),
        (
            ["+task.labels.ignore=3", "task.ignore_label=4"],
            "task.labels.ignore: expected another name, since ignore names the voxels",
        ),
        (["task.labels.left_lung={}"], "task.labels.left_lung: one value is needed, but got {}"),
        (
            ["task.colours={left_lung: {a: 1}}"],
            "task.colours.left_lung: one value is needed, but got {'a': 1}",
        ),
        (["metrics=true"], "metrics: keys with their values are needed, but got True"),
        (
            ["augment.transforms=1.5"],
            "augment.transforms: a list of classes with their arguments is needed, but got 1.5",
        ),
        (
            ["task.labels={left_lung: 1, right_lung: 2}", "task.ignore_label=2"],
            "task.ignore_label=2 is the value of a label; choose a value from 3 to 255",
        ),
        (["task.window_hu=null"], "task.channels and task.window_hu: expected one of the two"),
        (
            ["task.channels=[{modality: ct, window_hu: [-1000, 400]}]"],
            "task.channels and task.window_hu: expected one of the two",
        ),
        (
            ["task.window_hu=null", "task.channels=[{modality: mr}]"],
            "task.channels.0: expected a window_hu (normalise=window), or normalise=zscore",
        ),
        (
            ["task.window_hu=null", "task.channels=[{modality: mr, window_hu: [0, 1]}]"],
            "task.channels.0.normalise=window: values of modality=mr",
        ),
        (
            ["task.window_hu=null", "task.channels=[{window_hu: [5, 1]}]"],
            "task.channels.0.window_hu: expected a lower bound below",
        ),
        (
            ["task.window_hu=null", "task.channels=[{window_hu: [5, 1, 2]}]"],
            "task.channels.0.window_hu: 2 numbers are needed",
        ),
        (
            ["+task.volume_ml.heart=[1, 2]"],
            ("task.volume_ml.heart: there is no such label or region; there are left_lung, "
             "right_lung"),
        ),
        (
            ["task.volume_ml.left_lung=[9, 2]"],
            "task.volume_ml.left_lung: expected two increasing numbers in ml",
        ),
        (
            ["+task.codes.heart=['80891009', Heart]"],
            "task.codes.heart: there is no such label; there are left_lung, right_lung",
        ),
        (
            ["task.codes.left_lung=['39607008']"],
            "task.codes.left_lung: expected [code, meaning] or [code, meaning, left | right]",
        ),
        (
            ["task.codes.left_lung=['39607008', Lung, top]"],
            "such as [64033007, Kidney, left], but got ['39607008', 'Lung', 'top']",
        ),
        (
            ["task.codes.left_lung=['T-28000', Lung]"],
            "task.codes.left_lung: expected [code, meaning]",
        ),
        (
            ["task.colours={left_lung: sky}"],
            "task.colours.left_lung: expected a colour such as '#38bdf8', but got 'sky'",
        ),
        (
            ["task.colours={heart: '#38bdf8'}"],
            "task.colours.heart: there is no such label; there are left_lung, right_lung",
        ),
        (["stage=fine", "task.regions=null"], "stage=fine: the task lungs has no regions"),
        (["tags=pilot"], "tags: expected a list; give it in brackets, tags=[…]"),
        (["steps=0"], "steps: must lie in [1, inf), but got 0"),
        (["stage.batch_size=3", "memory.accumulate=2"], "choose a multiple of 2"),
        (["trainer.devices=2"], "choose trainer=ddp"),
        (["ema_decay=1"], "ema_decay: must lie in (0, 1), but got 1.0"),
        (
            ["ema_decay=0.999", "steps=500"],
            "averages over 1000 steps, but steps=500; choose 0.998 or less",
        ),
        (["model.device_map=cuda:1"], "model.device_map: expected null, auto or a mapping"),
        (
            ["model.device_map={encoder: gpu1}"],
            "model.device_map: expected null, auto or a mapping",
        ),
        (
            ["model.device_map={encoder: cuda:0, decoder: cuda:1}", "memory.compile=true"],
            "stays on one device",
        ),
        (
            ["model.device_map={encoder: cuda:0, decoder: cpu}", "memory.precision=bf16"],
            "half precision needs devices of one kind, all CPU or all GPU",
        ),
        (
            ["model.device_map=auto", "trainer=ddp", "stage.batch_size=2"],
            "one rank uses all devices",
        ),
        (
            ["model.norm=batch", "trainer.sync_batchnorm=true", "trainer.accelerator=cpu"],
            "works on GPUs only",
        ),
        (
            ["trainer=ddp", "stage.batch_size=2", "trainer.sync_batchnorm=true"],
            ("works with model.norm=batch only, but model.norm=instance; choose "
             "trainer.sync_batchnorm=false"),
        ),
        (["memory.precision=fp16", "trainer.accelerator=cpu"], "choose memory.precision=bf16"),
        (["memory.offload=true", "trainer.accelerator=cpu"], "choose memory.offload=false"),
        (["stage=coarse", "stage.region_margin_mm=5"], "only the fine stage uses it"),
        (["stage=fine", "stage.max_voxels=10"], "stage.patch_size"),
        (["stage=fine", "stage.slab_share=0.3"], "augment.truncate_probability"),
        (["stage=fine", "stage.side_share=0.3"], "augment.narrow_probability"),
        (["stage=fine", "stage.region_from=coarse"], "go together"),
        (["stage=fine", "stage.coarse_channel=true"], "go together"),
        (["stage=coarse", "stage.coarse_channel=true"], "only the fine stage uses it"),
        (["stage=fine", "augment.flip_axes=[2]"], "swaps the sides"),
        (["task=abdomen", "stage=single", "augment.flip_axes=[2]"], "swaps the sides"),
        (
            ["task=abdomen", "stage=single", "stage.elsewhere_share=0.1"],
            "leave it out with stage=single",
        ),
        (
            ["stage=coarse", "augment.flip_axes=[0]"],
            "with flips the coarse stage cannot distinguish the sides",
        ),
        (["data.fold=7", "data.num_folds=3"], "data.fold: expected 0 … 2"),
        (["data.cases=nowhere.csv"], "data.cases=nowhere.csv: there is no such file"),
        (["optimizer._target_=os.system"], "os.system is not on the white list"),
        (["optimizer._target_=torch.optim._functional.adam"], "not on the white list"),
        (
            ["optimizer._target_=torch.optim.SGD"],
            ("schedule.max_lr: it refers to optimizer.lr, which has no value; give "
             "optimizer.lr=<value>"),
        ),
        (["model.widht=8"], "model.widht: there is no such key; did you mean model.width"),
        (
            ["model._target_=my_package.Net"],
            ("my_package.Net is not on the white list (medseg.models.*, monai.networks.nets.*, "
             "torch.nn.*); if you trust its code, add trusted_targets=[my_package.]"),
        ),
        (
            ["model._target_=my_package.Net", "trusted_targets=[other.]"],
            "my_package.Net is not on the white list",
        ),
        (["model._target_=torch.nn"], "not on the white list"),
        (["schedule._target_=builtins.eval"], "not on the white list"),
        (["optimizer.lr=-1"], "optimizer.lr: must lie in (0, inf), but got -1"),
        (["optimizer.lr=fast"], "optimizer.lr: must lie in (0, inf), but got fast"),
        (
            ["memory.checkpointing=true"],
            "memory.checkpointing: expected none, sqrt, all or a [list]",
        ),
        (["loss.dice_weight=0", "loss.ce_weight=0"], "at least one must be positive"),
        (["data.phantom_share=2"], "data.phantom_share: must lie in (0, 1), but got 2.0"),
        (
            ["stage=fine", "stage.patch_size=[0,-1,5]"],
            "stage.patch_size: must lie in [1, inf), but got (0, -1, 5)",
        ),
        (
            ["stage=fine", "stage.patch_size=[96,100,96]"],
            "stage.patch_size: expected multiples of 16",
        ),
        (["augment.noise_probability=7"], "augment.noise_probability: must lie in [0, 1]"),
        (["augment.scale_range=[1.2,0.8]"], "augment.scale_range: the lower bound comes first"),
        (["augment.noise_sd=[0.1,0.01]"], "augment.noise_sd: the lower bound comes first"),
        (["augment.flip_axes=[0,0]"], "augment.flip_axes: expected each axis once"),
        (["inference.overlap=1"], "inference.overlap: must lie in [0, 1), but got 1.0"),
        (
            ["model.depth=4"],
            "model.blocks_per_level: expected 5 numbers, one per level (model.depth=4)",
        ),
        (
            ["warmup_steps=5"],
            "schedule OneCycleLR sets the learning rates of all steps itself; "
            "choose warmup_steps=0",
        ),
        (
            ["warmup_steps=9", "steps=9", "schedule=cosine"],
            "warmup_steps=9: the run has only steps=9",
        ),
        (
            ["schedule.total_steps=2", "steps=4"],
            "schedule.total_steps=2: the schedule would end before the run, steps=4",
        ),
        (
            ["schedule=cyclic", "schedule.base_lr=1"],
            "schedule.base_lr=1 is the lowest rate of the schedule, but schedule.max_lr=0.005",
        ),
        (
            ["schedule=cosine", "schedule.eta_min=1"],
            "schedule.eta_min=1 is the lowest rate of the schedule, but optimizer.lr=0.005",
        ),
        (
            ["trainer.clip_by=value", "trainer.gradient_clip=null"],
            "trainer.clip_by=value: there is no bound to clip by",
        ),
        (["trainer.gradient_clip=-1"], "trainer.gradient_clip: must lie in (0, inf), but got -1.0"),
        (["optimizer.lr=true"], "optimizer.lr: must lie in (0, inf), but got True"),
        (
            ["loss=sum", "loss.terms=[{_target_: monai.losses.DiceLoss, smooth_dr: -1}]"],
            "loss.terms[0].smooth_dr: must lie in [0, inf)",
        ),
        (
            ["memory.cudnn_benchmark=true", "trainer.accelerator=cpu"],
            "choose memory.cudnn_benchmark=false",
        ),
        (["data.pin_memory=true", "trainer.accelerator=cpu"], "choose data.pin_memory=null"),
        (
            ["spacing.target_spacing_mm=[3.0,1.0,1.0]"],
            "isotropic uses one spacing for all axes; choose spacing.strategy=anisotropic",
        ),
        (
            ["spacing.target_spacing_mm=null"],
            "spacing.strategy=isotropic needs three numbers in mm",
        ),
        (
            ["stage=fine", "stage.patch_size=[16,16,16]"],
            "stage.patch_size=[16, 16, 16]: the deepest level",
        ),
        (
            ["spacing=fixed_size", "spacing.size=[64,72,64]"],
            "spacing.size: expected multiples of 16",
        ),
        (
            ["spacing=multi_scale", "spacing.range_mm=[2.0,2.0]"],
            "spacing.range_mm: expected two increasing numbers, but got [2.0, 2.0]",
        ),
        (
            ["spacing=multi_scale", "spacing.target_spacing_mm=[2.0,1.0,1.0]"],
            ("must not be coarser than the lower bound of spacing.range_mm=[1.0, 4.0]; choose a "
             "finer spacing, or null"),
        ),
        (
            ["spacing=multi_scale", "spacing.draw=null"],
            "spacing.draw: spacing.strategy=multi_scale needs a value",
        ),
        (["spacing=fixed_size", "+spacing.draw=even"], "only spacing.strategy=multi_scale uses it"),
        (
            ["spacing=fixed_size", "spacing.size=null"],
            "spacing.size: spacing.strategy=fixed_size needs a value",
        ),
        (
            ["spacing=native", "+spacing.size=[64,64,64]"],
            "only spacing.strategy=fixed_size uses it, but spacing.strategy=native",
        ),
        (
            ["stage=fine", "spacing=fixed_size", "stage.patch_size=[144,64,64]"],
            "stage.patch_size=[144, 64, 64] is larger than",
        ),
        (
            ["spacing=fixed_size", "inference.tile_size=[144,64,64]"],
            "inference.tile_size=[144, 64, 64] is larger than the whole",
        ),
        (
            ["spacing=fixed_size", "stage.max_voxels=2000000"],
            "has more voxels than stage.max_voxels=2000000 allows",
        ),
        (
            ["spacing=native", "spacing.target_spacing_mm=[1.0,1.0,1.0]"],
            "native keeps the spacing of each scan; leave it null",
        ),
        (
            ["spacing=native", "spacing.resampling=cubic"],
            "spacing.strategy=native resamples nothing; leave it out",
        ),
        (["spacing.resampling=nearest"], "expected one of [antialiased, linear, cubic]"),
        (
            ["spacing.strategy=mean"],
            "expected one of [isotropic, anisotropic, dataset_median, dataset_mean, native, ",
        ),
        (
            [
                "stage=fine",
                "spacing=anisotropic",
                "spacing.target_spacing_mm=[4.0,1.0,1.0]",
                "stage.patch_size=[6,96,96]",
            ],
            "stage.patch_size: expected multiples of [4, 16, 16]",
        ),
        (["+logger.inner={_target_: os.system}"], "nested targets are not allowed"),
        (["task.window_hu=[-1000,inf]"], "task.window_hu: expected a finite number"),
        (["task.window_hu=[nan,400]"], "task.window_hu: expected a finite number"),
        (["task.least_hu=nan"], "task.least_hu: expected a finite number, but got nan"),
    ],
)  # fmt: skip
def test_mistakes_are_told_in_one_sentence(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        to_config(compose(*overrides), TrainConfig)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_may_surprise_is_noted_and_the_default_is_silent() -> None:
    assert notes(to_config(compose("stage=fine"), TrainConfig)) == []
    assert (
        "choose stage=single"
        in notes(to_config(compose("stage=coarse", "task=abdomen"), TrainConfig))[0]
    )
    assert notes(to_config(compose("stage=single", "task=abdomen"), TrainConfig)) == []
    searching = ["stage=fine", "memory.cudnn_benchmark=true"]
    assert "shape" in notes(to_config(compose(*searching), TrainConfig))[0]
    assert notes(to_config(compose(*searching, "stage.patch_size=[96,96,96]"), TrainConfig)) == []


@pytest.mark.parametrize(
    ("override", "is_class"),
    [
        ("model=enormous", True),
        ("loss=enormous", True),
        ("optimizer=enormous", True),
        ("schedule=enormous", True),
        ("stage=enormous", False),
        ("spacing=enormous", False),
    ],
)
def test_an_unknown_choice_names_the_others_and_a_class_where_one_may_stand(
    override: str, is_class: bool
) -> None:
    group = override.partition("=")[0]
    with pytest.raises(MissingConfigException) as caught:
        compose(override)
    message = explain(caught.value)
    files = sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))
    expected = f"In 'train': Could not find '{group}/enormous'; there are: {', '.join(files)}"
    if is_class:
        expected += f"; or name a class: {group}._target_=package.Class"
    assert message == expected


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        # Null where a single value, a list, a mapping or a group is declared.
        ("notes", None, "notes: expected a value, but got null"),
        ("tags", None, "tags: expected a list, but got null; give it in brackets, tags=[…]"),
        ("tags", [None], "tags.0: expected a value, but got null"),
        ("augment.noise_sd", None, "augment.noise_sd: expected a list of 2 numbers, but got null"),
        ("stage.patch_size", [None, 96, 96], "stage.patch_size.0: expected a value, but got null"),
        ("task.labels", None, "task.labels: expected a mapping, but got null; give it in braces"),
        ("task.labels", {"a": None}, "task.labels.a: expected a value, but got null"),
        ("task.channels", [None], "task.channels.0: expected a group of keys, but got null"),
        ("model.blocks_per_level", None, "model.blocks_per_level: expected a list, but got null"),
        ("trainer.devices", [None], "trainer.gpus.0: expected a value, but got null"),
        ("data", None, "data: expected a group of keys, but got null; set them one by one, data."),
        # Other keys refer to these groups.
        ("stage", None, "stage: expected a group of keys; set them one by one, stage.<name>="),
        ("optimizer", None, "optimizer: expected a group of keys; set them one by one"),
        # Another form than a group, mapping, list or single value.
        ("task", "lungs", "task: expected a group of keys; set them one by one, task.<name>="),
        ("trainer", 2, "trainer: expected a group of keys; set them one by one"),
        ("data", ["a.csv"], "data: expected a group of keys; set them one by one"),
        ("task.labels", ["liver"], "task.labels: expected a mapping; give it in braces"),
        ("tags", {"a": 1}, "tags: expected a list; give it in brackets, tags=[…]"),
        ("tags", [["a"]], "tags.0: one value is needed, but got ['a']"),
        ("seed", [1], "seed: one value is needed, but got [1]"),
        ("data.cases", {"a": 1}, "data.cases: one value is needed, but got {'a': 1}"),
        ("trusted_targets", 5, "trusted_targets: expected a list; give it in brackets"),
        ("trusted_targets", "${name}", "trusted_targets: expected a list; give it in brackets"),
        ("trusted_targets", "${x}", "trusted_targets: it refers to x, which has no value"),
        ("trusted_targets", [[1]], "trusted_targets.0: one value is needed, but got [1]"),
    ],
)
def test_a_value_of_the_wrong_form_is_told_what_the_key_expects(
    key: str, value: object, message: str
) -> None:
    composed = compose()
    with open_dict(composed):
        OmegaConf.update(composed, key, value, merge=False)
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        to_config(composed, TrainConfig)


@pytest.mark.parametrize("given", [["${oc.env:PKG}"], "${tags}"])
def test_references_of_the_trusted_prefixes_are_resolved(
    given: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PKG", "my_package.")
    composed = compose("model._target_=my_package.Net", "tags=[my_package.]")
    composed.trusted_targets = given
    assert to_typed(composed, TrainConfig).trusted_targets == ["my_package."]


def test_a_key_that_is_added_behind_hydras_back_is_refused() -> None:
    composed = compose()
    with open_dict(composed):
        composed.memory.budget = 3
    with pytest.raises(UserError, match=r"memory\.budget: there is no such key"):
        to_config(composed, TrainConfig)


@pytest.mark.parametrize(
    ("overrides", "message", "cure"),
    [
        (
            ["task=abdomen", "data.label_values={liver: 7}"],
            "data.label_values: it has no such name yet; +data.label_values={…} adds names",
            "+data.label_values={liver: 7}",
        ),
        (
            ["task=abdomen", "data.label_values.liver=7"],
            "data.label_values.liver: it has no such name yet; +data.label_values.liver=… adds it",
            "+data.label_values.liver=7",
        ),
        (
            ["task=lungs", "data.label_values.left_lnug=7"],
            "data.label_values.left_lnug: it has no such name yet; "
            "+data.label_values.left_lnug=… adds it; "
            "did you mean data.label_values.left_lung?",
            "data.label_values.left_lung=7",
        ),
    ],
)
def test_a_new_name_of_a_label_value_is_added_as_the_message_says(
    overrides: list[str], message: str, cure: str
) -> None:
    with pytest.raises(ConfigCompositionException) as caught:
        compose(*overrides)
    assert explain(caught.value, compose(overrides[0])) == message
    values = to_config(compose(overrides[0], cure), TrainConfig).data.label_values
    assert values is not None
    assert 7 in values.values()


@pytest.mark.parametrize("name", ["Leber groß", "Leber (L)", "Leber & Milz", "a=b"])
def test_a_text_that_hydra_cannot_read_is_read_in_double_quotes(name: str) -> None:
    typed = f"+data.label_values={{liver: [{name}]}}"
    with pytest.raises(HydraException) as caught:
        compose("task=abdomen", typed)
    message = explain(caught.value)
    assert message.startswith(f"{typed}: cannot be read; ")
    assert "in double quotes" in message
    assert "into a file" in message
    quoted = compose("task=abdomen", f'+data.label_values={{liver: ["{name}"]}}')
    assert to_config(quoted, TrainConfig).data.label_values == {"liver": [name]}


def test_a_function_of_hydra_with_wrong_arguments_keeps_its_message() -> None:
    with pytest.raises(HydraException) as caught:
        compose("steps=interval(1)")
    message = explain(caught.value)
    assert message.startswith("steps=interval(1): TypeError while evaluating")
    assert "missing a required argument" in message


@pytest.mark.parametrize(
    ("parameter", "others", "message"),
    [
        ("type: float, low: 2", {}, "sweep.space: x: low and high are needed"),
        ("type: float, low: 0, high: 2, log: true", {}, "sweep.space: x: log needs low above 0"),
        (
            "type: float, low: 1, high: 2, log: true, step: 1",
            {},
            "log and step cannot be combined; give one of them",
        ),
        ("type: float, low: 1, high: 2, choices: [1]", {}, "choices need type choice"),
        ("type: choice", {}, "type choice needs choices"),
        ("type: choice, choices: [1], low: 2", {}, "leave out low, high, step and log"),
        ("type: int, low: 1.5, high: 2", {}, "type int needs whole numbers"),
        ("type: int, low: 1, high: 9, step: 10", {}, "step must lie in (0, 8]"),
        ("type: int, low: 1, high: 9, stepp: 1", {}, "stepp: there is no such key"),
        (
            "type: real, low: 1, high: 9",
            {},
            "Invalid value 'real', expected one of [float, int, choice]",
        ),
        (None, {}, "at least one key"),
        (
            "type: int, low: 1, high: 9",
            {"objectives": ["val_dice", "peak_gib"]},
            "choose sweep.pruner=none",
        ),
        (
            "type: int, low: 1, high: 9",
            {"objectives": ["val_dice", "val_dice"]},
            "two different ones",
        ),
        ("type: int, low: 1, high: 9", {"num_trials": 0}, "sweep.num_trials: must lie in [1, inf)"),
    ],
)  # fmt: skip
def test_a_search_that_cannot_work_is_refused(
    parameter: str | None, others: dict[str, object], message: str, search: DictConfig
) -> None:
    asked = OmegaConf.create(OmegaConf.to_container(search))
    asked.sweep.space = OmegaConf.create(f"x: {{{parameter}}}" if parameter else "{}")
    asked.sweep.update(others)
    with pytest.raises(UserError) as caught:
        to_config(asked, SearchConfig)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def search() -> DictConfig:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return hydra.compose("search", ["sweep=fine_basics", "run_dir=runs/test"])


def test_every_key_has_its_sentence_beside_its_type() -> None:
    roots = [value for value in vars(schema).values() if dataclasses.is_dataclass(value)] + [
        SearchConfig,
        SweepConfig,
    ]
    for root in roots:
        for name, hint in typing.get_type_hints(root, include_extras=True).items():
            knobs = [part for part in typing.get_args(hint) if isinstance(part, Knob)]
            assert dataclasses.is_dataclass(hint) or knobs[0].sentence.endswith("."), (
                f"{root.__name__}.{name}"
            )


def test_tags_are_one_text_for_mlflow() -> None:
    config = to_config(compose("logger=mlflow", "tags=[a,'b c']"), TrainConfig)
    assert config.logger["tags"]["tags"] == " ['a', 'b c']"


def test_a_list_of_devices_names_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = to_config(compose("trainer.devices=[1]"), TrainConfig).trainer
    assert (trainer.devices, trainer.gpus) == (1, [1])
    for visible, expected in (("", "1"), ("4,6,7", "6")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        monkeypatch.delenv("MEDSEG_VISIBLE_GPUS", raising=False)
        for _ in range(2):  # again in a process that this one starts
            choose_gpus(trainer.gpus)
            assert os.environ["CUDA_VISIBLE_DEVICES"] == expected
    monkeypatch.delenv("MEDSEG_VISIBLE_GPUS")
    with pytest.raises(UserError, match=r"trainer\.gpus=\[1, 1\]: expected 2 different numbers"):
        to_config(
            compose("trainer=ddp", "trainer.devices=[1,1]", "stage.batch_size=2"), TrainConfig
        )
