"""A failed write says why in one sentence, loses nothing and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import forked
import nibabel as nib
import numpy as np
import pytest
from io_volumes import load_itk, make_grid, make_labels

from medseg.errors import UserError
from medseg.io.atomic import check_writable, create_text, replace_bytes, replace_path, replace_text
from medseg.io.inputs import list_inputs
from medseg.io.read import read_labels
from medseg.io.write import write_labels

SUFFIXES = (".nii.gz", ".nii", ".nrrd", ".mha", ".mhd")


def contents(folder: Path) -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in folder.iterdir()}


def sentence(path: Path, labels: np.ndarray | None = None) -> str:
    """What the user is told when labels cannot be written."""
    labels = make_labels() if labels is None else labels
    with pytest.raises(UserError) as caught:
        write_labels(path, labels, make_grid(np.eye(3), labels.shape))
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(f"{path.parent}/", "")


def full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def half_then(end: Callable[[], object]) -> Callable[..., object]:
    """A writer that writes a part of the file before something happens."""

    def write(_: object, name: str, *__: object, **___: object) -> object:
        Path(name).write_bytes(b"\0" * 100)
        return end()

    return write


def interrupt() -> None:
    raise KeyboardInterrupt


def break_voxels(monkeypatch: pytest.MonkeyPatch, end: Callable[[], object]) -> None:
    """Let something happen in the middle of writing the voxels of any format."""
    monkeypatch.setattr("SimpleITK.WriteImage", half_then(end))
    monkeypatch.setattr("numpy.ascontiguousarray", lambda *_: end())


def only_once(function: Callable[..., object]) -> Callable[..., object]:
    """The function for the first call, then a full disk."""
    calls: list[int] = []

    def call(*arguments: object) -> object:
        calls.append(1)
        return function(*arguments) if len(calls) == 1 else full()

    return call


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("where", ["the voxels", "os.fsync", "os.replace"])
@pytest.mark.parametrize("has_old", [True, False])
def test_a_full_disk(
    tmp_path: Path, suffix: str, where: str, has_old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"labels{suffix}"
    if has_old:
        write_labels(path, make_labels(), make_grid(np.eye(3)))
    before = contents(tmp_path)
    if where == "the voxels":
        break_voxels(monkeypatch, full)
    else:
        monkeypatch.setattr(where, full)
    told = sentence(path, 1 - make_labels() // 2)
    name = told.split(":")[0]
    assert name in (f"labels{suffix}", "labels.zraw", "labels-2.zraw")
    assert told == (
        f"{name}: cannot be written (No space left on device); check the folder, its "
        "permissions and its space."
    )
    monkeypatch.undo()
    assert contents(tmp_path) == before


def test_a_pair_of_which_only_one_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_labels(tmp_path / "labels.mhd", make_labels(), make_grid(np.eye(3)))
    before = contents(tmp_path)
    monkeypatch.setattr("os.replace", only_once(os.replace))
    assert sentence(tmp_path / "labels.mhd", 1 - make_labels() // 2).startswith(
        "labels.mhd: cannot be written (No space left"
    )
    monkeypatch.undo()
    assert contents(tmp_path) == before


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_that_may_not_grow(tmp_path: Path, suffix: str) -> None:
    import resource

    path = tmp_path / f"labels{suffix}"
    write_labels(path, make_labels(), make_grid(np.eye(3)))
    before = contents(tmp_path)
    noise = np.random.default_rng(0).integers(0, 255, (20, 100, 100), dtype=np.uint8)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        told = sentence(path, noise)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    reason = "_nrrdGzWrite: failed to write to file" if suffix == ".nrrd" else "File too large"
    assert told == (
        f"labels{suffix}: cannot be written ({reason}); check the folder, its permissions and "
        "its space."
    )
    assert contents(tmp_path) == before


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_interrupt(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"labels{suffix}"
    write_labels(path, make_labels(), make_grid(np.eye(3)))
    before = contents(tmp_path)
    break_voxels(monkeypatch, interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_labels(path, make_labels(), make_grid(np.eye(3)))
    assert contents(tmp_path) == before


WRITE_SLOWLY = """
import sys, time
from pathlib import Path
from medseg.commands import predict
from medseg.io.atomic import replace_path

def slowly(*_):
    with replace_path(Path(sys.argv[1])) as part:
        part.write_bytes(b"half")
        print("writing", flush=True)
        time.sleep(60)

with predict.sigterm_exits():
    slowly()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_process_that_is_ended_while_it_writes(tmp_path: Path, number: signal.Signals) -> None:
    path = tmp_path / "a.nii.gz"
    write_labels(path, make_labels(), make_grid(np.eye(3)))
    before = contents(tmp_path)
    process = forked.Popen([sys.executable, "-c", WRITE_SLOWLY, str(path)])
    while process.files[0].read_text(encoding="utf-8") != "writing\n":
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == {signal.SIGTERM: 143}.get(number, -number)
    after = contents(tmp_path)
    if (
        number == signal.SIGKILL
    ):  # nobody can tidy up then, but nothing takes what is left for a scan
        assert next(name for name in after if name not in before).startswith(".medseg-")
        assert list_inputs(tmp_path) == [("a", path)]
        after = {name: content for name, content in after.items() if name in before}
    assert after == before


def test_what_a_killed_process_left_is_removed_and_what_another_writes_is_not(
    tmp_path: Path,
) -> None:
    for name, age_s in (("old.part", 4000), ("new.part", 3000), ("old.nii", 4000)):
        path = tmp_path / f".medseg-{name}"
        path.write_bytes(b"half")
        os.utime(path, (time.time() - age_s,) * 2)
    check_writable(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {".medseg-new.part", ".medseg-old.nii"}


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    tail = "; check the folder, its permissions and its space."
    (tmp_path / "file").write_bytes(b"kept")
    assert (
        sentence(tmp_path / "file" / "a.nii")
        == f"a.nii: cannot be written (a part of its path is a file){tail}"
    )
    (tmp_path / "a.nii").mkdir()
    assert (
        sentence(tmp_path / "a.nii")
        == "a.nii: cannot be written, since it is a folder or a device; choose another name."
    )
    assert sentence(tmp_path / ("n" * 300 + ".nii")).endswith(
        f".nii: cannot be written (File name too long){tail}"
    )
    (tmp_path / "b.nii").symlink_to("/dev/null")
    assert (
        sentence(tmp_path / "b.nii")
        == "b.nii: cannot be written, since it is a folder or a device; choose another name."
    )
    with pytest.raises(
        UserError, match=r"file/out: cannot be written \(a part of its path is a file\)"
    ):
        check_writable(tmp_path / "file" / "out")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.nii", "b.nii", "file"]
    assert (tmp_path / "file").read_bytes() == b"kept"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_place_that_even_root_cannot_write() -> None:
    with pytest.raises(
        UserError,
        match=r"^/proc/medseg/a\.nii: cannot be written \(No such file or directory\); check",
    ):
        write_labels(Path("/proc/medseg/a.nii"), make_labels(), make_grid(np.eye(3)))


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "a.mhd").write_bytes(b"old")
    (tmp_path / "a.mhd").symlink_to(tmp_path / "disk" / "a.mhd")
    write_labels(tmp_path / "a.mhd", make_labels(), make_grid(np.eye(3)))
    assert (tmp_path / "a.mhd").is_symlink()
    assert np.array_equal(read_labels(tmp_path / "disk" / "a.mhd").array, make_labels())
    assert sorted(entry.name for entry in (tmp_path / "disk").iterdir()) == ["a.mhd", "a.zraw"]


def test_a_pair_of_files_is_replaced_as_one(tmp_path: Path) -> None:
    grid = make_grid(np.eye(3))
    (tmp_path / "a.zraw").write_bytes(b"of another program")
    write_labels(tmp_path / "a.mhd", make_labels(), grid)
    assert sorted(contents(tmp_path)) == ["a-2.zraw", "a.mhd", "a.zraw"], (
        "what another program wrote stays"
    )
    for labels in (1 - make_labels() // 2, make_labels()):
        write_labels(tmp_path / "a.mhd", labels, grid)
        assert np.array_equal(read_labels(tmp_path / "a.mhd").array, labels)
        assert np.array_equal(load_itk(tmp_path / "a.mhd")[0], labels)
        assert len(contents(tmp_path)) == 3, "the old voxels go with their header"
    assert (tmp_path / "a.zraw").read_bytes() == b"of another program"


def test_new_voxels_with_the_name_of_lost_ones_stay(tmp_path: Path) -> None:
    path = tmp_path / "a.mhd"
    write_labels(path, make_labels(), make_grid(np.eye(3)))
    (tmp_path / "a.zraw").unlink()
    write_labels(path, make_labels(), make_grid(np.eye(3)))
    assert np.array_equal(read_labels(path).array, make_labels())


def test_an_interrupt_behind_the_new_header_leaves_its_voxels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace_and_interrupt(path: Path, data: bytes) -> None:
        replace_bytes(path, data)
        raise KeyboardInterrupt

    grid = make_grid(np.eye(3))
    write_labels(tmp_path / "a.mhd", 1 - make_labels() // 2, grid)
    monkeypatch.setattr("medseg.io.simpleitk.replace_bytes", replace_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_labels(tmp_path / "a.mhd", make_labels(), grid)
    assert np.array_equal(read_labels(tmp_path / "a.mhd").array, make_labels())


@pytest.mark.parametrize(("length", "version"), [(2**15 - 1, 1), (2**15, 2), (40000, 2)])
def test_a_scan_that_is_too_long_for_nifti_1(length: int, version: int, tmp_path: Path) -> None:
    """Which counts voxels with 16 bits and a sign."""
    labels = np.zeros((2, 2, length), np.uint8)
    labels[1, 1, length - 1] = 1
    grid = make_grid(np.eye(3), labels.shape)
    write_labels(tmp_path / "a.nii.gz", labels, grid)
    image = nib.load(tmp_path / "a.nii.gz")
    assert type(image) is {1: nib.Nifti1Image, 2: nib.Nifti2Image}[version]
    assert np.array_equal(np.asarray(image.dataobj).T, labels)
    last_ras = (image.affine @ [length - 1, 1, 1, 1])[:3]
    assert np.allclose(
        last_ras * [-1, -1, 1], grid.index_to_world_xyz_mm((1, 1, length - 1)), atol=0.01
    )


def test_text_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_text(tmp_path / "new" / "a.json", "ü\n")
    assert (tmp_path / "new" / "a.json").read_bytes() == "ü\n".encode()
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match=r"a\.json: cannot be written \(No space left on device\)"):
        replace_text(tmp_path / "new" / "a.json", "x")
    assert contents(tmp_path / "new") == {"a.json": "ü\n".encode()}


def test_an_error_of_the_writer_itself_passes(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), replace_path(tmp_path / "a"):
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())


def without_hard_links(*_: object) -> None:
    raise PermissionError(1, "Operation not permitted")


def test_a_text_is_made_once_where_there_are_no_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a FAT disk."""
    monkeypatch.setattr(os, "link", without_hard_links)
    path = tmp_path / "new" / "a.yaml"
    assert create_text(path, "first\n")
    assert not create_text(path, "second\n")
    assert contents(tmp_path / "new") == {"a.yaml": b"first\n"}


def test_a_text_that_cannot_be_made_is_named_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "a.yaml"
    with pytest.raises(UserError) as caught:
        create_text(path, "x")
    assert str(caught.value).startswith(f"{path}: cannot be written (a part of its path is a file)")


def test_a_text_that_cannot_be_made_leaves_no_empty_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def refuse(source: Path, target: Path) -> None:
        if target.name == "a.yaml":
            full()
        replace(source, target)

    monkeypatch.setattr(os, "link", without_hard_links)
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(UserError, match=r"a\.yaml: cannot be written \(No space left on device\)"):
        create_text(tmp_path / "a.yaml", "x")
    assert not contents(tmp_path)
