"""Conversations cut into turns: which rows there are, what the chat template makes of them, how they train."""

import re

import pytest
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict

from tests.helpers.thinking import TAG, TEMPLATE, thinking_conversations
from tests.helpers.tiny import SEED, SHARING, arguments, conversations, make_tokenizer
from tests.runs import TOLERANCE, assert_same, compare, make_trainer, run
from trl_paddingfree import split_turns
from trl_paddingfree.cli.load import refuse_missing
from trl_paddingfree.core.trainers.sft import SFT

CALL = [{"type": "function", "function": {"name": "w1", "arguments": {"w2": 3}}}]
TOOLS = [{"type": "function", "function": {"name": "w1", "description": "w2", "parameters": {}}}]
STREAMING = pytest.mark.parametrize("streaming", [False, True], ids=["data", "stream"])


def messages(roles, content="w1"):
    """A conversation, by the first letters of its roles."""
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": names[letter], "content": f"{content} w{i}"} for i, letter in enumerate(roles)]


def prepared(dataset, tokenizer, max_length=None):
    """The rows that TRL makes of a dataset, as `(input_ids, labels)`."""
    rows = SFT.prepare(dataset, tokenizer, max_length=max_length, truncation_mode="keep_start")
    return [(row["input_ids"], row["labels"]) for row in rows]


@pytest.mark.parametrize(
    ("roles", "turns"),
    [
        ("ua", [1]),
        ("sua", [2]),
        ("sa", [1]),
        ("uaua", [1, 3]),
        ("uauau", [1, 3]),  # the last question has no answer
        ("uaaua", [1, 2, 4]),  # one message after the other
        ("uatata", [1, 3, 5]),  # between tools
        ("aua", [2]),  # nothing leads to the first
        ("aa", [1]),
    ],
)
def test_every_turn_with_something_before_it_gets_a_row(roles, turns):
    said = messages(roles)
    rows = split_turns(Dataset.from_list([{"messages": said}])).to_list()
    assert rows == [{"prompt": said[:turn], "completion": [said[turn]]} for turn in turns]


def some_conversations():
    """With tools, template options and a column of the user's own; the last of them calls a tool, all before do not."""
    rows = [{"messages": messages("su" + "au" * (i % 3) + "a"), "tools": TOOLS, "n": i} for i in range(7)]
    rows[3]["messages"][-1]["content"] = ""
    rows[-1]["messages"][-1] |= {"content": None, "tool_calls": CALL}
    return Dataset.from_list(rows).map(lambda row: {"chat_template_kwargs": {"enable_thinking": row["n"] > 2}})


def test_every_type_of_data_set_is_cut_alike_and_keeps_its_columns():
    data = some_conversations()
    cut = split_turns(data)
    assert [row["n"] for row in cut] == sum(([i] * (1 + i % 3) for i in range(7)), [])
    assert all(row["chat_template_kwargs"] == {"enable_thinking": row["n"] > 2} for row in cut)
    assert cut.features["prompt"] == cut.features["completion"] == data.features["messages"]
    assert cut.features["tools"] == data.features["tools"]
    assert cut[-1]["completion"][0]["tool_calls"] == CALL
    stream = data.to_iterable_dataset()
    splits = split_turns(DatasetDict(a=data, b=data.select([0]))), split_turns(IterableDatasetDict(a=stream))
    assert [type(split) for split in splits] == [DatasetDict, IterableDatasetDict]
    assert list(splits[0]["a"]) == list(splits[1]["a"]) == list(split_turns(data, num_proc=2)) == list(cut)
    assert list(splits[0]["b"]) == [cut[0]]
    assert list(split_turns(data.with_format("numpy"))) == list(cut)


def test_a_seed_moves_conversations_and_keeps_their_turns_together():
    data = some_conversations()
    plain, ours, same, other = (split_turns(data, seed).to_list() for seed in (None, SEED, SEED, SEED + 1))
    assert ours == same
    assert ours != plain or other != plain  # one order in 5,040 is that of the data
    for rows in (ours, other):
        assert sorted(rows, key=lambda row: row["n"]) == plain  # a stable sort: turns are in their order
        runs = [row["n"] for row, last in zip(rows, [{"n": None}, *rows], strict=False) if row["n"] != last["n"]]
        assert len(runs) == len(data)
    with pytest.raises(ValueError, match="`seed=3` shuffles all conversations"):
        split_turns(data.to_iterable_dataset(), seed=3)


def test_a_tool_call_that_comes_late_keeps_its_type():
    """Of a first thousand rows without one, `datasets` would conclude that there is none."""
    rows = [{"messages": messages("ua")} for _ in range(1001)]
    rows[-1]["messages"][-1] |= {"content": None, "tool_calls": CALL}
    assert split_turns(Dataset.from_list(rows))[-1]["completion"][0]["tool_calls"] == CALL


def test_a_column_of_prompts_beside_the_conversations_is_replaced():
    rows = [{"prompt": "w1", "messages": messages("uaua")}]
    assert [len(row["prompt"]) for row in split_turns(Dataset.from_list(rows))] == [1, 3]
    assert [len(row["prompt"]) for row in split_turns(Dataset.from_list(rows).to_iterable_dataset())] == [1, 3]


@STREAMING
def test_conversations_of_from_and_value_are_read_as_trl_reads_them(streaming):
    said = messages("uaua")
    data = Dataset.from_list([{"conversations": [{"from": one["role"], "value": one["content"]} for one in said]}])
    cut = split_turns(data.to_iterable_dataset() if streaming else data)
    assert list(cut) == list(split_turns(Dataset.from_list([{"messages": said}])))


def test_a_stream_that_does_not_know_its_columns_is_cut():
    data = some_conversations()
    stream = IterableDataset.from_generator(lambda: iter(data))
    assert stream.features is None
    assert list(split_turns(stream)) == list(split_turns(data))


def test_conversations_without_a_turn_are_counted(caplog):
    rows = [{"messages": messages(roles)} for roles in ("ua", "u", "s", "a")]
    assert len(split_turns(Dataset.from_list(rows))) == 1
    assert "3 of 4 conversations have no assistant turn after a prompt" in caplog.text


WRONG = {
    "roles": (
        [{"messages": [{"role": "human", "content": "w1"}, {"role": "gpt", "content": "w2"}]}],
        "['gpt', 'human']",
    ),
    "text": ([{"text": "w1"}], "The data has the columns ['text']"),
    "tokens": ([{"messages": messages("ua"), "input_ids": [1]}], "a column `input_ids`, whose tokens belong"),
    "labels": ([{"messages": messages("ua"), "labels": [1]}], "a column `labels`, whose tokens belong"),
    "images": ([{"messages": messages("ua"), "images": [1]}], "remove_columns('images')"),
    "string": ([{"messages": "w1"}], "Row 0: `messages` is a string"),
    "empty": ([{"messages": messages("ua")}, {"messages": []}], "Row 1: `messages` is an empty list"),
    "nothing said": ([{"messages": [*messages("u"), {"role": "assistant", "content": None}]}], "content is None"),
}


@STREAMING
@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_cut_is_refused_by_name(case, streaming):
    rows, message = WRONG[case]
    data = Dataset.from_list(rows)
    if streaming and case == "roles":
        assert list(split_turns(data.to_iterable_dataset())) == []  # as it is read, nobody knows what is still to come
        return
    with pytest.raises(ValueError, match=re.escape(message)):
        list(split_turns(data.to_iterable_dataset()) if streaming else split_turns(data, SEED))


# --- What the chat template makes of them -----------------------------------------------------------------------------


def test_rows_are_what_inference_renders_and_the_turn_with_its_own_thinking():
    tokenizer, data = make_tokenizer(TEMPLATE), thinking_conversations(8, SEED)
    rows, expected = prepared(split_turns(data), tokenizer), []
    for conversation in data["messages"]:
        for turn, message in enumerate(conversation):
            if message["role"] == "assistant":
                rendered = tokenizer.apply_chat_template(
                    conversation[:turn], add_generation_prompt=True, tokenize=False
                )
                answer = f"{TAG} {message['reasoning_content']} {TAG} {message['content']} <|im_end|>"
                prompt, completion = (tokenizer(part)["input_ids"] for part in (rendered, answer))
                expected.append((prompt + completion, [-100] * len(prompt) + completion))
    assert rows == expected
    # Whole conversations lack all thinking but the last answer's: what an earlier turn is to learn is not there
    given = {**arguments("sft", False, processor=tokenizer), "assistant_only_loss": True, "max_length": None}
    whole = make_trainer("sft", "padded", **given, train_dataset=data).train_dataset
    tag = tokenizer.convert_tokens_to_ids(TAG)
    thoughts, learnt = (sum(x.count(tag) for x in of) // 2 for of in (whole["labels"], [labels for _, labels in rows]))
    assert thoughts <= len(data) < learnt == len(rows)


def test_thinking_stays_between_the_tool_calls_of_one_answer():
    tokenizer = make_tokenizer(TEMPLATE)
    said = [*messages("ua"), {"role": "user", "content": "w9"}]
    said += [{"role": "assistant", "content": None, "tool_calls": CALL}, {"role": "tool", "content": "w7"}]
    said += [{"role": "assistant", "content": "w8"}]
    for i in (1, 3, 5):
        said[i]["reasoning_content"] = f"w3{i}"
    rows = prepared(split_turns(Dataset.from_list([{"messages": said, "tools": TOOLS}])), tokenizer)
    texts = [tokenizer.decode(ids) for ids, _ in rows]
    assert all(rendered.startswith("<|im_start|> tool w1 <|im_end|> <|im_start|> user") for rendered in texts)
    assert [["w31" in x, "w33" in x, "w35" in x] for x in texts] == [[1, 0, 0], [0, 1, 0], [0, 1, 1]]
    learnt = [tokenizer.decode([token for token in labels if token >= 0]) for _, labels in rows]
    assert learnt[1:] == ["<eos> w33 <eos> tool w1 <|im_end|>", "<eos> w35 <eos> w8 <|im_end|>"]


def test_turns_with_thinking_train_as_with_padding():
    """What a turn is learnt with and what it is remembered as lie side by side in a batch, and part ways."""
    tokenizer, data = make_tokenizer(TEMPLATE), split_turns(thinking_conversations(8, SEED))
    options = {"train_sampling_strategy": "sequential", "per_device_train_batch_size": 6, "max_length": 48}
    ours = compare("sft", lambda: arguments("sft", False, processor=tokenizer), data, "shared", **options).ours
    counts = ours.trainer.total_counts()
    assert counts.computed < counts.real


# --- Beside `assistant_only_loss` -------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_length", [None, 24])
@SHARING
def test_turns_train_as_whole_conversations_under_assistant_only_loss(model_dir, prefix_sharing, max_length):
    """
    Equal where both are right: the template writes an earlier turn as the last one, the marks of generation end where
    the turn does, long conversations lose their end, and a step has the same conversations, whose scored tokens it
    averages over.
    """
    data = conversations(6, SEED)
    options = {"model": model_dir, "max_length": max_length, "train_sampling_strategy": "sequential"}
    turns = split_turns(data)
    first, second = ({"train_dataset": rows, "per_device_train_batch_size": len(rows)} for rows in (data, turns))
    whole = run("sft", "padded", **first, **options, assistant_only_loss=True)
    ours = run("sft", "shared" if prefix_sharing else "flat", **second, **options)
    for history in (whole.log_history, ours.log_history):
        for entry in history:  # how many tokens went through, of which turns repeat some
            entry.pop("num_tokens", None)
    assert_same(whole, ours, TOLERANCE)
    counts, steps = ours.trainer.total_counts(), len(ours.losses)
    if prefix_sharing:  # a turn may part from the next one a token before its end
        distinct = sum(len(ids) for ids in whole.trainer.train_dataset["input_ids"])
        assert counts.computed <= (distinct + len(turns)) * steps
    else:
        assert counts.computed == counts.real


def test_the_name_of_a_data_set_is_no_data_set():
    with pytest.raises(ValueError, match="'trl-lib/Capybara' is not a dataset: load it with `datasets.load_dataset`"):
        split_turns("trl-lib/Capybara")


@pytest.mark.parametrize("name", ["my/own/data", "data folder", "./data", "rows.jsonl"])
def test_a_folder_that_does_not_exist_is_no_name_on_the_hub(name):
    with pytest.raises(ValueError, match="is not a file or folder here: is it misspelt?"):
        refuse_missing(name, "")
    for on_hub in ("trl-lib/Capybara", "imdb", "a_b/c.d-e"):
        refuse_missing(on_hub, "")
