"""Data that a task cannot read is refused by row and column before anything is computed; what is odd is counted."""

import re

import pytest
from datasets import Dataset, IterableDataset, Value

from tests.core.trainers.test_refusals import ODD_ROWS, user
from tests.helpers.refused import build, without
from tests.helpers.tiny import DATA, arguments, conversations, make_tokenizer, preference_data
from tests.runs import compare
from trl_paddingfree import LanguageModelingCollator, PaddingFreeSFTTrainer
from trl_paddingfree.core.trainers.proving import StartUpCheck
from trl_paddingfree.data_checks import tasks

SEED = 7793


def assistant(text):
    return [{"role": "assistant", "content": text}]


GOOD = {"prompt": "w1", "chosen": "w2", "rejected": "w3"}
GOOD_CHAT = {"prompt": user("w1"), "chosen": assistant("w2"), "rejected": assistant("w3")}
# Task, rows of its data, and what is said of them
ROWS = {
    "pairs without `rejected`": ("dpo", [{"prompt": "w1", "chosen": "w2"}], "train data has no columns that DPO reads"),
    "nothing": ("dpo", [GOOD, {**GOOD, "chosen": None}], "Row 1 of the train data: `chosen` is None"),
    "strings": ("dpo", [{**GOOD_CHAT, "prompt": ["w1"]}], "`prompt` is a list with 'w1', which has no role"),
    "no messages": (
        "dpo",
        [GOOD_CHAT, {**GOOD_CHAT, "chosen": []}],
        "Row 1 of the train data: `chosen` is an empty list",
    ),
    "a message of nothing": (
        "dpo",
        [{**GOOD_CHAT, "rejected": assistant(None)}],
        "Row 0 of the train data: `rejected` is a list with a message whose content is None",
    ),
    "text beside messages": ("dpo", [{**GOOD_CHAT, "prompt": "w1"}], "`prompt` is a str, `chosen` is a list"),
    "a prompt by another name": (
        "dpo",
        [{"question": user("w1"), "chosen": assistant("w2"), "rejected": assistant("w3")}],
        r"The train data has no `prompt`, only \['question', .* begin with different messages",
    ),
    "SFT": (
        "sft",
        [{"question": "w1", "answer": "w2"}],
        r"The train data has no columns that SFT reads, only \['question', 'answer'\]. It reads `prompt` and "
        "`completion`, or `input_ids`, or `messages`, or `text`",
    ),
    "SFT of pairs": (
        "sft",
        [GOOD],
        r"only \['prompt', 'chosen', 'rejected'\]. It reads `prompt` and `completion`, or, without a `prompt`, one of "
        "`input_ids`, `messages`, `text`",
    ),
    "reward model": ("reward", [{"chosen": "w2"}], "that a reward model reads, only .* reads `chosen` and `rejected`"),
    "KTO": (
        "kto",
        [{"prompt": "w1", "completion": "w2"}],
        "that KTO reads, only .*It reads `prompt` and `completion` and `label`",
    ),
    "GRPO": ("grpo", [{"question": "w1"}], r"that GRPO reads, only \['question'\]. It reads `prompt`. Rename yours"),
    "RLOO": ("rloo", [{"prompt": "w1"}, {"prompt": None}], "Row 1 of the train data: `prompt` is None"),
    "distillation": ("distillation", [{"text": "w1"}], "that distillation reads, only .*It reads `prompt`"),
    "no text": ("sft", [{"text": "w1"}, {"text": None}], "Row 1 of the train data: `text` is None"),
    "no roles": (
        "sft",
        [{"messages": [{"content": "w1"}]}],
        "Row 0 of the train data: `messages` is a list with .*which has no role",
    ),
    "a string of messages": (
        "sft",
        [{"messages": "w1"}],
        "Row 0 .* `messages` is 'w1', a string. It must be a list",
    ),
    "no messages of SFT": (
        "sft",
        [{"messages": user("w1")}] * 2 + [{"messages": []}],
        "Row 2 of the train data: `messages` is an empty list. It must be a list of messages",
    ),
    "a message without content in SFT": (
        "sft",
        [{"messages": user("w1")}, {"messages": user("w1") + assistant(None)}],
        "Row 1 of the train data: `messages` is a list with a message whose content is None",
    ),
    "numbers": ("sft", [{"text": 5}, {"text": 6}], "Row 0 of the train data: `text` is 5. It must be a string"),
    "a list of strings": ("sft", [{"text": ["w1"]}], r"`text` is \['w1'\]. It must be a string"),
    "numbers to complete": ("kto", [{"prompt": 1, "completion": "w2", "label": True}], "`prompt` is 1. It must be a s"),
    "labels of words": (
        "kto",
        [{"prompt": "w1", "completion": "w2", "label": "good"}],
        "Row 0 of the train data: `label` is 'good'. It must be `True` or `False`",
    ),
    "labels of more than two kinds": (
        "kto",
        [{"prompt": "w1", "completion": "w2", "label": label} for label in (0, 1, 2)],
        "Row 2 of the train data: `label` is 2. It must be `True` or `False`",
    ),
    "text beside messages of KTO": (
        "kto",
        [{"prompt": "w1", "completion": assistant("w2"), "label": True}],
        "`prompt` is a str, `completion` is a list. All of a row's texts",
    ),
    "a margin of words": ("reward", [{**GOOD, "margin": "x"}], "Row 0 .* `margin` is 'x'. It must be a number"),
    "a role of numbers": ("sft", [{"messages": [{"role": 1, "content": "w1"}]}], "a message whose role is 1"),
    "a reward of numbers": ("reward", [{"chosen": 1.5, "rejected": 2.5}], "Row 0 .* `chosen` is 1.5. It must be a str"),
    "numbers to answer": ("rloo", [{"prompt": 5}] * 8, "Row 0 of the train data: `prompt` is 5. It must be a string"),
    "no conversation": ("grpo", [{"prompt": user("w1")}] * 7 + [{"prompt": []}], "Row 7 .* `prompt` is an empty list"),
    "a misspelt role": (
        "sft",
        [{"messages": [{"role": role, "content": "w1"} for role in ("user", "assitant")]}] * 2,
        "with the role 'assitant'. Did you mean `assistant`?",
    ),
    "conversations of roles": (
        "sft",
        [{"conversations": user("w1")}],
        "`conversations` of the train data have no `from` and `value`.* Rename the column",
    ),
}
# Task, what it is given, and what is said of it
REFUSED = {
    **{name: (task, {"train_dataset": Dataset.from_list(rows)}, said) for name, (task, rows, said) in ROWS.items()},
    "no rows": ("dpo", {"train_dataset": Dataset.from_list([])}, "The train data has no rows"),
    "no evaluation rows": ("sft", {"eval_dataset": {"some": Dataset.from_list([])}}, "The some data has no rows"),
    "eval data of another kind": (
        "dpo",
        {"eval_dataset": Dataset.from_list([{"text": "w1"}])},
        r"The eval data has no columns that DPO reads, only \['text'\]",
    ),
    "rows that are all cut": ("dpo", {"max_length": 3}, "dropped 8 of 8 .* which `max_length=3`.* Raise `max_length`"),
    "plain text without eos token": (
        "dpo",
        {"processing_class": without("eos_token"), "train_dataset": Dataset.from_list([GOOD])},
        "no `eos_token` to end a completion.* Set `tokenizer.eos_token`",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_data_is_refused_in_one_line_before_anything_is_computed(name, untouched):
    """Also the first row of a stream."""
    task, given, message = REFUSED[name]
    tried = [given]
    if name in ROWS and len(given["train_dataset"]) == 1:
        tried.append({"train_dataset": given["train_dataset"].to_iterable_dataset()})
    for each in tried:
        with pytest.raises((ValueError, TypeError), match=message) as error:
            build(task, **{"model": untouched, "peft_config": None, **each})
        assert "\n" not in str(error.value)


class Unread(PaddingFreeSFTTrainer):
    """It makes rows of its own, of data that TRL does not know."""

    def _prepare_dataset(self, dataset, *args):
        return super()._prepare_dataset(dataset.map(lambda row: {"text": f"w{row['text']}"}), *args)


def test_data_that_a_function_or_a_subclass_prepares_may_hold_anything():
    data = Dataset.from_list([{"text": 5}, {"text": 6}] * 4)
    build("sft", train_dataset=data, formatting_func=lambda row: f"w{row['text']}")
    build("sft", train_dataset=data.cast_column("text", Value("int32")), trainer_class=Unread)


LARGE = ("dpo", "sft", "kto", "reward", "grpo", "rloo")


@pytest.mark.parametrize("task", LARGE)
@pytest.mark.parametrize("streams", [False, True])
def test_tokens_that_the_model_lacks_are_named_before_anything_is_computed(task, streams, monkeypatch):
    """Python would say `index out of range in self`, after the check, and a GPU would abort the process."""
    if streams and task in ("grpo", "rloo"):
        pytest.skip("prompts of a stream become tokens when they are drawn")
    model, data = arguments(task)["model"], DATA[task](8, SEED)
    model.resize_token_embeddings(40)
    monkeypatch.setattr(StartUpCheck, "install", lambda *args: pytest.fail("checked"))
    said = r"`\w+_ids` of the train data has the token \d+, and the model has tokens 0 to 39. The tokenizer has \d+"
    with pytest.raises(ValueError, match=said):
        build(task, model=model, train_dataset=data.to_iterable_dataset() if streams else data)


@pytest.mark.parametrize("task", ["dpo", "kto"])
def test_tokens_that_the_reference_lacks_are_named_with_it(task, monkeypatch):
    model = arguments(task)["model"]
    model.resize_token_embeddings(40)
    monkeypatch.setattr(StartUpCheck, "install", lambda *args: pytest.fail("checked"))
    said = r"_ids` of the train data has the token \d+, and `ref_model` has tokens 0 to 39. Pass one with the"
    with pytest.raises(ValueError, match=said):
        build(task, ref_model=model, train_dataset=DATA[task](8, SEED))


def test_a_tokenizer_with_more_tokens_than_the_model_trains_if_the_data_has_none_of_them():
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<unused>"])
    for task in ("sft", "grpo"):
        build(task, processing_class=tokenizer)


BAD_ROWS = {
    "dpo": ({**GOOD, "chosen": None}, "`chosen` is None"),
    "reward": ({**GOOD, "chosen": 3}, "`chosen` is 3"),
    "kto": ({"prompt": "w1", "completion": "w2", "label": None}, "`label` is None"),
    "sft": ({"text": None}, "`text` is None"),
    "grpo": ({"prompt": None}, "`prompt` is None"),
}


@pytest.mark.parametrize("task", BAD_ROWS)
def test_a_bad_row_in_a_stream_is_refused_when_it_is_read(task, tmp_path):
    """The steps before it have been trained, and the last checkpoint is there."""
    bad, said = BAD_ROWS[task]
    good = {"sft": {"text": "w1 w2"}, "grpo": {"prompt": "w1"}, "kto": {**bad, "label": True}}.get(task, GOOD)
    stream = IterableDataset.from_generator(lambda: iter([good] * 8 + [bad] + [good] * 20))
    options = {"save_strategy": "steps", "save_steps": 1, "steps": 8, "output_dir": str(tmp_path)}
    trainer = build(task, train_dataset=stream, per_device_train_batch_size=4, **options)
    with pytest.raises(ValueError, match=f"Row 8 of the train data: {said}"):
        trainer.train()
    if task != "grpo":  # whose buffer is filled with more rows than these before the first step
        assert trainer.state.global_step >= 1
        assert (tmp_path / "checkpoint-1").is_dir()


def test_tokens_that_the_model_lacks_in_a_later_row_of_a_stream_are_named_with_the_row():
    rows = [{"input_ids": [5, 6, 7]}] * 8 + [{"input_ids": [5, 6, 70]}] + [{"input_ids": [5, 6, 7]}] * 20
    stream = IterableDataset.from_generator(lambda: iter(rows))
    trainer = build("sft", train_dataset=stream, eval_dataset={"held out": stream}, steps=8)
    said = "Row 8 of the {} data: `input_ids` has the token 70, and the model has tokens 0 to 68. Tokenize with"
    with pytest.raises(ValueError, match=said.format("train")):
        trainer.train()
    with pytest.raises(ValueError, match=said.format("held out")):
        trainer.evaluate()


def test_rows_are_looked_at_once_before_models_load_and_later_ones_when_they_come(monkeypatch):
    seen = []
    look = tasks.refuse_wrong_values
    monkeypatch.setattr(
        tasks, "refuse_wrong_values", lambda data, name, *args: (seen.append(name), look(data, name, *args))
    )
    for task in ("dpo", "sft", "kto", "reward", "grpo"):
        trainer = build(
            task, train_dataset=DATA[task](8, SEED), eval_dataset={"a": DATA[task](4, 1), "b": DATA[task](4, 2)}
        )
        assert seen == ["train", "a", "b"]
        seen.clear()
    bad = Dataset.from_list([{"text": "w1"}, {"text": None}])
    trainer = build("sft")
    seen.clear()
    with pytest.raises(ValueError, match="Row 1 of the eval data: `text` is None"):
        trainer.evaluate(bad)


CHAT = {"role": "system", "content": "w1"}
NO_SYSTEM = (
    "{% for message in messages %}{% if message['role'] == 'system' %}{{ raise_exception('No system role') }}"
    "{% endif %}{{ message['content'] }} {% endfor %}"
)
REFUSES = "the chat template of the tokenizer (TokenizersBackend) refuses its messages: No system role. Correct the row"
TEMPLATED = {
    "sft": ({"messages": user("w1") + assistant("w2")}, {"messages": [CHAT, *user("w1"), *assistant("w2")]}),
    "dpo": (GOOD_CHAT, {**GOOD_CHAT, "prompt": [CHAT, *user("w1")]}),
    "reward": (GOOD_CHAT, {**GOOD_CHAT, "rejected": [CHAT, *assistant("w3")]}),
    "kto": (
        {"prompt": user("w1"), "completion": assistant("w2"), "label": True},
        {"prompt": [CHAT, *user("w1")], "completion": assistant("w2"), "label": False},
    ),
}


@pytest.mark.parametrize("task", TEMPLATED)
def test_a_conversation_that_the_chat_template_refuses_is_named_by_its_row(task, monkeypatch):
    good, bad = TEMPLATED[task]
    monkeypatch.setattr(StartUpCheck, "install", lambda *args: pytest.fail("checked"))
    with pytest.raises(ValueError, match=re.escape(f"Row 3 of the train data: {REFUSES}")):
        build(task, train_dataset=Dataset.from_list([good] * 3 + [bad]), processing_class=make_tokenizer(NO_SYSTEM))


def test_a_prompt_that_the_chat_template_refuses_is_named(monkeypatch):
    rows = [{"prompt": user("w1")}] + [{"prompt": [CHAT, *user("w2")]}] * 7
    tokenizer = make_tokenizer(NO_SYSTEM)
    said = re.escape("refuses the prompt [{'content': 'w1', 'role': 'system'}") + ".*No system role"
    trainer = build("grpo", train_dataset=Dataset.from_list(rows), processing_class=tokenizer, shuffle_dataset=False)
    with pytest.raises(ValueError, match=said):
        trainer.train()
    monkeypatch.setattr(StartUpCheck, "install", lambda *args: pytest.fail("checked"))
    with pytest.raises(ValueError, match=said):
        build("grpo", train_dataset=Dataset.from_list(rows[1:]), processing_class=tokenizer)


@pytest.mark.parametrize("number", [0, 1, 7])
def test_a_prompt_without_tokens_is_refused_before_training_and_in_a_stream_when_it_is_drawn(number):
    """Padded TRL fails on it inside of `generate`, or predicts its first token from padding."""
    rows = [{"prompt": "w1 w2"} for _ in range(8)]
    rows[number]["prompt"] = ""
    data, said = Dataset.from_list(rows), "The prompt '' has no tokens, .* Leave it out with `dataset.filter`"
    with pytest.raises(ValueError, match=said):
        build("grpo", train_dataset=data)
    with pytest.raises(ValueError, match=said):
        build("grpo", train_dataset=data.to_iterable_dataset(), shuffle_dataset=False, max_steps=9).train()


@pytest.mark.parametrize("task", ["sft", "dpo", "grpo"])
def test_a_chat_template_that_is_none_is_refused_before_models_load_if_data_needs_it(task):
    tokenizer = make_tokenizer("{% for m in messages %}{{ m['role' }}{% endfor %}")
    prompt = {"prompt": user("w1")}
    chats = {"sft": TEMPLATED["sft"][0], "dpo": GOOD_CHAT, "grpo": prompt}[task]
    said = (
        r"The chat template of the tokenizer \(\w+\) is not a valid template: line 1: unexpected '}', expected ']'. Set"
    )
    with pytest.raises(ValueError, match=said):
        build(task, model="nowhere/model", train_dataset=Dataset.from_list([chats] * 4), processing_class=tokenizer)
    plain = {"sft": {"text": "w1 w2"}, "dpo": GOOD, "grpo": {"prompt": "w1"}}[task]
    build(task, train_dataset=Dataset.from_list([plain] * 4), processing_class=tokenizer)


@pytest.mark.parametrize("task", ["sft", "dpo", "kto", "reward"])
def test_rows_in_place_of_a_held_out_dataset_are_named(task):
    with pytest.raises(ValueError, match="The a data is a list, and no dataset: load one with `load_dataset`, or make"):
        build(task, eval_dataset={"a": DATA[task](4, SEED).to_list()})


def test_an_evaluation_set_called_train_hides_no_training_data():
    rows = Dataset.from_list([GOOD, {**GOOD, "chosen": None}])
    with pytest.raises(ValueError, match="Row 1 of the train data"):
        build(train_dataset=rows, eval_dataset={"train": rows.select([0])})


SHARED = [{"from": "human", "value": "w1"}]


@pytest.mark.parametrize(
    ("task", "row", "options"),
    [
        ("sft", {"input_ids": [5, 6], "messages": SHARED}, {}),
        ("sft", {"text": "w1", "messages": SHARED, "people": [{"role": "users"}]}, {}),
        ("sft", {"messages": SHARED}, {"formatting_func": str}),
        ("sft", {"words": "w1"}, {"dataset_text_field": "words"}),
        ("sft", {"messages": [{"role": role, "content": "w1"} for role in ("User", "critic", "user2", "ipython")]}, {}),
        ("reward", {"chosen_ids": [5], "rejected_ids": [6], "chosen": SHARED, "rejected": SHARED}, {}),
    ],
)
def test_what_trl_reads_or_does_not_read_is_not_refused(task, row, options):
    build(task, train_dataset=Dataset.from_list([row] * 2), **options)


def test_a_message_that_calls_a_tool_needs_no_content():
    call = {"type": "function", "function": {"name": "w3", "arguments": "w4"}}
    chosen = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    tokenizer = make_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{ message['content'] }} <|im_end|>{% endgeneration %}",
        "{{ message['content'] or message['tool_calls'][0]['function']['name'] }} <|im_end|>{% endgeneration %}",
    )
    trainer = build(train_dataset=Dataset.from_list([{**GOOD_CHAT, "chosen": chosen}]), processing_class=tokenizer)
    assert trainer.train_dataset[0]["chosen_ids"] == tokenizer("w3 <|im_end|>")["input_ids"]


EXTRA = {
    "dpo": ({"question": "q", "chosen": "q a", "rejected": "q b"}, ": `question`. Without a `prompt`, it is the"),
    "kto": ({"prompt": "q", "completion": " a", "label": True, "score": 1.0}, ": `score`."),
    "reward": ({"prompt": "q", "chosen": " a", "rejected": " b", "margin": 1.0, "id": 3}, ": `id`."),
    "sft": ({"text": "q a", "answer": "a"}, ": `answer`."),
    "distillation": ({"prompt": "q", "solution": "a"}, ": `solution`."),
    "grpo": ({"prompt": "q", "solution": "a"}, None),  # rewards read all
}


@pytest.mark.parametrize("task", EXTRA)
def test_columns_that_nobody_reads_are_named_in_one_line(task, caplog):
    row, listed = EXTRA[task]
    build(task, train_dataset=Dataset.from_list([row] * 8))
    said = [message for message in caplog.messages if "does not read" in message]
    assert len(said) == (listed is not None)
    for line in said:
        assert line.startswith(f"The train data has columns that {task.upper()} does not read{listed}")


OF_REWARDS = [
    {"label": "positive"},
    {"label": 7},
    {"completion": "42"},
    {"chosen": ["a", "b"], "rejected": None},
    {"history": [{"role": "usr", "content": "w1"}]},
]


@pytest.mark.parametrize("as_stream", [False, True])
@pytest.mark.parametrize("columns", OF_REWARDS, ids=str)
@pytest.mark.parametrize("task", ["grpo", "rloo", "distillation"])
def test_columns_that_reward_functions_read_may_hold_anything(task, columns, as_stream):
    data = Dataset.from_list([{"prompt": user("w1"), **columns}] * 8)
    build(task, train_dataset=data.to_iterable_dataset() if as_stream else data, max_steps=1).train()


class OwnRows(LanguageModelingCollator):
    """It might read any column."""


def test_columns_are_not_called_unread_where_a_function_or_a_collator_may_read_them(caplog):
    data = Dataset.from_list([{"question": "q", "answer": "a"}] * 8)
    build("sft", train_dataset=data, formatting_func=lambda row: row["question"])
    data = conversations(8, SEED).add_column("id", [*range(8)])
    build("sft", train_dataset=data, data_collator=OwnRows(pad_token_id=0))
    assert "does not read" not in caplog.text


def compared(rows, **options):
    """A run of padded TRL, as ours of the same pairs logs what is odd about them."""
    return compare("dpo", lambda: arguments("dpo"), Dataset.from_list(rows), **options).padded.trainer


def test_odd_pairs_are_counted_and_train_as_in_trl(caplog):
    # Evaluated one by one, so that each is also a batch of its own
    options = {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 1}
    rows = ODD_ROWS + preference_data(7, SEED, conversational=False).to_list()
    assert len(compared(rows, eval_dataset=Dataset.from_list(ODD_ROWS), **options).train_dataset) == len(rows)
    # `preference_data` has one identical pair of its own
    counted = "2 with an empty prompt, 3 with an empty completion, 3 with identical chosen and rejected, of 12 pairs"
    assert f"The train data: {counted}" in caplog.text
    assert [m for m in caplog.messages if "The eval data: 2 with an empty prompt" in m and "of 5 pairs" in m]


def test_odd_conversations_are_counted_and_train_as_in_trl(caplog):
    odd = [
        {"prompt": user(""), "chosen": assistant("w1 w2"), "rejected": assistant("w3")},
        {"prompt": user("w4"), "chosen": assistant(""), "rejected": assistant("")},
    ]
    compared(odd + preference_data(6, SEED).to_list(), steps=2)
    counted = "1 with an empty prompt, 1 with an empty completion, 2 with identical chosen and rejected, of 8 pairs"
    assert counted in caplog.text


def test_implicit_prompts_train_as_in_trl_and_only_completions_count_as_empty(caplog):
    rows = [
        {"chosen": row["prompt"] + row["chosen"], "rejected": row["prompt"] + row["rejected"]}
        for row in preference_data(7, SEED)
    ]
    rows.append({"chosen": user("w1") + assistant(""), "rejected": user("w1") + assistant("w2")})
    compared(rows, steps=2)
    counted = "The train data: 1 with an empty completion, 1 with identical chosen and rejected, of 8 pairs"
    assert counted in caplog.text


def test_pairs_without_a_completion_left_are_dropped_as_in_trl_and_counted(caplog):
    total = {"train": 20, "eval": 9}
    rows = {name: preference_data(number, SEED + number) for name, number in total.items()}
    trainer = compared(rows["train"].to_list(), eval_dataset=rows["eval"], max_length=16)
    for name, number in total.items():
        kept = len(getattr(trainer, f"{name}_dataset"))
        assert 0 < kept < number
        assert f"The {name} data: dropped {number - kept} of {number} examples, which `max_length=16`" in caplog.text
