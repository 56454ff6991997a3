"""OpenVINO backend: networks converted and compiled for the processor; needs the extra `medseg[openvino]`.

On a processor without bf16 it takes less than half of torch's time in fp32.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from medseg.errors import UserError, first_line, require
from medseg.io.atomic import replace_text
from medseg.models.adapter import outputs_of
from medseg.models.regional import RegionalNetwork, input_channels

Shape = tuple[int, int, int]


def has_openvino() -> bool:
    """Whether the extra is installed."""
    return importlib.util.find_spec("openvino") is not None


def use_openvino(network: RegionalNetwork, precision: str) -> None:
    """Let the forward passes of a network run in OpenVINO, in place; its weights, their names and its slabs stay those of torch.

    Args:
        network: Network on the CPU, in evaluation mode, with weights in fp32.
        precision: `fp32` or `bf16`.

    Raises:
        UserError: If OpenVINO is not installed.
    """
    require(
        has_openvino(),
        "inference.backend=openvino: OpenVINO is not installed; run pip install 'medseg[openvino]', or choose inference.backend=torch",
    )
    channels, size = input_channels(network.in_channels, network.mode), network.traits.small_size
    for one in network.networks:
        one.forward = _Compiled(one, channels, size, "bf16" if precision == "bf16" else "f32")


def convert(network: nn.Module, in_channels: int, size: Shape) -> Any:
    """Convert a network to an OpenVINO model with one input (N, C, D, H, W) of any size and the logits as its output.

    Args:
        network: Network in evaluation mode, on the CPU, in fp32.
        in_channels: Channels of its input.
        size: An input size that it accepts.

    Returns:
        `openvino.Model`; `openvino.save_model` writes its intermediate representation.

    Raises:
        UserError: If OpenVINO cannot represent it.
    """
    import openvino

    try:
        # Autocast would write conversions into the trace that OpenVINO does not know.
        with torch.inference_mode(), torch.autocast("cpu", enabled=False), warnings.catch_warnings():
            # Checks of the input size and choices of the layout become constants; they change no value.
            warnings.simplefilter("ignore", torch.jit.TracerWarning)
            warnings.simplefilter("ignore", DeprecationWarning)  # of `torch.jit.trace`, which OpenVINO calls
            return openvino.convert_model(_Logits(network).eval(), example_input=torch.zeros(1, in_channels, *size))
    except Exception as error:  # of many classes
        raise UserError(
            f"inference.backend=openvino: {type(network).__name__} cannot be converted ({first_line(error)}); choose "
            "inference.backend=torch"
        ) from error


class _Logits(nn.Module):
    """A network without its further outputs, by the forward pass of its class."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, image: Tensor) -> Tensor | list[Tensor]:
        return outputs_of(type(self.network).forward(self.network, image), is_training=False)


class _Compiled:
    """Forward pass in OpenVINO: converted at the first call, compiled for one input size at a time."""

    def __init__(self, network: nn.Module, in_channels: int, size: Shape, precision: str) -> None:
        self._network, self._in_channels, self._size, self._precision = network, in_channels, size, precision
        self._model: Any = None
        self._request: Any = None
        self._shape: tuple[int, ...] = ()

    def __call__(self, image: Tensor) -> Tensor:
        import openvino

        if self._model is None:
            self._model = convert(self._network, self._in_channels, self._size)
        if self._shape != tuple(image.shape):
            self._request = None  # its memory, before that of the next size is taken
            self._model.reshape(openvino.PartialShape(list(image.shape)))
            options = {"INFERENCE_PRECISION_HINT": self._precision, "INFERENCE_NUM_THREADS": torch.get_num_threads()}
            self._request = openvino.Core().compile_model(self._model, "CPU", options).create_infer_request()
            self._shape = tuple(image.shape)
        return torch.from_numpy(self._request.infer([image.contiguous().numpy()], share_inputs=True)[0])


def quickest_backend(network: RegionalNetwork) -> str:
    """Measure a network in torch and in OpenVINO, both in fp32, once per machine; the answer is kept in the user's cache.

    Args:
        network: Network on the CPU, in evaluation mode.

    Returns:
        `torch` or `openvino`.
    """
    path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "medseg" / "backends.json"
    machine = (
        f"{platform.node()}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"openvino {importlib.metadata.version('openvino')}"
    )
    try:
        known = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        known = {}
    if known.get(machine) not in ("torch", "openvino"):
        depth, height, width = (2 * size for size in network.traits.small_size)
        one, channels = network.networks[0], input_channels(network.in_channels, network.mode)
        image = torch.zeros(1, channels, depth, height, width)
        try:
            compiled = _Compiled(one, channels, network.traits.small_size, "f32")
            known[machine] = "openvino" if _seconds(compiled, image) < _seconds(one, image) else "torch"
        except UserError:  # it cannot be converted
            return "torch"
        with suppress(OSError, UserError):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(path, json.dumps(known, indent=1))
    return str(known[machine])


def _seconds(call: Any, image: Tensor) -> float:
    """Time of the second and third pass, the shorter one: the first one compiles."""
    durations = []
    with torch.inference_mode():
        for _ in range(3):
            start = time.perf_counter()
            call(image)
            durations.append(time.perf_counter() - start)
    return min(durations[1:])
