"""`predict` on odd and broken files: each gets a message, and the other cases go on."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import hydra
import nibabel as nib
import numpy as np
import pytest
from oracle import CoarseOracle, FineOracle, dice, scan, stage

from medseg.commands import predict as app
from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.errors import UserError
from medseg.io.read import read_labels
from medseg.io.tables import read_csv
from medseg.io.write import write_image
from medseg.prediction.options import PredictConfig


@pytest.fixture(autouse=True)
def oracles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace checkpoints by oracles, and leave out the audit, which would refuse the blocks."""
    networks = {"coarse": CoarseOracle(), "fine": FineOracle()}
    monkeypatch.setattr(
        "medseg.cascade.load.load_stage", lambda path, name, *_: stage(networks[name], name)
    )
    monkeypatch.setattr("medseg.data.audit.image.audit_channels", lambda *_: [])


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
        composed = hydra.compose("predict", arguments)
    return app.predict(to_config(composed, PredictConfig))


@pytest.fixture
def scans(tmp_path: Path) -> Path:
    """Make a folder with one good scan."""
    folder = tmp_path / "scans"
    volume, _ = scan()
    write_image(folder / "good.nii.gz", volume.array, volume.grid)
    return folder


def is_right(path: Path) -> bool:
    """Tell whether a result is that of the good scan."""
    labels, reference = read_labels(path).array, scan()[1]
    return min(dice(labels == value, reference == value) for value in (1, 2)) > 0.95


def report(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def test_what_a_reader_assumed_is_told_and_kept(
    scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = nib.load(scans / "good.nii.gz")
    moved = image.affine.copy()
    moved[0, 3] += 8.0
    image.header.set_qform(image.affine, 1)
    image.header.set_sform(moved, 1)
    nib.Nifti1Image(np.asarray(image.dataobj), None, image.header).to_filename(
        scans / "moved.nii.gz"
    )
    assert predict(scans, tmp_path / "out") == 0
    warning = (
        "the sform and the qform of the header disagree by up to 9.6 voxels: the sform is used, "
        "as ITK does"
    )
    assert f"medseg: moved: {warning}" in capsys.readouterr().err
    assert warning in report(tmp_path / "out" / "moved.json")["warnings"]
    assert not any("sform" in text for text in report(tmp_path / "out" / "good.json")["warnings"])
    for name in ("good", "moved"):
        assert is_right(tmp_path / "out" / f"{name}.nii.gz")


def test_every_bad_scan_of_a_folder_has_its_sentence_and_the_good_ones_their_result(
    scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = (scans / "good.nii.gz").read_bytes()
    volume, _ = scan()
    (scans / "cut.nii.gz").write_bytes(good[: len(good) // 2])
    (scans / "empty.nrrd").write_bytes(b"")
    (scans / "html.mha").write_bytes(b"<html>404 not found</html>")
    for suffix in ("mha", "nii", "nrrd"):
        write_image(
            scans / f"nothing_{suffix}.{suffix}", np.full_like(volume.array, -1000), volume.grid
        )
    write_image(scans / "header.mhd", volume.array, volume.grid)
    (scans / "header.zraw").unlink()
    colours = np.zeros((9, 7, 5), [("R", "u1"), ("G", "u1"), ("B", "u1")])
    nib.Nifti1Image(colours, np.eye(4)).to_filename(scans / "colours.nii")
    assert predict(scans, tmp_path / "out") == 1
    messages = capsys.readouterr().err.replace(f"{scans}/", "").splitlines()
    assert messages == [
        "medseg: colours.nii: expected one number per voxel, but the NIfTI header says RGB "
        "(colours, complex or very long "
        "numbers); export the scan as grey values.",
        (
            "medseg: cut.nii.gz: the file cannot be read: its compressed voxels end too early; "
            "copy or export it again."
        ),
        (
            "medseg: empty.nrrd: expected a NRRD file, but it does not start with 'NRRD' and a "
            "version up to 5; check the file."
        ),
        (
            "medseg: header.mhd: its voxels should be in 'header.zraw', which does not exist; "
            "copy both files."
        ),
        "medseg: html.mha: expected a MetaImage file with a name, '=' and a value on each "
        "line of its header, got '<html>404 not "
        "found</html>'; check the file.",
        *(
            (
                f"medseg: nothing_{suffix}.{suffix}: expected a scan, but every voxel holds "
                "-1000; export it again."
            )
            for suffix in ("mha", "nii", "nrrd")
        ),
        "medseg: 8 of 9 cases failed",
    ]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "good.json",
        "good.nii.gz",
        "index.html",
        "summary.csv",
        "summary.xlsx",
    ]
    assert is_right(tmp_path / "out" / "good.nii.gz")
    # As the only input, each of them ends the command.
    assert predict(scans / "cut.nii.gz", tmp_path / "alone") == 2
    assert not list((tmp_path / "alone").iterdir())


def test_voxels_without_a_number_and_a_single_slice_go_through_with_a_warning(
    scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    volume, _ = scan()
    gaps = volume.array.astype(np.float32)
    gaps[:, :5] = np.nan
    image = nib.load(scans / "good.nii.gz")
    nib.Nifti1Image(gaps.T, image.affine, image.header, dtype=np.float32).to_filename(
        scans / "gaps.nii.gz"
    )
    nib.Nifti1Image(volume.array[12:13].T, image.affine).to_filename(scans / "slice.nii.gz")
    assert predict(scans, tmp_path / "out") == 0
    warning = (
        f"{26 * 5 * 130} of {26 * 90 * 130} voxels (5.6 %) hold no number (NaN or infinity) and "
        "count as air, -1024 HU"
    )
    assert report(tmp_path / "out" / "gaps.json")["warnings"] == [warning]
    assert is_right(tmp_path / "out" / "gaps.nii.gz")
    assert read_labels(tmp_path / "out" / "slice.nii.gz").array.shape == (1, 90, 130)
    warning = "the scan of 130 x 90 x 1 voxels is a single slice: expect a poor result"
    assert report(tmp_path / "out" / "slice.json")["warnings"][0] == warning
    assert f"medseg: slice: {warning}" in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_told_before_anything_is_computed(
    scans: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"kept")
    monkeypatch.setattr("medseg.prediction.batch.read_case", None)
    with pytest.raises(UserError) as caught:
        predict(scans, tmp_path / "file" / "out")
    assert str(caught.value) == (
        f"{tmp_path}/file/out: cannot be written (a part of its path is a file); check the "
        "folder, its permissions and its space."
    )
    assert (tmp_path / "file").read_bytes() == b"kept"


@pytest.mark.parametrize(
    "target", ["medseg.io.nifti.replace_path", "medseg.prediction.case_report.replace_text"]
)
def test_a_disk_that_fills_up_costs_what_does_not_fit(
    scans: Path,
    tmp_path: Path,
    target: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copy(scans / "good.nii.gz", scans / "late.nii.gz")
    assert predict(scans, tmp_path / "out") == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    kept, write_again = (
        [],
        importlib.import_module(target.rpartition(".")[0]).__dict__[target.rpartition(".")[2]],
    )

    def full_at_the_second(path: Path, *arguments: Any) -> Any:
        kept.append(path)
        if len(kept) == 1:
            return write_again(path, *arguments)
        raise UserError(
            f"{path}: cannot be written (No space left on device); check the folder, its "
            "permissions and its space."
        )

    monkeypatch.setattr(target, full_at_the_second)
    assert predict(scans, tmp_path / "out", "overwrite=true") == 1
    messages = capsys.readouterr().err.splitlines()
    suffix = ".nii.gz" if "nifti" in target.split(".") else ".json"
    assert messages == [
        f"medseg: late: {tmp_path}/out/late{suffix}: cannot be written (No space left on "
        "device); check the folder, its permissions "
        "and its space.",
        "medseg: 1 of 2 cases failed",
    ]
    after = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    rows = {row["case"]: row["status"] for row in read_csv(tmp_path / "out" / "summary.csv")}
    assert rows == {"good": "ok", "late": "failed"}
    assert sorted(after) == sorted(before)
    assert after[f"late{suffix}"] == before[f"late{suffix}"]
    assert after["late.nii.gz"] == before["late.nii.gz"], "equal labels give equal files"


def test_several_checkpoints_leave_a_map_of_their_disagreement(scans: Path, tmp_path: Path) -> None:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        composed = hydra.compose(
            "predict",
            [
                f"input='{scans}'",
                f"output='{tmp_path / 'out'}'",
                "coarse=c",
                "fine=[f,f]",
                "accelerator=cpu",
            ],
        )
    assert app.predict(to_config(composed, PredictConfig)) == 0
    assert is_right(tmp_path / "out" / "good.nii.gz")
    spread = read_labels(tmp_path / "out" / "uncertainty" / "good.nii.gz")
    assert spread.array.max() == 0, "equal checkpoints agree"
    assert spread.grid.is_close(scan()[0].grid)
    passes = report(tmp_path / "out" / "good.json")["passes"]
    assert passes == {
        "localise": "whole",
        "refine_left_lung": "whole",
        "refine_right_lung": "whole",
    }


def test_links_that_lead_nowhere_fail_alone(
    scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files of git-annex that were not fetched are such links; each is reported."""
    (scans / "gone.nii.gz").symlink_to("nowhere.nii.gz")
    (scans / "loop.nii.gz").symlink_to("loop.nii.gz")
    table = tmp_path / "table.csv"
    rows = [f"{name},scans/{name}.nii.gz" for name in ("good", "gone", "loop")]
    table.write_text("\n".join(["case,image", *rows]), encoding="utf-8")
    for source, output in ((scans, tmp_path / "from folder"), (table, tmp_path / "from table")):
        assert predict(source, output) == 1
        messages = capsys.readouterr().err
        assert is_right(output / "good.nii.gz")
        for name in ("gone", "loop"):
            assert f"{name}.nii.gz: this file or folder does not exist" in messages
