"""One flat batch on several processes: each computes a slice of its tokens, and attention exchanges heads for tokens.

All that is done per token is done for the slice. Attention is the unchanged backend with the unchanged layout, over all
tokens for some of the heads, as in DeepSpeed-Ulysses (arXiv 2309.14509); so are scans, whose states have heads, too.
Convolutions are given the few tokens of other slices that they reach. Only values of scored tokens are gathered, of
which each process computes the same loss. The gather's backward pass takes the gradient of the slice times the size of
the group: engines average gradients over all processes, and that is the sum over a group, and the mean over groups.

Shape legend: see [`~trl_paddingfree.flat.segments`]; in addition
    W = processes of a group, t = tokens of a slice, H = heads of queries or states, K = heads of keys, D = head size
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from ..flat.batch import IGNORE_INDEX, FlatBatch, Inputs
from ..flat.layout import Attention, FlatLayout, Gather
from ..flat.pieces import Context
from ..flat.segments import something_to_compute
from .architecture import rotary_limits
from .exchange import Exchanged, Gathered, Halo, even_cuts, head_shares, of_heads, slice_sizes, span_of
from .masks import Scan
from .restored import random_state_restored

# What attention is given of each token beside its states, and does not need: the layout has it
_OF_TOKENS = ("position_ids",)


def scored_sizes(batch: FlatBatch, size: int) -> tuple[int, ...]:
    """How many scored tokens of a batch lie in each of `size` slices."""
    owners = owners_of(batch.layout.segments.num_tokens, size)
    return tuple(np.bincount(owners[batch.scored], minlength=size).tolist())


def spans_of(total: int, number: int, size: int, cuts: tuple[int, ...] = ()) -> list[range]:
    """
    The flat tokens that process `number` of `size` computes: its slice of all, or of each of the slices that are
    computed one after another, if all are cut at these positions.
    """
    spans = []
    for start, stop in pairwise(cuts or (0, total)):
        together = something_to_compute(start, stop, total)
        own = span_of(len(together), number, size)
        spans.append(range(together.start + own.start, together.start + own.stop))
    return spans


def owners_of(total: int, size: int, cuts: tuple[int, ...] = ()) -> np.ndarray:
    """`(T,)` int64: the process of `size` that computes each flat token."""
    sizes = [slice_sizes(stop - start, size) for start, stop in pairwise(cuts or (0, total))]
    return np.concatenate([np.repeat(np.arange(size), of_slice) for of_slice in sizes])


def slice_of(batch: FlatBatch, number: int, size: int, cuts: tuple[int, ...] = ()) -> FlatBatch:
    """
    Slice `number` of `size` of a batch, or of each of its slices in time if there are `cuts`. `input_ids`,
    `position_ids`, `token_rows`, `shift_labels` and `scored_index` are those of its tokens; all else, the rows and the
    layout among them, stays that of the whole.

    The host knows where slices begin and what they score, so that nothing is read from the device. A slice without
    tokens has the first two, and one without scored tokens a label of -100: models need something to compute.

    >>> batch = FlatBatch.from_rows([[1, 2, 3, 4], [1, 2, 5]], [[-100, -100, 3, 4], [-100, -100, 5]])
    >>> [slice_of(batch, number, 2).input_ids.tolist() for number in range(2)]
    [[[1, 2, 3]], [[4, 2, 5]]]
    >>> [slice_of(batch, number, 2).shift_labels.tolist() for number in range(2)]
    [[[3, 4]], [[5]]]
    """
    total, layout = batch.layout.segments.num_tokens, batch.layout
    index = np.concatenate(spans_of(total, number, size, cuts))
    owners = owners_of(total, size, cuts)
    local = np.zeros(total, dtype=np.int64)
    local[index[::-1]] = np.arange(len(index))[::-1]  # of a token that is there twice, the first
    scored = np.flatnonzero(owners[batch.scored] == number)
    labels, scored_index = batch.shift_labels.new_full((1, 1), IGNORE_INDEX), batch.scored_index.new_zeros(1)
    if len(scored):
        labels = batch.shift_labels.index_select(1, layout.tensor(scored))
        scored_index = layout.tensor(local[batch.scored[scored]])
    tokens = layout.tensor(index)
    return replace(
        batch,
        input_ids=batch.input_ids.index_select(1, tokens),
        position_ids=batch.position_ids.index_select(1, tokens),
        token_rows=batch.token_rows.index_select(1, tokens),
        shift_labels=labels,
        scored_index=scored_index,
    )


class SequenceGroup:
    """The processes that compute one flat batch together, as one of them, `rank` of `size`, sees it."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.group, self.device = group, device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def slice(self, batch: FlatBatch, config: PreTrainedConfig, cuts: tuple[int, ...] = ()) -> FlatBatch:
        """
        What this process computes of a batch, see [`slice_of`]. Refuses rows whose rotary frequencies would follow its
        slice, and batches that are not the same on all processes.
        """
        width = batch.row_index.size(1)
        for kind, limit in rotary_limits(config).items():
            if width > limit:
                raise ValueError(self.too_long(kind, limit))
        batch.layout.derived("the same on all processes", lambda: self._refuse_different(batch))  # asked once
        return slice_of(batch, self.rank, self.size, cuts)

    def _refuse_different(self, batch: FlatBatch) -> None:
        """Refuse batches that are not the same on all processes of the group, before their slices are exchanged."""
        tokens, labels = batch.input_ids[0], batch.shift_labels[0]
        places = torch.arange(1, len(tokens) + 1, device=tokens.device)
        sizes = tokens.new_tensor([len(tokens), len(labels), *batch.row_mask.shape])
        sums = [(tokens * places).sum(), batch.position_ids.sum(), (labels * (batch.scored_index + 1)).sum()]
        found = torch.cat([sizes, torch.stack(sums)])
        if self.largest(torch.cat([found, -found])).reshape(2, -1).sum(0).any():
            raise ValueError(
                f"`sequence_parallel_size={self.size}`: processes of one group have been given different batches. A "
                "transform of the data set that draws at random, or a data loader of your own, may do that: give all "
                "of them the same."
            )

    def too_long(self, kind: str, limit: int) -> str:
        """Why rows beyond the `limit` of a `kind` of rotary frequencies cannot be computed in slices."""
        return (
            f"`sequence_parallel_size={self.size}`: with `rope_type={kind!r}`, a row of more than {limit} tokens "
            f"changes the frequencies of its whole batch, and slices do not know of it. Set `max_length={limit}`, or "
            "`sequence_parallel_size=1`."
        )

    # --- what slices exchange: see `AroundAttention` and `OtherSlices` ------------------------------------------------

    def span(self, num_tokens: int) -> range:
        return span_of(num_tokens, self.rank, self.size)

    def attend(
        self, attend: Attention, layout: FlatLayout, module: torch.nn.Module, query, key, value, **kwargs: object
    ) -> tuple[torch.Tensor, None]:
        """
        Attention `(1, t, H, D)` of states `(1, heads, t, D)` of a slice, by a function of `module`, states `(1, heads,
        T, D)` and `kwargs`, which is given all `T` tokens of the layout for the heads of this process.
        """
        num_heads, states = query.size(1), [x.squeeze(0).transpose(0, 1) for x in (query, key, value)]
        given, (heads, keys, _) = self._to_heads(states, layout.segments.num_tokens)
        own_module, kwargs = self._of_heads(module, heads, len(keys), num_heads, kwargs)
        output, _ = attend(own_module, *(x.transpose(0, 1)[None] for x in given), **kwargs)
        return self._to_tokens(output.squeeze(0), num_heads)[None], None

    def context(self, layout: FlatLayout, states: torch.Tensor, size: int) -> tuple[torch.Tensor, Context]:
        """Processes send each other what is missing: up to `size` tokens for each slice and segment that begins."""
        halo = Halo.of(layout, size, self.rank, self.size)
        if halo.is_needed:
            sent, got = ([n * states.size(1) for n in numbers] for numbers in (halo.sent, halo.received))
            before = Exchanged.apply(Gather.apply(states, halo.rows).flatten(), sent, got, self.group)
            states = torch.cat([states, before.view(-1, states.size(1))])
        return states, Context.of(layout, size, self.span(layout.segments.num_tokens))

    def scan(
        self, layout: FlatLayout, scan: Scan, inputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor | None]
    ) -> torch.Tensor:
        """A scan of the own heads goes along the whole tree."""
        num_heads = inputs[0].size(2)
        given, (heads, *_) = self._to_heads([x.squeeze(0) for x in inputs], layout.segments.num_tokens)
        own = [None if x is None else x[heads[0] : heads[-1] + 1] for x in weights]
        outputs, _ = scan([x[None] for x in given], own)
        return self._to_tokens(outputs.squeeze(0), num_heads)[None]

    def _to_heads(
        self, states: Sequence[torch.Tensor], num_tokens: int
    ) -> tuple[list[torch.Tensor], list[Sequence[int]]]:
        """
        States `(T, n, ...)` of all tokens, of those `(t, heads, ...)` of slices: for the heads of the first that this
        process computes, and for those of others which these read. And these heads of each of the states.
        """
        if (num_heads := states[0].size(1)) < self.size:
            raise ValueError(f"`sequence_parallel_size={self.size}` is more than the {num_heads} heads of a layer.")
        sizes = slice_sizes(num_tokens, self.size)
        heads = [[keys for _, keys in head_shares(num_heads, x.size(1), self.size)] for x in states]
        found: dict[int, torch.Tensor] = {}
        for dtype in dict.fromkeys(x.dtype for x in states):  # one message of each
            alike = [i for i, x in enumerate(states) if x.dtype == dtype]
            # For each process, rows of its heads, of which it gets one for each token
            parts = [
                [of_heads(states[i][: sizes[self.rank]], heads[i][process]).flatten(1) for i in alike]
                for process in range(self.size)
            ]
            widths, rows = [x.size(1) for x in parts[self.rank]], [torch.cat(part, 1).flatten() for part in parts]
            got = [n * sum(widths) for n in sizes]
            received = Exchanged.apply(torch.cat(rows), list(map(len, rows)), got, self.group).view(num_tokens, -1)
            for i, x in zip(alike, received.split(widths, 1), strict=True):
                found[i] = x.unflatten(1, (len(heads[i][self.rank]), *states[i].shape[2:]))
        return [found[i] for i in range(len(states))], [of[self.rank] for of in heads]

    def _to_tokens(self, output: torch.Tensor, num_heads: int) -> torch.Tensor:
        """Outputs `(t, heads, ...)` of all heads for the tokens of this slice, of those `(T, n, ...)` of processes."""
        sizes, numbers = slice_sizes(len(output), self.size), np.diff(even_cuts(num_heads, self.size)).tolist()
        own, width = sizes[self.rank], output[0, 0].numel()
        sent, got = [n * numbers[self.rank] * width for n in sizes], [own * number * width for number in numbers]
        received = Exchanged.apply(output.flatten(), sent, got, self.group)
        parts = [x.view(own, number, *output.shape[2:]) for x, number in zip(received.split(got), numbers, strict=True)]
        joined, length = torch.cat(parts, 1), len(self.span(len(output)))
        if own < length:  # it has tokens that stand in for some
            joined = torch.cat([joined, joined.new_zeros(length - own, *joined.shape[1:])])
        return joined

    def _of_heads(
        self, module: torch.nn.Module, heads: Sequence[int], num_keys: int, num_heads: int, given: Inputs
    ) -> tuple[torch.nn.Module, Inputs]:
        """A layer, and what it is `given` beside states, as if it had only some of its heads."""

        def cut(values: Inputs) -> dict[str, torch.Tensor]:
            tensors = {name: x for name, x in values.items() if isinstance(x, torch.Tensor)}
            return {name: x[heads[0] : heads[-1] + 1] for name, x in tensors.items() if x.shape == (num_heads,)}

        own = cut(given)
        unknown = [name for name, x in given.items() if isinstance(x, torch.Tensor) and x.ndim and name not in own]
        if unknown := [name for name in unknown if name not in _OF_TOKENS]:
            raise ValueError(
                f"`sequence_parallel_size={self.size}`: {type(module).__name__} gives its attention function "
                f"`{unknown[0]}`, of which it is not known what belongs to which head. Set it to 1."
            )
        part = copy.copy(module)  # which shares all weights; its own attributes are found before them
        groups = {"num_key_value_groups": len(heads) // num_keys}
        vars(part).update(cut(dict(module.named_parameters(recurse=False))), **groups)
        return part, {name: own.get(name, x) for name, x in given.items() if name not in _OF_TOKENS}

    # --- values of all slices ---------------------------------------------------------------------------------------

    def gather_scored(
        self, values: dict[str, torch.Tensor], batch: FlatBatch, cuts: tuple[int, ...] = ()
    ) -> dict[str, torch.Tensor]:
        """Values `(1, P)` of the scored tokens of a batch, of those `(1, p)` of each slice, in one message."""
        dtype = reduce(torch.promote_types, [x.dtype for x in values.values()])
        stacked = torch.stack([x[0].to(dtype) for x in values.values()], 1)
        owners = owners_of(batch.layout.segments.num_tokens, self.size, cuts)[batch.scored]
        found = self._gathered(stacked, owners, batch.layout).unbind(1)
        gathered = {name: x[None].to(values[name].dtype) for name, x in zip(values, found, strict=True)}
        return {name: x if values[name].requires_grad else x.detach() for name, x in gathered.items()}

    def gather_tokens(self, states: torch.Tensor, layout: FlatLayout, cuts: tuple[int, ...] = ()) -> torch.Tensor:
        """`(T, ...)`: states of all tokens, of those `(t, ...)` of each slice."""
        total = layout.segments.num_tokens
        owners, index = owners_of(total, self.size, cuts), np.concatenate(spans_of(total, self.rank, self.size, cuts))
        own = np.flatnonzero(owners[index] == self.rank)  # without tokens that stand in for none
        if len(own) < len(index):
            states = states.index_select(0, layout.tensor(own))
        return self._gathered(states, owners, layout)

    def _gathered(self, values: torch.Tensor, owners: np.ndarray, layout: FlatLayout) -> torch.Tensor:
        """Values of all processes in the order of the flat axis, of which each has those that it is the owner of."""
        found = Gathered.apply(values, np.bincount(owners, minlength=self.size).tolist(), self.group)
        if (owners[1:] >= owners[:-1]).all():
            return found
        return found.index_select(0, layout.tensor(np.argsort(np.argsort(owners, kind="stable"))))

    def whole_gradients(
        self, of: Sequence[torch.Tensor], found: Sequence[torch.Tensor | None], batch: FlatBatch
    ) -> list[torch.Tensor]:
        """Gradients at embeddings `(1, t, D)` as `(1, T, D)`, and of weights as engines average them: those of all."""
        first, *others = [x.new_zeros(x.shape) if y is None else y for x, y in zip(of, found, strict=True)]
        others = self.summed(others)
        embedded = self.gather_tokens(first.squeeze(0), batch.layout)[None]
        return [gradient / self.size for gradient in (embedded, *others)]

    def summed(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The sum of each of these over the group."""
        sums = [gradient.contiguous() for gradient in gradients]
        for gradient in sums:
            dist.all_reduce(gradient, group=self.group)
        return sums

    def largest(self, values: Sequence[float] | np.ndarray | torch.Tensor) -> np.ndarray:
        """The largest of each of `values` over the group, on the host, float64, or int64 where they are."""
        given = torch.as_tensor(values, device=self.device).clone()
        dist.all_reduce(given, dist.ReduceOp.MAX, self.group)
        return given.cpu().numpy()

    @contextmanager
    def drawing_apart(self, model: torch.nn.Module) -> Iterator[None]:
        """Within this context, processes draw numbers of their own: one seed for all would drop alike in each slice."""
        seed = int(torch.randint(2**62, ()))  # of the CPU, whose state is one for the whole group
        with random_state_restored(model):
            torch.manual_seed(seed + self.rank)
            yield
