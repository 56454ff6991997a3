"""A phantom for audits of labels."""

from __future__ import annotations

import numpy as np
import pytest

from medseg.geometry.grid import VoxelGrid
from medseg.phantom.scan import make_phantom
from medseg.phantom.spec import draw_spec
from medseg.preprocess.orient import orient


@pytest.fixture(scope="module")
def whole() -> tuple[np.ndarray, np.ndarray, VoxelGrid]:
    """A chest that the scan does not cut."""
    phantom = make_phantom(draw_spec(0, 0, "small"))
    image, grid, orientation = orient(phantom.image_hu, phantom.grid)
    return image, orientation.to_lps(phantom.labels), grid
