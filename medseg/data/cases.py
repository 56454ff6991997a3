"""Cases of a configuration, from a case table, synthetic scans or both, with their label values."""

from pathlib import Path
from typing import TYPE_CHECKING

from medseg.data.audit.finding import check_ignored
from medseg.data.case_table import Case, CaseSource, Split, read_case_table, split_cases
from medseg.data.importers.formats import read_cases
from medseg.data.options import DataOptions, Detail, PhantomCountsOptions, Scene
from medseg.data.reference import file_values
from medseg.errors import UserError
from medseg.io.atomic import check_writable, locked
from medseg.phantom.spec import PHANTOM_LABELS
from medseg.preprocess.scale import HuScale
from medseg.processors import num_processors
from medseg.task import LabelValues, Task
from medseg.task_options import TaskOptions, make_task

if TYPE_CHECKING:
    from medseg.phantom.scene import SceneSpec

# Most processes that make synthetic scans at a time: each takes 2 to 5 GB of memory for a scan of
# full detail.
MAX_PHANTOM_WORKERS = 4


def find_cases(data: DataOptions, task: TaskOptions) -> list[tuple[list[Case], LabelValues]]:
    """Find all cases of the `data` group with their label values, whatever the split.

    Missing synthetic scans are made.

    Returns:
        Two groups, each with its label values. First the cases of the user's table, or synthetic
        scans where `data.cases` is not given; second the synthetic scans that are added to the
        table, which may be an empty list.

    Raises:
        UserError: If the table or the label values are wrong.
    """
    label_values = file_values(data.label_values or {})
    ignore_findings = check_ignored(data.ignore_findings, "data.ignore_findings")
    phantoms = data.phantoms
    is_chest = phantoms.scene is Scene.chest
    folder = Path(phantoms.folder)
    if not is_chest:
        # Scenes of organs depend on the labels of the task; chests are the same for every task.
        folder /= task.name
    if data.cases is None:
        table = make_phantoms(phantoms, task, folder, phantoms.num_train, with_held_out=True)
        cases = read_case_table(table, data.labels_column, ignore_findings=ignore_findings)
        return [(cases, label_values), ([], {})]
    hu = HuScale(data.hu_slope, data.hu_offset)
    cases = read_cases(Path(data.cases), data.labels_column, hu=hu, ignore_findings=ignore_findings)
    extra: list[Case] = []
    if phantoms.num_extra:
        table = make_phantoms(
            phantoms, task, folder / "extra", phantoms.num_extra, with_held_out=False
        )
        # The table of chests has two columns of label maps: `organs` with all structures of
        # `PHANTOM_LABELS`, and `labels` with only two of them.
        column = "organs" if is_chest else "labels"
        extra = read_case_table(table, column, ignore_findings=ignore_findings)
    shared_names = {case.name for case in extra} & {case.name for case in cases}
    if shared_names:
        raise UserError(
            f"data.cases={data.cases}: the case name {min(shared_names)} is that of a phantom; "
            "rename the case"
        )
    extra_values = PHANTOM_LABELS if is_chest else file_values(make_task(task).values)
    return [(cases, label_values), (extra, extra_values)]


def find_sources(data: DataOptions, task: TaskOptions) -> list[CaseSource]:
    """Find the cases of the `data` group with their split, label values and share of the samples.

    Raises:
        UserError: If the table, the split or the label values are wrong.
    """
    (cases, label_values), (extra, extra_values) = find_cases(data, task)
    split = split_cases(
        cases,
        fold=data.fold,
        num_folds=data.num_folds,
        val_patients=data.val_patients,
        test_patients=data.test_patients,
    )
    if not extra:
        return [CaseSource(split, label_values, share=1.0)]
    return [
        CaseSource(split, label_values, share=1.0 - data.phantom_share),
        CaseSource(
            Split(train=tuple(extra), val=(), test=()), extra_values, share=data.phantom_share
        ),
    ]


def make_phantoms(
    config: PhantomCountsOptions,
    task: TaskOptions,
    folder: Path,
    num_train: int,
    *,
    with_held_out: bool,
) -> Path:
    """Make the missing synthetic scans and their case table.

    Args:
        config: Kind, seed and numbers of scans.
        task: Labels and channels of a scene of organs; a chest does not use it.
        folder: Where to write; made if absent.
        num_train: Number of training scans; replaces `config.num_train`.
        with_held_out: Whether to make the validation and test scans of `config`, too.

    Returns:
        Path of the table.
    """
    from rich.progress import Progress

    from medseg.phantom.case_folders import write_phantoms

    scene = None
    if config.scene is Scene.organs:
        scene = _scene_of_task(config, make_task(task))
    splits = {"train": num_train}
    if with_held_out:
        splits |= {"val": config.num_val, "test": config.num_test}
    total = sum(splits.values())
    num_useful = total
    if config.detail is Detail.small:
        # A small scan takes about one second, the start of a process about three: a process pays
        # off from four scans on.
        num_useful = total // 4
    num_workers = max(1, min(num_useful, num_processors(), MAX_PHANTOM_WORKERS))
    check_writable(folder)
    # Ranks and the jobs of a sweep start at the same time: the first process makes the scans, the
    # others wait and then find them.
    with locked(folder / ".lock"), Progress(transient=True) as progress:
        bar = progress.add_task("phantoms", total=total)

        def show(num_finished: int, _total: int, case_name: str) -> None:
            progress.update(bar, completed=num_finished, description=case_name)

        return write_phantoms(
            folder,
            num_cases=total,
            seed=config.seed,
            detail=config.detail.value,
            splits=splits,
            progress=show,
            num_workers=num_workers,
            scene=scene,
        )


def _scene_of_task(config: PhantomCountsOptions, task: Task) -> "SceneSpec":
    """Describe the scenes of organs of a task.

    The result is a pattern for all cases: `write_phantoms` sets the seed, index and detail of each.
    """
    from medseg.phantom.scene import SceneSpec

    sides: dict[str, str] = {}
    for region in task.regions:
        if region.side:
            sides |= dict.fromkeys(region.labels, region.side)
    # `task.volume_ml` may also limit regions, but a scene draws sizes of labels only.
    volume_ml = {}
    for name, limits in task.volume_ml.items():
        if name in task.labels:
            volume_ml[name] = limits
    return SceneSpec(
        seed=config.seed,
        index=0,
        labels=task.labels,
        sides=sides,
        modalities=tuple(channel.modality for channel in task.channels),
        ignore_label=task.ignore_label,
        has_own_grids=config.own_grids,
        parts=tuple(task.parts),
        volume_ml=volume_ml,
    )
