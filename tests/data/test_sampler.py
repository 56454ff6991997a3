from __future__ import annotations

import pytest

from medseg.data.sampler import StepBatchSampler


@pytest.mark.parametrize(("accumulate", "num_ranks"), [(1, 1), (2, 1), (1, 2), (3, 2), (1, 4), (12, 1)])
def test_the_ranks_together_read_the_plain_order_at_every_step(accumulate: int, num_ranks: int) -> None:
    per_rank = [list(StepBatchSampler(5, 12, accumulate, rank, num_ranks)) for rank in range(num_ranks)]
    for step in range(5):
        union = []
        for micro in range(accumulate):
            for batches in per_rank:
                union += batches[step * accumulate + micro]
        assert union == list(range(step * 12, (step + 1) * 12))


def test_accumulation_and_ranks_cut_a_step_alike() -> None:
    accumulated = list(StepBatchSampler(3, 4, accumulate=2))
    ranks = [list(StepBatchSampler(3, 4, rank=rank, num_ranks=2)) for rank in range(2)]
    assert accumulated == [batch for pair in zip(*ranks, strict=True) for batch in pair]


@pytest.mark.parametrize("start_step", [0, 1, 4, 5, 9])
def test_a_later_start_continues_exactly(start_step: int) -> None:
    whole = list(StepBatchSampler(5, 6, 3, 1, 2))
    late = StepBatchSampler(5, 6, 3, 1, 2, start_step=start_step)
    assert list(late) == whole[start_step * 3 :]
    assert len(late) == len(whole), "the length is that of the run: Lightning counts what came before"


@pytest.mark.parametrize("arguments", [(5, 6, 4), (5, 6, 2, 0, 2), (5, 0), (5, 2, 1, 2, 2), (5, 2, 1, 0, 1, -1)])
def test_what_does_not_divide_is_refused(arguments: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"divisible|expected"):
        StepBatchSampler(*arguments)
