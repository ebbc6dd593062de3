"""Whether rows are still those that a flat batch was made of: the rows are the truth, whoever changes them.

Shape legend: see [`~trl_paddingfree.flat.segments`].
"""

import torch

from .batch import IGNORE_INDEX, FlatBatch

# What may have been edited, in the order of the answers
ROWS = ("input_ids", "attention_mask", "labels")


@torch.compiler.disable
def edits(
    batch: FlatBatch,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    labels: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Which of the rows differ from what `batch` was made of. Nothing waits for the device.

    Args:
        batch ([`FlatBatch`]):
            The flat batch.
        input_ids (`torch.Tensor` of shape `(R, L)`, int64, *optional*):
            Tokens; what stands in the padding does not matter.
        attention_mask (`torch.Tensor` of shape `(R, L)`, *optional*):
            Where rows have tokens. A mask of zeros only is no edit: it stands for a batch that counts for nothing.
        labels (`torch.Tensor` of shape `(R, L)`, int64, *optional*):
            Tokens to score. Fewer than those of `batch` are no edit: they are masked in its answers.

    Returns:
        `torch.Tensor` of shape `(3,)`, bool: Whether each of [`ROWS`] was edited.

    Examples:
    ```python
    >>> import torch
    >>> from trl_paddingfree import FlatBatch
    >>> from trl_paddingfree.flat.edits import edits
    >>> batch = FlatBatch.from_rows([[1, 2, 3], [4, 5]], [[-100, 2, 3], [-100, 5]])
    >>> edits(batch, torch.tensor([[1, 2, 9], [4, 5, 0]]), labels=torch.tensor([[-100, -100, 3], [-100, 5, -100]]))
    tensor([ True, False, False])

    ```
    """
    index, mask = batch.row_index, batch.row_mask
    reshaped = [rows is not None and rows.shape != index.shape for rows in (input_ids, attention_mask, labels)]
    if any(reshaped):
        return torch.tensor(reshaped)
    found = [torch.zeros((), dtype=torch.bool, device=index.device)] * 3
    if input_ids is not None:
        found[0] = ((input_ids != batch.input_ids[0][index]) & mask).any()
    if attention_mask is not None:
        found[1] = (attention_mask.bool() != mask).any() & attention_mask.any()
    if labels is not None:
        targets = batch.input_ids.new_full((batch.input_ids.size(1),), IGNORE_INDEX)
        targets = targets.index_put((batch.scored_index,), batch.shift_labels[0])
        expected = targets[index[:, :-1]].masked_fill(~mask[:, 1:], IGNORE_INDEX)
        found[2] = ((labels[:, 1:] != IGNORE_INDEX) & (labels[:, 1:] != expected)).any()
    return torch.stack(found)
