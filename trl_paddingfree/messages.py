"""What a text of raw data is: a string, or a list of messages."""

from reprlib import repr as short

from .core.data.lengths import Example


def message_problem(text: object) -> str:
    """Why `text` is neither a string nor a list of messages; empty if it is one."""
    if isinstance(text, str):
        return ""
    if not isinstance(text, list):
        return short(text)
    if not text:
        return "an empty list"
    for message in text:
        if not isinstance(message, dict) or "role" not in message:
            return f"a list with {short(message)}, which has no role"
        if not isinstance(message["role"], str):
            return f"a list with a message whose role is {short(message['role'])}"
        if not isinstance(message.get("content"), str | list) and not has_other_content(message):
            return f"a list with a message whose content is {short(message.get('content'))}"
    return ""


def has_other_content(message: Example) -> bool:
    """Whether a message has no content but something else, such as tool calls."""
    return message.get("content") is None and any(v for k, v in message.items() if k not in ("role", "content"))
