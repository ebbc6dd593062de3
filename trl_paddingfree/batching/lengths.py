"""How long examples are, and what they cost to compute."""

from collections.abc import Sequence

import numpy as np
from datasets import Dataset
from pyarrow.compute import list_value_length


def token_lengths(dataset: Dataset, columns: Sequence[str]) -> np.ndarray:
    """`(examples, columns)` int64: number of tokens in each column of a data set."""
    tables = dataset.select_columns(list(columns)).with_format("arrow").iter(batch_size=10_000)
    lengths = [np.stack([list_value_length(table[c]).to_numpy() for c in columns], 1) for table in tables]
    return np.concatenate(lengths).astype(np.int64)


def pair_lengths(dataset: Dataset, chosen: str, rejected: str) -> np.ndarray:
    """
    Lengths of what two sequences start alike with, and of the rest of each.

    Args:
        dataset ([`~datasets.Dataset`]):
            Prepared pairs.
        chosen (`str`), rejected (`str`):
            Columns of token ids.

    Returns:
        `np.ndarray` of shape `(examples, 3)`, int64: as for prompt, chosen and rejected completion.
    """
    rows = []
    for pair in dataset.with_format("numpy", columns=[chosen, rejected]):
        a, b = pair[chosen], pair[rejected]
        n = min(len(a), len(b))
        different = np.flatnonzero(a[:n] != b[:n])
        alike = int(different[0]) if len(different) else n
        rows.append((alike, len(a) - alike, len(b) - alike))
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def truncated(lengths: np.ndarray, max_length: int | None, truncation_mode: str) -> np.ndarray:
    """
    Lengths of examples with one prompt and several completions after truncation.

    Args:
        lengths (`np.ndarray` of shape `(examples, 1 + completions)`, int64):
            Tokens of the prompt and of each completion, such as the chosen and the rejected one of a pair.
        max_length (`int`, *optional*):
            Most tokens of the prompt and a completion.
        truncation_mode (`str`):
            `"keep_start"` or `"keep_end"`. The latter leaves the rows of a long example different parts of the prompt,
            unless all are equally long: their lengths are given as those of sequences without a prompt.
    """
    if max_length is None:
        return lengths
    prompt, completions = lengths[:, :1], lengths[:, 1:]
    if truncation_mode == "keep_start":
        prompt = np.minimum(prompt, max_length)
        return np.concatenate([prompt, np.minimum(completions, max_length - prompt)], 1)
    rows = np.minimum(prompt + completions, max_length)
    apart = np.concatenate([np.zeros_like(prompt), rows], 1)
    kept = np.minimum(completions, max_length)
    together = np.concatenate([rows[:, :1] - kept[:, :1], kept], 1)
    are_equal = (completions == completions[:, :1]).all(1, keepdims=True)
    cut = (prompt + completions > max_length).any(1, keepdims=True)
    return np.where(cut, np.where(are_equal, together, apart), lengths)


def row_lengths(lengths: np.ndarray) -> np.ndarray:
    """`(examples, rows)` int64: tokens of each row of each example, of lengths as for [`example_tokens`]."""
    return lengths if lengths.shape[1] == 1 else lengths[:, :1] + lengths[:, 1:]


def longest_row(lengths: np.ndarray) -> int:
    """Tokens of the longest row, of lengths as for [`example_tokens`]."""
    return int(row_lengths(lengths).max(initial=0))


def example_tokens(lengths: np.ndarray, prefix_sharing: bool) -> np.ndarray:
    """
    Tokens to compute of each example.

    Args:
        lengths (`np.ndarray` of shape `(examples, 1 + completions)` or `(examples, 1)`, int64):
            Tokens of the prompt and of each completion; or of each row.
        prefix_sharing (`bool`):
            Whether a prompt is computed once, all but its last token.

    Returns:
        `np.ndarray` of shape `(examples,)`, int64.
    """
    if lengths.shape[1] == 1:
        return lengths[:, 0]
    prompt, *completions = lengths.T
    inherited = np.maximum(prompt - 1, 0) if prefix_sharing else 0
    return prompt + sum(completions) + (len(completions) - 1) * (prompt - inherited)


def example_work(lengths: np.ndarray, prefix_sharing: bool, hidden_size: int) -> np.ndarray:
    """
    Work of each example, in units of one token through the linear layers.

    A transformer layer has about `12 h^2` weights, `24 h^2` operations per token; causal attention of a sequence of `n`
    tokens adds `2 h n^2`, so `n^2 / 12 h` in these units (Kaplan et al., 2020, table 1).

    Args:
        lengths (`np.ndarray`), prefix_sharing (`bool`):
            As for [`example_tokens`].
        hidden_size (`int`):
            `h`.
    """
    if lengths.shape[1] == 1:
        squares = lengths[:, 0] ** 2
    else:
        prompt, *completions = lengths.T
        inherited = prompt**2 if prefix_sharing else 0
        squares = sum((prompt + x) ** 2 for x in completions) - (len(completions) - 1) * inherited
    return example_tokens(lengths, prefix_sharing) + squares / (12 * hidden_size)
