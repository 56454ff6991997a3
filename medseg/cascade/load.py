"""Trained stages, loaded from checkpoints or safetensors files."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from medseg.cascade.bound import DiceBound
from medseg.cascade.stage import TrainedStage
from medseg.conf_folder import conf_dir
from medseg.errors import UserError, first_line, is_out_of_memory
from medseg.geometry.grid_rule import GridRule
from medseg.inference.clean_up import check_clean_up
from medseg.inference.openvino import has_openvino, openvino_bytes, quickest_backend, use_openvino
from medseg.inference.options import Backend, InferenceOptions
from medseg.io.text import read_text
from medseg.memory.device import stage_precision
from medseg.memory.options import Precision
from medseg.memory.precision import HALF
from medseg.memory.switches import use_channels_last
from medseg.models.blocks import ScaledConv3d
from medseg.models.described import make_described_network, to_tuples
from medseg.models.options import UNET
from medseg.models.stage_network import StageNetwork
from medseg.models.traits import build_on_meta
from medseg.preprocess.options import Resampling
from medseg.preprocess.resample import ANTIALIASED
from medseg.targets import TARGET, check_target
from medseg.task import CleanUp, Task
from medseg.task_options import code_texts
from medseg.weights.checks import NATIVE, bounded_parts, check_ranges
from medseg.weights.files import checksum, read_weights

# Attributes of `TrainedStage` that must be equal for checkpoints whose results are averaged.
SAME_SETTINGS = (
    "task",
    "spacing_mm",
    "rule",
    "resampling",
    "tile_size",
    "least_size",
    "region_margin_mm",
    "has_coarse_channel",
    "clean_up",
    "precision",
)


def load_stage(
    path: Path,
    stage: str | None,
    device: torch.device,
    precision: str | None = None,
    trusted: Sequence[str] = (),
    options: InferenceOptions | None = None,
    backend_room_bytes: float = math.inf,
) -> TrainedStage:
    """Load a stage from a checkpoint with `weights_only`: no code in the file runs.

    Args:
        path: Checkpoint, or safetensors file.
        stage: The stage that the file must be of: `fine`, or `coarse` or `single`, which may stand
            for each other; None = any. Messages name the file `<stage>=<path>`, or
            `checkpoint=<path>` for None.
        device: Where it will run.
        precision: Number format; None = as in training. Where the device lacks that format, fp16
            on a GPU and fp32 on a CPU.
        trusted: Prefixes of `trusted_targets` of the present command; the file itself can trust
            nothing.
        options: Two of them are used. `half_weights`: whether convolutions and linear layers store
            their weights in the half precision that they compute in. `backend`: None is torch,
            except on a CPU without the half precision of the training, where a measurement chooses
            the quicker one of torch and OpenVINO.
        backend_room_bytes: Memory that a backend other than torch may take, where the options name
            no backend.

    Raises:
        UserError: If the file is missing, damaged, not of medseg, of another stage or of a newer
            format, or the backend does not work.
    """
    options = options or InferenceOptions()
    key = stage or "checkpoint"
    source = f"{key}={path}"
    metadata, weights = read_weights(path, stage, key)
    metadata = _with_checked_model(metadata, source, trusted)
    try:
        trained = _build_stage(metadata, weights, path, device, precision, trusted)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise UserError(
            f"{source}: its weights do not fit the network of its metadata "
            f"({first_line(error)}); take another copy"
        ) from error
    # A file may hold anything: every error in `_build_stage` becomes one sentence.
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, UserError) as error:
        raise UserError(
            f"{source}: its metadata are damaged or of another version "
            f"({type(error).__name__}: {first_line(error)}); take another copy"
        ) from error
    network = trained.network
    network.load_state_dict(weights)
    if trained.precision in HALF:
        # Kernels in half precision prefer this layout; fp32 gains nothing.
        use_channels_last(network)
    if options.half_weights:
        _store_half(trained)
    # Moved only now, since the rounding to half precision halves the bytes to move.
    network.to(device).eval()
    trained.count_memory()
    backend = options.backend
    # On a CPU without the half precision of the training, OpenVINO may be quicker than torch. If
    # the user has chosen the precision, it is not tried.
    lost_half = metadata["precision"] in HALF and trained.precision not in HALF
    if backend is None and precision is None and lost_half and device.type == "cpu":
        backend = _quickest_backend(trained, backend_room_bytes)
    if backend is Backend.openvino:
        _run_with_openvino(trained, options)
    return trained


def _with_checked_model(
    metadata: dict[str, Any], source: str, trusted: Sequence[str]
) -> dict[str, Any]:
    """Check the class of the network that the metadata name, before anything is built.

    Args:
        metadata: From `read_weights`.
        source: Key and path of the user, for messages.
        trusted: See `load_stage`.

    Returns:
        The metadata with tuples for lists, and `pretrained=False` for a network that has it.
    """
    try:
        metadata = to_tuples(metadata)
        target = {TARGET: UNET, **metadata["model"]}
        check_target("model", f"{source}: its model", target, trusted)
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{source}: its metadata are damaged or of another version ({error!r}); take another "
            "copy"
        ) from error
    if metadata["model"].get("pretrained"):
        # No download: the weights of the file would replace it at once.
        metadata["model"] = {**metadata["model"], "pretrained": False}
    return metadata


def _build_stage(
    metadata: dict[str, Any],
    weights: dict[str, Tensor],
    path: Path,
    device: torch.device,
    precision: str | None,
    trusted: Sequence[str],
) -> TrainedStage:
    """Build the stage that the metadata describe, on the CPU and without its weights.

    Args:
        metadata: From `_with_checked_model`.
        weights: Weights by name, which must fit the network.
        path: The file.
        device: See `load_stage`.
        precision: See `load_stage`.
        trusted: See `load_stage`.

    Raises:
        RuntimeError: If the weights do not fit.
        Exception: Of any kind, if the metadata are damaged.
    """
    # Checked first: numbers out of range could fill the memory while the network is built.
    check_ranges(metadata)
    task = with_label_details(Task.from_dict(metadata["task"]))
    name = metadata["stage"]
    if name == "coarse" and not task.regions:
        name = "single"  # older files call it coarse
    if name == "single":
        # The task may have regions: a run chose to segment all labels at once.
        task = task.as_one_stage()
    has_coarse_channel = bool(metadata.get("coarse_channel"))

    def make() -> StageNetwork:
        return make_described_network(
            metadata["model"], task, name, trusted, has_coarse_channel=has_coarse_channel
        )

    # A network of damaged metadata may be larger than the memory. On the meta device a network has
    # shapes without values. Only code that the user trusts may build its network in real memory
    # where the meta device fails.
    with bounded_parts(len(weights)):
        meta_network = build_on_meta(make, may_compute=bool(trusted))
    # Raises if the shapes are not those of the weights. `assign` avoids torch's warning that a copy
    # to the meta device does nothing.
    meta_network.load_state_dict(weights, assign=True)
    network = make()
    training_precision = Precision(metadata["precision"]).value
    spacing_mm = None
    if metadata["spacing_mm"] != NATIVE:
        spacing_mm = _triple(metadata["spacing_mm"])
    # A network of a fixed size accepts no other, even if the training recorded one.
    tile_size = network.traits.fixed_size
    if not tile_size and metadata["tile_size"]:
        tile_size = _triple(metadata["tile_size"])
    trained = TrainedStage(
        network=network,
        name=name,
        task=task,
        spacing_mm=spacing_mm,
        tile_size=tile_size,
        region_margin_mm=float(metadata["region_margin_mm"]),
        precision=stage_precision(name, precision, training_precision, device.type),
        device=device,
        rule=GridRule(**metadata.get("grid_rule", {})),
        checkpoints={str(path): checksum(path)},
        resampling=Resampling(metadata.get("resampling", ANTIALIASED)).value,
        has_coarse_channel=has_coarse_channel,
    )
    # Older checkpoints lack these keys, and those that `metadata.get` reads above.
    # Whole crops get at least the size of the patches of the training, see `TrainedStage`.
    if metadata.get("patch_size"):
        trained.least_size = _triple(metadata["patch_size"])
    if metadata.get("dice_bound"):
        trained.dice_bound = DiceBound(**metadata["dice_bound"])
    trained.clean_up = tuple(CleanUp(**rule) for rule in metadata.get("clean_up", ()))
    for clean_up in trained.clean_up:
        check_clean_up(clean_up, task)
    return trained


def _store_half(trained: TrainedStage) -> None:
    """Store the weights of convolutions and linear layers in half precision.

    Autocast rounds the weights of these layers at each call, so storing them rounded changes no
    result. The weights of norms stay in float32, because autocast does not round them.
    """
    if trained.precision not in HALF:
        raise UserError(
            f"inference.half_weights=true: the {trained.name} stage runs in {trained.precision}; "
            "give precision=bf16, or fp16 on a GPU"
        )
    for module in trained.network.modules():
        if isinstance(module, ScaledConv3d):
            # Autocast rounds the scaled weights, so they are scaled before they are rounded.
            module.fold_scale()
        if isinstance(module, (_ConvNd, nn.Linear)):
            module.to(HALF[trained.precision])


def _quickest_backend(trained: TrainedStage, room_bytes: float) -> Backend:
    """Choose a backend by a measurement; torch where OpenVINO is missing or takes too much memory.

    Args:
        trained: A stage on the CPU.
        room_bytes: Memory that OpenVINO may take.
    """
    network = cast(StageNetwork, trained.network)
    if not has_openvino() or openvino_bytes(network) > room_bytes:
        return Backend.torch
    return Backend(quickest_backend(network))


def _run_with_openvino(trained: TrainedStage, options: InferenceOptions) -> None:
    """Let OpenVINO run the network of a stage, which comes from a single file.

    Raises:
        UserError: If OpenVINO does not support the device or `half_weights`, or if the options name
            OpenVINO and it does not work.
    """
    if trained.device.type != "cpu":
        raise UserError(
            "inference.backend=openvino runs on CPUs only; choose accelerator=cpu, or "
            "inference.backend=torch"
        )
    if options.half_weights:
        raise UserError(
            "inference.half_weights=true works with inference.backend=torch only; leave one of "
            "them out"
        )
    network = cast(StageNetwork, trained.network)
    # The converted network is cached on this machine under the checksum of its file.
    (checksum_of_file,) = trained.checkpoints.values()
    use_openvino(
        network,
        trained.precision,
        checksum_of_file,
        is_required=options.backend is Backend.openvino,
    )
    trained.backend_bytes = openvino_bytes(network)


def load_stages(
    paths: Sequence[Path],
    stage: str,
    device: torch.device,
    precision: str | None = None,
    trusted: Sequence[str] = (),
    options: InferenceOptions | None = None,
    backend_room_bytes: float = math.inf,
) -> TrainedStage:
    """Load one or several checkpoints of a stage, whose results are averaged.

    Args:
        paths: Checkpoints, at least one.
        stage: See `load_stage`.
        device: See `load_stage`.
        precision: See `load_stage`.
        trusted: See `load_stage`.
        options: See `load_stage`.
        backend_room_bytes: See `load_stage`, for all checkpoints together.

    Raises:
        UserError: As `load_stage`, and if the checkpoints differ in one of `SAME_SETTINGS`.
    """
    loaded: list[TrainedStage] = []
    for path in paths:
        # All networks stay loaded, so each leaves less room to the next.
        room_bytes = backend_room_bytes - sum(trained.backend_bytes for trained in loaded)
        loaded.append(load_stage(path, stage, device, precision, trusted, options, room_bytes))
    first = loaded[0]
    for path, trained in zip(paths[1:], loaded[1:], strict=True):
        for name in SAME_SETTINGS:
            first_value = getattr(first, name)
            value = getattr(trained, name)
            if value != first_value:
                raise UserError(
                    f"{stage}: {paths[0]} and {path} cannot be averaged: {name} is {first_value} "
                    f"in the one and {value} in the other; give checkpoints that were trained with "
                    "the same settings"
                )
    checkpoints: dict[str, str] = {}
    for trained in loaded:
        checkpoints.update(trained.checkpoints)
    others = [trained.network for trained in loaded[1:]]
    # Networks run one after the other: the largest decides what fits. The memory that backends keep
    # adds up.
    bytes_per_voxel = max(trained.bytes_per_voxel for trained in loaded)
    backend_bytes = sum(trained.backend_bytes for trained in loaded)
    # The other attributes are equal, so those of the first are taken. Only the bound on Dice may
    # differ, and `Cascade.dice_bound` ignores it where there are several networks.
    return replace(
        first,
        others=tuple(others),
        bytes_per_voxel=bytes_per_voxel,
        backend_bytes=backend_bytes,
        checkpoints=checkpoints,
    )


def _triple(values: Sequence[Any]) -> Any:
    """Return three numbers along (z, y, x), and refuse any other count.

    Raises:
        ValueError: If there are not three numbers.
    """
    z, y, x = values
    return z, y, x


def with_label_details(task: Task) -> Task:
    """Add details of the labels that older checkpoints lack, from `conf/task/<name>.yaml`.

    The details are plausible volumes, codes and colours. Nothing is added if the labels of the file
    are not those of the task.
    """
    path = conf_dir() / "task" / f"{task.name}.yaml"
    # The name comes from the file of the weights: it must not lead to another folder.
    if not task.name.isidentifier() or not path.is_file():
        return task
    content: Any = yaml.safe_load(read_text(path))
    # A file with `@package _global_` has the keys of the task below `task`, others at the top.
    included = content.get("task", content)
    if included["labels"] != task.labels:
        return task
    ranges_ml = {}
    for name, (low_ml, high_ml) in (included.get("volume_ml") or {}).items():
        ranges_ml[name] = (float(low_ml), float(high_ml))
    # Values of the checkpoint take precedence.
    return replace(
        task,
        volume_ml=task.volume_ml or ranges_ml,
        codes=task.codes or code_texts(included.get("codes")),
        colours=task.colours or dict(included.get("colours") or {}),
    )
