"""Results of finished, failed and half-written run folders, and the report over them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from medseg.commands.report import report
from medseg.config.schema import ReportConfig
from medseg.errors import UserError
from medseg.io.tables import read_csv
from medseg.report.compare import CaseScore
from medseg.runs.past_runs import MAX_KEYS, find_runs, read_run, read_scores, read_study
from medseg.runs.status import Status
from medseg.runs.sweeps import Job, compare
from tests.report.made_runs import make_run


def test_a_sweep_becomes_a_page_and_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"stage": "coarse", "optimizer.lr": "0.01", "data.cases": "'Doe, John/a=b (1).csv'"}
    make_run(tmp_path / "sweep" / "2", {**asked, "memory": "amp"}, 0.93, picture=True)
    make_run(tmp_path / "sweep" / "10", {**asked, "memory": "plain"}, 0.9)
    make_run(
        tmp_path / "sweep" / "11",
        {**asked, "memory": "plain", "memory.accumulate": "2"},
        0,
        status="refused",
        message="too <few>",
    )
    assert report(ReportConfig(str(tmp_path / "sweep"), None, 24)) == 0
    table = read_csv(tmp_path / "sweep" / "report.csv")
    assert [line["run"] for line in table] == ["2", "10", "11"]
    assert [line["memory"] for line in table] == ["amp", "plain", "plain"]
    assert [line["status"] for line in table] == ["finished", "finished", "refused"]
    assert [line["message"] for line in table] == ["", "", "too <few>"]
    assert [line["is_best"] for line in table] == ["True", "False", "False"]
    assert [line["val_dice"] for line in table] == ["0.93", "0.9", ""]
    assert not {"run_dir", "data.cases", "optimizer.lr", "memory.precision"} & set(table[0])
    page = (tmp_path / "sweep" / "report.html").read_text(encoding="utf-8")
    assert "too &lt;few&gt;" in page
    assert page.count('<img src="data:') == 1
    assert "3 runs" in capsys.readouterr().out
    # A second report is one of the same runs.
    report(ReportConfig(str(tmp_path / "sweep"), str(tmp_path / "elsewhere"), 0))
    assert read_csv(tmp_path / "elsewhere" / "report.csv") == table


def test_the_best_validation_has_the_scores_of_cases_and_the_last_one_the_pictures(
    tmp_path: Path,
) -> None:
    make_run(tmp_path / "0", {"seed": "1"}, 0.9)
    rows = [
        "step,case,label,dice,picture",
        "40,a,left,0.9,step_000040_0.png",
        "40,b,left,0.7,",
        "80,a,left,0.5,step_000080_0.png",
        "80,b,left,0.8,",
        "80,c,left,nan,",
        "80,d,left,1.5,",
        "eighty,e,left,0.5,",
        "80,f",
    ]
    (tmp_path / "0" / "validation.csv").write_text("\n".join(rows) + "\n")
    (tmp_path / "0" / "history.csv").write_text("step,val_dice\n40,0.8\n80,0.65\n")
    (tmp_path / "0" / "pictures").mkdir()
    for step in (40, 80):
        (tmp_path / "0" / "pictures" / f"step_{step:06d}_0.png").touch()
    run = read_run(tmp_path / "0", tmp_path)
    assert [(score.step, score.case, score.dice) for score in run.cases] == [
        (40, "a", 0.9),
        (40, "b", 0.7),
    ]
    assert [(picture.case, picture.dice) for picture in run.pictures] == [("a", {"left": 0.5})]


def test_of_two_equal_steps_the_first_counts_as_for_best_ckpt(tmp_path: Path) -> None:
    make_run(tmp_path / "0", {}, 0.75)
    rows = ["step,case,label,dice,picture"]
    # The mean is 0.5 at step 3, and 0.75 at the others.
    for step, dice_a, dice_b in ((3, 0.5, 0.5), (5, 1.0, 0.5), (8, 0.75, 0.75), (13, 0.5, 1.0)):
        rows += [f"{step},a,left,{dice_a},", f"{step},b,left,{dice_b},"]
    (tmp_path / "0" / "validation.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    run = read_run(tmp_path / "0", tmp_path)
    assert [(score.step, score.dice) for score in run.cases] == [(5, 1.0), (5, 0.5)]


def test_a_helper_label_counts_for_the_best_step_as_for_best_ckpt(tmp_path: Path) -> None:
    """It has no scores of cases, so that the history alone tells."""
    make_run(tmp_path / "0", {}, 0.75)
    history = ["step,loss,val_dice", "3,0.5,", "3,,0.4", "5,,0.6"]
    (tmp_path / "0" / "history.csv").write_text("\n".join(history) + "\n", encoding="utf-8")
    rows = ["step,case,label,dice,picture", "3,a,left,0.9,", "5,a,left,0.8,"]
    (tmp_path / "0" / "validation.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    assert [score.step for score in read_run(tmp_path / "0", tmp_path).cases] == [5]


def test_differences_to_a_baseline_are_a_table(tmp_path: Path) -> None:
    for number, (lr, dice) in enumerate((("0.01", 0.9), ("0.02", 0.8))):
        make_run(tmp_path / str(number), {"optimizer.lr": lr}, dice)
    report(ReportConfig(str(tmp_path), None, 24))
    assert not (tmp_path / "differences.csv").exists()
    report(ReportConfig(str(tmp_path), None, 24, "0"))
    (row,) = read_csv(tmp_path / "differences.csv")
    assert (row["name"], row["cases"], row["worse"]) == ("lr 0.02", "3", "3")
    assert [float(row[key]) for key in ("difference", "ci95_low", "ci95_high")] == pytest.approx(
        [-0.1, -0.1, -0.1]
    )
    with pytest.raises(
        UserError, match=r"baseline=best: expected a finished run with validation\.csv \(0, 1\)"
    ):
        report(ReportConfig(str(tmp_path), None, 24, "best"))


def test_missing_and_damaged_files_leave_their_part_empty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.yaml").write_text("seed: 1\nstage: {name: coarse}\n")
    torn = tmp_path / "torn"
    torn.mkdir()
    (torn / "config.yaml").write_text("seed: [1\n")
    (torn / "summary.json").write_text('{"status": "fin')
    (torn / "history.csv").write_text("step,loss,lr,val_dice\n1,0.5,,\n2,0.4,,0.7\n3,0.")
    (torn / "pictures").mkdir()
    (torn / "pictures" / "step_000002_0.png").write_bytes(b"")
    (torn / "pictures" / "notes_1.png").write_bytes(b"")
    runs = [read_run(folder, tmp_path) for folder in find_runs(tmp_path)]
    assert [(run.name, run.status) for run in runs] == [
        ("bare", "unfinished"),
        ("torn", "unfinished"),
    ]
    assert runs[0].settings == {"seed": 1, "stage.name": "coarse"}
    assert not runs[1].has_config
    assert runs[1].curve("loss") == [(1, 0.5), (2, 0.4), (3, 0.0)]
    assert [picture.path.name for picture in runs[1].pictures] == ["step_000002_0.png"]
    assert report(ReportConfig(str(tmp_path), None, 24)) == 0
    said = capsys.readouterr().err
    assert all(name in said for name in ("summary.json", "config.yaml", "step_000002_0.png"))


@pytest.mark.parametrize(
    ("recorded", "ended", "shown"),
    [
        ("running", "finished", "finished"),
        ("interrupted", "out_of_memory", "out_of_memory"),
        ("pruned", "interrupted", "pruned"),
        ("running", None, "running"),
    ],
)
def test_a_job_that_was_resumed_by_itself_has_the_end_of_its_run(
    recorded: str, ended: str | None, shown: str, tmp_path: Path
) -> None:
    run_dir = tmp_path / "0"
    Job(0, Status(recorded), "", {"seed": "1"}, "a").write(run_dir)
    if ended is not None:
        (run_dir / "summary.json").write_text(json.dumps({"status": ended, "message": "why"}))
    assert read_run(run_dir, tmp_path).status == shown
    (row,) = read_csv(compare(tmp_path))
    assert row["status"] == shown


def test_runs_are_found_outside_hidden_folders_and_other_runs(tmp_path: Path) -> None:
    for name in ("a/2", "a/10", "b", ".hidden/c", "b/inner", "scores"):
        (tmp_path / name).mkdir(parents=True)
        if name != "scores":
            (tmp_path / name / "config.yaml").touch()
    (tmp_path / "scores" / "summary.json").touch()
    assert [str(path.relative_to(tmp_path)) for path in find_runs(tmp_path)] == ["a/2", "a/10", "b"]
    assert find_runs(tmp_path / "b") == [tmp_path / "b"]


def test_a_raised_digit_in_the_name_of_a_folder_is_no_number(tmp_path: Path) -> None:
    run_dir = tmp_path / "1²3"
    run_dir.mkdir()
    (run_dir / "config.yaml").touch()
    assert find_runs(tmp_path) == [run_dir]


def test_importances_of_a_damaged_study_are_left_out(tmp_path: Path) -> None:
    importances = {"a": "x", "b": None, "c": [1], "d": 0.5, "e": float("nan"), "f": 10**400}
    study = {"objectives": {"val_dice": "maximize"}, "space": {}, "importances": importances}
    (tmp_path / "study.json").write_text(json.dumps(study), encoding="utf-8")
    study = read_study(tmp_path)
    assert study is not None
    assert study["importances"] == {"d": 0.5}


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such folder"):
        report(ReportConfig(str(tmp_path / "nowhere"), None, 24))
    with pytest.raises(UserError, match="no run lies below it"):
        report(ReportConfig(str(tmp_path), None, 24))


def test_values_that_mean_nothing_are_left_out(tmp_path: Path) -> None:
    for number, dice in enumerate((0.9, 0.8)):
        make_run(tmp_path / str(number), {"seed": str(number)}, dice)
    (tmp_path / "0" / "summary.json").write_text(
        '{"status": "finished", "train_s": 1'
        + "0" * 400
        + ', "val_dice_best": -1e308, "peak_gib": NaN}'
    )
    (tmp_path / "0" / "history.csv").write_text(
        "step,loss,val_dice\n1,1e308,0.5\ninf,0.2,nan\n2,0.1,0.4\n"
    )
    (tmp_path / "1" / "job.json").write_text('{"status": "finished", "overrides": ["seed=1"]}')
    (tmp_path / "study.json").write_text('{"objectives": {"speed": "maximize"}, "space": {}}')
    assert report(ReportConfig(str(tmp_path), None, 24)) == 0
    assert [line["val_dice"] for line in read_csv(tmp_path / "report.csv")] == ["0.4", "0.8"]


def test_a_configuration_of_very_many_keys_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "0", {"seed": "1"}, 0.9)
    (tmp_path / "0" / "config.yaml").write_text(
        "\n".join(f"key{number}: {number}" for number in range(MAX_KEYS + 1))
    )
    assert not read_run(tmp_path / "0", tmp_path).has_config
    assert "expected at most 1000 keys" in capsys.readouterr().err


def test_scores_of_older_runs_have_no_patient_and_others_are_shares(tmp_path: Path) -> None:
    path = tmp_path / "validation.csv"
    path.write_text(
        "step,case,label,dice,picture\n5,a,lung,0.5,x.png\n5,b,lung,1.01,\n5,c,lung,-0.01,\n"
        "5,,lung,0.5,\n5,d,,0.5,\n"
    )
    assert read_scores(path) == [CaseScore(5, "a", "lung", 0.5, "x.png", "")]
    path.write_text(
        "step,case,label,dice,picture,patient\n5,a,lung,1,,p\n5,b,lung,0,,\nnone,c,lung,0,,\n"
    )
    assert read_scores(path) == [
        CaseScore(5, "a", "lung", 1.0, "", "p"),
        CaseScore(5, "b", "lung", 0.0, "", ""),
    ]
