"""Batch norm over all ranks equals batch norm over all samples."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from medseg.memory.switches import apply_switches
from medseg.models.synchronised import SynchronisedBatchNorm3d, synchronise_batch_norms

# Ranks may have other numbers of samples.
PER_RANK = (1, 3)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A group of one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make_case(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, nn.Sequential]:
    """Features far from zero, the gradient of the output, and a network with a norm that scales and shifts."""
    generator = torch.Generator().manual_seed(1)
    features, gradient = torch.randn(2, sum(PER_RANK), 3, 4, 5, 6, generator=generator, dtype=dtype)
    network = nn.Sequential(nn.BatchNorm3d(3, dtype=dtype), nn.Tanh())
    nn.init.uniform_(network[0].weight, 0.5, 2.0, generator=generator)  # type: ignore[arg-type]
    nn.init.uniform_(network[0].bias, generator=generator)  # type: ignore[arg-type]
    return 3.0 * features + 100.0, gradient, network


def step(network: nn.Module, features: Tensor, gradient: Tensor) -> dict[str, Tensor]:
    """Output, gradients and statistics of one forward and backward pass."""
    features = features.clone().requires_grad_()
    output = network(features)
    output.backward(gradient)
    assert features.grad is not None
    found = {"output": output.detach(), "features": features.grad, **network.state_dict()}
    return found | {f"gradient of {name}": p.grad for name, p in network.named_parameters() if p.grad is not None}


def test_one_rank_is_torchs_batch_norm(group: None) -> None:
    features, gradient, network = make_case()
    expected = step(network, features, gradient)
    _, _, ours = make_case()
    names = list(ours.state_dict())
    synchronise_batch_norms(ours)
    assert isinstance(ours[0], SynchronisedBatchNorm3d)
    assert list(ours.state_dict()) == names
    for name, value in step(ours, features, gradient).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-9, msg=name)
    torch.testing.assert_close(ours.eval()(features), network.eval()(features), rtol=1e-9, atol=1e-9)


def test_half_precision_is_summed_in_fp32(group: None) -> None:
    features, gradient, network = make_case(torch.float32)
    features, gradient = features.bfloat16(), gradient.bfloat16()
    synchronise_batch_norms(network)
    expected = step(network, features.float(), gradient.float())
    _, _, half = make_case(torch.float32)
    synchronise_batch_norms(half)
    found = step(half, features, gradient)
    assert found["output"].dtype == found["features"].dtype == torch.bfloat16
    for name in ("0.running_mean", "0.running_var"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-6, atol=0, msg=name)
    for name in ("output", "features"):
        torch.testing.assert_close(found[name].float(), expected[name], rtol=0.02, atol=0.02, msg=name)


def test_recomputed_blocks_count_a_batch_once(group: None) -> None:
    class Network(nn.Sequential):
        def blocks(self) -> dict[str, nn.Module]:
            return {"norm": self[0]}

    features, gradient, plain = make_case()
    expected = step(apply_switches(Network(*plain), synchronise=True), features, gradient)
    _, _, plain = make_case()
    network = Network(nn.Sequential(*plain))
    found = step(apply_switches(network, synchronise=True, checkpointing="all"), features, gradient)
    for value, other in zip(expected.values(), found.values(), strict=True):
        torch.testing.assert_close(value, other, rtol=0, atol=0)


def test_compiled_code_is_refused() -> None:
    with pytest.raises(ValueError, match="compile and synchronised batch norm exclude each other"):
        apply_switches(make_case()[2], synchronise=True, compile=True)


def run_rank(rank: int, folder: Path) -> None:
    """Take one rank's part of the samples through the norm."""
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    features, gradient, network = make_case()
    synchronise_batch_norms(network)
    found = step(network, features.split(PER_RANK)[rank], gradient.split(PER_RANK)[rank])
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_see_what_one_sees(tmp_path: Path) -> None:
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
        torch.testing.assert_close(torch.cat([first[name], second[name]]), expected[name], rtol=1e-9, atol=1e-9, msg=name)
    for name in ("gradient of 0.weight", "gradient of 0.bias"):  # those of a rank's own samples: DDP averages them
        torch.testing.assert_close(first[name] + second[name], expected[name], rtol=1e-9, atol=1e-9, msg=name)
    for name in ("0.running_mean", "0.running_var", "0.num_batches_tracked"):
        assert torch.equal(first[name], second[name]), f"ranks differ in {name}"
        torch.testing.assert_close(first[name], expected[name], rtol=1e-9, atol=1e-9, msg=name)
