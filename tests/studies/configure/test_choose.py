"""Choices within memory and time, with a planner whose predictions are simple formulas."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace

import pytest

from medseg.data.options import StageName
from medseg.errors import UserError
from medseg.planning.choose import MARGIN
from medseg.studies.configure.choose import (
    BATCH_STEPS,
    LEAST_GAIN,
    WANTED_PASSES,
    WANTED_STEPS,
    Prediction,
    Wishes,
    affordable_spacing,
    choose,
    choose_patches,
    choose_whole_scans,
    least_steps,
    patch_shape,
    spacings,
    with_smaller_samples,
    with_steps,
)
from medseg.studies.configure.fingerprint import CaseFacts, Fingerprint, LabelFacts
from medseg.studies.configure.setting import Setting
from medseg.studies.configure.stage_views import (
    LEAST_VOXELS_ACROSS,
    VOXELS_ACROSS,
    cascade_views,
    single_view,
    stage_views,
)

SWITCHES = ("amp", "amp_checkpoint", "lean")
FACTOR = {"amp": 1.0, "amp_checkpoint": 0.6, "lean": 0.4}


def facts(size_mm: float, spacing_mm: tuple[float, float, float], name: str = "a") -> CaseFacts:
    """Facts of a scan of 300 x 360 x 420 mm with a ball."""
    shape = tuple(
        round(length / step) for length, step in zip((300, 360, 420), spacing_mm, strict=True)
    )
    volume_ml = math.pi / 6 * size_mm**3 / 1000
    ball = LabelFacts(volume_ml, (size_mm, size_mm, size_mm))
    depth, height, width = shape
    labels = {"ball": ball}
    regions = {"organs": ball}
    return CaseFacts(name, (depth, height, width), spacing_mm, -1000.0, 300.0, labels, regions)


LARGE = Fingerprint((facts(150.0, (2.5, 0.75, 0.8)),))
SMALL = Fingerprint((facts(20.0, (2.5, 0.75, 0.8)),))
LARGE_VIEW = single_view(LARGE)
SMALL_VIEW = single_view(SMALL)


class FakePlanner:
    """Predicts 1 µs and 400 bytes a voxel for a step, and three times both for the wide network."""

    def __init__(self) -> None:
        self.asked: Counter[Setting] = Counter()

    def divisor(self, setting: Setting) -> tuple[int, int, int]:
        return 16, 16, 16

    def predict(self, setting: Setting) -> Prediction:
        self.asked[setting] += 1
        weight = 3 if setting.model == "unet_lean" else 1
        voxels = setting.step_voxels * weight
        return Prediction(0.5 + 400 * voxels * FACTOR[setting.memory] / 2**30, 1e-6 * voxels)


def wishes(gib: float, hours: float) -> Wishes:
    return Wishes(gib, hours, 2, SWITCHES)


@pytest.mark.parametrize("fingerprint", [LARGE, SMALL])
@pytest.mark.parametrize("gib", [0.6, 1.0, 8.0])
@pytest.mark.parametrize("hours", [0.01, 0.1, 1.0, 10.0])
def test_every_choice_fits(fingerprint: Fingerprint, gib: float, hours: float) -> None:
    planner = FakePlanner()
    settings = choose(fingerprint, wishes(gib, hours), planner)
    views = stage_views(fingerprint)
    for setting in settings:
        assert planner.predict(setting).peak_gib * (1 + MARGIN) <= gib
        for voxel_mm, median_mm, length, input_mm in zip(
            setting.spacing_mm,
            fingerprint.spacing_mm,
            setting.patch_size,
            views[setting.stage].extent_mm,
            strict=True,
        ):
            assert voxel_mm >= 0.95 * median_mm, "finer than the scans"
            assert length % 16 == 0
            assert length <= max(32, input_mm / voxel_mm + 16)
    assert choose(fingerprint, wishes(gib, hours), FakePlanner()) == settings


def test_more_time_never_gives_a_coarser_spacing_or_a_smaller_patch() -> None:
    previous = choose_patches(SMALL_VIEW, wishes(8.0, 0.01), FakePlanner())
    for hours in (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0):
        setting = choose_patches(SMALL_VIEW, wishes(8.0, hours), FakePlanner())
        assert math.prod(setting.spacing_mm) <= math.prod(previous.spacing_mm)
        previous = setting
    assert previous.model == "unet_lean"
    # No finer than the spacing of the scans, rounded to two digits.
    assert previous.spacing_mm == (2.5, 0.75, 0.8)


def test_memory_takes_switches_before_it_takes_the_patch() -> None:
    free = choose_patches(LARGE_VIEW, wishes(8.0, 0.3), FakePlanner())
    plenty = FakePlanner().predict(free).peak_gib
    assert free.memory == "amp"
    tight = choose_patches(LARGE_VIEW, wishes(plenty * 0.95, 0.3), FakePlanner())
    assert (tight.patch_size, tight.memory) == (free.patch_size, "amp_checkpoint")


def test_too_little_memory_is_refused_with_the_least_that_works() -> None:
    with pytest.raises(UserError, match="the nearest possible wish is fit_gib=") as refused:
        choose(SMALL, wishes(0.1, 0.1), FakePlanner())
    nearest = float(re.findall(r"fit_gib=([\d.]+)", str(refused.value))[-1])
    for setting in choose(SMALL, wishes(nearest, 0.1), FakePlanner()):
        assert FakePlanner().predict(setting).peak_gib <= nearest
    with pytest.raises(UserError):
        choose(SMALL, wishes(nearest - 0.05, 0.1), FakePlanner())


def test_no_setting_is_predicted_twice_without_need() -> None:
    planner = FakePlanner()
    choose_patches(LARGE_VIEW, wishes(8.0, 0.3), planner)
    assert len(planner.asked) <= 3


def test_a_cascade_is_chosen_where_its_crops_allow_much_smaller_voxels() -> None:
    """A ball of 60 mm in a scan of 300 mm: the crop is a hundredth of the scan."""
    fingerprint = Fingerprint((facts(60.0, (1.0, 0.75, 0.8)),))
    views = stage_views(fingerprint)
    num_cascades = 0
    for hours in (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0):
        wish = wishes(8.0, hours)
        single = choose_patches(views[StageName.single], wish, FakePlanner())
        fine = choose_patches(views[StageName.fine], wish, FakePlanner())
        coarse = choose_whole_scans(views[StageName.coarse], wish, FakePlanner())
        gain = math.prod(single.spacing_mm) / math.prod(fine.spacing_mm)
        pays = gain >= LEAST_GAIN and coarse is not None
        chosen = choose(fingerprint, wish, FakePlanner())
        assert chosen == ((coarse, fine) if pays else (single,))
        num_cascades += pays
        wished_single = choose(fingerprint, wish._replace(num_stages=1), FakePlanner())
        assert wished_single == (single,)
        if coarse is None:
            with pytest.raises(UserError, match=r"num_stages=2: 8 GiB and .*, or num_stages=1"):
                choose(fingerprint, wish._replace(num_stages=2), FakePlanner())
        else:
            wished = choose(fingerprint, wish._replace(num_stages=2), FakePlanner())
            assert wished == (coarse, fine)
    # First there is too little time for two trainings.
    assert 0 < num_cascades < 9


def test_one_stage_is_chosen_where_the_crops_do_not_fit() -> None:
    class LargeCrops(FakePlanner):
        def predict(self, setting: Setting) -> Prediction:
            prediction = super().predict(setting)
            if setting.stage is StageName.fine:
                return prediction._replace(peak_gib=9.0)
            return prediction

    fingerprint = Fingerprint((facts(60.0, (1.0, 0.75, 0.8)),))
    wish = wishes(8.0, 3.0)
    assert len(choose(fingerprint, wish, FakePlanner())) == 2
    assert len(choose(fingerprint, wish, LargeCrops())) == 1
    with pytest.raises(UserError, match="the nearest possible wish is fit_gib="):
        choose(fingerprint, wish._replace(num_stages=2), LargeCrops())


def test_a_cascade_is_chosen_where_only_its_crops_fit() -> None:
    class LargeScans(FakePlanner):
        def predict(self, setting: Setting) -> Prediction:
            prediction = super().predict(setting)
            if setting.stage is StageName.single:
                return prediction._replace(peak_gib=9.0)
            return prediction

    fingerprint = Fingerprint((facts(60.0, (1.0, 0.75, 0.8)),))
    for num_stages in (None, 2):
        wish = wishes(8.0, 3.0)._replace(num_stages=num_stages)
        assert len(choose(fingerprint, wish, LargeScans())) == 2


def test_a_region_that_a_coarse_stage_would_report_as_absent_gets_one_stage() -> None:
    large = facts(60.0, (1.0, 0.75, 0.8), "a")
    small = facts(20.0, (1.0, 0.75, 0.8), "b")
    wish = wishes(8.0, 3.0)
    assert len(choose(Fingerprint((large, large)), wish, FakePlanner())) == 2
    # 4.2 ml in one case of two.
    mixed = Fingerprint((large, small))
    assert len(choose(mixed, wish, FakePlanner())) == 1
    with pytest.raises(UserError, match=r"num_stages=2: organs of b has 4.2 ml, .* num_stages=1"):
        choose(mixed, wish._replace(num_stages=2), FakePlanner())


def test_a_task_without_regions_gets_one_stage() -> None:
    fingerprint = Fingerprint((replace(facts(60.0, (1.0, 0.75, 0.8)), regions={}),))
    assert list(stage_views(fingerprint)) == [StageName.single]
    assert len(choose(fingerprint, wishes(8.0, 3.0), FakePlanner())) == 1
    with pytest.raises(UserError, match="num_stages=2: the task has no regions; give num_stages=1"):
        choose(fingerprint, wishes(8.0, 3.0)._replace(num_stages=2), FakePlanner())


def test_crops_are_the_regions_with_their_margins() -> None:
    sizes = {"left": (100.0, 80.0, 60.0), "right": (120.0, 80.0, 70.0)}
    regions = {name: LabelFacts(100.0, extent_mm) for name, extent_mm in sizes.items()}
    case = replace(facts(60.0, (1.0, 0.75, 0.8)), regions=regions)
    _, fine = cascade_views(Fingerprint((case, replace(case, regions={}))))
    assert fine.extent_mm == (130.0, 100.0, 85.0)
    assert fine.largest_mm == (140.0, 100.0, 90.0)
    assert fine.case_mm3 == 120 * 100 * 80 + 140 * 100 * 90


def test_scans_that_show_nothing_finer_get_one_stage() -> None:
    coarse_scans = Fingerprint((facts(150.0, (3.0, 3.0, 3.0)),))
    for hours in (0.1, 1.0, 10.0):
        assert len(choose(coarse_scans, wishes(8.0, hours), FakePlanner())) == 1


def test_the_coarse_stage_sees_whole_scans_500_times() -> None:
    view, _ = cascade_views(LARGE)
    previous_mm = math.inf
    for hours in (1.0, 3.0, 10.0, 30.0):
        setting = choose_whole_scans(view, wishes(8.0, hours), FakePlanner())
        assert setting is not None
        for length, voxel_mm, scan_mm in zip(
            setting.patch_size, setting.spacing_mm, view.extent_mm, strict=True
        ):
            assert scan_mm <= length * voxel_mm < scan_mm + 16 * voxel_mm
        seconds = WANTED_STEPS * FakePlanner().predict(setting).seconds
        assert seconds <= view.time_share * wishes(8.0, hours).training_s
        assert setting.spacing_mm[1] <= previous_mm
        previous_mm = setting.spacing_mm[1]
    assert setting.spacing_mm == (2.5, 2.0, 2.0), "the finest that is of use"
    assert choose_whole_scans(view, wishes(8.0, 0.1), FakePlanner()) is None
    assert choose_whole_scans(view, wishes(0.51, 10.0), FakePlanner()) is None


def test_spacings_run_from_what_a_label_wants_to_what_it_bears() -> None:
    tried = list(spacings(LARGE_VIEW))
    assert tried[0] == (3.1, 3.1, 3.1)  # 150 mm / 48
    assert tried[-1][0] == pytest.approx(150 / LEAST_VOXELS_ACROSS, rel=0.05)
    assert len(tried) == 9  # a factor of four in steps of a fourth root of two
    # For 48 voxels, a label of 20 mm needs 0.42 mm, finer than any scan.
    assert next(spacings(SMALL_VIEW)) == (2.5, 0.75, 0.8)
    assert VOXELS_ACROSS == 4 * LEAST_VOXELS_ACROSS


def test_the_spacing_is_the_finest_of_which_enough_is_seen() -> None:
    tried = list(spacings(LARGE_VIEW))
    for number, spacing_mm in enumerate(tried):
        seen = WANTED_PASSES * LARGE_VIEW.case_voxels(spacing_mm)
        assert affordable_spacing(LARGE_VIEW, seen) == spacing_mm
        if number:
            finer = tried[number - 1]
            assert seen < WANTED_PASSES * LARGE_VIEW.case_voxels(finer)
    assert affordable_spacing(LARGE_VIEW, 0.0) == tried[-1]


def test_patches_are_as_long_in_mm_along_all_axes() -> None:
    patch = patch_shape(96, (5.0, 0.8, 0.8), (1e4, 1e4, 1e4), (4, 16, 16))
    lengths_mm = [length * step for length, step in zip(patch, (5.0, 0.8, 0.8), strict=True)]
    assert max(lengths_mm) / min(lengths_mm) < 1.15
    assert math.prod(patch) == pytest.approx(96**3, rel=0.1)


@pytest.mark.parametrize("stage", StageName)
def test_smaller_samples_end(stage: StageName) -> None:
    view = stage_views(LARGE)[stage]
    wish = wishes(8.0, 10.0)
    choose_stage = choose_whole_scans if stage is StageName.coarse else choose_patches
    following = choose_stage(view, wish, FakePlanner())
    sizes = []
    while following is not None:
        sizes.append(math.prod(following.patch_size))
        following = with_smaller_samples(following, view, wish, FakePlanner())
    assert sizes == sorted(set(sizes), reverse=True)
    assert len(sizes) > 3


def test_many_steps_become_batches_of_two() -> None:
    setting = choose_patches(SMALL_VIEW, wishes(8.0, 1.0), FakePlanner())
    few = with_steps(setting, BATCH_STEPS - 1)
    many = with_steps(setting, BATCH_STEPS)
    assert (few.batch_size, few.steps) == (1, BATCH_STEPS - 1)
    assert (many.batch_size, many.steps) == (2, BATCH_STEPS // 2)
    assert least_steps(setting, SMALL_VIEW) >= 100
    assert WANTED_STEPS < BATCH_STEPS
