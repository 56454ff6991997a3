"""Made run folders with real configurations and invented curves, without training."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hydra
import numpy as np
from omegaconf import OmegaConf

from medseg.conf_folder import conf_dir
from medseg.evaluation.scoring import evaluate_folder
from medseg.geometry.grid import VoxelGrid
from medseg.io.tables import write_csv
from medseg.io.write import write_image, write_labels
from medseg.report.overlay import overlay_montage
from medseg.task import Channel, Region, Task

STEPS = 400


def make_run(
    run_dir: Path,
    overrides: Mapping[str, str],
    dice: float,
    *,
    status: str = "finished",
    message: str = "",
    peak_gib: float = 1.0,
    step_s: float = 0.2,
    steps: int = STEPS,
    picture: bool = False,
) -> Path:
    """Write the folder of one job of a multirun that reached a Dice of `dice`."""
    run_dir.mkdir(parents=True)
    text = {"number": 0, "status": status, "message": message, "overrides": dict(overrides)}
    (run_dir / "job.json").write_text(json.dumps(text))
    if status == "refused":
        return run_dir
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        composed = hydra.compose(
            "train",
            [*(f"{key}={value}" for key, value in overrides.items()), f"run_dir='{run_dir}'"],
        )
    (run_dir / "config.yaml").write_text(OmegaConf.to_yaml(composed, resolve=True))
    with (run_dir / "history.csv").open("w", newline="") as file:
        writer = csv.DictWriter(
            file,
            ("step", "loss", "lr", "val_dice", "val_dice_worst", "seconds_per_step", "peak_gib"),
        )
        writer.writeheader()
        for step in range(20, steps + 1, 20):
            done = 1 - math.exp(-3.0 * step / STEPS)
            wave = 0.01 * math.sin(step * (1 + dice))
            writer.writerow(
                {
                    "step": step,
                    "loss": round(1.6 * (1 - dice * done) + wave, 5),
                    "seconds_per_step": step_s,
                    "peak_gib": peak_gib,
                }
            )
            if step % 40 == 0:
                val = dice if step == STEPS else dice * done
                writer.writerow(
                    {
                        "step": step,
                        "val_dice": round(val, 5),
                        "val_dice_worst": round(val - 0.05, 5),
                    }
                )
    if status == "finished":
        summary: dict[str, Any] = {
            "status": "finished", "steps": steps, "val_dice_best": dice, "train_s": steps * step_s,
            "peak_gib": peak_gib,
            "num_parameters": 1_450_000, "checkpoint": str(run_dir / "checkpoints" / "best.ckpt"),
        }  # fmt: skip
        (run_dir / "summary.json").write_text(json.dumps(summary))
    name = f"step_{steps:06d}_0.png"
    if picture:
        draw(run_dir / "pictures" / name, dice)
    scores = [
        {
            "step": steps,
            "case": case,
            "label": label,
            "dice": dice + shift,
            "picture": name if picture and case == "Doe, John" else "",
        }
        for case, shift in (("Doe, John", -0.02), ("b <2>", 0.005), ("c", 0.015))
        for label in ("left_lung", "right_lung")
    ]
    write_csv(run_dir / "validation.csv", scores)
    return run_dir


def draw(path: Path, dice: float) -> None:
    """An overlay of two balls in noise; the prediction is as wrong as its Dice says."""
    shape = (30, 60, 70)
    z, y, x = np.mgrid[: shape[0], : shape[1], : shape[2]]
    rng = np.random.default_rng(0)
    target, pred = np.zeros(shape, np.uint8), np.zeros(shape, np.uint8)
    for value, centre in ((1, 52), (2, 18)):
        distance = np.hypot(np.hypot(2 * (z - 15), y - 30), x - centre)
        target[distance < 14] = value
        pred[distance < 14 * dice] = value
    image_hu = np.where(target > 0, -800, 40) + rng.normal(0, 60, shape)
    grid = VoxelGrid(shape, (8.0, 4.0, 4.0), (0.0, 0.0, 0.0))
    overlay_montage(
        image_hu,
        pred,
        target,
        grid.spacing_mm,
        path,
        path.stem,
        label_names={1: "left_lung", 2: "right_lung"},
    )


def make_sweep(folder: Path, *, pictures: bool = True) -> Path:
    """Three memory settings × two learning rates × two seeds, four of them without a result."""
    memories = {"plain": (2.1, 0.31), "amp": (1.24, 0.22), "checkpoint": (0.97, 0.4)}
    number = 0
    for memory, (peak_gib, step_s) in memories.items():
        for lr in ("0.005", "0.0005"):
            for seed in ("1", "2"):
                overrides = {
                    "stage": "coarse",
                    "memory": memory,
                    "optimizer.lr": lr,
                    "seed": seed,
                    "steps": str(STEPS),
                }
                dice = (
                    0.93 + 0.04 * (lr == "0.005") + 0.004 * (memory == "plain") - 0.003 * int(seed)
                )
                more: dict[str, Any] = {"picture": pictures}
                if (memory, lr, seed) == ("plain", "0.0005", "2"):
                    more = {
                        "status": "out_of_memory",
                        "message": "CUDA out of memory. Tried to allocate 2.00 GiB <of 4.00>",
                        "steps": 80,
                    }
                if (memory, lr, seed) == ("checkpoint", "0.0005", "1"):
                    more = {
                        "status": "not_finite",
                        "message": "the loss is nan at step 121",
                        "steps": 120,
                    }
                make_run(
                    folder / str(number), overrides, dice, peak_gib=peak_gib, step_s=step_s, **more
                )
                number += 1
    asked = {
        "stage": "coarse",
        "memory": "amp",
        "optimizer.lr": "0.005",
        "seed": "1",
        "steps": str(STEPS),
    }
    refused = (
        "stage.batch_size=1 cannot be divided among 1 rank(s) × memory.accumulate=2; choose a "
        "multiple of 2"
    )
    make_run(
        folder / "12", {**asked, "memory.accumulate": "2"}, 0.0, status="refused", message=refused
    )
    make_run(folder / "13", {**asked, "seed": "3"}, 0.9, status="running", steps=200)
    return folder


def make_evaluation(folder: Path) -> Path:
    """Scores of three cases, the second worse than in its baseline; returns the folder."""
    grid = VoxelGrid((16, 30, 40), (8.0, 6.0, 6.0), (0.0, 0.0, 0.0))
    lungs = {"left_lung": 1, "right_lung": 2}
    task = Task(
        "lungs",
        lungs,
        tuple(Region(name, (name,)) for name in lungs),
        (Channel(window_hu=(-1000.0, 400.0)),),
    )
    table = [
        {
            "case": f"ct_{number}",
            "image": f"ct/{number}.nii.gz",
            "labels": f"ref/ct_{number}.nii.gz",
        }
        for number in range(3)
    ]
    for number, case in enumerate(table):
        target = np.zeros(grid.shape, np.uint8)
        target[3:13, 6:24, 4:16], target[3:13, 6 : 24 - number, 24:36] = 2, 1
        write_image(folder / case["image"], np.where(target > 0, -800, 40).astype(np.int16), grid)
        write_labels(folder / case["labels"], target, grid)
        for name, shift in (("baseline", 1), ("pred", 4 if number == 1 else 0)):
            write_labels(
                folder / name / f"ct_{number}.nii.gz", np.roll(target, shift, axis=1), grid
            )
    write_csv(folder / "cases.csv", table)
    values = {value: name for name, value in lungs.items()}
    arguments: dict[str, Any] = {
        "ref": folder / "cases.csv",
        "task": task,
        "label_values": values,
        "progress": lambda line: None,
    }
    evaluate_folder(folder / "baseline", output=folder / "before", pictures=False, **arguments)
    evaluate_folder(
        folder / "pred", output=folder / "scores", baseline=folder / "before", **arguments
    )
    return folder / "scores"
