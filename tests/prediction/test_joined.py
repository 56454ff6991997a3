"""Joined models: values of the labels, order of painting, names of steps and messages."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from medseg.errors import UserError
from medseg.findings import warnings_of
from medseg.geometry.grid import VoxelGrid
from medseg.inference.options import InferenceOptions
from medseg.inference.segmentation import NO_LABEL, Segmentation
from medseg.io.volume import Volume
from medseg.prediction.joined import JoinedModels, join_values
from medseg.task import Channel, Task

CPU = torch.device("cpu")
GRID = VoxelGrid((2, 2, 2), (1.0, 1.0, 1.0))


@dataclass(frozen=True)
class Painter:
    """Model that marks the voxels of one slice with each of its labels."""

    task: Task
    slices: tuple[int, ...]
    keeps_values: bool = True
    precision: str = "fp32"
    device: torch.device = CPU
    options: InferenceOptions = field(default_factory=InferenceOptions)
    steps: tuple[str, ...] = ("segment",)

    @property
    def checkpoints(self) -> dict[str, dict[str, str]]:
        return {"3d_fullres": {self.task.name: "sha256"}}

    def segment(self, volume: Volume, _: Any = (), **options: Any) -> Segmentation:
        options["on_step"]("segment")
        labels = np.zeros(volume.array.shape, dtype=np.uint8)
        for value, number in enumerate(self.slices, start=1):
            labels[number] = value
        findings = warnings_of("empty_result", [] if self.slices else [NO_LABEL])
        return Segmentation(labels, findings=findings, durations_s={"segment": 1.0})


def painter(labels: list[str], *slices: int, modality: str = "ct") -> Painter:
    values = {name: value for value, name in enumerate(labels, start=1)}
    return Painter(Task("+".join(labels), values, (), (Channel(modality, (0, 1)),)), slices)


def joined(*parts: Painter, **label_values: int) -> JoinedModels:
    names = tuple(f"part{number}" for number in range(len(parts)))
    return JoinedModels(parts, names, label_values)  # type: ignore[arg-type]


def test_values_count_through_all_models_and_a_later_label_wins() -> None:
    model = joined(painter(["liver", "spleen"], 0, 1), painter(["aorta"], 1), painter(["rib"]))
    begun: list[str] = []
    volume = Volume(np.zeros((2, 2, 2)), GRID, None)
    result = model.segment(volume, on_step=begun.append)
    assert model.task.labels == {"liver": 1, "spleen": 2, "aorta": 3, "rib": 4}
    assert result.labels[:, 0, 0].tolist() == [1, 3]
    assert result.volumes_ml == {"liver": 0.004, "spleen": 0.0, "aorta": 0.004, "rib": 0.0}
    assert begun == model.steps == list(result.durations_s) == [f"segment_{n}" for n in (1, 2, 3)]
    assert list(model.checkpoints) == ["3d_fullres_1", "3d_fullres_2", "3d_fullres_3"]
    # One part may be empty although others are not.
    assert result.warnings == []


def test_the_order_decides_what_is_painted_over() -> None:
    first, second = painter(["liver"], 0), painter(["aorta"], 0)
    volume = Volume(np.zeros((2, 2, 2)), GRID, None)
    for parts in ((first, second), (second, first)):
        labels = joined(*parts).segment(volume, on_step=lambda _: None).labels
        assert labels[:, 0, 0].tolist() == [2, 0]


def test_values_can_be_given() -> None:
    model = joined(painter(["liver", "spleen"], 0, 1), spleen=200)
    assert model.task.labels == {"liver": 1, "spleen": 200}


def test_an_empty_result_has_one_warning() -> None:
    volume = Volume(np.zeros((2, 2, 2)), GRID, None)
    model = joined(painter(["liver"]), painter(["aorta"]))
    assert model.segment(volume, on_step=lambda _: None).warnings == [NO_LABEL]


@dataclass(frozen=True)
class Doubtful(Painter):
    """Model that adds a warning to each result."""

    def segment(self, volume: Volume, _: Any = (), **options: Any) -> Segmentation:
        result = super().segment(volume, **options)
        result.findings += warnings_of("cut_region", ["it is cut"])
        return result


@dataclass(frozen=True)
class FixedSize(Painter):
    """Model that distorts the crop of its region to a fixed size."""

    def segment(self, volume: Volume, _: Any = (), **options: Any) -> Segmentation:
        result = super().segment(volume, **options)
        result.distortions = {"segment": 2.0}
        return result


def test_distortions_are_kept_with_the_number_of_their_model() -> None:
    volume = Volume(np.zeros((2, 2, 2)), GRID, None)
    distorting = FixedSize(painter(["aorta"]).task, (0,))
    model = joined(painter(["liver"], 0), distorting)
    result = model.segment(volume, on_step=lambda _: None)
    assert result.distortions == {"segment_2": 2.0}


def test_what_is_found_names_its_model_where_there_are_several() -> None:
    volume = Volume(np.zeros((2, 2, 2)), GRID, None)
    parts = [Doubtful(painter([name]).task, (0,)) for name in ("liver", "aorta")]
    both = joined(*parts).segment(volume, on_step=lambda _: None)
    assert both.warnings == ["part0: it is cut", "part1: it is cut"]
    assert joined(parts[0]).segment(volume, on_step=lambda _: None).warnings == ["it is cut"]


@dataclass(frozen=True)
class Bounded(Painter):
    """Model that stores its bound, and records the grids of `check_budget`."""

    budget_gib: float = 9.0
    backend_bytes: int = 3
    asked: list[VoxelGrid] = field(default_factory=list)

    def within(self, budget_gib: float) -> Bounded:
        return replace(self, budget_gib=budget_gib)

    def check_budget(self, grid: VoxelGrid) -> None:
        self.asked.append(grid)


def test_a_bound_on_the_memory_holds_for_each_part() -> None:
    parts = [
        Bounded(painter([name]).task, (), precision=precision, backend_bytes=number)
        for name, precision, number in (("liver", "fp32", 3), ("aorta", "bf16", 4))
    ]
    model = joined(*parts)
    bounded: Any = model.within(0.5).parts
    assert [part.budget_gib for part in bounded] == [0.5, 0.5]
    assert [part.budget_gib for part in parts] == [9.0, 9.0], "the model itself stays"
    model.check_budget(GRID)
    assert [part.asked for part in parts] == [[GRID], [GRID]]
    assert (model.backend_bytes, model.precision) == (7, "fp32, bf16")


@pytest.mark.parametrize(
    ("labels", "values", "expected"),
    [
        ([["a", "b"], ["c"]], {}, {"a": 1, "b": 2, "c": 3}),
        # A name in several models is one label.
        ([["a", "b"], ["b", "c"]], {}, {"a": 1, "b": 2, "c": 3}),
        ([["a", "b"], ["c"]], {"c": 1}, {"a": 2, "b": 3, "c": 1}),
        ([["a", "b"]], {"a": 7}, {"a": 7, "b": 1}),
    ],
)
def test_values_of_labels(
    labels: list[list[str]], values: dict[str, int], expected: dict[str, int]
) -> None:
    assert join_values(labels, values) == expected


def test_what_cannot_be_joined_is_refused() -> None:
    with pytest.raises(UserError, match="no label kidney, but liver, aorta"):
        join_values([["liver"], ["aorta"]], {"kidney": 1})
    for values in ({"liver": 0}, {"liver": 256}, {"liver": 5, "aorta": 5}):
        with pytest.raises(UserError, match="expected different values from 1 to 255, got"):
            join_values([["liver"], ["aorta"]], values)
    with pytest.raises(UserError, match=r"have 300 labels, .* up to 255; give fewer models"):
        join_values([[f"a{n}" for n in range(150)], [f"b{n}" for n in range(150)]], {})
    with pytest.raises(UserError, match="part0 takes the channels ct, but part1 mr"):
        joined(painter(["liver"]), painter(["tumour"], modality="mr"))


@dataclass(frozen=True)
class Listener(Painter):
    """Model that records the voxels that it gets."""

    heard: list[np.ndarray] = field(default_factory=list)

    def segment(self, volume: Volume, _: Any = (), **options: Any) -> Segmentation:
        self.heard.append(volume.array.copy())
        return super().segment(volume, _, **options)


def test_each_model_gets_the_voxels_that_it_was_trained_on() -> None:
    """One gets the voxels as stored, the other gets air in place of the padding."""
    grid = VoxelGrid((8, 40, 40), (1.0, 1.0, 1.0))
    image = np.random.default_rng(0).normal(40.0, 20.0, grid.shape).round()
    image[:, 5:35, 5:35] -= 900.0
    image[:, :, :3] = 3000.0
    image = image.astype(np.int16)
    as_stored = Listener(painter(["liver"]).task, (0,))
    filled = replace(as_stored, task=painter(["aorta"]).task, keeps_values=False, heard=[])
    volume = Volume(image.copy(), grid, None)
    joined(as_stored, filled).segment(volume, on_step=lambda _: None)
    assert np.array_equal(as_stored.heard[0], image)
    assert np.array_equal(filled.heard[0][:, :, 3:], image[:, :, 3:])
    assert np.unique(filled.heard[0][:, :, :3]).tolist() == [-1024]
    assert np.array_equal(volume.array, image), "the scan of the caller stays"
