"""A flat batch in slices, one after another: the decoder computes each, and keeps only its keys and values.

All but the last ones are recomputed in the backward pass, like checkpointed layers. Each slice passes on the keys and
values that later ones read (for layers that carry state, their states). These have gradients, which autograd propagates
in the right order. Heads, losses and images see a single pass, and know nothing of slices.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, NoReturn

import numpy as np
import torch
from accelerate.utils import recursively_apply
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutput

from ..core.flat.batch import FlatBatch, Inputs
from ..core.flat.layout import Attended, FlatLayout
from ..core.flat.segments import Ints, something_to_compute
from ..core.model.architecture import by_name, decoder_of, rotary_reach
from ..core.model.flat_model import FlatModel
from ..core.model.forward import NOISE
from ..core.model.restored import Change, attributes_set
from ..core.model.told import Around, FlatMask, Scan, Weights
from ..recomputable import checkpointing_layers
from ..spans import NO_WINDOW, What, handed_on
from .axis import Slice, slices_of

Tensors = tuple[torch.Tensor, ...]
# Image features that layers of a decoder (Qwen3-VL) add to hidden states, one tensor `(image tokens, H)` per layer
_DEEPSTACK = "deepstack_visual_embeds"


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
        *values: torch.Tensor, **kwargs: Any,
    ) -> Attended:  # fmt: skip
        """Outside of all else that goes around attention: it gets the layout of this slice, for the layer's window."""
        window = kwargs.get("sliding_window")
        if window is None or window >= layout.segments.max_seqlen_k:
            window = NO_WINDOW
        key = id(layout), window
        if key not in self.slices:
            self.slices[key] = slices_of(layout, self.cuts, self.with_reach, window)
        self.current = self.slices[key][self.number]
        return attend(self.current.layout, layer, module, *values, **kwargs)

    def attend(
        self, attend: Around, layout: FlatLayout, layer: torch.nn.Module, module: torch.nn.Module,
        *values: torch.Tensor, **kwargs: Any,
    ) -> Attended:  # fmt: skip
        """
        Inside of all else: attention over the keys of earlier slices, then its own. Every slice makes its calls in the
        same order.
        """
        own_slice, places = self.current, self.places.setdefault(layer, [])
        assert own_slice is not None
        if not self.is_complete:
            places.append(len(self.kept))
            self.kept += [x if own_slice.keeps is None else x.index_select(2, own_slice.keeps) for x in values[1:]]
        elif len(places) > 1:
            self._refuse_recomputing(f"{type(layer).__name__} is called several times in a pass and")
        earlier, place = [self.earlier[number] for number in own_slice.reads], places[-1]
        whole = [torch.cat([*(x[place + i] for x in earlier), own], 2) for i, own in enumerate(values[1:])]
        return attend(layout, layer, module, values[0], *whole, **kwargs)

    def carried_by(self, mask: FlatMask) -> FlatMask:
        """The mask of this slice, from that of the whole."""
        around = self.within, *mask.context.around, self.attend
        return FlatMask.carrying(replace(mask.context, around=around, others=self), per_token=mask.ndim == 2)

    def span(self, num_tokens: int) -> range:
        return something_to_compute(self.cuts[self.number], self.cuts[self.number + 1], num_tokens)

    def with_context(self, layout: FlatLayout, values: torch.Tensor, size: int) -> torch.Tensor:
        """Append the tokens before the slice that a convolution reads, which earlier slices have kept for it."""
        earlier, (*_, kept) = self._read(layout, size), handed_on(layout, self.cuts, size)[self.number]
        self.kept.append(values.index_select(0, layout.tensor(kept - self.cuts[self.number])))
        return torch.cat([values, *earlier])

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
            f"{who} recomputes within a slice, and it is then not known which values of earlier slices it needs: "
            "leave out the checkpointing of your engine, `max_tokens_per_micro_batch` and `memory_budget`."
        )


def in_slices(flat_model: FlatModel, batch: FlatBatch) -> Change:
    """The change by which the decoder of a model computes a flat batch in the slices of its schedule."""
    decoder = decoder_of(flat_model.model)
    forward = decoder.forward

    @wraps(forward)  # with its signature
    def in_slices(*args: Any, **kwargs: Any) -> BaseModelOutput:
        return SlicedPass(flat_model, batch, decoder, forward, by_name(forward, args, kwargs)).run()

    return decoder, "forward", in_slices


class SlicedPass:
    """
    A pass of a `decoder` over a flat batch, slice by slice, by its own `forward`. Its `arguments` are those of the
    whole batch or, beside other processes, of this one's tokens.
    """

    def __init__(
        self, flat_model: FlatModel, batch: FlatBatch, decoder: torch.nn.Module, forward: Callable, arguments: Inputs
    ):
        model, peers = flat_model.model, flat_model.peers
        self.model, self.forward, self.schedule = model, forward, batch.schedule
        self.masks, self.arguments = arguments.pop("attention_mask"), arguments
        # Processes that share a batch refuse rows so long that RoPE frequencies depend on them
        width = batch.row_index.size(1)
        self.reach = None if peers.name else rotary_reach(width, model.config.get_text_config())
        self.slices = slices_of(batch.layout, batch.schedule.cuts, self.reach is not None)
        # Layers find these, or add those for their layout and window
        self.of_windows = {(id(batch.layout), NO_WINDOW): self.slices}
        self.total, self.spans = batch.input_ids.size(1), peers.spans(batch)  # tokens of this process
        self.checkpointing = [(layer, "gradient_checkpointing", False) for layer in checkpointing_layers(decoder)]
        self.noise = vars(model.get_input_embeddings()).get(NOISE)
        # `checkpoint` saves the random states of its arguments' devices, and the first slice gets no other tensors
        self.on_devices = tuple(torch.empty(0, device=x) for x in {p.device for p in decoder.parameters()})
        self.rotary: list[Change] = []  # frequencies of this pass, once it is over: other passes may change them
        self.visual: list[int] | None = None
        if arguments.get(_DEEPSTACK) is not None:  # where the cuts lie among the image tokens, whose features it adds
            seen = torch.nn.functional.pad(arguments["visual_pos_masks"].flatten().cumsum(0), (1, 0))
            self.visual = seen[torch.tensor(batch.schedule.cuts)].tolist()  # waits for the device, once per pass

    def run(self) -> BaseModelOutput:
        """Compute all slices, of which the last ones keep their activations, and join their outputs."""
        kept: list[Tensors] = []
        outputs, trains = [], torch.is_grad_enabled()
        for number, current in enumerate(self.slices):
            earlier = [saved if i in current.reads else () for i, saved in enumerate(kept)]
            if number + self.schedule.kept_slices >= len(self.slices) or not trains:
                output, saved = self.compute(number, self.on_devices, *earlier)
            else:
                output, saved = checkpoint(self.compute, number, self.on_devices, *earlier, use_reentrant=False)
            outputs.append(output)
            kept.append(saved)
            if not trains:  # with gradients, autograd keeps all
                later = self.slices[number + 1 :]
                kept = [x if any(i in each.reads for each in later) else () for i, x in enumerate(kept)]
        for module in self.model.modules() if trains else ():  # only these passes are computed again
            values = vars(module) | dict(module.named_buffers(recurse=False))
            ends = ("inv_freq", "seq_len_cached")
            self.rotary += [(module, name, x) for name, x in values.items() if name.endswith(ends)]
        return _joined([size for _, size in self.spans], outputs)

    def compute(self, number: int, on_devices: Tensors, *earlier: Tensors) -> tuple[BaseModelOutput, Tensors]:
        """Slice `number`: its outputs, and what later slices read of it. Runs again in the backward pass."""
        carry = Carry(self.schedule.cuts, number, earlier, self.reach is not None, self.of_windows)
        span, _ = self.spans[number]
        own = {
            name: recursively_apply(_of_slice, value, name, span, self.total, self.reach)
            for name, value in self.arguments.items()
        }
        if self.visual is not None:
            first, last = self.visual[number : number + 2]
            own[_DEEPSTACK] = [x[first:last] for x in self.arguments[_DEEPSTACK]]
        # Masks keep the layout of the whole, of which layers take what they need
        mask = recursively_apply(carry.carried_by, self.masks, test_type=lambda mask: isinstance(mask, FlatMask))
        # Set here, because TRL may change it before the backward pass runs this again. A slice is checkpointed as a
        # whole, so its layers are not; and NEFTune's noise shrinks with the length of the axis
        settings = [*self.rotary, *self.checkpointing]
        if self.noise is not None:
            share = (len(span) + carry.with_reach) / self.total
            settings.append((self.model.get_input_embeddings(), NOISE, self.noise * math.sqrt(share)))
        with attributes_set(settings):
            try:
                return self.forward(**own, attention_mask=mask), tuple(carry.kept)
            finally:
                carry.is_complete = True


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
