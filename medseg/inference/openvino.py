"""OpenVINO backend: networks converted and compiled for the processor.

The backend needs the extra `medseg[openvino]`.

On two cores limited to AVX2 the networks take 2.4 s of processor time for a CT of 512×512×300
voxels in OpenVINO, and 4.2 s in torch, both in fp32. The whole prediction takes about 9 s with
either, and 1.07 GB of memory with OpenVINO, 0.97 GB with torch.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import io
import math
import operator
import os
import platform
import sys
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from medseg.errors import UserError, first_line, is_out_of_memory
from medseg.geometry.sizes import Shape
from medseg.io.atomic import replace_bytes
from medseg.io.calibration import Circumstances, measure_until, read_calibration, write_calibration
from medseg.io.machine_cache import machine_folder
from medseg.models.stage_network import Logits, StageNetwork
from medseg.models.traits import Traits
from medseg.models.unet import UNet

# Forward pass of a converted network: maps an image (1, C, D, H, W) to logits (1, K, D, H, W).
Run = Callable[[Tensor], Tensor]
# Largest difference of the logits to those of torch, as a share of the largest logit.
TOLERANCE = 1e-3
# Multiples of the divisor (z, y, x), different on each axis, see `other_size`.
OTHER_MULTIPLES = (2, 3, 4)
# Mark in the information of an OpenVINO model whose logits were compared at another size.
COMPARED = "medseg_compared"

# A converted network is cached only if all its layers are from these packages. The name of the
# cached file changes with their code, see `_cache_path`, but not with the code of other packages.
KNOWN_PACKAGES = ("medseg", "monai", "torch")
# Limits of oneDNN's instruction set under which it has no bf16 kernels. From AVX512_CORE on it has
# them, and emulates instructions that are missing. OpenVINO does not know these limits: it still
# chooses bf16 kernels, and 2026.4 ends in a segmentation fault (openvinotoolkit/openvino#36980).
LIMITS_WITHOUT_BF16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI")
# Memory in bytes of the libraries and kernels of a compiled network, measured.
KERNELS_BYTES = 25 * 2**20
# OpenVINO holds the weights of a network twice, as a model and in the layout of its kernels.
WEIGHT_COPIES = 2
# Two measurements agree if they differ by at most this fraction of the longer duration.
RELATIVE_TOLERANCE = 0.2
# After this number of measurements the last two are used, whether they agree or not.
MOST_MEASUREMENTS = 5

# OpenVINO 2026.4 sends statistics of its use to Google at its import and at each conversion, in
# forked copies of this process. It sends nothing where `openvino_telemetry` cannot be imported, and
# Python refuses to import a module whose entry is None. All imports of OpenVINO come after that of
# this module.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]


def has_openvino() -> bool:
    """Tell whether the extra is installed."""
    return importlib.util.find_spec("openvino") is not None


def openvino_bytes(network: nn.Module) -> int:
    """Estimate the bytes that OpenVINO holds for a network from its first pass on.

    The feature maps of a pass are not counted. OpenVINO is chosen only if this much memory is left,
    which is then reserved.
    """
    weight_bytes = sum(parameter.nbytes for parameter in network.parameters())
    return KERNELS_BYTES + WEIGHT_COPIES * weight_bytes


@cache
def core() -> Any:
    """Return OpenVINO's `Core`, its access to devices: one object for the life of the process.

    OpenVINO 2026.4 gives the thread that compiles a network a stack for its signal handlers. When
    the last OpenVINO object is deleted in another thread, that stack is freed but stays in use: the
    next signal, such as the end of a child process, ends the process.
    """
    import openvino

    return openvino.Core()


def use_openvino(
    network: StageNetwork, precision: str, checksum: str = "", *, is_required: bool = True
) -> None:
    """Replace the forward pass of a network, in place, by one that runs in OpenVINO.

    The weights stay in torch under their names. Passes in slabs (`inference.slabs`) call the layers
    one by one, so they still run in torch.

    Args:
        network: Wrapper of a network on the CPU, in evaluation mode, with weights in fp32. The
            forward pass of its inner module, `network.network`, is replaced.
        precision: `fp32` or `bf16`.
        checksum: SHA-256 of its checkpoint, by which the converted network is cached on this
            machine; empty = not cached.
        is_required: Whether a network that cannot be converted is refused, at its first pass.
            Otherwise the network runs in torch.

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
    precision_hint = "bf16" if precision == "bf16" else "f32"  # in OpenVINO's words
    # An instance attribute takes precedence over the method of the class.
    network.network.forward = _Compiled(
        network.network,
        network.in_channels,
        network.traits,
        precision_hint=precision_hint,
        cached_path=cached_path,
        is_required=is_required,
    )


def _check_bf16() -> None:
    """Refuse bf16 where an environment variable limits oneDNN to instructions without bf16.

    Raises:
        UserError: Names the variable that limits them.
    """
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
        # The first pass of a prediction, which converts, is in inference mode. In that mode the
        # head of our UNet cuts the image into parts, whose number would become a constant of the
        # trace.
        torch.inference_mode(False),
        torch.no_grad(),
        # Autocast would add casts to the trace that OpenVINO does not support.
        torch.autocast("cpu", enabled=False),
        warnings.catch_warnings(),
    ):
        # The tracer warns that Python conditions on the input size and layout become constants.
        # These conditions only check the size or choose a layout: they change no logit.
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        # OpenVINO calls `torch.jit.trace`, which is deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        return openvino.convert_model(network, example_input=torch.zeros(1, in_channels, *size))


def to_ir(model: Any) -> tuple[bytes, bytes]:
    """Convert an `openvino.Model` to OpenVINO's intermediate representation, weights in fp32.

    Returns:
        Contents of the `.xml` file and of the `.bin` file.
    """
    import openvino

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.xml"
        openvino.save_model(model, path, compress_to_fp16=False)
        return path.read_bytes(), path.with_suffix(".bin").read_bytes()


def other_size(divisor: Shape) -> Shape:
    """Give an input size that no conversion has seen, on which a converted network is compared.

    A size that a network reads in Python is a constant of the trace: at another size the converted
    network fails, or has other logits without an error.
    """
    depth, height, width = map(operator.mul, divisor, OTHER_MULTIPLES)
    return depth, height, width


def load(model: Any) -> Run:
    """Compile an `openvino.Model` in fp32, and make a function that runs it."""
    # Without the hint OpenVINO computes in bf16 on processors that support it.
    compiled = core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

    def run(image: Tensor) -> Tensor:
        outputs = compiled([image.numpy()])
        return torch.from_numpy(outputs[0])

    return run


def logits_difference(network: Logits, run: Run, in_channels: int, size: Shape) -> float:
    """Compare the logits of a converted network with those of torch on an image of noise.

    Args:
        network: Network on the CPU, in fp32.
        run: The converted network.
        in_channels: Channels of the image.
        size: Size of the image, (D, H, W).

    Returns:
        Largest difference as a share of the largest logit of torch. Infinite if the shapes differ,
        or a logit is not finite.
    """
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(1, in_channels, *size, generator=generator)
    # The first pass of a prediction, in which this is called, may be in autocast.
    with torch.inference_mode(), torch.autocast("cpu", enabled=False):
        expected = network(image)
        logits = run(image)
    if logits.shape != expected.shape:
        return math.inf
    is_finite = bool(torch.isfinite(logits).all())
    if not is_finite:
        return math.inf
    difference = (logits - expected).abs().max()
    largest = expected.abs().max().clamp_min(1e-6)  # no division by 0 if all logits are 0
    return float(difference / largest)


def _cache_path(network: nn.Module, checksum: str) -> Path | None:
    """Name the file in which a converted network is cached on this machine.

    Args:
        network: The inner module.
        checksum: SHA-256 of its checkpoint.

    Returns:
        Path of the file, existing or not; None for a network with layers from packages other than
        `KNOWN_PACKAGES`, whose code may change unnoticed.
    """
    code_modules = {type(layer).__module__ for layer in network.modules()}
    for code_module in code_modules:
        package = code_module.partition(".")[0]
        if package not in KNOWN_PACKAGES:
            return None
    # The name changes with the weights, the versions of these packages, and the files that define
    # the layers and the conversion.
    digest = hashlib.sha256(checksum.encode())
    versions = map(importlib.metadata.version, ("monai", "openvino", "torch"))
    digest.update(" ".join(versions).encode())
    for code_module in sorted({__name__, *code_modules}):
        code_file = Path(sys.modules[code_module].__file__ or "")
        digest.update(code_file.read_bytes())
    return machine_folder() / "openvino" / f"{digest.hexdigest()[:32]}.zip"


def _read_cached(path: Path) -> Any:
    """Read a cached network, an `openvino.Model`; None if the file is missing or damaged."""
    try:
        # Zip files hold a checksum of each part, which is compared when the part is read.
        with zipfile.ZipFile(path) as archive:
            return core().read_model(archive.read("model.xml"), archive.read("model.bin"))
    # The errors of zipfile and OpenVINO for a missing or damaged file.
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile, RuntimeError):
        return None


def _write_cached(path: Path, model: Any) -> None:
    """Write an `openvino.Model` to the cache, if the folder is writable.

    Both parts are in one file, so that no process reads parts of different networks.
    """
    xml, weights = to_ir(model)
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("model.xml", xml)
        archive.writestr("model.bin", weights)
    # The cache only saves time: a prediction goes on without the file.
    with suppress(OSError, UserError):
        replace_bytes(path, content.getvalue())


class _Compiled:
    """Forward pass in OpenVINO: converts at the first call, compiles whenever the size changes."""

    def __init__(
        self,
        network: nn.Module,
        in_channels: int,
        traits: Traits,
        precision_hint: str,
        cached_path: Path | None = None,
        *,
        is_required: bool = True,
    ) -> None:
        """Store the arguments; the first call converts.

        Args:
            network: Inner module of the wrapper that `use_openvino` takes.
            in_channels: Channels of its input.
            traits: Its input sizes.
            precision_hint: `f32` or `bf16`.
            cached_path: File of the converted network in the cache; None = not cached.
            is_required: See `use_openvino`.
        """
        self._network = network
        self._in_channels = in_channels
        self._traits = traits
        self._precision_hint = precision_hint
        self._cached_path = cached_path
        self._is_required = is_required
        self._model: Any = None
        self._compiled: Any = None
        self._compiled_shape: tuple[int, ...] = ()

    def __call__(self, image: Tensor) -> Tensor:
        try:
            self._compile(tuple(image.shape))
        except UserError:
            if self._is_required:
                raise
            # OpenVINO was chosen by a measurement of another network, see `quickest_backend`.
            # Without this attribute the network has the forward pass of its class again.
            del self._network.forward
            return self._network.forward(image)
        return self._run(image)

    def _compile(self, shape: tuple[int, ...]) -> None:
        """Compile for an input shape (N, C, D, H, W), unless the last one was the same.

        Raises:
            UserError: If the network cannot be converted, or not for this shape.
        """
        import openvino

        if self._compiled_shape == shape:
            return
        if self._model is None:
            self._model = self._load()
        # Free the memory of the last size before the next size is compiled. The shape is cleared
        # too: if memory runs out below, the next pass compiles again.
        self._compiled = None
        self._compiled_shape = ()
        # A copy, which shares the weights: a model whose reshape failed takes no size any more.
        model = self._model.clone()
        try:
            if shape[2:] != self._traits.small_size:
                self._check_other_size()
            model.reshape(openvino.PartialShape(list(shape)))
        # The trace of a network that reads its input size in Python, such as MONAI's SwinUNETR, has
        # the sizes of the example as constants. Networks raise errors of many classes.
        except Exception as error:
            # Full memory is no failure of the conversion: a pass that needs less may follow.
            if is_out_of_memory(error):
                raise
            raise self._unconvertible(error, "not at this size: ") from error
        options = {
            "INFERENCE_PRECISION_HINT": self._precision_hint,
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        }
        self._compiled = core().compile_model(model, "CPU", options)
        self._compiled_shape = shape

    def _run(self, image: Tensor) -> Tensor:
        """Compute logits (N, K, D, H, W), float32, of an image with the compiled shape."""
        import openvino

        request = self._compiled.create_infer_request()
        logits = np.empty(list(self._compiled.output(0).shape), np.float32)
        # OpenVINO writes into this array: no copy of the logits is made.
        request.set_output_tensor(openvino.Tensor(logits, shared_memory=True))
        request.infer([image.contiguous().numpy()], share_inputs=True, share_outputs=True)
        # OpenVINO would keep the memory of the feature maps for the next pass. Until then the other
        # stage and the rest of the prediction need memory.
        del request
        self._compiled.release_memory()
        return torch.from_numpy(logits)

    def _load(self) -> Any:
        """Read the converted network from the cache, or convert the network and cache the result.

        Raises:
            UserError: If the network cannot be converted.
        """
        if self._cached_path is not None:
            cached_model = _read_cached(self._cached_path)
            if cached_model is not None:
                return cached_model
        try:
            model = convert(Logits(self._network), self._in_channels, self._traits.small_size)
        # The converter raises errors of many classes.
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise self._unconvertible(error) from error
        if self._cached_path is not None:
            _write_cached(self._cached_path, model)
        return model

    def _check_other_size(self) -> None:
        """Compare the logits of the converted network at another size than that of the conversion.

        Our UNet reads no size in Python, so it is not compared. The model keeps a mark that it has
        passed, also in the cache.

        Raises:
            ValueError: If the logits differ from those of torch.
            RuntimeError: If OpenVINO does not take the size.
        """
        if type(self._network) is UNet or self._model.has_rt_info(COMPARED):
            return
        size = other_size(self._traits.divisor)
        model = self._model.clone()
        model.reshape([1, self._in_channels, *size])
        difference = logits_difference(Logits(self._network), load(model), self._in_channels, size)
        if difference > TOLERANCE:
            raise ValueError(
                f"its logits differ from those of torch by {difference:.2g} of the largest logit"
            )
        self._model.set_rt_info("yes", COMPARED)
        if self._cached_path is not None:
            _write_cached(self._cached_path, self._model)

    def _unconvertible(self, error: Exception, where: str = "") -> UserError:
        """Make the error of a network that OpenVINO cannot run; `where` limits its sentence."""
        return UserError(
            f"inference.backend=openvino: {type(self._network).__name__} cannot be converted "
            f"({where}{first_line(error)}); choose inference.backend=torch"
        )


class PassSeconds(NamedTuple):
    """Durations of a forward pass in both backends, in s."""

    torch: float
    openvino: float


def quickest_backend(network: StageNetwork) -> str:
    """Choose the backend in which a forward pass takes less time, both in fp32.

    Measures until two consecutive measurements agree, at most `MOST_MEASUREMENTS` times. The result
    is stored for this machine and these versions, see `medseg.io.calibration`, for all networks.

    Args:
        network: Network on the CPU, in evaluation mode.

    Returns:
        `torch` or `openvino`.
    """
    # The file name lists all that decides which backend is quicker. The network has little
    # influence, so one measurement is used for all networks.
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
        except UserError:  # the network cannot be converted
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
    traits = network.traits
    small_size = traits.small_size
    size = small_size
    # Eight times the voxels of the small size, if the network takes any size: in a short pass the
    # fixed overhead of each call would decide.
    if traits.fixed_size is None:
        depth, height, width = small_size
        size = (2 * depth, 2 * height, 2 * width)
    in_torch = network.network
    channels = network.in_channels
    image = torch.zeros(1, channels, *size)
    in_openvino = _Compiled(in_torch, channels, traits, precision_hint="f32")

    def measure() -> PassSeconds:
        return PassSeconds(torch=_seconds(in_torch, image), openvino=_seconds(in_openvino, image))

    previous, latest, circumstances = measure_until(measure, _agree, MOST_MEASUREMENTS)
    # The shorter duration of each backend counts: other programs can only lengthen a pass.
    shorter_s = [min(durations) for durations in zip(previous, latest, strict=True)]
    return shorter_s, circumstances


def _agree(first: PassSeconds, second: PassSeconds) -> bool:
    """Tell whether two measurements agree for both backends, within `RELATIVE_TOLERANCE`."""
    for durations_s in zip(first, second, strict=True):
        shorter_s, longer_s = sorted(durations_s)
        if longer_s - shorter_s > RELATIVE_TOLERANCE * longer_s:
            return False
    return True


def _seconds(call: Any, image: Tensor) -> float:
    """Time three passes and return the shorter of the last two, in s; the first one compiles."""
    durations_s = []
    with torch.inference_mode():
        for _ in range(3):
            start_s = time.perf_counter()
            call(image)
            durations_s.append(time.perf_counter() - start_s)
    return min(durations_s[1:])
