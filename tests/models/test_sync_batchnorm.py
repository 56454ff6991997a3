"""Synchronised batch norm on two ranks equals batch norm on all samples."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from medseg.memory.switches import apply_switches

# Ranks may have other numbers of samples.
PER_RANK = (1, 3)


def make_case() -> tuple[Tensor, Tensor, nn.Sequential]:
    """Features far from zero, the output's gradient, and a network with an affine norm."""
    generator = torch.Generator().manual_seed(1)
    features, gradient = torch.randn(
        2, sum(PER_RANK), 3, 4, 5, 6, generator=generator, dtype=torch.float64
    )
    network = nn.Sequential(nn.BatchNorm3d(3, dtype=torch.float64), nn.Tanh())
    nn.init.uniform_(network[0].weight, 0.5, 2.0, generator=generator)
    nn.init.uniform_(network[0].bias, generator=generator)
    return 3.0 * features + 100.0, gradient, network


def step(
    network: nn.Module, features: Tensor, gradient: Tensor, device: str = "cpu"
) -> dict[str, Tensor]:
    """Output, gradients and statistics of one forward and backward pass."""
    features = features.to(device).requires_grad_()
    output = network.to(device)(features)
    output.backward(gradient.to(device))
    assert features.grad is not None
    results = {"output": output.detach(), "features": features.grad, **network.state_dict()}
    results |= {
        f"gradient of {name}": p.grad
        for name, p in network.named_parameters()
        if p.grad is not None
    }
    return {name: value.cpu() for name, value in results.items()}


def test_one_rank_is_batch_norm_and_names_stay() -> None:
    features, gradient, network = make_case()
    converted = apply_switches(make_case()[2], synchronise=True)
    assert isinstance(converted[0], nn.SyncBatchNorm)
    expected, results = step(network, features, gradient), step(converted, features, gradient)
    assert list(results) == list(expected)
    for name, value in results.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0, msg=name)


def test_compiled_code_is_refused() -> None:
    with pytest.raises(ValueError, match="compile and synchronised batch norm cannot be combined"):
        apply_switches(make_case()[2], synchronise=True, compile=True)


def run_rank(rank: int, folder: Path) -> None:
    """Take one rank's samples through the norm; ranks may share a GPU: gloo connects them."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2
    )
    features, gradient, network = make_case()
    apply_switches(network, synchronise=True, device_type="cuda")
    device = f"cuda:{rank % torch.cuda.device_count()}"
    torch.save(
        step(network, features.split(PER_RANK)[rank], gradient.split(PER_RANK)[rank], device),
        folder / f"{rank}.pt",
    )
    dist.destroy_process_group()


@pytest.mark.gpu
def test_two_ranks_see_what_one_sees(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    features, gradient, network = make_case()
    expected = step(network, features, gradient)
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=run_rank, args=(rank, tmp_path)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
        assert process.exitcode == 0
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    for name in ("output", "features"):
        torch.testing.assert_close(
            torch.cat([first[name], second[name]]), expected[name], rtol=1e-9, atol=1e-9, msg=name
        )
    # A rank has the gradients of its own samples, which DDP would average.
    for name in ("gradient of 0.weight", "gradient of 0.bias"):
        torch.testing.assert_close(
            first[name] + second[name], expected[name], rtol=1e-9, atol=1e-9, msg=name
        )
    for name in ("0.running_mean", "0.running_var", "0.num_batches_tracked"):
        torch.testing.assert_close(
            first[name], second[name], rtol=0, atol=0, msg=f"ranks differ in {name}"
        )
        torch.testing.assert_close(first[name], expected[name], rtol=1e-9, atol=1e-9, msg=name)
