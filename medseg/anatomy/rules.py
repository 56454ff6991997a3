"""Rules: one table of all thresholds about patients and organs, but for those of a task.

Other modules import the values by name; `RULES` has the meaning, the unit and the source of each.
`python -m medseg.anatomy.rules` prints the table of `docs/rules.md`. The plausible volumes of an
organ are in its task, `conf/task/`.
"""

from dataclasses import dataclass

# Outline of the patient.
SOFT_TISSUE_HU = -300.0
EROSION_MM = 5.0
LEAST_PIECE_SHARE = 0.1
READ_SPACING_MM = 4.0
MAX_BEYOND_SHARE = 0.9
# Parts and regions.
MIN_PART_FRACTION = 0.1
MIN_REGION_ML = 5.0
MIN_REPORTED_ML = 5.0
MAX_GAS_SHARE = 0.5
MAX_UNSEEN_SHARE = 0.9
# Agreement of two stages.
USUAL_AGREEMENT = 0.85
MIN_AGREEMENT = 0.1
MIN_DOUBTFUL_SHARE = 0.03
# Sides.
MAX_OTHER_SIDE = 0.005
MAX_VOLUME_RATIO = 8.0
CUT_SHARE = 0.5
OPEN_SHARE = 0.05
MAX_WALL_MM = 120.0
SIDE_SHARE = 0.08
TOUCHING_CM2 = 3.0
# Position of the patient.
AIRY_HU = -500.0
AIRLESS_HU = -200.0
END_SHARE = 0.05
SPINE_HU = 200.0
SPINE_REACH_MM = 35.0
SPINE_SHARE = 1 / 3
UPSIDE_DOWN_EXCESS = -0.05
# Plausible volumes and extents.
FAR_FACTOR = 2.0
TINY_FACTOR = 12.0
EXTENT_MM = (20.0, 2800.0)
MAX_REGION_MM = 600.0
REGION_MM = (270.0, 200.0, 160.0)
# Windows of a CT that a viewer offers.
CT_WINDOWS_HU = {"lung": (-1350.0, 150.0), "soft tissue": (-160.0, 240.0), "bone": (-500.0, 1024.0)}
# Painted disease.
RIM_MM = 2.0
MAX_LUNG_HU = -300.0


@dataclass(frozen=True)
class Rule:
    """One threshold.

    Attributes:
        code: Its name in this module, in small letters.
        value: A number, or one per end or axis (z, y, x).
        unit: `HU`, `mm`, `ml`, `cm²`, `share` (of 1), `ratio` or `Dice`.
        meaning: What it decides.
        source: Where it comes from: a measurement, a publication, or a choice.
        num_scans: Scans that it was measured on; None where it was chosen without a count.
    """

    code: str
    value: float | tuple[float, ...]
    unit: str
    meaning: str
    source: str
    num_scans: int | None = None


# Sources of several rules.
_CHOSEN = "choice"
_COHORT = "cross-validation"

RULES = (
    Rule("soft_tissue_hu", SOFT_TISSUE_HU, "HU", "denser voxels may be the patient", _CHOSEN),
    Rule(
        "erosion_mm",
        EROSION_MM,
        "mm",
        "a part thinner than twice this is not of the patient",
        "shells of tables and folds of blankets are thinner",
    ),
    Rule(
        "least_piece_share",
        LEAST_PIECE_SHARE,
        "share",
        "a piece of the patient has at least this share of the largest piece",
        "both thighs, or an arm beside the trunk, are pieces",
    ),
    Rule(
        "read_spacing_mm",
        READ_SPACING_MM,
        "mm",
        "the outline of the patient is found at about this spacing, if the scan is finer",
        "choice, to save time",
    ),
    Rule(
        "max_beyond_share",
        MAX_BEYOND_SHARE,
        "share",
        "a component is no organ if more of it lies beyond the outline of the patient",
        "of each of 59 lungs at most 10 % lies beyond",
        33,
    ),
    Rule(
        "min_part_fraction",
        MIN_PART_FRACTION,
        "share",
        "a label keeps components of at least this share of its largest",
        _CHOSEN,
    ),
    Rule(
        "min_region_ml",
        MIN_REGION_ML,
        "ml",
        "a smaller region on the coarse grid is absent",
        _CHOSEN,
    ),
    Rule(
        "min_reported_ml",
        MIN_REPORTED_ML,
        "ml",
        "the removal of a smaller volume is not reported",
        _CHOSEN,
    ),
    Rule(
        "max_gas_share",
        MAX_GAS_SHARE,
        "share",
        "a component is gas if more of it lies below `task.least_hu`",
        "half: its median is then below this limit",
    ),
    Rule(
        "max_unseen_share",
        MAX_UNSEEN_SHARE,
        "share",
        "a fine component is removed if the coarse stage misses more of it",
        "held-out scanner with foam beside the patient",
        2,
    ),
    Rule(
        "usual_agreement",
        USUAL_AGREEMENT,
        "Dice",
        "less agreement of the two stages causes a warning",
        "cross-validation, 61 regions",
    ),
    Rule(
        "min_agreement",
        MIN_AGREEMENT,
        "Dice",
        "a region with less agreement is absent",
        "three of 61 regions had less; none of the three was a lung",
    ),
    Rule(
        "min_doubtful_share",
        MIN_DOUBTFUL_SHARE,
        "share",
        "a region is absent if its agreement is below `usual_agreement` and its volume below this "
        "share of the smallest plausible volume",
        _COHORT,
        33,
    ),
    Rule(
        "max_other_side",
        MAX_OTHER_SIDE,
        "share",
        "in a region the coarse stage gives a share of the probability to the other side; a "
        "warning above this",
        "whole scans reach 0.3 %",
        30,
    ),
    Rule(
        "max_volume_ratio",
        MAX_VOLUME_RATIO,
        "ratio",
        "a larger ratio of left and right volume causes a warning",
        _CHOSEN,
    ),
    Rule(
        "cut_share",
        CUT_SHARE,
        "share",
        "a lateral face of the image cuts the patient if more of it is denser than air",
        _COHORT,
        33,
    ),
    Rule(
        "open_share",
        OPEN_SHARE,
        "share",
        "a plane lies beyond the skin if at most this share of it is denser than air",
        _COHORT,
        33,
    ),
    Rule(
        "max_wall_mm",
        MAX_WALL_MM,
        "mm",
        "only one lung is found, and the scan is cut where its chest wall should be: a warning if "
        "the skin on the opposite side is at most this far from this lung",
        _COHORT,
        33,
    ),
    Rule(
        "side_share",
        SIDE_SHARE,
        "share",
        "a reference has labels of one side only: the side is doubtful if their centre lies beyond "
        "the body's midline by more than this share of the body's width",
        _CHOSEN,
    ),
    Rule(
        "touching_cm2",
        TOUCHING_CM2,
        "cm²",
        "two regions that touch over a larger area cause a warning",
        "separately drawn lungs share up to 1.1 cm² in front of the heart",
    ),
    Rule("airy_hu", AIRY_HU, "HU", "an organ with a lower median is full of air", _CHOSEN),
    Rule(
        "airless_hu",
        AIRLESS_HU,
        "HU",
        "a higher median of one side causes a warning if the other is full of air",
        "lungs, most of them ill: -891 to -643; fluid where six lungs were: 7 to 17",
        11,
    ),
    Rule(
        "end_share", END_SHARE, "share", "share of a lung's voxels that counts as its end", _CHOSEN
    ),
    Rule("spine_hu", SPINE_HU, "HU", "denser voxels are bone at 2 mm", _CHOSEN),
    Rule(
        "spine_reach_mm",
        SPINE_REACH_MM,
        "mm",
        "the spine is expected within this distance of the middle",
        _CHOSEN,
    ),
    Rule(
        "spine_share",
        SPINE_SHARE,
        "share",
        "share of the slices with more bone at the back; below this the body is turned",
        "measured 1.0; with contrast agent in the heart 0.48 to 0.70",
        11,
    ),
    Rule(
        "upside_down_excess",
        UPSIDE_DOWN_EXCESS,
        "share",
        "each end of a lung fills a share of its bounding rectangle; `prepare` warns of upside "
        "down if the upper share minus the lower share is below this",
        "upper ends fill 0.60 to 0.81, lower ends 0.18 to 0.51",
    ),
    Rule(
        "far_factor",
        FAR_FACTOR,
        "ratio",
        "a volume larger than this times its upper limit is an error of the header",
        _CHOSEN,
    ),
    Rule(
        "tiny_factor",
        TINY_FACTOR,
        "ratio",
        "a volume smaller than its lower limit divided by this is an error of the header",
        "500 ml / 12 = 42 ml; a newborn's lung has some 45 ml",
    ),
    Rule(
        "extent_mm",
        EXTENT_MM,
        "mm",
        "no scan of a patient is smaller or larger",
        "an inner ear of 50 mm, a body of 2 m on its table",
    ),
    Rule(
        "max_region_mm",
        MAX_REGION_MM,
        "mm",
        "no organ or bone of one side is longer",
        "femur, 27 % of the stature (Feldesman 1990), at 2.2 m; lungs reach 0.35 m",
    ),
    Rule(
        "region_mm",
        REGION_MM,
        "mm",
        "box of a region with its margin in the forecast of memory",
        "a lung",
    ),
    Rule(
        "rim_mm",
        RIM_MM,
        "mm",
        "disease is painted up to this far beyond the labels, whose outline lies half way between "
        "the densities of lung and soft tissue",
        _CHOSEN,
    ),
    Rule(
        "max_lung_hu",
        MAX_LUNG_HU,
        "HU",
        "disease is painted into no organ with a larger median",
        _CHOSEN,
    ),
)
"""All thresholds, in the order of the table."""


def markdown_table() -> str:
    """Write the table of the documentation, one row for each rule."""
    rows = [
        "| rule | value | unit | what it decides | source | scans |",
        "|---|--:|---|---|---|--:|",
    ]
    for rule in RULES:
        scans = "–" if rule.num_scans is None else str(rule.num_scans)
        rows.append(
            f"| `{rule.code}` | {_as_text(rule.value)} | {rule.unit} | {rule.meaning} | "
            f"{rule.source} | {scans} |"
        )
    return "\n".join(rows) + "\n"


def _as_text(value: float | tuple[float, ...]) -> str:
    """Write a number with three digits, or several with commas."""
    if isinstance(value, tuple):
        return ", ".join(f"{number:g}" for number in value)
    return f"{value:.3g}"


if __name__ == "__main__":
    print(markdown_table(), end="")
