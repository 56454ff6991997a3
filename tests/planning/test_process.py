"""Processes of a run: tiny trainings that must agree, and the cost of samples of a synthetic case, kept in files."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra
import psutil
import pytest

from medseg.config.check import to_config
from medseg.config.folder import conf_dir
from medseg.config.schema import PlanConfig
from medseg.memory import calibration
from medseg.memory.profile import private_bytes
from medseg.planning import process, samples
from medseg.planning.process import ProcessCost, process_cost, sample_cost
from medseg.planning.rehearsal import RehearsalWatch

MIB = 2**20


def compose(*overrides: str) -> PlanConfig:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return to_config(hydra.compose("plan", [*overrides, "trainer.accelerator=cpu", "run_dir=x"]), PlanConfig)


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
    training, validation = (sample_cost(config, shape, tmp_path, is_training=one) for one in (True, False))
    assert 0 < training.seconds < 60
    assert 0 < validation.seconds < 60
    monkeypatch.setattr(samples, "make_samples", lambda *_: pytest.fail("made again"))
    assert sample_cost(config, shape, tmp_path, is_training=True) == training
    assert sample_cost(config, shape, tmp_path, is_training=False) == validation


@pytest.mark.slow  # a worker imports the libraries anew
def test_the_memory_of_a_sample_is_not_taken_from_the_free_heap_of_the_planner(tmp_path: Path) -> None:
    """A fork would find free pages of this process, which are resident already, and make its samples there."""
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
    found = calibrate(tmp_path)
    assert found.worker == 15 * MIB
    assert found.main == 481 * MIB
    assert found.seconds == 0.03, "other programs only lengthen a step"
    assert calibrate(tmp_path) == found, "read from the file"
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


def test_an_old_calibration_is_made_anew(trainings: list[ProcessCost], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_load(monkeypatch, 0.0)
    trainings += QUIET
    calibrate(tmp_path)
    now_s = time.time()
    monkeypatch.setattr(calibration.time, "time", lambda: now_s + calibration.MAX_AGE_S + 1)
    trainings += QUIET
    calibrate(tmp_path)
    assert not trainings


def test_another_process_that_the_training_starts_is_no_worker(tmp_path: Path) -> None:
    """A program that holds 64 MiB beside the workers is a helper, of which there is one however many workers there are."""
    watch = RehearsalWatch(str(tmp_path / "watch.json"))
    scripts = [f"held = b'1' * {size} * 2**20; print(flush=True); input()" for size in (64, 16, 16)]
    programs = [
        subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) for script in scripts
    ]
    for program in programs:
        assert program.stdout is not None
        program.stdout.readline()
    loader: Any = SimpleNamespace(_iterator=SimpleNamespace(_workers=programs[1:]))
    watch._read_memory(SimpleNamespace(train_dataloader=loader))  # type: ignore[arg-type]
    others = {child.pid for child in psutil.Process().children(recursive=True)} - {program.pid for program in programs}
    beside = sum(map(private_bytes, others))
    for program in programs:
        program.communicate(b"\n")
    assert watch.helpers - beside == pytest.approx(64 * MIB, abs=16 * MIB)
    assert watch.worker == pytest.approx(16 * MIB, abs=16 * MIB)
    assert watch.worker < 40 * MIB
