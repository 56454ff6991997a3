"""From stored values to HU: rescaling, signs, padding, damaged headers; and enhanced CT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dicom_files import ALONG_Z, SPACING_MM, enhanced, header, pack_frames, place, save, save_stored
from io_volumes import finding_texts, make_hu
from pydicom.dataset import Dataset
from pydicom.uid import EnhancedMRImageStorage, RLELossless

from medseg.errors import UserError
from medseg.io.dicom.frames import NoSlice, read_frames
from medseg.io.read import read_image
from medseg.preprocess.intensity import HU_LIMITS

HEIGHTS = list(2.5 * np.arange(5))


def said(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        read_image(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_each_slice_has_its_own_slope_and_intercept(tmp_path: Path) -> None:
    stored = np.random.default_rng(0).integers(0, 900, (5, 7, 9), dtype=np.uint16)
    slopes, intercepts = [1, 2, 3, 1, 4], [-1024, -1000, -900, 0, -1024]
    volume = read_image(
        save_stored(tmp_path / "whole", stored, RescaleSlope=slopes, RescaleIntercept=intercepts)
    )
    assert volume.array.dtype == np.int16
    assert np.array_equal(
        volume.array, stored * np.reshape(slopes, (5, 1, 1)) + np.reshape(intercepts, (5, 1, 1))
    )
    slopes[2] = 0.5
    volume = read_image(
        save_stored(tmp_path / "half", stored, RescaleSlope=slopes, RescaleIntercept=intercepts)
    )
    assert volume.array.dtype == np.float32
    assert np.array_equal(
        volume.array, stored * np.reshape(slopes, (5, 1, 1)) + np.reshape(intercepts, (5, 1, 1))
    )


def test_without_rescale_the_values_are_taken_for_hu_and_that_is_said(tmp_path: Path) -> None:
    volume = read_image(
        save_stored(tmp_path / "d", make_hu(), RescaleSlope=None, RescaleIntercept=None)
    )
    assert np.array_equal(volume.array, make_hu())
    assert finding_texts(volume) == (
        "slices without rescale slope and intercept: their values are assumed to be HU",
    )


@pytest.mark.parametrize(
    ("fields", "offset_hu", "said"),
    [
        ({"RescaleSlope": None}, -1024, "slices without rescale slope: 1 is assumed"),
        ({"RescaleIntercept": None}, 0, "slices without rescale intercept: 0 is assumed"),
    ],
)
def test_the_half_of_a_rescale_is_applied_and_the_missing_half_said(
    fields: dict[str, None], offset_hu: int, said: str, tmp_path: Path
) -> None:
    volume = read_image(save_stored(tmp_path / "d", make_hu(), **fields))
    assert np.array_equal(volume.array, make_hu() + offset_hu)
    assert finding_texts(volume) == (said,)


def test_slices_that_lack_different_halves_of_a_rescale_are_refused(tmp_path: Path) -> None:
    folder = save_stored(
        tmp_path / "d", make_hu(), RescaleSlope=None, RescaleIntercept=[-1024, None, 0, None, 0]
    )
    assert "expected rescale slope and intercept in every slice or in none" in said(folder)


@pytest.mark.parametrize("keyword", ["RescaleSlope", "RescaleIntercept"])
def test_without_rescale_in_some_slices_it_is_refused(tmp_path: Path, keyword: str) -> None:
    """They would lie 1024 HU beside the others."""
    folder = save_stored(tmp_path / "d", make_hu(), **{keyword: [1, None, 1, None, 1]})
    assert said(folder) == (
        f"{folder}: expected rescale slope and intercept in every slice or in none, but '1' "
        "and 1 more lack them; export the series "
        "again."
    )


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"RescaleSlope": 0}, "a slope of 0"),
        ({"RescaleType": "Z_EFF"}, "Z_EFF"),
        ({"RescaleType": "MGML"}, "MGML"),
        ({"ModalityLUTSequence": [[Dataset()]] * 5}, "a table of values"),
    ],
)
def test_values_that_are_no_hu_are_refused_by_name(
    tmp_path: Path, fields: dict[str, Any], what: str
) -> None:
    folder = save_stored(tmp_path / "d", make_hu(), **fields)
    assert said(folder) == (
        f"{folder / '0'} and 4 more: expected a rescale slope and intercept to HU, but the "
        f"slices have {what}; choose or export a series in HU."
    )


@pytest.mark.parametrize(
    ("dtype", "bits", "intercept", "stored", "tag", "expected_hu"),
    [
        ("i2", 16, -1024, -2000, -2000, -3024),  # GE
        ("i2", 16, 0, -2048, -2048, -2048),
        ("i2", 16, -1024, -2000, 63536, -3024),  # the tag alone is unsigned
        ("i2", 16, 0, -3024, None, -3024),
        ("u2", 16, -1024, 63536, 63536, -3024),  # -2000 written as unsigned
        ("u2", 16, -1024, 63536, None, -3024),
        ("u2", 12, -1024, 63536, 63536, -3024),  # into bits that are not used
        ("u2", 16, -1024, 63488, None, -3072),
        ("u2", 16, -1024, 0, 0, -1024),
        (
            "u2",
            16,
            -1024,
            60000,
            60000,
            -1024,
        ),  # denser than anything: air, because the tag says so
        ("i2", 16, 0, 32767, 32767, -1024),
        ("u2", 16, -1024, 1024, 1024, 0),  # water, whatever the tag says
    ],
)
def test_padding_of_both_signs(
    tmp_path: Path,
    dtype: str,
    bits: int,
    intercept: int,
    stored: int,
    tag: int | None,
    expected_hu: int,
) -> None:
    values = (make_hu() // 2 - intercept).astype(dtype)
    expected = values.astype(int) + intercept
    values[:, :2], expected[:, :2] = stored, expected_hu
    fields: dict[str, Any] = {"RescaleIntercept": intercept, "BitsStored": bits}
    if tag is not None:
        fields["PixelPaddingValue"] = tag - 65536 if dtype == "i2" and tag > 32767 else tag
    volume = read_image(save_stored(tmp_path / "d", values, **fields))
    assert np.array_equal(volume.array, expected)
    assert np.clip(volume.array, *HU_LIMITS)[:, :2].max() <= max(-1024, expected_hu)


def test_a_range_of_padding(tmp_path: Path) -> None:
    values = (make_hu() + 1024).astype(np.uint16)
    values[:, 0], values[:, 1] = 50000, 50010
    volume = read_image(
        save_stored(tmp_path / "d", values, PixelPaddingValue=50000, PixelPaddingRangeLimit=50010)
    )
    assert (volume.array[:, :2] == -1024).all()
    assert np.array_equal(volume.array[:, 2:], make_hu()[:, 2:])


def test_the_full_range_of_16_bits_with_a_fine_slope_is_no_padding(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 65536, (5, 7, 9)).astype(np.uint16)
    volume = read_image(save_stored(tmp_path / "d", values, RescaleSlope=0.0625))
    assert np.array_equal(volume.array, values * 0.0625 - 1024)


def test_overlays_in_unused_bits_are_cleared(tmp_path: Path) -> None:
    values = (make_hu().clip(-1024, 3071) + 1024).astype(np.uint16)
    values[:, 2:4] |= 0x4000
    volume = read_image(save_stored(tmp_path / "d", values, BitsStored=12))
    assert np.array_equal(volume.array, make_hu())


MR: dict[str, Any] = {
    "Modality": "MR", "SOPClassUID": "1.2.840.10008.5.1.4.1.1.4", "RescaleSlope": None,
    "RescaleIntercept": None
}  # fmt: skip


def test_overlays_of_an_mr_are_cleared_and_its_large_values_stay(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 4096, (5, 7, 9)).astype(np.uint16)
    with_overlay = values.copy()
    with_overlay[:, 2:4] |= 0x4000
    volume = read_image(
        save_stored(tmp_path / "d", with_overlay, BitsStored=12, **MR), modality="mr"
    )
    assert np.array_equal(volume.array, values)
    # Of 16 bits, where none is left for an overlay: no value of an MR is meant as negative.
    large = (values * 16).astype(np.uint16)
    assert np.array_equal(
        read_image(save_stored(tmp_path / "e", large, **MR), modality="mr").array, large
    )


def test_padding_of_an_mr_is_its_background_whatever_its_value(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(100, 900, (5, 7, 9)).astype(np.int16)
    padded = values.copy()
    padded[:, :2] = -2000
    volume = read_image(
        save_stored(tmp_path / "d", padded, PixelPaddingValue=-2000, **MR), modality="mr"
    )
    assert (volume.array[:, :2] == 0).all()
    assert np.array_equal(volume.array[:, 2:], values[:, 2:])


def test_signed_values_without_their_sign_bits(tmp_path: Path) -> None:
    image_hu = make_hu().clip(-1024, 2000)
    cut = (image_hu.astype(np.uint16) & 0x0FFF).astype(np.int16)
    assert np.array_equal(
        read_image(save_stored(tmp_path / "d", cut, BitsStored=12, RescaleIntercept=0)).array,
        image_hu,
    )
    # With them, values may exceed what BitsStored promises.
    volume = read_image(save_stored(tmp_path / "e", make_hu(), BitsStored=12, RescaleIntercept=0))
    assert np.array_equal(volume.array, make_hu())


@pytest.mark.parametrize(("bits", "dtype"), [(8, np.uint8), (32, np.int32)])
def test_other_sizes_of_a_pixel(tmp_path: Path, bits: int, dtype: type) -> None:
    values = np.random.default_rng(0).integers(0, 200, (5, 8, 10)).astype(dtype)
    volume = read_image(save_stored(tmp_path / "d", values, RescaleIntercept=-1024))
    assert np.array_equal(volume.array, values.astype(int) - 1024)


def test_a_map_of_floating_point_numbers_is_not_called_damaged(tmp_path: Path) -> None:
    dataset = header(np.zeros((7, 9), np.uint32))
    place(dataset, (0, 0, 0))
    dataset.FloatPixelData = dataset.PixelData
    for keyword in ("PixelData", "BitsStored", "HighBit", "PixelRepresentation"):
        delattr(dataset, keyword)
    (image,) = read_frames(save(dataset, tmp_path / "map.dcm"))
    assert isinstance(image, NoSlice)
    assert image.reason == (
        "its pixels are floating-point numbers, which medseg does not read; choose another series."
    )


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        (
            "short pixels",
            {"Rows": 70},
            ("the DICOM file is truncated or damaged: expected 1 x 70 x 9 pixels of 16 bits; copy "
             "or export it again."),
        ),
        (
            "forged size",
            {"Rows": 60000, "Columns": 60000},
            ("expected slices of at most 67108864 pixels, but the header says 60000 x 60000; "
             "it is damaged: copy or export the DICOM series again."),
        ),
        (
            "bits",
            {"BitsAllocated": 12},
            ("expected slices of 8, 16 or 32 bits a pixel, but the header says 7 x 9 pixels of 12 "
             "bits with 16 used up to bit 15; export the DICOM series again."),
        ),
        (
            "spacing",
            {"PixelSpacing": ["0", "0"]},
            ("expected two positive numbers in PixelSpacing, got (0.0, 0.0); export the series "
             "again."),
        ),
        (
            "negative spacing",
            {"PixelSpacing": ["-0.8", "0.6"]},
            ("expected two positive numbers in PixelSpacing, got (-0.8, 0.6); export the series "
             "again."),
        ),
        (
            "no number",
            {"PixelSpacing": ["nan", "0.6"]},
            ("the DICOM file cannot be read (PixelSpacing should hold 2 numbers and holds [nan, "
             "0.6]); it is damaged, copy or export it again."),
        ),
        (
            "no spacing",
            {"PixelSpacing": None},
            "expected two positive numbers in PixelSpacing, got None; export the series again.",
        ),
        (
            "position",
            {"ImagePositionPatient": ["1", "2"]},
            ("the DICOM file cannot be read (ImagePositionPatient should hold 3 numbers and holds "
             "[1, 2]); it is damaged, copy or export it again."),
        ),
        (
            "flat axes",
            {"ImageOrientationPatient": [1, 0, 0, 1, 0, 0]},
            ("expected rows and columns at right angles, but ImageOrientationPatient is (1.0, 0.0, "
             "0.0, 1.0, 0.0, 0.0); export the DICOM series again."),
        ),
        (
            "sheared axes",
            {"ImageOrientationPatient": [1, 0, 0, 0.02, 0.9998, 0]},
            ("expected rows and columns at right angles, but ImageOrientationPatient is (1.0, 0.0, "
             "0.0, 0.02, 0.9998, 0.0); export the DICOM series again."),
        ),
        (
            "no image",
            {"Rows": 0},
            ("the DICOM file is truncated or damaged: its header ends before an image; copy or "
             "export it again."),
        ),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Invalid value for VR DS")  # pydicom's, when it writes
def test_damaged_headers(tmp_path: Path, name: str, change: dict[str, Any], sentence: str) -> None:
    for index in range(2):
        dataset = header(make_hu()[index])
        place(dataset, (0, 0, 2.5 * index))
        for keyword, value in change.items():
            if value is None:
                delattr(dataset, keyword)
            else:
                setattr(dataset, keyword, value)
        save(dataset, tmp_path / name / f"{index}")
    assert said(tmp_path / name) == f"{tmp_path / name / '0'} and 1 more: {sentence}"


class TestEnhanced:
    """One file with all slices."""

    places = tuple((-120.25, 33.5, 2.5 * index) for index in (3, 0, 4, 1, 2))

    def test_frames_are_sorted_and_rescaled_one_by_one(self, tmp_path: Path) -> None:
        stored = np.random.default_rng(0).integers(0, 900, (5, 7, 9), dtype=np.uint16)
        rescale = [(1, -1024), (2, -1000), (1, 0), (3, -900), (1, -1024)]
        save(enhanced(stored, self.places, rescale), tmp_path / "e.dcm")
        volume = read_image(tmp_path / "e.dcm")
        values = stored.astype(int)
        expected = np.stack(
            [values[index] * rescale[index][0] + rescale[index][1] for index in (1, 3, 4, 0, 2)]
        )
        assert np.array_equal(volume.array, expected)
        assert volume.array.dtype == np.int16
        assert volume.grid.origin_xyz_mm == pytest.approx((-120.25, 33.5, 0.0))
        assert volume.grid.spacing_mm == pytest.approx((2.5, *SPACING_MM))
        assert np.array_equal(read_image(tmp_path).array, expected)

    @pytest.mark.parametrize(
        "syntax", ["JPEGLosslessProcess14_1", "JPEG2000Lossless", "RLELossless"]
    )
    def test_compressed(self, tmp_path: Path, syntax: str) -> None:
        stored = np.random.default_rng(0).integers(0, 4000, (5, 16, 10), dtype=np.uint16)
        dataset = enhanced(stored, self.places, [(1, -1024 - index) for index in range(5)])
        file = save(dataset, tmp_path / "plain.dcm")
        plain = read_image(file).array
        (tmp_path / "packed").mkdir()
        if syntax == "RLELossless":
            dataset.compress(RLELossless)
            dataset.save_as(tmp_path / "packed" / "e")
        else:
            pack_frames(file, tmp_path / "packed" / "e", syntax)
        assert np.array_equal(read_image(tmp_path / "packed").array, plain)

    def test_oblique_and_several_files_of_one_series(self, tmp_path: Path) -> None:
        axes = ((0.8, 0.6, 0.0), (-0.6, 0.8, 0.0))
        image_hu = make_hu((6, 7, 9))
        for part in range(2):
            frames = image_hu[3 * part : 3 * part + 3]
            places = [(1.0, 2.0, 2.5 * (3 * part + index)) for index in range(3)]
            save(enhanced(frames, places, [(1, 0)] * 3, axes), tmp_path / f"{part}")
        volume = read_image(tmp_path)
        assert np.array_equal(volume.array, image_hu)
        assert np.allclose(volume.grid.direction, np.transpose([*axes, (0, 0, 1)]))

    def test_stacks_of_one_file_are_told_apart(self, tmp_path: Path) -> None:
        dataset = enhanced(
            make_hu((6, 7, 9)),
            [(0, 0, 5.0 * (index % 3)) for index in range(6)],
            [(1, 0)] * 6,
            SeriesNumber=9,
        )
        for index, group in enumerate(dataset.PerFrameFunctionalGroupsSequence):
            group.FrameContentSequence[0].TemporalPositionIndex = 1 + index // 3
        save(dataset, tmp_path / "e.dcm")
        size = "(3 slices, 5 x 0.8 x 0.648 mm)"
        assert (
            f"holds 2: series=9/1 time point 1 {size}; series=9/2 time point 2 {size}; choose one"
            in said(tmp_path)
        )
        assert np.array_equal(read_image(tmp_path / "e.dcm", "9/2").array, make_hu((6, 7, 9))[3:])

    @pytest.mark.parametrize("modality", ["CT", "MR"])
    def test_frames_that_differ_in_their_type_alone_are_told_apart(
        self, modality: str, tmp_path: Path
    ) -> None:
        image = make_hu((6, 7, 9))
        places = [(0, 0, 5.0 * (index % 3)) for index in range(6)]
        # All frames share the image type of the file.
        dataset = enhanced(image, places, [(1, 0)] * 6, SeriesNumber=9, Modality=modality)
        for index, group in enumerate(dataset.PerFrameFunctionalGroupsSequence):
            (item,) = group.CTImageFrameTypeSequence
            item.FrameType = ["ORIGINAL", "PRIMARY", "AXIAL", ["NONE", "OTHER"][index // 3]]
            del group.CTImageFrameTypeSequence
            setattr(group, f"{modality}ImageFrameTypeSequence", [item])
        if modality == "MR":
            dataset.SOPClassUID = EnhancedMRImageStorage
        save(dataset, tmp_path / "e.dcm")
        with pytest.raises(UserError, match=r"image type ORIGINAL\\PRIMARY\\AXIAL\\OTHER"):
            read_image(tmp_path / "e.dcm", modality=modality.lower())
        stack = read_image(tmp_path / "e.dcm", "9/2", modality=modality.lower())
        assert np.array_equal(stack.array, image[3:])

    def test_a_missing_frame_and_a_tilt(self, tmp_path: Path) -> None:
        places = [(0.0, 0.2 * 2.0 * index, 2.0 * index) for index in range(12) if index != 5]
        save(enhanced(make_hu((11, 7, 9)), places, [(1, 0)] * 11), tmp_path / "e.dcm")
        remarks = finding_texts(read_image(tmp_path))
        assert remarks[0] == (
            "slices missing: 1 of 12, such as between 'e.dcm' frame 5 and 'e.dcm' frame 6; "
            "they were interpolated linearly"
        )
        assert remarks[1].startswith("the gantry was tilted by 11.3°")

    def test_localiser_frames_and_frames_without_a_place(self, tmp_path: Path) -> None:
        dataset = enhanced(
            make_hu(), [(0, 0, 2.5 * index) for index in range(5)], [(1, 0)] * 5, SeriesNumber=9
        )
        dataset.PerFrameFunctionalGroupsSequence[0].CTImageFrameTypeSequence[
            0
        ].FrameType = "ORIGINAL\\PRIMARY\\LOCALIZER\\NONE"
        save(dataset, tmp_path / "e.dcm")
        volume = read_image(tmp_path)
        assert np.array_equal(volume.array, make_hu()[1:])
        assert finding_texts(volume) == (
            "left out, because they are not slices of the scan: 1 x localiser (series 9)",
        )

    def test_frames_without_groups_are_refused_by_name(self, tmp_path: Path) -> None:
        dataset = header(make_hu(), NumberOfFrames=5, SeriesNumber=9)
        place(dataset, (0, 0, 0), ALONG_Z)
        save(dataset, tmp_path / "e.dcm")
        assert said(tmp_path) == (
            f"{tmp_path}: expected a CT series of at least two slices, but found only 1 x "
            "multi-frame image without a position for "
            "each frame (series 9); give the folder of a CT series."
        )
