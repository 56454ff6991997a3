"""Export: a converted network computes the logits of torch at every size that it accepts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from medseg.errors import UserError
from medseg.inference import export
from medseg.inference.export import FORMATS, export_network
from medseg.inference.openvino import core
from medseg.models.stage_network import Logits, StageNetwork
from medseg.models.unet import UNet


class OneSize(UNet):
    """Network that reads its input size in Python: tracing makes constants of the numbers."""

    def forward(self, image: Tensor) -> Tensor:
        return super().forward(image) + torch.zeros(
            [1, 1, *(int(size) for size in image.shape[2:])]
        ).cumsum(2)


def make(norm: str = "instance", kind: type[UNet] = UNet) -> StageNetwork:
    torch.manual_seed(0)
    network = StageNetwork(
        lambda channels: kind(
            channels, 2, width=4, depth=1, blocks_per_level=1, refine=2, norm=norm
        )
    )
    for parameter in network.parameters():
        if parameter.ndim == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return network.eval()


def convert(network: StageNetwork, suffix: str, fixed: Any = None) -> export.Exported:
    traits = network.traits
    return export_network(
        Logits(network.network),
        network.in_channels,
        traits.divisor,
        traits.small_size,
        fixed,
        suffix,
        lambda size: {"size": size},
    )


@pytest.mark.parametrize(
    "norm",
    ["instance", *(pytest.param(norm, marks=pytest.mark.slow) for norm in ("affine", "channel"))],
)
def test_a_converted_network_has_the_logits_of_torch_and_its_metadata(
    norm: str, tmp_path: Path
) -> None:
    network, image = make(norm), torch.randn(1, 1, 24, 8, 16)
    exported = convert(network, ".xml")
    for part, content in exported.files.items():
        (tmp_path / f"model{part}").write_bytes(content)
    model = core().read_model(str(tmp_path / "model.xml"))
    compiled = core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    logits = torch.from_numpy(compiled({"image": image.numpy()})["logits"])
    with torch.inference_mode():
        torch.testing.assert_close(logits, network(image), rtol=1e-3, atol=1e-3)
    assert exported.fixed_size is None
    assert json.loads(model.get_rt_info(["medseg"]).astype(str)) == {"size": None}


@pytest.mark.slow
def test_a_network_of_one_size_is_converted_for_its_tiles_only() -> None:
    network = make(kind=OneSize)
    assert convert(network, ".xml", fixed=(16, 16, 24)).fixed_size == (16, 16, 24)
    with pytest.raises(
        UserError,
        match=r"OneSize cannot be converted to OpenVINO.*; choose the other format: model\.onnx",
    ):
        convert(network, ".xml")


@pytest.mark.slow
def test_other_logits_than_those_of_torch_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    load = FORMATS[".xml"].load

    def load_wrong(model: Any) -> export.Run:
        run = load(model)
        return lambda image: run(image) * 1.01

    monkeypatch.setitem(FORMATS, ".xml", FORMATS[".xml"]._replace(load=load_wrong))
    with pytest.raises(
        UserError, match=r"its logits differ from those of torch by 0\.01 of the largest logit"
    ):
        convert(make(), ".xml")


def test_a_missing_library_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, ".onnx", FORMATS[".onnx"]._replace(modules=("no_such_library",)))
    with pytest.raises(
        UserError, match=r"ONNX needs no_such_library: run pip install 'medseg\[export\]'"
    ):
        convert(make(), ".onnx")


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".onnx", ".xml"])
def test_other_programs_run_the_files_at_every_size(suffix: str, tmp_path: Any) -> None:
    network = make()
    exported = convert(network, suffix)
    assert exported.fixed_size is None
    assert exported.difference < 1e-5
    for part, content in exported.files.items():
        (tmp_path / f"model{part}").write_bytes(content)
    path, expected = str(tmp_path / f"model{suffix}"), {"size": None}
    if suffix == ".onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        run = lambda image: session.run(["logits"], {"image": image})[0]  # noqa: E731
        assert json.loads(session.get_modelmeta().custom_metadata_map["medseg"]) == expected
        assert exported.form.startswith("ONNX, opset ")
    else:
        model = core().read_model(path)
        compiled = core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        run = lambda image: compiled({"image": image})["logits"]  # noqa: E731
        assert json.loads(model.get_rt_info(["medseg"]).astype(str)) == expected
    for shape in ((8, 12, 16), (20, 12, 12)):
        image = torch.randn(1, 1, *shape)
        with torch.inference_mode():
            torch.testing.assert_close(
                torch.from_numpy(run(image.numpy())), network(image), rtol=1e-3, atol=1e-4
            )


class OneValue(Logits):
    """Stand-in for a network: its logits are twice the image."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.network = nn.Identity()

    def forward(self, image: Tensor) -> Tensor:
        return 2 * image


def export_one_value(
    run: Any, fixed_size: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[export.Exported, list[Any]]:
    """Export with a fake format that records its calls."""
    calls: list[Any] = []

    def converted(network: Logits, example: Tensor, is_dynamic: bool) -> bool:
        calls.append((tuple(example.shape), is_dynamic))
        return is_dynamic

    form = export.Format(
        "Plain", "plain", ("json",), converted, lambda is_dynamic: run(is_dynamic, calls),
        lambda is_dynamic: f"plain {is_dynamic}", lambda _, text: {".plain": text.encode()},
    )  # fmt: skip
    monkeypatch.setitem(FORMATS, ".plain", form)
    arguments = (
        OneValue(),
        3,
        (2, 4, 8),
        (4, 8, 16),
        fixed_size,
        ".plain",
        lambda size: {"size": size},
    )
    return export_network(*arguments), calls


def right(is_dynamic: bool, calls: list[Any]) -> Any:
    return lambda image: calls.append(tuple(image.shape)) or 2 * image


def right_at_one_size(is_dynamic: bool, calls: list[Any]) -> Any:
    def run(image: Tensor) -> Tensor:
        is_seen = tuple(image.shape[2:]) == (4, 8, 16)
        return 2 * image if is_seen or not is_dynamic else 2.1 * image

    return run


def test_a_conversion_is_compared_at_a_size_that_it_has_not_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for fixed_size in (None, (8, 8, 8)):
        exported, calls = export_one_value(right, fixed_size, monkeypatch)
        assert calls == [((1, 3, 4, 8, 16), True), (1, 3, 4, 8, 16), (1, 3, 4, 12, 32)]
        assert (exported.fixed_size, exported.difference) == (None, 0.0)
        assert exported.files == {".plain": b'{"size": null}'}
    exported, calls = export_one_value(right, (4, 8, 16), monkeypatch)
    assert calls == [((1, 3, 4, 8, 16), False), (1, 3, 4, 8, 16)], "no smaller size exists"
    assert exported.fixed_size == (4, 8, 16)


def test_a_conversion_that_is_wrong_elsewhere_is_limited_to_the_tiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exported, calls = export_one_value(right_at_one_size, (8, 8, 8), monkeypatch)
    assert [is_dynamic for _, is_dynamic in calls] == [True, False]
    assert (exported.fixed_size, exported.form) == ((8, 8, 8), "plain False")
    assert exported.files == {".plain": b'{"size": [8, 8, 8]}'}
    with pytest.raises(UserError, match=r"differ from those of torch by 0\.05 of the largest"):
        export_one_value(right_at_one_size, None, monkeypatch)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda logits: logits[:, :1],
        lambda logits: torch.full_like(logits, torch.nan),
        lambda logits: torch.cat(
            [logits[..., :-1], torch.full_like(logits[..., :1], torch.inf)], -1
        ),
        lambda logits: logits + 0.01 * logits.abs().max(),
    ],
)
def test_logits_of_another_shape_or_without_a_value_are_refused(
    spoil: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(is_dynamic: bool, calls: list[Any]) -> Any:
        return lambda image: spoil(2 * image)

    with pytest.raises(UserError, match="Identity cannot be converted to Plain"):
        export_one_value(run, (8, 8, 8), monkeypatch)
