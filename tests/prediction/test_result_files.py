"""Result files of `save`: their names, their content, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import hydra
import nibabel
import numpy as np
import pytest
from dicom_files import save_slice
from oracle import GRID, TASK, CoarseOracle, FineOracle, dice, scan, stage

from medseg.cascade.bound import DiceBound
from medseg.commands import predict as app
from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.errors import UserError
from medseg.inference.segmentation import Segmentation
from medseg.io.dicom.labels import open_label_file, read_label_file
from medseg.io.dicom.read import open_slices
from medseg.io.read import read_labels
from medseg.io.tables import read_csv
from medseg.io.write import write_image, write_labels
from medseg.metrics.hu_statistics import HU_FIGURES
from medseg.prediction import result_files as results_module
from medseg.prediction.options import PredictConfig, Save
from medseg.prediction.result_files import take_picture_voxels
from medseg.prediction.scans import Scan
from medseg.preprocess.orient import Orientation
from medseg.report.overlay import Canvas

LABELS = {"left_lung": 1, "right_lung": 2}


@pytest.fixture(autouse=True)
def weights(monkeypatch: pytest.MonkeyPatch) -> None:
    networks = {"coarse": CoarseOracle(), "fine": FineOracle()}
    monkeypatch.setattr(
        "medseg.cascade.load.load_stage",
        lambda path, name, *_: stage(networks[name], name, checkpoints={str(path): "0"}),
    )


def predict(source: Path, output: Path, *overrides: str) -> int:
    arguments = [
        f"input='{source}'",
        f"output='{output}'",
        "coarse=c",
        "fine=f",
        "accelerator=cpu",
        *overrides,
    ]
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return app.predict(to_config(hydra.compose("predict", arguments), PredictConfig))


@pytest.fixture
def scans(tmp_path: Path) -> Path:
    volume, _ = scan()
    for name in ("a", "b"):
        write_image(tmp_path / "scans" / f"{name}.nii.gz", volume.array, volume.grid)
    return tmp_path / "scans"


def test_every_kind_has_its_name_and_its_content(scans: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert (
        predict(
            scans / "a.nii.gz",
            out / "lungs.nii.gz",
            "save=[labels,preview,viewer,masks,probabilities]",
        )
        == 0
    )
    kinds = [".preview.png", ".html", ".nii.gz", ".json"]
    kinds += [
        f".{label}{ending}" for label in LABELS for ending in (".nii.gz", ".probability.nii.gz")
    ]
    assert {path.name for path in out.iterdir()} == {f"lungs{kind}" for kind in kinds}
    labels = read_labels(out / "lungs.nii.gz").array
    for name, value in LABELS.items():
        mask = read_labels(out / f"lungs.{name}.nii.gz")
        assert (mask.array == (labels == value)).all()
        assert mask.grid.is_close(GRID)
        percent = read_labels(out / f"lungs.{name}.probability.nii.gz").array
        assert set(np.unique(percent[labels == value])) <= set(range(50, 101)), (
            "the label is the most probable one"
        )
        assert percent[labels != value].mean() < 5
    extension = nibabel.load(out / "lungs.nii.gz").header.extensions[0].get_content()
    assert b"left_lung" in bytes(extension)
    page = (out / "lungs.html").read_text(encoding="utf-8")
    assert "<h1>lungs</h1>" in page
    assert "mean HU" in page
    report = json.loads((out / "lungs.json").read_text(encoding="utf-8"))
    assert set(report["results"]) == {path.name for path in out.iterdir()} - {"lungs.json"}
    assert tuple(report["statistics"]["left_lung"]) == ("ml", *HU_FIGURES)
    # The blocks are water at 0 HU, and the labels hold no other voxels.
    assert abs(report["statistics"]["left_lung"]["p50_hu"]) <= 1
    assert report["statistics"]["left_lung"]["ml"] == report["volume_ml"]["left_lung"]


def test_files_of_single_labels_lie_as_the_scan_is_stored(tmp_path: Path) -> None:
    volume, _ = scan(Orientation((2, 0, 1), (False, True, False)))
    write_image(tmp_path / "ct.nii.gz", volume.array, volume.grid)
    assert (
        predict(
            tmp_path / "ct.nii.gz", tmp_path / "lungs.nii.gz", "save=[labels,masks,probabilities]"
        )
        == 0
    )
    labels = read_labels(tmp_path / "lungs.nii.gz").array
    for name, value in LABELS.items():
        mask = read_labels(tmp_path / f"lungs.{name}.nii.gz").array
        assert np.array_equal(mask, labels == value)
        percent = read_labels(tmp_path / f"lungs.{name}.probability.nii.gz").array
        assert percent[labels == value].min() >= 50
        assert percent[labels != value].mean() < 5
        # The mask has the value 1, whatever the value of the label in the label map.
        table = nibabel.load(tmp_path / f"lungs.{name}.nii.gz").header.extensions[0].get_content()
        entries = ElementTree.fromstring(bytes(table).rstrip(b"\0")).iter("Label")
        assert [(entry.get("Key"), entry.text) for entry in entries] == [("1", name)]


def test_labels_are_left_out_where_they_are_not_asked_for(
    scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict(scans / "a.nii.gz", tmp_path / "out", "save=[preview]") == 0
    (tmp_path / "out").mkdir(exist_ok=True)
    assert {path.name for path in tmp_path.glob("out*/*")} == {"a.json", "a.preview.png"}


def test_a_kind_that_is_missing_is_made_and_one_that_is_there_is_kept(
    scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict(scans, tmp_path / "out", "save=[labels,preview]") == 0
    capsys.readouterr()
    assert predict(scans, tmp_path / "out") == 0
    assert capsys.readouterr().out.count("finished before, skipped") == 2, (
        "labels alone are there already"
    )
    (tmp_path / "out" / "b.preview.png").write_bytes(b"")
    assert predict(scans, tmp_path / "out", "save=[labels,preview]") == 0
    assert capsys.readouterr().out.count("finished before, skipped") == 1
    assert (tmp_path / "out" / "b.preview.png").stat().st_size > 1000


def test_a_scan_is_one_row_of_the_summary_with_the_figures_of_its_report(
    scans: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert predict(scans, out) == 0
    rows = read_csv(out / "summary.csv")
    assert [row["case"] for row in rows] == ["a", "b"]
    report = json.loads((out / "b.json").read_text(encoding="utf-8"))
    assert rows[1]["result"] == "b.nii.gz"
    for label, figures in {"total": report["total_statistics"], **report["statistics"]}.items():
        written = {name: float(rows[1][f"{label}_{name}"]) for name in ("ml", *HU_FIGURES[:-1])}
        assert written == {name: figures[name] for name in written}
        share = figures["share_below_minus_950_hu"]
        assert float(rows[1][f"{label}_below_minus_950_percent"]) == pytest.approx(100 * share)
    assert float(rows[1]["total_ml"]) == pytest.approx(sum(report["volume_ml"].values()), abs=0.02)


def test_a_viewer_does_not_take_the_place_of_the_page_over_the_batch(
    scans: Path, tmp_path: Path
) -> None:
    (scans / "a.nii.gz").rename(scans / "index.nii.gz")
    with pytest.raises(UserError, match=r"index\.html is the page .* leave viewer out of save"):
        predict(scans, tmp_path / "out", "save=[labels,viewer]")
    assert predict(scans, tmp_path / "out", "save=[labels,preview]") == 0
    page = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert page.count('<li class="card"') == 2
    assert 'src="./index.preview.png"' in page


@pytest.mark.parametrize(
    ("save", "named"),
    [
        ("[masks]", ["a.left_lung.nii.gz", "a.right_lung.nii.gz"]),
        ("[preview,labels]", ["a.nii.gz"]),
        (
            "[viewer,masks,preview]",
            ["a.html", "a.left_lung.nii.gz", "a.right_lung.nii.gz and 1 more"],
        ),
    ],
)
def test_the_line_of_a_case_names_files_that_were_written(
    save: str,
    named: list[str],
    scans: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    for ending in ("left_lung ", "finished before, skipped"):
        assert predict(scans / "a.nii.gz", out / "a.nii.gz", f"save={save}") == 0
        files, _, outcome = capsys.readouterr().out.partition(": ")
        assert [Path(file).name for file in files.split(", ")] == named
        assert outcome.startswith(ending)
        assert all(Path(file.removesuffix(" and 1 more")).is_file() for file in files.split(", "))


def test_a_message_names_its_case_once(
    scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = scans / "a.nii.gz"
    damaged.write_bytes(b"damaged")
    (scans / "cases.csv").write_text("case,image\na,a.nii.gz\npatient 1,a.nii.gz\n")
    assert predict(scans / "cases.csv", tmp_path / "out") == 1
    first, second, _ = capsys.readouterr().err.splitlines()
    assert first.startswith(f"medseg: {damaged}: expected a NIfTI file")
    assert second.startswith(f"medseg: patient 1: {damaged}: expected a NIfTI file")


def test_the_bound_on_dice_is_one_sentence_in_all_results(
    scans: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    networks = {"coarse": CoarseOracle(), "fine": FineOracle()}
    bound = DiceBound(0.5, 0.9, 26)
    monkeypatch.setattr(
        "medseg.cascade.load.load_stage",
        lambda path, name, *_: stage(
            networks[name], name, checkpoints={str(path): "0"}, dice_bound=bound
        ),
    )
    written: list[str] = []
    monkeypatch.setattr(
        Canvas, "write", lambda self, left, top, text, **style: written.append(text)
    )
    out = tmp_path / "out"
    assert predict(scans, out, "save=[labels,viewer,preview]") == 0
    report = json.loads((out / "a.json").read_text(encoding="utf-8"))
    row = read_csv(out / "summary.csv")[0]
    viewer = (out / "a.html").read_text(encoding="utf-8")
    assert set(report["dice_at_least"]) == set(LABELS)
    for name, stated in report["dice_at_least"].items():
        assert stated == {
            "value": bound.stated(report["agreements"][name]).value,
            "level": 0.9,
            "patients": 26,
        }
        least = f"{math.floor(100 * stated['value']) / 100:.2f}"
        assert least in row["dice_at_least"]
        assert name.replace("_", " ") in row["dice_at_least"]
    sentence = row["dice_at_least"]
    assert sentence.startswith("Dice at least 0.")
    assert sentence.endswith(" in 9 of 10 patients (26 patients)")
    assert sentence.count("patients (") == 1
    assert viewer.count(sentence) == 1
    assert sentence in written


def test_scores_of_an_evaluation_are_not_replaced(scans: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "summary.csv").write_text("region,trust,metric,number\n")
    with pytest.raises(
        UserError, match=f"{out}/summary.csv holds the scores of an evaluation; give another output"
    ):
        predict(scans, out)


def test_the_summary_replaces_neither_a_table_of_the_user_nor_the_input(
    scans: Path, tmp_path: Path
) -> None:
    own = "patient,age\n1,70\n"
    out = tmp_path / "out"
    out.mkdir()
    (out / "summary.csv").write_text(own)
    with pytest.raises(UserError, match=r"out/summary\.csv: expected the table of an earlier pred"):
        predict(scans, out)
    assert (out / "summary.csv").read_text() == own
    cases = "case,image,status\nx,a.nii.gz,new\n"
    (scans / "summary.csv").write_text(cases)
    with pytest.raises(UserError, match=r"scans/summary\.csv is the case table and would be over"):
        predict(scans / "summary.csv", scans)
    assert (scans / "summary.csv").read_text() == cases


def test_the_viewer_of_a_case_table_compares_with_its_reference(
    scans: Path, tmp_path: Path
) -> None:
    volume, labels = scan()
    reference = np.where(labels == 1, 7, labels)
    reference[:, :40][reference[:, :40] == 2] = 0
    write_labels(scans / "ref.nii.gz", reference.astype(np.uint8), volume.grid)
    (scans / "cases.csv").write_text("case,image,expert\na,a.nii.gz,ref.nii.gz\nb,b.nii.gz,\n")
    values = ["data.labels_column=expert", "+data.label_values={left_lung: 7, right_lung: 2}"]
    assert predict(scans / "cases.csv", tmp_path / "out", "save=[viewer]", *values) == 0
    with_reference, without = (
        (tmp_path / "out" / f"{name}.html").read_text(encoding="utf-8") for name in "ab"
    )
    assert 'id="volume-differences"' in with_reference
    assert "most differences" in with_reference
    assert ">Dice</th>" in with_reference
    assert 'id="volume-differences"' not in without
    assert predict(scans / "cases.csv", tmp_path / "plain", "save=[viewer]") == 0, (
        "no column labels, no reference"
    )
    assert (
        predict(scans / "cases.csv", tmp_path / "odd", "save=[viewer]", "data.labels_column=expert")
        == 0
    )
    report = json.loads((tmp_path / "odd" / "a.json").read_text(encoding="utf-8"))
    assert report["status"] == "warnings"
    assert (
        "the viewer shows no reference: the reference ref.nii.gz holds the value 7"
        in report["warnings"][-1]
    )
    values = ["data.labels_column=expert", "+data.label_values={spleen: 7}"]
    assert predict(scans / "cases.csv", tmp_path / "other", "save=[viewer]", *values) == 0
    report = json.loads((tmp_path / "other" / "a.json").read_text(encoding="utf-8"))
    assert report["warnings"][-1] == (
        "the viewer shows no reference: data.label_values names spleen, expected labels of the "
        "task blocks (left_lung, right_lung)"
    )


@pytest.mark.parametrize(("value", "status"), [(2, "ok"), (7, "warnings")])
def test_a_reference_that_cannot_be_shown_is_a_warning_and_ignored_voxels_are_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: int, status: str
) -> None:
    volume, labels = scan()
    task = replace(TASK, ignore_label=9)
    reference = np.where(labels == 2, value, labels)
    reference[:, :40][reference[:, :40] == 1] = 9
    write_labels(tmp_path / "ref.nii.gz", reference.astype(np.uint8), volume.grid)
    references: list[np.ndarray | None] = []

    def noted(*arguments: Any) -> None:
        references.append(arguments[3])

    monkeypatch.setattr(results_module, "pack_case", noted)
    config = SimpleNamespace(
        save=[Save.viewer],
        data=SimpleNamespace(label_values={}),
        viewer=SimpleNamespace(max_mb=1.0),
    )
    result = Segmentation(labels, status="ok")
    case = Scan("a", tmp_path / "a.nii.gz", labels=tmp_path / "ref.nii.gz")
    take_picture_voxels(case, volume, result, task, config)  # type: ignore[arg-type]
    assert result.status == status
    if status == "ok":
        assert references[0] is not None
        assert np.array_equal(references[0], np.where(reference == 9, 0, reference))
    else:
        assert references == [None]
        assert result.warnings[0].startswith("the viewer shows no reference: ")


@pytest.mark.parametrize(("kind", "sentence"), [("[label]", "save"), ("preview", "save")])
def test_an_unknown_kind_is_refused(scans: Path, tmp_path: Path, kind: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        predict(scans, tmp_path / "out", f"save={kind}")


def test_two_cases_do_not_share_a_result_file(tmp_path: Path, scans: Path) -> None:
    (scans / "a.left_lung.nii.gz").write_bytes((scans / "b.nii.gz").read_bytes())
    with pytest.raises(UserError, match="would be one file"):
        predict(scans, tmp_path / "out", "save=[labels,masks]")


@pytest.mark.parametrize(
    ("case", "output"),
    [
        ("x" * 250, "out"),  # a file <case>.nii.gz has a longer name than the scan <case>.nii
        ("x", f"{'y' * 251}.nii"),  # so has the report, <case>.json
        ("x", f"{'y' * 260}.nii.gz"),
        ("x", "y" * 260),
    ],
)
def test_a_name_that_is_too_long_is_one_sentence(case: str, output: str, tmp_path: Path) -> None:
    volume, _ = scan()
    path = tmp_path / f"{case}.nii"
    write_image(path, volume.array, volume.grid)
    with pytest.raises(UserError, match="the name is too long for a file; rename"):
        predict(path, tmp_path / output)


def test_a_map_of_disagreement_is_no_segmentation_of_slicer(scans: Path, tmp_path: Path) -> None:
    output = tmp_path / "out" / "lungs.seg.nrrd"
    assert predict(scans / "a.nii.gz", output, "inference.tta=true") == 0
    (disagreement,) = (tmp_path / "out" / "uncertainty").iterdir()
    assert disagreement.name == "lungs.nrrd"
    assert b"Segmentation" not in disagreement.read_bytes()
    assert b"Segmentation" in output.read_bytes()


def test_steps_are_announced_in_their_order(
    scans: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps_begun: list[tuple[str, int, int]] = []
    show = app.Display.step_begins

    def watched(display: app.Display, name: str, step: str, number: int, total: int) -> None:
        steps_begun.append((step, number, total))
        show(display, name, step, number, total)

    monkeypatch.setattr(app.Display, "step_begins", watched)
    assert predict(scans / "a.nii.gz", tmp_path / "a.nrrd") == 0
    steps = ["read", "localise", "refine_left_lung", "refine_right_lung", "join", "write"]
    assert steps_begun == [(step, number, 6) for number, step in enumerate(steps)]


def save_series(folder: Path, **fields: Any) -> None:
    """Write the scan as a DICOM series with further fields in each header."""
    volume, _ = scan()
    row, column = np.array(GRID.direction).T[:2]
    for index, plane in enumerate(volume.array):
        place = GRID.index_to_world_xyz_mm([index, 0, 0])
        path = folder / f"{index}.dcm"
        axes = (row, column)
        save_slice(path, plane, place, axes, GRID.spacing_mm[1:], InstanceNumber=index, **fields)


@pytest.mark.parametrize("kind", ["dicom_seg", "rtstruct"])
def test_a_series_that_no_result_can_refer_to_is_refused_before_the_networks_run(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_series(tmp_path / "series")
    monkeypatch.delattr("medseg.prediction.batch.segment_case")
    for save in (f"save=[{kind}]", f"save=[labels,{kind}]"):
        assert predict(tmp_path / "series", tmp_path / "out" / "a.nii.gz", save) == 2
        sentence = (
            "expected a series that a DICOM SEG or RTSTRUCT can refer to, but its files have no "
            "FrameOfReferenceUID; export the series again, or save the labels in another format."
        )
        assert sentence in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []


def test_dicom_results_lie_on_the_slices_of_their_series(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], scans: Path
) -> None:
    folder, out = tmp_path / "series", tmp_path / "out"
    save_series(folder, FrameOfReferenceUID="1.2.3.9")
    assert (
        predict(
            folder,
            out / "lungs.nii.gz",
            "save=[labels,dicom_seg,rtstruct]",
            "dicom_seg.kind=labelmap",
        )
        == 0
    )
    labels, slices = read_labels(out / "lungs.nii.gz").array, open_slices(folder)
    for kind, least in (("seg", 1.0), ("rtstruct", 0.995)):
        file = open_label_file(out / f"lungs.{kind}.dcm")
        numbers = {number: LABELS[name] for number, name in file.names.items()}
        stored = read_label_file(file, slices, numbers).array
        for value in LABELS.values():
            assert dice(stored == value, labels == value) >= least
    assert predict(scans / "a.nii.gz", out / "b.nii.gz", "save=[dicom_seg]") == 2
    assert (
        "save=dicom_seg: expected a DICOM series, to whose slices the result refers, but"
        in capsys.readouterr().err
    )
