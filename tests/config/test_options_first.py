"""Options of Hydra among the keys of a command."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from hydra._internal.utils import get_args_parser
from layouts import make_nnunet

from medseg.config.imported import SOURCE_VARIABLE, with_task
from medseg.config.overrides import check_arguments, expand_options, options_first, quote_paths
from medseg.targets import targets_first
from medseg.training.options import TrainConfig

ROOT = Path(__file__).resolve().parents[2]
SWEEP = re.compile(r"(?:medseg train|python train\.py) (-m .*)$", re.MULTILINE)


def sweeps() -> list[str]:
    """Arguments of each multirun on the pages of the documentation."""
    pages = sorted(ROOT.glob("docs/*.md"))
    texts = [page.read_text(encoding="utf-8").replace("\\\n", " ") for page in pages]
    lines = [line for text in texts for line in SWEEP.findall(text)]
    return [re.split(r"\s#\s", re.sub(r"<[^<>]*>", "given", line))[0] for line in lines]


def test_the_pages_have_multiruns() -> None:
    assert len(sweeps()) >= 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_nnunet(tmp_path_factory.mktemp("nnunet") / "Dataset001")


def parsed(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Options and keys as Hydra's parser gets them; anything that it does not take is an error."""
    arguments = expand_options("train", arguments)
    check_arguments(arguments)
    ordered = options_first(targets_first(quote_paths(with_task(arguments, TrainConfig))))
    parser = get_args_parser()
    options, unknown = parser.parse_known_args(ordered)
    assert unknown == []
    keys = list(options.overrides)
    assert ordered[len(ordered) - len(keys) :] == keys
    return ordered[: len(ordered) - len(keys)], keys


@pytest.mark.parametrize("line", sweeps())
def test_each_multirun_of_the_pages_runs_on_an_imported_folder(
    line: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SOURCE_VARIABLE, "")
    monkeypatch.delenv(SOURCE_VARIABLE)
    arguments = [word for word in shlex.split(line) if not word.startswith("data.cases=")]
    options, keys = parsed([*arguments, f"data.cases={folder}"])
    assert options == ["-m"]
    assert keys[0] == "task=imported"
    assert set(arguments) - {"-m"} <= {key.replace("'", "") for key in keys}


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (["--config-dir", "mine", "stage=fine"], ["--config-dir", "mine"]),
        (["stage=fine", "--multirun", "seed=1,2"], ["--multirun"]),
        (["--info", "stage=fine"], ["--info", "all"]),
        (["stage=fine", "--cfg", "job", "--resolve"], ["--cfg", "job", "--resolve"]),
        (["-m", "model._target_=a.B", "--config-dir=mine"], ["-m", "--config-dir=mine"]),
    ],
)
def test_options_may_stand_anywhere(
    arguments: list[str], options: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SOURCE_VARIABLE, "")
    monkeypatch.delenv(SOURCE_VARIABLE)
    parsed_options, keys = parsed([*arguments, f"data.cases={folder}"])
    assert parsed_options == options
    assert f"data.cases='{folder}'" in keys
