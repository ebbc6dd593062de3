"""Gradients at the tokens that a model embeds, and which tokens get one."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from transformers import PreTrainedModel

from ..flat.batch import FlatBatch
from ..model.flat_model import FlatModel
from . import probe

# Gradients below this share of the largest count as zero: rounding alone may produce them
_NEGLIGIBLE = torch.finfo(torch.float32).eps ** 2


@contextmanager
def embeddings_watched(model: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """Within this context, the list collects what the input embeddings return, ready to be differentiated."""
    outputs: list[torch.Tensor] = []

    def watch(module, args, output):
        outputs.append(output if output.requires_grad or not torch.is_grad_enabled() else output.requires_grad_())
        return output.clone()  # some models (GIT) write into it in place, which a leaf forbids

    with model.get_input_embeddings().register_forward_hook(watch):  # type: ignore[union-attr]
        yield outputs


def scale_of(model: PreTrainedModel) -> float:
    """The factor of a loss before it is differentiated: small gradients underflow in float16. Training scales, too."""
    return 2.0**8 if probe.compute_dtype(model) == torch.float16 else 1.0


def gradients_at_tokens(
    model: PreTrainedModel,
    embedded: Sequence[torch.Tensor],
    loss: torch.Tensor,
    length: int,
    batch: FlatBatch | None = None,
    parameters: Sequence[torch.nn.Parameter] = (),
) -> list[torch.Tensor | None]:
    """
    The gradients of a `loss` at the tokens of a call, and of `parameters`.

    Call it within [`embeddings_watched`], whose list `embedded` is, because slices are computed again. The first
    gradient is `(R, length, D)` or, of a flat `batch`, `(1, T, D)` on all processes that compute it.
    """
    if not embedded:
        raise RuntimeError("it does not compute with its input embeddings")
    # Each slice embeds its own tokens, and one more if frequencies follow the longest position. Models with images
    # embed all tokens at once, before their decoder
    sizes = [length if batch is None else batch.input_ids.size(1)]
    if batch is not None and 1 < len(batch.schedule.cuts) <= len(embedded) + 1:
        sizes = np.diff(batch.schedule.cuts).tolist()
    pieces = embedded[-len(sizes) :]
    if batch and not loss.requires_grad:  # detached, or computed under `no_grad`
        loss = 0.0 * pieces[0].sum()
    found = torch.autograd.grad(loss, [*pieces, *parameters], allow_unused=True)
    filled = [torch.zeros_like(x) if y is None else y for x, y in zip(pieces, found, strict=False)]
    at_tokens = torch.cat([x[:, :size] for x, size in zip(filled, sizes, strict=True)], 1)
    gradients: list[torch.Tensor | None] = [at_tokens, *found[len(sizes) :]]
    return (
        gradients
        if batch is None
        else [*FlatModel.peers_of(model).gradients([at_tokens, *parameters], gradients, batch)]
    )


def wrong_tokens(
    flat: torch.Tensor, alone: Mapping[int, torch.Tensor], places: Sequence[torch.Tensor], rows: Sequence[int]
) -> str:
    """
    Check which tokens get gradient from `rows`: what is wrong, in words; empty if nothing is. `flat` is `(1, T, D)`,
    `alone` has `(l, D)` of each of these rows, and `places` the flat positions `(l,)` of the tokens of all rows.
    """
    if flat.size(1) <= max(int(x.max()) for x in places if len(x)) or not flat.any():
        return "no gradient reaches its input embeddings, as if its answers were detached or computed under `no_grad`"
    if not flat.isfinite().all():
        return "gradients are not finite"
    touched = flat[0].any(1)
    for row in rows:
        touched[places[row]] = False
    if touched.any():
        leaks = [row for row, own in enumerate(places) if touched[own].any()]
        by = " or ".join(map(str, rows))
        return f"{f'row {leaks[0]}' if leaks else 'padding'} gets gradient from row {by}"
    for row in rows:
        sizes, expected = flat[0, places[row]].norm(dim=1), alone[row].norm(dim=1)
        has, wanted = sizes > _NEGLIGIBLE * sizes.max(), expected > _NEGLIGIBLE * expected.max()
        if lost := int((wanted & (sizes == 0)).sum()):
            return f"row {row} forgets {lost} of its tokens"
        if more := (has & (expected == 0)).nonzero().tolist():
            return f"row {row} gets gradient at its token {more[0][0]}, which it does not alone"
    return ""
