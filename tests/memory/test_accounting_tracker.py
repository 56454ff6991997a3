"""The tracker counts storages, each for as long as anything holds it."""

from __future__ import annotations

import torch

from medseg.memory.tracker import HOST, MemoryTracker, Owner, Timeline


def total(tracker: MemoryTracker) -> int:
    return sum(tracker.live.values())


def test_views_and_in_place_results_cost_nothing() -> None:
    with MemoryTracker() as tracker:
        values = torch.zeros(1000)
        assert total(tracker) == 4000
        rows = values.view(10, 100).t()
        rows.add_(1.0)
        assert total(tracker) == 4000
        other = values + 1
        assert total(tracker) == 8000
        del values
        assert total(tracker) == 8000  # the view holds the storage
        del rows
        assert total(tracker) == 4000
        assert tracker.peak_bytes == 8000
        tracker.restart_peak()
        assert tracker.peak_bytes == 4000
        other.resize_(2000)
        assert total(tracker) == tracker.peak_bytes == 8000


def test_what_the_graph_holds_counts_until_backward_has_used_it() -> None:
    leaf = torch.ones(1000, requires_grad=True)
    with MemoryTracker() as tracker:
        result = leaf.exp().exp().sum()  # each exp keeps its result
        assert total(tracker) == 4000 + 2 * 4000 + 4  # the leaf too, from its first use on
        result.backward()
        del result
        assert total(tracker) == 2 * 4000  # leaf and gradient


def test_what_an_operation_takes_and_frees_counts_in_the_peak_alone() -> None:
    with MemoryTracker(workspace=lambda operation, *_: 900 * ("exp" in str(operation))) as tracker:
        tracker.now = Owner("forward", "stem")
        values = torch.zeros(100)
        assert tracker.peak_bytes == total(tracker) == 400
        values.exp_()
        assert total(tracker) == 400
        assert (tracker.peak_bytes, tracker.peak_live[tracker.now]) == (1300, 1300)
        values.add_(1)
        assert tracker.peak_bytes == 1300


def test_what_is_assigned_to_the_host_leaves_the_total_of_the_device() -> None:
    with MemoryTracker() as tracker:
        values = torch.zeros(1000)
        tracker.assign(values, HOST)
        tracker.restart_peak()
        assert (tracker.peak_bytes, tracker.live_bytes(HOST)) == (0, 4000)
        tracker.assign(values, "input")
        tracker.restart_peak()
        assert (tracker.peak_bytes, tracker.live_bytes(HOST)) == (4000, 0)


def test_nothing_is_known_of_a_storage_once_it_is_gone() -> None:
    """Another one may get its address."""
    with MemoryTracker() as tracker:
        tracker.now = Owner("forward", "stem")
        features = torch.zeros(100)
        tracker.save(features)
        tracker.take([features], "head")
        (held,) = tracker.held_storages("forward")
        assert (held.savers, held.takers) == ({"stem"}, {"head"})
        del features
        assert tracker.held_storages("forward") == []
        assert not any((tracker._savers, tracker._takers, tracker._entries))


def test_each_storage_has_one_owner() -> None:
    with MemoryTracker() as tracker:
        tracker.now = Owner("forward", "stem")
        features = torch.zeros(100)
        tracker.now = Owner("backward", "stem")
        grad = torch.zeros(50)
        assert tracker.live[Owner("forward", "stem")] == 400
        assert (tracker.peak_bytes, tracker.peak_now) == (600, Owner("backward", "stem"))
        tracker.assign(grad, "gradients")
        tracker.assign(grad[:10], "gradients")
        assert {owner: size for owner, size in tracker.live.items() if size} == {
            Owner("forward", "stem"): 400,
            Owner("gradients"): 200,
        }
        assert tracker.live_bytes("gradients") == 200
        del features, grad
        assert total(tracker) == 0


def test_results_can_be_corrected() -> None:
    with MemoryTracker(
        lambda func, args, result: result.half() if func is torch.ops.aten.exp.default else result
    ) as tracker:
        assert torch.zeros(100).exp().dtype == torch.float16
        assert total(tracker) == 0


def test_the_marks_of_the_profiler_are_no_operations() -> None:
    """Each mark has an address among its arguments, so it would be measured anew in each plan."""
    weight = torch.nn.Parameter(torch.ones(4))
    weight.grad = torch.ones(4)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    timeline = Timeline()
    with MemoryTracker(timeline=timeline):
        optimizer.step()
    assert timeline.calls
    assert not any("record_function" in key or " at 0x" in key for key in timeline.calls)
