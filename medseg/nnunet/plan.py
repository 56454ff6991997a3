"""Plan of one configuration of nnU-Net: what `plans.json` and `dataset.json` say, checked.

Tuples per axis follow the transposed array of nnU-Net: its axis a is the stored axis
`transpose[a]`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from medseg.geometry.sizes import Shape
from medseg.io.volume import MIN_SPACING_MM

# Names of the configurations of nnU-Net.
SUPPORTED = ("3d_fullres", "3d_lowres", "3d_cascade_fullres", "2d")

# Limits that no plan of nnU-Net comes near: a hostile one must not keep the program busy.
MAX_SPACING_MM = 100.0
MAX_PATCH = 1024
MAX_HEADS = 255
MAX_COUNT = 4096
MAX_LEVELS = 12
MAX_BLOCKS = 100
MAX_KERNEL_SIZE = 31
# Classes of networks that are built, by the last part of their names, and the argument of each that
# counts the blocks of the encoder.
NETWORKS = {"PlainConvUNet": "n_conv_per_stage", "ResidualEncoderUNet": "n_blocks_per_stage"}
SPLINE, TORCH, NONE = (
    "resample_data_or_seg_to_shape",
    "resample_torch_fornnunet",
    "no_resampling_hack",
)
SCHEMES = (
    "CTNormalization",
    "ZScoreNormalization",
    "NoNormalization",
    "RescaleTo01Normalization",
)
# Reader of the plans to the orientation in which the network sees a scan.
READERS = {
    "SimpleITKIO": "stored",
    "NibabelIO": "stored",
    "NibabelIOWithReorient": "RAS",
    "SimpleITKIOWithReorient": "RAS",
}


class PlanError(ValueError):
    """A plan that is damaged or not supported; the message has no path."""

    @property
    def sentence(self) -> str:
        """The message with its file and the cure."""
        return (
            f"plans.json {self}; take plans.json and dataset.json as nnU-Net wrote them, or "
            "predict with nnU-Net"
        )


@dataclass(frozen=True)
class ResamplingPlan:
    """Resampling of images or of logits.

    Attributes:
        function: `SPLINE`, `TORCH` or `NONE`.
        order: Order of the spline in plane, or along all axes.
        separate_z: Whether the nearest voxel is taken along one axis; None decides by the spacing.
    """

    function: str
    order: int
    separate_z: bool | None


@dataclass(frozen=True)
class ChannelPlan:
    """Normalisation of one channel.

    Attributes:
        name: Its name in `dataset.json`.
        scheme: One of `SCHEMES`.
        is_masked: Whether a z-score is computed inside the non-zero mask.
        intensities: Mean, standard deviation and percentiles of the training, for CT.
    """

    name: str
    scheme: str
    is_masked: bool
    intensities: Mapping[str, float]


@dataclass(frozen=True)
class LabelPlan:
    """Labels of the result.

    Attributes:
        names: Label name to value, without background and ignore label.
        region_values: Value of each head of a network for regions, painted in this order; None for
            a network whose heads are classes.
        num_heads: Heads of the network.
        values: Values of a label map, without the background, in rising order.
    """

    names: dict[str, int]
    region_values: tuple[int, ...] | None
    num_heads: int
    values: tuple[int, ...]


@dataclass(frozen=True)
class NnunetPlan:
    """What decides how a network of nnU-Net sees a scan.

    Attributes:
        configuration: Its name.
        spacing_mm: Spacing of the network's input, transposed; the first of a 2D network is that of
            the scan, see `for_scan`.
        patch_size: Tile in voxels, transposed; one plane of a 2D network.
        transpose: Stored axis of each axis of the transposed array.
        channels: Normalisation of each channel.
        image_resampling: Of the images.
        logits_resampling: Of the logits.
        labels: Labels of the result.
        network: `class`, `arguments` and `divisor` of the input size of the network.
        orientation: `stored` or `RAS`, by the reader of the plan.
        dataset_name: Name of the data set.
        is_2d: Whether the network sees planes of the first axis one by one.
        previous_stage: Configuration whose labels are further channels; None without a cascade.
        labels_resampling: Of these labels.
    """

    configuration: str
    spacing_mm: tuple[float, float, float]
    patch_size: Shape
    transpose: tuple[int, int, int]
    channels: tuple[ChannelPlan, ...]
    image_resampling: ResamplingPlan
    logits_resampling: ResamplingPlan
    labels: LabelPlan
    network: Mapping[str, Any]
    orientation: str
    dataset_name: str
    is_2d: bool = False
    previous_stage: str | None = None
    labels_resampling: ResamplingPlan | None = None

    @property
    def num_image_channels(self) -> int:
        """Channels of a prepared image: those of the scan, and one with all previous labels."""
        return len(self.channels) + (self.previous_stage is not None)

    @property
    def num_inputs(self) -> int:
        """Channels of the network's input: those of the scan, and one for each previous label."""
        return len(self.channels) + len(self.previous_values)

    @property
    def previous_values(self) -> tuple[int, ...]:
        """Values of the labels of the previous stage, in the order of their channels."""
        return () if self.previous_stage is None else self.labels.values

    def for_scan(self, spacing_mm: tuple[float, float, float]) -> NnunetPlan:
        """Return the plan for a scan of a spacing, transposed: a 2D network keeps its planes."""
        if not self.is_2d:
            return self
        return replace(self, spacing_mm=(spacing_mm[0], *self.spacing_mm[1:]))


def configurations_of(plans: Any) -> dict[str, dict[str, Any]]:
    """Resolve the inheritance of all configurations.

    Raises:
        PlanError: If the plans are damaged.
    """
    listed = _mapping(_mapping(plans, "the plans").get("configurations"), "configurations")
    return {name: _resolved(listed, name, ()) for name in listed}


def _resolved(listed: Mapping[str, Any], name: str, heirs: tuple[str, ...]) -> dict[str, Any]:
    """Keys of a configuration with those that it inherits.

    Args:
        listed: All configurations as the plans list them.
        name: The configuration.
        heirs: Configurations that inherit from it, to find a circle.
    """
    if name in heirs or name not in listed:
        raise PlanError(f"configurations.{name}: inherits from itself, or is missing")
    configuration = dict(_mapping(listed[name], f"configurations.{name}"))
    parent = configuration.pop("inherits_from", None)
    if parent is None:
        return configuration
    return {**_resolved(listed, str(parent), (*heirs, name)), **configuration}


def read_plan(plans: Any, dataset: Any, name: str) -> NnunetPlan:
    """Check the plan of one configuration.

    Args:
        plans: Content of `plans.json`.
        dataset: Content of `dataset.json`.
        name: Name of the configuration.

    Raises:
        PlanError: If the plan is damaged, or asks for something that is not supported.
    """
    plans = _mapping(plans, "the plans")
    dataset = _mapping(dataset, "dataset.json")
    configurations = configurations_of(plans)
    if name not in configurations:
        raise PlanError(
            f"has no configuration {name}, but {', '.join(configurations) or 'none at all'}"
        )
    configuration = configurations[name]
    _refuse_unsupported(configuration)
    transpose = tuple(_integers(plans, "transpose_forward", 3, 0, 2))
    if sorted(transpose) != [0, 1, 2]:
        raise PlanError(f"transpose_forward: expected an order of three axes, got {transpose}")
    is_2d = _is_2d(configuration)
    num_axes = 2 if is_2d else 3
    spacing_mm = _numbers(configuration, "spacing", num_axes, MIN_SPACING_MM, MAX_SPACING_MM)
    patch_size = _integers(configuration, "patch_size", num_axes, 1, MAX_PATCH)
    network = _read_network(configuration, patch_size)
    if is_2d:
        spacing_mm.insert(0, 1.0)
        patch_size.insert(0, 1)
    previous_stage = _read_previous_stage(configuration, configurations)
    labels_resampling = None
    if previous_stage is not None:
        labels_resampling = _read_labels_resampling(configuration)
    reader = plans.get("image_reader_writer")
    if not isinstance(reader, str) or reader not in READERS:
        raise PlanError(
            f"image_reader_writer: expected one of {', '.join(READERS)}, got {str(reader)[:60]}"
        )
    return NnunetPlan(
        configuration=name,
        spacing_mm=(spacing_mm[0], spacing_mm[1], spacing_mm[2]),
        patch_size=(patch_size[0], patch_size[1], patch_size[2]),
        transpose=(transpose[0], transpose[1], transpose[2]),
        channels=_read_channels(plans, dataset, configuration),
        image_resampling=_read_resampling(configuration, "resampling_fn_data"),
        logits_resampling=_read_resampling(configuration, "resampling_fn_probabilities"),
        labels=read_labels(dataset),
        network=network,
        orientation=_read_orientation(dataset, READERS[str(reader)]),
        dataset_name=str(plans.get("dataset_name", "nnU-Net"))[:200],
        is_2d=is_2d,
        previous_stage=previous_stage,
        labels_resampling=labels_resampling,
    )


def _refuse_unsupported(configuration: Mapping[str, Any]) -> None:
    """Refuse what medseg does not run.

    Raises:
        PlanError: With the reason.
    """
    preprocessor = configuration.get("preprocessor_name", "DefaultPreprocessor")
    if preprocessor != "DefaultPreprocessor":
        raise PlanError(
            f"preprocessor_name: expected DefaultPreprocessor, got {str(preprocessor)[:60]}, whose "
            "steps are not known"
        )


def _is_2d(configuration: Mapping[str, Any]) -> bool:
    """Whether a configuration has tiles of two axes."""
    patch = configuration.get("patch_size")
    return isinstance(patch, list) and len(patch) == 2


def _read_previous_stage(
    configuration: Mapping[str, Any], configurations: Mapping[str, Any]
) -> str | None:
    """Name of the configuration that a cascade goes on from.

    Raises:
        PlanError: If there is none of the name, or it is the second stage of a cascade itself.
    """
    name = configuration.get("previous_stage")
    if name is None:
        return None
    if name not in configurations or configurations[name].get("previous_stage") is not None:
        raise PlanError(
            f"previous_stage: expected a configuration that needs no other, got {str(name)[:60]}"
        )
    return str(name)


def read_labels(dataset: Mapping[str, Any]) -> LabelPlan:
    """Read the labels of `dataset.json`.

    Heads are classes in the order of their values, or regions in the order of the file, whose
    values are those of `regions_class_order`.

    Raises:
        PlanError: If they are damaged, or their values leave a gap.
    """
    labels = _mapping(dataset.get("labels"), "labels in dataset.json")
    if labels.get("background") != 0:
        raise PlanError("labels in dataset.json: expected background: 0")
    # No head predicts the label of ignored voxels.
    members = {name: labels[name] for name in labels if name not in ("background", "ignore")}
    # A label of several values is a region, which may overlap others.
    if any(isinstance(value, list) and len(value) > 1 for value in members.values()):
        return _read_regions(members, dataset)
    names: dict[str, int] = {}
    for name, value in members.items():
        number = value[0] if isinstance(value, list) and len(value) == 1 else value
        names[str(name)] = _integer(number, f"labels.{name} in dataset.json", 1, MAX_HEADS)
    values = sorted(names.values())
    # A head is found by its value: a gap would shift all later ones.
    if not values or values != list(range(1, 1 + len(values))):
        raise PlanError(
            f"labels in dataset.json: expected the values 1, 2, … without a gap, got {values}"
        )
    return LabelPlan(names, None, 1 + len(values), tuple(values))


def _read_regions(regions: Mapping[str, Any], dataset: Mapping[str, Any]) -> LabelPlan:
    """Read the labels of a network whose heads are regions.

    Args:
        regions: Name of each region to the values that it is made of.
        dataset: Content of `dataset.json`.

    Raises:
        PlanError: If `regions_class_order` does not name one value for each region.
    """
    order = dataset.get("regions_class_order")
    if not isinstance(order, list) or len(order) != len(regions):
        raise PlanError(
            f"regions_class_order in dataset.json: expected {len(regions)} values, one for each "
            f"region, got {order}"
        )
    painted = tuple(_integers(dataset, "regions_class_order", len(order), 1, MAX_HEADS))
    if len(set(painted)) != len(painted):
        raise PlanError(f"regions_class_order in dataset.json: {order} has a value twice")
    names = dict(zip(regions, painted, strict=True))
    return LabelPlan(names, painted, len(painted), _map_values(regions))


def _map_values(regions: Mapping[str, Any]) -> tuple[int, ...]:
    """Values of the label maps that regions are made of, without the background."""
    values: set[int] = set()
    for name, members in regions.items():
        for value in _flat(members):
            values.add(_integer(value, f"labels.{name} in dataset.json", 0, MAX_HEADS))
    return tuple(sorted(values - {0}))


def _read_channels(
    plans: Mapping[str, Any], dataset: Mapping[str, Any], configuration: Mapping[str, Any]
) -> tuple[ChannelPlan, ...]:
    """Read the normalisation of each channel.

    Raises:
        PlanError: If lists have different lengths, or a scheme is not supported.
    """
    listed = dataset.get("channel_names", dataset.get("modality"))
    names = [str(name) for name in _mapping(listed, "channel_names in dataset.json").values()]
    schemes = configuration.get("normalization_schemes")
    masked = configuration.get("use_mask_for_norm")
    for key, values in (("normalization_schemes", schemes), ("use_mask_for_norm", masked)):
        if not isinstance(values, list) or len(values) != len(names):
            raise PlanError(
                f"{key}: expected a list of {len(names)}, one for each channel of dataset.json"
            )
    assert isinstance(schemes, list)
    assert isinstance(masked, list)
    # Version 2.0 called it by modality.
    intensities = plans.get(
        "foreground_intensity_properties_per_channel",
        plans.get("foreground_intensity_properties_by_modality", {}),
    )
    channels = []
    for number, (name, scheme) in enumerate(zip(names, schemes, strict=True)):
        if scheme not in SCHEMES:
            raise PlanError(
                f"normalization_schemes: expected {', '.join(SCHEMES)}, got {str(scheme)[:60]}, "
                "which is not supported"
            )
        # Other schemes take their statistics from the scan.
        statistics: dict[str, float] = {}
        if scheme == "CTNormalization":
            statistics = _read_intensities(intensities, number)
        channels.append(ChannelPlan(name, scheme, masked[number] is True, statistics))
    return tuple(channels)


def _read_intensities(intensities: Any, channel: int) -> dict[str, float]:
    """Read the statistics of the training for one channel."""
    key = "foreground_intensity_properties_per_channel"
    section = _mapping(_mapping(intensities, key).get(str(channel)), f"{key}.{channel}")
    statistics = {}
    for name in ("mean", "std", "percentile_00_5", "percentile_99_5"):
        statistics[name] = _number(section.get(name), name, -math.inf, math.inf)
    return statistics


def _read_labels_resampling(configuration: Mapping[str, Any]) -> ResamplingPlan:
    """Read how the labels of the previous stage are resampled.

    Raises:
        PlanError: As `_read_resampling`, or if torch does it.
    """
    resampling = _read_resampling(configuration, "resampling_fn_seg")
    if resampling.function == TORCH:
        raise PlanError(
            f"resampling_fn_seg: {TORCH} of the labels of a previous stage is not supported, "
            f"but {SPLINE} and {NONE}"
        )
    return resampling


def _read_resampling(configuration: Mapping[str, Any], key: str) -> ResamplingPlan:
    """Read one of the resampling functions.

    Raises:
        PlanError: If it is not known, or has an order that is not supported.
    """
    function = configuration.get(key)
    if function not in (SPLINE, TORCH, NONE):
        raise PlanError(
            f"{key}: expected {SPLINE}, {TORCH} or {NONE}, got {str(function)[:60]}, which is not "
            "supported yet"
        )
    arguments = _mapping(configuration.get(f"{key}_kwargs", {}), f"{key}_kwargs")
    separate_z = arguments.get("force_separate_z")
    # A missing key has another meaning in each function of nnU-Net.
    if function == SPLINE and "force_separate_z" not in arguments:
        separate_z = False
    if separate_z not in (None, True, False):
        raise PlanError(f"{key}_kwargs.force_separate_z: expected true, false or null")
    if function == SPLINE:
        order = _integer(arguments.get("order", 3), f"{key}_kwargs.order", 0, 5)
        order_z = _integer(arguments.get("order_z", 0), f"{key}_kwargs.order_z", 0, 5)
    else:
        order, order_z = 1, 0
    if arguments.get("separate_z_anisotropy_threshold", 3) != 3:
        raise PlanError(f"{key}_kwargs.separate_z_anisotropy_threshold: only 3 is supported")
    modes = arguments.get("mode", "linear"), arguments.get("aniso_axis_mode", "nearest-exact")
    if modes != ("linear", "nearest-exact"):
        raise PlanError(f"{key}_kwargs: the modes {modes} are not supported")
    # A cubic spline filters the whole volume first, but logits come plane by plane; labels are
    # interpolated one by one.
    orders = {"resampling_fn_data": (0, 1, 3), "resampling_fn_seg": (1,)}.get(key, (0, 1))
    if order not in orders or order_z != 0:
        raise PlanError(
            f"{key}_kwargs: order={order} and order_z={order_z} are not supported, but "
            f"order={', '.join(map(str, orders))} and order_z=0"
        )
    return ResamplingPlan(str(function), order, separate_z)


def _read_network(configuration: Mapping[str, Any], patch_size: list[int]) -> dict[str, Any]:
    """Read class and arguments of the network, also from plans before nnU-Net 2.4.

    Returns:
        `class`, `arguments` as plain values, and `divisor` of the input size.

    Raises:
        PlanError: If its class is not known, or a number is out of range.
    """
    section = configuration.get("architecture")
    if section is None:
        name, arguments = _older_network(configuration)
    else:
        section = _mapping(section, "architecture")
        name = str(section.get("network_class_name", "")).rsplit(".", 1)[-1]
        arguments = dict(_mapping(section.get("arch_kwargs"), "architecture.arch_kwargs"))
    if name not in NETWORKS:
        raise PlanError(
            f"its network is {name[:60] or 'unknown'}, but only {' and '.join(NETWORKS)} are "
            "supported"
        )
    levels = _integer(arguments.get("n_stages"), "n_stages", 1, MAX_LEVELS)
    strides = arguments.get("strides")
    if not isinstance(strides, list) or len(strides) != levels:
        raise PlanError(f"strides: expected a list of {levels}, one for each level")
    num_axes = len(patch_size)
    divisor = []
    for axis in range(num_axes):
        strides_of_axis = [_stride(stride, axis, num_axes) for stride in strides]
        divisor.append(math.prod(strides_of_axis))
    if any(size % step for size, step in zip(patch_size, divisor, strict=True)):
        raise PlanError(
            f"patch_size={patch_size} is no multiple of the product of its strides, {divisor}"
        )
    _check_layers(arguments, NETWORKS[name])
    # A plane of a 2D network is a volume of one plane.
    return {"class": name, "arguments": arguments, "divisor": [1] * (3 - num_axes) + divisor}


def _check_layers(arguments: Mapping[str, Any], blocks_key: str) -> None:
    """Check the numbers from which layers are built; one number counts for all levels.

    Raises:
        PlanError: If a number is out of range.
    """
    # The network is built before its weights are compared: a hostile plan would ask for any size.
    for key in (blocks_key, "n_conv_per_stage_decoder"):
        blocks = arguments.get(key)
        if not isinstance(blocks, list):
            blocks = [blocks]
        for number in blocks:
            _integer(number, key, 1, MAX_BLOCKS)
    for number in _flat(arguments.get("features_per_stage")):
        _integer(number, "features_per_stage", 1, MAX_COUNT)
    # A kernel has a size for each axis.
    for number in _flat(arguments.get("kernel_sizes")):
        _integer(number, "kernel_sizes", 1, MAX_KERNEL_SIZE)


def _older_network(configuration: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Translate the keys of plans before nnU-Net 2.4; the rest is what its trainer had then."""
    name = str(configuration.get("UNet_class_name", ""))
    encoder = configuration.get("n_conv_per_stage_encoder")
    if not isinstance(encoder, list):
        raise PlanError("has neither `architecture` nor the keys of a U-Net")
    # Features of the first level, which double with each level up to a limit.
    first_features = _integer(
        configuration.get("UNet_base_num_features"), "UNet_base_num_features", 1, MAX_COUNT
    )
    max_features = _integer(
        configuration.get("unet_max_num_features"), "unet_max_num_features", 1, MAX_COUNT
    )
    levels = _integer(len(encoder), "n_conv_per_stage_encoder", 1, MAX_LEVELS)
    axes = "2d" if _is_2d(configuration) else "3d"
    return name, {
        "n_stages": levels,
        "features_per_stage": [
            min(first_features * 2**level, max_features) for level in range(levels)
        ],
        "conv_op": f"torch.nn.modules.conv.Conv{axes}",
        "kernel_sizes": configuration.get("conv_kernel_sizes"),
        "strides": configuration.get("pool_op_kernel_sizes"),
        NETWORKS.get(name, "n_conv_per_stage"): encoder,
        "n_conv_per_stage_decoder": configuration.get("n_conv_per_stage_decoder"),
        "conv_bias": True,
        "norm_op": f"torch.nn.modules.instancenorm.InstanceNorm{axes}",
        "norm_op_kwargs": {"eps": 1e-05, "affine": True},
        "dropout_op": None,
        "dropout_op_kwargs": None,
        "nonlin": "torch.nn.LeakyReLU",
        "nonlin_kwargs": {"inplace": True},
    }


def _stride(stride: Any, axis: int, num_axes: int) -> int:
    """Stride of a level along an axis; a single number is that of all axes."""
    if isinstance(stride, list) and len(stride) == num_axes:
        stride = stride[axis]
    return _integer(stride, "strides", 1, 16)


def _flat(value: Any) -> list[Any]:
    """List the numbers of nested lists of two levels."""
    if not isinstance(value, list):
        return [value]
    flat: list[Any] = []
    for item in value:
        if isinstance(item, list):
            flat += item
        else:
            flat.append(item)
    return flat


def _read_orientation(dataset: Mapping[str, Any], of_reader: str) -> str:
    """Orientation in which the network sees a scan: that of `dataset.json`, else of the reader."""
    stated = dataset.get("image_orientation")
    if stated is None:
        return of_reader
    if stated not in ("stored", "RAS", "LPS"):
        raise PlanError(
            "image_orientation in dataset.json: expected stored, RAS or LPS, got "
            f"{str(stated)[:60]}"
        )
    return str(stated)


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    """Return a value that must be a mapping; `name` is for the message, as in those below."""
    if not isinstance(value, dict):
        raise PlanError(f"{name}: expected a mapping, got {type(value).__name__}")
    return value


def _number(value: Any, name: str, low: float, high: float) -> float:
    """Return a value that must be a finite number in a range, bounds included."""
    # To Python, true is the number 1.
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # A whole number may be too large to be a float, so the range comes first.
    if not is_number or not low <= value <= high or not math.isfinite(value):
        raise PlanError(
            f"{name}: expected a number from {low:g} to {high:g}, got {str(value)[:60]}"
        )
    return float(value)


def _integer(value: Any, name: str, low: int, high: int) -> int:
    """Return a value that must be a whole number in a range; 2.0 is one."""
    number = _number(value, name, low, high)
    if number != int(number):
        raise PlanError(f"{name}: expected a whole number, got {value}")
    return int(number)


def _numbers(
    section: Mapping[str, Any], key: str, count: int, low: float, high: float
) -> list[float]:
    """Return a key that must be a list of so many numbers in a range."""
    values = section.get(key)
    if not isinstance(values, list) or len(values) != count:
        raise PlanError(f"{key}: expected {count} numbers, got {str(values)[:60]}")
    return [_number(value, key, low, high) for value in values]


def _integers(section: Mapping[str, Any], key: str, count: int, low: int, high: int) -> list[int]:
    """Return a key that must be a list of so many whole numbers in a range."""
    return [_integer(value, key, low, high) for value in _numbers(section, key, count, low, high)]
