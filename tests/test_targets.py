"""Extension points: what replaces a node, what may be named, and what is imported."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch

from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.errors import UserError
from medseg.targets import bind_target, check_target, targets_first
from medseg.training.options import TrainConfig


def compose(*overrides: str, folder: Path | None = None) -> TrainConfig:
    search = [f"hydra.searchpath=[file://{folder}]"] if folder else []
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return to_config(
            hydra.compose("train", targets_first([*overrides, *search, "run_dir=none"])),
            TrainConfig,
        )


def test_a_target_on_the_command_line_replaces_the_preset_and_its_keys_need_no_plus() -> None:
    given = ["optimizer.momentum=0.9", "optimizer._target_=torch.optim.SGD", "optimizer.lr=0.1"]
    assert compose(*given).optimizer == {"_target_": "torch.optim.SGD", "momentum": 0.9, "lr": 0.1}
    assert compose("optimizer=sgd", *given[1:]).optimizer == {
        "_target_": "torch.optim.SGD",
        "lr": 0.1,
    }


def test_a_target_in_a_file_replaces_what_earlier_files_say(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    text = (
        "# @package _global_\noptimizer: {_target_: torch.optim.SGD, lr: 0.5}\nmodel: {width: 4}\n"
    )
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    config = compose("experiment=mine", "optimizer.nesterov=true", folder=tmp_path)
    assert config.optimizer == {"_target_": "torch.optim.SGD", "lr": 0.5, "nesterov": True}
    assert (config.model["width"], config.model["depth"]) == (4, 3)


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "torch.nn",
        "torch.nn._reduction",
        "torch.nn.Module.__init__",
        "torchx.nn.Conv3d",
        "",
        3,
    ],
)
def test_a_name_beyond_the_white_list_is_refused_without_an_import(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.import_module", lambda name: pytest.fail(f"imported {name}"))
    with pytest.raises(UserError, match=r"model\._target_"):
        bind_target("model", "model", {"_target_": target})


def test_a_trusted_package_may_be_named_and_a_longer_name_of_another_may_not() -> None:
    check_target("model", "model", {"_target_": "mine.nets.Net"}, ["mine"])
    with pytest.raises(UserError, match=r"add trusted_targets=\[mine2\.\]"):
        check_target("model", "model", {"_target_": "mine2.Net"}, ["mine"])


def test_a_file_that_a_command_reads_can_trust_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from medseg.runs.folder import load_config, open_run

    (tmp_path / "hostile_package.py").write_text("import nothing_that_exists\n")
    monkeypatch.syspath_prepend(tmp_path)
    given = [
        "model._target_=hostile_package.Net",
        "trusted_targets=[hostile_package.]",
        "data.cases=null",
    ]
    config = compose(*given)
    config.run_dir = str(tmp_path / "run")
    run_dir = open_run(config)
    with pytest.raises(UserError, match=r"hostile_package\.Net is not on the white list"):
        load_config(run_dir)
    assert "hostile_package" not in sys.modules
    assert load_config(run_dir, ["hostile_package."]).model["_target_"] == "hostile_package.Net"


@pytest.mark.parametrize("target", ["torch.nn._Net", "my_package._parts.Net", "Net"])
def test_no_trusted_target_admits_a_name_that_is_not_public(target: str) -> None:
    with pytest.raises(UserError, match=r"no public class .* even if you .*; give a dotted name"):
        check_target("model", "model", {"_target_": target}, ["my_package"])


@pytest.mark.parametrize(
    ("point", "node", "said"),
    [
        (
            "model",
            {"_target_": "torch.nn.Conv4d"},
            (r"torch\.nn\.Conv4d does not exist in the installed version; did you mean "
             r"torch\.nn\.Conv"),
        ),
        ("model", {"_target_": "torch.nn.functional"}, "is not a class"),
        ("model", {"_target_": "torch.nn.Parameter"}, r"is no torch\.nn\.Module"),
        ("model", {"_target_": "torch.nn.nothing.Net"}, "cannot be imported"),
        (
            "optimizer",
            {"_target_": "torch.optim.lr_scheduler.StepLR"},
            r"is no torch\.optim\.Optimizer",
        ),
        ("optimizer", {"_target_": "torch.optim.SGD", "momentun": 1}, "did you mean momentum"),
        ("model", {"_target_": "torch.nn.Module", "width": 1}, "its arguments are none$"),
    ],
)  # fmt: skip
def test_a_class_that_does_not_fit_is_one_sentence(
    point: str, node: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said) as caught:
        bind_target(point, point, node, *([None] if point == "optimizer" else []))
    assert "\n" not in str(caught.value)


def test_arguments_are_bound_and_the_object_is_made_later() -> None:
    make = bind_target("optimizer", "optimizer", {"_target_": "torch.optim.SGD", "lr": 0.5}, None)
    assert make([torch.nn.Parameter(torch.ones(1))]).defaults["lr"] == 0.5


def test_a_whole_float_is_passed_as_int_to_an_argument_that_needs_int() -> None:
    node = {"_target_": "torch.optim.LBFGS", "max_iter": 5e0}
    arguments = bind_target("optimizer", "optimizer", node, None).keywords
    assert repr(arguments["max_iter"]) == "5"
