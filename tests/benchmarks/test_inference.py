"""Inference benchmark: scaling of parts, our whole command, and how baselines are counted."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import inference as app
from benchmarks.inference import num_tiles
from medseg.errors import UserError
from medseg.geometry.grid import VoxelGrid
from medseg.io.write import write_image
from medseg.phantom.scan import make_phantom
from medseg.phantom.spec import PhantomSpec


def test_a_part_is_scaled_and_the_rest_counted_once() -> None:
    row = {"contender": "them", "wall_s": 7.0, "cpu_s": 9.0, "peak_gb": 2.0, "measured": "all"}
    scaled = app.scaled(
        row,
        part_s=4.0,
        part_cpu_s=6.0,
        share=0.25,
        measured="1 of 4",
        precision="bf16",
        title="slow",
    )
    expected = {
        "contender": "them, slow",
        "wall_s": 3.0 + 4 * 4.0,
        "cpu_s": 3.0 + 4 * 6.0,
        "measured": "1 of 4",
        "precision": "bf16",
    }
    assert scaled == row | expected
    whole = app.scaled(row, part_s=4.0, part_cpu_s=6.0, share=1.0, measured="all", precision="fp32")
    assert whole == row | {"precision": "fp32"}


def test_a_row_that_was_scaled_says_which_part_was_timed_and_how_much_it_varied() -> None:
    ways = [app.Way(800, "passes, 8 a tile", "mirrored"), app.Way(100, "passes, 1 a tile")]
    part = app.Part([lambda: None] * 8, ways)
    mirrored, plain = (app.describe_part(part, way, 5.0, [1.0] * 6 + [0.5, 2.0]) for way in ways)
    assert mirrored == {
        "part_s": 5.0,
        "part_cpu_s": 8.5,
        "share": 0.01,
        "measured": "8 of 800 passes, 8 a tile, 0.5 to 2.0 CPU s each",
        "precision": "fp32",
        "title": "mirrored",
    }
    assert (plain["share"], plain["measured"]) == (
        0.08,
        "8 of 100 passes, 1 a tile, 0.5 to 2.0 CPU s each",
    )
    batches = app.Part([lambda: None] * 3, [app.Way(300, "slices")], 20, "a batch of 20")
    described = app.describe_part(batches, batches.ways[0], 5.0, [3.0, 2.0, 4.0])
    assert (described["share"], described["measured"]) == (
        0.2,
        "60 of 300 slices, 2.0 to 4.0 CPU s a batch of 20",
    )
    whole = app.Part([lambda: None], [app.Way(1, "")])
    assert app.describe_part(whole, whole.ways[0], 3.0, [4.0])["measured"] == "all"


def test_a_small_scan_is_charged_with_the_passes_that_it_takes() -> None:
    row = {"contender": "nnU-Net", "wall_s": 10.0, "cpu_s": 10.0}
    plain = app.Way(1, "passes, 1 a tile", "plain")
    part = app.Part([lambda: None] * 8, [plain])
    described = app.describe_part(part, plain, 8.0, [1.0] * 8)
    assert described["measured"] == "all, 1.0 to 1.0 CPU s each"
    scaled = app.scaled(row, **described)
    # Eight passes of a second were timed beside two seconds of other work; one pass is needed.
    assert (scaled["wall_s"], scaled["cpu_s"]) == (3.0, 3.0)


def test_monai_gets_every_channel_of_our_fine_network(monkeypatch: pytest.MonkeyPatch) -> None:
    logits: list[torch.Tensor] = []

    def infer(
        channels: torch.Tensor,
        patch: list[int],
        batch_size: int,
        network: Callable[[torch.Tensor], torch.Tensor],
        **_: str,
    ) -> None:
        assert channels.shape[2:] == (32, 32, 48)
        assert len(patch) == 3
        assert batch_size == 1
        logits.append(network(channels))

    monkeypatch.setattr("monai.inferers.sliding_window_inference", infer)
    shape = (32, 32, 48)
    part = app.monai(np.zeros(shape, dtype=np.float32), VoxelGrid(shape, app.ONE_MM))
    with torch.inference_mode():
        part.runs[0]()
    assert logits[0].shape[2:] == (32, 32, 48)


def test_nnunet_is_timed_on_the_eight_mirrored_passes_of_a_tile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passes: list[torch.Size] = []

    class Network(torch.nn.Module):
        def forward(self, tile: torch.Tensor) -> torch.Tensor:
            passes.append(tile.shape)
            return tile

    monkeypatch.setattr(app, "NNUNET_PATCH", (2, 2, 4))
    monkeypatch.setattr(app, "make_baseline", lambda *_: Network())
    part = app.nnunet(np.zeros((3, 2, 2)), VoxelGrid((3, 2, 2), (1.0, 1.0, 1.0)))
    for run in part.runs:
        run()
    assert passes == [(1, 1, 2, 2, 4)] * 8
    assert len(set(app.NNUNET_MIRRORS)) == 8
    mirrored, plain = part.ways
    assert (mirrored.num_passes, mirrored.title) == (16, "mirrored as by default")
    assert (plain.num_passes, plain.title) == (2, "without mirroring")


def test_the_tables_hold_ratios_to_the_first_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(
        name: str, arguments: list[str], threads: int, packages: Path | None = None
    ) -> tuple[app.Row, str]:
        if packages is None:
            return {
                "contender": "us, here",
                "wall_s": 2.0,
                "cpu_s": 4.0,
                "peak_gb": 1.25,
                "measured": "all",
            }, ""
        answer = [
            {
                "part_s": 1.0,
                "part_cpu_s": 2.0,
                "share": 0.5,
                "measured": "1 of 2 tiles",
                "precision": "fp32",
            }
        ]
        return {
            "contender": name,
            "wall_s": 49.0,
            "cpu_s": 88.0,
            "peak_gb": 3.0,
            "measured": "all",
        }, "a warning\n" + json.dumps(answer)

    monkeypatch.setattr(app, "measure", measure)
    monkeypatch.setattr(app, "inference_precision", lambda *_: "bf16")
    monkeypatch.setattr(app, "install_baselines", lambda folder: folder)
    monkeypatch.setattr(app, "BASELINES", {"them": "them"})
    (tmp_path / "ct.nii.gz").touch()
    app.run_benchmark(app.Options(str(tmp_path), str(tmp_path / "ct.nii.gz")))
    assert (tmp_path / "bench.csv").read_text(encoding="utf-8").splitlines() == [
        "contender,wall_s,cpu_s,peak_gb,wall_ratio,cpu_ratio,measured",
        '"us, here",2.0,4.0,1.25,1.0,1.0,all',
        "them,50.0,90.0,3.00,25.0,22.5,1 of 2 tiles",
    ]
    heading, _, ours, theirs = (tmp_path / "bench.md").read_text(encoding="utf-8").splitlines()
    assert heading.startswith("|  | precision | wall s | CPU s |")
    assert ours == "| us, here | bf16 | 2.0 | 4.0 | 1.25 | 1.0 | 1.0 | all |"
    assert theirs == "| them | fp32 | 50.0 | 90.0 | 3.00 | 25.0 | 22.5 | 1 of 2 tiles |"


@pytest.mark.parametrize("argument", ["inputs=ct.nii.gz", "threads=two", "--help"])
def test_a_wrong_key_or_value_is_refused_with_the_keys(
    argument: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["inference.py", argument])
    with pytest.raises(SystemExit) as end:
        app.main()
    assert end.value.code == 2
    assert (
        "the keys and their defaults are output=bench_inference input=None threads=2"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("shape", "number"),
    [
        ((128, 128, 128), 1),
        ((60, 128, 129), 2),
        ((300, 384, 384), 4 * 5 * 5),
        ((192, 193, 256), 2 * 3 * 3),
    ],
)
def test_tiles_are_counted_as_nnunet_does(shape: tuple[int, int, int], number: int) -> None:
    assert num_tiles(shape, (128, 128, 128)) == number


SLOW_AND_LARGE = (
    "import time; block = b'1' * 2**28; time.sleep(0.3); sum(range(10**7)); print('done')"
)


def test_a_process_is_measured_by_the_system_without_the_memory_of_this_one() -> None:
    row, printed = app.measure("us", ["-I", "-c", SLOW_AND_LARGE], threads=1)
    assert row["wall_s"] > 0.3
    assert row["cpu_s"] > 0
    assert 2**28 / 1e9 < row["peak_gb"] < 2**28 / 1e9 + 0.1
    assert printed == "done\n"
    block = b"1" * 2**29
    row, _ = app.measure("us", ["-I", "-c", ""], threads=1)
    assert row["peak_gb"] < len(block) / 1e9 / 2
    with pytest.raises(UserError, match=r"us could not be measured \(exit code 3\)"):
        app.measure("us", ["-I", "-c", "raise SystemExit(3)"], threads=1)


@pytest.mark.slow
def test_the_command_measures_medseg_from_file_to_file(tmp_path: Path) -> None:
    phantom = make_phantom(
        PhantomSpec(seed=5, index=0, spacing_mm=(8.0, 4.0, 4.0), matrix=(90, 90))
    )
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
