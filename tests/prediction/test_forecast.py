"""Forecast: bytes computed by hand, the bound on the memory, and seconds by earlier cases."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from oracle import GRID, CoarseOracle, FineOracle, stage

from medseg.cascade.cascade import Cascade
from medseg.geometry.grid import VoxelGrid
from medseg.io.write import write_image
from medseg.prediction import batch, memory_limit
from medseg.prediction import forecast as forecast_module
from medseg.prediction.case import read_scan
from medseg.prediction.forecast import (
    FIRST_SCAN_BYTES,
    Forecast,
    Rate,
    forecast,
    forecast_text,
    known_rate,
    machine_key,
    note_rate,
    rate_of,
)
from medseg.prediction.memory_limit import share_memory
from medseg.preprocess.scale import AS_STORED
from medseg.task import Channel

MIB = 2**20
CHEST = VoxelGrid((300, 512, 512), (1.0, 0.8, 0.8))


@pytest.fixture(autouse=True)
def one_thread_with_a_plain_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)


@pytest.fixture
def cascade() -> Cascade:
    fine = stage(FineOracle(), "fine", bytes_per_voxel=35.0, tile_size=(128, 160, 160))
    return Cascade(stage(CoarseOracle(), "coarse", bytes_per_voxel=40.0), fine)


def test_scan_labels_and_crops_are_counted_by_hand(cascade: Cascade) -> None:
    slab = 24 * 2**18
    expected = forecast(cascade, CHEST, 300 * MIB)
    fixed, voxels = 300 * MIB + FIRST_SCAN_BYTES + 2 * 300 * 512 * 512, 300 * 512 * 512
    assert expected.memory["read"] == fixed
    # 300 x 409.6 x 409.6 mm at 2 mm; 0.8 of the height is body, padded to multiples of 8 voxels.
    lattice, body, padded = 4 * 150 * 205 * 205, 150 * 164 * 205, 152 * 168 * 208
    network = 0.75 / 2.5 * 40 * padded
    assert expected.memory["localise"] == fixed + lattice + round(4 * body + 4 * padded + network)
    # Regions of 270 x 200 x 160 mm at 1 mm, in tiles.
    crop, tile = 270 * 200 * 160, 128 * 160 * 160
    layer = 4 * 2 * 128 * 200 * 160
    refine = (
        fixed
        + slab
        + round(4 * crop + 2 * 2 * crop + 0.75 / 2.5 * 35 * tile + 2 * layer + 4 * 2 * tile)
    )
    assert expected.memory["refine_left_lung"] == refine
    assert expected.memory["refine_right_lung"] == refine + 2 * crop
    joined = fixed + 2 * 2 * crop + 0.9 * voxels + 18 * MIB
    assert expected.memory["join"] == pytest.approx(joined, abs=100)
    assert expected.peak_bytes == max(expected.memory.values())
    # With an overlap of half, 4 x 2 x 1 tiles for each side. A voxel of a network counts five time
    # units.
    assert expected.time_units == voxels + 5 * (padded + 2 * 4 * 2 * 1 * tile)


def test_a_wide_field_of_view_has_no_larger_body(cascade: Cascade) -> None:
    wide = replace(CHEST, spacing_mm=(1.0, 1.4, 1.4))
    alone = Cascade(replace(cascade.coarse, task=replace(cascade.coarse.task, regions=())))
    # 360 x 480 mm at 2 mm, padded to multiples of 8 voxels.
    assert forecast(alone, wide, 0).time_units == math.prod(CHEST.shape) + 5 * 152 * 184 * 240


def test_further_threads_keep_heaps_of_their_own(
    cascade: Cascade, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = forecast(cascade, CHEST, 300 * MIB).memory["read"]
    monkeypatch.setattr("torch.get_num_threads", lambda: 3)
    assert forecast(cascade, CHEST, 300 * MIB).memory["read"] == alone + 2 * 64 * MIB


def test_arrays_in_files_do_not_count(cascade: Cascade) -> None:
    assert (
        forecast(cascade, CHEST, 300 * MIB, array_bytes=0.0).memory["read"]
        == 300 * MIB + FIRST_SCAN_BYTES
    )


def test_further_channels_count_as_the_reader_holds_them(cascade: Cascade, tmp_path: Path) -> None:
    """The first one in int16; each further one in float32, even on the same grid."""
    task = replace(cascade.coarse.task, regions=(), channels=(Channel("mr", None, "zscore"),) * 3)
    paths = [tmp_path / f"{number}.nrrd" for number in range(3)]
    for path in paths:
        write_image(path, np.ones(GRID.shape, np.int16), GRID)
    volume, more_channels = read_scan(paths, task, None, AS_STORED)
    held_bytes = sum(array.nbytes for array in (volume.array, *more_channels))
    expected = forecast(Cascade(replace(cascade.coarse, task=task)), GRID, 0)
    assert expected.memory["read"] == FIRST_SCAN_BYTES + held_bytes


@pytest.mark.parametrize("num_slices", [1, 300, 3000])
@pytest.mark.parametrize("max_ram_gib", [0.8, 1.0, 2.0])
def test_a_case_within_the_shares_keeps_the_memory_contract(
    cascade: Cascade, max_ram_gib: float, num_slices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_limit, "resident_bytes", lambda: 300 * MIB)
    shares = share_memory(max_ram_gib)
    monkeypatch.setattr("medseg.cascade.stage.TrainedStage._least_slab_bytes", lambda *_: 0.0)
    expected = forecast(
        cascade.within(shares.network_gib),
        replace(CHEST, shape=(num_slices, 512, 512)),
        300 * MIB,
        shares.array_bytes,
    )
    assert expected.peak_bytes <= max_ram_gib * 2**30


def test_a_task_without_regions_is_one_pass(cascade: Cascade) -> None:
    alone = Cascade(replace(cascade.coarse, task=replace(cascade.coarse.task, regions=())))
    assert list(forecast(alone, GRID, 0).memory) == ["read", "segment", "join"]


def test_the_median_of_finished_cases_gives_the_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert known_rate("weights") is None
    for unit_s, operation_s in ((2.0, 9.0), (30.0, 7.0), (4.0, 8.0)):
        note_rate("weights", Rate(unit_s, operation_s))
    assert known_rate("weights") == (4.0, 8.0)
    assert known_rate("other weights") is None
    for _ in range(30):
        note_rate("weights", Rate(1.0, 0.0))
    assert known_rate("weights") == (1.0, 0.0)
    # A damaged file, and one of an earlier version.
    for content in ('{"weights": [', '{"weights": [0.5]}'):
        (tmp_path / "medseg" / "predictions.json").write_text(content, encoding="utf-8")
        assert known_rate("weights") is None


def test_passes_have_a_rate_of_their_own() -> None:
    finished = Forecast({}, time_units=100, operations=1000.0)
    rate = rate_of(finished, total_s=5.0, pass_s=4.0)
    assert rate == (0.01, 0.004)
    # Half of the time units, and three times the operations.
    assert rate.seconds(Forecast({}, 50, 3000.0)) == 0.5 + 12.0
    assert rate_of(finished._replace(operations=0.0), total_s=5.0, pass_s=0.0) == (0.05, 0.0)


@pytest.mark.parametrize("changed", ["weights", "precision", "device", "threads", "torch"])
def test_cases_of_other_circumstances_say_nothing_about_the_seconds(
    changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = SimpleNamespace(
        checkpoints={"coarse": {"a.ckpt": "0" * 64}}, precision="fp32", device="cpu"
    )
    before = machine_key(model)
    if changed == "weights":
        model.checkpoints = {"coarse": {"a.ckpt": "1" * 64}}
    elif changed == "threads":
        monkeypatch.setattr("torch.get_num_threads", lambda: 7)
    elif changed == "torch":
        monkeypatch.setattr("torch.__version__", "1.0")
    else:
        setattr(model, changed, "another")
    assert machine_key(model) != before


def test_a_batch_names_its_largest_case_and_its_time() -> None:
    cases = {
        "a": Forecast({"read": 2**30}, 1000),
        "b": Forecast({"read": 2**30, "join": 3 * 2**29}, 3000),
    }
    assert forecast_text({"a": cases["a"]}, None, 1) == "expected peak memory 1.00 GiB"
    assert (
        forecast_text({"a": cases["a"]}, 10.0, 1)
        == "expected peak memory 1.00 GiB, expected time 10 s"
    )
    # Forecasts of two of the eight cases.
    assert (
        forecast_text(cases, 40.0, 8)
        == "8 cases, expected peak memory 1.50 GiB (case b), expected time 5 min"
    )


@pytest.mark.parametrize(("array_bytes", "held_bytes"), [(math.inf, 60), (60, 60), (59, 0)])
def test_later_parts_of_joined_models_hold_the_labels_of_those_before(
    array_bytes: float, held_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def of_part(part: Any, *arguments: Any) -> Forecast:
        calls.append(arguments)
        return Forecast({"read": 100, "segment": part}, time_units=7, operations=3.0)

    monkeypatch.setattr(forecast_module, "forecast", of_part)
    model: Any = SimpleNamespace(parts=(500, 800), step_name=lambda n, step: f"{step}_{n}")
    grid = VoxelGrid((3, 4, 5), (1.0, 1.0, 1.0))
    limits = forecast_module.ArrayLimits(1000.0, array_bytes)
    expected = forecast_module._forecast_joined(model, grid, 300, limits)
    # Each part gets the limits of the whole model.
    assert calls == [(grid, 300, 1000.0, array_bytes)] * 2
    assert expected.memory == {
        "read": 100 + held_bytes,
        "segment_1": 500,
        "segment_2": 800 + held_bytes,
    }
    assert (expected.time_units, expected.operations) == (14, 6.0)


def test_the_seconds_of_a_case_are_those_of_a_voxel_of_the_cases_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(forecast_module, "machine_key", lambda cascade: cascade)
    model: Any = "model"
    first = forecast_module.record_cost(Forecast({"read": 5}, 10, 5.0), model, 45.0, 15.0)
    assert first == {"peak_resident_bytes": 5, "total_s": None}
    second = forecast_module.record_cost(Forecast({"read": 5, "join": 9}, 4), model, 8.0, 0.0)
    assert second == {"peak_resident_bytes": 9, "total_s": 12.0}
    assert known_rate("model") == (2.5, 1.5)
    assert known_rate("other") is None


@pytest.mark.parametrize(("model_with_rate", "mean_s"), [("ab", 20.0), ("a", None), ("", None)])
def test_the_time_of_a_batch_is_said_where_that_of_all_its_models_is_known(
    model_with_rate: str, mean_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[Any] = []
    cases: list[Any] = [
        SimpleNamespace(scan=SimpleNamespace(name=name), output=name) for name in "ab"
    ]
    monkeypatch.setattr(batch, "read_report", lambda _: {})
    monkeypatch.setattr(
        batch,
        "pick_model",
        lambda scan, _: (SimpleNamespace(model=SimpleNamespace(name=scan.name, task=None)), []),
    )
    monkeypatch.setattr(batch, "scan_grid", lambda *_: None)
    expected = Forecast({}, 10)
    monkeypatch.setattr(batch.Batch, "_forecast", lambda *_: expected)
    monkeypatch.setattr(batch, "machine_key", lambda model: model.name)
    rates = {"a": Rate(1.0, 0.0), "b": Rate(3.0, 0.0)}
    monkeypatch.setattr(
        batch, "known_rate", lambda key: rates[key] if key in model_with_rate else None
    )
    monkeypatch.setattr(
        batch, "forecast_text", lambda *arguments: texts.append(arguments) or "said"
    )
    config: Any = SimpleNamespace(overwrite=False)
    running = batch.Batch([], 0, 1e9, config, 2, batch.Observer())
    assert running.describe_cost(cases) == "said"
    assert texts == [({"a": expected, "b": expected}, mean_s, 2)]
