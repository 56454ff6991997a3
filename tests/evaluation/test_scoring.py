"""Evaluation of a folder of predictions: scores, statistics, costs, failures, pictures."""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import PIL.Image
import pytest
from scipy import stats

from medseg.commands.evaluate import evaluate
from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.config.schema import EvaluateConfig
from medseg.data.case_table import read_case_table, write_case_table
from medseg.errors import UserError
from medseg.evaluation import pictures, report_page
from medseg.evaluation.report_page import ALL, compare_rows
from medseg.evaluation.scoring import console_table, evaluate_folder, summarise
from medseg.geometry.grid import VoxelGrid
from medseg.io.tables import read_csv, write_csv
from medseg.io.write import write_image, write_labels
from medseg.task import Channel, Region, Task

TASK = Task(
    "lungs",
    {"left_lung": 1, "right_lung": 2},
    (Region("left_lung", ("left_lung",), "left"), Region("right_lung", ("right_lung",), "right")),
    (Channel(window_hu=(-1000.0, 400.0)),),
)
VALUES = {1: "left_lung", 2: "right_lung"}
GRID = VoxelGrid((14, 20, 26), (3.0, 1.5, 2.0), (-10.0, 20.0, 7.0))
NAMES = ["Doe, John", "a=b", "ü", "Thorax (1).x"]


def _labels(shift: int = 0) -> np.ndarray:
    """Make a label map of two boxes; value 1 is the patient's left, at larger x."""
    labels = np.zeros(GRID.shape, dtype=np.uint8)
    labels[3:11, 4 + shift : 14 + shift, 15:23] = 1
    labels[3:11, 4:14, 3:11] = 2
    return labels


def _say_nothing(line: str) -> None:
    del line


class World:
    """Predictions, references and a case table in a temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pred = folder / "pred, out"
        self.table = folder / "cases.csv"
        self.output = folder / "out=1"
        self.rows = [["case", "image", "labels", "split", "trust_left_lung", "trust_right_lung"]]

    def add(
        self,
        name: str,
        pred: np.ndarray | None,
        target: np.ndarray | None,
        *,
        split: str = "test",
        trust: tuple[str, str] = ("", ""),
        grid: VoxelGrid = GRID,
        pred_grid: VoxelGrid = GRID,
        suffix: str = ".nii.gz",
    ) -> None:
        number = len(self.rows)
        write_image(self.folder / f"ct/{number}.nii.gz", np.zeros(grid.shape, np.int16), grid)
        if target is not None:
            write_labels(self.folder / f"ref/{name}.nii.gz", target, grid)
        if pred is not None:
            write_labels(self.pred / f"{name}{suffix}", pred, pred_grid)
        labels = f"ref/{name}.nii.gz" if target is not None else ""
        self.rows.append([name, f"ct/{number}.nii.gz", labels, split, *trust])
        with self.table.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows(self.rows)

    def read(self, name: str) -> list[dict[str, str]]:
        return read_csv(self.output / name)

    def metrics(self) -> dict[tuple[str, str], dict[str, str]]:
        return {(row["case"], row["region"]): row for row in self.read("metrics.csv")}


@pytest.fixture
def drawn_world(tmp_path: Path) -> World:
    for folder in ("ct", "ref", "pred, out"):
        (tmp_path / folder).mkdir()
    return World(tmp_path)


@pytest.fixture
def world(drawn_world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """Replace each overlay by one pixel, since drawing takes longer than scoring."""

    def draw(*_: Any, path: Path, **__: Any) -> None:
        path.parent.mkdir(exist_ok=True)
        PIL.Image.new("L", (1, 1)).save(path)

    monkeypatch.setattr(pictures, "overlay_montage", draw)
    return drawn_world


def test_scores_of_awkward_names(drawn_world: World) -> None:
    for shift, (name, suffix) in enumerate(
        zip(NAMES, (".nii.gz", ".nrrd", ".mha", ".nii"), strict=True)
    ):
        drawn_world.add(
            name, _labels(shift), _labels(), suffix=suffix, trust=("reference", "approximate")
        )
    lines: list[str] = []
    summary = evaluate_folder(
        drawn_world.pred, drawn_world.table, drawn_world.output, TASK, VALUES, progress=lines.append
    )
    header = (drawn_world.output / "metrics.csv").read_text(encoding="utf-8").splitlines()[0]
    assert header == "case,region,trust,dice,nsd_1mm,nsd_2mm,hd95_mm,volume_pred_ml,volume_ref_ml"
    metrics = drawn_world.metrics()
    assert list(metrics) == [
        (name, region) for name in NAMES for region in ("left_lung", "right_lung")
    ]
    for shift, name in enumerate(NAMES):
        left, right = metrics[name, "left_lung"], metrics[name, "right_lung"]
        assert float(left["dice"]) == pytest.approx(1 - shift / 10)
        assert float(left["hd95_mm"]) == pytest.approx(1.5 * shift)
        assert float(left["volume_ref_ml"]) == pytest.approx(8 * 10 * 8 * 9 / 1000)
        assert float(right["dice"]) == float(right["nsd_1mm"]) == 1.0
        assert (left["trust"], right["trust"]) == ("reference", "approximate")
        assert (drawn_world.output / "overlays" / f"{name}.png").stat().st_size > 5000
    assert (drawn_world.output / "scores.png").stat().st_size > 5000
    assert not summary.failed
    assert not summary.warnings
    assert any(
        "left_lung" in line and "Thorax (1).x" in line and "0.8500" in line for line in lines
    )
    assert not list(drawn_world.output.rglob(".*"))


@pytest.mark.parametrize("name", ["summary.csv", "differences.csv"])
def test_the_case_table_is_not_replaced_by_a_table_of_scores(world: World, name: str) -> None:
    world.add("a", _labels(), _labels())
    table = write_case_table(world.output / name, read_case_table(world.table))
    content = table.read_text(encoding="utf-8")
    with pytest.raises(UserError, match="is the case table and would be overwritten"):
        evaluate_folder(world.pred, table, world.output, TASK, VALUES, progress=_say_nothing)
    assert table.read_text(encoding="utf-8") == content


def test_the_table_of_a_prediction_is_not_replaced(world: World) -> None:
    world.add("a", _labels(), _labels())
    table = world.pred / "summary.csv"
    table.write_text("case,status,label,ml,warnings\n", encoding="utf-8")
    with pytest.raises(
        UserError, match=r"summary\.csv holds the volumes of a prediction; give another output than"
    ):
        evaluate_folder(world.pred, world.table, world.pred, TASK, VALUES, progress=_say_nothing)
    assert table.read_text(encoding="utf-8") == "case,status,label,ml,warnings\n"
    evaluate_folder(
        world.pred, world.table, world.output, TASK, VALUES, progress=_say_nothing, pictures=False
    )
    evaluate_folder(
        world.pred, world.table, world.output, TASK, VALUES, progress=_say_nothing, pictures=False
    )


def test_costs_of_predictions_are_reported(world: World) -> None:
    lines: list[str] = []
    for name, seconds in (
        ("a", 2.0),
        ("b", 4.0),
        ("without a report", 0.0),
        ("another report", 0.0),
    ):
        world.add(name, _labels(), _labels(), trust=("reference", "reference"))
        report = {
            "durations_s": {"total": seconds},
            "memory_gb_s": 3 * seconds,
            "peak_resident_bytes": 1.5e9,
        }
        if seconds:
            (world.pred / f"{name}.json").write_text(json.dumps(report))
    (world.pred / "another report.json").write_text('["of another program"]')
    for name, text in {
        "an endless time": (
            '{"durations_s": {"total": 1e999}, "memory_gb_s": 1, "peak_resident_bytes": 1}'
        ),
        "a large number": (
            f'{{"durations_s": {{"total": 1{"0" * 400}}}, "memory_gb_s": NaN, '
            f'"peak_resident_bytes": 1}}'
        ),
        "a deep report": "[" * 100_000,
    }.items():
        world.add(name, _labels(), _labels(), trust=("reference", "reference"))
        (world.pred / f"{name}.json").write_text(text)
    evaluate_folder(world.pred, world.table, world.output, TASK, VALUES, progress=lines.append)
    assert [list(row.values()) for row in world.read("costs.csv")] == [
        ["a", "2.000", "6.000", "1.500"],
        ["b", "4.000", "12.000", "1.500"],
    ]
    costs = json.loads((world.output / "summary.json").read_text(encoding="utf-8"))["costs"]
    assert costs["b"] == {"total_s": 4.0, "memory_gb_s": 12.0, "peak_gb": 1.5}
    assert (
        "a case took 3.0 s (at most 4.0), 9.0 GB·s of memory (at most 12.0), 1.50 GB at the peak"
        in lines
    )


def test_summary_has_regions_trusts_and_all(world: World) -> None:
    world.add("a", _labels(), _labels(), trust=("reference", "reference"))
    world.add("b", _labels(2), _labels(), trust=("approximate", "reference"))
    world.add("c", _labels(4), _labels(), trust=("reference", "reference"))
    evaluate_folder(
        world.pred, world.table, world.output, TASK, VALUES, progress=_say_nothing, pictures=False
    )
    rows = {(row["region"], row["trust"], row["metric"]): row for row in world.read("summary.csv")}
    left = rows["left_lung", "all", "dice"]
    assert int(left["number"]) == 3
    assert [float(left[key]) for key in ("mean", "median", "min", "max")] == pytest.approx(
        [0.8, 0.8, 0.6, 1.0]
    )
    assert float(left["std"]) == pytest.approx(np.std([1.0, 0.8, 0.6]), abs=1e-6)
    assert left["worst_case"] == "c"
    assert float(rows["left_lung", "approximate", "dice"]["mean"]) == pytest.approx(0.8)
    assert float(rows["left_lung", "reference", "dice"]["mean"]) == pytest.approx(0.8)
    assert ("right_lung", "approximate", "dice") not in rows
    assert int(rows["all", "all", "hd95_mm"]["number"]) == 6
    assert rows["all", "all", "hd95_mm"]["worst_case"] == "c"
    document = json.loads((world.output / "summary.json").read_text(encoding="utf-8"))
    assert document["cases"] == 3
    assert document["statistics"][0]["mean"] == pytest.approx(0.8)
    assert not (world.output / "scores.png").exists()
    assert not (world.output / "overlays").exists()


def test_infinite_distances_are_counted_apart(world: World) -> None:
    empty = np.zeros(GRID.shape, dtype=np.uint8)
    world.add("good", _labels(2), _labels())
    world.add("nothing found", empty, _labels(), trust=("reference", "absent"))
    world.add("nothing there", empty, empty, trust=("absent", "absent"))
    evaluate_folder(world.pred, world.table, world.output, TASK, VALUES, progress=_say_nothing)
    metrics = world.metrics()
    missed = metrics["nothing found", "left_lung"]
    assert (missed["hd95_mm"], float(missed["dice"]), float(missed["nsd_2mm"])) == ("inf", 0.0, 0.0)
    agreed = metrics["nothing there", "left_lung"]
    assert [float(agreed[key]) for key in ("dice", "nsd_1mm", "hd95_mm", "volume_ref_ml")] == [
        1.0,
        1.0,
        0.0,
        0.0,
    ]
    rows = {(row["region"], row["trust"], row["metric"]): row for row in world.read("summary.csv")}
    hd95 = rows["left_lung", "all", "hd95_mm"]
    assert (hd95["number"], hd95["infinite"], hd95["worst_case"]) == ("3", "1", "nothing found")
    assert float(hd95["mean"]) == pytest.approx(1.5)
    assert rows["left_lung", "reference", "hd95_mm"]["mean"] == ""
    assert math.isinf(float(missed["hd95_mm"]))
    json.loads(
        (world.output / "summary.json").read_text(encoding="utf-8"), parse_constant=pytest.fail
    )
    assert (world.output / "overlays" / "nothing there.png").exists()


def test_a_failing_case_does_not_affect_the_others(world: World) -> None:
    moved = VoxelGrid(GRID.shape, GRID.spacing_mm, (-10.0, 20.0, 8.0))
    world.add("moved", _labels(), _labels(), pred_grid=moved)
    world.add("wrong values", _labels() + 2, _labels())
    world.add("unknown values", _labels(), _labels() * 9)
    world.add("damaged", _labels(), _labels())
    (world.folder / "ref" / "damaged.nii.gz").write_bytes(b"no label map")
    world.add("twice", _labels(), _labels())
    write_labels(world.pred / "twice.nrrd", _labels(), GRID)
    world.add("lost", _labels(), _labels())
    (world.folder / "ref" / "lost.nii.gz").unlink()
    world.add("good", _labels(), _labels())
    summary = evaluate_folder(
        world.pred, world.table, world.output, TASK, VALUES, progress=_say_nothing
    )
    assert list(summary.failed) == [
        "moved",
        "wrong values",
        "unknown values",
        "damaged",
        "twice",
        "lost",
    ]
    assert "grid" in summary.failed["moved"]
    assert "expected 0 to 2" in summary.failed["wrong values"]
    assert "value 9" in summary.failed["unknown values"]
    assert "two predictions" in summary.failed["twice"]
    assert {case for case, _ in world.metrics()} == {"good"}
    document = json.loads((world.output / "summary.json").read_text(encoding="utf-8"))
    assert document["failed"] == summary.failed


def test_a_header_with_noise_below_a_tenth_of_a_millimetre_is_the_same_grid(world: World) -> None:
    noisy = VoxelGrid(GRID.shape, (3.0, 1.501, 2.0), (-10.02, 20.03, 7.0))
    world.add("a", _labels(), _labels(), pred_grid=noisy)
    summary = evaluate_folder(
        world.pred, world.table, world.output, TASK, VALUES, progress=_say_nothing
    )
    assert [row["dice"] for row in summary.rows] == [1.0, 1.0]
    assert not summary.warnings
    assert (world.output / "overlays" / "a.png").is_file()


def test_cases_without_partner_are_named(world: World) -> None:
    world.add("both", _labels(), _labels())
    world.add("only ref", None, _labels())
    world.add("no labels", _labels(), None)
    world.add("other split", _labels(), _labels(), split="train")
    write_labels(world.pred / "stranger.nii.gz", _labels(), GRID)
    (world.pred / "both.json").write_text("{}")
    lines: list[str] = []
    summary = evaluate_folder(
        world.pred,
        world.table,
        world.output,
        TASK,
        VALUES,
        split="test",
        pictures=False,
        progress=lines.append,
    )
    assert summary.without_prediction == ["only ref"]
    assert set(summary.without_reference) == {"no labels", "stranger"}
    assert not summary.failed
    assert {row["case"] for row in summary.rows} == {"both"}
    assert sum(line.startswith("warning") for line in lines) == 1
    assert lines[-1] == "1 of 2 cases of the table have no prediction: only ref"
    document = json.loads((world.output / "summary.json").read_text(encoding="utf-8"))
    assert document["without_prediction"] == ["only ref"]


def test_a_folder_serves_as_reference_and_voxel_order_does_not_matter(world: World) -> None:
    flipped = GRID.reoriented((1, 2, 0), (True, False, True))
    stored = _labels().transpose(1, 2, 0)[::-1, :, ::-1]
    world.add("a", np.ascontiguousarray(stored), _labels(), pred_grid=flipped)
    world.add("u\u0308", _labels(), None)  # ü as some systems store it
    write_labels(world.folder / "ref" / "ü.nii.gz", _labels(), GRID)
    summary = evaluate_folder(
        world.pred, world.folder / "ref", world.output, TASK, VALUES, progress=_say_nothing
    )
    assert [row["case"] for row in summary.rows] == ["a", "a", "ü", "ü"]
    assert all(row["dice"] == 1.0 for row in summary.rows)
    assert all(row["trust"] == "" for row in summary.rows)


def test_references_are_mapped_by_name(world: World) -> None:
    target = np.zeros(GRID.shape, dtype=np.int16)
    target[_labels() == 1] = 10
    target[3:5][_labels()[3:5] == 1] = 300
    target[_labels() == 2] = 12
    target[0, 0, 0] = 7
    world.add("a", _labels(), target)
    values = {10: "left_lung", 300: "left_lung", 12: "right_lung", 7: "heart"}
    summary = evaluate_folder(
        world.pred, world.table, world.output, TASK, values, progress=_say_nothing, pictures=False
    )
    assert [row["dice"] for row in summary.rows] == [1.0, 1.0]


def test_a_region_is_the_union_of_its_labels(world: World) -> None:
    task = Task("lungs", TASK.labels, (Region("both", ("left_lung", "right_lung")),), TASK.channels)
    swapped = np.array([0, 2, 1], dtype=np.uint8)[_labels()]
    world.add("a", swapped, _labels())
    summary = evaluate_folder(
        world.pred, world.table, world.output, task, VALUES, progress=_say_nothing, pictures=False
    )
    assert [(row["region"], row["dice"]) for row in summary.rows] == [("both", 1.0)]


def test_a_region_that_the_references_do_not_name_is_left_out(world: World) -> None:
    world.add("a", _labels(), np.where(_labels() == 1, 1, 0).astype(np.uint8))
    summary = evaluate_folder(
        world.pred,
        world.table,
        world.output,
        TASK,
        {1: "left_lung"},
        progress=_say_nothing,
        pictures=False,
    )
    assert [row["region"] for row in summary.rows] == ["left_lung"]
    assert "right_lung" in summary.warnings[0]


def test_a_region_of_which_the_references_name_a_part_is_left_out(world: World) -> None:
    """As where only some lobes of a lung have references: its scores would be too low."""
    regions = (Region("left", ("left_lung",)), Region("both", ("left_lung", "right_lung")))
    world.add("a", _labels(), np.where(_labels() == 1, 1, 0).astype(np.uint8))
    summary = evaluate_folder(
        world.pred,
        world.table,
        world.output,
        replace(TASK, regions=regions),
        {1: "left_lung"},
        progress=_say_nothing,
        pictures=False,
    )
    assert [row["region"] for row in summary.rows] == ["left"]
    assert "both" in summary.warnings[0]


def test_what_is_read_of_a_reference_with_a_warning_is_said_beside_its_scores(
    world: World,
) -> None:
    """Here a structure is missing; otherwise the Dice of 0 would look like a missed region."""
    world.add("a", _labels(), None)
    left = np.where(_labels() == 1, 1, 0).astype(np.uint8)
    (world.folder / "ref" / "a").mkdir()
    write_labels(world.folder / "ref" / "a" / "left_lung.nii.gz", left, GRID)
    world.table.write_text("case,image,labels\na,ct/1.nii.gz,ref/a\n")
    lines: list[str] = []
    summary = evaluate_folder(
        world.pred,
        world.table,
        world.output,
        TASK,
        VALUES,
        progress=lines.append,
        pictures=False,
    )
    sentence = "a: reference a: right_lung: no such structure, taken as absent"
    assert summary.warnings == [sentence]
    assert f"warning: {sentence}" in lines
    assert sentence in (world.output / "report.html").read_text(encoding="utf-8")


def test_a_case_without_its_image_has_scores_but_no_picture(world: World) -> None:
    world.add("a", _labels(), _labels())
    (world.folder / "ct" / "1.nii.gz").unlink()
    summary = evaluate_folder(
        world.pred, world.table, world.output, TASK, VALUES, progress=_say_nothing
    )
    assert len(summary.rows) == 2
    assert not summary.failed
    assert summary.warnings[0].startswith("a: no picture")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"pred": "nowhere"}, "is not a folder"),
        ({"pred": "ct/.."}, "holds no label map"),
        ({"ref": "nowhere.csv"}, "does not exist"),
        ({"pred": "ct"}, "none of the 1 predictions"),
        ({"split": "val"}, "no case with split=val"),
        ({"ref": "ref", "split": "val"}, "needs a case table"),
        ({"label_values": {1: "liver"}}, "at least one region"),
        ({"label_values": {-1: "left_lung"}}, "from 0 to 65535"),
        ({"label_values": {65536: "left_lung"}}, "from 0 to 65535"),
    ],
)
def test_mistakes_of_the_user(world: World, change: dict[str, object], says: str) -> None:
    world.add("a", _labels(), _labels())
    arguments: dict[str, object] = {"split": None, "label_values": VALUES} | change
    pred = world.folder / str(change["pred"]) if "pred" in change else world.pred
    ref = world.folder / str(change["ref"]) if "ref" in change else world.table
    with pytest.raises(UserError, match=says):
        evaluate_folder(
            pred,
            ref,
            world.output,
            TASK,
            arguments["label_values"],
            split=arguments["split"],
            progress=_say_nothing,
        )
    assert not world.output.exists()


def test_the_least_and_the_largest_value_of_a_label_map_may_be_named(world: World) -> None:
    target = _labels().astype(np.uint16)
    target[target == 2] = 65535
    world.add("a", _labels(), target)
    values = {0: "table", -1: "table", 1: "left_lung", 65535: "right_lung"}
    summary = evaluate_folder(
        world.pred,
        world.table,
        world.output,
        TASK,
        values,
        progress=_say_nothing,
        pictures=False,
    )
    assert [row["dice"] for row in summary.rows] == [1.0, 1.0]


def test_ignored_voxels_count_nowhere(world: World) -> None:
    """Half of the left lung is ignored: predictions there change no score and no volume."""
    task = replace(TASK, ignore_label=255)
    for name, fill in (("right", 1), ("wrong", 0), ("other", 2)):
        target, pred = _labels(), _labels()
        target[3:7, 4:14, 15:23] = 9
        pred[3:7, 4:14, 15:23] = fill
        world.add(name, pred, target)
    evaluate_folder(
        world.pred,
        world.table,
        world.output,
        task,
        {**VALUES, 9: "ignore"},
        progress=_say_nothing,
        pictures=False,
    )
    rows = [row | {"case": ""} for row in world.read("metrics.csv")]
    assert rows[:2] == rows[2:4] == rows[4:]
    assert [float(rows[0][key]) for key in ("dice", "hd95_mm")] == [1.0, 0.0]
    assert float(rows[0]["volume_ref_ml"]) == pytest.approx(4 * 10 * 8 * 9 / 1000)


def test_a_task_without_regions_is_scored_by_label(drawn_world: World) -> None:
    task = replace(TASK, regions=(), channels=(Channel("mr", None, "zscore"),))
    drawn_world.add("a", _labels(2), _labels())
    summary = evaluate_folder(
        drawn_world.pred, drawn_world.table, drawn_world.output, task, VALUES, progress=_say_nothing
    )
    assert list(drawn_world.metrics()) == [("a", "left_lung"), ("a", "right_lung")]
    assert (drawn_world.output / "overlays" / "a.png").stat().st_size > 5000
    assert not summary.warnings
    evaluate_folder(
        drawn_world.pred,
        drawn_world.table,
        drawn_world.output,
        task,
        {1: "left_lung", 2: "other"},
        progress=_say_nothing,
        pictures=False,
    )
    assert list(drawn_world.metrics()) == [("a", "left_lung")]


def test_metrics_of_libraries_are_columns_beside_ours(world: World) -> None:
    """MONAI's and torchmetrics' Dice of each region are ours; a distance takes the spacing."""
    for shift in range(3):
        world.add(f"case {shift}", _labels(shift), _labels())
    nodes: dict[str, object] = {
        "monai_dice": {"_target_": "monai.metrics.DiceMetric", "include_background": False},
        "tm_dice": {"_target_": "torchmetrics.segmentation.DiceScore", "include_background": False},
        "hausdorff_mm": {
            "_target_": "monai.metrics.HausdorffDistanceMetric",
            "include_background": False,
        },
    }
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        arguments = [
            f"pred='{world.pred}'",
            f"ref='{world.table}'",
            f"output='{world.output}'",
            "pictures=false",
        ]
        arguments += [
            f"metrics.{name}={json.dumps(node).replace(chr(34), '')}"
            for name, node in nodes.items()
        ]
        config = to_config(hydra.compose("evaluate", arguments), EvaluateConfig)
    assert evaluate(config) == 0
    for (_, region), row in world.metrics().items():
        assert float(row["monai_dice"]) == pytest.approx(float(row["dice"]), abs=1e-6)
        assert float(row["tm_dice"]) == pytest.approx(float(row["dice"]), abs=1e-6)
        assert float(row["hausdorff_mm"]) == pytest.approx(float(row["hd95_mm"]), abs=1e-6), region
    (row,) = (
        row
        for row in world.read("summary.csv")
        if (row["region"], row["metric"]) == ("left_lung", "monai_dice")
    )
    assert float(row["mean"]) == pytest.approx(0.9)
    assert row["worst_case"] == "", "nobody has said which way is worse"


@pytest.mark.parametrize(
    ("node", "says"),
    [
        ("metrics.x._target_=os.system", "metrics.x"),
        ("metrics.x._target_=monai.metrics.DiceMetrik", "DiceMetric"),
        (
            "metrics.dice={_target_: monai.metrics.DiceMetric}",
            "metrics.dice: a column of metrics.csv has this name already",
        ),
    ],
)
def test_metrics_that_are_refused(world: World, node: str, says: str) -> None:
    world.add("a", _labels(), _labels())
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        arguments = [
            f"pred='{world.pred}'",
            f"ref='{world.table}'",
            f"output='{world.output}'",
            node,
        ]
        composed = hydra.compose("evaluate", arguments)
    with pytest.raises(UserError) as caught:
        evaluate(to_config(composed, EvaluateConfig))
    assert says in str(caught.value)
    assert not world.output.exists()


def test_the_page_has_the_worst_case_first_and_leads_to_viewers(world: World) -> None:
    world.add("good", _labels(), _labels())
    world.add("bad", _labels(4), _labels())
    (world.pred / "bad.html").write_text("<p>viewer")
    report = {
        "status": "ok",
        "warnings": [],
        "agreements": {},
        "most_disputed_xyz_mm": None,
        "dice_at_least": {"left_lung": {"value": 0.648, "level": 0.95, "patients": 31}},
    }
    (world.pred / "bad.json").write_text(json.dumps(report), encoding="utf-8")
    evaluate_folder(
        world.pred, world.table, world.output, TASK, VALUES, progress=_say_nothing, num_pictures=1
    )
    page = (world.output / "report.html").read_text(encoding="utf-8")
    assert page.index('<figure id="case-0" data-case="bad">') < page.index(
        '<figure id="case-1" data-case="good">'
    )
    assert page.count('<img src="data:') == 1
    assert 'href="../pred%2C%20out/bad.html"' in page
    assert 'href="overlays/good.png"' in page
    assert page.count("at least 0.64 in 19 of 20 patients (31 patients)") == 1
    assert not (world.output / "differences.csv").exists()
    evaluate_folder(
        world.pred, world.table, world.output, TASK, VALUES, progress=_say_nothing, pictures=False
    )
    assert '<img src="data:' not in (world.output / "report.html").read_text(encoding="utf-8"), (
        "pictures of an earlier evaluation"
    )


def test_the_page_of_the_present_folder_has_its_name(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.add("a", _labels(), _labels())
    world.output.mkdir()
    monkeypatch.chdir(world.output)
    evaluate_folder(
        world.pred, world.table, Path(), TASK, VALUES, progress=_say_nothing, pictures=False
    )
    page = (world.output / "report.html").read_text(encoding="utf-8")
    assert f"<h1>{world.output.name}" in page


def test_the_page_leads_into_folders_whose_names_are_no_utf8(world: World) -> None:
    world.pred = world.folder / os.fsdecode(b"M\xfcller")
    world.pred.mkdir()
    world.add("a", _labels(), _labels())
    (world.pred / "a.html").write_text("<p>viewer")
    evaluate_folder(world.pred, world.table, world.output, TASK, VALUES, progress=_say_nothing)
    page = (world.output / "report.html").read_text(encoding="utf-8")
    assert 'href="../M%FCller/a.html"' in page


def test_differences_to_a_baseline_are_those_of_scipy(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages: list[dict[str, Any]] = []
    render = report_page.render_cases

    def noted(*given: Any, **keys: Any) -> str:
        pages.append(keys)
        return render(*given, **keys)

    monkeypatch.setattr(report_page, "render_cases", noted)
    for number, (shift, name) in enumerate(((0, "a"), (2, "b"), (5, "c"))):
        world.add(name, _labels(shift), _labels())
        write_labels(world.folder / "older" / f"{name}.nii.gz", _labels(number + 1), GRID)
    write_labels(world.folder / "older" / "b.nii.gz", np.zeros(GRID.shape, np.uint8), GRID)
    older = world.folder / "older scores"
    evaluate_folder(
        world.folder / "older",
        world.table,
        older,
        TASK,
        VALUES,
        progress=_say_nothing,
        pictures=False,
    )
    lines: list[str] = []
    evaluate_folder(
        world.pred,
        world.table,
        world.output,
        TASK,
        VALUES,
        pictures=False,
        progress=lines.append,
        baseline=older,
    )
    table = {(row["region"], row["metric"]): row for row in world.read("differences.csv")}
    before = {
        (row["case"], row["region"]): float(row["dice"]) for row in read_csv(older / "metrics.csv")
    }
    after = {case: float(row["dice"]) for case, row in world.metrics().items()}
    assert pages[-1]["baseline"] == str(older)
    assert pages[-1]["baseline_dices"] == pytest.approx(before, abs=1e-6)
    for region in ("left_lung", "right_lung"):
        new, old = (
            [scores[case, region] for case in ("a", "b", "c")] for scores in (after, before)
        )
        interval = stats.ttest_rel(new, old).confidence_interval(0.95)
        row = table[region, "dice"]
        assert [float(row["ci95_low"]), float(row["ci95_high"])] == pytest.approx(
            [interval.low, interval.high], abs=2e-6
        )
    means = [
        np.mean(
            [after[case, region] - before[case, region] for region in ("left_lung", "right_lung")]
        )
        for case in "abc"
    ]
    assert float(table["all", "dice"]["difference"]) == pytest.approx(np.mean(means), abs=2e-6)
    assert (table["left_lung", "dice"]["cases"], table["left_lung", "hd95_mm"]["cases"]) == (
        "3",
        "2",
    ), "an infinite distance has no pair"
    assert any(line.startswith("left_lung: Dice +") and "3 cases" in line for line in lines)
    evaluate_folder(
        world.pred,
        world.table,
        world.folder / "same",
        TASK,
        VALUES,
        pictures=False,
        progress=_say_nothing,
        baseline=world.output,
    )
    same = read_csv(world.folder / "same" / "differences.csv")
    assert {(float(row["difference"]), row["better"], row["worse"]) for row in same} == {
        (0.0, "0", "0")
    }


def test_scans_of_a_patient_count_together_and_cases_of_one_side_are_named(world: World) -> None:
    for name, shift in (("a1", 0), ("a2", 1), ("b", 4), ("new", 0)):
        world.add(name, _labels(shift), _labels())
        write_labels(world.folder / "older" / f"{name}.nii.gz", _labels(2), GRID)
    world.add("gone", _labels(), _labels())
    older = world.folder / "older scores"
    (world.folder / "older" / "new.nii.gz").rename(world.folder / "older" / "gone.nii.gz")
    (world.pred / "gone.nii.gz").unlink()
    evaluate_folder(
        world.folder / "older",
        world.table,
        older,
        TASK,
        VALUES,
        pictures=False,
        progress=_say_nothing,
    )
    rows = read_csv(world.table)
    write_csv(world.table, [row | {"patient": row["case"][0]} for row in rows])
    lines: list[str] = []
    evaluate_folder(
        world.pred,
        world.table,
        world.output,
        TASK,
        VALUES,
        pictures=False,
        progress=lines.append,
        baseline=older,
    )
    before = {
        (row["case"], row["region"]): float(row["dice"]) for row in read_csv(older / "metrics.csv")
    }
    gains = {
        key: float(row["dice"]) - before[key]
        for key, row in world.metrics().items()
        if key in before
    }
    left = {case: gain for (case, region), gain in gains.items() if region == "left_lung"}
    by_patient = [(left["a1"] + left["a2"]) / 2, left["b"]]
    (row,) = [
        row
        for row in world.read("differences.csv")
        if (row["region"], row["metric"]) == ("left_lung", "dice")
    ]
    assert (row["cases"], row["patients"]) == ("3", "2")
    assert float(row["difference"]) == pytest.approx(np.mean(by_patient), abs=2e-6)
    interval = stats.ttest_1samp(by_patient, 0.0).confidence_interval(0.95)
    assert float(row["ci95_low"]) == pytest.approx(interval.low, abs=1e-5)
    assert float(row["wilcoxon_p"]) == pytest.approx(stats.wilcoxon(by_patient).pvalue)
    sentences = [
        line.removeprefix("differences: ") for line in lines if line.startswith("differences: ")
    ]
    assert sentences == [
        "3 cases of 2 patients; the cases of a patient count together, by their mean",
        "not compared, as only the baseline has scores of them: gone",
        "not compared, as only this evaluation has scores of them: new",
    ]
    page = (world.output / "report.html").read_text(encoding="utf-8")
    assert all(sentence in page for sentence in sentences)
    assert "Wilcoxon p" in page


def test_without_patients_each_case_counts_as_one_and_it_is_said(world: World) -> None:
    for name in "ab":
        world.add(name, _labels(1), _labels())
    references = world.folder / "references"
    for name in "ab":
        write_labels(references / f"{name}.nii.gz", _labels(), GRID)
    evaluate_folder(
        world.pred,
        references,
        world.folder / "older",
        TASK,
        VALUES,
        progress=_say_nothing,
        pictures=False,
    )
    lines: list[str] = []
    evaluate_folder(
        world.pred,
        references,
        world.output,
        TASK,
        VALUES,
        pictures=False,
        progress=lines.append,
        baseline=world.folder / "older",
    )
    assert {row["patients"] for row in world.read("differences.csv")} == {"2"}
    assert {row["wilcoxon_p"] for row in world.read("differences.csv")} == {"1"}, "equal scores"
    own = (
        "differences: each of the 2 cases counts as a patient of its own: no patient is named for "
        "several cases"
    )
    assert own in lines
    assert any("ref=<case table> does, by its column patient" in line for line in lines)


def test_a_region_without_a_finite_score_leaves_the_others_of_its_case() -> None:
    def rows(left: float, right: float) -> list[dict[str, Any]]:
        return [
            {
                "case": "a",
                "region": region,
                "dice": 0.9,
                "nsd_1mm": 0.9,
                "nsd_2mm": 0.9,
                "hd95_mm": distance,
            }
            for region, distance in (("left", left), ("right", right))
        ]

    compared = compare_rows(rows(math.inf, 2.0), rows(5.0, 3.0), {})
    distances = {
        region: difference for region, metric, difference in compared if metric == "hd95_mm"
    }
    assert list(distances) == ["right", ALL]
    assert {difference.difference for difference in distances.values()} == {-1.0}
    one_region = compare_rows(rows(1.0, 2.0)[:1], rows(5.0, 3.0), {})
    assert {region for region, _, _ in one_region} == {"left"}, "no mean over one region"


def test_a_region_may_have_the_name_of_the_mean_over_all() -> None:
    def rows(first: float, second: float) -> list[dict[str, Any]]:
        metrics = ("dice", "nsd_1mm", "nsd_2mm", "hd95_mm")
        return [
            {"case": "a", "region": region} | dict.fromkeys(metrics, score)
            for region, score in ((ALL, first), ("left", second))
        ]

    compared = compare_rows(rows(0.5, 0.9), rows(0.25, 0.25), {})
    dices = [
        (region, difference.mean) for region, metric, difference in compared if metric == "dice"
    ]
    assert dices == [(ALL, 0.5), ("left", 0.9), (ALL, pytest.approx(0.7))]


def test_more_is_better_for_overlap_and_worse_for_a_distance() -> None:
    def row(score: float) -> dict[str, Any]:
        metrics = ("dice", "nsd_1mm", "nsd_2mm", "hd95_mm")
        return {"case": "a", "region": "left"} | dict.fromkeys(metrics, score)

    compared = compare_rows([row(0.5)], [row(0.25)], {})
    counts = {metric: (difference.better, difference.worse) for _, metric, difference in compared}
    more_is_better = dict.fromkeys(("dice", "nsd_1mm", "nsd_2mm"), (1, 0))
    assert counts == {**more_is_better, "hd95_mm": (0, 1)}


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (None, "there is no metrics.csv"),
        ("case,region\na,left_lung\n", "it is damaged"),
        (
            "case,region,dice,nsd_1mm,nsd_2mm,hd95_mm\nz,left_lung,1,1,1,0\n",
            "none of the scored cases",
        ),
        (
            "case,region,dice,nsd_1mm,nsd_2mm,hd95_mm\na,left_lung,nan,nan,nan,inf\n",
            "none of its scores of the same cases is finite",
        ),
    ],
)
def test_a_baseline_that_cannot_be_compared_is_refused(
    world: World, table: str | None, says: str
) -> None:
    world.add("a", _labels(), _labels())
    baseline = world.folder / "older"
    baseline.mkdir()
    if table:
        (baseline / "metrics.csv").write_text(table)
    with pytest.raises(UserError, match=says):
        evaluate_folder(
            world.pred,
            world.table,
            world.output,
            TASK,
            VALUES,
            pictures=False,
            progress=_say_nothing,
            baseline=baseline,
        )


def test_a_baseline_of_other_cases_is_refused_before_anything_is_scored(world: World) -> None:
    world.add("a", _labels(), _labels())
    baseline = world.folder / "older"
    baseline.mkdir()
    write_csv(
        baseline / "metrics.csv",
        [{"case": "z", "region": "left_lung", "dice": 1, "nsd_1mm": 1, "nsd_2mm": 1, "hd95_mm": 0}],
    )
    with pytest.raises(UserError, match="none of the scored cases"):
        evaluate_folder(
            world.pred,
            world.table,
            world.output,
            TASK,
            VALUES,
            progress=_say_nothing,
            baseline=baseline,
        )
    assert not world.output.exists()


def test_nothing_of_an_earlier_evaluation_stands_beside_the_new_scores(world: World) -> None:
    world.add("a", _labels(), _labels())
    evaluate_folder(world.pred, world.table, world.output, TASK, VALUES, progress=_say_nothing)
    again = world.folder / "again"
    shutil.copytree(world.output, again)
    evaluate_folder(
        world.pred,
        world.table,
        again,
        TASK,
        VALUES,
        progress=_say_nothing,
        baseline=world.output,
    )
    pictures = ["overlays/a.png", "scores.png", "viewers/a.html"]
    assert all((again / name).is_file() for name in ("differences.csv", *pictures))
    evaluate_folder(
        world.pred, world.table, again, TASK, VALUES, progress=_say_nothing, pictures=False
    )
    assert not any((again / name).exists() for name in ("differences.csv", *pictures))
    assert (again / "report.html").is_file()
    (world.pred / "a.nii.gz").write_bytes(b"damaged")
    summary = evaluate_folder(world.pred, world.table, again, TASK, VALUES, progress=_say_nothing)
    assert list(summary.failed) == ["a"]
    assert not (again / "report.html").exists()


def test_a_picture_of_an_interrupted_evaluation_does_not_stand_beside_the_new_scores(
    world: World,
) -> None:
    """It has no table yet; the new references name no scan, so that nothing is drawn."""
    world.add("a", _labels(), _labels())
    picture = world.output / "overlays" / "a.png"
    picture.parent.mkdir(parents=True)
    picture.write_bytes(b"old")
    evaluate_folder(
        world.pred, world.folder / "ref", world.output, TASK, VALUES, progress=_say_nothing
    )
    assert not picture.exists()
    assert (world.output / "report.html").is_file()


def test_files_of_another_command_in_the_output_stay(world: World) -> None:
    world.add("a", _labels(), _labels())
    foreign = {
        "metrics.csv": "epoch,loss\n",
        "differences.csv": "run,dice\n",
        "viewers/a.html": "mine",
        "overlays/a.png": "mine",
    }
    for name, text in foreign.items():
        (world.output / name).parent.mkdir(parents=True, exist_ok=True)
        (world.output / name).write_text(text, encoding="utf-8")
    evaluate_folder(
        world.pred, world.table, world.output, TASK, VALUES, progress=_say_nothing, pictures=False
    )
    del foreign["metrics.csv"]  # it has the name of the table of scores
    for name, text in foreign.items():
        assert (world.output / name).read_text(encoding="utf-8") == text


def test_a_metric_that_fails_for_a_case_has_no_score_there(world: World) -> None:
    """As a distance fails for an empty mask; all other scores stay."""
    world.add("a", _labels(), _labels())
    world.add("empty", np.zeros(GRID.shape, np.uint8), _labels())

    def largest_value(pred: Any, target: Any, spacing_mm: tuple[float, float, float]) -> float:
        del target, spacing_mm
        return float(pred[pred > 0].max())

    lines: list[str] = []
    summary = evaluate_folder(
        world.pred,
        world.table,
        world.output,
        TASK,
        VALUES,
        progress=lines.append,
        pictures=False,
        metrics={"largest": largest_value},
    )
    scores = {key: row["largest"] for key, row in world.metrics().items()}
    assert scores["a", "left_lung"] == "1.000000"
    assert scores["empty", "right_lung"] == "nan"
    assert not summary.failed
    (warning, _) = summary.warnings
    assert warning.startswith("empty, left_lung: metrics.largest has no score (RuntimeError: max()")
    assert f"warning: {warning}" in lines
    rows = {(row["region"], row["metric"]): row for row in world.read("summary.csv")}
    row = rows["left_lung", "largest"]
    assert (row["number"], row["infinite"], row["mean"]) == ("2", "1", "1.000000")


def test_the_console_shows_a_trust_that_some_references_have(world: World) -> None:
    for trusts, is_shown in ((("", "manual"), True), (("manual", "manual"), False)):
        world.rows = world.rows[:1]
        for name, shift, trust in zip("ab", (4, 0), trusts, strict=True):
            world.add(name, _labels(shift), _labels(), trust=(trust, trust))
        lines: list[str] = []
        evaluate_folder(
            world.pred,
            world.table,
            world.output,
            TASK,
            VALUES,
            progress=lines.append,
            pictures=False,
        )
        table = [line.split() for line in lines if line.startswith("left_lung")]
        assert [row[1] for row in table] == (["all", "manual"] if is_shown else ["all"])


def test_all_is_no_trust_and_may_be_a_region(world: World) -> None:
    scores = dict.fromkeys(("nsd_1mm", "nsd_2mm", "hd95_mm", "volume_pred_ml", "volume_ref_ml"), 1)
    rows = [
        {"case": "a", "region": region, "trust": "", "dice": dice, **scores}
        for region, dice in ((ALL, 0.5), ("left", 0.9))
    ]
    dices = [row for row in summarise(rows) if row["metric"] == "dice"]
    assert [(row["region"], row["number"], row["mean"]) for row in dices] == [
        (ALL, 1, 0.5),
        ("left", 1, 0.9),
        (ALL, 2, pytest.approx(0.7)),
    ]
    assert len(console_table(summarise(rows))) == 1 + 3
    world.add("a", _labels(), _labels(), trust=("", ALL))
    with pytest.raises(UserError, match="the case 'a' has the trust 'all', which stands for every"):
        evaluate_folder(world.pred, world.table, world.output, TASK, VALUES, progress=_say_nothing)
    assert not world.output.exists()


def test_two_cases_whose_names_look_alike_are_refused(world: World) -> None:
    """Taken for one case, they would be scored once, against the reference of the later row."""
    world.add("u\u0308", _labels(2), _labels())
    world.add("\u00fc", None, _labels())
    with pytest.raises(UserError, match=r"two cases are called \u00fc, .* rename one of them"):
        evaluate_folder(world.pred, world.table, world.output, TASK, VALUES, progress=_say_nothing)
    assert not world.output.exists()


def test_a_label_map_whose_values_have_no_name_fails_alone(world: World) -> None:
    """`data.label_values` names structures, which a label map does not have."""
    world.add("a", _labels(), _labels())
    values = {"left_lung": "left_lung", "right_lung": "right_lung"}
    summary = evaluate_folder(
        world.pred, world.table, world.output, TASK, values, progress=_say_nothing, pictures=False
    )
    assert "holds the value 1, which data.label_values does not name" in summary.failed["a"]
    assert "(it names no value)" in summary.failed["a"]
