"""Laws of the phantom: same bytes, honest partial volume, labels that mean what they say."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from scipy import ndimage

from medseg.phantom.anatomy import draw_patient
from medseg.phantom.scan import Phantom, _drop_crumbs, make_phantom
from medseg.phantom.shapes import Points, SmoothNoise
from medseg.phantom.spec import CHOICES, VIEWS, PhantomSpec, draw_spec

PLAIN = PhantomSpec(
    seed=5,
    index=0,
    spacing_mm=(5.0, 4.2, 4.0),
    matrix=(84, 96),
    model_spacing_mm=(4.0, 4.0, 4.0),
    noise_hu=0.0,
)


@cache
def plain() -> Phantom:
    """A whole ordinary chest, coarse and without noise."""
    return make_phantom(PLAIN)


def voxel_ml(phantom: Phantom) -> float:
    return float(np.prod(phantom.grid.spacing_mm)) / 1000


def test_equal_specs_give_equal_bytes_whatever_was_made_before() -> None:
    spec = replace(PLAIN, view="mid", noise_hu=20.0, num_nodules=2, consolidation=0.3)
    first = make_phantom(spec)
    make_phantom(replace(spec, index=1, view="apex"))
    np.random.seed(1)  # noqa: NPY002 - proves that no global state is read
    again = make_phantom(spec)
    assert first.image_hu.tobytes() == again.image_hu.tobytes()
    assert first.labels.tobytes() == again.labels.tobytes()
    assert first.organs.tobytes() == again.organs.tobytes()


def test_another_index_is_another_patient() -> None:
    spec = replace(PLAIN, view="mid", num_slices=12)
    assert np.any(make_phantom(spec).labels != make_phantom(replace(spec, index=1)).labels)


def test_left_lung_lies_on_the_patients_left() -> None:
    phantom = plain()
    left, right = (
        phantom.grid.index_to_world_xyz_mm(np.argwhere(phantom.labels == v).mean(axis=0))
        for v in (1, 2)
    )
    assert left[0] - right[0] > 80


@pytest.mark.parametrize("value", [1, 2])
def test_each_lung_is_one_piece_of_plausible_volume_and_density(value: int) -> None:
    phantom = plain()
    lung = phantom.labels == value
    assert ndimage.label(lung)[1] == 1
    assert 0.8 < lung.sum() * voxel_ml(phantom) / 1000 < 4
    assert -920 < np.median(phantom.image_hu[lung]) < -780


def test_outline_lies_half_way_between_lung_and_soft_tissue() -> None:
    phantom = plain()
    lungs = phantom.labels > 0
    just_outside = ndimage.binary_dilation(lungs, iterations=2) & ~ndimage.binary_dilation(lungs)
    just_inside = lungs & ~ndimage.binary_erosion(lungs)
    assert np.mean(phantom.image_hu[just_inside] < -400) > 0.85
    assert np.mean(phantom.image_hu[just_outside] > -400) > 0.9


def test_body_holds_fat_muscle_bone_and_air() -> None:
    image = plain().image_hu
    for low, high, share in (
        (-130, -70, 0.02),
        (20, 90, 0.05),
        (250, 1300, 0.005),
        (-1024, -990, 0.1),
    ):
        assert np.mean((image >= low) & (image <= high)) > share


def test_central_air_and_pleural_fluid_stay_outside() -> None:
    dry = plain()
    wet = make_phantom(replace(PLAIN, effusion_mm=(45.0, 0.0)))
    lost = (dry.labels == 1) & (wet.labels != 1)
    assert lost.sum() * voxel_ml(dry) > 100
    assert (
        abs(np.median(wet.image_hu[lost & ~ndimage.binary_dilation(wet.labels == 1, iterations=2)]))
        < 40
    )
    assert np.array_equal(dry.labels == 2, wet.labels == 2)
    # Air in the body that is neither outside nor lung: the windpipe's column lies in the middle,
    # unlabelled.
    air = (dry.image_hu < -850) & (dry.labels == 0)
    pieces, _ = ndimage.label(air)
    rim = {
        0,
        *np.unique(pieces[:, 0]),
        *np.unique(pieces[:, -1]),
        *np.unique(pieces[:, :, 0]),
        *np.unique(pieces[:, :, -1]),
    }
    windpipe = max(
        set(np.unique(pieces)) - rim, key=lambda n: np.ptp(np.argwhere(pieces == n)[:, 0])
    )
    assert np.ptp(np.argwhere(pieces == windpipe)[:, 0]) * dry.grid.spacing_mm[0] > 50


def test_thick_slice_is_the_mean_of_thin_ones() -> None:
    thin_spec = replace(
        PLAIN,
        view="mid",
        num_slices=24,
        spacing_mm=(2.0, 4.0, 4.0),
        model_spacing_mm=(2.0, 4.0, 4.0),
    )
    thin = make_phantom(thin_spec)
    thick = make_phantom(replace(thin_spec, num_slices=6, spacing_mm=(8.0, 4.0, 4.0)))
    mean = thin.image_hu.reshape(6, 4, *thin.image_hu.shape[1:]).mean(axis=1)
    assert np.abs(thick.image_hu - mean).mean() < 6
    assert np.percentile(np.abs(thick.image_hu - mean), 99) < 60
    votes = (thin.labels.reshape(6, 4, *thin.labels.shape[1:]) == 1).mean(axis=1)
    assert np.mean((thick.labels == 1)[votes > 0.8]) > 0.98
    assert np.mean((thick.labels == 1)[votes < 0.2]) < 0.002


def test_a_tilt_turns_the_patient_with_the_slices() -> None:
    tilted, straight = make_phantom(replace(PLAIN, tilt_deg=(9.0, -6.0, 7.0))), plain()
    assert np.array_equal(tilted.image_hu, straight.image_hu)
    turn = np.array(tilted.grid.direction)
    assert np.allclose(turn @ turn.T, np.eye(3))
    assert 0.05 < np.abs(turn - np.eye(3)).max() < 0.3


@pytest.mark.parametrize("flips", [(False, True, True), (True, False, False), (True, False, True)])
def test_flipped_storage_keeps_every_voxel_at_its_place(flips: tuple[bool, bool, bool]) -> None:
    spec = replace(PLAIN, view="mid", num_slices=10)
    plainly, stored = make_phantom(spec), make_phantom(replace(spec, flips=flips))
    assert stored.grid.direction != plainly.grid.direction
    index = np.argwhere(plainly.labels == 1)[::7]
    there = np.rint(
        stored.grid.world_to_index_zyx(plainly.grid.index_to_world_xyz_mm(index))
    ).astype(int)
    assert np.array_equal(stored.image_hu[tuple(there.T)], plainly.image_hu[tuple(index.T)])
    assert np.all(stored.labels[tuple(there.T)] == 1)


def test_prone_patient_has_the_dense_lung_in_front() -> None:
    def slope(phantom: Phantom) -> float:
        lung = ndimage.binary_erosion(phantom.labels > 0, iterations=2)
        places = np.argwhere(lung)
        return float(np.polyfit(places[:, 1], np.minimum(phantom.image_hu[lung], -600), 1)[0])

    assert slope(plain()) > 0.2
    assert slope(make_phantom(replace(PLAIN, is_prone=True))) < -0.2


@pytest.mark.parametrize("padding_hu", [-1024, -2048, -3024])
def test_padding_fills_the_corners_and_holds_no_label(padding_hu: int) -> None:
    spec = replace(
        PLAIN,
        view="mid",
        num_slices=4,
        padding_hu=padding_hu,
        noise_hu=20.0,
        spacing_mm=(5.0, 2.6, 2.6),
    )
    phantom = make_phantom(spec)
    assert np.all(phantom.image_hu[:, :3, :3] == padding_hu)
    assert np.all(phantom.labels[phantom.image_hu < -1024] == 0)
    assert phantom.image_hu[:, 20:-20, 20:-20].min() >= -1024


@pytest.mark.parametrize("view", VIEWS)
def test_view_shows_what_it_is_called(view: str) -> None:
    labels = make_phantom(replace(PLAIN, view=view)).labels if view != "whole" else plain().labels
    area = (labels > 0).sum(axis=(1, 2))
    top_is_cut, bottom_is_cut = bool(area[-1]), bool(area[0])
    expected = {
        "whole": (True, False, False),
        "trunk": (True, False, False),
        "apex": (True, True, False),
        "bases_cut": (True, True, False),
        "mid": (True, True, True),
        "bases": (True, False, True),
        "apices_cut": (True, False, True),
        "abdomen": (True, False, True),
        "neck": (False, False, False),
    }[view]
    assert (bool(area.any()), bottom_is_cut, top_is_cut) == expected


def test_apex_has_no_diaphragm_and_no_heart() -> None:
    phantom = make_phantom(replace(PLAIN, view="apex"))
    assert not np.any(phantom.organs == 3)
    assert np.any(phantom.organs == 4)


@pytest.mark.parametrize(("missing", "gone", "kept"), [("left", 1, 2), ("right", 2, 1)])
def test_removed_lung_is_absent_and_the_other_stays(missing: str, gone: int, kept: int) -> None:
    phantom = make_phantom(replace(PLAIN, missing_lung=missing))
    assert not np.any(phantom.labels == gone)
    assert (phantom.labels == kept).sum() * voxel_ml(phantom) > 600


def test_touching_lungs_come_closer_than_ordinary_ones() -> None:
    def gap(phantom: Phantom) -> int:
        away = ndimage.distance_transform_edt(phantom.labels != 1)
        return int(np.sum(away[phantom.labels == 2] < 3))

    assert gap(make_phantom(replace(PLAIN, is_touching=True))) > gap(plain()) + 20


def test_organs_agree_with_lungs() -> None:
    phantom = plain()
    assert np.array_equal(np.where(phantom.organs <= 2, phantom.organs, 0), phantom.labels)
    heart = (phantom.organs == 3).sum() * voxel_ml(phantom)
    assert 250 < heart < 1100
    spine, hearts = (np.argwhere(phantom.organs == v).mean(axis=0) for v in (4, 3))
    assert (
        phantom.grid.index_to_world_xyz_mm(spine)[1] > phantom.grid.index_to_world_xyz_mm(hearts)[1]
    )


def test_the_airway_is_the_air_of_trachea_and_main_bronchi() -> None:
    phantom = plain()
    airway = phantom.organs == 5
    assert 15 < airway.sum() * voxel_ml(phantom) < 90
    # Voxels of 4 mm at the wall are half tissue.
    assert np.median(phantom.image_hu[airway]) < -700
    assert not np.any(phantom.labels[airway])
    # One tube at the top, two below the carina.
    widths = [ndimage.label(plane)[1] for plane in airway if plane.any()]
    assert widths[-1] == 1
    assert 2 in widths
    assert ndimage.label(airway, np.ones((3, 3, 3)))[1] == 1


def test_nodules_and_consolidation_stay_inside_the_label() -> None:
    healthy, ill = plain(), make_phantom(replace(PLAIN, num_nodules=4, consolidation=0.6))
    assert np.array_equal(healthy.labels, ill.labels)
    dense = (ill.image_hu > -100) & (healthy.image_hu < -600)
    assert dense.sum() * voxel_ml(ill) > 20
    assert np.all(ill.labels[dense] > 0)


MIDDLE = replace(PLAIN, view="mid", num_slices=6)


@cache
def middle() -> Phantom:
    """Six slices through the middle of the ordinary chest."""
    return make_phantom(MIDDLE)


def test_diseases_of_the_lung_change_its_density_and_nothing_else() -> None:
    plainly = middle()
    lung = ndimage.binary_erosion(plainly.labels > 0)
    changes = {}
    for trait, value in (("emphysema", 0.4), ("fibrosis", 1.0), ("lung_hu", -805.0)):
        ill = make_phantom(replace(MIDDLE, **{trait: value}))
        if trait != "emphysema":  # such a chest is deeper
            assert np.array_equal(ill.labels, plainly.labels)
            outside = ~ndimage.binary_dilation(plainly.labels > 0, iterations=5)
            assert np.array_equal(ill.image_hu[outside], plainly.image_hu[outside])
        inside = lung & ndimage.binary_erosion(ill.labels > 0)
        changes[trait] = [
            np.percentile(phantom.image_hu[inside], (5, 50, 90)) for phantom in (plainly, ill)
        ]
    before, after = changes["emphysema"]
    assert after[0] < before[0] - 20, "holes"
    before, after = changes["fibrosis"]
    assert after[2] > before[2] + 10, "a network of tissue"
    before, after = changes["lung_hu"]
    assert after[1] - before[1] == pytest.approx(60, abs=10)


def test_contrast_agent_is_in_the_blood() -> None:
    plainly, bright = middle(), make_phantom(replace(MIDDLE, contrast_hu=200.0))
    heart = ndimage.binary_erosion(plainly.organs == 3, np.ones((1, 3, 3)), iterations=4)
    assert heart.sum() > 50
    change = bright.image_hu[heart].astype(float) - plainly.image_hu[heart]
    assert np.median(change) == pytest.approx(200, abs=5)
    spine = ndimage.binary_erosion(plainly.organs == 4, iterations=1)
    assert np.median(np.abs(bright.image_hu[spine] - plainly.image_hu[spine])) < 5


@pytest.mark.parametrize("noise_hu", [10.0, 40.0])
def test_noise_in_the_middle_of_the_chest_has_the_stated_deviation(noise_hu: float) -> None:
    heart = ndimage.binary_erosion(middle().organs == 3, iterations=2)
    noisy = make_phantom(replace(MIDDLE, noise_hu=noise_hu))
    noise = noisy.image_hu[heart].astype(float) - middle().image_hu[heart]
    assert abs(noise.mean()) < 0.3 * noise_hu
    assert noise.std() == pytest.approx(noise_hu, rel=0.4)
    assert np.array_equal(noisy.labels, middle().labels)


def test_an_offset_of_the_field_of_view_moves_the_picture_and_not_the_patient() -> None:
    """The offset is (y, x) in mm; the patient moves the other way in the image."""
    plainly, moved = middle(), make_phantom(replace(MIDDLE, centre_offset_mm=(21.0, -16.0)))
    indices = [np.argwhere(phantom.labels == 2).mean(axis=0) for phantom in (plainly, moved)]
    np.testing.assert_allclose(indices[1] - indices[0], (0, -5, 4), atol=0.3)
    places = [
        phantom.grid.index_to_world_xyz_mm(index)
        for phantom, index in zip((plainly, moved), indices, strict=True)
    ]
    np.testing.assert_allclose(*places, atol=1.5)


def test_the_table_lies_under_the_back_or_over_it_in_a_prone_scan() -> None:
    for is_prone in (False, True):
        spec = replace(MIDDLE, is_prone=is_prone, num_slices=2)
        with_table, without = make_phantom(spec), make_phantom(replace(spec, has_table=False))
        rows = np.nonzero((with_table.image_hu > without.image_hu + 20).any(axis=(0, 2)))[0]
        lungs = np.nonzero((without.labels > 0).any(axis=(0, 2)))[0]
        if is_prone:
            assert rows.max() < lungs.mean()
        else:
            assert rows.min() > lungs.mean()


def test_measures_of_a_patient_follow_breath_sex_and_side() -> None:
    usual = draw_patient(PLAIN)
    woman = draw_patient(replace(PLAIN, is_female=True))
    assert all(np.less(woman.scale_zyx, usual.scale_zyx))
    assert woman.muscle_mm == pytest.approx(usual.muscle_mm - 4)
    assert woman.tube_size == pytest.approx(usual.tube_size - 0.1)
    out = draw_patient(replace(PLAIN, breath=0.3))
    for side in (1, -1):
        assert out.dome_z_mm[side] - usual.dome_z_mm[side] == pytest.approx(26.0)
    assert usual.recess_mm - out.recess_mm == pytest.approx(12.5)
    risen = draw_patient(replace(PLAIN, high_dome_mm=(40.0, 10.0)))
    assert risen.dome_z_mm[1] - usual.dome_z_mm[1] == pytest.approx(40.0), "the left side"
    assert risen.dome_z_mm[-1] - usual.dome_z_mm[-1] == pytest.approx(10.0)
    assert risen.heart_xyz_mm[2] - usual.heart_xyz_mm[2] == pytest.approx(25.0)
    for side, shift_mm in (("left", 38.0), ("right", -38.0)):
        shifted = draw_patient(replace(PLAIN, missing_lung=side))
        assert shifted.shift_x_mm == shift_mm
        assert shifted.heart_xyz_mm[0] - usual.heart_xyz_mm[0] == pytest.approx(shift_mm)
    landmarks = {name: usual.landmark_z_mm(name) for name in ("recess", "dome", "carina", "apex")}
    assert landmarks["dome"] == max(usual.dome_z_mm.values())
    assert landmarks["recess"] == min(usual.dome_z_mm.values()) - usual.recess_mm
    assert sorted(landmarks.values()) == list(landmarks.values()), "from the feet to the head"


@pytest.mark.parametrize(("side", "value"), [(0, 1), (1, 2)])
def test_fluid_takes_the_room_of_its_own_side(side: int, value: int) -> None:
    coarse = replace(
        PLAIN, spacing_mm=(8.0, 6.0, 6.0), matrix=(60, 64), model_spacing_mm=(6.0, 6.0, 6.0)
    )

    def volumes(**changes: object) -> dict[int, float]:
        phantom = make_phantom(replace(coarse, **changes))
        return {v: (phantom.labels == v).sum() * voxel_ml(phantom) for v in (1, 2)}

    usual = volumes()
    depth_mm = [0.0, 0.0]
    depth_mm[side] = 45.0
    wet = volumes(effusion_mm=tuple(depth_mm))
    assert usual[value] - wet[value] > 100
    assert wet[3 - value] == usual[3 - value]


def test_draws_cover_ordinary_and_odd_cases() -> None:
    specs = [draw_spec(0, index, "small") for index in range(300)]
    for name, shares in CHOICES.items():
        assert {getattr(spec, name) for spec in specs} == set(shares)
    assert 0.55 < np.mean([spec.view == "whole" for spec in specs]) < 0.8
    for trait in (
        "contrast_hu",
        "consolidation",
        "emphysema",
        "fibrosis",
        "effusion_mm",
        "high_dome_mm",
        "tilt_deg",
        "flips",
    ):
        assert 0.02 < np.mean([bool(np.any(getattr(spec, trait))) for spec in specs]) < 0.5, trait
    assert draw_spec(3, 7) == draw_spec(3, 7) != draw_spec(4, 7)


@pytest.mark.parametrize("index", range(6))
def test_a_drawn_chest_obeys_the_laws(index: int) -> None:
    coarse = {
        "spacing_mm": (6.0, 5.0, 5.0),
        "matrix": (84, 84),
        "model_spacing_mm": (5.0, 5.0, 5.0),
    }
    spec = replace(
        draw_spec(8, index), view="whole", missing_lung=None, centre_offset_mm=(0.0, 0.0), **coarse
    )
    phantom = make_phantom(spec)
    assert phantom.image_hu.min() >= min(spec.padding_hu or -1024, -1024)
    assert phantom.image_hu.max() < 2000
    assert np.mean(phantom.image_hu[phantom.labels > 0] < -500) > 0.7
    centres = []
    for value in (1, 2):
        lung = phantom.labels == value
        pieces, _ = ndimage.label(lung)
        assert np.bincount(pieces.ravel())[1:].max() > 0.98 * lung.sum()
        assert 0.3 < lung.sum() * voxel_ml(phantom) / 1000 < 5
        centres.append(phantom.grid.index_to_world_xyz_mm(np.argwhere(lung).mean(axis=0)))
    assert centres[0][0] - centres[1][0] > 80


def test_unknown_choices_are_refused() -> None:
    with pytest.raises(ValueError, match="view must be one of"):
        PhantomSpec(0, 0, view="chest")
    with pytest.raises(ValueError, match="detail must be one of"):
        draw_spec(0, 0, "large")


@pytest.mark.parametrize("voxel_mm3", [1.0, 8.0])
def test_pieces_of_a_lung_below_a_millilitre_are_dropped_at_any_spacing(voxel_mm3: float) -> None:
    labels = np.zeros((30, 40, 50), dtype=np.uint8)
    labels[:20] = 1
    large, small = int(1200 / voxel_mm3), int(800 / voxel_mm3)
    labels[25].flat[:large] = 1
    labels[28].flat[:small] = 1
    expected = labels.copy()
    expected[28] = 0
    _drop_crumbs(labels, voxel_mm3)
    np.testing.assert_array_equal(labels, expected)


def test_noise_is_finite_however_far_the_scan_reaches() -> None:
    noise = SmoothNoise(np.random.default_rng(1), 5.0)
    near, far = np.float32([0, 5]), np.float32([0, 1e4])
    points = Points(far.reshape(1, 1, -1), near.reshape(1, -1, 1), -far.reshape(-1, 1, 1))
    values = noise.at(points)
    assert np.isfinite(values).all()
    assert np.all(values[1] == 0)
    assert np.all(values[0, :, 0] != 0)
