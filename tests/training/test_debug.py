"""Debug switches: off unless asked, said aloud when on, and each does what it says."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch

from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.runs import folder as runs
from medseg.runs.train_run import debug_switches, train_run
from medseg.training.assemble import make_data_module
from medseg.training.options import TrainConfig


def compose(*overrides: str) -> TrainConfig:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return to_config(hydra.compose("train", ["run_dir=none", *overrides]), TrainConfig)


def test_all_are_off_unless_asked() -> None:
    switches = debug_switches(compose().debug)
    assert set(switches) == set(vars(compose().debug))
    assert not any(switches.values())


@pytest.mark.parametrize("name", ["anomaly", "overfit", "fast", "profile", "profile_torch"])
def test_each_file_turns_on_one_and_no_more(name: str) -> None:
    config = compose(f"debug={name}", "experiment=ct_fine")
    assert [key for key, is_on in debug_switches(config.debug).items() if is_on] == [
        name if "profile" not in name else "profiler"
    ]
    assert config.steps == (2 if name == "fast" else 1800)


class InfiniteSlope(torch.nn.Module):
    """Zero, and so finite, with a gradient that is not."""

    def forward(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (0 * logits).sum().sqrt()


def test_anomaly_detection_stops_at_the_operation_that_made_a_nan(fit: Callable[..., Any]) -> None:
    settings = [
        "model.width=4",
        "model.depth=1",
        "model.blocks_per_level=[1,1]",
        "steps=1",
        "schedule=constant",
    ]
    batch = {
        "image": torch.randn(1, 1, 8, 8, 8),
        "target": torch.zeros(1, 8, 8, 8, dtype=torch.uint8),
        "region": torch.zeros(1, dtype=torch.int64),
        "number": [0],
    }

    def change(module: Any) -> None:
        module.loss = InfiniteSlope()

    trained = fit(settings, [batch], (), change)
    assert not all(math.isfinite(weight.sum()) for weight in trained.parameters())
    with pytest.raises(RuntimeError, match="returned nan values"):
        fit([*settings, "debug=anomaly"], [batch], (), change)
    assert not torch.is_anomaly_enabled()


def data_settings(table: Path) -> list[str]:
    return [
        f"data.cases='{table}'", f"data.cache='{table.parent / 'cache'}'", "data.num_workers=0",
        "spacing=isotropic_4mm",
        "trainer.accelerator=cpu", "logger=none",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["none", "overfit"])
def test_overfitting_sees_the_first_batch_again_and_again(name: str, tiny_table: Path) -> None:
    config = compose(
        *data_settings(tiny_table),
        f"debug={name}",
        "steps=3",
        "stage.batch_size=2",
        "stage.max_voxels=2000",
    )
    data = make_data_module(config)
    data.prepare_data()
    data.setup("fit")
    first, *others = [[stack["image"] for stack in batch] for batch in data.train_batches()]
    assert len(others) == 2
    for images in others:
        pairs = zip(images, first, strict=True)
        is_same = all(image.shape == other.shape and image.equal(other) for image, other in pairs)
        assert is_same == (name == "overfit")


def test_a_fast_run_goes_through_everything_in_two_steps_and_says_so(
    tiny_table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "table.csv"
    header, *tiny_rows = csv.reader(tiny_table.read_text().splitlines())
    rows = []
    for number, (case, *files, patient, _) in enumerate(tiny_rows):
        paths = [str(tiny_table.parent / file) for file in files]
        # The first two cases are for training, the other two for validation.
        split = "train" if number < 2 else "val"
        rows.append([case, *paths, patient, split])
    with table.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    run_dir = tmp_path / "run"
    settings = [
        "debug=fast",
        "debug.profiler=simple",
        "model.width=4",
        "stage.validate_every=1",
        f"run_dir='{run_dir}'",
    ]
    config = compose(*data_settings(tiny_table), f"data.cases='{table}'", *settings)
    runs.open_run(config)
    summary = train_run(config)
    assert (summary["steps"], summary["status"]) == (2, "finished")
    printed = capsys.readouterr().err
    assert "debug.fast is on: this run is for finding faults, not for results" in printed
    assert "debug.profiler is on" in printed
    assert "debug.anomaly" not in printed
    with (run_dir / "history.csv").open(newline="") as file:
        assert {row["step"] for row in csv.DictReader(file)} == {"1", "2"}
    assert len(list((run_dir / "pictures").glob("step_000002_*.png"))) == 1, "one of the two cases"
    times = (run_dir / "fit-profile.txt").read_text()
    for action in ("run_training_batch", "optimizer_step", "train_dataloader_next"):
        assert action in times
