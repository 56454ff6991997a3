"""Comparison of runs: the keys that differ, the repeats of one setting, and the best setting."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, NamedTuple

from medseg.report.run import FINISHED, METRICS, PEAK, VAL_DICE, Run

# Runs that differ in nothing else are repeats of one setting: their standard deviation says how much a difference is worth.
REPEAT_KEYS = ("seed", "data.fold")
MISSING = "–"


class Column(NamedTuple):
    """A key whose value differs between the runs.

    Attributes:
        key: Dotted key, or the name of a configuration group (`memory`).
        values: One per run, as text.
        also: Keys with the same differences: interpolations of this one, or keys that the chosen group sets.
    """

    key: str
    values: tuple[str, ...]
    also: tuple[str, ...] = ()


class Setting(NamedTuple):
    """Runs that differ in nothing but `REPEAT_KEYS`.

    Attributes:
        number: Place in the order of first appearance, from 0; its colour.
        runs: Indices of its runs.
        label: Its values for a legend.
        values: Its text in each column but those of `REPEAT_KEYS`.
        metrics: Metric key to the values of its finished runs; metrics without a value are left out.
    """

    number: int
    runs: tuple[int, ...]
    label: str
    values: tuple[str, ...]
    metrics: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Comparison:
    """All runs side by side.

    Attributes:
        runs: In natural order of their names.
        columns: The keys that differ.
        settings: In order of first appearance.
        setting_of: Index of the setting of each run.
        ranked: Indices of the settings from the best mean validation Dice to the worst; those without a result last.
        best: Index of the best setting, the smaller peak deciding between equals; None without results.
        same: Flat configuration that all runs share.
    """

    runs: tuple[Run, ...]
    columns: tuple[Column, ...]
    settings: tuple[Setting, ...]
    setting_of: Mapping[int, int]
    ranked: Sequence[int]
    best: int | None
    same: Mapping[str, str]

    @property
    def setting_columns(self) -> list[Column]:
        """Columns in which settings differ."""
        return [column for column in self.columns if column.key not in REPEAT_KEYS]


def compare(runs: Sequence[Run]) -> Comparison:
    """Compare runs: columns, settings, ranks."""
    texts = _texts(runs)
    known = {key: {value for value in values if value is not None} for key, values in texts.items()}
    differing = [key for key in texts if len(known[key]) > 1]
    columns = _columns(runs, {key: texts[key] for key in differing})
    shown = [column for column in columns if column.key not in REPEAT_KEYS]
    # Over every differing key, shown or not: keys that a chosen group hides must not turn different runs into repeats.
    members: dict[tuple[str | None, ...], list[int]] = {}
    for index in range(len(runs)):
        members.setdefault(tuple(texts[key][index] for key in differing if key not in REPEAT_KEYS), []).append(index)
    settings = tuple(_setting(number, indices, runs, shown) for number, indices in enumerate(members.values()))

    def merit(number: int) -> tuple[float, float]:
        """Smaller is better: Dice first, then memory."""
        dices, peaks = (settings[number].metrics.get(metric.key) for metric in (VAL_DICE, PEAK))
        return -fmean(dices) if dices else float("inf"), fmean(peaks) if peaks else float("inf")

    ranked = sorted(range(len(settings)), key=merit)
    return Comparison(
        runs=tuple(runs),
        columns=tuple(columns),
        settings=settings,
        setting_of={index: setting.number for setting in settings for index in setting.runs},
        ranked=ranked,
        best=ranked[0] if ranked and VAL_DICE.key in settings[ranked[0]].metrics else None,
        same={key: values.pop() for key, values in known.items() if len(values) == 1},
    )


def csv_rows(comparison: Comparison) -> list[dict[str, Any]]:
    """Rows of `report.csv`, one per run: keys that differ, status, metrics, and mean and standard deviation of its setting."""
    rows = []
    for index, run in enumerate(comparison.runs):
        setting = comparison.settings[comparison.setting_of[index]]
        dices = setting.metrics.get(VAL_DICE.key, ())
        rows.append(
            {
                "run": run.name,
                "status": run.status,
                **{column.key: column.values[index] for column in comparison.columns},
                **{metric.key: None if (value := metric.of(run)) is None else f"{value:.6g}" for metric in METRICS},
                "setting": setting.number,
                "setting_val_dice_mean": f"{fmean(dices):.6g}" if dices else None,
                "setting_val_dice_sd": f"{stdev(dices):.6g}" if len(dices) > 1 else None,
                "setting_runs": len(dices),
                "is_best": comparison.best == setting.number,
                "checkpoint": run.summary.get("checkpoint", ""),
                "message": run.message,
            }
        )
    return rows


def _texts(runs: Sequence[Run]) -> dict[str, list[str | None]]:
    """Text of each key in each run; None where the run never got a configuration and has no override of that key.

    A key that a whole configuration lacks (the momentum of Adam) is a difference, and has the text `MISSING`.
    """
    texts: dict[str, list[str | None]] = {}
    group_keys = _group_keys(runs)
    for key in dict.fromkeys(key for run in runs for key in [*run.settings, *(k for k in run.overrides if k in group_keys)]):
        texts[key] = []
        for run in runs:
            value = run.overrides.get(key) if key in group_keys else run.settings.get(key)
            is_known = value is not None or key in run.settings
            texts[key].append(_text(value) if is_known else MISSING if run.has_config else None)
    return texts


def _group_keys(runs: Sequence[Run]) -> set[str]:
    """Overrides that chose a file of a group: no key of any configuration has that name."""
    known = {key for run in runs for key in run.settings if run.has_config}
    chosen = {key for run in runs for key in run.overrides}
    return {key for key in chosen - known if any(other.startswith(f"{key}.") for other in known)} | (chosen & {"experiment"})


def _columns(runs: Sequence[Run], texts: Mapping[str, Sequence[str | None]]) -> list[Column]:
    """Differing keys without those that repeat another: groups first, which also stand for the keys that they set."""
    group_keys = _group_keys(runs)
    overridden = {key for run in runs for key in run.overrides}

    def is_repeated(column: str, key: str) -> bool:
        """Whether a key adds nothing to a column: equal wherever it is known, or set by the group that the column names."""
        pairs = {(shown, value) for shown, value in zip(texts[column], texts[key], strict=True) if value is not None}
        is_below = column in group_keys and key.startswith(f"{column}.")
        return all(shown == value for shown, value in pairs) or (is_below and len(pairs) == len({shown for shown, _ in pairs}))

    also: dict[str, list[str]] = {}
    for key in sorted(texts, key=lambda key: (key in REPEAT_KEYS, key not in group_keys, key not in overridden)):
        twin = next((column for column in also if is_repeated(column, key)), None)
        if twin is None:
            also[key] = []
        else:
            also[twin].append(key)
    shown = {key: tuple(MISSING if text is None else text for text in texts[key]) for key in also}
    return [Column(key, shown[key], tuple(others)) for key, others in also.items()]


def _setting(number: int, indices: list[int], runs: Sequence[Run], columns: Sequence[Column]) -> Setting:
    """Collect values and metrics of the runs of a setting; its label has the last parts of the keys where these are unique."""
    values = tuple(column.values[indices[0]] for column in columns)
    names = [column.key.rsplit(".", 1)[-1] for column in columns]
    short = [name if names.count(name) == 1 else column.key for name, column in zip(names, columns, strict=True)]
    parts = [f"{name} {value}" for name, value in zip(short, values, strict=True) if value != MISSING]
    finished = [runs[index] for index in indices if runs[index].status == FINISHED]
    metrics = {metric.key: [value for run in finished if (value := metric.of(run)) is not None] for metric in METRICS}
    return Setting(
        number,
        tuple(indices),
        ", ".join(parts) or runs[indices[0]].name,
        values,
        {key: found for key, found in metrics.items() if found},
    )


def _text(value: Any) -> str:
    """Format a value of the configuration as a user would type it.

    Example:
        >>> [_text(v) for v in (0.1, 5e-05, True, None, [1, 2.5], "amp", {})]
        ['0.1', '5e-05', 'true', 'null', '[1, 2.5]', 'amp', '{}']
    """
    if isinstance(value, str):
        return value
    return f"{value:.6g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False, default=str)
