"""The start-up check for packed rows of others: does a forward pass that is not ours keep them apart?"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from .. import upstream
from ..flat.batch import FlatBatch, Inputs
from ..model.flat_model import FlatModel
from ..model.forward import is_pooled
from ..model.routes import Route
from .anywhere import log_probs_of, transformers_model
from .gradients import RowsInTraining
from .probe import RowsAlone
from .prove import CheckResult, compare_rows, draws_of

# A function that takes rows, each `(n,)` int64, and returns the logits of each, `(n, vocabulary)`
PackedCall = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Packing(Route):
    """In the place of a route of this package: `by` names the function that packs rows."""

    by: str = ""

    def __str__(self) -> str:
        return f"packed by {self.by}"


def check_packed(model: torch.nn.Module, call: PackedCall | None = None) -> CheckResult:
    """
    Compare packed rows with each row alone: whether rows see one another (a leak), whether their log-probabilities are
    right (positions and context), and whether their gradients are, in the model's dtype, on its device.

    Args:
        model (`torch.nn.Module`):
            A causal language model of transformers, under whatever wrappers. It computes each row alone, too.
        call (`Callable`, *optional*):
            A function that computes rows as a framework does. It is given the rows, a list of `(n,)` int64 tensors on
            the device of the model, and returns the logits of each, `(n, vocabulary)`, in their order. It may pack, pad
            or reorder them, but has to compute with `model` and its input embeddings. By default, [`by_positions`].

    Returns:
        [`CheckResult`]: `passed` if packed rows are exact, and in words, `verdict`.

    Raises:
        `TypeError`, `ValueError`: `model` is no causal language model of transformers.

    >>> from trl_paddingfree import check_packed
    >>> from trl_paddingfree.quickstart.model import make_model, make_tokenizer
    >>> check_packed(make_model(make_tokenizer(["an apple a day"]), num_hidden_layers=2)).verdict
    'exact'
    """
    base = transformers_model(model, "check_packed")
    if is_pooled(base):
        raise ValueError(f"`check_packed` reads logits of tokens, and {type(base).__name__} has no head for them.")
    implementation = str(upstream.attn_implementation(base))
    by_default = f"transformers, told of rows by `position_ids` alone ({implementation})"
    by = by_default if call is None else getattr(call, "__name__", type(call).__name__)
    packing = Packing("positions", implementation, prefix_sharing=False, by=by)
    called = partial(_packed_or_alone, model, partial(by_positions, model) if call is None else call)
    for draw in range(draws_of(base)):
        result = compare_rows(packing, RowsAlone(base, called, draw), partial(_PackedInTraining, base, called, draw))
        if result.passed or not result.isolated:
            break
    return result


def by_positions(model: torch.nn.Module, rows: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The logits of rows that transformers computes as one, with `position_ids` that start at 0 for each."""
    positions = torch.cat([torch.arange(len(row), device=row.device) for row in rows])[None]
    logits = model(input_ids=torch.cat(rows)[None], position_ids=positions, use_cache=False).logits
    return logits[0].split(list(map(len, rows)))


def _packed_or_alone(model: Any, call: PackedCall, flat_batch: FlatBatch | None = None, **inputs: Any) -> Any:
    """What the check calls in place of `model`: with a flat batch, `call` computes the rows, and else the model."""
    ids, labels = inputs["input_ids"], inputs["labels"]
    if flat_batch is None:
        arguments = {name: inputs[name] for name in ("input_ids", "attention_mask", "use_cache")}
        flat = FlatModel.of(model)
        with flat.padded.aside() if flat is not None and flat.padded is not None else nullcontext():
            return SimpleNamespace(log_probs=log_probs_of(model(**arguments).logits, labels))
    rows = [row[mask] for row, mask in zip(ids, inputs["attention_mask"].bool(), strict=True)]
    answers = [*call(rows)]
    if [x.shape[:1] for x in answers] != [row.shape for row in rows]:
        raise ValueError(
            f"the call gave answers of the shapes {[tuple(x.shape) for x in answers]} for rows of the lengths "
            f"{[len(row) for row in rows]}: it has to give `(n, vocabulary)` for each row of `n` tokens"
        )
    return SimpleNamespace(log_probs=log_probs_of(torch.nn.utils.rnn.pad_sequence(answers, batch_first=True), labels))


class _PackedInTraining(RowsInTraining):
    """[`RowsInTraining`] of rows that `call` may pack in any order: the model's input is searched for their tokens."""

    @contextmanager
    def watched(self, inputs: Inputs) -> Iterator[list[torch.Tensor]]:
        if "flat_batch" not in inputs:
            with super().watched(inputs) as embedded:
                yield embedded
            return
        batch: FlatBatch = inputs["flat_batch"]
        rows = batch.to_rows()
        ends = np.cumsum([0, *map(len, rows)]).tolist()
        embeddings: Any = self.model.get_input_embeddings()
        # Zeros that are added to the embeddings: gradients at them are those at the embeddings
        added = torch.zeros(1, ends[-1], embeddings.weight.size(-1), device=inputs["input_ids"].device)
        added = added.to(embeddings.weight.dtype).requires_grad_()

        def add(module: torch.nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            tokens = args[0].flatten().cpu()
            for row, end in zip(rows, ends[1:], strict=True):
                windows = tokens.unfold(0, len(row), 1) if len(tokens) >= len(row) else tokens.new_empty(0, len(row))
                for place in (windows == torch.tensor(row)).all(1).nonzero()[:, 0].tolist():
                    where = torch.arange(place, place + len(row), device=output.device)
                    zeros = added[0, end - len(row) : end].to(output.dtype)
                    output = output.flatten(0, -2).index_add(0, where, zeros).view(output.shape)
            return output

        with embeddings.register_forward_hook(add):
            yield [added]
