"""Weight files that are archives of something else: pickles, other parts, wrong metadata types."""

from __future__ import annotations

import copy
import functools
import io
import itertools
import json
import operator
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attack_tools import sentence
from safetensors.torch import save
from test_weights import Checkpoint, refused
from test_weights import whole as whole

from medseg.cascade.load import load_stage
from medseg.cascade.localise import localise
from medseg.errors import UserError, is_out_of_memory
from medseg.geometry.grid import VoxelGrid

pytestmark = pytest.mark.slow


def parts_of(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def archived(
    parts: dict[str, bytes] | list[tuple[str, bytes]], method: int = zipfile.ZIP_STORED
) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, content in parts.items() if isinstance(parts, dict) else parts:
            archive.writestr(name, content)
    return stream.getvalue()


class Call:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> Any:
        return self.function, self.arguments


def pickled_calls(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Checkpoints in whose pickle something is called."""
    mark = folder / "hacked"
    for name, call in {
        "eval": Call(eval, f"open({str(mark)!r}, 'w')"),
        "exec": Call(exec, f"open({str(mark)!r}, 'w')"),
        "open": Call(open, str(mark), "w"),
        "touch": Call(Path.touch, mark),
        "getattr": Call(getattr, str, "join"),
        "import": Call(__import__, "antigravity"),
        "torch.load": Call(torch.load, str(mark)),
        "torch.hub": Call(torch.hub.load, str(folder), "x"),
        "nested pickle": Call(pickle.loads, pickle.dumps(Call(open, str(mark), "w"))),
        "a class": Call(torch.nn.Linear, 2**16, 2**16),
        "a storage": Call(torch.UntypedStorage, 2**40),
    }.items():
        for place in ("state_dict", "medseg", "hparams"):
            stream = io.BytesIO()
            torch.save({"state_dict": {}, "medseg": {"format": 1}, place: call}, stream)
            yield f"{name} in {place}", stream.getvalue()


def test_nothing_is_called(tmp_path: Path) -> None:
    for name, data in pickled_calls(tmp_path):
        path = tmp_path / "a.ckpt"
        path.write_bytes(data)
        # Torch calls this function, which reserves addresses: as many as there are not, so that
        # memory runs out, or for bytes that are no weights.
        if name.startswith("a storage"):
            with pytest.raises((UserError, RuntimeError)) as caught:
                load_stage(path, "coarse", torch.device("cpu"))
            assert isinstance(caught.value, UserError) or is_out_of_memory(caught.value), name
        else:
            assert "Python objects" in refused(path), name
        path.unlink()
    assert not list(tmp_path.iterdir())


def test_archives_with_other_parts(whole: Checkpoint, tmp_path: Path) -> None:
    stream = io.BytesIO()
    torch.save(whole, stream)
    data, parts = stream.getvalue(), parts_of(stream.getvalue())
    names = list(parts)
    root = names[0].partition("/")[0]
    tensors = [name for name in names if "/data/" in name]
    largest = max(tensors, key=lambda name: len(parts[name]))
    archives: dict[str, bytes] = {
        "no pickle": archived(
            {name: part for name, part in parts.items() if not name.endswith("data.pkl")}
        ),
        "no version": archived(
            {name: part for name, part in parts.items() if not name.endswith("version")}
        ),
        "a tensor that is missing": archived(
            {name: part for name, part in parts.items() if name != largest}
        ),
        "a tensor that is short": archived({**parts, largest: parts[largest][:-4]}),
        "a tensor that is empty": archived({**parts, largest: b""}),
        "tensors in another folder": archived(
            {name.replace("/data/", "/other/"): part for name, part in parts.items()}
        ),
        "parts outside": archived({f"../{name}": part for name, part in parts.items()}),
        "absolute parts": archived({f"/{name}": part for name, part in parts.items()}),
        "parts of two roots": archived({**parts, "other/data.pkl": b"\x80\x02}."}),
        "a pickle twice": archived([*parts.items(), (f"{root}/data.pkl", b"\x80\x02}q\x00.")]),
        "packed parts": archived(parts, zipfile.ZIP_DEFLATED),
        "packed twice": archived({"a.ckpt": data}),
        "a pickle of nothing": archived({**parts, f"{root}/data.pkl": b"\x80\x02N."}),
        "a pickle that is cut": archived(
            {**parts, f"{root}/data.pkl": parts[f"{root}/data.pkl"][:50]}
        ),
        "a pickle that nests": archived(
            {**parts, f"{root}/data.pkl": b"\x80\x02" + b"]" * 10**6 + b"a" * (10**6 - 1) + b"."}
        ),
        "a pickle of marks": archived({**parts, f"{root}/data.pkl": b"\x80\x02" + b"(" * 10**7}),
        "a long integer": archived(
            {
                **parts,
                f"{root}/data.pkl": b"\x80\x02\x8b"
                + struct.pack("<i", 10**7)
                + b"\x7f" * 10**7
                + b".",
            }
        ),
        "a negative length": archived(
            {**parts, f"{root}/data.pkl": b"\x80\x02\x8b" + struct.pack("<i", -5) + b"."}
        ),
        "another order of bytes": archived({**parts, f"{root}/byteorder": b"big"}),
        "no order of bytes": archived({**parts, f"{root}/byteorder": b"middle"}),
        "a version of the future": archived(
            {**parts, f"{root}/version": b"99999999999999999999\n"}
        ),
        "a version of words": archived({**parts, f"{root}/version": b"three\n"}),
        "a comment behind": data + b"behind",
        "an old pickle": pickle.dumps({"state_dict": {}, "medseg": {"format": 1}}),
        "a text": b"state_dict: {}\n",
        **{
            f"the first {share} %": data[: len(data) * share // 100]
            for share in (1, 25, 50, 75, 99)
        },
        **{
            f"without byte {at}": data[:at] + data[at + 1 :]
            for at in (0, 10, 30, len(data) // 2, len(data) - 10)
        },
    }  # fmt: skip
    accepted = []
    for number, (name, content) in enumerate(archives.items()):
        path = tmp_path / f"{number}.ckpt"
        path.write_bytes(content)
        loaded: list[Any] = []
        if sentence(
            lambda path=path, loaded=loaded: loaded.append(
                load_stage(path, "coarse", torch.device("cpu"))
            )
        ):
            continue
        # What is taken must be the weights that were saved.
        accepted.append(name)
        for key, value in loaded[0].network.state_dict().items():
            assert torch.equal(value, whole["state_dict"][f"network.{key}"]), (
                f"{name}: other weights"
            )
    assert len(archives) - len(accepted) >= 25, accepted


WRONG: list[Any] = [
    None,
    "",
    "x" * 100,
    -1,
    0,
    1.5,
    True,
    [],
    {},
    [None],
    [[1]],
    {"a": 1},
    [1, 2, 3, 4, 5],
    -(10**18),
]


def test_metadata_of_wrong_types(whole: Checkpoint, tmp_path: Path) -> None:
    """Each value of the metadata is replaced: one sentence, or a stage that labels a scan."""
    faults, path = [], tmp_path / "a.ckpt"
    volume = torch.linspace(-1000, 300, 24 * 26 * 28).view(24, 26, 28).numpy()
    grid = VoxelGrid(volume.shape, (4.0, 4.0, 4.0))
    places = [place for place in leaves(whole["medseg"]) if place[0] not in ("config", "versions")]
    attacks = list(itertools.product(places, WRONG))
    for place, wrong in attacks:
        changed = {"state_dict": whole["state_dict"], "medseg": copy.deepcopy(whole["medseg"])}
        functools.reduce(operator.getitem, place[:-1], changed["medseg"])[place[-1]] = wrong
        torch.save(changed, path)
        try:
            stage = load_stage(path, "coarse", torch.device("cpu"))
            found = localise([volume] * len(stage.task.channels), grid, stage)
            assert (found.labels <= len(stage.task.labels)).all()
        except UserError as error:
            faults += [f"{place}={wrong!r}: {error}"] * (
                "\n" in str(error) or len(str(error)) > 1000
            )
        except Exception as error:  # any of them is a fault
            faults.append(f"{place}={wrong!r}: {type(error).__name__}: {error}")
    assert not faults, "\n".join(faults)
    print(len(attacks), "values")
    assert len(attacks) > 250


def leaves(node: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, part in (
        node.items()
        if isinstance(node, dict)
        else enumerate(node)
        if isinstance(node, list)
        else ()
    ):
        yield (*place, key)
        yield from leaves(part, (*place, key))


def hostile_headers(plain: str) -> dict[str, Callable[[], bytes]]:
    def raw(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        return struct.pack("<Q", len(text) if length is None else length) + text + data

    meta = {"__metadata__": {"medseg": plain}}
    one = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    return {
        "no metadata": lambda: save({"a": torch.zeros(1)}),
        "metadata of another program": lambda: save({"a": torch.zeros(1)}, {"format": "pt"}),
        "metadata that are a number": lambda: raw({"__metadata__": 5}),
        "metadata of numbers": lambda: raw({"__metadata__": {"medseg": 5}}),
        "offsets in reverse": lambda: raw({**meta, "a": {**one, "data_offsets": [4, 0]}}, bytes(4)),
        "negative offsets": lambda: raw({**meta, "a": {**one, "data_offsets": [-4, 0]}}, bytes(4)),
        "offsets behind the end": lambda: raw(
            {**meta, "a": {**one, "data_offsets": [2**62, 2**62 + 4]}}, bytes(4)
        ),
        "a hole": lambda: raw({**meta, "a": {**one, "data_offsets": [4, 8]}}, bytes(8)),
        "a shape that overflows": lambda: raw(
            {**meta, "a": {**one, "shape": [2**62, 2**62]}}, bytes(4)
        ),
        "a negative shape": lambda: raw({**meta, "a": {**one, "shape": [-1]}}, bytes(4)),
        "many axes": lambda: raw({**meta, "a": {**one, "shape": [1] * 10_000}}, bytes(4)),
        "an unknown type": lambda: raw({**meta, "a": {**one, "dtype": "F128"}}, bytes(4)),
        "a type of 4 bits": lambda: raw(
            {**meta, "a": {**one, "dtype": "F4", "shape": [8]}}, bytes(4)
        ),
        "a name twice": lambda: raw(
            b'{"__metadata__": {"medseg": "{}"}, "a": %s, "a": %s}'
            % ((json.dumps(one).encode(),) * 2),
            bytes(4),
        ),
        "a header that is a list": lambda: raw(b"[]"),
        "a header of zeros": lambda: raw(bytes(100)),
        "a header that is cut": lambda: raw(b'{"a":'),
        "a header of no bytes": lambda: raw(b""),
        "a length of -1": lambda: raw(b"{}", length=2**64 - 1),
        "a length behind the end": lambda: raw(b"{}", length=10**6),
        "ten bytes": lambda: bytes(10),
        "an archive of torch": lambda: archived({"a/data.pkl": b"\x80\x02}."}),
    }  # fmt: skip


def test_hostile_headers_of_safetensors(whole: Checkpoint, tmp_path: Path) -> None:
    for number, (name, make) in enumerate(hostile_headers(json.dumps(whole["medseg"])).items()):
        path = tmp_path / f"{number}.safetensors"
        path.write_bytes(make())
        try:
            refused(path)
        except BaseException as error:
            raise AssertionError(name) from error
