"""Export of a network to ONNX and OpenVINO: conversion to bytes, and comparison with torch."""

from __future__ import annotations

import importlib
import json
import logging
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from medseg.errors import UserError, first_line, is_out_of_memory
from medseg.geometry.sizes import Shape
from medseg.inference.openvino import TOLERANCE, Run, logits_difference, other_size, to_ir
from medseg.inference.openvino import convert as convert_to_openvino
from medseg.inference.openvino import load as load_openvino
from medseg.models.stage_network import Logits

# Names of the input and the output of a converted network.
INPUT = "image"
OUTPUT = "logits"
# Key of the metadata in the file.
METADATA_KEY = "medseg"


class Exported(NamedTuple):
    """A converted network.

    Attributes:
        files: Suffix of each file to its content.
        fixed_size: The only input size, (z, y, x), of the converted network; None = every multiple
            of the divisor.
        difference: Largest difference of the logits to those of torch, as a share of the largest
            logit.
        form: Name and version of the format.
    """

    files: dict[str, bytes]
    fixed_size: Shape | None
    difference: float
    form: str


class Format(NamedTuple):
    """Conversion to one format.

    Attributes:
        name: Name of the format.
        extra: Extra of medseg that installs its libraries.
        modules: Modules of these libraries.
        convert: Makes a converted network from a network, an example image (1, C, D, H, W), and
            whether the result takes any size (True) or only that of the example.
        load: Makes a function that runs a converted network.
        describe: Names format and version of a converted network.
        write: Makes the suffix and the content of each file from a converted network and its
            metadata, a JSON text.
    """

    name: str
    extra: str
    modules: tuple[str, ...]
    convert: Callable[[Logits, Tensor, bool], Any]
    load: Callable[[Any], Run]
    describe: Callable[[Any], str]
    write: Callable[[Any, str], dict[str, bytes]]


class _Trial(NamedTuple):
    """One attempt of a conversion.

    Attributes:
        example_size: Size of the image that the conversion sees, (z, y, x).
        only_size: The only input size of the converted network; None = any.
        compared_sizes: Sizes of the images whose logits are compared with torch.
    """

    example_size: Shape
    only_size: Shape | None
    compared_sizes: list[Shape]


def export_network(
    network: Logits,
    in_channels: int,
    divisor: Shape,
    small_size: Shape,
    fixed_size: Shape | None,
    suffix: str,
    describe: Callable[[Shape | None], dict[str, Any]],
) -> Exported:
    """Convert a network and compare its logits with torch.

    The result accepts inputs of any size where the format can represent that.

    Args:
        network: Network on the CPU, in fp32.
        in_channels: Channels of its input.
        divisor: Required multiple of its input size, (z, y, x).
        small_size: A small input size, (z, y, x).
        fixed_size: Input size, (z, y, x), to which the converted network may be limited; None = it
            must take any size.
        suffix: Suffix of the file, a key of `FORMATS`.
        describe: Makes the metadata from the only input size of the converted network, or from None
            if the converted network takes any size.

    Raises:
        UserError: If a library is missing, if the network cannot be converted, or if the logits of
            the converted network differ from those of torch.
    """
    target = FORMATS[suffix]
    _check_libraries(target)
    # The first trial is for any size. It fails for a network that reads its input size in Python,
    # and is left out for a network that takes the fixed size alone. The second trial is for the
    # fixed size.
    trials: list[_Trial] = []
    if small_size != fixed_size:
        # A network that was converted for any size is also compared at another one.
        compared_sizes = [small_size, other_size(divisor)]
        trials.append(_Trial(small_size, only_size=None, compared_sizes=compared_sizes))
    if fixed_size is not None:
        trials.append(_Trial(fixed_size, only_size=fixed_size, compared_sizes=[fixed_size]))
    reasons = []  # why each trial failed
    for trial in trials:
        try:
            example = torch.zeros(1, in_channels, *trial.example_size)
            is_dynamic = trial.only_size is None
            converted = target.convert(network, example, is_dynamic)
            run = target.load(converted)
            differences = [
                logits_difference(network, run, in_channels, size) for size in trial.compared_sizes
            ]
        except Exception as error:  # converters and runtimes raise errors of many classes
            # Full memory is no failure of the conversion: the user must know that it ran out.
            if is_out_of_memory(error):
                raise
            reasons.append(first_line(error) or type(error).__name__)
            continue
        difference = max(differences)
        if difference <= TOLERANCE:
            files = target.write(converted, json.dumps(describe(trial.only_size)))
            return Exported(files, trial.only_size, difference, target.describe(converted))
        reasons.append(
            f"its logits differ from those of torch by {difference:.2g} of the largest logit"
        )
    # The message has the first reason only, since the second is mostly the same, and at most 300
    # characters of it, since converters write pages.
    name = type(network.network).__name__
    tiles = f", nor for tiles of {fixed_size} voxels" if fixed_size else ""
    raise UserError(
        f"{name} cannot be converted to {target.name} for a variable input size{tiles} "
        f"({reasons[0][:300]}); choose the other format: model.onnx or model.xml"
    )


def _check_libraries(target: Format) -> None:
    """Check that the libraries of a format can be imported.

    Raises:
        UserError: If a library cannot be imported; names the command that installs it.
    """
    for module in target.modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise UserError(
                f"{target.name} needs {module}: run pip install 'medseg[{target.extra}]'"
            ) from error


def _to_onnx(network: Logits, example: Tensor, is_dynamic: bool) -> Any:
    """Convert to an `onnx.ModelProto`; the batch has one image."""
    dynamic_shapes = None
    if is_dynamic:
        # One dictionary for the only input. The sizes of its axes 2, 3 and 4 (z, y, x) may vary;
        # the numbers of images and channels are fixed.
        dynamic_shapes = (dict.fromkeys((2, 3, 4), torch.export.Dim.AUTO),)
    with torch.no_grad(), warnings.catch_warnings():
        # The exporter warns about its own code.
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        program = torch.onnx.export(
            network,
            (example,),
            dynamo=True,
            dynamic_shapes=dynamic_shapes,
            input_names=[INPUT],
            output_names=[OUTPUT],
            verbose=False,
        )
    assert program is not None, "dynamo=True returns a program"
    return program.model_proto


def _load_onnx(model: Any) -> Run:
    # Imported here, like the libraries below: the extras that install them may be missing.
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors only
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )

    def run(image: Tensor) -> Tensor:
        (logits,) = session.run([OUTPUT], {INPUT: image.numpy()})
        return torch.from_numpy(logits)

    return run


def _write_onnx(model: Any, metadata: str) -> dict[str, bytes]:
    import onnx

    onnx.helper.set_model_props(model, {METADATA_KEY: metadata})
    onnx.checker.check_model(model)
    return {".onnx": model.SerializeToString()}


def _describe_onnx(model: Any) -> str:
    # Both are names of the set of ONNX's own operators; a model may also import other sets.
    own_domains = ("", "ai.onnx")
    version = next(opset.version for opset in model.opset_import if opset.domain in own_domains)
    return f"ONNX, opset {version}"


def _to_openvino(network: Logits, example: Tensor, is_dynamic: bool) -> Any:
    _, in_channels, depth, height, width = example.shape
    model = convert_to_openvino(network, in_channels, (depth, height, width))
    size = (depth, height, width)
    if is_dynamic:
        size = (-1, -1, -1)  # -1 is any size in OpenVINO
    model.reshape([1, in_channels, *size])
    model.inputs[0].get_tensor().set_names({INPUT})
    model.outputs[0].get_tensor().set_names({OUTPUT})
    return model


def _write_openvino(model: Any, metadata: str) -> dict[str, bytes]:
    model.set_rt_info(metadata, [METADATA_KEY])
    xml, weights = to_ir(model)
    return {".xml": xml, ".bin": weights}


def _describe_openvino(_: Any) -> str:
    import openvino

    release = openvino.__version__.split("-")[0]  # `2026.4.0-…`: without the build number
    return f"OpenVINO IR of {release}"


# Suffix of the output file to the format that writes it.
FORMATS = {
    ".onnx": Format(
        name="ONNX",
        extra="export",
        modules=("onnx", "onnxscript", "onnxruntime"),
        convert=_to_onnx,
        load=_load_onnx,
        describe=_describe_onnx,
        write=_write_onnx,
    ),
    ".xml": Format(
        name="OpenVINO",
        extra="openvino",
        modules=("openvino",),
        convert=_to_openvino,
        load=load_openvino,
        describe=_describe_openvino,
        write=_write_openvino,
    ),
}
