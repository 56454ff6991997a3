"""Metadata of a checkpoint: all that prediction needs beside the weights, in plain types."""

import contextlib
import platform
import subprocess
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from medseg import __version__
from medseg.build.network import network_arguments, region_mode_of
from medseg.build.spacing import make_grid_rule
from medseg.build.task import make_task
from medseg.config.schema import StageName, TrainConfig
from medseg.weights.files import METADATA_FORMAT

# Stands for a spacing that is not resampled; a missing value must not mean it.
NATIVE = "native"


def make_metadata(config: TrainConfig, plain_config: dict[str, Any]) -> dict[str, Any]:
    """Describe a run for its checkpoints.

    Args:
        config: Checked configuration.
        plain_config: The same in plain types, kept as a record; never executed.
    """
    task, stage = make_task(config.task), config.stage
    return {
        "format": METADATA_FORMAT,
        "stage": stage.name.value,
        "task": task.to_dict(),
        "num_classes": task.num_classes if stage.name is StageName.coarse else task.num_region_classes,
        "spacing_mm": list(config.spacing.target_spacing_mm) if config.spacing.target_spacing_mm else NATIVE,
        "grid_rule": asdict(make_grid_rule(config.spacing)),
        "resampling": config.spacing.resampling.value,
        "patch_size": list(stage.patch_size) if stage.patch_size else None,
        "tile_size": list(config.inference.tile_size) if config.inference.tile_size else None,
        "region_margin_mm": stage.region_margin_mm or 0.0,
        "region_mode": region_mode_of(config),
        "precision": config.memory.precision.value,
        "model": network_arguments(config),
        "config": plain_config,
        "versions": collect_versions(),
    }


def collect_versions() -> dict[str, str]:
    """Name the versions that a result depends on, and the commit of a checkout."""
    root = Path(__file__).resolve().parents[2]
    commit = ""
    if (root / ".git").exists():
        with contextlib.suppress(OSError):  # git is not installed: the version alone must do
            commit = subprocess.run(
                ["git", "-C", str(root), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
            ).stdout.strip()
    return {
        "medseg": __version__,
        "commit": commit,
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "lightning", "numpy")},
    }
