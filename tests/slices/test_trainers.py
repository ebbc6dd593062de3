"""Training in slices, with budgets below most rows, beside padded TRL."""

from functools import partial

import numpy as np
import pytest

from tests.helpers.memory import most_slices
from tests.helpers.tiny import ADAPTERS, DATA, REENTRANT, ROUTED, SEED, arguments, make_model, make_tokenizer
from tests.helpers.vision import VISION_DATA, on_images
from tests.runs import LAYOUTS, ROUNDED, assert_same, compare, make_trainer, run, train

# Fewer tokens than most rows have
TINY = {"max_tokens_per_micro_batch": 9}
# Which of two equal rewards is higher is rounding: the last tokens of a pair may be in slices of different sizes
IGNORED = {**dict.fromkeys(DATA, ROUNDED), "reward": (*ROUNDED, "accuracy")}


def assert_in_slices(passes, most=9):
    """All passes kept within the budget, in several slices where they had to; references and teachers among them."""
    sizes = [max(np.diff(x.schedule.cuts), default=x.batch.layout.segments.num_tokens) for x in passes]
    assert max(sizes) <= most
    assert most_slices(passes) > 1


@pytest.mark.drawn(7)
@ADAPTERS
@pytest.mark.parametrize("task", DATA)
def test_a_budget_below_most_rows_trains_as_padded_trl(task, adapters, passes):
    options = {"gradient_accumulation_steps": 2, "gradient_checkpointing": adapters}
    if task in ("grpo", "rloo"):
        options |= {"beta": 0.1 if adapters else 0.0, "num_iterations": 2}
    layout = LAYOUTS[SEED % 2]
    data, options["ignored"] = DATA[task](16, SEED), IGNORED[task]
    made = compare(task, partial(arguments, task, adapters), data, layout, ours=TINY, **options).ours
    assert_in_slices(passes)
    assert all(entry["flat/slices"] > 1 for entry in made.log_history if "loss" in entry)


@pytest.mark.parametrize("task", DATA)
def test_a_memory_budget_below_most_rows_trains_as_padded_trl(task, passes, hold_tokens):
    hold_tokens(16)  # in two layers that keep what they compute, slices of eight: fewer than the longest row has
    data = DATA[task](16, SEED)
    compare(task, partial(arguments, task), data, "shared", ours={"memory_budget": 8}, ignored=IGNORED[task])
    assert_in_slices(passes, 16)


@pytest.mark.trl_1
@pytest.mark.drawn(6)
@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("dpo", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5], "label_smoothing": 0.1}),
        ("dpo", {"loss_type": ["aot"], "pad_to_multiple_of": 8}),
        ("dpo", {"loss_type": ["ipo"], "ld_alpha": 0.5, "use_weighting": True}),
        ("dpo", {"precompute_ref_log_probs": True}),
        ("kto", {"loss_type": "apo_zero_unpaired"}),
        ("sft", {"label_smoothing_factor": 0.1}),
        ("sft", {"loss_type": "dft"}),
        ("sft", {"packing": True, "max_length": 24}),
        ("reward", {"center_rewards_coefficient": 0.1}),
        ("grpo", {"loss_type": "bnpo", "top_entropy_quantile": 0.5, "importance_sampling_level": "sequence"}),
        ("distillation", {"beta": 0.5}),
    ],
    ids=lambda x: x if isinstance(x, str) else ",".join(x),
)
def test_losses_of_all_kinds(task, options, passes):
    if task not in ("grpo", "distillation"):
        options = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": DATA[task](5, SEED + 1), **options}
    layout = "flat" if "packing" in options else "shared"
    make, data = partial(arguments, task, False), DATA[task](16, SEED)
    compare(task, make, data, layout, ours=TINY, ignored=IGNORED[task], **options)
    assert_in_slices(passes)
    assert {each.trains for each in passes} == {True, False} or task in ("grpo", "distillation")


def test_router_losses(passes):
    def make():
        return arguments("sft", model=make_model("mixtral", **ROUTED))

    compare("sft", make, DATA["sft"](12, SEED), "flat", ours=TINY, steps=2)
    assert_in_slices(passes)


@pytest.mark.drawn(5)
@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl", "qwen3_vl", "gemma3", "gemma4", "internvl"])
@pytest.mark.parametrize("task", ["dpo", "sft"])
def test_images(kind, task, passes):
    """Also those whose tokens see their whole image, and features that layers of the decoder add."""
    most = 20
    given = {"ours": {"max_tokens_per_micro_batch": most}, "steps": 2}
    compare(task, partial(on_images, kind, task), VISION_DATA[task](8, SEED), "shared", **given)
    assert most_slices(passes) > 1
    if not kind.startswith("gemma"):  # an image that is larger is not cut
        assert max(max(np.diff(each.schedule.cuts), default=0) for each in passes) <= most


@pytest.mark.drawn(2)
@pytest.mark.parametrize("task", ["dpo", "sft", "kto", "reward"])
def test_a_run_that_is_resumed_in_mid_epoch_ends_with_the_same_figures(task, tmp_path, passes):
    options = {"train_dataset": DATA[task](24, SEED), "steps": 4, "output_dir": str(tmp_path), **TINY}
    options |= {"save_strategy": "steps", "save_steps": 2}
    whole = run(task, "shared", **options)
    trainer = make_trainer(task, "shared", **options)
    again = train(trainer, resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    # TRL counts tokens anew, and the mean over the run has the steps since
    assert_same(whole, again, ignored=(*ROUNDED, "accuracy", "num_tokens", "train_loss"))
    assert_in_slices(passes)


@REENTRANT
def test_checkpointing_of_transformers_computes_nothing_else(reentrant, passes):
    kwargs = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    runs = (run("dpo", "shared", **TINY, **options) for options in ({}, kwargs))
    assert_same(*runs, tolerance=0, ignored=())
    assert_in_slices(passes)


def test_a_model_of_a_trainer_before_is_not_computed_by_its_budget(passes):
    model = make_model()
    for options in (TINY, {}, TINY):
        passes.clear()
        made = {"model": model, "processing_class": make_tokenizer()}
        run("sft", "shared", **made, steps=1, **options)
        assert bool(passes) == bool(options)
