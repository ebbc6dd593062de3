"""A small vision-language model learns to read handwritten digits, from scratch: TRL's padding beside ours.

The pictures are scikit-learn's 1,797 digits of 8 by 8 pixels. The model answers questions about one or two of them, in
sentences whose length depends on the digit, first by SFT, then by DPO against wrong digits, and then by GRPO in groups
of eight answers, of which the right ones are rewarded.
"""

import copy
import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers
from datasets import Dataset
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText

from trl_paddingfree.budgets.predict import decoder
from trl_paddingfree.cli.quickstart import side_by_side
from trl_paddingfree.cli.quickstart.side_by_side import ON_CPU, classes_of

from ..environment import machine_name
from ..flops import flop_counter
from ..report import table
from ..run import spread
from ..trainers import make_tokenizer

DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
ONE = ("which digit is this", "please read the digit in the picture and count up to it", "digit")
TWO = ("which digits are these", "please read both digits in the pictures and count up to the second")
IMAGE, START = "<image>", "<start>"
TEMPLATE = (
    "{% for m in messages %}<start> {{ m['role'] }} {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}<image>{% else %} {{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %} <eos> {% endfor %}{% if add_generation_prompt %}<start> assistant {% endif %}"
)
LAYOUTS = {"sft": ("padded", "flat"), **dict.fromkeys(("dpo", "grpo"), ("padded", "flat", "shared"))}
STEPS, BATCH_SIZE, COUNTED_STEPS, GROUP_SIZE = {"sft": 350, "dpo": 60, "grpo": 20}, 16, 4, 8
WARM_UP_STEPS, TIMED_STEPS = 2, 20


def digits() -> tuple[list[Image.Image], list[int]]:
    """The pictures, 32 by 32 pixels, and what they show."""
    from sklearn.datasets import load_digits

    found = load_digits()
    pixels = np.kron(found.images / 16 * 255, np.ones((4, 4))).astype(np.uint8)
    return [Image.fromarray(image).convert("RGB") for image in pixels], found.target.tolist()


def answer(names: Sequence[int]) -> str:
    """What is to be said of one or two digits."""
    counted = " ".join(DIGITS[: names[-1] + 1])
    return f"{' and '.join(DIGITS[name] for name in names)} because counting goes {counted}"


def make_rows(images: Sequence[Image.Image], targets: Sequence[int], n: int, seed: int) -> list[dict[str, Any]]:
    """Questions about one digit, or, every third one, about two; the right answer and a wrong one."""
    rng, rows = random.Random(seed), []
    for i in range(n):
        chosen = rng.sample(range(len(images)), 2 if i % 3 == 2 else 1)
        names = [targets[k] for k in chosen]
        wrong = [rng.choice([d for d in range(10) if d != name]) for name in names]
        rows.append(
            {
                "images": [images[k] for k in chosen],
                "prompt": [{"role": "user", "content": rng.choice(TWO if len(names) == 2 else ONE)}],
                "chosen": [{"role": "assistant", "content": answer(names)}],
                "rejected": [{"role": "assistant", "content": answer(wrong)}],
                "name": names[0],
            }
        )
    return rows


def make_processor() -> Any:
    """A processor of 16 tokens per picture, and words for all else."""
    words = sorted({*" ".join([*ONE, *TWO, *map(answer, ([3], [3, 4]))]).split(), *DIGITS, "user", "assistant"})
    size = {"height": 32, "width": 32}
    return transformers.LlavaProcessor(
        transformers.LlavaImageProcessorPil(size=size, crop_size=size),
        make_tokenizer(words, special=["<pad>", IMAGE, START, "<eos>", "<unk>"]),
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )


def make_model(tokenizer: Any) -> Any:
    """A LLaVA of about 0.6 million weights, from scratch."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llava",
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": 96,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 32,
            "patch_size": 8,
            "initializer_factor": 2.0,
        },
        text_config={
            **decoder("llama", 96, 256, 3, 4, 2, len(tokenizer), tied=False),
            "initializer_range": 0.1,
            "pad_token_id": tokenizer.pad_token_id,
        },
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        image_seq_length=16,
        vision_feature_layer=-1,
    )
    return AutoModelForImageTextToText.from_config(config)


def accuracy(model: Any, processor: Any, rows: Sequence[dict[str, Any]]) -> float:
    """Share of rows with one picture in which the model's first word is the digit's name."""
    rows = [row for row in rows if len(row["images"]) == 1]
    text = [f"{START} user {IMAGE} {row['prompt'][0]['content']} <eos> {START} assistant " for row in rows]
    images = [row["images"] for row in rows]
    inputs = processor(images=images, text=text, padding=True, padding_side="left", return_tensors="pt")
    model.eval()
    with torch.no_grad():
        said = model(**inputs).logits[:, -1].argmax(-1)
    names = processor.tokenizer.convert_tokens_to_ids([DIGITS[row["name"]] for row in rows])
    return float((said == torch.tensor(names)).float().mean())


def names_right(completions: list[Any], name: list[int], **kwargs: Any) -> list[float]:
    """The reward of answers: whether they begin with the digit's name."""
    said = [completion[0]["content"].split()[:1] for completion in completions]
    return [float(word == [DIGITS[right]]) for word, right in zip(said, name, strict=True)]


def make_trainer(task: str, layout: str, model: Any, processor: Any, rows: Sequence[dict[str, Any]], steps: int) -> Any:
    """TRL's trainer, or ours."""
    options: dict[str, Any] = {
        **ON_CPU,
        "max_steps": steps,
        "per_device_train_batch_size": BATCH_SIZE,
        "learning_rate": 1e-3 if task == "sft" else 1e-4,
        "warmup_steps": 20,
        "gradient_checkpointing": False,
        **({"num_generations": GROUP_SIZE, "max_completion_length": 16} if task == "grpo" else {"max_length": None}),
        **({} if layout == "padded" else {"prefix_sharing": layout == "shared"}),
    }
    columns = {"sft": ("chosen",), "dpo": ("chosen", "rejected"), "grpo": ("name",)}[task]
    data = Dataset.from_list([{name: row[name] for name in ("images", "prompt", *columns)} for row in rows])
    data = data.rename_column("chosen", "completion") if task == "sft" else data
    more: dict[str, Any] = {"dpo": {"ref_model": copy.deepcopy(model)}, "grpo": {"reward_funcs": names_right}}.get(
        task, {}
    )
    classes = classes_of(task, ours=layout != "padded")
    return side_by_side.make_trainer(
        *classes, options, model=model, train_dataset=data, processing_class=processor, **more
    )


def generated(trainer: Any, batch: Any) -> Any:
    """What the update of a step computes: GRPO's batches are prompts, whose completions are made before."""
    return trainer._prepare_inputs(batch) if isinstance(batch, list) else batch


def update(trainer: Any, inputs: Any) -> None:
    """The forward and backward pass of a step, without generation."""
    if "completion_ids" in inputs:
        trainer._prepare_inputs = lambda _: inputs
    trainer.training_step(trainer.model, inputs, None)


def count_step_flops(trainer: Any) -> dict[str, float]:
    """Operations per example of a few updates: of the vision tower with its projector, and of all else."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    batches = [batch for batch, _ in zip(trainer.get_train_dataloader(), range(COUNTED_STEPS), strict=False)]
    batches = [generated(trainer, batch) for batch in batches]
    counter = flop_counter()
    with counter:
        for batch in batches:
            update(trainer, batch)
    counts = {name: sum(each.values()) for name, each in counter.get_flop_counts().items()}
    tower = sum(count for name, count in counts.items() if name.endswith((".vision_tower", ".multi_modal_projector")))
    examples = COUNTED_STEPS * BATCH_SIZE
    return {"tower_gflop": tower / examples / 1e9, "text_gflop": (counts["Global"] - tower) / examples / 1e9}


def time_steps(task: str, start: Any, processor: Any, rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """
    Examples per second over those of padded TRL: each batch is collated and computed by every layout in turn. Batches
    of GRPO are generated once, by padded TRL, and computed by all.
    """
    trainers = {
        layout: make_trainer(task, layout, copy.deepcopy(start), processor, rows, 1) for layout in LAYOUTS[task]
    }
    batches = {layout: iter(trainer.get_train_dataloader()) for layout, trainer in trainers.items()}
    ratios: dict[str, list[float]] = {layout: [] for layout in trainers}
    for step in range(WARM_UP_STEPS + TIMED_STEPS):
        seconds: dict[str, float] = {}
        given = next(batches["padded"]) if task == "grpo" else None
        for layout, trainer in trainers.items():
            trainer.model.train()
            trainer.current_gradient_accumulation_steps = 1
            given = given if given is None or layout != "padded" else type(trainer)._prepare_inputs(trainer, given)
            started = time.perf_counter()
            update(trainer, next(batches[layout]) if given is None else given)
            seconds[layout] = time.perf_counter() - started
            trainer.model.zero_grad()
        if step >= WARM_UP_STEPS:
            for layout, each in ratios.items():
                each.append(seconds["padded"] / seconds[layout])
    return {layout: spread(each) for layout, each in ratios.items()}


def learn(
    task: str, start: Any, processor: Any, rows: Any, test_rows: Any, layout: str, steps: int
) -> tuple[dict[str, Any], Any]:
    """Train one way: what it took and where it ended, and the model."""
    counted = make_trainer(task, layout, copy.deepcopy(start), processor, rows, steps)
    flops = count_step_flops(counted)
    trainer = make_trainer(task, layout, copy.deepcopy(start), processor, rows, steps)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    found = {
        "task": task,
        "layout": layout,
        **flops,
        "losses": losses,
        "accuracy_before": accuracy(start, processor, test_rows),
        "accuracy": accuracy(trainer.model, processor, test_rows),
    }
    return found, trainer.model


def measure() -> dict[str, Any]:
    """SFT, DPO and GRPO one after another, each padded, flat, and with shared prefixes, from the same weights."""
    images, targets = digits()
    split = len(images) * 4 // 5
    rows = make_rows(images[:split], targets[:split], 2048, seed=0)
    test_rows = make_rows(images[split:], targets[split:], 300, seed=1)
    processor = make_processor()
    start, results = make_model(processor.tokenizer), []
    processor.tokenizer.padding_side = "left"  # as TRL loads it for GRPO; others set it themselves
    for task in LAYOUTS:
        after, speed_up = start, time_steps(task, start, processor, rows)
        for layout in LAYOUTS[task]:
            found, model = learn(task, start, processor, rows, test_rows, layout, STEPS[task])
            results.append({**found, "speed_up": speed_up[layout]})
            after = model if layout == "padded" else after
            print(f"{task}, {layout}: {speed_up[layout]['median']:.2f}x, accuracy {found['accuracy']:.1%}")
        start = after
    return {"measured": results}


def report(result: dict[str, Any]) -> str:
    """The figures as a Markdown table."""
    results = result["measured"]
    lines = [
        "# Pictures: a model learns to read digits",
        "",
        "A LLaVA of 0.6 million weights learns scikit-learn's handwritten digits from scratch. It answers questions "
        f"about one or two pictures, {BATCH_SIZE} examples per step, in float32, first with SFT, then with DPO against "
        f"wrong digits, then with GRPO in groups of {GROUP_SIZE} sampled answers of at most 16 tokens, on "
        f"{machine_name(result['environment'])}. The speed-up and the operations of GRPO are those of updates, without "
        "generation.",
        "",
        "- **speed-up**: the examples per second over those of padded TRL. Each is a median of "
        f"{TIMED_STEPS} steps that are collated and computed in turn (20 to 80 %).",
        "- **digits read**: the share of 200 questions about other pictures that the model answers, before and after.",
        "- **largest difference**: the largest difference of a step's loss from that of padded TRL, after the same "
        "number of steps. That of GRPO, with one update per batch, shows only that the same answers are sampled.",
        "- **tower, text**: the floating-point operations of a training step per example, counted by PyTorch: those of "
        "the vision tower with its projector, and all others.",
        "",
    ]
    rows = []
    padded = {one["task"]: one for one in results if one["layout"] == "padded"}
    for one in results:
        trl = padded[one["task"]]
        difference = max(abs(a - b) for a, b in zip(one["losses"], trl["losses"], strict=True))
        cells = [
            one["task"].upper(),
            {"padded": "TRL, padded", "flat": "flat", "shared": "flat, shared prefixes"}[one["layout"]],
            "{median:.2f}x ({p20:.2f} to {p80:.2f})".format(**one["speed_up"]),
            f"{one['accuracy_before']:.1%} → {one['accuracy']:.1%}",
            f"{one['losses'][0]:.4f} → {one['losses'][-1]:.4f}",
            "" if one is trl else f"{difference:.0e}",
            *(f"{one[name]:.3f} GFLOP ({one[name] / trl[name]:.2f}x)" for name in ("tower_gflop", "text_gflop")),
        ]
        rows.append(cells)
    figures = "speed-up", "digits read", "first and last loss", "largest difference", "tower", "text"
    return "\n".join([*lines, *table(["task", "layout", *figures], rows, left=2)])
