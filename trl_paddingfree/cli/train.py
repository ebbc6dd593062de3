"""The training scripts: TRL's own parser and options, with the trainers of this package."""

import argparse
import os
import pkgutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import trl.rewards
from datasets import Dataset, DatasetDict
from transformers import TrainingArguments
from trl import (
    DatasetMixtureConfig,
    DistillationConfig,
    ModelConfig,
    ScriptArguments,
    SFTConfig,
    TrlParser,
    get_peft_config,
    get_quantization_config,
)
from trl.scripts.grpo import GRPOScriptArguments
from trl.scripts.rloo import RLOOScriptArguments

from ..capabilities import module_of
from ..core.check.prove import UnprovenModelError
from ..core.device import has_accelerator
from ..core.trainers.base import FlatTrainer
from ..core.trainers.configs import PaddingFreeOptions, silence
from ..core.trainers.options import option
from ..core.trainers.sft import PaddingFreeSFTConfig
from ..hub import refuse_unreachable, refuse_unreachable_data
from ..registry import TRAINERS
from .load import load_data
from .options import LOADING, TRACEBACK, OneLineParser, answer_at_once, refuse
from .tables import summarize
from .turns import split_turns


@dataclass
class SFTScriptArguments(ScriptArguments):
    """TRL's script arguments, an option that chooses how rows become batches, and one that cuts conversations."""

    batch_method: Literal["padding", "packing", "padding_free"] | None = option(
        None, "Sets `packing` and `padding_free` together."
    )
    one_sample_per_turn: bool = option(
        False, "Cut conversations into one sample per assistant turn; shared turns are computed once."
    )

    def settle(self, training_args: PaddingFreeSFTConfig) -> None:
        """Set the trainer's options according to these two. Refuses options that contradict them."""
        if training_args.packing and self.batch_method not in (None, "packing"):
            raise ValueError(
                f"`--packing true` contradicts `--batch_method {self.batch_method}`: leave one of them out."
            )
        if self.batch_method is not None:
            training_args.packing = self.batch_method == "packing"
            training_args.padding_free = self.batch_method != "padding"
        if not self.one_sample_per_turn:
            return
        if training_args.assistant_only_loss:
            raise ValueError(
                "`--assistant_only_loss true` cannot be combined with `--one_sample_per_turn`: a sample is scored "
                "on its turn only anyway, and TRL may change the chat template. Leave one of them out."
            )
        if training_args.packing:
            return  # packing groups rows by length, whatever conversation they come from
        if (strategy := training_args.train_sampling_strategy) not in ("random", "sequential"):
            raise ValueError(
                f"`--train_sampling_strategy {strategy}` separates the turns of a conversation, and "
                "`--one_sample_per_turn` keeps them together to share prefixes. Leave one of them out."
            )
        if training_args.shuffle_dataset:
            raise ValueError(
                "`--shuffle_dataset true` separates the turns of a conversation, and `--one_sample_per_turn` "
                "already shuffles whole conversations. Leave `--shuffle_dataset` out."
            )
        training_args.train_sampling_strategy, training_args.prefix_sharing = "sequential", True

    def cut(self, dataset: DatasetDict, training_args: SFTConfig) -> DatasetDict:
        """Cut the data into one sample per turn, if asked to. Training conversations are shuffled first."""
        if not self.one_sample_per_turn:
            return dataset
        seed = training_args.seed if training_args.data_seed is None else training_args.data_seed
        turns = {}
        with training_args.main_process_first(desc="cutting conversations into turns"):
            for name, split in dataset.items():
                # A stream keeps the order of its files: TRL does not shuffle it, either
                is_shuffled = name == self.dataset_train_split and isinstance(split, Dataset)
                turns[name] = split_turns(split, seed if is_shuffled else None, training_args.dataset_num_proc)
        return type(dataset)(turns)


@dataclass
class MessageArguments:
    """The option that shows tracebacks."""

    traceback: bool = option(False, TRACEBACK)


# Names of options that TRL's commands do not have
_OURS = {
    *PaddingFreeOptions.__dataclass_fields__,
    *SFTScriptArguments.__annotations__,  # its own fields, without those of TRL's
    *MessageArguments.__annotations__,
}
# The script arguments of tasks that have more than TRL's common ones
_ARGUMENTS: dict[str, type[ScriptArguments]]
_ARGUMENTS = {"sft": SFTScriptArguments, "grpo": GRPOScriptArguments, "rloo": RLOOScriptArguments}
# What a parser returns: arguments of the script, of the trainer, of the model, and of a mixture of datasets
Parsed = Sequence[Any]


class ScriptParser(OneLineParser, TrlParser):
    """TRL's parser, with this package's options in a group of their own, and one-line errors for wrong arguments."""

    ours: Any = None  # an argument group, whose class is private

    def __init__(self, dataclass_types: Sequence[Any], **options: Any):
        values = module_of("argument_checks", "values")
        self.words = {} if values is None else values.words_of(dataclass_types)
        super().__init__(dataclass_types, **options)

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        name = options.get("dest") or names[0].removeprefix("--")
        if name in self.words and "choices" not in options:  # TRL would only check it when it computes the loss
            options |= {"choices": self.words[name] or None, "metavar": name.upper()}
        if name not in _OURS:
            return super().add_argument(*names, **options)
        self.ours = self.ours or self.add_argument_group("options of trl-paddingfree")
        return self.ours.add_argument(*names, **options)

    def set_defaults_with_config(self, **values: Any) -> list[str]:
        """
        Like TRL's, which takes any value from a YAML file, but refuses words that an option does not allow, and truth
        values in place of words, as which YAML reads `no`.
        """
        try:
            for action in self._actions:
                given = values.get(action.dest)
                for word in given if isinstance(given, list) else [given]:
                    if isinstance(word, str) or (isinstance(word, bool) and action.choices):
                        self._check_value(action, str(word))
        except argparse.ArgumentError as error:
            self.error(str(error))
        return super().set_defaults_with_config(**values)


def make_parser(task: str, prog: str | None = None) -> ScriptParser:
    """The parser of a task's script: its trainer's options, and those of the data and the model."""
    arguments = _ARGUMENTS.get(task, ScriptArguments)
    types = [arguments, TRAINERS[task].config_class, ModelConfig, DatasetMixtureConfig, MessageArguments]
    parser = ScriptParser(types, prog=prog)
    if task == "reward":  # so that PEFT also trains the new head; TRL's default is for language models
        parser.set_defaults(lora_task_type="SEQ_CLS")
    if not has_accelerator():  # transformers then refuses TRL's default, bfloat16, unless `use_cpu` is set
        parser.set_defaults(use_cpu=True, bf16=False)
    return parser


def say_where(training_args: TrainingArguments) -> None:
    """On a machine without an accelerator, say that training runs on the CPU, and refuse what needs one."""
    if has_accelerator():
        return
    if vars(training_args).get("activation_offloading"):
        raise ValueError(
            "`--activation_offloading true` moves activations from an accelerator to the host, and this machine "
            "has no accelerator: leave it out."
        )
    if training_args.use_cpu:
        sys.stderr.write(
            f"No accelerator: training on the CPU (`--use_cpu true --bf16 {str(bool(training_args.bf16)).lower()}`).\n"
        )


def look_ahead(parsed: Parsed) -> None:
    """Say where training runs, and refuse what cannot be loaded or resumed, before anything is loaded or launched."""
    script_args, training_args, model_args, dataset_args, *_ = parsed
    say_where(training_args)
    for arguments in map(vars, (model_args, script_args, training_args)):
        for model in ("model", "reward_model", "teacher_model"):
            if name := arguments.get(f"{model}_name_or_path"):
                refuse_unreachable(name, f"`--{model}_name_or_path {name}`", arguments.get(f"{model}_revision"))
    if dataset_args.datasets:
        for data in dataset_args.datasets:
            if not data.data_files:  # which go with a path such as `json`
                refuse_unreachable_data(data.path, f"`path: {data.path}` of `datasets`")
    elif script_args.dataset_name:
        refuse_unreachable_data(script_args.dataset_name, f"`--dataset_name {script_args.dataset_name}`")
    given = training_args.resume_from_checkpoint, str(training_args.output_dir), training_args.save_only_model
    if (checkpoints := module_of("resuming", "checkpoints")) is not None:
        checkpoints.checkpoint_to_resume(*given)


@contextmanager
def refusing(task: str, given: Sequence[str], *errors: type[Exception]) -> Iterator[None]:
    """Within this context, one message says what these `errors` refuse, unless `--traceback` is among the `given`."""
    try:
        yield
    except errors as error:
        if "--traceback" in given:
            raise
        sys.exit(refuse(task, error))


def main(task: str, args: Sequence[str] | None = None, launched: bool = False) -> None:
    """Run the script of a task. If the command has `launched` it, unknown options were for `accelerate launch`."""
    silence()
    given = sys.argv[1:] if args is None else args
    with refusing(task, given, *LOADING):
        parser = make_parser(task)
        *parsed, unknown = parser.parse_args_and_config(
            given if launched else answer_at_once(task, given), return_remaining_strings=True
        )
        script_args, training_args, *_ = parsed
        if not launched:
            if unknown:
                parser.error(f"unrecognized arguments: {' '.join(unknown)}")
            look_ahead(parsed)
        trainer = make_trainer(TRAINERS[task], parsed)
    with refusing(task, given, UnprovenModelError):  # before the first step, or by a look at a batch
        train(trainer, script_args, training_args)


def _load_reward(name: str) -> Callable:
    """A reward function of TRL, or from an import path, as in `trl grpo` and `trl rloo`."""
    if name == "get_soft_overlong_punishment":
        return trl.rewards.get_soft_overlong_punishment(max_completion_len=1280, soft_punish_cache=256)
    module, _, function = name.rpartition(".")
    if module:
        sys.path.insert(0, os.getcwd())
    try:
        return pkgutil.resolve_name(f"{module or trl.rewards.__name__}:{function}")
    except (AttributeError, ModuleNotFoundError) as error:
        known = ", ".join(name for name in dir(trl.rewards) if name.endswith("_reward"))
        raise ValueError(
            f"`--reward_funcs {name}` is not the import path of a function ({error}), nor one of TRL's: {known}, "
            "get_soft_overlong_punishment."
        ) from error


def make_trainer(trainer_class: Callable[..., FlatTrainer], parsed: Parsed) -> FlatTrainer:
    """The trainer, with model and data loaded as TRL's scripts load them."""
    script_args, training_args, model_args, dataset_args, *_ = parsed
    is_sft = isinstance(script_args, SFTScriptArguments)
    others: dict = {}
    if is_sft:
        script_args.settle(training_args)
    loading = {
        "trust_remote_code": training_args.trust_remote_code,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    }
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        **loading,
        **(training_args.model_init_kwargs or {}),
    }
    if isinstance(script_args, GRPOScriptArguments | RLOOScriptArguments):
        names = script_args.reward_funcs or []
        functions = map(_load_reward, [names] if isinstance(names, str) else names)  # a YAML file may have one name
        others["reward_funcs"] = [*filter(None, [script_args.reward_model_name_or_path]), *functions]
    if isinstance(training_args, DistillationConfig):  # the teacher has a revision of its own, and is never quantized
        given: Any = training_args.teacher_model_init_kwargs or {}
        training_args.teacher_model_init_kwargs = {**loading, **given}
        others["teacher_model"] = training_args.teacher_model_name_or_path
    dataset = load_data(script_args, dataset_args, training_args.seed)
    evaluates = training_args.eval_strategy != "no"
    train, test = script_args.dataset_train_split, script_args.dataset_test_split
    needed = [train, test] if evaluates else [train]
    for split in needed:
        if split not in dataset:
            raise ValueError(
                f"The data has no split {split!r}, only {list(dataset)}. Set `--dataset_train_split` and "
                "`--dataset_test_split`, or `--test_split_size 0.05` to split some off for evaluation."
            )
    dataset = type(dataset)({split: dataset[split] for split in needed})
    if is_sft:
        dataset = script_args.cut(dataset, training_args)
    return trainer_class(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=dataset[train],
        eval_dataset=dataset[test] if evaluates else None,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
        **others,
    )


def train(trainer: FlatTrainer, script_args: ScriptArguments, training_args: TrainingArguments) -> None:
    """Train, summarize and save."""
    if script_args.ignore_bias_buffers:  # DDP reads this attribute
        model: Any = trainer.model
        model._ddp_params_and_buffers_to_ignore = [
            name for name, buffer in model.named_buffers() if buffer.dtype == torch.bool
        ]
    started = time.perf_counter()
    result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    summarize(trainer, result.metrics, time.perf_counter() - started)
    trainer.save_model(training_args.output_dir)
    trainer.accelerator.print(f"Model saved to {training_args.output_dir}.")
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
    trainer.accelerator.end_training()
