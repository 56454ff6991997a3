"""Pilot: the costs that it derives from stubbed commands with known files and durations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from medseg.data.audit.table import READY
from medseg.data.case_table import Case
from medseg.data.options import StageName
from medseg.errors import UserError
from medseg.io.tables import write_csv
from medseg.studies.configure import pilot as module
from medseg.studies.configure.fingerprint import CaseFacts, Fingerprint, LabelFacts
from medseg.studies.configure.pilot import Pilot, pick_cases
from medseg.studies.configure.setting import Setting
from medseg.studies.configure.times import Costs
from medseg.task import Channel, LabelValues, Region, Task

GIB = 2**30
# Seconds of the stubbed commands, of which a prediction needs 5 for its case.
PREPARE_S, TRAIN_S, PREDICT_S, CASE_S, SCORE_S, STEP_S = 3.0, 20.0, 8.0, 5.0, 7.0, 0.5
# Seconds of the stubbed validation of a training.
VALIDATION_S = 4.0


class Machine:
    """Stub of the commands: each writes the files that the pilot reads, and advances a clock."""

    def __init__(self, folder: Path, training_gib: float, prediction_gib: float) -> None:
        self.folder = folder
        self.training_gib = training_gib
        self.prediction_gib = prediction_gib
        self.now_s = 100.0
        # Message of the failed prediction; "" if it succeeds.
        self.failure = ""
        self.predict_step: list[str] = []

    def prepare(self, cases: Any, *_: object) -> Any:
        self.now_s += PREPARE_S
        return [(SimpleNamespace(status=READY, case=case), values) for case, values in cases]

    def run(self, step: list[str]) -> str:
        if step[0] == "train":
            self.now_s += TRAIN_S
            (run_argument,) = [part for part in step if part.startswith("hydra.run.dir=")]
            run_dir = Path(run_argument.partition("=")[2])
            run_dir.mkdir(parents=True)
            # The steps of the first line also load and compile.
            rows: list[dict[str, Any]] = []
            for number, seconds in enumerate([9.0, 0.9 * STEP_S, STEP_S, STEP_S], start=1):
                row = {"step": number, "seconds_per_step": seconds, "cpu_percent": 100.0}
                rows.append(row)
            steps_s = sum(row["seconds_per_step"] for row in rows)
            rows.append({"step": 4})
            write_csv(run_dir / "history.csv", rows)
            summary = {
                "peak_resident_mib": 1024 * self.training_gib,
                "train_s": steps_s + VALIDATION_S,
            }
            (run_dir / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
        elif step[0] == "predict":
            self.now_s += PREDICT_S
            predictions = self.folder / "predictions"
            predictions.mkdir(parents=True)
            self.predict_step = step
            if self.failure:
                row = {"case": "large", "status": "failed", "warnings": self.failure}
                write_csv(predictions / "summary.csv", [row])
                return ""
            report = {
                "durations_s": {"total": CASE_S, "localise": 1.0, "refine_a": 2.0, "refine_b": 1.5},
                "peak_resident_bytes": self.prediction_gib * GIB,
            }
            (predictions / "large.json").write_text(json.dumps(report), encoding="utf-8")
        else:
            self.now_s += SCORE_S
        return ""


SETTING = Setting(StageName.single, (1.0, 1.0, 1.0), (32, 32, 32), "unet", "default")


def measure(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    machine: Machine,
    settings: Sequence[Setting] = (SETTING,),
) -> Costs:
    """Measure a pilot of three cases: one of 8 litres and 800 voxels, two of 1 litre and 100."""
    cases: list[tuple[Case, LabelValues]] = []
    facts = []
    for name, side_mm, num_voxels, crop_mm in (
        ("large", 200, 800, (30.0, 30.0, 30.0)),
        ("small", 100, 100, (30.0, 30.0, 80.0)),
        ("third", 100, 100, (30.0, 30.0, 80.0)),
    ):
        image = folder.parent / f"{name}.nii.gz"
        cases.append((Case(name=name, image=image, labels=image, patient=name), {}))
        spacing_mm = (side_mm / num_voxels, side_mm, side_mm)
        regions = {"organ": LabelFacts(1.0, crop_mm)}
        facts.append(CaseFacts(name, (num_voxels, 1, 1), spacing_mm, 0.0, 1.0, {}, regions))
    monkeypatch.setattr(module, "prepare_cases", machine.prepare)
    monkeypatch.setattr(module, "run_and_get_failure", machine.run)
    monkeypatch.setattr(module, "experiment_text", lambda *_, **__: "")
    monkeypatch.setattr(module, "last_checkpoint", lambda run_dir: run_dir / "last.ckpt")
    monkeypatch.setattr(module, "evaluate_step", lambda *_: ["evaluate"])
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: machine.now_s))
    pilot = Pilot(
        folder=folder,
        cases=cases,
        fingerprint=Fingerprint(tuple(facts)),
        task=Task("organ", {"organ": 1}, (Region("organ", ("organ",)),), (Channel(),)),
        plain_task={},
        label_values={},
        arguments=["trusted_targets=[mine.]", "seed=1"],
        timed_steps=20,
        is_on_processor=True,
    )
    return pilot.measure(settings)


def test_each_part_is_timed_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path / "pilot", training_gib=1.5, prediction_gib=1.0)
    costs = measure(tmp_path / "pilot", monkeypatch, machine)
    (stage,) = costs.stages
    assert stage.step_s == STEP_S
    # All three cases were prepared: the largest, and those of other patients.
    assert costs.prepare_s == PREPARE_S
    assert stage.start_s == TRAIN_S - 20 * STEP_S
    assert costs.predict_start_s == PREDICT_S - CASE_S
    # The mean case has (8 + 1 + 1) / 3 litres, the predicted case 8.
    share = 10 / 3 / 8
    assert costs.case_s == pytest.approx(share * CASE_S)
    assert costs.score_s == pytest.approx(share * (SCORE_S - costs.predict_start_s))


def test_a_cascade_is_timed_by_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path / "pilot", training_gib=1.5, prediction_gib=1.0)
    settings = [replace(SETTING, stage=stage) for stage in (StageName.coarse, StageName.fine)]
    costs = measure(tmp_path / "pilot", monkeypatch, machine, settings)
    # The steps were timed on two cases of 1 litre, and the mean case has (8 + 1 + 1) / 3; patches
    # of crops are as large in all cases.
    assert [stage.step_s for stage in costs.stages] == [pytest.approx(10 / 3 * STEP_S), STEP_S]
    # The cases are prepared at both spacings.
    assert costs.prepare_s == 2 * PREPARE_S
    checkpoints = [part for part in machine.predict_step if part.endswith("last.ckpt")]
    folder = tmp_path / "pilot"
    assert checkpoints == [f"{name}={folder / name / 'last.ckpt'}" for name in ("coarse", "fine")]
    # The crops that an untrained coarse stage finds (2 and 1.5 s) mean nothing: the time of the
    # crops is that of the fine stage's validation, which is shorter than that of a mean case: with
    # their margins, the crops have 50 x 50 x 50 and twice 50 x 50 x 100 mm.
    crops = VALIDATION_S * (50 + 100 + 100) / 3 / 50
    share = 10 / 3 / 8
    assert costs.case_s == pytest.approx(share * (CASE_S - 2.0 - 1.5) + crops)
    # Nor does the memory of that prediction.
    assert (costs.predict_peak_gib, costs.peak_gib) == (0.0, 1.5)


def test_a_cascade_is_timed_on_cases_that_have_a_region(tmp_path: Path) -> None:
    facts = []
    cases: list[tuple[Case, LabelValues]] = []
    for number in range(6):
        name = f"p{number}"
        regions = {"organ": LabelFacts(1.0, (9.0, 9.0, 9.0))} if number in (1, 4, 5) else {}
        # The first case has the largest field of view, and no region.
        shape = (100 - number, 10, 10)
        facts.append(CaseFacts(name, shape, (1.0, 1.0, 1.0), 0.0, 1.0, regions, regions))
        image = tmp_path / f"{name}.nii.gz"
        cases.append((Case(name=name, image=image, labels=image, patient=name), {}))

    def picked(*, need_regions: bool) -> tuple[str, list[str]]:
        largest, others = pick_cases(cases, Fingerprint(tuple(facts)), need_regions=need_regions)
        return largest[0].name, [case.name for case, _ in others]

    assert picked(need_regions=False) == ("p0", ["p1", "p2", "p3"])
    assert picked(need_regions=True) == ("p1", ["p4", "p5", "p0"])


@pytest.mark.parametrize(("training_gib", "prediction_gib"), [(1.5, 1.0), (1.0, 1.5)])
def test_the_larger_peak_of_training_and_prediction_counts(
    training_gib: float,
    prediction_gib: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(tmp_path / "pilot", training_gib, prediction_gib)
    assert measure(tmp_path / "pilot", monkeypatch, machine).peak_gib == 1.5


def test_a_largest_case_that_cannot_be_predicted_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`predict` then fails for this case alone, and `evaluate` would only miss its prediction."""
    machine = Machine(tmp_path / "pilot", training_gib=1.0, prediction_gib=1.0)
    machine.failure = "out of memory; free some"
    with pytest.raises(UserError, match="large: the largest case cannot be predicted: out of mem"):
        measure(tmp_path / "pilot", monkeypatch, machine)
    assert machine.predict_step[-1] == "trusted_targets=[mine.]"
