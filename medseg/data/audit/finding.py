"""Findings of the audit: the table of kinds, the findings of a case, the codes to ignore."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from medseg.errors import UserError
from medseg.findings import Finding, Severity
from medseg.geometry.grid import VoxelGrid


class Kind(NamedTuple):
    """One kind of finding.

    Attributes:
        severity: Consequence of the finding.
        message: Format of the sentence: a clause without a capital and without a full stop.
        cure: Format of the advice, a clause like the message; empty if there is none.
    """

    severity: Severity
    message: str
    cure: str = ""


ERROR = Severity.error
WARNING = Severity.warning
INFORMATION = Severity.information

_RESAMPLE = "resample the label map to the grid of the image with nearest neighbours"
_IGNORE_GRID = (
    "resample it to the image, or, if only its header is wrong, use its voxels as they are with "
    "data.ignore_findings=[label_grid]"
)
# A key is the code of a finding, which results list and a user may ignore. A variant follows the
# colon; it has a sentence, a cure and a severity of its own. `make_finding` fills in the fields in
# braces. Fields whose name does not say what they hold:
#   hold        what padding does, as in "hold -2000"
#   air         HU of air, `AIR_HU`; for `hu_range:inverted` the negative of air's HU
#   way         for `hu_offset` "high" or "low"; for `misplaced_labels` how the labels would have to
#               be moved, as in "mirrored left to right"
#   best, fit   see `medseg.data.audit.placement`; organs full of air in place have at least 2
#   s           "s" for several values, else ""
#   sign        "+", with which Hydra adds a key; "" where `data.label_values` has the key
#   difference  how two grids differ, a clause; for copies the distance of the two images
#   claim       what the case table says of the two cases, as in "the split is train here and val
#               there"; the variants `unclaimed` are for tables that say nothing
KINDS = {
    # Findings of the readers of files, which make them without `make_finding`. They stand here
    # because `CODES` needs them.
    "reading": Kind(WARNING, "{sentence}"),
    "left_out": Kind(INFORMATION, "{sentence}"),
    "hu_offset": Kind(
        ERROR,
        "the values run from {low:g} to {high:g}, and soft tissue lies at about {peak}: they are "
        "about {size} too {way} for HU",
        "data.hu_offset={offset:g} corrects them (predict: hu_offset={offset:g}), or the column "
        "hu_offset of the case table",
    ),
    "hu_range:constant": Kind(ERROR, "every voxel holds {low:g}", "export the scan again"),
    "hu_range:window": Kind(
        ERROR,
        "the values run from {low:g} to {high:g}: they are windowed or normalised, not HU",
        "convert the scan again from its DICOM files, or undo a known window: for one of "
        "{window_low} to {window_high} HU set data.hu_slope={slope:.6g} "
        "data.hu_offset={offset:.6g} (for predict: hu_slope={slope:.6g} "
        "hu_offset={offset:.6g}), or these columns of the case table",
    ),
    "hu_range:divided": Kind(
        ERROR,
        "the values run from {low:g} to {high:g}, and soft tissue lies near 0: they are HU divided "
        "by {divisor:g}",
        "data.hu_slope={slope:g} corrects them (predict: hu_slope={slope:g}), or the column "
        "hu_slope of the case table",
    ),
    "hu_range:clipped": Kind(
        ERROR,
        "the values run from {low:g} to {high:g}, and most of them lie near 0 or at the lower end: "
        "they may be HU divided by {divisor:g} and clipped, or those of another window",
        "if soft tissue lies near 0 and fat near -0.1, data.hu_slope={slope:g} corrects them "
        "(predict: hu_slope={slope:g}), or the column hu_slope of the case table; otherwise "
        "convert the scan again from its DICOM files",
    ),
    "hu_range:inverted": Kind(
        ERROR,
        "the values run from {low:g} to {high:g}, and {share:.0%} of the voxels lie near {air}, "
        "where bone is rare, with hardly any in the range of air: the image is inverted",
        "write the file again with its values times -1, or convert it again from its DICOM files",
    ),
    "hu_range:far": Kind(
        ERROR,
        "the values run from {low:g} to {high:g}, and {share:.0%} of the voxels lie below "
        "{limit:g}, far below air: this is no CT in HU",
        "give a CT in HU, or correct its scale with data.hu_slope and data.hu_offset (for predict: "
        "hu_slope and hu_offset)",
    ),
    "hu_range:other": Kind(
        ERROR,
        "the values run from {low:g} to {high:g}, and almost no voxel has the values of {lacking}: "
        "this is no CT in HU",
        "give a CT in HU, or correct its scale with data.hu_slope and data.hu_offset (for predict: "
        "hu_slope and hu_offset)",
    ),
    "no_air": Kind(
        WARNING,
        "no voxel is as dark as air or an organ full of it: the values run from {low:g} to "
        "{high:g}",
        "expected for a crop inside the body; otherwise check that the values are HU",
    ),
    "padding:outside": Kind(
        INFORMATION,
        "{share:.1%} of the voxels {hold}, which is padding outside the scanner's field of view",
        "nothing to do: it is read as air, {air} HU",
    ),
    "padding:replaced": Kind(
        WARNING,
        "{share:.1%} of the voxels hold exactly {value:g} HU up to the border of their slices: a "
        "constant was filled in outside the field of view",
        "nothing to do: it is read as air, {air} HU",
    ),
    "padding:filled": Kind(
        WARNING,
        "{share:.1%} of the voxels hold exactly {value} HU, the value of a tissue: a constant may "
        "have been filled in",
        "if they lie outside the field of view, replace them in the file by {air}",
    ),
    # Nothing in a patient is darker than air, so only noise was clipped.
    "clipped:air": Kind(
        INFORMATION,
        "{share:.1%} of the voxels hold the lowest value, {value} HU: the image was clipped there",
        "harmless if task.window_hu begins at {value} HU or above",
    ),
    "clipped:low": Kind(
        WARNING,
        "{share:.1%} of the voxels hold the lowest value, {value} HU: the image was clipped there",
        "harmless if task.window_hu begins at {value} HU or above",
    ),
    "clipped:high": Kind(
        WARNING,
        "{share:.1%} of the voxels hold the highest value, {value} HU: the image was clipped there",
        "harmless if task.window_hu ends at {value} HU or below",
    ),
    "label_shape": Kind(
        ERROR, "the label map has {shape} voxels, the image {image_shape} (z, y, x)", _RESAMPLE
    ),
    "label_shape:axes": Kind(
        ERROR,
        "the label map is stored in another order of axes than its image and is not on its grid: "
        "{difference}",
        _RESAMPLE,
    ),
    "label_grid": Kind(
        ERROR,
        "the label map is not on the grid of its image: {difference} (tolerance {tolerance_mm} mm)",
        _IGNORE_GRID,
    ),
    "misplaced_labels": Kind(
        ERROR,
        "the labels do not follow the edges of the image, but would if {way} (fit {best:.1f} "
        "instead of {fit:.1f}): they were written in another order of voxels",
        "look at the picture and write them again in the order of the image",
    ),
    "misplaced_labels:shifted": Kind(
        ERROR,
        "the labels would match the edges of the image only if they were moved {shifts}: the label "
        "map was shifted",
        "look at the picture; correct the origin in the header of the label map, or write it again",
    ),
    "unknown_values": Kind(
        ERROR,
        "the label map holds the value{s} {few}, which data.label_values does not name (it names "
        "{known})",
        "add them there, or {sign}data.label_values.background=[{all}] if they are not wanted",
    ),
    "unknown_values:many": Kind(
        ERROR,
        "the label map holds the value{s} {few}, …, which data.label_values does not name (it "
        "names {known})",
        "is it an image instead of a label map?",
    ),
    "empty_labels": Kind(
        ERROR,
        "the label map holds nothing but zeros",
        "export it again; if the image shows none of {regions}, write 'absent' into the columns "
        "trust_<region> of the case table",
    ),
    "swapped_sides": Kind(
        ERROR,
        "{left} lies at x = {left_mm:.0f} mm and {right} at {right_mm:.0f} mm, but the patient's "
        "left must lie at larger x (LPS): the labels are swapped",
        "look at the picture: if the labels are exchanged, correct data.label_values or the file; "
        "if the position of the body contradicts the header, correct the headers and leave "
        "data.label_values as they are: with exchanged values the network would learn swapped "
        "sides",
    ),
    "swapped_sides:position": Kind(
        ERROR,
        "{left} lies at x = {left_mm:.0f} mm and {right} at {right_mm:.0f} mm, but the patient's "
        "left must lie at larger x (LPS), and the body itself seems to be {position}, contrary to "
        "the header",
        "look at the picture; correct the headers of the image and the label map, and leave "
        "data.label_values as they are: with exchanged values the network would learn swapped "
        "sides",
    ),
    "body_position": Kind(
        WARNING,
        "the body seems to be {position}, contrary to the header: {sign}; left and right would be "
        "exchanged",
        "look at the picture; if it confirms this, correct the headers of the image and the label "
        "map",
    ),
    "mirrored_image": Kind(
        ERROR,
        "{sign}: the image seems to be mirrored, so that left and right are exchanged",
        "convert image and labels again from the DICOM files; if the organs of the patient are "
        "mirrored, write 'mirrored_image' into the column ignore_findings of the case table",
    ),
    "mirrored_image:doubtful": Kind(
        WARNING,
        "{sign}, but heart and aorta do not say so: the image may be mirrored, so that left and "
        "right are exchanged",
        "look at the picture; if it confirms this, convert image and labels again from the DICOM "
        "files",
    ),
    "implausible_volume": Kind(
        WARNING,
        "{name} has {volume_ml:.4g} ml, expected {low:g} to {high:g} ml",
        "check the spacing in the header and the labels; task.volume_ml.{name} holds the range",
    ),
    "implausible_volume:far": Kind(
        ERROR,
        "{name} has {volume_ml:.4g} ml, far above {low:g} to {high:g} ml",
        "correct the spacing in the header or the labels; task.volume_ml.{name} holds the range, "
        "and ~task.volume_ml.{name} turns the check off",
    ),
    "implausible_volume:tiny": Kind(
        ERROR,
        "{name} has {volume_ml:.3g} ml although the scan does not cut it, far below {low:g} to "
        "{high:g} ml",
        "correct the spacing in the header or the labels; task.volume_ml.{name} holds the range, "
        "and ~task.volume_ml.{name} turns the check off",
    ),
    "implausible_size:scan": Kind(
        ERROR,
        "the scan is {extent} mm large (z, y, x), which shows no part of a patient: a field of "
        "view has between {least_mm:g} mm and {most_mm:g} mm",
        "correct the spacing in the header, which may be in another unit than mm",
    ),
    "implausible_size:region": Kind(
        ERROR,
        "{name} extends over {extent} mm (z, y, x), but no organ or bone of one side is longer "
        "than {most_mm:g} mm",
        "correct the spacing in the header, often the distance of the slices",
    ),
    "doubtful_side": Kind(
        WARNING,
        "only {region} is labelled, and it lies {off_mm:.0f} mm across the body's midline, on the "
        "opposite side",
        "look at the picture and correct data.label_values or the file if the side is wrong",
    ),
    "missing_region": Kind(
        WARNING,
        "{region} is not in the label map",
        "if the image does not show it, write 'absent' into the column trust_{region} of the case "
        "table",
    ),
    "missing_region:many": Kind(
        WARNING,
        "the label map has none of {region}",
        "if the image does not show them, write 'absent' into their columns trust_<region> of the "
        "case table",
    ),
    "touching_regions": Kind(
        WARNING,
        "{left} and {right} touch over {area:.1f} cm²",
        "look at the picture: the border between them may be an artefact of automatic segmentation",
    ),
    "cut_region": Kind(
        WARNING,
        "the scan cuts {regions}",
        "expected for a partial scan; volumes are those of the visible part",
    ),
    "vanished_region": Kind(
        WARNING,
        "{region} has {volume_ml:.2g} ml, and none of it is left at {spacing} mm",
        "choose a finer spacing for that stage",
    ),
    "spacing_outlier": Kind(
        WARNING,
        "{differences}",
        "expected if the scanner was set so; otherwise the header may use another unit",
    ),
    "duplicate_image": Kind(
        WARNING,
        "its image has the same voxels as the case {twin!r} of the same patient",
        "remove one of them, otherwise the scan counts twice",
    ),
    "duplicate_image:patients": Kind(
        ERROR,
        "its image has the same voxels as the case {twin!r}, but the patient is {patient!r} here "
        "and {twin_patient!r} there: one could be used for training and the other for validation",
        "remove one of them, or give both the same patient in the case table",
    ),
    "near_copy": Kind(
        ERROR,
        "its image is nearly that of the case {twin!r} ({difference:.1f} HU apart), but {claim}: "
        "one could be used for training and the other for validation",
        "remove one of them, or give both the same patient in the case table",
    ),
    "near_copy:unclaimed": Kind(
        WARNING,
        "its image is nearly that of the case {twin!r} ({difference:.1f} HU apart): one could be "
        "used for training and the other for validation",
        "if they show one patient, remove one of them, or give both the same patient in the case "
        "table",
    ),
    "near_copy:scaled": Kind(
        ERROR,
        "its image is that of the case {twin!r} up to scale and shift of its values (within "
        "{difference:.1%}), but {claim}: one could be used for training and the other for "
        "validation",
        "remove one of them, or give both the same patient in the case table",
    ),
    "near_copy:scaled_unclaimed": Kind(
        WARNING,
        "its image is that of the case {twin!r} up to scale and shift of its values (within "
        "{difference:.1%}): one could be used for training and the other for validation",
        "if they show one patient, remove one of them, or give both the same patient in the case "
        "table",
    ),
    "near_copy:profile": Kind(
        ERROR,
        "slice by slice it shows the same areas of fat, soft tissue and bone as the case {twin!r} "
        "(within {difference:.1%}), of which it may be a cropped or resampled copy, but {claim}: "
        "one could be used for training and the other for validation",
        "remove one of them, or give both the same patient in the case table",
    ),
    "near_copy:profile_unclaimed": Kind(
        WARNING,
        "slice by slice it shows the same areas of fat, soft tissue and bone as the case {twin!r} "
        "(within {difference:.1%}), of which it may be a cropped or resampled copy: one could be "
        "used for training and the other for validation",
        "if they show one patient, remove one of them, or give both the same patient in the case "
        "table",
    ),
}

# Each code once, without its variants.
CODES = tuple(dict.fromkeys(name.partition(":")[0] for name in KINDS))

NEVER_IGNORED = {
    "label_shape": (
        "the label map has another number of voxels than the image, or another order of axes"
    )
}
"""Codes that cannot be ignored, and the reason."""


@dataclass(frozen=True)
class CaseAudit:
    """Measurements and findings of one case.

    Attributes:
        grid: Grid of the oriented scan, before any resampling.
        hu: `min`, `p01`, `p50`, `p99`, `max` (percentiles) of the first channel, in HU if it is a
            CT, else in its own unit.
        voxels_sha256: Hash of the voxels of the first channel; equal for copies of one scan.
        volumes_ml: Label name to volume; empty if there are no labels.
        thumbnail: Means in HU of the first channel in the 8 × 8 × 8 equal blocks of the scan, which
            nearly equal scans share; empty if its values are not HU, or an axis has fewer than 8
            voxels.
        profile: Areas of tissues along the body in mm², see `medseg.data.audit.tissue_profile`;
            empty if the values are not HU, or the scan is too short.
        findings: All findings, those that the case ignores included.
    """

    grid: VoxelGrid
    hu: dict[str, float]
    voxels_sha256: str
    volumes_ml: dict[str, float]
    findings: tuple[Finding, ...]
    thumbnail: tuple[int, ...] = ()
    profile: tuple[tuple[int, ...], ...] = ()

    def not_ignored(self, ignore_findings: Iterable[str], *severities: Severity) -> list[Finding]:
        """List the findings of some severities whose codes are not in `ignore_findings`."""
        return [
            finding
            for finding in self.findings
            if finding.severity in severities and finding.code not in ignore_findings
        ]

    def to_dict(self) -> dict[str, Any]:
        """Convert to a dictionary that `json` can write."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> CaseAudit:
        """Read what `to_dict` wrote."""
        findings = []
        for values in data["findings"]:
            # JSON has the severity as text.
            severity = Severity(values["severity"])
            findings.append(Finding(**(values | {"severity": severity})))
        # JSON turns tuples into lists, and objects into mappings.
        restored = {
            "grid": VoxelGrid(**data["grid"]),
            "findings": tuple(findings),
            "thumbnail": tuple(data["thumbnail"]),
            "profile": tuple(map(tuple, data["profile"])),
        }
        return cls(**(data | restored))


def make_finding(kind: str, **values: Any) -> Finding:
    """Make a finding of a kind.

    Args:
        kind: Key of `KINDS`.
        values: Fields of its sentence and its cure; surplus fields are ignored.
    """
    severity, message, cure = KINDS[kind]
    code, _, _ = kind.partition(":")
    return Finding(code, severity, message.format(**values), cure.format(**values))


def check_ignored(codes: Collection[str], where: str) -> frozenset[str]:
    """Check the codes that a user wants to ignore.

    Args:
        codes: Codes as they are written in the configuration or the case table.
        where: The key or the cell, for the message.

    Raises:
        UserError: If a code does not exist, or may not be ignored.
    """
    for code in codes:
        if code in NEVER_IGNORED:
            raise UserError(
                f"{where}: {code} cannot be ignored, since {NEVER_IGNORED[code]}; correct the file."
            )
        if code not in CODES:
            hint = f"there are {', '.join(CODES)}."
            close = difflib.get_close_matches(code, CODES, n=2)
            if close:
                hint = f"did you mean {' or '.join(close)}?"
            raise UserError(f"{where}: there is no finding {code!r}; {hint}")
    return frozenset(codes)
