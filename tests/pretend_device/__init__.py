"""
A second device in pure Python, which shows on a CPU what otherwise only a GPU would show.

A tensor on `DEVICE` holds a CPU tensor and is computed there, so that every value is the CPU's, to rounding. What
differs is what differs on CUDA:

- Tensors of two devices do not mix, but for numbers (tensors without a dimension) on the CPU. A tensor of the device
  may be indexed by one on the CPU, and not the other way round. No tensor of the device has a `.numpy()`.
- What makes the host wait is counted, with the line that asked: whatever reads a value, copies from the device that are
  not non-blocking into pinned memory, and copies to it that are not non-blocking out of pinned memory.
- A non-blocking copy from the device arrives when the host next waits, and holds ones before that.
- The device has as much memory as [`memory`] says, and counts what live tensors take.
- Autocast has the rules of CUDA, and the backward pass runs on another thread.
- Random numbers come from a generator of the device within [`own_generator`], and else from the CPU's.

`install` turns it on, before models are loaded; `switched_off` has trainers choose the CPU for a while. Operators that
no CPU computes need a stand-in in `operators`. Left out are quantized weights, loss scaling and compiled code.

It is a tensor subclass that wraps, and PyTorch's python backend for the key PrivateUse1.
"""

from .backend import own_generator
from .installed import install, switched_off, why_off
from .memory import memory
from .names import DEVICE, LOWEST, NAME
from .operators import without
from .waits import WAITS, arrive, counted_waits
