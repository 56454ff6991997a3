"""Extension points of training: what is made, what is said, what is refused before data is read."""

from __future__ import annotations

import csv
import importlib
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import hydra
import lightning.pytorch.loggers.wandb
import monai.losses
import pytest
import torch
from monai.transforms import RandGaussianNoised

from medseg.anatomy.disease import Disease, Fluid, Missing
from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.data.augment import Affine, Noise
from medseg.data.sampler import sample_rng
from medseg.errors import UserError
from medseg.runs import folder
from medseg.runs.train_run import train_run
from medseg.targets import targets_first
from medseg.task import Channel
from medseg.task_options import make_task
from medseg.training import extensions
from medseg.training.assemble import make_data_module
from medseg.training.check import check_objects
from medseg.training.options import TrainConfig
from medseg.weights.files import load_checkpoint


def compose(*overrides: str) -> TrainConfig:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return to_config(
            hydra.compose("train", targets_first(["run_dir=none", *overrides])), TrainConfig
        )


def test_a_loss_of_monai_gets_what_logits_need_and_the_run_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = compose("loss._target_=monai.losses.DiceCELoss", "loss.include_background=false")
    extensions.check_loss(config)
    assert (
        "loss: DiceCELoss is called with softmax=true to_onehot_y=true, because it gets "
        "logits and integer labels"
    ) in capsys.readouterr().err
    (loss,) = extensions.make_loss(config).losses
    assert isinstance(loss, monai.losses.DiceCELoss)
    extensions.check_loss(compose())
    assert capsys.readouterr().err == ""


def test_a_sum_of_losses_with_factors_ignores_the_ignore_label() -> None:
    terms = (
        "[{_target_: torch.nn.CrossEntropyLoss, factor: 0.5}, {_target_: monai.losses.TverskyLoss}]"
    )
    config = compose(
        "loss=sum", f"loss.terms={terms}", "loss.output_weights=[2,1]", "task.ignore_label=9"
    )
    loss = extensions.make_loss(config)
    assert [term.weight for term in loss.terms] == [0.5, 1.0]
    assert (loss.output_weights, loss.ignore_value) == ([2, 1], 9)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["loss._target_=monai.losses.DiceLoss", "loss.softmx=true"], "did you mean softmax"),
        (
            ["loss=sum", "loss.terms=[{_target_: monai.losses.DiceLoss, factor: null}]"],
            "loss.terms[0].factor: expected a number, but got None",
        ),
        (
            ["loss._target_=monai.losses.DiceLoss", "loss.target_form=onehot"],
            "loss.target_form: choose one of indices, channel, one_hot, not 'onehot'",
        ),
        (
            ["loss._target_=monai.losses.DiceLoss", "loss.sigmoid=true", "loss.softmax=true"],
            "loss: Incompatible values",
        ),
        (
            ["loss._target_=monai.losses.SSIMLoss", "loss.spatial_dims=3", "task.ignore_label=255"],
            "SSIMLoss is not a sum over voxels",
        ),
        (
            ["loss=hausdorff_dt", "task.ignore_label=255"],
            "HausdorffDTLoss is not a sum over voxels",
        ),
        (
            ["loss=sum", "loss.terms=[{_target_: os.system}]"],
            "loss.terms[0]._target_: os.system is not on the white list",
        ),
        (["loss=sum", "loss.terms=[3]"], "loss.terms[0]._target_: the name of a class is needed"),
    ],
)
def test_a_loss_that_cannot_work_is_one_sentence(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        extensions.check_loss(compose(*overrides))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


MIXED = (
    "augment.transforms=[effects, {_target_: monai.transforms.RandGaussianNoised, prob: 0.5}, "
    "{_target_: monai.transforms.RandAffined, prob: 0.8, rotate_range: [0.1, 0.1, 0.1]}, "
    "{_target_: medseg.data.augment.Noise, "
    "probability: 0.5, sd: [0.01, 0.1]}]"
)


def test_transforms_of_ours_and_of_monai_come_in_their_order() -> None:
    transforms = extensions.make_transforms(compose(MIXED))
    assert transforms is not None
    assert isinstance(transforms.transforms[1], Affine)
    assert isinstance(transforms.transforms[-3], RandGaussianNoised)
    assert transforms.transforms[-1] == Noise(0.5, [0.01, 0.1])
    assert extensions.make_transforms(compose("augment=none")) is None


@pytest.mark.parametrize("mode", ["", ", keys: [image, label], mode: [bilinear, nearest]"])
def test_a_transform_takes_a_mode_for_each_key_although_it_annotates_one(mode: str) -> None:
    """The argument `mode` of this class is annotated as a text."""
    grid = f"{{_target_: monai.transforms.RandGridDistortiond, prob: 0.5{mode}}}"
    transforms = extensions.make_transforms(compose(f"augment.transforms=[{grid}]"))
    assert transforms is not None
    assert transforms.transforms[0].mode == ("bilinear", "nearest")


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (
            "{_target_: monai.transforms.RandGridDistortiond, mode: [1, 2]}",
            "mode: RandGridDistortiond needs a text, but got [1, 2]",
        ),
        (
            "{_target_: monai.transforms.RandFlipd, prob: [0.1, 0.2], spatial_axis: 0}",
            "prob: RandFlipd needs a number, but got [0.1, 0.2]",
        ),
        (
            "{_target_: monai.transforms.RandFlipd, prob: 0.1, spatial_axis: 2}",
            "mirrors left and right",
        ),
        (
            "{_target_: monai.transforms.RandFlipd, prob: 0.1, spatial_axs: 2}",
            "augment.transforms[0]: ",
        ),
        (
            "{_target_: monai.transforms.RandAffined, keys: [image, label]}",
            "mode is missing beside keys",
        ),
        (
            "{_target_: builtins.eval}",
            "augment.transforms[0]._target_: builtins.eval is not on the white list",
        ),
        ("effect", "augment.transforms[0]._target_: the name of a class is needed"),
        (
            "{_target_: medseg.data.augment.Noise, probability: 0.5}",
            "missing a required argument: 'sd'",
        ),
    ],
)
def test_a_transform_that_cannot_work_is_one_sentence(transform: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        extensions.make_transforms(compose(f"augment.transforms=[{transform}]"))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("stage", "painted"), [("coarse", (1, 2)), ("fine", (1,))])
def test_disease_is_painted_into_the_labels_of_regions(
    stage: str, painted: tuple[int, ...]
) -> None:
    airway = ("+task.labels.airway=3", "+data.label_values.airway=3")
    transforms = extensions.make_transforms(compose(f"stage={stage}", *airway))
    assert transforms is not None
    effects = [
        effect for effect in transforms.transforms if isinstance(effect, (Missing, Disease, Fluid))
    ]
    assert [tuple(effect.organ_values) for effect in effects] == [painted] * 3
    whole = compose("stage=single", "task.regions=null", *airway)
    transforms = extensions.make_transforms(whole)
    assert transforms is not None
    (disease,) = (effect for effect in transforms.transforms if isinstance(effect, Disease))
    assert tuple(disease.organ_values) == (1, 2, 3)


def test_z_scores_beside_a_window_are_not_clipped_to_its_range() -> None:
    channels = (
        "task.channels=[{modality: ct, window_hu: [-160, 240]}, {modality: mr, normalise: zscore}]"
    )
    transforms = extensions.make_transforms(compose("task.window_hu=null", channels))
    assert transforms is not None
    image = torch.full((2, 4, 6, 8), 4.0)
    labels = torch.zeros(4, 6, 8, dtype=torch.uint8)
    for n in range(8):
        changed, _ = transforms.alter(image.clone(), labels, sample_rng(0, n), (2.0, 1.0, 1.0), 2)
        assert float(changed[0].max()) <= 1.0
        assert float(changed[1].max()) > 3.0, "the least factor is 0.8"


def test_a_field_of_an_effect_that_has_no_key_keeps_its_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @dataclass(frozen=True)
    class Blur:
        sd: float
        window_hu: tuple[float, float] | None
        passes: int = 3

    monkeypatch.setattr(extensions, "EFFECTS", {"blur": Blur})
    shared = {"sd": 1.0, "window_hu": None}
    assert extensions.make_effects(shared) == [Blur(1.0, None)]
    assert extensions.make_effects({**shared, "blur_sd": 2.0}) == [Blur(2.0, None)]


def test_sides_may_be_mirrored_when_that_is_said() -> None:
    flip = "augment.transforms=[{_target_: monai.transforms.RandFlipd, prob: 0.1, spatial_axis: 2}]"
    assert extensions.make_transforms(compose(flip, "augment.allow_mirroring=true")) is not None


def batches(
    table: Path, num_workers: int, start_step: int = 0, start_method: str | None = None
) -> list[list[dict[str, Any]]]:
    """Batches of a run, each a list of stacks of samples of one shape."""
    config = compose(
        MIXED, f"data.cases='{table}'", f"data.cache='{table.parent / 'cache'}'",
        f"data.num_workers={num_workers}",
        "spacing=isotropic_4mm", "trainer.accelerator=cpu", "logger=none", "steps=4",
        "stage.batch_size=2",
    )  # fmt: skip
    data = make_data_module(config)
    data.prepare_data()
    data.setup("fit")
    loader = data.train_batches(start_step=start_step)
    if start_method is not None:
        loader.multiprocessing_context = start_method
    return list(loader)


@pytest.mark.parametrize(
    "change", [{"labels": {"lung": 1}}, {"channels": (Channel("mr", None, "zscore"),)}]
)
def test_a_coarse_stage_of_another_task_is_refused(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = compose("stage=fine", "trainer.accelerator=cpu")
    config.stage.coarse = "c.ckpt"
    stage = SimpleNamespace(task=replace(make_task(config.task), **change))
    monkeypatch.setattr("medseg.training.assemble.load_stage", lambda *_, **__: stage)
    with pytest.raises(
        UserError,
        match=(
            r"stage\.coarse=c\.ckpt: it was trained for the task lungs with .* give a checkpoint "
            "of the same task"
        ),
    ):
        make_data_module(config)


def test_mixed_transforms_give_the_same_samples_however_they_are_made(tiny_table: Path) -> None:
    """With 0, 1 and 2 workers, with workers that inherit nothing, and after an interruption."""
    whole = batches(tiny_table, 0)
    assert len({float(stack["image"].sum()) for batch in whole for stack in batch}) > 4
    with forked.served():
        apart = batches(tiny_table, 2, start_method="forkserver")
    others = [batches(tiny_table, 1), batches(tiny_table, 2), apart]
    for other in others:
        assert len(other) == len(whole)
    for steps, first in [
        *((other, 0) for other in others),
        (batches(tiny_table, 2, start_step=2), 2),
    ]:
        for batch, same_batch in zip(steps, whole[first:], strict=True):
            for stack, same in zip(batch, same_batch, strict=True):
                assert torch.equal(stack["image"], same["image"])
                assert torch.equal(stack["target"], same["target"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["metrics.iou._target_=torchmetrics.classification.MulticlassJaccardIndx"],
            "did you mean torchmetrics.classification.MulticlassJaccard",
        ),
        (
            ["metrics.words._target_=torchmetrics.text.BLEUScore"],
            "metrics.words: it cannot score label maps",
        ),
        (
            ["callbacks.stop._target_=lightning.pytorch.callbacks.EarlyStopping"],
            "missing a required argument: 'monitor'",
        ),
        (["callbacks.mine._target_=mine.Callback"], "trusted_targets=[mine.]"),
    ],
)
def test_a_metric_or_callback_that_cannot_work_is_one_sentence(
    overrides: list[str], message: str
) -> None:
    def make() -> None:
        config = compose(*overrides)
        extensions.make_metrics(config.metrics, 3)
        extensions.make_callbacks(config)

    with pytest.raises(UserError) as caught:
        make()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_callbacks_metrics_and_loggers_are_added_by_name_with_and_without_a_plus() -> None:
    config = compose(
        "callbacks.timer._target_=lightning.pytorch.callbacks.Timer",
        "callbacks.timer.duration='00:01:00:00'",
        "+callbacks.rate._target_=lightning.pytorch.callbacks.LearningRateMonitor",
        "metrics.iou._target_=monai.metrics.MeanIoU",
        "logger=many", "logger.more._target_=lightning.pytorch.loggers.CSVLogger",
        "logger.more.save_dir=logs",
    )  # fmt: skip
    assert [type(callback).__name__ for callback in extensions.make_callbacks(config)] == [
        "Timer",
        "LearningRateMonitor",
    ]
    assert list(extensions.make_metrics(config.metrics, 3)) == ["iou"]
    assert [type(logger).__name__ for logger in extensions.make_loggers(config)] == [
        "CSVLogger",
        "TensorBoardLogger",
        "CSVLogger",
    ]


def test_a_run_folder_that_is_not_utf_8_needs_the_logger_that_can_write_there(
    tmp_path: Path,
) -> None:
    run_dir = f"run_dir='{tmp_path}/Pat_M\udcfcller'"
    with pytest.raises(
        UserError, match=r"expected a run folder whose name is UTF-8, .* or give logger=csv"
    ):
        check_objects(compose("logger=tensorboard", run_dir))
    check_objects(compose("logger=csv", run_dir))


def test_the_check_of_the_loggers_leaves_no_file_in_the_run_folder_and_prints_no_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    made = []

    class WritesAtOnce(lightning.pytorch.loggers.CSVLogger):
        def __init__(self, save_dir: str) -> None:
            Path(save_dir).mkdir(parents=True)
            made.append(save_dir)
            super().__init__(save_dir)

    monkeypatch.setattr(lightning.pytorch.loggers, "CSVLogger", WritesAtOnce)
    run_dir = tmp_path / "run"
    logger = [
        "+logger.mine._target_=lightning.pytorch.loggers.CSVLogger",
        "+logger.mine.save_dir=${run_dir}/logs",
    ]
    check_objects(compose("logger=none", *logger, f"run_dir={run_dir}"))
    assert len(made) == 1
    assert not run_dir.exists()
    assert not Path(made[0]).exists()
    assert not [warning for warning in recwarn if "optimizer.step" in str(warning.message)]


def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    class Missing:
        def __bool__(self) -> bool:
            return False

        def __str__(self) -> str:
            return "Requirement 'wandb' not met"

    monkeypatch.setattr(lightning.pytorch.loggers.wandb, "_WANDB_AVAILABLE", Missing())
    with pytest.raises(
        UserError, match=r"logger: a package is missing \(Requirement 'wandb' not met\)"
    ):
        extensions.make_loggers(compose("logger=wandb", "tags=[a,b]"))


@pytest.mark.parametrize(("key", "has_hint"), [("logger.more", True), ("loss", False)])
def test_the_command_of_a_preset_is_named_for_loggers_alone(key: str, has_hint: bool) -> None:
    with pytest.raises(UserError, match=r"a package is missing .*; install it") as caught:
        extensions._call(key, partial(importlib.import_module, "absent_package"))
    assert ("its file in conf/" in str(caught.value)) == has_hint


@pytest.mark.usefixtures("without_pictures")
def test_a_run_scores_its_metrics_with_its_callbacks_and_resumes_with_them(
    tiny_table: Path, tmp_path: Path
) -> None:
    settings = [
        "loss._target_=monai.losses.DiceFocalLoss", "metrics.iou._target_=monai.metrics.MeanIoU",
        "metrics.iou.include_background=false",
        "callbacks.rate._target_=lightning.pytorch.callbacks.LearningRateMonitor", "logger=csv",
        "schedule=constant", "stage.validate_every=2",
        "augment.transforms=[effects, {_target_: monai.transforms.RandGaussianNoised, prob: 0.5}]",
        f"data.cases='{tiny_table}'", f"data.cache='{tiny_table.parent / 'cache'}'",
        "data.num_workers=0", "spacing=isotropic_4mm",
        "trainer.accelerator=cpu", "model.width=4", "model.blocks_per_level=[1,1,1,1]",
    ]  # fmt: skip

    def weights(name: str, *steps: int, debug: str = "none") -> dict[str, torch.Tensor]:
        run_dir = tmp_path / name
        own = [f"debug={debug}", f"logger.save_dir='{run_dir}'"]
        for number in steps:
            config = compose(*settings, *own, f"steps={number}")
            config.run_dir, config.resume = str(run_dir), str(run_dir) if run_dir.exists() else None
            folder.open_run(config)
            train_run(config)
        saved: dict[str, torch.Tensor] = load_checkpoint(
            run_dir / "checkpoints" / "last.ckpt", name
        )["state_dict"]
        return saved

    whole, resumed = weights("whole", 4, debug="profile_torch"), weights("resumed", 2, 4)
    assert all(torch.equal(weight, resumed[name]) for name, weight in whole.items())
    with (tmp_path / "resumed" / "history.csv").open(newline="") as file:
        scored = [row["val_iou"] for row in csv.DictReader(file) if row["val_dice"]]
    assert len(scored) == 2
    assert all(0 <= float(score) <= 1 for score in scored)
    assert list((tmp_path / "whole").glob("*.pt.trace.json")), "torch's trace"
