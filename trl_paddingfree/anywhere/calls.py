"""Padded calls of a model, computed flat: rows in, a flat batch through its backbone, rows out.

The backbone's forward is replaced. Heads still see padded tensors, with zeros in the padding. If a call only asks for
logits, and the model answers with nothing else, the head computes flat tokens, too. Calls with anything but plain rows
are computed as before, and the first of each kind logs a warning.
"""

import functools
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from transformers.modeling_outputs import ModelOutput
from transformers.utils import logging

from ..core import upstream
from ..core.flat.batch import FlatBatch, Inputs
from ..core.model.adapters import why_padded
from ..core.model.architecture import CACHES, TYPE_ROWS, by_name, decoder_of, takes_images, wants
from ..core.model.backends import ATTENTION_BACKENDS
from ..core.model.flat_model import NOT_TRACED, FlatModel
from ..core.model.forward import flat_backbone, flat_inputs, layout_arguments
from ..core.model.restored import attributes_set, mark_of
from ..core.model.told import StandIn
from .rows import OF_HEADS, ROWS, PaddedRows

logger = logging.get_logger(__name__)

# Where a backbone keeps its [`PaddedCalls`] and its original forward
ATTRIBUTE = "padded_calls"
# Outputs that are of the layout: they have no rows
STATES = {"state", *CACHES}


class _Lock(threading.Condition):
    """A reentrant lock. Copies of its owner get a new one."""

    def __reduce__(self) -> tuple[type["_Lock"], tuple[()]]:
        return _Lock, ()


class PaddedCalls(PaddedRows):
    """Computes the padded calls of one model flat, by the route of its [`FlatModel`]. Copied with the model."""

    def __init__(self, flat_model: FlatModel):
        super().__init__(flat_model)
        self.is_off = False  # during calls that are computed as before, and within flat ones
        self.says, self.said = True, set[str]()  # whether to warn of calls computed as before; reasons so far
        # Whether the model answers with nothing else, as far as it was seen
        self.has_logits_alone = not flat_model.is_pooled
        self.of_head: tuple[Inputs, FlatBatch] | None = None  # the head's current call, for the backbone beneath it
        self.lock = _Lock()  # one call at a time: hooks pass the batch to the model
        # Gets each call that is computed flat before it is: what computes it as before and flat, its inputs and rows
        self.looks: Callable[..., None] | None = None

    @classmethod
    def install(cls, flat_model: FlatModel) -> "PaddedCalls":
        """Have the model of `flat_model` compute padded calls flat."""
        calls, model = flat_model.padded or cls(flat_model), flat_model.model
        # The forward of some models (OPT) bypasses the backbone and calls the decoder inside
        for backbone in {model.base_model, model.base_model if takes_images(model) else decoder_of(model)}:
            if not mark_of(backbone, ATTRIBUTE):
                calls._bind(backbone)
            elif (other := vars(backbone)[ATTRIBUTE][0]) is not calls:
                raise ValueError(
                    f"{type(model).__name__} shares its {type(backbone).__name__} with a {type(other.model).__name__} "
                    "that `padding_free` was called with, and whose calls it computes. Give each model a backbone of "
                    "its own, or call `padding_free` with one of them, and `FlatModel.of(other).padded.remove()` for "
                    "the other."
                )
        flat_model.padded = calls
        return calls

    @property
    def is_called(self) -> bool:
        """Whether the backbone's forward is ours, or wraps ours. A model that was saved whole has lost it."""
        return bool(mark_of(self.model.base_model, ATTRIBUTE))

    def _bind(self, backbone: torch.nn.Module) -> None:
        @functools.wraps(type(backbone).forward)
        def forward(self: torch.nn.Module, *args: object, **kwargs: object) -> object:
            calls, before = vars(self)[ATTRIBUTE]
            if torch.compiler.is_compiling() and (calls.is_off or torch.compiler.is_exporting()):
                return before(*args, **kwargs)
            return calls.of_backbone(before, args, kwargs)

        vars(forward)[ATTRIBUTE] = True
        vars(backbone)[ATTRIBUTE] = self, backbone.forward
        backbone.forward = types.MethodType(forward, backbone)

    def remove(self) -> None:
        """Restore the original forwards: padded calls are computed as before."""
        for module in self.model.modules():
            if vars(module).get(ATTRIBUTE, (None,))[0] is self:
                module.forward = vars(module).pop(ATTRIBUTE)[1]
        self.flat_model.padded = None

    def aside(self) -> AbstractContextManager[None]:
        """Within this context, padded calls are computed as before."""
        return attributes_set([(self, "is_off", True)])

    # --- calls ------------------------------------------------------------------------------------------------------

    def of_model(self, forward: Callable, args: tuple, kwargs: Inputs) -> object:
        """Answer a call of the whole model, whose own forward is `forward`."""
        inputs = by_name(forward, args, kwargs)
        with self.lock:
            batch, padding = self._flattened(inputs)
            if batch is None or (outputs := self._flat_logits(forward, inputs, batch)) is None:
                with self.aside() if batch is None else attributes_set([(self, "of_head", (inputs, batch))]):
                    outputs = forward(*args, **kwargs)
            return self._watched(outputs, padding, is_flat=batch is not None)

    def _flat_logits(self, forward: Callable, inputs: Inputs, batch: FlatBatch) -> ModelOutput | None:
        """Logits in rows, which the head computes of flat tokens; `None` if more is asked for, or answered."""
        names = (*OF_HEADS, "fused_lm_head")
        if not self.has_logits_alone or any(torch.is_tensor(x) or x for x in map(inputs.get, names)):
            return None
        if not wants(self.model.config, inputs, "return_dict") or self._wants(inputs, "output_router_logits"):
            return None
        if self.looks is not None:
            self.looks(forward, self._logits_of, inputs, batch)
        with self._computing(batch):
            outputs = self._logits_of(forward, inputs, self.flat_model.begin_pass(batch), in_rows=False)
        self.has_logits_alone = isinstance(outputs, ModelOutput) and {*outputs} - STATES == {"logits"}
        return type(outputs)(logits=batch.tokens_to_rows(outputs.logits)) if self.has_logits_alone else None

    def _logits_of(self, forward: Callable, inputs: Inputs, own: FlatBatch, in_rows: bool = True) -> Any:
        """What a head answers for flat tokens, or its logits in rows."""
        with self.aside(), flat_backbone(self.flat_model, own, None, calls_decoder=True):
            outputs = forward(**flat_inputs(self.flat_model, own, _without_rows(inputs)))
        return (own.tokens_to_rows(outputs.logits),) if in_rows else outputs

    @torch.compiler.disable(reason=NOT_TRACED)
    def of_backbone(self, forward: Callable, args: tuple, kwargs: Inputs) -> object:
        """Answer a call of the backbone, whose own forward is `forward`."""
        with self.lock:
            return self._of_backbone(forward, args, kwargs)

    def _of_backbone(self, forward: Callable, args: tuple, kwargs: Inputs) -> object:
        inputs = by_name(forward, args, kwargs)
        batch, padding = self._handed_on(inputs) if self.of_head else self._flattened(inputs)
        if batch is None:
            with self.aside():
                return self._watched(forward(*args, **kwargs), padding, is_flat=False)
        if self.looks is not None:
            self.looks(forward, self._states_of, inputs, batch)
        with self._computing(batch):
            outputs = self._outputs_of(forward, inputs, self.flat_model.begin_pass(batch))
        if isinstance(outputs, tuple):  # asked for by `return_dict=False`
            outputs = self._in_rows(batch, "tuple", outputs)
        else:
            in_rows = {name: self._in_rows(batch, name, x) for name, x in outputs.items() if name not in STATES}
            outputs = type(outputs)(**in_rows)
        return self._watched(outputs, padding, is_flat=True)

    def _outputs_of(self, forward: Callable, inputs: Inputs, own: FlatBatch) -> Any:
        """What a backbone answers for flat tokens."""
        with self.aside(), layout_arguments(self.flat_model, own) as arguments:
            return forward(**flat_inputs(self.flat_model, own, _without_rows(inputs)) | arguments)

    def _states_of(self, forward: Callable, inputs: Inputs, own: FlatBatch) -> tuple[torch.Tensor]:
        """The hidden states that a backbone answers with, in rows."""
        return (own.tokens_to_rows(self._outputs_of(forward, inputs, own)[0]),)

    def _handed_on(self, inputs: Inputs) -> tuple[FlatBatch | None, torch.Tensor | None]:
        """The flat batch of a backbone's call within that of a head, which may have changed the rows it passes on."""
        assert self.of_head is not None
        given, batch = self.of_head
        if all(inputs.get(name) is given.get(name) for name in ("input_ids", "attention_mask", "position_ids")):
            return batch, None
        other, _ = self._flattened(inputs)
        if other is None or torch.equal(other.row_mask, batch.row_mask):
            return other, None
        self._warn("its head hands on other rows, or another `attention_mask`, than it was called with")
        return None, None

    @contextmanager
    def _computing(self, batch: FlatBatch) -> Iterator[None]:
        """Count the batch computed within this context. Errors get a note that it was flat, and what to do."""
        self.flat_model.counts += batch.counts
        try:
            yield
        except Exception as error:
            error.add_note(
                f"`padding_free` computes these {len(batch.row_mask)} rows as one of {batch.input_ids.size(1)} tokens: "
                "hooks that steer rows, `adapter_names` and whatever else counts rows within the model cannot work on "
                "it. `with FlatModel.of(model).padded.aside():` computes calls as before, with their padding."
            )
            raise

    def _watched(self, outputs: Any, padding: torch.Tensor | None, is_flat: bool) -> object:
        """Have the backward pass tell whether the loss reads tokens of `outputs` that are `padding`."""
        if padding is not None:
            # Not by a method of `outputs`, where a field may have its name; heads may answer with logits themselves
            answers = dict.values(outputs) if isinstance(outputs, dict) else outputs
            seen: list[bool] = []
            for x in (answers,) if torch.is_tensor(answers) else answers:
                # Logits, hidden states, values; a head that classifies rows answers with `(R, labels)`
                is_of_tokens = torch.is_tensor(x) and x.shape[:2] == padding.shape
                if is_of_tokens and x.requires_grad and (x.ndim > 2 or not self.classifies_rows):
                    x.register_hook(partial(self._see, padding, is_flat, seen))
        return outputs

    def _see(self, padding: torch.Tensor, is_flat: bool, seen: list[bool], gradient: torch.Tensor) -> None:
        # NaN says nothing: masks leave it where it is
        is_read = torch.linalg.vector_norm(gradient.reshape(*padding.shape, -1), torch.inf, -1) > 0
        then = _refuse_reading if is_flat else partial(self._learn, seen)
        self.arriving.add(torch.stack([is_read.any(), (is_read & padding).any()]), then)

    def _learn(self, seen: list[bool], results: torch.Tensor) -> None:
        """Note whether a loss reads padding, by what was `seen` of each of the outputs that it reads."""
        is_read, at_padding = results.tolist()
        if is_read:  # a gradient of zeros says nothing
            seen.append(at_padding)
            self.reads_padding = any(seen)

    def _in_rows(self, batch: FlatBatch, name: str, value: object) -> object:
        """A backbone's output in rows: `(R, L, ...)`, or `(R * L, ...)` for router outputs, which are `(T, ...)`."""
        if isinstance(value, tuple):
            return tuple(self._in_rows(batch, name, entry) for entry in value)
        if torch.is_tensor(value):
            if value.shape[:2] == batch.input_ids.shape:
                return batch.tokens_to_rows(value)
            if len(value) == batch.input_ids.size(1):
                return batch.tokens_to_rows(value[None]).flatten(0, 1)
        raise ValueError(
            f"{type(self.model).__name__} answers with `{name}`, and `padding_free` cannot tell which part of it "
            "belongs to which token: leave out what asks for it, or the call of `padding_free`."
        )

    # --- rows become flat -------------------------------------------------------------------------------------------

    def _flattened(self, inputs: Inputs) -> tuple[FlatBatch | None, torch.Tensor | None]:
        """
        The flat batch of a call's rows, on their device; `None` if the call is to be computed as before. Also which
        tokens of the answer are padding, if the backward pass is to tell whether the loss reads these.
        """
        if self.is_off:
            return None, None
        found: FlatBatch | str = self._why_no_rows(inputs)
        padding = None
        if not found:
            # Unsupported adapters, or another attention implementation, set after `padding_free`
            model, route = self.model, self.flat_model.route
            if reason := why_padded([model]):
                raise ValueError(f"{reason}, or leave the call of `padding_free` out.")
            name = upstream.attn_implementation(model)
            if name != route.loaded_with or isinstance(name, StandIn) != (route.backend in ATTENTION_BACKENDS):
                raise ValueError(
                    f"The attention of {type(model).__name__} was set to {str(name)!r} after `padding_free` proved "
                    f"it with {route.loaded_with!r}. Call `padding_free` again."
                )
            found, padding = self._flat_batch_of(inputs)
        if isinstance(found, str):
            self._warn(found)
            return None, padding
        return found.to(inputs["input_ids"].device, non_blocking=True), padding

    def _warn(self, reason: str) -> None:
        if self.says and reason not in self.said:
            self.said.add(reason)
            logger.warning(
                f"padding_free: {type(self.model).__name__} computes a call as before, with its padding: {reason}."
            )


def _refuse_reading(results: torch.Tensor) -> None:
    """Raise if a backward pass has seen that a loss reads what a flat call has answered at padding."""
    if results[1]:
        raise ValueError(
            "The loss reads what the model answers at padding, where `padding_free` has computed nothing and padded "
            "rows have predictions: of padding, if labels there are not -100, or of the first token of a row, if it "
            "follows padding on the left. Set labels of padding to -100, leave first tokens out or pad on the right, "
            "or call the model within `FlatModel.of(model).padded.aside()`."
        )


def _without_rows(inputs: Inputs) -> Inputs:
    """The arguments of a call, without its rows."""
    return {name: x for name, x in inputs.items() if name not in (*ROWS, *TYPE_ROWS)}
