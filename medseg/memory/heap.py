"""Heap of the C library: large blocks are mapped one by one and in huge pages.

So freed tensors leave no holes in memory. Choice of 2026-11-23. By itself glibc, once it has freed
a mapped block of at most 32 MiB, serves all smaller blocks from its heap. Tensors of other sizes
then leave holes there, which stay resident: a step of a network took up to twice the memory of its
tensors. Mapped blocks go back to the system when they are freed, but the kernel must clear each of
their pages anew, which huge pages make cheaper. Measured with six networks in seven settings on one
thread: 1 to 52 % less resident memory (that of the libraries is not counted), and from 17 % less to
5 % more processor time of a step. Three of these networks at another time on the same machine:
20 to 33 % less memory, 0 to 23 % more time. Since version 6.13 Linux aligns a block to huge pages
only if its size is a multiple of a huge page. Other blocks have some 500 small pages at their ends,
whose page faults are expensive in a virtual machine. Not chosen: mapping without huge pages (40 to
60 % slower), a model of glibc's heap in `plan` (the memory would only be predicted, not saved),
another allocator (must be preloaded by the user).

Blocks of 2 to 4 MiB. Choice of 2026-11-27. Torch aligns the tensors for which it asks for huge
pages, those of 2 MiB and more, to a page. For such a block glibc takes a page more from its heap
and frees the rest, which it does not always merge again (its bug 30723, mended after version 2.38):
a freed block is then too small for the next one of the same size. A network whose tensors have 3.9
MiB took 1,810 MiB after six steps, and 875 MiB with mapped blocks, for 16 % more processor time.
Where such tensors are few, mapping them saves 1 to 5 % of the memory and costs up to 35 % more
processor time. So the network of a training decides, see `medseg.training.mapped_blocks`. Not
chosen: returning free memory after each step (1,178 MiB), tensors that are not aligned (1,034 MiB,
and huge pages only by glibc's tunables, for which the process must start anew).
"""

import ctypes
import os
import platform
from contextlib import suppress
from pathlib import Path

USUALLY_MAPPED_BYTES = 4 * 2**20  # blocks of this size and more are mapped
ALIGNED_BYTES = 2 * 2**20  # torch aligns blocks of this size and more
KEPT_BYTES = 64 * 2**20  # free memory at the end of the heap that stays for reuse
# Environment variables of glibc, and the numbers of the same parameters for mallopt(3):
# M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of malloc.h.
MAP_FROM = "MALLOC_MMAP_THRESHOLD_"
KEEP = "MALLOC_TRIM_THRESHOLD_"
PARAMETERS = {MAP_FROM: -3, KEEP: -1}
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def map_large_blocks() -> None:
    """Map large blocks of memory of this process and of those that it starts.

    Must come before torch makes a tensor. Does nothing where the C library is not glibc, the kernel
    gives no huge pages, or the user has set glibc's variables.
    """
    is_glibc = platform.libc_ver()[0] == "glibc"
    # If the user or the parent process has set the variables, glibc has read them already.
    is_set = any(name in os.environ for name in (*PARAMETERS, "GLIBC_TUNABLES"))
    if is_set or not is_glibc or not _has_huge_pages():
        return
    _set(MAP_FROM, USUALLY_MAPPED_BYTES)
    _set(KEEP, KEPT_BYTES)
    # Torch asks for huge pages for tensors of `ALIGNED_BYTES` and more.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def maps_large_blocks() -> bool:
    """Whether `map_large_blocks` has taken effect in this process or in the one that started it."""
    # The variable is inherited. Any other value was set by the user.
    own_values = (str(ALIGNED_BYTES), str(USUALLY_MAPPED_BYTES))
    return os.environ.get(MAP_FROM) in own_values


def map_blocks_from(num_bytes: int) -> None:
    """Map blocks of this size and more, where `map_large_blocks` has taken effect."""
    if maps_large_blocks():
        _set(MAP_FROM, num_bytes)


def min_mapped_bytes() -> int:
    """Size from which on blocks are mapped; the usual one if `map_large_blocks` had no effect."""
    if not maps_large_blocks():
        return USUALLY_MAPPED_BYTES
    return int(os.environ[MAP_FROM])


def _set(variable: str, size: int) -> None:
    """Set a parameter of glibc's heap, in bytes, for this process and for those that it starts."""
    # `CDLL(None)` gives the libraries that are loaded already, the C library among them.
    ctypes.CDLL(None).mallopt(PARAMETERS[variable], size)
    os.environ[variable] = str(size)  # glibc reads it when a process begins


class _HeapInfo(ctypes.Structure):
    """Result of glibc's `mallinfo2`, with its fields in its order; see mallinfo(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


def heap_used_bytes() -> int:
    """Bytes that this process has taken from the C library and not freed; 0 where it is unknown."""
    try:
        query = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):  # another C library, or glibc before 2.33
        return 0
    query.restype = _HeapInfo
    info = query()
    bytes_in_heap, mapped_bytes = info.uordblks, info.hblkhd
    return int(bytes_in_heap + mapped_bytes)


def _has_huge_pages() -> bool:
    with suppress(OSError):
        return "[never]" not in HUGE_PAGES.read_text(encoding="ascii")
    return False
