"""Weight files: reading and writing the weights and metadata of a stage; the included weights.

A file is either a torch checkpoint of a run, which also holds the state that resuming needs, or a
safetensors file, which holds weights and metadata only.
"""

import hashlib
import json
import pickle
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from medseg import __version__
from medseg.errors import UserError, first_line, is_out_of_memory
from medseg.io.atomic import replace_bytes
from medseg.io.names import utf8_path
from medseg.io.text import read_text
from medseg.weights.checks import check_plain, check_tensors
from medseg.wording import first_few

# To be increased when a key of the metadata changes its meaning.
METADATA_FORMAT = 1
# Accepted values of the key `region_mode`, which only versions in the past wrote into the metadata:
# how the network of a stage treats regions. None: the key is absent, as in new files.
REGION_MODES = (None, "whole", "mirrored")
# Stages that see the whole scan; older metadata call both `coarse`.
WHOLE_STAGES = ("coarse", "single")
STAGES = (*WHOLE_STAGES, "fine")
SUFFIX = ".safetensors"
# Lightning prefixes the name of each weight with the attribute that holds the network.
NETWORK_PREFIX = "network."
# Key of the data module's state in a checkpoint; Lightning uses the name of the class. Its entry
# "train" lists name and content of each case, see `CasesDataModule.state_dict`.
DATA_STATE = "CasesDataModule"
# Model folder with the included weights.
SHIPPED_FOLDER = Path(__file__).parent
# File of a model folder with the SHA-256 of each file of weights.
CHECKSUMS = "SHA256SUMS"
LAST_CHECKPOINT = "checkpoints/last.ckpt"
"""Checkpoint inside a run folder."""


def load_checkpoint(
    path: Path, source: str, harmless_types: Sequence[Any] = (), writer: str = "medseg"
) -> dict[str, Any]:
    """Load a checkpoint; tensors stay in the file until they are used.

    Nothing in the file is executed, and its parts are compared with their checksums first.

    Args:
        path: The file.
        source: Key and value that the user gave, such as `fine=a.ckpt`, for messages.
        harmless_types: Types that the file may hold besides tensors and plain values, in the form
            that `torch.serialization.safe_globals` takes.
        writer: Program that writes such checkpoints, for messages.

    Raises:
        UserError: If the file is missing, damaged, or holds an object of another type.
    """
    _check_is_file(path, source)
    _check_parts(path, source, writer)
    try:
        with utf8_path(path) as readable, torch.serialization.safe_globals([*harmless_types]):
            checkpoint = torch.load(readable, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        # Torch names the class that it refuses in the text of the error only.
        class_name = re.search(r"GLOBAL ([\w.]+)", str(error))
        objects = f"Python objects ({class_name[1]})" if class_name else "Python objects"
        raise UserError(
            f"{source}: refused, because it holds {objects} that could execute arbitrary code "
            f"when loaded; give a checkpoint that {writer} wrote"
        ) from error
    # On a zip file of another program, torch's reader may raise any exception.
    except Exception as error:
        # Full memory says nothing about the file.
        if is_out_of_memory(error):
            raise
        raise UserError(
            f"{source}: not a whole torch checkpoint ({first_line(error)}); give one that "
            f"{writer} wrote"
        ) from error
    if not isinstance(checkpoint, dict):
        kind = type(checkpoint).__name__
        raise UserError(
            f"{source}: not a checkpoint of {writer}, but a {kind}; give one that {writer} wrote"
        )
    return dict(checkpoint)


def _check_parts(path: Path, source: str, writer: str) -> None:
    """Refuse a checkpoint that is no zip file with the parts that torch writes, all undamaged.

    Torch does not compare the checksums of the parts and would load a flipped bit as a weight.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            parts = archive.infolist()
            num_bytes = sum(part.file_size for part in parts)
            # Torch compresses no part; a hostile compressed one may unpack to more than the memory.
            if any(part.compress_type != zipfile.ZIP_STORED for part in parts):
                raise ValueError("it has compressed parts")
            # Parts that overlap in the file would be read several times.
            if num_bytes > path.stat().st_size:
                raise ValueError(f"{num_bytes} bytes in a file of {path.stat().st_size}")
            damaged_part = archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError, RuntimeError, ValueError) as error:
        raise UserError(
            f"{source}: not a whole torch checkpoint ({error}); {_cure(path, writer)}"
        ) from error
    if damaged_part is not None:
        raise UserError(
            f"{source}: not a whole torch checkpoint (the checksum of its part {damaged_part!r} "
            "is wrong); copy it again"
        )


def _cure(path: Path, writer: str) -> str:
    """Write the cure in the message on a file that cannot be opened as a checkpoint."""
    try:
        with path.open("rb") as file:
            # Every zip file begins with these two bytes, also one that was cut short.
            was_zip = file.read(2) == b"PK"
    except OSError:
        return "check its permissions and its disk"
    if was_zip:
        return "copy it again"
    # Checkpoints of another program are found by their names in a folder that the user gave: this
    # is the right file, but damaged.
    if writer != "medseg":
        return "copy it again"
    return f"give {LAST_CHECKPOINT} of a run, or weights that end in {SUFFIX}"


def shipped_weights(task: str, stage: str) -> Path:
    """Find the included weights of a stage and compare their checksum.

    Args:
        task: Name of the task, e.g. `lungs`.
        stage: `coarse` or `fine`.

    Raises:
        UserError: If medseg includes none for the task, or the file is missing or damaged.
    """
    path = SHIPPED_FOLDER / f"{task}_{stage}{SUFFIX}"
    checksums = read_checksums(SHIPPED_FOLDER / CHECKSUMS)
    if path.name not in checksums:
        raise UserError(
            f"medseg includes no weights for the task {task}; give {stage}=<checkpoint>"
        )
    if not path.is_file() or checksum(path) != checksums[path.name]:
        raise UserError(
            f"{path}: missing or damaged (its checksum is not that of {CHECKSUMS}); install "
            "medseg again"
        )
    return path


def read_checksums(path: Path) -> dict[str, str]:
    """Read a file that `sha256sum` wrote.

    Returns:
        File name to SHA-256 in hexadecimal.

    Raises:
        UserError: If a line has another form.
    """
    checksums: dict[str, str] = {}
    for line in read_text(path).splitlines():
        match = re.fullmatch(r"([0-9a-f]{64})  (.+)", line)
        if match is None:
            raise UserError(
                f"{path}: expected lines of a SHA-256, two spaces and a file name, got "
                f"{line[:80]!r}; take another copy"
            )
        sha256, file_name = match.groups()
        checksums[file_name] = sha256
    return checksums


def checksum(path: Path) -> str:
    """Compute the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_weights(
    path: Path, stage: str | None, key: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read metadata and weights; nothing in the file is executed.

    Args:
        path: Checkpoint of a run, or safetensors file.
        stage: The stage that the file must be of; a `single` one may stand for `coarse` and the
            reverse; None = any.
        key: The key that gave the path, for messages.

    Returns:
        The metadata (of `medseg.training.assemble.make_metadata`) and the network's weights by
        name.

    Raises:
        UserError: If the file is missing, damaged, not of medseg, of another stage or of another
            format, or if its weights are not finite numbers.
    """
    source = f"{key}={path}"
    _check_is_file(path, source)
    if path.suffix == SUFFIX:
        metadata, weights = _read_safetensors(path, source)
    else:
        metadata, weights = _read_checkpoint(path, source)
    check_plain(source, metadata)
    if not isinstance(metadata, dict) or "format" not in metadata:
        raise UserError(
            f"{source}: not a checkpoint of medseg; train one with "
            f"`python train.py stage={stage or 'coarse'}`"
        )
    if metadata["format"] != METADATA_FORMAT:
        format_of_file = str(metadata["format"])[:40]
        raise UserError(
            f"{source}: format {format_of_file}, but medseg {__version__} reads format "
            f"{METADATA_FORMAT}; use the version that wrote it"
        )
    _check_stage(metadata, stage, source)
    region_mode = metadata.get("region_mode")
    if region_mode not in REGION_MODES:
        raise UserError(
            f"{source}: its network treats regions in the mode {str(region_mode)[:40]!r}, but "
            f"medseg {__version__} reads networks that mirror right regions (mirrored); use the "
            "version that wrote it, or train the stage again"
        )
    # Last, because it reads all of the file.
    check_tensors(source, weights, path.stat().st_size)
    return metadata, weights


def _check_stage(metadata: dict[str, Any], stage: str | None, source: str) -> None:
    """Refuse a file of another stage than `stage`; None accepts every stage."""
    accepted_stages: tuple[str, ...]
    if stage is None:
        accepted_stages = STAGES
    elif stage == "fine":
        accepted_stages = ("fine",)
    else:
        accepted_stages = WHOLE_STAGES
    stage_of_file = metadata.get("stage")
    # The message below must not print just any value of the file.
    if stage_of_file not in STAGES:
        stage_of_file = "unknown"
    if stage_of_file not in accepted_stages:
        raise UserError(
            f"{source}: this is a checkpoint of the {stage_of_file} stage; a "
            f"{' or '.join(accepted_stages)} one is needed"
        )


def trained_cases(path: Path, key: str) -> list[str]:
    """List the names of the cases that a checkpoint of a run has trained on.

    Args:
        path: Checkpoint.
        key: The key that gave the path, for messages.

    Raises:
        UserError: If the file does not list them; a safetensors file never does.
    """
    source = f"{key}={path}"
    data_state: Any = None
    if path.suffix != SUFFIX:
        data_state = load_checkpoint(path, source).get(DATA_STATE)
    try:
        return [str(name) for name, _ in data_state["train"]]
    # The state is None or has another form.
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise UserError(
            f"{source}: the file does not say which cases it has trained on; give "
            f"{LAST_CHECKPOINT} of its run"
        ) from error


def write_weights(path: Path, metadata: dict[str, Any], weights: dict[str, Tensor]) -> str:
    """Write a safetensors file atomically.

    Args:
        path: Ends in `.safetensors`.
        metadata: Plain values, stored as JSON.
        weights: The network's weights by name.

    Returns:
        SHA-256 of the file, in hexadecimal.
    """
    # `save` takes contiguous tensors only. It refuses tensors that share memory, such as those of a
    # block that has two names.
    tensors = {name: tensor.contiguous().clone() for name, tensor in weights.items()}
    # With sorted keys, equal metadata give equal bytes.
    content = save(tensors, {"medseg": json.dumps(metadata, sort_keys=True)})
    replace_bytes(path, content)
    return hashlib.sha256(content).hexdigest()


def _check_is_file(path: Path, source: str) -> None:
    """Refuse a path that is no file; for a folder, the message names the files to give."""
    if path.is_file():
        return
    checkpoint = path / LAST_CHECKPOINT
    if checkpoint.is_file():
        raise UserError(f"{source}: a folder; give its checkpoint, {checkpoint}")
    if (path / CHECKSUMS).is_file():
        names = sorted(read_checksums(path / CHECKSUMS))
        raise UserError(
            f"{source}: a model folder; give a file in it ({first_few(names)}), or predict with "
            "weights=<folder>"
        )
    if path.is_dir():
        raise UserError(
            f"{source}: a folder without {LAST_CHECKPOINT}; give the checkpoint of a run, or "
            f"weights that end in {SUFFIX}"
        )
    raise UserError(f"{source}: there is no such checkpoint")


def _read_safetensors(path: Path, source: str) -> tuple[Any, dict[str, Tensor]]:
    """Read metadata and weights; the metadata are None in a file of another program."""
    try:
        with utf8_path(path) as readable, safe_open(readable, framework="pt") as file:
            # `file` is no dictionary and cannot be iterated over itself.
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            text = (file.metadata() or {}).get("medseg")
            if text is None:
                return None, weights
            return json.loads(text), weights
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{source}: not a whole safetensors file ({first_line(error)}); copy it again"
        ) from error


def _read_checkpoint(path: Path, source: str) -> tuple[Any, dict[str, Tensor]]:
    """Read metadata and weights; the metadata are None in a checkpoint of another program."""
    checkpoint = load_checkpoint(path, source)
    state = checkpoint.get("state_dict")
    if not isinstance(state, dict):
        return None, {}
    weights: dict[str, Any] = {}
    for name, value in state.items():
        # A checkpoint of another program may have keys that are no text.
        if isinstance(name, str) and name.startswith(NETWORK_PREFIX):
            weights[name.removeprefix(NETWORK_PREFIX)] = value
    _check_part_sizes(path, source, weights)
    return checkpoint.get("medseg"), weights


def _check_part_sizes(path: Path, source: str, weights: dict[str, Any]) -> None:
    """Refuse weights whose part of the checkpoint is too short.

    Torch would fill the end of such a weight with the bytes that follow in the file. Which part
    belongs to which weight is not known here: a weight is refused if no part at all has its size. A
    part that was cut to the size of another is not found.
    """
    with zipfile.ZipFile(path) as archive:
        part_sizes = {part.file_size for part in archive.infolist()}
    for value in weights.values():
        # `check_tensors` later refuses values that are no dense tensors.
        if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_nested:
            continue
        if value.untyped_storage().nbytes() not in part_sizes:
            raise UserError(
                f"{source}: the sizes of its weights do not match the parts of the file; take "
                "another copy"
            )
