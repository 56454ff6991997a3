"""The one way to write a file: it is the old one or the whole new one, never a part."""

from __future__ import annotations

import os
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from medseg.errors import UserError

PART_NAME = ".medseg-{}.part"
STALE_AFTER_S = 3600.0
"""A file that is being written grows; one that has not for so long belongs to a process that was killed."""


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Write to a temporary name in the same folder and rename at the end; missing folders are made.

    After an error, an interrupt or a full disk the old file is as it was and no temporary one remains. A link stays
    a link: what it points to is replaced.

    Raises:
        UserError: If the file cannot be written.
    """
    target = Path(os.path.realpath(path))
    # A name of our own, short: the case's name may be as long as a name can be.
    part = target.parent / PART_NAME.format(uuid.uuid4().hex)
    try:
        if target.exists() and not target.is_file():
            raise UserError(f"{path}: cannot be written, since it is a folder or a device; choose another name.")
        target.parent.mkdir(parents=True, exist_ok=True)
        with part.open("xb") as file:
            yield file
            # Without it a power cut may leave the new name with empty pages in place of the old file.
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
    except OSError as error:
        raise _not_written(path, error) from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, whole or not at all.

    Raises:
        UserError: If the file cannot be written.
    """
    with replacing(path) as file:
        file.write(text.encode())


def check_writable(folder: Path) -> None:
    """Make a folder, and a file in it for a moment, so that nobody computes for nothing; what killed processes left there is removed.

    Raises:
        UserError: If that fails.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _not_written(folder, error) from error
    for part in folder.glob(PART_NAME.format("*")):
        with suppress(OSError):  # gone already, or another user's
            if part.stat().st_mtime < time.time() - STALE_AFTER_S:
                part.unlink()


def _not_written(path: Path, error: OSError) -> UserError:
    is_below_file = isinstance(error, (FileExistsError, NotADirectoryError))
    reason = "a part of its path is a file" if is_below_file else error.strerror or error
    return UserError(f"{path}: cannot be written ({reason}); check the folder, its permissions and its space.")
