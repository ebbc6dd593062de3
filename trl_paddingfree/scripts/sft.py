"""SFT of a model on instructions: padded, packed or padding-free. All options of `trl sft`, and this package's."""

from dataclasses import dataclass, field
from typing import Any

from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser

from ..configs import PaddingFreeSFTConfig
from ..noise import silence
from ..sft import PaddingFreeSFTTrainer
from .training import train


@dataclass
class SFTScriptArguments(ScriptArguments):
    """
    TRL's script arguments, and one switch over the ways to batch.

    Args:
        batch_method (`str`, *optional*):
            `"padding"`: TRL's padded batches. `"packing"`: documents packed into rows of `max_length` by
            `packing_strategy`. `"padding_free"`: the examples of each padded batch, without
            the padding. Defaults to what `packing` and `padding_free` say.
    """

    batch_method: str | None = field(
        default=None,
        metadata={
            "help": "One switch over `packing` and `padding_free`.",
            "choices": ["padding", "packing", "padding_free"],
        },
    )


def make_parser(prog: str | None = None) -> TrlParser:
    """The parser of the script's options."""
    types: list[Any] = [SFTScriptArguments, PaddingFreeSFTConfig, ModelConfig, DatasetMixtureConfig]
    return TrlParser(types, prog=prog)


def main(args: list[str] | None = None, strict: bool = True) -> None:
    """
    Run the script.

    Args:
        args (`list[str]`, *optional*):
            Command line. Defaults to that of the process.
        strict (`bool`, *optional*, defaults to `True`):
            Whether unknown options are an error. Under `trl-paddingfree` they are those of `accelerate launch`.
    """
    silence()
    parsed = make_parser().parse_args_and_config(args, fail_with_unknown_args=strict)
    script_args, training_args = parsed[:2]
    if training_args.packing and script_args.batch_method not in (None, "packing"):
        raise ValueError(
            f"`--packing true` and `--batch_method {script_args.batch_method}` contradict each other: leave one out."
        )
    if script_args.batch_method is not None:
        training_args.packing = script_args.batch_method == "packing"
        training_args.padding_free = script_args.batch_method != "padding"
    train(PaddingFreeSFTTrainer, *parsed)


if __name__ == "__main__":
    main(strict=False)
