"""RLOO without padding."""

from dataclasses import dataclass, replace

from trl import RLOOConfig, RLOOTrainer

from ..core.trainers.configs import PaddingFreeOptions
from .base import PROMPTS
from .composed import OnlineTrainer


@dataclass
class PaddingFreeRLOOConfig(PaddingFreeOptions, RLOOConfig):
    """TRL's [`~trl.RLOOConfig`] with the [`PaddingFreeOptions`]."""


class PaddingFreeRLOOTrainer(OnlineTrainer, RLOOTrainer):
    """
    TRL's [`~trl.RLOOTrainer`], computing real tokens only.

    Same arguments, same losses, metrics and gradients. With `padding_free=True`, policy and reference compute each
    batch of completions as one flat row without padding, in which the prompt of a group appears once. Generation is
    TRL's. `arrange_micro_batches="prefix"` brings the completions of one prompt together.
    See [`~trl_paddingfree.core.trainers.base.FlatTrainer`] for what it accepts and refuses.

    >>> from tempfile import mkdtemp
    >>> from datasets import Dataset
    >>> from peft import LoraConfig
    >>> from trl_paddingfree import PaddingFreeOptions, PaddingFreeRLOOTrainer
    >>> from trl_paddingfree.cli.quickstart.model import make_model, make_tokenizer
    >>> tokenizer = make_tokenizer(["one two three eleven"])
    >>> args = PaddingFreeRLOOConfig(mkdtemp(), max_completion_length=4, use_cpu=True, bf16=False, report_to="none")
    >>> data = {"train_dataset": Dataset.from_list([{"prompt": "one two three"}] * 4), "processing_class": tokenizer}
    >>> model = make_model(tokenizer)  # or the name of one on the hub
    >>> reward = lambda completions, **kwargs: [float(len(text)) for text in completions]
    >>> trainer = PaddingFreeRLOOTrainer(model, reward, args, **data, peft_config=LoraConfig())
    >>> trainer.method
    'padding-free (segment, shared prefixes)'
    """

    task = replace(PROMPTS, name="rloo")
    trl_trainer, trl_config = RLOOTrainer, RLOOConfig
    config_class = PaddingFreeRLOOConfig
