"""Chat templates: what they cannot render is named by its row, where Jinja would name neither row nor template."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from reprlib import repr as short
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase
from trl import is_conversational

from ..core.data.lengths import AnyDataset, Example
from .columns import FIX

_OTHER = "Set `tokenizer.chat_template` to another one, and pass the tokenizer as `processing_class`."


def refuse_broken_template(dataset: AnyDataset, tokenizer: Any) -> None:
    """Refuse conversations if the chat template of the `tokenizer` is not a valid template."""
    is_chat = isinstance(tokenizer, PreTrainedTokenizerBase) and is_conversational(next(iter(dataset), {}))
    if not is_chat or not tokenizer.chat_template:
        return
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
    except TemplateSyntaxError as error:
        raise ValueError(
            f"The chat template of the tokenizer ({type(tokenizer).__name__}) is not a valid template: line "
            f"{error.lineno}: {error.message}. {_OTHER}"
        ) from error
    except Exception:  # it may want messages of another kind
        return


@contextmanager
def naming_row(dataset: AnyDataset, tokenizer: Any, name: str) -> Iterator[None]:
    """Within this context, name the first row of conversations that the chat template of the `tokenizer` refuses."""
    try:
        yield
    except TemplateError as error:
        number, row = next(_refused(dataset, tokenizer), (None, None))
        where = f"The {name} data" if row is None else f"Row {number} of the {name} data"
        raise ValueError(
            f"{where}: the chat template of the tokenizer ({type(tokenizer).__name__}) refuses its messages: "
            f"{str(error).rstrip('.')}. {FIX} Or set another `tokenizer.chat_template`."
        ) from error


@contextmanager
def naming_prompts(prompts: list[Any], tokenizer: Any) -> Iterator[None]:
    """The same for prompts that are tokenized together."""
    try:
        yield
    except TemplateError as error:
        rendered = ((i, {"prompt": prompt}) for i, prompt in enumerate(prompts))
        _, row = next((pair for pair in rendered if _fails(pair[1], tokenizer)), (0, {"prompt": prompts}))
        raise ValueError(
            f"The chat template of the tokenizer ({type(tokenizer).__name__}) refuses the prompt "
            f"{short(row['prompt'])}: {str(error).rstrip('.')}. {FIX} Or set another `tokenizer.chat_template`."
        ) from error


def _refused(dataset: AnyDataset, tokenizer: Any) -> Iterator[tuple[int, Example]]:
    """The rows of which the template refuses a conversation, with their numbers."""
    return ((number, row) for number, row in enumerate(dataset) if _fails(row, tokenizer))


def _fails(row: Example, tokenizer: Any) -> bool:
    """Whether the template refuses a conversation of a row."""
    prompt = row.get("prompt") or []
    if not isinstance(prompt, list):
        return False
    conversations = [(prompt, True)] if prompt else []
    for column in ("messages", "completion", "chosen", "rejected"):
        if isinstance(messages := row.get(column), list):
            conversations.append(([*prompt, *messages], False))
    tools, options = row.get("tools"), row.get("chat_template_kwargs") or {}
    for messages, generates in conversations:
        try:
            with suppress(TypeError, ValueError, LookupError):  # TRL may pass something else
                tokenizer.apply_chat_template(
                    messages, tools=tools, tokenize=False, add_generation_prompt=generates, **options
                )
        except TemplateError:
            return True
    return False
