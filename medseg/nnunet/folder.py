"""Model folder of nnU-Net: search for its files, also in the zip of an export, and reading.

A model folder is called `<trainer>__<plans>__<configuration>`, and holds `plans.json`,
`dataset.json` and a folder `fold_<k>` with a checkpoint for each fold.
"""

from __future__ import annotations

import os
import re
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from medseg.errors import UserError
from medseg.io.scratch import scratch_folder
from medseg.io.text import read_json
from medseg.nnunet.plan import USUAL_NAMES, NnunetPlan, PlanError, configurations_of, read_plan

PLANS = "plans.json"
DATASET = "dataset.json"
# Names of a fold's checkpoint, in order of preference.
CHECKPOINTS = ("checkpoint_final.pth", "checkpoint_best.pth")

# Suffixes of files of weights: of medseg, and of nnU-Net.
WEIGHT_SUFFIXES = (".ckpt", ".safetensors", ".pth")
# Folder of a fold; the group is the name of the fold.
FOLD = re.compile(r"fold_(\d+|all)")
# Pickles, which are never opened: the plans of version 1, and the chosen post-processing.
VERSION_1_PLANS = "plans.pkl"
POSTPROCESSING = "postprocessing.pkl"
# Names of the files of a zip file that are unpacked. Of the pickles only the presence is checked.
UNPACKED = (PLANS, DATASET, *CHECKPOINTS, VERSION_1_PLANS, POSTPROCESSING)
# Number of levels below the given folder at which a model folder is found: nnU-Net writes
# `<results>/<data set>/<model folder>`, and its zip files hold `<data set>/<model folder>`.
MAX_DEPTH = 2


@dataclass(frozen=True)
class ModelFolder:
    """Files of one configuration.

    Attributes:
        path: The model folder.
        plan: Plan of its configuration.
        checkpoints: Name of each fold (`0`, …, `all`) to its checkpoint.
        notes: Sentences about the folder that a run reports.
        unpacked: Temporary folder with the files of a zip file, removed when this object is
            deleted; None without a zip file.
    """

    path: Path
    plan: NnunetPlan
    checkpoints: dict[str, Path]
    notes: tuple[str, ...] = ()
    unpacked: object = field(default=None, repr=False)


def open_model_folder(
    path: Path, folds: Sequence[str] | None = None, key: str = "weights"
) -> ModelFolder:
    """Find and read the plan and the checkpoints of a model folder.

    Args:
        path: A model folder, a folder above it, or a zip file of either.
        folds: Names of the folds to use; None = all that have a checkpoint, without `all` if there
            are others.
        key: The key that gave the path, for messages.

    Raises:
        UserError: If something is missing, damaged or not supported, or the path holds several
            models.
    """
    source = f"{key}={path}"
    unpacked = None
    top = path
    if path.is_file():
        # A checkpoint is a zip file too, so the name must tell.
        if path.suffix.lower() in WEIGHT_SUFFIXES:
            raise UserError(
                f"{source}: expected a model folder, got a file of weights; give its folder, or a "
                "file of medseg as coarse=, fine= or single="
            )
        unpacked = _unpack(path, source)
        top = Path(unpacked.name)
    elif not path.is_dir():
        raise UserError(f"{source}: there is no such folder or zip file; check the path")
    folder = _pick_folder(top, path, key)
    plan = _read_plan(folder, source)
    checkpoints = _choose_checkpoints(folder, folds, source)
    return ModelFolder(folder, plan, checkpoints, _notes(folder, checkpoints), unpacked)


def is_model_folder(path: Path) -> bool:
    """Whether a path is a model folder of nnU-Net, or a folder above one."""
    return bool(_folders_with(path, PLANS))


def open_fold(path: Path, key: str) -> ModelFolder:
    """Open a model folder with the checkpoint of one fold, from which a training starts.

    It is the fold that the path names, else the first one.

    Args:
        path: As for `open_model_folder`, or the folder `fold_<k>` in a model folder.
        key: The key that gave the path, for messages.

    Raises:
        UserError: As `open_model_folder`, or if the network is 2D or a second stage.
    """
    match = FOLD.fullmatch(path.name)
    if match and path.is_dir():
        folder = open_model_folder(path.parent, [match[1]], key)
    else:
        folder = open_model_folder(path, None, key)
    plan = folder.plan
    if plan.is_2d or plan.previous_stage is not None:
        raise UserError(
            f"{key}={path}: a network of {plan.configuration} sees slices, or also the labels of "
            "a first stage; give a folder of 3d_fullres or 3d_lowres"
        )
    name, file = next(iter(folder.checkpoints.items()))
    return replace(folder, checkpoints={name: file})


def previous_folder(
    folder: ModelFolder, folds: Sequence[str] | None, given_path: Path
) -> ModelFolder:
    """Open the folder of the first stage of a cascade, which lies beside that of the second.

    Args:
        folder: The second stage.
        folds: As for `open_model_folder`.
        given_path: Folder or zip file that the user gave, for messages.

    Raises:
        UserError: As `open_model_folder`, or if there is no such folder.
    """
    name = folder.plan.previous_stage
    trainer_and_plans = folder.path.name.rpartition("__")[0]
    path = folder.path.with_name(f"{trainer_and_plans}__{name}")
    # The function of `os.path` also returns False for a name that is too long for a folder.
    if not os.path.isdir(path):
        cure = "copy it there"
        # A zip file is unpacked to a temporary folder, where a user can copy nothing.
        if folder.unpacked is not None:
            cure = f"export {name} and {folder.plan.configuration} into one zip file"
        raise UserError(
            f"weights={given_path}: {folder.plan.configuration} goes on from the labels of "
            f"{name}, but {path.name} is not beside it; {cure}"
        )
    # The temporary folder is kept as long as either stage needs it.
    return replace(open_model_folder(path, folds, "weights"), unpacked=folder.unpacked)


def is_start(path: Path) -> bool:
    """Whether a training can start from a path by `open_fold`.

    It can from a model folder, one of its folds, or a zip file, which is judged by its name alone.
    """
    is_fold = FOLD.fullmatch(path.name) is not None and (path.parent / PLANS).is_file()
    is_zip = path.is_file() and path.suffix.lower() == ".zip"
    return is_fold or is_zip or is_model_folder(path)


def _folders_with(top: Path, file: str) -> list[Path]:
    """List the folders that hold a file, from the top down to `MAX_DEPTH` folders below it."""
    folders_with_file: list[Path] = []
    level = [top]
    for _ in range(MAX_DEPTH + 1):
        next_level: list[Path] = []
        for folder in level:
            # In a folder without permission, such as `lost+found`, the functions of `os.path`
            # return False, where those of `Path` raise.
            if os.path.isfile(folder / file):
                folders_with_file.append(folder)
            next_level += filter(os.path.isdir, _children(folder))
        # Sorted, because file systems list folders in any order.
        level = sorted(next_level)
    return folders_with_file


def _children(folder: Path) -> list[Path]:
    """List the files and folders in a folder; none if there is no permission to read it."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _pick_folder(top: Path, path: Path, key: str) -> Path:
    """Choose the only model folder; of several, the only one with a usual name.

    The first stage of a cascade does not count where its second stage lies beside it.

    Args:
        top: Folder to search: `path`, or the temporary folder of a zip file.
        path: Path that the user gave, for messages.
        key: The key that gave it, for messages.

    Raises:
        UserError: If there is none, or several; the message lists them.
    """
    source = f"{key}={path}"
    folders = _folders_with(top, PLANS)
    if not folders:
        if _folders_with(top, VERSION_1_PLANS):
            raise UserError(
                f"{source}: a model of nnU-Net version 1 ({VERSION_1_PLANS}), whose plan is a "
                "pickle that could execute code; train it again with version 2, or predict with "
                "nnU-Net 1"
            )
        raise UserError(
            f"{source}: expected a model folder, but neither the SHA256SUMS of medseg is there, "
            f"nor the {PLANS} of nnU-Net up to {MAX_DEPTH} folders below; "
            "give the folder that holds it"
        )
    usual_folders = [folder for folder in folders if _configuration_of(folder) in USUAL_NAMES]
    # Without a usual name all are candidates: the user may have named the configuration, and
    # `_read_plan` refuses a folder with another reason.
    candidates = _without_first_stages(usual_folders or folders)
    if len(candidates) > 1:
        listed = ", ".join(str(folder.relative_to(top)) for folder in candidates[:8])
        cure = f"give one, such as {key}={path / candidates[0].relative_to(top)}"
        if path.is_file():
            cure = "unpack it, and give one of them as a folder"
        raise UserError(f"{source}: holds several models ({listed}); {cure}")
    return candidates[0]


def _without_first_stages(folders: Sequence[Path]) -> list[Path]:
    """Leave out the first stage of a cascade where its second stage lies beside it."""
    remaining = []
    for folder in folders:
        # The name stays the same if the folder is no first stage.
        second_name = folder.name.replace("__3d_lowres", "__3d_cascade_fullres")
        is_first_stage = second_name != folder.name
        if is_first_stage and folder.with_name(second_name) in folders:
            continue
        remaining.append(folder)
    return remaining


def _configuration_of(folder: Path) -> str:
    """Read the name of a configuration from that of its folder."""
    return folder.name.rsplit("__", 1)[-1]


def _read_plan(folder: Path, source: str) -> NnunetPlan:
    """Read the plan of the configuration that a folder is named after.

    Raises:
        UserError: If it is damaged or not supported, or the folder is not named after one.
    """
    if not (folder / DATASET).is_file():
        raise UserError(f"{source}: {DATASET} is missing in {folder.name}; copy the folder again")
    plans = read_json(folder / PLANS)
    dataset = read_json(folder / DATASET)
    try:
        name = _configuration_of(folder)
        configurations = configurations_of(plans)
        usual_names = [listed for listed in configurations if listed in USUAL_NAMES]
        # A renamed folder does not name its configuration. If the plans have only one with a usual
        # name, it must be that.
        is_renamed = "__" not in folder.name
        if is_renamed and len(usual_names) == 1:
            name = usual_names[0]
        elif is_renamed and usual_names and name not in configurations:
            raise UserError(
                f"{source}: the name of the folder {folder.name} does not say which configuration "
                f"it holds; rename it to <trainer>__<plans>__ and one of {', '.join(usual_names)}"
            )
        return read_plan(plans, dataset, name)
    except PlanError as error:
        raise UserError(f"{source}: {error.sentence}") from error


def _notes(folder: Path, checkpoints: dict[str, Path]) -> tuple[str, ...]:
    """Report which files of a folder are not used, and which are used in place of missing ones."""
    notes: list[str] = []
    # nnU-Net writes this file to the subfolder `crossval_results_folds_…`.
    if _folders_with(folder, POSTPROCESSING):
        notes.append(
            f"{POSTPROCESSING} beside the weights was not opened, because a pickle can execute "
            "code; the labels are those before it"
        )
    final, best = CHECKPOINTS
    folds_with_best = [name for name, file in checkpoints.items() if file.name == best]
    if folds_with_best:
        notes.append(f"fold {', '.join(folds_with_best)}: {best}, since {final} is missing")
    return tuple(notes)


def _choose_checkpoints(folder: Path, folds: Sequence[str] | None, source: str) -> dict[str, Path]:
    """Choose the checkpoints of the folds that were asked for, or of all folds.

    Args:
        folder: The model folder.
        folds: See `open_model_folder`.
        source: Key and value of the user, for messages.

    Returns:
        Name of each fold to its checkpoint.

    Raises:
        UserError: If a fold that was asked for has no checkpoint, or no fold has one.
    """
    present = _find_checkpoints(folder)
    if folds is None:
        if not present:
            raise UserError(
                f"{source}: expected {CHECKPOINTS[0]} in fold_0, fold_1, … of {folder.name}, but "
                "no fold has one; copy the folder again"
            )
        # As in nnU-Net, the network of all data is not averaged with those of the folds.
        if len(present) > 1:
            present.pop("all", None)
        return present
    for name in folds:
        if name not in present:
            listed = ", ".join(present) or "none"
            raise UserError(
                f"folds={','.join(folds)}: fold {name} of {source} has no {CHECKPOINTS[0]}; the "
                f"folds with a checkpoint are {listed}"
            )
    return {name: present[name] for name in folds}


def _find_checkpoints(folder: Path) -> dict[str, Path]:
    """Map the name of each fold that has a checkpoint to the file."""
    checkpoints: dict[str, Path] = {}
    for child in sorted(_children(folder), key=_fold_order):
        match = FOLD.fullmatch(child.name)
        if match is None:
            continue
        files = [child / name for name in CHECKPOINTS if (child / name).is_file()]
        if files:
            checkpoints[match[1]] = files[0]
    return checkpoints


def _fold_order(child: Path) -> tuple[int, str]:
    """Sort key of folds: by their number, and `fold_all` after all numbers."""
    number = child.name.removeprefix("fold_")
    if number.isdecimal():
        return int(number), child.name
    return 10**6, child.name


def _unpack(path: Path, source: str) -> tempfile.TemporaryDirectory[str]:
    """Unpack the files `UNPACKED` of a zip file into a temporary folder.

    Unpacking compares each file with its checksum in the zip file.

    Args:
        path: The zip file.
        source: Key and value of the user, for messages.

    Returns:
        The temporary folder, which is removed with this object.

    Raises:
        UserError: If the file cannot be read, is not a whole zip file, or holds a name that leads
            out of the folder.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise UserError(
            f"{source}: cannot be read ({error.strerror or error}); check its permissions"
        ) from error
    folder = tempfile.TemporaryDirectory(prefix="medseg_nnunet_", dir=scratch_folder())
    try:
        with file, zipfile.ZipFile(file) as archive:
            for member in archive.infolist():
                # The names in a zip file have forward slashes on every system.
                member_path = PurePosixPath(member.filename)
                if member_path.name not in UNPACKED:
                    continue
                if member_path.is_absolute() or ".." in member_path.parts:
                    raise UserError(
                        f"{source}: its part {member.filename[:100]!r} leads out of the zip file; "
                        "take another copy"
                    )
                archive.extract(member, folder.name)
    # RuntimeError: an encrypted file; NotImplementedError: an unknown compression.
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError) as error:
        raise UserError(
            f"{source}: expected the zip file of nnU-Net's export, but it is not a whole one "
            f"({error}); copy it again"
        ) from error
    except OSError as error:
        raise UserError(
            f"{source}: cannot be unpacked to {scratch_folder()} ({error.strerror or error}); free "
            "some room, or set TMPDIR to a folder on a larger disk"
        ) from error
    return folder
