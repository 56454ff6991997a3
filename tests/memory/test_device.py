"""Device maps: named devices and parts must exist; `auto` balances the bytes of a step."""

from __future__ import annotations

from types import SimpleNamespace

import hydra
import pytest
import torch

from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.errors import UserError
from medseg.memory import device
from medseg.training import data_module
from medseg.training.assemble import make_device_map
from medseg.training.data_module import propose_workers
from medseg.training.options import TrainConfig


def compose(*overrides: str) -> TrainConfig:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return to_config(hydra.compose("train", [*overrides, "run_dir=x"]), TrainConfig)


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, *sizes: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(sizes))
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: SimpleNamespace(total_memory=sizes[index]),
    )


@pytest.mark.parametrize(
    ("device_map", "said"),
    [
        (
            "{encoder: cuda:0, decoder: cuda:3}",
            "model.device_map: there is no cuda:3 here; there are cpu, cuda:0",
        ),
        (
            "{enkoder: cpu}",
            "model.device_map names 'enkoder', which is no part of the network; the parts are ",
        ),
        ("auto", "model.device_map=auto divides a network among GPUs, and torch sees 1"),
    ],
)
def test_a_device_map_that_fits_nothing_is_refused(
    device_map: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpus(monkeypatch, 2**30)
    with pytest.raises(UserError) as refused:
        make_device_map(compose(f"model.device_map={device_map}"))
    assert said in str(refused.value)


def test_an_automatic_device_map_balances_what_a_step_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = compose("model.device_map=auto", "stage=fine", "stage.patch_size=[64,64,64]")
    pretend_gpus(monkeypatch, 2**30, 2**30)
    even = make_device_map(config)
    assert next(iter(even)) == "stem"
    assert list(even)[-1] == "head"
    assert list(even.values()) == sorted(even.values())
    assert set(even.values()) == {"cuda:0", "cuda:1"}
    pretend_gpus(monkeypatch, 2**30, 2**34)
    uneven = make_device_map(config)
    assert list(uneven.values()).count("cuda:0") < list(even.values()).count("cuda:0"), (
        "the small one gets less"
    )


@pytest.mark.parametrize(
    ("kind", "num_gpus", "expected"),
    [("cpu", 4, 1), ("cuda", 1, 8), ("cuda", 4, 3), ("cuda", 8, 1), ("cuda", 16, 1)],
)
def test_loader_processes_share_sixteen_processors_with_the_ranks(
    kind: str, num_gpus: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_module, "pick_device", lambda _: torch.device(kind))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)), raising=False)
    assert (
        propose_workers(
            compose("trainer=ddp", "stage.batch_size=16", f"trainer.devices={num_gpus}")
        )
        == expected
    )


def test_the_libraries_start_with_a_convolution_in_each_format(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    formats = []
    convolve = torch.nn.functional.conv3d

    def noted(image: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        formats.append(image.dtype)
        if image.dtype == torch.float16:
            raise RuntimeError("a device without fp16")
        return convolve(image, weight)

    monkeypatch.setattr(device.functional, "conv3d", noted)
    device.start_libraries(torch.device("cpu"))
    assert formats == [torch.float32, torch.float16, torch.bfloat16]
