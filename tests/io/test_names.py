"""Files whose names are not UTF-8 are written and read by every library."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from io_volumes import make_grid, make_labels

from medseg.io.label_table import Structure
from medseg.io.names import is_utf8, utf8_path
from medseg.io.read import read_labels
from medseg.io.simpleitk import read_segments
from medseg.io.write import write_labels
from medseg.weights.files import load_checkpoint


def raw_path(folder: Path, name: bytes) -> Path:
    """A path in a folder with a Latin-1 name, which is made."""
    path = Path(os.fsdecode(os.fsencode(folder) + b"/Pat_M\xfcller/" + name))
    path.parent.mkdir()
    return path


@pytest.mark.parametrize(
    "name", [b"a.mha", b"a.mhd", b"a.nrrd", b"a.nii.gz", b"\xe4.mha", b"\xe4.mhd", b"\xe4.seg.nrrd"]
)
def test_label_maps_in_a_folder_of_latin_1(tmp_path: Path, name: bytes) -> None:
    path, labels, grid = raw_path(tmp_path, name), make_labels(), make_grid(np.eye(3))
    write_labels(path, labels, grid)
    assert np.array_equal(read_labels(path).array, labels)
    assert not list(path.parent.glob(".medseg-*"))


def test_names_of_segments(tmp_path: Path) -> None:
    path = raw_path(tmp_path, b"\xe4.seg.nrrd")
    structures = [Structure("left_lung", 1)]
    write_labels(path, make_labels(), make_grid(np.eye(3)), structures=structures)
    assert next(segment.name for segment in read_segments(path)) == "left_lung"


def test_a_checkpoint(tmp_path: Path) -> None:
    path = raw_path(tmp_path, b"last.ckpt")
    torch.save({"a": torch.arange(3)}, path)
    assert load_checkpoint(path, "last.ckpt")["a"].tolist() == [0, 1, 2]


def test_a_name_in_utf_8_is_used_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "M\u00fcller"
    with utf8_path(path) as same:
        assert same is path
    assert not is_utf8("M\udcfcller")
