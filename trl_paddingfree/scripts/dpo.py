"""DPO of a model on preference pairs, without padding. All options of `trl dpo`, and this package's."""

from typing import Any

from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser

from ..configs import PaddingFreeDPOConfig
from ..dpo import PaddingFreeDPOTrainer
from ..noise import silence
from .training import train


def make_parser(prog: str | None = None) -> TrlParser:
    """The parser of the script's options."""
    types: list[Any] = [ScriptArguments, PaddingFreeDPOConfig, ModelConfig, DatasetMixtureConfig]
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
    train(PaddingFreeDPOTrainer, *make_parser().parse_args_and_config(args, fail_with_unknown_args=strict))


if __name__ == "__main__":
    main(strict=False)
