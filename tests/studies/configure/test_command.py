"""`configure` with a fake planner and pilot: the files that it writes, and its refusals."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.config.schema import ConfigureConfig
from medseg.data.case_table import read_case_table, write_case_table
from medseg.errors import UserError
from medseg.io.tables import read_csv
from medseg.studies.configure import command
from medseg.studies.configure.choose import Prediction, Wishes, choose
from medseg.studies.configure.fingerprint import CaseFacts, Fingerprint, LabelFacts
from medseg.studies.configure.setting import Setting
from medseg.studies.configure.times import PLANNED_SHARE, Costs

COSTS = Costs(0.2, 4.0, 8.0, 5.0, 2.0, 1.0, 0.75)


class FakePlanner:
    """Predicts by formulas, without a measurement of the machine."""

    def __init__(self, *_: object) -> None:
        pass

    def divisor(self, setting: Setting) -> tuple[int, int, int]:
        return 16, 16, 16

    def predict(self, setting: Setting) -> Prediction:
        voxels = setting.step_voxels
        return Prediction(0.5 + voxels * 4e-7, voxels * 1e-6)


BALL = LabelFacts(500.0, (100.0, 100.0, 100.0))
FINGERPRINT = Fingerprint(
    (CaseFacts("a", (300, 300, 300), (1.0, 1.0, 1.0), 0.0, 1.0, {"ball": BALL}),)
)


@pytest.fixture
def configure(
    tiny_table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Path]:
    """Return a function that runs the command on the tiny scans, each of another patient."""
    timed: list[Setting] = []

    def measure(pilot: command.Pilot, setting: Setting) -> Costs:
        timed.append(setting)
        voxels = setting.step_voxels
        return replace(COSTS, peak_gib=0.5 + voxels * 4e-7, step_s=voxels * 1e-6)

    monkeypatch.setattr(command, "MachinePlanner", FakePlanner)
    monkeypatch.setattr(command.Pilot, "measure", measure)
    cases = [
        replace(case, split=None, patient=f"p{number}")
        for number, case in enumerate(read_case_table(tiny_table))
    ]
    table = write_case_table(tmp_path / "cases.csv", cases)

    def run(*arguments: str, output: str = "plan") -> Path:
        keys = [f"data.cases='{table}'", f"output='{tmp_path / output}'", *arguments]
        with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
            composed = hydra.compose("configure", keys, return_hydra_config=True)
            HydraConfig.instance().set_config(composed)
            plain = OmegaConf.masked_copy(composed, [key for key in composed if key != "hydra"])
            assert command.configure(to_config(plain, ConfigureConfig)) == 0
        return tmp_path / output

    return run


WISHES = ("fit_gib=2", "hours=0.1", "num_folds=2")


def test_the_files_say_what_was_chosen_and_why(
    configure: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    plan = configure(*WISHES)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"next: medseg cross_validate experiment={plan}/experiment.yaml ")
    assert f" data.cases={plan.parent}/cases.csv num_folds=2 output={plan}/folds" in last
    assert "fit_gib" not in last
    facts = json.loads((plan / "configure.json").read_text(encoding="utf-8"))
    assert PLANNED_SHARE * 0.9 <= facts["total_s"] / 360 <= PLANNED_SHARE
    assert facts["peak_gib"] <= 2.0
    assert sum(facts["parts_s"].values()) == pytest.approx(facts["total_s"], abs=0.1)
    rows = read_csv(plan / "fingerprint.csv")
    assert len({row["case"] for row in rows}) == 4
    report = (plan / "configure.md").read_text(encoding="utf-8")
    assert "| steps | " in report
    assert not (plan / "pilot").exists()
    experiment = (plan / "experiment.yaml").read_text(encoding="utf-8")
    assert experiment.startswith("# @package _global_\n# Written by medseg configure for 2 GiB")


def test_patients_that_are_held_out_as_test_decide_nothing(configure: Callable[..., Path]) -> None:
    plan = configure(*WISHES, "data.test_patients=[p1]")
    names = {row["case"] for row in read_csv(plan / "fingerprint.csv")}
    assert len(names) == 3
    with pytest.raises(UserError, match="possible wish is num_folds=3"):
        configure("fit_gib=2", "hours=0.1", "num_folds=4", "data.test_patients=[p1]")


def test_equal_timings_give_equal_files(configure: Callable[..., Path]) -> None:
    first = configure(*WISHES, output="first")
    second = configure(*WISHES, output="second")
    for name in ("configure.json", "configure.md", "fingerprint.csv"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    text = (first / "experiment.yaml").read_text(encoding="utf-8")
    other = (second / "experiment.yaml").read_text(encoding="utf-8")
    assert text.replace("/first/", "/second/") == other


@pytest.mark.parametrize(
    ("wishes", "sentence"),
    [
        (("fit_gib=2", "hours=0.1", "num_folds=5"), "possible wish is num_folds=4"),
        (("fit_gib=0.3", "hours=0.1", "num_folds=2"), "possible wish is fit_gib=0.55"),
        (("fit_gib=2", "hours=0.01", "num_folds=2"), "possible wish is hours=0.0"),
    ],
)
def test_impossible_wishes_are_refused_with_the_nearest(
    wishes: tuple[str, ...], sentence: str, configure: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=sentence):
        configure(*wishes)
    assert not (tmp_path / "plan" / "experiment.yaml").exists()
    assert not (tmp_path / "plan" / "pilot").exists()


class WritingPlanner(FakePlanner):
    """Writes its file for each new setting, as the planner of the machine does."""

    def __init__(self, *arguments: Any) -> None:
        self.file: Path = arguments[-1]
        self.predict = functools.cache(self._predict)  # type: ignore[method-assign]

    def _predict(self, setting: Setting) -> Prediction:
        self.file.parent.mkdir(exist_ok=True)
        self.file.touch()
        return super().predict(setting)


def test_a_smaller_patch_than_predicted_leaves_no_file_of_the_planner(
    configure: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks_gib = iter([2.5, 1.0])
    monkeypatch.setattr(command, "MachinePlanner", WritingPlanner)

    def measure(_: command.Pilot, setting: Setting) -> Costs:
        return replace(COSTS, peak_gib=next(peaks_gib), step_s=setting.step_voxels * 1e-6)

    monkeypatch.setattr(command.Pilot, "measure", measure)
    monkeypatch.setattr(
        command, "with_smaller_patch", lambda setting, *_: replace(setting, patch_size=(16, 16, 16))
    )
    plan = configure(*WISHES)
    assert not list(peaks_gib), "two patches were timed"
    assert not (plan / "pilot").exists()


def test_more_memory_than_predicted_takes_a_smaller_patch() -> None:
    timed: list[Setting] = []

    class FakePilot:
        def __init__(self, gibs: list[float]) -> None:
            self.gibs = iter(gibs)

        def measure(self, setting: Setting) -> Costs:
            timed.append(setting)
            return replace(COSTS, peak_gib=next(self.gibs))

    wishes = Wishes(1.0, 1.0, 2, ("plain",))
    setting = Setting((2.0, 2.0, 2.0), (64, 64, 64), "unet", "plain")
    arguments = (setting, FINGERPRINT, wishes, FakePlanner())
    chosen, costs = command.measure_setting(*arguments, FakePilot([1.2, 1.1, 0.9]))
    assert [trial.patch_size[0] for trial in timed] == [64, 48, 32]
    assert (chosen, costs.peak_gib) == (timed[-1], 0.9)
    with pytest.raises(UserError, match=r"the smallest patch took 1.10 GiB.*fit_gib=1.16"):
        command.measure_setting(*arguments, FakePilot([1.2, 1.1, 1.1]))  # type: ignore[arg-type]


def test_a_slow_machine_gets_a_setting_for_a_part_of_the_hours() -> None:
    timed: list[Setting] = []

    class FakePilot:
        def measure(self, setting: Setting) -> Costs:
            timed.append(setting)
            predicted = FakePlanner().predict(setting).seconds
            return replace(COSTS, step_s=8 * predicted)

    wishes = Wishes(9.0, 0.8, 2, ("plain",))
    first = choose(FINGERPRINT, wishes, FakePlanner())
    arguments = (first, FINGERPRINT, wishes, FakePlanner(), FakePilot())
    chosen, costs = command.measure_setting(*arguments)  # type: ignore[arg-type]
    assert timed == [first, chosen]
    assert chosen == choose(FINGERPRINT, wishes._replace(hours=0.1), FakePlanner()) != first
    assert costs.step_s == pytest.approx(8 * FakePlanner().predict(chosen).seconds)


def test_configure_needs_cases_and_one_rank(tiny_table: Path) -> None:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        for arguments, sentence in (
            ([], "data.cases: configure decides by your scans"),
            ([f"data.cases='{tiny_table}'", "trainer=ddp"], "configure times one rank"),
        ):
            composed = hydra.compose("configure", [*WISHES, *arguments])
            with pytest.raises(UserError, match=sentence):
                to_config(composed, ConfigureConfig)
