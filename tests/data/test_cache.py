"""Cache of resampled cases: its entries, when they are rebuilt, and which cases are refused."""

from __future__ import annotations

import dataclasses
import errno
import functools
import json
import multiprocessing
import os
import pickle
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest

from medseg.data import source_files
from medseg.data.cache import (
    FORMAT_VERSION,
    CachedCase,
    coarse_probs,
    is_current,
    open_case,
    prepare_case,
    prepare_cases,
)
from medseg.data.case_table import Case, read_case_table
from medseg.data.crops import StageCrops
from medseg.data.options import StageName, StageOptions
from medseg.data.samples import Samples
from medseg.data.source_case import CaseRefusedError, SourceCase, read_source
from medseg.data.source_files import fingerprint, is_same_source
from medseg.errors import UserError
from medseg.findings import Severity, warnings_of
from medseg.geometry.grid import VoxelBox, VoxelGrid
from medseg.preprocess.scale import HuScale
from medseg.task import Channel, LabelValues, Region, Task

SPACING_MM = (3.0, 1.25, 1.5)
NAMES = {1: "left_lung", 2: "right_lung"}
SHAPE = (14, 30, 41)
WriteCase = Callable[..., Case]


def blocks() -> tuple[np.ndarray, np.ndarray]:
    """Tissue with two dark blocks of different sizes, left at larger x; GE's padding outside."""
    labels = np.zeros(SHAPE, dtype=np.uint8)
    labels[4:11, 8:15, 26:34] = 1
    labels[3:13, 7:23, 5:16] = 2
    image = np.where(labels > 0, -850, 40).astype(np.int16)
    image[:, :5] = -3024
    return image, labels


@pytest.fixture
def case(write_case: WriteCase) -> Case:
    return write_case("a=1 (ü)", *blocks())


def move(case: Case, folder: Path, name: str) -> Case:
    """The case with its files in another folder and under another name."""
    assert case.labels is not None
    case.image.parent.rename(folder)
    return Case(name, folder / case.image.name, folder / case.labels.name, case.patient)


def built_at(entry: CachedCase) -> int:
    """The inode of the sidecar tells a rebuilt entry from an untouched one."""
    return (entry.folder / "case.json").stat().st_ino


def test_an_entry_holds_the_oriented_resampled_case(case: Case, tmp_path: Path, task: Task) -> None:
    entry = prepare_case(case, tmp_path / "cache", SPACING_MM, task, NAMES)
    assert entry.folder.parent.name.startswith("3x1.25x1.5-")
    assert re.fullmatch(re.escape(case.name) + "-[0-9a-f]{8}", entry.folder.name)
    assert np.allclose(entry.grid.spacing_mm, SPACING_MM)
    native = VoxelGrid(SHAPE, (4.0, 1.5, 2.0), (-31.0, 12.0, 200.0))
    assert entry.grid.is_close(native.resampled(SPACING_MM))
    image, labels = entry.image_hu, entry.labels
    assert isinstance(image, np.memmap)
    assert isinstance(labels, np.memmap)
    assert image.dtype == np.int16
    assert labels.dtype == np.uint8
    assert image.shape == labels.shape == entry.grid.shape
    assert image.min() == -1024, "padding is no HU"
    counts = json.loads((entry.folder / "case.json").read_text())["label_counts"]
    for name, value in task.labels.items():
        mask = labels == value
        assert counts[name] == mask.sum()
        assert entry.region_boxes[name] == VoxelBox.from_mask(mask)
        # A block keeps its edges to within a voxel per axis.
        native_box = VoxelBox.from_mask(blocks()[1] == value)
        assert native_box is not None
        extent_mm = np.array(entry.region_boxes[name].shape) * SPACING_MM
        assert (
            np.abs(extent_mm - np.array(native_box.shape) * native.spacing_mm) < SPACING_MM
        ).all()
        assert mask.sum() > 0.9 * np.prod(entry.region_boxes[name].shape), (
            "only corners are rounded"
        )
        # The centroid stays in the world, to within half a voxel.
        here = entry.grid.index_to_world_xyz_mm(np.argwhere(mask).mean(axis=0))
        there = native.index_to_world_xyz_mm(np.argwhere(blocks()[1] == value).mean(axis=0))
        assert (np.abs(here - there) < np.array(SPACING_MM[::-1]) / 2 + 1e-6).all()
    assert np.median(image[labels == 1]) < -700


def test_opening_gives_the_same_and_pickles_small(case: Case, tmp_path: Path, task: Task) -> None:
    prepared = prepare_case(case, tmp_path, SPACING_MM, task, NAMES)
    opened = open_case(case, tmp_path, SPACING_MM, task, NAMES)
    assert opened.grid.is_close(prepared.grid)
    assert opened.region_boxes == prepared.region_boxes
    copy = pickle.loads(pickle.dumps(opened))
    assert len(pickle.dumps(opened)) < 5000
    assert np.array_equal(copy.image_hu, prepared.image_hu)


def test_a_case_in_a_folder_that_is_not_utf_8(case: Case, tmp_path: Path, task: Task) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/Pat_M\xfcller"))
    folder.mkdir()
    image = Path(shutil.copy(case.image, folder))
    moved = replace(case, image=image)
    prepare_case(moved, folder / "cache", SPACING_MM, task, NAMES)
    assert is_current(moved, folder / "cache", SPACING_MM, task, NAMES)
    assert open_case(moved, folder / "cache", SPACING_MM, task, NAMES).name == case.name


def test_another_filter_is_another_entry_with_the_same_labels(
    case: Case, tmp_path: Path, task: Task
) -> None:
    plain, cubic = (
        prepare_case(case, tmp_path, SPACING_MM, task, NAMES, resampling=resampling)
        for resampling in ("antialiased", "cubic")
    )
    assert plain.folder.parent != cubic.folder.parent
    assert not np.array_equal(plain.image_hu, cubic.image_hu)
    assert np.array_equal(plain.labels, cubic.labels)
    assert open_case(case, tmp_path, SPACING_MM, task, NAMES).folder == plain.folder
    assert not is_current(case, tmp_path, SPACING_MM, task, NAMES, resampling="linear")


def test_a_current_entry_is_left_alone_and_opening_before_is_refused(
    case: Case, tmp_path: Path, task: Task
) -> None:
    with pytest.raises(UserError, match="prepare"):
        open_case(case, tmp_path, SPACING_MM, task, NAMES)
    first = built_at(prepare_case(case, tmp_path, SPACING_MM, task, NAMES))
    assert built_at(prepare_case(case, tmp_path, SPACING_MM, task, NAMES)) == first


def test_a_changed_source_makes_a_stale_entry_and_a_touched_one_does_not(
    case: Case, tmp_path: Path, task: Task, write_case: WriteCase
) -> None:
    first = built_at(prepare_case(case, tmp_path, SPACING_MM, task, NAMES))
    os.utime(case.image, ns=(1, 1))
    assert built_at(prepare_case(case, tmp_path, SPACING_MM, task, NAMES)) == first

    image, labels = blocks()
    labels[3:13, 7:23, 5:16] = 0
    labels[3:13, 7:23, 6:16] = 2
    write_case(case.name, image, labels)
    assert not is_current(case, tmp_path, SPACING_MM, task, NAMES)
    entry = prepare_case(case, tmp_path, SPACING_MM, task, NAMES)
    assert built_at(entry) != first
    assert is_current(case, tmp_path, SPACING_MM, task, NAMES)


def test_same_size_and_other_content_is_noticed(case: Case, tmp_path: Path, task: Task) -> None:
    prepare_case(case, tmp_path, SPACING_MM, task, NAMES)
    content = bytearray(case.image.read_bytes())
    content[-1] ^= 1
    case.image.write_bytes(content)
    os.utime(case.image, ns=(5, 5))
    assert not is_current(case, tmp_path, SPACING_MM, task, NAMES)


@pytest.mark.parametrize(
    ("name", "header"),
    [
        ("a.mhd", "NDims = 3\nElementDataFile = LIST\ns1.raw\ns2.raw\n"),
        ("a.mhd", "NDims = 3\nElementDataFile = s%d.raw 1 2 1\n"),
        ("a.nhdr", "NRRD0005\ndata file: LIST\ns1.raw\ns2.raw\n"),
        ("a.nhdr", "NRRD0005\ndata file: s%d.raw 1 2 1\n\n"),
        ("a.nhdr", "NRRD0005\r\ndatafile: s2.raw\r\n"),
        ("a.mhd", "NDims = 3\nElementDataFile = LIST\nü.raw\ns2.raw\n"),
    ],
)
def test_every_file_of_the_voxels_is_a_source(name: str, header: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(header, encoding="utf-8")
    for raw in ("s1.raw", "s2.raw"):
        (tmp_path / raw).write_bytes(b"voxels")
    known = fingerprint(tmp_path / name)
    assert is_same_source(tmp_path / name, known)
    (tmp_path / "s2.raw").write_bytes(b"Voxels")
    os.utime(tmp_path / "s2.raw", ns=(5, 5))
    assert not is_same_source(tmp_path / name, known)


@pytest.mark.parametrize(
    "damage",
    [
        *(
            "cut image",
            "garbage of equal size",
            "no labels",
            "cut json",
            "no json",
            "other json",
            "another number",
            "few keys",
        ),
        *("deep json", "a pipe", "a file"),
    ],
)
def test_half_written_entries_are_rebuilt(
    damage: str, case: Case, tmp_path: Path, task: Task
) -> None:
    entry = prepare_case(case, tmp_path / "cache", SPACING_MM, task, NAMES)
    image, labels = np.array(entry.image_hu), np.array(entry.labels)
    sidecar = entry.folder / "case.json"
    if damage == "cut image":
        os.truncate(entry.folder / "image.npy", 1000)
    elif damage == "garbage of equal size":
        content = bytearray((entry.folder / "image.npy").read_bytes())
        content[-100] ^= 1
        (entry.folder / "image.npy").write_bytes(content)
    elif damage == "no labels":
        (entry.folder / "labels.npy").unlink()
    elif damage == "cut json":
        os.truncate(sidecar, 100)
    elif damage == "no json":
        sidecar.unlink()
    elif damage == "other json":
        sidecar.write_text("[1, 2]")
    elif damage == "another number":
        sidecar.write_text(
            sidecar.read_text(encoding="utf-8").replace("1.25", "2.25", 1), encoding="utf-8"
        )
    elif damage == "few keys":
        sidecar.write_text(json.dumps({"format": FORMAT_VERSION, "crc32": {}}))
    elif damage == "deep json":
        sidecar.write_text("[" * 100_000)
    elif damage == "a pipe":
        sidecar.unlink()
        os.mkfifo(sidecar)
    else:
        shutil.rmtree(entry.folder)
        entry.folder.touch()
    assert not is_current(case, tmp_path / "cache", SPACING_MM, task, NAMES)
    rebuilt = prepare_case(case, tmp_path / "cache", SPACING_MM, task, NAMES)
    assert np.array_equal(rebuilt.image_hu, image)
    assert np.array_equal(rebuilt.labels, labels)
    assert list(entry.folder.parent.iterdir()) == [entry.folder], "nothing else is left"


def test_a_cache_without_its_sources_is_used(case: Case, tmp_path: Path, task: Task) -> None:
    labels = np.array(prepare_case(case, tmp_path / "cache", SPACING_MM, task, NAMES).labels)
    shutil.rmtree(tmp_path / "source")
    assert np.array_equal(
        open_case(case, tmp_path / "cache", SPACING_MM, task, NAMES).labels, labels
    )
    prepare_case(case, tmp_path / "cache", SPACING_MM, task, NAMES)
    other_spacing = (4.0, 1.25, 1.5)
    with pytest.raises(UserError, match="does not exist"):
        prepare_case(case, tmp_path / "cache", other_spacing, task, NAMES)


def test_a_folder_that_may_not_be_entered_is_as_good_as_absent(
    case: Case, tmp_path: Path, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user of a shared cache may have no access to the raw data."""
    entry = prepare_case(case, tmp_path / "cache", SPACING_MM, task, NAMES)
    real_stat = os.stat

    def stat(path: Any, *more: Any, **options: Any) -> os.stat_result:
        if not isinstance(path, int) and tmp_path / "source" in Path(path).parents:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real_stat(path, *more, **options)

    monkeypatch.setattr(os, "stat", stat)
    assert open_case(case, tmp_path / "cache", SPACING_MM, task, NAMES) == entry
    with pytest.raises(UserError, match="or you may not enter its folder"):
        prepare_case(case, tmp_path / "cache", (4.0, 1.25, 1.5), task, NAMES)


def test_a_source_that_cannot_be_read_is_the_users_mistake(
    case: Case, tmp_path: Path, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_case(case, tmp_path / "cache", SPACING_MM, task, NAMES)
    case.image.touch()

    def refuse(_: Any) -> str:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(source_files, "_content_hash", refuse)
    with pytest.raises(UserError, match=r"image\.nii\.gz: cannot be read, .*\(Permission denied\)"):
        open_case(case, tmp_path / "cache", SPACING_MM, task, NAMES)


def test_cases_of_one_name_from_two_data_sets_do_not_disturb_each_other(
    case: Case, tmp_path: Path, task: Task, write_case: WriteCase
) -> None:
    image, labels = blocks()
    other = move(
        write_case("other", image, labels * (labels == 2)), tmp_path / "elsewhere", case.name
    )
    first = prepare_case(case, tmp_path / "cache", SPACING_MM, task, NAMES)
    second = prepare_case(other, tmp_path / "cache", SPACING_MM, task, NAMES)
    assert (set(first.region_boxes), set(second.region_boxes)) == (
        {"left_lung", "right_lung"},
        {"right_lung"},
    )
    built = built_at(first)
    again = open_case(case, tmp_path / "cache", SPACING_MM, task, NAMES)
    assert built_at(again) == built
    assert np.any(again.labels == 1)


def test_the_content_of_a_case_is_that_of_its_files_wherever_they_lie(
    case: Case, tmp_path: Path, task: Task, write_case: WriteCase
) -> None:
    image, labels = blocks()
    copy = move(write_case("copy", image, labels), tmp_path / "copied", case.name)
    other = move(write_case("other", image + 1, labels), tmp_path / "changed", case.name)
    entries = [
        prepare_case(source, tmp_path, SPACING_MM, task, NAMES) for source in (case, copy, other)
    ]
    assert len({entry.folder for entry in entries}) == 3
    assert entries[0].content == entries[1].content != entries[2].content
    brighter = prepare_case(
        replace(case, hu=HuScale(offset=1.0)), tmp_path, SPACING_MM, task, NAMES
    )
    assert brighter.content not in {entry.content for entry in entries}


def test_the_cache_serves_on_another_machine_and_no_other_data_set_here(
    case: Case, tmp_path: Path, task: Task
) -> None:
    entry = prepare_case(case, tmp_path / "cache", SPACING_MM, task, NAMES)
    there = Case(
        case.name, Path("/nowhere/image.nii.gz"), Path("/nowhere/labels.nii.gz"), case.patient
    )
    assert not is_current(there, tmp_path / "cache", SPACING_MM, task, NAMES), (
        "its own files are here, so it is theirs"
    )
    with pytest.raises(UserError, match=re.escape(f"The case {case.name!r} has no current entry")):
        prepare_case(there, tmp_path / "cache", SPACING_MM, task, NAMES)
    shutil.rmtree(tmp_path / "source")  # now this is a machine that got the cache only
    assert prepare_case(there, tmp_path / "cache", SPACING_MM, task, NAMES).folder == entry.folder
    brighter = replace(there, hu=HuScale(offset=10.0))
    assert not is_current(brighter, tmp_path / "cache", SPACING_MM, task, NAMES), "other arrays"
    shutil.copytree(entry.folder, entry.folder.with_name(f"{case.name}-0123abcd"))
    with pytest.raises(UserError, match="no current entry"):
        open_case(there, tmp_path / "cache", SPACING_MM, task, NAMES)


def test_other_configurations_have_other_entries(case: Case, tmp_path: Path, task: Task) -> None:
    swapped_values = Task(task.name, {"right_lung": 1, "left_lung": 2}, task.regions, task.channels)
    other_window = Task("thorax", task.labels, task.regions, (Channel(window_hu=(-500.0, 500.0)),))
    entry = prepare_case(case, tmp_path, SPACING_MM, task, NAMES)
    other = prepare_case(case, tmp_path, SPACING_MM, swapped_values, NAMES)
    assert other.folder != entry.folder
    assert np.array_equal(np.array([0, 2, 1])[entry.labels], other.labels)
    assert prepare_case(case, tmp_path, SPACING_MM, other_window, NAMES).folder == entry.folder


@pytest.mark.parametrize(
    "change",
    [
        {"ignore_label": 9},
        {"channels": (Channel("mr", None, "zscore"),)},
        {"channels": (Channel("ct", None, "percentile"),)},
        {"regions": (Region("lungs", ("left_lung", "right_lung")),)},
        {
            "regions": (
                Region("left_lung", ("left_lung",)),
                Region("right_lung", ("right_lung",), "right"),
            )
        },
    ],
    ids=str,
)
def test_what_changes_an_entry_is_in_its_name(
    change: dict[str, Any], case: Case, tmp_path: Path, task: Task
) -> None:
    prepare_case(case, tmp_path, SPACING_MM, task, NAMES)
    assert is_current(case, tmp_path, SPACING_MM, task, NAMES)
    assert not is_current(case, tmp_path, SPACING_MM, replace(task, **change), NAMES)


@pytest.mark.parametrize(
    "label_values",
    [{1: "right_lung", 2: "left_lung"}, {**NAMES, 3: "left_lung"}, {**NAMES, 3: "air"}],
)
def test_other_values_of_the_labels_have_an_entry_of_their_own(
    label_values: dict[int | str, str], case: Case, tmp_path: Path, task: Task
) -> None:
    prepare_case(case, tmp_path, SPACING_MM, task, NAMES)
    assert not is_current(case, tmp_path, SPACING_MM, task, label_values)
    assert not is_current(replace(case, series="2"), tmp_path, SPACING_MM, task, NAMES), (
        "another series of the folder"
    )


def test_structures_in_another_order_have_an_entry_of_their_own(
    case: Case, tmp_path: Path, task: Task
) -> None:
    """Where they overlap, the later one counts; those of no label of the task take no voxel."""
    names: LabelValues = {"lung l": "left_lung", "lung r": "right_lung", "windpipe": "air"}
    prepare_case(
        case, tmp_path, SPACING_MM, task, names, read=lambda: read_source(case, task, NAMES)
    )
    for order, is_same in (
        (("lung l", "lung r", "windpipe"), True),
        (("windpipe", "lung l", "lung r"), True),
        (("lung r", "lung l", "windpipe"), False),
    ):
        other: LabelValues = {name: names[name] for name in order}
        assert is_current(case, tmp_path, SPACING_MM, task, other) == is_same


def test_each_series_of_a_folder_has_an_entry_of_its_own(
    case: Case, tmp_path: Path, task: Task
) -> None:
    first = replace(case, series="1")
    prepare_case(
        first, tmp_path, SPACING_MM, task, NAMES, read=lambda: read_source(case, task, NAMES)
    )
    assert is_current(first, tmp_path, SPACING_MM, task, NAMES)
    for series in ("2", None):
        other = replace(case, series=series)
        assert not is_current(other, tmp_path, SPACING_MM, task, NAMES)


def test_another_series_of_a_folder_is_another_content(
    case: Case, tmp_path: Path, task: Task
) -> None:
    source = read_source(case, task, NAMES)
    contents = set()
    for series in ("1", "2", None):
        entry = prepare_case(
            replace(case, series=series), tmp_path, SPACING_MM, task, NAMES, read=lambda: source
        )
        contents.add(entry.content)
    assert len(contents) == 3, "a run must not be resumed on another series"


def test_another_name_of_a_mask_is_another_content(case: Case, tmp_path: Path, task: Task) -> None:
    assert case.labels is not None
    folder = tmp_path / "masks"
    folder.mkdir()
    shutil.copy(case.labels, folder / "left_lung.nii.gz")
    source = read_source(case, task, NAMES)
    case = replace(case, labels=folder)

    def prepare() -> CachedCase:
        sources = {"image": fingerprint(case.image), "labels": fingerprint(folder)}
        built = replace(source, sources=sources)
        return prepare_case(case, tmp_path / "cache", SPACING_MM, task, NAMES, read=lambda: built)

    entry = prepare()
    (folder / "left_lung.nii.gz").rename(folder / "right_lung.nii.gz")
    assert prepare().content != entry.content, "a run must not be resumed on other labels"


def test_a_copied_cache_does_not_stand_for_another_series(
    case: Case, tmp_path: Path, task: Task
) -> None:
    source = read_source(case, task, NAMES)
    first = replace(case, series="1")
    prepare_case(first, tmp_path / "cache", SPACING_MM, task, NAMES, read=lambda: source)
    shutil.rmtree(tmp_path / "source")  # now this is a machine that got the cache only
    there = replace(
        first, image=Path("/nowhere/image.nii.gz"), labels=Path("/nowhere/labels.nii.gz")
    )
    assert is_current(there, tmp_path / "cache", SPACING_MM, task, NAMES)
    other = replace(there, series="2")
    assert not is_current(other, tmp_path / "cache", SPACING_MM, task, NAMES), "other arrays"


def test_processes_that_prepare_the_same_case_do_not_hurt_each_other(
    case: Case, tmp_path: Path, task: Task
) -> None:
    # No fork of this process: where torch threads have run, it may wait for them for ever.
    with forked.served(), multiprocessing.get_context("forkserver").Pool(3) as pool:
        for turn in range(3):
            entries = pool.starmap(
                prepare_case, [(case, tmp_path / "cache", SPACING_MM, task, NAMES)] * 6
            )
            assert len({int(entry.labels.sum()) for entry in entries}) == 1
            entry = open_case(case, tmp_path / "cache", SPACING_MM, task, NAMES)
            assert list(entry.folder.parent.iterdir()) == [entry.folder]
            if turn == 0:
                shutil.rmtree(entry.folder)
            else:
                os.truncate(entry.folder / "labels.npy", 200)


def test_what_a_killed_process_left_is_removed_when_the_entry_is_built(
    case: Case, tmp_path: Path, task: Task
) -> None:
    entry = prepare_case(case, tmp_path / "cache", SPACING_MM, task, NAMES)
    for purpose in ("building", "stale"):
        left = entry.folder.with_name(f".{purpose}-{entry.folder.name}")
        left.mkdir()
        (left / "image.npy").write_bytes(b"half")
    (entry.folder / "case.json").unlink()
    prepare_case(case, tmp_path / "cache", SPACING_MM, task, NAMES)
    assert list(entry.folder.parent.iterdir()) == [entry.folder]


def test_label_values_are_mapped_by_name(tmp_path: Path, task: Task, write_case: WriteCase) -> None:
    image, labels = blocks()
    plain = prepare_case(write_case("plain", image, labels), tmp_path, SPACING_MM, task, NAMES)
    lobes = np.array([0, 300, 20], dtype=np.int16)[labels]
    lobes[:7][lobes[:7] == 20] = 21
    lobes[0, 0, 0] = 7
    names = {300: "left_lung", 20: "right_lung", 21: "right_lung", 7: "trachea"}
    mapped = prepare_case(write_case("lobes", image, lobes), tmp_path, SPACING_MM, task, names)
    assert np.array_equal(plain.labels, mapped.labels)


def test_values_nobody_named_are_refused(
    case: Case, tmp_path: Path, task: Task, write_case: WriteCase
) -> None:
    image, labels = blocks()
    labels[0, 0, :2] = (9, 5)
    with pytest.raises(
        UserError,
        match=r"'odd' is refused: the label map holds the values 5, 9, which data\.label_values",
    ):
        prepare_case(write_case("odd", image, labels), tmp_path, SPACING_MM, task, NAMES)
    with pytest.raises(UserError, match=r"data\.label_values has no value for right_lung"):
        prepare_case(case, tmp_path, SPACING_MM, task, {1: "left_lung", 2: "rigth_lung"})


def test_swapped_sides_are_refused_and_one_side_alone_is_not(
    tmp_path: Path, task: Task, write_case: WriteCase
) -> None:
    image, labels = blocks()
    with pytest.raises(UserError, match=r"'swapped' is refused: left_lung lies at x = .*larger x"):
        prepare_case(
            write_case("swapped", image, np.array([0, 2, 1], np.uint8)[labels]),
            tmp_path,
            SPACING_MM,
            task,
            NAMES,
        )
    alone = prepare_case(
        write_case("alone", image, labels * (labels == 2)), tmp_path, SPACING_MM, task, NAMES
    )
    assert set(alone.region_boxes) == {"right_lung"}
    assert not np.any(alone.labels == 1)
    assert "left_lung is not in the label map" in [
        finding.message for finding in alone.audit.findings
    ]
    assert not any(path.name.startswith(".") for path in alone.folder.parent.iterdir())


def test_labels_on_another_grid_are_refused(
    tmp_path: Path, task: Task, write_case: WriteCase
) -> None:
    image, labels = blocks()
    near = write_case("near", image, labels, labels_offset_mm=0.01)
    assert prepare_case(near, tmp_path, SPACING_MM, task, NAMES).labels.any()
    with pytest.raises(UserError, match="not on the grid of its image"):
        prepare_case(
            write_case("far", image, labels, labels_offset_mm=1.5),
            tmp_path,
            SPACING_MM,
            task,
            NAMES,
        )
    with pytest.raises(UserError, match="has 13×30×41 voxels, the image 14×30×41"):
        prepare_case(write_case("short", image, labels[:-1]), tmp_path, SPACING_MM, task, NAMES)


def test_a_case_without_labels_is_refused(
    tmp_path: Path, task: Task, write_case: WriteCase
) -> None:
    case = write_case("bare", blocks()[0], None)
    with pytest.raises(UserError, match=r"'bare' has no label map.*'test' into its column split"):
        prepare_case(case, tmp_path, SPACING_MM, task, NAMES)


def test_the_audit_is_kept_in_the_sidecar(case: Case, tmp_path: Path, task: Task) -> None:
    prepared = prepare_case(case, tmp_path, SPACING_MM, task, NAMES)
    assert ("padding", Severity.information) in [
        (finding.code, finding.severity) for finding in prepared.audit.findings
    ]
    assert prepared.audit.volumes_ml == pytest.approx(
        {"left_lung": 7 * 7 * 8 * 0.012, "right_lung": 10 * 16 * 11 * 0.012}
    )
    assert open_case(case, tmp_path, SPACING_MM, task, NAMES).audit == prepared.audit


def test_an_error_that_is_ignored_stops_nobody_else(
    tmp_path: Path, task: Task, write_case: WriteCase
) -> None:
    image, labels = blocks()
    swapped = write_case("swapped", image, np.array([0, 2, 1], np.uint8)[labels])
    accepted = replace(swapped, ignore_findings=frozenset({"swapped_sides"}))
    assert np.any(prepare_case(accepted, tmp_path, SPACING_MM, task, NAMES).labels == 2)
    with pytest.raises(CaseRefusedError, match="swapped"):
        open_case(swapped, tmp_path, SPACING_MM, task, NAMES)
    with pytest.raises(CaseRefusedError, match="swapped"):
        prepare_case(swapped, tmp_path, SPACING_MM, task, NAMES)
    opened = open_case(accepted, tmp_path, SPACING_MM, task, NAMES)
    assert opened.labels.any()
    assert opened.ignore_findings == {"swapped_sides"}


def test_another_scale_or_trust_has_an_entry_of_its_own(
    case: Case, tmp_path: Path, task: Task
) -> None:
    entry = prepare_case(case, tmp_path, SPACING_MM, task, NAMES)
    before = np.median(entry.image_hu[entry.labels > 0])
    brighter = replace(case, hu=HuScale(offset=10.0))
    assert not is_current(brighter, tmp_path, SPACING_MM, task, NAMES)
    after = prepare_case(brighter, tmp_path, SPACING_MM, task, NAMES)
    assert np.median(after.image_hu[after.labels > 0]) == before + 10
    assert np.median(entry.image_hu[entry.labels > 0]) == before, (
        "a run that uses it keeps its scale"
    )
    assert not is_current(
        replace(brighter, trust={"left_lung": "absent"}), tmp_path, SPACING_MM, task, NAMES
    )
    assert is_current(
        replace(brighter, trust={"left_lung": "approximate"}), tmp_path, SPACING_MM, task, NAMES
    )


def test_an_entry_that_is_rebuilt_while_it_is_used_is_not_mixed_with_the_old_one(
    tmp_path: Path, task: Task, write_case: WriteCase
) -> None:
    image, labels = blocks()
    case = write_case("a", image, labels)
    used = pickle.loads(
        pickle.dumps(prepare_case(case, tmp_path / "cache", SPACING_MM, task, NAMES))
    )
    assert used.labels.any()
    write_case("a", image[:, ::-1], labels[:, ::-1])
    rebuilt = prepare_case(case, tmp_path / "cache", SPACING_MM, task, NAMES)
    assert rebuilt.folder == used.folder
    for name in ("images", "labels"):
        with pytest.raises(
            UserError, match="The cache entry of the case 'a' was built anew by another process"
        ):
            getattr(used, name)
    assert rebuilt.labels.any()
    # As between the two renamings of a process that builds it anew.
    shutil.rmtree(rebuilt.folder)
    for name in ("images", "labels"):
        with pytest.raises(UserError, match="or removed, while this one used it; start again"):
            getattr(rebuilt, name)


def no_room(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_probabilities_of_a_coarse_stage_are_made_once_and_go_with_the_entry(
    case: Case,
    tmp_path: Path,
    task: Task,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = prepare_case(case, tmp_path / "cache", SPACING_MM, task, NAMES)
    grid = VoxelGrid((2, 3, 4), (4.0, 5.0, 6.0), (1.0, 2.0, 3.0))
    calls = []

    def predict() -> tuple[np.ndarray, VoxelGrid]:
        calls.append(len(calls))
        return np.full((3, *grid.shape), len(calls), dtype=np.float16), grid

    first = coarse_probs(entry, "weights a", predict)
    again = pickle.loads(pickle.dumps(coarse_probs(entry, "weights a", predict)))
    assert calls == [0]
    assert again.grid == first.grid == grid
    assert np.array_equal(again.probs, np.ones((3, *grid.shape), dtype=np.float16))
    assert coarse_probs(entry, "weights b", predict).probs.max() == 2.0
    with monkeypatch.context() as read_only:
        read_only.setattr("medseg.data.cache.locked", no_room)
        assert coarse_probs(entry, "weights a", predict) == first
    assert open_case(case, tmp_path / "cache", SPACING_MM, task, NAMES) == entry
    with monkeypatch.context() as full:
        full.setattr(np, "save", no_room)
        with pytest.raises(UserError, match=r"has room \(data\.cache\)"):
            coarse_probs(entry, "weights c", predict)
    assert not list(entry.folder.glob(".building*"))
    # A damaged file is not trained on.
    damaged = bytearray(first.file.read_bytes())
    damaged[-1] ^= 255
    first.file.write_bytes(damaged)
    assert coarse_probs(entry, "weights a", predict).probs.max() == 4.0
    # An entry that is built anew has other voxels, and so other probabilities.
    (entry.folder / "case.json").unlink()
    rebuilt = prepare_case(case, tmp_path / "cache", SPACING_MM, task, NAMES)
    assert coarse_probs(rebuilt, "weights a", predict).probs.max() == 5.0


def test_two_ranks_predict_the_probabilities_of_a_case_once(
    case: Case, tmp_path: Path, task: Task
) -> None:
    entry = prepare_case(case, tmp_path / "cache", SPACING_MM, task, NAMES)
    grid = VoxelGrid((2, 3, 4), (4.0, 5.0, 6.0))
    calls: list[str] = []

    def predict() -> tuple[np.ndarray, VoxelGrid]:
        calls.append("predicted")
        time.sleep(0.2)
        return np.ones((3, *grid.shape), dtype=np.float16), grid

    with ThreadPoolExecutor(2) as ranks:
        found = list(ranks.map(lambda _: coarse_probs(entry, "weights", predict), range(2)))
    assert calls == ["predicted"]
    assert found[0] == found[1]


def test_several_spacings_read_the_files_once(case: Case, tmp_path: Path, task: Task) -> None:
    reads = []

    @functools.cache
    def read() -> SourceCase:
        reads.append(case)
        return read_source(case, task, NAMES)

    together = [
        prepare_case(case, tmp_path / "a", spacing, task, NAMES, read=read)
        for spacing in (SPACING_MM, (2.0, 2.0, 2.0))
    ]
    alone = [
        prepare_case(case, tmp_path / "b", spacing, task, NAMES)
        for spacing in (SPACING_MM, (2.0, 2.0, 2.0))
    ]
    assert len(reads) == 1
    for entry, expected in zip(together, alone, strict=True):
        assert np.array_equal(entry.image_hu, expected.image_hu)
        assert np.array_equal(entry.labels, expected.labels)


def test_a_cache_that_cannot_be_written_is_the_users_mistake(
    case: Case, tmp_path: Path, task: Task
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"data\.cache"):
        prepare_case(case, tmp_path / "file", SPACING_MM, task, NAMES)


def test_a_disk_that_fills_up_leaves_the_entry_as_it_was(
    case: Case, tmp_path: Path, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = prepare_case(case, tmp_path, SPACING_MM, task, NAMES)
    before = {path: path.read_bytes() for path in entry.folder.iterdir()}
    case.image.write_bytes(case.image.read_bytes() + b"\0")  # stale, so that it is built anew
    save = np.save

    saved = []

    def full_at_the_second(*arguments: Any) -> None:
        saved.append(arguments)
        if len(saved) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(*arguments)

    monkeypatch.setattr(np, "save", full_at_the_second)
    with pytest.raises(UserError) as caught:
        prepare_case(case, tmp_path, SPACING_MM, task, NAMES)
    assert str(caught.value) == (
        f"The case {case.name!r} could not be put into the cache {tmp_path} ([Errno 28] No "
        "space left on device); make sure that the "
        "folder can be written and has room (data.cache), and that the scan can be read."
    )
    assert {path: path.read_bytes() for path in entry.folder.iterdir()} == before
    assert list(entry.folder.parent.iterdir()) == [entry.folder], "nothing half-written is left"


def test_an_entry_is_on_the_disk_before_it_has_its_name(
    case: Case, tmp_path: Path, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power cut could leave files of the right size with empty pages."""
    synced: set[int] = set()
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.add(os.fstat(descriptor).st_ino))
    renamed: list[set[int]] = []
    rename = Path.rename

    def named(path: Path, target: Path) -> Path:
        renamed.append({file.stat().st_ino for file in path.iterdir()} - synced)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", named)
    prepare_case(case, tmp_path, SPACING_MM, task, NAMES)
    assert len(synced) == 3
    assert renamed[-1] == set()


def test_training_from_the_cache_needs_no_reader(case: Case, tmp_path: Path, task: Task) -> None:
    prepare_case(case, tmp_path, SPACING_MM, task, NAMES)
    program = f"""
import sys, json
from pathlib import Path
from medseg.data.cache import open_case
from medseg.data.case_table import Case
from medseg.data.crops import StageCrops
from medseg.data.options import StageOptions, StageName
from medseg.data.samples import Samples
from medseg.task import Task
task = Task.from_dict(json.loads({json.dumps(json.dumps(task.to_dict()))}))
case = Case({case.name!r}, Path({str(case.image)!r}), Path({str(case.labels)!r}), "p")
entry = open_case(case, Path({str(tmp_path)!r}), {SPACING_MM}, task, {NAMES})
samples = Samples(
    [entry], task, StageCrops(divisor=(8, 8, 8)), StageOptions(name=StageName.coarse), seed=0
)
print(samples[0]["target"].sum().item())
loaded = {{name.partition(".")[0] for name in sys.modules}}
assert not loaded & {{"SimpleITK", "nibabel", "pydicom", "monai", "scipy"}}, sorted(loaded)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        encoding="utf-8",
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0


def test_ready_refused_and_failed_cases(write_case: WriteCase, tmp_path: Path, task: Task) -> None:
    image, labels = blocks()
    accepted = frozenset({"hu_range"})
    good = replace(write_case("good", image, labels), ignore_findings=accepted)
    swapped = replace(
        write_case("swapped", image, np.array([0, 2, 1], np.uint8)[labels]),
        ignore_findings=accepted,
    )
    gone = Case("gone", tmp_path / "no.nii.gz", tmp_path / "none.nii.gz", "gone")
    cases = [(case, NAMES) for case in (swapped, gone, good)]
    (first, refused), (second, nothing), (third, entry) = prepare_cases(
        cases, tmp_path / "cache", task, [((4.0, 2.0, 2.0), "antialiased"), (None, "linear")]
    )
    assert [audited.status for audited in (first, second, third)] == ["refused", "failed", "ready"]
    assert "does not exist" in second.failure
    assert nothing is None
    assert refused is not None
    assert np.array_equal(refused.image_hu, image)
    assert entry is not None
    assert entry.grid.spacing_mm == (4.0, 2.0, 2.0), "the entry of the first spacing"
    assert len(list((tmp_path / "cache").glob("*/good-*/case.json"))) == 2


@pytest.mark.parametrize("order", [1, -1])
def test_what_any_spacing_loses_is_in_the_audit_of_the_case(
    order: int, case: Case, tmp_path: Path, task: Task
) -> None:
    """Voxels of 40 mm lose both lungs; the other spacing keeps them, whichever comes first."""
    targets = [((40.0, 40.0, 40.0), "antialiased"), (SPACING_MM, "antialiased")][::order]
    alone = []
    for number, target in enumerate(targets):
        ((audited, _),) = prepare_cases([(case, NAMES)], tmp_path / str(number), task, [target])
        assert audited.audit is not None
        alone.append(set(audited.audit.findings))
    ((together, _),) = prepare_cases([(case, NAMES)], tmp_path / "both", task, targets)
    assert together.audit is not None
    assert set(together.audit.findings) == alone[0] | alone[1]
    assert len(together.audit.findings) == len(set(together.audit.findings))
    assert alone[0] != alone[1]


def test_a_real_scan(shared_ct: Path, tmp_path: Path, task: Task) -> None:
    cases = {case.name: case for case in read_case_table(shared_ct / "table.csv")}
    entry = prepare_case(cases["cip_ct64"], tmp_path, (4.0, 4.0, 4.0), task, NAMES)
    litres = {
        name: np.count_nonzero(entry.labels == value) * 64e-6 for name, value in task.labels.items()
    }
    assert litres["left_lung"] == pytest.approx(2.135, rel=0.03)
    assert litres["right_lung"] == pytest.approx(2.419, rel=0.03)
    sample = Samples(
        [entry], task, StageCrops(divisor=(8, 8, 8)), StageOptions(name=StageName.coarse), seed=0
    )[0]
    assert float(sample["image"][0][sample["target"] > 0].median()) < -0.75
    swapped = Task(
        task.name,
        task.labels,
        (Region("a", ("left_lung",), "right"), Region("b", ("right_lung",), "left")),
        task.channels,
    )
    with pytest.raises(UserError, match="swapped"):
        prepare_case(cases["cip_ct64"], tmp_path, (4.0, 4.0, 4.0), swapped, NAMES)


def test_remarks_of_the_readers_are_kept(
    case: Case, tmp_path: Path, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    from medseg.io import read

    open_file = read._open
    monkeypatch.setattr(
        read,
        "_open",
        lambda path, *given, **options: dataclasses.replace(
            open_file(path, *given, **options),
            findings=tuple(warnings_of("reading", [f"repaired {path.name}"])),
        ),
    )
    prepare_case(case, tmp_path / "cache", SPACING_MM, task, NAMES)
    monkeypatch.undo()
    audit = open_case(case, tmp_path / "cache", SPACING_MM, task, NAMES).audit
    assert case.labels is not None
    remarks = [finding.message for finding in audit.findings if finding.code == "reading"]
    assert remarks == [f"repaired {case.image.name}", f"label map: repaired {case.labels.name}"]


@pytest.mark.timeout(30)
def test_a_device_has_no_fingerprint(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.nii.gz")
    (tmp_path / "zero.nii.gz").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe.nii.gz", tmp_path / "zero.nii.gz", Path("/dev/zero")):
        with pytest.raises(UserError, match="got a file of another kind"):
            fingerprint(path)
