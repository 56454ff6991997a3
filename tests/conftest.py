"""Fixtures that several rooms share."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

# Tests are imported by path, not as packages: makers of volumes and networks with known answers are found here.
sys.path[:0] = [str(Path(__file__).parent / folder) for folder in ("cascade", "data", "io")]

# A job in the background of a script inherits a SIGINT that is ignored, and hands it on to what tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def shared_ct() -> Path:
    """Folder of real chest CTs beside the checkout (`table.csv`, one folder per case); skips where it is absent."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "ct"
    if not (folder / "table.csv").is_file():
        pytest.skip("no real CTs beside the checkout")
    return folder


@pytest.fixture
def fit(tmp_path: Path) -> Callable[..., Any]:
    """A function that trains as a worker does, on batches that are given, with nothing around it.

    Called as `fit(overrides, batches)`, optionally with Lightning's callbacks and a function that changes the module before;
    returns the trained module.
    """

    def run(
        overrides: Sequence[str],
        batches: Sequence[Any],
        callbacks: Sequence[Any] = (),
        change: Callable[[Any], Any] | None = None,
    ) -> Any:
        import hydra
        import torch

        from medseg.build.network import make_network
        from medseg.build.run import make_module, make_trainer
        from medseg.config.check import to_config
        from medseg.config.folder import conf_dir
        from medseg.config.schema import TrainConfig

        fixed = ["trainer.accelerator=cpu", "logger=none", f"run_dir='{tmp_path}'"]
        with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
            config = to_config(hydra.compose("train", [*fixed, *overrides]), TrainConfig)
        torch.manual_seed(config.seed)
        network = make_network(config)
        trainer = make_trainer(config, list(callbacks))
        module = make_module(config, network, {})
        if change is not None:
            change(module)
        trainer.fit(module, torch.utils.data.DataLoader(list(batches), batch_size=None))
        return module

    return run


@pytest.fixture(scope="session")
def tiny_table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Case table of four small scans: two blocks of air in a body, sizes and spacings all different; labels 1 and 2."""
    import numpy as np

    from medseg.geometry.grid import VoxelGrid
    from medseg.io.write import write_image, write_labels

    folder = tmp_path_factory.mktemp("tiny cases")
    rng = np.random.default_rng(0)
    lines = ["case,image,labels,patient,split"]
    for index, split in enumerate(("train", "train", "val", "test")):
        shape, spacing_mm = (14 + index, 24, 28 + index), (6.0, 4.0 + 0.1 * index, 4.5)
        labels = np.zeros(shape, dtype=np.uint8)
        labels[3:-3, 6:18, 16:24] = 1
        labels[4:-3, 6:17, 4:12] = 2
        # Denser to the left, so that the sides can be told apart.
        body_hu = np.broadcast_to(np.linspace(-100, 250, shape[2]), shape)
        image = np.where(labels > 0, -850, body_hu) + rng.normal(0, 20, shape)
        grid = VoxelGrid(shape, spacing_mm, (-50.0, -40.0, 10.0 * index))
        write_image(folder / f"c{index}.nii.gz", image.astype(np.int16), grid)
        write_labels(folder / f"l{index}.nii.gz", labels, grid)
        lines.append(f"case {index},c{index}.nii.gz,l{index}.nii.gz,p{index},{split}")
    (folder / "table.csv").write_text("\n".join(lines) + "\n")
    return folder / "table.csv"
