"""Layers that carry state, along the tree: branches continue from the state at their fork; prefixes are computed once.

Such a layer runs flat. In its forward, only a convolution and a recurrence mix tokens. The modeling file calls these
functions by name, and ours replace them for flat batches. The convolution sees each segment after the tokens that
precede it in its row; the recurrence goes from piece to piece of the tree, level by level. In a slice, both ask
[`~trl_paddingfree.core.model.told.OtherSlices`] for what lies in others.

Shape legend: see [`~trl_paddingfree.recurrent.pieces`]; in addition
    C = channels, H = heads, D = channels of a head, K, N = sizes of a state
"""

import types
from collections.abc import Callable, Collection, Sequence
from functools import partial
from math import ceil, prod

import torch
from torch.nn.functional import silu, softplus
from torch.utils.checkpoint import checkpoint

from ..core.flat.layout import FlatLayout, Gather
from ..core.model.told import PassContext, Scanned, Weights
from .pieces import Context, PieceCall, Pieces

# The fixed cost in plain PyTorch of a step along all rows of a call, in units of one row's work. One row keeps a CPU
# busy (measured: 0 to 1, hence a half); not even dozens keep a GPU busy, as the host launches small kernels too slowly
_STEP_COST, _STEP_COST_OF_GPUS = 0.5, 64.0
# Most tokens of a chunk in plain PyTorch. Results do not depend on it; by default, Mamba 2 pads to 256
_CHUNK = 64
# A time step of Mamba that softplus turns into zero in every dtype, so that the state stays as it is
_NO_STEP = -1e4


def step_cost(device: torch.device) -> float:
    """The fixed cost of a step along all rows of a call on a device, in units of one row's work."""
    return _STEP_COST if device.type == "cpu" else _STEP_COST_OF_GPUS


def with_functions(forward: Callable, functions: dict[str, Callable]) -> Callable:
    """
    A copy of `forward` that finds `functions` by their names, in place of those of its modeling file.

    Nothing is patched, so other models of the same class are not affected. accelerate's decorator around the forwards
    of these layers holds the function it wraps in its closure: that one is copied, too.

    Raises:
        `TypeError`: If it is not a Python function or method, or is wrapped by something else.
    """
    if isinstance(forward, types.MethodType):
        return types.MethodType(with_functions(forward.__func__, functions), forward.__self__)
    if not isinstance(forward, types.FunctionType):
        raise TypeError(f"the forward is a {type(forward).__name__}")
    names, closure = {**forward.__globals__, **functions}, forward.__closure__ or ()
    if inner := vars(forward).get("__wrapped__"):
        copy = with_functions(inner, functions)
        closure = tuple(types.CellType(copy) if cell.cell_contents is inner else cell for cell in closure)
    made = types.FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, closure)
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


def tree_functions(
    context: PassContext, functions: dict[str, Callable], kernels: Collection[str]
) -> dict[str, Callable]:
    """
    Replacements for the `functions` by which a layer mixes tokens, for the batch of a pass. Those in `kernels` have a
    kernel.
    """
    return {name: partial(_ALONG_TREE[name], context, call, name in kernels) for name, call in functions.items()}


def _convolve(
    context: PassContext, function: Callable, has_kernel: bool, states, weight, bias=None, activation=None, **kwargs
) -> torch.Tensor:
    """A causal convolution of `(1, C, T)`: each segment is preceded by the tokens of its row that the kernel reads."""
    rows, size = states.squeeze(0).T, weight.size(-1) - 1
    layout, span = context.layout, range(len(rows))
    if context.others is not None:
        span = context.others.span(layout.segments.num_tokens)
        rows = context.others.with_context(layout, rows, size)
    before = Context.of(layout, size, span)
    axis = Gather.apply(rows, before.rows).T
    axis = axis if has_kernel else axis.contiguous()  # PyTorch's own convolution takes twice as long otherwise
    return function(axis[None], weight, bias, activation=activation, **kwargs).index_select(2, before.places)


def _delta_rule(
    context: PassContext, function: Callable, has_kernel: bool, query, key, value, g, beta, *, initial_state=None,
    output_final_state=False, **kwargs,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """A (gated) delta rule of `(1, T, H, D)`. Padding with zeros changes no state: neither decay nor update."""

    def call(group, parts, state, goes_on) -> Scanned:
        value, g, beta, query, key = parts
        chunks = {"cu_seqlens": group.boundaries} if has_kernel else {"chunk_size": _even_chunk(group)}
        options = {**kwargs, **chunks, "initial_state": state, "output_final_state": goes_on}
        return function(query, key, value, g=g, beta=beta, **options)

    return _scan(context, (value, g, beta, query, key), (), call, joins_pieces=has_kernel), None


def _chunk_scan(
    context: PassContext, function: Callable, has_kernel: bool, states, dt, A, B, C, *, D=None, dt_bias=None,
    dt_softplus=False, dt_limit=(0.0, float("inf")), initial_states=None, return_final_states=False, **kwargs,
) -> torch.Tensor:  # fmt: skip
    """Mamba 2's scan of `(1, T, H, D)`. Applies bias, softplus and limits first, so that zero padding is no step."""
    dt = dt.float() if has_kernel else dt  # as in the kernel
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = (softplus(dt) if dt_softplus else dt).clamp(*dt_limit)

    def call(A, D, group, parts, state, goes_on) -> Scanned:
        states, dt, B, C = parts
        chunks = {} if has_kernel else {"chunk_size": _even_chunk(group)}
        options = {**kwargs, **chunks, "D": D, "initial_states": state, "return_final_states": goes_on}
        result = function(states, dt, A, B, C, **options)
        return result if goes_on else (result, None)

    return _scan(context, (states, dt, B, C), (A, D), call)


def _selective_scan(
    context: PassContext, function: Callable, has_kernel: bool, states, dt, A, B, C, *, D=None, z=None,
    delta_bias=None, return_last_state=False, **kwargs,
) -> torch.Tensor:  # fmt: skip
    """
    Mamba 1's scan of `(1, C, T)`, with `A` of shape `(C, N)`: each channel is a head, and all share `B` and `C`, of
    shape `(1, N, T)`. All layers ask for a softplus of `dt`. The function takes no initial state, but is linear in it:
    the contribution of that state to the outputs, decayed by all time steps so far, is added here.
    """

    def call(A, D, delta_bias, group, parts, state, goes_on) -> Scanned:
        scan = partial(function, D=D, delta_bias=delta_bias, **kwargs)
        states, dt, B, C = (part.flatten(2).transpose(1, 2) for part in parts)
        if goes_on and has_kernel:
            outputs, last = _scan_and_read(scan, states, dt, A, B, C)
        else:
            outputs, last = scan(states, dt, A, B, C, return_last_state=True)
        if state is not None:
            steps = dt.to(torch.promote_types(dt.dtype, torch.float32))
            steps = softplus(steps if delta_bias is None else steps + delta_bias[:, None]).cumsum(-1)
            seen = checkpoint(_seen_of_state, state, steps, A, C, use_reentrant=False)
            outputs = outputs + seen.to(outputs.dtype)
            if goes_on:
                last = last + (state * torch.exp(A * steps[..., -1:])).to(last.dtype)
        return outputs.transpose(1, 2), last

    inputs = [x.transpose(1, -1) for x in (states, dt, B.unsqueeze(2), C.unsqueeze(2))]
    outputs = _scan(context, inputs, (A, D, delta_bias), call, no_step=_NO_STEP).transpose(1, 2)
    return outputs if z is None else outputs * silu(z)


def _seen_of_state(state: torch.Tensor, steps: torch.Tensor, A: torch.Tensor, C: torch.Tensor) -> torch.Tensor:
    """What an initial `state (n, C, N)` adds to outputs after `steps (n, C, L)`, entry by entry to save memory."""
    seen = torch.zeros_like(steps)
    for x, a, c in zip(state.unbind(-1), A.unbind(-1), C.unbind(1), strict=True):
        seen = seen + torch.exp(a[:, None] * steps) * x[..., None] * c[:, None]
    return seen


def _scan_and_read(scan: Callable, states, dt, A, B, C) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The outputs of Mamba 1's kernel, and its last state. The kernel has no gradient for the state, so one more token is
    appended for each of its entries, which makes no step, and whose output is that entry.
    """
    size, length = A.size(-1), states.size(-1)
    nothing = states.new_zeros(*states.shape[:2], size)
    read = torch.eye(size, dtype=C.dtype, device=C.device).expand(len(C), size, size)
    longer = [torch.cat(pair, -1) for pair in ((states, nothing), (dt, nothing + _NO_STEP), (B, read), (C, read))]
    outputs = scan(*longer[:2], A, *longer[2:])
    return outputs[..., :length], outputs[..., length:]


def _no_fused_form(*args: object, **kwargs: object) -> None:
    """Replaces a fused convolution and scan: `None` means no kernel, so the layer calls the two separately."""


_ALONG_TREE: dict[str, Callable] = {
    "causal_conv1d_fn": _convolve,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _chunk_scan,
    "mamba2_split_conv1d_scan_combined": _no_fused_form,
    "mamba_inner_fn": _no_fused_form,
    "mamba_selective_scan": _selective_scan,
    "torch_chunk_gated_delta_rule": _delta_rule,
}


def _even_chunk(group: PieceCall) -> int:
    """The chunk length of a call in plain PyTorch, chosen so that the last chunk of a row is hardly padded."""
    length = group.shape[1]
    return ceil(length / ceil(length / _CHUNK))


def _scan(
    context: PassContext, inputs: Sequence[torch.Tensor], weights: Weights,
    call: Callable, joins_pieces: bool = False, no_step: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """
    A recurrence of `inputs (1, T, heads, ...)` along the tree, or of a slice by way of
    [`~trl_paddingfree.core.model.told.OtherSlices`]. The pieces of a level are rows of like length, or with
    `joins_pieces`, one after another in one row.

    `call` returns outputs `(n, L, ...)` and final states `(n, ...)`, from the `weights (heads, ...)`, a group of
    pieces, their inputs `(n, L, ...)`, their initial states, and whether others continue them. Pieces are padded with
    zeros, and in the second input, the time steps, with `no_step`.
    """
    scan = partial(_by_levels, context.layout, call, joins_pieces, no_step)
    if context.others is None:
        return scan(inputs, weights)[0]
    return context.others.scan(context.layout, scan, inputs, weights)


def _by_levels(
    layout: FlatLayout, call: Callable, joins_pieces: bool, no_step: float, inputs: Sequence[torch.Tensor],
    weights: Weights, cuts: tuple[int, ...] = (), number: int = 0,
    carried: torch.Tensor | None = None,
) -> Scanned:  # fmt: skip
    """
    The [`~trl_paddingfree.core.model.told.Scan`] that starts each piece from the last state of its parent, or from one
    `carried` over from an earlier slice. Returns outputs, and the states that later slices read.
    """
    pieces = Pieces.of(layout, None if joins_pieces else step_cost(layout.device), cuts, number)
    rows = [Gather.apply(x.squeeze(0), pieces.slots) for x in inputs]
    if no_step and pieces.slots.empty is not None:
        rows[1] = rows[1].index_fill(0, pieces.slots.empty, no_step)
    sizes = [prod(group.shape) for level in pieces.levels for group in level]
    parts = zip(*(x.split(sizes) for x in rows), strict=True)  # of each call
    outputs, finals = [], carried  # `finals`: the last states of the previous level
    of_levels = []  # the last states of all levels
    for level in pieces.levels:
        ends, goes_on = [], level is not pieces.levels[-1] or pieces.kept is not None
        for group, of_group in zip(level, parts, strict=False):
            initial = None if group.parents is None else Gather.apply(finals, group.parents)
            cut = [x.unflatten(0, group.shape) for x in of_group]
            output, final = call(*weights, group, cut, initial, goes_on)
            outputs.append(output.flatten(0, 1))
            ends.append(final)
        if goes_on:
            finals = torch.cat(ends)
            of_levels.append(finals)
    kept = None if pieces.kept is None else Gather.apply(torch.cat(of_levels), pieces.kept)
    return Gather.apply(torch.cat(outputs), pieces.own)[None], kept
