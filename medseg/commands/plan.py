"""The `plan` command."""

from __future__ import annotations

from medseg.commands import entry
from medseg.config.schema import PlanConfig
from medseg.planning.plan import plan


def main() -> None:
    """Compose, check, plan."""
    entry.run("plan", PlanConfig, plan)
