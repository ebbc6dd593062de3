"""The second pass of the start-up check, under the conditions of training: training mode, gradients, a long flat row.

Four rows of equal length go through the model, in two pairs that share a long prefix. As a batch, they need no padding:
this is the reference. Of the flat batch, the losses of two rows are differentiated at a time, one row of each pair, not
side by side on the flat axis. The first row of a pair is scored at all tokens, the second after the shared prefix.
*Which* flat tokens carry gradient is compared without tolerance, in any precision: they must be those of the row alone.
More of them are a leak, fewer are forgotten context. How large the gradients are, within a tolerance, shows the rest:
context that only some layers forget, wrong positions.

For a model that does not train, log-probabilities of these rows are compared, and nothing is differentiated.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache

import torch
from transformers import PreTrainedModel

from ..flat.batch import FlatBatch, Inputs
from ..model import architecture
from ..model.flat_model import FlatModel
from ..model.forward import is_pooled
from ..model.restored import buffers_restored
from . import probe
from .comparison import HALF_DIGITS_FACTOR, Comparison, Values, Verdict, root_mean_square, worst_of
from .training import (
    as_in_training,
    as_it_answers,
    compared_parameters,
    frozen_layers_tried,
    is_sharded,
    is_small,
    raise_if_others_wait,
    sketch,
    watched_embeddings,
)

# Length of the rows: together more than 256 flat tokens
_LENGTH = 104
# The rows whose losses are differentiated together
_GROUPS = ((0, 2), (1, 3))
# Names in configurations for how far a token sees, where layers are built with that: nothing can narrow it afterwards
_BUILT_WITH = ("window_size", "sliding_window_size", "attention_window_size", "local_attention", "index_block_size",
               "index_topk_blocks", "indexer_budget", "block_size", "local_attention_window_len")  # fmt: skip
# Rows are made longer than limits up to so many tokens, and flat rows than the positions of a model: more takes long
_LONGEST_LIMIT = {"cpu": 256, "accelerator": 1024}
_LONGEST_FLAT = {"cpu": 2048, "accelerator": 8192}
# Gradients below this share of the largest count as zero: rounding alone may make them so
_NEGLIGIBLE = torch.finfo(torch.float32).eps ** 2
# The least relative tolerance of answers: rounding in float32 stays below it, forgotten and misplaced context do not
_LEAST_MISTAKE = 1e-5
# Where gradients at the tokens are, among those of parameters
_TOKENS = "tokens"


class RowsInTraining:
    """
    The reference for gradients: log-probabilities of four long rows in training mode, as a batch that needs no padding,
    and the gradients of their losses. With `trains=False`, only log-probabilities, in evaluation mode. `everything`
    says whether to try all layers and weights; by default, those of small models.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        call: probe.Call | None = None,
        draw: int = 0,
        trains: bool = True,
        everything: bool | None = None,
    ):
        self.model, self.call, self.trains = model, model if call is None else call, trains
        self.everything = is_small(model) if everything is None else everything
        kind = "cpu" if model.device.type == "cpu" else "accelerator"
        config = model.config.get_text_config()
        positions = architecture.position_limits(model)
        found = {name: vars(config).get(name) for name in _BUILT_WITH}
        limits = {name: limit for name, limit in found.items() if isinstance(limit, int) and limit > 0}
        exceeding = (limit + limit // 4 for limit in limits.values() if limit <= _LONGEST_LIMIT[kind])
        length = min([max([_LENGTH, *exceeding]), *positions])
        beyond = (f"`{name}={limit}`" for name, limit in limits.items() if limit >= length)
        self.notes = tuple(f"{each} is longer than the rows that were tried" for each in beyond)
        # Numbers of positions that a flat row can exceed within seconds
        self.position_limits = [limit for limit in positions if limit < _LONGEST_FLAT[kind]]
        self.rows = probe.long_rows(model, length, draw)
        self.unit = probe.rounding_unit(model)
        fork = int(length * probe.SHARED) - 1
        self.first_scored = (0, fork, 0, fork)  # of each row: the second and the fourth begin after the shared prefix
        with self.in_training() as left_out, frozen_layers_tried(model) as self.lost:  # that pass no gradient on
            self.notes += left_out
            self.parameters = compared_parameters(model, self.everything) if trains else {}
            others = sum(p.requires_grad for p in model.parameters()) - len(self.parameters)
            if trains and others > 0 and not is_sharded(model):
                self.notes += (f"gradients of the {others} largest weights were not compared",)
            self.log_probs, (self.gradients,) = self.differentiate(probe.row_inputs(model, self.rows))
        self.noise = cache(self._noise)

    def in_training(self) -> AbstractContextManager[tuple[str, ...]]:
        """The context in which the model is tried, as it trains, or as it answers: gives what it leaves out."""
        return as_in_training(self.model, self.call, self.everything) if self.trains else as_it_answers(self.model)

    def answers(self, inputs: Inputs) -> torch.Tensor:
        """`(R, L-1)` log-probabilities. A pooled head gives one answer per row, which is repeated to that shape."""
        output = self.call(**inputs)
        if not is_pooled(self.model):
            return output.log_probs
        return output.logits.sum(1, keepdim=True).expand(-1, inputs["input_ids"].size(1) - 1)

    def watched(self, inputs: Inputs) -> AbstractContextManager[list[torch.Tensor]]:
        """Within this context, the last entry of the list is what gradients of the tokens of `inputs` are taken at."""
        return watched_embeddings(self.model)

    def differentiate(
        self,
        inputs: Inputs,
        groups: Sequence[tuple[int, ...]] = ((0, 1, 2, 3),),
        places: tuple[int, ...] | None = None,
    ) -> tuple[torch.Tensor, list[Values]]:
        """
        Log-probabilities, and the gradients of the losses of each of `groups` of rows: those at the embeddings, and of
        parameters. `places` are those of the rows of a group among the rows of `inputs`, if these are not all four.
        """
        if not self.trains:
            return self.answers(inputs).double().cpu(), [{}]
        # Small gradients underflow in float16: training scales its losses, too
        scale = 2.0**8 if probe.compute_dtype(self.model) == torch.float16 else 1.0
        group = FlatModel.group_of(self.model)
        of_groups: list[Values] = []
        for rows in groups:
            # Engines gather weights for one backward pass of each forward pass
            if not of_groups or group is not None or is_sharded(self.model):
                with self.watched(inputs) as embedded:
                    log_probs = self.answers(inputs)
                if not embedded:
                    raise RuntimeError("its input embeddings are not what it computes with")
            scored = zip(places or rows, rows, strict=True)
            loss = torch.stack([log_probs[place, self.first_scored[row] :].sum() for place, row in scored]).sum()
            watched = [embedded[-1], *self.parameters.values()]
            gradients = [*torch.autograd.grad(loss * scale, watched, allow_unused=True, retain_graph=True)]
            if group is not None and "flat_batch" in inputs:
                gradients = [*group.whole_gradients(watched, gradients, inputs["flat_batch"])]
            at_tokens, *of_parameters = gradients
            values = {_TOKENS: None if at_tokens is None else at_tokens.detach().double().cpu()}
            named = zip(self.parameters, of_parameters, strict=True)
            of_groups.append(values | {name: None if x is None else sketch(x.detach()).cpu() for name, x in named})
        return log_probs.detach().double().cpu(), of_groups

    def compare_answers(self, found: torch.Tensor) -> Verdict:
        """Answers on long rows beside those of rows alone, of a model that does not train."""
        name = "answers on long rows"

        def padded() -> Values:
            with buffers_restored(self.model.modules()):  # "dynamic" frequencies follow the width
                width = len(self.rows[0]) + 5  # in another width, kernels round differently
                answers = self.answers(probe.row_inputs(self.model, self.rows, width)).double().cpu()
            return {name: answers[:, : self.log_probs.size(1)]}

        return Comparison.of_answers(
            {name: self.log_probs}, {name: found}, padded, self.unit, max(4 * self.unit, _LEAST_MISTAKE)
        ).verdict()

    def compare_gradients(self, of_rows: Values, of_groups: Sequence[Values]) -> Verdict:
        """Gradients of each row at its tokens, and those of parameters, added up over the groups."""
        at_rows, of_parameters = self._expected
        rows = Comparison.of_gradients(at_rows, of_rows, lambda: self.noise()[0], self.unit)
        parameters = Comparison.of_gradients(
            of_parameters, self.added(of_groups), lambda: self.noise()[1], self.unit, True
        )
        return worst_of([rows.verdict(), parameters.verdict()])

    @property
    def _expected(self) -> tuple[Values, Values]:
        at_tokens = self.gradients[_TOKENS]
        assert at_tokens is not None
        return {f"gradients of row {i}": x for i, x in enumerate(at_tokens)}, self.added([self.gradients])

    def added(self, of_groups: Sequence[Values]) -> Values:
        """Gradients of parameters, added up over groups."""
        found = {name: [x for each in of_groups if (x := each[name]) is not None] for name in self.parameters}
        return {f"gradients of `{name}`": sum(x[1:], x[0]) if x else None for name, x in found.items()}

    def _noise(self) -> tuple[Values, Values]:
        """Gradients of rows, and of parameters, where rows are computed two at a time, which rounds differently."""
        at_rows: dict[str, torch.Tensor | None] = {}
        of_groups = []
        for rows in _GROUPS:
            inputs = probe.row_inputs(self.model, [self.rows[row] for row in rows])
            _, (found,) = self.differentiate(inputs, [rows], places=(0, 1))
            if (at_tokens := found[_TOKENS]) is not None:
                at_rows |= {f"gradients of row {row}": at_tokens[i] for i, row in enumerate(rows)}
            of_groups.append(found)
        return at_rows, self.added(of_groups)


def check_gradients(in_training: Callable[[], RowsInTraining], prefix_sharing: bool) -> Verdict:
    """Compare the gradients of a flat batch, on the route that is installed, with those of the rows alone."""
    try:
        reference = in_training()
    except Exception as error:  # nor will it train with padding
        first_line, *_ = str(error).split("\n")
        return Verdict(failure=f"a row alone raises {type(error).__name__}: {first_line}", unmendable=True)
    if reference.lost:
        others = f" and {len(reference.lost) - 1} others" if len(reference.lost) > 1 else ""
        failure = (
            f"no gradient comes through {reference.lost[0]}, which is frozen{others}. What trains before it would get "
            "wrong gradients or none, and nothing would say so. Load the model with weights that can be trained "
            'through, such as `dtype="bfloat16"` or bitsandbytes'
        )
        return Verdict(failure=failure, unmendable=True)
    try:
        with reference.in_training():
            return _compare(reference, prefix_sharing)
    except Exception as error:  # whatever a model raises on flat input is a verdict, reported with its reason
        raise_if_others_wait(reference.model, error)
        return Verdict(failure=f"{type(error).__name__}: {error}")


def _compare(reference: RowsInTraining, prefix_sharing: bool) -> Verdict:
    inputs = probe.row_inputs(reference.model, reference.rows, prefix_sharing=prefix_sharing)
    batch: FlatBatch = inputs["flat_batch"].to("cpu")  # where gradients are compared
    notes = reference.notes
    random_state = torch.get_rng_state()
    log_probs, of_groups = reference.differentiate(inputs, _GROUPS)
    if not reference.trains:
        verdict = reference.compare_answers(log_probs)
    else:
        of_rows: dict[str, torch.Tensor | None] = {}
        alone = reference.gradients[_TOKENS]
        for rows, found in zip(_GROUPS, of_groups, strict=True):
            flat = found[_TOKENS]
            if flat is None or alone is None or flat.shape[:2] != batch.input_ids.shape:
                return Verdict(failure="no gradient reaches its input embeddings")
            if not alone.isfinite().all():
                return Verdict(skipped="those of a row alone are not finite")
            if failure := _wrong_tokens(flat[0], alone, batch, rows):
                return Verdict(failure=failure)
            of_rows |= {f"gradients of row {row}": flat[0][batch.row_index[row]] for row in rows}
        if reference.parameters and all(reference.gradients[name] is None for name in reference.parameters):
            notes += ("gradients of parameters were not compared, because an engine keeps them to itself",)
        verdict = reference.compare_gradients(of_rows, of_groups)
    is_random = reference.trains and _draws(reference, inputs, log_probs, random_state)
    if failure := _beyond_positions(reference, batch.counts.computed, is_random):
        return Verdict(failure=failure)
    if is_random:
        return Verdict(skipped="it draws at random in training (no gradient reaches another row)", notes=notes)
    return replace(verdict, notes=notes)


def _draws(reference: RowsInTraining, inputs: Inputs, log_probs: torch.Tensor, state: torch.Tensor) -> bool:
    """Whether the model draws at random in training, so that its answers to the same batch differ, and gradients."""
    if reference.model.device.type == "cpu" and torch.equal(torch.get_rng_state(), state):
        return False
    with torch.no_grad():
        again = reference.answers(inputs).double().cpu()
    return root_mean_square(again - log_probs) > reference.unit * root_mean_square(log_probs)


def _wrong_tokens(flat: torch.Tensor, alone: torch.Tensor, batch: FlatBatch, rows: tuple[int, ...]) -> str:
    """What is wrong with which tokens carry gradient, `flat` `(T, D)` and `alone` `(R, L, D)`; empty if nothing is."""
    if not flat.isfinite().all():
        return "gradients are not finite"
    touched = (flat != 0).any(1)
    for row in rows:
        touched[batch.row_index[row]] = False
    for other in range(len(batch.row_index)):
        if other not in rows and touched[batch.row_index[other]].any():
            return f"row {other} gets gradient from row {' or '.join(map(str, rows))}"
    for row in rows:
        sizes, expected = flat[batch.row_index[row]].norm(dim=1), alone[row].norm(dim=1)
        has, wanted = sizes > _NEGLIGIBLE * sizes.max(), expected > _NEGLIGIBLE * expected.max()
        if lost := (wanted & (sizes == 0)).nonzero()[:, 0].tolist():
            where = f"its first {len(lost)} tokens" if lost[-1] == len(lost) - 1 else f"{len(lost)} of its tokens"
            return f"row {row} forgets {where}"
        if more := (has & (expected == 0)).nonzero()[:, 0].tolist():
            return f"row {row} gets gradient at its token {more[0]}, which it does not alone"
    return ""


def _beyond_positions(reference: RowsInTraining, computed: int, is_random: bool) -> str:
    """What is wrong with a flat row of more tokens than a row may have positions, in words; empty if nothing is."""
    for limit in reference.position_limits:
        if limit < computed:  # the flat row of the check has been longer
            continue
        copies = limit // sum(map(len, reference.rows)) + 1
        inputs = probe.row_inputs(reference.model, reference.rows * copies, prefix_sharing=False)
        try:
            with torch.no_grad():
                log_probs = reference.answers(inputs).double().cpu()
        except Exception as error:
            return str(error)  # names the length, and what to change
        wrong = root_mean_square(log_probs - reference.log_probs.repeat(copies, 1))
        if not is_random and not wrong <= HALF_DIGITS_FACTOR * reference.unit**0.5 * root_mean_square(
            reference.log_probs
        ):
            return f"a flat row of more than the {limit} positions of its configuration is wrong by {wrong:.1e} nats"
    return ""
