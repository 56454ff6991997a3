"""Models of nnU-Net: its own predictor's labels, under any budget and in any orientation."""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import tracemalloc
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks import nnunet_reference
from medseg import Segmenter
from medseg.commands import predict as app
from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.errors import UserError
from medseg.geometry.grid import VoxelGrid
from medseg.inference.options import Backend, InferenceOptions, Seen, Sums
from medseg.inference.segmentation import Segmentation
from medseg.io.read import read_image
from medseg.io.scratch import TOUCHED_BYTES, new_array, scratch_above
from medseg.io.volume import Volume
from medseg.io.write import write_labels
from medseg.nnunet import model as model_of_nnunet
from medseg.nnunet.model import WAITING_BYTES, NnunetModel, StepArray, load_nnunet
from medseg.nnunet.preprocess import preparation_bytes, prepare
from medseg.prediction.forecast import PASS_BYTES, READING_BYTES, forecast
from medseg.prediction.options import PredictConfig

RECORDED = Path(__file__).parent / "recorded"
CASCADES = ("cascade", "cascade_regions", "cascade_transposed")
NAMES = (
    *("folds", "regions", "anisotropic", "torch"),
    *("2d", "2d_regions", "2d_transposed"),
    *CASCADES,
)
CPU = torch.device("cpu")
# Kernels of another processor may round the last bit of a logit otherwise.
MAX_SHARE = 0.001
MakeFolder = Callable[..., Path]


@pytest.fixture(autouse=True)
def _needs_networks() -> None:
    pytest.importorskip("dynamic_network_architectures")


def load(name: str, **options: Any) -> NnunetModel:
    return load_nnunet(RECORDED / f"{name}.zip", None, CPU, InferenceOptions(**options))


def scan_of(name: str) -> tuple[Volume, list[np.ndarray], np.ndarray]:
    """First channel, the other channels, and the labels of nnU-Net's predictor."""
    recorded = np.load(RECORDED / f"{name}.npz")
    first, *others = recorded["scan"]
    return volume_of(first, tuple(recorded["spacing_mm"])), others, recorded["labels"]


@functools.cache
def segmented(name: str) -> Segmentation:
    """Segment the recorded scan once for all tests; none of them writes into its labels."""
    volume, others, _ = scan_of(name)
    result = load(name).segment(volume, others)
    result.labels.flags.writeable = False
    return result


def volume_of(array: np.ndarray, spacing_mm: tuple[float, float, float]) -> Volume:
    return Volume(array, VoxelGrid(array.shape, spacing_mm), None)


def test_the_odd_voxel_of_the_padding_comes_after_the_scan() -> None:
    plan = replace(load("folds").plan, transpose=(0, 1, 2))
    depth, height, width = (size - 3 for size in plan.patch_size)
    image = np.ones((depth, height, width), dtype=np.float32)
    channels = [image] * len(plan.channels)
    prepared = prepare(channels, plan.spacing_mm, plan)
    assert (prepared.shape, prepared.padding) == (image.shape, (1, 1, 1))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tta", [None, False])
def test_the_forecast_counts_the_operations_of_all_passes(name: str, tta: bool | None) -> None:
    """A scan without zeros, of which nothing is cropped; each fold and mirrored pass counts."""
    model = load(name, tta=tta)
    volume, others, _ = scan_of(name)
    first, *more = (np.where(array == 0, 1, array) for array in (volume.array, *others))
    operations: list[float] = []
    for stage in (model, model.previous):
        if stage is not None:
            per_voxel = stage.operations_per_voxel
            stage.network.register_forward_hook(
                lambda _, inputs, __, per_voxel=per_voxel: operations.append(
                    inputs[0][0, 0].numel() * per_voxel
                )
            )
    result = model.segment(replace(volume, array=first), more)
    assert model.expected(volume.grid).operations == pytest.approx(sum(operations))
    assert 0 < result.pass_s < sum(result.durations_s.values())


def test_the_forecast_counts_the_operations_of_a_convolution() -> None:
    model = load("folds", tta=False)
    operations: list[float] = []

    def count(layer: nn.Conv3d, _: object, output: Tensor) -> None:
        operations.append(2 * output.numel() * layer.weight[0].numel())

    for layer in model.network.modules():
        if isinstance(layer, nn.Conv3d):
            layer.register_forward_hook(count)
    with torch.inference_mode():
        model.network(torch.zeros(1, 1, *model.plan.patch_size))
    # The rest are the transposed convolutions of two levels.
    share = sum(operations) / (model.operations_per_voxel * math.prod(model.plan.patch_size))
    assert 0.9 < share < 1


@pytest.mark.parametrize("name", NAMES)
def test_labels_are_those_of_nnunets_own_predictor(name: str) -> None:
    _, _, expected = scan_of(name)
    result = segmented(name)
    assert len(np.unique(expected)) > 2
    assert np.mean(result.labels != expected) <= MAX_SHARE
    assert result.labels.dtype == np.uint8


@pytest.mark.parametrize("name", NAMES)
def test_temporary_files_change_nothing(name: str) -> None:
    volume, others, _ = scan_of(name)
    with scratch_above(1000):
        in_files = load(name).segment(volume, others).labels
    assert np.array_equal(segmented(name).labels, in_files)


@pytest.mark.parametrize("name", ["folds", "2d", "cascade"])
def test_scan_image_and_labels_that_wait_in_files_change_nothing(name: str) -> None:
    volume, others, _ = scan_of(name)
    with scratch_above(math.inf, waiting_bytes=0):
        waiting = new_array(volume.array.shape, volume.array.dtype, waits=True)
        waiting[:] = volume.array
        result = load(name).segment(replace(volume, array=waiting), others)
    assert in_file(result.labels)
    assert np.array_equal(segmented(name).labels, result.labels)
    # A caller that reads scans by itself gets usual arrays.
    assert not in_file(segmented(name).labels)


def in_file(array: np.ndarray) -> bool:
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base, memoryview)


def test_arrays_wait_in_memory_where_the_network_has_another_first_axis() -> None:
    """Each of its planes would touch all pages of the scan and of the labels."""
    waiting = {name: load(name).waiting_bytes for name in NAMES}
    for name, num_bytes in waiting.items():
        assert num_bytes == (WAITING_BYTES if load(name).plan.transpose[0] == 0 else math.inf)
    assert len(set(waiting.values())) == 2


def test_the_forecast_leaves_out_what_waits_in_files() -> None:
    model = load("folds")
    axial = VoxelGrid((400, 512, 512), (2.0, 1.5, 1.5))
    sagittal = replace(axial, direction=((0, 0, 1), (1, 0, 0), (0, 1, 0)))
    num_voxels = math.prod(axial.shape)
    expected = {grid: forecast(model, grid, 0).memory for grid in (axial, sagittal)}
    assert expected[axial]["read"] == READING_BYTES
    assert expected[sagittal]["read"] == READING_BYTES + 2 * num_voxels
    # The scan and the labels but for a plane; the image waits in both. With all labels in memory
    # the end takes most, else the last pass.
    saved = expected[sagittal]["segment"] - expected[axial]["segment"]
    assert saved == 3 * num_voxels - 512 * 512 - model.usual_pass_bytes
    assert expected[sagittal]["prepare"] - expected[axial]["prepare"] == 2 * num_voxels


@pytest.mark.parametrize("name", CASCADES)
def test_a_cascade_goes_on_from_the_labels_of_its_first_stage(name: str) -> None:
    volume, others, _ = scan_of(name)
    model = load(name)
    assert model.previous is not None
    assert model.plan.configuration == "3d_cascade_fullres"
    steps: list[str] = []
    result = model.segment(volume, others, on_step=steps.append)
    assert steps == model.steps == ["previous", "prepare", "segment"]
    first = model.previous.segment(volume, others).labels
    assert (first != result.labels).any()
    assert result.tiling_plans.keys() == {"previous", "segment"}
    assert len(model.checkpoints) == 2


@pytest.mark.parametrize("name", ["cascade", "cascade_transposed"])
def test_other_labels_of_the_first_stage_change_those_of_the_second(name: str) -> None:
    volume, others, expected = scan_of(name)
    model = load(name)
    assert model.previous is not None
    first = model.previous.segment(volume, others).labels
    highest = max(model.plan.previous_values)
    others_first = Segmentation(first % highest + 1, tiling_plans={"segment": ""})
    stage = SimpleNamespace(segment=lambda *_: others_first)
    changed = replace(model, previous=stage).segment(volume, others).labels
    assert (changed != expected).any()


def test_findings_of_the_first_stage_name_its_folder() -> None:
    volume, others, _ = scan_of("cascade")
    model = load("cascade")
    assert model.previous is not None
    folder = replace(model.previous.folder, notes=("a note",))
    cascade = replace(model, previous=replace(model.previous, folder=folder))
    result = cascade.segment(volume, others)
    assert f"{folder.path.name}: a note" in result.information
    assert folder.path.name.endswith("__3d_lowres")
    # Both stages give this warning.
    object.__setattr__(model.task, "labels", {"left_kidney": 1, **model.task.labels})
    object.__setattr__(model.previous.task, "labels", model.task.labels)
    grid = volume.grid.reoriented((0, 1, 2), (False, False, True))
    (warning,) = cascade.segment(Volume(volume.array, grid, None), others).warnings
    assert warning.startswith("the network sees the scan as it is stored")


def test_mirrored_axes_that_a_2d_network_lacks_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(RECORDED / "2d.zip") as archive:
        archive.extractall(tmp_path)
    path, *_ = tmp_path.rglob("checkpoint_final.pth")
    content = torch.load(path, weights_only=False)
    content["inference_allowed_mirroring_axes"] = (0, 1, 2)
    torch.save(content, path)
    with pytest.raises(UserError, match=r"mirrored along the axes \(0, 1, 2\), but .* has 2; take"):
        load_nnunet(tmp_path, None, CPU, InferenceOptions())


def test_a_cascade_without_its_first_stage_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(RECORDED / "cascade.zip") as archive:
        archive.extractall(tmp_path)
    (second,) = tmp_path.rglob("*__3d_cascade_fullres")
    (first,) = tmp_path.rglob("*__3d_lowres")
    first.rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"goes on from the labels of 3d_lowres, but .* copy it"):
        load_nnunet(second, None, CPU, InferenceOptions())


def test_a_zip_file_of_a_second_stage_alone_is_to_be_exported_again(tmp_path: Path) -> None:
    path = tmp_path / "second.zip"
    with zipfile.ZipFile(RECORDED / "cascade.zip") as archive, zipfile.ZipFile(path, "w") as second:
        for name in archive.namelist():
            if "__3d_lowres" not in name:
                second.writestr(name, archive.read(name))
    with pytest.raises(UserError, match=r"export 3d_lowres and 3d_cascade_fullres") as refused:
        load_nnunet(path, None, CPU, InferenceOptions())
    assert str(refused.value).startswith(f"weights={path}: ")


def test_float_sums_differ_in_few_voxels() -> None:
    volume, others, _ = scan_of("folds")
    half = load("folds").segment(volume, others).labels
    exact = load("folds", sums=Sums.float).segment(volume, others)
    assert np.mean(half != exact.labels) < 0.02
    assert "sums in float32" in exact.tiling_plans["segment"]


def test_mirroring_can_be_left_out() -> None:
    volume, others, _ = scan_of("anisotropic")
    mirrored = load("anisotropic").segment(volume, others)
    plain = load("anisotropic", tta=False).segment(volume, others)
    assert "mirrored along 1 axes" in mirrored.tiling_plans["segment"]
    assert "mirrored along 0 axes" in plain.tiling_plans["segment"]
    assert (mirrored.labels != plain.labels).any()


def test_tiles_may_overlap_less() -> None:
    volume, others, _ = scan_of("folds")
    usual, fewer = load("folds"), load("folds", overlap=0.2)
    assert fewer.expected(volume.grid).operations < usual.expected(volume.grid).operations
    labels = fewer.segment(volume, others).labels
    assert (labels != usual.segment(volume, others).labels).any()


def test_folds_can_be_chosen() -> None:
    volume, others, _ = scan_of("folds")
    both = load("folds").segment(volume, others).labels
    options = InferenceOptions()
    first = load_nnunet(RECORDED / "folds.zip", ["0"], CPU, options).segment(volume, others)
    assert (first.labels != both).any()
    assert "fold 0," in first.tiling_plans["segment"]


def reoriented(volume: Volume, order: tuple[int, ...], flips: tuple[bool, ...]) -> Volume:
    """The same scan, stored along other axes."""
    steps = tuple(slice(None, None, -1) if flip else slice(None) for flip in flips)
    array = np.ascontiguousarray(volume.array.transpose(order)[steps])
    return Volume(array, volume.grid.reoriented(order, flips), None)


@pytest.mark.parametrize(("seen", "key"), [(Seen.stored, "stored"), (Seen.RAS, "reoriented")])
def test_all_storages_have_the_labels_of_nnunets_readers(seen: Seen, key: str) -> None:
    recorded = np.load(RECORDED / "orientations.npz")
    volume = volume_of(recorded["scan"], tuple(recorded["spacing_mm"]))
    model = load(nnunet_reference.STORED_MODEL, orientation=seen)
    sides_right: list[bool] = []
    first = model.segment(volume).labels
    for (order, flips), expected in zip(nnunet_reference.storages(), recorded[key], strict=True):
        labels = model.segment(reoriented(volume, order, flips)).labels
        assert np.mean(labels.ravel() != expected) <= MAX_SHARE, (order, flips)
        turned = reoriented(Volume(first, volume.grid, None), order, flips).array
        sides_right.append(np.array_equal(labels, turned))
    # As nnU-Net, a network that sees the scan as it is stored finds other labels in most storages.
    assert all(sides_right) if seen is Seen.RAS else sum(sides_right) < 24


def test_the_data_set_may_state_the_orientation() -> None:
    model = load("anisotropic")
    plan = replace(model.plan, orientation="LPS")
    stated = replace(model, folder=replace(model.folder, plan=plan))
    volume = reoriented(scan_of("anisotropic")[0], (1, 0, 2), (True, False, False))
    expected = load("anisotropic", orientation=Seen.LPS).segment(volume).labels
    assert np.array_equal(stated.segment(volume).labels, expected)
    assert (model.segment(volume).labels != expected).any()


def test_stored_scans_are_seen_as_they_are_and_sides_get_a_warning() -> None:
    volume, _, _ = scan_of("anisotropic")
    model = load("anisotropic")
    labels = model.segment(volume).labels
    # The same array, which its grid says to be mirrored: nnU-Net sees no difference.
    grid = volume.grid.reoriented((0, 1, 2), (False, False, True))
    mirrored = model.segment(Volume(volume.array, grid, None))
    assert np.array_equal(mirrored.labels, labels)
    assert mirrored.warnings == []
    sides = {"left_kidney" if value == 1 else f"o{value}": value for value in range(1, 6)}
    object.__setattr__(model.task, "labels", sides)
    assert model.segment(volume).warnings == []
    (warning,) = model.segment(Volume(volume.array, grid, None)).warnings
    assert "give inference.orientation=LPS (or RAS)" in warning


def test_a_pass_that_exceeds_the_limit_is_refused_before_a_scan_is_read() -> None:
    model = load("folds", max_ram_gib=0.5)
    assert model.within(2.0) == model
    # What a process asks for that only needs the labels of the task.
    assert load("folds", backend=Backend.torch).task == model.task
    with pytest.raises(UserError, match=r"a tile of 8×16×16 voxels needs"):
        model.within(1e-6)


def test_a_budget_that_the_first_stage_exceeds_is_refused_with_its_tile() -> None:
    model = load("cascade", max_ram_gib=0.5)
    assert model.previous is not None
    folder = model.previous.folder
    larger_folder = replace(folder, plan=replace(folder.plan, patch_size=(16, 32, 32)))
    larger = replace(model.previous, folder=larger_folder, least_slab_bytes=math.inf)
    cascade = replace(model, previous=larger)
    budget_gib = (model.least_bytes + cascade.least_bytes) / 2 / 2**30
    with pytest.raises(UserError, match=r"a tile of 16×32×32 voxels needs"):
        cascade.within(budget_gib)


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("2d")])
def test_slabs_change_no_label(name: str) -> None:
    volume, others, _ = scan_of(name)
    model = load(name)
    in_slabs = model.within(1.5 * model.least_slab_bytes / 2**30)
    assert model.slab_bytes is None
    assert in_slabs.slab_bytes is not None
    result = in_slabs.segment(volume, others)
    np.testing.assert_array_equal(result.labels, segmented(name).labels)
    assert ", in slabs, fold" in result.tiling_plans["segment"]
    assert in_slabs.usual_pass_bytes < model.usual_pass_bytes
    assert in_slabs.expected(volume.grid) == model.expected(volume.grid)


def test_the_forecast_counts_the_pass_also_where_arrays_are_files() -> None:
    volume, _, _ = scan_of("folds")
    model = load("folds")
    in_slabs = model.within(1.5 * model.least_slab_bytes / 2**30)
    # Of a few small files all pages may be in memory.
    arrays = model.expected(volume.grid).memory["segment"]
    touched = sum(min(array.num_bytes, array.touched_bytes) for array in arrays)
    kernels = PASS_BYTES - READING_BYTES
    files = forecast(model, volume.grid, 0, array_bytes=0.0).memory
    assert files["segment"] - files["read"] == touched + kernels + model.usual_pass_bytes
    files = forecast(in_slabs, volume.grid, 0, array_bytes=0.0).memory
    assert files["segment"] - files["read"] == touched + kernels + in_slabs.usual_pass_bytes
    large = VoxelGrid((40, 2000, 2000), (2.0, 1.5, 1.5))
    files = forecast(model, large, 0, array_bytes=0.0).memory
    assert files["segment"] - files["read"] == TOUCHED_BYTES + kernels + model.usual_pass_bytes
    assert in_slabs.slab_bytes is not None


def test_the_time_of_a_case_is_that_of_its_parts_and_a_fixed_one() -> None:
    model = load("folds", tta=False)
    grid = VoxelGrid((40, 30, 30), (2.5, 1.5, 1.5))
    # (50, 30, 30) voxels of 2 x 1.5 x 1.5 mm, in tiles of (8, 16, 16), which share half at least.
    num_passes = 2 * 12 * 3 * 3
    # One channel, filtered along all axes, and four heads.
    cost = (1 + 2.0 * 3 + 0.18 * 4) * 36_000 + num_passes * (0.18 * 4 * 8 * 16 * 16 + 3000)
    found = forecast(model, grid, 0)
    assert found.time_units == round(1.5e6 + cost)
    operations = num_passes * 8 * 16 * 16 * model.operations_per_voxel
    assert found.operations == pytest.approx(operations)


def test_the_forecast_counts_the_labels_that_are_written_before_the_last_pass() -> None:
    """The planes before the last tiles; where a plane of the network is none of the scan, all."""
    model = load("folds")
    grid = VoxelGrid((40, 30, 30), (2.0, 1.5, 1.5))
    assert model.logits_shape(grid) == (40, 4, 30, 30)
    arrays = model.expected(grid).memory["segment"]
    # Tiles of 8 planes begin at 0, 4, …, 32.
    assert arrays[-1] == StepArray(36_000, 32 / 40, waits=True, touched_bytes=900)
    assert all(array.written_share == 1.0 for array in arrays[:-1])
    transposed = load("anisotropic").expected(grid).memory["segment"]
    assert transposed[-1] == StepArray(36_000, waits=True)
    labels = forecast(model, grid, 0).memory["segment"] - forecast(model, grid, 0).memory["read"]
    others = sum(array.num_bytes for array in arrays[:-1])
    kernels = PASS_BYTES - READING_BYTES
    assert labels == others + round(0.8 * 36_000) + kernels + model.usual_pass_bytes


def test_a_label_of_the_first_stage_puts_a_voxel_of_zeros_into_the_statistics() -> None:
    """As in nnU-Net, whose mask is all that is not without a label beyond the non-zero voxels."""
    plan = load("cascade_regions").plan
    numbers = np.random.default_rng(0)
    shape = (12, 20, 20)
    image = numbers.normal(100, 30, shape).astype(np.float32)
    # Zeros that reach the border are no hole.
    image[:3, :5] = 0
    previous = np.zeros(shape, dtype=np.uint8)
    previous[1, 2, 4:9] = 1
    prepared = prepare([image, image], plan.spacing_mm, plan, previous)
    inside = (image != 0) | (previous > 0)
    expected = np.zeros(shape, dtype=np.float32)
    expected[inside] = (image[inside] - image[inside].mean()) / image[inside].std()
    z, y, x = prepared.padding
    found = prepared.image[0, z : z + shape[0], y : y + shape[1], x : x + shape[2]]
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-6)
    assert (prepared.image[2].numpy() == -1).sum() == (~inside).sum()


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_scan_of_zeros_has_no_voxels_in_its_mask_and_stays_zero() -> None:
    plan = load("regions").plan
    assert all(channel.is_masked for channel in plan.channels)
    images = [np.zeros((12, 20, 20), dtype=np.int16) for _ in plan.channels]
    assert not prepare(images, plan.spacing_mm, plan).image.any()


@pytest.mark.parametrize(
    ("name", "per_voxel"), [("regions", 17), ("folds", 0), ("cascade", 7), ("cascade_regions", 20)]
)
def test_the_forecast_counts_what_the_preparation_takes(name: str, per_voxel: int) -> None:
    """By the allocations of NumPy: z-scores within a mask, none, labels of a previous stage."""
    model = load(name)
    shape = (40, 60, 50)
    numbers = np.random.default_rng(0)
    channels = [numbers.normal(-300, 300, shape).astype(np.int16) for _ in model.plan.channels]
    num_voxels = math.prod(shape)
    has_previous = model.previous is not None
    known = preparation_bytes(model.plan, shape, model.plan.spacing_mm, has_previous=has_previous)
    assert known == per_voxel * num_voxels
    tracemalloc.start()
    previous = None
    if model.previous is not None:
        previous = numbers.integers(0, 3, shape, dtype=np.uint8)
    # At the spacing of the plan nothing is resampled, which goes plane by plane.
    prepare(channels, model.plan.spacing_mm, model.plan, previous)
    taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 0.8 * known <= taken <= 1.1 * known + 16 * shape[1] * shape[2]


def test_the_forecast_counts_what_a_cubic_spline_takes() -> None:
    """By the allocations of NumPy: coefficients, and the rows that are filtered along z."""
    plan = load("folds").plan
    shape, spacing_mm = (40, 60, 50), (2.5, 1.5, 1.0)
    known = preparation_bytes(plan, shape, spacing_mm, has_previous=False)
    assert known == 3 * 8 * 64 * 84 * 74
    image = np.random.default_rng(0).normal(-300, 300, shape).astype(np.int16)
    tracemalloc.start()
    prepare([image], spacing_mm, plan)
    taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 0.9 * known <= taken <= 1.1 * known
    # Of a long scan the coefficients are a file, and some rows are filtered at a time.
    assert preparation_bytes(plan, (400, 512, 512), spacing_mm, has_previous=False) == 2 * 8 * 2**22
    # Without rows some pages of the file are in memory.
    large = (400, 512, 512)
    assert preparation_bytes(plan, large, (5.0, 1.5, 1.0), has_previous=False) == TOUCHED_BYTES
    # The nearest plane is taken where the others are a third as far apart.
    assert preparation_bytes(plan, shape, (5.0, 1.5, 1.0), has_previous=False) == 8 * 40 * 84 * 74


def bright_ball(shape: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Noisy HU of a bright ball in a dark room, and its mask."""
    axes = np.meshgrid(*(np.linspace(-1, 1, size) for size in shape), indexing="ij")
    is_inside = sum(axis**2 for axis in axes) < 0.5
    noise = np.random.default_rng(0).normal(0, 60, shape)
    return (np.where(is_inside, 100.0, -500.0) + noise).astype(np.float32), is_inside


def test_bf16_keeps_the_labels_of_a_trained_network(
    toy: dict[str, Any], make_folder: MakeFolder
) -> None:
    folder = make_folder(toy)
    model = load_nnunet(folder, None, CPU, InferenceOptions())
    plan = model.plan
    hu, is_inside = bright_ball((plan.patch_size[0], *plan.patch_size[1:]))
    volume = volume_of(hu, plan.spacing_mm)
    image = prepare([hu], plan.spacing_mm, plan).image[None]
    optimizer = torch.optim.Adam(model.network.parameters(), 1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        logits = model.network(image)
        nn.functional.cross_entropy(logits, torch.from_numpy(is_inside[None]).long()).backward()
        optimizer.step()
    checkpoint = folder / "fold_0" / "checkpoint_final.pth"
    content = torch.load(checkpoint, weights_only=False)
    content["network_weights"] = model.network.state_dict()
    torch.save(content, checkpoint)
    exact = load_nnunet(folder, None, CPU, InferenceOptions()).segment(volume)
    halved = load_nnunet(folder, None, CPU, InferenceOptions(), "bf16")
    in_slabs = halved.within(1.5 * halved.least_slab_bytes / 2**30)
    assert in_slabs.slab_bytes is not None
    for variant in (halved, in_slabs):
        result = variant.segment(volume)
        assert "bf16, sums in" in result.tiling_plans["segment"]
        both = np.sum((result.labels == 1) & (exact.labels == 1))
        dice = 2 * both / (np.sum(result.labels == 1) + np.sum(exact.labels == 1))
        assert dice >= 0.999
    assert np.mean((exact.labels == 1) == is_inside) > 0.98


def test_other_precisions_are_refused() -> None:
    with pytest.raises(UserError, match=r"precision=fp16: .* fp32 or bf16 on a CPU"):
        load_nnunet(RECORDED / "folds.zip", None, CPU, InferenceOptions(), "fp16")


@pytest.mark.parametrize(
    ("asked", "computed"), [(None, torch.float16), ("fp16", torch.float16), ("fp32", torch.float32)]
)
def test_passes_on_a_gpu_are_described_as_they_are_computed(
    asked: str | None, computed: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU that passes for a GPU: its autocast stands for that of the GPU."""
    autocast = torch.autocast

    def autocast_here(_: str, dtype: torch.dtype) -> torch.autocast:
        return autocast("cpu", dtype)

    gpu = torch.device("cuda")

    def staying(move: Callable[..., Any]) -> Callable[..., Any]:
        def to(moved: Any, *arguments: Any, **options: Any) -> Any:
            if arguments == (gpu,):
                return moved
            return move(moved, *arguments, **options)

        return to

    monkeypatch.setattr(torch, "autocast", autocast_here)
    for movable in (torch.Tensor, nn.Module):
        monkeypatch.setattr(movable, "to", staying(movable.to))
    monkeypatch.setattr(model_of_nnunet, "_bytes_per_voxel", lambda *_: 0.0)
    model = load_nnunet(RECORDED / "folds.zip", None, gpu, InferenceOptions(), asked)
    logits: list[torch.Tensor] = []
    image = torch.rand((1, len(model.plan.channels), *model.plan.patch_size))
    with torch.inference_mode():
        model._run(image, logits.append)
    assert logits[0].dtype == computed
    name = {torch.float16: "fp16", torch.float32: "fp32"}[computed]
    assert model.precision == name
    assert f", {name}, sums in half precision" in model.described_passes()


def test_a_gpu_has_no_bf16_for_a_model_folder() -> None:
    with pytest.raises(UserError, match=r"precision=bf16: .* in fp16 or fp32 on a GPU"):
        load_nnunet(RECORDED / "folds.zip", None, torch.device("cuda"), InferenceOptions(), "bf16")


def test_a_budget_below_one_plane_of_a_tile_is_refused() -> None:
    with pytest.raises(UserError, match=r"budget_gib=1e-06 .* 8×16×16 voxels; raise it to 0\.00"):
        load("folds", budget_gib=1e-6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tile_size": (32, 32, 32)}, "inference.tile_size"),
        ({"half_weights": True}, "inference.half_weights"),
        ({"backend": Backend.openvino}, "inference.backend"),
    ],
)
def test_keys_of_other_networks_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=f"{words}.*leave it out"):
        load("folds", **changes)


def test_weights_of_another_plan_are_refused(toy: dict[str, Any], make_folder: MakeFolder) -> None:
    folder = make_folder(toy)
    dataset = json.loads((folder / "dataset.json").read_text())
    dataset["labels"]["organ_2"] = 2
    (folder / "dataset.json").write_text(json.dumps(dataset))
    sentence = r"weights of fold 0 do not fit .* with 3 outputs .* has the shape \(2, 16"
    with pytest.raises(UserError, match=sentence):
        load_nnunet(folder, None, CPU, InferenceOptions())


def test_predict_writes_all_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    volume, _, expected = scan_of("anisotropic")
    write_labels(tmp_path / "scan.nii.gz", volume.array.astype(np.int16), volume.grid, None)
    output = tmp_path / "out" / "labels.nii.gz"
    arguments = [
        f"input={tmp_path / 'scan.nii.gz'}",
        f"output={output}",
        f"weights={RECORDED / 'anisotropic.zip'}",
        "accelerator=cpu",
        "save=[labels,preview,masks]",
    ]
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = to_config(hydra.compose("predict", arguments), PredictConfig)
    assert app.predict(config) == 0
    assert np.mean(read_image(output).array != expected) <= MAX_SHARE
    report = json.loads((tmp_path / "out" / "labels.json").read_text(encoding="utf-8"))
    assert list(report["durations_s"]) == ["read", "prepare", "segment", "write", "total"]
    assert report["statistics"].keys() == {f"organ_{value}" for value in range(1, 6)}
    assert len(report["checkpoints"]["3d_fullres"]) == 1
    assert (tmp_path / "out" / "labels.preview.png").is_file()
    mask = read_image(tmp_path / "out" / "labels.organ_2.nii.gz").array
    assert np.array_equal(mask == 1, read_image(output).array == 2)


def test_the_python_api_takes_a_model_folder() -> None:
    volume, _, expected = scan_of("anisotropic")
    segmenter = Segmenter(weights=RECORDED / "anisotropic.zip", accelerator="cpu")
    result = segmenter.segment(volume)
    assert np.mean(result.labels.array != expected) <= MAX_SHARE
    with pytest.raises(UserError, match="exclude each other"):
        Segmenter(["a.ckpt"], weights=RECORDED / "anisotropic.zip")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["folds=[0]"], "folds belongs to a model folder; give weights=<folder> too"),
        (["weights=a", "coarse=b"], "weights and coarse exclude each other"),
        (["weights=a", "folds=[]"], "folds: expected numbers of folds"),
        (["label_values={a: 1}"], "label_values belongs to a model folder"),
        (["ensemble=true"], "ensemble belongs to model folders"),
        (["weights=a", "ensemble=true"], "ensemble averages several model folders, got one"),
        (["weights=[]"], "weights: expected a model folder, a list of them or null"),
    ],
)
def test_contradicting_keys_are_refused(arguments: list[str], words: str) -> None:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        composed = hydra.compose("predict", ["input=a", "output=b", *arguments])
    with pytest.raises(UserError, match=words):
        to_config(composed, PredictConfig)


@pytest.mark.parametrize("options", [{"sums": Sums.float}, {"orientation": Seen.RAS}])
def test_keys_of_model_folders_are_refused_without_one(options: dict[str, Any]) -> None:
    (key,) = options
    with pytest.raises(UserError, match=f"inference.{key} belongs to a model folder of nnU-Net"):
        Segmenter(options=InferenceOptions(**options))


@pytest.mark.slow
@pytest.mark.skipif("NNUNET_ENV" not in os.environ, reason="NNUNET_ENV names no environment")
@pytest.mark.parametrize("name", sorted(nnunet_reference.small_toys()))
def test_labels_equal_those_of_an_installed_nnunet(name: str, tmp_path: Path) -> None:
    """NNUNET_ENV: Python of an environment with nnU-Net and the torch of this one."""
    command = [os.environ["NNUNET_ENV"], nnunet_reference.__file__, "record", str(tmp_path)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run(command, check=True, capture_output=True, env=environment)
    recorded = np.load(tmp_path / f"{name}.npz")
    first, *others = recorded["scan"]
    model = load_nnunet(tmp_path / f"{name}.zip", None, CPU, InferenceOptions())
    volume = volume_of(first, tuple(recorded["spacing_mm"]))
    assert np.array_equal(model.segment(volume, others).labels, recorded["labels"])
