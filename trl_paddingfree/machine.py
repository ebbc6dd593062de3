"""What this machine has: versions, devices, attention packages. PyTorch is imported only to look for devices."""

import os
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, entry_points, version

from . import __version__

_PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "tokenizers", "numpy")
_OPTIONAL = (
    "flash-attn", "flash-attn-3", "kernels", "liger-kernel", "causal-conv1d", "mamba-ssm", "flash-linear-attention",
    "fla-core", "bitsandbytes", "deepspeed", "matplotlib",
)  # fmt: skip


def flash_implementations() -> list[str]:
    """The flash attention packages that are installed, by transformers' names."""
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

    found = {"flash_attention_2": is_flash_attn_2_available(), "flash_attention_3": is_flash_attn_3_available()}
    return [name for name, is_there in found.items() if is_there]


def package_versions() -> dict[str, str | None]:
    """Versions of this package and others that matter; `None` for those that are not installed."""
    versions: dict[str, str | None] = {"trl-paddingfree": __version__}
    for name in (*_PACKAGES, *_OPTIONAL):
        versions[name] = None
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def accelerators() -> tuple[str, list[str]]:
    """This machine's type of accelerator, and the name, memory and capability of each, as far as PyTorch knows."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return "", []
    descriptions = []
    describe = vars(torch.get_device_module(accelerator)).get("get_device_properties", lambda index: None)
    for properties in map(describe, range(torch.accelerator.device_count())):
        # Each type of device has its own C++ class for these; only the attribute names are the same
        name, memory, major = (getattr(properties, name, None) for name in ("name", "total_memory", "major"))
        size = memory and f"{memory / 2**30:.0f} GiB"
        capability = major and f"compute capability {major}.{properties.minor}"
        descriptions.append(", ".join(filter(None, (name or accelerator.type, size, capability))))
    return accelerator.type, descriptions


def software() -> dict[str, object]:
    """Versions, for bug reports."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": package_versions(),
    }


def hardware() -> dict[str, object]:
    """Devices and attention backends, for bug reports. Imports PyTorch, unless its build supports CPUs only."""
    packages = package_versions()
    is_for_cpus = (packages["torch"] or "").endswith("+cpu") and not entry_points(group="torch.backends")
    kind, gpus = ("", []) if is_for_cpus else accelerators()
    flash = [name for name, found in packages.items() if name.startswith("flash-attn") and found]
    return {
        "gpus": gpus,
        "attention": {
            "flash": flash or "no flash attention package installed",
            # The rule of `core/model/kernels.py`, which takes seconds to import
            "varlen": "from compute capability 8.0 on" if kind == "cuda" else "needs a CUDA GPU",
            "segment": "yes",
            "mask": "yes",
        },
    }
