"""Lightning data module of a stage: fills the cache, makes training batches and whole cases."""

import functools
import gc
import itertools
import math
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
import numpy as np
from torch._C import _remove_worker_pids
from torch.utils.data import DataLoader, Dataset

from medseg.cascade.localise import Localisation, localise
from medseg.cascade.stage import TrainedStage
from medseg.console import say
from medseg.data.absent_classes import absence_note, absent_classes
from medseg.data.audit.table import DUPLICATE
from medseg.data.cache import (
    CachedCase,
    CoarseProbs,
    coarse_probs,
    is_current,
    open_case,
    prepare_case,
    spacing_text,
)
from medseg.data.case_table import Case, CaseSource
from medseg.data.crops import ScanSpacings, StageCrops
from medseg.data.options import RegionFrom
from medseg.data.sampler import StepBatchSampler
from medseg.data.samples import (
    Samples,
    collate,
    describe_no_items,
    init_worker,
    trained_regions,
)
from medseg.data.spacing import make_grid_rule
from medseg.data.transforms import Transforms
from medseg.errors import UserError
from medseg.geometry.grid import VoxelBox, VoxelGrid
from medseg.geometry.sizes import Shape
from medseg.inference.options import InferenceOptions
from medseg.memory.device import pick_device
from medseg.preprocess.intensity import intensity_of
from medseg.preprocess.options import SpacingDraw
from medseg.processors import num_processors
from medseg.task import Task
from medseg.training.options import TrainConfig
from medseg.training.preemption import SIGNALS
from medseg.wording import first_few

T = TypeVar("T")


class CasesDataModule(pl.LightningDataModule):
    """Batches of one stage.

    Args:
        config: Checked configuration.
        sources: Cases with their label conventions.
        task: Labels and regions.
        divisor: Required multiple of the network's input size, (z, y, x).
        augmentation: Applied to training samples; None = none.
        coarse: Trained coarse stage, for its boxes and its probabilities; None where neither is
            used.
        coarse_by_case: Case name to the coarse stage that it gets in place of `coarse`.

    Attributes:
        rule: How the grid of a sample is derived from the grid of the cache entry.
        num_workers: Loader processes; samples do not depend on it.
        prefetch: Batches that each loader process makes ahead.
        pin_memory: Whether batches are put in page-locked memory; None = where the run
            uses a GPU.
        train_cases: Cache entries of the training cases; empty until `setup`, as are the next two.
        val_cases: Cache entries of the validation cases.
        weights: How often each item of each training case is drawn, relative to other items.
        crops: How samples are cut out of the cases.
    """

    def __init__(
        self,
        config: TrainConfig,
        sources: Sequence[CaseSource],
        task: Task,
        *,
        divisor: Shape,
        augmentation: Transforms | None = None,
        coarse: TrainedStage | None = None,
        coarse_by_case: Mapping[str, TrainedStage] | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.sources = sources
        self.task = task
        self.divisor = divisor
        self.augmentation = augmentation
        self.coarse = coarse
        self.coarse_by_case = coarse_by_case or {}
        self.rule = make_grid_rule(config.spacing)
        num_workers = config.data.num_workers
        self.num_workers = propose_workers(config) if num_workers is None else num_workers
        self.prefetch = config.data.prefetch
        self.pin_memory = config.data.pin_memory
        self.train_cases: list[CachedCase] = []
        self.val_cases: list[CachedCase] = []
        self.weights: list[float] = []
        self.crops = StageCrops()

    @property
    def train_trust(self) -> list[str] | None:
        """Levels of trust that a region's reference may have to be used in training; None = any."""
        trust = self.config.data.train_trust
        return [trust] if isinstance(trust, str) else trust

    @property
    def patients(self) -> dict[str, str]:
        """Patient of each validation case by its name."""
        val_cases = itertools.chain.from_iterable(source.split.val for source in self.sources)
        return {case.name: case.patient for case in val_cases}

    def prepare_data(self) -> None:
        """Fill the cache; Lightning calls this once per machine."""
        from rich.progress import track

        missing: list[tuple[Case, CaseSource]] = []
        for source in self.sources:
            for case in (*source.split.train, *source.split.val):
                if not self._with_entry(is_current, case, source):
                    missing.append((case, source))
        title = f"cache at {spacing_text(self.config.spacing.target_spacing_mm)}"
        for case, source in track(missing, title, disable=not missing):
            self._with_entry(prepare_case, case, source)

    def setup(self, stage: str) -> None:
        """Open the cache entries, without loading voxels, and prepare the crops."""
        self.train_cases = []
        self.val_cases = []
        self.weights = []
        for source in self.sources:
            train_cases = self._open(source.split.train, source)
            self.train_cases += train_cases
            self.val_cases += self._open(source.split.val, source)
            self.weights += [self._item_weight(source, train_cases)] * len(train_cases)
        self._refuse_leak()
        options = self.config.stage
        coarse_boxes_by_case: dict[str, dict[str, VoxelBox]] = {}
        probs_by_case: dict[str, CoarseProbs] = {}
        if self.coarse is not None:
            for case in (*self.train_cases, *self.val_cases):
                coarse = self.coarse_by_case.get(case.name, self.coarse)
                if options.region_from is RegionFrom.coarse:
                    coarse_boxes_by_case[case.name] = coarse_boxes(case, coarse, self.task)
                if options.coarse_channel:
                    probs_by_case[case.name] = kept_probs(case, coarse, self.task)
        self.crops = StageCrops(
            self.rule,
            self._scan_spacings(),
            region_margin_mm=options.region_margin_mm or 0.0,
            box_jitter_mm=options.box_jitter_mm or 0.0,
            patch_size=options.patch_size,
            tile_size=self.config.inference.tile_size,
            divisor=self.divisor,
            coarse_boxes=coarse_boxes_by_case,
            coarse_probs=probs_by_case,
        )
        # Lightning attaches its trainer; other users of the module have one process.
        is_first_rank = self.trainer is None or self.trainer.is_global_zero
        # `plan` sets up the module without cases, and adds a synthetic one afterwards.
        if is_first_rank and self.train_cases:
            self._note_absent_classes()

    def _item_weight(self, source: CaseSource, train_cases: Sequence[CachedCase]) -> float:
        """Divide the share of a source evenly among the items of its training cases.

        Raises:
            UserError: If it has training cases, but no items: its share could not be drawn.
        """
        stage = self.config.stage
        num_items = 0
        for case in train_cases:
            num_items += len(trained_regions(case, self.task, stage, self.train_trust))
        if train_cases and not num_items:
            raise UserError(describe_no_items(train_cases, self.task, stage, self.train_trust))
        return source.share / max(1, num_items)

    def _scan_spacings(self) -> ScanSpacings | None:
        """List the spacings of the training scans, where the spacing is drawn from them."""
        if self.config.spacing.draw is not SpacingDraw.tail:
            return None
        spacings_mm = [case.audit.grid.spacing_mm for case in self.train_cases]
        # The scans of a source divide its share evenly.
        shares: list[float] = []
        for source in self.sources:
            num_train = len(source.split.train)
            shares += [source.share / max(1, num_train)] * num_train
        total_share = sum(shares)
        return ScanSpacings(spacings_mm, [share / total_share for share in shares])

    def _note_absent_classes(self) -> None:
        """Print which classes no training case holds, before the first step."""
        items = self.train_samples().items
        absent = absent_classes(items, self.task, is_coarse=self.config.stage.sees_whole_scans)
        num_cases = len({case.name for case, _ in items})
        note = absence_note(absent, num_cases, self.val_cases, self.train_trust)
        if note:
            say(note)

    def state_dict(self) -> dict[str, Any]:
        """List the cases in their order, for the checkpoint: a resumed run must have the same."""
        return {
            "train": [[case.name, case.content] for case in self.train_cases],
            "val": [[case.name, case.content] for case in self.val_cases],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Compare the cases with those of the checkpoint.

        Raises:
            UserError: If they differ: the samples of the resumed run would be those of another data
                set.
        """
        kinds = {"train": "training", "val": "validation"}
        for split, cases in self.state_dict().items():
            changes = _case_changes(dict(state_dict[split]), dict(cases))
            if changes:
                raise UserError(
                    f"The {kinds[split]} cases are not those that the run began with "
                    f"({'; '.join(changes)}), so two data sets would be mixed; restore the case "
                    "table and its files (data.cases=<table> where it was moved), or start a new "
                    "run, with init_from=<checkpoint> to go on from its weights."
                )

    def train_dataloader(self) -> DataLoader[Any]:
        """Make the loader of micro-batches from the trainer's step on."""
        trainer = self.trainer
        assert trainer is not None
        return self.train_batches(trainer.global_rank, trainer.world_size, trainer.global_step)

    def train_batches(
        self, rank: int = 0, num_ranks: int = 1, start_step: int = 0
    ) -> DataLoader[Any]:
        """Make the loader of the micro-batches of a rank from a step on.

        Args:
            rank: Number of the rank, from 0.
            num_ranks: Number of ranks, which divide the samples of each step.
            start_step: Number of the first step, from 0.
        """
        config = self.config
        samples = self.train_samples()
        data_set: Dataset[Any] = samples
        if config.debug.overfit:
            data_set = _FirstBatch(samples, config.stage.batch_size)
        has_one_shape = config.stage.patch_size is not None or config.spacing.size is not None
        sampler = StepBatchSampler(
            config.steps,
            config.stage.batch_size,
            accumulate=config.memory.accumulate,
            rank=rank,
            num_ranks=num_ranks,
            start_step=start_step,
            # Whole crops differ in size: each rank gets about the same number of voxels.
            size=None if has_one_shape else samples.size,
        )
        return TrainLoader(
            data_set,
            batch_sampler=sampler,
            num_workers=self.num_workers,
            collate_fn=functools.partial(collate, multiple=self.divisor, is_stacked=has_one_shape),
            worker_init_fn=init_worker,
            persistent_workers=self.num_workers > 0,
            # Torch refuses a number where there are no workers.
            prefetch_factor=self.prefetch if self.num_workers > 0 else None,
            pin_memory=self.pins_memory(),
        )

    def pins_memory(self) -> bool:
        """Whether samples go to pinned memory, from which a GPU copies them while it computes.

        Without the key `data.pin_memory` they do so only where the run uses a GPU: pinning starts
        the driver, which takes some memory of a card that others may use.
        """
        if self.pin_memory is not None:
            return self.pin_memory
        return pick_device(self.config.trainer.accelerator).type == "cuda"

    def train_samples(self) -> Samples:
        """Make the data set of training samples."""
        return Samples(
            self.train_cases,
            self.task,
            self.crops,
            self.config.stage,
            seed=self.config.seed,
            augmentation=self.augmentation,
            weights=self.weights,
            train_trust=self.train_trust,
        )

    def val_dataloader(self) -> Any:
        """Make the loader of the whole validation cases of this rank, one at a time.

        With n ranks, each takes every n-th case. All ranks take the same number of cases, because
        they wait for each other: where the cases do not suffice, the first ones come twice, and are
        scored once.

        Returns:
            The loader; an empty list without a case.
        """
        trainer = self.trainer
        assert trainer is not None
        # A fine stage needs a case with a region.
        sees_whole_scans = self.config.stage.sees_whole_scans
        if not any(sees_whole_scans or case.region_boxes for case in self.val_cases):
            return []
        samples = self.val_samples()
        num_samples = len(samples)
        num_rounds = math.ceil(num_samples / trainer.world_size)
        numbers = range(trainer.global_rank, num_rounds * trainer.world_size, trainer.world_size)
        # No worker processes: they would hold memory during the whole training, for a case now and
        # then.
        return DataLoader(
            samples,
            batch_size=1,
            sampler=[number % num_samples for number in numbers],
            collate_fn=functools.partial(collate, multiple=self.divisor),
            pin_memory=self.pins_memory(),
        )

    def val_samples(self) -> Samples:
        """Make the data set of whole volumes, or of the crops that prediction would cut.

        They are neither augmented nor jittered.
        """
        stage = self.config.stage.for_validation
        return Samples(
            self.val_cases, self.task, self.crops, stage, seed=self.config.seed, jitter=False
        )

    def _refuse_leak(self) -> None:
        """Refuse a validation case whose voxels are those of a training case of another name.

        A case that is in both sets under one name is not refused here.

        Raises:
            UserError: If there is such a case, unless it ignores that finding.
        """
        train_names = {case.audit.voxels_sha256: case.name for case in self.train_cases}
        for case in self.val_cases:
            twin = train_names.get(case.audit.voxels_sha256)
            if twin is None or twin == case.name or DUPLICATE in case.ignore_findings:
                continue
            raise UserError(
                f"The validation case {case.name!r} has the same voxels as the training case "
                f"{twin!r}; remove one of them, or give both the same patient in the case "
                f"table (or data.ignore_findings=[{DUPLICATE}])."
            )

    def _open(self, cases: Sequence[Case], source: CaseSource) -> list[CachedCase]:
        """Open the cache entries of cases of a source."""
        return [self._with_entry(open_case, case, source) for case in cases]

    def _with_entry(self, do: Callable[..., T], case: Case, source: CaseSource) -> T:
        """Call a function of the cache on the entry of a case for this stage.

        Args:
            do: `is_current`, `prepare_case` or `open_case` of `medseg.data.cache`.
            case: The case.
            source: The source that lists it, with the values of its labels.

        Returns:
            What the function returns.
        """
        spacing = self.config.spacing
        return do(
            case,
            Path(self.config.data.cache),
            spacing.target_spacing_mm,
            self.task,
            source.label_values,
            resampling=spacing.resampling.value,
        )


def _case_changes(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Describe how the cases of a run have changed.

    Args:
        then: Cases of the checkpoint in their order: case name to the hash of its content.
        now: The same for the cases of the present run.

    Returns:
        Phrases such as "a, b added"; empty where nothing has changed.
    """
    names_in_both = [name for name in now if name in then]
    changes = {
        "added": [name for name in now if name not in then],
        "removed": [name for name in then if name not in now],
        "changed": [name for name in names_in_both if now[name] != then[name]],
    }
    # Key views compare as sets, lists also by order.
    if then.keys() == now.keys() and list(then) != list(now):
        changes["in another order"] = list(now)
    return [f"{first_few(names)} {change}" for change, names in changes.items() if names]


class TrainLoader(DataLoader[Any]):
    """Loader whose worker processes outlive a stop signal to the process group.

    The run saves first, and then ends them.
    """

    def __iter__(self) -> Any:
        """Start the workers with the stop signals blocked.

        The workers inherit the blocked signals by each start method: fork, spawn and forkserver.
        """
        # Python's resource tracker must run before the signals are blocked. Else it would start
        # together with the first worker, and its start unblocks SIGTERM.
        resource_tracker.ensure_running()
        former_mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, *SIGNALS))
        workers_run_already = self._iterator is not None
        if self.num_workers and not workers_run_already:
            # Forked workers share the memory of this process until either writes to it, and the
            # garbage collector writes to every object that it looks at. The collectors of all
            # processes leave frozen objects alone.
            gc.collect()
            gc.freeze()
        try:
            iterator = super().__iter__()
            # When this process ends, Python sends SIGTERM to the workers that still run and waits
            # for them. They block SIGTERM, so Python would wait for ever: they are killed first.
            workers = getattr(iterator, "_workers", None)
            if workers:
                # None in place of an object, so that `_kill` is called only when this process ends;
                # torch ends the workers of an iterator that is deleted before. With a priority,
                # because finalizers without one are called only after that wait.
                Finalize(None, _kill, (id(iterator), workers), exitpriority=0)
            return iterator
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, former_mask)


def _kill(iterator_id: int, workers: Sequence[BaseProcess]) -> None:
    """Kill the workers that still run.

    Args:
        iterator_id: Number under which torch knows the workers of an iterator.
        workers: Their processes.
    """
    # Torch must forget them first: its SIGCHLD handler raises for a killed worker that it knows.
    with suppress(ValueError):  # torch has ended them already
        _remove_worker_pids(iterator_id)
    for worker in workers:
        if worker.is_alive():
            worker.kill()


class _FirstBatch(Dataset[Any]):
    """Data set that repeats the samples of the first step; a sampler gives it any number n."""

    def __init__(self, samples: Dataset[Any], batch_size: int) -> None:
        self.samples = samples
        self.batch_size = batch_size

    def __getitem__(self, n: int) -> Any:
        return self.samples[n % self.batch_size]


def propose_workers(config: TrainConfig) -> int:
    """Choose the default number of loader processes of a rank; `tune_loader` measures a better one.

    On a CPU it is one, so that the network gets the processors. On a GPU it is the share of a rank
    in the processors, less one for the rank itself, at most eight.
    """
    if pick_device(config.trainer.accelerator).type == "cpu":
        return 1
    processors_per_rank = num_processors() // config.trainer.devices
    return max(1, min(8, processors_per_rank - 1))


def coarse_boxes(case: CachedCase, coarse: TrainedStage, task: Task) -> dict[str, VoxelBox]:
    """Find the regions of a cached case with the coarse stage, as boxes without margin.

    Args:
        case: Case in the cache of the fine stage.
        coarse: Trained coarse stage.
        task: Task of the fine stage, with the channels of the case; those of the coarse stage may
            have another intensity.
    """
    localisation = _localise(case, coarse, task)
    boxes = {}
    for name, box in localisation.boxes.items():
        boxes[name] = case.grid.box_from(localisation.grid, box)
    return boxes


def kept_probs(case: CachedCase, coarse: TrainedStage, task: Task) -> CoarseProbs:
    """Open the probabilities of the coarse stage that are kept in the cache entry of a case.

    The first call predicts and stores them. Arguments as in `coarse_boxes`.
    """

    def predict() -> tuple[np.ndarray, VoxelGrid]:
        localisation = _localise(case, coarse, task, keep_probs=True)
        assert localisation.probs is not None, "they were asked for"
        assert localisation.probs_grid is not None, "it comes with them"
        return localisation.probs.numpy(), localisation.probs_grid

    # Checksums of the checkpoints, and precision: with another key the stage predicts anew.
    key = [*coarse.checkpoints.values(), coarse.precision]
    return coarse_probs(case, " ".join(key), predict)


def _localise(
    case: CachedCase,
    coarse: TrainedStage,
    task: Task,
    *,
    keep_probs: bool = False,
) -> Localisation:
    """Run the coarse stage on a cached case."""
    intensities = []
    for intensity, fine_channel, image, channel in zip(
        case.intensities, task.channels, case.images, coarse.task.channels, strict=True
    ):
        # The intensity map of the case is that of the fine stage: it is used if both stages scale
        # the channel alike. For a channel with a CT window the case has none.
        if not intensity or channel != fine_channel:
            intensity = intensity_of(image, channel.modality, channel.normalise, channel.window_hu)
        intensities.append(intensity)
    images = [np.asarray(image) for image in case.images]
    # No memory budget: training has no key for one.
    options = InferenceOptions(budget_gib=math.inf)
    return localise(
        images,
        case.grid,
        coarse,
        options=options,
        scan_spacing_mm=case.audit.grid.spacing_mm,
        intensities=intensities,
        keep_probs=keep_probs,
    )
