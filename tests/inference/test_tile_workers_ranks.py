"""Tile workers as threads: scatter, order of the answers, errors, and the end."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from medseg.inference import tile_workers
from medseg.inference.tile_workers import TileWorkers, process_group, serve_tiles


class Group:
    """Replaces `torch.distributed`: the ranks are threads that wait for each other at barriers."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier, self.rank_of = (
            size,
            threading.Barrier(size, timeout=20),
            threading.local(),
        )
        self.slots: list[Any] = [None] * size

    def get_world_size(self) -> int:
        return self.size

    def scatter_object_list(self, output: list[Any], tasks: list[Any] | None, src: int) -> None:
        assert src == 0
        if self.rank_of.value == src:
            assert tasks is not None
            assert len(tasks) == self.size
            self.slots = list(tasks)
        self.barrier.wait()
        output[0] = self.slots[self.rank_of.value]
        self.barrier.wait()

    def gather_object(self, answer: Any, answers: list[Any] | None = None, dst: int = 0) -> None:
        assert dst == 0
        self.slots[self.rank_of.value] = answer
        self.barrier.wait()
        if self.rank_of.value == dst:
            assert answers is not None
            answers[:] = self.slots
        self.barrier.wait()


def on_ranks(
    monkeypatch: pytest.MonkeyPatch, use: Callable[[TileWorkers], None], seen: list[Any]
) -> None:
    """Run rank 0 in this thread and two workers in others; `seen` gets the tasks of each worker."""
    group = Group(3)
    monkeypatch.setattr(tile_workers, "dist", group)

    def run(job: Any, images: Tensor) -> Tensor:
        seen.append((group.rank_of.value, job, images, torch.is_inference_mode_enabled()))
        if images.sum() < 0:
            raise ValueError(f"rank {group.rank_of.value}")
        return images + 100 * group.rank_of.value

    def serve(rank: int) -> None:
        group.rank_of.value = rank
        serve_tiles(run)

    threads = [threading.Thread(target=serve, args=(rank,), daemon=True) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    group.rank_of.value = 0
    workers = TileWorkers()
    assert workers.size == 3
    use(workers)
    workers.dismiss()
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive()


def test_each_rank_takes_its_batch_and_answers_come_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []
    job = ("fine", 1, 2, 3.0)
    volume = torch.arange(6.0).reshape(3, 2)

    def use(workers: TileWorkers) -> None:
        for count in (3, 1, 2):
            batches = [volume[index] for index in range(count)]
            answers = workers.run(job, lambda images: images, batches)
            assert [answer.tolist() for answer in answers] == [
                (batch + 100 * rank).tolist() for rank, batch in enumerate(batches)
            ]

    on_ranks(monkeypatch, use, seen)
    asked = sorted((rank, images.tolist()) for rank, _, images, _ in seen)
    assert asked == [(1, [2.0, 3.0]), (1, [2.0, 3.0]), (2, [4.0, 5.0])], (
        "a rank without a batch is not asked"
    )
    assert all(given == job and is_inference for _, given, _, is_inference in seen)
    assert all(images.untyped_storage().nbytes() == 8 for _, _, images, _ in seen), (
        "not the volume that the tile is a view of"
    )


def test_an_error_of_any_rank_reaches_rank_0_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    good, bad = torch.ones(1), -torch.ones(1)

    def fail(images: Tensor) -> Tensor:
        raise ValueError("rank 0")

    def use(workers: TileWorkers) -> None:
        job = ("fine", 0, 0, None)
        with pytest.raises(ValueError, match="rank 1"):
            workers.run(job, lambda images: images, [good, bad, bad])
        with pytest.raises(ValueError, match="rank 0"):
            workers.run(job, fail, [good, good])
        assert len(workers.run(job, lambda images: images, [good, good, good])) == 3

    on_ranks(monkeypatch, use, [])


@pytest.mark.parametrize("is_one_machine", [True, False])
def test_the_group_waits_for_a_week_and_is_left_in_any_case(
    monkeypatch: pytest.MonkeyPatch, is_one_machine: bool
) -> None:
    calls: list[Any] = []

    def note(name: str, result: Any = None) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            calls.append((name, arguments, options))
            return result

        return call

    dist = SimpleNamespace(
        rendezvous=note("rendezvous", iter([("store", 2, 4)])),
        PrefixStore=note("prefix", "own store"),
        init_process_group=note("init"),
        destroy_process_group=note("destroy"),
    )
    monkeypatch.setattr(tile_workers, "dist", dist)
    for name, value in (
        ("LOCAL_WORLD_SIZE", "4" if is_one_machine else "2"),
        ("WORLD_SIZE", "4"),
        ("TORCHELASTIC_RESTART_COUNT", "7"),
    ):
        monkeypatch.setitem(os.environ, name, value)

    def stop() -> None:
        raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"), process_group():
        stop()
    week = tile_workers.IDLE_LIMIT
    assert week.days == 7
    prefix = [("prefix", ("7", "store"), {})] if is_one_machine else []
    assert calls == [
        ("rendezvous", ("env://",), {"timeout": week}),
        *prefix,
        (
            "init",
            ("gloo",),
            {
                "store": "own store" if is_one_machine else "store",
                "rank": 2,
                "world_size": 4,
                "timeout": week,
            },
        ),
        ("destroy", (), {}),
    ]
