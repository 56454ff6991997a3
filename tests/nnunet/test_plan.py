"""Plans of nnU-Net: what is read, and what is refused in one sentence."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.nnunet_reference import described_network, toys
from medseg.nnunet.plan import PlanError, read_plan

Toy = dict[str, Any]


def test_all_toys_are_read() -> None:
    for toy in toys().values():
        plan = read_plan(toy["plans"], toy["dataset"], "3d_fullres")
        assert plan.spacing_mm == tuple(toy["plans"]["configurations"]["3d_fullres"]["spacing"])
        assert plan.transpose == tuple(toy["plans"]["transpose_forward"])


def test_heads_of_regions_follow_the_file_and_paint_their_values() -> None:
    toy = toys()["regions"]
    labels = read_plan(toy["plans"], toy["dataset"], "3d_fullres").labels
    assert labels.num_heads == 3
    assert labels.region_values == (1, 2, 3)
    assert labels.names == {"whole": 1, "core": 2, "rim": 3}


def test_the_ignore_label_is_no_head() -> None:
    toy = toys()["transposed"]
    labels = read_plan(toy["plans"], toy["dataset"], "3d_fullres").labels
    assert labels.num_heads == 5
    assert "ignore" not in labels.names


def test_a_configuration_inherits(toy: Toy) -> None:
    toy["plans"]["configurations"]["3d_lowres"] = {
        "inherits_from": "3d_fullres",
        "spacing": [5.0, 5.0, 5.0],
    }
    plan = read_plan(toy["plans"], toy["dataset"], "3d_lowres")
    assert plan.spacing_mm == (5.0, 5.0, 5.0)
    assert plan.patch_size == (16, 32, 32)


def test_older_and_newer_plans_describe_one_network(toy: Toy) -> None:
    older = read_plan(toy["plans"], toy["dataset"], "3d_fullres").network
    assert older["class"] == "PlainConvUNet"
    assert older["arguments"]["features_per_stage"] == [8, 16, 32]
    assert older["arguments"]["strides"] == [[1, 1, 1], [1, 2, 2], [2, 2, 2]]
    assert older["arguments"].keys() == described_network(8)["arch_kwargs"].keys()


def test_the_reader_decides_the_orientation(toy: Toy) -> None:
    toy["plans"]["image_reader_writer"] = "NibabelIOWithReorient"
    assert read_plan(toy["plans"], toy["dataset"], "3d_fullres").orientation == "RAS"
    toy["dataset"]["image_orientation"] = "LPS"
    assert read_plan(toy["plans"], toy["dataset"], "3d_fullres").orientation == "LPS"


CONFIGURATION = ("plans", "configurations", "3d_fullres")


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ((*CONFIGURATION, "patch_size"), [32, 32], "a 2D network"),
        ((*CONFIGURATION, "previous_stage"), "3d_lowres", "labels of a first network"),
        ((*CONFIGURATION, "inherits_from"), "3d_fullres", "inherits from itself"),
        ((*CONFIGURATION, "spacing"), [0.0, 1.0, 1.0], "spacing: expected a number from"),
        ((*CONFIGURATION, "spacing"), [1.0, float("nan"), 1.0], "spacing: expected a number from"),
        ((*CONFIGURATION, "patch_size"), [16, 30, 32], "no multiple of the product"),
        ((*CONFIGURATION, "patch_size"), [16, 32, 10**6], "patch_size: expected a number from"),
        ((*CONFIGURATION, "normalization_schemes"), ["RGBTo01Normalization"], "RGBTo01"),
        ((*CONFIGURATION, "normalization_schemes"), [], "a list of 1, one for each channel"),
        ((*CONFIGURATION, "resampling_fn_data"), "os.system", "got os.system"),
        ((*CONFIGURATION, "UNet_class_name"), "MyNet", "its network is MyNet"),
        ((*CONFIGURATION, "n_conv_per_stage_decoder"), [10**9, 2], "n_conv_per_stage_decoder"),
        ((*CONFIGURATION, "preprocessor_name"), "Other", "DefaultPreprocessor, got Other"),
        (("plans", "transpose_forward"), [0, 0, 2], "an order of three axes"),
        (("plans", "image_reader_writer"), "NaturalImage2DIO", "got NaturalImage2DIO"),
        (("plans", "configurations"), {}, "has no configuration 3d_fullres, but none at all"),
        (("plans", "foreground_intensity_properties_per_channel"), {}, "expected a mapping"),
        (("dataset", "labels"), {"organ": 1}, "expected background: 0"),
        (("dataset", "labels"), {"background": 0, "organ": 2}, "without a gap"),
        (("dataset", "labels"), {"background": 0, "a": [1, 2], "b": 2}, "one for each region"),
    ],
)
def test_what_does_not_fit_is_refused(
    toy: Toy, place: tuple[str, ...], value: object, words: str
) -> None:
    *path, key = place
    section = toy
    for name in path:
        section = section[name]
    section[key] = value
    with pytest.raises(PlanError, match=words):
        read_plan(toy["plans"], toy["dataset"], "3d_fullres")
