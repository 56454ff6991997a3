"""Cohort benchmark: a prediction on a Ray cluster whose actors, node and driver die; throughput compared with plain processes.

    pip install -e ".[dev,ray]" python benchmarks/cohort.py 500 3       # scans, nodes of one
    processor each (simulated on this machine)

Each scan is the same 4 cm slab of a phantom with noise of its own, about a second of work; the
weights are the included ones. The disturbed run loses two actors, then its driver, then a node; the
command is started again. Targets: every scan has a result, none is computed again once its
`<case>.json` is there, and labels are those of `engine=local`. The throughput is counted from the
moment a tenth of the results are there, so that start-up time does not count. Target: at least 0.9
of the throughput of plain processes, one per node, with one thread each.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from medseg.geometry.grid import VoxelBox
from medseg.io.read import read_labels
from medseg.io.tables import print_table
from medseg.io.write import write_image
from medseg.phantom.scan import make_phantom
from medseg.phantom.spec import draw_spec

TIMEOUT_S = 3600.0
FIRST, NUM_SLICES = 54, 16  # slices of 2.5 mm in the middle of the lungs
PREDICT = [sys.executable, "-m", "medseg.commands.cli", "predict", "threads=1"]
Journal = dict[str, tuple[int, int]]
"""Name of each `<case>.json` with its inode and time in ns: both change when it is written again."""


def main() -> None:
    """Run both parts and print their figures."""
    num_scans, num_nodes = map(int, sys.argv[1:])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        scans = make_scans(folder / "scans", num_scans)
        plain = run_plain(scans, folder / "local", num_nodes)
        with SimulatedCluster(num_nodes) as cluster:
            on_ray = run_undisturbed(cluster, scans, folder / "ray")
        with SimulatedCluster(num_nodes) as cluster:
            journalled, recomputed = run_disturbed(
                cluster, [f"input={scans}"], folder / "disturbed", num_scans, num_kills=2
            )
        wrong = [num_different(folder / "local", folder / other) for other in ("ray", "disturbed")]
    rows = [
        {"run": f"{num_nodes} plain processes", "scans per minute": plain},
        {
            "run": f"engine=ray, {num_nodes} nodes",
            "scans per minute": on_ray,
            "of plain": on_ray / plain,
            "other labels": wrong[0],
        },
        {
            "run": "disturbed",
            "results before": journalled,
            "computed again": recomputed,
            "other labels": wrong[1],
        },
    ]
    print_table(rows, formats={"scans per minute": ".1f", "of plain": ".2f"})


class SimulatedCluster:
    """A head without processors and nodes of one processor each, on this machine."""

    def __init__(self, num_nodes: int) -> None:
        from ray.cluster_utils import Cluster

        self.cluster: Any = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
        )
        self.nodes = [self.cluster.add_node(num_cpus=1, memory=4 * 2**30) for _ in range(num_nodes)]

    def __enter__(self) -> "SimulatedCluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.cluster.shutdown()

    @property
    def arguments(self) -> list[str]:
        """Arguments of `predict`."""
        return ["engine=ray", f"ray.address={self.cluster.address}", "ray.memory_gib=2"]

    def remove_node(self) -> None:
        """End a node with all of its processes."""
        self.cluster.remove_node(self.nodes.pop())


def make_scans(folder: Path, num_scans: int) -> Path:
    """Write scans that differ in their noise."""
    phantom = make_phantom(draw_spec(0, 0))
    slab = VoxelBox((FIRST, 0, 0), (FIRST + NUM_SLICES, *phantom.grid.shape[1:]))
    image_hu, grid = phantom.image_hu[FIRST : FIRST + NUM_SLICES], phantom.grid.crop(slab)
    for number in range(num_scans):
        noise = np.random.default_rng(number).normal(0, 10, grid.shape)
        write_image(
            folder / f"case{number:04d}.nii.gz", np.rint(image_hu + noise).astype(np.int16), grid
        )
    return folder


def journal(output: Path) -> Journal:
    """List the reports of finished cases; a file that is being written has a name that begins with a dot."""
    return {
        path.name: (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in output.glob("[!.]*.json")
    }


def per_minute(*outputs: Path) -> float:
    """Count the results per minute, without the first tenth of them."""
    ends_s = sorted(time_ns / 1e9 for output in outputs for _, time_ns in journal(output).values())
    first = len(ends_s) // 10
    return 60 * (len(ends_s) - 1 - first) / (ends_s[-1] - ends_s[first])


def run_plain(scans: Path, output: Path, num_processes: int) -> float:
    """Predict the scans in processes of equal shares; returns scans per minute."""
    paths, running = sorted(scans.iterdir()), []
    for number in range(num_processes):
        part = scans.parent / f"part{number}"
        part.mkdir()
        for path in paths[number::num_processes]:
            (part / path.name).symlink_to(path)
        running.append(start([f"input={part}", f"output={output}"]))
    for process in running:
        if process.wait(TIMEOUT_S):
            raise RuntimeError(f"plain prediction ended with code {process.returncode}")
    return per_minute(output)


def run_undisturbed(cluster: SimulatedCluster, scans: Path, output: Path) -> float:
    """Predict the scans on a cluster; returns scans per minute."""
    process = start([f"input={scans}", f"output={output}", *cluster.arguments])
    if process.wait(TIMEOUT_S):
        raise RuntimeError(f"engine=ray ended with code {process.returncode}")
    return per_minute(output)


def run_disturbed(
    cluster: SimulatedCluster, given: Sequence[str], output: Path, num_scans: int, num_kills: int
) -> tuple[int, int]:
    """Predict scans while actors, the driver and a node end.

    Args:
        cluster: The cluster; it loses a node.
        given: Arguments of `predict`.
        output: Folder of the results.
        num_scans: Number of scans.
        num_kills: Number of actors that are killed.

    Returns:
        Number of results that were there when the driver was killed, and how many of them were
        computed again.
    """
    command = [*given, f"output={output}", *cluster.arguments]
    driver = start(command)
    for number in range(num_kills):
        wait(driver, lambda number=number: len(journal(output)) >= (number + 1) * num_scans // 8)  # type: ignore[misc]
        actors()[0].kill()
    wait(driver, lambda: len(journal(output)) >= num_scans // 2)
    driver.kill()
    driver.wait()
    while actors():  # they write the results that they have begun
        time.sleep(0.1)
    before = journal(output)
    cluster.remove_node()
    if start(command).wait(TIMEOUT_S):
        raise RuntimeError("engine=ray ended with an error")
    after = journal(output)
    if len(after) != num_scans:
        raise RuntimeError(f"{len(after)} of {num_scans} scans have a result")
    return len(before), sum(after[name] != entry for name, entry in before.items())


def start(arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start `predict` with one thread."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    return subprocess.Popen(
        [*PREDICT, *arguments],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def actors() -> list[psutil.Process]:
    """List the processes of actors on this machine."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if " ".join(process.info["cmdline"] or []).startswith("ray::CaseActor")
    ]


def wait(driver: subprocess.Popen[bytes], is_reached: Callable[[], bool]) -> None:
    """Wait for a state of a running prediction."""
    while not is_reached():
        if driver.poll() is not None:
            raise RuntimeError(
                f"engine=ray ended with code {driver.returncode} before it was disturbed"
            )
        time.sleep(0.02)


def num_different(expected: Path, found: Path) -> int:
    """Count the label maps that differ in a voxel."""
    pairs = (
        [read_labels(folder / path.name).array for folder in (expected, found)]
        for path in expected.glob("*.nii.gz")
    )
    return sum(not np.array_equal(one, other) for one, other in pairs)


if __name__ == "__main__":
    main()
