"""Ensembles of configurations: the labels of nnU-Net's own mean of probabilities."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.nnunet_reference import ENSEMBLES
from medseg.errors import UserError
from medseg.geometry.grid import VoxelGrid
from medseg.inference.options import InferenceOptions
from medseg.io.scratch import scratch_above
from medseg.io.volume import Volume
from medseg.nnunet.ensemble import NnunetEnsemble
from medseg.prediction.forecast import forecast
from medseg.prediction.load_models import load_model_folders

RECORDED = Path(__file__).parent / "recorded"
# Kernels of another processor may round the last bit of a logit otherwise.
MAX_SHARE = 0.001


@pytest.fixture(autouse=True)
def _needs_networks() -> None:
    pytest.importorskip("dynamic_network_architectures")


def load(*members: str) -> NnunetEnsemble:
    folders = [RECORDED / f"{member}.zip" for member in members]
    model = load_model_folders(folders, ensemble=True, options=InferenceOptions())
    assert isinstance(model, NnunetEnsemble)
    return model


def scan_of(name: str) -> tuple[Volume, list[np.ndarray], np.ndarray]:
    """First channel, the other channels, and the labels of nnU-Net's ensemble."""
    recorded = np.load(RECORDED / f"{name}.npz")
    first, *others = recorded["scan"]
    grid = VoxelGrid(first.shape, tuple(recorded["spacing_mm"]))
    return Volume(first, grid, None), others, recorded["labels"]


@pytest.mark.parametrize("name", list(ENSEMBLES))
def test_labels_are_those_of_nnunets_own_ensemble(name: str) -> None:
    volume, others, expected = scan_of(name)
    ensemble = load(*ENSEMBLES[name])
    steps: list[str] = []
    result = ensemble.segment(volume, others, on_step=steps.append)
    assert len(np.unique(expected)) > 1
    assert np.mean(result.labels != expected) <= MAX_SHARE
    assert steps == ensemble.steps == list(result.durations_s)
    first = ensemble.parts[0].segment(volume, others)
    assert np.any(first.labels != result.labels)


@pytest.mark.parametrize("name", list(ENSEMBLES))
def test_temporary_files_and_the_order_of_members_change_little(name: str) -> None:
    volume, others, _ = scan_of(name)
    expected = load(*ENSEMBLES[name]).segment(volume, others).labels
    with scratch_above(0):
        in_files = load(*ENSEMBLES[name]).segment(volume, others).labels
    assert np.array_equal(in_files, expected)
    reversed_members = load(*reversed(ENSEMBLES[name])).segment(volume, others).labels
    # Sums of three numbers depend on their order in the last bit.
    assert np.mean(reversed_members != expected) <= MAX_SHARE


def test_the_forecast_has_all_steps_and_the_largest_pass() -> None:
    ensemble = load(*ENSEMBLES["ensemble"])
    expected = forecast(ensemble, scan_of("ensemble")[0].grid, 0)
    assert list(expected.memory) == ["read", *ensemble.steps]
    largest = ensemble.usual_pass_bytes
    assert largest == max(member.usual_pass_bytes for member in ensemble.parts)
    assert expected.memory["segment_1"] > expected.memory["read"] + largest
    # The logits of the members before stay until the mean, and no member makes labels.
    grid = scan_of("ensemble")[0].grid
    sizes = [member.logits_bytes(grid) for member in ensemble.parts]
    arrays = ensemble.expected(grid).memory
    assert [array.num_bytes for array in arrays["average"][:3]] == sizes
    assert [array.num_bytes for array in arrays["prepare_3"][:2]] == sizes[:2]
    assert all(array.written_share == 1.0 for array in arrays["segment_3"])
    result = ensemble.segment(*scan_of("ensemble")[:2])
    assert 0 < result.pass_s < sum(result.durations_s.values())


def test_label_values_rename_the_labels_of_an_ensemble() -> None:
    volume, others, _ = scan_of("ensemble")
    folders = [RECORDED / f"{member}.zip" for member in ENSEMBLES["ensemble"]]
    plain = load_model_folders(folders, ensemble=True).segment(volume, others).labels
    renamed = load_model_folders(folders, ensemble=True, label_values={"organ_1": 9})
    assert renamed.task.labels == {"organ_1": 9, "organ_2": 1, "organ_3": 2}
    table = np.array([0, 9, 1, 2], dtype=np.uint8)
    assert np.array_equal(renamed.segment(volume, others).labels, table[plain])


@pytest.mark.parametrize(
    ("members", "what"),
    [
        (("folds", "anisotropic"), "labels"),
        (("regions", "folds"), "labels"),
        (("2d_transposed", "folds"), "order of axes"),
    ],
)
def test_models_that_do_not_go_together_are_refused(members: tuple[str, str], what: str) -> None:
    with pytest.raises(UserError, match=f"ensemble=true: .* differ in their {what}"):
        load(*members)
