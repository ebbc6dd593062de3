"""Rows that a model computes in parts, one after another, with the gradients of the whole.

The loss is the caller's, over all rows. Each part keeps nothing between its forward and its backward pass, which
computes it again: a loss that couples rows is as exact as any other. The last part is the first to have its backward
pass, and keeps what it computed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ..flat.batch import FlatBatch


@dataclass(frozen=True)
class RowPart:
    """
    Some of the rows of a call.

    Args:
        rows (`torch.Tensor` of shape `(N,)`, int64):
            Which of them.
        batch ([`~trl_paddingfree.FlatBatch`]):
            These rows, flat.
        prepare (`Callable`, *optional*):
            Called before each computation. Defaults to nothing.
    """

    rows: torch.Tensor
    batch: FlatBatch
    prepare: Callable[[], None] = lambda: None

    def to(self, device: torch.device) -> "RowPart":
        """The part with its tensors on `device`."""
        return replace(self, rows=self.rows.to(device), batch=self.batch.to(device, non_blocking=True))


def compute_in_parts(
    compute: Callable[..., Any],
    parts: Sequence[RowPart],
    *,
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    **kwargs: Any,
) -> Any:
    """
    The answer of a model to rows that it computes in parts.

    Args:
        compute (`Callable`):
            Gives the answer to some rows, called with their flat batch, `input_ids`, `labels` and `kwargs`.
        parts (`Sequence[RowPart]`):
            The parts, which have each row once.
        input_ids (`torch.Tensor` of shape `(R, L)`, int64), labels (`torch.Tensor`, same shape and dtype):
            The rows.
        **kwargs:
            Arguments that all rows have in common.

    Returns:
        [`~trl.trainer.utils.FusedCausalLMOutput`]: The values per token of all rows, in their order; no loss.
    """

    # The rows are arguments of what is checkpointed: by their device it finds the random state to come back to
    def answer(part: RowPart, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        part.prepare()
        return compute(part.batch, input_ids=input_ids, labels=labels, **kwargs)

    rows = [(part, input_ids[part.rows], labels[part.rows]) for part in parts]
    outputs = [checkpoint(answer, *each, use_reentrant=False) for each in rows[:-1]] + [answer(*rows[-1])]
    order = torch.cat([part.rows for part in parts]).argsort()

    def joined(values: list[Any]) -> Any:
        return torch.cat(values)[order] if isinstance(values[0], torch.Tensor) and values[0].ndim else None

    names = [field.name for field in fields(outputs[0])]
    return replace(outputs[0], **{name: joined([getattr(output, name) for output in outputs]) for name in names})
