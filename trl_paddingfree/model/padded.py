"""Padded calls of a model, computed flat: rows in, a flat batch through its backbone, rows out.

The forward of the backbone is replaced, and every head above computes with its answers as before: in rows, with zeros
where there is padding. Where only logits are asked for, the head computes flat tokens too. Calls that are no plain rows
compute as before, and the first of each kind says so.
"""

import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from transformers.utils import logging

from .. import upstream
from ..flat.batch import IGNORE_INDEX, FlatBatch, Inputs
from . import architecture
from .adapters import why_padded
from .architecture import CACHES, TYPE_ROWS, takes_images
from .attention import StandIn
from .flat_model import FlatModel
from .forward import flat_forward, flat_inputs, layout_arguments
from .masks import ATTENTION_BACKENDS
from .restored import attributes_set, mark_of

logger = logging.get_logger(__name__)

# Where a backbone keeps its [`PaddedCalls`], and the forward that it had before
ATTRIBUTE = "padded_calls"
# Arguments of a call that the flat batch replaces
_ROWS = ("input_ids", "attention_mask", "position_ids", "inputs_embeds", "use_cache", *CACHES)
# Arguments for heads, which no layer reads
_OF_HEADS = ("labels", "shift_labels", "logits_to_keep", "num_items_in_batch")
_OUTPUTS = ("output_hidden_states", "output_attentions")

Places = tuple[torch.Tensor, torch.Tensor]  # rows, and columns counted from the last


class PaddedCalls:
    """Computes the padded calls of one model flat, by the route of its [`FlatModel`]. Copies of it have copies."""

    def __init__(self, flat: FlatModel):
        self.flat, model = flat, flat.model
        self.classifies_rows = type(model).__name__.endswith("ForSequenceClassification")
        self.counts_by_mask = architecture.counts_positions_by_mask(model)
        # Token types, which tokenizers also give to models that do not take them
        self.ignored = {*TYPE_ROWS} - inspect.signature(model.base_model.forward).parameters.keys()
        self.follows_longest = bool(architecture.rotary_limits(model.config.get_text_config()))
        self.is_off = False  # in calls that compute as before, and within those that compute a flat batch
        # Whether rows are computed flat that are padded on the left, whose router losses are asked for, with labels
        self.with_left_padding = self.with_routers = self.with_labels = True
        self.says, self.said = True, set[str]()  # whether it warns of calls that compute as before; past reasons
        # Whether a backward pass has scored the first token of a row after padding; `None` before any could
        self.scores_first: bool | None = None
        self.of_head: tuple[Inputs, FlatBatch] | None = None  # the call of the head, for the backbone beneath it
        self.lock = threading.RLock()  # a call at a time: hooks tell the model of the batch

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "lock"}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state, lock=threading.RLock())

    @classmethod
    def install(cls, flat: FlatModel) -> "PaddedCalls":
        """Have the model of `flat` compute padded calls flat."""
        calls, model = flat.padded or cls(flat), flat.model
        # The forward of some models (OPT) calls the decoder within the backbone that others call
        for backbone in dict.fromkeys((model.base_model, *([] if takes_images(model) else [model.get_decoder()]))):
            if not mark_of(backbone, ATTRIBUTE):
                calls._bind(backbone)
        flat.padded = calls
        return calls

    @property
    def is_called(self) -> bool:
        """Whether the forward of the backbone is ours, or has it inside. A model that was saved whole has lost it."""
        return bool(mark_of(self.flat.model.base_model, ATTRIBUTE))

    def _bind(self, backbone: torch.nn.Module) -> None:
        @functools.wraps(type(backbone).forward)
        @torch.compiler.disable(recursive=False)
        def forward(self: torch.nn.Module, *args: object, **kwargs: object) -> object:
            calls, before = vars(self)[ATTRIBUTE]
            with calls.lock:
                return calls.of_backbone(before, args, kwargs)

        vars(forward)[ATTRIBUTE] = True
        vars(backbone)[ATTRIBUTE] = self, backbone.forward
        backbone.forward = types.MethodType(forward, backbone)

    def remove(self) -> None:
        """Have padded calls computed as before."""
        for module in self.flat.model.modules():
            if vars(module).get(ATTRIBUTE, (None,))[0] is self:
                module.forward = vars(module).pop(ATTRIBUTE)[1]
        self.flat.padded = None

    def aside(self) -> AbstractContextManager[None]:
        """Within this context, padded calls are computed as before."""
        return attributes_set([(self, "is_off", True)])

    # --- calls ------------------------------------------------------------------------------------------------------

    @torch.compiler.disable(recursive=False)
    def of_model(self, forward: Callable, args: tuple, kwargs: Inputs) -> object:
        """The answer to a call of the whole model, whose own forward is `forward`."""
        inputs = self._by_name(forward, args, kwargs)
        with self.lock:
            batch, places = self._flattened(inputs)
            if batch is not None and not self._asks_for_logits(inputs):
                with attributes_set([(self, "of_head", (inputs, batch))]):
                    return self._watched(forward(*args, **kwargs), places)
            with self.aside():
                if batch is None:
                    return self._watched(forward(*args, **kwargs), places)
                with self._computing(batch):
                    return self._watched(flat_forward(self.flat, batch, **_without_rows(inputs)), places)

    def of_backbone(self, forward: Callable, args: tuple, kwargs: Inputs) -> object:
        """The answer to a call of the backbone, whose own forward is `forward`."""
        inputs = self._by_name(forward, args, kwargs)
        batch, places = self._handed_on(inputs) if self.of_head else self._flattened(inputs)
        with self.aside():
            if batch is None:
                return self._watched(forward(*args, **kwargs), places)
            as_tuple = inputs.get("return_dict", self.flat.model.config.return_dict) is False
            others = {**_without_rows(inputs), **({"return_dict": True} if as_tuple else {})}
            with self._computing(batch), layout_arguments(self.flat, self.flat.begin_pass(batch)) as arguments:
                outputs = forward(**{**others, **flat_inputs(self.flat, batch), **arguments})
        values = {name: self._in_rows(batch, name, value) for name, value in outputs.items()}
        return self._watched(tuple(values.values()) if as_tuple else type(outputs)(**values), places)

    def _handed_on(self, inputs: Inputs) -> tuple[FlatBatch | None, Places | None]:
        """The flat batch of a backbone's call within that of a head, which may have changed what it hands on."""
        assert self.of_head is not None
        given, batch = self.of_head
        if all(inputs.get(name) is given.get(name) for name in ("input_ids", "attention_mask", "position_ids")):
            return batch, None
        other, _ = self._flattened(inputs)
        if other is None or (
            other.row_mask.shape == batch.row_mask.shape and bool((other.row_mask == batch.row_mask).all())
        ):
            return other, None
        self._warn("its head hands on other rows, or another `attention_mask`, than it was called with")
        return None, None

    @contextmanager
    def _computing(self, batch: FlatBatch) -> Iterator[None]:
        """Counts a batch that is computed within. Errors say that it was flat, and what to do."""
        self.flat.counts += batch.counts
        try:
            yield
        except Exception as error:
            rows, length = len(batch.row_mask), batch.input_ids.size(1)
            error.add_note(
                f"`padding_free` computes these {rows} rows as one of {length} tokens: hooks that steer rows, "
                "`adapter_names` and whatever else counts rows within the model cannot work on it. `with "
                "FlatModel.of(model).padded.aside():` computes calls as before, with their padding."
            )
            raise

    def _watched(self, outputs: object, places: Places | None) -> object:
        """Has the backward pass look whether the loss reads `outputs` at `places`, of padding before first tokens."""
        first = next(x for x in (outputs if isinstance(outputs, tuple) else outputs.values()) if torch.is_tensor(x))
        if places is not None and first.requires_grad:
            first.register_hook(partial(self._see, places))
        return outputs

    def _see(self, places: Places, gradient: torch.Tensor) -> None:
        scores_first = bool(gradient[places].any())
        if scores_first and self.scores_first is False:
            raise ValueError(
                "The loss scores the first token of a row with padding on its left, which padding predicts, and "
                "earlier losses did not: `padding_free` has computed nothing there. Pad on the right, leave first "
                "tokens out, or call the model within `FlatModel.of(model).padded.aside()`."
            )
        self.scores_first = scores_first

    def _in_rows(self, batch: FlatBatch, name: str, value: object) -> object:
        """An output of a backbone in rows: `(R, L, ...)`, or of routers, which give `(T, ...)`, `(R * L, ...)`."""
        if isinstance(value, tuple):
            return tuple(self._in_rows(batch, name, entry) for entry in value)
        if isinstance(value, torch.Tensor) and value.shape[:2] == batch.input_ids.shape:
            return batch.tokens_to_rows(value)
        if isinstance(value, torch.Tensor) and len(value) == batch.input_ids.size(1):
            return batch.tokens_to_rows(value[None]).flatten(0, 1)
        raise ValueError(
            f"{type(self.flat.model).__name__} answers with `{name}`, and which of it belongs to which token is not "
            "known: leave out what asks for it, or the call of `padding_free`."
        )

    def _by_name(self, forward: Callable, args: tuple, kwargs: Inputs) -> Inputs:
        return {**(dict(zip(inspect.signature(forward).parameters, args, strict=False)) if args else {}), **kwargs}

    def _wants(self, inputs: Inputs, name: str) -> bool:
        """Whether a call, or else the configuration, asks for `name`."""
        return architecture.wants(self.flat.model.config.get_text_config(), inputs, name)

    def _asks_for_logits(self, inputs: Inputs) -> bool:
        """Whether a call wants logits of all tokens, and nothing else."""
        values = [inputs.get(name) for name in (*_OF_HEADS, "fused_lm_head")]
        is_plain = not any(x is not None and (torch.is_tensor(x) or bool(x)) for x in values)
        is_tuple = inputs.get("return_dict", self.flat.model.config.return_dict) is False
        return is_plain and not (is_tuple or self.flat.is_pooled or self._wants(inputs, "output_router_logits"))

    # --- rows become flat -------------------------------------------------------------------------------------------

    def _flattened(self, inputs: Inputs) -> tuple[FlatBatch | None, Places | None]:
        """
        The flat batch of a call's rows, on their device; `None` if the call is to be computed as before. And where
        padding would predict first tokens, if only the backward pass can tell whether the loss scores these.
        """
        if self.is_off:
            return None, None
        reason, batch, places = self._why_no_rows(inputs), None, None
        if not reason:
            self._refuse_changes()
            reason, batch, places = self._flat_batch_of(inputs)
        if batch is None:
            self._warn(reason)
            return None, places
        return batch.to(inputs["input_ids"].device, non_blocking=True), places

    def _warn(self, reason: str) -> None:
        if self.says and reason not in self.said:
            self.said.add(reason)
            name = type(self.flat.model).__name__
            logger.warning(f"padding_free: {name} computes a call as before, with its padding: {reason}.")

    def _refuse_changes(self) -> None:
        """Refuse adapters and attention that were put on after `padding_free`, and cannot be computed flat."""
        model, route = self.flat.model, self.flat.route
        if reason := why_padded([model]):
            raise ValueError(f"{reason}, or leave the call of `padding_free` out.")
        name = upstream.attn_implementation(model)
        if name != route.previous or isinstance(name, StandIn) != (route.backend in ATTENTION_BACKENDS):
            raise ValueError(
                f"The attention of {type(model).__name__} was set to {str(name)!r} since `padding_free` has proven it "
                f"with {route.previous!r}. Call `padding_free` again."
            )

    def _why_no_rows(self, inputs: Inputs) -> str:
        """Why the arguments of a call are no plain rows, whatever their values; empty if they may be."""
        rows, mask, positions = (inputs.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
        known = {*_ROWS, *_OF_HEADS, *self.ignored}
        extra = [name for name, x in inputs.items() if name not in known and isinstance(x, torch.Tensor | list | tuple)]
        if not isinstance(rows, torch.Tensor) or rows.ndim != 2 or inputs.get("inputs_embeds") is not None:
            return "it is given embeddings in place of `input_ids` of shape `(rows, tokens)`"
        if any(inputs.get(name) is not None for name in CACHES) or inputs.get("use_cache") is True:
            return "it computes with a cache"
        if not torch.is_grad_enabled() and self._wants(inputs, "use_cache"):
            return "without gradients it makes a cache; where none is needed, set `model.config.use_cache = False`"
        if rows.size(1) == 1:
            return "its rows have one token"
        if wanted := [name for name in _OUTPUTS if self._wants(inputs, name)]:
            return f"`{wanted[0]}` asks for values of all layers"
        if not self.with_routers and self._wants(inputs, "output_router_logits"):
            return "the loss of its routers counts padding, too"
        if not self.with_labels and inputs.get("labels") is not None:
            return "given `labels`, its head reads padding, or what it has of rows by other arguments"
        if extra:
            return f"`{extra[0]}` comes with its rows, of which a flat batch knows nothing"
        if mask is not None and not (isinstance(mask, torch.Tensor) and mask.shape == rows.shape):
            return "its `attention_mask` is not one number for each token"
        if positions is not None and positions.shape not in (rows.shape, (1, rows.size(1))):
            return "its `position_ids` are not one number for each token"
        return ""

    def _flat_batch_of(self, inputs: Inputs) -> tuple[str, FlatBatch | None, Places | None]:
        """[`PaddedCalls._flattened`] from values, copied to the host at once, with the reason where it gives none."""
        rows = inputs["input_ids"]
        names = ("attention_mask", "position_ids", *(() if self.classifies_rows else ("labels", "shift_labels")))
        shapes = (rows.shape, (1, rows.size(1)))
        per_token = {k: x.expand_as(rows) for k in names if torch.is_tensor(x := inputs.get(k)) and x.shape in shapes}
        ids, *on_host = _on_host([rows, *per_token.values()])
        values = dict(zip(per_token, on_host, strict=True))
        mask = values.get("attention_mask", torch.ones_like(ids))
        if ((mask != 0) & (mask != 1)).any():
            return "its `attention_mask` has other numbers than 0 and 1", None, None
        real, columns = mask.bool(), torch.arange(ids.size(1)).expand_as(ids)
        begins = real[:, 1:] & ~real[:, :-1]
        if (begins.sum(1) + real[:, 0] > 1).any():  # a head may predict the token after the gap from what is in it
            return "it has padding between the tokens of a row", None, None
        if begins.any() and not self.with_left_padding:
            return "it has padding on the left, with which the model itself computes a row differently", None, None
        positions = values.get("position_ids")
        if positions is None:
            positions = (mask.cumsum(1) - 1) * mask if self.counts_by_mask else columns
        elif ((positions.diff() != 1) & real[:, 1:] & real[:, :-1]).any() or ((positions < 0) & real).any():
            return "its `position_ids` start again or leave some out, as in packed rows", None, None
        if reason := self._why_padding_counts(ids, real, values):
            return reason, None, None
        places = None if {"labels", "shift_labels"} & values.keys() else self._first_predictions(inputs, real)
        if places and (self.scores_first is not False or not torch.is_grad_enabled()):
            reason = (
                "it has padding on the left, and its loss may score the first token of a row, which padding predicts: "
                "give the model `labels` or `logits_to_keep`, or have a backward pass show that no loss does"
            )
            return reason, None, places
        reach = int(positions.max()) + 1 if self.follows_longest else None
        sharing = self.flat.route.prefix_sharing
        batch = FlatBatch.from_padded(ids, mask, None, positions, prefix_sharing=sharing, reach=reach)
        return "", batch, places

    def _first_predictions(self, inputs: Inputs, real: torch.Tensor) -> Places | None:
        """Where a call answers with what padding on the left predicts of the first tokens of rows."""
        if self.flat.is_pooled:
            return None
        width, kept = real.size(1), inputs.get("logits_to_keep")
        if isinstance(kept, int) and kept:
            width = min(kept, width)
        columns = real.int().argmax(1) - 1 - real.size(1)
        rows = (columns >= -width).nonzero()[:, 0]
        return (rows, columns[rows]) if len(rows) else None

    def _why_padding_counts(self, ids: torch.Tensor, real: torch.Tensor, values: dict[str, torch.Tensor]) -> str:
        """Why an answer would depend on what the model computes for padding; empty if it does not."""
        model = self.flat.model
        for name in values.keys() & {"labels", "shift_labels"}:
            # The head of a language model scores by each token the label of the next
            moves = name == "labels" and not self.flat.is_pooled
            scored = (values[name] != IGNORE_INDEX)[:, int(moves) :]
            if (scored & ~real[:, : scored.size(1)]).any():
                return f"`{name}` has others than {IGNORE_INDEX} where padding would be scored"
        if self.classifies_rows:
            padding = model.config.get_text_config().pad_token_id  # by its id, the head finds the last token
            columns = torch.arange(ids.size(1)).expand_as(ids)
            last = columns.argmax(1) if padding is None else (columns * (ids != padding)).argmax(1)
            if not real.gather(1, last[:, None]).all():
                return f"its head reads padding, as `config.pad_token_id={padding}` is another token than padding has"
        return ""


def _without_rows(inputs: Inputs) -> Inputs:
    """The arguments of a call, without its rows."""
    return {name: x for name, x in inputs.items() if name not in (*_ROWS, *TYPE_ROWS)}


def _on_host(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Rows of one shape, int64 on the CPU: in one copy, as each waits for the device."""
    # What is no whole number in floating point becomes 2: transformers reads it as true, and 0.5 would become 0
    tensors = [torch.where(x.long() == x, x, 2).long() if x.is_floating_point() else x.long() for x in tensors]
    if all(x.device.type == "cpu" for x in tensors):
        return tensors
    return [*torch.stack([x.to(tensors[0].device) for x in tensors]).cpu()]
