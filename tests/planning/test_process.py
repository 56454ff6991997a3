"""Processes of a run: tiny trainings that must agree, and sample costs kept in files."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra
import lightning.pytorch as pl
import numpy as np
import psutil
import pytest
import torch
from torch import nn

from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.config.schema import PlanConfig
from medseg.errors import UserError
from medseg.geometry.grid import VoxelBox
from medseg.io import calibration
from medseg.memory.profile import private_bytes
from medseg.planning import process, rehearsal
from medseg.planning import synthetic_samples as samples
from medseg.planning.process import ProcessCost, process_cost, sample_cost
from medseg.planning.rehearsal import RehearsalWatch
from medseg.task_options import make_task
from medseg.training.network import count_channels
from medseg.weights.files import shipped_weights

MIB = 2**20


def compose(*overrides: str) -> PlanConfig:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return to_config(
            hydra.compose("plan", [*overrides, "trainer.accelerator=cpu", "run_dir=x"]), PlanConfig
        )


class ThisProcess(contextlib.nullcontext[Any]):
    """Calls functions like a worker, without a process of its own."""

    def __enter__(self) -> Any:
        return self

    def call(self, function: Any, *arguments: Any) -> Any:
        return function(*arguments)


@pytest.mark.parametrize(
    "overrides",
    [
        ["stage=fine"],
        ["stage=fine", "stage.patch_size=[48,48,32]"],
        ["stage=coarse", "augment=none"],
        ["stage=coarse", "task=brain_tumour", "augment=mr"],
    ],
    ids=lambda overrides: "-".join(overrides),
)
def test_samples_of_a_stage_are_made_and_measured_once(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_load(monkeypatch, 0.0)
    monkeypatch.setattr(process, "Worker", ThisProcess)
    monkeypatch.setattr(samples, "MOST_SAMPLES", 2)
    config, shape = compose(*overrides), (48, 48, 32)
    training, validation = (
        sample_cost(config, shape, tmp_path, is_training=is_training)
        for is_training in (True, False)
    )
    assert 0 < training.seconds < 60
    assert 0 < validation.seconds < 60
    monkeypatch.setattr(samples, "make_samples", lambda *_: pytest.fail("made again"))
    assert sample_cost(config, shape, tmp_path, is_training=True) == training
    assert sample_cost(config, shape, tmp_path, is_training=False) == validation


@pytest.mark.parametrize("is_training", [True, False])
def test_a_sample_of_a_stage_that_sees_the_coarse_one_has_its_channel(
    tmp_path: Path, is_training: bool
) -> None:
    shape = (48, 48, 32)
    coarse = shipped_weights("lungs", "coarse")
    overrides = ["stage=fine", "stage.coarse_channel=true", f"stage.coarse={coarse}"]
    config = compose(*overrides, "stage.patch_size=[48,48,32]")
    made = samples._samples_of(config, shape, tmp_path / "samples", is_training)[0]
    assert made["image"].shape[0] == count_channels(config)


@pytest.mark.slow  # a worker imports the libraries anew
def test_the_memory_of_a_sample_is_not_taken_from_the_free_heap_of_the_planner(
    tmp_path: Path,
) -> None:
    """A fork would find free pages of this process, already resident, for its samples."""
    config, shape = compose("stage=fine", "spacing=isotropic_3mm"), (64, 64, 64)
    largest = bytearray(30 * MIB)
    del largest  # smaller blocks come from the heap now
    blocks = [bytearray(b"1" * MIB) for _ in range(100)]
    end = bytearray(MIB)
    blocks.clear()
    sample = sample_cost(config, shape, tmp_path)
    image_bytes = 4 * 64**3
    assert sample.num_bytes > 10 * image_bytes
    assert len(end) == MIB


def cost(main_mib: int, worker_mib: int, seconds: float) -> ProcessCost:
    return ProcessCost(main_mib * MIB, 10 * MIB, worker_mib * MIB, 20 * MIB, seconds)


QUIET = [cost(600, 60, 0.09), cost(480, 15, 0.03), cost(482, 15, 0.032)]


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> list[ProcessCost]:
    """Results of the tiny trainings to come; the first of them also makes the scan."""
    results: list[ProcessCost] = []
    monkeypatch.setattr(process, "_watched_training", lambda *_: results.pop(0))
    monkeypatch.setattr(calibration, "present_load", lambda: 0.0)
    return results


def calibrate(folder: Path) -> ProcessCost:
    return process_cost(folder, has_logger=False, has_monai=False)


def set_load(monkeypatch: pytest.MonkeyPatch, load: float) -> None:
    def finish(meter: calibration.LoadMeter, *_: object) -> None:
        meter.load = load

    monkeypatch.setattr(calibration.LoadMeter, "__exit__", finish)


def test_a_calibration_that_does_not_repeat_itself_is_made_again(
    trainings: list[ProcessCost], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_load(monkeypatch, 0.0)
    trainings += [QUIET[0], cost(480, 325, 0.05), *QUIET[1:]]
    calibrated = calibrate(tmp_path)
    assert calibrated.worker == 15 * MIB
    assert calibrated.main == 481 * MIB
    assert calibrated.seconds == 0.03, "other programs only lengthen a step"
    assert calibrate(tmp_path) == calibrated, "read from the file"
    assert not trainings


def test_a_calibration_that_never_agrees_is_not_kept(
    trainings: list[ProcessCost], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_load(monkeypatch, 0.0)
    trainings += [cost(480, 40 * number, 0.03) for number in range(process.MOST_TRAININGS + 1)]
    calibrate(tmp_path)
    assert not trainings
    trainings += QUIET
    assert calibrate(tmp_path).worker == 15 * MIB


def test_a_calibration_under_load_is_made_anew_when_the_machine_is_quiet(
    trainings: list[ProcessCost], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "present_load", lambda: 0.8)
    set_load(monkeypatch, 0.8)
    trainings += [cost(480, 15, 0.06)] * 3
    assert calibrate(tmp_path).seconds == 0.06
    assert calibrate(tmp_path).seconds == 0.06, "the machine is still loaded"
    monkeypatch.setattr(calibration, "present_load", lambda: 0.0)
    set_load(monkeypatch, 0.0)
    trainings += QUIET
    assert calibrate(tmp_path).seconds == 0.03
    assert calibrate(tmp_path).seconds == 0.03


def test_an_old_calibration_is_made_anew(
    trainings: list[ProcessCost], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_load(monkeypatch, 0.0)
    trainings += QUIET
    calibrate(tmp_path)
    now_s = time.time()
    monkeypatch.setattr(calibration.time, "time", lambda: now_s + calibration.MAX_AGE_S + 1)
    trainings += QUIET
    calibrate(tmp_path)
    assert not trainings


def test_another_process_that_the_training_starts_is_no_worker(tmp_path: Path) -> None:
    """A program of 64 MiB beside the workers is a helper: one, however many workers there are."""
    watch = RehearsalWatch(str(tmp_path / "watch.json"))
    scripts = [f"held = b'1' * {size} * 2**20; print(flush=True); input()" for size in (64, 16, 16)]
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for script in scripts
    ]
    for program in programs:
        assert program.stdout is not None
        program.stdout.readline()
    loader: Any = SimpleNamespace(_iterator=SimpleNamespace(_workers=programs[1:]))
    watch._read_memory(SimpleNamespace(train_dataloader=loader))
    others = {child.pid for child in psutil.Process().children(recursive=True)} - {
        program.pid for program in programs
    }
    beside = sum(map(private_bytes, others))
    for program in programs:
        program.communicate(b"\n")
    assert watch.helpers - beside == pytest.approx(64 * MIB, abs=16 * MIB)
    assert watch.worker == pytest.approx(16 * MIB, abs=16 * MIB)
    assert watch.worker < 40 * MIB


LONGEST_EQUAL_S = 0.030 / (1 - process.SECONDS_TOLERANCE)
LARGEST_EQUAL_MIB = int(525 / (1 - process.MEMORY_TOLERANCE))


@pytest.mark.parametrize(
    ("main_mib", "worker_mib", "seconds", "is_equal"),
    [
        (480, 15, 0.030, True),
        (480, 15, LONGEST_EQUAL_S - 1e-5, True),
        (480, 15, LONGEST_EQUAL_S + 1e-5, False),
        (480 + int(525 * process.MEMORY_TOLERANCE), 15, 0.030, True),
        (480, 15 + LARGEST_EQUAL_MIB - 525 + 1, 0.030, False),
    ],
)
def test_calibrations_are_equal_where_memory_and_seconds_are(
    main_mib: int, worker_mib: int, seconds: float, is_equal: bool
) -> None:
    first, second = cost(480, 15, 0.030), cost(main_mib, worker_mib, seconds)
    assert process.agree(first, second) == is_equal
    assert process.agree(second, first) == is_equal


def test_two_calibrations_are_averaged_by_the_mean_of_each_memory() -> None:
    first, second = ProcessCost(10, 20, 30, 40, 0.5), ProcessCost(12, 24, 36, 48, 0.4)
    assert process.averaged(first, second) == ProcessCost(11, 22, 33, 44, 0.4)
    assert process.averaged(second, first) == ProcessCost(11, 22, 33, 44, 0.4)


def test_a_rehearsal_leaves_the_computation_out_of_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clock set by hand: 0.25 s forward and backward, 0.5 s optimiser, the rest of each step."""
    watch = RehearsalWatch(str(tmp_path / "watch.json"))
    now_s = [0.0]
    sizes = iter([100, 300, 200])
    monkeypatch.setattr(rehearsal.time, "process_time", lambda: now_s[0])
    monkeypatch.setattr(rehearsal, "resident_bytes", lambda: next(sizes))
    monkeypatch.setattr(rehearsal, "peak_resident_bytes", lambda: 1000)
    monkeypatch.setattr(watch, "_read_memory", lambda trainer: None)
    network: Any = SimpleNamespace(training=True)

    def step(other_s: float) -> None:
        watch._start_network(network)
        now_s[0] += 0.25
        watch.on_after_backward(None, None)
        now_s[0] += 0.5
        watch._count_computing()
        now_s[0] += other_s
        watch.on_train_batch_end(None, None, None, None, 0)

    for other_s in (9.0, 0.125, 0.25, 0.375):
        step(other_s)
    assert watch.steps_s == [0.125, 0.25, 0.375], "the first step has no start"
    watch.on_validation_end(None, None)
    step(7.0)
    assert watch.steps_s == [0.125, 0.25, 0.375]
    for _ in range(3):
        watch._start_network(SimpleNamespace(training=False))
    watch.helpers, watch.worker, watch.copies = 1, 2, 3
    watch.on_train_end(None, None)
    numbers = json.loads((tmp_path / "watch.json").read_text())
    assert numbers == {
        "main": 300,
        "helpers": 1,
        "pictures": 700,
        "worker": 2,
        "copies": 3,
        "seconds": 0.25,
    }


class SlowNetwork(nn.Module):
    """Takes a quarter of a second by a clock that is set by hand."""

    def __init__(self, now_s: list[float]) -> None:
        super().__init__()
        self.now_s = now_s
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        self.now_s[0] += 0.25
        return self.weight * image


class SlowSGD(torch.optim.SGD):
    """Takes half a second after the forward and backward pass, which its closure runs."""

    now_s: list[float]

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.now_s[0] += 0.5
        return loss


class SlowModule(pl.LightningModule):
    """Runs the network on each stack of a micro-batch; an eighth of a second goes to other work."""

    def __init__(self, now_s: list[float], num_stacks: int) -> None:
        super().__init__()
        self.now_s = now_s
        self.num_stacks = num_stacks
        self.network = SlowNetwork(now_s)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.now_s[0] += 0.125
        losses = [self.network(batch).sum() for _ in range(self.num_stacks)]
        return torch.stack(losses).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = SlowSGD(self.parameters(), lr=0.1)
        optimizer.now_s = self.now_s
        return optimizer


@pytest.mark.parametrize(("accumulate", "num_stacks"), [(1, 1), (1, 3), (2, 1), (2, 3)])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.*LeafSpec")
def test_a_rehearsal_counts_passes_inside_the_step_of_the_optimiser_once(
    accumulate: int, num_stacks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]
    monkeypatch.setattr(rehearsal.time, "process_time", lambda: now_s[0])
    watch = RehearsalWatch(str(tmp_path / "watch.json"))
    monkeypatch.setattr(watch, "_read_memory", lambda trainer: None)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=3,
        accumulate_grad_batches=accumulate,
        callbacks=[watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader: Any = torch.utils.data.DataLoader(torch.ones(8, 1))  # type: ignore[arg-type]
    trainer.fit(SlowModule(now_s, num_stacks), loader)
    assert watch.steps_s == [0.125] * (3 * accumulate - 1)


def test_the_memory_of_workers_and_helpers_is_the_largest_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = RehearsalWatch(str(tmp_path / "watch.json"))
    sizes = {1: 100, 2: 60, 3: 7}
    children = [SimpleNamespace(pid=pid) for pid in sizes]
    monkeypatch.setattr(
        rehearsal.psutil,
        "Process",
        lambda: SimpleNamespace(children=lambda recursive: children * recursive),
    )
    monkeypatch.setattr(rehearsal, "private_bytes", sizes.__getitem__)
    monkeypatch.setattr(rehearsal, "bytes_beside", lambda pid, workers: 185)
    loader: Any = SimpleNamespace(_iterator=SimpleNamespace(_workers=children[:2]))
    trainer: Any = SimpleNamespace(train_dataloader=loader)
    watch._read_memory(trainer)
    assert (watch.helpers, watch.worker, watch.copies) == (7, 80, 25)
    sizes.update({1: 50, 2: 50, 3: 5})
    watch._read_memory(trainer)
    assert (watch.helpers, watch.worker, watch.copies) == (7, 80, 85)
    watch._read_memory(SimpleNamespace(train_dataloader=None))
    assert (watch.helpers, watch.worker) == (105, 80)


@pytest.mark.parametrize("has_logger", [True, False])
@pytest.mark.parametrize("has_monai", [True, False])
def test_the_tiny_training_is_like_the_run(
    trainings: list[ProcessCost],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_logger: bool,
    has_monai: bool,
) -> None:
    set_load(monkeypatch, 0.0)
    calls: list[tuple[list[str], Path]] = []

    def train(arguments: list[str], run_dir: Path) -> ProcessCost:
        calls.append((arguments, run_dir))
        return QUIET[1]

    monkeypatch.setattr(process, "_watched_training", train)
    process_cost(tmp_path, has_logger=has_logger, has_monai=has_monai)
    assert len(calls) == 3
    for arguments, run_dir in calls:
        network = process.SMALL_MONAI if has_monai else process.SMALL_UNET
        assert arguments[: len(process.REHEARSAL) + len(network)] == [*process.REHEARSAL, *network]
        assert ("logger=none" in arguments) == (not has_logger)
        assert arguments[-2:] == [
            f"data.phantoms.folder={run_dir.parent}/phantoms",
            f"data.cache={run_dir.parent}/cache",
        ]
    assert [run_dir.name for _, run_dir in calls] == ["0", "1", "2"]
    (kept,) = tmp_path.glob("process *.json")
    assert ("no logger" in kept.name, "MONAI network" in kept.name) == (not has_logger, has_monai)


def test_a_watched_training_is_one_of_this_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = {"main": 100, "helpers": 20, "pictures": 3, "worker": 4, "copies": 5, "seconds": 0.5}
    commands: list[list[str]] = []

    def run(command: list[str], stdout: Any, stderr: Any, check: bool) -> Any:
        commands.append(command)
        (tmp_path / "1.json").write_text(json.dumps(numbers))
        stdout.write(b"first\nthe reason\n")
        return SimpleNamespace(returncode=len(commands) - 1)

    monkeypatch.setattr(process.subprocess, "run", run)
    assert process._watched_training(["steps=2"], tmp_path / "1") == ProcessCost(120, 3, 4, 5, 0.5)
    watch = f"callbacks.rehearsal.path={tmp_path / '1.json'}"
    assert commands == [
        [
            sys.executable,
            "-Pm",
            "medseg.commands.cli",
            "steps=2",
            watch,
            f"hydra.run.dir={tmp_path / '1'}",
        ]
    ]
    with pytest.raises(
        UserError,
        match=r"measures the memory of a process failed \(the reason\); give measure=false",
    ):
        process._watched_training(["steps=2"], tmp_path / "1")


@pytest.mark.parametrize(
    ("overrides", "size", "start", "stop"),
    [
        (["stage=fine"], (64, 48, 80), (18, 18, 18), (46, 30, 62)),
        (["stage=fine", "stage.region_margin_mm=20"], (64, 48, 80), (28, 28, 28), (36, 29, 52)),
        (["stage=fine", "stage.patch_size=[32,16,48]"], (64, 48, 80), (8, 8, 8), (56, 40, 72)),
        (["stage=coarse"], (48, 32, 64), (0, 0, 0), (48, 32, 64)),
    ],
)
def test_the_synthetic_case_has_a_region_in_which_the_sample_can_be_cut(
    overrides: list[str],
    size: tuple[int, ...],
    start: tuple[int, ...],
    stop: tuple[int, ...],
    tmp_path: Path,
) -> None:
    """The second margin leaves no voxel of the region along y, and one is kept."""
    config = compose(*overrides)
    task = make_task(config.task)
    case = samples.synthetic_case(tmp_path, config, task, (48, 32, 64))
    assert case.grid.shape == case.labels.shape == case.image_hu.shape == size
    assert case.grid.spacing_mm == config.spacing.target_spacing_mm
    box = VoxelBox(start, stop)
    assert case.region_boxes == dict.fromkeys(("left_lung", "right_lung"), box)
    assert case.label_boxes == dict.fromkeys(("left_lung", "right_lung"), box)
    assert VoxelBox.from_mask(np.array(case.labels) > 0) == box
    assert set(np.unique(case.labels)) - {0} == {1, 2}
