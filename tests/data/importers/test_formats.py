"""The layout of a data set is found by what lies in its folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from layouts import MAKERS, make_msd, make_nnunet

from medseg.data.importers.formats import FORMATS, import_dataset, read_cases
from medseg.errors import UserError
from medseg.preprocess.scale import HuScale


@pytest.mark.parametrize("name", MAKERS)
def test_each_layout_is_recognised(tmp_path: Path, name: str) -> None:
    data = import_dataset(MAKERS[name](tmp_path / "data"))
    assert data.format == name
    assert all(case.image.exists() for case in data.cases)
    assert set(MAKERS) <= set(FORMATS)


def test_a_folder_without_a_known_layout_is_told_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        import_dataset(tmp_path)
    said = str(error.value)
    assert "expected a data set in one of these layouts, but found none" in said
    assert all(f"{name}: {data_format.sign}" in said for name, data_format in FORMATS.items())
    with pytest.raises(UserError, match="does not exist; check the path"):
        import_dataset(tmp_path / "gone")
    make_nnunet(tmp_path / "Dataset001_A")
    make_nnunet(tmp_path / "Dataset002_B")
    with pytest.raises(
        UserError, match="it holds 2 data sets: Dataset001_A, Dataset002_B; give one of them"
    ):
        import_dataset(tmp_path)
    part = tmp_path / "Dataset001_A" / "imagesTr"
    with pytest.raises(
        UserError, match=r"found a part of the nnunet data set .*/Dataset001_A; give that folder"
    ):
        import_dataset(part)


def test_the_json_file_of_nnunet_stands_for_its_folder(tmp_path: Path) -> None:
    folder = make_nnunet(tmp_path)
    assert import_dataset(folder / "dataset.json").cases == import_dataset(folder).cases


def test_a_datalist_with_the_keys_of_nnunet_may_lie_anywhere(tmp_path: Path) -> None:
    folder = make_msd(tmp_path, channel_names={"0": "FLAIR", "1": "T1w"})
    for name in ("images", "labels"):
        (folder / f"{name}Tr").rename(folder / name)
    about = (folder / "dataset.json").read_text(encoding="utf-8")
    (folder / "dataset.json").write_text(about.replace("Tr/", "/"), encoding="utf-8")
    cases = import_dataset(folder / "dataset.json").cases
    assert [case.name for case in cases] == [f"BRATS_{number:03d}" for number in range(4)]


def test_cases_of_a_data_set_get_the_scale_and_the_accepted_findings_of_the_run(
    tmp_path: Path,
) -> None:
    cases = read_cases(
        make_nnunet(tmp_path), hu=HuScale(1.0, -1024.0), ignore_findings=frozenset({"padding"})
    )
    assert {(case.hu.offset, case.ignore_findings) for case in cases} == {
        (-1024.0, frozenset({"padding"}))
    }


def test_an_empty_file_is_no_data_set(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("", encoding="utf-8")
    with pytest.raises(UserError, match="expected JSON, but the file is damaged"):
        import_dataset(tmp_path / "list.json")
    (tmp_path / "scan.nii.gz").touch()
    with pytest.raises(UserError, match="expected a data set in one of these layouts"):
        import_dataset(tmp_path / "scan.nii.gz")


def test_a_folder_of_folders_without_a_data_set_has_none(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    with pytest.raises(
        UserError, match="expected a data set in one of these layouts, but found none"
    ):
        import_dataset(tmp_path)
    make_nnunet(tmp_path / "Dataset001_A")
    with pytest.raises(
        UserError,
        match=r"it holds a data set: Dataset001_A; give one of them, such as .*Dataset001_A",
    ):
        import_dataset(tmp_path)


TABLE = "case,image,labels\na,a.nii.gz,a_l.nii.gz\n"


def test_a_folder_may_hold_the_table_of_import_or_of_phantom(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text(TABLE, encoding="utf-8")
    assert [case.name for case in read_cases(tmp_path)] == ["a"]
    (tmp_path / "cases.csv").write_text(TABLE.replace("\na,", "\nb,"), encoding="utf-8")
    assert [case.name for case in read_cases(tmp_path)] == ["b"]


def test_a_case_table_of_another_name_is_named_with_its_key(tmp_path: Path) -> None:
    table = tmp_path / "mine.csv"
    table.write_text(TABLE, encoding="utf-8")
    for path in (tmp_path, table):
        with pytest.raises(UserError) as error:
            import_dataset(path)
        assert str(error.value).endswith(
            f"mine.csv, which needs no import; give data.cases={table}."
        )


def test_a_table_of_another_program_does_not_hide_its_data_set(tmp_path: Path) -> None:
    folder = make_nnunet(tmp_path / "data")
    (folder / "table.csv").write_text("id;age\n1;60\n", encoding="utf-8")
    assert len(read_cases(folder)) == len(import_dataset(folder).cases)
