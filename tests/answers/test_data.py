"""Data with several answers per prompt: what is wrong with it is named by row and column, and what is odd counted."""

import inspect
import logging

import pytest
from datasets import Dataset, IterableDataset

from tests.answers.runs import arguments, scored
from tests.helpers.tiny import DATA, make_model, make_tokenizer
from tests.runs import assert_same, make_trainer, run
from trl_paddingfree import concatenated_inputs
from trl_paddingfree.answers.examples import Choice
from trl_paddingfree.answers.prepare import NotedPreparation
from trl_paddingfree.core.versions import MovedNameError
from trl_paddingfree.registry import TRAINERS

GOOD = {"prompt": "w1", "completions": [" w2", " w3", " w4"], "scores": [2.0, 1.0, 1.0]}
CHAT = {
    "prompt": [{"role": "user", "content": "w1"}],
    "completions": [[{"role": "assistant", "content": x}] for x in ("w2", "w3")],
    "scores": [2.0, 1.0],
}
LISTED = {"prompt": "w1", "chosen": [" w2"], "rejected": [" w3", " w4"]}


def assistant(content, role="assistant"):
    return [{"role": role, "content": content}]


# The second row, and what is said of it
ROWS = {
    "scores too few": (GOOD, {"scores": [1.0]}, "`scores` has 1 entries, `completions` has 3"),
    "scores of words": (GOOD, {"scores": ["a", "b", "c"]}, r"`scores\[0\]` is 'a': scores are numbers"),
    "not a number": (GOOD, {"scores": [1.0, float("nan"), 0.0]}, r"`scores\[1\]` is nan"),
    "a missing score": (GOOD, {"scores": [1.0, None, 0.0]}, r"`scores\[1\]` is None"),
    "infinite scores": (GOOD, {"scores": [1.0, float("inf"), 0.0]}, r"`scores\[1\]` is inf"),
    "one score": (GOOD, {"scores": 1.0}, "`scores` is 1.0: it is a list of numbers"),
    "no answers": (GOOD, {"completions": [], "scores": []}, r"`completions` is \[\]: it is a list of answers"),
    "no completions": (GOOD, {"completions": None}, "`completions` is None: it is a list of answers"),
    "one completion": (GOOD, {"completions": " w2"}, "`completions` is ' w2': it is a list of answers"),
    "an answer of none": (GOOD, {"completions": [" w2", None, " w4"]}, r"`completions\[1\]` is None: an answer is"),
    "messages for text": (GOOD, {"completions": [" w2", " w3", assistant("w4")]}, r"`completions\[2\]` is a list"),
    "text for messages": (CHAT, {"completions": [assistant("w2"), "w3"]}, r"`completions\[1\]` is a text, and"),
    "no role": (CHAT, {"completions": [assistant("w2"), [{"content": "w3"}]]}, r"`completions\[1\]` is .* no role"),
    "an empty answer": (CHAT, {"completions": [assistant("w2"), []]}, r"`completions\[1\]` is an empty list"),
    "no prompt": (GOOD, {"prompt": None}, "`prompt` is None: it is a text or a list of messages"),
    "no chosen answers": (LISTED, {"chosen": []}, r"`chosen` is \[\]: it is a list of answers"),
    "a rejected number": (LISTED, {"rejected": [" w2", 5]}, r"`rejected\[1\]` is 5: an answer is a text"),
}  # fmt: skip
# All rows, and what is said of them
COLUMNS = {
    "no prompts": ([{"completions": [" w2", " w3"], "scores": [1, 0]}], "Row 0 .* there is no `prompt`, only"),
    "no scores": ([{"prompt": "w1", "completions": [" w2", " w3"]}], "Row 0 .* and no `scores`"),
    "one answer each": ([{"prompt": "w1", "completions": [" w2"], "scores": [1.0]}] * 2, "has no pair by .*: no"),
    "all tied": ([{**GOOD, "scores": [1.0] * 3}] * 2, "no prompt has two answers whose `scores` differ enough"),
    "a misspelt role": ([{**CHAT, "prompt": assistant("w1", "usr")}], "messages with the role 'usr'"),
}  # fmt: skip


def streamed(rows):
    return IterableDataset.from_generator(lambda: iter(rows))


@pytest.mark.parametrize("case", ROWS)
def test_a_bad_row_is_named_with_its_column_before_models_load(case, monkeypatch):
    good, wrong, message = ROWS[case]
    data = streamed([good, {**good, **wrong}])  # Arrow would take no rows of different kinds
    for task in ("dpo", "reward"):
        with pytest.raises(ValueError, match=f"Row 1 of the train data: {message}") as raised:
            make_trainer(
                task, "ours", model="no model", train_dataset=data, processing_class=make_tokenizer(), max_steps=1
            )
        assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize("case", COLUMNS)
def test_data_that_cannot_train_is_refused_before_models_load(case):
    rows, message = COLUMNS[case]
    with pytest.raises(ValueError, match=message):
        make_trainer(
            "dpo", "ours", model="no model", train_dataset=Dataset.from_list(rows), processing_class=make_tokenizer()
        )


def test_a_bad_row_after_the_first_hundred_is_named_when_it_is_prepared():
    rows = [GOOD] * 150 + [{**GOOD, "scores": [1.0, float("nan"), 0.0]}]
    with pytest.raises(ValueError, match=r"Row 150 of the train data: `scores\[1\]` is nan"):
        make_trainer("dpo", "ours", **arguments("dpo"), train_dataset=Dataset.from_list(rows))
    trainer = make_trainer("dpo", "ours", **arguments("dpo"), train_dataset=streamed(rows), max_steps=100)
    with pytest.raises(ValueError, match=r"Row 150 of the train data: `scores\[1\]` is nan"):
        trainer.train()


@pytest.mark.parametrize("name", ["ref_chosen_logps", "margin"])
def test_columns_that_are_of_pairs_are_refused_beside_several_answers(name):
    task = "reward" if name == "margin" else "dpo"
    data = Dataset.from_list([{**GOOD, name: 1.0}])
    with pytest.raises(ValueError, match=f"a column `{name}`, which is one value for each pair"):
        make_trainer(task, "ours", **arguments(task), train_dataset=data)


@pytest.mark.parametrize("task", ["kto", "sft"])
def test_trainers_of_single_answers_say_that_rows_share_prompts_already(task):
    with pytest.raises(ValueError, match="has no columns that") as raised:
        make_trainer(task, "ours", train_dataset=Dataset.from_list([GOOD]))
    assert "Rows that share a prompt share its computation" in "".join(raised.value.__notes__)


@pytest.mark.parametrize("task", ["sft", "kto"])
def test_columns_of_several_answers_beside_what_a_trainer_reads_are_left_out_as_in_trl(task):
    given = [{**row, **{name: GOOD[name] for name in ("completions", "scores")}} for row in DATA[task](8, 0)]
    compared = (run(task, x, train_dataset=Dataset.from_list(given), steps=2) for x in ("padded", "flat"))
    assert_same(*compared)


def test_a_transform_is_refused_by_name():
    data = Dataset.from_list([GOOD])
    with pytest.raises(ValueError, match="several answers per prompt, and a transform"):
        make_trainer("dpo", "ours", **arguments("dpo"), train_dataset=data.with_transform(lambda rows: rows))


OPTIONS = {
    "no choice": ("dpo", {"answer_pairs": "most"}, "`answer_pairs='most'` must be one of 'all', 'best', 'extremes'"),
    "a negative margin": ("dpo", {"min_score_margin": -1.0}, "`min_score_margin=-1.0` must be a number of at least 0"),
    "no number": ("dpo", {"min_score_margin": float("nan")}, "`min_score_margin=nan` must be a number"),
    "data of pairs": ("dpo", {"answer_pairs": "best"}, "the options choose pairs by `scores`, and the data has none"),
    "single answers": ("kto", {"answer_pairs": "best"}, "KTOTrainer reads no pairs"),
    "generated answers": ("grpo", {"min_score_margin": 1.0}, "GRPOTrainer reads no pairs"),
    "lists": (
        "reward",
        {"answer_pairs": "best", "train_dataset": Dataset.from_list([LISTED])},
        "choose pairs by `scores`, and the data has none",
    ),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options_without_an_effect_are_refused(case):
    task, options, message = OPTIONS[case]
    for padding_free in (True, False):
        with pytest.raises(ValueError, match=message):
            make_trainer(task, "ours", **options, padding_free=padding_free)


def said(caplog, data, **options):
    """What the log says of the data of a trainer."""
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        make_trainer("dpo", "ours", **arguments("dpo"), train_dataset=data, **options)
    return [record.message for record in caplog.records if record.message.startswith("The train data")]


def test_what_is_dropped_and_what_is_odd_is_counted_in_one_line(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("trl_paddingfree"), "propagate", True)
    equal = {"prompt": "w1", "completions": [" w2", " w2"], "scores": [1.0, 0.0]}
    long = {"prompt": " ".join(["w1"] * 30), "completions": [" w2", " w3"], "scores": [1.0, 0.0]}
    data = Dataset.from_list([GOOD, equal, {**equal, "scores": [1.0, 1.0]}, long, long])
    assert said(caplog, data, max_length=20) == [
        "The train data: dropped 1 of 5 prompts, which have no pair by `answer_pairs='all'` with "
        "`min_score_margin=0.0`; dropped 2 of 5 pairs, and with them 2 prompts, for which `max_length` leaves no room; "
        "1 of 3 pairs have equal answers with different scores, which are kept, as in TRL."
    ]
    assert said(caplog, Dataset.from_list([GOOD])) == []


def test_what_the_tokenizer_lacks_or_has_too_much_of_is_named():
    data = Dataset.from_list([GOOD])
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="is plain text, and the tokenizer has no `eos_token` to end an answer"):
        make_trainer("dpo", "ours", **arguments("dpo") | {"processing_class": tokenizer}, train_dataset=data)
    small = arguments("dpo", model=make_model(vocab_size=12))
    with pytest.raises(ValueError, match="`answer_ids` of the train data has the token 1[1-9]"):
        make_trainer("dpo", "ours", **small, train_dataset=data.map(lambda row: {"prompt": "w0"}))


def test_nothing_left_is_an_error():
    data = Dataset.from_list([{"prompt": " ".join(["w1"] * 30), "completions": [" w2", " w3"], "scores": [1.0, 0.0]}])
    with pytest.raises(ValueError, match="dropped 1 of 1 pairs.*Nothing is left to train on"):
        make_trainer("dpo", "ours", **arguments("dpo"), train_dataset=data, max_length=20)


def test_a_margin_holds_but_for_rounding():
    assert Choice("all", 0.1).pairs([0.3, 0.2]) == [(0, 1)]
    assert Choice("all", 0.1).pairs([0.3, 0.21]) == []


@pytest.mark.parametrize("task", ["dpo", "reward"])
def test_trls_preparation_maps_rows_one_by_one(task, monkeypatch):
    """An upgrade of TRL that maps batches fails here, and by name where data is prepared."""
    options = []

    class Noted(NotedPreparation):
        def map(self, function, **given):
            options.append(given)
            return super().map(function, **given)

    example = {"prompt": "w1", "chosen": " w2", "rejected": " w3"}
    TRAINERS[task].task.prepare(noted := Noted(example), make_tokenizer(), max_length=20)
    assert len(noted.maps) == 2  # the end of a text, and its tokens
    assert len(noted.filters) == 1
    assert all(given.keys() <= {"fn_kwargs", "num_proc", "desc"} for given in options)

    of_trl = TRAINERS[task].trl_trainer._prepare_dataset

    def in_batches(self, dataset, *args):
        return of_trl(self, dataset, *args).map(lambda rows: rows, batched=True)

    monkeypatch.setattr(TRAINERS[task].trl_trainer, "_prepare_dataset", in_batches)
    with pytest.raises(MovedNameError, match="map of single rows"):
        make_trainer(task, "ours", **arguments(task), train_dataset=Dataset.from_list([GOOD]), max_length=20)


@pytest.mark.parametrize("task", ["sft", "dpo", "reward", "kto"])
@pytest.mark.parametrize("padding_free", [True, False])
def test_a_subclass_may_name_what_it_gives_to_prepare_a_dataset(task, padding_free):
    class Own(TRAINERS[task]):
        def _prepare_dataset(self, dataset, processing_class, args, *others, **named):
            names = [*inspect.signature(TRAINERS[task].trl_trainer._prepare_dataset).parameters][4:]
            return super()._prepare_dataset(
                dataset, processing_class=processing_class, args=args, **dict(zip(names, others, strict=False)), **named
            )

    for data in (DATA[task](8, 0), *([scored(4, 3)] if task in ("dpo", "reward") else ())):
        given = {"train_dataset": data, "padding_free": padding_free}
        given |= {"model": make_model(), "processing_class": make_tokenizer()} if task == "sft" else arguments(task)
        expected, prepared = (
            make_trainer(task, "ours", trainer_class=cls, **given).train_dataset for cls in (TRAINERS[task], Own)
        )
        assert prepared.to_list() == expected.to_list()


def test_other_columns_reach_the_template_and_subclasses():
    tokenizer = make_tokenizer("{{ tools[0]['name'] if tools else '' }} " + make_tokenizer().chat_template)
    tools = [{"name": "w9"}]
    trainer = make_trainer(
        "dpo",
        "ours",
        **arguments("dpo") | {"processing_class": tokenizer},
        train_dataset=Dataset.from_list([{**CHAT, "tools": tools}]),
    )
    assert trainer.train_dataset[0]["prompt_ids"][0] == tokenizer.convert_tokens_to_ids("w9")


def test_the_rows_of_all_pairs_are_laid_out_chosen_first():
    answers = {"prompt_ids": [1, 2], "answer_ids": [[3], [4, 5], [6]], "answer_pairs": [[0, 2], [1, 2]]}
    batch = concatenated_inputs([{**answers, "prompt_lengths": [2, 2, 2]}], padding_free=False)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 0], [1, 2, 4, 5], [1, 2, 6, 0], [1, 2, 6, 0]]
    assert concatenated_inputs([{**answers, "prompt_lengths": [2, 2, 2]}])["input_ids"].tolist() == [
        [1, 2, 3, 2, 4, 5, 2, 6]
    ]


@pytest.mark.trl_1
def test_answers_to_evaluate_are_read_whenever_they_come():
    """Also if the trainer has trained on pairs: in `evaluate` and, once prepared, in `predict`."""
    pairs = Dataset.from_list([{"prompt": "w1", "chosen": " w2", "rejected": " w3 w4"}] * 4)
    data = scored(4, 3)
    fresh = make_trainer("dpo", "ours", **arguments("dpo"), train_dataset=data, eval_dataset={"a": data})
    expected = fresh.evaluate()["eval_a_loss"]

    trainer = make_trainer("dpo", "ours", **arguments("dpo"), train_dataset=pairs)
    assert trainer.evaluate(data)["eval_loss"] == pytest.approx(expected)
    prepared = trainer._prepare_dataset(data, trainer.processing_class, trainer.args, "test")
    assert trainer.predict(prepared).metrics["test_loss"] == pytest.approx(expected)
    assert trainer.evaluate(data.to_iterable_dataset())["eval_loss"] == pytest.approx(expected)


@pytest.mark.trl_1
def test_compute_metrics_sees_the_rows_of_all_pairs():
    data, shapes = Dataset.from_list([GOOD] * 2), []

    def compute_metrics(prediction):
        shapes.append(prediction.predictions.shape[0])
        return {}

    given = {"train_dataset": data, "eval_dataset": data, "compute_metrics": compute_metrics}
    make_trainer("dpo", "ours", **arguments("dpo"), **given, per_device_eval_batch_size=2).evaluate()
    assert shapes == [2 * 2 * 2]


@pytest.mark.parametrize("padding_free", [True, False])
def test_pairs_are_logged_and_stand_on_the_model_card(padding_free):
    data, options = Dataset.from_list([GOOD] * 8), {"steps": 2, "padding_free": padding_free}
    result = run("dpo", "ours", **arguments("dpo"), train_dataset=data, **options)
    logged = [log.get("flat/pairs") for log in result.log_history if "loss" in log]
    assert logged == ([8, 8] if padding_free else [None, None])
    assert result.trainer.sample_unit == "prompts"
    result.trainer.create_model_card()
    with open(f"{result.trainer.args.output_dir}/README.md") as card:
        assert "several answers per prompt were chosen by `answer_pairs='all'`" in card.read()


@pytest.mark.parametrize("arrange", ["tokens", "prefix"])
def test_micro_batches_are_arranged_by_the_tokens_of_prompts_with_all_answers(arrange):
    data = scored(12, 4)
    options = {"train_dataset": data, "steps": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    runs = [run("dpo", "ours", **arguments("dpo"), **options, arrange_micro_batches=each) for each in ("none", arrange)]
    prompts = runs[1].trainer.example_lengths()
    assert prompts.shape == (12, 1 + max(map(len, runs[1].trainer.train_dataset["answer_ids"])))
    assert sum(log["flat/pairs"] for log in runs[0].log_history if "loss" in log) == sum(
        log["flat/pairs"] for log in runs[1].log_history if "loss" in log
    )
