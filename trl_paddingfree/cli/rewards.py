"""The rewards that a training script names."""

import importlib
import os
import sys
from typing import Any

from trl import rewards


def load_rewards(script_args: Any) -> list[Any]:
    """
    The rewards of `--reward_model_name_or_path` and `--reward_funcs`, as `trl grpo` and `trl rloo` take them.

    Args:
        script_args (`GRPOScriptArguments` or `RLOOScriptArguments`):
            Arguments of TRL's script. A reward function is one of TRL's by its name, or an import path with a dot.

    Raises:
        `ValueError`: If nothing is named, or a function cannot be found.
    """
    model, names = script_args.reward_model_name_or_path, script_args.reward_funcs or []
    found = [*([model] if model else []), *map(_load_function, names)]
    if not found:
        raise ValueError(
            "Name what rewards completions: `--reward_funcs` (a function of TRL or an import path, such as "
            "my_lib.rewards.my_reward), or `--reward_model_name_or_path`."
        )
    return found


def _load_function(name: str) -> Any:
    if name == "get_soft_overlong_punishment":
        return rewards.get_soft_overlong_punishment(max_completion_len=1280, soft_punish_cache=256)
    module, _, function = name.rpartition(".")
    if module and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    found = getattr(importlib.import_module(module) if module else rewards, function, None)
    if found is None:
        known = ", ".join(sorted(name for name in dir(rewards) if name.endswith("_reward")))
        raise ValueError(
            f"`--reward_funcs {name}` is no import path of a function, and none of TRL's: {known}, "
            "get_soft_overlong_punishment."
        )
    return found
