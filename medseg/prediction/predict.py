"""Prediction of an input: finds its scans, places their results, and segments them.

The scans are segmented here or on a cluster.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from medseg.cascade.cascade import Cascade, require_channels
from medseg.console import say
from medseg.errors import UserError
from medseg.inference.options import Backend
from medseg.io.archive import is_archive, unpacked
from medseg.io.atomic import check_writable
from medseg.io.inputs import is_dicomdir
from medseg.io.tables import refuse_table
from medseg.memory.options import Accelerator
from medseg.prediction.batch import (
    BatchCase,
    Observer,
    has_other_ranks,
    load_cascades,
    make_batch,
    run_overlapped,
)
from medseg.prediction.load_models import RangeCascade
from medseg.prediction.options import Engine, PredictConfig, Save
from medseg.prediction.ray_engine import predict_on_ray
from medseg.prediction.result_files import result_paths
from medseg.prediction.scans import (
    Archive,
    Scan,
    check_outputs,
    describe_empty,
    describe_loose,
    describe_studies,
    divide_studies,
    find_scans,
    join_channels,
    may_hold_studies,
    output_paths,
)
from medseg.prediction.series import find_files, pick_series
from medseg.prediction.summary import PAGE_FILE, SUMMARY_FILE, write_summary

if TYPE_CHECKING:
    from medseg.io.dicom.frames import NoSlice
    from medseg.io.dicom.studies import Study
    from medseg.task import Task

# First columns of the table of the same name as the summary that `evaluate` writes.
METRIC_KEYS = ("region", "trust", "metric")


def predict_scans(config: PredictConfig, observer: Observer | None = None) -> list[BatchCase]:
    """Segment every scan of an input; a failing case does not affect the others.

    Under torchrun rank 0 does this, and the other processes run networks for it and return an empty
    list.

    Args:
        config: Checked configuration.
        observer: Is told what happens.

    Returns:
        The cases with their outcomes.

    Raises:
        UserError: If the input, the output or a checkpoint is not usable at all.
    """
    observer = observer or Observer()
    if has_other_ranks():
        _refuse_on_several_processes(config)
        if int(os.environ["RANK"]) > 0:
            (chosen,) = load_cascades(config)
            _cascade_of(chosen).serve_tiles()
            return []
    source = _source_of(config)
    if isinstance(source, Path) and is_archive(source):
        return _predict_archive(source, config, observer)
    return _predict_source(source, config, observer)


def _predict_archive(path: Path, config: PredictConfig, observer: Observer) -> list[BatchCase]:
    """Segment the scans in a zip archive; results and messages name it, not its temporary folder.

    Raises:
        UserError: As for `predict_scans`, and if the archive cannot be unpacked.
    """
    if config.engine is Engine.ray:
        raise UserError(
            f"engine=ray: other machines cannot read the unpacked {path}; unpack it to a folder"
        )
    with unpacked(path) as folder:
        try:
            return _predict_source(folder, config, observer, Archive(path, folder))
        except UserError as error:
            raise UserError(str(error).replace(str(folder), str(path))) from error


def _predict_source(
    source: Path | list[Path],
    config: PredictConfig,
    observer: Observer,
    archive: Archive | None = None,
) -> list[BatchCase]:
    """Segment every scan of an input that is no archive.

    Args:
        source: The input; the unpacked folder of an archive.
        config: Checked configuration.
        observer: Is told what happens.
        archive: Archive that the input was unpacked from.
    """
    is_on_ray = config.engine is Engine.ray
    is_folder = isinstance(source, Path) and source.suffix.lower() != ".csv"
    if config.series_pick is not None and not is_folder:
        raise UserError(
            f"series_pick={config.series_pick}: expected a folder of DICOM files as input, got "
            f"{config.input}; fill in the column series of a case table, or leave it out"
        )
    scans, protected = find_scans(
        source, config.split, config.series, config.hu, config.data.labels_column
    )
    scans = [scan._replace(archive=archive) for scan in scans]
    # Whether there is a summary does not depend on what the headers will say.
    is_batch = _is_batch(source)
    # An output with an unknown suffix is a mistyped file there, as for a folder that itself holds
    # slices.
    is_one_scan = not is_batch or (len(scans) == 1 and scans[0].path == source)
    output = Path(config.output)
    # Which DICOM files are one case depends on the task, which is in the checkpoints: the outputs
    # of such an input are checked below only. Those of others are checked before weights load.
    has_studies = is_folder and any(map(may_hold_studies, scans))
    if not has_studies:
        check_outputs(_outputs(output, scans, is_one_scan), protected)
    cascades = load_cascades(_for_the_task_alone(config) if is_on_ray else config)
    task = cascades[0].cascade.task
    scans = _complete_scans(source, scans, task, config, observer)
    outputs = _outputs(output, scans, is_one_scan)
    check_outputs(outputs, protected)
    is_batch = is_batch and output not in outputs
    if is_batch:
        refuse_table(
            output / SUMMARY_FILE,
            METRIC_KEYS,
            f"the scores of an evaluation; give another output than {output}",
        )
    page = output / PAGE_FILE if is_batch else None
    cases = _place_results(scans, outputs, cascades[0], config.save, protected, page)
    if is_on_ray:
        predict_on_ray(cases, cascades[0].cascade, config, observer)
    else:
        _predict_here(cases, cascades, config, observer)
    if is_batch:
        write_summary(output, cases, task)
    return cases


def _place_results(
    scans: Sequence[Scan],
    outputs: Sequence[Path],
    chosen: RangeCascade,
    save: Sequence[Save],
    protected: Mapping[Path, str],
    page: Path | None,
) -> list[BatchCase]:
    """Choose the result files of each scan, and check that they can be written.

    Args:
        scans: The scans.
        outputs: Path of the label map of each.
        chosen: Any cascade: all have the same labels.
        save: Kinds of files.
        protected: Description of each file of the input.
        page: Page over the batch; None without one.

    Raises:
        UserError: If a file would be written twice or overwrite an input, or cannot be written.
    """
    cases = []
    files: list[Path] = []
    for scan, path in zip(scans, outputs, strict=True):
        paths = list(result_paths(path, chosen.cascade, save).values())
        files += paths
        cases.append(BatchCase(scan, path, paths))
    check_outputs(files, protected)
    if page is not None and page in files:
        raise UserError(
            f"{page} is the page over the batch and would be the viewer of the case {page.stem}; "
            "rename that case, or leave viewer out of save"
        )
    for folder in {path.parent for path in outputs}:
        check_writable(folder)
    return cases


def _complete_scans(
    source: Path | list[Path],
    scans: list[Scan],
    task: "Task",
    config: PredictConfig,
    observer: Observer,
) -> list[Scan]:
    """Find the files of each scan that depend on the channels and the modality of the task.

    Args:
        source: The input.
        scans: Its scans, from `find_scans`.
        task: Channels and modality.
        config: Configuration of the prediction.
        observer: Is told of each header.

    Raises:
        UserError: If the channels of one case are not those of the task.
    """
    if not isinstance(source, Path):
        require_channels(task, len(source))
        return scans
    if source.suffix.lower() == ".csv":
        return find_files(scans, task.channels[0].modality, observer.header_read)
    return _scans_of_folder(source, scans, task, config, observer)


def _scans_of_folder(
    folder: Path, scans: Sequence[Scan], task: "Task", config: PredictConfig, observer: Observer
) -> list[Scan]:
    """Divide the scans of a folder by studies, and join the files of channels.

    Args:
        folder: The input.
        scans: Its scans by folder and file.
        task: Channels and modality.
        config: Configuration of the prediction.
        observer: Is told of each header.
    """
    modality = task.channels[0].modality
    empty: list[Study] = []
    loose: list[NoSlice] = []
    by_study = divide_studies(
        folder, scans, modality, observer.header_read, empty.append, loose.append
    )
    sentences = (describe_studies(by_study), describe_empty(empty), describe_loose(loose))
    for sentence in sentences:
        if sentence:
            say(f"{config.input}: {sentence}")
    if config.series_pick is not None:
        by_study = pick_series(by_study, config.series_pick, modality, observer.header_read)
    return join_channels(by_study, len(task.channels))


def _refuse_on_several_processes(config: PredictConfig) -> None:
    """Refuse what the processes of torchrun cannot share.

    Raises:
        UserError: With the key.
    """
    if config.engine is Engine.ray:
        raise UserError(
            "engine=ray distributes scans by itself; start the command without torchrun"
        )
    if config.weights is not None:
        raise UserError(
            "weights: the processes of torchrun cannot share a model folder; "
            "start the command without torchrun, or give coarse= and fine="
        )
    if config.by_spacing:
        raise UserError(
            "by_spacing: the processes of torchrun share one cascade; "
            "predict each range with a command of its own, or start without torchrun"
        )


def _cascade_of(chosen: RangeCascade) -> Cascade:
    """The cascade whose tiles the processes of torchrun share; model folders were refused."""
    return cast(Cascade, chosen.cascade)


def _source_of(config: PredictConfig) -> Path | list[Path]:
    """Path of a scan, folder or case table; or those of the channels of one case."""
    if isinstance(config.input, list):
        return [Path(path) for path in config.input]
    return Path(config.input)


def _for_the_task_alone(config: PredictConfig) -> PredictConfig:
    """Change what this process does not need where others segment the scans.

    It may lack their device.
    """
    inference = replace(config.inference, backend=Backend.torch, half_weights=False)
    return replace(config, inference=inference, accelerator=Accelerator.cpu, precision=None)


def _predict_here(
    cases: Sequence[BatchCase],
    cascades: Sequence[RangeCascade],
    config: PredictConfig,
    observer: Observer,
) -> None:
    """Segment cases in this process.

    Args:
        cases: The cases.
        cascades: Cascades to choose from.
        config: Configuration of the prediction.
        observer: Is told what happens.
    """
    batch = make_batch(cascades, config, len(cases), observer)
    sentence = batch.describe_cost(cases)
    if sentence is not None:
        observer.forecast(sentence)
    shared_tiles: AbstractContextManager[None] = nullcontext()
    if has_other_ranks():
        shared_tiles = _cascade_of(batch.cascades[0]).shared_tiles()
    with shared_tiles:
        run_overlapped(cases, batch.read, batch.compute, batch.finish)


def _is_batch(source: Path | Sequence[Path]) -> bool:
    """Whether an input may hold any number of scans: a case table, a folder or a medium."""
    if not isinstance(source, Path):
        return False
    return source.suffix.lower() == ".csv" or source.is_dir() or is_dicomdir(source)


def _outputs(output: Path, scans: Sequence[Scan], is_one_scan: bool) -> list[Path]:
    """Choose the paths of the label maps; errors as for `output_paths`."""
    return output_paths(output, [scan.name for scan in scans], is_one_scan=is_one_scan)
