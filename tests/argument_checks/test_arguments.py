"""Mistakes in arguments stop a trainer before anything is loaded or computed, and say what to change."""

import inspect
import re
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    LlamaForCausalLM,
    PreTrainedModel,
    TrainerCallback,
)
from trl import DPOConfig, SFTConfig

from tests.helpers.refused import build, without
from tests.helpers.tiny import DATA, SEED, arguments, make_model, make_tokenizer, reward_model, saved
from tests.runs import make_trainer
from trl_paddingfree import PaddingFreeSFTTrainer
from trl_paddingfree.argument_checks.arguments import refuse_wrong_schedule
from trl_paddingfree.argument_checks.given_models import refuse_unusable
from trl_paddingfree.argument_checks.values import DOCUMENTED, documented_words
from trl_paddingfree.registry import TRAINERS

# Task, what it is given, and what is said of it
REFUSED = {
    "neither pad nor eos token": (
        "dpo",
        {"processing_class": without("pad_token", "eos_token")},
        "neither a `pad_token` nor an `eos_token`.* Set `tokenizer.pad_token`",
    ),
    "rows of one token": ("dpo", {"config_class": DPOConfig, "max_length": 1}, "`max_length=1` must be at least 2"),
    "a misspelt option of checkpoints": (
        "dpo",
        {"config_class": DPOConfig, "gradient_checkpointing_kwargs": {"use_reentant": False}},
        "has `use_reentant`, which checkpoints do not know. Did you mean `use_reentrant`?",
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
    "a callback": (
        "sft",
        {"callbacks": TrainerCallback()},
        r"`callbacks` is a TrainerCallback, and must be a list: pass `callbacks=\[...\]`",
    ),
    "an optimizer": ("sft", {"optimizers": torch.optim.SGD}, "`optimizers` is the class SGD, and must be a pair: pass"),
    "arguments of no optimizer": ("sft", {"optim_args": "lr"}, "`optim_args='lr'` must be pairs such as `'rank=8,"),
    "a misspelt argument of a schedule": (
        "sft",
        {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycels": 2}},
        "`lr_scheduler_kwargs={'num_cycels': 2}` does not fit `lr_scheduler_type='cosine'`: .* 'num_cycels'",
    ),
    "a schedule that lacks an argument": (
        "grpo",
        {"lr_scheduler_type": "cosine_with_min_lr"},
        "`lr_scheduler_kwargs=.*` does not fit `lr_scheduler_type='cosine_with_min_lr'`: .*min_lr",
    ),
    "no folder": ("dpo", {"output_dir": ""}, "`output_dir=''` names no folder"),
    "a file": ("dpo", {"output_dir": __file__}, "`output_dir='.*py'` is a file, and checkpoints go to a folder"),
    "a folder in a file": ("sft", {"output_dir": f"{__file__}/a/b"}, "` lies below '.*py', which is a file"),
}


def weightless():
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(make_model().config)


def with_encoder():
    sizes = {"d_model": 16, "d_ff": 16, "d_kv": 8, "num_layers": 1, "num_heads": 2}
    return AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("t5", vocab_size=69, **sizes))


ENCODER = "is a T5ForConditionalGeneration, which has an encoder and a decoder, and {} trains decoder-only models: pass"
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
    "a module": (
        "dpo",
        {"model": torch.nn.Linear(2, 2)},
        "`model` is a Linear, and no model of transformers: pass one",
    ),
    "a module as teacher": (
        "distillation",
        {"teacher_model": torch.nn.Linear(2, 2)},
        "`teacher_model` is a Linear, and",
    ),
    "an encoder": ("sft", {"model": with_encoder()}, "`model` " + ENCODER.format("SFTTrainer")),
    "an encoder as reference": ("dpo", {"ref_model": with_encoder()}, "`ref_model` " + ENCODER.format("DPOTrainer")),
    "no weights": (
        "sft",
        {"model": weightless()},
        "`model` is a LlamaForCausalLM on the meta device, without weights: load it with `from_pretrained`",
    ),
    "no weights of references": ("dpo", {"ref_model": weightless()}, "`ref_model` is a LlamaForCausalLM on the meta"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_mistakes_are_refused_in_one_line_before_anything_is_computed(name, untouched):
    task, given, message = REFUSED[name]
    with pytest.raises((ValueError, TypeError), match=message) as error:
        build(task, **{"model": untouched, "peft_config": None, **given})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("task", ["sft", "reward"])
def test_an_end_token_that_the_configuration_names_pads_as_in_trl(task):
    trainer = build(task, processing_class=without("pad_token", "eos_token"), eos_token="<eos>")
    assert trainer.processing_class.pad_token == "<eos>"


def test_a_schedule_is_tried_with_the_learning_rate_and_the_groups_of_training(monkeypatch):
    common = {"model": make_model(), "peft_config": None}
    ending = {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 2e-3}}
    build("sft", **common, **ending, learning_rate=2e-2)
    faster = torch.optim.SGD(common["model"].parameters(), lr=1)
    build("sft", **common, **ending, learning_rate=1e-4, optimizers=(faster, None))
    del faster.defaults  # as of a wrapper
    build("sft", **common, optimizers=(faster, None))
    with pytest.raises(ValueError, match=r"lr_end \(0.002\) must be smaller than initial lr \(0.0001\)"):
        build("sft", **common, **ending, learning_rate=1e-4)
    lists = {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"min_lr": [0.0, 1e-6]}}
    build("sft", **common, **lists, eval_strategy="steps", eval_dataset=DATA["sft"](2, SEED))
    config = SFTConfig("out", use_cpu=True, bf16=False, **ending, learning_rate=1e-4)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")  # whose configuration may have a schedule of its own
    refuse_wrong_schedule(config, None)


def test_a_schedule_of_ones_own_is_not_looked_at():
    """Of its arguments, only who makes it knows what they mean."""
    model = make_model()
    given = {"model": model, "peft_config": None, "lr_scheduler_kwargs": {"half_life": 5}}
    optimizer = torch.optim.SGD(model.parameters())
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    assert build("sft", **given, optimizers=(optimizer, schedule)).lr_scheduler is schedule

    class Halving(PaddingFreeSFTTrainer):
        def create_scheduler(self, num_training_steps, optimizer=None):
            raise NotImplementedError

    build("sft", **given, trainer_class=Halving)
    with pytest.raises(ValueError, match="`lr_scheduler_kwargs={'half_life': 5}` does not fit"):
        build("sft", **given)


def test_a_link_to_nothing_is_no_folder_to_write_to(untouched, tmp_path):
    (tmp_path / "out").symlink_to(tmp_path / "gone")
    for name in ("out", "out/run"):
        with pytest.raises(ValueError, match=f"`output_dir='.*{name}'` .*is a link to nothing, and checkpoints go to"):
            build(model=untouched, output_dir=str(tmp_path / name))


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


def cut(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


# What is saved in a folder, what happens to it, the trainer that is given its name, and what is said of it
NAMED = {
    "a classifier": (reward_model, None, "dpo", HEADLESS.format("DPOTrainer")),
    "an encoder": (with_encoder, None, "dpo", ENCODER.format("DPOTrainer")),
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
        build(task, model=str(folder), train_dataset=DATA[task](4, 0))
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
