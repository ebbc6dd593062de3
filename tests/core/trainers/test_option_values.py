"""Options with values that they cannot have are refused when the configuration is made, with what to write."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from trl import DPOConfig, TrlParser

from tests.helpers.folders import needs
from tests.helpers.tiny import make_model, preference_data
from trl_paddingfree import PaddingFreeDPOConfig, PaddingFreeDPOTrainer, PaddingFreeSFTConfig
from trl_paddingfree.core.trainers.configs import PaddingFreeOptions, train_where_one_can
from trl_paddingfree.registry import TRAINERS

COMMON = {"output_dir": "unused", "bf16": False, "report_to": "none", "use_cpu": True}
pytestmark = needs("arranging", "budgets")  # whose options have most of the values that can be wrong
MOST = "max_tokens_per_micro_batch"
WRONG = [
    (
        "arrange_micro_batches",
        "token",
        "one of 'none', 'tokens', 'prefix'. Did you mean `arrange_micro_batches='tokens'`?",
    ),
    ("arrange_micro_batches", None, "one of 'none', 'tokens', 'prefix'."),
    ("flat_attention", "flsh", "Did you mean `flat_attention='flash'`?"),
    ("flat_attention", True, "one of 'auto', 'flash'"),
    ("prefix_sharing", "false", "`True` or `False`."),
    ("prefix_sharing", 1, "`True` or `False`."),
    ("padding_free", "yes", "`True` or `False`."),
    (MOST, 0, "a whole number of at least 1 or `None`."),
    (MOST, True, "a whole number of at least 1 or `None`."),
    (MOST, "4096", "a whole number of at least 1 or `None`."),
    (MOST, 0.5, "a whole number of at least 1 or `None`."),
]


@pytest.mark.parametrize("config_class", [PaddingFreeDPOConfig, PaddingFreeSFTConfig, PaddingFreeOptions])
def test_wrong_values_are_refused_with_what_to_write(config_class):
    common = {} if config_class is PaddingFreeOptions else COMMON
    for name, value, message in WRONG:
        with pytest.raises(ValueError, match=re.escape(f"`{name}={value!r}` must be ") + ".*" + re.escape(message)):
            config_class(**common, **{name: value})


def test_every_option_has_a_type_that_is_checked():
    for name in vars(PaddingFreeOptions()):
        with pytest.raises(ValueError, match=f"`{name}=<object object"):
            PaddingFreeOptions(**{name: object()})


def test_right_values_are_kept():
    config = PaddingFreeSFTConfig(**COMMON, max_tokens_per_micro_batch=np.int64(7), flat_attention="mask")
    assert (config.max_tokens_per_micro_batch, config.flat_attention, config.prefix_sharing) == (7, "mask", False)


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [(PaddingFreeDPOConfig, "arrange_micro_batches", "token"), (DPOConfig, "padding_free", "false")],
)
def test_values_set_later_are_refused_by_the_trainer(make, name, value):
    config = make(**COMMON)
    setattr(config, name, value)
    with pytest.raises(ValueError, match=f"`{name}='{value}'` must be"):
        PaddingFreeDPOTrainer(model=make_model(), args=config, train_dataset=preference_data(4, 0))


def test_the_command_line_and_yaml_files_give_the_types(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("prefix_sharing: 'false'\nmax_tokens_per_micro_batch: '4096'\nbf16: false\nuse_cpu: true\n")
    parser = TrlParser([PaddingFreeDPOConfig])
    for words in (
        ["--prefix_sharing", "false", "--max_tokens_per_micro_batch", "4096", "--bf16", "false", "--use_cpu", "true"],
        ["--config", str(file)],
    ):
        (config,) = parser.parse_args_and_config(words)
        assert config.prefix_sharing is False
        assert config.max_tokens_per_micro_batch == 4096
    file.write_text("arrange_micro_batches: token\nbf16: false\nuse_cpu: true\n")
    with pytest.raises(ValueError, match="Did you mean `arrange_micro_batches='tokens'`"):
        parser.parse_args_and_config(["--config", str(file)])


@pytest.mark.parametrize(("found", "is_there"), [(None, False), ("mps", False), ("cuda", True)])
def test_without_an_accelerator_training_is_on_the_cpu_unless_something_else_was_asked_for(
    monkeypatch, found, is_there, tmp_path
):
    device = None if found is None else torch.device(found)
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available=False: device)
    chosen = SimpleNamespace(bf16=None, fp16=False, use_cpu=False)
    train_where_one_can(chosen)
    assert (chosen.use_cpu, chosen.bf16) == ((False, None) if is_there else (True, False))
    for trainer in TRAINERS.values():
        if not is_there:
            config = trainer.config_class(str(tmp_path))
            assert (config.use_cpu, config.bf16) == (True, False)
        asked = trainer.config_class(str(tmp_path), use_cpu=True)
        assert (asked.use_cpu, asked.bf16) == (True, True)  # as TRL has it
