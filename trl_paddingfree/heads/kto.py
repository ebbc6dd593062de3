"""KTO without padding."""

from dataclasses import dataclass

import numpy as np
from trl import KTOConfig, KTOTrainer

from ..core import upstream
from ..core.data.collate import UnpairedPreferenceCollator
from ..core.data.task import Task
from ..core.flat.batch import Inputs
from ..core.trainers.composed import CollatedTrainer
from ..core.trainers.configs import Arguments, PaddingFreeOptions
from ..core.trainers.runtime import when_flat

KTO = Task(
    name="kto",
    unit="completions",
    found_by=(("prompt", "completion", "label"),),
    sequences=(("prompt_ids", "completion_ids"),),
    other_columns=("label",),
    reads=("completion", "label", "chosen", "rejected", "ref_logps"),
    collator=UnpairedPreferenceCollator,
    prepare=upstream.preparation(KTOTrainer, KTOConfig, calculate_KL=False),
)


@dataclass
class PaddingFreeKTOConfig(PaddingFreeOptions, KTOConfig):
    """TRL's [`~trl.KTOConfig`] with the [`PaddingFreeOptions`]."""


class PaddingFreeKTOTrainer(CollatedTrainer, KTOTrainer):
    """
    TRL's [`~trl.KTOTrainer`], computing real tokens only.

    Same arguments, same losses, metrics and gradients. With `padding_free=True`, the model computes the completions of
    each micro-batch as one flat row without padding, and the mismatched ones, which estimate the KL divergence, as
    another. A prompt that several completions share appears once in each flat row.
    See [`~trl_paddingfree.core.trainers.base.FlatTrainer`] for what it accepts and refuses.

    >>> from tempfile import mkdtemp
    >>> from datasets import Dataset
    >>> from peft import LoraConfig
    >>> from trl_paddingfree import PaddingFreeKTOConfig, PaddingFreeKTOTrainer
    >>> from trl_paddingfree.cli.quickstart.model import make_model, make_tokenizer
    >>> rows = [{"prompt": "one two", "completion": " three", "label": i % 2 == 0} for i in range(4)]
    >>> tokenizer = make_tokenizer(["one two three"])
    >>> args = PaddingFreeKTOConfig(mkdtemp(), use_cpu=True, bf16=False, report_to="none")
    >>> model = make_model(tokenizer)  # or the name of one on the hub
    >>> data = {"train_dataset": Dataset.from_list(rows), "processing_class": tokenizer}
    >>> trainer = PaddingFreeKTOTrainer(model, args=args, **data, peft_config=LoraConfig())
    >>> trainer.method
    'padding-free (segment, shared prefixes)'
    """

    task = KTO
    trl_trainer, trl_config = KTOTrainer, KTOConfig
    config_class = PaddingFreeKTOConfig
    trains_language_models = True
    differences = {"rewards/margins": ("rewards/chosen", "rewards/rejected")}

    def coupled_by_arguments(self, arguments: Arguments) -> list[str]:
        loss = arguments["args"].loss_type
        return [] if loss == "apo_zero_unpaired" else [f"`loss_type={loss!r}`"]  # the only one without the divergence

    def coupled_by(self) -> list[str]:
        # Each loss uses the micro-batch's mean divergence, estimated on prompts with their neighbors' completions
        coupled = super().coupled_by()
        return [f"`loss_type={self.loss_type!r}`", *coupled] if self.calculate_KL else coupled

    def part_sizes(self, inputs: Inputs) -> dict[str, int]:
        labels, tokens = inputs["label"].bool(), inputs["completion_mask"][:, 1:].sum(1)
        sizes = {"loss": len(labels), "kl": len(labels), "entropy": int(tokens.sum())}
        for kind, rows in (("chosen", labels), ("rejected", ~labels)):
            sizes |= dict.fromkeys((f"rewards/{kind}", f"logps/{kind}"), int(rows.sum()))
            sizes[f"logits/{kind}"] = int(tokens[rows].sum())
        return sizes

    def example_lengths(self) -> np.ndarray:
        lengths, limit = super().example_lengths().sum(1, keepdims=True), self.collated_by("max_length")
        return lengths if limit is None else np.minimum(lengths, limit)

    @when_flat
    def _compute_kl_logps(self, model, batch):
        # TRL passes `flat_batch` to the model with the mismatched rows, too, which need their own
        if self.calculate_KL and "flat_batch" in batch:
            batch = {**batch, "flat_batch": batch["flat_batch"].mismatched}
        return super()._compute_kl_logps(model, batch)

    @when_flat
    def compute_ref_log_probs(self, model, inputs):
        self.prove(model)
        if "flat_batch" not in inputs:  # from a data loader of the user's
            return super().compute_ref_log_probs(model, inputs)
        # Here, TRL calls the model without a `flat_batch`, on the matched rows and then on the mismatched ones
        batches = iter((inputs["flat_batch"], inputs["flat_batch"].mismatched))
        return super().compute_ref_log_probs(lambda **kwargs: model(**kwargs, flat_batch=next(batches)), inputs)
