"""`configure` with a fake planner and pilot: the files that it writes, and its refusals."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
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
from medseg.data.options import StageName
from medseg.errors import UserError
from medseg.io.tables import read_csv
from medseg.studies.configure import command
from medseg.studies.configure.choose import Prediction, Wishes, choose
from medseg.studies.configure.fingerprint import CaseFacts, Fingerprint, LabelFacts
from medseg.studies.configure.setting import Setting
from medseg.studies.configure.stage_views import stage_views
from medseg.studies.configure.times import PLANNED_SHARE, Costs, StageCosts

STAGE_COSTS = StageCosts(step_s=0.2, start_s=8.0, peak_gib=0.75)
COSTS = Costs(
    (STAGE_COSTS,),
    prepare_s=4.0,
    predict_start_s=5.0,
    case_s=2.0,
    score_s=1.0,
    predict_peak_gib=0.5,
)


def costs_of(
    settings: Sequence[Setting],
    peak_gib: Callable[[Setting], float] = lambda _: 0.75,
    seconds: Callable[[Setting], float] = lambda setting: setting.step_voxels * 1e-6,
) -> Costs:
    """Costs of settings by formulas for the peak memory and the seconds of a step."""
    stages = []
    for setting in settings:
        stages.append(replace(STAGE_COSTS, step_s=seconds(setting), peak_gib=peak_gib(setting)))
    return replace(COSTS, stages=tuple(stages))


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
    (CaseFacts("a", (300, 300, 300), (1.0, 1.0, 1.0), 0.0, 1.0, {"ball": BALL}, {"ball": BALL}),)
)
# Memory of a voxel in each stage, GiB.
STAGE_GIB = {StageName.coarse: 2.5e-7, StageName.fine: 5e-6}
VIEWS = stage_views(FINGERPRINT)


@pytest.fixture
def configure(
    tiny_table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Path]:
    """Return a function that runs the command on the tiny scans, each of another patient."""

    def measure(pilot: command.Pilot, settings: tuple[Setting, ...]) -> Costs:
        return costs_of(settings, lambda setting: 0.5 + setting.step_voxels * 4e-7)

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

    def measure(_: command.Pilot, settings: tuple[Setting, ...]) -> Costs:
        peak_gib = next(peaks_gib)
        return costs_of(settings, lambda _: peak_gib)

    def smaller(setting: Setting, *_: object) -> Setting:
        return replace(setting, patch_size=(16, 16, 16))

    monkeypatch.setattr(command.Pilot, "measure", measure)
    monkeypatch.setattr(command, "with_smaller_samples", smaller)
    plan = configure(*WISHES)
    assert not list(peaks_gib), "two patches were timed"
    assert not (plan / "pilot").exists()


class FakePilot:
    """Keeps the settings that are measured, and has their costs from a function."""

    def __init__(self, costs: Callable[[tuple[Setting, ...]], Costs]) -> None:
        self.timed: list[tuple[Setting, ...]] = []
        self.costs = costs

    def measure(self, settings: tuple[Setting, ...]) -> Costs:
        self.timed.append(settings)
        return self.costs(settings)


def measured(
    settings: tuple[Setting, ...], wishes: Wishes, pilot: FakePilot
) -> tuple[tuple[Setting, ...], Costs]:
    return command.measure_settings(settings, FINGERPRINT, VIEWS, wishes, FakePlanner(), pilot)  # type: ignore[arg-type]


def test_more_memory_than_predicted_takes_a_smaller_patch() -> None:
    wishes = Wishes(1.0, 1.0, 2, ("plain",))
    setting = Setting(StageName.single, (2.0, 2.0, 2.0), (64, 64, 64), "unet", "plain")

    def pilot(*gibs: float) -> FakePilot:
        peaks = iter(gibs)
        return FakePilot(lambda settings: costs_of(settings, lambda _: next(peaks)))

    falling = pilot(1.2, 1.1, 0.9)
    chosen, costs = measured((setting,), wishes, falling)
    assert [trial.patch_size[0] for (trial,) in falling.timed] == [64, 48, 32]
    assert (chosen, costs.peak_gib) == (falling.timed[-1], 0.9)
    with pytest.raises(UserError, match=r"the smallest samples took 1.10 GiB.*fit_gib=1.16"):
        measured((setting,), wishes, pilot(1.2, 1.1, 1.1))


def test_the_stage_that_takes_most_memory_gets_smaller_samples() -> None:
    wishes = Wishes(1.0, 1.0, 2, ("plain",))
    coarse = Setting(StageName.coarse, (2.0, 2.0, 2.0), (160, 160, 160), "unet", "plain")
    fine = Setting(StageName.fine, (1.0, 1.0, 1.0), (64, 64, 64), "unet", "plain")
    # By these formulas 160³ voxels of whole scans take 1.02 GiB, and 64³ of patches 1.31.
    pilot = FakePilot(
        lambda settings: costs_of(
            settings, lambda setting: setting.step_voxels * STAGE_GIB[setting.stage]
        )
    )
    chosen, costs = measured((coarse, fine), wishes, pilot)
    assert costs.peak_gib <= 1.0
    assert [settings[1].patch_size[0] for settings in pilot.timed] == [64, 48, 48]
    spacings = [settings[0].spacing_mm[0] for settings in pilot.timed]
    assert spacings[0] == spacings[1] == 2.0 < spacings[2]
    # Where the prediction takes most, its tiles become smaller: they are the patches.
    predicting = FakePilot(
        lambda settings: replace(
            costs_of(settings), predict_peak_gib=settings[-1].step_voxels * 5e-6
        )
    )
    chosen, costs = measured((coarse, fine), wishes, predicting)
    assert chosen == (coarse, replace(fine, patch_size=(48, 48, 48)))


def test_a_slow_machine_gets_a_setting_for_a_part_of_the_hours() -> None:
    wishes = Wishes(9.0, 0.8, 2, ("plain",))
    first = choose(FINGERPRINT, wishes, FakePlanner())
    pilot = FakePilot(
        lambda settings: costs_of(
            settings, seconds=lambda setting: 8 * FakePlanner().predict(setting).seconds
        )
    )
    chosen, costs = measured(first, wishes, pilot)
    assert pilot.timed == [first, chosen]
    assert chosen == choose(FINGERPRINT, wishes._replace(hours=0.1), FakePlanner()) != first
    for setting, stage in zip(chosen, costs.stages, strict=True):
        assert stage.step_s == pytest.approx(8 * FakePlanner().predict(setting).seconds)


def test_a_wished_cascade_that_is_slow_is_kept() -> None:
    """Fewer hours than typed must not decide that there is no cascade."""
    wishes = Wishes(9.0, 2.0, 2, ("plain",), num_stages=2)
    first = choose(FINGERPRINT, wishes, FakePlanner())
    pilot = FakePilot(
        lambda settings: costs_of(
            settings, seconds=lambda setting: 1000 * FakePlanner().predict(setting).seconds
        )
    )
    chosen, _ = measured(first, wishes, pilot)
    assert chosen == first
    assert pilot.timed == [first]


@pytest.mark.parametrize("num_stages", [None, 2])
def test_a_cascade_without_time_for_its_steps_becomes_one_stage(
    num_stages: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    coarse = Setting(StageName.coarse, (4.0, 4.0, 4.0), (48, 48, 48), "unet", "plain")
    fine = replace(coarse, stage=StageName.fine, spacing_mm=(2.0, 2.0, 2.0))
    single = replace(coarse, stage=StageName.single)

    def chosen(_: Fingerprint, wishes: Wishes, __: object) -> tuple[Setting, ...]:
        return (single,) if wishes.num_stages == 1 else (coarse, fine)

    monkeypatch.setattr(command, "choose", chosen)
    # A quarter of the time is too short for 100 steps of the coarse stage.
    pilot = FakePilot(lambda settings: costs_of(settings, seconds=lambda _: 0.35))
    pilot.cases = range(8)  # type: ignore[attr-defined]
    wishes = Wishes(2.0, 0.1, 2, ("plain",), num_stages)

    def fitting() -> tuple[Setting, ...]:
        arguments = (FINGERPRINT, VIEWS, wishes, FakePlanner(), pilot)
        settings, _ = command._fitting_settings(*arguments)  # type: ignore[arg-type]
        return settings

    if num_stages == 2:
        with pytest.raises(UserError, match="possible wish is hours="):
            fitting()
        return
    (setting,) = fitting()
    assert setting.stage is StageName.single
    assert setting.steps >= 100
    assert pilot.timed == [(coarse, fine), (single,)]


def test_a_cascade_has_a_file_for_each_stage_and_one_that_names_them(
    configure: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    coarse = Setting(StageName.coarse, (4.0, 4.0, 4.0), (48, 48, 48), "unet", "plain")
    fine = Setting(StageName.fine, (2.0, 2.0, 2.0), (32, 32, 32), "unet", "plain")
    monkeypatch.setattr(command, "choose", lambda *_: (coarse, fine))
    plan = configure(*WISHES)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"next: medseg cross_validate experiment={plan}/experiment.yaml ")
    text = (plan / "experiment.yaml").read_text(encoding="utf-8")
    assert 'coarse: "coarse.yaml"\nfine: "fine.yaml"\n' in text
    assert "stage: coarse" in (plan / "coarse.yaml").read_text(encoding="utf-8")
    assert "stage: fine" in (plan / "fine.yaml").read_text(encoding="utf-8")
    facts = json.loads((plan / "configure.json").read_text(encoding="utf-8"))
    assert [setting["stage"] for setting in facts["settings"]] == ["coarse", "fine"]
    assert PLANNED_SHARE * 0.9 <= facts["total_s"] / 360 <= PLANNED_SHARE
    report = (plan / "configure.md").read_text(encoding="utf-8")
    assert report.count("| steps | ") == 2


def test_a_single_stage_leaves_no_files_of_an_earlier_cascade(
    configure: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    coarse = Setting(StageName.coarse, (4.0, 4.0, 4.0), (48, 48, 48), "unet", "plain")
    fine = Setting(StageName.fine, (2.0, 2.0, 2.0), (32, 32, 32), "unet", "plain")
    with monkeypatch.context() as patch:
        patch.setattr(command, "choose", lambda *_: (coarse, fine))
        plan = configure(*WISHES)
    # The user's own experiment in the same folder.
    (plan / "fine.yaml").write_text("# My fine stage.\nsteps: 5\n", encoding="utf-8")
    configure(*WISHES)
    assert sorted(file.name for file in plan.glob("*.yaml")) == ["experiment.yaml", "fine.yaml"]
    assert "steps: 5" in (plan / "fine.yaml").read_text(encoding="utf-8")


def test_a_case_that_the_cross_validation_would_refuse_is_refused_before_it_is_timed(
    configure: Callable[..., Path], tmp_path: Path
) -> None:
    table = tmp_path / "cases.csv"
    first, *others = read_case_table(table)
    write_case_table(table, [replace(first, labels=None), *others])
    with pytest.raises(UserError, match=f"^{first.name}: no label map, .* write 'test' into"):
        configure(*WISHES)
    # The cross-validation uses neither test cases nor those that no fold names.
    for unused in (replace(first, split="test"), replace(first, fold_sides=(None, None))):
        sides = [("train", "val"), ("val", "train"), ("train", "val")]
        used = others
        if unused.fold_sides:
            used = [
                replace(case, fold_sides=pair) for case, pair in zip(others, sides, strict=True)
            ]
        write_case_table(table, [replace(unused, labels=None), *used])
        plan = configure(*WISHES)
        names = {row["case"] for row in read_csv(plan / "fingerprint.csv")}
        assert names == {case.name for case in others}


def test_configure_needs_cases_and_one_rank(tiny_table: Path) -> None:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        for arguments, sentence in (
            ([], "data.cases: configure decides by your scans"),
            ([f"data.cases='{tiny_table}'", "trainer=ddp"], "configure times one rank"),
        ):
            composed = hydra.compose("configure", [*WISHES, *arguments])
            with pytest.raises(UserError, match=sentence):
                to_config(composed, ConfigureConfig)
