"""Views of the stages: scans or crops, their sizes, and the smallest structure in them."""

import math
from dataclasses import dataclass
from statistics import median

from medseg.data.options import StageName
from medseg.knob import Triple
from medseg.studies.configure.fingerprint import CaseFacts, Fingerprint, median_triple

# Voxels across the smallest label at the finest and at the coarsest spacing. The surface of a label
# errs by about 0.15 of a voxel, which costs a ball of n voxels across a Dice of 3 · 0.15 / n: 0.01
# at 48 voxels, 0.04 at 12.
VOXELS_ACROSS = 48
LEAST_VOXELS_ACROSS = 12
# Voxels across the smallest label at the finest spacing of the fine stage. It may be finer than
# that of a single stage, since all that it labels lies in the crop of a region.
FINE_VOXELS_ACROSS = 96
# Margin on every side of a crop, as in `conf/stage/fine.yaml`, mm.
CROP_MARGIN_MM = 10.0
# Largest sample of the coarse stage, as in `conf/stage/coarse.yaml`, voxels.
COARSE_MAX_VOXELS = 8_000_000
# Finest and coarsest spacing of the coarse stage, mm, unless a region is small. The finest is the
# default of this stage; two voxels of the coarsest fill the margin of a crop.
COARSE_FINEST_MM, COARSE_COARSEST_MM = 2.0, CROP_MARGIN_MM / 2
# Least number of voxels across the smallest region in the coarse stage.
REGION_VOXELS_ACROSS = 8
# Share of the time for training steps that the coarse stage of a cascade gets.
COARSE_SHARE = 0.25


@dataclass(frozen=True)
class StageView:
    """What a stage sees of the cases.

    Attributes:
        stage: The stage.
        extent_mm: Median lengths of its inputs, (z, y, x): of the scans or, for the fine stage, of
            the crops.
        largest_mm: Lengths of its largest input, (z, y, x).
        case_mm3: Median volume of all inputs of a case: of the scan, or of its crops together.
        scan_spacing_mm: Median spacing of the scans, (z, y, x), which show no finer detail.
        structure: Name of the smallest label or, for the coarse stage, of the smallest region.
        structure_mm: Median distance across this structure.
        finest_mm: Finest spacing that is of use.
        coarsest_mm: Coarsest spacing that is good enough.
        time_share: Share of the time for training steps that the stage gets.
    """

    stage: StageName
    extent_mm: Triple
    largest_mm: Triple
    case_mm3: float
    scan_spacing_mm: Triple
    structure: str
    structure_mm: float
    finest_mm: float
    coarsest_mm: float
    time_share: float

    def case_voxels(self, spacing_mm: Triple) -> float:
        """Count the voxels of the inputs of the median case at a spacing."""
        return self.case_mm3 / math.prod(spacing_mm)


def single_view(fingerprint: Fingerprint) -> StageView:
    """Describe what a single stage sees: all labels in the whole scans."""
    label, size_mm = fingerprint.smallest_label
    return StageView(
        stage=StageName.single,
        extent_mm=fingerprint.extent_mm,
        largest_mm=fingerprint.largest.extent_mm,
        case_mm3=math.prod(fingerprint.extent_mm),
        scan_spacing_mm=fingerprint.spacing_mm,
        structure=label,
        structure_mm=size_mm,
        finest_mm=size_mm / VOXELS_ACROSS,
        coarsest_mm=size_mm / LEAST_VOXELS_ACROSS,
        time_share=1.0,
    )


def cascade_views(fingerprint: Fingerprint) -> tuple[StageView, StageView]:
    """Describe what both stages of a cascade see.

    The coarse stage sees the regions in the whole scans, the fine stage the labels in crops. A case
    must have a region.
    """
    region, region_mm = fingerprint.smallest_region
    coarsest_mm = min(COARSE_COARSEST_MM, region_mm / REGION_VOXELS_ACROSS)
    coarse = StageView(
        stage=StageName.coarse,
        extent_mm=fingerprint.extent_mm,
        largest_mm=fingerprint.largest.extent_mm,
        case_mm3=math.prod(fingerprint.extent_mm),
        scan_spacing_mm=fingerprint.spacing_mm,
        structure=region,
        structure_mm=region_mm,
        finest_mm=min(COARSE_FINEST_MM, coarsest_mm),
        coarsest_mm=coarsest_mm,
        time_share=COARSE_SHARE,
    )
    label, label_mm = fingerprint.smallest_label
    crops = [crops_mm(case) for case in fingerprint.cases if case.regions]
    all_crops = [lengths_mm for case_crops in crops for lengths_mm in case_crops]
    fine = StageView(
        stage=StageName.fine,
        extent_mm=median_triple(all_crops),
        largest_mm=max(all_crops, key=math.prod),
        case_mm3=median(sum(map(math.prod, case_crops)) for case_crops in crops),
        scan_spacing_mm=fingerprint.spacing_mm,
        structure=label,
        structure_mm=label_mm,
        finest_mm=label_mm / FINE_VOXELS_ACROSS,
        coarsest_mm=label_mm / LEAST_VOXELS_ACROSS,
        time_share=1 - COARSE_SHARE,
    )
    return coarse, fine


def stage_views(fingerprint: Fingerprint) -> dict[StageName, StageView]:
    """Map each stage that could be trained to what it sees."""
    views = [single_view(fingerprint)]
    if any(case.regions for case in fingerprint.cases):
        views += cascade_views(fingerprint)
    return {view.stage: view for view in views}


def crops_mm(case: CaseFacts) -> list[Triple]:
    """List the lengths of the crops of a case, (z, y, x): its regions with their margins."""
    crops = []
    for region in case.regions.values():
        depth_mm, height_mm, width_mm = (
            length_mm + 2 * CROP_MARGIN_MM for length_mm in region.extent_mm
        )
        crops.append((depth_mm, height_mm, width_mm))
    return crops
