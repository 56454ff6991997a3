"""`prepare` tells what is wrong with a case and goes on with the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import pytest

from medseg.commands import prepare as command
from medseg.commands.prepare import prepare
from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.config.schema import PrepareConfig
from medseg.data import cache
from medseg.data.audit.finding import CaseAudit
from medseg.data.audit.table import AuditedCase
from medseg.data.case_table import Case
from medseg.findings import Finding, Severity
from medseg.geometry.grid import VoxelGrid
from medseg.io.read import read_labels
from medseg.io.write import write_labels
from medseg.report.audit_pictures import CaseView
from medseg.task import Channel, Task
from medseg.training.assemble import make_data_module
from medseg.training.options import TrainConfig


def run(table: Path, cache_dir: Path, *overrides: str) -> int:
    common = [
        f"data.cases='{table}'",
        f"data.cache='{cache_dir}'",
        "spacing@spacings.fine=isotropic_4mm",
    ]
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        composed = hydra.compose(
            "prepare", [*common, "spacing@spacings.coarse=isotropic_4mm", *overrides]
        )
    return prepare(to_config(composed, PrepareConfig))


def cached(cache_dir: Path) -> list[str]:
    return sorted(
        sidecar.parent.name.rpartition("-")[0] for sidecar in cache_dir.rglob("case.json")
    )


def table_of(tiny_table: Path, folder: Path, *rows: str) -> Path:
    """A table of its own in the folder, over the scans of the tiny cases."""
    for file in tiny_table.parent.glob("*.nii.gz"):
        (folder / file.name).symlink_to(file)
    table = folder / "table.csv"
    table.write_text("\n".join(["case,image,labels", *rows]) + "\n")
    return table


@pytest.mark.parametrize("damage", ["missing", "truncated", "no memory"])
def test_a_bad_case_does_not_stop_the_rest(
    damage: str,
    tiny_table: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = ["a,c0.nii.gz,l0.nii.gz", "bad,bad.nii.gz,l1.nii.gz", "z,c2.nii.gz,l2.nii.gz"]
    table = table_of(tiny_table, tmp_path, *rows)
    said = "bad.nii.gz"
    if damage == "truncated":
        (tmp_path / "bad.nii.gz").write_bytes((tmp_path / "c1.nii.gz").read_bytes()[:500])
    elif damage == "no memory":
        (tmp_path / "bad.nii.gz").symlink_to(tmp_path / "c1.nii.gz")
        said = "MemoryError('512 GiB')"
        build = cache._build

        def fail(folder: Path, source: object, case: Case, *arguments: object) -> object:
            if case.name == "bad":
                raise MemoryError("512 GiB")
            return build(folder, source, case, *arguments)

        monkeypatch.setattr(cache, "_build", fail)
    assert run(table, tmp_path / "cache") == 1
    assert cached(tmp_path / "cache") == ["a", "z"]
    told = capsys.readouterr().err.splitlines()
    # A message that begins with the file of the case does not name the case before it.
    is_named = [line.startswith("medseg: bad: ") or "bad.nii.gz: " in line for line in told]
    assert sum(named and said in line for named, line in zip(is_named, told, strict=True)) == 1
    assert told[-1] == "medseg: 1 of 3 cases cannot be used: bad"


def test_another_label_convention(tiny_table: Path, tmp_path: Path) -> None:
    table = table_of(tiny_table, tmp_path, "a,c0.nii.gz,other.nii.gz", "b,c0.nii.gz,l0.nii.gz")
    labels = read_labels(tmp_path / "l0.nii.gz")
    other = np.array([0, 10, 11], dtype=np.uint8)[labels.array]
    other[7:] += (other[7:] == 11).astype(np.uint8)  # two lobes of the right lung
    other[0, 0, 0] = 5
    write_labels(tmp_path / "other.nii.gz", other, labels.grid)
    convention = [
        "data.label_values={left_lung: 10, right_lung: [11, 12]}",
        "+data.label_values.trachea=5",
    ]
    assert run(table, tmp_path / "cache", *convention) == 1, "b has another convention"
    assert cached(tmp_path / "cache") == ["a"]
    (mapped,) = (tmp_path / "cache").rglob("labels.npy")
    assert run(table, tmp_path / "plain") == 1
    (plain,) = (tmp_path / "plain").rglob("labels.npy")
    assert np.array_equal(np.load(mapped), np.load(plain))


def test_swapped_sides_are_refused(
    tiny_table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = table_of(tiny_table, tmp_path, "a,c0.nii.gz,l0.nii.gz", "b,c1.nii.gz,l1.nii.gz")
    assert run(table, tmp_path / "cache", "data.label_values={left_lung: 2, right_lung: 1}") == 1
    assert cached(tmp_path / "cache") == []
    assert capsys.readouterr().err.count("refused (swapped_sides): ") == 2


@pytest.mark.parametrize(
    "spacing",
    [
        ["spacing=fixed_size"],
        [
            "spacing=multi_scale",
            "spacing.target_spacing_mm=[1.0,1.0,1.0]",
            "spacing.resampling=linear",
        ],
    ],
)
def test_training_finds_what_was_prepared_for_its_strategy(
    spacing: list[str], tiny_table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [
        one.replace("spacing=", "spacing@spacings.fine=").replace("spacing.", "spacings.fine.")
        for one in spacing
    ]
    assert run(tiny_table, tmp_path, *given) == 0
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        arguments = [
            f"data.cases='{tiny_table}'",
            f"data.cache='{tmp_path}'",
            "stage=fine",
            "run_dir=x",
            *spacing,
        ]
        config = to_config(hydra.compose("train", arguments), TrainConfig)
    monkeypatch.setattr(
        "medseg.training.data_module.prepare_case", lambda *_, **__: pytest.fail("built anew")
    )
    data = make_data_module(config)
    data.prepare_data()
    data.setup("fit")
    assert data.train_cases


def test_a_test_case_without_labels_is_no_mistake(
    tiny_table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = table_of(tiny_table, tmp_path)
    table.write_text(
        "case,image,labels,split\na,c0.nii.gz,l0.nii.gz,train\nunlabelled,c1.nii.gz,,test\n"
    )
    assert run(table, tmp_path / "cache") == 0
    assert cached(tmp_path / "cache") == ["a"]
    assert (
        "medseg: 1 test case without labels: only predict uses them, so they are not prepared"
        in capsys.readouterr().err
    )
    table.write_text(
        "case,image,labels,split\na,c0.nii.gz,l0.nii.gz,train\nunlabelled,c1.nii.gz,,train\n"
    )
    assert run(table, tmp_path / "cache") == 1


def audited(name: str, *severities: Severity, failure: str = "", ignored: str = "") -> AuditedCase:
    """A case with one finding of each severity, whose code is the severity's first letter."""
    findings = tuple(Finding(word.value[0], word, f"some {word.value}") for word in severities)
    case = Case(name, Path("x"), None, name, ignore_findings=frozenset(ignored))
    audit = None
    if not failure:
        audit = CaseAudit(VoxelGrid((5, 6, 7), (3.0, 1.5, 2.25)), {}, "", {"liver": 7.4}, findings)
    return AuditedCase(case, audit, failure)


AUDITED = [
    audited("plain"),
    audited("informed", Severity.information),
    audited("doubtful", Severity.information, Severity.warning),
    audited("refused", Severity.warning, Severity.error),
    audited("ignored", Severity.warning, Severity.error, ignored="we"),
    audited("failed", failure="it is damaged"),
    audited("twice", Severity.warning),
]


def test_pictures_begin_with_errors_and_have_the_names_and_the_window_of_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        command, "audit_pictures", lambda *given, **keys: drawn.append((given, keys)) or [tmp_path]
    )
    window_hu = (-160.0, 240.0)
    task = Task("organs", {"liver": 1, "spleen": 3}, (), (Channel(window_hu=window_hu), Channel()))
    slices: list[Any] = [[f"slice of {case.case.name}"] for case in AUDITED]
    assert command.draw(AUDITED, slices, tmp_path / "audit.png", task) == [tmp_path]
    (((views, path, title), keys),) = drawn
    assert (path, title) == (tmp_path / "audit.png", "7 cases")
    assert keys == {"label_names": {1: "liver", 3: "spleen"}, "window_hu": window_hu}
    names = [view.title for view in views]
    assert names == ["refused", "failed", "doubtful", "twice", "plain", "informed", "ignored"]
    assert all(view.slices == [f"slice of {view.title}"] for view in views)
    by_name: dict[str, CaseView] = {view.title: view for view in views}
    assert by_name["plain"].subtitle == "5×6×7 at 3×1.5×2.25 mm, liver 7.4 ml"
    assert by_name["failed"].subtitle == ""
    assert by_name["failed"].findings == [("error", "it is damaged")]
    expected = [("error", "e: some error"), ("warning", "w: some warning")]
    assert by_name["refused"].findings == expected


def test_pictures_show_no_ignored_voxels() -> None:
    labels = np.array([[[0, 1, 3]]], np.uint8)
    task = Task("organs", {"liver": 1}, (), (Channel(),), ignore_label=3)
    assert command.shown_labels(labels, task).tolist() == [[[0, 1, 0]]]
    assert command.shown_labels(labels, replace(task, ignore_label=None)) is labels
    assert command.shown_labels(None, task) is None


def test_the_last_line_counts_the_cases_and_the_warnings(tmp_path: Path) -> None:
    files = [Path("audit.csv"), Path("audit.png")]
    assert command.summary(AUDITED, files) == (
        "7 cases: 5 ready, 1 refused, 1 failed; 3 warnings (w 3); see audit.csv, audit.png"
    )
    assert command.summary(AUDITED[:1], files[:1]) == "1 case: 1 ready; 0 warnings; see audit.csv"


def test_a_case_is_printed_by_its_outcome(capsys: pytest.CaptureFixture[str]) -> None:
    for case in AUDITED:
        command.print_case(case)
    said = capsys.readouterr()
    printed = [line.partition(":")[0] for line in said.out.splitlines()]
    assert printed == ["plain", "informed", "doubtful", "ignored", "twice"]
    told = [
        "doubtful: warning (w): some warning",
        "refused: refused (e): some error",
        "refused: warning (w): some warning",
        "failed: it is damaged",
        "twice: warning (w): some warning",
    ]
    assert said.err.splitlines() == [f"medseg: {line}" for line in told]
