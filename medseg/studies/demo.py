"""Demo: phantoms, training of both stages, prediction and scores, in minutes."""

from __future__ import annotations

import json
import time
from pathlib import Path

from medseg.config.schema import DemoConfig
from medseg.studies.steps import last_checkpoint, run_steps, train_steps


def demo(config: DemoConfig) -> int:
    """Make phantoms, train both stages, predict and score the held-out phantoms.

    Every step is a command that a user would type, and is printed. Phantoms and finished runs of an earlier start are kept.

    Raises:
        SystemExit: With the exit code of the command that failed.
    """
    folder, start_s = Path(config.output), time.perf_counter()
    data = [f"data.phantoms.folder={folder / 'phantoms'}", f"data.cache={folder / 'cache'}"]
    coarse, fine = folder / "coarse", folder / "fine"
    table, predictions, scores = folder / "phantoms" / "table.csv", folder / "predictions", folder / "scores"
    checkpoints = [f"coarse={last_checkpoint(coarse)}", f"fine={last_checkpoint(fine)}"]
    run_steps(
        [
            *train_steps(coarse, "experiment=demo_coarse", *data),
            *train_steps(fine, "experiment=demo_fine", *data),
            ["predict", f"input={table}", "split=test", f"output={predictions}", *checkpoints],
            ["evaluate", f"pred={predictions}", f"ref={table}", "split=test", f"output={scores}"],
        ]
    )
    print(
        f"\nDone in {(time.perf_counter() - start_s) / 60:.1f} minutes. To look at:"
        f"\n  {scores}/scores.png, {scores}/overlays/*.png   predictions over the held-out scans"
        f"\n  {scores}/metrics.csv, {scores}/summary.csv     Dice, NSD, HD95, volumes"
        f"\n  {coarse}/history.csv, {fine}/history.csv       losses and validation; pictures/ beside them"
    )
    for one in json.loads((scores / "summary.json").read_text(encoding="utf-8"))["statistics"]:
        if one["metric"] == "dice" and one["trust"] == "all" and one["region"] != "all":
            print(f"Mean Dice of {one['region']}: {one['mean']:.4f}")
    return 0
