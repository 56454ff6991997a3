"""The `cross_validate` command: cross-validation by patient, and a model folder of all folds.

The command scores the held-out scans and, on request, harder scans that are made from them.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

from hydra.core.hydra_config import HydraConfig

from medseg.config.experiment_file import names_stages
from medseg.config.overrides import quote_paths, text_of
from medseg.config.schema import CrossValidateConfig
from medseg.data.case_table import Case, split_cases, write_case_table
from medseg.data.importers.formats import read_cases
from medseg.data.options import StageName
from medseg.data.reference import file_values, holds_structures
from medseg.errors import UserError
from medseg.io.atomic import check_writable
from medseg.preprocess.scale import HuScale
from medseg.runs.advice import prediction_arguments, scale_arguments
from medseg.runs.signature import plain
from medseg.studies.clean_up import CLEAN_UP_MD
from medseg.studies.command_steps import (
    Step,
    evaluate_step,
    failed_predictions,
    last_checkpoint,
    run_steps,
    train_steps,
)
from medseg.studies.fold_model import write_model
from medseg.studies.fold_tables import METRICS_FILE, Row, fold_rows, write_rows
from medseg.studies.folds import (
    WHOLE,
    Folds,
    check_folds,
    check_num_folds,
    make_folds,
    organ_values,
)
from medseg.studies.pooled import POOLED_MD, fold_costs, write_pooled
from medseg.studies.recipes import (
    check_experiments,
    coarse_arguments,
    experiments,
    note_recipe,
    recipe_of,
    stage_steps,
)
from medseg.studies.train_arguments import (
    arguments_for_train,
    key_of,
    merge_arguments,
    spacing_argument,
)
from medseg.task import LabelValues, Task
from medseg.task_options import make_task
from medseg.wording import first_few, shell_line

# Stages of the model: a single stage, or a cascade of two.
SINGLE = StageName.single.value
CASCADE = (StageName.coarse.value, StageName.fine.value)


def cross_validate(config: CrossValidateConfig) -> int:
    """Train all folds, predict and score their held-out cases, and write a model folder.

    A study that was stopped continues when it is started again. The results in its folder are
    `scores/` (of `evaluate`), `metrics.csv` with the scores of all held-out cases, `folds.csv` with
    one row per case and region, `folds.md` with the same for readers, the pooled scores of
    `medseg.studies.pooled`, and `model/`, a model folder with the networks of all folds.

    Returns:
        Exit code, always 0.

    Raises:
        UserError: If the folds, the experiments or the references cannot be used.
        SystemExit: With the exit code of the command that failed.
    """
    output = Path(config.output)
    arguments = []
    for argument in arguments_for_train(HydraConfig.get().overrides.task, CrossValidateConfig):
        # The experiment of a cascade is one of `cross_validate`, not of the trainings.
        if not names_stages(argument):
            arguments.append(argument)
        elif config.stage.name is StageName.single:
            raise UserError(
                f"{argument}: it names the experiments of two stages, but stage=single is one; "
                "leave one of them out"
            )
    check_num_folds(arguments, config.num_folds)
    is_cascade = config.stage.name is not StageName.single
    if is_cascade:
        _check_cascade(config, arguments)
    # The case tables of the folds state this scale; `predict` reads it from no checkpoint.
    hu = HuScale(config.data.hu_slope, config.data.hu_offset)
    cases = read_cases(Path(str(config.cases)), config.data.labels_column, hu=hu)
    check_folds(cases, config.num_folds)
    fine_cases = None
    if config.fine_cases is not None:
        fine_cases = read_cases(Path(config.fine_cases), config.data.labels_column, hu=hu)
        _check_fine_folds(config, cases, fine_cases)
    check_writable(output)
    task = make_task(config.task)
    label_values = file_values(config.data.label_values or {})
    _check_harder_scans(config, task, label_values, cases)
    organs = organ_values(task, label_values)
    folds = make_folds(cases, organs, task.channels[0].modality, config)
    stages = CASCADE if is_cascade else (SINGLE,)
    if is_cascade:
        trainings = _cascade_trainings(config, arguments, cases, fine_cases, folds)
    else:
        trainings = _single_trainings(config, arguments, cases, folds)
    # All folds list the commands of the shared trainings on phantoms: run equal commands once.
    run_steps(list(dict.fromkeys(map(tuple, trainings))))
    # The memory that a network pass needs is the same for the networks of all folds.
    checkpoints = _checkpoints(folds.folders[0], stages)
    needed = prediction_arguments(config, list(checkpoints.values()))
    run_steps(_prediction_steps(config, folds, stages, needed))
    predictions = output / "predictions"
    for name in failed_predictions(predictions):
        # Of an earlier start with other networks: `predict` skips what is up to date.
        (predictions / f"{name}.nii.gz").unlink(missing_ok=True)
    reference = write_case_table(output / "scored.csv", list(folds.cases.values()))
    # Label to value, as in the user's argument; `label_values` above maps value to label.
    values_by_label = config.data.label_values or {}
    run_steps([evaluate_step(output, reference, plain(config.task), values_by_label)])
    whole_rows = _write_tables(folds, output, task, label_values, is_cascade)
    # The tables of the folds state the scale of their scans; other scans come without a table.
    needed = [*scale_arguments(config), *needed]
    model = write_model(config, task, label_values, folds, whole_rows, stages, needed)
    for table in ("folds.md", POOLED_MD):
        print((output / table).read_text(encoding="utf-8"))
    print((model / CLEAN_UP_MD).read_text(encoding="utf-8"))
    # Only paths are quoted, not `<…>`: the user replaces `<…>`, and quotes would stay around it.
    quoted_arguments = shell_line([f"weights={model}", *needed])
    print(f"next: medseg predict input=<scan> output=<folder> {quoted_arguments}")
    return 0


def _write_tables(
    folds: Folds, output: Path, task: Task, label_values: LabelValues, is_cascade: bool
) -> list[Row]:
    """Write the tables of the study from the scores of `evaluate`.

    Returns:
        Rows of the whole scans, without the harder scans that are made from them.
    """
    rows = fold_rows(folds, output, task, label_values, is_cascade)
    write_rows(rows, output, folds.names_by_heading)
    shutil.copyfile(output / "scores" / METRICS_FILE, output / METRICS_FILE)
    # Harder scans are no independent observations, so only whole scans are pooled.
    whole_names = folds.names_by_heading[WHOLE]
    whole_rows = [row for row in rows if row["case"] in whole_names]
    whole_cases = {name: case for name, case in folds.cases.items() if name in whole_names}
    write_pooled(whole_rows, whole_cases, fold_costs(folds.folders), output)
    return whole_rows


def _check_cascade(config: CrossValidateConfig, arguments: Sequence[str]) -> None:
    """Refuse experiments that cannot be trained, and arguments for one stage of the cascade alone.

    Raises:
        UserError: Names the key of the experiment or argument.
    """
    for key in map(key_of, arguments):
        if key in ("experiment", "stage"):
            raise UserError(
                f"{key}: cross_validate trains both stages of a cascade, but this is the stage "
                f"{config.stage.name} alone; name an experiment of each stage by coarse= and "
                "fine=, or choose stage=single"
            )
    # The check needs the case table too, because a spacing may be chosen from the cases.
    # Composed in this process, where nobody quotes the path.
    table = text_of(str(Path(str(config.cases)).absolute()))
    check_experiments(config, [*arguments, f"data.cases={table}"])


def _check_fine_folds(
    config: CrossValidateConfig, cases: Sequence[Case], fine_cases: Sequence[Case]
) -> None:
    """Check that both stages of each fold hold out the same patients.

    Args:
        config: States the folds.
        cases: Cases of the study.
        fine_cases: Training cases of the fine stage.

    Raises:
        UserError: If a fold of one table holds out other patients than that of the other.
    """
    check_folds(fine_cases, config.num_folds)
    for fold in range(config.num_folds):
        held_out = []
        for table in (cases, fine_cases):
            split = split_cases(
                table,
                fold=fold,
                num_folds=config.num_folds,
                test_patients=config.data.test_patients,
            )
            held_out.append({case.patient for case in split.val})
        differing = sorted(held_out[0] ^ held_out[1])
        if differing:
            raise UserError(
                f"fine_cases={config.fine_cases}: its fold {fold} holds out other patients than "
                f"that of {config.cases}: {first_few(differing)} in one of them; give a table of "
                "the same patients"
            )


def _check_fine_names(
    config: CrossValidateConfig, cases: Sequence[Case], fine_cases: Sequence[Case]
) -> None:
    """Check that the table of a fine stage that sees coarse output has the cases of the study.

    Each patient gets the output of a coarse stage that has not trained on it. A checkpoint lists
    the names of the cases that it has trained on, and the table of the fine stage their patients.

    Args:
        config: Names both tables.
        cases: Cases of the study.
        fine_cases: Training cases of the fine stage.

    Raises:
        UserError: If a case is missing in the table, or is of another patient there.
    """
    trained = split_cases(
        cases,
        fold="all",
        num_folds=config.num_folds,
        test_patients=config.data.test_patients,
    ).train
    known = {(case.name, case.patient) for case in fine_cases}
    missing = [case.name for case in trained if (case.name, case.patient) not in known]
    if missing:
        raise UserError(
            f"fine_cases={config.fine_cases}: it lacks {first_few(missing)} of {config.cases}, so "
            "it does not say which coarse stages have trained on the same patient; add these cases "
            "to it, with the same patients"
        )


def _cascade_trainings(
    config: CrossValidateConfig,
    arguments: Sequence[str],
    cases: Sequence[Case],
    fine_cases: Sequence[Case] | None,
    folds: Folds,
) -> list[Step]:
    """Make the commands that train both stages of each fold, all coarse stages first.

    The recipe of each fold is written into its folder, or compared with that of an earlier start.

    A fine stage may take the probabilities of a coarse stage as input. For each training case, they
    come from the fold that has not trained on the case, so every fine stage needs all coarse ones.
    """
    output = Path(config.output)
    coarse_steps: list[Step] = []
    fine_steps: list[Step] = []
    fine_table = config.fine_cases or config.cases
    coarse_checkpoints = coarse_arguments(config, folds.folders)
    if coarse_checkpoints and fine_cases is not None:
        _check_fine_names(config, cases, fine_cases)
    # Experiment to its further arguments.
    coarse_more: dict[str, list[str]] = {}
    for experiment in config.coarse:
        chosen = [f"experiment={text_of(experiment)}", *arguments]
        coarse_more[experiment] = _common_spacing(config, config.cases, chosen, "coarse")
    fine_more: dict[str, list[str]] = {}
    for experiment in config.fine:
        chosen = [f"experiment={text_of(experiment)}", *arguments]
        spacing = _common_spacing(config, fine_table, chosen, "fine")
        fine_more[experiment] = [*coarse_checkpoints.get(experiment, []), *spacing]
    for fold, folder in enumerate(folds.folders):
        note_recipe(folder, recipe_of(experiments(config), cases, arguments, fine_cases))
        coarse_data = _fold_arguments(config, config.cases, arguments, fold)
        fine_data = _fold_arguments(config, fine_table, arguments, fold)
        coarse_steps += stage_steps(config, "coarse", folder, coarse_data, output, coarse_more)
        fine_steps += stage_steps(config, "fine", folder, fine_data, output, fine_more)
    return [*coarse_steps, *fine_steps]


def _single_trainings(
    config: CrossValidateConfig,
    arguments: Sequence[str],
    cases: Sequence[Case],
    folds: Folds,
) -> list[Step]:
    """Make the commands that train the single stage of each fold.

    The recipe of each fold is written into its folder, or compared with that of an earlier start.
    """
    output = Path(config.output)
    cache = f"data.cache={output / 'cache'}"
    spacing = _common_spacing(config, config.cases, arguments, "cross_validate")
    steps: list[Step] = []
    for fold, folder in enumerate(folds.folders):
        note_recipe(folder, recipe_of({}, cases, arguments))
        fold_arguments = _fold_arguments(config, config.cases, arguments, fold)
        steps += train_steps(folder / SINGLE, *merge_arguments([cache], fold_arguments, spacing))
    return steps


def _common_spacing(
    config: CrossValidateConfig, table: str | None, arguments: Sequence[str], where: str
) -> list[str]:
    """Make the argument for a spacing that is averaged over the cases of all folds, if it is.

    See `spacing_argument`.
    """
    all_folds = _fold_arguments(config, table, arguments, "all")
    return spacing_argument(quote_paths([*all_folds, "run_dir=none"]), where)


def _check_harder_scans(
    config: CrossValidateConfig, task: Task, label_values: LabelValues, cases: Sequence[Case]
) -> None:
    """Refuse harder scans that cannot be made: of masks or DICOM structures, or painted in MR.

    Args:
        config: Says whether partial scans are cut and disease is painted.
        task: Has the channels.
        label_values: Value, or name of a structure, in the reference files to label name.
        cases: Cases of the study.

    Raises:
        UserError: If the references are not one label map for each case, or the scans are no CT.
    """
    if config.diseased and not task.is_ct:
        raise UserError(
            "diseased=true paints in HU, but the first channel of the task is no CT; leave it out"
        )
    if not (config.pieces or config.diseased):
        return
    names = [value for value in label_values if isinstance(value, str)]
    paths = [case.labels for case in cases if case.labels and holds_structures(case.labels)]
    if names or paths:
        raise UserError(
            f"pieces=true and diseased=true cut label maps, but {[*paths, *names][0]} is no label "
            "map but masks or DICOM structures; leave the two keys out, or save one label map of "
            "each case"
        )


def _fold_arguments(
    config: CrossValidateConfig, table: str | None, arguments: Sequence[str], fold: int | str
) -> tuple[str, ...]:
    """Join the user's arguments of `train` with those that select a fold of a table, or `all`."""
    selection = [
        f"data.cases={Path(str(table)).absolute()}",
        f"data.fold={fold}",
        f"data.num_folds={config.num_folds}",
        "data.val_patients=[]",
    ]
    # The user's test patients are kept; the validation cases come from the fold alone.
    return merge_arguments(["data.test_patients=[]"], arguments, selection)


def _checkpoints(folder: Path, stages: Sequence[str]) -> dict[str, Path]:
    """Map each stage to its checkpoint in the folder of a fold."""
    return {stage: last_checkpoint(folder / stage) for stage in stages}


def _prediction_steps(
    config: CrossValidateConfig, folds: Folds, stages: Sequence[str], needed: Sequence[str]
) -> list[Step]:
    """Make the commands that predict the held-out cases of each fold.

    Args:
        config: Has the folder of the study.
        folds: The folds, whose runs have finished.
        stages: Stages of the model.
        needed: From `prediction_arguments`.
    """
    steps: list[Step] = []
    for folder, table in zip(folds.folders, folds.tables, strict=True):
        step = ["predict", f"input={table}", f"output={Path(config.output) / 'predictions'}"]
        for stage, checkpoint in _checkpoints(folder, stages).items():
            step.append(f"{stage}={checkpoint}")
        steps.append([*step, *needed])
    return steps
