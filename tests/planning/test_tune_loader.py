"""Loader tuning: settings tried, the one proposed, and equal batches under all of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra
import pytest
import torch

from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.config.schema import TuneLoaderConfig
from medseg.planning import tune_loader as app
from medseg.planning.tune_loader import Setting, propose, settings, time_batches, tune_loader
from medseg.training.assemble import make_data_module


def compose(table: Path, *overrides: str) -> TuneLoaderConfig:
    common = [
        f"data.cases='{table}'", f"data.cache='{table.parent / 'cache'}'", "spacing=isotropic_4mm",
        "augment=none",
        "trainer.accelerator=cpu", "run_dir=none",
    ]  # fmt: skip
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return to_config(hydra.compose("tune_loader", [*common, *overrides]), TuneLoaderConfig)


def test_every_sensible_setting_is_tried_once_and_the_least_first() -> None:
    assert settings([2, 0], [4, 2], has_gpu=False) == [
        Setting(0, 2, False),
        Setting(2, 2, False),
        Setting(2, 4, False),
    ]
    with_gpu = settings([0, 1], [2], has_gpu=True)
    assert with_gpu == [
        Setting(0, 2, False),
        Setting(0, 2, True),
        Setting(1, 2, False),
        Setting(1, 2, True),
    ]
    assert Setting(0, 2, False).arguments(has_gpu=False) == "data.num_workers=0"
    assert Setting(4, 2, True).arguments(has_gpu=True) == (
        "data.num_workers=4 data.prefetch=2 data.pin_memory=true"
    )
    # `train` would pin memory on a GPU without the argument.
    assert Setting(0, 2, False).arguments(has_gpu=True) == (
        "data.num_workers=0 data.pin_memory=false"
    )


def test_more_of_the_machine_is_only_asked_for_what_it_gains() -> None:
    none, one, two, ahead = (
        Setting(0, 2, False),
        Setting(1, 2, False),
        Setting(2, 2, False),
        Setting(2, 4, False),
    )
    assert propose({none: 10.0, one: 10.2, two: 10.4, ahead: 10.3}) == none
    assert propose({none: 5.0, one: 9.9, two: 10.0, ahead: 10.1}) == one
    assert propose({none: 5.0, one: 9.0, two: 10.0, ahead: 12.0}) == ahead


def test_the_command_times_each_setting_and_proposes_the_fastest(
    tiny_table: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    durations_s = {Setting(0, 2, False): 2.0, Setting(1, 2, False): 1.0, Setting(1, 3, False): 0.99}
    timed: list[Setting] = []

    def time_(data: Any, setting: Setting, num_batches: int, device: torch.device) -> float:
        timed.append(setting)
        assert num_batches == 8
        return durations_s[setting]

    monkeypatch.setattr(app, "time_batches", time_)
    assert (
        tune_loader(compose(tiny_table, "num_batches=8", "workers=[0,1]", "prefetches=[2,3]")) == 0
    )
    assert timed[1:] == list(durations_s)
    printed = capsys.readouterr().out
    assert "take: data.num_workers=1 data.prefetch=2 " in printed
    assert "longer than 0.125 s" in printed


def test_a_step_takes_all_its_micro_batches_and_the_columns_are_aligned(
    tiny_table: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(app, "pick_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(app, "time_batches", lambda *_: 1.0)
    config = compose(
        tiny_table, "num_batches=8", "workers=[0,16]", "prefetches=[2]", "stage.batch_size=4",
        "memory.accumulate=4",
    )  # fmt: skip
    assert tune_loader(config) == 0
    heading, *rows, best = capsys.readouterr().out.splitlines()[-6:]
    assert len(rows) == 4
    assert {len(line) for line in (heading, *rows)} == {len(rows[-1])}
    assert rows[-1].startswith("data.num_workers=16 data.prefetch=2 data.pin_memory=true ")
    assert best.startswith("take: data.num_workers=0 data.pin_memory=false ")
    assert "longer than 0.500 s" in best, "4 micro-batches at 8 per second"


@pytest.mark.slow
def test_a_setting_changes_no_batch(tiny_table: Path) -> None:
    config = compose(tiny_table, "steps=6", "stage.batch_size=2")
    data = make_data_module(config)
    data.prepare_data()
    data.setup("fit")
    made = []
    for setting in (Setting(0, 2, False), Setting(1, 3, False), Setting(2, 2, False)):
        data.num_workers, data.prefetch, data.pin_memory = setting
        loader = data.train_batches()
        assert loader.prefetch_factor == (setting.prefetch if setting.num_workers else None)
        made.append([stack["image"] for batch in loader for stack in batch])
        assert time_batches(data, setting, 2, torch.device("cpu")) > 0
    assert len(made[0]) == 12
    for other in made[1:]:
        assert all(
            torch.equal(image, expected) for image, expected in zip(other, made[0], strict=True)
        )


@pytest.mark.parametrize("setting", [Setting(0, 2, False), Setting(3, 2, True)])
def test_batches_that_workers_make_ahead_are_not_timed(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]
    moved: list[Any] = []

    def batches() -> Any:
        number = 0
        while True:
            now_s[0] += 1.0
            number += 1
            image = SimpleNamespace(
                to=lambda device, non_blocking, number=number: moved.append(
                    (number, device, non_blocking)
                )
            )
            yield [{"image": image}, {"image": image}]

    data: Any = SimpleNamespace(train_batches=batches)
    monkeypatch.setattr(app.time, "perf_counter", lambda: now_s[0])
    seconds = time_batches(data, setting, 4, torch.device("cpu"))
    assert (data.num_workers, data.prefetch, data.pin_memory) == setting
    assert seconds == 4.0
    ahead = setting.num_workers * setting.prefetch
    numbers = [number for number, *_ in moved]
    assert numbers == [ahead + 1 + index for index in range(4) for _ in range(2)]
    assert {(device.type, non_blocking) for _, device, non_blocking in moved} == {("cpu", True)}
