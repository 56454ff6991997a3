"""The commands of docs/organ.md lead from a data set of the Decathlon to another organ."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import forked
import numpy as np
import pytest
import yaml
from layouts import LEFT, blocks, save, write_json

from medseg.io.read import read_labels
from medseg.task_options import TaskOptions

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "organ.md").read_text(encoding="utf-8")
SMALL = {
    "prepare": ["data.cache=cache"],
    "train": [
        "steps=1", "model.width=4", "stage.patch_size=[32,32,32]", "inference.tile_size=[32,32,32]",
        "spacing.target_spacing_mm=[4.0,4.0,4.0]",
        "stage.validate_every=1", "trainer.accelerator=cpu", "logger=none", "data.num_workers=0",
        "data.cache=cache",
    ],
    "predict": ["accelerator=cpu"],
}  # fmt: skip


@pytest.mark.slow
def test_a_data_set_leads_to_labels_of_another_organ(tmp_path: Path) -> None:
    folder = tmp_path / "Task09_Spleen"
    for index in range(4):
        image, labels = blocks(index)
        save(folder / ("imagesTs" if index == 3 else "imagesTr") / f"spleen_{index}.nii.gz", image)
        if index < 3:
            save(folder / "labelsTr" / f"spleen_{index}.nii.gz", (labels == LEFT).astype(np.uint8))
    names = [f"spleen_{index}.nii.gz" for index in range(4)]
    about = {
        "modality": {"0": "CT"}, "labels": {"0": "background", "1": "spleen"},
        "test": [f"./imagesTs/{names[3]}"],
        "training": [
            {"image": f"./imagesTr/{name}", "label": f"./labelsTr/{name}"} for name in names[:3]
        ],
    }  # fmt: skip
    write_json(folder / "dataset.json", about)
    block = PAGE[PAGE.index("## From a data set, by hand") :].split("\n\n")[2]
    commands = [shlex.split(line, comments=True)[1:] for line in block.splitlines()]
    assert [command[0] for command in commands] == ["import", "prepare", "train", "predict"]
    for command in commands:
        done = forked.run(
            [sys.executable, "-m", "medseg.commands.cli", *command, *SMALL.get(command[0], [])],
            cwd=tmp_path,
        )
        assert done.returncode == 0, f"{command}: {done.stdout[-2000:]} {done.stderr[-2000:]}"
    assert read_labels(tmp_path / "spleen" / "out" / names[3]).array.shape == blocks(3)[0].shape


def test_the_task_of_the_page_is_valid() -> None:
    (text,) = re.findall(r"^    task:\n(?:      .*\n)+", PAGE, re.MULTILINE)
    task = yaml.safe_load(text)["task"]
    assert task["labels"] == {"spleen": 1}
    assert task.keys() <= set(TaskOptions.__dataclass_fields__)
