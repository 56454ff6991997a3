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
from medseg.workers import Worker, WorkerDiedError

VERSION = 3
"""Format of the data set; raise it when equal specs give other voxels, so that finished cases are made again."""

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
        scene: Labels and channels of scenes of organs; its seed, number and detail are ignored.
            None makes chests.

    Returns:
        Path of `table.csv`.

    Raises:
        ValueError: If the splits do not add up.
        UserError: If a process ends before its phantom is finished.
    """
    if splits is not None and sum(splits.values()) != num_cases:
        raise ValueError(f"splits {dict(splits)} must add up to num_cases={num_cases}")
    sides = (
        [name for name, count in splits.items() for _ in range(count)]
        if splits
        else [""] * num_cases
    )
    specs: list[Spec] = [
        replace(scene, seed=seed, index=index, detail=detail)
        if scene
        else draw_spec(seed, index, detail)
        for index in range(num_cases)
    ]
    folders = [folder / f"phantom_{spec.index:03d}" for spec in specs]
    rows: list[dict[str, str]] = []
    with ExitStack() as stack:
        written: Iterable[dict[str, bool]] = map(write_case, folders, specs)
        if num_workers > 1:
            idle = SimpleQueue[Worker]()
            for _ in range(num_workers):
                idle.put(stack.enter_context(Worker()))
            threads = ThreadPoolExecutor(num_workers)
            # Left before the workers: a thread that waits for one would wait for ever.
            stack.callback(threads.shutdown, cancel_futures=True)
            written = threads.map(partial(_call_idle, idle), folders, specs)
        for case, spec, side, present in zip(folders, specs, sides, written, strict=True):
            files = {column: f"{case.name}/{file}" for column, file in file_names(spec).items()}
            view = {"view": spec.view} if isinstance(spec, PhantomSpec) else {}
            trust = {
                f"trust_{region}": "reference" if is_there else "absent"
                for region, is_there in present.items()
            }
            rows.append(
                {"case": case.name, **files, "patient": case.name, "split": side, **view, **trust}
            )
            if progress is not None:
                progress(len(rows), num_cases, case.name)
    write_csv(folder / "table.csv", rows)
    return folder / "table.csv"


def _call_idle(idle: SimpleQueue[Worker], folder: Path, spec: Spec) -> dict[str, bool]:
    """Write one case in a worker that has nothing to do; there is a worker for each thread."""
    worker = idle.get()
    try:
        return worker.call(write_case, folder, spec)
    except WorkerDiedError as error:
        cure = "free some memory and start" if error.is_killed else "start"
        raise UserError(
            f"{folder}: the phantom could not be made: {error}; {cure} the command again, which keeps the phantoms "
            "that are finished."
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
    note, files = folder / "phantom.json", [folder / name for name in file_names(spec).values()]
    fingerprint = hashlib.sha256(
        json.dumps({"version": VERSION, **asdict(spec)}, sort_keys=True).encode()
    ).hexdigest()
    if all(file.is_file() for file in files):
        with suppress(FileNotFoundError, json.JSONDecodeError):
            known = json.loads(note.read_text(encoding="utf-8"))
            if known.get("hash") == fingerprint:
                return dict(known["present"])
    folder.mkdir(parents=True, exist_ok=True)
    note.unlink(missing_ok=True)
    present: dict[str, bool] = {}
    if isinstance(spec, PhantomSpec):
        phantom = make_phantom(spec)
        images, maps = [(phantom.image_hu, phantom.grid)], [phantom.labels, phantom.organs]
        present = {
            f"{name}_lung": bool(np.any(phantom.labels == value))
            for name, value in (("left", 1), ("right", 2))
        }
    else:
        images, labels = make_scene(spec)
        maps, present = [labels], dict.fromkeys(spec.parts, True)
    for file, (image, grid) in zip(files, images, strict=False):
        write_image(file, image, grid)
    for file, labels in zip(files[len(images) :], maps, strict=True):
        write_labels(file, labels, images[0][1], None)
    replace_text(
        note, json.dumps({"hash": fingerprint, "present": present, "spec": asdict(spec)}, indent=1)
    )
    return present
