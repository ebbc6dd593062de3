"""The table of docs/models.md: what the start-up check says of every causal language model of transformers."""

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from trl.trainer.utils import add_fused_lm_head

from tests.helpers.architectures import tiny_model
from tests.helpers.reference_flash import reference_flash
from trl_paddingfree.core import upstream
from trl_paddingfree.core.check.gradients import RowsInTraining
from trl_paddingfree.core.check.probe import RowsAlone
from trl_paddingfree.core.check.prove import CheckResult, check_flat, why_refused
from trl_paddingfree.core.model.routes import choose_route, routes_to_try

Row = Callable[[str], list[str]]  # what makes the row of a model type

SECONDS = 120  # per model; the slowest takes one
SHOWN = ("segment", "mask", "flash", "positions")
COLUMNS = ("model type", "verdict", "segment", "mask", "verdict with flash attention", "flash", "positions")
HEADER = """\
# Models

This page has the verdict of the start-up check for every causal language model in transformers {version}.
`python scripts/models.py --output docs/models.md` wrote it, with tiny random models in float32 on the CPU. The trainers
run the same check on the model that you train, and train nothing that it refuses.

A verdict consists of these terms:

- **flat and shared**: The model is exact without padding, and with shared prefixes.
- **flat**: It is exact without padding. Prefixes are not shared.
- **explicit mask**: Attention runs under a dense 4-D mask, whose memory and time grow with the square of the batch's
  tokens.
- **by positions**: The model tells sequences apart by their `position_ids`, as transformers does it.
- **refused**: `padding_free=True` raises an error with the reason in the table.

This is how to read the table:

- `segment`, `mask`, `flash` and `positions` are [backends](options.md#backends), ways to compute attention. The first
  figure is the largest difference between log-probabilities, flat and row by row (root mean square, in nats). The
  second is the most that the model's own rounding explains.
- The tiny models have 512 positions, and windows of 8 tokens. If one is refused because of these limits, a model with
  longer ones may pass the check.
- With flash attention, attention in plain PyTorch stands in for the kernel.

Layers that carry state compute a shared prefix in one of two ways:

- Some layers compute it once: gated delta nets (Qwen3.5, Qwen3-Next, OLMo-hybrid), Kimi's delta attention (Kimi Linear,
  Bailing), Mamba and Mamba 2 (Jamba, Bamba, Falcon-H1, Granite 4, Nemotron-H, Zamba) and short convolutions (LFM2). The
  convolution of a segment sees the tokens before it in its row. The recurrence of each branch starts from the state
  where the branch begins. If `causal-conv1d`, `flash-linear-attention` or `mamba-ssm` is installed, these layers call
  it. The figures are those of plain PyTorch.
- Layers with other recurrences (RWKV, xLSTM, RecurrentGemma, MiniMax, DeepSeek V4, Zaya, Qwen 4's n-gram features), and
  the attention of Inkling, compute it again for each row, while all other layers stay flat and shared. Layers of the
  first kind fall back to this if they fail the start-up check otherwise, as recurrences in float32 do within models in
  float64.

Some models need a setting, with padding or without:

- Llama 4, Mllama: TRL's fused LM head does not find the backbone. Set `model.base_model_prefix = "model"` on the model
  that you pass to the trainer. Llama 4 also needs `router_aux_loss_coef=0.0`, because TRL's router loss asks its
  configuration for `num_experts`.
- DBRX: Clamping queries and keys raises an error without a `clip_qkv`. Give one to `attn_config`.
- Falcon: Its flash attention reads `position_ids` and nothing else. Load it with `"sdpa"` to share prefixes.
- Gemma 4: Its layers with full attention have heads of 512, and flash attention takes 256 at most. Load it with
  `"sdpa"`. On CUDA in half precision, layers with a sliding window then run in PyTorch's flash attention, and those
  with full attention over segments, in the kernel that SDPA finds for them. This choice is tested with a stand-in for
  the kernel, and was not timed on a GPU.
- GPT-Neo, and GPT-J below transformers 5.24: Their flash attention gets neither masks nor positions. Load them with
  `"eager"`.
"""


@contextmanager
def built(model_type: str, attention: str | None) -> Iterator[PreTrainedModel | str]:
    """Within this context, plain PyTorch stands in for flash attention. Yields a tiny model, or why there is none."""
    # GPT-2's own code for flash attention cannot take float32
    dtype = torch.bfloat16 if attention and model_type in ("gpt2", "gpt-sw3") else torch.float32
    with reference_flash() if attention else nullcontext():
        model: PreTrainedModel | str
        try:
            model = tiny_model(model_type, attn_implementation=attention, dtype=dtype)
            if attention and "flash" not in (found := upstream.attn_implementation(model)):
                model = f"needs {found}: not tried"
        except Exception as error:  # whatever keeps transformers from building a model is the entry of the table
            model = f"could not be built: {first_line(error)}"
            if "does not support Flash Attention" in model:
                model = "not in transformers"
        yield model


def check(model_type: str, attention: str | None) -> dict[str, str]:
    """Run the check on one architecture loaded one way: a verdict, and a figure for each backend."""
    with built(model_type, attention) as model:
        if isinstance(model, str):
            return {"verdict": model}
        note = ""
        if model.base_model is model:
            model.base_model_prefix, note = "model", ", after `model.base_model_prefix = 'model'`"
        add_fused_lm_head(model)
        try:
            reference = RowsAlone(model)
        except Exception as error:
            return {"verdict": f"TRL cannot train it: {first_line(error)}"}
        results = every_route(model, reference)
        verdict = first_passing(results)
        if not verdict:
            verdict = "refused: " + " ".join(why_refused(model, results)).replace("|", "/")
    figures = {backend: figure([r for r in results if r.route.backend == backend]) for backend in SHOWN}
    return {"verdict": verdict + note, **figures}


def every_route(model: PreTrainedModel, reference: RowsAlone) -> list[CheckResult]:
    """The check on every route that the trainers would try, in their order."""
    in_training = cache(partial(RowsInTraining, model))
    return [check_flat(model, route, reference, in_training) for route in routes_to_try(model, choose_route(model))]


def first_passing(results: list[CheckResult]) -> str:
    """How the model would train; empty if it would not."""
    for result in results:
        if result.passed:
            by = {"mask": "explicit mask, ", "positions": "by positions, "}.get(result.route.backend, "")
            return by + ("flat and shared" if result.prefix_sharing else "flat")
    return ""


def figure(results: list[CheckResult]) -> str:
    """The cell of one backend."""
    if answered := [result for result in results if not result.failure]:
        worst = max(answered, key=lambda result: (not result.passed, result.error))
        return f"{worst.error:.0e} of {worst.tolerance:.0e}"
    return "raises" if results else ""


def first_line(error: Exception) -> str:
    """The error in one line without characters that break a table."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text.replace("|", "/")[:120]


def row(model_type: str) -> list[str]:
    """One row of the table."""
    plain, flash = check(model_type, None), {"verdict": ""}
    if any(route in plain for route in SHOWN):
        flash = check(model_type, "flash_attention_2")
    plain_cells = [plain.get(name, "") for name in ("verdict", "segment", "mask")]
    return [f"`{model_type}`", *plain_cells, *(flash.get(name, "") for name in ("verdict", "flash", "positions"))]


def _work(row_of: Row, model_type: str, connection: Any) -> None:
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    connection.send(row_of(model_type))


def table(model_types: list[str], row_of: Row = row, width: int = len(COLUMNS)) -> list[list[str]]:
    """The rows of a table, each computed in a process of its own: a model may hang or crash."""
    context, rows = multiprocessing.get_context("fork"), []
    for model_type in model_types:
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(row_of, model_type, theirs), daemon=True)
        process.start()
        theirs.close()
        try:
            answer = ours.recv() if ours.poll(SECONDS) else [f"`{model_type}`", f"no answer in {SECONDS} s"]
        except EOFError:
            answer = [f"`{model_type}`", "crashed"]
        rows.append(answer + [""] * (width - len(answer)))
        process.kill()
        process.join()
    return rows


def markdown(rows: list[list[str]], header: str = HEADER, columns: tuple[str, ...] = COLUMNS) -> str:
    """The page."""
    lines = [columns, ("---",) * len(columns), *rows]
    return header.format(version=transformers.__version__) + "".join(f"\n| {' | '.join(x)} |" for x in lines) + "\n"


def verdicts(page: str) -> dict[str, tuple[str, str]]:
    """The two verdicts on each model type, without the figures, which differ from one machine to the next."""
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    return {cells[0]: (cells[1], cells[4] if len(cells) > 4 else "") for cells in rows}
