"""One benchmark: build the trainers once, and measure them on one set of rows after another."""

import gc
import shlex
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from transformers.utils import logging

from ..model.backends import describe
from ..model.state_layers import carries_state
from .baseline import UNPADDED, baseline_attention, describe_attention
from .environment import environment, provenance
from .flops import StepCost, Work, matmul_rate
from .measure import Comparison, Runner, Step, interleave, tolerances
from .methods import Settings, make_trainer
from .profile import profile_step
from .rows import Rows
from .shapes import make_model
from .tasks import BASELINE, PACKED

logger = logging.get_logger(__name__)

# The counted operations of a step may differ from what the cost per unit says by what is no linear function of the
# work: rotary embeddings are computed once per position in padded batches
COUNT_TOLERANCE = 1e-3
# Batches among which the typical ones are found
SAMPLE = 200
MATMUL_SIZES = {"cpu": (512, 1024, 2048), "cuda": (4096, 8192)}


class Benchmark:
    """
    Trainers of several methods, with the same initial weights.

    Args:
        settings ([`Settings`]):
            What all methods have in common.
        methods (`Sequence[str]`, *optional*):
            Names of methods. Defaults to all of the task.
        attention (`str`, *optional*):
            Attention implementation of TRL's own methods. Defaults to the fastest on this machine.
    """

    def __init__(self, settings: Settings, methods: Sequence[str] | None = None, attention: str | None = None):
        self.settings = settings
        self.attention = attention or baseline_attention(settings.device, settings.torch_dtype)
        base = make_model(
            settings.model, settings.torch_dtype, settings.device, settings.seed, settings.tuning == "qlora"
        )
        self.vocab_size = base.get_input_embeddings().weight.size(0)
        chosen = [method for method in settings.benchmarked.methods if methods is None or method.name in methods]
        unpadded = self.attention in (UNPADDED, "flash_attention_2")
        self.runners = []
        for method in chosen:
            trainer = make_trainer(method, base, settings, self.attention)
            self.runners.append(Runner(method, trainer, settings, unpadded))
        ours = [runner for runner in self.runners if runner.method.ours and not runner.method.keeps]
        if not ours or self.runners[0].method.name != BASELINE:
            raise ValueError(f"`methods={methods}` must name {BASELINE!r} and one of ours, 'flat' or 'shared'.")
        self.cost, self.model_cost = ours[-1].cost(), ours[-1].cost(recompute=False)
        kept = [runner for runner in self.runners if runner.method.keeps]
        # TRL's own methods cannot be asked, see `Runner.cost`
        self.kept_costs = {r.method.name: r.cost() if r.method.ours else self.model_cost for r in kept}
        self.rate = matmul_rate(settings.device, settings.torch_dtype, MATMUL_SIZES[settings.device])

    def cost_of(self, name: str) -> StepCost:
        """The cost of a method's step."""
        return self.kept_costs.get(name, self.cost)

    def describe(self, command: Sequence[str]) -> dict[str, Any]:
        """What the results of this benchmark have in common."""
        route = next(runner for runner in self.runners if runner.method.ours).trainer.flat.route
        return {
            "command": shlex.join(command),
            **provenance(),
            "environment": environment(self.settings.device),
            "settings": asdict(self.settings),
            "attention": {"trl": describe_attention(self.attention), "ours": describe(route.backend, route.previous)},
            "matmul_flops_per_second": self.rate,
            "cost": {"counted": asdict(self.cost), "model": asdict(self.model_cost)},
            "bytes_of_state": {runner.method.name: runner.bytes_of_state() for runner in self.runners},
        }

    def run(self, rows: Rows, num_batches: int, rounds: int, warmup: int = 0, profile: bool = False) -> dict[str, Any]:
        """
        Measure all methods on some rows.

        Args:
            rows ([`Rows`]):
                The rows.
            num_batches (`int`):
                Number of different batches.
            rounds (`int`):
                Times to train on each batch.
            warmup (`int`, *optional*, defaults to `0`):
                Rounds before those that count.
            profile (`bool`, *optional*, defaults to `False`):
                Whether to profile one more step of each method afterwards.
        """
        every = rows.batches(self.settings.batch_size, self.settings.seed)[:SAMPLE]
        if not every:
            raise ValueError(
                f"{rows.name} has {len(rows.examples)} examples: one batch needs {self.settings.batch_size}."
            )
        batches = self._typical(every, num_batches)
        if self.settings.precomputed_reference:
            batches = [self.runners[-1].reference(batch) for batch in batches]
        every_runner, self.runners = self.runners, [runner for runner in self.runners if runner.fits(batches)]
        try:
            measured = self._measure(rows, every, batches, rounds, warmup, profile)
        finally:
            fitting, self.runners = self.runners, every_runner
        return {**measured, "do_not_fit": [runner.method.label for runner in every_runner if runner not in fitting]}

    def _measure(
        self, rows: Rows, every: list[Any], batches: list[Any], rounds: int, warmup: int, profile: bool
    ) -> dict[str, Any]:
        """What [`Benchmark.run`] gives, of the methods whose activations fit."""
        counted = {runner.method.name: runner.count(batches[0][:2]) for runner in self._same_batches()}
        syncs = {}
        if self.settings.device == "cuda":
            syncs = {runner.method.name: runner.syncs(batches[0]) for runner in self._same_batches()}
        packed = self._packed_difference(batches)
        interleave(self.runners, batches, warmup)
        gc.collect()
        steps = interleave(self.runners, batches, rounds)
        comparisons = self._compare(steps)
        allowed = tolerances(self.settings)
        agree = all(comparison.agrees for comparison in comparisons.values()) and (packed or 0) <= allowed["loss"]
        limit, causal = self._limits(batches)
        return {
            "rows": rows.name,
            "batches": len(batches),
            "rounds": rounds,
            "agree": agree,
            "allowed": allowed,
            "differences": {name: comparison.largest for name, comparison in comparisons.items()},
            "packing_difference": packed,
            "losses": {
                name: [step.figures["loss"] for turn in taken for step in turn] for name, taken in steps.items()
            },
            "limit": {"tokens": limit.tokens, "flops": self.cost.of(limit), "useful_flops": self.model_cost.of(causal)},
            "methods": {
                runner.method.name: {
                    "label": runner.method.label,
                    "loss": mean_loss(steps[runner.method.name]),
                    **counts(steps[runner.method.name][0], self.cost_of(runner.method.name), self.cost, limit),
                    **(self._speed(steps, runner.method.name, batches, causal) if agree else {}),
                    **self._check_count(runner.method.name, counted),
                    "syncs_per_pass": syncs.get(runner.method.name),
                }
                for runner in self.runners
            },
            "all_batches": self._all_batches(every),
            "lengths": [[self.settings.benchmarked.length(row) for row in batch] for batch in batches],
            "profile": self._profile(batches[0]) if profile else {},
        }

    def _profile(self, batch: Any) -> dict[str, Any]:
        """Where the time of each method's step goes."""
        profiles = {runner.method.name: profile_step(runner, batch) for runner in self._same_batches()}
        return {name: found for name, found in profiles.items() if found}

    def _same_batches(self) -> list[Runner]:
        """The methods that train on the batches as they are."""
        return [runner for runner in self.runners if runner.method.options != PACKED]

    def _speed(self, steps: dict[str, list[list[Step]]], name: str, batches: list[Any], causal: Work) -> dict[str, Any]:
        """Times, and what the method makes of them: examples and tokens per second, useful MFU."""
        figures = speed(steps[BASELINE], steps[name])
        seconds, examples = figures["seconds_per_round"], len(batches) * self.settings.batch_size
        tokens = sum(tree.counts.real for tree in self._tree_batches(batches))
        return {
            **figures,
            "examples_per_second": examples / seconds,
            "tokens_per_second": tokens / seconds,
            "useful_mfu": self.model_cost.of(causal) / seconds / self.rate,
        }

    def _compare(self, steps: dict[str, list[list[Step]]]) -> dict[str, Comparison]:
        """Compare every step of every method with the baseline's."""
        comparisons = {}
        for runner in self._same_batches()[1:]:
            comparisons[runner.method.name] = comparison = Comparison(tolerances(self.settings))
            for expected, actual in zip(steps[BASELINE], steps[runner.method.name], strict=True):
                for ours, theirs in zip(expected, actual, strict=True):
                    comparison.add(ours.figures, theirs.figures)
        return comparisons

    def _packed_difference(self, batches: list[Any]) -> float | None:
        """How much the loss of the packed rows differs from that of the same rows padded, relatively."""
        packing = [runner for runner in self.runners if runner.method.options == PACKED]
        if not packing:
            return None
        model = self.runners[0].trainer.model_wrapped  # packed steps are others, and lead to other weights
        padded = self.runners[0].mean_loss(batches, model)
        return abs(packing[0].mean_loss(packing[0].arrange(batches), model) - padded) / abs(padded)

    def _check_count(self, name: str, counted: dict[str, tuple[Work, int]]) -> dict[str, Any]:
        """Counted operations of the first two examples, checked against what the cost per unit says they are."""
        if name not in counted:
            return {}
        work, flops = counted[name]
        expected = self.cost_of(name).of(work)
        off = expected / flops - 1
        if abs(off) > COUNT_TOLERANCE:
            logger.warning(f"{name}: {flops} operations counted, {expected:.0f} expected ({off:+.1%}).")
        return {"counted_of_two_examples": flops, "expected_over_counted": 1 + off}

    def _tree_batches(self, batches: list[Any]) -> list[Any]:
        """Flat batches with shared prefixes."""
        collator = [runner for runner in self.runners if runner.method.ours][-1].trainer.data_collator
        sharing = replace(collator, prefix_sharing=True)
        return [sharing(batch)["flat_batch"] for batch in batches]

    def _limits(self, batches: list[Any]) -> tuple[Work, Work]:
        """The least work for the batches: with whole rectangles of query-key pairs, and with causal pairs only."""
        trees = self._tree_batches(batches)
        return total(map(self._limit, trees)), total(self._limit(tree, causal=True) for tree in trees)

    def _limit(self, tree: Any, causal: bool = False) -> Work:
        """The least work for one batch: a state could be passed on where rows part, so no layer repeats a prefix."""
        work = Work.limit(tree, causal)
        return replace(work, in_rows=work.tokens if carries_state(self.runners[0].base) else 0)

    def _typical(self, batches: list[Any], number: int) -> list[Any]:
        """The batches in which padded TRL computes most nearly as many times the limit as in all batches together."""
        padded = self.runners[0]
        spent = [self.cost.of(padded.work(padded.trainer.data_collator(batch))) for batch in batches]
        needed = [self.cost.of(self._limit(tree)) for tree in self._tree_batches(batches)]
        overall = sum(spent) / sum(needed)
        order = sorted(range(len(batches)), key=lambda i: abs(spent[i] / needed[i] - overall))
        return [batches[i] for i in sorted(order[:number])]

    def _all_batches(self, batches: list[Any]) -> dict[str, Any]:
        """Work of every batch of the rows, measured or not: how typical are the measured ones?"""
        work = {
            runner.method.name: total(runner.work(runner.trainer.data_collator(batch)) for batch in batches)
            for runner in self._same_batches()
        }
        limit, _ = self._limits(batches)
        return {
            "batches": len(batches),
            "tokens_over_limit": {name: w.tokens / limit.tokens for name, w in work.items()},
            "flops_over_limit": {n: self.cost_of(n).of(w) / self.cost.of(limit) for n, w in work.items()},
        }


def total(work: Iterable[Work]) -> Work:
    """All work together."""
    return sum(work, Work(0, 0, 0))


def counts(steps: list[Step], cost: StepCost, cost_of_limit: StepCost, limit: Work) -> dict[str, Any]:
    """What one round computes, and against the least possible with recomputation."""
    work = total(step.work for step in steps)
    return {
        "tokens": work.tokens,
        "tokens_over_limit": work.tokens / limit.tokens,
        "flops": cost.of(work),
        "flops_over_limit": cost.of(work) / cost_of_limit.of(limit),
    }


def mean_loss(steps: list[list[Step]]) -> float:
    """Mean loss of all steps."""
    return statistics.mean(step.figures["loss"] for turn in steps for step in turn)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, and the values that a fifth of all lie below and above."""
    low, middle, high = np.quantile(values, (0.2, 0.5, 0.8)).tolist()
    return {"median": middle, "p20": low, "p80": high}


def speed(base: list[list[Step]], mine: list[list[Step]]) -> dict[str, Any]:
    """Times of one method, and ratios to the baseline."""
    rounds = [sum(step.total for step in turn) for turn in mine]
    if len(mine[0]) == len(base[0]):  # the same batches: compare each with its own
        ratios = [b.total / m.total for ms, bs in zip(mine, base, strict=True) for m, b in zip(ms, bs, strict=True)]
    else:
        ratios = [sum(b.total for b in bs) / total for bs, total in zip(base, rounds, strict=True)]
    seconds = median_round(mine, lambda step: step.total)
    parts = {part: median_round(mine, lambda step: step.seconds[part]) for part in mine[0][0].seconds}  # noqa: B023
    return {
        "parts": parts,
        "seconds_per_round": seconds,
        "round_spread": spread(rounds),
        "speedup": median_round(base, lambda step: step.total) / seconds,
        "speedup_spread": spread(ratios),
        "core_speedup": median_round(base, lambda s: s.core_seconds) / median_round(mine, lambda s: s.core_seconds),
        "bytes_above": max(step.bytes_above for turn in mine for step in turn),
    }


def median_round(steps: list[list[Step]], value: Callable[[Step], float]) -> float:
    """The sum over the steps of a round, where each step has its median over the rounds."""
    return sum(statistics.median(value(turn[i]) for turn in steps) for i in range(len(steps[0])))


def release(benchmark: Benchmark) -> None:
    """Give the memory of a benchmark's models back."""
    benchmark.runners.clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
