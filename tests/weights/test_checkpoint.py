"""A checkpoint is loaded whole and as data, or refused in one sentence."""

from __future__ import annotations

import copy
import io
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import pytest
import torch

from medseg import __version__
from medseg.cascade.load import load_stage
from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.errors import UserError
from medseg.training.assemble import make_metadata
from medseg.training.network import make_network
from medseg.training.options import TrainConfig
from medseg.weights.files import load_checkpoint, read_weights

Checkpoint = dict[str, Any]


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    """What a training of the coarse stage saves, before its first step."""
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = to_config(
            hydra.compose(
                "train",
                [
                    "stage=coarse",
                    "run_dir=x",
                    "model.width=4",
                    "model.depth=2",
                    "model.blocks_per_level=[1,1,1]",
                ],
            ),
            TrainConfig,
        )
    network = make_network(config)
    weights = {f"network.{name}": value for name, value in network.state_dict().items()}
    return {"state_dict": weights, "medseg": make_metadata(config, {"seed": 1}), "global_step": 3}


def load(path: Path, stage: str = "coarse") -> Any:
    return load_stage(path, stage, torch.device("cpu"))


def told(path: Path, stage: str = "coarse") -> str:
    """The sentence with which a checkpoint is refused, its folder left out."""
    with pytest.raises(UserError) as caught:
        load(path, stage)
    assert str(caught.value).isprintable()
    return str(caught.value).replace(f"{path.parent}/", "")


def test_a_whole_one_is_loaded(checkpoint: Checkpoint, tmp_path: Path) -> None:
    torch.save(checkpoint, tmp_path / "a.ckpt")
    stage = load(tmp_path / "a.ckpt")
    for name, value in stage.network.state_dict().items():
        assert torch.equal(value, checkpoint["state_dict"][f"network.{name}"])


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.mark,))


def test_a_pickle_is_refused_and_not_run(checkpoint: Checkpoint, tmp_path: Path) -> None:
    mark, path = tmp_path / "it ran", tmp_path / "a.ckpt"
    objects = "that could execute arbitrary code when loaded; give a checkpoint that medseg wrote"
    torch.save({**checkpoint, "callbacks": Evil(mark)}, path)
    assert told(path).startswith("coarse=a.ckpt: refused, because it holds Python objects (")
    assert told(path).endswith(f") {objects}")
    path.write_bytes(pickle.dumps(Evil(mark)))
    assert told(path) == (
        "coarse=a.ckpt: not a whole torch checkpoint (File is not a zip file); give "
        "checkpoints/last.ckpt of a run, or weights that end in .safetensors"
    )
    torch.save({**checkpoint, "callbacks": Path("x")}, path)
    assert "it holds Python objects (pathlib.P" in told(path)
    assert not mark.exists()
    pickle.loads(pickle.dumps(Evil(mark)))
    assert mark.exists(), "it would have run"


def test_what_is_no_checkpoint(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    assert told(path) == "coarse=a.ckpt: there is no such checkpoint"
    path.mkdir()
    assert told(path) == (
        "coarse=a.ckpt: a folder without checkpoints/last.ckpt; give the checkpoint of a run, or "
        "weights that end in .safetensors"
    )
    (path / "SHA256SUMS").write_text(f"{'0' * 64}  lesion_single_fold_0.safetensors\n")
    assert told(path) == (
        "coarse=a.ckpt: a model folder; give a file in it (lesion_single_fold_0.safetensors), or "
        "predict with weights=<folder>"
    )
    (path / "checkpoints").mkdir()
    (path / "checkpoints" / "last.ckpt").touch()
    assert (
        told(path) == "coarse=a.ckpt: a folder; give its checkpoint, a.ckpt/checkpoints/last.ckpt"
    )
    shutil.rmtree(path)
    for content in (b"", b"<html>404</html>", bytes(5000), b'{"input": "ct.nii.gz"}'):
        path.write_bytes(content)
        assert told(path) == (
            "coarse=a.ckpt: not a whole torch checkpoint (File is not a zip file); give "
            "checkpoints/last.ckpt of a run, or weights that end in .safetensors"
        )
    np.savez(tmp_path / "a.npz", x=np.zeros(3))
    (tmp_path / "a.npz").rename(path)
    assert told(path).startswith("coarse=a.ckpt: not a whole torch checkpoint (")
    assert told(path).endswith("); give one that medseg wrote")
    torch.save(torch.zeros(3), path)
    assert (
        told(path)
        == "coarse=a.ckpt: not a checkpoint of medseg, but a Tensor; give one that medseg wrote"
    )
    torch.save({"state_dict": {}}, path)
    assert told(path) == (
        "coarse=a.ckpt: not a checkpoint of medseg; train one with `python train.py stage=coarse`"
    )
    torch.save(checkpoint, path, _use_new_zipfile_serialization=False)
    assert told(path) == (
        "coarse=a.ckpt: not a whole torch checkpoint (File is not a zip file); give "
        "checkpoints/last.ckpt of a run, or weights that end in .safetensors"
    )


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compressed_parts_are_refused_before_they_are_unpacked(method: int, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    name, content = "archive/data.pkl", np.random.default_rng(0).bytes(1000)
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr(name, content)
    # The first bytes after the header of the part are its compressed content.
    packed = bytearray(path.read_bytes())
    begin = packed.index(name.encode()) + len(name)
    packed[begin : begin + 40] = bytes(40)
    path.write_bytes(packed)
    assert told(path) == (
        "coarse=a.ckpt: not a whole torch checkpoint (it has compressed parts); copy it again"
    )


@pytest.mark.skipif(not Path("/proc/self/mem").is_file(), reason="needs a file that cannot be read")
def test_a_file_that_cannot_be_read() -> None:
    sentence = told(Path("/proc/self/mem"))
    assert sentence.startswith("coarse=mem: not a whole torch checkpoint (")
    assert sentence.endswith("); check its permissions and its disk")


def test_full_memory_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.ckpt"
    torch.save({}, path)

    def load(*_: Any, **__: Any) -> None:
        raise RuntimeError("unable to mmap 10 bytes from file <a>: Cannot allocate memory (12)")

    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(RuntimeError, match="Cannot allocate memory"):
        load_checkpoint(path, "fine=a.ckpt")


@pytest.mark.parametrize("part", [0.1, 0.5, 0.99, 0.9999])
def test_a_truncated_one(checkpoint: Checkpoint, tmp_path: Path, part: float) -> None:
    path = tmp_path / "a.ckpt"
    torch.save(checkpoint, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(part * len(whole))])
    assert (
        told(path)
        == "coarse=a.ckpt: not a whole torch checkpoint (File is not a zip file); copy it again"
    )


def test_a_flipped_bit_among_the_weights_is_found(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path, name = tmp_path / "a.ckpt", "network.networks.0.head.conv.bias"
    state = checkpoint["state_dict"] | {name: torch.full_like(checkpoint["state_dict"][name], 3.0)}
    torch.save({**checkpoint, "state_dict": state}, path)
    data = path.read_bytes()
    threes = np.full(state[name].numel(), 3.0, "<f4").tobytes()
    assert data.count(threes) == 1
    at = data.index(threes)
    path.write_bytes(data[:at] + b"\1" + data[at + 1 :])
    assert torch.load(path, weights_only=True)["state_dict"][name][0] != 3.0, (
        "torch takes it for a weight"
    )
    assert told(path).startswith(
        "coarse=a.ckpt: not a whole torch checkpoint (the checksum of its part 'a/data/"
    )
    assert told(path).endswith("' is wrong); copy it again")


def test_a_part_that_is_too_short_takes_no_bytes_of_the_next(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    path = tmp_path / "a.ckpt"
    torch.save(checkpoint, path)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    largest = max(parts, key=lambda name: len(parts[name]) * ("/data/" in name))
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content[:-4] if name == largest else content)
    assert told(path) == (
        "coarse=a.ckpt: the sizes of its weights do not match the parts of the file; take "
        "another copy"
    )


def test_the_wrong_stage_and_another_format(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    torch.save(checkpoint, path)
    assert (
        told(path, "fine")
        == "fine=a.ckpt: this is a checkpoint of the coarse stage; a fine one is needed"
    )
    torch.save({**checkpoint, "medseg": {**checkpoint["medseg"], "format": 99}}, path)
    assert told(path) == (
        f"coarse=a.ckpt: format 99, but medseg {__version__} reads format 1; use the version "
        "that wrote it"
    )
    torch.save({**checkpoint, "medseg": {**checkpoint["medseg"], "format": "9" * 1000}}, path)
    assert told(path).startswith(f"coarse=a.ckpt: format {'9' * 40}, but medseg")


def test_weights_that_are_no_numbers_or_do_not_fit(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path, name = tmp_path / "a.ckpt", "network.networks.0.head.conv.bias"
    state = checkpoint["state_dict"]
    for value in (torch.nan, -torch.inf):
        # A single one among finite numbers.
        weights = state[name].clone()
        weights[-1] = value
        torch.save({**checkpoint, "state_dict": {**state, name: weights}}, path)
        assert told(path) == (
            "coarse=a.ckpt: its weights networks.0.head.conv.bias hold NaN or infinity, so its "
            "training went wrong; take an "
            "earlier checkpoint"
        )
    torch.save({**checkpoint, "state_dict": {**state, name: 3}}, path)
    assert told(path) == (
        "coarse=a.ckpt: its weights networks.0.head.conv.bias are no tensor, but a int; take "
        "another copy"
    )
    torch.save({**checkpoint, "state_dict": {**state, name: torch.zeros(77)}}, path)
    assert told(path).startswith(
        "coarse=a.ckpt: its weights do not fit the network of its metadata ("
    )
    torch.save(
        {**checkpoint, "state_dict": {key: value for key, value in state.items() if key != name}},
        path,
    )
    assert told(path).startswith(
        "coarse=a.ckpt: its weights do not fit the network of its metadata ("
    )


CARD_KEYS = ("stage", "task", "spacing_mm", "tile_size", "region_margin_mm", "precision", "model")


@pytest.mark.parametrize("key", CARD_KEYS)
@pytest.mark.parametrize("value", ["missing", None, "x", 5, [1], {}])
def test_damaged_metadata(checkpoint: Checkpoint, tmp_path: Path, key: str, value: Any) -> None:
    path = tmp_path / "a.ckpt"
    damaged = copy.deepcopy(checkpoint)
    if value == "missing":
        del damaged["medseg"][key]
    else:
        damaged["medseg"][key] = value
    torch.save(damaged, path)
    if (key, value) in [("tile_size", None), ("tile_size", {}), ("region_margin_mm", 5)] or (
        key,
        value,
    ) == ("model", {}):
        return  # those mean something
    sentence = told(path)
    if key == "stage":
        assert sentence.endswith("stage; a coarse or single one is needed")
    else:
        assert sentence.startswith(
            "coarse=a.ckpt: its metadata are damaged or of another version ("
        )
        assert sentence.endswith("); take another copy")


@pytest.mark.parametrize("value", ["missing", None, "whole", "mirrored"])
def test_region_modes_of_older_checkpoints_that_are_left(
    checkpoint: Checkpoint, tmp_path: Path, value: Any
) -> None:
    path = tmp_path / "a.ckpt"
    metadata = {key: item for key, item in checkpoint["medseg"].items() if key != "region_mode"}
    if value != "missing":
        metadata["region_mode"] = value
    torch.save({**checkpoint, "medseg": metadata}, path)
    assert load(path).name == "coarse"


@pytest.mark.parametrize("stage", ["coarse", "single"])
def test_a_single_stage_is_called_so_also_in_older_checkpoints(stage: str, tmp_path: Path) -> None:
    """Older metadata call it coarse; a task without regions tells."""
    small = ["model.width=4", "model.depth=2", "model.blocks_per_level=[1,1,1]"]
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = to_config(
            hydra.compose("train", ["stage=single", "task=abdomen", "run_dir=x", *small]),
            TrainConfig,
        )
    path = tmp_path / "a.ckpt"
    weights = {
        f"network.{name}": value for name, value in make_network(config).state_dict().items()
    }
    torch.save(
        {
            "state_dict": weights,
            "medseg": {**make_metadata(config, {}), "stage": stage},
            "global_step": 1,
        },
        path,
    )
    assert make_metadata(config, {})["stage"] == "single"
    assert load(path, "coarse").name == "single"
    assert (
        told(path, "fine")
        == f"fine=a.ckpt: this is a checkpoint of the {stage} stage; a fine one is needed"
    )


@pytest.mark.parametrize("value", ["separate", "side_input", 5, [1], {}])
def test_another_region_mode_is_refused(checkpoint: Checkpoint, tmp_path: Path, value: Any) -> None:
    path = tmp_path / "a.ckpt"
    torch.save({**checkpoint, "medseg": {**checkpoint["medseg"], "region_mode": value}}, path)
    assert told(path) == (
        f"coarse=a.ckpt: its network treats regions in the mode {str(value)!r}, but medseg "
        f"{__version__} reads networks "
        "that mirror right regions (mirrored); use the version that wrote it, or train the "
        "stage again"
    )


@pytest.mark.parametrize("value", ["x", {}, [1]])
def test_damaged_values_of_the_task(checkpoint: Checkpoint, tmp_path: Path, value: Any) -> None:
    assert_damaged(checkpoint, "task", "least_hu", value, tmp_path / "a.ckpt")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("size", "x"),
        ("size", 1.5),
        ("size", [8, 8]),
        ("range_mm", []),
        ("range_mm", [1.0, 2.0, 3.0]),
    ],
)
def test_damaged_values_of_the_rule(
    checkpoint: Checkpoint, tmp_path: Path, key: str, value: Any
) -> None:
    assert_damaged(checkpoint, "grid_rule", key, value, tmp_path / "a.ckpt")


def assert_damaged(checkpoint: Checkpoint, group: str, key: str, value: Any, path: Path) -> None:
    damaged = copy.deepcopy(checkpoint)
    damaged["medseg"][group][key] = value
    torch.save(damaged, path)
    assert told(path).startswith("coarse=a.ckpt: its metadata are damaged or of another version (")


def fuzz(checkpoint: Checkpoint, folder: Path, count: int, seed: int) -> int:
    """Load damaged copies; gives how many were refused."""
    stream = io.BytesIO()
    torch.save(checkpoint, stream)
    whole, num_refused = stream.getvalue(), 0
    for number in range(count):
        rng = np.random.default_rng([seed, number])
        data, at, length = bytearray(whole), int(rng.integers(len(whole))), int(rng.integers(1, 60))
        way = int(rng.integers(6))
        if way <= 2:
            # Often in the directory at the end and in the pickle at the start, which say what all
            # else means.
            first, last = [(0, len(data)), (0, 6000), (len(data) - 6000, len(data))][way]
            for place in rng.integers(first, last, size=int(rng.integers(1, 4))):
                data[place] ^= 1 << int(rng.integers(8))
        elif way == 3:
            del data[at:]
        elif way == 4:
            data[at : at + length] = rng.bytes(length)
        else:
            del data[at : at + length]
        path = folder / f"{number}.ckpt"
        path.write_bytes(data)
        try:
            metadata, weights = read_weights(path, "coarse", "coarse")
        except UserError as error:
            refused = str(error)
        else:
            refused = ""
            assert metadata == checkpoint["medseg"]
            assert all(
                torch.equal(value, checkpoint["state_dict"][f"network.{name}"])
                for name, value in weights.items()
            )
            assert len(weights) == len(checkpoint["state_dict"])
        if refused:
            assert refused.startswith(f"coarse={path}: ")
            assert len(refused) < len(str(path)) + 500
            assert refused.isprintable()
            num_refused += 1
        path.unlink()
    return num_refused


def test_a_damaged_one_is_the_same_or_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    assert 20 < fuzz(checkpoint, tmp_path, 200, 1) < 200


@pytest.mark.thorough
@pytest.mark.slow
def test_many_damaged_ones_are_the_same_or_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    fuzz(checkpoint, tmp_path, 2000, 2)
