"""A model that computes flat batches: one object holds the route, and all else that is kept of such a model."""

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakMethod

import torch
from transformers import PreTrainedModel

from .. import upstream
from ..flat.batch import FlatBatch
from .architecture import recompute_first
from .attention import register_attention
from .backends import ATTENTION_BACKENDS
from .edits import EditsFound
from .forward import flat_forward, forward_in_parts
from .routes import Route
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
    in rows; other calls go to the forward and the attention that were there before.

    >>> from trl.trainer.utils import add_fused_lm_head
    >>> from trl_paddingfree.model.routes import choose_route
    >>> from trl_paddingfree.quickstart.model import make_model, make_tokenizer
    >>> model = make_model(make_tokenizer(["an apple a day"]), num_hidden_layers=2)
    >>> add_fused_lm_head(model)
    >>> flat = FlatModel.install(model, choose_route(model))
    >>> FlatModel.of(model) is flat, flat.route.backend
    (True, 'segment')
    """

    def __init__(self, model: PreTrainedModel, route: Route):
        self.model, self.route = model, route  # without the wrappers of PEFT, DDP, FSDP, DeepSpeed and `torch.compile`
        self.previous: list[Callable] = []  # forwards from before: one, or more if TRL has added another head since
        self.carries_state = carries_state(model)
        self.repeats = False  # whether any layer that carries state computes shared prefixes again
        self.edits = EditsFound()
        # A method of a trainer, for calls of TRL's head without a flat batch: rows, if there is none
        self.flattener: WeakMethod[Flattener] | None = None
        self.recomputable: Sequence[Any] = ()  # the layers that a batch tells to recompute
        self.group: SequenceGroup | None = None  # the processes that each compute a slice of a batch

    def __getstate__(self) -> dict[str, Any]:  # copies of the model have nothing to do with the trainer
        return {**vars(self), "flattener": None, "group": None}

    @classmethod
    def of(cls, model: Any) -> "FlatModel | None":
        """That of a model, under whatever wrappers; `None` if it has none, or another forward by now."""
        flat = next((vars(module)[ATTRIBUTE] for module in model.modules() if ATTRIBUTE in vars(module)), None)
        return flat if flat is not None and flat._is_called else None

    @classmethod
    def group_of(cls, model: Any) -> SequenceGroup | None:
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
        flat.repeats = repeats_prefixes(model)
        setattr(model, ATTRIBUTE, flat)
        if not flat._is_called:
            flat._bind()
        return flat

    # --- the forward ------------------------------------------------------------------------------------------------

    def _bind(self) -> None:
        """Put our forward in the place of the model's."""
        depth, model = len(self.previous), self.model
        self.previous.append(model.forward)

        @functools.wraps(type(model).forward)  # `generate` validates its arguments against this signature
        @torch.compiler.disable(recursive=False)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return vars(self)[ATTRIBUTE]._called(depth, args, kwargs)

        forward.depth = depth  # type: ignore[attr-defined]
        model.forward = types.MethodType(forward, model)

    @property
    def _is_called(self) -> bool:
        """Whether the model's forward is ours, or has it inside."""
        # Whoever wraps it may copy its attributes too: only a wrapper that does not is looked into
        innermost = inspect.unwrap(self.model.forward, stop=lambda function: hasattr(function, "depth"))
        return getattr(innermost, "depth", None) == len(self.previous) - 1

    def _called(self, depth: int, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Our forward, as it was put on with `depth` others beneath."""
        batch = kwargs.pop("flat_batch", None)
        if depth < len(self.previous) - 1:  # beneath a head that TRL has added since, which has computed the batch
            return self.previous[depth](*args, **kwargs)
        if batch is not None:
            if args:
                raise TypeError("Give the rows of a `flat_batch` to the model by name: `input_ids=...`.")
            rows = kwargs.get("input_ids")
            if rows is not None and rows.device != batch.input_ids.device:  # FSDP moves rows, and no batch
                batch = batch.to(rows.device, non_blocking=True)
            self.edits.ask(batch, kwargs)
        elif kwargs.get("fused_lm_head") and self.flattener and (flatten := self.flattener()):
            batch = flatten(kwargs["input_ids"], kwargs["attention_mask"], kwargs["labels"])
        else:
            return self.previous[-1](*args, **kwargs)
        if batch.parts and torch.is_grad_enabled():
            return forward_in_parts(self, batch, **kwargs)
        self.prepare(batch)
        return flat_forward(self, batch, **kwargs)

    def prepare(self, batch: FlatBatch) -> None:
        """Have as many layers recompute as the batch says: TRL sets all of them after each pass of its reference."""
        if batch.recomputed is not None and torch.is_grad_enabled():
            recompute_first(self.recomputable, batch.recomputed)

    @contextmanager
    def attention_as_before(self) -> Iterator[None]:
        """Within this context, the model has the attention implementation that it was loaded with."""
        ours = upstream.attn_implementation(self.model)
        upstream.set_attn_implementation(self.model, str(ours))  # of ours, what it stands in for
        try:
            yield
        finally:
            upstream.set_attn_implementation(self.model, ours)
