"""Cohorts on Ray: same results as `engine=local`, also if actors or nodes die."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import hydra
import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter

from benchmarks import cohort
from medseg.commands import predict as app
from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.errors import UserError
from medseg.geometry.grid import VoxelGrid
from medseg.inference.options import InferenceOptions
from medseg.io.tables import read_csv
from medseg.io.write import write_image
from medseg.memory.options import Accelerator
from medseg.memory.profile import resident_bytes
from medseg.prediction import ray_engine
from medseg.prediction.batch import BatchCase, Observer
from medseg.prediction.forecast import forecast
from medseg.prediction.load_models import load_cascade
from medseg.prediction.options import PredictConfig, RayOptions
from medseg.prediction.scans import Scan
from medseg.runs.signature import plain
from medseg.training.assemble import make_metadata
from medseg.training.network import make_network
from medseg.training.options import TrainConfig
from medseg.weights.files import write_weights

ROOT = Path(__file__).resolve().parents[2]
NUM_SCANS = 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the checkpoint of a small network of one stage with random weights."""
    path = tmp_path_factory.mktemp("weights") / "single.safetensors"
    overrides = [
        "stage=single",
        "task=abdomen",
        "spacing=isotropic_2mm",
        "model.width=4",
        "run_dir=x",
    ]
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = to_config(hydra.compose("train", overrides), TrainConfig)
    write_weights(path, make_metadata(config, plain(config)), make_network(config).state_dict())
    return path


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scans")
    grid = VoxelGrid((32, 40, 48), (3.0, 2.0, 2.0), (0.0, 0.0, 0.0), np.eye(3).tolist())
    for number in range(NUM_SCANS):
        image = gaussian_filter(np.random.default_rng(number).normal(0, 2000, grid.shape), 2)
        write_image(folder / f"case{number:02d}.nii.gz", image.astype(np.float32), grid)
    return folder


def predict(*overrides: str) -> int:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return app.predict(
            to_config(hydra.compose("predict", ["precision=fp32", *overrides]), PredictConfig)
        )


def test_without_the_extra_one_sentence_says_how_to_get_it(
    checkpoint: Path, scans: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_engine, "has_ray", lambda: False)
    with pytest.raises(
        UserError,
        match=(
            r"engine=ray: Ray is not installed; run pip install 'medseg\[ray\]', or choose "
            "engine=local"
        ),
    ):
        predict(
            f"input='{scans}'",
            f"output='{tmp_path / 'out'}'",
            f"coarse='{checkpoint}'",
            "engine=ray",
        )


def test_an_address_without_a_cluster_is_one_sentence(
    checkpoint: Path, scans: Path, tmp_path: Path
) -> None:
    pytest.importorskip("ray")
    arguments = [
        f"input='{scans}'",
        f"output='{tmp_path / 'out'}'",
        f"coarse='{checkpoint}'",
        "engine=ray",
    ]
    for address in ("127.0.0.1:1", "head:port"):
        with pytest.raises(
            UserError,
            match=rf"^ray\.address={address}: no cluster can be reached \(.*\); "
            "correct the address$",
        ):
            predict(*arguments, f"ray.address='{address}'")


def test_under_torchrun_it_is_refused(
    checkpoint: Path, scans: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (
        ("TORCHELASTIC_RUN_ID", "x"),
        ("WORLD_SIZE", "2"),
        ("RANK", "0"),
        ("LOCAL_RANK", "0"),
    ):
        monkeypatch.setenv(name, value)
    with pytest.raises(
        UserError,
        match="engine=ray distributes scans by itself; start the command without torchrun",
    ):
        predict(
            f"input='{scans}'",
            f"output='{tmp_path / 'out'}'",
            f"coarse='{checkpoint}'",
            "engine=ray",
        )


class Reference(tuple[str, int, Any]):
    """Kind, actor and arguments of a call; equal to itself only."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__


class FakeRay:
    """Replaces the module `ray`: calls end one at a time, in random order."""

    class exceptions:  # noqa: N801
        class RayError(Exception):
            pass

        class RayTaskError(RayError):
            def __init__(self, cause: Exception) -> None:
                self.cause = cause

    def __init__(
        self, dies: Callable[[int, str], bool], load: Callable[[int], None] = lambda _: None
    ) -> None:
        self.dies, self.loads, self.rng = dies, load, np.random.default_rng(0)
        self.num_actors, self.dead = 0, set[int]()
        self.written: list[str] = []
        self.most_held = 0

    def remote(self) -> Any:
        """Make an actor."""
        number = self.num_actors
        self.num_actors += 1

        def call(kind: str) -> SimpleNamespace:
            return SimpleNamespace(remote=lambda *arguments: Reference((kind, number, arguments)))

        return SimpleActor(number, call("load"), call("predict"))

    def wait(self, references: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        assert references
        num_cases_of_actor = Counter(number for kind, number, *_ in references if kind == "predict")
        self.most_held = max([self.most_held, *num_cases_of_actor.values()])
        return [references[self.rng.integers(len(references))]], []

    def get(self, reference: Any) -> Any:
        kind, number, arguments = reference
        if kind == "load":
            return self.loads(number)
        name = arguments[0].name
        if number in self.dead or self.dies(number, name):
            self.dead.add(number)
            raise self.exceptions.RayError("The actor died.")
        self.written.append(name)
        return ray_engine.Outcome([], 0, {"case": name}, False)


class SimpleActor:
    def __init__(self, number: int, load: Any, predict: Any) -> None:
        self.number, self.load, self.predict = number, load, predict


class Ended(Observer):
    """Observer that records the cases that end."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def case_ends(self, case: BatchCase) -> None:
        self.names.append(case.scan.name)


def run_cohort(
    fake: FakeRay, num_actors: int, retries: int = 2
) -> tuple[list[BatchCase], list[str]]:
    cases = [BatchCase(Scan(f"case{number}", Path("x")), Path("y")) for number in range(NUM_SCANS)]
    ended = Ended()
    ray_engine._Cohort(fake, fake, (), retries, ended).run(cases, num_actors)
    return cases, ended.names


def test_the_cases_of_dead_actors_go_to_others_and_each_ends_once() -> None:
    fake = FakeRay(lambda number, name: number in (0, 2) and name in ("case3", "case9", "case17"))
    cases, ended = run_cohort(fake, 3)
    assert sorted(ended) == sorted(fake.written) == sorted(case.scan.name for case in cases)
    assert all(case.exit_code == 0 and case.report for case in cases)
    assert fake.num_actors == 3 + len(fake.dead)
    assert fake.most_held == ray_engine.CASES_PER_ACTOR


class LoadsFirst(FakeRay):
    """All actors load before a case ends; the first wait is in vain."""

    def __init__(self) -> None:
        super().__init__(lambda *_: False)
        self.num_waits = 0
        self.num_cases_of_actor = Counter[int]()

    def wait(self, references: list[Any], **options: Any) -> tuple[list[Any], list[Any]]:
        self.num_waits += 1
        if self.num_waits == 1:
            return [], references
        loads = [reference for reference in references if reference[0] == "load"]
        return super().wait(loads or references, **options)

    def get(self, reference: Any) -> Any:
        kind, number, *_ = reference
        self.num_cases_of_actor[number] += kind == "predict"
        return super().get(reference)


def test_a_small_cohort_takes_all_actors(capsys: pytest.CaptureFixture[str]) -> None:
    fake = LoadsFirst()
    cases = [BatchCase(Scan(f"case{number}", Path("x")), Path("y")) for number in range(4)]
    ray_engine._Cohort(fake, fake, (), 0, Observer()).run(cases, 4)
    assert set(fake.num_cases_of_actor.values()) == {1}
    assert (
        "the cluster has no room for one, or it is loading the weights" in capsys.readouterr().err
    )


def test_a_lost_case_is_given_with_the_report_that_was_there_before(tmp_path: Path) -> None:
    """So that, with `overwrite`, the results of an earlier command do not count as new."""
    given: list[Any] = []

    class Recording(FakeRay):
        def get(self, reference: Any) -> Any:
            if reference[0] == "predict":
                given.append(reference[2][2])
                # The actor writes, and then dies.
                (tmp_path / "a.json").write_text('{"total": 2}')
            return super().get(reference)

    (tmp_path / "a.json").write_text('{"total": 1}')
    fake = Recording(lambda number, _: number == 0)
    case = BatchCase(Scan("a", tmp_path / "a"), tmp_path / "a.nii.gz")
    ray_engine._Cohort(fake, fake, (), 2, Observer()).run([case], 1)
    assert given == [None, {"total": 1}]


@pytest.mark.parametrize("num_actors", [1, 3])
def test_a_case_that_ends_every_actor_fails_alone(num_actors: int) -> None:
    fake = FakeRay(lambda _, name: name == "case5")
    cases, ended = run_cohort(fake, num_actors, retries=3)
    assert len(ended) == NUM_SCANS
    failed = [case for case in cases if case.exit_code]
    assert [case.scan.name for case in failed] == ["case5"]
    assert (
        "its actor died 4 times (The actor died.); give actors more memory with ray.memory_gib"
        in failed[0].messages
    )


def test_a_cluster_without_its_node_ends_with_the_remaining_cases_named() -> None:
    """Ray then reports the actors as dead, accepts requests for new ones, and never starts them."""
    fake = FakeRay(lambda *_: False)
    cases = [BatchCase(Scan(f"case{number}", Path("x")), Path("y")) for number in range(NUM_SCANS)]
    ended = Ended()
    ray_engine._Cohort(fake, fake, (), 2, ended, lambda: len(fake.written) == 7).run(cases, 3)
    assert sorted(ended.names) == sorted(case.scan.name for case in cases)
    lost = [case for case in cases if case.exit_code]
    assert len(lost) == NUM_SCANS - 7
    assert all("give the same command again" in case.messages[0] for case in lost)


LOST_NODE = """
import os, sys, threading, time
from pathlib import Path
import psutil

output = Path(sys.argv[1])

def kill_raylet():
    while not list(output.glob("*.json")):
        time.sleep(0.1)
    for process in psutil.Process().children(recursive=True):
        if process.name() == "raylet":
            # A node that dies takes its actors along.
            for lost in [process, *process.children(recursive=True)]:
                lost.kill()

threading.Thread(target=kill_raylet, daemon=True).start()
sys.argv = ["medseg", "predict", *sys.argv[2:]]
from medseg.commands.cli import main
main()
"""


@pytest.mark.thorough
@pytest.mark.slow
def test_a_raylet_that_is_killed_ends_the_command_and_a_repeat_goes_on(
    checkpoint: Path, scans: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    output = tmp_path / "out"
    output.mkdir()
    arguments = [
        f"input={scans}",
        f"output={output}",
        f"coarse={checkpoint}",
        "engine=ray",
        "precision=fp32",
    ]
    arguments += ["ray.num_actors=1", "ray.memory_gib=0.5"]
    first = subprocess.run(
        [sys.executable, "-c", LOST_NODE, str(output), *arguments],
        cwd=tmp_path,
        capture_output=True,
        encoding="utf-8",
        timeout=240,
    )
    assert first.returncode == 1, first.stderr
    num_finished = len(list(output.glob("*.json")))
    assert 0 < num_finished < NUM_SCANS
    num_lost = first.stderr.count("not segmented: the cluster has lost the node")
    assert num_lost >= NUM_SCANS - num_finished
    assert predict(*arguments) == 0
    assert len(list(output.glob("*.json"))) == NUM_SCANS


def test_actors_that_cannot_load_end_the_prediction_in_one_sentence() -> None:
    def mistake(_: int) -> None:
        raise FakeRay.exceptions.RayTaskError(
            UserError("coarse=a.ckpt: there is no such checkpoint")
        )

    def death(_: int) -> None:
        raise FakeRay.exceptions.RayError("The actor died.")

    with pytest.raises(UserError, match=r"^coarse=a\.ckpt: there is no such checkpoint$"):
        run_cohort(FakeRay(lambda *_: False, mistake), 2)
    with pytest.raises(
        UserError,
        match=(
            r"actors die while they load the weights \(The actor died\.\); give them more memory "
            r"with ray\.memory_gib"
        ),
    ):
        run_cohort(FakeRay(lambda *_: False, death), 2)


def test_a_node_on_which_every_actor_dies_leaves_the_others_at_work() -> None:
    def on_broken_node(number: int) -> None:
        if number != 0:
            raise FakeRay.exceptions.RayError("The actor died.")

    fake = FakeRay(lambda *_: False, on_broken_node)
    cases, ended = run_cohort(fake, 2)
    assert sorted(ended) == sorted(case.scan.name for case in cases)
    assert fake.num_actors <= 2 + 2, "two retries"


def test_the_nodes_have_room_for_whole_actors() -> None:
    gib = 2.0**30
    nodes = [
        {"CPU": 4.0, "memory": 5 * gib},
        {"CPU": 16.0, "GPU": 1.0, "memory": 64 * gib},
        {"node:x": 1.0},
    ]
    assert ray_engine.count_room(nodes, {"CPU": 1.0, "GPU": 0.0, "memory": 2 * gib}) == 2 + 16
    assert ray_engine.count_room(nodes, {"CPU": 1.0, "GPU": 0.5, "memory": 2 * gib}) == 2
    assert ray_engine.count_room(nodes, {"CPU": 1.0, "GPU": 0.2, "memory": 2 * gib}) == 5
    with pytest.raises(
        UserError,
        match=(
            r"an actor needs 8 CPUs, 2 GPUs and 2\.00 GiB, which no node of the cluster has; "
            "lower threads"
        ),
    ):
        ray_engine.count_room(nodes, {"CPU": 8.0, "GPU": 2.0, "memory": 2 * gib})


def test_the_memory_of_an_actor_follows_its_bound_or_the_largest_scan(
    checkpoint: Path, scans: Path, tmp_path: Path
) -> None:
    cascade = load_cascade([checkpoint], None, accelerator="cpu")
    cases = [
        BatchCase(Scan(path.name, path), tmp_path / path.name) for path in sorted(scans.iterdir())
    ]
    assert (
        ray_engine.predict_bytes(cascade, cases, InferenceOptions(max_ram_gib=1.5), 0)
        == 1.5 * 2**30
    )
    large = VoxelGrid((200, 300, 300), (1.0, 1.0, 1.0), (0.0, 0.0, 0.0), np.eye(3).tolist())
    write_image(tmp_path / "large.nii.gz", np.zeros(large.shape, np.int16), large)
    missing, other = (
        BatchCase(Scan(name, tmp_path / name), tmp_path / "x")
        for name in ("none.nii.gz", "large.nii.gz")
    )
    bytes_none, bytes_small, bytes_large = (
        ray_engine.predict_bytes(cascade, [missing, *some], InferenceOptions(), 0)
        for some in ([], [cases[0]], [cases[0], other])
    )
    loaded, voxels = resident_bytes(), 200 * 300 * 300
    one_case, budget = (
        forecast(cascade, large, loaded).peak_bytes,
        cascade.options.budget_gib * 2**30,
    )
    assert bytes_small < bytes_large
    assert bytes_large == pytest.approx(one_case + 3 * voxels, rel=0.02), (
        "a second scan and its labels wait in the actor"
    )
    assert bytes_none >= 0.9 * loaded + budget, "no header can be read"


def test_an_actor_without_a_gpu_holds_the_network_also_where_the_driver_has_one(
    checkpoint: Path, scans: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cascade = load_cascade([checkpoint], None, accelerator="cpu")
    cases = [
        BatchCase(Scan(path.name, path), tmp_path / path.name) for path in sorted(scans.iterdir())
    ]
    monkeypatch.setattr(ray_engine, "resident_bytes", lambda: 2**28)
    monkeypatch.setattr(cascade.last, "device", torch.device("cuda"))
    with_gpu, without = (
        ray_engine.predict_bytes(cascade, cases, InferenceOptions(), gpus) for gpus in (1, 0)
    )
    assert without == with_gpu + cascade.options.budget_gib * 2**30


def test_a_budget_that_usual_crops_exceed_is_left_to_the_actors(
    checkpoint: Path, scans: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cascade = load_cascade([checkpoint], None, accelerator="cpu")
    cases = [
        BatchCase(Scan(path.name, path), tmp_path / path.name) for path in sorted(scans.iterdir())
    ]

    def exceeded(*_: object) -> NoReturn:
        raise UserError("crops of usual size exceed the budget")

    monkeypatch.setattr(ray_engine, "forecast", exceeded)
    assert (
        ray_engine.predict_bytes(cascade, cases, InferenceOptions(), 0)
        > cascade.options.budget_gib * 2**30
    )


@pytest.mark.slow
def test_actors_a_node_and_the_driver_die_and_no_case_is_computed_twice(
    checkpoint: Path, scans: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    arguments, local, output = (
        [f"input='{scans}'", f"coarse='{checkpoint}'"],
        tmp_path / "local",
        tmp_path / "out",
    )
    assert predict(*arguments, f"output='{local}'", "threads=1") == 0
    with cohort.SimulatedCluster(2) as cluster:
        num_journalled, num_again = cohort.run_disturbed(
            cluster, [*arguments, "precision=fp32"], output, NUM_SCANS, num_kills=1
        )
    assert NUM_SCANS // 2 <= num_journalled < NUM_SCANS
    assert num_again == 0
    assert cohort.num_different(local, output) == 0
    assert len(list(local.glob("*.nii.gz"))) == NUM_SCANS
    assert len(read_csv(output / "summary.csv")) == len(read_csv(local / "summary.csv"))


class Cluster:
    """Replaces the module `ray`: nodes with resources, and a record of the calls."""

    def __init__(self, nodes: list[dict[str, Any]]) -> None:
        self.known_nodes = nodes
        self.calls: dict[str, Any] = {}
        self.is_down = False

    def init(self, address: str | None, **options: Any) -> None:
        self.calls["init"] = (address, options)

    def nodes(self) -> list[dict[str, Any]]:
        return self.known_nodes

    def remote(self, actor: type) -> Any:
        assert actor is ray_engine.CaseActor
        return SimpleNamespace(options=lambda **options: self.calls.setdefault("actor", options))

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "own")

    def shutdown(self) -> None:
        self.is_down = True


GIB = 2**30


def node(name: str, *, is_alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"NodeID": name, "Alive": is_alive, "Resources": resources}


@pytest.mark.parametrize(
    ("accelerator", "gpus", "memory_gib", "num_actors", "num_cases", "expected"),
    [
        ("auto", None, None, None, 20, (1.0, 3 * GIB, 2)),
        ("cpu", None, None, None, 20, (0.0, 3 * GIB, 5)),
        ("auto", 0.5, None, None, 20, (0.5, 3 * GIB, 3)),
        ("auto", 0.0, 1.5, None, 20, (0.0, 1.5 * GIB, 6)),
        ("auto", 0.0, None, 4, 20, (0.0, 3 * GIB, 4)),
        ("auto", 0.0, None, None, 3, (0.0, 3 * GIB, 3)),
    ],
)
def test_actors_ask_for_the_resources_of_the_options_and_no_more_than_the_cases_need(
    accelerator: str,
    gpus: float | None,
    memory_gib: float | None,
    num_actors: int | None,
    num_cases: int,
    expected: tuple[float, float, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two nodes of 6 CPUs with 9 and 6 GiB, one of them with two GPUs, and a dead node."""
    cluster = Cluster(
        [
            node("own", CPU=6.0, GPU=2.0, memory=9.0 * GIB),
            node("other", CPU=6.0, memory=6.0 * GIB),
            node("dead", is_alive=False, CPU=64.0, GPU=8.0, memory=999.0 * GIB),
        ]
    )
    actor_options: list[Any] = []

    class Cohort:
        def __init__(self, *arguments: Any) -> None:
            actor_options.append(arguments)

        def run(self, cases: Any, count: int) -> None:
            actor_options.append((cases, count))

    monkeypatch.setitem(sys.modules, "ray", cluster)
    monkeypatch.setattr(ray_engine, "has_ray", lambda: True)
    monkeypatch.setattr(ray_engine, "_Cohort", Cohort)
    monkeypatch.setattr(ray_engine, "predict_bytes", lambda *_: 3 * GIB)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv(
        "RAY_USAGE_STATS_ENABLED", "1"
    )  # so that monkeypatch restores the variable, also if it was absent
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED")
    cases: Any = [SimpleNamespace(name=number) for number in range(num_cases)]
    config = PredictConfig(
        input="scans", output="out", accelerator=Accelerator(accelerator), threads=2,
        ray=RayOptions(gpus=gpus, memory_gib=memory_gib, num_actors=num_actors, retries=7),
    )  # fmt: skip
    observer = Observer()
    ray_engine.predict_on_ray(cases, None, config, observer)
    expected_gpus, memory, count = expected
    assert cluster.calls["actor"] == {
        "num_cpus": 2,
        "num_gpus": expected_gpus,
        "memory": memory,
        "max_concurrency": 2,
    }
    address, settings = cluster.calls["init"]
    assert address is None
    assert settings["runtime_env"] == {
        "worker_process_setup_hook": "medseg.memory.heap.map_large_blocks"
    }
    assert (settings["log_to_driver"], settings["include_dashboard"]) == (False, False)
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    (arguments, (given_cases, given_count)) = actor_options
    assert (given_cases, given_count) == (cases, count)
    assert arguments[2:5] == ((os.getcwd(), config, num_cases), 7, observer)
    is_lost = arguments[5]
    assert not is_lost()
    cluster.known_nodes[0]["Alive"] = False
    assert is_lost()
    assert cluster.is_down


def test_an_actor_shares_its_memory_and_computes_one_case_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor_options: list[Any] = []
    steps: list[Any] = []

    @dataclass
    class FakeBatch:
        config: PredictConfig

        def read(self, case: BatchCase, is_ahead: bool) -> Any:
            steps.append(("read", is_ahead, self.config.overwrite))
            return None if is_ahead and case.scan.name == "large" else "data"

        def compute(self, case: BatchCase, data: Any) -> Any:
            assert actor.lock.locked()
            steps.append(("compute", data))
            return "computed"

        def finish(self, case: BatchCase, computed: Any) -> None:
            assert not actor.lock.locked()
            steps.append(("finish", computed))
            case.exit_code, case.report, case.is_skipped = 4, {"a": 1}, True
            case.messages.append("said")

    def make(*arguments: Any) -> FakeBatch:
        actor_options.append(arguments)
        return FakeBatch(arguments[1])

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ray_engine, "load_range_models", lambda config: [config.coarse])
    monkeypatch.setattr(ray_engine, "make_batch", make)
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    actor = ray_engine.CaseActor()
    folder = tmp_path / "work"
    folder.mkdir()
    config = PredictConfig(input="scans", output="out", coarse="c", overwrite=True)
    assert actor.load(str(folder), config, 1) == os.uname().nodename
    assert Path.cwd() == folder
    assert actor_options[0][:3] == ([["c"]], config, 2), "at least as many as an actor holds"
    output = tmp_path / "a.nii.gz"
    outcome = actor.predict(Scan("small", tmp_path / "a"), output, None)
    assert outcome == (["said"], 4, {"a": 1}, True)
    assert steps == [("read", True, True), ("compute", "data"), ("finish", "computed")]
    report = {"total": 1}
    (tmp_path / "a.json").write_text(json.dumps(report))
    # The actor that died has written a report, or not.
    for earlier_report, overwrite in (({}, False), (report, True)):
        steps.clear()
        actor.predict(Scan("large", tmp_path / "a"), output, earlier_report)
        assert steps == [
            ("read", True, overwrite),
            ("read", False, overwrite),
            ("compute", "data"),
            ("finish", "computed"),
        ]
    assert threads == [torch.get_num_threads()] * 3
    with pytest.raises(UserError, match=r"has no folder .*gone; the nodes must share their files"):
        actor.load(str(tmp_path / "gone"), config, 1)
