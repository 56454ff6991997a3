"""Keys of the group `loss`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from medseg.knob import Knob
from medseg.targets import TARGET

DICE_CE = "medseg.losses.dice_ce.DiceCrossEntropyLoss"


@dataclass(kw_only=True)
class LossOptions:
    """Loss: its class with the arguments of the class, and the keys below."""

    _target_: Annotated[
        str, Knob("Class of the loss, of medseg.losses, monai.losses, torch.nn or trusted_targets.")
    ] = DICE_CE
    output_weights: Annotated[
        list[float] | None,
        Knob(
            "Weights of the outputs of a network with deep supervision; "
            "null: 1, 1/2, 1/4, … from full resolution on.",
            "[0, inf)",
        ),
    ] = None


@dataclass(kw_only=True)
class DiceCeOptions(LossOptions):
    """Dice and cross-entropy, see `medseg.losses.dice_ce`.

    Another `_target_` replaces these keys by the arguments of its class.
    """

    dice_weight: Annotated[float, Knob("Weight of the Dice term.", "[0, inf)")]
    ce_weight: Annotated[float, Knob("Weight of the cross-entropy.", "[0, inf)")]
    include_background: Annotated[bool, Knob("Count the background in the Dice term.")]
    batch_dice: Annotated[
        bool, Knob("One Dice over all samples of a micro-batch instead of one per sample.")
    ]
    hard_weight: Annotated[
        float, Knob("Added weight of hard voxels in the cross-entropy.", "[0, inf)")
    ] = 0.0


def loss_clashes(loss: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each contradiction between the keys of a loss.

    Losses of other classes may mean something else by these keys, such as weights of classes.
    """
    if loss.get(TARGET) != DICE_CE:
        return
    if loss.get("dice_weight", 1) + loss.get("ce_weight", 1) <= 0:
        yield "loss.dice_weight and loss.ce_weight: at least one must be positive"
