"""Weight files: weights and metadata of a stage, read from a checkpoint or a safetensors file, and the included weights.

A checkpoint also holds the state that resuming needs; a safetensors file holds the weights and the
metadata only.
"""

import hashlib
import json
import pickle
import re
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from medseg import __version__
from medseg.errors import UserError, first_line, require
from medseg.io.atomic import replace_bytes
from medseg.io.names import utf8_path
from medseg.io.text import read_text
from medseg.weights.checks import check_plain, check_tensors

LAST = "checkpoints/last.ckpt"
"""Checkpoint inside a run folder."""


def load_checkpoint(
    path: Path, given: str, harmless_types: Sequence[Any] = (), writer: str = "medseg"
) -> dict[str, Any]:
    """Load a checkpoint; tensors stay in the file until they are used.

    The checksums of its parts are compared first: torch does not check them and would load a
    flipped bit as a weight.

    Args:
        path: The file.
        given: Key and value of the user, for messages.
        harmless_types: Types beyond tensors and plain values that it may hold, as
            `torch.serialization.safe_globals` takes them.
        writer: Program that writes such checkpoints, for messages.

    Raises:
        UserError: If it is missing, damaged, or holds more than tensors and plain values.
    """
    _check_is_file(path, given)
    try:
        with zipfile.ZipFile(path) as archive:
            num_bytes = sum(part.file_size for part in archive.infolist())
            if num_bytes > path.stat().st_size:  # torch stores its parts as they are
                raise ValueError(f"{num_bytes} bytes in a file of {path.stat().st_size}")
            damaged = archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError, RuntimeError, ValueError, zlib.error) as error:
        with path.open("rb") as file:
            is_copy = file.read(2) == b"PK"
        if is_copy or writer != "medseg":
            cure = "copy it again"
        else:
            cure = f"give {LAST} of a run, or weights that end in {SUFFIX}"
        raise UserError(f"{given}: not a whole torch checkpoint ({error}); {cure}") from error
    require(
        damaged is None,
        f"{given}: not a whole torch checkpoint (the checksum of its part {damaged!r} is wrong); copy it again",
    )
    try:
        with utf8_path(path) as readable, torch.serialization.safe_globals([*harmless_types]):
            checkpoint = torch.load(readable, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL ([\w.]+)", str(error))
        raise UserError(
            f"{given}: refused, because it holds Python objects{f' ({name[1]})' if name else ''} that could execute arbitrary code "
            f"when loaded; give a checkpoint that {writer} wrote"
        ) from error
    except (
        Exception
    ) as error:  # torch's reader raises any exception on a zip file of another program
        raise UserError(
            f"{given}: not a whole torch checkpoint ({first_line(error)}); give one that {writer} wrote"
        ) from error
    kind = type(checkpoint).__name__
    require(
        isinstance(checkpoint, dict),
        f"{given}: not a checkpoint of {writer}, but a {kind}; give one that {writer} wrote",
    )
    return dict(checkpoint)


# Raised when the metadata of a checkpoint change their meaning.
METADATA_FORMAT = 1
# How the network of a stage treats regions, in metadata written by versions that had a choice: the
# modes that are left.
REGION_MODES = (None, "whole", "mirrored")
# Stages that see the whole scan; older metadata call both `coarse`.
WHOLE_STAGES = ("coarse", "single")
STAGES = (*WHOLE_STAGES, "fine")
# Spacing of a stage that does not resample; a missing value must not mean it.
NATIVE = "native"
SUFFIX = ".safetensors"
PREFIX = "network."
SHIPPED = Path(__file__).parent
CHECKSUMS = "SHA256SUMS"
# Measured with the included lung weights, see docs/prediction_memory.md.
TILE_CHANGES = (
    "with the included lung weights, tiles of 96×96×96 agreed with whole crops to a Dice of 0.96 to "
    "0.99, tiles of 64×64×64 to one of 0.76 to 0.93"
)


def shipped_weights(task: str, stage: str) -> Path:
    """Find the included weights and check that they are complete.

    Args:
        task: Name of the task, e.g. `lungs`.
        stage: `coarse` or `fine`.

    Raises:
        UserError: If medseg includes none for the task, or the file is missing or damaged.
    """
    path = SHIPPED / f"{task}_{stage}{SUFFIX}"
    sums = read_checksums(SHIPPED / CHECKSUMS)
    require(
        path.name in sums,
        f"medseg includes no weights for the task {task}; give {stage}=<checkpoint>",
    )
    is_whole = path.is_file() and checksum(path) == sums[path.name]
    require(
        is_whole,
        f"{path}: missing or damaged (its checksum is not that of {CHECKSUMS}); install medseg again",
    )
    return path


def read_checksums(path: Path) -> dict[str, str]:
    """Read the SHA-256 of files by their names.

    Raises:
        UserError: If it is no file as `sha256sum` writes it.
    """
    checksums: dict[str, str] = {}
    for line in read_text(path).splitlines():
        match = re.fullmatch(r"([0-9a-f]{64})  (\S+)", line)
        if match is None:
            raise UserError(
                f"{path}: expected lines of a SHA-256, two spaces and a file name, got "
                f"{line[:80]!r}; take another copy"
            )
        checksums[match[2]] = match[1]
    return checksums


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_weights(
    path: Path, stage: str | None, key: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read metadata and weights; nothing in the file is executed.

    Args:
        path: Checkpoint of a run, or safetensors file.
        stage: The stage it must be; `coarse` and `single` stand for each other; None = any.
        key: The key that gave the path, for messages.

    Returns:
        The metadata (`medseg.training.assemble.make_metadata`) and the network's weights by name.

    Raises:
        UserError: If the file is missing, damaged, not of medseg, of another stage or of another
            format, or if its weights are not finite numbers.
    """
    given = f"{key}={path}"
    _check_is_file(path, given)
    metadata, weights = (
        _read_safetensors(path, given) if path.suffix == SUFFIX else _read_checkpoint(path, given)
    )
    check_plain(given, metadata)
    is_ours = isinstance(metadata, dict) and "format" in metadata
    require(
        is_ours,
        f"{given}: not a checkpoint of medseg; train one with `python train.py stage={stage or 'coarse'}`",
    )
    require(
        metadata["format"] == METADATA_FORMAT,
        f"{given}: format {metadata['format']}, but medseg {__version__} reads format {METADATA_FORMAT}; use the version that wrote it",
    )
    found = metadata.get("stage") if metadata.get("stage") in STAGES else "unknown"
    wanted = STAGES if stage is None else ("fine",) if stage == "fine" else WHOLE_STAGES
    if found not in wanted:
        raise UserError(
            f"{given}: this is a checkpoint of the {found} stage; a {' or '.join(wanted)} one is needed"
        )
    mode = metadata.get("region_mode")
    if mode not in REGION_MODES:
        raise UserError(
            f"{given}: its network treats regions in the mode {str(mode)[:40]!r}, but medseg {__version__} reads networks that "
            "mirror right regions (mirrored); use the version that wrote it, or train the stage again"
        )
    check_tensors(given, weights, path.stat().st_size)
    return metadata, weights


def trained_cases(path: Path, key: str) -> list[str]:
    """List the names of the cases that a checkpoint of a run has trained on.

    Args:
        path: Checkpoint.
        key: The key that gave the path, for messages.

    Raises:
        UserError: If the file does not say it, as a safetensors file.
    """
    given = f"{key}={path}"
    cases: Any = None
    if path.suffix != SUFFIX:
        cases = load_checkpoint(path, given).get("CasesDataModule")
    if not isinstance(cases, dict):
        raise UserError(
            f"{given}: the file does not say which cases it has trained on; give checkpoints/last.ckpt of its run"
        )
    return [str(name) for name, _ in cases["train"]]


def write_weights(path: Path, metadata: dict[str, Any], weights: dict[str, Tensor]) -> str:
    """Write a safetensors file atomically.

    Args:
        path: Ends in `.safetensors`.
        metadata: Plain values.
        weights: The network's weights by name.

    Returns:
        SHA-256 of the file.
    """
    # Cloned: a safetensors file refuses tensors that share memory, as those of blocks with two
    # names.
    content = save(
        {name: value.contiguous().clone() for name, value in weights.items()},
        {"medseg": json.dumps(metadata, sort_keys=True)},
    )
    replace_bytes(path, content)
    return hashlib.sha256(content).hexdigest()


def _check_is_file(path: Path, given: str) -> None:
    """Refuse a path that is no file; a run folder is answered with its checkpoint."""
    last = path / LAST
    require(
        path.is_file(),
        f"{given}: {f'a folder; give its checkpoint, {last}' if last.is_file() else 'there is no such checkpoint'}",
    )


def _read_safetensors(path: Path, given: str) -> tuple[Any, dict[str, Tensor]]:
    try:
        with utf8_path(path) as readable, safe_open(readable, framework="pt") as file:
            metadata = json.loads((file.metadata() or {}).get("medseg", "null"))
            return metadata, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise UserError(f"{given}: not a whole safetensors file ({first_line(error)})") from error


def _read_checkpoint(path: Path, given: str) -> tuple[Any, dict[str, Tensor]]:
    checkpoint = load_checkpoint(path, given)
    state = checkpoint.get("state_dict")
    if not isinstance(state, dict):
        return None, {}
    weights = {
        name.removeprefix(PREFIX): value
        for name, value in state.items()
        if str(name).startswith(PREFIX)
    }
    with zipfile.ZipFile(path) as archive:
        sizes = {part.file_size for part in archive.infolist()}
    is_whole = all(
        value.untyped_storage().nbytes() in sizes
        for value in weights.values()
        if _is_strided(value)
    )
    # Torch would take the bytes that follow in the file for the end of a short part.
    require(
        is_whole,
        f"{given}: the sizes of its weights do not match the parts of the file; take another copy",
    )
    return checkpoint.get("medseg"), weights


def _is_strided(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested
