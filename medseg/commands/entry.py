"""Entry of every command: compose and check the configuration, run, turn errors into exit codes."""

import gc
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TextIO

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import ConfigCompositionException, HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict
from omegaconf.errors import OmegaConfBaseException

import medseg.commands.numpy_threads  # noqa: F401  (before all modules that import NumPy)
from medseg.conf_folder import conf_dir
from medseg.config.check import explain, resolved, to_config
from medseg.config.completion import complete, is_completion, line_words
from medseg.config.experiment_file import check_no_cascade, register_experiments
from medseg.config.help import help_text
from medseg.config.imported import with_task
from medseg.config.overrides import (
    OPTIONS,
    check_arguments,
    expand_home,
    expand_options,
    options_first,
    quote_paths,
)
from medseg.config.pretrained import with_plan
from medseg.config.schema import (
    CompareSpacingConfig,
    ConfigureConfig,
    CrossValidateConfig,
    DemoConfig,
    EvaluateConfig,
    ExportConfig,
    FindLrConfig,
    ImportConfig,
    LadderConfig,
    ListConfig,
    MakeWeightsConfig,
    PhantomsConfig,
    PlanConfig,
    PrepareConfig,
    RecipeConfig,
    ReportConfig,
    TimeToDiceConfig,
    TuneLoaderConfig,
    WatchConfig,
)
from medseg.config.search import SearchConfig
from medseg.console import drop_output, prepare_streams, say
from medseg.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OUT_OF_MEMORY,
    EXIT_UNREAD,
    EXIT_USER_ERROR,
    UserError,
)
from medseg.memory.heap import map_large_blocks
from medseg.memory.instructions import train_without_amx
from medseg.prediction.options import PredictConfig
from medseg.runs.folder import Config, changed_config, remove_if_empty
from medseg.runs.status import end_of, message_of
from medseg.targets import targets_first
from medseg.training.options import TrainConfig


class Command(NamedTuple):
    """One command of medseg.

    Attributes:
        schema: Root dataclass of its configuration.
        module: Module with its function. The function has the name of the command, unless
            `FUNCTIONS` gives another one.
        sentence: Description for `--help`.
    """

    schema: type
    module: str
    sentence: str


COMMANDS = {
    "import": Command(
        ImportConfig,
        "medseg.commands.import_data",
        "make a case table and a task from a data set of another program",
    ),
    "list": Command(
        ListConfig,
        "medseg.commands.list_series",
        "list the series below a DICOM folder, and write a case table of the scans",
    ),
    "train": Command(
        TrainConfig,
        "medseg.commands.train",
        "train one stage (stage=coarse, stage=fine or stage=single)",
    ),
    "search": Command(
        SearchConfig,
        "medseg.studies.search",
        "search hyperparameters: train many trials and stop poor ones early",
    ),
    "prepare": Command(
        PrepareConfig, "medseg.commands.prepare", "check every case and fill the cache"
    ),
    "ladder": Command(
        LadderConfig,
        "medseg.studies.ladder",
        "measure the saving of each memory switch, added one at a time",
    ),
    "compare_spacing": Command(
        CompareSpacingConfig,
        "medseg.studies.compare_spacing",
        "train spacing strategies on the same cases and score them by slice thickness",
    ),
    "time_to_dice": Command(
        TimeToDiceConfig,
        "medseg.studies.time_to_dice",
        "train configurations until they reach a Dice, and count CPU minutes",
    ),
    "find_lr": Command(
        FindLrConfig,
        "medseg.commands.find_lr",
        "find a learning rate in one short run of rising rates",
    ),
    "tune_loader": Command(
        TuneLoaderConfig,
        "medseg.planning.tune_loader",
        "measure which loader settings are fastest on this machine",
    ),
    "plan": Command(
        PlanConfig,
        "medseg.planning.plan",
        "count the memory of a training step before anything runs",
    ),
    "predict": Command(
        PredictConfig, "medseg.commands.predict", "segment scans with trained checkpoints"
    ),
    "evaluate": Command(
        EvaluateConfig,
        "medseg.commands.evaluate",
        "score label maps against a reference",
    ),
    "export": Command(
        ExportConfig,
        "medseg.commands.export",
        "write the network of a checkpoint for ONNX or OpenVINO",
    ),
    "report": Command(ReportConfig, "medseg.commands.report", "compare runs on one page"),
    "watch": Command(
        WatchConfig,
        "medseg.commands.watch",
        "show the losses and the memory of a run in the terminal while it trains",
    ),
    "configure": Command(
        ConfigureConfig,
        "medseg.studies.configure.command",
        "write an experiment that fits your data, memory and hours",
    ),
    "cross_validate": Command(
        CrossValidateConfig,
        "medseg.studies.cross_validate",
        "train and score fold by fold, by patient",
    ),
    "make_weights": Command(
        MakeWeightsConfig,
        "medseg.studies.make_weights",
        "train on all cases and write the weights as small files",
    ),
    "phantom": Command(
        PhantomsConfig,
        "medseg.commands.phantom",
        "make synthetic scans with exact labels",
    ),
    "demo": Command(
        DemoConfig,
        "medseg.studies.demo",
        "make phantoms, train both stages, predict and score, in minutes",
    ),
}
# Function of a command whose own name is a keyword or a type of Python.
FUNCTIONS = {"import": "import_data", "list": "list_series"}
# Optional packages: name in `import`, and the extra of medseg that installs it.
EXTRAS = {"optuna": "search"}


def run_command(command: str) -> None:
    """Run a command with the arguments `key=value …` of this process, and exit with its code."""
    module = COMMANDS[command].module
    # `main` of `train` prepares the process, and then calls `run`.
    if command == "train":
        import_module(module).main()
        return
    job = partial(_call_command, command)
    # `plan` has the keys of `train`. With `resume=<run folder>` it plans that run.
    if command == "plan":
        run(command, job, read=partial(read_resumed, command, PlanConfig))
    else:
        run(command, job)


def _call_command(command: str, config: Any) -> int:
    """Import the function of a command, and call it.

    The import comes after the check of the keys: a misspelled key must not wait for torch.
    """
    module = COMMANDS[command].module
    name = FUNCTIONS.get(command, command)
    try:
        code: int = getattr(import_module(module), name)(config)
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        raise UserError(
            f"{command} needs {error.name}, which is not installed; "
            f"install medseg with its extra: medseg[{EXTRAS[error.name]}]"
        ) from error
    return code


def import_module(name: str) -> ModuleType:
    """Import a module with garbage collection off.

    The collector would scan the objects of torch again and again (0.3 s per start).
    """
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        # Objects made by the import live until the program ends: later collections skip them too.
        gc.freeze()
        gc.enable()


def run(
    command: str,
    job: Callable[[Any], int],
    refused: Callable[[str], None] | None = None,
    sweep_codes: Callable[[], list[int]] | None = None,
    read: Callable[[DictConfig], Any] | None = None,
) -> None:
    """Compose a root file with the command line, run `job` on the checked configuration, and exit.

    Exit codes: 0 success; 1 some cases or jobs failed and the others went on; 2 a mistake of the
    user, reported in one sentence, as is full memory; the others are in `medseg.errors`. Any other
    exception keeps its traceback: it is a defect of medseg. `--help` prints every key.

    Args:
        command: Name of the command and of its root file `conf/<command>.yaml`.
        job: Function that does the work on one configuration and returns an exit code.
        refused: Called with that sentence, where a job is refused or lacks memory.
        sweep_codes: Returns the exit codes of the jobs of a multirun, whose launcher may run them
            in other processes.
        read: Checks the composed configuration; None = `to_config` with the schema.
    """
    schema = COMMANDS[command].schema
    read_config = read or partial(to_config, schema=schema)
    codes: list[int] = []

    def run_job(composed: DictConfig) -> None:
        try:
            with _explained_permissions():
                codes.append(job(read_config(composed)))
        except Exception as error:
            code, sentence = _end_of_job(error)
            say(sentence)
            # Hydra made this folder before the job was checked.
            remove_if_empty(Path(HydraConfig.get().runtime.output_dir))
            if refused is not None:
                refused(sentence)
            codes.append(code)

    _prepare_process(schema)
    try:
        with _explained_permissions():
            _run_command_line(command, run_job)
        sys.stdout.flush()
    except BrokenPipeError:
        # The broken pipe may be another one, such as a pipe to a worker.
        if not _drop_if_unread(sys.stdout):
            raise
        sys.exit(EXIT_UNREAD)
    except UserError as error:
        say(str(error))
        sys.exit(EXIT_USER_ERROR)
    except KeyboardInterrupt:
        say("interrupted")
        sys.exit(EXIT_INTERRUPTED)
    if sweep_codes is not None:
        # The jobs of a multirun may have run in other processes, which have added nothing to
        # `codes`. Without a multirun, `sweep_codes` gives an empty list.
        codes = sweep_codes() or codes
    sys.exit(_exit_code(codes))


class JobDefectError(Exception):
    """An exception of a job that is no mistake of the user.

    `_explained_errors` reports errors of Hydra and OmegaConf as mistakes of the user. In this
    wrapper, such an error of a job passes that function unchanged. A launcher may run the job in
    another process, so the wrapper can be pickled.

    Args:
        error: The exception of the job.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def _end_of_job(error: Exception) -> tuple[int, str]:
    """Exit code and sentence of a mistake of the user, or of full memory.

    Raises:
        JobDefectError: If the error is neither.
    """
    if isinstance(error, UserError):
        return EXIT_USER_ERROR, message_of(error)
    code, sentence, _ = end_of(error)
    # Other ends, such as a file that is missing, may be defects of medseg.
    if code != EXIT_OUT_OF_MEMORY:
        raise JobDefectError(error) from error
    return code, f"{sentence.rstrip('.')}; close other programs, or choose smaller inputs"


def _prepare_process(schema: type) -> None:
    """Set streams, memory and environment of this process before torch is loaded."""
    prepare_streams()
    # OpenMP reads this when torch is loaded: waiting threads sleep. Beside three other programs on
    # two cores, busy waiting at each barrier made a prediction take five times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    map_large_blocks()
    # A training computes without AMX instructions; `configure` times trainings, so it does too.
    if issubclass(schema, (TrainConfig, ConfigureConfig)):
        train_without_amx()
    # Without this variable, Hydra prints many lines on a composition error and exits itself.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")


def _run_command_line(command: str, run_job: Callable[[DictConfig], None]) -> None:
    """Answer the command line of this process: complete it, print help, or run the jobs.

    Raises:
        UserError: If an argument is wrong, or Hydra cannot compose it or write the run folder.
    """
    schema = COMMANDS[command].schema
    if is_completion(sys.argv[1:]):
        with _explained_errors(command):
            print("\n".join(complete(schema, partial(compose, command), line_words())))
        return
    arguments = expand_options(command, expand_home(sys.argv[1:]))
    check_arguments(arguments)
    # The functions below may compose the arguments, and need the experiments that these name.
    register_experiments(arguments)
    if issubclass(schema, TrainConfig) and not issubclass(schema, RecipeConfig):
        check_no_cascade(arguments)
    # `with_task` opens the paths that the user typed, so they are quoted after it.
    arguments = quote_paths(with_task(arguments, schema))
    with _explained_errors(command):
        arguments = with_plan(arguments, schema, partial(compose, command))
    # A `_target_` empties its node, so it must come before the other arguments of the node.
    arguments = targets_first(arguments)
    # Hydra takes the arguments from here.
    sys.argv[1:] = options_first(arguments)
    if {"--help", "-h"} & set(sys.argv):
        with _explained_errors(command):
            _print_help(command, sys.argv[1:])
        return
    _run_hydra(command, run_job)


@contextmanager
def _explained_permissions() -> Iterator[None]:
    """Turn the error of a path that this user may not use into one sentence for the user.

    In a folder that the user may not enter, even `Path.exists` raises it.
    """
    try:
        yield
    except PermissionError as error:
        if error.filename is None:
            raise
        raise UserError(
            f"{error.filename}: cannot be used ({error.strerror}); "
            "check its permissions, and those of the folders around it."
        ) from error


@contextmanager
def _explained_errors(command: str) -> Iterator[None]:
    """Turn errors of Hydra and OmegaConf about the command line into one sentence for the user."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(explain(error, _compose_choices(command))) from error


def _compose_choices(command: str) -> DictConfig:
    """Compose the choices of groups of this command line, such as `task=abdomen`, alone.

    An unknown key is compared with the keys of these choices, not with those of the defaults.
    """
    default_config, groups = compose(command)
    choices = [argument for argument in sys.argv[1:] if argument.partition("=")[0] in groups]
    if not choices:
        return default_config
    try:
        composed, _ = compose(command, choices)
    except (HydraException, OmegaConfBaseException):
        # A choice is the mistake, or a group needs a key that is left out here.
        return default_config
    return composed


def _print_help(command: str, arguments: Sequence[str]) -> None:
    """Print the description of a command, its options, and all keys with their values."""
    schema, _, sentence = COMMANDS[command]
    print(f"{command}: {sentence}")
    print("Arguments: key=value …, for the keys below with their current values.")
    for option, key in OPTIONS.get(command, {}).items():
        print(f"  {option} <path> is short for {key}=<path>")
    overrides = [argument for argument in arguments if not argument.startswith("-")]
    composed, groups = compose(command, overrides)
    print(help_text(schema, composed, groups), flush=True)


def _run_hydra(command: str, run_job: Callable[[DictConfig], None]) -> None:
    """Let Hydra compose the command line, make the folder of the run or sweep, and run the jobs.

    Raises:
        UserError: If the command line cannot be composed, or the folder cannot be written.
        Exception: The defect of a job, as the job raised it.
    """
    start = hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=command)
    try:
        with _explained_errors(command):
            start(run_job)()
        return
    except JobDefectError as job_defect:
        defect = job_defect.error
    except OSError as error:
        # The error of a closed output stream names no file.
        if error.filename is None:
            raise
        raise UserError(
            f"{error.filename}: cannot be written ({error.strerror}); "
            "check the folder, its permissions and its space."
        ) from error
    # Raised here and not in its `except`, which would hide the cause of the defect.
    raise defect


def _exit_code(codes: Sequence[int]) -> int:
    """Combine the exit codes of all jobs; of several jobs, say how many failed."""
    # `--help` runs no job, and succeeds.
    if not codes:
        return 0
    if len(codes) == 1:
        return codes[0]
    num_failed = sum(code != 0 for code in codes)
    if num_failed == 0:
        return 0
    say(f"{num_failed} of {len(codes)} jobs failed")
    return EXIT_FAILED


def read_resumed(command: str, schema: type[Config], composed: DictConfig) -> Config:
    """Check the composed configuration or, with `resume=<run folder>`, that of the changed run.

    Args:
        command: Name of the command and of its root file under `conf/`.
        schema: Keys of the command.
        composed: Configuration that the command line composes.
    """
    hydra_config = HydraConfig.get()
    is_multirun = hydra_config.mode is RunMode.MULTIRUN
    # `auto` is decided by the command, and each job of a multirun resumes by itself.
    if is_multirun or composed.resume in (None, "auto"):
        return to_config(composed, schema)
    # The configuration of an empty command line: the user has changed the keys that differ from it.
    default = resolved(hydra.compose(command))
    overrides = hydra_config.overrides.task
    return changed_config(composed.resume, resolved(composed), default, overrides, schema)


def _drop_if_unread(stream: TextIO) -> bool:
    """Return whether the reader of a stream has closed it; the buffer is then dropped.

    Python would otherwise fail at its exit, where it flushes the buffer.
    """
    try:
        # An empty line: a write that failed may have left nothing to flush.
        print(file=stream, flush=True)
    except BrokenPipeError:
        drop_output(stream)
        return True
    return False


def compose(command: str, overrides: Sequence[str] = ()) -> tuple[DictConfig, list[str]]:
    """Compose a root file outside of Hydra's own entry; a group that must be chosen may be missing.

    Returns:
        The configuration, and the groups whose files the command line may choose.
    """
    GlobalHydra.instance().clear()
    missing_groups: list[str] = []
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        try:
            composed = hydra.compose(command, list(overrides), return_hydra_config=True)
        except ConfigCompositionException as error:
            match = re.search(r"You must specify '(\w+)'", str(error))
            if match is None:
                raise
            missing_group = match.group(1)
            missing_groups.append(missing_group)
            # `~group` composes without the group.
            overrides = [*overrides, f"~{missing_group}"]
            composed = hydra.compose(command, overrides, return_hydra_config=True)
    groups = [*composed.hydra.runtime.choices, *missing_groups]
    with open_dict(composed):
        del composed["hydra"]
    return composed, groups
