"""Bad input stops before anything is computed and says what to change, or is counted and said."""

import copy
from contextlib import nullcontext
from dataclasses import dataclass

import peft
import pytest
import torch
from accelerate.parallelism_config import ParallelismConfig
from datasets import Dataset
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import TrainingArguments
from trl import DPOConfig, SFTConfig

from tests.helpers.architectures import is_older, tiny_model
from tests.helpers.refused import build, without
from tests.helpers.tiny import DATA, arguments, make_model, preference_data, reward_model
from tests.runs import compare, make_trainer
from trl_paddingfree import (
    LanguageModelingCollator,
    PaddingFreeDPOTrainer,
    PreferenceCollator,
    RewardCollator,
)

SEED = 7793


def user(text):
    return [{"role": "user", "content": text}]


@dataclass
class ChangedCollator(PreferenceCollator):
    def torch_call(self, examples):
        return super().torch_call(examples[:2])


# --- what is refused --------------------------------------------------------------------------------------------------

PROMPT_TUNING = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
PREFIX_TUNING = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
GOOD = {"prompt": "w1", "chosen": "w2", "rejected": "w3"}
# Task, what it is given, and what is said of it
REFUSED = {
    "images": (
        "dpo",
        {"train_dataset": Dataset.from_list([{**GOOD, "image": [1]}])},
        "appears to be vision-related|trains on text only",
    ),
    "images of rewards": (
        "reward",
        {"train_dataset": Dataset.from_list([{**GOOD, "images": [1]}])},
        "a column `images`, and this trainer trains on text only",
    ),
    "images of SFT": (
        "sft",
        {"train_dataset": Dataset.from_list([{"messages": user("w1"), "images": [1]}])},
        "appears to be vision-related|trains on text only",
    ),
    "a list": ("dpo", {"train_dataset": [GOOD]}, "must be a `Dataset` or `IterableDataset`, got `list`"),
    "a dict of columns": (
        "sft",
        {"train_dataset": {"text": ["w1"]}},
        "must be a `Dataset` or `IterableDataset`, got `dict`",
    ),
    "transformers' configuration": ("sft", {"config_class": TrainingArguments}, "`args` is a TrainingArguments"),
    "prompt tuning": ("dpo", {"peft_config": PROMPT_TUNING}, "PromptTuningConfig puts virtual tokens before every row"),
    "a model with virtual tokens": (
        "dpo",
        {"model": get_peft_model(make_model(), PREFIX_TUNING)},
        "PrefixTuningConfig puts virtual tokens before every row",
    ),
    "aLoRA": (
        "dpo",
        {"peft_config": LoraConfig(alora_invocation_tokens=[5], task_type="CAUSAL_LM")},
        r"`alora_invocation_tokens=\[5\]` \(aLoRA\) looks for these tokens in each row",
    ),
    # Which the fused head would ignore
    "LoRA on the head": ("dpo", {"peft_config": LoraConfig(target_modules=["lm_head"])}, "lm_head"),
    "another trainer's collator": (
        "dpo",
        {"data_collator": LanguageModelingCollator(pad_token_id=0)},
        "`data_collator` is a LanguageModelingCollator",
    ),
    "a tokenizer's name": ("dpo", {"processing_class": "gpt2"}, "must be either a `PreTrainedTokenizer"),
    **{
        name: ("dpo", {"accelerator_config": {name: True}}, f"`accelerator_config={{'{name}': True}}` {reason}")
        for name, reason in (("dispatch_batches", "cuts batches"), ("split_batches", "divides `per_device_train"))
    },
    **{
        name: ("dpo", {"parallelism_config": ParallelismConfig(**{name: 2})}, f"`{name}=2`: .* Set `{name}=1`")
        for name in ("cp_size", "sp_size")
        if name in ParallelismConfig.__dataclass_fields__  # `sp_size` since accelerate 1.12
    },
    "another task's configuration": (
        "dpo",
        {"config_class": SFTConfig},
        "`args` is a SFTConfig, and PaddingFreeDPOTrainer takes a PaddingFreeDPOConfig, or TRL's DPOConfig",
    ),
    "a configuration that is a dict": (
        "dpo",
        {"trainer_class": lambda args, **given: PaddingFreeDPOTrainer(args=vars(args), **given)},
        "`args` is a dict",
    ),
    "a reward of padding": (  # which the padded model would read
        "reward",
        {"model": reward_model(), "data_collator": RewardCollator(5)},
        "`data_collator` pads with token 5",
    ),
    "an adapter of another task": (
        "reward",
        {"peft_config": LoraConfig(task_type="CAUSAL_LM")},
        "set `task_type='SEQ_CLS'`",
    ),
}
if hasattr(peft, "VeloraConfig"):  # not in the oldest version that will do
    REFUSED["VeLoRA"] = (
        "sft",
        {"peft_config": LoraConfig(velora_config=peft.VeloraConfig(), task_type="CAUSAL_LM")},
        "`velora_config` with `init_type='batch_average'` makes gradients of an average over all tokens",
    )


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_in_one_line_before_anything_is_computed(name, untouched):
    task, given, message = REFUSED[name]
    with pytest.raises((ValueError, TypeError), match=message) as error:
        build(task, **{"model": untouched, "peft_config": None, **given})
    assert "\n" not in str(error.value)


def test_parallelism_that_accelerate_was_launched_with_is_refused(untouched, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")
    with pytest.raises(ValueError, match="`parallelism_config` with `cp_size=2`"):
        build(model=untouched)


@pytest.mark.parametrize("task", ["dpo", "grpo"])
def test_trl_speaks_of_streaming_data_that_is_dispatched(task, caplog):
    """It warns where it can turn that off, and refuses where it cannot."""
    stream, said = DATA[task](8, SEED).to_iterable_dataset(), []
    for layout in ("padded", "ours"):
        caplog.clear()
        options = {"train_dataset": stream, "accelerator_config": {"dispatch_batches": True}}
        with nullcontext() if task == "dpo" else pytest.raises(ValueError, match="dispatch_batches") as error:
            trainer = make_trainer(task, layout, **options)
            assert trainer.args.accelerator_config.dispatch_batches is False
        warned = [message for message in caplog.messages if "`dispatch_batches`" in message]
        said.append(warned if error is None else str(error.value))
    assert said[0]
    assert said[0] == said[1]


# --- what is not ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", ["pad_token", "eos_token"])
def test_a_tokenizer_that_trl_can_do_with_trains_the_same(token):
    # Without a pad token TRL pads with eos, which is also a token to learn; conversations end as their template says
    make = lambda: {**arguments("dpo"), "processing_class": without(token)}  # noqa: E731
    compare("dpo", make, preference_data(8, SEED), steps=2)


def test_a_collator_of_the_users_own_that_calls_ours_is_used_and_left_as_it_is():
    collator = ChangedCollator(pad_token_id=0, max_length=30)
    batch = next(iter(build(data_collator=collator).get_train_dataloader()))
    assert batch["flat_batch"].row_mask.size(0) == 4
    assert not collator.padding_free


# --- what is said -----------------------------------------------------------------------------------------------------

ODD_ROWS = [
    {"prompt": "", "chosen": "w1 w2", "rejected": "w3"},
    {"prompt": "w4 w5 w6", "chosen": "", "rejected": " w7"},
    {"prompt": "w4 w5", "chosen": " w8", "rejected": ""},
    {"prompt": "w9", "chosen": " w10 w11", "rejected": " w10 w11"},
    {"prompt": "", "chosen": "", "rejected": ""},
]


@pytest.mark.parametrize(
    ("task", "options", "warned"),
    [
        ("sft", {}, True),
        ("sft", {"packing": True, "max_length": 32}, False),  # a packed row is many documents
        ("sft", {"per_device_train_batch_size": 2}, False),
        ("dpo", {}, False),  # a pair is two rows
    ],
)
def test_batches_of_one_row_are_warned_about(caplog, task, options, warned):
    build(task, **{"per_device_train_batch_size": 1, **options})
    assert ("next to nothing to gain" in caplog.text) == warned


def test_trl_does_not_warn_of_what_is_not_so(caplog, recwarn):
    trainer = build(config_class=DPOConfig, padding_free=True, steps=1)
    trainer.train()
    messages = [*caplog.messages, *(str(warning.message) for warning in recwarn)]
    assert not [m for m in messages if "temporarily unavailable" in m or "padding_free=False" in m]
    assert [m for m in caplog.messages if m.startswith("Padding-free, ")]
    ours = [record for record in caplog.records if record.name.startswith("trl_paddingfree")]
    assert [r for r in caplog.records if r not in ours and r.name.startswith("trl")] == []
    assert trainer.args.padding_free


def test_without_padding_free_nothing_is_refused_or_counted(caplog):
    trainer = build(train_dataset=Dataset.from_list(ODD_ROWS), peft_config=PROMPT_TUNING, padding_free=False)
    assert [record.getMessage() for record in caplog.records if record.name.startswith("trl_paddingfree")] == []
    assert torch.is_tensor(next(iter(trainer.get_train_dataloader()))["input_ids"])


@pytest.mark.parametrize(
    ("model_type", "config", "disable", "warned"),
    [
        ("opt", {"dropout": 0.1}, True, "`dropout=0.1`"),
        ("llama", {"attention_dropout": 0.2}, True, "set `attention_dropout` to 0"),
        pytest.param(
            *("gptj", {"attn_pdrop": 0.2}, True, "set `attn_pdrop` to 0"),
            marks=pytest.mark.skipif(is_older("5.24"), reason="GPT-J's is a module, which TRL turns off"),
        ),
        ("opt", {"dropout": 0.1}, False, None),
        ("gpt2", {"resid_pdrop": 0.1}, True, None),  # a module, which TRL turns off
    ],
)
def test_dropout_that_cannot_be_disabled_is_said(model_type, config, disable, warned, caplog):
    model = tiny_model(model_type, **config).train()
    build(model=model, disable_dropout=disable)
    assert ("draws dropout by a function" in caplog.text) == (warned is not None)
    assert warned is None or warned in caplog.text
    if disable:
        ids = torch.arange(5, 25)[None]
        draws_masks = not torch.equal(model.train()(ids).logits, model(ids).logits)
        assert draws_masks == (warned is not None)


@pytest.mark.parametrize("task", ["dpo", "grpo"])
def test_adapters_that_were_added_since_are_refused(task):
    trainer = build(task, **arguments(task, False))
    trainer.model = peft.get_peft_model(trainer.model, peft.LilyConfig(target_modules=["q_proj"], stride_A=1, num_B=2))
    with pytest.raises(ValueError, match="LilyConfig weighs its adapters by an average over all tokens"):
        trainer.train()


def test_a_model_that_was_replaced_is_named():
    trainer = build("dpo", **arguments("dpo", False))
    trainer.model = trainer.model_wrapped = copy.deepcopy(trainer.model)
    with pytest.raises(RuntimeError, match="`trainer.model` was replaced: make the trainer again"):
        trainer.train()
