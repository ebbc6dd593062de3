"""SFT: padded TRL beside ours, on the same data, from the same weights."""

import pytest
import torch
from datasets import Dataset
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from tests import runs
from tests.core.trainers.test_as_padded import language_modeling
from tests.helpers.architectures import is_older, tiny_model
from tests.helpers.flat_and_padded import flat_model
from tests.helpers.folders import STATES, needs
from tests.helpers.tiny import ATTENTIONS, ROUTED, SEED, arguments, conversations, make_model, prompt_completions, saved
from tests.runs import TOLERANCE, make_trainer, run
from trl_paddingfree import FlatBatch
from trl_paddingfree.core.data.collate import LanguageModelingCollator
from trl_paddingfree.core.device import GIB

MAX_LENGTH = 24


def compare(model, dataset, layout="flat", **options):
    """Train TRL with padding and ours without, and compare. Returns both runs."""
    options = {"max_length": MAX_LENGTH, **options}
    compared = runs.compare("sft", lambda: {"model": model}, dataset, layout, **options)
    assert isinstance(compared.ours.trainer.data_collator, LanguageModelingCollator)
    return compared


def test_packed_rows_of_a_stream_are_one_row_where_evaluation_weighs_them(model_dir):
    options = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 3, "packing": True, "steps": 1}
    compare(model_dir, conversations(8, SEED), eval_dataset=conversations(4, SEED).to_iterable_dataset(), **options)


def test_accumulating_eight_times_one_equals_one_batch_of_eight(model_dir):
    """Also trl#2615 and #5710, `model_accepts_loss_kwargs`."""
    options = {"model": model_dir, "train_dataset": conversations(16, SEED), "steps": 2, "max_length": MAX_LENGTH}
    one, eight = (
        run("sft", "ours", **options, per_device_train_batch_size=size, gradient_accumulation_steps=8 // size)
        for size in (1, 8)
    )
    runs.assert_same(one, eight, ignored=runs.PER_MICRO_BATCH)


@pytest.mark.trl_1
@pytest.mark.parametrize("kind", ["rows", "packed", "slices"])
def test_compute_metrics_sees_the_same_predictions(model_dir, kind):
    """Of packed rows, of which the last batch has fewer, all documents; of slices, all of them."""
    seen = []

    def compute_metrics(prediction):
        scored = prediction.label_ids[:, 1:] != -100
        seen.append(prediction.predictions[:, :-1][scored])
        return {}

    evaluation = conversations(30 if kind == "packed" else 6, SEED)
    kwargs = {"eval_dataset": evaluation, "compute_metrics": compute_metrics, "max_length": MAX_LENGTH}
    if kind == "packed":
        kwargs |= {"packing": True, "max_length": 64, "per_device_eval_batch_size": 4}
    kwargs |= {"model": model_dir, "train_dataset": evaluation, "steps": 1}
    ours = {"max_tokens_per_micro_batch": 9} if kind == "slices" else {}
    for layout, options in {"padded": {}, "ours": ours}.items():
        run("sft", layout, **kwargs, **options).trainer.evaluate()
    torch.testing.assert_close(torch.tensor(seen[0]), torch.tensor(seen[1]), rtol=TOLERANCE, atol=TOLERANCE)


def test_packed_rows_of_evaluation_alone_are_documents_as_in_trl(model_dir):
    """Only if training packs, too, TRL's collator reads where documents begin."""
    options = {"eval_packing": True, "max_length": 64, "eval_strategy": "steps", "eval_steps": 1}
    compare(model_dir, conversations(16, SEED), eval_dataset=conversations(12, SEED), **options)


def mean_loss(outputs, labels, num_items_in_batch=None):
    """A loss of the user's own that is a mean over the micro-batch."""
    return torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.trl_1
def test_a_loss_function_of_ones_own_sees_whole_micro_batches(model_dir):
    common = {"compute_loss_func": mean_loss}
    for limit in (4 * MAX_LENGTH, MAX_LENGTH // 2):  # in slices beneath the loss
        compare(model_dir, conversations(16, SEED), **common, ours={"max_tokens_per_micro_batch": limit})


def by_place(outputs, labels, num_items_in_batch=None):
    """A loss that weighs tokens by their place in the row."""
    losses = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].mT, labels[:, 1:], reduction="none")
    return (losses * torch.arange(1, 1 + losses.size(1))).mean() / losses.size(1)


@pytest.mark.trl_1
@pytest.mark.parametrize("multiple", [None, 16])
@pytest.mark.parametrize("strategy", ["bfd", "wrapped"])
def test_a_loss_function_of_ones_own_sees_packed_rows_as_trl_gives_them(model_dir, strategy, multiple):
    options = {"packing": True, "packing_strategy": strategy, "max_length": 64, "compute_loss_func": by_place}
    ignored = (*runs.ROUNDED, "num_tokens") if multiple else runs.ROUNDED  # TRL counts the padding
    compare(model_dir, conversations(30, SEED), pad_to_multiple_of=multiple, ignored=ignored, **options)


def test_whole_batches_of_packed_rows_count_alike_in_evaluation(model_dir):
    """With `dataloader_drop_last`, accelerate does not know how many rows the last batch has, as of a stream."""
    options = {"packing": True, "max_length": 64, "dataloader_drop_last": True, "per_device_eval_batch_size": 3}
    options |= {"eval_strategy": "steps", "eval_steps": 1}
    compare(model_dir, conversations(16, SEED), eval_dataset=conversations(40, SEED), **options)


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
def test_packing_equals_trls_own(tokenizer, tmp_path, strategy):
    """TRL isolates packed documents on models with SDPA, so that there is something to compare with."""
    # GPT-2's class has no name by which transformers knows that its loss shifts labels, and counts them before
    drops = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
    for model_type, options in {"llama": {}, "gpt2": drops}.items():
        if model_type == "llama" or strategy != "wrapped":
            folder = saved(tmp_path / model_type, make_model(model_type, **options), tokenizer)
            compare(folder, conversations(30, SEED), packing=True, packing_strategy=strategy, max_length=64)


@pytest.mark.skipif(is_older("5.23"), reason="checkpoints of transformers cannot offload")
@pytest.mark.skipif(torch.accelerator.current_accelerator() is None, reason="transformers pins what it offloads")
@pytest.mark.parametrize("model_type", ["gpt2", *(pytest.param(x, marks=STATES) for x in ("xlstm", "zamba2"))])
def test_checkpoints_that_offload_the_mask(model_type, tokenizer, tmp_path):
    """These models hand the mask on by position, where a checkpoint saves it, and `offload` copies what is saved."""
    folder = saved(tmp_path, tiny_model(model_type, vocab_size=len(tokenizer)), tokenizer)
    for reentrant in (False, True):
        options = {"activation_checkpointing_kwargs": {"offload": True, "use_reentrant": reentrant}}
        options |= {"gradient_checkpointing": None, "activation_checkpointing": True}
        _, ours = compare(folder, conversations(12, SEED), "shared", **options)
        assert ours.trainer.runtime.route.backend == "segment"  # and not a dense mask, which would not be lost


@pytest.mark.parametrize("limit", ["tokens", "memory"])
def test_packed_rows_above_a_budget_run_document_by_document(model_dir, limit):
    """No document has 40 tokens, and rows of 64 are packed: more full ones than are looked at."""
    dataset = conversations(400, SEED).filter(lambda row: len(str(row["messages"]).split()) < 30)
    arguments = {"model": model_dir, "train_dataset": dataset, "packing": True, "max_length": 64}
    whole = run("sft", "flat", **arguments, memory_budget=8)
    trainer, plan = whole.trainer, whole.trainer.planner
    assert int(trainer.item_lengths().max()) < 40 < int(trainer.example_lengths().max())
    budget = {"max_tokens_per_micro_batch": 40}
    if limit == "memory":
        longest = int(trainer.item_lengths().max())
        least = plan.least_bytes(FlatBatch.from_rows([[5] * longest], [[-100] + [5] * (longest - 1)]))
        budget, too_small = ({"memory_budget": share * least / GIB} for share in (1.0001, 0.999))
        with pytest.raises(ValueError, match=r"is less than example \d+ of the training data needs"):
            runs.make_trainer("sft", "flat", **arguments, **too_small)
    parts = run("sft", "flat", **arguments, **budget)
    runs.assert_same(whole, parts)
    assert all(entry["flat/slices"] == 1 for entry in parts.log_history if "loss" in entry)


def test_rows_that_a_transform_makes_are_not_known_before(tokenizer, model_dir):
    """TRL's way to prepare rows on the fly."""

    def made(rows):
        return {"input_ids": [tokenizer(text)["input_ids"][:MAX_LENGTH] for text in rows["text"]]}

    data = language_modeling(16, SEED).with_transform(made)
    options = {"dataset_kwargs": {"skip_prepare_dataset": True}, "remove_unused_columns": False}
    for limit in (2 * MAX_LENGTH, 8):
        compare(model_dir, data, **options, ours={"max_tokens_per_micro_batch": limit})


@ATTENTIONS
def test_a_packed_document_does_not_move_when_its_neighbour_changes(attention):
    model, outputs = make_model(attn_implementation=attention), []
    flat_model(model)
    collator = LanguageModelingCollator(pad_token_id=0, padding_free=True)
    for neighbour in ([10, 11, 12], [20, 21, 22]):
        batch = collator([{"input_ids": [*neighbour, 5, 6, 7, 8, 9, *neighbour], "seq_lengths": [3, 5, 3]}])
        with torch.no_grad():
            outputs.append(model(**batch, fused_lm_head=True).log_probs)
    assert torch.equal(outputs[0][1], outputs[1][1])
    assert not torch.equal(outputs[0][0], outputs[1][0])


@needs("data_checks")
def test_truncated_away_examples_are_dropped_and_counted(model_dir, caplog):
    rows = [{"prompt": "w1 " * 30, "completion": " w2"}, *prompt_completions(8, SEED)]
    ours = run("sft", "ours", model=model_dir, train_dataset=Dataset.from_list(rows), steps=1, max_length=MAX_LENGTH)
    dropped = len(rows) - len(ours.trainer.train_dataset)
    assert dropped >= 1
    assert f"dropped {dropped} of {len(rows)} examples" in caplog.text


def test_batches_are_not_cut_along_their_first_dimension(model_dir):
    """accelerate#2325, also #2023, #3849: the dispatcher slices and concatenates whatever it finds."""
    trainer = run("sft", "ours", model=model_dir, train_dataset=conversations(12, SEED), steps=1).trainer
    assert trainer.accelerator.dataloader_config.dispatch_batches is False
    batch = next(iter(trainer.get_train_dataloader()))
    assert isinstance(next(iter(batch.values())), torch.Tensor)  # what accelerate reads the batch size from
    assert isinstance(batch["flat_batch"], FlatBatch)


def test_positions_of_documents_in_rows_that_are_not_cut_are_refused():
    collator = DataCollatorForLanguageModeling(0, return_position_ids=True)
    with pytest.raises(ValueError, match="`return_position_ids=True` numbers documents"):
        make_trainer("sft", "ours", data_collator=collator)


def test_padding_of_a_packed_row_that_routers_would_learn_from_is_refused():
    given = {
        **arguments("sft", False),
        "model": make_model("mixtral", **ROUTED),
        "train_dataset": conversations(8, SEED),
    }
    run("sft", "flat", **given, packing=True, steps=1)
    with pytest.raises(ValueError, match="`pad_to_multiple_of=8` with packing and `router_aux_loss_coef="):
        make_trainer("sft", "ours", **given, packing=True, pad_to_multiple_of=8)


def test_a_loss_that_one_process_logs_waits_for_no_other():
    trainer = make_trainer("sft", "ours")
    trainer.log({"loss": 1.0})
    assert not any(name.startswith("flat") for name in trainer.state.log_history[-1])
