"""The pretend device refuses and counts what CUDA refuses and waits for."""

import copy
import warnings
import weakref

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.checkpoint import checkpoint

from tests.device.runs import train
from tests.helpers.tiny import REENTRANT
from tests.pretend_device import counted_waits, memory, own_generator
from trl_paddingfree import FlatBatch, UnprovenModelError
from trl_paddingfree.core.model.restored import random_state_restored


@pytest.fixture
def x(device):
    return torch.arange(4.0, device=device)


# What the host waits for, and what makes it
WAITS = {
    ("local_scalar_dense",): {"item": lambda x: x.sum().item()},
    ("tolist",): {"tolist": lambda x: x.tolist()},
    ("tolist", "tolist"): {"list of numbers": lambda x: torch.tensor([x[0], x[1]])},
    ("equal",): {"equal": lambda x: torch.equal(x, x)},
    ("allclose",): {"allclose": lambda x: torch.allclose(x, x)},
    ("nonzero",): {"nonzero": lambda x: x.nonzero()},
    ("masked_select",): {"masked_select": lambda x: x.masked_select(x > 1)},
    ("unique2",): {"unique": lambda x: x.unique()},
    ("repeat_interleave",): {"repeat_interleave": lambda x: x.repeat_interleave(x.long())},
    ("index by a mask",): {
        "mask": lambda x: x[x > 1],
        "values by a mask": lambda x: x.__setitem__(x > 1, -x[2:]),
    },
    ("copy to the host",): {
        "cpu": lambda x: x.cpu(),
        "into memory that is not pinned": lambda x: torch.zeros(4).copy_(x, non_blocking=True),
    },
    ("copy to the device",): {
        "an index on the CPU": lambda x: x[torch.tensor([1, 2])],
        "a list": lambda x: x[[1, 2]],
        "from memory that is not pinned": lambda x: torch.zeros(4).to(x.device, non_blocking=True),
        "from pinned memory, blocking": lambda x: torch.zeros(4).pin_memory().to(x.device),
        "a tensor of Python's numbers": lambda x: torch.tensor([1, 2], device=x.device),
    },
    ("synchronize",): {"synchronize": lambda x: torch.accelerator.synchronize()},
    (): {
        "a number by a mask": lambda x: x.__setitem__(x > 1, 0.0),
        "an index": lambda x: x[x.long()],
        "a slice": lambda x: x[1:3],
        "of known size": lambda x: x.repeat_interleave(x.long(), output_size=6),
        "not waited for": lambda x: x.to("cpu", non_blocking=True),
        "into pinned memory": lambda x: torch.zeros(4, pin_memory=True).copy_(x, non_blocking=True),
        "from pinned memory": lambda x: torch.zeros(4).pin_memory().to(x.device, non_blocking=True),
        "from a part of pinned memory": lambda x: torch.zeros(4).pin_memory()[1:].to(x.device, non_blocking=True),
        "zeros": lambda x: torch.zeros(3, device=x.device),
        "a number on the CPU": lambda x: x + torch.tensor(1.0),
        "another dtype": lambda x: x.to(torch.bfloat16),
    },
}
WAITING = [(name, call, reasons) for reasons, calls in WAITS.items() for name, call in calls.items()]
# The driver waits for these, of which PyTorch does not tell on CUDA
UNTOLD = ("into memory that is not pinned", "from memory that is not pinned", "synchronize")


def test_what_the_host_waits_for_is_counted(x):
    for name, call, reasons in WAITING:
        with counted_waits() as waits:
            call(x.clone())
        assert sorted(wait.reason for wait in waits.elements()) == [*reasons], name
        assert {wait.file for wait in waits} <= {"tests/device/test_device.py"}


@pytest.mark.gpu
def test_cuda_waits_for_the_same(x):
    for name, call, reasons in WAITING:
        if name in UNTOLD:
            continue
        call(x.clone())  # kernels are loaded
        own = x.clone()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                call(own)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert any("synchroniz" in str(warning.message) for warning in found) == bool(reasons), name


REFUSED = {
    "two devices": (lambda x: x + torch.ones(4), "found at least two devices"),
    "a number of the device beside the CPU": (lambda x: torch.ones(4) + x[0], "found at least two devices"),
    "in one tensor": (lambda x: torch.stack([x[0], torch.tensor(1.0)]), "same device"),
    "an index of the device": (lambda x: torch.ones(4)[x.long()], "indices should be either on cpu or on the same"),
    "a mask of the device": (lambda x: torch.ones(4)[x > 1], "indices should be either on cpu or on the same"),
    "numpy": (lambda x: x.numpy(), "can't convert .* to numpy"),
    "an array": (lambda x: np.asarray(x), "can't convert .* to numpy"),
    "pinning": (lambda x: x.pin_memory(), "cannot pin"),
}


@pytest.mark.parametrize("place", ["pretend", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_cuda_refuses_is_refused(place, x):
    for call, words in REFUSED.values():
        with pytest.raises((RuntimeError, TypeError), match=words):
            call(x)


def test_a_copy_that_nobody_waited_for_arrives_when_somebody_waits(x):
    copy = x.to("cpu", non_blocking=True)
    event = torch.accelerator.current_stream(x.device).record_event()
    assert copy.tolist() == [1, 1, 1, 1]
    assert not event.query()
    x.sum().item()
    assert event.query()
    assert copy.tolist() == [0, 1, 2, 3]


def test_memory_is_that_of_live_storages_and_runs_out(device, monkeypatch):
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    whole = torch.zeros(1000, device=device)
    part = whole[10:]
    del whole
    assert torch.accelerator.memory_allocated(device) == before + 4000
    weight = torch.nn.Parameter(torch.ones(1000, device=device))
    kept = (weight * 2).exp()  # which keeps its result
    assert torch.accelerator.memory_allocated() == before + 12000
    assert torch.accelerator.max_memory_allocated() == before + 16000
    del part, weight, kept
    assert torch.accelerator.memory_allocated() == before
    free, total = torch.accelerator.get_memory_info(device)
    assert (free, total) == (memory.total - before, memory.total)
    monkeypatch.setattr(memory, "total", before + 100)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 104 bytes, 100 are free"):
        torch.zeros(26, device=device)


@REENTRANT
def test_an_error_of_the_backward_pass_is_raised_where_it_began(reentrant, x):
    """Autograd runs on another thread, as on CUDA; a hook of a tensor and a recomputation raise there."""
    passes = []

    def compute(value):
        passes.append(value)
        if len(passes) == 2:
            raise KeyError("in the recomputation")
        return value.exp()

    leaf = x.clone().requires_grad_()
    with pytest.raises(KeyError, match="in the recomputation"):
        checkpoint(compute, leaf, use_reentrant=reentrant).sum().backward()

    def refuse(gradient):
        raise torch.OutOfMemoryError("in a hook")

    product = leaf * 2
    product.register_hook(refuse)
    with pytest.raises(torch.OutOfMemoryError, match="in a hook"):
        product.sum().backward()
    (leaf * 2).sum().backward()
    assert leaf.grad.tolist() == [2, 2, 2, 2]


def test_autocast_has_the_rules_of_cuda(x):
    weight = torch.ones(4, 4, device=x.device, requires_grad=True)
    with torch.autocast(x.device.type, torch.bfloat16):
        product = x @ weight
        assert product.dtype == torch.bfloat16
        assert {f(product).dtype for f in (torch.sum, torch.exp, lambda y: y.softmax(0))} == {torch.float32}
        assert (product + x).dtype == torch.float32
    product.sum().backward()
    assert weight.grad.dtype == torch.float32


def test_models_move_copy_and_go_to_files(device, tmp_path):
    first, tied = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    tied.weight = first.weight
    model = torch.nn.Sequential(first, tied)
    optimizer = torch.optim.AdamW(model.parameters())
    weight = first.weight
    model.to(device)
    assert first.weight is tied.weight is weight is optimizer.param_groups[0]["params"][0]
    assert weight.device == device
    model(torch.ones(1, 4, device=device)).sum().backward()
    optimizer.step()
    copied = copy.deepcopy(model)
    assert isinstance(copied[0].weight, torch.nn.Parameter)
    assert copied[0].weight is copied[1].weight
    assert torch.equal(copied[0].weight.grad, weight.grad)
    save_file({"weight": weight}, tmp_path / "weights.safetensors")
    assert torch.equal(load_file(tmp_path / "weights.safetensors")["weight"], weight.cpu())
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    for place in ("cpu", device):
        state = torch.load(tmp_path / "optimizer.pt", map_location=place, weights_only=True)
        assert state["state"][0]["exp_avg"].device == torch.device(place)
        optimizer.load_state_dict(state)
    model.cpu()
    assert weight.device.type == "cpu"


def test_nothing_is_kept_of_what_is_gone(device):
    tensor = torch.ones(3, device=device)
    reference = weakref.ref(tensor)
    del tensor
    assert reference() is None


def test_trying_a_model_leaves_random_numbers_of_the_device_as_they_were(device):
    model, module = torch.nn.Linear(2, 2).to(device), torch.get_device_module(device)
    with own_generator():
        before = module.get_rng_state()
        with random_state_restored(model):
            torch.rand(1, device=device)
            assert not torch.equal(module.get_rng_state(), before)
        assert torch.equal(module.get_rng_state(), before)


FAULTS = {
    "on the CPU": (lambda self, values: values.index_select(1, self.scored_index.cpu()), "found at least two devices"),
    "indexed by the device": (lambda self, values: values.cpu()[:, self.scored_index], "indices should be either on"),
}


def test_a_tensor_that_is_planted_elsewhere_ends_a_run_by_name(monkeypatch):
    for fault, words in FAULTS.values():
        monkeypatch.setattr(FlatBatch, "scored_of", fault)
        with pytest.raises(UnprovenModelError, match=words):
            train("sft")
