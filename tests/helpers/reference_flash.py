"""Flash attention in plain PyTorch, and a way to have transformers take it for the kernel.

Slow and obvious: one matrix of scores per segment, masked by comparing positions. What transformers does around the
kernel (which arguments it passes, and which it drops) is transformers' own code.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, modeling_flash_attention_utils
from transformers.models.falcon import modeling_falcon
from transformers.models.gpt_neo import modeling_gpt_neo
from transformers.models.gptj import modeling_gptj


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Attention of `(T, H, D)` queries over `(S, K, D)` keys, segment by segment, aligned to the bottom right.

    As the kernels, it leaves tokens beyond the last boundary uninitialised.
    """
    assert dropout_p == 0.0, "dropout is random: nothing to compare"
    boundaries_q, boundaries_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    assert max_seqlen_q == max(b - a for a, b in zip(boundaries_q, boundaries_q[1:], strict=False))
    assert max_seqlen_k == max(b - a for a, b in zip(boundaries_k, boundaries_k[1:], strict=False))
    assert boundaries_k[-1] == len(k) == len(v), "keys beyond the last boundary get no gradient from the kernels"
    outputs = []
    runs = zip(boundaries_q, boundaries_q[1:], boundaries_k, boundaries_k[1:], strict=False)
    for start_q, end_q, start_k, end_k in runs:
        assert end_q > start_q, "kernels hang on empty segments"
        outputs.append(
            _attend(
                q[start_q:end_q], k[start_k:end_k], v[start_k:end_k], softmax_scale, causal, window_size, softcap, s_aux
            )
        )
    outputs.append(q.new_full((len(q) - boundaries_q[-1], *q.shape[1:]), float("nan")))
    return torch.cat(outputs)


def torch_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """The kernel that ships in PyTorch under flash-attn's arguments, for tests on a GPU."""
    from torch.nn.attention.varlen import varlen_attn

    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    window = (window_size[0], 0 if causal else window_size[1])
    return varlen_attn(q, k, v, *lengths, scale=softmax_scale, window_size=window, enable_gqa=q.size(1) != k.size(1))


def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **kwargs) -> torch.Tensor:
    """The same of `(B, L, H, D)` queries, each row a segment."""
    rows, length_q, length_k = len(q), q.size(1), k.size(1)
    output = flash_attn_varlen_func(
        *(x.flatten(0, 1) for x in (q, k, v)),
        torch.arange(rows + 1) * length_q,
        torch.arange(rows + 1) * length_k,
        length_q,
        length_k,
        **kwargs,
    )
    return output.unflatten(0, (rows, length_q))


def _attend(q, k, v, scale, causal, window_size, softcap, s_aux):
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
    return torch.einsum("hqk,khd->qhd", weights, v.float()).to(q.dtype)


def _register(implementation: str) -> None:
    """Hub kernels are registered as they are loaded."""
    if implementation not in AttentionInterface().valid_keys():
        AttentionInterface.register(implementation, AttentionInterface()["flash_attention_2"])
        AttentionMaskInterface.register(implementation, AttentionMaskInterface()["flash_attention_2"])


@contextmanager
def reference_flash(kernel: Callable = flash_attn_varlen_func) -> Iterator[None]:
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
