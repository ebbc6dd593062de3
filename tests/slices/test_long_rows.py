"""Rows of thousands of tokens, with activations offloaded: padded TRL beside ours, and the bytes predicted of it."""

import random

import pytest
from datasets import Dataset

from tests.helpers.offloading import offloading_on_cpu
from tests.helpers.tiny import SEED, arguments, make_model, text
from tests.runs import LAYOUTS, assert_same, run
from trl_paddingfree.budgets.features import memory_features
from trl_paddingfree.budgets.kept_bytes import count_kept_bytes
from trl_paddingfree.budgets.needs import MemoryNeeds, fused_head

# What the prediction may be off by
TOLERANCE = 0.1
# Of prompt, chosen and rejected answer: nearly all in common, and next to nothing
LENGTHS = [(3500, 500, 100), (2, 4000, 300)]
OPTIONS = {"per_device_train_batch_size": len(LENGTHS), "max_length": None, "steps": 1}


def long_pairs():
    rng = random.Random(SEED)
    rows = [[text(rng, n, n + n // 4) for n in lengths] for lengths in LENGTHS]
    return Dataset.from_list([dict(zip(("prompt", "chosen", "rejected"), row, strict=True)) for row in rows])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_long_rows_train_as_with_padding_and_offload_what_was_predicted(layout):
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16384}

    def trained(layout, **options):
        given = arguments("dpo", model=make_model(**sizes))
        return run("dpo", layout, **given, train_dataset=long_pairs(), **OPTIONS, **options)

    with offloading_on_cpu("dpo") as moved:
        ours = trained(layout, activation_offloading=True, gradient_checkpointing=True)
    assert_same(trained("padded"), ours)
    trainer = ours.trainer
    base, route = trainer.flat_base(trainer.model), trainer.runtime.route
    batch = trainer.data_collator(list(trainer.train_dataset))["flat_batch"]
    assert batch.row_mask.sum(1).max() > 4000
    # Counted on batches of a few hundred tokens
    needs = MemoryNeeds(0, count_kept_bytes(base, route), fused_head(base))
    peak, host = needs.offloaded(memory_features(batch, route))
    assert host == pytest.approx(sum(moved), rel=TOLERANCE)
    assert peak < needs.peaks(memory_features(batch, route))[0]
