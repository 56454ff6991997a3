"""Search: each trial runs once, and the search goes on after a trial that failed."""

from __future__ import annotations

import importlib
import json
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import forked
import hydra
import pytest
import torch
import yaml
from omegaconf import DictConfig, OmegaConf
from torch.multiprocessing import start_processes

from medseg.commands.entry import run_command
from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.config.search import SearchConfig, SweepConfig
from medseg.errors import EXIT_OUT_OF_MEMORY, EXIT_RESUME, UserError
from medseg.runs import processes
from medseg.runs.folder import load_config
from medseg.runs.status import Status
from medseg.training.options import TrainConfig
from medseg.training.preemption import SIGNALS, STOP

pytest.importorskip("optuna", reason="the extra medseg[search] is not installed")
from medseg.studies import search
from medseg.studies.search import Compose, SearchJournal, check_space, composer

SPACE = {
    "optimizer.lr": {"type": "float", "low": 1e-3, "high": 1e-2, "log": True},
    "model.width": {"type": "choice", "choices": [8, 16]},
}

# Module with the entry of a job that trains nothing: its Dice is a function of the learning rate.
# If the folder has a file `slow`, a job with a low Dice takes long.
JOB = """
import json, time
from pathlib import Path
def entry(_, config):
    run_dir = Path(config.run_dir)
    lr = config.optimizer["lr"]
    with (run_dir.parent / "started.txt").open("a") as file:
        print(run_dir.name, file=file)
    dice = 0.9 - abs(lr - 0.003) * 20
    is_slow = dice < 0.88 and (run_dir.parent / "slow").exists()
    with (run_dir / "history.csv").open("w") as file:
        print("step,val_dice,seconds_per_step", file=file)
        for step in (10, 20, 30):
            print(f"{step},{dice * step / 30},0.1", file=file, flush=True)
            time.sleep(0.7 if is_slow else 0)
    summary = {"status": "finished", "val_dice_best": dice, "peak_gib": 1.0}
    (run_dir / "summary.json").write_text(json.dumps(summary))
"""


def space(**parameters: Any) -> str:
    return OmegaConf.to_yaml(OmegaConf.create({"name": "mine", "space": parameters or SPACE}))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return a function that runs the command in this process, with jobs that train nothing.

    The function returns the exit code.
    """
    (tmp_path / "fake_job.py").write_text(JOB)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "fake_job", raising=False)
    conf = tmp_path / "conf" / "sweep"
    conf.mkdir(parents=True)
    (conf / "mine.yaml").write_text(space())
    monkeypatch.setattr(processes, "_job", importlib.import_module("fake_job").entry)
    monkeypatch.setattr(processes, "LOOK_S", 0.05)
    # Jobs are forked from a server, which saves the imports of a new process.
    monkeypatch.setattr(
        torch.multiprocessing, "spawn", partial(start_processes, start_method="forkserver")
    )
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> int:
        command_line = ["sweep=mine", f"hydra.run.dir={tmp_path / 'a search (1)'}", *arguments]
        monkeypatch.setattr(
            sys, "argv", ["medseg search", "--config-dir", str(tmp_path / "conf"), *command_line]
        )
        with forked.served(), pytest.raises(SystemExit) as end:
            run_command("search")
        return int(end.value.code or 0)

    return call


def records(folder: Path) -> list[dict[str, Any]]:
    jobs = [json.loads(path.read_text()) for path in folder.glob("*/job.json")]
    return sorted(jobs, key=lambda job: int(job["number"]))


def study_of(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / "study.json").read_text())
    return loaded


def test_a_search_goes_on_only_when_asked_for_more(run: Callable[..., int], tmp_path: Path) -> None:
    folder = tmp_path / "a search (1)"
    assert run("sweep.num_trials=2") == 0
    jobs = records(folder)
    assert [job["status"] for job in jobs] == ["finished"] * 2
    assert jobs[0]["overrides"] == {"optimizer.lr": "0.005", "model.width": "16"}, (
        "first the experiment as it stands"
    )
    assert [
        load_config(folder / "0").optimizer["lr"],
        load_config(folder / "0").model["width"],
    ] == [0.005, 16]
    nearest = min(jobs, key=lambda job: abs(float(job["overrides"]["optimizer.lr"]) - 0.003))
    assert study_of(folder)["best"] == [nearest["number"]]
    assert ">Search</h2>" in (folder / "report.html").read_text(encoding="utf-8")
    assert run("sweep.num_trials=3", "sweep.pruner=none") == 0
    assert (folder / "started.txt").read_text().split() == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m"], "leave out -m"),
        (["+sweep.space.optimizer.lr=1"], "sweep.space"),
    ],
)  # fmt: skip
def test_a_refused_search_leaves_nothing(
    arguments: list[str],
    message: str,
    run: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(*arguments) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.rglob("study*"))


def test_a_search_that_is_asked_to_stop_before_its_first_trial_draws_none(
    run: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [(number, signal.signal(number, signal.SIG_IGN)) for number in SIGNALS]

    def ask_to_stop(config: SearchConfig) -> None:
        signal.raise_signal(signal.SIGTERM)
        assert STOP.is_asked

    monkeypatch.setattr(search, "resolve_paths_and_spacing", ask_to_stop)
    monkeypatch.setattr(STOP, "is_safe", False)
    try:
        assert run() == EXIT_RESUME
    finally:
        STOP.is_asked = False
        for number, handler in before:
            signal.signal(number, handler)
    assert not list(tmp_path.rglob("study.journal"))


# The tests below start no processes, and compose without Hydra.


@pytest.fixture(scope="module")
def base() -> DictConfig:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return hydra.compose(
            "search",
            ["sweep=coarse_basics", "run_dir=none", "sweep.sampler=random", "sweep.pruner=none"],
        )


class Trials:
    """A search whose trainings are replaced by a function: run folder to exit code."""

    def __init__(self, base: DictConfig, folder: Path) -> None:
        self.base = base
        self.folder = folder
        self.started: list[int] = []

    def config(self, num_trials: int, **parameters: Any) -> SearchConfig:
        asked = OmegaConf.create(OmegaConf.to_container(self.base))
        asked.sweep.space, asked.sweep.num_trials = parameters or SPACE, num_trials
        return to_config(asked, SearchConfig)

    def go_on(
        self, work: Callable[[Path], int], num_trials: int, **parameters: Any
    ) -> list[dict[str, Any]]:
        """Run the trials that are left, until one is interrupted; returns all `job.json`."""
        plain = {
            key: value for key, value in OmegaConf.to_container(self.base).items() if key != "sweep"
        }
        study = SearchJournal(self.folder, self.config(num_trials, **parameters).sweep)

        def compose(values: Any) -> DictConfig:
            composed = OmegaConf.create(plain)
            for key, value in values.items():
                OmegaConf.update(composed, key, yaml.safe_load(value))
            return composed

        def run_in_process(config: TrainConfig, is_enough: Callable[[], bool]) -> int:
            run_dir = Path(config.run_dir)
            self.started.append(int(run_dir.name))
            return work(run_dir)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(search, "run_in_process", run_in_process)
            for trial, overrides in study.trials():
                if search.run_trial(study, trial, overrides, compose) is Status.interrupted:
                    break
        return records(self.folder)

    def states(self) -> list[str]:
        """List the states of the trials in the journal of Optuna."""
        return [
            trial.state.name
            for trial in SearchJournal(self.folder, self.config(1).sweep).study.trials
        ]


@pytest.fixture
def trials(base: DictConfig, tmp_path: Path) -> Trials:
    return Trials(base, tmp_path)


def finish(run_dir: Path) -> int:
    dice = 0.9 - abs(load_config(run_dir).optimizer["lr"] - 0.003)
    (run_dir / "summary.json").write_text(json.dumps({"status": "finished", "val_dice_best": dice}))
    return 0


def test_what_ends_a_trial_is_recorded_and_the_search_goes_on(trials: Trials) -> None:
    def work(run_dir: Path) -> int:
        width = load_config(run_dir).model["width"]
        if width == 24:
            (run_dir / "summary.json").write_text(
                json.dumps({"status": "out_of_memory", "message": "too wide"})
            )
        return {8: 0, 12: -signal.SIGSEGV, 24: EXIT_OUT_OF_MEMORY}[width] or finish(run_dir)

    widths = {"type": "choice", "choices": [8, 12, 24]}
    jobs = trials.go_on(
        work,
        12,
        **{"model.width": widths, "memory.accumulate": {"type": "int", "low": 1, "high": 2}},
    )
    of_width = {8: "finished", 12: "failed", 24: "out_of_memory"}
    expected = [
        "refused"
        if job["overrides"]["memory.accumulate"] == "2"
        else of_width[int(job["overrides"]["model.width"])]
        for job in jobs
    ]
    assert [job["status"] for job in jobs] == expected
    messages = {job["status"]: job["message"] for job in jobs}
    assert messages.keys() == {"refused", "finished", "failed", "out_of_memory"}
    assert "choose a multiple of 2" in messages["refused"]
    assert messages["out_of_memory"] == "too wide"
    of_status = {
        "refused": "PRUNED",
        "finished": "COMPLETE",
        "failed": "FAIL",
        "out_of_memory": "PRUNED",
    }
    assert trials.states() == [of_status[job["status"]] for job in jobs]
    assert len(trials.started) == len(set(trials.started)) == 12 - expected.count("refused")


def test_an_interrupted_trial_goes_on_and_no_other_is_repeated(trials: Trials) -> None:
    assert len(trials.go_on(finish, 2)) == 2
    left = trials.go_on(lambda run_dir: EXIT_RESUME, 4)
    assert [job["status"] for job in left] == ["finished", "finished", "interrupted"]
    jobs = trials.go_on(finish, 4)
    assert [job["status"] for job in jobs] == ["finished"] * 4
    assert trials.started == [0, 1, 2, 2, 3]
    assert jobs[2]["overrides"] == left[2]["overrides"]


def test_a_search_that_was_killed_with_its_trial_goes_on_with_it(trials: Trials) -> None:
    def die(run_dir: Path) -> int:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trials.go_on(die, 2)
    assert [job["status"] for job in records(trials.folder)] == ["interrupted"]
    # The training had finished nevertheless: its result counts, and it is not run again.
    finish(trials.folder / "0")
    assert [job["status"] for job in trials.go_on(finish, 2)] == ["finished", "finished"]
    assert trials.started == [0, 1]
    assert trials.states() == ["COMPLETE", "COMPLETE"]


def test_without_validation_there_is_nothing_to_search_by(trials: Trials) -> None:
    def work(run_dir: Path) -> int:
        (run_dir / "summary.json").write_text(json.dumps({"status": "finished"}))
        return 0

    with pytest.raises(UserError, match="finished without val_dice: are there validation cases"):
        trials.go_on(work, 3)


def test_a_folder_is_of_one_search(trials: Trials) -> None:
    search.open_folder(trials.folder, trials.config(3))
    search.open_folder(trials.folder, trials.config(9))
    with pytest.raises(
        UserError,
        match=r"another search, .* sweep\.space\.model\.width\.type: choice then, None now",
    ):
        search.open_folder(
            trials.folder, trials.config(3, **{"optimizer.lr": SPACE["optimizer.lr"]})
        )
    other = trials.config(3)
    other.model["depth"] = 2
    with pytest.raises(UserError, match=r"model\.depth: 3 then, 2 now"):
        search.open_folder(trials.folder, other)


def test_of_two_searches_that_begin_at_the_same_moment_one_has_the_folder(
    trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    both_are_here, to_yaml = threading.Barrier(2, timeout=30), OmegaConf.to_yaml
    monkeypatch.setattr(OmegaConf, "to_yaml", lambda node: (both_are_here.wait(), to_yaml(node))[1])
    configs = [trials.config(3), trials.config(3)]
    configs[1].model["depth"] = 2
    with ThreadPoolExecutor(2) as pool:
        ends = [
            future.exception()
            for future in [
                pool.submit(search.open_folder, trials.folder, config) for config in configs
            ]
        ]
    assert sorted(isinstance(end, UserError) for end in ends) == [False, True]
    assert ends.count(None) == 1


@pytest.fixture(scope="module")
def composed() -> Iterator[Callable[[SearchConfig], Compose]]:
    """Return the function with which the command composes trials by Hydra."""
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        yield lambda config: composer(
            ["optimizer.lr=0.5", "+sweep.seed=1", "steps=7"], config.sweep
        )


def test_trials_say_the_searched_keys_and_the_command_line_the_others(
    trials: Trials, composed: Any
) -> None:
    config = trials.config(1, memory={"type": "choice", "choices": ["plain", "amp"]}, **SPACE)
    made = composed(config)({"memory": "amp", "optimizer.lr": "0.25"})
    assert (made.memory.precision, made.optimizer.lr, made.schedule.max_lr, made.steps) == (
        "bf16",
        0.25,
        0.25,
        7,
    )
    assert "sweep" not in made


@pytest.mark.parametrize(
    ("key", "parameter", "message"),
    [
        (
            "optimizer.lrr",
            {"type": "float", "low": 1, "high": 2},
            "(got an unexpected keyword argument 'lrr'); did you mean lr?",
        ),
        (
            "optimizer.lr",
            {"type": "float", "low": -1, "high": 2},
            "optimizer.lr: must lie in (0, inf), but got -1",
        ),
        ("model.width", {"type": "float", "low": 1, "high": 2.5}, "model.width: Value '2.5'"),
        (
            "memory",
            {"type": "choice", "choices": ["plain", "tiny"]},
            "'memory/tiny'; there are: amp,",
        ),
    ],
)  # fmt: skip
def test_a_value_that_no_run_could_have_is_refused(
    key: str, parameter: Any, message: str, trials: Trials, composed: Any
) -> None:
    config = trials.config(1, **{key: parameter})
    with pytest.raises(UserError) as caught:
        check_space(config.sweep, composed(config))
    assert message in str(caught.value)
    assert str(caught.value).startswith("sweep.space: ")


def test_values_that_only_go_together_are_no_mistake(trials: Trials, composed: Any) -> None:
    config = trials.config(
        1,
        **{
            "memory.accumulate": {"type": "choice", "choices": [1, 2]},
            "stage.batch_size": {"type": "int", "low": 1, "high": 2},
        },
    )
    check_space(config.sweep, composed(config))


# The tests below start real processes.


@pytest.mark.slow
def test_a_trial_below_the_median_is_ended_early(run: Callable[..., int], tmp_path: Path) -> None:
    folder = tmp_path / "a search (1)"
    drawn = (
        "sweep.seed=3",
        "sweep.sampler=random",
        "sweep.prune_after_steps=10",
        "sweep.prune_after_trials=2",
    )
    assert run("sweep.num_trials=4", *drawn) == 0
    (folder / "slow").touch()
    assert run("sweep.num_trials=9", *drawn) == 0
    jobs = records(folder)
    pruned = [job for job in jobs if job["status"] == "pruned"]
    assert pruned
    assert {job["status"] for job in jobs} == {"finished", "pruned"}
    assert all("below the median" in job["message"] for job in pruned)
    distance = [abs(float(job["overrides"]["optimizer.lr"]) - 0.003) for job in jobs]
    assert study_of(folder)["best"] == [distance.index(min(distance))]
    assert f"\n{pruned[0]['number']},pruned," in (folder / "report.csv").read_text()


# Kills the search when the third trial has begun, as the system does when memory is full.
KILLED_SEARCH = """
import os, signal, sys
from medseg.commands.entry import run_command
from medseg.studies import search
from pathlib import Path
start = search.run_in_process
def run_in_process(config, is_enough):
    run_dir = Path(config.run_dir)
    def look():
        if run_dir.name == "2" and (run_dir / "checkpoints" / "last.ckpt").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return is_enough()
    return start(config, look)
search.run_in_process = run_in_process
sys.argv[0] = "medseg search"
run_command("search")
"""


def seed_that_draws(rates: list[str], config: SweepConfig, folder: Path) -> int:
    """Find a seed with which the trials after the first one draw these learning rates."""
    for seed in range(1000):
        study = SearchJournal(
            Path(tempfile.mkdtemp(dir=folder)),
            replace(config, seed=seed, num_trials=len(rates) + 1),
        )
        study.begin_with({"optimizer.lr": 0.01})
        drawn = [
            (values["optimizer.lr"], study.close(trial.number, [0.0]))[0]
            for trial, values in study.trials()
        ]
        if drawn[1:] == rates:
            return seed
    raise AssertionError(f"no seed draws {rates}")


@pytest.mark.slow
def test_a_search_killed_in_the_middle_goes_on_and_repeats_nothing(
    trials: Trials, tiny_table: Path, tmp_path: Path
) -> None:
    # At 1e30 the loss is not finite; at 1e-9 nothing is learned, so that the trial lies below the
    # median.
    drawn = {"optimizer.lr": {"type": "choice", "choices": [0.01, 1e30, 1e-9]}}
    conf, folder = tmp_path / "conf" / "sweep", tmp_path / "search"
    conf.mkdir(parents=True)
    (conf / "mine.yaml").write_text(space(**drawn))
    seed = seed_that_draws(["1e+30", "0.01", "1e-09"], trials.config(4, **drawn).sweep, tmp_path)
    arguments = [
        "--config-dir", str(tmp_path / "conf"), "sweep=mine", "sweep.num_trials=4",
        "sweep.sampler=random", f"sweep.seed={seed}",
        "sweep.prune_after_trials=1", "sweep.prune_after_steps=20", "steps=120",
        "stage.validate_every=20", "spacing=isotropic_4mm",
        "model.width=4", "augment=none", "schedule=constant", "optimizer.lr=0.01",
        f"data.cases={tiny_table}",
        f"data.cache={tiny_table.parent / 'cache'}", "data.num_workers=0", "logger=none",
        "trainer.accelerator=cpu", "trainer.threads=1",
        f"hydra.run.dir={folder}",
    ]  # fmt: skip
    killed = forked.run([sys.executable, "-c", KILLED_SEARCH, *arguments], cwd=tmp_path)
    assert killed.returncode == -signal.SIGKILL
    assert [job["status"] for job in records(folder)] == ["finished", "not_finite", "running"]
    command = [sys.executable, "-m", "medseg.commands.cli", "search", *arguments]
    forked.run(command, cwd=tmp_path, check=True)
    jobs = records(folder)
    assert [job["status"] for job in jobs] == ["finished", "not_finite", "finished", "pruned"]
    starts = [
        len(json.loads((folder / str(job["number"]) / "versions.json").read_text())) for job in jobs
    ]
    assert starts == [1, 1, 2, 1]
    assert study_of(folder)["best"] == [0, 2], "the same values end alike, killed or not"
    assert len((folder / "report.csv").read_text().splitlines()) == 5
    forked.run(command, cwd=tmp_path, check=True)
    assert [
        len(json.loads((folder / str(job["number"]) / "versions.json").read_text())) for job in jobs
    ] == starts


@pytest.mark.thorough
@pytest.mark.slow
def test_two_searches_in_one_folder_share_its_trials(
    run: Callable[..., int], tmp_path: Path
) -> None:
    folder = tmp_path / "a search (1)"
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); import fake_job; from medseg.runs "
        "import processes; "
        "from medseg.commands.entry import run_command; processes._job = fake_job.entry; "
        "run_command('search')"
    )
    command = [
        sys.executable, "-c", code, str(tmp_path), "--config-dir", str(tmp_path / "conf"),
        "sweep=mine", "sweep.num_trials=6", "sweep.pruner=none",
        f"hydra.run.dir={folder}",
    ]  # fmt: skip
    folder.mkdir()
    (folder / "slow").touch()
    both = [forked.Popen(command, cwd=tmp_path) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert sorted((folder / "started.txt").read_text().split()) == ["0", "1", "2", "3", "4", "5"]
    assert [job["status"] for job in records(folder)] == ["finished"] * 6
