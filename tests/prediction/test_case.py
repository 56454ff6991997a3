"""Second prediction into a folder: only cases that are missing or outdated are predicted."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra
import numpy as np
import pytest
from oracle import CoarseOracle, FineOracle, scan, stage

from medseg.commands import predict as app
from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.errors import UserError
from medseg.findings import Finding, warnings_of
from medseg.geometry.grid import VoxelGrid
from medseg.inference.segmentation import Segmentation
from medseg.io.volume import Volume
from medseg.io.write import write_image, write_labels
from medseg.prediction import batch
from medseg.prediction import case as case_module
from medseg.prediction import result_files as results_module
from medseg.prediction.case import is_small, segment_scan
from medseg.prediction.case_report import checksums, refuse_other_json
from medseg.prediction.options import PredictConfig
from medseg.prediction.scans import Scan
from medseg.preprocess.scale import HuScale
from medseg.task import Channel, Task


def use_oracles(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Replace checkpoints by oracles; returns the checksums that they state, by stage."""
    networks, sums = (
        {"coarse": CoarseOracle(), "fine": FineOracle()},
        {"coarse": "c0", "fine": "f0"},
    )
    monkeypatch.setattr(
        "medseg.cascade.load.load_stage",
        lambda path, name, *_: stage(networks[name], name, checkpoints={str(path): sums[name]}),
    )
    return sums


@pytest.fixture(autouse=True)
def weights(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Checksums of the networks by stage."""
    return use_oracles(monkeypatch)


@pytest.fixture
def predicted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the cases that are predicted, not skipped."""
    names: list[str] = []
    segment_case = batch.segment_case

    def noted(scan: Scan, *arguments: Any) -> None:
        names.append(scan.name)
        segment_case(scan, *arguments)

    monkeypatch.setattr(batch, "segment_case", noted)
    return names


def compose(folder: Path, *overrides: str) -> PredictConfig:
    arguments = [
        f"input='{folder / 'scans'}'",
        f"output='{folder / 'out'}'",
        "coarse=c",
        "fine=f",
        "accelerator=cpu",
        *overrides,
    ]
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return to_config(hydra.compose("predict", arguments), PredictConfig)


def predict(folder: Path, *overrides: str) -> int:
    return app.predict(compose(folder, *overrides))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Predict two scans, once for all tests; no test changes their folder."""
    folder = tmp_path_factory.mktemp("finished")
    volume, _ = scan()
    for name in ("a", "b"):
        write_image(folder / "scans" / f"{name}.nii.gz", volume.array, volume.grid)
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_oracles(monkeypatch)
        assert predict(folder) == 0
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """Copy the two scans and their results, for a test to change."""
    return shutil.copytree(finished, tmp_path, dirs_exist_ok=True)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "out").iterdir()}


def test_what_is_finished_is_skipped_and_said(
    folder: Path,
    predicted: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("time.strftime", lambda *_: "now")  # the page says when it was made
    assert predict(folder) == 0  # now the summary lists the files of the copy
    before = content(folder)
    capsys.readouterr()
    os.utime(folder / "scans" / "a.nii.gz", (0, 0))  # the same content
    monkeypatch.chdir(folder)
    assert predict(Path(), "threads=1") == 0
    assert predicted == []
    assert content(folder) == before
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [
        f"out/{name}.nii.gz: finished before, skipped" for name in ("a", "b")
    ]
    assert (
        "2 of 2 cases were finished before and skipped; overwrite=true repeats them" in captured.err
    )
    assert predict(folder, "overwrite=true") == 0
    assert predicted == ["a", "b"]


def other_scan(folder: Path) -> None:
    volume, _ = scan()
    write_image(folder / "scans" / "a.nii.gz", volume.array + (volume.array > -100), volume.grid)


def cut(name: str) -> Callable[[Path], None]:
    return lambda folder: os.truncate(
        folder / "out" / name, (folder / "out" / name).stat().st_size // 2
    )


def changed(**values: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        report = folder / "out" / "a.json"
        report.write_text(json.dumps({**json.loads(report.read_text()), **values}))

    return change


DAMAGES = {
    "another scan": other_scan,
    "no label map": lambda folder: (folder / "out" / "a.nii.gz").unlink(),
    "a part of the label map": cut("a.nii.gz"),
    "another label map": lambda folder: (folder / "out" / "a.nii.gz").write_bytes(
        (folder / "scans" / "b.nii.gz").read_bytes()
    ),
    "no report": lambda folder: (folder / "out" / "a.json").unlink(),
    "a part of the report": cut("a.json"),
    "a report of something else": lambda folder: (folder / "out" / "a.json").write_text("[1]"),
    "another version": changed(version="0.0.1"),
    "no volumes": changed(volume_ml=None),
    "warnings that are no list": changed(warnings=5),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_what_is_not_whole_or_has_another_source_is_made_anew(
    damage: Callable[[Path], None], folder: Path, predicted: list[str]
) -> None:
    damage(folder)
    assert predict(folder) == 0
    assert predicted == ["a"]
    assert predict(folder) == 0
    assert predicted == ["a"]


def test_a_pipe_in_place_of_a_report_is_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "out" / "a.json").unlink()
    os.mkfifo(folder / "out" / "a.json")
    assert predict(folder) == 1
    assert "a.json: cannot be written, since it is a folder or a device" in capsys.readouterr().err


@pytest.mark.parametrize(
    "override",
    ["inference.tta=true", "hu_offset=1", "precision=fp32", "inference.tile_size=[64,64,64]"],
)
def test_other_settings_make_another_result(
    override: str, folder: Path, predicted: list[str]
) -> None:
    for _ in range(2):
        assert predict(folder, override) == 0
        assert predicted == ["a", "b"]


@pytest.mark.parametrize("override", ["inference.budget_gib=2", "inference.max_ram_gib=16"])
def test_the_memory_makes_no_other_result(
    override: str, folder: Path, predicted: list[str]
) -> None:
    assert predict(folder) == 0
    predicted.clear()
    assert predict(folder, override) == 0
    assert predicted == []


def test_a_label_map_is_checked_beside_the_map_of_disagreement(
    folder: Path, predicted: list[str]
) -> None:
    """Both files have the same name, in two folders."""
    assert predict(folder, "inference.tta=true") == 0
    predicted.clear()
    shutil.copy(folder / "out" / "uncertainty" / "a.nii.gz", folder / "out" / "a.nii.gz")
    assert predict(folder, "inference.tta=true") == 0
    assert predicted == ["a"]


def test_other_options_of_a_kind_of_file_make_it_anew(folder: Path, predicted: list[str]) -> None:
    source = f"input='{folder / 'scans' / 'a.nii.gz'}'"
    output = f"output='{folder / 'one.nii.gz'}'"
    for save, max_mb, is_made in (
        ("[labels,viewer]", 12, True),
        ("[labels,viewer]", 12, False),
        ("[labels,viewer]", 11, True),
        ("[labels]", 12, False),
    ):
        predicted.clear()
        assert predict(folder, source, output, f"save={save}", f"viewer.max_mb={max_mb}") == 0
        assert bool(predicted) == is_made


def test_files_that_an_earlier_prediction_leaves_behind_are_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = f"input='{folder / 'scans' / 'a.nii.gz'}'"
    output = f"output='{folder / 'one.nii.gz'}'"
    assert predict(folder, source, output, "save=[labels,preview]") == 0
    assert "earlier prediction" not in capsys.readouterr().err
    assert predict(folder, source, output, "overwrite=true") == 0
    message = f"{folder / 'one.preview.png'}: from an earlier prediction of this case"
    assert message in capsys.readouterr().err


def results(folder: Path) -> list[str]:
    """Names of the files that the report of the case `a` lists."""
    return list(json.loads((folder / "out" / "a.json").read_text())["results"])


def test_a_further_kind_of_file_leaves_the_earlier_ones_in_report_and_page(
    folder: Path, predicted: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict(folder, "save=[labels,preview]") == 0
    assert predict(folder, "save=[viewer]") == 0
    assert results(folder) == ["a.nii.gz", "a.html", "a.preview.png"]
    page = (folder / "out" / "index.html").read_text(encoding="utf-8")
    assert "a.preview.png" in page
    assert "a.html" in page
    assert "earlier prediction" not in capsys.readouterr().err
    # The viewer is carried over with its options, so all kinds together are up to date.
    (folder / "out" / "a.preview.png").unlink()
    assert predict(folder, "save=[labels,preview]") == 0
    predicted.clear()
    assert predict(folder, "save=[labels,preview,viewer]") == 0
    assert predicted == []


@pytest.mark.parametrize("change", ["settings", "scan", "file", "weights"])
def test_files_that_may_show_other_labels_are_not_carried_over(
    change: str, folder: Path, weights: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    preview = folder / "out" / "a.preview.png"
    assert predict(folder, "save=[labels,preview]") == 0
    overrides = ["save=[labels,viewer]"]
    if change == "settings":
        overrides.append("inference.tta=true")
    elif change == "scan":
        other_scan(folder)
    elif change == "file":
        preview.write_bytes(b"")
    else:
        weights["fine"] = "f1"
    assert predict(folder, *overrides) == 0
    assert preview.name not in results(folder)
    assert f"{preview}: from an earlier prediction of this case" in capsys.readouterr().err


def test_another_reference_makes_the_viewer_anew(folder: Path, predicted: list[str]) -> None:
    volume, labels = scan()
    table = folder / "cases.csv"
    table.write_text("case,image,labels\na,scans/a.nii.gz,reference.nii.gz\n")
    for value, is_made in ((1, True), (1, False), (2, True)):
        reference = np.where(labels > 0, value, 0).astype(np.uint8)
        write_labels(folder / "reference.nii.gz", reference, volume.grid)
        predicted.clear()
        assert predict(folder, f"input='{table}'", "save=[labels,viewer]") == 0
        assert bool(predicted) == is_made


@pytest.mark.parametrize(
    "text", ['{"Modality": "CT"}', "{}", "[1]", "null", "{'Modality': 'CT'}", "\0"]
)
def test_a_json_file_of_another_program_is_not_overwritten(text: str, folder: Path) -> None:
    sidecar = folder / "scans" / "a.json"
    sidecar.write_text(text)
    source = folder / "scans" / "a.nii.gz"
    output = folder / "scans" / "a.seg.nrrd"
    with pytest.raises(UserError, match=r"a\.json: expected a report of medseg, got another JSON"):
        predict(folder, f"input='{source}'", f"output='{output}'")
    assert sidecar.read_text() == text


def test_an_empty_file_in_place_of_a_report_is_replaced(tmp_path: Path) -> None:
    refuse_other_json(tmp_path / "a.nii.gz")
    (tmp_path / "a.json").touch()
    refuse_other_json(tmp_path / "a.nii.gz")


def test_so_do_other_weights(folder: Path, predicted: list[str], weights: dict[str, str]) -> None:
    weights["fine"] = "f1"
    assert predict(folder) == 0
    assert predicted == ["a", "b"]


def test_what_another_prediction_finishes_after_it_was_read_is_skipped(
    folder: Path,
    predicted: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """While `a` is computed, another prediction writes `b`, which may have been read already."""
    done = {path.name: path.read_bytes() for path in (folder / "out").iterdir()}
    for path in (folder / "out").iterdir():
        path.unlink()
    segment_case = batch.segment_case

    def busy(scan: Scan, *arguments: Any) -> None:
        for name in ("b.nii.gz", "b.json"):
            (folder / "out" / name).write_bytes(done[name])
        segment_case(scan, *arguments)

    monkeypatch.setattr(batch, "segment_case", busy)
    assert predict(folder) == 0
    assert predicted == ["a"]
    assert (
        capsys.readouterr().out.splitlines()[-1]
        == f"{folder / 'out' / 'b.nii.gz'}: finished before, skipped"
    )


def test_a_report_that_is_deleted_meanwhile_does_not_count_as_another_prediction(
    folder: Path, predicted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    segment_case = batch.segment_case

    def busy(scan: Scan, *arguments: Any) -> None:
        (folder / "out" / f"{scan.name}.json").unlink()
        segment_case(scan, *arguments)

    monkeypatch.setattr(batch, "segment_case", busy)
    assert predict(folder, "overwrite=true") == 0
    assert predicted == ["a", "b"]


def test_two_predictions_of_different_scans_into_one_file_do_not_vouch_for_each_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second one begins to write while the first one does: it waits, and is then refused."""
    other_scan(folder)
    output, write_labels, entered = (
        folder / "one.nii.gz",
        results_module.write_labels,
        threading.Event(),
    )
    codes: dict[str, int] = {}

    configs = {
        name: compose(folder, f"input='{folder / 'scans' / name}.nii.gz'", f"output='{output}'")
        for name in ("a", "b")
    }

    def predict_one(name: str) -> None:
        codes[name] = app.predict(configs[name])

    def slow_write(path: Path, labels: Any, *arguments: Any) -> None:
        write_labels(path, labels, *arguments)
        if not entered.is_set():
            entered.set()
            time.sleep(1.0)

    barrier = threading.Barrier(2)
    segment_case = batch.segment_case

    def together(*arguments: Any) -> None:
        segment_case(*arguments)
        barrier.wait(60)

    monkeypatch.setattr(results_module, "write_labels", slow_write)
    monkeypatch.setattr(batch, "segment_case", together)
    monkeypatch.setattr(app, "sigterm_exits", nullcontext)  # signals belong to the main thread
    threads = [threading.Thread(target=predict_one, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report = json.loads((folder / "one.json").read_text())
    assert report["results"] == checksums([output])
    (winner,) = (name for name, code in codes.items() if code == 0)
    (loser,) = (name for name, code in codes.items() if code == 2)
    assert report["input"].endswith(f"{winner}.nii.gz")
    message = (
        f"{loser}: {output}: another prediction, of {folder / 'scans' / winner}.nii.gz, has "
        "written it while this one ran; give another"
    )
    assert message in capsys.readouterr().err
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_a_report_says_what_a_case_cost_and_came_from(finished: Path) -> None:
    report = json.loads((finished / "out" / "a.json").read_text())
    steps = report["durations_s"]
    assert set(steps) == {
        "read",
        "localise",
        "refine_left_lung",
        "refine_right_lung",
        "join",
        "write",
        "total",
    }
    assert sum(seconds for step, seconds in steps.items() if step != "total") <= steps["total"]
    # At least the memory that numpy and torch hold, times the duration of the case.
    assert report["memory_gb_s"] > 0.05 * steps["total"]
    assert report["peak_resident_bytes"] > 5e7
    assert report["checkpoints"] == {"coarse": {"c": "c0"}, "fine": {"f": "f0"}}
    assert report["source"]["path"] == str(finished / "scans" / "a.nii.gz")


@pytest.mark.parametrize("num_channels", [1, 2])
def test_all_channels_of_a_scan_must_fit_into_the_budget(tmp_path: Path, num_channels: int) -> None:
    """Four bytes for each voxel of each channel; a scan that just fits is read ahead."""
    grid = VoxelGrid((4, 8, 16), (1.0, 1.0, 1.0))
    paths = [tmp_path / f"{number}.nii.gz" for number in range(num_channels)]
    for path in paths:
        write_image(path, np.zeros(grid.shape, dtype=np.int16), grid)
    task = Task("t", {"organ": 1}, (), (Channel("mr", None, "zscore"),) * num_channels)
    read = Scan("a", paths[0], more_paths=tuple(paths[1:]))
    num_bytes = 4 * num_channels * 4 * 8 * 16
    assert is_small(read, task, num_bytes / 2**30)
    assert not is_small(read, task, (num_bytes - 1) / 2**30)


@pytest.mark.parametrize(
    ("change", "is_checked"),
    [("none", True), ("no HU", False), ("turned", False), ("MR", False)],
)
def test_only_a_ct_in_hu_that_lies_as_its_header_says_is_checked_for_mirroring(
    monkeypatch: pytest.MonkeyPatch, change: str, is_checked: bool
) -> None:
    rng = np.random.default_rng(0)
    tissue_hu = rng.choice(
        [-990, -850, -100, 50, 600], size=(8, 30, 40), p=[0.3, 0.2, 0.2, 0.2, 0.1]
    )
    image = np.rint(tissue_hu + rng.normal(0, 25, tissue_hu.shape)).astype(np.int16)
    if change == "no HU":
        image += 2048
    channel = Channel("ct", (-1000.0, 400.0))
    if change == "MR":
        channel = Channel("mr", None, "zscore")
    findings = warnings_of("body_position", ["it is turned"] if change == "turned" else [])
    cascade = SimpleNamespace(
        task=Task("t", {"organ": 1}, (), (channel,)),
        keeps_values=True,
        segment=lambda volume, *_, **__: Segmentation(
            np.ones(volume.array.shape, dtype=np.uint8), findings=list(findings)
        ),
    )
    checked: list[bool] = []

    def noted(*_: Any) -> list[Finding]:
        checked.append(True)
        return warnings_of("mirrored_image", ["it may be mirrored"])

    monkeypatch.setattr(case_module, "mirrored_findings", noted)
    volume = Volume(image, VoxelGrid(image.shape, (2.0, 1.0, 1.0)))
    result = segment_scan(volume, "a", cascade)  # type: ignore[arg-type]
    assert bool(checked) == is_checked
    assert ("it may be mirrored" in result.warnings) == is_checked
    expected = {"no HU": "not_hu", "MR": "ok"}
    assert result.status == expected.get(change, "warnings")


@pytest.mark.parametrize("keeps_values", [False, True])
def test_a_channel_of_mr_that_is_constant_is_a_warning(keeps_values: bool) -> None:
    image = np.random.default_rng(0).integers(0, 900, (8, 30, 40), dtype=np.int16)
    model = SimpleNamespace(
        task=Task("t", {"organ": 1}, (), (Channel("mr", None, "zscore"),) * 2),
        keeps_values=keeps_values,
        segment=lambda volume, *_, **__: Segmentation(
            np.ones(volume.array.shape, dtype=np.uint8), findings=[]
        ),
    )
    volume = Volume(image, VoxelGrid(image.shape, (2.0, 1.0, 1.0)))
    result = segment_scan(volume, "a", model, [np.zeros_like(image)])  # type: ignore[arg-type]
    assert result.status == "warnings"
    assert result.warnings == ["image_1: every voxel holds 0; export the scan again"]


@pytest.mark.parametrize("keeps_values", [False, True])
def test_the_advice_on_a_scale_replaces_the_one_that_was_given(keeps_values: bool) -> None:
    rng = np.random.default_rng(0)
    tissue_hu = rng.choice(
        [-990, -850, -100, 50, 600], size=(8, 30, 40), p=[0.3, 0.2, 0.2, 0.2, 0.1]
    )
    image = np.rint(tissue_hu + rng.normal(0, 25, tissue_hu.shape)).astype(np.int16)
    model = SimpleNamespace(
        task=Task("t", {"organ": 1}, (), (Channel("ct", (-1000.0, 400.0)),)),
        keeps_values=keeps_values,
        segment=lambda volume, *_, **__: Segmentation(np.ones(image.shape, dtype=np.uint8)),
    )
    volume = Volume(image + np.int16(1024), VoxelGrid(image.shape, (2.0, 1.0, 1.0)))
    result = segment_scan(volume, "a", model, scale=HuScale(offset=1024.0))  # type: ignore[arg-type]
    assert "predict: hu_offset=0)" in result.warnings[0]
