"""Where the time of a step goes."""

from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from .measure import Runner

# The gather of keys and values that shared prefixes need, and its gradient, as the profiler names them
GATHER = ("GatherRows", "GatherRowsBackward")


def profile_step(runner: Runner, examples: list[dict[str, Any]], longest: int = 12) -> dict[str, Any] | None:
    """
    Profile one training step.

    Args:
        runner ([`Runner`]):
            The method.
        examples (`list[dict[str, Any]]`):
            The batch.
        longest (`int`, *optional*, defaults to `12`):
            Number of operations to list.

    Returns:
        `dict[str, Any]`: `"operations"`, the operations with the largest share of the step's time on the device, and
        `"gather"`, the share of the gather of keys and values with its gradient. `None` where the profiler may not
        read the device's times.
    """
    cuda = runner.settings.device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as profiler:
        runner.step(examples)
    # Kernels are listed too, but their time already counts for the operations that launched them
    events = [event for event in profiler.key_averages() if event.device_type == DeviceType.CPU]
    own, whole = ("self_device_time_total", "device_time_total") if cuda else ("self_cpu_time_total", "cpu_time_total")
    total = sum(getattr(event, own) for event in events)
    if not total:
        return None
    ranked = sorted(events, key=lambda event: -getattr(event, own))
    gather = [event for event in events if event.key in GATHER]
    return {
        "operations": {event.key: getattr(event, own) / total for event in ranked[:longest]},
        "gather": sum(getattr(event, whole) for event in gather) / total,
    }
