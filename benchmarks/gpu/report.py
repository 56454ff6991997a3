"""Report of a part: checks with their bounds, and tables."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from medseg.io.atomic import replace_text
from medseg.io.tables import markdown_table


@dataclass(frozen=True)
class Check:
    """A measured value and its bound.

    Attributes:
        name: What was measured.
        value: The formatted value, or why there is none.
        bound: The bound as the page shows it; empty where nothing was measured.
        is_met: Whether the value keeps the bound; None where nothing was measured.
    """

    name: str
    value: str
    bound: str
    is_met: bool | None


@dataclass
class Report:
    """Results of a part.

    Attributes:
        checks: Its checks, in the order of the page.
        texts: Sentences and Markdown tables below them.
    """

    checks: list[Check] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def at_most(self, name: str, value: float, bound: float, number_format: str = ".3f") -> None:
        """Add a check of a value with an upper bound."""
        text = f"≤ {bound:{number_format}}"
        self.checks.append(Check(name, f"{value:{number_format}}", text, value <= bound))

    def at_least(self, name: str, value: float, bound: float, number_format: str = ".4f") -> None:
        """Add a check of a value with a lower bound."""
        text = f"≥ {bound:{number_format}}"
        self.checks.append(Check(name, f"{value:{number_format}}", text, value >= bound))

    def near_one(self, name: str, ratio: float, bound: float) -> None:
        """Add a check of a ratio that may differ from 1 by a bound in either direction."""
        text = f"1 ± {bound:g}"
        self.checks.append(Check(name, f"{ratio:.3f}", text, abs(ratio - 1) <= bound))

    def holds(self, name: str, is_met: bool, value: str, bound: str) -> None:
        """Add a check that the caller has judged, e.g. of a value that is not a number."""
        self.checks.append(Check(name, value, bound, is_met))

    def not_run(self, name: str, why: str) -> None:
        """Add a check that could not be made, with the reason; it does not count as passed."""
        self.checks.append(Check(name, why, "", None))

    def table(self, rows: Sequence[dict[str, Any]], formats: dict[str, str] | None = None) -> None:
        """Add a table, with the keys of its rows as headings."""
        self.texts.append(markdown_table(rows, formats=formats))

    def write(self, path: Path) -> None:
        """Write the report for the process that collects all of them."""
        replace_text(path, json.dumps(asdict(self), indent=1))


def read_report(path: Path) -> Report:
    """Read a report that `Report.write` wrote."""
    content = json.loads(path.read_text(encoding="utf-8"))
    checks = [Check(**values) for values in content["checks"]]
    return Report(checks, content["texts"])


def outcome(check: Check, is_rehearsal: bool) -> str:
    """Say how a check has ended; a rehearsal measures on a CPU, which proves nothing of a GPU."""
    if check.is_met is None:
        return "not run"
    if is_rehearsal:
        return "not judged"
    return "passed" if check.is_met else "FAILED"


def check_table(checks: Sequence[Check], is_rehearsal: bool) -> str:
    """Format checks as a Markdown table."""
    rows = []
    for check in checks:
        rows.append(
            {
                "check": check.name,
                "value": check.value,
                "bound": check.bound,
                "outcome": outcome(check, is_rehearsal),
            }
        )
    return markdown_table(rows)
