"""Rewards of the user's functions: what is no number is named with the function, where Python would name neither."""

import inspect
from contextlib import suppress
from functools import wraps
from numbers import Number
from reprlib import repr as short
from typing import Any

import torch


def checked(function: Any, name: str) -> Any:
    """A reward function that refuses rewards that are no numbers. Models and asynchronous functions are left alone."""
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    if isinstance(function, torch.nn.Module) or is_async:
        return function

    takes = None
    with suppress(TypeError, ValueError):  # functions of C have none
        takes = inspect.signature(function)

    @wraps(function, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        if takes is not None:
            try:
                takes.bind(*args, **kwargs)
            except TypeError as error:
                raise ValueError(
                    f"The reward function {name!r} does not take what TRL passes ({error}): write it as "
                    "`def reward(completions, **kwargs)`."
                ) from None
        rewards = function(*args, **kwargs)
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
