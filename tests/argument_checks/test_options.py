"""Values that options of TRL cannot have are refused when the configuration is made, with what to write."""

import re

import pytest
from trl import DPOConfig

from tests.helpers.tiny import arguments, different_pairs, make_model, preference_data
from tests.runs import run
from trl_paddingfree import PaddingFreeDPOConfig, PaddingFreeDPOTrainer
from trl_paddingfree.argument_checks import values
from trl_paddingfree.argument_checks.values import refuse_wrong_values
from trl_paddingfree.registry import TRAINERS

COMMON = {"output_dir": "unused", "bf16": False, "report_to": "none", "use_cpu": True}
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
            refuse_wrong_values(config_class(**COMMON))
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


@pytest.mark.filterwarnings("ignore:The `bfd-requeue` packing strategy")
def test_a_word_that_trl_has_renamed_is_taken():
    config = TRAINERS["sft"].config_class(**COMMON, packing=True, packing_strategy="bfd-requeue")
    assert config.packing_strategy == "bfd_split"


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
