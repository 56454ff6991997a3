"""Hostile weights: each file is refused in one sentence, within seconds and little memory."""

from __future__ import annotations

import copy
import io
import json
import math
import resource
import struct
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch
from safetensors.torch import save

from medseg.cascade.load import load_stage
from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.errors import UserError
from medseg.runs.signature import plain
from medseg.training.assemble import make_metadata
from medseg.training.network import make_network
from medseg.training.options import TrainConfig

pytestmark = pytest.mark.slow
LIMIT_S = 60.0
LIMIT_BYTES = 2**30
HEAD = "network.networks.0.head.conv.bias"
Checkpoint = dict[str, Any]
Change = Callable[[Checkpoint], None]


@pytest.fixture(scope="module")
def whole() -> Checkpoint:
    """A checkpoint that loads."""
    overrides = [
        "stage=coarse",
        "run_dir=x",
        "model.width=4",
        "model.depth=2",
        "model.blocks_per_level=[1,1,1]",
    ]
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = to_config(hydra.compose("train", overrides), TrainConfig)
    weights = {
        f"network.{name}": value for name, value in make_network(config).state_dict().items()
    }
    return {"state_dict": weights, "medseg": make_metadata(config, plain(config))}


def put(*keys: Any, value: Any) -> Change:
    """Set one value of the metadata."""

    def change(checkpoint: Checkpoint) -> None:
        part = checkpoint["medseg"]
        for key in keys[:-1]:
            part = part[key]
        part[keys[-1]] = value

    return change


def weight(value: Any, name: Any = HEAD) -> Change:
    """Set one of the weights."""
    return lambda checkpoint: checkpoint["state_dict"].update({name: value})


def doubled(depth: int) -> Any:
    """Nested lists that stand for 2**depth values and take a few bytes each."""
    value: Any = [0]
    for _ in range(depth):
        value = [value, value]
    return value


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = {"a": value}
    return value


def many_views(checkpoint: Checkpoint) -> None:
    base = torch.zeros(2**20)
    checkpoint["state_dict"].update(
        {f"network.{number}": base.view(2**20) for number in range(5000)}
    )


SPARSE = torch.sparse_coo_tensor(torch.zeros(1, 1, dtype=torch.long), torch.ones(1), (2**40,))
CSR = torch.sparse_csr_tensor(
    torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([1.0]), (1, 2**40)
)
HOSTILE: dict[str, Change] = {
    **{
        f"spacing {value}": put("spacing_mm", value=[value, 1.0, 1.0])
        for value in (
            0.0,
            -1.0,
            math.nan,
            math.inf,
            1e-6,
            1e9,
            "1",
            None,
            [1.0],
            10**400 // 10**380,
        )
    },
    "spacing of two axes": put("spacing_mm", value=[1.0, 1.0]),
    "spacing that is no list": put("spacing_mm", value=1.0),
    "window reversed": put("task", "window_hu", value=[400.0, -1000.0]),
    "window empty": put("task", "window_hu", value=[100.0, 100.0]),
    "window of letters": put("task", "window_hu", value="ab"),
    "window of three numbers": put("task", "window_hu", value=[-1000.0, 400.0, 500.0]),
    "window that is a number": put("task", "window_hu", value=400.0),
    "margin of letters": put("region_margin_mm", value="wide"),
    "tile of letters": put("tile_size", value="abc"),
    "spacing of letters": put("spacing_mm", value="abc"),
    "least volume of letters": put("min_ml", value="much"),
    "window not a number": put("task", "window_hu", value=[math.nan, 100.0]),
    "window infinite": put("task", "window_hu", value=[-1000.0, math.inf]),
    **{
        f"margin {value}": put("region_margin_mm", value=value)
        for value in (-1.0, math.nan, math.inf, 1e9)
    },
    **{
        f"tile {value}": put("tile_size", value=value)
        for value in ([0, 64, 64], [-8, 64, 64], [10**6] * 3, [64.5, math.nan, 64], [64, 64])
    },
    "crops of a petavoxel": put("grid_rule", "size", value=[10**5] * 3),
    "crops of no voxel": put("grid_rule", "size", value=[0, 0, 0]),
    "range reversed": put("grid_rule", "range_mm", value=[3.0, 1.0]),
    "range from zero": put("grid_rule", "range_mm", value=[0.0, 1.0]),
    "unknown rule": put("grid_rule", "shape", value=[1, 1, 1]),
    "a million blocks": put("model", "blocks_per_level", value=[10**6, 1, 1]),
    "a thousand blocks": put("model", "blocks_per_level", value=[1000, 1, 1]),
    "a million levels": put("model", "depth", value=10**6),
    "ninety levels": put("model", "depth", value=90),
    "no levels": put("model", "depth", value=-1),
    "a list of a million levels": put("model", "blocks_per_level", value=[0] * 10**6),
    "width beyond the memory": put("model", "width", value=60000),
    "width beyond any number": put("model", "width", value=2**62),
    "width of no channel": put("model", "width", value=0),
    "width that is no number": put("model", "width", value=math.nan),
    "unknown argument": put("model", "evil", value=1),
    "unknown norm": put("model", "norm", value="__import__('os')"),
    "strides of zero": put("model", "strides", value=[[0, 0, 0]] * 3),
    "strides of a million": put("model", "strides", value=[[10**6] * 3] * 3),
    "no labels": put("task", "labels", value={}),
    "labels that are lists": put("task", "labels", value={"left_lung": [1]}),
    "region without a label": put("task", "regions", 0, "labels", value=["heart"]),
    "unknown region mode": put("region_mode", value="everything"),
    "unknown precision": put("precision", value="fp4"),
    "unknown filter": put("resampling", value="evil"),
    "unknown stage": put("stage", value="\x1b[31mred" * 1000),
    "a format of a million digits": put("format", value=10**100_000),
    "metadata of 2^40 values": put("task", "labels", value=doubled(40)),
    "a configuration of 2^40 values": put("config", value=doubled(40)),
    "metadata nested 200 deep": put("task", value=nested(200)),
    "a text of 10 MB": put("task", "name", value="x" * 10**7),
    "a tensor in the metadata": put("spacing_mm", value=torch.ones(3)),
    "metadata that are a list": lambda checkpoint: checkpoint.update(medseg=["format"]),
    "sparse weights of 4 TB": weight(SPARSE),
    "sparse rows of 4 TB": weight(CSR),
    "expanded weights of 4 TB": weight(torch.zeros(1).expand(2**40)),
    "expanded weights of the right shape": weight(torch.zeros(1).expand(3)),
    "weights without storage": weight(torch.zeros(2**40, device="meta")),
    "shared weights": many_views,
    "weights of 8 bits": weight(torch.zeros(3).to(torch.float8_e4m3fn)),
    "complex weights": weight(torch.zeros(3, dtype=torch.complex64)),
    "quantised weights": weight(torch.quantize_per_tensor(torch.zeros(3), 1.0, 0, torch.quint8)),
    "weights that are infinite": weight(torch.full((3,), math.inf)),
    "weights that are text": weight("evil"),
    "weights with a name of a million letters": weight(torch.zeros(3), "network." + "x" * 10**6),
    "weights with a name of control characters": weight(
        torch.full((3,), math.nan), "network.\x1b[31m\n"
    ),
    "weights of another shape": weight(torch.zeros(3, 1, 1)),
    "no weights": lambda checkpoint: checkpoint.update(state_dict={}),
    "weights that are a list": lambda checkpoint: checkpoint.update(state_dict=[torch.zeros(3)]),
}


def refused(path: Path) -> str:
    """The sentence with which a file is refused, within the limits of time and memory."""
    before, start_s = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, time.monotonic()
    with pytest.raises(UserError) as caught:
        load_stage(path, "coarse", torch.device("cpu"))
    assert time.monotonic() - start_s < LIMIT_S
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before < LIMIT_BYTES
    sentence = str(caught.value)
    assert sentence.startswith(f"coarse={path}: ")
    assert sentence.isprintable()
    assert len(sentence) < len(str(path)) + 700
    return sentence


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_checkpoint_is_refused(whole: Checkpoint, name: str, tmp_path: Path) -> None:
    checkpoint = {"state_dict": dict(whole["state_dict"]), "medseg": copy.deepcopy(whole["medseg"])}
    HOSTILE[name](checkpoint)
    path = tmp_path / "a.ckpt"
    torch.save(checkpoint, path)
    refused(path)


def header(metadata: str, tensors: dict[str, Any], data: bytes = b"") -> bytes:
    """Content of a safetensors file."""
    text = json.dumps({"__metadata__": {"medseg": metadata}, **tensors}).encode()
    return struct.pack("<Q", len(text)) + text + data


SAFETENSORS = {
    "metadata nested a hundred thousand deep": lambda plain: header("[" * 10**5, {}),
    "a number of a million digits": lambda plain: header('{"format": 1' + "0" * 10**6 + "}", {}),
    "a tensor of 4 TB": lambda plain: header(
        plain, {"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}
    ),
    "a header of 4 TB": lambda plain: struct.pack("<Q", 2**42) + b"{}",
    "overlapping tensors": lambda plain: header(
        plain,
        {name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for name in "ab"},
        bytes(4),
    ),
    "metadata that are no JSON": lambda plain: header("{'format': 1}", {}),
    "not a number": lambda plain: save({"a": torch.tensor([math.nan])}, {"medseg": plain}),
    "a million names": lambda plain: header(
        plain,
        {
            str(number): {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
            for number in range(10**5)
        },
    ),
}


@pytest.mark.parametrize("name", SAFETENSORS)
def test_a_hostile_safetensors_file_is_refused(
    whole: Checkpoint, name: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(SAFETENSORS[name](json.dumps(whole["medseg"])))
    refused(path)


def packed(num_bytes: int) -> bytes:
    """A zip archive whose one part unpacks to many bytes."""
    stream = io.BytesIO()
    with (
        zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("a/data.pkl", "w", force_zip64=True) as part,
    ):
        for _ in range(num_bytes // 2**20):
            part.write(bytes(2**20))
    return stream.getvalue()


@pytest.mark.parametrize(
    "make_content",
    [lambda: packed(2**31), lambda: packed(2**20)[:-30], lambda: b"PK\x05\x06" + bytes(18)],
    ids=["bomb", "cut", "empty"],
)
def test_a_hostile_archive_is_refused(make_content: Callable[[], bytes], tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    path.write_bytes(make_content())
    refused(path)


def test_the_unchanged_checkpoint_loads(whole: Checkpoint, tmp_path: Path) -> None:
    torch.save(whole, tmp_path / "a.ckpt")
    assert load_stage(tmp_path / "a.ckpt", "coarse", torch.device("cpu")).spacing_mm == (
        2.0,
        2.0,
        2.0,
    )
