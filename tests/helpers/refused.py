"""Trainers that are refused, and what they are given."""

from tests.helpers.tiny import arguments, make_tokenizer
from tests.runs import make_trainer


def build(task="dpo", **given):
    """A trainer of ours, by default of adapters."""
    return make_trainer(task, "ours", **{**arguments(task), **given})


def without(*tokens):
    """A tokenizer without some of its special tokens."""
    tokenizer = make_tokenizer()
    for token in tokens:
        setattr(tokenizer, token, None)
    return tokenizer
