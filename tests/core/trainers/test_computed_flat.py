"""A trainer of this package computes flat batches, or says that it does not, and which option decides."""

from functools import partial
from itertools import product

import pytest
import torch

from tests.helpers.tiny import DATA, SEED, arguments
from tests.runs import assert_same, make_trainer, run
from trl_paddingfree import PaddingFreeDPOTrainer
from trl_paddingfree.core.data import collate
from trl_paddingfree.registry import TRAINERS


class LosesTheBatch(PaddingFreeDPOTrainer):
    """A loss of one's own that hands on the rows by name, and so not the flat batch."""

    def _compute_loss(self, model, inputs, return_outputs):
        rows = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        return -model(**rows, labels=rows["input_ids"], fused_lm_head=True).log_probs.mean()


def train(trainer_class, task, **options):
    return run(task, "ours", trainer_class=trainer_class, steps=1, **options).trainer


def refused_if_it_computes_no_flat_batch(trainer_class, task, **options):
    message = f"A training step of {trainer_class.__name__} computed no flat batch, .* LlamaForCausalLM neither"
    with pytest.raises(RuntimeError, match=message):
        train(trainer_class, task, **options)


WITHIN = pytest.mark.parametrize("budget", [{}, {"max_tokens_per_micro_batch": 60}, {"memory_budget": 4}], ids=str)


@WITHIN
def test_a_training_step_that_computes_no_flat_batch_is_an_error(budget):
    refused_if_it_computes_no_flat_batch(LosesTheBatch, "dpo", **budget)


def test_a_trainer_that_loses_the_flat_batch_may_pad():
    assert train(LosesTheBatch, "dpo", padding_free=False).method == "TRL, with padding"


@pytest.mark.parametrize("task", TRAINERS)
def test_without_padding_free_it_is_trl_bit_for_bit(task):
    padded, ours = (run(task, x, **y) for x, y in (("padded", {}), ("ours", {"padding_free": False})))
    assert ours.trainer.method == "TRL, with padding"
    assert_same(padded, ours, tolerance=0, ignored=())
    assert type(ours.trainer.data_collator) is type(padded.trainer.data_collator)
    assert ours.trainer.model.config._attn_implementation == "sdpa"
    counts = ours.trainer.total_counts()
    assert 0 < counts.real <= counts.computed == counts.padded


EXAMPLES = {
    collate.PreferenceCollator: [
        {"prompt_ids": [1, 2, 3], "chosen_ids": [4, 5], "rejected_ids": [6]},
        {"prompt_ids": [], "chosen_ids": [9], "rejected_ids": [10, 11]},
        {"prompt_ids": [*range(12, 24)], "chosen_ids": [24], "rejected_ids": []},
    ],
    collate.RewardCollator: [{"chosen_ids": [1, 2, 3], "rejected_ids": [4], "margin": 0.5}],
    collate.UnpairedPreferenceCollator: [
        {"prompt_ids": [1, 2], "completion_ids": [3], "KL_completion_ids": [4, 5], "label": True}
    ],
}


@pytest.mark.parametrize("collator", EXAMPLES)
def test_collators_give_trls_tensors(collator):
    theirs, batches = collator.__bases__[-1], [EXAMPLES[collator]]
    cuts = [{}]
    if collator is collate.PreferenceCollator:
        cuts = [{"max_length": 9, "truncation_mode": mode} for mode in ("keep_start", "keep_end")] + cuts
        batches.append(
            [{**row, "ref_chosen_logps": -1.5, "ref_rejected_logps": -i} for i, row in enumerate(batches[0])]
        )
    for batch, cut, multiple, padding_free in product(batches, cuts, (None, 8), (False, True)):
        options = {"pad_token_id": 50, "pad_to_multiple_of": multiple, **cut}
        expected, ours = theirs(**options)(batch), collator(**options, padding_free=padding_free)(batch)
        assert (ours.pop("flat_batch", None) is not None) == padding_free
        assert next(iter(ours)) == next(iter(expected))  # accelerate learns the batch size from the first value
        for name in ours.keys() | expected.keys():
            if isinstance(expected[name], torch.Tensor):
                assert ours[name].dtype == expected[name].dtype
                assert torch.equal(ours[name], expected[name])


def build(task, of_trl=False, **options):
    """A trainer that has not trained, by TRL's own configuration if asked for."""
    given = {"config_class": TRAINERS[task].trl_config} if of_trl else {}
    return make_trainer(task, "ours", **given, **options)


def said_by_us(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "trl_paddingfree.core.trainers.refusals"]


@pytest.mark.parametrize("task", TRAINERS)
def test_trls_configurations_train_flat_where_they_have_no_flag_and_say_so_where_they_pad(task, caplog):
    trainer = build(task, of_trl=True)
    ours, theirs = type(trainer).__name__, type(trainer.args).__name__
    if task in ("dpo", "sft"):
        assert trainer.method == "TRL, with padding"
        assert said_by_us(caplog) == [
            f"{ours} pads as TRL's {trainer.trl_trainer.__name__} does, because {theirs} has `padding_free=False`, its "
            f"default. Set `{theirs}(padding_free=True)`, or use {ours.replace('Trainer', 'Config')}."
        ]
    else:
        assert trainer.method.startswith("padding-free")
        assert said_by_us(caplog) == []


@pytest.mark.parametrize("task", ["dpo", "sft"])
def test_trls_flag_trains_flat_and_ours_pads_without_a_word(task, caplog):
    assert build(task, of_trl=True, padding_free=True).method.startswith("padding-free")
    assert build(task, padding_free=False).method == "TRL, with padding"
    assert said_by_us(caplog) == []


@pytest.mark.drawn(2)
@pytest.mark.parametrize("task", TRAINERS)
def test_without_a_configuration_it_trains_flat(task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = partial(TRAINERS[task].config_class, use_cpu=True, bf16=False)  # no GPU is here
    monkeypatch.setattr(TRAINERS[task], "config_class", made)
    assert TRAINERS[task](**arguments(task), train_dataset=DATA[task](8, SEED)).method.startswith("padding-free")


def test_options_that_do_nothing_beside_padding_are_named(caplog):
    build("dpo", padding_free=False, memory_budget=8, arrange_micro_batches="tokens", max_tokens_per_micro_batch=64)
    assert said_by_us(caplog) == [
        "PaddingFreeDPOTrainer pads as TRL's DPOTrainer does, because `padding_free=False`, so these have no effect: "
        "`arrange_micro_batches='tokens'`, `max_tokens_per_micro_batch=64`, `memory_budget=8.0`."
    ]


def test_what_trl_packs_is_not_called_padded(caplog):
    trainer = build("sft", of_trl=True, packing=True, max_length=32)
    assert [said.partition(",")[0] for said in said_by_us(caplog)] == [
        "PaddingFreeSFTTrainer packs as TRL's SFTTrainer does"
    ]
    trainer.train()
    assert trainer.method == "TRL, without padding"
    assert trainer.total_counts().padded == trainer.total_counts().real
