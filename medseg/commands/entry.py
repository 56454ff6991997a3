"""Entry of every command: quote paths, compose and check the configuration, run, turn errors into exit codes."""

import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeVar

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import ConfigCompositionException, HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from medseg.commands.cli import COMMANDS
from medseg.config.check import explain, to_config
from medseg.config.folder import conf_dir
from medseg.config.help import help_text
from medseg.config.overrides import quote_paths
from medseg.console import say
from medseg.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_UNREAD, EXIT_USER_ERROR, UserError
from medseg.runs.folder import remove_if_empty

T = TypeVar("T")


def run(
    config_name: str,
    schema: type[T],
    job: Callable[[T], int],
    refused: Callable[[str], None] | None = None,
    sweep_codes: Callable[[], list[int]] | None = None,
    read: Callable[[DictConfig], T] | None = None,
) -> None:
    """Compose `conf/<config_name>.yaml` with the command line, run `job` on the checked configuration, and exit.

    Exit codes: 0 success; 1 some cases or jobs failed and the others went on; 2 a mistake of the user, reported in one sentence; those
    of `medseg.runs.status`. Any other exception keeps its traceback: it is a defect of medseg. `--help` prints every key.

    Args:
        config_name: Root file under `conf/`, without suffix.
        schema: Root dataclass of `medseg.config.schema`.
        job: Does the work on one configuration and returns an exit code.
        refused: Called with the sentence that refused a job.
        sweep_codes: Returns the exit codes of the jobs of a multirun, whose launcher may run them in other processes.
        read: Checks what is composed; None = `to_config` with the schema.
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

    # OpenMP reads this when torch is loaded: threads that wait sleep. On a shared machine, busy waiting at each barrier made a prediction
    # take five times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Otherwise Hydra prints many lines on a composition error and exits itself.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    sys.argv[1:] = quote_paths(sys.argv[1:])
    try:
        if {"--help", "-h"} & set(sys.argv[1:]):
            overrides = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
            print(
                f"{config_name}: {COMMANDS[config_name]}\nArguments: key=value …, for the keys below with their current values."
            )
            print(help_text(schema, _compose(config_name, overrides)), flush=True)
            sys.exit(0)
        main: Callable[[], Any] = hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=config_name)(one_job)
        main()
        sys.stdout.flush()
    except BrokenPipeError:
        if not _is_unread(sys.stdout):
            raise
        sys.exit(EXIT_UNREAD)
    except (HydraException, OmegaConfBaseException) as error:
        say(explain(error, _compose(config_name)))
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


def _is_of_run_folder(error: OSError) -> bool:
    """Whether Hydra failed to make the folder of a run or a sweep, which it does before the job begins."""
    names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    return names[-1] == "mkdir" and "one_job" not in names


def _is_unread(stream: TextIO) -> bool:
    """Whether the reader of a stream has left; the rest of the stream is then dropped, or Python would fail at its exit."""
    try:
        stream.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return True
    return False


def _compose(config_name: str, overrides: Sequence[str] = ()) -> DictConfig:
    """Compose a root file outside of Hydra's own entry; a group that must be chosen may be missing."""
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        try:
            return hydra.compose(config_name, list(overrides))
        except ConfigCompositionException as error:
            group = re.search(r"You must specify '(\w+)'", str(error))
            if group is None:
                raise
            return hydra.compose(config_name, [*overrides, f"~{group.group(1)}"])
