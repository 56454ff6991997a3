r"""File names: names that are not UTF-8, and names made of texts of a header.

On Linux a file name is any bytes, such as a Latin-1 name from an old archive. Python keeps each
byte that is not UTF-8 as a lone surrogate, `\udc80` to `\udcff`.
"""

import re
import tempfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

# Error handler of `encode` and `decode` that turns such a surrogate into its byte and back, as
# Python's own file functions do.
RAW_NAMES = "surrogateescape"

# All surrogates, not only those of raw bytes: a name from JSON may hold half of a UTF-16 pair.
# UTF-8 can encode none of them.
_SURROGATE = re.compile("[\ud800-\udfff]")


def is_utf8(name: str) -> bool:
    r"""Whether a file name can be written in UTF-8, so that every library can take it.

    Example:
        >>> is_utf8("Müller"), is_utf8("M\udcfcller")
        (True, False)
    """
    return name.isascii() or _SURROGATE.search(name) is None


def joined_name(texts: Iterable[str]) -> str:
    """Join texts of a header with "_" to the name of a case; empty texts are left out.

    Characters other than letters, digits, "_", ".", "+" and "-" become "_".

    Example:
        >>> joined_name(["P 1/2", "", "20240131"])
        'P_1_2_20240131'
    """
    words = [re.sub(r"[^\w.+-]+", "_", text) for text in texts]
    return "_".join(word for word in words if word)


def free_name(name: str, taken: Collection[str]) -> str:
    """Append `_2`, `_3`, … to a name that is taken.

    Example:
        >>> free_name("study", ["study", "study_2"])
        'study_3'
    """
    free = name
    number = 2
    while free in taken:
        free = f"{name}_{number}"
        number += 1
    return free


@contextmanager
def utf8_path(path: Path) -> Iterator[Path]:
    """Yield a path in UTF-8 to the same file, for libraries in C++ and Rust.

    On a path that is not UTF-8 they fail, or end the process. A file with such a path gets a
    symbolic link in a temporary folder, which is removed after the block: the library must open the
    file within the block, and may keep it open longer.
    """
    if is_utf8(str(path)):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="medseg-") as folder:
        link = Path(folder) / "link"
        if is_utf8(path.name):
            # A link to the folder keeps the file's own name, and reaches the files beside it, such
            # as the voxels of a MetaImage header.
            link.symlink_to(path.parent.absolute())
            yield link / path.name
        else:
            link = link.with_suffix(path.suffix)
            link.symlink_to(path.absolute())
            yield link
