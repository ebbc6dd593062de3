"""Trust is measured: prove that a model treats a flat batch as separate rows, before it trains on one.

A few short random sequences go through the model flat and one by one. Three figures decide, each in nats of
log-probability, as root mean squares over all scored tokens:

- `error`: flat against one by one. It may be no larger than what the model's own arithmetic explains, which is measured
  as `noise`: the same rows padded, as TRL would compute them, against one by one.
- `leak`: how much a row moves when the *other* rows of the flat batch change. Shapes stay the same, so a model without
  a leak does not move at all, up to rounding where experts are shared between rows.
- `effect`: how much a row moves when one token of its *own* context changes: the size that a real leak would have.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from . import seams
from .batch import IGNORE_INDEX
from .collate import flatten
from .forward import Route, install

# Flat and padded runs round differently, each as often up as down: their errors agree within a small factor.
NOISE_FACTOR = 4.0
# A leak is as large as a change of the row's own context (`effect`); rounding between experts is far below.
LEAK_FRACTION = 0.1
# Rows long enough to cross a sliding window are tried up to this window; wider ones are taken at their word.
LONGEST_WINDOW = 256


@dataclass(frozen=True)
class CheckResult:
    """
    Verdict on one model, one route, one layout.

    Args:
        route (`Route`):
            How the model computed the flat batch.
        prefix_sharing (`bool`):
            Whether shared prefixes were computed once.
        error (`float`):
            Root mean square difference of log-probabilities, flat against one by one, in nats.
        noise (`float`):
            The same for padded rows against one by one.
        leak (`float`):
            Movement of a row when the other rows change, in nats.
        effect (`float`):
            Movement of a row when its own context changes, in nats.
        tolerance (`float`):
            Largest `error` that passes.
        failure (`str`):
            The error that the model raised instead of an answer; empty if it answered.
    """

    route: Route
    prefix_sharing: bool
    error: float = float("nan")
    noise: float = float("nan")
    leak: float = float("nan")
    effect: float = float("nan")
    tolerance: float = float("nan")
    failure: str = ""

    @property
    def passed(self) -> bool:
        """Whether the model may train this way."""
        isolated = self.leak == 0 or (self.leak <= self.tolerance and self.leak <= LEAK_FRACTION * self.effect)
        return not self.failure and self.error <= self.tolerance and isolated

    def __str__(self) -> str:
        layout = "shared prefixes" if self.prefix_sharing else "flat"
        if self.failure:
            return f"{self.route}, {layout}: {self.failure}"
        verdict = "exact" if self.passed else "WRONG"
        return (
            f"{self.route}, {layout}: {verdict} (error {self.error:.1e}, allowed {self.tolerance:.1e}; leak "
            f"{self.leak:.1e}, a real one would be about {self.effect:.1e})"
        )


@contextmanager
def undisturbed(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; every module's training mode is as before afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    for module, _ in modes:
        module.training = seams.spoilt_by_evaluation(module)
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def check_rows(vocab_size: int, window: int | None) -> list[np.ndarray]:
    """Rows to try: two of them share a prompt, every length is different, the shortest is two tokens."""
    rng = np.random.default_rng(0)  # of our own: the training's random state stays as it is
    reach = window if window is not None and window <= LONGEST_WINDOW else 0

    def tokens(n):
        return rng.integers(0, vocab_size, n)

    prompt = tokens(9)
    rows = [np.concatenate([prompt, tokens(7 + reach)]), tokens(2), np.concatenate([prompt, tokens(4)]), tokens(13)]
    rows[2][9] = (rows[0][9] + 1) % vocab_size  # the branches part right after the prompt
    return rows


def check_flat(
    model: PreTrainedModel,
    route: Route,
    *,
    prefix_sharing: bool,
    call: Callable[..., Any] | None = None,
) -> CheckResult:
    """
    Run `model` flat and one by one. Leaves `route` installed, and the model otherwise as it was.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Causal language model with TRL's fused LM head.
        route (`Route`):
            How to compute the flat batch.
        prefix_sharing (`bool`):
            Whether to share prefixes.
        call (`Callable`, *optional*):
            What to call in place of `model`: the same model under a wrapper that gathers its weights.
    """
    config = model.config.get_text_config()
    embeddings: torch.Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
    vocab_size = len(embeddings)
    rows = check_rows(vocab_size, getattr(config, "sliding_window", None))
    # The same tree with other tokens everywhere but in the first row, and the first row with another first token
    others = [rows[0], *((row + 1) % vocab_size for row in rows[1:])]
    others[2] = np.concatenate([rows[0][:9], (rows[2][9:] + 1) % vocab_size])
    own = [np.concatenate([(rows[0][:1] + 1) % vocab_size, rows[0][1:]])]

    def log_probs(sequences: list[np.ndarray], flat: bool = False) -> list[torch.Tensor]:
        lengths = [len(row) for row in sequences]
        input_ids = torch.zeros(len(sequences), max(lengths), dtype=torch.long)
        for row, sequence in zip(input_ids, sequences, strict=True):
            row[: len(sequence)] = torch.from_numpy(sequence)
        attention_mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
        labels = input_ids.masked_fill(attention_mask == 0, IGNORE_INDEX)
        inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
        if flat:
            inputs["flat_batch"] = flatten(input_ids, labels, lengths, prefix_sharing=prefix_sharing)
        inputs = {name: value.to(embeddings.device) for name, value in inputs.items()}
        output = (call or model)(**inputs, fused_lm_head=True, use_cache=False).log_probs.double().cpu()
        return [row[: n - 1] for row, n in zip(output, lengths, strict=True)]

    def rms(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
        return float((torch.cat(a) - torch.cat(b)).pow(2).mean().sqrt())

    with undisturbed(model):
        alone = [log_probs([row])[0] for row in rows]
        noise = rms(log_probs(rows), alone)
        effect = rms(log_probs(own)[:1], alone[:1])
        install(model, route)
        try:
            flat, changed = log_probs(rows, flat=True), log_probs(others, flat=True)
        except Exception as error:  # whatever a model raises on flat input is a verdict, reported with its reason
            return CheckResult(route, prefix_sharing, failure=f"{type(error).__name__}: {error}")
    # Noise can be zero by chance, or because the padded run took the same kernels: one unit of rounding of the model's
    # dtype, relative to the log-probabilities, is the least that can be told apart
    scale = float(torch.cat(alone).pow(2).mean().sqrt())
    rounding = torch.finfo(model.dtype if model.dtype.is_floating_point else torch.bfloat16).eps * scale
    return CheckResult(
        route,
        prefix_sharing,
        error=rms(flat, alone),
        noise=noise,
        leak=rms(flat[:1], changed[:1]),
        effect=effect,
        tolerance=NOISE_FACTOR * noise + rounding,
    )


class UnprovenModelError(ValueError):
    """A model computes a flat batch differently from its rows one by one, on every route."""


def prove(
    model: PreTrainedModel,
    route: Route,
    *,
    prefix_sharing: bool = True,
    fallback: bool = True,
    call: Callable[..., Any] | None = None,
) -> tuple[CheckResult, list[CheckResult]]:
    """
    Find the first way to compute flat batches that is exact, and install it.

    Tries `route` with and without sharing, then the dense mask with and without sharing.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Causal language model with TRL's fused LM head.
        route (`Route`):
            The route to try first.
        prefix_sharing (`bool`, *optional*, defaults to `True`):
            Whether to try sharing.
        fallback (`bool`, *optional*, defaults to `True`):
            Whether to try the dense mask if `route` fails.
        call (`Callable`, *optional*):
            See [`check_flat`].

    Returns:
        `tuple[CheckResult, list[CheckResult]]`: The result that passed, and those that failed before it.

    Raises:
        `UnprovenModelError`: If nothing passed.
    """
    started = time.perf_counter()
    routes = [route]
    if fallback and route.backend != "mask":
        routes.append(Route("mask", route.previous))
    failed: list[CheckResult] = []
    for candidate in routes:
        for shared in (True, False) if prefix_sharing else (False,):
            result = check_flat(model, candidate, prefix_sharing=shared, call=call)
            if result.passed:
                return result, failed
            failed.append(result)
    tried = "\n    ".join(map(str, failed))
    raise UnprovenModelError(
        f"{type(model).__name__} does not treat a flat batch as separate sequences, so training it without padding "
        f"would be wrong. Tried, in {time.perf_counter() - started:.1f} s:\n    {tried}\n"
        "Set `padding_free=False` to train it with padding, or load it with another `attn_implementation`."
    )
