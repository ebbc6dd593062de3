"""Where examples that share a micro-batch share more than its computation, none is moved to another one."""

import pytest
from datasets import Dataset

from tests.helpers.refused import build
from tests.helpers.tiny import SEED, preference_data

STREAM = preference_data(8, SEED).to_iterable_dataset()
UNKNOWN = Dataset.from_dict({"n": [1, 2]}).with_transform(lambda rows: {"input_ids": [[5, 6]]})
MADE = {"remove_unused_columns": False, "dataset_kwargs": {"skip_prepare_dataset": True}}
# What couples the examples of a micro-batch, or gives rows of unknown length
MOVED = [
    ("sft", {"train_dataset": UNKNOWN, **MADE}, "Those of a stream, of a dataset with a transform"),
    ("dpo", {"loss_type": ["aot"]}, "`loss_type='aot'`"),
    ("dpo", {"loss_type": ["sigmoid", "sft"]}, "`loss_type='sft'`"),
    ("dpo", {"train_dataset": STREAM}, "needs a dataset whose lengths"),
    ("dpo", {"train_sampling_strategy": "batch_rebalance"}, "both decide which examples share a micro-batch"),
    ("kto", {}, "`loss_type='kto'`"),
    ("reward", {"neftune_noise_alpha": 5.0}, "whose noise shrinks with the longest row"),
    ("sft", {"compute_loss_func": max}, "and with `compute_loss_func` the loss of an example"),
    ("sft", {"packing": True, "neftune_noise_alpha": 5.0}, "with `neftune_noise_alpha=5.0` and packing the loss of an"),
    ("grpo", {"arrange_micro_batches": "prefix", "loss_type": "bnpo"}, "`loss_type='bnpo'`"),
    ("grpo", {"arrange_micro_batches": "prefix", "top_entropy_quantile": 0.2}, "`top_entropy_quantile=0.2`"),
    ("grpo", {"arrange_micro_batches": "prefix", "entropy_coef": 0.1}, "`entropy_coef=0.1`"),
    ("rloo", {}, "needs rows of known length, and RLOOTrainer generates them"),
]


@pytest.mark.parametrize(("task", "options", "message"), [each for each in MOVED if each[0] in ("dpo", "kto", "grpo")])
def test_what_the_arguments_show_of_that_is_said_before_models_load(task, options, message):
    with pytest.raises(ValueError, match=message):
        build(task, **{"model": "nowhere/model", "arrange_micro_batches": "tokens", **options})


@pytest.mark.trl_1
@pytest.mark.parametrize(("task", "options", "message"), MOVED)
def test_examples_are_not_moved_where_that_would_change_the_loss(task, options, message):
    with pytest.raises(ValueError, match=message):
        build(task, **{"arrange_micro_batches": "tokens", **options})
