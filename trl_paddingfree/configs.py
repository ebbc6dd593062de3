"""The options that this package adds to TRL's configurations."""

from dataclasses import dataclass, field

from trl import DPOConfig, SFTConfig


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
            How attention is computed over flat batches: `"auto"` picks the fastest exact way for the model, its
            `attn_implementation`, device and dtype; `"flash"`, `"varlen"`, `"segment"` and `"mask"` ask for one of
            them, which is then used or refused.
    """

    padding_free: bool = field(
        default=True,
        metadata={"help": "Whether to compute real tokens only. If `False`, the trainer is TRL's own."},
    )
    prefix_sharing: bool = field(
        default=True,
        metadata={"help": "Whether to compute a prefix that several rows of a micro-batch share once."},
    )
    flat_attention: str = field(
        default="auto",
        metadata={
            "help": "How attention is computed over flat batches: 'auto', 'flash', 'varlen', 'segment' or 'mask'.",
            "choices": ["auto", "flash", "varlen", "segment", "mask"],
        },
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
