"""Weights as files: what is written is read, and what is not right is refused by its name."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from medseg.errors import UserError
from medseg.weights import files
from medseg.weights.files import (
    METADATA_FORMAT,
    read_weights,
    shipped_weights,
    trained_cases,
    write_weights,
)

METADATA = {
    "format": METADATA_FORMAT,
    "stage": "coarse",
    "spacing_mm": [2.0, 2.0, 2.0],
    "task": {"name": "ü"},
}
WEIGHTS = {
    "stem.weight": torch.randn(4, 1, 3, 3, 3).to(memory_format=torch.channels_last_3d),
    "head.bias": torch.randn(3),
}


def test_metadata_and_weights_come_back(tmp_path: Path) -> None:
    path = tmp_path / "ü (1).safetensors"
    checksum = write_weights(path, METADATA, WEIGHTS)
    assert checksum == hashlib.sha256(path.read_bytes()).hexdigest()
    metadata, weights = read_weights(path, "coarse", "coarse")
    assert metadata == METADATA
    assert weights.keys() == WEIGHTS.keys()
    assert all(torch.equal(weights[name], value) for name, value in WEIGHTS.items())
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("missing", "there is no such checkpoint"),
        ("cut", "not a whole safetensors file"),
        ("header", "not a whole safetensors file"),
        ("empty", "not a whole safetensors file"),
        ("foreign", "not a checkpoint of medseg"),
        ("format", "format 999, but medseg"),
        ("stage", "a checkpoint of the coarse stage; a fine one is needed"),
    ],
)
def test_what_is_not_right_is_said_in_one_sentence(damage: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    metadata = {"foreign": {}, "format": METADATA | {"format": 999}}.get(damage, METADATA)
    write_weights(path, metadata, WEIGHTS)
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage in ("cut", "header", "empty"):
        path.write_bytes(
            {"cut": content[:-10], "header": b"\xff" * 8 + content[8:], "empty": b""}[damage]
        )
    with pytest.raises(UserError) as error:
        read_weights(path, "fine" if damage == "stage" else "coarse", "init_from")
    assert str(error.value).startswith(f"init_from={path}: ")
    assert said in str(error.value)


def test_the_cases_of_a_training_are_read_or_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    torch.save({"CasesDataModule": {"train": [["a", "1f"], ["b", "2e"]], "val": []}}, path)
    assert trained_cases(path, "stage.coarse") == ["a", "b"]
    for content in ({}, {"CasesDataModule": None}, {"CasesDataModule": {"val": []}}):
        torch.save(content, path)
        with pytest.raises(UserError, match=r"does not say .*; give checkpoints/last\.ckpt of its"):
            trained_cases(path, "stage.coarse")


@pytest.mark.parametrize(
    "cases", [3, None, [1, 2], [["a"]], [["a", "1f", "x"]], {"a": 1}, torch.zeros(2)], ids=str
)
def test_cases_in_another_form_are_asked_for(cases: Any, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    torch.save({"CasesDataModule": {"train": cases}}, path)
    with pytest.raises(UserError, match="does not say which cases"):
        trained_cases(path, "stage.coarse")


def test_shipped_weights_are_checked_before_they_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "SHIPPED_FOLDER", tmp_path)
    checksum = write_weights(tmp_path / "heart_fine.safetensors", METADATA, WEIGHTS)
    (tmp_path / files.CHECKSUMS).write_text(
        f"{checksum}  heart_fine.safetensors\n", encoding="ascii"
    )
    assert shipped_weights("heart", "fine") == tmp_path / "heart_fine.safetensors"
    with pytest.raises(
        UserError, match="includes no weights for the task spleen; give fine=<checkpoint>"
    ):
        shipped_weights("spleen", "fine")
    (tmp_path / "heart_fine.safetensors").write_bytes(b"something else")
    with pytest.raises(UserError, match="missing or damaged"):
        shipped_weights("heart", "fine")
