"""Spacing strategies in a run folder and in a plan."""

from __future__ import annotations

from pathlib import Path

import hydra
import nibabel
import numpy as np
import pytest

from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.config.schema import PlanConfig
from medseg.data.case_table import Case
from medseg.data.spacing import find_spacing, make_grid_rule, read_scan_grid
from medseg.errors import UserError
from medseg.io.tables import write_csv
from medseg.planning.step import input_shape
from medseg.runs.folder import load_config, open_run
from medseg.task import Channel
from medseg.training.options import TrainConfig


def compose(*overrides: str, root: str = "train") -> TrainConfig:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        composed = hydra.compose(root, ["run_dir=x", *overrides])
    return to_config(composed, PlanConfig if root == "plan" else TrainConfig)


@pytest.mark.parametrize("codes", [("L", "P", "S"), ("S", "L", "P")])
def test_the_spacing_of_a_case_is_that_of_the_axes_after_orientation(
    codes: tuple[str, str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sagittal slices of 5 mm give 5 mm along x, however the file stores them."""
    image = nibabel.Nifti1Image(np.zeros((6, 7, 8), np.int16), np.diag([5.0, 0.7, 0.9, 1.0]))
    turn = nibabel.orientations.axcodes2ornt(codes)
    stored = image.as_reoriented(
        nibabel.orientations.ornt_transform(nibabel.io_orientation(image.affine), turn)
    )
    path = tmp_path / "ct.nii.gz"
    nibabel.save(stored, path)
    row = {"case": "a", "image": path, "labels": path, "patient": "a", "split": "train"}
    # A damaged file does not stop the others.
    damaged = tmp_path / "damaged.nii.gz"
    damaged.write_bytes(b"no gzip")
    write_csv(tmp_path / "cases.csv", [row, row | {"case": "b", "image": damaged}])
    config = compose(f"data.cases='{tmp_path / 'cases.csv'}'", "spacing=dataset_median")
    find_spacing(config.spacing, config.data, config.task)
    assert config.spacing.target_spacing_mm == pytest.approx((0.9, 0.7, 5.0))
    assert "the median of 1 case, without b\n" in capsys.readouterr().err
    write_csv(tmp_path / "cases.csv", [row | {"image": damaged}])
    config = compose(f"data.cases='{tmp_path / 'cases.csv'}'", "spacing=dataset_median")
    with pytest.raises(UserError, match="damaged"):
        find_spacing(config.spacing, config.data, config.task)


def test_the_grid_of_a_scan_is_read_from_a_file_of_all_channels(tmp_path: Path) -> None:
    """Two sequences of MR in one file, as in the prostate of the Decathlon."""
    path = tmp_path / "mr.nii.gz"
    affine = np.diag([-0.6, -0.7, 4.0, 1.0])
    nibabel.save(nibabel.Nifti1Image(np.zeros((6, 7, 8, 2), np.int16), affine), path)
    channels = [Channel("mr", None, "zscore")] * 2
    grid = read_scan_grid(Case("a", path, None, "a"), channels)
    assert grid.spacing_mm == pytest.approx((4.0, 0.7, 0.6))
    with pytest.raises(UserError):
        read_scan_grid(Case("a", path, None, "a"), channels[:1])


@pytest.mark.parametrize("average", ["median", "mean"])
def test_the_typical_spacing_of_the_cases_that_are_trained_on_is_written_into_the_run(
    average: str, tiny_table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [f"data.cases='{tiny_table}'", f"spacing=dataset_{average}", "model.width=4"]
    run_dir = open_run(compose(*given, f"run_dir='{tmp_path / 'run'}'"))
    # The first two cases are trained on, at 6 x 4 x 4.5 and 6 x 4.1 x 4.5 mm.
    assert load_config(run_dir).spacing.target_spacing_mm == (6.0, 4.05, 4.5)
    assert (
        f"spacing.target_spacing_mm=[6,4.05,4.5]: the {average} of 2 cases"
        in capsys.readouterr().err
    )
    assert open_run(compose(*given, f"resume='{run_dir}'")) == run_dir, "the same command goes on"
    assert capsys.readouterr().err.count(f"the {average} of 2 cases") == 1
    with pytest.raises(UserError, match=r"spacing\.target_spacing_mm: "):
        open_run(compose(*given, "spacing.target_spacing_mm=[6.0,4.0,4.5]", f"resume='{run_dir}'"))


def test_a_cube_of_fixed_resolution_is_filled_or_widened() -> None:
    assert make_grid_rule(compose("spacing=fixed_resolution", "spacing.fill=pad").spacing).is_padded
    assert not make_grid_rule(compose("spacing=fixed_resolution").spacing).is_padded
    with pytest.raises(
        UserError, match=r"spacing\.fill=pad: only spacing\.strategy=fixed_resolution makes cubes"
    ):
        compose("spacing=isotropic_1mm", "spacing.fill=pad")


def test_a_plan_counts_what_the_strategy_asks_for() -> None:
    thick = compose(
        "stage=fine", "spacing=anisotropic", "extent_mm.fine=[100.0,100.0,100.0]", root="plan"
    )
    assert input_shape(thick) == (40, 112, 112)
    cube = compose(
        "stage=fine", "spacing=fixed_resolution", "extent_mm.fine=[100.0,80.0,190.0]", root="plan"
    )
    assert input_shape(cube) == (96, 96, 96)
    scales = [
        "spacing=multi_scale",
        "spacing.range_mm=[2.0,8.0]",
        "extent_mm.fine=[100.0,80.0,190.0]",
    ]
    assert input_shape(compose("stage=fine", *scales, root="plan")) == (64, 48, 96)
    assert input_shape(compose("stage=fine", "spacing=fixed_size", root="plan")) == (128, 128, 128)
    with pytest.raises(
        UserError, match=r"native has no spacing to count voxels with; give shape=\[D,H,W\]"
    ):
        input_shape(compose("spacing=native", root="plan"))
