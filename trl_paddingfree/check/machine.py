"""What a machine has: versions, devices, attention packages."""

import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from ..model import backends

PACKAGES = ("trl-paddingfree", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "tokenizers", "numpy")
OPTIONAL_PACKAGES = ("flash-attn", "kernels", "liger-kernel", "bitsandbytes", "deepspeed", "matplotlib")


def flash_implementations() -> list[str]:
    """The flash attention packages that are installed, by transformers' names."""
    found = {"flash_attention_2": is_flash_attn_2_available(), "flash_attention_3": is_flash_attn_3_available()}
    return [name for name, is_there in found.items() if is_there]


def package_versions() -> dict[str, str | None]:
    """Versions of the packages that matter; `None` for those that are not installed."""
    found: dict[str, str | None] = dict.fromkeys((*PACKAGES, *OPTIONAL_PACKAGES))
    for name in found:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def accelerators() -> list[str]:
    """Name, memory and compute capability of each accelerator, as far as PyTorch tells them of its kind."""
    accelerator, found = torch.accelerator.current_accelerator(check_available=True), []
    if accelerator is None:
        return []
    describe = vars(torch.get_device_module(accelerator)).get("get_device_properties", lambda index: None)
    for properties in map(describe, range(torch.accelerator.device_count())):
        # Each kind of device has a class of its own for these, in C++: only by their names are they alike
        name, memory, major = (getattr(properties, name, None) for name in ("name", "total_memory", "major"))
        words = [name or accelerator.type]
        words += [f"{memory / 2**30:.0f} GiB"] if memory else []
        words += [f"compute capability {major}.{properties.minor}"] if major else []
        found.append(", ".join(words))
    return found


def environment() -> dict[str, Any]:
    """Versions, devices and attention backends, for bug reports."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    has_varlen = accelerator is not None and backends.has_varlen_kernel(accelerator)
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": package_versions(),
        "cpu_threads": torch.get_num_threads(),
        "gpus": accelerators(),
        "attention": {
            "flash": flash_implementations() or "no flash attention package installed",
            "varlen": "yes" if has_varlen else "needs a CUDA GPU",
            "segment": "yes",
            "mask": "yes",
        },
    }
