"""What is found out about any network by tracing it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from monai.networks import nets
from torch import Tensor, nn

from medseg.models.traits import Traits, build_on_meta, channel_arguments, find_traits, outputs_of
from medseg.models.unet import UNet


def traits_of(network_class: type[nn.Module], arguments: dict[str, Any], **stated: Any) -> Traits:
    all_arguments = channel_arguments(network_class, arguments, 2, 3)
    return find_traits(lambda: network_class(**all_arguments), 2, 3, **stated)


@pytest.mark.parametrize(
    ("network_class", "arguments", "divisor", "num_blocks"),
    [
        (
            nets.SegResNet,
            {"init_filters": 8, "blocks_down": (1, 1, 2), "blocks_up": (1, 1)},
            (4, 4, 4),
            6,
        ),
        (nets.SegResNetDS, {"init_filters": 8, "blocks_down": (1, 1, 1)}, (4, 4, 4), 5),
        (
            nets.DynUNet,
            {
                "kernel_size": [[1, 3, 3], 3, 3],
                "strides": [1, [1, 2, 2], 2],
                "upsample_kernel_size": [[1, 2, 2], 2],
                "filters": [4, 8, 8],
                "deep_supervision": True,
            },
            (2, 4, 4),
            5,
        ),
        (nets.SwinUNETR, {"feature_size": 12}, (32, 32, 32), 30),
        (nets.AttentionUnet, {"channels": (4, 8, 8), "strides": (2, 2)}, (4, 4, 4), 13),
        (nets.BasicUNet, {"features": (4, 4, 8, 8, 8, 4)}, (16, 16, 16), 9),
        (nets.VNet, {}, (16, 16, 16), 10),
        (nets.UNet, {"channels": (4, 8, 8), "strides": (2, 2), "num_res_units": 2}, (4, 4, 4), 3),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_divisor_and_blocks_of_other_networks(
    network_class: type[nn.Module],
    arguments: dict[str, Any],
    divisor: tuple[int, int, int],
    num_blocks: int,
) -> None:
    traits = traits_of(network_class, arguments)
    assert (traits.divisor, traits.fixed_size, len(traits.blocks)) == (divisor, None, num_blocks)
    all_arguments = channel_arguments(network_class, arguments, 2, 3)
    network = build_on_meta(lambda: network_class(**all_arguments))
    blocks = [network.get_submodule(name) for name in traits.blocks]
    inside = {id(module) for block in blocks for module in block.modules() if module is not block}
    assert not inside & set(map(id, blocks)), "no block lies in another one"


def test_a_network_of_one_size_says_so() -> None:
    small = {"feature_size": 4, "hidden_size": 24, "mlp_dim": 24, "num_heads": 2}
    traits = traits_of(nets.UNETR, {"img_size": (32, 32, 48), **small}, fixed_size=(32, 32, 48))
    assert traits.fixed_size == traits.small_size == (32, 32, 48)
    assert traits.divisor == (1, 1, 1)


@pytest.mark.parametrize("stem", ["conv", "space_to_depth"])
def test_what_our_unet_states_is_what_a_trace_finds(stem: str) -> None:
    """Its blocks are finer, but hold the same weights."""

    def make() -> UNet:
        return UNet(1, 3, width=8, depth=2, stem=stem)

    stated = find_traits(make, 1, 3)

    class Silent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make()

        def forward(self, image: Tensor) -> Tensor:
            return self.inner(image)

    traced = find_traits(Silent, 1, 3)
    assert traced.divisor == stated.divisor == make().divisor
    assert stated.blocks == tuple(make().blocks())

    def weights_in(blocks: tuple[str, ...]) -> set[str]:
        prefixes = tuple(f"{block.removeprefix('inner.')}." for block in blocks)
        return {name for name, _ in make().named_parameters() if name.startswith(prefixes)}

    assert weights_in(traced.blocks) == weights_in(stated.blocks)


class Odd(nn.Module):
    """Modules that are no blocks (no parameters, called twice, in place), and one of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.MaxPool3d(2)
        self.twice = nn.Sequential(nn.Conv3d(1, 1, 3, padding=1), nn.BatchNorm3d(1), nn.ReLU())
        self.changing = nn.Sequential(
            nn.LeakyReLU(inplace=True), nn.Conv3d(1, 1, 3, padding=1), nn.BatchNorm3d(1), nn.ReLU()
        )
        self.joining = Joining()
        self.unused = nn.Linear(2, 2)
        self.head = nn.Conv3d(1, 3, 1)

    def forward(self, image: Tensor) -> Tensor:
        half = self.pool(image) * 2
        features = self.changing(self.twice(self.twice(half)) + 0)
        return self.head(
            self.joining(nn.functional.interpolate(features, scale_factor=2), skip=image)
        )


class Joining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(1, 1, 3, padding=1)
        self.norm = nn.BatchNorm3d(1)

    def forward(self, features: Tensor, skip: Tensor) -> Tensor:
        return torch.sigmoid(self.norm(self.conv(features + skip)))


def test_only_modules_that_can_be_recomputed_are_blocks() -> None:
    traits = find_traits(Odd, 1, 3)
    assert traits.blocks == ("joining",)
    assert traits.divisor == (2, 2, 2)
    assert traits.has_unused


class Widening(nn.Module):
    """Two blocks, of which the later saves more."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Sequential(
            nn.Conv3d(1, 2, 3, padding=1), nn.ReLU(), nn.Conv3d(2, 2, 3, padding=1)
        )
        self.wide = nn.Sequential(
            nn.Conv3d(2, 16, 3, padding=1), nn.ReLU(), nn.Conv3d(16, 3, 3, padding=1)
        )

    def forward(self, image: Tensor) -> Tensor:
        return self.wide(self.narrow(image))


def test_the_block_that_saves_the_most_comes_first() -> None:
    assert find_traits(Widening, 1, 3).blocks == ("wide", "narrow")


def test_what_is_stated_counts() -> None:
    traits = find_traits(Odd, 1, 3, divisor=(8, 4, 4), blocks=["twi*", "head"])
    assert traits.divisor == (8, 4, 4)
    assert set(traits.blocks) == {"twice", "head"}
    with pytest.raises(
        ValueError,
        match="blocks names 'joinin', which is no module of the network; similar names are joining",
    ):
        find_traits(Odd, 1, 3, blocks=["joinin"])


class WithoutModules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 1, 1, 1, 1))

    def forward(self, image: Tensor) -> Tensor:
        return nn.functional.conv3d(image, self.weight)


def test_a_network_without_modules_has_no_block_to_name() -> None:
    with pytest.raises(ValueError, match=r"'encoder', which is no module .*; it has no modules"):
        find_traits(WithoutModules, 1, 3, blocks=["encoder"])


class WithListOfBlocks(nn.Module):
    divisor = 4

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 4, 3, padding=1))]
        )
        self.head = nn.Conv3d(4, 3, 1)

    def forward(self, image: Tensor) -> list[Tensor]:
        logits = self.head(self.blocks[0](image))
        return [logits, logits[..., ::2, ::2, ::2]]


def test_a_list_of_modules_named_blocks_is_no_statement() -> None:
    assert find_traits(WithListOfBlocks, 1, 3) == Traits((4, 4, 4), ("blocks.0",), num_outputs=2)


class ByValue(nn.Module):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv3d(in_channels, out_channels, 1)

    def forward(self, image: Tensor) -> Tensor:
        return self.conv(image) if float(image.mean()) > 0 else -self.conv(image)


class Returning(nn.Module):
    """Returns a function of three channels of logits, and in evaluation another one."""

    def __init__(
        self,
        in_training: Callable[[Tensor], Any],
        in_evaluation: Callable[[Tensor], Any] | None = None,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv3d(1, 3, 1)
        self.in_training = in_training
        self.in_evaluation = in_evaluation or in_training

    def forward(self, image: Tensor) -> Any:
        logits = self.conv(image)
        if self.training:
            return self.in_training(logits)
        return self.in_evaluation(logits)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ByValue(1, 3),
            "cannot be traced without computing .* state model.divisor and model.blocks",
        ),
        (
            lambda: nn.Conv3d(1, 4, 1),
            r"must return logits of shape \(1, 3, 64, 64, 64\), but returned \(1, 4, 64, 64, 64\)",
        ),
        (
            lambda: nn.Conv3d(1, 3, 3),
            (
                r"but returned \(1, 3, 62, 62, 62\); it does not fit cubes of 64, 96, .* state "
                r"model\.divisor"
            ),
        ),
        (
            lambda: Returning(lambda x: {"logits": x, "features": x.mean((2, 3, 4))}),
            r"but returned {logits: .*, features: \(1, 3\)}; wrap",
        ),
        (
            lambda: Returning(lambda x: (x, x.mean())),
            r"but returned \[\(1, 3, 64, 64, 64\), \(\)\]; wrap it in a class",
        ),
        (
            lambda: Returning(lambda x: (x, None)),
            r"but returned \[\(1, 3, 64, 64, 64\), NoneType\]",
        ),
        (
            lambda: Returning(lambda x: (x, [x, x])),
            "wrap it in a class that returns its logits alone",
        ),
        (lambda: Returning(lambda _: []), r"but returned \[\]"),
        (
            lambda: Returning(lambda x: x, lambda x: {"logits": x, "probs": x.sum()}),
            "but returned {logits: ",
        ),
    ],
)
def test_a_network_that_does_not_fit_is_one_sentence(
    make: Callable[[], nn.Module], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        find_traits(make, 1, 3)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("stated", "advice"),
    [
        ({"fixed_size": (64, 96, 96)}, "correct its padding or strides, or img_size"),
        (
            {"divisor": (2, 4, 4)},
            "nor does it fit other multiples of [2, 4, 4]: correct its padding or strides, or "
            "model.divisor",
        ),
    ],
    ids=["fixed size", "divisor"],
)
def test_logits_of_another_size_are_no_question_of_a_divisor_that_does_not_count(
    stated: dict[str, Any], advice: str
) -> None:
    with pytest.raises(ValueError, match="must return logits of shape") as caught:
        find_traits(lambda: nn.Conv3d(1, 3, 3), 1, 3, **stated)
    assert str(caught.value).partition("; ")[2] == advice


def test_a_dictionary_of_one_output_is_taken_as_its_logits() -> None:
    assert find_traits(lambda: Returning(lambda x: {"logits": x}), 1, 3).num_outputs == 1


@pytest.mark.parametrize(
    ("strides", "divisor"), [((3, 3), 9), ((2, 3), 6), ((5, 5), 25), ((3, 3, 3), 27), ((7,), 7)]
)
def test_strides_that_are_no_powers_of_two_are_traced(
    strides: tuple[int, ...], divisor: int
) -> None:
    channels = [4 * (n + 1) for n in range(len(strides) + 1)]
    traits = find_traits(lambda: nets.UNet(3, 1, 3, channels, strides), 1, 3)
    assert traits.divisor == (divisor, divisor, divisor)


def test_a_network_that_decides_by_values_works_where_both_are_stated() -> None:
    traits = find_traits(lambda: ByValue(1, 3), 1, 3, divisor=(2, 2, 2), blocks=["conv"])
    assert traits == Traits((2, 2, 2), ("conv",), has_unused=True)


def test_the_divisor_is_1_for_a_fixed_size_even_without_a_trace() -> None:
    size = (8, 16, 8)
    traits = find_traits(
        lambda: ByValue(1, 3), 1, 3, divisor=(2, 2, 2), blocks=["conv"], fixed_size=size
    )
    assert traits == Traits((1, 1, 1), ("conv",), fixed_size=size, has_unused=True)


def test_channels_follow_the_task_by_the_names_of_arguments() -> None:
    assert channel_arguments(ByValue, {}, 2, 5) == {"in_channels": 2, "out_channels": 5}
    assert channel_arguments(nets.SwinUNETR, {}, 4, 2) == {
        "spatial_dims": 3,
        "in_channels": 4,
        "out_channels": 2,
    }
    assert channel_arguments(UNet, {"width": 4}, 1, 2) == {
        "in_channels": 1,
        "num_classes": 2,
        "width": 4,
    }
    with pytest.raises(
        ValueError, match="out_channels=3, but the task has 2 classes; leave out_channels out"
    ):
        channel_arguments(ByValue, {"out_channels": 3}, 1, 2)
    with pytest.raises(
        ValueError,
        match="the constructor of Linear has no argument for the number of channels of the image",
    ):
        channel_arguments(nn.Linear, {}, 1, 2)


@pytest.mark.parametrize(
    "form",
    [
        list,
        tuple,
        lambda outputs: dict(enumerate(outputs)),
        lambda outputs: torch.stack(outputs, 1),
    ],
)
def test_deep_supervision_gives_a_list_in_training_and_the_first_output_otherwise(
    form: Any,
) -> None:
    outputs = [torch.full((2, 3, 4, 4, 4), float(number)) for number in range(3)]
    trained = outputs_of(form(outputs), is_training=True)
    assert isinstance(trained, list)
    assert all(
        torch.equal(trained_output, output)
        for trained_output, output in zip(trained, outputs, strict=True)
    )
    assert torch.equal(outputs_of(form(outputs), is_training=False), outputs[0])
    assert torch.equal(outputs_of(form(outputs[:1]), is_training=True), outputs[0])


def test_a_network_whose_features_are_made_by_functions_alone_has_a_divisor() -> None:
    """No module returns features of three dimensions; halves and doubles must meet."""

    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3, 1, 3, 3, 3))

        def forward(self, image: Tensor) -> dict[str, Tensor]:
            features = nn.functional.conv3d(image, self.weight, stride=2, padding=1)
            # Without a remainder, the result is as large as the image.
            return {"logits": nn.functional.interpolate(features, scale_factor=2.0)}

    assert find_traits(Functional, 1, 3) == Traits((2, 2, 2), (), num_outputs=1)
