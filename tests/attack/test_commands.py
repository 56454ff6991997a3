"""Malformed scans given to the commands: the stated exit code and one sentence, no traceback."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from attack_tools import run
from test_dicom import _bomb_attacks, _field_attacks, _folder_attacks
from test_nifti import _field_attacks as _nifti_attacks
from test_nifti import _file_attacks, _stream_attacks

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "attacks",
    [
        _nifti_attacks,
        _stream_attacks,
        _file_attacks,
        _field_attacks,
        _bomb_attacks,
        _folder_attacks,
    ],
)
@pytest.mark.parametrize("command", ["predict", "prepare"])
def test_a_malformed_scan_ends_a_command_with_one_line(
    attacks, command: str, tmp_path: Path
) -> None:
    (tmp_path / "scans").mkdir()
    refused = [
        attack
        for attack in itertools.islice(attacks(tmp_path / "scans"), 30)
        if attack.values is None and not attack.series
    ]
    # The generator may write the next input over an earlier one.
    attack = next(one for one in refused if run(one)[0] == "" and "\0" not in str(one.path))
    given = [f"input='{attack.path}'", f"output='{tmp_path / 'out.nii.gz'}'"]
    if command == "prepare":
        table = tmp_path / "cases.csv"
        table.write_text(
            f'case,image,labels\na,"{attack.path}","{attack.path}"\n', encoding="utf-8"
        )
        given = [f"data.cases='{table}'", f"data.cache='{tmp_path / 'cache'}'"]
    script = [sys.executable, str(ROOT / "scripts" / f"{command}.py"), *given]
    result = subprocess.run(
        script,
        cwd=tmp_path,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=120,
        check=False,
    )
    assert result.returncode == (2 if command == "predict" else 1), result.stderr
    assert "Traceback" not in result.stderr
    # The sentence; then the number of failed cases, unless the command refused its input before it
    # looked for cases.
    assert [line.partition(":")[0] for line in result.stderr.splitlines()] in (
        ["medseg"],
        ["medseg"] * 2,
    ), result.stderr
