"""Ranks of a run: the order in which they start."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from medseg.runs import ranks


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
