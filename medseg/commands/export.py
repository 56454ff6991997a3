"""The `export` command: writes the network of a checkpoint as ONNX or OpenVINO IR."""

from collections.abc import Iterable
from pathlib import Path

import torch

from medseg.cascade.load import load_stage
from medseg.config.schema import ExportConfig
from medseg.inference.options import Backend, InferenceOptions
from medseg.prediction.export_stage import export_stage


def export(config: ExportConfig) -> int:
    """Write the network, and print what its input must be.

    Raises:
        UserError: If the checkpoint or the output is not usable, or the network cannot be
            converted.
    """
    stage = load_stage(
        Path(config.checkpoint),
        None,
        torch.device("cpu"),
        "fp32",
        config.trusted_targets,
        options=InferenceOptions(backend=Backend.torch),
    )
    output = Path(config.output)
    exported = export_stage(stage, output)
    if exported.fixed_size is None:
        input_size = f"any size in multiples of {_size_text(stage.divisor)} voxels (z, y, x)"
    else:
        input_size = f"{_size_text(exported.fixed_size)} voxels (z, y, x) only"
    print(
        f"{output}: {exported.form}; input of {input_size}; "
        f"logits within {exported.difference:.1e} of torch"
    )
    print("the preprocessing is in its metadata, see docs/export.md")
    return 0


def _size_text(size: Iterable[int]) -> str:
    """Format a size in voxels per axis."""
    return "×".join(map(str, size))
