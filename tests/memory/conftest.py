"""What is trained within budgets."""

import os

import pytest

from tests.helpers.memory import LAYERS
from tests.helpers.tiny import make_model, prompts


@pytest.fixture(scope="session")
def folder(tokenizer, tmp_path_factory):
    """A folder with a Llama of a few layers and its tokenizer."""
    path = tmp_path_factory.mktemp("model")
    make_model(num_hidden_layers=LAYERS).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def data():
    """Prompts of very different lengths."""
    return prompts(16, int(os.environ["TRL_PADDINGFREE_SEED"]))
