"""Import contracts between the packages, and what prediction may not import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_import_contracts_hold() -> None:
    result = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        encoding="utf-8",
    )
    assert result.returncode == 0, result.stdout + result.stderr


def loaded_modules(statement: str) -> set[str]:
    code = (
        f"{statement}\nimport sys\nprint(' '.join(sorted({{name.split('.')[0] for name in "
        f"sys.modules}})))"
    )
    return set(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True
        ).stdout.split()
    )


@pytest.mark.slow
def test_prediction_loads_neither_lightning_nor_monai_nor_the_compiler() -> None:
    """Torch would import its compiler by itself, with sympy: a second and a tenth of a gigabyte."""
    load = "load_stage(shipped_weights('lungs', 'coarse'), 'coarse', torch.device('cpu'))"
    network = f"import torch; {load}.predict_probs(torch.zeros(1, 32, 32, 32), InferenceOptions())"
    imports = (
        "import medseg.commands.predict, medseg.cascade.cascade, medseg.io.read, medseg.io.write"
    )
    imports += (
        "; from medseg.cascade.load import load_stage; from medseg.weights.files import "
        "shipped_weights"
    )
    loaded = loaded_modules(
        f"{imports}; from medseg.cascade.stage import InferenceOptions; {network}"
    )
    assert "torch" in loaded
    assert not loaded & {
        "lightning",
        "pytorch_lightning",
        "monai",
        "matplotlib",
        "SimpleITK",
        "torchmetrics",
        "sympy",
    }


@pytest.mark.slow
def test_a_model_of_nnunet_is_loaded_and_forecast_without_the_compiler() -> None:
    pytest.importorskip("dynamic_network_architectures")
    folder = ROOT / "tests" / "nnunet" / "recorded" / "folds.zip"
    loaded = loaded_modules(
        "import torch\n"
        "from pathlib import Path\n"
        "from medseg.inference.options import InferenceOptions\n"
        "from medseg.nnunet.model import load_nnunet\n"
        f"path = Path({str(folder)!r})\n"
        "model = load_nnunet(path, None, torch.device('cpu'), InferenceOptions())\n"
        "assert model.usual_pass_bytes > 0\n"
        "slabs = model.within(1.5 * model.least_slab_bytes / 2**30)\n"
        "assert slabs.usual_pass_bytes < model.usual_pass_bytes"
    )
    assert "torch" in loaded
    assert not loaded & {"lightning", "monai", "matplotlib", "SimpleITK", "sympy"}


def test_the_command_line_is_checked_without_torch() -> None:
    refused = (
        "import contextlib, sys\nsys.argv = ['predict', 'inputs=x']\n"
        "from medseg.commands.entry import run_command"
    )
    run = f"{refused}\nwith contextlib.suppress(SystemExit):\n    run_command('predict')"
    for statement in ("import medseg.commands.train, medseg.config.check", run):
        assert "torch" not in loaded_modules(statement)


def test_every_package_init_only_has_its_docstring() -> None:
    for path in (ROOT / "medseg").glob("*/**/__init__.py"):
        assert path.read_text().count("\n") == 1, f"{path} imports: start-up time"
