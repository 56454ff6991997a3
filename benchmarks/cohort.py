"""Cohort benchmark: a prediction on a Ray cluster whose actors, node and driver die.

    pip install -e ".[dev,ray]"
    python benchmarks/cohort.py 500 3       # scans, and nodes of one processor each

The nodes are simulated on this machine. Each scan is the same 4 cm slab of a phantom with noise of
its own, about a second of work; the weights are the included ones.

The undisturbed run is compared with plain processes, one per node, with one thread each. Target: at
least 0.9 of their throughput, which is counted from the moment a tenth of the results are there, so
that start-up time does not count.

The disturbed run loses two actors, then its driver, then a node; the command is started again.
Targets: every scan has a result, none is computed again once its `<case>.json` is there, and labels
are those of `engine=local`.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
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
# The slab: 8 slices of 5 mm in the middle of the lungs, which are slices 6 to 53 of the phantom.
FIRST_SLICE = 26
NUM_SLICES = 8
PREDICT = [sys.executable, "-m", "medseg.commands.cli", "predict", "threads=1"]
# Name of each `<case>.json` with its inode and time in ns, which change when it is rewritten.
Journal = dict[str, tuple[int, int]]


def main() -> None:
    """Run the three predictions and print their figures."""
    num_scans, num_nodes = map(int, sys.argv[1:])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        scans = make_scans(folder / "scans", num_scans)
        plain_per_minute = run_plain(scans, folder / "local", num_nodes)
        with SimulatedCluster(num_nodes) as cluster:
            ray_per_minute = run_undisturbed(cluster, scans, folder / "ray")
        # A new cluster, since it loses a node.
        with SimulatedCluster(num_nodes) as cluster:
            num_before, num_recomputed = run_disturbed(
                cluster, [f"input={scans}"], folder / "disturbed", num_scans, num_kills=2
            )
        num_wrong_on_ray = num_different(folder / "local", folder / "ray")
        num_wrong_disturbed = num_different(folder / "local", folder / "disturbed")
    rows = [
        {"run": f"{num_nodes} plain processes", "scans per minute": plain_per_minute},
        {
            "run": f"engine=ray, {num_nodes} nodes",
            "scans per minute": ray_per_minute,
            "of plain": ray_per_minute / plain_per_minute,
            "other labels": num_wrong_on_ray,
        },
        {
            "run": "disturbed",
            "results before": num_before,
            "computed again": num_recomputed,
            "other labels": num_wrong_disturbed,
        },
    ]
    print_table(rows, formats={"scans per minute": ".1f", "of plain": ".2f"})


class SimulatedCluster:
    """Ray cluster on this machine: a head without processors, and nodes of one processor each.

    Ray counts the processors and the 4 GiB of a node when it places actors; it does not enforce
    them.
    """

    def __init__(self, num_nodes: int) -> None:
        from ray.cluster_utils import Cluster  # an extra of the package

        # Without processors the head gets no actors, so that removing a node removes its work.
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
        """Arguments with which `predict` uses this cluster."""
        return ["engine=ray", f"ray.address={self.cluster.address}", "ray.memory_gib=2"]

    def remove_node(self) -> None:
        """End a node with all of its processes."""
        self.cluster.remove_node(self.nodes.pop())


def make_scans(folder: Path, num_scans: int) -> Path:
    """Write scans that differ in their noise; returns their folder."""
    phantom = make_phantom(draw_spec(0, 0))
    slab = VoxelBox((FIRST_SLICE, 0, 0), (FIRST_SLICE + NUM_SLICES, *phantom.grid.shape[1:]))
    grid = phantom.grid.crop(slab)
    image_hu = phantom.image_hu[slab.slices()]
    for number in range(num_scans):
        noise_hu = np.random.default_rng(number).normal(0, 10, grid.shape)
        noisy_hu = np.rint(image_hu + noise_hu).astype(np.int16)
        write_image(folder / f"case{number:04d}.nii.gz", noisy_hu, grid)
    return folder


def journal(output: Path) -> Journal:
    """List the reports of finished cases."""
    entries = {}
    # The name of a file that is being written begins with a dot.
    for path in output.glob("[!.]*.json"):
        status = path.stat()
        entries[path.name] = (status.st_ino, status.st_mtime_ns)
    return entries


def per_minute(output: Path) -> float:
    """Count the results per minute, without the first tenth of them.

    A result is finished when its `<case>.json` is written, the last of its files.
    """
    end_times_s = sorted(time_ns / 1e9 for _, time_ns in journal(output).values())
    counted_s = end_times_s[len(end_times_s) // 10 :]
    # The clock starts with the first counted result, so the work for that result does not count.
    return 60 * (len(counted_s) - 1) / (counted_s[-1] - counted_s[0])


def run_plain(scans: Path, output: Path, num_processes: int) -> float:
    """Predict the scans in processes of equal shares; returns scans per minute."""
    paths = sorted(scans.iterdir())
    processes = []
    for number in range(num_processes):
        share = scans.parent / f"part{number}"
        share.mkdir()
        for path in paths[number::num_processes]:
            (share / path.name).symlink_to(path)
        processes.append(start([f"input={share}", f"output={output}"]))
    for process in processes:
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
    cluster: SimulatedCluster,
    arguments: Sequence[str],
    output: Path,
    num_scans: int,
    num_kills: int,
) -> tuple[int, int]:
    """Predict scans while actors, the driver and a node end.

    Args:
        cluster: The cluster; it loses a node.
        arguments: Arguments of `predict`.
        output: Folder of the results.
        num_scans: Number of scans.
        num_kills: Number of actors that are killed.

    Returns:
        Number of results that were there when the driver was killed, and how many of them were
        computed again.
    """
    command = [*arguments, f"output={output}", *cluster.arguments]
    driver = start(command)
    # An actor dies after each eighth of the results, the driver after half of them.
    for number in range(1, 1 + num_kills):
        wait_for_results(driver, output, number * num_scans // 8)
        actors()[0].kill()
    wait_for_results(driver, output, num_scans // 2)
    driver.kill()
    driver.wait()
    # Actors outlive their driver until they have written the results that they have begun.
    while actors():
        time.sleep(0.1)
    before = journal(output)
    cluster.remove_node()
    if start(command).wait(TIMEOUT_S):
        raise RuntimeError("engine=ray ended with an error")
    after = journal(output)
    if len(after) != num_scans:
        raise RuntimeError(f"{len(after)} of {num_scans} scans have a result")
    num_recomputed = sum(after[name] != entry for name, entry in before.items())
    return len(before), num_recomputed


def start(arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start `predict` with one thread, which does not wait busily."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    return subprocess.Popen(
        [*PREDICT, *arguments],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def actors() -> list[psutil.Process]:
    """List the processes of actors on this machine, by the title that Ray gives them."""
    processes = []
    for process in psutil.process_iter(["cmdline"]):
        # The command line of a process of another user may be hidden: None.
        command = " ".join(process.info["cmdline"] or [])
        if command.startswith("ray::CaseActor"):
            processes.append(process)
    return processes


def wait_for_results(driver: subprocess.Popen[bytes], output: Path, number: int) -> None:
    """Wait until a running prediction has a number of results.

    Raises:
        RuntimeError: If the prediction ends before, since the disturbance would then hit nothing.
    """
    while len(journal(output)) < number:
        if driver.poll() is not None:
            raise RuntimeError(
                f"engine=ray ended with code {driver.returncode} before it was disturbed"
            )
        time.sleep(0.02)


def num_different(expected_dir: Path, result_dir: Path) -> int:
    """Count the label maps that differ in a voxel."""
    number = 0
    for path in expected_dir.glob("*.nii.gz"):
        expected = read_labels(path).array
        result = read_labels(result_dir / path.name).array
        if not np.array_equal(expected, result):
            number += 1
    return number


if __name__ == "__main__":
    main()
