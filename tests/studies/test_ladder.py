"""Ladder: its rows are composed, measured, trained and drawn, each once."""

from __future__ import annotations

import csv
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import forked
import hydra
import pytest
from PIL import Image
from torch import nn

from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.config.schema import LadderConfig
from medseg.errors import UserError
from medseg.memory.options import Precision
from medseg.runs.folder import open_run
from medseg.runs.signature import plain
from medseg.studies import ladder as ladder_app
from medseg.training.options import TrainConfig
from medseg.worker_process import WorkerDiedError


def ladder_config(*overrides: str) -> LadderConfig:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return to_config(hydra.compose("ladder", [*overrides, "run_dir=x"]), LadderConfig)


def test_rows_add_up_to_the_lean_experiment() -> None:
    rows = list(
        ladder_app.ladder_rows(ladder_config("peers=true"), ["seed=3", "data.num_workers=0"])
    )
    assert [row.baseline for row in rows[:4]] == ["nnunet", "nnunet", "monai", None]
    assert rows[0].arguments == rows[3].arguments, (
        "baselines run with the switches of the first row"
    )
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        first, last = (plain(ladder_app.compose(row)) for row in (rows[3], rows[-1]))
        composed = hydra.compose(
            "train", ["experiment=fine_lean", "seed=3", "data.num_workers=0", "run_dir=ladder"]
        )
    lean = plain(to_config(composed, TrainConfig))
    differing = {key for key in lean if last[key] != lean[key]} - {"name", "data", "logger"}
    assert not differing
    assert first["memory"] != lean["memory"]
    assert all(
        config["seed"] == 3 and config["data"]["num_workers"] == 0 for config in (first, last)
    )


def small_network(_: str, num_classes: int, in_channels: int) -> nn.Module:
    """Network in place of a baseline, whose package is not installed."""
    return nn.Sequential(
        nn.Conv3d(in_channels, 8, 3, padding=1),
        nn.InstanceNorm3d(8),
        nn.LeakyReLU(),
        nn.Conv3d(8, num_classes, 1),
    )


def test_baselines_are_counted_in_fp32_and_in_the_precision_in_which_they_train(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [row for row in ladder_app.ladder_rows(ladder_config("peers=true"), []) if row.baseline]
    # nnU-Net trains in CUDA's autocast, which is fp16; the tutorial of MONAI's UNet trains in fp32.
    assert [(row.name, row.precision, row.folder) for row in rows] == [
        ("nnU-Net's default network, fp32", "fp32", "nnunet_fp32"),
        ("nnU-Net's default network, fp16 as it trains", "fp16", "nnunet_fp16"),
        ("MONAI's UNet, fp32 as it trains", "fp32", "monai_fp32"),
    ]
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = ladder_app.compose(
            rows[1]._replace(arguments=(*rows[1].arguments, "trainer.accelerator=cpu"))
        )
    full, half = (ladder_app.with_precision(config, row.precision) for row in rows[:2])
    monkeypatch.setattr(ladder_app, "make_baseline", small_network)
    in_fp32 = ladder_app.measure_row(full, (16, 16, 16), timed_steps=0, baseline="nnunet")
    in_fp16 = ladder_app.measure_row(half, (16, 16, 16), timed_steps=1, baseline="nnunet")
    assert "seconds_per_step" not in in_fp16, "a CPU cannot compute fp16"
    # More than half, since the loss keeps its logits in fp32 in both precisions.
    assert 0.5 < in_fp16["saved_per_voxel"] / in_fp32["saved_per_voxel"] < 0.6
    line = ladder_app.table_row(rows[1], half.memory, in_fp16, {})
    assert (line["precision"], line["checkpointing"]) == ("fp16", "none")


def test_a_baseline_takes_all_channels_of_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["task=brain_tumour", "stage=single", "trainer.accelerator=cpu"]
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = ladder_app.compose(ladder_app.Row("peers", "MONAI's UNet", tuple(arguments)))
    monkeypatch.setattr(ladder_app, "make_baseline", small_network)
    config = ladder_app.with_precision(config, "fp32")
    measured = ladder_app.measure_row(config, (16, 16, 16), timed_steps=1, baseline="monai")
    assert measured["peak_bytes"] > 0
    assert measured["seconds_per_step"] > 0


def test_a_finished_training_is_reused_with_its_own_configuration_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["trainer.accelerator=cpu", "steps=100"]
    overrides = SimpleNamespace(task=arguments)
    hydra_config = SimpleNamespace(get=lambda: SimpleNamespace(overrides=overrides))
    monkeypatch.setattr(ladder_app, "HydraConfig", hydra_config)
    config = ladder_config(f"output={tmp_path}", "train=true", "~rows", "+rows={plain: []}")
    (row,) = ladder_app.ladder_rows(config, arguments)
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        trained = ladder_app.compose(row)
    trained.run_dir = str(tmp_path / "plain" / "run")
    run_dir = open_run(trained)
    (run_dir / "summary.json").write_text('{"status": "finished", "val_dice_best": 0.5}')
    measured = {"saved_per_voxel": 1.0, "peak_bytes": 1, "parameter_bytes": 1}
    monkeypatch.setattr(ladder_app, "measure", lambda *_, **__: measured)
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        # Keys that do not change the result may differ.
        overrides.task = [*arguments, "data.num_workers=0"]
        assert ladder_app.ladder(config) == 0
        overrides.task = ["trainer.accelerator=cpu", "steps=1000"]
        with pytest.raises(UserError) as caught:
            ladder_app.ladder(config)
    message = str(caught.value)
    assert message.startswith(f"{run_dir} holds a training with another configuration (")
    assert "steps: 100 then, 1000 now" in message
    assert message.endswith("; restore these values, or give another output")


def test_rows_that_train_would_refuse_are_named() -> None:
    rows = list(ladder_app.ladder_rows(ladder_config("+rows.wrong=['model.stem=conv']"), []))
    with (
        hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"),
        pytest.raises(UserError, match=r"rows\.wrong: model\.refine=8"),
    ):
        ladder_app.compose(rows[-1])
    networks = ladder_config("+networks.wrong=['model.stem=conv','model.refine=8']")
    first_row = next(ladder_app.ladder_rows(networks, []))
    with (
        hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"),
        pytest.raises(UserError, match=r"^networks\.wrong: model\.refine=8"),
    ):
        ladder_app.compose(first_row)
    with pytest.raises(UserError, match="differ in more than punctuation"):
        list(ladder_app.ladder_rows(replace(ladder_config(), rows={"a b": [], "a/b": []}), []))


def test_a_row_is_counted_and_timed() -> None:
    rows = list(
        ladder_app.ladder_rows(
            ladder_config("trainer.accelerator=cpu"), ["trainer.accelerator=cpu"]
        )
    )
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = ladder_app.compose(
            rows[-1]._replace(arguments=(*rows[-1].arguments, "model.width=4"))
        )
    measured = ladder_app.measure_row(config, (16, 32, 32), timed_steps=1)
    assert measured["peak_bytes"] > 16 * 32 * 32 * (4 + 1 + measured["saved_per_voxel"])
    assert 0 < measured["seconds_per_step"] < 60


def test_a_task_of_one_stage_is_counted() -> None:
    arguments = [
        "stage=coarse",
        "task.regions=null",
        "model.width=4",
        "trainer.accelerator=cpu",
        "run_dir=none",
    ]
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = ladder_app.compose(ladder_app.Row("rows.one", "one", tuple(arguments)))
    assert ladder_app.measure_row(config, (16, 32, 32), timed_steps=1)["peak_bytes"] > 0


def test_the_table_and_the_picture_show_what_is_known(tmp_path: Path) -> None:
    rows = [
        ladder_app.Row("peers", "MONAI's UNet", (), baseline="monai", precision="fp32"),
        ladder_app.Row("rows.plain", "plain", ("a=1", "b=2"), ("b=2",)),
    ]
    memory = replace(
        ladder_config().memory, precision=Precision.bf16, checkpointing=["stem", "head"]
    )
    assert [ladder_app.picture_name(row,
        {"precision": "bf16", "checkpointing": "stem"}) for row in rows] == [
        "MONAI's UNet", "plain, bf16, checkpointing stem"
    ]  # fmt: skip
    measured = {"saved_per_voxel": 100.0, "peak_bytes": 2**20, "parameter_bytes": 2**19}
    timed = {**measured, "seconds_per_step": 1.0, "device": "2 CPU threads"}
    widths = []
    for measurement, summary in ((measured, {}), (timed, {"val_dice_best": 0.9, "train_s": 7.0})):
        table = [ladder_app.table_row(row, memory, measurement, summary) for row in rows]
        ladder_app.write(table, rows, tmp_path, "noise")
        with Image.open(tmp_path / "ladder.png") as picture:
            widths.append(picture.size[0])
    assert widths[0] < widths[1], "panels without values are left out"
    assert (tmp_path / "ladder.csv").read_text(encoding="utf-8").splitlines() == [
        "row,arguments,precision,checkpointing,saved_bytes_per_voxel,peak_mib,parameters_mib,"
        "seconds_per_step,device,"
        "peak_allocated_mib,dice,train_s",
        "MONAI's UNet,,bf16,none,100.0,1.0,0.5,1.0,2 CPU threads,,0.9,7.0",
        "plain,b=2,bf16,stem head,100.0,1.0,0.5,1.0,2 CPU threads,,0.9,7.0",
    ]


@pytest.mark.slow
def test_a_row_is_measured_in_a_new_process_and_kept_while_its_configuration_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = list(
        ladder_app.ladder_rows(ladder_config(), ["trainer.accelerator=cpu", "model.width=4"])
    )
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config, other = (ladder_app.compose(rows[0]._replace(arguments=(*rows[0].arguments,
            *added))) for added in ((), ("memory.checkpointing=all",)))  # fmt: skip
    first = ladder_app.measure(tmp_path, config, (16, 16, 16), 0, None, None)
    assert first["peak_bytes"] > 0
    monkeypatch.setattr(ladder_app, "Worker", None)
    assert (
        ladder_app.measure(tmp_path, config, (16, 16, 16), 0, None, None)["peak_bytes"]
        == first["peak_bytes"]
    )
    with pytest.raises(TypeError):
        ladder_app.measure(tmp_path, other, (16, 16, 16), 0, None, None)


@pytest.mark.parametrize(
    ("exit_code", "message"),
    [
        (
            -signal.SIGKILL,
            (
                "its process was killed, as the system does when memory is full; choose a smaller "
                "shape"
            ),
        ),
        (1, "its process ended with exit code 1; start it again"),
    ],
)
def test_a_row_whose_process_ends_says_how(
    exit_code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(*_: object) -> None:
        raise WorkerDiedError(exit_code)

    monkeypatch.setattr(ladder_app.Worker, "call", call)
    (row, *_) = ladder_app.ladder_rows(ladder_config(), [])
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = ladder_app.compose(row)
    with pytest.raises(UserError, match=f"{tmp_path.name} could not be measured: {message}"):
        ladder_app.measure(tmp_path, config, (16, 16, 16), 0, None, None)


@pytest.mark.slow
def test_climbs_trains_and_keeps_what_is_done(tiny_table: Path, tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "medseg.commands.cli", "ladder", f"output={tmp_path / 'l'}",
        "shape=[32,32,32]", "timed_steps=1",
        "train=true", "steps=2", f"data.cases={tiny_table}",
        f"data.cache={tiny_table.parent / 'cache'}", "logger=none",
        "data.num_workers=0", "spacing.target_spacing_mm=[4.0,4.0,4.0]", "trainer.accelerator=cpu",
        "~rows",
        "+rows={first row: ['model.width=4'], half: ['memory.precision=bf16']}",
    ]  # fmt: skip
    for attempt in range(2):
        result = forked.run(command, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        assert ("measuring" in result.stdout) == (attempt == 0)
        assert ("medseg train" in result.stdout) == (attempt == 0)
    longer = forked.run([*command, "steps=3"], cwd=tmp_path)
    assert longer.returncode == 2
    assert "holds a training with another configuration (schedule." in longer.stderr
    assert "steps: 2 then, 3 now" in longer.stderr
    with (tmp_path / "l" / "ladder.csv").open(encoding="utf-8", newline="") as file:
        first, half = csv.DictReader(file)
    assert float(half["saved_bytes_per_voxel"]) < 0.7 * float(first["saved_bytes_per_voxel"])
    assert all(
        0 <= float(row["dice"]) <= 1 and float(row["seconds_per_step"]) > 0 for row in (first, half)
    )
    assert (tmp_path / "l" / "ladder.png").is_file()
