"""The audit of the real scans says what is known of them, and nothing else."""

from __future__ import annotations

import csv
from pathlib import Path

import hydra
import pytest

from medseg.commands.prepare import prepare
from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.config.schema import PrepareConfig

# Sentence begins of each finding; the padding, the cuts and the sizes are those of the notes beside
# the scans.
KNOWN = {
    "lidc_0001": ["21.3% of the voxels hold -2048, which is padding"],
    "lungdx_a0002_b40f": [
        "the scan cuts left_lung (lower end, 0.3 cm²) and right_lung (lower end, 4.9 cm²)"
    ],
    "lungdx_a0002_b70f": [
        "the scan cuts left_lung (lower end, 0.3 cm²) and right_lung (lower end, 4.9 cm²)"
    ],
    "cip_ct64": ["its pixels are 4.17 mm apart where the median of all cases is 0.938 mm"],
    "elastix_right_lung": [
        (
            "4.8% of the voxels hold exactly 0 HU up to the border of their slices: a constant "
            "was filled in"
        ),
        "the scan cuts right_lung (left end, 17.9 cm²)",
    ],
    "cmbcrc_01068": [
        "the scan cuts left_lung (lower end, 5.5 cm²) and right_lung (lower end, 38.6 cm²)",
        "21.3% of the voxels hold -3024, which is padding",
    ],
    "acrin_013": [
        "the scan cuts left_lung (upper end, 65.7 cm²) and right_lung (upper end, 69.0 cm²)"
    ],
    "acrin_001_tp1": [
        "the scan cuts left_lung (lower end, 83.8 cm²) and right_lung (lower end, 116.4 cm²)",
        "21.3% of the voxels hold -3024, which is padding",
    ],
    "acrin_001_tp2": [
        "the scan cuts left_lung (upper end, 82.4 cm²) and right_lung (upper end, 142.5 cm²)",
        "21.3% of the voxels hold -3024, which is padding",
    ],
    "lungfcp_0001": [
        "the scan cuts left_lung (lower end, 134.9 cm²) and right_lung (lower end, 158.4 cm²)",
        "its slices are 1 mm apart where the median of all cases is 3.49 mm",
    ],
    "rider_0117": [
        "the scan cuts left_lung (lower end, 146.7 cm²; upper end, 172.9 cm²) and right_lung "
        "(lower end, 20.5 cm²; upper end, "
        "183.3 cm²; right end, 3.3 cm²; edge of the field of view)",
        "its slices are 0.8 mm apart where the median of all cases is 3.49 mm",
        "21.3% of the voxels hold -3024, which is padding",
    ],
    "totalseg_abdomen": [
        "the scan cuts left_lung (upper end, 35.5 cm²) and right_lung (upper end, 57.7 cm²)",
        "its pixels are 3 mm apart where the median of all cases is 0.938 mm",
    ],
}


@pytest.mark.slow
def test_the_real_table(shared_ct: Path, tmp_path: Path) -> None:
    paths = [f"data.cases='{shared_ct / 'table.csv'}'", f"data.cache='{tmp_path}'"]
    spacings = [f"spacing@spacings.{name}=isotropic_4mm" for name in ("coarse", "fine")]
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = to_config(hydra.compose("prepare", [*paths, *spacings]), PrepareConfig)
    assert prepare(config) == 0
    with (tmp_path / "audit.csv").open(encoding="utf-8", newline="") as file:
        rows = {row["case"]: row for row in csv.DictReader(file)}
    assert list(rows) == list(KNOWN)
    with (shared_ct / "cases.csv").open(encoding="utf-8", newline="") as file:
        facts = {row["case_id"]: row for row in csv.DictReader(file)}
    for name, row in rows.items():
        details = row["details"].split(" | ") if row["details"] else []
        assert len(details) == len(KNOWN[name]), (name, details)
        for detail, begin in zip(details, KNOWN[name], strict=True):
            assert detail.startswith(begin), name
        assert float(row["hu_min"]) == float(facts[name]["hu_min"])
        assert float(row["hu_max"]) == float(facts[name]["hu_max"])
        for side in ("left", "right"):
            litres = float(facts[name][f"volume_{side}_l"] or 0)
            assert float(row[f"{side}_lung_ml"]) / 1000 == pytest.approx(litres, abs=6e-4)
    assert (tmp_path / "audit.png").stat().st_size > 200_000
