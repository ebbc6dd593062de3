"""The start-up check of images, on the user's own first examples: a flat batch of them against each example alone.

The figures are those of [`~trl_paddingfree.core.check.prove`]. Here, `leak` is how much rows move when the images of
*other* rows are inverted, and `effect` how much they move when their *own* are.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice

import numpy as np
import torch
from accelerate.utils import send_to_device
from transformers import PreTrainedModel

from ..core.check.comparison import NOISE_FACTOR
from ..core.check.probe import Answers, Call, Rows, RowsAlone, Variants, largest_difference, undisturbed
from ..core.check.prove import Agree, CheckResult, UnprovenModelError, check_flat
from ..core.check.training import OthersWaitError, moved_off_zero
from ..core.data.lengths import Example
from ..core.flat.batch import IGNORE_INDEX, Inputs
from ..core.model.routes import Route
from ..core.trainers.proving import Models, StartUpCheck, sharing_together
from .collate import FlatVisionCollator
from .examples import images_of, inverted, with_each
from .model import sees_both_ways

# How many examples are searched for images
_EXAMPLES_SEARCHED = 256
# The kind of an [`ImageProbe`] for prompts without images, to which tools or environments may add some
MADE_UP = "made-up"


class ImageProbe:
    """
    The user's own first examples to try a model on, in batches of the trainer's collator: two with different images,
    the same two with their images inverted, and one without images, as far as the data has them.
    """

    def __init__(self, collator: FlatVisionCollator, examples: Iterable[Example], kind: str = "the data's"):
        self.collator, self.kind = collator, kind
        self.examples: dict[str, Example] = {}
        first = None  # the images of the first example that has any
        for example in islice(examples, _EXAMPLES_SEARCHED):
            if not (images := images_of(example)):
                name = "text"
            elif not first:
                name, first = "first", images
            elif list(map(np.shape, images)) != list(map(np.shape, first)):
                name = "second"
            elif not all(map(np.array_equal, images, first)):
                name = "of equal size"
            else:
                continue
            self.examples.setdefault(name, example)
            if self.examples.keys() >= {"text", "second"}:
                break
        if "of equal size" in self.examples:  # if none of another size was found
            self.examples.setdefault("second", self.examples["of equal size"])
        for name in {"first", "second"} & self.examples.keys():
            self.examples[f"{name}, inverted"] = with_each(self.examples[name], inverted)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the examples to try together; empty if no example with images was found."""
        if "first" not in self.examples:
            return ()
        return tuple(name for name in ("first", "first, inverted", "second", "text") if name in self.examples)

    def batch(self, names: Sequence[str], prefix_sharing: bool | None) -> Inputs:
        """The flat batch of some examples or, with `prefix_sharing=None`, TRL's, with all tokens scored."""
        examples = [self.examples[name] for name in names]
        if prefix_sharing is None:
            return _scoring_all(self.collator.padded(examples))
        collator = self.collator.changed(prefix_sharing=prefix_sharing)
        return collator.collated_rows(_scoring_all(collator.rows(examples)), examples).with_flat(collator)


def _scoring_all(rows: Inputs) -> Inputs:
    others = ("completion_mask", "label")  # and KTO's mismatched rows, which have the same images
    scored = {name: x for name, x in rows.items() if name not in others and not name.startswith("KL_")}
    return scored | {"labels": rows["input_ids"].masked_fill(rows["attention_mask"] == 0, IGNORE_INDEX)}


@contextmanager
def _tried(model: PreTrainedModel) -> Iterator[None]:
    # Images make no difference to a model whose projector starts at zero
    with undisturbed(model), moved_off_zero([*model.modules()], frozen=True):
        yield


class ImagesAlone(RowsAlone):
    """[`RowsAlone`] of examples with images. The answers to an example are those to all of its rows."""

    difference = staticmethod(largest_difference)
    tried = None  # of images: names say nothing of lengths

    def __init__(self, model: PreTrainedModel, examples: ImageProbe, call: Call | None = None):
        self.model, self.call, self.examples = model, model if call is None else call, examples
        self.rows, self.trying = examples.names, partial(_tried, model)
        with self.trying():
            self.alone = [self.answers([name])[0] for name in self.rows]
            first, inverted, *_ = self.alone
            # Rows with images come in one width only: in one run, the noise may be small by chance
            self.measure([self.answers(self.rows)], moved=inverted, still=first, units=NOISE_FACTOR)

    def answers(self, rows: Rows, width: int = 0, prefix_sharing: bool | None = None) -> Answers:
        batch = self.examples.batch(rows, prefix_sharing)
        inputs = send_to_device(batch, self.model.get_input_embeddings().weight.device)  # type: ignore[union-attr]
        output = self.call(**inputs, fused_lm_head=True, use_cache=False).log_probs.cpu().double()
        of_rows = [row[mask] for row, mask in zip(output, batch["labels"][:, 1:] != IGNORE_INDEX, strict=True)]
        return [torch.cat(of_rows[i :: len(rows)]) for i in range(len(rows))]

    def cut(self) -> Iterable[tuple[Rows, Answers]]:
        return ()

    def changed(self) -> Variants:
        first, other = self.rows[:2]
        found: Variants = []
        for changed in ({first: other, other: first}, {"second": "second, inverted"}):
            names = [changed.get(name, name) for name in self.rows]
            staying = [i for i, name in enumerate(self.rows) if name not in changed]
            if 0 < len(staying) < len(names):
                found.append((names, staying))
        return found


def check_images(model: PreTrainedModel, route: Route, reference: ImagesAlone) -> CheckResult:
    """[`~trl_paddingfree.core.check.prove.check_flat`] of a vision-language model, on examples with images."""
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
    agree: Agree = bool,
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


class ImageProof:
    """The [`~trl_paddingfree.core.trainers.proving.ExtraProof`] of a trainer's images, on the examples of a `probe`."""

    def __init__(self, probe: ImageProbe):
        self.probe: ImageProbe | None = probe  # `None` once made-up images could not be tried
        self.said = f"with {probe.kind} images" if probe.names else ""

    def prove(self, check: StartUpCheck, models: Models, results: list[CheckResult]) -> list[CheckResult]:
        """Check images, and update the `results` on text: either all models share prefixes or none does."""
        trained, images = check.base_of(models[0]), self.probe
        name = type(trained).__name__
        if images is None:
            return results
        if not images.names:
            check.say("No example has an image in its column: the check had nothing to try the model's images on.")
            return results
        if results[0].route.backend in ("flash", "positions") and sees_both_ways(trained):
            check.say(
                f"`attn_implementation={results[0].route.loaded_with!r}` lets image tokens of {name} see only what "
                "precedes them, with padding and without. The model was made to let them see their whole image: load "
                "it with 'sdpa'."
            )

        def prove_one(model, route):
            try:
                with check.in_precision():
                    return prove_images(check.base_of(model), route, images, call=model, agree=check.all_agree)
            except ValueError as error:
                limit = vars(check.args).get("max_length")  # trainers that generate have none
                if limit is None or "Image features and image tokens do not match" not in str(error):
                    raise
                cut = f"If `max_length={limit}` cuts an image, raise it or set it to `None`."
                raise ValueError(f"{error}. {cut}") from error

        is_made_up = images.kind == MADE_UP
        try:
            with check.failing_together(models) if is_made_up else nullcontext():
                with_images = sharing_together(prove_one, models, [result.route for result in results])
        except OthersWaitError:
            raise
        except Exception as error:  # made-up images stand in for some that may never come: text still trains
            if not is_made_up:
                raise
            self.probe, self.said = None, ""
            check.say(f"Made-up images cannot be tried ({error}): text trains, and images that come are refused.")
            return results
        if results[0].prefix_sharing > with_images[0].prefix_sharing:
            check.say(f"{name} trains without shared prefixes: with the images of this data, they are inexact.")
        # Gradients are compared on text: once more if images have changed the route
        on_text = [
            text if text.route == image.route else check.prove_one(model, image.route)
            for model, text, image in zip(models, results, with_images, strict=True)
        ]
        found = [
            replace(image, gradients=text.gradients, tried=text.tried)
            for text, image in zip(on_text, with_images, strict=True)
        ]
        if (first := found[0].gradients) is not None and not first.skipped:
            notes = (*first.notes, "gradients were compared on text, not with images")
            found[0] = replace(found[0], gradients=replace(first, notes=notes))
        return found
