"""What ends a worker becomes a status; the record of a job is found again by the same job alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from medseg.errors import NotFiniteError, UserError
from medseg.runs.status import Status, end_of, exit_code_of, status_of
from medseg.runs.sweeps import SWEEP_FILE, Job, compare, find_job, read_jobs


def raised(action: object) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        action()  # type: ignore[operator]
    return caught.value


@pytest.mark.parametrize(
    ("error", "status"),
    [
        pytest.param(raised(lambda: torch.empty(10**15)), Status.out_of_memory, id="torch on the host"),
        pytest.param(raised(lambda: np.empty(10**15)), Status.out_of_memory, id="numpy"),
        pytest.param(torch.OutOfMemoryError("CUDA out of memory."), Status.out_of_memory, id="GPU"),
        pytest.param(RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed. "), Status.out_of_memory, id="loader"),
        pytest.param(RuntimeError("shapes differ"), Status.failed, id="defect"),
        pytest.param(NotFiniteError("NaN"), Status.not_finite, id="NaN"),
        pytest.param(UserError("no such file"), Status.refused, id="mistake"),
        pytest.param(KeyboardInterrupt(), Status.interrupted, id="Ctrl-C"),
    ],
)
def test_an_error_has_its_status(error: BaseException, status: Status) -> None:
    assert status_of(end_of(error)[0]) is status


def test_exit_codes_carry_each_end() -> None:
    ends = set(Status) - {Status.running, Status.pruned}  # with these no worker ends by itself
    assert {status_of(exit_code_of(status)) for status in ends} == ends
    assert [status_of(code) for code in (-9, -15, -11)] == [Status.out_of_memory, Status.interrupted, Status.failed]


def job(number: int, signature: str, **overrides: str) -> Job:
    return Job(number, Status.finished, "", overrides, signature)


def test_a_job_is_found_by_its_signature_and_what_is_swept(tmp_path: Path) -> None:
    (tmp_path / SWEEP_FILE).write_text(json.dumps({"overrides": [], "swept": ["seed", "memory.accumulate"]}))
    first = job(0, "a", seed="1", steps="2", **{"memory.accumulate": "1"})
    first.write(tmp_path / "0")
    assert read_jobs(tmp_path) == {tmp_path / "0": first}
    assert find_job(tmp_path, job(5, "a", seed="1", **{"memory.accumulate": "1", "data.num_workers": "4"})) == tmp_path / "0"
    assert find_job(tmp_path, job(0, "a", seed="1", **{"memory.accumulate": "2"})) is None, (
        "compared, though it changes no result"
    )
    assert find_job(tmp_path, job(0, "b", seed="1", **{"memory.accumulate": "1"})) is None


def test_the_table_has_a_line_per_job_in_order(tmp_path: Path) -> None:
    for number in (10, 9):
        job(number, "a", seed=str(number), steps="2").write(tmp_path / str(number))
    (tmp_path / "9" / "summary.json").write_text(json.dumps({"val_dice_best": 0.5, "versions": {}}))
    lines = compare(tmp_path).read_text().splitlines()
    assert lines == ["run,seed,val_dice_best,status,message", "9,9,0.5,finished,", "10,10,,finished,"]


def test_a_sweep_over_what_names_its_folder_stays_in_one(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "medseg.commands.cli", "train", "-m", "stage=coarse,fine", "data.cases=none.csv"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8", check=False)
    assert result.returncode == 1
    (sweep_dir,) = (tmp_path / "runs").glob("*/*")
    assert [job.status for job in read_jobs(sweep_dir).values()] == [Status.refused] * 2
    assert json.loads((sweep_dir / SWEEP_FILE).read_text())["swept"] == ["stage"]
