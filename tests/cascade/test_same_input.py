"""Training and prediction feed the network the same numbers, also for scans with padding."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from composed import train_config
from oracle import GRID, RULES, TASK, CoarseOracle, FineOracle, scan, stage
from torch import Tensor, nn

from medseg.cascade.cascade import Cascade, RegionBox
from medseg.data.cache import CachedCase, prepare_case
from medseg.data.case_table import Case, CaseSource, Split
from medseg.data.crops import StageCrops
from medseg.data.options import RegionFrom, StageName, StageOptions
from medseg.data.samples import Samples, collate
from medseg.geometry.grid_rule import Crop, GridRule
from medseg.io.read import read_image
from medseg.io.write import write_image, write_labels
from medseg.preprocess.options import Fill, Resampling, SpacingOptions, SpacingStrategy
from medseg.preprocess.resample import RESAMPLINGS
from medseg.task import Channel, Region
from medseg.training.data_module import CasesDataModule, kept_probs

LOW_HU, HIGH_HU = TASK.window_hu
ONE_HU = 2.0 / (HIGH_HU - LOW_HU)  # the cache holds whole HU


class Watching(nn.Module):
    """Keeps the images that an oracle is given."""

    def __init__(self, oracle: nn.Module) -> None:
        super().__init__()
        self.oracle = oracle
        self.divisor = oracle.divisor
        self.seen: list[Tensor] = []

    def forward(self, image: Tensor) -> Tensor:
        self.seen.append(image.clone())
        return self.oracle(image)


class FirstChannel(nn.Module):
    """Shows an oracle the first channel alone."""

    def __init__(self, oracle: nn.Module) -> None:
        super().__init__()
        self.oracle = oracle
        self.divisor = oracle.divisor

    def forward(self, image: Tensor) -> Tensor:
        return self.oracle(image[:, :1])


@dataclass(frozen=True)
class PredictedCrops(StageCrops):
    """Crops of a prediction.

    Attributes:
        boxes: Region name to the crop in which the prediction refined it.
    """

    boxes: dict[str, RegionBox] = field(default_factory=dict)

    def crop(self, case: CachedCase, region: Region, rng: np.random.Generator | None) -> Crop:
        return Crop(case.grid, self.boxes[region.name].voxels)


def written(folder: Path) -> Case:
    """A scan with padding that is no HU, and metal."""
    volume, labels = scan()
    image_hu = volume.array.copy()
    image_hu[:, :20] = -3024  # through the boxes of both regions, beside their blocks
    image_hu[:, 20:26] = -400
    image_hu[12:14, 40:44, 90:94] = 30000
    write_image(folder / "ct.nii.gz", image_hu, GRID)
    write_labels(folder / "labels.nii.gz", labels, GRID)
    # An oracle's scan has the values of no tissue.
    return Case(
        "a",
        folder / "ct.nii.gz",
        folder / "labels.nii.gz",
        "a",
        ignore_findings=frozenset({"hu_range"}),
    )


@pytest.mark.parametrize("resampling", RESAMPLINGS)
def test_a_padded_scan_with_metal_looks_the_same_in_training_and_in_prediction(
    resampling: str, tmp_path: Path
) -> None:
    case = written(tmp_path)
    coarse, fine = Watching(CoarseOracle()), Watching(FineOracle())
    stages = (
        stage(coarse, "coarse", resampling=resampling),
        stage(fine, "fine", region_margin_mm=15.0, resampling=resampling),
    )
    result = Cascade(*stages).segment(read_image(case.image))

    names = {1: "left_lung", 2: "right_lung"}
    entries = [
        prepare_case(case, tmp_path, one.spacing_mm, TASK, names, resampling=resampling)
        for one in stages
    ]
    whole = Samples(
        entries[:1],
        TASK,
        StageCrops(divisor=coarse.divisor),
        StageOptions(name=StageName.coarse),
        seed=0,
    )[0]["image"]
    torch.testing.assert_close(coarse.seen[0][0], whole, rtol=0, atol=ONE_HU)

    crops = PredictedCrops()
    crops.boxes.update(result.boxes)
    samples = Samples(entries[1:], TASK, crops, StageOptions(name=StageName.fine), seed=0)
    images = {sample["region"]: sample["image"] for sample in (samples[n] for n in range(2))}
    assert np.ptp(images[0].numpy()) == 2.0
    for number, seen in enumerate(fine.seen):
        torch.testing.assert_close(seen[0], images[number], rtol=0, atol=ONE_HU)


def spacing_of(
    rule: GridRule, spacing_mm: tuple[float, float, float] | None, resampling: str
) -> SpacingOptions:
    """The keys that make a rule."""
    strategy = SpacingStrategy.multi_scale
    if rule.is_cube:
        strategy = SpacingStrategy.fixed_resolution
    elif rule.size is not None:
        strategy = SpacingStrategy.fixed_size
    return SpacingOptions(
        target_spacing_mm=spacing_mm,
        strategy=strategy,
        size=rule.size,
        range_mm=rule.range_mm,
        fill=Fill.pad if rule.is_padded else Fill.widen,
        resampling=Resampling(resampling),
    )


# Each rule with one resampling, and each resampling with two rules; all pairs are slow.
PAIRS = [
    pytest.param(
        rule, resampling, marks=[] if row % len(RESAMPLINGS) == column else pytest.mark.slow
    )
    for row, rule in enumerate(RULES)
    for column, resampling in enumerate(RESAMPLINGS)
]


@pytest.mark.parametrize(("rule", "resampling"), PAIRS)
def test_every_rule_makes_the_same_of_a_case_in_validation_and_in_prediction(
    rule: str, resampling: str, tmp_path: Path
) -> None:
    case = written(tmp_path)
    spacing_mm, how = RULES[rule]
    watching = Watching(CoarseOracle()), Watching(FineOracle())
    coarse = stage(watching[0], "coarse", spacing_mm=spacing_mm, rule=how, resampling=resampling)
    fine = stage(
        watching[1],
        "fine",
        region_margin_mm=15.0,
        spacing_mm=spacing_mm,
        rule=how,
        resampling=resampling,
    )
    result = Cascade(coarse, fine).segment(read_image(case.image))
    seen = [watching[0].seen, watching[1].seen]
    source = CaseSource(Split((case,), (case,), ()), {1: "left_lung", 2: "right_lung"}, 1.0)
    for one, coarse_boxes, images in ((coarse, None, seen[0]), (fine, coarse, seen[1])):
        base = train_config("stage=coarse" if one is coarse else "stage=fine", "data.num_workers=0")
        config = replace(
            base,
            stage=replace(
                base.stage,
                slab_share=None,
                elsewhere_share=None,
                region_margin_mm=15.0,
                region_from=RegionFrom.coarse,
            ),
            spacing=spacing_of(how, spacing_mm, resampling),
            data=replace(base.data, cache=str(tmp_path)),
        )
        data = CasesDataModule(config, [source], TASK, divisor=(8, 8, 8), coarse=coarse_boxes)
        data.prepare_data()
        watched = [image[0] for image in images]
        data.setup("fit")
        samples = sorted(
            (data.val_samples()[n] for n in range(len(watched))),
            key=lambda sample: sample["region"],
        )
        for sample, image in zip(samples, watched, strict=True):
            (batch,) = collate([sample], (8, 8, 8))
            # The cache holds whole HU, which resampling mixes.
            torch.testing.assert_close(batch["image"][0], image, rtol=0, atol=ONE_HU)
        if one is fine:
            for sample, region in zip(samples, TASK.regions, strict=True):
                assert sample["spacing_mm"] == result.boxes[region.name].grid.spacing_mm


def test_the_coarse_channel_is_the_same_in_training_and_in_prediction(tmp_path: Path) -> None:
    case = written(tmp_path)
    watching = Watching(FirstChannel(FineOracle()))
    coarse = stage(CoarseOracle(), "coarse")
    fine = stage(watching, "fine", region_margin_mm=15.0, has_coarse_channel=True)
    result = Cascade(coarse, fine).segment(read_image(case.image))
    entry = prepare_case(case, tmp_path, fine.spacing_mm, TASK, {1: "left_lung", 2: "right_lung"})
    crops = PredictedCrops(coarse_probs={"a": kept_probs(entry, coarse, TASK)})
    crops.boxes.update(result.boxes)
    samples = Samples([entry], TASK, crops, StageOptions(name=StageName.fine), seed=0)
    images = {sample["region"]: sample for sample in (samples[n] for n in range(2))}
    for number, seen in enumerate(watching.seen):
        image, target = images[number]["image"], images[number]["target"]
        torch.testing.assert_close(seen[0, 0], image[0], rtol=0, atol=ONE_HU)
        assert (image[1].min(), image[1].max()) == (-1.0, 1.0)
        # In training the coarse stage sees the cached scan, resampled once more: edges differ a
        # little.
        differences = (seen[0, 1] - image[1]).abs()
        assert differences.mean() < 0.05
        # It shows this region, not the other one.
        for channel in (image[1], seen[0, 1]):
            found = channel > 0
            assert (found & (target == 1)).sum() > 0.9 * (target == 1).sum()
            assert (found & (target == 0)).sum() < 0.5 * found.sum()


@pytest.mark.parametrize("normalise", ["zscore", "percentile"])
def test_a_second_channel_looks_the_same_in_training_and_in_prediction(
    normalise: str, tmp_path: Path
) -> None:
    case = written(tmp_path)
    mr = np.random.default_rng(0).gamma(2.0, 120.0, GRID.shape).astype(np.float32)
    mr[:, :12] = 0
    write_image(tmp_path / "mr.nii.gz", mr, GRID)
    case = replace(case, more_images=(tmp_path / "mr.nii.gz",))
    task = replace(TASK, regions=(), channels=(*TASK.channels, Channel("mr", None, normalise)))

    watching = Watching(FirstChannel(CoarseOracle()))
    one = stage(watching, "coarse", task)
    Cascade(one).segment(read_image(case.image), [read_image(tmp_path / "mr.nii.gz").array])
    entry = prepare_case(case, tmp_path, one.spacing_mm, task, {1: "left_lung", 2: "right_lung"})
    (batch,) = collate(
        [
            Samples(
                [entry],
                task,
                StageCrops(divisor=(8, 8, 8)),
                StageOptions(name=StageName.coarse),
                seed=0,
            )[0]
        ],
        (8, 8, 8),
    )
    assert watching.seen[0].shape == batch["image"].shape
    torch.testing.assert_close(watching.seen[0][:, 1], batch["image"][:, 1], rtol=0, atol=1e-4)
    torch.testing.assert_close(watching.seen[0][:, 0], batch["image"][:, 0], rtol=0, atol=ONE_HU)
