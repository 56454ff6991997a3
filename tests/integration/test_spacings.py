"""Every spacing strategy trains both stages and predicts from the checkpoints alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from medseg.io.read import read_grid, read_image
from medseg.prediction.segmenter import LungSegmenter

from .conftest import train

STRATEGIES = {
    "anisotropic": ["spacing=anisotropic", "spacing.target_spacing_mm=[8.0,3.0,3.0]"],
    "dataset_median": ["spacing=dataset_median"],
    "dataset_mean": ["spacing=dataset_mean"],
    "native": ["spacing=native"],
    "fixed_size": ["spacing=fixed_size", "spacing.size=[32,48,32]"],
    "multi_scale": ["spacing=multi_scale", "spacing.range_mm=[4.4,5.0]", "spacing.draw=tail"],
    "fixed_resolution": ["spacing=fixed_resolution", "spacing.target_spacing_mm=[4.0,4.0,4.0]"],
}
SPACINGS_MM = {
    "anisotropic": (8.0, 3.0, 3.0), "dataset_median": (6.0, 4.05, 4.5),
    "dataset_mean": (6.0, 4.05, 4.5), "native": None,
    "fixed_size": None, "fixed_resolution": (4.0, 4.0, 4.0), "multi_scale": None,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "patch",
    [
        [],
        pytest.param(
            ["stage.patch_size=[16,32,32]", "inference=tiles", "inference.tile_size=[16,32,32]"],
            marks=pytest.mark.thorough,
        ),
    ],
)
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(name, marks=[pytest.mark.thorough] * (name in ("anisotropic", "dataset_mean")))
        for name in STRATEGIES
    ],
)
def test_a_strategy_trains_and_predicts_both_stages(
    strategy: str, patch: list[str], tiny_table: Path, tmp_path: Path
) -> None:
    few = ["steps=2", "model.width=4", *STRATEGIES[strategy]]
    coarse = train(tmp_path / "coarse", tiny_table, "stage=coarse", *few)
    fine = train(tmp_path / "fine", tiny_table, "stage=fine", *few, *patch)
    segmenter = LungSegmenter([coarse], [fine], accelerator="cpu")
    assert [stage.spacing_mm for stage in segmenter.cascade.stages] == [SPACINGS_MM[strategy]] * 2
    scan = tiny_table.parent / "c3.nii.gz"
    result = segmenter.segment(scan)
    assert result.labels.array.shape == read_image(scan).array.shape
    assert result.labels.grid.is_close(read_grid(scan))
    for box in result.boxes.values():
        if strategy == "fixed_size":
            assert box.grid.shape == (32, 48, 32)
        elif strategy == "multi_scale":
            assert box.grid.spacing_mm == (5.0, 4.4, 4.5), (
                "of 6 x 4.3 x 4.5 mm what the range has nearest"
            )
        elif strategy == "fixed_resolution" and not patch:
            assert len(set(box.grid.shape)) == 1
        else:
            assert box.grid.spacing_mm == (SPACINGS_MM[strategy] or read_grid(scan).spacing_mm)
