"""What is left without any capability: text SFT and DPO train what padded TRL trains."""

from functools import partial

import pytest

from tests.helpers.tiny import DATA, SEED, arguments
from tests.runs import LAYOUTS, compare


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("task", ["dpo", "sft"])
def test_text_trains_as_with_padding(task, layout):
    compare(task, partial(arguments, task), DATA[task](12, SEED), layout)
