"""What the strategies make of a configuration, a run folder and a checkpoint."""

from __future__ import annotations

from pathlib import Path

import hydra
import pytest
import torch

from medseg.build import objects as build
from medseg.config.check import to_config
from medseg.config.folder import conf_dir
from medseg.config.schema import PlanConfig, TrainConfig
from medseg.config.signature import plain
from medseg.errors import UserError
from medseg.geometry.grid_rule import PLAIN, GridRule
from medseg.planning.plan import input_shape
from medseg.runs.folder import load_config, open_run
from medseg.weights.files import write_weights


def compose(*overrides: str, root: str = "train") -> TrainConfig:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        composed = hydra.compose(root, ["run_dir=x", *overrides])
    return to_config(composed, PlanConfig if root == "plan" else TrainConfig)


@pytest.mark.parametrize("average", ["median", "mean"])
def test_the_typical_spacing_of_the_cases_that_are_trained_on_is_written_into_the_run(
    average: str, tiny_table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [f"data.cases='{tiny_table}'", f"spacing=dataset_{average}", "model.width=4"]
    run_dir = open_run(compose(*given, f"run_dir='{tmp_path / 'run'}'"))
    # The first two cases are trained on, at 6 x 4 x 4.5 and 6 x 4.1 x 4.5 mm.
    assert load_config(run_dir).spacing.target_spacing_mm == (6.0, 4.05, 4.5)
    assert f"spacing.target_spacing_mm=[6,4.05,4.5]: the {average} of 2 cases" in capsys.readouterr().err
    assert open_run(compose(*given, f"resume='{run_dir}'")) == run_dir, "the same command goes on"
    assert capsys.readouterr().err.count(f"the {average} of 2 cases") == 1
    with pytest.raises(UserError, match=r"spacing\.target_spacing_mm: "):
        open_run(compose(*given, "spacing.target_spacing_mm=[6.0,4.0,4.5]", f"resume='{run_dir}'"))


@pytest.mark.parametrize(
    ("overrides", "spacing_mm", "rule", "divisor"),
    [
        (["spacing=isotropic_2mm"], (2.0, 2.0, 2.0), PLAIN, (16, 16, 16)),
        (["spacing=anisotropic"], (2.5, 1.0, 1.0), PLAIN, (8, 16, 16)),
        (["spacing=dataset_median", "spacing.target_spacing_mm=[5.0,0.8,0.8]"], (5.0, 0.8, 0.8), PLAIN, (4, 16, 16)),
        (["spacing=native"], None, PLAIN, (16, 16, 16)),
        (["spacing=multi_scale"], None, GridRule(range_mm=(1.0, 4.0)), (16, 16, 16)),
        (["spacing=fixed_resolution"], (2.0, 2.0, 2.0), GridRule(is_cube=True), (16, 16, 16)),
        (["spacing=fixed_size"], None, GridRule(size=(128, 128, 128)), (16, 16, 16)),
        (
            ["spacing=fixed_size", "spacing.size=[64,96,80]", "spacing.target_spacing_mm=[2.0,1.0,1.0]"],
            (2.0, 1.0, 1.0),
            GridRule(size=(64, 96, 80)),
            (16, 16, 16),
        ),
    ],
)
def test_a_checkpoint_tells_prediction_its_grid_and_its_network(
    overrides: list[str],
    spacing_mm: tuple[float, float, float] | None,
    rule: GridRule,
    divisor: tuple[int, int, int],
    tmp_path: Path,
) -> None:
    config = compose("stage=fine", "model.width=4", *overrides)
    network = build.make_network(build.model_arguments(config), build.make_task(config.task), build.region_mode_of(config))
    path = tmp_path / "w.safetensors"
    write_weights(path, build.make_card(config, plain(config)), network.state_dict())
    trained = build.load_stage(path, "fine", torch.device("cpu"))
    assert trained.spacing_mm == spacing_mm
    assert trained.rule == rule
    assert trained.divisor == network.divisor == divisor


def test_a_card_from_before_there_were_rules_means_the_lattice(tmp_path: Path) -> None:
    config = compose("stage=fine", "model.width=4")
    network = build.make_network(build.model_arguments(config), build.make_task(config.task), build.region_mode_of(config))
    card = build.make_card(config, plain(config))
    del card["grid_rule"]
    write_weights(tmp_path / "w.safetensors", card, network.state_dict())
    assert build.load_stage(tmp_path / "w.safetensors", "fine", torch.device("cpu")).rule == PLAIN


def test_a_checkpoint_tells_prediction_its_filter_and_an_older_one_means_the_first(tmp_path: Path) -> None:
    config = compose("stage=fine", "model.width=4", "spacing.resampling=linear")
    network = build.make_network(build.model_arguments(config), build.make_task(config.task), build.region_mode_of(config))
    card, path = build.make_card(config, plain(config)), tmp_path / "w.safetensors"
    write_weights(path, card, network.state_dict())
    assert build.load_stage(path, "fine", torch.device("cpu")).resampling == "linear"
    del card["resampling"]
    older = tmp_path / "older.safetensors"
    write_weights(older, card, network.state_dict())
    assert build.load_stage(older, "fine", torch.device("cpu")).resampling == "antialiased"
    with pytest.raises(UserError, match="cannot be averaged: resampling is linear in the one and antialiased in the other"):
        build.load_stages([path, older], "fine", torch.device("cpu"))


def test_a_plan_counts_what_the_strategy_asks_for() -> None:
    thick = compose("stage=fine", "spacing=anisotropic", "extent_mm.fine=[100.0,100.0,100.0]", root="plan")
    assert input_shape(thick) == (40, 112, 112)  # type: ignore[arg-type]
    cube = compose("stage=fine", "spacing=fixed_resolution", "extent_mm.fine=[100.0,80.0,190.0]", root="plan")
    assert input_shape(cube) == (96, 96, 96)  # type: ignore[arg-type]
    scales = ["spacing=multi_scale", "spacing.range_mm=[2.0,8.0]", "extent_mm.fine=[100.0,80.0,190.0]"]
    assert input_shape(compose("stage=fine", *scales, root="plan")) == (64, 48, 96)  # type: ignore[arg-type]
    assert input_shape(compose("stage=fine", "spacing=fixed_size", root="plan")) == (128, 128, 128)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"native has no spacing to count voxels with; give shape=\[D,H,W\]"):
        input_shape(compose("spacing=native", root="plan"))  # type: ignore[arg-type]
