"""Damaged files: what is read is what the file says, or one clear sentence is told."""

from __future__ import annotations

import contextlib
import shutil
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fuzz_mutations import SAMPLES, Sample, mutated
from fuzz_reference import READERS, Files
from io_volumes import finding_texts, make_labels

from medseg.errors import UserError
from medseg.io.read import read_image, read_labels
from medseg.io.volume import Volume
from medseg.io.write import write_labels

MAX_MEMORY_BYTES, MAX_SECONDS = 2**29, 10.0
SEED = 20261120


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """Let this process ask for little more memory than it has; more raises MemoryError."""
    statm = Path("/proc/self/statm")
    if not statm.is_file():  # elsewhere the limit is not kept
        yield
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    now = int(statm.read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MAX_MEMORY_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def read(path: Path) -> Volume | str:
    """The volume, or the sentence that refuses it."""
    start = time.perf_counter()
    try:
        with warnings.catch_warnings(action="error"):  # numpy's would reach the user
            return read_image(path)
    except UserError as error:
        return str(error)
    finally:
        assert time.perf_counter() - start < MAX_SECONDS


def judge(result: Volume | str, files: Files, sample: Sample, path: Path) -> None:
    """Assert that a result is right or a clear sentence."""
    if isinstance(result, str):
        assert result.startswith(f"{path}: ")
        assert len(result) < len(str(path)) + 400
        assert result.isprintable(), "one line, nothing that a terminal would act on"
        return
    values, corners = READERS[sample.kind](files, sample.name)
    assert result.array.shape == values.shape
    assert np.array_equal(result.array, values)
    assert np.allclose(result.grid.corners_xyz_mm(), corners, rtol=1e-6, atol=1e-3)
    # A result goes back to the same place.
    labels = np.resize(make_labels(), values.shape)
    out = path.with_name(f"result{''.join(path.suffixes)}".replace(".nhdr", ".nrrd"))
    write_labels(out, labels, result.grid, result.header)
    again = read_labels(out)
    assert np.array_equal(again.array, labels)
    assert again.grid.is_close(result.grid)


def fuzz(sample: Sample, folder: Path, count: int, seed: int) -> tuple[int, int]:
    """Read damaged copies; gives how many were read and how many were refused."""
    refused = 0
    for number in range(count):
        files = mutated(sample, np.random.default_rng([seed, number]))
        # New names each time: a file system waits for the disk when a file is replaced.
        path = folder / f"{number}" / sample.name
        path.parent.mkdir()
        for name, data in files.items():
            (path.parent / name).write_bytes(data)
        try:
            with little_memory():
                result = read(path)
            judge(result, files, sample, path)
        except BaseException as error:
            error.add_note(f"mutation {number} of seed {seed}; header {files[sample.name][:600]!r}")
            raise
        refused += isinstance(result, str)
        shutil.rmtree(path.parent)
    return count - refused, refused


@pytest.mark.parametrize("index", range(len(SAMPLES)))
def test_an_unchanged_file_is_read(tmp_path: Path, index: int) -> None:
    sample = SAMPLES[index]
    for name, data in sample.files.items():
        (tmp_path / name).write_bytes(data)
    result = read(tmp_path / sample.name)
    assert isinstance(result, Volume)
    assert finding_texts(result) == ()
    judge(result, sample.files, sample, tmp_path / sample.name)


@pytest.mark.parametrize("index", range(len(SAMPLES)))
def test_a_damaged_file_is_read_right_or_refused(tmp_path: Path, index: int) -> None:
    num_read, num_refused = fuzz(SAMPLES[index], tmp_path, 120, SEED)
    assert min(num_read, num_refused) > 10, "both ways were taken"


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(SAMPLES)))
def test_many_damaged_files_are_read_right_or_refused(tmp_path: Path, index: int) -> None:
    fuzz(SAMPLES[index], tmp_path, 1200, SEED + 1)
