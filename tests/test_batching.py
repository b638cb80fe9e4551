"""How samples are cut into micro-batches, and what lies where in one."""

from __future__ import annotations

import math
import random

import pytest
import torch

from dapo.batching import TrainSample, make_micro_batches, micro_batch_count

CPU = torch.device("cpu")


def sample_of(prompt: int, response: int, start: int = 3, **fields) -> TrainSample:
    """A sample with ids start, start + 1, ... and -1, -2, ... as its rollout log-probs."""
    ids = list(range(start, start + prompt + response))
    logprobs = [-1.0 - t for t in range(response)]
    values = {"rollout_logprobs": logprobs, "advantage": float(start), "fresh": True}
    return TrainSample(ids[:prompt], ids[prompt:], **values | fields)


def cut(lengths: list[int], budget: int, packed: bool = True, **options) -> list[list[int]]:
    """Lengths in each micro-batch."""
    samples = [sample_of(1, length - 1, start=i) for i, length in enumerate(lengths)]
    batches = make_micro_batches(samples, budget, CPU, packed=packed, **options)
    if "count" not in options:
        assert len(batches) == micro_batch_count(samples, budget, packed)
    assert len({id(sample) for batch in batches for sample in batch.samples}) == len(samples)
    return [[sample.length for sample in batch.samples] for batch in batches]


@pytest.mark.parametrize(
    ("lengths", "budget", "want"),
    [
        ([2, 9, 4, 5], 10, [[9], [5], [4, 2]]),  # 9, 5 and 6, where filling would leave 9, 9 and 2
        ([6, 5, 5, 4], 10, [[6, 4], [5, 5]]),
        ([4, 4, 3, 3, 3, 3], 10, [[4, 3, 3], [4, 3, 3]]),  # filling would take three
        ([6, 6, 4, 4, 4], 12, [[6, 6], [4, 4, 4]]),  # spreading longest first would take three
        ([5, 4, 3], 100, [[5, 4, 3]]),
        ([50, 3, 4], 10, [[50], [4, 3]]),  # over the budget, alone
        ([5, 5, 5], 1, [[5], [5], [5]]),
        ([], 10, []),
    ],
)
def test_packed_micro_batches_are_few_and_even(lengths: list[int], budget: int, want: list) -> None:
    assert cut(lengths, budget) == want


def test_packed_micro_batches_of_many_lengths() -> None:
    """Within the budget, no more than the tokens ask for and one; and alike, where they need not be all but
    full to be so few."""
    draw = random.Random(0)
    for _ in range(20):
        lengths = [draw.randint(20, 200) for _ in range(draw.randint(30, 200))]
        loads = [sum(batch) for batch in cut(lengths, 1000)]
        assert max(loads) <= 1000 and len(loads) <= math.ceil(sum(lengths) / 1000) + 1
        assert max(loads) - min(loads) <= 50 or sum(loads) > 0.97 * 1000 * len(loads), loads


def test_padded_rows_are_those_of_like_length() -> None:
    assert cut([2, 9, 4, 5], 10, packed=False) == [[9], [5, 4], [2]]
    assert cut([3, 3, 3, 2], 9, packed=False) == [[3, 3, 3], [2]]


@pytest.mark.parametrize("packed", [True, False])
def test_count_is_met_with_micro_batches_that_hold_nothing(packed: bool) -> None:
    assert sorted(map(len, cut([3, 3], 100, packed, count=4))) == ([0, 0, 1, 1] if packed else [0, 0, 0, 2])
    assert cut([], 100, packed, count=2) == [[], []]
    assert micro_batch_count([], 100, packed) == 0
    (empty,) = make_micro_batches([], 100, CPU, packed=packed, count=1)
    assert empty.input_ids.tolist() == [[0, 0]] and empty.mask.tolist() == [[False]] and empty.samples == []
    assert empty.old_logprobs is not None and empty.split(empty.old_logprobs) == []
    with pytest.raises(ValueError, match="count must be at least 2 for 5 tokens each, got 1"):
        cut([5, 4], 5, packed, count=1)


def test_count_spreads_packed_sequences() -> None:
    assert cut([8, 4, 4, 3, 3, 2], 100, count=3) == [[8], [4, 3, 2], [4, 3]]


@pytest.mark.parametrize("packed", [True, False])
def test_what_is_not_in_the_loss_is_left_out(packed: bool) -> None:
    """Responses not trained on, empty ones, and tokens without a rollout log-prob."""
    holey = sample_of(2, 3, rollout_logprobs=[-1.0, math.nan, -2.0])
    lost = sample_of(2, 2, rollout_logprobs=[math.nan] * 2)
    samples = [holey, sample_of(2, 3, trained=False), sample_of(2, 0), lost]
    assert [sample.num_loss_tokens for sample in samples] == [2, 0, 0, 0]
    assert [sample.loss_mask.sum().item() for sample in samples] == [2, 0, 0, 0]
    (batch,) = make_micro_batches(samples, 100, CPU, packed=packed)
    assert batch.samples == [holey]
    assert batch.mask.tolist() == [[False, True, False, True]]


def test_layout_of_a_packed_row() -> None:
    a = sample_of(2, 3, start=10, old_logprobs=torch.tensor([-1.0, -2, -3]))
    b = sample_of(1, 1, start=20, old_logprobs=torch.tensor([-4.0]))
    a.ref_logprobs, b.ref_logprobs = a.old_logprobs - 10, b.old_logprobs - 10
    b.token_weights = torch.tensor([0.5])
    (batch,) = make_micro_batches([b, a], 100, CPU, packed=True)
    assert batch.samples == [a, b] and batch.lengths == (5, 2)
    assert batch.input_ids.tolist() == [[10, 11, 12, 13, 14, 20, 21]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1]]
    assert batch.targets.tolist() == [[11, 12, 13, 14, 20, 21]]
    assert batch.mask.tolist() == [[False, True, True, True, False, True]]  # 20 begins a sequence
    assert batch.sequence_ids.tolist() == [[0, 0, 0, 0, 0, 1]]
    assert batch.advantages.tolist() == [[10, 10, 10, 10, 10, 20]]
    assert batch.old_logprobs.tolist() == [[0, -1, -2, -3, 0, -4]]
    assert batch.ref_logprobs.tolist() == [[0, -11, -12, -13, 0, -14]]
    assert batch.token_weights.tolist() == [[1, 1, 1, 1, 1, 0.5]]
    assert [values.tolist() for values in batch.split(batch.targets)] == [[12, 13, 14], [21]]


def test_layout_of_padded_rows() -> None:
    a = sample_of(2, 3, start=10, token_weights=torch.tensor([1.0, 2, 3]))
    b = sample_of(1, 1, start=20, old_logprobs=torch.tensor([-4.0]))
    (batch,) = make_micro_batches([b, a], 100, CPU)
    assert batch.input_ids.tolist() == [[10, 11, 12, 13, 14], [20, 21, 0, 0, 0]]
    assert batch.mask.tolist() == [[False, True, True, True], [True, False, False, False]]
    assert batch.advantages.tolist() == [10, 20]
    assert batch.old_logprobs is None  # not of every sample
    assert batch.token_weights.tolist() == [[1, 1, 2, 3], [1, 1, 1, 1]]
    assert batch.lengths is batch.position_ids is batch.sequence_ids is None
    assert [values.tolist() for values in batch.split(batch.targets)] == [[12, 13, 14], [21]]
