"""The wheel, installed elsewhere, carries its configuration and runs outside the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from medseg.io.read import read_labels

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_installed_wheel_runs_outside_the_checkout(
    trained: tuple[Path, Path], tiny_table: Path, tmp_path: Path
) -> None:
    build = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(tmp_path / "dist"),
        str(ROOT),
    ]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    site = tmp_path / "site"
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--target",
        str(site),
        str(wheel),
    ]
    subprocess.run(install, check=True, capture_output=True)

    def medseg(*arguments: str) -> subprocess.CompletedProcess[str]:
        # Before the site-packages, where the checkout is linked.
        environment = {**os.environ, "PYTHONPATH": str(site)}
        command = [sys.executable, str(site / "bin" / "medseg"), *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8"
        )

    place = subprocess.run(
        [sys.executable, "-c", "import medseg; print(medseg.__file__)"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    assert Path(place.stdout.strip()).is_relative_to(site)

    result = medseg("train", "--cfg", "job")
    assert result.returncode == 0, result.stderr
    assert "target_spacing_mm" in result.stdout
    scan = tiny_table.parent / "c3.nii.gz"
    result = medseg(
        "predict", f"input={scan}", "output=o.nii.gz", f"coarse={trained[0]}", f"fine={trained[1]}"
    )
    assert result.returncode == 0, result.stderr
    assert set(read_labels(tmp_path / "o.nii.gz").array.ravel()) == {0, 1, 2}
