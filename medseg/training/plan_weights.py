"""Initial weights from a model folder of nnU-Net: which are taken, and which begin afresh."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from medseg.console import say
from medseg.data.options import StageName
from medseg.errors import UserError
from medseg.models.plan_unet import PlanUNet
from medseg.models.stage_network import StageNetwork
from medseg.nnunet.checkpoint import read_checkpoint
from medseg.nnunet.folder import open_fold
from medseg.nnunet.plan import NnunetPlan
from medseg.task_options import make_task
from medseg.training.options import TrainConfig
from medseg.wording import first_few

# Layers of a decoder that make the logits of its levels, one for each.
HEAD = "decoder.seg_layers."


def load_plan_weights(network: StageNetwork, config: TrainConfig) -> None:
    """Copy the weights of one fold into the network of its plan, and say which.

    Another label set keeps the fresh layers of the logits, another number of channels the fresh
    first layer.

    Args:
        network: Changed in place.
        config: Names the folder as `init_from`.

    Raises:
        UserError: If the folder cannot be used, or the network is not that of its plan.
    """
    path = Path(str(config.init_from))
    key = f"init_from={path}"
    folder = open_fold(path, "init_from")
    unet = network.network
    if not isinstance(unet, PlanUNet):
        raise UserError(
            f"{key}: the configured network is {type(unet).__name__}, not that of its plan; leave "
            "model out"
        )
    ((fold, file),) = folder.checkpoints.items()
    weights = read_checkpoint(file, key).weights
    fresh = unet.network.state_dict()
    has_same_labels = _has_same_labels(folder.plan, config)
    taken: dict[str, Tensor] = {}
    for name, value in fresh.items():
        if name.startswith(HEAD) and not has_same_labels:
            continue
        if name in weights and weights[name].shape == value.shape:
            taken[name] = weights[name]
    not_taken = [name for name in fresh if name not in taken]
    # The kernel of the layer that sees the image comes first.
    first_kernel = next(iter(fresh))
    has_new_channels = network.in_channels != len(folder.plan.channels)
    for name in not_taken:
        is_new = name.startswith(HEAD) and not has_same_labels
        if is_new or (name == first_kernel and has_new_channels):
            continue
        raise UserError(
            f"{key}: the weights of fold {fold} do not fit the network of its plan ({name} is "
            "missing or has another shape); take the files of one training"
        )
    unet.network.load_state_dict(taken, strict=False)
    say(f"{key}: {_sentence(fold, fresh, taken, has_new_channels, folder.plan, config)}")


def _has_same_labels(plan: NnunetPlan, config: TrainConfig) -> bool:
    """Whether the logits of the plan are those of the configured network, class by class."""
    task = make_task(config.task)
    is_whole = config.stage.name is not StageName.fine
    return is_whole and plan.labels.region_values is None and plan.labels.names == task.labels


def _sentence(
    fold: str,
    fresh: Mapping[str, Tensor],
    taken: Mapping[str, Tensor],
    has_new_channels: bool,
    plan: NnunetPlan,
    config: TrainConfig,
) -> str:
    """Say in one sentence which weights were taken, and which are fresh."""
    num_taken = sum(fresh[name].numel() for name in taken)
    num_all = sum(value.numel() for value in fresh.values())
    begin = f"{num_taken / 1e6:.4g} of {num_all / 1e6:.4g} million weights are those of fold {fold}"
    reasons = []
    if has_new_channels:
        reasons.append(f"the first layer (the plan has {len(plan.channels)} channels)")
    if any(name.startswith(HEAD) and name not in taken for name in fresh):
        reasons.append(
            f"the layers of the logits (labels {first_few(list(config.task.labels), 3)} in place "
            f"of {first_few(list(plan.labels.names), 3)})"
        )
    if not reasons:
        return f"{begin}, none is fresh"
    return f"{begin}, fresh are {' and '.join(reasons)}"
