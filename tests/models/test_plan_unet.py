"""U-Nets of nnU-Net plans, as far as they need no package of nnU-Net."""

from __future__ import annotations

import pytest

from medseg.models.plan_unet import PlanUNet


def test_only_the_two_known_unets_are_looked_up() -> None:
    with pytest.raises(ValueError, match=r"^get_matching_pool_op is no known U-Net"):
        PlanUNet(1, 2, unet="get_matching_pool_op")
