"""Torch checkpoints, read as inert data after a check that the file is complete."""

from __future__ import annotations

import pickle
import re
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch

from medseg.errors import UserError, first_line, require


def load_checkpoint(path: Path, given: str) -> dict[str, Any]:
    """Load a checkpoint; tensors stay in the file until they are used.

    The checksums of its parts are compared first: torch does not check them and would load a flipped bit as a weight.

    Args:
        path: The file.
        given: Key and value of the user, for messages.

    Raises:
        UserError: If it is missing, damaged, or holds more than tensors and plain values.
    """
    require(path.is_file(), f"{given}: there is no such checkpoint")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError, RuntimeError, ValueError, zlib.error) as error:
        raise UserError(f"{given}: not a whole torch checkpoint ({error}); copy it again") from error
    require(
        damaged is None, f"{given}: not a whole torch checkpoint (the checksum of its part {damaged!r} is wrong); copy it again"
    )
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL ([\w.]+)", str(error))
        raise UserError(
            f"{given}: refused, since beside weights and plain values it holds objects{f' ({name[1]})' if name else ''}, which could "
            "run anything when they are loaded; ask for a checkpoint that medseg wrote"
        ) from error
    except Exception as error:  # torch's reader raises any exception on a zip file of another program
        raise UserError(f"{given}: not a whole torch checkpoint ({first_line(error)}); give one that medseg wrote") from error
    kind = type(checkpoint).__name__
    require(isinstance(checkpoint, dict), f"{given}: not a checkpoint of medseg, but a {kind}; give one that medseg wrote")
    return dict(checkpoint)
