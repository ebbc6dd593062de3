"""One look at a call of a model that is being trained: the flat batch as it is, beside its rows one by one.

The flat batch goes through the model as the step has it: in the same layout, by the same backend, with the same
schedule, compiled if layers are. Half of its rows is scored with random weights, and the sum is differentiated at the
embeddings; in low precision, where answers hide more, so is the other half. Then each row goes through the model alone.
Compared are

- the answers to all rows,
- *which* flat tokens get gradient, exactly, in any precision: none that is on no scored row, and all that a row alone
  gives some,
- the gradient at the tokens of each scored row with the sum of what the scored rows alone have there.

Differences of a few units of rounding pass. Where there are larger ones, rounding is measured: by how much padding, and
rows beside them, move the answers and gradients of the same rows. In low precision, rounding may even send a token to
another expert: a size that is off has to recur with other tokens in the same places and, once at least, in the same
row, as a mistake of the layout does. Calls without gradients are compared by their answers.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import torch

from ..core.check.comparison import HALF_DIGITS_FACTOR, MOST_NOISE, NOISE_FACTOR, Verdict, relative_error
from ..core.check.probe import compute_dtype, outside_autocast, rounding_unit, tried_tokens
from ..core.check.prove import Agree, draws_of
from ..core.check.tokens import embeddings_watched, gradients_at_tokens, scale_of, wrong_tokens
from ..core.check.training import as_in_training, as_it_answers, raise_if_others_wait
from ..core.device import in_float64
from ..core.flat.batch import IGNORE_INDEX, FlatBatch, Inputs, Make
from ..core.model import architecture
from ..core.model.flat_model import FlatModel
from ..core.model.mixers import rounded_otherwise
from ..core.model.restored import attributes_set, random_state

# The least tolerance, in units of rounding: sums of many terms in another order differ by several, and the score of a
# tiny reward model, whose terms nearly cancel, did by 17. In low precision, so many would hide mistakes: there,
# gradients that are off by more than this share have their rounding measured, as where answers are off by more than one
# unit. Of 45 tiny families in bfloat16, honest ones are off by less but for Mixtral, OLMo, Llama 4 and Qwen3-Next
_LEAST_UNITS, _LEAST_UNITS_IN_LOW_PRECISION, _LEAST_OF_GRADIENTS_IN_LOW_PRECISION = 128.0, 1.0, 0.03
# Gradients of some rows are next to nothing: errors are relative to at least this share of the largest
_LEAST_NORM = 0.01
# Apart by more than there are steps
_SEEDS = 2**40
# How often the passes of a model that draws numbers are repeated where something is off: chance may repeat itself
_REPEATED = 3
# The scale at which gradients are computed once more that overflow in float16
_SMALLER = 2.0**-16
# By how many tokens rows are padded where rounding is measured: at another width, kernels round differently
_WIDER = (5, 8)


class Size(NamedTuple):
    """By how much something is off, and by how much it may be, relative to what was expected."""

    error: float
    tolerance: float


@dataclass(frozen=True)
class Sizes:
    """
    By how much rows are off in answers and in gradients, by their numbers, and what the root mean square of all
    gradients' errors may be: less noisy than the worst row, where all rows are wrong.
    """

    answers: dict[int, Size]
    gradients: dict[int, Size]
    of_all: float

    @classmethod
    def median(cls, tries: Sequence["Sizes"]) -> "Sizes":
        """The sizes of each row from the middle one of its tries, the lesser of two."""
        answers: dict[int, Size] = {}
        gradients: dict[int, Size] = {}
        for row in tries[0].answers:
            ordered = sorted((each for each in tries if row in each.answers), key=lambda each: each.share(row))
            middle = ordered[(len(ordered) - 1) // 2]
            answers[row] = middle.answers[row]
            gradients |= {row: middle.gradients[row]} if row in middle.gradients else {}
        return cls(answers, gradients, max(each.of_all for each in tries))

    def share(self, row: int) -> float:
        """By how much of its tolerance a row is off, in answers or in gradients."""
        return max(_share(sizes[row]) for sizes in (self.answers, self.gradients) if row in sizes)

    @property
    def worst(self) -> Verdict:
        """The verdict on what is off by most of its tolerance."""
        named = {f"answers to row {row}": size for row, size in self.answers.items()}
        named |= {f"gradients of row {row}": size for row, size in self.gradients.items()}
        if self.gradients:
            named["gradients of all rows"] = Size(_mean(x.error for x in self.gradients.values()), self.of_all)
        name = max(named, key=lambda each: _share(named[each]))
        return Verdict(named[name].error, name, named[name].tolerance)


class Pass(NamedTuple):
    """What the model computes for some rows."""

    answers: torch.Tensor  # (R, N) float64 on the CPU, 0 where nothing is scored
    at_tokens: torch.Tensor  # (H, T, D) of each half, gradients at the embeddings; empty if nothing was differentiated


def _nothing(flat: Pass) -> Pass:
    """A pass in the shape of a flat one, with zeros that gradients of its rows can be added to."""
    dtype = torch.promote_types(flat.at_tokens.dtype, torch.float32)
    return Pass(torch.zeros_like(flat.answers), torch.zeros_like(flat.at_tokens, dtype=dtype))


@dataclass(frozen=True)
class Looked:
    """
    What one look found, on how many rows and tokens that it compared.

    Args:
        verdict (`Verdict`):
            What was found. Its notes say what was not compared.
        left_out (`dict`):
            The rows that could not be computed alone, and why.
        in_slices (`set`):
            The rows that exceed the budget alone, so that they were computed in slices, too.
        sizes ([`Sizes`], *optional*):
            By how much each row is off. `None` if nothing was compared, or what is wrong is so whatever its size.
        agreed (`bool`, *optional*, defaults to `True`):
            Whether the verdict is positive on all processes.
        doubt (`str`, *optional*, defaults to `""`):
            What was off, in words, but not in the same row with other tokens in the same places.
    """

    verdict: Verdict
    rows: int
    tokens: int
    left_out: dict[int, str]
    in_slices: set[int]
    sizes: Sizes | None = None
    agreed: bool = True
    doubt: str = ""

    @property
    def error(self) -> float:
        """The largest difference, if it passed; -1 if nothing was compared, or it did not."""
        return self.verdict.error if self.rows and self.verdict.passed and not self.verdict.skipped else -1.0


@dataclass
class Rows:
    """
    The rows of a call, and their flat batch.

    Args:
        flat_model ([`FlatModel`]), call (`Callable`):
            The model, and what is called in its place: the same model under the wrappers of an engine.
        inputs (`dict`):
            The arguments of the call: padded rows `(R, L)` and what goes with them.
        batch ([`FlatBatch`]):
            The flat batch of these rows.
        trains (`bool`, *optional*, defaults to `True`):
            Whether the call has gradients.
        skipped (`str`, *optional*, defaults to `""`):
            Why gradients cannot be compared; if given, nothing is differentiated.
        seed (`int`, *optional*, defaults to `0`):
            Draws the rows that are scored, and their weights.
        pooled (`bool`, *optional*):
            Whether answers are those of a pooled head. By default, those of a model with one.
        largest (`Callable`, *optional*):
            The largest of all processes' numbers: where weights are gathered in each pass, none may make one less.
    """

    flat_model: FlatModel
    call: Callable
    inputs: Inputs
    batch: FlatBatch
    trains: bool = True
    skipped: str = ""
    seed: int = 0
    pooled: bool | None = None
    largest: Callable[[int], int] = int
    scale: float = field(default=1.0, init=False)  # of the sum that is differentiated
    in_slices: set[int] = field(default_factory=set, init=False)  # rows alone that a budget has computed in slices
    left_out: dict[int, str] = field(default_factory=dict, init=False)  # that cannot be computed alone, and why

    @property
    def is_pooled(self) -> bool:
        return self.flat_model.is_pooled if self.pooled is None else self.pooled

    @property
    def is_low(self) -> bool:
        """Whether the model computes in low precision, where answers hide more."""
        return rounding_unit(self.flat_model.model) > torch.finfo(torch.float32).eps

    @cached_property
    def mask(self) -> np.ndarray:
        """`(R, L)` bool, on the host: where the rows have tokens."""
        return self.batch.row_mask.cpu().numpy()

    @cached_property
    def numbers(self) -> list[int]:
        """The rows that have tokens."""
        return np.flatnonzero(self.mask.any(1)).tolist()

    @cached_property
    def halves(self) -> list[list[int]]:
        """
        The rows that are differentiated together, of those whose tokens are scored: a random half or, in low precision,
        both. Gradient that leaks shows exactly between rows of different halves. These alternate at first, and at about
        every other look later on: a leak is likeliest between neighbours.
        """
        has_any = np.ones(len(self.mask), bool)
        if not self.is_pooled and (labels := self.inputs.get("labels")) is not None:
            has_any = (labels[:, 1:] != IGNORE_INDEX).any(1).cpu().numpy()
        rows = np.array([row for row in self.numbers if has_any[row]], int)
        seed = self.seed % _SEEDS  # the same rows with other tokens: what is off has to recur in one of them
        rng = np.random.default_rng(seed)
        is_first = np.arange(len(rows)) % 2 == 0
        if not self.is_low or (seed and rng.random() < 0.5):
            rng.shuffle(is_first)
        first, second = rows[is_first].tolist(), rows[~is_first].tolist()
        if not (self.trains and not self.skipped and self.is_low and self.largest(len(second))):
            return [first]
        return [first, second or first]  # processes with fewer rows repeat the first one

    @property
    def compared(self) -> list[list[int]]:
        """The rows of each half whose gradients are compared."""
        return [[row for row in half if row not in self.left_out] for half in self.halves]

    @cached_property
    def reach(self) -> int:
        """The length of the longest row, as positions say."""
        return int(self.batch.position_ids.max()) + 1

    @cached_property
    def places(self) -> list[torch.Tensor]:
        """The flat positions of the tokens of each row."""
        return [index[mask] for index, mask in zip(self.batch.row_index, self.batch.row_mask, strict=True)]

    def start(self, row: int) -> int:
        """The column of the first answer to a row."""
        return 0 if self.is_pooled else int(self.mask[row].argmax())

    def weighted(self, answers: torch.Tensor, row: int, start: int = 0) -> torch.Tensor:
        """The sum of the answers to a row, `(N,)` from column `start` on, with a weight for each column."""
        drawn = np.random.default_rng([self.seed, row]).uniform(0.5, 1.5, start + len(answers))
        return (answers * torch.from_numpy(drawn[start:]).to(answers)).sum()

    def with_other_tokens(self, draw: int) -> "Rows":
        """
        The same rows with each token replaced by another one, the same everywhere: the layout stays as it is. Special
        tokens stay.
        """
        model, device = self.flat_model.model, self.batch.input_ids.device
        configs = {id(each): each for each in (model.config, model.config.get_text_config())}.values()
        named = [x for config in configs for name, x in vars(config).items() if name.endswith("token_id") and x]
        special = {x for each in named for x in (each if isinstance(each, list) else [each])}
        ids = np.array([x for x in tried_tokens(model).tolist() if x and x not in special], np.int64)
        table = torch.arange(int(ids.max(initial=0)) + 1)
        table[ids] = torch.from_numpy(np.random.default_rng([self.seed, draw]).permutation(ids))

        def other(tokens):
            known = (tokens >= 0) & (tokens < len(table))
            return torch.where(known, table.to(tokens.device)[tokens * known], tokens)

        names = ("input_ids", "labels")[: 2 - self.is_pooled]
        inputs = self.inputs | {x: other(y) for x in names if (y := self.inputs.get(x)) is not None}
        tokens, next_tokens = other(self.batch.input_ids), other(self.batch.shift_labels)
        batch = replace(self.batch, input_ids=tokens.to(device), shift_labels=next_tokens.to(device))
        return replace(self, inputs=inputs, batch=batch, seed=self.seed + draw * _SEEDS)

    # --- passes -----------------------------------------------------------------------------------------------------

    def flat(self) -> Pass:
        """The flat batch as the step computes it, once for each half."""
        passes = [self._flat(half) for half in self.compared]
        most = max((each.at_tokens for each in passes), key=torch.Tensor.numel)
        at_tokens = [x if x.numel() else torch.zeros_like(most) for _, x in passes]  # 0 of a half that is left out
        return Pass(passes[0].answers, torch.cat(at_tokens))

    def _flat(self, scored: Sequence[int]) -> Pass:
        with torch.set_grad_enabled(self.trains):  # as a budget schedules it, with as many layers that recompute
            batch = self.flat_model.begin_pass(self.batch)
        with torch.compiler.set_stance("default"):  # compiled layers as they are
            return self._computed(
                self.inputs | {"flat_batch": batch}, [(row, row, 0) for row in scored], batch, self.batch.row_mask
            )

    def tried(self, compute: Callable[[], Pass], row: int | None = None) -> Pass | str:
        """
        A pass, of one `row` or several, or, in words, the error that the model raises. Raises it if other processes
        wait for the pass.
        """
        try:
            return compute()
        except Exception as error:
            # A row alone that is computed whole exchanges no slices
            exchanges = row is None or row in self.in_slices
            raise_if_others_wait(self.flat_model.model, error, exchanges)
            return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"

    def alone(self, flat: Pass, wider: int = 0) -> Pass | None:
        """
        All rows, one by one, each padded by so many tokens on its right, arranged as the pass of their `flat` batch.
        The gradients of rows that share a token add up. Rows that cannot be computed are noted as left out; if only
        padding makes one fail, there is no pass.
        """
        fails, (answers, at_tokens) = False, _nothing(flat)
        with attributes_set([(self.flat_model, "flatten", None)]):  # the rows alone are not made flat
            for i in range(self.largest(len(self.numbers))):
                row = self.numbers[min(i, len(self.numbers) - 1)]  # processes with fewer rows repeat the last one
                found = self.tried(partial(self._one, row, wider), row)
                # Of a group, all leave out what one of them lacks the memory for: they compute the batch together
                if self.flat_model.peers.name and self.largest(isinstance(found, str)) and not isinstance(found, str):
                    found = "another process could not compute it"
                if isinstance(found, str):
                    fails |= row not in self.left_out
                    if not wider:
                        self.left_out.setdefault(row, found)
                    continue
                start = self.start(row)
                answers[row, start : start + found.answers.size(1)] = found.answers[0]
                if found.at_tokens.numel() and i < len(self.numbers):
                    self._add(row, found.at_tokens[0], at_tokens)
        return None if wider and fails else Pass(answers, at_tokens)

    def _add(self, row: int, own: torch.Tensor, at_tokens: torch.Tensor) -> None:
        """Add a row's `own` gradients, `(l, D)`, where its tokens are in the halves that have it, `(H, T, D)`."""
        for half, total in zip(self.halves, at_tokens, strict=True):
            if row in half:
                total.index_add_(0, self.places[row].to(total.device), own.to(total))

    def _has_rows(self, value: object) -> bool:
        """Whether an argument of the call has an entry for each token of each row."""
        return torch.is_tensor(value) and value.ndim > 1 and value.shape[:2] == self.mask.shape

    def side_by_side(self, flat: Pass) -> Pass | None:
        """
        The rows as padded training computes them, as many at a time as take no more tokens than the flat batch, or the
        largest slice of it. On accelerators, kernels follow the number of tokens: single rows may round alike however
        they are padded, and unlike the flat batch. No pass if it fails, if rows have images, or if several processes
        compute the batch, whose memory one of them alone lacks.
        """
        if self.flat_model.peers.name or self.largest(bool(self.batch.hooks)):  # of images
            return None
        with torch.set_grad_enabled(self.trains):
            sizes = np.diff(self.flat_model.begin_pass(self.batch).schedule.cuts)
        number, width = self.mask.shape
        together = max(int(sizes.max(initial=0) or self.batch.input_ids.size(1)) // width, 1)
        groups = [[*range(i, min(i + together, number))] for i in range(0, number, together)]
        answers, at_tokens = _nothing(flat)
        real = self.batch.row_mask
        inputs = self.inputs | {"attention_mask": real.long()}
        if inputs.get("position_ids") is None and not self.mask[:, 0].all():  # padding on the left counts
            inputs["position_ids"] = torch.where(real, self.batch.position_ids[0][self.batch.row_index], 0)

        with attributes_set([(self.flat_model, "flatten", None)]):  # padded rows are not made flat
            for i in range(self.largest(len(groups))):
                rows = groups[min(i, len(groups) - 1)]  # processes with fewer repeat the last ones
                scored = [
                    (place, row, 0) for place, row in enumerate(rows) if any(row in half for half in self.compared)
                ]
                given = {name: x[rows] if self._has_rows(x) else x for name, x in inputs.items()}
                found = self.tried(partial(self._computed, given, scored, None, real[rows]))
                if isinstance(found, str):
                    return None
                answers[rows] = found.answers
                if found.at_tokens.numel() and i < len(groups):
                    for place, row, _ in scored:
                        self._add(row, found.at_tokens[place, real[row]], at_tokens)
        return Pass(answers, at_tokens)

    def _one(self, row: int, wider: int = 0) -> Pass:
        """One row alone, padded by so many tokens on its right; the gradients are those of its own tokens."""
        columns = np.flatnonzero(self.mask[row])
        start, stop = int(columns[0]), int(columns[-1]) + 1
        config = self.flat_model.model.config.get_text_config()
        fill = {"input_ids": architecture.config_value(config, "pad_token_id") or 0, "labels": IGNORE_INDEX}
        if architecture.rotary_limits(config):  # frequencies follow the longest row
            wider += max(self.reach - (stop - start), 0)
            fill["position_ids"] = self.reach - 1

        def cut(name, value):
            if not self._has_rows(value):
                return value
            value = value[row : row + 1, start:stop]
            return torch.nn.functional.pad(value, [0, wider], value=fill.get(name, 0)) if wider else value

        inputs, make = {name: cut(name, value) for name, value in self.inputs.items()}, FlatBatch.from_padded
        for hook in self.batch.hooks:
            inputs, make = hook.alone(row, inputs, make)
        ids = inputs["input_ids"]
        positions = self.batch.position_ids[0, self.places[row]]
        if inputs.get("position_ids") is None and not positions.equal(torch.arange(len(positions)).to(positions)):
            # Models that count by column count the padding before a row, too
            inputs["position_ids"] = torch.nn.functional.pad(positions, [0, wider], value=fill.get("position_ids", 0))[
                None
            ]
        if wider and inputs.get("attention_mask") is None:
            inputs["attention_mask"] = (torch.arange(ids.size(1), device=ids.device) < stop - start)[None].long()
        batch = self._in_slices(inputs, make)
        if batch is not None:
            self.in_slices.add(row)
            inputs["flat_batch"] = batch
        scored = [(0, row, self.start(row))] if any(row in half for half in self.halves) else []
        found = self._computed(inputs, scored, batch, inputs.get("attention_mask"))
        answers = found.answers if self.is_pooled else found.answers[:, : found.answers.size(1) - wider]
        return Pass(answers, found.at_tokens[:, : stop - start])

    def _in_slices(self, inputs: Inputs, make: Make) -> FlatBatch | None:
        """The flat batch of a row alone if a budget computes it in slices; `None` if it fits, or without a budget."""
        if not self.flat_model.hooks:
            return None
        ids = inputs["input_ids"]
        row = {name: inputs.get(name) for name in ("attention_mask", "labels")}
        mask = torch.ones_like(ids) if row["attention_mask"] is None else row["attention_mask"]
        labels = None if row["labels"] is None or self.is_pooled else row["labels"].cpu()
        batch = self.flat_model.begin_pass(make(ids.cpu(), mask.cpu(), labels))
        return batch.to(ids.device) if batch.schedule.cuts else None

    def _computed(
        self,
        inputs: Inputs,
        scored: Sequence[tuple[int, int, int]],
        batch: FlatBatch | None = None,
        real: torch.Tensor | None = None,
    ) -> Pass:
        """
        A call, and the gradients at its tokens of the `scored` answers: their place in it, their row, and the column of
        the row where they start. `real` is the mask of the rows, if they have padding.
        """
        model, differentiates = self.flat_model.model, self.trains and not self.skipped and bool(scored)
        with torch.set_grad_enabled(differentiates), embeddings_watched(model) as embedded:
            answers = self._answers(inputs, real)
            if not differentiates:
                return Pass(answers.detach().cpu().double(), answers.new_empty(0, 0))
            with outside_autocast(model):
                weighted = [self.weighted(answers[place], row, start) for place, row, start in scored]
                loss = torch.stack(weighted).sum() * scale_of(model) * self.scale
                length = inputs["input_ids"].size(1)
                at_tokens, *_ = gradients_at_tokens(model, embedded, loss, length, batch)
        assert at_tokens is not None
        return Pass(answers.detach().cpu().double(), at_tokens.detach())

    def _answers(self, inputs: Inputs, real: torch.Tensor | None) -> torch.Tensor:
        """
        `(R, N)`: the answers to the rows of a call: log-probabilities, 0 of tokens that are not scored, or of logits, a
        sum with random weights for each token (0 where none is `real`) or, of a pooled head, the logits.
        """
        output = self.call(**inputs)
        if self.is_pooled:
            return output.logits.flatten(1)
        if "log_probs" in output:
            is_scored = inputs["labels"][:, 1:] != IGNORE_INDEX
            return torch.where(is_scored.to(output.log_probs.device), output.log_probs, 0)
        vector = np.random.default_rng(self.seed).standard_normal(output.logits.size(-1))
        with outside_autocast(self.flat_model.model):
            values = output.logits @ torch.from_numpy(vector).to(output.logits)
        return values if real is None else torch.where(real.bool().to(values.device), values, 0)


@contextmanager
def untouched(flat_model: FlatModel) -> Iterator[None]:
    """Restores what a model and its hooks note of their passes."""
    holders = [flat_model, *flat_model.hooks]
    with attributes_set((holder, name, value) for holder in holders for name, value in vars(holder).items()):
        yield


def look(rows: Rows, agree: Agree = bool) -> Looked:
    """
    Compare a flat batch with its rows alone, and leave the model, its buffers and all random states as they are. A call
    with gradients is tried in training mode, without dropout or noise, and with weights off zero that start there;
    others in evaluation mode. In low precision, a size that is off has to recur twice with other tokens in the same
    places, and at least once in the same row.

    `agree` tells whether a verdict is true on all processes. Every process must call it equally often.
    """
    found, doubt = _looked(rows), ""
    tries = [found.sizes]
    for draw in range(1, draws_of(rows.flat_model.model)):
        if agree(found.verdict.passed) or not agree(not found.verdict.failure):
            break
        doubt = doubt or found.verdict.reason or "another process differs"
        again = _looked(rows.with_other_tokens(draw))
        tries.append(again.sizes)
        # A look that compares nothing explains nothing
        if again.verdict.failure or (again.sizes and again.verdict.passed):
            found = again
    sizes = [each for each in tries if each]
    if not found.verdict.passed and found.sizes:
        found = replace(found, verdict=replace(Sizes.median(sizes).worst, notes=found.verdict.notes))
    agreed = agree(found.verdict.passed)
    return replace(found, agreed=agreed, doubt=doubt if agreed else "")


def _looked(rows: Rows) -> Looked:
    model = rows.flat_model.model
    trying = as_in_training(model, rows.call, every_layer=True) if rows.trains else as_it_answers(model)
    # Contexts that move activations to the CPU would count on a backward pass of all that they have seen
    as_they_are = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with untouched(rows.flat_model), trying, as_they_are:
        verdict, sizes = _found(rows)
    if rows.skipped and not verdict.skipped:
        verdict = replace(verdict, notes=(*verdict.notes, f"gradients were not compared, because {rows.skipped}"))
    kept = [] if verdict.skipped else [row for row in rows.numbers if row not in rows.left_out]
    return Looked(verdict, len(kept), int(rows.mask[kept].sum()), rows.left_out, rows.in_slices, sizes)


def _found(rows: Rows) -> tuple[Verdict, Sizes | None]:
    """The verdict, and by how much each row is off: `None` if that was not compared or does not matter."""
    model = rows.flat_model.model
    unit = rounding_unit(model)  # of the model, which computes under autocast
    state = random_state(model)
    flat = rows.tried(rows.flat)
    draws = not all(map(torch.equal, random_state(model), state))
    if isinstance(flat, str):
        rows.left_out |= dict.fromkeys(rows.numbers, f"{flat}, of the flat batch")
        return Verdict(skipped="nothing was computed"), None
    expected = rows.alone(flat)
    assert expected is not None
    # Gradients of rows that are left out are not known
    if rows.largest(any(row in half for half in rows.halves for row in rows.left_out)):
        without = rows.tried(rows.flat)
        if isinstance(without, str):
            return _not_again(without), None
        flat = without
    if compute_dtype(model) == torch.float16 and rows.largest(not flat.at_tokens.isfinite().all()):
        with attributes_set([(rows, "scale", _SMALLER)]):
            smaller = rows.tried(rows.flat)
        if not isinstance(smaller, str) and not rows.largest(not smaller.at_tokens.isfinite().all()):
            # Of rows that share tokens, they are the sum. Training, too, would scale the loss down
            rows.skipped = "those of the flat batch are too large for float16"
            flat, expected = (Pass(each.answers, each.at_tokens.new_empty(0, 0)) for each in (flat, expected))
    with outside_autocast(model):
        if not all(values.isfinite().all() for values in expected):
            found: tuple[Verdict, Sizes | None] = Verdict(skipped="those of a row alone are not finite"), None
        elif len(rows.left_out) == len(rows.numbers):
            found = Verdict(skipped="no row could be computed alone"), None
        else:
            found = _compared(rows, unit, flat, expected)
        verdict, _ = found
        # All processes measure rounding, or none does: their passes may wait for each other
        if not rows.largest(not verdict.passed) or rows.largest(bool(verdict.failure)):
            return found
    passes: list[tuple[Pass, Pass]] = []
    for number in range(1 + _REPEATED * rows.largest(draws)):
        again = rows.tried(rows.flat)
        if isinstance(again, str):
            return _not_again(again), None
        passes.append((again, flat))
        if number:
            alone = rows.alone(flat)
            assert alone is not None
            passes.append((alone, expected))
    with outside_autocast(model):
        if rows.largest(any(_moves(again, first, unit) for again, first in passes)):
            return Verdict(skipped="it draws at random in training, or keeps something of earlier calls"), None
    noises = [*(rows.alone(flat, wider) for wider in _WIDER), rows.side_by_side(flat)]
    noises += rounded_otherwise(model, partial(rows.alone, flat))
    with outside_autocast(model):
        return _compared(rows, unit, flat, expected, [noise for noise in noises if noise is not None])


def _not_again(error: str) -> Verdict:
    """The verdict where a flat batch cannot be computed again, such as for lack of memory beside what is compared."""
    return Verdict(skipped=f"the flat batch could not be computed again ({error})")


def _moves(again: Pass, first: Pass, unit: float) -> bool:
    """Whether a pass gives something else if it is repeated."""
    if relative_error(again.answers, first.answers) > unit:
        return True
    return bool(first.at_tokens.numel()) and relative_error(again.at_tokens, first.at_tokens) > _least(unit)[1]


def _compared(
    rows: Rows, unit: float, flat: Pass, expected: Pass, noises: Sequence[Pass] = ()
) -> tuple[Verdict, Sizes | None]:
    """
    The verdict, and by how much each row is off in answers and in gradients: `None` if something is wrong whatever its
    size. `noises` are the same rows, padded.
    """
    for half, got, wanted in zip(rows.compared, flat.at_tokens, expected.at_tokens, strict=False):
        alone = {row: wanted[rows.places[row]] for row in half}
        if half and (failure := wrong_tokens(got[None], alone, rows.places, half)):
            return Verdict(failure=failure), None
    most = max(HALF_DIGITS_FACTOR * unit**0.5, MOST_NOISE)
    of_answers, of_gradients = _least(unit)

    def tolerance(least: float, measured: Iterable[float]) -> float:
        noise = NOISE_FACTOR * max(filter(math.isfinite, measured), default=0.0)
        return max(least, min(noise, most))

    def sizes(errors: Callable[[Rows, Pass, Pass], dict[int, float]], least: float) -> dict[int, Size]:
        measured = [error for noise in noises for error in errors(rows, noise, expected).values()]
        return {row: Size(x, tolerance(least, measured)) for row, x in errors(rows, flat, expected).items()}

    of_all = tolerance(of_gradients, (_mean(_errors_of_gradients(rows, x, expected).values()) for x in noises))
    found = Sizes(sizes(_errors_of_answers, of_answers), sizes(_errors_of_gradients, of_gradients), of_all)
    return found.worst, found


def _least(unit: float) -> tuple[float, float]:
    """The least tolerances of answers and gradients."""
    if unit <= torch.finfo(torch.float32).eps:
        return unit * _LEAST_UNITS, unit * _LEAST_UNITS
    return unit * _LEAST_UNITS_IN_LOW_PRECISION, _LEAST_OF_GRADIENTS_IN_LOW_PRECISION


def _errors_of_answers(rows: Rows, found: Pass, expected: Pass) -> dict[int, float]:
    """By row, how far answers are off, relative to their size or at least one nat."""
    columns = (expected.answers != 0).sum(1).clamp(min=1)  # those that are scored
    off, size = ((x.pow(2).sum(1) / columns).sqrt() for x in (found.answers - expected.answers, expected.answers))
    relative = (off / size.clamp(min=1)).tolist()
    return {row: x for row, x in enumerate(relative) if row not in rows.left_out}


def _errors_of_gradients(rows: Rows, found: Pass, expected: Pass) -> dict[int, float]:
    """By scored row, how far gradients at its tokens are off, relative to their size."""
    errors: dict[int, float] = {}
    for half, got, wanted in zip(rows.compared, found.at_tokens, expected.at_tokens, strict=False):
        if half:
            off, size = (in_float64(x).norm(dim=1) for x in (got - wanted, wanted))
            places = [rows.places[row].to(off.device) for row in half]
            norms = torch.stack([torch.stack([x[each].norm() for x in (off, size)]) for each in places])
            least = _LEAST_NORM * norms[:, 1].max()
            relative = norms[:, 0] / torch.maximum(norms[:, 1], least).clamp(min=1e-300)
            errors |= dict(zip(half, relative.tolist(), strict=True))
    return errors


def _mean(errors: Iterable[float]) -> float:
    """The root mean square of errors; 0 of none."""
    squares = [x * x for x in errors]
    return math.sqrt(sum(squares) / max(len(squares), 1))


def _share(size: Size) -> float:
    """Of its tolerance; infinite if the error is no number."""
    return math.inf if math.isnan(size.error) else size.error / size.tolerance
