"""The device is turned on, before models are loaded, and trainers choose it."""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from packaging.version import Version
from torch.autograd.variable import Variable
from torch.utils import _device, backend_registration

from .autocast import register_autocast
from .backend import BACKEND, Engine, Guard
from .functions import copies_to_device, makes_pinned, moves_parameters
from .memory import is_pinned, memory, pin
from .names import DEVICE, LOWEST, NAME
from .operators import run
from .waits import Stream, wait


def why_off() -> str:
    """Why the device is off, empty if it is on."""
    if Version(torch.__version__) < Version(LOWEST):
        return f"the pretend device needs PyTorch {LOWEST}, this is {torch.__version__}"
    return "" if BACKEND.is_on else f"the pretend device is off: set TRL_PADDINGFREE_DEVICE={NAME}"


@functools.cache
def install() -> None:
    """Turn the device on in this process, before a model is loaded: trainers with `use_cpu=True` choose it."""
    if Version(torch.__version__) < Version(LOWEST):
        return
    backend_registration._setup_privateuseone_for_python_backend(NAME, BACKEND, device_guard=Guard())
    BACKEND.is_on = True
    libraries = torch.library.Library("_", "IMPL", "PrivateUse1"), torch.library.Library("aten", "IMPL")
    libraries[0].fallback(run)
    libraries[1].impl("is_pinned", is_pinned, "CPU")
    libraries[1].impl("_pin_memory", pin, "CPU")
    libraries[0].fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    register_autocast(libraries[1])
    install.libraries = libraries  # type: ignore[attr-defined]  # they end with their last reference
    _device._device_constructors()  # `with torch.device(...)` knows functions by identity: before they are replaced
    for name in ("tensor", "as_tensor"):
        setattr(torch, name, copies_to_device(getattr(torch, name)))
    for name in ("tensor", "empty", "zeros", "ones", "full", "empty_like", "zeros_like", "empty_strided"):
        setattr(torch, name, makes_pinned(getattr(torch, name)))
    answers: dict[str, Callable] = {
        "memory_allocated": lambda *_: memory.allocated,
        "max_memory_allocated": lambda *_: memory.peak,
        "memory_reserved": lambda *_: memory.allocated,
        "reset_peak_memory_stats": memory.reset_peak,
        "get_memory_info": lambda *_: (memory.total - memory.allocated, memory.total),
        "empty_cache": lambda: None,
        "synchronize": lambda *_: wait("synchronize"),
        "current_stream": lambda *_: Stream(),
    }
    for name, answer in answers.items():
        setattr(torch.accelerator, name, answer)
    Variable._execution_engine = Engine()
    # Storages have no place on it: tensors that are saved from it come back to it by themselves
    torch.serialization.register_package(5, lambda obj: None, lambda obj, place: obj if NAME in place else None)
    torch.nn.Module.to = moves_parameters(torch.nn.Module.to)  # type: ignore[method-assign]
    torch.nn.Module.cpu = lambda module: module.to("cpu")  # type: ignore[method-assign]
    _have_trainers_choose_it()


def _have_trainers_choose_it() -> None:
    import transformers

    os.environ["ACCELERATE_TORCH_DEVICE"] = str(DEVICE)  # what accelerate's states take
    places = transformers.modeling_utils._get_device_map

    def device_map(model: Any, asked: Any, *args: Any) -> Any:
        """TRL asks for `"auto"`."""
        return {"": DEVICE} if BACKEND.is_on and isinstance(asked, str) else places(model, asked, *args)

    transformers.modeling_utils._get_device_map = device_map
    transformers.training_args.is_torch_bf16_gpu_available = lambda: BACKEND.is_on

    def device(arguments: Any) -> torch.device:
        chosen = arguments._setup_devices
        return DEVICE if BACKEND.is_on and chosen.type == "cpu" else chosen

    transformers.TrainingArguments.device = property(device)


@contextmanager
def switched_off() -> Iterator[None]:
    """Within this context, trainers that are made choose the CPU."""
    BACKEND.is_on = False
    os.environ.pop("ACCELERATE_TORCH_DEVICE")
    try:
        yield
    finally:
        BACKEND.is_on = True
        os.environ["ACCELERATE_TORCH_DEVICE"] = str(DEVICE)
