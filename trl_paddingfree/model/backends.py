"""The backends: the ways to compute attention over a flat batch, and the reasons against each for a model."""

from typing import Literal, get_args

import torch
from transformers import PreTrainedModel

from .. import upstream
from . import architecture

BackendName = Literal["flash", "varlen", "segment", "positions", "mask"]
# Fastest first
BACKENDS: tuple[BackendName, ...] = get_args(BackendName)
# Those that replace the model's attention function; the others leave it, and give it positions or a dense mask
ATTENTION_BACKENDS: tuple[BackendName, ...] = ("flash", "varlen", "segment")

_DESCRIPTIONS: dict[BackendName, str] = {
    "flash": "{previous} over segments",
    "varlen": "PyTorch's flash attention kernel over segments",
    "segment": "{previous} over segments of like shape",
    "positions": "{previous}, told of sequences by their `position_ids`",
    "mask": "{previous} under a dense 4-D mask",
}


def describe(backend: BackendName, previous: str) -> str:
    """What a backend does on a model that was loaded with the attention implementation `previous`, in words."""
    return f"{backend}: {_DESCRIPTIONS[backend].format(previous=previous)}"


def takes_boundaries(previous: str) -> bool:
    """Whether an attention implementation is flash attention or comes from the hub: it takes boundaries, not masks."""
    return "flash" in previous or "/" in previous


def has_varlen_kernel(device: torch.device) -> bool:
    """Whether PyTorch has a varlen kernel for a device. Whoever needs to know asks here: tests answer for others."""
    return device.type == "cuda"


def slower_backends(backend: BackendName, previous: str) -> list[BackendName]:
    """Backends that ask less of a model than `backend`: its own attention, per segment, or told of sequences."""
    slower: list[BackendName] = ["segment"] if backend == "varlen" else []
    slower.append("positions" if takes_boundaries(previous) else "mask")
    return [name for name in slower if name != backend]


def reasons_against(
    model: PreTrainedModel, previous: str, dtype: torch.dtype, device: torch.device
) -> dict[BackendName, list[str]]:
    """Why each backend cannot serve a model loaded with `previous` whose attention runs in `dtype` on `device`."""
    reasons: dict[BackendName, list[str]] = {name: [] for name in BACKENDS}
    if not upstream.takes_attention_function(model):
        for name in ATTENTION_BACKENDS:
            reasons[name].append(f"{type(model).__name__} does not use transformers' `AttentionInterface`")
    if takes_boundaries(previous):
        reasons["varlen"].append(f"the model was loaded with `attn_implementation={previous!r}`, which does the same")
        for name in ("segment", "mask"):
            reasons[name].append(f"`attn_implementation={previous!r}` takes no mask: load the model with 'sdpa'")
    else:
        for name in ("flash", "positions"):
            reasons[name].append(
                f"the model was loaded with `attn_implementation={previous!r}`: load it with 'flash_attention_2' (`pip "
                "install flash-attn`), 'flash_attention_3' or a hub kernel"
            )
    if previous != "sdpa":
        reasons["varlen"].append(f"it stands in for 'sdpa', and the model was loaded with {previous!r}")
    if not has_varlen_kernel(device):
        reasons["varlen"].append(f"the model is on {device.type}, the kernel needs CUDA")
    if dtype not in (torch.float16, torch.bfloat16):
        reasons["varlen"].append(f"attention runs in {dtype}, the kernel needs float16 or bfloat16")
    if dropout := architecture.attention_dropout(model):
        reasons["varlen"].append(
            f"attention has a dropout of {dropout}, and the kernel has none: set it to 0 in the model's configuration"
        )
    if previous == "flex_attention":
        for name in ("segment", "mask"):
            reasons[name].append("flex_attention takes block masks: load the model with 'sdpa'")
    return reasons
