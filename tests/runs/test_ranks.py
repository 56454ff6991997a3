"""Ranks of a run: the order in which they start, and their shares of the batch."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from medseg.errors import UserError
from medseg.runs import ranks
from medseg.training.options import Strategy


@pytest.mark.parametrize(
    ("num_gpus", "expected"),
    [(4, ["device 2", "cpu:gloo,cuda:nccl"]), (2, ["gloo"]), (0, ["gloo"])],
)
def test_a_rank_chooses_its_gpu_before_its_group_begins(
    num_gpus: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL and a stage loaded to `cuda` use the present device; ranks beyond the GPUs the CPU."""
    done: list[str] = []
    settings = {
        "TORCHELASTIC_RUN_ID": "run", "RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "2",
        "LOCAL_WORLD_SIZE": "3",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip
    for key, value in settings.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: done.append(f"device {index}"))
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(dist.HashStore(), 2, 3)]))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: done.append(backend))
    ranks.join_ranks()
    assert done == expected


@pytest.mark.parametrize(
    ("planned", "started", "accumulate"),
    [
        ((2, 2, 1), (4, 2), 1),
        ((2, 2, 3), (4, 2), 3),
        ((2, 2, 1), (2, 2), 2),
        ((1, 2, 2), (4, 4), 1),
        ((2, 1, 2), (1, 1), 4),
        ((2, 2, 1), (3, 3), None),
    ],
)  # fmt: skip
def test_the_ranks_that_were_started_share_the_micro_batches_of_all_machines(
    planned: tuple[int, int, int],
    started: tuple[int, int],
    accumulate: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Planned: devices, machines, accumulation; started: ranks, and those of this machine."""
    settings = {
        "TORCHELASTIC_RUN_ID": "run",
        "RANK": "0",
        "WORLD_SIZE": f"{started[0]}",
        "LOCAL_WORLD_SIZE": f"{started[1]}",
    }
    for key, value in settings.items():
        monkeypatch.setenv(key, value)
    trainer: Any = SimpleNamespace(devices=planned[0], num_nodes=planned[1], strategy=Strategy.auto)
    memory: Any = SimpleNamespace(accumulate=planned[2])
    if accumulate is None:
        with pytest.raises(UserError, match="3 ranks cannot share the 4 micro-batches"):
            ranks.share_among_ranks(trainer, memory)
        return
    ranks.share_among_ranks(trainer, memory)
    assert (memory.accumulate, trainer.devices, trainer.num_nodes) == (
        accumulate,
        started[1],
        started[0] // started[1],
    )
    assert trainer.strategy is (Strategy.auto if started[0] == 1 else Strategy.ddp)


def test_the_first_rank_decides_and_the_others_write_to_files_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    redirected: list[tuple[str, int]] = []
    monkeypatch.setattr(
        ranks.os,
        "dup2",
        lambda source, target: redirected.append((os.readlink(f"/proc/self/fd/{source}"), target)),
    )
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert (ranks.rank(), ranks.num_ranks(), ranks.num_restarts()) == (0, 1, 0)
    assert ranks.from_first_rank("own") == "own"
    ranks.redirect_output(tmp_path)
    assert redirected == []
    for key, value in {
        "TORCHELASTIC_RUN_ID": "run",
        "RANK": "2",
        "WORLD_SIZE": "3",
        "TORCHELASTIC_RESTART_COUNT": "4",
    }.items():
        monkeypatch.setenv(key, value)
    assert (ranks.rank(), ranks.num_ranks(), ranks.num_restarts()) == (2, 3, 4)
    ranks.redirect_output(tmp_path)
    log = tmp_path / "ranks" / "rank2.log"
    assert redirected == [(str(log), 1), (str(log), 2)]

    def broadcast(values: list[Any], src: int) -> None:
        assert (values, src) == (["own"], 0)
        values[0] = "of rank 0"

    joined: list[bool] = []
    monkeypatch.setattr(ranks, "join_ranks", lambda: joined.append(True))
    monkeypatch.setattr(dist, "broadcast_object_list", broadcast)
    assert ranks.from_first_rank("own") == "of rank 0"
    assert joined == [True]


@pytest.mark.parametrize("num_local", ["3", "2"])
def test_the_group_has_the_store_of_this_start(
    num_local: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {
        "TORCHELASTIC_RUN_ID": "run", "RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": num_local,
        "TORCHELASTIC_RESTART_COUNT": "5",
    }  # fmt: skip
    for key, value in settings.items():
        monkeypatch.setenv(key, value)
    calls: list[Any] = []
    exits: list[Any] = []

    def rendezvous(url: str, timeout: timedelta) -> Any:
        calls.append((url, timeout))
        return iter([("store", 2, 3)])

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(dist, "rendezvous", rendezvous)
    monkeypatch.setattr(dist, "PrefixStore", lambda *arguments: arguments)
    monkeypatch.setattr(dist, "init_process_group", lambda **options: calls.append(options))
    monkeypatch.setattr(ranks.atexit, "register", exits.append)
    ranks.join_ranks()
    store = ("5", "store") if num_local == "3" else "store"
    wait = timedelta(minutes=30)
    assert calls == [
        ("env://", wait),
        {"backend": "gloo", "store": store, "rank": 2, "world_size": 3, "timeout": wait},
    ]
    destroyed: list[bool] = []
    monkeypatch.setattr(dist, "destroy_process_group", lambda: destroyed.append(True))
    for is_there in (False, True):
        monkeypatch.setattr(dist, "is_initialized", lambda is_there=is_there: is_there)
        exits[0]()
    assert destroyed == [True]
    ranks.join_ranks()  # the group exists
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setenv("WORLD_SIZE", "1")
    ranks.join_ranks()
    assert len(calls) == 2
