"""Recipes of cascades: the chain of experiments that trains each stage, as resumable commands.

The chain of a stage has one or more experiments; each starts from the weights of the previous one.
A training on phantoms may come first.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from medseg.config.experiment_file import SUFFIX as FILE_SUFFIX
from medseg.config.overrides import PATH_KEYS, text_of
from medseg.config.schema import RecipeConfig
from medseg.data.case_table import Case
from medseg.errors import UserError
from medseg.io.atomic import replace_text
from medseg.io.text import read_json
from medseg.studies.command_steps import Step, last_checkpoint, train_steps
from medseg.studies.train_arguments import (
    FOLDER_KEYS,
    compose_train,
    compose_unchecked,
    folder_name,
    key_of,
)
from medseg.weights.files import shipped_weights
from medseg.weights.included import INCLUDED_TASK

# File with the recipe of the runs in a folder, see `recipe_of`.
RECIPE_FILE = "experiments.json"
# Number of hexadecimal digits of a SHA-256 that a recipe keeps.
DIGEST_LENGTH = 12


def experiments(config: RecipeConfig) -> dict[str, list[str] | str | None]:
    """Map each key that names experiments to its value.

    `coarse` and `fine` have a list of names; `pretrain_coarse` and `pretrain_fine`, the trainings
    on phantoms, have one name or None.
    """
    keys = ("coarse", "fine", "pretrain_coarse", "pretrain_fine")
    return {key: getattr(config, key) for key in keys}


def check_experiments(config: RecipeConfig, extra_arguments: Sequence[str] = ()) -> None:
    """Refuse an experiment that `train` would refuse, before hours of training.

    Args:
        config: Has the experiments.
        extra_arguments: Further arguments of all trainings but those on phantoms.

    Raises:
        UserError: Names the key of the experiment.
    """
    for key, names in experiments(config).items():
        if names is None:
            continue
        chain = [names] if isinstance(names, str) else names
        for name in chain:
            # Nothing is written to `run_dir`, but it must have a value: the default is Hydra's
            # output folder, which exists only while a command runs.
            arguments = [f"experiment={text_of(name)}", "run_dir=none"]
            if not key.startswith("pretrain"):
                arguments += extra_arguments
            # Only for `fine`: a `pretrain_fine` that needs a coarse stage is refused by
            # `compose_train`, since `stage_steps` gives none to trainings on phantoms.
            if key == "fine" and needs_coarse_stage(name, key):
                # The coarse stage is not trained yet: any existing file passes the check.
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
    """Make the commands that train one stage; finished runs get no command.

    Args:
        config: Has the chain of experiments of each stage, and the experiment on phantoms before
            the chain; without it, the chain starts from random weights.
        stage: `coarse` or `fine`.
        folder: Folder of the runs: the last run of the chain is `<stage>`, the runs before it are
            `<stage>_1`, `<stage>_2`, …
        data: Arguments that select the training cases; not given to trainings on phantoms, which
            use no patient data.
        phantom_runs: Folder of the runs on phantoms and of the cache, shared by all cascades of a
            study.
        extra_arguments: Experiment to further arguments of its training, see `coarse_arguments`.
    """
    # The paths below need no quotes: a step is a command line, in which medseg quotes the values of
    # `PATH_KEYS` itself, see `medseg.config.overrides`.
    cache = f"data.cache={phantom_runs / 'cache'}"
    steps: list[Step] = []
    # Argument that names the initial weights of the next training; empty for random weights.
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
    # Joined to the folder unchanged, a path such as `/plans/a.yaml` would lead out of the folder.
    if experiment.endswith(FILE_SUFFIX):
        return phantom_runs / folder_name(experiment)
    return phantom_runs / experiment


def coarse_arguments(config: RecipeConfig, folds: Sequence[Path]) -> dict[str, list[str]]:
    """Make the arguments with the coarse checkpoints of all folds, for fine experiments.

    Args:
        config: Has the experiments.
        folds: Folder of each fold, which has the run `coarse`.

    Returns:
        Fine experiment to its further arguments, if it takes the output of a coarse stage.
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
    """Collect everything that determines the runs in a folder.

    Args:
        experiments: From `experiments`; empty for a single stage, which the arguments describe.
        cases: All cases of the table.
        arguments: Further arguments of the trainings.
        fine_cases: Cases of the table of the fine stage; None if both stages have one table.

    Returns:
        The experiments, a digest of the case names of each table, and the arguments if there are
        any.
    """
    recipe: dict[str, Any] = {**experiments, "cases": _digest(cases)}
    if fine_cases is not None:
        recipe["fine_cases"] = _digest(fine_cases)
    if arguments:
        recipe["arguments"] = list(arguments)
    return recipe


def _digest(cases: Iterable[Case]) -> str:
    """Hash the names of cases, independently of their order."""
    names = sorted(case.name for case in cases)
    # Names come from file names, which may hold bytes that are not valid UTF-8.
    text = "\n".join(names).encode("utf-8", "surrogateescape")
    return hashlib.sha256(text).hexdigest()[:DIGEST_LENGTH]


def note_recipe(folder: Path, recipe: Mapping[str, Any]) -> None:
    """Write the recipe of runs into their folder, or compare it with the recipe of earlier runs.

    A study reuses finished runs, which would be wrong with another recipe. While no run has a
    checkpoint, there is nothing to reuse, and the file is overwritten. Paths are compared as
    absolute ones, so a study may be resumed from another working folder. The order of the arguments
    does not count.

    Args:
        folder: Run folder, or folder of several run folders.
        recipe: From `recipe_of`; for a run outside any study, the key `arguments` alone.

    Raises:
        UserError: If earlier runs in the folder come from another recipe.
    """
    path = folder / RECIPE_FILE
    current = json.dumps(_comparable(recipe))
    if path.is_file() and has_checkpoint(folder):
        # Older versions wrote paths and arguments as they were typed.
        earlier = json.dumps(_comparable(read_json(path)))
        if earlier != current:
            raise UserError(
                f"{folder}: its runs come from {earlier}, not {current}; "
                "give the same ones, or another folder"
            )
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(path, current)


def _comparable(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Sort the arguments of a recipe by their keys, and make all its paths absolute.

    Paths are in the arguments and in the names of the experiments; relative ones start at the
    working folder.
    """
    comparable = dict(recipe)
    for key, value in recipe.items():
        if key == "arguments":
            # Of two arguments with one key the later one counts: `sorted` keeps their order.
            comparable[key] = sorted(map(_with_absolute_path, value), key=key_of)
        elif isinstance(value, list):
            comparable[key] = list(map(_absolute_file, value))
        elif isinstance(value, str):
            comparable[key] = _absolute_file(value)
    return comparable


def _with_absolute_path(argument: str) -> str:
    """Make the path of an argument absolute; an argument without a path stays."""
    key, _, value = argument.partition("=")
    path = value.strip("'\"")
    names_path = key_of(argument) in PATH_KEYS and path not in ("", "null")
    if names_path or path.endswith(FILE_SUFFIX):
        return f"{key}={text_of(os.path.abspath(path))}"
    return argument


def _absolute_file(name: str) -> str:
    """Make the path of an experiment file absolute; the name of an included one stays."""
    if name.endswith(FILE_SUFFIX):
        return os.path.abspath(name)
    return name


def has_checkpoint(folder: Path) -> bool:
    """Whether a run has left a checkpoint in a folder, or in a folder below it."""
    checkpoints = [last_checkpoint(folder), *map(last_checkpoint, folder.glob("*"))]
    return any(map(Path.is_file, checkpoints))


def check_same_recipe(folders: Sequence[Path]) -> None:
    """Refuse folds of different recipes, whose networks must not be combined.

    Folders of older versions have no recipe file and are not compared.

    Args:
        folders: Folder of each fold.

    Raises:
        UserError: Names the first key that differs.
    """
    recipe_folders = [folder for folder in folders if (folder / RECIPE_FILE).is_file()]
    if not recipe_folders:
        return
    first_folder, *other_folders = recipe_folders
    first_recipe = read_json(first_folder / RECIPE_FILE)
    for folder in other_folders:
        recipe = read_json(folder / RECIPE_FILE)
        # Keys of both recipes, each once.
        for key in dict.fromkeys([*first_recipe, *recipe]):
            if first_recipe.get(key) != recipe.get(key):
                raise UserError(
                    f"{first_folder} and {folder} come from different recipes: {key} is "
                    f"{json.dumps(first_recipe.get(key))} and {json.dumps(recipe.get(key))}; "
                    "give runs=<folder> of one cross-validation."
                )


def without_folders(metadata: dict[str, Any]) -> dict[str, Any]:
    """Shorten the paths in a checkpoint's metadata to their last part.

    Weights may be published, and paths of the training machine may contain names of people.
    """
    config = OmegaConf.create(metadata["config"])
    for key in FOLDER_KEYS:
        value = OmegaConf.select(config, key)
        if isinstance(value, str):
            OmegaConf.update(config, key, Path(value).name)
        # Otherwise the value is a list of paths, or None.
        elif value is not None:
            OmegaConf.update(config, key, [Path(path).name for path in value])
    return {**metadata, "config": OmegaConf.to_container(config)}
