"""GRPO without padding."""

from dataclasses import dataclass, replace

from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer

from ..core.trainers.configs import Arguments, PaddingFreeOptions
from .base import PROMPTS
from .composed import OnlineTrainer

logger = logging.get_logger(__name__)


@dataclass
class PaddingFreeGRPOConfig(PaddingFreeOptions, GRPOConfig):
    """TRL's [`~trl.GRPOConfig`] with the [`PaddingFreeOptions`]."""


class PaddingFreeGRPOTrainer(OnlineTrainer, GRPOTrainer):
    """
    TRL's [`~trl.GRPOTrainer`], computing real tokens only.

    Same arguments, same losses, metrics and gradients. With `padding_free=True`, policy and reference compute each
    batch of completions as one flat row without padding, in which the prompt of a group appears once. Generation is
    TRL's. `arrange_micro_batches="prefix"` brings the completions of one prompt together.
    See [`~trl_paddingfree.core.trainers.base.FlatTrainer`] for what it accepts and refuses.

    >>> from tempfile import mkdtemp
    >>> from datasets import Dataset
    >>> from trl_paddingfree import PaddingFreeGRPOConfig, PaddingFreeGRPOTrainer
    >>> from trl_paddingfree.cli.quickstart.model import make_model, make_tokenizer
    >>> tokenizer = make_tokenizer(["one two three eleven"])
    >>> args = PaddingFreeGRPOConfig(mkdtemp(), max_completion_length=4, use_cpu=True, bf16=False, report_to="none")
    >>> data = {"train_dataset": Dataset.from_list([{"prompt": "one two three"}] * 4), "processing_class": tokenizer}
    >>> model = make_model(tokenizer)  # or the name of one on the hub
    >>> reward = lambda completions, **kwargs: [float(len(text)) for text in completions]
    >>> trainer = PaddingFreeGRPOTrainer(model, reward, args, **data)
    >>> trainer.method
    'padding-free (segment, shared prefixes)'
    """

    task = replace(PROMPTS, name="grpo", found_by=(("prompt",),))
    trl_trainer, trl_config = GRPOTrainer, GRPOConfig
    config_class = PaddingFreeGRPOConfig
    changed_by_loss = ("entropy_coef", "_entropy_window_stats", "_last_world_entropy")

    def refuse_arguments(self, arguments: Arguments) -> None:
        super().refuse_arguments(arguments)
        if (quantile := arguments["args"].top_entropy_quantile) < 1:
            logger.warning(
                f"`top_entropy_quantile={quantile}`: all completions of a prompt have the same entropy at their first "
                "token. Where such a tie lies at the quantile, rounding decides which of these tokens train, with "
                "padding too."
            )

    def coupled_by_arguments(self, arguments: Arguments) -> list[str]:
        args = arguments["args"]
        options = {
            "loss_type": args.loss_type == "bnpo",  # a mean over the tokens of the micro-batch
            "top_entropy_quantile": args.top_entropy_quantile < 1,
            "entropy_coef": args.entropy_coef != 0,
            "use_adaptive_entropy": args.use_adaptive_entropy,
        }
        return [f"`{name}={vars(args)[name]!r}`" for name, is_so in options.items() if is_so]

    def coupled_by(self) -> list[str]:
        return [*self.coupled_by_arguments({"args": self.args}), *super().coupled_by()]
