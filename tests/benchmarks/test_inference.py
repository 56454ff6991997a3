"""Inference benchmark: parts are scaled to the whole, our row is the whole command, and baselines are counted as their programs count."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from ast import literal_eval
from pathlib import Path

import pytest

from benchmarks import inference as app
from benchmarks.inference import num_tiles
from medseg.errors import UserError
from medseg.io.write import write_image
from medseg.phantom.scan import make_phantom
from medseg.phantom.spec import PhantomSpec

ROOT = Path(__file__).parents[2]


def test_a_part_is_scaled_and_the_rest_counted_once() -> None:
    row = {"contender": "them", "wall_s": 7.0, "cpu_s": 9.0, "peak_gb": 2.0, "measured": "all"}
    scaled = app.scaled(row, part_s=4.0, part_cpu_s=6.0, share=0.25, measured="1 of 4")
    assert scaled == row | {"wall_s": 3.0 + 4 * 4.0, "cpu_s": 3.0 + 4 * 6.0, "measured": "1 of 4"}
    assert app.scaled(row, part_s=4.0, part_cpu_s=6.0, share=1.0, measured="all") == row


def test_the_tables_hold_ratios_to_the_first_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(name: str, arguments: list[str], threads: int, packages: Path | None = None) -> tuple[app.Row, str]:
        if packages is None:
            return {"contender": "us, here", "wall_s": 2.0, "cpu_s": 4.0, "peak_gb": 1.25, "measured": "all"}, ""
        answer = {"part_s": 1.0, "part_cpu_s": 2.0, "share": 0.5, "measured": "1 of 2 tiles"}
        return {"contender": name, "wall_s": 49.0, "cpu_s": 88.0, "peak_gb": 3.0, "measured": "all"}, "a warning\n" + json.dumps(
            answer
        )

    monkeypatch.setattr(app, "measure", measure)
    monkeypatch.setattr(app, "install_baselines", lambda folder: folder)
    monkeypatch.setattr(app, "BASELINES", {"them": "them"})
    (tmp_path / "ct.nii.gz").touch()
    app.run_benchmark(app.Options(str(tmp_path), str(tmp_path / "ct.nii.gz")))
    assert (tmp_path / "bench.csv").read_text(encoding="utf-8").splitlines() == [
        "contender,wall_s,cpu_s,peak_gb,wall_ratio,cpu_ratio,measured",
        '"us, here",2.0,4.0,1.25,1.0,1.0,all',
        "them,50.0,90.0,3.00,25.0,22.5,1 of 2 tiles",
    ]
    assert "| them | 50.0 | 90.0 | 3.00 | 25.0 | 22.5 | 1 of 2 tiles |" in (tmp_path / "bench.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("argument", ["inputs=ct.nii.gz", "threads=two", "--help"])
def test_a_wrong_key_or_value_is_refused_with_the_keys(
    argument: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["inference.py", argument])
    with pytest.raises(SystemExit) as end:
        app.main()
    assert end.value.code == 2
    assert "the keys and their defaults are output=bench_inference input=None threads=2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shape", "number"), [((128, 128, 128), 1), ((60, 128, 129), 2), ((300, 384, 384), 4 * 5 * 5), ((192, 193, 256), 2 * 3 * 3)]
)
def test_tiles_are_counted_as_nnunet_does(shape: tuple[int, int, int], number: int) -> None:
    assert num_tiles(shape, (128, 128, 128)) == number


# The measured peak includes that of the process that starts the command. A test worker may hold gigabytes, so a small process starts it.
MEASURE = """
from benchmarks.inference import measure
print(measure("us", ["-c", "import time; block = b'1' * 2**29; time.sleep(0.3); sum(range(10**7)); print('done')"], threads=1))
"""


@pytest.mark.slow
def test_a_process_is_measured_by_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", MEASURE], cwd=ROOT, capture_output=True, encoding="utf-8", check=True)
    row, printed = literal_eval(done.stdout.splitlines()[-1])
    assert row["wall_s"] > 0.3
    assert row["cpu_s"] > 0
    assert 2**29 / 1e9 < row["peak_gb"] < 1.5
    assert printed == "done\n"
    with pytest.raises(UserError, match=r"us could not be measured \(exit code 3\)"):
        app.measure("us", ["-c", "raise SystemExit(3)"], threads=1)


@pytest.mark.slow
def test_the_command_measures_medseg_from_file_to_file(tmp_path: Path) -> None:
    phantom = make_phantom(PhantomSpec(seed=5, index=0, spacing_mm=(8.0, 4.0, 4.0), matrix=(90, 90), num_vessel_ends=50))
    write_image(tmp_path / "Thorax (1).nii.gz", phantom.image_hu, phantom.grid)
    command = [sys.executable, app.__file__, "input=Thorax (1).nii.gz", "output=a=b", "peers=false"]
    for _ in range(2):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8")
        assert done.returncode == 0, done.stderr
        with (tmp_path / "a=b" / "bench.csv").open() as file:
            (row,) = csv.DictReader(file)
        assert float(row["wall_s"]) > 1.0, "it is not skipped the second time, and starting counts"
        assert (tmp_path / "a=b" / "lungs.nii.gz").is_file()
        assert (tmp_path / "a=b" / "bench.md").read_text() in done.stdout
