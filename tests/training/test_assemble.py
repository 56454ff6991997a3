"""Objects of a run: the configuration reaches optimiser, schedule and Lightning's trainer."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra
import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.data.case_table import read_case_table, split_cases
from medseg.data.cases import find_sources
from medseg.errors import UserError
from medseg.io.tables import write_csv
from medseg.training import assemble
from medseg.training.assemble import (
    make_data_module,
    make_device_map,
    make_metadata,
    make_module,
    make_trainer,
    make_views,
)
from medseg.training.callbacks import View
from medseg.training.device_map_strategy import DeviceMapStrategy
from medseg.training.network import make_network
from medseg.training.options import TrainConfig

SMALL = [
    "model.width=4",
    "model.depth=1",
    "model.blocks_per_level=[1,1]",
    "logger=none",
    "trainer.accelerator=cpu",
]


@pytest.fixture
def compose(tmp_path: Path) -> Callable[..., TrainConfig]:
    """A function that composes the configuration of a small run."""

    def make(*overrides: str) -> TrainConfig:
        with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
            composed = hydra.compose("train", [*SMALL, f"run_dir='{tmp_path}'", *overrides])
        return to_config(composed, TrainConfig)

    return make


@pytest.mark.parametrize("schedule", ["one_cycle", "poly"])
@pytest.mark.parametrize(
    ("optimizer", "lr_scaling", "factor"), [("sgd", "linear", 4.0), ("adamw", "sqrt", 2.0)]
)
def test_the_rates_of_a_run_grow_with_its_batch(
    schedule: str,
    optimizer: str,
    lr_scaling: str,
    factor: float,
    compose: Callable[..., TrainConfig],
) -> None:
    def rates(*overrides: str) -> list[float]:
        config = compose(f"optimizer={optimizer}", f"schedule={schedule}", "steps=6", *overrides)
        parts = make_module(config, make_network(config), {}).configure_optimizers()
        used = []
        for _ in range(6):
            used.append(parts["optimizer"].param_groups[0]["lr"])
            parts["optimizer"].step()
            parts["lr_scheduler"]["scheduler"].step()
        return used

    plain = rates("stage.batch_size=4")
    scaled = rates("stage.batch_size=4", f"lr_scaling={lr_scaling}")
    assert scaled == pytest.approx([factor * rate for rate in plain])
    assert max(plain) > 0


@pytest.mark.parametrize("is_searched", [False, True])
def test_the_kernel_search_is_on_only_where_it_is_asked_for(
    is_searched: bool, compose: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", not is_searched)
    config = compose()
    config.memory.cudnn_benchmark = is_searched  # refused by the rules on a CPU
    make_trainer(config, [])
    assert torch.backends.cudnn.benchmark is is_searched


@pytest.mark.parametrize(
    ("overrides", "is_searched"),
    [
        (["stage=fine"], False),
        (["model=dynunet", "loss.output_weights=[1,0.5,0]"], True),
    ],
)
def test_unused_parameters_are_searched_only_where_a_step_may_leave_some_out(
    overrides: list[str], is_searched: bool, compose: Callable[..., TrainConfig]
) -> None:
    """Without the search a step waits for gradients for ever; with it each step walks the graph."""
    config = compose("trainer=ddp", "trainer.devices=2", "stage.batch_size=2", *overrides)
    strategy = make_trainer(config, []).strategy
    assert isinstance(strategy, DDPStrategy)
    assert strategy._ddp_kwargs.get("find_unused_parameters", False) is is_searched


def test_a_device_map_of_the_configuration_reaches_the_trainer(
    compose: Callable[..., TrainConfig],
) -> None:
    strategy = make_trainer(compose("model.device_map={encoder: cpu}"), []).strategy
    assert isinstance(strategy, DeviceMapStrategy)
    assert strategy.root_device == torch.device("cpu")
    assert set(strategy.device_map.values()) == {"cpu"}
    assert all(name.startswith("encoder") for name in strategy.device_map)


def test_the_trainer_counts_as_the_configuration_says(compose: Callable[..., TrainConfig]) -> None:
    """Lightning counts validations in micro-batches, the configuration in optimiser steps."""
    settings = ["steps=40", "stage.batch_size=6", "memory.accumulate=3", "stage.validate_every=10"]
    trainer = make_trainer(
        compose(*settings, "trainer.gradient_clip=0.5", "trainer.clip_by=value"), [pl.Callback()]
    )
    assert trainer.max_steps == 40
    assert trainer.accumulate_grad_batches == 3
    assert trainer.val_check_interval == 30
    assert trainer.check_val_every_n_epoch is None
    assert trainer.num_sanity_val_steps == 0
    assert (trainer.gradient_clip_val, trainer.gradient_clip_algorithm) == (0.5, "value")
    shorter = make_trainer(compose("steps=4", "stage.validate_every=10"), [])
    assert shorter.val_check_interval == 4, "a run shorter than the interval validates at its end"


def test_a_module_takes_its_numbers_from_the_configuration(
    compose: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them is the default, so that a number that is not passed on would be seen."""
    mapped: list[TrainConfig] = []
    monkeypatch.setattr(assemble, "map_blocks", mapped.append)
    config = compose(
        "seed=7",
        "stage.batch_size=6",
        "memory.accumulate=3",
        "inference.tile_size=[8,16,24]",
        "inference.overlap=0.25",
        "ema_decay=0.75",
    )
    metadata = {"num_classes": 2}
    module = make_module(config, make_network(config), metadata)
    assert mapped == [config]
    assert (module.seed, module.accumulate) == (7, 3)
    assert module.tile_size is not None
    assert (tuple(module.tile_size), module.overlap) == ((8, 16, 24), 0.25)
    assert module.metadata is metadata
    average = module.average
    assert average is not None
    for value in (0.0, 1.0):
        for weight in module.network.parameters():
            torch.nn.init.constant_(weight, value)
        average.update()
    assert all(torch.all(value == 0.25) for value in average.values().values())


def test_a_trainer_takes_its_settings_from_the_configuration(
    compose: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    usual = make_trainer(compose(), [])
    assert (usual.num_devices, usual.num_nodes, usual.limit_val_batches) == (1, 1, 1.0)
    assert not usual._detect_anomaly
    assert usual.default_root_dir == str(tmp_path)
    ranks = ["trainer=ddp", "trainer.devices=2", "trainer.num_nodes=3", "stage.batch_size=6"]
    changed = make_trainer(compose(*ranks, "debug.fast=true", "debug.anomaly=true"), [])
    assert (changed.num_devices, changed.num_nodes, changed.limit_val_batches) == (2, 3, 1)
    assert isinstance(changed.limit_val_batches, int), "one case; 1.0 would be all of them"
    assert changed._detect_anomaly


@pytest.fixture
def coarse_of_folds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, table: Path) -> list[Path]:
    """Coarse stages of the folds 0 and 1 of two, which are their paths."""
    paths = [tmp_path / f"fold_{fold}.ckpt" for fold in range(2)]
    trained = {}
    for fold, path in enumerate(paths):
        path.touch()
        split = split_cases(read_case_table(table), fold=fold, num_folds=2)
        trained[path] = [*(case.name for case in split.train), "phantom_0"]
    monkeypatch.setattr(assemble, "trained_cases", lambda path, _: trained[path])
    monkeypatch.setattr(assemble, "_load_coarse", lambda key, path, config: path)
    return paths


@pytest.fixture
def table(tiny_table: Path) -> Path:
    """The tiny case table without the column split."""
    with tiny_table.open(newline="") as file:
        rows = [{**row, "split": ""} for row in csv.DictReader(file)]
    path = tiny_table.with_name("unmarked.csv")
    write_csv(path, rows)
    return path


def channel_arguments(table: Path, checkpoints: list[Path], *others: str) -> list[str]:
    listed = ",".join(map(str, checkpoints))
    return [
        "stage=fine",
        f"data.cases='{table}'",
        "data.num_folds=2",
        "stage.coarse_channel=true",
        f"stage.coarse_folds=[{listed}]",
        *others,
    ]


@pytest.mark.parametrize("fold", ["0", "1", "all"])
def test_a_case_sees_the_coarse_stage_that_has_not_trained_on_its_patient(
    fold: str,
    compose: Callable[..., TrainConfig],
    table: Path,
    coarse_of_folds: list[Path],
) -> None:
    config = compose(*channel_arguments(table, coarse_of_folds, f"data.fold={fold}"))
    stage_by_case = make_data_module(config).coarse_by_case
    split = find_sources(config.data, config.task)[0].split
    assert stage_by_case.keys() == {case.name for case in (*split.train, *split.val)}
    for number, path in enumerate(coarse_of_folds):
        held_out = compose(
            "stage=fine", f"data.cases='{table}'", "data.num_folds=2", f"data.fold={number}"
        )
        for case in find_sources(held_out.data, held_out.task)[0].split.val:
            assert stage_by_case[case.name] == str(path)


def test_the_order_of_the_coarse_stages_does_not_matter(
    compose: Callable[..., TrainConfig], table: Path, coarse_of_folds: list[Path]
) -> None:
    config = compose(*channel_arguments(table, coarse_of_folds))
    turned = compose(*channel_arguments(table, coarse_of_folds[::-1]))
    assert make_data_module(config).coarse_by_case == make_data_module(turned).coarse_by_case


def test_a_patient_that_every_coarse_stage_has_seen_is_refused(
    compose: Callable[..., TrainConfig], table: Path, coarse_of_folds: list[Path]
) -> None:
    config = compose(*channel_arguments(table, coarse_of_folds[:1]))
    with pytest.raises(UserError, match="have trained on the patient"):
        make_data_module(config)


def test_coarse_stages_of_other_cases_are_refused(
    compose: Callable[..., TrainConfig],
    table: Path,
    coarse_of_folds: list[Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(assemble, "trained_cases", lambda *_: ["other"])
    with pytest.raises(UserError, match="has trained on none of these cases"):
        make_data_module(compose(*channel_arguments(table, coarse_of_folds)))


@pytest.mark.parametrize("turned", [False, True])
def test_of_several_coarse_stages_that_have_not_seen_a_patient_the_first_one_is_taken(
    turned: bool,
    compose: Callable[..., TrainConfig],
    table: Path,
    coarse_of_folds: list[Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, other = coarse_of_folds
    again = first.with_name("again.ckpt")
    again.touch()
    trained_cases = assemble.trained_cases
    monkeypatch.setattr(
        assemble,
        "trained_cases",
        lambda path, key: trained_cases(first if path == again else path, key),
    )
    paths = [again, other, first] if turned else [first, other, again]
    stage_by_case = make_data_module(compose(*channel_arguments(table, paths))).coarse_by_case
    assert set(stage_by_case.values()) == {str(paths[0]), str(other)}


@pytest.mark.parametrize(
    ("overrides", "has_many_shapes"),
    [
        (["stage=coarse"], True),
        (["stage=fine", "stage.patch_size=[16,16,16]"], False),
        (["spacing=fixed_size", "spacing.size=[16,16,32]"], False),
    ],
)
def test_the_compiler_is_told_whether_the_shapes_of_samples_vary(
    overrides: list[str],
    has_many_shapes: bool,
    compose: Callable[..., TrainConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values: list[bool] = []

    def switch_on(network: Any, *_: Any, has_many_shapes: bool, **__: Any) -> Any:
        values.append(has_many_shapes)
        return network

    monkeypatch.setattr(assemble, "switch_on", switch_on)
    config = compose(*overrides)
    make_module(config, make_network(config), {})
    assert values == [has_many_shapes]


def test_pictures_name_the_classes_that_the_network_of_the_stage_has(
    compose: Callable[..., TrainConfig],
) -> None:
    assert make_views(compose("stage=coarse")) == [View({1: "left_lung", 2: "right_lung"}, False)]
    with_helper = make_views(compose("stage=fine", "+task.labels.airway=3"))
    assert with_helper == [
        View({1: "left_lung"}, False),
        View({1: "right_lung"}, True),
    ], "a helper label would have a row of the same name in each region"
    assert make_views(compose("stage=fine")) == [
        View({1: "left_lung"}, False),
        View({1: "right_lung"}, True),
    ]


def test_the_metadata_of_a_stage_say_what_prediction_needs(
    compose: Callable[..., TrainConfig],
) -> None:
    fine = compose("stage=fine", "stage.region_margin_mm=7.5", "inference.tile_size=[16,32,48]")
    described = make_metadata(fine, {"name": "x"})
    assert described["config"] == {"name": "x"}
    assert described["region_margin_mm"] == 7.5
    assert described["tile_size"] == [16, 32, 48]
    assert described["num_classes"] == 2
    assert described["coarse_channel"] is False
    coarse = make_metadata(compose("stage=coarse"), {})
    assert (coarse["region_margin_mm"], coarse["num_classes"]) == (0.0, 3)
    assert coarse["coarse_channel"] is False
    assert "coarse_channel" not in make_metadata(compose("stage=single"), {})


def test_gpus_are_balanced_by_activations_and_all_that_an_optimiser_keeps_of_the_weights(
    compose: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """AdamW keeps two numbers for each weight beside the weight and its gradient."""
    planned_sizes: list[dict[str, int]] = []
    counted: list[Any] = []
    count_step = assemble.count_step

    def count(*args: Any, **kwargs: Any) -> Any:
        counted.append(count_step(*args, **kwargs))
        return counted[-1]

    def plan(sizes: dict[str, int], gpus: dict[str, int]) -> dict[str, str]:
        planned_sizes.append(sizes)
        return dict.fromkeys(sizes, next(iter(gpus)))

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=2**30)
    )
    monkeypatch.setattr(assemble, "count_step", count)
    monkeypatch.setattr(assemble, "plan_device_map", plan)
    config = compose("stage=fine", "model.device_map=auto", "stage.patch_size=[16,16,16]")
    config.optimizer = {"_target_": "torch.optim.AdamW", "lr": 0.1}
    make_device_map(config)
    ((memory,), (sizes,)) = counted, planned_sizes
    saved = sum(memory.saved.get(name, 0) for name in sizes)
    assert sum(sizes.values()) - saved == pytest.approx(4 * memory.parameters, rel=0.01)
