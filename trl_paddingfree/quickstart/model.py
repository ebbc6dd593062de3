"""A small model from scratch, with a tokenizer of its own: nothing to download."""

from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(texts: Iterable[str], vocab_size: int = 2048) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a chat template, trained on `texts`."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = {"pad_token": "<|endoftext|>", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    options: dict[str, Any] = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[*special.values()], **options)
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=CHAT_TEMPLATE, **special)


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0, **sizes: Any) -> LlamaForCausalLM:
    """A Llama with random weights: about 2 million, unless `sizes` set fields of [`~transformers.LlamaConfig`]."""
    set_seed(seed)
    fields: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "initializer_range": 0.06,  # 1 / sqrt(hidden_size): few steps have to do
        **sizes,
    }
    return LlamaForCausalLM(LlamaConfig(**fields))
