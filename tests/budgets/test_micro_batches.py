"""Moving and splitting the examples of one optimizer step: the same training, in another order."""

from functools import partial, wraps
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Trainer, TrainerCallback
from trl import DPOTrainer, SFTTrainer
from trl.trainer.reward_trainer import DataCollatorForPreference

from tests.helpers.memory import LAYERS, most_slices
from tests.helpers.tiny import (
    DATA,
    FOLLOWING,
    SEED,
    arguments,
    conversations,
    different_pairs,
    following_rotary,
    make_model,
    preference_data,
)
from tests.runs import PER_MICRO_BATCH, assert_same, compare, make_trainer, run, train
from trl_paddingfree import PaddingFreeDPOTrainer, PaddingFreeSFTTrainer, PreferenceCollator, coupling
from trl_paddingfree.budgets.features import FEATURES, TOKENS
from trl_paddingfree.budgets.planner import MemoryPlanner
from trl_paddingfree.core.data.lengths import example_tokens, truncated
from trl_paddingfree.coupling import is_published, may_couple
from trl_paddingfree.registry import TRAINERS


def with_a_long_pair():
    """Pairs, one of which has a row of at least 45 tokens, and fewer than 80 in all."""
    chosen = [{"role": "assistant", "content": " ".join(["w1"] * 38)}]
    return preference_data(16, SEED).map(lambda row, i: {"chosen": chosen} if i == 3 else row, with_indices=True)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=40), st.integers(1, 120))
@settings(max_examples=200, deadline=None)
def test_parts_hold_every_item_once_and_keep_the_limit(tokens, limit):
    plan = MemoryPlanner(mock.MagicMock(), Accelerator(cpu=True), None, limit=limit)
    parts = plan.parts([number * np.eye(len(FEATURES))[TOKENS] for number in tokens])
    assert sorted(item for part in parts for item in part) == list(range(len(tokens)))
    assert all(len(part) == 1 or sum(tokens[item] for item in part) <= limit for part in parts)


@pytest.mark.trl_1
@pytest.mark.parametrize(
    ("given", "longest"),
    [
        ({"truncation_mode": "keep_start"}, 30),
        ({"truncation_mode": "keep_end"}, 30),
        ({"data_collator": PreferenceCollator(0, 6, "keep_end")}, 6),
    ],
    ids=["start", "end", "collator"],
)
def test_a_trainer_knows_how_long_rows_are_after_truncation(given, longest, model_dir):
    """By a collator of one's own, if there is one: TRL hands its `max_length` to a collator of its own only."""
    options = {"train_dataset": preference_data(12, SEED), "max_length": 30, **given}
    trainer = make_trainer("dpo", "ours", model=model_dir, **options)
    lengths = trainer.example_lengths()
    for example, known, most in zip(trainer.train_dataset, lengths, example_tokens(lengths, True), strict=True):
        batch = trainer.data_collator([example])
        assert batch["attention_mask"].sum(1).tolist() == (known[0] + known[1:]).tolist()
        assert batch["flat_batch"].counts.computed <= most  # fewer, where completions begin alike
    assert trainer.exceeds(longest - 1)
    assert not trainer.exceeds(longest)


def test_predicted_tokens_are_those_of_the_batch():
    """Of two completions, in all cases; of three, tests/test_write_a_trainer.py has the other ways to cut and share."""
    collator = PreferenceCollator(0, 20, "keep_end", padding_free=True, prefix_sharing=True)
    for lengths in np.random.default_rng(SEED).integers(2, 20, (40, 3)):
        # tokens that occur once, so that only the prompt is shared
        ids = np.split(np.arange(1, 1 + lengths.sum()), np.cumsum(lengths)[:2])
        names = ("prompt_ids", "chosen_ids", "rejected_ids")
        batch = collator([{name: part.tolist() for name, part in zip(names, ids, strict=True)}])
        (predicted,) = example_tokens(truncated(lengths[None], 20, "keep_end"), True)
        assert batch["flat_batch"].counts.computed == predicted


def test_models_that_transformers_has_sharded_are_refused_beside_budgets(model_dir):
    trainer = make_trainer("dpo", "ours", model=model_dir, max_tokens_per_micro_batch=200)
    trainer.planner, trainer.is_distributed_loading_by_transformers = None, True
    with pytest.raises(ValueError, match="`distributed_config` shards the model as it is loaded"):
        trainer.plan_memory(trainer.model)


def test_parts_weigh_by_tokens_where_the_loss_is_a_mean_over_a_micro_batch(model_dir):
    """Models without `accepts_loss_kwargs` are not told how many tokens a step has."""

    class Mean(PaddingFreeSFTTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.model_accepts_loss_kwargs = False

    common = {"model": model_dir, "train_dataset": conversations(32, SEED), "max_length": 64}
    options = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "steps": 2}
    plain = run("sft", "ours", trainer_class=Mean, **common, **options)
    ours = run("sft", "ours", trainer_class=Mean, **common, **options, max_tokens_per_micro_batch=100)
    assert_same(plain, ours, ignored=())
    trainer = plain.trainer
    trainer.runtime.options.arrange_micro_batches = "tokens"
    with pytest.raises(ValueError, match="LlamaForCausalLM, whose loss is a mean over each micro-batch"):
        trainer.refuse_options()


def test_labels_in_a_batch_do_not_make_the_mean_over_pairs_a_sum():
    """transformers counts the labels of a step whatever they are, and most models take the number."""

    class Labeled(DataCollatorForPreference):
        def torch_call(self, examples):
            batch = super().torch_call(examples)
            return {**batch, "labels": torch.zeros(len(batch["input_ids"]))}

    common = {"train_dataset": different_pairs(16, SEED), "data_collator": Labeled(0), "steps": 2}
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    padded = run("reward", "padded", **common, **options)
    assert_same(padded, run("reward", "ours", **common, **options, max_tokens_per_micro_batch=60))


def test_an_example_above_the_budget_runs_in_slices_and_others_in_parts(model_dir, passes):
    options = {"ours": {"max_tokens_per_micro_batch": 45}, "per_device_train_batch_size": 8, "steps": 2}
    compare("dpo", lambda: {"model": model_dir}, with_a_long_pair(), "ours", ignored=(), **options)
    sizes = [each.batch.counts.computed for each in passes if each.trains]
    assert min(sizes) <= 45 < max(sizes)
    for each in passes:
        assert max(np.diff(each.schedule.cuts), default=each.batch.counts.computed) <= 45


@FOLLOWING
def test_frequencies_that_follow_the_longest_row_couple_examples_where_rows_reach_them(tokenizer, kind):
    def trained(task, layout, **options):
        models = {name: make_model(**following_rotary(24, kind)) for name in ("model", "ref_model")}
        given = {"model": models["model"]} if task == "sft" else models
        data = DATA[task](48, SEED)  # so many that some are long
        return run(task, layout, **given, train_dataset=data, processing_class=tokenizer, steps=2, **options)

    below, parts = {"max_length": 24}, {"max_tokens_per_micro_batch": 80}
    moved, beyond = {"arrange_micro_batches": "tokens"}, {**below, "pad_to_multiple_of": 32}
    for task, longer in (("dpo", {}), ("sft", {}), ("sft", beyond)):
        with pytest.raises(ValueError, match=f"`rope_type='{kind}'` and rows of more than 24 tokens the loss"):
            trained(task, "ours", **moved, **longer)
    # Rows that stay below, and rows beyond that nothing moves, train as padded TRL's. So do parts of a micro-batch, and
    # rows that only padding makes longer
    same = [("sft", below, moved), ("sft", {}, {}), ("sft", {}, parts), ("dpo", {}, parts)]
    packed = {"packing": True, "max_length": 60, "pad_to_multiple_of": 32}
    padded_rows = [("sft", beyond, {}), ("dpo", beyond, parts), ("kto", beyond, {}), ("sft", packed, {})]
    for task, both, ours in (*same, *padded_rows):
        padded = trained(task, "padded", **both)
        counted = ("num_tokens",) if both is packed else ()  # TRL counts the padding of packed rows as tokens
        assert_same(padded, trained(task, "ours", **both, **ours), ignored=(*PER_MICRO_BATCH, *counted))


@pytest.mark.parametrize(("kind", "limits"), [("longrope", (None, 36)), ("dynamic", (44, 36))])
def test_frequencies_of_a_reference_follow_the_longest_row_of_the_whole_micro_batch(tokenizer, kind, limits):
    """The reference's are others from 36 tokens on, the trained model's from 44 or never. Some parts have such rows."""

    def trained(layout, **options):
        model, ref_model = (make_model(**(following_rotary(limit, kind) if limit else {})) for limit in limits)
        models = {"model": model, "ref_model": ref_model, "processing_class": tokenizer}
        return run("dpo", layout, **models, train_dataset=with_a_long_pair(), steps=2, **options)

    parts = {"max_tokens_per_micro_batch": 80}
    padded = trained("padded")
    for options in ({}, parts):
        assert_same(padded, trained("ours", **options), ignored=PER_MICRO_BATCH)
    with pytest.raises(ValueError, match=f"`rope_type='{kind}'` and rows of more than 36 tokens the loss"):
        trained("ours", arrange_micro_batches="tokens")


def test_an_optimizer_that_zero2_has_moved_away_is_refused_beside_parts(model_dir):
    """DeepSpeed drops the gradients of each pass but the last there, unless it accumulates by itself."""
    offload = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    plugin = mock.PropertyMock(return_value=SimpleNamespace(zero_stage=2, deepspeed_config=offload))
    trainer = run("dpo", "ours", model=model_dir, steps=1, max_tokens_per_micro_batch=200).trainer
    with mock.patch.object(AcceleratorState, "deepspeed_plugin", plugin):
        with pytest.raises(ValueError, match="keeps the gradients of the last part"):
            trainer.refuse_options()
        trainer.args.gradient_accumulation_steps = 2
        trainer.refuse_options()


@pytest.mark.trl_1
def test_a_trainer_of_ones_own_may_ask_for_outputs(model_dir):
    class Mine(PaddingFreeDPOTrainer):
        part_sizes = PaddingFreeDPOTrainer.part_sizes  # for it adds up as DPO's does

        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            loss, _ = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
            return loss

    common = {"model": model_dir, "train_dataset": preference_data(16, SEED), "steps": 2}
    common["per_device_train_batch_size"] = 8
    plain = run("dpo", "ours", **common)
    for limit in (None, 130):
        ours = run("dpo", "ours", trainer_class=Mine, **common, max_tokens_per_micro_batch=limit)
        assert_same(plain, ours, ignored=())


@pytest.mark.trl_1
@pytest.mark.parametrize("task", ["dpo", "sft"])
def test_a_loss_of_ones_own_may_be_any_function_of_a_micro_batch(model_dir, task):
    """It asks for outputs, adds something, and leaves out by what SFT divides: nothing that parts would add up to."""

    class Mine(TRAINERS[task]):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            loss, _ = super().compute_loss(model, inputs, return_outputs=True)
            return loss + 0.01 * sum(weight.square().sum() for weight in model.parameters())

    common = {"model": model_dir, "train_dataset": DATA[task](16, SEED), "steps": 2, "trainer_class": Mine}
    common["per_device_train_batch_size"] = 8
    assert_same(run(task, "ours", **common), run(task, "ours", **common, max_tokens_per_micro_batch=130), ignored=())
    with pytest.raises(ValueError, match="with `Mine.compute_loss` without `part_sizes` the loss of an"):
        run(task, "ours", **common, arrange_micro_batches="tokens")


def calling(trainer_class, reads_logits):
    """A trainer whose loss calls the models itself, and leaves out TRL's."""

    class Calling(trainer_class):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            rows = {name: x for name, x in inputs.items() if name not in ("completion_mask", "labels")}
            labels = (
                inputs["labels"]
                if "labels" in inputs
                else inputs["input_ids"].where(inputs["completion_mask"] == 1, -100)
            )
            if reads_logits:
                return model(**rows, labels=labels).loss
            outputs = model(**rows, labels=labels, fused_lm_head=True)
            with torch.no_grad():
                expected = self.ref_model(**rows, labels=labels, fused_lm_head=True).log_probs
            return (outputs.log_probs - expected).sum(1).square().mean()

    return Calling


@pytest.mark.parametrize("limit", ["memory", "tokens"])
@pytest.mark.parametrize(("task", "reads_logits"), [("sft", True), ("dpo", True), ("dpo", False)])
def test_a_loss_that_calls_the_model_itself_keeps_to_a_budget(folder, task, reads_logits, limit, passes, hold_tokens):
    options = {"train_dataset": DATA[task](16, SEED), "per_device_train_batch_size": 8, "steps": 2, "model": folder}
    padded = run(task, "padded", trainer_class=calling(TRAINERS[task].trl_trainer, reads_logits), **options)
    if limit == "memory":
        hold_tokens(LAYERS * 32)
    budget = {"memory_budget": 8} if limit == "memory" else {"max_tokens_per_micro_batch": 32}
    ours = run(task, "ours", trainer_class=calling(TRAINERS[task], reads_logits), **options, **budget)
    assert_same(padded, ours)
    assert most_slices([each for each in passes if each.trains]) > 1
    assert all(each.schedule.largest_slice(each.batch.counts.computed) <= 32 for each in passes)


def test_a_class_that_is_mixed_in_after_ours_is_made_and_its_loss_is_its_own(model_dir):
    class Mine(DPOTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.beta = 0.5

        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs) ** 2

    class Own(PaddingFreeDPOTrainer, Mine):
        pass

    common = {"model": model_dir, "train_dataset": preference_data(16, SEED), "per_device_train_batch_size": 8}
    padded = run("dpo", "padded", trainer_class=Mine, **common)
    for limit in (None, 130):
        assert_same(padded, run("dpo", "ours", trainer_class=Own, **common, max_tokens_per_micro_batch=limit))


def mean_of_rows(outputs, labels, *args, **kwargs):
    loss = torch.nn.functional.cross_entropy(outputs["logits"][:, :-1].mT, labels[:, 1:], reduction="none")
    return (loss.sum(1) / (labels[:, 1:] != -100).sum(1)).mean() ** 2


def squared(trainer):
    compute = trainer.compute_loss
    trainer.compute_loss = lambda *args, **kwargs: compute(*args, **kwargs) ** 2


def clipped(trainer):
    """Clips the gradients of each micro-batch on its own: no sum of those of its parts, or of other micro-batches."""
    step = trainer.training_step

    def stepped(*args):
        loss = step(*args)
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 0.05)
        return loss

    trainer.training_step = stepped


def clamp_inside(module, gradients, _):
    return tuple(gradient.clamp(-1e-3, 1e-3) for gradient in gradients)


def without_first_row(trainer):
    prepare = trainer._prepare_inputs

    def prepared(inputs):
        inputs = prepare(inputs)
        inputs["labels"][0] = -100
        return inputs

    trainer._prepare_inputs = prepared


CHANGES = {
    "`compute_loss_func`": lambda trainer: setattr(trainer, "compute_loss_func", mean_of_rows),
    "`label_smoother`": lambda trainer: setattr(trainer, "label_smoother", mean_of_rows),
    "`trainer.compute_loss`": squared,
    "`trainer._prepare_inputs`": without_first_row,
    "`trainer.training_step`": clipped,
    "`accelerator.backward`": lambda trainer: setattr(
        trainer.accelerator, "backward", lambda loss: loss.square().backward()
    ),
    "hooks": lambda trainer: trainer.model.model.norm.register_full_backward_hook(clamp_inside),
    "hooks on gradients": lambda trainer: [
        p.register_hook(lambda gradient: gradient.clamp(-1e-2, 1e-2)) for p in trainer.model.parameters()
    ],
}


def squared_loss(compute):
    return lambda *args, **kwargs: compute(*args, **kwargs) ** 2


def centered(compute):
    """References less their mean over the micro-batch: of a part, another one."""

    def references(*args):
        chosen, rejected = compute(*args)
        return chosen - rejected.mean(), rejected

    return references


def clipped_step(step):
    def stepped(trainer, *args, **kwargs):
        loss = step(trainer, *args, **kwargs)
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 0.05)
        return loss

    return stepped


def squared_backward(_):
    return lambda accelerator, loss, **kwargs: loss.square().backward()


def without_first_pair(prepare):
    def prepared(*args):
        inputs = prepare(*args)
        inputs["completion_mask"][:: len(inputs["completion_mask"]) // 2] = 0
        return inputs

    return prepared


PATCHES = {
    "loss": (DPOTrainer, "_compute_loss", squared_loss),
    "step": (DPOTrainer, "training_step", clipped_step),
    "references": (DPOTrainer, "compute_ref_log_probs", centered),
    "inputs": (Trainer, "_prepare_inputs", without_first_pair),
    "backward": (Accelerator, "backward", squared_backward),
}


@pytest.mark.parametrize("names", [False, True], ids=["plain", "wraps"])
@pytest.mark.parametrize("patch", PATCHES)
def test_what_replaces_a_method_of_a_library_counts(model_dir, patch, names, monkeypatch):
    """It may be any function of a micro-batch, whether or not it bears the name of what it replaces."""
    owner, method, change = PATCHES[patch]
    original = getattr(owner, method)
    changed = change(original)
    monkeypatch.setattr(owner, method, wraps(original)(changed) if names else changed)
    trained = partial(run, "dpo", model=model_dir, per_device_train_batch_size=8, steps=2)
    assert_same(trained("padded"), trained("ours", max_tokens_per_micro_batch=130))
    with pytest.raises(ValueError, match=f"with `{owner.__name__}.{method}`.* the loss of an example depends"):
        trained("ours", arrange_micro_batches="tokens")


@pytest.mark.parametrize("trainer_class", TRAINERS.values())
def test_methods_of_libraries_are_known_as_published(trainer_class):
    """With all their decorators: otherwise nothing would run in parts."""
    methods = [(cls, name) for cls in (*trainer_class.__mro__, Accelerator) for name in coupling._OF_STEPS]
    assert [(cls, name) for cls, name in methods if name in vars(cls) and not is_published(cls, name)] == []


def trained_after(change, model_dir, layout, event="on_train_begin", **options):
    """A run of SFT whose trainer is changed by the first call of a callback's `event`."""
    common = {"model": model_dir, "train_dataset": conversations(16, SEED), "per_device_train_batch_size": 8}
    trainer = make_trainer("sft", layout, **common, **options)
    callback, changes = TrainerCallback(), iter([change])

    def call(*args, **kwargs):
        for each in changes:
            each(trainer)

    setattr(callback, event, call)
    trainer.add_callback(callback)
    return train(trainer)


@pytest.mark.parametrize("event", ["on_train_begin", "on_step_end"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_callback_changes_counts(model_dir, change, event):
    if "hooks" in change and event == "on_step_end":
        pytest.skip("looked for once")
    trained = partial(trained_after, CHANGES[change], model_dir, event=event)
    assert_same(trained("padded"), trained("ours", max_tokens_per_micro_batch=60))
    with pytest.raises(ValueError, match=f"with {change}.* the loss of an example depends on the others"):
        trained("ours", arrange_micro_batches="tokens")


@pytest.mark.parametrize("task", ["sft", "dpo"])
def test_rows_may_score_what_rows_with_the_same_start_do_not(task):
    """The answer of one turn stands in the prompt of the next: a token that one row scores, and others only read."""
    start, answer, more = "w1 w2 w3", " w4 w5 w6 w7", " w8 w9 w10"
    turns = [{"prompt": start, "completion": answer}, {"prompt": start + answer, "completion": more}]
    rows = {
        "sft": turns,
        "dpo": [{"prompt": x["prompt"], "chosen": x["completion"], "rejected": " w20 w21"} for x in turns],
    }
    data, limit = Dataset.from_list(rows[task] * 4), {"max_tokens_per_micro_batch": 12}
    compare(task, partial(arguments, task, False), data, ours=limit, train_sampling_strategy="sequential")


def test_a_class_that_says_how_parts_combine_may_have_linear_hooks(model_dir):
    class Sizes:
        def part_sizes(self, inputs):
            return super().part_sizes(inputs)

    class Own(Sizes, PaddingFreeSFTTrainer):
        pass

    def mask_gradient(trainer):
        trainer.model.lm_head.weight.register_hook(lambda grad: grad * (torch.arange(len(grad)) > 20)[:, None])

    trained = partial(trained_after, mask_gradient, model_dir)
    padded = trained("padded")
    for options in ({"max_tokens_per_micro_batch": 60}, {"arrange_micro_batches": "tokens"}):
        ours = trained("ours", trainer_class=Own, **options)
        assert_same(padded, ours)
        assert not may_couple(ours.trainer)


def test_a_step_that_is_mixed_in_after_ours_sees_whole_micro_batches(model_dir):
    class Mine(SFTTrainer):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
            return loss

    class Own(PaddingFreeSFTTrainer, Mine):
        pass

    padded = trained_after(id, model_dir, "padded", trainer_class=Mine)
    assert_same(padded, trained_after(id, model_dir, "ours", trainer_class=Own, max_tokens_per_micro_batch=60))
