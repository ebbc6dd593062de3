"""What a machine has: versions, devices, attention packages."""

import importlib.util
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

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


def environment() -> dict[str, Any]:
    """
    Versions, devices and attention backends, for bug reports.

    Examples:
    ```python
    >>> from trl_paddingfree.check.machine import environment
    >>> [*environment()]
    ['python', 'platform', 'packages', 'cpu_threads', 'gpus', 'attention']

    ```
    """
    gpus = [
        f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, compute capability "
        f"{properties.major}.{properties.minor}"
        for properties in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    ]
    has_varlen = importlib.util.find_spec("torch.nn.attention.varlen") is not None
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": package_versions(),
        "cpu_threads": torch.get_num_threads(),
        "gpus": gpus,
        "attention": {
            "flash": flash_implementations() or "no flash attention package installed",
            "varlen": "yes" if has_varlen and gpus else "needs a CUDA GPU",
            "segment": "yes",
            "mask": "yes",
        },
    }
