"""The `configure` command: chooses settings, times them, and writes experiments with reasons."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

from hydra.core.hydra_config import HydraConfig

from medseg.config.imported import IMPORTED, VALUES_ARGUMENT
from medseg.config.overrides import PATH_KEYS, quote
from medseg.config.schema import ConfigureConfig
from medseg.console import say
from medseg.data.case_table import Case, normalise_name
from medseg.data.cases import find_cases
from medseg.data.options import StageName
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
    with_smaller_samples,
    with_steps,
)
from medseg.studies.configure.fingerprint import Fingerprint, read_fingerprint
from medseg.studies.configure.pilot import Pilot
from medseg.studies.configure.planner import MachinePlanner
from medseg.studies.configure.reasons import extent_text, passes_line, reasons_of, wishes_line
from medseg.studies.configure.setting import (
    Setting,
    cascade_text,
    experiment_text,
    group_choices,
    key_values,
    yaml_text,
)
from medseg.studies.configure.stage_views import StageView, stage_views
from medseg.studies.configure.times import Costs, Schedule, StageCosts
from medseg.studies.folds import check_folds, check_num_folds
from medseg.studies.train_arguments import arguments_for_train
from medseg.task import LabelValues, Task
from medseg.task_options import make_task
from medseg.wording import counted, first_few, shell_line

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


class Part(NamedTuple):
    """What the files say of a stage.

    Attributes:
        setting: Its choices.
        reasons: Group or key of its experiment to the reason.
        prediction: Predicted memory and time.
        costs: Measured memory and time.
    """

    setting: Setting
    reasons: dict[str, str]
    prediction: Prediction
    costs: StageCosts


def configure(config: ConfigureConfig) -> int:
    """Write an experiment that fits the cases, the memory and the hours, with its reasons.

    Writes `experiment.yaml`, `configure.md` with the reasons, `configure.json` with the predicted
    numbers, and `fingerprint.csv`; for two stages also `coarse.yaml` and `fine.yaml`.

    Returns:
        Exit code, always 0.

    Raises:
        UserError: If memory or hours are too little; names the nearest possible value.
    """
    arguments = arguments_for_train(HydraConfig.get().overrides.task, ConfigureConfig)
    check_num_folds(arguments, config.num_folds)
    task = make_task(config.task)
    cases = labelled_cases(config)
    output = Path(config.output)
    check_writable(output)
    fingerprint = read_fingerprint(cases, task)
    _check_labels(fingerprint)
    fingerprint.write(output / "fingerprint.csv")
    print(f"{counted(len(cases), 'case')}: {extent_text(fingerprint)}", flush=True)
    is_gpu = pick_device_type(config.trainer.accelerator) == "cuda"
    wishes = Wishes(
        config.fit_gib,
        config.hours,
        config.num_folds,
        _switches(is_gpu=is_gpu),
        config.num_stages,
    )
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
    views = stage_views(fingerprint)
    largest_mm = {stage: view.largest_mm for stage, view in views.items()}
    planner = MachinePlanner(task, largest_mm, arguments, pilot.folder / "planned.yaml")
    say("configure: predicting memory and time; the first time on a machine takes minutes")
    try:
        settings, schedule = _fitting_settings(fingerprint, views, wishes, planner, pilot)
        # Predicted for a step of one patch, like the measured costs. If a setting is new, the
        # planner writes a file into the folder of the pilot.
        predictions = []
        for setting in settings:
            predictions.append(planner.predict(replace(setting, batch_size=1, steps=1)))
    finally:
        shutil.rmtree(pilot.folder, ignore_errors=True)
    command = next_command(output, config.num_folds, arguments)
    head = [f"Written by medseg configure for {wishes_line(wishes)}.", f"Run: {command}"]
    parts = []
    all_costs = schedule.costs.stages
    for setting, prediction, stage_costs in zip(settings, predictions, all_costs, strict=True):
        view = views[setting.stage]
        reasons = reasons_of(setting, view, task, wishes, stage_costs)
        parts.append(Part(setting, reasons, prediction, stage_costs))
    _write_experiments(output, parts, task, head)
    _write_facts(output, parts, schedule, wishes)
    report = report_text(parts, task, schedule, wishes)
    replace_text(output / REPORT, report)
    print(report)
    print(f"next: {command}", flush=True)
    return 0


def labelled_cases(config: ConfigureConfig) -> list[tuple[Case, LabelValues]]:
    """List the cases that a cross-validation uses, each with the label values in its file.

    Raises:
        UserError: If a case has no labels, there are fewer patients than folds or than two, or the
            folds of the table do not suit, see `check_folds`.
    """
    # The second group of `find_cases` has synthetic scans, which are used for training only.
    (all_cases, label_values), _ = find_cases(config.data, config.task)
    test_patients = set(map(normalise_name, config.data.test_patients))
    # A row without a mark has the split of the other rows of its patient.
    test_patients |= {case.patient for case in all_cases if case.split == "test"}
    cases = []
    unlabelled = []
    for case in all_cases:
        is_test = case.patient in test_patients
        is_in_no_fold = bool(case.fold_sides) and not any(case.fold_sides)
        if is_test or is_in_no_fold:
            continue
        if case.labels is None:
            unlabelled.append(case.name)
        else:
            cases.append((case, label_values))
    if unlabelled:
        raise UserError(
            f"{first_few(unlabelled)}: no label map, which training and scoring need; fill in the "
            "cell of the case table, or write 'test' into the column split"
        )
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


def _fitting_settings(
    fingerprint: Fingerprint,
    views: Mapping[StageName, StageView],
    wishes: Wishes,
    planner: MachinePlanner,
    pilot: Pilot,
) -> tuple[tuple[Setting, ...], Schedule]:
    """Choose and time settings, and count the steps for which there is time.

    Where the time is too short for the two trainings of a cascade, a single stage is chosen, unless
    two stages are wished.

    Returns:
        The settings, and the schedule of their cross-validation.

    Raises:
        UserError: If memory or hours are too little; names the nearest possible value.
    """
    settings = choose(fingerprint, wishes, planner)
    settings, costs = measure_settings(settings, fingerprint, views, wishes, planner, pilot)
    schedule = Schedule(costs, wishes.num_folds, len(pilot.cases))
    shares = [views[setting.stage].time_share for setting in settings]
    fewest_steps = [least_steps(setting, views[setting.stage]) for setting in settings]
    try:
        steps = schedule.steps_within(wishes.hours, shares, fewest_steps)
    except UserError:
        if len(settings) == 1 or wishes.num_stages == 2:
            raise
        say("configure: the time is too short for two trainings of each fold; choosing one stage")
        one_stage = wishes._replace(num_stages=1)
        return _fitting_settings(fingerprint, views, one_stage, planner, pilot)
    return tuple(map(with_steps, settings, steps)), schedule


def measure_settings(
    settings: tuple[Setting, ...],
    fingerprint: Fingerprint,
    views: Mapping[StageName, StageView],
    wishes: Wishes,
    planner: MachinePlanner,
    pilot: Pilot,
) -> tuple[tuple[Setting, ...], Costs]:
    """Time the settings of all stages, and replace those that are slow or take too much memory.

    If a step is much slower than predicted (`MOST_SLOWNESS`), all is chosen again, once. As long as
    more memory is taken than `wishes.fit_gib`, the samples of the stage that takes most are made
    smaller.

    Returns:
        The final settings, and their measured costs.

    Raises:
        UserError: If the smallest samples take too much memory; names the measured memory.
    """
    costs = pilot.measure(settings)
    slowness = max(
        stage.step_s / planner.predict(setting).seconds
        for setting, stage in zip(settings, costs.stages, strict=True)
    )
    if slowness > MOST_SLOWNESS:
        # The planner predicts times of an idle machine. Other programs may slow this machine, so
        # that it does in the user's hours what the planner predicts for fewer hours.
        hours = wishes.hours / slowness
        try:
            cheaper = choose(fingerprint, wishes._replace(hours=hours), planner)
        except UserError:
            # A wished cascade has no cheaper setting.
            cheaper = settings
        if cheaper != settings:
            say(f"configure: a step took {slowness:.1f} times the predicted time; choosing again")
            settings = cheaper
            costs = pilot.measure(settings)
    while costs.peak_gib > wishes.fit_gib:
        say(
            f"configure: {costs.peak_gib:.2f} GiB were measured, more than "
            f"fit_gib={wishes.fit_gib:g}; trying smaller samples"
        )
        # A prediction holds the tiles of the last stage, which are as large as its patches.
        peaks_gib = [stage.peak_gib for stage in costs.stages]
        peaks_gib[-1] = max(peaks_gib[-1], costs.predict_peak_gib)
        index = peaks_gib.index(max(peaks_gib))
        setting = settings[index]
        smaller = with_smaller_samples(setting, views[setting.stage], wishes, planner)
        if smaller is None:
            # The wish keeps the margin that predictions need.
            raise UserError(
                f"fit_gib={wishes.fit_gib:g}: the smallest samples took {costs.peak_gib:.2f} GiB; "
                f"the nearest possible wish is fit_gib={costs.peak_gib * (1 + MARGIN):.2f}"
            )
        settings = (*settings[:index], smaller, *settings[index + 1 :])
        costs = pilot.measure(settings)
    return settings, costs


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


def _write_experiments(
    output: Path, parts: Sequence[Part], task: Task, head: Sequence[str]
) -> None:
    """Write the experiment of a single stage; or those of both stages, and one that names them.

    Args:
        output: Folder of the files.
        parts: The stages.
        task: Labels and channels.
        head: Lines of the comment at the top of `experiment.yaml`.
    """
    if len(parts) == 1:
        (part,) = parts
        text = experiment_text(part.setting, task, part.reasons, head)
        replace_text(output / EXPERIMENT, text)
        # An earlier command may have chosen two stages. Other files of these names are the user's.
        for stage in (StageName.coarse, StageName.fine):
            path = _stage_file(output, stage)
            if path.is_file() and _stage_head(stage).encode() in path.read_bytes():
                path.unlink()
        return
    files = {}
    for part in parts:
        stage = part.setting.stage
        files[stage] = _stage_file(output, stage).name
        text = experiment_text(part.setting, task, part.reasons, [_stage_head(stage)])
        replace_text(output / files[stage], text)
    replace_text(output / EXPERIMENT, cascade_text(files, head))


def _stage_file(output: Path, stage: StageName) -> Path:
    """Return the path of the experiment of one stage of a cascade."""
    return output / f"{stage.value}.yaml"


def _stage_head(stage: StageName) -> str:
    """Write the comment at the top of the experiment of one stage of a cascade."""
    return f"The {stage.value} stage of {EXPERIMENT}."


def _write_facts(output: Path, parts: Sequence[Part], schedule: Schedule, wishes: Wishes) -> None:
    """Write the choices, the predicted and the measured numbers as JSON."""
    num_patches = [part.setting.num_patches for part in parts]
    facts = {
        "fit_gib": wishes.fit_gib,
        "hours": wishes.hours,
        "num_folds": wishes.num_folds,
        "settings": [asdict(part.setting) for part in parts],
        "planned": [part.prediction._asdict() for part in parts],
        "costs": asdict(schedule.costs),
        "peak_gib": round(schedule.costs.peak_gib, 3),
        "parts_s": schedule.parts(num_patches),
        "total_s": round(schedule.total_s(num_patches), 1),
    }
    replace_text(output / FACTS, json.dumps(facts, indent=1))


def report_text(parts: Sequence[Part], task: Task, schedule: Schedule, wishes: Wishes) -> str:
    """Write the report in Markdown.

    The report has the choices with their reasons, the expected time of each part, and predicted
    beside measured memory and time.
    """
    sections = [f"Experiment for {wishes_line(wishes)}.\n"]
    for part in parts:
        setting = part.setting
        choices = {**group_choices(setting, task), **key_values(setting, task)}
        rows = []
        for key, value in choices.items():
            rows.append({"key": key, "value": yaml_text(value), "reason": part.reasons[key]})
        sections.append(f"{markdown_table(rows)}")
    num_patches = [part.setting.num_patches for part in parts]
    times = []
    for name, seconds in schedule.parts(num_patches).items():
        times.append({"part": name, "seconds": round(seconds)})
    times.append({"part": "total", "seconds": round(schedule.total_s(num_patches))})
    sections += [
        passes_line() + "\n",
        "Expected time, by timed steps on this machine as busy as it was:\n",
        markdown_table(times),
    ]
    for part in parts:
        sections.append(
            f"Memory of the stage {part.setting.stage.value}: {part.prediction.peak_gib:.2f} GiB "
            f"predicted, {part.costs.peak_gib:.2f} measured. A patch: "
            f"{part.prediction.seconds:.3g} s predicted, {part.costs.step_s:.3g} measured.\n"
        )
    predict_peak_gib = schedule.costs.predict_peak_gib
    if predict_peak_gib:
        sections.append(f"Memory of a prediction: {predict_peak_gib:.2f} GiB measured.")
    return "\n".join(sections) + "\n"
