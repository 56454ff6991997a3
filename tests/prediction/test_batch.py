"""Batch: paths of results, refusals before the weights are loaded, and cases that fail."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra
import pytest
import torch
from oracle import CoarseOracle, stage
from oracle import scan as scan_of_blocks
from torch import Tensor, nn

from medseg.cascade.stage import TrainedStage
from medseg.commands import predict as app
from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.errors import UserError
from medseg.geometry.grid import VoxelGrid
from medseg.inference.options import InferenceOptions
from medseg.io.inputs import input_format
from medseg.io.write import write_image
from medseg.memory.options import Accelerator, Precision
from medseg.prediction import batch
from medseg.prediction import predict as predict_module
from medseg.prediction.case import CaseData, is_small
from medseg.prediction.options import PredictConfig, RangeOptions
from medseg.prediction.scans import Scan
from medseg.task import Channel, Region, Task


def predict(source: Path, output: Path, *overrides: str) -> int:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        composed = hydra.compose(
            "predict",
            [
                f"input='{source}'",
                f"output='{output}'",
                "coarse=c",
                "fine=f",
                "accelerator=cpu",
                *overrides,
            ],
        )
    return app.predict(to_config(composed, PredictConfig))


@pytest.fixture
def scans(tmp_path: Path) -> Path:
    folder = tmp_path / "scans"
    folder.mkdir()
    for name in ("a.nii.gz", "b.nrrd"):
        (folder / name).write_bytes(b"a scan")
    return folder


@pytest.fixture
def without_networks(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], Any]:
    """Replace the steps by stubs that open no scan.

    Returns:
        Step and case to the exception that the stub raises; empty until a test fills it.
    """
    raises: dict[tuple[str, str], Any] = {}

    def fail(step: str, scan: Scan) -> None:
        if (step, scan.name) in raises:
            raise raises[step, scan.name]

    def read(scan: Scan, *_: Any) -> CaseData:
        input_format(scan.path)
        fail("read", scan)
        return CaseData()

    def segment(scan: Scan, *_: Any) -> None:
        fail("segment", scan)

    def write(scan: Scan, output: Path, *_: Any) -> dict[str, Any]:
        fail("write", scan)
        output.parent.mkdir(exist_ok=True)
        output.write_text(str(scan.path))
        return {
            "warnings": [f"look at {scan.name}"],
            "volume_ml": {},
            "durations_s": {"total": 0.0},
        }

    monkeypatch.setattr(
        "medseg.cascade.load.load_stage", lambda path, name, *_: stage(CoarseOracle(), name)
    )
    for name, step in {
        "read_case": read,
        "segment_case": segment,
        "write_case": write,
        "is_small": lambda *_: True,
    }.items():
        monkeypatch.setattr(batch, name, step)
    return raises


@pytest.mark.parametrize(
    ("source", "output"),
    [
        ("scans", "scans"),
        ("scans/a.nii.gz", "scans/a.nii.gz"),
        ("scans/a.nii.gz", "scans"),
        ("link", "scans"),
        ("scans", "link"),
    ],
)
def test_a_scan_is_not_overwritten(scans: Path, source: str, output: str) -> None:
    (scans.parent / "link").symlink_to(scans)
    with pytest.raises(UserError, match="scan of the case a"):
        predict(scans.parent / source, scans.parent / output)
    assert (scans / "a.nii.gz").read_bytes() == b"a scan"


def test_a_link_in_the_output_is_followed(scans: Path, tmp_path: Path) -> None:
    (tmp_path / "o.nii.gz").symlink_to(scans / "a.nii.gz")
    with pytest.raises(UserError, match="scan of the case a"):
        predict(scans / "a.nii.gz", tmp_path / "o.nii.gz")


def test_scans_of_other_splits_are_safe_too(scans: Path, tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("case,image,split\na,elsewhere.nii,test\nz,scans/a.nii.gz,train\n")
    with pytest.raises(UserError, match="scan of the case z"):
        predict(table, scans, "split=test")


@pytest.mark.parametrize("column", ["labels", "expert"])
def test_references_of_a_table_are_not_overwritten(tmp_path: Path, column: str) -> None:
    """This includes the references of other splits."""
    (tmp_path / "masks").mkdir()
    (tmp_path / "masks" / "z.nii.gz").write_bytes(b"drawn by hand")
    table = tmp_path / "t.csv"
    table.write_text(f"case,image,split,{column}\nz,1.nii,test,\n\ny,2.nii,train,masks/z.nii.gz\n")
    with pytest.raises(UserError) as caught:
        predict(table, tmp_path / "masks", "split=test")
    assert str(caught.value) == (
        f"{tmp_path}/masks/z.nii.gz is a file of the case y and would be overwritten; give "
        "another output"
    )
    assert (tmp_path / "masks" / "z.nii.gz").read_bytes() == b"drawn by hand"


def test_two_cases_do_not_share_a_file(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("case,image\nü,1.nii\nu\u0308,2.nii\n", encoding="utf-8")
    with pytest.raises(UserError, match="would be one file"):
        predict(table, tmp_path / "out")


@pytest.mark.parametrize("output", ["o.nhdr", "o.txt", "o.png", ".nii.gz"])
def test_a_file_of_another_format_is_refused_for_one_scan(
    scans: Path, tmp_path: Path, output: str
) -> None:
    with pytest.raises(UserError, match=r"\.nii\.gz, \.nii, \.nrrd"):
        predict(scans / "a.nii.gz", tmp_path / output)


def test_names_of_outputs(
    scans: Path, tmp_path: Path, without_networks: dict[tuple[str, str], Any]
) -> None:
    assert predict(scans, tmp_path / "a.b") == 0
    assert {path.name for path in (tmp_path / "a.b").iterdir()} == {
        "a.nii.gz",
        "b.nii.gz",
        "index.html",
        "summary.csv",
        "summary.xlsx",
    }
    assert predict(scans / "b.nrrd", tmp_path / "a.b") == 0, "the folder is there now"
    assert predict(scans / "b.nrrd", tmp_path / "O.NRRD") == 0
    (scans.parent / "one.csv").write_text("case,image\nx,scans/b.nrrd\n")
    assert predict(scans.parent / "one.csv", tmp_path / "one" / "o.nrrd") == 0
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["o.nrrd"], (
        "a summary is for folders"
    )
    with pytest.raises(UserError, match="has 2 cases"):
        predict(scans, tmp_path / "o.mha")
    with pytest.raises(UserError, match="or a folder"):
        predict(scans, tmp_path / "o.nhdr")


@pytest.mark.parametrize("step", ["read", "segment", "write"])
@pytest.mark.parametrize("error", [UserError("damaged"), RuntimeError("a defect"), ValueError("x")])
@pytest.mark.parametrize("bad", ["a", "b", "c"])
def test_a_bad_case_costs_the_others_nothing_and_each_is_told_in_its_turn(
    scans: Path,
    tmp_path: Path,
    without_networks: dict[tuple[str, str], Any],
    step: str,
    error: Exception,
    bad: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (scans / "c.nii").write_bytes(b"a scan")
    without_networks[step, bad] = error
    assert predict(scans, tmp_path / "out") == 1
    good = [name for name in "abc" if name != bad]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *(f"{name}.nii.gz" for name in good),
        "index.html",
        "summary.csv",
        "summary.xlsx",
    ]
    captured = capsys.readouterr()
    text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    messages = {
        name: f"medseg: {name}: {text if name == bad else f'look at {name}'}" for name in "abc"
    }
    assert captured.err.splitlines() == [*messages.values(), "medseg: 1 of 3 cases failed"]
    assert [line.split(":")[0] for line in captured.out.splitlines()] == [
        str(tmp_path / "out" / f"{name}.nii.gz") for name in good
    ]


def test_memory_that_is_short_ahead_of_its_turn_is_asked_for_again(
    scans: Path,
    tmp_path: Path,
    without_networks: dict[tuple[str, str], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries: list[str] = []
    read = batch.read_case

    def once(scan: Scan, *_: Any) -> CaseData:
        tries.append(scan.name)
        if scan.name == "b" and tries.count("b") == 1:
            raise MemoryError("while the other case is there")
        return read(scan)

    monkeypatch.setattr(batch, "read_case", once)
    assert predict(scans, tmp_path / "out") == 0
    assert tries == ["a", "b", "b"]


def test_a_case_that_fails_holds_nothing_while_the_next_is_computed(
    scans: Path,
    tmp_path: Path,
    without_networks: dict[tuple[str, str], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crops: list[weakref.ref[VoxelGrid]] = []

    def fail(*_: object) -> None:
        assert all(crop() is None for crop in crops), (
            "the error of the case before holds what it was working on"
        )
        crop = VoxelGrid((1, 1, 1), (1.0, 1.0, 1.0), (0.0, 0.0, 0.0))
        crops.append(weakref.ref(crop))
        try:
            raise KeyError("first")
        except KeyError as error:
            raise RuntimeError("then") from error

    monkeypatch.setattr(batch, "segment_case", fail)
    gc.disable()  # a collection would free the cycles of the error
    try:
        assert predict(scans, tmp_path / "out") == 1
    finally:
        gc.enable()
    assert len(crops) == 2


def test_a_large_scan_waits_for_its_turn(
    scans: Path,
    tmp_path: Path,
    without_networks: dict[tuple[str, str], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the header: four bytes for each voxel must fit into the budget."""
    volume, _ = scan_of_blocks()
    for name in ("a.nii.gz", "b.nrrd"):
        write_image(scans / name, volume.array, volume.grid)
    monkeypatch.setattr(batch, "is_small", is_small)
    threads: list[str] = []
    read = batch.read_case

    def noted(scan: Scan, *_: Any) -> CaseData:
        threads.append("own" if threading.current_thread() is threading.main_thread() else "ahead")
        return read(scan)

    monkeypatch.setattr(batch, "read_case", noted)
    needed_gib = 4 * volume.array.size / 2**30
    for budget_gib, expected in (
        (needed_gib * 1.001, ["own", "ahead"]),
        (needed_gib * 0.999, ["own", "own"]),
    ):
        threads.clear()
        assert predict(scans, tmp_path / "out", f"inference.budget_gib={budget_gib}") == 0
        assert threads == expected


@pytest.mark.parametrize(
    "error",
    [MemoryError("1 TiB"), RuntimeError("DefaultCPUAllocator: can't allocate memory: 1 TiB")],
)
def test_memory_that_runs_out_is_told_in_a_sentence(
    scans: Path,
    tmp_path: Path,
    without_networks: dict[tuple[str, str], Any],
    error: Exception,
    capsys: pytest.CaptureFixture[str],
) -> None:
    without_networks["segment", "a"] = error
    assert predict(scans, tmp_path / "out") == 1
    assert (tmp_path / "out" / "b.nii.gz").is_file()
    assert (
        f"medseg: a: out of memory ({error}); free some, give a smaller inference.budget_gib"
        in capsys.readouterr().err
    )
    assert predict(scans / "a.nii.gz", tmp_path / "o.nii") == 3


@pytest.mark.parametrize("step", ["read", "segment", "write"])
def test_alone_a_defect_keeps_its_traceback(
    scans: Path, tmp_path: Path, without_networks: dict[tuple[str, str], Any], step: str
) -> None:
    without_networks[step, "a"] = RuntimeError("a defect")
    with pytest.raises(RuntimeError, match="a defect") as caught:
        predict(scans / "a.nii.gz", tmp_path / "o.nii")
    assert caught.traceback[-1].name == "fail"


def test_a_missing_file_of_a_table_is_one_bad_case(
    scans: Path,
    tmp_path: Path,
    without_networks: dict[tuple[str, str], Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = tmp_path / "t.csv"
    table.write_text("case,image\nx,nowhere.nii\ny,scans/a.nii.gz\n")
    assert predict(table, tmp_path / "out") == 1
    assert (tmp_path / "out" / "y.nii.gz").is_file()
    assert "nowhere.nii: this file or folder does not exist" in capsys.readouterr().err


def test_sigterm_ends_the_command_and_is_given_back(
    scans: Path,
    tmp_path: Path,
    without_networks: dict[tuple[str, str], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The command restores the handler of the program that has called it."""
    before, seen = signal.getsignal(signal.SIGTERM), []

    def stopped(*_: object) -> None:
        seen.append(signal.getsignal(signal.SIGTERM))
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(batch, "segment_case", stopped)
    with pytest.raises(SystemExit) as caught:
        predict(scans, tmp_path / "out")
    assert caught.value.code == 128 + signal.SIGTERM
    assert seen != [before]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("value", ["3", "[]", "[a,3]", "{a: b}"])
def test_what_is_no_checkpoint_is_refused(value: str, scans: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="fine: expected a checkpoint, a list of checkpoints or null"
    ):
        predict(scans, tmp_path / "out", f"fine={value}")


def test_a_precision_that_the_device_lacks_is_refused_first(scans: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="fp16 needs a GPU"):
        predict(scans, tmp_path / "out", "precision=fp16")


@pytest.fixture
def tf32_flags() -> Iterator[tuple[Any, Any]]:
    """Restore the two switches of torch that allow TF32."""
    flags = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [flag.allow_tf32 for flag in flags]
    yield flags
    for flag, allowed in zip(flags, before, strict=True):
        flag.allow_tf32 = allowed


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_tf32_is_off_in_other_precisions_and_put_back(
    precision: str, before: bool, tf32_flags: tuple[Any, Any]
) -> None:
    seen: list[bool] = []

    class Network(nn.Module):
        divisor = (1, 1, 1)

        def forward(self, image: Tensor) -> Tensor:
            seen.extend(flag.allow_tf32 for flag in tf32_flags)
            return torch.cat([image, -image], 1)

    task = Task("t", {"a": 1}, (Region("a", ("a",)),), (Channel(window_hu=(-1000.0, 0.0)),))
    stage = TrainedStage(
        Network(), "coarse", task, (1.0, 1.0, 1.0), None, 0.0, precision, torch.device("cpu")
    )
    for flag in tf32_flags:
        flag.allow_tf32 = before
    stage.predict_probs(torch.zeros(1, 2, 3, 4), InferenceOptions())
    assert seen == [False, False]
    assert [flag.allow_tf32 for flag in tf32_flags] == [before, before]


def test_every_key_of_the_weights_reaches_the_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []

    def load_stage(*arguments: Any) -> TrainedStage:
        calls.append(arguments)
        return stage(CoarseOracle(), arguments[1])

    monkeypatch.setattr("medseg.cascade.load.load_stage", load_stage)
    config = PredictConfig(
        input=str(tmp_path),
        output=str(tmp_path),
        coarse=["a.ckpt"],
        fine=["b.ckpt"],
        accelerator=Accelerator.cpu,
        precision=Precision.bf16,
        inference=InferenceOptions(max_ram_gib=9.0),
        trusted_targets=["mine."],
    )
    batch.load_range_models(config)
    assert [arguments[:2] for arguments in calls] == [
        (Path("a.ckpt"), "coarse"),
        (Path("b.ckpt"), "fine"),
    ]
    for _, _, device, precision, trusted, options, _ in calls:
        assert (device.type, precision, list(trusted)) == ("cpu", "bf16", ["mine."])
        assert options is config.inference


def test_every_key_of_a_model_folder_reaches_its_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def load_model_folders(*arguments: Any, **keys: Any) -> Any:
        calls.append((arguments, keys))
        return SimpleNamespace(task=SimpleNamespace(labels={"liver": 7}))

    monkeypatch.setattr(batch, "load_model_folders", load_model_folders)
    monkeypatch.setattr(batch, "result_settings", lambda model, precision: {"given": precision})
    config = PredictConfig(
        input=str(tmp_path),
        output=str(tmp_path),
        weights=["a", "b"],
        folds=["1", "3"],
        label_values={"liver": 7},
        ensemble=True,
        accelerator=Accelerator.cpu,
        precision=Precision.bf16,
        inference=InferenceOptions(max_ram_gib=9.0),
        trusted_targets=["mine."],
    )
    (chosen,) = batch.load_range_models(config)
    expected = {
        "label_values": {"liver": 7},
        "ensemble": True,
        "accelerator": "cpu",
        "precision": "bf16",
        "options": config.inference,
        "trusted": ["mine."],
    }
    assert calls == [((["a", "b"], ["1", "3"]), expected)]
    assert chosen.settings == {"given": "bf16", "labels": {"liver": 7}}


@pytest.mark.parametrize(("device", "starts"), [("cuda", ["libraries"]), ("cpu", [])])
def test_the_libraries_of_a_gpu_count_as_loaded(
    device: str, starts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They start before the resident memory is measured and before the rest is divided."""
    events: list[str] = []
    monkeypatch.setattr(batch, "pick_device", lambda *_: torch.device(device))
    monkeypatch.setattr(batch, "start_libraries", lambda _: events.append("libraries"))
    share_memory = batch.share_memory

    def noted_shares(*given: Any) -> Any:
        events.append("shares")
        return share_memory(*given)

    monkeypatch.setattr(batch, "share_memory", noted_shares)
    monkeypatch.setattr(batch, "resident_bytes", lambda: events.append("loaded") or 5)
    config = PredictConfig(input=str(tmp_path), output=str(tmp_path))
    assert batch.make_batch([], config, 1, batch.Observer()).loaded_bytes == 5
    assert events == [*starts, "shares", "loaded"]


def test_the_other_processes_of_torchrun_serve_tiles_and_read_no_scan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[Any] = []
    cascade = SimpleNamespace(serve_tiles=lambda: served.append("tiles"))
    loaded: list[Any] = []
    monkeypatch.setattr(predict_module, "has_other_ranks", lambda: True)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(predict_module, "find_scans", lambda *_: pytest.fail("read"))
    monkeypatch.setattr(
        predict_module,
        "load_range_models",
        lambda *given: loaded.append(given) or [SimpleNamespace(model=cascade)],
    )
    config = PredictConfig(input=str(tmp_path), output=str(tmp_path), coarse="c", threads=3)
    assert predict_module.predict_scans(config) == []
    assert served == ["tiles"]
    assert loaded == [(config,)]
    thin = RangeOptions(range_mm=(0.0, 2.0), coarse="a")
    with pytest.raises(UserError, match="by_spacing: the processes of torchrun share one cascade"):
        predict_module.predict_scans(replace(config, by_spacing={"thin": thin}))
    # Every rank refuses it, so that none waits for the others.
    of_folder = PredictConfig(input=str(tmp_path), output=str(tmp_path), weights="nnUNet")
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(UserError, match="weights: the processes of torchrun cannot share a mo"):
            predict_module.predict_scans(of_folder)
    monkeypatch.setattr(
        predict_module, "find_scans", lambda *_: served.append("scans") or sys.exit(9)
    )
    with pytest.raises(SystemExit):
        predict_module.predict_scans(config)
    assert served == ["tiles", "scans"]
