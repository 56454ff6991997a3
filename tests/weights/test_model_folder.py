"""Model folders of medseg: what is written is found, and what cannot be used is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from medseg.cascade.cascade import Cascade
from medseg.errors import UserError
from medseg.inference.options import Backend, InferenceOptions
from medseg.prediction.joined import JoinedModels
from medseg.prediction.load_models import load_cascade, load_model_folders
from medseg.weights.files import SHIPPED_FOLDER, checksum, read_weights, shipped_weights
from medseg.weights.model_folder import (
    CARD,
    StageWeights,
    find_stages,
    is_weights_folder,
    model_card,
    write_model_folder,
)

# Without measuring which backend is the quickest.
TORCH = InferenceOptions(backend=Backend.torch)


@pytest.fixture(scope="module")
def networks() -> list[StageWeights]:
    """The included networks as those of two folds; the second has other numbers."""
    folds: list[StageWeights] = []
    for stage in ("coarse", "fine"):
        metadata, weights = read_weights(shipped_weights("lungs", stage), stage, stage)
        folds.append(StageWeights(metadata, weights, "0"))
        moved = {name: value * 1.01 for name, value in weights.items()}
        folds.append(StageWeights(metadata, moved, "1"))
    return folds


@pytest.fixture(scope="module")
def written(networks: list[StageWeights], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model_folder(folder, networks)
    return folder


def test_folds_are_found_and_averaged(written: Path) -> None:
    names = [
        f"lungs_{stage}_fold_{fold}.safetensors" for stage in ("coarse", "fine") for fold in (0, 1)
    ]
    stages = find_stages(written)
    assert [path.name for paths in stages.values() for path in paths] == names
    model = load_model_folders([written], accelerator="cpu", options=TORCH)
    assert isinstance(model, Cascade)
    files = [path for paths in stages.values() for path in paths]
    assert model.checkpoints["fine"] == {str(path): checksum(path) for path in files[2:]}
    assert model.fine is not None
    assert len(model.fine.networks) == 2
    (single,) = load_model_folders([written], ["1"], accelerator="cpu", options=TORCH).checkpoints[
        "fine"
    ]
    assert Path(single).name == names[3]
    repeated = find_stages(written, ["1", "0", "1"])["coarse"]
    assert [path.name for path in repeated] == [names[1], names[0]], "each counts once"


@pytest.mark.parametrize("name", ["lesion_fine_fold_1", "liver lesions"])
def test_a_task_may_be_called_like_a_stage_and_a_fold_or_have_spaces(
    networks: list[StageWeights], tmp_path: Path, name: str
) -> None:
    renamed = []
    for network in networks:
        task = {**network.metadata["task"], "name": name}
        renamed.append(network._replace(metadata={**network.metadata, "task": task}))
    files = write_model_folder(tmp_path, renamed)
    stages = find_stages(tmp_path)
    assert list(stages) == ["coarse", "fine"]
    assert [path for paths in stages.values() for path in paths] == files


def test_the_included_weights_are_a_model_folder() -> None:
    model = load_model_folders([SHIPPED_FOLDER], accelerator="cpu", options=TORCH)
    assert (
        model.checkpoints == load_cascade(None, None, accelerator="cpu", options=TORCH).checkpoints
    )
    assert isinstance(model, Cascade)
    assert model.dice_bound is not None
    renamed = load_model_folders(
        [SHIPPED_FOLDER], label_values={"left_lung": 2}, accelerator="cpu", options=TORCH
    )
    assert isinstance(renamed, JoinedModels)
    assert renamed.task.labels == {"left_lung": 2, "right_lung": 1}
    assert renamed.task.volume_ml == model.task.volume_ml


def test_the_card_says_what_the_files_hold_and_is_kept(
    written: Path, networks: list[StageWeights], capsys: pytest.CaptureFixture[str]
) -> None:
    card = (written / CARD).read_text(encoding="utf-8")
    for words in ("| left_lung | 1 | 500 to 5500 |", "| 1×1×1 |", "below -980 HU", "9 patients"):
        assert words in card
    assert checksum(written / networks[0].file_name) in card
    assert max(map(len, card.splitlines())) < 200
    (written / CARD).write_text("mine")
    write_model_folder(written, networks)
    assert (written / CARD).read_text(encoding="utf-8") == "mine"
    assert "README.md: kept, but it names other files" in capsys.readouterr().err


def test_what_cannot_be_used_is_refused(written: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(written, folder)
    assert is_weights_folder(folder)
    with pytest.raises(UserError, match=r"the coarse stage of .* has no fold 7; it has 0, 1"):
        find_stages(folder, ["7"])
    sums = folder / "SHA256SUMS"
    lines = sums.read_text(encoding="utf-8").splitlines(keepends=True)
    sums.write_text("".join(lines[2:]))
    with pytest.raises(UserError, match="expected the stages coarse and fine, or single"):
        find_stages(folder)
    sums.write_text(lines[0].replace("lungs_coarse", "../lungs_coarse"))
    with pytest.raises(UserError, match=r"SHA256SUMS names '../lungs_coarse_fold_0.safetensors'"):
        find_stages(folder)
    sums.write_text("not sums")
    with pytest.raises(UserError, match="expected lines of a SHA-256"):
        find_stages(folder)
    sums.write_text("".join(lines))
    (folder / "lungs_fine_fold_1.safetensors").write_bytes(b"other")
    with pytest.raises(UserError, match=r"fold_1.safetensors is missing or damaged"):
        find_stages(folder)


def test_a_label_with_a_bar_keeps_the_table_of_the_card(networks: list[StageWeights]) -> None:
    renamed = []
    for network in networks:
        task = {**network.metadata["task"], "labels": {"a|b": 1}}
        renamed.append(network._replace(metadata={**network.metadata, "task": task}))
    checksums = {network.file_name: "0" for network in renamed}
    card = model_card(renamed, checksums, {}, ["trusted_targets=[mine.]"])
    assert "weights=<this folder> 'trusted_targets=[mine.]'\n" in card, "as a shell reads it"
    assert "| a\\|b | 1 | not stated |" in card.splitlines()
