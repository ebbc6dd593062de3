"""Training runs, started by `accelerate launch` or alone: each writes what it logged and ended with to a JSON file."""

import faulthandler
import json
import os
import random
import sys
from dataclasses import asdict
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from accelerate import DistributedType
from accelerate.state import AcceleratorState
from datasets import Dataset, load_from_disk
from peft import LoraConfig
from transformers import TrainerCallback

from tests.helpers.tiny import conversations, preference_data
from tests.helpers.vision import vision_messages, vision_pairs
from tests.runs import make_trainer
from trl_paddingfree.core.trainers.proving import StartUpCheck
from trl_paddingfree.registry import TRAINERS

TIMEOUT = 360  # seconds for importing, and for each run: compiling takes one a minute on a quiet machine
# Options of these runs, beside those of trainers: what they train on, and what happens to it
OWN = ("lora", "resume", "fail_on_rank", "evaluate", "images", "tokens_in_memory")
OWN += ("on_disk", "unscored", "streams", "differs", "leaks", "leaks_on_rank", "lacks_memory_on_rank", "answers")


def tokens_to_score_in_every_second_pair() -> Dataset:
    """Token ids, in pairs of rows that are scored or not."""
    rng, rows = random.Random(0), []
    for i in range(48):
        ids = [rng.randrange(5, 60) for _ in range(rng.randint(2, 20))]
        rows.append({"input_ids": ids, "labels": ids if i // 2 % 2 == 0 else [-100] * len(ids)})
    return Dataset.from_list(rows)


def with_answers(row: dict, number: int = 3) -> dict:
    """A pair as a prompt with its answers, of which there are up to three: three pairs."""
    answers = [row["chosen"], row["rejected"], row["chosen"] + row["rejected"]][:number]
    return {"prompt": row["prompt"], "completions": answers, "scores": [2.0, 1.0, 0.0][:number]}


def run(task: str, model: str, folder: str | Path, options: dict) -> None:
    """Train. With `refused` among the options the run has to fail, and what each process says of it is written down."""
    settings, output, said = dict(options), Path(folder) / "result.json", None
    output.parent.mkdir(exist_ok=True)
    refused = settings.pop("refused", False)
    try:
        with pytest.MonkeyPatch.context() as monkeypatch:
            train(task, model, output, settings, monkeypatch)
    except Exception as error:
        if not refused:
            raise
        said = str(error)
    if refused:
        Path(f"{output}.{torch.distributed.get_rank()}").write_text(json.dumps(said))
        output.write_text(json.dumps({"log": []}))  # by all of them: none may come before another has trained


class LeaksLater(TrainerCallback):
    """From the second step on, long after any check, tokens of a flat row see the ones before theirs in a layer."""

    def __init__(self, layer: torch.nn.Module):
        self.layer = layer

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.layer.register_forward_hook(lambda layer, given, hidden: hidden + hidden.roll(1, dims=1))


def train(task: str, model: str, output: Path, settings: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    own = SimpleNamespace(**{name: settings.pop(name, None) for name in OWN})
    passes = []
    if own.tokens_in_memory:
        from tests.helpers.memory import hold_tokens, watch_passes  # of budgets, a folder that may be deleted

        hold_tokens(monkeypatch, own.tokens_in_memory)
        passes = watch_passes(monkeypatch)
    data = {"dpo": preference_data, "reward": preference_data, "sft": conversations}[task]
    given = {"model": model, "max_length": 48, "per_device_train_batch_size": 8, "max_steps": -1}
    if own.images:
        data, given["max_length"] = {"dpo": vision_pairs, "sft": vision_messages}[task], None
    given["train_dataset"] = data(24 if own.images else 48, seed=1)
    if own.answers:  # each entry is the number of answers of some prompts
        rows = zip(given["train_dataset"], cycle(own.answers))
        given["train_dataset"] = Dataset.from_list([with_answers(*each) for each in rows])
    if own.unscored:
        given["train_dataset"] = tokens_to_score_in_every_second_pair()
        given["dataset_kwargs"] = {"skip_prepare_dataset": True}
    if own.lora:
        given["peft_config"] = LoraConfig(r=4, target_modules="all-linear")
    if own.evaluate:
        given["eval_dataset"] = given["train_dataset"] if own.answers else data(own.evaluate, seed=2)

    def build(args, **arguments):
        if os.environ.get("ACCELERATE_USE_FSDP") == "true":
            # accelerate looks at its FSDP settings on accelerators only; PyTorch's FSDP2 itself runs on the CPU
            args.distributed_state.__dict__["distributed_type"] = DistributedType.MULTI_GPU
        if own.differs:
            arguments["train_dataset"] = data(48, seed=args.process_index)
        if own.on_disk:  # where TRL shares what one process has computed
            with args.main_process_first():
                for name in arguments.keys() & {"train_dataset", "eval_dataset"}:
                    saved = output.parent / name
                    if not saved.exists():
                        arguments[name].save_to_disk(saved)
                    arguments[name] = load_from_disk(saved)
        if own.streams:
            arguments["train_dataset"] = arguments["train_dataset"].to_iterable_dataset(num_shards=4)
        return TRAINERS[task](args=args, **arguments)

    if own.leaks is not None:  # models are proven once an engine has sharded them, as on GPUs
        monkeypatch.setattr(StartUpCheck, "can_call", lambda self, model: False)
    trainer = make_trainer(task, "ours", trainer_class=build, output_dir=str(output.parent), **{**given, **settings})
    if own.leaks:  # from now on, before the check
        last = trainer.flat_base(trainer.model).get_decoder().layers[-1]
        last.register_forward_hook(lambda layer, given, hidden: hidden + hidden.roll(1, dims=1))
    args = trainer.args
    if args.process_index == own.leaks_on_rank:
        trainer.add_callback(LeaksLater(trainer.flat_base(trainer.model).get_decoder().layers[-1]))
    if args.process_index == own.lacks_memory_on_rank:
        from trl_paddingfree.proof.look import Rows  # a folder that may be deleted

        def lacking(rows: Rows, row: int, wider: int = 0, one=Rows._one):
            if row == 1:
                raise torch.OutOfMemoryError("no memory, on purpose")
            return one(rows, row, wider)

        monkeypatch.setattr(Rows, "_one", lacking)
    if args.process_index == own.fail_on_rank:  # in the second step
        outcomes = [mock.DEFAULT, RuntimeError("this process fails on purpose")]
        trainer.training_step = mock.Mock(wraps=trainer.training_step, side_effect=outcomes)
    trainer.accelerator.no_sync = mock.Mock(wraps=trainer.accelerator.no_sync)
    trainer.train(resume_from_checkpoint=own.resume)
    trainer.save_model(args.output_dir)
    # Of each pass that trains: slices and recomputing layers that this process alone would have, and those of all
    both = [(each.alone, each.schedule) for each in passes if each.trains]
    decisions = [[(one.num_slices, one.recompute or 0) for one in decided] for decided in both]
    Path(f"{output}.{trainer.accelerator.process_index}").write_text(json.dumps(decisions))
    if trainer.accelerator.is_main_process:
        engine = trainer.accelerator.distributed_type.value
        result = {"log": trainer.state.log_history, "world": args.world_size, "engine": engine}
        result["folder"] = args.output_dir
        result["looks"] = vars(trainer).get("_looks") and asdict(trainer._looks.found)
        result["without_sync"] = trainer.accelerator.no_sync.call_count
        output.write_text(json.dumps(result))
    trainer.accelerator.wait_for_everyone()


def main(runs: str) -> None:
    for arguments in json.loads(runs):
        faulthandler.dump_traceback_later(TIMEOUT, exit=True)  # of a process that hangs
        run(*arguments)
        AcceleratorState._reset_state()  # the next run may want another engine's settings; the processes stay
    if torch.distributed.is_initialized():
        # The destructor of DDP's reducer joins a thread of gloo that may wait for the interpreter: end without it
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
