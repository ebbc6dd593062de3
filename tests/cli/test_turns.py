"""`--one_sample_per_turn`: what the SFT script trains on, and what `inspect` says of it beforehand."""

import pytest

from tests.helpers.thinking import TEMPLATE, thinking_conversations
from tests.helpers.tiny import SEED, make_model, make_tokenizer
from trl_paddingfree import split_turns
from trl_paddingfree.cli import train as script

BATCH_SIZE = 4


@pytest.fixture
def conversation_files(tmp_path):
    """Conversations, a test split, and a folder with a model, as arguments of the script."""
    make_model().save_pretrained(tmp_path / "model")
    make_tokenizer(TEMPLATE).save_pretrained(tmp_path / "model")
    data = thinking_conversations(12, SEED).map(lambda row: {"label": True})  # as in data of other tasks
    data.to_json(tmp_path / "train.jsonl")
    return str(tmp_path / "train.jsonl"), str(tmp_path / "model")


def arguments(data, model, *more):
    options = {"dataset_name": data, "model_name_or_path": model, "output_dir": f"{model}-out", "use_cpu": "true"}
    options |= {"bf16": "false", "report_to": "none", "save_strategy": "no", "disable_tqdm": "true", "max_length": "40"}
    options |= {"per_device_train_batch_size": str(BATCH_SIZE), "num_train_epochs": "1", "seed": str(SEED)}
    return [part for name, value in options.items() for part in (f"--{name}", value)] + list(more)


@pytest.fixture
def trained(monkeypatch):
    """The trainers that the script has trained."""
    found = []
    monkeypatch.setattr(script, "summarize", lambda trainer, *_: found.append(trainer))
    return found


def test_the_script_trains_on_turns_and_inspect_has_counted_them(conversation_files, trained, inspected):
    data, model = conversation_files
    script.main(
        "sft", arguments(data, model, "--one_sample_per_turn", "--test_split_size", "0.2", "--eval_strategy", "epoch")
    )
    assert len(trained[0].eval_dataset) >= 3
    script.main("sft", arguments(data, model, "--one_sample_per_turn"))
    ours = trained[1]
    rows, turns = ours.train_dataset.to_list(), split_turns(thinking_conversations(12, SEED)).to_list()
    places = [turns.index({name: row[name] for name in ("prompt", "completion")}) for row in rows]
    assert places != sorted(places)  # conversations are in another order, their turns one after the other
    for place, last in zip(places, [None, *places], strict=False):
        assert place - 1 == last or all(message["role"] != "assistant" for message in turns[place]["prompt"])
    assert ours.method == "padding-free (segment, shared prefixes)"
    counts = ours.total_counts()
    options = ["--one_sample_per_turn", "--batch_size", str(BATCH_SIZE), "--max_length", "40", "--seed", str(SEED)]
    row = inspected(data, *options, tokenizer=model)["batch_sizes"][0]
    assert (row["computed_tokens"], row["real_tokens"], row["padded_slots"]) == counts.as_tuple()[:3]
    assert counts.computed < counts.real


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--assistant_only_loss", "true"],
            "`--assistant_only_loss true` cannot be combined with",
        ),
        (
            ["--train_sampling_strategy", "group_by_length"],
            "`--train_sampling_strategy group_by_length` separates the turns",
        ),
        (["--shuffle_dataset", "true"], "`--shuffle_dataset true` separates the turns"),
    ],
)
def test_options_that_take_turns_apart_are_refused(conversation_files, options, message):
    with pytest.raises(ValueError, match=message):
        script.main("sft", arguments(*conversation_files, "--one_sample_per_turn", "--traceback", *options))


def test_packed_turns_are_drawn_as_other_packed_rows(conversation_files, trained):
    script.main("sft", arguments(*conversation_files, "--one_sample_per_turn", "--batch_method", "packing"))
    args = trained[0].args
    assert (args.train_sampling_strategy, args.prefix_sharing) == ("random", False)
    assert sum(map(len, trained[0].train_dataset["seq_lengths"])) >= len(split_turns(thinking_conversations(12, SEED)))
