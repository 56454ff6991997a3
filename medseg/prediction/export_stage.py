"""Export of a trained stage to ONNX or OpenVINO, with its preprocessing as metadata."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from medseg import __version__
from medseg.cascade.stage import TrainedStage
from medseg.errors import UserError
from medseg.geometry.sizes import Shape, network_size
from medseg.inference.export import FORMATS, INPUT, OUTPUT, Exported, export_network
from medseg.inference.options import InferenceOptions
from medseg.io.atomic import check_writable, replace_bytes
from medseg.models.stage_network import Logits, StageNetwork
from medseg.preprocess.crop import BODY_MARGIN_MM
from medseg.preprocess.intensity import AIR
from medseg.task import Region, Task

# All regions share one network. A region with fewer labels than another one does not use all of its
# classes; the classes that it does not use get this name.
UNUSED = "unused"


def export_stage(stage: TrainedStage, output: Path) -> Exported:
    """Write the network of a stage in the format of a suffix, `.onnx` or `.xml`.

    Args:
        stage: The stage, on the CPU in fp32.
        output: File; a second file with the weights may be written beside it.

    Returns:
        The converted network.

    Raises:
        UserError: If the output cannot be written, or the network cannot be converted.
    """
    suffix = output.suffix.lower()
    if suffix not in FORMATS or output.is_dir():
        raise UserError(f"output={output}: expected a file that ends in .onnx or .xml")
    check_writable(output.parent)
    network: StageNetwork = stage.network  # type: ignore[assignment]
    exported = export_network(
        Logits(network.network),
        network.in_channels,
        divisor=stage.divisor,
        small_size=network.traits.small_size,
        fixed_size=_tile_size(stage),
        suffix=suffix,
        describe=partial(describe_stage, stage),
    )
    # Sorted, `.bin` comes before `.xml`: the weights are there before the file that needs them.
    for file_suffix, content in sorted(exported.files.items()):
        replace_bytes(output.with_suffix(file_suffix), content)
    return exported


def _tile_size(stage: TrainedStage) -> Shape | None:
    """Return the size of a tile as the network takes it; None for a stage that sees whole crops."""
    if not stage.tile_size:
        return None
    return network_size(stage.tile_size, stage.divisor)


def describe_stage(stage: TrainedStage, fixed_size: tuple[int, int, int] | None) -> dict[str, Any]:
    """Describe what a program must do before and after the network, in plain types.

    Args:
        stage: What its checkpoint states of input, classes and clean-up.
        fixed_size: The only input size of the exported network, (z, y, x); None = every multiple of
            the divisor.
    """
    task = stage.task
    # A coarse or single stage sees the body and all classes. The fine stage sees the crop of a
    # region and its classes.
    classes = {"all": ["background", *task.labels]}
    num_classes = task.num_classes
    crop: dict[str, Any] = {
        "of": "body: values above -500.5 HU in the first channel (other than 0 where it is no CT)",
        "margin_mm": BODY_MARGIN_MM,
    }
    flipped_regions = []
    least_size = None
    if stage.name == "fine":
        classes = {region.name: _region_classes(task, region) for region in task.regions}
        num_classes = task.num_region_classes
        crop = {"of": "region: box of its coarse labels", "margin_mm": stage.region_margin_mm}
        # The network knows only the left side of a pair: crops of the right side are mirrored.
        flipped_regions = [region.name for region in task.regions if region.side == "right"]
        least_size = network_size(stage.tile_size or stage.least_size, stage.divisor)
    size = fixed_size or ("D", "H", "W")  # letters: any size
    return {
        "medseg": __version__,
        "checkpoints": sorted(stage.checkpoints.values()),
        "task": task.name,
        "stage": stage.name,
        "input": {
            "name": INPUT,
            "shape": [1, stage.num_channels, *size],
            "multiple_of": list(stage.divisor),
            "axes": "z, y, x towards superior, posterior, left",
        },
        "output": {
            "name": OUTPUT,
            "shape": [1, num_classes, *size],
            "activation": "softmax over classes",
        },
        "classes": classes,
        "label_values": task.labels,
        "spacing_mm": "native" if stage.spacing_mm is None else list(stage.spacing_mm),
        "resampling": stage.resampling,
        "grid_rule": asdict(stage.rule),
        "channels": _describe_channels(stage),
        "crop": crop,
        "flipped_x": flipped_regions,
        "padding": {
            "where": "at the end of each axis",
            "z": "the last slice is repeated",
            "y, x": AIR,
        },
        "tile_size": _tile_size(stage),
        "least_size": least_size,
        "overlap": InferenceOptions.overlap,  # the default
        "coarse_channel": stage.has_coarse_channel,
        "clean_up": [asdict(clean_up) for clean_up in stage.clean_up],
    }


def _region_classes(task: Task, region: Region) -> list[str]:
    """Name the classes of the fine network in the crop of a region, in their order."""
    num_unused = task.num_region_labels - len(region.labels)
    unused = [UNUSED] * num_unused
    return ["background", *region.labels, *unused, *task.helper_labels]


def _describe_channels(stage: TrainedStage) -> list[dict[str, Any]]:
    """Describe how each channel becomes an input of the network."""
    descriptions = []
    for channel, limits, outside in zip(
        stage.task.channels, stage.limits, stage.outside, strict=True
    ):
        description = {
            "modality": channel.modality,
            "clip": limits,
            "normalise": channel.normalise,
            "window_hu": channel.window_hu,
            "outside": outside,
        }
        descriptions.append(description)
    return descriptions
