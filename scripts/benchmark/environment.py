"""What a result was measured with."""

import ctypes
import os
import platform
import re
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch

from trl_paddingfree.core.device import GIB, has_accelerator
from trl_paddingfree.machine import accelerators, package_versions

ROOT = Path(__file__).parents[2]


def processor_name() -> str:
    """The processor's name, as the operating system has it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return (*named, platform.processor() or platform.machine())[0]


def provenance() -> dict[str, str]:
    """
    When a result was measured, and from which commit: `"commit"` and `"date"`.

    The commit ends in "-dirty" if package or benchmark had changes on top of it, and is empty outside a checkout.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    commit = git("rev-parse", "--short=12", "HEAD")
    # Results that were written before this one are no change of either
    changed = "-dirty" if commit and git("status", "--porcelain", "--", "trl_paddingfree", "scripts") else ""
    return {"commit": commit + changed, "date": datetime.now(UTC).date().isoformat()}


def default_device() -> str:
    """The accelerator's type, if there is one."""
    accelerator = torch.accelerator.current_accelerator() if has_accelerator() else None
    return accelerator.type if accelerator else "cpu"


def environment() -> dict[str, Any]:
    """Versions, processor, memory and GPU of this machine."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": package_versions(),
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / GIB, 1),
    }
    if has_accelerator():
        _, found["gpus"] = accelerators()
        found["gpu"], *_ = found["gpus"][0].split(", ")
    return found


def machine_name(found: dict[str, Any]) -> str:
    """The device of an environment, for people."""
    if "gpu" in found:
        return found["gpu"]
    processor = re.sub(r"\((R|TM)\)| Processor| CPU", "", found["processor"])
    return f"{processor}, {found['threads']} of {found['cores']} cores"


def keep_pages() -> bool:
    """
    Have glibc keep the memory that this process frees, as CUDA's allocator does. Returns whether it does.

    By default it gives large blocks back to the system at once, and getting fresh pages for activations that are kept
    costs more than computing them again.
    """
    trim_threshold, mmap_max = -1, -4  # glibc's M_TRIM_THRESHOLD and M_MMAP_MAX
    with suppress(AttributeError):  # another library than glibc
        mallopt = ctypes.CDLL(None).mallopt
        return bool(mallopt(mmap_max, 0) and mallopt(trim_threshold, -1))
    return False
