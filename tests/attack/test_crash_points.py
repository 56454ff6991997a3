"""Kills and full disks at every change of a file, and processes that share a folder."""

from __future__ import annotations

import errno
import functools
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from medseg.data.cache import is_current, prepare_case
from medseg.data.case_table import read_case_table
from medseg.errors import UserError
from medseg.inference.options import InferenceOptions
from medseg.io.atomic import PART_PREFIX
from medseg.io.read import read_image
from medseg.memory.options import Accelerator
from medseg.prediction.case_report import checksums
from medseg.prediction.options import PredictConfig
from medseg.prediction.predict import predict_scans
from medseg.preprocess.scale import HuScale
from medseg.runs.folder import find_run, load_config
from medseg.runs.past_runs import find_runs, read_run
from medseg.runs.train_run import run_rank
from medseg.task import Channel, Region, Task
from tests.integration.conftest import COARSE, FINE, train
from tests.integration.test_runs import assert_equal, history

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

# Calls that change a folder or push a file to the disk.
CALLS = ("replace", "rename", "link", "unlink", "mkdir", "fsync")
# A server that has imported everything and computed nothing, so that a start takes a moment.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [__name__, "medseg.training.callbacks", "medseg.training.history", "medseg.training.loggers"]
)
SETTINGS = [
    "spacing=isotropic_4mm", "model.width=4", "model.depth=2", "model.blocks_per_level=[1,1,1]",
    "stage.validate_every=3",
    "checkpoint_every=1", "schedule=constant", "logger=csv", "steps=6",
]  # fmt: skip


def at_call(number: int, act: Callable[[str], None], counted: Any) -> None:
    """Let the n-th of the `CALLS` of this process do something else first; 0 only counts them."""

    def patch(name: str) -> None:
        original = getattr(os, name)

        @functools.wraps(original)
        def call(*arguments: Any, **options: Any) -> Any:
            counted.value += 1
            if number and counted.value >= number:
                act(name)
            return original(*arguments, **options)

        setattr(os, name, call)

    for name in CALLS:
        patch(name)


def die(_: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fill(name: str) -> None:
    if name != "unlink":  # which needs no room
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def child(
    work: Callable[..., Any],
    arguments: Sequence[Any],
    number: int,
    act: Callable[[str], None],
    counted: Any,
    log: Path,
) -> None:
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    at_call(number, act, counted)
    try:
        code = work(*arguments)
    except UserError as error:
        print(f"medseg: {error}", flush=True)
        code = 2
    except BaseException:
        traceback.print_exc()
        code = 99
    os._exit(code or 0)


def begin(
    work: Callable[..., Any],
    *arguments: Any,
    log: Path,
    number: int = 0,
    act: Callable[[str], None] = die,
) -> tuple[Any, Path, Any]:
    """Start a call in its own process; returns process, log and counter (keep a reference)."""
    counted = CONTEXT.Value("i", 0)
    process = CONTEXT.Process(target=child, args=(work, arguments, number, act, counted, log))
    process.start()
    return process, log, counted


def end(process: Any, log: Path, counted: Any) -> tuple[int, str, int]:
    """Wait for a process; returns its exit code, its output, and how often it made a call."""
    process.join(120)
    assert not process.is_alive(), "it hangs"
    said = log.read_text(encoding="utf-8")
    assert "Traceback" not in said, said
    return process.exitcode, said, counted.value


def run(work: Callable[..., Any], *arguments: Any, log: Path, **how: Any) -> tuple[int, str, int]:
    return end(*begin(work, *arguments, log=log, **how))


def disturb(
    work: Callable[..., Any],
    arguments: Callable[[Path], tuple[Any, ...]],
    act: Callable[[str], None],
    folder: Path,
) -> Iterator[tuple[Path, bool]]:
    """Disturb twenty processes, each at another call, and do their work again afterwards.

    Args:
        work: What a process does.
        arguments: Those of `work`, for a place of its own.
        act: What happens at the call.
        folder: Holds all places.

    Yields:
        A place, and whether its work must be whole: after the first process (True where nobody was
        told of a fault), and after the second.
    """
    code, said, num_calls = run(work, *arguments(folder / "0"), log=folder / "log")
    assert code == 0, said
    numbers = sorted({1 + round(share * (num_calls - 1) / 19) for share in range(20)})
    print(f"{len(numbers)} of {num_calls} calls disturbed")
    for number in numbers:
        given = arguments(folder / f"{number}")
        code, said, _ = run(work, *given, log=folder / "log", number=number, act=act)
        if act is die:
            assert code == -signal.SIGKILL
        else:
            assert code == 0 or (code == 2 and "No space left on device" in said), said
        yield folder / f"{number}", code == 0
        code, said, _ = run(work, *given, log=folder / "log")
        assert code == 0, said
        yield folder / f"{number}", True


def train_folder(run_dir: Path) -> int:
    return run_rank(load_config(run_dir))


@pytest.fixture(scope="module")
def whole(tiny_table: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing has disturbed."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    train(run_dir, tiny_table, *SETTINGS)
    return run_dir


def fresh(whole: Path, run_dir: Path) -> Path:
    """The same run, not begun."""
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(
        (whole / "config.yaml").read_text().replace(str(whole), str(run_dir))
    )
    return run_dir


def assert_whole(run_dir: Path, whole: Path) -> None:
    states = [
        torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
        for folder in (run_dir, whole)
    ]
    for key in ("state_dict", "optimizer_states"):
        assert_equal(states[0][key], states[1][key])
    assert history(run_dir) == history(whole)
    assert not list(run_dir.rglob(f"{PART_PREFIX}*"))
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "finished"


@pytest.mark.parametrize("act", [die, fill])
def test_a_run_survives_a_kill_or_a_full_disk_at_any_change_of_a_file(
    act: Callable[[str], None], whole: Path, tmp_path: Path
) -> None:
    for run_dir, is_done in disturb(
        train_folder, lambda run_dir: (fresh(whole, run_dir),), act, tmp_path
    ):
        for path in run_dir.glob("checkpoints/*.ckpt"):
            assert torch.load(path, weights_only=True)["medseg"]["step"] > 0, "half a file"
        if is_done:
            assert_whole(run_dir, whole)


TASK = Task(
    "lungs",
    {"left_lung": 1, "right_lung": 2},
    (Region("left_lung", ("left_lung",), "left"), Region("right_lung", ("right_lung",), "right")),
    (Channel(window_hu=(-1000.0, 400.0)),),
)
NAMES = {1: "left_lung", 2: "right_lung"}
SPACING_MM = (4.0, 4.0, 4.0)


def prepare_table(table: Path, cache: Path) -> None:
    for case in read_case_table(table):
        prepare_case(case, cache, SPACING_MM, TASK, NAMES)


@pytest.mark.parametrize("act", [die, fill])
def test_a_cache_survives_a_kill_or_a_full_disk_at_any_change_of_a_file(
    act: Callable[[str], None], tiny_table: Path, tmp_path: Path
) -> None:
    cases = read_case_table(tiny_table)
    for cache, is_done in disturb(prepare_table, lambda cache: (tiny_table, cache), act, tmp_path):
        is_whole = [is_current(case, cache, SPACING_MM, TASK, NAMES) for case in cases]
        assert all(is_whole) or not is_done
        for case in itertools.compress(cases, is_whole):
            entry = prepare_case(case, cache, SPACING_MM, TASK, NAMES).folder
            for path in (tmp_path / "0" / entry.relative_to(cache)).glob("*.npy"):
                assert (entry / path.name).read_bytes() == path.read_bytes()


@pytest.fixture(scope="module")
def trained(tiny_table: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("trained")
    return train(folder / "coarse", tiny_table, *COARSE), train(folder / "fine", tiny_table, *FINE)


def predict_folder(scans: Path, output: Path, checkpoints: tuple[Path, Path]) -> int:
    coarse, fine = ([str(path)] for path in checkpoints)
    config = PredictConfig(
        input=str(scans), output=str(output), coarse=coarse, fine=fine, accelerator=Accelerator.cpu,
        threads=1,
        inference=InferenceOptions(budget_gib=2.0),
    )  # fmt: skip
    cases = predict_scans(config)
    for case in cases:
        print(*case.messages, sep="\n", flush=True)
    return max(case.exit_code for case in cases)


@pytest.mark.parametrize("act", [die, fill])
def test_a_batch_survives_a_kill_or_a_full_disk_at_any_change_of_a_file(
    act: Callable[[str], None], trained: tuple[Path, Path], tiny_table: Path, tmp_path: Path
) -> None:
    scans = tmp_path / "scans"
    scans.mkdir()
    for number in range(3):
        shutil.copy(tiny_table.parent / f"c{number}.nii.gz", scans)
    for output, is_done in disturb(
        predict_folder, lambda output: (scans, output, trained), act, tmp_path
    ):
        for report in output.glob("[!.]*.json"):
            label_map = report.with_suffix(".nii.gz")
            assert json.loads(report.read_text())["results"] == checksums([label_map]), (
                "a report vouches for another map"
            )
        maps = {path.name: path.read_bytes() for path in output.glob("[!.]*.nii.gz")}
        assert not is_done or maps == {
            path.name: path.read_bytes() for path in (tmp_path / "0").glob("*.nii.gz")
        }


def at_once(*works: tuple[Any, ...], log: Path) -> list[tuple[int, str]]:
    """Run several calls with their arguments at the same moment; returns exit codes and output."""
    begun = [begin(*work, log=log.with_name(f"log {index}")) for index, work in enumerate(works)]
    return [end(*one)[:2] for one in begun]


def use_case(table: Path, cache: Path, offset: float, results: Path) -> None:
    """Prepare a case and read it many times, while another process does so with another scale."""
    case = replace(read_case_table(table)[0], hu=HuScale(offset=offset))
    entry = prepare_case(case, cache, SPACING_MM, TASK, NAMES)
    found = {float(np.median(entry.image_hu)) for _ in range(200)}
    results.write_text(json.dumps(sorted(found)))


def test_forty_races_in_one_folder(whole: Path, tiny_table: Path, tmp_path: Path) -> None:
    # One case in two scales: neither process may see the voxels of the other.
    for number in range(20):
        works = [
            (use_case, tiny_table, tmp_path / f"c{number}", offset, tmp_path / f"{offset}")
            for offset in (0.0, 100.0)
        ]
        for code, said in at_once(*works, log=tmp_path / "log"):
            assert code == 0, said
        (low,), (high,) = (json.loads((tmp_path / name).read_text()) for name in ("0.0", "100.0"))
        assert high == low + 100
    # One run resumed twice: one process trains, the other one says so or finds it finished.
    for number in range(10):
        run_dir = fresh(whole, tmp_path / f"r{number}")
        answers = at_once(*[(train_folder, run_dir)] * 2, log=tmp_path / "log")
        assert sorted(code for code, _ in answers) in ([0, 0], [0, 2]), answers
        assert_whole(run_dir, whole)
    # Runs that vanish while their neighbours are searched, or while they are reported.
    for _ in range(10):
        for name in ("a", "b", "c"):
            shutil.copytree(whole, tmp_path / "runs" / name, dirs_exist_ok=True)
        answers = at_once(
            (search_runs, tmp_path / "runs"), (remove_runs, tmp_path / "runs"), log=tmp_path / "log"
        )
        assert [code for code, _ in answers] == [0, 0], answers


def search_runs(folder: Path) -> None:
    config = load_config(folder / "a")
    for _ in range(5):
        find_run(config)
        for run_dir in find_runs(folder):
            read_run(run_dir, folder)


def remove_runs(folder: Path) -> None:
    for run_dir in sorted(folder.iterdir())[1:]:
        shutil.rmtree(run_dir)
        time.sleep(0.05)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MiB, where this machine permits one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.system(f"mount -t tmpfs -o size=3m tmpfs '{folder}' 2>/dev/null"):
        pytest.skip("no file system may be mounted here")
    try:
        yield folder
    finally:
        os.system(f"umount '{folder}'")


def test_a_disk_that_is_really_full(
    whole: Path, trained: tuple[Path, Path], tiny_table: Path, disk: Path, tmp_path: Path
) -> None:
    size = sum(path.stat().st_size for path in whole.rglob("*") if path.is_file())
    for room in (0, 1000, 20_000, size // 4, size // 2, size - 4096):
        filler = disk / "filler"
        filler.write_bytes(b"")
        run_dir = fresh(whole, disk / "run")
        free = os.statvfs(disk)
        with filler.open("wb") as file:
            file.write(bytes(max(0, free.f_bavail * free.f_frsize - room)))
        code, said, _ = run(train_folder, run_dir, log=tmp_path / "log")
        assert code == 2, said
        assert "No space left on device" in said
        output = disk / "out"
        code, said, _ = run(
            predict_folder,
            tiny_table.parent / "c0.nii.gz",
            output / "o.nii.gz",
            trained,
            log=tmp_path / "log",
        )
        assert code in (0, 2), said
        assert code == 0 or not list(output.glob("[!.]*")), "half a result"
        filler.unlink()
        code, said, _ = run(train_folder, run_dir, log=tmp_path / "log")
        assert code == 0, said
        assert_whole(run_dir, whole)
        code, said, _ = run(
            predict_folder,
            tiny_table.parent / "c0.nii.gz",
            output / "o.nii.gz",
            trained,
            log=tmp_path / "log",
        )
        assert code == 0, said
        assert read_image(output / "o.nii.gz").array.any()
        shutil.rmtree(run_dir)
        shutil.rmtree(output)


def train_with(method: str, run_dir: Path) -> int:
    multiprocessing.set_start_method(method, force=True)
    config = load_config(run_dir)
    config.data.num_workers = 2
    return run_rank(config)


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_loader_workers_of_any_start_method_train_the_same_run(
    method: str, whole: Path, tmp_path: Path
) -> None:
    run_dir = fresh(whole, tmp_path / "run")
    code, said, _ = run(train_with, method, run_dir, log=tmp_path / "log")
    assert code == 0, said
    assert_whole(run_dir, whole)
