"""Plans of nnU-Net: what is read, and what is refused in one sentence."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.nnunet_reference import described_network, toys
from medseg.nnunet.plan import PlanError, read_plan

Toy = dict[str, Any]


def test_all_toys_are_read() -> None:
    for toy in toys().values():
        name = toy["configuration"]
        plan = read_plan(toy["plans"], toy["dataset"], name)
        spacing_mm = toy["plans"]["configurations"][name]["spacing"]
        assert plan.spacing_mm[-len(spacing_mm) :] == tuple(spacing_mm)
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


def test_a_2d_plan_keeps_the_planes_of_the_scan() -> None:
    toy = toys()["2d"]
    plan = read_plan(toy["plans"], toy["dataset"], "2d")
    assert plan.is_2d
    assert (plan.patch_size, plan.network["divisor"]) == ((1, 24, 16), [1, 4, 4])
    assert plan.for_scan((7.0, 1.0, 1.0)).spacing_mm == (7.0, 1.5, 1.8)


def test_an_older_2d_plan_has_layers_of_planes(toy: Toy) -> None:
    configuration = toy["plans"]["configurations"]["3d_fullres"]
    for key in ("spacing", "patch_size"):
        configuration[key] = configuration[key][1:]
    for key in ("pool_op_kernel_sizes", "conv_kernel_sizes"):
        configuration[key] = [sizes[1:] for sizes in configuration[key]]
    plan = read_plan(toy["plans"], toy["dataset"], "3d_fullres")
    assert plan.network["arguments"]["conv_op"].endswith("Conv2d")
    assert plan.network["arguments"]["norm_op"].endswith("InstanceNorm2d")
    assert plan.network["divisor"] == [1, 4, 4]


def test_a_cascade_has_a_channel_for_each_value_of_a_label_map() -> None:
    toy = toys()["cascade_regions"]
    plan = read_plan(toy["plans"], toy["dataset"], "3d_cascade_fullres")
    assert (plan.previous_stage, plan.previous_values) == ("3d_lowres", (1, 2))
    assert plan.num_inputs == len(plan.channels) + 2 == 4
    assert read_plan(toy["plans"], toy["dataset"], "3d_lowres").num_inputs == 2


def test_labels_of_a_previous_stage_that_torch_resamples_are_refused() -> None:
    toy = toys()["cascade"]
    cascade = toy["plans"]["configurations"]["3d_cascade_fullres"]
    cascade["resampling_fn_seg"] = "resample_torch_fornnunet"
    cascade["resampling_fn_seg_kwargs"] = {"force_separate_z": None}
    with pytest.raises(PlanError, match="of the labels of a previous stage is not supported"):
        read_plan(toy["plans"], toy["dataset"], "3d_cascade_fullres")


def test_older_and_newer_plans_describe_one_network(toy: Toy) -> None:
    older = read_plan(toy["plans"], toy["dataset"], "3d_fullres").network
    assert older["class"] == "PlainConvUNet"
    assert older["arguments"]["features_per_stage"] == [8, 16, 32]
    assert older["arguments"]["strides"] == [[1, 1, 1], [1, 2, 2], [2, 2, 2]]
    assert older["arguments"].keys() == described_network(8)["arch_kwargs"].keys()


@pytest.mark.parametrize(
    ("function", "arguments", "separate_z"),
    [
        ("resample_data_or_seg_to_shape", {}, False),
        ("resample_data_or_seg_to_shape", {"force_separate_z": None}, None),
        ("resample_data_or_seg_to_shape", {"force_separate_z": True}, True),
        ("resample_torch_fornnunet", {}, None),
        ("resample_torch_fornnunet", {"force_separate_z": False}, False),
    ],
)
def test_whether_an_axis_is_resampled_apart_is_by_default_that_of_each_function(
    function: str, arguments: dict[str, Any], separate_z: bool | None, toy: Toy
) -> None:
    """The two functions of nnU-Net have different defaults of one argument."""
    configuration = toy["plans"]["configurations"]["3d_fullres"]
    for key in ("resampling_fn_data", "resampling_fn_probabilities"):
        configuration[key] = function
        configuration[f"{key}_kwargs"] = {"order": 1, **arguments}
    plan = read_plan(toy["plans"], toy["dataset"], "3d_fullres")
    for resampling in (plan.image_resampling, plan.logits_resampling):
        assert (resampling.function, resampling.separate_z) == (function, separate_z)


def test_the_features_of_an_older_plan_double_up_to_its_limit(toy: Toy) -> None:
    configuration = toy["plans"]["configurations"]["3d_fullres"]
    configuration["unet_max_num_features"] = 20
    network = read_plan(toy["plans"], toy["dataset"], "3d_fullres").network
    assert network["arguments"]["features_per_stage"] == [8, 16, 20]


def test_the_reader_decides_the_orientation(toy: Toy) -> None:
    toy["plans"]["image_reader_writer"] = "NibabelIOWithReorient"
    assert read_plan(toy["plans"], toy["dataset"], "3d_fullres").orientation == "RAS"
    toy["dataset"]["image_orientation"] = "LPS"
    assert read_plan(toy["plans"], toy["dataset"], "3d_fullres").orientation == "LPS"


def test_a_long_lineage_of_configurations_is_refused(toy: Toy) -> None:
    configurations = toy["plans"]["configurations"]
    for number in range(3000):
        configurations[f"c{number}"] = {"inherits_from": f"c{number + 1}"}
    configurations["c3000"] = {"inherits_from": "3d_fullres"}
    with pytest.raises(PlanError, match=r"configurations\.c0: inherits from more than 100 others"):
        read_plan(toy["plans"], toy["dataset"], "c0")
    for number in range(101, 3001):
        del configurations[f"c{number}"]
    # c1 inherits from 100 others.
    configurations["c100"] = {"inherits_from": "3d_fullres"}
    del configurations["c0"]
    assert read_plan(toy["plans"], toy["dataset"], "c1").patch_size == (16, 32, 32)


def test_a_path_is_no_previous_stage(toy: Toy) -> None:
    configurations = toy["plans"]["configurations"]
    configurations["../elsewhere"] = {}
    configurations["3d_fullres"]["previous_stage"] = "../elsewhere"
    with pytest.raises(PlanError, match="a configuration that needs no other"):
        read_plan(toy["plans"], toy["dataset"], "3d_fullres")


@pytest.mark.parametrize(("number", "flag"), [(0, False), (1, True)])
def test_a_number_stands_for_a_flag(number: int, flag: bool, toy: Toy) -> None:
    configuration = toy["plans"]["configurations"]["3d_fullres"]
    configuration["use_mask_for_norm"] = [number]
    configuration["resampling_fn_data_kwargs"]["force_separate_z"] = number
    plan = read_plan(toy["plans"], toy["dataset"], "3d_fullres")
    assert plan.channels[0].is_masked is flag
    assert plan.image_resampling.separate_z is flag


CONFIGURATION = ("plans", "configurations", "3d_fullres")
STATISTICS = ("foreground_intensity_properties_per_channel", "0")
NO_HEAD = {"background": 0}
LONG = "a\n" * 500


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ((*CONFIGURATION, "patch_size"), [32, 32], "spacing: expected 2 numbers"),
        ((*CONFIGURATION, "previous_stage"), "3d_lowres", "a configuration that needs no other"),
        ((*CONFIGURATION, "previous_stage"), ["3d_lowres"], "a configuration that needs no other"),
        ((*CONFIGURATION, "inherits_from"), "3d_fullres", "inherits from itself"),
        ((*CONFIGURATION, "inherits_from"), LONG, "or is missing"),
        ((*CONFIGURATION, "use_mask_for_norm"), ["false"], "use_mask_for_norm: expected true"),
        ((*CONFIGURATION, "resampling_fn_data_kwargs"), {"mode": LONG}, "the modes"),
        (
            (*CONFIGURATION, "resampling_fn_data_kwargs"),
            {"order": LONG},
            "order: expected a number",
        ),
        ((*CONFIGURATION, "spacing"), [0.0, 1.0, 1.0], "spacing: expected a number from"),
        ((*CONFIGURATION, "spacing"), [1.0, float("nan"), 1.0], "spacing: expected a number from"),
        ((*CONFIGURATION, "spacing"), [True, 1.0, 1.0], "spacing: expected a number from"),
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
        pytest.param(
            ("plans", *STATISTICS, "mean"), 10**400, "mean: expected a number from", id="huge mean"
        ),
        (("plans", *STATISTICS, "std"), float("inf"), "std: expected a number from"),
        (("dataset", "labels"), {"organ": 1}, "expected background: 0"),
        (("dataset", "labels"), {"background": 0, LONG: "1"}, "expected a number from"),
        (("dataset", "labels"), {"background": 0, LONG: [1, "2"]}, "one for each region"),
        (("dataset", "labels"), dict.fromkeys(map(str, range(500)), 9) | NO_HEAD, "without a gap"),
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
    with pytest.raises(PlanError, match=words) as refused:
        read_plan(toy["plans"], toy["dataset"], "3d_fullres")
    # Texts of a foreign plan are cut.
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 250


@pytest.mark.parametrize(
    ("plans", "dataset", "begin"),
    [
        ([], {}, "plans.json as a whole: expected a mapping"),
        ({"configurations": {}}, [], "dataset.json: expected a mapping"),
        ({"configurations": {}}, {}, "plans.json has no configuration 3d_fullres"),
    ],
)
def test_the_sentence_names_the_file_once(plans: object, dataset: object, begin: str) -> None:
    with pytest.raises(PlanError) as refused:
        read_plan(plans, dataset, "3d_fullres")
    assert refused.value.sentence.startswith(begin)


def test_the_sentence_about_labels_names_their_file(toy: Toy) -> None:
    toy["dataset"]["labels"] = {"organ": 1}
    with pytest.raises(PlanError) as refused:
        read_plan(toy["plans"], toy["dataset"], "3d_fullres")
    assert refused.value.sentence.startswith("labels in dataset.json: expected background: 0;")
