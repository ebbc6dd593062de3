"""Bad input stops before anything is computed and says what to change, or is counted and said."""

import inspect
import logging
import re
import sys
from dataclasses import dataclass, fields

import peft
import pytest
import torch
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState
from datasets import Dataset
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import TrainingArguments
from trl import DPOConfig, SFTConfig
from trl.trainer.dpo_trainer import DataCollatorForPreference

import trl_paddingfree
from tests.helpers.architectures import is_older, tiny_model
from tests.helpers.tiny import arguments, conversations, lora, make_model, make_tokenizer, preference_data
from tests.runs import compare, make_trainer, run
from trl_paddingfree import (
    LanguageModelingCollator,
    PaddingFreeDPOTrainer,
    PaddingFreeSFTConfig,
    PaddingFreeSFTTrainer,
    PreferenceCollator,
)
from trl_paddingfree.trainers.registry import TRAINERS

SEED = 7793
COMMON = {"bf16": False, "report_to": "none", "use_cpu": True, "padding_free": True, "max_steps": 1}


@pytest.fixture
def untouched(monkeypatch):
    """A model that must not compute anything."""
    model = make_model()

    def forward(*args, **kwargs):
        raise AssertionError("computed")

    monkeypatch.setattr(model.get_input_embeddings(), "forward", forward)
    return model


def build(tmp_path, dataset=None, *, model, tokenizer, trainer_kwargs=None, **options):
    args = DPOConfig(output_dir=str(tmp_path), **{**COMMON, **options})
    dataset = preference_data(8, SEED) if dataset is None else dataset
    kwargs = {"processing_class": tokenizer, **(trainer_kwargs or {})}
    return PaddingFreeDPOTrainer(model=model, args=args, train_dataset=dataset, **kwargs)


class OwnCollator:
    def __call__(self, examples):
        raise AssertionError("called")


@dataclass
class ChangedTrlCollator(DataCollatorForPreference):
    pass


@dataclass
class ChangedCollator(PreferenceCollator):
    def torch_call(self, examples):
        return super().torch_call(examples[:2])


ARGUMENTS = {
    "prompt tuning": (
        {"peft_config": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)},
        "`peft_config` of type PromptTuningConfig puts virtual tokens",
    ),
    "a foreign collator": ({"data_collator": OwnCollator()}, "`data_collator` is a OwnCollator"),
    "a subclass of TRL's collator": (
        {"data_collator": ChangedTrlCollator(pad_token_id=0)},
        r"`trl_paddingfree.PreferenceCollator` or a subclass of it \(DataCollatorForPreference, its base, is TRL's",
    ),
    "the other trainer's collator": (
        {"data_collator": LanguageModelingCollator(pad_token_id=0)},
        "`data_collator` is a LanguageModelingCollator",
    ),
    "eval data of another kind": (
        {"eval_dataset": Dataset.from_list([{"text": "w1"}])},
        r"The eval data has no columns that DPO reads, only \['text'\]",
    ),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_that_cannot_be_flat_are_refused(name, untouched, tokenizer, tmp_path):
    trainer_kwargs, message = ARGUMENTS[name]
    with pytest.raises(ValueError, match=message):
        build(tmp_path, model=untouched, tokenizer=tokenizer, trainer_kwargs=trainer_kwargs)


def test_a_model_that_already_has_virtual_tokens_is_refused(tokenizer, tmp_path):
    model = get_peft_model(make_model(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(ValueError, match="PrefixTuningConfig puts virtual tokens before every row"):
        build(tmp_path, model=model, tokenizer=tokenizer)


OPTIONS = {
    "dispatch_batches": (
        {"accelerator_config": {"dispatch_batches": True}},
        "`accelerator_config={'dispatch_batches': True}` cuts batches",
    ),
    "split_batches": (
        {"accelerator_config": {"split_batches": True}},
        "`accelerator_config={'split_batches': True}` cuts batches",
    ),
    "context parallelism": (
        {"parallelism_config": ParallelismConfig(cp_size=2)},
        "`cp_size=2`: context parallelism .* Set `cp_size=1`",
    ),
}
if HAS_SP := "sp_size" in ParallelismConfig.__dataclass_fields__:  # since accelerate 1.12
    OPTIONS["sequence parallelism"] = (
        {"parallelism_config": ParallelismConfig(sp_size=4)},
        "`sp_size=4`: sequence parallelism .* Set `sp_size=1`",
    )


@pytest.mark.parametrize("task", ["dpo", "grpo", "rloo"])
def test_trl_speaks_of_streaming_data_that_is_dispatched(task, tokenizer, tmp_path, caplog):
    """It warns where it can turn that off, and refuses where it cannot."""
    trainer = TRAINERS[task]
    options = {"use_cpu": True, "bf16": False, "max_steps": 1, "accelerator_config": {"dispatch_batches": True}}
    stream = preference_data(8, SEED).to_iterable_dataset()
    rest = {"ref_model": make_model()} if task == "dpo" else {"reward_funcs": lambda completions, **_: [0.0]}
    said = []
    for each, config in ((trainer.trl_trainer, trainer.trl_config), (trainer, trainer.config_class)):
        args = config(str(tmp_path), **options)
        arguments = {"args": args, "train_dataset": stream, "processing_class": tokenizer, **rest}
        caplog.clear()
        if task == "dpo":
            each(model=make_model(), **arguments)
            assert args.accelerator_config.dispatch_batches is False
            said.append([record.message for record in caplog.records if "`dispatch_batches`" in record.message])
            continue
        with pytest.raises(ValueError, match="dispatch_batches") as error:
            each(model=make_model(), **arguments)
        said.append(str(error.value))
    assert said[0]
    assert said[0] == said[1]


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_cut_batches_are_refused(name, untouched, tokenizer, tmp_path):
    options, message = OPTIONS[name]
    with pytest.raises(ValueError, match=message):
        build(tmp_path, model=untouched, tokenizer=tokenizer, **options)


@pytest.mark.parametrize(("variable", "size"), [("CP_SIZE", "cp_size"), ("SP_SIZE", "sp_size")][: 1 + HAS_SP])
def test_parallelism_that_accelerate_was_launched_with_is_refused(
    variable, size, untouched, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv(f"PARALLELISM_CONFIG_{variable}", "2")
    with pytest.raises(ValueError, match=f"`parallelism_config` with `{size}=2`"):
        build(tmp_path, model=untouched, tokenizer=tokenizer)


def user(text):
    return [{"role": "user", "content": text}]


def assistant(text):
    return [{"role": "assistant", "content": text}]


GOOD = {"prompt": "w1", "chosen": "w2", "rejected": "w3"}
GOOD_CHAT = {"prompt": user("w1"), "chosen": assistant("w2"), "rejected": assistant("w3")}
ROWS = {
    "no `rejected`": ([{"prompt": "w1", "chosen": "w2"}], "train data has no columns that DPO reads, only"),
    "tokens only": (
        [{"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3]}],
        r"no columns that DPO reads, only \['prompt_ids'",
    ),
    "nothing": ([GOOD, {**GOOD, "chosen": None}], "Row 1 of the train data: `chosen` is None"),
    "a number": ([{**GOOD, "rejected": 3}], "Row 0 of the train data: `rejected` is 3"),
    "a prompt of nothing": ([GOOD, GOOD, {**GOOD, "prompt": None}], "Row 2 of the train data: `prompt` is None"),
    "a list of strings": ([{**GOOD_CHAT, "prompt": ["w1"]}], "`prompt` is a list with 'w1', which has no role"),
    "no messages": ([GOOD_CHAT, {**GOOD_CHAT, "chosen": []}], "Row 1 of the train data: `chosen` is an empty list"),
    "a message of nothing": (
        [GOOD_CHAT, {**GOOD_CHAT, "rejected": assistant(None)}],
        "Row 1 of the train data: `rejected` is a list with a message whose content is None",
    ),
    "a message of a number": ([{**GOOD_CHAT, "prompt": user(4)}], "message whose content is 4"),
    "text beside messages": ([{**GOOD_CHAT, "prompt": "w1"}], "`prompt` is a str, `chosen` is a list"),
    "images": ([{**GOOD, "image": [1]}], "appears to be vision-related"),
}


UNREAD = {
    "SFT": (
        [{"question": "w1", "answer": "w2"}],
        "SFT",
        "`prompt` and `completion`, or `input_ids`, or `messages`, or `text`",
    ),
    "SFT, pairs": (
        [GOOD],
        "SFT",
        "`prompt` and `completion`, or, without a `prompt`, one of `input_ids`, `messages`, `text`",
    ),
    "reward model": ([{"prompt": "w1", "chosen": "w2"}], "a reward model", "`chosen` and `rejected`"),
    "KTO": ([{"prompt": "w1", "completion": "w2"}], "KTO", "`prompt` and `completion` and `label`"),
}


@pytest.mark.parametrize("as_stream", [False, True])
@pytest.mark.parametrize("name", UNREAD)
def test_data_without_the_columns_of_a_trainer_is_refused(name, as_stream, untouched, tokenizer, tmp_path):
    rows, task, reads = UNREAD[name]
    kind = {"a reward model": "Reward"}.get(task, task)
    trainer_class = getattr(trl_paddingfree, f"PaddingFree{kind}Trainer")
    args = trainer_class.config_class(output_dir=str(tmp_path), **COMMON)
    untouched.config.num_labels = 1  # what TRL's reward trainer looks at first
    data = Dataset.from_list(rows)
    message = f"The train data has no columns that {task} reads, only {list(rows[0])}. It reads "
    with pytest.raises(ValueError, match=re.escape(message) + ".*" + reads):
        trainer_class(
            model=untouched,
            args=args,
            train_dataset=data.to_iterable_dataset() if as_stream else data,
            processing_class=tokenizer,
        )


@pytest.mark.parametrize("rows", [[{"text": "w1"}, {"text": None}], [{"messages": user("w1")}, {"messages": None}]])
def test_instructions_that_are_not_there_are_named_by_their_row(rows, untouched, tokenizer, tmp_path):
    args = PaddingFreeSFTConfig(output_dir=str(tmp_path), **COMMON)
    with pytest.raises(ValueError, match=f"Row 1 of the train data: `{[*rows[0]][0]}` is None"):
        PaddingFreeSFTTrainer(untouched, args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)


def test_text_by_another_name_is_read(tokenizer, tmp_path):
    data = Dataset.from_list([{"words": "w1 w2 w3"}] * 2)
    args = PaddingFreeSFTConfig(output_dir=str(tmp_path), dataset_text_field="words", **COMMON)
    PaddingFreeSFTTrainer(model=make_model(), args=args, train_dataset=data, processing_class=tokenizer)


@pytest.mark.parametrize("name", ROWS)
def test_rows_that_are_not_text_are_refused_by_number(name, untouched, tokenizer, tmp_path):
    rows, message = ROWS[name]
    with pytest.raises(ValueError, match=message):
        build(tmp_path, Dataset.from_list(rows), model=untouched, tokenizer=tokenizer)


@pytest.mark.parametrize("name", [name for name, (rows, _) in ROWS.items() if len(rows) == 1])
def test_the_first_row_of_a_stream_is_refused_at_once(name, untouched, tokenizer, tmp_path):
    rows, message = ROWS[name]
    with pytest.raises(ValueError, match=message):
        build(tmp_path, Dataset.from_list(rows).to_iterable_dataset(), model=untouched, tokenizer=tokenizer)


def test_a_bad_row_in_a_stream_is_refused_when_it_is_read(tokenizer):
    dataset = preference_data(6, SEED, conversational=False).to_list() + [{**GOOD, "chosen": None}]
    stream = Dataset.from_list(dataset).to_iterable_dataset()
    with pytest.raises(ValueError, match="Row 6 of the train data: `chosen` is None"):
        run(
            "dpo",
            "shared",
            model=make_model(),
            ref_model=make_model(),
            processing_class=tokenizer,
            train_dataset=stream,
        )


def test_a_message_that_calls_a_tool_needs_no_content(tokenizer, tmp_path):
    call = {"type": "function", "function": {"name": "w3", "arguments": "w4"}}
    chosen = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    tokenizer = make_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{ message['content'] }} <|im_end|>{% endgeneration %}",
        "{{ message['content'] or message['tool_calls'][0]['function']['name'] }} <|im_end|>{% endgeneration %}",
    )
    dataset = Dataset.from_list([{**GOOD_CHAT, "chosen": chosen}])
    trainer = build(tmp_path, dataset, model=make_model(), tokenizer=tokenizer, trainer_kwargs={"peft_config": lora()})
    assert trainer.train_dataset[0]["chosen_ids"] == tokenizer("w3 <|im_end|>")["input_ids"]


def without(*tokens):
    tokenizer = make_tokenizer()
    for token in tokens:
        setattr(tokenizer, token, None)
    return tokenizer


def test_a_tokenizer_without_pad_and_eos_token_is_refused(untouched, tmp_path):
    with pytest.raises(ValueError, match="neither a `pad_token` nor an `eos_token`.* Set `tokenizer.pad_token`"):
        build(tmp_path, model=untouched, tokenizer=without("pad_token", "eos_token"))


def test_plain_text_without_an_eos_token_is_refused(untouched, tmp_path):
    with pytest.raises(ValueError, match="no `eos_token` to end a completion.* Set `tokenizer.eos_token`"):
        build(tmp_path, Dataset.from_list([GOOD]), model=untouched, tokenizer=without("eos_token"))


@pytest.mark.parametrize("token", ["pad_token", "eos_token"])
def test_a_tokenizer_that_trl_can_do_with_trains_the_same(token):
    # Without a pad token TRL pads with eos, which is also a token to learn; conversations end as their template says
    def make():
        return {"model": make_model(), "processing_class": without(token), "peft_config": lora()}

    compare("dpo", make, preference_data(8, SEED), steps=2)


ODD_ROWS = [
    {"prompt": "", "chosen": "w1 w2", "rejected": "w3"},
    {"prompt": "w4 w5 w6", "chosen": "", "rejected": " w7"},
    {"prompt": "w4 w5", "chosen": " w8", "rejected": ""},
    {"prompt": "w9", "chosen": " w10 w11", "rejected": " w10 w11"},
    {"prompt": "", "chosen": "", "rejected": ""},
]


EXTRA = {
    "dpo": ({"question": "q", "chosen": "q a", "rejected": "q b"}, ": `question`. Without a `prompt`, it is the"),
    "kto": ({"prompt": "q", "completion": " a", "label": True, "score": 1.0}, ": `score`."),
    "reward": ({"prompt": "q", "chosen": " a", "rejected": " b", "margin": 1.0, "id": 3}, ": `id`."),
    "sft": ({"text": "q a", "answer": "a"}, ": `answer`."),
    "distillation": ({"prompt": "q", "solution": "a"}, ": `solution`."),
    "grpo": ({"prompt": "q", "solution": "a"}, None),  # rewards read all
}


@pytest.mark.parametrize("task", EXTRA)
def test_columns_that_nobody_reads_are_named_in_one_line(task, caplog):
    row, listed = EXTRA[task]
    data = Dataset.from_list([row] * 8)
    with caplog.at_level(logging.WARNING):
        make_trainer(task, "shared", train_dataset=data, **arguments(task))
    said = [message for message in caplog.messages if "does not read" in message]
    if listed is None:
        assert said == []
        return
    assert len(said) == 1
    assert said[0].startswith(f"The train data has columns that {task.upper()} does not read{listed}")


class OwnRows(LanguageModelingCollator):
    """It might read any column."""


def test_columns_are_not_called_unread_where_a_function_or_a_collator_may_read_them(caplog):
    data = Dataset.from_list([{"question": "q", "answer": "a"}] * 8)
    given = arguments("sft", adapters=False)
    with caplog.at_level(logging.WARNING):
        make_trainer("sft", "flat", train_dataset=data, formatting_func=lambda row: row["question"], **given)
        data = conversations(8, SEED).add_column("id", [*range(8)])
        make_trainer("sft", "flat", train_dataset=data, data_collator=OwnRows(pad_token_id=0), **given)
    assert "does not read" not in caplog.text


def test_the_precision_of_the_launcher_is_named_where_the_configuration_has_another(monkeypatch, caplog):
    given = {**arguments("sft", adapters=False), "train_dataset": conversations(8, SEED)}
    with caplog.at_level(logging.WARNING):
        make_trainer("sft", "flat", **given)
    assert "mixed_precision" not in caplog.text
    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # as `accelerate launch` hands it on
    try:
        with caplog.at_level(logging.WARNING):
            trainer = make_trainer("sft", "flat", **given)
        assert trainer.accelerator.mixed_precision == "bf16"
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    said = [message for message in caplog.messages if "mixed_precision='bf16'" in message]
    assert len(said) == 1
    assert "in spite of `bf16=False, fp16=False`" in said[0]


def test_odd_pairs_are_counted_and_train_as_in_trl(tokenizer, caplog):
    # Evaluated one by one, so that each is also a batch of its own
    dataset = Dataset.from_list(ODD_ROWS + preference_data(7, SEED, conversational=False).to_list())

    def make():
        models = {"model": make_model(), "ref_model": make_model(seed=1)}
        return {**models, "processing_class": tokenizer, "eval_dataset": Dataset.from_list(ODD_ROWS)}

    with caplog.at_level(logging.WARNING):
        options = {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 1}
        padded = compare("dpo", make, dataset, **options).padded
    assert len(padded.trainer.train_dataset) == len(dataset)
    # `preference_data` has one identical pair of its own
    counted = "2 with an empty prompt, 3 with an empty completion, 3 with identical chosen and rejected, of 12 pairs"
    assert [m for m in caplog.messages if counted in m and "The train data" in m]
    assert [m for m in caplog.messages if "The eval data: 2 with an empty prompt" in m and "of 5 pairs" in m]


def said_of(rows, tokenizer, caplog):
    """What is logged as adapters train on pairs, as with padding."""
    with caplog.at_level(logging.WARNING):
        compare(
            "dpo",
            lambda: {"model": make_model(), "processing_class": tokenizer, "peft_config": lora()},
            Dataset.from_list(rows),
            steps=2,
        )
    return caplog.text


def test_odd_conversations_are_counted_and_train_as_in_trl(tokenizer, caplog):
    odd = [
        {"prompt": user(""), "chosen": assistant("w1 w2"), "rejected": assistant("w3")},
        {"prompt": user("w4"), "chosen": assistant(""), "rejected": assistant("")},
    ]
    counted = "1 with an empty prompt, 1 with an empty completion, 2 with identical chosen and rejected, of 8 pairs"
    assert counted in said_of(odd + preference_data(6, SEED).to_list(), tokenizer, caplog)


def test_implicit_prompts_train_as_in_trl_and_only_completions_count_as_empty(tokenizer, caplog):
    rows = [
        {"chosen": row["prompt"] + row["chosen"], "rejected": row["prompt"] + row["rejected"]}
        for row in preference_data(7, SEED)
    ]
    rows.append({"chosen": user("w1") + assistant(""), "rejected": user("w1") + assistant("w2")})
    counted = "The train data: 1 with an empty completion, 1 with identical chosen and rejected, of 8 pairs"
    assert counted in said_of(rows, tokenizer, caplog)


def test_pairs_without_a_completion_left_are_dropped_as_in_trl_and_counted(tokenizer, caplog):
    def make():
        models = {"model": make_model(), "processing_class": tokenizer, "peft_config": lora()}
        return {**models, "eval_dataset": preference_data(9, SEED + 1)}

    with caplog.at_level(logging.WARNING):
        padded = compare("dpo", make, preference_data(20, SEED), max_length=16).padded
    for name, kept, total in (
        ("train", len(padded.trainer.train_dataset), 20),
        ("eval", len(padded.trainer.eval_dataset), 9),
    ):
        assert 0 < kept < total
        assert any(
            f"The {name} data: dropped {total - kept} of {total} examples, which `max_length=16`" in message
            for message in caplog.messages
        )


def test_data_that_truncation_empties_is_refused(untouched, tokenizer, tmp_path):
    with pytest.raises(ValueError, match="dropped 8 of 8 examples, which `max_length=3`.* Raise `max_length`"):
        build(tmp_path, model=untouched, tokenizer=tokenizer, max_length=3)


@pytest.mark.parametrize(
    ("options", "warned"), [({}, True), ({"packing": True}, False), ({"per_device_train_batch_size": 2}, False)]
)
def test_batches_of_one_row_are_warned_about(tokenizer, tmp_path, caplog, options, warned):
    """A pair is two rows, and a packed row is many documents: there is something to gain from those."""
    options = {"per_device_train_batch_size": 1, "max_length": 32, "bf16": False, "use_cpu": True, **options}
    args = PaddingFreeSFTConfig(str(tmp_path), report_to="none", **options)
    with caplog.at_level(logging.WARNING):
        pairs = {"model": make_model(), "tokenizer": tokenizer, "trainer_kwargs": {"peft_config": lora()}}
        build(tmp_path, **pairs, per_device_train_batch_size=1)
        PaddingFreeSFTTrainer(make_model(), args, train_dataset=conversations(8, 0), processing_class=tokenizer)
    said = [message for message in caplog.messages if "next to nothing to gain" in message]
    assert len(said) == warned


def test_trl_does_not_warn_of_what_is_not_so(tokenizer, tmp_path, caplog, recwarn):
    with caplog.at_level(logging.WARNING):
        trainer = build(
            tmp_path,
            model=make_model(),
            tokenizer=tokenizer,
            trainer_kwargs={"peft_config": lora()},
            save_strategy="no",
        )
        trainer.train()
    messages = [*caplog.messages, *(str(warning.message) for warning in recwarn)]
    assert not [m for m in messages if "temporarily unavailable" in m or "padding_free=False" in m]
    assert [m for m in caplog.messages if m.startswith("Padding-free, ")]
    ours = [record for record in caplog.records if record.name.startswith("trl_paddingfree")]
    assert [r for r in caplog.records if r not in ours and r.name.startswith("trl")] == []
    assert trainer.args.padding_free


def test_a_collator_of_the_users_own_that_calls_ours_is_used_and_left_as_it_is(tokenizer, tmp_path):
    collator = ChangedCollator(pad_token_id=0, max_length=30)
    trainer = build(
        tmp_path,
        model=make_model(),
        tokenizer=tokenizer,
        trainer_kwargs={"peft_config": lora(), "data_collator": collator},
    )
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch["flat_batch"].row_mask.size(0) == 4
    assert not collator.padding_free


def test_instruction_data_with_images_is_refused_for_a_text_model(untouched, tokenizer, tmp_path):
    args = SFTConfig(output_dir=str(tmp_path), **COMMON)
    dataset = Dataset.from_list([{"messages": user("w1") + assistant("w2"), "images": [1]}])
    with pytest.raises(ValueError, match="appears to be vision-related"):
        PaddingFreeSFTTrainer(model=untouched, args=args, train_dataset=dataset, processing_class=tokenizer)


def test_without_padding_free_nothing_is_refused_or_counted(tokenizer, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        trainer = build(
            tmp_path,
            Dataset.from_list(ODD_ROWS),
            model=make_model(),
            tokenizer=tokenizer,
            trainer_kwargs={"peft_config": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)},
            padding_free=False,
        )
    said = [record.getMessage() for record in caplog.records if record.name.startswith("trl_paddingfree")]
    assert [message for message in said if "pads as TRL's" not in message] == []
    assert torch.is_tensor(next(iter(trainer.get_train_dataloader()))["input_ids"])


@pytest.mark.parametrize(
    ("model_type", "config", "disable", "warned"),
    [
        ("opt", {"dropout": 0.1}, True, "`dropout=0.1`"),
        ("llama", {"attention_dropout": 0.2}, True, "Set `attention_dropout` to 0"),
        pytest.param(
            *("gptj", {"attn_pdrop": 0.2}, True, "Set `attn_pdrop` to 0"),
            marks=pytest.mark.skipif(is_older("5.24"), reason="GPT-J's is a module, which TRL turns off"),
        ),
        ("opt", {"dropout": 0.1}, False, None),
        ("opt", {"dropout": 0.0}, True, None),
        ("gpt2", {"resid_pdrop": 0.1}, True, None),  # a module, which TRL turns off
    ],
)
def test_dropout_that_cannot_be_disabled_is_said(model_type, config, disable, warned, tokenizer, tmp_path, caplog):
    model, kwargs = tiny_model(model_type, **config).train(), {"peft_config": lora()}
    with caplog.at_level(logging.WARNING):
        build(tmp_path, model=model, tokenizer=tokenizer, trainer_kwargs=kwargs, disable_dropout=disable)
    assert ("draws dropout by a function" in caplog.text) == (warned is not None)
    assert warned is None or warned in caplog.text
    if disable:
        ids = torch.arange(5, 25)[None]
        draws_masks = not torch.equal(model.train()(ids).logits, model(ids).logits)
        assert draws_masks == (warned is not None)


INPUTS = {
    "a list": ({"train_dataset": [GOOD]}, "must be a `Dataset` or `IterableDataset`, got `list`"),
    "a dict": ({"train_dataset": {"text": ["w1"]}}, "must be a `Dataset` or `IterableDataset`, got `dict`"),
    "a tokenizer's name": ({"processing_class": "gpt2"}, "`processing_class` must be either a `PreTrainedTokenizer"),
    "no rows": ({"train_dataset": Dataset.from_list([])}, "The train data has no rows"),
    "no evaluation rows": ({"eval_dataset": {"some": Dataset.from_list([])}}, "The some data has no rows"),
    "aLoRA": (
        {"peft_config": LoraConfig(alora_invocation_tokens=[5], task_type="CAUSAL_LM")},
        r"`alora_invocation_tokens=\[5\]` \(aLoRA\) looks for these tokens in each row",
    ),
    "messages without roles": (
        {"train_dataset": Dataset.from_list([{"messages": [{"content": "w1"}]}])},
        "Row 0 of the train data: `messages` is a list with .*which has no role",
    ),
}


if hasattr(peft, "VeloraConfig"):  # not in the oldest version that will do
    INPUTS["VeLoRA"] = (
        {"peft_config": LoraConfig(velora_config=peft.VeloraConfig(), task_type="CAUSAL_LM")},
        "`velora_config` with `init_type='batch_average'` makes gradients of an average over all tokens",
    )


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("task", ["dpo", "sft"])
def test_inputs_of_the_wrong_kind_are_refused(name, task, untouched, tokenizer, tmp_path):
    changed, message = INPUTS[name]
    if name == "messages without roles" and task == "dpo":
        message = "The train data has no columns that DPO reads"
    data = preference_data(4, SEED) if task == "dpo" else conversations(4, SEED)
    trainer, config = (PaddingFreeDPOTrainer, DPOConfig) if task == "dpo" else (PaddingFreeSFTTrainer, SFTConfig)
    arguments = {"train_dataset": data, "processing_class": tokenizer, **changed}
    with pytest.raises((ValueError, TypeError), match=message):
        trainer(model=untouched, args=config(output_dir=str(tmp_path), **COMMON), **arguments)


def no_prompt(tmp_path):
    rows = {"question": [user("w1")], "chosen": [assistant("w2")], "rejected": [assistant("w3")]}
    return "dpo", {"train_dataset": Dataset.from_dict(rows)}


def roles(task, *names):
    messages = [{"role": role, "content": "w1"} for role in names]
    return lambda tmp_path: (task, {"train_dataset": Dataset.from_dict({"messages": [messages], "id": [1]})})


def config(make, **options):
    return lambda tmp_path: ("dpo", {"args": make(str(tmp_path), **{**COMMON, **options})})


STUMBLES = {
    "a prompt by another name": (
        no_prompt,
        r"The train data has no `prompt`, only \['question', .* begin with different messages",
    ),
    "conversations of roles": (
        lambda tmp_path: ("sft", {"train_dataset": Dataset.from_dict({"conversations": [user("w1")], "id": [1]})}),
        "`conversations` of the train data have no `from` and `value`.* Rename the column",
    ),
    "a misspelt role": (roles("sft", "user", "assitant"), "with the role 'assitant'. Did you mean `assistant`?"),
    "another task's configuration": (
        config(SFTConfig),
        "`args` is a SFTConfig, and PaddingFreeDPOTrainer takes a PaddingFreeDPOConfig, or TRL's DPOConfig",
    ),
    "transformers' configuration": (
        lambda tmp_path: ("sft", {"args": TrainingArguments(str(tmp_path), use_cpu=True)}),
        "`args` is a TrainingArguments",
    ),
    "a dict": (lambda tmp_path: ("dpo", {"args": {"output_dir": str(tmp_path)}}), "`args` is a dict"),
    "rows of one token": (config(DPOConfig, max_length=1), "`max_length=1` must be at least 2"),
    "a misspelt option of checkpoints": (
        config(DPOConfig, gradient_checkpointing_kwargs={"use_reentant": False}),
        "has `use_reentant`, which checkpoints do not know. Did you mean `use_reentrant`?",
    ),
    "a loss that is none": (config(DPOConfig, loss_type=["sigmod"]), "`loss_type='sigmod'` is no loss that TRL's DPO"),
}


@pytest.mark.parametrize("name", STUMBLES)
def test_what_new_users_stumble_over_is_one_line_before_anything_is_computed(name, untouched, tokenizer, tmp_path):
    make, message = STUMBLES[name]
    task, changed = make(tmp_path)
    data = preference_data(4, SEED) if task == "dpo" else conversations(4, SEED)
    args = TRAINERS[task].config_class(str(tmp_path), **COMMON)
    arguments = {"train_dataset": data, "args": args, "processing_class": tokenizer, **changed}
    with pytest.raises(ValueError, match=message) as error:
        TRAINERS[task](untouched, **arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("role", ["assistant", "critic", "user2", "ipython"])
def test_roles_that_are_not_misspelt_are_left_to_the_template(role, tokenizer, tmp_path):
    args = PaddingFreeSFTConfig(str(tmp_path), **COMMON)
    _, changed = roles("sft", "user", role)(tmp_path)
    PaddingFreeSFTTrainer(make_model(), args, processing_class=tokenizer, **changed)


@pytest.mark.parametrize("task", TRAINERS)
def test_every_loss_that_trl_names_is_one(task):
    config_class = TRAINERS[task].trl_config
    text = {field.name: str(field.metadata.get("help")) for field in fields(config_class)}.get("loss_type", "")
    source = inspect.getsource(sys.modules[TRAINERS[task].trl_trainer.__module__])
    assert [name for name in re.findall(r"'(\w+)'", text) if f'"{name}"' not in source and name != "chunked_nll"] == []


def test_an_output_folder_that_is_a_file_is_refused_before_anything_is_trained(untouched, tokenizer, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="`output_dir='.*file'` is a file, and checkpoints go to a folder"):
        build(tmp_path / "file", model=untouched, tokenizer=tokenizer)


def test_lora_on_the_head_is_refused(model_dir):
    """The fused head would ignore it."""
    with pytest.raises(ValueError, match="lm_head"):
        run(
            "dpo",
            "shared",
            model=model_dir,
            peft_config=LoraConfig(target_modules=["lm_head"]),
            train_dataset=preference_data(4, SEED),
            steps=1,
        )
