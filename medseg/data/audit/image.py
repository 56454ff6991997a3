"""Audit of the values of an image: their scale, padding and clipping.

All checks use one histogram. A spike is a value that occurs far more often than the values nearby:
padding, or clipping by software. Spikes are excluded before the tissue is examined.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from medseg.data.audit.finding import make_finding
from medseg.findings import Finding
from medseg.preprocess.fill import find_fill, replace_fill
from medseg.preprocess.scale import AS_STORED, HuScale
from medseg.task import AIR_HU

NUM_VALUES = 65536  # a histogram has a bin for each value of int16
ZERO = 32768  # index of the bin of 0 HU: the bin of a value is value + ZERO
# A value is a spike if at least this share of the voxels has it, and if its count is at least this
# multiple of the average count of the values nearby. Values without voxels are left out of the
# average: the histogram of 8-bit data is a comb, not a row of spikes.
SPIKE_SHARE = 0.001
SPIKE_CONTRAST = 10.0
SPIKE_REACH = 25  # distance up to which a value is nearby, in HU
MAX_SPIKES = 4  # most spikes that are excluded, the largest first

# Lower values are padding. Interpolation of air overshoots to about -1100; padding is -1500 or
# less.
PADDING_BELOW_HU = -1100
PADDING_SHARE = 0.001  # padding is reported if it is at least this share of the voxels
# A spike in the range of tissue, or at the lowest value, is reported if it has at least this share
# of the voxels.
SPIKE_REPORT_SHARE = 0.01
# Ranges in an image in HU, low ≤ value < high: soft tissue, from fat to a heart with contrast
# agent; the gap between air and fat; air and air-filled organs.
SOFT_HU = (-150, 150)
GAP_HU = (-500, -200)
AIR_RANGE_HU = (-1100, -500)
# The gap and the air where the values were negated; other images have sparse and dense bone there.
NEGATED_GAP_HU = (200, 500)
NEGATED_AIR_HU = (500, 1100)
FAT_HU = -50  # every CT has fat or air below this value
OFFSET_HU = 1024  # offset by which values are often stored too high or too low
# Soft tissue or air counts as moved by a wrong scale if at least this share lies in the moved
# range. Images in HU have 8 to 60 % of their voxels in `SOFT_HU`, but about 0.1 % in `SOFT_HU` plus
# or minus `OFFSET_HU`.
TISSUE_SHARE = 0.05
# Least share of voxels below `FAT_HU` in an image in HU.
DARK_SHARE = 0.01
# Least ratio, in an inverted image, of the voxels in `NEGATED_AIR_HU` (its air) to those in
# `AIR_RANGE_HU`.
INVERTED_CONTRAST = 5.0
# An image shows air, soft tissue or bone if at least this share of its voxels has such values.
PRESENT_SHARE = 0.001
# Largest difference of the highest and the lowest value in 8-bit and normalised images; HU of a CT
# have a larger range.
MAX_WINDOWED_RANGE = 256
# Ranges to which programs scale a window, the narrowest first; and the window that the advice uses
# as its example.
USUAL_ENDS = ((0, 1), (-1, 1), (0, 255), (-128, 127))
USUAL_WINDOW_HU = (-1250, 250)
# Signs of HU that were divided by 1000. The lowest value is air or an air-filled organ, from -1100
# to -500 HU. The highest value is metal at the limit of 12 bits, 3071 HU, or a little more.
DIVISOR = 1000
DIVIDED_LOWS = (-1.1, -0.5)
DIVIDED_HIGH = 4.1
# Or the lowest value is a scanner's padding, also divided. DIVIDED_ROUNDING allows for the rounding
# of a stored number.
DIVIDED_PADDINGS = (-2.048, -3.024)  # -2048 and -3024 HU
DIVIDED_ROUNDING = 5e-4
# Scanners clip air at -1024: a spike at the lowest value is normal if that value is at most this.
FLOOR_HU = -1010
# Clipping at or below the value of air loses nothing of the body.
NOMINAL_AIR_HU = -1000
# Upper clipping at this value or above is not reported: only dense bone and metal are brighter.
LOW_CEILING_HU = 1500
# Blocks of a thumbnail along each axis, and the range to which its values are clipped, since metal
# and padding would outweigh the rest.
THUMBNAIL_SIZE = 8
THUMBNAIL_HU = (-1024, 400)


@dataclass(frozen=True)
class ImageFacts:
    """Histogram of an image: a CT in HU, another modality in its own unit.

    Attributes:
        low_hu: Lowest value, of any modality.
        high_hu: Highest value, of any modality.
        counts: Number of voxels of each value rounded to whole HU, (`NUM_VALUES`,); the first bin
            counts the value -32768. See `measure_values` for other modalities.
        step: Difference of the values of neighbouring bins; 1 for a CT.
        middle: Value of the bin `ZERO`; 0 for a CT.
        scale: Scale that has been applied to the values of the file. An advice replaces it.
    """

    low_hu: float
    high_hu: float
    counts: np.ndarray
    step: float = 1.0
    middle: float = 0.0
    scale: HuScale = AS_STORED

    def summary(self) -> dict[str, float]:
        """Lowest and highest value, and percentiles: `min`, `p01`, `p50`, `p99`, `max`."""
        share_up_to = np.cumsum(self.counts) / self.counts.sum()
        figures = {"min": self.low_hu}
        for percent in (1, 50, 99):
            # The first value up to which there is at least this share of the voxels.
            index = int(np.searchsorted(share_up_to, percent / 100))
            figures[f"p{percent:02d}"] = self.middle + self.step * (index - ZERO)
        figures["max"] = self.high_hu
        return figures

    @cached_property
    def measured_hu(self) -> tuple[int, int]:
        """Lowest and highest value that is not padding, in whole HU.

        If all of the image is padding, its lowest and highest value.
        """
        values_hu = np.flatnonzero(self.counts[PADDING_BELOW_HU + ZERO :]) + PADDING_BELOW_HU
        if not values_hu.size:
            return round(self.low_hu), round(self.high_hu)
        return int(values_hu[0]), int(values_hu[-1])

    @cached_property
    def spikes(self) -> Mapping[int, float]:
        """Value of each spike to its share of the voxels, the largest first."""
        counts = self.counts
        total = counts.sum()
        has_voxels = (counts > 0).astype(np.int64)
        num_values_nearby = np.maximum(1, _sum_nearby(has_voxels))
        mean_nearby = _sum_nearby(counts) / num_values_nearby
        is_spike = (counts >= SPIKE_SHARE * total) & (counts >= SPIKE_CONTRAST * mean_nearby)
        bins = np.flatnonzero(is_spike)
        # Stable, so that the lower of two equal spikes comes first.
        largest_first = bins[np.argsort(-counts[bins], kind="stable")]
        shares = {}
        for index in largest_first[:MAX_SPIKES].tolist():
            shares[index - ZERO] = float(counts[index] / total)
        return shares

    @cached_property
    def tissue(self) -> np.ndarray:
        """Counts without those of the spikes; all counts if nothing else is left."""
        tissue = self.counts.copy()
        for value in self.spikes:
            tissue[value + ZERO] = 0
        if tissue.any():
            return tissue
        return self.counts


def _sum_nearby(counts: np.ndarray) -> np.ndarray:
    """Sum the counts of all values at most `SPIKE_REACH` away, without the value itself."""
    # The sum of a window is the running sum at its last value minus the running sum before its
    # first. Zero padding gives the values at both ends a whole window.
    width = 2 * SPIKE_REACH + 1
    running_sums = np.cumsum(np.pad(counts, (SPIKE_REACH + 1, SPIKE_REACH)))
    window_sums = running_sums[width:] - running_sums[:-width]
    return window_sums - counts


def share_of(counts: np.ndarray, low_hu: float, high_hu: float) -> float:
    """Compute the share of the counted voxels with low_hu ≤ value < high_hu.

    Args:
        counts: Histogram, as in `ImageFacts`.
        low_hu: Lowest value, may be -infinity.
        high_hu: End of the range, may be infinity.
    """
    low = int(np.clip(low_hu + ZERO, 0, NUM_VALUES))
    high = int(np.clip(high_hu + ZERO, 0, NUM_VALUES))
    return float(counts[low:high].sum() / counts.sum())


def measure_image(image_hu: np.ndarray) -> ImageFacts:
    """Count the values of an image (D, H, W), plane by plane."""
    is_whole = image_hu.dtype == np.int16
    counts = np.zeros(NUM_VALUES, dtype=np.int64)
    for plane in image_hu:
        whole = plane
        if not is_whole:
            whole = np.clip(np.rint(plane), -32768, 32767).astype(np.int16)
        # `bincount` refuses negative values. That of torch is faster than NumPy's.
        bins = whole.astype(np.int32)
        bins += ZERO
        counts += torch.bincount(torch.from_numpy(bins).flatten(), minlength=NUM_VALUES).numpy()
    if not is_whole:
        return ImageFacts(float(image_hu.min()), float(image_hu.max()), counts)
    values = np.flatnonzero(counts) - ZERO
    return ImageFacts(float(values[0]), float(values[-1]), counts)


def measure_values(image: np.ndarray, modality: str) -> ImageFacts:
    """Count the values of an image (D, H, W) of any modality.

    Whole numbers of 16 bits are too coarse for other modalities with values such as 0 to 1, and too
    small for others. Their bins divide the range from the lowest to the highest value.
    """
    low = float(image.min())
    high = float(image.max())
    if modality == "ct" or image.dtype == np.int16 or low == high:
        return measure_image(image)
    # A power of two: a bin of each whole number has exactly its value where the range allows it.
    step = 2.0 ** math.ceil(math.log2((high - low) / (NUM_VALUES - 2)))
    first = math.floor(low / step)
    counts = np.zeros(NUM_VALUES, dtype=np.int64)
    for plane in image:
        bins = np.rint(plane.astype(np.float64) / step).astype(np.int64) - first
        counts += np.bincount(bins.ravel(), minlength=NUM_VALUES)
    return ImageFacts(low, high, counts, step, middle=(first + ZERO) * step)


def hash_voxels(image: np.ndarray) -> str:
    """Compute the SHA-256 of the shape and the voxels of an oriented image.

    The hash is the same for all files, formats and storage orders of a scan.
    """
    total = hashlib.sha256(str(image.shape).encode())
    for plane in image:
        total.update(np.ascontiguousarray(plane).data)
    return total.hexdigest()


def make_thumbnail(image_hu: np.ndarray) -> tuple[int, ...]:
    """Average an image (D, H, W), clipped to the range of air and tissue, in blocks.

    Returns:
        Mean of each block, rounded to whole HU, in the order (z, y, x); empty if the image has
        fewer voxels along an axis than blocks.
    """
    if min(image_hu.shape) < THUMBNAIL_SIZE:
        return ()
    # Slab by slab: a clipped copy of the whole scan would take as much memory again.
    slab_means = []
    for slab in np.array_split(image_hu, THUMBNAIL_SIZE):
        slab_means.append(np.clip(slab, *THUMBNAIL_HU).mean(axis=0, dtype=np.float32))
    means = np.stack(slab_means)  # (8, H, W), at the end (8, 8, 8)
    for axis in (1, 2):
        blocks = np.array_split(means, THUMBNAIL_SIZE, axis)
        means = np.stack([block.mean(axis=axis) for block in blocks], axis)
    return tuple(np.rint(means).astype(int).ravel().tolist())


class CheckedChannels(NamedTuple):
    """Channels of a case after the check of their values.

    Attributes:
        images: Image (D, H, W) of each channel; a CT in HU, with air where a constant was filled in
            outside its field of view.
        facts: Histogram of each channel, after the replacement.
        findings: Findings about the values, replaced constants included.
    """

    images: list[np.ndarray]
    facts: list[ImageFacts]
    findings: list[Finding]


def check_channels(
    images: Sequence[np.ndarray],
    modalities: Sequence[str],
    *,
    is_owned: bool = True,
    scale: HuScale = AS_STORED,
) -> CheckedChannels:
    """Check the values of all channels of a case.

    A constant that was filled in outside the field of view of a CT is replaced by air.

    Args:
        images: Image (D, H, W) of each channel; a CT in HU.
        modalities: Modality of each channel.
        is_owned: Whether the images may be changed in place; otherwise an image is copied before a
            constant is replaced.
        scale: Scale that has been applied to the values of the first channel.
    """
    images = list(images)
    fill_findings = []
    for number, (image, modality) in enumerate(zip(images, modalities, strict=True)):
        fill = None
        if modality == "ct":
            fill = find_fill(image)
        # Where the scale is wrong, the value of air is unknown.
        if fill is None or _audit_scale(measure_image(image)) is not None:
            continue
        if not is_owned:
            images[number] = image.copy()
        share = replace_fill(images[number], fill)
        finding = make_finding("padding:replaced", share=share, value=fill, air=AIR_HU)
        fill_findings.append(_of_channel(finding, number))
    # All channels are measured after the replacement, so that the fill does not count.
    facts = []
    for image, modality in zip(images, modalities, strict=True):
        facts.append(measure_values(image, modality))
    facts[0] = replace(facts[0], scale=scale)
    return CheckedChannels(images, facts, fill_findings + audit_channels(facts, modalities))


def audit_image(facts: ImageFacts) -> list[Finding]:
    """Check that the values of a CT are plausible, whatever the CT shows.

    Args:
        facts: Histogram of the CT.

    Returns:
        Findings; an image that is not in HU gets one error and no other finding about its values.
    """
    scale_error = _audit_scale(facts)
    if scale_error is not None:
        return [scale_error]
    low_clipping = list(_audit_low_clipping(facts))
    findings = [*_audit_padding(facts), *low_clipping, *_audit_high_clipping(facts)]
    # Clipped at the low end, all air has the value at which it was clipped. It may also have one
    # value where a program has set everything outside the body to -1024.
    has_air = bool(low_clipping) or share_of(facts.counts, *AIR_RANGE_HU) >= PRESENT_SHARE
    if not has_air:
        findings.append(make_finding("no_air", low=facts.low_hu, high=facts.high_hu))
    return findings


def are_hu(channels: Sequence[ImageFacts], modalities: Sequence[str]) -> bool:
    """Whether the values of every CT channel can be HU; true where no channel is a CT.

    Args:
        channels: Histogram of each channel.
        modalities: Modality of each.
    """
    for facts, modality in zip(channels, modalities, strict=True):
        if modality == "ct" and _audit_scale(facts) is not None:
            return False
    return True


def audit_channels(channels: Sequence[ImageFacts], modalities: Sequence[str]) -> list[Finding]:
    """Check the values of all channels.

    A CT is checked by `audit_image`; a channel of another modality must only hold more than one
    value.

    Args:
        channels: Histogram of each channel.
        modalities: Modality of each channel.

    Returns:
        Findings; the sentences about channels after the first begin with the channel's name.
    """
    findings = []
    for number, (facts, modality) in enumerate(zip(channels, modalities, strict=True)):
        channel_findings = []
        if modality == "ct":
            channel_findings = audit_image(facts)
        elif facts.low_hu == facts.high_hu:
            channel_findings = [make_finding("hu_range:constant", low=facts.low_hu)]
        findings += [_of_channel(finding, number) for finding in channel_findings]
    return findings


def _of_channel(finding: Finding, number: int) -> Finding:
    """Put the name of its channel before a finding, except for the first channel."""
    if number == 0:
        return finding
    return finding.within(f"image_{number}")


def _audit_scale(facts: ImageFacts) -> Finding | None:
    """Find the first error of the whole scale; None if the values can be HU.

    The order matters: each check assumes that the image has none of the errors checked before.
    """
    tissue = facts.tissue
    ends = {"low": facts.low_hu, "high": facts.high_hu}
    if facts.low_hu == facts.high_hu:
        return make_finding("hu_range:constant", **ends)
    if facts.high_hu - facts.low_hu <= MAX_WINDOWED_RANGE:
        return _explain_small_range(facts)
    # Values that are about 1024 too high lack everything below 0.
    has_fat_or_air = share_of(tissue, -np.inf, FAT_HU) >= DARK_SHARE
    if not has_fat_or_air and _is_soft_at(tissue, OFFSET_HU):
        return _explain_offset(facts, OFFSET_HU, "high")
    # Values that are about 1024 too low: air lies where an image in HU has no voxels.
    has_moved_air = share_of(tissue, -np.inf, AIR_RANGE_HU[1] - OFFSET_HU) >= TISSUE_SHARE
    is_moved_down = _is_soft_at(tissue, -OFFSET_HU) and not _is_soft_at(tissue, 0)
    if has_moved_air and is_moved_down:
        # The offset moves air to about -2048, and its noise down to `lowest_air_hu`: lower values
        # come from another scale or modality.
        lowest_air_hu = PADDING_BELOW_HU - OFFSET_HU
        far_share = share_of(tissue, -np.inf, lowest_air_hu)
        if far_share >= TISSUE_SHARE:
            return make_finding("hu_range:far", **ends, share=far_share, limit=lowest_air_hu)
        return _explain_offset(facts, -OFFSET_HU, "low")
    if _is_inverted(tissue):
        bright_share = share_of(tissue, *NEGATED_AIR_HU)
        return make_finding("hu_range:inverted", **ends, share=bright_share, air=-NOMINAL_AIR_HU)
    if not has_fat_or_air:
        return make_finding("hu_range:other", **ends, lacking="fat or air")
    if share_of(tissue, SOFT_HU[0], np.inf) < PRESENT_SHARE:
        return make_finding("hu_range:other", **ends, lacking="soft tissue")
    return None


def _explain_offset(facts: ImageFacts, offset_hu: int, way: str) -> Finding:
    """Say by how much the values of an image are too high or too low.

    Args:
        facts: Histogram of the image with the offset.
        offset_hu: Offset to which soft tissue has moved.
        way: `high` or `low`, for the sentence.
    """
    # The peak is the most frequent value in the range to which the offset moves soft tissue.
    low = SOFT_HU[0] + offset_hu
    high = SOFT_HU[1] + offset_hu
    peak = low + int(np.argmax(facts.tissue[low + ZERO : high + ZERO]))
    return make_finding(
        "hu_offset",
        low=facts.low_hu,
        high=facts.high_hu,
        peak=peak,
        size=OFFSET_HU,
        way=way,
        offset=facts.scale.offset - offset_hu,
    )


def _explain_small_range(facts: ImageFacts) -> Finding:
    """Say which scale a range that is too small for HU suggests."""
    low = facts.low_hu
    high = facts.high_hu
    # The values that round to 0, from -0.5 to 0.5, are soft tissue in HU divided by 1000, and those
    # that round to 1 are dense bone, which is rare. Other normalised images have no such peak at 0.
    num_near_zero = facts.counts[ZERO]
    num_near_one = facts.counts[ZERO + 1]
    is_air = DIVIDED_LOWS[0] <= low <= DIVIDED_LOWS[1]
    is_padding = any(abs(low - padding) <= DIVIDED_ROUNDING for padding in DIVIDED_PADDINGS)
    has_divided_ends = (is_air or is_padding) and high <= DIVIDED_HIGH
    has_peak_at_zero = num_near_zero > num_near_one
    if has_divided_ends and has_peak_at_zero:
        kind = "hu_range:divided"
        if low >= -1 and high <= 1:
            # Either divided HU that were clipped, or a window around soft tissue that was scaled to
            # -1 to 1: the values do not tell which.
            kind = "hu_range:clipped"
        slope = DIVISOR * facts.scale.slope
        return make_finding(kind, low=low, high=high, divisor=DIVISOR, slope=slope)
    # The line hu = slope · value + offset that maps `bottom` and `top` to the ends of the window.
    bottom, top = _scaled_ends(low, high)
    window_low_hu, window_high_hu = USUAL_WINDOW_HU
    slope = (window_high_hu - window_low_hu) / (top - bottom)
    offset = window_low_hu - slope * bottom
    return make_finding(
        "hu_range:window",
        low=low,
        high=high,
        slope=slope * facts.scale.slope,
        offset=slope * facts.scale.offset + offset,
        window_low=window_low_hu,
        window_high=window_high_hu,
    )


def _scaled_ends(low: float, high: float) -> tuple[float, float]:
    """Find the usual ends to which a window was scaled; `low` and `high` where none fits."""
    for bottom, top in USUAL_ENDS:
        is_inside = bottom <= low and high <= top
        # A range that fills less than half of the usual ends was not scaled to them.
        if is_inside and high - low >= (top - bottom) / 2:
            return bottom, top
    return low, high


def _is_soft_at(tissue: np.ndarray, offset_hu: int) -> bool:
    """Whether soft tissue lies where an offset would move it.

    The moved range of soft tissue holds enough voxels, and no fewer than the moved gap below it.

    Args:
        tissue: Counts of the values without spikes.
        offset_hu: HU by which all values would be too high; negative: too low.
    """
    soft_share = share_of(tissue, SOFT_HU[0] + offset_hu, SOFT_HU[1] + offset_hu)
    gap_share = share_of(tissue, GAP_HU[0] + offset_hu, GAP_HU[1] + offset_hu)
    return soft_share >= max(TISSUE_SHARE, gap_share)


def _is_inverted(tissue: np.ndarray) -> bool:
    """Whether the values were negated, so that air lies at the values of dense bone.

    An image in HU has more voxels of sparse than of dense bone. In an inverted image, air lies in
    the range of dense bone, which therefore has more voxels, and bone lies below soft tissue.
    Images with an offset, or of other modalities, have no voxels below soft tissue.

    Args:
        tissue: Counts of the values without spikes.
    """
    dense_bone_share = share_of(tissue, *NEGATED_AIR_HU)
    sparse_bone_share = share_of(tissue, *NEGATED_GAP_HU)
    air_share = share_of(tissue, *AIR_RANGE_HU)
    if dense_bone_share < TISSUE_SHARE or dense_bone_share <= sparse_bone_share:
        return False
    if dense_bone_share <= INVERTED_CONTRAST * air_share:
        return False
    return share_of(tissue, -np.inf, SOFT_HU[0]) >= PRESENT_SHARE


def _audit_padding(facts: ImageFacts) -> Iterator[Finding]:
    """Find constants outside the region that the scanner measured."""
    padding_share = share_of(facts.counts, -np.inf, PADDING_BELOW_HU)
    if padding_share >= PADDING_SHARE:
        # The sentence names the value of the padding if nearly all of the padding has it.
        commonest_hu = int(np.argmax(facts.counts[: PADDING_BELOW_HU + ZERO])) - ZERO
        predicate = f"lie below {PADDING_BELOW_HU}"
        if share_of(facts.counts, commonest_hu, commonest_hu + 1) > 0.9 * padding_share:
            predicate = f"hold {commonest_hu}"
        yield make_finding("padding:outside", share=padding_share, hold=predicate, air=AIR_HU)
    low_hu, high_hu = facts.measured_hu
    for value, spike_share in facts.spikes.items():
        # A spike near an end of the values is clipping, and one in the range of air is air.
        lowest_inner_hu = max(AIR_RANGE_HU[1], low_hu + SPIKE_REACH)
        is_inner = lowest_inner_hu < value < high_hu - SPIKE_REACH
        if spike_share >= SPIKE_REPORT_SHARE and is_inner:
            yield make_finding("padding:filled", share=spike_share, value=value, air=AIR_HU)


def _audit_low_clipping(facts: ImageFacts) -> Iterator[Finding]:
    """Find a lowest value at which software clipped the image."""
    low_hu, _ = facts.measured_hu
    share_at_low = facts.spikes.get(low_hu, 0.0)
    if low_hu > FLOOR_HU and share_at_low >= SPIKE_REPORT_SHARE:
        kind = "clipped:air" if low_hu <= NOMINAL_AIR_HU else "clipped:low"
        yield make_finding(kind, share=share_at_low, value=low_hu)


def _audit_high_clipping(facts: ImageFacts) -> Iterator[Finding]:
    """Find a highest value at which software clipped the image."""
    _, high_hu = facts.measured_hu
    # Any spike is reported, since few voxels of a patient are so bright.
    if high_hu in facts.spikes and high_hu < LOW_CEILING_HU:
        yield make_finding("clipped:high", share=facts.spikes[high_hu], value=high_hu)
