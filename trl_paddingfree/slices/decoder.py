"""A flat batch in slices, one after another: the decoder computes each, and keeps only its keys and values.

All but the last ones are recomputed in the backward pass, like checkpointed layers. Each slice passes on the keys and
values that later ones read (for layers that carry state, their states). These have gradients, which autograd propagates
in the right order. Heads, losses and images see a single pass, and know nothing of slices.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, update_wrapper
from itertools import accumulate
from typing import Any, NoReturn

import numpy as np
import torch
from accelerate.utils import recursively_apply
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from ..core.flat.batch import FlatBatch
from ..core.flat.layout import Attended, FlatLayout
from ..core.flat.segments import Ints, something_to_compute
from ..core.model.architecture import by_name, checkpointing_layers, decoder_of, rotary_reach
from ..core.model.restored import Change, attributes_set
from ..core.model.told import Around, FlatMask, Scan, Weights
from ..groups.sequence import SequenceGroup, spans_of
from ..spans import NO_WINDOW, What, handed_on
from .axis import Slice, slices_of

Tensors = tuple[torch.Tensor, ...]
# Image features that layers of a decoder (Qwen3-VL) add to hidden states, one tensor `(image tokens, H)` per layer
_DEEPSTACK = "deepstack_visual_embeds"
NOISE = "neftune_noise_alpha"


@dataclass(eq=False)
class Carry:
    """
    What slice `number` reads from earlier ones, and what it keeps for later ones, in each call of attention, a
    convolution or a scan. Implements [`~trl_paddingfree.core.model.told.OtherSlices`].
    """

    cuts: Ints
    number: int
    earlier: Sequence[Tensors]  # what each earlier slice kept; for attention, keys and values `(1, heads, K, D)`
    with_reach: bool  # see [`slices_of`]
    slices: dict[tuple[int, int], tuple[Slice, ...]]  # of the pass, by layout and window
    kept: list[torch.Tensor] = field(default_factory=list)
    places: dict[torch.nn.Module, list[int]] = field(default_factory=dict)  # where `kept` has a layer's keys, by call
    is_complete: bool = False  # whether the decoder is done: layers that recompute call attention again
    current: Slice | None = None  # this slice, with the layout and the window of the current call of attention

    def within(
        self, attend: Around, layout: FlatLayout, layer: torch.nn.Module, module: torch.nn.Module,
        *states: torch.Tensor, **kwargs: Any,
    ) -> Attended:  # fmt: skip
        """Outside of all else that goes around attention: it gets the layout of this slice, for the layer's window."""
        window = kwargs.get("sliding_window")
        if window is None or window >= layout.segments.max_seqlen_k:
            window = NO_WINDOW
        key = id(layout), window
        if key not in self.slices:
            self.slices[key] = slices_of(layout, self.cuts, self.with_reach, window)
        self.current = self.slices[key][self.number]
        return attend(self.current.layout, layer, module, *states, **kwargs)

    def attend(
        self, attend: Around, layout: FlatLayout, layer: torch.nn.Module, module: torch.nn.Module,
        *states: torch.Tensor, **kwargs: Any,
    ) -> Attended:  # fmt: skip
        """
        Inside of all else: attention over the keys of earlier slices, then its own. Every slice makes its calls in the
        same order.
        """
        own_slice, places = self.current, self.places.setdefault(layer, [])
        assert own_slice is not None
        if not self.is_complete:
            places.append(len(self.kept))
            self.kept += [x if own_slice.keeps is None else x.index_select(2, own_slice.keeps) for x in states[1:]]
        elif len(places) > 1:
            self._refuse_recomputing(f"{type(layer).__name__} is called several times in a pass and")
        earlier, place = [self.earlier[number] for number in own_slice.reads], places[-1]
        whole = [torch.cat([*(x[place + i] for x in earlier), own], 2) for i, own in enumerate(states[1:])]
        return attend(layout, layer, module, states[0], *whole, **kwargs)

    def carried_by(self, mask: FlatMask) -> FlatMask:
        """The mask of this slice, from that of the whole."""
        around = self.within, *mask.context.around, self.attend
        return FlatMask.carrying(replace(mask.context, around=around, others=self), per_token=mask.ndim == 2)

    def span(self, num_tokens: int) -> range:
        return something_to_compute(self.cuts[self.number], self.cuts[self.number + 1], num_tokens)

    def with_context(self, layout: FlatLayout, states: torch.Tensor, size: int) -> torch.Tensor:
        """Append the tokens before the slice that a convolution reads, which earlier slices have kept for it."""
        earlier, (*_, kept) = self._read(layout, size), handed_on(layout, self.cuts, size)[self.number]
        self.kept.append(states.index_select(0, layout.tensor(kept - self.cuts[self.number])))
        return torch.cat([states, *earlier])

    def scan(self, layout: FlatLayout, scan: Scan, inputs: Sequence[torch.Tensor], weights: Weights) -> torch.Tensor:
        """Scan the slice from the final states of earlier ones."""
        earlier, place = self._read(layout, "states"), len(self.kept)
        self.kept.append(inputs[0].new_zeros(0))  # reserves the place: layers within the scan append later
        outputs, kept = scan(inputs, weights, self.cuts, self.number, torch.cat(earlier) if earlier else None)
        if kept is not None:
            self.kept[place] = kept
        return outputs

    def _read(self, layout: FlatLayout, what: What) -> list[torch.Tensor]:
        """What earlier slices kept in this call for this one, see [`handed_on`]."""
        if self.is_complete:
            self._refuse_recomputing("A layer that carries state")
        handed, place, entries = handed_on(layout, self.cuts, what), len(self.kept), []
        for number, (*_, kept) in enumerate(handed[: self.number]):
            own = np.flatnonzero(np.isin(kept, handed[self.number][1]))
            if len(own):
                entries.append(self.earlier[number][place].index_select(0, layout.tensor(own)))
        return entries

    def _refuse_recomputing(self, who: str) -> NoReturn:
        raise ValueError(
            f"{who} recomputes within a slice, so that it is not known which values of earlier ones it wants: leave "
            "out the checkpointing of your engine, `max_tokens_per_micro_batch` and `memory_budget`."
        )


def in_slices(model: PreTrainedModel, batch: FlatBatch, group: SequenceGroup | None) -> Change:
    """
    The change by which the decoder of a model computes a flat batch in the slices of its schedule. With a `group`, its
    processes compute each slice together, and `batch` has only this process's tokens.
    """
    decoder = decoder_of(model)
    forward = partial(_decoder_in_slices, model, decoder, batch, group, decoder.forward)
    update_wrapper(forward, decoder.forward)  # with its signature
    return decoder, "forward", forward


def _decoder_in_slices(
    model: PreTrainedModel, decoder: torch.nn.Module, batch: FlatBatch, group: SequenceGroup | None,
    forward: Callable, *args: Any, **kwargs: Any,
) -> BaseModelOutput:  # fmt: skip
    """Run a decoder's own `forward` on each slice, and join the outputs. The arguments are those of the whole batch."""
    cuts, kept_slices = batch.schedule.cuts, batch.schedule.kept_slices
    # With a group, rows so long that RoPE frequencies depend on them were rejected
    reach = None if group else rotary_reach(batch.row_index.size(1), model.config.get_text_config())
    layers = checkpointing_layers(decoder)
    embeddings = model.get_input_embeddings()
    slices, noise = slices_of(batch.layout, cuts, reach is not None), vars(embeddings).get(NOISE)
    of_windows = {(id(batch.layout), NO_WINDOW): slices}  # layers find these, or add those for their layout and window
    if args:
        kwargs = by_name(forward, args, kwargs)
    masks, visual = kwargs.pop("attention_mask"), None
    if kwargs.get(_DEEPSTACK) is not None:  # where the cuts lie among the image tokens, whose features it adds
        seen = torch.nn.functional.pad(kwargs["visual_pos_masks"].flatten().cumsum(0), (1, 0))
        visual = seen[torch.tensor(cuts)].tolist()  # waits for the device, once per pass
    # For each slice, which tokens of this process's batch it computes, and how many of them count
    spans, sizes = [each.span for each in slices], np.diff(cuts).tolist()
    if group is not None:
        sizes = [len(span) for span in spans_of(cuts[-1], group.rank, group.size, cuts)]
        spans = [range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
    # `checkpoint` saves the random states of its arguments' devices, and the first slice gets no other tensors
    on_devices = tuple(torch.empty(0, device=device) for device in {p.device for p in decoder.parameters()})
    kept: list[Tensors] = []
    rotary: list = []  # frequencies of this pass, which others may change
    outputs = []

    def compute(number: int, on_devices: Tensors, *earlier: Tensors) -> tuple[BaseModelOutput, Tensors]:
        carry = Carry(cuts, number, earlier, reach is not None, of_windows)
        span, total = spans[number], batch.input_ids.size(1)  # tokens of this process
        own = {name: recursively_apply(_of_slice, value, name, span, total, reach) for name, value in kwargs.items()}
        if visual is not None:
            own[_DEEPSTACK] = [x[visual[number] : visual[number + 1]] for x in kwargs[_DEEPSTACK]]
        # Masks keep the layout of the whole, of which layers take what they need
        mask = recursively_apply(carry.carried_by, masks, test_type=lambda mask: isinstance(mask, FlatMask))
        # Set here, because TRL may change it before the backward pass runs this again. A slice is checkpointed as a
        # whole, so its layers are not; and NEFTune's noise shrinks with the length of the axis
        settings = [*rotary, *((layer, "gradient_checkpointing", False) for layer in layers)]
        if noise is not None:
            share = (len(span) + carry.with_reach) / total
            settings.append((embeddings, NOISE, noise * math.sqrt(share)))
        with attributes_set(settings):
            try:
                return forward(**own, attention_mask=mask), tuple(carry.kept)
            finally:
                carry.is_complete = True

    for number, current in enumerate(slices):
        earlier = [states if i in current.reads else () for i, states in enumerate(kept)]
        if number + kept_slices >= len(slices) or not torch.is_grad_enabled():
            output, states = compute(number, on_devices, *earlier)
        else:
            output, states = checkpoint(compute, number, on_devices, *earlier, use_reentrant=False)
        outputs.append(output)
        kept.append(states)
        if not torch.is_grad_enabled():  # with gradients, autograd keeps all
            kept = [x if any(i in later.reads for later in slices[number + 1 :]) else () for i, x in enumerate(kept)]
    for module in model.modules() if torch.is_grad_enabled() else ():  # only these passes are computed again
        values = vars(module) | dict(module.named_buffers(recurse=False))
        rotary += [(module, name, x) for name, x in values.items() if name.endswith(("inv_freq", "seq_len_cached"))]
    return _joined(sizes, outputs)


def _joined(sizes: Sequence[int], outputs: Sequence[BaseModelOutput]) -> BaseModelOutput:
    """Join a decoder's outputs for slices, taking the first `sizes[i]` tokens of slice `i`."""
    hidden = [output["last_hidden_state"][:, :n] for output, n in zip(outputs, sizes, strict=True)]
    joined = type(outputs[0])(last_hidden_state=torch.cat(hidden, 1))
    if outputs[0].get("router_logits") is not None:
        layers = zip(*(output["router_logits"] for output in outputs), strict=True)
        joined["router_logits"] = tuple(torch.cat([x[:n] for x, n in zip(y, sizes, strict=True)]) for y in layers)
    return joined


def _of_slice(value: torch.Tensor, name: str, span: range, total: int, reach: int | None) -> torch.Tensor:
    """An argument of the decoder, cut to a slice if it has an entry for each of `total` tokens."""
    is_position = name == "position_ids"  # on several axes, where images have 2-D positions
    dim = -1 if is_position else int(value.shape[:2] == (1, total))
    if not value.ndim or value.size(dim) != total:
        return value
    own = value.narrow(dim, span.start, len(span))
    if reach is None:
        return own
    extra = own.narrow(dim, 0, 1)  # for the extra token of `with_reach`; booleans mark image tokens, which it is not
    if is_position or own.dtype == torch.bool:
        extra = torch.full_like(extra, reach - 1 if is_position else False)
    return torch.cat([own, extra], dim)
