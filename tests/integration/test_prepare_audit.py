"""`prepare` on one table of bad cases: every message, the table, the pictures, and the cures."""

from __future__ import annotations

import contextlib
import csv
import io
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import pytest
from PIL import Image

from medseg.commands.prepare import prepare
from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.config.schema import PrepareConfig
from medseg.data import cache
from medseg.data.case_table import Case
from medseg.data.source_case import SourceCase
from medseg.errors import UserError
from medseg.geometry.grid import VoxelGrid
from medseg.io.write import write_image, write_labels

SHAPE = (20, 44, 56)
SPACING_MM = (8.0, 6.0, 6.5)
GRID = VoxelGrid(SHAPE, SPACING_MM, (-180.0, -130.0, 40.0))


def chest(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A body in air with two lungs of different size, noisy as a scan, asymmetric; its labels."""
    z, y, x = np.meshgrid(*(np.arange(size, dtype=float) for size in SHAPE), indexing="ij")
    image = np.full(SHAPE, -990.0)
    image[((y - 23) / 17) ** 2 + ((x - 28) / 25) ** 2 < 1] = 50
    image[((y - 21) / 15) ** 2 + ((x - 28) / 23) ** 2 < 1] = -90
    image[((y - 22) / 13) ** 2 + ((x - 28) / 22) ** 2 < 1] = 40
    labels = np.zeros(SHAPE, dtype=np.uint8)
    labels[((z - 11) / 7.3) ** 2 + ((y - 20) / 8) ** 2 + ((x - 39) / 6) ** 2 < 1] = 1
    labels[((z - 10) / 8.3) ** 2 + ((y - 22) / 9) ** 2 + ((x - 16) / 8) ** 2 < 1] = 2
    image[labels > 0] = -860
    image[4:, 34:37, 27:30] = 700  # a spine that ends above the lowest slices
    image += np.random.default_rng(seed).normal(0, 18, SHAPE)
    return np.clip(np.rint(image), -1024, 3071).astype(np.int16), labels


@dataclass
class Scan:
    """A case to write: each is the good chest with one thing changed."""

    image: np.ndarray
    labels: np.ndarray
    image_grid: VoxelGrid = GRID
    label_grid: VoxelGrid | None = None
    cells: str = ",,,"  # patient, hu_slope, hu_offset, ignore_findings
    trust: str = ","


def moved(offset_mm: float, turn: float = 0.0) -> VoxelGrid:
    direction = ((1.0, turn, 0.0), (-turn, 1.0, 0.0), (0.0, 0.0, 1.0))
    return VoxelGrid(SHAPE, SPACING_MM, (-180.0 + offset_mm, -130.0, 40.0), direction)


def padded(image: np.ndarray, value: int, radius: float) -> np.ndarray:
    """The image with padding outside a circle about the middle of the slices."""
    y, x = np.mgrid[: SHAPE[1], : SHAPE[2]]
    outside = ((y - 22) * 6.0) ** 2 + ((x - 28) * 6.5) ** 2 > radius**2
    return np.where(outside, value, image).astype(np.int16)


def write_table(folder: Path, scans: dict[str, Scan]) -> Path:
    rows = [
        (
            "case,image,labels,patient,hu_slope,hu_offset,ignore_findings,trust_left_lung,"
            "trust_right_lung"
        )
    ]
    for name, scan in scans.items():
        write_image(folder / f"{name}.nii.gz", scan.image, scan.image_grid)
        write_labels(folder / f"{name}_l.nii.gz", scan.labels, scan.label_grid or scan.image_grid)
        rows.append(f"{name},{name}.nii.gz,{name}_l.nii.gz,{scan.cells},{scan.trust}")
    (folder / "table.csv").write_text("\n".join(rows) + "\n")
    return folder / "table.csv"


def bad_scans() -> dict[str, Scan]:
    image, labels = chest()
    windowed = np.rint((np.clip(image, -1250.0, 250.0) + 1250) / 1500 * 255).astype(np.int16)
    wide = labels.copy()
    wide[4:18, 12:30, 22:28] = 2
    wide[4:18, 12:30, 28:36] = 1
    sevens = np.where(np.arange(SHAPE[0])[:, None, None] > 14, 7 * (labels > 0), labels).astype(
        np.uint8
    )
    upside_down = VoxelGrid(SHAPE, SPACING_MM, (0.0, 0.0, 0.0), ((1, 0, 0), (0, 1, 0), (0, 0, -1)))
    airless = np.where(chest(5)[0] < -500, chest(5)[0] + 900, chest(5)[0])
    return {
        "good": Scan(image, labels),
        "offset": Scan(chest(1)[0] + 1024, labels),
        "twice": Scan(padded(chest(2)[0] - 1024, -3048, 150), labels),
        "windowed": Scan(windowed, labels),
        "normalised": Scan((chest(3)[0] / 400).astype(np.float32), labels),
        "magnetic": Scan(np.abs(chest(4)[0] // 2 + 600), labels),
        "constant": Scan(np.full_like(image, 3), labels),
        "inside": Scan(airless, labels),
        "ge": Scan(padded(chest(6)[0], -2048, 150), labels),
        "ge2": Scan(padded(chest(7)[0], -3024, 150), labels),
        "filled": Scan(padded(chest(8)[0], 0, 150), labels),
        "clipped": Scan(np.clip(chest(9)[0], -1000, None), labels),
        "narrow": Scan(np.clip(chest(10)[0], -900, 45), labels),
        "near": Scan(chest(11)[0], labels, label_grid=moved(0.04, turn=1e-4)),
        "far": Scan(chest(12)[0], labels, label_grid=moved(3.0)),
        "turned": Scan(chest(13)[0], labels, label_grid=moved(0.0, turn=0.02)),
        "finer": Scan(
            chest(13)[0] + 1,
            labels,
            label_grid=VoxelGrid(SHAPE, (8.0, 3.0, 3.25), (-180.0, -130.0, 40.0)),
        ),
        "short": Scan(
            chest(14)[0],
            labels[:-1],
            label_grid=VoxelGrid((19, 44, 56), SPACING_MM, (-180.0, -130.0, 40.0)),
        ),
        "unknown": Scan(chest(15)[0], sevens),
        "empty": Scan(chest(16)[0], 0 * labels),
        "negative": Scan(chest(26)[0], 0 * labels, trust="absent,absent"),
        "swapped": Scan(chest(17)[0], SWAP[labels]),
        "alone": Scan(chest(18)[0], SWAP[labels] * (labels == 2), trust=",absent"),
        "missing": Scan(chest(19)[0], labels * (labels == 1)),
        "touching": Scan(np.where(wide > 0, -860, chest(20)[0]).astype(np.int16), wide),
        "cut": Scan(chest(21)[0][8:], labels[8:], VoxelGrid((12, 44, 56), SPACING_MM)),
        "field": Scan(padded(chest(22)[0], -2000, 100), labels),
        "upside": Scan(chest(23)[0], labels[::-1]),
        "coarse": Scan(chest(24)[0], labels, VoxelGrid(SHAPE, (28.0, 6.0, 6.5))),
        "copy": Scan(image, labels, cells="good,,,"),
        "copy2": Scan(image[::-1], labels[::-1], upside_down),
    }


SWAP = np.array([0, 2, 1], dtype=np.uint8)
WINDOW = (
    "they are windowed or normalised, not HU; convert the scan again from its DICOM files, or "
    "undo a known window: "
    "for one of -1250 to 250 HU set data.hu_slope={0} data.hu_offset={1} (for predict: "
    "hu_slope={0} hu_offset={1}), or these columns of the case table"
)
OFFSET = (
    "they are about 1024 too {} for HU; data.hu_offset={} corrects them (predict: hu_offset={}), "
    "or the column hu_offset of the case table"
)
BY_VOXEL = (
    " (tolerance 0.1 mm); resample it to the image, or, if only its header is wrong, use its "
    "voxels as they are with "
    "data.ignore_findings=[label_grid]"
)
ELSEWHERE = "refused (label_grid): the label map is not on the grid of its image: "
CUT = "; expected for a partial scan; volumes are those of the visible part"
SEEN = {
    "good": [],
    "offset": [
        "refused (hu_offset): the values run from 0 to 1769, and soft tissue lies at about 1065: "
        + OFFSET.format("high", -1024, -1024)
    ],
    "twice": [
        (
            "refused (hu_offset): the values run from -3048 to -265, and soft tissue lies at "
            "about -979: "
        )
        + OFFSET.format("low", 1024, 1024)
    ],
    "windowed": [
        "refused (hu_range): the values run from 38 to 255: " + WINDOW.format("5.88235", "-1250")
    ],
    "normalised": [
        "refused (hu_range): the values run from -2.56 to 1.8575: "
        + WINDOW.format("339.559", "-380.73")
    ],
    "magnetic": [
        "refused (hu_range): the values run from 88 to 974, and almost no voxel has the "
        "values of fat or air: this is "
        "no CT in HU; give a CT in HU, or correct its scale with data.hu_slope and "
        "data.hu_offset (for predict: hu_slope and hu_offset)"
    ],
    "constant": ["refused (hu_range): every voxel holds 3; export the scan again"],
    "inside": [
        "warning (no_air): no voxel is as dark as air or an organ full of it: the values run "
        "from -152 to 746; expected for a crop inside the "
        "body; otherwise check that the values are HU"
    ],
    "ge": [],
    "ge2": [],
    "filled": [
        "warning (padding): 30.1% of the voxels hold exactly 0 HU up to the border of their "
        "slices: a constant was filled "
        "in outside the field of view; nothing to do: it is read as air, -1024 HU"
    ],
    "clipped": [],
    "narrow": [
        "warning (clipped): 46.2% of the voxels hold the lowest value, -900 HU: the image was "
        "clipped there; harmless if "
        "task.window_hu begins at -900 HU or above",
        "warning (clipped): 17.8% of the voxels hold the highest value, 45 HU: the image was "
        "clipped there; harmless if "
        "task.window_hu ends at 45 HU or below",
    ],
    "near": [],
    "far": [ELSEWHERE + "its corners lie up to 3.00 mm off" + BY_VOXEL],
    "turned": [
        ELSEWHERE
        + "its axes are turned by 1.1 degrees, its corners lie up to 7.15 mm off"
        + BY_VOXEL
    ],
    "finer": [
        ELSEWHERE
        + "its spacing is 8×3×3.25 mm, the image's 8×6×6.5 mm, its corners lie up to 178.75 mm off"
        + BY_VOXEL
    ],
    "short": [
        "refused (label_shape): the label map has 19×44×56 voxels, the image 20×44×56 (z, y, "
        "x); resample the label map to the "
        "grid of the image with nearest neighbours"
    ],
    "unknown": [
        "refused (unknown_values): the label map holds the value 7, which data.label_values "
        "does not name (it names 1, 2); add "
        "them there, or +data.label_values.background=[7] if they are not wanted"
    ],
    "empty": [
        "refused (empty_labels): the label map holds nothing but zeros; export it again; if "
        "the image shows none of left_lung, "
        "right_lung, write 'absent' into the columns trust_<region> of the case table"
    ],
    "negative": [],
    "swapped": [
        "refused (swapped_sides): left_lung lies at x = -76 mm and right_lung at 74 mm, but "
        "the patient's left must lie at larger "
        "x (LPS): the labels are swapped; look at the picture: if the labels are exchanged, "
        "correct data.label_values or the file; if the "
        "position of the body contradicts the header, correct the headers and leave "
        "data.label_values as they are: with "
        "exchanged values the network would learn swapped sides"
    ],
    "alone": [
        "warning (doubtful_side): only left_lung is labelled, and it lies 83 mm across the "
        "body's midline, on the opposite side; look at the picture "
        "and correct data.label_values or the file if the side is wrong"
    ],
    "missing": [
        "warning (missing_region): right_lung is not in the label map; if the image does not "
        "show it, write 'absent' into the "
        "column trust_right_lung of the case table"
    ],
    "touching": [
        "warning (touching_regions): left_lung and right_lung touch over 121.0 cm²; look at "
        "the picture: the border between them may "
        "be an artefact of automatic segmentation"
    ],
    "cut": [
        (
            "warning (cut_region): the scan cuts left_lung (lower end, 48.8 cm²) and right_lung "
            "(lower end, 82.3 cm²)"
        )
        + CUT
    ],
    "field": [
        (
            "warning (cut_region): the scan cuts left_lung (edge of the field of view) and "
            "right_lung (edge of the field of view)"
        )
        + CUT
    ],
    "upside": [
        "refused (misplaced_labels): the labels do not follow the edges of the image, but "
        "would if mirrored head to feet (fit "
        "2.3 instead of 1.5): they were written in another order of voxels; look at the "
        "picture and write them again in the order "
        "of the image"
    ],
    "coarse": [
        "warning (spacing_outlier): its slices are 28 mm apart where the median of all cases "
        "is 8 mm; expected if the scanner was set "
        "so; otherwise the header may use another unit"
    ],
    "copy": [
        "warning (duplicate_image): its image has the same voxels as the case 'good' of the "
        "same patient; remove one of them, "
        "otherwise the scan counts twice"
    ],
    "copy2": [
        "refused (duplicate_image): its image has the same voxels as the case 'good', but the "
        "patient is 'copy2' here and 'good' "
        "there: one could be used for training and the other for validation; remove one of "
        "them, or give both the same patient in the case table"
    ],
    "unreadable": [
        (
            "{folder}/unreadable.nii.gz: the file cannot be read: its compressed voxels end too "
            "early; copy or export it again."
        )
    ],
}
PADDING = (
    "{} of the voxels hold {}, which is padding outside the scanner's field of view; nothing to "
    "do: it is read as air, -1024 HU"
)
NOTED = {
    "ge": PADDING.format("30.1%", -2048),
    "ge2": PADDING.format("30.1%", -3024),
    "clipped": "13.9% of the voxels hold the lowest value, -1000 HU: the image was clipped there; "
    "harmless if task.window_hu begins "
    "at -1000 HU or above",
}


@dataclass
class Run:
    """What one run of `prepare` gave."""

    code: int
    out: list[str]
    err: list[str]
    folder: Path

    def told(self, case: str) -> list[str]:
        """Sentences on a case; one that begins with the case's file does not name the case."""
        by_name, by_file = f"medseg: {case}: ", f"medseg: {self.folder}/{case}.nii.gz: "
        lines = [line for line in self.err if line.startswith((by_name, by_file))]
        return [line.removeprefix(by_name).removeprefix("medseg: ") for line in lines]

    def table(self) -> dict[str, dict[str, str]]:
        with (self.folder / "cache" / "audit.csv").open(newline="", encoding="utf-8") as file:
            return {row["case"]: row for row in csv.DictReader(file)}


def run(table: Path, *overrides: str) -> Run:
    # The chests differ in their noise alone, and their lungs are small.
    fixed = (
        ["data.ignore_findings=[near_copy,implausible_volume]"]
        if not any("ignore_findings" in one for one in overrides)
        else []
    )
    common = [f"data.cases='{table}'", f"data.cache='{table.parent / 'cache'}'", *fixed]
    spacings = ["spacing@spacings.coarse=isotropic_4mm", "spacing@spacings.fine=isotropic_3mm"]
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = to_config(
            hydra.compose("prepare", [*common, *spacings, *overrides]), PrepareConfig
        )
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = prepare(config)
    return Run(code, out.getvalue().splitlines(), err.getvalue().splitlines(), table.parent)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One run on all bad cases."""
    folder = tmp_path_factory.mktemp("bad cases")
    table = write_table(folder, bad_scans())
    (folder / "unreadable.nii.gz").write_bytes((folder / "good.nii.gz").read_bytes()[:5000])
    with table.open("a") as file:
        file.write("unreadable,unreadable.nii.gz,good_l.nii.gz,,,,,,\n")
    return run(table)


def is_bad(name: str) -> bool:
    return any(line.startswith("refused") for line in SEEN[name]) or name == "unreadable"


@pytest.mark.parametrize("name", SEEN)
def test_what_a_person_is_told(seen: Run, name: str) -> None:
    assert seen.told(name) == [
        line.format(folder=seen.folder) if name == "unreadable" else line for line in SEEN[name]
    ]
    assert any(line.startswith(f"{name}: ") for line in seen.out) == (
        not is_bad(name) or name == "copy2"
    )


def test_the_end_of_the_run(seen: Run) -> None:
    assert seen.code == 1
    bad = [name for name in SEEN if is_bad(name)]
    assert (
        seen.err[-1] == f"medseg: {len(bad)} of {len(SEEN)} cases cannot be used: {', '.join(bad)}"
    )
    assert seen.out[0] == "good: 20×44×56 at 8×6×6.5 mm, left_lung 453 ml, right_lung 778 ml"
    assert seen.out[-1] == (
        "32 cases: 16 ready, 15 refused, 1 failed; 11 warnings (clipped 2, cut_region 2, "
        "no_air 1, padding 1, doubtful_side 1, "
        "missing_region 1, touching_regions 1, spacing_outlier 1, duplicate_image 1); see "
        f"{seen.folder}/cache/audit.csv, "
        f"{seen.folder}/cache/audit.png, {seen.folder}/cache/audit-2.png"
    )


def test_the_table_holds_a_line_for_each_case(seen: Run) -> None:
    rows = seen.table()
    assert list(rows) == list(SEEN)
    assert [name for name, row in rows.items() if row["status"] != "ready"] == [
        name for name in SEEN if is_bad(name)
    ]
    for name, sentence in NOTED.items():
        assert rows[name]["details"] == sentence
        assert (rows[name]["notes"], rows[name]["warnings"]) == (
            "clipped" if name == "clipped" else "padding",
            "",
        )
    good, image = rows["good"], chest()[0]
    assert [good[f"size_{axis}"] for axis in "zyx"] == ["20", "44", "56"]
    assert [good[f"spacing_{axis}_mm"] for axis in "zyx"] == ["8", "6", "6.5"]
    assert float(good["hu_min"]) == image.min()
    assert float(good["hu_max"]) == image.max()
    for name, share in (("hu_p01", 0.01), ("hu_p50", 0.5), ("hu_p99", 0.99)):
        assert float(good[name]) == np.sort(image, axis=None)[int(np.ceil(share * image.size)) - 1]
    assert float(good["left_lung_ml"]) == pytest.approx((chest()[1] == 1).sum() * 0.312, abs=0.05)
    assert rows["unreadable"]["size_z"] == ""
    assert rows["swapped"]["errors"] == "swapped_sides"


def test_the_pictures_show_all_cases(seen: Run) -> None:
    sizes = [Image.open(seen.folder / "cache" / name).size for name in ("audit.png", "audit-2.png")]
    assert sizes[0][0] == sizes[1][0]
    assert sizes[0][1] > 2 * sizes[1][1], "24 cases on the first, 8 on the second"


def test_warnings_are_kept_with_the_case_and_nothing_is_read_again(
    seen: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = {name for name in SEEN if not is_bad(name) or name == "copy2"}
    read = []
    read_source = cache.read_source

    def watched(case: Case, *arguments: Any) -> SourceCase:
        read.append(case.name)
        return read_source(case, *arguments)

    monkeypatch.setattr(cache, "read_source", watched)
    monkeypatch.setattr("medseg.commands.prepare.audit_pictures", lambda *_, **__: [])
    before = seen.table()
    again = run(seen.folder / "table.csv")
    assert read == [name for name in SEEN if name not in good], "the others once, for two spacings"
    assert again.table() == before
    assert again.err == seen.err


@pytest.mark.parametrize("axes", ["zyx", "xzy"])
def test_sides_are_those_of_the_world_whatever_the_order_in_the_file(
    axes: str, tmp_path: Path
) -> None:
    image, labels = chest()
    order = tuple("zyx".index(axis) for axis in axes)
    turned = GRID.reoriented(
        order, (False, True, True)
    )  # from the patient's left to right, and from back to front

    def stored(array: np.ndarray) -> np.ndarray:
        return np.flip(array.transpose(order), (1, 2))

    scans = {
        "good": Scan(stored(image), stored(labels), turned),
        "swapped": Scan(stored(chest(17)[0]), stored(SWAP[labels]), turned),
        "mixed": Scan(stored(chest(18)[0]), labels, turned, label_grid=GRID),
    }
    out = run(write_table(tmp_path, scans))
    assert {name: out.told(name) for name in scans} == {
        "good": [],
        "swapped": SEEN["swapped"],
        "mixed": [],
    }
    assert out.out[0] == "good: 20×44×56 at 8×6×6.5 mm, left_lung 453 ml, right_lung 778 ml"


def test_a_key_is_the_way_out_for_all_cases(tmp_path: Path) -> None:
    out = run(
        write_table(tmp_path, {"offset": Scan(chest()[0] + 1024, chest()[1])}),
        "data.hu_offset=-1024",
    )
    assert (out.code, out.err) == (0, [])
    (cached,) = tmp_path.glob("cache/4x4x4-*/*/image.npy")
    right = run(write_table(tmp_path / "right", {"good": Scan(*chest())}))
    assert right.code == 0
    (expected,) = tmp_path.glob("right/cache/4x4x4-*/*/image.npy")
    assert np.array_equal(np.load(cached), np.load(expected))


def test_every_case_has_a_way_out(tmp_path: Path) -> None:
    bad = bad_scans()
    image, labels = chest()
    ways = {
        "offset": Scan(image + 1024, labels, cells=",,-1024,"),
        "twice": Scan(image - 1024, labels, cells=",,1024,"),
        "windowed": Scan(bad["windowed"].image, labels, cells=",5.882352941,-1250,"),
        "far": replace(bad["far"], image=image, cells=",,,label_grid"),
        "unknown": replace(bad["unknown"], cells=",,,unknown_values"),
        "empty": replace(bad["empty"], trust="absent,absent"),
        "swapped": replace(bad["swapped"], cells=",,,swapped_sides"),
        "upside": replace(bad["upside"], cells=",,,misplaced_labels"),
        "magnetic": replace(bad["magnetic"], cells=",,,hu_range"),
        "good": Scan(image, labels, cells=",,,"),
    }
    out = run(
        write_table(tmp_path, ways),
        "data.ignore_findings=[duplicate_image,near_copy,implausible_volume]",
    )
    assert out.code == 0
    assert [line.split(" of ")[0] for line in out.err] == [
        "medseg: windowed: warning (clipped): 0.3%"
    ], "beyond 250 HU"
    array = {
        (sidecar.parent.name.rpartition("-")[0], kind): np.load(sidecar.parent / f"{kind}.npy")
        for sidecar in tmp_path.glob("cache/4x4x4-*/*/case.json")
        for kind in ("image", "labels")
    }
    for name in ("offset", "twice", "far"):
        assert np.array_equal(array[name, "image"], array["good", "image"]), name
        assert np.array_equal(array[name, "labels"], array["good", "labels"]), name
    is_lung = array["good", "labels"] > 0
    assert np.abs(array["windowed", "image"] - array["good", "image"])[is_lung].max() <= 4, (
        "the step of 8 bits is 5.9 HU"
    )
    assert set(np.unique(array["unknown", "labels"])) == {0, 1, 2}
    assert not array["empty", "labels"].any()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "data.ignore_findings=[swaped_sides]",
            "there is no finding 'swaped_sides'; did you mean swapped_sides?",
        ),
        (
            "data.ignore_findings=[label_shape]",
            "label_shape cannot be ignored, since the label map has another number of voxels than "
            "the image, or another order of axes; correct the file.",
        ),
        ("data.hu_slope=0", "data.hu_slope: must lie in (0, inf), but got 0"),
    ],
)
def test_a_mistaken_way_out_is_told(tiny_table: Path, override: str, said: str) -> None:
    with pytest.raises(UserError) as error:
        run(tiny_table, override)
    assert said in str(error.value)


def test_a_table_needs_no_split(tmp_path: Path) -> None:
    image, labels = chest()
    table = write_table(tmp_path, {"only": Scan(image, labels)})
    assert run(table, "data.fold=3").code == 0
    table.write_text("case,image,labels,split\nonly,only.nii.gz,only_l.nii.gz,test\n")
    assert run(table).code == 0
