"""Choice of switches: what each permission may vary, order of runs, printed arguments."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import hydra
import pytest
import torch

from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.config.schema import PlanConfig
from medseg.memory.tracker import Timeline
from medseg.planning import choose
from medseg.planning.choose import (
    Candidate,
    Option,
    blocks_of,
    choose_line,
    combinations,
    fastest_option,
    front,
    reasons,
    smaller_runs,
    switches_of,
)
from medseg.planning.estimate import STEP, Estimate

SMALL = ["stage=fine", "trainer.accelerator=cpu", "stage.patch_size=[32,32,48]"]


@functools.cache
def compose(*overrides: str) -> PlanConfig:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return to_config(hydra.compose("plan", [*SMALL, *overrides, "run_dir=x"]), PlanConfig)


def varied(config: PlanConfig, key: str) -> set[Any]:
    return {getattr(combination.memory, key) for combination in combinations(config)}


def test_the_same_result_keeps_the_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "has_fast_bf16", lambda _: True)
    same = compose("allow=same_result", "stage.batch_size=4")
    assert varied(same, "precision") == {"fp32"}
    assert varied(same, "channels_last") == {False, True}
    assert varied(same, "accumulate") == {1, 2, 4}
    assert varied(same, "offload") == {False}
    assert varied(compose("allow=same_expectation"), "precision") == {"fp32", "bf16"}
    monkeypatch.setattr(choose, "has_fast_bf16", lambda _: False)
    assert varied(compose("allow=same_expectation"), "precision") == {"fp32"}


@pytest.mark.parametrize(("capability", "half"), [((8, 0), "bf16"), ((7, 5), "fp16")])
def test_a_gpu_without_bf16_is_planned_in_fp16(
    capability: tuple[int, int], half: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "pick_device_type", lambda _: "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert varied(compose("allow=same_expectation"), "precision") == {"fp32", half}


def test_offloading_is_only_proposed_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose("trainer=ddp", "stage.batch_size=4")
    assert varied(config, "offload") == {False}
    monkeypatch.setattr(choose, "pick_device_type", lambda _: "cuda")
    assert varied(config, "offload") == {False, True}


@pytest.mark.parametrize("key", ["model.norm=batch", "loss.batch_dice=true"])
def test_what_looks_at_the_whole_batch_keeps_its_micro_batches(key: str) -> None:
    assert varied(compose(key, "stage.batch_size=4", "memory.accumulate=2"), "accumulate") == {2}


def test_batch_norm_that_no_argument_names_keeps_its_micro_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in MONAI's VNet, AttentionUnet and SegResNetDS."""
    network = torch.nn.Sequential(torch.nn.BatchNorm3d(1))
    monkeypatch.setattr(choose, "make_network_on_meta", lambda _: network)
    config = compose("stage.batch_size=4", "memory.accumulate=2")
    assert varied(config, "accumulate") == {2}


def test_other_runs_see_as_many_voxels_per_step_as_possible() -> None:
    config = compose("allow=other_run", "stage.batch_size=4", "model.width=16")
    runs = list(smaller_runs(config, (32, 32, 48)))
    seen = [
        (changed.model["width"], changed.stage.batch_size * math.prod(patch))
        for _, changed, patch in runs
    ]
    assert seen == sorted(seen, reverse=True)
    assert runs[0][0] == {
        "stage.patch_size": [32, 32, 32]
    }  # two thirds of the voxels; the next batch sees half
    assert {changed.model["width"] for _, changed, _ in runs} == {16, 8, 4}
    for changes, changed, patch in runs:
        assert changes
        assert changed.stage.patch_size == patch
        assert all(size % 16 == 0 for size in patch)


def test_tiles_of_the_size_of_a_patch_follow_a_smaller_one() -> None:
    """As in the run: otherwise the plan would count a validation in larger tiles."""
    for overrides in (["inference=tiles"], ["inference.tile_size=[32,32,32]"], []):
        config = compose("allow=other_run", *overrides)
        *_, (changes, changed, patch) = smaller_runs(config, (32, 32, 48))
        run = compose(*overrides, *choose_line(Option({}, 1, 1.0), changes).split())
        assert changed.stage.patch_size == patch != config.stage.patch_size
        assert changed.inference == run.inference


def test_another_batch_is_divided_into_micro_batches_anew() -> None:
    """The number of the run as configured need not divide a smaller batch."""
    config = compose("allow=other_run", "stage.batch_size=4", "memory.accumulate=4")
    batches = set()
    for _, changed, _ in smaller_runs(config, (32, 32, 48)):
        batches.add(changed.stage.batch_size)
        assert changed.memory.accumulate == 1
        divided = varied(changed, "accumulate")
        assert divided == {n for n in (1, 2, 4) if changed.stage.batch_size % n == 0}
    assert batches == {4, 2, 1}


def test_the_printed_arguments_give_the_switches() -> None:
    blocks = ["stem", "encoder.0.block0", "head"]
    option = Option(switches_of(compose("memory=amp"), blocks[:2], blocks), 1, 1.0)
    line = choose_line(option, {"stage.batch_size": 2})
    config = compose(*line.split())
    assert (config.memory.precision, config.memory.channels_last, config.memory.checkpointing) == (
        "bf16",
        True,
        blocks[:2],
    )
    assert config.stage.batch_size == 2
    assert switches_of(config, blocks, blocks)["memory.checkpointing"] == "all"
    assert switches_of(config, [], blocks)["memory.checkpointing"] == "none"


BASE, OTHER_S = 100, 0.5


class Model:
    """A step whose blocks save bytes and cost seconds, each by itself."""

    def __init__(
        self, peak: int, seconds: float, saved: dict[str, int], added_s: dict[str, float]
    ) -> None:
        self.whole, self.seconds, self.saved, self.added_s = peak, seconds, saved, added_s
        self.blocks = list(saved)
        self.budgets: list[int] = []

    def peak(self, recomputed: Collection[str] = ()) -> int:
        return self.whole - sum(self.saved[block] for block in recomputed)

    def duration(self, recomputed: Collection[str] = ()) -> float:
        return self.seconds + sum(self.added_s[block] for block in recomputed)

    def sets(self) -> list[list[str]]:
        return [
            list(chosen)
            for number in range(len(self.blocks) + 1)
            for chosen in itertools.combinations(self.blocks, number)
        ]

    def fastest(self, budget: int) -> list[str] | None:
        self.budgets.append(budget)
        fitting = [chosen for chosen in self.sets() if self.peak(chosen) <= budget]
        return min(fitting, key=self.duration, default=None)


def candidate(model: Model, *overrides: str, validation: int = 0) -> Candidate:
    """A candidate whose processes take `BASE` bytes beside the step, and `OTHER_S` seconds."""
    beside: Any = Estimate(
        memory=None,
        allocator={STEP: 0},
        resident={STEP: BASE, "validation": validation},
        compute_seconds=0.0,
        other_seconds=OTHER_S,
        loader_seconds=0.0,
        num_workers=1,
        busy_processors=0,
    )
    return Candidate(compose(*overrides), model, beside)


def models() -> list[Model]:
    return [
        Model(1000, 1.0, {"a": 300, "b": 200, "c": 100}, {"a": 0.3, "b": 0.1, "c": 0.2}),
        Model(700, 1.5, {"a": 200, "b": 150}, {"a": 0.1, "b": 0.4}),
    ]


def candidates() -> list[Candidate]:
    plain, half = models()
    return [candidate(plain), candidate(half, "memory.precision=bf16")]


def all_options(all_candidates: list[Candidate]) -> list[Option]:
    return [
        one_candidate.option(chosen)
        for one_candidate in all_candidates
        for chosen in one_candidate.model.sets()
    ]


def test_the_bytes_and_seconds_beside_the_step_count() -> None:
    model = models()[0]
    fastest = candidate(model).fastest(BASE + 800)
    assert model.budgets == [800]
    assert fastest is not None
    assert (fastest.peak, fastest.seconds) == (BASE + 800, 1.0 + 0.1 + OTHER_S)
    assert fastest.switches["memory.checkpointing"] == ["b"]
    assert candidate(model).fastest(BASE + 399) is None
    assert candidate(model, validation=901).fastest(900) is None, (
        "the validation alone is too large"
    )
    assert candidate(model, validation=900).fastest(900) is not None
    assert candidate(model, validation=1900).option(()).peak == 1900


@pytest.mark.parametrize("max_seconds", [math.inf, 2.05, 1.85, 0.9])
def test_the_choice_is_the_fastest_of_all_sets_that_fit(max_seconds: float) -> None:
    all_candidates = candidates()
    for budget in range(300, 1200, 25):
        fitting = [
            option
            for option in all_options(all_candidates)
            if option.peak <= budget and option.seconds <= max_seconds
        ]
        expected = min(fitting, key=lambda option: (option.seconds, option.peak), default=None)
        choice = fastest_option(all_candidates, budget, max_seconds)
        assert (None if choice is None else choice[1][1:]) == (
            None if expected is None else expected[1:]
        )
        if choice is not None:
            assert choice[0].option(blocks_of(choice[1], choice[0].model.blocks)) == choice[1]


def test_of_equally_fast_sets_the_smaller_peak_is_chosen() -> None:
    equally_fast = [candidate(Model(peak, 1.0, {}, {})) for peak in (900, 700, 800)]
    choice = fastest_option(equally_fast, 2000, math.inf)
    assert choice is not None
    assert choice[1].peak == BASE + 700


def test_no_set_beats_a_row_of_the_front_and_the_front_ends_at_the_least_peak() -> None:
    all_candidates = candidates()
    rows, sets = front(all_candidates), all_options(all_candidates)
    assert rows[0].seconds == min(option.seconds for option in sets)
    assert rows[-1].peak == min(option.peak for option in sets)
    for row in rows:
        assert not any(option.peak < row.peak and option.seconds <= row.seconds for option in sets)
    for faster, smaller in itertools.pairwise(rows):
        assert smaller.peak < faster.peak
        assert smaller.seconds >= faster.seconds


def test_rows_of_the_front_differ_by_a_hundredth_of_the_peak() -> None:
    saved = {"a": 9, "b": 11}
    rows = front([candidate(Model(900, 1.0, saved, {"a": 0.1, "b": 0.2}))])
    assert [row.peak for row in rows] == [1000, 989, 980][: len(rows)] == [1000, 989]


def test_each_switch_of_a_choice_is_undone_by_itself() -> None:
    plain, half = models()
    half.saved, half.blocks, half.added_s = plain.saved, plain.blocks, plain.added_s
    all_candidates = [
        candidate(plain),
        candidate(half, "memory.precision=bf16"),
        candidate(plain, "memory.precision=bf16", "memory.channels_last=true"),
    ]
    option = all_candidates[1].option(["a", "c"])
    undone = dict(reasons(all_candidates[1], option, all_candidates))
    assert {name: other.peak for name, other in undone.items()} == {
        "recompute a": BASE + 700 - 100,
        "recompute c": BASE + 700 - 300,
        "memory.precision=bf16 instead of fp32": BASE + 1000 - 400,
        "memory.channels_last=false instead of true": BASE + 1000 - 400,
    }


@pytest.mark.parametrize(("policy", "blocks"), [("all", ["a", "b"]), ("none", []), (["b"], ["b"])])
def test_blocks_of_a_policy(policy: Any, blocks: list[str]) -> None:
    assert blocks_of(Option({"memory.checkpointing": policy}, 1, 1.0), ["a", "b"]) == blocks


def test_steps_are_counted_plain_and_with_all_blocks_and_measured_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted: list[tuple[Any, Any]] = []
    measured: list[Any] = []
    config = compose("stage.batch_size=2", "allow=same_result")

    def count(config: PlanConfig, shape: Any, timeline: Timeline) -> Any:
        assert shape == (32, 32, 48)
        counted.append((config.memory, timeline))
        return f"memory of {config.memory.accumulate}"

    monkeypatch.setattr(choose, "count_memory", count)

    def estimate_beside(*arguments: Any, **named: Any) -> tuple[Any, ...]:
        return *arguments, *named.values()

    monkeypatch.setattr(choose, "estimate_beside", estimate_beside)
    prepared: list[PlanConfig] = []
    machine: Any = SimpleNamespace(
        prepare_for=prepared.append,
        measure=lambda *timelines: measured.append((len(prepared), *timelines)),
        costs={},
    )
    made_candidates = choose.make_candidates(config, (32, 32, 48), machine)
    assert prepared == [config]
    assert len(made_candidates) == 4  # two layouts, one and two micro-batches
    assert [memory.checkpointing for memory, _ in counted] == ["none", "all"] * 4
    assert [1, *(timeline for _, timeline in counted)] == list(measured[0])
    assert len(measured) == 1
    for made_candidate, (memory, timeline) in zip(made_candidates, counted[::2], strict=True):
        evaluated = choose.evaluated_shape(made_candidate.config)
        expected = (
            made_candidate.config,
            (32, 32, 48),
            evaluated,
            machine,
            f"memory of {memory.accumulate}",
            timeline,
        )
        assert made_candidate.beside == expected
        assert made_candidate.config.memory == memory


def test_only_the_width_of_our_network_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "find_divisor", lambda _: (16, 16, 16))
    config = compose("allow=other_run", "stage.batch_size=2", "model.width=16")
    other_network = replace(config, model={**config.model, "_target_": "package.Network"})
    runs = list(smaller_runs(other_network, (32, 32, 48)))
    assert runs
    assert not any("model.width" in changes for changes, _, _ in runs)
    assert all(changed.model == other_network.model for _, changed, _ in runs)


def test_a_narrow_network_is_not_halved_to_nothing() -> None:
    config = compose("allow=other_run", "model.width=3")
    widths = {changed.model["width"] for _, changed, _ in smaller_runs(config, (32, 32, 48))}
    assert widths == {3, 1}


@pytest.mark.parametrize(
    ("overrides", "batches"),
    [([], [12, 6, 3]), (["trainer=ddp"], [12, 6]), (["trainer=ddp", "trainer.num_nodes=2"], [12])],
)
def test_a_smaller_batch_is_one_that_the_ranks_share(
    overrides: list[str], batches: list[int]
) -> None:
    assert choose._smaller_batches(compose("stage.batch_size=12", *overrides)) == batches
