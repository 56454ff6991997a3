"""Spacing comparison: rows compose, equal stages train once, failures are reported."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import forked
import hydra
import pytest

from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.config.schema import CompareSpacingConfig
from medseg.errors import UserError
from medseg.geometry.grid import VoxelGrid
from medseg.io.tables import write_csv
from medseg.report.spacings import Strategy
from medseg.studies import command_steps
from medseg.studies import compare_spacing as app
from medseg.studies.command_steps import run_and_get_failure


def compose(*overrides: str) -> CompareSpacingConfig:
    return to_config(
        hydra.compose("compare_spacing", [*overrides, "run_dir=x"]), CompareSpacingConfig
    )


def stages_of(config: CompareSpacingConfig, row: str, arguments: list[str]) -> list[app.Stage]:
    return app.stages_of(row, config, arguments, Path("runs"))


@pytest.mark.slow
def test_every_row_composes_and_rows_share_the_stages_that_are_the_same(tiny_table: Path) -> None:
    arguments = [f"data.cases='{tiny_table}'", "model.width=4"]
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = compose("seed=7", "steps=5", "stages.coarse=['steps=9']")
        rows = {row: stages_of(config, row, arguments) for row in config.rows}
    for coarse, fine in rows.values():
        assert (coarse.config.steps, fine.config.steps) == (9, 5)
        assert {coarse.config.seed, fine.config.seed} == {7}
        assert fine.config.stage.patch_size == (96, 96, 96)
        assert coarse.config.data.cases == fine.config.data.cases == str(tiny_table)
    runs = {row: [stage.run_dir.name for stage in stages] for row, stages in rows.items()}
    assert runs["isotropic 1 mm"][0] == runs["isotropic 2 mm"][0]
    assert len({fine for _, fine in runs.values()}) == len(runs)
    assert rows["dataset median"][1].config.spacing.target_spacing_mm == (6.0, 4.05, 4.5)


def test_a_row_that_train_would_refuse_is_named_before_anything_runs() -> None:
    with (
        hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"),
        pytest.raises(
            UserError,
            match=r"rows\.anisotropic\.fine: stage\.patch_size: "
            r"expected multiples of \[8, 16, 16\]",
        ),
    ):
        stages_of(compose("stages.fine=['stage.patch_size=[12,96,96]']"), "anisotropic", [])


def test_an_argument_that_the_list_of_a_stage_replaces_is_told() -> None:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = compose()
    # The list of the fine stage sets patches and tiles by default.
    sentences = app.unused_arguments(config, ["stage.patch_size=[64,64,64]", "model.width=4"])
    assert list(sentences) == [
        "stage.patch_size=[64,64,64] has no effect on the fine stage: stages.fine sets "
        "stage.patch_size; change it there"
    ]


def test_whole_inputs_are_counted_as_the_stages_take_them() -> None:
    grid = VoxelGrid((40, 100, 120), (5.0, 1.0, 1.0))
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = compose("rows.native.coarse=['spacing=native','stage.max_voxels=500000']")
        coarse, fine = stages_of(config, "isotropic 2 mm", [])
        native, _ = stages_of(config, "native", [])
        scaled, _ = stages_of(config, "multi scale", [])
        sized, _ = stages_of(config, "fixed size", [])
        cubes, _ = stages_of(config, "fixed resolution", [])
    assert app.whole_shape(coarse.config, grid) == (112, 64, 64)
    assert app.whole_shape(native.config, grid) == (32, 112, 128)
    assert app.whole_shape(scaled.config, grid) == (64, 64, 64), "4 mm along z, 2 mm in plane"
    assert app.whole_shape(sized.config, grid) == (128, 128, 128)
    assert app.whole_shape(cubes.config, grid) == (112, 112, 112)
    boxes = {
        name: {"voxels": {"start": [0, 0, 0], "stop": stop}}
        for name, stop in (("a", [30, 50, 33]), ("b", [17, 16, 16]))
    }
    assert app.crop_shape(fine.config, {"boxes": boxes}) == (32, 64, 48)
    assert app.crop_shape(fine.config, {"boxes": {}}) is None


def test_a_table_and_a_picture_of_what_is_known(tmp_path: Path) -> None:
    cost = dict(zip(app.COSTS, ("1×1×1", 300.0, 900.0, 2000.0, 0.5, 60.0), strict=True))
    score = dict(
        zip(
            app.SCORES,
            ("a", 0.8, "left_lung", "reference", 0.9, 0.8, 0.9, float("inf"), 3.0, 1.0),
            strict=True,
        )
    )
    failed = Strategy("native", {}, [], {}, "out of memory")
    (tmp_path / "comparison.png").write_bytes(b"of an earlier start")
    app.write([failed], tmp_path)
    assert not (tmp_path / "comparison.png").exists()
    good = Strategy("isotropic", {"coarse": cost, "fine": cost}, [score], {"b": "no prediction"})
    app.write([failed, good], tmp_path)
    with (tmp_path / "comparison.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["row"], row["case"], row["failure"]) for row in rows] == [
        ("native", "", "out of memory"),
        ("isotropic", "a", ""),
        ("isotropic", "b", "no prediction"),
    ]
    assert rows[1]["fine_whole_peak_mib"] == "2000.0"
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_failed_row_does_not_affect_the_others_and_finished_trainings_are_kept(
    tiny_table: Path, tmp_path: Path
) -> None:
    command = [
        sys.executable, "-m", "medseg.commands.cli", "compare_spacing",
        f"output={tmp_path / 'out'}", "steps=2", "model.width=4",
        f"data.cases={tiny_table}", f"data.cache={tiny_table.parent / 'cache'}", "logger=none",
        "data.num_workers=0",
        "trainer.accelerator=cpu", "stages.fine=[]", "~rows",
        "+rows={wrong: {coarse: ['spacing=isotropic_4mm'], fine: ['spacing=isotropic_4mm', "
        "'optimizer.lr=1e30']}, "
        "native: {coarse: ['spacing=isotropic_4mm'], fine: ['spacing=native']}}",
    ]  # fmt: skip
    for attempt in range(2):
        result = forked.run(command, cwd=tmp_path)
        assert result.returncode == 1, result.stderr
        assert "row 2 of 2: native" in result.stdout
        assert result.stdout.count("finished before, skipped") == attempt
        assert result.stdout.count("$ medseg train") == (1 if attempt else 3), (
            "the coarse stage once, and the failed one again"
        )
    with (tmp_path / "out" / "comparison.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["row"], row["case"], row["region"]) for row in rows] == [
        ("wrong", "", ""),
        ("native", "case 3", "left_lung"),
        ("native", "case 3", "right_lung"),
    ]
    assert "not finite" in rows[0]["failure"]
    assert {row["slice_mm"] for row in rows[1:]} == {"6.0"}
    text = (tmp_path / "out" / "comparison.md").read_text(encoding="utf-8")
    assert "| strategy | > 3 mm | all |" in text
    assert "* wrong: failed, the fine stage could not be trained" in text
    assert (tmp_path / "out" / "comparison.png").is_file()


class Commands:
    """Stands in for `predict` and `evaluate`: writes their files, ends with given messages."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **failures: str) -> None:
        self.failures = failures
        self.boxes: dict[str, dict[str, object]] = {"a": {}, "b": {}}
        self.failed: dict[str, str] = {}
        self.steps: list[Sequence[str]] = []
        monkeypatch.setattr(app, "run_and_get_failure", self.run)
        monkeypatch.setattr(app, "train", lambda stage, failed: None)

    def run(self, step: Sequence[str]) -> str:
        self.steps.append(step)
        folder = Path(
            next(argument for argument in step if argument.startswith("output=")).removeprefix(
                "output="
            )
        )
        folder.mkdir(parents=True, exist_ok=True)
        write = self.predict if step[0] == "predict" else self.evaluate
        write(folder)
        return self.failures.get(step[0], "")

    def predict(self, folder: Path) -> None:
        for case, boxes in self.boxes.items():
            report = {"boxes": boxes, "durations_s": {"total": 1.0}, "peak_resident_bytes": 1e9}
            (folder / f"{case}.json").write_text(json.dumps(report))
        rows = [
            {"case": case, "status": "failed", "warnings": why} for case, why in self.failed.items()
        ]
        write_csv(folder / "summary.csv", rows, ("case", "status", "warnings"))

    def evaluate(self, folder: Path) -> None:
        dices = {"dice": 0.0, "nsd_1mm": 0.0, "nsd_2mm": 0.0, "hd95_mm": float("inf")}
        write_csv(
            folder / "metrics.csv",
            [{"case": case, "region": "left_lung", "trust": "", **dices} for case in self.boxes],
        )
        without = [case for case in "ab" if case not in self.boxes]
        (folder / "summary.json").write_text(
            json.dumps({"without_prediction": without, "failed": {}})
        )


@pytest.fixture
def row(tmp_path: Path) -> Callable[[], Strategy]:
    """Return a function that runs a row whose stages are trained."""
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = compose()
        common = ["trusted_targets=[mine.]"]
        stages = app.stages_of("isotropic 2 mm", config, common, tmp_path / "runs")
    for stage in stages:
        stage.run_dir.mkdir(parents=True)
        (stage.run_dir / "history.csv").write_text("step,seconds_per_step\n1,0.5\n")
        (stage.run_dir / "summary.json").write_text('{"train_s": 3.0}')
    grid = VoxelGrid((40, 100, 120), (5.0, 1.0, 1.0))
    return lambda: app.run_row(
        "x", stages, tmp_path / "row", tmp_path / "t.csv", {"a": grid, "b": grid}, "task=t", {}
    )


def test_a_row_that_finds_no_region_has_its_scores(
    row: Callable[[], Strategy], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Commands(monkeypatch)
    counted = []
    monkeypatch.setattr(
        app, "_count_step", lambda stage, shape: counted.append((stage.name, shape))
    )
    strategy = row()
    assert [score["dice"] for score in strategy.scores] == [0.0, 0.0]
    assert (strategy.failure, strategy.missing) == ("", {})
    assert ("fine", None) in counted, "there is no whole crop to count"
    app.write([strategy], tmp_path)
    text = (tmp_path / "comparison.md").read_text(encoding="utf-8")
    assert "x has the best mean Dice, 0.0000 over 2 regions" in text
    assert "failed" not in text


def test_a_step_that_cannot_be_counted_leaves_its_cells_empty(
    row: Callable[[], Strategy], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(config: object, shape: object) -> None:
        raise UserError("plan: Expected more than 1 value per channel when training")

    monkeypatch.setattr(app, "count_memory", refuse)
    commands = Commands(monkeypatch)
    commands.boxes["a"] = {"left_lung": {"voxels": {"start": [0, 0, 0], "stop": [4, 4, 4]}}}
    strategy = row()
    assert len(strategy.scores) == 2
    assert strategy.costs["fine"]["whole_peak_mib"] is None
    assert (
        "a step of 32×32×32 voxels was not counted, its cells stay empty (plan: Expected"
        in capsys.readouterr().err
    )


def test_a_training_without_timed_steps_leaves_their_cell_empty(
    row: Callable[[], Strategy], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The training made fewer steps than `history_every`."""
    monkeypatch.setattr(app, "_count_step", lambda stage, shape: None)
    Commands(monkeypatch)
    for history in (tmp_path / "runs").glob("*/history.csv"):
        history.write_text("step,val_dice,seconds_per_step\n1,0.5,\n")
    strategy = row()
    assert [strategy.costs[stage]["step_s"] for stage in ("coarse", "fine")] == [None, None]
    app.write([strategy], tmp_path)
    assert "0.0000 over 2 regions" in (tmp_path / "comparison.md").read_text(encoding="utf-8")


def test_a_failed_row_says_the_cause_of_its_case(
    row: Callable[[], Strategy], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = Commands(monkeypatch, predict="predict ended with exit code 3: 1 of 1 cases failed")
    commands.boxes.clear()
    commands.failed["a"] = "out of memory; free some"
    with pytest.raises(UserError, match="no case could be predicted: a: out of memory; free some"):
        row()
    commands.failed.clear()
    with pytest.raises(
        UserError, match="no case could be predicted: predict ended with exit code 3: 1 of 1"
    ):
        row()


def test_a_prediction_gets_what_no_checkpoint_tells(
    row: Callable[[], Strategy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "_count_step", lambda stage, shape: None)
    monkeypatch.setattr(
        "medseg.runs.advice.budget_argument",
        lambda files, trusted: [f"budget of {len(files)}, {trusted}"],
    )
    commands = Commands(monkeypatch)
    row()
    predict, _ = commands.steps
    assert predict[-2:] == ["trusted_targets=[mine.]", "budget of 2, ['mine.']"]


def test_a_case_without_a_prediction_says_why(
    row: Callable[[], Strategy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "_count_step", lambda stage, shape: None)
    commands = Commands(monkeypatch)
    del commands.boxes["b"]
    commands.failed["b"] = "damaged"
    assert row().missing == {"b": "damaged"}


@pytest.mark.parametrize(
    ("code", "command", "failure"),
    [
        (0, "predict", ""),
        (1, "predict", ""),
        (2, "predict", "predict ended with exit code 2: coarse=x does not exist"),
        (1, "train", "train ended with exit code 1: coarse=x does not exist"),
    ],
)
def test_the_last_message_of_a_command_is_its_failure(
    code: int,
    command: str,
    failure: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    program = tmp_path / "python"
    program.write_text(
        "#!/bin/sh\necho 'medseg: first' >&2\necho 'medseg: coarse=x does not exist' >&2\n"
        f"exit {code}\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(command_steps, "MEDSEG", (str(program),))
    assert run_and_get_failure([command, "input=x"]) == failure
    assert capfd.readouterr().err == "medseg: first\nmedseg: coarse=x does not exist\n", "passed on"
