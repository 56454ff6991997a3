"""Signals to a run and its process group, remains of a killed run, modules in the folder."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

import medseg
from medseg.io.atomic import is_locked
from medseg.runs.folder import LOCK_FILE

from .test_runs import command


def wait_for(
    condition: Callable[[], bool],
    process: subprocess.Popen[str] | None = None,
    limit_s: float = 300,
) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline_s:
            if process is not None:
                process.kill()
            raise AssertionError("it takes too long")
        assert process is None or process.poll() is None, process.communicate()[1]
        time.sleep(0.05)


def num_lines(path: Path) -> int:
    return path.read_text().count("\n") if path.is_file() else 0


def saved_step(run_dir: Path) -> int:
    step: int = torch.load(run_dir / "checkpoints" / "last.ckpt", weights_only=True)["global_step"]
    return step


ENDLESS = [
    "steps=1000",
    "stage.validate_every=100000",
    "checkpoint_every=null",
    "data.num_workers=2",
]
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def start(command: list[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stderr=subprocess.PIPE, encoding="utf-8", env=environment, start_new_session=True
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param([], id="one rank", marks=pytest.mark.thorough),
        pytest.param(["trainer=ddp", "stage.batch_size=2"], id="two ranks"),
    ],
)
def test_a_signal_to_the_process_group_saves_the_run_and_ends_all_processes(
    ranks: list[str], tiny_table: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    arguments = [*command(tiny_table, run_dir, *ENDLESS, *ranks), "resume=auto"]
    steps = [0]
    for number in SIGNALS if not ranks else SIGNALS[:1]:
        lines = num_lines(run_dir / "history.csv")
        process = start(arguments)
        wait_for(
            lambda lines=lines: num_lines(run_dir / "history.csv") > lines + (lines == 0), process
        )
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 2, "loader workers, or ranks with theirs"
        os.killpg(process.pid, number)
        _, said = process.communicate(timeout=120)
        assert process.returncode == 75, said
        assert "Traceback" not in said
        assert json.loads((run_dir / "summary.json").read_text())["status"] == "interrupted"
        assert not psutil.wait_procs(children, timeout=30)[1]
        steps.append(saved_step(run_dir))
    process = start(arguments)
    lines = num_lines(run_dir / "history.csv")
    wait_for(lambda: num_lines(run_dir / "history.csv") > lines, process)
    children = psutil.Process(process.pid).children(recursive=True)
    assert is_locked(run_dir / LOCK_FILE)
    process.kill()
    process.communicate()
    wait_for(
        lambda: (
            not is_locked(run_dir / LOCK_FILE) and not any(child.is_running() for child in children)
        ),
        limit_s=60,
    )
    assert steps == sorted(set(steps)), "it saved each time"
    assert [path.name for path in tmp_path.iterdir()] == ["run"], "it went on each time"


def job_status(job_dir: Path) -> str:
    path = job_dir / "job.json"
    return str(json.loads(path.read_text())["status"]) if path.is_file() else "none"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "to_group", "when"),
    [
        pytest.param("basic", False, "job.json", id="as a job starts"),
        pytest.param("basic", True, "history.csv", id="to the group, in a job"),
        pytest.param(
            "joblib", False, "history.csv", id="joblib, in a job", marks=pytest.mark.thorough
        ),
    ],
)
def test_a_signal_to_a_sweep_saves_its_job_and_ends_the_sweep(
    launcher: str, to_group: bool, when: str, tiny_table: Path, tmp_path: Path
) -> None:
    sweep_dir = tmp_path / "sweep"
    arguments = [
        *command(tiny_table, tmp_path, *ENDLESS, "seed=1,2"),
        f"hydra.sweep.dir={sweep_dir}",
    ]
    arguments += (
        ["hydra/launcher=joblib", "hydra.launcher.n_jobs=1"] if launcher == "joblib" else []
    )
    process = start([*arguments, "-m"])
    first = sweep_dir / "0"
    wait_for(lambda: num_lines(first / when) > (when == "history.csv"), process)
    children = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGTERM) if to_group else process.terminate()
    _, said = process.communicate(timeout=120)
    assert process.returncode == 75, said
    assert job_status(first) == "interrupted"
    assert when == "job.json" or saved_step(first) > 0
    assert not (sweep_dir / "1").exists(), "the next job does not begin"
    assert not psutil.wait_procs(children, timeout=30)[1]


@pytest.mark.slow
def test_nothing_in_the_working_folder_is_imported(tiny_table: Path, tmp_path: Path) -> None:
    for name in ("torch", "medseg", "pickle", "signal"):
        (tmp_path / f"{name}.py").write_text(
            f"open('imported_{name}', 'w')\nraise SystemExit(99)\n"
        )
    root = Path(medseg.__file__).parents[1]
    script = [sys.executable, str(root / "train.py")]
    for number, also in enumerate(([], ["trainer=ddp", "stage.batch_size=2"], ["seed=1"])):
        _, _, _, _, *arguments = command(
            tiny_table, tmp_path / str(number), "steps=1", "data.num_workers=1", *also
        )
        if "seed=1" in also:
            arguments += [f"hydra.sweep.dir={tmp_path / str(number)}", "-m"]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        result = subprocess.run(
            [*script, *arguments],
            cwd=tmp_path,
            capture_output=True,
            encoding="utf-8",
            env=environment,
        )
        assert result.returncode == 0, result.stderr
    assert not list(tmp_path.glob("imported_*"))


@pytest.mark.slow
def test_the_processes_of_a_clone_run_its_own_code(tiny_table: Path, tmp_path: Path) -> None:
    root, clone = Path(medseg.__file__).parents[1], tmp_path / "clone"
    for name in ("medseg", "conf"):
        shutil.copytree(root / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(root / "train.py", clone)
    module = clone / "medseg" / "runs" / "train_run.py"
    module.write_text(
        f"{module.read_text(encoding='utf-8')}\nwith open(__file__ + '.log', 'a') as log:\n   "
        " log.write('imported\\n')\n"
    )
    _, _, _, _, *arguments = command(
        tiny_table,
        tmp_path / "run",
        "steps=1",
        "data.num_workers=0",
        "trainer=ddp",
        "stage.batch_size=2",
    )
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run(
        [sys.executable, str(clone / "train.py"), *arguments],
        cwd=tmp_path,
        env=environment,
        check=True,
    )
    assert module.with_name("train_run.py.log").read_text() == "imported\n" * 3, (
        "the command and its two ranks"
    )


def ended(process: subprocess.Popen[str], run_dir: Path) -> tuple[int, str, dict[str, str]]:
    """Exit code, output without the start's lines, and summary of a run that must be refused."""
    _, said = process.communicate(timeout=120)
    assert "Traceback" not in said, said
    summary = (
        json.loads((run_dir / "summary.json").read_text())
        if (run_dir / "summary.json").is_file()
        else {}
    )
    return process.returncode, said, summary


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["rank", "loader worker"])
def test_a_killed_process_of_a_run_is_told_in_one_sentence(
    victim: str, tiny_table: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    also = ["trainer=ddp", "stage.batch_size=2", "data.num_workers=0"] if victim == "rank" else []
    process = start(command(tiny_table, run_dir, *ENDLESS, *also))
    wait_for(lambda: num_lines(run_dir / "history.csv") > 1, process)
    children = psutil.Process(process.pid).children(recursive=True)
    if victim == "rank":
        children = [
            child
            for child in children
            if any(file.path.endswith("rank1.log") for file in child.open_files())
        ]
    children = [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]
    children[0].kill()
    code, said, summary = ended(process, run_dir)
    words = "rank 1 was killed by signal 9" if victim == "rank" else "a loader worker ended ("
    assert (code, summary["status"]) == (1, "failed"), said
    assert words in summary["message"]
    assert words in said
    assert "memory" not in said, "nobody has said that it was full"


@pytest.mark.slow
def test_a_full_disk_is_one_sentence_and_the_run_goes_on_later(
    tiny_table: Path, tmp_path: Path
) -> None:
    arguments = [
        *command(
            tiny_table, tmp_path / "run", "steps=4", "data.num_workers=0", "schedule=constant"
        ),
        "resume=auto",
    ]
    subprocess.run(
        [*arguments, f"hydra.run.dir={tmp_path / 'first'}"], check=True
    )  # fills the cache
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # noqa: E731
    process = subprocess.Popen(
        arguments, stderr=subprocess.PIPE, encoding="utf-8", preexec_fn=limit
    )
    code, said, summary = ended(process, tmp_path / "run")
    assert (code, summary["status"]) == (2, "refused"), said
    assert "ckpt: cannot be written (File too large)" in said
    assert not list((tmp_path / "run" / "checkpoints").iterdir())
    subprocess.run(arguments, check=True)
    assert saved_step(tmp_path / "run") == 4
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "finished"
