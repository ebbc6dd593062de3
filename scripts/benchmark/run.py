"""One benchmark: build the trainers once, and measure them on one set of rows after another."""

import gc
import shlex
import statistics
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from accelerate.utils.memory import clear_device_cache
from transformers.utils import logging

from trl_paddingfree.core.model.routes import describe

from .baseline import WITHOUT_PADDING, baseline_attention, describe_attention
from .differences import differences
from .environment import environment, provenance
from .flops import StepCost, Work
from .measure import Runner, Step, interleave, matmul_rate
from .rows import Rows
from .tasks import BASELINE, PACKED, Method, Settings
from .trainers import make_model, make_trainer

logger = logging.get_logger(__name__)

# Largest relative differences of two methods' figures. Means over the scored tokens of a batch average rounding out
# (a token's log-probability is off by about eps, 1.2e-7 or 4e-3, and up as often as down), while the context of
# another row, even under random weights, moves a token by about a nat and the mean over a thousand tokens by some 3e-3.
# The DPO loss is the small difference of large sums, and gradients do not average: they are compared loosely.
TOLERANCES = {
    "float32": {"logps/chosen": 1e-4, "logps/rejected": 1e-4, "entropy": 1e-4, "loss": 1e-3, "grad_norm": 1e-3},
    "bfloat16": {"logps/chosen": 1e-3, "logps/rejected": 1e-3, "entropy": 1e-3, "loss": 5e-2, "grad_norm": 5e-2},
}
# Differences are relative to the expected value, or to this if it is smaller
SMALL = 1e-6
# How far counted operations may be from the sum of cost times work. Not all are linear in the work: in padded batches,
# rotary embeddings are computed once for all rows
COUNT_TOLERANCE = 1e-3
# Batches among which the typical ones are found
SAMPLE = 200


def tolerances(settings: Settings) -> dict[str, float]:
    """Largest relative difference of each figure that is compared."""
    allowed = TOLERANCES[settings.dtype]
    return {**allowed, "loss": allowed["entropy"]} if settings.benchmarked.averages_loss else allowed


class Benchmark:
    """
    Trainers of several methods, with the same initial weights.

    Args:
        settings ([`Settings`]):
            What all methods have in common.
        methods (`Sequence[str]`, *optional*):
            Names of methods. Defaults to all of the task that need not be named.
    """

    def __init__(self, settings: Settings, methods: Sequence[str] | None = None):
        self.settings = settings
        self.attention = baseline_attention(settings.device, settings.torch_dtype)
        self.failed: dict[str, str] = {}  # the methods that cannot train, and why
        self.runners: list[Runner] = []
        chosen = self._chosen(methods)
        base = make_model(settings.model, settings.torch_dtype, settings.device)
        self.vocab_size = base.get_input_embeddings().weight.size(0)
        unpadded = self.attention in WITHOUT_PADDING
        for method in chosen:
            with noting_failure(method, self.failed):
                trainer = make_trainer(method, base, settings, self.attention)
                self.runners.append(Runner(method, trainer, settings, unpadded))
        ours = [runner for runner in self.runners if runner.method.ours and not runner.method.keeps]
        if not ours:
            raise RuntimeError(f"Neither 'flat' nor 'shared' can train: {self.failed}.")
        self.cost, self.model_cost = ours[-1].cost(), ours[-1].cost(recompute=False)
        kept = [runner for runner in self.runners if runner.method.keeps]
        # Those of TRL's methods are not counted, see `Runner.cost`
        self.kept_costs = {r.method.name: r.cost() if r.method.ours else self.model_cost for r in kept}
        self.rate = matmul_rate(settings.device, settings.torch_dtype)

    def _chosen(self, names: Sequence[str] | None) -> list[Method]:
        """The methods of these names, in the task's order."""
        methods = self.settings.benchmarked.methods
        chosen = [method for method in methods if (method.name in names if names else not method.is_asked_for)]
        if chosen[0].name != BASELINE or not any(method.ours and not method.keeps for method in chosen):
            raise ValueError(f"`methods={names}` must name {BASELINE!r} and one of ours, 'flat' or 'shared'.")
        return chosen

    def cost_of(self, name: str) -> StepCost:
        """The cost of a method's step."""
        return self.kept_costs.get(name, self.cost)

    def describe(self, command: Sequence[str]) -> dict[str, Any]:
        """What the results of this benchmark have in common."""
        route = next(runner for runner in self.runners if runner.method.ours).trainer.runtime.route
        return {
            "command": shlex.join(command),
            **provenance(),
            "environment": environment(),
            "settings": asdict(self.settings),
            "attention": {
                "trl": describe_attention(self.attention),
                "ours": describe(route.backend, route.loaded_with),
            },
            "matmul_flops_per_second": self.rate,
            "bytes_of_state": {runner.method.name: runner.bytes_of_state() for runner in self.runners},
        }

    def batches(self, rows: Rows) -> list[list[dict[str, Any]]]:
        """A sample of the batches that the rows make."""
        every = rows.batches(self.settings.batch_size, seed=0)[:SAMPLE]
        if not every:
            raise ValueError(
                f"{rows.name} has {len(rows.examples)} examples: one batch needs {self.settings.batch_size}."
            )
        return every

    def run(self, rows: Rows, num_batches: int, rounds: int) -> dict[str, Any]:
        """Measure all methods on so many batches of some rows, in so many rounds."""
        every = self.batches(rows)
        batches = self._typical(every, num_batches)
        every_runner, failed = self.runners, dict(self.failed)
        if self.settings.on_accelerator:
            for runner in every_runner:
                with noting_failure(runner.method, failed):
                    runner.try_out(runner.arrange(batches))
            self.runners = [runner for runner in every_runner if runner.method.label not in failed]
        measured = self._measure(every, batches, rounds)
        self.runners = every_runner
        return {"rows": rows.name, **measured, "failed": failed}

    def _measure(self, every: list[Any], batches: list[Any], rounds: int) -> dict[str, Any]:
        """What [`Benchmark.run`] gives, of the methods that can train."""
        same, operators, syncs = self._same_batches(), dict[str, list[str]](), dict[str, int]()
        for runner in same:
            self._check_count(runner, batches[0][:2])
            if self.settings.on_accelerator:
                operators[runner.method.name] = runner.attention_operators(batches[0][:2])
            if self.settings.device == "cuda":
                syncs[runner.method.name] = runner.syncs(batches[0])
        packed = self._packed_difference(batches)
        if self.settings.on_accelerator:
            interleave(self.runners, batches, rounds=1)  # the first one is not timed
        gc.collect()
        steps = interleave(self.runners, batches, rounds)
        allowed = tolerances(self.settings)
        found = {runner.method.name: self._differences(steps, runner.method.name) for runner in same[1:]}
        within = all(off <= allowed[name] for largest in found.values() for name, off in largest.items())
        trees = self._tree_batches(batches)
        limit, causal = total(map(Work.limit, trees)), total(Work.limit(tree, causal=True) for tree in trees)
        work = {name: total(step.work for step in taken[0]) for name, taken in steps.items()}
        flops = {name: self.cost_of(name).of(computed) for name, computed in work.items()}
        return {
            "batches": len(batches),
            "rounds": rounds,
            "agree": all(found.values()) and within and (packed or 0) <= allowed["loss"],
            "allowed": allowed,
            "differences": found,
            "packing_difference": packed,
            "methods": {
                name: {
                    "label": label,
                    "loss": statistics.mean(step.figures["loss"] for turn in steps[name] for step in turn),
                    "tokens_over_limit": work[name].tokens / limit.tokens,
                    "flops": flops[name],
                    "flops_over_limit": flops[name] / self.cost.of(limit),
                    **self._speed(steps, name, trees, causal),
                    "syncs_per_pass": syncs.get(name),
                    "attention_operators": operators.get(name, []),
                }
                for name, label in ((runner.method.name, runner.method.label) for runner in self.runners)
            },
            "all_batches": self._all_batches(every),
            "lengths": [[self.settings.benchmarked.length(row) for row in batch] for batch in batches],
            "profile": {},
        }

    def profile(self, rows: Rows) -> dict[str, Any]:
        """Where the time of a step of each method goes, on the most typical batch of some rows."""
        (batch,) = self._typical(self.batches(rows), 1)
        profiles = {runner.method.name: runner.profile(batch) for runner in self._same_batches()}
        return {name: found for name, found in profiles.items() if found}

    def _same_batches(self) -> list[Runner]:
        """The methods that train on the batches as they are."""
        return [runner for runner in self.runners if runner.method.options != PACKED]

    def _speed(self, steps: dict[str, list[list[Step]]], name: str, trees: list[Any], causal: Work) -> dict[str, Any]:
        """Times, and what the method makes of them: examples and tokens per second, useful MFU."""
        figures = speed(steps[BASELINE], steps[name])
        seconds = figures["seconds_per_round"]
        return {
            **figures,
            "examples_per_second": len(trees) * self.settings.batch_size / seconds,
            "tokens_per_second": sum(tree.counts.real for tree in trees) / seconds,
            "useful_mfu": self.model_cost.of(causal) / seconds / self.rate,
        }

    def _differences(self, steps: dict[str, list[list[Step]]], name: str) -> dict[str, float]:
        """How far the compared figures of a method are from the baseline's, at most."""
        padded, ours = ([step.figures for turn in steps[method] for step in turn] for method in (BASELINE, name))
        found = differences(padded, ours, floor=SMALL)
        return {name: found[name] for name in tolerances(self.settings) if name in found}

    def _packed_difference(self, batches: list[Any]) -> float | None:
        """How much the loss of the packed rows differs from that of the same rows padded, relatively."""
        packing = [runner for runner in self.runners if runner.method.options == PACKED]
        if not packing:
            return None
        model = self.runners[0].trainer.model_wrapped  # packed steps are others, and lead to other weights
        padded = self.runners[0].mean_loss(batches, model)
        return abs(packing[0].mean_loss(packing[0].arrange(batches), model) - padded) / abs(padded)

    def _check_count(self, runner: Runner, examples: list[dict[str, Any]]) -> None:
        """Warn if a step has other operations than the cost per unit says."""
        work, flops = runner.count(examples)
        expected = self.cost_of(runner.method.name).of(work)
        if abs(off := expected / flops - 1) > COUNT_TOLERANCE:
            logger.warning(f"{runner.method.name}: {flops} operations counted, {expected:.0f} expected ({off:+.1%}).")

    def _tree_batches(self, batches: list[Any]) -> list[Any]:
        """Flat batches with shared prefixes."""
        collator = [runner for runner in self.runners if runner.method.ours][-1].trainer.data_collator
        sharing = replace(collator, prefix_sharing=True)
        return [sharing(batch)["flat_batch"] for batch in batches]

    def _typical(self, batches: list[Any], number: int) -> list[Any]:
        """The batches in which padded TRL computes most nearly as many times the limit as in all batches together."""
        padded = self.runners[0]
        spent = [self.cost.of(padded.work(padded.collate(batch))) for batch in batches]
        needed = [self.cost.of(Work.limit(tree)) for tree in self._tree_batches(batches)]
        overall = sum(spent) / sum(needed)
        order = sorted(range(len(batches)), key=lambda i: abs(spent[i] / needed[i] - overall))
        typical = [batches[i] for i in sorted(order[:number])]
        given = self.settings.precomputed_reference
        return [self.runners[-1].reference(batch) for batch in typical] if given else typical

    def _all_batches(self, batches: list[Any]) -> dict[str, Any]:
        """Work of every batch of the rows, measured or not: how typical are the measured ones?"""
        work = {
            runner.method.name: total(runner.work(runner.collate(batch)) for batch in batches)
            for runner in self._same_batches()
        }
        limit = self.cost.of(total(map(Work.limit, self._tree_batches(batches))))
        over_limit = {name: self.cost_of(name).of(computed) / limit for name, computed in work.items()}
        return {"batches": len(batches), "flops_over_limit": over_limit}

    def release(self) -> None:
        """Give the memory of the models back."""
        self.runners.clear()
        clear_device_cache(garbage_collection=True)


@contextmanager
def noting_failure(method: Method, failed: dict[str, str]) -> Iterator[None]:
    """Within this context, an error ends the measurement of one method only, unless it is the baseline."""
    try:
        yield
    except Exception as error:
        if method.name == BASELINE:
            raise
        traceback.print_exc()
        failed[method.label] = f"{type(error).__name__}: {error}"
    clear_device_cache(garbage_collection=True)


def total(work: Iterable[Work]) -> Work:
    """All work together."""
    return sum(work, Work(0, 0, 0))


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, and the values that a fifth of all lie below and above."""
    low, middle, high = np.quantile(values, (0.2, 0.5, 0.8)).tolist()
    return {"median": middle, "p20": low, "p80": high}


def speed(base: list[list[Step]], mine: list[list[Step]]) -> dict[str, Any]:
    """Times of one method, and ratios to the baseline."""
    if len(mine[0]) == len(base[0]):  # the same batches: compare each with its own
        ratios = [b.total / m.total for ms, bs in zip(mine, base, strict=True) for m, b in zip(ms, bs, strict=True)]
    else:
        ratios = [sum(b.total for b in bs) / sum(m.total for m in ms) for ms, bs in zip(mine, base, strict=True)]
    seconds = median_round(mine, lambda step: step.total)
    parts = {part: median_round(mine, lambda step: step.seconds[part]) for part in mine[0][0].seconds}  # noqa: B023
    return {
        "parts": parts,
        "seconds_per_round": seconds,
        "speedup": median_round(base, lambda step: step.total) / seconds,
        "speedup_spread": spread(ratios),
        "core_speedup": median_round(base, lambda s: s.core_seconds) / median_round(mine, lambda s: s.core_seconds),
        "bytes_above": max(step.bytes_above for turn in mine for step in turn),
    }


def median_round(steps: list[list[Step]], value: Callable[[Step], float]) -> float:
    """The sum over the steps of a round, where each step has its median over the rounds."""
    return sum(statistics.median(value(turn[i]) for turn in steps) for i in range(len(steps[0])))
