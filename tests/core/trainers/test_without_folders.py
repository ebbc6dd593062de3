"""What asks for a capability whose folder is not there is refused by its name, and nothing else changes."""

import pytest

from tests.helpers.folders import needs
from tests.helpers.tiny import DATA, make_model
from tests.runs import run
from trl_paddingfree import PaddingFreeSFTTrainer, capabilities
from trl_paddingfree.core.trainers.base import FlatTrainer

NEEDS = "`torch_compile=True` needs the folder `compiled` of trl_paddingfree"


@pytest.fixture(autouse=True)
def without_compiled(monkeypatch):
    is_there = capabilities.is_there
    monkeypatch.setattr(PaddingFreeSFTTrainer, "take_compiler", FlatTrainer.take_compiler)
    monkeypatch.setattr(capabilities, "is_there", lambda name: name != "compiled" and is_there(name))


def test_compilation_needs_its_folder():
    data = DATA["sft"](8, 0)
    with pytest.raises(ImportError, match=NEEDS):
        run("sft", "shared", steps=1, train_dataset=data, torch_compile=True)
    run("sft", "shared", steps=1, train_dataset=data)


@needs("anywhere")
def test_compilation_in_any_trainer_needs_its_folder():
    from trl_paddingfree import padding_free

    model = make_model()
    with pytest.raises(ImportError, match=NEEDS):
        padding_free(model, torch_compile=True)
    assert padding_free(model) is model
