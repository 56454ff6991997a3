"""Data set of phantoms: a folder per case and their case table."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from medseg.errors import UserError
from medseg.io.atomic import replace_text
from medseg.io.tables import write_csv
from medseg.io.write import write_image, write_labels
from medseg.phantom.scan import make_phantom
from medseg.phantom.scene import SceneSpec, make_scene
from medseg.phantom.spec import PhantomSpec, draw_spec
from medseg.worker_process import Worker, WorkerDiedError

VERSION = 5
"""Format of the data set; raise it when equal specs give other voxels: all cases are made again."""

Spec = PhantomSpec | SceneSpec

_CHEST_FILES = {"image": "ct.nii.gz", "labels": "lungs.nii.gz", "organs": "organs.nii.gz"}


def write_phantoms(
    folder: Path,
    num_cases: int,
    seed: int,
    detail: str = "small",
    splits: Mapping[str, int] | None = None,
    progress: Callable[[int, int, str], None] | None = None,
    num_workers: int = 1,
    scene: SceneSpec | None = None,
) -> Path:
    """Write a data set of phantoms and its case table; cases that are finished are kept.

    Args:
        folder: Where to write; made if absent.
        num_cases: Number of cases.
        seed: Seed of the data set.
        detail: `small` or `full`, see `draw_spec`.
        splits: Cases per split in the order of the table, e.g. `{"train": 8, "val": 2, "test": 2}`;
            must add up to `num_cases`. None leaves the column empty.
        progress: Called after each case with (finished, total, case name).
        num_workers: Processes; a phantom is the same for any number.
        scene: Labels and channels of scenes of organs; its seed, index and detail do not count.
            None makes chests.

    Returns:
        Path of `table.csv`.

    Raises:
        ValueError: If the splits do not add up.
        UserError: If a process ends before its phantom is finished.
    """
    splits = splits or {"": num_cases}
    if sum(splits.values()) != num_cases:
        raise ValueError(f"splits {dict(splits)} must add up to num_cases={num_cases}")
    split_column = []
    for split, num_split_cases in splits.items():
        split_column += [split] * num_split_cases
    specs: list[Spec] = []
    for index in range(num_cases):
        if scene is None:
            specs.append(draw_spec(seed, index, detail))
        else:
            specs.append(replace(scene, seed=seed, index=index, detail=detail))
    folders = [folder / f"phantom_{spec.index:03d}" for spec in specs]
    rows: list[dict[str, str]] = []
    with ExitStack() as stack:
        written = _write_cases(folders, specs, num_workers, stack)
        for case, spec, split, presence in zip(folders, specs, split_column, written, strict=True):
            row = {"case": case.name}
            row |= {column: f"{case.name}/{file}" for column, file in file_names(spec).items()}
            row |= {"patient": case.name, "split": split}
            if isinstance(spec, PhantomSpec):
                row["view"] = spec.view
            for part, is_present in presence.items():
                row[f"trust_{part}"] = "reference" if is_present else "absent"
            rows.append(row)
            if progress is not None:
                progress(len(rows), num_cases, case.name)
    write_csv(folder / "table.csv", rows)
    return folder / "table.csv"


def _write_cases(
    folders: list[Path], specs: list[Spec], num_workers: int, stack: ExitStack
) -> Iterable[dict[str, bool]]:
    """Write cases in this process, or in workers that end with the stack; see `write_case`."""
    if num_workers == 1:
        return map(write_case, folders, specs)
    idle = SimpleQueue[Worker]()
    for _ in range(num_workers):
        idle.put(stack.enter_context(Worker()))
    threads = ThreadPoolExecutor(num_workers)
    # The stack shuts the threads down before it ends the workers: a thread that waits for a worker
    # that has ended would wait for ever.
    stack.callback(threads.shutdown, cancel_futures=True)
    return threads.map(partial(_call_idle, idle), folders, specs)


def _call_idle(idle: SimpleQueue[Worker], folder: Path, spec: Spec) -> dict[str, bool]:
    """Write one case in a worker that has nothing to do; there is a worker for each thread."""
    worker = idle.get()
    try:
        return worker.call(write_case, folder, spec)
    except WorkerDiedError as error:
        cure = "free some memory and start" if error.is_killed else "start"
        raise UserError(
            f"{folder}: the phantom could not be made: {error}; {cure} the command again, which "
            "keeps the phantoms that are finished."
        ) from error
    finally:
        idle.put(worker)


def file_names(spec: Spec) -> dict[str, str]:
    """Name of the file of each column of the case table, in the folder of a case."""
    if isinstance(spec, PhantomSpec):
        return _CHEST_FILES
    names = ["image", *(f"image_{channel}" for channel in range(1, len(spec.modalities)))]
    return {name: f"{name}.nii.gz" for name in (*names, "labels")}


def write_case(folder: Path, spec: Spec) -> dict[str, bool]:
    """Write one case unless it is there already.

    The JSON file beside the images is written last; it marks the case as finished.

    Args:
        folder: Folder of the case.
        spec: The case.

    Returns:
        Whether the image shows `left_lung` and `right_lung`, or each part of a scene.
    """
    finished_mark = folder / "phantom.json"
    files = [folder / name for name in file_names(spec).values()]
    recipe = json.dumps({"version": VERSION, **asdict(spec)}, sort_keys=True)
    fingerprint = hashlib.sha256(recipe.encode()).hexdigest()
    if all(file.is_file() for file in files):
        # A mark that is damaged is no mark.
        with suppress(FileNotFoundError, ValueError):
            earlier = json.loads(finished_mark.read_text(encoding="utf-8"))
            if isinstance(earlier, dict) and earlier.get("hash") == fingerprint:
                return dict(earlier["present"])
    folder.mkdir(parents=True, exist_ok=True)
    # Removed first and written last: a case that was interrupted does not look finished.
    finished_mark.unlink(missing_ok=True)
    if isinstance(spec, PhantomSpec):
        phantom = make_phantom(spec)
        images = [(phantom.image_hu, phantom.grid)]
        label_maps = [phantom.labels, phantom.organs]
        presence = {
            "left_lung": bool(np.any(phantom.labels == 1)),
            "right_lung": bool(np.any(phantom.labels == 2)),
        }
    else:
        images, scene_labels = make_scene(spec)
        label_maps = [scene_labels]
        presence = dict.fromkeys(spec.parts, True)
    # The files of the images come first, those of the label maps after them.
    for file, (image, grid) in zip(files[: len(images)], images, strict=True):
        write_image(file, image, grid)
    _, grid = images[0]
    for file, labels in zip(files[len(images) :], label_maps, strict=True):
        write_labels(file, labels, grid, None)
    contents = {"hash": fingerprint, "present": presence, "spec": asdict(spec)}
    replace_text(finished_mark, json.dumps(contents, indent=1))
    return presence
