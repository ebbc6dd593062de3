"""Why a call with a flat batch is rejected: arguments it cannot answer, or rows edited after they were flattened."""

import inspect

import torch
from transformers import PreTrainedModel

from ..flat.batch import IGNORE_INDEX, FlatBatch, Inputs
from .architecture import CACHES, TYPE_ROWS, takes_images, wants

# Arguments of a forward that only make sense with padded rows
_OF_ROWS = ("inputs_embeds", *CACHES, "logits_to_keep", "use_cache")
_OUTPUTS = {"output_hidden_states": "hidden_states", "output_attentions": "attentions"}
_WITHOUT = (
    "leave it out, or ask for it in a second call beside the flat one, which computes padded rows: "
    "`model(**{name: value for name, value in inputs.items() if name != 'flat_batch'})`"
)
# Descriptions of possible edits, in the order of what [`edits`] returns
_EDITS = {
    "input_ids": "other tokens, or another number of rows or columns",
    "attention_mask": "another `attention_mask`",
    "labels": "more or other tokens to score, or fewer where it runs in parts (`labels`, or `completion_mask`)",
    "position_ids": "other `position_ids`",
}
# Inputs whose edits [`edits`] finds; labels of pairs are made of `completion_mask`
COMPARED = (*_EDITS, "completion_mask")


class EditedRowsError(ValueError):
    """The rows no longer match the flat batch that was made from them."""


def refuse_unanswerable(model: PreTrainedModel, inputs: Inputs) -> None:
    """Reject arguments of a forward, and outputs that they or the configuration ask for, that have no flat answer."""
    is_fused = inputs.get("fused_lm_head", False)
    names, types = [*_OF_ROWS, *["shift_labels"] * is_fused], inputs.keys() & TYPE_ROWS  # other heads shift by row
    if types and not takes_images(model):  # whose types of tokens say only where images are
        names += inspect.signature(model.base_model.forward).parameters.keys() & types
    for name in names:
        value = inputs.get(name)  # `use_cache=False` and `logits_to_keep=0` ask for nothing
        if value if isinstance(value, int) else value is not None:
            raise ValueError(
                f"`{name}` was given to the model beside a `flat_batch`, which has one row and positions of its own: "
                f"{_WITHOUT}."
            )
    for argument, output in _OUTPUTS.items():  # TRL's fused head returns none of these, even with padding
        if inputs.get(argument) if is_fused else wants(model.config, inputs, argument):
            raise ValueError(f"`{argument}=True`: a flat batch has no `{output}` of rows: {_WITHOUT}.")
    if inputs.get("return_dict") is False:
        raise ValueError(
            "`return_dict=False`: the answer to a flat batch has names. Leave it out, and call `.to_tuple()`."
        )


@torch.compiler.disable
def edits(batch: FlatBatch, inputs: Inputs, made_labels: torch.Tensor | None = None) -> torch.Tensor:
    """
    `(4,)` bool: whether `input_ids`, `attention_mask`, `labels` and `position_ids` of the inputs, each `(R, L)` if
    given, differ from what `batch` was made from. The host does not wait.

    Values in the padding are ignored. An all-zero mask is not an edit: it marks a batch that counts for nothing.
    Neither are fewer labels, because answers are masked by the labels of the call, unless these are to be equal to
    `made_labels`, those of the rows before.
    """
    index, mask = batch.row_index, batch.row_mask
    input_ids, attention_mask, labels, position_ids = given = [*map(inputs.get, _EDITS)]
    reshaped = [rows is not None and rows.shape != index.shape for rows in given]
    if any(reshaped):
        return torch.tensor(reshaped)
    is_edited = mask.new_zeros(4)
    if input_ids is not None:
        is_edited[0] = ((input_ids != batch.input_ids[0][index]) & mask).any()
    if attention_mask is not None:
        is_edited[1] = (attention_mask.bool() != mask).any() & attention_mask.any()
    if labels is not None and made_labels is not None:
        is_edited[2] = ((labels != made_labels) & mask)[:, 1:].any()
    elif labels is not None:
        targets = torch.full_like(batch.input_ids[0], IGNORE_INDEX)
        targets = targets.index_put((batch.scored_index,), batch.shift_labels[0])
        expected, labels = targets[index[:, :-1]].masked_fill(~mask[:, 1:], IGNORE_INDEX), labels[:, 1:]
        is_edited[2] = ((labels != expected) & (labels != IGNORE_INDEX)).any()
    if position_ids is not None:
        is_edited[3] = ((position_ids != batch.position_ids[0][index]) & mask).any()
    return is_edited


def refuse_edits(results: torch.Tensor) -> None:
    """Raise if rows were edited after they were flattened, given the `results` of [`edits`] on the CPU."""
    if edited := [words for words, is_edited in zip(_EDITS.values(), results.tolist(), strict=True) if is_edited]:
        raise EditedRowsError(
            f"The rows of a batch were edited after their `flat_batch` was made: {'; '.join(edited)}. The model would "
            "compute the rows as they were. Edit them in `torch_call` of a subclass of this package's collator, edit "
            "the examples before it, or set `padding_free=False`."
        )


def refuse_lost_batch(inputs: Inputs) -> None:
    """Reject the inputs of a training step that lack the flat batch."""
    raise EditedRowsError(
        f"The inputs of `training_step` have no `flat_batch`, only {list(inputs)}: pass on all that the data "
        "loader gave. A `data_collator` that was set after the trainer was made gives none: pass it when you "
        "make the trainer, or set `padding_free=False`."
    )
