"""The options that this package adds to TRL's configurations."""

import logging
import warnings
from dataclasses import dataclass, field
from difflib import get_close_matches
from numbers import Integral
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from transformers import TrainingArguments
from trl import DPOConfig, GRPOConfig, KTOConfig, RewardConfig, RLOOConfig, SFTConfig

from ..model.backends import BackendName

SHARING = "Whether to compute a prefix that several rows of a micro-batch share once."


def silence() -> None:
    """Silence warnings about names that TRL calls and transformers has renamed, and about kernels nobody asked for."""
    warnings.filterwarnings("ignore", message=".*checkpointing.* is deprecated", category=FutureWarning)
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def refuse_wrong_options(config: Any) -> None:
    """
    Refuse values that options of this package cannot have, in a configuration of ours or of TRL's, naming what to write
    in their place. Annotations say which: `bool` allows `True` and `False`, `int` whole numbers from 1, `Literal` its
    words, and a union what any of its members allows.
    """
    values = vars(config)
    if isinstance(config, PaddingFreeOptions):
        config.memory_budget = checked_budget(config.memory_budget)
    for name, hint in get_type_hints(PaddingFreeOptions).items():
        if name not in values:  # TRL's own configurations have some of the options only
            continue
        kinds, value = _kinds(hint), values[name]
        if not any(_allows(kind, value) for kind in kinds):
            expected = " or ".join(_description(kind) for kind in kinds)
            raise ValueError(f"`{name}={value!r}` must be {expected}.{_suggestion(name, value, kinds)}")


def _kinds(hint: Any) -> list[Any]:
    """The members of a union, or the type itself; literals in one tuple of words."""
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return [get_args(member) if get_origin(member) is Literal else member for member in members]


def _allows(kind: Any, value: Any) -> bool:
    if isinstance(kind, tuple):
        return isinstance(value, str) and value in kind
    if kind is int:
        return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1
    return isinstance(value, kind)


def _description(kind: Any) -> str:
    if isinstance(kind, tuple):
        return ("one of " if len(kind) > 1 else "") + ", ".join(map(repr, kind))
    return {bool: "`True` or `False`", int: "a whole number of at least 1", NoneType: "`None`"}[kind]


def _suggestion(name: str, value: Any, kinds: list[Any]) -> str:
    """What the user may have meant."""
    words = [word for kind in kinds if isinstance(kind, tuple) for word in kind]
    meant: list[Any] = get_close_matches(str(value).lower(), words, n=1, cutoff=0.5)
    text = str(value).strip().lower()
    if bool in kinds and text in ("true", "false", "1", "0"):
        meant = [text in ("true", "1")]
    elif int in kinds and isinstance(value, str | float) and text.removesuffix(".0").isdigit() and int(float(text)):
        meant = [int(float(text))]
    elif NoneType in kinds and (isinstance(value, int | float) or text in ("none", "")):
        return f" Leave `{name}` out for none."
    return f" Did you mean `{name}={meant[0]!r}`?" if meant else ""


def checked_budget(budget: float | str | None) -> float | str | None:
    """`memory_budget` as a number, `"auto"` or `None`; a command line gives numbers as strings."""
    if budget is None or budget == "auto":
        return budget
    try:
        gib = 0.0 if isinstance(budget, bool) else float(budget)
    except (TypeError, ValueError):
        gib = 0.0
    if not 0 < gib < float("inf"):
        raise ValueError(f"`memory_budget={budget!r}` must be a positive number of GiB, 'auto', or left out.")
    return gib


def option(default: Any, meaning: str) -> Any:
    """A field of a configuration: the command line takes it, and says what it means."""
    return field(default=default, metadata={"help": meaning})


@dataclass
class PaddingFreeOptions:
    """
    Options of padding-free training, shared by all trainers; each field says what it means, and a value that its type
    does not allow raises a `ValueError`.

    >>> from dataclasses import dataclass
    >>> from trl import DPOConfig
    >>> from trl_paddingfree import PaddingFreeOptions
    >>> @dataclass
    ... class OwnConfig(PaddingFreeOptions, DPOConfig):
    ...     pass
    >>> config = OwnConfig(output_dir="out", bf16=False, report_to="none", memory_budget=20)
    >>> config.memory_budget, config.beta
    (20.0, 0.1)
    """

    padding_free: bool = option(
        True,
        "Whether to compute real tokens only. If `False`, the trainer pads as TRL's does, and differs from it in "
        "checkpoints only: half-written ones are refused, and weights are loaded by name.",
    )
    prefix_sharing: bool = option(True, SHARING)
    flat_attention: Literal["auto", BackendName] = option(
        "auto",
        "How attention is computed over flat batches. 'auto' takes the fastest way for the model, its "
        "`attn_implementation`, device and dtype that the start-up check finds exact; the name of a backend asks for "
        "it, which is then used or refused.",
    )
    arrange_micro_batches: Literal["none", "tokens", "prefix"] = option(
        "none",
        "Which examples of an optimizer step share a micro-batch. 'none': as the sampler draws them. 'tokens': every "
        "micro-batch gets about the same work, so that processes do not wait for each other. 'prefix': examples that "
        "start alike meet, so that more is shared. The examples of each step, and their weights, stay the same.",
    )
    max_tokens_per_micro_batch: int | None = option(
        None,
        "Most tokens to compute at once in training. A larger micro-batch runs in as many parts as needed, with the "
        "same loss and gradients, so that no batch of long examples runs out of memory.",
    )
    oversized_examples: Literal["error", "alone"] = option(
        "error",
        "What to do with an example of more than `max_tokens_per_micro_batch` tokens: 'error' refuses to start, "
        "and examples of streaming data when they come; 'alone' runs it by itself.",
    )
    memory_budget: float | str | None = option(
        None,
        "GiB that training may use on each device; 'auto': what other processes leave of it, less a tenth. With it "
        "each micro-batch recomputes the activations of only as many layers as it must, and one that does not fit even "
        "so runs in parts, with the same loss and gradients. `gradient_checkpointing` is then not read. Without it, "
        "activations are kept or recomputed as TRL does it.",
    )

    sequence_parallel_size: int = option(
        1,
        "How many processes compute each micro-batch together, each a slice of its tokens, so that rows may be longer "
        "by that much. Has to divide the processes; `per_device_train_batch_size` then counts for each group of them. "
        "DPO and SFT only.",
    )

    @property
    def has_budget(self) -> bool:
        """Whether steps keep within a budget of memory or of tokens."""
        return self.memory_budget is not None or self.max_tokens_per_micro_batch is not None

    @property
    def most_tokens_of_example(self) -> int | None:
        """The tokens above which an example is an error; `None` if it is not."""
        return self.max_tokens_per_micro_batch if self.oversized_examples == "error" else None

    def __post_init__(self):
        silence()
        refuse_wrong_options(self)
        if isinstance(self, TrainingArguments):  # mixed in before one of TRL's configurations
            super().__post_init__()  # type: ignore[misc]


@dataclass
class PaddingFreeDPOConfig(PaddingFreeOptions, DPOConfig):
    """
    TRL's [`~trl.DPOConfig`] with the [`PaddingFreeOptions`].

    >>> PaddingFreeDPOConfig(output_dir="out", bf16=False, report_to="none").prefix_sharing
    True
    """


@dataclass
class PaddingFreeSFTConfig(PaddingFreeOptions, SFTConfig):
    """
    TRL's [`~trl.SFTConfig`] with the [`PaddingFreeOptions`]. `prefix_sharing` defaults to `False`.

    >>> config = PaddingFreeSFTConfig(output_dir="out", bf16=False, report_to="none", max_length=512)
    >>> config.padding_free, config.prefix_sharing, config.max_length
    (True, False, 512)
    """

    prefix_sharing: bool = option(False, SHARING)


@dataclass
class PaddingFreeRewardConfig(PaddingFreeOptions, RewardConfig):
    """
    TRL's [`~trl.RewardConfig`] with the [`PaddingFreeOptions`].

    >>> PaddingFreeRewardConfig(output_dir="out", bf16=False, report_to="none").prefix_sharing
    True
    """


@dataclass
class PaddingFreeKTOConfig(PaddingFreeOptions, KTOConfig):
    """
    TRL's [`~trl.KTOConfig`] with the [`PaddingFreeOptions`].

    >>> config = PaddingFreeKTOConfig(output_dir="out", bf16=False, report_to="none")
    >>> config.padding_free, config.prefix_sharing, config.train_sampling_strategy
    (True, True, 'sequential')
    """


@dataclass
class PaddingFreeGRPOConfig(PaddingFreeOptions, GRPOConfig):
    """
    TRL's [`~trl.GRPOConfig`] with the [`PaddingFreeOptions`].

    >>> config = PaddingFreeGRPOConfig(output_dir="out", bf16=False, report_to="none", arrange_micro_batches="prefix")
    >>> config.padding_free, config.prefix_sharing, config.num_generations
    (True, True, 8)
    """


@dataclass
class PaddingFreeRLOOConfig(PaddingFreeOptions, RLOOConfig):
    """
    TRL's [`~trl.RLOOConfig`] with the [`PaddingFreeOptions`].

    >>> config = PaddingFreeRLOOConfig(output_dir="out", bf16=False, report_to="none")
    >>> config.padding_free, config.prefix_sharing, config.num_generations
    (True, True, 2)
    """
