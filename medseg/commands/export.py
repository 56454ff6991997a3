"""The `export` command: writes the network of a checkpoint as ONNX or OpenVINO IR."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from medseg.cascade.load import load_stage
from medseg.config.schema import ExportConfig
from medseg.inference.options import Backend, InferenceOptions
from medseg.prediction.export_stage import export_stage
from medseg.weights.model_folder import find_stages, is_weights_folder


def export(config: ExportConfig) -> int:
    """Write the network of a checkpoint, or all networks of a model folder.

    Raises:
        UserError: If the checkpoint or the output is not usable, or the network cannot be
            converted.
    """
    checkpoint = Path(config.checkpoint)
    output = Path(config.output)
    if is_weights_folder(checkpoint):
        for paths in find_stages(checkpoint).values():
            for path in paths:
                # Not `with_name`, which raises a ValueError for an output such as `.`.
                path_output = output.parent / f"{output.stem}_{path.stem}{output.suffix}"
                _export_file(path, path_output, config.trusted_targets)
    else:
        _export_file(checkpoint, output, config.trusted_targets)
    print("the preprocessing is in its metadata, see docs/export.md")
    return 0


def _export_file(checkpoint: Path, output: Path, trusted: Sequence[str]) -> None:
    """Write the network of one file, and print the sizes of its input."""
    stage = load_stage(
        checkpoint,
        stage=None,  # any
        device=torch.device("cpu"),
        precision="fp32",
        trusted=trusted,
        options=InferenceOptions(backend=Backend.torch),
    )
    exported = export_stage(stage, output)
    if exported.fixed_size is None:
        input_size = f"any size in multiples of {_size_text(stage.divisor)} voxels (z, y, x)"
    else:
        input_size = f"{_size_text(exported.fixed_size)} voxels (z, y, x) only"
    print(
        f"{output}: {exported.form}; input of {input_size}; "
        f"logits within {exported.difference:.1e} of torch"
    )


def _size_text(size: Iterable[int]) -> str:
    """Format a size in voxels per axis."""
    return "×".join(map(str, size))
