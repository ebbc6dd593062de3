"""Calls, heads and adapters for which flat answers would differ: computed as before, or refused by name."""

import copy
from concurrent.futures import ThreadPoolExecutor

import peft
import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import T5Config, T5ForConditionalGeneration, Trainer, TrainingArguments

from tests.anywhere.test_calls import (
    TOLERANCE,
    assert_is_flat,
    assert_same_gradients,
    assert_same_logits,
    assert_same_loss,
    both,
    counts_of,
    rows,
    show_what_is_read,
    unlabelled,
)
from tests.helpers.architectures import Valued, with_values
from tests.helpers.tiny import lora, make_model
from trl_paddingfree import FlatModel, UnprovenModelError, check_packed, padding_free
from trl_paddingfree.anywhere.calls import PaddedCalls


def moved(**options):
    """A model whose embedding of padding is not zero, as in models that were trained, and a copy that computes flat."""
    model = make_model(**options)
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = torch.randn(32, generator=torch.Generator().manual_seed(1))
    return model, padding_free(copy.deepcopy(model))


def on_the_left():
    """Two models that are alike, and rows with padding on the left."""
    return *moved(), unlabelled("left")


def said_of(model):
    return " ".join(FlatModel.of(model).padded.said)


# --- padding on the left, and losses that read logits -----------------------------------------------------------------


def all_scored(logits, ids, mask):
    """A loss that scores all tokens of rows, those that padding predicts among them."""
    scored = mask[:, 1:].bool()
    return torch.nn.functional.cross_entropy(logits[:, :-1][scored], ids[:, 1:][scored])


@pytest.mark.parametrize("of", ["logits", "hidden states"])
def test_a_loss_that_scores_what_padding_predicts_is_that_of_padded_rows(of, caplog):
    model, ours, given = on_the_left()
    for _ in range(2):
        losses = []
        for each in (model, ours):
            logits = each(**given).logits if of == "logits" else each.lm_head(each.model(**given).last_hidden_state)
            losses.append(all_scored(logits, *given.values()))
            each.zero_grad()
            losses[-1].backward()
        assert torch.equal(*losses)
        assert_same_gradients(model, ours)
    assert counts_of(ours).computed == 0
    assert "padding on the left" in caplog.text


def test_a_loss_that_reads_completions_alone_is_flat_from_its_second_step_on():
    model, ours, given = on_the_left()
    ids, mask = given.values()
    for step in range(3):
        for each in (model, ours):
            each.zero_grad()
            scored = mask[:, 1:] * mask[:, :-1]
            all_scored(each(**given).logits, ids, torch.nn.functional.pad(scored, (1, 0))).backward()
        assert_same_gradients(model, ours)
        assert counts_of(ours).padded == step * ids.numel()
    with pytest.raises(ValueError, match="The loss reads what the model answers at padding"):
        all_scored(ours(**given).logits, ids, mask).backward()
    with torch.no_grad():  # no gradient would tell what is read
        expected = model(**given, use_cache=False).logits
        assert torch.equal(ours(**given, use_cache=False).logits, expected)


def test_logits_that_are_kept_say_what_can_be_scored():
    _, ours, given = on_the_left()
    shortest = int(given["attention_mask"].sum(1).min())
    ours(**given, logits_to_keep=shortest)
    assert_is_flat(ours)
    assert not said_of(ours)
    ours(**given, logits_to_keep=shortest + 1)
    assert "its loss may score the first token" in said_of(ours)
    ours(**given, logits_to_keep=torch.tensor([0, 3]))
    assert "`logits_to_keep` picks columns" in said_of(ours)


def test_a_loss_beside_labels_that_scores_what_padding_predicts_is_an_error():
    _, ours, given = on_the_left()
    output = ours(**rows("left"))
    output.loss.backward(retain_graph=True)
    with pytest.raises(ValueError, match="The loss reads what the model answers at padding"):
        all_scored(output.logits, *given.values()).backward()
    assert FlatModel.of(ours).padded.reads_padding is None  # labels say nothing of losses that read logits


def own_loss(output, labels, **kwargs):
    """A loss that never passes its labels to the model, and scores padding if its labels are not -100."""
    return torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.parametrize("make", [make_model, lambda: with_values(make_model())], ids=["logits", "values"])
def test_a_loss_of_its_own_that_scores_padding_on_the_right_is_an_error(make):
    model = make()
    ours, given = padding_free(copy.deepcopy(model)), unlabelled()
    known = given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)
    for labels in (known, known.masked_fill(known == -100, 0)):  # a collator that clones tokens
        for each in (model, ours):
            each.zero_grad()
        expected = own_loss(model(**given), labels)
        expected.backward()
        if labels is known:
            found = own_loss(ours(**given), labels)
            found.backward()
            assert torch.allclose(found, expected)
            assert_same_gradients(model, ours)
            assert_is_flat(ours)
        else:
            with pytest.raises(ValueError, match="The loss reads what the model answers at padding"):
                own_loss(ours(**given), labels).backward()


@pytest.mark.parametrize("side", ["left", "right"])
def test_values_that_are_read_at_padding_are_seen_as_logits_are(side):
    ours, given = padding_free(with_values(moved()[0])), unlabelled(side)
    show_what_is_read(ours, given)
    with pytest.raises(ValueError, match="The loss reads what the model answers at padding"):
        (ours(**given)["values"] - 1).square().mean().backward()
    (ours(**given)["values"] - 1)[given["attention_mask"].bool()].square().mean().backward()
    assert_is_flat(ours)


def test_values_of_the_first_token_after_padding_are_those_of_padded_rows():
    model = with_values(moved()[0])
    ours, given = padding_free(copy.deepcopy(model)), unlabelled("left")
    mask = given["attention_mask"]
    for _ in range(2):
        for each in (model, ours):
            each.zero_grad()
            output = each(**given)  # of logits, the loss reads tokens alone
            loss = output.logits[mask.bool()].mean() + (output["values"][:, :-1] * mask[:, 1:]).square().mean()
            loss.backward()
        assert_same_gradients(model, ours)
    assert counts_of(ours).computed == 0


def test_a_loss_that_is_not_a_number_does_not_say_what_is_read():
    _, ours = moved()
    given = unlabelled()
    logits = ours(**given).logits
    (logits.square().mean(-1) * given["attention_mask"] * float("nan")).sum().backward()


@pytest.mark.parametrize("kind", ["smoothed", "loss function"])
def test_the_trainer_of_transformers_says_that_its_loss_scores_padding(kind, tmp_path):
    given = rows("right")
    examples = [{name: x[i] for name, x in given.items()} | {"labels": given["input_ids"][i]} for i in range(5)]
    args = TrainingArguments(
        str(tmp_path), use_cpu=True, report_to="none", max_steps=2, label_smoothing_factor=0.1 * (kind == "smoothed")
    )
    own = {} if kind == "smoothed" else {"compute_loss_func": own_loss}
    with pytest.raises(ValueError, match="Set labels of padding to -100"):
        Trainer(padding_free(make_model()), args, train_dataset=examples, **own).train()


def test_padding_on_the_left_is_left_to_models_that_compute_it_into_their_states():
    model, ours = both("recurrent_gemma")
    given = rows("left")
    assert torch.equal(*(each(**given).logits for each in (model, ours)))
    assert "padding on the left" in said_of(ours)


def test_windows_that_were_changed_for_masks_alone_are_those_of_masks():
    model = make_model("gemma3_text", sliding_window=512)
    model.config.sliding_window = 1024
    assert_same_logits(model, padding_free(copy.deepcopy(model)), unlabelled(width=700))


@pytest.mark.parametrize("made", [lambda output: output.logits, lambda output: Valued(**output, values=output.logits)])
def test_a_head_may_answer_with_its_logits_alone_or_with_more(made):
    model = make_model()

    class Head(type(model)):
        def forward(self, **kwargs):
            return made(super().forward(**kwargs))

    model.__class__ = Head
    # The check reads losses, too
    ours = padding_free(copy.deepcopy(model), check=False, prefix_sharing=False)
    for given in (rows("right"), unlabelled(), rows("left")):
        expected, found = (each(**given) for each in (model, ours))
        if isinstance(expected, Valued):
            expected, found = expected["values"], found["values"]
        real = given["attention_mask"].bool()
        assert torch.allclose(found[real], expected[real], atol=TOLERANCE)
        assert counts_of(ours).padded > counts_of(ours).computed == counts_of(ours).real > counts_of(ours).distinct


@pytest.mark.parametrize("mistake", ["mean of a row", "other rows", "flat tokens"])
def test_what_a_model_answers_beside_logits_is_compared(mistake):
    """Values that no loss of the check reads, from hidden states that are zero at padding."""
    model = with_values(make_model())
    head, seen = model.value.forward, []
    model.model.norm.register_forward_hook(lambda module, args, output: seen.append(output))
    model.value.forward = {
        "mean of a row": lambda hidden: head(hidden - hidden.mean(1, keepdim=True)),
        "other rows": lambda hidden: head(hidden) + hidden.square().mean(),
        "flat tokens": lambda hidden: head(seen[-1]),
    }[mistake]
    with pytest.raises(UnprovenModelError, match="answers with `values`.*Leave the call out"):
        padding_free(model)
    assert FlatModel.of(model) is None or FlatModel.of(model).padded is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_of_each_token_are_proven(dtype, caplog):
    model = with_values(make_model()).to(dtype)
    ours, given = padding_free(copy.deepcopy(model)), rows("right")
    assert "not compared" not in caplog.text
    real = given["attention_mask"].bool()
    values = [each(**given)["values"][real] for each in (model, ours)]
    assert (values[0] - values[1]).norm() <= (TOLERANCE if dtype == torch.float32 else 0.05) * values[0].norm()
    assert_is_flat(ours)


def test_answers_that_cannot_be_compared_are_named(caplog):
    model = make_model()

    class Head(type(model)):
        def forward(self, **kwargs):
            output = super().forward(**kwargs)
            return Valued(**output, values={"by": "hand", "scale": 2.0, "nothing": None})

    model.__class__ = Head
    padding_free(model)
    assert "Head on cpu in float32, exact as far as it was compared on" in caplog.text
    assert "`values.by` of the answers was not compared" in caplog.text


def test_padding_on_the_left_is_tried_with_shared_prefixes(monkeypatch):
    tried = []
    flatten = PaddedCalls._flat_batch_of

    def watched(calls, inputs):
        found = flatten(calls, inputs)
        tried.append((bool(inputs["attention_mask"][:, 0].all()), found[0].layout.segments.is_shared))
        return found

    monkeypatch.setattr(PaddedCalls, "_flat_batch_of", watched)
    padding_free(make_model())
    assert (False, True) in tried


def test_a_loss_of_zero_does_not_say_what_is_read():
    model, ours, given = on_the_left()
    (ours(**given).logits * 0).sum().backward()
    assert torch.equal(*(each(**given).logits for each in (model, ours)))


# --- masks, and heads that hand on others -----------------------------------------------------------------------------


@pytest.mark.parametrize("values", [(1.0, 0.0), (0.5, 0.0), (1.0, 0.5), (0.0, float("-inf"))])
def test_masks_in_floating_point_are_read_as_transformers_reads_them(values):
    (model, ours), given = moved(), unlabelled()
    real = given["attention_mask"].bool()
    given["attention_mask"] = torch.where(real, *values)
    expected, found = (each(**given).logits[real] for each in (model, ours))
    assert torch.allclose(found, expected, atol=TOLERANCE)
    assert bool(counts_of(ours).computed) == (values == (1.0, 0.0))


def head_of_its_own(changed):
    """A model whose head hands on another mask or other positions if it is given labels."""
    model = make_model()

    class Head(type(model)):
        def forward(self, input_ids=None, attention_mask=None, position_ids=None, labels=None, **kwargs):
            if labels is not None and changed == "mask":
                attention_mask = attention_mask * (torch.arange(input_ids.size(1)) >= 3)
            elif labels is not None:
                steps = 1 if changed == "shift" else 2
                position_ids = 3 + steps * torch.arange(input_ids.size(1)).expand_as(input_ids)
            given = {"attention_mask": attention_mask, "position_ids": position_ids, "labels": labels}
            return super().forward(input_ids=input_ids, **given, **kwargs)

    model.__class__ = Head
    return model


@pytest.mark.parametrize("changed", ["mask", "shift", "stretch"])
def test_what_a_head_hands_on_is_what_is_computed(changed):
    model = head_of_its_own(changed)
    assert_same_loss(model, padding_free(copy.deepcopy(model)), rows("right"))


def test_a_loss_that_counts_padding_is_that_of_padded_rows():
    model = make_model()

    class Head(type(model)):
        def forward(self, input_ids=None, labels=None, **kwargs):
            output = super().forward(input_ids=input_ids, labels=labels, **kwargs)
            if labels is not None:
                output.loss = output.loss + output.logits.square().mean()
            return output

    model.__class__ = Head
    ours = padding_free(padding_free(copy.deepcopy(model)))  # again: nothing is found with what was found before
    given = rows("right")
    assert torch.equal(ours(**given).loss, model(**given).loss)
    assert "given `labels`" in said_of(ours)
    ours(**unlabelled())
    assert_is_flat(ours)


# --- adapters ---------------------------------------------------------------------------------------------------------


TARGETS = {"target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}
# Adapters that read more than each token by itself, and what their refusal names. Not all versions of PEFT have them
ADAPTERS = {
    "aLoRA": (lambda: LoraConfig(**TARGETS, alora_invocation_tokens=[5]), r"alora_invocation_tokens=\[5\]"),
    "Velora": (
        lambda: LoraConfig(**TARGETS, velora_config=peft.VeloraConfig(num_groups=4)),
        "init_type='batch_average",
    ),
    "Lily": (lambda: peft.LilyConfig(**TARGETS), "^LilyConfig"),
    "Poly": (lambda: peft.PolyConfig(**TARGETS), "^PolyConfig"),
    "Shadow": (lambda: peft.ShadowConfig(task_type="CAUSAL_LM"), "^ShadowConfig runs a second network"),
}


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("name", [name for name in ADAPTERS if name == "aLoRA" or hasattr(peft, f"{name}Config")])
def test_adapters_that_read_whole_batches_are_refused_by_name(name, order):
    make, named = ADAPTERS[name]
    if order == "before":
        adapted = get_peft_model(make_model(), make())
        with pytest.raises(ValueError, match=named):
            padding_free(adapted)
    else:
        adapted = get_peft_model(padding_free(make_model()), make())
        extra = {"task_ids": torch.zeros(5, dtype=torch.long)} if name == "Poly" else {}
        with pytest.raises(ValueError, match=named):
            adapted(**rows("right"), **extra)


def test_averages_of_random_projections_are_not_refused():
    if (velora := getattr(peft, "VeloraConfig", None)) is None:
        pytest.skip("PEFT has no VeLoRA")
    config = lora(velora_config=velora(num_groups=4, init_type="random"), task_type="CAUSAL_LM")
    adapted = get_peft_model(padding_free(make_model()), config)
    adapted(**rows("right")).loss.backward()
    assert_is_flat(adapted)


def test_prompt_learning_is_refused_by_name_and_computes_as_before_if_it_is_put_on_afterwards():
    config = PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="PromptTuningConfig"):
        padding_free(get_peft_model(make_model(), config))
    adapted = get_peft_model(padding_free(make_model()), config)
    adapted(**rows("right")).loss.backward()
    assert "embeddings" in said_of(adapted)


# --- hooks, attention, threads ----------------------------------------------------------------------------------------


def test_errors_of_what_acts_on_rows_name_a_way_out():
    model, ours = moved()
    given = rows("right")
    steer = torch.randn(5, 1, 32)
    for each in (model, ours):
        each.model.layers[0].register_forward_hook(lambda module, args, output: output + steer.expand(-1, 20, -1))
    with pytest.raises(RuntimeError) as error:
        ours(**given)
    assert "aside()" in "".join(error.value.__notes__)
    with FlatModel.of(ours).padded.aside():
        assert torch.equal(ours(**given).logits, model(**given).logits)


def test_another_attention_is_refused_until_it_is_proven():
    model, ours = moved()
    given = rows("right")
    for each in (model, ours):
        each.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="'eager' after `padding_free`.*Call `padding_free` again"):
        ours(**given)
    padding_free(ours)
    assert torch.allclose(ours(**given).loss, model(**given).loss)
    assert_is_flat(ours)


def test_calls_from_several_threads_are_those_of_one():
    model, ours = moved()
    calls = [rows("right", draw) for draw in range(4)]
    for given in calls[::2]:
        del given["labels"]

    def run(given):
        for _ in range(8):
            assert_same_logits(model, ours, given)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(run, calls))  # raises what they raise
    assert not FlatModel.of(ours).padded.is_off
    assert counts_of(ours).padded == 4 * 8 * calls[0]["input_ids"].numel()


# --- what is given in place of a model --------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [padding_free, check_packed])
def test_names_and_models_of_other_kinds_are_refused_in_one_line(function):
    with pytest.raises(TypeError, match=rf"`model='Qwen/Qwen3-0.6B'`: `{function.__name__}` takes .*from_pretrained"):
        function("Qwen/Qwen3-0.6B")
    with pytest.raises(TypeError, match="takes a model of transformers, and there is none in a Linear"):
        function(torch.nn.Linear(2, 2))
    config = T5Config(vocab_size=60, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4, decoder_start_token_id=0)
    with pytest.raises(ValueError, match="T5ForConditionalGeneration has an encoder and a decoder, and .*decoder-only"):
        function(T5ForConditionalGeneration(config))


def test_wrappers_and_shared_backbones_are_refused_by_what_is_missing():
    wrapper, other = torch.nn.Module(), make_model()
    wrapper.model = make_model()
    wrapper.forward = lambda input_ids, attention_mask: None
    with pytest.raises(TypeError) as error:
        padding_free(wrapper)
    assert "`use_cache`. If this is a wrapper" in error.value.__notes__[0]
    wrapper.forward = lambda **kwargs: wrapper.model(**kwargs).logits
    with pytest.raises(ValueError, match=r"Module answers with `Tensor`.*with the model in it"):
        padding_free(wrapper)
    other.model = padding_free(wrapper.model).model
    with pytest.raises(ValueError, match="LlamaForCausalLM shares its LlamaModel with a LlamaForCausalLM"):
        padding_free(other)
    wrapper(**unlabelled())
    assert_is_flat(wrapper)


def test_a_call_that_returns_nothing_is_refused():
    with pytest.raises(TypeError, match="returned None.*logits of each row"):
        check_packed(make_model(), lambda rows: None)
