"""Memory limit of a prediction, divided between the networks and the arrays of a scan.

The limit is `inference.max_ram_gib`. It, or the memory of the machine, also decides whether
OpenVINO may be chosen.
"""

import math
from typing import NamedTuple

from medseg.errors import UserError
from medseg.memory.profile import memory_limit_bytes, resident_bytes

# Libraries that load with the first scan, and kernels that are compiled for it; measured.
LIBRARIES_BYTES = 60 * 2**20
# Slabs that are resampled, and components of a label, at most.
SLABS_BYTES = 240 * 2**20
OVERHEAD_BYTES = LIBRARIES_BYTES + SLABS_BYTES
# Smallest rest for networks and arrays.
LEAST_BYTES = 80 * 2**20
NETWORK_SHARE = 0.6
# Arrays of a scan at a time: the scan, its labels, crops and probabilities.
NUM_ARRAYS = 8


class MemoryShares(NamedTuple):
    """What a prediction may hold.

    Attributes:
        network_gib: Memory of a network pass.
        array_bytes: Size above which an array is a temporary file.
    """

    network_gib: float = math.inf
    array_bytes: float = math.inf


def share_memory(max_ram_gib: float | None, backend_bytes: int = 0) -> MemoryShares:
    """Divide the memory that the process does not hold yet, once its weights are loaded.

    Args:
        max_ram_gib: Memory of the whole process; None = no bound.
        backend_bytes: What the backends of the networks take later, see
            `TrainedStage.backend_bytes`.

    Raises:
        UserError: If the process already holds too much.
    """
    if max_ram_gib is None:
        return MemoryShares()
    fixed = resident_bytes() + OVERHEAD_BYTES + backend_bytes
    rest = max_ram_gib * 2**30 - fixed
    if rest < LEAST_BYTES:
        # Rounded up to a twentieth.
        least_gib = math.ceil((fixed + LEAST_BYTES) / 2**30 * 20) / 20
        raise UserError(
            f"inference.max_ram_gib={max_ram_gib:g}: expected at least {least_gib:g}, because "
            f"libraries, weights and work on slabs take {fixed / 2**30:.2f} GiB; raise it to that"
        )
    return MemoryShares(NETWORK_SHARE * rest / 2**30, (1 - NETWORK_SHARE) * rest / NUM_ARRAYS)


def backend_room_bytes(max_ram_gib: float | None, budget_gib: float) -> float:
    """Measure what is left for another backend beside a pass that takes all of its budget.

    Torch takes less: it runs in slabs where a pass does not fit, and has no libraries of its own to
    load.

    Args:
        max_ram_gib: Memory of the whole process; None = that of the machine.
        budget_gib: `inference.budget_gib`, the memory of a network pass.
    """
    limit_bytes = memory_limit_bytes() if max_ram_gib is None else max_ram_gib * 2**30
    return limit_bytes - resident_bytes() - OVERHEAD_BYTES - budget_gib * 2**30
