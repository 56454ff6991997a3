"""Memory switches: counted operations, counted bytes, and combinations that are refused."""

from __future__ import annotations

import contextlib
import copy
import math
import weakref
from typing import Any

import pytest
import torch
from monai.networks.nets.efficientnet import MBConvBlock
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from medseg.memory import switches
from medseg.memory.precision import (
    autocast,
    inference_precision,
    lightning_precision,
    set_tf32,
    tf32_as,
)
from medseg.memory.switches import (
    apply_switches,
    checkpoint_blocks,
    offload_activations,
    select_blocks,
)
from medseg.models.stage_network import StageNetwork
from medseg.models.unet import UNet


def make(norm: str = "instance", block: str = "bottleneck", **arguments: object) -> UNet:
    torch.manual_seed(0)
    network = UNet(1, 2, width=8, depth=2, norm=norm, block=block, **arguments)
    for name, weight in network.named_parameters():
        if name.endswith(
            "branch.2.1.weight"
        ):  # the zero scale at the end of a branch would hide the branch
            nn.init.ones_(weight)
    return network


def image(batch: int = 1) -> Tensor:
    return torch.randn(batch, 1, 16, 24, 32, generator=torch.Generator().manual_seed(1))


def step(network: nn.Module, inputs: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and gradients by name."""
    network.zero_grad()
    logits = network(image() if inputs is None else inputs)
    (logits.float() * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
    grads = {
        name: weight.grad.clone()
        for name, weight in network.named_parameters()
        if weight.grad is not None
    }
    return logits.detach(), grads


def count_flops(network: nn.Module) -> int:
    with FlopCounterMode(display=False) as counter:
        step(network)
    return counter.get_total_flops()


def count_saved_bytes(network: nn.Module) -> int:
    """Bytes autograd keeps between forward and backward, storages counted once, no parameters."""
    weights = {weight.untyped_storage().data_ptr() for weight in network.parameters()}
    storages: dict[
        int, Tensor
    ] = {}  # holding the tensors keeps their addresses from being given away again

    def pack(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in weights:
            storages[address] = tensor.detach()
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        network(image())
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


def test_checkpointing_repeats_the_forward_pass_of_the_chosen_blocks_and_no_more() -> None:
    flops = {
        policy: count_flops(apply_switches(make(), checkpointing=policy))
        for policy in ("none", "sqrt", "all")
    }
    network = make()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network(image())
    head = sum(counter.get_flop_counts()["UNet.head"].values())
    assert flops["none"] < flops["sqrt"] < flops["all"]
    # The head keeps nothing besides its input and is not repeated.
    assert flops["all"] == flops["none"] + counter.get_total_flops() - head


def test_checkpointing_saves_fewer_bytes() -> None:
    saved = {
        policy: count_saved_bytes(apply_switches(make(), checkpointing=policy))
        for policy in ("none", "sqrt", "all")
    }
    assert saved["all"] < saved["sqrt"] < saved["none"]
    assert saved["all"] < 0.5 * saved["none"]


def test_checkpointing_costs_nothing_without_gradient() -> None:
    with FlopCounterMode(display=False) as plain, torch.no_grad():
        make()(image())
    with FlopCounterMode(display=False) as lean, torch.no_grad():
        apply_switches(make(), checkpointing="all")(image())
    assert plain.get_total_flops() == lean.get_total_flops()


@pytest.mark.parametrize("random", [nn.Dropout(0.5), nn.RReLU()])
def test_checkpointing_repeats_random_numbers(random: nn.Module) -> None:
    blocks = {"noise": nn.Sequential(nn.Conv3d(1, 4, 1), random, nn.Conv3d(4, 1, 1))}
    inputs, grads = image(), []
    for policy in ("none", "all"):
        block = copy.deepcopy(blocks["noise"])
        checkpoint_blocks({"noise": block}, policy)
        torch.manual_seed(3)
        grads.append(step(block, inputs)[1])
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])


def test_checkpointing_repeats_the_dropout_of_attention() -> None:
    """This dropout is not a module: `nn.MultiheadAttention` passes the rate to a function."""
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
    lean = copy.deepcopy(plain)
    checkpoint_blocks({"attention": lean}, "all")
    voxels = torch.randn(1, 30, 8)
    grads = []
    for attention in (plain, lean):
        torch.manual_seed(3)
        features, _ = attention(voxels, voxels, voxels)
        features.square().sum().backward()
        grads.append({name: weight.grad for name, weight in attention.named_parameters()})
    assert all(torch.equal(grad, grads[1][name]) for name, grad in grads[0].items())


def test_checkpointing_repeats_the_dropped_samples_of_efficientnet() -> None:
    """EfficientNet's blocks pass their rate to a function."""
    plain = MBConvBlock(3, 4, 4, 3, 1, [4, 4, 4], 1, 0.25, drop_connect_rate=0.5)
    lean = copy.deepcopy(plain)
    checkpoint_blocks({"block": lean}, "all")
    inputs = torch.randn(16, 4, 4, 4, 4)
    grads = []
    for block in (plain, lean):
        torch.manual_seed(3)
        block(inputs).square().sum().backward()
        grads.append({name: weight.grad for name, weight in block.named_parameters()})
    assert all(torch.equal(grad, grads[1][name]) for name, grad in grads[0].items())


@pytest.mark.parametrize(
    ("random", "may_draw"),
    [(nn.Identity(), False), (nn.Dropout(0.0), False), (nn.Dropout(0.5), True), (nn.RReLU(), True)],
)
def test_the_generator_is_read_only_where_a_block_may_draw(
    random: nn.Module, may_draw: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading the generator's state makes the CPU wait for the GPU."""
    kept: list[bool] = []

    def checkpoint(forward: Any, *args: Any, preserve_rng_state: bool, **_: Any) -> Any:
        kept.append(preserve_rng_state)
        return forward(*args)

    monkeypatch.setattr(switches, "checkpoint", checkpoint)
    block = nn.Sequential(nn.Conv3d(1, 4, 1), random, nn.Conv3d(4, 1, 1))
    checkpoint_blocks({"noise": block}, "all")
    block(image())
    network = apply_switches(make(), checkpointing="all")
    network(image())
    assert kept == [may_draw, *[False] * (len(kept) - 1)]
    assert len(kept) > 5


def test_running_statistics_go_on_after_an_evaluation() -> None:
    network = apply_switches(make("batch"), checkpointing="all")
    step(network)
    network.eval()
    before = network.state_dict()["stem.unit.1.running_mean"].clone()
    step(network)
    assert torch.equal(before, network.state_dict()["stem.unit.1.running_mean"])
    network.train()
    step(network)
    assert network.state_dict()["stem.unit.1.num_batches_tracked"] == 2


@pytest.mark.parametrize("norm", [nn.BatchNorm3d, nn.InstanceNorm3d])
def test_a_recomputed_norm_updates_its_statistics_once(norm: type[nn.Module]) -> None:
    running_norm = norm(4, track_running_stats=True)
    plain = nn.Sequential(nn.Conv3d(1, 4, 1), running_norm, nn.Conv3d(4, 1, 1))
    lean = copy.deepcopy(plain)
    checkpoint_blocks({"block": lean}, "all")
    for block in (plain, lean):
        step(block)
    for name, buffer in plain.named_buffers():
        assert torch.equal(buffer, lean.get_buffer(name)), name


def test_compiled_blocks_with_running_statistics_are_not_recomputed() -> None:
    network = make()
    network.head = nn.InstanceNorm3d(2, track_running_stats=True)
    with pytest.raises(ValueError, match="compiled code cannot pause running statistics"):
        apply_switches(network, checkpointing="all", compile=True)


def test_policies_choose_by_count_and_by_name() -> None:
    blocks = make().blocks()
    assert select_blocks(blocks, "none") == []
    assert select_blocks(blocks, "all") == list(blocks)
    assert select_blocks(blocks, "sqrt") == list(blocks)[: math.ceil(len(blocks) ** 0.5)]
    assert select_blocks(blocks, ("encoder.1",)) == ["encoder.1.down", "encoder.1.block0"]
    with pytest.raises(ValueError, match=r"encoder\.9"):
        select_blocks(blocks, ("encoder.9",))
    with pytest.raises(ValueError, match="some"):
        select_blocks(blocks, "some")


def test_channels_last_reaches_every_convolution() -> None:
    last = apply_switches(make(), channels_last=True)
    layouts: list[bool] = []
    for module in last.modules():
        if isinstance(module, nn.LeakyReLU):
            module.register_forward_hook(
                lambda _, __, out: layouts.append(
                    out.is_contiguous(memory_format=torch.channels_last_3d)
                )
            )
    # In bf16 a CPU with such instructions has kernels that keep the layout; the fp32 kernels of a
    # single thread do not. A convolution over axes of two voxels would run in fp32, so the volume
    # is larger.
    with autocast("bf16", "cpu"):
        last(torch.randn(1, 1, 32, 32, 32))
    assert layouts
    assert all(layouts) or not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def test_channels_last_leaves_weights_of_2d_convolutions() -> None:
    network = nn.Sequential(nn.Conv3d(2, 4, 3), nn.Conv2d(2, 4, 3))
    network.register_buffer("mean", torch.zeros(1, 2, 1, 1))
    before = copy.deepcopy(network.state_dict())
    apply_switches(network, channels_last=True)
    assert network[0].weight.is_contiguous(memory_format=torch.channels_last_3d)
    assert network[1].weight.is_contiguous()
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


def test_bf16_halves_what_is_saved_and_fp32_changes_nothing() -> None:
    network = make()
    with autocast("bf16", "cpu"):
        half = count_saved_bytes(network)
    assert half < 0.65 * count_saved_bytes(network)
    exact = network(image())
    with autocast("fp32", "cpu"):
        assert torch.equal(network(image()), exact)


def test_precision_of_a_gpu_is_refused_on_cpu() -> None:
    for function in (autocast, lightning_precision):
        with pytest.raises(ValueError, match="use bf16"):
            function("fp16", "cpu")
        with pytest.raises(ValueError, match="tf32"):
            function("tf32", "cpu")
        with pytest.raises(ValueError, match="int8"):
            function("int8", "cpu")
    assert lightning_precision("bf16", "cpu") == "bf16-mixed"
    assert lightning_precision("fp16", "cuda") == "16-mixed"


@pytest.mark.parametrize(
    ("trained", "device_type", "has_bf16", "expected"),
    [
        ("bf16", "cpu", True, "bf16"),
        ("bf16", "cpu", False, "fp32"),  # emulated: with AVX2 alone several times slower than fp32
        ("fp16", "cpu", True, "fp32"),
        ("tf32", "cpu", True, "fp32"),
        ("fp32", "cpu", True, "fp32"),
        ("fp16", "cuda", False, "fp16"),
        ("bf16", "cuda", True, "bf16"),
        ("bf16", "cuda", False, "fp16"),  # a T4: slow, or without kernels
        ("tf32", "cuda", False, "tf32"),
        ("fp32", "cuda", False, "fp32"),
    ],
)
def test_a_trained_network_runs_as_the_device_can(
    trained: str, device_type: str, has_bf16: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medseg.memory.precision.has_fast_bf16", lambda _: has_bf16)
    assert inference_precision(trained, device_type) == expected


@pytest.mark.parametrize("before", ["highest", "high", "medium"])
def test_the_precision_of_products_is_put_back(before: str) -> None:
    """The calling program may have set `medium`, which means bf16 on a CPU."""
    own = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(before)
        with tf32_as("fp32"):
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == before
    finally:
        torch.set_float32_matmul_precision(own)


def test_backends_that_a_program_has_set_apart_do_not_stop_it() -> None:
    own = torch.get_float32_matmul_precision()
    try:
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        with tf32_as("tf32"):
            assert torch.get_float32_matmul_precision() == "high"
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.set_float32_matmul_precision(own)


def test_tf32_is_allowed_only_where_asked() -> None:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    try:
        for precision, allowed in (("tf32", True), ("fp32", False)):
            set_tf32(precision)
            assert torch.backends.cuda.matmul.allow_tf32 is allowed
            assert torch.backends.cudnn.allow_tf32 is allowed
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def test_offload_is_refused_on_cpu() -> None:
    with pytest.raises(ValueError, match="turn it off"):
        offload_activations(make(), "cpu")


class PretendedGpu(TorchFunctionMode):
    """Makes every tensor appear to be on a GPU, and records how it is copied to and from there."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[str, dict[str, Any]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func == Tensor.is_cuda.__get__:
            return True
        if func is torch.empty:
            self.copies.append(("memory", {"pin_memory": options.pop("pin_memory", False)}))
        elif func is Tensor.copy_:
            self.copies.append(("copy_", {"non_blocking": options.get("non_blocking", False)}))
        return func(*args, **options)


def test_offload_copies_to_pinned_memory_and_back_without_a_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With unpinned memory or a blocking copy the GPU would be idle during each copy."""
    hooks: list[tuple[Any, Any]] = []

    def keep_hooks(pack: Any, unpack: Any) -> Any:
        hooks.append((pack, unpack))
        return contextlib.nullcontext()

    monkeypatch.setattr(switches, "saved_tensors_hooks", keep_hooks)
    network = make()
    switches.save_to_host(network)
    network(image())
    ((pack, unpack),) = hooks
    values, weight = torch.arange(4.0), nn.Parameter(torch.ones(3))
    with PretendedGpu() as gpu:
        packed = pack(values)
        to_host = list(gpu.copies)
        restored = unpack(packed)
        assert unpack(pack(weight)) is weight, "parameters stay where they are"
    from_host = gpu.copies[len(to_host) :]
    assert to_host == [("memory", {"pin_memory": True}), ("copy_", {"non_blocking": True})]
    assert from_host == [("copy_", {"non_blocking": True})]
    assert torch.equal(restored, values)


def test_offloaded_tensors_fill_the_blocks_of_pinned_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch rounds allocations up to powers of two, so one per tensor could double the bytes."""
    monkeypatch.setattr(switches, "HOST_BLOCK_BYTES", 64)
    last = torch.randn(1, 3, 2, 3, 5).to(memory_format=torch.channels_last_3d)
    tensors = [
        torch.randn(7),
        torch.randn(33).bfloat16(),
        last,
        last.permute(0, 4, 2, 3, 1),
        torch.randn(4, 6)[:, ::2],  # with gaps
        torch.randn(3, 1).expand(3, 4),
        torch.tensor(2.5),
        torch.rand(5) > 0.5,
        torch.empty(0),
    ]
    copies = switches.HostCopies()
    with PretendedGpu() as gpu:
        packed = [copies.to_host(tensor) for tensor in tensors]
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    num_blocks = sum(name == "memory" for name, _ in gpu.copies)
    assert num_blocks == math.ceil(num_bytes / 64)
    for tensor, copy_on_host in zip(tensors, packed, strict=True):
        restored = copies.from_host(copy_on_host)
        assert restored.dtype is tensor.dtype
        assert torch.equal(restored, tensor)
        assert restored.data_ptr() != tensor.data_ptr() or not tensor.numel()
    assert copies.from_host(packed[2]).stride() == last.stride()
    assert copies.from_host(packed[3]).stride() == last.permute(0, 4, 2, 3, 1).stride()


def test_a_block_is_free_when_its_tensors_are_gone() -> None:
    copies = switches.HostCopies()
    first = copies.to_host(torch.zeros(switches.HOST_BLOCK_BYTES // 4))
    second = copies.to_host(torch.zeros(8))
    block = weakref.ref(first.pieces[0].untyped_storage())
    assert block() is not None
    del first
    assert block() is None
    assert torch.equal(copies.from_host(second), torch.zeros(8))


@pytest.mark.gpu
def test_offload_frees_the_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    held = []
    for offload in (False, True):
        network = apply_switches(make().cuda(), offload=offload, device_type="cuda")
        before = torch.cuda.memory_allocated()
        logits = network(image().cuda())
        held.append(torch.cuda.memory_allocated() - before - logits.nbytes)
    assert held[1] < 0.5 * held[0]


def test_switches_work_together_on_the_network_of_a_stage() -> None:
    torch.manual_seed(0)
    plain = StageNetwork(lambda channels: UNet(channels, 2, width=8, depth=2))
    lean = apply_switches(copy.deepcopy(plain), checkpointing="all", channels_last=True)
    torch.testing.assert_close(plain(image(2)), lean(image(2)), rtol=1e-4, atol=1e-5)
    assert list(plain.state_dict()) == list(lean.state_dict())
    lean.load_state_dict(plain.state_dict())


def test_switches_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="compile and offload cannot be combined"):
        apply_switches(make(), offload=True, compile=True, device_type="cuda")
    with pytest.raises(ValueError, match="batch norm"):
        apply_switches(make("batch"), checkpointing="all", compile=True)


def test_the_compiler_treats_sizes_as_variables_where_crops_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compile_options: list[dict[str, object]] = []
    monkeypatch.setattr(nn.Module, "compile", lambda _, **options: compile_options.append(options))
    apply_switches(make(), compile=True, compile_mode="reduce_overhead", has_many_shapes=True)
    apply_switches(make(), compile=True, compile_mode="max_autotune")
    apply_switches(make(), compile=True)
    assert compile_options == [
        {"mode": "reduce-overhead", "dynamic": True},
        {"mode": "max-autotune", "dynamic": False},
        {"mode": "default", "dynamic": False},
    ]
    modes = {str(options["mode"]) for options in compile_options}
    assert modes <= {"default", *torch._inductor.list_mode_options()}


@pytest.mark.slow
def test_sizes_as_variables_make_one_graph_of_all_shapes() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    network = torch.compile(
        make().eval(), dynamic=True, backend="eager"
    )  # inductor may add some for its own kernels
    with torch.no_grad():
        for shape in ((32, 40, 48), (40, 32, 56), (48, 56, 32)):
            network(torch.zeros(1, 1, *shape))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
