"""The outermost entry of every command: quote, compose, check, run; and errors to exit codes."""

from __future__ import annotations

import csv
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeVar

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from medseg.apps.ending import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_UNREAD, EXIT_USER_ERROR
from medseg.config.check import explain, to_config
from medseg.errors import UserError

T = TypeVar("T")

# Keys whose value is one path: Hydra's grammar breaks on names such as `Doe, John`, `Thorax (1)` or `a=b`.
PATH_KEYS = frozenset(
    {
        "cases",
        "coarse",
        "data.cache",
        "data.cases",
        "data.phantoms.folder",
        "fine",
        "init_from",
        "hydra.run.dir",
        "hydra.sweep.dir",
        "input",
        "output",
        "pred",
        "ref",
        "runs",
        "resume",
        "stage.coarse",
    }
)
# Those that also take a list of paths, `[a,b]`.
LIST_KEYS = frozenset({"coarse", "fine"})


def quote_paths(arguments: Sequence[str]) -> list[str]:
    """Quote the path-valued arguments so that Hydra's grammar takes them as they are.

    `null` and values that are already quoted stay; so does everything that is no `key=value` of `PATH_KEYS`. Under `-m` a comma
    in a path does not start a sweep. Brackets around a value of `LIST_KEYS` that is no path itself make a list; a comma inside one of
    its paths needs quotes.

    Example:
        >>> quote_paths(["input=Doe, John/a=b.nii", "seed=1,2", "fine=[a=b,(1)]"])
        ["input='Doe, John/a=b.nii'", 'seed=1,2', "fine=['a=b','(1)']"]
    """
    quoted = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
        if not equals or key.lstrip("+") not in PATH_KEYS or value in ("", "null") or is_quoted:
            quoted.append(argument)
        elif key.lstrip("+") in LIST_KEYS and value[0] == "[" and value[-1] == "]" and not Path(value).exists():
            parts = [part.strip() for part in next(csv.reader([value[1:-1]], quotechar="'", skipinitialspace=True))]
            quoted.append(f"{key}=[{','.join(map(quote, parts))}]")
        else:
            quoted.append(f"{key}={quote(value)}")
    return quoted


def quote(text: str) -> str:
    """A text that Hydra's grammar takes as it is."""
    # Inside quotes only the quote itself is escaped; a backslash counts as an escape just before it.
    escaped = text.replace("\\'", "\\\\'").replace("'", "\\'")
    return f"'{escaped}\\'" if escaped.endswith("\\") else f"'{escaped}'"


def conf_dir() -> Path:
    """Folder of the configuration: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


def say(message: str) -> None:
    """Tell the user something on the error stream, so that results can be piped."""
    print(f"medseg: {message}", file=sys.stderr, flush=True)


def run(
    config_name: str,
    schema: type[T],
    job: Callable[[T], int],
    refused: Callable[[str], None] | None = None,
    sweep_codes: Callable[[], list[int]] | None = None,
    read: Callable[[DictConfig], T] | None = None,
) -> None:
    """Compose `conf/<config_name>.yaml` with the command line, run `job` on the checked objects, and exit.

    Exit codes: 0 all well; 1 some cases or jobs failed and the rest went on; 2 a mistake of the user, told in one sentence; those of
    `medseg.apps.ending`. Any other exception keeps its traceback: it is a defect of medseg.

    Args:
        config_name: Root file under `conf/`, without suffix.
        schema: Root dataclass of `medseg.config.schema`.
        job: Does the work on one configuration and returns an exit code.
        refused: Told the sentence that refused a job.
        sweep_codes: Exit codes of the jobs of a multirun, whose launcher may run them in other processes.
        read: Makes checked objects of what is composed; None = `to_config` with the schema.
    """
    codes: list[int] = []

    def one_job(composed: DictConfig) -> None:
        try:
            codes.append(job(read(composed) if read is not None else to_config(composed, schema)))
        except UserError as error:
            say(str(error))
            remove_if_empty(Path(HydraConfig.get().runtime.output_dir))
            if refused is not None:
                refused(str(error))
            codes.append(EXIT_USER_ERROR)

    # Before torch is loaded. Threads that wait for each other then sleep: where others use the machine too, each barrier would else burn
    # its core for as long as the last one has none, which made a prediction take five times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Without it Hydra prints its own many lines on a composition error and exits itself.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    sys.argv[1:] = quote_paths(sys.argv[1:])
    try:
        main: Callable[[], Any] = hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=config_name)(one_job)
        main()
        sys.stdout.flush()
    except BrokenPipeError:
        if not _is_unread(sys.stdout):
            raise
        sys.exit(EXIT_UNREAD)
    except (HydraException, OmegaConfBaseException) as error:
        say(explain(error, _defaults(config_name)))
        sys.exit(EXIT_USER_ERROR)
    except OSError as error:
        if not _is_of_run_folder(error):
            raise
        say(f"{error.filename}: cannot be written ({error.strerror}); check the folder, its permissions and its space.")
        sys.exit(EXIT_USER_ERROR)
    except KeyboardInterrupt:
        say("interrupted")
        sys.exit(EXIT_INTERRUPTED)
    codes = (sweep_codes() if sweep_codes is not None else []) or codes
    if len(codes) > 1 and any(codes):
        say(f"{sum(code != 0 for code in codes)} of {len(codes)} jobs failed")
        sys.exit(EXIT_FAILED)
    sys.exit(max(codes, default=0))


def remove_if_empty(folder: Path) -> None:
    """Take back the run folder that Hydra made for a run that never began there."""
    if folder.is_dir() and folder != Path.cwd() and not any(folder.iterdir()):
        folder.rmdir()


def _is_of_run_folder(error: OSError) -> bool:
    """Whether Hydra could not make the folder of a run or a sweep, which it does before the job begins."""
    names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    return names[-1] == "mkdir" and "one_job" not in names


def _is_unread(stream: TextIO) -> bool:
    """Whether the reader of a stream has left; what the stream still holds is then dropped, or Python would fail at its exit."""
    try:
        stream.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return True
    return False


def _defaults(config_name: str) -> DictConfig | None:
    """The configuration without any override: what a misspelled key is compared with."""
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
            return hydra.compose(config_name)
    except (HydraException, OmegaConfBaseException):
        return None  # the configuration itself is at fault; the first error says more
