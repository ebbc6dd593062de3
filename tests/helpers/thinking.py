"""Conversations in which the assistant thinks, and a chat template that drops the thinking before the last question."""

import random

from datasets import Dataset

from tests.helpers.tiny import text

# Stands before and after what is thought: a token that no text has
TAG = "<eos>"
# As Qwen3's: thinking stays where the assistant still answers the last question, also after tool calls
TEMPLATE = (
    "{% set found = namespace(question=-1) %}"
    "{% for message in messages %}{% if message['role'] == 'user' %}{% set found.question = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% if tools %}<|im_start|> tool {{ tools[0]['function']['name'] }} <|im_end|> {% endif %}"
    "{% for message in messages %}<|im_start|> {{ message['role'] }} "
    "{% if message['role'] == 'assistant' %}{% generation %}"
    "{% if loop.index0 > found.question %}<eos> {{ message['reasoning_content'] }} <eos> {% endif %}"
    "{% if message['content'] %}{{ message['content'] }} {% endif %}"
    "{% for call in message['tool_calls'] or [] %}tool {{ call['function']['name'] }} {% endfor %}<|im_end|>"
    "{% endgeneration %} "
    "{% else %}{{ message['content'] }} <|im_end|> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


def thinking_conversations(n: int, seed: int) -> Dataset:
    """Conversations of one to four questions, with thinking before every answer; some end without an answer."""
    rng, rows = random.Random(seed), []
    for i in range(n):
        messages = [{"role": "system", "content": text(rng, 1, 6)}] * (i % 2)
        for _ in range(rng.randint(1, 4)):
            messages.append({"role": "user", "content": text(rng, 1, 9)})
            answer = {"content": text(rng, 1, 9), "reasoning_content": text(rng, 1, 12)}
            messages.append({"role": "assistant", **answer})
        rows.append({"messages": messages + [{"role": "user", "content": text(rng, 1, 5)}] * (i % 3 == 2)})
    return Dataset.from_list(rows)
