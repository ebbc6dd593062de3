"""The options of the core, and how those of a capability join them: `configs.py` joins them."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from ..model.backends import BackendName

# A whole number of at least 0
Count = Annotated[int, 0]

SHARING = (
    "Compute a prefix once if several rows of a micro-batch start with it, and it is long enough to pay off: at least "
    "1/64 of a row's tokens, and over the batch, at least one token saved per 64 keys that sharing has to copy."
)


def option(default: object, meaning: str) -> Any:
    """
    A dataclass field that the command line offers as an option. Its help text is also its row on the page of options,
    which `scripts/option_table.py` writes. Its annotation defines what is valid: `bool` allows `True` and `False`,
    `int` whole numbers of at least 1, [`Count`] of at least 0, and `None` and the words of a `Literal` themselves.
    Other types are left to `check_values`.
    """
    return field(default=default, metadata={"help": meaning})


@dataclass
class CoreOptions:
    """
    The options of text SFT and DPO. A capability adds its own by an `options.py` with a dataclass `Options` that
    derives from this one: those that come last in the order of capabilities come first among the options.
    """

    padding_free: bool = option(
        True,
        "Compute real tokens only. With `False`, the trainer pads as TRL's does, and the log names options of this "
        "package that then have no effect. Such a trainer computes what TRL's does. It still refuses wrong values of "
        "options and half-written checkpoints, loads weights by name, trains on the CPU if there is no accelerator, "
        "and takes several answers per prompt.",
    )
    prefix_sharing: bool = option(True, SHARING)
    flat_attention: Literal["auto", BackendName] = option(
        "auto",
        "How to compute attention over flat batches. 'auto' takes the fastest way for the model, its "
        "`attn_implementation`, device and dtype that the start-up check finds exact. A backend that you name is used "
        "or refused.",
    )

    def check_values(self) -> None:
        """Refuse invalid values that annotations cannot tell, and convert those that a command line gives."""

    def for_padded_too(self) -> set[str]:
        """Names of options that the log does not call idle if the trainer pads."""
        return {"padding_free", "prefix_sharing"}  # the default of the second depends on the trainer
