"""Bad input stops before anything is computed and says what to change, or is counted and said."""

import copy
import inspect
import re
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import peft
import pytest
import torch
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState
from datasets import Dataset
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel, TrainingArguments
from trl import DPOConfig, SFTConfig

from tests.helpers.architectures import is_older, tiny_model
from tests.helpers.tiny import DATA, arguments, make_model, make_tokenizer, preference_data, reward_model, saved
from tests.runs import compare, make_trainer
from trl_paddingfree import (
    LanguageModelingCollator,
    PaddingFreeDPOTrainer,
    PreferenceCollator,
    RewardCollator,
)
from trl_paddingfree.core.trainers.given_models import refuse_unusable
from trl_paddingfree.core.trainers.values import DOCUMENTED, documented_words
from trl_paddingfree.registry import TRAINERS

SEED = 7793


def build(task="dpo", **given):
    """A trainer of ours, by default of adapters."""
    return make_trainer(task, "ours", **{**arguments(task), **given})


def without(*tokens):
    tokenizer = make_tokenizer()
    for token in tokens:
        setattr(tokenizer, token, None)
    return tokenizer


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
    "arranging what a transform makes": (
        "sft",
        {
            "train_dataset": Dataset.from_dict({"n": [1, 2]}).with_transform(lambda rows: {"input_ids": [[5, 6]]}),
            "arrange_micro_batches": "tokens",
            "remove_unused_columns": False,
            "dataset_kwargs": {"skip_prepare_dataset": True},
        },
        "Those of a stream, of a dataset with a transform",
    ),
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
    "neither pad nor eos token": (
        "dpo",
        {"processing_class": without("pad_token", "eos_token")},
        "neither a `pad_token` nor an `eos_token`.* Set `tokenizer.pad_token`",
    ),
    **{
        name: ("dpo", {"accelerator_config": {name: True}}, f"`accelerator_config={{'{name}': True}}` cuts batches")
        for name in ("dispatch_batches", "split_batches")
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
    "rows of one token": ("dpo", {"config_class": DPOConfig, "max_length": 1}, "`max_length=1` must be at least 2"),
    "a misspelt option of checkpoints": (
        "dpo",
        {"config_class": DPOConfig, "gradient_checkpointing_kwargs": {"use_reentant": False}},
        "has `use_reentant`, which checkpoints do not know. Did you mean `use_reentrant`?",
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
    "no loss": (
        "dpo",
        {"loss_type": ["sigmod"]},
        "`loss_type='sigmod'` is not a loss of TRL's DPOTrainer, which has 'sigmoid', 'hinge', .*, 'sigmoid_norm'. Did "
        "you mean `loss_type='sigmoid'`",
    ),
    "no loss of KTO": (
        "kto",
        {"loss_type": "apo"},
        "'apo'` is not a loss of .* which has 'kto', 'apo_zero_unpaired'.$",
    ),
    "a class": ("dpo", {"model": LlamaForCausalLM}, "pass `LlamaForCausalLM.from_pretrained"),
    "a class of references": ("dpo", {"ref_model": LlamaForCausalLM}, "`ref_model` is the class LlamaForCausalLM"),
    "a class of adapters": ("sft", {"peft_config": LoraConfig}, r"is the class .* pass `LoraConfig\(...\)`"),
    "a path": ("sft", {"model": Path("model")}, "`model` is a PosixPath, .*: pass `str.model.`"),
    "no model": ("sft", {"model": None}, "`model` is `None`, and neither a model nor the name of one"),
    "no loss at all": ("dpo", {"loss_type": []}, r"`loss_type=\[\]` has no loss: name at least one of 'sigmoid', "),
    "no divergence": (
        "dpo",
        {"f_divergence_type": "kl"},
        "`f_divergence_type='kl'` is not a value of TRL's DPOTrainer, which has 'reverse_kl', 'forward_kl', ",
    ),
    "no scale": ("grpo", {"scale_rewards": "batches"}, "which has 'group', .* mean `scale_rewards='batch'`"),
    "no folder": ("dpo", {"output_dir": ""}, "`output_dir=''` names no folder"),
    "a file": ("dpo", {"output_dir": __file__}, "`output_dir='.*py'` is a file, and checkpoints go to a folder"),
    "a folder in a file": ("sft", {"output_dir": f"{__file__}/a/b"}, "` lies below '.*py', which is a file"),
}
if hasattr(peft, "VeloraConfig"):  # not in the oldest version that will do
    REFUSED["VeLoRA"] = (
        "sft",
        {"peft_config": LoraConfig(velora_config=peft.VeloraConfig(), task_type="CAUSAL_LM")},
        "`velora_config` with `init_type='batch_average'` makes gradients of an average over all tokens",
    )


def weightless():
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(make_model().config)


HEADLESS = "is a LlamaForSequenceClassification, which has no head for text, and {} trains language models: pass one, "
REFUSED |= {
    "a classifier for SFT": ("sft", {"model": reward_model()}, "`model` " + HEADLESS.format("SFTTrainer")),
    "a classifier for DPO": ("dpo", {"model": reward_model()}, "`model` " + HEADLESS.format("DPOTrainer")),
    "a classifier with adapters": (
        "kto",
        {"model": get_peft_model(reward_model(), LoraConfig(target_modules=["q_proj"]))},
        "`model` " + HEADLESS.format("KTOTrainer"),
    ),
    "a classifier as reference": ("dpo", {"ref_model": reward_model()}, "`ref_model` is a LlamaForSequenceClass"),
    "a backbone": ("grpo", {"model": make_model().model}, "`model` is a LlamaModel, which has no head for text"),
    "no weights": (
        "sft",
        {"model": weightless()},
        "`model` is a LlamaForCausalLM on the meta device, without weights: load it with `from_pretrained`",
    ),
    "no weights of references": ("dpo", {"ref_model": weightless()}, "`ref_model` is a LlamaForCausalLM on the meta"),
}


@pytest.fixture
def untouched(monkeypatch):
    """A model that must not compute anything."""
    model = make_model()
    model.config.num_labels = 1  # what TRL's reward trainer looks at first

    def forward(*args, **kwargs):
        raise AssertionError("computed")

    monkeypatch.setattr(model.get_input_embeddings(), "forward", forward)
    return model


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_in_one_line_before_anything_is_computed(name, untouched):
    task, given, message = REFUSED[name]
    with pytest.raises((ValueError, TypeError), match=message) as error:
        build(task, **{"model": untouched, "peft_config": None, **given})
    assert "\n" not in str(error.value)


def cut(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


# What is saved in a folder, what happens to it, the trainer that is given its name, and what is said of it
NAMED = {
    "a classifier": (reward_model, None, "dpo", HEADLESS.format("DPOTrainer")),
    "a cut-off file": (make_model, cut, "sft", r"`: model.safetensors is damaged \(SafetensorError: .*Copy it again"),
    "nothing": (None, None, "sft", "` is not a file or folder here: is it misspelt?"),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_model_that_is_named_is_looked_at_before_it_is_loaded(name, tmp_path, monkeypatch):
    make, spoil, task, said = NAMED[name]
    folder = tmp_path / "model"
    if make is not None:
        saved(folder, make(), make_tokenizer())
    if spoil is not None:
        spoil(folder)
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", None)
    with pytest.raises((ValueError, OSError), match=f"`model={str(folder)!r}` ?{said.removeprefix('`')}") as error:
        build(task, model=str(folder), train_dataset=DATA[task](4, SEED))
    assert "\n" not in str(error.value)


def test_a_model_that_is_nowhere_is_said_at_once_and_by_name():
    """Without a network, the hub's client takes minutes, and names none."""
    said = "`model='org/model'` is not a file or folder here, nor in the cache of the hub, and the hub is switched off"
    with pytest.raises(OSError, match=said):
        build("dpo", model="org/model")


def test_models_that_something_else_places_are_none_without_weights(monkeypatch):
    model = weightless()
    model.hf_device_map = {"": "disk"}
    refuse_unusable({"model": model}, "SFTTrainer")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    refuse_unusable({"model": weightless()}, "SFTTrainer")


@pytest.mark.parametrize("task", ["sft", "dpo", "distillation"])
def test_a_model_of_which_no_weight_trains_is_named_where_padded_trl_fails_or_trains_nothing(task):
    def frozen():
        given = arguments(task, False)
        given["model"].requires_grad_(False)
        return given

    padded = make_trainer(task, "padded", **frozen(), steps=1)
    with nullcontext() if task == "distillation" else pytest.raises(RuntimeError, match="does not require grad"):
        padded.train()
        assert padded.state.log_history[0]["grad_norm"] == 0
    trainer = make_trainer(task, "ours", **frozen(), steps=1)
    with pytest.raises(ValueError, match="No weight of the model trains: .* Pass a `peft_config`, or call"):
        trainer.train()
    trainer.model.requires_grad_(True)  # as some do once the trainer is made
    trainer.train()


def test_a_link_to_nothing_is_no_folder_to_write_to(untouched, tmp_path):
    (tmp_path / "out").symlink_to(tmp_path / "gone")
    for name in ("out", "out/run"):
        with pytest.raises(ValueError, match=f"`output_dir='.*{name}'` .*is a link to nothing, and checkpoints go to"):
            build(model=untouched, output_dir=str(tmp_path / name))


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


STREAM = preference_data(8, SEED).to_iterable_dataset()
# What couples the examples of a micro-batch, or gives rows of unknown length
MOVED = [
    ("dpo", {"loss_type": ["aot"]}, "`loss_type='aot'`"),
    ("dpo", {"loss_type": ["sigmoid", "sft"]}, "`loss_type='sft'`"),
    ("dpo", {"train_dataset": STREAM}, "needs a dataset whose lengths"),
    ("dpo", {"train_sampling_strategy": "batch_rebalance"}, "both decide which examples share a micro-batch"),
    ("kto", {}, "`loss_type='kto'`"),
    ("reward", {"neftune_noise_alpha": 5.0}, "whose noise shrinks with the longest row"),
    ("sft", {"compute_loss_func": max}, "and with `compute_loss_func` the loss of an example"),
    ("sft", {"packing": True, "neftune_noise_alpha": 5.0}, "with `neftune_noise_alpha=5.0` and packing the loss of an"),
    ("grpo", {"arrange_micro_batches": "prefix", "loss_type": "bnpo"}, "`loss_type='bnpo'`"),
    ("grpo", {"arrange_micro_batches": "prefix", "top_entropy_quantile": 0.2}, "`top_entropy_quantile=0.2`"),
    ("grpo", {"arrange_micro_batches": "prefix", "entropy_coef": 0.1}, "`entropy_coef=0.1`"),
    ("rloo", {}, "needs rows of known length, and RLOOTrainer generates them"),
]


@pytest.mark.parametrize(("task", "options", "message"), [each for each in MOVED if each[0] in ("dpo", "kto", "grpo")])
def test_what_the_arguments_show_of_that_is_said_before_models_load(task, options, message):
    with pytest.raises(ValueError, match=message):
        build(task, **{"model": "nowhere/model", "arrange_micro_batches": "tokens", **options})


@pytest.mark.parametrize("task", ["grpo", "rloo"])
def test_rewards_that_are_no_numbers_are_named_with_their_function(task):
    def praise(completions, **kwargs):
        return ["good"] * len(completions)

    def forgets(completions, **kwargs):
        praise(completions)

    for function, said in (
        (praise, "The reward function 'praise' returned 'good' as reward 0: return a number for each completion"),
        (forgets, "The reward function 'forgets' returned None: return a list of numbers"),
    ):
        with pytest.raises(ValueError, match=said):
            build(task, reward_funcs=function).train()
    trainer = build(task, reward_funcs=lambda completions, **kwargs: (torch.tensor(1.0) for _ in completions), steps=1)
    functions = trainer.reward_funcs
    trainer.train()
    assert trainer.reward_funcs is functions


@pytest.mark.trl_1
@pytest.mark.parametrize(("task", "options", "message"), MOVED)
def test_examples_are_not_moved_where_that_would_change_the_loss(task, options, message):
    with pytest.raises(ValueError, match=message):
        build(task, **{"arrange_micro_batches": "tokens", **options})


MASK = {"flat_attention": "mask"}  # with which nothing runs in slices
TWO = {"sequence_parallel_size": 2}


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("dpo", {"max_tokens_per_micro_batch": 9, **MASK}, "slices: its attention is computed by mask"),
        ("dpo", {"memory_budget": 0.0001, **MASK}, "recomputed, as its attention is"),
        ("grpo", {"max_tokens_per_micro_batch": 5, **MASK}, "=5` is less than a prompt of"),
        (
            "distillation",
            {"memory_budget": 0.0001},
            r"a micro-batch of 4 rows, each a prompt of \d+ tokens with .* need",
        ),
        ("distillation", {"teacher_model": None}, "`teacher_model` is missing"),
        ("sft", {"max_tokens_per_micro_batch": 200, "ddp_static_graph": True}, "expects one backward pass per micro-"),
        ("reward", TWO, "`sequence_parallel_size=2`: DPO and SFT .* for RewardTrainer's batches"),
        (
            "dpo",
            {**TWO, "train_dataset": preference_data(4, SEED).add_column("image", [None] * 4)},
            "images are not computed in slices",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused_before_training(task, options, message):
    with pytest.raises(ValueError, match=message):
        build(task, **options)


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


def test_the_words_that_are_listed_are_those_that_trl_reads():
    """TRL names them in its documentation, and compares with them in its code."""
    listed = {
        (task, name): words
        for task, trainer in TRAINERS.items()
        for name in DOCUMENTED
        if (words := documented_words(trainer.config_class, name))
    }
    assert {task for task, name in listed if name == "loss_type"} == {"dpo", "sft", "kto", "grpo"} & TRAINERS.keys()
    for (task, name), words in listed.items():
        trainer = TRAINERS[task]
        modules = {sys.modules[each.__module__] for each in (trainer.trl_trainer, trainer.trl_config)}
        source = "".join(map(inspect.getsource, modules))
        compared = {*re.findall(rf'(?<!args\.){name} == "(\w+)"', source)}
        assert compared <= {*words}, (task, name)
        assert [word for word in words if f'"{word}"' not in source and word not in ("chunked_nll", "vllm")] == []


# --- what is said -----------------------------------------------------------------------------------------------------

ODD_ROWS = [
    {"prompt": "", "chosen": "w1 w2", "rejected": "w3"},
    {"prompt": "w4 w5 w6", "chosen": "", "rejected": " w7"},
    {"prompt": "w4 w5", "chosen": " w8", "rejected": ""},
    {"prompt": "w9", "chosen": " w10 w11", "rejected": " w10 w11"},
    {"prompt": "", "chosen": "", "rejected": ""},
]


def test_the_precision_of_the_launcher_is_named_where_the_configuration_has_another(monkeypatch, caplog):
    build("sft")
    assert "mixed_precision" not in caplog.text
    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # as `accelerate launch` hands it on
    try:
        assert build("sft").accelerator.mixed_precision == "bf16"
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    (said,) = (message for message in caplog.messages if "mixed_precision='bf16'" in message)
    assert "in spite of `bf16=False, fp16=False`" in said


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
