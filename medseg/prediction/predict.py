"""Prediction of an input: finds its scans, chooses the paths of their results, and segments them.

The scans are segmented in this process or on a cluster.
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
from medseg.memory.options import Accelerator
from medseg.prediction.batch import (
    BatchCase,
    Observer,
    has_other_ranks,
    load_range_models,
    make_batch,
    run_overlapped,
)
from medseg.prediction.case_report import refuse_other_json, report_path
from medseg.prediction.load_models import RangeModel
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
    may_be_channel,
    may_hold_studies,
    output_paths,
)
from medseg.prediction.series import find_files, pick_series
from medseg.prediction.summary import PAGE_FILE, check_summary, write_summary

if TYPE_CHECKING:
    from medseg.io.dicom.frames import NoSlice
    from medseg.io.dicom.studies import Study
    from medseg.task import Task


def predict_scans(config: PredictConfig, observer: Observer | None = None) -> list[BatchCase]:
    """Segment every scan of an input; a failing case does not affect the others.

    Under torchrun rank 0 does this, and the other processes run networks for it and return an empty
    list.

    Args:
        config: Checked configuration.
        observer: Receives the events of the prediction.

    Returns:
        The cases with their outcomes.

    Raises:
        UserError: If the input, the output or a checkpoint is not usable at all.
    """
    observer = observer or Observer()
    if has_other_ranks():
        _refuse_on_several_processes(config)
        if int(os.environ["RANK"]) > 0:
            (chosen,) = load_range_models(config)
            _cascade_of(chosen).serve_tiles()
            return []
    source = _source_of(config)
    if isinstance(source, Path) and is_archive(source):
        return _predict_archive(source, config, observer)
    return _predict_source(source, config, observer)


def _predict_archive(path: Path, config: PredictConfig, observer: Observer) -> list[BatchCase]:
    """Segment the scans in a zip archive.

    Results and messages name the archive, not the temporary folder to which it is unpacked.

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
    """Segment every scan of an input, which may be an unpacked archive.

    The order of the steps matters. What can be refused without the weights is refused before they
    are loaded, which takes long; and all outputs are checked before the first scan is segmented.

    Args:
        source: The input; the unpacked folder of an archive.
        config: Checked configuration.
        observer: Receives the events of the prediction.
        archive: Archive that the input was unpacked from.
    """
    is_on_ray = config.engine is Engine.ray
    if config.series_pick is not None and not config.has_scan_path:
        raise UserError(
            f"series_pick={config.series_pick}: expected a folder of DICOM files as input, got "
            f"{config.input}; leave it out (a case table has a column series for that)"
        )
    # `protected` describes each file of the input, none of which may be overwritten.
    scans, protected = find_scans(
        source, config.split, config.series, config.hu, config.data.labels_column
    )
    scans = [scan._replace(archive=archive) for scan in scans]
    output = Path(config.output)
    # Outputs are checked before the weights are loaded, if the cases are known by now. Which DICOM
    # files make a case, and whether numbers of files are those of channels, depends on the task,
    # which is in the checkpoints.
    has_studies = config.has_scan_path and any(map(may_hold_studies, scans))
    if config.series_pick is not None and not has_studies:
        say(f"{config.input}: no DICOM folder, so series_pick={config.series_pick} has no effect")
    if not has_studies and not any(map(may_be_channel, scans)):
        check_outputs(_outputs(output, source, scans), protected)
    loading_config = _for_the_task_alone(config) if is_on_ray else config
    # One model for each range of spacings, all of them for the same task.
    range_models = load_range_models(loading_config)
    task = range_models[0].model.task
    scans = _complete_scans(source, scans, task, config, observer)
    outputs = _outputs(output, source, scans)
    check_outputs(outputs, protected)
    # A batch has a summary in the folder of its outputs. A folder or table is a batch even if it
    # holds one scan; but an output that is a file leaves no place for a summary.
    is_batch = _may_hold_several(source) and output not in outputs
    if is_batch:
        check_summary(output, protected)
    page = output / PAGE_FILE if is_batch else None
    cases = _place_results(scans, outputs, range_models[0], config.save, protected, page)
    if is_on_ray:
        predict_on_ray(cases, range_models[0].model, config, observer)
    else:
        _predict_here(cases, range_models, config, observer)
    if is_batch:
        write_summary(output, cases, task)
    return cases


def _place_results(
    scans: Sequence[Scan],
    outputs: Sequence[Path],
    any_model: RangeModel,
    save: Sequence[Save],
    protected: Mapping[Path, str],
    page: Path | None,
) -> list[BatchCase]:
    """Choose the result files of each scan, and check that they can be written.

    Args:
        scans: One for each path of `outputs`.
        outputs: Path of the label map of each scan.
        any_model: Any of the models: all have the same labels, which decide the names of files.
        save: Kinds of files.
        protected: Description of each file of the input.
        page: HTML page over the batch; None without one.

    Raises:
        UserError: If a file would be written twice or overwrite an input or a file of another
            program, or cannot be written.
    """
    cases = []
    all_paths: list[Path] = []
    for scan, output in zip(scans, outputs, strict=True):
        paths = list(result_paths(output, any_model.model, save).values())
        all_paths += [*paths, report_path(output)]
        cases.append(BatchCase(scan, output, paths))
    check_outputs(all_paths, protected)
    # The viewer of a case called `index` would overwrite the page.
    if page is not None and page in all_paths:
        raise UserError(
            f"{page} is the page over the batch and would be the viewer of the case {page.stem}; "
            "rename that case, or leave viewer out of save"
        )
    for folder in {path.parent for path in outputs}:
        check_writable(folder)
    for output in outputs:
        refuse_other_json(output)
    return cases


def _complete_scans(
    source: Path | list[Path],
    scans: list[Scan],
    task: "Task",
    config: PredictConfig,
    observer: Observer,
) -> list[Scan]:
    """Find the files of each scan, as far as they depend on the task's channels and modality.

    Args:
        source: The input, with archives unpacked.
        scans: Its scans, from `find_scans`.
        task: Channels and modality.
        config: Configuration of the prediction.
        observer: Is told of each header that was read.

    Raises:
        UserError: If the channels of one case are not those of the task.
    """
    # A list of paths: the channels of one case.
    if not isinstance(source, Path):
        require_channels(task, len(source))
        return scans
    if source.suffix.lower() == ".csv":
        return find_files(scans, task.channels[0].modality, observer.header_read)
    return _scans_of_path(source, scans, task, config, observer)


def _scans_of_path(
    path: Path, scans: Sequence[Scan], task: "Task", config: PredictConfig, observer: Observer
) -> list[Scan]:
    """Divide the scans of an input by studies, and join the files of channels.

    The user is told which DICOM files make a case together, and which belong to none.

    Args:
        path: The input: a folder, a DICOM medium or a single file.
        scans: Its scans by folder and file.
        task: Channels and modality.
        config: Configuration of the prediction.
        observer: Is told of each header that was read.
    """
    modality = task.channels[0].modality
    # Both lists are filled by `divide_studies`.
    empty_studies: list[Study] = []
    loose_files: list[NoSlice] = []
    scans_by_study = divide_studies(
        path,
        scans,
        modality,
        on_file=observer.header_read,
        on_empty=empty_studies.append,
        on_loose=loose_files.append,
    )
    sentences = (
        describe_studies(scans_by_study),
        describe_empty(empty_studies),
        describe_loose(loose_files),
    )
    for sentence in sentences:
        if sentence:
            say(f"{config.input}: {sentence}")
    if config.series_pick is not None:
        scans_by_study = pick_series(
            scans_by_study, config.series_pick, modality, observer.header_read
        )
    return join_channels(scans_by_study, len(task.channels))


def _refuse_on_several_processes(config: PredictConfig) -> None:
    """Refuse keys that the processes of torchrun cannot share.

    Raises:
        UserError: Names the key.
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


def _cascade_of(chosen: RangeModel) -> Cascade:
    """Return the cascade whose tiles the processes of torchrun share."""
    # Model folders, which may hold another kind of model, have been refused.
    return cast(Cascade, chosen.model)


def _source_of(config: PredictConfig) -> Path | list[Path]:
    """Return the path of a scan, folder or case table; or those of the channels of one case."""
    if isinstance(config.input, list):
        return [Path(path) for path in config.input]
    return Path(config.input)


def _for_the_task_alone(config: PredictConfig) -> PredictConfig:
    """Change a configuration for a process that reads the task, while others segment the scans.

    That process loads the weights for a CPU, since it may lack the device of the others.
    """
    inference = replace(config.inference, backend=Backend.torch, half_weights=False)
    return replace(config, inference=inference, accelerator=Accelerator.cpu, precision=None)


def _predict_here(
    cases: Sequence[BatchCase],
    range_models: Sequence[RangeModel],
    config: PredictConfig,
    observer: Observer,
) -> None:
    """Segment cases in this process.

    Args:
        cases: Receive their outcomes.
        range_models: Models to choose from.
        config: Configuration of the prediction.
        observer: Receives the events of the prediction.
    """
    batch = make_batch(range_models, config, len(cases), observer)
    cost_sentence = batch.describe_cost(cases)
    if cost_sentence is not None:
        observer.forecast(cost_sentence)
    shared_tiles: AbstractContextManager[None] = nullcontext()
    if has_other_ranks():
        shared_tiles = _cascade_of(batch.range_models[0]).shared_tiles()
    with shared_tiles:
        run_overlapped(cases, batch.read, batch.compute, batch.finish)


def _may_hold_several(source: Path | Sequence[Path]) -> bool:
    """Tell whether an input may hold any number of scans: a case table, a folder or a medium."""
    # A list of paths: the channels of one case.
    if not isinstance(source, Path):
        return False
    return source.suffix.lower() == ".csv" or source.is_dir() or is_dicomdir(source)


def _outputs(output: Path, source: Path | Sequence[Path], scans: Sequence[Scan]) -> list[Path]:
    """Choose the path of the label map of each scan; errors as for `output_paths`."""
    # A folder or medium that itself holds the slices is one scan, unless its studies were divided.
    is_scan_itself = len(scans) == 1 and scans[0].path == source
    # An output with an unknown suffix is a mistyped file for one scan, and a folder for several.
    is_one_scan = is_scan_itself or not _may_hold_several(source)
    return output_paths(output, [scan.name for scan in scans], is_one_scan=is_one_scan)
