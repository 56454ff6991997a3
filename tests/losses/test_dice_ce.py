"""Dice plus cross-entropy against a sum in fp64, MONAI and its own numerical gradient."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from medseg.losses import dice_ce
from medseg.losses.dice_ce import DiceCrossEntropyLoss

SWITCHES = list(itertools.product([False, True], [False, True]))


def naive(logits: Tensor, target: Tensor, loss: DiceCrossEntropyLoss) -> float:
    """The formula, voxel by voxel and class by class, in fp64."""
    logits = logits.detach().double()
    probs = torch.exp(logits) / torch.exp(logits).sum(1, keepdim=True)
    # Samples whose Dice is computed together.
    samples = list(range(len(logits)))
    groups = [samples] if loss.batch_dice else [[n] for n in samples]
    first_class = 0 if loss.include_background else 1
    scores = []
    for group, k in itertools.product(groups, range(first_class, logits.shape[1])):
        p = probs[group, k]
        t = (target[group] == k).double()
        scores.append((2 * (p * t).sum() + loss.smooth) / (p.sum() + t.sum() + loss.smooth))
    entropy = []
    for n, z, y, x in itertools.product(*map(range, target.shape)):
        entropy.append(-torch.log(probs[n, target[n, z, y, x], z, y, x]))
    return float(
        loss.dice_weight * (1 - torch.stack(scores).mean())
        + loss.ce_weight * torch.stack(entropy).mean()
    )


def problem(classes: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(2, classes, 4, 3, 5, generator=generator, dtype=torch.float64)
    return logits, torch.randint(0, classes, (2, 4, 3, 5), generator=generator)


@pytest.mark.parametrize(("include_background", "batch_dice"), SWITCHES)
def test_equals_the_formula(include_background: bool, batch_dice: bool) -> None:
    loss = DiceCrossEntropyLoss(0.7, 1.3, include_background, batch_dice, smooth=0.1)
    logits, target = problem()
    assert loss(logits, target).item() == pytest.approx(naive(logits, target, loss), rel=1e-12)
    assert loss(logits.float(), target.to(torch.uint8)).item() == pytest.approx(
        naive(logits, target, loss), rel=1e-6
    )


@pytest.mark.parametrize(("include_background", "batch_dice"), SWITCHES)
def test_gradient_is_the_numerical_one(
    include_background: bool, batch_dice: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dice_ce, "SLAB_VOXELS_CPU", 30)  # two slabs of two slices
    loss = DiceCrossEntropyLoss(0.7, 1.3, include_background, batch_dice, smooth=0.1)
    logits, target = problem()
    assert torch.autograd.gradcheck(lambda z: loss(z, target), logits.requires_grad_())


@pytest.mark.parametrize(("include_background", "batch_dice"), SWITCHES)
def test_equals_monai(include_background: bool, batch_dice: bool) -> None:
    losses = pytest.importorskip("monai.losses")
    reference = losses.DiceCELoss(
        include_background=include_background, to_onehot_y=True, softmax=True, batch=batch_dice,
        smooth_nr=1e-5, smooth_dr=1e-5,
    )  # fmt: skip
    logits, target = problem()
    theirs, ours = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    reference(theirs, target.unsqueeze(1)).backward()
    DiceCrossEntropyLoss(include_background=include_background, batch_dice=batch_dice)(
        ours, target
    ).backward()
    assert theirs.grad is not None
    assert ours.grad is not None
    # MONAI casts its one-hot target to fp32.
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-8)


def test_absent_class_rewards_silence() -> None:
    loss = DiceCrossEntropyLoss(dice_weight=1.0, ce_weight=0.0)
    target = torch.zeros(1, 4, 4, 4, dtype=torch.long)
    silent = torch.tensor([30.0, -30.0]).view(1, 2, 1, 1, 1).expand(1, 2, 4, 4, 4)
    assert loss(silent, target).item() == pytest.approx(0.0, abs=1e-6)
    assert loss(-silent, target).item() == pytest.approx(1.0, abs=1e-6)
    logits = torch.zeros(1, 2, 4, 4, 4, requires_grad=True)
    loss(logits, target).backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    # Descending lowers the foreground everywhere.
    assert (logits.grad[:, 1] > 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_fp32(dtype: torch.dtype) -> None:
    # 2^18 voxels: a sum in fp16 overflows at 65504, one in bf16 stops growing at 256.
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 3, 64, 64, 64, generator=generator).to(dtype)
    target = torch.randint(0, 3, (1, 64, 64, 64), generator=generator)
    loss = DiceCrossEntropyLoss()
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(logits, target)
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(loss(logits.double(), target).item(), rel=1e-6)


def test_saves_logits_and_target_only() -> None:
    saved: list[tuple[int, ...]] = []
    logits, target = problem()

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        DiceCrossEntropyLoss()(logits.float().requires_grad_(), target)
    assert [shape for shape in saved if len(shape) > 2] == [
        tuple(logits.shape),
        tuple(target.shape),
    ]


def test_layout_changes_nothing() -> None:
    logits, target = problem()
    last = logits.contiguous(memory_format=torch.channels_last_3d)
    assert (
        DiceCrossEntropyLoss()(last, target).item() == DiceCrossEntropyLoss()(logits, target).item()
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dice_weight": -1.0}, "weights"),
        ({"dice_weight": 0.0, "ce_weight": 0.0}, "weights"),
        ({"smooth": 0.0}, "smooth"),
    ],
)
def test_senseless_arguments_are_refused(arguments: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DiceCrossEntropyLoss(**arguments)


def test_misfits_are_refused() -> None:
    logits, target = problem()
    loss = DiceCrossEntropyLoss()
    with pytest.raises(ValueError, match="target must be"):
        loss(logits, target.unsqueeze(1))
    with pytest.raises(ValueError, match="integers"):
        loss(logits, target.float())
    with pytest.raises(ValueError, match="foreground"):
        loss(logits[:, :1], target)


@pytest.mark.parametrize("ignore_value", [None, 7])
def test_hard_voxels_count_more_and_the_gradient_follows(
    ignore_value: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dice_ce, "SLAB_VOXELS_CPU", 30)  # two slabs of two slices
    loss = DiceCrossEntropyLoss(0.7, 1.3, hard_weight=4.0)
    plain = DiceCrossEntropyLoss(0.7, 1.3)
    logits, target = problem()
    is_counted = torch.ones_like(target, dtype=torch.bool)
    if ignore_value is not None:
        target[0, 0] = ignore_value
        is_counted = target != ignore_value
    indices = (target * is_counted)[:, None]
    log_p = torch.log_softmax(logits, 1).gather(1, indices)[:, 0][is_counted]
    added = -(4.0 * (1 - log_p.exp()) ** 2 * log_p).mean() * 1.3
    expected = plain(logits, target, ignore_value) + added
    assert loss(logits, target, ignore_value).item() == pytest.approx(expected.item(), rel=1e-12)
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda z: loss(z, target, ignore_value), logits)


def test_a_voxel_that_is_as_wrong_as_can_be_has_a_finite_gradient() -> None:
    logits = torch.zeros(1, 2, 2, 2, 2)
    logits[:, 1] = 1000.0
    logits.requires_grad_()
    loss = DiceCrossEntropyLoss(hard_weight=10.0)
    loss(logits, torch.zeros(1, 2, 2, 2, dtype=torch.uint8)).backward()
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())


def test_a_negative_weight_of_hard_voxels_is_refused() -> None:
    with pytest.raises(ValueError, match="hard_weight must be >= 0"):
        DiceCrossEntropyLoss(hard_weight=-1.0)


@pytest.mark.parametrize(
    ("slab_voxels", "step"), [(1, 1), (14, 1), (15, 1), (29, 1), (30, 2), (45, 3), (100, 4)]
)
def test_slabs_hold_as_many_slices_as_fit_one_at_least_and_each_slice_once(
    slab_voxels: int, step: int
) -> None:
    logits = torch.zeros(2, 3, 4, 3, 5)
    slabs = list(dice_ce._slabs(logits, slab_voxels))
    slices = [(sample, z) for sample, part in slabs for z in range(part.start, part.stop)]
    assert slices == list(itertools.product(range(2), range(4)))
    sizes = [part.stop - part.start for _, part in slabs]
    assert len(slabs) == 2 * math.ceil(4 / step)  # two samples of four slices
    assert max(sizes) == step


@pytest.mark.parametrize(("include_background", "batch_dice"), SWITCHES)
def test_ignored_voxels_are_no_part_of_a_volume(include_background: bool, batch_dice: bool) -> None:
    """Each sample ends two slices earlier; the padding has logits of its own."""
    loss = DiceCrossEntropyLoss(0.7, 1.3, include_background, batch_dice, hard_weight=2.0)
    logits, target = problem(classes=4)
    expected = loss(logits[:, :, :2], target[:, :2])
    target[:, 2:] = 9
    assert loss(logits, target, 9).item() == pytest.approx(expected.item(), rel=1e-12)
    target[:] = 9
    assert loss(logits, target, 9).item() == pytest.approx(0.0, abs=1e-9), "nothing is wrong"


@pytest.mark.parametrize(("include_background", "batch_dice"), SWITCHES)
def test_the_ignored_value_may_be_that_of_a_class(
    include_background: bool, batch_dice: bool
) -> None:
    loss = DiceCrossEntropyLoss(0.7, 1.3, include_background, batch_dice)
    logits, target = problem(classes=4)
    target %= 3  # no voxel of class 3
    expected = loss(logits[:, :, :2], target[:, :2])
    target[:, 2:] = 3
    assert loss(logits, target, 3).item() == pytest.approx(expected.item(), rel=1e-12)


def test_a_single_class_is_enough_where_the_background_counts() -> None:
    logits, target = torch.zeros(1, 1, 2, 2, 2), torch.zeros(1, 2, 2, 2, dtype=torch.long)
    assert DiceCrossEntropyLoss(include_background=True)(logits, target).item() == 0.0
    with pytest.raises(ValueError, match="foreground"):
        DiceCrossEntropyLoss()(logits, target)
