"""What is trained within budgets."""

import os

import pytest
from trl_paddingfree.memory.budget import Budget

from tests.helpers.memory import LAYERS, generating, least_room
from tests.helpers.tiny import make_model, prompts
from tests.runs import run


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


@pytest.fixture(scope="session")
def with_room(data):
    """A budget in GiB with which GRPO runs in parts."""
    return least_room(run("grpo", "shared", **generating(), train_dataset=data, memory_budget=8, steps=1).trainer)


@pytest.fixture
def parts_made(monkeypatch):
    """How many parts each pass that trains ran in."""
    made, divided = [], Budget.decide

    def watch(*args, **kwargs):
        batch = divided(*args, **kwargs)
        made.append(max(len(batch.parts), 1))
        return batch

    monkeypatch.setattr(Budget, "decide", watch)
    return made
