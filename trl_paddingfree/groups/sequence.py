"""One flat batch on several processes: each computes a share of its tokens, and attention exchanges heads for tokens.

All work per token is done on the share. Attention runs the unchanged backend with the unchanged layout, over all tokens
for some of the heads, as in DeepSpeed-Ulysses (arXiv 2309.14509). So do scans, whose states have heads, too.
Convolutions get the few tokens before the share that they read. Only values of scored tokens are gathered, from which
each process computes the same loss. The gather's backward pass multiplies the gradient of the share by the group size:
engines average gradients over all processes, which then yields the sum over a group and the mean over groups.

Shape legend: see [`~trl_paddingfree.core.flat.segments`]; in addition
    W = processes of a group, t = tokens of a share, H = heads of queries or states, K = heads of keys, D = head size
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedConfig, PreTrainedModel

from ..core import upstream
from ..core.check.training import OthersWaitError
from ..core.flat.batch import IGNORE_INDEX, FlatBatch, Inputs
from ..core.flat.layout import FlatLayout, Gather, once_per_layout
from ..core.flat.segments import Ints, something_to_compute
from ..core.model.architecture import rotary_limits
from ..core.model.flat_model import FlatModel
from ..core.model.forward import PER_TOKEN
from ..core.model.hooks import Answered, Compute, PassHook
from ..core.model.peers import Alone
from ..core.model.restored import random_state_restored
from ..core.model.told import Around, PassContext, Scan, Weights
from .exchange import Exchanged, Gathered, Halo, head_shares, of_heads, share_sizes, span_of


def scored_sizes(batch: FlatBatch, size: int) -> Ints:
    """How many scored tokens of a batch lie in each of `size` shares."""
    owners = owners_of(batch.layout.segments.num_tokens, size)
    return tuple(np.bincount(owners[batch.scored], minlength=size).tolist())


def spans_of(total: int, number: int, size: int, cuts: Ints = ()) -> list[range]:
    """
    The flat tokens that process `number` of `size` computes: its share of the axis, or with `cuts` its share of each of
    the slices that are computed one after another.
    """
    spans = []
    for start, stop in pairwise(cuts or (0, total)):
        together = something_to_compute(start, stop, total)
        own = span_of(len(together), number, size)
        spans.append(together[own.start : own.stop])
    return spans


def owners_of(total: int, size: int, cuts: Ints = ()) -> np.ndarray:
    """`(T,)` int64: which of `size` processes computes each flat token."""
    spans = pairwise(cuts or (0, total))
    return np.concatenate([np.repeat(np.arange(size), share_sizes(stop - start, size)) for start, stop in spans])


@once_per_layout
def _share(layout: FlatLayout, number: int, size: int, cuts: Ints) -> tuple[np.ndarray, ...]:
    """
    Three int64 arrays: the flat tokens that process `number` of `size` computes; its own among them, ascending, without
    stand-ins for empty shares; and the first place of each of its own in the first array.
    """
    total = layout.segments.num_tokens
    index = np.concatenate(spans_of(total, number, size, cuts))
    tokens, places = np.unique(index, return_index=True)
    is_own = owners_of(total, size, cuts)[tokens] == number
    return index, tokens[is_own], places[is_own]


def share_of(batch: FlatBatch, number: int, size: int) -> FlatBatch:
    """
    What process `number` of `size` computes of a batch, see [`spans_of`]. `input_ids`, `position_ids`, `token_rows`,
    `shift_labels` and `scored_index` hold its tokens only; everything else, including rows and layout, stays that of
    the whole batch.

    The host knows where shares begin and what they score, so nothing is read from the device. An empty share gets two
    stand-in tokens, and one without scored tokens a label of -100, because models need something to compute.

    >>> batch = FlatBatch.from_rows([[1, 2, 3, 4], [1, 2, 5]], [[-100, -100, 3, 4], [-100, -100, 5]])
    >>> [share_of(batch, number, 2).input_ids.tolist() for number in range(2)]
    [[[1, 2, 3]], [[4, 2, 5]]]
    >>> [share_of(batch, number, 2).shift_labels.tolist() for number in range(2)]
    [[[3, 4]], [[5]]]
    """
    layout = batch.layout
    index, own, places = _share(layout, number, size, batch.schedule.cuts)
    scored = np.flatnonzero(np.isin(batch.scored, own))
    labels, scored_index = batch.shift_labels.new_full((1, 1), IGNORE_INDEX), batch.scored_index.new_zeros(1)
    if len(scored):
        labels = batch.shift_labels.index_select(1, layout.tensor(scored))
        scored_index = layout.tensor(places[np.searchsorted(own, batch.scored[scored])])
    tokens = layout.tensor(index)
    return replace(
        batch,
        input_ids=batch.input_ids.index_select(1, tokens),
        position_ids=batch.position_ids.index_select(1, tokens),
        token_rows=batch.token_rows.index_select(1, tokens),
        shift_labels=labels,
        scored_index=scored_index,
    )


class Share(PassHook):
    """What a batch with the tokens of one process adds to its passes: exchanges with the others of its `group`."""

    def __init__(self, group: "SequenceGroup"):
        self.group = group

    def context(self, context: PassContext) -> PassContext:
        return replace(context, around=(*context.around, self.group.attend), others=self.group)


class SequenceGroup(PassHook):
    """
    The processes that compute one flat batch together, seen from one of them, `rank` of `size`. Implements
    [`~trl_paddingfree.core.model.peers.Peers`] and [`~trl_paddingfree.core.model.told.OtherSlices`].
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.group, self.device = group, device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.name = f"`sequence_parallel_size={self.size}`"
        # Hosts compare what they know among themselves: through a device, they would have to wait for it
        self.hosts = group
        if device.type != "cpu":
            ranks = dist.get_process_group_ranks(group)
            self.hosts = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)  # type: ignore[assignment]

    def inputs(self, flat_model: FlatModel, batch: FlatBatch, inputs: Inputs) -> Inputs:
        """Only TRL's fused head is computed by shares: refuses calls that compute whole batches."""
        if not any(isinstance(hook, Share) for hook in batch.hooks):
            raise ValueError(
                f"{self.name}: each process has a slice of the tokens, and no logits of whole rows. Leave out what "
                "needs these, such as `compute_metrics` and `predict`, or set it to 1."
            )
        return inputs

    def scored(self, flat_model: FlatModel, batch: FlatBatch, compute: Compute) -> Answered:
        """Each process computes its share, and all gather the answers."""
        model = flat_model.model
        own = self.own_share(batch, model.config.get_text_config())
        with self.drawing_apart(model) if model.training else nullcontext():
            output, backbone = compute(own)
        values = self.gather_scored({name: output[name] for name in PER_TOKEN if name in output}, batch)
        if output.aux_loss is not None:  # the router loss is no sum over shares: it needs all tokens at once
            routers = tuple(self.gather_tokens(x, batch) for x in backbone["router_logits"])
            values["aux_loss"] = upstream.router_loss(model, routers, batch.token_rows)
        return replace(output, **values), backbone

    def own_share(self, batch: FlatBatch, config: PreTrainedConfig) -> FlatBatch:
        """
        What this process computes of a batch, see [`share_of`]. Rejects rows so long that RoPE frequencies would depend
        on its share, and batches that differ between processes.
        """
        width = batch.row_index.size(1)
        for kind, limit in rotary_limits(config).items():
            if width > limit:
                raise ValueError(self.too_long(kind, limit))
        checksums = partial(self.largest, [batch.checksum, -batch.checksum])
        if sum(batch.layout.derived("largest and smallest checksum", checksums)):  # asked once
            raise ValueError(
                f"{self.name}: the processes of one group got different batches. A transform of the dataset that "
                "draws at random, or a data loader of your own, may cause this: give all of them the same."
            )
        own = share_of(batch, self.rank, self.size)
        return replace(own, hooks=(*own.hooks, Share(self)))

    def too_long(self, kind: str, limit: int) -> str:
        """Why rows of more than `limit` tokens cannot be computed in shares with the RoPE type `kind`."""
        return (
            f"{self.name}: with `rope_type={kind!r}`, a row of more than {limit} tokens changes the frequencies of "
            f"its whole batch, and slices cannot see that. Set `max_length={limit}`, or `sequence_parallel_size=1`."
        )

    # --- what slices exchange: see [`OtherSlices`] ------------------------------------------------

    def span(self, num_tokens: int) -> range:
        return span_of(num_tokens, self.rank, self.size)

    def attend(
        self, attend: Around, layout: FlatLayout, layer: torch.nn.Module, module: torch.nn.Module,
        *values: torch.Tensor, **kwargs: object,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        """
        Attention `(1, t, H, D)` of a share, from `values` of shape `(1, heads, t, D)`. The function `attend`
        computes it for the heads of this process, over all tokens of the layout: `(1, heads, T, D)`.
        """
        num_heads, of_tokens = values[0].size(1), [x.squeeze(0).transpose(0, 1) for x in values]
        whole, heads = self._to_heads(of_tokens, layout.segments.num_tokens)
        own_module, kwargs = self._with_heads(module, heads, num_heads, kwargs)
        vars(own_module)["num_key_value_groups"] = whole[0].size(1) // whole[1].size(1)
        output, _ = attend(layout, layer, own_module, *(x.transpose(0, 1)[None] for x in whole), **kwargs)
        return self._to_tokens(output.squeeze(0), num_heads)[None], None

    def with_context(self, layout: FlatLayout, values: torch.Tensor, size: int) -> torch.Tensor:
        """Processes exchange up to `size` tokens before each share, and before each segment that begins in it."""
        halo = Halo.of(layout, size, self.rank, self.size)
        if not halo.is_needed:
            return values
        sent, got = ([n * values.size(1) for n in numbers] for numbers in (halo.sent, halo.received))
        before = Exchanged.apply(Gather.apply(values, halo.rows).flatten(), sent, got, self.group)
        return torch.cat([values, before.view(-1, values.size(1))])

    def scan(self, layout: FlatLayout, scan: Scan, inputs: Sequence[torch.Tensor], weights: Weights) -> torch.Tensor:
        """As in attention: scan all tokens, along the whole tree, for the heads of this process."""
        num_heads = inputs[0].size(2)
        whole, heads = self._to_heads([x.squeeze(0) for x in inputs], layout.segments.num_tokens)
        outputs, _ = scan([x[None] for x in whole], [None if x is None else x[heads] for x in weights])
        return self._to_tokens(outputs.squeeze(0), num_heads)[None]

    def _to_heads(self, values: Sequence[torch.Tensor], num_tokens: int) -> tuple[list[torch.Tensor], slice]:
        """
        Exchange values `(t, heads, ...)` of this share for `(T, n, ...)` of all tokens, for the `n` heads of this
        process: its share of the heads of the first tensor, also returned, and the heads of the others that these read.
        """
        if (num_heads := values[0].size(1)) < self.size:
            raise ValueError(f"{self.name} is more than the {num_heads} heads of a layer.")
        sizes = share_sizes(num_tokens, self.size)
        heads = [[keys for _, keys in head_shares(num_heads, x.size(1), self.size)] for x in values]
        whole = {}
        for dtype in dict.fromkeys(x.dtype for x in values):  # one message per dtype
            alike = [i for i, x in enumerate(values) if x.dtype == dtype]
            # For each process, the values of its heads, one row per token of this share
            parts = [
                [of_heads(values[i][: sizes[self.rank]], heads[i][process]).flatten(1) for i in alike]
                for process in range(self.size)
            ]
            widths, rows = [x.size(1) for x in parts[self.rank]], [torch.cat(part, 1).flatten() for part in parts]
            got = [n * sum(widths) for n in sizes]
            received = Exchanged.apply(torch.cat(rows), list(map(len, rows)), got, self.group).view(num_tokens, -1)
            for i, x in zip(alike, received.split(widths, 1), strict=True):
                whole[i] = x.unflatten(1, (len(heads[i][self.rank]), *values[i].shape[2:]))
        own = heads[0][self.rank]
        return [whole[i] for i in range(len(values))], slice(own[0], own[-1] + 1)

    def _to_tokens(self, output: torch.Tensor, num_heads: int) -> torch.Tensor:
        """Exchange outputs `(T, n, ...)` for the heads of this process for `(t, heads, ...)` of its share."""
        sizes = share_sizes(len(output), self.size)
        numbers = [len(heads) for heads, _ in head_shares(num_heads, num_heads, self.size)]  # heads per process
        own, width = sizes[self.rank], output[0, 0].numel()
        sent, got = [n * numbers[self.rank] * width for n in sizes], [own * number * width for number in numbers]
        received = Exchanged.apply(output.flatten(), sent, got, self.group)
        parts = [x.view(own, number, *output.shape[2:]) for x, number in zip(received.split(got), numbers, strict=True)]
        joined, length = torch.cat(parts, 1), len(self.span(len(output)))
        if own < length:  # the share is empty: tokens stand in
            joined = torch.cat([joined, joined.new_zeros(length - own, *joined.shape[1:])])
        return joined

    def _with_heads(
        self, module: torch.nn.Module, heads: slice, num_heads: int, kwargs: Inputs
    ) -> tuple[torch.nn.Module, Inputs]:
        """A copy of a layer with only some of its heads, and its attention's arguments, cut likewise."""

        def cut(values):
            return {name: x[heads] for name, x in values.items() if torch.is_tensor(x) and x.shape == (num_heads,)}

        kwargs.pop("position_ids", None)  # attention uses the layout
        own = cut(kwargs)
        if unknown := [name for name, x in kwargs.items() if torch.is_tensor(x) and x.ndim and name not in own]:
            raise ValueError(
                f"{self.name}: {type(module).__name__} gives its attention function `{unknown[0]}`, and it is not "
                "known which part of that belongs to which head. Set it to 1."
            )
        part = copy.copy(module)  # shares all weights; attributes set on it take precedence over them
        vars(part).update(cut(dict(module.named_parameters(recurse=False))))
        return part, {**kwargs, **own}

    # --- values of all shares ---------------------------------------------------------------------------------------

    def gather_scored(self, values: dict[str, torch.Tensor], batch: FlatBatch) -> dict[str, torch.Tensor]:
        """Gather values `(1, p)` of a share's scored tokens into `(1, P)` of the whole batch, in one message."""
        stacked = torch.stack([x[0] for x in values.values()], 1)  # in a dtype that holds all
        owners = owners_of(batch.layout.segments.num_tokens, self.size, batch.schedule.cuts)[batch.scored]
        columns = self._gathered(stacked, owners, batch.layout).unbind(1)
        gathered = {name: x[None].to(values[name].dtype) for name, x in zip(values, columns, strict=True)}
        return {name: x if values[name].requires_grad else x.detach() for name, x in gathered.items()}

    def gather_tokens(self, values: torch.Tensor, batch: FlatBatch) -> torch.Tensor:
        """Gather values `(t, ...)` of a share into `(T, ...)` of all tokens of a batch."""
        layout, cuts = batch.layout, batch.schedule.cuts
        _, _, places = _share(layout, self.rank, self.size, cuts)
        if len(places) < len(values):
            values = values.index_select(0, layout.tensor(places))
        return self._gathered(values, owners_of(layout.segments.num_tokens, self.size, cuts), layout)

    def _gathered(self, values: torch.Tensor, owners: np.ndarray, layout: FlatLayout) -> torch.Tensor:
        """The values of all processes in flat order; `owners` holds the process of each."""
        by_process = Gathered.apply(values, np.bincount(owners, minlength=self.size).tolist(), self.group)
        if (owners[1:] >= owners[:-1]).all():
            return by_process
        return by_process.index_select(0, layout.tensor(np.argsort(np.argsort(owners, kind="stable"))))

    def gradients(
        self, tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None], batch: FlatBatch
    ) -> list[torch.Tensor]:
        """Gradients as engines average them, from a share's: of embeddings, now `(1, T, D)`, and of weights."""
        filled = [x.new_zeros(x.shape) if y is None else y for x, y in zip(tensors, gradients, strict=True)]
        first, *sums = (gradient.contiguous() for gradient in filled)
        embedded = self.gather_tokens(first.squeeze(0), batch)[None]
        for gradient in sums:
            dist.all_reduce(gradient, group=self.group)
        return [gradient / self.size for gradient in (embedded, *sums)]

    def failed(self, model: PreTrainedModel, error: Exception) -> None:
        raise OthersWaitError(
            f"{self.name} cannot serve {type(model).__name__}, which raises {type(error).__name__} in slices: {error} "
            "Set it to 1 to train whole batches."
        ) from error

    def spans(self, batch: FlatBatch) -> list[tuple[range, int]]:
        total, cuts = batch.layout.segments.num_tokens, batch.schedule.cuts
        sizes = [len(span) for span in spans_of(total, self.rank, self.size, cuts)]
        return [(range(end - size, end), size) for size, end in zip(sizes, accumulate(sizes), strict=True)]

    def shares(self, batch: FlatBatch) -> tuple[Sequence[int], int]:
        return scored_sizes(batch, self.size), self.rank

    def largest(self, values: Sequence[float] | np.ndarray) -> np.ndarray:
        """The element-wise maximum of `values` over the group, in their dtype. Only the hosts take part."""
        maxima = torch.as_tensor(values).clone()
        dist.all_reduce(maxima, dist.ReduceOp.MAX, self.hosts)
        return maxima.numpy()

    @contextmanager
    def drawing_apart(self, model: torch.nn.Module) -> Iterator[None]:
        """Within this context, each process draws its own numbers: a common seed would repeat dropout in each share."""
        seed = int(torch.randint(2**62, ()))  # from the CPU, whose state is the same across the group
        with random_state_restored(model, of_users=False):
            torch.manual_seed(seed + self.rank)
            yield


def share_batches(flat_model: FlatModel, group: SequenceGroup | None) -> None:
    """Have the processes of a `group` compute the batches of a model together; `None`: each its own."""
    others = tuple(hook for hook in flat_model.hooks if not isinstance(hook, SequenceGroup))
    flat_model.hooks = others if group is None else (*others, group)
    flat_model.peers = Alone() if group is None else group
