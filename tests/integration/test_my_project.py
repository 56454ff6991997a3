"""The plugin of `examples/` is trained, planned and predicted with beside an installed medseg."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from medseg.io.read import read_labels

ROOT = Path(__file__).resolve().parents[2]
TRUST = "trusted_targets=[my_project.]"

Medseg = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def medseg(tmp_path_factory: pytest.TempPathFactory) -> Medseg:
    """The command of a medseg installed from its wheel, like the plugin, outside the repository."""
    folder = tmp_path_factory.mktemp("elsewhere")
    shutil.copytree(ROOT / "examples" / "my_project", folder / "source")
    for source in (ROOT, folder / "source"):
        build = [
            sys.executable,
            "-m",
            "build",
            "--wheel",
            "--no-isolation",
            "--outdir",
            str(folder / "dist"),
            str(source),
        ]
        subprocess.run(build, check=True, capture_output=True)
    wheels = list(map(str, (folder / "dist").glob("*.whl")))
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--target",
        str(folder / "site"),
        *wheels,
    ]
    subprocess.run(install, check=True, capture_output=True)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        # Before the site-packages, where the checkout is linked.
        environment = {**os.environ, "PYTHONPATH": str(folder / "site")}
        command = [sys.executable, str(folder / "site" / "bin" / "medseg"), *arguments]
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, encoding="utf-8"
        )

    return run


def small(table: Path) -> list[str]:
    return [
        "hydra.searchpath=[pkg://my_project.conf]", "experiment=two_scales", f"data.cases={table}",
        f"data.cache={table.parent / 'cache'}",
        "data.num_workers=0", "logger=none", "trainer.accelerator=cpu", "trainer.threads=1",
        "spacing=isotropic_4mm",
        "schedule=constant", "optimizer.lr=0.01", "stage.validate_every=4",
    ]  # fmt: skip


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(
        run_dir / "checkpoints" / "last.ckpt", weights_only=True
    )["state_dict"]
    return state


@pytest.mark.slow
def test_the_plugin_works_from_outside_the_repository(
    medseg: Medseg, tiny_table: Path, trained: tuple[Path, Path], tmp_path: Path
) -> None:
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    for folder, steps in ((whole, 6), (run_dir, 4)):
        result = medseg("train", *small(tiny_table), f"steps={steps}", f"hydra.run.dir={folder}")
        assert result.returncode == 0, result.stderr

    refused = medseg("train", f"resume={run_dir}", "steps=6")
    assert refused.returncode == 2
    assert "add trusted_targets=[my_project.]" in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1
    resumed = medseg("train", f"resume={run_dir}", "steps=6", TRUST)
    assert resumed.returncode == 0, resumed.stderr
    one, other = weights(whole), weights(run_dir)
    assert all(torch.equal(one[key], other[key]) for key in one)

    planned = medseg("plan", *small(tiny_table), "shape=[32,32,32]")
    assert planned.returncode == 0, planned.stderr
    assert "peak of the step" in planned.stdout

    predict = [
        "predict", f"input={tiny_table.parent / 'c3.nii.gz'}", f"output={tmp_path / 'o.nii.gz'}",
        f"coarse={run_dir / 'checkpoints' / 'last.ckpt'}", f"fine={trained[1]}",
    ]  # fmt: skip
    refused = medseg(*predict)
    assert refused.returncode == 2
    assert "add trusted_targets=[my_project.]" in refused.stderr
    assert not (tmp_path / "o.nii.gz").exists()
    predicted = medseg(*predict, TRUST)
    assert predicted.returncode == 0, predicted.stderr
    assert read_labels(tmp_path / "o.nii.gz").array.max() <= 2


@pytest.mark.slow
def test_the_plugin_is_refused_where_nobody_trusts_it(
    medseg: Medseg, tiny_table: Path, tmp_path: Path
) -> None:
    result = medseg(
        "train", *small(tiny_table), "trusted_targets=[]", f"hydra.run.dir={tmp_path / 'run'}"
    )
    assert result.returncode == 2
    assert "my_project.parts.TwoScales is not on the white list" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()
