"""
Answers, work, memory and messages of processes that compute one flat batch together: run by `torchrun`, on GPUs if
there are enough, else on the CPU. Fails if answers differ from those of one process, or if anything is too much.
"""

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
# Slices are products of other shapes, which kernels may round differently
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
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


def log_probs(flat: FlatModel, batch: FlatBatch) -> torch.Tensor:
    """What the model says of a batch, without the comparison of rows that a CPU waits for."""
    rows = batch.input_ids[0][batch.row_index]
    labels = torch.full_like(rows, -100).masked_fill(batch.row_mask, 1)
    return flat_forward(flat, batch, input_ids=rows, labels=labels, fused_lm_head=True, use_cache=False).log_probs


def answer(flat: FlatModel, batch: FlatBatch) -> torch.Tensor:
    return log_probs(flat, batch).sum()


def of_all(value: float, device: torch.device) -> list[float]:
    found = [torch.zeros(1, dtype=torch.float64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(found, torch.tensor([value], dtype=torch.float64, device=device))
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
        if states.ndim == 1:  # attention's, not what is gathered of scored tokens
            found[0] += sum(n for i, n in enumerate(sent) if i != rank) * states.element_size()
        return exchange(output, states, received, sent, **kwargs)

    dist.all_to_all_single = counted
    try:
        answer(flat, batch).backward()
    finally:
        dist.all_to_all_single = exchange
    return found[0]


def main() -> None:
    rank, world = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpus = torch.cuda.device_count() >= world
    device, dtype = (torch.device("cuda", rank), torch.bfloat16) if on_gpus else (torch.device("cpu"), torch.float32)
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    torch.set_num_threads(1)
    group = SequenceGroup(dist.group.WORLD, device)
    sizes = {"hidden_size": HEADS * SIZE, "intermediate_size": 256, "num_hidden_layers": LAYERS}
    model = make_model(num_attention_heads=HEADS, num_key_value_heads=KEYS, dtype=dtype, **sizes).to(device)
    add_fused_lm_head(model)
    flat = FlatModel.install(model, choose_route(model))
    for prefix_sharing in (False, True):
        batch, found, said = make_batch(prefix_sharing).to(device), {}, []
        for name, member in (("whole", None), ("sliced", group)):
            flat.group = member
            found[name] = [measure(flat, batch) for measure in (kept_bytes, work, reads)]
            said.append(log_probs(flat, batch).detach())
        (kept, flops, waits), (own, part, own_waits) = found["whole"], found["sliced"]
        assert (said[0] - said[1]).abs().max() <= ROUNDING[dtype] * said[0].abs().max()
        shares, total = [x / kept for x in of_all(own, device)], sum(of_all(part, device)) / flops
        print(f"{group.size=} {prefix_sharing=} {shares=} {total=} {waits=} {own_waits=}", file=sys.stderr)
        assert max(shares) <= (1 + KEPT_BESIDE) / group.size, shares
        assert abs(total - 1) < 0.01, total
        assert own_waits <= waits + 1  # the seed of this forward pass, which the CPU draws
        tokens = batch.input_ids.size(1)
        assert tokens % group.size == 0
        heads = HEADS + max(KEYS, group.size)
        expected = tokens // group.size * 2 * heads * SIZE * dtype.itemsize * (group.size - 1) // group.size
        assert sent_bytes(flat, batch, group.rank) == expected * LAYERS * 2
    torch.manual_seed(0)
    with group.drawing_apart(model):  # what is dropped in one slice says nothing of what is dropped in another
        own = of_all(torch.rand((), device=device).item(), device)
    assert len(set(own)) == group.size
    assert len(set(of_all(torch.rand(()).item(), device))) == 1
    for rows in ([[5]], [[5, 6, 7]]):  # of fewer tokens than processes, and none or few to score
        batch, said = FlatBatch.from_rows(rows, rows).to(device), []
        for flat.group in (None, group):
            model.zero_grad()
            said.append(log_probs(flat, batch))
            said[-1].sum().backward()
        said[1] = said[1].detach()
        assert (said[0] - said[1]).abs().sum() <= ROUNDING[dtype] * len(rows[0]) * 10
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
