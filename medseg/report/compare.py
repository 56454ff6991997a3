"""Comparison of runs: differing keys, settings, metrics, the best setting, a baseline.

A setting is a group of runs whose configurations differ only in `REPEAT_KEYS`, such as the seed.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

from medseg.report.differences import (
    Difference,
    case_means,
    is_established,
    paired_difference,
)
from medseg.wording import first_few

FINISHED = "finished"
# Statuses of runs that are neither a success nor a failure yet.
OPEN = frozenset({"running", "interrupted", "unfinished"})
# Status of a run that a search has ended early, since its results were poor.
PRUNED = "pruned"
# Keys in which the repeats of one setting may differ. The standard deviation over the repeats shows
# which differences between settings are larger than chance.
REPEAT_KEYS = ("seed", "data.fold")
# Text of a key or a figure that a run does not have.
MISSING = "–"
# Largest number of settings that a sentence names.
MAX_NAMED = 5
# Largest magnitude of a number that is taken from a file of a run: a larger one means damage, and
# would overflow in the arithmetic of charts.
LARGEST = 1e30


class CaseScore(NamedTuple):
    """Dice of one label of a validation case at one step.

    Attributes:
        step: Optimiser step.
        case: Name of the case.
        label: Name of the label.
        dice: Dice coefficient of the label.
        picture: File name of the overlay, or "".
        patient: Patient of the case, or "" in runs of versions that did not record it.
    """

    step: int
    case: str
    label: str
    dice: float
    picture: str = ""
    patient: str = ""


class Picture(NamedTuple):
    """Overlay of a validation case.

    Attributes:
        path: PNG file.
        step: Optimiser step.
        case: Name of the case, or "" where the run does not record it.
        dice: Dice of each of its labels at that step.
    """

    path: Path
    step: int
    case: str = ""
    dice: Mapping[str, float] = {}


@dataclass(frozen=True)
class Run:
    """One run folder; any of its files may be missing.

    Attributes:
        name: Path below the reported folder; `.` is that folder itself.
        folder: The run folder.
        status: `finished`, `running`, `refused`, … as in `job.json`; `unfinished` where no file
            gives a status.
        message: Why the run did not finish, or "".
        settings: Values of the resolved configuration by dotted key, without keys that only name
            folders; no `Setting`. A run that never began has its overrides only.
        has_config: Whether `settings` is the whole configuration.
        overrides: Arguments of the run by key, if it is a job of a multirun; else empty.
        summary: `summary.json`.
        history: Lines of `history.csv` without their empty cells.
        pictures: Overlays of validation cases at the last step that has any.
        cases: Scores of the validation cases at the step of the best mean.
    """

    name: str
    folder: Path
    status: str
    message: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    has_config: bool = True
    overrides: Mapping[str, str] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    history: tuple[Mapping[str, float], ...] = ()
    pictures: tuple[Picture, ...] = ()
    cases: tuple[CaseScore, ...] = ()

    def curve(self, column: str) -> list[tuple[float, float]]:
        """List the points (optimiser step, value) of a column of the history."""
        points = []
        for line in self.history:
            # Losses and validations have lines of their own, in which the other cells are empty.
            if column in line and "step" in line:
                points.append((line["step"], line[column]))
        return points


class Metric(NamedTuple):
    """A figure by which runs are compared.

    Attributes:
        key: Column of `report.csv`.
        title: Heading of a column in the page.
        description: One sentence for the heading's tooltip.
        read: Function that returns the value of a run; None where the run has none.
        format: Function that returns the text of a value for the page.
        better: 1 when more is better, -1 when less is, 0 when neither.
    """

    key: str
    title: str
    description: str
    read: Callable[[Run], float | None]
    format: Callable[[float], str]
    better: int


# Result of a search as in `study.json`. It has `name`, `objectives` (metric key to `maximize` or
# `minimize`), `space` (searched key to its distribution), `num_trials` planned in all, `best`
# (names of the best runs: one, or the front of two objectives) and `importances` (searched key to
# its share in [0, 1]; empty for few results).
Study = Mapping[str, Any]


def format_duration(duration_s: float) -> str:
    """Format seconds in the units that people use.

    Example:
        >>> [format_duration(s) for s in (0.4, 59.6, 60, 3599, 7260, 200000)]
        ['0.4 s', '1 min', '1 min', '1 h', '2 h 1 min', '55 h 33 min']
    """
    # The rounded value decides the unit: 59.6 s is a minute.
    if round(duration_s) < 60:
        return f"{duration_s:.1f} s" if duration_s < 10 else f"{duration_s:.0f} s"
    hours, minutes = divmod(round(duration_s / 60), 60)
    if not hours:
        return f"{minutes} min"
    if not minutes:
        return f"{hours} h"
    return f"{hours} h {minutes} min"


def format_count(number: float) -> str:
    """Format a large count with three digits.

    Example:
        >>> [format_count(n) for n in (950, 12_300, 999_900, 1_450_000)]
        ['950', '12.3 k', '1 M', '1.45 M']
    """
    # The rounded value decides the unit: 999,900 is a million.
    rounded = float(f"{number:.3g}")
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if rounded >= size:
            return f"{rounded / size:.3g}{unit}"
    return f"{number:.0f}"


def _reader(
    key: str | None, column: str | None = None, pick: Callable[[Sequence[float]], float] = max
) -> Callable[[Run], float | None]:
    """Make a reader of a finite number in the summary of a run.

    Where the summary lacks the number, it is computed from a column of the history.

    Args:
        key: Key of the summary; None reads the history only.
        column: Column of the history; None reads the summary only.
        pick: Function that computes the number from the values of the column.

    Returns:
        Function of a run that returns the number, or None where the run has none.
    """

    def read(run: Run) -> float | None:
        summary_value = None if key is None else run.summary.get(key)
        # Python counts True as a number.
        if isinstance(summary_value, bool):
            summary_value = None
        # The comparison is false for NaN, too.
        if isinstance(summary_value, int | float) and abs(summary_value) <= LARGEST:
            return float(summary_value)
        if column is None:
            return None
        values = [value for _, value in run.curve(column)]
        return pick(values) if values else None

    return read


def _val_dice_worst(run: Run) -> float | None:
    """Read the Dice of the worst case at the step of the best mean; None without a validation."""
    lines = [line for line in run.history if "val_dice" in line and "val_dice_worst" in line]
    if not lines:
        return None
    best_line = max(lines, key=lambda line: line["val_dice"])
    return best_line["val_dice_worst"]


VAL_DICE = Metric(
    key="val_dice",
    title="Val Dice",
    description="Best mean Dice over the validation cases",
    read=_reader("val_dice_best", column="val_dice"),
    format="{:.4f}".format,
    better=1,
)
PEAK = Metric(
    key="peak_gib",
    title="Peak GiB",
    description="Peak memory: that of the GPU if there is one, else resident memory",
    read=_reader("peak_gib", column="peak_gib"),
    format="{:.2f}".format,
    better=-1,
)
STEP = Metric(
    key="seconds_per_step",
    title="s/step",
    description="Median seconds per optimiser step, validation left out",
    read=_reader(None, column="seconds_per_step", pick=median),
    format="{:.3g}".format,
    better=-1,
)
VAL_DICE_WORST = Metric(
    key="val_dice_worst",
    title="Worst case",
    description="Dice of the worst validation case, at the step of the best mean",
    read=_val_dice_worst,
    format="{:.4f}".format,
    better=1,
)
STEPS = Metric(
    key="steps",
    title="Steps",
    description="Optimiser steps made",
    read=_reader("steps", column="step"),
    format="{:.0f}".format,
    better=0,
)
TRAIN_TIME = Metric(
    key="train_s",
    title="Time",
    description="Training and validation together",
    read=_reader("train_s"),
    format=format_duration,
    better=-1,
)
NUM_PARAMETERS = Metric(
    key="num_parameters",
    title="Weights",
    description="Number of parameters of the network",
    read=_reader("num_parameters"),
    format=format_count,
    better=0,
)
METRICS = (VAL_DICE, VAL_DICE_WORST, STEPS, STEP, TRAIN_TIME, PEAK, NUM_PARAMETERS)


class Column(NamedTuple):
    """A key whose value differs between the runs.

    Attributes:
        key: Dotted key, or the name of a configuration group (`memory`).
        values: Value in each run, as text.
        repeated_keys: Differing keys that get no column of their own, since their values follow
            from this one: interpolations of this key, or keys that a file of this group sets.
    """

    key: str
    values: tuple[str, ...]
    repeated_keys: tuple[str, ...] = ()


class Setting(NamedTuple):
    """Runs that differ in nothing but `REPEAT_KEYS`.

    Attributes:
        number: Place of the setting in the order of first appearance, from 0. It also decides the
            colour of the setting.
        runs: Its runs, in the order of `Comparison.runs`.
        label: Text of keys and values for a legend.
        values: Text in each of `Comparison.setting_columns`.
        metrics: Metric key to the values of the finished runs; a metric without values is left out.
        is_complete: Whether all runs have finished; only then can the setting be the best.
        cases: Case and label to the mean Dice over the finished runs that validated the case.
    """

    number: int
    runs: Sequence[Run]
    label: str
    values: tuple[str, ...]
    metrics: Mapping[str, Sequence[float]]
    is_complete: bool
    cases: Mapping[tuple[str, str], float]

    def case_means(self) -> dict[str, float]:
        """Average the Dice of each case over its labels."""
        return case_means(self.cases)


@dataclass(frozen=True)
class Comparison:
    """All runs side by side.

    Attributes:
        runs: In natural order of their names.
        columns: Keys that differ between runs.
        setting_columns: The columns whose key is not one of `REPEAT_KEYS`.
        settings: Settings by their number.
        setting_of: Setting of each run.
        ranked: Numbers of the settings from the best mean validation Dice to the worst; then the
            settings with unfinished runs, and last those without a result.
        best: Number of the best setting: of the settings whose runs have all finished, the one with
            the best mean validation Dice, and of equal means the one with the smaller peak memory.
            None if there is none.
        tied: Numbers of the other settings with a result that are not established to be worse than
            the best, see `is_established`; every pair of settings counts as a comparison that could
            have been made.
        shared: Keys, dotted, that have the same value in all runs, to the text of the value.
        baseline: Number of the setting of the baseline run, or None.
        differences: Number of each other setting to its difference to the baseline in the mean Dice
            of the common validation cases.
        patients: Validation case to its patient; cases of runs that do not record it are missing.
    """

    runs: tuple[Run, ...]
    columns: Sequence[Column]
    setting_columns: Sequence[Column]
    settings: tuple[Setting, ...]
    setting_of: Sequence[Setting]
    ranked: Sequence[int]
    best: int | None
    shared: Mapping[str, str]
    baseline: int | None = None
    differences: Mapping[int, Difference] = field(default_factory=dict)
    tied: Sequence[int] = ()
    patients: Mapping[str, str] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """Say in a sentence whether the best setting is established; "" without others."""
        num_settings = sum(VAL_DICE.key in setting.metrics for setting in self.settings)
        if self.best is None or num_settings < 2:
            return ""
        cases = self.settings[self.best].case_means()
        num_patients = len({self.patients.get(case, case) for case in cases})
        test = (
            f"paired t-test over {num_patients} validation patients, "
            f"corrected for the choice among {num_settings} settings"
        )
        if not self.tied:
            return (
                f"The best setting is established: it is better than each of the others ({test})."
            )
        labels = [self.settings[number].label for number in self.tied]
        named = first_few(labels, MAX_NAMED, "; ")
        return (
            f"The best setting is not established: it has the best mean, but {len(self.tied)} of "
            f"{num_settings - 1} others may be as good ({test}): {named}."
        )


def compare(runs: Sequence[Run], baseline: str | None = None) -> Comparison:
    """Compare runs: columns, settings, ranks, and differences to the setting of a baseline run.

    Args:
        runs: In natural order of their names.
        baseline: Name of one of the runs; None = no differences.
    """
    texts = _texts_by_key(runs)
    shared: dict[str, str] = {}
    differing_keys: list[str] = []
    for key, run_texts in texts.items():
        # A text is None where the run never got a configuration.
        distinct_texts = list({text for text in run_texts if text is not None})
        if len(distinct_texts) > 1:
            differing_keys.append(key)
        elif distinct_texts:
            shared[key] = distinct_texts[0]
    columns = _columns(runs, {key: texts[key] for key in differing_keys})
    setting_columns = [column for column in columns if column.key not in REPEAT_KEYS]
    # Every differing key counts, with a column or without: keys that a chosen group sets have none,
    # but they distinguish the settings.
    setting_keys = [key for key in differing_keys if key not in REPEAT_KEYS]
    groups = _group_repeats(runs, {key: texts[key] for key in setting_keys})
    settings, setting_of = _make_settings(runs, groups, setting_columns)
    patients = _patients_of_cases(runs)
    ranked = sorted(range(len(settings)), key=lambda number: _rank_key(settings[number]))
    best = None
    tied: Sequence[int] = ()
    # Settings that can be the best are ranked before all others.
    if ranked and _can_be_best(settings[ranked[0]]):
        best = ranked[0]
        tied = _tied(settings, ranked, best, patients)
    baseline_number = _number_of_baseline(runs, setting_of, baseline)
    differences: dict[int, Difference] = {}
    if baseline_number is not None:
        differences = _differences(settings, baseline_number, patients)
    return Comparison(
        runs=tuple(runs),
        columns=columns,
        setting_columns=setting_columns,
        settings=settings,
        setting_of=setting_of,
        ranked=ranked,
        best=best,
        shared=shared,
        baseline=baseline_number,
        differences=differences,
        tied=tied,
        patients=patients,
    )


def _number_of_baseline(
    runs: Sequence[Run], setting_of: Sequence[Setting], baseline: str | None
) -> int | None:
    """Find the number of the setting of the baseline run; None without a baseline."""
    for run, setting in zip(runs, setting_of, strict=True):
        if run.name == baseline:
            return setting.number
    return None


def _group_repeats(
    runs: Sequence[Run], texts: Mapping[str, Sequence[str | None]]
) -> list[list[int]]:
    """Group the indices of the runs with equal texts, in the order of first appearance.

    Args:
        runs: All runs.
        texts: Key to its text in each run, for the keys that distinguish settings.
    """
    group_keys = _group_keys(runs)
    # The texts of a setting to the indices of its runs; the dictionary keeps the order.
    indices_by_texts: dict[tuple[str | None, ...], list[int]] = {}
    for index, run in enumerate(runs):
        setting_texts: list[str | None] = []
        for key, run_texts in texts.items():
            text = run_texts[index]
            # With the whole configuration, the keys that a group's file sets are compared instead
            # of its name: one run may name the file that another run has by default.
            if key in group_keys and run.has_config:
                text = None
            setting_texts.append(text)
        indices_by_texts.setdefault(tuple(setting_texts), []).append(index)
    return list(indices_by_texts.values())


def _make_settings(
    runs: Sequence[Run], groups: Sequence[list[int]], columns: Sequence[Column]
) -> tuple[tuple[Setting, ...], list[Setting]]:
    """Make a setting of each group of runs.

    Args:
        runs: All runs.
        groups: Indices of the runs of each setting.
        columns: Columns of the keys that distinguish settings.

    Returns:
        The settings, and the setting of each run.
    """
    settings = []
    # Index of a run to its setting.
    setting_by_run: dict[int, Setting] = {}
    for number, indices in enumerate(groups):
        setting = _setting(number, indices, runs, columns)
        settings.append(setting)
        for index in indices:
            setting_by_run[index] = setting
    return tuple(settings), [setting_by_run[index] for index in range(len(runs))]


def _patients_of_cases(runs: Sequence[Run]) -> dict[str, str]:
    """Map the validation cases of all runs to their patients, where a run records them."""
    patients = {}
    for run in runs:
        for score in run.cases:
            if score.patient:
                patients[score.case] = score.patient
    return patients


def _can_be_best(setting: Setting) -> bool:
    """Whether all runs of a setting have finished, and some of them have a validation Dice."""
    return setting.is_complete and VAL_DICE.key in setting.metrics


def _rank_key(setting: Setting) -> tuple[bool, bool, float, float]:
    """Sort key of a setting, the best first: lacks a result, is incomplete, -Dice, peak memory."""
    dices = setting.metrics.get(VAL_DICE.key)
    minus_dice = -fmean(dices) if dices else 0.0
    peaks_gib = setting.metrics.get(PEAK.key)
    peak_gib = fmean(peaks_gib) if peaks_gib else float("inf")
    # False sorts before True.
    return not dices, not setting.is_complete, minus_dice, peak_gib


def _differences(
    settings: Sequence[Setting], baseline: int, patients: Mapping[str, str]
) -> dict[int, Difference]:
    """Compute the differences of the other settings to the baseline, by their number.

    Settings without a case in common with the baseline are left out.
    """
    differences = {}
    for setting in settings:
        if setting.number == baseline:
            continue
        difference = paired_difference(
            setting.case_means(), settings[baseline].case_means(), patients=patients
        )
        if difference is not None:
            differences[setting.number] = difference
    return differences


def _tied(
    settings: Sequence[Setting], ranked: Sequence[int], best: int, patients: Mapping[str, str]
) -> list[int]:
    """List the settings that the best one is not established to beat, in the order of `ranked`.

    The best was chosen after all results were seen: any pair of settings could have become the
    comparison of the best with another one.
    """
    # Without a result there is nothing to compare.
    compared = [number for number in ranked if VAL_DICE.key in settings[number].metrics]
    # Bonferroni: the level of 5 % is divided by the number of pairs.
    num_pairs = len(compared) * (len(compared) - 1) // 2
    best_means = settings[best].case_means()
    tied = []
    for number in compared:
        if number == best:
            continue
        means = settings[number].case_means()
        if not is_established(best_means, means, patients, num_pairs):
            tied.append(number)
    return tied


def csv_rows(comparison: Comparison) -> list[dict[str, Any]]:
    """Make the rows of `report.csv`, one per run.

    They have the keys that differ, status and metrics of the run, and mean and standard deviation
    of the validation Dice over the runs of its setting. A key with the name of another column
    becomes `config.<key>`: `steps` are the steps made, `config.steps` is the configured number.

    `is_best` marks the runs of the best setting; `tied_with_best` marks those of settings that it
    is not established to beat.
    """
    rows = []
    for index, run in enumerate(comparison.runs):
        setting = comparison.setting_of[index]
        dices = setting.metrics.get(VAL_DICE.key, ())
        mean = f"{fmean(dices):.6g}" if dices else None
        # A standard deviation needs two runs.
        deviation = f"{stdev(dices):.6g}" if len(dices) > 1 else None
        metric_texts = {}
        for metric in METRICS:
            value = metric.read(run)
            metric_texts[metric.key] = None if value is None else f"{value:.6g}"
        state = {"run": run.name, "status": run.status}
        results = {
            **metric_texts,
            "setting": setting.number,
            "setting_val_dice_mean": mean,
            "setting_val_dice_sd": deviation,
            "setting_runs": len(dices),
            "is_best": comparison.best == setting.number,
            "tied_with_best": setting.number in comparison.tied,
            "checkpoint": run.summary.get("checkpoint", ""),
            "message": run.message,
        }
        key_texts = {}
        for column in comparison.columns:
            is_taken = column.key in state or column.key in results
            name = f"config.{column.key}" if is_taken else column.key
            key_texts[name] = column.values[index]
        rows.append({**state, **key_texts, **results})
    return rows


def _texts_by_key(runs: Sequence[Run]) -> dict[str, list[str | None]]:
    """List the text of each key, or chosen group, in each run.

    A text is None where the run never got a configuration and has no override of that key. A key
    that a configuration lacks, such as `optimizer.momentum` with Adam, has the text `MISSING`,
    which counts as a difference.
    """
    texts: dict[str, list[str | None]] = {}
    group_keys = _group_keys(runs)
    # A dictionary keeps the order of the keys' first appearance.
    keys: dict[str, None] = {}
    for run in runs:
        keys |= dict.fromkeys(run.settings)
        keys |= dict.fromkeys(key for key in run.overrides if key in group_keys)
    for key in keys:
        is_group = key in group_keys
        texts[key] = [_text_in(run, key, is_group=is_group) for run in runs]
    return texts


def _text_in(run: Run, key: str, *, is_group: bool) -> str | None:
    """Text of a key in a run, see `_texts_by_key`.

    The text of a group is the name of the file that an override chose.
    """
    values: Mapping[str, Any] = run.overrides if is_group else run.settings
    if key in values:
        return _text(values[key])
    return MISSING if run.has_config else None


def _group_keys(runs: Sequence[Run]) -> set[str]:
    """Collect the groups, such as `memory`, whose file an override of some run chose.

    A configuration has no key with the name of a group, but keys below it.
    """
    config_keys: set[str] = set()
    for run in runs:
        if run.has_config:
            config_keys.update(run.settings)
    overridden = _overridden_keys(runs)
    # The loop below would not find `experiment`: its files set keys anywhere, not below its name.
    group_keys = overridden & {"experiment"}
    for key in overridden - config_keys:
        if any(config_key.startswith(f"{key}.") for config_key in config_keys):
            group_keys.add(key)
    return group_keys


def _overridden_keys(runs: Sequence[Run]) -> set[str]:
    """Collect the keys and groups that an override of some run sets."""
    keys: set[str] = set()
    for run in runs:
        keys.update(run.overrides)
    return keys


def _columns(runs: Sequence[Run], texts: Mapping[str, Sequence[str | None]]) -> list[Column]:
    """Make the columns of the differing keys, without keys that repeat another.

    Groups come first; they also stand for the keys that they set.
    """
    group_keys = _group_keys(runs)
    overridden = _overridden_keys(runs)

    def is_repeated(column_key: str, key: str) -> bool:
        """Whether the value of a key follows from a column: it is equal, or set by its group."""
        # Texts of the two keys in the runs, each pair once.
        pairs = set()
        for column_text, key_text in zip(texts[column_key], texts[key], strict=True):
            # A run that never got a configuration has no text of the key.
            if key_text is not None:
                pairs.add((column_text, key_text))
        if all(column_text == key_text for column_text, key_text in pairs):
            return True
        is_in_group = column_key in group_keys and key.startswith(f"{column_key}.")
        if not is_in_group:
            return False
        # The key follows from the file where no file occurs with two values of the key: there are
        # then as many pairs as files.
        files = {column_text for column_text, _ in pairs}
        return len(pairs) == len(files)

    def sort_key(key: str) -> tuple[bool, bool, bool]:
        # False sorts before True: groups first, then overrides; seed and fold last.
        return key in REPEAT_KEYS, key not in group_keys, key not in overridden

    # Key of each column to the keys that repeat it.
    repeated: dict[str, list[str]] = {}
    for key in sorted(texts, key=sort_key):
        covering_columns = [column_key for column_key in repeated if is_repeated(column_key, key)]
        if covering_columns:
            repeated[covering_columns[0]].append(key)
        else:
            repeated[key] = []
    columns = []
    for column_key, repeated_keys in repeated.items():
        values = [MISSING if text is None else text for text in texts[column_key]]
        columns.append(Column(column_key, tuple(values), tuple(repeated_keys)))
    return columns


def _setting(
    number: int, indices: list[int], runs: Sequence[Run], columns: Sequence[Column]
) -> Setting:
    """Collect values and metrics of the runs of a setting."""
    values = tuple(_value_in(column, indices) for column in columns)
    members = [runs[index] for index in indices]
    finished = [run for run in members if run.status == FINISHED]
    return Setting(
        number=number,
        runs=members,
        label=_label(columns, values) or members[0].name,
        values=values,
        metrics=_metrics_of(finished),
        is_complete=len(finished) == len(members),
        cases=_mean_scores(finished),
    )


def _value_in(column: Column, indices: Sequence[int]) -> str:
    """Text of a setting in a column, from the indices of its runs.

    All runs have the same text, except that runs which did not name a file of the column's group
    have `MISSING`.
    """
    for index in indices:
        if column.values[index] != MISSING:
            return column.values[index]
    return MISSING


def _metrics_of(runs: Sequence[Run]) -> dict[str, list[float]]:
    """List the values of each metric that some of the runs have, by its key."""
    values_by_key = {}
    for metric in METRICS:
        run_values = [metric.read(run) for run in runs]
        values = [value for value in run_values if value is not None]
        if values:
            values_by_key[metric.key] = values
    return values_by_key


def _mean_scores(runs: Sequence[Run]) -> dict[tuple[str, str], float]:
    """Average the Dice of each case and label over the runs that validated it."""
    dices: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        for score in run.cases:
            dices.setdefault((score.case, score.label), []).append(score.dice)
    return {key: fmean(values) for key, values in dices.items()}


def _label(columns: Sequence[Column], values: Sequence[str]) -> str:
    """Name a setting by its keys and values, such as `lr 0.1, memory lean`."""
    # `lr` for `optimizer.lr`, unless another key ends so too.
    last_parts = [column.key.rsplit(".", 1)[-1] for column in columns]
    texts = []
    for column, last_part, value in zip(columns, last_parts, values, strict=True):
        if value == MISSING:
            continue
        name = last_part if last_parts.count(last_part) == 1 else column.key
        texts.append(f"{name} {value}")
    return ", ".join(texts)


def _text(value: Any) -> str:
    """Format a value of the configuration as a user would type it.

    Example:
        >>> values = (0.1, 5e-05, True, None, [1, 2.5], "amp", {})
        >>> [_text(value) for value in values]
        ['0.1', '5e-05', 'true', 'null', '[1, 2.5]', 'amp', '{}']
    """
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:.6g}"
    return json.dumps(value, ensure_ascii=False, default=str)
