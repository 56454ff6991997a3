"""Pooled scores: patients count once, and failures are counted apart."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from medseg.data.case_table import Case
from medseg.studies.pooled import pooled_rows, write_pooled


def score(case: str, dice: float, **values: Any) -> dict[str, Any]:
    row = {
        "case": case,
        "region": "spleen",
        "trust": "reference",
        "dice": dice,
        "nsd_1mm": dice,
        "hd95_mm": 2.0,
        "volume_pred_ml": 100.0,
        "volume_ref_ml": 100.0,
    }
    return {**row, **values}


PATIENTS = {"a1": "a", "a2": "a", "b": "b", "c": "c", "d": "d"}


def test_the_scans_of_a_patient_count_once() -> None:
    rows = [score("a1", 0.5), score("a2", 0.7), score("b", 0.9)]
    (pooled,) = pooled_rows(rows, PATIENTS)
    assert (pooled["patients"], pooled["scans"]) == (2, 3)
    assert pooled["dice"] == pytest.approx((0.6 + 0.9) / 2)
    assert pooled["dice_sd"] == pytest.approx(0.3 / math.sqrt(2))
    # Further scans of a patient with the same scores change nothing.
    assert pooled_rows([*rows, score("b", 0.9)], PATIENTS)[0]["dice_sd"] == pooled["dice_sd"]


def test_failures_are_counted_and_have_no_distance() -> None:
    missed = score("b", 0.0, hd95_mm=math.inf, volume_pred_ml=0.0)
    absent = score("c", 0.0, hd95_mm=math.inf, volume_ref_ml=0.0, volume_pred_ml=3.0)
    rightly_empty = score("d", 1.0, hd95_mm=0.0, volume_ref_ml=0.0, volume_pred_ml=0.0)
    (pooled,) = pooled_rows([score("a1", 0.8), missed, absent, rightly_empty], PATIENTS)
    assert (pooled["not_found"], pooled["false_regions"]) == (1, 1)
    assert pooled["dice"] == pytest.approx(0.4), "a region that was not found is no better than 0"
    assert (pooled["hd95_mm"], pooled["hd95_mm_sd"]) == (2.0, None)
    assert pooled["patients"] == 2, "scans without the region tell nothing of its Dice"


def test_regions_and_trust_are_pooled_apart(tmp_path: Path) -> None:
    rows = [score("a1", 0.8), score("b", 0.6, trust="approximate"), score("c", 0.7, region="liver")]
    pooled = pooled_rows(rows, PATIENTS)
    assert [(row["region"], row["trust"], row["dice"]) for row in pooled] == [
        ("spleen", "reference", 0.8),
        ("spleen", "approximate", 0.6),
        ("liver", "reference", 0.7),
    ]
    cases = {name: Case(name, Path("i"), Path("l"), patient) for name, patient in PATIENTS.items()}
    cases["unlabelled"] = Case("unlabelled", Path("i"), None, "u")
    costs = [{"fold": 0, "run": "single", "steps": 5, "train_s": 61.4, "peak_resident_mib": None}]
    write_pooled([*rows, score("d", 0.9)], cases, costs, tmp_path)
    text = (tmp_path / "pooled.md").read_text(encoding="utf-8")
    assert "| spleen | reference | 2 | 2 | 0.8500 ± 0.0707 |" in text
    assert "| 0 | single | 5 | 61 |" in text
    assert "In no mean, because their prediction or score failed: a2." in text
    assert r"0.8500 $\pm$ 0.0707" in (tmp_path / "pooled.tex").read_text(encoding="utf-8")
