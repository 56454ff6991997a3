"""The `watch` command: losses, scores, memory and utilisation of a run, live in the terminal."""

import time
from contextlib import suppress
from pathlib import Path

import psutil
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from medseg.config.schema import WatchConfig
from medseg.errors import require
from medseg.runs.folder import CONFIG_FILE, read_config, status_of_run
from medseg.runs.past_runs import HISTORY_FILE, find_runs, read_history
from medseg.runs.status import Status

BARS = "▁▂▃▄▅▆▇█"
# Values of a curve in the terminal.
WIDTH = 48
# Column of history.csv to its title and the format of its newest value.
CURVES = {
    "loss": ("loss", "{:.4f}"),
    "val_dice": ("validation Dice", "{:.4f}"),
    "val_dice_worst": ("worst region", "{:.4f}"),
    "lr": ("learning rate", "{:.2e}"),
    "seconds_per_step": ("seconds per step", "{:.3f}"),
    "host_gib": ("host memory of the run", "{:.2f} GiB"),
    "cpu_percent": ("processor of the run", "{:.0f} %"),
    "gpu_gib": ("GPU memory of the run", "{:.2f} GiB"),
    "gpu_percent": ("GPU utilisation", "{:.0f} %"),
}


def watch(config: WatchConfig) -> int:
    """Show a run until it ends or the user leaves with Ctrl-C; without a terminal, print its present state once.

    Raises:
        UserError: If the folder holds no run.
    """
    folder = Path(config.run)
    found = find_runs(folder) if folder.is_dir() else []
    runs = sorted(
        (one for one in found if (one / CONFIG_FILE).is_file()), key=lambda one: one.stat().st_mtime
    )
    require(
        bool(runs),
        f"run={config.run}: expected a run folder, with {CONFIG_FILE}, or a folder of runs; check the path",
    )
    run_dir = folder if (folder / CONFIG_FILE).is_file() else runs[-1]
    console = Console(highlight=False)
    if not console.is_terminal:
        console.print(view(run_dir))
        return 0
    with Live(console=console, auto_refresh=False) as live:
        while True:
            has_ended = status_of_run(run_dir) is not Status.running
            live.update(view(run_dir), refresh=True)
            if has_ended:
                break
            time.sleep(config.every_s)
    return 0


def view(run_dir: Path) -> Group:
    """Lay out the state of a run: one line per quantity of `history.csv`, and the machine as it is now."""
    history, steps = read_history(run_dir / HISTORY_FILE), read_config(run_dir).get("steps")
    step = max((line["step"] for line in history if "step" in line), default=0.0)
    seconds = [line["seconds_per_step"] for line in history if "seconds_per_step" in line]
    of_steps = ""
    if isinstance(steps, int):  # the file may be damaged
        of_steps = f" of {steps}"
        if seconds and step < steps:
            of_steps += f", about {(steps - step) * seconds[-1] / 60:.0f} minutes left"
    table = Table(box=None, pad_edge=False)
    for heading, justify in (
        ("", "left"),
        ("now", "right"),
        ("least", "right"),
        ("most", "right"),
        ("so far", "left"),
    ):
        table.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for column, (title, text) in CURVES.items():
        if values := [line[column] for line in history if column in line]:
            table.add_row(
                title,
                *(text.format(value) for value in (values[-1], min(values), max(values))),
                curve(values),
            )
    for title, text in machine():
        table.add_row(title, text)
    return Group(
        escape(str(run_dir)), f"{status_of_run(run_dir).value}: step {step:.0f}{of_steps}", table
    )


def curve(values: list[float]) -> str:
    """Draw values as bars of a line of text; of many values, the mean of neighbours.

    Example:
        >>> curve([0.0, 1.0, 7.0])
        '▁▂█'
    """
    size = -(-len(values) // WIDTH)
    means = [
        sum(part) / len(part)
        for start in range(0, len(values), size)
        if (part := values[start : start + size])
    ]
    low, high = min(means), max(means)
    return "".join(
        BARS[int((value - low) / (high - low or 1) * (len(BARS) - 1))] for value in means
    )


def machine() -> list[tuple[str, str]]:
    """Read the memory and the utilisation of this machine, of all its processes; with `medseg[gpu]`, also of its GPUs."""
    memory = psutil.virtual_memory()
    found = [("machine: memory", f"{(memory.total - memory.available) / 2**30:.1f} of {memory.total / 2**30:.1f} GiB"),
             ("machine: processor", f"{psutil.cpu_percent():.0f} %")]  # fmt: skip
    try:
        import pynvml
    except ModuleNotFoundError:
        return found
    with suppress(pynvml.NVMLError):  # no driver, or a slice of a GPU that does not answer
        pynvml.nvmlInit()
        for number in range(pynvml.nvmlDeviceGetCount()):
            gpu = pynvml.nvmlDeviceGetHandleByIndex(number)
            used = pynvml.nvmlDeviceGetMemoryInfo(gpu)
            found.append(
                (
                    f"GPU {number}: memory",
                    f"{used.used / 2**30:.1f} of {used.total / 2**30:.1f} GiB",
                )
            )
            found.append(
                (f"GPU {number}: utilisation", f"{pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu} %")
            )
    return found
