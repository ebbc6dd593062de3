"""What the tests train: a tokenizer, models and data small enough for a laptop, made on the spot."""

import random
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

WORDS = [f"w{i}" for i in range(60)]
# Blocks of generation end with a token: one that ended with a space would be taken to reach to the end of the text
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|> {{ message['role'] }} "
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }} <|im_end|>{% endgeneration %} "
    "{% else %}{{ message['content'] }} <|im_end|> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer with a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    specials = ["<pad>", "<|im_start|>", "<|im_end|>", "<eos>", "<unk>"]
    vocabulary = {token: i for i, token in enumerate([*specials, "system", "user", "assistant", "tool", *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
    )


def make_model(model_type: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0, **overrides):
    """A random model of a few layers. Weights are larger than usual, so that a wrong context shows in the loss."""
    torch.manual_seed(seed)
    sizes = {
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
    config = AutoConfig.for_model(model_type, **{**sizes, **overrides})
    return AutoModelForCausalLM.from_config(config).to(dtype)


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


def text(rng: random.Random, low: int, high: int) -> str:
    """Some words; possibly none."""
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(low, high)))


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
