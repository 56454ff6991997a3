"""The `demo` command: makes phantoms, trains both stages on them, predicts and scores."""

import json
import time
from pathlib import Path

from medseg.config.schema import DemoConfig
from medseg.studies.command_steps import last_checkpoint, run_steps, train_steps


def demo(config: DemoConfig) -> int:
    """Make phantoms, train both stages, predict and score the held-out phantoms.

    Every step is a command that a user would type, and is printed. Phantoms and finished runs of an
    earlier start are kept.

    Raises:
        SystemExit: With the exit code of the command that failed.
    """
    start_s = time.perf_counter()
    folder = Path(config.output)
    # Phantoms are made by the first command that needs them.
    data = [f"data.phantoms.folder={folder / 'phantoms'}", f"data.cache={folder / 'cache'}"]
    coarse, fine = folder / "coarse", folder / "fine"
    table = folder / "phantoms" / "table.csv"
    predictions, scores = folder / "predictions", folder / "scores"
    checkpoints = [f"coarse={last_checkpoint(coarse)}", f"fine={last_checkpoint(fine)}"]
    run_steps(
        [
            *train_steps(coarse, "experiment=demo_coarse", *data),
            *train_steps(fine, "experiment=demo_fine", *data),
            ["predict", f"input={table}", "split=test", f"output={predictions}", *checkpoints],
            ["evaluate", f"pred={predictions}", f"ref={table}", "split=test", f"output={scores}"],
        ]
    )
    minutes = (time.perf_counter() - start_s) / 60
    print(
        f"\nDone in {minutes:.1f} minutes. To look at:"
        f"\n  {scores}/scores.png, {scores}/overlays/*.png   predictions over the held-out scans"
        f"\n  {scores}/metrics.csv, {scores}/summary.csv     Dice, NSD, HD95, volumes"
        f"\n  {coarse}/history.csv, {fine}/history.csv       "
        "losses and validation; pictures/ beside them"
    )
    summary = json.loads((scores / "summary.json").read_text(encoding="utf-8"))
    for statistic in summary["statistics"]:
        # Region `all` pools all regions, trust `all` all references. Print the Dice of each region
        # over all references.
        is_dice_of_all_cases = statistic["metric"] == "dice" and statistic["trust"] == "all"
        if is_dice_of_all_cases and statistic["region"] != "all":
            print(f"Mean Dice of {statistic['region']}: {statistic['mean']:.4f}")
    return 0
