"""Zip archives, in which image portals and PACS export studies."""

import calendar
import itertools
import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from medseg.errors import UserError
from medseg.io.scratch import scratch_folder

# Bit of a member's flags: the member needs a password (PKWARE's APPNOTE, 4.4.4).
ENCRYPTED = 0x1


def is_archive(path: Path) -> bool:
    """Whether a path is a zip archive by its name; `unpacked` checks the content."""
    return path.suffix.lower() == ".zip" and path.is_file()


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """Unpack a zip archive into a temporary folder of the same name, removed after the block.

    Archives within the archive stay packed. A member whose name leads out of the folder (`../a`) is
    put inside the folder. Of members with one name, the second is called `2_<name>` and so on.

    Raises:
        UserError: If the archive cannot be read, needs a password, or does not fit on the disk.
    """
    with tempfile.TemporaryDirectory(prefix="medseg-", dir=scratch_folder()) as scratch:
        folder = Path(scratch) / path.stem
        folder.mkdir()
        try:
            _unpack(path, folder)
        except NotImplementedError as error:
            # Windows packs large files by Deflate64, which Python lacks.
            raise UserError(
                f"{path}: the zip archive cannot be read ({error}); "
                "unpack it with another program, and give the folder."
            ) from error
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise UserError(
                f"{path}: the zip archive cannot be read ({error}); export or copy it again."
            ) from error
        except OSError as error:
            reason = error.strerror or error
            if error.filename == str(path):
                raise UserError(
                    f"{path}: the zip archive cannot be read ({reason}); "
                    "check the path and its permissions."
                ) from error
            raise UserError(
                f"{path}: the zip archive cannot be unpacked into {scratch_folder()} ({reason}); "
                "set TMPDIR to a folder on another disk."
            ) from error
        yield folder


def _unpack(path: Path, folder: Path) -> None:
    """Unpack the files of an archive into a folder, with their times.

    Raises:
        UserError: If the archive needs a password, or does not fit on the disk.
    """
    with zipfile.ZipFile(path) as archive:
        members = [member for member in archive.infolist() if not member.is_dir()]
        if any(member.flag_bits & ENCRYPTED for member in members):
            raise UserError(
                f"{path}: the zip archive needs a password; unpack it, and give the folder."
            )
        num_bytes = sum(member.file_size for member in members)
        free_bytes = shutil.disk_usage(folder).free
        if num_bytes > free_bytes:
            raise UserError(
                f"{path}: its files take {num_bytes / 2**30:.1f} GiB, but {scratch_folder()} has "
                f"{free_bytes / 2**30:.1f} GiB free; set TMPDIR to a folder on a larger disk."
            )
        # Members are extracted into a folder of their own first: `extract` would overwrite a file
        # of the same name, and some programs pack the files of several series under one name.
        incoming = folder.with_name(f"{folder.name}.part")
        for member in members:
            extracted = Path(archive.extract(member, incoming))
            file = _free_path(folder / extracted.relative_to(incoming))
            file.parent.mkdir(parents=True, exist_ok=True)
            extracted.rename(file)
            # `extract` sets the present time, but the time of the member decides whether an earlier
            # result is up to date. Some members have no valid time (ValueError). The time has no
            # zone and counts as UTC. Three zeros fill up the tuple: `timegm` does not use them.
            with suppress(ValueError):
                time_s = calendar.timegm((*member.date_time, 0, 0, 0))
                os.utime(file, (time_s, time_s))


def _free_path(path: Path) -> Path:
    """Choose a path that no file has: the path itself, else one with `2_`, `3_`, … in its name."""
    free = path
    for number in itertools.count(2):
        if not free.exists():
            break
        free = path.with_name(f"{number}_{path.name}")
    return free
