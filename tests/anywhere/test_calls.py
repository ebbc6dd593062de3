"""Calls of a model of `padding_free`, beside the same calls as before: which are flat, and what they answer."""

import copy
import io
import sys

import numpy as np
import pytest
import torch
from peft import get_peft_model
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    BertForTokenClassification,
)

from tests.helpers.architectures import tiny_model
from tests.helpers.flat_and_padded import gradients_of
from tests.helpers.float64 import float64_throughout, in_float64
from tests.helpers.launching import finished
from tests.helpers.tiny import FOLLOWING, SEED, following_rotary, lora, make_model, reward_model
from trl_paddingfree import FlatModel, PaddingFreeDPOTrainer, UnprovenModelError, padding_free
from trl_paddingfree.core.flat.counts import BatchCounts

# Of models in float32: logits of about 10 after two layers, and gradients relative to the largest of their tensor
TOLERANCE = 1e-4
# Attention, windows, absolute positions (by columns, by the mask), experts, layers with a state, a head of its own
MODELS = ("llama", "mistral", "gemma3_text", "gpt2", "opt", "qwen3_moe", "mixtral", "qwen3_next", "lfm2", "falcon_h1")
MODELS += ("modernbert-decoder",)
NOTHING = BatchCounts()


def rows(side, draw=0, width=20):
    """Padded rows of any length, some of which start alike, and labels, but where padding would predict them."""
    rng = np.random.default_rng(SEED + draw)
    prompt = rng.integers(2, 60, 6)
    ids, mask = torch.zeros(5, width, dtype=torch.long), torch.zeros(5, width, dtype=torch.long)
    for i in range(5):
        row = rng.integers(2, 60, rng.integers(2, width + 1) if i else width)
        if i % 2 == 0:
            row[: len(prompt)] = prompt[: len(row)]
        place = slice(len(row)) if side == "right" else slice(width - len(row), width)
        ids[i, place], mask[i, place] = torch.from_numpy(row), 1
    known = mask.bool() & torch.nn.functional.pad(mask, (1, -1)).bool()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(~known, -100)}


def unlabelled(side="right", **options):
    """The same without labels, of which a call answers with logits alone."""
    return {key: x for key, x in rows(side, **options).items() if key != "labels"}


def both(model_type="llama", use_cache=False, **options):
    """A tiny model, and a copy of which padded calls are flat."""
    model = in_float64(tiny_model(model_type, use_cache=use_cache, **options))
    return model, padding_free(copy.deepcopy(model))


def counts_of(model):
    return FlatModel.of(model).counts


def show_what_is_read(model, given):
    """A backward pass of a loss that does not score the first tokens of rows, which padding on the left predicts."""
    model(**given).logits[given["attention_mask"].bool()].mean().backward()
    model.zero_grad()
    FlatModel.of(model).padded.said.clear()


def assert_is_flat(model):
    assert 0 < counts_of(model).computed < counts_of(model).padded


def assert_same_logits(model, ours, given):
    """Of all tokens but padding."""
    real = given["attention_mask"].bool()
    expected, logits = model(**given).logits, ours(**given).logits
    assert (expected - logits)[real].abs().max() <= TOLERANCE * expected.abs().max()


def assert_same_loss(model, ours, given):
    """And the same gradients."""
    losses = [each(**given).loss for each in (model, ours)]
    assert torch.allclose(*losses)
    for each, loss in zip((model, ours), losses, strict=True):
        each.zero_grad()
        loss.backward()
    assert_same_gradients(model, ours)


def assert_same_gradients(model, ours):
    expected, found = map(gradients_of, (model, ours))
    largest = max(x.abs().max() for x in expected.values())
    for name, x in expected.items():
        assert (x - found[name]).abs().max() <= TOLERANCE * max(x.abs().max(), 1e-2 * largest), name


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", MODELS)
@float64_throughout()
def test_rows_answer_as_before(name, side):
    model, ours = both(name)
    given, real = unlabelled(side), rows(side)["attention_mask"].bool()
    if side == "left":
        show_what_is_read(ours, given)

    assert_same_logits(model, ours, given)
    counts = counts_of(ours)
    assert 0 < counts.computed <= counts.real < counts.padded
    if side == "right" or name == "opt":  # else rows share tokens in the same columns only
        assert counts.computed < counts.real
    assert ours(**given).logits[~real].abs().max() == 0

    assert_same_loss(model, ours, rows(side))  # the head computes rows
    for each in (model, ours):  # and flat tokens
        each.zero_grad()
        (each(**given).logits[real] ** 2).mean().backward()
    assert_same_gradients(model, ours)


def test_the_head_computes_flat_tokens_where_only_logits_are_asked_for():
    _, model = both()
    seen = []
    model.lm_head.register_forward_hook(lambda module, args, output: seen.append(args[0].shape[:2]))
    model(**unlabelled())
    model(**rows("right"))
    model(**unlabelled(), logits_to_keep=3)
    assert seen == [(1, counts_of(model).computed // 3), (5, 20), (5, 3)]


def test_rows_without_a_mask_and_positions_that_are_given():
    model, ours = both()
    ids = rows("right")["input_ids"] + 2
    assert torch.allclose(model(input_ids=ids).logits, ours(input_ids=ids).logits, atol=TOLERANCE)
    given = unlabelled("left")
    show_what_is_read(ours, given)
    mask = given["attention_mask"]
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, -1)
    for places in (positions, torch.arange(7, 27)[None]):  # of each row, and of all
        assert_same_logits(model, ours, {**given, "position_ids": places})
    assert_is_flat(ours)
    assert not FlatModel.of(ours).padded.said


@FOLLOWING
def test_frequencies_that_follow_the_longest_row_follow_the_padding(kind):
    model = make_model(**following_rotary(24, kind))
    ours = padding_free(copy.deepcopy(model))
    given = unlabelled(width=30)
    given["attention_mask"][:, 22:] = 0  # all rows are shorter than the limit, and padded beyond it
    assert_same_logits(model, ours, given)
    assert_is_flat(ours)


def calls_of_other_kinds():
    """Calls that are no plain rows, with a word of what is said of them."""
    given = rows("right")
    labels, ids, mask = given.pop("labels"), given["input_ids"], given["attention_mask"]
    return {
        "cache": ({**given, "use_cache": True}, "cache"),
        "hidden states": ({**given, "output_hidden_states": True}, "`output_hidden_states`"),
        "attentions": ({**given, "output_attentions": True}, "`output_attentions`"),
        "4-D mask": ({**given, "attention_mask": torch.ones(5, 1, 20, 20).tril().bool()}, "one number for each token"),
        "packed": ({"input_ids": ids[:1], "position_ids": (torch.arange(20) % 9)[None]}, "restart or skip"),
        "documents": ({**given, "attention_mask": mask * 2}, "numbers other than 0 and 1"),
        "gaps": ({**given, "attention_mask": mask.index_fill(1, torch.tensor([3]), 0)}, "between the tokens"),
        "embeddings": ({"inputs_embeds": torch.ones(5, 20, 32), "attention_mask": mask}, "embeddings"),
        "one token": ({"input_ids": ids[:, :1]}, "one token"),
        "both ways": ({**given, "is_causal": False}, "is_causal"),
        "boundaries": ({**given, "cu_seq_lens_q": torch.tensor([0, 20])}, "`cu_seq_lens_q`"),
        # In the first column of padding alone: some heads do not shift labels
        "scored padding": ({**given, "labels": labels.masked_fill(mask.diff(prepend=mask[:, :1]) < 0, 7)}, "be scored"),
        "labels kept": ({**given, "labels": ids[:, -4:], "logits_to_keep": 4}, "`labels` is not one number"),
    }


@pytest.mark.parametrize("case", calls_of_other_kinds())
def test_calls_of_other_kinds_compute_as_before_and_say_so_once(case, caplog):
    model = make_model(attn_implementation="eager")
    ours = padding_free(copy.deepcopy(model))
    caplog.clear()
    given, said = calls_of_other_kinds()[case]
    for _ in range(2):
        assert torch.equal(model(**given).logits, ours(**given).logits)
    assert counts_of(ours) == NOTHING
    (message,) = (message for message in caplog.messages if "padding_free:" in message)
    assert said in message


def test_calls_that_make_a_cache_compute_as_before_but_in_training():
    _, ours = both(use_cache=True)
    for training, gradients in ((False, True), (True, False)):
        with torch.set_grad_enabled(gradients):
            assert ours.train(training)(**unlabelled()).past_key_values is not None
    assert counts_of(ours) == NOTHING
    ours(**unlabelled())
    assert_is_flat(ours)


def test_generation_is_as_before():
    model, ours = both(use_cache=True)
    given = unlabelled("left")
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(**given, **options), ours.generate(**given, **options))
    assert counts_of(ours) == NOTHING


def test_rows_of_types_are_left_out_where_the_model_knows_none():
    given = rows("right")
    given["token_type_ids"] = torch.zeros_like(given["input_ids"])
    for name, is_flat in (("llama", True), ("gpt2", False)):  # GPT-2 adds embeddings of them
        model, ours = both(name)
        assert torch.allclose(model(**given).loss, ours(**given).loss)
        assert bool(counts_of(ours).computed) == is_flat


def test_outputs_that_a_call_declines_are_left_out_whatever_the_configuration_says():
    model, ours = both()
    model.config.output_hidden_states = ours.config.output_hidden_states = True
    for inputs in (rows("right"), unlabelled()):
        expected, found = (each(**inputs, output_hidden_states=False) for each in (model, ours))
        assert found.keys() == expected.keys() - {"past_key_values", "cache"}
    assert_is_flat(ours)


@pytest.mark.parametrize("name", ["rwkv", "xlstm"])
def test_states_of_layers_are_no_answers(name):
    model, ours = both(name)
    assert_same_loss(model, ours, {name: x for name, x in rows("right").items() if name != "attention_mask"})


def test_answers_as_tuples():
    model, ours = both()
    for each, given in (("forward", rows("right")), ("model", unlabelled())):
        expected, answers = (getattr(m, each)(**given, return_dict=False, use_cache=False) for m in (model, ours))
        assert isinstance(answers, tuple)
        assert len(answers) == len(expected)
    real = given["attention_mask"].bool()
    assert torch.allclose(expected[0][real], answers[0][real], atol=TOLERANCE)


def test_copies_compute_their_own_weights():
    _, model = both()
    other = copy.deepcopy(model)
    given = rows("right")
    before = model(**given).loss
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    computed = counts_of(model)
    for inputs in (given, unlabelled()):
        assert other(**inputs).logits.abs().max() == 0
    assert counts_of(model) == computed, "copies count for themselves"
    assert counts_of(other).computed == 2 * computed.computed
    assert torch.equal(model(**given).loss, before)


@pytest.mark.slow
def test_models_that_are_saved_whole_are_loaded_in_other_processes(tmp_path):
    _, ours = both()
    given = rows("right")
    torch.save((ours, given), tmp_path / "whole.pt")
    load = "model, given = torch.load(sys.argv[1], weights_only=False)"
    code = f"import sys, torch; {load}; print(model(**given).loss.item())"
    found = finished([sys.executable, "-c", code, str(tmp_path / "whole.pt")], 300).stdout
    assert float(found) == pytest.approx(ours(**given).loss.item(), rel=TOLERANCE)


def test_models_are_saved_and_loaded(tmp_path):
    model, ours = both()
    ours.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    whole = io.BytesIO()
    torch.save(ours, whole)
    whole.seek(0)
    given = rows("right")
    for loaded in (again, torch.load(whole, weights_only=False)):
        assert torch.equal(loaded(**given).loss, model(**given).loss)
        assert ours.state_dict().keys() == loaded.state_dict().keys()
    # Forwards of instances are not saved, so that a loaded model computes padding, until `padding_free` is called again
    assert FlatModel.of(loaded) is None
    before, computed = counts_of(padding_free(loaded)), []
    loaded.get_input_embeddings().register_forward_hook(lambda _, args, out: computed.append(args[0].numel()))
    loaded(**given)
    loaded.base_model(input_ids=given["input_ids"], attention_mask=given["attention_mask"])
    assert computed == [(counts_of(loaded).computed - before.computed) // 2] * 2
    assert computed[0] < given["input_ids"].numel()


@pytest.mark.parametrize("order", ["before", "after"])
def test_lora_may_be_put_on_before_or_after(order):
    model = make_model()
    torch.manual_seed(3)
    padded = get_peft_model(copy.deepcopy(model), lora())
    torch.manual_seed(3)
    ours = (
        padding_free(get_peft_model(model, lora()))
        if order == "before"
        else get_peft_model(padding_free(model), lora())
    )
    assert_same_loss(padded, ours, rows("right"))
    assert_same_logits(padded, ours, unlabelled())
    assert_is_flat(ours)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss", "olmoe", "granitemoe", "jamba"])
def test_losses_of_routers_are_those_of_padded_rows(name):
    model, ours = both(name, output_router_logits=True)
    given = rows("right")
    expected, found = model(**given), ours(**given)
    assert expected.aux_loss is not None
    assert torch.allclose(found.aux_loss, expected.aux_loss, rtol=1e-5)
    assert torch.allclose(found.loss, expected.loss, rtol=1e-5)
    assert counts_of(ours).computed or "the loss of its routers counts padding, too" in FlatModel.of(ours).padded.said


def test_router_losses_that_count_padding_are_left_to_the_model(monkeypatch):
    model = tiny_model("mixtral", output_router_logits=True, use_cache=False)
    module = __import__(type(model).__module__, fromlist=["_"])
    loss = module.load_balancing_loss_func
    monkeypatch.setattr(
        module, "load_balancing_loss_func", lambda logits, experts, k, mask: loss(logits, experts, k, None)
    )
    ours = padding_free(copy.deepcopy(model))
    given = rows("right")
    assert torch.equal(model(**given).loss, ours(**given).loss)
    assert FlatModel.of(ours).padded.said == {"the loss of its routers counts padding, too"}
    assert ours(**given, output_router_logits=False).loss.isfinite()
    assert_is_flat(ours)


@pytest.mark.parametrize("side", ["left", "right"])
def test_heads_that_classify(side):
    given = rows(side)
    labels = given.pop("labels")
    config = make_model(num_labels=4, use_cache=False).config
    for head, targets in (
        (AutoModelForSequenceClassification, torch.arange(5) % 4),
        (AutoModelForTokenClassification, labels.remainder(4).masked_fill(labels < 0, -100)),
    ):
        torch.manual_seed(2)
        model = head.from_config(config).eval()  # the head of tokens has a dropout
        ours = padding_free(copy.deepcopy(model))
        assert_same_loss(model, ours, {**given, "labels": targets})
        assert_is_flat(ours)


@pytest.mark.parametrize("name", ["LlamaForSequenceClassification", "Judge"])  # a class of one's own
def test_a_head_that_would_read_padding_is_left_alone(name):
    model, given = reward_model(), unlabelled()
    model.__class__ = type(name, (type(model),), {})
    ours = padding_free(model)
    padded = {**given, "input_ids": given["input_ids"].masked_fill(given["attention_mask"] == 0, 3)}
    ours(**padded)
    (said,) = FlatModel.of(ours).padded.said
    assert "config.pad_token_id=0" in said
    ours.config.pad_token_id = None
    with pytest.raises(ValueError, match=r"set `model.config.pad_token_id`"):
        padding_free(ours)


def test_heads_of_tokens_need_no_padding_token_and_labels_as_wide_as_rows_are_no_labels_of_tokens():
    padding_free(AutoModelForTokenClassification.from_config(make_model(pad_token_id=None).config))
    given = unlabelled()
    several = padding_free(AutoModelForSequenceClassification.from_config(make_model(num_labels=20).config))
    several.config.problem_type = "multi_label_classification"
    several(**given, labels=torch.zeros(5, 20)).loss.backward()
    assert_is_flat(several)


def test_what_cannot_be_proved_is_refused_and_left_as_it_was():
    config = BertConfig(vocab_size=90, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
    model = BertForTokenClassification(config).eval()
    expected, given = copy.deepcopy(model), unlabelled()
    with pytest.raises(UnprovenModelError, match="Leave the call out to train it with padding"):
        padding_free(model)
    assert torch.equal(model(**given).logits, expected(**given).logits)
    assert FlatModel.of(model) is None or FlatModel.of(model).padded is None
    with pytest.raises(ValueError, match="answers with `start_logits`, `end_logits`"):
        padding_free(AutoModelForQuestionAnswering.from_config(make_model().config))
    with pytest.raises(ValueError, match="LlamaModel is a backbone"):
        padding_free(make_model().model)


def test_a_model_whose_forward_goes_round_its_backbone_is_refused():
    model = make_model()
    backbone = type(model.model).forward

    class Round(type(model)):
        def forward(self, input_ids=None, attention_mask=None, **kwargs):
            kwargs = {name: x for name, x in kwargs.items() if name not in ("labels", "fused_lm_head")}
            hidden = backbone(self.model, input_ids, attention_mask, **kwargs).last_hidden_state
            return type(self.given)(logits=self.lm_head(hidden))

    model.given = model(input_ids=torch.tensor([[1, 2]]))
    model.__class__ = Round
    with pytest.raises(UnprovenModelError, match="calls neither its `base_model` nor its decoder"):
        padding_free(model)


def test_a_trainer_of_this_package_takes_such_a_model():
    from tests.helpers.tiny import arguments, preference_data
    from tests.runs import assert_same, run

    data = preference_data(8, 2)
    padded = run("dpo", "padded", **arguments("dpo", False), train_dataset=data)
    given = arguments("dpo", False)
    model = padding_free(given.pop("model"))
    ours = run("dpo", "shared", **given, model=model, train_dataset=data)
    assert isinstance(ours.trainer, PaddingFreeDPOTrainer)
    assert_same(padded, ours)
