"""Python API: same labels as the command, as objects of the input's kind, from threads."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import forked
import nibabel
import numpy as np
import pytest
import SimpleITK
import torch
from dicom_files import save_stack
from monai.data import MetaTensor
from oracle import CoarseOracle, FineOracle, dice, scan, stage

import medseg
from medseg.data.audit.image import check_channels
from medseg.errors import UserError
from medseg.geometry.grid import VoxelGrid
from medseg.inference.options import Backend, InferenceOptions, Sums
from medseg.io.read import read_image, read_labels
from medseg.io.volume import Volume
from medseg.io.write import write_image, write_labels
from medseg.phantom.scan import make_phantom
from medseg.phantom.spec import PhantomSpec
from medseg.prediction.segmenter import _checked_options, _to_volume
from medseg.preprocess.orient import Orientation
from medseg.preprocess.scale import HuScale
from tests.io.io_volumes import finding_texts


@pytest.fixture
def segmenter(monkeypatch: pytest.MonkeyPatch) -> medseg.LungSegmenter:
    """Make a `Segmenter` with oracles as networks."""
    networks = {"coarse": CoarseOracle(), "fine": FineOracle()}
    monkeypatch.setattr(
        "medseg.cascade.load.load_stage", lambda path, name, *_: stage(networks[name], name)
    )
    return medseg.LungSegmenter(["c"], ["f"], accelerator="cpu")


def is_right(labels: np.ndarray, reference: np.ndarray) -> bool:
    return min(dice(labels == value, reference == value) for value in (1, 2)) > 0.95


STORED = [
    Orientation((0, 1, 2), (False, False, False)),
    Orientation((2, 0, 1), (True, False, True)),
]


def test_arrays_and_images_of_nibabel_get_labels_of_their_kind(
    segmenter: medseg.LungSegmenter, tmp_path: Path
) -> None:
    volume, reference = scan(STORED[1])
    write_image(tmp_path / "a.nii.gz", volume.array, volume.grid)
    image = nibabel.load(tmp_path / "a.nii.gz")
    expected = segmenter.segment(tmp_path / "a.nii.gz").labels.array
    assert is_right(expected, reference)
    from_image = segmenter.segment(image).labels
    assert np.array_equal(np.asanyarray(from_image.dataobj).transpose(), expected)
    assert np.array_equal(from_image.affine, image.affine)
    array = np.asanyarray(image.dataobj)
    from_array = segmenter.segment(array, affine=image.affine).labels
    assert isinstance(from_array, np.ndarray)
    assert np.array_equal(from_array.transpose(), expected)
    # As MONAI loads it: (1, X, Y, Z), with its affine.
    tensor = MetaTensor(torch.from_numpy(array.astype(np.float32))[None], affine=image.affine)
    from_tensor = segmenter.segment(tensor).labels
    assert isinstance(from_tensor, torch.Tensor)
    assert np.array_equal(from_tensor.numpy().transpose(), expected)
    with pytest.raises(UserError, match="give affine="):
        segmenter.segment(array)


def test_a_file_chooses_among_the_series_of_its_folder(
    segmenter: medseg.LungSegmenter, tmp_path: Path
) -> None:
    """As the message about the folder says: `segment` has no key `series`."""
    volume, reference = scan(STORED[0])
    depth, height, width = volume.array.shape
    heights_mm = list(np.arange(depth) * volume.grid.spacing_mm[0])
    for number, image in enumerate((volume.array, volume.array[:, ::-1]), start=1):
        spacing_mm = volume.grid.spacing_mm[1:]
        save_stack(tmp_path, image, heights_mm, uid=f"1.2.{number}", spacing_mm=spacing_mm)
    with pytest.raises(UserError, match=r"holds 2: .* In Python, give one file of its series"):
        segmenter.segment(tmp_path)
    file = next(tmp_path.glob("*_1.2.1_*.dcm"))
    labels = segmenter.segment(file).labels.array
    assert labels.shape == (depth, height, width)
    assert is_right(labels, reference)


@pytest.mark.parametrize("stored", STORED)
def test_each_kind_of_scan_has_labels_of_its_kind_on_its_grid(
    stored: Orientation, segmenter: medseg.LungSegmenter, tmp_path: Path
) -> None:
    volume, reference = scan(stored)
    write_image(tmp_path / "a.nii.gz", volume.array, volume.grid)
    from_path = segmenter.segment(tmp_path / "a.nii.gz")
    from_volume = segmenter.segment(volume)
    image = SimpleITK.ReadImage(tmp_path / "a.nii.gz")
    from_image = segmenter.segment(image)
    assert is_right(from_volume.labels.array, reference)
    assert from_volume.labels.grid == volume.grid
    assert np.array_equal(from_path.labels.array, from_volume.labels.array)
    # The array of ITK has the same order of voxels; the header places the result on the scan.
    assert np.array_equal(SimpleITK.GetArrayFromImage(from_image.labels), from_path.labels.array)
    for get in ("GetSpacing", "GetOrigin", "GetDirection", "GetSize"):
        assert getattr(from_image.labels, get)() == getattr(image, get)()
    assert from_image.volumes_ml == pytest.approx(from_path.volumes_ml, rel=1e-6), (
        "the file rounds its spacing"
    )
    assert set(from_image.boxes) == {"left_lung", "right_lung"}
    # A `Volume` from a file keeps its header.
    write_labels(
        tmp_path / "o.nii.gz",
        from_path.labels.array,
        from_path.labels.grid,
        from_path.labels.header,
    )
    assert read_labels(tmp_path / "o.nii.gz").grid.is_close(volume.grid)
    for result in (from_path, from_volume, from_image):
        steps = result.durations_s
        assert set(steps) == {
            "read",
            "localise",
            "refine_left_lung",
            "refine_right_lung",
            "join",
            "total",
        }
        assert sum(seconds for step, seconds in steps.items() if step != "total") <= steps["total"]


def test_an_image_of_simpleitk_is_read_as_from_a_file(
    segmenter: medseg.LungSegmenter, tmp_path: Path
) -> None:
    volume, _ = scan()
    array = volume.array.astype(np.float64)
    array[:, :5] = np.nan
    image = SimpleITK.GetImageFromArray(array)
    result = segmenter.segment(image)
    assert "hold no number (NaN or infinity) and count as air" in result.warnings[0]
    assert np.isnan(SimpleITK.GetArrayViewFromImage(image)[0, 0, 0]), "the image is left as it is"
    for bad, sentence in (
        (
            SimpleITK.GetImageFromArray(np.zeros((3, 4, 5, 2)), isVector=True),
            "expected one number per voxel, got 2",
        ),
        (
            SimpleITK.GetImageFromArray(np.zeros((4, 5))),
            "expected one 3D volume, but the file holds 5 x 4 values",
        ),
        (
            SimpleITK.GetImageFromArray(np.zeros((3, 4, 5))),
            "SimpleITK image: expected a scan, but every voxel holds 0",
        ),
    ):
        with pytest.raises(UserError, match=sentence):
            segmenter.segment(bad)


@pytest.mark.parametrize(("modality", "air"), [("ct", -1024), ("mr", 0)])
def test_voxels_without_a_number_are_what_the_modality_has_outside(
    modality: str, air: int, tmp_path: Path
) -> None:
    image = SimpleITK.GetImageFromArray(np.arange(60, dtype=np.float64).reshape(3, 4, 5) - 7.0)
    image[0, 0, 0] = np.nan
    SimpleITK.WriteImage(image, tmp_path / "a.mha")
    array = Volume(SimpleITK.GetArrayFromImage(image), VoxelGrid((3, 4, 5), (1.0, 1.0, 1.0)))
    volumes = [_to_volume(given, modality) for given in (image, tmp_path / "a.mha", array)]
    assert [volume.array[0, 0, 0] for volume in volumes] == [air, air, air]
    assert len({finding_texts(volume) for volume in volumes}) == 1
    assert np.isnan(array.array[0, 0, 0]), "what was given is left as it is"


def test_what_is_no_scan_is_refused(segmenter: medseg.LungSegmenter, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="an image of SimpleITK or nibabel, or an array, but got"):
        segmenter.segment({"image": "a.nii"})
    with pytest.raises(UserError, match="does not exist"):
        segmenter.segment(str(tmp_path / "nowhere.nii"))
    with pytest.raises(UserError, match="accelerator=tpu: choose one of auto, cpu, gpu"):
        medseg.LungSegmenter(accelerator="tpu")
    with pytest.raises(UserError, match="fp16 needs a GPU"):
        medseg.LungSegmenter(accelerator="cpu", precision="fp16")
    with pytest.raises(AttributeError, match="has no attribute 'HeartSegmenter'"):
        medseg.HeartSegmenter  # noqa: B018


@pytest.mark.parametrize(
    "arguments", [{"folds": ["0"]}, {"label_values": {"left_lung": 3}}, {"ensemble": True}], ids=str
)
def test_arguments_of_model_folders_are_refused_without_one(arguments: dict[str, object]) -> None:
    with pytest.raises(UserError, match="folds, label_values and ensemble need weights"):
        medseg.Segmenter(["c"], ["f"], **arguments)  # type: ignore[arg-type]


def test_a_fold_may_be_given_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    monkeypatch.setattr(
        "medseg.prediction.segmenter.load_model_folders",
        lambda _, folds, **__: names.extend(folds),
    )
    medseg.Segmenter(weights="model", folds=[0, "1"])
    assert names == ["0", "1"]


def test_a_bound_on_the_process_is_refused_instead_of_ignored() -> None:
    with pytest.raises(UserError, match="options: max_ram_gib bounds the process of the command"):
        medseg.Segmenter(["c"], ["f"], options=InferenceOptions(max_ram_gib=1.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (InferenceOptions(budget_gib=0), r"options.budget_gib: must lie in \(0, inf\), but got 0"),
        (InferenceOptions(budget_gib=float("nan")), "options.budget_gib: expected a finite number"),
        (InferenceOptions(budget_gib=True), "options.budget_gib: expected a number, but got True"),
        (InferenceOptions(overlap=1.5), r"options.overlap: must lie in \[0, 1\), but got 1.5"),
        (InferenceOptions(overlap="0.5"), "options.overlap: expected a number, but got '0.5'"),  # type: ignore[arg-type]
        (InferenceOptions(tile_size=(64, 64)), "options.tile_size: 3 numbers are needed"),  # type: ignore[arg-type]
        (InferenceOptions(tile_size=64), "options.tile_size: 3 numbers are needed"),  # type: ignore[arg-type]
        (InferenceOptions(tile_size=(64, 64, 6.5)), "options.tile_size: expected a whole number"),  # type: ignore[arg-type]
        (InferenceOptions(tta="yes"), "options.tta: expected true or false, but got 'yes'"),  # type: ignore[arg-type]
        (InferenceOptions(half_weights=None), "options.half_weights: expected true or false"),  # type: ignore[arg-type]
        (
            InferenceOptions(backend="onnx"),  # type: ignore[arg-type]
            "options.backend: expected one of torch, openvino, but got 'onnx'",
        ),
        ({"budget_gib": 1}, "options: expected InferenceOptions, but got dict"),
    ],
)
def test_an_option_that_the_command_refuses_is_refused(
    options: InferenceOptions, message: str
) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        medseg.Segmenter(["c"], ["f"], options=options)


def test_names_of_choices_become_the_choices() -> None:
    options = InferenceOptions(sums="float", backend="openvino", tile_size=[64, 32, 64])  # type: ignore[arg-type]
    checked = _checked_options(options)
    assert checked.tile_size == (64, 32, 64)
    assert options.tile_size == [64, 32, 64], "the options of the caller stay"
    assert checked.sums is Sums.float
    assert checked.backend is Backend.openvino


def test_one_path_is_taken_for_a_list_of_one(tmp_path: Path) -> None:
    for path in ("nowhere.ckpt", tmp_path / "nowhere.ckpt"):
        with pytest.raises(UserError, match=r"coarse=.*nowhere\.ckpt: there is no such checkpoint"):
            medseg.Segmenter(path, accelerator="cpu")
        with pytest.raises(UserError, match=r"single=.*nowhere\.ckpt: there is no such checkpoint"):
            medseg.Segmenter(single=path, accelerator="cpu")
    with pytest.raises(UserError, match="at least one model folder"):
        medseg.Segmenter(weights=[])


def test_a_tensor_in_bf16_is_read_as_its_float32_values() -> None:
    values = torch.linspace(-1000, 400, 60).reshape(3, 4, 5)
    rounded = values.bfloat16()
    affine = np.eye(4)
    from_bf16 = _to_volume(rounded, "ct", affine)
    assert np.array_equal(from_bf16.array, _to_volume(rounded.float(), "ct", affine).array)


def test_values_that_are_no_hu_are_scaled(segmenter: medseg.LungSegmenter) -> None:
    volume, _ = scan()
    high = Volume(volume.array + np.int16(1024), volume.grid)
    right = segmenter.segment(volume).labels.array
    assert not np.array_equal(segmenter.segment(high).labels.array, right)
    assert np.array_equal(segmenter.segment(high, HuScale(offset=-1024.0)).labels.array, right)


def test_the_advice_on_a_scale_knows_the_scale_that_was_given(
    segmenter: medseg.LungSegmenter, monkeypatch: pytest.MonkeyPatch
) -> None:
    scales = []

    def check(*arguments: Any, scale: HuScale, **options: Any) -> Any:
        scales.append(scale)
        return check_channels(*arguments, scale=scale, **options)

    monkeypatch.setattr("medseg.prediction.case.check_channels", check)
    volume, _ = scan()
    segmenter.segment(volume, HuScale(offset=1024.0))
    assert scales == [HuScale(offset=1024.0)]


def test_threads_share_a_segmenter(segmenter: medseg.LungSegmenter) -> None:
    blocks = [
        (
            ((slice(7, 19), slice(20 + i, 60), slice(78, 110)), 1),
            ((slice(6, 17), slice(31, 66), slice(12, 50)), 2),
        )
        for i in range(6)
    ]
    scans = [scan(blocks=block)[0] for block in blocks]
    alone = [segmenter.segment(volume) for volume in scans]
    with ThreadPoolExecutor(3) as threads:
        together = list(threads.map(segmenter.segment, scans))
    for alone_labels, other in zip(alone, together, strict=True):
        assert np.array_equal(alone_labels.labels.array, other.labels.array)
        assert alone_labels.volumes_ml == other.volumes_ml
    assert len({result.volumes_ml["left_lung"] for result in together}) == len(scans)


@pytest.mark.slow
def test_two_threads_get_what_the_command_writes(tmp_path: Path) -> None:
    """In a process of its own, which also shows that `import medseg` does not import torch."""
    for index in range(2):
        phantom = make_phantom(
            PhantomSpec(seed=5, index=index, spacing_mm=(4.0, 3.4, 3.4), matrix=(110, 110))
        )
        write_image(tmp_path / "scans" / f"{index}.nii.gz", phantom.image_hu, phantom.grid)
    command = [
        sys.executable,
        "-m",
        "medseg.commands.cli",
        "predict",
        "input=scans",
        "output=out",
        "accelerator=cpu",
    ]
    done = forked.run(command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    script = """
import sys, medseg
assert not {"torch", "numpy", "nibabel"} & set(sys.modules)
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from medseg import LungSegmenter
from medseg.io.read import read_labels
import json
segmenter = LungSegmenter(accelerator="cpu")
with ThreadPoolExecutor(2) as threads:
    results = threads.map(segmenter.segment, ["scans/0.nii.gz", "scans/1.nii.gz"])
    for index, result in enumerate(results):
        written = read_labels(Path(f"out/{index}.nii.gz"))
        assert (result.labels.array == written.array).all()
        print(json.dumps(result.volumes_ml))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
    for index, line in enumerate(done.stdout.splitlines()):
        report = json.loads((tmp_path / "out" / f"{index}.json").read_text())
        assert report["volume_ml"] == pytest.approx(json.loads(line), abs=0.01)
    assert (
        read_image(tmp_path / "scans" / "0.nii.gz").grid.shape
        == read_labels(tmp_path / "out" / "0.nii.gz").grid.shape
    )
