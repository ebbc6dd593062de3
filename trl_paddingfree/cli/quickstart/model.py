"""A small model from scratch with a tokenizer of its own, and real text to train it on: nothing to download.

The text is Python's own documentation, which every installation has, as instruction rows and as preference pairs.
"""

import ast
import random
import sysconfig
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from datasets import Dataset
from tokenizers import ByteLevelBPETokenizer, Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Folders of the standard library that hold tests, applications or other people's packages
_LEFT_OUT = {"test", "tests", "idlelib", "idle_test", "lib2to3", "turtledemo", "site-packages", "dist-packages"}
# Fewest characters of a docstring that is used: shorter ones ("Return self.") say nothing
_SHORTEST = 20


def make_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most 2,048 tokens, trained on `texts`, with a chat template."""
    special = {"pad_token": "<|endoftext|>", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(texts, 2048, min_frequency=0, show_progress=False, special_tokens=[*special.values()])
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(trained.to_str()), chat_template=CHAT_TEMPLATE, **special
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0, **sizes: Any) -> LlamaForCausalLM:
    """A Llama with about 2 million random weights, unless `sizes` sets fields of [`~transformers.LlamaConfig`]."""
    set_seed(seed)
    fields = {
        "vocab_size": len(tokenizer),
        "tie_word_embeddings": True,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "initializer_range": 0.06,  # 1 / sqrt(hidden_size), with which it learns in few steps
    }
    return LlamaForCausalLM(LlamaConfig(**fields | sizes))


@cache
def questions() -> tuple[tuple[str, str], ...]:
    """
    Questions and answers about Python: on functions and classes of the standard library, answered by their docstrings,
    read from source, and on the language, answered by the texts of `help()`.
    """
    root = Path(sysconfig.get_path("stdlib"))
    found: list = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if _LEFT_OUT.isdisjoint(parts):
            found += _docstrings(ast.parse(path.read_bytes()), ".".join(parts).removesuffix(".__init__"))
    found += [(f"Explain “{topic}” in Python.", text.strip()) for topic, text in sorted(topics.items())]
    return tuple(found)


def _docstrings(tree: ast.Module | ast.ClassDef, module: str) -> Iterator[tuple[str, str]]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            name = f"{module}.{node.name}"
            signature = f"class {name}" if isinstance(node, ast.ClassDef) else f"def {name}({ast.unparse(node.args)})"
            docstring = ast.get_docstring(node) or ""
            if len(docstring) >= _SHORTEST:
                yield f"What does this do?\n\n{signature}", docstring
            if isinstance(node, ast.ClassDef):
                yield from _docstrings(node, name)


def instruction_data(seed: int = 0) -> Dataset:
    """All questions with their answers as TRL's prompt-completion rows, in random order."""
    rows = [
        {
            "prompt": [{"role": "user", "content": question}],
            "completion": [{"role": "assistant", "content": answer}],
        }
        for question, answer in questions()
    ]
    random.Random(seed).shuffle(rows)
    return Dataset.from_list(rows)


def preference_data(seed: int = 0) -> Dataset:
    """The questions as preference pairs: each one's own answer against the answer to another."""
    pairs = instruction_data(seed).rename_column("completion", "chosen")
    half = len(pairs) // 2  # far apart, so that no answer is preferred in one pair of a sample and rejected in another
    return pairs.add_column("rejected", pairs["chosen"][half:] + pairs["chosen"][:half])
