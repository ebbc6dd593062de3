"""Hidden states of a flat batch, for losses with a head of their own."""

from typing import TYPE_CHECKING

import torch

from ..flat.batch import FlatBatch, RowPart
from ..flat.transfer import on_device
from .forward import flat_backbone, flat_inputs, of_parts

if TYPE_CHECKING:
    from .flat_model import FlatModel


def hidden_states(flat: "FlatModel", batch: FlatBatch, scored: torch.Tensor) -> torch.Tensor:
    """`(1, N, H)`: the hidden states by which the `scored` tokens of rows are predicted, a mask `(R, L-1)`."""

    def answer(part: RowPart, scored: torch.Tensor) -> torch.Tensor:
        flat.prepare(part.batch)
        return _hidden_states(flat, part.batch, scored[part.rows])

    if not batch.parts:
        flat.prepare(batch)
        return _hidden_states(flat, batch, scored)
    scored = scored.to(batch.row_index.device, non_blocking=True)
    places = scored.flatten().cumsum(0).view_as(scored)
    order = torch.cat([places[part.rows][scored[part.rows]] for part in batch.parts]).argsort()
    found = torch.cat(of_parts(batch, answer, scored), 1)
    return found[:, order.to(found.device)]


def _hidden_states(flat: "FlatModel", batch: FlatBatch, scored: torch.Tensor) -> torch.Tensor:
    places = scored.nonzero().T
    if places.device.type == "cpu":  # nothing waits for the device if the host says what is scored
        places = on_device(places, batch.row_index.device)
    index = batch.row_index[tuple(places)]
    with flat_backbone(flat, batch, lambda hidden: hidden[:, index.to(hidden.device)]):
        return flat.model.base_model(**flat_inputs(flat, batch)).last_hidden_state
