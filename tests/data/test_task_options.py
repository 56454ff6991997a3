"""Tasks: channels, regions, the ignore label, and the forms of older files."""

from __future__ import annotations

import json
from typing import Any

import hydra
import pytest
from pydicom.sr._concepts_dict import concepts

from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.config.schema import EvaluateConfig, PrepareConfig
from medseg.data.reference import file_values
from medseg.task import Channel, Region, Task, is_side_pair
from medseg.task_options import make_task
from medseg.training.options import TrainConfig

TWO_CHANNELS = (
    "task.channels=[{modality: ct, window_hu: [-1000, 400]}, {modality: mr, normalise: zscore}]"
)


def config(*overrides: str, root: str = "train", schema: type = TrainConfig) -> Any:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return to_config(
            hydra.compose(root, [*overrides, *(["run_dir=x"] if root == "train" else [])]), schema
        )


def test_window_hu_is_short_for_one_ct_channel() -> None:
    task = make_task(config().task)
    assert task.channels == (Channel("ct", (-1000.0, 400.0), "window"),)
    assert task.is_ct
    # The form in weights and checkpoints of version 0.1.
    older = task.to_dict()
    older["window_hu"] = list(older.pop("channels")[0]["window_hu"])
    del older["volume_ml"], older["ignore_label"], older["codes"], older["colours"]
    assert Task.from_dict(older).channels == task.channels
    assert Task.from_dict(task.to_dict()) == task


def test_codes_and_colours_of_labels() -> None:
    task = make_task(
        config(
            "task.codes.left_lung=[39607008,Lung,left]", "task.colours={right_lung: '#fb923c'}"
        ).task
    )
    assert task.codes == {
        "left_lung": ("39607008", "Lung", "left"),
        "right_lung": ("39607008", "Lung", "right"),
    }
    assert task.colours == {"right_lung": "#fb923c"}
    assert Task.from_dict(json.loads(json.dumps(task.to_dict()))) == task


@pytest.mark.parametrize("name", ["abdomen", "heart", "kidneys", "lungs", "spine"])
def test_codes_are_those_of_the_standard(name: str) -> None:
    """pydicom holds the SNOMED CT codes that DICOM uses, with their meanings."""
    task = make_task(config(f"task={name}").task)
    assert len(task.codes) >= len(task.labels) - 1
    for label, (code, meaning, *side) in task.codes.items():
        assert meaning in [known[code][0] for known in concepts["SCT"].values() if code in known]
        assert side == [word for word in ("left", "right") if word in label]


def test_several_channels_in_their_order() -> None:
    task = make_task(config("task.window_hu=null", TWO_CHANNELS).task)
    assert task.channels == (
        Channel("ct", (-1000.0, 400.0), "window"),
        Channel("mr", None, "zscore"),
    )
    assert Task.from_dict(task.to_dict()) == task


def test_a_task_without_regions_has_one_stage() -> None:
    task = make_task(config("task.regions=null").task)
    assert task.regions == ()
    assert Task.from_dict(task.to_dict()) == task


@pytest.mark.parametrize(
    ("labels", "regions", "has_sides"),
    [
        ({"left_kidney": 1, "liver": 2}, (), True),
        ({"Kidney-Right": 1}, (), True),
        ({"Left kidney": 1}, (), True),
        ({"bright_spot": 1, "cleft": 2}, (), False),
        ({"Heart": 1, "Lung_L": 2, "Lung_R": 3}, (), True),
        ({"LungLeft": 1, "Heart": 2}, (), True),
        ({"Lt Lung": 1, "Rt Lung": 2}, (), True),
        ({"vessel_l": 1, "vessel_v": 2}, (), False),
        ({"lung": 1}, (Region("lung", ("lung",), "left"),), True),
    ],
)
def test_sides_come_from_regions_or_from_words_of_labels(
    labels: dict[str, int], regions: tuple[Region, ...], has_sides: bool
) -> None:
    """`bright_spot` names no side, and a task without regions may have sides."""
    assert Task("t", labels, regions, (Channel(),)).has_sides == has_sides


def test_sides_may_be_letters() -> None:
    labels = {"Heart": 1, "Lung_L": 2, "Lung_R": 3}
    task = Task("t", labels, (), (Channel(),))
    assert (task.side_values("left"), task.side_values("right")) == ((2,), (3,))
    left = Region("Lung_L", ("Lung_L",), "left")
    assert is_side_pair(left, Region("Lung_R", ("Lung_R",), "right"))
    assert not is_side_pair(left, Region("Kidney_R", ("Lung_R",), "right"))


@pytest.mark.parametrize(
    ("root", "schema"),
    [("train", TrainConfig), ("prepare", PrepareConfig), ("evaluate", EvaluateConfig)],
)
def test_label_values_are_those_of_the_task_unless_given(root: str, schema: type) -> None:
    given = ["pred=a", "ref=b", "output=c"] if root == "evaluate" else []
    heart = config("task=heart", *given, root=root, schema=schema)
    assert file_values(heart.data.label_values) == {1: "heart"}
    ignoring = config(
        "task=heart",
        "task.ignore_label=255",
        "+data.label_values={heart: 7}",
        *given,
        root=root,
        schema=schema,
    )
    assert file_values(ignoring.data.label_values) == {7: "heart", 255: "ignore"}
    assert make_task(ignoring.task).values == {"heart": 1, "ignore": 255}
