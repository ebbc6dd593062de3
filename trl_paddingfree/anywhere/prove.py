"""`padding_free(model)`: checks a model, then computes its padded calls flat, in any trainer or loop."""

import inspect
import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import numpy as np
import torch
from transformers.utils import logging

from ..capabilities import module_of, needed
from ..core import upstream
from ..core.check.again import prove_again
from ..core.check.comparison import HALF_DIGITS_FACTOR, Verdict, compare, relative_error, root_mean_square
from ..core.check.probe import (
    as_tried,
    check_rows,
    compute_dtype,
    log_probs_of,
    rounding_unit,
    row_inputs,
    tried_tokens,
)
from ..core.check.progress import say_details
from ..core.check.prove import UnprovenModelError, prove
from ..core.check.verdicts import NoVerdicts, Verdicts
from ..core.flat.batch import IGNORE_INDEX, FlatBatch, Inputs
from ..core.model import architecture
from ..core.model.adapters import why_padded
from ..core.model.flat_model import UNCOMPILED, FlatModel
from ..core.model.forward import is_pooled
from ..core.model.restored import attributes_set
from ..core.model.routes import choose_route
from .calls import STATES, PaddedCalls

logger = logging.get_logger(__name__)

_PROVEN_BY = (
    "`padding_free` proves a model by the `logits` that it names in its answers to calls with `input_ids`, "
    "`attention_mask`, `labels` and `use_cache`. If this is a wrapper of your own, call `padding_free` with the model "
    "in it, which is changed in place."
)

# Kinds of calls that are computed flat if the model itself answers them alike
_KINDS = ("with_left_padding", "with_routers", "with_labels")
# Answers beside logits that differ by up to this, relative to their norm, need no measure of the model's own noise
_LEAST = 0.01
# Answers that are compared, or are no part of rows, in other ways
_JUDGED = {*STATES, "logits", "aux_loss"}

# Every how many training calls are looked at by default
EVERY = 250

Model = TypeVar("Model", bound=torch.nn.Module)


def padding_free(
    model: Model,
    check: bool = True,
    prefix_sharing: bool = True,
    torch_compile: bool = False,
    check_steps: int = EVERY,
) -> Model:
    """
    Have a model compute padded rows without their padding, in any trainer or loop.

    A call with `input_ids` of shape `(R, L)` and a 2-D `attention_mask` skips the padding, computes shared prefixes
    once, and still returns rows of `L`, with zeros at padding. Calls of other kinds (generation, `inputs_embeds`, 4-D
    masks, hidden states of all layers, packed rows) are computed as before, and the first of each kind logs a warning.
    `FlatModel.of(model).counts` says how many tokens were computed.

    Args:
        model (`torch.nn.Module`):
            A transformers model with a head, with or without PEFT, on the device and in the dtype it will train in.
        check (`bool`, *optional*, defaults to `True`):
            Whether to prove that the model computes flat batches exactly. Without the check, a model that does not
            gives wrong answers silently.
        prefix_sharing (`bool`, *optional*, defaults to `True`):
            Whether to compute shared prefixes only once.
        torch_compile (`bool`, *optional*, defaults to `False`):
            Whether to compile decoder layers for flat calls, each kind of layer once. Set it here rather than in the
            trainer, which would compile the whole model in pieces.
        check_steps (`int`, *optional*, defaults to 250):
            Every how many training calls the rows of a call go through the model one by one, too, before it is
            computed: answers and gradients must be those of the flat call. The first one always is. 0, or
            `check=False`: none. `FlatModel.of(model).padded.looks.found` says what was compared.

    Returns:
        `model` itself; what is within it if it came from `torch.compile`.

    Raises:
        [`UnprovenModelError`]: The model computes a flat batch differently from its rows one by one.
            So does a training call that `check_steps` looks at.
        `TypeError`, `ValueError`: `model` is not a transformers model, or no route can serve it.

    >>> from trl_paddingfree import FlatModel, padding_free
    >>> from trl_paddingfree.cli.quickstart.model import make_model, make_tokenizer
    >>> model = padding_free(make_model(make_tokenizer(["an apple a day"]), num_hidden_layers=2))
    >>> ids, mask = torch.tensor([[3, 4, 5, 6], [3, 4, 7, 0]]), torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    >>> model(input_ids=ids, attention_mask=mask).logits.shape[:2]
    torch.Size([2, 4])
    >>> FlatModel.of(model).counts
    BatchCounts(computed=6, real=7, padded=8, distinct=5, repeated=1)
    """
    if isinstance(model, torch.nn.Module):
        found, was_compiled = upstream.uncompiled(model)
        if was_compiled:
            logger.warning(f"`padding_free`: the model is {UNCOMPILED}")
        model = cast(Model, found)
    base = architecture.transformers_model(model, "padding_free")
    if reason := why_padded(model.modules()):
        raise ValueError(f"{reason}, or leave the call of `padding_free` out.")
    if base.base_model is base and base.get_output_embeddings() is None:
        raise ValueError(
            f"{type(base).__name__} is a backbone without a head: call `padding_free` with the whole model."
        )
    if isinstance(check_steps, bool) or not isinstance(check_steps, int) or check_steps < 0:
        raise ValueError(f"`check_steps={check_steps!r}`: give a number of training calls, or 0 to look at none.")
    folder = "proof", "calls"
    looks = module_of(*folder) if check_steps == EVERY else needed(*folder, f"`check_steps={check_steps}`")
    folder = "compiled", "layers"
    layers = needed(*folder, "`torch_compile=True`") if torch_compile else module_of(*folder)
    if layers is not None:
        layers.make_eager(base)  # an earlier call may have compiled them
    start = time.perf_counter()
    route = choose_route(base, prefix_sharing=prefix_sharing, dtype=compute_dtype(base))
    before = upstream.attn_implementation(base)
    remembering = module_of("remembering", "verdicts") if check else None
    earlier: Verdicts = NoVerdicts() if remembering is None else remembering.Remembered()
    key = earlier.key(base, model, route, compute_dtype(base), rounding_unit(base), "padding_free")
    record = earlier.recall(key)
    if record is not None and not {"unknown", *_KINDS} <= record.facts.keys():  # a foreign file
        record = None
    flat = FlatModel.install(base, route if record is None else record.results[0].route)
    flat.alone()
    calls = PaddedCalls.install(flat)
    calls.looks = None
    if not check:
        if torch_compile:
            layers.compile_layers(flat, {})
        return model
    call = _CallWithRows(model, calls)
    try:
        # Calls of the check neither warn nor count
        quietly = [(calls, "says", False), (calls, "reads_padding", False), (flat, "counts", flat.counts)]
        with attributes_set(quietly):
            if record is None:
                result, failed = prove(base, route, call=call)
                with as_tried(base):
                    unknown = call.try_calls(result.tolerance)
                facts = {"unknown": unknown, **{name: bool(vars(calls)[name]) for name in _KINDS}}
                earlier.keep(key, [result, *failed], facts=facts)
            else:
                result, unknown = record.results[0], record.facts["unknown"]
                vars(calls).update({name: record.facts[name] for name in _KINDS})
            if torch_compile:
                prove_again(base, call, variation=layers.compiled(flat, {}))
                layers.compile_layers(flat, {})
    except BaseException as error:
        calls.remove()
        if layers is not None:
            layers.make_eager(base)
        upstream.set_attn_implementation(base, before)
        if isinstance(error, UnprovenModelError):  # its message names the option of the trainers
            raise UnprovenModelError(str(error).replace("Set `padding_free=False`", "Leave the call out")) from None
        raise
    if looks is not None and check_steps:
        calls.looks = looks.LooksAtCalls(flat, check_steps)
    missing = [*result.not_compared, *(f"`{name}` of the answers was not compared" for name in unknown)]
    verdict = "exact as far as it was compared" if missing else "exact"
    where = f"{type(base).__name__} on {base.device.type} in {compute_dtype(base)}".replace("torch.", "")
    how = f"checked in {time.perf_counter() - start:.1f} s"
    if record is not None:
        how = f"remembered from {record.day}; {earlier.hint}"
    gaps = "".join(f"; {gap}" for gap in missing)
    logger.warning(f"padding_free, {result.route}: {where}, {verdict} on {result.tried}{gaps} ({how}).")
    say_details(logger.warning, f"The start-up check: {result}.")
    return model


class _CallWithRows:
    """Stands in for a model in the check: computes padded calls flat if given a flat batch, otherwise as before."""

    def __init__(self, model: torch.nn.Module, calls: PaddedCalls):
        self.model, self.calls, self.base = model, calls, calls.model

    def __call__(self, flat_batch: FlatBatch | None = None, **inputs: Any) -> Any:
        before = self.calls.flat_model.counts
        is_shared = flat_batch is not None and flat_batch.layout.segments.is_shared
        with attributes_set([(self.calls, "shares_prefixes", is_shared)]):  # the check tries rows side by side, too
            answers = self.answers(inputs, is_flat=flat_batch is not None)
        if flat_batch is not None and self.calls.flat_model.counts == before:
            raise ValueError(
                f"the forward of {type(self.base).__name__} calls neither its `base_model` nor its decoder with rows"
            )
        return answers

    def answers(self, inputs: Inputs, is_flat: bool = False, with_labels: bool = False) -> Any:
        """The `log_probs` of rows, or the `logits` of a pooled head, and the whole `output` of the model."""
        left = ("fused_lm_head", "labels")[: 2 - with_labels]
        with nullcontext() if is_flat else self.calls.aside():
            try:
                output = self.model(**{name: x for name, x in inputs.items() if name not in left})
            except TypeError as error:
                error.add_note(_PROVEN_BY)
                raise
        names = output if isinstance(output, dict) else (type(output).__name__,)
        if "logits" not in names:
            answer = ", ".join(f"`{name}`" for name in names)
            raise ValueError(
                f"{type(self.model).__name__} answers with {answer}: its head may read padding. {_PROVEN_BY}"
            )
        if not is_pooled(self.base):
            return SimpleNamespace(log_probs=log_probs_of(output.logits, inputs["labels"]), output=output)
        logits = output.logits
        if logits.ndim == 3:  # one per token: the last one depends on the whole row
            last = (inputs["attention_mask"] * torch.arange(logits.size(1), device=logits.device)).argmax(1)
            logits = logits[torch.arange(len(last)), last]
        return SimpleNamespace(logits=logits, output=output)

    def both(self, inputs: Inputs, with_labels: bool = False) -> list[Any]:
        """The answers to the same rows, computed flat and as before."""
        return [self.answers(inputs, is_flat, with_labels) for is_flat in (True, False)]

    def try_calls(self, tolerance: float) -> list[str]:
        """
        Exclude kinds of calls that the model itself answers differently: rows with padding on the left, router losses
        that count padding, and heads that are given labels. Returns the names of answers that cannot be compared.

        Raises:
            [`UnprovenModelError`]: A plain call answers differently with something beside logits, such as `values`.
        """
        calls, pooled, config = self.calls, is_pooled(self.base), self.base.config.get_text_config()
        vars(calls).update(dict.fromkeys(_KINDS, True))  # whatever an earlier check has found
        tokens, half_digits = tried_tokens(self.base), rounding_unit(self.base) ** 0.5
        *places, last = check_rows(len(tokens), draw=0)
        # With a second row of one length, which with padding on the left, too, shares a prefix in the same columns
        alike = np.append(places[2][:9], (places[2][9:] + 1) % len(tokens))
        rows = [tokens[row] for row in (*places, last, alike)]
        right, wider = row_inputs(self.base, rows), row_inputs(self.base, rows, len(rows[0]) + 5)
        others, unknown = self.compared(right, wider, self.both(right))
        if not others.passed:
            raise UnprovenModelError(
                f"{type(self.model).__name__} answers with {others.reason} where padding is left out: its head reads "
                "padding, or other rows. Leave the call out to train it with padding, or have its head read each token "
                "by itself."
            )
        lengths, width = right["attention_mask"].sum(1, keepdim=True), len(rows[0])
        order = (torch.arange(width, device=lengths.device) + lengths) % width
        left = {name: x.gather(1, order) if torch.is_tensor(x) else x for name, x in right.items()}
        if not pooled:  # without the first token of each row, which padding would predict
            mask = left["attention_mask"].bool()
            has_context = mask & torch.nn.functional.pad(mask, (1, -1))
            left["labels"] = left["labels"].masked_fill(~has_context, IGNORE_INDEX)
            # Any token may pad: that of the model may have an embedding of zero
            left["input_ids"] = left["input_ids"].masked_fill(~mask, int(rows[0][0]))
        with torch.enable_grad():  # without gradients, such calls are not computed flat
            answers = self.both(left)
        flat, padded = (vars(x)["logits" if pooled else "log_probs"].detach().cpu().double() for x in answers)
        is_same = root_mean_square(flat - padded) <= tolerance
        calls.with_left_padding = is_same and self.compared(left, wider, answers)[0].passed
        if architecture.config_value(config, "output_router_logits") is not None:
            # Far more padding than tokens: a router loss that counts padding differs by more than rounding
            wide = {**row_inputs(self.base, rows, 4 * right["input_ids"].size(1)), "output_router_logits": True}
            flat, padded = (x.output.get("aux_loss") for x in self.both(wide))
            calls.with_routers = flat is None or relative_error(flat, padded) <= half_digits
        if not pooled and "labels" in inspect.signature(self.base.forward).parameters:
            answers = self.both(right, with_labels=True)
            is_same = relative_error(*(x.log_probs for x in answers)) <= HALF_DIGITS_FACTOR * half_digits
            calls.with_labels = is_same and self.compared(right, wider, answers, with_labels=True)[0].passed
        return unknown

    def compared(
        self, inputs: Inputs, wider: Inputs, answers: list[Any], with_labels: bool = False
    ) -> tuple[Verdict, list[str]]:
        """
        Whether all that the model answers beside logits is the same on the tokens of rows, computed flat and as before,
        as far as rows with more padding, `wider`, explain differences. Also the names of what cannot be compared.
        """
        flat, padded = (_by_name(answer.output, inputs["attention_mask"].bool()) for answer in answers)
        known = {name: x for name, x in padded.items() if x is not None}
        unknown = [*padded.keys() - known.keys()]
        shapes = [{name: x.shape for name, x in each.items() if x is not None} for each in (flat, padded)]
        if unlike := [name for name in {**padded, **flat} if shapes[0].get(name) != shapes[1].get(name)]:
            return Verdict(failure=f"`{unlike[0]}` of other shapes"), unknown

        def noises() -> list[dict[str, torch.Tensor]]:
            found = _by_name(self.answers(wider, with_labels=with_labels).output, wider["attention_mask"].bool())
            alike = {name for name, x in known.items() if torch.is_tensor(y := found.get(name)) and y.shape == x.shape}
            return [{**known, **{name: found[name] for name in alike}}]

        verdict = compare(known, {name: flat[name] for name in known}, noises, rounding_unit(self.base), _LEAST)
        return replace(verdict, worst=f"`{verdict.worst}`"), unknown


def _by_name(output: object, real: torch.Tensor, name: str = "") -> dict[str, Any]:
    """
    All that a model answers beside logits, and what is judged by itself, by name: float64 on the CPU, of the tokens
    `real` where it has tokens; `None` for what is no number.
    """
    if isinstance(output, dict):
        entries = dict.items(output)  # a field may have the name of a method
        parts = [(f"{name}.{key}".strip("."), x) for key, x in entries if key not in _JUDGED and x is not None]
    elif isinstance(output, tuple | list):
        parts = [(f"{name}[{i}]", x) for i, x in enumerate(output)]
    elif torch.is_tensor(output):
        if output.shape[:2] == real.shape:
            output = output[real.to(output.device)]
        elif output.ndim and len(output) == real.numel():
            output = output[real.flatten().to(output.device)]
        return {name: output.detach().cpu().double()}
    else:
        return {name: torch.tensor(output).double() if isinstance(output, int | float) else None}
    return {key: x for part, value in parts for key, x in _by_name(value, real, part).items()}
