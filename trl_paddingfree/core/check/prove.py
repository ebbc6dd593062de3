"""Before a model trains on flat batches, prove that it computes them exactly like their rows one by one.

A few short random rows go through the model flat and one by one. Four figures decide, in nats of log-probability, as
root mean squares over scored tokens:

- `error`: flat against one by one.
- `noise`: padded, as TRL computes them, against one by one: how much `error` the model's own arithmetic explains.
- `leak`: how much a row moves when *other* rows of the flat batch change. Shapes stay the same, so without a leak it
  does not move at all, except for rounding where rows meet in the experts of an MoE model.
- `effect`: how much a row moves when one token of its *own* context changes: the size that a mistake would have.

A route that passes then computes gradients as in training: see [`~trl_paddingfree.core.check.gradients`].
"""

import inspect
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from transformers import PreTrainedModel

from .. import upstream
from ..model.flat_model import FlatModel
from ..model.mixers import mixers
from ..model.routes import Route, routes_to_try
from ..model.told import NOT_ATTENTION
from .comparison import Tried, Verdict, root_mean_square
from .gradients import InTraining, RowsInTraining, check_gradients
from .probe import Call, RowsAlone, not_finite, rounding_unit
from .training import raise_if_others_wait

# In low precision, and where routers choose among experts, rounding may send a token to another one, flat but not
# padded: a large error, but no mistake. It does not recur with other tokens; a mistake does
_DRAWS_IF_ROUNDING_DECIDES = 3
_IN_EVALUATION = "in evaluation mode"

Agree = Callable[[bool], bool]  # tells whether a verdict is true on all processes
Tell = Callable[[str], None]  # gets each step of the check, in words, before it starts
STEPS = 4  # that are told for each route: rows alone and flat, short ones and long ones


@dataclass(frozen=True)
class CheckResult:
    """
    What the check found for one model and one route.

    Args:
        route (`Route`):
            How the model computed the flat batch.
        error, noise (`float`):
            Root mean square difference of log-probabilities, flat and padded, from those one by one, in nats.
        leak, effect (`float`):
            Movement of a row when other rows change, and when its own context changes, in nats.
        tolerance, leak_tolerance (`float`, the latter defaults to `0.0`):
            Largest `error` and largest `leak` that pass.
        failure (`str`):
            The error that the model raised instead of an answer; empty if it answered.
        gradients (`Verdict`, *optional*):
            What the pass with gradients found; `None` if there was none.
        tried (`Tried`, *optional*):
            The largest flat batch that was compared; `None` if it has no rows of text.

    >>> from trl_paddingfree import CheckResult
    >>> from trl_paddingfree.core.model.routes import Route
    >>> route = Route("segment", "sdpa", prefix_sharing=True)
    >>> result = CheckResult(route, error=2e-7, noise=2e-7, leak=0.0, effect=0.5, tolerance=8e-7)
    >>> result.passed, result.smallest_mistake
    (True, 1.6e-06)
    """

    route: Route
    error: float = math.nan
    noise: float = math.nan
    leak: float = math.nan
    effect: float = math.nan
    tolerance: float = math.nan
    leak_tolerance: float = 0.0
    failure: str = ""
    gradients: Verdict | None = None
    tried: Tried | None = None

    @property
    def prefix_sharing(self) -> bool:
        """Whether shared prefixes were computed once."""
        return self.route.prefix_sharing

    @property
    def smallest_mistake(self) -> float:
        """The smallest mistake that would show, relative to the effect of one token of context. Leaks always show."""
        gradients = self.gradients
        in_gradients = gradients.tolerance if gradients and gradients.passed and not gradients.skipped else math.inf
        return min(self.tolerance / self.effect if self.effect else math.inf, in_gradients)

    @property
    def isolated(self) -> bool:
        """Whether rows do not see one another."""
        return self.leak <= self.leak_tolerance and not (self.gradients and self.gradients.failure)

    @property
    def passed(self) -> bool:
        """Whether the model may train this way."""
        answers = not self.failure and self.error <= self.tolerance
        return answers and self.isolated and (self.gradients is None or self.gradients.passed)

    @property
    def not_compared(self) -> tuple[str, ...]:
        """What was not compared, and why. Until it is, the model cannot be called exact."""
        return self.gradients.not_compared if self.gradients else ()

    @property
    def verdict(self) -> str:
        """What was found, in one word."""
        if self.failure or (self.gradients and self.gradients.raised):
            return "failed"
        leaks = self.leak > self.leak_tolerance or " gets gradient from row " in str(self.gradients)
        return "exact" if self.passed else "LEAKS" if leaks else "INEXACT"

    def __str__(self) -> str:
        if self.failure:
            return f"{self.route}: {self.failure}"
        trained = ""
        if self.gradients:
            failure = self.gradients.failure
            trained = f"; {'in training, ' * bool(failure and _IN_EVALUATION not in failure)}{self.gradients}"
        if self.passed:
            trained += f"; smallest detectable error {self.smallest_mistake:.0e} of one context token's effect"
        leak = f"leak between sequences {self.leak:.1e}" if self.leak else "no leak between sequences"
        return (
            f"{self.route}: {self.verdict} (error {self.error:.1e}, allowed {self.tolerance:.1e}; {leak}"
            f", a real one would be about {self.effect:.1g}{trained})"
        )


def check_flat(
    model: PreTrainedModel,
    route: Route,
    reference: RowsAlone | None = None,
    in_training: InTraining | None = None,
    agree: Agree = bool,
) -> CheckResult:
    """
    Compare what `model` computes for a flat batch, by `route`, with what it computes for the rows one by one. Leaves
    `route` installed and the model otherwise as it was.

    Args:
        model (`PreTrainedModel`), route (`Route`):
            The model, with TRL's fused LM head, and how it computes flat batches.
        reference (`RowsAlone`, *optional*):
            The model's answers to the rows one by one. Computed by default.
        in_training (`Callable`, *optional*):
            Returns the reference for gradients, which are compared if all else passes. By default, none are.
        agree (`Callable[[bool], bool]`, *optional*):
            Tells whether a verdict is true on all processes. Every process must call it equally often.
    """
    reference = reference or RowsAlone(model)
    FlatModel.install(model, route)
    return compare_rows(route, reference, in_training, agree)


def compare_rows(
    route: Route, reference: RowsAlone, in_training: InTraining | None = None, agree: Agree = bool
) -> CheckResult:
    """[`check_flat`] on the rows of `reference`, with whatever computes its model's flat batches now."""
    with reference.trying():
        try:
            flat = reference.answers(reference.rows, prefix_sharing=route.prefix_sharing)
            movements = [0.0]
            errors = [reference.difference(flat, reference.alone)]
            for rows, expected in reference.cut():
                errors.append(
                    reference.difference(reference.answers(rows, prefix_sharing=route.prefix_sharing), expected)
                )
            for rows, staying in reference.changed():
                changed = reference.answers(rows, prefix_sharing=route.prefix_sharing)
                movements += [root_mean_square(changed[row] - flat[row]) for row in staying]
        except Exception as error:  # any error that a model raises on flat input becomes a verdict
            raise_if_others_wait(reference.model, error)
            if in_training:
                agree(False)  # processes whose model has answered call this below
            return CheckResult(route, failure=f"{type(error).__name__}: {error}")
    figures = (reference.noise, max(movements), reference.effect, reference.tolerance, reference.leak_tolerance)
    largest = max(errors, key=lambda x: (math.isnan(x), x))
    result = CheckResult(route, largest, *figures, tried=reference.tried)
    if not in_training or not agree(result.passed):
        return result
    gradients = check_gradients(reference.model, in_training, route.prefix_sharing)
    return replace(result, gradients=gradients, tried=gradients.tried or result.tried)


def why_refused(model: PreTrainedModel, failed: list[CheckResult]) -> list[str]:
    """Why flat batches of `model` fail, in sentences for the error; `failed` is what was found on each route."""
    in_training = [result.gradients.reason for result in failed if result.gradients]
    if in_training := [reason.rstrip(".") for reason in dict.fromkeys(in_training) if reason]:
        return [f"{'The check found that ' if _IN_EVALUATION in x else 'As it trains, '}{x}." for x in in_training]
    if option := FlatModel.peers_of(model).name:
        return [f"It was computed in slices: {option}. Set that to 1."]
    config = vars(model.config.get_text_config())
    is_stateful = upstream.is_stateful(model) or not {*NOT_ATTENTION}.isdisjoint(config.get("layer_types") or ())
    takes_positions = "position_ids" in inspect.signature(model.base_model.forward).parameters
    # RoBERTa and similar models reserve a position for the padding token
    tables = [module for name, module in model.named_modules() if name.endswith("position_embeddings")]
    offset = max((x.padding_idx + 1 for x in tables if isinstance(x, torch.nn.Embedding) and x.padding_idx), default=0)
    obstacles = {
        "It carries state from token to token, in layers that this package does not know.": is_stateful
        and not mixers().found(model),
        "It takes no `position_ids`: it counts positions along the whole flat row.": not takes_positions,
        f"It counts positions from {offset} rather than from 0.": offset > 0,
        "`config.is_decoder=False`: its tokens see those that follow.": config.get("is_decoder") is False,
        "It raises errors for flat batches, as models do that build their masks from a 2-D one.": all(
            result.failure for result in failed
        ),
    }
    reasons = [obstacle for obstacle, is_so in obstacles.items() if is_so]
    if not reasons and all(result.isolated for result in failed):
        best = min(failed, key=lambda result: result.error / result.tolerance if result.tolerance else math.inf)
        return [
            f"No row moves with others, but rows are off by {best.error:.1e} nats, where rounding explains "
            f"{best.tolerance:.1e} and one token of context does {best.effect:.1e}: wrong positions, forgotten "
            "context, or coarse arithmetic."
        ]
    return reasons or ["One of its modules ignores where the sequences of a flat row begin."]


class UnprovenModelError(ValueError):
    """
    A model computes a flat batch differently from its rows one by one, on every route.

    >>> from transformers import RobertaConfig, RobertaForCausalLM
    >>> from trl.trainer.utils import add_fused_lm_head
    >>> from trl_paddingfree import UnprovenModelError
    >>> from trl_paddingfree.core.check.prove import prove
    >>> from trl_paddingfree.core.model.routes import choose_route
    >>> model = RobertaForCausalLM(RobertaConfig(vocab_size=50, hidden_size=24, num_hidden_layers=2))
    >>> add_fused_lm_head(model)
    >>> try:
    ...     prove(model, choose_route(model))
    ... except UnprovenModelError as error:
    ...     print(str(error).splitlines()[-1])
    Set `padding_free=False` to train it with padding, or load it with another `attn_implementation`.
    """


def refuse_infinite(model: PreTrainedModel, reference: RowsAlone) -> None:
    """Refuse a model whose answers to rows alone are not finite: no way to compute them can tell anything."""
    if not all(x.isfinite().all() for x in reference.alone):
        named = not_finite(model) or "no weight does, so it comes from its arithmetic: try another `dtype`"
        raise UnprovenModelError(
            f"{type(model).__name__} cannot be trained as it is loaded, with padding or without: its answers to a row "
            f"alone hold NaN or infinity, and {named}."
        )


def draws_of(model: PreTrainedModel) -> int:
    """How many draws of rows to try before a model counts as inexact."""
    config = vars(model.config.get_text_config())
    chooses = any("expert" in name and isinstance(x, int) and x > 1 for name, x in config.items())
    return _DRAWS_IF_ROUNDING_DECIDES if chooses or rounding_unit(model) > torch.finfo(torch.float32).eps else 1


def evaluated_too(
    model: PreTrainedModel, result: CheckResult, in_evaluation: InTraining, agree: Agree = bool
) -> CheckResult:
    """
    What was found of a model in training, on the installed route, and of its answers to long rows in evaluation mode if
    all else passes. `in_evaluation` returns the reference for these.
    """
    if not agree(result.passed):
        return result
    trained, evaluated = result.gradients or Verdict(), check_gradients(model, in_evaluation, result.prefix_sharing)
    if evaluated.unmendable or evaluated.skipped:  # where rows alone fail, too
        why = evaluated.skipped or evaluated.failure
        note = f"answers on long rows {_IN_EVALUATION} were not compared, because {why}"
        return replace(result, gradients=replace(trained, notes=(*trained.notes, note)))
    if evaluated.failure:
        return replace(result, gradients=replace(evaluated, failure=f"{evaluated.failure}, {_IN_EVALUATION}"))
    if not evaluated.passed:
        return replace(result, gradients=replace(evaluated, worst=f"{evaluated.worst} {_IN_EVALUATION}"))
    if trained.skipped:  # nothing else has told of long rows
        trained = replace(trained, notes=tuple(dict.fromkeys([*trained.notes, *evaluated.notes])))
        return replace(result, gradients=trained, tried=evaluated.tried)
    return result


def _told(
    tell: Tell,
    route: str,
    draw: int,
    reference: Callable[[int], RowsAlone],
    in_training: Callable[[int], RowsInTraining],
    trains: bool,
) -> tuple[RowsAlone, InTraining]:
    """The reference for answers, and a function that returns that for gradients. Steps are told before they start."""
    what = "gradients of " * trains

    def trained() -> RowsInTraining:
        tell(f"{route}: {what}long single rows")
        found = in_training(draw)
        tell(f"{route}: {what}long flat rows")
        return found

    tell(f"{route}: single rows")
    alone = reference(draw)
    refuse_infinite(alone.model, alone)
    tell(f"{route}: flat rows")
    return alone, trained


def prove(
    model: PreTrainedModel,
    route: Route,
    *,
    fallback: bool = True,
    routes: Sequence[Route] | None = None,
    call: Call | None = None,
    agree: Agree = bool,
    trains: bool = True,
    no_gradients: str = "",
    tell: Tell = lambda doing: None,
) -> tuple[CheckResult, list[CheckResult]]:
    """
    Find and install the first exact route. Returns the result that passed, and those that failed before it.

    Tries `routes`, by default `route` with and without sharing and, with `fallback`, backends that ask less of a model.
    In low precision, or with experts, a route without leaks gets up to three draws: rounding may send one token to
    another expert.

    Args:
        call (`Callable`, *optional*):
            Called in place of `model`: the same model under a wrapper that gathers its weights.
        agree (`Callable[[bool], bool]`, *optional*):
            As for [`check_flat`].
        trains (`bool`, *optional*, defaults to `True`):
            Whether the model gets gradients. If not, answers on long rows are compared instead; if so, also these.
        no_gradients (`str`, *optional*, defaults to `""`):
            Why gradients cannot be compared. If given, nothing is differentiated, and the result has this reason.
        tell (`Callable[[str], None]`, *optional*):
            Called with each step, in words, before it starts.

    Raises:
        [`UnprovenModelError`]: If no route is exact, or the model cannot be trained as it is loaded.
    """
    started = time.perf_counter()
    draws = draws_of(model)
    reference = cache(partial(RowsAlone, model, call))
    in_training = cache(partial(RowsInTraining, model, call, trains=trains))
    # After training mode, one order is enough
    in_evaluation = cache(partial(RowsInTraining, model, call, trains=False, orders=2 if no_gradients else 1))
    failed: list[CheckResult] = []
    for candidate in routes_to_try(model, route, fallback=fallback) if routes is None else routes:
        for draw in range(draws):
            again = f" (draw {draw + 1} of at most {draws})" if draw else ""
            alone, trained = _told(tell, f"{candidate}{again}", draw, reference, in_training, trains)
            result = check_flat(model, candidate, alone, None if no_gradients else trained, agree)
            if no_gradients:
                result = replace(result, gradients=Verdict(skipped=no_gradients))
            if trains:
                result = evaluated_too(model, result, partial(in_evaluation, draw), agree)
            if agree(result.passed):
                return result, failed
            if result.gradients and result.gradients.unmendable:
                raise UnprovenModelError(
                    f"{type(model).__name__} cannot be trained as it is loaded, with padding or without: "
                    f"{result.gradients.failure}."
                )
            if not agree(result.isolated):
                break
        failed.append(replace(result, failure="not exact on another process") if result.passed else result)
    tried = "\n    ".join(map(str, failed))
    reasons = "".join(f"{reason}\n" for reason in why_refused(model, failed))
    wrong = "does not treat a flat batch as separate sequences"
    if all(result.isolated for result in failed):
        wrong = "keeps the sequences of a flat batch apart, but computes them inexactly"
    raise UnprovenModelError(
        f"{type(model).__name__} {wrong}, so training it without padding would be wrong. Tried, in "
        f"{time.perf_counter() - started:.1f} s:\n    {tried}\n{reasons}"
        "Set `padding_free=False` to train it with padding, or load it with another `attn_implementation`."
    )
