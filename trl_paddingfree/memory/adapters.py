"""What LoRA layers do not need to keep: copies of their inputs that autocast makes anyway."""

from typing import Any

import torch
from peft.tuners.lora import LoraLayer


class CastsUnlessAutocast:
    """True whenever autocast is off for a type of device: PEFT asks its switch anew in each call of a layer."""

    def __init__(self, device_type: str):
        self.device_type = device_type

    def __bool__(self) -> bool:
        return not torch.is_autocast_enabled(self.device_type)


def cast_inputs_once(model: torch.nn.Module, device_type: str) -> None:
    """
    Have LoRA layers leave the casting of their inputs to autocast, wherever it is on.

    PEFT casts the input of each layer to float32, the dtype of its adapters, and autocast casts that back: two passes
    over memory each way, and a float32 copy kept. Without them results are the same bit for bit, where adapters are
    float32 and all that follows the cast is a product: not in variants of LoRA (DoRA), not with dropout on CPUs, whose
    scale is rounded to the dtype of the input, and not where several adapters add up their gradients for one cast.
    """
    switch: Any = CastsUnlessAutocast(device_type)
    for layer in model.modules():
        if not isinstance(layer, LoraLayer) or layer.lora_variant or layer.cast_input_dtype_enabled is not True:
            continue
        dtypes = {adapter.weight.dtype for adapter in layer.lora_A.values()}
        rates = [dropout.p for dropout in layer.lora_dropout.values() if isinstance(dropout, torch.nn.Dropout)]
        drops = device_type == "cpu" and any(rates)
        if dtypes == {torch.float32} and not drops and len(layer.active_adapters) == 1:
            layer.cast_input_dtype_enabled = switch
