"""Memory part of the GPU report: planned against allocated bytes, and what each switch saves."""

import gc
from typing import Any

import hydra
import torch

from benchmarks.gpu.parts import Session
from benchmarks.gpu.report import Report
from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.config.schema import PlanConfig
from medseg.errors import UserError, first_line
from medseg.memory.tracker import Timeline
from medseg.planning.estimate import STEP, Machine, card_bytes, peaks
from medseg.planning.step import count_memory, input_shape
from medseg.studies.ladder import measure_row

# Arguments of each configuration by name; each uses memory in a different way.
CONFIGURATIONS = {
    "fp32": ["memory.precision=fp32"],
    "tf32": ["memory.precision=tf32"],
    "bf16": ["memory.precision=bf16"],
    "fp16": ["memory.precision=fp16"],
    "checkpointing sqrt": ["memory.precision=bf16", "memory.checkpointing=sqrt"],
    "checkpointing all": ["memory.precision=bf16", "memory.checkpointing=all"],
    "offload": ["memory.precision=bf16", "memory.offload=true"],
    "channels last": ["memory.precision=bf16", "memory.channels_last=true"],
    "accumulate": ["memory.precision=bf16", "stage.batch_size=2", "memory.accumulate=2"],
    "group norm": ["memory.precision=bf16", "model.norm=group"],
    # The network of `lean` without its recomputation.
    "wide": ["memory.precision=bf16", "model=unet_lean"],
    "lean": ["experiment=fine_lean"],
    "adamw": ["memory.precision=bf16", "optimizer=adamw"],
}
# Configuration to the one with which it is compared, and than which it must not take more memory.
SAVES_AGAINST = {
    "bf16": "fp32",
    "fp16": "fp32",
    "checkpointing sqrt": "bf16",
    "checkpointing all": "checkpointing sqrt",
    "offload": "bf16",
    "lean": "wide",
}
# Relative differences that `plan` may have from torch's allocator, and from the figure of the card,
# which also has the context of CUDA and the allocator's unused segments.
ALLOCATOR_BOUND, CARD_BOUND = 0.05, 0.08
TIMED_STEPS = 3
SHAPE, SMALL_SHAPE = "[96,96,96]", "[32,32,32]"
SMALL_NETWORK = ["model.width=4", "model.depth=2", "model.blocks_per_level=[1,1,1]"]
MIB = 2**20
FORMATS = {
    "planned MiB": ".1f",
    "allocated MiB": ".1f",
    "planned of the card": ".1f",
    "taken of the card": ".1f",
    "s/step": ".4f",
}


def measure(session: Session) -> Report:
    """Plan and measure all configurations."""
    report = Report()
    rows: dict[str, dict[str, Any]] = {}
    for name, arguments in CONFIGURATIONS.items():
        print(name, flush=True)
        try:
            rows[name] = measure_configuration(name, arguments, session)
        except UserError as error:
            report.not_run(name, first_line(error))
    for row in rows.values():
        compare(report, row)
    for name, base in SAVES_AGAINST.items():
        add_saving(report, rows, name, base)
    report.table(list(rows.values()), FORMATS)
    return report


def compose(arguments: list[str], session: Session) -> PlanConfig:
    """Configuration of `plan` for the arguments of a row."""
    shape = SMALL_SHAPE if session.is_rehearsal else SHAPE
    common = ["stage=fine", f"shape={shape}", "run_dir=none"]
    common.append(f"trainer.accelerator={session.accelerator}")
    if session.is_rehearsal:
        common += SMALL_NETWORK
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return to_config(hydra.compose("plan", [*common, *arguments]), PlanConfig)


def measure_configuration(name: str, arguments: list[str], session: Session) -> dict[str, Any]:
    """Plan a training step, then take some and measure them.

    Raises:
        UserError: If the device does not support the configuration.
    """
    config = compose(arguments, session)
    shape = input_shape(config)
    timeline = Timeline()
    count_memory(config, shape, timeline=timeline)
    machine = Machine(config)
    machine.measure(timeline)
    planned_bytes, _ = peaks(timeline, machine.costs)
    # `card_bytes` takes the peaks of several phases by name; here there is only the step.
    planned_card_bytes = card_bytes({STEP: planned_bytes})[STEP]
    if not session.is_rehearsal:
        # The tensors with which the planner timed kernels must not count in the step.
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    measured = measure_row(config, shape, TIMED_STEPS)
    row = {
        "configuration": name,
        "planned MiB": planned_bytes / MIB,
        "allocated MiB": None,
        "planned of the card": planned_card_bytes / MIB,
        "taken of the card": None,
        "s/step": measured["seconds_per_step"],
    }
    if not session.is_rehearsal:
        row["allocated MiB"] = measured["peak_allocated_bytes"] / MIB
        row["taken of the card"] = taken_of_card() / MIB
    return row


def taken_of_card() -> int:
    """Peak of the bytes in use on the card since the last reset of torch's statistics.

    The driver only reports the bytes that are in use now. The share of torch's allocator in them is
    replaced by the allocator's own peak. Other programs count too, so the card must be free.
    """
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    beside_bytes = total_bytes - free_bytes - torch.cuda.memory_reserved()
    return beside_bytes + torch.cuda.max_memory_reserved()


def compare(report: Report, row: dict[str, Any]) -> None:
    """Check the planned bytes against those allocated by torch and those in use on the card."""
    pairs = (
        ("planned / allocated", "planned MiB", "allocated MiB", ALLOCATOR_BOUND),
        ("planned / taken of the card", "planned of the card", "taken of the card", CARD_BOUND),
    )
    for title, planned, measured, bound in pairs:
        name = f"{row['configuration']}: {title}"
        if row[measured] is None:
            report.not_run(name, "a CPU does not count it")
            continue
        report.near_one(name, row[planned] / row[measured], bound)


def add_saving(report: Report, rows: dict[str, dict[str, Any]], name: str, base: str) -> None:
    """Check that a configuration does not allocate more than another one, `base`."""
    title = f"{name}: memory by that of {base}"
    if name not in rows or base not in rows:
        report.not_run(title, "one of both was not measured")
        return
    # A CPU has no allocated bytes: the rehearsal compares planned bytes.
    key = "planned MiB" if rows[name]["allocated MiB"] is None else "allocated MiB"
    report.at_most(title, rows[name][key] / rows[base][key], 1.0)
