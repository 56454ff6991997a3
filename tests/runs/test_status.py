"""What ends a run becomes a status, an exit code and one sentence."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import NoReturn

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from medseg.errors import NotFiniteError, UserError
from medseg.runs.status import Status, end_of, exit_code_of, explains, num_oom_kills, status_of
from medseg.training.preemption import Preempted


def raised(action: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        action()
    return caught.value


def uncompiled(_: torch.fx.GraphModule, __: list[torch.Tensor]) -> NoReturn:
    raise ValueError("Invalid ranges [0:-1]")


WORKER = RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed. ")
CODE_3 = RuntimeError(
    "DataLoader worker (pid 1) exited unexpectedly with exit code 3. Details are lost due to "
    "multiprocessing."
)
UNTOLD = RuntimeError("DataLoader worker (pid(s) 1) exited unexpectedly")
UNTOLD.__cause__ = CODE_3
LOST_RANK = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1")
IN_WORKER = UserError(
    "Caught UserError in DataLoader worker process 0.\nOriginal Traceback:\n  File\n"
    "medseg.errors.UserError: a.nii: cut off"
)


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        pytest.param(
            raised(lambda: torch.empty(10**15)),
            Status.out_of_memory,
            "out of memory",
            id="torch on the host",
        ),
        pytest.param(
            raised(lambda: np.empty(10**15)), Status.out_of_memory, "out of memory", id="numpy"
        ),
        pytest.param(
            torch.OutOfMemoryError("CUDA out of memory."), Status.out_of_memory, "CUDA", id="GPU"
        ),
        pytest.param(
            RuntimeError("CUDA error: out of memory"),
            Status.out_of_memory,
            "CUDA",
            id="GPU, in its driver",
        ),
        pytest.param(
            OSError(errno.ENOMEM, "Cannot allocate memory"),
            Status.out_of_memory,
            "allocate",
            id="no memory for a process",
        ),
        pytest.param(
            WORKER,
            Status.failed,
            "a loader worker ended (DataLoader worker (pid 1) is killed by signal: Killed.",
            id="worker",
        ),
        pytest.param(
            ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), Status.failed,
            "a loader worker ended ([Errno 104]",
            id="worker in the middle of a batch",
        ),
        pytest.param(CODE_3, Status.out_of_memory, "out of memory", id="worker at its limit"),
        pytest.param(
            UNTOLD,
            Status.out_of_memory,
            "out of memory",
            id="worker at its limit, told by the cause",
        ),
        pytest.param(
            MemoryError("Caught MemoryError in a worker.\n  File\nMemoryError"),
            Status.out_of_memory,
            "MemoryError",
            id="in a worker",
        ),
        pytest.param(IN_WORKER, Status.refused, "a.nii: cut off", id="mistake found by a worker"),
        pytest.param(
            OSError(errno.ENOSPC, "No space left on device"),
            Status.refused,
            "permissions and space",
            id="disk",
        ),
        pytest.param(
            OSError(errno.EFBIG, "File too large"),
            Status.refused,
            "permissions and space",
            id="limit of a file",
        ),
        pytest.param(
            LOST_RANK,
            Status.failed,
            "another rank",
            id="rank",
        ),
        pytest.param(NotFiniteError("NaN"), Status.not_finite, "NaN", id="NaN"),
        pytest.param(
            MisconfigurationException("Cannot use `A` callback with `Trainer` that has no logger."),
            Status.refused,
            "Lightning refuses the configuration (Cannot use `A` callback", id="callback",
        ),
        pytest.param(UserError("no such file"), Status.refused, "no such file", id="mistake"),
        pytest.param(KeyboardInterrupt(), Status.interrupted, "interrupted", id="Ctrl-C"),
        pytest.param(Preempted(), Status.interrupted, "stopped on request", id="signal"),
    ],
)  # fmt: skip
def test_an_end_has_its_status_and_one_sentence(
    error: BaseException, status: Status, words: str
) -> None:
    code, message, is_defect = end_of(error)
    assert status_of(code) is status
    assert words in message
    assert "\n" not in message
    assert not is_defect


def test_a_network_that_torch_cannot_compile_is_one_sentence() -> None:
    code, message, is_defect = end_of(
        raised(lambda: torch.compile(torch.sin, backend=uncompiled)(torch.zeros(1)))
    )
    assert (status_of(code), is_defect) == (Status.refused, False)
    assert "give memory.compile=false" in message


def test_anything_else_is_a_defect() -> None:
    assert end_of(RuntimeError("shapes differ")) == (1, "RuntimeError: shapes differ", True)


def test_a_killed_worker_is_out_of_memory_only_where_the_kernel_counted_it() -> None:
    assert status_of(end_of(WORKER)[0]) is Status.failed
    assert status_of(end_of(WORKER, is_memory_full=True)[0]) is Status.out_of_memory
    # Torch may notice first that a rank has lost its connection to the rank that was killed.
    code, message, is_defect = end_of(LOST_RANK, is_memory_full=True)
    assert (status_of(code), is_defect) == (Status.out_of_memory, False)
    assert "out of memory, the kernel has killed a process" in message
    # Another rank's own reason to fail still explains this end.
    assert explains(Status.not_finite, "the loss is nan", status_of(code), message)
    assert status_of(end_of(RuntimeError("shapes differ"), is_memory_full=True)[0]) is Status.failed
    assert num_oom_kills() >= 0


def test_a_worker_that_ends_after_a_stop_request_has_received_it_too() -> None:
    assert end_of(WORKER, is_asked=True) == end_of(Preempted())


@pytest.mark.parametrize("error", [Preempted(), KeyboardInterrupt()])
def test_a_checkpoint_is_named_only_where_there_is_one(error: BaseException) -> None:
    assert "from the last checkpoint" in end_of(error)[1]
    assert "nothing was saved" in end_of(error, is_saved=False)[1]


def test_exit_codes_carry_each_end() -> None:
    ends = set(Status) - {Status.running, Status.pruned}  # with these no process ends by itself
    assert {status_of(exit_code_of(status)) for status in ends} == ends
    assert [status_of(code) for code in (-9, -15, -11)] == [
        Status.failed,
        Status.interrupted,
        Status.failed,
    ]


def test_a_damaged_status_is_an_interruption() -> None:
    assert [Status(value) for value in (None, "fin", 3, ["finished"], {})] == [
        Status.interrupted
    ] * 5
