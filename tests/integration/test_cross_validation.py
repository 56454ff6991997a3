"""Cross-validation of a task of one stage by an experiment of one's own, as a user types it."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from medseg.data.case_table import read_case_table, write_case_table

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


@pytest.mark.slow
def test_one_stage_from_folds_to_a_model(tmp_path: Path) -> None:
    def medseg(line: str) -> str:
        command = [sys.executable, "-m", "medseg.commands.cli", *line.split()]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, encoding="utf-8", errors="replace"
        )
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    medseg("phantom scene=organs task=heart num_train=3 num_val=1 num_test=0 output=scans")
    cases = read_case_table(tmp_path / "scans" / "table.csv")
    write_case_table(tmp_path / "cases.csv", [replace(case, split=None) for case in cases])
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    (tmp_path / "mine" / "experiment" / "small.yaml").write_text(EXPERIMENT)
    study = (
        "cross_validate --config-dir mine experiment=small data.cases=cases.csv num_folds=2 "
        "data.num_workers=0 trainer.accelerator=cpu trainer.threads=1 logger=none"
    )
    first = medseg(study)
    folds = tmp_path / "folds"
    assert first.count("$ medseg train --config-dir") == 2
    with (folds / "folds.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sorted(row["case"] for row in rows) == sorted(case.name for case in cases)
    assert {row["fold"] for row in rows} == {"0", "1"}
    assert "| heart | reference | 4 | 4 |" in (folds / "pooled.md").read_text(encoding="utf-8")
    # Started again, it trains nothing and finds the same.
    pooled = (folds / "pooled.csv").read_bytes()
    second = medseg(study)
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
    for path in folds.rglob("*"):
        if path.suffix in TEXTS and path.name != "versions.json":
            texts[str(path)] = path.read_text(encoding="utf-8")
    for place, text in texts.items():
        assert not [word for word in FOREIGN_WORDS if word in text.lower()], place
