"""The `evaluate` command."""

from __future__ import annotations

from medseg.commands import entry
from medseg.config.schema import EvaluateConfig
from medseg.evaluation.scoring import evaluate


def main() -> None:
    """Compose, check, evaluate."""
    entry.run("evaluate", EvaluateConfig, evaluate)
