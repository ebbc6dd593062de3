"""The start-up check for packed rows of others: does a forward pass that is not ours keep them apart?"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from .. import upstream
from ..flat.batch import FlatBatch, Inputs
from ..model import architecture
from ..model.flat_model import FlatModel
from ..model.forward import is_pooled
from ..model.restored import local_part
from ..model.routes import Route
from .anywhere import log_probs_of, transformers_model
from .gradients import GradientResult, RowsInTraining
from .probe import (
    LIMITS,
    NOISE_FACTOR,
    Call,
    Rows,
    RowsAlone,
    check_rows,
    narrowed,
    root_mean_square,
    row_inputs,
    undisturbed,
)
from .prove import CheckResult, compare_rows, draws_of
from .training import as_in_training, without_dropout

# A function that takes rows, each `(n,)` int64, and returns the logits of each, `(n, vocabulary)`
PackedCall = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]

# Documents of the largest draw by default, its tokens in all, and the share of them in the longest document
_DOCUMENTS, _LENGTH, _LONGEST = 8, 2048, 0.625
# What takes longer, or has more logits at once, is left out and named
_SECONDS, _LOGITS = 10.0, 2**29
# Tokens that each step computes, as multiples of those of its rows; a backward pass counts as two forward passes
_LONG_PASSES, _TRAINING_PASSES = 8, 15
# The most entries of a gradient that is compared whole. A larger one is multiplied by a random vector
_WHOLE = 2**18
# Errors of a gradient are relative to its norm, or to this share of the largest norm if that is more: in float32, and
# in lower precision, where rounding may send a token to another expert
_LEAST_NORM, _LEAST_NORM_IN_LOW_PRECISION = 0.01, 0.1
# The most that measured noise may raise the tolerance of these errors to: a gradient that is halved is off by 0.5
_MOST_NOISE = 0.4


@dataclass(frozen=True)
class Packing(Route):
    """In the place of a route of this package: `by` names the function that packs rows."""

    by: str = ""

    def __str__(self) -> str:
        return f"packed by {self.by}"


@dataclass(frozen=True)
class PackedResult(CheckResult):
    """
    A [`CheckResult`] of packed rows, and up to where it holds.

    Args:
        documents, longest, length (`int`):
            The most documents that were packed together, the tokens of the longest one, and those of all of them.
        left_out (`tuple[str, ...]`):
            What was not compared, each with the reason.
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
    Compare packed rows with each row alone: whether rows see one another (a leak), whether their log-probabilities are
    right (positions and context), and whether their gradients are, in the model's dtype, on its device.

    Four short rows and four of up to 104 tokens are tried with gradients, and a larger draw in evaluation and in
    training mode. A verdict says up to which sizes it holds, and what was left out.

    Args:
        model (`torch.nn.Module`):
            A causal language model of transformers, under whatever wrappers. It computes each row alone, too.
        call (`Callable`, *optional*):
            A function that computes rows as a framework does. It is given the rows, a list of `(n,)` int64 tensors on
            the device of the model, and returns the logits of each, `(n, vocabulary)`, in their order. It may pack, pad
            or reorder them, but has to compute with `model` and its input embeddings. By default, [`by_positions`].
        length, documents (`int`, *optional*):
            Tokens of the larger draw in all, and its documents, the longest of which has five eighths of the tokens. By
            default, 2,048 tokens in 8 documents if these take seconds, and else none.

    Returns:
        [`PackedResult`]: `passed` if packed rows are exact, and in words, `verdict`.

    Raises:
        `TypeError`, `ValueError`: `model` is no causal language model of transformers, `call` returns no logits, or
            `length` is too short for its documents.

    >>> from trl_paddingfree import check_packed
    >>> from trl_paddingfree.quickstart.model import make_model, make_tokenizer
    >>> result = check_packed(make_model(make_tokenizer(["an apple a day"]), num_hidden_layers=2))
    >>> result.verdict, result.documents, result.length
    ('exact', 8, 2048)
    """
    base = transformers_model(model, "check_packed")
    if is_pooled(base):
        raise ValueError(f"`check_packed` reads logits of tokens, and {type(base).__name__} has no head for them.")
    implementation = str(upstream.attn_implementation(base))
    by_default = f"transformers, told of rows by `position_ids` alone ({implementation})"
    by = by_default if call is None else getattr(call, "__name__", type(call).__name__)
    packing = Packing("positions", implementation, prefix_sharing=False, by=by)
    packed = partial(by_positions, model) if call is None else call
    lengths = _lengths(base, documents or _DOCUMENTS, length or _LENGTH)
    # The call may train with dropout, or compute under autocast: so do rows alone, but for the dropout
    with without_dropout([*model.modules()]), _as_computed(base, packed):
        called = partial(_packed_or_alone, model, packed)
        seconds = _seconds_of_a_token(base, called)
        has_long = bool(length or documents) or (
            seconds * sum(lengths) * _LONG_PASSES <= _SECONDS
            and sum(lengths) * base.config.get_text_config().vocab_size <= _LOGITS
        )
        for draw in range(draws_of(base)):
            result = _compare(packing, _Draw(base, called, draw, seconds, lengths if has_long else ()))
            if result.passed or not result.isolated:
                break
    return result


def by_positions(model: torch.nn.Module, rows: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The logits of rows that transformers computes as one, with `position_ids` that start at 0 for each."""
    positions = torch.cat([torch.arange(len(row), device=row.device) for row in rows])[None]
    logits = model(input_ids=torch.cat(rows)[None], position_ids=positions, use_cache=False).logits
    return logits[0].split(list(map(len, rows)))


def _lengths(model: PreTrainedModel, documents: int, length: int) -> tuple[int, ...]:
    """Lengths of documents, all of them different in the long run: the longest is in the middle, the first is short."""
    if documents < 2 or length < 8 * documents:
        raise ValueError(
            f"`documents={documents}` with `length={length}`: leaks show between two documents or more, of 8 tokens or "
            "more on average. Set `documents` to at least 2, and `length`, the tokens of all, to 8 times as many."
        )
    most = min([length, *architecture.position_limits(model)])
    longest, shares = int(length * _LONGEST), np.arange(1, documents)
    others = 2 + ((length - longest - 2 * (documents - 1)) * shares / shares.sum()).astype(int)
    return tuple(int(min(n, most)) for n in np.insert(others, documents // 2, longest))


@contextmanager
def _as_computed(model: PreTrainedModel, call: PackedCall) -> Iterator[None]:
    """The autocast that `call` turns on. Refuses what returns no logits."""
    device, found = model.device.type, set[torch.dtype]()

    def note(*_: object) -> None:
        if torch.is_autocast_enabled(device):
            found.add(torch.get_autocast_dtype(device))

    rows = [torch.from_numpy(row).to(model.device) for row in check_rows(model.config.get_text_config().vocab_size, 0)]
    answers: Any = ()
    with undisturbed(model), ExitStack() as hooks:
        for module in model.modules():
            hooks.enter_context(module.register_forward_hook(note))
        with suppress(Exception):  # it is raised again where a verdict is made of it
            answers = call(rows)
            answers = [*answers] if isinstance(answers, Iterable) else answers
    if not isinstance(answers, list | tuple) or not all(map(torch.is_tensor, answers)):
        kind = "None" if answers is None else f"a {type(answers).__name__}"
        raise TypeError(
            f"`call` returned {kind}: it has to return the logits of each row, `(n, vocabulary)`, in order."
        )
    with torch.autocast(device, found.pop()) if found else nullcontext():
        yield


def _seconds_of_a_token(model: PreTrainedModel, called: Call) -> float:
    """Seconds that a model takes for a token of a row."""
    length = min([128, *architecture.position_limits(model)])
    row = np.arange(length) % model.config.get_text_config().vocab_size
    with undisturbed(model):
        start = time.perf_counter()
        called(**row_inputs(model, [row])).log_probs.sum().item()
    return (time.perf_counter() - start) / length


class _ShortRows(RowsAlone):
    """[`RowsAlone`] that `narrows` windows, or leaves them, as a call may have windows of its own."""

    def __init__(self, model: PreTrainedModel, called: Call, draw: int, narrows: bool):
        self.narrows = narrows
        super().__init__(model, called, draw)

    @contextmanager
    def trying(self) -> Iterator[None]:
        with undisturbed(self.model), narrowed(self.model) if self.narrows else nullcontext():
            yield


class _LongRows(RowsAlone):
    """[`RowsAlone`] of documents of given lengths, in evaluation mode or in `context`."""

    def __init__(
        self,
        model: PreTrainedModel,
        called: Call,
        draw: int,
        lengths: Sequence[int],
        context: Callable[[], AbstractContextManager[None]],
    ):
        self.model, self.call, self.trying = model, called, context  # type: ignore[method-assign]
        self.vocab_size = model.config.get_text_config().vocab_size
        rng = np.random.default_rng(draw)
        self.rows = [rng.integers(0, self.vocab_size, n) for n in lengths]
        with self.trying():
            self.alone = self.answers(self.rows)
            short = rng.integers(0, self.vocab_size, 16)
            moved = [np.concatenate([[(short[0] + 1 + i) % self.vocab_size], short[1:]]) for i in range(8)]
            still = self.answers([short])[0].repeat(len(moved))
            self.measure([self.answers(self.rows, more) for more in (1, 37)], torch.cat(self.answers(moved)), still)

    def answers(self, rows: Rows, width: int = 0, prefix_sharing: bool | None = None) -> list[torch.Tensor]:
        """Without `prefix_sharing`, each row is computed alone, with `width` columns of padding."""
        if prefix_sharing is None:
            found = [super(_LongRows, self).answers([row], len(row) + width)[0] for row in rows]
        else:
            found = super().answers(rows, prefix_sharing=prefix_sharing)
        return [x.detach() for x in found]

    def difference(self, found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
        return max(root_mean_square(a - b) for a, b in zip(found, expected, strict=True))

    def changed(self) -> list[tuple[Rows, list[int]]]:
        places = range(len(self.rows))
        return [
            ([self._replaced(row) if i % 2 == kept else row for i, row in enumerate(self.rows)],
             [i for i in places if i % 2 != kept])
            for kept in (0, 1)
        ]  # fmt: skip


@dataclass(frozen=True)
class _Draw:
    """Random documents to compare: those of the start-up check, and if there are `lengths`, a larger draw."""

    model: PreTrainedModel
    called: Call
    seed: int
    seconds: float  # that a token takes
    lengths: tuple[int, ...]


def _compare(packing: Packing, draw: _Draw) -> PackedResult:
    """What packed rows of one draw are, in evaluation and training mode, with gradients."""
    model, called, lengths = draw.model, draw.called, draw.lengths
    config = model.config.get_text_config()
    windows = [x for name in LIMITS if isinstance(x := architecture.config_value(config, name), int)]
    # A window that the documents exceed is tried as it is: a call may have its own, which cannot be narrowed
    narrows = bool(windows) and max(windows) >= max(lengths, default=0)
    training = cache(partial(_PackedInTraining, model, called, draw.seed, draw.seconds))
    result = compare_rows(packing, _ShortRows(model, called, draw.seed, narrows), training)
    left_out: tuple[str, ...] = ()
    tried = [104] * 4
    if result.passed and result.gradients is not None and not result.gradients.skipped:
        tried = [*map(len, training().rows)]
        result, left_out = (
            replace(result, gradients=training().compare_parameters(result.gradients)),
            training().left_out,
        )
    if lengths:
        tried = lengths if sum(lengths) > sum(tried) else tried
        contexts = [partial(_evaluating, model), partial(as_in_training, model, every_layer=training().every_layer)]
        for context in contexts:
            if result.passed:
                longer = compare_rows(packing, _LongRows(model, called, draw.seed, lengths, context))
                result = result if longer.passed else longer
    else:
        left_out += (
            f"more documents and tokens were not tried, which would take more than {_SECONDS:.0f} s: pass `length` and "
            "`documents`",
        )
    if narrows and not result.passed and result.isolated:
        left_out += (
            f"windows were narrowed, which `call` has to ask the model for: pass a `length` above "
            f"{int(max(windows) / _LONGEST) + 1} to try the window of {max(windows)} tokens itself",
        )
    values = {field.name: vars(result)[field.name] for field in fields(CheckResult)}
    return PackedResult(**values, documents=len(tried), longest=max(tried), length=sum(tried), left_out=left_out)


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    with undisturbed(model):
        yield


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
    """
    [`RowsInTraining`] of rows that `call` may pack in any order: the model's input is searched for their tokens. All
    layers compute if that takes seconds, and gradients of all parameters are compared, of large ones in one direction.
    """

    def __init__(self, model: PreTrainedModel, called: Call, draw: int, seconds: float):
        self.every_layer = seconds * 4 * 104 * _TRAINING_PASSES <= _SECONDS
        super().__init__(model, called, draw)
        parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad and p.numel()]
        parameters.sort(key=lambda named: named[1].numel())
        sizes = np.cumsum([p.numel() for _, p in parameters])
        kept = [local_part(p) is p and size <= _LOGITS for (_, p), size in zip(parameters, sizes, strict=True)]
        self.parameters = [p for (_, p), is_kept in zip(parameters, kept, strict=True) if is_kept]
        others = [name for (name, _), is_kept in zip(parameters, kept, strict=True) if not is_kept]
        self.left_out: tuple[str, ...] = ()
        if others:
            self.left_out += (f"the gradient of `{others[-1]}` and of {len(others) - 1} others was not compared",)
        if not self.every_layer:
            self.left_out += ("in training mode, only the first and the last layer of each kind have computed",)

    def in_training(self) -> AbstractContextManager[None]:
        return as_in_training(self.model, self.call, self.every_layer)

    def compare_parameters(self, result: GradientResult) -> GradientResult:
        """`result`, or what is wrong with the gradients of parameters, of a loss that weighs each token differently."""
        with self.in_training():
            alone, packed = self._sketches(), self._sketches(is_packed=True)
            error = self._error(packed, alone)
            tolerance = self.tolerance
            if not error <= tolerance:
                noise = self._error(self._sketches(more=5), alone)
                tolerance = max(tolerance, min(NOISE_FACTOR * noise, _MOST_NOISE))
        if error <= tolerance:
            return result
        return replace(result, error=error, worst="gradients of parameters", tolerance=tolerance)

    def _error(self, found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
        is_low = self.unit > torch.finfo(torch.float32).eps
        norms = [float(x.norm()) for x in expected]
        least = (_LEAST_NORM_IN_LOW_PRECISION if is_low else _LEAST_NORM) * max(norms, default=0.0)
        errors = [float((a - b).norm()) / max(n, least, 1e-300) for a, b, n in zip(found, expected, norms, strict=True)]
        return float(np.max(errors, initial=0.0))

    def _sketches(self, is_packed: bool = False, more: int = 0) -> list[torch.Tensor]:
        """Gradients of parameters, float64 on the CPU: zeros where none arrive, of large ones the product with a vector."""
        rng = np.random.default_rng(0)
        totals: list[torch.Tensor] = []
        for rows in [self.rows] if is_packed else [[row] for row in self.rows]:
            inputs = row_inputs(self.model, rows, len(rows[0]) + more, prefix_sharing=False if is_packed else None)
            log_probs = self.answers(inputs)[:, : len(rows[0]) - 1]
            weights = torch.from_numpy(rng.uniform(0.5, 1.5, log_probs.shape)).to(log_probs)
            gradients = torch.autograd.grad((log_probs * weights).sum(), self.parameters, allow_unused=True)
            sketches = [_sketch(p, g) for p, g in zip(self.parameters, gradients, strict=True)]
            totals = [a + b for a, b in zip(totals, sketches, strict=True)] if totals else sketches
        return totals

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


def _sketch(parameter: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
    """A gradient, or a large one times a random vector, float64 on the CPU."""
    gradient = torch.zeros_like(parameter) if gradient is None else gradient
    if gradient.numel() > _WHOLE:
        vector = np.random.default_rng(0).standard_normal(gradient.size(-1))
        gradient = gradient.flatten(0, -2) @ torch.from_numpy(vector).to(gradient)
    return gradient.double().cpu()
