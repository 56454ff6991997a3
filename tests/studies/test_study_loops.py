"""Loops of the studies without trainings: order, arguments, tables, exit codes."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra
import pytest
import yaml
from hydra.core.hydra_config import HydraConfig

from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.config.schema import CompareSpacingConfig, DemoConfig, LadderConfig, TimeToDiceConfig
from medseg.errors import EXIT_RESUME, UserError
from medseg.io.tables import read_csv
from medseg.memory.options import Precision
from medseg.report.spacings import Strategy
from medseg.studies import baselines, compare_spacing, demo, ladder, time_to_dice
from medseg.worker_process import WorkerDiedError

Compose = Callable[..., Any]


@pytest.fixture
def compose(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compose]:
    """Return a function that composes a command; `HydraConfig` then states its arguments."""

    def make(command: str, schema: type, *overrides: str) -> Any:
        composed = hydra.compose(command, [*overrides, "run_dir=none"])
        given = SimpleNamespace(
            overrides=SimpleNamespace(task=[*overrides], hydra=[]),
            runtime=SimpleNamespace(config_sources=[]),
        )
        monkeypatch.setattr(HydraConfig, "get", lambda: given)
        return to_config(composed, schema)

    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        yield make


def test_baselines_are_installed_once_in_these_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    result = SimpleNamespace(returncode=0, stderr="")

    def run(command: list[str], **_: Any) -> Any:
        commands.append(command)
        return result

    monkeypatch.setattr(baselines.subprocess, "run", run)
    packages = (
        tmp_path
        / "lib"
        / f"python{sys.version_info.major}.{sys.version_info.minor}"
        / "site-packages"
    )
    assert baselines.install_baselines(tmp_path) == packages
    assert commands[0][:4] == [sys.executable, "-Pm", "pip", "install"]
    assert commands[0][commands[0].index("--target") + 1] == str(packages)
    assert commands[0][-len(baselines.PACKAGES) :] == list(baselines.PACKAGES)
    assert "--no-deps" in commands[0]
    assert "--disable-pip-version-check" in commands[0], (
        "a notice would hide the reason of a failure"
    )
    baselines.install_baselines(tmp_path)
    assert len(commands) == 2, "the folder of the packages is missing"
    packages.mkdir(parents=True)
    baselines.install_baselines(tmp_path)
    assert len(commands) == 2
    (tmp_path / "medseg-peers").write_text("other==1")
    result.returncode, result.stderr = 1, "first\nno such version\n"
    with pytest.raises(
        UserError, match=r"cannot be installed \(no such version\); choose peers=false"
    ):
        baselines.install_baselines(tmp_path)
    result.stderr = ""
    with pytest.raises(UserError, match=r"cannot be installed \(pip failed\)"):
        baselines.install_baselines(tmp_path)


def test_a_baseline_has_the_input_channels_and_the_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments_of_network: dict[str, Any] = {}
    module = SimpleNamespace(
        PlainConvUNet=lambda **arguments: arguments_of_network.update(arguments),
        UNet=lambda **arguments: arguments_of_network.update(arguments),
    )
    monkeypatch.setitem(sys.modules, "monai.networks.nets", module)
    baselines.make_baseline("monai", 4)
    assert arguments_of_network == {
        "spatial_dims": 3, "in_channels": 1, "out_channels": 4, "channels": (16, 32, 64, 128, 256),
        "strides": (2, 2, 2, 2),
        "num_res_units": 2, "norm": "batch",
    }  # fmt: skip
    baselines.make_baseline("monai", 4, 2)
    assert arguments_of_network["in_channels"] == 2
    with pytest.raises(ValueError, match="expected one of nnunet, monai, got 'lungmask'"):
        baselines.make_baseline("lungmask", 4)
    arguments_of_network.clear()
    for name in ("dynamic_network_architectures", "dynamic_network_architectures.architectures"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "dynamic_network_architectures.architectures.unet", module)
    baselines.make_baseline("nnunet", 4)
    expected = {
        "input_channels": 1,
        "num_classes": 4,
        "n_stages": 6,
        "features_per_stage": (32, 64, 128, 256, 320, 320),
    }
    assert expected.items() <= arguments_of_network.items()
    assert (
        arguments_of_network["strides"],
        arguments_of_network["n_conv_per_stage"],
        arguments_of_network["n_conv_per_stage_decoder"],
    ) == (
        (1, 2, 2, 2, 2, 2),
        2,
        2,
    )
    assert (arguments_of_network["conv_bias"], arguments_of_network["kernel_sizes"]) == (True, 3)


def test_each_row_of_the_ladder_is_measured_and_trained_in_its_precision(
    tmp_path: Path,
    compose: Compose,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = ["shape=[32,32,48]", "timed_steps=3", "train=true", "peers=true"]
    config = compose("ladder", LadderConfig, f"output='{tmp_path}'", *settings)
    config.networks = {}
    config.rows = {"start": ["model.width=8"], "half": ["memory.precision=bf16"]}
    measured: list[dict[str, Any]] = []
    trained: list[Any] = []

    def measure(
        folder: Path, row: Any, shape: Any, timed_steps: int, baseline: str | None, packages: Any
    ) -> dict[str, Any]:
        measured.append(
            {
                "folder": folder.name,
                "precision": row.memory.precision.value,
                "width": row.model.get("width"),
                "request": (shape, timed_steps, packages),
                "baseline": baseline,
            }
        )
        return {"device": "CPU"}

    monkeypatch.setattr(ladder, "measure", measure)
    monkeypatch.setattr(ladder, "install_baselines", lambda folder: folder.name)
    monkeypatch.setattr(ladder, "run_steps", trained.append)
    monkeypatch.setattr(ladder, "read_summary", lambda folder: {"run": folder.parent.name})
    monkeypatch.setattr(
        ladder,
        "table_row",
        lambda row, memory, facts, summary: {"row": row.name, **facts, **summary},
    )
    written: list[Any] = []
    monkeypatch.setattr(
        ladder,
        "write",
        lambda table, rows, output, title: written.append((len(table), output, title)),
    )
    monkeypatch.setattr(ladder, "print_table", lambda *_: None)
    assert ladder.ladder(config) == 0
    configured = [row for row in measured if row["baseline"] is None]
    assert [(row["folder"], row["precision"], row["width"]) for row in configured] == [
        ("start", "fp32", 8),
        ("half", "bf16", 8),
    ]
    packages = Path(config.peers_env).name
    assert {row["request"] for row in measured} == {((32, 32, 48), 3, packages)}
    precisions: dict[str | None, set[str]] = {}
    for row in measured:
        precisions.setdefault(row["baseline"], set()).add(row["precision"])
    assert precisions.keys() == {None, "nnunet", "monai"}
    assert "fp32" in precisions["nnunet"]
    assert precisions["monai"] == {"fp32"}
    assert len(trained) == 2, "baselines are not trained"
    assert written[-1] == (len(measured), tmp_path, "A training step on 32×32×48 voxels, CPU")
    assert [number for number, *_ in written] == list(range(1, len(measured) + 1)), (
        "the table is written after each row"
    )
    assert "ladder.csv" in capsys.readouterr().out
    assert ladder.with_precision(config, "") is config
    assert ladder.with_precision(config, "fp16").memory.precision is Precision.fp16


def test_a_row_is_measured_in_a_new_process_and_only_where_its_request_is_new(
    tmp_path: Path, compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = compose("ladder", LadderConfig, f"output='{tmp_path}'")
    calls: list[Any] = []

    class Worker:
        error: Exception | None = None

        def __enter__(self) -> Worker:
            return self

        def __exit__(self, *_: object) -> None:
            """End nothing: there is no process."""

        def call(self, *arguments: Any) -> dict[str, Any]:
            calls.append(arguments)
            if self.error is not None:
                raise self.error
            return {"bytes": len(calls)}

    monkeypatch.setattr(ladder, "Worker", Worker)
    folder = tmp_path / "row"
    first = ladder.measure(folder, config, (8, 16, 24), 5, "monai", tmp_path)
    assert first == {"bytes": 1}
    assert calls == [(ladder.measure_row, config, (8, 16, 24), 5, "monai", tmp_path)]
    assert ladder.measure(folder, config, (8, 16, 24), 5, "monai", tmp_path)["bytes"] == 1
    assert json.loads((folder / "measured.json").read_text())["request"]["shape"] == [8, 16, 24]
    for shape, steps, baseline in (
        ((8, 16, 32), 5, "monai"),
        ((8, 16, 24), 6, "monai"),
        ((8, 16, 24), 5, None),
    ):
        before = len(calls)
        ladder.measure(folder, config, shape, steps, baseline, None)
        assert len(calls) == before + 1
    for error, message in (
        (WorkerDiedError(-signal.SIGKILL), "its process was killed"),
        (UserError("no room"), "could not be measured: no room"),
    ):
        Worker.error = error
        with pytest.raises(UserError, match=message):
            ladder.measure(folder, config, (8, 8, 8), 5, None, None)


@pytest.fixture
def spacing_study(compose: Compose, tiny_table: Path, tmp_path: Path) -> CompareSpacingConfig:
    held_out = ["data.test_patients=[p0]", f"data.cases='{tiny_table}'"]
    config: CompareSpacingConfig = compose(
        "compare_spacing", CompareSpacingConfig, f"output='{tmp_path / 'study'}'", *held_out
    )
    config.rows = {"thin": ["spacing=isotropic_1mm"], "thick": ["spacing=isotropic_2mm"]}
    return config


def test_a_failed_spacing_does_not_end_the_others(
    spacing_study: CompareSpacingConfig,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = Path(spacing_study.output)
    spacing_study.task.labels["trachea"] = 3
    spacing_study.data.label_values["trachea"] = 4
    calls: list[Any] = []
    tasks: list[str] = []
    written: list[Any] = []
    cases = [
        SimpleNamespace(
            name=name, patient=f"of {name}", labels=labels, image=Path(name), series=None
        )
        for name, labels in (("a", 1), ("b", None))
    ]
    source = SimpleNamespace(split=SimpleNamespace(test=cases))
    monkeypatch.setattr(compare_spacing, "find_sources", lambda *_: [source])
    monkeypatch.setattr(
        compare_spacing,
        "read_scan_grid",
        lambda case, channels: f"grid of {case.image}, {channels[0].modality}",
    )

    def write_case_table(path: Path, table_cases: Any) -> Path:
        calls.append([case.name for case in table_cases])
        return path

    monkeypatch.setattr(compare_spacing, "write_case_table", write_case_table)
    monkeypatch.setattr(
        compare_spacing,
        "stages_of",
        lambda name, config, common, runs: f"stages of {name}, {runs.name}",
    )

    def run_row(
        name: str, stages: Any, folder: Path, table: Path, grids: Any, **others: Any
    ) -> Strategy:
        calls.append((name, stages, folder.name, table.name, grids))
        tasks.append(others["task"])
        if name == "thin":
            raise UserError("no room")
        return Strategy(name, {}, [], {"x": "gone"} if is_missing else {})

    def write(strategies: list[Strategy], folder: Path, patients: Any) -> None:
        written.append(([strategy.failure for strategy in strategies], patients))
        (folder / "comparison.md").parent.mkdir(exist_ok=True)
        (folder / "comparison.md").write_text("table")

    monkeypatch.setattr(compare_spacing, "run_row", run_row)
    monkeypatch.setattr(compare_spacing, "write", write)
    is_missing = False
    assert compare_spacing.compare_spacing(spacing_study) == 1
    assert calls == [
        ["a"],
        ("thin", "stages of thin, runs", "thin", "held_out.csv", {"a": "grid of a, ct"}),
        ("thick", "stages of thick, runs", "thick", "held_out.csv", {"a": "grid of a, ct"}),
    ]
    assert written == [(["no room"], {"a": "of a"}), (["no room", ""], {"a": "of a"})]
    assert "thin: no room" in capsys.readouterr().err
    # The task of the study with the user's changes, for `evaluate`.
    groups = yaml.safe_load((output / "task.yaml").read_text(encoding="utf-8"))
    assert groups["task"]["labels"]["trachea"] == 3
    assert groups["data"]["label_values"] == {"left_lung": 1, "right_lung": 2, "trachea": 4}
    assert tasks == [f"task={output / 'task.yaml'}"] * 2
    spacing_study.rows = {"thick": spacing_study.rows["thick"]}
    assert compare_spacing.compare_spacing(spacing_study) == 0
    is_missing = True
    assert compare_spacing.compare_spacing(spacing_study) == 1, "a case without a result"
    cases.pop(0)
    with pytest.raises(UserError, match=r"data\.test_patients: no case with labels is held out"):
        compare_spacing.compare_spacing(spacing_study)
    assert output.is_dir()


@pytest.mark.parametrize(
    ("outcomes", "code", "limits", "num_rows"),
    [
        (["reached", "stopped", "ended"], 0, [10.0, 8.0, 8.0], 3),
        (["stopped", "reached", "reached"], 0, [10.0, 10.0, 10.0], 3),
        (["reached", "out_of_memory", "reached"], 1, [10.0, 8.0, 8.0], 3),
        (["reached", "interrupted"], EXIT_RESUME, [10.0, 8.0], 2),
    ],
)
def test_rows_have_the_time_of_the_first_and_their_own_limit(
    outcomes: list[str],
    code: int,
    limits: list[float],
    num_rows: int,
    tmp_path: Path,
    compose: Compose,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = ["target_dice=0.5", "metric=val_dice", "max_minutes=10", "max_ratio=4"]
    config = compose("time_to_dice", TimeToDiceConfig, f"output='{tmp_path}'", *settings)
    # Names that Hydra would read as something else, or not at all.
    config.rows = {"größer": ["seed=1"], "null": ["seed=2"], "1e5": ["seed=3"]}
    calls: list[Any] = []
    names: list[str] = []
    answers = iter(outcomes)

    def train(row: Any, study: Any, limit_minutes: float) -> Any:
        calls.append((row.seed, row.steps, limit_minutes))
        names.append(row.name)
        own = [{"step": 10.0, "cpu_minutes": 1.0, "val_dice": 0.4}]
        own += [
            {"step": 20.0 * step, "cpu_minutes": 2.0 * step, "val_dice": 0.5 + step / 100}
            for step in (1, 2)
        ]
        own.append({"cpu_minutes": 5.0})
        outcome = next(answers)
        return (own if outcome == "reached" else [own[0], own[3]]), outcome

    monkeypatch.setattr(time_to_dice, "train_row", train)
    monkeypatch.setattr(
        time_to_dice, "make_data_module", lambda _: SimpleNamespace(prepare_data=lambda: None)
    )
    assert time_to_dice.time_to_dice(config) == code
    assert [seed for seed, *_ in calls] == [1, 2, 3][:num_rows]
    assert names == ["größer", "null", "1e5"][:num_rows]
    assert {steps for _, steps, _ in calls} == {config.steps}
    assert [limit for *_, limit in calls] == limits
    table = read_csv(tmp_path / "time_to_dice.csv")
    assert [row["outcome"] for row in table] == outcomes
    first_minutes = 2.0 if outcomes[0] == "reached" else 5.0
    for row in table:
        minutes, step, dice = (2.0, 20.0, 0.52) if row["outcome"] == "reached" else (5.0, 10.0, 0.4)
        assert (float(row["cpu_minutes"]), float(row["step"]), float(row["dice"])) == (
            minutes,
            step,
            dice,
        )
        assert float(row["ratio"]) == pytest.approx(minutes / first_minutes, abs=0.01)


def test_the_demo_is_commands_that_a_user_would_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[Any] = []
    monkeypatch.setattr(
        demo, "train_steps", lambda folder, *arguments: [["train", folder.name, *arguments]]
    )
    monkeypatch.setattr(demo, "last_checkpoint", lambda folder: f"{folder.name}.ckpt")
    monkeypatch.setattr(demo, "run_steps", done.extend)
    statistics = [
        {"metric": "dice", "trust": "all", "region": "left_lung", "mean": 0.91},
        {"metric": "dice", "trust": "all", "region": "all", "mean": 0.5},
        {"metric": "dice", "trust": "sure", "region": "left_lung", "mean": 0.4},
        {"metric": "nsd_1mm", "trust": "all", "region": "left_lung", "mean": 0.3},
    ]
    (tmp_path / "scores").mkdir()
    (tmp_path / "scores" / "summary.json").write_text(json.dumps({"statistics": statistics}))
    assert demo.demo(DemoConfig(str(tmp_path))) == 0
    data = [f"data.phantoms.folder={tmp_path / 'phantoms'}", f"data.cache={tmp_path / 'cache'}"]
    table = tmp_path / "phantoms" / "table.csv"
    assert done == [
        ["train", "coarse", "experiment=demo_coarse", *data],
        ["train", "fine", "experiment=demo_fine", *data],
        [
            "predict",
            f"input={table}",
            "split=test",
            f"output={tmp_path / 'predictions'}",
            "coarse=coarse.ckpt",
            "fine=fine.ckpt",
        ],
        [
            "evaluate",
            f"pred={tmp_path / 'predictions'}",
            f"ref={table}",
            "split=test",
            f"output={tmp_path / 'scores'}",
        ],
    ]
    output = capsys.readouterr().out
    assert [line for line in output.splitlines() if line.startswith("Mean")] == [
        "Mean Dice of left_lung: 0.9100"
    ]
