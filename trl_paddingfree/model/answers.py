"""What a flat forward is asked for: rows that somebody edited, and outputs that it cannot give, are refused by name."""

from dataclasses import dataclass, field
from typing import Any

import torch

from ..flat.batch import FlatBatch
from ..flat.rows import ROWS, edits

_EDIT = {
    "input_ids": "other tokens, or another number of rows or columns",
    "attention_mask": "another `attention_mask`",
    "labels": "more or other tokens to score, or fewer where it runs in parts (`labels`, or `completion_mask`)",
}
# Arguments of a forward that only rows have an answer to
_OF_ROWS = ("position_ids", "inputs_embeds", "past_key_values", "logits_to_keep", "use_cache")
_OUTPUTS = {"output_hidden_states": "hidden_states", "output_attentions": "attentions"}
_WITHOUT = "`model(**{name: value for name, value in inputs.items() if name != 'flat_batch'})` computes padded rows"


class EditedRowsError(ValueError):
    """Rows that are not what their flat batch was made of."""


def refuse_edits(found: torch.Tensor) -> None:
    """
    Refuse rows that were edited after their flat batch was made.

    Args:
        found (`torch.Tensor` of shape `(3,)`, bool):
            What [`~trl_paddingfree.flat.rows.edits`] gave, on the CPU.

    Raises:
        `EditedRowsError`: Naming what was edited.
    """
    if edited := [_EDIT[name] for name, is_edited in zip(ROWS, found.tolist(), strict=True) if is_edited]:
        raise EditedRowsError(
            f"The rows of a batch were edited after their `flat_batch` was made: {'; '.join(edited)}. The model would "
            "compute the rows as they were. Edit them in `torch_call` of a subclass of this package's collator, edit "
            "the examples before it, or set `padding_free=False`."
        )


def refuse_lost_batch(inputs: dict[str, Any]) -> None:
    """Refuse the inputs of a training step if somebody took the flat batch out, see [`refuse_edits`]."""
    if "flat_batch" not in inputs:
        raise EditedRowsError(
            f"The inputs of `training_step` have no `flat_batch`, only {list(inputs)}: pass on all that the data "
            "loader gave, or set `padding_free=False`."
        )


@dataclass
class EditsFound:
    """
    What the device says of edited rows. It is asked as a forward begins and read once it has answered: training never
    waits for it.

    Args:
        pending (`list`):
            Answers on their way to the host, each with the event that it has arrived.
    """

    pending: list[tuple[torch.Tensor, Any]] = field(default_factory=list)

    @torch.compiler.disable
    def ask(self, batch: FlatBatch, inputs: dict[str, Any], in_parts: bool = False) -> None:
        """
        Compare the rows among `inputs` with `batch`; raises at once where that takes no waiting.

        Of rows that are computed `in_parts`, which were cut before, fewer scored tokens are an edit, too.
        """
        self.read()
        found = edits(batch, **{name: inputs.get(name) for name in ROWS}, exact_labels=in_parts)
        if found.is_cpu or found.is_meta:
            refuse_edits(found)
            return
        answer = found.to("cpu", non_blocking=True)  # into page-locked memory, where the device has any
        # By the stream of the copy: the model may lie on another device than the current one
        self.pending.append((answer, torch.accelerator.current_stream(found.device).record_event()))

    def read(self) -> None:
        """Refuse edits that the device has answered of."""
        while self.pending and self.pending[0][1].query():
            refuse_edits(self.pending.pop(0)[0])


def refuse_unanswerable(config: Any, inputs: dict[str, Any], *, fused_lm_head: bool) -> None:
    """
    Refuse arguments that a flat batch has no answer to.

    Args:
        config ([`~transformers.PreTrainedConfig`]):
            The model's: it may ask for outputs as well.
        inputs (`dict[str, Any]`):
            Arguments of the forward.
        fused_lm_head (`bool`):
            Whether TRL's head answers, which gives none of these outputs with padding either.

    Raises:
        `ValueError`: Naming the argument.
    """
    for name in _OF_ROWS:
        if (value := inputs.get(name)) is not None and (torch.is_tensor(value) or value):
            raise ValueError(
                f"`{name}` was given to the model beside a `flat_batch`, which has one row and positions of its own: "
                f"leave it out, or leave `flat_batch` out ({_WITHOUT})."
            )
    for argument, output in _OUTPUTS.items():
        if inputs.get(argument, not fused_lm_head and getattr(config, argument, False)):
            raise ValueError(
                f"`{argument}=True`: a flat batch has no `{output}` of rows. Leave it out, or leave `flat_batch` out "
                f"({_WITHOUT})."
            )
