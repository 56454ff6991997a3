"""The `make_weights` command: trains a cascade on every case and writes a model folder."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from medseg.cascade.bound import DiceBound, calibrate
from medseg.config.overrides import text_of
from medseg.config.schema import MakeWeightsConfig, RecipeConfig
from medseg.data.case_table import Case
from medseg.data.importers.formats import read_cases
from medseg.errors import UserError
from medseg.io.atomic import check_writable
from medseg.io.tables import read_csv
from medseg.runs.advice import budget_argument
from medseg.studies.command_steps import evaluate_step, last_checkpoint, run_steps
from medseg.studies.fold_bound import BOUND, LEVEL, Scores, formula_text
from medseg.studies.fold_tables import METRICS_FILE
from medseg.studies.recipes import (
    check_experiments,
    check_same_recipe,
    coarse_arguments,
    experiments,
    needs_coarse_stage,
    note_recipe,
    recipe_of,
    stage_steps,
    without_folders,
)
from medseg.weights.files import read_weights
from medseg.weights.model_folder import StageWeights, write_model_folder
from medseg.wording import shell_line

STAGES = ("coarse", "fine")
# Trust of the references that may calibrate the bound; the empty text means that the table states
# no trust. `partial` is excluded: such a reference lacks an unknown part of the region.
CALIBRATING_TRUST = ("", "reference", "approximate")


def make_weights(config: MakeWeightsConfig) -> int:
    """Train both stages on every case of the table, and write their weights.

    Writes a model folder, see `medseg.weights.model_folder`. The bound on Dice is calibrated on the
    cases of `held_out`; without this key, it is read from a `cross_validate` in the folder `runs`.

    Returns:
        Exit code, always 0.

    Raises:
        UserError: If an experiment or a table cannot be used.
        SystemExit: With the exit code of a training that failed.
    """
    runs, output = Path(config.runs), Path(config.output)
    check_experiments(config)
    # Read all tables before the training: a damaged table, or a held-out patient in a training
    # table, is refused here.
    cases = read_cases(Path(config.cases))
    fine_cases = None
    if config.fine_cases is not None:
        fine_cases = read_cases(Path(config.fine_cases))
    held_out = _read_held_out(config, [*cases, *(fine_cases or [])])
    check_writable(output)
    bound = None
    if not held_out:
        bound = read_bound(runs / BOUND, config)
    recipe = recipe_of(experiments(config), cases, fine_cases=fine_cases)
    note_recipe(runs / "all", recipe)
    run_steps(_training_steps(config))
    checkpoints = [last_checkpoint(runs / "all" / stage) for stage in STAGES]
    budget = budget_argument(checkpoints, trusted=[])
    if held_out:
        bound = _calibrated_bound(config, held_out, budget)
    _write_weights(runs, output, bound, budget)
    for path in sorted(output.glob("*.safetensors")):
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
    # Only paths are quoted, not `<scan>`: the user replaces `<scan>`, and quotes would stay.
    quoted_arguments = shell_line([f"weights={output}", *budget])
    print(f"medseg predict -i <scan> -o labels.nii.gz {quoted_arguments}")
    return 0


def _read_held_out(config: MakeWeightsConfig, cases: Sequence[Case]) -> list[Case]:
    """Read the cases that calibrate the bound; empty without the key `held_out`.

    Args:
        config: Has the path of the table.
        cases: Training cases of both stages.

    Raises:
        UserError: If the networks train on one of the held-out patients.
    """
    if config.held_out is None:
        return []
    held_out = read_cases(Path(config.held_out))
    trained_patients = {case.patient for case in cases}
    shared_patients = sorted({case.patient for case in held_out} & trained_patients)
    if shared_patients:
        raise UserError(
            f"held_out={config.held_out}: the networks train on its patients "
            f"{', '.join(shared_patients)}; remove them from one of the tables"
        )
    return held_out


def _training_steps(config: MakeWeightsConfig) -> list[Sequence[str]]:
    """Make the commands that train both stages."""
    runs = Path(config.runs)
    folder = runs / "all"
    coarse_data = _all_cases_arguments(config.cases)
    fine_data = _all_cases_arguments(config.fine_cases or config.cases)
    coarse_steps = stage_steps(config, "coarse", folder, coarse_data, runs)
    fine_steps = stage_steps(
        config, "fine", folder, fine_data, runs, _coarse_stage_arguments(config)
    )
    return [*coarse_steps, *fine_steps]


def _all_cases_arguments(table: str) -> list[str]:
    """List the arguments that train on every case of a table."""
    return [
        f"data.cases={Path(table).absolute()}",
        "data.fold=all",
        "data.val_patients=[]",
        "data.test_patients=[]",
    ]


def _coarse_stage_arguments(config: MakeWeightsConfig) -> dict[str, list[str]]:
    """Make the arguments with coarse checkpoints, for fine experiments that take coarse output.

    If `cross_validate` ran in the same folder, these are the checkpoints of its folds: each case
    then gets a coarse stage that has not trained on the case. Otherwise it is the checkpoint of the
    coarse stage that is trained on all cases.

    Returns:
        Fine experiment to its further arguments; other experiments are left out.
    """
    runs = Path(config.runs)
    folds = sorted(folder for folder in runs.glob("fold_*") if (folder / "coarse").is_dir())
    if folds:
        check_same_recipe(folds)
        return coarse_arguments(config, folds)
    checkpoint = text_of(str(last_checkpoint(runs / "all" / "coarse")))
    arguments = {}
    for experiment in config.fine:
        if needs_coarse_stage(experiment, "fine"):
            arguments[experiment] = [f"stage.coarse={checkpoint}"]
    return arguments


def _write_weights(
    runs: Path, output: Path, bound: Mapping[str, Any] | None, budget: Sequence[str]
) -> None:
    """Write the trained networks of both stages as a model folder.

    Args:
        runs: Folder of the runs.
        output: The model folder.
        bound: Bound on Dice, for the metadata; None = no bound.
        budget: Argument of `predict` for the memory of a pass; empty if the default is enough.
    """
    networks: list[StageWeights] = []
    for stage in STAGES:
        metadata, weights = read_weights(
            last_checkpoint(runs / "all" / stage), stage=stage, key=stage
        )
        metadata["dice_bound"] = bound
        weights = {name: _in_half(tensor) for name, tensor in weights.items()}
        networks.append(StageWeights(without_folders(metadata), weights))
    write_model_folder(output, networks, arguments=budget)


def _in_half(tensor: Tensor) -> Tensor:
    """Round weights to float16, for files of half the size.

    A network that computes in bfloat16 rounds its weights more coarsely itself, except weights
    below 2⁻¹⁷, where float16 is the coarser format. A tensor is not rounded if it holds integers or
    a number too large for float16.
    """
    half = tensor.half()
    if tensor.is_floating_point() and bool(half.isfinite().all()):
        return half
    return tensor


def _calibrated_bound(
    config: MakeWeightsConfig, held_out: Sequence[Case], budget: Sequence[str]
) -> dict[str, Any] | None:
    """Segment and score the held-out cases, and calibrate the bound on Dice with their scores.

    Args:
        config: Has the folder of the runs, and the path of the table of held-out cases.
        held_out: Cases of this table.
        budget: Argument of `predict` for the memory of a pass; empty if the default is enough.

    Returns:
        The bound as a dictionary; None if there are too few patients.
    """
    folder = Path(config.runs) / "held_out"
    # Predict with the weights that users get, which are rounded; the bound is not known yet.
    weights = folder / "weights"
    shutil.rmtree(weights, ignore_errors=True)
    weights.mkdir(parents=True)
    _write_weights(Path(config.runs), weights, bound=None, budget=budget)
    table = Path(str(config.held_out)).absolute()
    predictions, scores = folder / "predictions", folder / "scores"
    # `evaluate` reads no checkpoint, and would score the labels of its default task.
    checkpoint = last_checkpoint(Path(config.runs) / "all" / "fine")
    metadata, _ = read_weights(checkpoint, stage="fine", key="fine")
    train_config = metadata["config"]
    label_values = train_config["data"]["label_values"] or {}
    run_steps(
        [
            [
                "predict",
                f"input={table}",
                f"output={predictions}",
                f"weights={text_of(str(weights))}",
                *budget,
            ],
            evaluate_step(folder, table, train_config["task"], label_values),
        ]
    )
    patient_of = {case.name: case.patient for case in held_out}
    # Patient to pairs (agreement of the two stages, Dice), one for each region of each scan.
    scores_of_patient: Scores = {}
    for row in read_csv(scores / METRICS_FILE):
        if row["trust"] not in CALIBRATING_TRUST:
            continue
        report = json.loads((predictions / f"{row['case']}.json").read_text(encoding="utf-8"))
        # Without a box the coarse stage found no region. Agreement on an absent region says
        # nothing about the Dice of regions that are found.
        if row["region"] not in report["boxes"]:
            continue
        agreement = report["agreements"][row["region"]]
        patient_scores = scores_of_patient.setdefault(patient_of[row["case"]], [])
        patient_scores.append((agreement, float(row["dice"])))
    bound = calibrate(scores_of_patient, LEVEL)
    if bound is None:
        print(f"{len(scores_of_patient)} held-out patients are too few for a bound on Dice")
        return None
    print(f"{formula_text(bound)}, from {bound.num_patients} held-out patients")
    return asdict(bound)


def read_bound(path: Path, config: RecipeConfig) -> dict[str, Any] | None:
    """Read the bound on Dice that `cross_validate` wrote.

    Args:
        path: File of the bound.
        config: Has the experiments of these weights.

    Returns:
        The bound; None if there is no file, or if the bound was calibrated with other experiments.

    Raises:
        UserError: If the file is damaged.
    """
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        bound = asdict(DiceBound(**content["bound"]))
        experiments_of_bound = content["experiments"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}: not a bound of cross_validate ({error!r}); "
            "start cross_validate again, or remove the file"
        ) from error
    if experiments_of_bound != experiments(config):
        print(
            f"{path}: this bound was calibrated with other experiments, "
            "so the weights get no bound on Dice"
        )
        return None
    return bound
