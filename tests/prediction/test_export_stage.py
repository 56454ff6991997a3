"""Exports to ONNX and OpenVINO: outside of medseg they give the labels of medseg."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from exported_steps import Prepared, Restored, TileInferer
from io_volumes import DIRECTIONS, make_grid
from oracle import dice
from scipy.ndimage import gaussian_filter

from medseg.cascade.cascade import Cascade
from medseg.cascade.load import load_stage
from medseg.cascade.stage import TrainedStage
from medseg.errors import UserError
from medseg.inference.openvino import core
from medseg.inference.options import Backend, InferenceOptions
from medseg.io.read import read_image
from medseg.io.volume import Volume
from medseg.io.write import write_image
from medseg.models.stage_network import Logits, StageNetwork
from medseg.models.unet import UNet
from medseg.prediction.export_stage import describe_stage, export_stage
from medseg.task import Channel, Region, Task
from medseg.weights.files import shipped_weights

CPU = torch.device("cpu")
CHANNELS = (
    Channel("ct", (-1000.0, 400.0)),
    Channel("mr", None, "zscore"),
    Channel("mr", None, "percentile"),
)
LUNGS = Task(
    "lungs",
    {"left": 1, "right": 2},
    (Region("left", ("left",), "left"), Region("right", ("right",), "right")),
    CHANNELS[:1],
)


def make_stage(task: Task, name: str = "coarse", **changes: Any) -> TrainedStage:
    torch.manual_seed(0)
    classes = task.num_classes if name == "coarse" else task.num_region_classes
    network = StageNetwork(
        lambda channels: UNet(channels, classes, width=4, depth=1, blocks_per_level=1),
        in_channels=len(task.channels),
    )
    stage = TrainedStage(network.eval(), name, task, (2.0, 1.5, 1.0), None, 10.0, "fp32", CPU)
    stage.count_memory()
    return replace(stage, **changes)


def share_equal(ours: np.ndarray, theirs: np.ndarray) -> float:
    assert len(np.unique(ours)) > 1
    return float((ours == theirs).mean())


@pytest.mark.parametrize(
    ("direction", "spacing_mm", "tile_size"),
    [
        ("oblique", (2.0, 1.5, 1.0), None),
        ("coronal", (4.0, 0.5, 2.0), (16, 24, 16)),
        ("feet_first", None, (8, 16, 24)),
    ],
)
def test_the_metadata_give_the_labels_of_medseg_to_another_program(
    direction: str, spacing_mm: Any, tile_size: Any, tmp_path: Path
) -> None:
    from monai.transforms import EnsureChannelFirstd, LoadImaged, Orientationd

    task = Task("organs", {"one": 1, "two": 2}, (), CHANNELS)
    stage = make_stage(task, spacing_mm=spacing_mm, tile_size=tile_size)
    grid = make_grid(DIRECTIONS[direction], (22, 41, 37))
    noise = np.random.default_rng(0).normal(0, 1, (3, *grid.shape))
    images = [gaussian_filter(channel, 2).astype(np.float32) for channel in noise]
    images[0] = np.where(np.abs(np.arange(37) - 18) < 14, 3000 * images[0], -1024).astype(
        np.float32
    )
    images[1][:, :3] = 0
    files = [tmp_path / f"{number}.nii.gz" for number in range(3)]
    for file, image in zip(files, images, strict=True):
        write_image(file, image, grid)
    ours = (
        Cascade(stage, None, InferenceOptions()).segment(Volume(images[0], grid), images[1:]).labels
    )

    described = json.loads(json.dumps(describe_stage(stage, None)))
    case: Any = {"image": [str(file) for file in files]}
    prepared = Prepared(
        "image",
        None if spacing_mm is None else described["spacing_mm"],
        True,
        described["channels"],
        described["crop"]["margin_mm"],
        described["input"]["multiple_of"],
        described["tile_size"],
        described["least_size"],
        False,
    )
    for step in (
        LoadImaged("image"),
        EnsureChannelFirstd("image"),
        Orientationd("image", axcodes="SPL"),
        prepared,
    ):
        case = step(case)
    with torch.inference_mode():
        inferer = TileInferer(described["tile_size"], described["overlap"])
        case["pred"] = inferer(case["image"][None], Logits(stage.network.network))[0]
    restored = Restored("pred", "image", [1, 2], False)(case)["pred"]
    theirs = np.asarray(restored)[0].transpose(2, 1, 0)
    assert share_equal(ours, theirs) > 0.999
    np.testing.assert_allclose(restored.affine, nibabel.load(files[0]).affine, atol=1e-6)


def test_the_metadata_say_all_that_another_program_needs() -> None:
    metadata = describe_stage(make_stage(LUNGS, "fine", tile_size=(20, 18, 16)), None)
    assert metadata["spacing_mm"] == [2.0, 1.5, 1.0]
    assert metadata["channels"][0]["window_hu"] == (-1000.0, 400.0)
    assert metadata["channels"][0]["clip"] == (-1024, 3071)
    assert metadata["input"] == {
        "name": "image",
        "shape": [1, 1, "D", "H", "W"],
        "multiple_of": [4, 4, 4],
        "axes": "z, y, x towards superior, posterior, left",
    }
    assert metadata["classes"] == {"left": ["background", "left"], "right": ["background", "right"]}
    assert metadata["flipped_x"] == ["right"]
    assert metadata["tile_size"] == metadata["least_size"] == (20, 20, 16)
    assert metadata["crop"]["margin_mm"] == 10.0
    fixed = describe_stage(make_stage(LUNGS, "fine"), (8, 8, 8))
    patches = describe_stage(make_stage(LUNGS, "fine", least_size=(20, 18, 16)), None)
    assert (patches["tile_size"], patches["least_size"]) == (None, (20, 20, 16))
    assert fixed["input"]["shape"] == [1, 1, 8, 8, 8]
    json.dumps([metadata, fixed])


def test_the_output_must_be_a_file_of_a_known_format(tmp_path: Path) -> None:
    stage = make_stage(LUNGS)
    for output, words in (
        (tmp_path / "model.pt", r"ends in \.onnx or \.xml"),
        (tmp_path, r"ends in \.onnx or \.xml"),
    ):
        with pytest.raises(UserError, match=words):
            export_stage(stage, output)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model.onnx", "model.xml"])
def test_the_cascade_gives_the_same_labels_with_exported_networks(
    name: str, shared_ct: Path, tmp_path: Path
) -> None:
    """Three scans, with both networks of the cascade replaced by exported files."""
    stages = [
        load_stage(
            shipped_weights("lungs", stage_name),
            None,
            CPU,
            "fp32",
            options=InferenceOptions(backend=Backend.torch),
        )
        for stage_name in ("coarse", "fine")
    ]
    cascade = Cascade(*stages, InferenceOptions())
    scans = [
        read_image(shared_ct / case / "ct.nii.gz")
        for case in ("cip_ct64", "acrin_001_tp1", "elastix_right_lung")
    ]
    ours = [cascade.segment(scan).labels for scan in scans]
    for stage in stages:
        output = tmp_path / stage.name / name
        assert export_stage(stage, output).fixed_size is None
        stage.network.networks[0].forward = load_exported(output)
    for scan, expected in zip(scans, ours, strict=True):
        labels = cascade.segment(scan).labels
        assert (
            min(
                dice(expected == value, labels == value)
                for value in (1, 2)
                if (expected == value).any()
            )
            > 0.999
        )


def load_exported(path: Path) -> Any:
    if path.suffix == ".onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        return lambda image: torch.from_numpy(session.run(["logits"], {"image": image.numpy()})[0])
    compiled = core().compile_model(str(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda image: torch.from_numpy(compiled({"image": image.numpy()})["logits"])
