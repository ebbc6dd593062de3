"""Trainers that have no class here train a model of `padding_free` as they train it padded."""

import importlib
import random
import string
from functools import partial

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DataCollatorForLanguageModeling,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from tests.helpers.tiny import (
    ADAPTERS,
    DATA,
    arguments,
    conversations,
    make_model,
    make_tokenizer,
    preference_data,
    prompts,
    reward_model,
    score,
    text,
)
from tests.runs import ROUNDED, assert_same, run, train
from trl_paddingfree import FlatModel, padding_free

# Means over all logits, those of padding among them, which are 0 here
OF_PADDING = (*ROUNDED, "logits/", "entropy", "mean_token_accuracy", "mean_logits")
# Of what padding says after the end of a completion, too
OF_PADDING += ("objective/",)
GENERATING = {"max_steps": 2, "temperature": 1.0}
COMPLETING = {**GENERATING, "max_completion_length": 8}


def triples(n, seed):
    """Pairs, each with a third completion."""
    rng = random.Random(seed)
    rows = [{"prompt": text(rng, 1, 20)} for _ in range(n)]
    names = ("chosen", "rejected", "reference")
    return Dataset.from_list([{**row, **{name: " " + text(rng, 1, 20) for name in names}} for row in rows])


def demonstrations(n, seed):
    """Prompts with what only a teacher is told."""
    rng = random.Random(seed)
    return prompts(n, seed).add_column("privileged_context", [text(rng, 1, 9) for _ in range(n)])


def binary(completions, **kwargs):
    """A reward of 0 or 1."""
    return [float(value > 3) for value in score(completions)]


def byte_tokenizer():
    """A tokenizer of bytes, as GOLD needs one: of digits and few others, so that all are tokens of the tiny models."""
    template = make_tokenizer().chat_template
    characters = sorted({*string.ascii_lowercase, *string.digits, *"<|_>ĠĊ"})
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *characters])}
    backend = Tokenizer(BPE(vocabulary, [], unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    specials = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **specials)


def teacher(folder):
    """Another model with the tokenizer of a folder, which makes no cache where it is only asked what it says."""
    model = make_model(seed=1, num_hidden_layers=1)
    model.config._name_or_path = folder
    model.config.use_cache = False
    return model


# Of each of TRL's trainers: the data, and what it needs beside a model
TRL = {
    "orpo.ORPO": (preference_data, {"max_length": 64}),
    "cpo.CPO": (preference_data, {"max_length": 64}),
    "cpo.CPO simpo": (preference_data, {"max_length": 64, "loss_type": "simpo", "cpo_alpha": 0.0}),
    "tpo.TPO": (triples, {}),
    "gkd.GKD": (
        conversations,
        {**GENERATING, "max_new_tokens": 8, "lmbda": 0.5, "max_length": 48, "teacher_model": teacher},
    ),
    "gold.GOLD": (conversations, {**COMPLETING, "lmbda": 0.0, "max_length": 500, "teacher_model": teacher}),
    "iw_opd.IWOPD": (conversations, {**COMPLETING, "max_length": 48, "loss_top_k": 0, "teacher_model": teacher}),
    "online_dpo.OnlineDPO": (prompts, {**GENERATING, "max_new_tokens": 8, "reward_funcs": score}),
    "sdft.SDFT": (demonstrations, {**COMPLETING, "num_generations": 4, "distillation_topk": 8}),
    "sdpo.SDPO": (demonstrations, {**COMPLETING, "num_generations": 4, "reward_funcs": score}),
    "a2po.A2PO": (prompts, {**COMPLETING, "reward_funcs": binary, "num_value_samples": 2}),
}


def assert_trained_as_padded(trained, make):
    model = padding_free(make())
    ours = trained(model)
    counts = FlatModel.of(model).counts
    assert 0 < counts.computed < 0.9 * counts.padded
    assert_same(trained(make()), ours, ignored=OF_PADDING)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TRL)
def test_trainers_of_trl_without_a_class_here(name, model_dir):
    module, _, class_name = name.split()[0].partition(".")
    package = importlib.import_module(f"trl.experimental.{module}")
    data, given = TRL[name]
    of_trl = {
        "trainer_class": getattr(package, f"{class_name}Trainer"),
        "config_class": getattr(package, f"{class_name}Config"),
        "train_dataset": data(16, seed=3),
    }

    def trained(model):
        tokenizer = byte_tokenizer() if name == "gold.GOLD" else make_tokenizer()
        # A2PO would predict completions from what stands in the padding on the right
        tokenizer.padding_side = "left" if name == "a2po.A2PO" else "right"
        others = {key: make(model_dir) for key, make in given.items() if make is teacher}
        return run("dpo", "padded", model=model, processing_class=tokenizer, **of_trl, **{**given, **others})

    # Some load the model again, to teach itself
    assert_trained_as_padded(trained, lambda: AutoModelForCausalLM.from_pretrained(model_dir))


@ADAPTERS
@pytest.mark.parametrize("task", DATA)
def test_trainers_of_trl_themselves(task, adapters, model_dir):
    """With LoRA, which their trainers put on after `padding_free`."""
    data = DATA[task](16, 5)
    # RLOO loads the model again, as its reference
    make = reward_model if task == "reward" else lambda: AutoModelForCausalLM.from_pretrained(model_dir)
    assert_trained_as_padded(
        lambda model: run(task, "padded", **arguments(task, adapters, model), train_dataset=data), make
    )


_LANGUAGE = AutoModelForCausalLM, partial(DataCollatorForLanguageModeling, mlm=False)
# Of each kind of head, its model and its collator; with label smoothing, losses are transformers' and read logits
HEADS = {
    "language": _LANGUAGE,
    "smoothed": _LANGUAGE,
    "tokens": (AutoModelForTokenClassification, DataCollatorForTokenClassification),
    "rows": (AutoModelForSequenceClassification, DataCollatorWithPadding),
}


def labelled(of_tokens):
    """Rows of very different lengths, each, or each of its tokens, with a class."""
    rng, rows = random.Random(24), []
    for _ in range(24):
        ids = [rng.randrange(5, 60) for _ in range(rng.randint(2, 30))]
        labels = [rng.randrange(3) for _ in ids] if of_tokens else rng.randrange(3)
        rows.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels})
    return rows


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", HEADS)
def test_the_trainer_of_transformers(kind, side, tmp_path):
    auto, collator = HEADS[kind]
    rows, tokenizer, config = labelled(kind == "tokens"), make_tokenizer(), make_model(num_labels=3).config
    tokenizer.padding_side = side

    def trained(prepare):
        torch.manual_seed(1)
        options = {"max_steps": 3, "per_device_train_batch_size": 4, "learning_rate": 5e-3, "adam_epsilon": 1e-2}
        options |= {"label_smoothing_factor": 0.1 * (kind == "smoothed"), "logging_steps": 1}
        args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", **options)
        model = prepare(auto.from_config(config))
        trainer = Trainer(model, args, collator(tokenizer), train_dataset=rows, eval_dataset=rows[:8])
        result = train(trainer)
        trainer.evaluate()
        return result

    padded, ours = trained(lambda model: model), trained(padding_free)
    assert_same(padded, ours)
    assert "eval_loss" in ours.log_history[-1]
    flat = FlatModel.of(ours.trainer.model)
    if auto is AutoModelForCausalLM and side == "left":  # transformers has the first token predicted from padding
        (said,) = flat.padded.said
        assert ("padding would be scored" if kind == "language" else "padding on the left") in said
        assert flat.counts.computed == 0
    else:
        assert 0 < flat.counts.computed < 0.9 * flat.counts.padded
        assert not flat.padded.said, "training and evaluation are all flat"
