"""Data module: what it refuses before a step is taken, and loader workers that start by spawn."""

from __future__ import annotations

import gc
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import forked
import numpy as np
import pytest
import torch
from composed import train_config
from torch.utils.data import DataLoader, Dataset

from medseg.data.case_table import Case, CaseSource, Split, read_case_table
from medseg.data.options import RegionFrom
from medseg.data.samples import init_worker
from medseg.errors import EXIT_OUT_OF_MEMORY, UserError
from medseg.io.read import read_labels
from medseg.io.write import write_labels
from medseg.memory.options import Accelerator
from medseg.memory.profile import private_bytes
from medseg.preprocess.intensity import Intensity, window, zscore
from medseg.preprocess.options import SpacingDraw
from medseg.preprocess.scale import HuScale
from medseg.runs.status import end_of
from medseg.task import Channel, Region, Task
from medseg.training import data_module
from medseg.training.data_module import CasesDataModule, TrainLoader
from medseg.training.options import TrainConfig
from medseg.training.preemption import SIGNALS

TASK = Task(
    "lungs",
    {"left_lung": 1, "right_lung": 2},
    (Region("left_lung", ("left_lung",), "left"), Region("right_lung", ("right_lung",), "right")),
    (Channel(window_hu=(-1000.0, 400.0)),),
)


def config_of(name: str = "coarse", **changes: Any) -> TrainConfig:
    """One step of one sample at 6 mm."""
    overrides = [
        f"stage={name}",
        "spacing=isotropic_4mm",
        "spacing.target_spacing_mm=[6,6,6]",
        "steps=1",
        "seed=0",
    ]
    config = train_config(*overrides, "data.num_workers=0")
    return replace(
        config, stage=replace(config.stage, slab_share=None, elsewhere_share=None, **changes)
    )


LABEL_VALUES = {1: "left_lung", 2: "right_lung"}


def set_up(
    train: Case,
    val: Case,
    cache_dir: Path,
    config: TrainConfig | None = None,
    label_values: dict[int, str] = LABEL_VALUES,
) -> CasesDataModule:
    source = CaseSource(Split((train,), (val,), ()), label_values, 1.0)
    config = config or config_of()
    config = replace(config, data=replace(config.data, cache=str(cache_dir)))
    data = CasesDataModule(config, [source], TASK, divisor=(8, 8, 8))
    data.prepare_data()
    data.setup("fit")
    return data


def test_one_scan_is_not_trained_on_and_validated_under_two_names(
    tiny_table: Path, tmp_path: Path
) -> None:
    first, second, *_ = read_case_table(tiny_table)
    twin = replace(first, name="twin", patient="somebody else")
    message = (
        "The validation case 'twin' has the same voxels as the training case 'case 0'; remove "
        "one of them"
    )
    with pytest.raises(UserError, match=message):
        set_up(first, twin, tmp_path)
    accepted_twin = replace(twin, ignore_findings=frozenset({"duplicate_image"}))
    assert len(set_up(first, accepted_twin, tmp_path).val_cases) == 1
    assert len(set_up(first, second, tmp_path).val_cases) == 1
    assert len(set_up(first, first, tmp_path).val_cases) == 1, (
        "a case may be watched while it is learnt"
    )


@pytest.mark.parametrize("has_boxes", [False, True])
@pytest.mark.parametrize("has_channel", [False, True])
def test_boxes_and_probabilities_of_a_case_are_of_its_own_coarse_stage(
    has_boxes: bool,
    has_channel: bool,
    tiny_table: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stage that was trained on the case would see it better than any that comes later."""
    for name in ("coarse_boxes", "kept_probs"):
        monkeypatch.setattr(data_module, name, lambda case, stage, task: (case.name, stage))
    first, second, *_ = read_case_table(tiny_table)
    config = config_of(
        "fine",
        region_from=RegionFrom.coarse if has_boxes else RegionFrom.reference,
        coarse_channel=has_channel,
    )
    config = replace(config, data=replace(config.data, cache=str(tmp_path)))
    source = CaseSource(Split((first,), (second,), ()), LABEL_VALUES, 1.0)
    data: Any = CasesDataModule(
        config, [source], TASK, divisor=(8, 8, 8), coarse="usual", coarse_by_case={"case 1": "own"}
    )
    data.prepare_data()
    data.setup("fit")
    # The replaced functions return the names of the case and of its coarse stage.
    calls = {"case 0": ("case 0", "usual"), "case 1": ("case 1", "own")}
    assert data.crops.coarse_boxes == (calls if has_boxes else {})
    assert data.crops.coarse_probs == (calls if has_channel else {})


@pytest.mark.parametrize(
    ("pin_memory", "has_gpu", "is_pinned"),
    [(None, True, True), (None, False, False), (True, False, True), (False, True, False)],
)
def test_both_loaders_pin_memory_where_a_gpu_reads_it_or_as_they_are_told(
    pin_memory: bool | None,
    has_gpu: bool,
    is_pinned: bool,
    tiny_table: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second, *_ = read_case_table(tiny_table)
    data = set_up(first, second, tmp_path)
    data.pin_memory = pin_memory
    data.trainer = SimpleNamespace(global_rank=0, world_size=1, global_step=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    data.config.trainer.accelerator = Accelerator.auto
    assert data.train_dataloader().pin_memory is is_pinned
    assert data.val_dataloader().pin_memory is is_pinned
    data.config.trainer.accelerator = Accelerator.cpu
    assert data.train_dataloader().pin_memory is bool(pin_memory), "the run is not on the GPU"


@pytest.mark.parametrize(("num_cases", "num_ranks"), [(4, 2), (3, 2), (1, 3)])
def test_the_ranks_share_the_validation_cases_and_take_equally_many(
    num_cases: int, num_ranks: int, tiny_table: Path, tmp_path: Path
) -> None:
    first, *_ = read_case_table(tiny_table)
    data = set_up(first, first, tmp_path)
    data.val_cases = [
        replace(data.val_cases[0], name=f"case {number}") for number in range(num_cases)
    ]
    shares = []
    for rank in range(num_ranks):
        data.trainer = SimpleNamespace(global_rank=rank, world_size=num_ranks)
        shares.append(list(data.val_dataloader().sampler))
    assert {number for share in shares for number in share} == set(range(num_cases)), (
        "each case is validated"
    )
    # Ranks wait for each other at the end of a validation, so each takes as many; only the rest is
    # taken twice.
    assert {len(share) for share in shares} == {math.ceil(num_cases / num_ranks)}
    assert all(len(set(share)) == len(share) for share in shares)


def test_a_resumed_rank_takes_its_own_samples_from_the_step_of_the_trainer(
    tiny_table: Path, tmp_path: Path
) -> None:
    first, second, *_ = read_case_table(tiny_table)
    config = config_of(batch_size=4)
    data = set_up(first, second, tmp_path, replace(config, steps=3))
    numbers = {}
    for rank in range(2):
        data.trainer = SimpleNamespace(global_rank=rank, world_size=2, global_step=1)
        batches = list(data.train_dataloader())  # a stack for each of the two samples
        numbers[rank] = [first["number"] + second["number"] for first, second in batches]
    by_step = [sorted(first + second) for first, second in zip(numbers[0], numbers[1], strict=True)]
    assert by_step == [[4, 5, 6, 7], [8, 9, 10, 11]]


def test_a_class_that_no_training_case_has_is_named_before_the_first_step(
    tiny_table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, *_ = read_case_table(tiny_table)
    set_up(first, second, tmp_path)
    assert "training cases" not in capsys.readouterr().err
    set_up(first, second, tmp_path, label_values={1: "left_lung", 2: "other", 3: "right_lung"})
    message = (
        "right_lung: found in 0 of 1 training cases and in 0 of 1 validation cases, so the "
        "network cannot learn it"
    )
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("num_workers", "prefetch"), [(0, 5), (2, 5), (1, 1)])
def test_a_loader_has_the_workers_and_the_batches_ahead_of_the_configuration(
    num_workers: int, prefetch: int, tiny_table: Path, tmp_path: Path
) -> None:
    first, second, *_ = read_case_table(tiny_table)
    config = config_of()
    values = replace(config.data, num_workers=num_workers, prefetch=prefetch)
    data = set_up(first, second, tmp_path, replace(config, data=values))
    loader = data.train_batches()  # starts no process yet
    assert loader.num_workers == num_workers
    assert loader.prefetch_factor == (prefetch if num_workers else None)
    assert loader.persistent_workers is bool(num_workers)


@pytest.mark.parametrize("share", [0.5, 0.75])
def test_sources_share_the_samples_whatever_the_number_of_their_cases(
    share: float, tiny_table: Path, tmp_path: Path
) -> None:
    first, second, third, _ = read_case_table(tiny_table)
    config = config_of()
    config = replace(config, data=replace(config.data, cache=str(tmp_path)))
    sources = [
        CaseSource(Split((first, second), (), ()), LABEL_VALUES, share),
        CaseSource(Split((third,), (), ()), LABEL_VALUES, 1.0 - share),
    ]
    data = CasesDataModule(config, sources, TASK, divisor=(8, 8, 8))
    data.prepare_data()
    data.setup("fit")
    assert [case.name for case in data.train_cases] == [first.name, second.name, third.name]
    weights = data.train_samples().weights
    assert np.allclose(weights, [share / 2, share / 2, 1.0 - share])


@pytest.mark.parametrize("name", ["coarse", "fine"])
def test_a_source_gets_its_share_whatever_the_number_of_its_items(
    name: str, tiny_table: Path, tmp_path: Path
) -> None:
    """Of the first source, one of two cases has the accepted trust, and in one region only."""
    first, second, third, _ = read_case_table(tiny_table)
    config = config_of(name)
    config = replace(
        config, data=replace(config.data, cache=str(tmp_path), train_trust="reference")
    )
    half = replace(first, trust={"left_lung": "reference", "right_lung": "absent"})
    unknown = replace(second, trust={})
    both = replace(third, trust=dict.fromkeys(("left_lung", "right_lung"), "reference"))

    def data_of(*train: Case) -> CasesDataModule:
        sources = [
            CaseSource(Split(train, (), ()), LABEL_VALUES, 0.6),
            CaseSource(Split((both,), (), ()), LABEL_VALUES, 0.4),
        ]
        data = CasesDataModule(config, sources, TASK, divisor=(8, 8, 8))
        data.prepare_data()
        data.setup("fit")
        return data

    samples = data_of(half, unknown).train_samples()
    shares = dict.fromkeys((first.name, second.name, third.name), 0.0)
    for (case, _), weight in zip(samples.items, samples.weights, strict=True):
        shares[case.name] += weight
    assert shares == pytest.approx({first.name: 0.6, second.name: 0.0, third.name: 0.4})
    with pytest.raises(
        UserError, match=f"such as {second.name}, none has a region with this trust"
    ):
        data_of(unknown)


def test_the_spacings_of_the_scans_are_drawn_as_often_as_the_scans(
    tiny_table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sources of one and two cases with shares that do not add up to 1."""
    calls: list[Any] = []
    monkeypatch.setattr(data_module, "ScanSpacings", lambda *arguments: calls.append(arguments))
    first, second, third, _ = read_case_table(tiny_table)
    config = config_of()
    config = replace(
        config,
        data=replace(config.data, cache=str(tmp_path)),
        spacing=replace(config.spacing, draw=SpacingDraw.tail),
    )
    sources = [
        CaseSource(Split((first,), (), ()), LABEL_VALUES, 0.3),
        CaseSource(Split((second, third), (), ()), LABEL_VALUES, 0.2),
    ]
    data = CasesDataModule(config, sources, TASK, divisor=(8, 8, 8))
    data.prepare_data()
    data.setup("fit")
    ((spacings_mm, probabilities),) = calls
    assert spacings_mm == [case.audit.grid.spacing_mm for case in data.train_cases]
    assert np.allclose(probabilities, [0.6, 0.2, 0.2])


def test_probabilities_of_another_stage_or_precision_are_not_taken_for_these(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys: list[str] = []
    monkeypatch.setattr(data_module, "coarse_probs", lambda case, key, predict: keys.append(key))
    case: Any = None
    for checkpoint in ("0a", "0b"):
        for precision in ("fp32", "bf16"):
            stage: Any = SimpleNamespace(checkpoints={"coarse": checkpoint}, precision=precision)
            data_module.kept_probs(case, stage, TASK)
    assert len(set(keys)) == 4


def test_training_samples_take_the_seed_and_the_augmentation_and_those_of_validation_neither(
    tiny_table: Path, tmp_path: Path
) -> None:
    first, second, *_ = read_case_table(tiny_table)
    data = set_up(first, second, tmp_path, replace(config_of(), seed=7))
    augmentation: Any = object()
    data.augmentation = augmentation
    data.weights = [2.0]
    train, val = data.train_samples(), data.val_samples()
    assert (train.seed, train.augmentation, train.jitter) == (7, augmentation, True)
    assert (val.augmentation, val.jitter) == (None, False)
    assert np.array_equal(train.weights, [1.0]), "an array: the cases have weights"
    assert train.crops is val.crops is data.crops
    assert [case.name for case, _ in train.items] == [first.name]
    assert [case.name for case, _ in val.items] == [second.name]


@pytest.mark.parametrize(
    ("config", "method"), [(config_of(), "forkserver"), (config_of("fine"), "spawn")]
)
def test_loader_workers_make_the_same_batches_however_they_start(
    config: TrainConfig, method: str, tiny_table: Path, tmp_path: Path
) -> None:
    first, second, *_ = read_case_table(tiny_table)
    data = set_up(first, second, tmp_path, config)
    ((expected,),) = data.train_batches()
    data.num_workers = 1
    loader = data.train_batches()
    loader.multiprocessing_context = method
    ((batch,),) = loader
    assert torch.equal(batch["image"], expected["image"])
    assert batch["case"] == expected["case"]


class Numbers(Dataset[int]):
    """Samples that a loader worker makes slowly, or cannot send."""

    def __init__(self, sample: object = 0) -> None:
        self.sample = sample

    def __getitem__(self, n: int) -> object:
        return self.sample

    def __len__(self) -> int:
        return 4


@pytest.mark.parametrize(
    "method", ["fork", pytest.param("spawn", marks=pytest.mark.slow), "forkserver"]
)
def test_a_loader_worker_outlives_every_stop_signal_from_its_first_moment(method: str) -> None:
    loader = TrainLoader(Numbers(), num_workers=1, multiprocessing_context=method)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    batches = iter(loader)
    for number in (signal.SIGINT, *SIGNALS):
        os.kill(batches._workers[0].pid, number)
    assert len(list(batches)) == 4
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_a_garbage_collection_copies_no_memory_that_workers_share() -> None:
    objects = [[number] for number in range(300_000)]  # some 25 MiB
    loader = TrainLoader(Numbers(), num_workers=1, multiprocessing_context="fork")
    batches = iter(loader)
    next(batches)
    before = private_bytes(os.getpid())
    gc.collect()
    assert private_bytes(os.getpid()) - before < 5 * 2**20
    assert len(list(batches)) == 3
    assert len(objects) == 300_000


LEFT = """
import builtins
from medseg.training.data_module import TrainLoader
builtins.loader = TrainLoader(range(8), num_workers=8, persistent_workers=True)
builtins.first = next(iter(builtins.loader))
"""


def test_a_process_ends_with_loader_workers_that_nobody_has_ended() -> None:
    """For example, a stop request may come just after the workers have started."""
    done = forked.run([sys.executable, "-c", LEFT], timeout=60)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


class TooLarge:
    """Object that cannot be pickled for lack of memory."""

    def __reduce__(self) -> NoReturn:
        raise MemoryError("no room")


@pytest.mark.timeout(60)
def test_a_loader_worker_that_cannot_hand_a_sample_over_ends_the_run_in_one_sentence(
    capfd: pytest.CaptureFixture[str],
) -> None:
    loader = DataLoader(
        Numbers(TooLarge()), num_workers=1, worker_init_fn=init_worker, collate_fn=list
    )
    with pytest.raises(RuntimeError) as ended:
        list(loader)
    code, message, is_defect = end_of(ended.value)
    assert (code, is_defect) == (EXIT_OUT_OF_MEMORY, False)
    assert "out of memory" in message
    printed = capfd.readouterr().err
    assert "a loader worker cannot send a sample to the training: MemoryError: no room" in printed
    assert "Traceback" not in printed


def test_a_resumed_run_has_the_cases_that_it_began_with_wherever_their_table_lies(
    tiny_table: Path, tmp_path: Path
) -> None:
    first, second, third, *_ = read_case_table(tiny_table)
    state = set_up(first, second, tmp_path).state_dict()
    assert json.loads(json.dumps(state)) == state, "plain types"

    def moved(case: Case) -> Case:
        assert case.labels is not None
        (tmp_path / "moved").mkdir(exist_ok=True)
        image, labels = (
            Path(shutil.copy(path, tmp_path / "moved")) for path in (case.image, case.labels)
        )
        return replace(case, image=image, labels=labels)

    def changed(case: Case) -> Case:
        assert case.labels is not None
        volume = read_labels(case.labels)
        labels = np.array(volume.array)
        labels[:8] = 0
        write_labels(tmp_path / "changed.nii.gz", labels, volume.grid)
        return replace(case, labels=tmp_path / "changed.nii.gz")

    set_up(moved(first), moved(second), tmp_path).load_state_dict(state)
    for train, val, message in (
        (
            third,
            second,
            (
                f"training cases are not those that the run began with ({third.name} added; "
                f"{first.name} removed)"
            ),
        ),
        (
            first,
            changed(second),
            f"validation cases are not those that the run began with ({second.name} changed)",
        ),
        (replace(first, hu=HuScale(1.0, 5.0)), second, f"({first.name} changed)"),
    ):
        with pytest.raises(UserError) as refused:
            set_up(train, val, tmp_path).load_state_dict(state)
        assert message in str(refused.value)


def test_the_coarse_stage_gets_the_intensity_of_its_own_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fine stage with `zscore` caches that map; the coarse stage may be trained on a window."""
    image = np.linspace(-1000, 400, 64, dtype=np.float32).reshape(4, 4, 4)
    fine_intensity = zscore(image, "ct")
    case: Any = SimpleNamespace(
        intensities=(fine_intensity,),
        images=[image],
        grid=None,
        audit=SimpleNamespace(grid=SimpleNamespace(spacing_mm=None)),
    )
    calls: list[list[Intensity]] = []

    def localise(*_: Any, intensities: list[Intensity], **__: Any) -> Any:
        calls.append(intensities)
        return SimpleNamespace(boxes={})

    monkeypatch.setattr(data_module, "localise", localise)
    fine = replace(TASK, channels=(Channel("ct", None, "zscore"),))
    for task in (TASK, fine):
        coarse: Any = SimpleNamespace(task=task)
        data_module.coarse_boxes(case, coarse, fine)
    assert calls == [[window((-1000.0, 400.0))], [fine_intensity]]


# A surviving worker offers a batch to a training that ends: the training connects, and goes.
PARTED = """
import os, socket, sys, threading
from multiprocessing import resource_sharer
from medseg.data.samples import init_worker
if sys.argv[1] == "worker":
    init_worker(0)
resource_sharer.DupFd(os.dup(1))
sharer = resource_sharer._resource_sharer
for _ in range(3):
    training = socket.socket(socket.AF_UNIX)
    training.connect(sharer._address)
    training.recv(1)
    training.close()
sharer.stop(timeout=10)
"""


@pytest.mark.parametrize(("kind", "is_said"), [("worker", False), ("plain", True)])
def test_a_training_that_ends_leaves_no_traceback_of_its_workers(kind: str, is_said: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PARTED, kind], capture_output=True, encoding="utf-8", timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert ("Traceback" in done.stderr) == is_said


def test_the_samples_of_the_first_step_are_repeated() -> None:
    first: Any = data_module._FirstBatch([7, 5, 3, 1, 9], 3)  # type: ignore[arg-type]
    assert [first[number] for number in range(7)] == [7, 5, 3, 7, 5, 3, 7]
