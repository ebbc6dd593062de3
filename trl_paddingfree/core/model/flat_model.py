"""A model that computes flat batches: one object holds its route and everything else that we know about it."""

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from .. import upstream
from ..flat.batch import FlatBatch, Inputs
from ..flat.counts import BatchCounts
from ..flat.transfer import Arriving, on_device
from ..versions import refuse_moved_head
from .architecture import by_name
from .backends import ATTENTION_BACKENDS
from .edits import edits, refuse_edits, refuse_unanswerable
from .forward import flat_backbone, flat_forward, flat_inputs, is_pooled
from .hooks import PassHook
from .mixers import mixers_of
from .peers import Alone, Peers
from .restored import mark_of
from .routes import Route
from .told import register_attention

# Where a model keeps its [`FlatModel`], which is copied with the model
ATTRIBUTE = "flat_model"
# Why flat calls are no part of a compiled model, for those who compile one as a whole
NOT_TRACED = (
    "flat batches have another layout in each call, so that only decoder layers can be compiled: set "
    "`torch_compile=True` in the trainer or in `padding_free`"
)
# Said of a model that comes from `torch.compile`, after its name
UNCOMPILED = (
    "taken out of the wrapper of `torch.compile`, because flat batches have another layout in each step. Set "
    "`torch_compile=True` to compile decoder layers, each kind once, for all lengths."
)
# Makes a flat batch from the `input_ids`, `attention_mask` and `labels` of a call
Flattener = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], FlatBatch]


class FlatModel:
    """
    Makes one model instance compute flat batches; no other instance changes. Created by [`FlatModel.install`].

    Called with a `flat_batch`, the model computes it and answers in rows, with TRL's fused LM head, a pooled head or
    its own head. So it does in calls of TRL's head within [`FlatModel.flattening`], and in padded ones after
    `padding_free(model)`. Other calls go to the original forward and attention. Losses with a head of their own use
    [`FlatModel.hidden_states`].

    >>> from trl.trainer.utils import add_fused_lm_head
    >>> from trl_paddingfree.core.model.routes import choose_route
    >>> from trl_paddingfree.cli.quickstart.model import make_model, make_tokenizer
    >>> model = make_model(make_tokenizer(["an apple a day"]), num_hidden_layers=2)
    >>> add_fused_lm_head(model)
    >>> flat = FlatModel.install(model, choose_route(model))
    >>> FlatModel.of(model) is flat, flat.route.backend
    (True, 'segment')
    """

    route: Route  # how it computes flat batches

    def __init__(self, model: PreTrainedModel):
        self.model = model  # without the wrappers of PEFT, DDP, FSDP, DeepSpeed and `torch.compile`
        self.forwards: list[Callable] = []  # those that ours replaced; several if TRL added a head later
        self.mixers = mixers_of(model)  # knows the layers that mix tokens otherwise than by attention
        self.has_trained = False  # whether a flat batch was computed with gradients, see [`FlatModel.must_train`]
        self.repeats = False  # whether any of these computes shared prefixes again for each row
        self.edits = Arriving()  # whether rows were edited since they were flattened
        # Flattens calls of TRL's head that bring no `flat_batch`; if unset, they stay padded
        self.flatten: Flattener | None = None
        self.is_pooled = is_pooled(model)
        self.peers: Peers = Alone()  # the processes that compute batches together with this one
        self.padded: Any = None  # [`~trl_paddingfree.anywhere.calls.PaddedCalls`], if padded calls are computed flat
        self.counts = BatchCounts()  # token counts of padded calls so far
        self.hooks: tuple[PassHook, ...] = ()  # what capabilities add to all passes

    def __getstate__(self) -> dict[str, object]:
        # Copies of the model drop what belongs to the trainer
        return {**vars(self), "flatten": None, "peers": Alone(), "hooks": ()}

    def alone(self) -> None:
        """Drop what an earlier trainer has added to all passes, and the processes that computed with this one."""
        self.hooks, self.peers = (), Alone()

    @classmethod
    def of(cls, model: torch.nn.Module) -> "FlatModel | None":
        """The [`FlatModel`] of a possibly wrapped model; `None` if it has none, or its forward was replaced since."""
        flat = next((vars(module)[ATTRIBUTE] for module in model.modules() if ATTRIBUTE in vars(module)), None)
        return flat if flat and (flat._is_called or (flat.padded and flat.padded.is_called)) else None

    @classmethod
    def peers_of(cls, model: torch.nn.Module) -> Peers:
        """The processes that compute the batches of a model together with this one."""
        flat = cls.of(model)
        return Alone() if flat is None else flat.peers

    @classmethod
    def install(cls, model: PreTrainedModel, route: Route) -> "FlatModel":
        """Make a model compute flat batches by `route`. Called again, it changes the route."""
        flat = vars(model).get(ATTRIBUTE) or cls(model)
        flat.route = route
        replaces_attention = route.backend in ATTENTION_BACKENDS
        attention = register_attention(route.loaded_with, route.backend) if replaces_attention else route.loaded_with
        upstream.set_attn_implementation(model, attention)
        flat.repeats = flat.mixers.install(model, route.states)
        setattr(model, ATTRIBUTE, flat)
        if not flat._is_called:
            flat._bind()
        return flat

    # --- the forward ------------------------------------------------------------------------------------------------

    def _bind(self) -> None:
        """Replace the model's forward with ours."""
        depth, model = len(self.forwards), self.model
        refuse_moved_head(model.forward)
        self.forwards.append(model.forward)

        @functools.wraps(type(model).forward)  # `generate` validates its arguments against this signature
        def forward(self: PreTrainedModel, *args: object, **kwargs: object) -> object:
            flat: FlatModel = vars(self)[ATTRIBUTE]
            # A compiler or an export traces what transformers computes, and nothing of ours
            if torch.compiler.is_compiling() and "flat_batch" not in kwargs and flat._leaves_calls:
                return flat.forwards[depth](*args, **kwargs)
            return flat._answer(depth, args, kwargs)

        forward.depth = depth  # type: ignore[attr-defined]
        model.forward = types.MethodType(forward, model)

    @property
    def _is_called(self) -> bool:
        """Whether the model's forward is ours, or wraps ours."""
        return mark_of(self.model, "depth") == len(self.forwards) - 1

    @property
    def _leaves_calls(self) -> bool:
        """Whether calls without a `flat_batch` are computed as before: outside of ours, and in exports."""
        takes_none = self.flatten is None and (self.padded is None or self.padded.is_off)
        return takes_none or torch.compiler.is_exporting()

    @torch.compiler.disable(reason=NOT_TRACED)
    def _answer(self, depth: int, args: tuple, kwargs: Inputs) -> object:
        """Our forward that replaced `forwards[depth]`."""
        batch = kwargs.pop("flat_batch", None)
        if depth < len(self.forwards) - 1:  # called by a head that TRL has added since: the tokens are flat already
            return self.forwards[depth](*args, **kwargs)
        if batch is not None:  # of a collator
            if args:
                raise TypeError("Give the rows of a `flat_batch` to the model by name: `input_ids=...`.")
            rows = kwargs.get("input_ids")
            if rows is not None and rows.device != batch.input_ids.device:  # FSDP moves rows, but not the batch
                batch = batch.to(rows.device, non_blocking=True)
            compared = kwargs | {"labels": None} if self.is_pooled else kwargs  # theirs are not of tokens
            self.edits.add(edits(batch, compared), refuse_edits)
        elif (flattened := self.flattened(args, kwargs)) is not None:
            kwargs, batch = flattened
        elif self.padded is not None:  # of any trainer or loop, by `padding_free(model)`
            return self.padded.of_model(self.forwards[-1], args, kwargs)
        else:
            return self.forwards[-1](*args, **kwargs)
        refuse_unanswerable(self.model, kwargs)
        return flat_forward(self, self.begin_pass(batch), **kwargs)

    def flattened(self, args: tuple[Any, ...], kwargs: Inputs) -> tuple[Inputs, FlatBatch] | None:
        """The arguments of a call with rows that a trainer has generated, by name, and their flat batch, or `None`."""
        if self.flatten is None or not kwargs.get("fused_lm_head") or kwargs.get("shift_labels") is not None:
            return None
        kwargs = by_name(self.forwards[-1], args, kwargs)
        rows, mask = kwargs["input_ids"], kwargs.get("attention_mask")
        return kwargs, self.flatten(rows, torch.ones_like(rows) if mask is None else mask, kwargs["labels"])

    def hidden_states(self, batch: FlatBatch, scored: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
        """
        The last hidden states of a flat batch, for a loss with its own head, such as a divergence over the vocabulary.

        Args:
            batch (`FlatBatch`):
                The rows, on the device of the model.
            scored (`torch.Tensor` of shape `(R, L-1)`, bool):
                Which tokens of each row, padded as TRL pads it, are scored, from the second token on. May be on the CPU
                to avoid waiting for the device.
            **others:
                Further arguments of the model, such as those of images, if the batch has images.

        Returns:
            `(1, N, H)`: the hidden state that predicts each scored token, row by row. A token that several rows share
            is computed once, and returned once for each of them.

        Raises:
            `ValueError`: `scored` has another shape.
        """
        if (shape := (len(batch.row_mask), batch.row_mask.size(1) - 1)) != scored.shape:
            raise ValueError(
                f"`scored` has shape {tuple(scored.shape)}, and the rows of this batch have the shape {shape} from "
                "their second tokens on: give `labels[:, 1:] != -100`, or another mask of that shape."
            )
        places = scored.nonzero().T
        if places.device.type == "cpu":  # nothing waits for the device if the host knows what is scored
            places = on_device(places, batch.row_index.device)
        index = batch.row_index[tuple(places)]
        with flat_backbone(self, self.begin_pass(batch), lambda hidden: hidden[:, index.to(hidden.device)]):
            return self.model.base_model(**flat_inputs(self, batch, others)).last_hidden_state

    def begin_pass(self, batch: FlatBatch) -> FlatBatch:
        """Begin a pass, and return `batch` as this model can compute it."""
        for hook in self.hooks:  # which may add to those of the batch
            batch = hook.begin(self, batch)
        for hook in batch.hooks:
            batch = hook.begin(self, batch)
        if torch.is_grad_enabled():
            self.has_trained = True
        return batch

    @contextmanager
    def flattening(self, flatten: Flattener) -> Iterator[None]:
        """Within this context, `flatten` makes flat batches for calls of TRL's head that bring none."""
        before, self.flatten = self.flatten, flatten
        try:
            yield
        finally:
            self.flatten = before

    @contextmanager
    def must_train(self, trainer: Any) -> Iterator[None]:
        """Raise if a training step of `trainer` within this context computes no flat batch here."""
        self.has_trained = False
        yield
        if not self.has_trained:
            if self.model not in trainer.model.modules():
                raise RuntimeError(
                    "`trainer.model` was replaced: make the trainer again, of the new model, and without `model_init`."
                )
            raise RuntimeError(
                f"A training step of {type(trainer).__name__} computed no flat batch, but rows with padding: its loss "
                f"called {type(self.model).__name__} neither with the `flat_batch` of its inputs nor, as trainers that "
                "generate do, with `labels` and `fused_lm_head=True`. Have it do so, or set `padding_free=False`."
            )

    @contextmanager
    def attention_as_before(self) -> Iterator[None]:
        """Within this context, the model has the attention implementation that it was loaded with."""
        ours = upstream.attn_implementation(self.model)
        upstream.set_attn_implementation(self.model, str(ours))  # a `StandIn` reads as the name that it stands in for
        try:
            yield
        finally:
            upstream.set_attn_implementation(self.model, ours)
