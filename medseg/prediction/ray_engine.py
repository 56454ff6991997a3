"""Prediction of a cohort on a Ray cluster; needs the extra `medseg[ray]`.

Actors are processes of the cluster. They load the weights once, segment cases and write their
results. Ray places the actors, delivers the calls and detects when a process or node ends.

The reports `<case>.json` record what is finished: a case that is up to date is never computed
again, whichever process asks for it.
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
from medseg.prediction.case_report import read_report
from medseg.prediction.forecast import CHANNEL_BYTES, LABEL_BYTES, SCAN_BYTES, forecast
from medseg.prediction.memory_limit import OVERHEAD_BYTES
from medseg.prediction.options import PredictConfig
from medseg.prediction.scans import Scan, scan_grid

# Cases that an actor holds at a time: one is computed while another one is read or written.
CASES_PER_ACTOR = 2
# Number of scans whose headers are read to predict the memory of an actor. A few are enough, since
# the scans of a cohort are alike.
NUM_MEASURED = 20
# Longest wait for an outcome, before the next check that the cluster still holds this node.
WAIT_S = 30.0


class Outcome(NamedTuple):
    """Outcome of a case in plain types; see `BatchCase`."""

    messages: list[str]
    exit_code: int
    report: dict[str, Any] | None
    is_skipped: bool


class CaseActor:
    """Process of the cluster that segments cases.

    Ray calls its methods in `CASES_PER_ACTOR` threads.

    Attributes:
        lock: Held by the thread that computes a case, one at a time.
        threads: Number of torch threads, set by `load`.
        batch: Steps of a case, set by `load`.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def load(self, folder: str, config: PredictConfig, num_cases: int) -> str:
        """Load the weights.

        Args:
            folder: Folder to which relative paths refer.
            config: Configuration of the prediction, with the threads of an actor.
            num_cases: Number of cases of the cohort.

        Returns:
            Name of the node.

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
        # While nibabel is imported, other threads cannot import pydicom (see `import_nibabel`), so
        # before the threads that read scans. The memory of nibabel then counts as taken when
        # `make_batch` measures what is left.
        import_nibabel()
        range_models = load_range_models(config)
        self.threads = torch.get_num_threads()
        # A batch of one case raises an unexpected exception, which would end the actor. In a larger
        # batch only the case fails, with a message.
        num_cases_of_batch = max(2, num_cases)
        # Nobody watches the steps in this process: `_Cohort` tells the user's observer.
        self.batch = make_batch(range_models, config, num_cases_of_batch, Observer())
        return os.uname().nodename

    def predict(
        self, scan: Scan, output: Path, earlier_report: Mapping[str, Any] | None
    ) -> Outcome:
        """Segment one case and write its results; its errors are part of the outcome.

        Args:
            scan: What to segment; its paths must be valid on this node.
            output: Path of its label map.
            earlier_report: None for a case that no actor has had. If an actor died with the case,
                the report that was there before; empty if there was none.
        """
        # Torch keeps this number for each thread of Python, and Ray calls `predict` in another
        # thread than `load`.
        torch.set_num_threads(self.threads)
        case = BatchCase(scan, output)
        batch = self.batch
        # The actor that died may have finished the results before. With `overwrite` these count as
        # up to date, but those of an earlier command do not.
        if earlier_report is not None and read_report(output) != earlier_report:
            retry_config = replace(batch.config, overwrite=False)
            batch = replace(batch, config=retry_config)
        # Another thread may compute a case meanwhile. If this scan is too large to be in memory
        # beside that case, the answer is None, and the scan is read when that case is done.
        data = batch.read(case, is_ahead=True)
        with self.lock:
            if data is None:
                data = batch.read(case, is_ahead=False)
            computed = batch.compute(case, data)  # type: ignore[arg-type]
        # After a success `computed` is `data`; after a failure it is the error, and this frees the
        # voxels.
        del data
        batch.finish(case, computed)
        return Outcome(case.messages, case.exit_code, case.report, case.is_skipped)


def predict_on_ray(
    cases: Sequence[BatchCase], model: ScanModel, config: PredictConfig, observer: Observer
) -> None:
    """Segment cases on a Ray cluster and fill in their outcomes.

    Args:
        cases: Cases without outcomes; their paths must mean the same on every node.
        model: The model as loaded by this process, to predict the memory of an actor.
        config: Configuration of the prediction.
        observer: Is told which case begins and ends; cases may end in another order than they
            begin.

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
    num_threads = config.threads or 1
    _connect(options.address or os.environ.get("RAY_ADDRESS"))
    try:
        node_resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        num_gpus = _gpus_of_actor(config, node_resources)
        if options.memory_gib:
            memory_bytes = math.ceil(2**30 * options.memory_gib)
        else:
            memory_bytes = predict_bytes(model, cases, config.inference, num_gpus)
        needs = {"CPU": float(num_threads), "GPU": num_gpus, "memory": float(memory_bytes)}
        max_actors = count_room(node_resources, needs)
        actor_class = ray.remote(CaseActor).options(
            num_cpus=num_threads,
            num_gpus=num_gpus,
            memory=memory_bytes,
            max_concurrency=CASES_PER_ACTOR,
        )
        load_arguments = (os.getcwd(), replace(config, threads=num_threads), len(cases))
        num_actors = min(options.num_actors or max_actors, len(cases))
        own_node = ray.get_runtime_context().get_node_id()

        def is_lost() -> bool:
            """Tell whether Ray has declared this node dead, so that no actor would start again."""
            alive_nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
            return own_node not in alive_nodes

        cohort = _Cohort(ray, actor_class, load_arguments, options.retries, observer, is_lost)
        cohort.run(cases, num_actors)
    finally:
        ray.shutdown()


def _connect(address: str | None) -> None:
    """Connect to a cluster, or start one on this machine.

    Args:
        address: Address of the cluster; None = a new one on this machine.

    Raises:
        UserError: If there is no cluster at the address.
    """
    import ray

    # By default a new cluster reports its use to the makers of Ray. Here it works on patient data,
    # so nothing may leave the machine.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Freed tensors go back to the system in the cluster's processes too, see `medseg.memory.heap`.
    environment = {"worker_process_setup_hook": "medseg.memory.heap.map_large_blocks"}
    # A new cluster needs no dashboard. One that exists already has one or not: None accepts both.
    include_dashboard = None if address else False
    try:
        if address is not None and ":" in address:
            # Fails within seconds if the address is wrong; `ray.init` would try for minutes.
            host, _, port = address.removeprefix("ray://").rpartition(":")
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(
            address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            include_dashboard=include_dashboard,
            runtime_env=environment,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"ray.address={address}: no cluster can be reached ({first_line(error)}); "
            "correct the address"
        ) from error


def _gpus_of_actor(config: PredictConfig, node_resources: Sequence[Mapping[str, float]]) -> float:
    """Choose the number of GPUs of an actor: by default one, if a node has any."""
    if config.ray.gpus is not None:
        return config.ray.gpus
    if config.accelerator is Accelerator.cpu:
        return 0.0
    has_gpu = any(resources.get("GPU", 0) for resources in node_resources)
    return 1.0 if has_gpu else 0.0


class _Cohort:
    """Distributes the cases of a cohort to actors, and gives the cases of a dead actor to others.

    A call of an actor returns a reference at once; `ray.wait` returns the references whose calls
    have ended, and `ray.get` the result of a call, or raises its error.
    """

    def __init__(
        self,
        ray: Any,
        actor_class: Any,
        load_arguments: tuple[Any, ...],
        retries: int,
        observer: Observer,
        is_lost: Callable[[], bool] = lambda: False,
    ) -> None:
        """Prepare the distribution.

        Args:
            ray: The module, connected to a cluster.
            actor_class: `CaseActor` as a class of Ray, with its resources.
            load_arguments: Arguments of `CaseActor.load`.
            retries: How often a case is tried again after its actor has died.
            observer: Is told which case begins and ends.
            is_lost: Tells whether the cluster has lost the node of this process.
        """
        self.ray = ray
        self.actor_class = actor_class
        self.load_arguments = load_arguments
        self.retries = retries
        self.observer = observer
        self.is_lost = is_lost
        self.num_cases = 0  # set by `run`
        # Actors that have loaded the weights.
        self.actors: list[Any] = []
        # Reference of a call of `load` to its actor.
        self.starting: dict[Any, Any] = {}
        # Reference of a call of `predict` to its actor and case.
        self.running: dict[Any, tuple[Any, BatchCase]] = {}
        # Cases that no actor holds, the next one first.
        self.waiting: deque[BatchCase] = deque()
        # Name of a case to the number of actors that died with it.
        self.num_deaths: Counter[str] = Counter()
        # Number of actors in a row that died in `load`; one that loads the weights resets it.
        self.num_failed_starts = 0

    def run(self, cases: Sequence[BatchCase], num_actors: int) -> None:
        """Segment all cases with a number of actors; a dead one is replaced.

        Raises:
            UserError: If actors cannot load the weights.
        """
        self.waiting.extend(cases)
        self.num_cases = len(cases)
        for _ in range(num_actors):
            self.start()
        while self.waiting or self.running:
            calls = [*self.running, *self.starting]
            ended_calls, _ = self.ray.wait(calls, num_returns=1, timeout=WAIT_S)
            # This check comes before the outcomes: when the cluster is lost, all calls end as if
            # their actors had died, and `started` and `ended` would ask for new ones in vain.
            if self.is_lost():
                self.give_up()
                return
            if not ended_calls and not self.running:
                say(
                    "engine=ray: no actor is ready yet: the cluster has no room for one, or it is "
                    "loading the weights"
                )
            for reference in ended_calls:
                if reference in self.starting:
                    self.started(reference)
                # A reference in neither dictionary belongs to an actor whose death another call has
                # reported: `lose` has put its case back in the queue.
                elif reference in self.running:
                    self.ended(reference)
            self.fill()

    def give_up(self) -> None:
        """Mark each case without an outcome as failed, since the cluster is lost."""
        running_cases = [case for _, case in self.running.values()]
        unfinished = [*running_cases, *self.waiting]
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
        actor = self.actor_class.remote()
        reference = actor.load.remote(*self.load_arguments)
        self.starting[reference] = actor

    def started(self, reference: Any) -> None:
        """Take an actor that has loaded the weights, or ask for another if it died.

        No further actor is asked for if more than `retries` in a row have died.

        Args:
            reference: Reference of its call of `load`, which has ended.

        Raises:
            UserError: If the actor cannot load the weights, or none is left.
        """
        actor = self.starting.pop(reference)
        try:
            self.ray.get(reference)
        # `load` itself raised an exception, as it would in any other actor: all of the run ends.
        except self.ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise error.cause from error
            raise
        # The actor died.
        except self.ray.exceptions.RayError as error:
            self.num_failed_starts += 1
            if self.num_failed_starts <= self.retries:
                self.start()
            # A single broken node does not end the run.
            elif not self.actors and not self.starting:
                raise UserError(
                    f"engine=ray: actors die while they load the weights ({first_line(error)}); "
                    "give them more memory with ray.memory_gib"
                ) from error
        else:
            self.num_failed_starts = 0
            self.actors.append(actor)

    def fill(self) -> None:
        """Give waiting cases to the actor with the fewest cases, until no actor has room.

        An actor computes one case at a time. So it gets a second one, to read or write meanwhile,
        only where enough cases are left for the actors that are starting. A case that an actor died
        with is alone in its next actor: it may need all of the memory.
        """
        while self.waiting:
            case = self.waiting[0]
            is_retry = self.num_deaths[case.scan.name] > 0
            num_cases_by_actor = Counter(actor for actor, _ in self.running.values())
            # Actors with a case that is tried again take no other.
            reserved = set()
            for actor, running_case in self.running.values():
                if self.num_deaths[running_case.scan.name] > 0:
                    reserved.add(actor)
            candidates = [actor for actor in self.actors if actor not in reserved]
            if not candidates:
                return
            actor = min(candidates, key=lambda actor: num_cases_by_actor[actor])
            is_alone = is_retry or len(self.waiting) <= len(self.starting)
            max_cases = 1 if is_alone else CASES_PER_ACTOR
            # If the actor with the fewest cases has no room, no other has. The cases behind this
            # one wait too, so that it does not starve.
            if num_cases_by_actor[actor] >= max_cases:
                return
            self.waiting.popleft()
            self.observer.case_begins(case.scan.name, self.num_cases)
            earlier_report = None
            if is_retry:
                earlier_report = case.earlier_report
            else:
                case.earlier_report = read_report(case.output)
            reference = actor.predict.remote(case.scan, case.output, earlier_report)
            self.running[reference] = (actor, case)

    def ended(self, reference: Any) -> None:
        """Note the outcome of a case, or put the cases of a dead actor back in the queue.

        Args:
            reference: Reference of the call of `predict`, which has ended.
        """
        actor, case = self.running.pop(reference)
        try:
            outcome: Outcome = self.ray.get(reference)
        # `predict` itself raised an exception: a defect of the program, since the steps of a batch
        # return the errors of a case.
        except self.ray.exceptions.RayTaskError as error:
            case.exit_code = EXIT_FAILED
            case.messages = [f"{type(error.cause).__name__}: {error.cause}"]
        # The actor died.
        except self.ray.exceptions.RayError as error:
            self.lose(actor, case, error)
            return
        else:
            case.messages = outcome.messages
            case.exit_code = outcome.exit_code
            case.report = outcome.report
            case.is_skipped = outcome.is_skipped
        self.observer.case_ends(case)

    def lose(self, actor: Any, case: BatchCase, error: Exception) -> None:
        """Put the cases of a dead actor back in the queue, and ask for another actor.

        Args:
            actor: The dead actor.
            case: The case whose call reported the death; it is no longer in `running`.
            error: How it died.
        """
        self.actors.remove(actor)
        lost_cases = [case]
        still_running = {}
        for reference, (holder, running_case) in self.running.items():
            if holder == actor:
                lost_cases.append(running_case)
            else:
                still_running[reference] = (holder, running_case)
        self.running = still_running
        for lost_case in lost_cases:
            self.retry(lost_case, error)
        self.start()

    def retry(self, case: BatchCase, error: Exception) -> None:
        """Put a case back in the queue, or let it fail if too many actors have died with it."""
        self.num_deaths[case.scan.name] += 1
        if self.num_deaths[case.scan.name] <= self.retries:
            self.waiting.appendleft(case)
            return
        case.exit_code = EXIT_FAILED
        case.messages = [
            f"its actor died {self.retries + 1} times ({first_line(error)}); "
            "give actors more memory with ray.memory_gib"
        ]
        self.observer.case_ends(case)


def has_ray() -> bool:
    """Tell whether the extra is installed."""
    return importlib.util.find_spec("ray") is not None


def count_room(node_resources: Sequence[Mapping[str, float]], needs: Mapping[str, float]) -> int:
    """Count the actors that fit on the nodes of a cluster.

    Args:
        node_resources: Resources of each node by name: `CPU`, `GPU`, and `memory` in bytes.
        needs: Resources that an actor takes, by the same names.

    Raises:
        UserError: If none fits.
    """
    max_actors = 0
    for resources in node_resources:
        actors_by_resource = []
        for name, need in needs.items():
            if need > 0:
                # The small number makes up for rounding: 0.3 / 0.1 is a little less than 3.
                num_actors = int(resources.get(name, 0.0) / need + 1e-6)
                actors_by_resource.append(num_actors)
        max_actors += min(actors_by_resource)  # the scarcest resource decides
    if max_actors == 0:
        raise UserError(
            f"engine=ray: an actor needs {needs['CPU']:g} CPUs, {needs['GPU']:g} GPUs and "
            f"{needs['memory'] / 2**30:.2f} GiB, which no node of the cluster has; "
            "lower threads, ray.gpus or ray.memory_gib"
        )
    return max_actors


def predict_bytes(
    model: ScanModel, cases: Sequence[BatchCase], options: InferenceOptions, num_gpus: float
) -> int:
    """Predict the memory of an actor.

    With `max_ram_gib` it is that bound. Otherwise, for each of the first scans: its forecast plus
    the arrays of another scan of that size, read or written meanwhile. The largest of these counts.

    Args:
        model: The model as loaded by this process, maybe on another device than the actors' models.
        cases: At least one; the headers of the first `NUM_MEASURED` are read.
        options: Has `max_ram_gib`; the budget of a pass is that of the model.
        num_gpus: GPUs of an actor; with 0 the network takes memory of its process.

    Returns:
        Memory in bytes.
    """
    if options.max_ram_gib is not None:
        return math.ceil(options.max_ram_gib * 2**30)
    task = model.task
    loaded_bytes = resident_bytes()
    network_bytes = round(model.options.budget_gib * 2**30)
    # If this process has a GPU, the forecast does not count the passes of the network. An actor
    # without one runs them in its memory.
    missing_bytes = 0
    if num_gpus == 0 and model.device.type != "cpu":
        missing_bytes = network_bytes
    bytes_per_voxel = SCAN_BYTES + CHANNEL_BYTES * (len(task.channels) - 1) + LABEL_BYTES
    predictions = []
    for case in cases[:NUM_MEASURED]:
        # The header may be unreadable, or the budget too small; the actor then reports it. Readers
        # raise exceptions of many kinds.
        with suppress(Exception):
            grid = scan_grid(case.scan, task)
            case_bytes = forecast(model, grid, loaded_bytes).peak_bytes
            other_bytes = (CASES_PER_ACTOR - 1) * bytes_per_voxel * math.prod(grid.shape)
            predictions.append(case_bytes + other_bytes + missing_bytes)
    # If no header can be read, the default counts no memory for the scans.
    return max(predictions, default=loaded_bytes + OVERHEAD_BYTES + network_bytes)
