"""The best attention that padded TRL can have where flash-attn is not installed: the same kernel that we use.

transformers' flash attention route takes the padding out before attention and puts it back after. This does the same
with the flash attention kernel that ships in PyTorch, and works out the indices once per batch rather than per layer.
"""

import importlib.util
from functools import partial

import torch
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface

from trl_paddingfree.core.model.kernels import sdpa_dtype, torch_varlen

UNPADDED, TWO_BOUNDARIES = "unpadded_varlen", "unpadded_varlen_two_boundaries"
# Attention implementations that compute no padding
WITHOUT_PADDING = (UNPADDED, "flash_attention_2")


class Unpadding:
    """Where the tokens of padded rows are: of a mask of shape `(R, L)`, whether row `r` has a token `l`."""

    def __init__(self, mask: torch.Tensor):
        lengths = mask.sum(1, dtype=torch.int32)
        self.index = mask.flatten().nonzero().flatten()
        self.cu_seqlens = pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        self.cu_seqlens_copy = self.cu_seqlens.clone()
        self.max_length = int(lengths.max())

    @classmethod
    def of(cls, mask: torch.Tensor) -> "Unpadding":
        """The unpadding of a mask, kept on the mask: all layers of a forward pass get the same one."""
        if not hasattr(mask, "unpadding"):
            mask.unpadding = cls(mask.bool())  # type: ignore[attr-defined]
        return mask.unpadding  # type: ignore[attr-defined]


def unpadded_varlen(
    module,
    query,
    key,
    value,
    attention_mask,
    scaling=None,
    sliding_window=None,
    cu_seq_lens_q=None,
    two_boundaries=False,
    **kwargs,
):
    """Attention over padded rows `(R, heads, L, D)`, or over TRL's padding-free row, by PyTorch's varlen kernel."""
    rows, _, length, _ = query.shape
    index = None
    if cu_seq_lens_q is not None:
        boundaries, longest = (cu_seq_lens_q, cu_seq_lens_q), kwargs["max_length_q"]
    elif attention_mask is None:
        cu_seqlens = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=query.device)
        boundaries, longest = (cu_seqlens, cu_seqlens.clone() if two_boundaries else cu_seqlens), length
    else:
        unpadding = Unpadding.of(attention_mask)
        index, longest, cu_seqlens = unpadding.index, unpadding.max_length, unpadding.cu_seqlens
        boundaries = cu_seqlens, unpadding.cu_seqlens_copy if two_boundaries else cu_seqlens
    states = [x.transpose(1, 2).flatten(0, 1).to(sdpa_dtype(query)) for x in (query, key, value)]
    if index is not None:
        states = [x.index_select(0, index) for x in states]
    output, _ = torch_varlen()(*states, *boundaries, longest, longest, scaling, sliding_window)
    if index is not None:
        output = output.new_zeros(rows * length, *output.shape[1:]).index_copy(0, index, output)
    return output.unflatten(0, (rows, length)), None


def has_varlen(device: str, dtype: torch.dtype) -> bool:
    """Whether PyTorch's varlen kernel computes attention on this device in this dtype."""
    return device.startswith("cuda") and dtype in (torch.float16, torch.bfloat16)


def baseline_attention(device: str, dtype: torch.dtype) -> str:
    """The fastest attention implementation for padded TRL on this machine, by name."""
    if not has_varlen(device, dtype):
        return "sdpa"
    unpadded = register_unpadded()
    return "flash_attention_2" if importlib.util.find_spec("flash_attn") else unpadded


def register_unpadded() -> str:
    """Make [`unpadded_varlen`] an attention implementation, and return its name."""
    AttentionInterface.register(UNPADDED, unpadded_varlen)
    AttentionInterface.register(TWO_BOUNDARIES, partial(unpadded_varlen, two_boundaries=True))
    for name in (UNPADDED, TWO_BOUNDARIES):
        AttentionMaskInterface.register(name, AttentionMaskInterface()["flash_attention_2"])
    return UNPADDED


def describe_attention(name: str) -> str:
    """What an attention implementation is, for the report."""
    return {
        UNPADDED: "PyTorch's varlen flash attention over unpadded positions, indices made once per batch",
        "flash_attention_2": "flash-attn 2 over unpadded positions",
        "sdpa": "scaled_dot_product_attention under a mask",
    }.get(name, name)
