"""What may change in a run that goes on, which run `resume=auto` means, and who may work on it."""

from __future__ import annotations

import dataclasses
import errno
import multiprocessing
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import forked
import hydra
import psutil
import pytest

from medseg import __version__
from medseg.conf_folder import conf_dir
from medseg.config.check import resolved, to_config
from medseg.config.experiment_file import register_experiments
from medseg.errors import UserError
from medseg.io.atomic import is_locked, locked
from medseg.io.text import MAX_TEXT_BYTES
from medseg.runs.folder import (
    CONFIG_FILE,
    LOCK_FILE,
    SUMMARY_FILE,
    VERSIONS_FILE,
    Status,
    changed_config,
    find_run,
    load_config,
    open_run,
    status_of_run,
    write_end,
)
from medseg.runs.past_runs import find_runs, read_run
from medseg.training.extensions import make_loggers
from medseg.training.options import TrainConfig


def compose(*overrides: str) -> TrainConfig:
    return to_config(hydra.compose("train", list(overrides)), TrainConfig)


GIVEN = [
    "stage=fine",
    "schedule=constant",
    "optimizer.lr=0.01",
    "data.num_workers=3",
    "seed=7",
    "stage.batch_size=2",
    "memory.accumulate=2",
]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run that is prolonged."""
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return open_run(compose(f"run_dir={tmp_path / 'run'}", *GIVEN))


def changed(run_dir: Path, *overrides: str) -> TrainConfig:
    """Compose `resume=<run_dir> …` without opening the run, as `plan` does."""
    register_experiments(overrides)
    place = f"run_dir={run_dir.parent / 'later'}"  # which Hydra gives to the command
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        composed = resolved(hydra.compose("train", [place, *overrides]))
        default = resolved(hydra.compose("train", [place]))
    return changed_config(str(run_dir), composed, default, overrides, TrainConfig)


def resume(run_dir: Path, *overrides: str) -> TrainConfig:
    """Open the run by `train.py resume=<run_dir> …`, and read its configuration."""
    assert open_run(changed(run_dir, *overrides)) == run_dir
    return load_config(run_dir)


def test_alone_it_leaves_the_run_as_it_is(run_dir: Path) -> None:
    before = (run_dir / CONFIG_FILE).read_bytes()
    resume(run_dir)
    assert (run_dir / CONFIG_FILE).read_bytes() == before


def test_a_run_of_one_stage_records_no_key_of_a_cascade(run_dir: Path, tmp_path: Path) -> None:
    single_dir = tmp_path / "single"
    given = ["stage=single", "task=heart", "seed=7"]
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = compose(*given, f"run_dir='{single_dir}'")
    open_run(config)
    assert "coarse" not in (single_dir / CONFIG_FILE).read_text(encoding="utf-8")
    assert load_config(single_dir) == config
    resume(single_dir)
    assert "coarse" in (run_dir / CONFIG_FILE).read_text(encoding="utf-8")


def test_a_run_with_flips_goes_on_though_its_labels_have_sides_by_now(tmp_path: Path) -> None:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = compose("stage=single", "task=heart", f"run_dir='{tmp_path / 'run'}'")
    config.task.labels = {"Femur_L": 1, "Femur_R": 2}
    config.task.regions = None
    config.task.codes = None
    config.task.volume_ml = None
    config.augment.flip_axes = [1]
    run_dir = open_run(config)
    assert resume(run_dir).augment.flip_axes == [1]
    with pytest.raises(UserError, match=r"augment\.flip_axes: \[1\] then, \[2\] now"):
        resume(run_dir, "augment.flip_axes=[2]")


def test_a_run_goes_on_though_its_initial_weights_are_gone(tmp_path: Path) -> None:
    """Its own weights are in its checkpoint."""
    weights = tmp_path / "first.safetensors"
    weights.touch()
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        run_dir = open_run(compose(f"run_dir='{tmp_path / 'run'}'", f"init_from='{weights}'"))
        weights.unlink()
        with pytest.raises(UserError, match="init_from"):
            compose(f"run_dir='{tmp_path / 'other'}'", f"init_from='{weights}'")
    assert resume(run_dir).init_from == str(weights)


@pytest.mark.parametrize("name", ["run_logs", "run.d", "run-2"])
def test_a_logger_beside_a_moved_run_stays_where_it_is(run_dir: Path, name: str) -> None:
    beside = str(run_dir.with_name(name))
    resume(run_dir, f"logger.save_dir={beside}", "logger.name=tag")
    moved = run_dir.with_name("moved")
    run_dir.rename(moved)
    assert load_config(moved).logger["save_dir"] == beside


def test_a_logger_in_a_moved_run_moves_with_it(run_dir: Path) -> None:
    resume(run_dir, f"logger.save_dir=file:{run_dir}/logs", "logger.name=tag")
    moved = run_dir.with_name("moved")
    run_dir.rename(moved)
    assert load_config(moved).logger["save_dir"] == f"file:{moved}/logs"


def test_what_changes_no_result_changes_by_name(run_dir: Path) -> None:
    config = resume(
        run_dir, "data.num_workers=0", "trainer=ddp", "memory.accumulate=1", "logger=csv"
    )
    assert (config.data.num_workers, config.trainer.devices) == (0, 2)
    assert config.logger == {
        "_target_": "lightning.pytorch.loggers.CSVLogger", "save_dir": str(run_dir), "name": "csv",
        "version": "",
    }  # fmt: skip
    assert (config.seed, config.optimizer["lr"], config.stage.name.value) == (7, 0.01, "fine")
    assert config.run_dir == str(run_dir)


@pytest.mark.parametrize("target", ["optimizer=sgd", "optimizer._target_=torch.optim.SGD"])
def test_another_class_replaces_the_arguments_of_the_old_one(target: str, run_dir: Path) -> None:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        expected = compose("run_dir=x", target, "optimizer.lr=0.5").optimizer
    assert changed(run_dir, target, "optimizer.lr=0.5").optimizer == expected


def test_an_experiment_may_choose_another_class(run_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "e.yaml"
    path.write_text(
        "# @package _global_\noptimizer: {_target_: torch.optim.SGD, lr: 0.5}\n"
        "schedule: {_target_: torch.optim.lr_scheduler.StepLR, step_size: 5}\n"
    )
    config = changed(run_dir, f"experiment={path}")
    assert config.optimizer == {"_target_": "torch.optim.SGD", "lr": 0.5}
    assert config.schedule == {
        "_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 5
    }  # fmt: skip
    assert config.seed == 7


@pytest.fixture
def observed_run(tmp_path: Path) -> tuple[Path, str]:
    """A run with two callbacks from an experiment, and the argument of the experiment."""
    path = tmp_path / "observed.yaml"
    path.write_text(
        "# @package _global_\ncallbacks:\n"
        "  stats: {_target_: lightning.pytorch.callbacks.DeviceStatsMonitor}\n"
        "  bar: {_target_: lightning.pytorch.callbacks.TQDMProgressBar}\n"
    )
    argument = f"experiment={path}"
    register_experiments([argument])
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        run_dir = open_run(compose(f"run_dir={tmp_path / 'run'}", "seed=7", argument))
    return run_dir, argument


def test_a_key_that_the_command_line_deletes_is_deleted(observed_run: tuple[Path, str]) -> None:
    run_dir, argument = observed_run
    config = changed(run_dir, argument, "~callbacks.stats")
    assert list(config.callbacks) == ["bar"]
    assert config.seed == 7
    assert changed(run_dir, "~callbacks").callbacks == {}
    assert changed(run_dir, argument, "~trusted_targets").trusted_targets == []
    with pytest.raises(UserError, match=r"schedule\.pct_start: 0\.15 then, None now"):
        resume(run_dir, "~schedule.pct_start")


def test_a_key_that_is_deleted_and_given_anew_is_the_new_one(
    observed_run: tuple[Path, str],
) -> None:
    run_dir, argument = observed_run
    target = "lightning.pytorch.callbacks.ModelSummary"
    added = f"+callbacks.stats._target_={target}"
    config = changed(run_dir, argument, "~callbacks.stats", added)
    assert config.callbacks["stats"] == {"_target_": target}
    assert list(config.callbacks) == ["stats", "bar"]


@pytest.mark.parametrize(
    ("schedule", "length_key"),
    [("one_cycle", "total_steps"), ("poly", "total_iters"), ("cosine", "T_max")],
)
def test_another_schedule_is_as_long_as_the_run(
    schedule: str, length_key: str, tmp_path: Path
) -> None:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        given = ["steps=300", "optimizer.lr=0.02", "schedule=constant"]
        run_dir = open_run(compose(f"run_dir={tmp_path / 'run'}", *given))
    config = changed(run_dir, f"schedule={schedule}")
    assert (config.steps, config.schedule[length_key]) == (300, 300)
    assert config.schedule.get("max_lr", 0.02) == 0.02
    config = changed(run_dir, f"schedule={schedule}", f"schedule.{length_key}=40")
    assert config.schedule[length_key] == 40


def test_the_schedule_of_the_run_may_be_named(tmp_path: Path) -> None:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        run_dir = open_run(compose(f"run_dir={tmp_path / 'run'}", "steps=300"))
    before = load_config(run_dir)
    assert resume(run_dir, "schedule=one_cycle") == before


def test_the_whole_command_with_resume_is_the_run(run_dir: Path) -> None:
    resume(run_dir, *GIVEN)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["seed=1"], "seed: 7 then, 1 now"),  # the default, but said
        (["stage=coarse"], "stage"),
        (["optimizer.lr=0.001"], "optimizer.lr: 0.01 then, 0.001 now"),
        (["optimizer=sgd"], "optimizer._target_"),
        (["stage.batch_size=4"], "micro_batch: 1.0 then, 2.0 now"),
        (["steps=999"], "steps=999 is less than steps=1000 of the run"),
        (["memory.precision=bf16"], "memory.precision: fp32 then, bf16 now"),
    ],
)
def test_what_changes_the_result_is_refused_by_name(
    overrides: list[str], named: str, run_dir: Path
) -> None:
    before = (run_dir / CONFIG_FILE).read_bytes()
    with pytest.raises(UserError) as refused:
        resume(run_dir, *overrides)
    assert named in str(refused.value)
    assert (run_dir / CONFIG_FILE).read_bytes() == before


@pytest.mark.parametrize(
    ("schedule", "is_allowed"),
    [
        pytest.param(["schedule=constant"], True, id="constant"),
        pytest.param(
            ["schedule=cyclic", "schedule.step_size_up=1000"],
            True,
            id="half a cycle as long as the run",
        ),
        pytest.param(
            ["schedule._target_=torch.optim.lr_scheduler.StepLR", "schedule.step_size=1000"],
            True,
            id="one step as long as the run",
        ),
        pytest.param(["schedule=one_cycle"], False, id="one_cycle"),
        pytest.param(
            ["schedule=one_cycle", "schedule.total_steps=2500"],
            True,
            id="one_cycle that ends later",
        ),
        pytest.param(
            ["schedule=one_cycle", "schedule.total_steps=1500"],
            False,
            id="one_cycle that ends between",
        ),
        pytest.param(["schedule=poly"], False, id="poly"),
        pytest.param(["schedule=poly", "schedule.total_iters=900"], True, id="poly that had ended"),
        pytest.param(["schedule=cosine"], False, id="cosine"),
        pytest.param(
            ["schedule=cosine", "schedule.T_max=250"], True, id="cosine with several periods"
        ),
    ],
)
def test_more_steps_are_allowed_where_they_do_not_change_the_schedule(
    schedule: list[str], is_allowed: bool, tmp_path: Path
) -> None:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        run_dir = open_run(compose(f"run_dir={tmp_path / 'run'}", *schedule))
    if is_allowed:
        before = load_config(run_dir).schedule
        config = resume(run_dir, "steps=2000")
        assert (config.steps, config.schedule) == (2000, before)
        assert resume(run_dir, "steps=2100").steps == 2100, "and again"
    else:
        with pytest.raises(UserError, match="would change with another length"):
            resume(run_dir, "steps=2000")


def test_a_finished_run_counts_as_unfinished_once_more_steps_are_asked_for(run_dir: Path) -> None:
    steps = load_config(run_dir).steps
    (run_dir / SUMMARY_FILE).write_text("{}", encoding="utf-8")
    resume(run_dir, f"steps={steps}")
    assert (run_dir / SUMMARY_FILE).exists()
    resume(run_dir, f"steps={steps + 1}")
    assert not (run_dir / SUMMARY_FILE).exists()


def test_auto_finds_the_unfinished_run_of_the_same_signature(tmp_path: Path) -> None:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        runs = {
            name: open_run(compose(f"run_dir={tmp_path / name}", f"seed={seed}"))
            for name, seed in zip("abcde", "11213", strict=True)
        }
        for age, name in enumerate("dcba"):
            moment = time.time() - 100 - age
            os.utime(runs[name] / CONFIG_FILE, (moment, moment))
        (tmp_path / "junk").mkdir()
        (tmp_path / "junk" / CONFIG_FILE).write_text("a: [")

        def found(*overrides: str) -> str | None:
            run = find_run(compose(f"run_dir={tmp_path / 'new'}", *overrides))
            return run[0].name if run else None

        assert found("seed=1", "data.num_workers=1") == "d", "the newest"
        write_end(runs["d"], Status.finished, "")
        assert found("seed=1") == "b"
        write_end(runs["b"], Status.not_finite, "it would again be")
        write_end(runs["a"], Status.out_of_memory, "there may be more now")
        assert found("seed=1") == "a"
        assert found("seed=2") == "c"
        assert found("seed=4") is None
        write_end(runs["c"], Status.refused, "the disk was full")
        assert found("seed=2") == "c", "its cause may have gone"
        assert find_run(compose(f"run_dir={runs['d']}", "seed=1")) == (runs["d"], Status.finished)


def test_auto_tells_which_key_a_configuration_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        run_dir = open_run(compose(f"run_dir={tmp_path / 'run'}", "seed=7"))
        path = run_dir / CONFIG_FILE
        text = path.read_text(encoding="utf-8")
        assert "  num_nodes: 1\n" in text
        path.write_text(text.replace("  num_nodes: 1\n", ""), encoding="utf-8")
        config = compose(f"run_dir={tmp_path / 'new'}", "seed=7")
        assert find_run(config) is None
    assert (
        f"{path} is left out: it lacks the key trainer.num_nodes, "
        "so another version or program has written it"
    ) in capsys.readouterr().err


def hold(path: Path, is_held: object) -> None:
    with locked(path):
        is_held.set()
        time.sleep(60)


def test_a_lock_goes_with_its_holder(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medseg.runs.folder.LOCK_WAIT_S", 0.2)
    context = multiprocessing.get_context("forkserver")
    is_held = context.Event()
    holder = context.Process(target=hold, args=(run_dir / LOCK_FILE, is_held))
    with forked.served():
        holder.start()
    assert is_held.wait(60)
    assert is_locked(run_dir / LOCK_FILE)
    with pytest.raises(UserError, match="another process is running it"):
        resume(run_dir)
    holder.kill()
    holder.join()
    assert not is_locked(run_dir / LOCK_FILE)
    resume(run_dir)


def test_a_lock_of_another_user_is_seen_and_one_that_cannot_be_held_is_told(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_file = os.open

    def read_only(path: Any, flags: int, *mode: int) -> int:
        if flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return open_file(path, flags, *mode)

    path = run_dir / LOCK_FILE
    with locked(path), monkeypatch.context() as patch:
        patch.setattr(os, "open", read_only)
        assert is_locked(path)
        assert is_locked(path), "the question holds nothing"
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", read_only)
        assert not is_locked(path)
    path.unlink()
    path.mkdir()
    assert not is_locked(path)
    with (
        pytest.raises(UserError, match=r"\.lock: cannot be written \(Is a directory\)"),
        locked(path, 0),
    ):
        pass


def test_the_question_for_a_lock_leaves_no_file_open(tmp_path: Path) -> None:
    path = tmp_path / LOCK_FILE
    before = psutil.Process().num_fds()
    with locked(path):
        for _ in range(3):
            assert is_locked(path)
    assert not is_locked(path)
    assert psutil.Process().num_fds() == before


def test_a_secret_of_the_logger_is_kept_as_a_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEDSEG_KEY", "xyzzy")
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = compose(
            f"run_dir={tmp_path / 'run'}", "logger=csv", "logger.version=${oc.env:MEDSEG_KEY}"
        )
        run_dir = open_run(config)
    for changes in (
        [],
        ["data.num_workers=0"],
        ["logger=csv", "logger.version=${oc.env:MEDSEG_KEY}"],
    ):
        config = resume(run_dir, *changes)
        assert "xyzzy" not in (run_dir / CONFIG_FILE).read_text()
        assert "xyzzy" not in str(config)
    assert Path(make_loggers(config)[0].log_dir).name == "xyzzy"


@pytest.mark.parametrize(
    ("argument", "stored", "used"),
    [
        ("${oc.env:MEDSEG_KEY}-${name}", "${oc.env:MEDSEG_KEY}-tag", "xyzzy-tag"),
        ("${oc.env:MEDSEG_NONE,${name}}", "${oc.env:MEDSEG_NONE,tag}", "tag"),
        ("${logger.name}", "${oc.env:MEDSEG_KEY}", "xyzzy"),
        ("${.name}", "${oc.env:MEDSEG_KEY}", "xyzzy"),
        (
            "${oc.decode:${oc.env:MEDSEG_KEY}}",
            "${oc.decode:${oc.env:MEDSEG_KEY}}",
            "xyzzy",
        ),
    ],
)
def test_a_logger_may_combine_the_environment_with_other_keys(
    argument: str, stored: str, used: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEDSEG_KEY", "xyzzy")
    given = ["name=tag", "logger=csv", "logger.name='${oc.env:MEDSEG_KEY}'"]
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        run_dir = open_run(
            compose(f"run_dir={tmp_path / 'run'}", *given, f"logger.version='{argument}'")
        )
    config = resume(run_dir)
    assert config.logger["version"] == stored
    assert "xyzzy" not in (run_dir / CONFIG_FILE).read_text(encoding="utf-8")
    assert Path(make_loggers(config)[0].log_dir).name == used


def race(config: TrainConfig, is_chosen_by_user: bool, number: int = 8) -> list[Path | UserError]:
    """Open a new run in the same folder from threads at the same moment, with seeds 0, 1, …"""
    together = threading.Barrier(number)

    def open_one(seed: int) -> Path | UserError:
        own = dataclasses.replace(config, seed=seed, logger=dict(config.logger))
        together.wait()
        try:
            return open_run(own, is_chosen_by_user=is_chosen_by_user)
        except UserError as error:
            return error

    with ThreadPoolExecutor(number) as pool:
        return list(pool.map(open_one, range(number)))


def test_runs_that_start_at_the_same_moment_never_share_a_folder(tmp_path: Path) -> None:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = compose(f"run_dir={tmp_path / 'now'}")
    opened = [
        result for result in race(config, is_chosen_by_user=False) if isinstance(result, Path)
    ]
    assert {path.name for path in opened} == {"now", *(f"now_{number}" for number in range(2, 9))}
    assert [load_config(path).seed for path in opened] == list(range(8)), (
        "each has its own configuration"
    )
    config.run_dir = str(tmp_path / "named")
    results = race(config, is_chosen_by_user=True)
    (seed,) = [seed for seed, result in enumerate(results) if isinstance(result, Path)]
    assert load_config(tmp_path / "named").seed == seed
    errors = [result for result in results if isinstance(result, UserError)]
    assert all("already contains a run" in str(error) for error in errors)
    assert sorted(path.name for path in (tmp_path / "named").iterdir()) == [
        "checkpoints",
        "config.yaml",
    ]


def test_one_start_takes_the_place_of_a_run_that_ended_without_a_checkpoint(run_dir: Path) -> None:
    write_end(run_dir, Status.refused, "data.fold=9 does not exist")
    (run_dir / VERSIONS_FILE).write_text("[{}]")
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = compose(f"run_dir={run_dir}")
    results = race(config, is_chosen_by_user=True)
    (seed,) = [seed for seed, result in enumerate(results) if isinstance(result, Path)]
    assert load_config(run_dir).seed == seed
    assert load_config(run_dir).stage.name.value == "coarse"
    assert sorted(path.name for path in run_dir.iterdir()) == [
        ".lock",
        "checkpoints",
        "config.yaml",
    ]
    assert all(
        "already contains a run" in str(result)
        for result in results
        if isinstance(result, UserError)
    )


@pytest.mark.parametrize("reason", ["has a checkpoint", "has finished", "may be starting", "runs"])
def test_no_start_takes_the_place_of_a_run_that(reason: str, run_dir: Path) -> None:
    if reason != "may be starting":
        write_end(run_dir, Status.finished if reason == "has finished" else Status.failed, "")
    if reason == "has a checkpoint":
        (run_dir / "checkpoints" / "last.ckpt").touch()
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = compose(f"run_dir={run_dir}")
    before = load_config(run_dir)
    holder = locked(run_dir / LOCK_FILE) if reason == "runs" else nullcontext()
    with holder, pytest.raises(UserError, match="already contains a run"):
        open_run(config)
    assert load_config(run_dir) == before
    assert (run_dir / SUMMARY_FILE).exists() == (reason != "may be starting")


DAMAGED_CONFIGS = {
    "empty": b"", "null": b"null", "a list": b"[]", "a number": b"7", "cut off": b"seed: [1",
    "zeros": bytes(100), "no text": b"\xff\xfe\x80",
    "a bomb of aliases": b"a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n", "deep": b"[" * 5000,
    "an object": b"!!python/object/apply:os.system [true]",
    "another file": b"name: x\n",
}  # fmt: skip


@pytest.mark.parametrize(
    "content", [*DAMAGED_CONFIGS.values(), None], ids=[*DAMAGED_CONFIGS, "too large"]
)
def test_a_damaged_configuration_is_one_sentence_or_left_out_and_named(
    content: bytes | None, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run_dir / CONFIG_FILE
    if content is None:
        os.truncate(path, MAX_TEXT_BYTES)
    else:
        path.write_bytes(content)
    with pytest.raises(UserError) as refused:
        resume(run_dir)
    assert len(str(refused.value).splitlines()) == 1
    capsys.readouterr()
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        assert find_run(compose(f"run_dir={run_dir.parent / 'new'}", *GIVEN)) is None
    # A whole file of something else is not damaged.
    is_other_file = content == DAMAGED_CONFIGS["another file"]
    reason = "left out: it lacks the key" if is_other_file else "damaged and left out"
    assert f"{path} is {reason}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '"finished"', "{}", '{"status": 7}', "[" * 99999, "1" * 9999]
)
def test_a_damaged_summary_is_that_of_an_interrupted_run(text: str, run_dir: Path) -> None:
    (run_dir / SUMMARY_FILE).write_text(text)
    assert status_of_run(run_dir) is Status.interrupted
    resume(run_dir)


@pytest.fixture
def older_run_dir(run_dir: Path) -> Path:
    """A run folder of version 0.1, whose configuration names no class of a network."""
    path = run_dir / CONFIG_FILE
    text = path.read_text(encoding="utf-8")
    path.write_text(re.sub(r" *_target_: medseg\.models\.unet\.UNet\n", "", text), encoding="utf-8")
    return run_dir


def test_a_run_of_version_0_1_is_not_resumed(older_run_dir: Path) -> None:
    with pytest.raises(UserError) as refused:
        resume(older_run_dir)
    last = older_run_dir / "checkpoints/last.ckpt"
    assert str(refused.value) == (
        f"resume={older_run_dir}: this is a run of medseg 0.1, which medseg {__version__} "
        "does not resume; start a new run "
        f"from its weights with init_from={last}, or use version 0.1"
    )


def test_a_run_of_version_0_1_is_no_run_to_continue(older_run_dir: Path) -> None:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        assert find_run(compose(f"run_dir={older_run_dir.parent / 'new'}", *GIVEN)) is None


def test_a_run_of_version_0_1_is_reported(older_run_dir: Path) -> None:
    assert find_runs(older_run_dir.parent) == [older_run_dir]
    assert read_run(older_run_dir, older_run_dir.parent).settings["seed"] == 7


def test_a_moved_table_is_given_on_resume(run_dir: Path, tmp_path: Path) -> None:
    path, there, here = run_dir / CONFIG_FILE, tmp_path / "there.csv", tmp_path / "here.csv"
    path.write_text(
        path.read_text(encoding="utf-8").replace("cases: null", f"cases: {there}"), encoding="utf-8"
    )
    here.write_text("case,image,labels\na,a.nii.gz,a_l.nii.gz\n")
    with pytest.raises(UserError, match=r"there\.csv: there is no such file"):
        resume(run_dir)
    assert resume(run_dir, f"data.cases={here}").data.cases == str(here)
    assert load_config(run_dir).data.cases == str(here)
