"""The second pass of the start-up check, under training conditions: training mode, gradients, a long flat row.

Five rows of equal length go through the model: three share a long prefix, and two another. Batched, they need no
padding: this is the reference. In the flat batch, the losses of at most two rows are differentiated at a time, one of
each prefix, never neighbors on the flat axis. The first row of a prefix is scored at all tokens, others after it.
*Which* flat tokens get gradient is compared exactly, in any precision: they must be the same as for the row alone.
Extra tokens are a leak, missing ones are forgotten context. The size of the gradients, compared within a tolerance,
shows the rest: context that only some layers forget, wrong positions.

Then the rows come in a longer flat batch, between shorter ones and without sharing, see [`RowsInTraining._in_longer`].

For a model that does not train, log-probabilities of these rows are compared, and nothing is differentiated.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from ..flat.batch import FlatBatch, Inputs
from ..flat.schedule import Schedule
from ..model import architecture
from ..model.flat_model import FlatModel
from ..model.forward import is_allocation_failure, is_pooled
from ..model.mixers import rounded_otherwise
from . import probe
from .comparison import NOISE_FACTOR, Tried, Values, Verdict, compare, relative_error
from .tokens import embeddings_watched, gradients_at_tokens, scale_of, wrong_tokens
from .training import (
    as_in_training,
    as_it_answers,
    compared_parameters,
    frozen_layers_tried,
    is_sharded,
    raise_if_others_wait,
)

# Length of each row: enough for more than 256 flat tokens
_LENGTH = 104
# The rows whose losses are differentiated together
_GROUPS = ([0, 2], [1, 4], [3])
# By how much shorter the rows are that stand between the others on a longer flat row, and what its length divides by
_SHORTER, _MULTIPLE = 8, 128
# Configuration fields for how far a token sees that layers read when they are built: they cannot be narrowed later
_BUILT_WITH = ("window_size", "sliding_window_size", "attention_window_size", "local_attention", "index_block_size",
               "index_topk_blocks", "indexer_budget", "block_size", "local_attention_window_len")  # fmt: skip
# Largest such limit for rows to exceed, and largest position limit for flat rows, on the CPU and on accelerators
_LONGEST = (256, 2048), (1024, 8192)
# The most entries of a gradient that is compared whole. A larger one is multiplied by a random vector
_WHOLE = 2**18
# Least relative tolerance of answers: rounding in float32 stays below it, forgotten or misplaced context does not
_LEAST_MISTAKE = 1e-5

# Gives another way to compute a flat batch, within its context: another batch, or the same one by other code
Vary = Callable[[FlatBatch], AbstractContextManager[FlatBatch]]


class Pass(NamedTuple):
    """What the model computes for the rows, in float64 on the CPU: answers, and the gradients of their losses."""

    log_probs: torch.Tensor  # (R, L-1)
    at_tokens: torch.Tensor  # (R, L, D) at the embeddings, or (1, T, D) of a flat batch
    of_weights: Values

    def answers(self) -> Values:
        return {"answers on long rows": self.log_probs}

    def of_rows(self) -> Values:
        return {f"gradients of row {i}": x for i, x in enumerate(self.at_tokens)}

    def of_parameters(self) -> Values:
        return self.of_weights


class RowsInTraining:
    """
    The reference for gradients: log-probabilities of five long rows in training mode, as a batch that needs no padding,
    and the gradients of their losses. With `trains=False`, only log-probabilities, in evaluation mode. `every_layer`
    says whether all layers run; by default, they do in small models. `scores_all` is for comparing flat batches with
    each other: rows alone are not computed, and all rows of a prefix are scored on it, because in narrow windows, the
    gradients of some tokens would otherwise nearly vanish. A longer flat row comes in two `orders`, or in one.
    """

    unseen: tuple[str, ...] = ()  # why gradients at the embeddings cannot be compared
    without_limits = [1024]  # tokens that a flat row exceeds if the model has no such limit
    differentiates = 2048  # longer flat rows are computed without gradients

    def __init__(
        self,
        model: PreTrainedModel,
        call: probe.Call | None = None,
        draw: int = 0,
        trains: bool = True,
        every_layer: bool | None = None,
        scores_all: bool = False,
        orders: int = 2,
    ):
        self.model, self.call, self.trains = model, model if call is None else call, trains
        self.every_layer, self.unit, self.orders = every_layer, probe.rounding_unit(model), orders
        longest_limit, longest_flat = _LONGEST[model.device.type != "cpu"]
        config, positions = vars(model.config.get_text_config()), architecture.position_limits(model)
        limits = {name: x for name in _BUILT_WITH if isinstance(x := config.get(name), int) and x > 0}
        exceeding = [limit + limit // 4 for limit in limits.values() if limit <= longest_limit]
        self.length = min([max([_LENGTH, *exceeding]), *positions])
        self.notes = tuple(
            f"`{name}={limit}` is longer than the rows that the check tried"
            for name, limit in limits.items()
            if limit >= self.length
        )
        # Numbers of positions that a flat row can exceed within seconds
        self.position_limits = [limit for limit in positions if limit < longest_flat] or self.without_limits
        self.rows = probe.long_rows(model, self.length, draw)
        # Each token has its own weight in the losses; by default, a shared prefix counts in the first row only
        shape = len(self.rows), self.length - 1
        self.weights = torch.from_numpy(np.random.default_rng(draw).uniform(0.5, 1.5, shape))
        if not scores_all:
            self.weights[[*probe.CONTINUED], : int(self.length * probe.SHARED) - 1] = 0
        with self.in_training() as left_out, frozen_layers_tried(model) as self.lost:  # layers that block gradients
            self.parameters = compared_parameters(model) if trains else {}
            if not scores_all:
                self.alone = self.differentiate(probe.row_inputs(model, self.rows))
        self.notes += left_out
        others = sum(p.requires_grad for p in model.parameters()) - len(self.parameters)
        if trains and others:
            self.notes += (f"gradients of {others} weights, large or sharded, were not compared",)
        self.wider = min([self.length + 5, *positions])
        self.noises = cache(self._rounded_otherwise)

    @property
    def others_wait(self) -> bool:
        """Whether other processes wait for each pass of this one: for slices of the same batch, or for weights."""
        return bool(FlatModel.peers_of(self.model).name) or is_sharded(self.model)

    def in_training(self) -> AbstractContextManager[tuple[str, ...]]:
        """The context in which the model is tried, in training or evaluation mode. Yields what it leaves out."""
        return as_in_training(self.model, self.call, self.every_layer) if self.trains else as_it_answers(self.model)

    def answers(self, inputs: Inputs) -> torch.Tensor:
        """`(R, L-1)` log-probabilities. A pooled head gives one answer per row, which is repeated to that shape."""
        output = self.call(**inputs)
        answers = output.logits.sum(1, keepdim=True) if is_pooled(self.model) else output.log_probs
        return answers[:, : self.length - 1].expand(-1, self.length - 1)

    def watched(self, inputs: Inputs) -> AbstractContextManager[list[torch.Tensor]]:
        """Within this context, the list ends with the tensors whose gradients are those of the tokens of `inputs`."""
        return embeddings_watched(self.model)

    def differentiate(
        self, inputs: Inputs, rows: Sequence[int] | None = None, weights: torch.Tensor | None = None
    ) -> Pass:
        """What the model computes for all rows, and the gradients of the losses of some, by default of all."""
        if not self.trains:
            return Pass(self.answers(inputs).cpu().double(), torch.empty(0), {})
        parameters = [*self.parameters.values()]
        with self.watched(inputs) as embedded:
            log_probs = self.answers(inputs)
            # Training differentiates outside of autocast, too
            with probe.outside_autocast(self.model):
                weighted = log_probs * (self.weights if weights is None else weights).to(log_probs)
                loss = weighted[slice(None) if rows is None else [*rows]].sum() * scale_of(self.model)
                batch: FlatBatch | None = inputs.get("flat_batch")
                found = gradients_at_tokens(self.model, embedded, loss, self.length, batch, parameters)
        with probe.outside_autocast(self.model):
            at_tokens, *others = [torch.zeros(()) if x is None else x.detach() for x in found]
            names = (f"gradients of `{name}`" for name in self.parameters)
            of_weights = {name: _sketch(x) for name, x in zip(names, others, strict=True)}
        return Pass(log_probs.detach().cpu().double(), at_tokens.cpu().double(), of_weights)

    def _rounded_otherwise(self) -> list[Pass]:
        """The rows alone where kernels round differently: at another width, and in recurrences of smaller chunks."""

        def alone(width: int = 0) -> Pass:
            return self.differentiate(probe.row_inputs(self.model, self.rows, width))

        return [alone(self.wider), *rounded_otherwise(self.model, alone)]

    def compare(self, prefix_sharing: bool, vary: Vary | None = None) -> Verdict:
        """
        Compare the flat batch of these rows, on the installed route, with the rows alone. With `vary`, compare what
        that makes of the batch with the batch as it is instead, answers as well as gradients.
        """
        inputs = probe.row_inputs(self.model, self.rows, prefix_sharing=prefix_sharing)
        batch: FlatBatch = inputs["flat_batch"]
        index = batch.row_index.cpu()

        def in_groups() -> list[Pass]:
            return [self.differentiate(inputs, rows) for rows in (_GROUPS if self.trains else _GROUPS[:1])]

        def in_rows(passes: list[Pass]) -> Pass:
            if not self.trains:
                return passes[0]
            of_row = {row: found.at_tokens for rows, found in zip(_GROUPS, passes, strict=True) for row in rows}
            found = [of_row[i][0, places] for i, places in enumerate(index)]
            of_rows = self.alone.at_tokens if self.unseen else torch.stack(found)
            of_weights = {
                name: torch.stack([x.of_weights[name] for x in passes]).sum(0) for name in passes[0].of_weights
            }
            return Pass(passes[0].log_probs, of_rows, of_weights)

        if self.others_wait:
            self.noises()  # else, only processes with large errors would ask for these passes
        passes = in_groups()
        is_random = relative_error(passes[-1].log_probs, passes[0].log_probs) > self.unit
        if vary is None:
            expected = self.alone
        else:
            expected = in_rows(passes)
            with vary(batch) as inputs["flat_batch"]:
                passes = in_groups()
        if not expected.at_tokens.isfinite().all():
            named = probe.not_finite(self.model)
            return Verdict(skipped=f"those of a row alone are not finite{f': {named}' * bool(named)}")
        for rows, found in zip(_GROUPS if self.trains and not self.unseen else (), passes, strict=False):
            if failure := wrong_tokens(found.at_tokens, dict(enumerate(expected.at_tokens)), [*index], rows):
                return Verdict(failure=failure)
        flat = in_rows(passes)
        verdicts, tried = [], Tried(len(self.rows), self.length, batch.counts.computed)
        # The rows above exceed lower limits. For models that draw at random, only errors that they raise tell
        for limit in [x for x in self.position_limits if x >= tried.length] if vary is None else ():
            longer = self._in_longer(limit, is_random)
            if longer.failure:
                return longer
            verdicts.append(longer)
            tried = longer.tried or tried
        if is_random:
            return Verdict(
                skipped="it draws at random in training, or keeps something of earlier calls (no gradient reaches "
                "another row)",
                notes=self.notes,
            )
        if self.trains:
            verdicts += [self._beside(Pass.of_rows, expected, flat.of_rows())]
            verdicts += [self._beside(Pass.of_parameters, expected, flat.of_parameters(), of_parameters=True)]
        if not self.trains or vary is not None:
            # A pooled head gives one number per row: with so few, noise may be near zero by chance
            least = max(NOISE_FACTOR * self.unit * (NOISE_FACTOR if is_pooled(self.model) else 1), _LEAST_MISTAKE)
            if vary is not None and vars(self.model).get("is_quantized"):
                least = math.inf  # for the few tokens of a slice, some use kernels that round more
            verdicts.append(self._beside(Pass.answers, expected, flat.answers(), least=least))
        notes = dict.fromkeys(note for each in verdicts for note in each.notes)
        return replace(_worst(verdicts), notes=(*self.notes, *self.unseen, *notes), tried=tried)

    def _beside(self, values: Callable[[Pass], Values], expected: Pass, found: Values, **options: Any) -> Verdict:
        return compare(values(expected), found, lambda: map(values, self.noises()), self.unit, **options)

    def _in_longer(self, limit: int, is_random: bool) -> Verdict:
        """
        Compare a flat batch of more than `limit` tokens with the rows alone. It has no shared prefixes, and in turns
        whole rows and short ones, which are cut from them. It comes in two orders of the same shape, so that nothing
        can be kept for a shape. In the first order, each row is differentiated once, and never two neighbors.
        """
        number, is_whole = len(self.rows), is_pooled(self.model)  # whose answers are those at the end of a row
        short = self.length if is_whole else self.length // _SHORTER
        copies = limit // (number * (self.length + short)) + 1
        pairs = [((i, self.length), ((i + 1) % number, short)) for i in range(number)] * copies
        cuts = [cut for pair in pairs for cut in pair]
        missing = 0 if is_whole else -sum(n for _, n in cuts) % _MULTIPLE
        cuts += [(0, n) for n in (missing // 2, missing - missing // 2) if n > 1]
        scored = [2 * (i % copies * number + i) for i in range(number)]
        length = sum(n for _, n in cuts)
        where = f"a flat row of more than {limit} tokens"
        verdicts, notes = list[Verdict](), self.notes[:0]
        is_low = self.unit > torch.finfo(torch.float32).eps
        least = math.inf if is_low else max(NOISE_FACTOR * self.unit, _LEAST_MISTAKE)
        for order in (cuts, cuts[::-1])[: self.orders]:

            def answers(alone: Pass, order: Sequence[tuple[int, int]] = order) -> Values:
                return {f"answers on {where}": torch.cat([alone.log_probs[i, : n - 1] for i, n in order])}

            inputs = probe.row_inputs(self.model, [self.rows[i][:n] for i, n in order], prefix_sharing=False)
            if not is_sharded(self.model):  # then each call of the head gathers its weights
                # Logits of all these tokens would take more than anything else
                schedule = Schedule(head_chunk=self.length)
                inputs["flat_batch"] = replace(inputs["flat_batch"], schedule=schedule)
            found = None
            if order is cuts and self.trains and limit <= self.differentiates:
                try:
                    weights = torch.zeros(len(cuts), self.length - 1, dtype=self.weights.dtype)
                    weights[scored] = self.weights
                    found = self.differentiate(inputs, weights=weights)
                except torch.OutOfMemoryError:
                    if self.others_wait:
                        raise
                    notes = (f"gradients of {where} were not compared, for lack of memory",)
            if found is None:
                with torch.no_grad():
                    log_probs = self.answers(inputs).cpu().double()
            else:
                log_probs, index = found.log_probs, inputs["flat_batch"].row_index.cpu()
            if found is not None:
                alone = dict(zip(scored, self.alone.at_tokens, strict=True))
                if failure := wrong_tokens(found.at_tokens, alone, [*index], scored):
                    return Verdict(failure=f"{failure}, in {where}")
            if is_random:
                continue
            flat = {f"answers on {where}": torch.cat([x[: n - 1] for x, (_, n) in zip(log_probs, order, strict=True)])}
            verdicts.append(self._beside(answers, self.alone, flat, least=least))
            if not verdicts[-1].passed:
                return Verdict(failure=f"{where} is wrong by {verdicts[-1].error:.1e}")
            if found is not None:
                found = Pass(log_probs, found.at_tokens[0, index[scored]], found.of_weights)
                verdicts += [
                    replace(verdict, worst=f"{verdict.worst}, in {where},")
                    for verdict in (
                        self._beside(Pass.of_rows, self.alone, found.of_rows()),
                        self._beside(Pass.of_parameters, self.alone, found.of_parameters(), of_parameters=True),
                    )
                ]
        tried = Tried(len(cuts), self.length, length)
        if is_random:
            return Verdict(skipped="it draws at random", tried=tried)
        return replace(_worst(verdicts), notes=notes, tried=tried)


InTraining = Callable[[], RowsInTraining]  # called only when gradients are compared


def check_gradients(model: PreTrainedModel, in_training: InTraining, prefix_sharing: bool) -> Verdict:
    """Compare the gradients of a flat batch of `model`, on the installed route, with those of the rows alone."""
    try:
        reference = in_training()
    except Exception as error:  # it would not train with padding either
        # Memory may lack on one process only, which others would wait for once their rows have passed
        raise_if_others_wait(model, error, exchanges=is_allocation_failure(error))
        first_line, *_ = str(error).split("\n")
        return Verdict(failure=f"a row alone raises {type(error).__name__}: {first_line}", unmendable=True)
    if reference.lost:
        return Verdict(
            failure=f"no gradient comes through {', '.join(reference.lost[:3])}, which is frozen. Layers before "
            "it would silently get wrong gradients or none. Load the model with weights that pass gradients on, "
            'such as `dtype="bfloat16"` or bitsandbytes',
            unmendable=True,
        )
    if reference.trains and not reference.alone.at_tokens.any():
        return Verdict(failure=_without_effect(reference.model), unmendable=True)
    try:
        with reference.in_training():
            return reference.compare(prefix_sharing)
    except Exception as error:  # any error that a model raises on flat input becomes a verdict
        raise_if_others_wait(reference.model, error)
        return Verdict(failure=f"{type(error).__name__}: {error}", raised=True)


def _without_effect(model: PreTrainedModel) -> str:
    """Why answers do not depend on the input, in words: frozen weights may be zero."""
    zeros = [f"`{name}`" for name, p in model.named_parameters() if not p.requires_grad and not p.any()]
    zeros = [name for name in zeros if not name.endswith("bias`")]
    because = f": {', '.join(zeros[:3])}, which {'is' if len(zeros) == 1 else 'are'} frozen, hold nothing but zeros"
    return f"its answers do not depend on its input, so that nothing below them gets a gradient{because * bool(zeros)}"


def _worst(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict whose error is largest beside its tolerance."""
    return max(verdicts, key=lambda x: (math.isnan(x.error), x.error / x.tolerance))


def _sketch(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient in float64 on the CPU; that of a large matrix is multiplied by a random vector."""
    if gradient.numel() > _WHOLE and gradient.ndim > 1:
        vector = torch.randn(gradient.size(-1), generator=torch.Generator().manual_seed(0))
        gradient = gradient.flatten(0, -2).float() @ vector.to(gradient.device)
    return gradient.cpu().double()  # MPS has no float64
