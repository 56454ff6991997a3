"""Plan: the table of a step, the budget, the largest batch, and a real training's bytes."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra
import lightning.pytorch as pl
import pytest
import torch

from medseg.commands import entry
from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.config.schema import PlanConfig
from medseg.errors import UserError
from medseg.inference.tiles import most_probable, predict_probs
from medseg.memory.accounting import StepMemory
from medseg.memory.switches import switch_on
from medseg.memory.tracker import MemoryTracker, Timeline
from medseg.planning import estimate, step
from medseg.planning import plan as plan_app
from medseg.planning.choose import MARGIN
from medseg.planning.estimate import kept_by_heap_in_step
from medseg.planning.process import ProcessCost, SampleCost
from medseg.runs.folder import open_run
from medseg.training.assemble import make_trainer
from medseg.training.extensions import make_loss
from medseg.training.module import SegmentationModule
from medseg.training.network import make_network
from medseg.training.optimisation import make_optimizer, make_schedule
from medseg.training.options import TrainConfig, samples_per_micro_batch

SMALL = [
    "stage=fine",
    "model.width=4",
    "model.depth=2",
    "model.blocks_per_level=[1,1,1]",
    "trainer.accelerator=cpu",
    "measure=false",
]


def compose(*overrides: str) -> PlanConfig:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return to_config(hydra.compose("plan", [*overrides, "run_dir=x"]), PlanConfig)


def test_prints_the_parts_and_compares_with_the_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "plan.json"
    arguments = [*SMALL, "memory=lean", "shape=[16,24,32]", f"output='{output}'"]
    assert plan_app.plan(compose(*arguments, "memory.budget_gib=1")) == 0
    facts = json.loads(output.read_text())
    assert facts["shape"] == [16, 24, 32]
    assert facts["fits"] is True
    printed = capsys.readouterr().out
    for part in ("parameters", "optimiser state", "  encoder.0.block0", "peak of the step"):
        assert part in printed
    assert f"{facts['saved_per_voxel']:.2f}" in printed
    assert (
        plan_app.plan(compose(*arguments, f"memory.budget_gib={facts['peak'] / 2**30 * 0.99}")) == 1
    )
    assert "does not fit" in capsys.readouterr().err


def test_the_budget_holds_for_the_validation_too_and_names_what_exceeds_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "plan.json"
    patch = ["stage.patch_size=[16,16,16]", "validation_shape=[48,48,48]", f"output='{output}'"]
    assert plan_app.plan(compose(*SMALL, *patch)) == 0
    facts = json.loads(output.read_text())
    assert facts["peak_of"] == "validation"
    assert facts["validation_peak_mib"] > 2 * facts["peak_live_mib"]
    assert "the peak of the run is that of the validation" in capsys.readouterr().out
    budget = f"memory.budget_gib={0.99 * facts['validation_peak_mib'] / 1024}"
    assert plan_app.plan(compose(*SMALL, *patch, budget)) == 1
    said = capsys.readouterr().err
    assert "the validation needs" in said
    assert "choose smaller tiles, inference.tile_size=[D,H,W]" in said
    assert plan_app.plan(compose(*SMALL, *patch, budget, "inference.tile_size=[16,16,16]")) == 0


def test_the_validation_holds_the_state_of_the_optimiser(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_app, "evaluation_bytes", lambda *_: (3 * 2**20, 5 * 2**20))
    output = tmp_path / "plan.json"
    assert plan_app.plan(compose(*SMALL, "shape=[16,24,32]", f"output='{output}'")) == 0
    facts = json.loads(output.read_text())
    state_mib = facts["optimizer_state"] / 2**20
    assert state_mib > 0.02
    assert facts["validation_peak_mib"] == round(8 + state_mib, 2)


@pytest.mark.parametrize("patch", [(64, 64, 64), (48, 96, 96)])
def test_one_stage_is_validated_in_tiles_of_its_training_patch(patch: tuple[int, int, int]) -> None:
    config = compose("stage=single", f"stage.patch_size={list(patch)}")
    assert config.inference.tile_size == patch
    named = compose(
        "stage=single", f"stage.patch_size={list(patch)}", "inference.tile_size=[80,80,80]"
    )
    assert named.inference.tile_size == (80, 80, 80)


@pytest.mark.parametrize(
    ("changes", "samples", "optimizer_copies"),
    [([], 1, 2), (["stage.batch_size=3"], 3, 2), (["optimizer=sgd"], 1, 1)],
)
def test_a_run_to_resume_is_planned_with_the_changes_of_the_command_line(
    changes: list[str],
    samples: int,
    optimizer_copies: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_dir = tmp_path / "run"
    settings = [*SMALL[:-1], "stage.patch_size=[16,24,32]", "memory=lean", "logger=none"]
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        run = to_config(hydra.compose("train", [*settings, f"run_dir='{run_dir}'"]), TrainConfig)
    open_run(run)
    arguments = ["plan", f"resume={run_dir}", "measure=false", "output=plan.json", *changes]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.chdir(tmp_path)
    for name in ("OMP_WAIT_POLICY", "HYDRA_FULL_ERROR"):
        monkeypatch.setenv(name, "1")
    # They change this process.
    monkeypatch.setattr(entry, "map_large_blocks", lambda: None)
    monkeypatch.setattr(entry, "train_without_amx", lambda: None)
    with pytest.raises(SystemExit) as ended:
        entry.run_command("plan")
    assert ended.value.code == 0
    facts = json.loads((tmp_path / "plan.json").read_text())
    assert (facts["stage"], facts["shape"]) == ("fine", [16, 24, 32])
    assert facts["voxels"] == samples * 16 * 24 * 32
    assert round(facts["optimizer_state"] / facts["parameters"]) == optimizer_copies


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements in a folder of their own, and processes of known sizes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "measurements"))
    monkeypatch.setattr(
        estimate,
        "process_cost",
        lambda _, **__: ProcessCost(500 * 2**20, 0, 50 * 2**20, 20 * 2**20, 0.02),
    )
    monkeypatch.setattr(estimate, "sample_cost", lambda *_, **__: SampleCost(10 * 2**20, 0.5))


@pytest.mark.usefixtures("machine")
def test_measured_kernels_give_the_peaks_and_the_seconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "plan.json"
    arguments = [
        *SMALL,
        "measure=true",
        "shape=[16,24,32]",
        "trainer.threads=1",
        f"output='{output}'",
    ]
    assert plan_app.plan(compose(*arguments, "data.num_workers=0")) == 0
    without_workers = json.loads(output.read_text())
    assert without_workers["peak_live_mib"] == pytest.approx(
        without_workers["peak"] / 2**20, abs=0.01
    )
    # A convolution of the image alone writes its 27 neighbours of each voxel.
    assert without_workers["peak_allocator_mib"] > without_workers["peak_live_mib"]
    assert without_workers["peak_resident_mib"] == pytest.approx(
        500 + max(without_workers["allocator_mib"].values()) + 10, abs=3
    )
    assert without_workers["seconds_per_step"] == pytest.approx(
        without_workers["compute_seconds"] + 0.02 + 0.5, abs=0.001
    )
    assert "peak of torch's allocator" in capsys.readouterr().out
    assert plan_app.plan(compose(*arguments, "data.num_workers=2")) == 0
    with_workers = json.loads(output.read_text())
    assert with_workers["seconds_per_step"] == pytest.approx(
        max(0.25, with_workers["compute_seconds"]), rel=0.3
    )
    batch_mib = (with_workers["input"] + with_workers["target"]) / 2**20
    # Two workers of 50 MiB, each with a sample and two batches. Together they hold 20 MiB of old
    # pages and the weights that they were forked with.
    loader_mib = 2 * 60 + 4 * batch_mib + 20 + with_workers["parameters"] / 2**20
    # Without workers the heap that a sample leaves is kept in this process.
    heap_bytes = [kept_by_heap_in_step(with_workers["peak"], size) for size in (10 * 2**20, None)]
    expected = (
        without_workers["resident_mib"]["training step"]
        + loader_mib
        - (heap_bytes[0] - heap_bytes[1]) / 2**20
    )
    assert with_workers["resident_mib"]["training step"] == pytest.approx(expected, abs=0.1)
    lasting = estimate.Machine.lasting
    monkeypatch.setattr(estimate.Machine, "lasting", lambda *given: lasting(*given) + 7 * 2**20)
    assert plan_app.plan(compose(*arguments, "data.num_workers=2")) == 0
    larger = json.loads(output.read_text())["resident_mib"]
    for phase, size_mib in with_workers["resident_mib"].items():
        assert larger[phase] == pytest.approx(size_mib + 7, abs=0.1), phase


@pytest.mark.parametrize(
    ("model", "tile_size"),
    [
        (SMALL, None),
        (SMALL, (16, 16, 16)),
        (["model=segresnet", "model.init_filters=8", *SMALL[-2:]], None),
    ],
)
def test_an_evaluation_is_counted_as_it_runs(
    model: list[str], tile_size: tuple[int, int, int] | None
) -> None:
    config, shape = (
        compose(*model, f"inference.tile_size={list(tile_size) if tile_size else 'null'}"),
        (48, 32, 24),
    )
    beside, timeline = step.count_evaluation(config, shape)
    operations = [each for segment in timeline.segments for each in segment.operations]
    counted = beside + max(operation.live_bytes for operation in operations)
    network, image, target = (
        make_network(config).eval(),
        torch.zeros(1, 1, *shape),
        torch.zeros(shape, dtype=torch.uint8),
    )
    tracker = MemoryTracker()
    with tracker:
        for tensor in (image, target, *network.parameters()):
            tracker.assign(tensor, "given")
        probs = predict_probs(network, image, tile_size=tile_size, overlap=0.5, divisor=(8, 8, 8))
        most_probable(probs)
    assert tracker.peak_bytes <= counted <= (1.15 if tile_size else 1.01) * tracker.peak_bytes


def test_a_case_that_is_smaller_than_a_tile_is_counted_as_padded_to_it() -> None:
    config = compose(*SMALL, "inference.tile_size=[32,48,64]")
    whole, _ = step.count_evaluation(config, (32, 48, 64))
    for shape in ((16, 48, 64), (32, 8, 24)):
        beside, _ = step.count_evaluation(config, shape)
        # The float32 image and the uint8 reference keep their size; all else is padded.
        own_bytes = (4 + 1) * math.prod(shape)
        assert beside - own_bytes == whole - 32 * 48 * 64, "the whole case has no padded copy"
    larger, _ = step.count_evaluation(config, (40, 48, 64))
    assert larger > whole + 8 * 48 * 64


@pytest.mark.parametrize("switch", ["memory.precision=fp16", "memory.offload=true"])
def test_what_only_a_gpu_can_is_counted_as_on_a_gpu_in_step_and_validation(
    switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    counted_as_on_gpu: list[bool] = []

    def count(*_: Any, is_gpu: bool, **__: Any) -> Timeline:
        counted_as_on_gpu.append(is_gpu)
        return Timeline()

    monkeypatch.setattr(step, "count_step", count)
    monkeypatch.setattr(step, "count_forward", count)
    config = compose(*SMALL, "trainer.accelerator=auto", switch)
    step.count_memory(config, (16, 16, 16))
    step.count_evaluation(config, (16, 16, 16))
    assert counted_as_on_gpu == [True, True]


def test_a_budget_to_fit_and_one_to_check_exclude_each_other() -> None:
    with pytest.raises(UserError, match=r"fit_gib searches for switches, while memory\.budget_gib"):
        plan_app.plan(compose(*SMALL, "measure=true", "fit_gib=8", "memory.budget_gib=8"))
    with pytest.raises(UserError, match="max_seconds needs fit_gib"):
        plan_app.plan(compose(*SMALL, "max_seconds=8"))


@pytest.mark.slow
@pytest.mark.usefixtures("machine")
def test_the_chosen_switches_fit_and_are_printed_as_the_last_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "plan.json"
    arguments = [
        *SMALL,
        "measure=true",
        "shape=[16,16,24]",
        "trainer.threads=1",
        "data.num_workers=0",
        "allow=same_result",
        f"output='{output}'",
    ]
    assert plan_app.plan(compose(*arguments, "fit_gib=1")) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("choose: memory.precision=fp32 memory.channels_last=")
    facts = json.loads(output.read_text())
    assert f"choose: {facts['choose']}" == last
    assert facts["peak_resident_mib"] * (1 + MARGIN) <= 1024
    assert output.with_suffix(".png").stat().st_size > 1000
    chosen = compose(*arguments, *facts["choose"].split())
    assert plan_app.plan(chosen) == 0
    assert json.loads(output.read_text())["peak_resident_mib"] == pytest.approx(
        facts["peak_resident_mib"]
    )
    assert plan_app.plan(compose(*arguments, "fit_gib=0.4")) == 1
    assert "no set of switches fits" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "shape"),
    [
        (["stage=fine"], (320, 256, 192)),
        (["stage=fine", "spacing=isotropic_3mm"], (112, 96, 64)),  # rounded up to 16
        (["stage=fine", "stage.patch_size=[96,128,160]"], (96, 128, 160)),
        (["stage=fine", "stage.patch_size=[96,128,160]", "shape=[64,64,64]"], (64, 64, 64)),
        (["stage=coarse"], (176, 208, 208)),  # 208 slices would exceed stage.max_voxels
        (["stage=coarse", "stage.max_voxels=4000000"], (80, 208, 208)),
        (["stage=coarse", "stage.max_voxels=null"], (208, 208, 208)),
    ],
)
def test_plans_for_the_patch_or_for_what_the_stage_sees_whole(
    overrides: list[str], shape: tuple[int, int, int]
) -> None:
    assert step.input_shape(compose(*overrides)) == shape


@pytest.mark.parametrize(
    ("overrides", "is_kept"),
    [
        (["stage.patch_size=[96,128,160]"], True),
        (["stage.patch_size=[96,128,160]", "shape=[96,128,160]"], True),
        (["shape=[64,64,64]"], True),  # what the run sees depends on its data
        (["stage.patch_size=[96,128,160]", "shape=[64,64,64]"], False),
        (["spacing=fixed_size", "shape=[64,64,64]"], False),
    ],
)
def test_numbers_of_a_size_that_the_run_does_not_see_are_not_kept_for_it(
    overrides: list[str], is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[PlanConfig] = []
    monkeypatch.setattr(step, "write_plan", lambda config, _: kept.append(config))
    step.keep_numbers(compose("stage=fine", *overrides), {"seconds_per_step": 1.0})
    assert bool(kept) == is_kept


def test_a_shape_that_the_network_does_not_take_is_refused() -> None:
    with pytest.raises(UserError, match=r"multiple of \(8, 8, 8\)"):
        plan_app.plan(compose(*SMALL, "shape=[16,24,30]"))


@pytest.mark.slow
def test_the_largest_batch_fits_and_one_more_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        *SMALL,
        "shape=[16,16,24]",
        "memory.accumulate=2",
        "stage.batch_size=2",
        "largest_batch=true",
    ]
    three, four = (
        step.count_memory(compose(*arguments), (16, 16, 24), samples=number).peak
        for number in (3, 4)
    )
    assert three < four
    plan_app.plan(compose(*arguments, f"memory.budget_gib={(four - 1) / 2**30!r}"))
    said = capsys.readouterr().out
    assert "stage.batch_size=6" in said, "two micro-batches of three"
    assert "optimizer.lr=" in said, "a rate for that batch"
    with pytest.raises(UserError, match=r"largest_batch=true: memory\.budget_gib"):
        plan_app.plan(compose(*arguments))


@pytest.mark.parametrize("budget", [*range(0, 40, 3), 1000])
def test_the_largest_batch_is_found_whatever_the_first_samples_cost(budget: int) -> None:
    def peak(samples: int) -> int:
        return [0, 9, 11, 20, 22][samples] if samples < 5 else 22 + 3 * (samples - 4)

    num_samples = step.largest_batch(peak, budget)
    assert peak(num_samples) <= budget < peak(num_samples + 1)


@pytest.mark.parametrize(("budget", "samples"), [(99, 0), (100, 10), (109, 10), (200, 20)])
def test_the_largest_batch_is_found_where_the_update_of_the_weights_is_the_peak(
    budget: int, samples: int
) -> None:
    assert step.largest_batch(lambda number: max(100, 10 * number), budget) == samples


def test_the_largest_batch_is_computed_where_the_step_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A part that needs `compute=true` needs it for each number of samples."""

    def count_memory(config: Any, shape: Any, *, samples: int, compute: bool = False) -> Any:
        if not compute:
            raise UserError("plan: a part cannot be counted without computing it")
        return SimpleNamespace(peak=samples * 2**20)

    monkeypatch.setattr(plan_app, "count_memory", count_memory)
    arguments = [*SMALL, "shape=[16,16,24]", "largest_batch=true", "compute=true"]
    config = compose(*arguments, f"memory.budget_gib={3 / 1024}")
    assert plan_app._print_largest_batch(config, (16, 16, 24), 3 * 2**20) == 3
    assert "stage.batch_size=3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "samples"),
    [
        ([], 8),
        (["memory.accumulate=2"], 4),
        (["trainer=ddp", "memory.accumulate=2"], 2),
        (["trainer=ddp", "trainer.num_nodes=4"], 1),
    ],
)
def test_micro_batches_are_what_one_rank_holds(overrides: list[str], samples: int) -> None:
    assert samples_per_micro_batch(compose("stage.batch_size=8", *overrides)) == samples


def test_a_whole_lung_trains_in_two_gib_with_the_lean_experiment() -> None:
    config = compose("experiment=fine_lean")
    patch = step.count_memory(config, (96, 96, 96))
    assert patch.saved_per_voxel <= 107 / 2  # a sixteenth of nnU-Net's default network would be 107
    whole = step.count_memory(config, (320, 256, 192))
    assert whole.saved_per_voxel <= 107 / 2
    assert whole.peak <= 2 * 2**30


@pytest.mark.slow
def test_a_whole_lung_really_trains_within_what_was_planned() -> None:
    config = compose("experiment=fine_lean")
    assert step.count_memory(config, (320, 256, 192), compute=True) == step.count_memory(
        config, (320, 256, 192)
    )


class Peaks(pl.Callback):
    """The peak of each step."""

    def __init__(self, tracker: MemoryTracker) -> None:
        self.tracker = tracker
        self.bytes: list[int] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.tracker.restart_peak()

    def on_train_batch_end(self, *_: Any) -> None:
        self.bytes.append(self.tracker.peak_bytes)


def test_lightning_takes_what_was_planned(tmp_path: Path) -> None:
    config = compose(
        *SMALL,
        "memory=amp_checkpoint",
        "logger=none",
        "steps=3",
        "shape=[32,32,48]",
        f"run_dir='{tmp_path}'",
        "ema_decay=0.5",
    )
    planned = step.count_memory(config, (32, 32, 48))
    network = make_network(config)
    module = SegmentationModule(
        switch_on(network, config.memory, "cpu"),
        make_loss(config),
        make_optimizer(config.optimizer, 1.0),
        make_schedule(config.schedule, 1.0, 0),
        seed=1, accumulate=1, tile_size=None, overlap=0.5, ema_decay=config.ema_decay, metadata={},
    )  # fmt: skip
    batch = {
        "image": torch.zeros(1, 1, 32, 32, 48),
        "target": torch.zeros(1, 32, 32, 48, dtype=torch.uint8),
        "region": torch.zeros(1, dtype=torch.int64),
        "number": [0],
    }  # fmt: skip
    tracker = MemoryTracker()
    peaks = Peaks(tracker)
    trainer = make_trainer(config, [peaks])
    with tracker:
        trainer.fit(module, torch.utils.data.DataLoader([[batch]] * 3, batch_size=None))
    # Lightning keeps a few scalars more. The first step has no optimiser state in its forward and
    # backward pass.
    assert len(peaks.bytes) == 3
    assert peaks.bytes[2] == pytest.approx(planned.peak, rel=0.002)


@pytest.mark.parametrize("loss", ["dice_focal", "tversky", "generalized_dice"])
def test_any_loss_is_counted_as_if_it_were_computed(loss: str) -> None:
    config, shape = compose(*SMALL, f"loss={loss}"), (16, 16, 24)
    assert step.count_memory(config, shape) == step.count_memory(config, shape, compute=True)


def test_a_loss_that_leaves_torch_asks_for_computing() -> None:
    config, shape = compose(*SMALL, "loss=hausdorff_dt"), (16, 16, 24)
    with pytest.raises(UserError, match="give compute=true"):
        step.count_memory(config, shape)
    assert step.count_memory(config, shape, compute=True).saved["loss"] > 0


def test_the_state_that_a_schedule_brings_about_is_counted() -> None:
    """A schedule that cycles the momentum makes buffers although the optimiser is given none."""
    settings, shape = (
        [*SMALL, "optimizer=sgd", "optimizer.momentum=0", "optimizer.nesterov=false"],
        (16, 16, 24),
    )
    assert step.count_memory(compose(*settings), shape).optimizer_state == 0
    cycled = step.count_memory(compose(*settings, "schedule=one_cycle_momentum"), shape)
    assert cycled.optimizer_state == cycled.parameters


def test_a_budget_to_fit_is_left_to_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        plan_app, "fit", lambda config, shape: asked.append((config.fit_gib, shape)) or 5
    )
    assert plan_app.plan(compose(*SMALL[:-1], "measure=true", "shape=[16,24,32]", "fit_gib=3")) == 5
    assert asked == [(3.0, (16, 24, 32))]


@pytest.mark.parametrize(("steps", "interval", "shown"), [(400, 50, 50), (40, 50, 40)])
def test_an_estimate_says_the_seconds_of_an_interval_and_of_the_run(
    steps: int, interval: int, shown: int
) -> None:
    run_estimate: Any = SimpleNamespace(
        allocator={"training step": 3 * 2**20, "validation": 0},
        resident={"training step": 7 * 2**20, "checkpoint": 9 * 2**20},
        peak_resident=2e9,
        seconds_per_step=0.5,
        compute_seconds=0.25,
        other_seconds=0.125,
        loader_seconds=0.0625,
        num_workers=1,
    )
    config = compose(*SMALL, f"steps={steps}", f"stage.validate_every={interval}")
    lines = plan_app.describe_estimate(config, run_estimate)
    cells = [" ".join(line.split()) for line in lines]
    assert cells == [
        "peak of torch's allocator, with workspaces 3.0 MiB",
        "training step 3.0 MiB",
        "peak of the resident memory of all processes 9.0 MiB",
        "training step 7.0 MiB",
        "checkpoint 9.0 MiB",
        "seconds per step 0.500 s 0.250 s of computation, 0.125 s of the training loop, "
        "0.062 s of making samples in 1 loader process",
        f"seconds per {shown} steps, without validation {shown / 2:.1f} s",
        f"seconds until the end ({steps} steps) {steps / 2:.1f} s {steps * 0.5 * 2:.0f} GB·s",
    ]
    del run_estimate.resident["checkpoint"]
    assert "peak of the GPU memory 7.0 MiB" in [
        " ".join(line.split()) for line in plan_app.describe_estimate(config, run_estimate)
    ]


@pytest.fixture(scope="module")
def memory() -> StepMemory:
    """Count of a small step."""
    return plan_app.count_memory(compose(*SMALL, "stage.patch_size=[16,24,32]"), (16, 24, 32))


@pytest.mark.parametrize(
    ("overrides", "remark"),
    [
        ([], "Live tensors are counted."),
        (["memory.compile=true"], "memory.compile=true: counted uncompiled"),
        (["trainer=ddp", "stage.batch_size=2"], "trainer: counted per rank; DDP adds buckets of"),
        (
            ["model.device_map=auto", "trainer.accelerator=auto"],
            "model.device_map: counted over all of its devices together.",
        ),
    ],
)
def test_a_count_says_what_it_leaves_out(
    overrides: list[str], remark: str, memory: StepMemory
) -> None:
    config = compose(*SMALL, "stage.patch_size=[16,24,32]", *overrides)
    said = plan_app.plan_lines(config, (16, 24, 32), memory)
    remarks = [
        line
        for line in said
        if line.startswith(("Live", "memory.", "trainer:", "model.device_map"))
    ]
    assert any(line.startswith(remark) for line in remarks)
    assert len(remarks) == 1 + bool(overrides)
    measured = plan_app.plan_lines(replace(config, measure=True), (16, 24, 32), memory)
    assert not any(line.startswith("Live") for line in measured)
    assert said[0].startswith("fine: a step on 1 × 16×24×32 voxels, fp32, checkpointing none")
