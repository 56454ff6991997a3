"""Plan of one configuration of nnU-Net: the checked content of `plans.json` and `dataset.json`.

Tuples with a value for each axis follow the transposed array of nnU-Net, whose axis a is the stored
axis `transpose[a]`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from medseg.geometry.sizes import Shape
from medseg.io.volume import MIN_SPACING_MM
from medseg.wording import first_few

# nnU-Net's own names of configurations. Users may define others, which can be read too.
USUAL_NAMES = ("3d_fullres", "3d_lowres", "3d_cascade_fullres", "2d")

# Largest value of a label: label maps are uint8.
MAX_LABEL = 255
# Limits far above the values in any plan of nnU-Net, so that a hostile plan cannot keep the program
# busy. `MAX_PATCH` is in voxels along an axis, `MAX_FEATURES` in channels of a level, `MAX_LINEAGE`
# in configurations that inherit from one another. Intensities are computed in float32, which ends
# at 3e38.
MAX_SPACING_MM = 100.0
MAX_INTENSITY = 1e30
MAX_LINEAGE = 100
MAX_PATCH = 1024
MAX_FEATURES = 4096
MAX_LEVELS = 12
MAX_BLOCKS = 100
MAX_KERNEL_SIZE = 31
MAX_STRIDE = 16
# Classes of networks that are supported, by the last part of their names, and the argument of each
# for the number of blocks of each encoder level.
NETWORKS = {"PlainConvUNet": "n_conv_per_stage", "ResidualEncoderUNet": "n_blocks_per_stage"}
# nnU-Net's names of resampling functions: by splines, by torch, and none.
SPLINE = "resample_data_or_seg_to_shape"
TORCH = "resample_torch_fornnunet"
NONE = "no_resampling_hack"
# nnU-Net's names of normalisations.
SCHEMES = (
    "CTNormalization",
    "ZScoreNormalization",
    "NoNormalization",
    "RescaleTo01Normalization",
)
# Orientation in which the network sees a scan, by the reader that the plans name.
READERS = {
    "SimpleITKIO": "stored",
    "NibabelIO": "stored",
    "NibabelIOWithReorient": "RAS",
    "SimpleITKIOWithReorient": "RAS",
}


class PlanError(ValueError):
    """A plan that is damaged or not supported; its message is the end of a sentence."""

    @property
    def sentence(self) -> str:
        """The whole sentence: the file, the message and the cure. The caller adds the path."""
        text = str(self)
        # Messages about `dataset.json` name the file themselves.
        is_about_dataset = text.startswith("dataset.json") or "in dataset.json" in text
        if not is_about_dataset:
            text = f"plans.json {text}"
        return (
            f"{text}; take plans.json and dataset.json as nnU-Net wrote them, or predict with "
            "nnU-Net"
        )


@dataclass(frozen=True)
class ResamplingPlan:
    """Resampling of images or of logits.

    Attributes:
        function: `SPLINE`, `TORCH` or `NONE`.
        order: Order of the spline along all axes but a separate one.
        separate_z: Whether one axis is separate, along which the nearest voxel is taken; None
            decides by the spacing, see `medseg.nnunet.planes.separate_axis`.
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
        is_masked: Whether a z-score takes mean and standard deviation inside the non-zero mask.
        intensities: Mean, standard deviation and percentiles of the training scans, by nnU-Net's
            names; empty unless the scheme is `CTNormalization`.
    """

    name: str
    scheme: str
    is_masked: bool
    intensities: Mapping[str, float]


@dataclass(frozen=True)
class LabelPlan:
    """Labels of the result, and the heads of the network that predict them.

    A head is a channel of the logits. The heads are classes with the background, or regions, which
    may overlap.

    Attributes:
        names: Name of each label or region to its value in the result, without background and
            ignore label.
        region_values: If the heads are regions, the value in the result of each region; where
            regions overlap, the later head wins. None if the heads are classes.
        num_heads: Heads of the network.
        training_values: Values in the label maps of the training, without the background, in rising
            order. They differ from those of `names` if the heads are regions.
    """

    names: dict[str, int]
    region_values: tuple[int, ...] | None
    num_heads: int
    training_values: tuple[int, ...]


@dataclass(frozen=True)
class NnunetPlan:
    """Plan of a network: how a scan becomes its input, and its logits become labels.

    Attributes:
        configuration: Name of the configuration.
        spacing_mm: Spacing of the network's input, transposed. The first number of a 2D network is
            only a placeholder, see `for_scan`.
        patch_size: Tile in voxels, transposed; one plane of a 2D network.
        transpose: Stored axis that becomes axis 0, 1 and 2 of the transposed array.
        channels: Normalisation of each channel.
        image_resampling: Resampling of the images.
        logits_resampling: Resampling of the logits.
        labels: Labels of the result.
        network: `class`, `arguments` and `divisor` of the input size of the network.
        orientation: `stored`, `RAS` or `LPS`: how the network sees a scan.
        dataset_name: Name of the data set.
        is_2d: Whether the network sees the planes across the first axis one by one.
        previous_stage: Configuration of the first stage of a cascade, whose labels are further
            channels; None without a cascade.
        labels_resampling: Resampling of the labels of that stage; None without a cascade.
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
        num_label_channels = 0 if self.previous_stage is None else 1
        return len(self.channels) + num_label_channels

    @property
    def num_inputs(self) -> int:
        """Channels of the network's input: those of the scan, and one for each previous label."""
        return len(self.channels) + len(self.previous_values)

    @property
    def previous_values(self) -> tuple[int, ...]:
        """Values of the labels of the previous stage, in the order of their channels."""
        return () if self.previous_stage is None else self.labels.training_values

    def for_scan(self, spacing_mm: tuple[float, float, float]) -> NnunetPlan:
        """Return the plan for a scan of a given spacing, in the order of the transposed axes.

        Only the plan of a 2D network differs: along the first axis nothing is resampled.
        """
        if not self.is_2d:
            return self
        return replace(self, spacing_mm=(spacing_mm[0], *self.spacing_mm[1:]))


def configurations_of(plans: Any) -> dict[str, dict[str, Any]]:
    """Read all configurations of the plans, each with the keys that it inherits.

    Args:
        plans: Content of `plans.json`.

    Raises:
        PlanError: If the plans are damaged.
    """
    plans = _mapping(plans, "as a whole")
    listed = _mapping(plans.get("configurations"), "configurations")
    return {name: _with_inherited(listed, name) for name in listed}


def _with_inherited(listed: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Add the keys that a configuration inherits to its own.

    Args:
        listed: All configurations as the plans list them.
        name: Name of the configuration.

    Raises:
        PlanError: If the configuration, or one that it inherits from, is missing or inherits from
            itself, or if it inherits from more than `MAX_LINEAGE` others.
    """
    # The configuration, then the one that it inherits from, and so on.
    lineage: list[str] = []
    merged: dict[str, Any] = {}
    parent: Any = name
    while parent is not None:
        parent = str(parent)
        place = f"configurations.{_shown(parent)}"
        if parent in lineage or parent not in listed:
            raise PlanError(f"{place}: inherits from itself, or is missing")
        if len(lineage) > MAX_LINEAGE:
            raise PlanError(
                f"configurations.{_shown(name)}: inherits from more than {MAX_LINEAGE} others"
            )
        lineage.append(parent)
        keys = _mapping(listed[parent], place)
        # Keys that were merged before belong to the heirs, and take precedence.
        merged = {**keys, **merged}
        parent = keys.get("inherits_from")
    merged.pop("inherits_from", None)
    return merged


def read_plan(plans: Any, dataset: Any, name: str) -> NnunetPlan:
    """Read and check the plan of one configuration.

    Args:
        plans: Content of `plans.json`.
        dataset: Content of `dataset.json`.
        name: Name of the configuration.

    Raises:
        PlanError: If the plan is damaged, or asks for something that is not supported.
    """
    plans = _mapping(plans, "as a whole")
    dataset = _mapping(dataset, "dataset.json")
    configurations = configurations_of(plans)
    if name not in configurations:
        listed = first_few(map(_shown, configurations)) or "none at all"
        raise PlanError(f"has no configuration {_shown(name)}, but {listed}")
    configuration = configurations[name]
    _check_preprocessor(configuration)
    transpose = tuple(_integers(plans, "transpose_forward", count=3, low=0, high=2))
    if sorted(transpose) != [0, 1, 2]:
        raise PlanError(f"transpose_forward: expected an order of three axes, got {transpose}")
    is_2d = _is_2d(configuration)
    num_axes = 2 if is_2d else 3
    spacing_mm = _numbers(configuration, "spacing", num_axes, MIN_SPACING_MM, MAX_SPACING_MM)
    patch_size = _integers(configuration, "patch_size", num_axes, 1, MAX_PATCH)
    network = _read_network(configuration, patch_size)
    if is_2d:
        # A tile is one plane. The spacing across planes is that of each scan, see `for_scan`.
        patch_size.insert(0, 1)
        spacing_mm.insert(0, 1.0)
    previous_stage = _read_previous_stage(configuration, configurations)
    labels_resampling = None
    if previous_stage is not None:
        labels_resampling = _read_labels_resampling(configuration)
    reader = plans.get("image_reader_writer")
    if not isinstance(reader, str) or reader not in READERS:
        raise PlanError(
            f"image_reader_writer: expected one of {', '.join(READERS)}, got {_shown(reader)}"
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
        orientation=_read_orientation(dataset, READERS[reader]),
        # Cut, because the name is foreign text of any length.
        dataset_name=str(plans.get("dataset_name", "nnU-Net"))[:200],
        is_2d=is_2d,
        previous_stage=previous_stage,
        labels_resampling=labels_resampling,
    )


def _check_preprocessor(configuration: Mapping[str, Any]) -> None:
    """Refuse a preprocessor whose steps medseg does not know.

    Raises:
        PlanError: If the plan names another class than nnU-Net's own.
    """
    preprocessor = configuration.get("preprocessor_name", "DefaultPreprocessor")
    if preprocessor != "DefaultPreprocessor":
        raise PlanError(
            f"preprocessor_name: expected DefaultPreprocessor, got {_shown(preprocessor)}, whose "
            "steps are not known"
        )


def _is_2d(configuration: Mapping[str, Any]) -> bool:
    """Whether a configuration has tiles of two axes."""
    patch_size = configuration.get("patch_size")
    return isinstance(patch_size, list) and len(patch_size) == 2


def _read_previous_stage(
    configuration: Mapping[str, Any], configurations: Mapping[str, Any]
) -> str | None:
    """Read the name of the first stage of a cascade; None for other configurations.

    Raises:
        PlanError: If there is no configuration of this name, or it is itself a second stage.
    """
    name = configuration.get("previous_stage")
    if name is None:
        return None
    # The name becomes the end of a folder's name, so it must not be a path.
    is_folder_name = isinstance(name, str) and PurePath(name).name == name
    is_listed = is_folder_name and name in configurations
    if not is_listed or configurations[name].get("previous_stage") is not None:
        raise PlanError(
            f"previous_stage: expected a configuration that needs no other, got {_shown(name)}"
        )
    return str(name)


def read_labels(dataset: Mapping[str, Any]) -> LabelPlan:
    """Read the labels of `dataset.json`.

    Heads are classes in the order of their values; or they are regions in the order of the file,
    and `regions_class_order` has the value that each region gets in the result.

    Raises:
        PlanError: If they are damaged, or their values leave a gap.
    """
    labels = _mapping(dataset.get("labels"), "labels in dataset.json")
    if labels.get("background") != 0:
        raise PlanError("labels in dataset.json: expected background: 0")
    # No head predicts the label of ignored voxels.
    predicted = {name: labels[name] for name in labels if name not in ("background", "ignore")}
    # A label of several values is a region, which may overlap others.
    if any(isinstance(value, list) and len(value) > 1 for value in predicted.values()):
        return _read_regions(predicted, dataset)
    names: dict[str, int] = {}
    for name, value in predicted.items():
        # A list of one value is a class too.
        is_list_of_one = isinstance(value, list) and len(value) == 1
        number = value[0] if is_list_of_one else value
        names[name] = _integer(number, f"labels.{_shown(name)} in dataset.json", 1, MAX_LABEL)
    values = sorted(names.values())
    # The value of a class is the number of its head, so a gap would shift all later ones.
    if not values or values != list(range(1, 1 + len(values))):
        raise PlanError(
            "labels in dataset.json: expected the values 1, 2, … without a gap, got "
            f"{_shown(values)}"
        )
    # One head more than labels: that of the background.
    return LabelPlan(
        names, region_values=None, num_heads=1 + len(values), training_values=tuple(values)
    )


def _read_regions(regions: Mapping[str, Any], dataset: Mapping[str, Any]) -> LabelPlan:
    """Read the labels of a network whose heads are regions.

    Args:
        regions: Name of each region to the values of the label maps that it is made of.
        dataset: Content of `dataset.json`.

    Raises:
        PlanError: If `regions_class_order` does not name one value for each region.
    """
    order = dataset.get("regions_class_order")
    if not isinstance(order, list) or len(order) != len(regions):
        raise PlanError(
            f"regions_class_order in dataset.json: expected {len(regions)} values, one for each "
            f"region, got {_shown(order)}"
        )
    region_values = tuple(_integers(dataset, "regions_class_order", len(order), 1, MAX_LABEL))
    if len(set(region_values)) != len(region_values):
        raise PlanError(f"regions_class_order in dataset.json: {_shown(order)} has a value twice")
    names = dict(zip(regions, region_values, strict=True))
    # The background is what no region covers, and has no head.
    return LabelPlan(
        names,
        region_values=region_values,
        num_heads=len(region_values),
        training_values=_label_map_values(regions),
    )


def _label_map_values(regions: Mapping[str, Any]) -> tuple[int, ...]:
    """List the values of the label maps that regions are made of, without the background."""
    values: set[int] = set()
    for name, members in regions.items():
        for value in _flat(members):
            values.add(_integer(value, f"labels.{_shown(name)} in dataset.json", 0, MAX_LABEL))
    return tuple(sorted(values - {0}))


def _read_channels(
    plans: Mapping[str, Any], dataset: Mapping[str, Any], configuration: Mapping[str, Any]
) -> tuple[ChannelPlan, ...]:
    """Read the normalisation of each channel.

    Raises:
        PlanError: If lists have different lengths, or a scheme is not supported.
    """
    # Older data sets call the names of the channels `modality`.
    section = dataset.get("channel_names", dataset.get("modality"))
    names = [str(name) for name in _mapping(section, "channel_names in dataset.json").values()]
    schemes = configuration.get("normalization_schemes")
    masked = configuration.get("use_mask_for_norm")
    for key, values in (("normalization_schemes", schemes), ("use_mask_for_norm", masked)):
        if not isinstance(values, list) or len(values) != len(names):
            raise PlanError(
                f"{key}: expected a list of {len(names)}, one for each channel of dataset.json"
            )
    # For the type checker: the loop above has checked both lists.
    assert isinstance(schemes, list)
    assert isinstance(masked, list)
    # nnU-Net 2.0 used the second name.
    intensities = plans.get(
        "foreground_intensity_properties_per_channel",
        plans.get("foreground_intensity_properties_by_modality", {}),
    )
    channels = []
    for number, (name, scheme) in enumerate(zip(names, schemes, strict=True)):
        if scheme not in SCHEMES:
            raise PlanError(
                f"normalization_schemes: expected {', '.join(SCHEMES)}, got {_shown(scheme)}, "
                "which is not supported"
            )
        # Other schemes compute their statistics from the scan.
        statistics: dict[str, float] = {}
        if scheme == "CTNormalization":
            statistics = _read_intensities(intensities, number)
        # null counts as false.
        is_masked = _flag(masked[number], "use_mask_for_norm") is True
        channels.append(ChannelPlan(name, scheme, is_masked, statistics))
    return tuple(channels)


def _read_intensities(intensities: Any, channel: int) -> dict[str, float]:
    """Read the statistics of one channel over the training scans.

    Raises:
        PlanError: If one is missing, or is no number up to `MAX_INTENSITY`.
    """
    key = "foreground_intensity_properties_per_channel"
    by_channel = _mapping(intensities, key)
    section = _mapping(by_channel.get(str(channel)), f"{key}.{channel}")
    statistics = {}
    for name in ("mean", "std", "percentile_00_5", "percentile_99_5"):
        statistics[name] = _number(section.get(name), name, -MAX_INTENSITY, MAX_INTENSITY)
    return statistics


def _read_labels_resampling(configuration: Mapping[str, Any]) -> ResamplingPlan:
    """Read how the labels of the previous stage are resampled.

    Raises:
        PlanError: As `_read_resampling`, or if the function is `TORCH`.
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

    Args:
        configuration: One of `configurations_of`.
        key: Key of the function; its arguments are below `<key>_kwargs`.

    Raises:
        PlanError: If the function is not known, or has arguments that are not supported.
    """
    function = configuration.get(key)
    if function not in (SPLINE, TORCH, NONE):
        raise PlanError(
            f"{key}: expected {SPLINE}, {TORCH} or {NONE}, got {_shown(function)}, which is not "
            "supported yet"
        )
    arguments = _mapping(configuration.get(f"{key}_kwargs", {}), f"{key}_kwargs")
    # Where the key is missing, nnU-Net's spline function takes False, its torch function None.
    default = False if function == SPLINE else None
    separate_z = _flag(arguments.get("force_separate_z", default), f"{key}_kwargs.force_separate_z")
    # Torch interpolates linearly. `order_z` is the order along the separate axis.
    order = 1
    order_z = 0
    if function == SPLINE:
        order = _integer(arguments.get("order", 3), f"{key}_kwargs.order", 0, 5)
        order_z = _integer(arguments.get("order_z", 0), f"{key}_kwargs.order_z", 0, 5)
    # The threshold is `ANISOTROPY` in `medseg.nnunet.planes`.
    if arguments.get("separate_z_anisotropy_threshold", 3) != 3:
        raise PlanError(f"{key}_kwargs.separate_z_anisotropy_threshold: only 3 is supported")
    # Arguments of `TORCH`: its interpolation, and that along a separate axis.
    modes = arguments.get("mode", "linear"), arguments.get("aniso_axis_mode", "nearest-exact")
    if modes != ("linear", "nearest-exact"):
        raise PlanError(f"{key}_kwargs: the modes {_shown(modes)} are not supported")
    if key == "resampling_fn_data":
        supported_orders = [0, 1, 3]
    elif key == "resampling_fn_seg":
        # `medseg.nnunet.previous` interpolates the indicator of each label linearly.
        supported_orders = [1]
    else:
        # Not 3: a cubic spline filters a whole volume first, but logits come plane by plane.
        supported_orders = [0, 1]
    if order not in supported_orders or order_z != 0:
        raise PlanError(
            f"{key}_kwargs: order={order} and order_z={order_z} are not supported, but "
            f"order={', '.join(map(str, supported_orders))} and order_z=0"
        )
    return ResamplingPlan(str(function), order, separate_z)


def _read_network(configuration: Mapping[str, Any], patch_size: list[int]) -> dict[str, Any]:
    """Read class and arguments of the network, also from plans before nnU-Net 2.4.

    Args:
        configuration: One of `configurations_of`.
        patch_size: Its tile, of two or three axes.

    Returns:
        `class`, `arguments` as plain values, and `divisor` of the input size along three axes.

    Raises:
        PlanError: If its class is not known, or a number is out of range.
    """
    section = configuration.get("architecture")
    if section is None:
        class_name, arguments = _older_network(configuration)
    else:
        section = _mapping(section, "architecture")
        class_name = str(section.get("network_class_name", "")).rsplit(".", 1)[-1]
        arguments = dict(_mapping(section.get("arch_kwargs"), "architecture.arch_kwargs"))
    if class_name not in NETWORKS:
        raise PlanError(
            f"its network is {_shown(class_name) or 'unknown'}, but only "
            f"{' and '.join(NETWORKS)} are supported"
        )
    num_levels = _integer(arguments.get("n_stages"), "n_stages", 1, MAX_LEVELS)
    level_strides = arguments.get("strides")
    if not isinstance(level_strides, list) or len(level_strides) != num_levels:
        raise PlanError(f"strides: expected a list of {num_levels}, one for each level")
    num_axes = len(patch_size)
    # Product of the strides of all levels, along each axis.
    divisor = []
    for axis in range(num_axes):
        axis_strides = [_stride(stride, axis, num_axes) for stride in level_strides]
        divisor.append(math.prod(axis_strides))
    if any(size % factor for size, factor in zip(patch_size, divisor, strict=True)):
        raise PlanError(
            f"patch_size={patch_size} is no multiple of the product of its strides, {divisor}"
        )
    _check_layers(arguments, NETWORKS[class_name])
    if num_axes == 2:
        # For medseg a plane is a volume of one plane.
        divisor.insert(0, 1)
    return {"class": class_name, "arguments": arguments, "divisor": divisor}


def _check_layers(arguments: Mapping[str, Any], blocks_key: str) -> None:
    """Check the numbers from which layers are built: a list by level, or one number for all levels.

    The network is built before its weights are compared, so a hostile plan could ask for any size.

    Args:
        arguments: Arguments of the network.
        blocks_key: The argument for the number of blocks of each encoder level.

    Raises:
        PlanError: If a number is out of range.
    """
    for key in (blocks_key, "n_conv_per_stage_decoder"):
        blocks = arguments.get(key)
        if not isinstance(blocks, list):
            blocks = [blocks]
        for number in blocks:
            _integer(number, key, 1, MAX_BLOCKS)
    for number in _flat(arguments.get("features_per_stage")):
        _integer(number, "features_per_stage", 1, MAX_FEATURES)
    # A kernel has one size for each axis.
    for number in _flat(arguments.get("kernel_sizes")):
        _integer(number, "kernel_sizes", 1, MAX_KERNEL_SIZE)


def _older_network(configuration: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Translate the keys of plans before nnU-Net 2.4 to the name and arguments of a network.

    Arguments that those plans do not hold get the values that the trainer had then.
    """
    class_name = str(configuration.get("UNet_class_name", ""))
    encoder_blocks = configuration.get("n_conv_per_stage_encoder")
    if not isinstance(encoder_blocks, list):
        raise PlanError("has neither `architecture` nor the keys of a U-Net")
    # Features double with each level up to a limit.
    first_features = _integer(
        configuration.get("UNet_base_num_features"), "UNet_base_num_features", 1, MAX_FEATURES
    )
    max_features = _integer(
        configuration.get("unet_max_num_features"), "unet_max_num_features", 1, MAX_FEATURES
    )
    num_levels = _integer(len(encoder_blocks), "n_conv_per_stage_encoder", 1, MAX_LEVELS)
    features = [min(first_features * 2**level, max_features) for level in range(num_levels)]
    dimensions = "2d" if _is_2d(configuration) else "3d"
    return class_name, {
        "n_stages": num_levels,
        "features_per_stage": features,
        "conv_op": f"torch.nn.modules.conv.Conv{dimensions}",
        "kernel_sizes": configuration.get("conv_kernel_sizes"),
        "strides": configuration.get("pool_op_kernel_sizes"),
        # `_read_network` refuses an unknown class.
        NETWORKS.get(class_name, "n_conv_per_stage"): encoder_blocks,
        "n_conv_per_stage_decoder": configuration.get("n_conv_per_stage_decoder"),
        "conv_bias": True,
        "norm_op": f"torch.nn.modules.instancenorm.InstanceNorm{dimensions}",
        "norm_op_kwargs": {"eps": 1e-05, "affine": True},
        "dropout_op": None,
        "dropout_op_kwargs": None,
        "nonlin": "torch.nn.LeakyReLU",
        "nonlin_kwargs": {"inplace": True},
    }


def _stride(stride: Any, axis: int, num_axes: int) -> int:
    """Read the stride of a level along an axis; a single number is that of all axes."""
    if isinstance(stride, list) and len(stride) == num_axes:
        stride = stride[axis]
    return _integer(stride, "strides", 1, MAX_STRIDE)


def _flat(value: Any) -> list[Any]:
    """List the items of a list, and of the lists in it; a single value is a list of one."""
    if not isinstance(value, list):
        return [value]
    flat: list[Any] = []
    for item in value:
        if isinstance(item, list):
            flat += item
        else:
            flat.append(item)
    return flat


def _read_orientation(dataset: Mapping[str, Any], reader_orientation: str) -> str:
    """Read the orientation in which the network sees a scan.

    Args:
        dataset: Content of `dataset.json`, which may state it.
        reader_orientation: Orientation by the reader of the plans, if it does not.

    Raises:
        PlanError: If another orientation is stated.
    """
    stated = dataset.get("image_orientation")
    if stated is None:
        return reader_orientation
    if stated not in ("stored", "RAS", "LPS"):
        raise PlanError(
            f"image_orientation in dataset.json: expected stored, RAS or LPS, got {_shown(stated)}"
        )
    return str(stated)


def _shown(value: Any) -> str:
    """Write a value of a foreign plan for a message: one line of at most 60 characters."""
    return " ".join(str(value).split())[:60]


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    """Return a value that must be a mapping.

    As in the functions below, `name` is for the message of the `PlanError` that is raised.
    """
    if not isinstance(value, dict):
        raise PlanError(f"{name}: expected a mapping, got {type(value).__name__}")
    return value


def _number(value: Any, name: str, low: float, high: float) -> float:
    """Return a value that must be a number in a range, bounds included."""
    # In Python a bool is an int.
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # NaN lies in no range.
    if not is_number or not low <= value <= high:
        raise PlanError(f"{name}: expected a number from {low:g} to {high:g}, got {_shown(value)}")
    return float(value)


def _flag(value: Any, name: str) -> bool | None:
    """Return a value that must be true, false or null.

    As in nnU-Net, 1 and 0 count as true and false.
    """
    if value is None:
        return None
    # `in` compares by `==`, so that 1 and 0 are found too.
    if value not in (True, False):
        raise PlanError(f"{name}: expected true, false or null, got {_shown(value)}")
    return bool(value)


def _integer(value: Any, name: str, low: int, high: int) -> int:
    """Return a value that must be a whole number in a range, bounds included; 2.0 is 2."""
    number = _number(value, name, low, high)
    if number != int(number):
        raise PlanError(f"{name}: expected a whole number, got {_shown(value)}")
    return int(number)


def _numbers(
    section: Mapping[str, Any], key: str, count: int, low: float, high: float
) -> list[float]:
    """Return the value of a key, which must be a list of `count` numbers in a range."""
    values = section.get(key)
    if not isinstance(values, list) or len(values) != count:
        raise PlanError(f"{key}: expected {count} numbers, got {_shown(values)}")
    return [_number(value, key, low, high) for value in values]


def _integers(section: Mapping[str, Any], key: str, count: int, low: int, high: int) -> list[int]:
    """Return the value of a key, which must be a list of `count` whole numbers in a range."""
    numbers = _numbers(section, key, count, low, high)
    return [_integer(number, key, low, high) for number in numbers]
