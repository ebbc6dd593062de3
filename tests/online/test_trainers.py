"""GRPO and RLOO, padded TRL beside ours: the passes of policy, old policy and reference over generated rows."""

from functools import partial, wraps
from unittest import mock

import pytest
import torch
from datasets import Dataset
from trl import GRPOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer
from trl.trainer.utils import add_fused_lm_head

from tests.core.trainers.test_computed_flat import WITHIN, refused_if_it_computes_no_flat_batch, train
from tests.helpers.architectures import is_older
from tests.helpers.flat_and_padded import assert_padding_on_the_left_changes_nothing
from tests.helpers.refused import build
from tests.helpers.tiny import FOLLOWING, ROUTED, SEED, WORDS, arguments, following_rotary, make_model, prompts, score
from tests.runs import PER_MICRO_BATCH, assert_same, compare, make_trainer, run
from trl_paddingfree import PaddingFreeGRPOTrainer
from trl_paddingfree.core.model.told import StandIn
from trl_paddingfree.core.trainers.runtime import Runtime
from trl_paddingfree.online.composed import OnlineTrainer
from trl_paddingfree.registry import TRAINERS

# What TRL averages over micro-batches
MOVED = (*PER_MICRO_BATCH, "clip_ratio", "sampling/")


@pytest.fixture(scope="module")
def data():
    return prompts(16, SEED)


plain, with_lora = (partial(arguments, "grpo", adapters) for adapters in (False, True))


def test_a_model_is_proven_beside_rows_where_it_has_trained_before(data, monkeypatch):
    model = run("grpo", "shared", **plain(), train_dataset=data).trainer.model
    flattened = mock.Mock(wraps=OnlineTrainer.flatten)
    monkeypatch.setattr(OnlineTrainer, "flatten", lambda *args: flattened(*args))
    make_trainer("grpo", "shared", **{**plain(), "model": model}, train_dataset=data)
    assert not flattened.called


def test_a_trainer_of_trl_whose_constructor_passes_arguments_on(data):
    class Own(PaddingFreeGRPOTrainer, GMPOTrainer):
        trl_trainer = GMPOTrainer

    def trained(trainer_class, layout):
        given = {"trainer_class": trainer_class, "config_class": GMPOConfig, "train_dataset": data}
        return run("grpo", layout, **given, **plain())

    assert_same(trained(GMPOTrainer, "padded"), trained(Own, "ours"))


def of_longer_rows(policy, model, inputs, ids, mask):
    """Another pass, of rows that are longer, before the backward pass of the first."""
    with torch.no_grad():
        ids, mask = torch.cat([ids, ids[:, -12:]], 1), torch.cat([mask, 0 * mask[:, -12:]], 1)
        policy._get_per_token_logps_and_entropies(model, ids, mask, inputs["completion_ids"].size(1) + 12)
    return 0


def by_position(policy, model, inputs, ids, mask):
    labels = ids.masked_fill(mask == 0, -100)
    return model(ids, attention_mask=mask, labels=labels, fused_lm_head=True).log_probs.mean()


def without_mask(policy, model, inputs, ids, mask):
    return model(input_ids=ids[:, -4:], labels=ids[:, -4:], fused_lm_head=True).log_probs.mean()


def of_shifted_labels(policy, model, inputs, ids, mask):
    labels = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], 1)
    return model(input_ids=ids, attention_mask=mask, shift_labels=labels, fused_lm_head=True).log_probs.mean()


@pytest.mark.parametrize("more", [of_longer_rows, by_position, without_mask, of_shifted_labels])
def test_a_loss_may_call_the_model_once_more(more):
    rows = Dataset.from_list([{"prompt": " ".join(WORDS[i : i + 30])} for i in range(16)])

    def with_more(base):
        class Own(base):
            def _compute_loss(self, model, inputs):
                loss = super()._compute_loss(model, inputs)
                ids, mask = (
                    torch.cat([inputs[f"{x}_{y}"] for x in ("prompt", "completion")], 1) for y in ("ids", "mask")
                )
                return loss + more(self, model, inputs, ids, mask)

        return Own

    def trained(layout, trainer_class, **options):
        given = {**with_lora(), "model": make_model(**following_rotary(24, "dynamic"))}
        return run("grpo", layout, trainer_class=with_more(trainer_class), train_dataset=rows, **given, **options)

    padded = trained("padded", GRPOTrainer)
    for options in ({}, {"max_tokens_per_micro_batch": 9}, {"check_steps": 1}):
        assert_same(padded, trained("shared", PaddingFreeGRPOTrainer, **options))


@pytest.mark.parametrize("task", ["grpo", "rloo", "distillation"])
def test_prompts_that_a_subclass_makes_while_training_are_left_to_it(data, task):
    """The data has no column that TRL reads, and a method needs what its constructor makes last."""

    def with_questions(base):
        class Own(base):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                self.system = WORDS[0]

            def _generate_and_score_completions(self, inputs):
                inputs = [{"prompt": x["question"] if "question" in x else x["prompt"]} for x in inputs]
                return super()._generate_and_score_completions(inputs)

            def _tokenize_prompts(self, prompts):
                return super()._tokenize_prompts([f"{self.system} {prompt}" for prompt in prompts])

        return Own

    questions = data.rename_column("prompt", "question")
    for rows, options in ((data, {}), (data, {"memory_budget": 1.0}), (questions, {})):
        padded = run(task, "padded", trainer_class=with_questions(TRAINERS[task].trl_trainer), train_dataset=rows)
        ours = run(task, "shared", trainer_class=with_questions(TRAINERS[task]), train_dataset=rows, **options)
        assert_same(padded, ours)
    with pytest.raises(ValueError, match="The train data has no columns that"):
        make_trainer(task, "shared", train_dataset=questions)


@pytest.mark.parametrize("task", ["grpo", "distillation"])
def test_a_forward_that_another_trainer_has_replaced_is_named(data, task):
    trainer = make_trainer(task, "shared", **arguments(task, False), train_dataset=data)
    add_fused_lm_head(trainer.model)  # as TRL's trainers do when they are made
    with pytest.raises(RuntimeError, match="The forward of LlamaForCausalLM was replaced after this Pad"):
        trainer.train()


@pytest.mark.parametrize("task", ["grpo", "rloo", "distillation"])
def test_rows_of_a_prompt_are_brought_together_without_changing_the_loss(data, task):
    options = {"gradient_accumulation_steps": 4, "train_dataset": data}
    if task == "distillation":  # which generates one completion of each
        options["train_dataset"] = data.select([i for i in range(8) for _ in range(2)])
    else:
        options |= {"steps_per_generation": 8, "num_iterations": 2}
    scattered = run(task, "shared", **options)
    together = run(task, "shared", arrange_micro_batches="prefix", **options)
    assert_same(scattered, together, ignored=MOVED)
    counts, fewer = scattered.trainer.total_counts(), together.trainer.total_counts()
    assert (fewer.real, fewer.padded) == (counts.real, counts.padded)
    assert fewer.computed < counts.computed < counts.real


def test_rows_are_not_brought_together_beside_a_loss_or_hooks_of_ones_own(data):
    class Mine(PaddingFreeGRPOTrainer):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs) ** 2

    options = {**plain(), "train_dataset": data, "arrange_micro_batches": "prefix"}
    with pytest.raises(ValueError, match="with `Mine.compute_loss` the loss of an example"):
        make_trainer("grpo", "shared", trainer_class=Mine, **options)
    trainer = make_trainer("grpo", "shared", **options)
    trainer.model.lm_head.weight.register_hook(torch.sign)
    with pytest.raises(ValueError, match="with hooks on gradients the loss of an example"):
        trainer.train()


@pytest.mark.skipif(is_older("5.20"), reason="a mixture with a router loss cannot generate: padded neither")
def test_a_router_loss_follows_padded_trl_and_is_not_arranged(data):
    def make():
        return {**plain(), "model": make_model("mixtral", **ROUTED)}

    compared = compare("grpo", make, data, "flat", steps=2)
    assert any("aux_loss" in entry for entry in compared.ours.log_history)
    with pytest.raises(ValueError, match="with `router_aux_loss_coef=0.3` the loss"):
        run("grpo", "shared", **make(), train_dataset=data, arrange_micro_batches="prefix")


def test_generation_is_trls_and_every_pass_is_flat(data, flat_passes):
    seen = set()

    def make():
        arguments = with_lora()
        model, generate = arguments["model"], arguments["model"].generate

        def watched(*args, **kwargs):
            seen.add(model.config._attn_implementation)
            before = flat_passes.call_count
            try:
                return generate(*args, **kwargs)
            finally:
                assert flat_passes.call_count == before

        model.generate = watched
        return arguments

    trained = run("grpo", "shared", **make(), train_dataset=data, beta=0.1, num_iterations=2, steps=2)
    assert {(type(name), name) for name in seen} == {(str, "sdpa")}
    assert isinstance(trained.trainer.model.config._attn_implementation, StandIn)
    # One old pass, one of the reference, and two of the policy
    assert flat_passes.call_count == 1 + 1 + 2


def test_positions_are_counted_from_the_prompt_where_padded_trl_counts_padding(data):
    """TRL gives no `position_ids`: with learned positions its rows differ by the padding on their left."""
    model = make_model("gpt2")
    trainer = run("grpo", "shared", **{**plain(), "model": model}, train_dataset=data, steps=1).trainer
    assert_padding_on_the_left_changes_nothing(trainer)


@pytest.mark.drawn(1)
@FOLLOWING
@pytest.mark.parametrize("task", ["grpo", "rloo"])
def test_frequencies_follow_the_width_to_which_trl_pads(task, kind, monkeypatch):
    """A row of a short prompt is alone in its micro-batch, and padded to the width of a long one."""
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": " ".join(WORDS[:n])}]} for n in (1, 25)])

    def make():
        return {**with_lora(), "model": make_model(**following_rotary(24, kind))}

    one, two = ({"per_device_train_batch_size": n, "gradient_accumulation_steps": 8 // n} for n in (1, 2))
    compare(task, make, rows, **one)
    compare(task, make, rows, "shared", **two, pad_to_multiple_of=16)
    padded = run(task, "padded", **make(), train_dataset=rows, **two)
    arranged = run(task, "shared", **make(), train_dataset=rows, **two, arrange_micro_batches="prefix")
    assert_same(padded, arranged, ignored=MOVED)
    monkeypatch.setattr(Runtime, "reach_of", lambda *_: None)
    with pytest.raises(AssertionError, match="off from padded TRL"):
        compare(task, make, rows, "flat", **one)


def test_rows_that_are_no_rows_are_refused(data):
    trainer = make_trainer("grpo", "shared", **plain(), train_dataset=data)
    ids = torch.tensor([[1, 2, 3, 4]])
    for mask, message in (([1, 0, 1, 1], "of `attention_mask` has padding between"), ([0, 0, 1, 1], "and no prompt")):
        with pytest.raises(ValueError, match=message):
            trainer._get_per_token_logps_and_entropies(trainer.model, ids, torch.tensor([mask]), 2)


def test_models_that_are_placed_late_are_proven_before_their_first_pass(data, model_dir, monkeypatch):
    """The first step proves policy and reference: what one carries must not reach the check of the other."""
    from trl_paddingfree.core.trainers import proving

    def make():
        return {"model": model_dir, "reward_funcs": score}

    checks, prove = [], proving.prove
    monkeypatch.setattr(proving.StartUpCheck, "can_call", lambda self, model: False)
    monkeypatch.setattr(
        proving, "prove", lambda model, *args, **kw: checks.append(prove(model, *args, **kw)) or checks[-1]
    )
    compared = compare("grpo", make, data, "shared", beta=0.1)
    assert not compared.ours.trainer.runtime.check.unproven
    assert len(checks) == 2
    # A model compared with itself would not differ at all
    assert all(result.error > 0 for result, _ in checks)


class GoesAroundTheHead(PaddingFreeGRPOTrainer):
    """Passes of one's own that ask the model for logits."""

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, **kwargs):
        logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, -logits_to_keep - 1 : -1]
        logps = logits.log_softmax(-1).gather(-1, input_ids[:, -logits_to_keep:, None]).squeeze(-1)
        return logps, logps.detach(), None


@WITHIN
def test_a_training_step_that_computes_no_flat_batch_is_an_error(budget):
    refused_if_it_computes_no_flat_batch(GoesAroundTheHead, "grpo", **budget)


def test_passes_that_go_around_the_head_may_pad():
    assert train(GoesAroundTheHead, "grpo", padding_free=False).method == "TRL, with padding"


@pytest.mark.parametrize("task", ["grpo", "rloo"])
def test_rewards_that_are_no_numbers_are_named_with_their_function(task):
    def praise(completions, **kwargs):
        return ["good"] * len(completions)

    def forgets(completions, **kwargs):
        praise(completions)

    def takes_little(completions):
        return [1.0] * len(completions)

    for function, said in (
        (takes_little, "The reward function 'takes_little' does not take what TRL passes .*: write it as `def reward"),
        (praise, "The reward function 'praise' returned 'good' as reward 0: return a number for each completion"),
        (forgets, "The reward function 'forgets' returned None: return a list of numbers"),
    ):
        with pytest.raises(ValueError, match=said):
            build(task, reward_funcs=function).train()
    trainer = build(task, reward_funcs=lambda completions, **kwargs: (torch.tensor(1.0) for _ in completions), steps=1)
    functions = trainer.reward_funcs
    trainer.train()
    assert trainer.reward_funcs is functions


def length(text):
    return float(len(text))


@wraps(length)
def adapted(completions, **kwargs):
    return [length(text) for text in completions]


class AsynchronousJudge:
    async def __call__(self, completions, scale=1.0, **kwargs):
        return [scale * length(text) for text in completions]


@pytest.mark.parametrize("function", [adapted, partial(AsynchronousJudge(), scale=2.0)], ids=["wraps", "asynchronous"])
def test_rewards_with_another_signature_or_asynchronous_ones_train_as_in_trl(function):
    assert_same(*(run("grpo", layout, reward_funcs=function, steps=1) for layout in ("padded", "shared")))


@pytest.mark.parametrize("is_decorated", [False, True])
def test_an_error_of_a_reward_function_stays_its_own(is_decorated):
    def breaks(completions, **kwargs):
        raise TypeError("of the user's own")

    if is_decorated:  # by one that takes what the function does not
        breaks = wraps(lambda text: None)(breaks)
    with pytest.raises(TypeError, match="of the user's own"):
        build("grpo", reward_funcs=breaks).train()


def test_distillation_without_a_teacher_is_refused():
    with pytest.raises(ValueError, match="`teacher_model` is missing"):
        build("distillation", teacher_model=None)
