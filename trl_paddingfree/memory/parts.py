"""Which items of a batch share a part of it."""

from collections.abc import Callable, Sequence
from typing import TypeVar

# What is left of a limit under which a part did not fit
_LOWERED = 0.9
# From the tokens of each item and a limit to the items of each part
Split = Callable[[Sequence[int], int], list[list[int]]]
Made = TypeVar("Made")


def split_by_tokens(tokens: Sequence[int], limit: int) -> list[list[int]]:
    """
    The items of each part of a micro-batch, by the tokens to compute of each item: as few parts as first-fit finds,
    none of more than `limit` tokens, but for items above the limit, which get a part of their own.

    >>> split_by_tokens([30, 50, 20, 60], limit=80)
    [[2, 3], [0, 1]]
    """
    parts: list[list[int]] = []
    room: list[int] = []
    for item in sorted(range(len(tokens)), key=lambda i: -tokens[i]):
        part = next((p for p, free in enumerate(room) if free >= tokens[item]), len(parts))
        if part == len(parts):
            parts.append([])
            room.append(limit)
        parts[part].append(item)
        room[part] -= tokens[item]
    return [sorted(part) for part in parts]


def split_in_order(tokens: Sequence[int], limit: int) -> list[list[int]]:
    """The same of items that stay beside their neighbours, with whom they share a prefix."""
    parts: list[list[int]] = []
    for item in range(len(tokens)):
        if parts and sum(tokens[i] for i in parts[-1]) + tokens[item] <= limit:
            parts[-1].append(item)
        else:
            parts.append([item])
    return parts


def parts_that_fit(
    tokens: Sequence[int], limit: int, split: Split, make: Callable[[list[int]], Made], fits: Callable[[Made], bool]
) -> list[Made]:
    """
    What `make` gives of the items of each part of a micro-batch, in parts that fit: as few as `split`, one of the
    functions above, finds by their tokens. An item alone is a part in any case.

    `limit` is what parts begin with; examples of another kind than the rest may need fewer tokens.

    >>> parts_that_fit([1, 1, 1, 1, 9], 5, split_in_order, make=sum, fits=lambda total: total < 4)
    [3, 3, 4]
    """
    while True:
        items = split(tokens, limit)
        parts = list(map(make, items))
        if limit < 1 or all(len(of_part) == 1 or fits(part) for of_part, part in zip(items, parts, strict=True)):
            return parts
        limit = int(_LOWERED * min(limit, max(sum(tokens[i] for i in of_part) for of_part in items)))
