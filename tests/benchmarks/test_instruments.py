"""Arguments of the benchmarks: a missing or an unknown one is named before any work."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.instruments import given_arguments
from medseg.errors import EXIT_USER_ERROR


@pytest.mark.parametrize("arguments", [[], ["cases=a.csv"], ["output=out"], ["other=1"]])
def test_a_missing_or_unknown_argument_ends_the_command(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["rules.py", *arguments])
    with pytest.raises(SystemExit) as stop:
        given_arguments(["fine"], required=["cases"])
    assert stop.value.code == EXIT_USER_ERROR
    message = capsys.readouterr().err
    assert "rules.py: expected output=<folder> cases=…, and optionally fine=…" in message
    assert not list(tmp_path.iterdir())


def test_the_output_folder_is_made_and_the_other_values_are_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "a" / "b"
    monkeypatch.setattr("sys.argv", ["rules.py", "cases=a.csv", f"output={output}"])
    assert given_arguments(["fine"], required=["cases"]) == (output, {"cases": "a.csv"})
    assert output.is_dir()
