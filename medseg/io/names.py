r"""File names that are not UTF-8, such as Latin-1 names of an old archive.

Python keeps each of their bytes as a lone surrogate.
"""

import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

# Error handler that turns such a surrogate into its byte and back. Python's own file functions do
# the same.
RAW_NAMES = "surrogateescape"

# A byte as `RAW_NAMES` keeps it, or half of a UTF-16 pair: neither can be encoded.
_SURROGATE = re.compile("[\ud800-\udfff]")


def is_utf8(name: str) -> bool:
    r"""Whether a file name is UTF-8, so that every library can take it.

    Example:
        >>> is_utf8("Müller"), is_utf8("M\udcfcller")
        (True, False)
    """
    return name.isascii() or _SURROGATE.search(name) is None


def joined_name(texts: Iterable[str]) -> str:
    """Join texts of a header to the name of a case; other signs than `.+-` become "_".

    Example:
        >>> joined_name(["P 1/2", "", "20240131"])
        'P_1_2_20240131'
    """
    words = (re.sub(r"[^\w.+-]+", "_", text) for text in texts)
    return "_".join(filter(None, words))


@contextmanager
def utf8_path(path: Path) -> Iterator[Path]:
    """Yield a path to the same file for libraries in C++ and Rust.

    They fail on a name that is not UTF-8, or end the process. Such a file is reached through a
    temporary folder, by a link to its own folder, or to itself if its name is not UTF-8 either. The
    path is good for opening the file, which may stay open longer.
    """
    if is_utf8(str(path)):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="medseg-") as folder:
        link = Path(folder) / "link"
        if is_utf8(path.name):
            link.symlink_to(path.parent.absolute())
            yield link / path.name
        else:
            link = link.with_suffix(path.suffix)
            link.symlink_to(path.absolute())
            yield link
