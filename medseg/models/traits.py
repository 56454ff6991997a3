"""Traits of a network of any class: channels, divisor, blocks and outputs.

* Channels: by the names of the constructor's arguments (`channel_arguments`).

The other traits are found by tracing: a forward pass on the meta device, without values.

* Divisor of the input size: by the sizes of the features, verified by a second trace.
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

# Names of a constructor's arguments for the two numbers of channels, in order of preference.
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
# Sides of the cubes with which a network is traced, in voxels, until it accepts one. The last ones
# have factors of 3, 5 and 7, for networks with such strides or windows.
TRACED_SIDES = (64, 96, 128, 160, 32, 48, 256, 144, 216, 324, 400, 336, 720, 560)
# Small blocks are joined to larger ones of at most this share of the bytes that the network keeps
# for the backward pass.
MAX_BLOCK_SHARE = 1 / 3


class Traits(NamedTuple):
    """Properties of a network that the framework needs.

    Attributes:
        divisor: Required multiple of the input size, in voxels (z, y, x); 1 for a network with a
            fixed size.
        blocks: Names of the blocks, those that keep the most bytes for the backward pass first.
        fixed_size: The only input size of the network, (z, y, x); None = every multiple of the
            divisor.
        has_unused: Whether some weights of the network do not influence its outputs.
        num_outputs: Number of outputs in training, several with deep supervision; None = unknown.
    """

    divisor: Shape
    blocks: tuple[str, ...]
    fixed_size: Shape | None = None
    has_unused: bool = False
    num_outputs: int | None = None

    @property
    def small_size(self) -> Shape:
        """A small input size, in voxels (D, H, W): the fixed one, or three times the divisor.

        Three, because features of two voxels along an axis may be computed in another precision,
        see `medseg.models.blocks.Conv3d`.
        """
        if self.fixed_size:
            return self.fixed_size
        z, y, x = self.divisor
        return 3 * z, 3 * y, 3 * x


def channel_arguments(
    network_class: type, arguments: Mapping[str, Any], in_channels: int, num_classes: int
) -> dict[str, Any]:
    """Add the channels of the task, and three spatial dimensions, to a network's arguments.

    Args:
        network_class: Class of the network.
        arguments: Arguments that the configuration states.
        in_channels: Channels of the image.
        num_classes: Classes with the background.

    Returns:
        All arguments; the stated ones stay as they are.

    Raises:
        ValueError: If the arguments state other channels, or the class has no argument for them.
    """
    parameters = inspect.signature(network_class).parameters
    added = {}
    # MONAI's networks have one class for two and three dimensions.
    if "spatial_dims" in parameters:
        added["spatial_dims"] = 3
    for known_names, number, noun in (
        (IN_CHANNELS, in_channels, "channels of the image"),
        (OUT_CHANNELS, num_classes, "classes"),
    ):
        matches = [name for name in known_names if name in parameters]
        if not matches:
            raise ValueError(
                f"the constructor of {network_class.__name__} has no argument for the number of "
                f"{noun} (one of {', '.join(known_names)}); wrap it in a class that has one"
            )
        name = matches[0]
        if arguments.get(name, number) != number:
            raise ValueError(
                f"{name}={arguments[name]}, but the task has {number} {noun}; leave {name} out"
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
    """Find the traits of a network: as stated by the arguments or the network, else by tracing.

    Args:
        make_network: Makes the network; called on the meta device.
        in_channels: Channels of the image.
        num_classes: Channels of the logits.
        divisor: Required multiple of the input size if the configuration states it.
        blocks: Names or patterns of blocks if the configuration states them.
        fixed_size: The only input size of the network if its arguments state one.

    Raises:
        ValueError: If the network cannot be traced, returns other shapes, or a pattern matches no
            module.
    """
    network = build_on_meta(make_network)
    if divisor is None:
        own_divisor = getattr(network, "divisor", None)
        if isinstance(own_divisor, int):
            own_divisor = (own_divisor, own_divisor, own_divisor)
        divisor = own_divisor
    # A network states its blocks by a method `blocks()`; an attribute of this name, such as a list
    # of modules, does not count.
    states_blocks = inspect.ismethod(getattr(network, "blocks", None))
    if blocks is None and divisor is not None and states_blocks:
        return Traits(divisor, tuple(network.blocks()))  # type: ignore[operator]
    try:
        trace, shape = _first_trace(network, in_channels, num_classes, divisor, fixed_size)
    except _UntraceableError:
        if divisor is None or blocks is None:
            raise
        if fixed_size:
            divisor = (1, 1, 1)
        names = _match_names(network, blocks)
        # Without a trace it is not known whether all weights are used: assume that some are not.
        return Traits(divisor, tuple(names), fixed_size, has_unused=True)
    if divisor is None:
        # A stated size only served as the traced size here: the network may accept others.
        divisor, fixed_size = _find_divisor(network, trace, in_channels, shape, num_classes)
    elif fixed_size:
        divisor = (1, 1, 1)
    else:
        _verify_divisor(network, divisor, in_channels, num_classes)
    names = _find_blocks(network, trace) if blocks is None else _match_names(network, blocks)
    names.sort(key=trace.interior_bytes, reverse=True)
    outputs = outputs_of(trace.result, is_training=True)
    num_outputs = len(outputs) if isinstance(outputs, list) else 1
    return Traits(divisor, tuple(names), fixed_size, trace.has_unused(), num_outputs)


def outputs_of(result: Any, is_training: bool) -> Tensor | list[Tensor]:
    """Bring the result of a network to logits (N, K, D, H, W).

    Args:
        result: A tensor; a list, tuple or mapping of tensors, the first at full resolution; or
            outputs stacked along the second axis (N, S, K, D, H, W), as MONAI's DynUNet returns
            them.
        is_training: Whether all outputs of deep supervision are returned; else the first one.

    Returns:
        Logits; in training a list of them if there are several.
    """
    if isinstance(result, Tensor):
        outputs = list(result.unbind(1)) if result.ndim == 6 else [result]
    elif isinstance(result, Mapping):
        outputs = list(result.values())
    else:
        outputs = list(result)
    if is_training and len(outputs) > 1:
        return outputs
    return outputs[0]


class _UntraceableError(ValueError):
    """The network cannot run on tensors without values."""


class _Trace:
    """One forward pass on the meta device: calls of modules, and what autograd keeps.

    Modules are named as in `named_modules`; the name of the network itself is empty.

    Attributes:
        network: On the meta device; the trace puts it into training mode.
        result: What it returned in training mode.
        calls: Number of calls of each module.
        takes_and_returns: Names of the modules with a call that takes tensors, leaves them
            unchanged and returns one tensor. Conclusive only for a module that is called once.
        feature_shapes: Sizes (D, H, W) of all five-dimensional results of modules.
        result_bytes: Bytes of the result of each module in `takes_and_returns`.
    """

    def __init__(self, network: nn.Module, image_shape: Sequence[int]) -> None:
        """Trace a network on an image (N, C, D, H, W)."""
        self.network = network
        self.calls: dict[str, int] = defaultdict(int)
        self.takes_and_returns: set[str] = set()
        self.feature_shapes: list[Shape] = []
        self.result_bytes: dict[str, int] = {}
        # For each module, the bytes of each storage that autograd keeps for it, by `_storage_id`.
        self._kept_bytes: dict[str, dict[int, int]] = defaultdict(dict)
        # For each module, the `_storage_id` of its inputs and its result.
        self._outside: dict[str, set[int]] = {}
        # Kept alive, because a new storage could get the address of a freed one as its number.
        self._storages: list[torch.UntypedStorage] = []
        # Stacks of the modules that are running, the innermost last: their names, and their input
        # tensors, each with its version before the call.
        self._running: list[str] = []
        self._inputs: list[list[tuple[Tensor, int]]] = []
        self._weight_storages = {
            tensor.untyped_storage()._cdata
            for tensor in (*network.parameters(), *network.buffers())
        }
        hooks: list[Any] = []
        for name, module in network.named_modules():
            hooks += self._watch(name, module)
        image = torch.zeros(tuple(image_shape), device="meta")
        try:
            with torch.device("meta"), saved_tensors_hooks(self._keep, lambda tensor: tensor):
                self.result = network.train()(image)
        finally:
            for hook in hooks:
                hook.remove()

    def interior_bytes(self, name: str) -> int:
        """Count the bytes that autograd keeps for a module beside its inputs and its result.

        Recomputing the module saves these bytes.
        """
        outside = self._outside.get(name, set())
        kept_bytes = self._kept_bytes[name]
        return sum(size for storage, size in kept_bytes.items() if storage not in outside)

    def has_unused(self) -> bool:
        """Run a backward pass, and tell whether some weights receive no gradient."""
        with torch.device("meta"):
            # The gradient of the sum of all outputs reaches each weight that they depend on.
            total = torch.zeros(())
            for output in _tensors_in(self.result):
                total = total + output.sum()
            total.backward()
        trainable = [weight for weight in self.network.parameters() if weight.requires_grad]
        return any(weight.grad is None for weight in trainable)

    def _watch(self, name: str, module: nn.Module) -> Iterator[Any]:
        """Register the hooks of a module; yields their handles, by which they are removed."""

        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            self.calls[name] += 1
            self._running.append(name)
            inputs = _tensors_in((args, kwargs))
            # The version of a tensor counts the changes in place.
            self._inputs.append([(tensor, tensor._version) for tensor in inputs])

        def leave(_: nn.Module, __: Any, ___: Any, result: Any) -> None:
            self._running.pop()
            inputs = self._inputs.pop()
            is_unchanged = all(tensor._version == version for tensor, version in inputs)
            if inputs and is_unchanged and isinstance(result, Tensor):
                self.takes_and_returns.add(name)
                self.result_bytes[name] = result.nbytes
            outside = [tensor for tensor, _ in inputs] + _tensors_in(result)
            self._outside[name] = {self._storage_id(tensor) for tensor in outside}
            if isinstance(result, Tensor) and result.ndim == 5:
                depth, height, width = result.shape[2:]
                self.feature_shapes.append((depth, height, width))

        yield module.register_forward_pre_hook(enter, with_kwargs=True)
        yield module.register_forward_hook(leave, with_kwargs=True)

    def _keep(self, tensor: Tensor) -> Tensor:
        """Add a tensor that autograd keeps to the bytes of all modules that are running."""
        storage = self._storage_id(tensor)
        # Weights are in memory anyway. A storage that is kept several times counts once.
        if storage not in self._weight_storages:
            for name in self._running:
                self._kept_bytes[name][storage] = tensor.untyped_storage().nbytes()
        return tensor

    def _storage_id(self, tensor: Tensor) -> int:
        """Identify the storage of a tensor by its address."""
        storage = tensor.untyped_storage()
        self._storages.append(storage)
        return storage._cdata


def _tensors_in(values: Any) -> list[Tensor]:
    """List the tensors in nested lists, tuples and mappings."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _first_trace(
    network: nn.Module,
    in_channels: int,
    num_classes: int,
    divisor: Shape | None,
    fixed_size: Shape | None,
) -> tuple[_Trace, Shape]:
    """Trace a network with the first size that it accepts; arguments as in `find_traits`.

    Returns:
        The trace, and the size of its input, (D, H, W).

    Raises:
        _OutputError: If the network returns something else than logits.
        _UntraceableError: If the network fails on all sizes.
        ValueError: If the logits have another size than the input, whatever the size.
    """
    shapes = [fixed_size] if fixed_size else [_cube(side, divisor) for side in TRACED_SIDES]
    errors: list[Exception] = []
    for shape in shapes:
        try:
            trace = _Trace(network, (1, in_channels, *shape))
            _check_outputs(network, trace.result, shape, num_classes)
        except _OutputError:
            raise
        # A foreign network may raise anything for a size that it does not accept.
        except Exception as error:
            errors.append(error)
            continue
        _check_evaluation(network, (1, in_channels, *shape), num_classes)
        return trace, shape
    reason = _first_line(errors[0])
    if all(isinstance(error, _SizeError) for error in errors):
        raise ValueError(f"{reason}; {_size_advice(divisor, fixed_size)}")
    raise _UntraceableError(
        f"{type(network).__name__} cannot be traced without computing "
        f"({type(errors[0]).__name__}: {reason}); correct its arguments, or state model.divisor "
        "and model.blocks for a network whose control flow depends on computed values"
    )


def _size_advice(divisor: Shape | None, fixed_size: Shape | None) -> str:
    """Say what to correct if the logits have another size than the input, whatever the size."""
    cure = "correct its padding or strides"
    if fixed_size:
        return f"{cure}, or img_size"
    if divisor:
        return f"nor does it fit other multiples of {list(divisor)}: {cure}, or model.divisor"
    sides = ", ".join(map(str, TRACED_SIDES))
    return f"it does not fit cubes of {sides} voxels: {cure}, or state model.divisor"


def _cube(side: int, divisor: Shape | None) -> Shape:
    """Give the size of a traced cube, each axis rounded up to a multiple of a stated divisor."""
    if divisor is None:
        return side, side, side
    depth, height, width = (step * math.ceil(side / step) for step in divisor)
    return depth, height, width


def _first_line(error: Exception) -> str:
    """Give the first line of a message, at most 150 characters."""
    lines = str(error).splitlines()
    return lines[0][:150] if lines else ""


class _OutputError(ValueError):
    """The network returns something else than logits, whatever the size of its input."""


class _SizeError(ValueError):
    """The network returns logits of another size than its input."""


def _check_outputs(network: nn.Module, result: Any, shape: Shape, num_classes: int) -> None:
    """Refuse a result that is not logits, or several of them, the first as large as the input.

    Args:
        network: The network, for its name.
        result: What it returned for one sample.
        shape: Size of its input, (D, H, W).
        num_classes: Channels of the logits.

    Raises:
        _OutputError: If the result holds anything else, such as features.
        _SizeError: If the logits have another size.
    """
    if isinstance(result, Mapping):
        result_parts = list(result.values())
    elif isinstance(result, (list, tuple)):
        result_parts = list(result)
    else:
        result_parts = [result]
    # Empty if the result holds anything but tensors.
    outputs: list[Tensor] = []
    if result_parts and all(isinstance(part, Tensor) for part in result_parts):
        logits = outputs_of(result, is_training=True)
        outputs = logits if isinstance(logits, list) else [logits]
    message = (
        f"{type(network).__name__} must return logits of shape {(1, num_classes, *shape)}, but "
        f"returned {_describe_result(result)}"
    )
    expected = (1, num_classes)  # of the axes N and K
    are_logits = all(output.ndim == 5 and output.shape[:2] == expected for output in outputs)
    if not outputs or not are_logits:
        raise _OutputError(
            f"{message}; wrap it in a class that returns its logits alone, or a list of them for "
            "deep supervision"
        )
    if tuple(outputs[0].shape[2:]) != tuple(shape):
        raise _SizeError(message)


def _check_evaluation(network: nn.Module, image_shape: Sequence[int], num_classes: int) -> None:
    """Check the outputs in evaluation, unless the network cannot run without values there."""
    try:
        with torch.device("meta"), torch.no_grad():
            result = network.eval()(torch.zeros(tuple(image_shape)))
    # A foreign network may raise anything.
    except Exception:
        return
    depth, height, width = image_shape[2:]
    _check_outputs(network, result, (depth, height, width), num_classes)


def _describe_result(result: Any) -> str:
    """Describe a result by its types and the shapes of its tensors."""
    if isinstance(result, Tensor):
        return str(tuple(result.shape))
    if isinstance(result, Mapping):
        parts = [f"{key}: {_describe_result(value)}" for key, value in result.items()]
        return f"{{{', '.join(parts)}}}"
    if isinstance(result, (list, tuple)):
        return f"[{', '.join(map(_describe_result, result))}]"
    return type(result).__name__


def _verify_divisor(network: nn.Module, divisor: Shape, in_channels: int, num_classes: int) -> None:
    """Refuse a stated divisor if the network does not accept an odd multiple of it."""
    # Each length is an odd multiple of the divisor, since an even one would not show that the
    # network requires twice the divisor. It is at least three times the divisor, see
    # `Traits.small_size`, and at least 40 voxels.
    lengths = []
    for step in divisor:
        multiple = max(3, math.ceil(40 / step))
        if multiple % 2 == 0:
            multiple += 1
        lengths.append(multiple * step)
    depth, height, width = lengths
    try:
        trace = _Trace(network, (1, in_channels, depth, height, width))
        _check_outputs(network, trace.result, (depth, height, width), num_classes)
    except Exception as error:  # a foreign network may raise anything
        reason = _first_line(error) or type(error).__name__
        raise ValueError(
            f"divisor={list(divisor)}: {type(network).__name__} fails on an input of "
            f"{[depth, height, width]} voxels ({reason}); state a larger divisor, or none"
        ) from error


def _find_divisor(
    network: nn.Module, trace: _Trace, in_channels: int, shape: Shape, num_classes: int
) -> tuple[Shape, Shape | None]:
    """Find the divisor, or that only the traced size is accepted.

    The divisor is the reduction of the smallest features, or a small multiple of it, with which a
    further trace succeeds.

    Args:
        network: On the meta device.
        trace: Its first trace.
        in_channels: Channels of the image.
        shape: Input size of that trace, (D, H, W).
        num_classes: Channels of the logits.

    Returns:
        The divisor, and the fixed size: None; if no divisor is found, 1 and `shape`.
    """
    # The results of global pooling, whose size is one, do not count.
    feature_shapes = [features for features in trace.feature_shapes if max(features) > 1]
    # How many times smaller than the input the smallest features are, axis by axis.
    reductions = []
    for axis, length in enumerate(shape):
        # Without features the reduction is 1: a network may compute them in functions or in 2D, so
        # that no module returns any.
        smallest = min((features[axis] for features in feature_shapes), default=length)
        reductions.append(round(length / smallest))
    # The network may need a multiple of the reduction, as windows of attention do.
    for factor in (1, 2, 3, 4, 8):
        z, y, x = (reduction * factor for reduction in reductions)
        # Factors 5 and 7, because a multiple of 2 or 3 would hide that the network needs twice or
        # three times the tried divisor. Two different ones, so that a network that accepts only
        # cubes fails.
        tried_shape = (5 * z, 7 * y, 5 * x)
        try:
            result = _Trace(network, (1, in_channels, *tried_shape)).result
            _check_outputs(network, result, tried_shape, num_classes)
        # A foreign network may raise anything for a size that it does not accept.
        except Exception:
            continue
        return (z, y, x), None
    return (1, 1, 1), shape


def _match_names(network: nn.Module, patterns: Sequence[str]) -> list[str]:
    """List the modules that match names or patterns such as `encoder.*`.

    A module inside another one that matches is left out.

    Raises:
        ValueError: If a pattern matches no module.
    """
    names = [name for name, _ in network.named_modules() if name]
    chosen: list[str] = []
    for pattern in patterns:
        matches = fnmatch.filter(names, pattern)
        if not matches:
            similar_names = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3)
            # Without a similar name any module shows what names look like.
            listed = similar_names or names[:1]
            hint = f"similar names are {', '.join(listed)}" if listed else "it has no modules"
            raise ValueError(f"blocks names {pattern!r}, which is no module of the network; {hint}")
        chosen += matches
    # A name with such a prefix is inside a chosen module.
    prefixes = tuple(f"{name}." for name in chosen)
    return [name for name in names if name in chosen and not name.startswith(prefixes)]


def _find_blocks(network: nn.Module, trace: _Trace) -> list[str]:
    """Choose the smallest modules worth recomputing.

    A module without blocks inside is a block if recomputing it saves memory. A module with blocks
    takes their place only if it also keeps a small share of the bytes, and is a chain of blocks or
    has only one inside.
    """
    network_bytes = trace.interior_bytes("")  # the network's own name is empty
    max_bytes = MAX_BLOCK_SHARE * network_bytes
    # `named_modules` gives a module that occurs several times only its first name.
    names = {id(module): name for name, module in network.named_modules()}
    blocks_by_module: dict[int, list[str]] = {}

    def choose(module: nn.Module) -> list[str]:
        """Choose the blocks within a module, or the module itself."""
        if id(module) in blocks_by_module:
            return blocks_by_module[id(module)]
        blocks: list[str] = []
        # A chain is a sequence of blocks and of modules without any.
        is_chain = isinstance(module, nn.Sequential)
        for child in module.children():
            child_blocks = choose(child)
            blocks += child_blocks
            is_block = child_blocks == [names[id(child)]]
            if child_blocks and not is_block:
                is_chain = False
        name = names[id(module)]
        is_small = trace.interior_bytes(name) <= max_bytes
        may_replace = not blocks or (is_small and (is_chain or len(blocks) == 1))
        # The whole network, whose name is empty, is no block.
        if name and may_replace and _saves_memory(name, module, trace):
            blocks = [name]
        blocks_by_module[id(module)] = blocks
        return blocks

    # Duplicates are dropped, because a module may occur in several others.
    return list(dict.fromkeys(choose(network)))


def _saves_memory(name: str, module: nn.Module, trace: _Trace) -> bool:
    """Whether a module can be recomputed, and recomputing it saves memory."""
    if trace.calls[name] != 1 or name not in trace.takes_and_returns:
        return False
    # Recomputing must save at least half the bytes of the result.
    if 2 * trace.interior_bytes(name) < trace.result_bytes[name]:
        return False
    # A single layer keeps hardly more than its input, so recomputing it saves nothing.
    has_children = next(module.children(), None) is not None
    return has_children and next(module.parameters(), None) is not None


class _WithoutValues(TorchFunctionMode):
    """Function mode for constructors on the meta device, with special cases for some functions.

    `torch.linspace` stays on the CPU, because constructors read dropout rates from its values.
    Random values in place are not drawn, because torch would load its compiler for that.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.normal_, Tensor.uniform_):
            return args[0]
        if func is torch.linspace:
            kwargs = {"device": "cpu", **kwargs}
        return func(*args, **kwargs)


def build_on_meta(make_network: Callable[[], T], *, may_compute: bool = True) -> T:
    """Make a network on the meta device, where its weights have no values and take no memory.

    Args:
        make_network: Makes the network.
        may_compute: Whether a constructor that fails without values may run on the CPU instead; the
            network is then moved to the meta device.

    Returns:
        The network, all weights on the meta device.
    """
    try:
        with torch.device("meta"), _WithoutValues():
            return make_network()
    except (NotImplementedError, RuntimeError):
        if not may_compute:
            raise
        # The random numbers that the constructor draws do not change those of the caller.
        with torch.random.fork_rng(devices=[]):
            return make_network().to("meta")
