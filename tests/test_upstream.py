"""Every private name of transformers, TRL and accelerate that the package touches, and what it takes for granted.

An upgrade that moves one of them fails here, under its name.
"""

import ast
import copy
import importlib
import inspect
import re
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import AttentionInterface, AttentionMaskInterface
from trl import DPOConfig, SFTConfig
from trl.trainer.utils import FusedCausalLMOutput, add_fused_lm_head

from tests.helpers.architectures import tiny_model
from tests.helpers.tiny import make_model
from tests.test_house import FILES
from trl_paddingfree.core import upstream, versions
from trl_paddingfree.core.flat.layout import FlatLayout
from trl_paddingfree.core.flat.segments import Segments
from trl_paddingfree.core.model import architecture
from trl_paddingfree.core.model.attention import BOUNDARIES
from trl_paddingfree.core.model.forward import is_pooled
from trl_paddingfree.core.model.kernels import torch_varlen
from trl_paddingfree.core.model.told import FlatMask
from trl_paddingfree.registry import TRAINERS

# Where each private name lives, and the parameters that we give it; `None` of what is not called
PRIVATE = {
    "transformers:PreTrainedModel._can_set_attn_implementation": "",
    "transformers:PreTrainedModel._is_stateful": None,
    "torch.distributed.fsdp:FSDPModule._get_fsdp_state": "",
    "torch.distributed.distributed_c10d:_get_default_store": "",
    "torch:Tensor._backward_hooks": None,
    "torch:Tensor._post_accumulate_grad_hooks": None,
    "torch:_dynamo": None,
    "torch.nn.modules.module:_global_forward_hooks": None,
    "torch.nn.modules.module:_global_forward_pre_hooks": None,
    "transformers:PreTrainedConfig._attn_implementation": None,
    "transformers.modeling_flash_attention_utils:_flash_attention_forward": "query_states key_states value_states "
    "attention_mask query_length is_causal softmax_scale sliding_window softcap dropout use_top_left_mask target_dtype "
    f"attn_implementation {' '.join(BOUNDARIES[:4])}",
    "transformers.integrations.liger:apply_liger_kernel": "model kernel_config",
    "transformers:Trainer._get_num_items_in_batch": "batch_samples device",
    "transformers:Trainer._get_train_sampler": "",
    "transformers:Trainer._prepare_inputs": "inputs",
    "transformers:Trainer._save_checkpoint": "model trial",
    "transformers:Trainer._issue_warnings_after_load": "load_result",
    "transformers:Trainer._load_best_model": "",
    "transformers:Trainer._load_callback_state": "",
    "transformers:Trainer._load_from_checkpoint": "resume_from_checkpoint model",
    "transformers:Trainer._load_rng_state": "checkpoint",
    "transformers:Trainer._save_rng_state": "output_dir",
    "trl.trainer.utils:_CHUNKED_LOGPROB_CHUNK_SIZE": None,
    "trl.kernels.chunked_logprob:_use_triton": "device",
    "torch.autograd:_unsafe_preserve_version_counter": "tensors",
    "torch.nn.attention.varlen:_varlen_attn_backward": None,
    "torch:Tensor._base": None,
    "torch:Tensor._version": None,
    "accelerate.state:GradientState._set_sync_gradients": "sync_gradients",
    "trl:DPOTrainer._name": None,
    "trl:SFTTrainer._name": None,
    "trl:DPOTrainer._prepare_dataset": "dataset processing_class args dataset_name",
    "trl:SFTTrainer._prepare_dataset": "dataset processing_class args packing formatting_func dataset_name",
    "trl:DPOTrainer._precompute_ref_logps": "",
    "trl:KTOTrainer._name": None,
    "trl:KTOTrainer._compute_kl_logps": "model batch",
    "trl:KTOTrainer._precompute_ref_logps": "",
    "trl:KTOTrainer._prepare_dataset": "dataset processing_class args dataset_name",
    "trl:RewardTrainer._name": None,
    "trl:RewardTrainer._prepare_dataset": "dataset processing_class args dataset_name",
    **{
        f"trl:{trainer}.{name}": parameters
        for trainer in ("GRPOTrainer", "RLOOTrainer", "DistillationTrainer")
        for name, parameters in {
            "_name": None,
            "_generate_and_score_completions": "inputs",
            "_generate_single_turn": "prompt_ids",
            "_prepare_inputs": "generation_batch",
            "_tokenize_prompts": "prompts",
        }.items()
    },
    "trl:GRPOTrainer._calculate_rewards": "inputs prompts completions completion_ids_list",
    "trl:RLOOTrainer._calculate_rewards": "inputs prompts completions completion_ids_list",
    "trl:GRPOTrainer._get_per_token_logps_and_entropies": "model input_ids attention_mask pixel_values",
    "trl:RLOOTrainer._get_per_token_logps_and_entropies": "model input_ids attention_mask pixel_values",
    "trl:DistillationTrainer._compute_loss": "unwrapped_student inputs num_items_in_batch",
    "trl:DistillationTrainer._get_last_hidden_state": "unwrapped_model input_ids attention_mask logits_to_keep",
    "trl:DPOTrainer._set_signature_columns_if_needed": "",
    "trl:SFTTrainer._set_signature_columns_if_needed": "",
}
# Set on instances, by the `__init__` of the class
INSTANCE = {
    f"{'transformers' if owner == 'Trainer' else 'trl'}:{owner}.{name}"
    for owner, names in versions.INSTANCE_NAMES.items()
    for name in names.split()
}
# Set by functions and methods elsewhere: where they are written
SET_ELSEWHERE = {
    "_is_sac_wrapped": "trl.models.selective_activation_checkpointing",
    "_gradient_checkpointing_func": "transformers.modeling_utils",
    "_modules": "torch.nn.modules.module",
    "_orig_mod": "torch._dynamo.eval_frame",
    "_backward_pre_hooks": "torch.nn.modules.module",
    "_actions": "argparse",
    "_check_value": "argparse",
    "_ddp_params_and_buffers_to_ignore": "torch.nn.parallel.distributed",
    "_mp_policy": "torch.distributed.fsdp._fully_shard._fsdp_state",
}
# Names of PyTorch, accelerate and Python that are used outside of `upstream.py`, by module
ELSEWHERE = {
    "cli/train.py": ("_actions", "_check_value", "_ddp_params_and_buffers_to_ignore"),
    "budgets/saved_bytes.py": ("_base",),
    "slices/decoder.py": ("_modules",),
    "budgets/attempts.py": ("_version",),
    "budgets/steps.py": ("_set_sync_gradients",),
}
# Strings of our own that look like private names, some as parts of f-strings
OURS = {"_derived", "_gib", "_last_readers", "_name_or_path", "_revision", "_reward"}


def find(place):
    module, _, path = place.partition(":")
    found = importlib.import_module(module)
    for name in path.split("."):
        found = inspect.getattr_static(found, name) if inspect.isclass(found) else getattr(found, name)
    return found


def test_private_names_are_where_we_look_for_them():
    for place, parameters in PRIVATE.items():
        found = find(place)
        found = getattr(found, "__func__", found)
        missing = parameters is not None and {*parameters.split()} - inspect.signature(found).parameters.keys()
        assert not missing, place


def test_private_attributes_are_set_by_their_classes():
    for place in sorted(INSTANCE):
        owner, _, name = place.rpartition(".")
        assert any(f"self.{name} " in inspect.getsource(cls) for cls in find(owner).__mro__[:-1]), place


def names_of_others():
    """By module, names that the package does not define: attributes, also those asked for by a string, and imports."""
    found, own = {}, set()
    for module, source in FILES.items():
        names = found[module] = set()
        for node in ast.walk(ast.parse(source)):
            match node:
                case ast.Attribute(attr=name) | ast.Constant(value=str(name)):
                    names.add(name)
                case ast.ImportFrom(names=imported):
                    names.update(alias.name for alias in imported)
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                    own.add(name)
    return {module: names - own for module, names in found.items()}


def test_private_names_are_listed_here_and_but_for_inherited_ones_used_in_one_module():
    of_trainers = [versions.CLASS_NAMES, versions.INSTANCE_NAMES]
    inherited = {name for names in of_trainers for value in names.values() for name in value.split()}
    listed = {place.rpartition(".")[2].rpartition(":")[2] for place in [*PRIVATE, *INSTANCE]} | SET_ELSEWHERE.keys()
    for module, names in names_of_others().items():
        assert {name for name in names if re.fullmatch(r"_[a-zA-Z]\w*", name)} <= listed | OURS, module
        if module != "core/upstream.py":
            assert names & listed - inherited - {*ELSEWHERE.get(module, ())} == set(), module


def test_private_attributes_are_written_where_we_take_them_from():
    for name, module in SET_ELSEWHERE.items():
        assert name in inspect.getsource(importlib.import_module(module)), name


def extended_methods():
    for trainer in TRAINERS.values():
        for cls in trainer.__mro__:
            if cls.__module__.startswith("trl_paddingfree"):
                for name, function in vars(cls).items():
                    if inspect.isfunction(function) and hasattr(trainer.trl_trainer, name):
                        yield trainer.trl_trainer, name, function


def test_extended_methods_take_what_upstreams_take():
    for parent, name, function in extended_methods():
        theirs = inspect.signature(getattr(parent, name)).parameters
        if name != "__init__" and not any(p.kind == p.VAR_POSITIONAL for p in theirs.values()):
            ours = inspect.signature(function).parameters.values()
            assert [p.name for p in ours if p.kind == p.POSITIONAL_OR_KEYWORD and p.name not in theirs] == [], name


def test_every_method_that_is_extended_or_private_is_asked_for_when_a_class_is_made():
    taken = {(parent, name) for parent, name, _ in extended_methods() if name != "__init__"}
    for place in PRIVATE:
        owner, _, name = place.rpartition(".")
        if owner.endswith("Trainer"):
            taken.add((find(owner), name))
    for parent, name in taken:
        assert any(name in versions.CLASS_NAMES.get(base.__name__, "").split() for base in parent.__mro__), name
    assert {name for names in versions.CLASS_NAMES.values() for name in names.split()} == {name for _, name in taken}


def test_an_operator_of_pytorch_that_has_moved_is_named(monkeypatch):
    torch_varlen()  # its module registers the operators as it is imported
    monkeypatch.setattr(torch.ops, "torch_attn", SimpleNamespace())
    with pytest.raises(versions.MovedNameError, match="`torch.ops.torch_attn` has no `_varlen_attn_backward`"):
        upstream.varlen_gradients(*[torch.zeros(1)] * 8, 1, 1, None, None)


# --- What transformers does with them ------------------------------------------------------------------------------


def flat_mask():
    return FlatMask.carrying(FlatLayout.from_segments(Segments((3, 2), (-1, 0), (0, 1))))


@pytest.mark.parametrize(
    "name",
    ["create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask"],
)
def test_a_4d_mask_passes_through_every_mask_function(name):
    create = getattr(transformers.masking_utils, name)
    config, mask = make_model().config, flat_mask()
    assert create(config, torch.zeros(1, 5, 8), mask, None) is mask


def test_a_4d_mask_is_no_mask_to_layers_that_carry_state():
    create = transformers.masking_utils.create_recurrent_attention_mask
    assert create(make_model().config, torch.zeros(1, 5, 8), flat_mask()) is None


def test_every_model_with_chunks_takes_a_dict_of_masks():
    model = tiny_model("llama4_text")
    assert set(model.config.layer_types) == {"full_attention", "chunked_attention"}
    with pytest.raises(KeyError, match="chunked_attention"):
        model.model(torch.zeros(1, 3, dtype=torch.long), attention_mask={"full_attention": None})


def test_every_layer_calls_the_registered_implementation_that_is_set_on_its_model():
    calls, made = [], []

    def attend(module, query, key, value, attention_mask, **kwargs):
        calls.append(module)
        return query.transpose(1, 2), None

    AttentionInterface.register("paddingfree-test", attend)
    AttentionMaskInterface.register("paddingfree-test", lambda **kwargs: made.append(kwargs))
    model = make_model(attn_implementation="sdpa")
    model.model.layers[1] = copy.deepcopy(model.model.layers[1])  # with its own configuration
    assert upstream.attn_implementation(model) == "sdpa"
    upstream.set_attn_implementation(model, "paddingfree-test")
    model(torch.tensor([[5, 6, 0]]), attention_mask=torch.tensor([[1, 1, 0]]))
    assert calls == [layer.self_attn for layer in model.model.layers]
    assert made
    assert upstream.attn_implementation(model) == "paddingfree-test"
    assert upstream.attention_function("paddingfree-test", model) is attend


def test_eager_attention_is_a_function_of_the_layers_own_file():
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

    layer = tiny_model("gemma2").model.layers[0].self_attn
    for kind in (type(layer), type("Own", (type(layer),), {})):
        layer.__class__ = kind
        assert upstream.attention_function("eager", layer) is eager_attention_forward


def test_lora_layers_ask_their_switch_whenever_they_are_called():
    plain = torch.nn.Sequential(torch.nn.Linear(2, 2, dtype=torch.bfloat16))
    layer = get_peft_model(plain, LoraConfig(target_modules=["0"])).base_model.model[0]
    assert isinstance(layer, LoraLayer)
    assert layer.cast_input_dtype_enabled is True
    assert layer.lora_variant == {}
    assert {*layer.lora_A} == {*layer.lora_dropout} == {"default"}
    asked = mock.MagicMock()
    asked.__bool__.return_value = False
    layer.cast_input_dtype_enabled = asked
    for number in (1, 2):
        with torch.autocast("cpu", torch.bfloat16):
            layer(torch.zeros(1, 2, dtype=torch.bfloat16))
        assert asked.__bool__.call_count == number


def test_a_configuration_without_a_limit_has_none():
    assert architecture.position_limits(tiny_model("xlnet")) == []  # it says -1
    assert architecture.position_limits(tiny_model("llama")) == [512]
    assert architecture.rotary_limits(tiny_model("mamba2").config) == {}


def test_llama4_scales_queries_by_their_place_on_the_axis():
    """The defect that `scale_of_rows` undoes: without it, or with another formula, it must change too."""
    layer = tiny_model("llama4_text").model.layers[1].self_attn
    source = inspect.getsource(type(layer).forward)
    assert "torch.arange(hidden_states.shape[1]" in source
    assert "torch.log1p(torch.floor((positions.float() + 1.0) / self.floor_scale)) * self.attn_scale + 1.0" in source
    assert {"attn_temperature_tuning", "use_rope", "floor_scale", "attn_scale"} <= vars(layer).keys()


# --- What TRL does with its fused head -----------------------------------------------------------------------------


def test_the_fused_head_calls_the_backbone_and_takes_shifted_labels():
    model = make_model()
    add_fused_lm_head(model)
    seen = []
    model.base_model.register_forward_pre_hook(lambda m, args, kwargs: seen.append(kwargs), with_kwargs=True)
    ids = torch.tensor([[5, 6, 7]])
    output = model(input_ids=ids, shift_labels=torch.tensor([[6, -100, 8]]), fused_lm_head=True)
    assert isinstance(output, FusedCausalLMOutput)
    assert output.log_probs.shape == (1, 3)
    assert output.log_probs[0, 1] == 0
    assert seen[0]["use_cache"] is False
    expected = model(input_ids=ids).logits.log_softmax(-1)[0, [0, 2], [6, 8]]
    torch.testing.assert_close(output.log_probs[0, [0, 2]], expected)


def test_fused_output_has_the_fields_that_are_brought_back_to_rows():
    fields = {"log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask", "loss"}
    assert fields <= FusedCausalLMOutput.__dataclass_fields__.keys()


@pytest.mark.parametrize("config_class", [DPOConfig, SFTConfig])
def test_trls_configs_have_the_flag_that_we_take_over(config_class):
    assert "padding_free" in config_class.__dataclass_fields__


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gpt2", "gpt_neox", "opt"])
def test_a_classification_head_reads_the_last_token_that_is_no_padding(model_type):
    """The rule that the pooled head reproduces: by id, so that with pad = eos the end of a row is not read."""
    config = tiny_model(model_type).config
    config.num_labels, config.pad_token_id = 1, 7
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    row = torch.tensor([[5, 7, 6, 7]])
    assert is_pooled(model)
    assert not is_pooled(tiny_model(model_type))
    with torch.no_grad():
        torch.testing.assert_close(model(row).logits, model(row[:, :3]).logits)


def test_the_classification_head_hands_margins_to_the_backbone():
    source = inspect.getsource(transformers.modeling_layers.GenericForSequenceClassification.forward)
    assert "**kwargs," in source.partition("hidden_states = ")[0]
