"""Data set of phantoms: a folder for each case, and the case table."""

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

VERSION = 7
"""Version of the generator. Raise it whenever equal specs give other voxels than before: then all
cases are made again."""

Spec = PhantomSpec | SceneSpec

# Column of the case table to the file of a chest.
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
    """Write a data set of phantoms and its case table; finished cases of equal specs are kept.

    Args:
        folder: Where to write; made if absent.
        num_cases: Number of cases.
        seed: Seed of the data set.
        detail: `small` or `full`, see `draw_spec`.
        splits: Cases per split in the order of the table, e.g. `{"train": 8, "val": 2, "test": 2}`;
            must add up to `num_cases`. None leaves the column empty.
        progress: Called after each case with (finished, total, case name).
        num_workers: Number of processes; the phantoms do not depend on it.
        scene: Labels and channels of scenes of organs; its seed, index and detail are replaced.
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
        # Lazy: a case is written, or waited for, when the loop reaches it.
        presences = _write_cases(folders, specs, num_workers, stack)
        cases = zip(folders, specs, split_column, presences, strict=True)
        for case_folder, spec, split, presence in cases:
            name = case_folder.name
            row = {"case": name}
            row |= {column: f"{name}/{file}" for column, file in file_names(spec).items()}
            row |= {"patient": name, "split": split}
            if isinstance(spec, PhantomSpec):
                row["view"] = spec.view
            for part, is_present in presence.items():
                row[f"trust_{part}"] = "reference" if is_present else "absent"
            rows.append(row)
            if progress is not None:
                progress(len(rows), num_cases, name)
    write_csv(folder / "table.csv", rows)
    return folder / "table.csv"


def _write_cases(
    folders: list[Path], specs: list[Spec], num_workers: int, stack: ExitStack
) -> Iterable[dict[str, bool]]:
    """Write cases in this process, or in worker processes that end when the stack is closed.

    Returns:
        What `write_case` returns, in the order of the cases; lazy.
    """
    if num_workers == 1:
        return map(write_case, folders, specs)
    idle_workers = SimpleQueue[Worker]()
    for _ in range(num_workers):
        idle_workers.put(stack.enter_context(Worker()))
    threads = ThreadPoolExecutor(num_workers)
    # A stack closes what was added last first, so the threads end before the workers: a thread that
    # waits for a worker that has ended would wait for ever.
    stack.callback(threads.shutdown, cancel_futures=True)
    return threads.map(partial(_call_idle_worker, idle_workers), folders, specs)


def _call_idle_worker(
    idle_workers: SimpleQueue[Worker], folder: Path, spec: Spec
) -> dict[str, bool]:
    """Write one case in an idle worker; there is one, since each thread has a worker."""
    worker = idle_workers.get()
    try:
        return worker.call(write_case, folder, spec)
    except WorkerDiedError as error:
        cure = "free some memory and start" if error.is_killed else "start"
        raise UserError(
            f"{folder}: the phantom could not be made: {error}; {cure} the command again, which "
            "keeps the phantoms that are finished."
        ) from error
    finally:
        idle_workers.put(worker)


def file_names(spec: Spec) -> dict[str, str]:
    """List the files in the folder of a case by their column of the case table, images first."""
    if isinstance(spec, PhantomSpec):
        return _CHEST_FILES
    columns = ["image"]
    columns += [f"image_{channel}" for channel in range(1, len(spec.modalities))]
    columns.append("labels")
    return {column: f"{column}.nii.gz" for column in columns}


def write_case(folder: Path, spec: Spec) -> dict[str, bool]:
    """Write one case, unless it was finished before with an equal spec.

    The JSON file beside the images is written last; it marks the case as finished.

    Args:
        folder: Folder of the case; made if absent.
        spec: What the case is made from; a chest or a scene.

    Returns:
        Part to whether the image shows it: `left_lung` and `right_lung` of a chest, `parts` of a
        scene.
    """
    finished_mark = folder / "phantom.json"
    files = [folder / name for name in file_names(spec).values()]
    recipe = json.dumps({"version": VERSION, **asdict(spec)}, sort_keys=True)
    fingerprint = hashlib.sha256(recipe.encode()).hexdigest()
    if all(file.is_file() for file in files):
        # A damaged mark counts as none: the case is written again.
        with suppress(FileNotFoundError, ValueError):
            mark = json.loads(finished_mark.read_text(encoding="utf-8"))
            if isinstance(mark, dict) and mark.get("hash") == fingerprint:
                return dict(mark["present"])
    folder.mkdir(parents=True, exist_ok=True)
    # Removed before the files change, so that an interrupted case does not look finished.
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
    # `file_names` lists images first, then label maps.
    image_files = files[: len(images)]
    label_files = files[len(images) :]
    for file, (image, grid) in zip(image_files, images, strict=True):
        write_image(file, image, grid)
    # Labels lie on the grid of the first channel.
    _, grid = images[0]
    for file, labels in zip(label_files, label_maps, strict=True):
        write_labels(file, labels, grid)
    contents = {"hash": fingerprint, "present": presence, "spec": asdict(spec)}
    replace_text(finished_mark, json.dumps(contents, indent=1))
    return presence
