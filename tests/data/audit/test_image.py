"""What a histogram says about the values of a CT."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from medseg.data.audit.image import (
    are_hu,
    audit_channels,
    audit_image,
    check_channels,
    hash_voxels,
    measure_image,
    share_of,
)
from medseg.findings import Severity
from medseg.preprocess.scale import HuScale


def ct(seed: int = 0, lung: float = 0.2, soft: float = 0.35) -> np.ndarray:
    """Voxels with the shares of a chest: air, lung, soft tissue and some bone, noisy."""
    rng = np.random.default_rng(seed)
    kinds = rng.choice(
        [-990.0, -850.0, -100.0, 50.0, 600.0],
        p=[0.97 - lung - soft, lung, soft / 3, soft * 2 / 3, 0.03],
        size=(12, 40, 50),
    )
    return np.clip(np.rint(kinds + rng.normal(0, 25, kinds.shape)), -1024, 3071).astype(np.int16)


def codes(image: np.ndarray) -> list[tuple[str, str]]:
    return [(finding.code, finding.severity.value) for finding in audit_image(measure_image(image))]


def test_the_facts_are_those_of_sorting() -> None:
    for image in (ct(), ct().astype(np.float32) + 0.25):
        facts = measure_image(image[:, ::-1])
        whole = np.sort(np.rint(image), axis=None)
        summary = facts.summary()
        assert (summary["min"], summary["max"]) == (image.min(), image.max())
        for name, share in (("p01", 0.01), ("p50", 0.5), ("p99", 0.99)):
            assert summary[name] == whole[int(np.ceil(share * whole.size)) - 1]
        assert share_of(facts.counts, -900, 100) == pytest.approx(
            ((whole >= -900) & (whole < 100)).mean()
        )
        assert share_of(facts.counts, -np.inf, np.inf) == 1


@pytest.mark.parametrize("value", [-3024.25, -1500.0, 5000.25])
def test_values_beyond_those_of_tissue_are_counted_where_they_are(value: float) -> None:
    image = ct().astype(np.float32) + 0.25
    image[:, :10] = value
    facts = measure_image(image)
    assert share_of(facts.counts, round(value), round(value) + 1) == 0.25
    assert value in (facts.low_hu, facts.high_hu)


@pytest.mark.parametrize("lung", [0.0, 0.05, 0.4])
@pytest.mark.parametrize("soft", [0.1, 0.3, 0.5])
def test_a_ct_of_any_mixture_passes(lung: float, soft: float) -> None:
    assert codes(ct(1, lung, soft)) == []


@pytest.mark.parametrize("offset", [1000, 1024])
@pytest.mark.parametrize("soft", [0.1, 0.5])
@pytest.mark.parametrize("padding", [None, -2000, 0, -1024])
def test_an_offset_is_found_whatever_the_padding(
    offset: int, soft: float, padding: int | None
) -> None:
    image = np.maximum(ct(2, 0.2, soft) + offset, 0)
    if padding is not None:
        image[:, :10] = padding
    assert codes(image) == [("hu_offset", "error")]
    too_low = ct(2, 0.2, soft) - offset
    assert codes(too_low) == [("hu_offset", "error")]


@pytest.mark.parametrize("low_hu", [-1250, -1000, -160])
@pytest.mark.parametrize("high_hu", [240, 400, 1000])
def test_eight_bits_are_no_hu(low_hu: int, high_hu: int) -> None:
    share = (np.clip(ct(3), low_hu, high_hu) - low_hu) / (high_hu - low_hu)
    for image in (
        np.rint(share * 255).astype(np.int16),
        share.astype(np.float32),
        (2 * share - 1).astype(np.float32),
    ):
        assert codes(image) == [("hu_range", "error")]


def test_other_images_are_no_hu() -> None:
    rng = np.random.default_rng(4)
    assert codes(rng.gamma(2.0, 200.0, (8, 30, 30)).astype(np.int16)) == [("hu_range", "error")]
    assert codes(np.full((3, 4, 5), -7, np.int16)) == [("hu_range", "error")]
    # HU times 10 is not an offset of fat, whose values then lie where an offset would move soft
    # tissue.
    with_fat = ct(5, 0.3, 0.3)
    with_fat[:, :8] = rng.normal(-105, 10, with_fat[:, :8].shape)
    times_ten = audit_image(measure_image(with_fat * np.int16(10)))
    assert [(finding.code, "far below air" in finding.message) for finding in times_ten] == [
        ("hu_range", True)
    ]
    only_air = np.clip(rng.normal(-990, 80, (8, 30, 30)), -1300, -600).astype(np.int16)
    assert codes(only_air) == [("hu_range", "error")]


@pytest.mark.parametrize("lung", [0.0, 0.2, 0.6])
def test_an_inverted_ct_is_named(lung: float) -> None:
    image = ct(12, lung)
    (finding,) = audit_image(measure_image(-image))
    assert (finding.code, finding.severity.value) == ("hu_range", "error")
    assert "the image is inverted" in finding.message


def test_bone_without_air_around_it_is_not_inverted() -> None:
    rng = np.random.default_rng(13)
    bone = rng.choice([-120.0, 50.0, 350.0, 800.0], p=[0.1, 0.3, 0.4, 0.2], size=(12, 40, 50))
    image = bone + rng.normal(0, 40, bone.shape)
    assert codes(image.astype(np.int16)) == [("no_air", "warning")]
    # Clipping at the upper end does not explain why there is no air.
    clipped = np.minimum(image, 700).astype(np.int16)
    assert codes(clipped) == [("clipped", "warning"), ("no_air", "warning")]
    # Everything outside the body was set to a value of air.
    image[:, :20] = -1024
    assert codes(image.astype(np.int16)) == []


def test_values_without_negated_bone_are_not_inverted() -> None:
    """A magnetic resonance image of 0 to 1000, or a CT with an offset of 1024."""
    rng = np.random.default_rng(14)
    image = rng.choice([100.0, 600.0, 900.0], p=[0.2, 0.3, 0.5], size=(12, 40, 50)) + rng.normal(
        200, 20, (12, 40, 50)
    )
    (finding,) = audit_image(measure_image(image.astype(np.int16)))
    assert "inverted" not in finding.message


@pytest.mark.parametrize("high", [1.0, 3.0])
def test_hu_divided_by_1000_and_clipped_are_named(high: float) -> None:
    image_hu = ct(5)
    image_hu[0, 0, :9] = 2900
    stored = np.clip(image_hu / 1000, -1, high).astype(np.float32)
    (finding,) = audit_image(measure_image(stored))
    assert "HU divided by 1000" in finding.message
    assert "data.hu_slope=1000 corrects them" in finding.cure
    again = HuScale(1000.0, 0.0).apply(stored)
    assert "error" not in {severity for _, severity in codes(again)}


def test_the_advice_for_divided_hu_replaces_the_slope_that_was_given() -> None:
    image_hu = ct(5)
    image_hu[0, 0, :9] = 2900
    divided = (image_hu / 1000).astype(np.float32)
    facts = replace(measure_image(divided), scale=HuScale(0.001, 0.0))
    (finding,) = audit_image(facts)
    assert "HU divided by 1000" in finding.message
    assert "data.hu_slope=1 corrects them" in finding.cure, "the file holds HU"


@pytest.mark.parametrize("padding", [-2048, -3024])
def test_hu_divided_by_1000_are_named_beside_the_padding_of_a_scanner(padding: int) -> None:
    image_hu = ct(5)
    image_hu[0, 0, :9] = 2900
    image_hu[:, :2] = padding
    stored = (image_hu / 1000).astype(np.float32)
    (finding,) = audit_image(measure_image(stored))
    assert "data.hu_slope=1000 corrects them" in finding.cure
    again = HuScale(1000.0, 0.0).apply(stored)
    assert "error" not in {severity for _, severity in codes(again)}


@pytest.mark.parametrize("value", [-1500, -2000, -2048, -3024])
def test_padding_below_air_is_noted(value: int) -> None:
    image = ct(5)
    image[:, 5:15] = value
    (finding,) = audit_image(measure_image(image))
    assert (finding.code, finding.severity) == ("padding", Severity.information)
    assert f"25.0% of the voxels hold {value}," in finding.message
    image[:, 5:15] += np.random.default_rng(0).integers(-100, 100, (12, 10, 50)).astype(np.int16)
    (finding,) = audit_image(measure_image(image))
    assert "25.0% of the voxels lie below -1100," in finding.message


def test_a_filled_value_is_told_and_that_of_a_quantised_scan_is_not() -> None:
    image = ct(6)
    assert codes(image // 12 * 12) == []
    image[:, :2] = 0
    assert codes(image) == [("padding", "warning")]


@pytest.mark.parametrize(
    ("low_hu", "high_hu", "found"),
    [
        (-1024, 3071, []),
        (-1000, 3071, [("clipped", "information")]),
        (-990, 3071, [("clipped", "warning")]),
        (-1000, 400, [("clipped", "information"), ("clipped", "warning")]),
        (-200, 250, [("clipped", "warning"), ("clipped", "warning")]),
    ],
)
def test_clipping_is_told_where_it_costs_something(
    low_hu: int, high_hu: int, found: list[tuple[str, str]]
) -> None:
    image = np.clip(ct(7), low_hu, high_hu)
    assert codes(image) == found
    image[:, :4] = -3024
    assert codes(image) == [("padding", "information"), *found]


def test_a_crop_without_air_is_told() -> None:
    assert codes(np.where(ct(8) < -500, ct(9) // 8, ct(8)).astype(np.int16)) == [
        ("no_air", "warning")
    ]


def test_one_scan_has_one_hash_in_any_storage_order() -> None:
    image = ct(10)
    stored = np.ascontiguousarray(image[::-1].transpose(2, 0, 1))
    assert hash_voxels(stored.transpose(1, 2, 0)[::-1]) == hash_voxels(image)
    assert hash_voxels(image.reshape(12, 50, 40)) != hash_voxels(image)
    image[3, 2, 1] += 1
    assert hash_voxels(image) != hash_voxels(ct(10))


def test_the_advice_takes_the_place_of_a_scale_that_was_given() -> None:
    """`data.hu_offset=-1024` corrects some scans of a table and spoils the others."""
    given = HuScale(1.0, -1024.0)
    (finding,) = check_channels([given.apply(ct(2))], ["ct"], scale=given).findings
    assert (finding.code, "data.hu_offset=0 corrects them" in finding.cure) == ("hu_offset", True)
    windowed = np.clip((ct(3) + 1250) / 1500, 0, 1).astype(np.float32)
    advice = []
    for scale in (HuScale(), HuScale(0.5, 0.25)):
        (finding,) = check_channels([windowed], ["ct"], scale=scale).findings
        advice.append([float(text) for text in re.findall(r"data\.hu_\w+=(\S+)", finding.cure)])
    (slope, offset), composed = advice
    assert composed == pytest.approx([0.5 * slope, 0.25 * slope + offset], rel=1e-4)


@pytest.mark.parametrize("factor", [1 / 1000, 100.0])
def test_percentiles_of_fractions_and_large_values_are_those_of_the_image(factor: float) -> None:
    """A magnetic resonance image that was scaled to about 0 to 1, or beyond 16 bits."""
    mr = (factor * np.random.default_rng(4).gamma(2.0, 200.0, (8, 30, 30))).astype(np.float32)
    (facts,) = check_channels([mr], ["mr"]).facts
    expected = np.percentile(mr, [1, 50, 99])
    measured = [facts.summary()[name] for name in ("p01", "p50", "p99")]
    assert measured == pytest.approx(expected.tolist(), abs=0.01 * float(mr.max()))
    assert measured[1] == pytest.approx(expected[1], rel=0.01)
    whole = np.rint(mr / factor)  # several channels are always float32
    (facts,) = check_channels([whole], ["mr"]).facts
    assert facts.summary() == measure_image(whole.astype(np.int16)).summary()


def test_the_modality_decides_which_findings_apply() -> None:
    mr = np.random.default_rng(4).gamma(2.0, 200.0, (8, 30, 30)).astype(np.float32)
    facts = [measure_image(image) for image in (mr, ct(11), np.zeros_like(mr))]
    assert audit_channels(facts[:1], ["mr"]) == []
    assert [finding.code for finding in audit_channels(facts[:1], ["ct"])] == ["hu_range"]
    found = audit_channels([*facts, facts[0]], ["mr", "ct", "other", "ct"])
    assert [(finding.code, finding.message.partition(":")[0]) for finding in found] == [
        ("hu_range", "image_2"),
        ("hu_range", "image_3"),
    ]


@pytest.mark.parametrize(
    ("slope", "offset", "dtype", "advice"),
    [
        (1000.0, 0.0, np.float32, "data.hu_slope=1000 corrects them"),
        (1500.0, -1250.0, np.float32, "data.hu_slope=1500 data.hu_offset=-1250 "),
        (750.0, -500.0, np.float32, "data.hu_slope=750 data.hu_offset=-500 "),
        (1500 / 255, -1250.0, np.uint8, "data.hu_slope=5.88235 data.hu_offset=-1250 "),
    ],
)
def test_the_advice_for_a_small_range_follows_from_it_and_works(
    slope: float, offset: float, dtype: type, advice: str
) -> None:
    """HU / 1000, and a window of -1250 to 250 HU scaled to [0, 1], to [-1, 1] and to 8 bits."""
    image_hu = ct(5)
    if offset:
        image_hu = np.clip(image_hu, -1250, 250)
    stored = ((image_hu - offset) / slope).astype(dtype)
    (finding,) = audit_image(measure_image(stored))
    assert advice in str(finding)
    again = HuScale(slope, offset).apply(stored)
    assert "error" not in {finding.severity.value for finding in audit_image(measure_image(again))}


def test_only_channels_of_ct_can_have_values_that_are_not_hu() -> None:
    right, wrong = measure_image(ct()), measure_image(ct() + np.int16(1024))
    constant = measure_image(np.zeros((2, 3, 4), np.int16))
    assert are_hu([right, constant], ["ct", "mr"])
    assert are_hu([wrong, constant], ["mr", "mr"])
    assert not are_hu([right, constant], ["ct", "ct"])
    assert not are_hu([constant, wrong], ["mr", "ct"])
