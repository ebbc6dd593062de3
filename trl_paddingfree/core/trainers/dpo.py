"""DPO without padding."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from trl import DPOConfig, DPOTrainer

from .. import upstream
from ..data.collate import PreferenceCollator
from ..data.lengths import truncated
from ..data.task import Task
from ..flat.batch import Inputs
from .composed import CollatedTrainer
from .configs import Arguments, PaddingFreeOptions
from .runtime import when_flat

DPO = Task(
    name="dpo",
    unit="pairs",
    found_by=(("chosen", "rejected"),),
    sequences=(("prompt_ids", "chosen_ids"), ("prompt_ids", "rejected_ids")),
    reads=("chosen", "rejected", "ref_chosen_logps", "ref_rejected_logps"),
    collator=PreferenceCollator,
    prepare=upstream.preparation(DPOTrainer, DPOConfig),
)


# Losses of one pair after the other. AOT sorts the micro-batch, SFT is a mean over its tokens, and what TRL adds may be
# of either kind
_PER_PAIR = frozenset(
    (
        *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero", "apo_down"),
        *("discopop", "sigmoid_norm"),
    )
)


def _coupled(losses: Sequence[str]) -> list[str]:
    """Those of the losses that may couple the pairs of a micro-batch."""
    return [f"`loss_type='{name}'`" for name in losses if name not in _PER_PAIR]


@dataclass
class PaddingFreeDPOConfig(PaddingFreeOptions, DPOConfig):
    """TRL's [`~trl.DPOConfig`] with the [`PaddingFreeOptions`]."""


class PaddingFreeDPOTrainer(CollatedTrainer, DPOTrainer):
    """
    TRL's [`~trl.DPOTrainer`], computing real tokens only.

    Same arguments, same losses, metrics and gradients. With `padding_free=True`, the model computes each micro-batch as
    one flat row without padding, in which prompts shared by chosen and rejected sequences appear once.
    See [`~trl_paddingfree.core.trainers.base.FlatTrainer`] for what it accepts and refuses.

    >>> from tempfile import mkdtemp
    >>> from datasets import Dataset
    >>> from peft import LoraConfig
    >>> from trl_paddingfree import PaddingFreeDPOConfig, PaddingFreeDPOTrainer
    >>> from trl_paddingfree.cli.quickstart.model import make_model, make_tokenizer
    >>> dataset = Dataset.from_list([{"prompt": "one two", "chosen": " three", "rejected": " eleven"}] * 4)
    >>> tokenizer = make_tokenizer(["one two three eleven"])
    >>> args = PaddingFreeDPOConfig(mkdtemp(), use_cpu=True, bf16=False, report_to="none")
    >>> model = make_model(tokenizer)  # or the name of one on the hub
    >>> data = {"train_dataset": dataset, "processing_class": tokenizer}
    >>> trainer = PaddingFreeDPOTrainer(model, args=args, **data, peft_config=LoraConfig())
    >>> trainer.method
    'padding-free (segment, shared prefixes)'
    """

    task = DPO
    trl_trainer, trl_config = DPOTrainer, DPOConfig
    config_class = PaddingFreeDPOConfig
    takes_sequence_parallel = True
    trains_language_models = True

    def coupled_by_arguments(self, arguments: Arguments) -> list[str]:
        return _coupled(arguments["args"].loss_type)

    def coupled_by(self) -> list[str]:
        return [*_coupled(self.loss_types), *super().coupled_by()]

    def part_sizes(self, inputs: Inputs) -> dict[str, int]:
        chosen, rejected = (int(mask.sum()) for mask in inputs["completion_mask"][:, 1:].chunk(2))
        per_pair = ("loss", *(f"rewards/{x}" for x in ("chosen", "rejected", "accuracies", "margins")))
        return {
            **dict.fromkeys((*per_pair, "logps/chosen", "logps/rejected"), len(inputs["input_ids"]) // 2),
            "logits/chosen": chosen,
            "mean_token_accuracy": chosen,
            "logits/rejected": rejected,
            "entropy": chosen + rejected,
        }

    def example_lengths(self) -> np.ndarray:
        return truncated(super().example_lengths(), *map(self.collated_by, ("max_length", "truncation_mode")))

    @when_flat
    def compute_ref_log_probs(self, model, inputs):
        self.prove(model)
        return super().compute_ref_log_probs(model, inputs)
