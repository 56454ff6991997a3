"""Weights recipe: the cascade trained on all cases and written as one small file per stage."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from medseg.config.schema import MakeWeightsConfig
from medseg.data.case_table import read_case_table
from medseg.io.atomic import check_writable, replace_text
from medseg.studies.steps import cascade_steps, last_checkpoint, run_steps

# Keys of the configuration that hold folders of the training machine.
FOLDER_KEYS = (
    "run_dir",
    "resume",
    "init_from",
    "data.cases",
    "data.cache",
    "data.phantoms.folder",
    "stage.coarse",
    "logger.save_dir",
)


def make_weights(config: MakeWeightsConfig) -> int:
    """Train both stages on every case of the table and write `<task>_<stage>.safetensors` with their checksums.

    Raises:
        SystemExit: With the exit code of a training that failed.
    """
    runs, output = Path(config.runs), Path(config.output)
    read_case_table(Path(config.cases))  # a damaged table stops the command here
    check_writable(output)
    data = [f"data.cases={Path(config.cases).absolute()}", "data.fold=all", "data.val_patients=[]", "data.test_patients=[]"]
    run_steps(cascade_steps(config, runs / "all", data, runs))
    from medseg.weights.files import CHECKSUMS, SUFFIX, read_weights, write_weights  # imports torch

    sums = ""
    for stage in ("coarse", "fine"):
        metadata, weights = read_weights(last_checkpoint(runs / "all" / stage), stage, stage)
        path = output / f"{metadata['task']['name']}_{stage}{SUFFIX}"
        sums += f"{write_weights(path, without_folders(metadata), weights)}  {path.name}\n"
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB, {sum(value.numel() for value in weights.values())} weights")
    replace_text(output / CHECKSUMS, sums)
    return 0


def without_folders(metadata: dict[str, Any]) -> dict[str, Any]:
    """Remove the folders of the training machine from the metadata of a checkpoint; file names stay."""
    cleaned = copy.deepcopy(metadata)
    for key in FOLDER_KEYS:
        *groups, name = key.split(".")
        node = cleaned["config"]
        for group in groups:
            node = node.get(group, {})
        if isinstance(node.get(name), str):
            node[name] = Path(node[name]).name
    return cleaned
