"""What may change in a run that goes on, which run `resume=auto` means, and who may work on it."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import hydra
import pytest

from medseg.build.extensions import make_loggers
from medseg.config.check import resolved, to_config
from medseg.config.folder import conf_dir
from medseg.config.schema import TrainConfig
from medseg.errors import UserError
from medseg.io.atomic import is_locked, locked
from medseg.runs.folder import CONFIG_FILE, LOCK_FILE, Status, changed_config, find_run, load_config, open_run, write_end


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


def resume(run_dir: Path, *overrides: str) -> TrainConfig:
    """What the run's configuration is after `train.py resume=<run_dir> …`."""
    place = f"run_dir={run_dir.parent / 'later'}"  # which Hydra gives to the command
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        composed, default = (resolved(hydra.compose("train", list(given))) for given in ([place, *overrides], [place]))
    assert open_run(changed_config(str(run_dir), composed, default, overrides)) == run_dir
    return load_config(run_dir)


def test_alone_it_leaves_the_run_as_it_is(run_dir: Path) -> None:
    before = (run_dir / CONFIG_FILE).read_bytes()
    resume(run_dir)
    assert (run_dir / CONFIG_FILE).read_bytes() == before


def test_what_changes_no_result_changes_by_name(run_dir: Path) -> None:
    config = resume(run_dir, "data.num_workers=0", "trainer=ddp", "memory.accumulate=1", "logger=csv")
    assert (config.data.num_workers, config.trainer.devices) == (0, 2)
    assert config.logger == {
        "_target_": "lightning.pytorch.loggers.CSVLogger", "save_dir": str(run_dir), "name": "csv", "version": "",
    }  # fmt: skip
    assert (config.seed, config.optimizer["lr"], config.stage.name.value) == (7, 0.01, "fine")
    assert config.run_dir == str(run_dir)


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
def test_what_changes_the_result_is_refused_by_name(overrides: list[str], named: str, run_dir: Path) -> None:
    before = (run_dir / CONFIG_FILE).read_bytes()
    with pytest.raises(UserError) as refused:
        resume(run_dir, *overrides)
    assert named in str(refused.value)
    assert (run_dir / CONFIG_FILE).read_bytes() == before


def test_more_steps_are_allowed_where_the_schedule_has_no_length(run_dir: Path, tmp_path: Path) -> None:
    assert resume(run_dir, "steps=2000").steps == 2000
    assert resume(run_dir, *GIVEN, "steps=3000").steps == 3000
    for schedule in ("one_cycle", "poly"):
        with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
            other = open_run(compose(f"run_dir={tmp_path / schedule}", f"schedule={schedule}"))
        with pytest.raises(UserError, match="was built for 1000 steps"):
            resume(other, "steps=2000")


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
        assert find_run(compose(f"run_dir={runs['d']}", "seed=1")) == (runs["d"], Status.finished)


def hold(path: Path, is_held: object) -> None:
    with locked(path):
        is_held.set()  # type: ignore[attr-defined]
        time.sleep(60)


def test_a_lock_goes_with_its_holder(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medseg.runs.folder.LOCK_WAIT_S", 0.2)
    context = multiprocessing.get_context("spawn")
    is_held = context.Event()
    holder = context.Process(target=hold, args=(run_dir / LOCK_FILE, is_held))
    holder.start()
    assert is_held.wait(60)
    assert is_locked(run_dir / LOCK_FILE)
    with pytest.raises(UserError, match="another process is running it"):
        resume(run_dir)
    holder.kill()
    holder.join()
    assert not is_locked(run_dir / LOCK_FILE)
    resume(run_dir)


def test_a_secret_of_the_logger_is_kept_as_a_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDSEG_KEY", "xyzzy")
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = compose(f"run_dir={tmp_path / 'run'}", "logger=csv", "logger.version=${oc.env:MEDSEG_KEY}")
        run_dir = open_run(config)
    for changes in ([], ["data.num_workers=0"], ["logger=csv", "logger.version=${oc.env:MEDSEG_KEY}"]):
        config = resume(run_dir, *changes)
        assert "xyzzy" not in (run_dir / CONFIG_FILE).read_text()
        assert "xyzzy" not in str(config)
    assert Path(make_loggers(config)[0].log_dir).name == "xyzzy"  # type: ignore[arg-type]
