"""Training from a model folder of nnU-Net: its network, its weights and its preprocessing."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.nnunet_reference import described_network, labels_of, toy
from medseg.commands.entry import compose as compose_command
from medseg.config.check import to_config
from medseg.config.pretrained import NETWORK, with_plan
from medseg.config.schema import CrossValidateConfig
from medseg.errors import UserError
from medseg.losses.sample_losses import mean_of_samples, sample_losses
from medseg.models.plan_unet import PlanUNet
from medseg.models.stage_network import StageNetwork
from medseg.preprocess.intensity import normalise, window
from medseg.task_options import make_task
from medseg.training.extensions import make_loss
from medseg.training.network import load_initial_weights, make_network
from medseg.training.options import TrainConfig

MakeFolder = Callable[..., Path]
LABELS = "task.labels={left_lung:1,right_lung:2}"
LUNGS = {"background": 0, "left_lung": 1, "right_lung": 2}


@pytest.fixture(autouse=True)
def _needs_networks() -> None:
    pytest.importorskip("dynamic_network_architectures")


def toy_model(**changes: Any) -> dict[str, Any]:
    """A plan whose axes, patch and spacing differ from each other."""
    described: dict[str, Any] = {
        "labels": LUNGS,
        "spacing_mm": [2.0, 3.0, 4.0],
        "patch_size": [32, 24, 40],
        "network": described_network(4),
    }
    return toy(**(described | changes))


def arguments_of(folder: Path, *arguments: str) -> list[str]:
    overrides = [f"init_from='{folder}'", "trainer=cpu", "logger=none", "run_dir=x", *arguments]
    return with_plan(overrides, TrainConfig, lambda chosen: compose_command("train", chosen))


def configure(folder: Path, *arguments: str) -> TrainConfig:
    composed, _ = compose_command("train", arguments_of(folder, *arguments))
    return to_config(composed, TrainConfig)


def start(config: TrainConfig) -> StageNetwork:
    """Network of a configuration with its initial weights."""
    torch.manual_seed(config.seed)
    network = make_network(config)
    load_initial_weights(network, config)
    return network


def weights_of(folder: Path, fold: int = 0) -> dict[str, Tensor]:
    file = folder / f"fold_{fold}" / "checkpoint_final.pth"
    weights: dict[str, Tensor] = torch.load(file, weights_only=False)["network_weights"]
    return weights


def network_of_nnunet(toy: Mapping[str, Any], weights: Mapping[str, Tensor]) -> nn.Module:
    """The network as nnU-Net's trainer builds it, with deep supervision, from the plan alone."""
    from dynamic_network_architectures.architectures import unet

    architecture = toy["plans"]["configurations"]["3d_fullres"]["architecture"]
    arguments = dict(architecture["arch_kwargs"])
    parts = {"conv_op": nn.Conv3d, "norm_op": nn.InstanceNorm3d, "nonlin": nn.LeakyReLU}
    network_class = getattr(unet, architecture["network_class_name"].rsplit(".", 1)[-1])
    network: nn.Module = network_class(
        input_channels=len(toy["dataset"]["channel_names"]),
        num_classes=len(toy["dataset"]["labels"]),
        deep_supervision=True,
        **(arguments | parts),
    )
    network.load_state_dict(weights)
    return network.train()


@pytest.mark.parametrize(
    ("changes", "axes"),
    [
        ({}, ()),
        ({"network": described_network(4, residual=True)}, ()),
        ({"transpose": (2, 0, 1), "reader": "NibabelIOWithReorient"}, (1, 2)),
    ],
    ids=["plain", "residual", "turned"],
)
def test_the_first_loss_is_that_of_nnunets_own_network(
    changes: dict[str, Any], axes: tuple[int, ...], make_folder: MakeFolder
) -> None:
    """The same scan, through our preprocessing and network, and through nnU-Net's formulas."""
    model = toy_model(**changes)
    folder = make_folder(model)
    config = configure(folder)
    network = start(config).train()
    loss = make_loss(config)
    transpose = changes.get("transpose", (0, 1, 2))
    order = [int(axis) for axis in np.argsort(transpose)]
    shape = np.array(model["plans"]["configurations"]["3d_fullres"]["patch_size"])[order]
    numbers = np.random.default_rng(0)
    hu = numbers.normal(-200, 500, shape).astype(np.float32)
    target = torch.from_numpy(numbers.integers(0, 3, (1, *shape)))

    (channel,) = make_task(config.task).channels
    assert channel.window_hu is not None
    image = torch.from_numpy(normalise(hu, window(channel.window_hu)))[None, None]
    ours = mean_of_samples(sample_losses(loss, network(image), target))

    known = model["plans"]["foreground_intensity_properties_per_channel"]["0"]
    values = np.clip(hu, known["percentile_00_5"], known["percentile_99_5"])
    values = (values - known["mean"]) / known["std"]
    turned = np.flip(values, axes).transpose(transpose)
    seen = torch.from_numpy(np.ascontiguousarray(turned, dtype=np.float32))[None, None]
    outputs = network_of_nnunet(model, weights_of(folder))(seen)
    # Back to the order of the scan: a coarse target is every second voxel of it.
    back = [0, 1, *(2 + axis for axis in order)]
    stored = [
        logits.permute(back).flip([2 + axis for axis in axes]).contiguous() for logits in outputs
    ]
    theirs = mean_of_samples(sample_losses(loss, stored, target))

    assert len(outputs) == 2, "deep supervision"
    assert abs(ours.item() - theirs.item()) < 1e-5


def test_keys_are_those_of_the_plan(
    make_folder: MakeFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(toy_model(transpose=(2, 0, 1)))
    config = configure(folder)
    # Axis a of the plan is the stored axis transpose[a].
    assert config.spacing.target_spacing_mm == (3.0, 4.0, 2.0)
    assert (config.spacing.strategy, config.spacing.resampling) == ("anisotropic", "cubic")
    assert config.stage.name == "single"
    assert config.stage.patch_size == config.inference.tile_size == (24, 40, 32)
    (channel,) = make_task(config.task).channels
    assert channel.window_hu == (-990.0, 420.0)
    told = capsys.readouterr().err
    assert "by its plan 3d_fullres of Dataset999_Toy: the network (PlainConvUNet)" in told
    assert "spacing 3×4×2 mm (cubic), patch 24×40×32, normalisation [-990.0, 420.0]" in told


def test_keys_of_the_command_line_and_its_experiment_win(
    make_folder: MakeFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(toy_model())
    config = configure(
        folder,
        "spacing=isotropic_3mm",
        "stage.patch_size=[16,16,16]",
        "task.window_hu=[-1000,600]",
        "model.deep_supervision=false",
    )
    assert config.spacing.target_spacing_mm == (3.0, 3.0, 3.0)
    assert config.stage.patch_size == (16, 16, 16)
    assert config.model["deep_supervision"] is False
    assert "by its plan 3d_fullres of Dataset999_Toy: the network (PlainConvUNet)\n" in (
        capsys.readouterr().err
    )
    # Another window keeps the meaning of HU: (hu - mean) / std.
    (scale,), (shift,) = config.model["scale"], config.model["shift"]
    values = normalise(np.array([-150.0, 170.0]), window((-1000.0, 600.0)))
    assert np.allclose(values * scale + shift, [0.0, 1.0], atol=1e-5)
    with_experiment = configure(folder, "experiment=finetune_fine")
    assert with_experiment.stage.name == "fine"
    assert with_experiment.stage.patch_size == (128, 160, 160)
    assert with_experiment.model["_target_"] == NETWORK


def test_z_scores_of_a_plan_are_ours(
    make_folder: MakeFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    schemes = ("ZScoreNormalization", "RescaleTo01Normalization") * 2
    config = configure(make_folder(toy_model(schemes=schemes, masked=True)), "task=brain_tumour")
    channels = make_task(config.task).channels
    assert [channel.normalise for channel in channels] == ["zscore", "percentile"] * 2
    assert (config.model["scale"], config.model["shift"]) == ([1.0, 0.5] * 2, [0.0, 0.5] * 2)
    assert "leaves zeros at 0, medseg shifts them" in capsys.readouterr().err


def test_the_second_fold_can_be_named(make_folder: MakeFolder) -> None:
    folder = make_folder(toy_model(folds=(0, 1)))
    for path, fold in ((folder, 0), (folder / "fold_1", 1)):
        network = start(configure(path)).network
        assert isinstance(network, PlanUNet)
        for name, value in network.network.state_dict().items():
            assert torch.equal(value, weights_of(folder, fold)[name])


def test_each_weight_has_one_name(make_folder: MakeFolder) -> None:
    """A checkpoint of nnU-Net lists the layers of its encoder four times."""
    folder = make_folder(toy_model())
    weights = start(configure(folder)).state_dict()
    assert len({value.data_ptr() for value in weights.values()}) == len(weights)
    assert len(weights_of(folder)) > 2 * len(weights)


def test_another_label_set_gets_a_new_head(
    make_folder: MakeFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(toy_model(labels=labels_of(3)))
    network = start(configure(folder)).network
    assert isinstance(network, PlanUNet)
    taken = weights_of(folder)
    for name, value in network.network.state_dict().items():
        is_head = name.startswith("decoder.seg_layers.")
        # Three outputs as well, but of other labels.
        assert value.shape == taken[name].shape
        assert torch.equal(value, taken[name]) != is_head
    assert (
        "fresh are the layers of the logits (labels left_lung, right_lung in place of organ_1, "
        "organ_2)"
    ) in capsys.readouterr().err


def test_other_channels_get_a_new_first_layer(
    make_folder: MakeFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(toy_model())
    channels = "task.channels=[{modality:mr,normalise:zscore},{modality:mr,normalise:zscore}]"
    config = configure(folder, "task.window_hu=null", channels)
    network = start(config)
    assert isinstance(network.network, PlanUNet)
    taken = weights_of(folder)
    fresh = [
        name
        for name, value in network.network.network.state_dict().items()
        if value.shape != taken[name].shape
    ]
    assert fresh == ["encoder.stages.0.0.convs.0.all_modules.0.weight"]
    told = capsys.readouterr().err
    assert "the task lungs has 2 channels and the plan 1" in told
    assert "fresh are the first layer (the plan has 1 channels)" in told
    image = torch.randn(1, 2, 32, 24, 40)
    assert network.eval()(image).shape == (1, 3, 32, 24, 40)


@pytest.mark.parametrize(
    ("changes", "arguments", "sentence"),
    [
        ({}, ["model=unet"], "the network is that of its plan, but model=unet chooses another"),
        ({"schemes": ("NoNormalization",)}, [], "the channel CT is not normalised"),
    ],
)
def test_what_contradicts_the_plan_is_refused(
    changes: dict[str, Any], arguments: list[str], sentence: str, make_folder: MakeFolder
) -> None:
    folder = make_folder(toy_model(**changes))
    with pytest.raises(UserError, match=sentence):
        arguments_of(folder, *arguments)


def test_a_study_of_stages_has_its_own_networks(make_folder: MakeFolder) -> None:
    folder = make_folder(toy_model())
    with pytest.raises(UserError, match=r"the experiments of this command name their own"):
        with_plan([f"init_from='{folder}'"], CrossValidateConfig, lambda _: None)


@pytest.mark.parametrize("name", ["2d", "cascade"])
def test_networks_that_do_not_see_scans_in_3d_alone_are_refused(
    name: str,
) -> None:
    recorded = Path(__file__).parent / "recorded" / f"{name}.zip"
    sentence = r"sees slices, or also the labels of .*; give a folder of 3d_fullres"
    with pytest.raises(UserError, match=sentence):
        arguments_of(recorded)


def test_a_network_of_ours_does_not_take_weights_of_a_plan(make_folder: MakeFolder) -> None:
    folder = make_folder(toy_model())
    composed, _ = compose_command("train", [f"init_from='{folder}'", "run_dir=x"])
    with pytest.raises(UserError, match="the configured network is UNet, not that of its plan"):
        start(to_config(composed, TrainConfig))


def test_weights_of_another_network_are_refused(make_folder: MakeFolder) -> None:
    folder = make_folder(toy_model())
    config = configure(folder)
    config.model["arguments"]["features_per_stage"] = [4, 8, 12]
    with pytest.raises(UserError, match="do not fit the network of its plan"):
        start(config)


@pytest.mark.parametrize(
    ("sweep", "setting"),
    [
        ("stage.batch_size=1,2", "spacing.target_spacing_mm=[2.0,3.0,4.0]"),
        ("stage.batch_size=range(1,3)", "stage.patch_size=[32,24,40]"),
        ("spacing=isotropic_1mm,isotropic_2mm", "stage.patch_size=[32,24,40]"),
        # Both tasks have one channel, whose window is that of the plan.
        ("task=kidneys,spine", "task.window_hu=null"),
    ],
)
def test_a_multirun_may_sweep_over_keys_of_the_groups_that_a_plan_sets(
    make_folder: MakeFolder, sweep: str, setting: str
) -> None:
    # Hydra takes the mode as an option or as an argument.
    arguments = arguments_of(make_folder(toy_model()), "hydra.mode=MULTIRUN", sweep)
    assert setting in arguments
    assert arguments[-1] == sweep
    sets_spacing = any(argument.startswith("spacing=") for argument in arguments[:-1])
    assert sets_spacing != sweep.startswith("spacing=")


def test_a_multirun_whose_jobs_need_other_keys_of_the_plan_is_refused(
    make_folder: MakeFolder,
) -> None:
    folder = make_folder(toy_model())
    with pytest.raises(UserError, match="one command for each value of task"):
        arguments_of(folder, "-m", "task=kidneys,brain_tumour")


@pytest.mark.parametrize("arguments", [["resume=run"], ["init_from=null"], ["init_from=w.ckpt"]])
def test_other_starts_have_no_plan(arguments: list[str], make_folder: MakeFolder) -> None:
    overrides = list(arguments)
    if "init_from" not in arguments[0]:
        overrides.insert(0, f"init_from='{make_folder(toy_model())}'")

    def refuse(_: Any) -> Any:
        raise AssertionError("nothing is composed")

    assert with_plan(overrides, TrainConfig, refuse) == overrides


@pytest.mark.parametrize("arguments", [[], ["init_from="], ["stage=single"]])
def test_a_model_folder_is_not_started_from_because_it_is_the_working_folder(
    arguments: list[str], make_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(make_folder(toy_model()))

    def refuse(_: Any) -> Any:
        raise AssertionError("nothing is composed")

    assert with_plan(arguments, TrainConfig, refuse) == arguments


# A run that kills itself when it has made three steps. Like the command it trains without AMX,
# which rounds otherwise.
KILLED_RUN = """
import os, signal, sys
from pathlib import Path
from medseg.memory.instructions import train_without_amx
train_without_amx()
from medseg.runs.folder import load_config
from medseg.runs.train_run import train_run
from medseg.training.module import SegmentationModule

start = SegmentationModule.on_train_batch_start
def on_train_batch_start(self, batch, batch_idx):
    if self.global_step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    start(self, batch, batch_idx)
SegmentationModule.on_train_batch_start = on_train_batch_start
train_run(load_config(Path(sys.argv[1])))
"""


@pytest.mark.slow
def test_a_killed_run_ends_alike_and_predicts(
    make_folder: MakeFolder, tiny_table: Path, tmp_path: Path
) -> None:
    """With blocks that are recomputed, in bf16 and in two micro-batches."""
    folder = make_folder(toy_model(spacing_mm=[4.0, 4.0, 4.0], patch_size=[24, 32, 24]))
    settings = [
        f"init_from={folder}", f"data.cases={tiny_table}", "trainer=cpu", "trainer.threads=1",
        "logger=none", "data.num_workers=0", "memory.checkpointing=all", "memory.precision=bf16",
        "memory.accumulate=2", "stage.batch_size=2", "steps=6", "stage.validate_every=2",
        "history_every=1",
    ]  # fmt: skip
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    command = [sys.executable, "-m", "medseg.commands.cli"]
    result = forked.run([*command, "train", *settings, f"hydra.run.dir={whole}"])
    assert result.returncode == 0, result.stderr
    assert "none is fresh" in result.stderr
    killed.mkdir()
    shutil.copy(whole / "config.yaml", killed)
    result = forked.run([sys.executable, "-c", KILLED_RUN, str(killed)])
    assert result.returncode == -signal.SIGKILL
    result = forked.run([*command, "train", f"resume={killed}"])
    assert result.returncode == 0, result.stderr
    assert "none is fresh" not in result.stderr, "its weights are those of the checkpoint"
    checkpoints = [
        torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for run in (whole, killed)
    ]
    assert checkpoints[0].keys() == checkpoints[1].keys()
    for name, value in checkpoints[0].items():
        assert torch.equal(value, checkpoints[1][name]), name
    labels = tmp_path / "labels.nii.gz"
    result = forked.run(
        [
            *command,
            "predict",
            f"input={tiny_table.parent / 'c3.nii.gz'}",
            f"output={labels}",
            f"single={killed / 'checkpoints' / 'last.ckpt'}",
            "accelerator=cpu",
        ]
    )
    assert result.returncode == 0, result.stderr
    assert labels.is_file()
