"""Commands of docs/first_results.md lead from others' data sets to a first result."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import forked
import pytest
from layouts import (
    make_dicom,
    make_luna16,
    make_msd,
    make_nnunet,
    make_slicer,
    make_totalsegmentator,
)

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "first_results.md"
# Section of the page: its data set, and files that its commands leave.
STARTS: dict[str, tuple[str, Callable[[Path], Path], list[str]]] = {
    "nnU-Net": ("nnUNet_raw/Dataset001_Chest", make_nnunet, ["chest/out/chest_003.nii.gz"]),
    "Medical Segmentation Decathlon": (
        "Task01_BrainTumour",
        make_msd,
        ["brain/out/BRATS_003.nii.gz"],
    ),
    "TotalSegmentator": (
        "Totalsegmentator_dataset",
        make_totalsegmentator,
        ["lungs/coarse/checkpoints/last.ckpt"],
    ),
    "LUNA16": ("LUNA16", make_luna16, ["luna/coarse/checkpoints/last.ckpt"]),
    "DICOM": (
        "LCTSC",
        partial(make_dicom, names=("Lung_L", "Lung_R", "Heart")),
        ["lctsc/scores/metrics.csv", "lctsc/coarse/checkpoints/last.ckpt"],
    ),
    "3D Slicer": ("slicer", make_slicer, ["mine/coarse/checkpoints/last.ckpt"]),
}
# A training of one step that fits these data sets.
SMALL = [
    "steps=1", "model=small", "model.width=4", "spacing.target_spacing_mm=[4.0,4.0,4.0]",
    "trainer.accelerator=cpu", "logger=none",
    "data.num_workers=0", "data.cache=cache",
]  # fmt: skip


def commands(section: str) -> list[list[str]]:
    """Arguments of `medseg` in the indented lines of a section."""
    text = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    body = next(part for part in text if part.startswith(f"{section}\n"))
    body = body.replace("\\\n", " ")  # a command may go on in the next line
    return [shlex.split(line)[1:] for line in body.splitlines() if line.startswith("    medseg ")]


def test_the_page_has_a_section_for_each_start() -> None:
    sections = re.findall(r"^## (.+)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert sections == list(STARTS)
    assert all(commands(section)[0][0] == "import" for section in sections)


@pytest.mark.slow
@pytest.mark.parametrize("section", STARTS)
def test_each_start_leads_to_a_first_result(tmp_path: Path, section: str) -> None:
    place, make, results = STARTS[section]
    make(tmp_path / place)
    for command in commands(section):
        small = {
            "train": SMALL,
            "predict": ["accelerator=cpu"],
            "evaluate": ["pictures=false"],
        }.get(command[0], [])
        if "stage=single" in command:
            small = [*small, "stage.patch_size=[32,32,32]", "inference.tile_size=[32,32,32]"]
        done = forked.run(
            [sys.executable, "-m", "medseg.commands.cli", *command, *small], cwd=tmp_path
        )
        assert done.returncode == 0, f"{command}: {done.stdout[-2000:]} {done.stderr[-2000:]}"
    assert all((tmp_path / result).is_file() for result in results)
