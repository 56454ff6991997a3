"""The `watch` command: losses, scores, memory and utilisation of a run, live in the terminal."""

import math
import time
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
from rich.console import Console, Group, JustifyMethod
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from medseg.config.schema import WatchConfig
from medseg.errors import UserError
from medseg.runs.folder import CONFIG_FILE, read_config, status_of_run
from medseg.runs.past_runs import HISTORY_FILE, find_runs, read_history
from medseg.runs.status import Status

BARS = "▁▂▃▄▅▆▇█"
# Largest number of bars of a curve.
WIDTH = 48
# Seconds over which the use of the processors is measured. Without an interval, psutil reports the
# use since its last call, and 0 at the first call.
CPU_INTERVAL_S = 0.1
# Column of history.csv to its title and the format of its values.
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
# Headings of the table of a run, and the alignment of each column.
HEADINGS: tuple[tuple[str, JustifyMethod], ...] = (
    ("", "left"),
    ("now", "right"),
    ("least", "right"),
    ("most", "right"),
    ("so far", "left"),
)


def watch(config: WatchConfig) -> int:
    """Show a run until it ends or the user leaves with Ctrl-C.

    Without a terminal, print its present state once.

    Raises:
        UserError: If the folder holds no run.
    """
    run_dir = _find_run(config.run)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.print(view(run_dir))
        return 0
    with Live(console=console, auto_refresh=False) as live:
        while True:
            # Read before the view is made, so that the last view shows the end of the run.
            has_ended = status_of_run(run_dir) is not Status.running
            live.update(view(run_dir), refresh=True)
            if has_ended:
                break
            time.sleep(config.every_s)
    return 0


def _find_run(argument: str) -> Path:
    """Find the run folder of the argument `run`, or the newest below that folder."""
    folder = Path(argument)
    if (folder / CONFIG_FILE).is_file():
        return folder
    run_dirs = []
    if folder.is_dir():
        run_dirs = [path for path in find_runs(folder) if (path / CONFIG_FILE).is_file()]
    if not run_dirs:
        raise UserError(
            f"run={argument}: expected a run folder, with {CONFIG_FILE}, "
            "or a folder of runs; check the path"
        )
    return max(run_dirs, key=lambda path: path.stat().st_mtime)


def view(run_dir: Path) -> Group:
    """Lay out the state of a run.

    One line per quantity of `history.csv`, and lines on the present load of the machine.
    """
    history = read_history(run_dir / HISTORY_FILE)
    table = Table(box=None, pad_edge=False)
    for heading, justify in HEADINGS:
        table.add_column(heading, justify=justify, no_wrap=True)
    for column, (title, number_format) in CURVES.items():
        values = _column(history, column)
        if values:
            shown_values = (values[-1], min(values), max(values))
            numbers = [number_format.format(value) for value in shown_values]
            table.add_row(title, *numbers, curve(values))
    for title, text in machine():
        table.add_row(title, text)
    progress = _progress(history, read_config(run_dir).get("steps"))
    return Group(escape(str(run_dir)), f"{status_of_run(run_dir).value}: {progress}", table)


def _column(history: list[dict[str, float]], name: str) -> list[float]:
    """Collect the values of a column of `history.csv`, without empty cells."""
    return [line[name] for line in history if name in line]


def _progress(history: list[dict[str, float]], steps: Any) -> str:
    """Say at which step a run is, and how long the rest will take.

    Args:
        history: Lines of `history.csv`.
        steps: Steps in all; anything but an integer, as in a damaged file, is left out.
    """
    step = max(_column(history, "step"), default=0.0)
    progress = f"step {step:.0f}"
    if not isinstance(steps, int):
        return progress
    progress += f" of {steps}"
    seconds_per_step = _column(history, "seconds_per_step")
    if seconds_per_step and step < steps:
        rest_s = (steps - step) * seconds_per_step[-1]
        progress += f", about {rest_s / 60:.0f} minutes left"
    return progress


def curve(values: list[float]) -> str:
    """Draw values as bars in a line of text; above `WIDTH` values, a bar is a mean of neighbours.

    Example:
        >>> curve([0.0, 1.0, 7.0])
        '▁▂█'
    """
    num_joined = math.ceil(len(values) / WIDTH)
    means = []
    for start in range(0, len(values), num_joined):
        means.append(fmean(values[start : start + num_joined]))
    low = min(means)
    value_range = max(means) - low
    if value_range == 0.0:  # a flat curve: all bars are the lowest
        value_range = 1.0
    heights = [(mean - low) / value_range for mean in means]  # 0 to 1
    return "".join(BARS[int(height * (len(BARS) - 1))] for height in heights)


def machine() -> list[tuple[str, str]]:
    """Read the memory and the utilisation of this machine, of all its processes.

    With `medseg[gpu]`, also of its GPUs.

    Returns:
        Title and formatted value of each row.
    """
    memory = psutil.virtual_memory()
    rows = [
        ("machine: memory", _memory_text(memory.total - memory.available, memory.total)),
        ("machine: processor", f"{psutil.cpu_percent(CPU_INTERVAL_S):.0f} %"),
    ]
    try:
        import pynvml
    except ModuleNotFoundError:
        return rows
    # `pynvml` fails without a driver, or at a MIG slice of a GPU; then the rows so far are shown.
    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        for number in range(pynvml.nvmlDeviceGetCount()):
            gpu = pynvml.nvmlDeviceGetHandleByIndex(number)
            gpu_memory = pynvml.nvmlDeviceGetMemoryInfo(gpu)
            rows.append((f"GPU {number}: memory", _memory_text(gpu_memory.used, gpu_memory.total)))
            utilisation = pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu
            rows.append((f"GPU {number}: utilisation", f"{utilisation} %"))
    return rows


def _memory_text(used_bytes: int, total_bytes: int) -> str:
    """Format used and total memory in GiB."""
    return f"{used_bytes / 2**30:.1f} of {total_bytes / 2**30:.1f} GiB"
