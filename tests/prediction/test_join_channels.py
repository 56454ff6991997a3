"""Channels in files that are numbered as nnU-Net does, `<case>_0000`."""

from __future__ import annotations

from pathlib import Path

import pytest

from medseg.prediction.scans import Scan, join_channels


def scans(*names: str) -> list[Scan]:
    return [Scan(name, Path(f"{name}.nii.gz")) for name in names]


@pytest.mark.parametrize(
    ("names", "num_channels", "expected"),
    [
        (["a_0000", "b_0000"], 1, {"a": ["a_0000"], "b": ["b_0000"]}),
        (
            ["a_0000", "a_0001", "b_0000", "b_0001"],
            2,
            {"a": ["a_0000", "a_0001"], "b": ["b_0000", "b_0001"]},
        ),
        # numbers that count scans, not channels
        (["scan_0000", "scan_0001"], 1, {"scan_0000": ["scan_0000"], "scan_0001": ["scan_0001"]}),
        (
            ["a_0000", "a_0001", "a_0002"],
            2,
            {"a_0000": ["a_0000"], "a_0001": ["a_0001"], "a_0002": ["a_0002"]},
        ),
        # a missing channel, a name that another scan has, other numbers
        (["a_0000"], 2, {"a_0000": ["a_0000"]}),
        (["a", "a_0000"], 1, {"a": ["a"], "a_0000": ["a_0000"]}),
        (
            ["a_000", "b_0001", "_0000"],
            1,
            {"a_000": ["a_000"], "b_0001": ["b_0001"], "_0000": ["_0000"]},
        ),
    ],
)
def test_only_whole_sets_of_channels_are_joined(
    names: list[str], num_channels: int, expected: dict[str, list[str]]
) -> None:
    joined = join_channels(scans(*names), num_channels)
    paths = {
        scan.name: [
            path.name.removesuffix(".nii.gz") for path in (scan.path, *scan.more_paths) if path
        ]
        for scan in joined
    }
    assert paths == expected
