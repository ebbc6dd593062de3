"""What the check says of packed rows of others: it finds what is wrong, and nothing else."""

import json

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from tests.helpers.architectures import tiny_model
from tests.helpers.tiny import make_model, reward_model
from trl_paddingfree import check_packed, padding_free
from trl_paddingfree.check.packed import by_positions
from trl_paddingfree.cli.main import main

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
# By `position_ids` alone, layers with a state see other rows, and so does attention whose masks do not ask for them
LEAKING = ("bamba", "lfm2", "qwen3_next", "qwen3_5_text", "falcon_h1", "gpt_oss", "opt")
EXACT = ("llama", "mistral", "gemma3_text", "mixtral", "qwen3_moe", "gpt2")


@DTYPES
@pytest.mark.parametrize("name", EXACT)
def test_exact_models_are_exact(name, dtype):
    result = check_packed(tiny_model(name, dtype=dtype))
    assert result.passed, result
    assert result.verdict == "exact"
    assert "told of rows by `position_ids` alone" in str(result)


@DTYPES
@pytest.mark.parametrize("name", LEAKING)
def test_leaks_are_found(name, dtype):
    result = check_packed(tiny_model(name, dtype=dtype))
    assert result.verdict == "LEAKS"
    assert result.leak > 1e-2


def lengths(rows):
    return list(map(len, rows))


# Forwards of frameworks, of a model and rows, with the verdict
def forgotten_positions(model, rows):
    return model(input_ids=torch.cat(rows)[None], use_cache=False).logits[0].split(lengths(rows))


def doubled_positions(model, rows):
    places = [2 * torch.arange(len(row))[None] for row in rows]
    return [model(input_ids=r[None], position_ids=p).logits[0] for r, p in zip(rows, places, strict=True)]


def half_a_gradient(model, rows):
    return [(logits + logits.detach()) / 2 for logits in by_positions(model, rows)]


def gradient_of_one_row(model, rows):
    first, *others = by_positions(model, rows)
    return [first, *(logits.detach() + 0 * first.sum() for logits in others)]


def no_gradient(model, rows):
    return [logits.detach() for logits in by_positions(model, rows)]


def forgotten_tokens(model, rows):
    first, *others = by_positions(model, rows)
    return [torch.cat([first[:5], by_positions(model, [rows[0][5:]])[0]]), *others] if len(rows[0]) > 5 else [first]


def wrong_number(model, rows):
    return by_positions(model, rows)[:-1]


def padded(model, rows):
    ids, mask = (pad_sequence(x, batch_first=True) for x in (rows, [torch.ones_like(row) for row in rows]))
    return [x[: len(row)] for x, row in zip(model(input_ids=ids, attention_mask=mask).logits, rows, strict=True)]


def in_another_order(model, rows):
    return by_positions(model, rows[::-1])[::-1]


def in_two_calls(model, rows):
    return (
        [*by_positions(model, rows[:1]), *by_positions(model, rows[1:])] if len(rows) > 1 else by_positions(model, rows)
    )


WRONG = {
    forgotten_positions: "LEAKS",
    doubled_positions: "INEXACT",
    half_a_gradient: "INEXACT",
    gradient_of_one_row: "INEXACT",
    no_gradient: "INEXACT",
    forgotten_tokens: "INEXACT",
    wrong_number: "failed",
}


@pytest.mark.parametrize("call", WRONG)
def test_forwards_that_are_wrong_are_found(call):
    model = make_model()
    assert check_packed(model, lambda rows: call(model, rows)).verdict == WRONG[call]


@DTYPES
@pytest.mark.parametrize("call", [by_positions, padded, in_another_order, in_two_calls])
def test_forwards_that_are_right_are_exact(call, dtype):
    model = make_model(dtype=dtype)
    assert check_packed(model, lambda rows: call(model, rows)).passed


@pytest.mark.parametrize("kind", ["attention", "convolution", "recurrence", "sinks", "router"])
def test_a_leak_is_found_in_whatever_part_of_a_layer(kind, monkeypatch):
    """A forward that keeps rows apart everywhere but in one part."""
    name = {"convolution": "lfm2", "recurrence": "mamba2", "sinks": "gpt_oss", "router": "mixtral"}.get(kind, "llama")
    model = tiny_model(name)
    # The part of the first layer through which some of one row's state reaches the next row
    part = {
        "attention": lambda: model.model.layers[0].self_attn,
        "convolution": lambda: model.model.layers[0].conv,
        "recurrence": lambda: model.base_model.layers[0].mixer,
        "sinks": lambda: model.model.layers[0].self_attn.o_proj,
        "router": lambda: model.model.layers[0].mlp.gate,
    }[kind]()

    def leak(rows):
        carried = []

        def carry(module, args, kwargs):
            hidden = args[0] if args else kwargs["hidden_states"]
            if carried:
                moved = hidden + 1e-3 * carried[0].mean()
                args, kwargs = ((moved, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": moved})
            carried[:] = [hidden]
            return args, kwargs

        with part.register_forward_pre_hook(carry, with_kwargs=True):
            return [model(input_ids=row[None], use_cache=False).logits[0] for row in rows]

    alone = lambda rows: [model(input_ids=row[None], use_cache=False).logits[0] for row in rows]  # noqa: E731
    assert check_packed(model, alone).passed
    assert check_packed(model, leak).verdict == "LEAKS"


def test_what_it_cannot_read_is_refused():
    with pytest.raises(ValueError, match="reads logits of tokens, and LlamaForSequenceClassification has no head"):
        check_packed(reward_model())
    with pytest.raises(TypeError, match="takes a model of transformers"):
        check_packed(torch.nn.Linear(2, 2))


def test_the_model_is_as_before():
    model = padding_free(make_model()).train()
    weights = [p.clone() for p in model.parameters()]
    assert check_packed(model).passed
    assert model.training
    assert all(torch.equal(p, q) and p.grad is None for p, q in zip(model.parameters(), weights, strict=True))


@pytest.mark.parametrize(("name", "code"), [("llama", 0), ("lfm2", 1)])
def test_the_command_says_so_by_its_exit_status(name, code, tmp_path, tokenizer, capsys):
    tiny_model(name).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert main(["check", str(tmp_path), "--packed"]) == code
    assert ("exact" if code == 0 else "LEAKS") in capsys.readouterr().out
    assert main(["check", str(tmp_path), "--packed", "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert (found["passed"], found["verdict"]) == (code == 0, "exact" if code == 0 else "LEAKS")


def test_a_verdict_says_up_to_where_it_holds():
    model = make_model(max_position_embeddings=4096)
    result = check_packed(model)
    assert (result.documents, result.longest, result.not_compared) == (8, 1280, ())
    assert 1024 < result.length <= 2048
    assert f"for up to 8 documents of up to 1280 tokens, {result.length} in all" in str(result)

    def forgets(rows):
        return by_positions(model, rows) if len(rows) <= 8 else forgotten_positions(model, rows)

    assert check_packed(model, forgets).passed
    assert check_packed(model, forgets, documents=9, length=256).verdict == "LEAKS"
    for wrong in ({"documents": 1}, {"documents": 0}, {"length": 40}):
        with pytest.raises(ValueError, match=r"`documents=\d` with `length=\d+`"):
            check_packed(model, **wrong)


def test_what_takes_too_long_is_left_out_and_named(monkeypatch):
    monkeypatch.setattr("trl_paddingfree.check.packed._SECONDS", 0.0)
    monkeypatch.setattr("trl_paddingfree.check.packed_rows.LOGITS", 3000)
    result = check_packed(make_model(num_hidden_layers=4))
    assert result.passed
    assert (result.documents, result.longest) == (4, 104)
    for named in (
        "lm_head.weight",
        "embed_tokens.weight",
        "2 of 4 `layers` (1, 2) were left out",
        "give `length` and `documents`",
    ):
        assert named in str(result)
