"""Commands in the documentation: each composes, and passes the checks of its configuration."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig

from medseg.commands.entry import COMMANDS
from medseg.conf_folder import conf_dir
from medseg.config.check import resolved, to_config
from medseg.config.overrides import (
    HYDRA_OPTIONS,
    PATH_KEYS,
    POSITIONAL_KEYS,
    check_arguments,
    expand_options,
    quote_paths,
)
from medseg.errors import UserError
from medseg.runs.folder import changed_config, open_run
from medseg.targets import targets_first
from medseg.training.options import TrainConfig
from medseg.weights.files import shipped_weights
from medseg.weights.included import INCLUDED_TASK

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    path
    for path in sorted(
        [
            *ROOT.glob("*.md"),
            *ROOT.glob("docs/**/*.md"),
            *ROOT.glob("medseg/**/README.md"),
            *ROOT.glob("examples/*.py"),
        ]
    )
    if path.name != "CHANGELOG.md"  # its commands are those of their version
]
COMMAND = re.compile(
    r"(?:medseg (?P<name>\w+)|python (?:\S*/)?scripts/(?P<script>\w+)\.py|python "
    r"train\.py|torchrun .*?(?:scripts/(?P<spread>\w+)|train)\.py)"
    r"(?:\s+(?P<arguments>.*))?$"
)
# Arguments that the pages show being refused.
REFUSED = {"stage.pach_size=[96,96,96]"}


def code_lines(page: Path) -> list[str]:
    """Code lines of a page (indented, fenced, inline) or of a script's comments, uncommented."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if re.match(r"    ", line)]
    lines += [
        line
        for block in re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
    ]
    lines += [line.removeprefix("# ") for line in text.splitlines() if line.startswith("#     ")]
    lines += [inline for line in text.splitlines() for inline in re.findall(r"`([^`]+)`", line)]
    return [
        re.split(r"\s#(?:\s|$)", line.strip().removeprefix("$ ").removeprefix("srun "))[0].strip()
        for line in lines
    ]


def commands(page: Path) -> list[tuple[str, list[str]]]:
    """Name and arguments of each command of a page; `<run>` becomes a word, `…` is left out."""
    arguments_of_command: dict[tuple[str, str], list[str]] = {}
    for line in code_lines(page):
        match = COMMAND.match(line)
        if match is None or match["name"] == "is":
            continue
        name = match["name"] or match["script"] or match["spread"] or "train"
        arguments = shlex.split(re.sub(r"<[^<>]*>|\$\w+", "given", match["arguments"] or ""))
        kept = [
            one
            for one in arguments
            if ("…" not in one or one.partition("=")[0] in PATH_KEYS)
            and (one != "given" or name in POSITIONAL_KEYS)
        ]
        if name in COMMANDS and any("=" in one or not one.startswith("-") for one in kept):
            arguments_of_command[name, str(kept)] = kept
        else:
            assert name in COMMANDS, f"{page.name}: there is no command {name}"
    return [(name, arguments) for (name, _), arguments in arguments_of_command.items()]


def overrides_of(name: str, arguments: list[str], table: Path) -> list[str]:
    """Arguments as Hydra gets them: an existing case table, first values of sweeps, no flags."""
    given = expand_options(name, arguments)
    check_arguments(given)
    given = [
        f"{key}={table}" if (key := one.partition("=")[0]) in ("cases", "data.cases") else one
        for one in given
    ]
    # Model folders of nnU-Net are the reader's.
    weights = shipped_weights(INCLUDED_TASK, "coarse")
    given = [
        f"init_from={weights}" if one.startswith(("init_from=nnUNet", "init_from=given")) else one
        for one in given
    ]
    # The file of an experiment is written by the command before.
    given = ["stage=single" if re.fullmatch(r"experiment=\S+\.yaml", one) else one for one in given]
    given = targets_first(quote_paths(given))
    overrides = []
    for before, one in zip(["", *given], given, strict=False):
        if one.startswith("-") or before in HYDRA_OPTIONS:
            continue
        parsed = OverridesParser.create().parse_override(one)
        if parsed.is_sweep_override():
            assert {"-m", "--multirun"} & set(given), f"{one}: a sweep without -m"
            one = f"{one.partition('=')[0]}={next(parsed.sweep_string_iterator())}"
        overrides.append(one)
    return overrides


def refusal(name: str, arguments: list[str], table: Path) -> str:
    """Why a command is refused before it does anything; "" if it is accepted."""
    schema = COMMANDS[name][0]
    needed = ["run_dir=none"] if "run_dir" in schema.__dataclass_fields__ else []
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        try:
            to_config(hydra.compose(name, [*overrides_of(name, arguments, table), *needed]), schema)
        except (UserError, HydraException) as error:
            return str(error)
    return ""


def test_the_pages_have_commands_to_check() -> None:
    assert sum(len(commands(page)) for page in PAGES) > 110


def test_every_file_and_target_that_a_command_names_exists() -> None:
    targets = re.findall(
        r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
    )
    for page in PAGES:
        for line in code_lines(page):
            if (match := re.match(r"python (\S+\.py)", line)) and not match[1].startswith(
                "src/"
            ):  # of another framework
                assert any((ROOT / place / match[1]).is_file() for place in ("", "examples")), (
                    f"{page.name}: {line}"
                )
            if match := re.match(r"make ([a-z-]+)$", line):
                assert match[1] in targets, f"{page.name}: {line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_brackets_of_a_printed_command_are_quoted(page: Path) -> None:
    """Without quotes zsh, the shell of macOS, takes [a,b] for a pattern of file names."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in re.findall(
        r"^    (?:\$ )?((?:medseg|python|torchrun|srun) .*)", text, re.MULTILINE
    ):
        command = re.split(r"\s#(?:\s|$)", line)[0]
        unquoted = re.sub(r"'[^']*'|\"[^\"]*\"|<[^<>]*>", "", command)
        assert "[" not in unquoted, command


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_command_passes_the_checks_of_its_configuration(
    page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "my_project"))
    table = tmp_path / "cases.csv"
    table.write_text("case,image,labels\n", encoding="utf-8")
    for name, arguments in commands(page):
        if "--config-dir" in arguments:  # a folder of the reader
            continue
        message = refusal(name, arguments, table)
        assert bool(message) == bool(REFUSED & set(arguments)), (
            f"{name} {' '.join(arguments)}: {message}"
        )


def test_each_resumed_run_of_a_page_takes_what_is_changed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A page's earlier run is opened, and resumed with the arguments that the page shows."""
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "my_project"))
    table = tmp_path / "cases.csv"
    table.write_text("case,image,labels\n", encoding="utf-8")
    num_resumed = 0
    for page in PAGES:
        runs: dict[str, list[str]] = {}
        for name, arguments in commands(page):
            values = dict(argument.partition("=")[::2] for argument in arguments)
            if name == "train" and "hydra.run.dir" in values:
                runs[values["hydra.run.dir"]] = arguments
            if name != "train" or values.get("resume") not in runs:
                continue
            run_dir = tmp_path / f"run {num_resumed}"
            config, _ = composed("train", runs[values["resume"]], table, run_dir)
            open_run(to_config(config, TrainConfig))
            changes = [argument for argument in arguments if not argument.startswith("resume=")]
            resumed, overrides = composed("train", [*changes, f"resume={run_dir}"], table, run_dir)
            default, _ = composed("train", [], table, run_dir)
            changed = changed_config(
                str(run_dir), resolved(resumed), resolved(default), overrides, TrainConfig
            )
            open_run(changed)
            num_resumed += 1
    assert num_resumed


def test_each_checkpoint_of_a_page_is_that_of_a_run_of_the_page() -> None:
    for page in PAGES:
        run_dirs = {
            argument.partition("=")[2]
            for _, arguments in commands(page)
            for argument in arguments
            if argument.startswith("hydra.run.dir=")
        }
        if not run_dirs:
            continue
        for name, arguments in commands(page):
            used = re.findall(r"([\w./]+)/checkpoints/", " ".join(arguments))
            assert set(used) <= run_dirs, f"{page.name}: {name} {' '.join(arguments)}"


def composed(
    name: str, arguments: list[str], table: Path, run_dir: Path
) -> tuple[DictConfig, list[str]]:
    """Compose a command of a page for a run folder; returns the overrides too."""
    arguments_kept = [
        override
        for override in overrides_of(name, arguments, table)
        if not override.startswith("hydra.run.dir=")
    ]
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return hydra.compose(name, [*arguments_kept, f"run_dir='{run_dir}'"]), arguments_kept


@pytest.mark.slow
def test_each_key_for_those_who_come_from_elsewhere_is_accepted(tmp_path: Path) -> None:
    table = tmp_path / "cases.csv"
    table.write_text("case,image,labels\n", encoding="utf-8")
    page = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
    cells = [
        line.rstrip(" |").rpartition(" | ")[2]
        for line in page.splitlines()
        if line.startswith("| ")
    ]
    codes = [
        re.sub(r"<[^<>]*>", str(table), code)
        for cell in cells
        for code in re.findall(r"`([^`]+)`", cell)
        if "…" not in code
    ]
    given = [
        arguments
        for code in codes
        if (arguments := shlex.split(code)) and all("=" in one for one in arguments)
    ]
    assert len(given) > 20
    for arguments in given:
        refused = [
            refusal(command, [*arguments, *more], table)
            for command, more in (
                ("train", ["stage=fine"] if "stage" not in arguments[0] else []),
                ("predict", [f"input={table}", "output=out"]),
            )
        ]
        assert not all(refused), f"{arguments}: {refused}"
