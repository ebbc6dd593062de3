"""All uses of private names of transformers and TRL, but for those that our trainers inherit, and why.

`tests/test_upstream.py` lists these names, the inherited ones, and those of PyTorch and accelerate by the module that
uses them. It fails by name when an upgrade moves one.
"""

import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from traceback import walk_tb
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import AttentionInterface, PreTrainedModel, TrainingArguments

from .versions import MovedNameError, with_head


def attention_function(name: str, module: torch.nn.Module) -> Callable:
    """The attention function that `module` would call under the implementation `name`."""
    if name != "eager":  # each modeling file has its own "eager" one, with the model's soft-capping or sinks
        return AttentionInterface()[name]
    return sys.modules[type(module).__module__].eager_attention_forward


def text_models(model: PreTrainedModel) -> list[PreTrainedModel]:
    """`model` and the models within it that compute text, whose attention is ours over flat batches."""
    # A vision tower keeps its own attention: Qwen's looks for flash attention by name, else it computes piece by piece
    is_text = model.config.get_text_config() is model.config
    modules = (model if is_text else model.get_decoder()).modules()
    return [module for module in modules if isinstance(module, PreTrainedModel)]


def takes_attention_function(model: PreTrainedModel) -> bool:
    """Whether all attention goes through `AttentionInterface`: Falcon and others look it up in a dict of their own."""
    return all(module._can_set_attn_implementation() for module in text_models(model))


def is_stateful(model: PreTrainedModel) -> bool:
    """Whether transformers says of a model that its layers hand states on from token to token."""
    return model._is_stateful


def attn_implementation(model: PreTrainedModel) -> str:
    """The attention implementation in force. It may differ from the one that was asked for (TRL #2834)."""
    return model.config.get_text_config()._attn_implementation


def set_attn_implementation(model: PreTrainedModel, name: str) -> None:
    """
    Set a registered attention implementation on the text model and every part of it. transformers' public method checks
    names against installed kernels again, and for some models (GPT-OSS) refuses all but a few.
    """
    model.config.get_text_config()._attn_implementation = name
    for module in text_models(model):
        module.config._attn_implementation = name


def flash_attention_forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Flash attention by the package that `attn_implementation` names: registered functions ask the config for it."""
    from transformers.modeling_flash_attention_utils import _flash_attention_forward, flash_attn_supports_top_left_mask

    use_top_left_mask = flash_attn_supports_top_left_mask()
    return _flash_attention_forward(query, key, value, use_top_left_mask=use_top_left_mask, **kwargs)


def flash_target_dtype(query: torch.Tensor, module: torch.nn.Module) -> torch.dtype | None:
    """The dtype to which transformers casts float32 queries for flash attention: PEFT keeps norms in float32."""
    from transformers.integrations.flash_attention import get_target_dtype

    return get_target_dtype(query, module)


def preparation(trl_trainer: Any, trl_config: Any, *arguments: Any, **read: Any) -> Callable[..., Any]:
    """
    A function that tokenizes and truncates data, and drops rows, as a TRL trainer does, without a model. TRL's method
    gets a stand-in for the trainer, with a tokenizer and the attributes in `read`, and `arguments` before the last one.
    """

    def prepare(dataset: Any, tokenizer: Any, **options: Any) -> Any:  # `max_length` and `truncation_mode`
        known = {name: value for name, value in options.items() if name in trl_config.__dataclass_fields__}
        config = trl_config("unused", bf16=False, **known)
        on_completions = {"prompt", "completion"} <= set(dataset.column_names)
        trainer = SimpleNamespace(_tokenizer=tokenizer, completion_only_loss=on_completions, **read)
        return trl_trainer._prepare_dataset(trainer, dataset, tokenizer, config, *arguments, "inspected")

    return prepare


def prepare_prompts(dataset: Any, tokenizer: Any, **options: Any) -> Any:
    """Prompts, tokenized by TRL, which never truncates them, whatever the `options`."""
    from trl import RLOOTrainer

    trainer: Any = SimpleNamespace(processing_class=tokenizer, chat_template_kwargs={})
    tokenize = lambda rows: {"prompt_ids": RLOOTrainer._tokenize_prompts(trainer, rows["prompt"])[0]}  # noqa: E731
    return dataset.map(tokenize, batched=True, remove_columns=dataset.column_names)


def spoilt_by_evaluation(module: torch.nn.Module) -> bool:
    """
    Whether a call of `module` in evaluation mode keeps it from training afterwards. On CPUs with AVX512-BF16,
    bitsandbytes 0.50 then repacks 4-bit weights for inference, and the layer passes no gradient on to its input.
    """
    return type(module).__module__.startswith("bitsandbytes.")


@contextmanager
def checkpointing(model: PreTrainedModel, options: dict[str, Any] | None) -> Iterator[None]:
    """
    Within this context, activations of `model` are recomputed: as before, if they were, and else with `options`. The
    methods are those that TRL calls: transformers 5.23 has other names for them, and keeps these.
    """
    if model.is_gradient_checkpointing:
        yield
        return
    options = {**(options or {})}
    # Arguments of transformers' method, and not of the checkpoint, which its trainer takes out of the options, too
    of_method = {name: options.pop(name) for name in ("every_n_layers", "offload") if name in options}
    model.gradient_checkpointing_enable(options or None, **of_method)
    try:
        yield
    finally:
        model.gradient_checkpointing_disable()


def is_reentrant(args: TrainingArguments) -> bool:
    """
    Whether checkpoints of layers are reentrant: by `use_reentrant`, and without it by PyTorch's default, which is yes.
    Given no options for PyTorch at all, transformers says no.
    """
    kwargs: Any = args.gradient_checkpointing_kwargs or {}
    return bool({*kwargs} - {"every_n_layers", "offload", "selective"}) and kwargs.get("use_reentrant") is not False


def not_reentrant(modules: Iterable[torch.nn.Module]) -> Iterator[tuple[torch.nn.Module, str, Callable]]:
    """
    Of modules whose checkpoints are reentrant, the attribute to set, and a value that makes them non-reentrant. PyTorch
    cannot compute gradients of single inputs through reentrant ones.
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
    """The gradients of queries, keys and values of PyTorch's causal varlen kernel, which has no public name for it."""
    import torch.nn.attention.varlen  # registers the operator

    try:
        backward = torch.ops.torch_attn._varlen_attn_backward
    except AttributeError as error:
        raise MovedNameError("torch", "torch.ops.torch_attn", "_varlen_attn_backward", "varlen_gradients") from error
    # Where nothing is dropped, no random state is read
    options = (window is None, torch.zeros(2, dtype=torch.uint64, device=query.device), scale)
    left = -1 if window is None else window - 1
    return backward(grad, query, key, value, output, lse, cu_q, cu_k, max_q, max_k, *options, [left, 0])


# transformers' functions by which layers that carry state mix tokens (convolutions and recurrences), and the argument
# that tells their kernels where rows begin. No kernel of the first Mamba's scan has one
_STATE_FUNCTIONS = {
    "causal_conv1d_fn": "seq_idx",
    "mamba2_chunk_scan": "seq_idx",
    "mamba_selective_scan": None,
    "torch_chunk_gated_delta_rule": "cu_seqlens",
    "chunk_kimi_delta_attention": "cu_seqlens",
}
# A convolution and a scan in one kernel. Where it is not installed, they are `None`, and the two are called one by one
_FUSED_FUNCTIONS = ("mamba2_split_conv1d_scan_combined", "mamba_inner_fn")


def state_functions(forward: Callable) -> dict[str, Callable]:
    """Those of the functions above that the forward of a layer calls, by name."""
    function = inspect.unwrap(forward.__func__ if isinstance(forward, types.MethodType) else forward)
    if not isinstance(function, types.FunctionType):
        return {}
    called = {*_STATE_FUNCTIONS, *_FUSED_FUNCTIONS}.intersection(function.__code__.co_names)
    return {name: function.__globals__[name] for name in sorted(called)}


def _missing_kernel(name: str, function: Callable) -> str | None:
    """The package to install for the kernel of a function; empty if no package has one, `None` if it is installed."""
    if (boundaries := _STATE_FUNCTIONS[name]) is None:
        return None if find_spec("mamba_ssm") else "mamba-ssm"
    # A function without transformers' decorator has no kernel (LFM3). With the package `kernels`, it becomes a module
    if not hasattr(function, "__wrapped__") and not isinstance(function, torch.nn.Module):
        return ""
    # transformers does not say which kernels it found, so the function is called without tensors, which always fails.
    # If there is no kernel, a local variable of its decorator names the package, because it refuses boundaries then
    try:
        function(**{boundaries: True})
    except (TypeError, ValueError) as error:
        frames = [frame.f_locals for frame, _ in walk_tb(error.__traceback__)]
        return next((found["distribution"].replace("_", "-") for found in frames if "distribution" in found), None)
    return None


def missing_state_kernels(forward: Callable) -> dict[str, str | None]:
    """For each of these functions that the layer calls, without fused ones, the result of [`_missing_kernel`]."""
    functions = state_functions(forward).items()
    return {name: _missing_kernel(name, function) for name, function in functions if name in _STATE_FUNCTIONS}


def takes_state_boundaries(module: torch.nn.Module) -> bool:
    """Whether a layer that carries state keeps the rows of one flat axis apart, if it is told where they begin."""
    forward = type(module).forward
    if inspect.getfullargspec(inspect.unwrap(forward)).varkw is None:
        return False  # the convolution of LFM2's mixtures takes no boundaries by these names before transformers 5.22
    missing = missing_state_kernels(forward)
    return bool(missing) and all(_STATE_FUNCTIONS[name] and package is None for name, package in missing.items())


def sharded_dtype(model: torch.nn.Module) -> torch.dtype | None:
    """The dtype to which FSDP2 casts weights and inputs, instead of autocast; `None` if it casts nothing."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            return module._get_fsdp_state()._mp_policy.param_dtype
    return None


def gradient_hooks(tensor: torch.Tensor) -> Any:
    """What [`torch.Tensor.register_hook`] has put on a tensor."""
    return tensor._backward_hooks


def process_store() -> torch.distributed.Store:
    """The store through which the processes of a run have met: it needs no collective."""
    return torch.distributed.distributed_c10d._get_default_store()


def lm_head_tile() -> tuple[int, int]:
    """Rows and columns of the tile of logits that TRL's fused LM head computes at a time."""
    from trl.kernels.chunked_logprob import TOKEN_CHUNK_SIZE
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    return TOKEN_CHUNK_SIZE, _CHUNKED_LOGPROB_CHUNK_SIZE


def apply_liger(model: torch.nn.Module, args: TrainingArguments) -> None:
    """
    Put Liger's kernels on a model, if `args` ask for them: transformers does so when training starts, which is after
    the model was proven and measured. Doing it twice changes nothing.
    """
    if args.use_liger_kernel:
        from transformers.integrations import liger

        liger.apply_liger_kernel(model, args.liger_kernel_config)


def configure_compiler(recompilations: int) -> None:
    """
    Have PyTorch compile a function anew at least so often, and whenever a module gets hooks, which it would leave out:
    calls of `torch.compile` take no options for that. transformers collects the logits of routers by hooks.
    """
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, recompilations)
    config.skip_nnmodule_hook_guards = False


def put_head(model: PreTrainedModel) -> None:
    """Put TRL's fused LM head on a model that does not have it yet: not all of TRL's trainers put it there."""
    from trl.trainer.utils import add_fused_lm_head

    if with_head(model.forward) is None:
        add_fused_lm_head(model)


def divergence_tile() -> tuple[int, int]:
    """Rows and columns of the tile of each model's logits that TRL's divergence computes at a time."""
    from trl.kernels.chunked_divergence import TOKEN_CHUNK_SIZE, VOCAB_CHUNK_SIZE

    return TOKEN_CHUNK_SIZE, VOCAB_CHUNK_SIZE


def has_head_kernel(device: torch.device) -> bool:
    """Whether TRL's fused LM head has a Triton kernel on `device`, which works with less memory than PyTorch's own."""
    from trl.kernels.chunked_logprob import _use_triton

    return _use_triton(device)


def router_loss(model: PreTrainedModel, router_logits: tuple[torch.Tensor, ...], weights: torch.Tensor) -> torch.Tensor:
    """The loss of a mixture's routers as TRL's fused head computes it, of logits `(T, experts)` of each layer."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    config, loss = model.config.get_text_config(), cast(Any, load_balancing_loss_func)
    return loss(router_logits, config.num_experts, config.num_experts_per_tok, weights)
