"""Model folders: where they are found, and the sentences for those that cannot be used."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from medseg.errors import UserError
from medseg.nnunet.checkpoint import read_checkpoint
from medseg.nnunet.folder import open_model_folder
from medseg.nnunet.network import first_difference, make_network

Toy = dict[str, Any]
MakeFolder = Callable[..., Path]


def test_a_folder_and_the_folder_above_are_the_same(toy: Toy, make_folder: MakeFolder) -> None:
    folder = make_folder(toy)
    here, above = open_model_folder(folder), open_model_folder(folder.parent)
    assert here == above
    assert list(here.checkpoints) == ["0"]


def test_a_checkpoint_is_read_with_the_numbers_of_its_logger(
    toy: Toy, make_folder: MakeFolder
) -> None:
    toy |= {"trainer": "nnUNetTrainer_4000epochs_NoMirroring", "mirror_axes": None}
    model = open_model_folder(make_folder(toy))
    checkpoint = read_checkpoint(model.checkpoints["0"], "weights=model")
    assert checkpoint.mirror_axes == ()
    assert checkpoint.trainer == "nnUNetTrainer_4000epochs_NoMirroring"
    assert first_difference(make_network(model.plan), checkpoint.weights) == ""


def test_folds_are_chosen_by_name(toy: Toy, make_folder: MakeFolder) -> None:
    folder = make_folder({**toy, "folds": (0, 3, "all")})
    assert list(open_model_folder(folder).checkpoints) == ["0", "3"]
    assert list(open_model_folder(folder, ["3", "0"]).checkpoints) == ["3", "0"]
    assert list(open_model_folder(folder, ["all"]).checkpoints) == ["all"]
    sentence = r"folds=1: fold 1 of .* has no checkpoint_final.pth; .* are 0, 3, all"
    with pytest.raises(UserError, match=sentence):
        open_model_folder(folder, ["1"])


def test_the_best_checkpoint_stands_in_and_is_told(toy: Toy, make_folder: MakeFolder) -> None:
    fold = make_folder(toy) / "fold_0"
    (fold / "checkpoint_final.pth").rename(fold / "checkpoint_best.pth")
    model = open_model_folder(fold.parent)
    assert model.checkpoints["0"].name == "checkpoint_best.pth"
    assert "checkpoint_best.pth, since checkpoint_final.pth is missing" in model.notes[0]


def zipped(folder: Path, output: Path) -> Path:
    """Pack a model folder as nnU-Net's export does, below the name of its data set."""
    with zipfile.ZipFile(output, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                archive.write(file, Path("Dataset999_Toy", folder.name, file.relative_to(folder)))
    return output


def test_the_zip_file_of_an_export_is_unpacked_and_removed(
    toy: Toy, make_folder: MakeFolder, tmp_path: Path
) -> None:
    model = open_model_folder(zipped(make_folder(toy), tmp_path / "model.zip"))
    checkpoint = model.checkpoints["0"]
    assert read_checkpoint(checkpoint, "weights=model.zip").mirror_axes == (0, 1, 2)
    del model
    assert not checkpoint.exists()


def test_a_truncated_zip_file_is_refused(toy: Toy, make_folder: MakeFolder, tmp_path: Path) -> None:
    archive = zipped(make_folder(toy), tmp_path / "model.zip")
    archive.write_bytes(archive.read_bytes()[:5000])
    with pytest.raises(UserError, match=r"not a whole one .*; copy it again"):
        open_model_folder(archive)


def test_a_zip_file_writes_nothing_outside(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "model.zip", "w") as archive:
        archive.writestr("../plans.json", "{}")
    with pytest.raises(UserError, match="leads out of the zip file"):
        open_model_folder(tmp_path / "model.zip")


def test_several_models_are_listed_with_what_to_type(toy: Toy, make_folder: MakeFolder) -> None:
    folder = make_folder(toy)
    other = folder.with_name(folder.name.replace("Trainer", "TrainerOther"))
    shutil.copytree(folder, other)
    with pytest.raises(UserError, match="holds several models") as refused:
        open_model_folder(folder.parent)
    typed = re.search(r"such as weights=(\S+)$", str(refused.value))
    assert typed is not None
    assert open_model_folder(Path(typed[1])).checkpoints


def test_a_missing_fold_is_named(toy: Toy, make_folder: MakeFolder) -> None:
    folder = make_folder(toy)
    shutil.rmtree(folder / "fold_0")
    with pytest.raises(UserError, match="no fold has one; copy the folder again"):
        open_model_folder(folder)


def test_version_1_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "plans.pkl").write_bytes(b"")
    with pytest.raises(UserError, match=r"nnU-Net version 1 .*train it again with version 2"):
        open_model_folder(tmp_path)


@pytest.mark.parametrize("damage", ["missing", "folder"])
def test_a_wrong_path_is_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "nothing" if damage == "missing" else tmp_path
    words = (
        "no such folder"
        if damage == "missing"
        else "neither the SHA256SUMS of medseg is there, nor the plans.json"
    )
    with pytest.raises(UserError, match=words):
        open_model_folder(path)


@pytest.mark.parametrize("name", ["last.ckpt", "lungs_fine.safetensors", "checkpoint_final.pth"])
def test_a_file_of_weights_is_no_model_folder(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    torch.save({}, path)
    with pytest.raises(UserError, match=r"got a file of weights; give its folder, or .* coarse="):
        open_model_folder(path)


def test_a_renamed_folder_names_its_configuration_where_the_plans_have_several(
    toy: Toy, make_folder: MakeFolder
) -> None:
    folder = make_folder(toy)
    configurations = toy["plans"]["configurations"]
    assert list(configurations) == ["2d", "3d_fullres"]
    renamed = folder.rename(folder.with_name("organs"))
    with pytest.raises(UserError, match=r"organs does not say .* and one of 2d, 3d_fullres"):
        open_model_folder(renamed)
    renamed = renamed.rename(renamed.with_name("3d_fullres"))
    assert open_model_folder(renamed).plan.configuration == "3d_fullres"
    del configurations["2d"]
    (renamed / "plans.json").write_text(json.dumps(toy["plans"]))
    renamed = renamed.rename(renamed.with_name("organs"))
    assert open_model_folder(renamed).plan.configuration == "3d_fullres"


def test_a_missing_data_set_is_refused(toy: Toy, make_folder: MakeFolder) -> None:
    folder = make_folder(toy)
    (folder / "dataset.json").unlink()
    with pytest.raises(UserError, match=r"dataset\.json is missing"):
        open_model_folder(folder)


def test_pickles_beside_the_weights_stay_closed_and_are_told(
    toy: Toy, make_folder: MakeFolder
) -> None:
    folder = make_folder(toy)
    (folder / "crossval_results_folds_0").mkdir()
    (folder / "crossval_results_folds_0" / "postprocessing.pkl").write_bytes(b"\x80\x04.")
    (note,) = open_model_folder(folder).notes
    assert note.startswith("postprocessing.pkl beside the weights was not opened")


def test_a_pickle_of_another_model_is_not_told(toy: Toy, make_folder: MakeFolder) -> None:
    folder = make_folder(toy)
    ensemble = folder.parent / "ensembles" / "of_two"
    ensemble.mkdir(parents=True)
    (ensemble / "postprocessing.pkl").write_bytes(b"\x80\x04.")
    assert open_model_folder(folder).notes == ()


def test_a_folder_without_permission_beside_the_model_is_passed_over(
    toy: Toy, make_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(toy)
    locked = [folder.parent / "lost+found", folder / "crossval_results_folds_0"]
    for path in locked:
        path.mkdir()
    real_stat = os.stat

    def stat(path: Any, **options: Any) -> os.stat_result:
        if isinstance(path, (str, Path)) and Path(path).parent in locked:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real_stat(path, **options)

    monkeypatch.setattr(os, "stat", stat)
    assert open_model_folder(folder.parent).path == folder


def test_a_zip_file_without_permission_is_no_full_disk(
    toy: Toy, make_folder: MakeFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = zipped(make_folder(toy), tmp_path / "model.zip")

    def refuse(path: Any, *_: Any, **__: Any) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(io, "open", refuse)
    with pytest.raises(UserError, match=r"cannot be read \(Permission denied\); check its perm"):
        open_model_folder(archive)


class Attack:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (self.command,)


def test_code_in_a_checkpoint_is_refused_and_not_run(
    toy: Toy, make_folder: MakeFolder, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    model = open_model_folder(make_folder(toy, logging=Attack(f"touch '{trace}'")))
    with pytest.raises(UserError, match=r"could execute arbitrary code .* that nnU-Net wrote"):
        read_checkpoint(model.checkpoints["0"], "weights=model")
    assert not trace.exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"network_weights": None}, "expected a checkpoint of nnU-Net with network_weights"),
        ({"network_weights": {"a": torch.tensor([float("nan")])}}, "NaN or infinity"),
        ({"network_weights": {"a": torch.ones(1).expand(10**9)}}, "not an ordinary dense tensor"),
        ({"inference_allowed_mirroring_axes": (0, 7)}, "among 0, 1 and 2"),
        ({"inference_allowed_mirroring_axes": [torch.zeros(2)]}, "among 0, 1 and 2"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(
    toy: Toy, make_folder: MakeFolder, changes: dict[str, object], words: str
) -> None:
    model = open_model_folder(make_folder(toy, **changes))
    with pytest.raises(UserError, match=words):
        read_checkpoint(model.checkpoints["0"], "weights=model")


def test_a_truncated_checkpoint_is_refused(toy: Toy, make_folder: MakeFolder) -> None:
    model = open_model_folder(make_folder(toy))
    path = model.checkpoints["0"]
    path.write_bytes(path.read_bytes()[:10_000])
    with pytest.raises(UserError, match="not a whole torch checkpoint"):
        read_checkpoint(path, "weights=model")


def test_weights_of_another_network_are_told_apart(toy: Toy, make_folder: MakeFolder) -> None:
    plan = open_model_folder(make_folder(toy)).plan
    network = make_network(plan)
    weights = dict(network.state_dict())
    name = next(iter(weights))
    wrong_shape = {**weights, name: weights[name][:1]}
    assert f"{name} has the shape" in first_difference(network, wrong_shape)
    other_weights = {**weights, "other": weights[name]}
    assert "is no part of the network" in first_difference(network, other_weights)
    del weights[name]
    assert first_difference(network, weights) == f"{name} is missing"
