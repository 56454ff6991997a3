"""Recipes: resumable sequences of medseg commands, each in a process of its own.

Among them are the demo and the training of the included weights.
"""

import hashlib
import itertools
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from medseg.config.check import explain, to_config
from medseg.config.experiment_file import register_experiments
from medseg.config.overrides import text_of
from medseg.config.schema import DemoConfig, RecipeConfig
from medseg.data.case_table import Case
from medseg.errors import EXIT_FAILED, UserError
from medseg.io.atomic import replace_text
from medseg.io.text import read_json
from medseg.runs.folder import CONFIG_FILE, read_summary, settle
from medseg.runs.status import Status, status_of
from medseg.targets import targets_first
from medseg.training.options import TrainConfig
from medseg.weights.files import shipped_weights
from medseg.weights.included import INCLUDED_TASK
from medseg.wording import shell_line

# File of `cross_validate` with the lower bound on Dice.
BOUND = "bound.json"
# File beside the runs of a fold with the experiments and arguments that they come from.
EXPERIMENTS = "experiments.json"
DIGEST_LENGTH = 12
# Arguments of `medseg`, the command first.
Step = Sequence[str]

MEDSEG = (sys.executable, "-m", "medseg.commands.cli")
# Provider of a folder that `--config-dir` added to Hydra's search path.
COMMAND_LINE = "command-line"

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


def run_until_failure(steps: Sequence[Step]) -> int:
    """Print and run commands one after the other.

    A prediction or an evaluation in which single cases failed has said so, and the next command
    still runs.

    Returns:
        0, or the exit code of the command that failed; the commands after it do not run.

    Raises:
        SystemExit: With the exit code of a command that was interrupted.
    """
    for step in steps:
        print(f"\n$ medseg {shell_line(step)}", flush=True)
        command = [*MEDSEG, *step]
        code = subprocess.run(command, check=False).returncode
        if status_of(code) is Status.interrupted:
            sys.exit(code)
        if has_failed(step, code):
            return code
    return 0


def run_and_get_failure(step: Step) -> str:
    """Print and run one command; pass its error stream on, and return why it failed.

    A prediction or an evaluation in which single cases failed has not failed as a whole.

    Returns:
        Its exit code and its last message; empty where it did not fail.

    Raises:
        SystemExit: With the exit code of a command that was interrupted.
    """
    print(f"\n$ medseg {shell_line(step)}", flush=True)
    message = ""
    command = [*MEDSEG, *step]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, encoding="utf-8", errors="replace"
    ) as process:
        assert process.stderr is not None, "it is a pipe"
        for line in process.stderr:
            print(line, end="", file=sys.stderr, flush=True)
            message = line.strip().removeprefix("medseg: ") or message
    code = process.returncode
    if status_of(code) is Status.interrupted:
        sys.exit(code)
    if not has_failed(step, code):
        return ""
    return f"{step[0]} ended with exit code {code}: {message or 'without a message'}"


def has_failed(step: Step, code: int) -> bool:
    """Whether a command failed as a whole, not only for single cases of many."""
    if code == EXIT_FAILED and step[0] in ("predict", "evaluate"):
        return False
    return code != 0


def run_steps(steps: Sequence[Step]) -> None:
    """Run commands as `run_until_failure`, and exit with the code of the one that failed."""
    code = run_until_failure(steps)
    if code:
        sys.exit(code)


def train_steps(run_dir: Path, *arguments: str) -> list[Step]:
    """Make the command that trains a run or resumes it; none if the run has finished."""
    if read_summary(run_dir).get("status") == Status.finished.value:
        return []
    resume = [f"resume={run_dir}"] if (run_dir / CONFIG_FILE).is_file() else []
    return [["train", *search_paths(), *arguments, f"hydra.run.dir={run_dir}", *resume]]


def search_paths() -> list[str]:
    """List the options of this command that tell Hydra where further configuration files are."""
    if not HydraConfig.initialized():
        return []
    hydra_config = HydraConfig.get()
    options = []
    for source in hydra_config.runtime.config_sources:
        if source.provider == COMMAND_LINE:
            options += ["--config-dir", source.path]
    return options + _search_path_overrides()


def _search_path_overrides() -> list[str]:
    """List the arguments `hydra.searchpath=[…]` of this command."""
    if not HydraConfig.initialized():
        return []
    overrides = HydraConfig.get().overrides.hydra
    return [override for override in overrides if key_of(override) == "hydra.searchpath"]


def last_checkpoint(run_dir: Path) -> Path:
    """Name the checkpoint of the last step of a run."""
    return run_dir / "checkpoints" / "last.ckpt"


def stage_steps(
    config: RecipeConfig,
    stage: str,
    folder: Path,
    data: Sequence[str],
    phantom_runs: Path,
    extra_arguments: Mapping[str, Sequence[str]] | None = None,
) -> list[Step]:
    """Make the commands that train one stage.

    Args:
        config: Names the experiments of each stage, and the experiment on phantoms whose weights
            the first one starts from; null = random weights.
        stage: `coarse` or `fine`.
        folder: Folder of the last runs, `coarse` and `fine`, and of those before them, `coarse_1`,
            `coarse_2` …
        data: Arguments that select the training cases. Trainings on phantoms do not get them: they
            use no patient data.
        phantom_runs: Folder of the runs on phantoms and of the cache, shared by all cascades of a
            study.
        extra_arguments: Experiment to further arguments of its training, see `coarse_arguments`.
    """
    cache = f"data.cache={phantom_runs / 'cache'}"
    steps: list[Step] = []
    # Each training starts from the weights of the one before.
    begin: list[str] = []
    pretrain = getattr(config, f"pretrain_{stage}")
    if pretrain:
        run_dir = phantom_runs / pretrain
        steps += train_steps(run_dir, f"experiment={text_of(pretrain)}", cache)
        begin = [f"init_from={last_checkpoint(run_dir)}"]
    chain = getattr(config, stage)
    for number, experiment in enumerate(chain, start=1):
        name = stage if number == len(chain) else f"{stage}_{number}"
        run_dir = folder / name
        arguments = [f"experiment={text_of(experiment)}", cache, *data, *begin]
        if extra_arguments is not None:
            arguments += extra_arguments.get(experiment, [])
        steps += train_steps(run_dir, *arguments)
        begin = [f"init_from={last_checkpoint(run_dir)}"]
    return steps


def sees_coarse_stage(experiment: str, where: str) -> bool:
    """Tell whether an experiment asks for coarse probabilities and names no coarse stage.

    Args:
        experiment: Name of the experiment.
        where: Key of the study that names it, for messages.
    """
    stage = _compose([f"experiment={text_of(experiment)}"], where).stage
    return bool(stage.get("coarse_channel")) and stage.get("coarse") is None


def coarse_arguments(config: RecipeConfig, folds: Sequence[Path]) -> dict[str, list[str]]:
    """Give the checkpoints of the coarse stage to the fine experiments that see it.

    Args:
        config: Names the experiments.
        folds: Folder of each fold, with its run `coarse`.

    Returns:
        Experiment to its further arguments.
    """
    paths = [last_checkpoint(folder / "coarse") for folder in folds]
    checkpoints = ",".join(text_of(str(path)) for path in paths)
    arguments = {}
    for experiment in config.fine:
        if sees_coarse_stage(experiment, "fine"):
            arguments[experiment] = [f"stage.coarse_folds=[{checkpoints}]"]
    return arguments


def check_experiments(config: RecipeConfig, extra_arguments: Sequence[str] = ()) -> None:
    """Refuse an experiment that `train` would refuse, before hours of training.

    Args:
        config: Names the experiments.
        extra_arguments: Further arguments of the trainings that are not on phantoms.

    Raises:
        UserError: With its key.
    """
    for key, names in experiments(config).items():
        if names is None:
            continue
        # A stage has a chain of experiments, a training on phantoms has one.
        chain = [names] if isinstance(names, str) else names
        for name in chain:
            arguments = [f"experiment={text_of(name)}", "run_dir=none"]
            if not key.startswith("pretrain"):
                arguments += extra_arguments
            # Trainings on phantoms get no coarse stage: `train` refuses one that asks for it.
            if key == "fine" and sees_coarse_stage(name, key):
                # Any file stands for the checkpoint that is still to be trained.
                stand_in = shipped_weights(INCLUDED_TASK, "coarse")
                arguments.append(f"stage.coarse={text_of(str(stand_in))}")
            compose_train(arguments, key)


def recipe_of(
    experiments: Mapping[str, Any], cases: Iterable[Case], arguments: Sequence[str] = ()
) -> dict[str, Any]:
    """Collect what decides the runs of a fold.

    Args:
        experiments: From `experiments`; empty for a task of one stage, whose arguments say it all.
        cases: All cases of the table.
        arguments: Further arguments of the trainings.
    """
    names = sorted(case.name for case in cases)
    # A name of a file may hold bytes that are no UTF-8.
    text = "\n".join(names).encode("utf-8", "surrogateescape")
    digest = hashlib.sha256(text).hexdigest()
    recipe: dict[str, Any] = {**experiments, "cases": digest[:DIGEST_LENGTH]}
    if arguments:
        recipe["arguments"] = list(arguments)
    return recipe


def note_recipe(folder: Path, recipe: Mapping[str, Any]) -> None:
    """Write the recipe of runs beside them, or compare it with that of earlier runs.

    A finished run is reused, which would be wrong with another recipe. What was refused before its
    first checkpoint left nothing to reuse.

    Args:
        folder: Run folder, or folder of several.
        recipe: From `recipe_of`, or the arguments of a single run.

    Raises:
        UserError: If the runs come from another recipe.
    """
    path = folder / EXPERIMENTS
    current = json.dumps(recipe)
    checkpoints = [last_checkpoint(folder), *map(last_checkpoint, folder.glob("*"))]
    if not path.is_file() or not any(map(Path.is_file, checkpoints)):
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
    """Refuse folds that come from different recipes, whose networks would be joined.

    A folder without a note of its recipe, of an older version, is compared with none.

    Args:
        folders: Folder of each fold.

    Raises:
        UserError: With the first key that differs.
    """
    noted = [folder for folder in folders if (folder / EXPERIMENTS).is_file()]
    if not noted:
        return
    first = read_json(noted[0] / EXPERIMENTS)
    for folder in noted[1:]:
        recipe = read_json(folder / EXPERIMENTS)
        for key in dict.fromkeys([*first, *recipe]):
            if first.get(key) != recipe.get(key):
                raise UserError(
                    f"{noted[0]} and {folder} come from different recipes: {key} is "
                    f"{json.dumps(first.get(key))} and {json.dumps(recipe.get(key))}; "
                    "give runs=<folder> of one cross-validation."
                )


def compose_train(arguments: Sequence[str], where: str) -> TrainConfig:
    """Compose and check the configuration of a training.

    Args:
        arguments: Arguments of `train`.
        where: Key of the study that gives them, for messages.

    Raises:
        UserError: If `train` would refuse the arguments.
    """
    composed = _compose(arguments, where)
    try:
        config = to_config(composed, TrainConfig)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    settle(config)
    return config


def _compose(arguments: Sequence[str], where: str) -> DictConfig:
    """Compose the arguments of a training, unchecked; a mistake names the key that gave them."""
    register_experiments(arguments)
    try:
        # Folders of `--config-dir` belong to this process already.
        return hydra.compose("train", targets_first([*_search_path_overrides(), *arguments]))
    except HydraException as error:
        raise UserError(f"{where}: {explain(error)}") from error


def key_of(argument: str) -> str:
    """Return the key of a command-line argument.

    Example:
        >>> [key_of(argument) for argument in ("steps=5", "+data.label_values.trachea=5", "~rows")]
        ['steps', 'data.label_values.trachea', 'rows']
    """
    return argument.split("=", 1)[0].lstrip("+~")


def arguments_for_train(arguments: Sequence[str], schema: type[Any]) -> list[str]:
    """Keep the arguments of a study that `train` takes too.

    Args:
        arguments: Arguments of the study.
        schema: Schema of the study; the keys that it adds to that of `train` are left out.
    """
    train_keys = {field.name for field in fields(TrainConfig)}
    study_keys = {field.name for field in fields(schema)} - train_keys
    kept = []
    for argument in arguments:
        top_key = key_of(argument).split(".")[0]
        if top_key not in study_keys:
            kept.append(argument)
    return kept


def merge_arguments(*groups: Sequence[str]) -> tuple[str, ...]:
    """Keep one argument per key: an argument of a later group replaces that of an earlier one.

    Example:
        >>> merge_arguments(["steps=5", "seed=1"], ["steps=9"])
        ('steps=9', 'seed=1')
    """
    argument_of_key = {}
    for argument in itertools.chain(*groups):
        argument_of_key[key_of(argument)] = argument
    return tuple(argument_of_key.values())


def label_values_argument(label_values: Mapping[str, Any]) -> str:
    """Make the argument with the values in reference files; it adds names that the task lacks."""
    items = [f"{text_of(name)}: {text_of(value)}" for name, value in label_values.items()]
    return f"+data.label_values={{{', '.join(items)}}}"


def evaluate_step(
    folder: Path, reference: Path, plain_task: Mapping[str, Any], label_values: Mapping[str, Any]
) -> Step:
    """Make the command that scores the predictions of a study.

    Args:
        folder: Folder of the study: has `predictions`; receives `scores` and `task.yaml`, since an
            experiment may choose the task or change it.
        reference: Case table of the predictions.
        plain_task: Content of the group `task`.
        label_values: Values in the label files.
    """
    task_file = folder / "task.yaml"
    replace_text(task_file, yaml.safe_dump({"task": dict(plain_task)}, sort_keys=False))
    return [
        "evaluate",
        f"pred={folder / 'predictions'}",
        f"ref={reference}",
        f"output={folder / 'scores'}",
        f"task={task_file}",
        label_values_argument(label_values),
    ]


def folder_name(name: str) -> str:
    """Name the folder of a row; names that differ only in punctuation share one.

    Example:
        >>> folder_name("isotropic 1 mm")
        'isotropic_1_mm'
    """
    return re.sub(r"\W+", "_", name)


def check_names(rows: Sequence[str], *taken: str) -> None:
    """Refuse a study without rows, or with rows that would share a folder.

    Args:
        rows: Names of the rows.
        *taken: Folders that no row may have.

    Raises:
        UserError: With the names.
    """
    folders = [*map(folder_name, rows), *taken]
    if rows and len(set(folders)) == len(folders):
        return
    condition = f" and are none of {', '.join(taken)}" if taken else ""
    raise UserError(
        "rows: expected at least one row, with names that differ in more than punctuation"
        f"{condition}, but got {list(rows)}"
    )


def demo(config: DemoConfig) -> int:
    """Make phantoms, train both stages, predict and score the held-out phantoms.

    Every step is a command that a user would type, and is printed. Phantoms and finished runs of an
    earlier start are kept.

    Raises:
        SystemExit: With the exit code of the command that failed.
    """
    start_s = time.perf_counter()
    folder = Path(config.output)
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
        is_of_all_scores = statistic["metric"] == "dice" and statistic["trust"] == "all"
        if is_of_all_scores and statistic["region"] != "all":
            print(f"Mean Dice of {statistic['region']}: {statistic['mean']:.4f}")
    return 0


def experiments(config: RecipeConfig) -> dict[str, list[str] | str | None]:
    """Map each key that names experiments to what it names: stages and trainings on phantoms."""
    keys = ("coarse", "fine", "pretrain_coarse", "pretrain_fine")
    return {key: getattr(config, key) for key in keys}


def without_folders(metadata: dict[str, Any]) -> dict[str, Any]:
    """Remove the folders of the training machine from metadata of weights; file names stay."""
    config = OmegaConf.create(metadata["config"])
    for key in FOLDER_KEYS:
        value = OmegaConf.select(config, key)
        if isinstance(value, str):
            OmegaConf.update(config, key, Path(value).name)
        elif value is not None:
            OmegaConf.update(config, key, [Path(path).name for path in value])
    return {**metadata, "config": OmegaConf.to_container(config)}
