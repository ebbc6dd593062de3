"""The start-up check as trainers run it."""

import logging

from accelerate import Accelerator
from transformers import TrainingArguments
from trl.trainer.utils import add_fused_lm_head

from tests.helpers.architectures import tiny_model
from tests.helpers.reference_flash import reference_flash
from trl_paddingfree.model.routes import Route
from trl_paddingfree.trainers.configs import PaddingFreeOptions
from trl_paddingfree.trainers.proving import StartUpCheck


def prove_all(*models, **options):
    for model in models:
        add_fused_lm_head(model)
    args = TrainingArguments(use_cpu=True)
    return StartUpCheck(Accelerator(cpu=True), PaddingFreeOptions(**options), args).prove_all(models)


def test_sharing_turns_off_with_one_line_where_positions_are_all_a_model_reads(caplog):
    with reference_flash(), caplog.at_level(logging.WARNING):
        route = prove_all(tiny_model("falcon", attn_implementation="flash_attention_2"))
    assert route == Route("positions", "flash_attention_2", prefix_sharing=False)
    assert caplog.text.count("trains without shared prefixes: 'flash_attention_2'") == 1
    assert "start-up check failed" not in caplog.text


def test_no_word_of_sharing_where_nobody_asked_for_it(caplog):
    with reference_flash(), caplog.at_level(logging.WARNING):
        prove_all(tiny_model("falcon", attn_implementation="flash_attention_2"), prefix_sharing=False)
    assert "trains without shared prefixes" not in caplog.text


def test_models_share_prefixes_together_or_not_at_all():
    policy, reference = (
        tiny_model("llama"),
        tiny_model("mpt", max_seq_len=4096),
    )  # whose ALiBi counts along the flat row
    assert prove_all(policy).prefix_sharing
    assert not prove_all(tiny_model("llama"), reference).prefix_sharing
