"""Slab pass: memory of a layer, and feature maps within half of the budget."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from medseg.inference import slab_pass
from medseg.inference.slab_pass import Features, SlabPass, layer_bytes


def test_the_bytes_of_a_convolution_are_those_of_its_planes_and_of_its_reach() -> None:
    """Planes of 100 voxels: 1200 bytes of the input, 1000 of the output, three times each."""
    conv = nn.Conv3d(3, 5, (3, 3, 3), stride=(2, 1, 2))
    assert layer_bytes(conv, 100) == (3 * (2 * 1200 + 1000) + 1000, 3 * 1200)
    point = nn.Conv3d(3, 5, 1)
    assert layer_bytes(point, 100) == (3 * (1200 + 2000) + 2000, 0)


def test_a_convolution_also_holds_its_columns_where_torch_unfolds_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    conv, point = nn.Conv3d(3, 5, (3, 3, 3), stride=(2, 1, 2)), nn.Conv3d(3, 5, 1)
    bytes_per_plane, extra_bytes = layer_bytes(conv, 100)
    bytes_of_point = layer_bytes(point, 100)
    monkeypatch.setattr(slab_pass, "unfolds_all", lambda: True)
    # 27 values that the kernel takes from each of 3 channels, for each of 50 voxels of the output.
    assert layer_bytes(conv, 100) == (bytes_per_plane + 4 * 27 * 3 * 50, extra_bytes)
    assert layer_bytes(point, 100) == bytes_of_point


def test_feature_maps_share_half_of_the_budget_and_the_rest_lies_in_files() -> None:
    cpu = torch.device("cpu")
    owner = SlabPass(2000.0, cpu, cpu)
    maps: list[Features] = []

    def write(num_planes: int, width: int) -> Features:
        features = Features(num_planes, owner)
        planes = torch.arange(float(width)).expand(1, 1, num_planes, 1, width)
        features.write(0, planes)
        assert torch.equal(features.read(0, num_planes), planes)
        maps.append(features)
        return features

    assert write(5, 40).num_bytes == 800
    assert write(1, 51).num_bytes == 0, "204 bytes beside 800 are too many"
    assert write(1, 50).num_bytes == 200
    assert not owner.has_room(1)
    del maps[0]
    assert owner.has_room(800)
    assert not owner.has_room(801)


def test_planes_beyond_the_ends_are_zero() -> None:
    cpu = torch.device("cpu")
    features = Features(3, SlabPass(1e6, cpu, cpu))
    features.write(0, torch.full((1, 2, 3, 4, 5), 7.0))
    planes = features.read(-2, 4)
    assert planes.shape == (1, 2, 6, 4, 5)
    assert [bool(plane.any()) for plane in planes[0, 0]] == [False, False, True, True, True, False]
