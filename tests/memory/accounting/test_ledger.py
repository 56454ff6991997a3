"""The ledger counts storages, each for as long as anything holds it."""

from __future__ import annotations

import torch

from medseg.memory.accounting.ledger import Ledger, Owner


def total(ledger: Ledger) -> int:
    return sum(ledger.live.values())


def test_views_and_in_place_results_cost_nothing() -> None:
    with Ledger() as ledger:
        values = torch.zeros(1000)
        assert total(ledger) == 4000
        rows = values.view(10, 100).t()
        rows.add_(1.0)
        assert total(ledger) == 4000
        other = values + 1
        assert total(ledger) == 8000
        del values
        assert total(ledger) == 8000  # the view holds the storage
        del rows
        assert total(ledger) == 4000
        assert ledger.peak_bytes == 8000
        ledger.restart_peak()
        assert ledger.peak_bytes == 4000
        other.resize_(2000)
        assert total(ledger) == ledger.peak_bytes == 8000


def test_what_the_graph_holds_counts_until_backward_has_used_it() -> None:
    leaf = torch.ones(1000, requires_grad=True)
    with Ledger() as ledger:
        result = leaf.exp().exp().sum()  # each exp keeps its result
        assert total(ledger) == 4000 + 2 * 4000 + 4  # the leaf too, from its first use on
        result.backward()
        del result
        assert total(ledger) == 2 * 4000  # leaf and gradient


def test_each_storage_has_one_owner() -> None:
    with Ledger() as ledger:
        ledger.now = Owner("forward", "stem")
        features = torch.zeros(100)
        ledger.now = Owner("backward", "stem")
        grad = torch.zeros(50)
        assert ledger.live[Owner("forward", "stem")] == 400
        assert (ledger.peak_bytes, ledger.peak_now) == (600, Owner("backward", "stem"))
        ledger.assign(grad, "gradients")
        ledger.assign(grad[:10], "gradients")
        assert {owner: size for owner, size in ledger.live.items() if size} == {
            Owner("forward", "stem"): 400,
            Owner("gradients"): 200,
        }
        assert ledger.live_bytes("gradients") == 200
        del features, grad
        assert total(ledger) == 0


def test_results_can_be_corrected() -> None:
    with Ledger(lambda func, args, result: result.half() if func is torch.ops.aten.exp.default else result) as ledger:
        assert torch.zeros(100).exp().dtype == torch.float16
        assert total(ledger) == 0
