"""SFT without padding."""

from dataclasses import dataclass

import numpy as np
import torch
from transformers.trainer_pt_utils import LabelSmoother
from trl import SFTConfig, SFTTrainer

from .. import upstream
from ..data.collate import FlatCollator, LanguageModelingCollator
from ..data.task import Task
from ..flat.batch import IGNORE_INDEX, Inputs
from ..model.restored import attributes_set
from .composed import CollatedTrainer
from .configs import Arguments, PaddingFreeOptions
from .options import SHARING, option
from .runtime import when_flat

SFT = Task(
    name="sft",
    unit="rows",
    found_by=(("messages",), ("conversations",), ("prompt", "completion"), ("text",), ("input_ids",)),
    sequences=(("input_ids",),),
    other_columns=("labels",),
    reads=("messages", "conversations", "completion", "seq_lengths", "completion_mask", "assistant_masks"),
    collator=LanguageModelingCollator,
    prepare=upstream.preparation(SFTTrainer, SFTConfig, False, None, chat_template=None),  # no packing, no formatting
)


@dataclass
class PaddingFreeSFTConfig(PaddingFreeOptions, SFTConfig):
    """TRL's [`~trl.SFTConfig`] with the [`PaddingFreeOptions`]. `prefix_sharing` defaults to `False`."""

    prefix_sharing: bool = option(False, SHARING)


class PaddingFreeSFTTrainer(CollatedTrainer, SFTTrainer):
    """
    TRL's [`~trl.SFTTrainer`], computing real tokens only.

    Same arguments, same losses, metrics and gradients as TRL with padding. With `padding_free=True`, the model computes
    each micro-batch as one flat row without padding, `max_length` is enforced, and packed documents never see each
    other. See [`~trl_paddingfree.core.trainers.base.FlatTrainer`] for what it accepts and refuses.

    >>> from tempfile import mkdtemp
    >>> from datasets import Dataset
    >>> from trl_paddingfree import PaddingFreeSFTConfig, PaddingFreeSFTTrainer
    >>> from trl_paddingfree.cli.quickstart.model import make_model, make_tokenizer
    >>> dataset = Dataset.from_list([{"text": "one two"}, {"text": "one two three four five"}] * 4)
    >>> tokenizer = make_tokenizer(dataset["text"])
    >>> args = PaddingFreeSFTConfig(mkdtemp(), use_cpu=True, bf16=False, report_to="none")
    >>> model = make_model(tokenizer)  # or the name of one on the hub
    >>> trainer = PaddingFreeSFTTrainer(model, args=args, train_dataset=dataset, processing_class=tokenizer)
    >>> trainer.method
    'padding-free (segment, no shared prefixes)'
    """

    task = SFT
    trl_trainer, trl_config = SFTTrainer, SFTConfig
    config_class = PaddingFreeSFTConfig
    takes_sequence_parallel = True
    trains_language_models = True

    def _flat_collator(self) -> FlatCollator:
        collator = super()._flat_collator()
        if not isinstance(collator, LanguageModelingCollator):
            return collator
        cuts_packed = collator.cuts_packed and self.data_collator.padding_free  # TRL sets it if it packs
        if collator.return_position_ids and not cuts_packed:
            raise ValueError("`return_position_ids=True` numbers documents within rows that are not cut: leave it out.")
        if collator.pad_to_multiple_of and cuts_packed and (reasons := super().coupled_by()):
            raise ValueError(
                f"`pad_to_multiple_of={collator.pad_to_multiple_of}` with packing and {reasons[0]}: in TRL's packed "
                "row, the loss of the routers counts the padding, too. Leave one of them out."
            )
        return collator.changed(cuts_packed=cuts_packed)

    @property
    def _cuts_packed(self) -> bool:
        """Whether rows are documents cut out of the rows that TRL packed."""
        return isinstance(self.data_collator, LanguageModelingCollator) and self.data_collator.cuts_packed

    def item_lengths(self) -> np.ndarray:
        """For packed rows, the length of each one's longest document: a budget divides rows into documents."""
        if not self._cuts_packed or "seq_lengths" not in self.train_dataset.column_names:
            return super().item_lengths()
        rows = self.train_dataset.with_format(None)["seq_lengths"]
        return np.array([[max(documents)] for documents in rows], dtype=np.int64)

    def coupled_by_arguments(self, arguments: Arguments) -> list[str]:
        return ["`compute_loss_func`"] if arguments.get("compute_loss_func") is not None else []

    def coupled_by(self) -> list[str]:
        # A user's own function may combine the rows of a micro-batch in any way
        reasons = super().coupled_by()
        if callable(self.compute_loss_func):
            reasons.append("`compute_loss_func`")
        if not isinstance(self.label_smoother, LabelSmoother | None):
            reasons.append("`label_smoother`")
        if (alpha := self.args.neftune_noise_alpha) is not None and self._cuts_packed:
            reasons.append(f"`neftune_noise_alpha={alpha}` and packing")  # noise scales with the packed row's length
        return reasons

    def part_sizes(self, inputs: Inputs) -> dict[str, int]:
        scored = int((inputs["labels"][:, 1:] != IGNORE_INDEX).sum())
        return dict.fromkeys(("loss", "entropy", "mean_token_accuracy"), scored)

    def weighed_by_micro_batch(self) -> list[str]:
        if not (self.model_accepts_loss_kwargs or self.compute_loss_func):
            return [f"{type(self.flat_base(self.model)).__name__}, whose loss is a mean over each micro-batch"]
        is_apart = self.accelerator.num_processes > 1 and not self.args.average_tokens_across_devices
        return ["`average_tokens_across_devices=False`"] if is_apart else []

    @when_flat
    def compute_loss(self, model, inputs, *args, **kwargs):
        if (function := self.compute_loss_func) is None or not self._cuts_packed:
            return super().compute_loss(model, inputs, *args, **kwargs)

        def of_packed_row(outputs, labels, **kwargs):  # documents in one row, as in TRL, which skips first tokens
            outputs.logits = _packed_row(outputs.logits, inputs, 0)
            labels = torch.cat([torch.full_like(labels[:, :1], IGNORE_INDEX), labels[:, 1:]], 1)
            return function(outputs, _packed_row(labels, inputs, IGNORE_INDEX), **kwargs)

        with attributes_set([(self, "compute_loss_func", of_packed_row)]):
            return super().compute_loss(model, inputs, *args, **kwargs)

    @when_flat
    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if logits is None or not self._cuts_packed:
            return loss, logits, labels
        # All documents in one row, as in TRL, however many packed rows there were
        pad = self.data_collator.pad_token_id
        ids, logits, labels = (
            _packed_row(values, inputs, fill)
            for values, fill in ((inputs["input_ids"], pad), (logits, 0), (labels, IGNORE_INDEX))
        )
        inputs["input_ids"], inputs["labels"] = ids, labels  # which `include_for_metrics` may ask for
        return loss, logits, labels


def _packed_row(values: torch.Tensor, inputs: Inputs, fill: int) -> torch.Tensor:
    """Values at the tokens of all documents, `(R, L, ...)`, as one row that is padded as TRL pads a packed one."""
    row = values[inputs["attention_mask"].bool()]
    padding = inputs["flat_batch"].packed_length - len(row)
    # Logits are too large to copy for nothing
    return (torch.cat([row, row.new_full((padding, *row.shape[1:]), fill)]) if padding else row)[None]
