"""Choice of a clean-up on predictions with planted errors: only steps that raise Dice are taken."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra
import numpy as np
import pytest
import torch
from scipy import ndimage, stats

from medseg.cascade.cascade import Cascade
from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.data.case_table import Case
from medseg.io.write import write_labels
from medseg.metrics.scores import dice
from medseg.phantom.scene import SceneSpec, make_scene
from medseg.prediction.load_models import load_model_folders
from medseg.runs.signature import plain
from medseg.studies.clean_up import Choice, choose_clean_up, least_patients, write_choice
from medseg.studies.command_steps import last_checkpoint
from medseg.studies.fold_model import _with_clean_up, write_model
from medseg.studies.folds import Folds
from medseg.studies.held_out import HeldOut
from medseg.studies.reference_volumes import (
    ReferenceVolume,
    measure_references,
    plausible_ranges,
)
from medseg.task import Channel, CleanUp, Region, Task
from medseg.training.assemble import make_metadata
from medseg.training.network import make_network
from medseg.training.options import TrainConfig

TASK = Task("trunk", {"liver": 1, "spleen": 2}, (), (Channel(window_hu=(-160.0, 240.0)),))
Plant = Callable[[np.ndarray, np.random.Generator], None]


def plant_nothing(labels: np.ndarray, rng: np.random.Generator) -> None:
    """Leave a prediction with errors at the surface only."""


def plant_specks(labels: np.ndarray, rng: np.random.Generator) -> None:
    """Add specks of the spleen away from all organs."""
    free = np.argwhere(ndimage.distance_transform_edt(labels == 0) > 3)
    for z, y, x in rng.permutation(free)[:25]:
        labels[z, y, x] = 2


def plant_holes(labels: np.ndarray, rng: np.random.Generator) -> None:
    """Cut holes into the liver."""
    inside = np.argwhere(ndimage.distance_transform_edt(labels == 1) > 1.5)
    for z, y, x in rng.permutation(inside)[:15]:
        labels[z, y, x] = 0


def make_held_out(
    folder: Path, num_cases: int, plant: Plant, task: Task = TASK, trust: str = "reference"
) -> HeldOut:
    """Write phantoms as references, and predictions that miss a few voxels of the surface."""
    cases = []
    for index in range(num_cases):
        images, target = make_scene(SceneSpec(7, index, TASK.labels, {}))
        rng = np.random.default_rng(index)
        pred = target.copy()
        is_edge = (target > 0) & ~ndimage.binary_erosion(target > 0)
        pred[is_edge & (rng.random(target.shape) < 0.03)] = 0
        plant(pred, rng)
        name = f"c{index}"
        labels = folder / "labels" / f"{name}.nii.gz"
        write_labels(labels, target, images[0][1])
        write_labels(folder / "predictions" / f"{name}.nii.gz", pred, images[0][1])
        part_trust = dict.fromkeys(task.parts, trust)
        cases.append(Case(name, Path("image"), labels, f"p{index}", trust=part_trust))
    return HeldOut(cases, folder / "predictions", task, {1: "liver", 2: "spleen"})


def choose(held_out: HeldOut) -> Choice:
    return choose_clean_up(held_out, measure_references(held_out))


def test_planted_specks_are_removed_and_only_they(tmp_path: Path) -> None:
    held_out = make_held_out(tmp_path, 10, plant_specks)
    choice = choose(held_out)
    (clean_up,) = choice.clean_ups
    assert clean_up.part == "spleen"
    assert clean_up.min_ml > 0 or clean_up.only_largest
    write_choice(choice, tmp_path)
    with (tmp_path / "clean_up.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    taken = [row for row in rows if row["taken"] == "yes"]
    assert [(row["part"], row["clean_up"]) for row in taken] == [("spleen", str(clean_up))]
    assert float(taken[0]["dice"]) > float(taken[0]["dice_before"])
    assert len(rows) == choice.num_tests == 8
    text = (tmp_path / "clean_up.md").read_text(encoding="utf-8")
    assert text.startswith(f"Clean-up of the model: spleen: {clean_up}.")
    assert "at least 9 patients" in text
    # Dice and p of the table are those that follow from the files, with the test of scipy.
    gains = []
    for case, pred, target, _ in held_out.pairs():
        before = dice(pred == 2, target == 2)
        gains.append(choice.dices[case.name, "spleen"] - before)
    assert np.mean(gains) == pytest.approx(float(taken[0]["dice"]) - float(taken[0]["dice_before"]))
    assert float(taken[0]["p"]) == pytest.approx(stats.wilcoxon(gains).pvalue)


def test_planted_holes_are_filled(tmp_path: Path) -> None:
    (clean_up,) = choose(make_held_out(tmp_path, 10, plant_holes)).clean_ups
    assert clean_up == CleanUp("liver", fill_holes=True)


def test_nothing_is_taken_where_nothing_is_wrong(tmp_path: Path) -> None:
    choice = choose(make_held_out(tmp_path, 10, plant_nothing))
    assert choice.clean_ups == ()
    assert choice.markdown().startswith("Clean-up of the model: none.")


def test_few_patients_establish_nothing_and_the_report_says_so(tmp_path: Path) -> None:
    choice = choose(make_held_out(tmp_path, 8, plant_specks))
    assert choice.clean_ups == ()
    assert "at least 9 patients whose Dice changes; there are 8" in choice.markdown()
    assert "With so few nothing can be taken" in choice.markdown()
    (best,) = {row["better"] for row in choice.rows if row["clean_up"].startswith("the largest")
               and row["part"] == "spleen"}  # fmt: skip
    assert best == 8, "all of them would be better"


def test_doubtful_references_decide_nothing(tmp_path: Path) -> None:
    choice = choose(make_held_out(tmp_path, 10, plant_specks, trust="approximate"))
    assert (choice.clean_ups, choice.rows) == ((), [])
    assert choice.markdown().startswith("No clean-up")


def test_scans_of_one_patient_count_once(tmp_path: Path) -> None:
    held_out = make_held_out(tmp_path, 10, plant_specks)
    cases = [replace(case, patient=f"p{index // 2}") for index, case in enumerate(held_out.cases)]
    choice = choose(replace(held_out, cases=cases))
    assert choice.clean_ups == ()
    assert {row["patients"] for row in choice.rows} == {5}


def test_a_region_of_several_labels_loses_specks_and_keeps_holes(tmp_path: Path) -> None:
    task = replace(TASK, regions=(Region("trunk", ("liver", "spleen")),))
    choice = choose(make_held_out(tmp_path, 10, plant_specks, task))
    (clean_up,) = choice.clean_ups
    assert (clean_up.part, clean_up.fill_holes) == ("trunk", False)
    assert choice.num_tests == 3


def test_steps_that_lower_a_mean_together_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def everything_gets_worse(*_: object) -> tuple[dict[tuple[str, str], float], list[str]]:
        return {}, ["liver"]

    monkeypatch.setattr("medseg.studies.clean_up._check_together", everything_gets_worse)
    choice = choose(make_held_out(tmp_path, 10, plant_specks))
    assert choice.clean_ups == ()
    assert not any(row["taken"] for row in choice.rows)
    assert "All chosen steps together lower the Dice of liver: none was taken." in choice.markdown()


@pytest.mark.parametrize("level", [0.05, 0.01, 0.05 / 60])
def test_the_fewest_patients_are_those_of_the_exact_test(level: float) -> None:
    least = least_patients(level)
    rises = np.arange(1.0, 1.0 + least)
    assert stats.wilcoxon(rises).pvalue <= level < stats.wilcoxon(rises[:-1]).pvalue


def test_plausible_volumes_are_a_prediction_interval() -> None:
    """The range of 8 patients holds 99 % of new patients, if the volumes are log-normal."""
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(2000):
        logs = rng.normal(6.0, 0.3, 9)
        volumes = [
            ReferenceVolume(f"c{n}", f"p{n}", "liver", float(np.exp(value)), is_cut=False)
            for n, value in enumerate(logs[:-1])
        ]
        low, high = plausible_ranges(volumes)["liver"]
        covered += low <= np.exp(logs[-1]) <= high
    assert covered / 2000 == pytest.approx(0.99, abs=0.006)


def test_cut_organs_and_few_patients_give_no_range() -> None:
    volumes = [ReferenceVolume(f"c{n}", f"p{n}", "liver", 100.0 + n, False) for n in range(5)]
    low, high = plausible_ranges(volumes)["liver"]
    assert low < 100 < 104 < high
    assert plausible_ranges(volumes[:4]) == {}
    cut = [replace(volume, volume_ml=1.0, is_cut=True) for volume in volumes]
    assert plausible_ranges([*volumes, *cut]) == {"liver": (low, high)}
    assert plausible_ranges([replace(volume, patient="p") for volume in volumes]) == {}


def test_the_volumes_of_references_are_measured(tmp_path: Path) -> None:
    held_out = make_held_out(tmp_path, 2, plant_nothing)
    volumes = measure_references(held_out)
    assert [(volume.case, volume.part) for volume in volumes] == [
        ("c0", "liver"), ("c0", "spleen"), ("c1", "liver"), ("c1", "spleen"),
    ]  # fmt: skip
    (_, _, target, grid), _ = held_out.pairs()
    expected_ml = np.count_nonzero(target == 1) * np.prod(grid.spacing_mm) / 1000
    assert volumes[0].volume_ml == pytest.approx(expected_ml)
    assert not any(volume.is_cut for volume in volumes)


def write_checkpoint(path: Path, task: Task) -> None:
    """Write the checkpoint of a tiny network of one stage, as a run does."""
    overrides = ["stage=single", "task=kidneys", "model=unet_lean", "model.width=4", "run_dir=x"]
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = to_config(hydra.compose("train", overrides), TrainConfig)
    metadata = {**make_metadata(config, plain(config)), "task": task.to_dict()}
    state = make_network(config).state_dict()
    path.parent.mkdir(parents=True)
    state_dict = {f"network.{name}": value for name, value in state.items()}
    torch.save({"medseg": metadata, "state_dict": state_dict}, path)


def test_a_model_folder_holds_what_was_chosen(tmp_path: Path) -> None:
    task = replace(TASK, volume_ml={"liver": (1.0, 9000.0)})
    held_out = make_held_out(tmp_path, 10, plant_specks, task)
    folds = Folds([tmp_path / "fold_0", tmp_path / "fold_1"])
    folds.cases = {case.name: case for case in held_out.cases}
    for folder in folds.folders:
        write_checkpoint(last_checkpoint(folder / "single"), task)
    (tmp_path / "pooled.md").write_text("pooled scores")
    config: Any = SimpleNamespace(output=str(tmp_path))
    rows = [{"case": name} for name in folds.cases]
    labels = {1: "liver", 2: "spleen"}
    budget = ["inference.budget_gib=2.1"]
    folder = write_model(config, task, labels, folds, rows, ("single",), budget)
    model = load_model_folders([folder], accelerator="cpu")
    assert isinstance(model, Cascade)
    (clean_up,) = model.last.clean_up
    assert clean_up == choose(held_out).clean_ups[0]
    assert model.task.volume_ml["liver"] == (1.0, 9000.0), "what the task states comes first"
    low, high = model.task.volume_ml["spleen"]
    measured_ml = [
        volume.volume_ml for volume in measure_references(held_out) if volume.part == "spleen"
    ]
    assert low < min(measured_ml) < max(measured_ml) < high
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert f"Clean-up: spleen: {clean_up}." in card
    assert f"| spleen | 2 | {low:g} to {high:g} |" in card
    assert "10 scans of 10 patients in 2 folds" in card
    assert "weights=<this folder> inference.budget_gib=2.1\n" in card
    assert "pooled scores" in card
    assert "| spleen | the largest component stays | nothing | 10 |" in card


def test_the_bound_rests_on_cleaned_labels() -> None:
    rows = [{"case": case, "region": "liver", "dice": 0.5} for case in ("a", "c")]
    choice = SimpleNamespace(dices={("a", "liver"): 0.75})
    bound_rows = _with_clean_up(rows, choice)
    assert [(row["case"], row["dice"]) for row in bound_rows] == [("a", 0.75), ("c", 0.5)]
