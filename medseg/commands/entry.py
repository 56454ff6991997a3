"""The outermost entry of every command: quote, compose, check, run; and errors to exit codes."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO, TypeVar

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from medseg.config.check import explain, to_config
from medseg.config.folder import conf_dir
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
    """Compose `conf/<config_name>.yaml` with the command line, run `job` on the checked objects, and exit.

    Exit codes: 0 all well; 1 some cases or jobs failed and the rest went on; 2 a mistake of the user, told in one sentence; those of
    `medseg.runs.status`. Any other exception keeps its traceback: it is a defect of medseg.

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
