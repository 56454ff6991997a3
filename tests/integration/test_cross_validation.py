"""Cross-validation of a task of one stage by an experiment of one's own, as a user types it."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from medseg.data.case_table import Case, read_case_table, write_case_table

EXPERIMENT = """# @package _global_
defaults:
  - override /stage: single
  - override /task: heart
  - override /model: unet_lean
model: {width: 4}
spacing: {target_spacing_mm: [10.0, 10.0, 10.0]}
stage: {patch_size: [32, 32, 32], validate_every: 4}
steps: 4
"""
# The stages of a cascade, which a task of one stage has nothing to do with.
FOREIGN_WORDS = ("coarse", "fine")
TEXTS = (".md", ".csv", ".json", ".tex")
# A comment of the viewer's library, by others.
LIBRARY_COMMENT = b"(coarse vs fine)"


PHANTOMS = "phantom scene=organs task=heart num_train=3 num_val=1 num_test=0 output=scans"
STUDY = (
    "cross_validate --config-dir mine experiment=small data.cases=cases.csv num_folds=2 "
    "data.num_workers=0 trainer.accelerator=cpu trainer.threads=1 logger=none"
)


def run_medseg(folder: Path, line: str) -> str:
    """Run a command of medseg in a folder; returns what it prints."""
    command = [sys.executable, "-m", "medseg.commands.cli", *line.split()]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, encoding="utf-8", errors="replace"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def write_inputs(folder: Path) -> list[Case]:
    """Write the case table of the phantoms without its split, and the experiment."""
    cases = read_case_table(folder / "scans" / "table.csv")
    write_case_table(folder / "cases.csv", [replace(case, split=None) for case in cases])
    (folder / "mine" / "experiment").mkdir(parents=True)
    (folder / "mine" / "experiment" / "small.yaml").write_text(EXPERIMENT, encoding="utf-8")
    return cases


@pytest.mark.slow
def test_one_stage_from_folds_to_a_model(tmp_path: Path) -> None:
    medseg = partial(run_medseg, tmp_path)
    medseg(PHANTOMS)
    cases = write_inputs(tmp_path)
    first = medseg(STUDY)
    folds = tmp_path / "folds"
    assert first.count("$ medseg train --config-dir") == 2
    with (folds / "folds.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sorted(row["case"] for row in rows) == sorted(case.name for case in cases)
    assert {row["fold"] for row in rows} == {"0", "1"}
    assert "| heart | reference | 4 | 4 |" in (folds / "pooled.md").read_text(encoding="utf-8")
    # Started again, it trains nothing and finds the same.
    pooled = (folds / "pooled.csv").read_bytes()
    second = medseg(STUDY)
    assert "$ medseg train" not in second
    assert (folds / "pooled.csv").read_bytes() == pooled
    # Each fold of the model folder gives the held-out prediction of that fold.
    scan = next(row["case"] for row in rows if row["fold"] == "1")
    line = f"predict input=scans/{scan}/image.nii.gz output=again weights=folds/model folds=1"
    third = medseg(line)
    again = json.loads((tmp_path / "again" / "image.json").read_text(encoding="utf-8"))
    held_out = json.loads((folds / "predictions" / f"{scan}.json").read_text(encoding="utf-8"))
    assert again["volume_ml"] == held_out["volume_ml"]
    texts = {"the messages": first + second + third}
    for path in [*folds.rglob("*"), *(tmp_path / "again").rglob("*")]:
        if path.suffix in TEXTS and path.name != "versions.json":
            texts[str(path)] = path.read_text(encoding="utf-8")
        if path.is_file():
            content = path.read_bytes().replace(LIBRARY_COMMENT, b"").lower()
            assert b"coarse" not in content, path
    for place, text in texts.items():
        assert not [word for word in FOREIGN_WORDS if word in text.lower()], place
    # The folder says what was chosen, and how; four patients are too few to choose anything.
    clean_up = (folds / "model" / "clean_up.md").read_text(encoding="utf-8")
    assert "With so few nothing can be taken" in clean_up
    card = (folds / "model" / "README.md").read_text(encoding="utf-8")
    assert clean_up in card
    assert "4 scans of 4 patients in 2 folds" in card
    with (folds / "model" / "clean_up.csv").open(encoding="utf-8") as file:
        candidates = list(csv.DictReader(file))
    assert {row["patients"] for row in candidates} == {"4"}


@pytest.mark.slow
def test_a_study_killed_six_times_ends_as_if_it_had_run_through(tmp_path: Path) -> None:
    run_medseg(tmp_path, PHANTOMS)
    write_inputs(tmp_path)
    run_medseg(tmp_path, STUDY + " output=whole")
    script = Path(__file__).with_name("killed_study.py")
    line = [sys.executable, str(script), "1", *STUDY.split()]
    done = subprocess.run(
        [*line, "output=killed"], cwd=tmp_path, capture_output=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout.count("---- ended with -9") == 6, "each was killed before its end"
    # The checksums are those of the networks: bit by bit.
    for name in ("pooled.csv", "metrics.csv", "model/clean_up.csv", "model/SHA256SUMS"):
        killed = (tmp_path / "killed" / name).read_bytes()
        assert killed == (tmp_path / "whole" / name).read_bytes(), name
    assert "resume=killed/fold_0/single" in done.stdout
    # A training that has told its checkpoint is finished: no later start names its folder.
    for fold in ("fold_0", "fold_1"):
        _, _, later = done.stdout.partition(f"checkpoint: {tmp_path}/killed/{fold}/single/")
        assert later, fold
        assert f"hydra.run.dir=killed/{fold}/single" not in later, fold
