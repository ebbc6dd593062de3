"""Options with values that they cannot have are refused when the configuration is made, with what to write."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from trl import DPOConfig, TrlParser

from tests.helpers.folders import needs
from tests.helpers.tiny import arguments, different_pairs, make_model, preference_data
from tests.runs import run
from trl_paddingfree import PaddingFreeDPOConfig, PaddingFreeDPOTrainer, PaddingFreeSFTConfig
from trl_paddingfree.core.trainers import values
from trl_paddingfree.core.trainers.configs import PaddingFreeOptions, refuse_wrong_options, train_where_one_can
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


# Options that need a number or a truth value, what they are given, and what is said
QUOTED = {
    "max_length": ("512", "is a string, and must be a whole number: write `max_length=512`."),
    "learning_rate": ("1e-4", "is a string, and must be a number: write `learning_rate=1e-4`."),
    "beta": ("a", "is a string, and must be a number."),
    "max_steps": (3.0, "must be a whole number: write `max_steps=3`."),
    "bf16": ("no", "is a string, and must be `True` or `False`, without quotes."),
    "use_cpu": ("true", "is a string, and must be `True` or `False`, without quotes."),
}


@pytest.mark.parametrize("name", QUOTED)
def test_strings_in_place_of_numbers_are_refused_when_the_configuration_is_made_or_the_trainer(name):
    value, message = QUOTED[name]
    said = re.escape(f"`{name}={value!r}` {message}")
    with pytest.raises(ValueError, match=said):
        PaddingFreeDPOConfig(**{**COMMON, name: value})
    config = DPOConfig(**COMMON)
    setattr(config, name, value)
    with pytest.raises(ValueError, match=said):
        PaddingFreeDPOTrainer(model=make_model(), args=config, train_dataset=preference_data(4, 0))


# Task, option, a value just outside of its range, one at its end, and what is said
OUTSIDE = [
    ("dpo", "learning_rate", -1e-5, 0.0, "at least 0."),
    ("dpo", "learning_rate", float("nan"), 0.0, "at least 0."),
    ("dpo", "beta", -0.1, 0.0, "at least 0."),
    ("kto", "undesirable_weight", -1.0, 0.0, "at least 0."),
    ("reward", "center_rewards_coefficient", -0.1, 0.0, "at least 0."),
    ("sft", "num_train_epochs", -1, 0, "at least 0."),
    ("sft", "dataloader_num_workers", -1, 0, "at least 0."),
    ("sft", "pad_to_multiple_of", 0, 1, "at least 1."),
    ("sft", "max_length", 1, 2, "at least 2."),
    ("dpo", "label_smoothing", 2.0, 1.0, "a number from 0 to 1."),
    ("dpo", "discopop_tau", 0.0, 1e-9, "more than 0."),
    ("dpo", "adam_beta1", 1.0, 0.0, "at least 0 and less than 1."),
    ("dpo", "seed", -1, 2**32 - 1, "a whole number from 0 to 4294967295."),
    ("grpo", "temperature", 0.0, 1e-9, "more than 0."),
    ("rloo", "top_p", 1.5, 1.0, "more than 0 and at most 1."),
    ("grpo", "num_iterations", 0, 1, "at least 1."),
]


@pytest.mark.parametrize(("task", "name", "outside", "end", "said"), OUTSIDE, ids=lambda value: str(value))
def test_numbers_outside_of_their_range_are_refused_when_the_configuration_is_made(task, name, outside, end, said):
    make = TRAINERS[task].config_class
    with pytest.raises(ValueError, match=re.escape(f"`{name}={outside!r}` must be {said}") + "$"):
        make(**COMMON, **{name: outside})
    assert vars(make(**COMMON, **{name: end}))[name] == end


def test_defaults_of_every_configuration_lie_in_their_ranges():
    """Which also names options that no configuration has any more."""
    known = set()
    for trainer in TRAINERS.values():
        for config_class in (trainer.config_class, trainer.trl_config):
            refuse_wrong_options(config_class(**COMMON))
            known |= config_class.__dataclass_fields__.keys()
    assert {name for _, _, names in values._RANGES for name in names} <= known
    assert {*values.DOCUMENTED} <= known


# Option, a word or truth value that it does not know, and what is said
UNKNOWN = [
    ("dpo", "truncation_mode", "keep", "one of 'keep_end', 'keep_start'."),
    (
        "sft",
        "train_sampling_strategy",
        "group_by_lenght",
        "one of 'random', .*. Did you mean `train_sampling_strategy='group_by_length'`?",
    ),
    ("sft", "packing_strategy", "bf", "one of 'bfd', 'bfd_split', 'wrapped'."),
    ("sft", "save_strategy", False, "one of 'no', 'steps', 'epoch', 'best'. Write `save_strategy='no'`, in quotes."),
    ("sft", "lr_scheduler_type", "cosin", "one of .*. Did you mean `lr_scheduler_type='cosine'`?"),
]


@pytest.mark.parametrize(("task", "name", "value", "said"), UNKNOWN, ids=lambda value: str(value))
def test_words_that_an_option_does_not_know_are_refused_when_the_configuration_is_made(task, name, value, said):
    said = re.escape(said).replace(re.escape(".*"), ".*")
    with pytest.raises(ValueError, match=re.escape(f"`{name}={value!r}` must be ") + said):
        TRAINERS[task].config_class(**COMMON, **{name: value})


def test_padded_trl_learns_what_was_rejected_with_a_negative_beta_and_logs_that_it_does_well():
    """Why `beta=-0.1` is refused: TRL trains on it."""
    given = {**arguments("dpo", False), "train_dataset": different_pairs(8, 0), "steps": 8}
    trained = {beta: run("dpo", "padded", **{**given, "model": make_model()}, beta=beta) for beta in (0.1, -0.1)}
    for beta, found in trained.items():
        first, *_, last = (entry for entry in found.log_history if "loss" in entry)
        assert last["rewards/margins"] > first["rewards/margins"]
        # A margin is `beta` times how much more likely the chosen answer has become than the rejected one
        assert (last["rewards/margins"] / beta > first["rewards/margins"] / beta) == (beta > 0)


def test_no_epochs_are_named_and_train_nothing_as_in_trl(caplog):
    for layout in ("padded", "ours"):
        caplog.clear()
        trained = run("sft", layout, num_train_epochs=0, max_steps=-1)
        assert trained.trainer.state.global_step == 0
        said = [
            message for message in caplog.messages if message.startswith("`num_train_epochs=0` without `max_steps`")
        ]
        assert len(said) == (layout == "ours")


def test_every_option_that_counts_or_measures_refuses_strings_in_every_configuration():
    for trainer in TRAINERS.values():
        numbers = [
            name
            for name, value in vars(trainer.config_class(**COMMON)).items()
            if type(value) in (int, float, bool) and name in trainer.config_class.__dataclass_fields__
        ]
        assert len(numbers) > 50
        for name in numbers:
            with pytest.raises(ValueError, match=f"`{name}='x'`"):
                trainer.config_class(**{**COMMON, name: "x"})


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


def test_steps_of_nothing_are_refused_before_anything_is_loaded():
    for size in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        with pytest.raises(ValueError, match=f"`{size}=0` must be at least 1"):
            PaddingFreeDPOConfig(**COMMON, **{size: 0})


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
