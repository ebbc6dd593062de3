"""What the tests train: a tokenizer, models and data small enough for a laptop, made on the spot."""

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast

SEED = int(os.environ.get("TRL_PADDINGFREE_SEED", 0))  # of this run of the tests
# What many tests run with
ADAPTERS = pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
ATTENTIONS = pytest.mark.parametrize("attention", ["sdpa", "eager"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
FOLLOWING = pytest.mark.parametrize("kind", ["longrope", "dynamic"])  # as [`following_rotary`] takes it
REENTRANT = pytest.mark.parametrize("reentrant", [False, True])
SHARING = pytest.mark.parametrize("prefix_sharing", [False, True], ids=["flat", "shared"])
WORDS = [f"w{i}" for i in range(60)]
# Weights are larger than usual, so that a wrong context shows in the loss
SIZES = {
    "vocab_size": 69,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
# Of a mixture, with the loss of its routers
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {**EXPERTS, "output_router_logits": True, "router_aux_loss_coef": 0.3}
# Blocks of generation end with a token: one that ended with a space would be taken to reach to the end of the text
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|> {{ message['role'] }} "
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }} <|im_end|>{% endgeneration %} "
    "{% else %}{{ message['content'] }} <|im_end|> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


def word_level(words: list[str], special: Sequence[str] = (), **options: Any) -> PreTrainedTokenizerFast:
    """A tokenizer of words between spaces; the `special` ones of them need no spaces."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([*special])
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>", **options)


def make_tokenizer(chat_template: str = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """A word-level tokenizer with a chat template."""
    special = ["<pad>", "<|im_start|>", "<|im_end|>", "<eos>", "<unk>"]
    words = [*special, "system", "user", "assistant", "tool", *WORDS]
    return word_level(words, eos_token="<|im_end|>", chat_template=chat_template)


def make_model(model_type: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0, **overrides):
    """A random model of a few layers."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**SIZES, **overrides})).to(dtype)


def reward_model(model_type: str = "llama", **overrides: Any):
    """A random model with a head of one value, whose weights are as large as the others."""
    config = make_model(model_type, **overrides).config
    config.num_labels = 1
    torch.manual_seed(1)
    return AutoModelForSequenceClassification.from_config(config)


def saved(folder: Path, *parts: Any) -> str:
    """A folder, once it holds a model and what goes with it, as a user would name one."""
    for part in parts:
        part.save_pretrained(folder)
    return str(folder)


def lora(**options: Any) -> LoraConfig:
    """
    LoRA on every linear layer, with random weights in both factors.

    PEFT's own start leaves policy and reference equal: rewards would be zero, and a wrong sign or a wrong reference
    would not show before the weights have moved.
    """
    return LoraConfig(**{"r": 4, "target_modules": "all-linear", "init_lora_weights": False, **options})


def following_rotary(limit: int, kind: str) -> dict[str, Any]:
    """
    What makes rotary frequencies follow the longest row beyond a limit, of at least 24 tokens: the start-up check tries
    rows of less.
    """
    common = {"rope_type": kind, "factor": 4.0, "rope_theta": 10000.0}
    if kind == "dynamic":
        return {"rope_parameters": common, "max_position_embeddings": limit}
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": limit}
    return {"rope_parameters": {**common, **factors}}


def text(rng: random.Random, low: int, high: int, words: Sequence[str] = WORDS) -> str:
    """Some words; possibly none."""
    return " ".join(rng.choice(words) for _ in range(rng.randint(low, high)))


def preference_data(n: int, seed: int, conversational: bool = True) -> Dataset:
    """Pairs of very different lengths, some prompts used twice, one identical pair."""
    rng, rows = random.Random(seed), []
    for i in range(n):
        prompt = rows[-1]["prompt"] if i % 4 == 1 and conversational else text(rng, 1, 20)
        chosen, rejected = text(rng, 1, 25), text(rng, 1, 12)
        if i == 2:
            rejected = chosen
        if conversational:
            if isinstance(prompt, str):
                prompt = [{"role": "user", "content": prompt}]
            chosen, rejected = ([{"role": "assistant", "content": x}] for x in (chosen, rejected))
        else:
            chosen, rejected = " " + chosen, " " + rejected
        rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    return Dataset.from_list(rows)


def different_pairs(n: int, seed: int) -> Dataset:
    """The same without identical ones: rounding decides which of two such sequences is rewarded more."""
    return preference_data(n, seed).filter(lambda row: row["chosen"] != row["rejected"])


def conversations(n: int, seed: int) -> Dataset:
    """Conversations of one to four turns."""
    rng, rows = random.Random(seed), []
    for _ in range(n):
        messages = []
        for _ in range(rng.randint(1, 4)):
            messages.append({"role": "user", "content": text(rng, 1, 12)})
            messages.append({"role": "assistant", "content": text(rng, 1, 12)})
        rows.append({"messages": messages})
    return Dataset.from_list(rows)


def prompt_completions(n: int, seed: int) -> Dataset:
    """Plain-text prompts and completions."""
    rng = random.Random(seed)
    return Dataset.from_list([{"prompt": text(rng, 1, 20), "completion": " " + text(rng, 1, 15)} for _ in range(n)])


def unpaired(n: int, seed: int) -> Dataset:
    """Completions that are desirable or not, in no order, some of one prompt."""
    rng, rows = random.Random(seed), []
    for i in range(n):
        prompt = rows[-1]["prompt"] if i % 3 else text(rng, 1, 20)
        rows.append({"prompt": prompt, "completion": " " + text(rng, 1, 15), "label": rng.random() < 0.5})
    return Dataset.from_list(rows)


def prompts(n: int, seed: int) -> Dataset:
    """Prompts of very different lengths."""
    rng = random.Random(seed)
    return Dataset.from_list([{"prompt": [{"role": "user", "content": text(rng, 1, 25)}]} for _ in range(n)])


def score(completions: list, **kwargs: Any) -> list[float]:
    """A reward that says nothing, and says it of each completion anew."""
    words = [said if isinstance(said, str) else said[0]["content"] for said in completions]
    return [float(sum(map(ord, said)) % 7) for said in words]


# For each task, what makes so many rows of its data
DATA = {
    "dpo": preference_data,
    "sft": prompt_completions,
    "reward": preference_data,
    "kto": unpaired,
    **dict.fromkeys(("grpo", "rloo", "distillation"), prompts),
}


def arguments(
    task: str,
    adapters: bool = True,
    model: Any = None,
    processor: Any = None,
    make: Callable[[int], Any] = lambda seed: make_model(seed=seed),
) -> dict[str, Any]:
    """Fresh arguments of the trainer of a task, but for data; `make` makes a reference or a teacher."""
    made = {"processing_class": processor or make_tokenizer()}
    made["model"] = model or (reward_model() if task == "reward" else make_model())
    torch.manual_seed(1)
    if adapters:
        head = {"task_type": "SEQ_CLS", "modules_to_save": ["score"]} if task == "reward" else {}
        made["peft_config"] = lora(**head)
    elif task in ("dpo", "kto"):
        made["ref_model"] = make(1)
    if task in ("grpo", "rloo"):
        made["reward_funcs"] = score
    if task == "distillation":
        made["teacher_model"] = make(1)
    return made
