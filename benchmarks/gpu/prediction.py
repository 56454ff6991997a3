"""Prediction part of the GPU report: labels and seconds against the CPU, and lack of memory."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu.parts import Session
from benchmarks.gpu.report import Report
from medseg import LungSegmenter, Volume
from medseg.cascade.stage import TrainedStage
from medseg.inference.segmentation import Segmentation
from medseg.io.read import read_image
from medseg.memory.precision import check_precision
from medseg.metrics.scores import dice_per_label
from medseg.phantom.scan import make_phantom
from medseg.phantom.spec import PhantomSpec

PRECISIONS = ("fp32", "bf16", "fp16")
# Least Dice of each label: DICE_BOUND against fp32 on the CPU; FALLBACK_BOUND between a prediction
# that ran out of memory and one in the same precision that did not.
DICE_BOUND, FALLBACK_BOUND = 0.999, 0.9995
# In the check of the fallback: share of the memory, beyond the weights, that the prediction gets.
SHARE_LEFT = 0.3
# Part of the sentence with which a prediction says that it fell back.
FALLBACK_SENTENCE = "ran out of memory on the"


def measure(session: Session) -> Report:
    """Predict the scan in each precision, then with too little memory."""
    report = Report()
    scan = scan_of(session)
    shape = "×".join(map(str, scan.array.shape))
    source = session.scan.name if session.scan else "a phantom (give SCAN=<file> for a real scan)"
    report.texts.append(f"Scan: {source}, {shape} voxels.\n")
    if session.scan is None and not session.is_rehearsal:
        report.not_run("a real scan", "none was given: SCAN=<file>")
    reference, cpu_s = timed(LungSegmenter(accelerator="cpu", precision="fp32"), scan)
    rows: list[dict[str, Any]] = [{"device": "cpu", "precision": "fp32", "s": cpu_s}]
    for precision in PRECISIONS:
        try:
            check_precision(precision, session.device.type)
        except ValueError as error:
            report.not_run(precision, str(error))
            continue
        segmenter = LungSegmenter(accelerator=session.accelerator, precision=precision)
        # A first prediction, not counted, loads the libraries and chooses kernels.
        timed(segmenter, scan)
        result, seconds = timed(segmenter, scan)
        rows.append({"device": session.device.type, "precision": precision, "s": seconds})
        compare(report, precision, result, reference, DICE_BOUND)
    check_fallback(report, scan, session)
    report.table(rows, {"s": ".2f"})
    return report


def scan_of(session: Session) -> Volume:
    """Read the scan of the user, or make a phantom."""
    if session.scan is not None:
        return read_image(session.scan)
    spec = PhantomSpec(seed=7, index=0, spacing_mm=(2.0, 1.5, 1.5), matrix=(256, 256))
    if session.is_rehearsal:
        spec = PhantomSpec(seed=7, index=0, spacing_mm=(6.0, 5.0, 5.0), matrix=(72, 72))
    phantom = make_phantom(spec)
    return Volume(phantom.image_hu, phantom.grid)


def timed(segmenter: LungSegmenter, scan: Volume) -> tuple[Segmentation, float]:
    """Segment the lungs with the included weights, and measure the seconds."""
    start = time.perf_counter()
    result = segmenter.segment(scan)
    return result, time.perf_counter() - start


def compare(
    report: Report, name: str, result: Segmentation, reference: Segmentation, bound: float
) -> None:
    """Check the Dice of each label of two results; fails where the reference has no label."""
    labels = torch.from_numpy(result.labels.array)
    expected = torch.from_numpy(reference.labels.array)
    values = sorted(set(expected.unique().tolist()) - {0})
    report.holds(f"{name}: labels", bool(values), str(values), "at least one")
    for value, dice in dice_per_label(labels, expected, values).items():
        report.at_least(f"{name}: Dice of label {value}", dice, bound)


def check_fallback(report: Report, scan: Volume, session: Session) -> None:
    """Check that a prediction without enough memory goes on in another way, and says so."""
    segmenter = LungSegmenter(accelerator=session.accelerator, precision="fp32")
    expected, _ = timed(segmenter, scan)
    with too_little_memory(segmenter, scan, session):
        result, _ = timed(segmenter, scan)
    sentences = [str(finding) for finding in result.findings]
    warnings = [sentence for sentence in sentences if FALLBACK_SENTENCE in sentence]
    name = "out of memory"
    warnings_text = "; ".join(warnings) or "none"
    report.holds(f"{name}: a warning", bool(warnings), warnings_text, "one or more")
    compare(report, name, result, expected, FALLBACK_BOUND)


@contextmanager
def too_little_memory(segmenter: LungSegmenter, scan: Volume, session: Session) -> Iterator[None]:
    """Let predictions within the block run out of memory.

    On a GPU torch's allocator gets a limit; a rehearsal raises the error itself, once.
    """
    if session.is_rehearsal:
        with mock.patch.object(TrainedStage, "_run", _failing_once(TrainedStage._run)):
            yield
        return
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    # The segmenter holds its weights already; a prediction shows how much it adds to them.
    start_bytes = torch.cuda.memory_reserved()
    segmenter.segment(scan)
    peak_bytes = torch.cuda.max_memory_reserved()
    torch.cuda.empty_cache()
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    limit_bytes = start_bytes + SHARE_LEFT * (peak_bytes - start_bytes)
    torch.cuda.set_per_process_memory_fraction(limit_bytes / total_bytes)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _failing_once(run: Any) -> Any:
    """Make the first call of a method run out of memory."""
    is_first = True

    def fail_or_run(*arguments: Any) -> Any:
        nonlocal is_first
        if is_first:
            is_first = False
            raise torch.OutOfMemoryError("CUDA out of memory. Rehearsed.")
        return run(*arguments)

    return fail_or_run
