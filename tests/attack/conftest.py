"""Marker of the attacks; their tools and the file makers of the io tests are put on the path."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "io")]


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Import no attack where the expression of markers leaves all of them out."""
    expression = config.option.markexpr
    if "not attack" in expression or "not slow" in expression:
        return True
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("attack")
