"""`--help` of a command: every key with its value, type, range, unit and sentence."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from medseg.commands.cli import main
from medseg.commands.entry import COMMANDS


@pytest.fixture
def help_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., str]:
    """What a command prints; it ends with code 0 and leaves no file behind."""

    def run(command: str, *arguments: str) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["medseg", command, "--help", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
        assert not list(tmp_path.iterdir())
        return capsys.readouterr().out

    return run


def test_a_class_that_is_no_text_is_printed(help_of: Callable[..., str]) -> None:
    assert "  loss._target_=[a]   " in help_of("train", "stage=fine", "loss._target_=[a]")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, help_of: Callable[..., str]) -> None:
    text = help_of(command)
    assert text.startswith(f"{command}: {COMMANDS[command][2]}\n")
    assert "  output=" in text or "  run_dir=" in text or command == "watch"  # writes nothing


def test_a_key_is_printed_with_all_that_the_schema_says(help_of: Callable[..., str]) -> None:
    text = help_of("train", "stage=fine", "stage.patch_size=[64,64,96]")
    assert (
        "  stage.patch_size=[64, 64, 96]   3 integers in [1, inf), voxels (D, H, W), or "
        "null\n      Training patch;"
    ) in text
    assert "stage: Input, region and validation of a stage. (stage=coarse | fine | single)" in text
    assert "  task.regions.<name>.side=???   left | right, or null\n" in text
    assert "  spacing.resampling=antialiased   antialiased | linear | cubic\n" in text


def test_the_arguments_of_a_class_without_a_schema_are_printed(help_of: Callable[..., str]) -> None:
    text = help_of("train", "model=segresnet", "loss=hausdorff_dt", "model.init_filters=8")
    assert "  model.init_filters=8   integer\n      Argument of the class.\n" in text
    assert "  model.blocks_up=[1, 1, 1]   list\n" in text
    assert "  model._target_=monai.networks.nets.SegResNet   text\n" in text
    # A sum of losses has no class of its own.
    assert "  loss.terms=[{_target_: medseg.losses.dice_ce.DiceCrossEntropyLoss, factor: " in text
    assert "loss._target_" not in text
    assert "list of see below" not in text


def test_a_headline_is_one_line(help_of: Callable[..., str]) -> None:
    lines = help_of("train").splitlines()
    (headline,) = [line for line in lines if line.startswith("model: ")]
    assert headline.startswith(
        "model: Network, see `medseg.models.unet.UNet`. Another `_target_` replaces these keys"
    )
    assert " (model=dynunet | " in headline


def test_help_waits_for_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv[1:] = ['train', '--help']\nfrom medseg.commands.cli import "
        "main\ntry: main()\n"
    )
    code += "finally: print('loaded', 'torch' in sys.modules)"
    environment = {"PATH": "/usr/bin", "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    said = subprocess.check_output(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, encoding="utf-8"
    )
    assert said.endswith("loaded False\n")
