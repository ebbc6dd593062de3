"""Rewards of the user's functions: what is no number is named with the function, where Python would name neither."""

import inspect
from functools import wraps
from numbers import Number
from reprlib import repr as short
from typing import Any

import torch
from trl.trainer.utils import is_async_callable


def checked(function: Any, name: str) -> Any:
    """A reward function that refuses rewards that are no numbers. Models and asynchronous functions are left alone."""
    if isinstance(function, torch.nn.Module) or is_async_callable(function):
        return function

    @wraps(function, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            rewards = function(*args, **kwargs)
        except TypeError as error:
            if not (problem := _why_not_taken(function, args, kwargs)):
                raise
            raise ValueError(
                f"The reward function {name!r} does not take what TRL passes ({problem}): write it as "
                "`def reward(completions, **kwargs)`."
            ) from error
        if rewards is None or isinstance(rewards, str | bytes | Number):
            raise ValueError(f"The reward function {name!r} returned {short(rewards)}: return a list of numbers.")
        if not torch.is_tensor(rewards):
            rewards = list(rewards)  # it may be a generator
            for index, reward in enumerate(rewards):
                if isinstance(reward, str | bytes | list | tuple | dict):
                    raise ValueError(
                        f"The reward function {name!r} returned {short(reward)} as reward {index}: return a number for "
                        "each completion, or `None` where it has none."
                    )
        return rewards

    return call


def _why_not_taken(function: Any, args: tuple, kwargs: dict[str, Any]) -> str:
    """Why a function does not take these arguments, by its signature; empty if it does, or has none, as in C."""
    try:
        takes = inspect.signature(function, follow_wrapped=False)  # what is called, not what a decorator wraps
    except (TypeError, ValueError):
        return ""
    try:
        takes.bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return ""
