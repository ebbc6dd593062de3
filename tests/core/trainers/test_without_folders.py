"""What asks for a capability whose folder is not there is refused by its name, and nothing else changes."""

import pytest

from tests.helpers.tiny import DATA, make_model
from tests.runs import run
from trl_paddingfree import capabilities, padding_free


@pytest.fixture
def without_compiled(monkeypatch):
    is_there = capabilities.is_there
    monkeypatch.setattr(capabilities, "is_there", lambda name: name != "compiled" and is_there(name))


def test_compilation_needs_its_folder(without_compiled):
    needs = "`torch_compile=True` needs the folder `compiled` of trl_paddingfree"
    with pytest.raises(ImportError, match=needs):
        run("sft", "shared", steps=1, train_dataset=DATA["sft"](8, 0), torch_compile=True)
    model = make_model()
    with pytest.raises(ImportError, match=needs):
        padding_free(model, torch_compile=True)
    assert padding_free(model) is model
    run("sft", "shared", steps=1, train_dataset=DATA["sft"](8, 0))
