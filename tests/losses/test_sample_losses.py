"""Adapter of losses: forms of the target, sums, deep supervision, ignored voxels."""

from __future__ import annotations

import inspect
import math
from typing import Any

import monai.losses
import pytest
import torch
from torch import Tensor, nn

from medseg.losses.dice_ce import DiceCrossEntropyLoss
from medseg.losses.options import DICE_CE, loss_clashes
from medseg.losses.sample_losses import (
    Term,
    TrainingLoss,
    check_loss,
    default_arguments,
    find_target_form,
    in_form,
    mean_of_samples,
    sample_losses,
)


def sample(num_classes: int = 3, shape: tuple[int, ...] = (2, 8, 10, 6)) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(
        shape[0], num_classes, *shape[1:], generator=generator, dtype=torch.float64
    )
    target = torch.randint(0, num_classes, shape, generator=generator, dtype=torch.uint8)
    return logits.requires_grad_(), target


def adapted(target: type, ignore_value: int | None = None, **stated: Any) -> TrainingLoss:
    """A loss as a configuration makes it."""
    parameters = inspect.signature(target).parameters
    arguments = stated | default_arguments(target, parameters, stated)
    return TrainingLoss(
        [Term(1.0, target(**arguments), find_target_form(target, arguments))],
        ignore_value=ignore_value,
    )


def loss_and_gradient(loss: nn.Module, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    value = loss(logits, target)
    (gradient,) = torch.autograd.grad(value, logits)
    return value.detach(), gradient


def test_dice_ce_of_monai_is_ours() -> None:
    logits, target = sample()
    ours, our_gradient = loss_and_gradient(adapted(DiceCrossEntropyLoss), logits, target)
    theirs, their_gradient = loss_and_gradient(
        adapted(monai.losses.DiceCELoss, include_background=False), logits, target
    )
    assert float(theirs) == pytest.approx(float(ours), abs=1e-6)
    assert torch.allclose(their_gradient, our_gradient, atol=1e-6, rtol=0)


def test_one_term_of_ours_is_passed_through_unchanged() -> None:
    logits, target = sample()
    alone = loss_and_gradient(DiceCrossEntropyLoss(), logits, target)
    through = loss_and_gradient(adapted(DiceCrossEntropyLoss), logits, target)
    assert torch.equal(alone[0], through[0])
    assert torch.equal(alone[1], through[1])


VOXELWISE: list[tuple[type, dict[str, Any]]] = [
    (DiceCrossEntropyLoss, {}), (monai.losses.DiceCELoss, {}), (monai.losses.DiceFocalLoss, {}),
    (monai.losses.TverskyLoss, {}),
    (monai.losses.GeneralizedDiceLoss, {}), (monai.losses.FocalLoss, {}), (nn.CrossEntropyLoss, {}),
    (nn.BCEWithLogitsLoss, {}),
    (nn.MSELoss, {}),
]  # fmt: skip


@pytest.mark.parametrize(("target", "arguments"), [*VOXELWISE, (monai.losses.HausdorffDTLoss, {})])
def test_each_loss_gets_its_form_and_learns(target: type, arguments: dict[str, Any]) -> None:
    loss = adapted(target, **arguments)
    check_loss(loss, 3)
    _, labels = sample()
    right = nn.functional.one_hot(labels.long(), 3).movedim(-1, 1).double() * 20 - 10
    wrong = right.flip(1)
    assert float(loss(right, labels)) < float(loss(wrong, labels))


@pytest.mark.parametrize(("target", "arguments"), VOXELWISE)
def test_ignored_voxels_count_nowhere(target: type, arguments: dict[str, Any]) -> None:
    """As if the volume ended before them; what the network says there has no gradient."""
    logits, labels = sample()
    cut = logits.detach()[:, :, :5].clone().requires_grad_()
    expected, expected_gradient = loss_and_gradient(
        adapted(target, **arguments), cut, labels[:, :5]
    )
    labels[:, 5:] = 255
    value, gradient = loss_and_gradient(adapted(target, 255, **arguments), logits, labels)
    assert float(value) == pytest.approx(float(expected), rel=1e-6)
    assert torch.allclose(gradient[:, :, :5], expected_gradient, atol=1e-7)
    assert not gradient[:, :, 5:].any()
    labels[:] = 255
    nothing, no_gradient = loss_and_gradient(adapted(target, 255, **arguments), logits, labels)
    assert bool(torch.isfinite(nothing))
    assert not no_gradient.any()


@pytest.mark.parametrize("loss", [monai.losses.DiceLoss, monai.losses.DiceCELoss])
def test_a_loss_of_a_batch_stays_one_when_voxels_are_ignored(loss: type) -> None:
    logits, target = sample()
    expected = loss_and_gradient(adapted(loss, batch=True), logits, target)
    result = loss_and_gradient(adapted(loss, 255, batch=True), logits, target)
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize(
    "weights", [[0.0, 0.0], [1.0, -0.5], [], [math.inf, 1.0], [1.0, math.nan], [1e308, 1e308]]
)
def test_outputs_without_a_weight_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="expected numbers from 0 on, one of them above 0"):
        TrainingLoss([Term(1.0, DiceCrossEntropyLoss(), "indices")], weights)


def test_a_loss_of_distances_cannot_ignore_voxels() -> None:
    with pytest.raises(
        ValueError,
        match=(
            "HausdorffDTLoss is not a sum over voxels, so it cannot leave out the voxels of "
            r"task\.ignore_label"
        ),
    ):
        adapted(monai.losses.HausdorffDTLoss, 255)


@torch.no_grad()
def test_a_sum_has_its_weights() -> None:
    logits, target = sample()
    parts = [DiceCrossEntropyLoss(ce_weight=0.0), DiceCrossEntropyLoss(dice_weight=0.0)]
    both = TrainingLoss([Term(0.5, parts[0], "indices"), Term(2.0, parts[1], "indices")])
    assert float(both(logits, target)) == pytest.approx(
        0.5 * float(parts[0](logits, target)) + 2 * float(parts[1](logits, target))
    )


@torch.no_grad()
def test_deep_supervision_halves_the_weights_and_compares_at_each_size() -> None:
    logits, target = sample(shape=(1, 8, 8, 8))
    half = torch.randn(1, 3, 4, 4, 4, dtype=torch.float64)
    loss = DiceCrossEntropyLoss()
    expected = 2 / 3 * loss(logits, target) + 1 / 3 * loss(half, target[:, ::2, ::2, ::2])
    assert float(adapted(DiceCrossEntropyLoss)([logits, half], target)) == pytest.approx(
        float(expected)
    )
    first_alone = TrainingLoss([Term(1.0, loss, "indices")], output_weights=[1, 0])
    assert float(first_alone([logits, half], target)) == pytest.approx(float(loss(logits, target)))
    with pytest.raises(ValueError, match=r"loss\.output_weights: expected 2 numbers"):
        TrainingLoss([Term(1.0, loss, "indices")], output_weights=[1])([logits, half], target)


def test_forms_of_the_target() -> None:
    target = torch.tensor([[[[0, 2]]]], dtype=torch.uint8)
    assert in_form(target, "indices", 3).tolist() == [[[[0, 2]]]]
    assert in_form(target, "channel", 3).shape == (1, 1, 1, 1, 2)
    assert in_form(target, "one_hot", 3)[0, :, 0, 0].tolist() == [[1, 0], [0, 0], [0, 1]]


@pytest.mark.parametrize(
    ("stated", "added"),
    [
        ({}, {"softmax": True, "to_onehot_y": True}),
        ({"sigmoid": True}, {"to_onehot_y": True}),
        ({"softmax": False, "to_onehot_y": False}, {}),
    ],
)
def test_what_the_user_says_stays(stated: dict[str, Any], added: dict[str, Any]) -> None:
    assert default_arguments(nn.Module, ["softmax", "sigmoid", "to_onehot_y"], stated) == added
    assert default_arguments(nn.Module, ["weight"], stated) == {}


def test_the_focal_loss_of_monai_gets_a_softmax_under_its_own_name() -> None:
    assert default_arguments(nn.Module, ["use_softmax"], {}) == {"use_softmax": True}
    assert default_arguments(nn.Module, ["use_softmax"], {"use_softmax": False}) == {}


class Vector(nn.Module):
    """A value for each sample instead of one."""

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return logits.mean((1, 2, 3, 4))


@pytest.mark.parametrize("loss", [Vector(), nn.MSELoss()])
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_what_is_no_loss_of_logits_and_labels_is_refused(loss: nn.Module) -> None:
    with pytest.raises(ValueError, match="cannot be computed from logits"):
        check_loss(loss, 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_losses_of_other_libraries_get_logits_of_fp32_from_half_precision(
    dtype: torch.dtype,
) -> None:
    dtypes: list[torch.dtype] = []

    class Watched(nn.CrossEntropyLoss):
        def forward(self, logits: Tensor, target: Tensor) -> Tensor:
            dtypes.append(logits.dtype)
            return super().forward(logits, target)

    logits, target = sample()
    for ignore_value in (None, 2):
        TrainingLoss([Term(1.0, Watched(), "indices")], ignore_value=ignore_value)(
            logits.detach().to(dtype), target
        )
    assert set(dtypes) == {torch.float32}


def test_the_loss_of_a_micro_batch_counts_each_sample_once() -> None:
    """A batch loss of three samples and one of a single sample."""
    losses = [(torch.tensor(1.0), 3), (torch.tensor(5.0), 1)]
    assert float(mean_of_samples(losses)) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("loss", "numbers"),
    [
        (DiceCrossEntropyLoss(), [1, 1]),
        (DiceCrossEntropyLoss(batch_dice=True), [2]),
        (monai.losses.DiceLoss(softmax=True, to_onehot_y=True, batch=True), [2]),
        (nn.CrossEntropyLoss(), [1, 1]),
    ],
)
def test_a_loss_of_the_whole_batch_is_computed_once_for_it(
    loss: nn.Module, numbers: list[int]
) -> None:
    term = Term(1.0, loss, "channel" if isinstance(loss, monai.losses.DiceLoss) else "indices")
    logits, target = sample()
    assert [count for _, count in sample_losses(TrainingLoss([term]), logits, target)] == numbers


@torch.no_grad()
def test_three_outputs_have_the_weights_four_two_and_one_of_seven() -> None:
    logits, target = sample(shape=(2, 8, 8, 16))
    generator = torch.Generator().manual_seed(4)
    half, quarter = (
        torch.randn(2, 3, 8 // step, 8 // step, 16 // step, generator=generator) for step in (2, 4)
    )
    loss = DiceCrossEntropyLoss()
    parts = [
        float(loss(logits, target)),
        float(loss(half, target[:, ::2, ::2, ::2])),
        float(loss(quarter, target[:, ::4, ::4, ::4])),
    ]
    outputs = [logits, half, quarter]
    expected = (4 * parts[0] + 2 * parts[1] + parts[2]) / 7
    assert float(adapted(DiceCrossEntropyLoss)(outputs, target)) == pytest.approx(expected)
    chosen = TrainingLoss([Term(1.0, loss, "indices")], output_weights=[1.0, 0.0, 3.0])
    assert float(chosen(outputs, target)) == pytest.approx((parts[0] + 3 * parts[2]) / 4)
    by_sample = sample_losses(chosen, outputs, target)
    assert [count for _, count in by_sample] == [1, 1]
    for number, (value, _) in enumerate(by_sample):
        alone = [output[number : number + 1] for output in outputs]
        assert float(value) == pytest.approx(float(chosen(alone, target[number : number + 1])))


@torch.no_grad()
@pytest.mark.parametrize("loss", [monai.losses.DiceLoss, monai.losses.DiceCELoss])
def test_samples_count_alike_however_many_of_their_voxels_are_ignored(loss: type) -> None:
    """One sample loses two slices, one all of its voxels: it counts as a loss of nothing."""
    logits, labels = sample(shape=(3, 4, 5, 6))
    labels[0, 2:] = 255
    labels[1] = 255
    first = adapted(loss)(logits[:1, :, :2], labels[:1, :2])
    third = adapted(loss)(logits[2:], labels[2:])
    value = adapted(loss, 255)(logits, labels)
    assert float(value) == pytest.approx((float(first) + float(third)) / 3, rel=1e-6)


@torch.no_grad()
def test_a_loss_of_a_batch_sees_the_voxels_of_all_samples_that_remain() -> None:
    """The two halves of one volume, each with an ignored slice at its end, are that volume."""
    logits, labels = sample(shape=(1, 6, 5, 6))
    expected = adapted(monai.losses.DiceLoss)(logits, labels)
    filler = torch.zeros_like(logits[:, :, :1])
    halves = torch.cat([torch.cat([logits[:, :, :2], filler, filler], 2), logits[:, :, 2:]])
    ignored = torch.full_like(labels[:, :1], 255)
    of_halves = torch.cat([torch.cat([labels[:, :2], ignored, ignored], 1), labels[:, 2:]])
    value = adapted(monai.losses.DiceLoss, 255, batch=True)(halves, of_halves)
    assert float(value) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("stated", ["sigmoid", "softmax", "use_softmax", "other_act"])
def test_an_activation_that_the_user_states_is_the_only_one(stated: str) -> None:
    added = default_arguments(nn.Module, ["softmax", "use_softmax", "other_act"], [stated])
    assert added == {}


class Weighed(nn.Module):
    """Cross-entropy times a factor."""

    is_voxelwise = True

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return self.factor * nn.functional.cross_entropy(logits, target)


def test_a_loss_that_prefers_wrong_labels_is_refused_and_one_that_knows_none_is_not() -> None:
    with pytest.raises(ValueError, match="larger for the right labels"):
        check_loss(TrainingLoss([Term(1.0, Weighed(-1.0), "indices")]), 3)
    check_loss(TrainingLoss([Term(1.0, Weighed(0.0), "indices")]), 3)
    with pytest.raises(ValueError, match="a finite scalar with a gradient"):
        check_loss(TrainingLoss([Term(1.0, Weighed(float("inf")), "indices")]), 3)


def test_the_weights_of_another_loss_may_mean_something_else() -> None:
    weights = {"dice_weight": 0.0, "ce_weight": 0.0}
    assert list(loss_clashes({"_target_": DICE_CE, **weights}))
    assert not list(loss_clashes({"_target_": "pkg.Loss", **weights}))
    assert not list(loss_clashes({"_target_": "pkg.Loss", "ce_weight": [1.0, 5.0]}))
