"""The start-up check of images, on the user's own first examples: a flat batch of them against each example alone.

The figures are those of [`~trl_paddingfree.check.prove`]. Here, `leak` is how much rows move when the images of *other*
rows are inverted, and `effect` how much they move when their *own* are.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from accelerate.utils import send_to_device
from transformers import PreTrainedModel

from ..check.comparison import NOISE_FACTOR
from ..check.probe import Call, Rows, RowsAlone, largest_difference, undisturbed
from ..check.prove import CheckResult, UnprovenModelError, check_flat
from ..check.training import moved_off_zero
from ..flat.batch import IGNORE_INDEX
from ..model.routes import Route
from .examples import ImageProbe


@contextmanager
def _tried(model: PreTrainedModel) -> Iterator[None]:
    # Images make no difference to a model whose projector starts at zero
    with undisturbed(model), moved_off_zero([*model.modules()], frozen=True):
        yield


class ImagesAlone(RowsAlone):
    """[`RowsAlone`] of examples with images. The answers to an example are those to all of its rows."""

    difference = staticmethod(largest_difference)

    def __init__(self, model: PreTrainedModel, examples: ImageProbe, call: Call | None = None):
        self.model, self.call, self.examples = model, model if call is None else call, examples
        self.rows, self.trying = examples.names, partial(_tried, model)
        with self.trying():
            self.alone = [self.answers([name])[0] for name in self.rows]
            first, inverted, *_ = self.alone
            # Rows with images come in one width only: in one run, the noise may be small by chance
            self.measure([self.answers(self.rows)], moved=inverted, still=first, units=NOISE_FACTOR)

    def answers(self, rows: Rows, width: int = 0, prefix_sharing: bool | None = None) -> list[torch.Tensor]:
        batch = self.examples.padded(rows) if prefix_sharing is None else self.examples.flat(rows, prefix_sharing)
        inputs = send_to_device(batch, self.model.get_input_embeddings().weight.device)  # type: ignore[union-attr]
        output = self.call(**inputs, fused_lm_head=True, use_cache=False).log_probs.double().cpu()
        scored = batch["labels"][:, 1:] != IGNORE_INDEX
        of_rows = [row[mask] for row, mask in zip(output, scored, strict=True)]
        return [torch.cat(of_rows[i :: len(rows)]) for i in range(len(rows))]

    def changed(self) -> list[tuple[Rows, list[int]]]:
        return self.examples.variants()


def check_images(model: PreTrainedModel, route: Route, reference: ImagesAlone) -> CheckResult:
    """[`~trl_paddingfree.check.prove.check_flat`] of a vision-language model, on examples with images."""
    result = check_flat(model, route, reference)
    if reference.effect == 0 and not result.failure:  # then flat answers prove nothing about images
        return CheckResult(route, failure="images make no difference to the model: they never arrive")
    return result


def prove_images(
    model: PreTrainedModel,
    route: Route,
    examples: ImageProbe,
    *,
    call: Call | None = None,
    agree: Callable[[bool], bool] = bool,
) -> CheckResult:
    """Prove images on a `route` that is exact on text or, failing that, on the same route without shared prefixes."""
    reference = ImagesAlone(model, examples, call)
    failed = []
    for candidate in dict.fromkeys((route, route.without_sharing())):
        result = check_images(model, candidate, reference)
        if agree(result.passed):
            return result
        failed.append(result)
    tried = "\n    ".join(map(str, failed))
    raise UnprovenModelError(
        f"{type(model).__name__} does not keep the images of a flat batch with their rows, so training it without "
        f"padding would be wrong. Tried, on the first examples of the data:\n    {tried}\n"
        "Set `padding_free=False` to train it with padding."
    )
