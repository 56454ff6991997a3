"""Train both stages, predict and score through the commands."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import forked
import numpy as np
import pytest
import SimpleITK
import torch

from medseg.cascade.stage import TrainedStage
from medseg.data.cache import CachedCase
from medseg.errors import UserError
from medseg.geometry.grid import VoxelBox
from medseg.io.read import read_image, read_labels
from medseg.io.volume import Volume
from medseg.io.write import write_image
from medseg.task import Task
from medseg.training.data_module import coarse_boxes

from .conftest import COARSE, FINE, train

pytestmark = pytest.mark.usefixtures("without_pictures")


def medseg(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return forked.run([sys.executable, "-m", "medseg.commands.cli", *arguments], cwd=cwd)


def dices(labels: np.ndarray, reference: np.ndarray) -> list[float]:
    """Dice of both sides."""
    pairs = [(labels == value, reference == value) for value in (1, 2)]
    return [2 * (pred & target).sum() / (pred.sum() + target.sum()) for pred, target in pairs]


def write_series(folder: Path, volume: Volume) -> None:
    """Write a scan as a DICOM series of one file per slice."""
    folder.mkdir()
    (_, y_mm, x_mm), direction = volume.grid.spacing_mm, np.array(volume.grid.direction)
    for number, pixels in enumerate(volume.array):
        slice_ = SimpleITK.GetImageFromArray(pixels)
        slice_.SetSpacing((x_mm, y_mm))
        tags = {
            "0008|0060": "CT",
            "0008|0018": f"1.2.3.{number + 1}",
            "0020|000e": "1.2.3",
            "0020|0032": "\\".join(
                f"{value:.4f}" for value in volume.grid.index_to_world_xyz_mm((number, 0, 0))
            ),
            "0020|0037": "\\".join(
                f"{value:.4f}" for value in [*direction[:, 0], *direction[:, 1]]
            ),
            "0028|1052": "-1024",
            "0028|1053": "1",
        }
        for tag, value in tags.items():
            slice_.SetMetaData(tag, value)
        writer = SimpleITK.ImageFileWriter()
        writer.KeepOriginalImageUIDOn()
        writer.SetFileName(str(folder / f"{number}.dcm"))
        writer.Execute(slice_)


def test_a_checkpoint_is_plain_data_and_says_what_it_is(trained: tuple[Path, Path]) -> None:
    checkpoint = torch.load(trained[1], weights_only=True)
    metadata = checkpoint["medseg"]
    assert metadata["stage"] == "fine"
    assert metadata["spacing_mm"] == [3.0, 3.0, 3.0]
    assert metadata["task"]["labels"] == {"left_lung": 1, "right_lung": 2}
    assert metadata["config"]["steps"] == 110
    assert metadata["step"] == 110


def test_predict_and_evaluate_a_case_table(
    trained: tuple[Path, Path], tiny_table: Path, tmp_path: Path
) -> None:
    coarse, fine = trained
    given = [f"coarse={coarse}", f"fine={fine}", "accelerator=cpu", "threads=1"]
    result = medseg("predict", f"input={tiny_table}", "output=Doe, John/a=b", *given, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    result = medseg(
        "evaluate", "pred=Doe, John/a=b", f"ref={tiny_table}", "output=scores", cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    with (tmp_path / "scores" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    columns = [
        "case",
        "region",
        "trust",
        "dice",
        "nsd_1mm",
        "nsd_2mm",
        "hd95_mm",
        "volume_pred_ml",
        "volume_ref_ml",
    ]
    assert list(rows[0]) == columns
    assert len(rows) == 4 * 2
    assert min(float(row["dice"]) for row in rows) > 0.85
    report = json.loads((tmp_path / "Doe, John" / "a=b" / "case 3.json").read_text())
    assert set(report["boxes"]) == {"left_lung", "right_lung"}
    assert report["durations_s"]["total"] > 0
    assert report["peak_resident_bytes"] > 2**20


def test_predict_a_flipped_scan_into_another_format_and_sides_stay_right(
    trained: tuple[Path, Path], tiny_table: Path, tmp_path: Path
) -> None:
    original = read_image(tiny_table.parent / "c3.nii.gz")
    flipped = original.array[:, ::-1, ::-1]
    grid = original.grid.reoriented((0, 1, 2), (False, True, True))
    write_image(tmp_path / "Thorax (1).nrrd", flipped, grid)
    result = medseg(
        "predict",
        "input=Thorax (1).nrrd",
        "output=ü.mha",
        f"coarse={trained[0]}",
        f"fine={trained[1]}",
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    labels = read_labels(tmp_path / "ü.mha")
    assert labels.grid.is_close(grid)
    reference = read_labels(tiny_table.parent / "l3.nii.gz").array[:, ::-1, ::-1]
    assert min(dices(labels.array, reference)) > 0.85
    left, right = (
        labels.grid.index_to_world_xyz_mm(np.argwhere(labels.array == value).mean(0))
        for value in (1, 2)
    )
    assert left[0] > right[0]


@pytest.mark.parametrize(
    ("source", "output", "written"),
    [
        ("Doe, John", "out", "out/Doe, John.nii.gz"),
        ("scan.mha", "o.nrrd", "o.nrrd"),
        ("scan.mhd", "o.mhd", "o.mhd"),
    ],
)
def test_other_formats_come_in_and_go_out(
    source: str,
    output: str,
    written: str,
    trained: tuple[Path, Path],
    tiny_table: Path,
    tmp_path: Path,
) -> None:
    scan = read_image(tiny_table.parent / "c3.nii.gz")
    if source == "Doe, John":
        write_series(tmp_path / source, scan)
    else:
        write_image(tmp_path / source, scan.array, scan.grid)
    result = medseg(
        "predict",
        f"input={source}",
        f"output={output}",
        f"coarse={trained[0]}",
        f"fine={trained[1]}",
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    labels = read_labels(tmp_path / written)
    assert labels.grid.is_close(read_image(tmp_path / source).grid)
    assert min(dices(labels.array, read_labels(tiny_table.parent / "l3.nii.gz").array)) > 0.85


@pytest.mark.slow
def test_a_coarse_stage_that_trained_on_patches_finds_the_lungs(
    trained: tuple[Path, Path], tiny_table: Path, tmp_path: Path
) -> None:
    patches = ["stage.patch_size=[32,48,48]", "steps=160", "optimizer.lr=0.01"]
    coarse = train(tmp_path / "coarse", tiny_table, *COARSE, *patches)
    scan = tiny_table.parent / "c3.nii.gz"
    result = medseg(
        "predict",
        f"input={scan}",
        "output=o.nii",
        f"coarse={coarse}",
        f"fine={trained[1]}",
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert (
        min(
            dices(
                read_labels(tmp_path / "o.nii").array,
                read_labels(tiny_table.parent / "l3.nii.gz").array,
            )
        )
        > 0.8
    )


def test_the_fine_stage_trains_in_the_boxes_of_the_coarse_one(
    trained: tuple[Path, Path], tiny_table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boxed: list[str] = []

    def watched(case: CachedCase, coarse: TrainedStage, task: Task) -> dict[str, VoxelBox]:
        boxes = coarse_boxes(case, coarse, task)
        assert set(boxes) == {"left_lung", "right_lung"}
        boxed.append(case.name)
        return boxes

    monkeypatch.setattr("medseg.training.data_module.coarse_boxes", watched)
    overrides = [*FINE, "steps=2", "stage.region_from=coarse", f"stage.coarse='{trained[0]}'"]
    checkpoint = train(tmp_path / "fine", tiny_table, *overrides)
    assert boxed == ["case 0", "case 1", "case 2"]
    assert torch.load(checkpoint, weights_only=True)["medseg"]["step"] == 2


def test_a_fine_stage_with_a_coarse_channel_trains_from_one_without_and_predicts(
    trained: tuple[Path, Path],
    tiny_table: Path,
    tmp_path: Path,
) -> None:
    coarse, fine = trained
    overrides = ["stage.coarse_channel=true", f"stage.coarse='{coarse}'", f"init_from='{fine}'"]
    checkpoint = train(tmp_path / "fine", tiny_table, *FINE, "steps=2", *overrides)
    assert torch.load(checkpoint, weights_only=True)["medseg"]["coarse_channel"] is True
    scan = tiny_table.parent / "c0.nii.gz"
    stages = [f"coarse={coarse}", f"fine={checkpoint}"]
    result = medseg("predict", f"input={scan}", "output=o.nii", *stages, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "o.nii").is_file()


def test_one_bad_case_does_not_stop_the_rest(
    trained: tuple[Path, Path], tiny_table: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "scans"
    folder.mkdir()
    (folder / "good.nii.gz").write_bytes((tiny_table.parent / "c0.nii.gz").read_bytes())
    (folder / "bad.nii.gz").write_bytes((tiny_table.parent / "c0.nii.gz").read_bytes()[:500])
    result = medseg(
        "predict",
        f"input={folder}",
        "output=out",
        f"coarse={trained[0]}",
        f"fine={trained[1]}",
        cwd=tmp_path,
    )
    assert result.returncode == 1
    assert "bad" in result.stderr
    assert "Traceback" not in result.stderr
    assert (tmp_path / "out" / "good.nii.gz").is_file()
    assert not list((tmp_path / "out").glob("bad*"))


def test_a_scan_without_any_region_is_empty_and_said_aloud(
    trained: tuple[Path, Path], tiny_table: Path, tmp_path: Path
) -> None:
    checkpoint = torch.load(trained[0], weights_only=True)
    bias = checkpoint["state_dict"]["network.networks.0.head.conv.bias"]
    bias[: len(bias) // 3] += 1000  # the first of three classes is the background
    torch.save(checkpoint, tmp_path / "blind.ckpt")
    scan = tiny_table.parent / "c0.nii.gz"
    result = medseg(
        "predict",
        f"input={scan}",
        "output=o.nii",
        "coarse=blind.ckpt",
        f"fine={trained[1]}",
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert "no region found" in result.stderr
    assert not read_labels(tmp_path / "o.nii").array.any()


@pytest.mark.parametrize("damage", ["swapped", "truncated", "pickle", "foreign"])
def test_a_wrong_checkpoint_is_refused(
    damage: str, trained: tuple[Path, Path], tiny_table: Path, tmp_path: Path
) -> None:
    coarse, fine = trained
    wrong, said = tmp_path / "wrong.ckpt", "refused"
    if damage == "swapped":
        wrong, said = fine, "checkpoint of the fine stage; a coarse or single one is needed"
    elif damage == "truncated":
        wrong.write_bytes(coarse.read_bytes()[:2000])
        said = "not a whole torch checkpoint"
    elif damage == "pickle":
        torch.save({"state_dict": {}, "medseg": Path("x")}, wrong)
    else:
        torch.save({"state_dict": {}}, wrong)
        said = "not a checkpoint of medseg"
    scan = tiny_table.parent / "c0.nii.gz"
    result = medseg(
        "predict", f"input={scan}", "output=o.nii", f"coarse={wrong}", f"fine={fine}", cwd=tmp_path
    )
    assert result.returncode == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_another_organ_is_another_file(tiny_table: Path, tmp_path: Path) -> None:
    heart = [
        "task=heart", "~data.label_values", "+data.label_values={heart: 1, other: 2}",
        "task.window_hu=[-1000,400]",
    ]  # fmt: skip
    coarse = train(tmp_path / "coarse", tiny_table, *COARSE, *heart)
    fine = train(tmp_path / "fine", tiny_table, *FINE, *heart)
    scan = tiny_table.parent / "c3.nii.gz"
    result = medseg(
        "predict", f"input={scan}", "output=o.nii", f"coarse={coarse}", f"fine={fine}", cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    pred = read_labels(tmp_path / "o.nii").array == 1
    target = read_labels(tiny_table.parent / "l3.nii.gz").array == 1
    assert 2 * (pred & target).sum() / (pred.sum() + target.sum()) > 0.85


def test_a_run_begins_with_the_weights_it_is_given(
    trained: tuple[Path, Path], tiny_table: Path, tmp_path: Path
) -> None:
    begin = [*COARSE, "optimizer.lr=1e-30", "steps=1", f"init_from={trained[0]}"]
    # A step of next to nothing keeps the weights: those of the checkpoint, not fresh ones.
    begun = torch.load(train(tmp_path / "run", tiny_table, *begin), weights_only=True)["state_dict"]
    given = torch.load(trained[0], weights_only=True)["state_dict"]
    assert all(torch.equal(begun[name], value) for name, value in given.items())
    with pytest.raises(UserError, match="give the same model"):
        train(tmp_path / "other", tiny_table, *begin, "model.norm=group")
    with pytest.raises(UserError, match="checkpoint of the coarse stage; a fine one is needed"):
        train(tmp_path / "stage", tiny_table, *FINE, f"init_from={trained[0]}")
