"""The backends: ways to compute attention over a flat batch. What speaks against each for a model, `routes.py` says."""

from collections.abc import Callable
from typing import Literal, get_args

from ..flat.layout import Attended
from .attention import segment_attention
from .kernels import flash_attention, varlen_attention

# Attention over a flat batch: called with its layout, the implementation that the model was loaded with, the module
# that calls attention, query `(1, H, T, D)`, key and value `(1, K, T, D)`, and keyword arguments of transformers'
# layers. Returns `(1, T, H, D)`, and no weights
FlatAttention = Callable[..., Attended]
BackendName = Literal["flash", "varlen", "segment", "positions", "mask"]
# Fastest first
BACKENDS: tuple[BackendName, ...] = get_args(BackendName)
# Those that replace the model's attention function; the others keep it, and pass it positions or a dense mask
ATTENTION: dict[BackendName, FlatAttention] = {
    "flash": flash_attention,
    "varlen": varlen_attention,
    "segment": segment_attention,
}
ATTENTION_BACKENDS = tuple(ATTENTION)
DESCRIPTIONS: dict[BackendName, str] = {
    "flash": "{loaded_with} over segments",
    "varlen": "PyTorch's flash attention kernel over segments",
    "segment": "{loaded_with} over segments of like shape",
    "positions": "{loaded_with}, told of sequences by their `position_ids`",
    "mask": "{loaded_with} under a dense 4-D mask",
}
