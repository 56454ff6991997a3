"""Prediction of the DICOM export of a hospital without any preparation.

The export is a flat folder, a folder of folders, a zip archive, or a table of `medseg list`.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import hydra
import numpy as np
import pytest
from dicom_export import KINDS, make_export
from dicom_files import save_stack
from oracle import CoarseOracle, FineOracle, stage

from medseg.commands import list_series as list_app
from medseg.commands import predict as app
from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.config.schema import ListConfig, Modality
from medseg.errors import UserError
from medseg.geometry.grid import VoxelGrid
from medseg.io.archive import unpacked
from medseg.io.tables import read_csv
from medseg.io.write import write_image
from medseg.prediction.options import PredictConfig

FEW = ("two kernels", "two studies", "gap", "MR alone")


@pytest.fixture(autouse=True)
def oracles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace checkpoints by oracles."""
    networks = {"coarse": CoarseOracle(), "fine": FineOracle()}
    monkeypatch.setattr(
        "medseg.cascade.load.load_stage", lambda path, name, *_: stage(networks[name], name)
    )
    monkeypatch.setattr("medseg.data.audit.image.audit_channels", lambda *_: [])


def predict(source: Path, output: Path, *overrides: str) -> int:
    arguments = [f"input='{source}'", f"output='{output}'", "coarse=c", "fine=f", "accelerator=cpu"]
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        composed = hydra.compose("predict", [*arguments, *overrides])
        return app.predict(to_config(composed, PredictConfig))


def written(folder: Path) -> list[str]:
    return sorted(path.name.removesuffix(".nii.gz") for path in folder.glob("*.nii.gz"))


def reports(folder: Path) -> dict[str, dict[str, str]]:
    """Read the identity in each report."""
    return {
        path.stem: json.loads(path.read_text())["identity"]
        for path in sorted(folder.glob("*.json"))
    }


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_export(tmp_path_factory.mktemp("few"), kinds=FEW)


@pytest.mark.parametrize("form", ["zip", pytest.param("flat", marks=pytest.mark.slow)])
def test_one_command_predicts_one_series_of_each_study(
    few: dict[str, Path], form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = few[form], tmp_path / "out"
    kinds = ["save=[labels,viewer]"] if form == "zip" else []
    assert predict(source, out, "series_pick=b70f", *kinds) == 1
    messages = capsys.readouterr().err
    assert written(out) == ["P01_20240101"]
    assert reports(out)["P01_20240101"]["series_number"] == "3"
    if form == "zip":
        assert "patient P01, 2024-01-01" in (out / "P01_20240101.html").read_text("utf-8")
    wrong = [line for line in messages.splitlines() if "no series has" in line]
    assert [line[-27:] for line in wrong] == [
        f" (patient P02, 2024-01-0{study})."[-27:] for study in (1, 2)
    ]
    assert (
        f"{source}: no series has 'b70f' in its description or kernel, but there is "
        "series 2 'Chest B40f'; give another series_pick, or a number with series= "
    ) in wrong[0]
    (gap,) = [line for line in messages.splitlines() if "22.000 mm apart" in line]
    assert f"{source}: no series can be read: series 2 'Chest B40f': expected evenly" in gap
    assert gap.endswith("export the series again (patient P03, 2024-01-01).")
    assert (
        f"medseg: {source}: 1 study has no scan of the task's modality: patient P04, 2024-01-01; "
        "`medseg list` says why\n"
    ) in messages
    assert "medseg-" not in messages, "a temporary folder"
    assert predict(source, out, "series_pick=thinnest") == 1
    assert written(out) == ["P01_20240101", "P02_20240101", "P02_20240102"]
    # The content of the scans decides, not the path of the export or the times of its files.
    copy = tmp_path / "elsewhere" / f"copy{source.suffix}"
    copy.parent.mkdir()
    if form == "zip":
        shutil.copyfile(source, copy)
    else:
        shutil.copytree(source, copy, copy_function=shutil.copyfile)
    for same_export in (source, copy):
        capsys.readouterr()
        assert predict(same_export, out, "series_pick=thinnest") == 1
        output = capsys.readouterr().out
        assert output.count("finished before, skipped") == 3
    report = json.loads((out / "P01_20240101.json").read_text())
    assert report["input"] == str(source)


def test_the_table_of_a_listing_is_predicted(
    few: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Headers are read once for all rows; a new file makes no other case outdated."""
    table, out = tmp_path / "cases.csv", tmp_path / "out"
    assert list_app.list_series(ListConfig(str(few["flat"]), str(table), Modality.ct, None)) == 0
    assert predict(table, out) == 0
    names = ["P01_20240101_2", "P01_20240101_3", "P02_20240101_2", "P02_20240102_2"]
    assert written(out) == names
    kinds = [about["series_description"] for about in reports(out).values()]
    assert kinds == ["Chest B40f", "Chest B70f", "Chest B40f", "Chest B40f"]
    read: list[Path] = []
    from medseg.io.dicom import stacks

    read_frames = stacks.read_frames
    monkeypatch.setattr(
        stacks, "read_frames", lambda path, *rest: read.append(path) or read_frames(path, *rest)
    )
    assert predict(table, tmp_path / "other", "save=[labels]") == 0
    num_files = sum(1 for _ in few["flat"].iterdir())
    # All headers once for the table, and the four slices of each row a few times more.
    assert len(read) <= num_files + 4 * 4 * 4


def test_a_study_in_several_folders_gives_one_scan(tmp_path: Path) -> None:
    for number, name in enumerate(("thick", "thin"), start=2):
        depth = 4 * number
        image = np.random.default_rng(number).integers(-900, 900, (depth, 8, 9)).astype(np.int16)
        heights_mm = list(np.arange(depth) * 10.0 / number)
        save_stack(
            tmp_path / "study" / name, image, heights_mm, uid=f"1.2.{number}", SeriesNumber=number
        )
    # The localiser of the study in a folder of its own is no case.
    localiser = {"SeriesNumber": 1, "ImageType": "ORIGINAL\\PRIMARY\\LOCALIZER"}
    pixels = np.zeros((1, 8, 9), np.int16)
    save_stack(tmp_path / "study" / "topo", pixels, [0.0], uid="1.2.1", **localiser)
    assert predict(tmp_path / "study", tmp_path / "out", "series_pick=thinnest") == 0
    assert written(tmp_path / "out") == ["thin"]


@pytest.fixture
def cut_thin(tmp_path: Path) -> Path:
    """Write a study of a thick series and a thin one, of which a file is cut off."""
    for number, name in enumerate(("thick", "thin"), start=2):
        depth = 4 * number
        image = np.random.default_rng(number).integers(-900, 900, (depth, 8, 9)).astype(np.int16)
        heights_mm = list(np.arange(depth) * 20.0 / number**2)
        fields = {"SeriesNumber": number, "SeriesDescription": name}
        save_stack(tmp_path / "study" / name, image, heights_mm, uid=f"1.2.{number}", **fields)
    cut_file = min((tmp_path / "study" / "thin").iterdir())
    cut_file.write_bytes(cut_file.read_bytes()[:-9])
    return tmp_path / "study"


def test_a_better_series_that_cannot_be_read_is_a_warning(
    cut_thin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user who asks for the thinnest series learns that the result has another one."""
    assert predict(cut_thin, tmp_path / "out", "series_pick=thinnest") == 0
    report = json.loads((tmp_path / "out" / "thick.json").read_text())
    begin = "series_pick=thinnest would take series 3 'thin': '"
    (warning,) = [sentence for sentence in report["warnings"] if sentence.startswith(begin)]
    assert "the DICOM file is truncated" in warning
    assert warning.endswith("it was left out")
    assert report["status"] == "warnings"
    assert warning in capsys.readouterr().err


def test_a_text_of_a_series_that_cannot_be_read_is_not_said_to_be_missing(
    cut_thin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict(cut_thin, tmp_path / "out", "series_pick=thin") == 2
    message = capsys.readouterr().err
    assert "series_pick=thin takes series 3 'thin': " in message
    assert "the DICOM file is truncated" in message
    assert "The study also has series 2 'thick'; give another series_pick" in message
    assert "no series has" not in message


def broken_archive(path: Path) -> None:
    path.write_bytes(b"PK\x03\x04" + b"\0" * 60)


def locked_archive(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", "b")
    content = bytearray(path.read_bytes())
    for mark, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.index(mark) + place] |= 1
    path.write_bytes(content)


def empty_archive(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "no scan")


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (broken_archive, "the zip archive cannot be read ("),
        (locked_archive, "the zip archive needs a password; unpack it, and give the folder."),
        (empty_archive, "the folder holds none; check the path."),
    ],
)
def test_an_archive_that_gives_nothing_is_one_sentence(
    tmp_path: Path, make: Callable[[Path], None], sentence: str
) -> None:
    archive = tmp_path / "x.zip"
    make(archive)
    with pytest.raises(UserError) as caught:
        predict(archive, tmp_path / "out")
    assert str(caught.value).startswith(f"{archive}: ")
    assert sentence in str(caught.value)


def test_names_and_times_of_an_archive_do_no_harm(tmp_path: Path) -> None:
    """A name with `..` is unpacked inside the folder, and a time of zeros is accepted."""
    member = zipfile.ZipInfo("a/../../b.txt")
    member.date_time = (1980, 0, 0, 0, 0, 0)
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr(member, "b")
    with unpacked(tmp_path / "x.zip") as folder:
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*")]
    assert names == ["a", "a/b.txt"]
    assert not folder.exists()


def test_a_rule_needs_a_scan_path_and_no_series(few: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("case,image\na,a.nii.gz\n")
    with pytest.raises(UserError, match="expected a folder of DICOM files as input"):
        predict(tmp_path / "t.csv", tmp_path / "out", "series_pick=thinnest")
    with pytest.raises(UserError, match="series and series_pick exclude each other"):
        predict(few["flat"], tmp_path / "out", "series_pick=thinnest", "series=3")


def test_a_rule_has_no_effect_without_dicom(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script may give it for every input."""
    grid = VoxelGrid((8, 8, 9), (1.0, 1.0, 1.0))
    image = np.random.default_rng(0).integers(-900, 900, grid.shape).astype(np.int16)
    write_image(tmp_path / "ct" / "a.nii.gz", image, grid)
    for source in (tmp_path / "ct", tmp_path / "ct" / "a.nii.gz"):
        output = tmp_path / f"out_{source.name}"
        assert predict(source, output, "series_pick=thinnest") == 0
        message = f"{source}: no DICOM folder, so series_pick=thinnest has no effect\n"
        assert capsys.readouterr().err.count(message) == 1


def test_a_refusal_of_two_series_names_the_rule(
    few: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The argument that the message advises works."""
    assert predict(few["flat"], tmp_path / "out") == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "it holds 2" in line]
    assert line.endswith(
        "in the column series of a case table. Or give series_pick=thinnest "
        "(patient P01, 2024-01-01)."
    )


def test_a_refusal_in_a_case_table_does_not_advise_a_rule(
    few: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A case table is refused with `series_pick`."""
    table = tmp_path / "cases.csv"
    table.write_text(f"case,image\na,{few['flat']}\n")
    assert predict(table, tmp_path / "out") == 2
    message = capsys.readouterr().err
    assert "in the column series of a case table." in message
    assert "series_pick" not in message


def test_a_folder_without_a_scan_names_its_patient(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder is a case, and its refusal says what the folder holds instead."""
    forms = make_export(tmp_path, kinds=("MR alone", "topogram alone"))
    assert predict(forms["folders"], tmp_path / "out", "series_pick=thinnest") == 1
    messages = capsys.readouterr().err.splitlines()
    refused = [line for line in messages if "(patient P" in line]
    assert len(refused) == 2
    assert "4 x MR image (series 4 'T2'); give the folder of a CT series" in refused[0]
    assert refused[1].endswith("give the folder of a CT series (patient P02, 2024-01-01).")


@pytest.mark.thorough
@pytest.mark.slow
def test_forty_patients(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All forms have the same results; a refusal names patient, date and cure in one line."""
    forms = make_export(tmp_path)
    # A damaged file without a series in its header does not affect the scans.
    damaged = bytes(128) + b"DICM" + b"\xff" * 40
    for form in ("flat", "folders"):
        (forms[form] / "IM990000").write_bytes(damaged)
    with zipfile.ZipFile(forms["zip"], "a") as archive:
        archive.writestr("IM990000", damaged)
    results = {}
    for form, source in forms.items():
        out = tmp_path / f"out_{form}"
        assert predict(source, out, "series_pick=thinnest") == 1
        messages = capsys.readouterr().err.splitlines()
        results[form] = sorted(map(str, reports(out).values()))
        assert sum("'IM990000': the DICOM file is truncated" in line for line in messages) == 1
        refused = [line for line in messages if "(patient P" in line]
        assert len(refused) == sum(
            row["status"] == "failed" for row in read_csv(out / "summary.csv")
        )
        assert all("again" in line or "give " in line for line in refused)
    assert len(KINDS) == 40
    assert len(results["flat"]) == 40
    assert results["flat"] == results["folders"] == results["zip"]
