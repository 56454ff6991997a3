"""Summary of a batch: rows, columns, rows of earlier tables, and the file in LibreOffice."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from medseg.errors import UserError
from medseg.io.identity import Identity
from medseg.io.tables import read_csv
from medseg.metrics.hu_statistics import HU_FIGURES
from medseg.prediction import summary as summary_module
from medseg.prediction.batch import BatchCase
from medseg.prediction.scans import Scan
from medseg.prediction.summary import total_name, write_summary
from medseg.report.contact_sheet import Card
from medseg.task import Channel, Task

LUNGS = Task(
    "lungs",
    {"left_lung": 1, "right_lung": 2},
    (),
    channels=(Channel("ct", window_hu=(-1000.0, 400.0)),),
)
MR = Task("brain", {"total": 1, "tumour": 2}, (), channels=(Channel("mr", normalise="zscore"),))


def figures(ml: float, mean_hu: float) -> dict[str, float]:
    return {
        "ml": ml,
        **dict(zip(HU_FIGURES, [mean_hu, -936, -912, -866, -514, 0.0201], strict=True)),
    }


def report_of(name: str, **changes: Any) -> dict[str, Any]:
    """Make the entries of a `<case>.json` that the summary reads."""
    bound = {"value": 0.981, "level": 0.9, "patients": 26}
    topogram = {"code": "left_out", "severity": "information", "sentence": "a topogram, left out"}
    report = {
        "identity": {"patient": f"P {name}", "study_date": "2024-01-31"},
        "volume_ml": {"left_lung": 1762.25, "right_lung": 1994.5},
        "statistics": {"left_lung": figures(1762.25, -824.4), "right_lung": figures(1994.5, -838)},
        "total_statistics": figures(3756.75, -832.1),
        "status": "warnings",
        "warnings": ["look at the left", "look | at the right"],
        "findings": [topogram, {"code": "cut_region", "severity": "warning", "sentence": "look"}],
        "dice_at_least": {"left_lung": bound, "right_lung": bound},
        "agreements": {"left_lung": 0.98, "right_lung": 0.93},
        "results": {f"{name}.nii.gz": "0", f"{name}.preview.png": "0"},
    }
    return report | changes


def case_of(folder: Path, name: str, **changes: Any) -> BatchCase:
    case = BatchCase(Scan(name, Path(name)), folder / f"{name}.nii.gz")
    case.report = report_of(name, **changes)
    (folder / f"{name}.json").write_text(json.dumps(case.report))
    return case


def failed_case(folder: Path) -> BatchCase:
    scan = Scan("broken", Path("broken"), identity=Identity("P 7", "2023-02-03"))
    case = BatchCase(scan, folder / "broken.nii.gz")
    case.exit_code, case.messages = 2, ["it is damaged; export it again (patient P 7, 2023-02-03)."]
    return case


def test_a_scan_is_one_row_with_patient_date_figures_and_words(tmp_path: Path) -> None:
    write_summary(tmp_path, [case_of(tmp_path, "a"), failed_case(tmp_path)], LUNGS)
    row, failed = read_csv(tmp_path / "summary.csv")
    assert list(row)[:7] == [
        "case", "status", "patient", "date", "total_ml", "left_lung_ml", "right_lung_ml",
    ]  # fmt: skip
    assert list(row)[-4:] == ["dice_at_least", "warnings", "information", "result"]
    assert (row["patient"], row["date"]) == ("P a", "2024-01-31")
    assert (row["total_ml"], row["left_lung_ml"]) == ("3756.75", "1762.25")
    assert (row["total_mean_hu"], row["left_lung_p5_hu"]) == ("-832.1", "-936")
    assert row["right_lung_below_minus_950_percent"] == "2.01"
    assert row["warnings"] == "look at the left | look | at the right"
    assert row["information"] == "a topogram, left out"
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "<li>look | at the right</li>" in page, "one sentence"
    assert row["dice_at_least"].startswith("Dice at least 0.98 (left lung and right lung) in 9 of")
    assert row["result"] == "a.nii.gz"
    assert (failed["status"], failed["patient"], failed["date"]) == ("failed", "P 7", "2023-02-03")
    assert failed["warnings"].startswith("it is damaged")
    assert failed["total_ml"] == ""


def test_the_page_sorts_a_case_by_its_least_agreement_and_names_its_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages: list[list[Card]] = []
    monkeypatch.setattr(
        summary_module, "write_contact_sheet", lambda path, cards, structures: pages.append(cards)
    )
    agreements = {"left_lung": 0.98, "right_lung": 0.4, "liver": 0.7}
    findings = [
        {"code": code, "severity": severity, "sentence": "look"}
        for code, severity in (
            ("cut_region", "warning"),
            ("left_out", "information"),
            ("hu_range", "error"),
            ("cut_region", "warning"),
        )
    ]
    (tmp_path / "a.preview.png").touch()
    case = case_of(tmp_path, "a", agreements=agreements, findings=findings)
    write_summary(tmp_path, [case, case_of(tmp_path, "b", agreements={})], LUNGS)
    ((card, other),) = pages
    assert (card.least_agreement, other.least_agreement) == (0.4, None)
    assert list(card.codes) == ["cut_region", "hu_range"]
    assert (card.preview, card.viewer, other.preview) == ("a.preview.png", "", "")
    # The viewer of an earlier prediction, which this report does not list.
    (tmp_path / "a.html").touch()
    write_summary(tmp_path, [case], LUNGS)
    assert pages[1][0].viewer == ""
    assert card.volumes_ml == {"total": 3756.75, "left_lung": 1762.25, "right_lung": 1994.5}


def test_a_scan_that_failed_after_it_had_a_result_stays_failed(tmp_path: Path) -> None:
    """Its report is that of an earlier scan, or of other weights."""
    case_of(tmp_path, "broken")
    os.utime(tmp_path / "broken.json", (1e9, 1e9))
    for cases in ([failed_case(tmp_path)], [case_of(tmp_path, "a")]):
        write_summary(tmp_path, cases, LUNGS)
    row = read_csv(tmp_path / "summary.csv")[0]
    assert (row["case"], row["status"], row["total_ml"]) == ("broken", "failed", "")
    # Predicted alone, which writes no summary.
    os.utime(tmp_path / "broken.json", (4e9, 4e9))
    write_summary(tmp_path, [case_of(tmp_path, "a")], LUNGS)
    assert read_csv(tmp_path / "summary.csv")[0]["status"] == "warnings"


def test_a_task_without_hu_has_volumes_alone_and_may_have_any_label(tmp_path: Path) -> None:
    case = case_of(
        tmp_path, "a", volume_ml={"total": 3.5, "tumour": 1.0}, statistics={}, total_statistics={}
    )
    write_summary(tmp_path, [case], MR)
    (row,) = read_csv(tmp_path / "summary.csv")
    assert [key for key in row if key.endswith("_ml")] == [
        "total_of_all_ml",
        "total_ml",
        "tumour_ml",
    ]
    assert (row["total_of_all_ml"], row["total_ml"]) == ("4.5", "3.5")
    assert not [key for key in row if "hu" in key or "percent" in key]
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert 'data-volume="4.5"' in page, "the sum, not the label total"
    assert "total of all 4.5 ml" in page
    assert "total 3.5 ml" in page
    assert "tumour 1 ml" in page


def test_the_page_shows_the_total_also_beside_a_label_of_its_name(tmp_path: Path) -> None:
    """A task without a label `total` shares the folder with an earlier case of a task with one."""
    volumes = {"total": 3.5, "tumour": 1.0}
    figures_in_ml = {"ml": 4.5}
    case = case_of(tmp_path, "a", volume_ml=volumes, statistics={}, total_statistics=figures_in_ml)
    write_summary(tmp_path, [case], LUNGS)
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert 'data-volume="4.5"' in page


def test_scans_of_earlier_predictions_stay(tmp_path: Path) -> None:
    """Scans in a table of an older version, scans without results, and scans of another task."""
    (tmp_path / "summary.csv").write_text(
        "case,status,label,ml,warnings\nold,warnings,left_lung,12,gone\n"
        "old,warnings,right_lung,13,gone\na,ok,left_lung,1,\nkept,ok,left_lung,1,\n"
    )
    case_of(tmp_path, "kept", volume_ml={"liver": 1400.0}, statistics={}, total_statistics={})
    write_summary(tmp_path, [case_of(tmp_path, "a")], LUNGS)
    old, kept, own = read_csv(tmp_path / "summary.csv")
    assert (old["case"], old["status"], old["warnings"]) == ("old", "warnings", "gone")
    assert old["total_ml"] == ""
    assert (kept["case"], kept["patient"], kept["liver_ml"]) == ("kept", "P kept", "1400.0")
    assert kept["total_ml"] == "1400.0"
    assert (own["case"], own["left_lung_ml"]) == ("a", "1762.25")
    # Again, after the results of one scan were removed: its row stays.
    (tmp_path / "kept.json").unlink()
    before = (tmp_path / "summary.csv").read_text()
    write_summary(tmp_path, [case_of(tmp_path, "a")], LUNGS)
    rows = read_csv(tmp_path / "summary.csv")
    assert [row["case"] for row in rows] == ["old", "kept", "a"]
    assert float(rows[1]["liver_ml"]) == 1400
    assert before.splitlines()[0] == (tmp_path / "summary.csv").read_text().splitlines()[0]


def test_columns_of_other_tasks_are_in_the_order_of_their_reports(tmp_path: Path) -> None:
    organs = ["spleen", "liver", "aorta", "heart", "stomach", "pancreas", "brain", "colon"]
    volumes = dict.fromkeys(organs, 1.0)
    other = case_of(tmp_path, "other", volume_ml=volumes, statistics={}, total_statistics={})
    write_summary(tmp_path, [other, case_of(tmp_path, "own")], LUNGS)
    row, _ = read_csv(tmp_path / "summary.csv")
    columns = [key.removesuffix("_ml") for key in row if key.endswith("_ml")]
    assert columns == ["total", "left_lung", "right_lung", *organs]


def test_a_damaged_table_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "summary.csv").write_bytes(b"case,status\nold,\xff\n")
    write_summary(tmp_path, [case_of(tmp_path, "a")], LUNGS)
    assert "summary.csv: it is damaged, so the scans of earlier" in capsys.readouterr().err
    assert [row["case"] for row in read_csv(tmp_path / "summary.csv")] == ["a"]
    write_summary(tmp_path, [case_of(tmp_path, "b")], LUNGS)
    assert capsys.readouterr().err == ""


OFFICE = "{urn:oasis:names:tc:opendocument:xmlns:office:1.0}"
TABLE = "{urn:oasis:names:tc:opendocument:xmlns:table:1.0}"
PARAGRAPH = "{urn:oasis:names:tc:opendocument:xmlns:text:1.0}p"


def read_sheet(document: ElementTree.Element, name: str) -> list[list[tuple[str, str]]]:
    """Read the cells of a sheet of LibreOffice by row: type, and number, date or text."""
    (table,) = [
        sheet for sheet in document.iter(f"{TABLE}table") if sheet.get(f"{TABLE}name") == name
    ]
    rows = []
    for row in table.iter(f"{TABLE}table-row"):
        cells = []
        for cell in row.findall(f"{TABLE}table-cell"):
            kind = cell.get(f"{OFFICE}value-type", "")
            text = "\n".join("".join(line.itertext()) for line in cell.findall(PARAGRAPH))
            value = cell.get(f"{OFFICE}value") or cell.get(f"{OFFICE}date-value") or text
            # LibreOffice writes the empty cells at the end of a row as one repeated cell.
            cells += [(kind, value)] * min(100, int(cell.get(f"{TABLE}number-columns-repeated", 1)))
        rows.append(cells)
    return rows


@pytest.mark.slow
def test_a_table_that_cannot_be_written_hides_no_failed_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk: the error of the case is reported, not that of the table."""

    def full(*_: object) -> None:
        raise UserError("no space is left")

    monkeypatch.setattr(summary_module, "write_csv", full)
    write_summary(tmp_path, [case_of(tmp_path, "a"), failed_case(tmp_path)], LUNGS)
    with pytest.raises(UserError, match="no space is left"):
        write_summary(tmp_path, [case_of(tmp_path, "a")], LUNGS)


def test_libreoffice_reads_numbers_as_numbers_and_dates_as_dates(tmp_path: Path) -> None:
    program = shutil.which("soffice")
    if program is None:
        pytest.skip("no LibreOffice here (Debian: libreoffice-calc-nogui)")
    write_summary(tmp_path, [case_of(tmp_path, "a"), failed_case(tmp_path)], LUNGS)
    command = [
        program, f"-env:UserInstallation={(tmp_path / 'profile').as_uri()}", "--headless",
        "--convert-to", "fods", "--outdir", str(tmp_path), str(tmp_path / "summary.xlsx"),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    document = ElementTree.parse(tmp_path / "summary.fods").getroot()
    headings, first, second = read_sheet(document, "scans")[:3]
    row, failed = (
        dict(zip([text for _, text in headings], cells, strict=False)) for cells in (first, second)
    )
    assert (row["case"], row["patient"]) == (("string", "a"), ("string", "P a"))
    assert row["date"][0] == "date"
    assert row["date"][1].startswith("2024-01-31")
    assert row["total: volume (ml)"] == ("float", "3756.75")
    assert row["left lung: 5th percentile (HU)"] == ("float", "-936")
    assert row["total: below −950 HU (%)"] == ("float", "2.01")
    assert row["warnings"] == ("string", "look at the left\nlook | at the right")
    assert failed["total: volume (ml)"] == ("", "")
    assert failed["patient"] == ("string", "P 7")
    about = [[text for _, text in cells[:4]] for cells in read_sheet(document, "columns")]
    explained = {key: (unit, meaning) for _, key, unit, meaning in about[1:] if key}
    assert list(explained) == list(read_csv(tmp_path / "summary.csv")[0])
    assert explained["total_p15_hu"][0] == "HU"
    assert explained["left_lung_ml"] == ("ml", "Volume of the label left lung")
    assert all(meaning for _, meaning in explained.values())


def test_the_spreadsheet_shows_the_digits_of_a_small_volume(tmp_path: Path) -> None:
    volumes_ml = {"total": 1762.25, "tumour": 0.312}
    changes = {"volume_ml": volumes_ml, "statistics": {}, "total_statistics": {"ml": 1762.562}}
    write_summary(tmp_path, [case_of(tmp_path, "a", **changes)], MR)
    with zipfile.ZipFile(tmp_path / "summary.xlsx") as book:
        sheet = ElementTree.fromstring(book.read("xl/worksheets/sheet1.xml"))
        styles = ElementTree.fromstring(book.read("xl/styles.xml"))
    (cell,) = (cell for cell in sheet.iterfind(".//{*}c") if cell.findtext("{*}v") == "0.312")
    styles_of_cells = styles.findall("{*}cellXfs/{*}xf")
    number = styles_of_cells[int(cell.attrib["s"])].attrib["numFmtId"]
    formats = {
        entry.attrib["numFmtId"]: entry.attrib["formatCode"] for entry in styles.iter()
        if "formatCode" in entry.attrib
    }  # fmt: skip
    assert formats[number] == "[<10]General;0"


def test_the_total_is_that_of_the_report_else_the_sum_of_the_volumes(tmp_path: Path) -> None:
    """Reports of older versions have no total; labels do not overlap, so their sum is the total."""
    old = case_of(tmp_path, "old", total_statistics={}, statistics={})
    write_summary(tmp_path, [old], LUNGS)
    (row,) = read_csv(tmp_path / "summary.csv")
    assert float(row["total_ml"]) == 3756.75
    assert row["total_mean_hu"] == ""
    assert float(row["left_lung_ml"]) == 1762.25


def test_a_figure_of_zero_is_a_number_and_a_missing_one_an_empty_cell(tmp_path: Path) -> None:
    statistics = {"left_lung": figures(0.0, 0.0), "right_lung": {}}
    volumes = {"left_lung": 0.0, "right_lung": 12.5}
    case = case_of(tmp_path, "a", volume_ml=volumes, statistics=statistics)
    write_summary(tmp_path, [case], LUNGS)
    (row,) = read_csv(tmp_path / "summary.csv")
    assert [float(row[f"left_lung_{end}"]) for end in ("ml", "mean_hu")] == [0.0, 0.0]
    assert (float(row["right_lung_ml"]), row["right_lung_mean_hu"]) == (12.5, "")


@pytest.mark.parametrize(
    ("labels", "name"),
    [
        (["liver"], "total"),
        (["total"], "total_of_all"),
        (["total", "total_of_all"], "total_of_all_of_all"),
    ],
)
def test_all_labels_together_have_the_name_of_none(labels: list[str], name: str) -> None:
    assert total_name(dict.fromkeys(labels, 1)) == name
