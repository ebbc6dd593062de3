"""
Answers and gradients of layers that carry state, whose processes compute slices of one flat batch: run by `torchrun`
with names of families. Fails if they differ from those of one process.
"""

import os
import sys
from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist

from tests.helpers.architectures import tiny_model, with_head
from tests.helpers.flat_and_padded import log_probs_and_gradients, tree
from tests.helpers.float64 import TOLERANCE, float64_throughout, in_float64
from tests.helpers.reference_state import reference_state_kernels
from tests.runs import gradient_differences, largest_of
from trl_paddingfree import FlatBatch
from trl_paddingfree.core.model.flat_model import FlatModel
from trl_paddingfree.core.model.routes import choose_route
from trl_paddingfree.groups.check import refuse_unshareable
from trl_paddingfree.groups.sequence import SequenceGroup, share_batches

PLAIN = (
    "qwen3_next olmo_hybrid bailing_hybrid mamba falcon_mamba mamba2 bamba falcon_h1 nemotron_h granitemoehybrid zamba "
    "zamba2 jamba lfm2 lfm2_moe lfm3 qwen3_5_text"
)
# Families, and options of some that have heads in groups, or heads that do not divide
FAMILIES = {
    **{name: (name, {}) for name in PLAIN.split()},
    "kimi_linear": ("kimi_linear", {"linear_num_heads": 4}),
    "qwen3_5_text, 6 and 3 heads": ("qwen3_5_text", {"linear_num_value_heads": 6, "linear_num_key_heads": 3}),
    "mamba2, 2 groups": ("mamba2", {"n_groups": 2}),
    "falcon_h1, 2 groups": ("falcon_h1", {"mamba_n_groups": 2}),
}
# Rows of fewer tokens than processes, of one token in each slice, and beyond a chunk of a recurrence
SHORT = ([[5]], [[5, 6]], [[5, 6, 7], [5, 8]])


def batches(seed):
    drawn = torch.randint(1, 96, (150,), generator=torch.Generator().manual_seed(seed)).tolist()
    return [tree(seed), [drawn[:90] + drawn[100:130], drawn[:90] + drawn[130:]], *SHORT]


def answered(flat, rows, prefix_sharing):
    batch = FlatBatch.from_rows(rows, rows, prefix_sharing=prefix_sharing)
    given = batch.input_ids[0][batch.row_index]
    labels = given.masked_fill(~batch.row_mask, -100)
    return log_probs_and_gradients(flat.model, input_ids=given, labels=labels, flat_batch=batch)


def as_engines_average(gradients, model, size):
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            gradient = gradients.get(name, torch.zeros_like(parameter))
            dist.all_reduce(gradient)
            found[name] = gradient / size
    return found


@float64_throughout()
def compare(name, seed, group, has_kernels):
    model_type, options = FAMILIES[name]
    model = with_head(in_float64(tiny_model(model_type, seed=seed, **options))).train()
    with reference_state_kernels(model) if has_kernels else nullcontext():
        route = choose_route(model)
        refuse_unshareable(model, route, group.size)
        for prefix_sharing, reentrant in ((True, None), (False, True), (True, False)):
            flat = FlatModel.install(model, replace(route, prefix_sharing=prefix_sharing))
            if reentrant is not None:
                model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            if reentrant:
                model.enable_input_require_grads()
            for rows in batches(seed):
                share_batches(flat, None)
                expected, whole = answered(flat, rows, prefix_sharing)
                share_batches(flat, group)
                said, own = answered(flat, rows, prefix_sharing)
                where = f"{name}, {prefix_sharing=}, {reentrant=}, {has_kernels=}, rows of {[*map(len, rows)]}"
                if expected.numel():
                    off = float((said - expected).abs().max() / expected.abs().max().clamp(min=1e-9))
                    assert off <= TOLERANCE, f"{where}: {off}"
                own = as_engines_average(own, model, group.size)
                differences = gradient_differences(whole, {x: own[x] for x in whole}, largest_of(whole))
                wrong = {x: y for x, y in differences.items() if not y <= TOLERANCE}
                assert not wrong, f"{where}: {wrong}"
                assert not any(own[x].abs().max() for x in own.keys() - whole.keys()), where


def main():
    dist.init_process_group("gloo")
    seed, *names = sys.argv[1:]
    group = SequenceGroup(dist.group.WORLD, torch.device("cpu"))
    for name in names or FAMILIES:
        for has_kernels in (False, True):
            compare(name, int(seed), group, has_kernels)
    os._exit(0)


if __name__ == "__main__":
    main()
