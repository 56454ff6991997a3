"""Ranks of a run: the order in which they start, and their shares of the batch."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from medseg.errors import UserError
from medseg.runs import ranks
from medseg.training.options import Strategy


@pytest.mark.parametrize(("num_gpus", "expected"), [(4, ["device 2", "group"]), (2, ["group"]), (0, ["group"])])
def test_a_rank_chooses_its_gpu_before_its_group_begins(
    num_gpus: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL, and a stage that is loaded to `cuda`, use the present device; ranks beyond the GPUs run on the CPU."""
    done: list[str] = []
    settings = {
        "TORCHELASTIC_RUN_ID": "run", "RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip
    for key, value in settings.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: done.append(f"device {index}"))
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(dist.HashStore(), 2, 3)]))
    monkeypatch.setattr(dist, "init_process_group", lambda **_: done.append("group"))
    ranks.join_ranks(timedelta(seconds=1))
    assert done == expected


@pytest.mark.parametrize(
    ("planned", "started", "accumulate"),
    [((2, 2, 1), (4, 2), 1), ((2, 2, 3), (4, 2), 3), ((2, 2, 1), (2, 2), 2), ((1, 2, 2), (4, 4), 1), ((2, 1, 2), (1, 1), 4), ((2, 2, 1), (3, 3), None)],
)  # fmt: skip
def test_the_ranks_that_were_started_share_the_micro_batches_of_all_machines(
    planned: tuple[int, int, int], started: tuple[int, int], accumulate: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planned: devices, machines, accumulation; started: ranks, and those of this machine."""
    settings = {"TORCHELASTIC_RUN_ID": "run", "RANK": "0", "WORLD_SIZE": f"{started[0]}", "LOCAL_WORLD_SIZE": f"{started[1]}"}
    for key, value in settings.items():
        monkeypatch.setenv(key, value)
    trainer: Any = SimpleNamespace(devices=planned[0], num_nodes=planned[1], strategy=Strategy.auto)
    memory: Any = SimpleNamespace(accumulate=planned[2])
    if accumulate is None:
        with pytest.raises(UserError, match="3 ranks cannot share the 4 micro-batches"):
            ranks.share_among_ranks(trainer, memory)
        return
    ranks.share_among_ranks(trainer, memory)
    assert (memory.accumulate, trainer.devices, trainer.num_nodes) == (accumulate, started[1], started[0] // started[1])
    assert trainer.strategy is (Strategy.auto if started[0] == 1 else Strategy.ddp)
