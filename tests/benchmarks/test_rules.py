"""Rules benchmark: what rules change in drawn scans, by networks that know the answer."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from oracle import LEFT, RIGHT, CoarseOracle, FineOracle, scan, stage
from torch import Tensor

from benchmarks import rules
from medseg.cascade.cascade import Cascade
from medseg.data.case_table import Case
from medseg.data.importers.formats import read_cases
from medseg.errors import UserError
from medseg.io.tables import read_csv
from medseg.io.write import write_image, write_labels

# A fiftieth of the left block, above it.
SPECK = (slice(22, 25), slice(44, 56), slice(94, 104))
BOTH = "coarse_small_component+fine_small_component"


class Counting(FineOracle):
    """Counts its passes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_passes = 0

    def forward(self, image: Tensor) -> Tensor:
        self.num_passes += 1
        return super().forward(image)


def write_case(folder: Path, *blocks: tuple[tuple[slice, slice, slice], int]) -> Case:
    """Write a scan with blocks, and a reference with the first two of them."""
    volume, _ = scan(blocks=blocks)
    _, reference = scan(blocks=blocks[:2])
    write_image(folder / "ct.nii.gz", volume.array, volume.grid)
    write_labels(folder / "labels.nii.gz", reference, volume.grid)
    (folder / "cases.csv").write_text("case,image,labels\nc,ct.nii.gz,labels.nii.gz\n")
    return read_cases(folder / "cases.csv")[0]


def test_a_rule_that_changes_nothing_has_no_figure_and_networks_run_once(tmp_path: Path) -> None:
    case = write_case(tmp_path, (LEFT, 1), (RIGHT, 2))
    fine = Counting()
    cascade = Cascade(stage(CoarseOracle(), "coarse"), stage(fine, "fine"))
    rows = rules.case_rows(case, cascade, rules.read_rule_sets(""))
    assert fine.num_passes == 2, "a crop of each side"
    assert [row["rule"] for row in rows[::2]] == [*rules.RULES, rules.ALL]
    assert all(row["changed_voxels"] == 0 for row in rows)
    assert all(row["gain"] == 0.0 for row in rows)
    summary = rules.summarise(rows)
    assert {(row["scans"], row["regions"], row["mean_gain"]) for row in summary} == {(0, 0, None)}


def test_a_lung_that_is_not_there_stays_absent_without_any_rule(tmp_path: Path) -> None:
    case = write_case(tmp_path, (LEFT, 1))
    cascade = Cascade(stage(CoarseOracle(), "coarse"), stage(FineOracle(), "fine"))
    rows = rules.case_rows(case, cascade, rules.read_rule_sets(""))
    right = [row for row in rows if row["region"] == "right_lung"]
    assert {row["without_ml"] for row in right} == {0.0}
    assert {row["rule"] for row in right} == {*rules.RULES, rules.ALL}


def test_what_two_rules_remove_is_seen_where_both_are_switched_off(tmp_path: Path) -> None:
    case = write_case(tmp_path, (LEFT, 1), (RIGHT, 2), (SPECK, 1))
    cascade = Cascade(stage(CoarseOracle(), "coarse"), stage(FineOracle(), "fine"))
    rows = rules.case_rows(case, cascade, rules.read_rule_sets(BOTH))
    changed = [(row["rule"], row["region"]) for row in rows if row["changed_voxels"]]
    assert changed == [(BOTH, "left_lung"), (rules.ALL, "left_lung")]
    (row,) = (row for row in rows if row["rule"] == BOTH and row["changed_voxels"])
    _, speck = scan(blocks=((SPECK, 1),))
    assert row["changed_voxels"] == pytest.approx(np.count_nonzero(speck), rel=0.25)
    assert row["without_ml"] - row["volume_ml"] == pytest.approx(row["changed_ml"])
    assert row["gain"] == pytest.approx(row["dice"] - row["dice_without"])
    assert row["gain"] > 0.005
    by_rule = {entry["rule"]: entry for entry in rules.summarise(rows)}
    assert by_rule[BOTH]["best_gain"] == by_rule[BOTH]["worst_gain"] == row["gain"]


def test_a_region_is_compared_voxel_by_voxel() -> None:
    labels = np.array([[[1, 1, 2, 0]]], dtype=np.uint8)
    without = np.array([[[1, 0, 2, 1]]], dtype=np.uint8)
    reference = np.array([[[1, 1, 0, 0]]], dtype=np.uint8)
    row = rules.region_row(labels, without, reference, (1,), 0.5)
    assert row == {
        "volume_ml": 1.0, "without_ml": 1.0, "changed_voxels": 2, "changed_ml": 1.0,
        "false_ml": None, "dice": 1.0, "dice_without": 0.5, "gain": 0.5,
    }  # fmt: skip
    absent = rules.region_row(0 * labels, without, 0 * labels, (1,), 0.5)
    assert (absent["false_ml"], absent["dice"]) == (1.0, None)
    unknown = rules.region_row(labels, without, None, (1,), 0.5)
    assert (unknown["changed_voxels"], unknown["false_ml"], unknown["dice"]) == (2, None, None)


@pytest.mark.parametrize("name", rules.RULES)
def test_a_switch_names_what_its_module_has_and_puts_it_back(name: str) -> None:
    switch = rules.RULES[name]
    before = getattr(switch.module, switch.name)
    with rules.switched_off([name]):
        assert getattr(switch.module, switch.name) == switch.off != before
    assert getattr(switch.module, switch.name) == before


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(UserError, match="together: there is no rule typo"):
        rules.read_rule_sets("fine_unseen+typo")


def test_the_tables_have_each_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_case(tmp_path, (LEFT, 1), (RIGHT, 2))
    cascade = Cascade(stage(CoarseOracle(), "coarse"), stage(FineOracle(), "fine"))
    monkeypatch.setattr(rules, "load_cascade", lambda coarse, fine: cascade)
    out = tmp_path / "out"
    arguments = [f"output={out}", f"cases={tmp_path / 'cases.csv'}"]
    monkeypatch.setattr(sys, "argv", ["rules.py", *arguments])
    rules.main()
    rows = read_csv(out / "rules.csv")
    assert len(rows) == 2 * (len(rules.RULES) + 1)
    table = (out / "rules.md").read_text(encoding="utf-8")
    assert all(f"| {name} | 0 | 0 |" in table for name in rules.RULES)
