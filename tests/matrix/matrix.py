"""Covering array of networks, stages, losses and switches: every pair trains two steps.

A row trains, resumes bit-equal and predicts; a combination in `REFUSED` is refused with the
sentence that is stated there. `python tests/matrix/matrix.py docs/matrix.md` runs the full array,
with several ranks, and writes the page and `docs/matrix/rows.csv` beside it (`make matrix`).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import hydra
import torch
from covering import Row, covering_rows
from tiny import make_tiny_table

from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.errors import EXIT_USER_ERROR, UserError
from medseg.io.tables import markdown_table, write_csv
from medseg.prediction.segmenter import Segmenter
from medseg.runs.folder import load_config, open_run
from medseg.runs.train_run import train_run
from medseg.studies.train_arguments import merge_arguments
from medseg.targets import targets_first
from medseg.training.check import check_objects
from medseg.training.options import TrainConfig
from medseg.training.preemption import STOP, Preempted

# Factor to its values, and each value to its arguments of `train`. Networks have few channels and
# an input size of 32 voxels.
FACTORS: dict[str, dict[str, Sequence[str]]] = {
    "network": {
        "unet": ["model=unet", "model.width=4", "model.depth=2", "model.blocks_per_level=[1,1,1]"],
        "unet_lean": [
            "model=unet_lean",
            "model.width=4",
            "model.depth=2",
            "model.blocks_per_level=[1,1,1]",
            "model.refine=4",
        ],
        "segresnet": [
            "model=segresnet",
            "model.init_filters=8",
            "model.blocks_down=[1,1,1]",
            "model.blocks_up=[1,1]",
        ],
        "dynunet": [
            "model=dynunet",
            "model.kernel_size=[3,3,3]",
            "model.strides=[1,2,2]",
            "model.upsample_kernel_size=[2,2]",
            "model.filters=[4,8,8]",
            "model.deep_supr_num=1",
        ],
        "swin_unetr": [
            "model=swin_unetr",
            "model.feature_size=12",
            "model.depths=[1,2,1,1]",  # two blocks: windows and shifted windows
            "model.norm_name=[group,{num_groups: 4}]",
        ],
        "unetr": [
            "model=unetr",
            "model.img_size=[32,32,32]",
            "model.feature_size=4",
            "model.hidden_size=24",
            "model.mlp_dim=24",
            "model.num_heads=2",
        ],
        "AttentionUnet": [
            "model._target_=monai.networks.nets.AttentionUnet",
            "model.channels=[4,8,8]",
            "model.strides=[2,2]",
        ],
    },
    "stage": {
        "coarse": ["stage=coarse"],
        "fine": ["stage=fine"],
        "patches": ["stage=fine", "stage.patch_size=[32,32,32]", "inference.tile_size=[32,32,32]"],
    },
    "loss": {
        "dice_ce": ["loss=dice_ce"],
        "batch_dice_ce": ["loss=batch_dice_ce"],
        "dice_focal": ["loss=dice_focal"],
        "tversky": ["loss=tversky"],
        "generalized_dice": ["loss=generalized_dice"],
        "hausdorff_dt": ["loss=hausdorff_dt"],
    },
    "precision": {"fp32": ["memory.precision=fp32"], "bf16": ["memory.precision=bf16"]},
    "checkpointing": {
        value: [f"memory.checkpointing={value}"] for value in ("none", "sqrt", "all")
    },
    "accumulate": {value: [f"memory.accumulate={value}"] for value in ("1", "2")},
    "channels_last": {value: [f"memory.channels_last={value}"] for value in ("false", "true")},
    "average": {"none": ["ema_decay=null"], "ema": ["ema_decay=0.5"]},
    "optimizer": {"adamw": ["optimizer=adamw"], "sgd": ["optimizer=sgd"]},
    "schedule": {"one_cycle": ["schedule=one_cycle"], "constant": ["schedule=constant"]},
}
# Several ranks are processes of their own, and belong to the full array only.
RANKS = {"ddp": ["trainer=ddp"]}
# Column that says whether a row did all three.
OUTCOME = "trains, resumes, predicts"
PAGE = """# Networks, stages, losses and switches together

    make matrix      # in a checkout: trains all rows, writes this page and matrix/rows.csv

**{num_passed} of {num_rows} small trainings passed.** Each has two steps, and is a row of
[`rows.csv`](matrix/rows.csv). A row has one value of each setting below. Every pair of values of
two settings occurs in at least one row, except the refused pairs at the end. The last
{num_rank_rows} rows run as several processes. `patches` is the fine stage on patches of 32×32×32
voxels.

For each row `make matrix` checks that

* it trains;
* a run that is stopped after the first step and resumed ends with the same weights, bit for bit;
* its checkpoint predicts.

{factors}
## Refused

{refused}"""
# Values that are refused together, with a part of the sentence that says so.
REFUSED: list[tuple[Row, str]] = [
    *(
        (
            {"network": "unetr", "stage": stage},
            "the network accepts inputs of [32, 32, 32] voxels only",
        )
        for stage in ("coarse", "fine")
    ),
]


def is_allowed(row: Mapping[str, str]) -> bool:
    """Whether nothing refuses the values of a row."""
    return not any(values.items() <= row.items() for values, _ in REFUSED)


ROWS = covering_rows({factor: list(values) for factor, values in FACTORS.items()}, is_allowed)
# Rows of the slow tests: all but most of those of the two networks whose steps take the longest.
SLOW_ROWS = [
    row
    for number, row in enumerate(ROWS)
    if row["network"] != "swin_unetr"
    or row["network"] not in [one["network"] for one in ROWS[:number]]
]
RANK_ROWS = covering_rows(
    {factor: list(values) for factor, values in {"ranks": RANKS, **FACTORS}.items()},
    is_allowed,
    of="ranks",
)


def arguments_of(table: Path, row: Mapping[str, str]) -> list[str]:
    """Arguments of `train` for a row; factors that it lacks have their first value."""
    values = {**{factor: next(iter(known)) for factor, known in FACTORS.items()}, **row}
    batch_size = int(values["accumulate"]) * (2 if "ranks" in row else 1)
    common = [
        f"stage.batch_size={max(2, batch_size)}", f"data.cases='{table}'",
        f"data.cache='{table.parent / 'cache'}'", "data.num_workers=0",
        "spacing.target_spacing_mm=[6.0,6.0,6.0]", "augment=none", "logger=none",
        "trainer.accelerator=cpu", "trainer.threads=1", "steps=2",
        "stage.validate_every=2", "checkpoint_every=1",
    ]  # fmt: skip
    own = [{**FACTORS, "ranks": RANKS}[factor][value] for factor, value in values.items()]
    return targets_first(merge_arguments(common, *own))


def compose(table: Path, row: Mapping[str, str], run_dir: Path) -> TrainConfig:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return to_config(
            hydra.compose("train", [*arguments_of(table, row), f"run_dir='{run_dir}'"]), TrainConfig
        )


def train_and_resume(table: Path, row: Mapping[str, str], folder: Path) -> Path:
    """Train a row here in one go, and again with a stop after step 1; returns the run folder."""
    whole, stopped = folder / "whole", folder / "stopped"
    config = compose(table, row, whole)
    check_objects(config)
    open_run(config)
    train_run(load_config(whole))
    open_run(compose(table, row, stopped))
    STOP.is_asked = True  # as by a signal during the first step
    try:
        train_run(load_config(stopped))
    except Preempted:
        STOP.is_asked = STOP.is_safe = False
    assert not (stopped / "summary.json").is_file(), "the run did not stop"
    train_run(load_config(stopped))
    assert_equal_weights(whole, stopped)
    return whole


def train_and_resume_ranks(table: Path, row: Mapping[str, str], folder: Path) -> Path:
    """The same with several ranks: resumes from a copy of the first step's checkpoint."""
    whole, stopped = folder / "whole", folder / "stopped"
    command = [sys.executable, "-m", "medseg.commands.cli", "train"]
    first, last = stopped / "checkpoints" / "last.ckpt", whole / "checkpoints" / "last.ckpt"
    first.parent.mkdir(parents=True)
    with subprocess.Popen(
        [*command, *arguments_of(table, row), f"hydra.run.dir={whole}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    ) as process:
        while process.poll() is None:
            if not first.is_file() and last.is_file():
                shutil.copy(last, first)
            time.sleep(0.01)
        assert process.stderr is not None
        said = process.stderr.read()
    if process.returncode == EXIT_USER_ERROR:
        raise UserError(said.strip().splitlines()[-1].removeprefix("medseg: "))
    assert process.returncode == 0, said
    assert torch.load(first, weights_only=True)["global_step"] == 1
    shutil.copy(whole / "config.yaml", stopped)
    subprocess.run([*command, f"resume={stopped}"], check=True, stdout=subprocess.DEVNULL)
    assert_equal_weights(whole, stopped)
    return whole


def assert_equal_weights(*run_dirs: Path) -> None:
    """Compare the last weights of two runs bit by bit."""
    one, other = (
        torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for folder in run_dirs
    )
    assert one.keys() == other.keys()
    assert all(bool(value.isfinite().all()) for value in one.values())
    differing = [key for key in one if not torch.equal(one[key], other[key])]
    assert not differing, f"resumed weights differ: {differing[:3]}"


def run_row(table: Path, row: Mapping[str, str], folder: Path, others: Mapping[str, Path]) -> None:
    """Train, resume and predict; `others` holds a checkpoint of each stage, for the untrained one.

    Raises:
        UserError: If the row is refused.
        AssertionError: If resumed weights differ, or weights are not finite.
    """
    own = (
        (train_and_resume_ranks if "ranks" in row else train_and_resume)(table, row, folder)
        / "checkpoints"
        / "last.ckpt"
    )
    coarse, fine = (own, others["fine"]) if row["stage"] == "coarse" else (others["coarse"], own)
    Segmenter([coarse], [fine], accelerator="cpu").segment(table.parent / "c3.nii.gz")


def main() -> None:
    """Run all rows one after the other; after each, write the page named on the command line."""
    page, lines = Path(sys.argv[1]), []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "cases").mkdir()
        table = make_tiny_table(folder / "cases")
        others = {
            stage: train_and_resume(table, {"stage": stage}, folder / stage)
            / "checkpoints"
            / "last.ckpt"
            for stage in ("coarse", "fine")
        }
        rows = [*ROWS, *RANK_ROWS]
        for number, row in enumerate(rows, start=1):
            start_s = time.perf_counter()
            try:
                run_row(table, row, folder / str(number), others)
                outcome = "yes"
            except Exception as error:  # a row that fails must not end the others
                outcome = f"FAILS: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            lines.append({"row": number, "ranks": "one", **row, OUTCOME: outcome})
            print(
                f"{number} of {len(rows)}: {outcome}, {time.perf_counter() - start_s:.1f} s",
                flush=True,
            )
            shutil.rmtree(folder / str(number), ignore_errors=True)
            write_page(page, lines)
    sys.exit(any(line[OUTCOME] != "yes" for line in lines))


def write_page(page: Path, lines: Sequence[Mapping[str, str | int]]) -> None:
    """Write the page, and its rows into `<page without suffix>/rows.csv`."""
    factors = [
        {"setting": factor, "values": ", ".join(f"`{value}`" for value in values)}
        for factor, values in FACTORS.items()
    ]
    refused = [
        {
            "combination": " ".join(f"{key}={value}" for key, value in values.items()),
            "refused because": sentence,
        }
        for values, sentence in REFUSED
    ]
    text = PAGE.format(
        num_rows=len(lines),
        num_rank_rows=sum(line["ranks"] != "one" for line in lines),
        num_passed=sum(line[OUTCOME] == "yes" for line in lines),
        factors=markdown_table(factors),
        refused=markdown_table(refused),
    )
    page.write_text(text, encoding="utf-8")
    rows = page.with_suffix("") / "rows.csv"
    rows.parent.mkdir(exist_ok=True)
    write_csv(rows, lines)


if __name__ == "__main__":
    main()
