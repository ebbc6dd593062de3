"""What flash attention keeps for the backward pass, counted where there is no GPU to run it."""

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from .. import upstream

NAME = "kernel_bytes"


class KernelBytes(torch.autograd.Function):
    """
    Saves what the kernels save, and computes nothing: there is no gradient through it.

    That is queries, keys and values as they are given, the output, and one float per query and head. Of keys that
    branches share, PyTorch's attention on CPUs keeps more: each head once for every query head that reads it.
    """

    @staticmethod
    def forward(ctx, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output = query.new_zeros(*query.shape[:3], value.size(-1))
        ctx.save_for_backward(query, key, value, output, query.new_zeros(query.shape[:3], dtype=torch.float32))
        return output


def _attend(module, query, key, value, attention_mask, **kwargs):
    return KernelBytes.apply(query, key, value).transpose(1, 2), None


def keep_as_kernels(model: PreTrainedModel) -> None:
    """Have a model keep what flash attention would, from its next forward pass on, if its attention can be replaced."""
    if upstream.takes_attention_function(model):
        AttentionInterface.register(NAME, _attend)
        AttentionMaskInterface.register(NAME, upstream.mask_function("sdpa"))
        upstream.set_attn_implementation(model, NAME)
