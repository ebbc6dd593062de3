"""The start-up check as trainers run it: which models, when, and on all processes alike."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias
from zlib import crc32

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import gather
from transformers import PreTrainedModel, TrainingArguments
from transformers.utils import logging

from .. import upstream
from ..check.again import Variation, prove_again
from ..check.probe import compute_dtype, rounding_unit
from ..check.progress import say_details, shown
from ..check.prove import CheckResult, UnprovenModelError, prove
from ..check.training import OthersWaitError, raise_if_weights_are_awaited
from ..check.verdicts import NoVerdicts, Record, Verdicts
from ..model.flat_model import ATTRIBUTE, FlatModel
from ..model.forward import is_pooled
from ..model.mixers import mixers
from ..model.routes import Route, choose_route, routes_to_try, why_not_to_share
from .configs import PaddingFreeOptions
from .engine import base_of, zero_stage

logger = logging.get_logger(__name__)

Models: TypeAlias = Sequence[torch.nn.Module]  # the trained one first, wrapped or not

# Gathered in place of a verdict, 0 or 1, from a process whose check has raised an error
_ERROR = -1


class _FailedElsewhereError(UnprovenModelError):
    """The check failed on another process."""


def sharing_together(
    prove_one: Callable[[torch.nn.Module, Route], CheckResult], models: Models, routes: Sequence[Route]
) -> list[CheckResult]:
    """Run `prove_one` on each model with its route, so that either all models share prefixes or none does."""
    results = list(map(prove_one, models, routes))
    if len({result.prefix_sharing for result in results}) > 1:
        results = list(map(prove_one, models, (route.without_sharing() for route in routes)))
    return results


class ExtraProof(Protocol):
    """What the start-up check proves beside text, such as images."""

    said: str  # what was tried, for the log; empty if nothing was

    def prove(self, check: "StartUpCheck", models: Models, results: list[CheckResult]) -> list[CheckResult]:
        """The `results` on text, one per model, with what this proof changes of them."""


@dataclass
class StartUpCheck:
    """
    Chooses and proves the routes of a trainer's models, given its `options`, `accelerator` (device, precision, engine)
    and `args` (whether training recomputes). `proofs` are what it proves beside text, and
    `earlier` verdicts are taken over.
    """

    accelerator: Accelerator
    options: PaddingFreeOptions
    args: TrainingArguments
    proofs: Sequence["ExtraProof"] = ()
    earlier: Verdicts = field(default_factory=NoVerdicts)
    trained: PreTrainedModel | None = None  # the only model that needs gradients
    # Models whose weights an engine has yet to place, including the trained one: each is proven when first called
    unproven: list[PreTrainedModel] = field(default_factory=list)

    def __post_init__(self):
        self.days: list[str] = []  # on which each model was checked; empty for this time

    def say(self, message: str) -> None:
        if self.accelerator.is_main_process:
            logger.warning(message)

    def in_precision(self) -> AbstractContextManager:
        """The context in which a trainer calls its models: autocast, unless FSDP2 casts weights and inputs."""
        return nullcontext() if self.accelerator.is_fsdp2 else self.accelerator.autocast()

    def install(self, models: Models) -> list[FlatModel]:
        """
        Have `models`, the trained one first, compute flat batches: by proven routes or, if an engine has yet to place
        weights, by the routes of first choice.
        """
        bases = self._prepared(models)
        if all(map(self.can_call, models)):
            self.prove_all(models)
            return [flat_model for base in bases if (flat_model := FlatModel.of(base))]
        self.unproven = bases  # the engine shards and places them when training starts
        return [self.installed(base, self.first_route(base)) for base in bases]

    def install_unproven(self, models: Models) -> list[FlatModel]:
        """Have `models`, the trained one first, compute flat batches by the routes of first choice."""
        return [self.installed(base, self.first_route(base)) for base in self._prepared(models)]

    def _prepared(self, models: Models) -> list[PreTrainedModel]:
        """The transformers models under wrappers, the trained one first, with TRL's head."""
        bases = list(map(self.base_of, models))
        self.trained = bases[0]
        for base in bases:
            if (flat_model := FlatModel.of(base)) is not None and flat_model.padded is not None:
                flat_model.padded.remove()  # this trainer calls its models with flat batches
            if not is_pooled(base):
                upstream.put_head(base)
        return bases

    def installed(self, base: PreTrainedModel, route: Route) -> FlatModel:
        """A model that computes flat batches by a route, unproven yet."""
        self.begin(base, route)
        return FlatModel.install(base, route)

    def begin(self, base: PreTrainedModel, route: Route) -> None:
        """Begin to prove a model on a route: without what an earlier trainer may have added to its passes."""
        # Not by `FlatModel.of`: TRL may have added another head
        if (flat_model := vars(base).get(ATTRIBUTE)) is not None:
            flat_model.alone()

    def can_call(self, model: torch.nn.Module) -> bool:
        """Whether `model` has its weights. ZeRO-3 has prepared all models but the trained one by now."""
        base = self.base_of(model)
        if zero_stage(self.accelerator) == 3:
            return base is not self.trained
        return base.device.type == self.accelerator.device.type

    def first_route(self, base: PreTrainedModel) -> Route:
        """The route to try first."""
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.accelerator.mixed_precision)
        device = self.accelerator.device if base.device.type == "cpu" else base.device
        sharing = self.options.prefix_sharing
        return choose_route(base, self.options.flat_attention, prefix_sharing=sharing, dtype=dtype, device=device)

    def routes(self, base: PreTrainedModel, route: Route, fallback: bool) -> Sequence[Route]:
        """The routes to try, the given one first; with `fallback`, others that ask less of the model."""
        return routes_to_try(base, route, fallback=fallback)

    def prove_all(self, models: Models) -> Route:
        """Prove all models, and return the route of the first. If one cannot share prefixes, none does."""
        start = time.perf_counter()
        self.days.clear()
        with self.failing_together(models):
            results = self._results_of(models)
        seconds, said = time.perf_counter() - start, [proof.said for proof in self.proofs if proof.said]
        missing = dict.fromkeys(gap for result in results for gap in result.not_compared)
        found = ", ".join([f"exact on {results[0].tried}", *said])
        if missing:
            found += f", as far as it was compared: {'; '.join(missing)}"
        how = f"checked in {seconds:.1f} s"
        if all(self.days):
            how = f"remembered from {max(self.days)}; {self.earlier.hint}"
        self.say(f"Padding-free, {results[0].route}: {found} ({how}).")
        say_details(self.say, f"The start-up check: {results[0]}.")
        if description := mixers().describe(self.base_of(models[0])):
            self.say(description)
        return results[0].route

    def prove_again(self, models: Models, variation: Variation) -> None:
        """Prove that models which may compute batches in another way get the same results."""
        for model in models:
            base = self.base_of(model)
            flat_model = FlatModel.of(base)
            if flat_model is None or not variation.serves(flat_model):
                continue
            trains = base is self.trained
            skipped = self.why_no_gradients(model) if trains else "it does not train"
            with self.in_precision():
                key = self._key(base, model, flat_model.route, variation.name, skipped) if variation.lasts else ""
                record = self._recalled(key)
                if record is not None and record.verdict is not None:
                    result = record.verdict
                else:
                    with shown(f"{type(base).__name__}: {variation.name.lower()}", self._shows, steps=1):
                        result = prove_again(base, model, variation=variation, skipped=skipped, agree=self.all_agree)
                    self.earlier.keep(key, verdict=result)
            if trains:
                self.say(f"{variation.name}: {result.extent} ({result}).")

    def _results_of(self, models: Models) -> list[CheckResult]:
        """The results of the check, one per model: all with shared prefixes, or none."""
        bases = list(map(self.base_of, models))
        routes = list(map(self.first_route, bases))
        for base, route in zip(bases, routes, strict=True):
            reason = why_not_to_share(route.backend, route.loaded_with)
            if self.options.prefix_sharing and reason:
                self.say(f"{type(base).__name__} trains without shared prefixes: {reason}.")
        results = sharing_together(self.prove_one, models, routes)
        for proof in self.proofs:
            results = proof.prove(self, models, results)
        return results

    def prove_one(self, model: torch.nn.Module, route: Route) -> CheckResult:
        base = self.base_of(model)
        trains = base is self.trained
        self.begin(base, route)
        # As training will recompute activations, which it turns on only when it starts
        learns = any(parameter.requires_grad for parameter in base.parameters())
        wanted = self.args.gradient_checkpointing
        recomputes = learns and wanted and base.supports_gradient_checkpointing
        kwargs = vars(self.args)["gradient_checkpointing_kwargs"]
        routes = self.routes(base, route, fallback=self.options.flat_attention == "auto")
        no_gradients = self.why_no_gradients(model) if trains else ""
        with self.in_precision(), upstream.checkpointing(base, kwargs) if recomputes else nullcontext():
            key = self._key(base, model, route, repr(routes), trains, no_gradients, recomputes and repr(kwargs))
            record = self._recalled(key)
            self.days.append(record.day if record else "")
            if record is not None:
                result, *failed = record.results
                FlatModel.install(base, result.route)
            else:
                with shown(f"{type(base).__name__}: padding-free against single rows", self._shows) as tell:
                    result, failed = prove(
                        base,
                        route,
                        routes=routes,
                        call=model,
                        agree=self.all_agree,
                        trains=trains,
                        no_gradients=no_gradients,
                        tell=tell,
                    )
                self.earlier.keep(key, [result, *failed])
        if failed:
            listed = "".join(f"\n    {other}" for other in failed)
            self.say(f"{type(base).__name__} trains with {result}. Faster ways failed the start-up check:{listed}")
        return result

    @property
    def _shows(self) -> bool:
        return self.accelerator.is_main_process and not self.args.disable_tqdm

    def _key(self, base: PreTrainedModel, model: torch.nn.Module, route: Route, *settings: object) -> str:
        """The key of a verdict, for [`Verdicts`]."""
        flat_model = vars(base).get(ATTRIBUTE)
        peers = "" if flat_model is None else flat_model.peers.name
        together = self.accelerator.distributed_type, peers
        precision = compute_dtype(base), rounding_unit(base)
        return self.earlier.key(base, model, route, *precision, *together, *settings)

    def _recalled(self, key: str) -> Record | None:
        """What was found under a key, if all processes have found the same."""
        record = self.earlier.recall(key)
        routes = "" if record is None else repr([result.route for result in record.results])
        found = self._gathered(crc32(routes.encode()))
        return record if found.all() and (found == found[0]).all() else None

    def why_no_gradients(self, model: torch.nn.Module) -> str:
        """Why an engine cannot compute gradients of a model before training; empty if it can, or without an engine."""
        engine = self.accelerator.distributed_type
        if engine == DistributedType.DEEPSPEED and self.accelerator.unwrap_model(model) is not model:
            return "DeepSpeed computes whole backward passes only"
        if engine == DistributedType.FSDP and not self.accelerator.is_fsdp2:
            return "FSDP1 computes whole backward passes only"
        return ""

    def base_of(self, model: torch.nn.Module) -> PreTrainedModel:
        return base_of(self.accelerator, model)

    def all_agree(self, verdict: bool) -> bool:
        """Whether the verdict is positive on all processes, which have to take the same route."""
        return bool(self._gathered(verdict).all())

    def _gathered(self, said: int) -> torch.Tensor:
        """What all processes say. Raises if the check of another one has raised an error, and says so."""
        found = gather(torch.tensor([int(said)], device=self.accelerator.device))
        if said != _ERROR and (found == _ERROR).any():
            raise _FailedElsewhereError("The start-up check failed on another process, whose message says why.")
        return found

    @contextmanager
    def failing_together(self, models: Models) -> Iterator[None]:
        """Within this context, an error on one process ends all: the others would wait for its verdict forever."""
        try:
            yield
            self.all_agree(True)
        except (_FailedElsewhereError, OthersWaitError):
            raise
        except Exception as error:
            for model in models:
                raise_if_weights_are_awaited(self.base_of(model), error)
            self._gathered(_ERROR)
            raise
