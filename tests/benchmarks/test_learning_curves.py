"""Learning curves beside nnU-Net: data, lengths of trainings, costs and tables; and the whole."""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from benchmarks import learning_curves as app
from benchmarks import learning_curves_runs as runs
from benchmarks.learning_curves_data import DATASET, write_data
from medseg.config.imported import SOURCE_VARIABLE
from medseg.data.case_table import read_case_table
from medseg.errors import UserError
from medseg.geometry.grid import VoxelGrid
from medseg.io.read import read_image, read_labels
from medseg.io.tables import read_csv, write_csv
from medseg.io.write import write_image, write_labels

# CPU seconds of the parts of trainings of nnU-Net: quick ones, and a slow one on large patches.
TIMED = [
    {"start_s": 10.0, "iteration_s": 0.2, "validation_s": 0.1, "epoch_s": 1.0},
    {"start_s": 10.0, "iteration_s": 3.0, "validation_s": 1.0, "epoch_s": 2.0},
    {"start_s": 20.0, "iteration_s": 90.0, "validation_s": 30.0, "epoch_s": 3.0},
]
# Stands for nnU-Net: notes each job with its environment, and writes facts and label maps.
FAKE_JOBS = """
import json, os, pathlib, shutil, sys
name, path = sys.argv[1:]
job = json.loads(pathlib.Path(path).read_text())
folders = {key: os.environ[key] for key in os.environ if key.startswith("nnUNet_")}
line = {"name": name, "has_pythonpath": "PYTHONPATH" in os.environ, **job, **folders}
with open(pathlib.Path(__file__).with_name("jobs"), "a") as file:
    file.write(json.dumps(line) + "\\n")
facts = {}
if name == "plan":
    facts = {"spacing": [3, 2.5, 2.5], "patch_size": [8, 16, 16], "batch_size": 2}
if name == "time":
    facts = {"start_s": 10.0, "iteration_s": 0.2, "validation_s": 0.1, "epoch_s": 1.0}
if name == "train":
    facts = {"iterations": job["epochs"] * job["iterations"]}
if name == "predict":
    raw = pathlib.Path(os.environ["nnUNet_raw"], job["dataset"])
    output = pathlib.Path(job["output"])
    output.mkdir()
    for image, *_ in job["scans"]:
        case = pathlib.Path(image).name.replace("_0000", "")
        shutil.copy(raw / "labelsTr" / case, output / case)
pathlib.Path(job["facts"]).write_text(json.dumps(facts))
"""


def write_table(folder: Path) -> Path:
    """Write six scans of two channels, whose labels have other values than those of the task."""
    grid = VoxelGrid((4, 6, 8), (3.0, 2.0, 2.0))
    lines = ["case,image,image_1,labels,patient"]
    for number in range(6):
        for channel in range(2):
            image = np.full(grid.shape, 100 * number + channel, dtype=np.int16)
            write_image(folder / f"c{number}_{channel}.nii.gz", image, grid)
        labels = np.zeros(grid.shape, dtype=np.uint8)
        labels[1:3, 1:3] = 7
        write_labels(folder / f"l{number}.nii.gz", labels, grid)
        images = f"c{number}_0.nii.gz,c{number}_1.nii.gz"
        lines.append(f"c{number},{images},l{number}.nii.gz,p{number // 2}")
    (folder / "cases.csv").write_text("\n".join(lines), encoding="utf-8")
    (folder / "task.yaml").write_text(
        "task: {name: toy, labels: {spot: 1}, regions: null, channels: ["
        "{modality: mr, normalise: zscore}, {modality: mr, normalise: zscore}]}\n"
        "data: {label_values: {spot: 7}}\n",
        encoding="utf-8",
    )
    return folder / "cases.csv"


@pytest.fixture(autouse=True)
def own_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """`write_data` notes the source of its task in the environment; later tests must not see it."""
    monkeypatch.setenv(SOURCE_VARIABLE, "")


def test_both_programs_get_the_same_files_and_split(tmp_path: Path) -> None:
    table = write_table(tmp_path)
    data = write_data(tmp_path / "data", [f"data.cases={table}"], 3)
    raw = tmp_path / "data" / "nnUNet_raw" / DATASET
    cases = read_case_table(tmp_path / "data" / "cases.csv")
    assert len(cases) == 6
    for case in cases:
        number = int(case.name[1:])
        assert [path.parent for path in case.images(2)] == [raw / "imagesTr"] * 2
        values = [read_image(path, modality="mr").array for path in case.images(2)]
        assert [np.unique(array).tolist() for array in values] == [
            [100 * number],
            [100 * number + 1],
        ]
        assert case.labels == raw / "labelsTr" / f"{case.name}.nii.gz"
        labels = read_labels(case.labels).array
        assert np.array_equal(labels > 0, read_labels(tmp_path / f"l{number}.nii.gz").array == 7)
        assert labels.max() == 1
    (split,) = json.loads((raw / "splits_final.json").read_text(encoding="utf-8"))
    for side in ("train", "val"):
        assert split[side] == [case.name for case in cases if case.split == side]
    # One of three patients, with both scans.
    held_out = read_case_table(tmp_path / "data" / "held_out.csv")
    assert [case.name for case in held_out] == split["val"]
    assert len({case.patient for case in held_out}) == 1
    assert len(split["val"]) == 2
    assert data["held_out"] == [[str(path) for path in case.images(2)] for case in held_out]
    description = json.loads((raw / "dataset.json").read_text(encoding="utf-8"))
    assert description["labels"] == {"background": 0, "spot": 1}
    assert description["channel_names"] == {"0": "MR0", "1": "MR1"}
    assert description["numTraining"] == 6


@pytest.mark.parametrize("minutes", [0.5, 5, 40])
def test_as_many_steps_as_fit(minutes: float) -> None:
    steps = runs.steps_within(minutes, 12.0, 0.7)
    assert 12.0 + steps * 0.7 <= 60 * minutes < 12.0 + (steps + 1) * 0.7
    with pytest.raises(UserError, match="no step fits"):
        runs.steps_within(minutes, 60 * minutes, 0.7)


def cost_s(length: runs.Epochs, timed: dict[str, float]) -> float:
    iterations_s = length.iterations * timed["iteration_s"]
    validations_s = length.validations * timed["validation_s"]
    return timed["start_s"] + length.epochs * (iterations_s + validations_s + timed["epoch_s"])


@pytest.mark.parametrize(("minutes", "timed"), list(itertools.product([5, 10, 40, 120], TIMED)))
def test_epochs_use_the_minutes_and_cost_few_iterations(
    minutes: float, timed: dict[str, float]
) -> None:
    length = runs.epochs_within(minutes, timed)
    budget_s = 60 * minutes
    assert cost_s(length, timed) <= budget_s
    assert 1 <= length.epochs <= 20
    assert length.validations == math.ceil(length.iterations / 5)
    # All in one epoch, which leaves most time for iterations.
    most = runs.iterations_within(budget_s - timed["start_s"], timed)
    assert 0.95 * most <= length.epochs * length.iterations <= most
    # One more epoch of the same kind would be late, or the schedule has as many as it may.
    longer = length._replace(epochs=length.epochs + 1)
    assert length.epochs == 20 or cost_s(longer, timed) > budget_s


def test_a_budget_below_one_iteration_of_nnunet_is_refused() -> None:
    *_, slow = TIMED
    assert runs.epochs_within(2.5, slow) == runs.Epochs(1, 1, 1)
    with pytest.raises(UserError, match="no iteration of nnU-Net fits"):
        runs.epochs_within(2.3, slow)


# A program that waits for another one.
BUSY_CHILD = """
import time
held = b"x" * 60_000_000
begin_s = time.process_time()
while time.process_time() - begin_s < 0.6: pass
"""
BUSY = f"""
import subprocess, sys, time
subprocess.run([sys.executable, "-c", {BUSY_CHILD!r}], check=True)
begin_s = time.process_time()
while time.process_time() - begin_s < 0.3: pass
"""


@pytest.mark.slow
def test_costs_are_those_of_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "SAMPLED_S", 0.02)
    command = [sys.executable, "-c", BUSY]
    costs = runs.run_measured(command, tmp_path / "log", dict(os.environ))
    assert 0.9 <= costs["cpu_s"] < 5
    # The memory of the child, with two interpreters.
    assert 60e6 / 2**30 < costs["peak_gib"] < 0.2


def test_a_program_that_fails_tells_its_last_lines(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; print('the reason'); sys.exit(3)"]
    with pytest.raises(RuntimeError, match=r"exit code 3:\nthe reason"):
        runs.run_measured(command, tmp_path / "log", dict(os.environ))


def test_a_stop_ends_the_program_with_its_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\n"
        "time.sleep(60)\n"
    )
    wait = runs.time.sleep

    def stop(seconds: float) -> None:
        wait(0.02)
        if (tmp_path / "pid").is_file() and (tmp_path / "pid").read_text(encoding="utf-8"):
            raise KeyboardInterrupt

    monkeypatch.setattr(runs.time, "sleep", stop)
    with pytest.raises(KeyboardInterrupt):
        runs.run_measured([sys.executable, "-c", code], tmp_path / "log", dict(os.environ))
    pid = int((tmp_path / "pid").read_text(encoding="utf-8"))
    for _ in range(200):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return
        wait(0.02)
    pytest.fail("the worker still runs")


def test_the_time_of_a_step_counts_its_samples_and_the_rest_is_fixed(tmp_path: Path) -> None:
    lines = []
    # On a busy machine a step takes longer, and gets less of the processor.
    for seconds, percent in ((9.0, 100.0), (0.5, 150.0), (1.0, 75.0), (0.6, 150.0), (None, None)):
        lines.append({"seconds_per_step": seconds, "cpu_percent": percent})
    write_csv(tmp_path / "fine" / "timed" / "history.csv", lines)
    own = runs.MedsegRuns(study_in(tmp_path), tmp_path, 5)
    fixed_s, step_s = own.costs("fine", 40.0)
    assert step_s == pytest.approx(0.5 * 1.5)
    assert fixed_s == pytest.approx(40.0 - 24 * 0.75)
    assert own.costs("fine", 1.0)[0] == 0


@pytest.mark.parametrize("stages", [["single"], ["coarse", "fine"]])
def test_the_stages_that_configure_chooses_share_the_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stages: list[str]
) -> None:
    commands: list[tuple[str, ...]] = []

    def run(own: runs.MedsegRuns, command: str, *arguments: str) -> dict[str, float]:
        """Write what the commands write; a step takes 0.5 s, the rest of a training 8 s."""
        commands.append((command, *arguments))
        if command == "configure":
            setting = {"spacing_mm": [3, 2, 2], "patch_size": [8, 16, 16], "batch_size": 1}
            settings = [{**setting, "stage": stage, "steps": 100} for stage in stages]
            costs = {"stages": [{"step_s": 1.0}, {"step_s": 3.0}][-len(stages) :]}
            (tmp_path / "plan").mkdir()
            text = json.dumps({"settings": settings, "costs": costs})
            (tmp_path / "plan" / "configure.json").write_text(text, encoding="utf-8")
        cpu_s = 60.0
        if command == "train":
            (run_dir,) = (Path(word[14:]) for word in arguments if word.startswith("hydra.run.dir"))
            line = {"seconds_per_step": 0.5, "cpu_percent": 100.0}
            write_csv(run_dir / "history.csv", [line, line, line])
            (steps,) = (int(word[6:]) for word in arguments if word.startswith("steps="))
            cpu_s = 8.0 + 0.5 * steps
        return {"cpu_s": cpu_s, "peak_gib": 0.1 * len(commands)}

    monkeypatch.setattr(runs.MedsegRuns, "_run", run)
    row = runs.MedsegRuns(study_in(tmp_path), tmp_path, 10).point()
    # 10 minutes for one stage; or 2.5 and 7.5 minutes, as `configure` has divided its hours.
    steps = [1184] if stages == ["single"] else [284, 884]
    assert row["iterations"] == " + ".join(map(str, steps))
    assert row["cpu_minutes"] == pytest.approx(10)
    assert row["spacing_mm"] == " + ".join(["3×2×2"] * len(stages))
    trainings = [command for command in commands if command[0] == "train"]
    files = ["experiment"] if stages == ["single"] else stages
    for training, file in zip(trainings[1::2], files, strict=True):
        assert f"experiment={tmp_path / 'plan' / file}.yaml" in training
    *_, prediction = commands
    for stage in stages:
        checkpoint = tmp_path / stage / "run" / "checkpoints" / "last.ckpt"
        assert f"{stage}={checkpoint}" in prediction
    (prepare,) = (command for command in commands if command[0] == "prepare")
    assert ("~spacing@spacings.coarse" in prepare) == (stages == ["single"])


def study_in(folder: Path) -> runs.Study:
    return runs.Study(folder, "toy", [], 1, 2.0, sys.executable, "nnUNetTrainer", "3d_fullres")


def jobs_of(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "jobs").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture
def fake_nnunet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of the jobs that stand for those of nnU-Net."""
    folder = tmp_path / "fake"
    folder.mkdir()
    (folder / "jobs.py").write_text(FAKE_JOBS, encoding="utf-8")
    monkeypatch.setattr(runs, "JOBS", folder / "jobs.py")
    monkeypatch.setattr(runs, "SAMPLED_S", 0.02)
    return folder


@pytest.mark.slow
def test_parts_are_not_repeated_and_points_of_all_commands_are_in_the_table(
    tmp_path: Path, fake_nnunet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "held_out_dices", lambda *_: [0.5, 0.9])
    output = tmp_path / "out"
    arguments = [
        f"output={output}",
        f"cases={write_table(tmp_path)}",
        f"nnunet={sys.executable}",
    ]

    def run(*more: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["learning_curves", *arguments, *more])
        before = len(jobs_of(fake_nnunet)) if (fake_nnunet / "jobs").is_file() else 0
        app.main()
        return [job["name"] for job in jobs_of(fake_nnunet)[before:]]

    first = run("minutes=10,5", "programs=nnunet_fit")
    assert first == ["plan", "time", "train", "predict", "train", "predict"]
    assert run("minutes=5,10", "programs=nnunet_fit") == []
    # A part that was stopped left a folder and no facts.
    (output / "nnunet_fit" / "5" / "point.json").unlink()
    (output / "nnunet_fit" / "5" / "predicted.json").unlink()
    assert run("minutes=5,10,20", "programs=nnunet_fit") == ["predict", "train", "predict"]
    assert run("minutes=5", "programs=nnunet") == ["plan", "time", "train", "predict"]
    rows = read_csv(output / "learning_curves.csv")
    points = [(row["program"], row["minutes"]) for row in rows]
    fitted = [("nnunet_fit", minutes) for minutes in ("5", "10", "20")]
    assert points == [*fitted, ("nnunet", "5")]
    assert (rows[0]["dice"], rows[0]["least_dice"]) == ("0.7000", "0.5000")
    assert (rows[0]["patch_size"], rows[0]["spacing_mm"]) == ("8×16×16", "3×2.5×2.5")
    png = (output / "learning_curves.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    for job in jobs_of(fake_nnunet):
        assert not job["has_pythonpath"]
        assert Path(job["nnUNet_raw"], job["dataset"], "dataset.json").is_file()
    plans = [job for job in jobs_of(fake_nnunet) if job["name"] == "plan"]
    assert [plan["gpu_memory_target"] for plan in plans] == [2.0, None]
    trainings = [job for job in jobs_of(fake_nnunet) if job["name"] == "train"]
    expected = runs.epochs_within(5, TIMED[0])
    assert [trainings[0][key] for key in expected._fields] == list(expected)
    with pytest.raises(SystemExit):
        run("threads=2", "programs=nnunet")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"programs": "medseg,monai"}, "programs=monai: expected some of medseg, nnunet_fit"),
        ({"programs": "nnunet"}, "nnunet=<python> is missing"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path: Path, changed: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        app.read_study(tmp_path, {**app.DEFAULTS, "cases": "cases.csv", **changed})
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.skipif("NNUNET_ENV" not in os.environ, reason="NNUNET_ENV names no environment")
def test_all_programs_train_and_are_scored(
    tmp_path: Path, tiny_table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NNUNET_ENV: Python of an environment with nnU-Net."""
    (tmp_path / "task.yaml").write_text(
        "{name: sides, labels: {left_lung: 1, right_lung: 2}, regions: null, "
        "channels: [{modality: ct, window_hu: [-1000, 400]}]}",
        encoding="utf-8",
    )
    arguments = [
        f"output={tmp_path / 'out'}",
        f"cases={tiny_table}",
        f"task={tmp_path / 'task.yaml'}",
        f"nnunet={os.environ['NNUNET_ENV']}",
        "minutes=0.6",
        "trainer=nnUNetTrainerNoMirroring",
    ]
    monkeypatch.setattr(sys, "argv", ["learning_curves", *arguments])
    app.main()
    rows = read_csv(tmp_path / "out" / "learning_curves.csv")
    assert [row["program"] for row in rows] == list(app.PROGRAMS)
    for row in rows:
        assert 0.2 < float(row["cpu_minutes"]) < 1.2
        assert 0 <= float(row["least_dice"]) <= float(row["dice"]) <= 1
        assert 0.2 < float(row["peak_gib"]) < 6
        assert int(row["iterations"]) > 5
