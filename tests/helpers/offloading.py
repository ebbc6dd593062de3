"""TRL's own activation offloading on a machine without an accelerator: the CPU stands in for the device."""

import contextlib
from unittest import mock

import torch
from trl.models import activation_offloading


@contextlib.contextmanager
def offloading_on_cpu(task: str):
    """
    Within this context, trainers of a task offload by TRL's code, without streams and pinned memory.

    Gives a list of the bytes of each tensor that was moved away.
    """
    moved = []

    def offloading(model):
        with mock.patch.object(torch.accelerator, "current_accelerator", return_value=torch.device("cpu")):
            context = activation_offloading.get_act_offloading_ctx_manager(
                model, use_pin_memory=False, use_streams=False
            )
        pack = context.pack_hook

        def counting(tensor):
            key = pack(tensor)
            is_moved = context.tracker[key][1]
            moved.append(tensor.numel() * tensor.element_size() * is_moved)
            return key

        context.pack_hook = counting
        return context

    with (
        mock.patch(f"trl.trainer.{task}_trainer.get_act_offloading_ctx_manager", offloading),
        mock.patch.object(torch.cpu, "empty_cache", create=True),  # called beside bitsandbytes
    ):
        yield moved
