"""Runs under attack: kills, signals to the process group, and simultaneous commands."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import pytest
import torch

from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.errors import UserError
from medseg.inference.options import InferenceOptions
from medseg.io.read import read_image
from medseg.memory.options import Accelerator
from medseg.prediction.options import PredictConfig
from medseg.prediction.predict import predict_scans
from medseg.runs.folder import load_config, open_run
from medseg.training.options import TrainConfig
from tests.integration import killed_runs
from tests.integration.conftest import COARSE, FINE, train
from tests.integration.test_runs import assert_equal, command, history
from tests.integration.test_stopping import SIGNALS, num_lines, saved_step, start, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def assert_same_state(one: Path, other: Path) -> None:
    """Whether two checkpoints hold the same weights, optimiser and schedule, bit by bit."""
    left, right = (torch.load(path, weights_only=True) for path in (one, other))
    for key in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert_equal(left[key], right[key])


def test_twenty_kills_leave_a_fine_stage_as_it_would_be(tiny_table: Path, tmp_path: Path) -> None:
    settings = [
        "stage=fine", "spacing=isotropic_3mm", "stage.patch_size=[16,16,16]", "stage.batch_size=2",
        "stage.validate_every=9", "model.width=4",
        "model.depth=2", "model.blocks_per_level=[1,1,1]", "steps=120", "checkpoint_every=3",
        "data.num_workers=1", "optimizer=sgd",
        "schedule=cosine", "warmup_steps=5",
    ]  # fmt: skip
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train(whole, tiny_table, *settings)
    killed.mkdir()
    (killed / "config.yaml").write_text(
        (whole / "config.yaml").read_text().replace(str(whole), str(killed))
    )
    script = [sys.executable, killed_runs.__file__, str(killed), "20", "77"]
    result = subprocess.run(
        script,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    for name in ("last.ckpt", "best.ckpt"):
        left, right = (
            torch.load(folder / "checkpoints" / name, weights_only=True)
            for folder in (whole, killed)
        )
        assert_equal(left["state_dict"], right["state_dict"])
    assert_same_state(whole / "checkpoints" / "last.ckpt", killed / "checkpoints" / "last.ckpt")
    assert history(killed) == history(whole)


@pytest.mark.parametrize("seed", [1, 2])
def test_ten_signals_to_the_process_group_at_random_moments(
    seed: int, tiny_table: Path, tmp_path: Path
) -> None:
    rng = random.Random(seed)
    run_dir = tmp_path / "run"
    settings = [
        "stage.validate_every=15",
        "checkpoint_every=null",
        "stage.batch_size=2",
        "data.num_workers=2",
        "schedule=constant",
    ]
    arguments = [*command(tiny_table, run_dir, "steps=100000", *settings), "resume=auto"]
    steps = [0]
    for attempt in range(10):
        lines = num_lines(run_dir / "history.csv")
        process, number = start(arguments), rng.choice(SIGNALS)
        if attempt % 2:  # while it trains, else at any moment from the start on
            wait_for(
                lambda lines=lines: num_lines(run_dir / "history.csv") > max(lines, 1), process
            )
        time.sleep(rng.uniform(0, 1) if attempt % 2 else rng.uniform(1, 12))
        os.killpg(process.pid, number)
        _, said = process.communicate(timeout=300)
        # Python itself may not have come to the first line of medseg.
        assert process.returncode == 75 or (process.returncode == -number and not said), said
        assert "Traceback" not in said
        if (run_dir / "checkpoints" / "last.ckpt").is_file():
            steps.append(saved_step(run_dir))
            assert json.loads((run_dir / "summary.json").read_text())["status"] == "interrupted"
    assert steps == sorted(steps)
    assert steps[-1] > 0
    subprocess.run(
        command(tiny_table, tmp_path / "whole", f"steps={steps[-1]}", *settings), check=True
    )
    assert_same_state(
        *(folder / "checkpoints" / "last.ckpt" for folder in (run_dir, tmp_path / "whole"))
    )


def race(
    seed: int, config: TrainConfig, folders: list[tuple[Path, bool]], barrier: Any, results: Any
) -> None:
    """Open a new run in each folder, at the same moment as another process."""
    config.seed = seed
    for folder, is_chosen_by_user in folders:
        config.run_dir = str(folder)
        barrier.wait(60)
        try:
            results.put((folder, seed, open_run(config, is_chosen_by_user=is_chosen_by_user)))
        except UserError as error:
            results.put((folder, seed, str(error)))


def test_forty_races_of_two_runs_into_one_folder(tmp_path: Path) -> None:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = to_config(hydra.compose("train", ["run_dir=none", "logger=none"]), TrainConfig)
    folders = [(tmp_path / f"folder {number}", number % 2 == 0) for number in range(40)]
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    racers = [
        context.Process(target=race, args=(seed, config, folders, barrier, results))
        for seed in (1, 2)
    ]
    for racer in racers:
        racer.start()
    found: dict[Path, dict[int, Path | str]] = {}
    for _ in range(80):
        folder, seed, result = results.get(timeout=120)
        found.setdefault(folder, {})[seed] = result
    for racer in racers:
        racer.join()
    for folder, is_chosen_by_user in folders:
        opened = {
            seed: result for seed, result in found[folder].items() if isinstance(result, Path)
        }
        refused = [result for result in found[folder].values() if isinstance(result, str)]
        assert len(opened) == (1 if is_chosen_by_user else 2), found[folder]
        assert all("already contains a run" in message for message in refused)
        assert len(set(opened.values())) == len(opened)
        assert {seed: load_config(run_dir).seed for seed, run_dir in opened.items()} == {
            seed: seed for seed in opened
        }


def test_commands_that_start_in_the_same_second_train_their_own_runs(
    tiny_table: Path, tmp_path: Path
) -> None:
    for _ in range(3):
        processes = []
        for seed in (1, 2):
            arguments = command(
                tiny_table, tmp_path, "steps=1", "data.num_workers=0", f"seed={seed}", "name=same"
            )
            arguments = [
                argument for argument in arguments if not argument.startswith("hydra.run.dir=")
            ]
            processes.append(
                subprocess.Popen(arguments, cwd=tmp_path, stdout=subprocess.PIPE, encoding="utf-8")
            )
        for seed, process in enumerate(processes, start=1):
            said, _ = process.communicate(timeout=300)
            assert process.returncode == 0
            run_dir = Path(said.rpartition("run folder: ")[2].strip())
            assert load_config(run_dir).seed == seed
            assert [
                start["seed"] for start in json.loads((run_dir / "versions.json").read_text())
            ] == [seed]
    assert len(list((tmp_path / "runs" / "same").iterdir())) == 6


def predict_in_races(
    scan: Path, outputs: list[Path], checkpoints: tuple[Path, Path], barrier: Any, results: Any
) -> None:
    """Predict a scan to each output, while another process predicts another scan."""
    torch.set_num_threads(1)
    coarse, fine = ([str(path)] for path in checkpoints)
    options = InferenceOptions(budget_gib=2.0)
    for output in outputs:
        barrier.wait(300)
        config = PredictConfig(
            input=str(scan), output=str(output), coarse=coarse, fine=fine,
            accelerator=Accelerator.cpu, threads=1,
            overwrite=True, inference=options,
        )  # fmt: skip
        (case,) = predict_scans(config)
        results.put((output, scan, case.exit_code))


def test_twenty_races_of_two_predictions_into_one_file(tiny_table: Path, tmp_path: Path) -> None:
    trained = (
        train(tmp_path / "coarse", tiny_table, *COARSE),
        train(tmp_path / "fine", tiny_table, *FINE),
    )
    scans = [tiny_table.parent / f"c{number}.nii.gz" for number in (2, 3)]
    outputs = [tmp_path / f"{number}" / "lungs.nii.gz" for number in range(20)]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    alone = []
    for number, scan in enumerate(scans):
        alone.append(tmp_path / f"alone {number}" / "lungs.nii.gz")
        predict_in_races(scan, alone[-1:], trained, context.Barrier(1), results)
    maps = {str(scan): read_image(path).array for scan, path in zip(scans, alone, strict=True)}
    assert maps[str(scans[0])].shape != maps[str(scans[1])].shape
    barrier = context.Barrier(2)
    racers = [
        context.Process(target=predict_in_races, args=(scan, outputs, trained, barrier, results))
        for scan in scans
    ]
    for racer in racers:
        racer.start()
    codes = [results.get(timeout=300) for _ in range(42)]
    for racer in racers:
        racer.join()
    for output in outputs:
        report = json.loads(output.with_name("lungs.json").read_text())
        assert np.array_equal(read_image(output).array, maps[report["input"]]), (
            "the report vouches for the map of another scan"
        )
        # The one that came second was refused, or it wrote both files anew.
        assert sorted(code for path, _, code in codes if path == output) in ([0, 0], [0, 2])
        assert (output, Path(report["input"]), 0) in codes
        assert len(list(output.parent.iterdir())) == 2
