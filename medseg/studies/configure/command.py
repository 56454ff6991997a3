"""The `configure` command: chooses a setting, times it, and writes an experiment with reasons."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from hydra.core.hydra_config import HydraConfig

from medseg.config.imported import IMPORTED, VALUES_ARGUMENT
from medseg.config.overrides import PATH_KEYS, quote
from medseg.config.schema import ConfigureConfig
from medseg.console import say
from medseg.data.case_table import Case, normalise_name
from medseg.data.cases import find_cases
from medseg.errors import UserError
from medseg.io.atomic import check_writable, replace_text
from medseg.io.tables import markdown_table
from medseg.memory.device import pick_device_type
from medseg.memory.precision import has_fast_bf16
from medseg.planning.choose import MARGIN
from medseg.runs.signature import plain
from medseg.studies.command_steps import search_paths
from medseg.studies.configure.choose import (
    Prediction,
    Wishes,
    choose,
    least_steps,
    with_smaller_patch,
    with_steps,
)
from medseg.studies.configure.fingerprint import Fingerprint, read_fingerprint
from medseg.studies.configure.pilot import Pilot
from medseg.studies.configure.planner import MachinePlanner
from medseg.studies.configure.reasons import extent_text, passes_line, reasons_of, wishes_line
from medseg.studies.configure.setting import (
    Setting,
    experiment_text,
    group_choices,
    key_values,
    yaml_text,
)
from medseg.studies.configure.times import Costs, Schedule
from medseg.studies.cross_validate import check_folds
from medseg.studies.train_arguments import arguments_for_train
from medseg.task import LabelValues, Task
from medseg.task_options import make_task
from medseg.wording import counted, shell_line

# Files in the output folder.
EXPERIMENT = "experiment.yaml"
REPORT = "configure.md"
FACTS = "configure.json"
# Candidate sets of memory switches, as names of files in `conf/memory`, the fastest first.
SWITCHES = ("plain", "checkpoint")
# Candidate sets on devices that compute fast in bfloat16.
HALF_SWITCHES = ("amp", "amp_checkpoint", "lean")
# If a step takes more than this multiple of its predicted time, another setting is chosen.
MOST_SLOWNESS = 1.5


def configure(config: ConfigureConfig) -> int:
    """Write an experiment that fits the cases, the memory and the hours, with its reasons.

    Writes `experiment.yaml`, `configure.md` with the reasons, `configure.json` with the predicted
    numbers, and `fingerprint.csv`.

    Returns:
        Exit code, always 0.

    Raises:
        UserError: If memory or hours are too little; names the nearest possible value.
    """
    task = make_task(config.task)
    cases = labelled_cases(config)
    output = Path(config.output)
    check_writable(output)
    fingerprint = read_fingerprint(cases, task)
    _check_labels(fingerprint)
    fingerprint.write(output / "fingerprint.csv")
    print(f"{counted(len(cases), 'case')}: {extent_text(fingerprint)}", flush=True)
    is_gpu = pick_device_type(config.trainer.accelerator) == "cuda"
    wishes = Wishes(config.fit_gib, config.hours, config.num_folds, _switches(is_gpu=is_gpu))
    arguments = arguments_for_train(HydraConfig.get().overrides.task, ConfigureConfig)
    pilot = Pilot(
        folder=output / "pilot",
        cases=cases,
        fingerprint=fingerprint,
        task=task,
        plain_task=plain(config.task),
        label_values=config.data.label_values,
        arguments=arguments,
        timed_steps=config.timed_steps,
        is_on_processor=not is_gpu,
    )
    planner = MachinePlanner(task, fingerprint.largest, arguments, pilot.folder / "planned.yaml")
    say("configure: predicting memory and time; the first time on a machine takes minutes")
    try:
        setting = choose(fingerprint, wishes, planner)
        setting, costs = measure_setting(setting, fingerprint, wishes, planner, pilot)
        # Predicted here, for a step of one patch like `costs`: `with_steps` chooses the batch size
        # later. If the setting is new, the planner writes a file into the folder of the pilot.
        prediction = planner.predict(setting)
    finally:
        shutil.rmtree(pilot.folder, ignore_errors=True)
    schedule = Schedule(costs, config.num_folds, len(cases))
    steps = schedule.steps_within(config.hours, least_steps(setting, fingerprint))
    setting = with_steps(setting, steps)
    reasons = reasons_of(setting, fingerprint, task, wishes, costs)
    command = next_command(output, config.num_folds, arguments)
    head = [f"Written by medseg configure for {wishes_line(wishes)}.", f"Run: {command}"]
    replace_text(output / EXPERIMENT, experiment_text(setting, task, reasons, head))
    _write_facts(output, setting, schedule, wishes, prediction)
    report = report_text(setting, task, reasons, schedule, wishes, prediction)
    replace_text(output / REPORT, report)
    print(report)
    print(f"next: {command}", flush=True)
    return 0


def labelled_cases(config: ConfigureConfig) -> list[tuple[Case, LabelValues]]:
    """List the cases that a cross-validation uses, each with the label values in its file.

    Raises:
        UserError: If there are fewer patients than folds or than two, or the folds of the table do
            not suit, see `check_folds`.
    """
    # The second group of `find_cases` has synthetic scans, which are used for training only.
    (all_cases, label_values), _ = find_cases(config.data, config.task)
    test_patients = set(map(normalise_name, config.data.test_patients))
    cases = []
    for case in all_cases:
        is_test = case.split == "test" or case.patient in test_patients
        if case.labels and not is_test:
            cases.append((case, label_values))
    patients = {case.patient for case, _ in cases}
    if len(patients) < 2:
        raise UserError(
            f"data.cases={config.data.cases}: {len(patients)} patients have labels, but one part "
            "trains and another one is held out; give scans of two patients or more"
        )
    if len(patients) < config.num_folds:
        raise UserError(
            f"num_folds={config.num_folds}: only {len(patients)} patients have labels; the nearest "
            f"possible wish is num_folds={len(patients)}"
        )
    check_folds([case for case, _ in cases], config.num_folds)
    return cases


def _check_labels(fingerprint: Fingerprint) -> None:
    """Refuse a data set without a labelled voxel."""
    if not any(case.labels for case in fingerprint.cases):
        raise UserError("data.cases: no case has a voxel of any label; check data.label_values")


def _switches(*, is_gpu: bool) -> tuple[str, ...]:
    """List the sets of memory switches to choose from on this device."""
    if is_gpu or has_fast_bf16("cpu"):
        return HALF_SWITCHES
    return SWITCHES


def measure_setting(
    setting: Setting,
    fingerprint: Fingerprint,
    wishes: Wishes,
    planner: MachinePlanner,
    pilot: Pilot,
) -> tuple[Setting, Costs]:
    """Time a setting, and replace it if it is slow or takes too much memory.

    If a step is much slower than predicted (`MOST_SLOWNESS`), another setting is chosen, once. As
    long as the setting takes more memory than `wishes.fit_gib`, its patch is made smaller.

    Returns:
        The final setting, and its measured costs.

    Raises:
        UserError: If the smallest patch takes too much memory; names the measured memory.
    """
    costs = pilot.measure(setting)
    slowness = costs.step_s / planner.predict(setting).seconds
    if slowness > MOST_SLOWNESS:
        # The planner predicts times of an idle machine. Other programs may slow this machine, so
        # that it does in the user's hours what the planner predicts for fewer hours.
        hours = wishes.hours / slowness
        cheaper = choose(fingerprint, wishes._replace(hours=hours), planner)
        if cheaper != setting:
            say(f"configure: a step took {slowness:.1f} times the predicted time; choosing again")
            setting = cheaper
            costs = pilot.measure(setting)
    while costs.peak_gib > wishes.fit_gib:
        say(
            f"configure: {costs.peak_gib:.2f} GiB were measured, more than "
            f"fit_gib={wishes.fit_gib:g}; trying a smaller patch"
        )
        next_setting = with_smaller_patch(setting, fingerprint, planner)
        if next_setting is None:
            # The wish keeps the margin that predictions need.
            raise UserError(
                f"fit_gib={wishes.fit_gib:g}: the smallest patch took {costs.peak_gib:.2f} GiB; "
                f"the nearest possible wish is fit_gib={costs.peak_gib * (1 + MARGIN):.2f}"
            )
        setting = next_setting
        costs = pilot.measure(setting)
    return setting, costs


def next_command(output: Path, num_folds: int, arguments: Sequence[str]) -> str:
    """Format the command line that trains the experiment, for the user to run."""
    # Arguments that medseg added for an imported data set; it adds them to `cross_validate` too.
    added_arguments = (f"task={IMPORTED}", VALUES_ARGUMENT)
    typed_arguments = []
    for argument in arguments:
        if argument not in added_arguments:
            typed_arguments.append(_as_typed(argument))
    step = [
        "medseg",
        "cross_validate",
        *search_paths(),
        f"experiment={output / EXPERIMENT}",
        *typed_arguments,
        f"num_folds={num_folds}",
        f"output={output / 'folds'}",
    ]
    return shell_line(step)


def _as_typed(argument: str) -> str:
    """Restore an argument as the user typed it: medseg has quoted the values of path keys."""
    key, _, value = argument.partition("=")
    # The value without its first and last character, which may be quotes.
    unquoted = value[1:-1]
    if key in PATH_KEYS and value == quote(unquoted):
        return f"{key}={unquoted}"
    return argument


def _write_facts(
    output: Path, setting: Setting, schedule: Schedule, wishes: Wishes, prediction: Prediction
) -> None:
    """Write the choices, the predicted and the measured numbers as JSON."""
    facts = {
        "fit_gib": wishes.fit_gib,
        "hours": wishes.hours,
        "num_folds": wishes.num_folds,
        "setting": asdict(setting),
        "planned": prediction._asdict(),
        "costs": asdict(schedule.costs),
        "peak_gib": round(schedule.costs.peak_gib, 3),
        "parts_s": schedule.parts(setting.steps, setting.batch_size),
        "total_s": round(schedule.total_s(setting.steps, setting.batch_size), 1),
    }
    replace_text(output / FACTS, json.dumps(facts, indent=1))


def report_text(
    setting: Setting,
    task: Task,
    reasons: dict[str, str],
    schedule: Schedule,
    wishes: Wishes,
    prediction: Prediction,
) -> str:
    """Write the report in Markdown.

    The report has the choices with their reasons, the expected time of each part, and predicted
    beside measured memory and time.
    """
    choices = {**group_choices(setting, task), **key_values(setting, task)}
    rows = []
    for key, value in choices.items():
        rows.append({"key": key, "value": yaml_text(value), "reason": reasons[key]})
    times = []
    for part, seconds in schedule.parts(setting.steps, setting.batch_size).items():
        times.append({"part": part, "seconds": round(seconds)})
    total_s = schedule.total_s(setting.steps, setting.batch_size)
    times.append({"part": "total", "seconds": round(total_s)})
    costs = schedule.costs
    return (
        f"Experiment for {wishes_line(wishes)}.\n\n{markdown_table(rows)}\n{passes_line()}\n\n"
        f"Expected time, by timed steps on this machine as busy as it was:\n\n"
        f"{markdown_table(times)}\n"
        f"Memory: {prediction.peak_gib:.2f} GiB predicted, {costs.peak_gib:.2f} measured. "
        f"A patch: {prediction.seconds:.3g} s predicted, {costs.step_s:.3g} measured.\n"
    )
