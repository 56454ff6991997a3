"""OpenVINO: same logits as torch, a message where it is missing, choice by measurement."""

from __future__ import annotations

import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from medseg.errors import UserError
from medseg.inference import openvino as backend
from medseg.inference.openvino import openvino_bytes, quickest_backend, use_openvino
from medseg.io import calibration
from medseg.io.calibration import Circumstances
from medseg.models.stage_network import StageNetwork
from medseg.models.unet import UNet

needs_openvino = pytest.mark.skipif(
    not backend.has_openvino(), reason="the extra openvino is not installed"
)


def make(norm: str = "instance") -> StageNetwork:
    torch.manual_seed(0)
    network = StageNetwork(
        lambda channels: UNet(
            channels, 2, width=4, depth=1, blocks_per_level=1, refine=2, norm=norm
        )
    )
    for parameter in network.parameters():
        if parameter.ndim == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return network.eval()


def test_openvino_holds_the_bytes_of_the_weights_twice() -> None:
    layer = nn.Linear(1000, 10, bias=False)
    assert openvino_bytes(layer) - openvino_bytes(nn.Identity()) == 2 * 40_000
    assert openvino_bytes(layer.half()) - openvino_bytes(nn.Identity()) == 2 * 20_000


@needs_openvino
@pytest.mark.parametrize("norm", ["instance", pytest.param("affine", marks=pytest.mark.slow)])
def test_logits_are_those_of_torch_at_every_size(norm: str) -> None:
    network = make(norm)
    # The second pass of a size must not write into the result of the first.
    images = [
        torch.randn(1, 1, *shape)
        for shape in ((16, 24, 32), (32, 16, 16), (16, 24, 32), (16, 24, 32))
    ]
    with torch.inference_mode():
        expected = [network(image) for image in images]
        use_openvino(network, "fp32")
        logits = [network(image) for image in images]
    for ours, theirs in zip(logits, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@needs_openvino
def test_a_converted_network_is_kept_for_its_checkpoint_and_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import openvino

    operations = openvino.opset13
    factors = [2.0, 3.0, 4.0, 5.0]

    def convert(*_: Any) -> Any:
        shape = openvino.PartialShape([1, 1, -1, -1, -1])
        image = operations.parameter(shape, dtype=np.float32)
        row = operations.constant([factors.pop(0)] * 16, dtype=np.float32)
        return openvino.Model([operations.multiply(image, row)], [image])

    def run(checksum: str) -> float:
        network = make()
        use_openvino(network, "fp32", checksum)
        return float(network(torch.ones(1, 1, 4, 4, 16)).mean())

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(backend, "convert", convert)
    assert [run("a"), run("a")] == [2.0, 2.0]
    (cached_file,) = tmp_path.rglob("*.zip")
    assert [run("b"), run("a")] == [3.0, 2.0]  # another checkpoint
    content = bytearray(cached_file.read_bytes())
    content[len(content) // 2] ^= 1
    cached_file.write_bytes(content)
    assert [run("a"), run("a")] == [4.0, 4.0]  # a damaged file is replaced
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 2
    assert run("") == 5.0


KEPT_AFTER_A_PASS = """
import torch
from medseg.inference.openvino import use_openvino
from medseg.memory.profile import release_free_memory, resident_bytes
from medseg.models.stage_network import StageNetwork
from medseg.models.unet import UNet

torch.set_num_threads(1)
network = StageNetwork(lambda channels: UNet(channels, 2, width=16, depth=1)).eval()
use_openvino(network, "fp32")
kept = []
with torch.inference_mode():
    for size in (16, 96):
        network(torch.zeros(1, 1, size, size, size))
        release_free_memory()
        kept.append(resident_bytes())
print(kept[1] - kept[0], 4 * size**3)
"""


@needs_openvino
@pytest.mark.slow
def test_feature_maps_of_a_pass_are_given_back() -> None:
    result = subprocess.run(
        [sys.executable, "-c", KEPT_AFTER_A_PASS], capture_output=True, check=True
    )
    kept_bytes, image = map(int, result.stdout.split())
    # The feature maps of this pass take more than forty times its image.
    assert kept_bytes < 10 * image


@needs_openvino
def test_the_memory_of_a_pass_is_released_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    released = []

    class Compiled:
        def __init__(self, compiled: Any) -> None:
            self.compiled = compiled

        def __getattr__(self, name: str) -> Any:
            return getattr(self.compiled, name)

        def release_memory(self) -> None:
            released.append(True)

    class Core:
        def compile_model(self, *arguments: Any) -> Compiled:
            return Compiled(core.compile_model(*arguments))

    core = backend.core()
    monkeypatch.setattr(backend, "core", Core)
    network = make()
    use_openvino(network, "fp32")
    for number in (1, 2):
        network(torch.zeros(1, 1, 16, 16, 16))
        assert len(released) == number


@needs_openvino
def test_openvino_has_no_package_that_could_send_statistics() -> None:
    """In a new process, where the check of the libraries of an export imports OpenVINO first."""
    lines = [
        "from medseg.inference import export",
        "export._check_libraries(export.FORMATS['.xml'])",
        "from openvino.tools.ovc import convert_impl, telemetry_utils",
        "print(convert_impl.tm.__name__, telemetry_utils.tm.__name__)",
    ]
    command = [sys.executable, "-c", "; ".join(lines)]
    printed = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    assert set(printed.split()) == {"openvino.tools.ovc.telemetry_stub"}


class Other(UNet):
    pass


@needs_openvino
def test_networks_of_other_packages_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert backend._cache_path(make().networks[0], "a") is not None
    assert backend._cache_path(Other(1, 2, width=4, depth=1), "a") is None


@needs_openvino
def test_a_limit_that_openvino_does_not_know_is_refused_in_bf16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    with pytest.raises(
        UserError,
        match=(
            "crashes in bf16 under ONEDNN_MAX_CPU_ISA=AVX2; give precision=fp32, or unset "
            "ONEDNN_MAX_CPU_ISA"
        ),
    ):
        use_openvino(make(), "bf16")
    use_openvino(make(), "fp32")


class Odd(UNet):
    """Network that OpenVINO cannot convert."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.special.bessel_j0(image))


class Sized(UNet):
    """Network that OpenVINO converts for the size of the example alone, as MONAI's SwinUNETR."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return super().forward(image.reshape([int(length) for length in image.shape]))


class Scaled(UNet):
    """Network whose converted form has other logits at other sizes, without an error."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return super().forward(image) / int(image.shape[2])


def make_odd(network_class: type[UNet]) -> StageNetwork:
    return StageNetwork(
        lambda channels: network_class(channels, 2, width=4, depth=1, blocks_per_level=1)
    ).eval()


@needs_openvino
@pytest.mark.parametrize("network_class", [Odd, Sized, Scaled])
def test_a_network_that_cannot_be_converted_is_one_sentence(network_class: type[UNet]) -> None:
    network = make_odd(network_class)
    use_openvino(network, "fp32")
    with pytest.raises(
        UserError,
        match=(
            rf"inference\.backend=openvino: {network_class.__name__} cannot be converted .*; "
            r"choose inference\.backend=torch"
        ),
    ):
        network(torch.zeros(1, 1, 16, 16, 16))


@needs_openvino
@pytest.mark.parametrize("network_class", [Odd, Sized, Scaled])
def test_a_network_that_cannot_be_converted_runs_in_torch_where_nobody_asked(
    network_class: type[UNet],
) -> None:
    network = make_odd(network_class)
    image = torch.randn(1, 1, 16, 16, 16)
    with torch.inference_mode():
        expected = network(image)
        use_openvino(network, "fp32", is_required=False)
        for _ in range(2):
            assert torch.equal(network(image), expected)


@needs_openvino
def test_a_network_is_refused_only_at_other_sizes_than_the_one_that_it_was_converted_at() -> None:
    network = make_odd(Sized)
    image = torch.randn(1, 1, *network.traits.small_size)
    with torch.inference_mode():
        expected = network(image)
        use_openvino(network, "fp32")
        torch.testing.assert_close(network(image), expected, rtol=1e-3, atol=1e-3)
        with pytest.raises(UserError, match=r"Sized cannot be converted \(not at this size: .*\);"):
            network(torch.zeros(1, 1, 16, 16, 16))
        # Still in OpenVINO.
        torch.testing.assert_close(network(image), expected, rtol=1e-3, atol=1e-3)


@needs_openvino
def test_a_network_is_compared_once_for_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared_sizes = []

    def difference(*arguments: Any) -> float:
        compared_sizes.append(arguments[-1])
        return 0.0

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    package = Other.__module__.partition(".")[0]
    monkeypatch.setattr(backend, "KNOWN_PACKAGES", ("medseg", "torch", package))
    monkeypatch.setattr(backend, "logits_difference", difference)
    for length in (12, 16, 8, 16):  # first the small size
        network = make_odd(Other)
        use_openvino(network, "fp32", "a")
        with torch.inference_mode():
            network(torch.zeros(1, 1, length, length, length))
        monkeypatch.setattr(backend, "convert", lambda *_: pytest.fail("converted again"))
    assert compared_sizes == [(8, 12, 16)]


@needs_openvino
@pytest.mark.parametrize("step", ["convert", "logits_difference"])
def test_full_memory_is_no_failure_of_the_conversion(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(backend, step, fail)
    network = make_odd(Other)
    use_openvino(network, "fp32", is_required=True)
    with torch.inference_mode(), pytest.raises(MemoryError):
        network(torch.zeros(1, 1, 16, 16, 16))


@needs_openvino
def test_a_size_that_cannot_be_compiled_does_not_affect_the_next_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = make()
    image = torch.randn(1, 1, 16, 16, 16)
    use_openvino(network, "fp32")

    class Full:
        def compile_model(self, *_: Any) -> None:
            raise RuntimeError("bad allocation")

    with torch.inference_mode():
        before = network(image)
        with monkeypatch.context() as patch:
            patch.setattr(backend, "core", Full)
            with pytest.raises(RuntimeError, match="bad allocation"):
                network(torch.randn(1, 1, 32, 32, 32))
        assert torch.equal(network(image), before)


def test_a_damaged_file_is_converted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "core", lambda: SimpleNamespace(read_model=lambda *_: "model"))
    path = tmp_path / "model.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model.xml", b"<net/>")
        archive.writestr("model.bin", bytes(100))
    content = path.read_bytes()
    assert backend._read_cached(path) == "model"
    random = np.random.default_rng(0)
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= int(random.integers(1, 256))
        path.write_bytes(damaged)
        # Changes of some bytes are not noticed, such as those of the date.
        assert backend._read_cached(path) in (None, "model")


def test_without_the_extra_one_sentence_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "has_openvino", lambda: False)
    with pytest.raises(
        UserError,
        match=(
            r"OpenVINO is not installed; run pip install 'medseg\[openvino\]', or choose "
            r"inference\.backend=torch"
        ),
    ):
        use_openvino(make(), "fp32")


@pytest.fixture
def timings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float]]:
    """Replace the measurements by durations of torch and OpenVINO; the machine's cache is empty."""
    pairs: list[tuple[float, float]] = []

    def seconds(call: Any, image: torch.Tensor) -> float:
        return pairs[0][0] if isinstance(call, nn.Module) else pairs.pop(0)[1]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(backend, "_seconds", seconds)
    monkeypatch.setattr(backend.importlib.metadata, "version", lambda _: "1.0")
    monkeypatch.setattr(
        calibration.LoadMeter, "circumstances", lambda _: Circumstances(0.0, time.time())
    )
    monkeypatch.setattr(calibration, "present_load", lambda: 0.0)
    return pairs


@pytest.mark.parametrize(
    ("torch_s", "openvino_s", "chosen"), [(1.0, 2.0, "torch"), (2.0, 1.0, "openvino")]
)
def test_the_quicker_one_is_measured_once_per_machine(
    torch_s: float,
    openvino_s: float,
    chosen: str,
    tmp_path: Path,
    timings: list[tuple[float, float]],
) -> None:
    timings += [(torch_s, openvino_s)] * 4
    assert [quickest_backend(make()) for _ in range(2)] == [chosen, chosen]
    assert len(timings) == 2
    (calibration,) = (tmp_path / "medseg" / "backends").iterdir()
    calibration.write_text("damaged", encoding="utf-8")
    assert quickest_backend(make()) == chosen
    assert timings == []


def test_durations_that_differ_are_measured_again_and_the_shorter_ones_count(
    timings: list[tuple[float, float]],
) -> None:
    # Another program lengthens the first pass in OpenVINO, and slightly the last one in torch.
    timings += [(2.0, 9.0), (2.0, 1.0), (2.3, 1.0)]
    assert quickest_backend(make()) == "openvino"
    assert timings == []


def test_a_choice_made_under_load_is_made_anew_on_a_quiet_machine(
    timings: list[tuple[float, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        calibration.LoadMeter, "circumstances", lambda _: Circumstances(0.8, time.time())
    )
    monkeypatch.setattr(calibration, "present_load", lambda: 0.8)
    timings += [(1.0, 2.0)] * 2
    assert [quickest_backend(make()) for _ in range(2)] == ["torch", "torch"]
    monkeypatch.setattr(calibration, "present_load", lambda: 0.0)
    timings += [(2.0, 1.0)] * 2
    assert quickest_backend(make()) == "openvino"


def test_durations_that_never_agree_are_not_kept_for_a_quiet_machine(
    timings: list[tuple[float, float]],
) -> None:
    timings += [(number, 2.0 * number) for number in (1.0, 2.0, 4.0, 8.0, 16.0)]
    assert quickest_backend(make()) == "torch"
    timings += [(2.0, 1.0)] * 2
    assert quickest_backend(make()) == "openvino"
    assert timings == []


def test_a_choice_expires(
    timings: list[tuple[float, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    timings += [(1.0, 2.0)] * 2
    assert quickest_backend(make()) == "torch"
    later_s = time.time() + calibration.MAX_AGE_S + 60
    monkeypatch.setattr(calibration.time, "time", lambda: later_s)
    timings += [(2.0, 1.0)] * 2
    assert quickest_backend(make()) == "openvino"


@pytest.mark.parametrize("fixed_size", [None, (8, 16, 8)])
def test_a_network_is_measured_at_a_size_that_it_takes(
    fixed_size: tuple[int, int, int] | None,
    timings: list[tuple[float, float]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = make()
    network.traits = network.traits._replace(fixed_size=fixed_size)
    small_size = network.traits.small_size
    sizes = set()

    def seconds(call: Any, image: torch.Tensor) -> float:
        sizes.add(tuple(image.shape[2:]))
        return 1.0

    monkeypatch.setattr(backend, "_seconds", seconds)
    quickest_backend(network)
    assert sizes == {fixed_size or tuple(2 * length for length in small_size)}


SIGNAL_AFTER_THE_LAST_NETWORK = """
import gc, signal, threading
import torch
from medseg.inference.openvino import use_openvino
from medseg.models.stage_network import StageNetwork
from medseg.models.unet import UNet

signal.signal(signal.SIGUSR1, lambda *_: None)
networks = [StageNetwork(lambda channels: UNet(channels, 2, width=4, depth=1)).eval()]
use_openvino(networks[0], "fp32")
with torch.inference_mode():
    networks[0](torch.zeros(1, 1, 16, 16, 16))
thread = threading.Thread(target=lambda: (networks.clear(), gc.collect()))
thread.start()
thread.join()
signal.raise_signal(signal.SIGUSR1)
"""


@needs_openvino
@pytest.mark.slow
def test_a_signal_after_the_last_network_went_in_another_thread_ends_nothing() -> None:
    result = subprocess.run(
        [sys.executable, "-c", SIGNAL_AFTER_THE_LAST_NETWORK], capture_output=True, check=False
    )
    assert result.returncode == 0, result.stderr
