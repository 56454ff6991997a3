"""The `demo` command: the way of a case through the whole house, on phantoms, in minutes."""

from __future__ import annotations

import json
import time
from pathlib import Path

from medseg.commands import entry
from medseg.config.schema import DemoConfig
from medseg.studies.steps import last_checkpoint, run_steps, train_step


def main() -> None:
    """Compose, check, run the commands one after the other."""
    entry.run("demo", DemoConfig, demo)


def demo(config: DemoConfig) -> int:
    """Make phantoms, train both stages, predict and score the held-out ones.

    Each step is the command that a user would type, and is printed. What is there already is kept: phantoms, finished runs.

    Returns:
        Exit code of the first step that failed, else 0.
    """
    folder = Path(config.output)
    start_s = time.perf_counter()
    data = [f"data.phantoms.folder={folder / 'phantoms'}", f"data.cache={folder / 'cache'}"]
    coarse, fine = folder / "coarse", folder / "fine"
    table, predictions, scores = folder / "phantoms" / "table.csv", folder / "predictions", folder / "scores"
    code = run_steps(
        [
            *train_step("demo_coarse", coarse, *data),
            *train_step("demo_fine", fine, *data),
            [
                "predict",
                f"input={table}",
                "split=test",
                f"output={predictions}",
                f"coarse={last_checkpoint(coarse)}",
                f"fine={last_checkpoint(fine)}",
            ],
            ["evaluate", f"pred={predictions}", f"ref={table}", "split=test", f"output={scores}"],
        ]
    )
    if code:
        return code
    print(
        f"\nDone in {(time.perf_counter() - start_s) / 60:.1f} minutes. To look at:"
        f"\n  {scores}/scores.png, {scores}/overlays/*.png   predictions over the held-out scans"
        f"\n  {scores}/metrics.csv, {scores}/summary.csv     Dice, NSD, HD95, volumes"
        f"\n  {coarse}/history.csv, {fine}/history.csv       losses and validation; pictures/ beside them"
    )
    for region, mean in mean_dices(scores / "summary.json").items():
        print(f"Mean Dice of {region}: {mean:.4f}")
    return 0


def mean_dices(summary: Path) -> dict[str, float]:
    """Mean Dice of each region over all scored cases, from the `summary.json` of an evaluation."""
    statistics = json.loads(summary.read_text(encoding="utf-8"))["statistics"]
    return {
        one["region"]: one["mean"]
        for one in statistics
        if one["metric"] == "dice" and one["trust"] == "all" and one["region"] != "all"
    }


if __name__ == "__main__":
    main()
