"""Precision of runs, plans and predictions on pretended GPUs with and without bf16."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra
import pytest
import torch

from medseg.commands import find_lr
from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.config.schema import FindLrConfig, LadderConfig, PlanConfig
from medseg.errors import UserError
from medseg.memory import device
from medseg.memory.device import stage_precision, use_supported_half
from medseg.memory.options import Accelerator, Precision
from medseg.memory.precision import has_fast_bf16, lightning_precision
from medseg.planning import plan as plan_app
from medseg.prediction import batch, load_models
from medseg.prediction.options import PredictConfig
from medseg.runs.folder import open_run
from medseg.runs.train_run import train_run
from medseg.studies import ladder
from medseg.training import assemble
from medseg.training.options import TrainConfig

Pretend = Callable[..., None]
A100, T4 = (8, 0), (7, 5)
SAID = "memory.precision=bf16: a GPU has no arithmetic in bf16"


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """Make torch find GPUs of some compute capabilities."""

    def find(*capabilities: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")

    return find


def compose(command: str, schema: type[Any], *overrides: str) -> Any:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return to_config(hydra.compose(command, list(overrides)), schema)


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ([], True),  # a run is planned for a GPU elsewhere
        ([(7, 0)], False),
        ([T4], False),
        ([A100], True),
        ([(9, 0)], True),
        ([(12, 0)], True),
        ([A100, T4], False),  # the ranks of a run must agree
    ],
)
def test_bf16_is_fast_from_capability_8_on(
    capabilities: list[tuple[int, int]], expected: bool, pretend: Pretend
) -> None:
    pretend(*capabilities)
    assert has_fast_bf16("cuda") is expected


@pytest.mark.parametrize(
    ("capability", "asked", "accelerator", "expected"),
    [
        (T4, "bf16", Accelerator.auto, "fp16"),
        (T4, "bf16", Accelerator.gpu, "fp16"),
        (T4, "bf16", Accelerator.cpu, "bf16"),
        (T4, "fp32", Accelerator.gpu, "fp32"),
        (T4, "fp16", Accelerator.gpu, "fp16"),
        (A100, "bf16", Accelerator.gpu, "bf16"),
    ],
)
def test_a_run_computes_in_what_its_device_has(
    capability: tuple[int, int],
    asked: str,
    accelerator: Accelerator,
    expected: str,
    pretend: Pretend,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pretend(capability)
    memory = compose(
        "plan", PlanConfig, "stage=fine", f"memory.precision={asked}", "run_dir=x"
    ).memory
    use_supported_half(memory, accelerator)
    assert memory.precision is Precision(expected)
    assert (SAID in capsys.readouterr().err) == (expected != asked)


class ReachedError(Exception):
    """Ends a command at the call that a test observes."""


def reached(*_: object, **__: object) -> None:
    raise ReachedError


def test_training_scales_the_loss_on_a_gpu_without_bf16(
    tmp_path: Path, pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainers: list[str] = []

    def make_trainer(config: TrainConfig, *_: object) -> None:
        device_type = device.pick_device(config.trainer.accelerator).type
        trainers.append(lightning_precision(config.memory.precision.value, device_type))
        raise ReachedError

    monkeypatch.setattr(assemble, "make_trainer", make_trainer)
    run_dir = f"run_dir='{tmp_path}'"
    config = compose("train", TrainConfig, "stage=fine", "memory.precision=bf16", run_dir)
    open_run(config)
    for capability in (T4, A100):
        config.memory.precision = Precision.bf16
        pretend(capability)
        with pytest.raises(ReachedError):
            train_run(config)
    # Lightning's `16-mixed` on a GPU is fp16 with a gradient scaler.
    assert trainers == ["16-mixed", "bf16-mixed"]


def test_a_plan_counts_what_the_training_will_compute_in(
    pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    precisions: list[Precision] = []

    def count_memory(config: PlanConfig, *_: object, **__: object) -> None:
        precisions.append(config.memory.precision)
        raise ReachedError

    monkeypatch.setattr(plan_app, "count_memory", count_memory)
    for capability in (T4, A100):
        pretend(capability)
        arguments = ["stage=fine", "memory.precision=bf16", "measure=false", "run_dir=x"]
        with pytest.raises(ReachedError):
            plan_app.plan(compose("plan", PlanConfig, *arguments))
    assert precisions == [Precision.fp16, Precision.bf16]


each_card = pytest.mark.parametrize(
    ("capability", "accelerator", "expected"),
    [
        (T4, "auto", Precision.fp16),
        (T4, "cpu", Precision.bf16),
        (A100, "auto", Precision.bf16),
    ],
)


@each_card
def test_find_lr_trains_in_what_the_training_will_compute_in(
    capability: tuple[int, int],
    accelerator: str,
    expected: Precision,
    tmp_path: Path,
    pretend: Pretend,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    precisions: list[Precision] = []

    def make_network(config: TrainConfig) -> None:
        precisions.append(config.memory.precision)
        raise ReachedError

    monkeypatch.setattr(find_lr, "find_spacing", lambda *_: None)
    monkeypatch.setattr(find_lr, "make_network", make_network)
    pretend(capability)
    arguments = ["stage=coarse", "memory.precision=bf16", f"trainer.accelerator={accelerator}"]
    config = compose("find_lr", FindLrConfig, *arguments, f"output='{tmp_path}'", "run_dir=x")
    with pytest.raises(ReachedError):
        find_lr.find_lr(config)
    assert precisions == [expected]


@each_card
def test_every_row_of_a_ladder_is_measured_in_what_its_device_has(
    capability: tuple[int, int],
    accelerator: str,
    expected: Precision,
    tmp_path: Path,
    pretend: Pretend,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    precisions: list[Precision] = []

    def measure(_: Path, config: TrainConfig, *__: object, **___: object) -> dict[str, object]:
        precisions.append(config.memory.precision)
        return {}

    common = [f"trainer.accelerator={accelerator}"]
    overrides = SimpleNamespace(overrides=SimpleNamespace(task=common))
    monkeypatch.setattr(ladder, "HydraConfig", SimpleNamespace(get=lambda: overrides))
    monkeypatch.setattr(ladder, "measure", measure)
    monkeypatch.setattr(ladder, "table_row", lambda *_: {"device": ""})
    monkeypatch.setattr(ladder, "write", lambda *_: None)
    monkeypatch.setattr(ladder, "print_table", lambda *_: None)
    pretend(capability)
    config = compose("ladder", LadderConfig, *common, f"output='{tmp_path}'", "run_dir=x")
    rows = {"plain": ["memory.precision=fp32"], "half": ["memory.precision=bf16"]}
    config = replace(config, networks={}, rows=rows, peers=False, train=False)
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        assert ladder.ladder(config) == 0
    assert precisions == [Precision.fp32, expected]


@pytest.mark.parametrize("asked", ["bf16", None])
def test_a_stage_trained_in_bf16_runs_in_fp16_on_a_gpu_without_it_and_says_so(
    asked: str | None, pretend: Pretend, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(T4)
    assert stage_precision("fine", asked, "bf16", "cuda") == "fp16"
    assert "the fine stage computes in fp16: " in capsys.readouterr().err
    pretend(A100)
    assert stage_precision("fine", asked, "bf16", "cuda") == "bf16"
    # No message where fp16 was asked for or trained with, or where the device is a CPU.
    assert stage_precision("fine", None, "fp16", "cuda") == "fp16"
    assert stage_precision("fine", "bf16", "fp32", "cpu") == "bf16"
    assert not capsys.readouterr().err


def test_a_cpu_has_no_fp16() -> None:
    with pytest.raises(UserError, match="the device is cpu: use bf16"):
        load_models.load_cascade(None, None, accelerator="cpu", precision="fp16")


@pytest.mark.parametrize(("accelerator", "chosen"), [("auto", [3]), ("cpu", [])])
def test_ranks_of_a_prediction_choose_gpus_only_where_they_use_them(
    accelerator: str, chosen: list[int], pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 3 of a prediction on the CPU cannot have the fourth GPU of a machine with one."""
    pretend(A100)
    numbers: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", numbers.append)
    for name, value in (("TORCHELASTIC_RUN_ID", "x"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "3")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(batch, "load_cascade", reached)
    arguments = ["input=x", "output=y", "coarse=c", "fine=f", f"accelerator={accelerator}"]
    with pytest.raises(ReachedError):
        batch.load_range_models(compose("predict", PredictConfig, *arguments))
    assert numbers == chosen
