"""Verdicts that are remembered: a restart takes none of the check, and whatever has changed since is checked again."""

import copy
import functools
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from peft import get_peft_model
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from tests.core.check.test_mutations import leak
from tests.helpers.architectures import tiny_model, with_head
from tests.helpers.folders import needs
from tests.helpers.launching import TIMEOUT, assert_same_run, command, finished
from tests.helpers.tiny import arguments, lora, make_model
from tests.runs import make_trainer, run
from trl_paddingfree import FlatModel, UnprovenModelError, machine, padding_free
from trl_paddingfree.remembering import fingerprint, verdicts
from trl_paddingfree.remembering.verdicts import BESIDE, VARIABLE, cache_folder

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def key(model, call=None, *settings):
    return fingerprint.fingerprint(model, model if call is None else call, "sdpa", *settings)


def lines(caplog):
    found = [message for message in caplog.messages if message.startswith(("Padding-free", "Slices"))]
    caplog.clear()
    return found


def leaky(forward):
    def wrong(self, states):
        output = forward(self, states)
        return leak(output) if states.size(0) == 1 and states.size(1) > 20 else output

    return wrong


def test_a_model_has_a_key_under_tf32(monkeypatch):
    """Which `tf32=True` sets by the newer of PyTorch's two ways, beside which the older one cannot be asked."""
    model = with_head(make_model())
    before = key(model)
    monkeypatch.setattr(torch.backends, "fp32_precision", "tf32")
    assert key(model) != before


# --- What passed is remembered -------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["dpo", "reward"])
def test_a_second_start_computes_nothing_and_takes_the_same_route(task, folder, caplog, monkeypatch):
    budget = {"max_tokens_per_micro_batch": 60}
    first = make_trainer(task, "ours", **budget)
    assert "(checked in" in lines(caplog)[0]
    assert len([*folder.glob("*.json")]) == 2  # rows, and slices
    for name in ("prove", "prove_again"):
        monkeypatch.setattr(f"trl_paddingfree.core.trainers.proving.{name}", None)
    second = make_trainer(task, "ours", **budget)
    assert first.runtime.route == second.runtime.route
    said = lines(caplog)
    assert "exact on up to" in said[0]
    assert "remembered from 20" in said[0]
    assert f"`{VARIABLE}=off` checks again" in said[0]
    assert said[1].startswith("Slices within the budget: exact on up to")


def test_a_run_from_a_remembered_verdict_is_the_same_run(folder):
    checked, recalled = (run("dpo", "shared") for _ in range(2))
    assert checked.losses == recalled.losses
    assert all(torch.equal(weight, recalled.weights[name]) for name, weight in checked.weights.items())


def key_with_adapters():
    model = get_peft_model(make_model(), lora())
    return key(model.get_base_model(), model)


def test_processes_have_the_same_key_whatever_their_hashes_are():
    code = "from tests.remembering.test_remembered import key_with_adapters; print(key_with_adapters())"
    command, keys = [sys.executable, "-c", code], set()
    for seed in "12":
        env = {**os.environ, "PYTHONHASHSEED": seed}
        keys.add(subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    (found,) = keys
    assert len(found.strip()) == 64


def test_a_checkpoint_brings_the_verdict_to_a_machine_with_another_cache(folder, tmp_path, monkeypatch, caplog):
    options = {"output_dir": str(tmp_path / "out"), "save_strategy": "steps", "save_steps": 1, "steps": 1}
    run("dpo", "ours", **options)
    (kept,) = (tmp_path / "out").glob(f"checkpoint-1/{BESIDE}")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "another"))
    lines(caplog)
    make_trainer("dpo", "ours", **options)
    assert "remembered from" in lines(caplog)[0]
    kept.write_text("[]")
    make_trainer("dpo", "ours", **options)
    assert "checked in" in lines(caplog)[0]


def test_processes_that_remember_different_verdicts_check_again(folder, monkeypatch, caplog):
    check = make_trainer("dpo", "ours").runtime.check
    (name,) = check.earlier.of_run
    assert check._recalled(name) is not None
    gathered = check._gathered
    monkeypatch.setattr(check, "_gathered", lambda found: torch.cat([gathered(found), torch.tensor([0])]))
    assert check._recalled(name) is None


# --- What has changed is checked again -----------------------------------------------------------------------------


def hook(patch, model):
    model.model.layers[0].mlp.register_forward_hook(
        lambda module, args, output: leak(output) if output.size(0) == 1 and output.size(1) > 20 else output
    )


def own_forward(patch, model):
    mlp = model.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda states: (
        leak(forward(states)) if states.size(0) == 1 and states.size(1) > 20 else forward(states)
    )


def of_class(patch, model):
    patch.setattr(LlamaMLP, "forward", leaky(LlamaMLP.forward))


def called_function(patch, model):
    silu = torch.nn.functional.silu

    def wrong(states, inplace=False):
        return leak(silu(states)) if states.size(0) == 1 and states.size(1) > 20 else silu(states)

    patch.setattr(torch.nn.functional, "silu", wrong)


def called_function_by_a_decorator(patch, model):
    silu = torch.nn.functional.silu

    @functools.wraps(silu)
    def wrong(states, inplace=False):
        return leak(silu(states)) if states.size(0) == 1 and states.size(1) > 20 else silu(states)

    patch.setattr(torch.nn.functional, "silu", wrong)


def subclass(patch, model):
    class Norm(LlamaRMSNorm):
        forward = leaky(LlamaRMSNorm.forward)

    model.model.norm.__class__ = Norm


PLANTED = [hook, own_forward, of_class, called_function, called_function_by_a_decorator, subclass]


@pytest.mark.parametrize("plant", PLANTED)
def test_a_leak_that_is_planted_after_a_verdict_was_kept_is_found(plant, folder, monkeypatch):
    make_trainer("dpo", "ours", **arguments("dpo", False))
    given = arguments("dpo", False)
    plant(monkeypatch, given["model"])
    with pytest.raises(UnprovenModelError):
        make_trainer("dpo", "ours", **given, flat_attention="segment")


def test_an_attention_function_under_the_same_name_is_another_one(monkeypatch):
    def attend(*args, scale=1.0, **kwargs):
        return sdpa_attention_forward(*args, **kwargs)

    def other(*args, scale=2.0, **kwargs):
        return sdpa_attention_forward(*args, **kwargs)

    keys, model = [], with_head(tiny_model("llama"))
    for function in (attend, other):
        AttentionInterface.register("of_the_user", function)
        keys.append(fingerprint.fingerprint(model, model, "of_the_user"))
    assert keys[0] != keys[1]


def decorated(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)

    return call


class Decorated(torch.nn.Module):
    @decorated
    def forward(self, states):
        return self.scaled(states)

    def scaled(self, states):
        return states


def test_a_method_that_a_decorated_forward_calls_is_in_the_key(monkeypatch):
    model = with_head(make_model())
    model.model.layers[0].mlp = Decorated()
    before = key(model)
    assert key(model) == before
    monkeypatch.setattr(Decorated, "scaled", lambda self, states: 2 * states)
    assert key(model) != before


def with_adapters(model):
    return get_peft_model(model, lora())


def switched(model):
    adapted = get_peft_model(model, lora())
    adapted.add_adapter("other", lora())
    adapted.set_adapter("other")
    return adapted


CHANGES = {
    "dtype": lambda model: model.to(torch.bfloat16),
    "one dtype": lambda model: model.model.norm.to(torch.bfloat16),
    "adapters": with_adapters,
    "setting": lambda model: setattr(model.config, "rms_norm_eps", 0.5),
    "attribute": lambda model: setattr(model.model.layers[1].self_attn, "scaling", 0.5),
    "frozen": lambda model: model.model.layers[0].requires_grad_(False),
    "zero": lambda model: torch.nn.init.zeros_(model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)),
    "buffer": lambda model: model.model.rotary_emb.inv_freq.mul_(2),
    "hook on gradients": lambda model: model.lm_head.weight.register_hook(lambda gradient: 2 * gradient),
    "hook on a module": lambda model: model.model.register_forward_pre_hook(lambda *_: None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_a_model_changes_its_key(change):
    models = [with_head(make_model()) for _ in range(3)]
    CHANGES[change](models[2])
    keys = [key(model) for model in models]
    assert keys[0] == keys[1] != keys[2]


def test_switched_adapters_and_versions_change_the_key(monkeypatch):
    model = switched(make_model())
    before = key(model.get_base_model(), model)
    model.set_adapter("default")
    assert key(model.get_base_model(), model) != before
    model.set_adapter("other")
    model.train()  # the mode is no change, nor are values of what trains
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(1)
    assert key(model.get_base_model(), model) == before
    for package in ("torch", "causal-conv1d"):  # a new version, and kernels that were not installed before
        with monkeypatch.context() as patch:
            patch.setattr(machine, "version", lambda name, new=package: "9.9" if name == new else version(name))
            assert key(model.get_base_model(), model) != before


def test_what_cannot_be_told_is_never_remembered(folder):
    given = arguments("dpo", False)
    given["model"].model.lock = type("Foreign", (), {"__slots__": ()})()
    make_trainer("dpo", "ours", **given)
    assert len([*folder.glob("*.json")]) == 1  # of the reference model


# --- `padding_free`, outside of trainers ------------------------------------------------------------------------------


class WithValues(torch.nn.Module):
    """A wrapper with a head of values, beside the model."""

    scale = 1.0

    def __init__(self, model, head):
        super().__init__()
        self.model, self.config = model, model.config
        self.head = head
        self.shift = torch.nn.Parameter(torch.zeros(1))

    def forward(self, **inputs):
        inputs.pop("labels", None)
        hidden = self.model.base_model(**inputs).last_hidden_state
        values = self.scale * self.head(hidden).squeeze(-1) + self.shift
        return CausalLMOutput(logits=self.model.lm_head(hidden)) | {"values": values}


def plain_head():
    torch.manual_seed(0)
    return torch.nn.Linear(32, 1)


def said_of(caplog):
    (line,) = (message for message in caplog.messages if message.startswith("padding_free, "))
    caplog.clear()
    return line


@pytest.mark.parametrize("model_type", ["llama", "biogpt"])
def test_padding_free_remembers_what_was_found_of_a_model_and_of_its_calls(model_type, folder, caplog, monkeypatch):
    make = lambda: tiny_model(model_type, use_cache=False)  # noqa: E731
    kinds = ("with_left_padding", "with_routers", "with_labels")
    first = padding_free(make())
    assert "(checked in" in said_of(caplog)
    padding_free(make(), check=False)
    assert len([*folder.glob("*.json")]) == 1
    for name in ("prove", "_CallWithRows.try_calls"):
        monkeypatch.setattr(f"trl_paddingfree.anywhere.prove.{name}", None)
    second = padding_free(make())
    line = said_of(caplog)
    assert "exact" in line
    assert "remembered from 20" in line
    assert f"`{VARIABLE}=off` checks again" in line
    flat = [FlatModel.of(model) for model in (first, second)]
    assert flat[0].route == flat[1].route
    found = [{name: vars(each.padded)[name] for name in kinds} for each in flat]
    assert found[0] == found[1]
    assert all(found[0].values()) == (model_type == "llama")  # whose positions count padding on the left
    ids, mask = torch.arange(5, 17).view(2, 6), torch.ones(2, 6, dtype=torch.long)
    mask[1, 4:] = 0
    answers = [model(input_ids=ids, attention_mask=mask).logits for model in (first, second)]
    assert torch.equal(*answers)
    assert flat[1].counts.computed == 10
    monkeypatch.setenv(VARIABLE, "off")
    with pytest.raises(TypeError):  # it checks again
        padding_free(make())


@pytest.mark.parametrize("plant", PLANTED)
def test_padding_free_finds_a_leak_that_is_planted_after_a_verdict_was_kept(plant, folder, monkeypatch):
    padding_free(make_model())
    model = make_model()
    plant(monkeypatch, model)
    with pytest.raises(UnprovenModelError):
        padding_free(model)


def test_the_verdict_of_a_trainer_is_none_of_padding_free_nor_the_other_way_round(folder, caplog):
    make_trainer("dpo", "ours", **arguments("dpo", False))
    padding_free(arguments("dpo", False)["model"])
    assert "checked in" in said_of(caplog)
    padding_free(with_head(make_model()))
    lines(caplog)
    make_trainer("sft", "ours", **arguments("sft", False))
    assert "checked in" in lines(caplog)[0]


def leak_in_head(patch, model):
    model.head.register_forward_hook(lambda module, args, output: output + output[:, -1:])


def scaled(patch, model):
    model.scale = 2.0


def forward_of_wrapper(patch, model):
    forward = model.forward
    model.forward = lambda **inputs: forward(**inputs)


CHANGED_AROUND = {
    "a hook on the head": leak_in_head,
    "a parameter of the wrapper": lambda patch, model: model.shift.requires_grad_(False),
    "a setting of the wrapper": scaled,
    "its forward": forward_of_wrapper,
}


@pytest.mark.parametrize("change", CHANGED_AROUND)
def test_what_is_around_a_model_changes_its_key(change, monkeypatch):
    models = [WithValues(make_model(), plain_head()) for _ in range(3)]
    CHANGED_AROUND[change](monkeypatch, models[2])
    keys = [key(model.model, model) for model in models]
    assert keys[0] == keys[1] != keys[2]


def test_a_head_that_begins_to_read_padding_is_found_though_a_verdict_was_kept(folder, caplog):
    padding_free(WithValues(make_model(), plain_head()))
    assert "checked in" in said_of(caplog)
    padding_free(WithValues(make_model(), plain_head()))
    assert "remembered" in said_of(caplog)
    model = WithValues(make_model(), plain_head())
    leak_in_head(None, model)
    with pytest.raises(UnprovenModelError, match="`values`"):
        padding_free(model)


# --- Files ----------------------------------------------------------------------------------------------------------


BROKEN = ["", "[]", "null", "{", '{"day": 1}', "not", "\x00\xff", '{"results": [], "verdict": null, "day": ""}']


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_or_foreign_file_is_checked_again_without_a_word(text, folder, caplog):
    make_trainer("dpo", "ours")
    (kept,) = folder.glob("*.json")
    good = json.loads(kept.read_text())
    kept.write_text(text, encoding="latin-1")
    lines(caplog)
    make_trainer("dpo", "ours")
    (line,) = lines(caplog)
    assert "checked in" in line
    assert json.loads(kept.read_text()) == good
    wrong = copy.deepcopy(good)
    wrong["results"][0]["error"] = 1.0
    kept.write_text(json.dumps(wrong))
    make_trainer("dpo", "ours")
    assert "checked in" in lines(caplog)[0]


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file" / "cache"))
    make_trainer("dpo", "ours")
    assert "checked in" in lines(caplog)[0]


def test_where_verdicts_are_kept(monkeypatch):
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_folder() == Path("/caches/trl-paddingfree")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "trl-paddingfree"
    monkeypatch.setenv(VARIABLE, "off")
    assert cache_folder() is None
    assert verdicts.Remembered().recall("key") is None


def test_a_verdict_for_lack_of_memory_is_not_kept(folder, monkeypatch):
    make_trainer("dpo", "ours")
    (kept,) = folder.glob("*.json")
    plain = json.loads(kept.read_text())
    record = verdicts.read_record(plain)
    kept.unlink()
    for failure in ("OutOfMemoryError: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "not exact on another process"):
        failed = record.results[0].__class__(record.results[0].route, failure=failure)
        verdicts.Remembered().keep("key", [*record.results, failed])
        assert not [*folder.glob("*.json")]


@needs("groups")
def test_processes_of_a_group_take_over_their_verdict(folder, model_dir, tmp_path):
    options = {"max_steps": 1, "sequence_parallel_size": 2}
    runs = [("dpo", model_dir, tmp_path / name, options) for name in ("one", "two")]
    said = [finished(command(2, each), 2 * TIMEOUT, **{VARIABLE: str(folder)}) for each in runs]
    first, second = (process.stdout + process.stderr for process in said)
    assert "(checked in" in first
    assert "remembered from" not in first
    assert "remembered from" in second
    assert "(checked in" not in second
    one, two = (json.loads((output / "result.json").read_text()) for _, _, output, _ in runs)
    assert_same_run(one, two)
