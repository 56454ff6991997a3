"""Read a torch checkpoint as data: whole, and without anything that could run."""

from __future__ import annotations

import pickle
import re
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch

from medseg.errors import UserError


def load_checkpoint(path: Path, given: str) -> dict[str, Any]:
    """Load a checkpoint; tensors stay in the file until they are used.

    The checksums of its parts are compared first: torch does not, and would take a flipped bit for a weight.

    Args:
        path: The file.
        given: What the user gave, for messages.

    Raises:
        UserError: If it is missing, damaged, or holds more than tensors and plain values.
    """
    if not path.is_file():
        raise UserError(f"{given}: there is no such checkpoint")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError, RuntimeError, ValueError, zlib.error) as error:
        raise UserError(f"{given}: not a whole torch checkpoint ({error}); copy it again") from error
    if damaged is not None:
        raise UserError(f"{given}: not a whole torch checkpoint (the checksum of its part {damaged!r} is wrong); copy it again")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL ([\w.]+)", str(error))
        raise UserError(
            f"{given}: refused, since beside weights and plain values it holds objects{f' ({name[1]})' if name else ''}, which could "
            "run anything when they are loaded; ask for a checkpoint that medseg wrote"
        ) from error
    except Exception as error:  # a zip file of another program: whatever torch's reader makes of it
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise UserError(f"{given}: not a whole torch checkpoint ({reason}); give one that medseg wrote") from error
    if not isinstance(checkpoint, dict):
        raise UserError(f"{given}: not a checkpoint of medseg, but a {type(checkpoint).__name__}; give one that medseg wrote")
    return checkpoint
