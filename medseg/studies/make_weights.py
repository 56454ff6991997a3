"""The `make_weights` command: train the cascade on all cases and write the two small files that are passed on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from medseg.config.schema import MakeWeightsConfig
from medseg.data.case_table import read_case_table
from medseg.io.replacing import check_writable
from medseg.runs.folder import replace_text
from medseg.studies.steps import cascade_steps, last_checkpoint, run_steps

# Keys of the configuration that say where things lay on the machine that trained.
PLACES = ("run_dir", "resume", "init_from", "data.cases", "data.cache", "data.phantoms.folder", "stage.coarse", "logger.save_dir")


def make_weights(config: MakeWeightsConfig) -> int:
    """Train both stages on every case of the table and write `<task>_<stage>.safetensors` with their checksums.

    Returns:
        Exit code of the step that failed, else 0.
    """
    runs, output = Path(config.runs), Path(config.output)
    read_case_table(Path(config.cases))  # before anything is made
    check_writable(output)
    data = [
        f"data.cases={Path(config.cases).absolute()}",
        "data.fold=all",
        "data.val_patients=[]",
        "data.test_patients=[]",
    ]
    code = run_steps(
        cascade_steps(
            runs / "all",
            data,
            coarse=config.coarse,
            fine=config.fine,
            pretrain_coarse=config.pretrain_coarse,
            pretrain_fine=config.pretrain_fine,
            runs=runs,
        )
    )
    if code:
        return code
    from medseg.weights.files import CHECKSUMS, SUFFIX, read_weights, write_weights

    sums = []
    for stage in ("coarse", "fine"):
        metadata, weights = read_weights(last_checkpoint(runs / "all" / stage), stage, stage)
        path = output / f"{metadata['task']['name']}_{stage}{SUFFIX}"
        sums.append(f"{write_weights(path, without_places(metadata), weights)}  {path.name}")
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB, {sum(value.numel() for value in weights.values())} weights")
    replace_text(output / CHECKSUMS, "\n".join(sums) + "\n")
    return 0


def without_places(metadata: dict[str, Any]) -> dict[str, Any]:
    """Take the folders of the training machine out of metadata; names of files stay."""
    config = {key: dict(value) if isinstance(value, dict) else value for key, value in metadata["config"].items()}
    for place in PLACES:
        *groups, name = place.split(".")
        node: dict[str, Any] = config
        for group in groups:
            node[group] = dict(node.get(group, {}))
            node = node[group]
        if isinstance(node.get(name), str):
            node[name] = Path(node[name]).name
    return {**metadata, "config": config}
