"""GPU report: one sentence without a GPU; with one, every part runs into one file."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import forked
import hydra
import pytest
import torch

from benchmarks import gpu as app
from medseg.conf_folder import conf_dir
from medseg.studies.recipes import compose_train

CSV = """\
row,arguments,precision,checkpointing,saved_bytes_per_voxel,peak_mib,parameters_mib,\
seconds_per_step,device,peak_allocated_mib,dice,train_s
fp32,memory.precision=fp32,fp32,none,288.8,1000.0,5.0,0.5,a GPU,1010.0,,
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_is_said_in_one_sentence(tmp_path: Path) -> None:
    done = forked.run([sys.executable, app.__file__], cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        (
            "medseg: make gpu: torch sees no NVIDIA GPU on this machine; run it on a machine with "
            "one, with a CUDA build of torch"
        )
    ]
    assert not list(tmp_path.iterdir())


def test_a_failed_part_is_named_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **_: object) -> SimpleNamespace:
        is_plan = "ladder" in command and "peers=true" not in command
        if is_plan:
            (tmp_path / "plan").mkdir()
            (tmp_path / "plan" / "ladder.csv").write_text(CSV)
        return SimpleNamespace(
            stdout="some\n5 passed, 1 failed\n", returncode=1 if "pytest" in command else 0
        )

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(app.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["gpu.py", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        app.main()
    assert end.value.code == 1
    text = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    assert "## Tests (exit code 1)\n\n5 passed, 1 failed\n" in text
    assert "| fp32 | fp32 | none | 288.8 | 1000.0 | 1010.0 | 1.010 | 0.5 | a GPU |" in text
    assert "## Inference\n\nsome" in text


def test_all_twelve_configurations_compose() -> None:
    assert len(app.CONFIGURATIONS) == 12
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        for name, arguments in app.CONFIGURATIONS.items():
            if "trainer.accelerator=gpu" not in arguments:
                compose_train(["stage=fine", *arguments, "run_dir=none"], name)
