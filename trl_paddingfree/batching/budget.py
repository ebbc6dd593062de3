"""How a micro-batch is split into parts that fit into a budget of tokens."""

from collections.abc import Sequence


def split_by_tokens(tokens: Sequence[int], limit: int) -> list[list[int]]:
    """
    Split a micro-batch into as few parts as first-fit finds, none of more than `limit` tokens.

    An item above the limit gets a part of its own.

    Args:
        tokens (`Sequence[int]`):
            Tokens to compute of each item.
        limit (`int`):
            Most tokens of one part.

    Returns:
        `list[list[int]]`: Items of each part, in their original order.

    Examples:
    ```python
    >>> from trl_paddingfree.batching.budget import split_by_tokens
    >>> split_by_tokens([30, 50, 20, 60], limit=80)
    [[2, 3], [0, 1]]

    ```
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
