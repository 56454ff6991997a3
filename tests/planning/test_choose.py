"""Choice of switches: what may vary under each permission, the order of other runs, and the arguments that are printed."""

from __future__ import annotations

import math
from typing import Any

import hydra
import pytest

from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.config.schema import PlanConfig
from medseg.planning import choose
from medseg.planning.choose import Option, choose_line, closer_runs, combinations, switches_of

SMALL = ["stage=fine", "trainer.accelerator=cpu", "stage.patch_size=[32,32,48]"]


def compose(*overrides: str) -> PlanConfig:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return to_config(hydra.compose("plan", [*SMALL, *overrides, "run_dir=x"]), PlanConfig)


def varied(config: PlanConfig, key: str) -> set[Any]:
    return {getattr(one.memory, key) for one in combinations(config)}


def test_the_same_result_keeps_the_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "has_fast_bf16", lambda: True)
    same = compose("allow=same_result", "stage.batch_size=4")
    assert varied(same, "precision") == {"fp32"}
    assert varied(same, "channels_last") == {False, True}
    assert varied(same, "accumulate") == {1, 2, 4}
    assert varied(same, "offload") == {False}
    assert varied(compose("allow=same_expectation"), "precision") == {"fp32", "bf16"}
    monkeypatch.setattr(choose, "has_fast_bf16", lambda: False)
    assert varied(compose("allow=same_expectation"), "precision") == {"fp32"}


def test_offloading_is_only_proposed_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose("trainer=ddp", "stage.batch_size=4")
    assert varied(config, "offload") == {False}
    monkeypatch.setattr(choose, "pick_device_type", lambda _: "cuda")
    assert varied(config, "offload") == {False, True}


@pytest.mark.parametrize("key", ["model.norm=batch", "loss.batch_dice=true"])
def test_what_looks_at_the_whole_batch_keeps_its_micro_batches(key: str) -> None:
    assert varied(compose(key, "stage.batch_size=4", "memory.accumulate=2"), "accumulate") == {2}


def test_other_runs_see_as_many_voxels_per_step_as_possible() -> None:
    config = compose("allow=other_run", "stage.batch_size=4", "model.width=16")
    runs = list(closer_runs(config, (32, 32, 48)))
    seen = [(changed.model["width"], changed.stage.batch_size * math.prod(patch)) for _, changed, patch in runs]
    assert seen == sorted(seen, reverse=True)
    assert runs[0][0] == {"stage.patch_size": [32, 32, 32]}  # two thirds of the voxels; the next batch sees half
    assert {changed.model["width"] for _, changed, _ in runs} == {16, 8, 4}
    for changes, changed, patch in runs:
        assert changes
        assert changed.stage.patch_size == patch
        assert all(size % 16 == 0 for size in patch)


def test_the_printed_arguments_give_the_switches() -> None:
    blocks = ["stem", "encoder.0.block0", "head"]
    option = Option(switches_of(compose("memory=amp"), blocks[:2], blocks), 1, 1.0)
    line = choose_line(option, {"stage.batch_size": 2})
    config = compose(*line.split())
    assert (config.memory.precision, config.memory.channels_last, config.memory.checkpointing) == ("bf16", True, blocks[:2])
    assert config.stage.batch_size == 2
    assert switches_of(config, blocks, blocks)["memory.checkpointing"] == "all"
    assert switches_of(config, [], blocks)["memory.checkpointing"] == "none"
