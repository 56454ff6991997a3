"""Network adapter: channels, divisor, blocks and outputs of any network, found by tracing it on the meta device.

* Channels: by the names of the constructor's arguments (`channel_arguments`).
* Divisor of the input size: by the sizes of the features of a traced pass, verified by a second
  pass.
* Blocks that can be recomputed or placed on a device: modules that are called once, take tensors
  and return one tensor, have parameters, do not change their input, and keep tensors for the
  backward pass that neither their input nor their output holds.
* Outputs: one tensor, or several of deep supervision.

A network may state `divisor` and `blocks()` itself, as `medseg.models.unet.UNet` does; a
configuration may state both for any network.
"""

import difflib
import fnmatch
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from medseg.geometry.sizes import Shape

T = TypeVar("T", bound=nn.Module)

IN_CHANNELS = (
    "in_channels",
    "in_chans",
    "input_channels",
    "num_input_channels",
    "n_channels",
    "in_ch",
    "img_channels",
)
OUT_CHANNELS = (
    "out_channels",
    "num_classes",
    "n_classes",
    "out_chans",
    "output_channels",
    "num_output_channels",
    "out_ch",
    "classes",
)
# Sides of the cubes that a network is traced with, in voxels, until one fits.
# The last are multiples of powers of 3, 5 and 7.
TRACED_SIDES = (64, 96, 128, 160, 32, 48, 256, 144, 216, 324, 400, 336, 720, 560)
# Small blocks are joined to one that keeps at most this share of the bytes that the network keeps
# for the backward pass.
MAX_BLOCK_SHARE = 1 / 3


class Traits(NamedTuple):
    """What the framework knows of a network.

    Attributes:
        divisor: Required multiple of the input size, in voxels (z, y, x); 1 for a network with a
            fixed size.
        blocks: Names of the blocks, those that keep the most bytes for the backward pass first.
        fixed_size: The only input size of the network, (z, y, x); None = every multiple of the
            divisor.
        has_unused: Whether weights of the network do not influence its outputs.
        num_outputs: Outputs in training, several with deep supervision; None = unknown.
    """

    divisor: Shape
    blocks: tuple[str, ...]
    fixed_size: Shape | None = None
    has_unused: bool = False
    num_outputs: int | None = None

    @property
    def small_size(self) -> Shape:
        """A small input size, in voxels (D, H, W).

        Below three multiples of the divisor, convolutions on a short axis may use another
        precision.
        """
        depth, height, width = self.fixed_size or (3 * step for step in self.divisor)
        return depth, height, width


def channel_arguments(
    found: type, arguments: Mapping[str, Any], in_channels: int, num_classes: int
) -> dict[str, Any]:
    """Add the channels of the task, and three spatial dimensions, to the arguments of a network's class.

    Args:
        found: The class.
        arguments: Its arguments so far.
        in_channels: Channels of the image.
        num_classes: Classes with the background.

    Raises:
        ValueError: If the arguments state other channels, or the class has no argument for them.
    """
    known = inspect.signature(found).parameters
    added = {"spatial_dims": 3} if "spatial_dims" in known else {}
    for names, number, what in (
        (IN_CHANNELS, in_channels, "channels of the image"),
        (OUT_CHANNELS, num_classes, "classes"),
    ):
        name = next((name for name in names if name in known), None)
        if name is None:
            raise ValueError(
                f"the constructor of {found.__name__} has no argument for the number of {what} (one of {', '.join(names)}); "
                "wrap it in a class that has one"
            )
        if arguments.get(name, number) != number:
            raise ValueError(
                f"{name}={arguments[name]}, but the task has {number} {what}; leave {name} out"
            )
        added[name] = number
    return {**added, **arguments}


def find_traits(
    make_network: Callable[[], nn.Module],
    in_channels: int,
    num_classes: int,
    *,
    divisor: Shape | None = None,
    blocks: Sequence[str] | None = None,
    fixed_size: Shape | None = None,
) -> Traits:
    """Find what the framework needs to know of a network.

    Args:
        make_network: Makes the network; called on the meta device.
        in_channels: Channels of the image.
        num_classes: Channels of the logits.
        divisor: Required multiple of the input size where it is stated.
        blocks: Names or patterns of blocks where they are stated.
        fixed_size: The only input size of the network where its arguments state one.

    Raises:
        ValueError: If the network cannot be traced, returns other shapes, or a pattern matches no
            module.
    """
    network = build_on_meta(make_network)
    if divisor is None:
        stated = getattr(network, "divisor", None)
        divisor = (stated, stated, stated) if isinstance(stated, int) else stated
    # Only a method `blocks()` states the blocks; a list of modules may have this name too.
    if (
        blocks is None
        and divisor is not None
        and inspect.ismethod(getattr(network, "blocks", None))
    ):
        return Traits(divisor, tuple(network.blocks()))  # type: ignore[operator]
    try:
        trace, shape = _first_trace(network, in_channels, num_classes, divisor, fixed_size)
    except _UntraceableError:
        if divisor is None or blocks is None:
            raise
        return Traits(
            divisor, tuple(_matching(network, blocks)), fixed_size, has_unused=True
        )  # assumed: without a trace it is not known
    if divisor is not None and fixed_size is None:
        _verify_divisor(network, divisor, in_channels, num_classes)
    if divisor is None:
        divisor, fixed_size = _find_divisor(network, trace, (1, in_channels, *shape), num_classes)
    names = _matching(network, blocks) if blocks is not None else _find_blocks(network, trace)
    ordered = sorted(names, key=lambda name: -trace.interior_bytes(name))
    outputs = outputs_of(trace.result, is_training=True)
    num_outputs = len(outputs) if isinstance(outputs, list) else 1
    return Traits(
        (1, 1, 1) if fixed_size else divisor,
        tuple(ordered),
        fixed_size,
        trace.has_unused(),
        num_outputs,
    )


def outputs_of(result: Any, is_training: bool) -> Tensor | list[Tensor]:
    """Bring the result of a network to logits (N, K, D, H, W), or to a list of such in training with deep supervision.

    Args:
        result: A tensor; a list, tuple or mapping of tensors, the first at full resolution; or
            outputs stacked along the second axis (N, S, K, D, H, W), as MONAI's DynUNet returns
            them.
        is_training: Whether all outputs are wanted; else the first one.
    """
    if isinstance(result, Tensor):
        outputs = list(result.unbind(1)) if result.ndim == 6 else [result]
    else:
        outputs = list(result.values() if isinstance(result, Mapping) else result)
    return outputs if is_training and len(outputs) > 1 else outputs[0]


class _UntraceableError(ValueError):
    """The network cannot run on tensors without values."""


class _Trace:
    """One forward and backward pass on the meta device: calls of modules, and what autograd keeps.

    Attributes:
        calls: Number of calls by name of a module.
        takes_and_returns: Names of the modules whose every call takes tensors, leaves them
            unchanged and returns one tensor.
        feature_shapes: Sizes (D, H, W) of all five-dimensional results.
        result_bytes: Bytes of a module's result by its name.
    """

    def __init__(self, network: nn.Module, image_shape: Sequence[int]) -> None:
        self.network = network
        self.calls: dict[str, int] = defaultdict(int)
        self.takes_and_returns: set[str] = set()
        self.feature_shapes: list[Shape] = []
        self.result_bytes: dict[str, int] = {}
        self._kept: dict[str, dict[int, int]] = defaultdict(dict)  # module: storage: bytes
        self._outside: dict[str, set[int]] = {}  # module: storages of its inputs and of its result
        self._storages: list[
            torch.UntypedStorage
        ] = []  # held, because the address of a dead one may return
        self._active: list[str] = []
        self._versions: list[list[tuple[Tensor, int]]] = []
        self._weights = {
            tensor.untyped_storage()._cdata
            for tensor in (*network.parameters(), *network.buffers())
        }
        hooks = [
            hook for name, module in network.named_modules() for hook in self._watch(name, module)
        ]
        image = torch.zeros(tuple(image_shape), device="meta")
        try:
            with torch.device("meta"), saved_tensors_hooks(self._keep, lambda tensor: tensor):
                self.result = network.train()(image)
        finally:
            for hook in hooks:
                hook.remove()

    def interior_bytes(self, name: str) -> int:
        """Bytes that autograd keeps for a module beside its inputs and its result: what recomputing it saves."""
        return sum(
            size
            for storage, size in self._kept[name].items()
            if storage not in self._outside.get(name, set())
        )

    def has_unused(self) -> bool:
        """Whether some weights receive no gradient."""
        with torch.device("meta"):
            outputs = [leaf for leaf in tree_leaves(self.result) if isinstance(leaf, Tensor)]
            sum((output.sum() for output in outputs), torch.zeros(())).backward()
        return any(
            weight.requires_grad and weight.grad is None for weight in self.network.parameters()
        )

    def _watch(self, name: str, module: nn.Module) -> Iterator[Any]:
        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            self.calls[name] += 1
            self._active.append(name)
            self._versions.append(
                [
                    (leaf, leaf._version)
                    for leaf in tree_leaves((args, kwargs))
                    if isinstance(leaf, Tensor)
                ]
            )

        def leave(_: nn.Module, __: Any, ___: Any, result: Any) -> None:
            self._active.pop()
            inputs = self._versions.pop()
            if (
                inputs
                and isinstance(result, Tensor)
                and all(tensor._version == version for tensor, version in inputs)
            ):
                self.takes_and_returns.add(name)
                self.result_bytes[name] = result.nbytes
            outside = [tensor for tensor, _ in inputs] + [
                leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)
            ]
            self._outside[name] = {self._storage(tensor) for tensor in outside}
            if isinstance(result, Tensor) and result.ndim == 5:
                depth, height, width = result.shape[2:]
                self.feature_shapes.append((depth, height, width))

        yield module.register_forward_pre_hook(enter, with_kwargs=True)
        yield module.register_forward_hook(leave, with_kwargs=True)

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = self._storage(tensor)
        if storage not in self._weights:
            for name in self._active:
                self._kept[name][storage] = tensor.untyped_storage().nbytes()
        return tensor

    def _storage(self, tensor: Tensor) -> int:
        self._storages.append(tensor.untyped_storage())
        return self._storages[-1]._cdata


def _first_trace(
    network: nn.Module,
    in_channels: int,
    num_classes: int,
    divisor: Shape | None,
    fixed_size: Shape | None,
) -> tuple[_Trace, Shape]:
    """Trace a network with the first size that it accepts."""
    cubes = [(side, side, side) for side in TRACED_SIDES]
    if divisor is not None:
        cubes = [
            tuple(step * -(-side // step) for step, side in zip(divisor, cube, strict=True))  # type: ignore[misc]
            for cube in cubes
        ]
    errors: list[str] = []
    for shape in [fixed_size] if fixed_size else cubes:
        try:
            trace = _Trace(network, (1, in_channels, *shape))
            _check_outputs(network, trace.result, shape, num_classes)
        except _OutputError:
            raise
        except (
            Exception
        ) as error:  # whatever a foreign network raises for a size that it does not accept
            errors.append(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:150]}")
            continue
        _check_evaluation(network, (1, in_channels, *shape), num_classes)
        return trace, shape
    if all(error.startswith(_SizeError.__name__) for error in errors):
        sides = ", ".join(str(cube[0]) for cube in ([fixed_size] if fixed_size else cubes))
        raise ValueError(
            f"{errors[0].partition(': ')[2]}; it does not fit cubes of {sides} voxels either: correct "
            "its padding or strides, or state model.divisor"
        )
    raise _UntraceableError(
        f"{type(network).__name__} cannot be traced without computing ({errors[0]}); correct its arguments, or state model.divisor and "
        "model.blocks for a network whose control flow depends on computed values"
    )


class _OutputError(ValueError):
    """The network returns something else than logits, whatever the size of its input."""


class _SizeError(ValueError):
    """The network returns logits of another size than its input."""


def _check_outputs(network: nn.Module, result: Any, shape: Sequence[int], num_classes: int) -> None:
    """Refuse a result that is neither logits nor several of them, the first as large as the input.

    Args:
        network: The network, for its name.
        result: What it returned for one sample.
        shape: Size of its input, (D, H, W).
        num_classes: Channels of the logits.

    Raises:
        _OutputError: If the result holds anything else, such as features.
        _SizeError: If the logits have another size.
    """
    values = list(result.values()) if isinstance(result, Mapping) else result
    several = values if isinstance(values, (list, tuple)) else [values]
    outputs: list[Tensor] = []
    if several and all(isinstance(value, Tensor) for value in several):
        found = outputs_of(values, is_training=True)
        outputs = found if isinstance(found, list) else [found]
    said = (
        f"{type(network).__name__} must return logits of shape {(1, num_classes, *shape)}, but "
        f"returned {_describe_result(result)}"
    )
    is_wrong = [
        output.ndim != 5 or tuple(output.shape[:2]) != (1, num_classes) for output in outputs
    ]
    if not outputs or any(is_wrong):
        raise _OutputError(
            f"{said}; wrap it in a class that returns its logits alone, or a list of them for deep supervision"
        )
    if tuple(outputs[0].shape[2:]) != tuple(shape):
        raise _SizeError(said)


def _check_evaluation(network: nn.Module, image_shape: Sequence[int], num_classes: int) -> None:
    """Check the outputs in evaluation; a network that cannot be traced there is not checked."""
    try:
        with torch.device("meta"), torch.no_grad():
            result = network.eval()(torch.zeros(tuple(image_shape)))
    except Exception:  # whatever a foreign network raises without values
        return
    _check_outputs(network, result, image_shape[2:], num_classes)


def _describe_result(result: Any) -> str:
    """Describe a result by its types and the shapes of its tensors."""
    if isinstance(result, Tensor):
        return str(tuple(result.shape))
    if isinstance(result, Mapping):
        parts = [f"{key}: {_describe_result(value)}" for key, value in result.items()]
        return "{" + ", ".join(parts) + "}"
    if isinstance(result, (list, tuple)):
        return "[" + ", ".join(map(_describe_result, result)) + "]"
    return type(result).__name__


def _verify_divisor(network: nn.Module, divisor: Shape, in_channels: int, num_classes: int) -> None:
    """Refuse a stated divisor with odd multiples that the network does not accept."""
    depth, height, width = (step * max(3, math.ceil(40 / step) // 2 * 2 + 1) for step in divisor)
    try:
        _check_outputs(
            network,
            _Trace(network, (1, in_channels, depth, height, width)).result,
            (depth, height, width),
            num_classes,
        )
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:150]
        raise ValueError(
            f"divisor={list(divisor)}: {type(network).__name__} fails on an input of {[depth, height, width]} voxels ({reason}); "
            "state a larger divisor, or none"
        ) from error


def _find_divisor(
    network: nn.Module, trace: _Trace, image_shape: Sequence[int], num_classes: int
) -> tuple[Shape, Shape | None]:
    """Find the divisor, or that only the traced size is accepted.

    The reduction of the smallest features is the divisor, unless odd multiples of it fail.
    """
    size = image_shape[2:]
    sizes = [shape for shape in trace.feature_shapes if max(shape) > 1]  # without global pooling
    reduction = [
        max(round(whole / shape[axis]) for shape in sizes) for axis, whole in enumerate(size)
    ]
    for factor in (1, 2, 3, 4, 8):
        # Odd multiples that differ between the axes; a larger divisor does not divide them.
        tried = tuple(step * factor * odd for step, odd in zip(reduction, (5, 7, 5), strict=True))
        try:
            _check_outputs(
                network, _Trace(network, (*image_shape[:2], *tried)).result, tried, num_classes
            )
        except Exception:
            continue
        depth, height, width = (step * factor for step in reduction)
        return (depth, height, width), None
    depth, height, width = size
    return (depth, height, width), (depth, height, width)


def _matching(network: nn.Module, patterns: Sequence[str]) -> list[str]:
    """List the modules that match names or patterns such as `encoder.*`, without those inside another match."""
    names = [name for name, _ in network.named_modules() if name]
    chosen: list[str] = []
    for pattern in patterns:
        matches = fnmatch.filter(names, pattern)
        if not matches:
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3)
            raise ValueError(
                f"blocks names {pattern!r}, which is no module of the network; similar names are {', '.join(near) or names[0]}"
            )
        chosen += matches
    return [
        name
        for name in names
        if name in chosen and not any(name.startswith(f"{other}.") for other in chosen)
    ]


def _find_blocks(network: nn.Module, trace: _Trace) -> list[str]:
    """Choose the smallest modules worth recomputing; a chain of such, and a module around one of them, is one block."""
    total = trace.interior_bytes("")
    names = {
        id(module): name for name, module in network.named_modules()
    }  # each module once, by its first name
    chosen: dict[int, list[str]] = {}

    def is_candidate(name: str, module: nn.Module) -> bool:
        is_called_well = trace.calls[name] == 1 and name in trace.takes_and_returns
        # A single layer keeps its input and a few statistics: recomputing it saves nothing.
        saves = (
            2 * trace.interior_bytes(name) >= trace.result_bytes[name] if is_called_well else False
        )
        return (
            saves
            and any(True for _ in module.children())
            and any(True for _ in module.parameters())
        )

    def choose(module: nn.Module) -> list[str]:
        if id(module) not in chosen:
            name, inner = names[id(module)], [choose(child) for child in module.children()]
            below = [one for found in inner for one in found]
            children = [[names[id(child)]] for child in module.children()]
            is_chain = isinstance(module, nn.Sequential) and all(
                found in ([], child) for found, child in zip(inner, children, strict=True)
            )
            joins = len(below) == 1 or is_chain
            is_block = not below or (
                joins and trace.interior_bytes(name) <= MAX_BLOCK_SHARE * total
            )
            chosen[id(module)] = (
                [name] if name and is_block and is_candidate(name, module) else below
            )
        return chosen[id(module)]

    return list(dict.fromkeys(choose(network)))


class _WithoutValues(TorchFunctionMode):
    """Exceptions for constructors on the meta device.

    `torch.linspace` stays on the CPU, because constructors read schedules of dropout rates from it.
    Draws in place do nothing: torch would load its compiler for them.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.normal_, Tensor.uniform_):
            return args[0]
        return func(*args, **({"device": "cpu", **kwargs} if func is torch.linspace else kwargs))


def build_on_meta(make_network: Callable[[], T], *, may_compute: bool = True) -> T:
    """Make a network on the meta device: without memory and values.

    Args:
        make_network: Makes the network.
        may_compute: Whether a constructor that reads values runs on the CPU instead, from where the
            network is moved.
    """
    try:
        with torch.device("meta"), _WithoutValues():
            return make_network()
    except (NotImplementedError, RuntimeError):
        if not may_compute:
            raise
        with torch.random.fork_rng(devices=[]):
            return make_network().to("meta")
