"""One flat batch on several processes: each computes a slice of its tokens, and attention exchanges heads for tokens.

All that is done per token is done for the slice. Attention is the unchanged backend with the unchanged layout, over all
tokens for some of the heads, as in DeepSpeed-Ulysses (arXiv 2309.14509). Only values of scored tokens are gathered, of
which each process computes the same loss. The gather's backward pass takes the gradient of the slice times the size of
the group: engines average gradients over all processes, and that is the sum over a group, and the mean over groups.

Shape legend: see [`~trl_paddingfree.flat.segments`]; in addition
    W = processes of a group, t = tokens of a slice, H = query heads, K = key/value heads, D = head size
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, reduce
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from ..flat.batch import IGNORE_INDEX, FlatBatch, Inputs
from ..flat.layout import Attention, FlatLayout
from .architecture import rotary_limits

# What attention is given of each token beside its states, and does not need: the layout has it
_OF_TOKENS = ("position_ids",)


class _Exchange(torch.autograd.Function):
    """Send `sent[i]` of the entries of a vector to process `i`, and receive `received[i]`. The gradient goes back."""

    @staticmethod
    def forward(
        ctx, states: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sizes, ctx.group = (received, sent), group
        return _exchanged(states, sent, received, group)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        received, sent = ctx.sizes
        return _exchanged(grad, received, sent, ctx.group), None, None, None


def _exchanged(states: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    output = states.new_empty(sum(received), *states.shape[1:])
    dist.all_to_all_single(output, states.contiguous(), received, sent, group=group)
    return output


class _Gather(torch.autograd.Function):
    """The `sizes[i]` first values of each process `i`, in order. The gradient is that of the own values, times `W`."""

    @staticmethod
    def forward(ctx, values: torch.Tensor, sizes: Sequence[int], group: "SequenceGroup") -> torch.Tensor:
        ctx.sizes, ctx.group, ctx.length = sizes, group, len(values)
        own = values[: sizes[group.rank]]
        return _exchanged(torch.cat([own] * group.size), [len(own)] * group.size, list(sizes), group.group)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        own = grad.split(ctx.sizes)[ctx.group.rank] * ctx.group.size
        return torch.cat([own, own.new_zeros(ctx.length - len(own), *own.shape[1:])]), None, None


def cuts(total: int, size: int) -> tuple[int, ...]:
    """
    Where `total` tokens, or heads, are cut into `size` slices: `size + 1` ints.

    >>> cuts(10, 4), slice_sizes(10, 4)
    ((0, 2, 5, 7, 10), (2, 3, 2, 3))
    """
    return tuple(i * total // size for i in range(size + 1))


def slice_sizes(total: int, size: int) -> tuple[int, ...]:
    """How many of `total` tokens, or heads, lie in each of `size` slices. Some are 0 if `total` is less than `size`."""
    return tuple(last - first for first, last in pairwise(cuts(total, size)))


def scored_sizes(batch: FlatBatch, size: int) -> tuple[int, ...]:
    """How many scored tokens of a batch lie in each of `size` slices."""
    return tuple(np.diff(np.searchsorted(batch.scored, cuts(batch.layout.segments.num_tokens, size))).tolist())


def slice_of(batch: FlatBatch, number: int, size: int) -> FlatBatch:
    """
    Slice `number` of `size` of a batch: its tokens and labels, with the rows and the layout of the whole.

    The host knows where slices begin and what they score, so that nothing is read from the device. A slice without
    tokens has one of its neighbour's, and one without scored tokens a label of -100: models need something to compute.

    >>> batch = FlatBatch.from_rows([[1, 2, 3, 4], [1, 2, 5]], [[-100, -100, 3, 4], [-100, -100, 5]])
    >>> [slice_of(batch, number, 2).input_ids.tolist() for number in range(2)]
    [[[1, 2, 3]], [[4, 2, 5]]]
    >>> [slice_of(batch, number, 2).shift_labels.tolist() for number in range(2)]
    [[[3, 4]], [[5]]]
    """
    ends = cuts(batch.layout.segments.num_tokens, size)
    first, last = ends[number], ends[number + 1]
    tokens, (begin, end) = slice(first, max(last, first + 1)), np.searchsorted(batch.scored, (first, last)).tolist()
    labels, scored_index = batch.shift_labels[:, begin:end], batch.scored_index[begin:end] - first
    if begin == end:
        labels, scored_index = labels.new_full((1, 1), IGNORE_INDEX), scored_index.new_zeros(1)
    return replace(
        batch,
        input_ids=batch.input_ids[:, tokens],
        position_ids=batch.position_ids[:, tokens],
        token_rows=batch.token_rows[:, tokens],
        shift_labels=labels,
        scored_index=scored_index,
    )


@cache
def head_shares(num_heads: int, num_keys: int, size: int) -> list[tuple[range, list[int]]]:
    """
    The query heads that each of `size` processes computes, and the key heads that it needs: each once where as many of
    its query heads read each, as attention functions want it, else one for each query head.

    >>> head_shares(6, 2, 4)
    [(range(0, 1), [0]), (range(1, 3), [0]), (range(3, 4), [1]), (range(4, 6), [1])]
    >>> head_shares(8, 2, 3)[1]
    (range(2, 5), [0, 0, 1])
    """
    shares = []
    for first, last in pairwise(cuts(num_heads, size)):
        read = [head * num_keys // num_heads for head in range(first, last)]
        distinct = sorted(set(read))
        is_even = len({read.count(key) for key in distinct}) == 1
        shares.append((range(first, last), distinct if is_even else read))
    return shares


def _heads(states: torch.Tensor, heads: Sequence[int]) -> torch.Tensor:
    """`(t, heads, D)`: some heads of states, some of them several times."""
    first, last = heads[0], heads[-1] + 1
    return states[:, first:last] if len(heads) == last - first else torch.stack([states[:, i] for i in heads], 1)


class SequenceGroup:
    """The processes that compute one flat batch together, as one of them, `rank` of `size`, sees it."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.group, self.device = group, device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def slice(self, batch: FlatBatch, config: PreTrainedConfig) -> FlatBatch:
        """What this process computes of a batch. Refuses rows whose rotary frequencies would follow its slice."""
        width = batch.row_index.size(1)
        for kind, limit in rotary_limits(config).items():
            if width > limit:
                raise ValueError(self.too_long(kind, limit))
        return slice_of(batch, self.rank, self.size)

    def too_long(self, kind: str, limit: int) -> str:
        """Why rows beyond the `limit` of a `kind` of rotary frequencies cannot be computed in slices."""
        return (
            f"`sequence_parallel_size={self.size}`: with `rope_type={kind!r}`, a row of more than {limit} tokens "
            f"changes the frequencies of its whole batch, and slices do not know of it. Set `max_length={limit}`, or "
            "`sequence_parallel_size=1`."
        )

    def attend(
        self, attend: Attention, layout: FlatLayout, module: torch.nn.Module, query, key, value, **kwargs: object
    ) -> tuple[torch.Tensor, None]:
        """
        Attention `(1, t, H, D)` of states `(1, heads, t, D)` of a slice, by a function of `module`, states `(1, heads,
        T, D)` and `kwargs`, which is given all `T` tokens of the layout for the heads of this process.
        """
        num_tokens = layout.segments.num_tokens
        num_heads, length, sizes = query.size(1), query.size(2), slice_sizes(num_tokens, self.size)
        if num_heads < self.size:
            raise ValueError(f"`sequence_parallel_size={self.size}` is more than the {num_heads} heads of a layer.")
        shares, own = head_shares(num_heads, key.size(1), self.size), sizes[self.rank]
        (heads, keys), states = shares[self.rank], [x.squeeze(0).transpose(0, 1)[:own] for x in (query, key, value)]
        # One message of one dtype: for each process rows of its heads, of which it gets one for each token
        dtype = reduce(torch.promote_types, [x.dtype for x in states])
        parts = [[_heads(x, i).flatten(1).to(dtype) for x, i in zip(states, (h, k, k), strict=True)] for h, k in shares]
        widths = [x.size(1) for x in parts[self.rank]]
        rows = [torch.cat(part, 1).flatten() for part in parts]
        sent, got = [len(x) for x in rows], [n * sum(widths) for n in sizes]
        received = _Exchange.apply(torch.cat(rows), sent, got, self.group).view(num_tokens, sum(widths))
        given = [
            x.unflatten(1, (-1, like.size(-1))).transpose(0, 1)[None].to(like.dtype)
            for x, like in zip(received.split(widths, 1), states, strict=True)
        ]
        own_module, kwargs = self._of_heads(module, heads, len(keys), num_heads, kwargs)
        output, _ = attend(own_module, *given, **kwargs)

        width = output.size(-1)
        sent, got = [n * len(heads) * width for n in sizes], [own * len(h) * width for h, _ in shares]
        received = _Exchange.apply(output.flatten(), sent, got, self.group)
        output = torch.cat(
            [x.view(own, len(h), width) for x, (h, _) in zip(received.split(got), shares, strict=True)], 1
        )
        if own < length:  # a slice without tokens has one of its neighbour's
            output = torch.cat([output, output.new_zeros(length - own, *output.shape[1:])])
        return output[None], None

    def _of_heads(
        self, module: torch.nn.Module, heads: range, num_keys: int, num_heads: int, given: Inputs
    ) -> tuple[torch.nn.Module, Inputs]:
        """A layer, and what it is `given` beside states, as if it had only some of its heads."""

        def cut(values: Inputs) -> dict[str, torch.Tensor]:
            tensors = {name: x for name, x in values.items() if isinstance(x, torch.Tensor)}
            return {name: x[heads.start : heads.stop] for name, x in tensors.items() if x.shape == (num_heads,)}

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

    def gather_scored(self, values: dict[str, torch.Tensor], batch: FlatBatch) -> dict[str, torch.Tensor]:
        """Values `(1, P)` of the scored tokens of a batch, of those `(1, p)` of each slice, in one message."""
        dtype = reduce(torch.promote_types, [x.dtype for x in values.values()])
        stacked = torch.stack([x[0].to(dtype) for x in values.values()], 1)
        found = _Gather.apply(stacked, scored_sizes(batch, self.size), self).unbind(1)
        gathered = {name: x[None].to(values[name].dtype) for name, x in zip(values, found, strict=True)}
        return {name: x if values[name].requires_grad else x.detach() for name, x in gathered.items()}

    def gather_tokens(self, states: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """`(T, ...)`: states of all tokens, of those `(t, ...)` of each slice."""
        return _Gather.apply(states, slice_sizes(num_tokens, self.size), self)

    def whole_gradients(
        self, of: Sequence[torch.Tensor], found: Sequence[torch.Tensor | None], batch: FlatBatch
    ) -> list[torch.Tensor]:
        """Gradients at embeddings `(1, t, D)` as `(1, T, D)`, and of weights as engines average them: those of all."""
        given = [x.new_zeros(x.shape) if y is None else y for x, y in zip(of, found, strict=True)]
        first, *others = (gradient.contiguous() for gradient in given)
        for gradient in others:
            dist.all_reduce(gradient, group=self.group)
        embedded = self.gather_tokens(first.squeeze(0), batch.layout.segments.num_tokens)[None]
        return [gradient / self.size for gradient in (embedded, *others)]

    def largest(self, values: Sequence[float] | np.ndarray | torch.Tensor) -> np.ndarray:
        """The largest of each of `values` over the group, on the host, float64, or int64 where they are."""
        given = torch.as_tensor(values, device=self.device).clone()
        dist.all_reduce(given, dist.ReduceOp.MAX, self.group)
        return given.cpu().numpy()

    @contextmanager
    def drawing_apart(self, model: torch.nn.Module) -> Iterator[None]:
        """Within this context, processes draw numbers of their own: one seed for all would drop alike in each slice."""
        devices = {p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}
        kind = next(iter(devices)).type if devices else "cuda"
        seed = int(torch.randint(2**62, ()))  # of the CPU, whose state is one for the whole group
        with torch.random.fork_rng([device.index or 0 for device in devices], device_type=kind):
            torch.manual_seed(seed + self.rank)
            yield
