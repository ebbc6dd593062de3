"""Every private name of transformers and TRL that we use, and why, except those that our trainers inherit.

`tests/test_upstream.py` lists these names, the inherited ones, and those of PyTorch and accelerate, by the module that
uses them. When an upgrade moves one, the test fails and names it.
"""

import inspect
import sys
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any, cast

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel, TrainingArguments
from transformers.modeling_layers import GradientCheckpointingLayer

from .versions import MovedNameError, with_head


def version_kept(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Within this context, a change of a tensor leaves graphs valid that have saved it; PyTorch has no other way."""
    return torch.autograd._unsafe_preserve_version_counter(tensor)


def attention_function(name: str, module: torch.nn.Module) -> Callable:
    """The attention function that `module` would call under the implementation `name`: as its forward finds it."""
    if name != "eager":  # each modeling file defines its own, with the model's soft-capping or sinks
        return AttentionInterface()[name]
    ours = type(module)
    places = inspect.unwrap(ours.forward).__globals__, *(vars(sys.modules[base.__module__]) for base in ours.__mro__)
    return ChainMap(*places)["eager_attention_forward"]


def text_models(model: PreTrainedModel) -> list[PreTrainedModel]:
    """The `PreTrainedModel`s within a model that process text, whose attention is ours over flat batches."""
    # A vision tower keeps its own attention: Qwen's checks for flash attention by name, and otherwise loops over chunks
    is_text = model.config.get_text_config() is model.config
    return [x for x in (model if is_text else model.get_decoder()).modules() if isinstance(x, PreTrainedModel)]


def takes_attention_function(model: PreTrainedModel) -> bool:
    """Whether all attention goes through `AttentionInterface`. Falcon and others dispatch through their own dict."""
    return all(module._can_set_attn_implementation() for module in text_models(model))


def is_stateful(model: PreTrainedModel) -> bool:
    """Whether transformers marks a model as stateful: its layers pass states from token to token."""
    return model._is_stateful


def attn_implementation(model: PreTrainedModel) -> str:
    """The attention implementation in use. It may differ from the one requested (TRL #2834)."""
    return model.config.get_text_config()._attn_implementation


def configs_of(modules: Iterable[torch.nn.Module]) -> list[PreTrainedConfig]:
    """The configurations that modules hold: usually one, but a copied layer has its own."""
    return [x for module in modules if isinstance(x := vars(module).get("config"), PreTrainedConfig)]


def set_attn_implementation(model: PreTrainedModel, name: str) -> None:
    """
    Set a registered attention implementation wherever the text model has its present one. transformers' public method
    checks names against installed kernels again, and for some models (GPT-OSS) rejects all but a few.
    """
    before = str(attn_implementation(model))
    configs = [each for part in text_models(model) for each in configs_of(part.modules())]
    for config in (model.config.get_text_config(), *configs):
        if str(config._attn_implementation) == before:
            config._attn_implementation = name


def flash_attention_forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Flash attention from the package that `attn_implementation` names. Registered functions ask the config for it."""
    from transformers.modeling_flash_attention_utils import _flash_attention_forward, flash_attn_supports_top_left_mask

    return _flash_attention_forward(query, key, value, use_top_left_mask=flash_attn_supports_top_left_mask(), **kwargs)


def preparation(trl_trainer: Any, trl_config: Any, *arguments: Any, **read: Any) -> Callable[..., Any]:
    """
    A function that tokenizes, truncates and drops rows as a TRL trainer does, without a model. It calls TRL's method on
    a stand-in for the trainer, with a tokenizer and the attributes in `read`; `arguments` precede the dataset's name.
    """

    def prepare(dataset: Any, tokenizer: Any, **options: Any) -> Any:  # `max_length` and `truncation_mode`
        known = {name: value for name, value in options.items() if name in trl_config.__dataclass_fields__}
        config = trl_config("unused", bf16=False, **known)
        on_completions = {"prompt", "completion"} <= set(dataset.column_names)
        trainer = SimpleNamespace(_tokenizer=tokenizer, completion_only_loss=on_completions, **read)
        return trl_trainer._prepare_dataset(trainer, dataset, tokenizer, config, *arguments, "inspected")

    return prepare


def prepare_prompts(dataset: Any, tokenizer: Any, **options: Any) -> Any:
    """Prompts tokenized by TRL, which never truncates them. `options` are ignored."""
    from trl import RLOOTrainer

    trainer: Any = SimpleNamespace(processing_class=tokenizer, chat_template_kwargs={})
    tokenize = lambda rows: {"prompt_ids": RLOOTrainer._tokenize_prompts(trainer, rows["prompt"])[0]}  # noqa: E731
    return dataset.map(tokenize, batched=True, remove_columns=dataset.column_names)


def spoilt_by_evaluation(module: torch.nn.Module) -> bool:
    """
    Whether calling `module` in evaluation mode breaks later training. On CPUs with AVX512-BF16, bitsandbytes 0.50 then
    repacks 4-bit weights for inference, and the layer no longer propagates gradients to its input.
    """
    return type(module).__module__.startswith("bitsandbytes.")


@contextmanager
def checkpointing(model: PreTrainedModel, options: dict[str, Any] | None) -> Iterator[None]:
    """
    Within this context, `model` recomputes its activations: as before if it already did, otherwise with `options`. The
    methods are those that TRL calls. transformers 5.23 renamed them, and keeps these as aliases.
    """
    if model.is_gradient_checkpointing:
        yield
        return
    options = {**(options or {})}
    # Arguments of transformers' method, not of PyTorch's checkpoint: its trainer pops them from the options, too
    of_method = {name: options.pop(name) for name in ("every_n_layers", "offload") if name in options}
    model.gradient_checkpointing_enable(options or None, **of_method)
    try:
        yield
    finally:
        model.gradient_checkpointing_disable()


def is_reentrant(args: TrainingArguments) -> bool:
    """Whether checkpoints are reentrant. Without `use_reentrant`, any other option of PyTorch's makes them so."""
    kwargs: Any = args.gradient_checkpointing_kwargs or {}
    return bool({*kwargs} - {"every_n_layers", "offload", "selective"}) and kwargs.get("use_reentrant") is not False


def not_reentrant(modules: Iterable[torch.nn.Module]) -> Iterator[tuple[torch.nn.Module, str, Callable]]:
    """
    For modules whose checkpoints are reentrant, the attribute to set, and a value that makes them non-reentrant:
    `torch.autograd.grad` does not work through reentrant checkpoints.
    """
    name = "_gradient_checkpointing_func"
    for module in modules:
        recompute = vars(module).get(name)
        if isinstance(recompute, partial) and recompute.keywords.get("use_reentrant") is not False:
            yield module, name, partial(recompute, use_reentrant=False)


def varlen_gradients(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor,
    lse: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, max_q: int, max_k: int, scale: float | None,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of queries, keys and values by PyTorch's causal varlen kernel, whose backward has no public name."""
    import torch.nn.attention.varlen  # registers the operator

    try:
        backward = torch.ops.torch_attn._varlen_attn_backward
    except AttributeError as error:
        raise MovedNameError("torch", "torch.ops.torch_attn", "_varlen_attn_backward", "varlen_gradients") from error
    # Without dropout, the random state is not read
    options = (window is None, torch.zeros(2, dtype=torch.uint64, device=query.device), scale)
    left = -1 if window is None else window - 1
    return backward(grad, query, key, value, output, lse, cu_q, cu_k, max_q, max_k, *options, [left, 0])


def sharded_dtype(model: torch.nn.Module) -> torch.dtype | None:
    """The dtype to which FSDP2 casts weights and inputs, instead of autocast; `None` if it casts nothing."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            return module._get_fsdp_state()._mp_policy.param_dtype
    return None


def gradient_hooks(owner: torch.Tensor | torch.nn.Module) -> list[Callable]:
    """The hooks on the gradients of a tensor, before they are accumulated and after, or of a module."""
    places = ("_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks")
    return [hook for name in places for hook in (getattr(owner, name, None) or {}).values()]


def hooks_after_accumulation(parameter: torch.Tensor) -> list[Callable]:
    """The hooks that get a parameter once its gradient is accumulated, and may step an optimizer."""
    return [*(getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()]


def global_hooks() -> list[Callable]:
    """The hooks that PyTorch runs before and after the forward of every module."""
    module = torch.nn.modules.module
    return [*module._global_forward_pre_hooks.values(), *module._global_forward_hooks.values()]


def process_store() -> torch.distributed.Store:
    """The store of the default process group. It needs no collective."""
    return torch.distributed.distributed_c10d._get_default_store()


def lm_head_tile() -> tuple[int, int]:
    """Tokens and vocabulary entries per tile of logits in TRL's fused LM head."""
    from trl.kernels.chunked_logprob import TOKEN_CHUNK_SIZE
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    return TOKEN_CHUNK_SIZE, _CHUNKED_LOGPROB_CHUNK_SIZE


def apply_liger(model: torch.nn.Module, args: TrainingArguments) -> None:
    """
    Apply Liger's kernels to a model if `args` ask for them. transformers does so when training starts, which is after
    the model has been proven and measured. Doing it twice changes nothing, but for a forward of Liger's own, which
    would drop the flat one: TRL leaves it out in most trainers, and in distillation its loss has no use for it.
    """
    if args.use_liger_kernel:
        from transformers.integrations import liger

        args.liger_kernel_config = {**(args.liger_kernel_config or {}), "fused_linear_cross_entropy": False}
        liger.apply_liger_kernel(model, args.liger_kernel_config)


def layer_forward(layer_class: type[GradientCheckpointingLayer]) -> Callable | None:
    """
    The forward of a class of layers, without the checkpoint that transformers puts around it; `None` if something of
    others is around that, or in its place.
    """
    # transformers 5.24 puts the checkpoint around `forward`, 5.20 around `__call__`
    if "__init_subclass__" not in vars(GradientCheckpointingLayer):
        return layer_class.forward
    outermost: Any = layer_class.forward
    module = outermost.__globals__["__name__"] if isinstance(outermost, FunctionType) else ""
    return vars(outermost).get("__wrapped__") if module == GradientCheckpointingLayer.__module__ else None


def uncompiled(model: torch.nn.Module) -> tuple[torch.nn.Module, bool]:
    """
    A model without the wrapper that `torch.compile` returns; those of models within it are taken out of it, in place.
    Layers that were compiled one by one stay so. Also whether there was a wrapper.
    """

    wrapper = torch._dynamo.OptimizedModule

    def within(module: torch.nn.Module) -> torch.nn.Module:
        while isinstance(module, wrapper) and any(isinstance(each, PreTrainedModel) for each in module.modules()):
            module = cast(torch.nn.Module, module._orig_mod)
        return module

    found = within(model)
    was_compiled = found is not model
    for module in [*found.modules()]:
        for name, child in [*module.named_children()]:
            if (inner := within(child)) is not child:
                setattr(module, name, inner)
                was_compiled = True
    return found, was_compiled


def configure_compiler(recompilations: int) -> None:
    """
    Let PyTorch recompile a function at least `recompilations` times, and have it recompile when a module gets hooks,
    which it would otherwise ignore: transformers collects router logits by hooks. `torch.compile` has no such options.
    """
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, recompilations)
    config.skip_nnmodule_hook_guards = False


def put_head(model: PreTrainedModel) -> None:
    """Add TRL's fused LM head to a model that does not have it yet: not all of TRL's trainers add it."""
    from trl.trainer.utils import add_fused_lm_head

    if with_head(model.forward) is None:
        add_fused_lm_head(model)


def divergence_tile() -> tuple[int, int]:
    """Tokens and vocabulary entries per tile of each model's logits in TRL's divergence."""
    from trl.kernels.chunked_divergence import TOKEN_CHUNK_SIZE, VOCAB_CHUNK_SIZE

    return TOKEN_CHUNK_SIZE, VOCAB_CHUNK_SIZE


def has_head_kernel(device: torch.device) -> bool:
    """Whether TRL's fused LM head has a Triton kernel on `device`, which needs less memory than its PyTorch version."""
    from trl.kernels.chunked_logprob import _use_triton

    return _use_triton(device)


def router_loss(model: PreTrainedModel, router_logits: tuple[torch.Tensor, ...], weights: torch.Tensor) -> torch.Tensor:
    """The router loss of an MoE model as TRL's fused head computes it, from each layer's logits `(T, experts)`."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    config, loss = model.config.get_text_config(), cast(Any, load_balancing_loss_func)
    return loss(router_logits, config.num_experts, config.num_experts_per_tok, weights)
