"""Loggers of a resumed run hold the steps before its checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger

from medseg.training.loggers import drop_repeated_steps


@pytest.mark.parametrize(
    ("start_step", "kept"), [(1, ["0"]), (2, ["0", "1"]), (9, ["0", "1", "2"])]
)
def test_a_table_keeps_the_steps_before_the_one_that_the_run_resumes_with(
    start_step: int, kept: list[str], tmp_path: Path
) -> None:
    """Loggers count steps from 0: after two steps the next one is 2."""
    path = tmp_path / "metrics.csv"
    path.write_text("step,loss\n0,0.5\n1,0.4\n2,0.3\n", encoding="utf-8")
    logger = CSVLogger(str(tmp_path), name="", version="")
    drop_repeated_steps(logger, start_step)
    assert [row["step"] for row in logger.experiment.metrics] == kept
