"""Time of the parts of a step."""

import time

import torch


def now(device: str) -> float:
    """Seconds, after all work queued on the device is done."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


class Clock:
    """
    Times the parts of a step, one after the other.

    The device is synchronized where one part ends and the next begins; TRL's own metrics synchronize it more often.

    Args:
        device (`str`):
            `"cpu"` or `"cuda"`.

    Attributes:
        seconds (`dict[str, float]`):
            Time of each part.
        core_seconds (`float`):
            Time that this process had cores, summed over its threads: what other processes on the machine take does
            not show in it, but threads that wait for each other do.
    """

    def __init__(self, device: str):
        self.device = device
        self.seconds: dict[str, float] = {}
        self.last, self.started = now(device), time.process_time()
        self.core_seconds = 0.0

    def mark(self, part: str) -> None:
        """End the part that runs since the last mark."""
        current = now(self.device)
        self.seconds[part] = self.seconds.get(part, 0.0) + current - self.last
        self.core_seconds = time.process_time() - self.started
        self.last = current
