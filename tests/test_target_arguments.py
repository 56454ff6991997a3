"""Ranges of arguments bind to the classes that they were read from, and to no others."""

from __future__ import annotations

import pytest

from medseg.target_arguments import range_of


@pytest.mark.parametrize(
    ("point", "target", "name", "interval"),
    [
        ("loss", "monai.losses.TverskyLoss", "alpha", "[0, inf)"),
        ("loss", "monai.losses.FocalLoss", "alpha", "[0, 1]"),
        ("loss", "my_project.HuberDice", "delta", ""),
        ("loss", "torch.nn.CosineEmbeddingLoss", "margin", "[-1, 1]"),
        ("schedule", "torch.optim.lr_scheduler.ExponentialLR", "gamma", "(0, inf)"),
        ("schedule", "my_project.Warm", "gamma", ""),
        ("optimizer", "pytorch_optimizer.Lamb", "lr", "(0, inf)"),
    ],
)
def test_a_range_is_that_of_a_known_class(
    point: str, target: str, name: str, interval: str
) -> None:
    assert range_of(point, target, name) == interval
