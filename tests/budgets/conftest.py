"""What is trained within budgets."""

import pytest

from tests.helpers.memory import LAYERS
from tests.helpers.tiny import SEED, make_model, prompts, saved


@pytest.fixture(scope="session")
def folder(tokenizer, tmp_path_factory):
    """A folder with a Llama of a few layers and its tokenizer."""
    return saved(tmp_path_factory.mktemp("model"), make_model(num_hidden_layers=LAYERS), tokenizer)


@pytest.fixture(scope="session")
def data():
    """Prompts of very different lengths."""
    return prompts(16, SEED)
