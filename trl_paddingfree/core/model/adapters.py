"""PEFT adapters whose output for a token depends on other tokens."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from peft import PeftConfig


def why_padded(modules: Iterable[torch.nn.Module]) -> str:
    """Why an adapter on any of `modules` needs padded rows, and what to do instead; empty if none does."""
    for module in modules:
        held: object = getattr(module, "peft_config", None)  # of a PEFT model or its layers, or of transformers' own
        for config in held.values() if isinstance(held, dict) else ():
            if reason := why_padded_by(config):
                return reason
    return ""


def why_padded_by(config: "PeftConfig | None") -> str:
    """The same for one adapter's configuration; empty for `None`."""
    if config is None:
        return ""
    from peft import LoraConfig, PromptLearningConfig  # there is a configuration, and so PEFT

    name = type(config).__name__
    if isinstance(config, PromptLearningConfig):
        return f"{name} puts virtual tokens before every row, which a flat batch cannot hold: use LoRA"
    if name in ("PolyConfig", "XLoraConfig"):
        return f"{name} weighs its adapters by row, and a flat batch is one row: use LoRA"
    if name == "ShadowConfig":
        return f"{name} runs a second network on the rows of a call, and its layers get one row: use LoRA"
    if name == "LilyConfig":
        return f"{name} weighs its adapters by an average over all tokens of a call, padding among them: use LoRA"
    if not isinstance(config, LoraConfig):
        return ""
    if tokens := config.alora_invocation_tokens:
        return f"`alora_invocation_tokens={tokens}` (aLoRA) looks for these tokens in each row: use LoRA without them"
    velora = vars(config).get("velora_config")  # not all versions of PEFT have it
    if velora is not None and velora.init_type != "random":
        return (
            f"`velora_config` with `init_type={velora.init_type!r}` makes gradients of an average over all tokens of a "
            "call, padding and repeated prompts among them: set `init_type='random'`"
        )
    return ""
