"""A model that computes flat batches: one object holds its route, and everything else that must be known of it."""

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from .. import upstream
from ..flat.batch import FlatBatch, Inputs
from ..flat.counts import BatchCounts
from ..flat.layout import Attention
from ..flat.schedule import Schedule
from ..flat.slices import NO_WINDOW
from ..flat.transfer import on_device
from ..versions import refuse_moved_head
from .architecture import recompute_first
from .attention import register_attention
from .edits import EditsFound
from .forward import flat_backbone, flat_forward, flat_inputs, is_pooled
from .masks import ATTENTION_BACKENDS, PassContext
from .restored import attributes_set, mark_of
from .routes import Route, why_not_in_slices
from .sequence import SequenceGroup
from .state_layers import carries_state, install_state_layers, repeats_prefixes

# Where a model keeps its [`FlatModel`]: copies of the model come with copies of it
ATTRIBUTE = "flat_model"
# Makes a flat batch from the `input_ids`, `attention_mask` and `labels` of a call
Flattener = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], FlatBatch]


class FlatModel:
    """
    What makes one model instance compute flat batches, made by [`FlatModel.install`]. Nothing outside of it changes.

    The model must have TRL's fused LM head, or a pooled head. Called with a `flat_batch`, it computes that and answers
    in rows; other calls go to the forward and the attention that were there before. Losses with a head of their own
    take [`FlatModel.hidden_states`].

    >>> from trl.trainer.utils import add_fused_lm_head
    >>> from trl_paddingfree.model.routes import choose_route
    >>> from trl_paddingfree.cli.quickstart.model import make_model, make_tokenizer
    >>> model = make_model(make_tokenizer(["an apple a day"]), num_hidden_layers=2)
    >>> add_fused_lm_head(model)
    >>> flat = FlatModel.install(model, choose_route(model))
    >>> FlatModel.of(model) is flat, flat.route.backend
    (True, 'segment')
    """

    def __init__(self, model: PreTrainedModel, route: Route):
        self.model, self.route = model, route  # without the wrappers of PEFT, DDP, FSDP, DeepSpeed and `torch.compile`
        self.forwards: list[Callable] = []  # those that ours replaced: more than one if TRL has added a head since
        self.carries_state = carries_state(model)
        self.has_trained = False  # whether a flat batch was computed with gradients, see [`FlatModel.must_train`]
        self.edits = EditsFound()
        # Flattens calls of TRL's head that bring no `flat_batch`; if unset, they stay padded
        self.flatten: Flattener | None = None
        self.recomputable: Sequence[GradientCheckpointingLayer] = ()  # the layers that a budget may have recompute
        self.is_pooled = is_pooled(model)
        self.group: SequenceGroup | None = None  # the processes that each compute a slice of a batch
        self.padded: Any = None  # [`~trl_paddingfree.model.padded.PaddedCalls`], if calls without a batch are flat too
        self.counts = BatchCounts()  # of padded calls so far
        self.watch: Attention | None = None  # sees what attention functions are given, see [`keys_noted`]

    def __getstate__(self) -> dict[str, object]:
        # Copies of the model leave the trainer behind, and pending edits, whose events cannot be copied
        left = dict.fromkeys(("flatten", "group", "watch"))
        return {**vars(self), **left, "edits": EditsFound()}

    @classmethod
    def of(cls, model: torch.nn.Module) -> "FlatModel | None":
        """The one of a model, under whatever wrappers; `None` if it has none, or its forward was replaced since."""
        flat = next((vars(module)[ATTRIBUTE] for module in model.modules() if ATTRIBUTE in vars(module)), None)
        return flat if flat and (flat._is_called or (flat.padded and flat.padded.is_called)) else None

    @classmethod
    def group_of(cls, model: torch.nn.Module) -> SequenceGroup | None:
        """The processes that compute slices of a model's batches with this one; `None` if it computes whole ones."""
        flat = cls.of(model)
        return None if flat is None else flat.group

    @classmethod
    def install(cls, model: PreTrainedModel, route: Route) -> "FlatModel":
        """Have a model compute flat batches by `route`. Called again, it changes the route."""
        flat = vars(model).get(ATTRIBUTE) or cls(model, route)
        flat.route = route
        replaces_attention = route.backend in ATTENTION_BACKENDS
        attention = register_attention(route.previous, route.backend) if replaces_attention else route.previous
        upstream.set_attn_implementation(model, attention)
        install_state_layers(model, along_tree=route.states == "tree")
        setattr(model, ATTRIBUTE, flat)
        if not flat._is_called:
            flat._bind()
        return flat

    @property
    def repeats(self) -> bool:
        """Whether any layer that carries state computes shared prefixes again."""
        return repeats_prefixes(self.model)

    # --- the forward ------------------------------------------------------------------------------------------------

    def _bind(self) -> None:
        """Put our forward in the place of the model's."""
        depth, model = len(self.forwards), self.model
        refuse_moved_head(model.forward)
        self.forwards.append(model.forward)

        @functools.wraps(type(model).forward)  # `generate` validates its arguments against this signature
        @torch.compiler.disable(recursive=False)
        def forward(self: PreTrainedModel, *args: object, **kwargs: object) -> object:
            return vars(self)[ATTRIBUTE]._answer(depth, args, kwargs)

        forward.depth = depth  # type: ignore[attr-defined]
        model.forward = types.MethodType(forward, model)

    @property
    def _is_called(self) -> bool:
        """Whether the model's forward is ours, or has it inside."""
        return mark_of(self.model, "depth") == len(self.forwards) - 1

    def _answer(self, depth: int, args: tuple, kwargs: Inputs) -> object:
        """Our forward, the one that has replaced `forwards[depth]`."""
        batch = kwargs.pop("flat_batch", None)
        if depth < len(self.forwards) - 1:  # called by a head that TRL has added since: the tokens are flat already
            return self.forwards[depth](*args, **kwargs)
        if batch is not None:
            if args:
                raise TypeError("Give the rows of a `flat_batch` to the model by name: `input_ids=...`.")
            rows = kwargs.get("input_ids")
            if rows is not None and rows.device != batch.input_ids.device:  # FSDP moves rows, and no batch
                batch = batch.to(rows.device, non_blocking=True)
            self.edits.ask(batch, kwargs)
        elif kwargs.get("fused_lm_head") and self.flatten is not None:
            batch = self.flatten(kwargs["input_ids"], kwargs["attention_mask"], kwargs["labels"])
        elif self.padded is not None:
            return self.padded.of_model(self.forwards[-1], args, kwargs)
        else:
            return self.forwards[-1](*args, **kwargs)
        return flat_forward(self, batch, **kwargs)

    def hidden_states(self, batch: FlatBatch, scored: torch.Tensor, **images: torch.Tensor) -> torch.Tensor:
        """
        The last hidden states of a flat batch, for a loss with a head of its own, such as a divergence over the
        vocabulary.

        Args:
            batch (`FlatBatch`):
                The rows, on the device of the model.
            scored (`torch.Tensor` of shape `(R, L-1)`, bool):
                Of each row as wide as TRL pads it, which of its tokens from the second on are scored. On the CPU, too:
                nothing then waits for the device.
            **images:
                Arguments of the model with the images of the rows, if the batch has some.

        Returns:
            `(1, N, H)`: for each scored token, row by row, the hidden state by which the model predicts it. A token
            that several rows share is computed once, and is there once for each of them.

        Raises:
            `ValueError`: `scored` has another shape.
        """
        if (shape := (len(batch.row_mask), batch.row_mask.size(1) - 1)) != scored.shape:
            raise ValueError(
                f"`scored` has shape {tuple(scored.shape)}, and the rows of this batch have the shape {shape} from "
                "their second tokens on: give `labels[:, 1:] != -100`, or another mask of that shape."
            )
        places = scored.nonzero().T
        if places.device.type == "cpu":  # nothing waits for the device if the host says what is scored
            places = on_device(places, batch.row_index.device)
        index = batch.row_index[tuple(places)]
        arguments: Inputs = images if batch.images is None else batch.images.arguments(images)
        with flat_backbone(self, self.begin_pass(batch), lambda hidden: hidden[:, index.to(hidden.device)]):
            return self.model.base_model(**arguments, **flat_inputs(self, batch)).last_hidden_state

    def begin_pass(self, batch: FlatBatch) -> FlatBatch:
        """The `batch` of a pass that begins, as this model can compute it. Sets the layers that recompute."""
        if torch.is_grad_enabled():
            self.has_trained = True
            self.set_recompute(batch.schedule)
        if batch.schedule.cuts and why_not_in_slices(self.model, self.route, self.group):  # another one's schedule
            return replace(batch, schedule=Schedule())
        return batch

    def set_recompute(self, schedule: Schedule) -> None:
        """Have the first layers recompute, as many as a schedule says, whatever TRL has set."""
        if schedule.recompute is not None:
            recompute_first(self.recomputable, schedule.recompute)

    @contextmanager
    def flattening(self, flatten: Flattener) -> Iterator[None]:
        """Within this context, `flatten` makes flat batches of calls of TRL's head that bring none."""
        before, self.flatten = self.flatten, flatten
        try:
            yield
        finally:
            self.flatten = before

    @contextmanager
    def must_train(self, trainer: object) -> Iterator[None]:
        """Within this context, a training step of `trainer` computes a flat batch here, or raises."""
        self.has_trained = False
        yield
        if not self.has_trained:
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


@contextmanager
def keys_noted(model: PreTrainedModel) -> Iterator[list[tuple[torch.nn.Module, int, int]]]:
    """Within this context, the list gets the layer, window, and bytes of keys and values of each call of attention."""
    noted: list[tuple[torch.nn.Module, int, int]] = []
    flat = FlatModel.of(model)
    assert flat is not None

    def note(attend: Attention, context: PassContext, layer, module, query, key, value, **kwargs: Any):
        noted.append((layer, kwargs.get("sliding_window") or NO_WINDOW, key.nbytes + value.nbytes))
        return attend(module, query, key, value, **kwargs)

    with attributes_set([(flat, "watch", note)]):
        yield noted
