"""Memory benchmark: predicted against measured memory and time of trainings.

    python -m benchmarks.memory output=<folder> [rows=20]

Each row of the table is a training on synthetic scans in a process of its own. The rows differ in
networks, switches, shapes, stages, batches and workers. The same command continues where it was
interrupted. The instruments are not those of `plan`: the largest total of `posix_memalign`
(`allocations.c`, preloaded), from which torch takes all tensors on a CPU, and the resident memory
of all processes in /proc, read every 20 ms. Seconds are processor time on one thread: keep the
machine quiet, since programs on other processors lengthen it too. Writes `memory.csv` and
`memory.md`.
"""

import itertools
import json
import math
import os
import shutil
import statistics
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import hydra
import torch

from benchmarks.instruments import (
    allocation_counter,
    begin_anew,
    given_arguments,
    print_values,
    train,
)
from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.config.schema import PlanConfig
from medseg.console import say
from medseg.data.samples import collate
from medseg.geometry.sizes import Shape
from medseg.io.atomic import replace_text
from medseg.io.tables import markdown_table, read_csv, write_csv
from medseg.planning.estimate import Machine, estimate
from medseg.planning.step import input_shape
from medseg.training.assemble import make_data_module

# Properties of the rows, each with its arguments by name; `rows` combines them.
NETWORKS = {
    "unet": ["model=unet"],
    "unet_lean": ["model=unet_lean"],
    "segresnet": ["model=segresnet", "model.init_filters=8"],
    "dynunet": ["model=dynunet", "model.filters=[16,32,32,64,64,64]"],
    "swin_unetr": ["model=swin_unetr"],
    "conv stem": [
        "model=unet_lean",
        "model.stem=conv",
        "model.refine=0",
        "model.block=residual",
        "model.width=8",
    ],
}
SWITCHES = {
    "plain": [],
    "bf16": ["memory.precision=bf16"],
    "channels last": ["memory.precision=bf16", "memory.channels_last=true"],
    "sqrt": ["memory.checkpointing=sqrt"],
    "bf16, all": ["memory.precision=bf16", "memory.checkpointing=all"],
    "lean": ["memory=lean"],
}
SHAPES = {
    "32×32×64": ["stage.patch_size=[32,32,64]"],
    "64×64×64": ["stage.patch_size=[64,64,64]"],
    "96×64×96": ["stage.patch_size=[96,64,96]"],
}
# Steps of this length, modulo the number of combinations (6 · 6 · 3 · 3 · 2 = 648), reach each of
# them once, since 181 and 648 have no common divisor.
STRIDE = 181
# Batch, micro-batches, loader processes and averaged weights.
LOADS = {
    "1 sample": ["data.num_workers=0"],
    "2 samples": ["stage.batch_size=2", "data.num_workers=1"],
    "4 in 2": ["stage.batch_size=4", "memory.accumulate=2", "data.num_workers=2", "ema_decay=0.75"],
}
# Arguments of all rows: twelve steps, of which a line of the history holds two.
COMMON = [
    "steps=12",
    "history_every=2",
    "stage.validate_every=6",
    "trainer.threads=1",
    "trainer.accelerator=cpu",
    "data.phantoms.num_train=2",
    "data.phantoms.num_val=1",
    "data.phantoms.num_test=0",
]
STAGES = {
    "coarse": ["stage=coarse", "spacing=isotropic_3mm", "stage.slab_share=0"],
    "fine": ["stage=fine", "spacing=isotropic_3mm", "stage.elsewhere_share=0"],
}
# Heading in `memory.md` of each column of `memory.csv`.
COLUMNS = {
    "row": "",
    "allocator_mib": "allocator: predicted MiB",
    "measured_allocator_mib": "measured MiB",
    "allocator_ratio": "predicted / measured",
    "resident_mib": "resident: predicted MiB",
    "measured_resident_mib": "measured MiB",
    "resident_ratio": "predicted / measured",
    "seconds": "s/step: predicted",
    "measured_seconds": "measured",
    "seconds_ratio": "predicted / measured",
}


def rows() -> list[tuple[str, list[str]]]:
    """List the name and the arguments of all rows.

    The first ones already differ in network, switches, shape, load and stage, so that a few rows
    show each of these.
    """
    combinations = list(itertools.product(NETWORKS, SWITCHES, SHAPES, LOADS, STAGES))
    rows_by_place = {}  # by the place in the list
    for number, names in enumerate(combinations):
        network, switches, shape, load, stage = names
        arguments = [
            *STAGES[stage],
            *NETWORKS[network],
            *SWITCHES[switches],
            *LOADS[load],
            *SHAPES[shape],
            *COMMON,
        ]
        place = number * STRIDE % len(combinations)
        rows_by_place[place] = (", ".join(names), arguments)
    return [rows_by_place[place] for place in sorted(rows_by_place)]


def compose(arguments: list[str]) -> PlanConfig:
    """Configuration of `plan` for the arguments of a row."""
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return to_config(hydra.compose("plan", [*arguments, "run_dir=benchmark"]), PlanConfig)


def validated_shape(config: PlanConfig) -> Shape:
    """Voxels (D, H, W) of the largest validation case of a configuration.

    Its synthetic scans are made where they are missing.
    """
    data = make_data_module(config)
    data.prepare_data()
    data.setup("fit")
    samples = data.val_samples()
    shapes: list[Shape] = []
    for number in range(len(samples)):
        # Padded as in the validation: to a multiple of the network's divisor.
        batch = collate([samples[number]], data.divisor)
        depth, height, width = batch[0]["target"].shape[1:]
        shapes.append((depth, height, width))
    return max(shapes, key=math.prod)


def predict(arguments: list[str]) -> dict[str, float]:
    """Predict peaks in MiB and seconds of a step, by `plan`.

    Runs in a process of its own. Libraries generate the code of an operation once in a process; a
    process that had done it for another row would not spend that time again.
    """
    config = compose(arguments)
    machine = Machine(config)
    machine.prepare_for(config)
    # Operations are timed again for each row: the processor of a virtual machine may be half as
    # fast some minutes later.
    machine.costs.costs.clear()
    cost = estimate(config, input_shape(config), validated_shape(config), machine)
    return {
        "live_mib": cost.memory.peak / 2**20,
        "allocator_mib": cost.peak_allocator / 2**20,
        "resident_mib": cost.peak_resident / 2**20,
        "seconds": cost.compute_seconds + cost.other_seconds + cost.loader_seconds,
    }


def measure(arguments: list[str], folder: Path, library: Path) -> dict[str, float]:
    """Train a row in a process of its own; returns its measured peaks in MiB and its seconds.

    Args:
        arguments: Arguments of `train`.
        folder: Folder of the row, which is empty.
        library: Counter of allocations.
    """
    # The counter writes a file for each process: `allocations.<process>`.
    counting = {"LD_PRELOAD": str(library), "ALLOCATIONS": str(folder / "allocations")}
    resident_bytes = train(arguments, folder / "run", os.environ | counting)
    allocated_bytes = []
    for file in folder.glob("allocations.*"):
        # A helper process that is ending still has an empty file.
        allocated_bytes.append(int(file.read_text(encoding="ascii") or 0))
    step_cpu_s = []
    for line in read_csv(folder / "run" / "history.csv"):
        if line["loss"]:
            # 100 % is one core that is busy all the time.
            cores = float(line["cpu_percent"]) / 100
            step_cpu_s.append(float(line["seconds_per_step"]) * cores)
    return {
        # The training itself holds more than its helpers.
        "measured_allocator_mib": max(allocated_bytes) / 2**20,
        "measured_resident_mib": resident_bytes / 2**20,
        # Without the first line, whose steps generate the code of the operations.
        "measured_seconds": statistics.median(step_cpu_s[1:]),
    }


def main() -> None:
    """Predict and measure all rows that the output folder lacks, and write the table after each."""
    output, options = given_arguments(["rows"])
    begin_anew()
    library = allocation_counter(output)
    folder_arguments = [
        f"data.phantoms.folder={output / 'phantoms'}",
        f"data.cache={output / 'cache'}",
        "logger=none",
    ]
    torch.set_num_threads(1)
    table: list[dict[str, Any]] = []
    num_rows = int(options.get("rows", 20))
    for number, (name, arguments) in enumerate(rows()[:num_rows]):
        folder = output / f"{number:03d}"
        row_file = folder / "row.json"
        if not row_file.is_file():
            shutil.rmtree(folder, ignore_errors=True)  # an interrupted row starts again
            folder.mkdir()
            try:
                # Not a `Worker`, which is a daemonic process: a plan starts processes of its own,
                # which a daemonic process may not do.
                with ProcessPoolExecutor(1, get_context("spawn")) as executor:
                    numbers = executor.submit(predict, [*arguments, *folder_arguments]).result()
                numbers |= measure([*arguments, *folder_arguments], folder, library)
            except Exception as error:  # a row that fails must not end the others
                say(f"{name}: {type(error).__name__}: {error}")
                continue
            replace_text(row_file, json.dumps({"row": name, **numbers}))
        table.append(with_ratios(json.loads(row_file.read_text(encoding="utf-8"))))
        write(table, output)
        print_values(table[-1], 3)


def with_ratios(row: dict[str, Any]) -> dict[str, Any]:
    """Add the ratios of predicted to measured values."""
    return {
        **row,
        "allocator_ratio": row["allocator_mib"] / row["measured_allocator_mib"],
        "resident_ratio": row["resident_mib"] / row["measured_resident_mib"],
        "seconds_ratio": row["seconds"] / row["measured_seconds"],
    }


def write(table: list[dict[str, Any]], output: Path) -> None:
    """Write `memory.csv`, and `memory.md` with a summary above its table."""
    write_csv(output / "memory.csv", table)
    lines = []
    for name in ("allocator", "resident", "seconds"):
        # Relative errors with their sign, and without.
        errors = sorted(row[f"{name}_ratio"] - 1 for row in table)
        absolute_errors = sorted(abs(error) for error in errors)
        percentile_95 = absolute_errors[int(0.95 * (len(absolute_errors) - 1))]
        lines.append(
            f"* {name}: error {100 * statistics.median(absolute_errors):.1f} % (median), "
            f"{100 * percentile_95:.1f} % (95th percentile), "
            f"lowest {100 * errors[0]:+.1f} %, highest {100 * errors[-1]:+.1f} %"
        )
    number_columns = [column for column in COLUMNS if column != "row"]
    table_text = markdown_table(table, COLUMNS, dict.fromkeys(number_columns, ".3f"))
    summary = "\n".join(lines)
    replace_text(output / "memory.md", f"{len(table)} trainings\n\n{summary}\n\n{table_text}")


if __name__ == "__main__":
    main()
