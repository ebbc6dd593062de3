"""Images are proven on the user's own first examples: flat, against TRL's rows of each example alone.

The figures are those of [`~trl_paddingfree.check.prove`]. Here, `leak` is how much rows move when the images of *other*
rows are inverted, and `effect` how much they move when their *own* are.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from accelerate.utils import send_to_device
from transformers import PreTrainedModel

from ..flat.batch import IGNORE_INDEX
from ..model.forward import install
from ..model.routes import Route
from .probe import HALF_DIGITS_FACTOR, NOISE_FACTOR, Call, compute_dtype, root_mean_square, undisturbed
from .prove import CheckResult, UnprovenModelError
from .training import moved_off_zero


class ImageExamples(Protocol):
    """The examples to try, and how they become batches in which all tokens are scored."""

    @property
    def names(self) -> Sequence[str]:
        """What they are called."""

    def padded(self, names: Sequence[str]) -> dict[str, Any]:
        """TRL's batch of some examples."""

    def flat(self, names: Sequence[str], prefix_sharing: bool) -> dict[str, Any]:
        """The flat batch of some examples."""

    def variants(self) -> list[tuple[list[str], list[str]]]:
        """The examples with other images in some, and those whose images stay."""


def _log_probs(
    model: PreTrainedModel, names: Sequence[str], batch: dict[str, Any], call: Call | None = None
) -> dict[str, torch.Tensor]:
    """Log-probabilities of all tokens of each example, over its one or two rows."""
    device = model.get_input_embeddings().weight.device  # type: ignore[union-attr]
    inputs = send_to_device(batch, device)
    output = (model if call is None else call)(**inputs, fused_lm_head=True, use_cache=False).log_probs.double().cpu()
    scored = batch["labels"][:, 1:] != IGNORE_INDEX
    rows = [row[mask] for row, mask in zip(output, scored, strict=True)]
    return {name: torch.cat(rows[i :: len(names)]) for i, name in enumerate(names)}


def check_images(
    model: PreTrainedModel, route: Route, examples: ImageExamples, call: Call | None = None
) -> CheckResult:
    """
    Run `model` on examples flat, and one by one. Leaves `route` installed, and the model otherwise as it was.

    Weights that are zero are moved off it: behind a projector that starts at zero no image makes a difference yet.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Vision-language model with TRL's fused LM head.
        route (`Route`):
            How to compute the flat batch.
        examples ([`ImageExamples`]):
            What to try.
        call (`Callable`, *optional*):
            What to call in place of `model`: the same model under a wrapper that gathers its weights.
    """
    names, log_probs = examples.names, partial(_log_probs, model, call=call)
    install(model, route)
    with undisturbed(model), moved_off_zero([*model.modules()], frozen=True):
        alone = {name: log_probs([name], examples.padded([name]))[name] for name in names}
        padded = log_probs(names, examples.padded(names))
        try:
            flat = log_probs(names, examples.flat(names, route.prefix_sharing))
            leak = 0.0
            for changed, staying in examples.variants():
                moved = log_probs(changed, examples.flat(changed, route.prefix_sharing))
                leak = max([leak, *(root_mean_square([moved[name]], [flat[name]]) for name in staying)])
        except Exception as error:  # whatever a model raises on flat input is a verdict, reported with its reason
            return CheckResult(route, failure=f"{type(error).__name__}: {error}")
    noise = max(root_mean_square([padded[name]], [alone[name]]) for name in names)
    effect = root_mean_square([alone["inverted"]], [alone["first"]])
    if effect == 0:  # an exact result would say nothing
        return CheckResult(route, failure="images make no difference to the model: they never arrive")
    unit = torch.finfo(compute_dtype(model)).eps
    scale = float(torch.cat([*alone.values()]).pow(2).mean().sqrt())
    return CheckResult(
        route,
        error=max(root_mean_square([flat[name]], [alone[name]]) for name in names),
        noise=noise,
        leak=leak,
        effect=effect,
        tolerance=min(NOISE_FACTOR * noise + unit * scale, HALF_DIGITS_FACTOR * unit**0.5 * effect),
    )


def prove_images(
    model: PreTrainedModel,
    route: Route,
    examples: ImageExamples,
    *,
    call: Call | None = None,
    agree: Callable[[bool], bool] = bool,
) -> CheckResult:
    """
    Prove that images arrive where they belong, with `route` or, failing that, with the same without shared prefixes.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Vision-language model with TRL's fused LM head.
        route (`Route`):
            A route that is exact on text.
        examples ([`ImageExamples`]):
            What to try.
        call (`Callable`, *optional*):
            See [`check_images`].
        agree (`Callable`, *optional*):
            Gives whether something is so on all processes, from whether it is on this one.

    Returns:
        `CheckResult`: The result that passed.

    Raises:
        `UnprovenModelError`: If nothing passed.
    """
    failed: list[CheckResult] = []
    for candidate in dict.fromkeys((route, route.without_sharing())):
        result = check_images(model, candidate, examples, call)
        if agree(result.passed):
            return result
        failed.append(result)
    tried = "\n    ".join(map(str, failed))
    raise UnprovenModelError(
        f"{type(model).__name__} does not keep the images of a flat batch with their rows, so training it without "
        f"padding would be wrong. Tried, on the first examples of the data:\n    {tried}\n"
        "Set `padding_free=False` to train it with padding."
    )
