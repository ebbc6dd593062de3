"""Which examples share a micro-batch, and what that takes."""

import tracemalloc

import numpy as np
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import RandomSampler

from scripts.benchmark.studies.arranging import imbalance
from tests.helpers.tiny import SEED
from tests.runs import make_trainer
from trl_paddingfree.arranging.order import StepSampler, balance, by_tokens


def test_examples_that_start_alike_meet_without_a_copy_of_the_data():
    rows, tokens, size = 4096, 64, 16
    starts = np.random.default_rng(SEED).permutation(np.repeat(np.arange(rows // 4), 4)) % 60 + 2
    ids = np.random.default_rng(SEED).integers(2, 62, (rows, tokens))
    ids[:, 0] = starts
    data = Dataset.from_dict({"input_ids": list(ids)})
    options = {"arrange_micro_batches": "prefix", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}
    trainer = make_trainer("sft", "shared", train_dataset=data, **options)
    tracemalloc.start()
    order = list(trainer._get_train_sampler())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * rows * tokens / 2
    assert sorted(order) == list(range(rows))
    assert (np.diff(starts[order].reshape(-1, size)) >= 0).all()


@given(st.lists(st.integers(1, 1000), min_size=6, max_size=60), st.integers(1, 6))
@settings(max_examples=200, deadline=None)
def test_balanced_bins_hold_every_item_once_in_equal_numbers(costs, num_bins):
    costs = costs[: len(costs) // num_bins * num_bins]
    bins = balance(costs, num_bins)
    assert sorted(item for bin_ in bins for item in bin_) == list(range(len(costs)))
    assert {len(bin_) for bin_ in bins} == {len(costs) // num_bins}
    # no worse than filling bins as the items come
    spread = [sum(costs[item] for item in bin_) for bin_ in bins]
    assert max(spread) - min(spread) <= max(costs)


def test_an_incomplete_last_step_stays_as_it_is_and_the_first_where_it_fills_the_last():
    def arranged(number, **options):
        return [*StepSampler(range(number), 4, arrange=lambda step: step[::-1], **options)]

    assert arranged(10) == [3, 2, 1, 0, 7, 6, 5, 4, 8, 9]
    assert arranged(10, keeps_first=True) == [0, 1, 2, 3, 7, 6, 5, 4, 8, 9]
    assert arranged(8, keeps_first=True) == [3, 2, 1, 0, 7, 6, 5, 4]
    assert len(StepSampler(range(10), 4, arrange=sorted)) == 10


def test_balancing_lowers_the_waiting_of_eight_processes():
    work = np.random.default_rng(SEED).lognormal(5, 1, 4096)
    order = list(StepSampler(range(4096), 128, by_tokens(work, 4, 8)))
    assert imbalance(work[order], 4, 8) < 1 + 0.5 * (imbalance(work, 4, 8) - 1)


def test_a_rearranged_order_has_the_generator_of_the_users_sampler():
    """accelerate looks for it, and gives all processes the same one."""
    with_one, without = (StepSampler(sampler, 2, sorted) for sampler in (RandomSampler(range(9)), [1, 2]))
    with_one.generator = torch.Generator().manual_seed(SEED)
    orders = [list(with_one), list(with_one)]
    with_one.generator.manual_seed(SEED)
    assert [list(with_one), list(with_one)] == orders
    assert not hasattr(without, "generator")
