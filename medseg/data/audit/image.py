"""Are the values of an image Hounsfield units, and which of them are none?

All that is asked is answered from one histogram. Spikes (one value that a thousand voxels share while its neighbours
have few) are padding or clipping, made by software; they are set apart before the tissue is looked at.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from medseg.data.audit.finding import Finding, error, note, warning
from medseg.preprocess.intensity import AIR_HU

PERCENTILES = (1, 50, 99)

# A value is a spike when it holds this share of the voxels and this multiple of what the values nearby hold on average,
# without those that no voxel has: data of 8 bits are a comb, not a row of spikes.
SPIKE_SHARE = 0.001
SPIKE_CONTRAST = 10.0
SPIKE_REACH = 25
MAX_SPIKES = 4

PADDING_BELOW_HU = -1100  # interpolated air rings to about -1100, padding is -1500 or less
PADDING_SHARE = 0.001
FILLED_SHARE = 0.01
# Soft tissue, from fat to contrast-filled heart, the gap between it and lung, and air and lung, in an image that is in HU.
SOFT_HU = (-150, 150)
GAP_HU = (-500, -200)
AIR_RANGE_HU = (-1100, -500)
FAT_HU = -50  # every CT shows fat or air below
OFFSET_HU = 1024
TISSUE_SHARE = 0.05  # true images hold 8 to 60 % of soft tissue, and 0.1 % where an offset would put it
DARK_SHARE = 0.01
AIR_SHARE = 0.001
MAX_WINDOWED_RANGE = 256
# A scanner's lowest value is -1024; a spike there says nothing.
FLOOR_HU = -1010
HARMLESS_CLIP_HU = -1000
LOW_CEILING_HU = 1500


@dataclass(frozen=True)
class ImageFacts:
    """The distribution of an image.

    Attributes:
        low_hu: Lowest value.
        high_hu: Highest value.
        counts: Voxels by value rounded to whole HU, from -32768 on.
    """

    low_hu: float
    high_hu: float
    counts: np.ndarray

    def share(self, low_hu: float, high_hu: float) -> float:
        """Share of the voxels from `low_hu` up to but without `high_hu`; the ends may be infinite."""
        return _mass(self.counts, low_hu, high_hu)

    def summary(self) -> dict[str, float]:
        """Lowest and highest value, and those below which 1, 50 and 99 % of the voxels lie: `min`, `p01`, …, `max`."""
        below = np.cumsum(self.counts) / self.counts.sum()
        ranks = {f"p{percent:02d}": int(np.searchsorted(below, percent / 100)) - 32768 for percent in PERCENTILES}
        return {"min": self.low_hu, **ranks, "max": self.high_hu}

    @cached_property
    def measured_hu(self) -> tuple[int, int]:
        """Lowest and highest value above padding, in whole HU; those of the image where it has nothing else."""
        held = np.flatnonzero(self.counts[PADDING_BELOW_HU + 32768 :])
        if not held.size:
            return round(self.low_hu), round(self.high_hu)
        return int(held[0]) + PADDING_BELOW_HU, int(held[-1]) + PADDING_BELOW_HU

    @cached_property
    def spikes(self) -> Mapping[int, float]:
        """Value of each spike to its share of the voxels, the largest first."""
        counts, is_held = self.counts, (self.counts > 0).astype(np.int64)
        neighbours = (_around(counts) - counts) / np.maximum(1, _around(is_held) - is_held)
        is_spike = (counts >= SPIKE_SHARE * counts.sum()) & (counts >= SPIKE_CONTRAST * neighbours)
        found = sorted(np.flatnonzero(is_spike), key=lambda index: -counts[index])[:MAX_SPIKES]
        return {int(index) - 32768: float(counts[index] / counts.sum()) for index in found}

    @cached_property
    def tissue(self) -> np.ndarray:
        """The counts without spikes; with them where nothing else is left."""
        rest = self.counts.copy()
        rest[[value + 32768 for value in self.spikes]] = 0
        return rest if rest.any() else self.counts


def _around(values: np.ndarray) -> np.ndarray:
    """Sum of the values up to `SPIKE_REACH` to either side, each one's own included."""
    sums = np.cumsum(np.pad(values, (SPIKE_REACH + 1, SPIKE_REACH)))
    return np.asarray(sums[2 * SPIKE_REACH + 1 :] - sums[: -2 * SPIKE_REACH - 1])


def _mass(counts: np.ndarray, low_hu: float, high_hu: float) -> float:
    low, high = (int(np.clip(value + 32768, 0, 65536)) for value in (low_hu, high_hu))
    return float(counts[low:high].sum() / counts.sum())


def measure_image(image_hu: np.ndarray) -> ImageFacts:
    """Count the values of an image (D, H, W), plane by plane."""
    counts = np.zeros(65536, dtype=np.int64)
    for plane in image_hu:
        whole = plane if plane.dtype == np.int16 else np.clip(np.rint(plane), -32768, 32767).astype(np.int16)
        # As uint16 nothing is negative; the upper half of the bins are the negative values.
        counts += np.bincount(whole.view(np.uint16).ravel(), minlength=65536)
    return ImageFacts(float(image_hu.min()), float(image_hu.max()), np.roll(counts, 32768))


def hash_voxels(image: np.ndarray) -> str:
    """SHA-256 of the voxels of an oriented image: equal for one scan in two files, formats or storage orders."""
    total = hashlib.sha256(str(image.shape).encode())
    for plane in image:
        total.update(np.ascontiguousarray(plane).data)
    return total.hexdigest()


def audit_image(facts: ImageFacts) -> list[Finding]:
    """Say what is not plausible about the values of a CT, whatever it shows.

    Args:
        facts: Its distribution.

    Returns:
        Findings; an image that is not in HU gets one error and nothing else about its values.
    """
    scale = _audit_scale(facts)
    if scale is not None:
        return [scale]
    found = [*_audit_padding(facts), *_audit_clipping(facts)]
    if _mass(facts.tissue, *AIR_RANGE_HU) < AIR_SHARE and not any(finding.code == "clipped" for finding in found):
        found.append(
            warning(
                "no_air",
                f"nothing is as dark as air or lung: the values run from {facts.low_hu:g} to {facts.high_hu:g}",
                "right for a crop inside the body, else check that the values are HU",
            )
        )
    return found


def _audit_scale(facts: ImageFacts) -> Finding | None:
    """Find what makes the whole scale wrong."""
    low_hu, high_hu, tissue = facts.low_hu, facts.high_hu, facts.tissue
    runs = f"the values run from {low_hu:g} to {high_hu:g}"
    if low_hu == high_hu:
        return error("hu_range", f"every voxel holds {low_hu:g}", "export the scan again")
    if high_hu - low_hu <= MAX_WINDOWED_RANGE:
        top = 255 if high_hu > 1 else 1
        return error(
            "hu_range",
            f"{runs}: they are windowed or normalised, not HU",
            "convert the scan again from its DICOM files, or bring back a window that you know: one of -1250 to 250 HU by "
            f"data.hu_slope={1500 / top:.6g} data.hu_offset=-1250 (predict: without data.), or by these columns of the case table",
        )
    is_dark = _mass(tissue, -np.inf, FAT_HU) >= DARK_SHARE
    if not is_dark and _is_soft_at(tissue, OFFSET_HU):
        return _offset(f"{runs}, and soft tissue lies at about {_peak(tissue, OFFSET_HU)}", OFFSET_HU)
    is_too_dark = _mass(tissue, -np.inf, AIR_RANGE_HU[1] - OFFSET_HU) >= TISSUE_SHARE and not _is_soft_at(tissue, 0)
    if is_too_dark and _is_soft_at(tissue, -OFFSET_HU):
        return _offset(f"{runs}, and soft tissue lies at about {_peak(tissue, -OFFSET_HU)}", -OFFSET_HU)
    if not is_dark or _mass(tissue, SOFT_HU[0], np.inf) < AIR_SHARE:
        lacking = "fat or air" if not is_dark else "soft tissue"
        return error(
            "hu_range",
            f"{runs}, and next to nothing has the values of {lacking}: this does not look like HU of a CT",
            "give a CT in HU, or correct its scale with data.hu_slope and data.hu_offset (predict: without data.)",
        )
    return None


def _is_soft_at(tissue: np.ndarray, offset_hu: int) -> bool:
    soft, gap = (_mass(tissue, low_hu + offset_hu, high_hu + offset_hu) for low_hu, high_hu in (SOFT_HU, GAP_HU))
    return soft >= max(TISSUE_SHARE, gap)


def _peak(tissue: np.ndarray, offset_hu: int) -> int:
    """The most frequent value where an offset puts soft tissue."""
    low, high = SOFT_HU[0] + offset_hu, SOFT_HU[1] + offset_hu
    return low + int(np.argmax(tissue[low + 32768 : high + 32768]))


def _offset(found: str, offset_hu: int) -> Finding:
    way = "high" if offset_hu > 0 else "low"
    return error(
        "hu_offset",
        f"{found}: they are about {abs(offset_hu)} too {way} for HU",
        f"data.hu_offset={-offset_hu} corrects them (predict: hu_offset={-offset_hu}), or the column hu_offset of the case table",
    )


def _audit_padding(facts: ImageFacts) -> list[Finding]:
    """Find what stands where the scanner did not measure."""
    found = []
    share = facts.share(-np.inf, PADDING_BELOW_HU)
    if share >= PADDING_SHARE:
        most = int(np.argmax(facts.counts[: PADDING_BELOW_HU + 32768])) - 32768
        values = f"hold {most}" if facts.share(most, most + 1) > 0.9 * share else f"lie below {PADDING_BELOW_HU}"
        found.append(
            note(
                "padding",
                f"{share:.1%} of the voxels {values}, which is padding outside the scanner's field of view",
                f"nothing is to be done: it is read as air, {AIR_HU} HU",
            )
        )
    for value, spike_share in facts.spikes.items():
        low_hu, high_hu = facts.measured_hu
        is_inner = max(AIR_RANGE_HU[1], low_hu + SPIKE_REACH) < value < high_hu - SPIKE_REACH
        if spike_share >= FILLED_SHARE and is_inner:
            found.append(
                warning(
                    "padding",
                    f"{spike_share:.1%} of the voxels hold exactly {value} HU, as if a constant had been filled in, and "
                    "that is the value of a tissue",
                    f"where they lie outside the field of view, replace them in the file by {AIR_HU}",
                )
            )
    return found


def _audit_clipping(facts: ImageFacts) -> list[Finding]:
    """Find ends of the scale at which software cut the values off."""
    low_hu, high_hu = facts.measured_hu
    found = []
    if low_hu > FLOOR_HU and facts.spikes.get(low_hu, 0.0) >= FILLED_SHARE:
        make = note if low_hu <= HARMLESS_CLIP_HU else warning
        found.append(
            make(
                "clipped",
                f"{facts.spikes[low_hu]:.1%} of the voxels hold the lowest value, {low_hu} HU: the image was clipped there",
                "harmless where task.window_hu does not begin below",
            )
        )
    if high_hu in facts.spikes and high_hu < LOW_CEILING_HU:
        found.append(
            warning(
                "clipped",
                f"{facts.spikes[high_hu]:.1%} of the voxels hold the highest value, {high_hu} HU: the image was clipped there",
                "harmless where task.window_hu does not end above",
            )
        )
    return found
