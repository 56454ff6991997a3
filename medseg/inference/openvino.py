"""OpenVINO backend: networks converted and compiled for the processor.

It needs the extra `medseg[openvino]`.

On two cores held to AVX2 its networks take 2.4 s of processor time for a CT of 512×512×300 voxels
where torch takes 4.2 s, both in fp32. The whole prediction takes about 9 s with either; its memory
is 1.07 GB with OpenVINO and 0.97 GB with torch.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import io
import os
import platform
import sys
import tempfile
import time
import warnings
import zipfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from medseg.errors import UserError, first_line
from medseg.geometry.sizes import Shape
from medseg.io.atomic import replace_bytes
from medseg.io.calibration import Circumstances, measure_until, read_calibration, write_calibration
from medseg.io.machine_cache import machine_folder
from medseg.models.stage_network import Logits, StageNetwork

# Packages whose code a converted network may come from: their versions and files say whether it has
# changed.
KNOWN_PACKAGES = ("medseg", "monai", "torch")
# Limits that oneDNN knows and OpenVINO does not: with one of them OpenVINO still chooses bf16
# kernels, and 2026.4 ends in a segmentation fault (openvinotoolkit/openvino#36980).
LIMITS_WITHOUT_BF16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI")
# Libraries and kernels of a compiled network, measured; OpenVINO also holds its weights twice, as a
# model and in the layout of its kernels.
KERNELS_BYTES = 25 * 2**20
WEIGHT_COPIES = 2
# Two measurements agree if they differ by at most this part of the longer one.
SECONDS_BOUND = 0.2
# After so many measurements the last two count, whether they agree or not.
MOST_MEASUREMENTS = 5

# OpenVINO 2026.4 sends statistics of its use to Google at its import and at each conversion, in
# forked copies of this process. It sends nothing where `openvino_telemetry` cannot be imported, and
# Python refuses the import of a module that is None. This module precedes any import of OpenVINO.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]


def has_openvino() -> bool:
    """Whether the extra is installed."""
    return importlib.util.find_spec("openvino") is not None


def openvino_bytes(network: nn.Module) -> int:
    """Estimate what OpenVINO holds for a network from its first pass on.

    The feature maps of a pass are not counted. Where less memory is left, OpenVINO is not chosen;
    where it is chosen, these bytes are reserved.
    """
    weights = sum(parameter.nbytes for parameter in network.parameters())
    return KERNELS_BYTES + WEIGHT_COPIES * weights


@cache
def core() -> Any:
    """OpenVINO's devices, the same object as long as the process lives.

    OpenVINO 2026.4 gives the thread that compiles a network a stack for its signal handlers. When
    the last OpenVINO object is deleted in another thread, that stack is freed but stays in use: the
    next signal, such as the end of a child process, ends the process.
    """
    import openvino

    return openvino.Core()


def use_openvino(
    network: StageNetwork, precision: str, checksum: str = "", *, is_required: bool = True
) -> None:
    """Let the forward passes of a network run in OpenVINO, in place.

    Its weights, their names and its slabs stay those of torch.

    Args:
        network: Network on the CPU, in evaluation mode, with weights in fp32.
        precision: `fp32` or `bf16`.
        checksum: SHA-256 of its checkpoint, under which the converted network is kept on this
            machine; empty = it is not kept.
        is_required: Whether a network that cannot be converted is refused at its first pass; else
            it runs in torch.

    Raises:
        UserError: If OpenVINO is not installed, or would crash.
    """
    if not has_openvino():
        raise UserError(
            "inference.backend=openvino: OpenVINO is not installed; run "
            "pip install 'medseg[openvino]', or choose inference.backend=torch"
        )
    if precision == "bf16":
        _check_bf16()
    cached_path = _cache_path(network.network, checksum) if checksum else None
    hint = "bf16" if precision == "bf16" else "f32"
    network.network.forward = _Compiled(
        network.network,
        network.in_channels,
        network.traits.small_size,
        hint,
        cached_path,
        is_required=is_required,
    )


def _check_bf16() -> None:
    """Refuse bf16 where the environment limits the instructions of the processor."""
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        limit = os.environ.get(name, "").upper()
        if limit in LIMITS_WITHOUT_BF16:
            raise UserError(
                f"inference.backend=openvino: OpenVINO crashes in bf16 under {name}={limit}; give "
                f"precision=fp32, or unset {name}"
            )


def convert(network: Logits, in_channels: int, size: Shape) -> Any:
    """Convert a network to an OpenVINO model with one input and the logits as its output.

    The input (N, C, D, H, W) may have any size.

    Args:
        network: Network on the CPU, in fp32.
        in_channels: Channels of its input.
        size: An input size that it accepts.

    Returns:
        `openvino.Model`; see `to_ir`.
    """
    import openvino

    with (
        # The first pass of a prediction converts. It is in inference mode, in which the head of our
        # UNet cuts the image into parts; their number would become a constant of the trace.
        torch.inference_mode(False),
        torch.no_grad(),
        # Autocast would write conversions into the trace that OpenVINO does not know.
        torch.autocast("cpu", enabled=False),
        warnings.catch_warnings(),
    ):
        # Checks of the input size and choices of the layout become constants; they change no value.
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        # OpenVINO calls `torch.jit.trace`, which is deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        return openvino.convert_model(network, example_input=torch.zeros(1, in_channels, *size))


def to_ir(model: Any) -> tuple[bytes, bytes]:
    """Write the intermediate representation of a model, with weights in fp32.

    Returns:
        The contents of its `.xml` and its `.bin` file.
    """
    import openvino

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.xml"
        openvino.save_model(model, path, compress_to_fp16=False)
        return path.read_bytes(), path.with_suffix(".bin").read_bytes()


def _cache_path(network: nn.Module, checksum: str) -> Path | None:
    """Path under which a converted network is kept on this machine.

    None for code of other packages, which may change unnoticed.
    """
    modules = {type(module).__module__ for module in network.modules()}
    if any(module.partition(".")[0] not in KNOWN_PACKAGES for module in modules):
        return None
    # The name changes with the weights, the versions and the code of the network.
    digest = hashlib.sha256(checksum.encode())
    versions = map(importlib.metadata.version, ("monai", "openvino", "torch"))
    digest.update(" ".join(versions).encode())
    for module in sorted(modules):
        digest.update(Path(sys.modules[module].__file__ or "").read_bytes())
    return machine_folder() / "openvino" / f"{digest.hexdigest()[:32]}.zip"


def _read_cached(path: Path) -> Any:
    """Read a converted network; None where there is none, or its file is damaged."""
    try:
        # The archive compares the checksums of its parts as it reads them.
        with zipfile.ZipFile(path) as archive:
            return core().read_model(archive.read("model.xml"), archive.read("model.bin"))
    # Whatever zipfile and OpenVINO raise for damaged bytes.
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile, RuntimeError):
        return None


def _write_cached(path: Path, model: Any) -> None:
    """Keep a converted network where the folder can be written.

    In one file, so that its parts belong together.
    """
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, part in zip(("model.xml", "model.bin"), to_ir(model), strict=True):
            archive.writestr(name, part)
    with suppress(OSError, UserError):
        replace_bytes(path, content.getvalue())


class _Compiled:
    """Forward pass in OpenVINO: converted at the first call, compiled for one input size."""

    def __init__(
        self,
        network: nn.Module,
        in_channels: int,
        size: Shape,
        precision: str,
        cached_path: Path | None = None,
        *,
        is_required: bool = True,
    ) -> None:
        self._network = network
        self._in_channels = in_channels
        self._size = size
        self._precision = precision
        self._cached_path = cached_path
        self._is_required = is_required
        self._model: Any = None
        self._compiled: Any = None
        self._shape: tuple[int, ...] = ()

    def __call__(self, image: Tensor) -> Tensor:
        if self._model is None:
            try:
                self._model = self._load()
            except UserError:
                if self._is_required:
                    raise
                # The choice was measured with another network, see `quickest_backend`.
                del self._network.forward
                return self._network.forward(image)
        self._compile(tuple(image.shape))
        return self._run(image)

    def _compile(self, shape: tuple[int, ...]) -> None:
        """Compile for an input shape (N, C, D, H, W), unless the last one was the same."""
        import openvino

        if self._shape == shape:
            return
        # Its memory is freed before that of the next size is taken. If there is not enough, the
        # next pass compiles again.
        self._compiled = None
        self._shape = ()
        self._model.reshape(openvino.PartialShape(list(shape)))
        options = {
            "INFERENCE_PRECISION_HINT": self._precision,
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        }
        self._compiled = core().compile_model(self._model, "CPU", options)
        self._shape = shape

    def _run(self, image: Tensor) -> Tensor:
        """Make one forward pass of the compiled network."""
        import openvino

        request = self._compiled.create_infer_request()
        logits = np.empty(list(self._compiled.output(0).shape), np.float32)
        # OpenVINO writes into this array: no copy of the logits is made.
        request.set_output_tensor(openvino.Tensor(logits, shared_memory=True))
        request.infer([image.contiguous().numpy()], share_inputs=True, share_outputs=True)
        # OpenVINO would keep the feature maps of this pass for the next one, beside the other stage
        # and the rest of the prediction.
        del request
        self._compiled.release_memory()
        return torch.from_numpy(logits)

    def _load(self) -> Any:
        """Read the converted network that is kept, or convert it and keep it."""
        model = None
        if self._cached_path is not None:
            model = _read_cached(self._cached_path)
        if model is not None:
            return model
        try:
            model = convert(Logits(self._network), self._in_channels, self._size)
        # The converter raises errors of many classes.
        except Exception as error:
            raise UserError(
                f"inference.backend=openvino: {type(self._network).__name__} cannot be converted "
                f"({first_line(error)}); choose inference.backend=torch"
            ) from error
        if self._cached_path is not None:
            _write_cached(self._cached_path, model)
        return model


class PassSeconds(NamedTuple):
    """Durations of a pass in both backends, in s."""

    torch: float
    openvino: float


def quickest_backend(network: StageNetwork) -> str:
    """Measure a network in torch and in OpenVINO, both in fp32.

    The measurement is repeated until two agree, and kept for this machine and these versions, see
    `medseg.io.calibration`.

    Args:
        network: Network on the CPU, in evaluation mode.

    Returns:
        `torch` or `openvino`.
    """
    # What decides which backend is quicker; the network hardly does, so one measurement serves all.
    capability = torch.backends.cpu.get_cpu_capability()
    num_threads = torch.get_num_threads()
    machine = (
        f"{platform.node()}, {capability}, {num_threads} threads, torch {torch.__version__}, "
        f"openvino {importlib.metadata.version('openvino')}"
    )
    file_name = f"{machine}.json".replace("/", "_")
    path = machine_folder() / "backends" / file_name
    numbers = read_calibration(path, len(PassSeconds._fields))
    if numbers is None:
        try:
            numbers, circumstances = _measure_backends(network)
        except UserError:  # it cannot be converted
            return "torch"
        write_calibration(path, numbers, circumstances)
    seconds = PassSeconds(*numbers)
    if seconds.openvino < seconds.torch:
        return "openvino"
    return "torch"


def _measure_backends(network: StageNetwork) -> tuple[list[float], Circumstances]:
    """Time a pass in both backends until two measurements agree.

    Raises:
        UserError: If OpenVINO cannot convert the network.
    """
    depth, height, width = (2 * size for size in network.traits.small_size)
    in_torch = network.network
    channels = network.in_channels
    image = torch.zeros(1, channels, depth, height, width)
    in_openvino = _Compiled(in_torch, channels, network.traits.small_size, "f32")
    previous, latest, circumstances = measure_until(
        lambda: PassSeconds(torch=_seconds(in_torch, image), openvino=_seconds(in_openvino, image)),
        _agree,
        MOST_MEASUREMENTS,
    )
    # Other programs only lengthen a duration.
    return [min(durations) for durations in zip(previous, latest, strict=True)], circumstances


def _agree(first: PassSeconds, second: PassSeconds) -> bool:
    """Whether each backend took as long in two measurements, within `SECONDS_BOUND`."""
    for backend_seconds in zip(first, second, strict=True):
        shorter, longer = sorted(backend_seconds)
        if longer - shorter > SECONDS_BOUND * longer:
            return False
    return True


def _seconds(call: Any, image: Tensor) -> float:
    """Return the shorter time of the second and third pass; the first one compiles."""
    durations = []
    with torch.inference_mode():
        for _ in range(3):
            start = time.perf_counter()
            call(image)
            durations.append(time.perf_counter() - start)
    return min(durations[1:])
