"""An experiment is taken from a file anywhere, as if it stood in `conf/experiment`."""

from __future__ import annotations

from pathlib import Path

import hydra
import pytest

from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.config.experiment_file import check_no_cascade, names_stages, register_experiments
from medseg.errors import UserError
from medseg.training.options import TrainConfig


def compose(*arguments: str) -> TrainConfig:
    register_experiments(arguments)
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return to_config(hydra.compose("train", [*arguments, "run_dir=none"]), TrainConfig)


def test_a_copy_of_an_included_experiment_composes_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (conf_dir() / "experiment" / "demo_fine.yaml").read_text(encoding="utf-8")
    (tmp_path / "my plan").mkdir()
    file = tmp_path / "my plan" / "copy.yaml"
    file.write_text(text, encoding="utf-8")
    included = compose("experiment=demo_fine", "steps=7")
    assert compose(f"experiment='{file}'", "steps=7") == included
    monkeypatch.chdir(tmp_path)
    assert compose("experiment='my plan/copy.yaml'", "steps=7") == included


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "there is no such file; check the path"),
        ("steps: [", "the file is damaged"),
        ("- 1\n- 2\n", "expected the keys of an experiment"),
    ],
)
def test_a_file_that_is_no_experiment_is_told(
    tmp_path: Path, text: str | None, sentence: str
) -> None:
    file = tmp_path / "mine.yaml"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=sentence) as refused:
        register_experiments([f"experiment={file}"])
    assert str(file) in str(refused.value)


@pytest.mark.parametrize(("name", "key"), [("1", "1"), ("1.5", "1.5"), ("no", "False")])
def test_a_key_that_is_no_text_does_not_exist(tmp_path: Path, name: str, key: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"# @package _global_\nsteps: 5\n{name}: 2\n", encoding="utf-8")
    with pytest.raises(UserError, match=f"^{key}: there is no such key"):
        compose(f"experiment='{file}'")


def test_a_cascade_is_refused_with_the_files_of_its_stages(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text("coarse: coarse.yaml\nfine: ct_fine\n", encoding="utf-8")
    argument = f"experiment='{file}'"
    assert names_stages(argument)
    sentence = f"give experiment={tmp_path / 'coarse.yaml'} or experiment=ct_fine"
    with pytest.raises(UserError, match=sentence):
        check_no_cascade(["steps=5", argument])
    file.write_text("coarse: coarse.yaml\nsteps: 5\n", encoding="utf-8")
    assert not names_stages(argument)
    check_no_cascade(["steps=5", argument, "experiment=ct_fine"])


def test_a_cascade_has_no_keys_of_a_training(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    text = "coarse: coarse.yaml\nfine: fine.yaml\npretrain_fine: null\n"
    file.write_text(text, encoding="utf-8")
    register_experiments([f"experiment='{file}'"])
    file.write_text(f"{text}seed: 7\n", encoding="utf-8")
    sentence = f"seed: .* set the key in {tmp_path / 'coarse.yaml'} and {tmp_path / 'fine.yaml'}"
    with pytest.raises(UserError, match=sentence):
        register_experiments([f"experiment='{file}'"])
