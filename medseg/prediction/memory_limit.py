"""Memory limit of a prediction, divided between the networks and the arrays of a scan.

The limit is `inference.max_ram_gib`. This limit, or without it the memory of the machine, also
decides whether OpenVINO may be chosen.
"""

import math
from typing import NamedTuple

from medseg.errors import UserError
from medseg.memory.profile import memory_limit_bytes, resident_bytes

# Memory of libraries that load with the first scan, and of kernels that are compiled for it;
# measured. A forecast counts less, see `medseg.prediction.forecast.FIRST_SCAN_BYTES`.
LIBRARIES_BYTES = 60 * 2**20
# Largest memory of the slabs that are resampled and of the components of a label.
SLABS_BYTES = 240 * 2**20
# Memory that a prediction takes after its weights are loaded, beside networks and arrays.
OVERHEAD_BYTES = LIBRARIES_BYTES + SLABS_BYTES
# Smallest memory for networks and arrays with which a prediction starts.
LEAST_BYTES = 80 * 2**20
# Share of the memory for networks and arrays that the networks get; the arrays get the rest.
NETWORK_SHARE = 0.6
# Number of arrays of a scan that exist at a time: the scan, its labels, crops and probabilities.
NUM_ARRAYS = 8


class MemoryShares(NamedTuple):
    """Memory that the parts of a prediction may hold.

    Attributes:
        network_gib: Memory of a network pass.
        array_bytes: Size of an array of a scan; a larger one is a temporary file.
    """

    network_gib: float = math.inf
    array_bytes: float = math.inf


def share_memory(max_ram_gib: float | None, backend_bytes: int = 0) -> MemoryShares:
    """Divide the memory that the process does not hold yet, once its weights are loaded.

    Args:
        max_ram_gib: Memory of the whole process; None = no bound.
        backend_bytes: Memory that the backends take with the first pass, see
            `TrainedStage.backend_bytes`.

    Returns:
        The shares; infinite without a bound.

    Raises:
        UserError: If the process already holds too much.
    """
    if max_ram_gib is None:
        return MemoryShares()
    fixed_bytes = resident_bytes() + OVERHEAD_BYTES + backend_bytes
    free_bytes = max_ram_gib * 2**30 - fixed_bytes
    if free_bytes < LEAST_BYTES:
        # Rounded up to a twentieth of a GiB, so that the number is enough.
        least_gib = math.ceil((fixed_bytes + LEAST_BYTES) / 2**30 * 20) / 20
        raise UserError(
            f"inference.max_ram_gib={max_ram_gib:g}: expected at least {least_gib:g}, because "
            f"libraries, weights and work on slabs take {fixed_bytes / 2**30:.2f} GiB; raise it to "
            "that"
        )
    network_gib = NETWORK_SHARE * free_bytes / 2**30
    array_bytes = (1 - NETWORK_SHARE) * free_bytes / NUM_ARRAYS
    return MemoryShares(network_gib, array_bytes)


def backend_room_bytes(max_ram_gib: float | None, budget_gib: float) -> float:
    """Compute the memory that is left for OpenVINO beside a pass that takes all of its budget.

    Torch needs no such room: its libraries are loaded already, and a pass that does not fit runs in
    slabs.

    Args:
        max_ram_gib: Memory of the whole process; None = that of the machine.
        budget_gib: `inference.budget_gib`, the memory of a network pass.

    Returns:
        Bytes; negative if there is no room.
    """
    limit_bytes = memory_limit_bytes() if max_ram_gib is None else max_ram_gib * 2**30
    return limit_bytes - resident_bytes() - OVERHEAD_BYTES - budget_gib * 2**30
