"""
Answers, work, memory and messages of processes that compute one flat batch together: run by `torchrun`, on GPUs if
there are enough, else on the CPU. Fails if answers differ from those of one process, or if anything is too much.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tests.helpers.architectures import tiny_model
from tests.helpers.flat_and_padded import flat_model
from tests.helpers.tiny import make_model
from trl_paddingfree.budgets.saved_bytes import SavedBytes
from trl_paddingfree.core.flat.batch import FlatBatch
from trl_paddingfree.core.model.flat_model import FlatModel
from trl_paddingfree.core.model.forward import flat_forward
from trl_paddingfree.groups.exchange import Halo
from trl_paddingfree.groups.sequence import SequenceGroup, share_batches
from trl_paddingfree.recomputable import recomputable_layers

HEADS, KEYS, SIZE, LAYERS, REACH = 8, 2, 16, 3, 3
# Prompts and answers: a batch whose tokens, of which the answers are scored, divide by four
LENGTHS = ((192, 65, 64), (130, 31, 96))
# What a process keeps beside its share: boundaries, what is scored, and repeated key heads
KEPT_BESIDE = 0.1
# Slices are products of other shapes, which kernels may round differently
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "item")


@dataclass
class Sent:
    """What layers of a model send: numbers of each token of a slice in `size` slices, and channels of a convolution."""

    layers: int
    numbers: Callable[[int], int]
    channels: int = 0
    in_float32: int = 0  # of the numbers, whatever the dtype


def models(dtype):
    sizes = {"hidden_size": HEADS * SIZE, "intermediate_size": 256, "num_hidden_layers": LAYERS, "dtype": dtype}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KEYS}
    attention = Sent(1, lambda size: 2 * (HEADS + max(KEYS, size)) * SIZE)
    of_keys = {"linear_num_key_heads": KEYS, "linear_key_head_dim": SIZE}
    of_values = {"linear_num_value_heads": HEADS, "linear_value_head_dim": SIZE}
    state = {"num_heads": HEADS, "head_dim": 2 * SIZE, "state_size": SIZE, "n_groups": 1}

    def kinds(kind):
        return {"layer_types": [kind] * (LAYERS - 1) + ["full_attention"], "head_dim": SIZE}

    delta_rule = tiny_model("qwen3_5_text", **sizes, **heads, **of_keys, **of_values, **kinds("linear_attention"))
    convolution = tiny_model(
        "lfm2", conv_L_cache=REACH + 1, block_auto_adjust_ff_dim=False, **sizes, **heads, **kinds("conv")
    )
    scan = tiny_model("mamba2", expand=2, **sizes, **state)
    channels = tiny_model("mamba", expand=2, state_size=SIZE, **sizes)
    # Of the delta rule: queries and keys, values and outputs, decays and steps; of the scan: states and outputs, steps,
    # and what the state reads and is read by
    rule = Sent(LAYERS - 1, lambda size: attention.numbers(size) + 2 * HEADS, (2 * KEYS + HEADS) * SIZE, HEADS)
    scans = Sent(LAYERS, lambda size: 2 * HEADS * 2 * SIZE + HEADS + 2 * size * SIZE, 2 * HEADS * SIZE + 2 * SIZE)
    return {
        "attention": (make_model(**sizes, **heads), [Sent(LAYERS, attention.numbers)]),
        "delta rule": (delta_rule, [attention, rule]),
        "short convolution": (convolution, [attention, Sent(LAYERS - 1, lambda size: 0, HEADS * SIZE)]),
        "scan": (scan, [scans]),
        "scan of channels": (channels, [Sent(LAYERS, lambda size: 3 * 256 + 2 * size * SIZE, 256)]),
    }


def expected_bytes(sent, batch, group, dtype):
    """Bytes to other processes, of a forward and a backward pass, to the byte."""
    total, tokens = 0, batch.input_ids.size(1) // group.size
    halo = Halo.of(batch.layout, REACH, group.rank, group.size)
    for of in sent:
        bytes_of_token = (of.numbers(group.size) - of.in_float32) * dtype.itemsize + of.in_float32 * 4
        exchanged = 2 * tokens * bytes_of_token * (group.size - 1) // group.size
        total += of.layers * (exchanged + (sum(halo.sent) + sum(halo.received)) * of.channels * dtype.itemsize)
    return total


class CountedReads(TorchDispatchMode):
    """Counts operators for whose answer the host waits."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func.overloadpacket.__name__ in READS
        return func(*args, **(kwargs or {}))


def make_batch(prefix_sharing):
    torch.manual_seed(1)
    rows, labels = [], []
    for prompt, *answers in LENGTHS:
        start = torch.randint(5, 60, (prompt,)).tolist()
        for answer in answers:
            rows.append(start + torch.randint(5, 60, (answer,)).tolist())
            labels.append([-100] * prompt + rows[-1][prompt:])
    return FlatBatch.from_rows(rows, labels, prefix_sharing=prefix_sharing)


def log_probs(flat, batch):
    """What the model says of a batch, without the comparison of rows that a CPU waits for."""
    rows = batch.input_ids[0][batch.row_index]
    labels = torch.full_like(rows, -100).masked_fill(batch.row_mask, 1)
    return flat_forward(flat, batch, input_ids=rows, labels=labels, fused_lm_head=True, use_cache=False).log_probs


def of_all(value, device):
    found = [torch.zeros(1, dtype=torch.float64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(found, torch.tensor([value], dtype=torch.float64, device=device))
    return [x.item() for x in found]


def kept_bytes(flat, batch):
    counter = SavedBytes(flat.model, recomputable_layers(flat.model))
    with counter.counting():
        loss = log_probs(flat, batch).sum()
    kept = sum(counter.total(layer) for layer in range(-1, LAYERS))
    del loss
    return kept


def work(flat, batch):
    with FlopCounterMode(display=False) as counter:
        log_probs(flat, batch).sum().backward()
    return counter.get_total_flops()


def reads(flat, batch):
    with CountedReads() as counted:
        log_probs(flat, batch)
    return counted.number


def sent_bytes(flat, batch, rank):
    """Bytes to other processes, of a forward and a backward pass."""
    found, exchange = [0], dist.all_to_all_single

    def counted(output, states, received, sent, **kwargs):
        if states.ndim == 1:  # attention's, not what is gathered of scored tokens
            found[0] += sum(n for i, n in enumerate(sent) if i != rank) * states.element_size()
        return exchange(output, states, received, sent, **kwargs)

    with mock.patch.object(dist, "all_to_all_single", counted):
        log_probs(flat, batch).sum().backward()
    return found[0]


def compare(kind, flat, batch, group, exchanged):
    device, dtype, found, said = group.device, flat.model.dtype, {}, []
    for name, member in (("whole", None), ("sliced", group)):
        share_batches(flat, member)
        found[name] = [measure(flat, batch) for measure in (kept_bytes, work, reads)]
        said.append(log_probs(flat, batch).detach())
    (kept, flops, waits), (own, part, own_waits) = found["whole"], found["sliced"]
    shares, parts = ([x / all_of_it for x in of_all(x, device)] for x, all_of_it in ((own, kept), (part, flops)))
    sent, shared = sent_bytes(flat, batch, group.rank), batch.layout.segments.is_shared
    figures = {"shared": shared, "kept": shares, "operations": parts, "sent": sent, "waits": (waits, own_waits)}
    print(f"{kind}, {group.size} processes: {figures}", file=sys.stderr)
    assert (said[0] - said[1]).abs().max() <= ROUNDING[dtype] * said[0].abs().max()
    assert max(shares) <= (1 + KEPT_BESIDE) / group.size, shares
    # A convolution reaches a few tokens back from each slice, and PyTorch counts its gradients as those of all channels
    assert abs(sum(parts) - 1) < (0.01 if kind == "attention" else 0.02), parts
    assert own_waits <= waits + 1  # the seed of this forward pass, which the CPU draws
    assert batch.input_ids.size(1) % group.size == 0
    assert sent == expected_bytes(exchanged, batch, group, dtype)


def main():
    rank, world = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpus = torch.cuda.device_count() >= world
    device, dtype = (torch.device("cuda", rank), torch.bfloat16) if on_gpus else (torch.device("cpu"), torch.float32)
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    group = SequenceGroup(dist.group.WORLD, device)
    made = models(dtype)
    for kind, (model, exchanged) in made.items():
        flat = flat_model(model.to(device))
        # Layers with a state go along a tree either way, and take their time
        for prefix_sharing in (False, True)[world == 2 and kind != "attention" :]:
            compare(kind, flat, make_batch(prefix_sharing).to(device), group, exchanged)
    model, _ = made["attention"]
    flat = FlatModel.of(model)
    torch.manual_seed(0)
    with group.drawing_apart(model):  # what is dropped in one slice says nothing of what is dropped in another
        own = of_all(torch.rand((), device=device).item(), device)
    assert len(set(own)) == group.size
    assert len(set(of_all(torch.rand(()).item(), device))) == 1
    for rows in ([[5]], [[5, 6, 7]]):  # of fewer tokens than processes, and none or few to score
        batch, said = FlatBatch.from_rows(rows, rows).to(device), []
        for member in (None, group):
            share_batches(flat, member)
            model.zero_grad()
            said.append(log_probs(flat, batch))
            said[-1].sum().backward()
        assert (said[0] - said[1]).abs().sum() <= ROUNDING[dtype] * len(rows[0]) * 10
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
