"""Regression test of the included weights: labels of a small phantom against recorded ones.

The recorded labels change only together with the weights or the phantom. Record them anew with

    python tests/weights/test_regression.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from medseg import LungSegmenter
from medseg.io.volume import Volume
from medseg.phantom.scan import make_phantom
from medseg.phantom.spec import PhantomSpec

RECORDED = Path(__file__).parent / "recorded_labels.npz"
SPEC = PhantomSpec(seed=5, index=0, spacing_mm=(4.0, 3.4, 3.4), matrix=(110, 110))
# Processors with and without bf16, and numbers of threads, differ in single voxels.
MIN_DICE = 0.999


def segment_phantom() -> tuple[np.ndarray, np.ndarray]:
    """Predicted labels and the phantom's own labels, (D, H, W)."""
    phantom = make_phantom(SPEC)
    result = LungSegmenter(accelerator="cpu").segment(Volume(phantom.image_hu, phantom.grid))
    return result.labels.array, phantom.labels


def dice(one: np.ndarray, other: np.ndarray) -> float:
    return 2.0 * np.count_nonzero(one & other) / (np.count_nonzero(one) + np.count_nonzero(other))


@pytest.fixture(scope="module")
def labels() -> tuple[np.ndarray, np.ndarray]:
    return segment_phantom()


@pytest.mark.parametrize("value", [1, 2])
def test_the_included_weights_give_the_recorded_labels(
    value: int, labels: tuple[np.ndarray, np.ndarray]
) -> None:
    pred, reference = labels
    recorded = np.load(RECORDED)["labels"]
    assert pred.shape == recorded.shape
    assert dice(pred == value, recorded == value) >= MIN_DICE
    assert dice(recorded == value, reference == value) > 0.9, (
        "the recorded labels are lungs, left and right"
    )


if __name__ == "__main__":
    np.savez_compressed(RECORDED, labels=segment_phantom()[0])
    print(f"{RECORDED}: {RECORDED.stat().st_size} bytes")
