"""Trainers that have no class here train a model of `padding_free` as they train it padded."""

import importlib
import random
import string
import warnings
from typing import Any

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
    DATA,
    arguments,
    conversations,
    make_model,
    make_tokenizer,
    preference_data,
    prompts,
    score,
    text,
)
from tests.runs import ROUNDED, TOLERANCE, assert_same, run
from trl_paddingfree import FlatModel, padding_free

# Means over all logits, those of padding among them, which are 0 here
OF_PADDING = (*ROUNDED, "logits/", "entropy", "mean_token_accuracy", "mean_logits")
# Of what padding says after the end of a completion, too
OF_PADDING += ("objective/",)
GENERATING = {"max_steps": 2, "temperature": 1.0}


def triples(n: int, seed: int) -> Dataset:
    """Pairs, each with a third completion."""
    rng = random.Random(seed)
    rows = [{"prompt": text(rng, 1, 20)} for _ in range(n)]
    names = ("chosen", "rejected", "reference")
    return Dataset.from_list([{**row, **{name: " " + text(rng, 1, 20) for name in names}} for row in rows])


def demonstrations(n: int, seed: int) -> Dataset:
    """Prompts with what only a teacher is told."""
    rng = random.Random(seed)
    return prompts(n, seed).add_column("privileged_context", [text(rng, 1, 9) for _ in range(n)])


def binary(completions: list, **kwargs: Any) -> list[float]:
    """A reward of 0 or 1."""
    return [float(value > 3) for value in score(completions)]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of bytes, as GOLD needs one: of digits and few others, so that all are tokens of the tiny models."""
    template = make_tokenizer().chat_template
    characters = sorted({*string.ascii_lowercase, *string.digits, *"<|_>ĠĊ"})
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *characters])}
    backend = Tokenizer(BPE(vocabulary, [], unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    specials = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **specials)


def teacher(folder: str) -> dict[str, Any]:
    """Another model with the tokenizer of a folder, which makes no cache where it is only asked what it says."""
    model = make_model(seed=1, num_hidden_layers=1)
    model.config._name_or_path = folder
    model.config.use_cache = False
    return {"teacher_model": model}


# Of each of TRL's trainers: the data, and what it needs beside a model
TRL: dict[str, tuple[Any, dict[str, Any]]] = {
    "orpo.ORPO": (preference_data, {"max_length": 64}),
    "cpo.CPO": (preference_data, {"max_length": 64}),
    "cpo.CPO simpo": (preference_data, {"max_length": 64, "loss_type": "simpo", "cpo_alpha": 0.0}),
    "tpo.TPO": (triples, {}),
    "gkd.GKD": (conversations, {**GENERATING, "max_new_tokens": 8, "lmbda": 0.5, "teacher": True, "max_length": 48}),
    "gold.GOLD": (
        conversations,
        {**GENERATING, "max_completion_length": 8, "lmbda": 0.0, "teacher": True, "max_length": 500},
    ),
    "iw_opd.IWOPD": (
        conversations,
        {**GENERATING, "max_completion_length": 8, "teacher": True, "max_length": 48, "loss_top_k": 0},
    ),
    "online_dpo.OnlineDPO": (prompts, {**GENERATING, "max_new_tokens": 8, "reward_funcs": score}),
    "sdft.SDFT": (
        demonstrations,
        {**GENERATING, "max_completion_length": 8, "num_generations": 4, "distillation_topk": 8},
    ),
    "sdpo.SDPO": (
        demonstrations,
        {**GENERATING, "max_completion_length": 8, "reward_funcs": score, "num_generations": 4},
    ),
    "a2po.A2PO": (prompts, {**GENERATING, "max_completion_length": 8, "reward_funcs": binary, "num_value_samples": 2}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TRL)
def test_trainers_of_trl_without_a_class_here(name, model_dir):
    module, _, class_name = name.split()[0].partition(".")
    package = importlib.import_module(f"trl.experimental.{module}")
    data, given = TRL[name]
    given = {**given}
    of_trl = {
        "trainer_class": getattr(package, f"{class_name}Trainer"),
        "config_class": getattr(package, f"{class_name}Config"),
        "train_dataset": data(16, seed=3),
    }
    side = "left" if name == "a2po.A2PO" else "right"
    needs_teacher = given.pop("teacher", False)

    def trained(model: torch.nn.Module) -> Any:
        others = teacher(model_dir) if needs_teacher else {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tokenizer = byte_tokenizer() if name == "gold.GOLD" else make_tokenizer()
            tokenizer.padding_side = side  # A2PO would predict completions from what stands in the padding on the right
            return run("dpo", "padded", model=model, processing_class=tokenizer, **of_trl, **given, **others)

    def made() -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(model_dir)  # some load the model again, to teach itself

    model = padding_free(made())
    ours = trained(model)
    counts = FlatModel.of(model).counts
    assert 0 < counts.computed < 0.9 * counts.padded
    assert_same(trained(made()), ours, ignored=OF_PADDING)


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "LoRA"])
@pytest.mark.parametrize("task", ["dpo", "sft", "kto", "reward", "grpo", "rloo", "distillation"])
def test_trainers_of_trl_themselves(task, adapters, model_dir):
    """With LoRA, which their trainers put on after `padding_free`."""

    def made() -> dict[str, Any]:  # RLOO loads the model again, as its reference
        model = None if task == "reward" else AutoModelForCausalLM.from_pretrained(model_dir)
        return arguments(task, adapters, model)

    data = DATA[task](16, 5)
    padded = run(task, "padded", **made(), train_dataset=data)
    given = made()
    model = padding_free(given.pop("model"))
    ours = run(task, "padded", **given, model=model, train_dataset=data)
    counts = FlatModel.of(model).counts
    assert 0 < counts.computed < 0.9 * counts.padded
    assert_same(padded, ours, ignored=OF_PADDING)


def labelled(n: int, classes: int, of_tokens: bool) -> list[dict[str, Any]]:
    """Rows of very different lengths, each, or each of its tokens, with a class."""
    rng, rows = random.Random(n), []
    for _ in range(n):
        ids = [rng.randrange(5, 60) for _ in range(rng.randint(2, 30))]
        labels = [rng.randrange(classes) for _ in ids] if of_tokens else rng.randrange(classes)
        rows.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels})
    return rows


def of_head(kind: str) -> tuple[torch.nn.Module, list[dict[str, Any]], Any]:
    """A model with a head of a kind, rows for it, and their collator."""
    tokenizer, config = make_tokenizer(), make_model().config
    config.num_labels = 3
    torch.manual_seed(1)
    if kind == "tokens":
        model = AutoModelForTokenClassification.from_config(config)
        return model, labelled(24, 3, of_tokens=True), DataCollatorForTokenClassification(tokenizer)
    if kind == "rows":
        model = AutoModelForSequenceClassification.from_config(config)
        return model, labelled(24, 3, of_tokens=False), DataCollatorWithPadding(tokenizer)
    rows = [{"input_ids": row["input_ids"]} for row in labelled(24, 3, of_tokens=False)]
    return make_model(), rows, DataCollatorForLanguageModeling(tokenizer, mlm=False)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["language", "tokens", "rows"])
def test_the_trainer_of_transformers(kind, side, tmp_path):
    def trained(is_flat: bool) -> tuple[list[dict[str, float]], dict[str, torch.Tensor], Any]:
        model, rows, collator = of_head(kind)
        collator.tokenizer.padding_side = side
        if is_flat:
            padding_free(model)
        options = {"max_steps": 3, "per_device_train_batch_size": 4, "learning_rate": 5e-3, "adam_epsilon": 1e-2}
        args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", logging_steps=1, **options)
        trainer = Trainer(model, args, collator, train_dataset=rows, eval_dataset=rows[:8])
        trainer.train()
        evaluated = trainer.evaluate()["eval_loss"]
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return [*losses, evaluated], dict(model.named_parameters()), FlatModel.of(model)

    losses, weights, _ = trained(is_flat=False)
    ours, our_weights, flat = trained(is_flat=True)
    assert ours == pytest.approx(losses, rel=TOLERANCE)
    for name, weight in weights.items():
        assert (our_weights[name] - weight).abs().max() <= TOLERANCE * weight.abs().max(), name
    if kind == "language" and side == "left":  # transformers has the first token predicted from padding
        assert flat.padded.said == {"`labels` has others than -100 where padding would be scored"}
    else:
        assert 0 < flat.counts.computed < 0.9 * flat.counts.padded
        assert not flat.padded.said, "training and evaluation are all flat"
