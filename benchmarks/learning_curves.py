"""Learning curves: held-out Dice against CPU minutes of training, medseg beside nnU-Net.

    python -m benchmarks.learning_curves output=<folder> cases=<table> [task=<task>]
        nnunet=<python> [minutes=5,10,20,40] [programs=medseg,nnunet_fit,nnunet] [threads=1]
        [fit_gib=2] [num_folds=3] [trainer=nnUNetTrainer] [configuration=3d_fullres]

`nnunet` is the Python of an environment that has nnU-Net and not medseg. Programs: `medseg`, an
experiment that `medseg configure fit_gib=…` writes; `nnunet_fit`, planned with
`-gpu_memory_target <fit_gib>`; `nnunet`, planned with the planner's defaults. The last two have
nnU-Net's own trainer and augmentation. All programs see the same files, and hold out the cases that
the table marks as `val`, or else the first of `num_folds` folds by patient.

Each point is a training of its own, whose schedule ends with its CPU minutes: the number of steps,
or of epochs and iterations, follows from a few timed ones. CPU minutes are user and system time of
all processes of the training, with its start and its validations; preparation and prediction are
counted apart, timed steps not at all. Memory is resident memory of all processes of the training,
read every half second; a page that several share counts once. Each program predicts the held-out
scans by its own predictor, and `medseg evaluate` scores both: the mean Dice over labels and cases.

Writes `learning_curves.csv`, `.md` and `.png` after each point, from all points in the folder. A
command that was stopped continues when it is started again, and repeats no finished part. Two
commands with different `programs` may work in one folder at the same time, once its `data.json` is
written.
"""

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.instruments import given_arguments
from benchmarks.learning_curves_data import HELD_OUT, write_data
from benchmarks.learning_curves_runs import (
    MedsegRuns,
    NnunetRuns,
    Row,
    Study,
    finished,
    fresh,
    run_measured,
)
from medseg.config.imported import TASK_FILE
from medseg.errors import EXIT_USER_ERROR, UserError
from medseg.io.atomic import replace_text
from medseg.io.tables import markdown_table, read_csv, write_csv
from medseg.report.plots import new_figure, write_png
from medseg.studies.command_steps import MEDSEG

OURS, NNUNET_FIT, NNUNET_USUAL = "medseg", "nnunet_fit", "nnunet"
# Title and colour of each program in the plot.
PROGRAMS = {
    OURS: ("medseg", "#0369a1"),
    NNUNET_FIT: ("nnU-Net, planned for the same memory", "#c2410c"),
    NNUNET_USUAL: ("nnU-Net as its planner comes", "#15803d"),
}
# Values of the arguments that may be left out.
DEFAULTS = {
    "minutes": "5,10,20,40",
    "programs": ",".join(PROGRAMS),
    "threads": "1",
    "fit_gib": "2",
    "num_folds": "3",
    "trainer": "nnUNetTrainer",
    "configuration": "3d_fullres",
}
# Arguments that all points of a folder share.
SHARED = ("cases", "task", "threads", "fit_gib", "num_folds", "trainer", "configuration")
KEYS = (*SHARED, "nnunet", "minutes", "programs")
# Heading in the page of each key of a row; "taken" and "prediction" continue the heading before.
COLUMNS = {
    "task": "task",
    "program": "program",
    "minutes": "CPU minutes: budget",
    "cpu_minutes": "taken",
    "iterations": "iterations",
    "batch_size": "batch",
    "patch_size": "patch",
    "spacing_mm": "spacing, mm",
    "dice": "held-out Dice",
    "least_dice": "least",
    "peak_gib": "peak GiB",
    "prepare_cpu_minutes": "CPU minutes: preparation",
    "predict_cpu_minutes": "prediction",
    "predict_peak_gib": "its peak GiB",
}
FORMATS = {
    "minutes": "g",
    "cpu_minutes": ".1f",
    "dice": ".4f",
    "least_dice": ".4f",
    "peak_gib": ".2f",
    "prepare_cpu_minutes": ".1f",
    "predict_cpu_minutes": ".1f",
    "predict_peak_gib": ".2f",
}


def main() -> None:
    """Run the points that are missing, and write the tables."""
    output, typed_arguments = given_arguments(KEYS)
    arguments = {**DEFAULTS, **typed_arguments}
    # Without a handler SIGTERM would end this process at once, and leave the program that it has
    # started running: SystemExit lets `run_measured` end that program. The exit code is the one
    # that a shell reports for the signal.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        study = read_study(output, arguments)
        # The short trainings first: each one adds a point to the tables.
        for minutes in sorted(map(float, arguments["minutes"].split(","))):
            for program in arguments["programs"].split(","):
                row = add_point(study, program, minutes)
                print(f"{program}, {minutes:g} CPU minutes: Dice {row['dice']:.4f}", flush=True)
                write_tables(output)
    except UserError as error:
        print(f"learning_curves: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    print((output / "learning_curves.md").read_text(encoding="utf-8"))


def read_study(output: Path, arguments: Mapping[str, str]) -> Study:
    """Check the arguments, and write the data of a new study.

    Args:
        output: Folder of the study.
        arguments: All arguments of the command, with the defaults.

    Raises:
        UserError: If an argument is missing or wrong, or the folder has points of other arguments.
    """
    programs = arguments["programs"].split(",")
    unknown = sorted(set(programs) - set(PROGRAMS))
    if unknown:
        raise UserError(f"programs={unknown[0]}: expected some of {', '.join(PROGRAMS)}")
    if "cases" not in arguments:
        raise UserError("cases=<table> is missing: the case table of the data set")
    if "nnunet" not in arguments and programs != [OURS]:
        raise UserError("nnunet=<python> is missing: the Python of an environment with nnU-Net")
    shared = {key: arguments[key] for key in SHARED if key in arguments}
    # The first command in a folder writes its arguments there; the others must have the same.
    recorded = finished(output / "arguments.json", lambda: shared)
    if recorded != shared:
        raise UserError(
            f"{output}: its points come from {recorded}; give the same, or another folder"
        )
    train_arguments = [f"data.cases={arguments['cases']}"]
    if "task" in arguments:
        train_arguments.append(f"task={arguments['task']}")
    data = finished(
        output / "data.json",
        lambda: write_data(output / "data", train_arguments, int(arguments["num_folds"])),
    )
    return Study(
        output=output,
        task=data["task"],
        held_out=data["held_out"],
        threads=int(arguments["threads"]),
        fit_gib=float(arguments["fit_gib"]),
        # Links are not resolved: Python finds its virtual environment by the path of the link.
        nnunet=os.path.abspath(arguments.get("nnunet", "")),
        trainer=arguments["trainer"],
        configuration=arguments["configuration"],
    )


def add_point(study: Study, program: str, minutes: float) -> Row:
    """Train, predict and score one program for one budget, unless that is done.

    Args:
        study: The study.
        program: Key of `PROGRAMS`.
        minutes: CPU minutes of the training.

    Returns:
        The row of the table.
    """
    folder = study.output / program / f"{minutes:g}"
    folder.mkdir(parents=True, exist_ok=True)
    runs: MedsegRuns | NnunetRuns
    if program == OURS:
        runs = MedsegRuns(study, folder, minutes)
    else:
        gpu_memory_target = study.fit_gib if program == NNUNET_FIT else None
        runs = NnunetRuns(study, folder, minutes, gpu_memory_target)

    def make() -> Row:
        facts = runs.point()  # settings and costs
        dices = held_out_dices(study, folder)
        scores = {"dice": fmean(dices), "least_dice": min(dices)}
        return {
            "task": study.task,
            "program": program,
            "minutes": minutes,
            **facts,
            **scores,
        }

    return finished(folder / "point.json", make)


def held_out_dices(study: Study, folder: Path) -> list[float]:
    """Score the predictions of a point; returns the Dice of each label of each held-out case.

    Raises:
        RuntimeError: If a prediction is missing.
    """
    scores = fresh(folder / "scores")
    command = [
        *MEDSEG,
        "evaluate",
        f"pred={folder / 'predictions'}",
        f"ref={study.data / HELD_OUT}",
        f"task={study.data / TASK_FILE}",
        f"output={scores}",
        "pictures=false",
    ]
    run_measured(command, folder / "evaluate.log", study.environment)
    rows = read_csv(scores / "metrics.csv")
    # A label that is in neither map has no Dice.
    return [float(row["dice"]) for row in rows if row["dice"]]


def write_tables(output: Path) -> None:
    """Write the table and the curves of all points in a folder."""
    rows = []
    for program in PROGRAMS:
        # Points of other commands that work in the folder are included.
        files = (output / program).glob("*/point.json")
        points = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        rows += sorted(points, key=lambda row: row["minutes"])
    write_csv(output / "learning_curves.csv", rows, list(COLUMNS), FORMATS)
    table = markdown_table(rows, COLUMNS, FORMATS)
    replace_text(output / "learning_curves.md", table)
    draw_curves(rows, output / "learning_curves.png")


def draw_curves(rows: Sequence[Row], path: Path) -> None:
    """Draw held-out Dice and peak memory of each program against CPU minutes.

    Args:
        rows: Points of one task.
        path: PNG file to write.
    """
    figure, (dice_axes, memory_axes) = new_figure(9, 3.6, "held-out Dice", "peak memory, GiB")
    for program, (title, colour) in PROGRAMS.items():
        points = [row for row in rows if row["program"] == program]
        if not points:
            continue
        # The minutes that a training took, not its budget.
        minutes = [row["cpu_minutes"] for row in points]
        style = {"color": colour, "marker": "o", "markersize": 4, "linewidth": 1.5}
        dice_axes.plot(minutes, [row["dice"] for row in points], label=title, **style)
        memory_axes.plot(minutes, [row["peak_gib"] for row in points], **style)
    budgets = sorted({row["minutes"] for row in rows})
    for axes in (dice_axes, memory_axes):
        axes.set_xscale("log")
        axes.set_xticks(budgets, labels=[f"{minutes:g}" for minutes in budgets])
        axes.minorticks_off()
        axes.set_xlabel("CPU minutes of training")
    dice_axes.set_ylim(0, 1.02)
    memory_axes.set_ylim(bottom=0)
    dice_axes.legend(frameon=False, fontsize=8)
    write_png(figure, path)


if __name__ == "__main__":
    main()
