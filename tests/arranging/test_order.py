"""Which examples share a micro-batch, and what that takes."""

import tracemalloc

import numpy as np
from datasets import Dataset

from tests.helpers.tiny import SEED
from tests.runs import make_trainer


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
