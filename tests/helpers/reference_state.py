"""Kernels of layers that carry state, in plain PyTorch: what `causal-conv1d`, `flash-linear-attention` and `mamba-ssm`
do with the boundaries of a flat row, and with initial states, by running transformers' own functions segment by
segment."""

import functools
import sys
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from unittest import mock

import torch

# transformers' names of the functions for which it looks for a kernel, with the dimension of the tokens
_FUNCTIONS = {
    "causal_conv1d_fn": 2,
    "torch_chunk_gated_delta_rule": 1,
    "chunk_kimi_delta_attention": 1,
    "mamba2_chunk_scan": 1,
}


def by_segment(function, dim):
    """`function` of one row, called for each segment that `seq_idx` or `cu_seqlens` tell of."""

    @functools.wraps(function)
    def call(states, *args, seq_idx=None, cu_seqlens=None, initial_state=None, **kwargs):
        if cu_seqlens is not None:
            boundaries = cu_seqlens.tolist()
        elif seq_idx is not None:
            _, lengths = seq_idx[0].unique_consecutive(return_counts=True)
            boundaries = [0, *lengths.cumsum(0).tolist()]
        else:
            return function(states, *args, **kwargs)
        assert "chunk_size" not in kwargs or function.__name__ == "mamba2_chunk_scan"  # FLA's kernels have none
        total, outputs, finals = states.size(dim), [], []
        assert boundaries[-1] == total

        def cut(x, first, last):
            has_tokens = isinstance(x, torch.Tensor) and x.ndim > 2 and x.size(dim) == total
            return x.narrow(dim, first, last - first) if has_tokens else x

        for i, (first, last) in enumerate(pairwise(boundaries)):
            sliced = {name: cut(x, first, last) for name, x in kwargs.items()}
            if initial_state is not None:
                assert initial_state.shape[0] == len(boundaries) - 1
                sliced["initial_state"] = initial_state[i : i + 1]
            output = function(*(cut(x, first, last) for x in (states, *args)), **sliced)
            outputs.append(output[0] if isinstance(output, tuple) else output)
            finals.append(output[1] if isinstance(output, tuple) else None)
        result = torch.cat(outputs, dim)
        if not isinstance(output, tuple):
            return result
        return result, torch.cat(finals) if kwargs.get("output_final_state") else None

    return call


def without_gradient_of_state(scan):
    """The first Mamba's `scan` as its kernel: no gradient goes through the state in which it ends."""

    @functools.wraps(scan)
    def call(*args, **kwargs):
        result = scan(*args, **kwargs)
        return (result[0], result[1].detach()) if isinstance(result, tuple) else result

    return call


@contextmanager
def reference_state_kernels(model):
    """Within this context, `model` has kernels that keep the segments of a flat row apart."""
    from trl_paddingfree.recurrent import kernels  # a folder that may be deleted: others than its tests come here, too

    module = sys.modules[type(model.get_decoder()).__module__]
    with mock.patch.object(kernels, "is_installed", return_value=True), ExitStack() as patches:
        for name, dim in _FUNCTIONS.items():
            if hasattr(getattr(module, name, None), "__wrapped__"):  # LFM3's convolution has no kernel
                function = by_segment(getattr(module, name).__wrapped__, dim)
                patches.enter_context(mock.patch.object(module, name, function))
        if hasattr(module, "mamba_selective_scan"):
            scan = without_gradient_of_state(module.mamba_selective_scan)
            patches.enter_context(mock.patch.object(module, "mamba_selective_scan", scan))
        name = "mamba2_split_conv1d_scan_combined"  # the fused kernel of training; without it the parts are called
        if hasattr(module, name):
            patches.enter_context(mock.patch.object(module, name, return_value=None))
        yield
