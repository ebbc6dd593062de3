"""Whether options have values that they can have. Their types say which, and are read before the options are."""

from difflib import get_close_matches
from numbers import Integral
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def refuse_wrong_values(options: Any, declared_by: type) -> None:
    """
    Refuse values that the types of the fields of a configuration do not allow.

    Args:
        options (`Any`):
            The configuration.
        declared_by (`type`):
            The class whose annotations name the fields to look at. `bool` allows `True` and `False`, `int` whole
            numbers from 1, `Literal` its words, and a union what any of its members allows.

    Raises:
        `ValueError`: Naming the option, its value, and what to write in its place.
    """
    values = vars(options)
    for name, hint in get_type_hints(declared_by).items():
        if name not in values:  # TRL's own configurations have some of the options only
            continue
        kinds, value = _kinds(hint), values[name]
        if not any(_allows(kind, value) for kind in kinds):
            expected = " or ".join(_description(kind) for kind in kinds)
            raise ValueError(f"`{name}={value!r}` must be {expected}.{_suggestion(name, value, kinds)}")


def _kinds(hint: Any) -> list[Any]:
    """The members of a union, or the type itself; literals in one tuple of words."""
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return [get_args(member) if get_origin(member) is Literal else member for member in members]


def _allows(kind: Any, value: Any) -> bool:
    if isinstance(kind, tuple):
        return isinstance(value, str) and value in kind
    if kind is int:
        return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1
    return isinstance(value, kind)


def _description(kind: Any) -> str:
    if isinstance(kind, tuple):
        return ("one of " if len(kind) > 1 else "") + ", ".join(map(repr, kind))
    return {bool: "`True` or `False`", int: "a whole number of at least 1", NoneType: "`None`"}[kind]


def _suggestion(name: str, value: Any, kinds: list[Any]) -> str:
    """What the user may have meant."""
    words = [word for kind in kinds if isinstance(kind, tuple) for word in kind]
    meant: list[Any] = get_close_matches(str(value).lower(), words, n=1, cutoff=0.5)
    text = str(value).strip().lower()
    if bool in kinds and text in ("true", "false", "1", "0"):
        meant = [text in ("true", "1")]
    elif int in kinds and isinstance(value, str | float) and text.removesuffix(".0").isdigit() and int(float(text)):
        meant = [int(float(text))]
    elif NoneType in kinds and (isinstance(value, int | float) or text in ("none", "")):
        return f" Leave `{name}` out for none."
    return f" Did you mean `{name}={meant[0]!r}`?" if meant else ""
