"""Communication between processes with shares of one flat axis: heads for tokens, tokens for convolutions, values.

The host derives what to send from the layout and the shapes of values. All processes know these, so they make the same
exchanges in the same order without reading from the device. Shape legend: see [`sequence`].
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist

from ..core.flat.layout import FlatLayout, GatherIndex, once_per_layout
from ..core.flat.segments import Ints, something_to_compute
from ..spans import cut_by_number, handed_on


def share_sizes(total: int, size: int) -> Ints:
    """How many of `total` tokens lie in each of `size` shares; with few tokens, some are 0."""
    return tuple(np.diff(cut_by_number(total, size)).tolist())


def span_of(total: int, number: int, size: int) -> range:
    """The tokens of share `number` of `size`; for an empty one, the stand-ins of [`something_to_compute`]."""
    first, last = cut_by_number(total, size)[number : number + 2]
    return something_to_compute(first, last, total)


class Exchanged(torch.autograd.Function):
    """All-to-all: send `sent[i]` entries of a vector to process `i`, receive `received[i]`. Gradients go back."""

    @staticmethod
    def forward(
        ctx, values: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.back = received, sent, group
        output = values.new_empty(sum(received), *values.shape[1:])
        dist.all_to_all_single(output, values.contiguous(), received, sent, group=group)
        return output

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return Exchanged.apply(grad, *ctx.back), None, None, None


class Gathered(torch.autograd.Function):
    """All-gather the first `sizes[i]` values of each process `i`. The gradient is that of its own values, times `W`."""

    @staticmethod
    def forward(ctx, values: torch.Tensor, sizes: list[int], group: dist.ProcessGroup) -> torch.Tensor:
        ctx.sizes, ctx.group, ctx.length = sizes, group, len(values)
        own = values[: sizes[dist.get_rank(group)]]
        return Exchanged.apply(torch.cat([own] * len(sizes)), [len(own)] * len(sizes), sizes, group)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        own = grad.split(ctx.sizes)[dist.get_rank(ctx.group)] * len(ctx.sizes)
        return torch.cat([own, own.new_zeros(ctx.length - len(own), *own.shape[1:])]), None, None


@cache
def head_shares(num_heads: int, num_keys: int, size: int) -> list[tuple[range, list[int]]]:
    """
    For each of `size` processes, the heads that it computes and the key heads that these read: each key head once if
    all are read by equally many heads, as attention and scan functions expect; otherwise once per head that reads it.

    >>> head_shares(6, 2, 4)
    [(range(0, 1), [0]), (range(1, 3), [0]), (range(3, 4), [1]), (range(4, 6), [1])]
    >>> head_shares(8, 2, 3)[1]
    (range(2, 5), [0, 0, 1])
    """
    shares = []
    for first, last in pairwise(number * num_heads // size for number in range(size + 1)):
        read = [head * num_keys // num_heads for head in range(first, last)]
        distinct = sorted(set(read))
        is_even = len(set(Counter(read).values())) == 1
        shares.append((range(first, last), distinct if is_even else read))
    return shares


def of_heads(values: torch.Tensor, heads: Sequence[int]) -> torch.Tensor:
    """`(t, heads, D)`: the selected heads of values, which may repeat."""
    first, last = heads[0], heads[-1] + 1
    return values[:, first:last] if len(heads) == last - first else torch.stack([values[:, i] for i in heads], 1)


@dataclass(frozen=True)
class Halo:
    """The tokens before a share or segment that processes exchange for a convolution, in flat order."""

    rows: GatherIndex  # tokens of the own share to send, process by process
    sent: list[int]
    received: list[int]
    is_needed: bool  # whether any process needs tokens

    @staticmethod
    @once_per_layout
    def of(layout: FlatLayout, reach: int, number: int, size: int) -> "Halo":
        """What share `number` of `size` sends and receives, for a convolution that reads `reach` tokens back."""
        total = layout.segments.num_tokens
        ends, span = cut_by_number(total, size), span_of(total, number, size)
        wanted = [reads for _, reads, _ in handed_on(layout, ends, reach)]
        to_send = [tokens[(tokens >= ends[number]) & (tokens < ends[number + 1])] - ends[number] for tokens in wanted]
        received = np.diff(np.searchsorted(wanted[number], ends)).tolist()
        rows = layout.gather_index(np.concatenate(to_send), len(span))
        return Halo(rows, list(map(len, to_send)), received, any(map(len, wanted)))
