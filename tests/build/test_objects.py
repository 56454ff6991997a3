"""From configuration to objects: what the parts' own tests do not see."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import hydra
import pytest
import torch

from medseg.build import objects as build
from medseg.config.check import to_config
from medseg.config.folder import conf_dir
from medseg.config.schema import TrainConfig
from medseg.config.signature import plain
from medseg.errors import UserError
from medseg.weights.files import write_weights


def compose(*overrides: str) -> TrainConfig:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return to_config(hydra.compose("train", [*overrides, "run_dir=x"]), TrainConfig)


@pytest.mark.parametrize(("precision", "is_last"), [("bf16", True), ("fp32", False)])
def test_half_precision_is_run_channels_last(precision: str, is_last: bool, tmp_path: Path) -> None:
    config = compose("stage=fine", "model.width=4")
    network = build.make_network(build.model_arguments(config), build.make_task(config.task), build.region_mode_of(config))
    path = tmp_path / "w.safetensors"
    write_weights(path, build.make_card(config, plain(config)), network.state_dict())
    stage = build.load_stage(path, "fine", torch.device("cpu"), precision)
    assert stage.precision == precision
    layouts = [
        weight.is_contiguous(memory_format=torch.channels_last_3d) for weight in stage.network.parameters() if weight.ndim == 5
    ]
    assert all(layouts) is is_last
    image = torch.randn(1, 1, 32, 32, 32)
    logits = stage.network(image, torch.tensor([0]))
    torch.testing.assert_close(logits, network(image, torch.tensor([0])), rtol=1e-4, atol=1e-4)


def test_weights_from_before_an_argument_of_the_network_are_taken(tmp_path: Path) -> None:
    path, small = tmp_path / "w.safetensors", ["stage=fine", "model.width=4"]
    config = compose(*small)

    def network(config: TrainConfig) -> torch.nn.Module:
        return build.make_network(build.model_arguments(config), build.make_task(config.task), build.region_mode_of(config))

    old, new = network(config), network(config)
    card = build.make_card(config, plain(config))
    del card["model"]["refine"]
    write_weights(path, card, old.state_dict())
    build.begin_with_weights(new, compose(*small, f"init_from='{path}'"))  # type: ignore[arg-type]
    assert all(torch.equal(weight, old.state_dict()[name]) for name, weight in new.state_dict().items())
    other = compose(*small, "model.refine=4", f"init_from='{path}'")
    with pytest.raises(UserError, match="give the same model"):
        build.begin_with_weights(network(other), other)  # type: ignore[arg-type]


def test_checkpoints_of_one_recipe_are_averaged_and_others_refused(tmp_path: Path) -> None:
    paths = []
    for number, overrides in enumerate(([], [], ["spacing=isotropic_2mm"])):
        config = compose("stage=fine", f"model.width={4 + 4 * number}", *overrides)
        network = build.make_network(build.model_arguments(config), build.make_task(config.task), build.region_mode_of(config))
        paths.append(tmp_path / f"{number}.safetensors")
        write_weights(paths[-1], build.make_card(config, plain(config)), network.state_dict())
    cpu = torch.device("cpu")
    one, wide = (build.load_stages([path], "fine", cpu) for path in paths[:2])
    both = build.load_stages(paths[:2], "fine", cpu)
    assert [len(stage.others) for stage in (one, both)] == [0, 1]
    # Widths may differ; the wider network decides what fits.
    assert both.bytes_per_voxel == max(one.bytes_per_voxel, wide.bytes_per_voxel) > one.bytes_per_voxel
    with pytest.raises(UserError, match=r"cannot be averaged: spacing_mm is \(1\.0, 1\.0, 1\.0\) in the one and \(2\.0"):
        build.load_stages([paths[0], paths[2]], "fine", cpu)


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, *sizes: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(sizes))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=sizes[index]))


@pytest.mark.parametrize(
    ("device_map", "said"),
    [
        ("{encoder: cuda:0, decoder: cuda:3}", "model.device_map: there is no cuda:3 here; there are cpu, cuda:0"),
        ("{enkoder: cpu}", "model.device_map names 'enkoder', which is no part of the network; the parts are "),
        ("auto", "model.device_map=auto divides a network among GPUs, and torch sees 1"),
    ],
)
def test_a_device_map_that_fits_nothing_is_refused(device_map: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 2**30)
    with pytest.raises(UserError) as refused:
        build.device_places(compose(f"model.device_map={device_map}"))
    assert said in str(refused.value)


def test_an_automatic_device_map_balances_what_a_step_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose("model.device_map=auto", "stage=fine", "stage.patch_size=[64,64,64]")
    pretend_gpus(monkeypatch, 2**30, 2**30)
    even = build.device_places(config)
    assert next(iter(even)) == "stem"
    assert list(even)[-1] == "head"
    assert list(even.values()) == sorted(even.values())
    assert set(even.values()) == {"cuda:0", "cuda:1"}
    pretend_gpus(monkeypatch, 2**30, 2**34)
    uneven = build.device_places(config)
    assert list(uneven.values()).count("cuda:0") < list(even.values()).count("cuda:0"), "the small one gets less"
