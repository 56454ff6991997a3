"""Case tables: their columns, the messages about mistakes, and writing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from medseg.data.case_table import Case, read_case_table, write_case_table
from medseg.errors import UserError
from medseg.evaluation.matching import find_references
from medseg.prediction.scans import find_scans
from medseg.preprocess.scale import HuScale

ROW = "case,image,labels\na,a.nii.gz,a_l.nii.gz\n"


def write(folder: Path, text: str, encoding: str = "utf-8") -> Path:
    for name in ("a.nii.gz", "a_l.nii.gz", "Doe, John ü.nii.gz"):
        (folder / name).touch()
    (folder / "dicom").mkdir(exist_ok=True)
    path = folder / "table.csv"
    path.write_bytes(text.encode(encoding))
    return path


def test_all_columns_are_read_and_paths_are_relative_to_the_table(tmp_path: Path) -> None:
    text = (
        "case,image,labels,patient,view,split,trust_left_lung,trust_right_lung\r\n"
        '"Doe, John","Doe, John ü.nii.gz",a_l.nii.gz,p1,whole,val,reference,approximate\r\n'
        "\r\n"
        "b=1 (2),dicom,,,,,,absent\r\n"
    )
    cases = read_case_table(write(tmp_path, text))
    trust = {"left_lung": "reference", "right_lung": "approximate"}
    assert cases == [
        Case(
            "Doe, John",
            tmp_path / "Doe, John ü.nii.gz",
            tmp_path / "a_l.nii.gz",
            "p1",
            "val",
            trust,
        ),
        Case("b=1 (2)", tmp_path / "dicom", None, "b=1 (2)", None, {"right_lung": "absent"}),
    ]


def test_channels_are_columns_and_a_missing_one_is_named(tmp_path: Path) -> None:
    text = (
        "case,image,image_1,labels,image_2,image_4\n"
        "a,a.nii.gz,b.nii.gz,a_l.nii.gz,c.nii.gz,d.nii.gz\nb,a.nii.gz,,a_l.nii.gz,c.nii.gz,\n"
    )
    full, lacking = read_case_table(write(tmp_path, text))
    assert [path.name for path in full.images(3)] == ["a.nii.gz", "b.nii.gz", "c.nii.gz"]
    assert full.images(1) == [full.image]
    with pytest.raises(
        UserError, match=r"The case 'a' has no image_3, but the task has 4 channels"
    ):
        full.images(4)
    with pytest.raises(UserError, match=r"The case 'b' has no image_1 and no image_3, but"):
        lacking.images(4)
    again = read_case_table(write_case_table(tmp_path / "again.csv", [full, lacking]))
    assert [case.images(3 if case.name == "a" else 1) for case in again] == [
        full.images(3),
        lacking.images(1),
    ]


def test_a_byte_order_mark_changes_nothing(tmp_path: Path) -> None:
    plain = read_case_table(write(tmp_path, ROW))
    assert read_case_table(write(tmp_path, ROW, "utf-8-sig")) == plain
    assert read_case_table(write(tmp_path, ROW, "utf-16")) == plain


def test_names_of_files_that_are_not_utf_8_come_back(tmp_path: Path) -> None:
    image = Path(os.fsdecode(os.fsencode(tmp_path) + b"/M\xfcller.nii.gz"))
    image.touch()
    case = Case("a", image, None, "a")
    table = write_case_table(tmp_path / "cases.csv", [case])
    assert b"/M\xfcller.nii.gz" in table.read_bytes()
    assert read_case_table(table) == [case]


@pytest.mark.parametrize(
    "row", ["a,M\u00fcller.nii.gz,a_l.nii.gz,p", "a,a.nii.gz,a_l.nii.gz,M\u00fcller"]
)
def test_a_table_in_latin_1_is_refused(tmp_path: Path, row: str) -> None:
    (tmp_path / "M\u00fcller.nii.gz").touch()
    path = write(tmp_path, f"case,image,labels,patient\n{row}\n", "latin-1")
    with pytest.raises(
        UserError, match=r"table.csv, line 2: expected text in UTF-8, .* save the table in UTF-8"
    ):
        read_case_table(path)


def test_a_patient_whose_name_is_written_in_two_ways_is_one(tmp_path: Path) -> None:
    rows = (
        "case,image,labels,patient\na,a.nii.gz,a_l.nii.gz,M\u00fcller\n"
        "b,a.nii.gz,a_l.nii.gz,Mu\u0308ller\n"
    )
    assert len({case.patient for case in read_case_table(write(tmp_path, rows))}) == 1


def test_another_labels_column_or_none(tmp_path: Path) -> None:
    path = write(tmp_path, "case,image,lobes\na,a.nii.gz,a_l.nii.gz\n")
    assert read_case_table(path, labels_column="lobes")[0].labels == tmp_path / "a_l.nii.gz"
    assert read_case_table(path, labels_column=None)[0].labels is None


@pytest.mark.parametrize("column", ["Patient", "Split", "FOLD", "fold_1", "fold_2023"])
def test_only_a_table_that_is_divided_needs_right_columns_of_the_split(
    tmp_path: Path, column: str
) -> None:
    path = write(tmp_path, f"case,image,labels,{column}\na,a.nii.gz,a_l.nii.gz,2\n")
    with pytest.raises(UserError, match=column):
        read_case_table(path)
    (case,) = read_case_table(path, is_divided=False)
    assert (case.patient, case.split, case.fold, case.fold_sides) == ("a", None, None, ())
    references, _ = find_references(path, "labels", None)
    assert list(references) == ["a"]
    scans, _ = find_scans(path, None)
    assert [scan.name for scan in scans] == ["a"]


def test_a_missing_file_is_a_matter_of_its_case(tmp_path: Path) -> None:
    path = write(tmp_path, ROW)
    with_files = read_case_table(path)
    (tmp_path / "a.nii.gz").unlink()
    assert read_case_table(path) == with_files


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("case,labels\na,a_l.nii.gz\n", ["line 1", "; add image."]),
        (
            "case;image;labels\na;a.nii.gz;b\n",
            ["line 1", "found case;image;labels; separate the cells by commas"],
        ),
        ("case\timage\na\ta.nii.gz\n", ["line 1", "; separate the cells by commas"]),
        ("Case,Image,Labels\na,b,c\n", ["line 1", "; write case, image, labels in small letters."]),
        ("sep=,\ncase,image,labels\na,b,c\n", ["line 1", "; remove this line, which only some"]),
        ("case\na\n", ["line 1", "found case; add image, labels."]),
        ("case,image,labels,image\n", ["line 1", "'image' appears twice"]),
        (
            "case,image,labels,Patient\n",
            ["line 1", "'Patient' would be ignored; write patient in small letters."],
        ),
        (
            "case,image,labels,fold_1,fold_2\n",
            ["line 1", "there is fold_2 but no fold_0; number the columns of the folds from 0"],
        ),
        ("case,image,labels,fold_0,fold_2\n", ["line 1", "there is fold_2 but no fold_1;"]),
        (ROW + "\na,a.nii.gz,\n", ["line 4", "'a' is already on line 2"]),
        (ROW + "b,a.nii.gz\n", ["line 3", "expected 3 cells, got 2"]),
        (ROW + "Doe, John,a.nii.gz,\n", ["line 3", "quotes"]),
        (ROW + ",a.nii.gz,\n", ["line 3", "'case' is empty"]),
        (ROW + "b,,\n", ["line 3", "'image' is empty"]),
        (ROW + "../b,a.nii.gz,\n", ["line 3", "'../b'", "slash"]),
        (
            "case,image,labels,split\na,a.nii.gz,,training\n",
            ["line 2", "'training'", "train, val, test"],
        ),
        ('case,image,labels\na,"a\n.nii.gz",\nc,,\n', ["line 4", "'image' is empty"]),
        ('case,image,labels\n"a\nb",a.nii.gz,\n', ["line 2", "'a\\nb'", "control characters"]),
        (ROW + "a\x1b[2J,a.nii.gz,\n", ["line 3", "'a\\x1b[2J'", "control characters"]),
        (
            ",".join(map(str, range(200_000))),
            ["line 1", "expected at most 1000 columns, got 200000"],
        ),
        ("case,image,labels\n", ["no case"]),
        ("", ["line 1", "case, image, labels", "none"]),
        ('case,image,labels\n"a,a.nii.gz,\n', ["quotes"]),
        (
            "case,image,labels,fold\na,a.nii.gz,,first\n",
            ["line 2", "fold is 'first'", "a whole number from 0 to 9999 or nothing"],
        ),
        # Python itself refuses to read a number of this length.
        (
            f"case,image,labels,fold\na,a.nii.gz,,{'9' * 5000}\n",
            ["line 2", "fold is '999", "a whole number from 0 to 9999 or nothing"],
        ),
        ("case,image,labels,fold\na,a.nii.gz,,10000\n", ["line 2", "fold is '10000'"]),
    ],
)
def test_each_mistake_is_named_with_its_line(tmp_path: Path, text: str, parts: list[str]) -> None:
    with pytest.raises(UserError) as error:
        read_case_table(write(tmp_path, text))
    for part in parts:
        assert part in str(error.value)


def test_a_table_that_cannot_be_read_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        read_case_table(tmp_path / "gone.csv")
    with pytest.raises(
        UserError, match=r"scan\.nrrd: expected a case table or a data set, got a scan"
    ):
        read_case_table(tmp_path / "scan.nrrd")
    with pytest.raises(UserError, match="UTF-8"):
        read_case_table(write(tmp_path, ROW.replace("a,", "ü,"), "latin-1"))


def test_hu_scale_and_ignored_findings_of_a_row_go_before_those_of_the_run(tmp_path: Path) -> None:
    text = (
        "case,image,labels,hu_slope,hu_offset,ignore_findings\na,a.nii.gz,,,-1024,\n"
        "b,b.nii.gz,,2.5,,no_air  clipped\nc,c.nii.gz,,,,\n"
    )
    a, b, c = read_case_table(
        write(tmp_path, text), hu=HuScale(3.0, 7.0), ignore_findings=frozenset({"padding"})
    )
    assert (a.hu, b.hu, c.hu) == (HuScale(3.0, -1024.0), HuScale(2.5, 7.0), HuScale(3.0, 7.0))
    assert (a.ignore_findings, b.ignore_findings) == ({"padding"}, {"padding", "no_air", "clipped"})
    assert [case.hu for case in read_case_table(write(tmp_path, ROW))] == [HuScale(1.0, 0.0)]


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ("0,,", "line 2: hu_slope is '0', expected a positive number or nothing."),
        (",minus,", "line 2: hu_offset is 'minus', expected a number or nothing."),
        (",nan,", "line 2: hu_offset is 'nan', expected a number or nothing."),
        (
            ",,cliped",
            "line 2, ignore_findings: there is no finding 'cliped'; did you mean clipped?",
        ),
    ],
)
def test_mistaken_cells_of_the_audit_are_told(tmp_path: Path, cells: str, said: str) -> None:
    with pytest.raises(UserError) as error:
        read_case_table(
            write(
                tmp_path,
                f"case,image,labels,hu_slope,hu_offset,ignore_findings\na,a.nii.gz,,{cells}\n",
            )
        )
    assert str(error.value).endswith(said)


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null", "pipe"])
def test_a_table_that_is_no_file(tmp_path: Path, device: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="expected a text file, got a folder, a pipe or a device"):
        read_case_table(tmp_path / device)


@pytest.mark.timeout(30)
def test_many_equal_columns_take_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medseg.data.case_table.MAX_COLUMNS", 10**6)
    with pytest.raises(UserError, match="the column 'a0' appears twice"):
        read_case_table(
            write(tmp_path, "case,image,labels,a0," + ",".join(f"a{i}" for i in range(200_000)))
        )


def test_a_name_that_begins_like_a_formula_survives_the_spreadsheet(tmp_path: Path) -> None:
    cases = read_case_table(write(tmp_path, ROW + "=HYPERLINK(1),a.nii.gz,\n"))
    write_case_table(tmp_path / "again.csv", cases)
    assert "\n'=HYPERLINK(1)," in (tmp_path / "again.csv").read_text()
    assert [case.name for case in read_case_table(tmp_path / "again.csv")] == ["a", "=HYPERLINK(1)"]


def test_a_written_table_has_the_split_and_no_empty_columns(tmp_path: Path) -> None:
    cases = [
        Case("a", tmp_path / "a.nii.gz", None, "a", "test"),
        Case("b", tmp_path / "b.nii.gz", None, "b", fold=3),
    ]
    path = write_case_table(tmp_path / "again.csv", cases)
    assert path.read_text().splitlines()[0] == "case,image,labels,patient,split,fold"
    assert read_case_table(path) == cases
    assert read_case_table(path.rename(tmp_path / "cases.csv").parent) == cases


def test_a_single_nifti_file_stands_for_all_channels(tmp_path: Path) -> None:
    assert Case("a", tmp_path / "a.nii.gz", None, "a").images(3) == [tmp_path / "a.nii.gz"] * 3
    with pytest.raises(UserError, match=r"The case 'a' has no image_1 and no image_2, but"):
        Case("a", tmp_path / "a.nrrd", None, "a").images(3)


def test_a_written_table_is_read_as_the_same_cases(tmp_path: Path) -> None:
    full = Case(
        "a", tmp_path / "a.nii.gz", tmp_path / "a_l.nii.gz", "somebody", "val",
        trust={"left_lung": "reference", "right_lung": "absent"}, series="1.2.3",
        hu=HuScale(2.5, -1024.0),
        more_images=(tmp_path / "a1.nii.gz", None, tmp_path / "a3.nii.gz"), fold=2,
        ignore_findings=frozenset({"swapped_sides", "label_grid"}),
    )  # fmt: skip
    plain = Case(
        "b", tmp_path / "b.nii.gz", None, "b", more_images=(None, tmp_path / "b2.nii.gz", None)
    )
    assert read_case_table(write_case_table(tmp_path / "table.csv", [full, plain])) == [full, plain]


def test_sides_of_each_fold_are_read_and_written(tmp_path: Path) -> None:
    table = tmp_path / "cases.csv"
    table.write_text(
        "case,image,labels,fold_0,fold_1\na,a.nii,l.nii,train,val\nb,b.nii,l.nii,,\n",
        encoding="utf-8",
    )
    cases = read_case_table(table)
    assert [case.fold_sides for case in cases] == [("train", "val"), (None, None)]
    again = write_case_table(tmp_path / "again" / "cases.csv", cases)
    assert [case.fold_sides for case in read_case_table(again)] == [("train", "val"), (None, None)]
    table.write_text("case,image,labels,fold_0\na,a.nii,l.nii,test\n", encoding="utf-8")
    with pytest.raises(UserError, match="line 2: fold_0 is 'test', expected train, val or nothing"):
        read_case_table(table)
    table.write_text("case,image,labels,fold,fold_0\na,a.nii,l.nii,0,train\n", encoding="utf-8")
    with pytest.raises(
        UserError, match="the columns fold and fold_0 both give folds; keep one kind"
    ):
        read_case_table(table)
