"""Prompts with several answers train what padded TRL trains on their pairs, with the same pairs in each micro-batch."""

import random
from itertools import product

import pytest
from datasets import Dataset, IterableDataset

from tests.answers.runs import arguments, compare, pairs_of, scored
from tests.helpers.random_draws import LOSSES, WITH_DIVERGENCE
from tests.helpers.tiny import SEED, lora, text
from trl_paddingfree import PreferenceCollator
from trl_paddingfree.answers.collate import Examples

CHAT, TEXT = scored(8, 1), scored(6, 2, (3, 6), chat=False)
# What a command runs with, and what only ours is given
CASES = {
    "chat": (CHAT, {}, {}),
    "text": (TEXT, {}, {}),
    "best": (CHAT, {"answer_pairs": "best"}, {}),
    "extremes": (TEXT, {"answer_pairs": "extremes", "min_score_margin": 2}, {}),
    "margin": (TEXT, {"min_score_margin": 2}, {}),
    "accumulation": (CHAT, {"gradient_accumulation_steps": 2}, {}),
    "truncated": (CHAT, {"max_length": 14}, {}),
    "evaluation": (CHAT, {"eval_dataset": TEXT, "eval_strategy": "steps", "eval_steps": 1}, {}),
    "a budget that divides prompts": (CHAT, {}, {"max_tokens_per_micro_batch": 60}),
    "a budget below a prompt": (TEXT, {}, {"max_tokens_per_micro_batch": 12}),
    "a budget of memory": (CHAT, {}, {"memory_budget": 8}),
    "checkpointing": (TEXT, {"gradient_checkpointing": True}, {}),
    "rows padded to a multiple": (CHAT, {"pad_to_multiple_of": 8}, {}),
    "many answers": (scored(2, 3, (16, 16)), {"size": 1}, {}),
    "two answers": (scored(8, 4, (2, 2)), {"size": 3}, {}),
}
OF_DPO = {
    "kept ends": (CHAT, {"max_length": 10, "truncation_mode": "keep_end"}, {}),
    "an adapter": (CHAT, {"make": lambda task: arguments(task, peft_config=lora())}, {}),
    "precomputed": (CHAT, {"precompute_ref_log_probs": True}, {}),
    "precomputed, text, cut": (TEXT, {"precompute_ref_log_probs": True, "max_length": 12}, {}),
    "losses": (CHAT, {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}, {"memory_budget": 8}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("task", ["dpo", "reward"])
def test_pairs_train_as_in_padded_trl(task, case):
    data, given, ours = CASES[case]
    given = dict(given)
    if task == "reward" and "max_length" in given:
        given["max_length"] = 24  # rows that are longer are left out
    compare(task, data, ours=ours, **given)


@pytest.mark.trl_1
@pytest.mark.parametrize(
    ("task", "given"),
    [
        ("reward", {"answer_pairs": "best", "max_length": 24}),
        ("dpo", {"precompute_ref_log_probs": True, "eval_dataset": TEXT, "eval_strategy": "epoch"}),
    ],
)
def test_a_trainer_that_pads_pads_the_same_pairs(task, given, caplog):
    padded, ours = compare(task, CHAT, layout="ours", ours={"padding_free": False}, **given)
    assert "no effect" not in caplog.text
    assert ours.trainer.method == "TRL, with padding"
    assert ours.trainer.total_counts().padded
    evaluated = ours.trainer.evaluate(TEXT), padded.trainer.evaluate(pairs_of(TEXT, given.get("answer_pairs", "all")))
    assert evaluated[0]["eval_loss"] == pytest.approx(evaluated[1]["eval_loss"])  # in float32


@pytest.mark.trl_1
@pytest.mark.parametrize("case", OF_DPO)
def test_options_of_dpo_do_as_in_padded_trl(case):
    data, given, ours = OF_DPO[case]
    compare("dpo", data, ours=ours, **given)


def drawn(number):
    """What a random number of this run trains: data, options, and what only ours is given."""
    rng = random.Random(f"{SEED} {number}")
    losses = rng.sample(LOSSES, rng.choice([1, 1, 2]))
    options = {
        "loss_type": losses,
        "beta": rng.choice([0.1, 0.5]),
        "label_smoothing": 0.1 if "exo_pair" in losses else rng.choice([0.0, 0.1]),
        "ld_alpha": rng.choice([None, 0.5]),
        "max_length": rng.choice([None, 14, 24]),
        "truncation_mode": rng.choice(["keep_start", "keep_end"]),
        "precompute_ref_log_probs": rng.random() < 0.3,
        "gradient_accumulation_steps": rng.choice([1, 2]),
        "answer_pairs": rng.choice(["all", "all", "best", "extremes"]),
        "min_score_margin": rng.choice([0, 0, 0.5]),
        "size": rng.choice([1, 2, 3]),
    }
    if {*losses} <= WITH_DIVERGENCE and rng.random() < 0.4:
        options["f_divergence_type"] = rng.choice(["forward_kl", "js_divergence", "alpha_divergence"])
    ours = rng.choice([{}, {}, {"max_tokens_per_micro_batch": rng.choice([12, 60])}, {"memory_budget": 8}])
    data = scored(6, rng.randrange(10**6), (2, rng.choice([3, 5, 8])), chat=rng.random() < 0.5)
    return data, options, ours


@pytest.mark.trl_1
@pytest.mark.drawn(4)
@pytest.mark.parametrize("number", range(40))
def test_random_draws_of_losses_and_options_train_as_in_padded_trl(number):
    data, options, ours = drawn(number)
    compare("dpo", data, ours=ours, **options)


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "text"])
@pytest.mark.parametrize("lists", [("chosen", "rejected"), ("chosen",), ("rejected",)], ids="-".join)
def test_each_of_a_list_of_chosen_answers_meets_each_rejected_one(lists, chat):
    def row(number):
        rng = random.Random(number)

        def answer():
            words = text(rng, 1, 9)
            return [{"role": "assistant", "content": words}] if chat else f" {words}"

        values = {
            x: [answer() for _ in range(rng.randint(1, 3))] if x in lists else answer() for x in ("chosen", "rejected")
        }
        words = text(rng, 1, 9)
        return {"prompt": [{"role": "user", "content": words}] if chat else words, **values}

    compare("dpo", Dataset.from_list([row(number) for number in range(4)]))


def merging(tokens):
    """A tokenizer in which the end of a prompt merges with the start of some answers."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", *tokens])}
    backend = Tokenizer(models.BPE(vocab, [("a", "b"), ("c", "ab"), ("b", "c")]))
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


@pytest.mark.parametrize("task", ["dpo", "reward"])
@pytest.mark.parametrize("precomputed", [False, True], ids=["computed", "precomputed"])
def test_a_prompt_ends_in_each_pair_where_trl_splits_it_as_tokens_merge(task, precomputed):
    if task == "reward" and precomputed:
        pytest.skip("reward models have no reference")
    tokenizer = merging(["a", "b", "c", "ab", "cab", "bc"])
    prompts, rng = ["aca", "ca", "cca", "acb"], random.Random(0)
    answers = [["b", "c", "bc", "a", "bb"], ["bca", "ca"], ["ab", "bb", "cc"], ["c", "a", "cc", ""]]
    rows = [
        {"prompt": prompt, "completions": each, "scores": rng.sample(range(9), len(each))}
        for prompt, each in zip(prompts, answers, strict=True)
    ]

    def make(task):
        return arguments(task) | {"processing_class": tokenizer}

    options = {"precompute_ref_log_probs": True} if precomputed else {}
    run = compare("dpo" if task == "dpo" else task, Dataset.from_list(rows), make=make, **options).ours
    if task == "dpo":  # the prompt ends at different places
        assert any(len({*starts}) > 1 for starts in run.trainer.train_dataset["prompt_lengths"])


def test_streams_train_as_data_sets():
    data = scored(6, 5, (2, 4))
    run = compare("dpo", data, max_steps=3, ours={"train_dataset": data.to_iterable_dataset()}).ours
    assert isinstance(run.trainer.train_dataset, IterableDataset)


def test_equal_rows_are_computed_once_whatever_the_pairs():
    """With prompts and answers of the mean lengths of UltraFeedback, all pairs of two prompts."""
    rng = random.Random(0)

    def tokens(number):
        return [rng.randrange(30_000) for _ in range(number)]

    pairs = [[i, j] for i, j in product(range(4), repeat=2) if i < j]
    answers = {"prompt_lengths": [180] * 4, "answer_pairs": pairs}
    prompts = [{"prompt_ids": tokens(180), "answer_ids": [tokens(270) for _ in range(4)], **answers} for _ in range(2)]
    counts = PreferenceCollator(0, padding_free=True, read_as=Examples())(prompts)["flat_batch"].counts
    assert counts.real == 2 * 6 * 2 * 450
    assert counts.computed <= 1.005 * counts.distinct
