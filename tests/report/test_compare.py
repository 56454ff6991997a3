"""Comparison of runs: differing keys, repeats, the best setting, and the rows of both tables."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from statistics import stdev

import numpy as np
import pytest

from medseg.report.compare import METRICS, CaseScore, Run, compare, csv_rows, format_count
from medseg.report.runs_page import (
    difference_rows,
    render,
    run_figures,
    setting_figures,
    shown_metrics,
)


def run(
    name: str,
    dice: float | None = None,
    status: str = "finished",
    *,
    peak: float = 1.0,
    **settings: object,
) -> Run:
    """A run whose keys have `__` for a dot."""
    flat = {key.replace("__", "."): value for key, value in settings.items()}
    summary = {} if dice is None else {"val_dice_best": dice, "peak_gib": peak}
    return Run(name, Path(name), status, settings=flat, summary=summary)


def test_differing_keys_are_columns_and_an_interpolation_is_none() -> None:
    runs = [
        run("0", 0.9, optimizer__lr=0.1, schedule__max_lr=0.1, steps=10),
        run("1", 0.8, optimizer__lr=0.2, schedule__max_lr=0.2, steps=10),
    ]
    comparison = compare(runs)
    assert [(column.key, column.values, column.repeated_keys) for column in comparison.columns] == [
        ("optimizer.lr", ("0.1", "0.2"), ("schedule.max_lr",))
    ]
    assert comparison.shared == {"steps": "10"}


def test_a_key_that_one_configuration_lacks_is_a_difference() -> None:
    comparison = compare(
        [
            run("0", 0.9, optimizer__lr=0.1),
            run("1", 0.8, optimizer__lr=0.1, optimizer__momentum=0.9),
        ]
    )
    assert [(column.key, column.values) for column in comparison.columns] == [
        ("optimizer.momentum", ("–", "0.9"))
    ]


def test_two_keys_that_merely_change_together_are_both_shown() -> None:
    comparison = compare([run("0", 0.9, width=8, loss="a"), run("1", 0.8, width=16, loss="b")])
    assert [column.key for column in comparison.columns] == ["width", "loss"]


def test_a_chosen_group_stands_for_the_keys_that_it_sets() -> None:
    made = [
        Run(
            str(i),
            Path(),
            "finished",
            settings={"memory.precision": p, "memory.offload": False, "lr": lr},
            overrides={"memory": m},
        )
        for i, (m, p,
            lr) in enumerate([("plain", "fp32", 1), ("amp", "bf16", 1), ("amp", "bf16", 2)])
    ]  # fmt: skip
    (memory, lr) = compare(made).columns
    assert (memory.key, memory.values, memory.repeated_keys) == (
        "memory",
        ("plain", "amp", "amp"),
        ("memory.precision",),
    )
    assert lr.key == "lr"
    # Overridden once more below the group: the group no longer says it all.
    other = Run(
        "3",
        Path(),
        "finished",
        settings={"memory.precision": "fp16", "lr": 2},
        overrides={"memory": "amp"},
    )
    assert "memory.precision" in [column.key for column in compare([*made, other]).columns]


def test_a_group_that_one_run_names_and_another_has_by_default_makes_no_two_settings() -> None:
    runs = []
    for seed, (optimizer, overrides) in enumerate(
        [("adamw", {}), ("adamw", {"optimizer": "adamw"}), ("sgd", {"optimizer": "sgd"})]
    ):
        settings = {"seed": seed, "optimizer.name": optimizer}
        runs.append(Run(str(seed), Path(), "finished", settings=settings, overrides=overrides))
    refused = Run(
        "3", Path(), "refused", settings={"optimizer": "x"}, has_config=False,
        overrides={"optimizer": "x"},
    )  # fmt: skip
    comparison = compare([*runs, refused])
    assert [setting.label for setting in comparison.settings] == [
        "optimizer adamw",
        "optimizer sgd",
        "optimizer x",
    ]
    assert [setting.number for setting in comparison.setting_of] == [0, 0, 1, 2]


def test_a_job_that_never_began_has_its_overrides_and_hides_nothing() -> None:
    refused = Run("2", Path(), "refused", settings={"lr": 2}, has_config=False)
    comparison = compare([run("0", 0.9, lr=1, peak_lr=1), run("1", 0.8, lr=2, peak_lr=2), refused])
    assert [(column.key, column.values) for column in comparison.columns] == [
        ("lr", ("1", "2", "2"))
    ]


def test_repeats_have_mean_and_standard_deviation_of_the_finished_runs() -> None:
    dices = (0.90, 0.94, 0.95)
    runs = [run(str(seed), dice, seed=seed, lr=1) for seed, dice in enumerate(dices)]
    runs += [run("3", 0.1, "running", seed=3, lr=1), run("4", 0.92, seed=0, lr=2)]
    comparison = compare(runs)
    repeated, single = comparison.settings
    assert [one.name for one in repeated.runs] == ["0", "1", "2", "3"]
    assert repeated.metrics["val_dice"] == list(dices)
    assert single.metrics["val_dice"] == [0.92]
    assert [row["setting_val_dice_sd"] for row in csv_rows(comparison)] == [
        *[f"{stdev(dices):.6g}"] * 4,
        None,
    ]
    assert comparison.best == 1, "a setting with an unfinished run is never the best"
    assert comparison.ranked == [1, 0]
    assert compare(runs[:3] + runs[4:]).best == 0
    (single_dice, repeated_dice) = setting_figures(comparison, shown_metrics(comparison))[0]
    assert (repeated_dice["text"], repeated_dice["is_best"]) == ("0.9300 ± 0.0265", False)
    assert single_dice["text"] == "0.9200"
    assert ">3 of 4</td>" in render(comparison, None, "", "", 0, print)


def test_without_a_complete_setting_there_is_no_best() -> None:
    runs = [run("0", 0.9, lr=1, seed=0), run("1", None, "failed", lr=1, seed=1)]
    comparison = compare(runs)
    assert comparison.best is None
    assert not any(row["is_best"] for row in csv_rows(comparison))
    page = render(comparison, None, "", "", 0, print)
    assert "none is called the best" in page
    assert "★" not in page


def with_cases(name: str, dices: dict[str, float], **settings: object) -> Run:
    """A run with the Dice of validation cases; both labels of a case have the same."""
    scores = tuple(
        CaseScore(10, case, label, dice)
        for case, dice in dices.items()
        for label in ("left", "right")
    )
    return replace(run(name, 0.9, **settings), cases=scores)


def test_differences_pair_the_cases_of_settings() -> None:
    runs = [
        with_cases("0", {"a": 0.8, "b": 0.9}, lr=1, seed=0),
        with_cases("1", {"a": 0.6, "b": 0.9}, lr=1, seed=1),
        with_cases("2", {"a": 0.9, "b": 0.85, "c": 0.1}, lr=2, seed=0),
    ]
    assert compare(runs).differences == {}
    comparison = compare(runs, baseline="1")
    assert comparison.baseline == 0
    assert comparison.settings[0].case_means() == pytest.approx({"a": 0.7, "b": 0.9})
    (found,) = comparison.differences.values()
    assert (found.cases, found.better, found.worse) == (2, 1, 1)
    assert found.difference == pytest.approx((0.2 - 0.05) / 2)
    (row,) = difference_rows(comparison)
    assert (row["name"], row["setting"], row["baseline_mean"]) == ("lr 2", 1, pytest.approx(0.8))
    page = render(comparison, None, "", "", 0, print)
    assert (
        page.index("Validation cases, worst first")
        < page.index("Differences to the baseline")
        < page.index('id="settings"')
    )
    cases = re.findall(r'<tr data-case="(\w)"', page)
    assert cases == ["c", "c", "a", "a", "b", "b"], "the worst first"


def setting_run(name: str, dices: dict[str, float], patients: dict[str, str], lr: int) -> Run:
    """A finished run whose mean is that of its cases."""
    scores = tuple(
        CaseScore(10, case, "lung", dice, patient=patients.get(case, ""))
        for case, dice in dices.items()
    )
    return replace(run(name, sum(dices.values()) / len(dices), lr=lr), cases=scores)


def test_the_best_says_which_settings_may_be_as_good() -> None:
    cases = {f"{patient}_{scan}": patient for patient in "abc" for scan in range(8)}
    gains = {"a": 0.03, "b": 0.02, "c": -0.01}
    rng = np.random.default_rng(0)
    noise = {case: float(rng.normal(0.0, 0.001)) for case in cases}
    base = {case: 0.8 + noise[case] for case in cases}
    best = {case: 0.8 + gains[patient] for case, patient in cases.items()}
    bad = {case: 0.3 + noise[case] for case in cases}
    runs = [setting_run(str(n), dices, cases, n) for n, dices in enumerate((base, best, bad))]
    comparison = compare(runs)
    assert (comparison.best, comparison.tied) == (1, [0]), (
        "eight scans of a patient are not eight patients"
    )
    assert [row["is_best"] for row in csv_rows(comparison)] == [False, True, False]
    assert [row["tied_with_best"] for row in csv_rows(comparison)] == [True, False, False]
    assert "1 of 2 others may be as good" in comparison.verdict
    assert (
        "over 3 validation patients, corrected for the choice among 3 settings"
        in comparison.verdict
    )
    assert comparison.verdict.endswith(": lr 0.")
    page = render(comparison, None, "", "", 0, print)
    assert "Best run by its mean alone</h2>" in page
    assert comparison.verdict in page
    # Runs of versions that did not record patients: each case counts as one.
    runs = [setting_run(str(n), dices, {}, n) for n, dices in enumerate((base, best, bad))]
    comparison = compare(runs)
    assert comparison.tied == []
    assert comparison.verdict == (
        "The best setting is established: it is better than each of the others (paired t-test over "
        "24 validation patients, corrected for the choice among 3 settings)."
    )


def test_runs_without_scores_of_cases_establish_nothing() -> None:
    comparison = compare([run("0", 0.9, lr=1), run("1", 0.2, lr=2), run("2", None, "failed", lr=3)])
    assert (comparison.best, comparison.tied) == (0, [1])
    assert compare([run("0", 0.9, lr=1)]).verdict == ""


def test_of_equal_settings_one_is_rarely_established_as_the_best() -> None:
    """Of six equal settings the best mean beat the worst in 30 % of draws without correction."""
    rng = np.random.default_rng(0)
    num_established = 0
    for _ in range(150):
        runs = [
            setting_run(str(n), {str(c): float(rng.normal(0.9, 0.02)) for c in range(10)}, {}, n)
            for n in range(6)
        ]
        num_established += len(compare(runs).tied) < 5
    assert num_established <= 0.09 * 150


def test_differences_to_a_baseline_count_patients() -> None:
    cases = {"a_1": "a", "a_2": "a", "b": "b"}
    runs = [setting_run("0", dict.fromkeys(cases, 0.8), cases, 1)]
    runs.append(setting_run("1", {"a_1": 0.9, "a_2": 0.7, "b": 0.9}, cases, 2))
    (difference,) = compare(runs, baseline="0").differences.values()
    assert (difference.cases, difference.patients) == (3, 2)
    assert difference.difference == pytest.approx(0.05)
    page = render(compare(runs, baseline="0"), None, "", "", 0, print)
    assert "3 cases of 2 patients; the cases of a patient count together" in page


def test_folds_are_repeats_too() -> None:
    comparison = compare([run(str(fold), 0.9 + fold / 100, data__fold=fold) for fold in range(3)])
    assert len(comparison.settings) == 1
    assert [column.key for column in comparison.columns] == ["data.fold"]


def test_the_best_is_finished_and_the_smaller_of_equals() -> None:
    runs = [
        run("0", 0.9, lr=1, peak=2.0),
        run("1", 0.9, lr=2, peak=1.0),
        run("2", 0.99, "running", lr=3),
    ]
    comparison = compare(runs)
    assert comparison.best == 1
    assert comparison.ranked[-1] == 2
    assert compare([runs[2]]).best is None


def test_not_a_number_is_no_result() -> None:
    comparison = compare([run("0", float("nan"), lr=1), run("1", 0.5, lr=2)])
    assert comparison.best == 1
    assert run_figures(comparison, shown_metrics(comparison))[0][0]["text"] == "–"


def test_metrics_without_a_better_direction_are_shown_where_they_differ() -> None:
    runs = [
        Run(
            str(i),
            Path(),
            "finished",
            settings={"lr": i},
            summary={"steps": 10, "num_parameters": 5 + i},
        )
        for i in range(2)
    ]
    assert [metric.key for metric in shown_metrics(compare(runs))] == ["num_parameters"]


def test_the_csv_table_has_one_row_per_run() -> None:
    rows = csv_rows(
        compare(
            [
                run("a,b", 0.9, lr=1, seed=1),
                run("c", 0.8, lr=1, seed=2),
                run("d", None, "failed", lr=2, seed=1),
            ]
        )
    )
    assert [row["run"] for row in rows] == ["a,b", "c", "d"]
    assert [row["setting_val_dice_mean"] for row in rows] == ["0.85", "0.85", None]
    assert [row["is_best"] for row in rows] == [True, True, False]


def test_a_key_with_the_name_of_a_metric_has_a_column_of_its_own() -> None:
    runs = []
    for name, steps in (("0", 100), ("1", 200)):
        summary = {"steps": 50, "val_dice_best": 0.9}
        runs.append(Run(name, Path(), "finished", settings={"steps": steps}, summary=summary))
    rows = csv_rows(compare(runs))
    assert [row["steps"] for row in rows] == ["50", "50"]
    assert [row["config.steps"] for row in rows] == ["100", "200"]


@pytest.mark.parametrize(
    ("number", "text"), [(999.4, "999"), (999.7, "1 k"), (999_960, "1 M"), (999_400, "999 k")]
)
def test_a_count_is_in_the_unit_that_its_rounded_value_has(number: float, text: str) -> None:
    assert format_count(number) == text


def test_each_metric_reads_the_summary_before_the_history() -> None:
    lines: list[dict[str, float]] = [
        {"step": 10, "seconds_per_step": 1.0, "peak_gib": 2.0},
        {
            "step": 20,
            "seconds_per_step": 5.0,
            "peak_gib": 4.0,
            "val_dice": 0.7,
            "val_dice_worst": 0.6,
        },
        {
            "step": 30,
            "seconds_per_step": 2.0,
            "peak_gib": 3.0,
            "val_dice": 0.8,
            "val_dice_worst": 0.5,
        },
        {"step": 40, "val_dice": 0.75, "val_dice_worst": 0.65},
    ]
    bare = Run("0", Path(), "running", history=tuple(lines))
    expected = {
        "val_dice": 0.8,
        "val_dice_worst": 0.5,
        "steps": 40,
        "seconds_per_step": 2.0,
        "peak_gib": 4.0,
    }
    assert {
        metric.key: metric.read(bare) for metric in METRICS if metric.read(bare) is not None
    } == expected
    summary = {
        "val_dice_best": 0.9,
        "steps": 50,
        "train_s": 60,
        "peak_gib": 1.5,
        "num_parameters": 7,
        "seconds_per_step": 9.0,
    }
    told = replace(bare, summary=summary)
    assert {metric.key: metric.read(told) for metric in METRICS} == {
        "val_dice": 0.9,
        "val_dice_worst": 0.5,
        "steps": 50,
        "seconds_per_step": 2.0,
        "train_s": 60,
        "peak_gib": 1.5,
        "num_parameters": 7,
    }
    assert {metric.key: metric.better for metric in METRICS} == {
        "val_dice": 1,
        "val_dice_worst": 1,
        "steps": 0,
        "seconds_per_step": -1,
        "train_s": -1,
        "peak_gib": -1,
        "num_parameters": 0,
    }


@pytest.mark.parametrize(
    ("value", "is_taken"),
    [
        (1e30, True),
        (1.1e30, False),
        (-1.1e30, False),
        (True, False),
        ("0.9", False),
        (float("inf"), False),
    ],
)
def test_a_figure_that_no_run_can_have_is_none(value: object, is_taken: bool) -> None:
    told = Run(
        "0",
        Path(),
        "finished",
        summary={"peak_gib": value},
        history=({"step": 1, "peak_gib": 2.0},),
    )
    (peak,) = (metric for metric in METRICS if metric.key == "peak_gib")
    assert peak.read(told) == (value if is_taken else 2.0)
