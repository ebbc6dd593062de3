"""The options that this package adds to TRL's configurations."""

from dataclasses import dataclass, field
from typing import Literal

from trl import DPOConfig, GRPOConfig, KTOConfig, RewardConfig, RLOOConfig, SFTConfig

from ..model.backends import BackendName
from .quiet import silence


@dataclass
class PaddingFreeOptions:
    """
    Options of padding-free training, shared by all trainers.

    Args:
        padding_free (`bool`, *optional*, defaults to `True`):
            Whether to compute real tokens only. If `False`, the trainer is TRL's own.
        prefix_sharing (`bool`, *optional*):
            Whether to compute a prefix that several rows of a micro-batch share once. Defaults to `True` for DPO and
            `False` for SFT.
        flat_attention (`str`, *optional*, defaults to `"auto"`):
            How attention is computed over flat batches: `"auto"` takes the fastest way for the model, its
            `attn_implementation`, device and dtype that the start-up check finds exact; `"flash"`, `"varlen"`,
            `"segment"`, `"positions"` and `"mask"` ask for one of them, which is then used or refused.
        arrange_micro_batches (`str`, *optional*, defaults to `"none"`):
            Which examples of an optimizer step share a micro-batch. `"none"`: as the sampler draws them. `"tokens"`:
            every micro-batch gets about the same work, so that processes do not wait for each other. `"prefix"`:
            examples that start alike meet, so that more is shared. The examples of each step, and their weights, stay
            the same.
        max_tokens_per_micro_batch (`int`, *optional*):
            Most tokens to compute at once in training. A larger micro-batch runs in as many parts as needed, with the
            same loss and gradients, so that no batch of long examples runs out of memory.
        oversized_examples (`str`, *optional*, defaults to `"error"`):
            What to do with an example of more than `max_tokens_per_micro_batch` tokens: `"error"` refuses to start,
            `"alone"` runs it by itself.
    """

    padding_free: bool = field(
        default=True,
        metadata={"help": "Whether to compute real tokens only. If `False`, the trainer is TRL's own."},
    )
    prefix_sharing: bool = field(
        default=True,
        metadata={"help": "Whether to compute a prefix that several rows of a micro-batch share once."},
    )
    flat_attention: Literal["auto", BackendName] = field(
        default="auto",
        metadata={"help": "The backend that computes attention over flat batches."},
    )
    arrange_micro_batches: Literal["none", "tokens", "prefix"] = field(
        default="none",
        metadata={
            "help": "Which examples of an optimizer step share a micro-batch: as drawn ('none'), about the same work "
            "in each ('tokens'), or those that start alike ('prefix').",
        },
    )
    max_tokens_per_micro_batch: int | None = field(
        default=None,
        metadata={"help": "Most tokens to compute at once in training: larger micro-batches run in parts."},
    )
    oversized_examples: Literal["error", "alone"] = field(
        default="error",
        metadata={"help": "What to do with an example above `max_tokens_per_micro_batch`: 'error' or run it 'alone'."},
    )


@dataclass
class PaddingFreeDPOConfig(PaddingFreeOptions, DPOConfig):
    """
    TRL's [`~trl.DPOConfig`] with the [`PaddingFreeOptions`].

    Examples:
    ```python
    >>> from trl_paddingfree import PaddingFreeDPOConfig
    >>> config = PaddingFreeDPOConfig(output_dir="out", bf16=False, report_to="none")
    >>> config.padding_free, config.prefix_sharing
    (True, True)

    ```
    """

    def __post_init__(self):
        silence()
        super().__post_init__()


@dataclass
class PaddingFreeSFTConfig(PaddingFreeOptions, SFTConfig):
    """
    TRL's [`~trl.SFTConfig`] with the [`PaddingFreeOptions`]. `prefix_sharing` defaults to `False`.

    Examples:
    ```python
    >>> from trl_paddingfree import PaddingFreeSFTConfig
    >>> config = PaddingFreeSFTConfig(output_dir="out", bf16=False, report_to="none", max_length=512)
    >>> config.padding_free, config.prefix_sharing, config.max_length
    (True, False, 512)

    ```
    """

    prefix_sharing: bool = field(
        default=False,
        metadata={"help": "Whether to compute a prefix that several rows of a micro-batch share once."},
    )

    def __post_init__(self):
        silence()
        super().__post_init__()


@dataclass
class PaddingFreeRewardConfig(PaddingFreeOptions, RewardConfig):
    """
    TRL's [`~trl.RewardConfig`] with the [`PaddingFreeOptions`].

    Examples:
    ```python
    >>> from trl_paddingfree import PaddingFreeRewardConfig
    >>> config = PaddingFreeRewardConfig(output_dir="out", bf16=False, report_to="none")
    >>> config.padding_free, config.prefix_sharing
    (True, True)

    ```
    """

    def __post_init__(self):
        silence()
        super().__post_init__()


@dataclass
class PaddingFreeKTOConfig(PaddingFreeOptions, KTOConfig):
    """
    TRL's [`~trl.KTOConfig`] with the [`PaddingFreeOptions`].

    Examples:
    ```python
    >>> from trl_paddingfree import PaddingFreeKTOConfig
    >>> config = PaddingFreeKTOConfig(output_dir="out", bf16=False, report_to="none")
    >>> config.padding_free, config.prefix_sharing, config.train_sampling_strategy
    (True, True, 'sequential')

    ```
    """

    def __post_init__(self):
        silence()
        super().__post_init__()


@dataclass
class PaddingFreeGRPOConfig(PaddingFreeOptions, GRPOConfig):
    """
    TRL's [`~trl.GRPOConfig`] with the [`PaddingFreeOptions`].

    Examples:
    ```python
    >>> from trl_paddingfree import PaddingFreeGRPOConfig
    >>> config = PaddingFreeGRPOConfig(output_dir="out", bf16=False, report_to="none", arrange_micro_batches="prefix")
    >>> config.padding_free, config.prefix_sharing, config.num_generations
    (True, True, 8)

    ```
    """

    def __post_init__(self):
        silence()
        super().__post_init__()


@dataclass
class PaddingFreeRLOOConfig(PaddingFreeOptions, RLOOConfig):
    """
    TRL's [`~trl.RLOOConfig`] with the [`PaddingFreeOptions`].

    Examples:
    ```python
    >>> from trl_paddingfree import PaddingFreeRLOOConfig
    >>> config = PaddingFreeRLOOConfig(output_dir="out", bf16=False, report_to="none")
    >>> config.padding_free, config.prefix_sharing, config.num_generations
    (True, True, 2)

    ```
    """

    def __post_init__(self):
        silence()
        super().__post_init__()
