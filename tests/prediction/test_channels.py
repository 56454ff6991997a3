"""Tasks of several channels, from command line, table and Python, on the first one's grid."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import pytest
import torch
from oracle import GRID, TASK, dice, scan, stage
from torch import Tensor, nn

from medseg import Segmenter
from medseg.cascade.cascade import require_channels
from medseg.commands import predict as app
from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.errors import UserError
from medseg.geometry.grid import VoxelBox
from medseg.io.read import read_image, read_labels
from medseg.io.volume import Volume
from medseg.io.write import write_image
from medseg.prediction.options import PredictConfig
from medseg.task import Channel, Task

CT = Channel("ct", (-1000.0, 0.0))
MR = Channel("mr", None, "zscore")
TWO = replace(TASK, channels=(CT, MR))
ONE_STAGE = replace(TWO, regions=())
FOUR = replace(
    TASK,
    regions=(),
    labels={"tumour": 1},
    channels=(MR, MR, replace(MR, normalise="percentile"), MR),
)


class Both(nn.Module):
    """Network whose foreground is bright in all channels; with two labels they are sides."""

    divisor = (8, 8, 8)

    def __init__(self, num_channels: int, num_labels: int) -> None:
        super().__init__()
        self.num_channels, self.num_labels = num_channels, num_labels

    def forward(self, image: Tensor) -> Tensor:
        assert image.shape[1] == self.num_channels
        bright = 10.0 * (image.amin(1, keepdim=True) - 0.01)
        if self.num_labels == 1:
            return torch.cat([torch.zeros_like(bright), bright], 1)
        is_left = torch.arange(image.shape[-1]) >= image.shape[-1] / 2
        sides = [torch.where(is_here, bright, -30.0) for is_here in (is_left, ~is_left)]
        return torch.cat([torch.zeros_like(bright), *sides], 1)


def mr_of(labels: np.ndarray, rng_seed: int = 0) -> np.ndarray:
    """Make a second channel: bright in the labels, dark in the rest of the body, 0 outside."""
    noise = np.random.default_rng(rng_seed).random(labels.shape)
    image = np.where(labels > 0, 900 + 10 * noise, 100 + 10 * noise)
    image[:, :3] = 0
    return image.astype(np.float32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a CT, and a second channel of the same blocks on a shifted and finer grid."""
    volume, labels = scan()
    write_image(tmp_path / "ct.nii.gz", volume.array, volume.grid)
    fine = GRID.resampled((2.0, 0.9, 0.8)).crop(VoxelBox((2, 3, 4), (38, 86, 126)))
    centres = np.stack(np.meshgrid(*map(np.arange, fine.shape), indexing="ij"), -1).reshape(-1, 3)
    index = np.rint(GRID.world_to_index_zyx(fine.index_to_world_xyz_mm(centres))).astype(int)
    nearest = labels[tuple(np.clip(index, 0, np.array(GRID.shape) - 1).T)].reshape(fine.shape)
    write_image(tmp_path / "mr.nrrd", mr_of(nearest), fine)
    np.save(tmp_path / "labels.npy", labels)
    return tmp_path


def use(monkeypatch: pytest.MonkeyPatch, task: Any) -> None:
    networks = {
        "coarse": Both(len(task.channels), len(task.labels)),
        "fine": Both(len(task.channels), 1),
    }
    monkeypatch.setattr(
        "medseg.cascade.load.load_stage",
        lambda path, name, *_: stage(networks[name], name if task.regions else "single", task),
    )


def predict(source: str, output: Path, *overrides: str) -> int:
    stages = ["coarse=c", "accelerator=cpu"]
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        composed = hydra.compose(
            "predict", [f"input={source}", f"output='{output}'", *stages, *overrides]
        )
    return app.predict(to_config(composed, PredictConfig))


@pytest.mark.parametrize("task", [TWO, ONE_STAGE], ids=["two stages", "one stage"])
def test_two_channels_from_files_from_a_table_and_from_python_agree(
    task: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, task)
    fine_arguments = ["fine=f"] if task.regions else []
    source = f"['{folder / 'ct.nii.gz'}','{folder / 'mr.nrrd'}']"
    assert predict(source, folder / "out.nii.gz", *fine_arguments) == 0
    labels, target = read_labels(folder / "out.nii.gz").array, np.load(folder / "labels.npy")
    assert all(dice(labels == value, target == value) > 0.9 for value in task.labels.values())
    report = json.loads((folder / "out.json").read_text())
    assert [
        Path(source["path"]).name for source in (report["source"], *report["more_sources"])
    ] == ["ct.nii.gz", "mr.nrrd"]

    (folder / "table.csv").write_text("case,image,image_1\nx,ct.nii.gz,mr.nrrd\n")
    assert predict(str(folder / "table.csv"), folder / "out", *fine_arguments) == 0
    assert np.array_equal(read_labels(folder / "out" / "x.nii.gz").array, labels)

    # Files that are numbered as nnU-Net does are one case, so the output may be one file.
    numbered = folder / "numbered"
    numbered.mkdir()
    shutil.copy(folder / "ct.nii.gz", numbered / "x_0000.nii.gz")
    shutil.copy(folder / "mr.nrrd", numbered / "x_0001.nrrd")
    assert predict(str(numbered), folder / "joined.nii.gz", *fine_arguments) == 0
    assert np.array_equal(read_labels(folder / "joined.nii.gz").array, labels)

    segmenter = Segmenter(["c"], ["f"] if task.regions else [], accelerator="cpu")
    result = segmenter.segment([folder / "ct.nii.gz", folder / "mr.nrrd"])
    assert np.array_equal(result.labels.array, labels)
    volume, _ = scan()
    second = Volume(mr_of(target), volume.grid)
    from_arrays = segmenter.segment([volume, second]).labels.array
    assert all(dice(from_arrays == value, target == value) > 0.9 for value in task.labels.values())


def test_channels_from_python_are_placed_as_those_of_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, ONE_STAGE)
    segmenter = Segmenter(["c"], accelerator="cpu")
    paths = [folder / "ct.nii.gz", folder / "mr.nrrd"]
    from_files, from_arrays = (
        segmenter.segment(paths),
        segmenter.segment([read_image(path) for path in paths]),
    )
    assert np.array_equal(from_files.labels.array, from_arrays.labels.array)
    assert from_files.warnings == from_arrays.warnings
    assert any(
        "of the scan is outside image_1 and counts as 0 there" in warning
        for warning in from_arrays.warnings
    )
    volume, labels = scan()
    away = Volume(mr_of(labels), replace(volume.grid, origin_xyz_mm=(5000.0, 0.0, 0.0)))
    with pytest.raises(
        UserError,
        match="expected image_1 to show the same patient region as image, "
        "but the two do not overlap",
    ):
        segmenter.segment([volume, away])


def test_a_changed_channel_makes_another_result(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, ONE_STAGE)
    source = f"['{folder / 'ct.nii.gz'}','{folder / 'mr.nrrd'}']"
    for changes, expected in ((False, "ml"), (False, "finished before"), (True, "ml")):
        if changes:
            volume, labels = scan()
            write_image(folder / "mr.nrrd", mr_of(labels, 1), volume.grid)
        assert predict(source, folder / "out.nii.gz") == 0
        assert expected in capsys.readouterr().out


def test_a_missing_channel_is_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, ONE_STAGE)
    sentence = "the task blocks has 2 channels (ct, mr), but the scan has {}; give input=[a,b,…]"
    with pytest.raises(UserError) as caught:
        predict(f"['{folder / 'ct.nii.gz'}']", folder / "out.nii.gz")
    assert sentence.format(1) in str(caught.value)
    with pytest.raises(UserError) as caught:
        predict(
            f"['{folder / 'ct.nii.gz'}','{folder / 'mr.nrrd'}','{folder / 'mr.nrrd'}']",
            folder / "out.nii.gz",
        )
    assert sentence.format(3) in str(caught.value)
    with pytest.raises(UserError, match="the scan has 1"):
        Segmenter(["c"], [], accelerator="cpu").segment(folder / "ct.nii.gz")
    (folder / "table.csv").write_text("case,image,image_1\nx,ct.nii.gz,\ny,ct.nii.gz,mr.nrrd\n")
    assert predict(str(folder / "table.csv"), folder / "out") == 1
    assert "medseg: x: " in (said_by := capsys.readouterr().err)
    assert "image_1 is missing; give a file for each" in said_by
    assert (folder / "out" / "y.nii.gz").is_file()
    with pytest.raises(
        UserError, match="input: expected a path, or a list of the channels of one case"
    ):
        predict("[1,2]", folder / "out.nii.gz")


def test_one_image_is_not_taken_for_two_channels(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, ONE_STAGE)
    (folder / "table.csv").write_text("case,image,image_1\nx,mr.nrrd,mr.nrrd\n")
    assert predict(str(folder / "table.csv"), folder / "out") == 2
    assert "mr.nrrd: named as 2 channels of one case, but only a NIfTI" in capsys.readouterr().err
    assert not (folder / "out" / "x.nii.gz").exists()


@pytest.mark.parametrize("key", ["input", "output", "split", "series_pick", "coarse", "weights"])
def test_a_variable_that_the_shell_does_not_know_is_not_the_present_folder(key: str) -> None:
    texts = {"input": "ct", "output": "out"} | {key: ""}
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        composed = hydra.compose("predict", [f"{name}={text}" for name, text in texts.items()])
    with pytest.raises(UserError, match=f"^{key}: expected "):
        to_config(composed, PredictConfig)


def test_four_channels_without_hu_are_segmented_without_findings_of_a_ct(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, FOUR)
    volume, labels = scan()
    for number in range(4):
        write_image(folder / f"{number}.nii.gz", mr_of(labels, number) * (1 + number), volume.grid)
    source = ",".join(f"'{folder / str(number)}.nii.gz'" for number in range(4))
    assert predict(f"[{source}]", folder / "out.nii.gz") == 0
    predicted = read_labels(folder / "out.nii.gz").array
    assert dice(predicted == 1, labels > 0) > 0.9
    report = json.loads((folder / "out.json").read_text())
    assert (report["status"], report["warnings"]) == ("ok", [])
    assert "HU" not in capsys.readouterr().err


def test_several_scans_are_no_channels_of_a_task_with_one() -> None:
    task = Task("blocks", {"block": 1}, (), (Channel(),))
    require_channels(task, 1)
    sentence = r"one channel \(ct\), but the scan has 2; give a file of this channel"
    with pytest.raises(UserError, match=sentence) as caught:
        require_channels(task, 2)
    assert "a folder or a case table gives several scans" in str(caught.value)
