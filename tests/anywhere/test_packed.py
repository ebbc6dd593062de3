"""What the check says of packed rows of others: it finds what is wrong, and nothing else."""

import json
import sys
from functools import partial

import pytest
import torch

from tests.anywhere.test_planted import leaky, placed, when
from tests.helpers.architectures import tiny_model
from tests.helpers.reference_flash import reference_flash
from tests.helpers.tiny import DTYPES, make_model, reward_model
from trl_paddingfree import check_packed, padding_free
from trl_paddingfree.cli.main import main
from trl_paddingfree.packed.rows import trl_collator

# Without kernels, some layers with a state refuse TRL's arguments. Others ignore them, and so do some masks
VERDICTS = {
    **dict.fromkeys(("llama", "mistral", "gemma3_text", "mixtral", "qwen3_moe", "gpt2"), "exact"),
    **dict.fromkeys(("gpt_oss", "opt", "mamba", "jamba"), "LEAKS"),
    **dict.fromkeys(("bamba", "lfm2", "qwen3_next", "qwen3_5_text", "mamba2"), "failed"),
}


@DTYPES
@pytest.mark.parametrize("name", VERDICTS)
def test_rows_that_are_packed_as_trl_packs_them(name, dtype):
    result = check_packed(tiny_model(name, dtype=dtype))
    assert result.verdict == VERDICTS[name], result
    assert result.verdict != "LEAKS" or result.leak > 1e-2
    assert "packed by TRL's `packing=True`" in str(result)
    assert result.verdict != "failed" or "keep packed sequences apart" in result.failure


def test_without_trl_rows_get_what_trl_gives_them(monkeypatch):
    """An upgrade of TRL that gives packed rows something else fails here."""
    rows = [{"input_ids": row} for row in ([3, 4, 5], [6], [7, 8])]
    with_trl = trl_collator()(rows)
    monkeypatch.setitem(sys.modules, "trl.trainer.sft_trainer", None)
    torch.testing.assert_close({**trl_collator.__wrapped__()(rows)}, {**with_trl})
    assert with_trl.keys() > {"cu_seq_lens_q", "seq_idx"}


def test_what_it_cannot_read_is_refused():
    with pytest.raises(ValueError, match="reads logits of tokens, and LlamaForSequenceClassification has no head"):
        check_packed(reward_model())


def test_the_model_is_as_before():
    model = padding_free(make_model()).train()
    weights = [p.clone() for p in model.parameters()]
    assert check_packed(model).passed
    assert model.training
    assert all(torch.equal(p, q) and p.grad is None for p, q in zip(model.parameters(), weights, strict=True))


@pytest.mark.parametrize(("name", "code"), [("llama", 0), ("opt", 1)])
def test_the_command_says_so_by_its_exit_status(name, code, tmp_path, tokenizer, capsys):
    tiny_model(name).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    verdict = "LEAKS" if code else "exact"
    assert main(["check", str(tmp_path), "--packed"]) == code
    assert verdict in capsys.readouterr().out
    assert main(["check", str(tmp_path), "--packed", "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert (found["passed"], found["verdict"]) == (code == 0, verdict)


def test_a_verdict_says_up_to_where_it_holds():
    model = make_model(max_position_embeddings=4096)
    result = check_packed(model)
    assert (result.documents, result.longest, result.not_compared) == (8, 1280, ())
    assert 1024 < result.length <= 2048
    assert f"for up to 8 documents of up to 1280 tokens, {result.length} in all" in str(result)

    leaks = when(lambda model, rows: len(rows) > 8, leaky)
    assert check_packed(model, partial(leaks, model)).passed
    assert check_packed(model, partial(leaks, model), documents=9, length=256).verdict == "LEAKS"
    for wrong in ({"documents": 1}, {"documents": 0}, {"length": 40}):
        with pytest.raises(ValueError, match=r"`documents=\d` with `length=\d+`"):
            check_packed(model, **wrong)


def test_what_takes_too_long_is_left_out_and_named(monkeypatch):
    monkeypatch.setattr("trl_paddingfree.packed.check._SECONDS", 0.0)
    monkeypatch.setattr("trl_paddingfree.core.check.training._ENTRIES", 3000)
    model = make_model(num_hidden_layers=4)
    assert check_packed(model, partial(placed(torch.zeros_like), model)).verdict == "INEXACT"
    result = check_packed(model)
    assert result.passed
    assert (result.documents, result.longest) == (5, 104)
    for named in (
        "weights, large or sharded, were not compared",
        "2 of 4 `layers` (1, 2) were left out",
        "give `length` and `documents`",
    ):
        assert named in str(result)


@pytest.mark.parametrize("name", ["codegen", "whisper"])
def test_models_that_name_no_padding_token_or_their_limit_in_another_way_are_checked(name):
    assert check_packed(tiny_model(name)).passed
    if name == "whisper":  # whose own forward calls a module within its backbone
        with reference_flash():
            assert check_packed(tiny_model(name, attn_implementation="flash_attention_2")).passed
