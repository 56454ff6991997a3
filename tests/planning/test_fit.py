"""Rows of the printed front, and the largest batch and patch, by two counted steps."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra
import pytest

from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.planning import fit
from medseg.planning.choose import Option, choose_line
from medseg.planning.estimate import STEP, Estimate
from medseg.runs.plans import compare_with_plan
from medseg.training.options import TrainConfig

from .test_choose import SMALL, compose

SHAPE = (32, 32, 48)
BYTES_PER_VOXEL, FIXED, WORKSPACE, PREFETCH = 500, 10**6, 1.2, 4


def memory(samples: int, shape: tuple[int, ...]) -> Any:
    voxels = samples * math.prod(shape)
    return SimpleNamespace(peak=FIXED + BYTES_PER_VOXEL * voxels, input=4 * voxels, target=voxels)


def resident(samples: int, shape: tuple[int, ...]) -> float:
    """Peak with workspaces, and the batches that a loader process holds."""
    counted = memory(samples, shape)
    return WORKSPACE * counted.peak + PREFETCH * (counted.input + counted.target)


@pytest.mark.parametrize("budget", [10**8, 3 * 10**8, 10**9])
@pytest.mark.parametrize("micro_batches_per_step", [1, 4])
def test_the_largest_batch_and_patch_fit_and_larger_ones_do_not(
    budget: int,
    micro_batches_per_step: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    overrides = [f"data.prefetch={PREFETCH}"]
    if micro_batches_per_step == 4:
        overrides += ["trainer=ddp", "memory.accumulate=2", "stage.batch_size=4"]
    config = compose(*overrides)
    monkeypatch.setattr(fit, "count_memory", lambda _, shape, samples: memory(samples, shape))
    own = memory(1, SHAPE)
    allocator: Any = {STEP: WORKSPACE * own.peak}
    at_peak: Any = {STEP: resident(1, SHAPE)}
    checked = Estimate(own, allocator, at_peak, 0.0, 0.0, 0.0, num_workers=1, busy_processors=1)
    chosen: Any = SimpleNamespace(config=config)
    option: Any = SimpleNamespace(switches={"memory.checkpointing": "none"})
    fit.print_room(chosen, option, checked, SHAPE, budget)
    said = capsys.readouterr().out
    (batch,) = map(int, re.findall(r"stage\.batch_size=(\d+)", said))
    (patch,) = (
        [int(length) for length in found.split(",")]
        for found in re.findall(r"stage\.patch_size=\[([\d,]+)\]", said)
    )
    samples, rest = divmod(batch, micro_batches_per_step)
    assert rest == 0, "two ranks of two micro-batches share it"
    assert resident(samples, SHAPE) <= budget < resident(samples + 1, SHAPE)
    assert resident(1, tuple(patch)) <= budget
    grown = [fit.grown(SHAPE, 1 + eighths / 8, (16, 16, 16)) for eighths in range(65)]
    assert budget < min(
        resident(1, shape) for shape in grown if math.prod(shape) > math.prod(patch)
    )


class ChosenForError(Exception):
    """Ends `fit` once the budget of the search is known."""


def test_the_margin_of_the_estimate_is_kept_free_of_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    budgets: list[int] = []

    def note(candidates: Any, budget: int, *_: Any) -> None:
        budgets.append(budget)
        raise ChosenForError

    monkeypatch.setattr(fit, "make_candidates", lambda *_: [])
    monkeypatch.setattr(fit, "choose_verified", note)
    with pytest.raises(ChosenForError):
        fit.fit(compose("fit_gib=8"), SHAPE)
    assert budgets[0] * (1 + fit.MARGIN) == pytest.approx(8 * 2**30, rel=1e-6)


def test_switches_whose_count_exceeds_the_budget_are_chosen_again_for_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The budget falls by the difference between count and model."""
    config, budgets = compose("fit_gib=8"), []

    def fastest(candidates: Any, budget: int, max_seconds: float) -> tuple[Any, Option]:
        budgets.append(budget)
        return SimpleNamespace(config=config), Option({"memory.checkpointing": "none"}, budget, 1.0)

    counts = iter([1300, 990])
    monkeypatch.setattr(fit, "fastest_option", fastest)
    monkeypatch.setattr(fit, "estimate", lambda *_: SimpleNamespace(peak_resident=next(counts)))
    chosen = fit.choose_verified([], 1000, math.inf, SHAPE, None)
    assert chosen is not None
    assert chosen[1].peak == 990, "the count, not the model"
    assert budgets == [1000, 1000 - 300 - 1]


@pytest.mark.parametrize(
    ("factor", "expected"), [(1, (32, 32, 48)), (1.01, (48, 48, 64)), (2, (64, 64, 96))]
)
def test_a_patch_grows_by_whole_divisors_and_by_one_at_least(
    factor: float, expected: tuple[int, int, int]
) -> None:
    assert fit.grown(SHAPE, factor, (16, 16, 16)) == expected


@pytest.mark.parametrize("checkpointing", ["none", "all", ["encoder.0.block0", "decoder.0.block0"]])
def test_a_run_with_the_chosen_switches_finds_its_plan(
    checkpointing: str | list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    switches = {
        "memory.precision": "bf16",
        "memory.channels_last": True,
        "memory.checkpointing": checkpointing,
    }
    option = Option(switches, 800 * 2**20, 1.5)
    candidate: Any = SimpleNamespace(
        config=compose("memory.precision=bf16", "memory.channels_last=true")
    )
    fit.keep_plan(candidate, option)
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        composed = hydra.compose("train", [*SMALL, *choose_line(option, {}).split(), "run_dir=x"])
    plan = compare_with_plan(
        to_config(composed, TrainConfig), {"peak_resident_mib": 800.0, "seconds_per_step": 3.0}
    )
    assert {name: row["ratio"] for name, row in plan.items()} == {
        "peak_resident_mib": 1.0,
        "seconds_per_step": 0.5,
    }


def option(peak_mib: int, seconds: float, blocks: list[str]) -> Option:
    return Option({"memory.checkpointing": blocks}, peak_mib * 2**20, seconds)


FRONT = [
    option(1000, 1.0, []),
    option(980, 1.1, ["a"]),
    option(700, 1.5, ["a", "b"]),
    option(690, 1.6, ["c"]),
]


def test_the_choice_is_a_marked_row_of_the_front(capsys: pytest.CaptureFixture[str]) -> None:
    """Its peak is the counted one, also where the model's row says a little more."""
    choice = option(975, 1.1, ["a"])
    rows = fit.with_choice(FRONT, choice)
    assert rows == [FRONT[0], choice, *FRONT[2:]]
    fit.print_front(rows, choice, compose())
    (marked,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("chosen"))
    assert "975.0" in marked
    assert "memory.checkpointing=[a]" in marked


def test_a_choice_between_two_rows_of_the_front_replaces_those_that_it_beats() -> None:
    choice = option(690, 1.2, ["d"])
    assert fit.with_choice(FRONT, choice) == [*FRONT[:2], choice]


def test_the_front_is_thinned_out_but_for_its_ends_and_the_choice() -> None:
    assert fit.shown_rows(FRONT, None) == [FRONT[0], FRONT[2], FRONT[3]]
    assert fit.shown_rows(FRONT, FRONT[1]) == FRONT


class Search:
    """Replaces the functions that `fit` calls, and records the calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.verified: list[tuple[Any, ...]] = []
        self.answers: list[Any] = []
        self.counted = SimpleNamespace(
            peak_allocator=300 * 2**20,
            memory=SimpleNamespace(peak=200 * 2**20, saved_per_voxel=47.0),
        )
        monkeypatch.setattr(fit, "Machine", lambda config: "machine")
        monkeypatch.setattr(
            fit,
            "make_candidates",
            lambda config, shape, machine: [(config.stage.batch_size, shape)],
        )
        monkeypatch.setattr(fit, "front", lambda found: FRONT)
        monkeypatch.setattr(fit, "choose_verified", self.verify)
        for name in ("print_reasons", "print_room", "keep_plan"):
            monkeypatch.setattr(fit, name, lambda *_: None)

    def verify(self, *arguments: Any) -> Any:
        self.verified.append(arguments)
        return self.answers.pop(0) if self.answers else None

    def choice(self, chosen: Option) -> tuple[Any, Option, Any]:
        return SimpleNamespace(model=SimpleNamespace(blocks=["a", "b"])), chosen, self.counted


def test_the_choice_is_the_last_line_and_lies_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    search = Search(monkeypatch)
    search.answers = [search.choice(option(975, 1.1, ["a"]))]
    monkeypatch.setattr(fit, "make_candidates", lambda *_: [search.answers[0][0]])
    output = tmp_path / "plan.json"
    assert fit.fit(compose("fit_gib=2", "max_seconds=3", f"output='{output}'"), SHAPE) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == "choose: memory.checkpointing=[a]"
    assert (
        "chosen: 975.0 MiB, with a margin of 5 % within 2 GiB; 1.100 s per step. Of 4 sets of "
        "switches"
    ) in said[-2]
    ((_, budget, max_seconds, shape, machine),) = search.verified
    assert (budget, max_seconds, shape, machine) == (int(2 * 2**30 / 1.05), 3.0, SHAPE, "machine")
    facts = json.loads(output.read_text())
    rows = facts.pop("front")
    assert facts == {
        "choose": "memory.checkpointing=[a]",
        "peak_resident_mib": 975.0,
        "seconds_per_step": 1.1,
        "peak_allocator_mib": 300.0,
        "peak_live_mib": 200.0,
        "saved_bytes_per_voxel": 47.0,
    }
    assert [row["peak_mib"] for row in rows] == [1000, 975, 700, 690]
    assert rows[1] == {"peak_mib": 975.0, "seconds": 1.1, "arguments": "memory.checkpointing=[a]"}
    assert output.with_suffix(".png").is_file()


@pytest.mark.parametrize("allow", ["same_expectation", "other_run"])
def test_where_nothing_fits_the_least_demanding_set_is_named(
    allow: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    search = Search(monkeypatch)
    monkeypatch.setattr(
        fit, "smaller_runs", lambda config, shape: [({"stage.batch_size": 1}, config, shape)]
    )
    monkeypatch.setattr(fit, "fits_at_all", lambda *_: False)
    assert fit.fit(compose("fit_gib=0.5", f"allow={allow}"), SHAPE) == 1
    said = capsys.readouterr()
    assert "choose:" not in said.out
    assert len(search.verified) == 1, "a run that cannot fit is not searched"
    assert search.verified[0][2] == math.inf
    assert (
        f"the smallest needs {690 * 1.05 / 1024:.2f} GiB and takes 1.6 s per step with "
        "memory.checkpointing=[c]"
    ) in said.err
    assert ("allow=other_run" in said.err) == (allow != "other_run")


def test_another_run_is_only_searched_where_it_is_allowed_and_the_first_that_fits_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    search = Search(monkeypatch)
    monkeypatch.setattr(
        fit,
        "make_candidates",
        lambda config, shape, machine: [SimpleNamespace(model=SimpleNamespace(blocks=[]))],
    )
    others = [
        ({"stage.batch_size": number}, f"config {number}", (number,) * 3) for number in (4, 3, 2, 1)
    ]
    asked: list[Any] = []
    monkeypatch.setattr(fit, "smaller_runs", lambda config, shape: iter(others))

    def fits_at_all(config: Any, shape: Any, machine: Any, budget: int) -> bool:
        asked.append((config, shape, machine, budget))
        return shape != (4, 4, 4)

    monkeypatch.setattr(fit, "fits_at_all", fits_at_all)
    search.answers = [None, None, search.choice(option(500, 1.1, ["a"]))]
    output = tmp_path / "plan.json"
    assert fit.fit(compose("fit_gib=2", "allow=other_run", f"output='{output}'"), SHAPE) == 0
    assert [arguments[3] for arguments in search.verified] == [SHAPE, (3, 3, 3), (2, 2, 2)]
    budget = int(2 * 2**30 / 1.05)
    assert asked == [(f"config {number}", (number,) * 3, "machine", budget) for number in (4, 3, 2)]
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == "choose: stage.batch_size=2 memory.checkpointing=[a]"
    # Each row of the front is an argument line of the same run.
    assert sum("stage.batch_size=2 memory.checkpointing=" in line for line in said[:-1]) == 2
    rows = json.loads(output.read_text())["front"]
    assert all(row["arguments"].startswith("stage.batch_size=2 ") for row in rows)


@pytest.mark.parametrize(("peak", "fits"), [(1000, True), (1001, False)])
def test_a_run_fits_at_all_by_its_least_demanding_switches(
    monkeypatch: pytest.MonkeyPatch, peak: int, fits: bool
) -> None:
    counted: list[Any] = []

    def count(config: Any, shape: Any, evaluated: Any, machine: Any) -> Any:
        counted.append((config.memory, shape, machine))
        return SimpleNamespace(peak_resident=peak)

    live = SimpleNamespace(peak=1000)
    monkeypatch.setattr(fit, "count_memory", lambda *_: live)
    monkeypatch.setattr(fit, "estimate", count)
    config = compose("stage.batch_size=4", "allow=same_result")
    machine: Any = "machine"
    assert fit.fits_at_all(config, SHAPE, machine, 1000) == fits
    live.peak = 1001
    assert not fit.fits_at_all(config, SHAPE, machine, 1000), "nothing is measured for it"
    ((switches, shape, machine),) = counted
    assert (switches.checkpointing, switches.accumulate, shape, machine) == (
        "all",
        4,
        SHAPE,
        "machine",
    )


def test_what_each_switch_saves_is_the_difference_to_the_set_without_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        fit,
        "reasons",
        lambda *_: [("recompute a", option(1000, 1.0, [])), ("other", option(900, 2.0, []))],
    )
    fit.print_reasons(None, option(980, 1.1, ["a"]), [])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows == [["recompute", "a", "-20.0", "+0.100"], ["other", "+80.0", "-0.900"]]


def test_after_three_tries_no_set_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    config, budgets = compose("fit_gib=8"), []

    def fastest(candidates: Any, budget: int, max_seconds: float) -> tuple[Any, Option]:
        budgets.append(budget)
        return SimpleNamespace(config=config), Option({"memory.checkpointing": "none"}, budget, 1.0)

    monkeypatch.setattr(fit, "fastest_option", fastest)
    monkeypatch.setattr(fit, "estimate", lambda *_: SimpleNamespace(peak_resident=2000))
    assert fit.choose_verified([], 1000, math.inf, SHAPE, None) is None
    assert len(budgets) == 3
    monkeypatch.setattr(fit, "fastest_option", lambda *_: None)
    assert fit.choose_verified([], 1000, math.inf, SHAPE, None) is None


@pytest.mark.parametrize(
    ("overrides", "reason", "cure"),
    [
        (["fit_gib=0.5"], "no set of switches fits; the smallest", "; give more memory, or allow="),
        (
            ["fit_gib=2", "max_seconds=0.5"],
            "no set of switches fits and takes at most max_seconds=0.5; the smallest",
            "; give more memory, or a larger max_seconds, or allow=",
        ),
        (
            ["fit_gib=2"],
            "no set of switches fits: the sets that are predicted to fit need more when their "
            "steps are counted; the smallest",
            "; give more memory, or allow=",
        ),
    ],
)
def test_the_reason_why_nothing_was_chosen_agrees_with_the_limits(
    overrides: list[str],
    reason: str,
    cure: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """More memory does not help a step that is too slow, and 0.71 GiB are within 2 GiB."""
    Search(monkeypatch)
    assert fit.fit(compose(*overrides), SHAPE) == 1
    said = capsys.readouterr().err
    assert reason in said
    assert cure in said
