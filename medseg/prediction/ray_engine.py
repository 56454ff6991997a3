"""Cohorts on a Ray cluster; needs the extra `medseg[ray]`.

Actors load the weights once, segment cases and write their results.

Ray places the actors, delivers the calls and detects when a process or node ends. `<case>.json` is
the journal: a case that is up to date is never computed again, whichever process asks for it.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import socket
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from medseg.console import say
from medseg.errors import EXIT_FAILED, UserError, first_line
from medseg.inference.options import InferenceOptions
from medseg.inference.scan_model import ScanModel
from medseg.io.lean_nibabel import import_nibabel
from medseg.memory.options import Accelerator
from medseg.memory.profile import resident_bytes
from medseg.prediction.batch import BatchCase, Observer, load_range_models, make_batch
from medseg.prediction.forecast import LABEL_BYTES, SCAN_BYTES, forecast
from medseg.prediction.memory_limit import OVERHEAD_BYTES
from medseg.prediction.options import PredictConfig
from medseg.prediction.scans import Scan, scan_grid

# Cases that an actor holds: one is computed while another one is read or written.
CASES_PER_ACTOR = 2
# Scans whose headers are read for the memory of an actor; those of a cohort are alike.
NUM_MEASURED = 20
# After so long without an outcome, the cluster is asked whether it still holds this node.
WAIT_S = 30.0


class Outcome(NamedTuple):
    """Outcome of a case in plain types; see `BatchCase`."""

    messages: list[str]
    exit_code: int
    report: dict[str, Any] | None
    is_skipped: bool


class CaseActor:
    """Process of the cluster that segments cases; its methods run in `CASES_PER_ACTOR` threads."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def load(self, folder: str, config: PredictConfig, num_cases: int) -> str:
        """Load the weights.

        Args:
            folder: Folder that relative paths begin in.
            config: Configuration of the prediction, with the threads of an actor.
            num_cases: Number of cases of the cohort.

        Raises:
            UserError: If a path or a checkpoint is not usable on this node.
        """
        try:
            os.chdir(folder)
        except OSError as error:
            raise UserError(
                f"engine=ray: {os.uname().nodename} has no folder {folder}; "
                "the nodes must share their files"
            ) from error
        # Before there are threads that read, and before loaded memory is measured.
        import_nibabel()
        range_models = load_range_models(config)
        self.threads = torch.get_num_threads()
        self.batch = make_batch(range_models, config, max(2, num_cases), Observer())
        return os.uname().nodename

    def predict(self, scan: Scan, output: Path, is_retry: bool) -> Outcome:
        """Segment one case and write its results; its errors are part of the outcome.

        Args:
            scan: The scan.
            output: Path of its label map.
            is_retry: Whether an actor that died had the case: results that it finished are not
                computed again, even with `overwrite`.
        """
        torch.set_num_threads(self.threads)
        case = BatchCase(scan, output)
        batch = self.batch
        if is_retry:
            batch = replace(batch, config=replace(batch.config, overwrite=False))
        # Read beside the case that another thread computes, unless the memory is needed there.
        data = batch.read(case, True)
        with self.lock:
            if data is None:
                data = batch.read(case, False)
            computed = batch.compute(case, data)  # type: ignore[arg-type]
        del data
        batch.finish(case, computed)
        return Outcome(case.messages, case.exit_code, case.report, case.is_skipped)


def predict_on_ray(
    cases: Sequence[BatchCase], cascade: ScanModel, config: PredictConfig, observer: Observer
) -> None:
    """Segment cases on a Ray cluster and fill in their outcomes.

    Args:
        cases: The cases; their paths must mean the same on every node.
        cascade: The cascade as loaded by this process, for the memory of an actor.
        config: Configuration of the prediction.
        observer: Is told which case begins and ends, the latter in any order.

    Raises:
        UserError: If Ray is not installed, no node has the resources, or actors cannot load the
            weights.
    """
    if not has_ray():
        raise UserError(
            "engine=ray: Ray is not installed; run pip install 'medseg[ray]', "
            "or choose engine=local"
        )
    import ray

    options = config.ray
    threads = config.threads or 1
    _connect(options.address or os.environ.get("RAY_ADDRESS"))
    try:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        gpus = _gpus_of_actor(config, nodes)
        if options.memory_gib:
            memory = math.ceil(2**30 * options.memory_gib)
        else:
            memory = predict_bytes(cascade, cases, config.inference, gpus)
        room = count_room(nodes, {"CPU": float(threads), "GPU": gpus, "memory": float(memory)})
        make = ray.remote(CaseActor).options(
            num_cpus=threads, num_gpus=gpus, memory=memory, max_concurrency=CASES_PER_ACTOR
        )
        arguments = (os.getcwd(), replace(config, threads=threads), len(cases))
        num_actors = min(options.num_actors or room, math.ceil(len(cases) / CASES_PER_ACTOR))
        own_node = ray.get_runtime_context().get_node_id()

        def is_lost() -> bool:
            """Whether Ray has declared the node of this process dead.

            No actor would start any more.
            """
            alive = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
            return own_node not in alive

        cohort = _Cohort(ray, make, arguments, options.retries, observer, is_lost)
        cohort.run(cases, num_actors)
    finally:
        ray.shutdown()


def _connect(address: str | None) -> None:
    """Connect to a cluster, or start one on this machine.

    Args:
        address: Address of the cluster; None = a new one.

    Raises:
        UserError: If there is no cluster.
    """
    import ray

    # Patient data: nothing about the use of a cluster of ours leaves the machine.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Also on other machines.
    environment = {"worker_process_setup_hook": "medseg.memory.heap.map_large_blocks"}
    try:
        if address and ":" in address:  # Ray tries a wrong one for minutes
            host, _, port = address.removeprefix("ray://").rpartition(":")
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(
            address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            include_dashboard=None if address else False,
            runtime_env=environment,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"ray.address={address}: no cluster can be reached ({first_line(error)}); "
            "correct the address"
        ) from error


def _gpus_of_actor(config: PredictConfig, nodes: Sequence[Mapping[str, float]]) -> float:
    """GPUs that an actor takes; by default one, where a node has any."""
    if config.ray.gpus is not None:
        return config.ray.gpus
    if config.accelerator is Accelerator.cpu:
        return 0.0
    return 1.0 if any(node.get("GPU", 0) for node in nodes) else 0.0


class _Cohort:
    """Cases of a cohort on their way.

    Each living actor holds a few, and those of a dead one go to the others.
    """

    def __init__(
        self,
        ray: Any,
        make: Any,
        arguments: tuple[Any, ...],
        retries: int,
        observer: Observer,
        is_lost: Callable[[], bool] = lambda: False,
    ) -> None:
        self.ray = ray
        self.make = make
        self.arguments = arguments
        self.retries = retries
        self.observer = observer
        self.is_lost = is_lost
        self.num_cases = 0
        # Those that have loaded the weights.
        self.actors: list[Any] = []
        # Reference of `load` to its actor.
        self.starting: dict[Any, Any] = {}
        # Reference of `predict` to its actor and case.
        self.running: dict[Any, tuple[Any, BatchCase]] = {}
        self.waiting: deque[BatchCase] = deque()
        self.attempts: Counter[str] = Counter()
        self.num_failed_starts = 0

    def run(self, cases: Sequence[BatchCase], num_actors: int) -> None:
        """Segment all cases."""
        self.waiting.extend(cases)
        self.num_cases = len(cases)
        for _ in range(num_actors):
            self.start()
        while self.waiting or self.running:
            done, _ = self.ray.wait([*self.running, *self.starting], num_returns=1, timeout=WAIT_S)
            # Asked before the outcomes are looked at: they would count as deaths of actors, and
            # others be started.
            if self.is_lost():
                self.give_up()
                return
            if not done and not self.running:
                say("engine=ray: waiting until the cluster has room for an actor")
            for reference in done:
                if reference in self.starting:
                    self.started(reference)
                elif reference in self.running:
                    self.ended(reference)
            self.fill()

    def give_up(self) -> None:
        """Let the cases that have no outcome fail, each with a sentence: the cluster is gone."""
        unfinished = [*(case for _, case in self.running.values()), *self.waiting]
        self.running.clear()
        self.waiting.clear()
        for case in unfinished:
            case.exit_code = EXIT_FAILED
            case.messages = [
                "not segmented: the cluster has lost the node of this command, as where memory is "
                "full or a machine is switched off; give the same command again, which keeps what "
                "is finished"
            ]
            self.observer.case_ends(case)

    def start(self) -> None:
        """Ask for an actor; Ray places it when a node has room."""
        actor = self.make.remote()
        self.starting[actor.load.remote(*self.arguments)] = actor

    def started(self, reference: Any) -> None:
        """Take an actor that has loaded the weights; ask for another where it died."""
        actor = self.starting.pop(reference)
        try:
            self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise error.cause from error
            raise
        except self.ray.exceptions.RayError as error:
            self.num_failed_starts += 1
            if self.num_failed_starts > self.retries:
                raise UserError(
                    f"engine=ray: actors die while they load the weights ({first_line(error)}); "
                    "give them more memory with ray.memory_gib"
                ) from error
            self.start()
        else:
            self.num_failed_starts = 0
            self.actors.append(actor)

    def fill(self) -> None:
        """Give the actors their next cases, the one with the fewest first.

        A case that was lost with an actor gets one of its own.
        """
        while self.waiting:
            case = self.waiting[0]
            is_retry = self.attempts[case.scan.name] > 0
            num_cases_of = Counter(actor for actor, _ in self.running.values())
            # Actors with a case that was lost before, which may need all of their memory.
            reserved = set()
            for actor, running_case in self.running.values():
                if self.attempts[running_case.scan.name]:
                    reserved.add(actor)
            candidates = [actor for actor in self.actors if actor not in reserved]
            if not candidates:
                return
            actor = min(candidates, key=num_cases_of.__getitem__)
            max_cases = 1 if is_retry else CASES_PER_ACTOR
            if num_cases_of[actor] >= max_cases:
                return
            self.waiting.popleft()
            self.observer.case_begins(case.scan.name, self.num_cases)
            reference = actor.predict.remote(case.scan, case.output, is_retry)
            self.running[reference] = (actor, case)

    def ended(self, reference: Any) -> None:
        """Note the outcome of a case, or put those of a dead actor back to the queue."""
        actor, case = self.running.pop(reference)
        try:
            case.messages, case.exit_code, case.report, case.is_skipped = self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:
            # A defect outside of the steps of a batch.
            case.exit_code = EXIT_FAILED
            case.messages = [f"{type(error.cause).__name__}: {error.cause}"]
        except self.ray.exceptions.RayError as error:
            self.lose(actor, case, error)
            return
        self.observer.case_ends(case)

    def lose(self, actor: Any, case: BatchCase, error: Exception) -> None:
        """Put a case and the others of its dead actor back to the queue; ask for another actor."""
        self.actors.remove(actor)
        lost = [case]
        running = {}
        for reference, (holder, running_case) in self.running.items():
            if holder == actor:
                lost.append(running_case)
            else:
                running[reference] = (holder, running_case)
        self.running = running
        for lost_case in lost:
            self.retry(lost_case, error)
        self.start()

    def retry(self, case: BatchCase, error: Exception) -> None:
        """Put a case back to the queue, unless it was there too often."""
        self.attempts[case.scan.name] += 1
        if self.attempts[case.scan.name] <= self.retries:
            self.waiting.appendleft(case)
            return
        case.exit_code = EXIT_FAILED
        case.messages = [
            f"its actor died {self.retries + 1} times ({first_line(error)}); "
            "give actors more memory with ray.memory_gib"
        ]
        self.observer.case_ends(case)


def has_ray() -> bool:
    """Whether the extra is installed."""
    return importlib.util.find_spec("ray") is not None


def count_room(nodes: Sequence[Mapping[str, float]], needs: Mapping[str, float]) -> int:
    """Count the actors that fit on the nodes of a cluster.

    Args:
        nodes: Resources of each node by name: `CPU`, `GPU`, and `memory` in bytes.
        needs: The same of an actor.

    Raises:
        UserError: If none fits.
    """
    room = 0
    for node in nodes:
        # The scarcest resource decides.
        room += min(int(node.get(name, 0.0) // need) for name, need in needs.items() if need)
    if room == 0:
        raise UserError(
            f"engine=ray: an actor needs {needs['CPU']:g} CPUs, {needs['GPU']:g} GPUs and "
            f"{needs['memory'] / 2**30:.2f} GiB, which no node of the cluster has; "
            "lower threads, ray.gpus or ray.memory_gib"
        )
    return room


def predict_bytes(
    cascade: ScanModel, cases: Sequence[BatchCase], options: InferenceOptions, gpus: float
) -> int:
    """Predict the memory of an actor.

    With `max_ram_gib` it is that bound. Otherwise it is the largest forecast of the first scans,
    plus a second scan of that size, which is read or written meanwhile.

    Args:
        cascade: The cascade as loaded by this process.
        cases: The cases.
        options: Options of the prediction.
        gpus: GPUs of an actor.
    """
    if options.max_ram_gib is not None:
        return math.ceil(options.max_ram_gib * 2**30)
    task = cascade.task
    loaded = resident_bytes()
    network = round(cascade.options.budget_gib * 2**30)
    beside = 0
    if not gpus and cascade.device.type != "cpu":
        # The forecast of this process, with a GPU, leaves the network out, which an actor without
        # one holds.
        beside = network
    bytes_per_voxel = SCAN_BYTES * len(task.channels) + LABEL_BYTES
    sizes = []
    for case in cases[:NUM_MEASURED]:
        # Any reader may fail, or crops of usual size exceed a budget; the actor reports it.
        with suppress(Exception):
            grid = scan_grid(case.scan, task)
            other_cases = (CASES_PER_ACTOR - 1) * bytes_per_voxel * math.prod(grid.shape)
            sizes.append(forecast(cascade, grid, loaded).peak_bytes + other_cases + beside)
    return max(sizes, default=loaded + OVERHEAD_BYTES + network)
