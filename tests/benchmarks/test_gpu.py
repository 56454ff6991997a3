"""GPU report: parts and their ends, the page, one exit code, and each part's own judgement."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra
import pytest
import torch

from benchmarks.gpu import __main__ as app
from benchmarks.gpu import kernels, memory, parts, prediction, speed, tests, training
from benchmarks.gpu.parts import Ending, Session, session_of
from benchmarks.gpu.report import Check, Report, check_table, read_report
from medseg.conf_folder import conf_dir
from medseg.studies.train_arguments import compose_train

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def rehearsal(tmp_path: Path) -> Session:
    return Session(tmp_path, is_rehearsal=True)


@pytest.fixture
def on_card(tmp_path: Path) -> Session:
    return Session(tmp_path, is_rehearsal=False)


def test_without_a_gpu_it_is_said_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("REHEARSAL", raising=False)
    monkeypatch.delenv("SCAN", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu", str(tmp_path / "gpu")])
    monkeypatch.setattr(app, "run_part", lambda *_: pytest.fail("ran"))
    with pytest.raises(SystemExit) as end:
        app.main()
    assert end.value.code == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("medseg: make gpu: torch sees no NVIDIA GPU on this machine; ")
    assert said.endswith("REHEARSAL=1")
    assert not list(tmp_path.iterdir())


def test_all_parts_run_and_one_code_ends_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def run_part(name: str, session: Session) -> Ending:
        ran.append(name)
        problem = "exit code 1; see kernels.log" if name == "kernels" else ""
        return Ending(1.0, problem, report_of(True))

    monkeypatch.setenv("REHEARSAL", "1")
    monkeypatch.delenv("SCAN", raising=False)
    monkeypatch.setattr(app, "run_part", run_part)
    monkeypatch.setattr(sys, "argv", ["gpu", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        app.main()
    assert end.value.code == 1
    assert ran == list(parts.LIMITS_S), "a failed part does not stop the others"
    text = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    assert "6 parts, 1 without an end" in text


def test_a_scan_that_is_missing_is_said_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REHEARSAL", "1")
    monkeypatch.setenv("SCAN", str(tmp_path / "ct.nii.gz"))
    monkeypatch.setattr(sys, "argv", ["gpu", str(tmp_path)])
    monkeypatch.setattr(app, "run_part", lambda *_: pytest.fail("ran"))
    with pytest.raises(SystemExit) as end:
        app.main()
    assert end.value.code == 2
    assert "no such file; give a CT of a chest" in capsys.readouterr().err


def test_the_parts_take_less_than_ten_minutes_on_a_card() -> None:
    assert sum(parts.LIMITS_S.values()) <= 600
    assert set(parts.LIMITS_S) == {
        "tests", "kernels", "memory", "training", "prediction", "speed"
    }  # fmt: skip


def run_script(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit_s: float
) -> Ending:
    """Run a part whose process is a script instead."""
    session = Session(tmp_path, is_rehearsal=False)
    popen = subprocess.Popen

    def start(_: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return popen([sys.executable, "-c", script], **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setitem(parts.LIMITS_S, "kernels", limit_s)
    return parts.run_part("kernels", session)


def test_a_part_that_fails_is_named_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ending = run_script("print('why'); raise SystemExit(7)", tmp_path, monkeypatch, 60)
    assert ending.problem == "exit code 7; see kernels.log"
    assert "why" in (tmp_path / "kernels.log").read_text(encoding="utf-8")


def test_a_part_that_hangs_is_ended_with_all_that_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "child"
    child = f"import time, pathlib; time.sleep(3); pathlib.Path({str(mark)!r}).touch()"
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    ending = run_script(script, tmp_path, monkeypatch, 1.5)
    assert ending.problem == "no end within 1.5 s; see kernels.log"
    time.sleep(3)
    assert not mark.exists(), "its child was ended too"


def report_of(*outcomes: bool | None) -> Report:
    return Report([Check(f"check {n}", "1", "≤ 2", is_met) for n, is_met in enumerate(outcomes)])


@pytest.mark.parametrize(
    ("outcomes", "problem", "on_card_code", "rehearsal_code"),
    [
        ((True, True), "", 0, 0),
        ((True, False), "", 1, 0),
        ((True, None), "", app.EXIT_INCOMPLETE, 0),  # what was not run is no success
        ((None, False), "", 1, 0),
        ((), "no end within 30 s", 1, 1),
    ],
)
def test_one_exit_code_for_all_parts(
    outcomes: tuple[bool | None, ...],
    problem: str,
    on_card_code: int,
    rehearsal_code: int,
    on_card: Session,
    rehearsal: Session,
) -> None:
    endings = {
        "kernels": Ending(1.0, "", report_of(True)),
        "speed": Ending(1.0, problem, report_of(*outcomes)),
    }
    assert app.exit_code(on_card, endings) == on_card_code
    assert app.exit_code(rehearsal, endings) == rehearsal_code


def test_the_page_names_the_card_or_the_rehearsal(
    on_card: Session, rehearsal: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    endings = {
        "kernels": Ending(1.0, "", report_of(True, False, None)),
        "speed": Ending(70.0, "no end within 70 s; see speed.log", Report()),
    }
    judged = app.page(on_card, endings)
    assert judged.startswith("# a GPU (compute capability 8.6), CUDA ")
    assert (
        "2 parts, 1 without an end; 1 checks passed, 1 checks FAILED, 1 checks not run." in judged
    )
    assert "| kernels | 1 passed, 1 FAILED, 1 not run | 1.0 | 30 |" in judged
    assert "## Speed\n\nno end within 70 s; see speed.log" in judged
    rehearsed = app.page(rehearsal, endings)
    assert rehearsed.startswith("# REHEARSAL on a CPU")
    assert "no value says anything of a GPU" in rehearsed
    assert "passed" not in rehearsed
    assert "2 not judged, 1 not run" in rehearsed


def test_bounds_decide_and_survive_the_file(tmp_path: Path) -> None:
    report = Report()
    report.at_most("low", 1.0, 1.0)
    report.at_most("high", 1.1, 1.0)
    report.at_least("Dice", 0.9991, 0.999)
    report.at_least("poor Dice", 0.9989, 0.999)
    report.near_one("near", 0.951, 0.05)
    report.near_one("far", 1.06, 0.05)
    report.not_run("fp16", "no GPU")
    report.table([{"a": 1.25}], {"a": ".1f"})
    assert [check.is_met for check in report.checks] == [
        True, False, True, False, True, False, None
    ]  # fmt: skip
    report.write(tmp_path / "report.json")
    assert read_report(tmp_path / "report.json") == report
    assert "| far | 1.060 | 1 ± 0.05 | FAILED |" in check_table(report.checks, is_rehearsal=False)


def test_a_skipped_test_is_no_success(tmp_path: Path) -> None:
    file = tmp_path / "junit.xml"
    file.write_text(
        '<testsuites><testsuite><testcase classname="a" name="good"/>'
        '<testcase classname="a" name="two_gpus"><skipped message="two GPUs are needed"/>'
        '</testcase><testcase classname="a" name="bad"><failure message="1 != 2"/></testcase>'
        '<testcase classname="a" name="broken"><error message="no file"/></testcase>'
        "</testsuite></testsuites>",
        encoding="utf-8",
    )
    report = Report()
    tests.add_results(report, file)
    assert [(check.name, check.value, check.is_met) for check in report.checks] == [
        ("a::two_gpus", "two GPUs are needed", None),
        ("a::bad", "1 != 2", False),
        ("a::broken", "no file", False),
        ("tests passed", "1", True),
    ]


def test_the_files_with_gpu_tests_are_found() -> None:
    names = {path.name for path in tests.files_with_gpu_tests(ROOT / "tests")}
    assert names >= {"test_switches.py", "test_optimisation.py", "test_ranks.py", "test_scores.py"}
    assert "test_gpu.py" not in names


def test_all_configurations_compose() -> None:
    assert len(memory.CONFIGURATIONS) == 13
    assert {*memory.SAVES_AGAINST, *memory.SAVES_AGAINST.values()} <= set(memory.CONFIGURATIONS)
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        for name, arguments in memory.CONFIGURATIONS.items():
            compose_train(["stage=fine", *arguments, "run_dir=none"], name)


def test_planned_memory_is_judged_against_both_figures_of_the_card() -> None:
    report = Report()
    row = {
        "configuration": "bf16",
        "planned MiB": 1040.0,
        "allocated MiB": 1000.0,
        "planned of the card": 1500.0,
        "taken of the card": 1650.0,
    }
    memory.compare(report, row)
    memory.compare(report, row | {"allocated MiB": None, "taken of the card": None})
    assert [check.is_met for check in report.checks] == [True, False, None, None]


def test_a_switch_that_saves_nothing_fails() -> None:
    rows = {
        "bf16": {"planned MiB": 9.0, "allocated MiB": 100.0},
        "offload": {"planned MiB": 1.0, "allocated MiB": 101.0},
    }
    report = Report()
    memory.add_saving(report, rows, "offload", "bf16")
    memory.add_saving(report, rows, "lean", "wide")
    assert [check.is_met for check in report.checks] == [False, None]


def test_what_the_card_has_taken_is_its_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of 1000 bytes 300 are free and 500 reserved, so that 200 lie beside; 600 were reserved.
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (300, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 500)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 600)
    assert memory.taken_of_card() == 800


def test_wrong_convolutions_are_seen(rehearsal: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    good = kernels.measure(rehearsal)
    assert good.checks
    assert all(check.is_met for check in good.checks), good.checks
    convolve = torch.nn.functional.conv3d

    def wrong(image: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        output = convolve(image, *arguments, **options)
        if image.dtype is torch.float32:
            return output
        # The last plane of a half-precision output is lost.
        kept = torch.ones_like(output)
        kept[:, :, -2:] = 0
        return output * kept

    monkeypatch.setattr(kernels.F, "conv3d", wrong)
    bad = kernels.measure(rehearsal)
    large = [check for check in bad.checks if "planes" in check.name]
    assert len(large) == 2
    assert not any(check.is_met for check in large)
    outputs = [check for check in bad.checks if check.name.endswith(": output")]
    assert outputs
    assert not any(check.is_met for check in outputs)


def test_a_gpu_without_bf16_is_not_asked_for_it(
    rehearsal: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        kernels,
        "supported_precision",
        lambda precision, _: "fp16" if precision == "bf16" else precision,
    )
    report = kernels.measure(rehearsal)
    assert [check.name for check in report.checks if check.is_met is None] == ["bf16"]


HISTORY = [
    {"loss": "1.5", "seconds_per_step": "9", "gpu_gib": "1.0", "gpu_percent": "40"},
    {"loss": "", "seconds_per_step": "", "gpu_gib": "", "gpu_percent": ""},
    {"loss": "0.9", "seconds_per_step": "0.5", "gpu_gib": "1.2", "gpu_percent": "41"},
]


def test_each_precision_trains_and_the_gpu_is_watched(
    on_card: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[tuple[str, str]] = []

    def train_stage(stage: str, precision: str, _: Session) -> list[dict[str, str]]:
        trained.append((stage, precision))
        last = {"fp32": "0.9", "bf16": "0.95", "fp16": "1.2"}[precision]
        return [*HISTORY[:2], HISTORY[2] | {"loss": last}]

    monkeypatch.setattr(training, "train_stage", train_stage)
    monkeypatch.setattr(training, "find_spec", lambda _: SimpleNamespace())
    report = training.measure(on_card)
    assert len(trained) == 6
    failed = {check.name for check in report.checks if not check.is_met}
    assert failed == {f"{stage}, fp16: loss by that of fp32" for stage in ("coarse", "fine")}
    compared = [check.name[:12] for check in report.checks if "loss by that" in check.name]
    assert compared == ["coarse, bf16", "coarse, fp16", "fine, bf16: ", "fine, fp16: "]
    assert "| coarse, fp32 | 1.5 | 0.9 | 2.00 |" in report.texts[0]


@pytest.mark.parametrize(
    ("column", "value", "installed", "failed"),
    [
        ("loss", "1.6", True, "the loss falls"),
        ("loss", "nan", True, "the loss falls"),
        ("gpu_percent", "", True, "the history has its load"),
        ("gpu_percent", "", False, "the history has its load"),
    ],
)
def test_a_training_that_does_not_learn_or_watch_fails(
    column: str,
    value: str,
    installed: bool,
    failed: str,
    on_card: Session,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(training, "find_spec", lambda _: SimpleNamespace() if installed else None)
    history = [*HISTORY[:2], HISTORY[2] | {column: value}]
    report = Report()
    training.check_training(report, "x", training.summary_row("x", history), history, on_card)
    assert [check.name for check in report.checks if not check.is_met] == [f"x: {failed}"]


def test_a_run_folder_is_never_used_twice(tmp_path: Path) -> None:
    for name in ("run", "run_2", "run_3"):
        folder = training.unused(tmp_path / "run")
        assert folder == tmp_path / name
        folder.mkdir()


def test_a_prediction_that_differs_fails() -> None:
    labels = torch.zeros(4, 10, 10, dtype=torch.uint8)
    labels[:, :5] = 1
    other = labels.clone()
    other[0, 5, :5] = 1

    def result(values: torch.Tensor) -> Any:
        return SimpleNamespace(labels=SimpleNamespace(array=values.numpy()))

    report = Report()
    prediction.compare(report, "same", result(labels), result(labels), 0.999)
    prediction.compare(report, "other", result(other), result(labels), 0.999)
    prediction.compare(report, "empty", result(labels * 0), result(labels * 0), 0.999)
    assert [check.is_met for check in report.checks] == [True, True, True, False, False]


def test_a_switch_of_speed_that_slows_down_fails(
    on_card: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches: list[bool] = []
    seconds = iter([1.0, 0.5, 0.4, 0.3, 0.6])

    def measure_row(*_: object) -> dict[str, float]:
        searches.append(torch.backends.cudnn.benchmark)
        return {"seconds_per_step": next(seconds)}

    monkeypatch.setattr(speed, "measure_row", measure_row)
    monkeypatch.setattr(speed, "compose", lambda *_: None)
    monkeypatch.setattr(speed, "input_shape", lambda _: (1, 1, 1))
    monkeypatch.setattr(speed, "copy_seconds", lambda *_, is_pinned, device: 1 + (not is_pinned))
    before = torch.backends.cudnn.benchmark
    report = speed.measure(on_card)
    assert searches == [False, False, False, True, False]
    assert torch.backends.cudnn.benchmark is before
    assert [check.name for check in report.checks if not check.is_met] == [
        "compiled: seconds by those of bf16"
    ]


def test_the_session_is_read_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REHEARSAL", raising=False)
    monkeypatch.delenv("SCAN", raising=False)
    assert session_of(tmp_path) == Session(tmp_path, is_rehearsal=False)
    assert session_of(tmp_path).accelerator == "gpu"
    monkeypatch.setenv("REHEARSAL", "1")
    monkeypatch.setenv("SCAN", "/scans/ct.nii.gz")
    session = session_of(tmp_path)
    assert (session.device.type, session.scan) == ("cpu", Path("/scans/ct.nii.gz"))
