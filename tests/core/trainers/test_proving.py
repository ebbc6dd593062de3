"""The start-up check as trainers run it."""

import re
from functools import partial
from types import SimpleNamespace

import pytest
from accelerate import Accelerator, DistributedType
from transformers import TrainingArguments
from transformers.utils import logging

from tests.core.check.test_mutations import leak
from tests.helpers.architectures import tiny_model, with_head
from tests.helpers.folders import needs
from tests.helpers.reference_flash import reference_flash
from tests.helpers.tiny import arguments, lora
from tests.helpers.vision import on_vision_data
from tests.runs import make_trainer
from trl_paddingfree import PaddingFreeDPOTrainer
from trl_paddingfree.core.check import progress
from trl_paddingfree.core.check.prove import UnprovenModelError
from trl_paddingfree.core.model.routes import Route
from trl_paddingfree.core.trainers.configs import PaddingFreeOptions
from trl_paddingfree.core.trainers.proving import StartUpCheck


def start_up_check(models, **options):
    """The check of models that have TRL's head."""
    for model in models:
        with_head(model)
    args = TrainingArguments(use_cpu=True)  # before an accelerator, whose state it makes anew
    return StartUpCheck(Accelerator(cpu=True), PaddingFreeOptions(**options), args)


def prove_all(*models, **options):
    return start_up_check(models, **options).prove_all(models)


def test_sharing_turns_off_with_one_line_where_positions_are_all_a_model_reads(caplog):
    with reference_flash():
        prove_all(tiny_model("falcon", attn_implementation="flash_attention_2"), prefix_sharing=False)
        assert "trains without shared prefixes" not in caplog.text  # for which nobody asked
        route = prove_all(tiny_model("falcon", attn_implementation="flash_attention_2"))
    assert route == Route("positions", "flash_attention_2", prefix_sharing=False)
    assert caplog.text.count("trains without shared prefixes: 'flash_attention_2'") == 1
    assert "start-up check failed" not in caplog.text


def test_models_share_prefixes_together_or_not_at_all():
    policy, reference = (
        tiny_model("llama"),
        tiny_model("mpt", max_seq_len=4096),
    )  # whose ALiBi counts along the flat row
    assert prove_all(policy).prefix_sharing
    assert not prove_all(tiny_model("llama"), reference).prefix_sharing


def test_log_level_info_shows_the_figures_of_the_check(caplog):
    before = logging.get_verbosity()
    try:
        for level in ("warning", "info"):
            caplog.clear()
            make_trainer("sft", "ours", log_level=level)
            assert ("smallest detectable error" in caplog.text) == (level == "info")
    finally:
        logging.set_verbosity(before)


def with_infinite_gradients(model):
    def overflow(module, args, output):
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * float("inf"))

    model.get_decoder().norm.register_forward_hook(overflow)


UNREACHED = {"window_size": 300, "max_position_embeddings": 4096}
# The kind of model, its options, what is done to it, and what was not compared
NOT_COMPARED = {
    "draws": ("phimoe", {}, None, "gradients were not compared, because it draws at random in training"),
    "infinite": ("llama", {}, with_infinite_gradients, "because those of a row alone are not finite"),
    "engine": ("llama", {}, None, "because FSDP1 computes whole backward passes only"),
    "window": ("gpt_neo", UNREACHED, None, "`window_size=300` is longer than the rows that the check tried"),
}


def proven(model, caplog, beside=()):
    """The line in the log of a check in which `model` is trained, and others are not."""
    models = [model, *beside]
    start_up_check(models).install(models)
    return next(message for message in caplog.messages if message.startswith("Padding-free"))


def test_a_model_whose_gradients_were_compared_is_called_exact(caplog):
    line = proven(tiny_model("llama"), caplog, beside=[tiny_model("llama")])
    sizes = r"exact on up to \d+ rows of up to 104 tokens, [\d,]+ in all"
    assert re.fullmatch(rf"Padding-free, segment: .*, shared prefixes: {sizes} \(checked in .* s\)\.", line)


@pytest.mark.parametrize("case", NOT_COMPARED)
def test_what_was_not_compared_stands_in_the_log_with_the_reason(case, caplog, monkeypatch):
    model_type, options, spoil, reason = NOT_COMPARED[case]
    model = tiny_model(model_type, **options)
    if spoil is not None:
        spoil(model)
    if case == "engine":
        monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.FSDP)
        monkeypatch.setattr(Accelerator, "is_fsdp2", False)
    line = proven(model, caplog)
    assert reason in line
    assert re.search("exact on up to .* in all, as far as it was compared: ", line)


def test_slices_of_a_model_that_draws_at_random_are_not_compared_either(caplog):
    given = arguments("dpo", False, tiny_model("phimoe"), make=lambda seed: tiny_model("phimoe", seed=seed))
    budget = {"max_tokens_per_micro_batch": 20, "router_aux_loss_coef": 0.0}
    make_trainer("dpo", "ours", **given, **budget)
    said = r"Slices within the budget: exact, as far as it was compared \(gradients were not compared, because"
    assert re.search(said, caplog.text)


@needs("images")
def test_that_gradients_were_compared_without_images_stands_in_the_log(caplog):
    make_trainer("dpo", "ours", **on_vision_data("dpo", "gemma3"))
    (line,) = (message for message in caplog.messages if message.startswith("Padding-free"))
    assert "gradients were compared on text, not with images" in line


@pytest.mark.trl_1
def test_liger_kernels_are_there_when_the_model_is_proven(monkeypatch):
    """transformers puts them on when training starts: a model that is wrong with them would train unseen."""

    def mix_rows(model, config):
        def mix(module, args, output):
            return output + output.roll(1, 1) if len(output) == 1 else output

        model.get_base_model().model.norm.register_forward_hook(mix)

    monkeypatch.setattr("transformers.integrations.liger.apply_liger_kernel", mix_rows)
    make_trainer("dpo", "ours")
    with pytest.raises(UnprovenModelError):
        make_trainer("dpo", "ours", use_liger_kernel=True)


def test_a_bar_shows_what_the_check_does_unless_bars_are_off(capsys, monkeypatch):
    monkeypatch.setattr(progress, "tqdm", partial(progress.tqdm, disable=False))  # the variable is read on import
    make_trainer("dpo", "ours", disable_tqdm=False, max_tokens_per_micro_batch=60)
    said = capsys.readouterr().err
    assert "Checking LlamaForCausalLM: padding-free against single rows" in said
    assert "4/4" in said
    assert "gradients of long flat rows" in said
    assert "Checking LlamaForCausalLM: slices within the budget" in said
    make_trainer("dpo", "ours", disable_tqdm=True)
    assert "Checking" not in capsys.readouterr().err


@pytest.mark.parametrize("mistake", ["leaks", "cannot share"])
def test_a_model_that_is_placed_late_and_fails_is_refused_as_often_as_it_is_asked(tokenizer, monkeypatch, mistake):
    """An engine places weights when training starts, and whoever catches the error may train, or evaluate, again."""
    monkeypatch.setattr(StartUpCheck, "can_call", lambda self, model: False)
    model = tiny_model("mpt", max_seq_len=4096, vocab_size=len(tokenizer))
    trainer = make_trainer("dpo", "ours", model=model, processing_class=tokenizer, peft_config=lora())
    if mistake == "leaks":
        model.get_decoder().norm_f.register_forward_hook(lambda module, args, output: leak(output))
    message = "cannot share prefixes, which was found out" if mistake == "cannot share" else "sees other sequences|leak"
    for _ in range(2):
        with pytest.raises(UnprovenModelError, match=message):
            trainer.train()
    assert trainer.state.global_step == 0


def test_a_loss_that_trl_adds_is_taken_for_one_that_couples_pairs():
    with_new = SimpleNamespace(loss_type=["sigmoid", "listwise"])
    assert PaddingFreeDPOTrainer.coupled_by_arguments(None, {"args": with_new}) == ["`loss_type='listwise'`"]
