"""Spares LoRA layers a float32 copy of their inputs, which autocast casts back anyway."""

from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora import LoraLayer


@dataclass(frozen=True)
class CastsUnlessAutocast:
    """Replaces PEFT's `cast_input_dtype_enabled`, evaluated in each call: true while autocast is off."""

    device_type: str

    def __bool__(self) -> bool:
        return not torch.is_autocast_enabled(self.device_type)


def cast_inputs_once(model: torch.nn.Module, device_type: str) -> None:
    """
    Have LoRA layers leave the casting of their inputs to autocast while it is on.

    PEFT casts the input of each layer to float32, the dtype of its adapters, and autocast casts it back: two passes
    over memory each way, and a float32 copy kept. Without these casts, results are bitwise equal if adapters are
    float32 and only a matrix product follows. So the casts stay in variants of LoRA (DoRA), with dropout on CPUs (its
    scale is rounded to the dtype of the input), and where gradients of several adapters add up before one cast. On
    GPUs, dropout scales in float32 whatever the dtype of its input, but may draw another mask for another dtype.
    """
    switch: Any = CastsUnlessAutocast(device_type)
    for layer in model.modules():
        if not isinstance(layer, LoraLayer) or layer.lora_variant or layer.cast_input_dtype_enabled is not True:
            continue
        dtypes = {p.dtype for p in layer.lora_A.parameters()}
        rates = [dropout.p for dropout in layer.lora_dropout.values() if isinstance(dropout, torch.nn.Dropout)]
        drops = device_type == "cpu" and any(rates)
        if dtypes == {torch.float32} and not drops and len(layer.active_adapters) == 1:
            layer.cast_input_dtype_enabled = switch
