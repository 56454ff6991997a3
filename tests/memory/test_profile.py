"""Memory profile: the area under straight lines, for exactly as long as the block runs."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from medseg.errors import UserError
from medseg.memory import profile as memory_profile
from medseg.memory.profile import (
    MemoryProfile,
    free_memory_bytes,
    memory_limit_bytes,
    peak_resident_bytes,
    private_bytes,
    resident_bytes,
    timed_step,
)


def test_the_area_is_that_under_straight_lines() -> None:
    profile = MemoryProfile()
    for time_s, gigabytes in ((10.0, 1), (12.0, 3), (12.0, 5), (13.0, 0)):
        profile.add(time_s, gigabytes * 10**9)
    assert profile.area_gb_s == 2 * 2.0 + 0.0 + 2.5


GIB = 2**30


def write_groups(
    folder: Path, names: str, mounts: str, files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let this process be in control groups whose hierarchy is mounted in a folder."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    for name, text in (("CGROUPS", names), ("MOUNTS", mounts)):
        path = folder / name
        path.write_text(text.format(top=folder), encoding="ascii")
        monkeypatch.setattr(memory_profile, name, path)


UNIFIED = "30 25 0:26 / {top} rw shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
MEMORY = "33 25 0:29 {root} {{top}} rw - cgroup cgroup rw,memory\n"


@pytest.mark.parametrize(
    ("names", "mounts", "files", "expected"),
    [
        ("0::/\n", UNIFIED, {"memory.max": f"{GIB}\n"}, GIB),
        ("0::/a/b\n", UNIFIED, {"a/b/memory.max": "max\n", "a/memory.max": f"{GIB}\n"}, GIB),
        ("0::/a/b\n", UNIFIED, {"a/b/memory.max": f"{GIB}\n", "a/memory.max": f"{2 * GIB}\n"}, GIB),
        (
            "5:cpu:/other\n4:memory:/a/b\n0::/\n",
            MEMORY.format(root="/"),
            {"a/b/memory.limit_in_bytes": f"{2**62}\n", "a/memory.limit_in_bytes": f"{GIB}\n"},
            GIB,
        ),
        (
            "4:cpu,memory:/docker/1/job\n",
            MEMORY.format(root="/docker/1"),
            {"job/memory.limit_in_bytes": f"{GIB}\n", "memory.limit_in_bytes": f"{2 * GIB}\n"},
            GIB,
        ),
        (
            "4:memory:/../host\n",
            MEMORY.format(root="/docker/1"),
            {"memory.limit_in_bytes": f"{GIB}\n"},
            GIB,
        ),
        ("0::/a\n", UNIFIED, {"a/memory.max": "max\n"}, None),
        ("0::/a\n", UNIFIED, {"a/memory.max": f"{2**60}\n"}, None),
        ("4:memory:/a\n", "", {"a/memory.limit_in_bytes": f"{GIB}\n"}, None),
    ],
    ids=[
        "v2-root", "v2-outer", "v2-inner", "v1-outer", "v1-container", "v1-elsewhere", "v2-none",
        "v2-more", "unmounted",
    ],
)  # fmt: skip
def test_the_smallest_bound_of_nested_control_groups_counts(
    names: str,
    mounts: str,
    files: dict[str, str],
    expected: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_groups(tmp_path, names, mounts, files, monkeypatch)
    assert memory_limit_bytes() == (expected or psutil.virtual_memory().total)


def test_what_a_control_group_uses_is_not_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mib = 2**20
    files = {
        "a/memory.max": f"{100 * mib}\n",
        "a/memory.current": f"{60 * mib}\n",
        "a/memory.stat": f"anon {50 * mib}\ninactive_file {10 * mib}\n",
    }
    write_groups(tmp_path, "0::/a/job\n", UNIFIED, files, monkeypatch)
    assert free_memory_bytes() == 50 * mib, "cached files make room"
    (tmp_path / "a/memory.current").write_text(f"{200 * mib}\n", encoding="ascii")
    assert free_memory_bytes() == 0


def test_a_process_that_has_ended_takes_nothing() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert private_bytes(ended.pid) == 0


def test_the_profile_begins_and_ends_with_the_block_also_where_it_fails() -> None:
    outer_s = time.perf_counter()
    profile = MemoryProfile(lambda: 10**9)

    def work() -> float:
        with profile:
            inner_s = time.perf_counter()
            time.sleep(0.12)
            inner_s = time.perf_counter() - inner_s
            raise MemoryError(inner_s)

    with pytest.raises(MemoryError) as caught:
        work()
    outer_s = time.perf_counter() - outer_s
    assert caught.value.args[0] <= profile.area_gb_s * (1 + 1e-9) <= outer_s * (1 + 2e-9)
    before = profile.area_gb_s
    time.sleep(0.12)
    assert profile.area_gb_s == before


@pytest.mark.timeout(20)
def test_a_thread_that_finds_no_memory_does_not_stop_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(self: threading.Thread) -> None:
        raise MemoryError

    monkeypatch.setattr(
        threading.Thread, "_bootstrap", fail
    )  # what CPython does where the new thread cannot allocate
    with MemoryProfile(lambda: 10**9) as profile:
        time.sleep(0.06)
    assert profile.area_gb_s >= 0.06


def test_resident_memory_is_counted_in_bytes() -> None:
    before = resident_bytes()
    block = np.ones(2**26, dtype=np.uint8)
    grown = resident_bytes() - before
    assert 0.9 * block.nbytes < grown < 2 * block.nbytes
    assert peak_resident_bytes() >= before + grown - 2**20


def test_the_peak_is_that_of_the_process_alone() -> None:
    block = np.ones(2**29, dtype=np.uint8)
    code = "from medseg.memory.profile import peak_resident_bytes; print(peak_resident_bytes())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True
    )
    assert int(done.stdout) < block.nbytes


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_forked_processes_take_what_they_write_and_old_copies_of_what_their_parent_writes() -> None:
    """Two children share 64 MiB and write 8 each; the parent rewrites 32, whose old pages stay."""
    script = """
import mmap, os, sys
from medseg.memory.profile import bytes_beside, private_bytes
MIB = 2**20
shared = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
shared.madvise(mmap.MADV_NOHUGEPAGE)
shared[:] = b"1" * len(shared)
ready, release = os.pipe(), os.pipe()
children = []
for _ in range(2):
    pid = os.fork()
    if not pid:
        os.close(release[1])
        shared[-8 * MIB:] = b"2" * (8 * MIB)
        os.write(ready[1], b"1")
        os.read(release[0], 1)
        os._exit(0)
    children.append(pid)
for _ in children:
    os.read(ready[0], 1)
before = bytes_beside(os.getpid(), children)
shared[: 32 * MIB] = b"3" * (32 * MIB)
after = bytes_beside(os.getpid(), children)
print(before / MIB, (after - before) / MIB, sum(map(private_bytes, children)) / MIB)
os.close(release[1])
"""
    output = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    ).stdout
    own_mib, copies_mib, private_mib = map(float, output.split())
    assert own_mib == pytest.approx(16, abs=6)
    assert copies_mib == pytest.approx(32, abs=1)
    assert private_mib == pytest.approx(16, abs=6), (
        "pages that both children hold are private to neither"
    )


def test_a_step_begins_without_the_memory_of_the_one_before_and_a_failed_one_has_no_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(memory_profile, "release_free_memory", lambda: calls.append("released"))
    durations_s: dict[str, float] = {}
    for on_step in (calls.append, None):
        with timed_step(durations_s, on_step, "localise"):
            calls.append("runs")
    assert calls == ["released", "localise", "runs", "released", "runs"]
    assert durations_s["localise"] >= 0.0
    with pytest.raises(UserError), timed_step(durations_s, None, "join"):
        raise UserError("full")
    assert list(durations_s) == ["localise"]
