"""Heap of the C library: freed tensors' memory returns also from below living tensors."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from medseg.commands import entry
from medseg.memory import heap

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")

# A large block that is freed first makes glibc serve the others from its heap; every second one is
# then a hole.
HOLES = """
from medseg.memory.heap import map_blocks_from, map_large_blocks
{call}
import torch
from medseg.memory.profile import resident_bytes
large = torch.ones(30 * 2**20, dtype=torch.uint8)
del large
before = resident_bytes()
blocks = [torch.ones({block_mib} * 2**20, dtype=torch.uint8) for _ in range(20)]
blocks[::2] = [None] * 10
print(round((resident_bytes() - before) / 2**20))
"""


def held_mib(call: str, block_mib: int = 5, **environment: str) -> int:
    """Resident memory for ten tensors of some MiB that lie between holes of the same size."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
    }
    command = [sys.executable, "-c", HOLES.format(call=call, block_mib=block_mib)]
    return int(
        subprocess.run(
            command, env=clean | environment, capture_output=True, check=True, text=True
        ).stdout
    )


@pytest.mark.slow
@pytest.mark.skipif(not heap._has_huge_pages(), reason="the kernel gives no huge pages")
def test_freed_tensors_leave_no_holes() -> None:
    assert held_mib("") > 90
    assert held_mib("map_large_blocks()") < 60
    assert held_mib("map_large_blocks()", MALLOC_MMAP_THRESHOLD_=str(2**25)) > 65, (
        "the user's own setting holds"
    )


@pytest.mark.slow
@pytest.mark.skipif(not heap._has_huge_pages(), reason="the kernel gives no huge pages")
def test_blocks_of_three_mebibytes_leave_no_holes_where_they_are_mapped() -> None:
    assert held_mib("map_large_blocks()", block_mib=3) > 50
    assert held_mib("map_large_blocks(); map_blocks_from(2 * 2**20)", block_mib=3) < 40
    assert held_mib("map_blocks_from(2 * 2**20)", block_mib=3) > 50, "glibc's own heap stays"


def test_the_size_of_mapped_blocks_is_changed_where_blocks_are_mapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_values: list[tuple[int, int]] = []
    library = SimpleNamespace(mallopt=lambda *values: set_values.append(values))
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda _: library)
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(2**25))  # a user's own
    heap.map_blocks_from(2 * 2**20)
    assert not set_values
    assert heap.min_mapped_bytes() == 4 * 2**20
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(4 * 2**20))
    for size in (2 * 2**20, 4 * 2**20):
        heap.map_blocks_from(size)
        assert set_values.pop() == (-3, size)
        assert heap.min_mapped_bytes() == size
        assert heap.maps_large_blocks()
        # Processes that this one starts do the same.
        assert os.environ["MALLOC_MMAP_THRESHOLD_"] == str(size)


def test_without_huge_pages_the_heap_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(heap, "HUGE_PAGES", tmp_path / "enabled")
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    for text in ("always madvise [never]\n", None):
        (tmp_path / "enabled").unlink(missing_ok=True)
        if text is not None:
            (tmp_path / "enabled").write_text(text, encoding="ascii")
        heap.map_large_blocks()
        assert not {"MALLOC_MMAP_THRESHOLD_", "THP_MEM_ALLOC_ENABLE"} & set(os.environ)


@pytest.mark.parametrize(
    "name", ["MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"]
)
def test_variables_of_the_user_leave_the_heap_as_it_is(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"}
    for variable in names:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, "1")
    heap.map_large_blocks()
    assert {variable: os.environ[variable] for variable in names & set(os.environ)} == {name: "1"}


def test_every_command_maps_large_blocks_first(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(entry, "map_large_blocks", lambda: called.append(True))
    monkeypatch.setattr(sys, "argv", ["predict", "nonsense=1"])
    with pytest.raises(SystemExit):
        entry.run("predict", lambda _: 0)
    assert called
