"""Order of samples: reproducible generators, and batches that ranks and accumulation share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from medseg.data.sampler import ORDER, StepBatchSampler, draw_from_pass, sample_rng, torch_seed


@pytest.mark.parametrize(
    ("accumulate", "num_ranks"), [(1, 1), (2, 1), (1, 2), (3, 2), (1, 4), (12, 1)]
)
def test_the_ranks_together_read_the_plain_order_at_every_step(
    accumulate: int, num_ranks: int
) -> None:
    per_rank = [
        list(StepBatchSampler(5, 12, accumulate, rank, num_ranks)) for rank in range(num_ranks)
    ]
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
    assert len(late) == len(whole), (
        "the length is that of the run: Lightning counts what came before"
    )


@pytest.mark.parametrize(("accumulate", "num_ranks"), [(1, 2), (2, 2), (1, 4), (3, 4)])
def test_ranks_of_a_step_get_the_same_samples_and_about_the_same_number_of_voxels(
    accumulate: int, num_ranks: int
) -> None:
    voxels = np.random.default_rng(0).lognormal(0.0, 1.0, 50 * 12).astype(float)

    def loads(size: Callable[[int], float] | None) -> np.ndarray:
        """Voxels of each step and rank."""
        ranks = [
            list(StepBatchSampler(50, 12, accumulate, rank, num_ranks, size=size))
            for rank in range(num_ranks)
        ]
        assert {len(batch) for batches in ranks for batch in batches} == {
            12 // accumulate // num_ranks
        }
        steps = [
            [batches[step * accumulate : (step + 1) * accumulate] for batches in ranks]
            for step in range(50)
        ]
        for step, parts in enumerate(steps):
            assert sorted(n for own in parts for batch in own for n in batch) == list(
                range(step * 12, (step + 1) * 12)
            )
        return np.array(
            [[sum(voxels[n] for batch in own for n in batch) for own in parts] for parts in steps]
        )

    def waste(loads: np.ndarray) -> float:
        """Part of the time of all ranks that is spent in waiting for the slowest one."""
        return float(1 - loads.mean(axis=1).sum() / loads.max(axis=1).sum())

    assert waste(loads(voxels.__getitem__)) < 0.7 * waste(loads(None))


@pytest.mark.parametrize(
    "arguments", [(5, 6, 4), (5, 6, 2, 0, 2), (5, 0), (5, 2, 1, 2, 2), (5, 2, 1, 0, 1, -1)]
)
def test_what_does_not_divide_is_refused(arguments: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"divisible|expected"):
        StepBatchSampler(*arguments)


def test_a_sample_depends_on_its_number_alone() -> None:
    late = sample_rng(3, 900).random(5)
    for n in range(10):
        sample_rng(3, n).random(100)
    assert np.array_equal(sample_rng(3, 900).random(5), late)


def test_reference_values_stay() -> None:
    """A change here changes the samples of every run: old checkpoints would not resume exactly."""
    assert sample_rng(1, 2).integers(0, 1000, 4).tolist() == [708, 309, 131, 356]


def test_neighbours_are_independent() -> None:
    draws = {
        tuple(sample_rng(seed, n, stream).random(3))
        for seed in range(3)
        for n in range(50)
        for stream in (0, ORDER)
    }
    assert len(draws) == 300
    first = np.array([sample_rng(0, n).random() for n in range(4000)])
    assert abs(first.mean() - 0.5) < 0.03
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.06


def test_torch_seeds_differ_by_each_argument() -> None:
    places = [(s, t, m) for s in range(3) for t in range(5) for m in range(9)]
    seeds = {torch_seed(*place) for place in places}
    assert len(seeds) == len(places)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert torch_seed(1, 2, 1) == torch_seed(1, 2, 1)


def test_weights_hold_in_the_mean_and_nearly_in_each_pass() -> None:
    weights = np.array([1.0, 1.0, 4.0, 0.5, 2.0, 1.5])
    weights /= weights.sum()
    total: Counter[int] = Counter()
    for turn in range(300):
        counts = Counter(draw_from_pass(0, turn * 6 + place, weights) for place in range(6))
        assert all(abs(counts[item] - 6 * weights[item]) < 1 for item in range(6))
        total += counts
    assert np.allclose([total[item] / 1800 for item in range(6)], weights, atol=0.02)


def test_the_order_of_a_pass_shares_no_numbers_with_its_samples() -> None:
    """Else sample 0 would reuse the numbers of the order, and its crop would depend on its case."""
    for seed in range(5):
        order = [draw_from_pass(seed, n, 20) for n in range(20)]
        assert sorted(order) == list(range(20))
        assert order != sample_rng(seed, 0).permutation(20).tolist()


def test_a_rare_item_comes_as_seldom_as_its_weight_says() -> None:
    """Far less than once in a pass, so that the random start of the walk decides."""
    weights = np.array([0.02, 0.38, 0.6])
    num_passes = 600
    drawn = [draw_from_pass(5, n, weights) for n in range(3 * num_passes)]
    per_pass = np.bincount(drawn, minlength=3) / num_passes
    assert np.allclose(per_pass, 3 * weights, atol=0.05)
