"""`configure` on phantoms as a user types it: its experiment trains, in the memory and the time."""

from __future__ import annotations

import csv
import itertools
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from medseg.data.case_table import read_case_table, write_case_table
from medseg.studies.configure.times import Costs, Schedule, StageCosts

NUM_STEPS = 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "stages"),
    [
        ("lungs", ["coarse", "fine"]),
        ("lungs", ["single"]),
        pytest.param("abdomen", ["single"], marks=pytest.mark.thorough),
    ],
)
def test_the_experiment_keeps_what_was_predicted(
    task: str, stages: list[str], tmp_path: Path
) -> None:
    def medseg(*arguments: str) -> str:
        command = [sys.executable, "-m", "medseg.commands.cli", *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, encoding="utf-8", errors="replace"
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    scene = ["scene=organs"] if task == "abdomen" else []
    medseg("phantom", f"task={task}", *scene, "num_train=4", "num_val=1", "num_test=0", "output=s")
    cases = read_case_table(tmp_path / "s" / "table.csv")
    write_case_table(tmp_path / "cases.csv", [replace(case, split=None) for case in cases])
    # Organs of phantoms are smaller than those of patients.
    data = ["data.cases=cases.csv", f"task={task}", "task.volume_ml=null"]
    data += ["trainer.accelerator=cpu", "data.num_workers=0"]
    # Hours enough for any machine; the steps are replaced below.
    wishes = ["fit_gib=1", "hours=2", "num_folds=2", f"num_stages={len(stages)}"]
    out = medseg("configure", *data, *wishes, "output=plan")
    assert out.splitlines()[-1].startswith(
        "next: medseg cross_validate experiment=plan/experiment.yaml data.cases=cases.csv "
    )
    facts = json.loads((tmp_path / "plan" / "configure.json").read_text(encoding="utf-8"))
    assert facts["total_s"] <= 2 * 3600
    assert facts["peak_gib"] <= 1.0
    start_s = time.perf_counter()
    experiment = ["experiment=plan/experiment.yaml", f"steps={NUM_STEPS}"]
    experiment += [f"stage.validate_every={NUM_STEPS}", "num_folds=2", "output=folds"]
    medseg("cross_validate", *data, *experiment)
    measured_s = time.perf_counter() - start_s
    stage_costs = tuple(StageCosts(**stage) for stage in facts["costs"]["stages"])
    schedule = Schedule(Costs(**facts["costs"] | {"stages": stage_costs}), 2, len(cases))
    assert [setting["stage"] for setting in facts["settings"]] == stages
    num_patches = [NUM_STEPS * setting["batch_size"] for setting in facts["settings"]]
    predicted_s = schedule.total_s(num_patches)
    # Generous: other programs of a test machine come and go.
    assert 0.3 < predicted_s / measured_s < 3.0
    for fold, stage in itertools.product(range(2), stages):
        summary = tmp_path / "folds" / f"fold_{fold}" / stage / "summary.json"
        run = json.loads(summary.read_text(encoding="utf-8"))
        assert run["steps"] == NUM_STEPS
        assert run["peak_resident_mib"] <= 1024
    with (tmp_path / "folds" / "folds.csv").open(encoding="utf-8") as file:
        assert {row["case"] for row in csv.DictReader(file)} == {case.name for case in cases}
