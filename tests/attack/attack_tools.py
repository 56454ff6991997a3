"""Harness of the attacks: each input is read in a process with limits of memory and time."""

from __future__ import annotations

import multiprocessing
import resource
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

# Before the fork: else each process would import the libraries of its format.
import medseg.io.dicom.read
import medseg.io.nifti
import medseg.io.simpleitk  # noqa: F401
from medseg.errors import UserError
from medseg.io.read import read_image
from tests.io.io_volumes import finding_texts

MAX_SECONDS = 60.0
MAX_MEMORY_BYTES = 3 * 2**29
MAX_SENTENCE = 3000
"""A list of 20 series, each with a description."""


@dataclass(frozen=True)
class Attack:
    """One malformed scan.

    Attributes:
        name: What is wrong with it.
        path: What is given to the reader.
        values: The voxels (D, H, W) that may be read of it; None where it must be refused.
        corners_xyz_mm: The corners that may be read of it; None where they are not judged.
        series: Which DICOM series is asked for.
        told_values: Voxels that may be read as well, if a remark says that something was left out.
    """

    name: str
    path: Path
    values: np.ndarray | None = None
    corners_xyz_mm: np.ndarray | None = None
    series: str | None = None
    told_values: np.ndarray | None = None


def _read(attack: Attack, answers: Connection) -> None:
    now = (
        int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
        * resource.getpagesize()
    )
    resource.setrlimit(resource.RLIMIT_AS, (now + MAX_MEMORY_BYTES, resource.RLIM_INFINITY))
    try:
        with warnings.catch_warnings(action="error"):
            volume = read_image(attack.path, attack.series)
    except UserError as error:
        # A path stands in a message as it was given; `say` shows its control characters as codes.
        sentence = str(error).replace(str(attack.path), "")
        fault = "" if sentence.isprintable() and len(sentence) < MAX_SENTENCE else "no sentence: "
        answers.send((fault, str(error)[:2000]))
    except BaseException:
        answers.send(("traceback: ", traceback.format_exc()[-3000:]))
    else:
        is_right = attack.values is not None and np.array_equal(volume.array, attack.values)
        is_told = (
            attack.told_values is not None
            and np.array_equal(volume.array, attack.told_values)
            and "left out" in str(finding_texts(volume))
        )
        fault = "" if is_right or is_told else "wrong values: "
        if attack.corners_xyz_mm is not None and not np.allclose(
            volume.grid.corners_xyz_mm(), attack.corners_xyz_mm, rtol=1e-6, atol=1e-3
        ):
            fault = "wrong place: "
        answers.send(
            (
                fault,
                (
                    f"read {volume.array.shape} {volume.array.dtype}, "
                    f"{'; '.join(finding_texts(volume))}"
                ),
            )
        )


def run(attack: Attack) -> tuple[str, str]:
    """Read one input.

    Returns:
        What is wrong with the answer, "" where nothing is; the answer.
    """
    context = multiprocessing.get_context("fork")
    answers, far_end = context.Pipe(duplex=False)
    process = context.Process(target=_read, args=(attack, far_end))
    process.start()
    far_end.close()
    try:
        if not answers.poll(MAX_SECONDS):
            return "hang: ", f"no answer in {MAX_SECONDS:g} s"
        return answers.recv()
    except EOFError:
        process.join()
        return "crash: ", f"the process ended with {process.exitcode}"
    finally:
        process.kill()
        process.join()


def survive(attacks: Iterable[Attack], at_least: int) -> None:
    """Assert that each input ends in one sentence or in a right value.

    Args:
        attacks: The inputs.
        at_least: How many there must be.
    """
    faults, num_read, num_refused = [], 0, 0
    for attack in attacks:
        fault, answer = run(attack)
        num_read += answer.startswith("read")
        num_refused += not fault and not answer.startswith("read")
        faults += [f"{attack.name}: {fault}{answer}"] * bool(fault)
    print(f"{num_read} read, {num_refused} refused, {len(faults)} faults")
    assert not faults, "\n".join(faults)
    assert num_read + num_refused >= at_least


def sentence(action: Callable[[], object]) -> str:
    """The one line in which an action is refused; empty where it is not."""
    message = ""
    try:
        action()
    except UserError as error:
        (message,) = str(error).splitlines()
    return message
