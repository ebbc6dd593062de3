"""Flash attention in plain PyTorch, and ways to have transformers and PyTorch take it for their kernels.

Slow and obvious: one matrix of scores per segment, masked by comparing positions. What transformers and PyTorch do
around the kernel (which arguments they pass, and which they drop) is their own code.
"""

import functools
import inspect
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from unittest import mock

import torch
from torch.nn.attention import varlen
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, modeling_flash_attention_utils
from transformers.models.falcon import modeling_falcon
from transformers.models.gpt_neo import modeling_gpt_neo
from transformers.models.gptj import modeling_gptj

from trl_paddingfree.core.model import kernels


def check_arguments(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
    """The queries and the keys of each segment, once the kernels' own checks of states and boundaries have passed."""
    for states in (q, k, v):
        assert states.ndim == 3, f"the kernels read states of shape (tokens, heads, size), not {tuple(states.shape)}"
        assert (states.dtype, states.device) == (q.dtype, q.device), "states differ in dtype or device"
        assert states.stride(-1) == 1, "the last dimension of states is not contiguous"
    assert k.shape[:2] == v.shape[:2], "keys and values differ in number or heads"
    assert k.size(2) == q.size(2), "keys and queries differ in size"
    assert q.size(1) % k.size(1) == 0, f"{q.size(1)} query heads cannot share {k.size(1)} key heads"
    runs = []
    for boundaries, longest in ((cu_seqlens_q, max_seqlen_q), (cu_seqlens_k, max_seqlen_k)):
        assert boundaries.dtype == torch.int32, f"boundaries are {boundaries.dtype}, not int32"
        starts = boundaries.tolist()
        runs.append([slice(start, end) for start, end in pairwise(starts)])
        lengths = [run.stop - run.start for run in runs[-1]]
        assert min(lengths) > 0, "kernels hang on empty segments"
        assert max(lengths) == longest, f"the longest segment has {max(lengths)} tokens, not {longest}"
    assert runs[1][-1].stop == len(k), "keys beyond the last boundary get no gradient from the kernels"
    return list(zip(*runs, strict=True))


def check_call(q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
    """What kernels are compiled for, and arguments that no host waits for."""
    assert q.dtype in (torch.float16, torch.bfloat16), f"the kernels have no {q.dtype}"
    assert q.size(-1) <= 256, f"the kernels have no heads of {q.size(-1)}"
    assert q.size(-1) % 8 == 0, f"the kernels have no heads of {q.size(-1)}, no multiple of 8"
    for longest, boundaries in ((max_seqlen_q, cu_seqlens_q), (max_seqlen_k, cu_seqlens_k)):
        assert type(longest) is int, f"the host would wait for {longest!r} in each layer"
        assert boundaries.device == q.device, f"boundaries are on {boundaries.device}"


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    deterministic=False,
    s_aux=None,
):
    """
    Attention of `(T, H, D)` queries over `(S, K, D)` keys, segment by segment, aligned to the bottom right.

    In any dtype, and rounded to it once. As the kernels, it leaves tokens beyond the last boundary uninitialised.
    """
    assert dropout_p == 0.0, "dropout is random: nothing to compare"
    runs = check_arguments(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    rest = (softmax_scale, causal, window_size, softcap, s_aux)
    outputs = [_attend(q[queries], k[keys], v[keys], *rest)[0] for queries, keys in runs]
    outputs.append(q.new_full((len(q) - runs[-1][0].stop, *q.shape[1:]), float("nan")))
    return torch.cat(outputs)


@functools.wraps(flash_attn_varlen_func)  # transformers looks at the kernel's signature
def half_flash_func(q, *args, **kwargs):
    """The same, of what the kernels take and no more."""
    check_call(q, *(kwargs[name] for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")))
    return flash_attn_varlen_func(q, *args, **kwargs)


def torch_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
):
    """The kernel that ships in PyTorch under flash-attn's arguments, for tests on a GPU."""
    assert causal
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return kernels.torch_varlen()(q, k, v, *lengths, softmax_scale, window_size[0] + 1 or None)[0]


def flash_attn_func(q, k, v, **kwargs):
    """The same of `(B, L, H, D)` queries, each row a segment."""
    rows, length_q, length_k = len(q), q.size(1), k.size(1)
    if "learnable_sink" in kwargs:  # so the fourth version calls it
        kwargs["s_aux"] = kwargs.pop("learnable_sink")
    output = flash_attn_varlen_func(
        *(x.flatten(0, 1) for x in (q, k, v)),
        torch.arange(rows + 1, dtype=torch.int32) * length_q,
        torch.arange(rows + 1, dtype=torch.int32) * length_k,
        length_q,
        length_k,
        **kwargs,
    )
    return output.unflatten(0, (rows, length_q))


def _attend(q, k, v, scale, causal, window_size, softcap=0.0, s_aux=None):
    """Output of one segment in the dtype of `q`, log-sum-exp and weights `(H, T, S)` of its scores in float32."""
    group = q.size(1) // k.size(1)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * (q.size(-1) ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    # Bottom right: the last query stands where the last key does
    distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))[None]
    left, right = window_size
    if causal:
        right = 0
    visible = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        visible &= distance <= left
    if right >= 0:
        visible &= distance >= -right
    scores = scores.masked_fill(~visible.to(scores.device), float("-inf"))
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.float().view(-1, 1, 1).expand(-1, len(q), 1)], -1)
    weights = scores.softmax(-1)[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", weights, v.float()).to(q.dtype), scores.logsumexp(-1), weights


def _aten_forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None, **windows):
    """`aten::_flash_attention_forward` of boundaries: output, log-sum-exp `(H, T)`, and three that tell nothing."""
    runs, window = check_arguments(q, k, v, cu_q, cu_k, max_q, max_k), _window(windows)
    assert runs[-1][0].stop == len(q), "queries beyond the last boundary are left as they were"
    outputs, lse, _ = zip(*(_attend(q[i], k[j], v[j], scale, is_causal, window) for i, j in runs), strict=True)
    return torch.cat(outputs), torch.cat(lse, 1), *(q.new_empty(0) for _ in range(3))


def _aten_backward(
    grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, rng_state, unused, *, scale=None, **windows
):
    """`aten::_flash_attention_backward`: what the kernels compute of the output and the weights, in float32."""
    gradients = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
    factor, group = q.size(-1) ** -0.5 if scale is None else scale, q.size(1) // k.size(1)
    for i, j in check_arguments(q, k, v, cu_q, cu_k, max_q, max_k):
        _, _, weights = _attend(q[i], k[j], v[j], scale, is_causal, _window(windows))
        above, (keys, values) = grad[i].float(), (x[j].float().repeat_interleave(group, 1) for x in (k, v))
        from_scores = torch.einsum("qhd,khd->hqk", above, values) - (above * out[i].float()).sum(-1).T[..., None]
        from_scores = weights * from_scores * factor
        gradients[0][i] = torch.einsum("hqk,khd->qhd", from_scores, keys)
        of_heads = (from_scores, q[i].float()), (weights, above)
        for total, (scores, states) in zip(gradients[1:], of_heads, strict=True):
            total[j] = torch.einsum("hqk,qhd->khd", scores, states).unflatten(1, (-1, group)).sum(2)
    return tuple(gradient.to(x.dtype) for gradient, x in zip(gradients, (q, k, v), strict=True))


def _window(windows):
    given = {name: value for name, value in windows.items() if value is not None}
    window = given.pop("window_size_left", -1), given.pop("window_size_right", -1)
    assert not given, f"nothing here knows of {given}"
    return window


@contextmanager
def varlen_on(device_type="cpu"):
    """
    Within this context, devices of a type have PyTorch's varlen kernel, and nothing else has.

    `varlen_attn`, the operator under it and its place in autograd and in checkpointing are PyTorch's own: only the two
    functions of ATen that hold the kernel are computed here, of CPU tensors. Gives the calls of `varlen_attn`, growing.
    """
    calls, varlen_attn = [], varlen.varlen_attn
    signature = inspect.signature(varlen_attn)

    @functools.wraps(varlen_attn)
    def watched(*args, **kwargs):
        calls.append(signature.bind(*args, **kwargs))
        check_call(*(calls[-1].arguments[name] for name in ("query", "cu_seq_q", "cu_seq_k", "max_q", "max_k")))
        return varlen_attn(*args, **kwargs)

    with ExitStack() as stack:
        aten = stack.enter_context(torch.library._scoped_library("aten", "IMPL"))
        aten.impl("_flash_attention_forward", _aten_forward, "CPU")
        aten.impl("_flash_attention_backward", _aten_backward, "CPU")
        why_not = lambda device: "" if device.type == device_type else f"{device.type} has no kernel"  # noqa: E731
        stack.enter_context(mock.patch.object(kernels, "why_no_varlen", why_not))
        stack.callback(kernels.torch_varlen.cache_clear)
        stack.enter_context(mock.patch.object(varlen, "varlen_attn", watched))
        kernels.torch_varlen.cache_clear()
        yield calls


def _register(implementation):
    """Hub kernels are registered as they are loaded."""
    if implementation not in AttentionInterface().valid_keys():
        AttentionInterface.register(implementation, AttentionInterface()["flash_attention_2"])
        AttentionMaskInterface.register(implementation, AttentionMaskInterface()["flash_attention_2"])


@contextmanager
def reference_flash(kernel=flash_attn_varlen_func):
    """Within this context, models load with `attn_implementation="flash_attention_2"`, and `kernel` is the kernel."""
    utils = modeling_flash_attention_utils

    def lazy_imports(implementation, *args, **kwargs):
        _register(implementation)
        return flash_attn_func, kernel, None, utils._pad_input, utils._unpad_input

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(utils, "_lazy_imports", lazy_imports))
        patches.enter_context(mock.patch.object(utils, "_loaded_implementation", None))
        patches.enter_context(mock.patch.object(PreTrainedModel, "_flash_attn_import_error", return_value=None))
        for module in (modeling_falcon, modeling_gpt_neo, modeling_gptj):  # they import it only where flash-attn is
            forward = utils._flash_attention_forward
            patches.enter_context(mock.patch.object(module, "_flash_attention_forward", forward, create=True))
        yield
