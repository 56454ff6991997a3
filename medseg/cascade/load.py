"""Trained stages, loaded from checkpoints or safetensors files."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from torch.nn.modules.conv import _ConvNd

from medseg.cascade.bound import DiceBound
from medseg.cascade.stage import TrainedStage
from medseg.conf_folder import conf_dir
from medseg.errors import UserError, first_line, is_out_of_memory, require
from medseg.geometry.grid_rule import GridRule
from medseg.inference.openvino import has_openvino, openvino_bytes, quickest_backend, use_openvino
from medseg.inference.options import Backend, InferenceOptions
from medseg.io.text import read_text
from medseg.memory.options import Precision
from medseg.memory.precision import HALF, inference_precision
from medseg.memory.switches import use_channels_last
from medseg.models.blocks import ScaledConv3d
from medseg.models.described import make_described_network, to_tuples
from medseg.models.options import UNET
from medseg.models.stage_network import StageNetwork
from medseg.models.traits import build_on_meta
from medseg.preprocess.options import Resampling
from medseg.preprocess.resample import ANTIALIASED
from medseg.targets import TARGET, check_target
from medseg.task import Task
from medseg.task_options import code_texts
from medseg.weights.checks import check_ranges
from medseg.weights.files import NATIVE, checksum, read_weights


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
        stage: The stage it must be, `coarse` (or `single`) or `fine`; None = any, given as
            `checkpoint`.
        device: Where it will run.
        precision: Number format; None = as in training, fp32 where the device lacks it or only
            emulates it.
        trusted: Prefixes of `trusted_targets` of the present command; the file itself can trust
            nothing.
        options: `half_weights`: whether convolutions and linear layers store their weights in the
            half precision that they compute in. `backend`: None measures on a CPU without the bf16
            of the training, and is torch elsewhere.
        backend_room_bytes: Memory that another backend than torch may take, where none is named.

    Raises:
        UserError: If the file is missing, damaged, not of medseg, of another stage or of a newer
            format, or the backend does not work.
    """
    options = options or InferenceOptions()
    backend = options.backend
    key = stage or "checkpoint"
    metadata, weights = read_weights(path, stage, key)
    name: str = metadata["stage"]
    try:
        metadata = to_tuples(metadata)
        check_target(
            "model", f"{key}={path}: its model", {TARGET: UNET, **metadata["model"]}, trusted
        )
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{key}={path}: its metadata are damaged or of another version ({error!r}); take another copy"
        ) from error
    if metadata["model"].get(
        "pretrained"
    ):  # its weights are in the file: nothing is downloaded in order to be replaced
        metadata["model"] = {**metadata["model"], "pretrained": False}
    try:
        check_ranges(metadata, len(weights))
        task = with_known_labels(Task.from_dict(metadata["task"]))
        if name == "coarse" and not task.regions:
            name = "single"  # as older files do not call it
        if name == "single":
            # The task may have regions: a run chose to segment all labels at once.
            task = task.as_one_stage()
        has_coarse_channel = bool(metadata.get("coarse_channel"))

        def make() -> StageNetwork:
            return make_described_network(
                metadata["model"], task, name, trusted, has_coarse_channel=has_coarse_channel
            )

        # A network may be larger than the memory: on the meta device it only has shapes, which must
        # be those of the weights.
        shapes = build_on_meta(make, may_compute=bool(trusted))
        shapes.load_state_dict(weights, assign=True)
        network = make()
        trained_in = Precision(metadata["precision"]).value
        lacks_half = precision is None and trained_in in HALF and device.type == "cpu"
        precision = precision or inference_precision(trained_in, device.type)
        lacks_half = lacks_half and precision not in HALF
        trained = TrainedStage(
            network=network,
            name=name,
            task=task,
            spacing_mm=None
            if metadata["spacing_mm"] == NATIVE
            else _triple(metadata["spacing_mm"]),
            # Older checkpoints lack `resampling`, `grid_rule`, `add_parts_mm`, `coarse_channel`.
            resampling=Resampling(metadata.get("resampling", ANTIALIASED)).value,
            tile_size=network.traits.fixed_size
            or (_triple(metadata["tile_size"]) if metadata["tile_size"] else None),
            region_margin_mm=float(metadata["region_margin_mm"]),
            add_parts_mm=float(metadata["add_parts_mm"]) if metadata.get("add_parts_mm") else None,
            has_coarse_channel=has_coarse_channel,
            precision=precision,
            device=device,
            rule=GridRule(**metadata.get("grid_rule", {})),
            least_size=_triple(metadata["patch_size"]) if metadata.get("patch_size") else (1, 1, 1),
            checkpoints={str(path): checksum(path)},
            dice_bound=DiceBound(**metadata["dice_bound"]) if metadata.get("dice_bound") else None,
        )
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise UserError(
            f"{key}={path}: its weights do not fit the network of its metadata ({first_line(error)}); take another copy"
        ) from error
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, UserError) as error:
        raise UserError(
            f"{key}={path}: its metadata are damaged or of another version ({type(error).__name__}: {first_line(error)}); "
            "take another copy"
        ) from error
    network.load_state_dict(weights)
    if precision in HALF:
        use_channels_last(
            network
        )  # kernels in half precision prefer this layout; fp32 gains nothing
    if options.half_weights:
        require(
            precision in HALF,
            f"inference.half_weights=true: the {name} stage runs in {precision}; give precision=bf16, or fp16 on a GPU",
        )
        # Autocast rounds the weights of these layers at each call, so storing them rounded changes
        # no result. It does not round those of norms.
        for module in network.modules():
            if isinstance(module, ScaledConv3d):
                module.fold_scale()
            if isinstance(module, (_ConvNd, nn.Linear)):
                module.to(HALF[precision])
    network.to(device).eval()
    trained.count_memory()
    has_room = lacks_half and has_openvino() and openvino_bytes(network) <= backend_room_bytes
    if backend is None and has_room:
        backend = Backend(quickest_backend(network))
    if backend is Backend.openvino:
        require(
            device.type == "cpu",
            "inference.backend=openvino runs on processors only; choose accelerator=cpu, or inference.backend=torch",
        )
        require(
            not options.half_weights,
            "inference.half_weights=true works with inference.backend=torch only; leave one of them out",
        )
        use_openvino(network, precision, trained.checkpoints[str(path)])
        trained.backend_bytes = openvino_bytes(network)
    return trained


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
        paths: Checkpoints, one at least.
        stage: See `load_stage`.
        device: See `load_stage`.
        precision: See `load_stage`.
        trusted: See `load_stage`.
        options: See `load_stage`.
        backend_room_bytes: See `load_stage`, for all checkpoints together.

    Raises:
        UserError: As `load_stage`, and if the checkpoints differ in their input.
    """
    loaded: list[TrainedStage] = []
    for path in paths:
        room_bytes = backend_room_bytes - sum(trained.backend_bytes for trained in loaded)
        loaded.append(load_stage(path, stage, device, precision, trusted, options, room_bytes))
    first, *others = loaded
    for path, other in zip(paths[1:], others, strict=True):
        for name in (
            "task",
            "spacing_mm",
            "rule",
            "resampling",
            "tile_size",
            "least_size",
            "region_margin_mm",
            "add_parts_mm",
            "has_coarse_channel",
            "precision",
        ):
            ours, theirs = getattr(first, name), getattr(other, name)
            if ours != theirs:
                raise UserError(
                    f"{stage}: {paths[0]} and {path} cannot be averaged: {name} is {ours} in the one and {theirs} in the other; "
                    "give checkpoints that were trained with the same settings"
                )
    return replace(
        first,
        others=tuple(other.network for other in others),
        # Networks may differ in size: the largest decides what fits.
        bytes_per_voxel=max(trained.bytes_per_voxel for trained in (first, *others)),
        backend_bytes=sum(trained.backend_bytes for trained in (first, *others)),
        checkpoints={
            name: checksum
            for trained in (first, *others)
            for name, checksum in trained.checkpoints.items()
        },
    )


def _triple(values: Sequence[Any]) -> Any:
    z, y, x = values
    return z, y, x


def with_known_labels(task: Task) -> Task:
    """Add what `conf/task/<name>.yaml` knows of labels to the task of an older checkpoint without it, if the labels agree.

    These are plausible volumes, codes and colours.
    """
    path = conf_dir() / "task" / f"{task.name}.yaml"
    if not task.name.isidentifier() or not path.is_file():
        return task
    found: Any = yaml.safe_load(read_text(path))
    known = found.get("task", found)
    if known["labels"] != task.labels:
        return task
    ranges_ml = {
        name: (float(low_ml), float(high_ml))
        for name, (low_ml, high_ml) in (known.get("volume_ml") or {}).items()
    }
    return replace(
        task,
        volume_ml=task.volume_ml or ranges_ml,
        codes=task.codes or code_texts(known.get("codes")),
        colours=task.colours or dict(known.get("colours") or {}),
    )
