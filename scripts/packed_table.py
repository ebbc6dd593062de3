"""The page docs/packed.md: what transformers' own packed rows are, for every causal language model that it has."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from tempfile import mkdtemp
from typing import Any

import torch
from datasets import Dataset
from transformers.utils import is_torchvision_available
from trl import SFTConfig, SFTTrainer

from scripts.model_table import built, first_line, markdown, table
from tests.helpers.vision import ARCHITECTURES, make_vision
from trl_paddingfree import check_packed

COLUMNS = ("packed", "by TRL", "by TRL, flash attention", "by `position_ids`", "by `position_ids`, flash attention")
HEADER = """\
# Is your packing exact?

Packing puts several documents into one row. It is exact only if no token sees another document, so every layer has to
keep documents apart: attention, convolutions and recurrences. A layer that does not may raise an error. If it raises
none, training goes on, and nothing is logged. One command says what a model does in your environment:

```bash
trl-paddingfree check Qwen/Qwen3-0.6B --packed
```

It packs rows as TRL's SFT does with `packing=True` or `padding_free=True`: the backbone gets one row and all arguments
that TRL's collator makes (`position_ids`, `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q`, `max_length_k` and
`seq_idx`). Other collators, such as transformers' `DataCollatorWithFlattening` by default, give `position_ids` alone:
check them with [a function of your own](#check-the-forward-of-a-framework). Each document is compared with the same
document alone, in the dtype of the model. The exit status is 0 if packed rows are exact, else 1. The verdict is one of
these:

- **exact**: log-probabilities and gradients are those of each document alone, up to rounding and [up to the sizes that
  were tried](#up-to-where-a-verdict-holds).
- **LEAKS**: A document changes when another one does, or gradients of its loss reach another one.
- **INEXACT**: No document sees another, but positions, context or gradients are wrong.
- **failed**: The model raises an error on packed rows, or answers differ between equal calls. The result says which.

## What leaks, by family

| models | packed by TRL | by TRL, with flash attention | by `position_ids` alone, either way |
|-|-|-|-|
| Llama 2 and 3, Qwen 2 and 3 (with MoE), Gemma 1 to 3, Mistral, Mixtral, Phi 1 to 3, GLM, OLMo 1 to 3, SmolLM3, DeepSeek V2 and V3, GPT-2, GPT-NeoX | exact | exact | exact |
| gpt-oss, OPT, BERT and its kind | LEAKS | exact (RoBERTa: INEXACT) | the same |
| recurrences that take no boundaries: Mamba, Jamba, MiniMax, RecurrentGemma, RWKV, xLSTM | LEAKS | LEAKS, or not in transformers | the same |
| Bamba, Falcon-H1, Nemotron-H, Granite 4 hybrids, Mamba 2, Zamba, LFM2, Qwen3-Next, Qwen3.5, OLMo hybrids, Kimi Linear, without kernels for their convolutions and recurrences | failed: an error names the package to install | failed (Mamba 2: not in transformers) | LEAKS |
| Llama 4, whose queries grow with positions on the whole row | INEXACT | not in transformers | the same |
| Qwen2-VL, Qwen2.5-VL, GLM-4V, [on text](#vision-language-models-trained-on-text); Qwen3-VL, Gemma 3, LLaVA and others are exact | LEAKS | not tried | the same |

The table of all models is below. The trainers of this package compute all of these exactly, or
[refuse them](models.md).

## A reproducer without this package

TRL 1.16 does not warn of leaks. [Newer releases](../README.md#install) were not tested. The following program needs
only TRL. It evaluates four documents twice: in rows of their own, and packed into one row. The losses should be equal,
but those of gpt-oss are not. Nor are those of `"jamba"` and `"mamba"`. With `"qwen3_5_text"` and `"falcon_h1"`,
transformers 5.24 raises an error unless kernels for their convolutions are installed.

```python
from tempfile import mkdtemp

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

tokenizer = Tokenizer(models.WordLevel({{"<pad>": 0, "<eos>": 1}}, unk_token="<pad>"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
torch.manual_seed(0)
documents = Dataset.from_list([{{"input_ids": torch.randint(2, 96, (n,)).tolist()}} for n in (9, 14, 20, 11)])
sizes = {{"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2, "pad_token_id": 0}}  # fmt: skip
for model_type in ("qwen3", "gpt_oss"):
    config = AutoConfig.for_model(model_type, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype="float32")
    for packing in (False, True):
        args = SFTConfig(mkdtemp(), packing=packing, eval_packing=packing, max_length=64, use_cpu=True, bf16=False,
                         per_device_eval_batch_size=4, report_to="none", disable_tqdm=True)  # fmt: skip
        trainer = SFTTrainer(model, args, train_dataset=documents, eval_dataset=documents, processing_class=tokenizer)
        print(f"{{model_type}}, packed: {{packing}}, loss {{trainer.evaluate()['eval_loss']:.4f}}")
```

## Check the forward of a framework

`check_packed` takes any function from rows to logits. Give it the one that your framework computes with, including its
kernels and patches. The function gets a list of `(n,)` tensors, and returns the logits of each, in the same order. It
may pack, pad or reorder them in between. [Neither needs TRL](any_trainer.md#without-trl).

```python
import torch
from transformers import AutoModelForCausalLM

from trl_paddingfree import check_packed

model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")


def forward_of_a_framework(rows):
    # It forgets `position_ids`: documents see those before them
    logits = model(input_ids=torch.cat(rows)[None]).logits[0]
    return logits.split([len(row) for row in rows])


result = check_packed(model, forward_of_a_framework)
print(result)
assert result.verdict == "LEAKS"
assert check_packed(model).verdict == "exact"  # as TRL packs
```

To check `position_ids` alone, give the model
`position_ids=torch.cat([torch.arange(len(row), device=row.device) for row in rows])[None]` there.

A test of a framework needs one line: `assert check_packed(model, call).passed`. The function has to compute with the
model and its input embeddings, and return the same answers each time. Its logits need gradients: under `no_grad`, the
verdict is INEXACT, and says why. It may call `train()`, because dropout is off during the check. It may turn autocast
on: the check then computes documents alone with autocast, too. If the embeddings do not get the tokens of each document
in one piece, gradients are compared at parameters only, and the result says so.

## Up to where a verdict holds

The result holds up to the sizes that it names: the number of `documents`, the tokens of the `longest` one, and
`length`, those of all. By default, the check compares:

| what | documents | tokens |
|-|-|-|
| log-probabilities, and which documents move when others change, in evaluation mode | 5, then 3 | up to 16 and up to 19 each, one of a single token |
| gradients at the embeddings and of all parameters, in training mode, all layers | 5 | 104 each |
| log-probabilities and leaks again, in evaluation and in training mode | 8 | 2,048 in all, 1,280 in the longest |

The last line is left out if it would take more than ten seconds, or more than 2^29 logits. If training mode would take
more than ten seconds, only the first and the last layer of each kind run in it.
`check_packed(model, call, length=8192, documents=32)` tries other sizes, however long that takes. Gradients of weights
with more than 262,144 entries are compared along a random direction. `result.not_compared` lists what was left out,
each with its reason.

A verdict says nothing about more or longer documents: a forward that leaks only above 4,096 tokens is found with
`length=4097` or more. Nor does it cover losses that a framework computes itself, whether the framework counts each
document once, or other numbers of processes.

An attention window that is shorter than the longest document is tried as it is. A longer one is narrowed during the
check. A function that has a window of its own does not see that: its verdict is then INEXACT, and names the `length`
that reaches the window.

## All models of transformers {version}

`python scripts/models.py --packed --output docs/packed.md` wrote this table, with tiny random models in float32 on the
CPU. "By TRL" is with TRL's arguments, and "by `position_ids`" with `position_ids` alone. Attention is what transformers
loads by default, or `flash_attention_2`, for which attention in plain PyTorch stands in. Figures are root mean squares
in nats: how much log-probabilities move when other documents change (LEAKS), or how far they are from those of each
document alone (INEXACT). Kernels of `mamba-ssm`, `causal-conv1d` and `flash-linear-attention` are not installed. With
these kernels, some layers that carry state keep documents apart if they get the boundaries, as from TRL; `position_ids`
alone do not suffice.
"""  # noqa: E501

VISION_COLUMNS = (
    "vision-language model",
    "by TRL",
    "by `position_ids`",
    "TRL's SFT loss, in rows of their own",
    "packed",
)
VISION_HEADING = """
## Vision-language models, trained on text

The same check, for tiny random vision-language models and documents without images: TRL packs such text, too. The last
two columns are the losses that TRL's own SFT trainer evaluates on four documents, as [above](#a-reproducer-without-this-package):
they are equal where packing is exact. The same command writes this table, with torchvision.
"""  # noqa: E501


def by_positions(model: torch.nn.Module, rows: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The logits of rows that transformers computes as one, with `position_ids` that restart at 0 for each."""
    positions = torch.cat([torch.arange(len(row), device=row.device) for row in rows])[None]
    logits = model(input_ids=torch.cat(rows)[None], position_ids=positions, use_cache=False).logits
    return logits[0].split(list(map(len, rows)))


def check(model_type: str, call: Callable[..., Any] | None, attention: str | None) -> str:
    """What a model, loaded one way, makes of packed rows: a verdict, and by how much it is wrong."""
    with built(model_type, attention) as model:
        if isinstance(model, str):
            return "not in transformers" if model.startswith("needs") else model
        try:
            result = check_packed(model, call and partial(call, model))
        except Exception as error:  # rows alone fail already
            return f"no row alone: {first_line(error)}"
    if result.verdict == "failed":
        said = result.failure or (result.gradients.failure if result.gradients else "")
        return f"failed: {' '.join(said.split()).replace('|', '/').split('. ')[0][:120]}"
    figures = {"LEAKS": result.leak, "INEXACT": result.error}
    return f"{result.verdict} by {figures[result.verdict]:.0e}" if result.verdict in figures else result.verdict


def row(model_type: str) -> list[str]:
    """One row of the table."""
    loaded = (None, "flash_attention_2")
    return [
        f"`{model_type}`",
        *(check(model_type, call, attention) for call in (None, by_positions) for attention in loaded),
    ]


def trl_losses(model: torch.nn.Module, tokenizer: Any) -> list[str]:
    """What TRL's SFT trainer evaluates on four documents, in rows of their own and packed into one."""
    draw = torch.Generator().manual_seed(0)
    lengths = (9, 14, 20, 11)
    rows = [{"input_ids": torch.randint(20, 60, (length,), generator=draw).tolist()} for length in lengths]
    data, losses = Dataset.from_list(rows), []
    for packing in (False, True):
        args = SFTConfig(
            mkdtemp(),
            packing=packing,
            eval_packing=packing,
            max_length=64,
            per_device_eval_batch_size=4,
            use_cpu=True,
            bf16=False,
            report_to="none",
            disable_tqdm=True,
        )
        trainer = SFTTrainer(model, args, train_dataset=data, eval_dataset=data, processing_class=tokenizer)
        try:
            losses.append(f"{trainer.evaluate()['eval_loss']:.4f}")
        except ValueError as error:  # of kernels that are not installed
            losses.append(f"fails: {type(error).__name__}")
    return losses


def vision_row(kind: str) -> list[str]:
    """One row of the table of vision-language models."""
    model, processor = make_vision(kind)
    cells = []
    for call in (None, partial(by_positions, model)):
        result = check_packed(model, call)
        cells.append(f"LEAKS by {result.leak:.0e}" if result.verdict == "LEAKS" else result.verdict)
    return [f"`{kind}`, on text", *cells, *trl_losses(model, processor.tokenizer)]


def verdicts(page: str) -> dict[str, list[str]]:
    """The verdicts on each model type, without figures, which differ from one machine to the next."""
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    return {name: [re.sub(r" by .*|^[0-9.]+$", "", cell) for cell in cells] for name, *cells in rows}


def packed_page(model_types: list[str]) -> str:
    """The page, with how often each verdict was found."""
    rows = table(model_types, row, len(COLUMNS))
    counted = [""]
    for place, title in enumerate(COLUMNS[1:], 1):
        said = Counter(re.split(":| by ", cells[place])[0] for cells in rows)
        counted.append(f"- {title}: {', '.join(f'{n} {verdict}' for verdict, n in said.most_common())}")
    page = markdown(rows, HEADER + "\n".join([*counted, ""]), COLUMNS)
    if not is_torchvision_available():
        raise ImportError("The table of vision-language models needs torchvision: `pip install torchvision`.")
    vision = table([*ARCHITECTURES], vision_row, len(VISION_COLUMNS))
    return page + markdown(vision, VISION_HEADING, VISION_COLUMNS)
