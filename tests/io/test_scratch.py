"""Scratch arrays: values as in memory, pages that leave the process, files that leave the disk."""

from __future__ import annotations

import errno
import gc
import os
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from medseg.errors import UserError
from medseg.io import scratch
from medseg.io.scratch import (
    new_array,
    new_tensor,
    release_pages,
    scratch_above,
    scratch_array,
    scratch_at_most,
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_only_larger_arrays_of_this_thread_are_files() -> None:
    def num_files() -> int:
        gc.collect()
        return len(scratch._maps)

    before = num_files()
    with scratch_above(1000):
        small, large, tensor = (
            new_array((10, 50), np.int16),
            new_array((10, 51), np.int16),
            new_tensor((3, 100), torch.float32),
        )
        assert num_files() == before + 2
        other = threading.Thread(target=lambda: new_array((4000,), np.uint8))
        other.start()
        other.join()
    outside = new_array((4000,), np.uint8)
    assert num_files() == before + 2
    for array in (small, large, outside):
        assert not array.any()
        array[...] = 7
        assert (array == 7).all()
    tensor.normal_()
    copied = tensor.clone()
    release_pages()
    assert torch.equal(tensor, copied)
    assert (large == 7).all()
    del large, tensor
    assert num_files() == before


def test_arrays_that_wait_have_a_limit_of_their_own() -> None:
    def are_files(num_bytes: int) -> tuple[bool, bool]:
        before = len(scratch._maps)
        array = new_array((num_bytes,), np.uint8, waits=True)
        is_file = len(scratch._maps) > before
        tensor = new_tensor((num_bytes,), torch.uint8, waits=True)
        assert array.nbytes == tensor.nbytes
        return is_file, len(scratch._maps) > before + is_file

    with scratch_above(1000, waiting_bytes=100):
        assert are_files(100) == (False, False)
        assert are_files(101) == (True, True)
        assert new_array((1000,), np.uint8).base is None
        with scratch_at_most(500):
            assert are_files(101) == (True, True)
    with scratch_above(100, waiting_bytes=1000):
        assert are_files(101) == (True, True)
    assert are_files(10_000) == (False, False)


def test_an_array_that_waits_stays_in_memory_where_the_disk_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def has_no_room(descriptor: int, num_bytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(scratch, "_reserve", has_no_room)
    num_maps = len(scratch._maps)
    with scratch_above(1000, waiting_bytes=100):
        assert not new_array((20, 50), np.uint8, waits=True).any()
        assert new_tensor((20, 50), torch.uint8, waits=True).shape == (20, 50)
        assert len(scratch._maps) == num_maps
        with pytest.raises(UserError, match="expected room for a temporary file"):
            new_array((1001,), np.uint8, waits=True)


def test_an_array_that_waits_stays_in_memory_where_no_folder_can_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def has_none() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", has_none)
    with scratch_above(1000, waiting_bytes=100):
        assert not new_array((20, 50), np.uint8, waits=True).any()
        with pytest.raises(UserError, match="set TMPDIR to one"):
            new_array((1001,), np.uint8)


def test_released_pages_leave_the_memory_and_keep_their_values(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bytes_held() -> int:
        return sum(
            area.rss for area in psutil.Process().memory_maps() if area.path.startswith(str(folder))
        )

    # The thread of this array, or of one of an earlier test, releases nothing.
    monkeypatch.setattr(scratch, "release_pages", lambda: None)
    array = scratch_array((64, 2**20), np.uint8)
    array[...] = np.arange(64, dtype=np.uint8)[:, None]
    assert bytes_held() == 64 * 2**20
    release_pages()
    assert bytes_held() == 0
    assert (array[:, ::4096] == np.arange(64)[:, None]).all()


def test_no_name_is_left_and_a_full_disk_is_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = scratch_array((1000,), np.float32)
    assert list(folder.iterdir()) == []
    assert array.nbytes == 4000

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        UserError,
        match=r"expected room for a temporary file of 0\.50 GiB, but found none \(No space left",
    ):
        scratch_array((2**29,), np.uint8)


def test_a_file_that_cannot_be_mapped_is_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(scratch.mmap, "mmap", refuse)
    with pytest.raises(MemoryError, match=r"map a temporary file of 0\.50 GiB"):
        scratch_array((2**29,), np.uint8)


def test_without_tmpdir_the_files_are_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TMPDIR")
    assert scratch.scratch_folder() == Path(
        "/var/tmp" if os.access("/var/tmp", os.W_OK) else tempfile.gettempdir()
    )


def test_one_thread_releases_the_pages_while_there_are_arrays(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(
        scratch._thread,
        "start_new_thread",
        lambda entry, arguments: started.append((entry, arguments)),
    )
    monkeypatch.setattr(scratch, "_maps", set[Any]())
    with scratch_above(1000):
        arrays = [new_array((2000,), np.uint8)]
        assert len(started) == 1, "with the first array"
        arrays.append(new_array((2000,), np.uint8))
        assert len(scratch._maps) == 2
    assert started == [(scratch._release_repeatedly, ())]
    slept: list[float] = []
    released: list[int] = []
    monkeypatch.setattr(scratch.time, "sleep", slept.append)
    monkeypatch.setattr(
        scratch, "release_pages", lambda: (released.append(len(scratch._maps)), scratch._maps.pop())
    )
    scratch._release_repeatedly()
    assert released == [2, 1], "it ends with the last array"
    assert slept == [scratch.RELEASE_INTERVAL_S] * 2
    assert all(not array.any() for array in arrays)


def test_short_lived_arrays_leave_one_thread(folder: Path) -> None:
    time.sleep(5 * scratch.RELEASE_INTERVAL_S)  # threads of earlier tests end
    before = psutil.Process().num_threads()
    for _ in range(20):
        scratch_array((1000,), np.uint8)
    array = scratch_array((1000,), np.uint8)
    time.sleep(5 * scratch.RELEASE_INTERVAL_S)
    assert psutil.Process().num_threads() <= before + 1
    assert not array.any()


def test_a_forked_child_can_make_arrays(folder: Path) -> None:
    """The thread of the parent, which is not forked, holds the lock at any moment."""
    array = scratch_array((1000,), np.uint8)
    with ThreadPoolExecutor(1) as pool:
        scratch._lock.acquire()
        pool.submit(lambda: (time.sleep(0.2), scratch._lock.release()))
        child = os.fork()
        if child == 0:
            is_free = scratch._lock.acquire(timeout=5)
            # No map of the parent is left: the first array of the child starts its thread.
            os._exit(0 if is_free and not scratch._maps else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not array.any()
    assert len(scratch._maps) >= 1
