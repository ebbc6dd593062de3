"""Work, memory and messages of processes that compute one flat batch together: run by `torchrun`, fails if too much."""

import os
import sys
from collections import Counter

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from trl.trainer.utils import add_fused_lm_head

from tests.helpers.tiny import make_model
from trl_paddingfree.flat.batch import FlatBatch
from trl_paddingfree.memory.saved_bytes import SavedBytes
from trl_paddingfree.model.architecture import recomputable_layers
from trl_paddingfree.model.flat_model import FlatModel
from trl_paddingfree.model.forward import flat_forward
from trl_paddingfree.model.routes import choose_route
from trl_paddingfree.model.sequence import SequenceGroup

HEADS, KEYS, SIZE, LAYERS = 8, 2, 16, 3
# Prompts and answers: a batch whose tokens, of which the answers are scored, divide by four
LENGTHS = ((192, 65, 64), (130, 31, 96))
# What a process keeps beside its share: boundaries, what is scored, and repeated key heads
KEPT_BESIDE = 0.1
READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "item")


class CountedReads(TorchDispatchMode):
    """Counts operators for whose answer the host waits."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.counts[name] += name in READS
        return func(*args, **(kwargs or {}))


def make_batch(prefix_sharing: bool) -> FlatBatch:
    torch.manual_seed(1)
    rows, labels = [], []
    for prompt, *answers in LENGTHS:
        start = torch.randint(5, 60, (prompt,)).tolist()
        for answer in answers:
            rows.append(start + torch.randint(5, 60, (answer,)).tolist())
            labels.append([-100] * prompt + rows[-1][prompt:])
    return FlatBatch.from_rows(rows, labels, prefix_sharing=prefix_sharing)


def answer(flat: FlatModel, batch: FlatBatch) -> torch.Tensor:
    """The loss of a batch, without the comparison of rows that a CPU waits for."""
    rows = batch.input_ids[0][batch.row_index]
    labels = torch.full_like(rows, -100).masked_fill(batch.row_mask, 1)
    return flat_forward(flat, batch, input_ids=rows, labels=labels, fused_lm_head=True, use_cache=False).log_probs.sum()


def of_all(value: float) -> list[float]:
    found = [torch.zeros(1, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(found, torch.tensor([value], dtype=torch.float64))
    return [x.item() for x in found]


def kept_bytes(flat: FlatModel, batch: FlatBatch) -> int:
    counter = SavedBytes(flat.model, recomputable_layers(flat.model))
    with counter.counting():
        loss = answer(flat, batch)
    kept = sum(counter.total(layer) for layer in range(-1, LAYERS))
    del loss
    return kept


def work(flat: FlatModel, batch: FlatBatch) -> int:
    with FlopCounterMode(display=False) as counter:
        answer(flat, batch).backward()
    return counter.get_total_flops()


def reads(flat: FlatModel, batch: FlatBatch) -> int:
    with CountedReads() as counted:
        answer(flat, batch)
    return counted.counts.total()


def sent_bytes(flat: FlatModel, batch: FlatBatch, rank: int) -> int:
    """Bytes to other processes, of a forward and a backward pass."""
    found, exchange = [0], dist.all_to_all_single

    def counted(output, states, received, sent, **kwargs):
        found[0] += sum(n for i, n in enumerate(sent) if i != rank) * states.element_size()
        return exchange(output, states, received, sent, **kwargs)

    dist.all_to_all_single = counted
    try:
        answer(flat, batch).backward()
    finally:
        dist.all_to_all_single = exchange
    return found[0]


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    group = SequenceGroup(dist.group.WORLD, torch.device("cpu"))
    sizes = {"hidden_size": HEADS * SIZE, "intermediate_size": 256, "num_hidden_layers": LAYERS}
    model = make_model(num_attention_heads=HEADS, num_key_value_heads=KEYS, **sizes)
    add_fused_lm_head(model)
    flat = FlatModel.install(model, choose_route(model))
    for prefix_sharing in (False, True):
        batch = make_batch(prefix_sharing)
        found = {}
        for name, member in (("whole", None), ("sliced", group)):
            flat.group = member
            found[name] = [measure(flat, batch) for measure in (kept_bytes, work, reads)]
        (kept, flops, waits), (own, part, own_waits) = found["whole"], found["sliced"]
        shares, total = [x / kept for x in of_all(own)], sum(of_all(part)) / flops
        print(f"{group.size=} {prefix_sharing=} {shares=} {total=} {waits=} {own_waits=}", file=sys.stderr)
        assert max(shares) <= (1 + KEPT_BESIDE) / group.size, shares
        assert abs(total - 1) < 0.01, total
        assert own_waits <= waits + 1  # the seed of this forward pass, which the CPU draws
        tokens = batch.input_ids.size(1)
        assert tokens % group.size == 0
        heads = HEADS + max(KEYS, group.size)
        expected = tokens // group.size * 2 * heads * SIZE * 4 * (group.size - 1) // group.size
        assert sent_bytes(flat, batch, group.rank) == expected * LAYERS * 2
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
