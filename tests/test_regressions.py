"""Bugs of padding-free training elsewhere, one by one: each test is named after the one that it would show here.

Those that cannot occur here, and why:

| bug | why not |
|---|---|
| trl#4632 packing drops truncated tokens | packing is TRL's; what it gives is cut back into its documents |
| trl#3526, #1230, #3067 "wrapped" packing mixes documents | asked for, and TRL's own meaning of the word |
| trl#5279, #5286 images and `keep_end` | rows with images are refused, see trainers/test_refusals.py |
| trl#5923 a GPU test that never ran | all but the kernels themselves is tested on the CPU |
| trl#5316, #3549 requests: SDPA and eager, shared prefixes | this package |
| transformers#26548 Python ints in a batch | a batch holds tensors and one object that moves itself |
| flash-attention#2562, #2568 zero-length queries in FA4 | no segment is empty, see the test of #1254 |
| ms-swift#6825, #5164 sequence parallelism | refused, see trainers/test_refusals.py |
| ms-swift#6548 GSPO | not offered |
| ms-swift#4942 `predict_with_generate` | not offered; generation is untouched, see the test of transformers#32487 |

And those that other tests cover, of check/test_prove.py or model/test_state_layers.py:

| bug | test |
|---|---|
| transformers#46634 an all-ones mask | `test_all_ones_mask_is_caught` |
| transformers#46634 a cache left on | `test_use_cache_is_caught` |
| transformers#39814, #47525 different first positions | `test_segments_with_different_first_positions_are_caught` |
| transformers#46093, #35861, NeMo-RL#2105 | `test_family_passes_the_check_and_equals_padded_flat_and_shared` |
"""

import copy
import gc
import os
import weakref
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from transformers import AttentionMaskInterface, AutoModelForImageTextToText
from trl import SFTConfig, SFTTrainer
from trl.trainer.utils import add_fused_lm_head

from tests.helpers import dpo_runs
from tests.helpers.architectures import tiny_config, tiny_model
from tests.helpers.equivalence import TOLERANCE, assert_same, run
from tests.helpers.flat_and_padded import assert_equals_padded
from tests.helpers.reference_flash import reference_flash
from tests.helpers.tiny import conversations, make_model, preference_data
from trl_paddingfree import (
    FlatBatch,
    LanguageModelingCollator,
    PaddingFreeSFTConfig,
    PaddingFreeSFTTrainer,
    PreferenceCollator,
    upstream,
)
from trl_paddingfree.check.prove import UnprovenModelError, check_flat, prove
from trl_paddingfree.flat.counts import TokenCounts
from trl_paddingfree.model.flat_model import FlatModel
from trl_paddingfree.model.masks import FlatMask, boundaries
from trl_paddingfree.model.routes import Route, choose_route

SEED = int(os.environ["TRL_PADDINGFREE_SEED"])  # fresh, and in the test ids
PAIRS = [
    {"prompt_ids": [1, 2, 3], "chosen_ids": [4, 5], "rejected_ids": [6]},
    {"prompt_ids": [7, 8], "chosen_ids": [9], "rejected_ids": [10, 11, 12]},
]


def make(**options):
    model = make_model(**options)
    add_fused_lm_head(model)
    FlatModel.install(model, choose_route(model))
    return model


def random_batches(**options):
    """Flat batches of random rows over two tokens, every token of which is scored."""
    rng = torch.Generator().manual_seed(SEED)
    for _ in range(30):
        sizes = torch.randint(0, 9, (5,), generator=rng).tolist()
        rows = [torch.randint(0, 2, (n,), generator=rng).tolist() for n in sizes]
        yield rows, FlatBatch.from_rows(rows, rows, **options)


def log_probs(model, batch, rows):
    width = batch.row_index.size(1)
    labels = torch.tensor([row + [-100] * (width - len(row)) for row in rows])
    return model(flat_batch=batch, labels=labels, fused_lm_head=True, use_cache=False).log_probs


ROWS = [[5, 6, 7, 8, 9], [5, 6, 10], [11, 12], [5, 6, 7, 13]]


@pytest.fixture(scope="module")
def sft_run(model_dir):
    """One short run of each trainer on the same long conversations."""
    data = conversations(12, SEED)
    options = {"train_dataset": data, "model": model_dir, "max_length": 24, "steps": 2}
    return run(SFTTrainer, SFTConfig, **options), run(PaddingFreeSFTTrainer, PaddingFreeSFTConfig, **options)


# --- TRL -----------------------------------------------------------------------------------------------------------


def test_trl_3244_what_is_gathered_is_on_the_models_device():
    devices = []
    gather = lambda tensor: devices.append(tensor.device.type) or torch.zeros_like(tensor, device="cpu")  # noqa: E731
    accelerator = SimpleNamespace(device=torch.device("meta"), gather=gather, num_processes=2)
    TokenCounts().figures(accelerator, memory=0, repeats=False)
    assert devices == ["meta"]


def test_trl_3673_no_2d_mask_reaches_the_model():
    model, seen = make(), []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda m, a, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True)
    log_probs(model, FlatBatch.from_rows(ROWS, ROWS), ROWS)
    assert [type(mask) for mask in seen] == [FlatMask, FlatMask]


@pytest.mark.parametrize("prefix_sharing", [False, True], ids=["flat", "shared"])
def test_trl_4170_the_first_token_of_a_sequence_is_never_a_target(prefix_sharing):
    """Also fla#1217: a label at the boundary between two documents."""
    for rows, batch in random_batches(prefix_sharing=prefix_sharing):
        if sum(map(len, rows)) == 0 or batch.shift_labels[0, 0] == -100:
            continue
        ids, segment = batch.input_ids[0], batch.layout.seq_idx[0]
        following = batch.scored_index + 1
        assert torch.equal(ids[following], batch.shift_labels[0])
        assert torch.equal(segment[following], segment[batch.scored_index])
        assert (batch.position_ids[0][following] > 0).all()


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3", "flash_attention_4", "kernels-community/x"])
def test_trl_3942_every_flash_attention_gets_boundaries(name, monkeypatch):
    model, calls = make_model(), []
    add_fused_lm_head(model)
    AttentionMaskInterface.register(name, AttentionMaskInterface()["flash_attention_2"])  # as loading a kernel does
    upstream.set_attn_implementation(model, name)
    attend = lambda query, *args, **kwargs: calls.append(kwargs) or torch.zeros_like(query)  # noqa: E731
    monkeypatch.setattr(upstream, "flash_attention_forward", attend)
    batch = FlatBatch.from_rows(ROWS, ROWS)
    FlatModel.install(model, choose_route(model))
    log_probs(model, batch, ROWS)
    assert [call["attn_implementation"] for call in calls] == [name, name]
    for call in calls:
        assert torch.equal(call["cu_seq_lens_q"], batch.layout.cu_seqlens_q)
        assert torch.equal(call["cu_seq_lens_k"], batch.layout.cu_seqlens_k)
        assert (call["max_length_q"], call["max_length_k"]) == (5, 5)


def test_trl_3996_padding_to_a_multiple_changes_nothing():
    model = make()
    expected = log_probs(model, FlatBatch.from_rows(ROWS, ROWS), ROWS)
    padded = FlatBatch.from_rows(ROWS, ROWS, pad_to_multiple_of=16)
    assert padded.input_ids.size(1) % 16 == 0
    torch.testing.assert_close(log_probs(model, padded, ROWS), expected)


def test_trl_3053_streaming_data_trains_the_same(model_dir, sft_run):
    data = conversations(12, SEED).to_iterable_dataset()
    options = {"train_dataset": data, "model": model_dir, "max_length": 24, "steps": 2}
    padded = run(SFTTrainer, SFTConfig, **options)
    assert_same(padded, run(PaddingFreeSFTTrainer, PaddingFreeSFTConfig, **options))


def test_trl_5076_packed_labels_are_cut_where_their_tokens_are():
    """Also trl#3749: the masks of prompts survive packing, here as labels of -100."""
    packed = {"input_ids": [1, 2, 3, 4, 5], "labels": [-100, 2, 3, -100, 5], "seq_lengths": [3, 2]}
    batch = LanguageModelingCollator(pad_token_id=0, padding_free=True)([packed])
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 5, 0]]
    assert batch["labels"].tolist() == [[-100, 2, 3], [-100, 5, -100]]
    assert batch["flat_batch"].shift_labels.tolist() == [[2, 3, 5]]


def test_trl_2834_the_route_follows_the_implementation_in_force():
    """GPT-OSS has no SDPA: what was asked for, or left open, is not what it runs."""
    model = tiny_model("gpt_oss")
    add_fused_lm_head(model)
    assert choose_route(model).previous == "eager"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_trl_3910_documents_are_apart_without_flash_attention(attention):
    model = make(attn_implementation=attention)
    assert check_flat(model, choose_route(model).without_sharing()).leak == 0


def test_trl_5359_max_length_is_kept_by_the_trainer_itself(sft_run):
    padded, ours = sft_run
    assert max(len(ids) for ids in ours.trainer.train_dataset["input_ids"]) == 24
    assert_same(padded, ours)


@pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
def test_trl_5305_every_sequence_is_truncated_before_anything_is_shared(mode):
    """Also #5350, #5362, ms-swift#5665, and trl#3398: `keep_end` with padding-free zeroed samples."""
    options = {"pad_token_id": 0, "max_length": 3, "truncation_mode": mode}
    padded, ours = PreferenceCollator(**options)(PAIRS), PreferenceCollator(**options, padding_free=True)(PAIRS)
    assert torch.equal(padded["input_ids"], ours["input_ids"])
    lengths = padded["attention_mask"].sum(1).tolist()
    rows = [row[:n].tolist() for row, n in zip(padded["input_ids"], lengths, strict=True)]
    assert ours["flat_batch"].to_rows() == rows
    assert ours["flat_batch"].layout.segments.max_seqlen_k == 3


def test_trl_6321_a_batch_without_a_scored_token_has_a_loss_of_zero_and_a_gradient():
    model = make()
    nothing = [[-100] * len(row) for row in ROWS]
    total = log_probs(model, FlatBatch.from_rows(ROWS, nothing), nothing).sum()
    total.backward()
    assert total == 0
    assert all((p.grad == 0).all() for p in model.parameters())


def test_trl_2615_a_step_of_two_micro_batches_is_one_of_twice_the_size(model_dir):
    """Also #5710, `model_accepts_loss_kwargs`."""
    losses = []
    for size in (2, 4):
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 4 // size, "max_length": 24}
        data = conversations(8, SEED)
        ours = run(PaddingFreeSFTTrainer, PaddingFreeSFTConfig, train_dataset=data, model=model_dir, steps=2, **options)
        losses.append(ours.losses)
    assert losses[0] == pytest.approx(losses[1], rel=TOLERANCE)


def test_trl_5807_gemma3_trains_on_text_without_token_types():
    model = tiny_model("gemma3")
    add_fused_lm_head(model)
    assert_equals_padded(model.train(), Route("segment", "sdpa", prefix_sharing=True), SEED)


@pytest.mark.parametrize("reentrant", [False, True])
def test_trl_6356_both_kinds_of_gradient_checkpointing_see_the_layout(reentrant):
    model = tiny_model("llama").train()
    add_fused_lm_head(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert_equals_padded(model, Route("segment", "sdpa", prefix_sharing=True), SEED)


def test_trl_lora_on_the_head_is_refused(model_dir):
    """The fused head would ignore it."""
    with pytest.raises(ValueError, match="lm_head"):
        dpo_runs.train(
            "shared",
            lambda: {"model": model_dir, "peft_config": LoraConfig(target_modules=["lm_head"])},
            preference_data(4, SEED),
            steps=1,
        )


# --- transformers --------------------------------------------------------------------------------------------------


def test_transformers_47496_positions_that_start_at_two_are_refused():
    model = tiny_model("roberta")
    add_fused_lm_head(model)
    with pytest.raises(UnprovenModelError, match="counts positions from 2"):
        prove(model, choose_route(model))


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl"])
def test_transformers_38007_three_axes_of_positions_are_not_boundaries(model_type):
    """Also #44911, #40490: a model with multi-axis positions, on text, with and without flash attention."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    for attention in ("sdpa", "flash_attention_2"):
        with reference_flash():
            config = tiny_config(model_type)
            config.text_config.rope_parameters = rope
            model = AutoModelForImageTextToText.from_config(config, attn_implementation=attention).eval()
            add_fused_lm_head(model)
            result, failed = prove(model, choose_route(model))
        assert result.route.backend == ("segment" if attention == "sdpa" else "flash")
        assert result.prefix_sharing
        assert not failed


def test_transformers_39121_a_flat_batch_is_one_row():
    for _, batch in random_batches():
        assert {len(x) for x in (batch.input_ids, batch.position_ids, batch.shift_labels)} == {1}


def test_transformers_31629_every_tensor_has_the_type_that_models_want():
    """Also #42502, #42620, #41652, #33946: lists, floats and separators out of a flattening collator."""
    batch = PreferenceCollator(pad_token_id=0, padding_free=True)(PAIRS)["flat_batch"]
    types = {name: x.dtype for name, x in vars(batch).items() if isinstance(x, torch.Tensor)}
    assert types.pop("row_mask") == torch.bool
    assert set(types.values()) == {torch.int64}
    told = boundaries(batch.layout)
    assert [type(x) for x in told.values()] == [torch.Tensor, torch.Tensor, int, int, torch.Tensor]
    assert {x.dtype for x in told.values() if isinstance(x, torch.Tensor)} == {torch.int32}
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 7, 8, 9, 3, 6, 8, 10, 11, 12]]  # no separators


def test_transformers_32487_generation_is_untouched():
    model = make_model()
    prompt = {"input_ids": torch.tensor([[5, 6, 7], [0, 8, 9]]), "attention_mask": torch.tensor([[1, 1, 1], [0, 1, 1]])}
    expected = model.generate(**prompt, max_new_tokens=6, do_sample=False)
    add_fused_lm_head(model)
    FlatModel.install(model, choose_route(model))
    log_probs(model, FlatBatch.from_rows(ROWS, ROWS), ROWS)
    assert torch.equal(model.generate(**prompt, max_new_tokens=6, do_sample=False), expected)


def test_transformers_41856_no_dense_mask_is_made(monkeypatch):
    model, batch = make(), FlatBatch.from_rows(ROWS, ROWS, prefix_sharing=False)
    made, original = [], torch.nn.functional.scaled_dot_product_attention

    def attend(*args, attn_mask=None, **kwargs):
        made.append(attn_mask)
        return original(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    log_probs(model, batch, ROWS)
    assert len(made) == 2 * len(ROWS)
    assert all(mask is None for mask in made)


# --- flash-attention and PyTorch -----------------------------------------------------------------------------------


@pytest.mark.parametrize("multiple", [None, 8])
def test_flash_attention_2324_boundaries_close_at_the_last_token(multiple):
    """Also pytorch#176793, #186786, #188933: gradients of tokens beyond the last boundary are not initialised."""
    for _, batch in random_batches(pad_to_multiple_of=multiple):
        layout = batch.layout
        assert layout.cu_seqlens_q[-1] == batch.input_ids.size(1)
        keys = batch.input_ids.size(1) if layout.kv_index is None else len(layout.kv_index)
        assert layout.cu_seqlens_k[-1] == keys


def test_flash_attention_443_no_segment_has_more_queries_than_keys():
    """Also #1778: such queries see nothing, and their gradients are NaN."""
    for _, batch in random_batches():
        segments = batch.layout.segments
        assert all(q <= k for q, k in zip(segments.lengths, segments.key_lengths, strict=True))


def test_flash_attention_1254_no_segment_is_empty():
    """Also #1537 (a longest sequence of one token beside an empty one), #2562, #2568."""
    for rows in ([[]], [[], [3], []], [[3], [4]], [[], []]):
        batch = FlatBatch.from_rows(rows, rows)
        assert min(batch.layout.segments.lengths) >= 1
        with reference_flash():
            model = make_model(attn_implementation="flash_attention_2")
            add_fused_lm_head(model)
            FlatModel.install(model, choose_route(model))
            values = log_probs(model, batch, rows)
        assert values.isfinite().all()


# --- Other packages ------------------------------------------------------------------------------------------------


def test_open_instruct_1900_a_new_adapter_starts_at_ln_2(model_dir):
    """Boundaries of the rejected rows were offset by the padded length of the chosen ones."""
    first = dpo_runs.train(
        "shared", lambda: {"model": model_dir, "peft_config": LoraConfig()}, preference_data(4, SEED), steps=1
    )
    assert first.losses[0] == pytest.approx(0.6931472, abs=1e-6)  # ln 2 in float32, as logged
    batch = PreferenceCollator(pad_token_id=0, padding_free=True, prefix_sharing=False)(PAIRS)["flat_batch"]
    assert batch.layout.cu_seqlens_q.tolist() == [0, 5, 8, 12, 17]


def test_ms_swift_10072_length_desensitized_dpo_counts_completions(model_dir):
    dpo_runs.assert_layouts_agree(
        lambda: {"model": model_dir, "ref_model": copy.deepcopy(make_model(seed=1))},
        preference_data(8, SEED),
        layouts=("shared",),
        steps=1,
        ld_alpha=0.5,
    )


def test_ms_swift_4839_evaluation_gives_the_figures_of_padded_trl(model_dir):
    data, figures = conversations(8, SEED), []
    options = {"train_dataset": data, "model": model_dir, "trainer_kwargs": {"eval_dataset": data}, "max_length": 24}
    for trainer, config in ((SFTTrainer, SFTConfig), (PaddingFreeSFTTrainer, PaddingFreeSFTConfig)):
        result = run(trainer, config, steps=1, **options)
        figures.append({k: v for k, v in result.trainer.evaluate().items() if "second" not in k and "time" not in k})
    assert figures[1] == pytest.approx(figures[0], rel=TOLERANCE)


def test_llama_factory_10736_padding_has_positions():
    """Also #7318, and VeOmni#746, #136, #845: padding with position 0 makes one sequence of every padding token."""
    batch = FlatBatch.from_rows(ROWS, ROWS, pad_to_multiple_of=16)
    assert batch.position_ids.shape == batch.input_ids.shape
    without = FlatBatch.from_rows(ROWS, ROWS)
    tail = batch.input_ids.size(1) - without.input_ids.size(1)
    assert batch.position_ids[0, -tail:].tolist() == list(range(tail))
    assert len(batch.layout.segments.lengths) == len(without.layout.segments.lengths) + 1


def test_unsloth_7678_what_is_derived_of_a_batch_goes_with_it():
    """Also unsloth#4243, host and device waiting for each other in every layer: see `test_gpu`."""
    model, batch = make(), FlatBatch.from_rows(ROWS, ROWS)
    log_probs(model, batch, ROWS).sum().backward()
    assert batch.layout._derived
    layout = weakref.ref(batch.layout)
    del batch
    gc.collect()
    assert layout() is None


def test_accelerate_2325_batches_are_not_cut_along_their_first_dimension(sft_run, model_dir):
    """Also #2023, #3849: the dispatcher slices and concatenates whatever it finds."""
    trainer = sft_run[1].trainer
    assert trainer.accelerator.dataloader_config.dispatch_batches is False
    batch = next(iter(trainer.get_train_dataloader()))
    assert isinstance(next(iter(batch.values())), torch.Tensor)  # what accelerate reads the batch size from
    assert isinstance(batch["flat_batch"], FlatBatch)
