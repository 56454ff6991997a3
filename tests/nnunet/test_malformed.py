"""Malformed model folders: each is refused in one sentence with a cure, and nothing is executed."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.nnunet_reference import described_network, labels_of, toy
from medseg.errors import UserError
from medseg.inference.options import InferenceOptions
from medseg.nnunet.model import load_nnunet

CPU = torch.device("cpu")
MakeFolder = Callable[..., Path]
# Damages a whole folder, and returns the path that a user would give.
Damage = Callable[[Path], Path]
# Name of the file, in the folder of the test, that code in a model would write.
TRACE = "trace"


class Attack:
    """Writes a file when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch '{self.trace}'",)


def checkpoint_of(folder: Path) -> Path:
    return folder / "fold_0" / "checkpoint_final.pth"


def trace_of(folder: Path) -> Path:
    return folder.parents[1] / TRACE


def in_json(file: str, *place: str, value: Any) -> Damage:
    """Replace a value of a JSON file."""

    def damage(folder: Path) -> Path:
        content = json.loads((folder / file).read_text(encoding="utf-8"))
        section = content
        for key in place[:-1]:
            section = section[key]
        section[place[-1]] = value
        (folder / file).write_text(json.dumps(content), encoding="utf-8")
        return folder

    return damage


def in_plan(*place: str, value: Any) -> Damage:
    """Replace a value of the configuration."""
    return in_json("plans.json", "configurations", "3d_fullres", *place, value=value)


def in_checkpoint(change: Callable[[dict[str, Any], Path], None]) -> Damage:
    """Change the content of the checkpoint; the function also gets the path of the trace."""

    def damage(folder: Path) -> Path:
        content = torch.load(checkpoint_of(folder), weights_only=False)
        change(content, trace_of(folder))
        torch.save(content, checkpoint_of(folder))
        return folder

    return damage


def without(name: str) -> Damage:
    """Remove a file or folder."""

    def damage(folder: Path) -> Path:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
        return folder

    return damage


def cut(name: str, num_bytes: int) -> Damage:
    """Keep the beginning of a file."""

    def damage(folder: Path) -> Path:
        (folder / name).write_bytes((folder / name).read_bytes()[:num_bytes])
        return folder

    return damage


def code_in_logging(content: dict[str, Any], trace: Path) -> None:
    content["logging"] = Attack(trace)


def code_in_weights(content: dict[str, Any], trace: Path) -> None:
    content["network_weights"]["more"] = Attack(trace)


def one_weight_less(content: dict[str, Any], _: Path) -> None:
    content["network_weights"].popitem()


def unknown_weight(content: dict[str, Any], _: Path) -> None:
    content["network_weights"]["more"] = torch.ones(1)


def endless_weight(content: dict[str, Any], _: Path) -> None:
    first = next(iter(content["network_weights"]))
    content["network_weights"][first] *= float("inf")


def weights_are_a_list(content: dict[str, Any], _: Path) -> None:
    content["network_weights"] = list(content["network_weights"].values())


def plain_pickle_as_checkpoint(folder: Path) -> Path:
    checkpoint_of(folder).write_bytes(pickle.dumps(Attack(trace_of(folder))))
    return folder


def version_1(folder: Path) -> Path:
    (folder / "plans.json").unlink()
    (folder / "dataset.json").unlink()
    (folder / "plans.pkl").write_bytes(pickle.dumps(Attack(trace_of(folder))))
    return folder


def truncated_zip(folder: Path) -> Path:
    path = folder.with_suffix(".zip")
    with zipfile.ZipFile(path, "w") as archive:
        for file in folder.rglob("*.*"):
            archive.write(file, file.relative_to(folder.parent))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path


def zip_that_leads_out(folder: Path) -> Path:
    path = folder.with_suffix(".zip")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../../plans.json", "{}")
    return path


def other_labels(folder: Path) -> Path:
    return in_json("dataset.json", "labels", value=labels_of(6))(folder)


MALFORMED: dict[str, Damage] = {
    "no fold": without("fold_0"),
    "no checkpoint": without("fold_0/checkpoint_final.pth"),
    "no dataset.json": without("dataset.json"),
    "no plans.json": without("plans.json"),
    "other number of labels": other_labels,
    "labels with a gap": in_json("dataset.json", "labels", value={"background": 0, "organ": 7}),
    "weights of a wider network": in_plan(
        "architecture", "arch_kwargs", "features_per_stage", value=[4, 8, 16]
    ),
    "weights of a residual network": in_plan(
        "architecture", value=described_network(2, residual=True)
    ),
    "code as network": in_plan("architecture", "network_class_name", value="os.system"),
    "code as layer": in_plan("architecture", "arch_kwargs", "conv_op", value="os.system"),
    "code as resampling": in_plan("resampling_fn_probabilities", value="os.system"),
    "code in the logging": in_checkpoint(code_in_logging),
    "code among the weights": in_checkpoint(code_in_weights),
    "plain pickle": plain_pickle_as_checkpoint,
    "one weight less": in_checkpoint(one_weight_less),
    "unknown weight": in_checkpoint(unknown_weight),
    "infinite weight": in_checkpoint(endless_weight),
    "weights without names": in_checkpoint(weights_are_a_list),
    "truncated checkpoint": cut("fold_0/checkpoint_final.pth", 9_000),
    "empty checkpoint": cut("fold_0/checkpoint_final.pth", 0),
    "truncated plans.json": cut("plans.json", 200),
    "truncated zip": truncated_zip,
    "zip that leads out": zip_that_leads_out,
    "version 1": version_1,
    "patch that is no multiple": in_plan("patch_size", value=[9, 16, 16]),
}


@pytest.mark.parametrize("name", list(MALFORMED))
def test_a_malformed_folder_is_refused_in_one_sentence(
    name: str, make_folder: MakeFolder, tmp_path: Path
) -> None:
    small = toy(labels_of(3), [2.0, 2.0, 2.0], [8, 16, 16], network=described_network(2))
    folder = make_folder(small)
    assert load_nnunet(folder, None, CPU, InferenceOptions()).folds
    path = MALFORMED[name](folder)
    with pytest.raises(UserError) as refused:
        load_nnunet(path, None, CPU, InferenceOptions())
    sentence = str(refused.value)
    # It names the folder or a file in it, and the cure follows the fault.
    assert str(path) in sentence
    assert ";" in sentence
    assert "\n" not in sentence
    assert not trace_of(folder).exists()
    assert not list(tmp_path.parent.glob("plans.json"))
