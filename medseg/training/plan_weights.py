"""Initial weights from a model folder of nnU-Net: which are copied, and which stay random."""

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

# Beginning of the names of a decoder's layers that make the logits, one layer for each level.
LOGIT_LAYERS = "decoder.seg_layers."


def load_plan_weights(network: StageNetwork, config: TrainConfig) -> None:
    """Copy the weights of one fold into the network of its plan, and print which.

    Where the labels differ, the layers of the logits keep their fresh (random) weights; where the
    number of channels differs, so does the first layer.

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
    ((fold, file),) = folder.checkpoints.items()  # `open_fold` gives one fold
    weights = read_checkpoint(file, key).weights
    fresh_weights = unet.network.state_dict()
    has_same_labels = _has_same_labels(folder.plan, config)
    has_new_channels = network.in_channels != len(folder.plan.channels)
    # The kernel of the layer that sees the image comes first.
    first_kernel = next(iter(fresh_weights))
    taken: dict[str, Tensor] = {}
    for name, fresh in fresh_weights.items():
        makes_new_logits = name.startswith(LOGIT_LAYERS) and not has_same_labels
        if makes_new_logits:
            continue
        if name in weights and weights[name].shape == fresh.shape:
            taken[name] = weights[name]
            continue
        sees_new_channels = name == first_kernel and has_new_channels
        if not sees_new_channels:
            raise UserError(
                f"{key}: the weights of fold {fold} do not fit the network of its plan ({name} is "
                "missing or has another shape); take the files of one training"
            )
    # Not strict, because `taken` lacks the weights that stay fresh.
    unet.network.load_state_dict(taken, strict=False)
    say(f"{key}: {_describe(fold, fresh_weights, taken, has_new_channels, folder.plan, config)}")


def _has_same_labels(plan: NnunetPlan, config: TrainConfig) -> bool:
    """Whether the logits of the plan are those of the configured network, class by class."""
    # The classes of a fine stage are those of one region.
    if config.stage.name is StageName.fine:
        return False
    # nnU-Net's "regions" are overlapping sets of labels, whose logits are no classes.
    if plan.labels.region_values is not None:
        return False
    return plan.labels.names == make_task(config.task).labels


def _describe(
    fold: str,
    fresh_weights: Mapping[str, Tensor],
    taken: Mapping[str, Tensor],
    has_new_channels: bool,
    plan: NnunetPlan,
    config: TrainConfig,
) -> str:
    """Say in one sentence which weights were taken, and which are fresh."""
    num_taken = sum(fresh_weights[name].numel() for name in taken)
    num_all = sum(fresh.numel() for fresh in fresh_weights.values())
    begin = f"{num_taken / 1e6:.4g} of {num_all / 1e6:.4g} million weights are those of fold {fold}"
    fresh_layers = []
    if has_new_channels:
        fresh_layers.append(f"the first layer (the plan has {len(plan.channels)} channels)")
    if any(name.startswith(LOGIT_LAYERS) and name not in taken for name in fresh_weights):
        fresh_layers.append(
            f"the layers of the logits (labels {first_few(list(config.task.labels), 3)} in place "
            f"of {first_few(list(plan.labels.names), 3)})"
        )
    if not fresh_layers:
        return f"{begin}, none is fresh"
    return f"{begin}, fresh are {' and '.join(fresh_layers)}"
