"""Floating-point operations: counted, and what the fewest possible would be.

Counts come from PyTorch's counter, which is deterministic: a product of an `m x k` with a `k x n` matrix costs `2mkn`,
attention costs the whole rectangle of a run's queries and keys, and element-wise work costs nothing. A training step
costs a certain number per token (linear layers), per query-key pair (attention), per scored token (LM head) and per
token that layers with a state compute: those of the tree, or of the rows that they see. These are found by counting a
few small batches, and hold for every batch of the same trainer.
"""

from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from trl_paddingfree.core.flat.batch import FlatBatch
from trl_paddingfree.core.flat.calls import AttentionCalls
from trl_paddingfree.core.flat.layout import FlatLayout
from trl_paddingfree.core.flat.segments import adjacent_prefixes
from trl_paddingfree.recurrent.kernels import takes_boundaries
from trl_paddingfree.recurrent.layers import repeats_prefixes, state_layers
from trl_paddingfree.recurrent.pieces import PathRows
from trl_paddingfree.recurrent.tree import step_cost


def slots_of_state_layers(model: Any, layout: FlatLayout) -> int:
    """Tokens that the layers of `model` which carry state compute of a layout, with the padding of their rows."""
    layers = state_layers(model)
    if not layers:
        return 0
    if not repeats_prefixes(model):
        return layout.segments.num_tokens
    joined = all(map(takes_boundaries, layers))
    rows = PathRows.of(layout, None if joined else step_cost(layout.device))
    return sum(n * longest for n, longest in rows.shapes)


@dataclass(frozen=True)
class Work:
    """How much of each kind of work a model does on a batch: the units that [`StepCost`] gives operations for."""

    tokens: int  # through the linear layers
    pairs: int  # of queries and keys of one attention head
    scored: int  # tokens through the LM head
    in_rows: int = 0  # tokens through layers that carry state; where these see rows, with repeated prefixes and padding

    def __add__(self, other: "Work") -> "Work":
        return Work(*(mine + its for mine, its in zip(astuple(self), astuple(other), strict=True)))

    @classmethod
    def flat(cls, batch: FlatBatch, in_calls: bool = False) -> "Work":
        """What a flat batch computes. Plain attention (`in_calls`) pads short segments; kernels know of boundaries."""
        segments = batch.layout.segments
        pairs = sum(q * k for q, k in zip(segments.lengths, segments.key_lengths, strict=True))
        if in_calls:
            calls = AttentionCalls.of(batch.layout)
            pairs = sum(len(call) * q * k for call, q, k in zip(calls.segments, calls.queries, calls.keys, strict=True))
        return cls(segments.num_tokens, pairs, batch.shift_labels.size(1))

    @classmethod
    def limit(cls, batch: FlatBatch, causal: bool = False) -> "Work":
        """
        The least that any exact method can compute of a batch with shared prefixes: each node of the rows' tree once,
        also in layers that carry state, which can be handed to several branches.

        Of the pairs, whole rectangles count, or only what a `causal` mask leaves.
        """
        rows = [np.asarray(row, dtype=np.int64) for row in batch.to_rows()]
        order, prefixes = adjacent_prefixes(rows)
        # In sorted order, what a row does not share with the row before it, it shares with no row before it
        own = [(len(rows[row]) - prefix, prefix) for row, prefix in zip(order, prefixes, strict=True)]
        pairs = sum(n * start + (n * (n + 1) // 2 if causal else n * n) for n, start in own)
        tokens = sum(n for n, _ in own)
        return cls(tokens, pairs, batch.shift_labels.size(1), in_rows=tokens)

    @classmethod
    def padded(cls, lengths: list[int], scored: int, *, unpadded_attention: bool, compact_head: bool) -> "Work":
        """
        What padded TRL computes of rows of some lengths.

        Attention may leave the padding out, and the fused head may compute `scored` positions only, as on GPUs.
        """
        rows, longest = len(lengths), max(lengths)
        pairs = sum(n * n for n in lengths) if unpadded_attention else rows * longest * longest
        tokens = rows * longest
        return cls(tokens, pairs, scored if compact_head else tokens - rows, in_rows=tokens)


@dataclass(frozen=True)
class StepCost:
    """Floating-point operations of a step per unit of [`Work`]: forward, backward, and the reference model's."""

    per_token: float
    per_pair: float
    per_scored: float
    per_token_in_rows: float = 0.0

    def of(self, work: Work) -> float:
        """The operations of a step on `work`."""
        return sum(cost * amount for cost, amount in zip(astuple(self), astuple(work), strict=True))

    @classmethod
    def solve(cls, measured: list[tuple[Work, int]]) -> "StepCost":
        """The cost that explains counted steps. A unit that none of them has costs nothing."""
        matrix = np.array([astuple(work) for work, _ in measured], dtype=np.float64)
        flops = np.array([flops for _, flops in measured], dtype=np.float64)
        return cls(*np.linalg.lstsq(matrix, flops, rcond=None)[0].tolist())


def _raw(formula: Callable[..., int]) -> Callable[..., int]:
    formula._get_raw = True  # type: ignore[attr-defined]
    return formula


def _varlen_flops(
    matmuls: int, query: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor | None
) -> int:
    """Operations of a varlen kernel that does `matmuls` products per query-key pair; keys may lie like queries."""
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    pairs = int((cu_seqlens_q.diff().long() * cu_seqlens_k.diff().long()).sum())
    return matmuls * 2 * query.size(1) * query.size(2) * pairs


@_raw
def _addmm(total, a, b, *args: Any, out_val=None, **kwargs: Any) -> int:
    return 2 * a.size(0) * a.size(1) * b.size(1)


@_raw
def _convolution_backward(grad_out, x, weight, *args: Any, out_val=None, **kwargs: Any) -> int:
    # As many for the gradient of either as the output took
    return sum(args[-1][:2]) * 2 * grad_out.numel() * weight[0].numel()


@_raw
def _sdpa_forward(query, key, value, *args: Any, out_val=None, **kwargs: Any) -> int:
    # Scores; output
    return 2 * query[..., 0].numel() * key.size(-2) * (query.size(-1) + value.size(-1))


@_raw
def _sdpa_backward(grad_out, query, key, value, *args: Any, out_val=None, **kwargs: Any) -> int:
    # Scores again, gradients of queries and of keys; gradients of scores and of values
    return 2 * query[..., 0].numel() * key.size(-2) * (3 * query.size(-1) + 2 * value.size(-1))


@_raw
def _varlen_forward(query, key, value, cu_seq_q, cu_seq_k, *args: Any, out_val=None, **kwargs: Any) -> int:
    return _varlen_flops(2, query, cu_seq_q, cu_seq_k)


@_raw
def _on_paths(query, key, value, index, order, offsets, cu_seq_q, cu_seq_k, *args, out_val=None, **kwargs) -> int:
    return _varlen_flops(2, query, cu_seq_q, cu_seq_k)


@_raw
def _varlen_backward(grad_out, query, key, value, out, lse, cu_seq_q, cu_seq_k, *args, out_val=None, **kwargs) -> int:
    return _varlen_flops(5, query, cu_seq_q, cu_seq_k)


def _formulas() -> dict[Any, Callable[..., int]]:
    """
    Formulas for what PyTorch's counter does not know, or not on every version: attention kernels, those with fewer
    key heads than query heads among them, and the sums of products in TRL's head, which are in place on the CPU and
    have another output dtype on GPUs. Of a convolution with a filter per channel, PyTorch counts the gradient of the
    filters as if each saw all channels.
    """
    import torch.nn.attention.varlen  # noqa: F401  (registers the operators)

    aten = torch.ops.aten
    kernels = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
    return {
        aten.addmm: _addmm,
        aten.addmm_: _addmm,
        aten.convolution_backward: _convolution_backward,
        **{getattr(aten, f"_scaled_dot_product_{name}"): _sdpa_forward for name in kernels},
        **{getattr(aten, f"_scaled_dot_product_{name}_backward"): _sdpa_backward for name in kernels},
        torch.ops.torch_attn._varlen_attn: _varlen_forward,
        torch.ops.trl_paddingfree.flash_attn_on_paths: _on_paths,
        torch.ops.torch_attn._varlen_attn_backward: _varlen_backward,
    }


def flop_counter() -> FlopCounterMode:
    """PyTorch's counter of floating-point operations, with what it does not know."""
    return FlopCounterMode(display=False, custom_mapping=_formulas())


def count_flops(function: Callable[[], Any]) -> int:
    """Floating-point operations of a call."""
    with flop_counter() as counter:
        function()
    return counter.get_total_flops()
