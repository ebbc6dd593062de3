"""DPO of a model on preference pairs, without padding. All options of `trl dpo`, and this package's."""

from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser

from ..configs import PaddingFreeDPOConfig
from ..dpo import PaddingFreeDPOTrainer
from .training import train


def main(args: list[str] | None = None) -> None:
    """
    Run the script.

    Args:
        args (`list[str]`, *optional*):
            Command line. Defaults to that of the process.
    """
    parser = TrlParser((ScriptArguments, PaddingFreeDPOConfig, ModelConfig, DatasetMixtureConfig))  # type: ignore[arg-type]
    train(PaddingFreeDPOTrainer, *parser.parse_args_and_config(args))


if __name__ == "__main__":
    main()
