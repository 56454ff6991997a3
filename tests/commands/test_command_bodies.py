"""Bodies of the commands: which run is opened, what is printed, and the exit code."""

from __future__ import annotations

import inspect
import io
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import hydra
import numpy as np
import pytest
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from rich.console import Console
from rich.progress import Progress

from medseg import __version__
from medseg.commands import cli, entry, evaluate, export, find_lr, predict, prepare, train
from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.config.schema import EvaluateConfig, ExportConfig, FindLrConfig
from medseg.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OUT_OF_MEMORY,
    EXIT_RESUME,
    EXIT_UNREAD,
    EXIT_USER_ERROR,
    UserError,
)
from medseg.evaluation.scoring import evaluate_folder
from medseg.inference.options import Backend, InferenceOptions
from medseg.io.tables import read_csv
from medseg.runs.folder import CONFIG_FILE
from medseg.runs.status import Status
from medseg.training.options import TrainConfig


def compose(command: str, schema: type, *overrides: str) -> Any:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return to_config(hydra.compose(command, list(overrides)), schema)


class Command:
    """What `train` sees of Hydra and of the processes of a run."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.started, self.code = folder, list[Any](), 0
        self.hydra = SimpleNamespace(
            mode=RunMode.RUN,
            overrides=SimpleNamespace(hydra=["hydra.x=1"], task=["seed=3"]),
            runtime=SimpleNamespace(output_dir=str(folder / "empty")),
        )
        monkeypatch.setattr(HydraConfig, "get", lambda: self.hydra)
        monkeypatch.setattr(train, "start_ranks", self.start)
        monkeypatch.setattr(train, "rank", lambda: 0)
        monkeypatch.setattr(train, "is_under_torchrun", lambda: False)
        monkeypatch.setattr(train, "num_restarts", lambda: 0)
        self.config = compose(
            "train", TrainConfig, f"run_dir='{folder / 'run'}'", "logger=none", "seed=3"
        )

    def start(self, config: TrainConfig) -> int:
        self.started.append((config.run_dir, config.resume))
        return self.code


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(tmp_path, monkeypatch)


def test_a_run_is_opened_and_its_empty_folder_removed(command: Command) -> None:
    (command.folder / "empty").mkdir()
    assert train.train(command.config) == 0
    assert command.started == [(str(command.folder / "run"), None)]
    assert (command.folder / "run" / CONFIG_FILE).is_file()
    assert not (command.folder / "empty").exists()


def test_a_table_of_jobs_that_cannot_be_written_leaves_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(folder: Path) -> Path:
        raise UserError(f"{folder}: cannot be written")

    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    monkeypatch.setattr(train.STOP, "install", lambda: None)
    monkeypatch.setattr(train.entry, "run", lambda *_, **__: sys.exit(EXIT_OUT_OF_MEMORY))
    monkeypatch.setattr(train.sweeps.SweepFolder, "started", [tmp_path])
    monkeypatch.setattr(train.sweeps, "compare", refuse)
    with pytest.raises(SystemExit) as end:
        train.main()
    assert end.value.code == EXIT_OUT_OF_MEMORY
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "own_rank", "is_told"),
    [(EXIT_OUT_OF_MEMORY, 0, True), (EXIT_OUT_OF_MEMORY, 1, False), (1, 0, False)],
)
def test_the_first_rank_without_memory_names_the_plan(
    code: int,
    own_rank: int,
    is_told: bool,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command.code = code
    planned: list[Any] = []
    monkeypatch.setattr(train, "rank", lambda: own_rank)
    monkeypatch.setattr(train, "open_or_leave", lambda config, is_chosen_by_user: config)
    monkeypatch.setattr(train, "is_under_torchrun", lambda: own_rank > 0)
    monkeypatch.setattr(train, "from_first_rank", lambda opened: opened or command.config)
    monkeypatch.setattr(
        train, "plan_command", lambda config, arguments: planned.append(arguments) or "medseg plan"
    )
    assert train.train(command.config) == code
    assert planned == [["hydra.x=1", "seed=3"]] * is_told
    assert (
        "find switches that fit into this machine: medseg plan" in capsys.readouterr().err
    ) == is_told


@pytest.mark.parametrize(
    ("hydra_keys", "keys", "is_chosen_by_user"),
    [
        ([], ["seed=1"], False),
        (["hydra.run.dir=x"], [], True),
        ([], ["run_dir=x"], True),
        ([], ["stage.run_dir=x"], False),
    ],
)
def test_a_folder_that_the_user_names_is_told_from_the_default(
    hydra_keys: list[str],
    keys: list[str],
    is_chosen_by_user: bool,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[bool] = []
    command.hydra.overrides = SimpleNamespace(hydra=hydra_keys, task=keys)
    monkeypatch.setattr(
        train, "open_or_leave", lambda config, is_chosen_by_user: asked.append(is_chosen_by_user)
    )
    assert train.train(command.config) == 0
    assert asked == [is_chosen_by_user]
    assert command.started == [], "a finished run is not started"


def test_a_multirun_is_a_job_of_its_sweep_and_not_of_torchrun(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    command.hydra.mode = RunMode.MULTIRUN
    monkeypatch.setattr(train.sweeps, "run_job", lambda config: 17)
    assert train.train(command.config) == 17
    monkeypatch.setattr(train, "is_under_torchrun", lambda: True)
    with pytest.raises(UserError, match="a multirun cannot run under torchrun"):
        train.train(command.config)


@pytest.mark.parametrize(
    ("resume", "restarts", "found", "is_over", "opened", "said"),
    [
        (None, 0, None, False, None, ""),
        ("old", 0, None, False, "old", "resuming old"),
        ("old", 0, None, True, None, "already finished: "),
        ("auto", 0, None, False, None, ""),
        ("auto", 0, ("other", Status.interrupted), False, "other", "resuming other"),
        ("auto", 0, ("other", Status.finished), False, None, "already finished: other"),
        (None, 2, ("other", Status.failed), False, "other", "resuming other"),
    ],
)
def test_a_run_is_resumed_unless_it_has_finished(
    resume: str | None,
    restarts: int,
    found: tuple[str, Status] | None,
    is_over: bool,
    opened: str | None,
    said: str,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(train, "num_restarts", lambda: restarts)
    monkeypatch.setattr(train, "find_run", lambda config: found)
    monkeypatch.setattr(train, "is_finished", lambda config: is_over)
    monkeypatch.setattr(
        train,
        "open_run",
        lambda config, is_chosen_by_user: calls.append((config.resume, is_chosen_by_user)),
    )
    result = train.open_or_leave(replace(command.config, resume=resume), True)
    has_ended = said.startswith("already")
    assert (result is None) == has_ended
    assert said in capsys.readouterr().err
    if found is not None and found[1] is Status.finished:
        assert calls == []
    else:
        assert calls == [("old" if is_over else opened, True)]


def test_the_process_of_a_training_imports_nothing_from_the_working_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(train.STOP, "install", lambda: calls.append("install"))
    monkeypatch.setattr(entry, "run", lambda command, **hooks: calls.append((command, hooks)))
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    train.main()
    assert os.environ["PYTHONSAFEPATH"] == "1"
    hooks = {
        "job": train.train,
        "refused": train.sweeps.note_refusal,
        "sweep_codes": train.sweeps.exit_codes,
        "read": train.read,
    }
    assert calls == ["install", ("train", hooks)]


class Climb:
    """A range test whose losses are given."""

    losses: ClassVar[list[float]] = []

    def __init__(self, lowest: float, highest: float, steps: int) -> None:
        self.arguments = (lowest, highest, steps)
        self.lrs = [1e-4 * 10**n for n in range(len(self.losses))]
        Climb.made = self.arguments


@pytest.mark.parametrize(("found", "code"), [(0.004, 0), (None, 1)])
def test_a_rate_is_printed_as_the_argument_of_a_training(
    found: float | None,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = [
        f"output='{tmp_path / 'out'}'",
        "lowest_lr=1e-5",
        "highest_lr=2",
        "steps=33",
        "stage.batch_size=4",
        "lr_scaling=sqrt",
        "schedule=cosine",
        "warmup_steps=5",
    ]
    config = compose("find_lr", FindLrConfig, *settings, "seed=9", "run_dir=none")
    fitted: list[Any] = []
    trainer = SimpleNamespace(
        limit_val_batches=1, fit=lambda module, datamodule: fitted.append((module, datamodule))
    )
    built: dict[str, Any] = {}
    seeds: list[int] = []
    Climb.losses = [3.0, 2.0, 1.0, 5.0]
    monkeypatch.setattr(find_lr.torch, "manual_seed", seeds.append)
    monkeypatch.setattr(find_lr, "LrRange", Climb)
    monkeypatch.setattr(
        find_lr, "make_network", lambda given: built.update(config=given) or "network"
    )
    monkeypatch.setattr(
        find_lr, "load_initial_weights", lambda network, given: built.update(initial=network)
    )
    monkeypatch.setattr(
        find_lr,
        "make_trainer",
        lambda given, callbacks: built.update(callbacks=callbacks) or trainer,
    )
    monkeypatch.setattr(
        find_lr, "make_module", lambda given, network, metadata: (network, metadata)
    )
    monkeypatch.setattr(find_lr, "make_data_module", lambda given: "data")
    monkeypatch.setattr(find_lr, "find_spacing", lambda *_: None)
    monkeypatch.setattr(find_lr, "suggest_lr", lambda lrs, losses: found)
    monkeypatch.setattr(find_lr, "smoothed", np.array)
    drawn: list[Any] = []
    monkeypatch.setattr(find_lr, "draw_lr_range", lambda *arguments: drawn.append(arguments))
    assert find_lr.find_lr(config) == code
    assert Climb.made == (1e-5, 2.0, 33)
    assert seeds == [9]
    assert trainer.limit_val_batches == 0
    assert fitted == [(("network", {}), "data")]
    used = built["config"]
    assert (used.schedule, used.warmup_steps, used.logger) == (find_lr.CONSTANT_SCHEDULE, 0, {})
    assert used.run_dir == str(tmp_path / "out")
    assert built["initial"] == "network"
    rows = read_csv(tmp_path / "out" / "find_lr.csv")
    assert [float(row["loss"]) for row in rows] == Climb.losses
    assert drawn[0][4:] == ("coarse, AdamW, stage.batch_size=4", tmp_path / "out" / "find_lr.png")
    said = capsys.readouterr()
    if found is None:
        assert "the loss never falls" in said.err
        assert "optimizer.lr" not in said.out
    else:
        assert said.out.splitlines()[0] == "optimizer.lr=0.002", (
            "the scaling multiplies it by the root of the batch"
        )
        assert (
            "suggested: 0.004, where the loss falls steepest but at most a tenth of 0.01"
            in said.err
        )


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ([], "the loss of the first step is NaN or infinite"),
        ([1.0, 2.0, 3.0], "the loss never falls; try"),
        ([9.0, 0.0, 9.0, 9.0], "the loss falls from the first step to the second only; try"),
    ],
)
def test_a_range_test_without_a_rate_says_why(
    losses: list[float],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = compose("find_lr", FindLrConfig, f"output='{tmp_path}'", "run_dir=none")
    climb = SimpleNamespace(lrs=[10.0 ** (n - 6) for n in range(len(losses))], losses=losses)
    monkeypatch.setattr(find_lr, "_train_with_rising_lr", lambda *_: climb)
    monkeypatch.setattr(find_lr, "find_spacing", lambda *_: None)
    monkeypatch.setattr(find_lr, "draw_lr_range", lambda *_: None)
    assert find_lr.find_lr(config) == EXIT_FAILED
    assert said in capsys.readouterr().err
    assert (tmp_path / "find_lr.csv").exists() == bool(losses), "a table without a row says nothing"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["lowest_lr=0.1", "highest_lr=0.1"], "expected lowest_lr < highest_lr"),
        (["trainer=ddp", "stage.batch_size=2"], "find_lr runs on one rank"),
    ],
)
def test_rates_that_do_not_rise_and_several_ranks_are_refused(
    settings: list[str], said: str
) -> None:
    config = compose("find_lr", FindLrConfig, *settings, "run_dir=none")
    with pytest.raises(UserError, match=said):
        find_lr.find_lr(config)


@pytest.mark.parametrize(
    ("fixed_size", "words"),
    [
        (None, "any size in multiples of 8×16×32 voxels"),
        ((16, 32, 64), "16×32×64 voxels (z, y, x) only"),
    ],
)
def test_an_export_says_which_sizes_the_file_takes(
    fixed_size: tuple[int, int, int] | None,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls: list[Any] = []
    stage = SimpleNamespace(divisor=(8, 16, 32))
    exported = SimpleNamespace(fixed_size=fixed_size, form="ONNX, opset 18", difference=1.5e-6)
    monkeypatch.setattr(
        export,
        "load_stage",
        lambda *arguments, **options: calls.append((arguments, options)) or stage,
    )
    monkeypatch.setattr(
        export, "export_stage", lambda *arguments: calls.append(arguments) or exported
    )
    config = compose("export", ExportConfig, "checkpoint=a.ckpt", "output=model.onnx")
    assert export.export(config) == 0
    ((path,), arguments), given = calls
    assert path == Path("a.ckpt")
    assert arguments == {
        "stage": None,
        "device": torch.device("cpu"),
        "precision": "fp32",
        "trusted": [],
        "options": InferenceOptions(backend=Backend.torch),
    }
    assert given == (stage, Path("model.onnx"))
    said = capsys.readouterr().out
    assert words in said
    assert "logits within 1.5e-06 of torch" in said


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_the_program_says_its_version_and_lists_its_commands(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["medseg", option])
    cli.main()
    assert capsys.readouterr().out == f"{__version__}\n"
    for arguments in ([], ["--help"], ["-h"]):
        monkeypatch.setattr(sys, "argv", ["medseg", *arguments])
        cli.main()
        said = capsys.readouterr().out
        assert all(f"  {name}" in said for name in entry.COMMANDS)
    monkeypatch.setattr(sys, "argv", ["medseg", "--completion"])
    cli.main()
    assert "complete -o nospace" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["medseg", "fit", "x=1"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert "there is no command fit; did you mean train?" in capsys.readouterr().err
    ran: list[Any] = []
    monkeypatch.setattr(cli, "run_command", lambda name: ran.append((name, list(sys.argv))))
    monkeypatch.setattr(sys, "argv", ["medseg", "plan", "seed=1"])
    cli.main()
    assert ran == [("plan", ["medseg plan", "seed=1"])]


@pytest.mark.parametrize(("name", "is_ours"), [("optuna", True), ("somewhere", False)])
def test_a_command_without_its_package_names_the_extra(
    name: str, is_ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(module: str) -> Any:
        raise ModuleNotFoundError("missing", name=name)

    jobs: list[Any] = []
    monkeypatch.setattr(entry, "import_module", missing)
    monkeypatch.setattr(entry, "run", lambda command, job: jobs.append((command, job)))
    entry.run_command("search")
    ((command, job),) = jobs
    assert command == "search"
    if is_ours:
        with pytest.raises(
            UserError, match=r"search needs optuna, which is not installed; .*medseg\[search\]"
        ):
            job(None)
    else:
        with pytest.raises(ModuleNotFoundError):
            job(None)


def test_the_command_named_like_a_word_of_python_calls_its_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = SimpleNamespace(
        import_data=lambda config: 3, plan=lambda config: 4, main=lambda: mains.append(1)
    )
    mains: list[int] = []
    jobs: dict[str, Any] = {}
    monkeypatch.setattr(entry, "import_module", lambda name: module)
    monkeypatch.setattr(entry, "run", lambda command, job, read=None: jobs.update({command: job}))
    for name in ("import", "plan", "train"):
        entry.run_command(name)
    assert {name: job(None) for name, job in jobs.items()} == {"import": 3, "plan": 4}
    assert mains == [1]


@pytest.mark.parametrize(
    ("outcome", "sweep_codes", "code", "said"),
    [
        (0, None, 0, ""),
        (7, None, 7, ""),
        (UserError("x=1: wrong"), None, EXIT_USER_ERROR, "medseg: x=1: wrong\n"),
        # Jobs of a multirun that ran in other processes, and none that has left a status.
        (0, [7], 7, ""),
        (0, [0, 7, 0], EXIT_FAILED, "medseg: 1 of 3 jobs failed\n"),
        (7, [], 7, ""),
    ],
)
def test_a_job_ends_with_its_code_and_a_mistake_is_told_to_who_started_it(
    outcome: int | UserError,
    sweep_codes: list[int] | None,
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def job(config: Any) -> int:
        assert config == "read composed"
        if isinstance(outcome, UserError):
            raise outcome
        return outcome

    (tmp_path / "run").mkdir()
    hydra_config = SimpleNamespace(runtime=SimpleNamespace(output_dir=str(tmp_path / "run")))
    monkeypatch.setattr(HydraConfig, "get", lambda: hydra_config)
    monkeypatch.setattr(entry, "_prepare_process", lambda schema: None)
    monkeypatch.setattr(entry, "_run_command_line", lambda command, run_job: run_job("composed"))
    refusals: list[str] = []
    jobs = None if sweep_codes is None else lambda: sweep_codes
    for refused in (refusals.append, None):
        with pytest.raises(SystemExit) as end:
            entry.run("train", job, refused, jobs, lambda composed: f"read {composed}")
        assert end.value.code == code
        assert capsys.readouterr().err == said
    is_refused = isinstance(outcome, UserError)
    assert refusals == ["x=1: wrong"] * is_refused
    assert (tmp_path / "run").is_dir() != is_refused, "an empty folder of a refused run is removed"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError("nothing to do"), EXIT_USER_ERROR, "medseg: nothing to do\n"),
        (KeyboardInterrupt(), EXIT_INTERRUPTED, "medseg: interrupted\n"),
    ],
)
def test_what_ends_the_command_line_has_its_exit_code(
    error: BaseException,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(entry, "_prepare_process", lambda schema: None)
    monkeypatch.setattr(entry, "_run_command_line", fail)
    with pytest.raises(SystemExit) as end:
        entry.run("plan", lambda config: 0)
    assert end.value.code == code
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("is_unread", [True, False])
def test_a_broken_pipe_is_a_defect_unless_nobody_reads_the_output(
    is_unread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(entry, "_prepare_process", lambda schema: None)
    monkeypatch.setattr(entry, "_run_command_line", fail)
    monkeypatch.setattr(entry, "_drop_if_unread", lambda stream: is_unread)
    with pytest.raises(SystemExit if is_unread else BrokenPipeError) as end:
        entry.run("plan", lambda config: 0)
    assert getattr(end.value, "code", EXIT_UNREAD) == EXIT_UNREAD


@pytest.mark.parametrize(("own_rank", "is_checked"), [(0, True), (1, False)])
def test_a_training_chooses_its_gpus_and_the_first_rank_checks_the_objects(
    own_rank: int, is_checked: bool, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    command.config.trainer.gpus = [2, 3]
    monkeypatch.setattr(entry, "read_resumed", lambda *given: calls.append(given) or command.config)
    monkeypatch.setattr(train, "rank", lambda: own_rank)
    monkeypatch.setattr(train, "choose_gpus", calls.append)
    monkeypatch.setattr(train, "_check_objects_and_tell", lambda config: calls.append("checked"))
    composed: Any = "composed"
    assert train.read(composed) is command.config
    # The GPUs come first: the check loads torch.
    assert calls == [("train", TrainConfig, "composed"), [2, 3], *["checked"] * is_checked]


class Bars:
    """Bars of a prediction without a terminal, and what they show."""

    def __init__(self) -> None:
        console = Console(file=io.StringIO(), force_terminal=True)
        self.progress = Progress(console=console, auto_refresh=False)
        self.display = predict.Display(self.progress)

    def shown(self) -> list[tuple[str, float, float | None]]:
        return [
            (bar.description, bar.completed, bar.total)
            for bar in self.progress.tasks
            if bar.visible
        ]


def test_a_small_lesion_is_not_printed_as_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "a.nii.gz"
    report = {"volume_ml": {"lesion": 0.312, "liver": 1500.4}, "durations_s": {"total": 2.0}}
    case: Any = SimpleNamespace(
        scan=SimpleNamespace(name="a", path=tmp_path),
        output=output,
        result_paths=[output],
        messages=[],
        is_skipped=False,
        report=report,
    )
    predict._print_outcome(case)
    assert capsys.readouterr().out == f"{output}: lesion 0.31 ml, liver 1500 ml, 2.0 s\n"
    # `prepare` formats the volumes of a reference in the same way.
    grid = SimpleNamespace(shape=(2, 3, 4), spacing_mm=(1.0, 1.0, 1.0))
    audit: Any = SimpleNamespace(grid=grid, volumes_ml=report["volume_ml"])
    assert prepare.audit_text(audit) == "2×3×4 at 1×1×1 mm, lesion 0.31 ml, liver 1500 ml"


def test_bars_show_the_case_of_a_batch_its_step_and_a_slow_reading_of_headers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(predict, "_print_outcome", lambda case: None)
    ended: Any = SimpleNamespace(scan=SimpleNamespace(name="a"))
    bars = Bars()
    display = bars.display
    display.header_read()
    assert bars.shown() == [], "headers that are read at once"
    monkeypatch.setattr(predict, "SLOW_S", 0.0)
    display.header_read()
    assert bars.shown() == [("2 headers of DICOM files read", 2, None)]
    display.case_begins("a", 3)
    assert bars.shown() == [("a", 0, 3)]
    display.step_begins("a", "refine_left_lung", 2, 6)
    assert bars.shown() == [("a", 0, 3), ("a: refine left lung", 2, 6)]
    display.case_ends(ended)
    assert bars.shown() == [("a", 1, 3), ("a: refine left lung", 6, 6)]
    # The next case is in the bar of the steps already when the one before ends.
    display.case_begins("b", 3)
    display.step_begins("b", "read", 1, 6)
    display.case_ends(ended)
    assert bars.shown() == [("b", 2, 3), ("b: read", 1, 6)]
    alone = Bars()
    alone.display.case_begins("a", 1)
    assert alone.shown() == [], "one case needs no bar of the batch"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_forecast_is_said_in_a_terminal_alone(
    is_terminal: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    console = Console(file=io.StringIO(), force_terminal=is_terminal)
    predict.Display(Progress(console=console)).forecast("takes a minute")
    assert ("takes a minute" in capsys.readouterr().err) is is_terminal


def test_sigterm_exits_inside_and_the_handler_before_is_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as end, predict.sigterm_exits():
        signal.raise_signal(signal.SIGTERM)
    assert end.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("codes", "expected"),
    [([0], 0), ([0, 0], 0), ([7], 7), ([7, 0], EXIT_FAILED), ([0, 7, EXIT_RESUME], EXIT_FAILED)],
)
def test_a_case_that_fails_alone_gives_its_own_exit_code(
    codes: list[int], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [SimpleNamespace(exit_code=code, is_skipped=False) for code in codes]
    monkeypatch.setattr(predict, "predict_scans", lambda config, observer: cases)
    config: Any = SimpleNamespace()
    assert predict.predict(config) == expected


def test_every_key_of_an_evaluation_reaches_the_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them is the default, so that a key that is not passed on would be seen."""
    calls: list[inspect.BoundArguments] = []
    signature = inspect.signature(evaluate_folder)

    def noted(*arguments: Any, **keys: Any) -> Any:
        calls.append(signature.bind(*arguments, **keys))
        return SimpleNamespace(failed={})

    monkeypatch.setattr(evaluate, "evaluate_folder", noted)
    config = compose(
        "evaluate",
        EvaluateConfig,
        f"pred='{tmp_path / 'pred'}'",
        f"ref='{tmp_path / 'ref'}'",
        f"output='{tmp_path / 'out'}'",
        f"baseline='{tmp_path / 'before'}'",
        "data.label_values={left_lung: 7, right_lung: 8}",
        "data.labels_column=other",
        "split=val",
        "pictures=false",
        "num_pictures=11",
        "num_viewers=12",
    )
    assert evaluate.evaluate(config) == 0
    (call,) = calls
    given = dict(call.arguments)
    assert list(given.pop("task").labels) == ["left_lung", "right_lung"]
    assert given == {
        "pred_dir": tmp_path / "pred",
        "ref": tmp_path / "ref",
        "output": tmp_path / "out",
        "label_values": {7: "left_lung", 8: "right_lung"},
        "labels_column": "other",
        "split": "val",
        "pictures": False,
        "metrics": {},
        "num_pictures": 11,
        "num_viewers": 12,
        "baseline": tmp_path / "before",
    }
