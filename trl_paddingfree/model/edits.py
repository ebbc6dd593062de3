"""What a call with a flat batch is refused for: arguments without an answer, and rows that were edited since."""

from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedConfig

from ..flat.batch import IGNORE_INDEX, FlatBatch, Inputs
from .architecture import CACHES, wants

# Arguments of a forward that only make sense with padded rows
_OF_ROWS = ("position_ids", "inputs_embeds", *CACHES, "logits_to_keep", "use_cache")
_OUTPUTS = {"output_hidden_states": "hidden_states", "output_attentions": "attentions"}
_WITHOUT = (
    "leave it out, or ask for it in a second call beside the flat one, which computes padded rows: "
    "`model(**{name: value for name, value in inputs.items() if name != 'flat_batch'})`"
)
# What may have been edited, in words, in the order in which [`edits`] gives it
_EDITS = {
    "input_ids": "other tokens, or another number of rows or columns",
    "attention_mask": "another `attention_mask`",
    "labels": "more or other tokens to score, or fewer where it runs in parts (`labels`, or `completion_mask`)",
}


class EditedRowsError(ValueError):
    """Rows that are not what their flat batch was made of."""


def refuse_unanswerable(config: PreTrainedConfig, inputs: Inputs, *, fused_lm_head: bool) -> None:
    """Refuse, by name, what a flat batch has no answer to: arguments of a forward, and outputs that `config` wants."""
    for name in _OF_ROWS:
        value = inputs.get(name)  # of `use_cache` and `logits_to_keep`, false and 0 ask for nothing
        if value if isinstance(value, int) else value is not None:
            raise ValueError(
                f"`{name}` was given to the model beside a `flat_batch`, which has one row and positions of its own: "
                f"{_WITHOUT}."
            )
    for argument, output in _OUTPUTS.items():  # TRL's fused head gives none of these, with padding either
        if inputs.get(argument) if fused_lm_head else wants(config, inputs, argument):
            raise ValueError(f"`{argument}=True`: a flat batch has no `{output}` of rows: {_WITHOUT}.")


@torch.compiler.disable
def edits(
    batch: FlatBatch,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    labels: torch.Tensor | None = None,
    exact_labels: bool = False,
) -> torch.Tensor:
    """
    `(3,)` bool: whether each of these `(R, L)` tensors differs from what `batch` was made of. The host does not wait.

    What stands in the padding does not matter. A mask of zeros only is no edit: it stands for a batch that counts for
    nothing. Nor are fewer labels, unless `exact_labels`: answers are masked by the labels of the call.
    """
    index, mask = batch.row_index, batch.row_mask
    reshaped = [rows is not None and rows.shape != index.shape for rows in (input_ids, attention_mask, labels)]
    if any(reshaped):
        return torch.tensor(reshaped)
    is_edited = mask.new_zeros(3)
    if input_ids is not None:
        is_edited[0] = ((input_ids != batch.input_ids[0][index]) & mask).any()
    if attention_mask is not None:
        is_edited[1] = (attention_mask.bool() != mask).any() & attention_mask.any()
    if labels is not None:
        targets = torch.full_like(batch.input_ids[0], IGNORE_INDEX)
        targets = targets.index_put((batch.scored_index,), batch.shift_labels[0])
        expected, labels = targets[index[:, :-1]].masked_fill(~mask[:, 1:], IGNORE_INDEX), labels[:, 1:]
        is_edited[2] = ((labels != expected) & (exact_labels | (labels != IGNORE_INDEX))).any()
    return is_edited


def refuse_edits(results: torch.Tensor) -> None:
    """Refuse rows that were edited after their flat batch was made, by what [`edits`] gave, on the CPU."""
    if edited := [words for words, is_edited in zip(_EDITS.values(), results.tolist(), strict=True) if is_edited]:
        raise EditedRowsError(
            f"The rows of a batch were edited after their `flat_batch` was made: {'; '.join(edited)}. The model would "
            "compute the rows as they were. Edit them in `torch_call` of a subclass of this package's collator, edit "
            "the examples before it, or set `padding_free=False`."
        )


def refuse_lost_batch(inputs: Inputs) -> None:
    """Refuse the inputs of a training step that lack the flat batch, or the rows that a budget needs to divide it."""
    if "flat_batch" in inputs:
        raise EditedRowsError(
            "The inputs of `training_step` have no `rows`, which parts of them are made of. A data loader of your own "
            "needs `dataclasses.replace(self.data_collator, keeps_rows=True)`. Or leave `memory_budget` and "
            "`max_tokens_per_micro_batch` out."
        )
    raise EditedRowsError(
        f"The inputs of `training_step` have no `flat_batch`, only {list(inputs)}: pass on all that the data loader "
        "gave, or set `padding_free=False`."
    )


def refuse_lost_values(inputs: Inputs, made: Inputs) -> None:
    """
    Refuse what stands beside the rows of a micro-batch, and was added or changed since the collator has `made` it: its
    parts would not have it. Waits for the device, if the collator gives one number per row.
    """
    for name, value in inputs.items():
        before = made.get(name)
        is_lost = name not in ("flat_batch", "rows", *made)
        if isinstance(value, torch.Tensor) and value.ndim == 1 and before is not None and before is not value:
            is_lost = not np.array_equal(value.cpu().double(), torch.as_tensor(before).double(), equal_nan=True)
        if is_lost:
            raise EditedRowsError(
                f"`{name}` of a micro-batch was added or changed after the collator. This micro-batch runs in parts, "
                "which are made of what the collator gave: make the change in `torch_call` of a subclass of this "
                "package's collator, or leave `memory_budget` and `max_tokens_per_micro_batch` out."
            )


@dataclass
class EditsFound:
    """Results of [`edits`] that are on their way to the host. Nothing waits for them before [`EditsFound.read`]."""

    pending: list[tuple[torch.Tensor, torch.Event]] = field(default_factory=list)  # results, and their arrival

    @torch.compiler.disable
    def ask(self, batch: FlatBatch, inputs: Inputs, in_parts: bool = False) -> None:
        """Compare rows among `inputs` with `batch`, without waiting; `in_parts`, fewer scored tokens are an edit."""
        self.read(waits=False)  # what has arrived meanwhile: a loop of one's own may never `read`
        results = edits(batch, **{name: inputs.get(name) for name in _EDITS}, exact_labels=in_parts)
        if results.is_cpu:
            refuse_edits(results)
        elif not results.is_meta:  # which has no values
            on_host = results.to("cpu", non_blocking=True)  # into page-locked memory, where the device has any
            # By the stream of the copy: the model may lie on another device than the current one
            self.pending.append((on_host, torch.accelerator.current_stream(results.device).record_event()))

    def read(self, waits: bool = True) -> None:
        """
        Refuse edits in all results, once they have arrived: soon, as they are computed before the model's layers. Or
        only in those that have.
        """
        while self.pending and (waits or self.pending[0][1].query()):
            results, arrival = self.pending.pop(0)
            arrival.synchronize()
            refuse_edits(results)
