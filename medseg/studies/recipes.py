"""Recipes of cascades: the chain of experiments that trains each stage, as resumable commands.

A stage has one experiment or several, of which each starts from the weights of the one before. A
training on phantoms may come first.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from medseg.config.experiment_file import SUFFIX as FILE_SUFFIX
from medseg.config.overrides import text_of
from medseg.config.schema import RecipeConfig
from medseg.data.case_table import Case
from medseg.errors import UserError
from medseg.io.atomic import replace_text
from medseg.io.text import read_json
from medseg.studies.command_steps import Step, last_checkpoint, train_steps
from medseg.studies.train_arguments import compose_train, compose_unchecked, folder_name
from medseg.weights.files import shipped_weights
from medseg.weights.included import INCLUDED_TASK

# File beside the runs of a fold with their recipe: the experiments and arguments of `recipe_of`.
RECIPE_FILE = "experiments.json"
# Hexadecimal digits that are kept of a SHA-256.
DIGEST_LENGTH = 12
# Keys of the configuration that hold folders of the training machine.
FOLDER_KEYS = (
    "run_dir",
    "resume",
    "init_from",
    "data.cases",
    "data.cache",
    "data.phantoms.folder",
    "stage.coarse",
    "stage.coarse_folds",
    "logger.save_dir",
)


def experiments(config: RecipeConfig) -> dict[str, list[str] | str | None]:
    """Map each key that names experiments to its value.

    The keys of the stages, `coarse` and `fine`, have a list; those of the trainings on phantoms,
    `pretrain_…`, have one name or None.
    """
    keys = ("coarse", "fine", "pretrain_coarse", "pretrain_fine")
    return {key: getattr(config, key) for key in keys}


def check_experiments(config: RecipeConfig, extra_arguments: Sequence[str] = ()) -> None:
    """Refuse an experiment that `train` would refuse, before hours of training.

    Args:
        config: Names the experiments.
        extra_arguments: Further arguments of the trainings that are not on phantoms.

    Raises:
        UserError: With the key that names the experiment.
    """
    for key, names in experiments(config).items():
        if names is None:
            continue
        chain = [names] if isinstance(names, str) else names
        for name in chain:
            # Nothing is written. Any folder will do: the default is Hydra's output folder, which
            # only a running command has.
            arguments = [f"experiment={text_of(name)}", "run_dir=none"]
            if not key.startswith("pretrain"):
                arguments += extra_arguments
            # `stage_steps` gives no coarse stage to trainings on phantoms, which all folds share:
            # `compose_train` refuses a `pretrain_fine` that needs one.
            if key == "fine" and needs_coarse_stage(name, key):
                # The real checkpoint is still to be trained; any existing file passes the check.
                stand_in = shipped_weights(INCLUDED_TASK, "coarse")
                arguments.append(f"stage.coarse={text_of(str(stand_in))}")
            compose_train(arguments, key)


def needs_coarse_stage(experiment: str, where: str) -> bool:
    """Whether an experiment takes the output of a coarse stage as input, but names no checkpoint.

    Args:
        experiment: Name of the experiment.
        where: Key of the study that names it, for messages.
    """
    stage = compose_unchecked([f"experiment={text_of(experiment)}"], where).stage
    return bool(stage.get("coarse_channel")) and stage.get("coarse") is None


def stage_steps(
    config: RecipeConfig,
    stage: str,
    folder: Path,
    data: Sequence[str],
    phantom_runs: Path,
    extra_arguments: Mapping[str, Sequence[str]] | None = None,
) -> list[Step]:
    """Make the commands that train one stage; those of finished runs are left out.

    Args:
        config: Names the chain of experiments of each stage, and the experiment on phantoms before
            it; without one, the chain starts from random weights.
        stage: `coarse` or `fine`.
        folder: Folder of the runs: the last one of the chain is in `<stage>`, those before it in
            `<stage>_1`, `<stage>_2`, …
        data: Arguments that select the training cases. Trainings on phantoms do not get them: they
            use no patient data.
        phantom_runs: Folder of the runs on phantoms and of the cache, shared by all cascades of a
            study.
        extra_arguments: Experiment to further arguments of its training, see `coarse_arguments`.
    """
    # The paths here need no quotes: a step is a command line, whose paths medseg quotes itself, see
    # `PATH_KEYS` of `medseg.config.overrides`.
    cache = f"data.cache={phantom_runs / 'cache'}"
    steps: list[Step] = []
    # Argument with the weights that the next training starts from.
    init_from: list[str] = []
    pretrain = getattr(config, f"pretrain_{stage}")
    if pretrain:
        run_dir = _phantom_run(phantom_runs, pretrain)
        steps += train_steps(run_dir, f"experiment={text_of(pretrain)}", cache)
        init_from = [f"init_from={last_checkpoint(run_dir)}"]
    chain = getattr(config, stage)
    for number, experiment in enumerate(chain, start=1):
        name = stage if number == len(chain) else f"{stage}_{number}"
        run_dir = folder / name
        arguments = [f"experiment={text_of(experiment)}", cache, *data, *init_from]
        if extra_arguments is not None:
            arguments += extra_arguments.get(experiment, [])
        steps += train_steps(run_dir, *arguments)
        init_from = [f"init_from={last_checkpoint(run_dir)}"]
    return steps


def _phantom_run(phantom_runs: Path, experiment: str) -> Path:
    """Name the run folder of a training on phantoms."""
    # The path of a file, joined to the folder as it is, could lead out of it: `/plans/a.yaml`.
    if experiment.endswith(FILE_SUFFIX):
        return phantom_runs / folder_name(experiment)
    return phantom_runs / experiment


def coarse_arguments(config: RecipeConfig, folds: Sequence[Path]) -> dict[str, list[str]]:
    """Name the coarse checkpoints of all folds for the fine experiments that take their output.

    Args:
        config: Names the experiments.
        folds: Folder of each fold, which has the run `coarse`.

    Returns:
        Experiment to its further arguments.
    """
    paths = [last_checkpoint(folder / "coarse") for folder in folds]
    checkpoints = ",".join(text_of(str(path)) for path in paths)
    arguments = {}
    for experiment in config.fine:
        if needs_coarse_stage(experiment, "fine"):
            arguments[experiment] = [f"stage.coarse_folds=[{checkpoints}]"]
    return arguments


def recipe_of(
    experiments: Mapping[str, Any],
    cases: Iterable[Case],
    arguments: Sequence[str] = (),
    fine_cases: Iterable[Case] | None = None,
) -> dict[str, Any]:
    """Collect what decides the runs of a fold.

    Args:
        experiments: From `experiments`; empty for a single stage, which the arguments describe.
        cases: All cases of the table.
        arguments: Further arguments of the trainings.
        fine_cases: Cases of the table of the fine stage; None: it has that of the coarse stage.

    Returns:
        The experiments, a digest of the names of the cases of each table, and the arguments if
        there are any.
    """
    recipe: dict[str, Any] = {**experiments, "cases": _digest(cases)}
    if fine_cases is not None:
        recipe["fine_cases"] = _digest(fine_cases)
    if arguments:
        recipe["arguments"] = list(arguments)
    return recipe


def _digest(cases: Iterable[Case]) -> str:
    """Hash the names of cases, in any order."""
    names = sorted(case.name for case in cases)
    # Names come from file names, which may hold bytes that are no UTF-8.
    text = "\n".join(names).encode("utf-8", "surrogateescape")
    return hashlib.sha256(text).hexdigest()[:DIGEST_LENGTH]


def note_recipe(folder: Path, recipe: Mapping[str, Any]) -> None:
    """Write the recipe of runs beside them, or compare it with that of earlier runs.

    A study reuses finished runs, which would be wrong with another recipe. The file is overwritten
    if no run has a checkpoint yet, since there is nothing to reuse.

    Args:
        folder: Run folder, or folder of several.
        recipe: From `recipe_of`; of a run outside any study, `arguments` alone.

    Raises:
        UserError: If earlier runs in the folder come from another recipe.
    """
    path = folder / RECIPE_FILE
    current = json.dumps(recipe)
    checkpoints = [last_checkpoint(folder), *map(last_checkpoint, folder.glob("*"))]
    has_checkpoint = any(map(Path.is_file, checkpoints))
    if not path.is_file() or not has_checkpoint:
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(path, current)
        return
    earlier = path.read_text(encoding="utf-8")
    if earlier != current:
        raise UserError(
            f"{folder}: its runs come from {earlier}, not {current}; "
            "give the same ones, or another folder"
        )


def check_same_recipe(folders: Sequence[Path]) -> None:
    """Refuse folds that come from different recipes, whose networks must not be combined.

    Folders without a file of their recipe, which older versions left, are passed over.

    Args:
        folders: Folder of each fold.

    Raises:
        UserError: With the first key that differs.
    """
    recipe_folders = [folder for folder in folders if (folder / RECIPE_FILE).is_file()]
    if not recipe_folders:
        return
    first_folder, *other_folders = recipe_folders
    first_recipe = read_json(first_folder / RECIPE_FILE)
    for folder in other_folders:
        recipe = read_json(folder / RECIPE_FILE)
        # All keys of both, each once.
        for key in dict.fromkeys([*first_recipe, *recipe]):
            if first_recipe.get(key) != recipe.get(key):
                raise UserError(
                    f"{first_folder} and {folder} come from different recipes: {key} is "
                    f"{json.dumps(first_recipe.get(key))} and {json.dumps(recipe.get(key))}; "
                    "give runs=<folder> of one cross-validation."
                )


def without_folders(metadata: dict[str, Any]) -> dict[str, Any]:
    """Shorten the paths of the training machine in metadata of weights to their last part.

    Weights may be published, and paths may name people.
    """
    config = OmegaConf.create(metadata["config"])
    for key in FOLDER_KEYS:
        value = OmegaConf.select(config, key)
        if isinstance(value, str):
            OmegaConf.update(config, key, Path(value).name)
        # A list of paths.
        elif value is not None:
            OmegaConf.update(config, key, [Path(path).name for path in value])
    return {**metadata, "config": OmegaConf.to_container(config)}
