"""The start-up check for rows that others pack: does a forward pass that is not ours keep them apart?"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from transformers import PreTrainedModel

from ..core import upstream
from ..core.check.probe import LIMITS, Call, RowsAlone, undisturbed
from ..core.check.prove import CheckResult, compare_rows, draws_of
from ..core.check.training import as_in_training, without_dropout
from ..core.model import architecture
from ..core.model.forward import is_pooled
from ..core.model.routes import Route
from .rows import (
    LOGITS,
    LONGEST,
    LongRows,
    PackedCall,
    PackedInTraining,
    as_it_computes,
    as_trl_packs,
    lengths_of,
    packed_or_alone,
    seconds_of_a_token,
)

# Documents and tokens of the largest draw by default; lengths of a draw with an odd number of documents, one
# of a single token
_DOCUMENTS, _LENGTH, _FEW = 8, 2048, (5, 1, 19)
# By default, what would take longer than this is left out and reported
_SECONDS = 10.0
# For estimates of time: passes over the largest draw, and tokens computed in training mode with all layers, where a
# backward pass counts as two forward passes
_LONG_PASSES, _TRAINING_TOKENS = 8, 15 * 4 * 104


@dataclass(frozen=True)
class Packing(Route):
    """Stands in for a route of this package. `by` names the function that packs rows."""

    by: str = ""

    def __str__(self) -> str:
        return f"packed by {self.by}"


@dataclass(frozen=True)
class PackedResult(CheckResult):
    """
    A [`CheckResult`] for packed rows, and up to which sizes it holds.

    Args:
        documents, longest, length (`int`):
            The most documents that were packed together, the tokens of the longest, and the tokens in all.
        left_out (`tuple[str, ...]`):
            What was not compared, and why.
    """

    documents: int = 0
    longest: int = 0
    length: int = 0
    left_out: tuple[str, ...] = ()

    @property
    def not_compared(self) -> tuple[str, ...]:
        return (*super().not_compared, *self.left_out)

    def __str__(self) -> str:
        said = super().__str__()
        if self.passed:
            said += f", for up to {self.documents} documents of up to {self.longest} tokens, {self.length} in all"
        return "; ".join([said, *self.left_out])


def check_packed(
    model: torch.nn.Module,
    call: PackedCall | None = None,
    *,
    length: int | None = None,
    documents: int | None = None,
) -> PackedResult:
    """
    Compare packed rows with each row alone, in the model's dtype and on its device: whether rows see one another (a
    leak), and whether their log-probabilities (positions and context) and gradients are right.

    It tries five short rows, then five longer ones (mostly of 104 tokens) with gradients, and a larger draw in
    evaluation and in training mode. The verdict says up to which sizes it holds, and what was left out.

    Args:
        model (`torch.nn.Module`):
            A transformers causal language model, with or without wrappers. It also computes each row alone.
        call (`Callable`, *optional*):
            A function that computes rows the way a framework does. It takes a list of rows, `(n,)` int64 tensors on the
            model's device, and returns the logits of each, `(n, vocabulary)`, in the same order. It may pack, pad or
            reorder rows, but must compute with `model` and its input embeddings. By default, rows are packed as TRL
            packs them (`packing=True` or `padding_free=True`), with all arguments that its collator makes.
        length, documents (`int`, *optional*):
            Total tokens and number of documents of the larger draw, whose longest document has five eighths of the
            tokens. By default, 2,048 tokens in 8 documents if these take only seconds, otherwise none.

    Returns:
        [`PackedResult`]: `passed` if packed rows are exact; `verdict` in one word.

    Raises:
        `TypeError`, `ValueError`: `model` is not a transformers causal language model, `call` returns no logits, or
            `length` is too short for its documents.

    >>> from trl_paddingfree import check_packed
    >>> from trl_paddingfree.cli.quickstart.model import make_model, make_tokenizer
    >>> result = check_packed(make_model(make_tokenizer(["an apple a day"]), num_hidden_layers=2))
    >>> result.verdict, result.documents
    ('exact', 8)
    """
    base = architecture.transformers_model(model, "check_packed")
    if is_pooled(base):
        raise ValueError(f"`check_packed` reads logits of tokens, and {type(base).__name__} has no head for them.")
    implementation = str(upstream.attn_implementation(base))
    by = getattr(call, "__name__", type(call).__name__)
    if call is None:
        by = f"TRL's `packing=True` and `padding_free=True` ({implementation})"
        call = partial(as_trl_packs, model, base.base_model)
    packing = Packing("positions", implementation, prefix_sharing=False, by=by)
    lengths = lengths_of(base, _DOCUMENTS if documents is None else documents, _LENGTH if length is None else length)
    # A call may train with dropout, or turn autocast on: dropout is off, and rows alone use the same autocast
    with without_dropout([*model.modules()]), as_it_computes(base, call) as failure:
        if failure:
            return PackedResult(packing, failure=failure)
        called = partial(packed_or_alone, model, call)
        seconds = seconds_of_a_token(base, called)
        logits = sum(lengths) * base.config.get_text_config().vocab_size
        if length is documents is None and (seconds * sum(lengths) * _LONG_PASSES > _SECONDS or logits > LOGITS):
            lengths = ()
        for draw in range(draws_of(base)):
            result = _compare(packing, base, called, draw, lengths, seconds * _TRAINING_TOKENS <= _SECONDS)
            if result.passed or not result.isolated:
                break
    return result


def _compare(
    packing: Packing, model: PreTrainedModel, called: Call, draw: int, lengths: tuple[int, ...], every_layer: bool
) -> PackedResult:
    """Check packed rows of one draw: short ones and, in training mode, longer ones; then documents of `lengths`."""
    config = model.config.get_text_config()
    windows = [x for name in LIMITS if isinstance(x := architecture.config_value(config, name), int)]
    # Windows that documents exceed are tried as they are: the call may have its own, which cannot be narrowed
    narrows = bool(windows) and max(windows) >= max(lengths, default=0)
    evaluating = partial(undisturbed, model)
    training = cache(partial(PackedInTraining, model, called, draw, every_layer=every_layer))
    short = RowsAlone(model, called, draw, None if narrows else evaluating)
    result = compare_rows(packing, short, training)
    tried, left_out = [*map(len, short.rows)], list[str]()
    if result.gradients and result.gradients.passed:
        draws: list[tuple[Sequence[int], Any]] = [(_FEW, evaluating), (lengths, evaluating)]
        if not result.gradients.skipped:  # else it is random in training, or not finite
            tried = [*map(len, training().rows)]
            draws.append((lengths, partial(as_in_training, model, every_layer=every_layer)))
        for each, context in draws:
            if each and not (longer := compare_rows(packing, LongRows(model, called, draw, context, each))).passed:
                result = longer
                break
        tried = max(tried, [*lengths], key=sum)
    if not lengths:
        left_out.append(
            f"more documents and tokens were not tried, as they would take more than {_SECONDS:.0f} s or {LOGITS:,} "
            "logits: give `length` and `documents`"
        )
    if narrows and result.isolated and not result.passed and not result.failure:
        left_out.append(
            f"windows were narrowed to less than the {max(windows)} tokens that the model has: if the call has one of "
            f"its own, give a `length` of {int(max(windows) / LONGEST) + 2} or more"
        )
    return PackedResult(
        **vars(result), documents=len(tried), longest=max(tried), length=sum(tried), left_out=tuple(left_out)
    )
