"""Padded and flat training side by side on each of several processes, under DDP, FSDP2 and transformers' `Trainer`."""

import copy
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

from tests.anywhere.test_calls import assert_is_flat, rows
from tests.helpers.tiny import make_model, make_tokenizer
from trl_paddingfree import FlatModel, padding_free

# float32, three steps: sums over some hundred terms in another order
TOLERANCE = 1e-5


def sharded(model):
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def trained(model, wrap):
    """The weights after three steps in a loop, whole."""
    wrapped = wrap(model.train())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(3):
        given = rows("right", 100 * step + dist.get_rank())  # others on each process
        wrapped(**given).loss.backward()  # the head computes rows
        labels = given.pop("labels")
        logits = wrapped(**given).logits  # and flat tokens
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in wrapped.parameters()]


def by_trainer(model):
    """The weights after three steps of transformers' trainer."""
    examples = [{"input_ids": row[row >= 0].tolist()} for draw in range(6) for row in rows("right", draw)["labels"]]
    options = {"max_steps": 3, "per_device_train_batch_size": 4, "optim": "sgd", "learning_rate": 0.1}
    args = TrainingArguments(tempfile.mkdtemp(), use_cpu=True, report_to="none", save_strategy="no", **options)
    trainer = Trainer(model, args, DataCollatorForLanguageModeling(make_tokenizer(), mlm=False), examples)
    trainer.train()
    assert trainer.accelerator.num_processes == dist.get_world_size()
    return [p.detach() for p in model.parameters()]


def main():
    dist.init_process_group("gloo")
    for name, train in {
        "ddp": lambda model: trained(model, DistributedDataParallel),
        "fsdp2": lambda model: trained(model, sharded),
        "trainer": by_trainer,
    }.items():
        model = make_model()
        ours = padding_free(copy.deepcopy(model))
        first = [p.detach().clone() for p in model.parameters()]
        expected, found = train(model), train(ours)
        assert_is_flat(ours)
        assert not FlatModel.of(ours).padded.said, name
        assert any((p - q).abs().max() > 100 * TOLERANCE for p, q in zip(first, expected, strict=True)), name
        for p, q in zip(expected, found, strict=True):
            assert (p - q).abs().max() <= TOLERANCE, name
    sys.stdout.write("the same\n")
    dist.barrier()  # gloo may abort a process whose peer has left
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
