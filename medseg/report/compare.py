"""What differed between runs, which of them are repeats, and which setting is best."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from medseg.report.run import FINISHED, METRICS, PEAK, VAL_DICE, Metric, Run

# Runs that differ in nothing else are repeats of one setting: their spread says how much a difference is worth.
REPEAT_KEYS = ("seed", "data.fold")
MISSING = "–"


@dataclass(frozen=True)
class Column:
    """A key whose value differs between the runs.

    Attributes:
        key: Dotted key, or the name of a group that was chosen among (`memory`).
        values: One per run, as text.
        also: Keys that say the same in every run: interpolations of this one, or what the chosen group brought.
    """

    key: str
    values: tuple[str, ...]
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class Spread:
    """A metric over the repeats of a setting; `sd` is None for a single one."""

    mean: float
    sd: float | None
    count: int


@dataclass(frozen=True)
class Setting:
    """Runs that differ in nothing but `REPEAT_KEYS`.

    Attributes:
        number: Place in the order of first appearance, from 0; its colour.
        runs: Indices of its runs.
        label: What tells it from the others, for a legend.
        values: Its text in each column that is no repeat.
        metrics: Metric key to the spread over its finished runs; metrics that none of them has are left out.
    """

    number: int
    runs: tuple[int, ...]
    label: str
    values: tuple[str, ...]
    metrics: Mapping[str, Spread]


@dataclass(frozen=True)
class Comparison:
    """All runs side by side.

    Attributes:
        runs: In natural order of their names.
        columns: What differed.
        settings: In order of first appearance.
        setting_of: Index of the setting of each run.
        best: Index of the setting with the highest mean validation Dice, the smaller peak deciding between equals; None without results.
        same: Flat configuration that all runs share.
    """

    runs: tuple[Run, ...]
    columns: tuple[Column, ...]
    settings: tuple[Setting, ...]
    setting_of: tuple[int, ...]
    best: int | None
    same: Mapping[str, str]

    @property
    def setting_columns(self) -> list[Column]:
        """Columns that tell settings apart."""
        return [column for column in self.columns if column.key not in REPEAT_KEYS]


def compare(runs: Sequence[Run]) -> Comparison:
    """Put runs side by side."""
    texts = _texts(runs)
    differing = [key for key, values in texts.items() if len({value for value in values if value is not None}) > 1]
    columns = _columns(runs, {key: texts[key] for key in differing})
    # Over every differing key, shown or not: what a chosen group hides must not make repeats of different runs.
    keys = [key for key in differing if key not in REPEAT_KEYS]
    members: dict[tuple[str | None, ...], list[int]] = {}
    for index in range(len(runs)):
        members.setdefault(tuple(texts[key][index] for key in keys), []).append(index)
    shown = [column for column in columns if column.key not in REPEAT_KEYS]
    settings = tuple(_setting(number, indices, runs, shown) for number, indices in enumerate(members.values()))
    setting_of = {index: setting.number for setting in settings for index in setting.runs}
    return Comparison(
        runs=tuple(runs),
        columns=tuple(columns),
        settings=settings,
        setting_of=tuple(setting_of[index] for index in range(len(runs))),
        best=_best(settings),
        same={key: known.pop() for key, values in texts.items() if len(known := {v for v in values if v is not None}) == 1},
    )


def csv_table(comparison: Comparison) -> str:
    """One line per run: what differed, what became of it, the metrics and the spread of its setting."""
    rows = []
    for index, run in enumerate(comparison.runs):
        setting = comparison.settings[comparison.setting_of[index]]
        dice = setting.metrics.get(VAL_DICE.key)
        rows.append(
            {
                "run": run.name,
                "status": run.status,
                **{column.key: column.values[index] for column in comparison.columns},
                **{metric.key: None if (value := metric.of(run)) is None else f"{value:.6g}" for metric in METRICS},
                "setting": setting.number,
                "setting_val_dice_mean": f"{dice.mean:.6g}" if dice else None,
                "setting_val_dice_sd": f"{dice.sd:.6g}" if dice and dice.sd is not None else None,
                "setting_runs": dice.count if dice else 0,
                "is_best": comparison.best == setting.number,
                "checkpoint": run.summary.get("checkpoint", ""),
                "message": run.message,
            }
        )
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else ["run"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _texts(runs: Sequence[Run]) -> dict[str, list[str | None]]:
    """Each key with its text in each run; None where the run never got a configuration and was not asked for that key.

    A key that a whole configuration lacks (the momentum of Adam) is a difference, and written as such.
    """
    texts: dict[str, list[str | None]] = {}
    group_keys = _group_keys(runs)
    for key in dict.fromkeys(key for run in runs for key in [*run.settings, *(k for k in run.overrides if k in group_keys)]):
        values: list[str | None] = []
        for run in runs:
            value = run.overrides.get(key) if key in group_keys else run.settings.get(key)
            values.append(_text(value) if value is not None or key in run.settings else MISSING if run.has_config else None)
        texts[key] = values
    return texts


def _group_keys(runs: Sequence[Run]) -> set[str]:
    """Overrides that chose a file of a group: no key of any configuration is called so."""
    known = {key for run in runs for key in run.settings if run.has_config}
    chosen = {key for run in runs for key in run.overrides}
    return {key for key in chosen if key not in known and any(other.startswith(f"{key}.") for other in known)} | (
        chosen & {"experiment"}
    )


def _columns(runs: Sequence[Run], texts: Mapping[str, Sequence[str | None]]) -> list[Column]:
    """Differing keys without those that repeat another: groups first, which also stand for the keys that they brought."""
    group_keys = _group_keys(runs)
    asked_for = {key for run in runs for key in run.overrides}
    order = sorted(texts, key=lambda key: (key in REPEAT_KEYS, key not in group_keys, key not in asked_for))
    also: dict[str, list[str]] = {}
    for key in order:
        twin = next((k for k in also if _says_the_same(texts[k], texts[key], k in group_keys and key.startswith(f"{k}."))), None)
        if twin is None:
            also[key] = []
        else:
            also[twin].append(key)
    return [
        Column(key, tuple(MISSING if value is None else value for value in texts[key]), tuple(others))
        for key, others in also.items()
    ]  # fmt: skip


def _says_the_same(column: Sequence[str | None], values: Sequence[str | None], is_below: bool) -> bool:
    """Whether values add nothing to a column: equal wherever they are known, or brought by the group that the column names."""
    known = {(shown, value) for shown, value in zip(column, values, strict=True) if value is not None}
    return all(shown == value for shown, value in known) or (is_below and len(known) == len({shown for shown, _ in known}))


def _setting(number: int, indices: list[int], runs: Sequence[Run], columns: Sequence[Column]) -> Setting:
    values = tuple(column.values[indices[0]] for column in columns)
    parts = [f"{_short(column.key, columns)} {value}" for column, value in zip(columns, values, strict=True) if value != MISSING]
    finished = [runs[index] for index in indices if runs[index].status == FINISHED]
    spreads = {metric.key: _spread(metric, finished) for metric in METRICS}
    return Setting(
        number=number,
        runs=tuple(indices),
        label=", ".join(parts) or runs[indices[0]].name,
        values=values,
        metrics={key: spread for key, spread in spreads.items() if spread is not None},
    )


def _short(key: str, columns: Sequence[Column]) -> str:
    """The last part of a key, where no other column ends so."""
    name = key.rsplit(".", 1)[-1]
    return name if sum(column.key.rsplit(".", 1)[-1] == name for column in columns) == 1 else key


def _spread(metric: Metric, runs: Sequence[Run]) -> Spread | None:
    values = [value for value in map(metric.of, runs) if value is not None]
    if not values:
        return None
    return Spread(fmean(values), stdev(values) if len(values) > 1 else None, len(values))


def _best(settings: Sequence[Setting]) -> int | None:
    scored = [setting for setting in settings if VAL_DICE.key in setting.metrics]

    def rank(setting: Setting) -> tuple[float, float]:
        peak = setting.metrics.get(PEAK.key)
        return setting.metrics[VAL_DICE.key].mean, -peak.mean if peak else float("-inf")

    return max(scored, key=rank).number if scored else None


def _text(value: Any) -> str:
    """A value of the configuration as a user would type it.

    Example:
        >>> [_text(v) for v in (0.1, 5e-05, True, None, [1, 2.5], "amp", {})]
        ['0.1', '5e-05', 'true', 'null', '[1, 2.5]', 'amp', '{}']
    """
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:.6g}"
    return json.dumps(value, ensure_ascii=False, default=str)
