"""A run whose loss is not finite stops and says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from medseg.errors import UserError

from .conftest import train


def test_a_loss_that_is_not_finite_ends_the_run(tiny_table: Path, tmp_path: Path) -> None:
    absurd = ["optimizer.lr=1e30", "schedule=constant", "trainer.gradient_clip=null", "steps=6"]
    with pytest.raises(UserError, match="the loss is not finite by step"):
        train(tmp_path / "run", tiny_table, "spacing=isotropic_4mm", "model.width=4", *absurd)
